"""Convex hulls of the graphs of scalar functions over intervals, entrywise and compiled.

Everything here builds the *lower* hull of g, where g is the function itself (sign 1) or the
function upside down (sign -1, which gives the upper hull). Where g is convex the hull is g; the
rest is bridged by lines that touch g at tangent points. Tangent points are found by bisection over
the floating-point numbers themselves, which takes as many steps as a number has bits, whatever the
size of the interval. Every decision leaves an allowance for rounding on the safe side:

- a tangent point counts only if its line passes below the far end by more than rounding may do;
- chords, and curves as a whole, are moved outwards by a few roundings of the largest value.

So hulls hold for the numbers that are computed, not only for those that are meant.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces

# Functions are computed to about four roundings (tested); the rest is for other machines.
ROUNDINGS = 16


# -- what hulls are made of -----------------------------------------------------------------------


class AbstractSide(eqx.Module):
    """One side of a hull: a function of x, and first weights for its nonsmooth pieces."""

    def __call__(self, x) -> Any:
        raise NotImplementedError

    def first(self) -> tuple:
        """First weights for the pieces, in program order."""
        return ()


class Line(AbstractSide):
    """value + slope * (x - anchor)."""

    slope: Any
    anchor: Any
    value: Any

    def __call__(self, x):
        return self.value + self.slope * (x - self.anchor)


class Lines(AbstractSide):
    """The maximum (sign 1) or minimum (sign -1) of lines along a last axis."""

    slopes: Any
    offsets: Any
    weights: Any
    sign: int = eqx.field(static=True)

    def __call__(self, x):
        # sign * (sign * slope) is exact, so stable entries stay exactly linear.
        lines = x[..., None] * (self.sign * self.slopes) + self.sign * self.offsets
        return self.sign * pieces.max(lines)

    def first(self):
        return (self.weights,)


class Curve(AbstractSide):
    """The function on [start, end], lines with the slopes left and right outside, less a margin."""

    function: Callable = eqx.field(static=True)
    sign: int = eqx.field(static=True)
    start: Any
    end: Any
    left: Any
    right: Any
    margin: Any

    def __call__(self, x):
        # Where start = end there is a line only: `x <= start` keeps the function's own slope out.
        before, after = x <= self.start, x > self.end
        inside = jnp.where(before, self.start, jnp.where(after, self.end, x))
        lines = self.left * jnp.where(before, x - self.start, 0)
        lines = lines + self.right * jnp.where(after, x - self.end, 0)
        return self.function(inside) + lines - self.sign * self.margin


class Bridge(AbstractSide):
    """The function outside [start, end], a line between, less a margin; `otherwise` where off."""

    otherwise: AbstractSide
    function: Callable = eqx.field(static=True)
    sign: int = eqx.field(static=True)
    on: Any
    start: Any
    end: Any
    slope: Any
    margin: Any

    def __call__(self, x):
        before, after = x < self.start, x > self.end
        left = self.function(jnp.where(before, x, self.start))
        right = self.function(jnp.where(after, x, self.end)) - self.function(self.end)
        middle = self.slope * (
            jnp.where(before, self.start, jnp.where(after, self.end, x)) - self.start
        )
        bridge = left + middle + right - self.sign * self.margin
        return jnp.where(self.on, bridge, self.otherwise(x))


class Kinked(AbstractSide):
    """The maximum (sign 1) or minimum (sign -1) of a line through the origin and a smooth side."""

    smooth: AbstractSide
    slope: Any
    weights: Any
    sign: int = eqx.field(static=True)

    def __call__(self, x):
        both = jnp.stack(jnp.broadcast_arrays(self.slope * x, self.smooth(x)), axis=-1)
        return self.sign * pieces.max(self.sign * both)

    def first(self):
        return (self.weights,)


# -- curved functions -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """A function, and where it bends which way.

    Attributes:
        function: the function; JAX differentiates it to `derivative`.
        derivative: its derivative; at a kink, either side's.
        knots: at most two points where its curvature changes sign, in order; these may be kinks.
        bend: 1 if it is convex before the first knot, -1 if concave.
        size: |computed - true| <= a few roundings of size(x); None: of |function(x)|.
        bitangent: the two points where one line touches both outer regions, or None.
        reach: the function is computed on [-reach(dtype), reach(dtype)] only, and extended by
            tangents, so that nothing overflows.
    """

    function: Callable
    derivative: Callable
    knots: tuple[float, ...] = ()
    bend: int = 1
    size: Callable | None = None
    bitangent: tuple[float, float] | None = None
    reach: Callable | None = None

    def convex_regions(self, sign: int) -> list[tuple[float, float]]:
        """Where sign * function is convex."""
        ends = (-np.inf, *self.knots, np.inf)
        regions = itertools.pairwise(ends)
        return [r for k, r in enumerate(regions) if sign * self.bend * (-1) ** k > 0]

    def rounding(self, x):
        """A bound on the error of the function's computed value at x."""
        info = jnp.finfo(x.dtype)
        size = jnp.abs(self.function(x)) if self.size is None else self.size(x)
        return ROUNDINGS * (info.eps * size + info.tiny)


