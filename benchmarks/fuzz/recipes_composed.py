"""How products of variables, steps, waves, softmax and branches get into a random graph."""

import math
from typing import Any

import numpy as np

from benchmarks.fuzz.graphs import Writer


def away(w: Writer, x: str) -> str:
    """A value that is positive: for divisors, roots and logarithms."""
    kind = w.draw.choice(("Abs", "Sigmoid", "Relu", "Exp"))
    return w.one("Add", w.one(kind, x), w.scalar_of(abs(w.draw.choice((0.5, 1.0, 3.0)))))


def _partner(w: Writer, x: str) -> str:
    """Another variable that broadcasts with x; x itself if there is none."""
    for _ in range(6):
        y = w.pick()
        try:
            np.broadcast_shapes(w.shape(x), w.shape(y))
        except ValueError:
            continue
        if w.opset >= 8 or w.shape(x) == w.shape(y):
            return y
    return x


def product(w: Writer) -> None:
    x = w.pick()
    y = _partner(w, x)
    if w.draw.random() < 0.3:
        y = w.one("Add", w.one("Mul", y, w.scalar()), w.scalar())
    w.emit("Mul", [x, y])


def quotient(w: Writer) -> None:
    x = w.pick()
    y = away(w, _partner(w, x))
    top = w.scalar() if w.draw.random() < 0.2 else x
    w.emit("Div", [top, y])


def matrix_product(w: Writer) -> None:
    x = w.pick(least=2)
    shape = list(range(len(w.shape(x))))
    turned = w.one("Transpose", x, perm=[*shape[:-2], shape[-1], shape[-2]])
    w.emit("MatMul", w.draw.choice(([x, turned], [turned, x])))


def _positive(operator: str):
    def recipe(w: Writer) -> None:
        w.emit(operator, [away(w, w.pick())])

    return recipe


def _plain(operator: str):
    def recipe(w: Writer) -> None:
        w.emit(operator, [w.pick()])

    return recipe


def _power(w: Writer) -> None:
    x, exponent = w.pick(), w.draw.choice((3, 4, 5, 0.5, -1, -2))
    w.emit("Pow", [away(w, x) if exponent < 3 else x, w.scalar_of(exponent)])


def _softmax(operator: str):
    def recipe(w: Writer) -> None:
        x = w.pick(least=1)
        rank = len(w.shape(x))
        axis = w.draw.choice((None, *range(-rank, rank)))
        if axis is None and rank < 2 and w.opset < 13:
            axis = 0
        w.emit(operator, [x], axis=axis if axis is None or w.opset >= 11 else axis % rank)

    return recipe


