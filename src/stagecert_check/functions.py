"""Smooth activations, and all activations by name.

A line may have any slope: its offset is derived here, as far in as is safe. Smooth functions are
cut into regions on which they are convex or concave. On a region where function minus line is
concave, its minimum is at an end; where it is convex, it lies above every one of its tangents, and
one at (nearly) the minimum is as good as the minimum. They are evaluated by tables (tables.py), and
in ball arithmetic (Arb), whose results enclose the true ones, where a table is not precise enough.
What is made of lines is in straight.py.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb, arb_series

from stagecert_check import tables
from stagecert_check.numbers import EPS, LARGEST, TINY
from stagecert_check.straight import (
    Activation,
    Maximum,
    Piecewise,
    Product,
    Refused,
    Relu,
    Sign,
    Steps,
    Value,
    hull_slope,
)

__all__ = ["Activation", "Maximum", "Piecewise", "Product", "Refused", "Smooth", "Value",
           "activation_of", "maximum", "product"]  # fmt: skip

# -- smooth functions ------------------------------------------------------------------------------

Ball = Callable[[Any], Any]


@dataclass
class Region:
    """A part of the line on which a function is convex (bend 1), concave (-1), straight (0), or,
    between two enclosing numbers of an inflection, nearly straight (None).

    The function is put together from what balls and power series have in common (sums, products,
    quotients, powers, exp, log, erfc): then there are tables of it. `left` and `right` are the
    lines (slope, offset) that it approaches at infinite ends, where known.
    A `form` replaces the table.
    """

    start: arb
    end: arb
    bend: int | None
    function: Ball
    slope: Ball
    left: tables.Limit | None = None
    right: tables.Limit | None = None
    form: tables.Form | None = None


_ROUGH = 1e-3  # a function's value this near does for default slopes


class Smooth(Activation):
    """A function that is known region by region; arguments beyond `reach` are refused.

    So are intervals with numbers that it is not defined for: `defined` says which are without.
    """

    def __init__(
        self,
        kind: str,
        regions: list[Region],
        reach: float = LARGEST,
        defined: Callable[[Any, Any], Any] | None = None,
    ):
        self.kind, self.regions, self.reach, self.defined = kind, regions, reach, defined

    def image(self, low: np.ndarray, high: np.ndarray):
        zero = np.zeros(low.shape)
        return self.offset(low, high, zero, 1), self.offset(low, high, zero, -1)

    def offset(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int):
        """The intervals may have one row for many of slopes."""
        if np.any(np.abs(low) > self.reach) or np.any(np.abs(high) > self.reach):
            raise Refused(f"{self.kind} is not evaluated beyond {self.reach:g}")
        if self.defined is not None and not np.all(self.defined(low, high)):
            raise Refused(f"{self.kind} is not defined on all of an interval")
        shape = np.shape(slope)
        rows = len(slope) if len(low) < len(slope) else 1
        low, high, slope = low.reshape(-1), high.reshape(-1), np.reshape(slope, (rows, -1))
        if self._parts is None:
            found, tight = np.zeros(slope.shape), np.zeros(slope.shape, bool)
        else:
            found, tight = self._parts.least(low, high, slope, side)
        for r, k in zip(*np.nonzero(~tight), strict=True):
            exact = self.minimum(float(low[k]), float(high[k]), float(slope[r, k]), side)
            found[r, k] = _floor(exact)
        return side * found.reshape(shape)

    def bent(self, low: np.ndarray, high: np.ndarray):
        return high > low

    def slopes(self, low: np.ndarray, high: np.ndarray):
        if self.defined is not None and not np.all(self.defined(low, high)):
            raise Refused(f"{self.kind} is not defined on all of an interval")
        x = np.stack([low + (high - low) * t for t in np.linspace(0, 1, 12)])
        x = np.clip(x, low, high)
        flat = x.reshape(-1)
        f, off = np.zeros(flat.shape), np.full(flat.shape, np.inf)
        if self._parts is not None:
            f, off = self._parts.values(flat)
        for k in np.flatnonzero(~(off < _ROUGH)):
            f[k] = self._roughly(float(flat[k]))
        f = f.reshape(x.shape)
        return hull_slope(x, f, 1), hull_slope(x, f, -1)

    @functools.cached_property
    def _parts(self) -> tables.Parts | None:
        return _parts(self.regions)

    def _roughly(self, x: float) -> float:
        """A value near the function's: slopes need no more."""
        at = arb(x)
        return float(next(r for r in self.regions if not at > r.end).function(at).mid())

    def minimum(self, low: float, high: float, a: float, side: int) -> arb:
        """A lower bound on side * (f(x) - a * x) on [low, high], nearly tight."""
        best = arb.pos_inf()
        for region in self.regions:
            start, end = arb(low), arb(high)
            start = region.start if start < region.start else start
            end = region.end if end > region.end else end
            if start > end:
                continue
            best = best.min(_region_minimum(region, start, end, arb(a), side))
        return arb(best.lower())


