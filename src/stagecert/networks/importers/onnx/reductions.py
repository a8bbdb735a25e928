"""ONNX operators that reduce or normalise, made of others, and those that rearrange entries."""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Value
from stagecert.networks.importers.onnx.arithmetic import product, reduced_axes
from stagecert.networks.importers.onnx.composed import EPSILON, normalized
from stagecert.networks.importers.onnx.nodes import Call, Refused, check_size, converts, place

# Factors of one product of variables.
MOST_FACTORS = 16


def _grouped(call: Call, x: Value, axes: tuple[int, ...]) -> Value:
    """The axes as one, which comes last."""
    rest = [k for k in range(len(x.shape)) if k not in axes]
    count = math.prod(x.shape[k] for k in axes)
    moved = call.add(op.Transpose((*rest, *axes)), x)
    return call.add(op.Reshape((*(x.shape[k] for k in rest), count)), moved)


def _reduced(call: Call, x: Value, y: Value, axes: tuple[int, ...]) -> Value:
    """y, which lacks the axes of x that were reduced, with them if they are to be kept."""
    if not call.get("keepdims", 1):
        return y
    return call.add(op.Reshape(tuple(1 if k in axes else n for k, n in enumerate(x.shape))), y)


def _entries(call: Call, x: Value, first: int, last: int | None = None) -> Value:
    """Some entries of the last axis; without `last` one, whose axis is gone."""
    axis = len(x.shape) - 1
    places = np.int32(first) if last is None else np.arange(first, last, dtype=np.int32)
    return call.add(op.Take(axis), x, weights=np.asarray(places))


@converts("ReduceLogSumExp")
def _log_sum_exp(call: Call):
    """x_0 + log(1 + the sum of exp(x_j - x_0) over the others): no interval is too wide for it."""
    x = call.variable()
    axes = reduced_axes(call, len(x.shape))
    if not axes:
        return x
    flat = _grouped(call, x, axes)
    count = flat.shape[-1]
    first = _entries(call, flat, 0)
    if count == 1:
        return _reduced(call, x, first, axes)
    others = _entries(call, flat, 1, count)
    own = call.add(op.Reshape((*first.shape, 1)), first)
    own = call.add(op.Broadcast(others.shape), own)
    ratios = call.activation("exp", call.add(op.Sum((1, -1)), others, own))
    total = call.shift(call.add(op.Reduce((len(first.shape),), False), ratios), Fraction(1))
    total = call.add(op.Sum((1, 1)), first, call.activation("log", total))
    return _reduced(call, x, total, axes)


@converts("ReduceLogSum")
def _log_sum(call: Call):
    x = call.variable()
    axes = reduced_axes(call, len(x.shape))
    keep = bool(call.get("keepdims", 1))
    return call.activation("log", call.add(op.Reduce(axes, keep), x) if axes else x)


@converts("ReduceProd")
def _product(call: Call):
    x = call.variable()
    axes = reduced_axes(call, len(x.shape))
    if not axes:
        return x
    flat = _grouped(call, x, axes)
    count = flat.shape[-1]
    if count > MOST_FACTORS:
        raise Refused(f"multiplies {count} variables; up to {MOST_FACTORS} do")
    total = _entries(call, flat, 0)
    for k in range(1, count):
        total = product(call, total, _entries(call, flat, k))
    return _reduced(call, x, total, axes)


@converts("CumSum")
def _running_sum(call: Call):
    x = call.variable()
    (axis,) = call.integers("axis", 1) or [0]
    axis, n = place(axis, len(x.shape)), x.shape[place(axis, len(x.shape))]
    check_size((n, n))
    # Column j adds up the entries before it, itself included or not.
    adds = np.triu(np.ones((n, n)), 1 if call.get("exclusive", 0) else 0)
    adds = adds[::-1, ::-1] if call.get("reverse", 0) else adds
    return _along(call, x, axis, adds)


def _along(call: Call, x: Value, axis: int, weights: np.ndarray) -> Value:
    """x times a matrix along an axis."""
    order = (*(k for k in range(len(x.shape)) if k != axis), axis)
    made = call.add(op.MatMul(False), call.add(op.Transpose(order), x), weights=weights)
    return call.add(op.Transpose(tuple(int(k) for k in np.argsort(order))), made)


@converts("LRN")
def _local_response(call: Call):
    """x * exp(-beta * log(bias + alpha / size * the sum of squares of near channels))."""
    x, size = call.variable(), int(call.get("size", 0))
    alpha, beta, bias = (
        Fraction(call.get(name, default))
        for name, default in (("alpha", float(np.float32(1e-4))), ("beta", 0.75), ("bias", 1.0))
    )
    # ONNX Runtime takes no even sizes.
    if len(x.shape) < 2 or size < 1 or size % 2 == 0 or alpha < 0 or bias <= 0 or beta < 0:
        raise Refused("needs channels, an odd size, a positive bias, no negative alpha or beta")
    n = x.shape[1]
    check_size((n, n))
    near = np.abs(np.arange(n)[:, None] - np.arange(n)) <= size // 2
    squares = _along(call, call.activation("square", x), 1, near.astype(np.float64))
    total = call.shift(call.scale(squares, alpha / size), bias)
    power = call.scale(call.activation("log", total), -beta)
    return product(call, x, call.activation("exp", power))


@converts("LpNormalization")
def _unit_length(call: Call):
    x, p = call.variable(), call.get("p", 2)
    axis = place(call.get("axis", -1), len(x.shape))
    if p not in (1, 2):
        raise Refused(f"is only supported with p 1 or 2, not {p}")
    each = call.activation("abs" if p == 1 else "square", x)
    total = call.add(op.Reduce((axis,), True), each)
    if p == 2:
        total = call.activation("sqrt", call.activation("relu", total))
    inverse = call.activation("reciprocal", total)
    # No entry is longer than the whole, but bounds on it may be.
    return call.activation("clip", product(call, x, inverse), low=-1.0, high=1.0)


