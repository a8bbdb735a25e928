"""Exact evaluation, continued: operators that move entries, and sums and maxima over windows."""

import itertools
import math

import numpy as np
from flint import fmpq

from benchmarks.fuzz.exact import Call, Vague, _tensor, computes, is_float, larger, smaller


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise Vague(f"axis {axis} of {rank}")
    return axis + rank if axis < 0 else axis


@computes("Reshape")
def _reshape(call: Call):
    x, shape = call.items[0], call.integers("shape", 1) or []
    if not call.get("allowzero", 0):
        shape = [x.shape[k] if n == 0 else n for k, n in enumerate(shape)]
    return x.reshape(shape)


@computes("Flatten")
def _flatten(call: Call):
    x, axis = call.items[0], call.get("axis")
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@computes("Squeeze")
def _squeeze(call: Call):
    x, axes = call.items[0], call.integers("axes", 1)
    if axes is None:
        return x.reshape([n for n in x.shape if n != 1])
    gone = {_axis(a, x.ndim) for a in axes}
    if any(x.shape[a] != 1 for a in gone):
        raise Vague("squeezes a long axis")
    return x.reshape([n for k, n in enumerate(x.shape) if k not in gone])


@computes("Unsqueeze")
def _unsqueeze(call: Call):
    x, axes = call.items[0], call.integers("axes", 1) or []
    rank = x.ndim + len(axes)
    new, old = {_axis(a, rank) for a in axes}, iter(x.shape)
    if len(new) != len(axes):
        raise Vague("an axis twice")
    return x.reshape([1 if k in new else next(old) for k in range(rank)])


@computes("Transpose")
def _transpose(call: Call):
    x, order = call.items[0], call.integers("perm")
    order = list(range(x.ndim))[::-1] if order is None else order
    # Entry by entry: out[i] = x[j] with j[order[k]] = i[k].
    out = np.empty([x.shape[k] for k in order], x.dtype)
    for place in np.ndindex(*out.shape):
        source = [0] * x.ndim
        for k, i in zip(order, place, strict=True):
            source[k] = i
        out[place] = x[tuple(source)]
    return out


@computes("Concat")
def _concat(call: Call):
    return np.concatenate(call.items, _axis(call.get("axis"), call.items[0].ndim))


@computes("Slice")
def _slice(call: Call):
    x = call.items[0]
    starts, ends = call.integers("starts", 1), call.integers("ends", 2)
    assert starts is not None
    assert ends is not None
    axes = call.integers("axes", 3)
    axes = list(range(len(starts))) if axes is None else axes
    steps = call.integers("steps", 4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = _axis(axis, x.ndim)
        n = x.shape[axis]
        start, end = (k + n if k < 0 else k for k in (start, end))
        if step > 0:
            start, end = min(max(start, 0), n), min(max(end, 0), n)
        else:
            start, end = min(max(start, 0), n - 1), min(max(end, -1), n - 1)
        x = np.take(x, np.array(list(range(start, end, step)), np.int64), axis)
    return x


@computes("Split")
def _split(call: Call):
    x, axis = call.items[0], _axis(call.get("axis"), call.items[0].ndim)
    sizes, n = call.integers("split", 1), x.shape[axis]
    if sizes is None:
        count = call.get("num_outputs", call.outputs)
        size = -(-n // count)
        sizes = [size] * (count - 1) + [n - size * (count - 1)]
        if sizes[-1] <= 0 or (call.opset < 18 and n % count):
            raise Vague("splits unevenly")
    if sum(sizes) != n or len(sizes) != call.outputs:
        raise Vague("splits wrongly")
    ends = list(itertools.accumulate(sizes, initial=0))
    return [np.take(x, range(a, b), axis) for a, b in itertools.pairwise(ends)]


@computes("Gather")
def _gather(call: Call):
    x, indices = call.items
    axis = _axis(call.get("axis"), x.ndim)
    n = x.shape[axis]
    if np.any(indices < -n) or np.any(indices >= n):
        raise Vague("an index is out of bounds")
    return np.take(x, np.where(indices < 0, indices + n, indices), axis)


@computes("Expand")
def _expand(call: Call):
    x, shape = call.items[0], tuple(call.integers("shape", 1) or [])
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, shape))


@computes("Tile")
def _tile(call: Call):
    return np.tile(call.items[0], call.integers("repeats", 1) or [])


