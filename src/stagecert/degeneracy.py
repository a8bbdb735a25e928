"""Where bounds meet, fractions do not matter for the value but do for the gradient.

Such entries can hold a search at spurious minimisers of psi_0. The sets K_gamma and C name them;
Escape-Exact-Local-Min and Fix-Degeneracy move their fractions to the corner that lets the search
go on.
"""

import enum
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert.certificate import Evaluation, complementarity_of
from stagecert.problem import Problem
from stagecert.reformulation import Point, complementarity, linearise


def degenerate(evaluation: Evaluation, gamma) -> tuple:
    """K_gamma(s, theta) as a mask for each block: width <= gamma, complementarity > 0."""
    return tuple(
        (width <= gamma) & (r > 0)
        for width, r in zip(evaluation.done.widths(), complementarity_of(evaluation), strict=True)
    )


def degenerate_for(evaluation: Evaluation, q) -> tuple:
    """C(s, theta, q) as a mask for each block: complementarity > 2 q * width."""
    return tuple(
        r > 2 * q * width
        for width, r in zip(evaluation.done.widths(), complementarity_of(evaluation), strict=True)
    )


def any_entry(masks: tuple):
    """Whether any entry of any block is marked."""
    return jax.tree.reduce(jnp.logical_or, jax.tree.map(jnp.any, masks), jnp.array(False))


def escape_exact_local_min(problem: Problem, point: Point) -> Point:
    """Moves fractions of zero-width entries to the corner their multiplier asks for.

    Forward stays the same, and K_0 is empty afterwards. Two passes.
    """
    _, back = linearise(problem, point)
    return Point(point.inputs, back(1, jnp.inf).shares)


class FixStatus(enum.IntEnum):
    """How Fix-Degeneracy ended."""

    FAILURE = 0
    SUCCESS = 1


class Fixed(eqx.Module):
    """What Fix-Degeneracy returns: a point no worse than before, and a status (FixStatus)."""

    point: Point
    status: Any
    progress: Any


def fix_degeneracy(problem: Problem, point: Point, q) -> Fixed:
    """Corrects entries whose complementarity is large against their width (Fix-Degeneracy).

    omega_i sums over later *blocks*: entries of one block do not feed each other. The status is
    SUCCESS if the objective fell by at least v and the predicted multipliers were right to within
    q * omega_0. Four passes.
    """
    done, back = linearise(problem, point)
    sweep = back(1, q)
    v = jnp.zeros_like(done.value)
    for g, theta, share, width in zip(
        sweep.multipliers, point.fractions, sweep.shares, done.widths(), strict=True
    ):
        v = v + 0.5 * jnp.sum(jnp.where(share != theta, complementarity(g, theta) * width, 0))
    fixed = Point(point.inputs, sweep.shares)
    done_hat, back_hat = linearise(problem, fixed)
    actual = back_hat(0, 0)
    # Both tests are equalities where nothing but zero widths was corrected; rounding must not
    # fail them.
    eps = 100 * jnp.finfo(done.value.dtype).eps
    progressed = done_hat.value <= done.value - v + eps * (1 + jnp.abs(done.value))
    predicted = jnp.array(True)
    for g, g_hat in zip(sweep.multipliers, actual.multipliers, strict=True):
        slack = q * sweep.moved + eps * (1 + jnp.abs(g))
        predicted = predicted & jnp.all(jnp.abs(g - g_hat) <= slack)
    success = progressed & predicted
    where = jax.tree.map(lambda new, old: jnp.where(progressed, new, old), fixed, point)
    status = jnp.where(success, int(FixStatus.SUCCESS), int(FixStatus.FAILURE))
    return Fixed(where, status, v)
