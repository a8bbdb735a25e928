"""ONNX operators that move entries around: reshaping, slicing, joining, repeating, padding."""

import math
from typing import Literal

import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Value
from stagecert.networks.importers.enclosures import CONSTANT, Constant, Enclosure, simplified
from stagecert.networks.importers.onnx.nodes import (
    Call,
    Refused,
    check_size,
    converts,
    place,
    places,
)
from stagecert.networks.importers.onnx.where import indicator


def reshape(call: Call, x: Value, shape) -> Value:
    """The entries in another shape, where it is another."""
    shape = tuple(int(n) for n in shape)
    if math.prod(shape) != math.prod(x.shape):
        raise Refused(
            f"cannot make the shape {shape} of {x.shape}; if the model was exported for a batch of "
            "several points, export it for a batch of one or of any size"
        )
    return x if shape == x.shape else call.add(op.Reshape(shape), x)


@converts("Reshape")
def _reshape(call: Call):
    x, shape = call.variable(), call.integers("shape", 1) or []
    if not call.get("allowzero", 0):
        if any(n == 0 and k >= len(x.shape) for k, n in enumerate(shape)):
            raise Refused(f"copies an axis that is not there: {shape} for {x.shape}")
        shape = [n or x.shape[k] for k, n in enumerate(shape)]
    if shape.count(-1) > 1 or any(n < -1 for n in shape):
        raise Refused(f"has the impossible shape {shape}")
    if -1 in shape:
        known = math.prod(n for n in shape if n != -1)
        rest = math.prod(x.shape) // known if known else 0
        shape = [rest if n == -1 else n for n in shape]
    return reshape(call, x, shape)


@converts("Flatten")
def _flatten(call: Call):
    x, axis = call.variable(), call.get("axis", 1)
    if not -len(x.shape) <= axis <= len(x.shape):
        raise Refused(f"names axis {axis} of a tensor with {len(x.shape)} axes")
    axis = axis + len(x.shape) if axis < 0 else axis
    return reshape(call, x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@converts("Squeeze")
def _squeeze(call: Call):
    x, axes = call.variable(), call.integers("axes", 1)
    if axes is None:
        axes = [k for k, n in enumerate(x.shape) if n == 1]
    axes = places(axes, len(x.shape))
    if any(x.shape[k] != 1 for k in axes):
        raise Refused(f"removes an axis that is longer than one: {axes} of {x.shape}")
    return reshape(call, x, [n for k, n in enumerate(x.shape) if k not in axes])


@converts("Unsqueeze")
def _unsqueeze(call: Call):
    x, axes = call.variable(), call.integers("axes", 1) or []
    rank = len(x.shape) + len(axes)
    axes, old = places(axes, rank), iter(x.shape)
    return reshape(call, x, [1 if k in axes else next(old) for k in range(rank)])


@converts("Transpose")
def _transpose(call: Call):
    x = call.variable()
    axes = call.integers("perm")
    axes = tuple(reversed(range(len(x.shape)))) if axes is None else tuple(axes)
    if sorted(axes) != list(range(len(x.shape))):
        raise Refused(f"has the impossible order of axes {axes}")
    return call.add(op.Transpose(axes), x)


@converts("Concat")
def _concat(call: Call):
    items = [x for x in call.inputs if x is not None]
    axis = place(call.get("axis", 0), len(items[0].shape))
    if any(isinstance(x, np.ndarray) and x.dtype.kind != "f" for x in items):
        raise Refused("joins floating-point numbers with others")
    if not any(isinstance(x, CONSTANT) for x in items):
        return items[0] if len(items) == 1 else call.add(op.Concat(axis), *_values(items))
    # A constant part is made of zeros beside its neighbour, and shifted.
    shapes = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in items}
    if len(shapes) != 1:
        raise Refused("joins tensors whose shapes do not fit")
    parts: list[Value] = []
    before = 0
    widths: list[tuple[int, int]] = []
    for x in items:
        if isinstance(x, Value):
            parts.append(x)
            widths.append((before, 0))
            before = 0
        elif parts:
            widths[-1] = (widths[-1][0], widths[-1][1] + x.shape[axis])
        else:
            before += x.shape[axis]
    none = ((0, 0),)
    padded = [
        call.add(op.Pad(none * axis + (w,) + none * (len(x.shape) - axis - 1)), x) if any(w) else x
        for x, w in zip(parts, widths, strict=True)
    ]
    whole = padded[0] if len(padded) == 1 else call.add(op.Concat(axis), *padded)
    check_size(whole.shape)
    shift = [np.zeros(x.shape, np.float32) if isinstance(x, Value) else x for x in items]
    return call.shift(whole, joined(shift, axis))


