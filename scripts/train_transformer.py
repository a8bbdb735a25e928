"""Trains the small transformer that is bundled with stagecert, and exports it from PyTorch.

    python scripts/train_transformer.py

Writes src/stagecert/digits/transformer.onnx. Needs PyTorch (`pip install stagecert[torch]`) and
scikit-learn, which has the images. Takes about a minute; the same numbers come out on every run on
one machine.
"""

from pathlib import Path

import numpy as np
import onnx
import torch
from sklearn.datasets import load_digits
from torch import nn

FOLDER = Path(__file__).resolve().parent.parent / "src" / "stagecert" / "digits"
RADIUS = 0.06  # the network is trained on images that were moved this far
TRAINED_ON = 1497  # images, as for digits.onnx; the other 300 are in digits.npz
WIDTH, HEADS, HIDDEN = 16, 2, 32


class Block(nn.Module):
    """Attention and a dense layer, each added to what it reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x):
        """One step for all tokens."""
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dense(self.second(x))


class Transformer(nn.Module):
    """Images of 1 x 8 x 8 pixels as four patches, a block of attention, ten logits."""

    def __init__(self, blocks: int = 1):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=4, stride=4)
        self.places = nn.Parameter(0.1 * torch.randn(1, 4, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.logits = nn.Linear(4 * WIDTH, 10)

    def forward(self, image):
        """Logits for images."""
        x = self.patches(image).flatten(2).transpose(1, 2) + self.places
        return self.logits(self.blocks(x).flatten(1))


def adversarial(model, x, labels):
    """Images within RADIUS that the network finds hard."""
    low, high = torch.clamp(x - RADIUS, 0, 1), torch.clamp(x + RADIUS, 0, 1)
    y = x + RADIUS * (2 * torch.rand_like(x) - 1)
    for _ in range(3):
        y = torch.clamp(y, low, high).detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(y), labels), y)
        y = y + RADIUS / 2 * slope.sign()
    return torch.clamp(y, low, high).detach()


def train(images, labels, epochs: int = 40, batch: int = 64) -> Transformer:
    """The model after training."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = Transformer()
    steps = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.3)
    for _ in range(epochs):
        for some in torch.randperm(len(images)).split(batch):
            x = adversarial(model, images[some], labels[some])
            loss = nn.functional.cross_entropy(model(x), labels[some])
            steps.zero_grad()
            loss.backward()
            steps.step()
    return model.eval()


def export(model: Transformer, file: Path) -> None:
    """Writes the model as PyTorch exports it, without what it notes about the sources."""
    program = torch.onnx.export(
        model,
        (torch.zeros(1, 1, 8, 8),),
        input_names=["image"],
        output_names=["logits"],
        dynamo=True,
    )
    assert program is not None
    proto = program.model_proto
    del proto.metadata_props[:]
    for part in (proto.graph, *proto.graph.node, *proto.graph.initializer, *proto.graph.value_info):
        del part.metadata_props[:]
        part.doc_string = ""
    for end in (*proto.graph.input, *proto.graph.output):
        del end.metadata_props[:]
    del proto.graph.value_info[:]
    onnx.checker.check_model(proto, full_check=True)
    file.write_bytes(proto.SerializeToString(deterministic=True))


def main() -> None:
    """Trains, and writes the model."""
    pixels, names = load_digits(return_X_y=True)
    images = torch.from_numpy((pixels / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(names.astype(np.int64))
    model = train(images[:TRAINED_ON], labels[:TRAINED_ON])
    with torch.no_grad():
        right = model(images[TRAINED_ON:]).argmax(1) == labels[TRAINED_ON:]
    print(f"{right.float().mean():.1%} of {len(right)} test images are classified correctly")
    export(model, FOLDER / "transformer.onnx")


if __name__ == "__main__":
    main()