def _layer_normalization(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axis = w.draw.choice((None, -1, len(shape) - 1, 0))
    items = [x, w.floats(shape[-1 if axis is None else axis :])]
    if w.draw.random() < 0.7:
        items.append(w.floats(shape[-1:]))
    w.emit("LayerNormalization", items, axis=axis, epsilon=w.draw.choice((None, 0.01, 1.0)))


def _instance_normalization(w: Writer) -> None:
    x = w.pick(3, 4)
    channels = w.shape(x)[1:2]
    epsilon = w.draw.choice((None, 0.01, 1.0))
    w.emit("InstanceNormalization", [x, w.floats(channels), w.floats(channels)], epsilon=epsilon)


def _norm(operator: str):
    def recipe(w: Writer) -> None:
        x = w.pick(least=1)
        rank = len(w.shape(x))
        settings: dict[str, Any] = {"keepdims": w.draw.choice((None, 0, 1))}
        axes = w.draw.sample(range(rank), w.draw.randint(1, rank))
        if w.version(operator) >= 18:
            w.emit(operator, [x, w.ints(axes)], **settings)
        else:
            w.emit(operator, [x], axes=axes, **settings)

    return recipe


def _resize(operator: str):
    def recipe(w: Writer) -> None:
        x = w.pick(least=1)
        scales = [float(w.draw.choice((1, 1, 2, 3))) for _ in w.shape(x)]
        if w.version(operator) == 7:
            w.emit(operator, [x], scales=scales)
            return
        settings: dict[str, Any] = {}
        items = [x, w.keep(np.asarray(scales, np.float32))]
        if operator == "Resize" and w.opset >= 11:
            region = w.keep(np.zeros(0, np.float32)) if w.opset < 13 else ""
            items = [x, region, items[1]]
            if w.draw.random() < 0.5:
                settings = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        w.emit(operator, items, **settings)

    return recipe


def _shrink(w: Writer) -> None:
    numbers: dict[str, Any] = {
        "lambd": w.draw.choice((None, 0.0, 1.0)),
        "bias": w.draw.choice((None, 0.5, -1.0)),
    }
    w.emit("Shrink", [w.pick()], **numbers)


def _thresholded_relu(w: Writer) -> None:
    w.emit("ThresholdedRelu", [w.pick()], alpha=w.draw.choice((None, 0.0, 0.5)))


def _branch(w: Writer) -> None:
    """Where, on comparisons of one value with numbers."""
    x, tests = w.pick(), ["Greater", "Less"]
    tests += ["GreaterOrEqual", "LessOrEqual"] if w.opset >= 12 else []

    def compared() -> str:
        return w.one(w.draw.choice(tests), x, w.scalar_of(w.draw.choice((-1, 0, 0.5, 1))))

    condition = compared()
    if w.draw.random() < 0.5:
        condition = w.one(w.draw.choice(("And", "Or", "Xor")), condition, compared())
    if w.draw.random() < 0.3:
        condition = w.one("Not", condition)
    line = w.one("Mul", x, w.scalar_of(w.draw.choice((0.25, -1, 2))))
    pair = [x, line] if w.draw.random() < 0.5 else [w.scalar_of(w.draw.choice((0, 1))), line]
    w.draw.shuffle(pair)
    w.emit("Where", [condition, *pair])


def _blend(w: Writer) -> None:
    """Where, on comparisons of any two values, or on a mask, between any two."""
    x = w.pick()
    kind = w.draw.randrange(4)
    test = w.draw.choice(("Greater", "Less"))
    if kind == 0:
        condition = w.one(test, x, _partner(w, x))
    elif kind == 1:
        condition = w.one(test, x, w.floats(w.shape(x)))
    elif kind == 2:
        condition = w.one(test, w.scalar_of(w.draw.choice((-1, 0, 1))), x)
    else:
        w.version("Where")
        mask = [w.draw.random() < 0.5 for _ in range(math.prod(w.shape(x)))]
        condition = w.keep(np.reshape(mask, w.shape(x)))
    if w.draw.random() < 0.2 and kind < 3:
        w.emit("Mul", [w.one("Cast", condition, to=int(w.tensor_of(np.zeros(1)).data_type)), x])
        return
    pair = [w.one(w.draw.choice(("Sigmoid", "Abs", "Neg", "Tanh")), x), _partner(w, x)]
    if w.draw.random() < 0.4:
        pair[w.draw.randrange(2)] = w.floats(w.shape(x))
    w.draw.shuffle(pair)
    w.emit("Where", [condition, *pair])


RECIPES = {
    "branch": _branch, "blend": _blend, "Shrink": _shrink, "ThresholdedRelu": _thresholded_relu,
    "product": product, "quotient": quotient, "matrix product": matrix_product, "power": _power,
    **{name: _plain(name) for name in ("Sin", "Cos", "Erf", "Floor", "Ceil", "Round", "Sign")},
    **{name: _positive(name) for name in ("Log", "Sqrt", "Reciprocal")},
    **{name: _softmax(name) for name in ("Softmax", "LogSoftmax")},
    **{name: _norm(name) for name in ("ReduceL1", "ReduceL2", "ReduceSumSquare")},
    **{name: _resize(name) for name in ("Upsample", "Resize")},
    "LayerNormalization": _layer_normalization,
    "InstanceNormalization": _instance_normalization,
}  # fmt: skip
