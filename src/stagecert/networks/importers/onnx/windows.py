"""ONNX operators with a sliding window: convolutions and pools."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Value
from stagecert.networks.importers.enclosures import reciprocal
from stagecert.networks.importers.onnx.arithmetic import maximum
from stagecert.networks.importers.onnx.nodes import Call, Refused, check_size, converts
from stagecert.networks.importers.onnx.shapes import cut


@dataclass(frozen=True)
class _Window:
    """A sliding window over the axes after the first two."""

    space: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    count: tuple[int, ...]

    def positions(self, axis: int) -> np.ndarray:
        """(count, kernel): which entries each window covers along an axis; some are padding."""
        start = np.arange(self.count[axis])[:, None] * self.strides[axis] - self.pads[axis][0]
        return start + np.arange(self.kernel[axis]) * self.dilation[axis]


def _window(call: Call, x: Value, kernel) -> _Window:
    rank = len(x.shape) - 2
    kernel = tuple(int(n) for n in kernel)
    if rank < 1 or len(kernel) != rank:
        raise Refused(f"has a window with {len(kernel)} axes for a tensor of shape {x.shape}")
    strides, dilation = _numbers(call, "strides", rank), _numbers(call, "dilations", rank)
    if min(kernel) < 1:
        raise Refused(f"has an impossible window: {kernel}")
    space = x.shape[2:]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    auto, ceil = call.get("auto_pad", b"NOTSET"), call.get("ceil_mode", 0)
    # Where the standard leaves room, runtimes differ; a model must not mean something else here.
    vague = ceil and auto not in (b"NOTSET", b"")
    if auto in (b"SAME_UPPER", b"SAME_LOWER"):
        count = tuple(-(-n // s) for n, s in zip(space, strides, strict=True))
        totals = [
            (c - 1) * s + r - n for c, s, r, n in zip(count, strides, reach, space, strict=True)
        ]
        vague = vague or max(dilation) > 1 or (call.operator != "Conv" and min(totals) < 0)
        pads = tuple(_halves(max(total, 0), auto == b"SAME_UPPER") for total in totals)
        if not vague:
            return _Window(space, kernel, strides, dilation, pads, count)
    if vague:
        raise Refused(
            f"has auto_pad={auto.decode()} together with dilations, ceil_mode or strides beyond "
            "the window, which runtimes understand in different ways; give it explicit pads"
        )
    if auto not in (b"NOTSET", b"VALID", b""):
        raise Refused(f"has an unknown auto_pad, {auto!r}")
    pads = ((0, 0),) * rank if auto == b"VALID" else _pads(call, rank)
    count = []
    for n, s, r, (before, after) in zip(space, strides, reach, pads, strict=True):
        free = n + before + after - r
        if free < 0:
            raise Refused(f"has a window that is larger than its input: {kernel} over {space}")
        number = (-(-free // s) if ceil else free // s) + 1
        # No window starts behind the input.
        number -= ceil and (number - 1) * s >= n + before
        count.append(int(number))
    return _Window(space, kernel, strides, dilation, pads, tuple(count))


def _halves(total: int, upper: bool) -> tuple[int, int]:
    less, more = total // 2, total - total // 2
    return (less, more) if upper else (more, less)


def _numbers(call: Call, name: str, rank: int, default: int = 1) -> tuple[int, ...]:
    numbers = tuple(call.integers(name) or [default] * rank)
    if len(numbers) != rank or min(numbers) < default:
        raise Refused(f"has impossible {name}: {list(numbers)}")
    return numbers


def _pads(call: Call, rank: int) -> tuple[tuple[int, int], ...]:
    pads = call.integers("pads") or [0] * (2 * rank)
    if len(pads) != 2 * rank or min(pads) < 0:
        raise Refused(f"has impossible pads: {pads}")
    return tuple(zip(pads[:rank], pads[rank:], strict=True))


@converts("Conv")
def _conv(call: Call):
    weights, x = call.constant(1, "weights"), call.variable()
    _check_kernel(call, x, weights)
    window = _window(call, x, weights.shape[2:])
    groups = call.get("group", 1)
    if groups < 1 or x.shape[1] != groups * weights.shape[1] or weights.shape[0] % groups:
        raise Refused(
            f"has weights of shape {weights.shape} in {groups} groups for {x.shape[1]} channels"
        )
    ones = (1,) * len(window.space)
    pads = _trailing(window)
    most = [(k - 1) * d for k, d in zip(window.kernel, window.dilation, strict=True)]
    if any(max(pad) > n for pad, n in zip(pads, most, strict=True)):
        # The adjoint of such a convolution has negative padding: see below.
        x, pads = call.add(op.Pad(((0, 0), (0, 0), *pads)), x), ((0, 0),) * len(ones)
    conv = op.Conv(window.strides, pads, window.dilation, ones, groups)
    return _biased(call, call.add(conv, x, weights=weights))


def _trailing(window: _Window) -> tuple[tuple[int, int], ...]:
    """The padding that the windows reach; less than the stated one where they stop before."""
    pads = []
    for axis, (n, (before, _)) in enumerate(zip(window.space, window.pads, strict=True)):
        reach = (window.kernel[axis] - 1) * window.dilation[axis] + 1
        last = (window.count[axis] - 1) * window.strides[axis] + reach - before
        pads.append((before, max(last - n, 0)))
    return tuple(pads)


def _check_kernel(call: Call, x: Value, weights: np.ndarray) -> None:
    if len(x.shape) < 3 or weights.ndim != len(x.shape):
        raise Refused(f"has weights of shape {weights.shape} for a tensor of shape {x.shape}")
    if (call.integers("kernel_shape") or list(weights.shape[2:])) != list(weights.shape[2:]):
        raise Refused("has weights of another shape than its kernel_shape")


def _biased(call: Call, x: Value) -> Value:
    if call.item(2) is None:
        return x
    bias = call.constant(2, "biases")
    if bias.shape != (x.shape[1],):
        raise Refused(f"has {bias.shape} biases for {x.shape[1]} channels")
    return call.shift(x, bias.reshape(1, -1, *(1 for _ in x.shape[2:])))


@converts("ConvTranspose")
def _conv_transpose(call: Call):
    weights, x = call.constant(1, "weights"), call.variable()
    _check_kernel(call, x, weights)
    space, kernel = x.shape[2:], weights.shape[2:]
    rank, groups = len(space), call.get("group", 1)
    if groups < 1 or weights.shape[0] != x.shape[1] or x.shape[1] % groups:
        raise Refused(
            f"has weights of shape {weights.shape} in {groups} groups for {x.shape[1]} channels"
        )
    strides, dilation = _numbers(call, "strides", rank), _numbers(call, "dilations", rank)
    extra = _numbers(call, "output_padding", rank, 0)
    full = [
        (n - 1) * s + (k - 1) * d + 1 + e
        for n, s, k, d, e in zip(space, strides, kernel, dilation, extra, strict=True)
    ]
    auto = call.get("auto_pad", b"NOTSET")
    same = auto in (b"SAME_UPPER", b"SAME_LOWER")
    shape = call.integers("output_shape")
    if same and shape is None:
        shape = [n * s for n, s in zip(space, strides, strict=True)]
    if shape:
        # Some exporters give the batch and the channels too.
        totals = [f - n for f, n in zip(full, shape[-rank:], strict=True)]
        if min(totals) < 0:
            raise Refused(f"has the output shape {shape}, which is more than its windows reach")
        pads = [_halves(total, auto == b"SAME_UPPER") for total in totals]
    else:
        pads = ((0, 0),) * rank if auto == b"VALID" else _pads(call, rank)
    # A transposed convolution convolves its spread-out input with the mirrored weights.
    inside = (groups, weights.shape[0] // groups, weights.shape[1], *kernel)
    swapped = weights.reshape(inside).swapaxes(1, 2).reshape(-1, inside[1], *kernel)
    mirrored = swapped[(slice(None), slice(None), *(slice(None, None, -1) for _ in kernel))]
    padding = [
        ((k - 1) * d - before, (k - 1) * d - after + e)
        for k, d, (before, after), e in zip(kernel, dilation, pads, extra, strict=True)
    ]
    # Negative padding is cut off afterwards: XLA's convolutions on CPUs get it wrong in float32.
    widths = tuple((max(a, 0), max(b, 0)) for a, b in padding)
    conv = op.Conv((1,) * rank, widths, dilation, strides, groups)
    y = call.add(conv, x, weights=np.ascontiguousarray(mirrored))
    ranges = [
        range(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(y.shape[2:], padding, strict=True)
    ]
    check_size([len(r) for r in ranges])
    y = cut(call, y, [*(range(n) for n in y.shape[:2]), *ranges])
    return _biased(call, y)


@converts("AveragePool")
def _average_pool(call: Call):
    x = call.variable()
    window = _window(call, x, call.integers("kernel_shape") or [])
    check_size((*window.count, *window.kernel))
    ones, none = (1, 1), ((0, 0), (0, 0))
    total = call.add(
        op.WindowSum(
            ones + window.kernel,
            ones + window.strides,
            ones + window.dilation,
            none + _trailing(window),
        ),
        x,
    )
    counts = np.ones((), np.float64)
    for axis, n in enumerate(window.space):
        low, high = 0, n
        if call.get("count_include_pad", 0):
            low, high = -window.pads[axis][0], n + window.pads[axis][1]
        at = window.positions(axis)
        counts = counts[..., None] * ((at >= low) & (at < high)).sum(1)
    if not counts.all():
        raise Refused("has a window that covers padding only")
    if np.all(counts == counts.flat[0]):
        return call.scale(total, Fraction(1, int(counts.flat[0])))
    return call.scale(total, reciprocal(counts[None, None]))


@converts("MaxPool")
def _max_pool(call: Call):
    if any(call.outputs[1:]):
        raise Refused("is not supported where its indices are used")
    x = call.variable()
    window = _window(call, x, call.integers("kernel_shape") or [])
    rank = len(window.space)
    check_size((*window.count, *window.kernel))
    ones = (1, 1)
    inside = op.Windows(
        (*ones, *window.kernel), (*ones, *window.strides), (*ones, *window.dilation)
    )
    if not any(map(any, _trailing(window))) and inside.counts(x.shape)[2:] == [*window.count]:
        return call.add(op.Max(), call.add(inside, x))
    flat = np.zeros((1,) * (2 * rank), np.int64)
    for axis, n in enumerate(window.space):
        at = window.positions(axis)
        valid = (at >= 0) & (at < n)
        if not valid.any(1).all():
            raise Refused("has a window that covers padding only")
        # Padding must not win: in its place stands an entry that the window has already.
        first = np.take_along_axis(at, valid.argmax(1)[:, None], axis=1)
        at = np.where(valid, at, first)
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = at.shape
        flat = flat * n + at.reshape(shape)
    y = call.add(op.Reshape((*x.shape[:2], math.prod(window.space))), x)
    indices = flat.reshape(*window.count, -1).astype(np.int32)
    return call.add(op.Max(), call.add(op.Take(2), y, weights=indices))


@converts("GlobalAveragePool")
def _global_average_pool(call: Call):
    x, axes = _space(call)
    total = call.add(op.Reduce(axes, True), x)
    return call.scale(total, Fraction(1, math.prod(x.shape[2:])))


@converts("GlobalMaxPool")
def _global_max_pool(call: Call):
    x, axes = _space(call)
    return maximum(call, x, axes, True)


def _space(call: Call) -> tuple[Value, tuple[int, ...]]:
    x = call.variable()
    if len(x.shape) < 3:
        raise Refused(f"needs axes after the channels, but reads a tensor of shape {x.shape}")
    return x, tuple(range(2, len(x.shape)))
