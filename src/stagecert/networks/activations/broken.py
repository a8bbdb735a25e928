"""Activations that jump: lines with gaps between them, a softplus that ends in a line, and stairs.

At a jump both limits belong to the hull, though only one is the function's value: no closed set
that holds the graph does without. Elsewhere nothing is added.
"""

import itertools
import math
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from stagecert.networks.activations import hulls
from stagecert.networks.activations.smooth import PROFILES, _image
from stagecert.networks.activations.wedges import AbstractActivation, HullWedge, StraightWedge


class BrokenLine(AbstractActivation):
    """slope0 * x + offset0 up to knot0, slope1 * x + offset1 up to knot1, and so on.

    At a knot it is what the line before it says, or the line after it if `closed0` is one, or `at0`
    between the two. Hull and image hold for both, and for all that is between them.
    """

    def __call__(self, x, weights=None, /, **numbers):
        knots, lines = _parts(numbers)
        value = _on(lines[0], x)
        for k, (knot, line) in enumerate(zip(knots, lines[1:], strict=True)):
            beyond = x >= knot if numbers.get(f"closed{k}") else x > knot
            value = jnp.where(beyond, _on(line, x), value)
            if f"at{k}" in numbers:
                value = jnp.where(x == knot, numbers[f"at{k}"], value)
        return value

    def image(self, low, high, weights=None, /, **numbers):
        _, values, slack = self._corners(low, high, numbers)
        least = jnp.min(jnp.stack([v for pair in values for v in pair]), axis=0)
        most = jnp.max(jnp.stack([v for pair in values for v in pair]), axis=0)
        return least - slack, most + slack

    def wedge(self, low, high, weights=None, /, **numbers):
        given = low, high
        usable = hulls.usable(low, high)
        low, high = (jnp.where(usable, x, 0) for x in given)
        points, values, slack = self._corners(low, high, numbers)
        knots, lines = _parts(numbers)
        slope, offset = (jnp.full_like(low, number) for number in lines[0])
        bent = jnp.zeros(low.shape, bool)
        for knot, line in zip(knots, lines[1:], strict=True):
            bent |= _meets(knot, low, high)
            slope = jnp.where(low > knot, line[0], slope)
            offset = jnp.where(low > knot, line[1], offset)
        # Lines are what they are, if numbers of this precision hold them.
        held = all(low.dtype.type(number) == number for line in lines for number in line)
        straight = 0 if held else slack
        sides = []
        for sign, pick in ((1, jnp.minimum), (-1, jnp.maximum)):
            outer = [pick(*pair) for pair in values]
            slopes, offsets = [], []
            # The edges of a hull are among the chords of its points; each is moved outwards until
            # it is beyond all of them.
            for i, j in itertools.combinations(range(len(points)), 2):
                chord = hulls.secant_slope(points[i], outer[i], points[j], outer[j])
                support = hulls.supporting_offset(sign, chord, points, outer) - sign * slack
                slopes.append(jnp.where(bent, chord, slope))
                offsets.append(jnp.where(bent, support, offset - sign * straight))
            sides.append(hulls.lines(sign, slopes, offsets, *given))
        return StraightWedge(*sides)

    def _corners(self, low, high, numbers):
        """Points in order, the values on both sides of each, and more than these are rounded."""
        knots, lines = _parts(numbers)
        points, values, size = [low], [(self(low, **numbers),) * 2], jnp.zeros_like(low)
        for knot, *sides in zip(knots, lines, lines[1:], strict=False):
            x = jnp.clip(jnp.asarray(knot, low.dtype), low, high)
            here = _meets(knot, low, high)
            there = self(x, **numbers)
            points.append(x)
            values.append(tuple(jnp.where(here, _on(line, x), there) for line in sides))
        points.append(high)
        values.append((self(high, **numbers),) * 2)
        for slope, offset in lines:
            largest = jnp.maximum(jnp.abs(low), jnp.abs(high))
            size = jnp.maximum(size, (abs(slope) * largest if slope else 0) + abs(offset))
        return points, values, 8 * jnp.finfo(low.dtype).eps * size


def _parts(numbers):
    count = sum(name.startswith("knot") for name in numbers)
    knots = [numbers[f"knot{k}"] for k in range(count)]
    return knots, [(numbers[f"slope{k}"], numbers[f"offset{k}"]) for k in range(count + 1)]


def _on(line, x):
    slope, offset = line
    return slope * x + offset if slope else jnp.full_like(x, offset)


def _meets(knot, low, high):
    """Whether a knot is in the interval, or so near that it may have been rounded out of it."""
    near = 2 * jnp.finfo(low.dtype).eps * abs(knot)
    return (low <= knot + near) & (high >= knot - near)


