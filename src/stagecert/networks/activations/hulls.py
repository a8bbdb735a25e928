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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        # At start and end the lines' slopes count, not the function's own: there may be a kink, or
        # only a line (start = end).
        before = x <= self.start
        after = (x >= self.end) & ~before
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
        size: |computed - true| <= a few roundings of size(x, value); None: of |value|.
        bitangent: the two points where one line touches both outer regions, or None.
        reach: the two numbers reach(dtype), about zero, between which it does not overflow.
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

    def at(self, *points) -> list["_At"]:
        """Values at some points; together, because compilation is slow for long formulas."""
        x = jnp.stack(jnp.broadcast_arrays(*points))
        parts = (x, self.function(x), self.derivative(x))
        parts = (*parts, self.rounding(x, parts[1]))
        return [_At(*(part[k] for part in parts)) for k in range(len(points))]

    def rounding(self, x, value):
        """A bound on the error of the function's computed value at x."""
        info = jnp.finfo(x.dtype)
        size = jnp.abs(value) if self.size is None else self.size(x, value)
        # The last term is for what underflows before it is multiplied, as in x * sigmoid(x).
        return ROUNDINGS * (info.eps * size + 1000 * info.tiny)


class _At(NamedTuple):
    """A point, the function's value and derivative there, and a bound on the value's error."""

    x: Any
    value: Any
    slope: Any
    rounding: Any


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

    Returns it, and whether there is one (if not, `high`).
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

    start, end = (order(jax.lax.bitcast_convert_type(x, integer)) for x in (low, high))
    _, place = jax.lax.fori_loop(0, bits, step, (start, end + 1))
    found = place <= end
    return jax.lax.bitcast_convert_type(order(jnp.where(found, place, end)), dtype), found


def _nudge(x):
    """A distance just above the spacing of numbers at x."""
    info = jnp.finfo(x.dtype)
    return 2 * info.eps * jnp.abs(x) + 4 * info.tiny


class _Chord(NamedTuple):
    """The line between the ends, and how far it may cut the function by rounding."""

    low: _At
    high: _At
    slope: Any
    margin: Any


def _chord(profile, low, high) -> _Chord:
    # Knots may be kinks: slopes there are those just inside.
    inner_low, inner_high = low, high
    beside = []
    for knot in profile.knots:
        nudge = _nudge(jnp.asarray(knot, low.dtype))
        before, after = (jnp.clip(knot + side * nudge, low, high) for side in (-1, 1))
        inner_low = jnp.where(low == knot, after, inner_low)
        inner_high = jnp.where(high == knot, before, inner_high)
        beside += [before, after]
    start, end, *at = profile.at(low, high, inner_low, inner_high, *beside)
    start, end = start._replace(slope=at[0].slope), end._replace(slope=at[1].slope)
    # Slopes over short intervals are noisy, but must be in the derivative's range.
    least, most = at[0].slope, at[0].slope
    for other in at[1:]:
        least, most = jnp.minimum(least, other.slope), jnp.maximum(most, other.slope)
    rise, run = end.value - start.value, high - low
    known = (run > 0) & jnp.isfinite(rise)
    slope = jnp.clip(jnp.where(known, rise / jnp.where(known, run, 1), least), least, most)
    slope = jnp.where(jnp.isfinite(slope), slope, 0)
    eps = jnp.finfo(low.dtype).eps
    margin = start.rounding + end.rounding + ROUNDINGS * eps * jnp.abs(slope) * run
    margin = margin + jnp.abs(rise - slope * run)  # kept in range, or underflowed
    return _Chord(start, end, slope, jnp.where(jnp.isfinite(margin), margin, jnp.inf))


def chord(profile: Profile, sign: int, low, high) -> Line:
    """The line through the function's values at the ends, moved outwards by rounding."""
    bounds = _Bounds(low, high)
    start, _, slope, margin = _chord(profile, bounds.low, bounds.high)
    # An end whose value overflows leaves no finite line on this side.
    finite = bounds.usable & jnp.isfinite(start.value) & jnp.isfinite(margin)
    value = jnp.where(finite, start.value - sign * margin, -sign * jnp.inf)
    return Line(jnp.where(finite, slope, 0), start.x, value)


def _region_margin(start: _At, end: _At):
    """Roundings of the largest value between two points, where the function bends one way."""
    eps = jnp.finfo(start.x.dtype).eps
    # Between the ends, the tangents there bound how far the function may dip.
    dips = start.slope * end.slope < 0
    least = jnp.minimum(jnp.abs(start.slope), jnp.abs(end.slope))
    dip = jnp.where(dips, least * (end.x - start.x), 0)
    return jnp.maximum(start.rounding, end.rounding) + ROUNDINGS * eps * dip


