"""ONNX models against onnxruntime: every operator, the forms it had over the opsets, refusals."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from stagecert.errors import ProblemError
from stagecert.networks.importers.onnx.model import describe, load, supported
from stagecert.problem import as_arrays

NEWEST = onnx.defs.onnx_opset_version()
# What this onnxruntime runs; newer opsets are compared with onnx's own reference.
NEWEST_RUN = 23
DRAW = np.random.default_rng(0)
START = DRAW.bit_generator.state


@pytest.fixture(autouse=True)
def _same_numbers():
    """Every test draws the same numbers, whatever ran before it."""
    DRAW.bit_generator.state = START


def draw(*shape, dtype: Any = np.float32):
    return DRAW.normal(size=shape).astype(dtype)


def ints(*numbers):
    return np.array(numbers, np.int64)


class Graph:
    """A model under construction; outputs that nothing reads are the outputs of the model."""

    def __init__(self, opset, dtype=TensorProto.FLOAT, **inputs):
        self.opset, self.dtype, self.inputs = opset, dtype, inputs
        self.nodes, self.initializers, self.made, self.read = [], [], [], set()

    def weight(self, array):
        name = f"w{len(self.initializers)}"
        proto = array if isinstance(array, TensorProto) else numpy_helper.from_array(array)
        copy = TensorProto()
        copy.CopyFrom(proto)
        copy.name = name
        self.initializers.append(copy)
        return name

    def __call__(self, operator, *arguments, outputs=1, domain="", **attributes):
        names = [
            "" if a is None else a if isinstance(a, str) else self.weight(a) for a in arguments
        ]
        self.read.update(names)
        made = [f"v{len(self.made) + k}" for k in range(outputs)]
        self.made.extend(made)
        self.nodes.append(
            helper.make_node(
                operator,
                names,
                made,
                name=f"node_{len(self.nodes)}",
                domain=domain,
                **attributes,
            )
        )
        return made[0] if outputs == 1 else made

    def model(self, outputs=None):
        inputs = [helper.make_tensor_value_info(k, self.dtype, s) for k, s in self.inputs.items()]
        names = outputs or [name for name in self.made if name not in self.read]
        results = [onnx.ValueInfoProto(name=name) for name in names]
        for result in results:
            result.type.tensor_type.elem_type = self.dtype
        graph = helper.make_graph(self.nodes, "graph", inputs, results, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        model.ir_version = min(model.ir_version, 10)
        return model


def single(network):
    """All weights in float32."""
    return jax.tree.map(
        lambda w: np.asarray(w, np.float32) if np.issubdtype(w.dtype, np.floating) else w, network
    )


def runner(model) -> Callable[[list], Any]:
    """A function from a list of inputs to the list of outputs."""
    names = [i.name for i in model.graph.input]
    # A file may import other domains too (tf2onnx names "ai.onnx.ml"); the operators' own is "".
    (opset,) = {o.version for o in model.opset_import if o.domain in ("", "ai.onnx")}
    if opset > NEWEST_RUN:
        reference = ReferenceEvaluator(model)
        return lambda xs: reference.run(None, dict(zip(names, xs, strict=True)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [i.name for i in session.get_inputs()]
    return lambda xs: session.run(None, dict(zip(names, xs, strict=True)))


def agree(source, *, model=None, points=3, spread=2.0, rtol=1e-5, **options):
    """The network computes what onnxruntime computes, point by point."""
    model = model or (source.model() if isinstance(source, Graph) else source)
    network = single(load(source.model() if isinstance(source, Graph) else source, **options))
    shapes = zip(network.input_shapes, network.hidden_axis, strict=True)
    inputs = []
    for shape, hidden in shapes:
        x = DRAW.normal(size=(points, *(shape[1:] if hidden else shape))) * spread
        inputs.append(x.astype(np.float32))
    ours = np.asarray(network(tuple(inputs)))
    assert ours.dtype == np.float32
    run = runner(model)
    for k in range(points):
        point = [x[k].reshape(s) for x, s in zip(inputs, network.input_shapes, strict=True)]
        start = 0
        for name, truth in zip([o.name for o in model.graph.output], run(point), strict=True):
            truth = np.asarray(truth)
            part = ours[k, start : start + truth.size].reshape(truth.shape)
            start += truth.size
            (node,) = [n for n in model.graph.node if name in n.output] or [None]
            # Sums that cancel are as precise as what they add up.
            scale = max(np.abs(truth).max(), spread)
            np.testing.assert_allclose(part, truth, atol=rtol * scale, rtol=rtol, err_msg=str(node))
        assert start == ours.shape[1]
    return network


def kinds(network):
    """The activations and maxima of a network, in order."""
    names = [getattr(node.operation, "kind", node.operation.label) for node in network.nodes]
    linear = "matmul conv scale sum reshape broadcast transpose slice take concat pad reduce shift"
    return [n for n in names if n not in [*linear.split(), "window sum"]]


def refusal(graph, **options):
    with pytest.raises(ProblemError) as info:
        load(graph.model() if isinstance(graph, Graph) else graph, **options)
    return str(info.value)


@pytest.mark.parametrize("opset", [7, 9, 13, 17, NEWEST])
def test_arithmetic(opset):
    g = Graph(opset, x=["batch", 3, 4])
    for c in (draw(4), draw(3, 1), draw(1, 3, 4), np.float32(2.5), draw(5, 1, 3, 4)):
        c = np.asarray(c)
        g("Add", "x", c)
        g("Add", c, "x")
        g("Sub", "x", c)
        g("Sub", c, "x")
        g("Mul", "x", c)
        g("Mul", c, "x")
        g("Div", "x", c)
    y = g("Neg", "x")
    g("Add", "x", y)
    z = g("Mul", "x", draw(3, 1))
    g("Sub", "x", z)
    g("Sub", g("Identity", "x"), g("Dropout", g("Neg", z)))
    g("Neg", y)
    g("Pow", "x", np.float32(1))
    if opset > 7:
        g("Sum", "x", z, draw(3, 4), draw(4), "x")
        g("Mean", "x", z, draw(3, 4))
    g("Sum", "x")
    g("Mean", "x")
    agree(g)


def test_two_scalings_that_cancel_leave_nothing():
    g = Graph(17, x=["batch", 3])
    g("Div", g("Mul", "x", np.float32(4)), np.float32(4))
    assert len(agree(g).nodes) == 0


@pytest.mark.parametrize("opset", [9, 11, 13, NEWEST])
def test_matmul_and_gemm(opset):
    g = Graph(opset, x=["batch", 4])
    g("MatMul", "x", draw(4, 3))
    g("Gemm", "x", draw(4, 3), draw(3))
    g("Gemm", "x", draw(3, 4), draw(1, 3), transB=1)
    g("Gemm", "x", draw(3, 4), draw(1), transB=1, alpha=0.5, beta=-2.0)
    g("Gemm", "x", draw(1, 3), draw(3), transA=1)
    g("Gemm", "x", draw(1, 3), np.float32(0.5), transA=1, beta=0.0)
    g("Gemm", draw(5, 1), "x", draw(5, 4), alpha=2.0)
    g("Gemm", "x", draw(4, 4), "x", beta=0.5)
    g("Gemm", draw(1, 3), draw(3, 4), "x", alpha=0.5, beta=3.0)
    if opset >= 11:
        g("Gemm", "x", draw(4, 3))
        g("Gemm", draw(4, 5), "x", transA=1, transB=1)
    agree(g)


def test_matmul_with_many_axes():
    g = Graph(17, x=["batch", 2, 3, 4])
    g("MatMul", "x", draw(4, 5))
    g("MatMul", "x", draw(2, 4, 5))
    g("MatMul", "x", draw(4))
    g("MatMul", draw(5, 3), "x")
    g("MatMul", draw(2, 5, 3), "x")
    g("MatMul", draw(3), "x")
    agree(g)
    g = Graph(17, x=[4])
    g("MatMul", "x", draw(4, 5))
    g("MatMul", draw(5, 4), "x")
    agree(g)


@pytest.mark.parametrize("opset", [9, 11, 22])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_conv(rank, opset):
    g = Graph(opset, x=["batch", 4, *(7, 6, 5)[:rank]])
    kernel = (3, 2, 3)[:rank]
    some = (2, 1, 3)[:rank]
    g("Conv", "x", draw(5, 4, *kernel), draw(5), kernel_shape=kernel)
    g("Conv", "x", draw(5, 4, *kernel), strides=some, pads=(1, 0, 2, 2, 1, 0)[: 2 * rank])
    g("Conv", "x", draw(4, 2, *kernel), dilations=(2, 2, 1)[:rank], group=2)
    g("Conv", "x", draw(8, 1, *kernel), draw(8), group=4)
    g("Conv", "x", draw(2, 4, *(1,) * rank), draw(2), pads=[1] * rank + [2] * rank)
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        g("Conv", "x", draw(2, 4, *kernel), strides=some, auto_pad=auto)
    agree(g)


@pytest.mark.parametrize("opset", [9, 11, 22])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_conv_transpose(rank, opset):
    g = Graph(opset, x=["batch", 4, *(4, 3, 3)[:rank]])
    kernel, some = (3, 2, 3)[:rank], (2, 3, 2)[:rank]
    g("ConvTranspose", "x", draw(4, 5, *kernel), draw(5), kernel_shape=kernel)
    g("ConvTranspose", "x", draw(4, 5, *kernel), strides=some)
    pads = [1, 0, 1][:rank] + [2, 1, 0][:rank]
    extra = (1, 2, 1)[:rank]
    g("ConvTranspose", "x", draw(4, 3, *kernel), strides=some, pads=pads, output_padding=extra)
    g("ConvTranspose", "x", draw(4, 3, *kernel), draw(6), group=2, dilations=(2, 1, 2)[:rank])
    # More padding than the windows overlap; XLA's own negative padding gave wrong numbers.
    g("ConvTranspose", "x", draw(4, 3, *(2,) * rank), pads=[2] * rank + [0] * rank)
    shape = [2 * n - 1 + n % 2 for n in (4, 3, 3)[:rank]]
    g("ConvTranspose", "x", draw(4, 2, *kernel), strides=[2] * rank, output_shape=shape)
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        g("ConvTranspose", "x", draw(4, 2, *kernel), strides=[2] * rank, auto_pad=auto)
    agree(g)


@pytest.mark.parametrize("opset", [9, 10, 11, 19, 22])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pools(rank, opset):
    g = Graph(opset, x=["batch", 2, *(7, 6, 5)[:rank]])
    kernel, some = (3, 2, 3)[:rank], (2, 2, 3)[:rank]
    pads = [1, 0, 1][:rank] + [1, 1, 0][:rank]
    for operator in ("AveragePool", "MaxPool"):
        g(operator, "x", kernel_shape=kernel)
        g(operator, "x", kernel_shape=kernel, strides=some, pads=pads)
        for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
            g(operator, "x", kernel_shape=kernel, strides=some, auto_pad=auto)
        if opset >= 10:
            g(operator, "x", kernel_shape=kernel, strides=some, ceil_mode=1)
            g(operator, "x", kernel_shape=kernel, strides=some, ceil_mode=1, pads=pads)
        if opset >= (10 if operator == "MaxPool" else 19):
            g(operator, "x", kernel_shape=kernel, dilations=[2] * rank, pads=[1] * (2 * rank))
    g("AveragePool", "x", kernel_shape=kernel, strides=some, pads=pads, count_include_pad=1)
    if opset >= 19:
        same: dict[str, Any] = dict(strides=some, pads=pads, ceil_mode=1, count_include_pad=1)
        g("AveragePool", "x", kernel_shape=kernel, **same)
    g("GlobalAveragePool", "x")
    g("GlobalMaxPool", "x")
    agree(g)


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_batch_normalization(opset):
    for shape in ([3], [3, 4], [3, 2, 2]):
        g = Graph(opset, x=["batch", *shape])
        numbers = draw(3), draw(3), draw(3), np.abs(draw(3)) + 0.1
        g("BatchNormalization", "x", *numbers)
        g("BatchNormalization", "x", *numbers, epsilon=0.1, momentum=0.5)
        network = agree(g)
        assert {node.weights.dtype.name for node in network.nodes} == {"float32"}
        scales: list[Any] = [n for n in load(g.model()).nodes if n.operation.label == "scale"]
        assert [(n.weights.dtype.name, n.operation.loose) for n in scales] == [("float64", 4)] * 2


@pytest.mark.parametrize("opset", [9, 11, 13, 18, 19, 23])
def test_pad(opset):
    g = Graph(opset, x=["batch", 2, 4, 5])

    def pad(widths, value=None, axes=None, **attributes):
        if opset < 11:
            value = {} if value is None else {"value": value}
            g("Pad", "x", pads=widths, **value, **attributes)
        else:
            value = None if value is None else np.float32(value)
            further = [] if axes is None else [ints(*axes)]
            inputs = [ints(*widths), np.asarray(value) if value is not None else None, *further]
            g("Pad", "x", *inputs, **attributes)

    pad([0, 0, 1, 2, 0, 0, 0, 1])
    pad([0, 0, 1, 2, 0, 3, 0, 1], 1.5)
    pad([0, 0, -1, 2, 0, 1, 1, -1], -0.5)
    pad([0, 0, 0, 0, 0, 0, 0, 0], 2.0)
    for mode in ("reflect", "edge", *(["wrap"] if opset >= 19 else [])):
        pad([0, 0, 2, 1, 0, 0, 3, 4], mode=mode)
    if opset >= 18:
        pad([1, 2, 0, 1], 0.5, axes=[-1, 1])
        pad([1, 2], axes=[2], mode="edge")
    agree(g)


@pytest.mark.parametrize("opset", [9, 11, 13, 14, NEWEST])
def test_shapes(opset):
    g = Graph(opset, x=["batch", 2, 1, 6])
    for axis in (0, 1, 2, 4, *([-1] if opset >= 11 else [])):
        g("Flatten", "x", axis=axis)
    for shape in ([-1], [1, 12], [0, -1], [0, 3, 0, -1], [0, 0, -1, 0], [1, 2, 1, 6, 1]):
        g("Reshape", "x", ints(*shape))
    if opset >= 14:
        g("Reshape", "x", ints(1, -1, 3), allowzero=1)
    g("Transpose", "x")
    g("Transpose", "x", perm=[0, 3, 1, 2])
    if opset >= 13:
        g("Squeeze", "x", ints(2))
        g("Squeeze", "x", ints(-2))
        g("Unsqueeze", "x", ints(1, 5))
        g("Unsqueeze", "x", ints(-1))
    else:
        g("Squeeze", "x", axes=[2])
        g("Unsqueeze", "x", axes=[1, 5])
    g("Squeeze", "x")
    g("Expand", "x", ints(3, 1, 1, 5, 1)) if opset >= 8 else None
    g("Expand", "x", ints(3, 1))
    g("Tile", "x", ints(1, 2, 3, 1))
    g("Concat", "x", g("Neg", "x"), axis=1)
    g("Concat", "x", "x", draw(1, 2, 1, 2), axis=3)
    g("Concat", draw(1, 2, 3, 6), "x", draw(1, 2, 1, 6), draw(1, 2, 1, 6), "x", axis=2)
    g("Concat", "x", axis=0)
    g("Gather", "x", ints(3, 0, 0), axis=3)
    g("Gather", "x", np.array([[1, 0], [0, 1]], np.int32), axis=1)
    g("Gather", "x", np.array(0), axis=0)
    g("Cast", "x", to=TensorProto.FLOAT)
    if opset >= 11:
        g("Concat", "x", "x", axis=-2)
        g("Gather", "x", ints(-1, 2), axis=-1)
    if opset >= 15:
        g("CastLike", "x", draw(1))
    agree(g)


@pytest.mark.parametrize("opset", [9, 10, 11, 13, NEWEST])
def test_slice(opset):
    g = Graph(opset, x=["batch", 4, 6])
    large = 2**63 - 1
    cases = [
        ([1], [3], [1], None),
        ([0, 1], [1, 4], None, None),
        ([1, -4], [1000, -1], [1, 2], None),
        ([0], [large], [2], None),
        ([1, 0], [4, 6], [1, 2], [2, 3]),
        ([-1], [-large], [2], [-1]),
        ([3, 5], [0, 1], [1, 2], [-2, -3]),
        ([-2], [-6], [-1], [-2]),
    ]
    for starts, ends, axes, steps in cases:
        if opset >= 10:
            rest = [None if axes is None else ints(*axes)]
            rest += [] if steps is None else [ints(*steps)]
            g("Slice", "x", ints(*starts), ints(*ends), *rest)
        elif steps is None:
            g("Slice", "x", starts=starts, ends=ends, **({} if axes is None else {"axes": axes}))
    agree(g)


@pytest.mark.parametrize("opset", [9, 11, 13, 18, NEWEST])
def test_split(opset):
    g = Graph(opset, x=["batch", 6, 7])
    if opset < 13:
        g("Split", "x", outputs=2, axis=1, split=[2, 4])
    else:
        g("Split", "x", ints(2, 4), outputs=2, axis=1)
    if opset < 18:
        g("Split", "x", outputs=3, axis=1)
    else:
        g("Split", "x", outputs=3, axis=1, num_outputs=3)
        g("Split", "x", outputs=3, axis=-1, num_outputs=3)
    agree(g)


@pytest.mark.parametrize("opset", [9, 11, 13, 18, 20, NEWEST])
@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"])
def test_reductions(operator, opset):
    g = Graph(opset, x=["batch", 3, 2, 4])
    as_input = opset >= (13 if operator == "ReduceSum" else 18)
    for axes in ([1], [1, 3], [2], *([[-1, 1]] if opset >= 11 else [])):
        for keepdims in (0, 1):
            if as_input:
                g(operator, "x", ints(*axes), keepdims=keepdims)
            else:
                g(operator, "x", axes=axes, keepdims=keepdims)
    g(operator, "x")
    g(operator, "x", keepdims=0)
    if as_input:
        g(operator, "x", noop_with_empty_axes=1)
        g(operator, "x", ints())
    agree(g)


@pytest.mark.parametrize("opset", [8, 11, 13, NEWEST])
def test_max_and_min(opset):
    g = Graph(opset, x=["batch", 3, 4])
    y = g("Mul", "x", draw(3, 4))
    z = g("ReduceSum", "x", ints(2)) if opset >= 13 else g("ReduceSum", "x", axes=[2])
    for operator in ("Max", "Min"):
        g(operator, "x", y)
        g(operator, "x", y, z, y)
        g(operator, "x", np.float32(0.3) * np.ones(1, np.float32))
        g(operator, np.float32(0) * np.ones((), np.float32), "x")
        g(operator, "x", draw(3, 1))
        g(operator, draw(4), "x", draw(5, 1, 1, 4), y)
        g(operator, "x", draw(2, 1, 1, 1))
        g(operator, "x")
    network = agree(g)
    assert {"max", "relu", "clip"} == set(kinds(network))


PLAIN = [
    ("Relu", 9, {}, "relu"),
    ("LeakyRelu", 9, {}, "leaky_relu"),
    ("LeakyRelu", 16, {"alpha": 0.3}, "leaky_relu"),
    ("Elu", 9, {}, "elu"),
    ("Elu", 22, {"alpha": 0.5}, "elu"),
    ("Selu", 9, {}, "selu"),
    ("Selu", 9, {"alpha": 1.5, "gamma": 2.0}, "selu"),
    ("Celu", 12, {}, "celu"),
    ("Celu", 12, {"alpha": 2.0}, "celu"),
    ("Softplus", 9, {}, "softplus"),
    ("Sigmoid", 9, {}, "sigmoid"),
    ("Tanh", 9, {}, "tanh"),
    ("HardSigmoid", 9, {}, "hard_sigmoid"),
    ("HardSigmoid", 9, {"alpha": 0.3, "beta": 0.4}, "hard_sigmoid"),
    ("HardSwish", 14, {}, "hard_swish"),
    ("Gelu", 20, {}, "gelu"),
    ("Gelu", 20, {"approximate": "tanh"}, "gelu_tanh"),
    ("Mish", 18, {}, "mish"),
    ("Softsign", 9, {}, "softsign"),
    ("Abs", 9, {}, "abs"),
    ("Exp", 9, {}, "exp"),
    ("Swish", 24, {}, "silu"),
    ("Swish", 24, {"alpha": 1.7}, "silu"),
]


@pytest.mark.parametrize(
    "opset", sorted({opset for _, opset, _, _ in PLAIN}), ids=lambda n: f"opset {n}"
)
def test_activations(opset):
    g = Graph(opset, x=["batch", 10])
    cases = [(o, a, k) for o, n, a, k in PLAIN if n == opset]
    for operator, attributes, _ in cases:
        g(operator, "x", **attributes)
    network = agree(g, points=20, spread=3.0)
    assert kinds(network) == [kind for _, _, kind in cases]


@pytest.mark.parametrize("opset", [9, 16])
def test_prelu(opset):
    g = Graph(opset, x=["batch", 3, 4])
    for slope in (draw(3, 1), draw(1), draw(3, 4), draw(4)):
        g("PRelu", "x", np.abs(slope) / 5)
    assert kinds(agree(g)) == ["prelu"] * 4


@pytest.mark.parametrize("opset", [9, 11, 13])
def test_clip(opset):
    g = Graph(opset, x=["batch", 10])
    for low, high in ((-0.5, 1.0), (None, 0.5), (-0.3, None), (0.0, None), (0.0, 6.0)):
        if opset < 11:
            ends = {"min": low, "max": high}
            given: dict[str, Any] = {k: v for k, v in ends.items() if v is not None}
            g("Clip", "x", **given)
        else:
            g("Clip", "x", *(None if v is None else np.array(v, np.float32) for v in (low, high)))
    g("Clip", "x")
    network = agree(g)
    assert kinds(network) == ["clip", "clip", "clip", "relu", "clip"]
    assert dict(network.nodes[1].operation.settings) == {"low": -np.inf, "high": 0.5}


def test_squares():
    g = Graph(17, x=["batch", 4])
    g("Mul", "x", "x")
    g("Mul", "x", g("Identity", "x"))
    g("Pow", "x", np.float32(2) * np.ones((), np.float32))
    g("Pow", "x", ints(2))
    y = g("Add", "x", np.float32(1) * np.ones((), np.float32))
    g("Mul", y, y)
    g("Mul", g("Mul", "x", np.float32(3) * np.ones((), np.float32)), "x")
    network = agree(g)
    assert kinds(network) == ["square"] * 6


def number(x):
    return np.array(x, np.float32)


def _gelu_variants(g, x):
    def erf():
        return g("Erf", g("Div", x, number(np.sqrt(2))))

    yield g("Mul", g("Mul", x, g("Add", erf(), number(1))), number(0.5))
    yield g("Mul", g("Mul", x, number(0.5)), g("Add", number(1), erf()))
    yield g("Mul", x, g("Mul", number(0.5), g("Add", erf(), number(1))))
    erf2 = g("Erf", g("Mul", x, number(1 / np.sqrt(2))))
    yield g("Mul", g("Mul", g("Add", erf2, number(1)), number(0.5)), x)
    yield g("Div", g("Mul", x, g("Add", erf2, number(1))), number(2))


def test_gelu_spelt_out():
    g = Graph(17, x=["batch", 8])
    list(_gelu_variants(g, "x"))
    shifted = g("Add", "x", draw(8))
    list(_gelu_variants(g, shifted))
    network = agree(g, points=20)
    assert kinds(network) == ["gelu"] * 10
    # Around each there are two factors, because the constants are not quite 1 / sqrt(2) and 1 / 2;
    # two of the five ways to write it end with a factor of their own.
    assert len(network.nodes) == 1 + 10 * 3 + 2 * 2


def test_other_activations_spelt_out():
    g = Graph(17, x=["batch", 8])
    g("Mul", "x", g("Sigmoid", "x"))
    g("Mul", g("Sigmoid", g("Mul", "x", number(1.702))), "x")
    g("Mul", "x", g("HardSigmoid", "x", alpha=1 / 6, beta=0.5))
    six = g("Clip", g("Add", "x", number(3)), number(0), number(6))
    g("Div", g("Mul", "x", six), number(6))
    g("Mul", "x", g("Div", six, number(6)))
    g("Mul", six, g("Mul", "x", number(1 / 6)))
    g("Mul", "x", g("Tanh", g("Softplus", "x")))
    g("Log", g("Add", g("Exp", "x"), number(1)))
    g("Mul", g("Tanh", g("Log", g("Add", number(1), g("Exp", "x")))), "x")
    cubic = g("Add", "x", g("Mul", g("Pow", "x", number(3)), number(0.044715)))
    tanh = g("Tanh", g("Mul", cubic, number(np.sqrt(2 / np.pi))))
    g("Mul", g("Mul", "x", number(0.5)), g("Add", tanh, number(1)))
    shifted = g("Add", "x", number(0.1))
    g("Mul", shifted, g("Sigmoid", shifted))
    g("Div", "x", g("Add", g("Abs", "x"), number(1)))
    g("Div", shifted, g("Add", number(1), g("Abs", shifted)))
    network = agree(g, points=20)
    names = ["silu"] * 2 + ["hard_swish"] * 4 + ["mish", "softplus", "mish", "gelu_tanh", "silu"]
    assert kinds(network) == names + ["softsign"] * 2


def test_defaults_of_attributes_are_single_precision():
    """ONNX's attributes are float32: 0.01 is not 1/100, with or without being spelt out."""
    every: list[tuple[str, dict[str, Any]]] = [
        ("LeakyRelu", {"alpha": 0.01}),
        ("HardSigmoid", {"alpha": 0.2, "beta": 0.5}),
        ("Selu", {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}),
    ]
    for operator, defaults in every:
        settings = []
        for attributes in ({}, defaults):
            g = Graph(17, x=["batch", 4])
            g(operator, "x", **attributes)
            operation: Any = load(g.model()).nodes[0].operation
            settings.append(operation.settings)
        assert settings[0] == settings[1]
        assert dict(settings[0]) == {k: float(np.float32(v)) for k, v in defaults.items()}
    weights = []
    channels = [np.full(4, v, np.float32) for v in (1, 0, 0, 1e-6)]
    spelt: list[dict[str, Any]] = [{}, {"epsilon": 1e-5}]
    for attributes in spelt:
        g = Graph(17, x=["batch", 4])
        g("BatchNormalization", "x", *channels, **attributes)
        weights.append(load(g.model()).nodes[0].weights)
    np.testing.assert_array_equal(*weights)