class RevertingSoftplus(AbstractActivation):
    """softplus(x) up to a threshold and x beyond, which is less by log(1 + exp(-x))."""

    profile = PROFILES["softplus"]

    def __call__(self, x, weights=None, /, threshold=20.0):
        return jnp.where(x > threshold, x, self.profile.function(x))

    def image(self, low, high, weights=None, /, threshold=20.0):
        least, most = _image(self.profile, low, high, None, (0, np.inf))
        fall = _fall(high, threshold)
        # The fall is less than what numbers of single precision are rounded to.
        lowered = jnp.nextafter(least - fall, jnp.full_like(least, -jnp.inf))
        return jnp.where(fall > 0, lowered, least), most

    def wedge(self, low, high, weights=None, /, threshold=20.0):
        below, above = hulls.hull(self.profile, low, high)
        assert isinstance(below, hulls.Curve)
        fall = _fall(high, threshold)
        return HullWedge(eqx.tree_at(lambda c: c.margin, below, below.margin + fall), above)


def _fall(high, threshold: float):
    """How far the function may be below softplus."""
    most = math.nextafter(math.log1p(math.exp(-threshold)) * (1 + 1e-12), math.inf)
    near = 2 * jnp.finfo(high.dtype).eps * abs(threshold)
    return jnp.where(high < threshold - near, 0, jnp.asarray(most, high.dtype) * (1 + 1e-6))


# -- stairs ----------------------------------------------------------------------------------------


_NARROW = 1e-9  # lines over shorter runs than this are too steep to be of use


def _slope(rise, run):
    """The slope of a line, or that of the stairs where it would be too steep."""
    wide = run > _NARROW
    return jnp.where(wide, rise / jnp.where(wide, run, 1), jnp.sign(rise))


def _side(sign: int, slopes, points, values, low, high):
    """The lines with these slopes that pass on the outer side of all points."""
    offsets = [hulls.supporting_offset(sign, slope, points, values) for slope in slopes]
    return hulls.lines(sign, slopes, offsets, low, high)


class Stairs(AbstractActivation):
    """Whole numbers; from v to v + 1 it jumps at v + `jump`."""

    def __init__(self, function: Callable, jump: float):
        self.function, self.jump = function, jump

    def __call__(self, x, weights=None, /):
        return self.function(x)

    def image(self, low, high, weights=None, /):
        return self.function(low), self.function(high)

    def wedge(self, low, high, weights=None, /):
        usable = hulls.usable(low, high)
        start, end = (jnp.where(usable, x, 0) for x in (low, high))
        first, last = self.function(start), self.function(end)
        level = last == first
        begin = jnp.where(level, start, first + self.jump)
        stop = jnp.where(level, end, last - 1 + self.jump)
        points, rise = (start, begin, stop, end), jnp.where(level, 0, jnp.ones_like(start))
        climb = jnp.where(last > first + 1, rise, 0)
        below = _side(
            1,
            [jnp.zeros_like(start), climb, jnp.where(level, 0, _slope(rise, end - stop))],
            points, (first, first, last - rise, last), low, high,
        )  # fmt: skip
        above = _side(
            -1,
            [jnp.where(level, 0, _slope(rise, begin - start)), climb, jnp.zeros_like(start)],
            points, (first, first + rise, last, last), low, high,
        )  # fmt: skip
        return StraightWedge(below, above)


class Sign(AbstractActivation):
    """-1, 0 or 1."""

    def __call__(self, x, weights=None, /):
        return jnp.sign(x)

    def image(self, low, high, weights=None, /):
        return jnp.sign(low), jnp.sign(high)

    def wedge(self, low, high, weights=None, /):
        usable = hulls.usable(low, high)
        start, end = (jnp.where(usable, x, 0) for x in (low, high))
        first, last = jnp.sign(start), jnp.sign(end)
        level = (first == last) & ((first != 0) | (start == end))
        # At zero: the limit from the left if there is one, and from the right.
        under, over = jnp.minimum(first, 0), jnp.maximum(last, 0)
        zero = jnp.clip(jnp.zeros_like(start), start, end)
        points = (start, zero, end)
        inner = [jnp.where(level, first, x) for x in (under, over)]
        flat = jnp.zeros_like(start)
        rising = jnp.where(level, 0, _slope(last - inner[0], end - zero))
        below = _side(1, [flat, rising], points, (first, inner[0], last), low, high)
        rising = jnp.where(level, 0, _slope(inner[1] - first, zero - start))
        above = _side(-1, [rising, flat], points, (first, inner[1], last), low, high)
        return StraightWedge(below, above)


STEPS: dict[str, AbstractActivation] = {
    "floor": Stairs(jnp.floor, 1.0),
    "ceil": Stairs(jnp.ceil, 0.0),
    "round": Stairs(jnp.round, 0.5),
    "sign": Sign(),
}
