"""The checker's own reading of ONNX operators, against ONNX Runtime, and transposes."""

import numpy as np
import pytest
import rigor_models as models

from stagecert.rigor import graph, operators
from stagecert.rigor.bounds import Facts
from stagecert.rigor.functions import Refused
from stagecert.rigor.linear import Linear
from stagecert.rigor.numbers import Arithmetic


def _cases():
    def one(build, shape, name):
        return pytest.param(build, shape, id=name)

    def conv(m, x, **more):
        return m.node("Conv", x, m.weights(4, more.pop("inside", 2), 3, 2), m.weights(4), **more)

    image = (1, 2, 7, 6)
    return [
        one(lambda m, x: m.node("Gemm", x, m.weights(3, 5), m.weights(3), transB=1, alpha=0.5,
                                beta=2.0), (1, 5), "gemm"),
        one(lambda m, x: m.node("Gemm", m.weights(3, 5), x, transB=1), (1, 5), "gemm left"),
        one(lambda m, x: m.node("MatMul", m.weights(4, 7), x), image, "matmul left"),
        one(lambda m, x: m.node("MatMul", x, m.weights(6, 4)), image, "matmul right"),
        one(lambda m, x: conv(m, x, strides=[2, 1], pads=[1, 0, 2, 1], dilations=[2, 1]), image,
            "conv"),
        one(lambda m, x: conv(m, x, group=2, inside=1, auto_pad="SAME_UPPER"), image, "groups"),
        one(lambda m, x: m.node("Conv", x, m.weights(3, 2, 4), strides=[3]), (1, 2, 11), "conv 1d"),
        one(lambda m, x: m.node("ConvTranspose", x, m.weights(2, 3, 3, 2), m.weights(3, size=9),
                                strides=[2, 3], pads=[1, 0, 1, 1], output_padding=[1, 0]), image,
            "conv transpose"),
        one(lambda m, x: m.node("Sub", m.weights(2, 1, 6), m.node("Neg", x)), image, "sub"),
        one(lambda m, x: m.node("Div", m.node("Mul", x, m.weights(2, 1, 1)), m.constant(3.0)),
            image, "mul div"),
        one(lambda m, x: m.node("Sum", x, x, m.weights(6)), image, "sum"),
        one(lambda m, x: m.node("BatchNormalization", x, *map(m.constant, (
            [1.0, -2.0], [0.5, 0.25], [3.0, -1.0], [0.1, 2.0]))), image, "batch norm"),
        one(lambda m, x: m.node("Transpose", x, perm=[0, 3, 1, 2]), image, "transpose"),
        one(lambda m, x: m.node("Reshape", x, m.constant([0, -1, 3])), image, "reshape"),
        one(lambda m, x: m.node("Squeeze", m.node("Unsqueeze", x, m.constant([0, 3])),
                                m.constant([0])), image, "squeeze"),
        one(lambda m, x: m.node("Concat", x, m.weights(1, 2, 7, 1), x, axis=3), image, "concat"),
        one(lambda m, x: m.node("Slice", x, m.constant([6, 1]), m.constant([-100, 5]),
                                m.constant([2, 3]), m.constant([-2, 3])), image, "slice"),
        one(lambda m, x: m.node("Sub", *m.node("Split", x, m.constant([3, 3]), outputs=2, axis=3)),
            image, "split"),
        one(lambda m, x: m.node("Gather", x, m.constant([[0, -1], [2, 2]]), axis=2), image,
            "gather"),
        one(lambda m, x: m.node("Pad", x, m.constant([0, 0, 1, 2, 0, 0, 0, 1]), m.constant(1.5)),
            image, "pad"),
        one(lambda m, x: m.node("Pad", x, m.constant([0, 0, 1, 2, 0, 0, 0, 1]), mode="reflect"),
            image, "pad reflect"),
        one(lambda m, x: m.node("Tile", x, m.constant([1, 2, 1, 3])), image, "tile"),
        one(lambda m, x: m.node("Expand", m.node("ReduceSum", x, m.constant([1])),
                                m.constant([1, 3, 7, 6])), image, "expand"),
        one(lambda m, x: m.node("ReduceMean", x, m.constant([1, -1]), keepdims=0), image, "mean"),
        one(lambda m, x: m.node("AveragePool", x, kernel_shape=[3, 2], strides=[2, 2],
                                pads=[1, 0, 1, 1]), image, "average pool"),
        one(lambda m, x: m.node("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2],
                                pads=[1, 1, 1, 1], count_include_pad=1, ceil_mode=1), image,
            "average pool with padding"),
        one(lambda m, x: m.node("GlobalAveragePool", x), image, "global average pool"),
        one(lambda m, x: m.node("MaxPool", x, kernel_shape=[3, 2], strides=[2, 1],
                                pads=[1, 1, 0, 0]), image, "max pool"),
        one(lambda m, x: m.node("ReduceMin", x, m.constant([1, 3])), image, "reduce min"),
        one(lambda m, x: m.node("GlobalMaxPool", x), image, "global max pool"),
        one(lambda m, x: m.node("Min", x, m.weights(6), m.node("Neg", x)), image, "min"),
        one(lambda m, x: m.node("Max", x, m.constant(0.0)), image, "max 0"),
        one(lambda m, x: m.node("Reshape", x, m.node("Concat", m.node(
            "Unsqueeze", m.node("Gather", m.node("Shape", x), m.constant(0)), m.constant([0])),
            m.constant([-1]), axis=0)), image, "shape arithmetic"),
        *(one(lambda m, x, n=n, a=a: m.node(n, x, **a), image, n) for n, a in models.ACTIVATIONS),
        one(lambda m, x: m.node("Mul", x, m.node("Sigmoid", x)), image, "silu"),
        one(lambda m, x: m.node("Mul", x, x), image, "square"),
        one(lambda m, x: m.node("Dropout", m.node("Cast", m.node("Identity", x), to=1)), image,
            "identity"),
    ]  # fmt: skip


