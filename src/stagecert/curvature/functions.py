"""Rules for functions of one number, maxima and choices."""

from dataclasses import replace

import numpy as np
import scipy.special as special

from stagecert import pieces
from stagecert.curvature.lattice import (
    CONCAVE,
    CONSTANT,
    CONVEX,
    LOG_CONVEX,
    NOTHING_KNOWN,
    ROOT_CONVEX,
    RULES,
    Known,
    cleared,
    composed,
    constant,
    known,
    negative,
    rule,
    unknown,
)
from stagecert.curvature.sums import monotone, shifted_at, times, whole_power

# -- maxima ----------------------------------------------------------------------------------------


@rule("max", pieces.pair_p.name)
def larger(x: Known, y: Known, **_) -> Known:
    doubts = x.doubts | y.doubts | CONCAVE
    doubts = np.where(x.lo >= y.hi, x.doubts, np.where(y.lo >= x.hi, y.doubts, doubts))
    return known(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi), doubts)


@rule("min")
def smaller(x: Known, y: Known, **_) -> Known:
    return negative(larger(negative(x), negative(y)))


@rule("clamp")
def _clamp(low: Known, x: Known, high: Known, **_) -> Known:
    return smaller(larger(x, low), high)


@rule("reduce_max")
def _reduce_max(x: Known, axes, **_) -> Known:
    single = all(x.shape[a] == 1 for a in axes)
    doubts = np.bitwise_or.reduce(x.doubts, axis=axes) | (0 if single else CONCAVE)
    constant_all = (np.bitwise_or.reduce(x.doubts, axis=axes) & CONSTANT) == 0
    doubts = np.where(constant_all, 0, doubts)
    return known(x.lo.max(axis=axes), x.hi.max(axis=axes), doubts)


@rule("reduce_min")
def _reduce_min(x: Known, axes, **_) -> Known:
    return negative(_reduce_max(negative(x), axes))


@rule(pieces.max_p.name)
def _max_last(x: Known, **_) -> Known:
    return _reduce_max(x, (len(x.shape) - 1,))


@rule(pieces.allocation_p.name)
def _allocation(x: Known, caps: Known, **_) -> Known:
    last = len(x.shape) - 1
    found = _reduce_max(x, (last,))
    # A mean of the entries, with the best weights; by the caps it bends in other ways.
    fixed = np.all((caps.doubts & CONSTANT) == 0, axis=last)
    doubts = np.where(fixed, found.doubts, NOTHING_KNOWN)
    return known(x.lo.min(axis=last), found.hi, doubts)


@rule("cummax")
def _cummax(x: Known, axis, reverse, **_) -> Known:
    turn = (lambda a: np.flip(a, axis)) if reverse else (lambda a: a)
    lo, hi = (turn(np.maximum.accumulate(turn(e), axis=axis)) for e in (x.lo, x.hi))
    doubts = turn(np.bitwise_or.accumulate(turn(x.doubts), axis=axis))
    return known(lo, hi, np.where((doubts & CONSTANT) > 0, doubts | CONCAVE, doubts))


@rule("cummin")
def _cummin(x: Known, axis, reverse, **_) -> Known:
    return negative(_cummax(negative(x), axis, reverse))


# -- functions of one number -----------------------------------------------------------------------


@rule("exp2")
def _exp2(x: Known, **_) -> Known:
    return exponential(times(x, constant(np.log(2.0))))


@rule("exp")
def exponential(x: Known, **_) -> Known:
    out = monotone(x, np.exp, CONCAVE, floor=0)
    out = cleared(out, x.has(CONVEX), LOG_CONVEX | ROOT_CONVEX)
    note = shifted_at(x, "difference")
    return out if note is None else replace(out, shifted=replace(note, stage="exponential"))


@rule("expm1")
def _expm1(x: Known, **_) -> Known:
    return monotone(x, np.expm1, CONCAVE, floor=-1)


@rule("log")
def logarithm(x: Known, **_) -> Known:
    out = monotone(x, np.log, CONVEX)
    out = cleared(out, x.has(LOG_CONVEX) & (x.lo >= 0), CONVEX, logarithm_of=x.origin)
    note = shifted_at(x, "exponential")
    return out if note is None else replace(out, shifted=replace(note, stage="logarithm"))


