"""Functions that jump: floor, ceil, round, sign, with the hulls of their closed graphs.

At a jump both limits belong to the hull, though only one is the function's value: no closed set
that holds the graph does without. Elsewhere nothing is added.
"""

from collections.abc import Callable

import jax.numpy as jnp

from stagecert.networks.activations import hulls
from stagecert.networks.activations.wedges import AbstractActivation, StraightWedge

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
