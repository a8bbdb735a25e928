"""What comparisons, logic, ThresholdedRelu and Shrink compute."""

import numpy as np
from flint import arb, fmpq

from benchmarks.fuzz.exact import Call, Vague, computes, each, number

_TESTS = {
    "Greater": lambda d: d > 0,
    "GreaterOrEqual": lambda d: d >= 0,
    "Less": lambda d: d < 0,
    "LessOrEqual": lambda d: d <= 0,
}


def decided(test, x) -> bool:
    """Whether a test of a number holds; vague if balls cannot tell."""
    if isinstance(x, arb) and not x > 0 and not x < 0:
        raise Vague("a comparison of rounded numbers")
    return bool(test(x))


@computes(*_TESTS)
def _compared(call: Call):
    a, b = np.broadcast_arrays(*call.items)
    test = np.frompyfunc(lambda x, y: decided(_TESTS[call.operator], x - y), 2, 1)
    return np.asarray(test(a, b), dtype=bool)


@computes("And", "Or", "Xor", "Not")
def _logic(call: Call):
    functions = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
                 "Not": np.logical_not}  # fmt: skip
    return np.asarray(functions[call.operator](*call.items))


@computes("ThresholdedRelu")
def _thresholded(call: Call):
    alpha = number(call.get("alpha"))
    return each(lambda e: e if decided(lambda d: d > 0, e - alpha) else fmpq(0), call.items[0])


@computes("Shrink")
def _shrink(call: Call):
    limit, bias = number(call.get("lambd")), number(call.get("bias"))

    def shrunk(e):
        if decided(lambda d: d < 0, e + limit):
            return e + bias
        return e - bias if decided(lambda d: d > 0, e - limit) else fmpq(0)

    return each(shrunk, call.items[0])


def broken_line(settings: dict, e):
    """What the network's activation of that name is."""
    piece, count = 0, sum(name.startswith("knot") for name in settings)
    for k in range(count):
        past = e - number(settings[f"knot{k}"])
        test = (lambda d: d >= 0) if settings[f"closed{k}"] else (lambda d: d > 0)
        piece += decided(test, past)
    return number(settings[f"slope{piece}"]) * e + number(settings[f"offset{piece}"])
