"""Networks from PyTorch modules against PyTorch."""

import io

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("onnx")

import onnx  # noqa: E402
from exporters import SIZE, SPELLINGS, model_of  # noqa: E402
from torch import nn  # noqa: E402  # pyright: ignore[reportMissingImports]

from stagecert import networks  # noqa: E402
from stagecert.errors import ProblemError  # noqa: E402
from stagecert.networks import operations as op  # noqa: E402
from stagecert.networks.importers.torch import from_torch  # noqa: E402
from stagecert.verify import verify  # noqa: E402


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def agree(module, *shapes):
    """Checks a network against its module at random points; returns the network."""
    example = tuple(torch.zeros(1, *shape) for shape in shapes)
    net = from_torch(module, example[0] if len(shapes) == 1 else example)
    points = tuple(2 * torch.randn(5, *shape) for shape in shapes)
    modes = [part.training for part in module.modules()]
    module.eval()
    with torch.no_grad():
        wanted = module(*points)
    for part, mode in zip(module.modules(), modes, strict=True):
        part.training = mode
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    wanted = np.concatenate([y.numpy().reshape(5, -1) for y in wanted], axis=1)
    with jax.enable_x64(False):
        found = net(tuple(x.numpy() for x in points))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert net.input_shape == (shapes[0] if len(shapes) == 1 else shapes)
    return net


def kinds(net):
    return [n.operation.kind for n in net.nodes if isinstance(n.operation, op.Activation)]


def test_mlp_and_bounds():
    module = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    net = agree(module, (4,))
    assert kinds(net) == ["relu", "tanh"]
    low = np.random.default_rng(0).normal(size=(1, 4))
    found = networks.bound(net, low, low + 0.2)
    points = low + 0.2 * np.random.default_rng(1).uniform(size=(2000, 4))
    with torch.no_grad():
        values = module.eval()(torch.tensor(points, dtype=torch.float32)).numpy()
    assert np.all(found.bound[0] <= values.min(0) + 1e-5)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.last = nn.Linear(3 * 4 * 4, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = x + torch.relu(self.second(x))
        x = nn.functional.max_pool2d(x, 2)
        x = nn.functional.avg_pool2d(x, 3, stride=2, padding=1)
        x = self.up(x)
        return self.last(torch.flatten(x, 1)), nn.functional.adaptive_avg_pool2d(x, 1)


def test_cnn():
    module = Residual()
    for _ in range(3):  # running statistics that are not the first ones
        module(torch.randn(8, 2, 8, 8))
    assert kinds(agree(module, (2, 8, 8))) == ["relu", "relu"]


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.2),
    "prelu": nn.PReLU(3),
    "elu": nn.ELU(0.7),
    "selu": nn.SELU(),
    "celu": nn.CELU(0.7),
    "softplus": nn.Softplus(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "hard_sigmoid": nn.Hardsigmoid(),
    "hard_swish": nn.Hardswish(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "softsign": nn.Softsign(),
    "hardtanh": nn.Hardtanh(-0.5, 1.5),
    "relu6": nn.ReLU6(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    net = agree(nn.Sequential(nn.Linear(4, 3), ACTIVATIONS[name]), (4,))
    assert kinds(net) == [{"hardtanh": "clip", "relu6": "clip"}.get(name, name)]


def test_softplus_with_settings():
    assert kinds(agree(nn.Softplus(beta=3.0), (4,))) == ["softplus"]
    # A jump that can be seen.
    assert kinds(agree(nn.Softplus(threshold=1.0), (4,))) == ["reverting_softplus"]


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Softmax(-1), (4,)),
        (nn.LayerNorm(4), (4,)),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (3, 4)),
    ],
    ids=["softmax", "layer norm", "attention"],
)
def test_parts_of_transformers(module, shape):
    agree(module, shape)


def test_several_inputs():
    class Both(nn.Module):
        def forward(self, x, y):
            return torch.maximum(x, y[:, 0]) + torch.abs(x)

    agree(Both(), (3,), (2, 3))


def test_modes_are_left_alone():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    module[1].eval()
    agree(module, (4,))
    assert [part.training for part in module.modules()] == [True, True, False, True]


@pytest.mark.parametrize(
    ("module", "shape", "text"),
    [
        (nn.PixelShuffle(2), (4, 2, 2), "DepthToSpace"),
        (nn.Sequential(nn.PixelShuffle(2), nn.PixelShuffle(2)), (16, 2, 2), "2 nodes"),
    ],
    ids=["one", "both"],
)
def test_refused(module, shape, text):
    with pytest.raises(ProblemError, match=text):
        from_torch(module, torch.zeros(1, *shape))


