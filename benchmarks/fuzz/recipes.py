"""How each operator gets into a random graph: its inputs, attributes and corner cases."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from benchmarks.fuzz import (
    patterns,
    recipes_composed,
    recipes_reductions,
    recipes_shapes,
    recipes_unrolled,
    recipes_windows,
)
from benchmarks.fuzz.graphs import Writer
from benchmarks.fuzz.recipes_shapes import attribute, beside

# -- arithmetic ------------------------------------------------------------------------------------


def _other(w: Writer, x: str, operator: str) -> str:
    """A second operand: a constant, or a variable that broadcasts."""
    if w.draw.random() < 0.35:
        y = w.pick()
        try:
            np.broadcast_shapes(w.shape(x), w.shape(y))
        except ValueError:
            pass
        else:
            if w.opset >= 8 or operator in ("Add", "Sub") or w.shape(x) == w.shape(y):
                return y
    same = w.opset < 8 and operator not in ("Add", "Sub", "Mul", "Div")
    return w.floats(w.shape(x) if same else beside(w, w.shape(x)))


def _sums(operator: str):
    def recipe(w: Writer) -> None:
        x = w.pick()
        items = [x, _other(w, x, operator)]
        if operator in ("Sum", "Mean", "Max", "Min"):
            if w.draw.random() < 0.15:
                items = [x]
            while w.draw.random() < 0.4 and len(items) < 5:
                items.append(_other(w, x, operator))
        w.draw.shuffle(items)
        w.emit(operator, items)

    return recipe


def _mul(w: Writer) -> None:
    x = w.pick()
    pair = [x, w.floats(beside(w, w.shape(x)))]
    w.draw.shuffle(pair)
    w.emit("Mul", pair)


def _div(w: Writer) -> None:
    x = w.pick()
    array = w.palette.array(beside(w, w.shape(x)))
    w.emit("Div", [x, w.floats(array.shape, np.where(array == 0, 3, array))])


def _pow(w: Writer) -> None:
    x = w.pick()
    shape = w.draw.choice(((), (1,), w.shape(x)))
    exponent = w.draw.choice((1, 2, 2, 2, 3))
    if w.opset >= 12 and w.draw.random() < 0.3:
        w.emit("Pow", [x, w.keep(np.full(shape, exponent, np.int64))])
    else:
        w.emit("Pow", [x, w.floats(shape, np.full(shape, exponent))])


def _matmul(w: Writer) -> None:
    x = w.pick(least=1)
    shape: tuple[int, ...] = w.shape(x)
    n = w.draw.choice((1, 2, 3))
    left = w.draw.random() < 0.35
    if left:
        inner = shape[max(len(shape) - 2, 0)]
        other = w.draw.choice(((n, inner), (n, inner), (inner,), (1, n, inner), (2, n, inner)))
    else:
        other = w.draw.choice(
            ((shape[-1], n), (shape[-1], n), (shape[-1],), (1, shape[-1], n), (2, shape[-1], n))
        )
    y = w.floats(other)
    w.emit("MatMul", [y, x] if left else [x, y])


def _gemm(w: Writer) -> None:
    x = w.pick(2)
    rows, columns = w.shape(x)
    n, left = w.draw.choice((1, 2, 3)), w.draw.random() < 0.25
    flip, flip_weights = w.draw.randrange(2), w.draw.randrange(2)
    settings: dict[str, Any]
    if left:
        inner, width = (columns, rows) if flip else (rows, columns)
        weights = (inner, n) if flip_weights else (n, inner)
        out, pair = (n, width), [w.floats(weights), x]
        settings = {"transA": flip_weights, "transB": flip}
    else:
        height, inner = (columns, rows) if flip else (rows, columns)
        weights = (n, inner) if flip_weights else (inner, n)
        out, pair = (height, n), [x, w.floats(weights)]
        settings = {"transA": flip, "transB": flip_weights}
    shapes = [(), (1,), (out[1],), (1, out[1]), (out[0], 1), (1, 1), out]
    if w.opset < 11 or w.draw.random() < 0.85:
        pair.append(w.floats(w.draw.choice(shapes)))
    for name in ("alpha", "beta"):
        if w.draw.random() < 0.5:
            settings[name] = attribute(w.draw.choice((0.5, 2.0, 0.1, -1.0, 0, w.palette.entry())))
    w.emit("Gemm", pair, **{k: v for k, v in settings.items() if v or k in ("alpha", "beta")})


def _batch_normalization(w: Writer) -> None:
    x = w.pick(2, 3, 4)
    n = w.shape(x)[1]
    variance = np.asarray([w.palette.positive() for _ in range(n)])
    weights = [w.floats((n,)) for _ in range(3)]
    epsilon = w.draw.choice((None, None, 1e-5, 1e-3, 0.0, 1e-12))
    w.emit("BatchNormalization", [x, *weights, w.floats((n,), variance)],
           epsilon=epsilon, momentum=w.draw.choice((None, 0.5)))  # fmt: skip


# -- activations and types -------------------------------------------------------------------------


def _unary(operator: str, **ranges):
    def recipe(w: Writer) -> None:
        settings = {}
        for name, numbers in ranges.items():
            if w.draw.random() < 0.7:
                number = w.draw.choice((*numbers, w.draw.uniform(0.01, 2)))
                settings[name] = float(np.float32(number))
        w.emit(operator, [w.pick()], **settings)

    return recipe


def _prelu(w: Writer) -> None:
    x = w.pick()
    shape = beside(w, w.shape(x))
    shape = shape if np.broadcast_shapes(shape, w.shape(x)) == w.shape(x) else ()
    w.emit("PRelu", [x, w.floats(shape)])


def _gelu(w: Writer) -> None:
    w.emit("Gelu", [w.pick()], approximate=w.draw.choice((None, "none", "tanh")))


def _clip(w: Writer) -> None:
    x = w.pick()
    low, high = sorted((w.palette.entry(), w.palette.entry()))
    if w.draw.random() < 0.1:
        low, high = high, low if w.opset >= 13 else high
    kind = w.draw.randrange(4)
    low, high = None if kind == 1 else low, None if kind == 2 else high
    if w.opset < 11:
        ends = [None if e is None else attribute(e) for e in (low, high)]
        w.emit("Clip", [x], min=ends[0], max=ends[1])
        return
    items = [x, "" if low is None else w.floats((), [low])]
    if high is not None:
        items.append(w.floats((), [high]))
    w.emit("Clip", items if items[-1] else [x])


def _dropout(w: Writer) -> None:
    x, items, settings = w.pick(), [], {}
    if w.opset < 12:
        settings["ratio"] = 0.5
    else:
        items = [w.keep(np.asarray(0.5, np.float32))] if w.draw.random() < 0.6 else []
        if items and w.draw.random() < 0.5:
            items.append(w.keep(np.zeros((), bool)))
    w.emit("Dropout", [x, *items], w.draw.choice((1, 2)), **settings)


def _cast(w: Writer) -> None:
    """To another floating-point type and back: real arithmetic does not notice."""
    x = w.pick()
    other = w.draw.choice((TensorProto.FLOAT, TensorProto.DOUBLE))
    y = w.one("Cast", x, to=other)
    if w.draw.random() < 0.5:
        y = w.one("Relu", y)
    w.emit("Cast", [y], to=w.kind)


def _cast_like(w: Writer) -> None:
    x = w.pick()
    y = w.one("CastLike", x, w.keep(np.zeros((), w.draw.choice((np.float32, np.float64)))))
    w.emit("CastLike", [y, w.draw.choice((x, w.scalar()))])


def _unused(w: Writer) -> None:
    """A node that no output needs, of an operator that nobody has to know."""
    operator = w.draw.choice(("Hardmax", "Tan", "Relu"))
    node = helper.make_node(operator, [w.pick(least=1)], [w.name()], w.name())
    w.check_types(node)
    w.nodes.append(node)  # it is not evaluated, and has no value


def _local_function(w: Writer) -> None:
    """A local function with an attribute that a node in it refers to, perhaps nested."""
    leaky = helper.make_node("LeakyRelu", ["a"], ["c"])
    reference = helper.make_attribute("alpha", 0.0)
    reference.ClearField("f")
    reference.ref_attr_name = "slope"
    leaky.attribute.append(reference)
    nodes = [
        leaky,
        helper.make_node("Sub", ["c", "b"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
    ]
    outputs = w.draw.choice((["d"], ["e"], ["e", "d"]))
    name = w.function(nodes, ["a", "b"], outputs, ["slope"])
    settings = {"slope": float(np.float32(w.draw.choice((0.01, 0.25, -0.5))))}
    x = w.pick()
    y = w.floats(w.draw.choice(((), w.shape(x))))
    made = w.emit(name, [x, y], len(outputs), domain="own", **settings)
    if w.draw.random() < 0.3:
        inner = helper.make_node(name, ["p", "p"], ["q"] + ["r"] * (len(outputs) - 1), domain="own")
        inner.attribute.append(helper.make_attribute("slope", 0.5))
        outer = w.function([inner], ["p"], ["q"])
        w.functions["own", outer].opset_import.append(helper.make_opsetid("own", 1))
        w.emit(outer, made[:1], domain="own")


RECIPES = {
    "Add": _sums("Add"), "Sub": _sums("Sub"), "Sum": _sums("Sum"), "Mean": _sums("Mean"),
    "Max": _sums("Max"), "Min": _sums("Min"), "Mul": _mul, "Div": _div, "Pow": _pow,
    "Neg": _unary("Neg"), "MatMul": _matmul, "Gemm": _gemm,
    "BatchNormalization": _batch_normalization,
    **recipes_windows.RECIPES, **recipes_shapes.RECIPES, **recipes_composed.RECIPES,
    **recipes_unrolled.RECIPES, **recipes_reductions.RECIPES,
    "Relu": _unary("Relu"), "Abs": _unary("Abs"), "Exp": _unary("Exp"),
    "LeakyRelu": _unary("LeakyRelu", alpha=(0.01, 0.0, 1.0, -0.5, 2.0)), "PRelu": _prelu,
    "Elu": _unary("Elu", alpha=(1.0, 0.5, 2.0)), "Celu": _unary("Celu", alpha=(1.0, 0.5, 3.0)),
    "Selu": _unary("Selu", alpha=(1.0, 1.5), gamma=(1.0, 2.0)), "Sigmoid": _unary("Sigmoid"),
    "Tanh": _unary("Tanh"), "Softplus": _unary("Softplus"), "Softsign": _unary("Softsign"),
    "HardSigmoid": _unary("HardSigmoid", alpha=(0.2, 0.16666667, -0.3), beta=(0.5, 0.0, 2.0)),
    "HardSwish": _unary("HardSwish"), "Mish": _unary("Mish"), "Gelu": _gelu,
    "Swish": _unary("Swish", alpha=(1.0, 2.0, -1.0)), "Clip": _clip,
    "Identity": _unary("Identity"), "Dropout": _dropout, "Cast": _cast, "CastLike": _cast_like,
    "unused": _unused, "function": _local_function, **patterns.PATTERNS,
}  # fmt: skip

_OFTEN = {"Add": 3, "Mul": 3, "Gemm": 4, "MatMul": 3, "Conv": 3, "Relu": 4, "Sum": 2,
          "Pad": 2, "AveragePool": 2, "MaxPool": 2, "Slice": 1.5, "ConvTranspose": 1.5, "Swish": 2,
          "Gelu": 2}  # fmt: skip
_RARE = {"Identity": 0.3, "Dropout": 0.3, "Cast": 0.4, "CastLike": 0.4, "unused": 0.4, "Neg": 0.5,
         "Exp": 0.5, "function": 0.5, "Upsample": 0.5, "Resize": 0.5}  # fmt: skip
WEIGHTS = [
    _OFTEN.get(name, _RARE.get(name, 0.8 if name in patterns.PATTERNS else 1.0)) for name in RECIPES
]
