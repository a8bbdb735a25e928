"""Slope ascent: the lower bound as a function of the nonsmooth pieces' slopes, raised by Adam.

A proposer for the dual side alone: the point stays where it is, so let another solver find that.
With affine stages and relu pieces this is the method of alpha-CROWN.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import pieces
from stagecert.certificate import evaluate, passes_of_evaluate
from stagecert.reformulation import Point
from stagecert.solvers.base import AbstractSolver, report


class AscentState(eqx.Module):
    """The point, the slopes, and Adam's averages."""

    point: Point
    slopes: Any
    mean: Any
    square: Any
    count: Any


class SlopeAscent(AbstractSolver):
    """Projected Adam on the slopes of `lower_bound` at a fixed point.

    Attributes:
        size: first step, in units of the slopes, which are weights in [0, 1].
        decay: factor on the step after each iteration.
    """

    name: ClassVar[str] = "slope_ascent"
    size: float = 0.2
    decay: float = 0.98
    patience: int = 30
    progress: float = 0.99

    def init(self, problem, point):
        evaluation = evaluate(problem, point, with_gradient=False)
        slopes = evaluation.done.records
        zeros = jax.tree.map(jnp.zeros_like, slopes)
        state = AscentState(point, slopes, zeros, zeros, jnp.zeros_like(evaluation.value))
        return state, report(evaluation, passes_of_evaluate(with_gradient=False))

    def step(self, problem, state: AscentState):
        def bound(slopes):
            evaluation = evaluate(
                problem, state.point, pieces.given_slopes, slopes, with_gradient=False
            )
            return evaluation.bound, evaluation

        gradient, evaluation = jax.grad(bound, has_aux=True)(state.slopes)
        found = report(
            evaluation,
            2 * passes_of_evaluate(with_gradient=False),
            stuck=not jax.tree.leaves(state.slopes),
        )
        count = state.count + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, state.square, gradient)
        size = self.size * self.decay**state.count

        def moved(w, m, s):
            m, s = m / (1 - 0.9**count), s / (1 - 0.999**count)
            return w + size * m / (jnp.sqrt(s) + jnp.finfo(s.dtype).tiny ** 0.5)

        slopes = jax.tree.map(moved, state.slopes, mean, square)
        slopes = jax.tree.map(pieces.nearest_weights, slopes, is_leaf=pieces.is_weights)
        return AscentState(state.point, slopes, mean, square, count), found