class _Bounds:
    """Bounds in order and of moderate size, and where they were not."""

    def __init__(self, low, high):
        low, high = jnp.minimum(low, high), jnp.maximum(low, high)
        most = jnp.finfo(low.dtype).max / 8
        self.usable = (low >= -most) & (high <= most)  # false for NaN too
        self.low = jnp.where(self.usable, low, 0)
        self.high = jnp.where(self.usable, high, 0)


def usable(low, high):
    """Whether bounds are numbers, and not so large that sums of them overflow."""
    return _Bounds(low, high).usable


def _bisect(test, low, high):
    """The smallest number in (low, high] that passes, if all numbers after one that does do too.

    `high` if none passes.
    """
    dtype = low.dtype
    bits = jnp.finfo(dtype).bits
    integer = jnp.dtype(f"int{bits}")
    most = jnp.iinfo(integer).max

    def order(x):  # an order-preserving map to the integers, and its own inverse
        return x ^ ((x >> (bits - 1)) & most)

    def step(_, bracket):
        a, b = bracket
        middle = (a >> 1) + (b >> 1) + (a & b & 1)
        passes = test(jax.lax.bitcast_convert_type(order(middle), dtype))
        return jnp.where(passes, a, middle), jnp.where(passes, middle, b)

    bracket = tuple(order(jax.lax.bitcast_convert_type(x, integer)) for x in (low, high))
    _, b = jax.lax.fori_loop(0, bits, step, bracket)
    return jax.lax.bitcast_convert_type(order(b), dtype)


def _nudge(x):
    """A distance just above the spacing of numbers at x."""
    info = jnp.finfo(x.dtype)
    return 2 * info.eps * jnp.abs(x) + 4 * info.tiny


def _chord_slope(profile, low, high):
    """The slope between the ends, kept within the derivative's range: short intervals are noisy."""
    f, d = profile.function, profile.derivative
    slopes = [d(low), d(high)]
    for knot in profile.knots:
        nudge = _nudge(jnp.asarray(knot, low.dtype))
        slopes += [d(jnp.clip(knot - nudge, low, high)), d(jnp.clip(knot + nudge, low, high))]
    least, most = slopes[0], slopes[0]
    for slope in slopes[1:]:
        least, most = jnp.minimum(least, slope), jnp.maximum(most, slope)
    rise, run = f(high) - f(low), high - low
    known = (run > 0) & jnp.isfinite(rise)
    slope = jnp.where(known, rise / jnp.where(known, run, 1), least)
    slope = jnp.clip(slope, least, most)
    return jnp.where(jnp.isfinite(slope), slope, 0)


def _chord_margin(profile, low, high, slope):
    eps = jnp.finfo(low.dtype).eps
    margin = profile.rounding(low) + profile.rounding(high)
    rise, run = profile.function(high) - profile.function(low), high - low
    # The slope may have been kept in range, or have underflowed.
    margin = margin + ROUNDINGS * eps * jnp.abs(slope) * run + jnp.abs(rise - slope * run)
    return jnp.where(jnp.isfinite(margin), margin, jnp.inf)


