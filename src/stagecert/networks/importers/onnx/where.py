"""Comparisons and `Where`: functions of one value that are made of lines, and how softplus ends.

Everything else that `Where` chooses between is blended: y + s * (x - y) with a step s.

PyTorch's exporters write Softshrink, Hardshrink and Threshold with comparisons, and Softplus with
one that makes it linear where it nearly is. What such nodes compute is followed exactly, as a
function of the one value that all of them read: its knots, and its value at any rational number.
"""

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Value
from stagecert.networks.importers import enclosures
from stagecert.networks.importers.enclosures import CONSTANT, Constant
from stagecert.networks.importers.onnx.arithmetic import add_up, multiplied
from stagecert.networks.importers.onnx.nodes import (
    Call,
    Placeholder,
    Refused,
    check_size,
    converts,
)

# More than this is no activation that anyone spells out.
MOST_KNOTS = 8
DEEPEST = 8
_TESTS = {
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
}
_LOGIC = {"And": operator.and_, "Or": operator.or_, "Xor": operator.xor}


@dataclass(frozen=True)
class Function:
    """A function of one number: a line (or a truth value) between any two knots.

    Attributes:
        knots: where it may bend or jump, in order.
        at: its value at a rational number, exactly.
    """

    knots: tuple[Fraction, ...]
    at: Callable[[Fraction], Any]

    def between(self) -> list[Fraction]:
        """A point inside of each interval between knots, the infinite ones included."""
        knots = self.knots
        if not knots:
            return [Fraction(0)]
        middle = [(a + b) / 2 for a, b in itertools.pairwise(knots)]
        return [knots[0] - 1, *middle, knots[-1] + 1]

    def lines(self) -> list[tuple[Fraction, Fraction]]:
        """(slope, offset) on each of these intervals."""
        found = []
        for k, x in enumerate(self.between()):
            # Another point of the same interval.
            y = x + 1 if k == len(self.knots) else (x + self.knots[k]) / 2
            slope = (self.at(y) - self.at(x)) / (y - x)
            found.append((slope, self.at(x) - slope * x))
        return found


def _joined(*knots: tuple[Fraction, ...]) -> tuple[Fraction, ...]:
    every = sorted(set().union(*knots))
    if len(every) > MOST_KNOTS:
        raise Refused(f"makes a function with more than {MOST_KNOTS} knots")
    return tuple(every)


def _line(slope: Fraction, offset: Fraction) -> Function:
    return Function((), lambda x: slope * x + offset)


def _compared(f: Function, g: Function, test: Callable) -> Function:
    both = _joined(f.knots, g.knots)
    difference = Function(both, lambda x: f.at(x) - g.at(x))
    zeros = tuple(-offset / slope for slope, offset in difference.lines() if slope)
    return Function(_joined(both, zeros), lambda x: test(f.at(x), g.at(x)))


def _chosen(truth: Function, f: Function, g: Function) -> Function:
    knots = _joined(truth.knots, f.knots, g.knots)
    return Function(knots, lambda x: f.at(x) if truth.at(x) else g.at(x))


def _applied(f: Function, knots: tuple[float, ...], function: Callable) -> Function:
    """A function of f that bends or jumps where f is one of the knots."""
    every = f.knots
    for knot in knots:
        level = _line(Fraction(0), Fraction(knot))
        every = _joined(every, _compared(f, level, operator.gt).knots)
    return Function(every, lambda x: function(f.at(x)))


# -- what values are, as functions of one of them --------------------------------------------------


def _same(x: Value, y: Value) -> bool:
    return (x.is_input, x.index) == (y.is_input, y.index)


def _root(call: Call, x: Value, depth: int = 0) -> Value:
    """The value that x is a function of, as far back as functions are known here."""
    root = call.affine(x)[0]
    made = call.draft.made(root)
    if made is not None and depth < DEEPEST and _known(made.operation) is not None:
        return _root(call, made.arguments[0], depth + 1)
    return root


def _known(operation: op.Operation) -> tuple[tuple[float, ...], Callable] | None:
    """(knots, function) of an operation that is made of lines."""
    if operation == op.Activation("abs"):
        return (0.0,), abs
    if operation == op.Activation("relu"):
        return (0.0,), lambda y: max(y, Fraction(0))
    if operation == op.Activation("sign"):
        return (0.0,), lambda y: Fraction((y > 0) - (y < 0))
    return None