@rule("log1p")
def _log1p(x: Known, **_) -> Known:
    return cleared(monotone(x, np.log1p, CONVEX), x.has(LOG_CONVEX) & (x.lo >= 0), CONVEX)


@rule("sqrt")
def root(x: Known, **_) -> Known:
    out = monotone(x, np.sqrt, CONVEX, floor=0)
    out = cleared(out, x.has(ROOT_CONVEX) & (x.lo >= 0), CONVEX)
    return cleared(out, x.has(LOG_CONVEX) & (x.lo >= 0), CONVEX | LOG_CONVEX | ROOT_CONVEX)


@rule("rsqrt")
def _rsqrt(x: Known, **_) -> Known:
    return monotone(x, lambda e: 1 / np.sqrt(np.maximum(e, 0)), CONCAVE, up=False, floor=0)


def _sigmoid_like(x: Known, function, floor, ceiling) -> Known:
    """Convex up to zero, concave from there; nondecreasing."""
    doubts = np.where(x.hi <= 0, CONCAVE, np.where(x.lo >= 0, CONVEX, CONVEX | CONCAVE))
    return monotone(x, function, doubts, True, floor, ceiling)


for _name, _function, _floor, _ceiling in (
    ("logistic", special.expit, 0.0, 1.0),
    ("tanh", np.tanh, -1.0, 1.0),
    ("erf", special.erf, -1.0, 1.0),
    ("atan", np.arctan, -np.inf, np.inf),
    ("asinh", np.arcsinh, -np.inf, np.inf),
    ("cbrt", np.cbrt, -np.inf, np.inf),
):
    RULES[_name] = lambda x, _f=_function, _l=_floor, _h=_ceiling, **_: _sigmoid_like(x, _f, _l, _h)


@rule("sinh")
def _sinh(x: Known, **_) -> Known:
    doubts = np.where(x.lo >= 0, CONCAVE, np.where(x.hi <= 0, CONVEX, CONVEX | CONCAVE))
    return monotone(x, np.sinh, doubts)


@rule("cosh")
def _cosh(x: Known, **_) -> Known:
    out = composed(x, np.ones(x.shape), np.inf, np.full(x.shape, CONCAVE), x.lo >= 0, x.hi <= 0)
    # exp(x) + exp(-x) is a sum of two log-convex values where x is affine.
    return cleared(out, x.has(CONVEX | CONCAVE), LOG_CONVEX | ROOT_CONVEX)


@rule("abs")
def _abs(x: Known, **_) -> Known:
    turned = negative(x)
    lo = np.maximum(np.maximum(x.lo, turned.lo), 0)
    hi = np.maximum(np.abs(x.lo), np.abs(x.hi))
    doubts = np.where(x.lo >= 0, x.doubts, np.where(x.hi <= 0, turned.doubts, 0))
    mixed = composed(x, lo, hi, np.full(x.shape, CONCAVE), False, False)
    signed = (x.lo >= 0) | (x.hi <= 0)
    out = known(lo, hi, np.where(signed, doubts, mixed.doubts))
    return replace(out, shifted=x.shifted, origin=x.origin) if (x.lo >= 0).all() else out


@rule("pow")
def _pow(x: Known, y: Known, **_) -> Known:
    shape = np.broadcast_shapes(x.shape, y.shape)
    if y.exact and np.unique(y.lo).size == 1:
        p = float(y.lo.flat[0])
        if p == int(p) and abs(p) < 2**20:
            return whole_power(spread_to(x, shape), int(p))
        return _real_power(spread_to(x, shape), p)
    if x.exact and (x.lo > 0).all():
        # base ** y = exp(y log(base))
        return exponential(times(y, constant(np.log(x.lo))))
    return unknown(shape)


def spread_to(x: Known, shape) -> Known:
    """Broadcast, where a scalar meets an array."""
    if x.shape == tuple(shape):
        return x
    parts = (np.broadcast_to(p, shape) for p in (x.lo, x.hi, x.doubts))
    return known(*parts)