def chord(profile: Profile, sign: int, low, high) -> Line:
    """The line through the function's values at the ends, moved outwards by rounding."""
    bounds = _Bounds(low, high)
    low, high = bounds.low, bounds.high
    slope = _chord_slope(profile, low, high)
    margin = _chord_margin(profile, low, high, slope)
    value = profile.function(low)
    # An end whose value overflows leaves no finite line on this side.
    value = jnp.where(bounds.usable & jnp.isfinite(value), value - sign * margin, -sign * jnp.inf)
    return Line(slope, low, value)


def _region_margin(profile, start, end):
    """Roundings of the largest value on [start, end], where the function bends one way."""
    eps = jnp.finfo(start.dtype).eps
    # Between the ends, the tangents there bound how far the function may dip.
    left, right = profile.derivative(start), profile.derivative(end)
    dips = left * right < 0
    dip = jnp.where(dips, jnp.minimum(jnp.abs(left), jnp.abs(right)) * (end - start), 0)
    ends = jnp.maximum(profile.rounding(start), profile.rounding(end))
    return ends + ROUNDINGS * eps * dip


def curve(profile: Profile, sign: int, low, high) -> Curve:
    """The function itself, where sign * function is convex on all of [low, high]."""
    bounds = _Bounds(low, high)
    low, high = bounds.low, bounds.high
    if profile.reach is not None:
        reach = profile.reach(low.dtype)
        low, high = jnp.clip(low, -reach, reach), jnp.clip(high, -reach, reach)
    margin = jnp.where(bounds.usable, _region_margin(profile, low, high), jnp.inf)
    d = profile.derivative
    return Curve(profile.function, sign, low, high, d(low), d(high), margin)


def _bowl(profile, sign, low, high, first, last):
    """Line | function | line: the lower hull of g if g is convex on [first, last] only.

    Returns the curve and whether it is more than a chord.
    """
    f, d, rounding = profile.function, profile.derivative, profile.rounding
    inner_low, inner_high = jnp.clip(low, first, last), jnp.clip(high, first, last)
    some = (low <= last) & (high >= first)
    cut: Any = 0
    start, end, left, right = low, high, d(low), d(high)
    if np.isfinite(first):
        start, line, found, cut_left = _tangent(profile, sign, low, inner_low, inner_high)
        outside = low < first
        left = jnp.where(outside, line, left)
        start = jnp.where(outside, start, low)
        some, cut = some & (found | ~outside), cut + jnp.where(outside, cut_left, 0)
    if np.isfinite(last):
        # The mirror image of the search on the left.
        size = profile.size or (lambda x: jnp.abs(f(x)))
        mirrored = Profile(lambda x: f(-x), lambda x: -d(-x), size=lambda x: size(-x))
        end, line, found, cut_right = _tangent(mirrored, sign, -high, -inner_high, -inner_low)
        outside = high > last
        right = jnp.where(outside, -line, right)
        end = jnp.where(outside, -end, high)
        some, cut = some & (found | ~outside), cut + jnp.where(outside, cut_right, 0)
    some = some & (start <= end) & (sign * left <= sign * right)
    slope = _chord_slope(profile, low, high)
    # Where the chord nearly touches the curve, rounding may have missed that it does.
    above: Any = 0
    for t in (jnp.clip(start, low, high), jnp.clip(end, low, high)):
        above = jnp.maximum(above, sign * (f(low) + slope * (t - low) - f(t)) + rounding(t))
    margin = jnp.where(
        some,
        _region_margin(profile, start, end) + cut,
        jnp.maximum(above, 0) + _chord_margin(profile, low, high, slope),
    )
    start, end = jnp.where(some, start, low), jnp.where(some, end, low)
    left, right = jnp.where(some, left, slope), jnp.where(some, right, slope)
    return Curve(profile.function, sign, start, end, left, right, margin)


