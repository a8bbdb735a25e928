"""Convolutions and pools."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagecert_check import linear
from stagecert_check.constants import balls
from stagecert_check.functions import Refused, Value, maximum
from stagecert_check.graph import Call, handles


def _window(call: Call, x: Value, kernel: Sequence[int]) -> tuple[list[int], ...]:
    """(strides, dilations, pads before, pads after, how many windows) along each axis."""
    rank, space = len(x.shape) - 2, x.shape[2:]
    if rank < 1 or len(kernel) != rank or min(kernel) < 1:
        raise Refused(f"has a window {list(kernel)} over a tensor of shape {x.shape}")
    strides, dilations, pads = _steps(call, rank)
    ceil, auto = call.get("ceil_mode", 0), call.get("auto_pad", b"NOTSET")
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto in (b"SAME_UPPER", b"SAME_LOWER") and max(dilations) == 1 and not ceil:
        totals = [
            (-(-n // s) - 1) * s + r - n for n, s, r in zip(space, strides, reach, strict=True)
        ]
        # Runtimes differ in what pools do with entries that no window covers.
        if min(totals) < 0 and call.operator != "Conv":
            raise Refused("has strides beyond its window")
        pads = _halves([max(t, 0) for t in totals], auto)
    elif auto not in (b"NOTSET", b"", b"VALID") or (auto == b"VALID" and ceil):
        raise Refused(f"has auto_pad={auto!r} in a combination that is not supported")
    elif auto == b"VALID":
        pads = [0] * (2 * rank)
    before, after = pads[:rank], pads[rank:]
    count = []
    for n, s, r, b, a in zip(space, strides, reach, before, after, strict=True):
        free = n + b + a - r
        if free < 0:
            raise Refused("has a window that is larger than its input")
        number = (-(-free // s) if ceil else free // s) + 1
        # No window starts behind the input.
        count.append(number - 1 if ceil and (number - 1) * s >= n + b else number)
    return strides, dilations, before, after, count


_AUTO = (b"NOTSET", b"", b"VALID", b"SAME_UPPER", b"SAME_LOWER")


def _steps(call: Call, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads."""
    strides, dilations = (list(call.get(n, [1] * rank)) for n in ("strides", "dilations"))
    pads = list(call.get("pads", [0] * 2 * rank))
    if [len(strides), len(dilations), len(pads)] != [rank, rank, 2 * rank]:
        raise Refused(f"has strides, dilations or pads for another number of axes than {rank}")
    if min([*strides, *dilations, *(p + 1 for p in pads)]) < 1:
        raise Refused("has impossible strides, dilations or pads")
    return strides, dilations, pads


def _halves(totals: list[int], auto: bytes) -> list[int]:
    """The padding before and behind; an odd one is behind if it is SAME_UPPER."""
    less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return less + more if auto == b"SAME_UPPER" else more + less


def _kernel(call: Call, x: Value) -> np.ndarray:
    weights = call.floats(1)
    if list(call.get("kernel_shape", weights.shape[2:])) != list(weights.shape[2:]):
        raise Refused("has weights of another shape than its kernel_shape")
    if weights.ndim != len(x.shape) or weights.ndim < 3:
        raise Refused(f"has weights of shape {weights.shape} for a tensor of shape {x.shape}")
    return weights


def _biased(call: Call, y: Value) -> Value:
    if call.item(2) is None:
        return y
    if call.floats(2).shape != (y.shape[1],):
        raise Refused("has biases of the wrong shape")
    return call.shift(y, call.floats(2).reshape(1, -1, *(1 for _ in y.shape[2:])))


@handles("Conv")
def _conv(call: Call):
    x = call.value()
    weights, groups = _kernel(call, x), call.get("group", 1)
    strides, dilations, before, _, count = _window(call, x, weights.shape[2:])
    if groups < 1 or x.shape[1] != groups * weights.shape[1] or weights.shape[0] % groups:
        raise Refused(f"has weights of shape {weights.shape} for {x.shape[1]} channels")
    numbers, loose = call.weights(weights)
    conv = linear.Conv(numbers, groups, strides, dilations, before, count, loose)
    return _biased(call, call.apply(conv, x, shape=(x.shape[0], weights.shape[0], *count)))