def _function(call: Call, x: Any, root: Value, depth: int = 0) -> Function | None:
    """What x is as a function of the root's entries; None if it is none that is known."""
    if isinstance(x, CONSTANT):
        number = enclosures.uniform(x)
        # A constant of another shape would make the result larger than the root.
        if number is None or np.broadcast_shapes(x.shape, root.shape) != root.shape:
            return None
        return _line(Fraction(0), number)
    if not isinstance(x, Value) or x.shape != root.shape or depth > DEEPEST:
        return None
    origin, slope, offset = call.affine(x)
    if _same(origin, root):
        return _line(slope, offset)
    made = call.draft.made(origin)
    if made is None:
        return None
    if isinstance(made.operation, op.Sum):
        parts = [_function(call, y, root, depth + 1) for y in made.arguments]
        terms = [(s, f) for s, f in zip(made.operation.signs, parts, strict=True) if f is not None]
        if len(terms) < len(parts):
            return None
        knots = _joined(*(f.knots for _, f in terms))
        return Function(knots, lambda v: slope * sum(s * f.at(v) for s, f in terms) + offset)
    known = _known(made.operation)
    inner = None if known is None else _function(call, made.arguments[0], root, depth + 1)
    if known is None or inner is None:
        return None
    found = _applied(inner, *known)
    return Function(found.knots, lambda v: slope * found.at(v) + offset)


def _truth(call: Call, x: Any) -> tuple[Value, Function]:
    """(root, truth): what a comparison says of the root's entries."""
    known = call.draft.truths.get((x.is_input, x.index)) if isinstance(x, Value) else None
    if known is None:
        raise Refused("needs a condition that compares a function of one value with a number")
    return known


def _condition(call: Call, root: Value, truth: Function) -> Value:
    made = call.add(Placeholder("condition", root.shape), root)
    call.draft.truths[made.is_input, made.index] = root, truth
    return made


# -- operators -------------------------------------------------------------------------------------


@converts(*_TESTS)
def _compare(call: Call):
    variable = next(x for x in call.inputs if isinstance(x, Value))
    root = _root(call, variable)
    parts = [_function(call, x, root) for x in call.inputs]
    if parts[0] is None or parts[1] is None:
        # Of the difference, which is compared with zero.
        root = add_up(call, call.inputs, [1, -1])
        parts = [_line(Fraction(1), Fraction(0)), _line(Fraction(0), Fraction(0))]
    assert parts[0] is not None
    assert parts[1] is not None
    return _condition(call, root, _compared(parts[0], parts[1], _TESTS[call.operator]))


@converts(*_LOGIC, "Not")
def _logic(call: Call):
    (root, first), *rest = (_truth(call, x) for x in call.inputs)
    if call.operator == "Not":
        return _condition(call, root, Function(first.knots, lambda x: not first.at(x)))
    ((other, second),) = rest
    if not _same(root, other):
        raise Refused("joins conditions on different values")
    join = _LOGIC[call.operator]
    knots = _joined(first.knots, second.knots)
    return _condition(call, root, Function(knots, lambda x: join(first.at(x), second.at(x))))


@converts("Where")
def _where(call: Call):
    condition, x, y = call.inputs
    if isinstance(condition, CONSTANT):
        return _masked(call, condition, x, y)
    root, truth = _truth(call, condition)
    found = _softplus(call, root, truth, x, y)
    if found is not None:
        return found
    parts = [_function(call, one, root) for one in (x, y)]
    if parts[0] is None or parts[1] is None:
        return _blended(call, root, truth, x, y)
    return broken_line(call, root, _chosen(truth, parts[0], parts[1]))


def _share(call: Call, root: Value, truth: Function) -> Value:
    """One where the condition holds, and zero else: a step."""
    one, zero = (_line(Fraction(0), Fraction(number)) for number in (1, 0))
    return broken_line(call, root, _chosen(truth, one, zero))


def indicator(call: Call, condition: Value) -> Value:
    """A comparison as a number."""
    return _share(call, *_truth(call, condition))


def _masked(call: Call, mask: Constant, x: Any, y: Any) -> Value:
    """Which of both is known: each, with zeros where the other one is."""
    if not isinstance(mask, np.ndarray) or mask.dtype != bool:
        raise Refused("needs a condition of truth values")
    shape = np.broadcast_shapes(mask.shape, x.shape, y.shape)
    check_size(shape)
    kept = [
        call.scale(one, share.astype(np.float32)) if isinstance(one, Value)
        else _only(one, share, shape) for one, share in ((x, mask), (y, ~mask))
    ]  # fmt: skip
    return add_up(call, kept, [1, 1])


