"""What softmax, normalisations, norms, nearest neighbours and branches compute in ONNX."""

import math

import numpy as np
from flint import fmpq

from benchmarks.fuzz import exact_unrolled
from benchmarks.fuzz.exact import COMPUTES, CURVES, Call, Vague, computes, each, number


def _sum(entries):
    total = entries[0]
    for entry in entries[1:]:
        total = total + entry
    return total


def _along(x: np.ndarray, axes: list[int], function) -> np.ndarray:
    """A function of all entries along some axes together, for each place in the others."""
    rest = [k for k in range(x.ndim) if k not in axes]
    order = [*rest, *axes]
    lengths = [x.shape[k] for k in axes]
    moved = np.transpose(x, order)
    out = np.empty(moved.shape, object)
    for place in np.ndindex(*moved.shape[: len(rest)]):
        flat = list(moved[place].reshape(-1)) if lengths else [moved[place]]
        made = np.empty(len(flat), object)
        made[:] = function(flat)
        out[place] = made.reshape(lengths)
    return np.transpose(out, np.argsort(order))


@computes("Softmax", "LogSoftmax")
def _softmax(call: Call):
    x, newer = call.items[0], call.opset >= 13
    axis = call.get("axis", -1 if newer else 1)
    if not -x.ndim <= axis < x.ndim:
        raise Vague("no such axis")
    axis %= x.ndim
    exp, log = CURVES["Exp"], CURVES["Log"]

    def shares(entries):
        powers = [exp(e) for e in entries]
        total = _sum(powers)
        if call.operator == "Softmax":
            return [p / total for p in powers]
        return [e - log(total) for e in entries]

    return _along(x, [axis] if newer else list(range(axis, x.ndim)), shares)


@computes("LayerNormalization", "InstanceNormalization")
def _normalization(call: Call):
    x, scale, bias = call.items[0], call.items[1], call.item(2)
    layer = call.operator == "LayerNormalization"
    first = call.get("axis", -1) % x.ndim if layer else 2
    epsilon = number(call.get("epsilon"))
    root = CURVES["Sqrt"]

    def normalized(entries):
        mean = _sum(entries) / len(entries)
        variance = _sum([(e - mean) * (e - mean) for e in entries]) / len(entries)
        return [(e - mean) / root(variance + epsilon) for e in entries]

    y = _along(x, list(range(first, x.ndim)), normalized)
    if not layer:
        scale, bias = (c.reshape(-1, *(1 for _ in x.shape[2:])) for c in (scale, bias))
    y = y * scale
    return np.asarray(y if bias is None else y + bias)


@computes("ReduceL1", "ReduceL2", "ReduceSumSquare")
def _norm(call: Call):
    each_entry = abs if call.operator == "ReduceL1" else lambda e: e * e
    inner = Call.__new__(Call)
    inner.__dict__.update(call.__dict__)
    inner.operator, inner.items = "ReduceSum", [each(each_entry, call.items[0]), *call.items[1:]]
    total = COMPUTES["ReduceSum"](inner)
    return each(CURVES["Sqrt"], total) if call.operator == "ReduceL2" else total


@computes("Upsample", "Resize")
def _resized(call: Call):
    x = call.items[0]
    if call.get("mode") == b"linear":
        way = call.get("coordinate_transformation_mode").decode()
        return exact_unrolled.interpolated(x, call.integers("sizes", 3) or [], way)
    scales = call.get("scales")
    if scales is None:
        newer = call.operator == "Resize" and call.opset >= 11
        given = call.item(2 if newer else 1)
        if given is not None and given.size:
            scales = [float(fmpq(s).p) / float(fmpq(s).q) for s in given.reshape(-1)]
        else:
            scales = [n / m for n, m in zip(call.integers("sizes", 3) or [], x.shape, strict=True)]
    if any(s != int(s) for s in scales):
        raise Vague("factors that are not whole")
    for axis, scale in enumerate(scales):
        length = x.shape[axis] * int(scale)
        # The nearest entry to (i + 1/2) / scale - 1/2, and to i / scale from below: the same.
        x = np.take(x, [math.floor(i / scale) for i in range(length)], axis)
    return x


@computes("Round")
def _round(call: Call):
    def rounded(e):
        if not isinstance(e, fmpq):
            raise Vague("steps of rounded numbers")
        low = fmpq(e.floor())
        rest = e - low
        up = rest > fmpq(1, 2) or (rest == fmpq(1, 2) and int(low.p) % 2)
        return low + 1 if up else low

    return each(rounded, call.items[0])


_TESTS = {
    "Less": lambda x, y: x < y,
    "LessOrEqual": lambda x, y: x <= y,
    "Greater": lambda x, y: x > y,
    "GreaterOrEqual": lambda x, y: x >= y,
}


@computes(*_TESTS)
def _compared(call: Call):
    x, y = np.broadcast_arrays(*call.items)
    out = np.empty(x.shape, bool)
    for place in np.ndindex(*x.shape):
        pair = x[place], y[place]
        if any(not isinstance(e, (fmpq, int, np.integer)) for e in pair):
            raise Vague("a comparison of rounded numbers")
        out[place] = bool(_TESTS[call.operator](*pair))
    return out


@computes("And", "Or", "Xor", "Not")
def _logic(call: Call):
    functions = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
                 "Not": np.logical_not}  # fmt: skip
    return np.asarray(functions[call.operator](*call.items))


@computes("ThresholdedRelu", "Shrink")
def _thresholded(call: Call):
    def value(e):
        if not isinstance(e, fmpq):
            raise Vague("a comparison of rounded numbers")
        if call.operator == "ThresholdedRelu":
            return e if e > number(call.get("alpha")) else fmpq(0)
        limit, bias = number(call.get("lambd")), number(call.get("bias"))
        return e + bias if e < -limit else e - bias if e > limit else fmpq(0)

    return each(value, call.items[0])