def _real_power(x: Known, p: float) -> Known:
    """x ** p for p not whole: not a number where x < 0, so x counts as nonnegative."""

    def power(e):
        return np.maximum(e, 0) ** p

    if not x.whole and (x.lo < 0).any():
        return unknown(x.shape)  # minus infinity has powers

    if 0 < p < 1:
        out = monotone(x, power, CONVEX, floor=0)
    elif p < 0:
        out = monotone(x, power, CONCAVE, up=False, floor=0)
    else:
        out = monotone(x, power, CONCAVE, floor=0)
        # Left of zero there is no value, as if it were infinite: it does not grow there.
        sure = (x.lo >= 0) | x.has(CONVEX | CONCAVE)
        out = replace(out, doubts=np.where(sure, out.doubts, out.doubts | CONVEX).astype(np.uint8))
    if p < 0:
        return out
    if p >= 2:
        out = cleared(out, out.has(CONVEX) & (x.lo >= 0), ROOT_CONVEX)
    return cleared(out, x.has(LOG_CONVEX) & (x.lo >= 0), CONVEX | LOG_CONVEX | ROOT_CONVEX)


# -- choices ---------------------------------------------------------------------------------------


def _decided(yes, no, x: Known, y: Known) -> Known:
    """A comparison: 1 where it must hold, 0 where it cannot, in doubt elsewhere.

    What is not a number compares as false with anything, and decides nothing here.
    """
    yes, no = yes & x.whole & y.whole, no & x.whole & y.whole
    fixed = yes | no | (x.has(CONSTANT) & y.has(CONSTANT))
    lo, hi = np.where(yes, 1, 0), np.where(no, 0, 1)
    return known(lo, hi, np.where(fixed, 0, NOTHING_KNOWN))


@rule("lt")
def _lt(x: Known, y: Known, **_) -> Known:
    return _decided(x.hi < y.lo, x.lo >= y.hi, x, y)


@rule("le")
def _le(x: Known, y: Known, **_) -> Known:
    return _decided(x.hi <= y.lo, x.lo > y.hi, x, y)


@rule("gt")
def _gt(x: Known, y: Known, **_) -> Known:
    return _lt(y, x)


@rule("ge")
def _ge(x: Known, y: Known, **_) -> Known:
    return _le(y, x)


@rule("select_n")
def _select(which: Known, *cases: Known, **_) -> Known:
    shape = cases[0].shape
    choice = np.broadcast_to(which.lo, shape)
    decided = np.broadcast_to(which.has(CONSTANT) & (which.lo == which.hi), shape)
    joined = cases[0].doubts
    for case in cases[1:]:
        joined = joined | case.doubts
    # A choice that parameters make is one of the cases; one that variables make is anything.
    doubts = np.where(which.has(CONSTANT), joined, NOTHING_KNOWN)
    lo = np.minimum.reduce([c.lo for c in cases])
    hi = np.maximum.reduce([c.hi for c in cases])
    for number, case in enumerate(cases):
        here = decided & (choice == number)
        lo, hi = np.where(here, case.lo, lo), np.where(here, case.hi, hi)
        doubts = np.where(here, case.doubts, doubts)
    return known(lo, hi, doubts)


@rule("stop_gradient")
def _stop_gradient(x: Known, **_) -> Known:
    # The value is the same, but the slope that certificates would use is not: nothing is proven.
    doubts = np.where(x.has(CONSTANT), x.doubts, NOTHING_KNOWN).astype(np.uint8)
    return replace(x, doubts=doubts, logarithm_of=None, linear=None, quadratic=None, shifted=None)


@rule("convert_element_type")
def _convert(x: Known, new_dtype, **_) -> Known:
    if np.issubdtype(new_dtype, np.floating) or x.constant:
        return x if np.issubdtype(new_dtype, np.floating) else known(x.lo, x.hi, x.doubts)
    return unknown(x.shape)


@rule("copy", "copy_p", "reduce_precision")
def _copy(x: Known, **_) -> Known:
    return x