def _only(constant: Constant, mask: np.ndarray, shape) -> Constant:
    if isinstance(constant, np.ndarray):
        return np.where(mask, np.broadcast_to(constant, shape), np.zeros((), constant.dtype))
    return constant.moved(lambda a: np.where(mask, np.broadcast_to(a, shape), 0.0))


def _blended(call: Call, root: Value, truth: Function, x: Any, y: Any) -> Value:
    """y + s * (x - y), where s is one if the condition holds and zero else.

    s jumps: what is bounded has all values between the two where the condition is not decided.
    """
    share = _share(call, root, truth)
    if isinstance(x, Value) or isinstance(y, Value):
        chosen = multiplied(call, share, add_up(call, [x, y], [1, -1]))
    else:
        chosen = call.scale(share, enclosures.add(x, enclosures.negative(y)))
    return add_up(call, [chosen, y], [1, 1])


@converts("ThresholdedRelu")
def _thresholded_relu(call: Call):
    alpha = Fraction(_finite(call.get("alpha", 1.0)))
    knot = Function((alpha,), lambda v: v > alpha)
    return broken_line(call, call.variable(), _chosen(knot, _line(Fraction(1), Fraction(0)),
                                                      _line(Fraction(0), Fraction(0))))  # fmt: skip


@converts("Shrink")
def _shrink(call: Call):
    limit, bias = (Fraction(_finite(call.get(n, d))) for n, d in (("lambd", 0.5), ("bias", 0.0)))
    if limit < 0:
        raise Refused(f"is not supported with lambd={float(limit)}, below zero")

    def shrunk(v: Fraction) -> Fraction:
        return v + bias if v < -limit else v - bias if v > limit else Fraction(0)

    return broken_line(call, call.variable(), Function(_joined((-limit,), (limit,)), shrunk))


def _finite(number: float) -> float:
    if not np.isfinite(number):
        raise Refused("has an attribute that is not finite")
    return number


def _softplus(call: Call, root: Value, truth: Function, x: Any, y: Any) -> Value | None:
    """PyTorch's Softplus: linear beyond a threshold, where it nearly is in any case."""
    if len(truth.knots) != 1:
        return None
    left, right = map(truth.at, truth.between())
    if left == right:
        return None
    high, low = (x, y) if right else (y, x)
    if not isinstance(high, Value) or not isinstance(low, Value):
        return None
    soft, factor, offset = call.affine(low)
    made = call.draft.made(soft)
    if made is None or made.operation != op.Activation("softplus") or offset != 0:
        return None
    (argument,) = made.arguments
    origin, slope, shift = call.affine(argument)
    line = call.affine(high)
    if not (_same(origin, root) and _same(line[0], root) and root.shape == soft.shape):
        return None
    if slope <= 0 or line[1:] != (factor * slope, factor * shift):
        return None
    threshold = exact(slope * truth.knots[0] + shift)
    if threshold < 0:
        return None
    return call.scale(call.activation("reverting_softplus", argument, threshold=threshold), factor)


def broken_line(call: Call, x: Value, function: Function) -> Value:
    """The function of x, which is made of lines and may jump, as one activation."""
    lines = function.lines()
    kept: list[Fraction] = []
    at_once: list[bool] = []  # whether the line on the right begins at the knot itself
    between: dict[str, float] = {}  # values at knots that belong to neither line
    pieces = lines[:1]
    for knot, (slope, offset) in zip(function.knots, lines[1:], strict=True):
        ends = [a * knot + b for a, b in (pieces[-1], (slope, offset))]
        if not min(ends) <= function.at(knot) <= max(ends):
            raise Refused(f"has a value of its own at the single point {float(knot)}")
        if (slope, offset) != pieces[-1]:
            if function.at(knot) not in ends:
                between[f"at{len(kept)}"] = exact(function.at(knot))
            kept.append(knot)
            at_once.append(function.at(knot) == ends[1] != ends[0])
            pieces.append((slope, offset))
    if not kept:
        ((slope, offset),) = pieces
        return call.shift(call.scale(x, slope), offset)
    numbers = {f"knot{k}": exact(knot) for k, knot in enumerate(kept)}
    numbers |= {f"closed{k}": float(closed) for k, closed in enumerate(at_once)}
    for k, (slope, offset) in enumerate(pieces):
        numbers |= {f"slope{k}": exact(slope), f"offset{k}": exact(offset)}
    return call.activation("broken_line", x, **numbers, **between)


def exact(number: Fraction) -> float:
    """A number that float64 has to hold."""
    try:
        value = float(number)
    except OverflowError:
        value = np.inf
    if not np.isfinite(value) or Fraction(value) != number:
        raise Refused(f"needs the number {number}, which float64 does not hold")
    return value
