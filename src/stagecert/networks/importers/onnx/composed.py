"""ONNX operators that are made of others: softmax, normalisations, norms, resized images."""

import math
from fractions import Fraction

import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Value
from stagecert.networks.importers import enclosures
from stagecert.networks.importers.onnx.arithmetic import product, reduced_axes
from stagecert.networks.importers.onnx.nodes import Call, Refused, check_size, converts, place


@converts("Softmax", "LogSoftmax")
def _softmax(call: Call):
    """Entry i is 1 / (1 + the sum of exp(x_j - x_i) over all others).

    Written like that it needs no product, and is between zero and one however wide the intervals.
    """
    x = call.variable()
    rank = len(x.shape)
    axis = place(call.get("axis", -1 if call.opset >= 13 else 1), rank)
    # Before opset 13 all axes from this one on count as one.
    last = range(axis, axis + 1) if call.opset >= 13 else range(axis, rank)
    rest = [k for k in range(rank) if k not in last]
    order = (*rest, *last)
    count = math.prod(x.shape[k] for k in last)
    moved = call.add(op.Transpose(order), x)
    flat = call.add(op.Reshape((*(x.shape[k] for k in rest), count)), moved)
    made = _shares(call, flat, count, call.operator == "LogSoftmax")
    back = call.add(op.Reshape(moved.shape), made)
    return call.add(op.Transpose(tuple(int(k) for k in np.argsort(order))), back)


def _shares(call: Call, x: Value, count: int, logarithm: bool) -> Value:
    shape = (*x.shape[:-1], count, max(count - 1, 1))
    check_size(shape)
    if count == 1:  # one entry has it all
        return call.shift(call.scale(x, Fraction(0)), Fraction(0 if logarithm else 1))
    others = np.array([[j for j in range(count) if j != i] for i in range(count)])
    other = call.add(op.Take(len(x.shape) - 1), x, weights=others)
    own = call.add(op.Broadcast(shape), call.add(op.Reshape((*x.shape, 1)), x))
    ratios = call.activation("exp", call.add(op.Sum((1, -1)), other, own))
    total = call.shift(call.add(op.Reduce((len(shape) - 1,), False), ratios), Fraction(1))
    if logarithm:
        return call.scale(call.activation("log", total), Fraction(-1))
    return call.activation("reciprocal", total)


@converts("LayerNormalization")
def _layer_normalization(call: Call):
    x = call.variable()
    axis = place(call.get("axis", -1), len(x.shape))
    if any(call.outputs[1:]):
        raise Refused("is only supported if mean and deviation are not used")
    scale = call.constant(1, "scales")
    y = normalized(call, x, range(axis, len(x.shape)), call.get("epsilon", EPSILON))
    if np.broadcast_shapes(scale.shape, x.shape) != x.shape:
        raise Refused("has scales of another shape")
    y = call.scale(y, scale)
    if call.item(2) is None:
        return y
    bias = call.constant(2, "biases")
    if np.broadcast_shapes(bias.shape, x.shape) != x.shape:
        raise Refused("has biases of another shape")
    return call.shift(y, bias)


@converts("InstanceNormalization")
def _instance_normalization(call: Call):
    x, scale, bias = call.variable(), call.constant(1, "scales"), call.constant(2, "biases")
    if len(x.shape) < 3 or scale.shape != (x.shape[1],) or bias.shape != (x.shape[1],):
        raise Refused("needs one scale and bias for each channel")
    shape = (-1, *(1 for _ in x.shape[2:]))
    y = normalized(call, x, range(2, len(x.shape)), call.get("epsilon", EPSILON))
    return call.shift(call.scale(y, scale.reshape(shape)), bias.reshape(shape))


EPSILON = float(np.float32(1e-5))


def normalized(call: Call, x: Value, axes: range, epsilon: float, centred: bool = True) -> Value:
    """(x - mean) / sqrt(variance + epsilon) over some axes; or with zero for the mean."""
    if not 0 < epsilon < math.inf:
        raise Refused(f"needs a positive epsilon, not {epsilon}")
    share = Fraction(1, math.prod(x.shape[k] for k in axes))
    count = share.denominator
    if centred:
        mean = call.scale(call.add(op.Reduce(tuple(axes), True), x), share)
        x = call.add(op.Sum((1, -1)), x, call.add(op.Broadcast(x.shape), mean))
    squares = call.activation("square", x)
    variance = call.scale(call.add(op.Reduce(tuple(axes), True), squares), share)
    deviation = call.activation("sqrt", call.shift(variance, np.array(epsilon)))
    y = product(call, x, call.activation("reciprocal", deviation))
    return _within_reach(call, y, count - 1 if centred else count)


def _within_reach(call: Call, y: Value, square: int) -> Value:
    """What is normalised is never beyond a number whose square is known, but bounds on it may be.

    Of n numbers, one is at most sqrt(n) times the root of their mean square; of numbers that add up
    to zero, at most sqrt(n - 1) times that.
    """
    if square == 0:
        return y
    reach = float(np.nextafter(np.float32(math.sqrt(square)), np.float32(math.inf)))
    return call.activation("clip", y, low=-reach, high=reach)