@pytest.mark.parametrize(("build", "shape"), _cases())
def test_intervals_contain_what_runtimes_compute(build, shape):
    make = models.Maker()
    model = make.model([("x", shape)], [(build(make, "x"), None)])
    random = np.random.default_rng(1)
    x = 1.5 * random.normal(size=(3, int(np.prod(shape)))).astype(np.float32)
    wanted = models.run(model, x)
    for exact in (False, True):
        program = graph.read(model.SerializeToString(), Arithmetic(exact))
        for width in (0.0, 0.25):
            low, high = x.min(0).astype(float) - width, x.max(0).astype(float) + width
            if not width:
                low = high = x[0].astype(float)
            facts = Facts(Arithmetic(exact), program, low[None], high[None]).derive()
            found_low, found_high = (
                _floats(side[program.outputs[0]]) for side in (facts.low, facts.high)
            )
            some = wanted if width else wanted[:1]
            assert np.all(found_low <= some + 2e-5 * (1 + np.abs(some)))
            assert np.all(found_high >= some - 2e-5 * (1 + np.abs(some)))
            if not width:
                assert np.all(found_high - found_low <= 1e-12 * (1 + np.abs(some)))
    _check_transposes(program)


def _floats(x):
    return np.array([int(v.p) / int(v.q) if hasattr(v, "p") else v for v in np.ravel(x)])


def _check_transposes(program):
    random = np.random.default_rng(2)
    for node in program.nodes:
        if not isinstance(node.operation, Linear):
            continue
        shapes = [program.nodes[k].shape for k in node.arguments]
        # Small whole numbers in rationals: equal means equal.
        xs = [random.integers(-5, 5, (1, *shape)).astype(object) for shape in shapes]
        g = random.integers(-5, 5, (1, *node.shape)).astype(object)
        y = node.operation.forward(xs)
        assert y.shape == (1, *node.shape)
        backs = node.operation.transposed(g, shapes)
        assert (g * y).sum() == sum((b * x).sum() for b, x in zip(backs, xs, strict=True))
        ones = [np.abs(x) for x in xs]
        assert np.all(node.operation.forward(ones, absolute=True) >= np.abs(y))


@pytest.mark.parametrize(
    "build",
    [
        lambda m, x: m.node("Softmax", x),
        lambda m, x: m.node("Mul", x, m.node("Relu", x)),
        lambda m, x: m.node("MatMul", x, m.node("Transpose", x, perm=[1, 0])),
        lambda m, x: m.node("Div", m.constant(1.0), x),
        lambda m, x: m.node("Div", x, m.constant(0.0)),
        lambda m, x: m.node("Relu", m.node("Erf", x)),
        lambda m, x: m.node("Relu", x, wrong=1),
        lambda m, x: m.node("Mul", x, m.node("Mul", m.constant(0.1), m.constant(0.1))),
        lambda m, x: m.node("Add", x, m.constant([np.nan])),
        lambda m, x: m.node("Sign", x),
    ],
)
def test_what_is_not_understood_is_refused(build):
    make = models.Maker()
    model = make.model([("x", (1, 3))], [(build(make, "x"), None)])
    with pytest.raises(Refused):
        graph.read(model.SerializeToString(), Arithmetic())


def test_operators_are_registered():
    assert operators.handles is graph.handles
    assert len(graph.HANDLERS) > 50
