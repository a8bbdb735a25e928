"""Activations made of lines: with one kink at zero, and with two between constants."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.networks.activations import hulls
from stagecert.networks.activations.wedges import AbstractActivation, AbstractWedge, StraightWedge

# -- one kink at zero ------------------------------------------------------------------------------


class ReluWedge(AbstractWedge):
    """The triangle of relu. It is the hot path: two numbers for each entry, all else is cheap."""

    straight: ClassVar[bool] = True

    low: Any
    high: Any

    def lower(self, x):
        # Where relu is linear on the interval both lines are the same, so nothing is nonsmooth.
        return pieces.maximum(jnp.where(self.high <= 0, 0, x), jnp.where(self.low >= 0, x, 0))

    def upper(self, x):
        slope, offset = self._chord()
        return slope * x + offset

    def _chord(self):
        low, high = self.low, self.high
        unstable = ~((low >= 0) | (high <= 0))  # also if a bound is not a number
        width = jnp.where(unstable, high - low, 1)
        known = jnp.isfinite(width)
        stable = jnp.where(low >= 0, 1.0, 0.0)
        slope = jnp.where(unstable, high / jnp.where(known, width, jnp.inf), stable)
        # The larger offset holds at both ends however the slope was rounded; the last term covers
        # the roundings of the line itself.
        offset = jnp.maximum(-slope * low, high - slope * high)
        offset = offset + 8 * jnp.finfo(low.dtype).eps * high
        offset = jnp.where(unstable, jnp.where(known, offset, jnp.inf), 0)
        return jnp.where(known, slope, 0), offset

    def lines(self, slopes):
        low, high = self.low, self.high
        ((piece,), _) = slopes
        # Written like this, what is not a number becomes one that proves something.
        weight = jnp.where(piece.weight > 0, jnp.minimum(piece.weight, 1), 0)
        weight = jnp.where(low >= 0, 1, jnp.where(high <= 0, 0, weight)).astype(low.dtype)
        slope, offset = self._chord()
        # The offset is off by roundings of itself and of `high`, and by underflows.
        info = jnp.finfo(low.dtype)
        # Ends below the smallest normal number may count as zero in comparisons; a line through
        # zero can then be below relu by that much.
        wider = offset * (1 + 8 * info.eps) + 8 * info.tiny
        wider = jnp.where((low > 0) | (high < 0), 0, wider)
        return weight, jnp.zeros_like(low), slope, wider

    def slopes(self):
        # CROWN's choice: the line that leaves the smaller triangle.
        return (pieces.First(jnp.where(self.high > -self.low, 1, 0).astype(self.low.dtype)),), ()


class Relu(AbstractActivation):
    def __call__(self, x, weights=None, /):
        return jnp.maximum(x, 0)

    def image(self, low, high, weights=None, /):
        return jnp.maximum(low, 0), jnp.maximum(high, 0)

    def wedge(self, low, high, weights=None, /):
        return ReluWedge(low, high)


def _kinked_wedge(low, high, left, right) -> StraightWedge:
    """The wedge of left * x for x < 0 and right * x for x > 0, entrywise in the slopes too."""
    left, right = (jnp.asarray(s, low.dtype) for s in (left, right))
    stable = (low >= 0) | (high <= 0) | (left == right)
    slope = jnp.where(low >= 0, right, left)
    points = (low, jnp.zeros_like(low), high)
    values = (left * low, jnp.zeros_like(low), right * high)
    chord = hulls.secant_slope(low, values[0], high, values[2])
    sides = []
    for sign in (1, -1):
        bent = sign * left < sign * right  # the kink is a corner of this side
        offset = hulls.supporting_offset(sign, chord, points, values)
        one = jnp.where(stable, slope, jnp.where(bent, left, chord))
        two = jnp.where(stable, slope, jnp.where(bent, right, chord))
        offset = jnp.where(stable | bent, 0, offset)
        sides.append(hulls.lines(sign, (one, two), (offset, offset), low, high))
    return StraightWedge(*sides)


def _one_line(side: hulls.Lines) -> hulls.Line:
    """The first of several equal lines."""
    zero = jnp.zeros_like(side.slopes[..., 0])
    return hulls.Line(side.slopes[..., 0], zero, side.offsets[..., 0])


def _kinked_image(low, high, left, right):
    values = [_kinked(x, left, right) for x in (low, high)]
    least, most = jnp.minimum(*values), jnp.maximum(*values)
    eps = jnp.finfo(low.dtype).eps  # one product, rounded outwards
    least, most = least - eps * jnp.abs(least), most + eps * jnp.abs(most)
    crosses = (low < 0) & (high > 0)
    least = jnp.where(crosses, jnp.minimum(least, 0), least)
    return least, jnp.where(crosses, jnp.maximum(most, 0), most)


def _kinked(x, left, right):
    return jnp.where(x < 0, left * jnp.minimum(x, 0), right * jnp.maximum(x, 0))


class LeakyRelu(AbstractActivation):
    def __call__(self, x, weights=None, /, alpha=0.01):
        return _kinked(x, alpha, 1)

    def image(self, low, high, weights=None, /, alpha=0.01):
        return _kinked_image(low, high, alpha, 1)

    def wedge(self, low, high, weights=None, /, alpha=0.01):
        return _single_chord(_kinked_wedge(low, high, alpha, 1), convex=alpha <= 1)


class PRelu(AbstractActivation):
    def __call__(self, x, weights=None, /):
        return _kinked(x, weights, 1)

    def image(self, low, high, weights=None, /):
        return _kinked_image(low, high, weights, 1)

    def wedge(self, low, high, weights=None, /):
        return _kinked_wedge(low, high, weights, 1)


class Abs(AbstractActivation):
    def __call__(self, x, weights=None, /):
        return jnp.abs(x)

    def image(self, low, high, weights=None, /):
        least = jnp.maximum(jnp.maximum(low, -high), 0)
        return least, jnp.maximum(jnp.abs(low), jnp.abs(high))

    def wedge(self, low, high, weights=None, /):
        return _single_chord(_kinked_wedge(low, high, -1, 1), convex=True)


def _single_chord(wedge, convex: bool) -> StraightWedge:
    """Writes the side without a kink, known to be one line, as one line."""
    if convex:
        return StraightWedge(wedge.below, _one_line(wedge.above))
    return StraightWedge(_one_line(wedge.below), wedge.above)


# -- two kinks: straight lines between two constants -----------------------------------------------


def _ramp(x, slope, offset, least, most):
    return jnp.minimum(jnp.maximum(slope * x + offset, least), most)


def _ramp_wedge(low, high, slope: float, offset: float, least: float, most: float):
    """The wedge of min(max(slope * x + offset, least), most) with a positive slope."""
    usable = hulls.usable(low, high)
    given = low, high
    low, high = (jnp.where(usable, x, 0) for x in given)
    eps = jnp.finfo(low.dtype).eps
    exact = slope == 1 and offset == 0
    slack = [0 if exact else 4 * eps * (abs(slope * x) + abs(offset)) for x in (low, high)]
    line_low, line_high = slope * low + offset, slope * high + offset
    # Rounding may only make entries look less stable than they are.
    under, over = line_high <= least - slack[1], line_low >= most + slack[0]
    clears = line_low >= least + slack[0]
    stays = line_high <= most - slack[1]
    knots = [jnp.clip((bound - offset) / slope, low, high) for bound in (least, most)]
    points = (low, *knots, high)
    values = tuple(_ramp(x, slope, offset, least, most) for x in points)
    # From each end, the chord to the far corner (or to the far end, where that corner is outside).
    below = hulls.secant_slope(points[1], values[1], high, values[3])
    above = hulls.secant_slope(low, values[0], points[2], values[2])
    sides = []
    for sign, chord, flat, near, far in (
        (1, below, least, clears, stays),
        (-1, above, most, stays, clears),
    ):
        chord_offset = hulls.supporting_offset(sign, chord, points, values)
        one_slope, one_offset = jnp.where(near, chord, 0), jnp.where(near, chord_offset, flat)
        two_slope, two_offset = jnp.where(far, slope, chord), jnp.where(far, offset, chord_offset)
        # A straight ramp within the bounds, and the constants.
        one_slope = jnp.where(near & far, slope, one_slope)
        one_offset = jnp.where(near & far, offset, one_offset)
        for stable, constant in ((under, least), (over, most)):
            one_slope, two_slope = (jnp.where(stable, 0, s) for s in (one_slope, two_slope))
            one_offset = jnp.where(stable, constant, one_offset)
            two_offset = jnp.where(stable, constant, two_offset)
        side = hulls.lines(sign, (one_slope, two_slope), (one_offset, two_offset), *given)
        sides.append(side)
    return StraightWedge(*sides)


def _mirrored_ramp_wedge(low, high, slope, offset, least, most):
    """The same for any slope: a falling ramp is a rising one in -x."""
    if slope >= 0:
        return _ramp_wedge(low, high, slope, offset, least, most)
    wedge = _ramp_wedge(-high, -low, -slope, offset, least, most)
    return eqx.tree_at(lambda w: (w.below.slopes, w.above.slopes), wedge, replace_fn=jnp.negative)


def _constant_wedge(low, high, value):
    zero = jnp.zeros_like(low)
    line = hulls.Line(zero, zero, zero + value)
    return StraightWedge(line, line)


class Clip(AbstractActivation):
    def __call__(self, x, weights=None, /, low=-np.inf, high=np.inf):
        return jnp.minimum(jnp.maximum(x, low), high)

    def image(self, low, high, weights=None, /, **settings):
        return self(low, **settings), self(high, **settings)

    def wedge(self, low, high, weights=None, /, **settings):
        least, most = settings.get("low", -np.inf), settings.get("high", np.inf)
        if least >= most:
            return _constant_wedge(low, high, most)
        return _ramp_wedge(low, high, 1.0, 0.0, least, most)


class HardSigmoid(AbstractActivation):
    def __call__(self, x, weights=None, /, alpha=0.2, beta=0.5):
        # With a zero slope, 0 * inf would not be a number.
        return _ramp(x if alpha else jnp.zeros_like(x), alpha, beta, 0, 1)

    def image(self, low, high, weights=None, /, alpha=0.2, beta=0.5):
        eps = jnp.finfo(low.dtype).eps
        values = []
        for sign in (-1, 1):
            ends = [
                alpha * x + beta + sign * 4 * eps * (abs(alpha * x) + abs(beta))
                for x in (low, high)
            ]
            best = jnp.minimum(*ends) if sign < 0 else jnp.maximum(*ends)
            values.append(jnp.clip(best, 0, 1))
        return values[0], values[1]

    def wedge(self, low, high, weights=None, /, alpha=0.2, beta=0.5):
        if alpha == 0:
            return _constant_wedge(low, high, min(max(beta, 0), 1))
        return _mirrored_ramp_wedge(low, high, alpha, beta, 0.0, 1.0)