class Wave(Smooth):
    """sin or cos. Far out, and on intervals of a period and more, only that it is within one."""

    def offset(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int):
        far = (np.abs(low) > self.reach) | (np.abs(high) > self.reach) | (high - low > 6.3)
        found = super().offset(np.where(far, 0.0, low), np.where(far, 0.0, high), slope, side)
        least = np.minimum(-side * slope * low, -side * slope * high)
        crude = least - 1 - 2 * EPS * (1 + np.abs(least)) - TINY
        return np.where(far, side * crude, found)

    def slopes(self, low: np.ndarray, high: np.ndarray):
        far = (np.abs(low) > self.reach) | (np.abs(high) > self.reach) | (high - low > 6.3)
        below, above = super().slopes(*(np.where(far, 0.0, x) for x in (low, high)))
        return np.where(far, 0.0, below), np.where(far, 0.0, above)


def _parts(regions: list[Region]) -> tables.Parts | None:
    """Regions in float64, or None where there are no tables of them."""
    held: dict[int, tables.Form] = {}
    parts: list[tables.Part] = []
    for region in regions:
        if region.bend is None:  # it grows, and others shrink, to the next numbers
            start, end = _floor(region.start), -_floor(-region.end)
        else:
            start = -_floor(-region.start) if region.start.is_finite() else -math.inf
            end = _floor(region.end) if region.end.is_finite() else math.inf
        if parts and start > parts[-1].end:
            return None
        form = region.form or held.get(id(region.function))
        if form is None:
            same = [r for r in regions if r.function is region.function]
            # Far out there must be no inflections.
            left = same[0].left if same[0].end > -tables.FAR else None
            right = same[-1].right if same[-1].start < tables.FAR else None
            try:
                region.function(arb_series([1, 1]))
                form = tables.Table(region.function, left, right)
            except (AttributeError, TypeError):  # it is made of more than power series have
                return None
            held[id(region.function)] = form
        parts.append(tables.Part(start, end, region.bend, form))
    return tables.Parts(parts)


def _region_minimum(region: Region, start: arb, end: arb, a: arb, side: int) -> arb:
    def value(x: arb) -> arb:
        return side * (region.function(x) - a * x)

    def slope(x: arb) -> arb:
        return side * (region.slope(x) - a)

    if region.bend is None:
        # A chord is off by at most |f''| / 8 times the width squared, and |f''| < 8.
        return value(start).min(value(end)) - (end - start) ** 2
    if side * region.bend <= 0:
        return value(start).min(value(end))
    # Convex: no search is needed if the slope has one sign.
    at_start, at_end = slope(start), slope(end)
    if at_start >= 0:
        return value(start)
    if at_end <= 0:
        return value(end)
    x = _root(slope, start, end, at_start, at_end)
    # Where x is does not matter for being right, only for being tight.
    tangent = slope(x)
    return value(x) + (tangent * (start - x)).min(tangent * (end - x))


