"""Where and comparisons: what they make of one value, followed with exact numbers.

What such nodes read may be a function of one and the same value that consists of lines. It is then
a list of pieces in order, (end, slope, offset), the last of which ends at
infinity; what it is at the ends themselves is kept apart. Otherwise `Where` is a blend of what it
chooses between.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from stagecert_check import linear, patterns
from stagecert_check.constants import balls, settled
from stagecert_check.functions import Activation, Refused, Value, activation_of
from stagecert_check.graph import MOST_ENTRIES, Call, Part, handles

_MOST_PIECES = 12
_DEEPEST = 8
_TESTS = {
    "Greater": lambda d: d > 0,
    "GreaterOrEqual": lambda d: d >= 0,
    "Less": lambda d: d < 0,
    "LessOrEqual": lambda d: d <= 0,
}
_CONDITION, _SIGN = "a comparison", "sign"
_ZERO, _ONE = Fraction(0), Fraction(1)


class _Unknown(Refused):
    """What is read is no function of the value that is made of lines."""


@dataclass(frozen=True)
class Pieces:
    """`parts[k]` holds between ends k - 1 and k, `points[k]` at end k.

    Parts are (slope, offset) and points numbers, or both are truth values.
    """

    ends: tuple[Fraction, ...]
    parts: tuple[Any, ...]
    points: tuple[Any, ...]

    def cut(self, ends: list[Fraction]) -> "Pieces":
        """The same with further ends."""
        every = sorted({*self.ends, *ends})
        if len(every) >= _MOST_PIECES:
            raise Refused("is a function of too many pieces")
        parts, points, k = [], [], 0
        for end in every:
            parts.append(self.parts[k])
            if k < len(self.ends) and self.ends[k] == end:
                points.append(self.points[k])
                k += 1
            else:
                part = self.parts[k]
                points.append(part if isinstance(part, bool) else part[0] * end + part[1])
        return Pieces(tuple(every), (*parts, self.parts[k]), tuple(points))


def _together(pieces: list[Pieces]) -> list[Pieces]:
    ends = [end for one in pieces for end in one.ends]
    return [one.cut(ends) for one in pieces]


def _straight(slope: Fraction, offset: Fraction) -> Pieces:
    return Pieces((), ((slope, offset),), ())


def _combined(terms: list[tuple[Fraction, Pieces]], offset: Fraction) -> Pieces:
    """The sum of multiples of functions, and a number."""
    functions = _together([one for _, one in terms])
    factors = [factor for factor, _ in terms]
    parts = tuple(
        (
            sum((f * p[0] for f, p in zip(factors, row, strict=True)), _ZERO),
            sum((f * p[1] for f, p in zip(factors, row, strict=True)), offset),
        )
        for row in zip(*(one.parts for one in functions), strict=True)
    )
    points = tuple(
        sum((f * p for f, p in zip(factors, row, strict=True)), offset)
        for row in zip(*(one.points for one in functions), strict=True)
    )
    return Pieces(functions[0].ends, parts, points)


def _signs(function: Pieces, test: Callable[[Any], bool]) -> Pieces:
    """Where a function is positive, say."""
    zeros, starts = [], (-math.inf, *function.ends)
    for start, end, (slope, offset) in zip(
        starts, (*function.ends, math.inf), function.parts, strict=True
    ):
        if slope != 0 and start < -offset / slope < end:
            zeros.append(-offset / slope)
    cut = function.cut(zeros)
    truths = []
    for k, (slope, offset) in enumerate(cut.parts):
        left = cut.ends[k - 1] if k else None
        right = cut.ends[k] if k < len(cut.ends) else None
        if left is None:
            inside = _ZERO if right is None else right - 1
        else:
            inside = left + 1 if right is None else (left + right) / 2
        truths.append(bool(test(slope * inside + offset)))
    return Pieces(cut.ends, tuple(truths), tuple(bool(test(point)) for point in cut.points))


def _either(condition: Pieces, yes: Pieces, no: Pieces) -> Pieces:
    condition, yes, no = _together([condition, yes, no])
    return Pieces(
        condition.ends,
        tuple(a if c else b for c, a, b in zip(condition.parts, yes.parts, no.parts, strict=True)),
        tuple(
            a if c else b for c, a, b in zip(condition.points, yes.points, no.points, strict=True)
        ),
    )


# -- what values are -------------------------------------------------------------------------------


def _operation(call: Call, x: Value) -> Any:
    return call.reader.program.nodes[x.index]


def _bends(operation: Any) -> bool:
    return isinstance(operation, Activation) and operation.kind in ("abs", "relu", _SIGN)


def _origin(call: Call, x: Value) -> Value:
    """The value that x is made of."""
    for _ in range(_DEEPEST):
        x = call.exactly(x)[0]
        node = _operation(call, x)
        if not _bends(node.operation):
            break
        x = Value(node.arguments[0], call.reader.program.nodes[node.arguments[0]].shape)
    return call.exactly(x)[0]


def _of(call: Call, x: Any, origin: Value, depth: int = 0) -> Pieces:
    """x as a function of the origin."""
    if isinstance(x, np.ndarray):
        numbers = set(x.reshape(-1).tolist()) if x.dtype == np.float64 else set()
        if len(numbers) != 1 or not math.isfinite(min(numbers)):
            raise _Unknown("reads constants that are not one exact number")
        if np.broadcast_shapes(x.shape, origin.shape) != origin.shape:
            raise _Unknown("reads a constant with more entries than the value")
        return _straight(_ZERO, Fraction(numbers.pop()))
    if not isinstance(x, Value) or x.shape != origin.shape or depth > _DEEPEST:
        raise _Unknown("reads what is no known function of one value")
    root, slope, offset = call.exactly(x)
    if root.index == origin.index:
        return _straight(slope, offset)
    node = _operation(call, root)
    arguments = [Value(k, call.reader.program.nodes[k].shape) for k in node.arguments]
    if isinstance(node.operation, linear.Sum):
        terms = [
            (slope * int(sign), _of(call, y, origin, depth + 1))
            for sign, y in zip(node.operation.signs, arguments, strict=True)
        ]
        return _combined(terms, offset)
    if not _bends(node.operation):
        raise _Unknown("reads what is no known function of one value")
    inner = _of(call, arguments[0], origin, depth + 1)
    below = {"abs": _combined([(-_ONE, inner)], _ZERO), "relu": _straight(_ZERO, _ZERO)}
    if node.operation.kind == _SIGN:
        above, under = _straight(_ZERO, _ONE), _straight(_ZERO, -_ONE)
        found = _either(_signs(inner, lambda d: d < 0), under, _straight(_ZERO, _ZERO))
    else:
        above, found = inner, below[node.operation.kind]
    found = _either(_signs(inner, lambda d: d > 0), above, found)
    return _combined([(slope, found)], offset)


def _condition(call: Call, k: int) -> tuple[Value, Pieces]:
    item = call.item(k)
    found = call.reader.conditions.get(item.index) if isinstance(item, Value) else None
    if found is None:
        raise Refused("needs a comparison of one value with a number")
    return found


def _remembered(call: Call, origin: Value, truth: Pieces) -> Value:
    made = call.apply(Part(_CONDITION), origin, shape=origin.shape)
    call.reader.conditions[made.index] = origin, truth
    return made


# -- operators -------------------------------------------------------------------------------------


@handles(*_TESTS)
def _compare(call: Call):
    x, y = call.items
    origin = _origin(call, x if isinstance(x, Value) else y)
    try:
        pair = [(_ONE, _of(call, x, origin)), (-_ONE, _of(call, y, origin))]
    except _Unknown:  # the difference is compared with zero
        origin = _total(call, [(x, 1), (y, -1)])
        pair = [(_ONE, _straight(_ONE, _ZERO))]
    return _remembered(call, origin, _signs(_combined(pair, _ZERO), _TESTS[call.operator]))


@handles("And", "Or", "Xor", "Not")
def _logic(call: Call):
    origin, first = _condition(call, 0)
    false = Pieces((), (False,), ())
    true = Pieces((), (True,), ())
    if call.operator == "Not":
        return _remembered(call, origin, _either(first, false, true))
    other, second = _condition(call, 1)
    if other.index != origin.index:
        raise Refused("joins comparisons of different values")
    cases = {
        "And": (second, false),
        "Or": (true, second),
        "Xor": (_either(second, false, true), second),
    }
    return _remembered(call, origin, _either(first, *cases[call.operator]))


@handles("Where")
def _where(call: Call):
    x, y = call.items[1:]
    if isinstance(call.item(0), np.ndarray):
        return _masked(call, call.constant(0), x, y)
    origin, truth = _condition(call, 0)
    found = _softplus(call, origin, truth, x, y)
    if found is not None:
        return found
    try:
        pieces = _either(truth, _of(call, x, origin), _of(call, y, origin))
    except _Unknown:
        # y + s * (x - y), where s is one if the condition holds and zero else.
        return _blended(call, indicator(call, 0), x, y)
    return _broken(call, origin, pieces)


def indicator(call: Call, k: int) -> Value:
    """An input that is a comparison as a number: one where it holds, and zero else."""
    origin, truth = _condition(call, k)
    share = _either(truth, _straight(_ZERO, _ONE), _straight(_ZERO, _ZERO))
    return _broken(call, origin, share)


def _total(call: Call, items: list[tuple[Any, int]]) -> Value:
    """The sum of two items, times their signs, of which one at least is a variable."""
    shape = np.broadcast_shapes(*(x.shape for x, _ in items))
    made = [
        (call.broadcast(x, shape) if sign > 0 else call.negated(call.broadcast(x, shape)))
        for x, sign in items
        if isinstance(x, Value)
    ]
    constants = [(k, sign) for k, (x, sign) in enumerate(items) if isinstance(x, np.ndarray)]
    if len(made) == 2:
        return call.apply(linear.Sum((1, 1)), *made, shape=shape)
    ((k, sign),) = constants
    array = items[k][0]
    if array.dtype not in (np.float64, object):
        raise Refused("reads constants that are no floating-point numbers")
    return call.shift(made[0], settled(balls(array) * sign))


def _blended(call: Call, share: Value, x: Any, y: Any) -> Value:
    if isinstance(x, Value) or isinstance(y, Value):
        chosen = patterns.multiplied(call, share, _total(call, [(x, 1), (y, -1)]))
    else:
        chosen = call.scale(share, settled(balls(call.floats(1)) - balls(call.floats(2))))
    return _total(call, [(chosen, 1), (y, 1)])


def _masked(call: Call, mask: np.ndarray, x: Any, y: Any) -> Value:
    """Which of both is known: each, with zeros where the other one is."""
    if mask.dtype != bool:
        raise Refused("needs a condition of truth values")
    shape = np.broadcast_shapes(mask.shape, x.shape, y.shape)
    if math.prod(shape) > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    items: list[tuple[Any, int]] = []
    for k, (one, kept) in enumerate(((x, mask), (y, ~mask))):
        if isinstance(one, Value):
            items.append((call.scale(one, kept.astype(np.float64)), 1))
        else:
            zero = np.zeros((), call.floats(k + 1).dtype)
            items.append((np.where(kept, np.broadcast_to(one, shape), zero), 1))
    return _total(call, items)


@handles("ThresholdedRelu")
def _thresholded(call: Call):
    limit = Fraction(_number(call, "alpha", 1.0))
    pieces = Pieces((limit,), ((_ZERO, _ZERO), (_ONE, _ZERO)), (_ZERO,))
    return _broken(call, call.value(), pieces)


@handles("Shrink")
def _shrink(call: Call):
    limit, bias = Fraction(_number(call, "lambd", 0.5)), Fraction(_number(call, "bias", 0.0))
    if limit < 0:
        raise Refused("has a lambd below zero")
    outer = (_ONE, bias), (_ONE, -bias)
    if limit == 0:
        return _broken(call, call.value(), Pieces((_ZERO,), outer, (_ZERO,)))
    parts = (outer[0], (_ZERO, _ZERO), outer[1])
    return _broken(call, call.value(), Pieces((-limit, limit), parts, (_ZERO, _ZERO)))


def _number(call: Call, name: str, default: float) -> float:
    number = float(call.get(name, default))
    if not math.isfinite(number):
        raise Refused("has an attribute that is not finite")
    return number


def _softplus(call: Call, origin: Value, truth: Pieces, x: Any, y: Any) -> Value | None:
    """factor * softplus(w) up to a threshold of w, and factor * w beyond."""
    if len(truth.ends) != 1 or truth.parts[0] == truth.parts[1]:
        return None
    beyond, within = (x, y) if truth.parts[1] else (y, x)
    if not isinstance(beyond, Value) or not isinstance(within, Value):
        return None
    soft, factor, rest = call.exactly(within)
    node = _operation(call, soft)
    if getattr(node.operation, "kind", "") != "softplus" or rest != 0:
        return None
    w = Value(node.arguments[0], soft.shape)
    root, slope, offset = call.exactly(w)
    line = call.exactly(beyond)
    if root.index != origin.index or line[0].index != origin.index or slope <= 0:
        return None
    if line[1:] != (factor * slope, factor * offset):
        return None
    threshold = _float(slope * truth.ends[0] + offset)
    if threshold < 0:
        return None
    made = call.activate(activation_of("reverting_softplus", threshold=threshold), w)
    return call.times(made, factor)


def _broken(call: Call, x: Value, pieces: Pieces) -> Value:
    """One activation for a function that is made of lines."""
    ends, lines = [], [pieces.parts[0]]
    for end, point, line in zip(pieces.ends, pieces.points, pieces.parts[1:], strict=True):
        left, right = (slope * end + offset for slope, offset in (lines[-1], line))
        if not min(left, right) <= point <= max(left, right):
            raise Refused(f"has a value of its own at {float(end)} alone")
        if line != lines[-1]:
            ends.append(end)
            lines.append(line)
    if not ends:
        slope, offset = lines[0]
        made = call.times(x, slope)
        return call.shift(made, np.array(_float(offset)))
    settings = {f"knot{k}": _float(end) for k, end in enumerate(ends)}
    for k, (slope, offset) in enumerate(lines):
        settings |= {f"slope{k}": _float(slope), f"offset{k}": _float(offset)}
    return call.activate(activation_of("broken_line", **settings), x)


def _float(number: Fraction) -> float:
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or Fraction(value) != number:
        raise Refused(f"needs the number {number}, which float64 does not hold")
    return value
