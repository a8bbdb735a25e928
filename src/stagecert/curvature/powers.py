"""Rules for monotone functions of one number in general, and for whole powers."""

from dataclasses import replace

import numpy as np

from stagecert.curvature.bends import squared
from stagecert.curvature.lattice import (
    CONCAVE,
    CONVEX,
    LOG_CONVEX,
    NOTHING_KNOWN,
    ROOT_CONVEX,
    ROUNDING,
    Known,
    cleared,
    composed,
    constant,
    known,
    negative,
    outward,
)
from stagecert.curvature.table import rule


def monotone(x: Known, function, doubts, up=True, floor=-np.inf, ceiling=np.inf) -> Known:
    """A monotone function with the given doubts about its curvature on [lo, hi]."""
    ends = [np.asarray(function(e), float) for e in (x.lo, x.hi)]
    lo, hi = ends if up else ends[::-1]
    lo = np.where(np.isnan(lo), floor, lo)
    hi = np.where(np.isnan(hi), ceiling, hi)
    # The functions of the C library are trusted to a few units in the last place.
    sizes = [np.where(np.isfinite(e), np.abs(e), 0) for e in (lo, hi)]
    lo, hi = lo - 4 * ROUNDING * sizes[0], hi + 4 * ROUNDING * sizes[1]
    lo, hi = np.maximum(lo, floor), np.minimum(hi, ceiling)
    return composed(x, lo, hi, np.broadcast_to(doubts, x.shape), up, not up)


def _even_power(x: Known, n: int) -> Known:
    ends = np.stack([np.abs(x.lo), np.abs(x.hi)])
    touches = (x.lo <= 0) & (x.hi >= 0)
    low = np.where(touches, 0, ends.min(axis=0)) ** n
    high = ends.max(axis=0) ** n
    lo, hi = outward(low, high, np.where(np.isfinite(low + high), low + high, 0), n)
    out = composed(x, np.maximum(lo, 0), hi, np.full(x.shape, CONCAVE), x.lo >= 0, x.hi <= 0)
    # |x| is convex under the same conditions, and so is every power of it from the first on.
    return cleared(out, out.has(CONVEX), ROOT_CONVEX)


@rule("square")
def _square(x: Known, **_) -> Known:
    return whole_power(x, 2)


@rule("integer_pow")
def whole_power(x: Known, y: int, **_) -> Known:
    if y == 0:
        return constant(np.ones(x.shape))
    if y == 1:
        return x
    if y > 0:
        if y % 2 == 0:
            out = _even_power(x, y)
            out = replace(out, bend=squared(x.slope)) if y == 2 else out
        else:
            doubts = np.where(x.lo >= 0, CONCAVE, np.where(x.hi <= 0, CONVEX, CONVEX | CONCAVE))
            out = monotone(x, lambda e: e**y, doubts)
            out = cleared(out, (x.lo >= 0) & out.has(CONVEX), ROOT_CONVEX)
            out = replace(out, lo=np.where(x.lo >= 0, np.maximum(out.lo, 0), out.lo))
        grown = x.has(LOG_CONVEX) & (x.lo >= 0)
        return cleared(out, grown, CONVEX | LOG_CONVEX | ROOT_CONVEX)
    # Negative powers have a pole at zero, which separates two functions of their own.
    inverse = monotone(x, lambda e: np.where(e == 0, np.inf, 1.0 / e), CONCAVE, False, 0.0)
    turned = monotone(negative(x), lambda e: np.where(e == 0, np.inf, 1.0 / e), CONCAVE, False, 0.0)
    power = inverse if y == -1 else whole_power(inverse, -y)
    other = turned if y == -1 else whole_power(turned, -y)
    other = other if y % 2 == 0 else negative(other)
    # One over a positive concave value is log-convex.
    power = cleared(power, x.has(CONCAVE) & (x.lo >= 0), LOG_CONVEX | ROOT_CONVEX | CONVEX)
    # At zero itself the sign of the infinity is that of the floating-point zero: positive.
    above, below = x.lo >= 0, x.hi < 0
    return known(
        np.where(above, power.lo, np.where(below, other.lo, -np.inf)),
        np.where(above, power.hi, np.where(below, other.hi, np.inf)),
        np.where(above, power.doubts, np.where(below, other.doubts, NOTHING_KNOWN)),
    )