def _root(slope: Ball, low: arb, high: arb, at_low: arb, at_high: arb) -> arb:
    """Roughly where an increasing function is zero (Illinois method)."""
    low, high, at_low, at_high = (arb(x.mid()) for x in (low, high, at_low, at_high))
    x = low
    for step in range(60):
        x = arb(((low * at_high - high * at_low) / (at_high - at_low)).mid())
        if step % 4 == 3 or not (low < x and x < high):
            x = arb(((low + high) / 2).mid())
        found = arb(slope(x).mid())
        if abs(found) < 1e-30 or not (low < x and x < high):
            break
        if found < 0:
            low, at_low, at_high = x, found, at_high / 2
        else:
            high, at_high, at_low = x, found, at_low / 2
    return x


def _floor(x: arb) -> float:
    """A float that is not above any number in the ball."""
    if not x.is_finite():
        return -math.inf
    number = float(x.mid())
    while not arb(number) <= x:
        number = math.nextafter(number, -math.inf)
    return number


def _exp(x: arb) -> arb:
    return x.exp()


def _sin(x: arb) -> arb:
    return x.sin()


def _cos(x: arb) -> arb:
    return x.cos()


def _erf(x: arb) -> arb:
    return 1 - x.erfc()


def _sigmoid(x: arb) -> arb:
    return 1 / (1 + (-x).exp())


def _sigmoid_slope(x: arb) -> arb:
    return _sigmoid(x) * _sigmoid(-x)


def _tanh(x: arb) -> arb:
    return 2 * _sigmoid(2 * x) - 1


def _tanh_slope(x: arb) -> arb:
    return 4 * _sigmoid_slope(2 * x)


def _softplus(x: arb) -> arb:
    return (1 + x.exp()).log()


def _gelu(x: arb) -> arb:
    return x * (-x / arb(2).sqrt()).erfc() / 2


def _gelu_slope(x: arb) -> arb:
    return (-x / arb(2).sqrt()).erfc() / 2 + x * (-x * x / 2).exp() / (2 * arb.pi()).sqrt()


# The factor of the cube in gelu by tanh. ONNX has 0.044715, a real number; models that spell the
# function out store numbers of single precision, after which the factor is another near that. The
# inflections are known for all of these.
CUBES = arb("0.044715", "1e-8")


def cube_near(cube: float) -> arb:
    """The factors that `gelu_tanh` with the setting `cube` is right for."""
    return arb(cube, 1e-16)


def _gelu_tanh(cube: float | None = None) -> Smooth:
    unit, factor = (8 / arb.pi()).sqrt(), arb("0.044715") if cube is None else cube_near(cube)
    if not CUBES.contains(factor):
        raise Refused(f"has the factor {cube} of its cube")

    def inner(x: arb) -> arb:
        return unit * (x + factor * x**3)

    def function(x: arb) -> arb:
        return x * _sigmoid(inner(x))

    def slope(x: arb) -> arb:
        y = inner(x)
        return _sigmoid(y) + x * unit * (1 + 3 * factor * x * x) * _sigmoid_slope(y)

    return _two("gelu_tanh", function, slope, _both("gelu_tanh"), 1e3)()


def _silu(x: arb) -> arb:
    return x * _sigmoid(x)


def _silu_slope(x: arb) -> arb:
    return _sigmoid(x) + x * _sigmoid_slope(x)


def _mish_gate(x: arb) -> arb:
    w = x.exp()
    return 1 - 2 / (w * w + 2 * w + 2)


def _mish(x: arb) -> arb:
    return x * _mish_gate(x)


def _mish_slope(x: arb) -> arb:
    w = x.exp()
    return _mish_gate(x) + x * 4 * w * (1 + w) / (w * w + 2 * w + 2) ** 2


_WIDTH = arb("1e-38")  # of the numbers around an inflection
# Where the inflection of gelu by tanh is depends on the factor of the cube.
_WIDTHS = {"gelu_tanh": arb("1e-6")}
_FLAT = 0, 0  # a line that many functions approach on the left
_DIAGONAL = 1, 0  # and on the right