def test_products_that_only_look_like_activations_are_products():
    g = Graph(17, x=["batch", 8])
    y = g("Mul", "x", draw(8))
    g("Mul", "x", g("Sigmoid", y))
    g("Mul", "x", g("HardSigmoid", "x", alpha=0.2, beta=0.4))
    g("Mul", "x", g("Clip", g("Add", "x", number(2.99)), number(0), number(6)))
    g("Mul", "x", g("Add", g("Sigmoid", "x"), number(0.1)))
    g("Mul", g("Add", "x", number(0.5)), g("Sigmoid", "x"))
    g("Mul", "x", g("Add", g("Erf", "x"), number(1.1)))
    g("Mul", "x", g("Tanh", "x"))
    g("Div", "x", g("Add", g("Abs", "x"), number(1.1)))
    g("Div", y, g("Add", g("Abs", "x"), number(1)))
    assert kinds(agree(g)).count("product") == 9
    g = Graph(17, x=["batch", 8])
    g("Log", g("Add", g("Exp", "x"), number(1.1)))
    g("Erf", "x")
    g("Pow", "x", number(3))
    assert kinds(agree(g)) == ["exp", "log", "erf", "power"]


def test_products_of_variables():
    g = Graph(17, x=["batch", 2, 3])
    y, z = g("Relu", "x"), g("ReduceSum", "x", ints(1))
    g("Mul", "x", y)
    g("Mul", z, y)
    g("Div", y, g("Add", g("Exp", z), number(1)))
    g("MatMul", y, g("Transpose", "x", perm=[0, 2, 1]))
    # A common factor makes a square of it: one activation, and a line.
    g("Mul", g("Add", "x", number(0.5)), g("Sub", number(2), g("Mul", "x", number(3))))
    found = kinds(agree(g))
    assert (found.count("product"), found.count("square")) == (4, 1)


