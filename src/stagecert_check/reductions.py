"""Operators that reduce or normalise, made of others, and some that rearrange entries."""

import math
from collections.abc import Sequence

import numpy as np
from flint import arb

from stagecert_check import linear, patterns
from stagecert_check.composed import normalized
from stagecert_check.constants import settled
from stagecert_check.functions import Refused, Value, activation_of
from stagecert_check.graph import MOST_ENTRIES, Call, handles

_MOST_FACTORS = 16


def _flat(call: Call, x: Value, axes: Sequence[int]) -> Value:
    """The axes as one, which comes last."""
    rest = [k for k in range(len(x.shape)) if k not in axes]
    lengths = [x.shape[k] for k in rest]
    return call.move(lambda a: np.transpose(a, (*rest, *axes)).reshape(*lengths, -1), x)


def _kept(call: Call, x: Value, made: Value, axes: Sequence[int], keep: int) -> Value:
    shape = tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    return call.move(lambda a: a.reshape(shape), made) if keep else made


def _sum(call: Call, x: Value, axes: Sequence[int]) -> Value:
    shape = tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    return call.apply(linear.Reduce(axes, x.shape), x, shape=shape)


@handles("ReduceLogSumExp")
def _log_sum_exp(call: Call):
    """x_0 + log(1 + sum of exp(x_j - x_0) over the others)."""
    x = call.value()
    axes, keep = call.reduced(len(x.shape))
    if not axes:
        return x
    flat = _flat(call, x, axes)
    first = call.move(lambda a: a[..., 0], flat)
    if flat.shape[-1] == 1:
        return _kept(call, x, first, axes, keep)
    others = call.move(lambda a: a[..., 1:], flat)
    own = call.move(lambda a: np.broadcast_to(a[..., None], others.shape), first)
    difference = call.apply(linear.Sum((1, -1)), others, own, shape=others.shape)
    ratios = call.activate(activation_of("exp"), difference)
    total = call.move(lambda a: a[..., 0], _sum(call, ratios, [len(first.shape)]))
    level = call.activate(activation_of("log"), call.shift(total, np.ones(())))
    made = call.apply(linear.Sum((1, 1)), first, level, shape=first.shape)
    return _kept(call, x, made, axes, keep)


@handles("ReduceLogSum")
def _log_sum(call: Call):
    x = call.value()
    axes, keep = call.reduced(len(x.shape))
    total = x
    if axes:
        total = _sum(call, x, axes)
        shape = tuple(n for k, n in enumerate(x.shape) if k not in axes)
        total = total if keep else call.move(lambda a: a.reshape(shape), total)
    return call.activate(activation_of("log"), total)


@handles("ReduceProd")
def _product(call: Call):
    x = call.value()
    axes, keep = call.reduced(len(x.shape))
    if not axes:
        return x
    flat = _flat(call, x, axes)
    if flat.shape[-1] > _MOST_FACTORS:
        raise Refused("multiplies too many variables")
    made = call.move(lambda a: a[..., 0], flat)
    for k in range(1, flat.shape[-1]):
        made = patterns.product(call, made, call.move(lambda a, k=k: a[..., k], flat))
    return _kept(call, x, made, axes, keep)


@handles("CumSum")
def _running_sum(call: Call):
    x, axes = call.value(), call.integers("axis", 1) or [0]
    (axis,) = call.axes(axes, len(x.shape))
    i, j = np.indices((x.shape[axis], x.shape[axis]))
    if call.get("reverse", 0):
        i, j = j, i
    # Entry i counts towards the sum j.
    adds = i < j if call.get("exclusive", 0) else i <= j
    return _along(call, x, axis, adds)


def _along(call: Call, x: Value, axis: int, adds: np.ndarray) -> Value:
    """Sums along an axis: entry i counts towards the sum j where adds[i, j]."""
    if math.prod(x.shape) * len(adds) > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    turned = call.move(lambda a: np.moveaxis(a, axis, -1), x)
    # A list of numbers is one row.
    rows = call.move(lambda a: a[None], turned) if len(x.shape) == 1 else turned
    weights, loose = call.weights(adds.astype(np.float64))
    made = call.apply(linear.MatMul(weights, False, loose), rows, shape=rows.shape)
    made = call.move(lambda a: a[0], made) if len(x.shape) == 1 else made
    return call.move(lambda a: np.moveaxis(a, -1, axis), made)


@handles("LRN")
def _local_response(call: Call):
    """x / (bias + alpha / size * sum of squares of near channels) ** beta."""
    x, size = call.value(), int(call.get("size", 0))
    alpha = float(call.get("alpha", float(np.float32(1e-4))))
    beta, bias = float(call.get("beta", 0.75)), float(call.get("bias", 1.0))
    # ONNX Runtime takes no even sizes.
    if len(x.shape) < 2 or size < 1 or size % 2 == 0 or not (alpha >= 0 and bias > 0 and beta >= 0):
        raise Refused("has settings that are not supported")
    read, to = np.indices((x.shape[1], x.shape[1]))
    near = np.abs(read - to) <= size // 2
    total = _along(call, call.activate(activation_of("square"), x), 1, near)
    total = call.shift(call.scale(total, settled(arb(alpha) / size)), np.array(bias))
    power = call.scale(call.activate(activation_of("log"), total), settled(-arb(beta)))
    return patterns.product(call, x, call.activate(activation_of("exp"), power))