def _smooth(
    kind: str,
    f: Ball,
    slope: Ball,
    bends: tuple[int, ...],
    knots: tuple[str | None, ...] = (),
    reach: float = 1e4,
    lines: tuple[Any, Any] = (None, None),
) -> Smooth:
    """Regions between inflections, which are given as decimals (None for exactly zero).

    `lines` are those that the function approaches on the left and on the right.
    """
    left, right = lines
    ends = [arb.neg_inf()]
    kinds: list[int | None] = [bends[0]]
    for knot, bend in zip(knots, bends[1:], strict=True):
        if knot is None:
            ends.append(arb(0))
            kinds.append(bend)
        else:
            near = arb(arb(knot).mid())
            width = _WIDTHS.get(kind, _WIDTH)
            ends += [arb((near - width).lower()), arb((near + width).upper())]
            kinds += [None, bend]
    ends.append(arb.pos_inf())
    regions = [
        Region(start, end, bend, f, slope, left, right)
        for start, end, bend in zip(ends[:-1], ends[1:], kinds, strict=True)
    ]
    return Smooth(kind, regions, reach)


def _softsign() -> Smooth:
    form = tables.Softsign()
    regions = [
        Region(arb.neg_inf(), arb(0), 1, lambda x: x / (1 - x), lambda x: 1 / (1 - x) ** 2,
               form=form),
        Region(arb(0), arb.pos_inf(), -1, lambda x: x / (1 + x), lambda x: 1 / (1 + x) ** 2,
               form=form),
    ]  # fmt: skip
    return Smooth("softsign", regions)


def _square() -> Smooth:
    region = Region(arb.neg_inf(), arb.pos_inf(), 1, lambda x: x * x, lambda x: 2 * x,
                    form=tables.Square())  # fmt: skip
    return Smooth("square", [region], 1e15)


def _straight(start: arb, end: arb, slope: Any) -> Region:
    """slope * x."""
    form = tables.Line((slope, 0))
    return Region(start, end, 0, lambda x: slope * x, lambda x: slope + 0 * x, form=form)


def _hard_swish() -> Smooth:
    regions = [
        _straight(arb.neg_inf(), arb(-3), arb(0)),
        Region(arb(-3), arb(3), 1, lambda x: x * (x + 3) / 6, lambda x: (2 * x + 3) / 6),
        _straight(arb(3), arb.pos_inf(), arb(1)),
    ]
    return Smooth("hard_swish", regions)


def _exponential(kind: str, size: arb, unit: arb, right: arb) -> Smooth:
    """size * (exp(x / unit) - 1) below zero, right * x above."""
    bend = 1 if size > 0 else -1 if size < 0 else 0
    regions = [
        Region(
            arb.neg_inf(),
            arb(0),
            bend,
            lambda x: size * ((x / unit).exp() - 1),
            lambda x: size / unit * (x / unit).exp(),
            left=(0, -size),
        ),
        _straight(arb(0), arb.pos_inf(), right),
    ]
    return Smooth(kind, regions, 1e6)


def _wave(kind: str, function: Ball, slope: Ball, phase: arb) -> Wave:
    """sin(x + phase): between its zeros it is concave where it is positive, and else convex."""
    count = 20
    ends = [arb(-count) * arb.pi() - phase]
    kinds: list[int | None] = []
    for k in range(-count, count):
        near = arb(((k + 1) * arb.pi() - phase).mid())
        kinds += [-1 if k % 2 == 0 else 1, None]
        ends += [arb((near - _WIDTH).lower()), arb((near + _WIDTH).upper())]
    regions = [
        Region(start, end, bend, function, slope)
        for start, end, bend in zip(ends[:-1], ends[1:], kinds, strict=True)
    ]
    return Wave(kind, regions, 60)


def _one_sided(kind: str, bend: int, function: Ball, slope: Ball, form: tables.Form) -> Smooth:
    """A function of positive numbers."""
    region = Region(arb(0), arb.pos_inf(), bend, function, slope, form=form)
    return Smooth(kind, [region], defined=lambda low, high: low > 0)


def _sqrt() -> Smooth:
    found = _one_sided("sqrt", -1, lambda x: x.sqrt(), lambda x: 1 / (2 * x.sqrt()), tables.Root())
    found.defined = lambda low, high: low >= 0
    return found