def test_steps_and_waves():
    g = Graph(17, x=["batch", 8])
    for operator in ("Floor", "Ceil", "Round", "Sign", "Sin", "Cos"):
        g(operator, "x")
    away = g("Add", g("Abs", "x"), number(0.5))
    for operator in ("Log", "Sqrt", "Reciprocal"):
        g(operator, away)
    for exponent in (4, 5, 0.5, -1, -3):
        g("Pow", away, number(exponent))
    agree(g)


def test_constants():
    g = Graph(17, x=["batch", 6])
    value = numpy_helper.from_array(draw(6))
    c = g("Constant", value=value)
    for one in (
        c,
        g("Constant", value_float=0.5),
        g("Constant", value_floats=[0.5, 1, 2, 3, 4, 5]),
    ):
        g("Add", "x", one)
    shape = g("Constant", value_ints=[1, 2, 3])
    two = g("Constant", value_int=2)
    y = g("Reshape", "x", shape)
    g("Add", y, g("ConstantOfShape", shape))
    fill = numpy_helper.from_array(np.array([1.5], np.float32))
    g("Add", y, g("ConstantOfShape", shape, value=fill))
    g("Add", "x", g("Cast", g("Range", ints(1)[0], ints(7)[0], ints(1)[0]), to=TensorProto.FLOAT))
    g("Mul", "x", g("Sqrt", g("Exp", g("Sub", c, number(1)))))
    g("Gather", "x", g("Sub", two, ints(1)), axis=1)
    # What PyTorch writes for x.view(x.size(0), -1).
    length = g("Unsqueeze", g("Gather", g("Shape", y), np.array(0), axis=0), ints(0))
    g("Reshape", y, g("Concat", length, ints(-1), axis=0))
    g("Reshape", y, g("Shape", "x"))
    g("Reshape", y, g("Concat", g("Shape", y, start=0, end=1), ints(-1), axis=0))
    g("Expand", y, g("Where", np.array([True, False, False]), ints(4, 4, 4), ints(1)))
    agree(g)


