"""Smooth functions for whole arrays in float64, with errors that are proven.

A `Table` holds Taylor polynomials of a function on cells of the line. Arb computes the coefficients
at a cell's centre, and encloses the next one on all of the cell: that times the next power of the
distance is the remainder. What is rounded, of the coefficients and when the polynomial is
evaluated, is added to the cell's error. Cells are made where they are first needed. Far out, where
a function is convex or concave up to infinity and approaches a line, it differs from the line by
less than it did before, and so do the slopes.

Neither NumPy's nor any other exp, tanh or log is used: only sums, products and quotients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import arb, arb_series, ctx

from stagecert_check.numbers import EPS, TINY

ctx.prec = 160  # bits of the balls
ctx.cap = 12  # coefficients of a power series
_DEGREE = 9  # of the polynomials
_CELLS = 32  # in a unit; a power of two, so that centres and distances to them are exact
_REACH = 64  # there are cells from minus this to this
FAR = 4  # from here on functions may be taken for the lines that they approach
_POWERS = [(arb(1) / (2 * _CELLS)) ** k for k in range(_DEGREE + 2)]  # of a cell's radius
_ALL_BUT_EQUAL = 1e-17
_TIGHT = 1e-12  # how far a bound may be off, compared with its size or one
_LEAST = 1e-100  # from here on a square root is not too steep
_GENEROUS = 1.001  # errors are summed up in float64

Result = tuple[np.ndarray, np.ndarray]  # numbers, and how far they are off at most
Series = Callable[[arb_series], arb_series]
Limit = tuple[Any, Any]  # the slope and the offset of a line


class Form:
    """A function and its slope on arrays."""

    def value(self, x: np.ndarray) -> Result:
        """Values, and how far they are off; infinitely where nothing is known."""
        raise NotImplementedError

    def slope(self, x: np.ndarray) -> Result:
        """Slopes, and how far they are off."""
        raise NotImplementedError

    def curvature(self, x: np.ndarray) -> np.ndarray:
        """Second derivatives, roughly: only searches use them."""
        raise NotImplementedError


class Square(Form):
    """x * x."""

    def value(self, x: np.ndarray):
        return x * x, EPS * (x * x) + TINY

    def slope(self, x: np.ndarray):
        return 2 * x, np.zeros(x.shape)

    def curvature(self, x: np.ndarray):
        return np.full(x.shape, 2.0)


class Softsign(Form):
    """x / (1 + |x|)."""

    def value(self, x: np.ndarray):
        # Two roundings, each of less than EPS / 2.
        found = x / (1 + np.abs(x))
        return found, 2 * EPS * np.abs(found) + TINY

    def slope(self, x: np.ndarray):
        # 1 + |x| is squared, which doubles its relative error: five roundings.
        found = 1 / (1 + np.abs(x)) ** 2
        return found, 4 * EPS * found + TINY

    def curvature(self, x: np.ndarray):
        return -2 * np.sign(x) / (1 + np.abs(x)) ** 3


class Power(Form):
    """x to the power of a small whole number, by products."""

    def __init__(self, exponent: int):
        self.exponent = exponent

    def _raised(self, x: np.ndarray, exponent: int):
        found = np.ones(x.shape)
        for _ in range(exponent):
            found = found * x
        return found

    def value(self, x: np.ndarray):
        found = self._raised(x, self.exponent)
        return found, self.exponent * EPS * np.abs(found) + self._lost(x)

    def slope(self, x: np.ndarray):
        found = self.exponent * self._raised(x, self.exponent - 1)
        return found, self.exponent * EPS * np.abs(found) + self.exponent * self._lost(x)

    def curvature(self, x: np.ndarray):
        return self.exponent * (self.exponent - 1) * self._raised(x, self.exponent - 2)

    def _lost(self, x: np.ndarray):
        """What underflows, times the factors that come after."""
        return self.exponent * TINY * np.maximum(1, np.abs(self._raised(x, self.exponent)))


class Inverse(Form):
    """1 / x."""

    def value(self, x: np.ndarray):
        found = 1 / x
        return found, EPS * np.abs(found) + TINY

    def slope(self, x: np.ndarray):
        found = -1 / (x * x)
        # Three roundings, and a square that underflows makes it infinite.
        return found, 3 * EPS * np.abs(found) + TINY

    def curvature(self, x: np.ndarray):
        return 2 / (x * x * x)


class Root(Form):
    """The square root, which IEEE 754 rounds correctly."""

    def value(self, x: np.ndarray):
        found = np.sqrt(x)
        return found, EPS * found

    def slope(self, x: np.ndarray):
        # At zero it is infinite: any number does for a search, and nothing else may be based on it.
        found = 0.5 / np.sqrt(np.maximum(x, _LEAST))
        return found, np.where(x < _LEAST, np.inf, 2 * EPS * found)

    def curvature(self, x: np.ndarray):
        x = np.maximum(x, _LEAST)
        return -0.25 / (x * np.sqrt(x))


class Log(Form):
    """log(x) = log(m) + e log(2) where x = m 2^e with 1/2 <= m < 1: the table needs no more."""

    def __init__(self):
        self._table = Table(lambda x: x.log())
        two = arb(2).log()
        self._two, self._off = float(two.mid()), _above(abs(two - float(two.mid())))

    def value(self, x: np.ndarray):
        mantissa, exponent = np.frexp(x)
        found, off = self._table.value(mantissa)
        whole = exponent * self._two
        size = np.abs(found) + np.abs(whole)
        return found + whole, off + self._off * np.abs(exponent) + 2 * EPS * size + TINY

    def slope(self, x: np.ndarray):
        found = 1 / x
        return found, EPS * np.abs(found) + TINY

    def curvature(self, x: np.ndarray):
        return -1 / (x * x)


class Table(Form):
    """A function given by what it makes of power series.

    `left` and `right` are the lines that it approaches, on the way to which it has no inflection
    from FAR on; None where there is none or it is not known.
    """

    def __init__(self, function: Series, left: Limit | None = None, right: Limit | None = None):
        self._function = function
        count = 2 * _REACH * _CELLS + 1
        # Of values and of slopes: coefficients, the highest first, by cell, and errors.
        self._values = np.zeros((_DEGREE + 1, count)), np.full(count, np.inf)
        self._slopes = np.zeros((_DEGREE, count)), np.full(count, np.inf)
        self._made = np.zeros(count // _CELLS + 1, bool)  # by blocks of a unit's cells
        self._tails = [
            _Tail(function, limit, sign)
            for limit, sign in ((left, -1), (right, 1))
            if limit is not None
        ]

    def value(self, x: np.ndarray):
        return self._evaluate(x, self._values, lambda tail, x: tail.value(x))

    def slope(self, x: np.ndarray):
        return self._evaluate(x, self._slopes, lambda tail, x: tail.slope(x))

    def curvature(self, x: np.ndarray):
        cell, distance = self._cell(x)
        found = np.zeros(x.shape)
        for k, row in enumerate(self._slopes[0][:-1]):
            found = found * distance + (_DEGREE - 1 - k) * row[cell]
        return found

    def _cell(self, x: np.ndarray):
        """The cells that numbers are in, and how far from the centre. Nothing is rounded:

        scaling by a power of two is exact, and a number's distance to the nearest centre is a
        multiple of its last bit and not larger than it is.
        """
        nearest = np.rint(x * _CELLS)
        inside = np.abs(nearest) <= _REACH * _CELLS
        for tail in self._tails:
            inside &= tail.sign * x < tail.start
        distance = np.where(inside, x - nearest / _CELLS, 0)
        cell = np.where(inside, nearest, 0).astype(np.intp) + _REACH * _CELLS
        blocks = np.zeros(len(self._made), bool)
        blocks[cell // _CELLS] = True
        for block in np.flatnonzero(blocks & ~self._made):
            self._make(int(block))
        return cell, distance

    def _evaluate(self, x: np.ndarray, table: Any, by_tail: Any) -> Result:
        cell, distance = self._cell(x)
        coefficients, errors = table
        error, found = errors[cell], coefficients[0][cell]
        for row in coefficients[1:]:
            found *= distance
            found += row[cell]
        error = np.where(np.abs(x) <= _REACH, error, np.inf)
        for tail in self._tails:
            far = tail.sign * x >= tail.start
            if far.any():
                found[far], error[far] = by_tail(tail, x[far])
        return found, error

    def _make(self, block: int) -> None:
        for cell in range(block * _CELLS, min((block + 1) * _CELLS, len(self._values[1]))):
            try:
                polynomials = _polynomials(self._function, arb(cell) / _CELLS - _REACH)
            except (ValueError, ZeroDivisionError, OverflowError):  # a pole is near
                continue
            for table, (coefficients, error) in zip(
                (self._values, self._slopes), polynomials, strict=True
            ):
                table[0][:, cell], table[1][cell] = coefficients, error
        self._made[block] = True


def _polynomials(function: Series, centre: arb) -> list[tuple[list[float], float]]:
    """(coefficients, error) of a function, and of its slope, on the cell around a number."""
    at = function(arb_series([centre, 1]))
    on = function(arb_series([arb(centre, _POWERS[1]), 1]))
    if min(at.prec, on.prec) < _DEGREE + 2:
        raise ArithmeticError("power series are cut off too early")  # by a changed flint.ctx.cap
    last = on[_DEGREE + 1]
    # f(c + d) = sum of a_k d^k + a d^(n + 1), where a is in `last`, and for the slope likewise.
    value = [at[k] for k in range(_DEGREE + 1)]
    slope = [k * at[k] for k in range(1, _DEGREE + 1)]
    return [
        _rounded(value, last * _POWERS[_DEGREE + 1]),
        _rounded(slope, (_DEGREE + 1) * last * _POWERS[_DEGREE]),
    ]


def _rounded(exact: list[arb], remainder: arb) -> tuple[list[float], float]:
    """A polynomial in float64, the highest coefficient first, and the error of evaluating it.

    In Horner's scheme the k-th coefficient goes through 2 k + 1 roundings; whatever underflows
    loses less than TINY, and factors are below one.
    """
    near = [float(x.mid()) for x in exact]
    if not math.isfinite(sum(map(abs, near))):
        return [0.0] * len(near), math.inf
    error, rounded = abs(remainder), 100 * TINY
    for k, (number, x) in enumerate(zip(near, exact, strict=True)):
        error += abs(x - number) * _POWERS[k]
        rounded += abs(number) * ((2 * k + 2) * EPS / 2 * float(_POWERS[k]) + 100 * TINY)
    return near[::-1], _above(error + rounded)


class _Tail:
    """p x + q instead of a function, from where they are all but equal.

    Where the function is convex or concave and approaches p x + q, the difference is monotone and
    goes to zero, and so does its slope: both are the largest in the beginning.
    """

    def __init__(self, function: Series, limit: Limit, sign: int):
        p, q = (arb(x) for x in limit)
        self.sign, self.p, self.q = sign, float(p.mid()), float(q.mid())
        self.start = FAR
        while True:
            series = function(arb_series([arb(sign * self.start), 1]))
            rest = abs(series[0] - (sign * self.start * p + q))
            if rest < _ALL_BUT_EQUAL * (1 + abs(q)) or self.start + 4 >= _REACH:
                break
            self.start += 4
        self.rest = _above(rest + abs(q - self.q))
        self.steep = _above(abs(series[1] - p) + abs(p - self.p))
        self.loose = _above(abs(p - self.p))

    def value(self, x: np.ndarray) -> Result:
        product = self.p * x
        size = np.abs(product) + abs(self.q)
        return product + self.q, self.rest + self.loose * np.abs(x) + 2 * EPS * size + TINY

    def slope(self, x: np.ndarray) -> Result:
        return np.full(x.shape, self.p), np.full(x.shape, self.steep)


class Line(Form):
    """p x + q."""

    def __init__(self, limit: Limit):
        (p, q) = limit
        self._tail = _Tail(lambda x: p * x + q, limit, 1)

    def value(self, x: np.ndarray):
        return self._tail.value(x)

    def slope(self, x: np.ndarray):
        return self._tail.slope(x)

    def curvature(self, x: np.ndarray):
        return np.zeros(x.shape)


def _above(x: arb) -> float:
    """A float that is above all numbers in a ball, generously, unless they are all zero."""
    if not x.is_finite():
        return math.inf
    if x.is_zero():
        return 0.0
    return max(math.nextafter(float((x * arb(_GENEROUS)).upper()), math.inf), TINY)


# -- lines ---------------------------------------------------------------------------------------

_STEPS = 40  # of a search for a tangent's place


@dataclass(frozen=True)
class Part:
    """A function from one number to another; `bend` is as in a region of functions.py."""

    start: float
    end: float
    bend: int | None
    form: Form

    def least(self, start: np.ndarray, end: np.ndarray, slope: np.ndarray, side: int) -> Result:
        """Lower bounds on side * (f(x) - slope * x) on intervals, and how loose they are.

        Intervals are (n,), slopes (rows, n).
        """
        first, loose = self._rest(start, slope, side)
        last, more = self._rest(end, slope, side)
        found, loose = np.minimum(first, last), np.maximum(loose, more)
        if self.bend is None:
            # A chord is off by at most |f''| / 8 times the width squared, and |f''| < 8.
            return found - _GENEROUS * (end - start) ** 2 - TINY, loose
        if side * self.bend <= 0:
            return found, loose
        # Convex: above the tangent at any place. The best one is at an end, or where the slope is.
        (falls, off), (rises, more) = (self._rate(x, slope, side) for x in (start, end))
        width = end - start
        loss = np.where(
            falls >= 0,
            -np.minimum((falls - off) * width, 0),
            np.maximum((rises + more) * width, 0),
        )
        found = np.where(falls >= 0, first, last) - _GENEROUS * loss
        loose = np.maximum(loose, loss)
        inner = np.nonzero((falls < 0) & (rises > 0))
        if len(inner[0]):
            begin, stop, a = start[inner[1]], end[inner[1]], slope[inner]
            x = self._place(begin, stop, a, side, falls[inner], rises[inner])
            found[inner], loose[inner] = self._tangent(x, begin, stop, a, side)
        return found, loose

    def _rest(self, x: np.ndarray, slope: np.ndarray, side: int) -> Result:
        """A lower bound on side * (f(x) - slope * x) at single places."""
        value, off = self.form.value(x)
        product = slope * x
        rounded = 4 * EPS * (np.abs(value) + np.abs(product)) + 4 * TINY
        lower = side * (value - product) - off * _GENEROUS - rounded
        return lower, np.broadcast_to(off, lower.shape)

    def _rate(self, x: np.ndarray, slope: np.ndarray, side: int) -> Result:
        """The slope of that difference, and how far it is off."""
        rate, off = self.form.slope(x)
        return side * (rate - slope), off * _GENEROUS + EPS * (np.abs(rate) + np.abs(slope)) + TINY

    def _tangent(
        self, x: np.ndarray, start: np.ndarray, end: np.ndarray, slope: np.ndarray, side: int
    ) -> Result:
        value, loose = self._rest(x, slope, side)
        rate, off = self._rate(x, slope, side)
        fall = np.minimum((rate + off) * (start - x), (rate - off) * (end - x))
        loss = 8 * EPS * (np.abs(rate) + off) * (end - start) + TINY
        return value + np.minimum(fall, 0) - loss - EPS * np.abs(value), loose + np.abs(fall)

    def _place(
        self,
        start: np.ndarray,
        end: np.ndarray,
        slope: np.ndarray,
        side: int,
        falls: Any,
        rises: Any,
    ) -> np.ndarray:
        """Roughly where an increasing slope is zero; being right does not depend on it."""
        low, high, width = start.copy(), end.copy(), end - start
        places = np.clip(start + width * (-falls / (rises - falls)), start, end)
        active = np.arange(len(places))
        for _ in range(_STEPS):
            x, a = places[active], slope[active]
            rate, off = self.form.slope(x)
            rate = side * (rate - a)
            more = np.abs(rate) > 2 * off + 2 * EPS * np.abs(a)
            active, x, rate = active[more], x[more], rate[more]
            if not len(active):
                break
            low[active] = np.where(rate < 0, x, low[active])
            high[active] = np.where(rate > 0, x, high[active])
            below, above = low[active], high[active]
            with np.errstate(all="ignore"):
                new = x - rate / (side * self.form.curvature(x))
            places[active] = np.where((below < new) & (new < above), new, (below + above) / 2)
        return places


class Parts:
    """A function of the whole line by its parts."""

    def __init__(self, parts: list[Part]):
        self.parts = parts

    def values(self, x: np.ndarray) -> Result:
        """Values, and how far they are off."""
        found, off = np.zeros(x.shape), np.full(x.shape, np.inf)
        for part in self.parts:
            inside = (part.start <= x) & (x <= part.end)
            if inside.any():
                found[inside], off[inside] = part.form.value(x[inside])
        return found, off

    def least(
        self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower bounds on side * (f(x) - slope * x) on intervals, and which of them are tight.

        Intervals are (n,), slopes (rows, n).
        """
        best, loose = np.full(slope.shape, np.inf), np.zeros(slope.shape)
        for part in self.parts:
            start, end = np.maximum(low, part.start), np.minimum(high, part.end)
            some = np.flatnonzero(start <= end)
            if len(some):
                found, off = part.least(start[some], end[some], slope[:, some], side)
                best[:, some] = np.minimum(best[:, some], found)
                loose[:, some] = np.maximum(loose[:, some], off)
        return best, loose <= _TIGHT * (1 + np.abs(best))
