"""Recipes for operators that move entries, and for constants that depend on shapes."""

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from benchmarks.fuzz.chains import computed_range
from benchmarks.fuzz.graphs import Skip, Writer


def beside(w: Writer, shape) -> tuple[int, ...]:
    """A shape that broadcasts with `shape`: the same, fewer axes, ones, or more of them."""
    shape = tuple(shape)
    kind = w.draw.randrange(6)
    if kind == 0:
        return ()
    if kind == 1:
        return (1,)
    if kind == 2 and shape:
        return shape[w.draw.randrange(len(shape)) :]
    if kind == 3 and shape:
        return tuple(n if w.draw.random() < 0.5 else 1 for n in shape)
    if kind == 4 and math.prod(shape) <= 8:
        return (2, *(n if w.draw.random() < 0.5 else 1 for n in shape))
    return shape


def attribute(value: float) -> float:
    """A number that an attribute can hold."""
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    if not math.isfinite(value):
        raise Skip("infinite")
    return value


def _axes_of(w: Writer, operator: str, items: list, axes: list[int]) -> dict:
    """Axes as an attribute or as an input, whichever the opset has."""
    if w.has(operator, "axes"):
        return {"axes": axes}
    items.append(w.ints(axes))
    return {}


def _reshape(w: Writer) -> None:
    x = w.pick()
    shape = list(w.shape(x))
    size, kind = math.prod(shape), w.draw.randrange(5)
    if kind == 0:
        new = [-1]
    elif kind == 1:
        new = [0 if k < len(shape) - 1 else -1 for k in range(max(len(shape), 1))]
        new = new if shape else [1]
    elif kind == 2:
        divisor = w.draw.choice([d for d in range(1, size + 1) if size % d == 0])
        new = [1, divisor, size // divisor]
    elif kind == 3:
        new = [] if size == 1 else [size]
    else:
        new = [1, -1]
    settings = {"allowzero": 1} if w.opset >= 14 and 0 not in new and kind == 2 else {}
    if not new:
        w.emit("Reshape", [x, w.keep(np.zeros(0, np.int64))], **settings)
    elif kind == 4 and w.draw.random() < 0.5:
        # The shape is computed, as exporters do.
        length = w.one("Gather", w.one("Shape", x), w.ints([0]), axis=0) if shape else w.ints([1])
        w.emit("Reshape", [x, w.one("Concat", length, w.ints([-1]), axis=0)])
    else:
        w.emit("Reshape", [x, w.ints(new)], **settings)


def _flatten(w: Writer) -> None:
    x = w.pick()
    rank = len(w.shape(x))
    least = -rank if w.opset >= 11 else 0
    w.emit("Flatten", [x], axis=w.draw.choice((None, *range(least, rank + 1))) if rank else 0)


def _squeeze(w: Writer) -> None:
    x = w.pick()
    ones = [k for k, n in enumerate(w.shape(x)) if n == 1]
    if w.draw.random() < 0.3:
        w.emit("Squeeze", [x])
        return
    if not ones:
        raise Skip("no axis of length one")
    axes = w.draw.sample(ones, w.draw.randint(1, len(ones)))
    if w.opset >= 11:
        axes = [a - len(w.shape(x)) if w.draw.random() < 0.3 else a for a in axes]
    items = [x]
    settings = _axes_of(w, "Squeeze", items, axes)
    w.emit("Squeeze", items, **settings)


def _unsqueeze(w: Writer) -> None:
    x = w.pick()
    count = w.draw.choice((1, 1, 2))
    rank = len(w.shape(x)) + count
    if rank > 5:
        raise Skip("many axes")
    axes = w.draw.sample(range(rank), count)
    if w.opset >= 11:
        axes = [a - rank if w.draw.random() < 0.3 else a for a in axes]
    items = [x]
    settings = _axes_of(w, "Unsqueeze", items, axes)
    w.emit("Unsqueeze", items, **settings)


def _transpose(w: Writer) -> None:
    x = w.pick()
    order = list(range(len(w.shape(x))))
    w.draw.shuffle(order)
    w.emit("Transpose", [x], perm=None if w.draw.random() < 0.2 or not order else order)


def _concat(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axis, items = w.draw.randrange(len(shape)), [x]
    for _ in range(w.draw.choice((0, 1, 1, 2))):
        fits = [
            name for name, e in w.values.items()
            if not e.constant and e.type == w.type and len(e.shape) == len(shape)
            and np.array_equal(np.delete(e.shape, axis), np.delete(shape, axis))
        ]  # fmt: skip
        if w.draw.random() < 0.5:
            items.append(w.draw.choice(fits))
        else:
            length = w.draw.choice((1, 2))
            items.append(w.floats([length if k == axis else n for k, n in enumerate(shape)]))
    w.draw.shuffle(items)
    negative = w.opset >= 11 and w.draw.random() < 0.3
    w.emit("Concat", items, axis=axis - len(shape) if negative else axis)


def _slice(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axes = w.draw.sample(range(len(shape)), w.draw.randint(1, len(shape)))
    starts, ends, steps = [], [], []
    for axis in axes:
        n = shape[axis]
        step = w.draw.choice((1, 1, 1, 2, -1, -2, 3)) if w.opset >= 10 else 1
        if step > 0:
            starts.append(w.draw.choice((0, 0, 1, -1, -n, -n - 3)))
            ends.append(w.draw.choice((n, n, n + 5, 2**31 - 1, -1, 2**63 - 1)))
        else:
            starts.append(w.draw.choice((n - 1, -1, n + 4, 2**31 - 1)))
            ends.append(w.draw.choice((-n - 1, -(2**31), 0, -(2**63) + 1)))
        steps.append(step)
    if w.opset >= 10:
        axes = [a - len(shape) if w.draw.random() < 0.3 else a for a in axes]
    if w.opset < 10:
        w.emit("Slice", [x], starts=starts, ends=ends, axes=axes)
        return
    items = [x, w.ints(starts), w.ints(ends), w.ints(axes)]
    if axes == list(range(len(axes))) and w.draw.random() < 0.5:
        items[3] = ""
    if any(s != 1 for s in steps) or w.draw.random() < 0.3:
        items.append(w.ints(steps))
    while not items[-1]:
        items.pop()
    w.emit("Slice", items)


def _split(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axis = w.draw.randrange(len(shape))
    n, items, settings = shape[axis], [x], {}
    count = w.draw.choice((1, 2, 2, 3))
    if count > n:
        raise Skip("short")
    if w.draw.random() < 0.6:
        cuts = sorted(w.draw.sample(range(1, n), count - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        if w.has("Split", "split"):
            settings["split"] = sizes
        else:
            items.append(w.ints(sizes))
    elif w.opset >= 18:
        settings["num_outputs"] = count
    negative = w.opset >= 11 and w.draw.random() < 0.3
    settings["axis"] = axis - len(shape) if negative else axis
    w.emit("Split", items, count, **settings)


def _gather(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axis = w.draw.randrange(len(shape))
    n, form = shape[axis], w.draw.choice(((), (1,), (2,), (3,), (2, 2)))
    least = -n if w.opset >= 11 else 0
    indices = [w.draw.randrange(least, n) for _ in range(math.prod(form))]
    array = np.asarray(indices, w.draw.choice((np.int64, np.int32))).reshape(form)
    negative = w.opset >= 11 and w.draw.random() < 0.3
    w.emit("Gather", [x, w.keep(array)], axis=axis - len(shape) if negative else axis)


def _expand(w: Writer) -> None:
    x = w.pick()
    shape = beside(w, w.shape(x))
    shape = tuple(2 if n == 1 and w.draw.random() < 0.5 else n for n in shape)
    if not shape:
        raise Skip("a scalar")
    w.emit("Expand", [x, w.ints(shape)])


def _tile(w: Writer) -> None:
    x = w.pick(least=1)
    w.emit("Tile", [x, w.ints([w.draw.choice((1, 1, 2, 3)) for _ in w.shape(x)])])


def _pad(w: Writer) -> None:
    x = w.pick(least=1)
    rank = len(w.shape(x))
    modes = ["constant", "constant", "reflect", "edge"] + ["wrap"] * (w.opset >= 19)
    mode = w.draw.choice(modes)
    widths = [w.draw.choice((0, 0, 1, 1, 2, -1)) for _ in range(2 * rank)]
    if mode != "constant":
        widths = [max(n, 0) for n in widths]
    settings: dict[str, Any] = (
        {} if mode == "constant" and w.draw.random() < 0.5 else {"mode": mode}
    )
    value = w.draw.random() < 0.6 and mode == "constant"
    if w.opset < 11:
        if value:
            settings["value"] = attribute(w.palette.entry())
        w.emit("Pad", [x], pads=widths, **settings)
        return
    if w.opset >= 18 and w.draw.random() < 0.3:
        axes = w.draw.sample(range(rank), w.draw.randint(1, rank))
        items = [x, w.ints([widths[a] for a in axes] + [widths[a + rank] for a in axes])]
        items.append(w.floats((), [w.palette.entry()]) if value else "")
        items.append(w.ints([a - rank if w.draw.random() < 0.3 else a for a in axes]))
    else:
        items = [x, w.ints(widths)]
        if value:
            items.append(w.floats((), [w.palette.entry()]))
    w.emit("Pad", items, **settings)


def _constants(w: Writer) -> None:
    """x plus a constant that depends on x's shape, or that nodes make of nothing."""
    x, kind = w.pick(), w.draw.randrange(4)
    if kind == 0:
        value = w.tensor_of(w.palette.array((1,)))
        constant = w.one("ConstantOfShape", w.one("Shape", x), value=value)
    elif kind == 1:
        constant = computed_range(w)
    elif kind == 2:
        constant = w.one("Cast", w.one("Size", x), to=w.kind)
    else:
        start, end = w.draw.choice(((0, None), (None, None), (-1, None), (0, 1), (1, None)))
        settings = {"start": start, "end": end} if w.opset >= 15 else {}
        constant = w.one("Cast", w.one("Shape", x, **settings), to=w.kind)
    w.emit(w.draw.choice(("Add", "Sub", "Mul", "Max")), [x, constant])


def _constant(w: Writer) -> None:
    """A Constant in one of its other forms, added."""
    x = w.pick()
    if w.opset < 12 or w.kind != TensorProto.FLOAT:
        constant = w.one("Constant", value=w.tensor_of(w.palette.array((1,))))
    elif w.draw.random() < 0.5:
        constant = w.one("Constant", value_float=float(w.palette.array(())))
    else:
        numbers = [float(n) for n in w.palette.array((w.draw.choice((1, 2)),))]
        constant = w.one("Constant", value_floats=numbers)
    w.emit(w.draw.choice(("Add", "Mul", "Max")), [x, constant])


RECIPES = {
    "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Transpose": _transpose, "Concat": _concat, "Slice": _slice, "Split": _split,
    "Gather": _gather, "Expand": _expand, "Tile": _tile, "Pad": _pad, "constants": _constants,
    "Constant": _constant,
}  # fmt: skip