@handles("LpNormalization")
def _unit_length(call: Call):
    x, p = call.value(), call.get("p", 2)
    axes = call.axes([call.get("axis", -1)], len(x.shape))
    if p not in (1, 2):
        raise Refused(f"is only supported with p 1 or 2, not {p}")
    total = _sum(call, call.activate(activation_of("abs" if p == 1 else "square"), x), axes)
    if p == 2:
        total = call.activate(activation_of("relu"), total)  # changes bounds only
        total = call.activate(activation_of("sqrt"), total)
    made = patterns.product(call, x, call.activate(activation_of("reciprocal"), total))
    # No entry is longer than the whole: clip changes bounds only.
    return call.activate(activation_of("clip", low=-1.0, high=1.0), made)


@handles("RMSNormalization")
def _root_mean_square(call: Call):
    x, scale = call.value(), call.floats(1)
    (axis,) = call.axes([call.get("axis", -1)], len(x.shape))
    call.get("stash_type")  # in which precision runtimes compute
    if np.broadcast_shapes(scale.shape, x.shape) != x.shape:
        raise Refused("has scales of another shape")
    axes = tuple(range(axis, len(x.shape)))
    return call.scale(normalized(call, x, axes, centred=False), scale)


@handles("GroupNormalization")
def _group_normalization(call: Call):
    x, scale, bias = call.value(), call.floats(1), call.floats(2)
    groups, channels = int(call.get("num_groups", 0)), x.shape[1] if len(x.shape) > 1 else 0
    call.get("stash_type")
    if groups < 1 or not channels or channels % groups:
        raise Refused("has groups that do not fit")
    wanted = (groups,) if call.reader.opset < 21 else (channels,)
    if scale.shape != wanted or bias.shape != wanted:
        raise Refused("has scales or biases of another shape")
    split = call.move(lambda a: a.reshape(x.shape[0], groups, -1), x)
    made = call.move(lambda a: a.reshape(x.shape), normalized(call, split, (2,)))
    shape = (channels, *(1 for _ in x.shape[2:]))
    scale, bias = (np.repeat(c, channels // c.size).reshape(shape) for c in (scale, bias))
    return call.shift(call.scale(made, scale), bias)


# -- rearranged entries ----------------------------------------------------------------------------


@handles("DepthToSpace")
def _depth_to_space(call: Call):
    x, b, mode = call.item(0), int(call.get("blocksize", 0)), call.get("mode", b"DCR")
    n, c, h, w = x.shape
    if b < 1 or c % (b * b) or mode not in (b"DCR", b"CRD"):
        raise Refused("has blocks that do not fit")

    def spread(a: np.ndarray) -> np.ndarray:
        if mode == b"DCR":
            parts = a.reshape(n, b, b, -1, h, w).transpose(0, 3, 4, 1, 5, 2)
        else:
            parts = a.reshape(n, -1, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
        return parts.reshape(n, -1, h * b, w * b)

    return call.move(spread, x)


@handles("SpaceToDepth")
def _space_to_depth(call: Call):
    x, b = call.item(0), int(call.get("blocksize", 0))
    n, c, h, w = x.shape
    if b < 1 or h % b or w % b:
        raise Refused("has blocks that do not fit")

    def gathered(a: np.ndarray) -> np.ndarray:
        parts = a.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
        return parts.reshape(n, -1, h // b, w // b)

    return call.move(gathered, x)


@handles("Trilu")
def _triangle(call: Call):
    x, (k,) = call.item(0), call.integers("k", 1) or [0]
    if len(x.shape) < 2:
        raise Refused("needs matrices")
    row, column = np.indices(x.shape[-2:])
    kept = column - row >= k if call.get("upper", 1) else column - row <= k
    if isinstance(x, np.ndarray):
        return np.where(kept, x, np.zeros((), x.dtype))
    return call.scale(x, kept.astype(np.float64))


@handles("GatherElements")
def _gather_elements(call: Call):
    x, indices = call.item(0), _indices(call)
    (axis,) = call.axes([call.get("axis", 0)], len(x.shape))
    n = x.shape[axis]
    if indices.ndim != len(x.shape) or np.any(indices < -n) or np.any(indices >= n):
        raise Refused("has impossible indices")
    places = [np.broadcast_to(place, indices.shape) for place in np.indices(indices.shape)]
    places[axis] = np.where(indices < 0, indices + n, indices)
    return call.move(lambda a: a[tuple(places)], x)  # NumPy refuses what is not there


@handles("GatherND")
def _gather_nd(call: Call):
    x, indices, batch = call.item(0), _indices(call), int(call.get("batch_dims", 0))
    if not indices.ndim or not 0 <= batch < indices.ndim:
        raise Refused("has indices that do not fit")
    depth = indices.shape[-1]
    if batch + depth > len(x.shape) or x.shape[:batch] != indices.shape[:batch] or not depth:
        raise Refused("has indices that do not fit")
    lengths = np.array(x.shape[batch : batch + depth])
    if np.any(indices < -lengths) or np.any(indices >= lengths):
        raise Refused("has impossible indices")
    if math.prod(indices.shape[:-1]) * math.prod(x.shape[batch + depth :]) > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    chosen = np.where(indices < 0, indices + lengths, indices)
    own = np.indices(indices.shape[:-1])[:batch]
    return call.move(lambda a: a[(*own, *np.moveaxis(chosen, -1, 0))], x)


def _indices(call: Call) -> np.ndarray:
    indices = call.constant(1)
    if indices.dtype != np.int64 or not indices.size:
        raise Refused("needs indices that are integers")
    return indices