def _tangent(profile, sign, point, low, high):
    """Where in [low, high], on which g is convex, a line from (point, g(point)) touches g.

    The point is left of the interval. Returns the place, the line's slope, whether there is such a
    place, and by how much the line may cut g because the place is a floating-point number.
    """
    f, d, rounding = profile.function, profile.derivative, profile.rounding
    f_point, r_point = f(point), rounding(point)

    def passes(t):  # the tangent at t, continued to the point, is below g there
        gap = sign * (f(t) - f_point - d(t) * (t - point))
        return gap <= -(rounding(t) + r_point)

    # The hull's corner may be a kink at `low`, whose slopes are those just inside.
    corner = jnp.minimum(low + _nudge(low), high)
    at_corner = passes(corner)
    place = jnp.where(at_corner, low, _bisect(passes, low, high))
    # Not tested at the place again, where the next compilation may round to the other side.
    found = at_corner | (place < high) | passes(high)
    run = place - point
    rise = sign * (f(place) - f_point) + rounding(place) + r_point
    slope = jnp.where(run > 0, rise / jnp.where(run > 0, run, 1), sign * d(place))
    # The true place is less than a spacing before; between the two g may dip below the line.
    dip = jnp.maximum(sign * d(place) - slope, 0) * 2 * _nudge(place)
    underflow = jnp.maximum(rise - slope * run, 0)
    return place, sign * slope, found, jnp.where(at_corner, 0, dip) + underflow


def _choose(condition, yes: Curve, no: Curve) -> Curve:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def hull(profile: Profile, sign: int, low, high) -> AbstractSide:
    """The lower (sign 1) or upper (sign -1) hull of a function that bends at most twice."""
    regions = profile.convex_regions(sign)
    if not profile.knots:
        return curve(profile, sign, low, high) if regions else chord(profile, sign, low, high)
    bounds = _Bounds(low, high)
    low, high = bounds.low, bounds.high
    if len(regions) == 1:
        side = _bowl(profile, sign, low, high, *regions[0])
    else:
        side = _two_regions(profile, sign, low, high, regions)
    margin = jnp.where(bounds.usable, side.margin, jnp.inf)
    side = eqx.tree_at(lambda c: c.margin, side, margin)
    if len(regions) == 2 and profile.bitangent is not None:
        return _bridged(profile, sign, bounds, side)
    return side


def _two_regions(profile, sign, low, high, regions) -> Curve:
    """Convex, concave, convex: a line from `low` to the last region, or from the first to `high`.

    (A line that touches both regions inside is a `Bridge`.)
    """
    (_, first), (last, _) = regions
    to_last = _bowl(profile, sign, low, high, *regions[1])
    from_first = _bowl(profile, sign, low, high, *regions[0])
    # The line from `low` must not dip into the first region: g leaves `low` at least as steeply.
    leaves = sign * profile.derivative(low) >= sign * to_last.left
    pick = (low >= first) | ((high > last) & leaves)
    return _choose(pick, to_last, from_first)


def _bridged(profile, sign, bounds, side) -> Bridge:
    """The bridge where both points of the bitangent are inside, and `side` elsewhere."""
    f = profile.function
    low, high = bounds.low, bounds.high
    dtype = low.dtype
    one, two = (jnp.asarray(x, dtype) for x in profile.bitangent)
    eps = jnp.finfo(dtype).eps
    # A little outside the true points g is flatter before and steeper after than the line, so that
    # the whole stays convex; the line then errs by the square of the step, which the margin covers.
    step = jnp.sqrt(eps) / 16 * (two - one)
    on = (low < one - step) & (high > two + step) & bounds.usable
    start, end = jnp.where(on, one - step, low), jnp.where(on, two + step, high)
    run = jnp.where(on, end - start, 1)
    slope = jnp.where(on, (f(end) - f(start)) / run, 0)
    d = profile.derivative
    bend = jnp.abs(d(start) - slope) + jnp.abs(d(end) - slope)
    largest = jnp.maximum(profile.rounding(low), profile.rounding(high))
    margin = largest + profile.rounding(start) + profile.rounding(end)
    margin = margin + bend * step + ROUNDINGS * eps * jnp.abs(slope) * run
    margin = jnp.where(on, margin, 0)
    return Bridge(side, f, sign, on, start, end, slope, margin)