@converts("ReduceL1", "ReduceL2", "ReduceSumSquare", "GlobalLpPool")
def _norm(call: Call):
    x, keepdims, kind = call.variable(), bool(call.get("keepdims", 1)), call.operator
    if kind == "GlobalLpPool":
        axes, p = tuple(range(2, len(x.shape))), call.get("p", 2)
        if p not in (1, 2):
            raise Refused(f"is only supported with p 1 or 2, not {p}")
        kind = f"ReduceL{p}"
    else:
        axes = reduced_axes(call, len(x.shape))
    each = call.activation("abs" if kind == "ReduceL1" else "square", x)
    total = call.add(op.Reduce(axes, keepdims), each) if axes else each
    if kind != "ReduceL2":
        return total
    # A sum of squares is not negative, but bounds on it may be: relu changes these only.
    return call.activation("sqrt", call.activation("relu", total))


@converts("Upsample", "Resize")
def _repeated(call: Call):
    x = call.variable()
    if call.get("axes") or call.get("antialias", 0):
        raise Refused("is not supported with axes or against aliases")
    # Otherwise the sizes are not those of the result.
    if call.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise Refused("is only supported where it may stretch")
    if call.get("mode") == b"linear":
        return _interpolated(call, x)
    for axis, times in enumerate(_factors(call, x.shape)):
        if times > 1:
            check_size((*x.shape, times))
            x = call.add(op.Take(axis), x, weights=np.repeat(np.arange(x.shape[axis]), times))
    return x


def _factors(call: Call, shape) -> list[int]:
    """How often every entry is repeated along each axis: nearest neighbours, whole factors."""
    mode = call.get("mode", b"nearest")
    if mode != b"nearest":
        raise Refused(f"is only supported with nearest neighbours, not with the mode {mode!r}")
    newer = _is_newer(call)
    if newer:
        places = call.get("coordinate_transformation_mode", b"half_pixel")
        nearest = call.get("nearest_mode", b"round_prefer_floor")
        known = [(b"asymmetric", b"floor"), (b"half_pixel", b"round_prefer_floor")]
        if (places, nearest) not in known:
            raise Refused(f"is not supported with {places!r} and {nearest!r}")
    scales = _scales(call, shape)
    if any(s.denominator != 1 or s < 1 for s in scales):
        raise Refused("is only supported with whole factors, one for each axis")
    return [int(s) for s in scales]


def _is_newer(call: Call) -> bool:
    return call.operator == "Resize" and call.opset >= 11


def _scales(call: Call, shape) -> list[Fraction]:
    """How much longer each axis gets."""
    newer = _is_newer(call)
    if newer and call.item(3) is not None:
        sizes = call.integers("sizes", 3) or []
        scales = [Fraction(n, m) for n, m in zip(sizes, shape, strict=True)]
    elif call.get("scales") is not None:
        scales = [Fraction(s) for s in call.get("scales")]
    else:
        given = call.constant(2 if newer else 1, "scales")
        scales = [Fraction(float(s)) for s in given.ravel()]
    if len(scales) != len(shape) or any(s <= 0 for s in scales):
        raise Refused("needs one positive scale for each axis")
    return scales


def _interpolated(call: Call, x: Value) -> Value:
    """Linear interpolation: a matrix of shares for each axis that changes."""
    way = call.get("coordinate_transformation_mode", b"half_pixel").decode()
    way = way if _is_newer(call) else "asymmetric"
    for axis, scale in enumerate(_scales(call, x.shape)):
        shares = _shares_of_neighbours(x.shape[axis], scale, way)
        if scale == 1 and shares.shape[0] == x.shape[axis]:
            continue
        check_size((*x.shape, len(shares)))
        numerators, denominators = (
            np.array([[getattr(s, name) for s in row] for row in shares.T], np.float64)
            for name in ("numerator", "denominator")
        )
        if max(np.abs(numerators).max(), denominators.max()) > 2**53:
            raise Refused("has scales with too many digits")
        weights, loose = enclosures.weights_of(enclosures.divide(numerators, denominators))
        rank = len(x.shape)
        order = (*(k for k in range(rank) if k != axis), axis)
        made = call.add(op.MatMul(False, loose), call.add(op.Transpose(order), x), weights=weights)
        x = call.add(op.Transpose(tuple(int(k) for k in np.argsort(order))), made)
    return x


def _shares_of_neighbours(length: int, scale: Fraction, way: str) -> np.ndarray:
    """(new length, length): what each entry takes of which old ones."""
    count = math.floor(length * scale)
    check_size((count, length))
    half, shares = Fraction(1, 2), np.full((count, length), Fraction(0), object)
    for k in range(count):
        if way == "align_corners":
            at = Fraction(k * (length - 1), count - 1) if count > 1 else Fraction(0)
        elif way == "asymmetric":
            at = k / scale
        elif way == "half_pixel" or (way == "pytorch_half_pixel" and count > 1):
            at = (k + half) / scale - half
        elif way == "pytorch_half_pixel":
            at = Fraction(0)
        else:
            raise Refused(f"is not supported with the coordinates {way!r}")
        at = min(max(at, Fraction(0)), Fraction(length - 1))
        first = min(math.floor(at), length - 1)
        shares[k, first] += 1 - (at - first)
        shares[k, min(first + 1, length - 1)] += at - first
    return shares