@converts("RMSNormalization")
def _root_mean_square(call: Call):
    x, scale = call.variable(), call.constant(1, "scales")
    axis = place(call.get("axis", -1), len(x.shape))
    if np.broadcast_shapes(scale.shape, x.shape) != x.shape:
        raise Refused("has scales of another shape")
    axes = range(axis, len(x.shape))
    y = normalized(call, x, axes, call.get("epsilon", EPSILON), centred=False)
    return call.scale(y, scale)


@converts("GroupNormalization")
def _group_normalization(call: Call):
    x, scale, bias = call.variable(), call.constant(1, "scales"), call.constant(2, "biases")
    groups, channels = int(call.get("num_groups", 0)), math.prod(x.shape[1:2])
    if len(x.shape) < 2 or groups < 1 or channels % groups:
        raise Refused(f"cannot make {groups} groups of {channels} channels")
    # Before opset 21 there is one scale for each group.
    wanted = (channels,) if call.opset >= 21 else (groups,)
    if scale.shape != wanted or bias.shape != wanted:
        raise Refused(f"needs scales and biases of the shape {wanted}")
    shape = (*x.shape[:1], groups, math.prod(x.shape[1:]) // groups)
    grouped = call.add(op.Reshape(shape), x)
    y = normalized(call, grouped, range(2, 3), call.get("epsilon", EPSILON))
    y = call.add(op.Reshape(x.shape), y)
    shape = (-1, *(1 for _ in x.shape[2:]))
    scale, bias = (np.repeat(c, channels // len(c)).reshape(shape) for c in (scale, bias))
    return call.shift(call.scale(y, scale), bias)


# -- rearranged entries ----------------------------------------------------------------------------


@converts("DepthToSpace")
def _depth_to_space(call: Call):
    x, b = call.variable(), int(call.get("blocksize", 0))
    n, c, h, w = _blocks(x)
    if b < 1 or c % (b * b):
        raise Refused(f"cannot spread {c} channels over blocks of {b} x {b}")
    if call.get("mode", b"DCR") == b"DCR":
        shape, order = (n, b, b, c // b**2, h, w), (0, 3, 4, 1, 5, 2)
    else:
        shape, order = (n, c // b**2, b, b, h, w), (0, 1, 4, 2, 5, 3)
    x = call.add(op.Transpose(order), call.add(op.Reshape(shape), x))
    return call.add(op.Reshape((n, c // b**2, h * b, w * b)), x)


@converts("SpaceToDepth")
def _space_to_depth(call: Call):
    x, b = call.variable(), int(call.get("blocksize", 0))
    n, c, h, w = _blocks(x)
    if b < 1 or h % b or w % b:
        raise Refused(f"cannot cut {h} x {w} entries into blocks of {b} x {b}")
    x = call.add(op.Reshape((n, c, h // b, b, w // b, b)), x)
    x = call.add(op.Transpose((0, 3, 5, 1, 2, 4)), x)
    return call.add(op.Reshape((n, c * b**2, h // b, w // b)), x)


def _blocks(x: Value) -> tuple[int, ...]:
    if len(x.shape) != 4:
        raise Refused("needs images")
    return x.shape


@converts("Trilu")
def _triangle(call: Call):
    x = call.variable()
    (k,) = call.integers("k", 1) or [0]
    if len(x.shape) < 2:
        raise Refused("needs matrices")
    part = np.triu if call.get("upper", 1) else np.tril
    return call.scale(x, part(np.ones(x.shape[-2:]), k))


@converts("GatherElements")
def _gather_elements(call: Call):
    x, indices = call.variable(), _indices(call)
    axis = place(call.get("axis", 0), len(x.shape))
    n = x.shape[axis]
    if indices.ndim != len(x.shape) or np.any(indices < -n) or np.any(indices >= n):
        raise Refused("has indices that are not there")
    places: list[Any] = list(np.indices(indices.shape))
    places[axis] = indices % n
    if any(np.any(p >= m) for p, m in zip(places, x.shape, strict=True)):
        raise Refused("has indices of another shape")
    return _picked(call, x, places)


@converts("GatherND")
def _gather_nd(call: Call):
    x, indices = call.variable(), _indices(call)
    batch, depth = int(call.get("batch_dims", 0)), indices.shape[-1] if indices.ndim else 0
    if not depth or batch + depth > len(x.shape) or x.shape[:batch] != indices.shape[:batch]:
        raise Refused("has indices that do not fit")
    lengths = np.array(x.shape[batch : batch + depth])
    if batch >= indices.ndim or np.any(indices < -lengths) or np.any(indices >= lengths):
        raise Refused("has indices that are not there")
    own = np.indices(indices.shape[:-1])[:batch]
    return _picked(call, x, [*own, *np.moveaxis(indices % lengths, -1, 0)])


def _indices(call: Call) -> np.ndarray:
    indices = call.constant(1, "indices")
    if indices.dtype.kind not in "iu" or not indices.size:
        raise Refused("needs indices that are integers")
    return indices.astype(np.int64)


def _picked(call: Call, x: Value, places: list[np.ndarray]) -> Value:
    """x[places], with all further axes."""
    rest = x.shape[len(places) :]
    check_size((*places[0].shape, *rest))
    flat = np.ravel_multi_index(tuple(places), x.shape[: len(places)])
    rows = call.add(op.Reshape((math.prod(x.shape[: len(places)]), *rest)), x)
    return call.add(op.Take(0), rows, weights=flat.astype(np.int32))