def _reciprocal() -> Smooth:
    regions = [
        Region(start, end, bend, lambda x: 1 / x, lambda x: -1 / (x * x), form=tables.Inverse())
        for start, end, bend in ((arb.neg_inf(), arb(0), -1), (arb(0), arb.pos_inf(), 1))
    ]
    return Smooth("reciprocal", regions, defined=lambda low, high: (low > 0) | (high < 0))


def _power(exponent: float) -> Smooth:
    n = int(exponent)
    if n != exponent or not 3 <= n <= 12:
        raise Refused(f"has the exponent {exponent}")
    ends = [arb.neg_inf(), arb(0), arb.pos_inf()] if n % 2 else [arb.neg_inf(), arb.pos_inf()]
    regions = [
        Region(start, end, bend, lambda x: x**n, lambda x: n * x ** (n - 1), form=tables.Power(n))
        for start, end, bend in zip(ends[:-1], ends[1:], (-1, 1) if n % 2 else (1,), strict=True)
    ]
    return Smooth("power", regions, 1e30 ** (1 / n))


# Inflections to 50 digits; tests/rigor proves that the curvature has the stated sign elsewhere.
INFLECTIONS: dict[str, Any] = {
    "gelu": "1.4142135623730950488016887242096980785696718753769",
    "gelu_tanh": "1.4185040087908283555480335455996426979241583187885",
    "silu": "2.3993572805154676678327396972822838885229175768372",
    "mish": (
        "-2.2563763963607931200057485439501639062640349352344",
        "1.4905711794854284592944189081979098211278335012647",
    ),
}


def maximum() -> Maximum:
    """The maximum over the last axis."""
    return Maximum()


def product() -> Product:
    """The product of the two entries of the last axis."""
    return Product()


def activation_of(kind: str, **settings: Any) -> Activation:
    """An activation with its settings. Those that are equal share their tables."""
    if all(isinstance(x, (int, float)) for x in settings.values()):
        return _activation(kind, **settings)
    return _made(kind, settings)


@functools.lru_cache(64)
def _activation(kind: str, **settings: float) -> Activation:
    return _made(kind, settings)


def _made(kind: str, settings: dict[str, Any]) -> Activation:
    found = _MAKERS[kind](**settings)
    found.settings = settings
    return found


def _kinked(kind: str, left: Any, right: Any) -> Piecewise:
    return Piecewise(kind, [(0.0, 0.0)], [left, right], [0.0, 0.0])


def _clip(low: float, high: float) -> Piecewise:
    knots = [(x, x) for x in (low, high) if math.isfinite(x)]
    slopes, offsets = [1.0], [0.0]
    if math.isfinite(low):
        slopes, offsets = [0.0, *slopes], [low, *offsets]
    if math.isfinite(high):
        slopes, offsets = [*slopes, 0.0], [*offsets, high]
    return Piecewise("clip", knots, slopes, offsets)


def _hard_sigmoid(alpha: float, beta: float) -> Piecewise:
    levels = (0, 1) if alpha >= 0 else (1, 0)  # on the left and on the right
    if alpha == 0:
        level = min(max(beta, 0.0), 1.0)
        return Piecewise("hard_sigmoid", [(0.0, 0.0)], [0.0, 0.0], [level, level])
    knots = []
    for level in levels:
        near = float((level - Fraction(beta)) / Fraction(alpha))
        knots.append((math.nextafter(near, -math.inf), math.nextafter(near, math.inf)))
    offsets = [float(levels[0]), beta, float(levels[1])]
    return Piecewise("hard_sigmoid", knots, [0.0, alpha, 0.0], offsets)


def _broken_line(**numbers: float) -> Piecewise:
    count = sum(name.startswith("knot") for name in numbers)
    knots = [(numbers[f"knot{k}"],) * 2 for k in range(count)]
    slopes, offsets = (
        [numbers[f"{name}{k}"] for k in range(count + 1)] for name in ("slope", "offset")
    )
    if any(not a < b for (a, _), (b, _) in itertools.pairwise(knots)):
        raise Refused("has knots that are not in order")
    return Piecewise("broken_line", knots, slopes, offsets)