@handles("ConvTranspose")
def _conv_transpose(call: Call):
    x = call.value()
    weights, groups = _kernel(call, x), call.get("group", 1)
    rank, space, kernel = len(x.shape) - 2, x.shape[2:], weights.shape[2:]
    strides, dilations, pads = _steps(call, rank)
    extra, auto = list(call.get("output_padding", [0] * rank)), call.get("auto_pad", b"NOTSET")
    length = call.get("output_shape")
    if len(extra) != rank or min(extra) < 0 or auto not in _AUTO:
        raise Refused(f"has auto_pad={auto!r} or an impossible output_padding {extra}")
    if groups < 1 or weights.shape[0] != x.shape[1] or x.shape[1] % groups:
        raise Refused(f"has weights of shape {weights.shape} for a tensor of shape {x.shape}")
    whole = [
        (n - 1) * s + (k - 1) * d + 1 + e
        for n, s, k, d, e in zip(space, strides, kernel, dilations, extra, strict=True)
    ]
    if length is None and auto in (b"SAME_UPPER", b"SAME_LOWER"):
        length = [n * s for n, s in zip(space, strides, strict=True)]
    if length is not None:
        # Some exporters give the batch and the channels too.
        totals = [n - m for n, m in zip(whole, length[-rank:], strict=True)]
        if min(totals) < 0:
            raise Refused(f"has the output_shape {length}, which is more than its windows reach")
        pads = _halves(totals, auto)
    elif auto == b"VALID":
        pads = [0] * (2 * rank)
    length = [n - b - a for n, b, a in zip(whole, pads[:rank], pads[rank:], strict=True)]
    if min(length) < 1:
        raise Refused("has pads that leave nothing")
    numbers, loose = call.weights(weights)
    conv = linear.Conv(numbers, groups, strides, dilations, pads[:rank], space, loose)
    shape = (x.shape[0], weights.shape[1] * groups, *length)
    return _biased(call, call.apply(linear.ConvTranspose(conv, shape), x, shape=shape))


def _positions(
    space: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    before: Sequence[int],
    count: Any,
) -> list[np.ndarray]:
    """For each axis, (count, kernel): which entries each window covers; some are padding."""
    return [
        np.arange(c)[:, None] * s - b + np.arange(k) * d
        for c, s, b, k, d in zip(count, strides, before, kernel, dilations, strict=True)
    ]


@handles("AveragePool")
def _average_pool(call: Call):
    x, kernel = call.value(), call.get("kernel_shape")
    strides, dilations, before, after, count = _window(call, x, kernel)
    inside = call.get("count_include_pad", 0)
    entries = np.ones(())
    at = _positions(x.shape[2:], kernel, strides, dilations, before, count)
    for positions, n, b, a in zip(at, x.shape[2:], before, after, strict=True):
        low, high = (-b, n + a) if inside else (0, n)
        entries = entries[..., None] * ((positions >= low) & (positions < high)).sum(1)
    if not entries.all():
        raise Refused("has a window that covers padding only")
    channels = x.shape[1]
    ones = call.exact(np.ones((channels, 1, *kernel)))
    conv = linear.Conv(ones, channels, strides, dilations, before, count)
    total = call.apply(conv, x, shape=(x.shape[0], channels, *count))
    sizes, place = np.unique(entries, return_inverse=True)
    shares = 1 / balls(sizes)
    return call.scale(total, shares[place].reshape(1, 1, *entries.shape))


@handles("MaxPool")
def _max_pool(call: Call):
    x, kernel = call.value(), call.get("kernel_shape")
    call.get("storage_order")  # of the indices, which nothing can read
    strides, dilations, before, _, count = _window(call, x, kernel)
    rank, flat = len(kernel), np.zeros((1,) * 2 * len(kernel), np.int64)
    at = _positions(x.shape[2:], kernel, strides, dilations, before, count)
    for axis, (positions, n) in enumerate(zip(at, x.shape[2:], strict=True)):
        valid = (positions >= 0) & (positions < n)
        if not valid.any(1).all():
            raise Refused("has a window that covers padding only")
        # In the place of padding stands the first entry that the window covers.
        first = np.take_along_axis(positions, valid.argmax(1)[:, None], axis=1)
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = positions.shape
        flat = flat * n + np.where(valid, positions, first).reshape(shape)
    flat = flat.reshape(*count, -1)
    stacked = call.move(lambda a: a.reshape(*a.shape[:2], -1)[:, :, flat], x)
    return call.activate(maximum(), stacked, stacked.shape[:-1])