def test_what_cannot_be_exported():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    module = Branch()
    with pytest.raises(ProblemError, match="cannot export"):
        from_torch(module, torch.zeros(1, 3))
    assert module.training


def test_an_example_of_another_size_is_told_in_a_line(capfd):
    with pytest.raises(ProblemError, match=r"fails on the example, of shape \(1, 5\): .*1x5"):
        from_torch(nn.Linear(3, 2), torch.zeros(1, 5))
    assert capfd.readouterr() == ("", "")


def test_bad_examples():
    module = nn.Linear(3, 2)
    for example, text in [
        (torch.zeros(3), "batch axis"),
        (torch.zeros(2, 3), "batch axis"),
        (torch.zeros(1, 3, dtype=torch.int32), "floating-point"),
        (np.zeros((1, 3)), "must be a tensor"),
        ((), "empty tuple"),
        (torch.zeros(1, 0), "empty"),
    ]:
        with pytest.raises(ProblemError, match=text):
            from_torch(module, example)
    with pytest.raises(ProblemError, match="Module"):
        from_torch(lambda x: x, torch.zeros(1, 3))


# How exporters are asked for what tests/networks/exporters.py writes down.
EXPORTERS = {
    "default": {"dynamo": True, "verbose": False},
    "unoptimised": {"dynamo": True, "verbose": False, "optimize": False},
    "script": {"dynamo": False, "opset_version": 17},
    "all": {"dynamo": False, "opset_version": 17},
    "opset 20": {"dynamo": True, "verbose": False, "opset_version": 20},
    "default, opset 18": {"dynamo": True, "verbose": False, "opset_version": 18},
    "script, opset 17": {"dynamo": False, "opset_version": 17},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about itself
@pytest.mark.parametrize("key", SPELLINGS, ids=" ".join)
def test_exporters_write_what_is_written_down(key):
    module = eval(f"nn.{key[0]}", {"nn": nn}).eval()
    file = io.BytesIO()
    torch.onnx.export(module, (torch.zeros(1, SIZE),), file, **EXPORTERS[key[1]])
    found, wanted = (
        sorted(node.op_type for node in model.graph.node if node.op_type != "Constant")
        for model in (onnx.load_from_string(file.getvalue()), model_of(key))
    )
    assert found == wanted


class Attention(nn.Module):
    """Two heads over three tokens, with a residual connection and a normalisation."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(24, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        h = self.embed(x)
        return self.last(self.norm(h + self.attention(h, h, h)[0]).flatten(1))


def small_cnn(activation, *last):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), activation, nn.Flatten(), nn.Linear(27, 3), *last
    )


WHOLE = {
    "softplus": lambda: small_cnn(nn.Softplus()),
    "gelu": lambda: small_cnn(nn.GELU()),
    "mish": lambda: small_cnn(nn.Mish()),
    "log_softmax": lambda: small_cnn(nn.ReLU(), nn.LogSoftmax(dim=1)),
    "attention": Attention,
    "encoder": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(12, 3)
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about itself
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_are_verified_from_both_exporters(name, dynamo, tmp_path):
    """From the file as PyTorch writes it, with weights beside it, to a checked answer."""
    module = WHOLE[name]().eval()
    x = torch.rand(1, 3, 4) if name in ("attention", "encoder") else torch.rand(1, 1, 8, 8)
    best = int(module(x).argmax())
    torch.onnx.export(module, (x,), tmp_path / "model.onnx", dynamo=dynamo, verbose=False)
    box = [
        f"(declare-const X_{k} Real) (assert (>= X_{k} {v - 1e-3:.6f}))"
        f" (assert (<= X_{k} {v + 1e-3:.6f}))"
        for k, v in enumerate(x.flatten().tolist())
    ]
    box += [f"(declare-const Y_{k} Real)" for k in range(3)]
    others = " ".join(f"(and (<= Y_{best} Y_{k}))" for k in range(3) if k != best)
    verdict = verify(tmp_path / "model.onnx", "\n".join([*box, f"(assert (or {others}))"]), 300)
    assert (verdict.answer, verdict.checked) == ("unsat", True)
    assert verdict.without == ("LogSoftmax" if name == "log_softmax" else None)