@computes("Pad")
def _pad(call: Call):
    x, mode = call.items[0], call.get("mode").decode()
    pads, axes = call.integers("pads", 1) or [], call.integers("axes", 3)
    axes = list(range(x.ndim)) if axes is None else [_axis(a, x.ndim) for a in axes]
    value = fmpq(0)
    if "value" in call.attributes:
        value = fmpq(*float(call.attributes["value"]).as_integer_ratio())
    elif call.item(2) is not None:
        value = call.item(2).reshape(-1)[0]
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        n = x.shape[axis]
        if mode != "constant" and min(before, after) < 0:
            raise Vague("cuts and repeats")
        if mode == "reflect" and max(before, after) >= n:
            raise Vague("reflects more than there is")
        where = list(range(-before, n + after))
        if mode == "edge":
            where = [min(max(k, 0), n - 1) for k in where]
        elif mode == "wrap":
            where = [k % n for k in where]
        elif mode == "reflect":
            where = [-k if k < 0 else 2 * (n - 1) - k if k >= n else k for k in where]
        parts = np.take(x, [min(max(k, 0), n - 1) for k in where], axis).copy()
        for place, k in enumerate(where):
            if not 0 <= k < n:
                parts[(slice(None),) * axis + (place,)] = value
        x = parts
    return x


@computes("Shape")
def _shape(call: Call):
    shape = call.items[0].shape
    rank = len(shape)
    ends = [call.get("start", 0), call.get("end", rank)]
    start, end = (min(max(k + rank if k < 0 else k, 0), rank) for k in ends)
    return np.array(shape[start:end], np.int64)


@computes("Size")
def _size(call: Call):
    return np.array(call.items[0].size, np.int64)


# -- over axes and windows -------------------------------------------------------------------------


def _fold(function, entries):
    total = entries[0]
    for entry in entries[1:]:
        total = function(total, entry)
    return total


_REDUCTIONS = {
    "ReduceSum": lambda a, b: a + b,
    "ReduceMean": lambda a, b: a + b,
    "ReduceProd": lambda a, b: a * b,
    "ReduceMax": larger,
    "ReduceMin": smaller,
    "GlobalAveragePool": lambda a, b: a + b,
    "GlobalMaxPool": larger,
}


@computes(*_REDUCTIONS)
def _reduce(call: Call):
    x, function = call.items[0], _REDUCTIONS[call.operator]
    if call.operator.startswith("Global"):
        axes, keep = list(range(2, x.ndim)), 1
    else:
        axes, keep = call.integers("axes", 1) or [], call.get("keepdims")
        if not axes and call.get("noop_with_empty_axes", 0):
            return x
        axes = [_axis(a, x.ndim) for a in axes] or list(range(x.ndim))
    if not is_float(x):
        named = {"ReduceSum": np.sum, "ReduceMax": np.max, "ReduceMin": np.min,
                 "ReduceProd": np.prod}  # fmt: skip
        return np.asarray(named[call.operator](x, axis=tuple(axes), keepdims=bool(keep)))
    rest = [k for k in range(x.ndim) if k not in axes]
    count = math.prod(x.shape[k] for k in axes)
    flat = np.transpose(x, (*rest, *axes)).reshape(*(x.shape[k] for k in rest), count)
    out = np.empty(flat.shape[:-1], object)
    for place in np.ndindex(*out.shape):
        out[place] = _fold(function, list(flat[place]))
    if call.operator in ("ReduceMean", "GlobalAveragePool"):
        out = _tensor(out / fmpq(count))
    shape = [1 if k in axes else n for k, n in enumerate(x.shape)]
    return out.reshape(shape) if keep else out


