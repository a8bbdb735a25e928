"""Functions of JAX whose bodies hide their curvature, known by their bodies."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.curvature.functions import logarithm, root
from stagecert.curvature.lattice import (
    CONCAVE,
    CONVEX,
    NOTHING_KNOWN,
    Known,
    cleared,
    known,
    outward,
    unknown,
)
from stagecert.curvature.powers import whole_power
from stagecert.curvature.sums import plus, times
from stagecert.jaxprs import body_of_call

# -- functions of JAX that are known by their bodies -----------------------------------------------


def _logaddexp(x: Known, y: Known) -> Known:
    lo = np.maximum(x.lo, y.lo)
    hi = np.logaddexp(x.hi, y.hi)
    lo, hi = outward(lo, hi, np.where(np.isfinite(hi), np.abs(hi), 0) + 1, 4)
    lo = np.maximum(lo, np.maximum(x.lo, y.lo))
    convex = x.has(CONVEX) & y.has(CONVEX)
    return known(lo, hi, np.where(convex, NOTHING_KNOWN ^ CONVEX, NOTHING_KNOWN))


def _hypot(x: Known, y: Known) -> Known:
    return root(plus(whole_power(x, 2), whole_power(y, 2)))


def _xlogy(x: Known, y: Known) -> Known:
    if x.constant:
        return times(x, logarithm(y))
    if x.origin.same(y.origin):
        shape = np.broadcast_shapes(x.shape, y.shape)
        affine = x.has(CONVEX | CONCAVE)
        return known(
            np.full(shape, -1.0), np.inf, np.where(affine, NOTHING_KNOWN ^ CONVEX, NOTHING_KNOWN)
        )
    return unknown(np.broadcast_shapes(x.shape, y.shape))


_ATOMS: dict[str, tuple[Callable, Callable]] = {
    "logaddexp": (jnp.logaddexp, _logaddexp),
    "hypot": (jnp.hypot, _hypot),
    "xlogy": (jax.scipy.special.xlogy, _xlogy),
}


@lru_cache(maxsize=256)
def _genuine(avals: tuple) -> dict[str, str]:
    """The bodies of JAX's own functions for arguments of the given kinds."""
    arguments = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals]
    bodies = {}
    for name, (function, _) in _ATOMS.items():
        for equation in jax.make_jaxpr(function)(*arguments).jaxpr.eqns:
            body = body_of_call(equation)
            if body is not None and len(equation.invars) == len(avals):
                bodies[str(body[0])] = name
    return bodies


def recognised(equation, values: list[Known]) -> tuple[str, Known] | None:
    """The rule of one of JAX's functions, if this call has the same body."""
    body, consts = body_of_call(equation) or (None, ())
    if body is None or len(values) != 2 or len(consts) or len(body.eqns) > 40:
        return None
    avals = tuple(
        (a.aval.shape, str(a.aval.dtype), bool(getattr(a.aval, "weak_type", False)))
        for a in equation.invars
    )
    if not all(d.startswith("float") for _, d, _ in avals):
        return None
    try:
        name = _genuine(avals).get(str(body))
    except (TypeError, ValueError):  # shapes that do not go together
        return None
    if name is None:
        return None
    with np.errstate(all="ignore"):
        return name, _ATOMS[name][1](*values)


@lru_cache(maxsize=64)
def _traced_relative_entropy(avals: tuple):
    arguments = [jax.ShapeDtypeStruct(s, np.float64) for s in avals]
    return jax.make_jaxpr(jax.scipy.special.rel_entr)(*arguments)


def relative_entropy(walker, out: Known) -> Known:
    """x log(x / y), which JAX writes out in cases: recognised if it is the same expression.

    It is convex in both together, and falls with y.
    """
    try:
        _, (_, _, where_positive) = walker.made[out.origin.number]
        _, (_, second) = walker.made[where_positive.origin.number]
        _, (first, other) = walker.made[second.origin.number]
        _, (_, _, x) = walker.made[first.origin.number]
        _, (_, _, y) = walker.made[other.origin.number]
    except (KeyError, ValueError):
        return out
    if x.shape != out.shape or y.shape != out.shape:
        return out
    (same,) = walker.plainly(_traced_relative_entropy((x.shape, y.shape)), [x, y])
    if not out.origin.same(same.origin):
        return out
    return cleared(out, x.has(CONVEX | CONCAVE) & y.has(CONCAVE), CONVEX)