def _reverting_softplus(threshold: float) -> Smooth:
    """Softplus up to a threshold, and x beyond: it falls a little there."""
    if not 0 <= threshold < 1e4:
        raise Refused(f"needs a threshold between 0 and 1e4, not {threshold}")
    end = arb(threshold)
    soft = Region(arb.neg_inf(), end, 1, _softplus, _sigmoid, left=_FLAT)
    return Smooth("reverting_softplus", [soft, _straight(end, arb.pos_inf(), arb(1))], 1e4)


def _celu(alpha: float) -> Smooth:
    if not alpha > 0:
        raise Refused(f"needs a positive alpha, not {alpha}")
    return _exponential("celu", arb(alpha), arb(alpha), arb(1))


def _two(
    kind: str, f: Ball, slope: Ball, knots: tuple[str, str], reach: float
) -> Callable[[], Smooth]:
    return lambda: _smooth(kind, f, slope, (-1, 1, -1), knots, reach, (_FLAT, _DIAGONAL))


def _both(kind: str) -> tuple[str, str]:
    return "-" + INFLECTIONS[kind], INFLECTIONS[kind]


_MAKERS: dict[str, Callable[..., Activation]] = {
    "relu": Relu,
    "leaky_relu": lambda alpha: _kinked("leaky_relu", alpha, 1.0),
    "prelu": lambda slope: _kinked("prelu", slope, 1.0),
    "abs": lambda: _kinked("abs", -1.0, 1.0),
    "clip": _clip,
    "hard_sigmoid": _hard_sigmoid,
    "broken_line": _broken_line,
    "reverting_softplus": _reverting_softplus,
    "hard_swish": _hard_swish,
    "elu": lambda alpha: _exponential("elu", arb(alpha), arb(1), arb(1)),
    "selu": lambda alpha, gamma: _exponential("selu", arb(gamma) * alpha, arb(1), arb(gamma)),
    "celu": _celu,
    "softsign": _softsign,
    "square": _square,
    "power": _power,
    "reciprocal": _reciprocal,
    "sqrt": _sqrt,
    "log": lambda: _one_sided("log", -1, lambda x: x.log(), lambda x: 1 / x, tables.Log()),
    "sin": lambda: _wave("sin", _sin, _cos, arb(0)),
    "cos": lambda: _wave("cos", _cos, lambda x: -_sin(x), arb.pi() / 2),
    "erf": lambda: _smooth(
        "erf",
        _erf,
        lambda x: 2 * (-x * x).exp() / arb.pi().sqrt(),
        (1, -1),
        (None,),
        1e4,
        ((0, -1), (0, 1)),
    ),
    "floor": lambda: Steps("floor", np.floor, lambda v: v + 1),
    "ceil": lambda: Steps("ceil", np.ceil, lambda v: v),
    "round": lambda: Steps("round", np.rint, lambda v: v + 0.5),
    "sign": Sign,
    "exp": lambda: _smooth("exp", _exp, _exp, (1,), (), 60, (_FLAT, None)),
    "softplus": lambda: _smooth("softplus", _softplus, _sigmoid, (1,), (), 1e4, (_FLAT, _DIAGONAL)),
    "sigmoid": lambda: _smooth(
        "sigmoid", _sigmoid, _sigmoid_slope, (1, -1), (None,), 1e4, (_FLAT, (0, 1))
    ),
    "tanh": lambda: _smooth("tanh", _tanh, _tanh_slope, (1, -1), (None,), 1e4, ((0, -1), (0, 1))),
    "gelu": _two("gelu", _gelu, _gelu_slope, _both("gelu"), 1e4),
    "gelu_tanh": _gelu_tanh,
    "silu": _two("silu", _silu, _silu_slope, _both("silu"), 1e4),
    "mish": _two("mish", _mish, _mish_slope, INFLECTIONS["mish"], 700),
}