def curve(profile: Profile, sign: int, low, high) -> Curve:
    """The function itself, where sign * function is convex on all of [low, high]."""
    bounds = _Bounds(low, high)
    low, high = bounds.low, bounds.high
    if profile.reach is not None:
        # Beyond, the tangent at a place where it is not steep: it must not overflow itself.
        least, most = profile.reach(low.dtype)
        low = jnp.clip(low, jnp.where(low < least, -0.5, low), jnp.where(high > most, 0.5, high))
        high = jnp.clip(high, low, jnp.where(high > most, 0.5, high))
    start, end = profile.at(low, high)
    margin = jnp.where(bounds.usable, _region_margin(start, end), jnp.inf)
    return Curve(profile.function, sign, low, high, start.slope, end.slope, margin)


class _Touch(NamedTuple):
    """Where a line from an end of the interval touches a region in which g is convex."""

    at: _At
    slope: Any  # of the line
    found: Any
    cut: Any  # by how much the line may cut g, because the place is a floating-point number


def _touches(profile, searches, line: _Chord) -> list[_Touch]:
    """Tangent points, all in one loop: each search is (sign, mirror, first, last).

    With mirror 1 the line comes from the lower end of the interval to the region [first, last];
    with mirror -1 from the upper end, which is the same search in -x.
    """

    def stack(arrays):
        return jnp.stack(jnp.broadcast_arrays(*arrays))

    low, high = line.low.x, line.high.x
    column = (len(searches),) + (1,) * low.ndim
    sign = jnp.asarray([s for s, *_ in searches], low.dtype).reshape(column)
    mirror = jnp.asarray([m for _, m, *_ in searches], low.dtype).reshape(column)
    ends = [line.low if m > 0 else line.high for _, m, *_ in searches]
    point = mirror * stack([end.x for end in ends])
    value = sign * stack([end.value for end in ends])
    rounding = stack([end.rounding for end in ends])
    inner = [
        (jnp.clip(low, a, b), jnp.clip(high, a, b))[::m]  # the near end of the region first
        for _, m, a, b in searches
    ]
    near = mirror * stack([ends[0] for ends in inner])
    far = mirror * stack([ends[1] for ends in inner])
    # Both ends may be kinks: slopes there are those just inside.
    near = jnp.minimum(near + _nudge(near), far)
    far = jnp.maximum(far - _nudge(far), near)

    def at(t):  # g in the mirrored coordinate
        f = profile.function(mirror * t)
        r = profile.rounding(mirror * t, f)
        return _At(t, sign * f, sign * mirror * profile.derivative(mirror * t), r)

    def passes(t):  # the tangent at t, continued to the point, is below g there
        t = at(t)
        return t.value - value - t.slope * (t.x - point) <= -(t.rounding + rounding)

    # Not tested at the place again, where the next compilation may round to the other side.
    place, found = _bisect(passes, near, far)
    here = at(place)
    run = place - point
    rise = here.value - value + here.rounding + rounding
    slope = jnp.where(run > 0, rise / jnp.where(run > 0, run, 1), here.slope)
    # The true place is just before; between the two g may dip below the line.
    dip = jnp.maximum(here.slope - slope, 0) * 4 * _nudge(place)
    cut = dip + jnp.maximum(rise - slope * run, 0)  # the slope may have underflowed
    here = _At(mirror * place, sign * here.value, sign * mirror * here.slope, here.rounding)
    parts = (*here, sign * mirror * slope, found, cut)
    rows = [[part[k] for part in parts] for k in range(len(searches))]
    return [_Touch(_At(*row[:4]), *row[4:]) for row in rows]


def _bowl(profile, sign, line: _Chord, first, last, touches) -> Curve:
    """Line | function | line: the lower hull of g if g is convex on [first, last] only.

    `touches` has the tangent points at the ends of the region that are finite.
    """
    start, end = line.low, line.high
    low, high = start.x, end.x
    left, right = start.slope, end.slope
    some = (low <= last) & (high >= first)
    cut: Any = 0
    if np.isfinite(first):
        touch, outside = touches.pop(0), low < first
        left = jnp.where(outside, touch.slope, left)
        start = jax.tree.map(lambda a, b: jnp.where(outside, a, b), touch.at, start)
        some, cut = some & (touch.found | ~outside), jnp.where(outside, touch.cut, 0)
    if np.isfinite(last):
        touch, beyond = touches.pop(0), high > last
        right = jnp.where(beyond, touch.slope, right)
        end = jax.tree.map(lambda a, b: jnp.where(beyond, a, b), touch.at, end)
        some, cut = some & (touch.found | ~beyond), cut + jnp.where(beyond, touch.cut, 0)
    # Tangents that cross: the chord is below the curve.
    crossed = (start.x > end.x) | (sign * left > sign * right)
    some = some & ~(crossed & ((low < first) | (high > last)))
    # Where the chord nearly touches the curve, rounding may have missed that it does.
    above: Any = 0
    for t in (start, end):
        cuts = sign * (line.low.value + line.slope * (t.x - low) - t.value) + t.rounding
        above = jnp.maximum(above, jnp.where((t.x >= low) & (t.x <= high), cuts, 0))
    margin = jnp.where(some, _region_margin(start, end) + cut, above + line.margin)
    return Curve(
        profile.function,
        sign,
        start=jnp.where(some, start.x, low),
        end=jnp.where(some, end.x, low),
        left=jnp.where(some, left, line.slope),
        right=jnp.where(some, right, line.slope),
        margin=margin,
    )


