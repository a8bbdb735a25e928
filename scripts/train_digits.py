"""Trains the digits classifier that is bundled with stagecert, and writes everything around it.

    python scripts/train_digits.py

Writes the model, test images and properties into src/stagecert/digits. Needs scikit-learn, which
has the images. The same numbers come out on every run on one machine.
"""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

FOLDER = Path(__file__).resolve().parent.parent / "src" / "stagecert" / "digits"
SIZES = (64, 64, 64, 10)
RADIUS = 0.03  # the network is trained on images that were moved this far
TRAINED_ON = 1497  # images; the other 300 are for testing


def forward(layers, x):
    """Logits for images of 64 pixels."""
    for weights, bias in layers[:-1]:
        x = jax.nn.relu(x @ weights + bias)
    return x @ layers[-1][0] + layers[-1][1]


def loss(layers, x, labels):
    """Mean cross entropy with a little weight decay."""
    logs = jax.nn.log_softmax(forward(layers, x))
    decay = sum(jnp.sum(weights**2) for weights, _ in layers)
    return -jnp.mean(logs[jnp.arange(len(labels)), labels]) + 2e-4 * decay


@jax.jit
def adversarial(layers, x, labels, key):
    """Images within RADIUS that the network finds hard."""
    low, high = jnp.maximum(x - RADIUS, 0), jnp.minimum(x + RADIUS, 1)
    x = jnp.clip(x + jax.random.uniform(key, x.shape, minval=-RADIUS, maxval=RADIUS), low, high)
    for _ in range(5):
        x = jnp.clip(x + RADIUS / 3 * jnp.sign(jax.grad(loss, 1)(layers, x, labels)), low, high)
    return x


@jax.jit
def step(layers, moments, count, x, labels):
    """One step of Adam."""
    slopes = jax.grad(loss)(layers, x, labels)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], slopes)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, moments[1], slopes)
    layers = jax.tree.map(
        lambda w, m, v: (
            w - 2e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
        ),
        layers,
        first,
        second,
    )
    return layers, (first, second)


def train(images, labels, epochs=60, batch=64):
    """The layers ((weights, bias), ...) after training."""
    draw = np.random.default_rng(0)
    layers = [
        (draw.normal(size=(n, m)).astype(np.float32) * np.float32(np.sqrt(2 / n)),
         np.zeros(m, np.float32))
        for n, m in itertools.pairwise(SIZES)
    ]  # fmt: skip
    zeros = jax.tree.map(np.zeros_like, layers)
    moments, key, count = (zeros, zeros), jax.random.key(0), 0
    for _ in range(epochs):
        order = draw.permutation(len(images))
        for begin in range(0, len(order) - batch + 1, batch):
            some = order[begin : begin + batch]
            key, now = jax.random.split(key)
            count += 1
            x = adversarial(layers, images[some], labels[some], now)
            layers, moments = step(layers, moments, float(count), x, labels[some])
    return jax.tree.map(np.asarray, layers)


def export(layers) -> onnx.ModelProto:
    """The network as an ONNX model: images of 1 x 8 x 8 pixels to ten logits."""
    nodes = [helper.make_node("Flatten", ["image"], ["x0"], axis=1)]
    weights = []
    for k, (w, b) in enumerate(layers):
        weights += [numpy_helper.from_array(w, f"w{k}"), numpy_helper.from_array(b, f"b{k}")]
        last = k == len(layers) - 1
        out = "logits" if last else f"y{k}"
        nodes.append(helper.make_node("Gemm", [f"x{k}", f"w{k}", f"b{k}"], [out]))
        if not last:
            nodes.append(helper.make_node("Relu", [out], [f"x{k + 1}"]))
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def declared() -> str:
    """The declarations of a property of this network."""
    names = [f"X_{k}" for k in range(64)] + [f"Y_{k}" for k in range(10)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


def boxed(low, high) -> str:
    """The assertions that pixels lie between `low` and `high`."""
    return "".join(
        f"(assert (>= X_{k} {a:.6f}))\n(assert (<= X_{k} {b:.6f}))\n"
        for k, (a, b) in enumerate(zip(low.reshape(-1), high.reshape(-1), strict=True))
    )


def another_class(label: int) -> str:
    """The assertion that some other class is at least as likely: what must not happen."""
    cases = "\n".join(f"  (and (>= Y_{k} Y_{label}))" for k in range(10) if k != label)
    return f"(assert (or\n{cases}\n))\n"


def moved(image, label: int, radius: float) -> str:
    """The property that the label stays the same while every pixel moves by up to `radius`."""
    box = boxed(np.maximum(image - radius, 0), np.minimum(image + radius, 1))
    return (
        f"; A {label} stays a {label} while every pixel moves by up to {radius}.\n"
        + declared() + box + another_class(label)
    )  # fmt: skip


def ahead(image, label: int, radius: float, other: int, lead: float) -> str:
    """The property that a label stays ahead of another one by some lead."""
    box = boxed(np.maximum(image - radius, 0), np.minimum(image + radius, 1))
    return (
        f"; A {label} stays ahead of {other} by {lead} while every pixel moves by up to {radius}.\n"
        + declared() + box + f"(assert (<= (- Y_{label} Y_{other}) {lead}))\n"
    )  # fmt: skip


def properties(images, labels) -> dict[str, str]:
    """A handful of properties about test images: file names and texts."""

    def around(index: int, radius: float) -> str:
        return moved(images[index], int(labels[index]), radius)

    return {
        "a-small-radius": around(2, 0.02),
        "b-larger-radius": around(12, 0.1),
        "c-ahead": ahead(images[5], int(labels[5]), 0.05, 9, 27.0),
        "d-violated": around(3, 0.05),
        "e-hard": around(1, 0.1),
    }


def main() -> None:
    """Trains, and writes all files."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    layers = train(images[:TRAINED_ON], labels[:TRAINED_ON])
    tests, truth = images[TRAINED_ON:], labels[TRAINED_ON:]
    right = np.argmax(forward(layers, tests), axis=1) == truth
    print(f"{np.mean(right):.1%} of {len(tests)} test images are classified correctly")
    (FOLDER / "digits.onnx").write_bytes(export(layers).SerializeToString())
    tests = tests.reshape(-1, 1, 8, 8)
    np.savez_compressed(FOLDER / "digits.npz", images=tests, labels=truth.astype(np.uint8))
    for name, text in properties(tests, truth).items():
        (FOLDER / f"{name}.vnnlib").write_text(text)


if __name__ == "__main__":
    main()
