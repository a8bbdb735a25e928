"""Operators that are made of others: softmax, normalisations, norms, resized images."""

import math
from fractions import Fraction

import numpy as np
from flint import arb, fmpq

from stagecert_check import linear, patterns
from stagecert_check.constants import settled
from stagecert_check.functions import Refused, Value, activation_of
from stagecert_check.graph import MOST_ENTRIES, Call, handles


@handles("Softmax", "LogSoftmax")
def _softmax(call: Call):
    """exp(x_i) / sum of exp(x_j) = 1 / (1 + sum of exp(x_j - x_i) over the others)."""
    x = call.value()
    whole = call.reader.opset < 13  # all axes from this one on count as one
    (axis,) = call.axes([call.get("axis", 1 if whole else -1)], len(x.shape))
    end = len(x.shape) if whole else axis + 1
    order = [k for k in range(len(x.shape)) if not axis <= k < end] + list(range(axis, end))
    moved = [x.shape[k] for k in order]
    count = math.prod(x.shape[axis:end])
    rest = moved[: len(moved) - (end - axis)]
    if math.prod(rest) * count * count > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    if call.outputs == (call.reader.ordered,) and 1 < count == math.prod(x.shape):
        # Nothing reads the model's only output, and y_i < y_j where x_i < x_j, and only there.
        call.reader.program.without = call.operator
        return x
    flat = call.move(lambda a: np.transpose(a, order).reshape(*rest, count), x)
    if count == 1:
        level = 0.0 if call.operator == "LogSoftmax" else 1.0
        made = call.shift(call.scale(flat, np.zeros(())), np.full((), level))
    else:
        others = np.array([[j for j in range(count) if j != i] for i in range(count)])
        shape = (*rest, count, count - 1)
        other = call.move(lambda a: a[..., others], flat)
        own = call.move(lambda a: np.broadcast_to(a[..., None], shape), flat)
        difference = call.apply(linear.Sum((1, -1)), other, own, shape=shape)
        ratios = call.activate(activation_of("exp"), difference)
        total = call.apply(linear.Reduce([len(rest) + 1], shape), ratios, shape=(*shape[:-1], 1))
        total = call.shift(call.move(lambda a: a[..., 0], total), np.ones(()))
        if call.operator == "LogSoftmax":
            made = call.negated(call.activate(activation_of("log"), total))
        else:
            made = call.activate(activation_of("reciprocal"), total)
    return call.move(lambda a: np.transpose(a.reshape(moved), np.argsort(order)), made)


@handles("LayerNormalization")
def _layer_normalization(call: Call):
    x, scale = call.value(), call.floats(1)
    (axis,) = call.axes([call.get("axis", -1)], len(x.shape))
    call.get("stash_type")  # in which precision runtimes compute
    if any(call.outputs[1:]):
        raise Refused("is only supported for its first output")
    made = normalized(call, x, tuple(range(axis, len(x.shape))))
    bias = np.zeros(()) if call.item(2) is None else call.floats(2)
    if any(np.broadcast_shapes(c.shape, x.shape) != x.shape for c in (scale, bias)):
        raise Refused("has scales or biases of another shape")
    made = call.scale(made, scale)
    return made if call.item(2) is None else call.shift(made, bias)


@handles("InstanceNormalization")
def _instance_normalization(call: Call):
    x, scale, bias = call.value(), call.floats(1), call.floats(2)
    if len(x.shape) < 3 or scale.shape != (x.shape[1],) or bias.shape != (x.shape[1],):
        raise Refused("needs one scale and bias for each channel")
    shape = (-1, *(1 for _ in x.shape[2:]))
    made = normalized(call, x, tuple(range(2, len(x.shape))))
    return call.shift(call.scale(made, scale.reshape(shape)), bias.reshape(shape))


def normalized(call: Call, x: Value, axes: tuple[int, ...], centred: bool = True) -> Value:
    """(x - mean) / sqrt(variance + epsilon); or with zero for the mean."""
    epsilon = float(call.get("epsilon", float(np.float32(1e-5))))
    if not 0 < epsilon < math.inf:
        raise Refused("needs a positive epsilon")
    kept = tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    count = math.prod(x.shape[k] for k in axes)
    share = settled(1 / arb(count))

    def mean(v: Value) -> Value:
        return call.scale(call.apply(linear.Reduce(axes, x.shape), v, shape=kept), share)

    if centred:
        centre = call.broadcast(mean(x), x.shape)
        x = call.apply(linear.Sum((1, -1)), x, centre, shape=x.shape)
    variance = mean(call.activate(activation_of("square"), x))
    deviation = call.activate(activation_of("sqrt"), call.shift(variance, np.array(epsilon)))
    inverse = call.activate(activation_of("reciprocal"), deviation)
    made = patterns.product(call, x, inverse)
    # Of n numbers, one is at most sqrt(n) times the root of their mean square; of numbers that add
    # up to zero, at most sqrt(n - 1) times that. Bounds may be beyond: clip changes these only.
    square = count - 1 if centred else count
    if square == 0:
        return made
    reach = float(np.nextafter(np.float32(math.sqrt(square)), np.float32(np.inf)))
    if not arb(reach) ** 2 >= square:
        raise Refused("normalises too many entries")
    return call.activate(activation_of("clip", low=-reach, high=reach), made)


