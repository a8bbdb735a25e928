"""Constants that are computed by chains of nodes; importers fold them, and may round."""

import numpy as np
from onnx import TensorProto

from benchmarks.fuzz.graphs import Skip, Writer


def _binary(operator: str):
    def step(w: Writer, name: str) -> str:
        other = w.keep(w.palette.array(w.draw.choice((w.shape(name), (), (1,)))))
        pair = (name, other) if w.draw.random() < 0.7 else (other, name)
        return w.one(operator, *pair)

    return step


def _unary(operator: str, **settings):
    return lambda w, name: w.one(operator, name, **settings)


def _there_and_back(w: Writer, name: str) -> str:
    """Cast to a wider type, or to float64 in any case: nothing is rounded."""
    wide = w.one("Cast", name, to=TensorProto.DOUBLE)
    return w.one("Cast", wide, to=w.kind)


def _reshaped(w: Writer, name: str) -> str:
    flat = w.one("Reshape", name, w.ints([-1]))
    return w.one("Reshape", flat, w.ints(w.shape(name)))


def _expanded(w: Writer, name: str) -> str:
    return w.one("Expand", name, w.ints(w.shape(name)))


def _summed(w: Writer, name: str) -> str:
    """name + the sum of some other numbers."""
    others = w.keep(w.palette.array((3,)))
    total = w.one("ReduceSum", others, keepdims=w.draw.choice((0, 1)))
    return w.one("Add", name, total)


def _cancelled(w: Writer, name: str) -> str:
    """(name + big) - big: in floating point, that loses digits."""
    big = w.scalar_of(w.draw.choice((16777216.0, 1e10, 1e20, 2.0**60)))
    return w.one("Sub", w.one("Add", name, big), big)


def _joined(w: Writer, name: str) -> str:
    if not w.shape(name):
        raise Skip("a scalar")
    twice = w.one("Concat", name, name, axis=0)
    first, _ = w.emit("Split", [twice], 2, axis=0, num_outputs=2 if w.opset >= 18 else None)
    return first


def _product(w: Writer, name: str) -> str:
    shape = w.shape(name)
    if len(shape) != 2:
        raise Skip("no matrix")
    return w.one("MatMul", name, w.keep(w.palette.array((shape[1], shape[1]))))


def _root(w: Writer, name: str) -> str:
    return w.one("Sqrt", w.one("Abs", name))


def _counted(w: Writer, name: str) -> str:
    """name times how many entries it has."""
    size = w.one("Cast", w.one("Size", name), to=w.kind)
    return w.one("Mul", name, size)


def _filled(w: Writer, name: str) -> str:
    shape = w.one("Shape", name)
    value = w.tensor_of(w.palette.array((1,)))
    return w.one("Add", name, w.one("ConstantOfShape", shape, value=value))


_STEPS = (
    _binary("Add"), _binary("Sub"), _binary("Mul"), _binary("Div"), _binary("Max"), _binary("Min"),
    _unary("Neg"), _unary("Identity"), _unary("Abs"), _unary("Relu"), _unary("Tanh"),
    _unary("Sigmoid"), _unary("Erf"), _unary("Exp"), _unary("Reciprocal"), _unary("Softplus"),
    _there_and_back, _reshaped, _expanded, _summed, _cancelled, _joined, _product, _root, _counted,
    _filled,
)  # fmt: skip


def chained(w: Writer, name: str) -> str:
    """A constant of the same shape and type, computed from this one."""
    shape, kind = w.shape(name), w.values[name].type
    for _ in range(w.draw.choice((1, 1, 2, 3))):
        try:
            new = w.draw.choice(_STEPS)(w, name)
        except Skip:
            continue
        if w.shape(new) == shape and w.values[new].type == kind and w.values[new].constant:
            name = new
    return name


def computed_range(w: Writer) -> str:
    """Range(start, limit, step) of numbers that floating point adds exactly."""
    start, step = w.draw.choice((0.0, -2.0, 0.5)), w.draw.choice((1.0, 0.5, -1.0))
    count = w.draw.choice((1, 2, 3, 4))
    limit = start + step * count - step * w.draw.choice((0, 0.5))
    numbers = [w.keep(np.asarray(x, w.dtype)) for x in (start, limit, step)]
    return w.one("Range", *numbers)
