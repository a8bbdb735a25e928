"""Functions that repeat, or are not defined everywhere: sin and cos, 1 / x, log, square root.

Each is a piece of a function that bends at most twice, moved or mirrored. Where an interval leaves
the domain there is no hull: the wedge is infinite and proves nothing.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from stagecert.networks.activations import hulls
from stagecert.networks.activations.hulls import AbstractSide, Profile
from stagecert.networks.activations.smooth import make_profile
from stagecert.networks.activations.wedges import AbstractActivation, HullWedge


class Turned(AbstractSide):
    """One side of f where f(x) = g(t), or -g(t) where it is turned, with t = factor * x - shift."""

    same: AbstractSide  # this side of g
    other: AbstractSide  # the other side of g
    factor: Any
    shift: Any
    turned: Any

    def __call__(self, x):
        t = self.factor * x - self.shift
        return jnp.where(self.turned, -self.other(t), self.same(t))


def _turned(below, above, factor, shift, turned) -> HullWedge:
    return HullWedge(
        Turned(below, above, factor, shift, turned), Turned(above, below, factor, shift, turned)
    )


# -- waves -----------------------------------------------------------------------------------------

# On (-pi, 2 pi) the sine bends at 0 and at pi. Intervals shorter than a period fit in, moved by a
# multiple of pi; a line that touches it twice from below would be a period long.
_ARCH = make_profile(
    jnp.sin, jnp.cos, knots=(0.0, float(np.pi)), size=lambda x, value: jnp.ones_like(value)
)
_PERIOD = 2 * np.pi
# Intervals that are nearly as long as a period count as such: no rounding may decide.
_NEARLY = 1e-6


class Wave(AbstractActivation):
    """sin(x + phase)."""

    def __init__(self, function: Callable, phase: float):
        self.function, self.phase = function, phase

    def __call__(self, x, weights=None, /):
        return self.function(x)

    def image(self, low, high, weights=None, /):
        ends = self.function(low), self.function(high)
        eps = jnp.finfo(low.dtype).eps
        least, most = jnp.minimum(*ends) - 4 * eps, jnp.maximum(*ends) + 4 * eps
        least = jnp.where(self._holds(low, high, -np.pi / 2), -1, least)
        most = jnp.where(self._holds(low, high, np.pi / 2), 1, most)
        return jnp.maximum(least, -1), jnp.minimum(most, 1)

    def _holds(self, low, high, place):
        """Whether an interval holds place + a multiple of the period, as far as can be told."""
        start = place - self.phase
        first = start + _PERIOD * jnp.ceil((low - start) / _PERIOD)
        # Around its extremes the function is flat: a little more makes no difference.
        slack = 1e-6 + 16 * jnp.finfo(low.dtype).eps * (jnp.abs(low) + jnp.abs(high))
        return ~((first > high + slack) & (first - _PERIOD < low - slack))

    def wedge(self, low, high, weights=None, /):
        usable = hulls.usable(low, high)
        low, high = (jnp.where(usable, x, 0) for x in (low, high))
        count = jnp.ceil((low + self.phase) / np.pi)
        shift = count * np.pi - self.phase
        whole = ~(high - low < _PERIOD - _NEARLY)
        start = jnp.where(whole, 0, low - shift)
        end = jnp.where(whole, 0, jnp.maximum(high - shift, low - shift))
        # The place moves by these roundings, and the value by no more.
        room = 16 * jnp.finfo(low.dtype).eps * (jnp.abs(low) + jnp.abs(high) + 8)
        sides = []
        for sign, side in zip((1, -1), hulls.curves(_ARCH, (1, -1), start, end), strict=True):
            level = jnp.full_like(low, -sign * np.pi / 2)
            flat = jnp.zeros_like(low)
            extreme = hulls.Curve(_ARCH.function, sign, level, level, flat, flat, flat)
            side = hulls.choose(whole, extreme, side)
            margin = jnp.where(usable, side.margin + room, jnp.inf)
            sides.append(eqx.tree_at(lambda c: c.margin, side, margin))
        below, above = sides
        return _turned(below, above, jnp.ones_like(low), shift, jnp.mod(count, 2) == 1)


# -- positive numbers ------------------------------------------------------------------------------


def _bounded(side, sign: int, inside):
    """The side, infinite outside of the domain."""
    if isinstance(side, hulls.Curve):
        margin = jnp.where(inside, side.margin, jnp.inf)
        return eqx.tree_at(lambda c: c.margin, side, margin)
    return eqx.tree_at(lambda l: l.value, side, jnp.where(inside, side.value, -sign * jnp.inf))


def _sides(profile: Profile, low, high, inside, steepest: float = 0.0):
    """Both sides of the hull of a function of positive numbers that bends one way.

    Below `steepest` * high the curve goes on along its tangent: at zero it may be infinitely steep.
    """
    low, high = (jnp.where(inside, x, 1) for x in (low, high))
    sides = []
    for sign in (1, -1):
        if profile.bend == sign:
            side = hulls.curve(profile, sign, jnp.maximum(low, steepest * high), high)
        else:
            side = hulls.chord(profile, sign, low, high)
        sides.append(_bounded(side, sign, inside))
    return sides


def _monotone_image(profile: Profile, low, high, inside):
    """The range of a function that rises or falls, infinite outside of its domain."""
    ends = profile.at(*(jnp.where(inside, x, 1) for x in (low, high)))
    least = jnp.minimum(*(end.value - end.rounding for end in ends))
    most = jnp.maximum(*(end.value + end.rounding for end in ends))
    return jnp.where(inside, least, -jnp.inf), jnp.where(inside, most, jnp.inf)


class Positive(AbstractActivation):
    """A concave function of positive numbers, or of zero too."""

    def __init__(self, profile: Profile, least: float, zero: bool = False):
        self.profile, self.least, self.zero = profile, least, zero

    def _inside(self, low, high):
        return hulls.usable(low, high) & ((low >= 0) if self.zero else (low > 0))

    def __call__(self, x, weights=None, /):
        return self.profile.function(x)

    def image(self, low, high, weights=None, /):
        least, most = _monotone_image(self.profile, low, high, self._inside(low, high))
        return jnp.where(least > -jnp.inf, jnp.maximum(least, self.least), least), most

    def wedge(self, low, high, weights=None, /):
        inside = self._inside(low, high)
        # At 1e-24 of the upper end, a square root is within 1e-12 of zero.
        return HullWedge(*_sides(self.profile, low, high, inside, 1e-24 if self.zero else 0.0))


_INVERSE = make_profile(lambda t: 1 / t, lambda t: -1 / (t * t))


class Reciprocal(AbstractActivation):
    """1 / x, where zero is not in the interval: a convex function of |x|, with the sign of x."""

    def _of_size(self, low, high):
        """|x| between two positive numbers, and where zero is outside."""
        inside = hulls.usable(low, high) & ((low > 0) | (high < 0))
        ends = jnp.where(low > 0, low, -high), jnp.where(low > 0, high, -low)
        return *(jnp.where(inside, x, 1) for x in ends), inside

    def __call__(self, x, weights=None, /):
        return 1 / x

    def image(self, low, high, weights=None, /):
        start, end, inside = self._of_size(low, high)
        least, most = _monotone_image(_INVERSE, start, end, inside)
        falls = low > 0
        return jnp.where(falls, least, -most), jnp.where(falls, most, -least)

    def wedge(self, low, high, weights=None, /):
        start, end, inside = self._of_size(low, high)
        sign = jnp.where(low > 0, 1, -1).astype(low.dtype)
        below, above = _sides(_INVERSE, start, end, inside)
        return _turned(below, above, sign, jnp.zeros_like(low), sign < 0)


def _root_slope(x):
    return 0.5 / jnp.sqrt(jnp.maximum(x, jnp.finfo(x.dtype).tiny))


DOMAINS: dict[str, AbstractActivation] = {
    "sin": Wave(jnp.sin, 0.0),
    "cos": Wave(jnp.cos, np.pi / 2),
    "log": Positive(
        make_profile(jnp.log, lambda x: 1 / x, bend=-1, size=lambda x, value: 1 + jnp.abs(value)),
        -np.inf,
    ),
    "sqrt": Positive(make_profile(jnp.sqrt, _root_slope, bend=-1), 0.0, zero=True),
    "reciprocal": Reciprocal(),
}