def test_weights_are_kept_as_stored():
    g = Graph(17, x=["batch", 3])
    g("Add", "x", draw(3))
    (node,) = load(g.model()).nodes
    assert node.weights.dtype == np.float32
    g = Graph(17, TensorProto.DOUBLE, x=["batch", 3])
    c = draw(3, dtype=np.float64)
    g("Add", "x", c)
    (node,) = load(g.model()).nodes
    assert node.weights.dtype == np.float64
    assert (node.weights == c).all()
    g = Graph(17, TensorProto.FLOAT16, x=["batch", 3])
    g("Add", "x", draw(3).astype(np.float16))
    (node,) = load(g.model()).nodes
    assert node.weights.dtype == np.float32
    g = Graph(17, TensorProto.BFLOAT16, x=["batch", 3])
    g("Add", "x", helper.make_tensor("w", TensorProto.BFLOAT16, [3], [1.0, 2.5, -3.0]))
    (node,) = load(g.model()).nodes
    assert node.weights.dtype == np.float32
    assert node.weights.tolist() == [1.0, 2.5, -3.0]


def residual(opset=17, batch="batch"):
    g = Graph(opset, x=[batch, 3, 8, 8])
    y = g("Conv", "x", draw(4, 3, 3, 3) / 3, draw(4), pads=[1, 1, 1, 1])
    y = g("BatchNormalization", y, draw(4), draw(4), draw(4), np.abs(draw(4)) + 0.1)
    z = g("Relu", g("Conv", g("Relu", y), draw(4, 4, 3, 3) / 3, pads=[1, 1, 1, 1]))
    y = g("Add", y, z)
    y = g("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    y = g("Concat", y, g("AveragePool", "x", kernel_shape=[2, 2], strides=[2, 2]), axis=1)
    y = g("Gemm", g("Flatten", y), draw(112, 5) / 10, draw(5))
    g("Sub", y, g("Gemm", g("Flatten", "x"), draw(192, 5) / 10))
    return g


def test_residual_network_and_ways_to_give_it(tmp_path):
    model = residual().model()
    network = agree(model)
    data = model.SerializeToString()
    (tmp_path / "model.onnx").write_bytes(data)
    (tmp_path / "model.onnx.gz").write_bytes(gzip.compress(data))
    ways = [data, tmp_path / "model.onnx", str(tmp_path / "model.onnx.gz")]
    for source in ways:
        again = load(source)
        assert jax.tree.structure(again) == jax.tree.structure(network)
        pairs = zip(jax.tree.leaves(again), jax.tree.leaves(network), strict=True)
        assert all((np.asarray(a, np.float32) == b).all() for a, b in pairs)
    assert network.labels.nodes[0] == "Conv node_0"
    assert network.labels.inputs == ("x",)
    assert network.input_shape == (3, 8, 8)


def test_weights_in_another_file(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save_model(
        residual().model(), str(path), save_as_external_data=True, location="w", size_threshold=0
    )
    agree(path, model=onnx.load(str(path)))
    assert "keeps its numbers in another file" in refusal(path.read_bytes())
    (tmp_path / "w").unlink()
    assert "weights in another file" in refusal(path)


def test_several_inputs_and_outputs():
    g = Graph(17, x=["batch", 3], y=[1, 2], z=[4])
    a = g("Concat", "x", "y", axis=1)
    b = g("Relu", g("MatMul", a, draw(5, 4)))
    c = g("Add", b, "z")
    network = agree(g.model([b, c, "x", a]))
    assert network.input_shape == ((3,), (2,), (4,))
    assert network.hidden_axis == (True, True, False)
    assert network.labels.outputs == (b, c, "x", a)


def test_constant_output():
    g = Graph(17, x=["batch", 3])
    c = g("Mul", draw(2, 1), draw(2))
    d = g("Neg", "x")
    agree(g.model([d, c]))
    g = Graph(17, x=["batch", 3])
    assert "is constant" in refusal(g.model([g("Shape", "x")]))


def test_initializers_that_are_inputs_too():
    g = Graph(9, x=["batch", 3])
    g("Add", "x", draw(3))
    model = g.model()
    info = helper.make_tensor_value_info("w0", TensorProto.FLOAT, [3])
    model.graph.input.insert(0, info)
    network = load(model)
    assert network.labels.inputs == ("x",)


def test_local_functions_are_inlined():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        graph (float[N, 3] x) => (float[N, 3] y) {
            z = local.twice(x)
            y = Relu(z)
        }
        <domain: "local", opset_import: ["" : 17]>
        twice (a) => (b) { b = Add(a, a) }
        """)
    assert np.allclose(load(model)(np.array([[1.0, -1.0, 2.0]])), [[2, 0, 4]])


@pytest.mark.parametrize("shape", [[1, 3], ["N", 3], [None, 3], [0, 3]])
def test_batch_axis(shape):
    g = Graph(17, x=shape)
    g("Reshape", g("Relu", "x"), ints(1, 3, 1))
    network = load(g.model())
    assert network.hidden_axis == (True,)
    assert network.input_shape == (3,)
    if shape[0] == 1:
        assert load(g.model(), batched=False).input_shape == (1, 3)
        assert load(g.model(), batched=[False]).input_shape == (1, 3)
        agree(g, batched=False)
    else:
        assert "only a batch axis may be of unknown length" in refusal(g, batched=False)


def test_no_batch_axis():
    g = Graph(17, x=[3])
    g("MatMul", draw(2, 3), "x")
    assert agree(g).hidden_axis == (False,)
    g = Graph(17, x=[4, 3])
    g("Relu", g("MatMul", draw(2, 4), "x"))
    assert agree(g, batched=False).input_shape == (4, 3)
    assert agree(g).input_shape == (4, 3)  # a fixed first axis is part of the input
    assert "a fixed batch of 4" in refusal(g, batched=True)
    assert "has 2 entries for 1 inputs" in refusal(g, batched=[True, False])
    g = Graph(17, x=[])
    g("Add", "x", draw(2))
    assert load(g.model()).input_shape == ()
    assert "there is no batch axis" in refusal(g, batched=True)


def test_unknown_lengths():
    g = Graph(17, x=["batch", "length", 3])
    g("Relu", "x")
    assert "batch x length x 3" in refusal(g)
    assert "update_model_dims" in refusal(g)
    model = g.model()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert "has no shape" in refusal(model)


def test_batch_baked_into_a_reshape():
    g = Graph(17, x=["batch", 6])
    g("Reshape", "x", ints(2, 6))
    assert "batch of one" in refusal(g)


@pytest.mark.parametrize("opset", [6, NEWEST + 1])
def test_opsets_out_of_range(opset):
    g = Graph(opset, x=["batch", 3])
    g("Relu", "x")
    assert f"uses opset {opset}; supported are 7 to {NEWEST}" in refusal(g)


def test_refusals_are_collected():
    g = Graph(17, x=["batch", 3, 4])
    y = g("Hardmax", "x")
    z = g("MeanVarianceNormalization", y)
    y = g("Mul", "x", g("Relu", z))
    y = g("MatMul", y, g("Transpose", y, perm=[0, 2, 1]))
    y = g("Tan", y)
    y = g("TopK", y, ints(1), outputs=2)[0]
    y = g("Gelu", y, domain="com.microsoft")
    y = g("Gelu", y)
    g("Cast", g("NonMaxSuppression", y, y), to=TensorProto.INT32)
    model = g.model()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    message = refusal(model)
    for line in (
        "Hardmax 'node_0' is nonlinear in several variables at once",
        "MeanVarianceNormalization 'node_1' is nonlinear in several variables at once",
        "Tan 'node_6' is not supported",
        "TopK 'node_7' is not continuous",
        "Gelu 'node_8' is from the domain 'com.microsoft', which is not supported",
        "Gelu 'node_9' does not exist in opset 17",
        "NonMaxSuppression 'node_10' is not supported",
    ):
        assert line in message
    assert message.endswith(f"Supported operators: {', '.join(supported())}.")
    assert "AveragePool" in supported()


def _refused(operator, *arguments, opset=17, shape=("batch", 3, 4), **attributes):
    g = Graph(opset, x=shape)
    g(operator, *arguments, **attributes)
    return refusal(g)


def test_refusals_of_single_nodes():
    one = np.ones(3, np.float32)
    assert "has the exponent 1.5" in _refused("Pow", "x", number(1.5))
    assert "zeros" in _refused("Div", "x", np.zeros(4, np.float32))
    assert "NaN or infinite" in _refused("Mul", "x", np.array([1, np.nan, 0, 0], np.float32))
    assert "NaN or infinite" in _refused("Add", "x", np.array([1, np.inf, 0, 0], np.float32))
    assert "to integers" in _refused("Cast", "x", to=TensorProto.INT64)
    assert "to truth values" in _refused("Cast", "x", to=TensorProto.BOOL)
    assert "needs constant weights" in _refused("Conv", draw(1, 3, 4), "x")
    assert "not in order" in _refused("Clip", "x", number(1), number(0))
    assert "cannot make the shape" in _refused("Reshape", "x", ints(7))
    assert "names axis 5" in _refused("Gather", "x", ints(0), axis=5)
    assert "outside" in _refused("Gather", "x", ints(4), axis=2)
    assert "reflects" in _refused("Pad", "x", ints(0, 0, 5, 0, 0, 0), mode="reflect")
    assert "empty tensor" in _refused("Slice", "x", ints(2), ints(2), ints(1))
    assert "makes a tensor of" in _refused("Expand", "x", ints(2**20, 2**20, 3, 4))
    assert "makes a tensor of" in _refused("Tile", "x", ints(2**30, 1, 1))
    assert "makes a tensor of" in _refused("Pad", "x", ints(0, 0, 2**40, 0, 0, 0))
    assert "evaluation mode" in _refused(
        "BatchNormalization", "x", one, one, one, one, training_mode=1, outputs=3
    )
    assert "not positive" in _refused("BatchNormalization", "x", one, one, one, -one)
    assert "evaluation mode" in _refused("Dropout", "x", None, np.array(True))
    assert "has an attribute 'slope'" in _refused("Relu", "x", slope=1.0)
    assert "of the wrong type" in _refused("LeakyRelu", "x", alpha=1)
    assert "lacks the attribute 'axis'" in _refused("Concat", "x", "x")
    assert "has 2 inputs" in _refused("Relu", "x", "x")
    assert "reads 'nothing'" in _refused("Relu", "nothing")
    assert "larger than its input" in _refused("MaxPool", "x", kernel_shape=[9])
    assert "padding only" in _refused("MaxPool", "x", kernel_shape=[1], pads=[1, 1], strides=[1])
    same = {"kernel_shape": [2], "dilations": [2], "auto_pad": "SAME_UPPER"}
    assert "in different ways" in _refused("MaxPool", "x", **same)
    assert "than its windows reach" in _refused(
        "ConvTranspose", "x", draw(3, 2, 2), output_shape=[9]
    )
    indices = Graph(17, x=["batch", 3, 4])
    g = indices("MaxPool", "x", kernel_shape=[2], outputs=2)
    assert "indices are used" in refusal(indices.model(list(g)))


def test_constants_that_are_too_large_or_random_are_refused():
    g = Graph(17, x=["batch", 4])
    g("Add", "x", g("ConstantOfShape", ints(2**20, 2**20, 4)))
    g("Add", "x", g("Expand", draw(4), ints(2**20, 2**20, 4)))
    g("Add", "x", g("Range", number(0), number(1e12), number(1)))
    g("Add", "x", g("Add", draw(2**15, 1), draw(1, 2**15)))
    g("Add", "x", g("RandomNormal", shape=[4]))
    tall, wide = draw(2**15, 1), draw(1, 2**15)
    y = g("Unsqueeze", g("ReduceSum", "x", ints(1), keepdims=0), ints(0))
    g("Sum", y, tall, wide)
    g("Max", y, tall, wide)
    g("Gemm", tall, wide, y)
    message = refusal(g)
    assert message.count("makes a tensor of") == 7
    assert "RandomNormal 'node_8' is not supported, not even for constants" in message


def test_models_that_cannot_be_read(tmp_path):
    good = residual().model()
    data = good.SerializeToString()
    assert "is no ONNX model" in refusal(data[: len(data) // 2])
    assert "is no ONNX model" in refusal(b"some text that is no model")
    assert "no graph" in refusal(b"")
    assert "cannot be read" in refusal(tmp_path / "missing.onnx")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "bad.onnx.gz").write_bytes(b"no gzip")
    assert "cannot be read" in refusal(tmp_path / "bad.onnx.gz")
    (tmp_path / "cut.onnx.gz").write_bytes(gzip.compress(data)[:1000])
    assert "cannot be read" in refusal(tmp_path / "cut.onnx.gz")
    assert "given as a path" in refusal(3)

    def changed(change):
        model = onnx.ModelProto()
        model.CopyFrom(good)
        change(model)
        return refusal(model)

    def weights(field, value):
        def change(model):
            tensor = model.graph.initializer[0]
            tensor.ClearField(field)
            getattr(tensor, field).extend(value)

        return change

    assert "is corrupt" in changed(weights("dims", [10, 10]))
    assert "more than 2147483648" in changed(weights("dims", [2**40, 2**40]))
    assert "negative length" in changed(weights("dims", [-1]))
    integers = TensorProto.INT64

    def as_integers(model):
        model.graph.input[0].type.tensor_type.elem_type = integers

    assert "not made of floating-point numbers" in changed(as_integers)

    def huge(model):
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2**40

    assert "more than 134217728 numbers" in changed(huge)
    assert "has no inputs" in changed(lambda m: m.graph.ClearField("input"))
    assert "names 0 opsets" in changed(lambda m: m.ClearField("opset_import"))

    def other_output(model):
        model.graph.output[0].name = "elsewhere"

    assert "No node makes the output 'elsewhere'" in changed(other_output)

    def no_text(model):
        data = model.SerializeToString().replace(b"BatchNorm", b"Batch\xffor\xff")
        model.ParseFromString(data)

    assert "names that are not text" in changed(no_text)

    def twice(model):
        model.graph.node.append(model.graph.node[-1])

    assert "which was there already" in changed(twice)


def test_damaged_models_load_or_are_refused():
    """Nothing but ProblemError, whatever the bytes are."""
    g = Graph(17, x=["batch", 2, 4])
    y = g("Conv", "x", draw(2, 2, 2), draw(2), pads=[1, 1])
    y = g("MaxPool", g("Relu", y), kernel_shape=[2], strides=[2])
    y = g("Reshape", y, g("Concat", g("Shape", y, end=1), ints(-1), axis=0))
    y = g("Slice", g("Gemm", y, draw(4, 3), draw(3)), ints(0), ints(2), ints(1))
    g("Clip", g("Pad", y, ints(0, 1, 0, 1), number(0.5)), number(-1), number(1))
    data = g.model().SerializeToString()
    load(data)
    rng = np.random.default_rng(1)
    messages = []
    for trial in range(400):
        damaged = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        if trial % 4 == 0:
            damaged = damaged[: rng.integers(len(damaged))]
        for function in (load, describe):
            try:
                function(bytes(damaged))
            except ProblemError as error:
                messages.append(str(error))
    assert all(messages)
    assert 400 < len(messages) < 780  # Some damage is harmless.


DATA = Path(os.environ.get("STAGECERT_DATA", Path(__file__).parents[3] / "shared" / "data"))


def _architectures():
    """One file for each distinct list of operators and input shape."""
    found = {}
    for path in sorted([*DATA.rglob("*.onnx"), *DATA.rglob("*.onnx.gz")]):
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        model = onnx.load_model_from_string(data)
        shapes = [str(i.type) for i in model.graph.input]
        key = (*(n.op_type for n in model.graph.node), *shapes)
        found.setdefault(key, (path, model))
    return found.values()


def refused(path) -> bool:
    """Whether a model is refused because of what its nodes are."""
    try:
        load(path)
    except ProblemError as error:
        return "that stagecert cannot handle" in str(error)
    return False


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with every float32 number as float64: it rounds next to nothing."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    tensors = [*double.graph.initializer]
    for node in double.graph.node:
        tensors += [item.t for item in node.attribute if item.HasField("t")]
        for item in node.attribute:
            if node.op_type == "Cast" and item.name == "to" and item.i == TensorProto.FLOAT:
                item.i = TensorProto.DOUBLE
    for tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for info in (*double.graph.input, *double.graph.output):
        info.type.tensor_type.elem_type = TensorProto.DOUBLE
    del double.graph.value_info[:]
    return double


def compared_in_double(path, model, rng) -> None:
    """Models whose float32 outputs in ONNX Runtime are off by up to 1e-4: ours are right."""
    network = load(path)
    (shape,) = network.input_shapes
    x = rng.uniform(size=(2, *shape)).astype(np.float32)
    with jax.enable_x64(True):
        flat = as_arrays(network, jnp.float64).flat_outputs
        ours = np.asarray(jax.vmap(flat)(jnp.asarray(x, jnp.float64)))
    size = np.abs(ours).max()
    for k in range(2):
        truth = np.concatenate([np.ravel(y) for y in runner(model)([x[k]])])
        assert np.abs(ours[k] - truth).max() <= 1e-4 * size, path
        try:
            run = runner(in_double(model))
        except Exception:  # ONNX Runtime lacks an operator in double precision
            assert np.abs(ours[k] - truth).max() <= 1e-5 * size, path
            continue
        truth = np.concatenate([np.ravel(y) for y in run([x[k].astype(np.float64)])])
        assert np.abs(ours[k] - truth).max() <= 1e-12 * size, path


def test_networks_in_the_data_folder():
    if not DATA.is_dir():
        pytest.skip("no data folder: set STAGECERT_DATA")
    rng = np.random.default_rng(0)
    for path, model in _architectures():
        names = {i.name for i in model.graph.initializer}
        inputs = [i for i in model.graph.input if i.name not in names]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        if path.parent.parent.name in ("vit", "ml4acopf", "lsnc_relu", "traffic_signs"):
            if refused(path):  # with the reason
                continue
            # At such points no argument of a sign is near zero, as far as double precision sees.
            compared_in_double(path, model, rng)
            continue
        network = single(load(path))
        run = runner(model)
        shapes = network.input_shapes
        xs = tuple(rng.uniform(size=(2, *s[1:])).astype(np.float32) for s in shapes)
        ours = np.asarray(network(xs))
        for k in range(2):
            truth = run([x[k].reshape(s) for x, s in zip(xs, shapes, strict=True)])
            truth = np.concatenate([np.ravel(y) for y in truth])
            assert np.abs(ours[k] - truth).max() <= 1e-5 * np.abs(truth).max(), path


def test_constants_may_not_add_up_to_too_much(monkeypatch):
    from stagecert.networks.importers.onnx import model as reader

    monkeypatch.setattr(reader, "LARGEST_COMPUTED", 5000)
    g = Graph(17, x=["batch", 10])
    y = "x"
    for _ in range(8):
        y = g("Add", y, g("ReduceSum", g("Expand", number(1), ints(100, 10)), ints(0), keepdims=0))
    assert "entries, more than" in refusal(g)