def _windows(call: Call, space, kernel):
    """Strides, dilations, pads before and after, and the number of windows, for each axis."""
    rank = len(space)
    strides = call.get("strides") or [1] * rank
    dilations = call.get("dilations") or [1] * rank
    pads = call.get("pads") or [0] * (2 * rank)
    auto, ceil = call.get("auto_pad", b"NOTSET"), call.get("ceil_mode", 0)
    before, after, count = [], [], []
    for axis, n in enumerate(space):
        s, reach = strides[axis], (kernel[axis] - 1) * dilations[axis] + 1
        if auto in (b"SAME_UPPER", b"SAME_LOWER"):
            if ceil or max(dilations) > 1:
                raise Vague("runtimes differ")
            number = -(-n // s)
            total = (number - 1) * s + reach - n
            if total < 0:
                raise Vague("runtimes differ")
            less, more = total // 2, total - total // 2
            one, two = (less, more) if auto == b"SAME_UPPER" else (more, less)
        else:
            if auto == b"VALID" and ceil:
                raise Vague("runtimes differ")
            one, two = (0, 0) if auto == b"VALID" else (pads[axis], pads[axis + rank])
            free = n + one + two - reach
            if free < 0:
                raise Vague("the window is larger than its input")
            number = (-(-free // s) if ceil else free // s) + 1
            if ceil and (number - 1) * s >= n + one:
                number -= 1  # no window begins behind the input
        before.append(one)
        after.append(two)
        count.append(number)
    return strides, dilations, before, after, count


def _covered(place, space, kernel, strides, dilations, before):
    """(offset in the kernel, position in the input) of what a window covers, padding too."""
    for offset in np.ndindex(*kernel):
        yield (
            offset,
            tuple(
                p * s - b + o * d
                for p, s, b, o, d in zip(place, strides, before, offset, dilations, strict=True)
            ),
        )


def _inside(at, space) -> bool:
    return all(0 <= k < n for k, n in zip(at, space, strict=True))


@computes("Conv")
def _conv(call: Call):
    x, weights, bias = call.items[0], call.items[1], call.item(2)
    kernel, space, groups = weights.shape[2:], x.shape[2:], call.get("group")
    if x.shape[1] != weights.shape[1] * groups or weights.shape[0] % groups:
        raise Vague("channels do not fit")
    strides, dilations, before, _, count = _windows(call, space, kernel)
    out = np.empty((x.shape[0], weights.shape[0], *count), object)
    per, channels = weights.shape[0] // groups, weights.shape[1]
    for n, o in np.ndindex(*out.shape[:2]):
        mine = x[n, o // per * channels : (o // per + 1) * channels]
        for place in np.ndindex(*count):
            total = fmpq(0) if bias is None else bias[o]
            for offset, at in _covered(place, space, kernel, strides, dilations, before):
                if _inside(at, space):
                    for c in range(channels):
                        total = total + weights[(o, c, *offset)] * mine[(c, *at)]
            out[(n, o, *place)] = total
    return out


@computes("ConvTranspose")
def _conv_transpose(call: Call):
    x, weights, bias = call.items[0], call.items[1], call.item(2)
    kernel, space, groups = weights.shape[2:], x.shape[2:], call.get("group")
    rank = len(space)
    if x.shape[1] != weights.shape[0] or x.shape[1] % groups:
        raise Vague("channels do not fit")
    strides = call.get("strides") or [1] * rank
    dilations = call.get("dilations") or [1] * rank
    extra = call.get("output_padding") or [0] * rank
    pads, auto = call.get("pads") or [0] * (2 * rank), call.get("auto_pad", b"NOTSET")
    full = [
        s * (n - 1) + e + (k - 1) * d + 1
        for s, n, e, k, d in zip(strides, space, extra, kernel, dilations, strict=True)
    ]
    shape = call.get("output_shape")
    if auto in (b"SAME_UPPER", b"SAME_LOWER") and not shape:
        shape = [n * s for n, s in zip(space, strides, strict=True)]
    if shape:
        totals = [f - n for f, n in zip(full, shape, strict=True)]
        if min(totals) < 0:
            raise Vague("an output larger than what the windows reach")
        first = [t // 2 if auto == b"SAME_UPPER" else t - t // 2 for t in totals]
        pads = first + [t - f for t, f in zip(totals, first, strict=True)]
    elif auto == b"VALID":
        pads = [0] * (2 * rank)
    length = [f - a - b for f, a, b in zip(full, pads[:rank], pads[rank:], strict=True)]
    if min(length) <= 0:
        raise Vague("nothing is left")
    per, channels = weights.shape[1], x.shape[1] // groups
    out = np.empty((x.shape[0], per * groups, *length), object)
    out[...] = fmpq(0)
    for n, c, o in itertools.product(range(x.shape[0]), range(x.shape[1]), range(per)):
        for source, offset in itertools.product(np.ndindex(*space), np.ndindex(*kernel)):
            at = tuple(
                i * s + k * d - b
                for i, s, k, d, b in zip(source, strides, offset, dilations, pads, strict=False)
            )
            if _inside(at, length):
                place = (n, c // channels * per + o, *at)
                out[place] = out[place] + weights[(c, o, *offset)] * x[(n, c, *source)]
    return out if bias is None else _tensor(out + bias.reshape(1, -1, *(1 for _ in space)))


@computes("AveragePool", "MaxPool")
def _pool(call: Call):
    x, kernel = call.items[0], call.get("kernel_shape")
    if call.outputs > 1:
        raise Vague("indices")
    space, most = x.shape[2:], call.operator == "MaxPool"
    strides, dilations, before, after, count = _windows(call, space, kernel)
    if any(k <= b or k <= a for k, b, a in zip(kernel, before, after, strict=True)):
        raise Vague("runtimes refuse pads as large as the window")
    out = np.empty((*x.shape[:2], *count), object)
    for n, c, *place in np.ndindex(*out.shape):
        entries, counted = [], 0
        for _, at in _covered(place, space, kernel, strides, dilations, before):
            if _inside(at, space):
                entries.append(x[(n, c, *at)])
            # A window may reach behind the padding too, where nothing is counted.
            ends = zip(at, before, space, after, strict=True)
            counted += all(-b <= k < m + a for k, b, m, a in ends)
        if not entries:
            raise Vague("a window covers padding only")
        if most:
            out[(n, c, *place)] = _fold(larger, entries)
        else:
            divisor = counted if call.get("count_include_pad") else len(entries)
            out[(n, c, *place)] = sum(entries, fmpq(0)) / divisor
    return out
