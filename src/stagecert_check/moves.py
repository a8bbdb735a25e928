"""Operators that move entries around, and those that make constants."""

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from flint import arb, fmpq

from stagecert_check.branches import indicator
from stagecert_check.constants import settled
from stagecert_check.functions import Refused, Value
from stagecert_check.graph import FLOATS, MOST_ENTRIES, Call, handles

_INT32, _INT64, _BOOL = 6, 7, 9  # of TensorProto


@handles("Identity")
def _identity(call: Call):
    return call.item(0)


@handles("Dropout")
def _dropout(call: Call):
    call.get("ratio")
    call.get("seed")
    if call.item(2) is not None and np.any(call.constant(2)):
        raise Refused("is only supported for inference")
    return call.item(0)


@handles("Cast", "CastLike")
def _cast(call: Call) -> Any:
    call.get("saturate")
    call.get("round_mode")
    x, floats = call.item(0), call.reader.floats
    kinds = _kinds(call.item(1), floats) if call.operator == "CastLike" else {call.get("to")}
    if isinstance(x, Value) and x.index in call.reader.conditions:
        if kinds == {_BOOL}:
            return x
        if call.operator == "Cast" and kinds <= set(FLOATS):
            floats |= kinds
            return indicator(call, 0)
    if kinds <= {_INT32, _INT64, _BOOL}:
        if not isinstance(x, np.ndarray) or x.dtype == object:
            raise Refused("to integers or truth values is only supported for exact constants")
        if kinds == {_BOOL}:
            return np.asarray(x != 0)
        if not np.all(np.abs(x.astype(np.float64)) < 2**31) or np.any(x != np.trunc(x)):
            raise Refused("rounds constants, or reads integers that are too large")
        return x.astype(np.int64)
    if not kinds <= set(FLOATS):
        raise Refused(f"is not supported to the type {min(kinds)}")
    alone = kinds == floats  # the model has one floating-point type only
    floats |= kinds
    if isinstance(x, Value):
        return x  # rounding is not part of a network
    if x.dtype in (np.float64, object) and alone:
        return x
    x = x if x.dtype in (np.float64, object) else _as_floats(x)
    for kind in kinds:
        rounded = x if x.dtype == object else x.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        if x.dtype == object or not np.array_equal(rounded.astype(np.float64), x):
            raise Refused("rounds constants")
    return x


def _kinds(like: Value | np.ndarray, floats: set[int]) -> set[int]:
    """The type of a value or constant; if it is floating-point, one of all types so far."""
    if isinstance(like, Value) or like.dtype in (np.float64, object):
        return set(floats)
    if like.dtype not in (np.int64, bool):
        raise Refused(f"is not supported to the type {like.dtype}")
    return {_BOOL if like.dtype == bool else _INT64}


def _as_floats(x: np.ndarray) -> np.ndarray:
    """Integers and truth values as float64."""
    if np.any(x.astype(object) != x.astype(np.float64).astype(object)):
        raise Refused("rounds integers")
    return x.astype(np.float64)


@handles("Constant")
def _constant(call: Call):
    if len(call.attributes) != 1:
        raise Refused("needs one value")
    ((name, value),) = call.attributes.items()
    call.attributes.clear()
    if name == "value":
        return call.reader.stored(value)
    if name in ("value_float", "value_floats"):
        call.reader.floats.add(FLOATS[0])
        return np.array(value, np.float64)
    if name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    raise Refused(f"has the value {name}")


@handles("ConstantOfShape")
def _constant_of_shape(call: Call):
    shape = call.integers("shape", 0) or []
    value = call.get("value")
    call.reader.floats.add(FLOATS[0])
    value = np.zeros(1) if value is None else call.reader.stored(value)
    if value.size != 1 or any(n < 0 for n in shape) or math.prod(shape) > MOST_ENTRIES:
        raise Refused("has an impossible shape")
    return np.broadcast_to(value.reshape(()), shape)


@handles("Range")
def _range(call: Call):
    items = [call.constant(k) for k in range(3)]
    if any(x.size != 1 or x.dtype not in (np.float64, np.int64) for x in items):
        raise Refused("needs single numbers that float64 holds")
    if len({x.dtype for x in items}) != 1 or not np.all(np.isfinite(items)):
        raise Refused("needs finite numbers of one type")
    start, limit, step = (Fraction(x.item()) for x in items)
    count = math.ceil((limit - start) / step) if step else 0
    if count < 1:
        raise Refused("is empty")
    call.reader.compute(count)
    terms = [start + k * step for k in range(count)]
    if items[0].dtype == np.int64:
        return settled(np.array([int(x) for x in terms], dtype=object))
    return settled(np.array([arb(fmpq(x.numerator, x.denominator)) for x in terms], dtype=object))