def through_origin(side: Curve, mask, slope) -> Curve:
    """The side, but exactly slope * x where the mask is true; the function is zero at zero."""
    zero = jnp.zeros_like(side.start)
    line = Curve(side.function, side.sign, zero, zero, zero + slope, zero + slope, zero)
    return _choose(mask, line, side)


# -- piecewise linear hulls -----------------------------------------------------------------------


def supporting_offset(sign: int, slope, points, values):
    """The offset at which a line of this slope is on the outer side of all points."""
    eps = jnp.finfo(jnp.result_type(slope)).eps
    offset: Any = jnp.inf
    for x, y in zip(points, values, strict=True):
        size = jnp.abs(y) + jnp.abs(slope * x)
        offset = jnp.minimum(offset, sign * (y - slope * x) - ROUNDINGS * eps * size)
    return sign * offset


def secant_slope(x0, y0, x1, y1):
    """The slope between two points, zero if they coincide."""
    run = x1 - x0
    return jnp.where(run > 0, (y1 - y0) / jnp.where(run > 0, run, 1), 0)


def lines(sign: int, slopes, offsets, low, high) -> Lines:
    """Lines side by side, with the weights of those that are active in the middle."""
    usable = _Bounds(low, high).usable
    slopes = [jnp.where(usable, s, 0) for s in slopes]
    offsets = [jnp.where(usable, o, -sign * jnp.inf) for o in offsets]
    slopes = jnp.stack(jnp.broadcast_arrays(*slopes), axis=-1).astype(low.dtype)
    offsets = jnp.stack(jnp.broadcast_arrays(*offsets), axis=-1).astype(low.dtype)
    middle = jnp.where(usable, low / 2 + high / 2, 0)[..., None]
    values = jnp.where(usable[..., None], sign * (middle * slopes + offsets), 0)
    return Lines(slopes, offsets, pieces.exact_weights(values), sign)


def corner_hull(profile: Profile, sign: int, low, high, corner, left=None, right=None) -> Lines:
    """The hull of a function that lies inside its chords, but for one corner.

    `left` and `right` are the function's slope where it is linear on that side of the corner, on a
    line through the origin.
    """
    given, bounds = (low, high), _Bounds(low, high)
    low, high = bounds.low, bounds.high
    f = profile.function
    middle = jnp.clip(jnp.asarray(corner, low.dtype), low, high)
    points = (low, middle, high)
    values = tuple(f(x) for x in points)
    whole = _chord_slope(profile, low, high)
    secants = (secant_slope(*_ends(points, values, 0)), secant_slope(*_ends(points, values, 1)))
    one = secants[0] if left is None else jnp.full_like(low, left)
    two = secants[1] if right is None else jnp.full_like(low, right)
    active = (low < corner) & (corner < high) & (sign * one < sign * two)
    # Support makes lines sound; lines that are kept exact must be so at the other end too.
    offset_one, offset_two = (supporting_offset(sign, s, points, values) for s in (one, two))
    if left is not None:
        active = active & (sign * (values[2] - left * high) >= profile.rounding(high))
        offset_one = jnp.zeros_like(low)
    if right is not None:
        active = active & (sign * (values[0] - right * low) >= profile.rounding(low))
        offset_two = jnp.zeros_like(low)
    offset_whole = supporting_offset(sign, whole, points, values)
    one, two = jnp.where(active, one, whole), jnp.where(active, two, whole)
    offset_one = jnp.where(active, offset_one, offset_whole)
    offset_two = jnp.where(active, offset_two, offset_whole)
    for slope, stable in ((left, high <= corner), (right, low >= corner)):
        if slope is not None:
            one, two = jnp.where(stable, slope, one), jnp.where(stable, slope, two)
            offset_one = jnp.where(stable, 0, offset_one)
            offset_two = jnp.where(stable, 0, offset_two)
    return lines(sign, (one, two), (offset_one, offset_two), *given)


def _ends(points, values, k):
    return points[k], values[k], points[k + 1], values[k + 1]