@handles("ReduceL1", "ReduceL2", "ReduceSumSquare", "GlobalLpPool")
def _norm(call: Call):
    x, kind = call.value(), call.operator
    if kind == "GlobalLpPool":
        axes, keep = tuple(range(2, len(x.shape))), 1
        kind = f"ReduceL{call.get('p', 2)}"
        if kind not in ("ReduceL1", "ReduceL2"):
            raise Refused("is only supported with p 1 or 2")
    else:
        axes, keep = call.reduced(len(x.shape))
    total = call.activate(activation_of("abs" if kind == "ReduceL1" else "square"), x)
    if axes:
        kept = tuple(1 if k in axes else n for k, n in enumerate(x.shape))
        total = call.apply(linear.Reduce(axes, x.shape), total, shape=kept)
        shape = kept if keep else tuple(n for k, n in enumerate(x.shape) if k not in axes)
        total = call.move(lambda a: a.reshape(shape), total)
    if kind != "ReduceL2":
        return total
    # A sum of squares is not negative, but bounds on it may be: relu changes these only.
    total = call.activate(activation_of("relu"), total)
    return call.activate(activation_of("sqrt"), total)


@handles("Upsample", "Resize")
def _repeated(call: Call):
    x, mode = call.value(), call.get("mode", b"nearest")
    newer = call.operator == "Resize" and call.reader.opset >= 11
    if call.get("axes"):
        raise Refused("is not supported with axes")
    # Otherwise the sizes are not those of the result.
    if call.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise Refused("is only supported where it may stretch")
    if mode == b"linear":
        return _interpolated(call, x, newer)
    if mode != b"nearest":
        raise Refused("is only supported with nearest neighbours, or linear")
    if newer:
        way = (
            call.get("coordinate_transformation_mode", b"half_pixel"),
            call.get("nearest_mode", b"round_prefer_floor"),
        )
        # With whole factors both are: entry i comes from entry i // factor.
        if way not in ((b"asymmetric", b"floor"), (b"half_pixel", b"round_prefer_floor")):
            raise Refused(f"is not supported with {way}")
        for name in ("cubic_coeff_a", "exclude_outside", "extrapolation_value", "antialias"):
            call.get(name)  # these do not concern nearest neighbours of such places
    factors = _factors(call, x, newer)
    if any(s.denominator != 1 or s < 1 for s in factors):
        raise Refused("is only supported with whole factors, one for each axis")
    if math.prod(x.shape) * math.prod(factors) > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")

    def repeated(a: np.ndarray) -> np.ndarray:
        for axis, factor in enumerate(factors):
            a = np.repeat(a, int(factor), axis)
        return a

    return call.move(repeated, x)


def _factors(call: Call, x: Value, newer: bool) -> list[Fraction]:
    """How much longer each axis gets."""
    if newer and call.item(3) is not None:
        sizes = call.integers("sizes", 3) or []
        factors = [Fraction(n, m) for n, m in zip(sizes, x.shape, strict=True)]
    elif "scales" in call.attributes:
        factors = [Fraction(s) for s in call.get("scales")]
    else:
        given = call.floats(2 if newer else 1)
        if given.dtype != np.float64 or not np.all(np.isfinite(given)):
            raise Refused("needs scales that float64 holds")
        factors = [Fraction(float(s)) for s in given.reshape(-1)]
    if len(factors) != len(x.shape) or any(s <= 0 for s in factors):
        raise Refused("needs one positive scale for each axis")
    return factors


def _interpolated(call: Call, x: Value, newer: bool) -> Value:
    """Linear interpolation along one axis after the other."""
    way = call.get("coordinate_transformation_mode", b"half_pixel") if newer else b"asymmetric"
    if call.get("antialias", 0):
        raise Refused("is not supported against aliases")
    for name in ("cubic_coeff_a", "exclude_outside", "extrapolation_value", "nearest_mode"):
        call.get(name)  # these do not concern linear interpolation of such places
    for axis, factor in enumerate(_factors(call, x, newer)):
        length = x.shape[axis]
        count = int(length * factor)
        if factor == 1:
            continue
        if count * math.prod(x.shape) > MOST_ENTRIES:
            raise Refused("makes a tensor that is too large")
        matrix = np.full((length, count), arb(0), object)
        for k in range(count):
            at = _place(way, k, (length, count), factor)
            low = min(int(at), length - 1)
            share = at - low
            matrix[low, k] += 1 - arb(fmpq(share.numerator, share.denominator))
            if share:
                matrix[low + 1, k] += arb(fmpq(share.numerator, share.denominator))
        weights, loose = call.weights(settled(matrix))
        x = call.move(lambda a, axis=axis: np.moveaxis(a, axis, -1), x)
        # A list of numbers is one row.
        x = call.move(lambda a: a[None], x) if len(x.shape) == 1 else x
        made = call.apply(linear.MatMul(weights, False, loose), x, shape=(*x.shape[:-1], count))
        made = call.move(lambda a: a[0], made) if len(call.value().shape) == 1 else made
        x = call.move(lambda a, axis=axis: np.moveaxis(a, -1, axis), made)
    return x


def _place(way: bytes, k: int, lengths: tuple[int, int], factor: Fraction) -> Fraction:
    """Where the new entry k is among the old ones."""
    old, new = lengths
    half = Fraction(1, 2)
    if way == b"align_corners":
        at = Fraction(k * (old - 1), max(new - 1, 1))
    elif way == b"asymmetric":
        at = k / factor
    elif way in (b"half_pixel", b"pytorch_half_pixel"):
        at = (k + half) / factor - half
        at = Fraction(0) if new == 1 and way == b"pytorch_half_pixel" else at
    else:
        raise Refused(f"is not supported with the places {way!r}")
    return min(max(at, Fraction(0)), Fraction(old - 1))