def choose(condition, yes: Curve, no: Curve) -> Curve:
    """One curve where the condition holds, another elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def hull(profile: Profile, low, high) -> tuple[AbstractSide, AbstractSide]:
    """The lower and the upper hull of a function that bends at most twice."""
    if not profile.knots:
        below, above = ((curve if profile.bend == sign else chord) for sign in (1, -1))
        return below(profile, 1, low, high), above(profile, -1, low, high)
    sides = curves(profile, (1, -1), low, high)
    if profile.bitangent is not None:
        bent = 0 if profile.bend > 0 else 1
        sides[bent] = _bridged(profile, low, high, sides[bent])
    return sides[0], sides[1]


def moved_out(side: AbstractSide, room: float) -> AbstractSide:
    """A side that is further from the function by `room`; only curves can move."""
    if not room:
        return side
    assert isinstance(side, Curve)
    return eqx.tree_at(lambda c: c.margin, side, side.margin + room)


def curves(profile: Profile, signs: Sequence[int], low, high) -> list:
    """The lower (sign 1) or upper (sign -1) hulls of a function with knots, without bridges."""
    bounds = _Bounds(low, high)
    line = _chord(profile, bounds.low, bounds.high)
    searches = [
        (sign, mirror, *region)
        for sign in signs
        for region in profile.convex_regions(sign)
        for mirror, end in zip((1, -1), region, strict=True)
        if np.isfinite(end)
    ]
    touches = _touches(profile, searches, line)
    sides = []
    for sign in signs:
        regions = profile.convex_regions(sign)
        parts = [_bowl(profile, sign, line, *region, touches) for region in regions]
        side = parts[0]
        if len(parts) == 2:
            # A line from `low` to the last region must not dip into the first, where g has to
            # leave `low` at least as steeply; else it goes from the first region to `high`.
            (_, first), (last, _) = regions
            leaves = sign * line.low.slope >= sign * parts[1].left
            pick = (line.low.x >= first) | ((line.high.x > last) & leaves)
            side = choose(pick, parts[1], parts[0])
        margin = jnp.where(bounds.usable, side.margin, jnp.inf)
        sides.append(eqx.tree_at(lambda c: c.margin, side, margin))
    return sides


def _bridged(profile, low, high, side: Curve) -> Bridge:
    """The bridge where both points of the bitangent are inside, and `side` elsewhere."""
    bounds = _Bounds(low, high)
    low, high = bounds.low, bounds.high
    eps = jnp.finfo(low.dtype).eps
    one, two = (jnp.asarray(x, low.dtype) for x in profile.bitangent)
    # A little outside the true points g is flatter before and steeper after than the line, so that
    # the whole stays convex; the line then errs by the square of the step, which the margin covers.
    step = jnp.sqrt(eps) / 16 * (two - one)
    on = (low < one - step) & (high > two + step) & bounds.usable
    start, end = jnp.where(on, one - step, low), jnp.where(on, two + step, high)
    ends = profile.at(low, high, start, end)
    start, end = ends[2:]
    run = jnp.where(on, end.x - start.x, 1)
    slope = jnp.where(on, (end.value - start.value) / run, 0)
    bend = jnp.abs(start.slope - slope) + jnp.abs(end.slope - slope)
    margin = bend * step + ROUNDINGS * eps * jnp.abs(slope) * run
    for end_point in ends:
        margin = margin + end_point.rounding
    margin = jnp.where(on, margin, 0)
    return Bridge(side, profile.function, side.sign, on, start.x, end.x, slope, margin)


def through_origin(side: Curve, mask, slope) -> Curve:
    """The side, but exactly slope * x where the mask is true; the function is zero at zero."""
    zero = jnp.zeros_like(side.start)
    line = Curve(side.function, side.sign, zero, zero, zero + slope, zero + slope, zero)
    return choose(mask, line, side)


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
    # Not infinite: weights of zero could not be multiplied with it.
    offsets = [jnp.where(usable, o, -sign * jnp.finfo(low.dtype).max) for o in offsets]
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
    line = _chord(profile, low, high)
    middle = jnp.clip(jnp.asarray(corner, low.dtype), low, high)
    points = (low, middle, high)
    values = (line.low.value, profile.function(middle), line.high.value)
    whole = line.slope
    secants = (secant_slope(*_ends(points, values, 0)), secant_slope(*_ends(points, values, 1)))
    one = secants[0] if left is None else jnp.full_like(low, left)
    two = secants[1] if right is None else jnp.full_like(low, right)
    active = (low < corner) & (corner < high) & (sign * one < sign * two)
    # Support makes lines sound; lines that are kept exact must be so at the other end too.
    offset_one, offset_two = (supporting_offset(sign, s, points, values) for s in (one, two))
    if left is not None:
        active = active & (sign * (values[2] - left * high) >= line.high.rounding)
        offset_one = jnp.zeros_like(low)
    if right is not None:
        active = active & (sign * (values[0] - right * low) >= line.low.rounding)
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
