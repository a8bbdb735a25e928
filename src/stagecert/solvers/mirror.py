"""Mirror steps: for objectives with infinite slopes at the border, such as entropy.

Inputs move in coordinates x in which the border is infinitely far away (stagecert.inside): minus
the gradient is then the step that minimises linear terms plus the entropy of the set, and exact in
one step for an entropy plus linear terms. What curvature the rest of the problem adds is learned
from the last steps by Anderson's extrapolation of the residuals. Fractions go to their corners, as
in greedy steps. One trial a step: a rejected one shortens the next.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp

from stagecert import tree
from stagecert.certificate import Evaluation, evaluate, passes_of_evaluate
from stagecert.inside import Inside
from stagecert.problem import Problem
from stagecert.reformulation import Point
from stagecert.solvers.base import AbstractSolver, report


class MirrorState(eqx.Module):
    """The evaluation where the search stands, the last steps, and the residuals' changes."""

    here: Evaluation
    steps: Any
    turns: Any
    size: Any


class Mirror(AbstractSolver):
    """Mirror steps with extrapolation; the set of inputs must be seen from inside.

    Attributes:
        pairs: how many steps the extrapolation remembers.
    """

    name: ClassVar[str] = "mirror"
    pairs: int = 6
    patience: int = 10
    progress: float = 0.9

    def init(self, problem, point):
        point = Point(problem.inputs.project(point.inputs), point.fractions)
        here = evaluate(problem, point, with_gradient=False)
        flat, _ = jax.flatten_util.ravel_pytree(point.inputs)
        empty = jnp.zeros((self.pairs, flat.size), flat.dtype)
        state = MirrorState(here, empty, empty, jnp.ones_like(here.value))
        return state, report(here, passes_of_evaluate(with_gradient=False))

    def step(self, problem: Problem, state: MirrorState):
        inputs = problem.inputs
        assert isinstance(inputs, Inside)
        here = state.here
        flat, back = jax.flatten_util.ravel_pytree(here.point.inputs)

        def residual(evaluation: Evaluation):
            of_inputs = inputs.residual(evaluation.point.inputs, evaluation.consistent.inputs)
            return jax.flatten_util.ravel_pytree(of_inputs)[0]

        weights = jax.flatten_util.ravel_pytree(inputs.softness(here.point.inputs))[0]
        now = residual(here)
        step = self._extrapolated(state, weights, now)
        target = Point(inputs.moved(here.point.inputs, back(step)), here.consistent.shares)
        new = evaluate(problem, target, with_gradient=False)
        turn = residual(new) - now
        usable = jnp.all(jnp.isfinite(turn)) & jnp.isfinite(new.value)
        moved = jax.flatten_util.ravel_pytree(target.inputs)[0] - flat
        rounding = 10 * jnp.finfo(flat.dtype).eps * (1 + jnp.abs(here.value))
        promised = jnp.minimum(-(now @ moved), 0)
        lower = new.value <= here.value + 1e-4 * promised + rounding
        good = usable & lower & (new.crossing.amount == 0)
        # How fast the residual falls along the step: one over the step size that would end it.
        steep = -jnp.sum(weights * step * turn)
        length = jnp.sum(weights * step**2)
        ideal = length / jnp.where(steep > 0, steep, 1)
        size = state.size
        grown = jnp.clip(jnp.where(steep > 0, ideal, 2 * size), 0.1 * size, 10 * size)
        shrunk = jnp.clip(jnp.where(steep > 0, ideal, 0), 0.01 * size, 0.25 * size)
        taught = MirrorState(
            new,
            jnp.roll(state.steps, 1, axis=0).at[0].set(step),
            jnp.roll(state.turns, 1, axis=0).at[0].set(turn),
            grown,
        )
        empty = jnp.zeros_like(state.steps)
        forgotten = MirrorState(here, empty, empty, shrunk)
        found = report(
            new,
            passes_of_evaluate(with_gradient=False),
            stuck=~good & (state.size < 1e-9),
        )
        return tree.select(good, taught, forgotten), found

    def _extrapolated(self, state: MirrorState, weights, now):
        """Anderson's step: the residual that the last steps cannot explain, and what they can."""
        root = jnp.sqrt(weights)
        # Columns of unit length: steps shrink by orders of magnitude as the search converges.
        lengths = jnp.sqrt(jnp.sum(weights * state.turns**2, axis=1))
        used = lengths > 0
        scale = jnp.where(used, 1 / jnp.where(used, lengths, 1), 0)
        steps, turns = scale[:, None] * state.steps, scale[:, None] * state.turns
        system = root * turns
        gram = system @ system.T + jnp.diag(jnp.where(used, 1e-10, 1.0).astype(now.dtype))
        shares = jnp.linalg.solve(gram, system @ (root * now))
        left = now - shares @ turns
        return state.size * left - shares @ steps
