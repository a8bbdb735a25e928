"""Small models, one for every operator and variant that is read, and some that are not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import rigor_models as models

IMAGE = (1, 2, 7, 6)


@dataclass(frozen=True)
class Entry:
    """A model with one input x; `build` gets a Maker and the name of x, and returns the output."""

    name: str
    build: Callable[[models.Maker, str], Any]
    shape: tuple[int, ...] = IMAGE
    opset: int = 20
    slack: float = 1e-12  # how wide intervals of points may be
    runtime: bool = True  # whether single precision comes near to what is meant

    def model(self) -> onnx.ModelProto:
        """The model."""
        make = models.Maker(opset=self.opset)
        return make.model([("x", self.shape)], [(self.build(make, "x"), None)])


def _conv(m, x, **more):
    return m.node("Conv", x, m.weights(4, more.pop("inside", 2), 3, 2), m.weights(4), **more)


def _transposed(m, x, **more):
    return m.node("ConvTranspose", x, m.weights(2, 3, 3, 2), m.weights(3, size=9), **more)


def _pooled(operator, **more):
    return lambda m, x: m.node(operator, x, **more)


def _one(operator, *inputs, **attributes):
    """A node that reads x and constants."""
    return lambda m, x: m.node(operator, x, *(m.constant(c) for c in inputs), **attributes)


def _times_x(gate, divide=None):
    """x times gate(m, x), in the order that exporters have, and divided by a number."""

    def build(m, x):
        y = m.node("Mul", x, gate(m, x))
        return y if divide is None else m.node("Div", y, m.constant(divide))

    return build


def _erf(m, x):
    return m.node("Erf", m.node("Div", x, m.constant(np.sqrt(2))))


def _plus_one(m, x):
    return m.node("Add", x, m.constant(1.0))


def _inner(m, x, cube=None):
    cube = m.node("Pow", x, m.constant(3.0)) if cube is None else cube(m, x)
    inside = m.node("Add", x, m.node("Mul", m.constant(0.044715), cube))
    return m.node("Mul", inside, m.constant(np.sqrt(2 / np.pi)))


def _of_x(m, x):
    """x times a square of constants, to be multiplied."""
    return m.node("Mul", x, m.node("Mul", x, x))


def _away(m, x):
    """x between a half and about three: away from zero."""
    return m.node("Add", m.node("Mul", m.node("Sigmoid", x), m.constant(2.5)), m.constant(0.5))


def _hard(m, x):
    return m.node("Clip", m.node("Add", x, m.constant(3.0)), m.constant(0.0), m.constant(6.0))


# Activations that are spelt out: x times a gate.
SPELT = [
    Entry("silu", _times_x(lambda m, x: m.node("Sigmoid", x))),
    Entry("silu of a multiple", lambda m, x: m.node("Mul", m.node(
        "Sigmoid", m.node("Mul", x, m.constant(1.702))), x)),
    Entry("silu, a number beside it", lambda m, x: m.node("Mul", m.node(
        "Mul", x, m.constant(0.3)), m.node("Sigmoid", m.node("Div", x, m.constant(-3.0))))),
    Entry("silu of a line", lambda m, x: (lambda y: m.node("Mul", y, m.node("Sigmoid", m.node(
        "Mul", y, m.constant(0.7)))))(m.node("Add", x, m.constant(0.3)))),
    Entry("gelu of PyTorch", lambda m, x: m.node("Mul", m.node(
        "Mul", x, _plus_one(m, _erf(m, x))), m.constant(0.5))),
    Entry("gelu, half first", lambda m, x: m.node("Mul", m.node(
        "Mul", m.constant(0.5), x), _plus_one(m, _erf(m, x)))),
    Entry("gelu, half the gate", lambda m, x: m.node("Mul", m.node("Mul", m.constant(0.5), m.node(
        "Add", m.constant(1.0), _erf(m, x))), x)),
    Entry("gelu by a product", _times_x(lambda m, x: m.node("Add", m.node("Mul", m.node(
        "Erf", m.node("Mul", x, m.constant(np.sqrt(0.5)))), m.constant(0.5)), m.constant(0.5)))),
    Entry("gelu by tanh", lambda m, x: m.node("Mul", m.constant(0.5), m.node(
        "Mul", x, _plus_one(m, m.node("Tanh", _inner(m, x)))))),
    Entry("gelu by tanh, products", lambda m, x: m.node("Mul", m.node(
        "Mul", x, m.constant(0.5)), _plus_one(m, m.node("Tanh", _inner(m, x, _of_x))))),
    Entry("hard swish by hard sigmoid", _times_x(lambda m, x: m.node(
        "HardSigmoid", x, alpha=1 / 6, beta=0.5))),
    Entry("hard swish, falling gate", _times_x(lambda m, x: m.node(
        "HardSigmoid", x, alpha=-0.2, beta=0.5))),
    Entry("hard swish by another", _times_x(lambda m, x: m.node(
        "HardSigmoid", x, alpha=0.2, beta=0.5))),
    Entry("hard swish by clip", _times_x(_hard, 6.0)),
    Entry("hard swish by clip, a factor", lambda m, x: m.node("Mul", x, m.node(
        "Mul", _hard(m, x), m.constant(1 / 6)))),
    Entry("mish", _times_x(lambda m, x: m.node("Tanh", m.node("Softplus", x)))),
    Entry("mish by logarithm", _times_x(lambda m, x: m.node("Tanh", m.node(
        "Log", _plus_one(m, m.node("Exp", x)))))),
    Entry("softsign", lambda m, x: m.node("Div", x, _plus_one(m, m.node("Abs", x)))),
    Entry("softplus", lambda m, x: m.node("Log", m.node(
        "Add", m.constant(1.0), m.node("Exp", x)))),
    Entry("square", lambda m, x: m.node("Mul", x, x)),
    Entry("square of multiples", lambda m, x: m.node("Mul", m.node("Mul", x, m.constant(0.3)),
                                                     m.node("Neg", x))),
]  # fmt: skip

# Operators that are made of others.
COMPOSED = [
    Entry("softmax", _one("Softmax"), slack=1e-11),
    Entry("softmax along another axis", _one("Softmax", axis=1), slack=1e-11),
    Entry("softmax 11", _one("Softmax", axis=2), (1, 3, 2, 2), 11, slack=1e-11),
    Entry("softmax 11 by default", _one("Softmax"), (1, 5), 11, slack=1e-11),
    Entry("softmax of one", _one("Softmax", axis=0)),
    Entry("log softmax", _one("LogSoftmax"), slack=1e-11),
    Entry("log softmax of one", _one("LogSoftmax", axis=0)),
    Entry("layer normalization", lambda m, x: m.node(
        "LayerNormalization", x, m.weights(6), m.weights(6)), slack=1e-9),
    Entry("layer normalization of two axes", lambda m, x: m.node(
        "LayerNormalization", x, m.weights(7, 6), axis=2, epsilon=0.1), slack=1e-9),
    Entry("instance normalization", lambda m, x: m.node(
        "InstanceNormalization", x, m.weights(2), m.weights(2), epsilon=0.01), slack=1e-9),
    Entry("reduce l1", _one("ReduceL1", [1, 3])),
    Entry("reduce l2", _one("ReduceL2", [-1], keepdims=0), slack=1e-11),
    Entry("reduce sum square", _one("ReduceSumSquare", [2])),
    Entry("reduce sum square 17", _one("ReduceSumSquare", axes=[2], keepdims=0), opset=17),
    Entry("upsample", _one("Upsample", [1.0, 1.0, 2.0, 3.0]), opset=9),
    Entry("upsample 7", _one("Upsample", scales=[1.0, 1.0, 2.0, 3.0]), opset=7),
    Entry("resize 10", _one("Resize", [1.0, 1.0, 2.0, 1.0]), opset=10),
    Entry("resize", lambda m, x: m.node("Resize", x, "", m.constant([1.0, 1.0, 2.0, 2.0]))),
    Entry("resize, asymmetric", lambda m, x: m.node(
        "Resize", x, "", m.constant([1.0, 1.0, 3.0, 2.0]), nearest_mode="floor",
        coordinate_transformation_mode="asymmetric")),
    Entry("resize to sizes", lambda m, x: m.node(
        "Resize", x, "", "", m.constant([1, 2, 21, 24]))),
]  # fmt: skip

REDUCTIONS = [
    Entry("reduce log sum exp", _one("ReduceLogSumExp", [1, 3]), slack=1e-11),
    Entry("reduce log sum exp 17", _one("ReduceLogSumExp", axes=[2], keepdims=0), opset=17,
          slack=1e-11),
    Entry("reduce log sum exp of one", _one("ReduceLogSumExp", [0])),
    Entry("reduce log sum", lambda m, x: m.node(
        "ReduceLogSum", _away(m, x), m.constant([1, 2]), keepdims=0), slack=1e-11),
    Entry("reduce prod", _one("ReduceProd", [3], keepdims=0), slack=1e-10),
    Entry("reduce prod of two axes", _one("ReduceProd", [1, 2]), (1, 2, 3, 2), slack=1e-10),
    Entry("cumulative sum", _one("CumSum", 2)),
    Entry("cumulative sum, exclusive", _one("CumSum", -1, exclusive=1)),
    Entry("cumulative sum, reverse", _one("CumSum", 0, reverse=1, exclusive=1), (5,)),
    Entry("local response", _one("LRN", size=3, alpha=0.5, beta=0.75, bias=2.0), (1, 5, 2, 2),
          slack=1e-10),
    Entry("local response of few", _one("LRN", size=5, alpha=0.1), (1, 3, 2, 1), slack=1e-10),
    Entry("unit length", lambda m, x: m.node("LpNormalization", _away(m, x), axis=1), slack=1e-9),
    Entry("unit length by l1", lambda m, x: m.node("LpNormalization", _away(m, x), p=1),
          slack=1e-9),
    Entry("root mean square", lambda m, x: m.node(
        "RMSNormalization", x, m.weights(6), epsilon=0.1), opset=23, slack=1e-9),
    Entry("root mean square of two axes", lambda m, x: m.node(
        "RMSNormalization", x, m.weights(7, 6), axis=2), opset=23, slack=1e-9),
    Entry("groups", lambda m, x: m.node(
        "GroupNormalization", x, m.weights(4), m.weights(4), num_groups=2, epsilon=0.1),
        (1, 4, 3, 2), 21, slack=1e-9),
    Entry("groups 18", lambda m, x: m.node(
        "GroupNormalization", x, m.weights(2), m.weights(2), num_groups=2, epsilon=0.1),
        (1, 4, 3), 18, slack=1e-9, runtime=False),
    Entry("global lp pool", _one("GlobalLpPool"), slack=1e-11),
    Entry("global lp pool, l1", _one("GlobalLpPool", p=1)),
    Entry("depth to space", _one("DepthToSpace", blocksize=2), (1, 8, 2, 3)),
    Entry("depth to space, columns first", _one("DepthToSpace", blocksize=2, mode="CRD"),
          (1, 8, 2, 3)),
    Entry("space to depth", _one("SpaceToDepth", blocksize=2), (1, 3, 4, 6)),
    Entry("triangle", _one("Trilu")),
    Entry("lower triangle", _one("Trilu", -1, upper=0)),
    Entry("elements", _one("GatherElements", [[1, 0, -1], [2, 2, 0]], axis=1), (2, 3)),
    Entry("gathered places", _one("GatherND", [[0, 1], [0, -1]]), (1, 2, 3)),
    Entry("gathered places of batches", _one("GatherND", [[[1]], [[0]]], batch_dims=1), (2, 3, 2)),
    Entry("power of zero", _one("Pow", 0.0)),
    Entry("power of a number", lambda m, x: m.node("Pow", m.constant(2.0), x), slack=1e-10),
]  # fmt: skip

UNROLLED = [
    Entry("einsum", lambda m, x: m.node("Einsum", x, m.weights(6, 4), equation="abcd,de->aceb")),
    Entry("einsum of variables", lambda m, x: m.node(
        "Einsum", x, m.node("Relu", x), equation="abcd,abed->ace"), (1, 2, 3, 2), slack=1e-11),
    Entry("einsum of one", _one("Einsum", equation="abcd->ca")),
    Entry("lstm", lambda m, x: m.node(
        "LSTM", x, m.weights(2, 8, 2), m.weights(2, 8, 2), m.weights(2, 16), hidden_size=2,
        direction="bidirectional"), (2, 1, 2), slack=1e-10),
    Entry("lstm with states", lambda m, x: m.node(
        "LSTM", x, m.weights(1, 8, 2), m.weights(1, 8, 2), m.weights(1, 16), "",
        m.weights(1, 1, 2), m.weights(1, 1, 2), hidden_size=2), (2, 1, 2), slack=1e-10),
    Entry("gru", lambda m, x: m.node(
        "GRU", x, m.weights(1, 6, 2), m.weights(1, 6, 2), m.weights(1, 12), hidden_size=2),
        (2, 1, 2), slack=1e-10),
    Entry("gru, linear first", lambda m, x: m.node(
        "GRU", x, m.weights(1, 6, 2), m.weights(1, 6, 2), m.weights(1, 12), hidden_size=2,
        linear_before_reset=1, direction="reverse"), (2, 1, 2), slack=1e-10),
    Entry("rnn", lambda m, x: m.node(
        "RNN", x, m.weights(1, 2, 2), m.weights(1, 2, 2), hidden_size=2), (3, 1, 2), slack=1e-10),
    Entry("resize, linear", lambda m, x: m.node(
        "Resize", x, "", m.constant([1.0, 1.0, 2.0, 1.5]), mode="linear")),
    Entry("resize, linear to corners", lambda m, x: m.node(
        "Resize", x, "", "", m.constant([1, 2, 5, 3]), mode="linear",
        coordinate_transformation_mode="align_corners")),
    Entry("scattered", lambda m, x: m.node(
        "ScatterND", x, m.constant([[0, 1]]), m.weights(1, 7, 6))),
]  # fmt: skip

# Products of two variables, and what only looks like a spelt out activation.
PRODUCTS = [
    Entry("product", lambda m, x: m.node("Mul", x, m.node("Relu", x))),
    Entry("product of two parts", lambda m, x: m.node("Mul", *m.node(
        "Split", x, m.constant([3, 3]), outputs=2, axis=3))),
    Entry("product of other shapes", lambda m, x: m.node("Mul", x, m.node(
        "ReduceMax", x, m.constant([1])))),
    Entry("quadratic", lambda m, x: m.node("Mul", m.node("Add", x, m.constant(0.3)), m.node(
        "Sub", m.constant(0.7), m.node("Mul", x, m.constant(0.1))))),
    Entry("third power by products", lambda m, x: m.node("Mul", x, m.node("Mul", x, x))),
    Entry("matrix product", lambda m, x: m.node("MatMul", m.node("Transpose", x, perm=[1, 0]), x),
          (2, 3)),
    Entry("matrix product, stacked", lambda m, x: m.node("MatMul", x, m.node(
        "Transpose", x, perm=[0, 1, 3, 2]))),
    Entry("matrix product, stacked otherwise", lambda m, x: m.node("MatMul", x, m.node(
        "Squeeze", m.node("ReduceSum", m.node("Transpose", x, perm=[0, 1, 3, 2]), m.constant(
            [1])), m.constant([0, 1])))),
    Entry("product of vectors", lambda m, x: m.node("MatMul", x, m.node("Relu", x)), (5,)),
    Entry("matrix and vector", lambda m, x: m.node("MatMul", m.node(
        "Reshape", m.node("Concat", x, x, axis=0), m.constant([2, 5])), x), (5,)),
    Entry("vector and matrix", lambda m, x: m.node("MatMul", x, m.node(
        "Reshape", m.node("Concat", x, x, axis=0), m.constant([5, 2]))), (5,)),
    Entry("gemm of variables", lambda m, x: m.node(
        "Gemm", x, m.node("Relu", x), m.weights(2), transA=1, alpha=0.3, beta=2.0), (3, 2)),
    Entry("erf alone", lambda m, x: m.node("Relu", m.node("Erf", x))),
    Entry("erf once more", lambda m, x: (lambda e: m.node("Add", e, m.node(
        "Mul", x, _plus_one(m, e))))(_erf(m, x))),
    Entry("logarithm alone", lambda m, x: m.node("Log", _plus_one(m, m.node("Abs", x)))),
    Entry("logarithm of another", lambda m, x: m.node("Log", m.node(
        "Add", m.node("Exp", x), m.constant(2.0)))),
    Entry("gate of another", lambda m, x: m.node("Mul", x, m.node("Sigmoid", m.node(
        "Add", x, m.constant(1e-6))))),
    Entry("gelu, nearly", _times_x(lambda m, x: m.node("Add", _erf(m, x), m.constant(1.000001)))),
    Entry("gelu by tanh, nearly", _times_x(lambda m, x: _plus_one(m, m.node("Tanh", m.node(
        "Mul", m.node("Add", x, m.node("Mul", m.constant(0.0448), m.node(
            "Pow", x, m.constant(3.0)))), m.constant(np.sqrt(2 / np.pi))))))),
    Entry("hard swish, nearly", _times_x(lambda m, x: m.node(
        "HardSigmoid", x, alpha=1 / 6, beta=0.5000001))),
    Entry("hard swish by clip, nearly", _times_x(lambda m, x: m.node("Clip", m.node(
        "Add", x, m.constant(3.000001)), m.constant(0.0), m.constant(6.0)))),
    Entry("softsign, nearly", lambda m, x: m.node("Div", x, m.node(
        "Add", m.node("Abs", x), m.constant(1.000001)))),
]  # fmt: skip


def _where(*tests, together=None, negated=False):
    """x where comparisons with numbers hold, and a multiple of it elsewhere."""

    def build(m, x):
        found = [m.node(operator, x, m.constant(at)) for operator, at in tests]
        condition = m.node(together, *found) if together else found[0]
        condition = m.node("Not", condition) if negated else condition
        return m.node("Where", condition, x, m.node("Mul", x, m.constant(0.25)))

    return build


BRANCHES = [
    Entry("where greater", _where(("Greater", 0.0))),
    Entry("where less", _where(("Less", 0.5))),
    Entry("where greater or equal", _where(("GreaterOrEqual", 0.0))),
    Entry("where less or equal", _where(("LessOrEqual", 0.5), negated=True)),
    *(Entry(f"where {name.lower()}", _where(("Greater", -0.5), ("Less", 0.75), together=name))
      for name in ("And", "Or", "Xor")),
    Entry("shrink", _one("Shrink", lambd=0.5, bias=0.25)),
    Entry("thresholded relu", _one("ThresholdedRelu", alpha=0.75)),
]  # fmt: skip

# What is chosen is no function of the value that is compared, or is none that is made of lines.
BLENDED = [
    Entry("where, curves", lambda m, x: m.node(
        "Where", m.node("Greater", x, m.constant(0.25)), m.node("Exp", x), m.node("Sin", x)),
        slack=1e-11),
    Entry("where, another value", lambda m, x: m.node("Where", m.node("Less", m.node(
        "ReduceSum", x, m.constant([1])), m.constant(0.25)), x, m.node("Neg", x)), slack=1e-11),
    Entry("where, two variables", lambda m, x: m.node("Where", m.node("GreaterOrEqual", x, m.node(
        "ReduceMean", x, m.constant([3]))), x, m.constant(1.0)), slack=1e-11),
    Entry("where, constants", lambda m, x: m.node("Where", m.node(
        "Greater", x, m.weights(6)), m.weights(7, 6), m.weights(6)), slack=1e-11),
    Entry("where, a constant first", lambda m, x: m.node("Where", m.node(
        "Greater", m.constant([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), x), m.node("Abs", x), x),
        slack=1e-11),
    # Equal numbers of a larger shape make the result larger.
    Entry("where, larger", lambda m, x: m.node("Where", m.node(
        "Greater", x, m.constant(0.5)), m.constant([[0.5] * 6, [0.5] * 6]), m.constant(0.0)),
        (1, 6), slack=1e-11),
    Entry("where, compared with larger", lambda m, x: m.node("Where", m.node(
        "Greater", x, m.constant([[0.5] * 6, [0.5] * 6])), x, m.constant(0.0)), (1, 6),
        slack=1e-11),
    Entry("a comparison as a number", lambda m, x: m.node("Mul", m.node("Cast", m.node(
        "Greater", x, m.constant(0.25)), to=1), m.node("Exp", x)), slack=1e-11),
    Entry("where, a mask", lambda m, x: m.node("Where", m.node("Less", m.constant(
        [0, 1, 2, 3, 4, 5]), m.constant([3])), x, m.constant(-9.0))),
    Entry("where, a mask of variables", lambda m, x: m.node("Where", m.node("Less", m.constant(
        [[0], [1], [2], [3], [4], [5], [6]]), m.constant([3])), m.node("Neg", x), x)),
]  # fmt: skip

LINEAR = [
    Entry("gemm", lambda m, x: m.node("Gemm", x, m.weights(3, 5), m.weights(3), transB=1,
                                      alpha=0.5, beta=2.0), (1, 5)),
    Entry("gemm, scalar c", lambda m, x: m.node(
        "Gemm", x, m.weights(5, 3), m.constant(2.5), beta=2.0), (1, 5)),
    Entry("gemm left", lambda m, x: m.node("Gemm", m.weights(3, 5), x, transB=1), (1, 5)),
    Entry("gemm, variable c", lambda m, x: m.node("Gemm", x, m.weights(5, 5), x, beta=0.3), (1, 5)),
    Entry("gemm of constants", lambda m, x: m.node(
        "Gemm", m.weights(4, 3), m.weights(3, 5), x, alpha=0.7), (1, 5)),
    Entry("gemm, both transposed", lambda m, x: m.node(
        "Gemm", x, m.weights(3, 1), transA=1, transB=1), (1, 5)),
    Entry("matmul left", lambda m, x: m.node("MatMul", m.weights(4, 7), x)),
    Entry("matmul right", lambda m, x: m.node("MatMul", x, m.weights(6, 4))),
    Entry("matmul vector", lambda m, x: m.node("MatMul", x, m.weights(6))),
    Entry("matmul vector left", lambda m, x: m.node("MatMul", m.weights(7, size=7), x)),
    Entry("matmul of a vector", lambda m, x: m.node("MatMul", x, m.weights(6, 2)), (6,)),
    Entry("matmul of a vector left", lambda m, x: m.node("MatMul", m.weights(3, 6), x), (6,)),
    Entry("matmul of vectors", lambda m, x: m.node("MatMul", x, m.weights(6)), (6,)),
    Entry("matmul stacked", lambda m, x: m.node("MatMul", x, m.weights(2, 6, 4))),
    Entry("matmul stacked left", lambda m, x: m.node("MatMul", m.weights(2, 3, 7), x)),
    Entry("matmul more axes", lambda m, x: m.node("MatMul", x, m.weights(3, 2, 6, 4))),
    Entry("matmul with a one", lambda m, x: m.node("MatMul", x, m.weights(3, 1, 6, 4))),
    Entry("matmul of computed", lambda m, x: m.node("MatMul", x, m.node(
        "Mul", m.weights(6, 4), m.constant(0.1)))),
    Entry("matmul of quotients", lambda m, x: m.node("MatMul", x, m.node(
        "Div", m.weights(6, 4), m.constant(3.0)))),
    Entry("conv", lambda m, x: _conv(m, x, strides=[2, 1], pads=[1, 0, 2, 1], dilations=[2, 1])),
    Entry("conv groups", lambda m, x: _conv(m, x, group=2, inside=1, auto_pad="SAME_UPPER")),
    Entry("conv same lower", lambda m, x: _conv(m, x, auto_pad="SAME_LOWER", strides=[2, 2])),
    Entry("conv far strides", lambda m, x: _conv(m, x, auto_pad="SAME_UPPER", strides=[4, 3])),
    Entry("conv valid", lambda m, x: _conv(m, x, auto_pad="VALID")),
    Entry("conv 1d", lambda m, x: m.node("Conv", x, m.weights(3, 2, 4), strides=[3]), (1, 2, 11)),
    Entry("conv of two", lambda m, x: m.node("Conv", m.node(
        "Transpose", x, perm=[1, 0, 2, 3]), m.weights(4, 1, 3, 2), m.weights(4))),
    Entry("conv transpose", lambda m, x: _transposed(
        m, x, strides=[2, 3], pads=[1, 0, 1, 1], output_padding=[1, 0])),
    Entry("conv transpose of two", lambda m, x: m.node("ConvTranspose", m.node(
        "Transpose", x, perm=[1, 0, 2, 3]), m.weights(1, 3, 3, 2))),
    Entry("conv transpose same upper", lambda m, x: _transposed(
        m, x, strides=[2, 1], auto_pad="SAME_UPPER")),
    Entry("conv transpose same lower", lambda m, x: _transposed(
        m, x, strides=[2, 1], auto_pad="SAME_LOWER")),
    Entry("conv transpose shape", lambda m, x: _transposed(
        m, x, strides=[2, 2], output_shape=[14, 11])),
    Entry("conv transpose valid", lambda m, x: _transposed(m, x, auto_pad="VALID")),
    Entry("sub", lambda m, x: m.node("Sub", m.weights(2, 1, 6), m.node("Neg", x))),
    Entry("mul div", lambda m, x: m.node("Div", m.node("Mul", x, m.weights(2, 1, 1)),
                                         m.constant(3.0))),
    Entry("sum", lambda m, x: m.node("Sum", x, x, m.weights(6))),
    Entry("sum of many", lambda m, x: m.node("Sum", x, *(m.constant(c) for c in (
        1e30, 0.25, -1e30))), runtime=False),
    Entry("sum of one", lambda m, x: m.node("Sum", x)),
    Entry("mean", lambda m, x: m.node("Mean", x, m.node("Relu", x), m.weights(6))),
    Entry("batch norm", lambda m, x: m.node("BatchNormalization", x, *map(m.constant, (
        [1.0, -2.0], [0.5, 0.25], [3.0, -1.0], [0.1, 2.0])))),
    Entry("batch norm of a matrix", lambda m, x: m.node("BatchNormalization", x, *map(m.constant, (
        [1.0, -2.0], [0.5, 0.25], [3.0, -1.0], [0.1, 2.0])), epsilon=0.01), (1, 2)),
    Entry("reduce sum", _one("ReduceSum", [1])),
    Entry("reduce mean", _one("ReduceMean", [1, -1], keepdims=0)),
    Entry("reduce all", _one("ReduceSum", keepdims=0), slack=1e-10),
    Entry("reduce nothing", _one("ReduceMax", noop_with_empty_axes=1)),
    Entry("average pool", _pooled("AveragePool", kernel_shape=[3, 2], strides=[2, 2],
                                  pads=[1, 0, 1, 1])),
    Entry("average pool with padding", _pooled(
        "AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1,
        ceil_mode=1)),
    Entry("average pool same", _pooled("AveragePool", kernel_shape=[3, 3], auto_pad="SAME_LOWER",
                                       strides=[2, 1])),
    Entry("average pool dilated", _pooled("AveragePool", kernel_shape=[2, 2], dilations=[2, 3])),
    Entry("global average pool", _pooled("GlobalAveragePool")),
]  # fmt: skip

MOVES = [
    Entry("transpose", _one("Transpose", perm=[0, 3, 1, 2])),
    Entry("transpose reversed", _one("Transpose")),
    Entry("reshape", _one("Reshape", [0, -1, 3])),
    Entry("reshape allowzero", _one("Reshape", [1, -1, 3], allowzero=1)),
    Entry("flatten", _one("Flatten", axis=-2)),
    Entry("flatten all", _one("Flatten", axis=0)),
    Entry("squeeze", lambda m, x: m.node("Squeeze", m.node("Unsqueeze", x, m.constant([0, 3])),
                                         m.constant([0]))),
    Entry("squeeze all", _one("Squeeze")),
    Entry("concat", lambda m, x: m.node("Concat", x, m.weights(1, 2, 7, 1), x, axis=3)),
    Entry("concat negative", lambda m, x: m.node("Concat", m.weights(1, 2, 7, 1), x, axis=-1)),
    Entry("concat one", lambda m, x: m.node("Concat", x, axis=1)),
    Entry("slice", _one("Slice", [6, 1], [-100, 5], [2, 3], [-2, 3])),
    Entry("slice to the end", _one("Slice", [1], [np.iinfo(np.int64).max], [-1])),
    Entry("split", lambda m, x: m.node("Sub", *m.node("Split", x, m.constant([3, 3]), outputs=2,
                                                      axis=3))),
    Entry("split numbers", lambda m, x: m.node("Split", x, outputs=3, axis=2, num_outputs=3)[2]),
    Entry("gather", _one("Gather", [[0, -1], [2, 2]], axis=2)),
    Entry("gather one", _one("Gather", 3, axis=-1)),
    Entry("pad", _one("Pad", [0, 0, 1, 2, 0, 0, 0, 1], 1.5)),
    Entry("pad zeros", _one("Pad", [0, 0, 1, 2, 0, 0, 0, 1])),
    Entry("pad axes", _one("Pad", [1, 0, 2, 1], -0.1, [-1, 2])),
    Entry("pad negative", _one("Pad", [0, 0, -1, 2, 0, 0, 1, -3], 0.5)),
    Entry("pad reflect", _one("Pad", [0, 0, 1, 2, 0, 0, 6, 1], mode="reflect")),
    Entry("pad edge", _one("Pad", [0, 0, 9, 2, 0, 1, 0, 1], mode="edge")),
    Entry("pad wrap", _one("Pad", [0, 0, 1, 2, 0, 0, 3, 1], mode="wrap")),
    Entry("tile", _one("Tile", [1, 2, 1, 3])),
    Entry("expand", lambda m, x: m.node("Expand", m.node("ReduceSum", x, m.constant([1])),
                                        m.constant([1, 3, 7, 6]))),
    Entry("expand to more", _one("Expand", [2, 1, 1, 1, 6])),
    Entry("shape arithmetic", lambda m, x: m.node("Reshape", x, m.node("Concat", m.node(
        "Unsqueeze", m.node("Gather", m.node("Shape", x), m.constant(0)), m.constant([0])),
        m.constant([-1]), axis=0))),
    Entry("shape from", lambda m, x: m.node("Reshape", x, m.node(
        "Concat", m.node("Shape", x, start=1, end=-1), m.constant([-1]), axis=0))),
    Entry("size", lambda m, x: m.node("Reshape", x, m.node(
        "Unsqueeze", m.node("Size", x), m.constant([0])))),
    Entry("range", lambda m, x: m.node("Add", x, m.node("Cast", m.node(
        "Range", m.constant(5), m.constant(-1), m.constant(-1)), to=1))),
    Entry("range of floats", lambda m, x: m.node("Add", x, m.node(
        "Range", m.constant(0.0), m.constant(1.4), m.constant(0.25)))),
    Entry("constant of shape", lambda m, x: m.node("Add", x, m.node(
        "ConstantOfShape", m.constant([2, 1, 6]), value=onnx.helper.make_tensor(
            "v", 1, [1], [0.7])))),
    Entry("expand by where", lambda m, x: m.node("Expand", m.node(
        "ReduceSum", x, m.constant([1])), (lambda s: m.node("Where", m.node(
            "Equal", s, m.node("Mul", m.node("ConstantOfShape", m.node("Shape", s),
                                             value=onnx.helper.make_tensor("v", 7, [1], [1])),
                               m.constant(-1))), m.constant([1, 1, 1, 1]), s))(
            m.constant([-1, 3, 7, 6])))),
    Entry("identity", lambda m, x: m.node("Dropout", m.node("Cast", m.node("Identity", x), to=1))),
    Entry("dropout inputs", lambda m, x: m.node(
        "Dropout", x, m.constant(0.5), m.node("Cast", m.constant(0), to=9))),
    Entry("cast like of a variable", lambda m, x: m.node("CastLike", x, m.constant(0.1))),
    Entry("cast of an integer", lambda m, x: m.node("Mul", x, m.node(
        "Cast", m.constant(3), to=1))),
    Entry("constant output", lambda m, x: m.node("Add", m.node("Mul", m.constant(0.1), m.constant(
        [0.1, 0.3])), m.constant(0.5))),
]  # fmt: skip

NONLINEAR = [
    *(Entry(f"{n} {' '.join(map(str, a.values()))}".strip(), _one(n, **a))
      for n, a in models.ACTIVATIONS),
    *(Entry(f"{n} by default", _one(n)) for n in (
        "LeakyRelu", "Elu", "Selu", "Celu", "HardSigmoid")),
    Entry("leaky relu falling", _one("LeakyRelu", alpha=-0.5)),
    Entry("leaky relu steep", _one("LeakyRelu", alpha=1.75)),
    Entry("hard sigmoid falling", _one("HardSigmoid", alpha=-0.3, beta=0.6)),
    Entry("hard sigmoid level", _one("HardSigmoid", alpha=0.0, beta=0.3)),
    Entry("hard sigmoid flat", _one("HardSigmoid", alpha=1e-10, beta=-2.0)),
    Entry("elu negative", _one("Elu", alpha=-0.5)),
    Entry("selu negative", _one("Selu", alpha=-0.5, gamma=-1.5)),
    Entry("prelu", lambda m, x: m.node("PRelu", x, m.weights(2, 1, 1))),
    Entry("swish", _one("Swish"), opset=24),
    Entry("swish of a multiple", _one("Swish", alpha=1.3), opset=24),
    Entry("clip", _one("Clip", -0.5, 0.75)),
    Entry("clip below", _one("Clip", 0.1)),
    Entry("clip above", lambda m, x: m.node("Clip", x, "", m.constant(0.1))),
    Entry("clip far out", _one("Clip", 0.0, 3.4e38)),
    Entry("pow 1", _one("Pow", 1.0)),
    Entry("pow 2", _one("Pow", [2.0])),
    Entry("pow 2 whole", _one("Pow", 2)),
    Entry("pow 3", _one("Pow", 3.0)),
    Entry("pow 4", _one("Pow", 4)),
    Entry("pow -2", lambda m, x: m.node("Pow", _away(m, x), m.constant(-2.0))),
    Entry("pow 0.5", lambda m, x: m.node("Pow", _away(m, x), m.constant(0.5))),
    *(Entry(n.lower(), _one(n)) for n in ("Sin", "Cos", "Erf", "Floor", "Ceil", "Round", "Sign")),
    *(Entry(n.lower(), lambda m, x, n=n: m.node(n, _away(m, x))) for n in (
        "Log", "Sqrt", "Reciprocal")),
    Entry("one over x", lambda m, x: m.node("Div", m.constant(2.5), _away(m, x))),
    Entry("quotient", lambda m, x: m.node("Div", x, _away(m, x))),
    Entry("quotient of other shapes", lambda m, x: m.node("Div", x, _away(m, m.node(
        "ReduceSum", x, m.constant([1]))))),
    Entry("max pool", _pooled("MaxPool", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 1, 0, 0])),
    Entry("max pool ceil", _pooled("MaxPool", kernel_shape=[2, 2], strides=[3, 2], ceil_mode=1)),
    Entry("max pool dilated", _pooled("MaxPool", kernel_shape=[2, 2], dilations=[2, 3])),
    Entry("max pool of two", lambda m, x: m.node("MaxPool", m.node(
        "Transpose", x, perm=[1, 0, 2, 3]), kernel_shape=[2, 2])),
    Entry("reduce max", _one("ReduceMax", [-1], keepdims=0)),
    Entry("reduce min", _one("ReduceMin", [1, 3])),
    Entry("global max pool", _pooled("GlobalMaxPool")),
    Entry("min", lambda m, x: m.node("Min", x, m.weights(6), m.node("Neg", x))),
    Entry("max 0", _one("Max", 0.0)),
    Entry("max of one", _one("Max")),
    Entry("max of constants", lambda m, x: m.node("Add", x, m.node(
        "Max", m.weights(6), m.constant(0.1)))),
    Entry("max of several constants", lambda m, x: m.node("Max", x, m.weights(6), m.constant(0.1))),
]  # fmt: skip


def _by_constant(name, function):
    return Entry(f"constant {name}", lambda m, x: m.node("Add", x, function(m)))


CONSTANTS = [
    *(_by_constant(n, lambda m, n=n: m.node(n, m.constant([0.1, 0.5, 0.7, 1.3, 2.0, 3.0])))
      for n in ("Neg", "Abs", "Sqrt", "Exp", "Log", "Erf", "Sin", "Cos", "Tanh", "Sigmoid",
                "Softplus", "Relu", "Reciprocal", "Floor", "Ceil", "Round", "Sign")),
    *(_by_constant(n, lambda m, n=n: m.node(n, m.constant([0.1, 0.5, 0.7, 1.3, 2.0, 3.0]),
                                            m.constant(0.7)))
      for n in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")),
    _by_constant("ReduceSum", lambda m: m.node("ReduceSum", m.constant(
        [[0.1, 0.5], [0.7, 1.3]]), m.constant([0, 1]), keepdims=0)),
    _by_constant("ReduceMean", lambda m: m.node("ReduceMean", m.constant(
        [[0.1, 0.5, 0.3]]), m.constant([0, 1]), keepdims=0)),
    _by_constant("MatMul", lambda m: m.node("MatMul", m.constant([[0.1, 0.5]]), m.constant(
        [[0.7], [1.3]]))),
    _by_constant("Gemm", lambda m: m.node("Gemm", m.constant([[0.1, 0.5]]), m.constant(
        [[0.7], [1.3]]), m.constant([0.1]), alpha=0.3, beta=0.7)),
    _by_constant("Clip", lambda m: m.node("Clip", m.constant([0.1, 0.9, 0.5, 0.3, 0.2, 0.0]),
                                          m.constant(0.2), m.constant(0.6))),
    _by_constant("Where", lambda m: m.node("Where", m.node("Less", m.constant(1), m.constant(2)),
                                           m.constant(0.3), m.constant(0.5))),
]  # fmt: skip

# Older forms of operators whose parameters moved from attributes to inputs.
OLD = [
    Entry("clip 7", _one("Clip", min=-0.5, max=0.25), opset=7),
    Entry("clip 7 below", _one("Clip", min=0.0), opset=7),
    Entry("slice 9", _one("Slice", starts=[1, 0], ends=[5, -1], axes=[2, 3]), opset=9),
    Entry("pad 10", _one("Pad", pads=[0, 0, 1, 2, 0, 0, 0, 1], value=1.5), opset=10),
    Entry("squeeze 12", _one("Squeeze", axes=[0]), opset=12),
    Entry("unsqueeze 12", _one("Unsqueeze", axes=[0, 2]), opset=12),
    Entry("reduce sum 12", _one("ReduceSum", axes=[1, 2]), opset=12),
    Entry("reduce max 17", _one("ReduceMax", axes=[1, 2], keepdims=0), opset=17),
    Entry("split 12", lambda m, x: m.node("Split", x, outputs=2, axis=3, split=[2, 4])[1],
          opset=12),
    Entry("split equal 7", lambda m, x: m.node("Split", x, outputs=3, axis=3)[1], opset=7),
    Entry("dropout 7", _one("Dropout", ratio=0.3), opset=7),
    Entry("batch norm 7", lambda m, x: m.node("BatchNormalization", x, *map(m.constant, (
        [1.0, -2.0], [0.5, 0.25], [3.0, -1.0], [0.1, 2.0]))), opset=7),
    Entry("gemm 7", lambda m, x: m.node("Gemm", x, m.weights(5, 3), m.weights(3)), (1, 5), 7),
]  # fmt: skip

# What the checker reads whether the search does or not.
WIDER = [
    Entry("pad by an inexact number", lambda m, x: m.node(
        "Pad", x, m.constant([0, 0, 1, 0, 0, 0, 0, 0]), m.node(
            "Div", m.constant(1.0), m.constant(3.0)))),
    Entry("cast like", lambda m, x: m.node("Mul", x, m.node("CastLike", m.constant(0.1), x))),
    Entry("silu by constants", lambda m, x: m.node("Mul", x, m.node("Sigmoid", m.node(
        "Mul", x, m.node("Sqrt", m.constant(2.0)))))),
    Entry("gelu by a computed root", _times_x(lambda m, x: _plus_one(m, m.node(
        "Erf", m.node("Div", x, m.node("Sqrt", m.constant(2.0))))), 2.0)),
    _by_constant("Pow", lambda m: m.node("Pow", m.constant([0.1, 0.5, 0.7, 1.3, 2.0, 3.0]),
                                         m.constant(0.7))),
    Entry("gelu by tanh, factored", lambda m, x: m.node("Mul", m.node(
        "Mul", x, m.constant(0.5)), _plus_one(m, m.node("Tanh", m.node("Mul", m.node(
            "Mul", x, m.constant(np.sqrt(2 / np.pi))), _plus_one(m, m.node(
                "Mul", m.node("Mul", x, x), m.constant(0.044715)))))))),
    Entry("softsign of a multiple", lambda m, x: m.node("Div", m.node(
        "Mul", x, m.constant(0.3)), m.node("Add", m.node("Abs", x), m.constant(1.0)))),
]  # fmt: skip

READ = [
    *LINEAR, *MOVES, *NONLINEAR, *SPELT, *PRODUCTS, *COMPOSED, *REDUCTIONS, *UNROLLED, *BRANCHES,
    *BLENDED,
    *CONSTANTS,
    *OLD,
]  # fmt: skip

# What both the checker and the importer refuse.
REFUSED = [
    Entry("hardmax", _one("Hardmax")),
    Entry("resize by a half", lambda m, x: m.node(
        "Resize", x, "", m.constant([1.0, 1.0, 1.5, 1.0]))),
    Entry("resize, cubic", lambda m, x: m.node(
        "Resize", x, "", m.constant([1.0, 1.0, 2.0, 2.0]), mode="cubic")),
    Entry("diagonal", _one("Einsum", equation="abcc->abc"), (1, 2, 3, 3)),
    Entry("scattered and added", lambda m, x: m.node(
        "ScatterND", x, m.constant([[0]]), m.weights(1, 2, 7, 6), reduction="add")),
    Entry("lstm, clipped", lambda m, x: m.node(
        "LSTM", x, m.weights(1, 8, 2), m.weights(1, 8, 2), hidden_size=2, clip=1.0), (2, 1, 2)),
    Entry("mean of layer normalization", lambda m, x: m.node("Add", *m.node(
        "LayerNormalization", x, m.weights(6), outputs=2))),
    Entry("by zero", _one("Div", 0.0)),
    Entry("pow 13", _one("Pow", 13.0)),
    Entry("pow 1.5", _one("Pow", 1.5)),
    Entry("pow of several", _one("Pow", [1.0, 2.0, 3.0, 1.0, 2.0, 3.0])),
    Entry("power of a negative number", lambda m, x: m.node("Pow", m.constant(-2.0), x)),
    Entry("power of variables", lambda m, x: m.node("Pow", _away(m, x), x)),
    Entry("product of very many", _one("ReduceProd", [2, 3])),
    Entry("local response, even", _one("LRN", size=2), (1, 5, 2)),
    Entry("unit length by l3", _one("LpNormalization", p=3)),
    Entry("indices that are not there", _one("GatherElements", [[1, 3]], axis=1), (2, 3)),
    Entry("blocks that do not fit", _one("DepthToSpace", blocksize=3), (1, 8, 2, 3)),
    Entry("product of no shapes", lambda m, x: m.node("MatMul", x, x)),
    Entry("unknown attribute", _one("Relu", wrong=1)),
    Entry("not a number", _one("Add", [np.nan])),
    Entry("left out", lambda m, x: m.node("Sum", x, "", x)),
    Entry("training", lambda m, x: m.node(
        "Dropout", x, m.constant(0.5), m.node("Cast", m.constant(1), to=9))),
    Entry("cast to integers", _one("Cast", to=7)),
    Entry("too early", _one("Gelu"), opset=19),
    Entry("max with no number", _one("Max", np.nan)),
    Entry("celu falling", _one("Celu", alpha=-1.0)),
    Entry("clip out of order", _one("Clip", 1.0, 0.0)),
    Entry("slice of nothing", _one("Slice", [3], [3], [2])),
    Entry("reflect too far", _one("Pad", [0, 0, 7, 0, 0, 0, 0, 0], mode="reflect")),
    Entry("same and dilated", lambda m, x: _conv(m, x, auto_pad="SAME_UPPER", dilations=[2, 1])),
    Entry("impossible gather", _one("Gather", [7], axis=2)),
    Entry("impossible reshape", _one("Reshape", [5, -1])),
]  # fmt: skip