@handles("Shape")
def _shape(call: Call):
    shape = call.item(0).shape
    return np.array(shape[call.get("start", 0) : call.get("end", len(shape))], np.int64)


@handles("Size")
def _size(call: Call):
    return np.array(math.prod(call.item(0).shape), np.int64)


@handles("Reshape")
def _reshape(call: Call):
    x, shape = call.item(0), call.integers("shape", 1) or []
    if not call.get("allowzero", 0):
        if any(not n for n in shape[len(x.shape) :]):
            raise Refused(f"copies an axis that is not there: {shape} for {x.shape}")
        shape = [n if n else x.shape[k] for k, n in enumerate(shape)]
    # NumPy refuses what does not fit.
    if any(n < -1 for n in shape):
        raise Refused(f"has the impossible shape {shape}")
    return call.move(lambda a: a.reshape(shape), x)


@handles("Flatten")
def _flatten(call: Call):
    x, axis = call.item(0), call.get("axis", 1)
    if not -len(x.shape) <= axis <= len(x.shape):
        raise Refused(f"has the impossible axis {axis}")
    axis = axis + len(x.shape) if axis < 0 else axis
    shape = (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return call.move(lambda a: a.reshape(shape), x)


@handles("Squeeze")
def _squeeze(call: Call):
    x, axes = call.item(0), call.integers("axes", 1)
    axes = None if axes is None else call.axes(axes, len(x.shape))
    return call.move(lambda a: np.squeeze(a, axes), x)


@handles("Unsqueeze")
def _unsqueeze(call: Call):
    x, axes = call.item(0), call.integers("axes", 1) or []
    axes = call.axes(axes, len(x.shape) + len(axes))
    return call.move(lambda a: np.expand_dims(a, axes), x)


@handles("Transpose")
def _transpose(call: Call):
    order = call.get("perm")
    return call.move(lambda a: np.transpose(a, order), call.item(0))


@handles("Concat")
def _concat(call: Call):
    (axis,) = call.axes([call.get("axis")], len(call.items[0].shape))
    if all(isinstance(x, np.ndarray) for x in call.items) or not any(
        isinstance(x, np.ndarray) for x in call.items
    ):
        types = {x.dtype for x in call.items if isinstance(x, np.ndarray)}
        if len(types) > 1 and types != {np.dtype(float), np.dtype(object)}:
            raise Refused("joins constants of several types")
        return call.move(lambda *arrays: np.concatenate(arrays, axis), *call.items)
    # Constant parts are zeros first, and shifted then.
    variables = [x for x in call.items if isinstance(x, Value)]

    def joined(*arrays: np.ndarray) -> np.ndarray:
        rest = iter(arrays)
        parts = [next(rest) if isinstance(x, Value) else np.full(x.shape, -1) for x in call.items]
        return np.concatenate(parts, axis)

    # NumPy joins floats and balls as objects.
    shift = [np.zeros(x.shape) if isinstance(x, Value) else call.floats(k)
             for k, x in enumerate(call.items)]  # fmt: skip
    return call.shift(call.move(joined, *variables), np.concatenate(shift, axis))


@handles("Slice")
def _slice(call: Call):
    x = call.item(0)
    starts, ends = call.integers("starts", 1) or [], call.integers("ends", 2) or []
    axes, steps = call.integers("axes", 3), call.integers("steps", 4)
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    call.axes(axes, len(x.shape))
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise Refused("has starts, ends, axes and steps that do not fit")
    slices = [slice(None)] * len(x.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        slices[axis] = slice(start, end, step)
    return call.move(lambda a: a[tuple(slices)], x)


@handles("Split")
def _split(call: Call):
    x, axis, sizes = call.item(0), call.get("axis", 0), call.integers("split", 1)
    (axis,) = call.axes([axis], len(x.shape))
    count = call.get("num_outputs", len(call.outputs))
    if sizes is None:
        if count < 1:
            raise Refused(f"has {count} outputs")
        size = -(-x.shape[axis] // count)
        sizes = [min(size, x.shape[axis] - k * size) for k in range(count)]
    if sum(sizes) != x.shape[axis] or min(sizes) <= 0 or len(sizes) != len(call.outputs):
        raise Refused(f"cannot split {x.shape[axis]} entries into {sizes}")
    ends = np.cumsum([0, *sizes])
    return [
        call.move(lambda a, k=k: np.take(a, range(ends[k], ends[k + 1]), axis), x)
        for k in range(len(sizes))
    ]


@handles("Gather")
def _gather(call: Call):
    x, indices, axis = call.item(0), call.constant(1), call.get("axis", 0)
    (axis,) = call.axes([axis], len(x.shape))
    n = x.shape[axis]
    if math.prod(x.shape) // max(n, 1) * indices.size > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    if indices.dtype != np.int64 or np.any(indices < -n) or np.any(indices >= n):
        raise Refused("has impossible indices")
    return call.move(lambda a: np.take(a, indices, axis), x)


@handles("ScatterND")
def _scatter(call: Call):
    data, indices, updates = call.item(0), call.constant(1), call.item(2)
    if call.get("reduction", b"none") != b"none" or indices.dtype != np.int64:
        raise Refused("is only supported where it replaces entries")
    depth = indices.shape[-1]
    if (*indices.shape[:-1], *data.shape[depth:]) != updates.shape or depth > len(data.shape):
        raise Refused("has indices that do not fit")
    lengths = np.array(data.shape[:depth])
    if np.any(indices < -lengths) or np.any(indices >= lengths):
        raise Refused("has impossible indices")
    places = tuple(np.moveaxis(np.where(indices < 0, indices + lengths, indices), -1, 0))

    def replaced(a: np.ndarray, b: np.ndarray | float) -> np.ndarray:
        a = np.array(a)
        a[places] = b
        return a

    items = (data, updates)
    constant = [isinstance(x, np.ndarray) for x in items]
    if not any(constant) or all(constant):
        types = {x.dtype for x in items if isinstance(x, np.ndarray)}
        if len(types) > 1:
            raise Refused("joins constants of several types")
        return call.move(replaced, *items)
    # Constant entries are zeros first, and shifted then.
    variable, number = (updates, 0) if constant[0] else (data, 2)
    moved = call.move(
        (lambda b: replaced(np.full(data.shape, -1), b)) if constant[0]
        else (lambda a: replaced(a, -1)), variable,
    )  # fmt: skip
    numbers = call.floats(number)
    none = np.zeros(data.shape, numbers.dtype)
    shift = replaced(numbers, 0.0) if constant[0] else replaced(none, numbers)
    return call.shift(moved, shift)


@handles("Expand")
def _expand(call: Call):
    x = call.item(0)
    shape = np.broadcast_shapes(x.shape, tuple(call.integers("shape", 1) or []))
    if math.prod(shape) > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    return call.move(lambda a: np.broadcast_to(a, shape), x)


@handles("Tile")
def _tile(call: Call):
    x, repeats = call.item(0), call.integers("repeats", 1) or []
    if len(repeats) != len(x.shape) or any(n < 1 for n in repeats):
        raise Refused(f"has the repeats {repeats} for a tensor of shape {x.shape}")
    if math.prod(repeats) * math.prod(x.shape) > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    return call.move(lambda a: np.tile(a, repeats), x)


@handles("Pad")
def _pad(call: Call):
    x, mode = call.value(), call.get("mode", b"constant").decode()
    pads, axes = call.integers("pads", 1) or [], call.integers("axes", 3)
    axes = list(range(len(x.shape)) if axes is None else axes)
    call.axes(axes, len(x.shape))
    if len(pads) != 2 * len(axes):
        raise Refused(f"has {len(pads)} widths for {len(axes)} axes")
    value = np.array(call.get("value", 0.0)) if call.item(2) is None else call.floats(2)
    widths = [(0, 0)] * len(x.shape)
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        widths[axis] = (before, after)
    lengths = [n + a + b for n, (a, b) in zip(x.shape, widths, strict=True)]
    if not all(n > 0 for n in lengths) or math.prod(lengths) > MOST_ENTRIES or value.size != 1:
        raise Refused(f"has impossible widths {widths}, or several values")
    # Where each entry is along its axis in x, which may be outside.
    places = [np.arange(-a, n + b) for n, (a, b) in zip(x.shape, widths, strict=True)]
    if mode == "constant":
        inside = [(p >= 0) & (p < n) for p, n in zip(places, x.shape, strict=True)]
        outside = ~functools.reduce(np.multiply.outer, inside, np.True_)
        kept = np.ix_(*(np.where(i, p, 0) for p, i in zip(places, inside, strict=True)))
        padded = call.move(lambda a: np.where(outside, -1, a[kept]), x)
        if not np.any(outside) or (value.dtype == np.float64 and value.item() == 0):
            return padded
        zero = np.zeros((), value.dtype)
        return call.shift(padded, np.where(outside, value.reshape(()), zero))
    if min(map(min, widths)) < 0:
        raise Refused(f"has negative widths in the mode {mode}")
    if mode == "wrap":
        places = [p % n for p, n in zip(places, x.shape, strict=True)]
    elif mode == "edge":
        places = [np.clip(p, 0, n - 1) for p, n in zip(places, x.shape, strict=True)]
    elif mode == "reflect":
        if any(max(w) >= n for w, n in zip(widths, x.shape, strict=True) if max(w)):
            raise Refused(f"reflects {widths}, more than there is")
        places = [n - 1 - np.abs(n - 1 - np.abs(p)) for p, n in zip(places, x.shape, strict=True)]
    else:
        raise Refused(f"has the mode {mode}")
    return call.move(lambda a: a[np.ix_(*places)], x)