def joined(constants, axis: int) -> Constant:
    """Constants one after the other."""
    if not any(isinstance(x, Enclosure) for x in constants):
        return np.concatenate(constants, axis=axis)
    ends = [(x.low, x.high) if isinstance(x, Enclosure) else (x, x) for x in constants]
    low, high = (np.concatenate(parts, axis=axis) for parts in zip(*ends, strict=True))
    return simplified(Enclosure(low, high))


def _values(items) -> list[Value]:
    return [x for x in items if isinstance(x, Value)]


@converts("Slice")
def _slice(call: Call):
    x = call.variable()
    starts, ends = call.integers("starts", 1) or [], call.integers("ends", 2) or []
    axes = call.integers("axes", 3)
    axes = list(range(len(starts))) if axes is None else axes
    steps = call.integers("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise Refused("has starts, ends, axes and steps that do not fit")
    places(axes, len(x.shape))
    ranges = [range(n) for n in x.shape]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = place(axis, len(x.shape))
        ranges[axis] = ranges[axis][start:end:step]
    check_size([len(r) for r in ranges])
    for axis, r in enumerate(ranges):
        if r.step < 0:
            check_size([len(r)])
            x = call.add(op.Take(axis), x, weights=np.array(r, np.int32))
            ranges[axis] = range(len(r))
    return cut(call, x, ranges)


def cut(call: Call, x: Value, ranges) -> Value:
    """A range of positions along every axis; steps are positive."""
    if all(r == range(n) for r, n in zip(ranges, x.shape, strict=True)):
        return x
    starts = tuple(r.start for r in ranges)
    stops = tuple(r[-1] + 1 for r in ranges)
    return call.add(op.Slice(starts, stops, tuple(r.step for r in ranges)), x)


@converts("Split")
def _split(call: Call):
    x = call.variable()
    axis = place(call.get("axis", 0), len(x.shape))
    total, sizes = x.shape[axis], call.integers("split", 1)
    if sizes is None:
        count = call.get("num_outputs", len(call.outputs))
        if call.opset < 18 and total % count:
            raise Refused(f"cannot split {total} entries into {count} equal parts")
        size = -(-total // count)
        sizes = [min(size, total - k * size) for k in range(count)]
    if sum(sizes) != total or min(sizes) <= 0 or len(sizes) != len(call.outputs):
        raise Refused(f"cannot split {total} entries into {sizes}")
    pieces, start = [], 0
    for size in sizes:
        ranges = [range(n) for n in x.shape]
        ranges[axis] = range(start, start + size)
        pieces.append(cut(call, x, ranges))
        start += size
    return pieces


@converts("Gather")
def _gather(call: Call):
    x, indices = call.variable(), call.constant(1, "indices")
    axis = place(call.get("axis", 0), len(x.shape))
    n = x.shape[axis]
    if not np.issubdtype(indices.dtype, np.integer):
        raise Refused("needs integer indices")
    if np.any(indices < -n) or np.any(indices >= n):
        raise Refused(f"has indices outside an axis of length {n}")
    return call.add(op.Take(axis), x, weights=(indices % n).astype(np.int32))


@converts("ScatterND")
def _scatter(call: Call):
    """Entries of the first input, or of the last one: where each is from does not vary."""
    data, indices, updates = call.inputs[0], call.constant(1, "indices"), call.inputs[2]
    if call.get("reduction", b"none") != b"none":
        raise Refused("is not supported where it adds up")
    assert data is not None
    assert updates is not None
    rank = indices.shape[-1]
    if (*indices.shape[:-1], *data.shape[rank:]) != updates.shape or rank > len(data.shape):
        raise Refused(f"has indices of the shape {indices.shape} for {updates.shape} entries")
    lengths = np.array(data.shape[:rank])
    if np.any(indices < -lengths) or np.any(indices >= lengths):
        raise Refused("has indices that are not there")
    size = math.prod(data.shape)
    origin = np.arange(size).reshape(data.shape)
    places = tuple(np.moveaxis(indices % lengths, -1, 0))
    origin[places] = size + np.arange(math.prod(updates.shape)).reshape(updates.shape)
    flat = [x.reshape(-1) if isinstance(x, np.ndarray)
            else x.moved(np.ravel) if isinstance(x, Enclosure)
            else reshape(call, x, (math.prod(x.shape),)) for x in (data, updates)]  # fmt: skip
    inner = Call(call.draft, "Concat", call.name, flat, {"axis": 0}, call.opset, ("y",))
    joint = _concat(inner)
    call.added.extend(inner.added)
    return call.add(op.Take(0), joint, weights=origin.astype(np.int32))


@converts("Expand")
def _expand(call: Call):
    x, shape = call.variable(), call.integers("shape", 1) or []
    shape = np.broadcast_shapes(x.shape, tuple(shape))
    return x if shape == x.shape else call.add(op.Broadcast(shape), x)


@converts("Tile")
def _tile(call: Call):
    x, repeats = call.variable(), call.integers("repeats", 1) or []
    if len(repeats) != len(x.shape) or any(n < 1 for n in repeats):
        raise Refused(f"cannot repeat a tensor of shape {x.shape} {repeats} times")
    for axis, n in enumerate(repeats):
        if n > 1:
            check_size([n, x.shape[axis]])
            indices = np.tile(np.arange(x.shape[axis], dtype=np.int32), n)
            x = call.add(op.Take(axis), x, weights=indices)
    return x


_PAD_MODES: dict[str, Literal["reflect", "edge", "wrap"]]
_PAD_MODES = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}


@converts("Pad")
def _pad(call: Call):
    x, mode = call.variable(), call.get("mode", b"constant").decode()
    rank = len(x.shape)
    pads = call.integers("pads", 1) or []
    axes = call.integers("axes", 3)
    axes = list(range(rank)) if axes is None else [place(axis, rank) for axis in axes]
    if len(pads) != 2 * len(axes) or len(set(axes)) != len(axes):
        raise Refused(f"has {len(pads)} widths for {len(axes)} axes")
    widths = [(0, 0)] * rank
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        widths[axis] = (before, after)
    if all(w == (0, 0) for w in widths):
        return x
    if mode == "constant":
        value = call.get("value", call.number(2, "values", 0.0))
        if not math.isfinite(value):
            raise Refused("fills up with a number that is NaN or infinite")
        return _pad_with(call, x, widths, value)
    if mode not in _PAD_MODES:
        raise Refused(f"has an unknown mode, {mode!r}")
    if min(map(min, widths)) < 0:
        raise Refused(f"is not supported with negative widths in the mode {mode}")
    for axis, width in enumerate(widths):
        if width != (0, 0):
            n = x.shape[axis]
            check_size([n + sum(width)])
            if mode == "reflect" and max(width) >= n:
                raise Refused(f"reflects {max(width)} entries of an axis of length {n}")
            indices = np.pad(np.arange(n, dtype=np.int32), width, mode=_PAD_MODES[mode])
            x = call.add(op.Take(axis), x, weights=indices)
    return x


def _pad_with(call: Call, x: Value, widths, value: float) -> Value:
    y = call.add(op.Pad(tuple(widths)), x)
    if value == 0:
        return y
    check_size(y.shape)
    inside = np.zeros((), bool)
    for axis, (before, _) in enumerate(widths):
        position = np.arange(y.shape[axis]) - before
        outside = (position < 0) | (position >= x.shape[axis])
        inside = inside | outside.reshape([-1 if k == axis else 1 for k in range(len(y.shape))])
    return call.shift(y, np.where(inside, np.float64(value), 0.0))


@converts("Shape")
def _shape(call: Call):
    shape = call.variable().shape
    return np.array(shape[call.get("start", 0) : call.get("end", len(shape))], np.int64)


@converts("Size")
def _size(call: Call):
    return np.array(math.prod(call.variable().shape), np.int64)


@converts("Dropout")
def _dropout(call: Call):
    training = call.item(2)
    if training is not None and np.any(call.constant(2, "training modes")):
        raise Refused("is only supported for inference; export the model in evaluation mode")
    if any(call.outputs[1:]):
        raise Refused("is not supported where its mask is used")
    return call.variable()


# TensorProto.FLOAT, FLOAT16, DOUBLE, BFLOAT16: rounding is not part of a network.
FLOATS = (1, 10, 11, 16)
_BOOL = 9


def _in_any_type(array: np.ndarray) -> np.ndarray:
    """Constants that become the type of a variable: numbers that all floating-point types hold."""
    single = array.astype(np.float32)
    half = np.isfinite(single) & (np.abs(single) < 1e4) & (single == single.astype(np.float16))
    # The first half of a float32 is what bfloat16 keeps.
    brain = single.view(np.uint32) & 0xFFFF == 0
    if array.dtype.kind not in "iuf" or not np.all(half & brain & (single == array)):
        raise Refused("may round constants to another type; store them in the type of the model")
    return single


@converts("Cast", "CastLike")
def _cast(call: Call):
    if call.operator == "CastLike":
        like = call.item(1)
        if not isinstance(call.item(0), Value):
            return _in_any_type(call.constant(0, "constants"))
        floating = isinstance(like, Value) or np.issubdtype(call.constant(1, "").dtype, np.floating)
    else:
        floating = call.get("to") in FLOATS
    x = call.item(0)
    if isinstance(x, Value) and call.draft.is_condition(x):
        if call.get("to") == _BOOL:
            return x
        if call.get("to") in FLOATS:
            return indicator(call, x)
    if not floating:
        raise Refused("of a variable to integers or to truth values is not supported")
    return call.variable()
