"""Mirror steps: for objectives with infinite slopes at the border, such as entropy.

Inputs move in coordinates x in which the border is infinitely far away (stagecert.inside): minus
the gradient is then the step that minimises linear terms plus the entropy of the set, and exact in
one step for an entropy plus linear terms. What curvature the rest of the problem adds is learned
from the last steps by Anderson's extrapolation of the residuals. Fractions go to their corners, as
in greedy steps. One trial a step: a rejected one shortens the next.

Side constraints are taken by their augmented Lagrangian, whose multipliers move when it is nearly
minimised, as in stagecert.solvers.polish.
"""

from dataclasses import replace
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
from stagecert.sides import SideRule, Sides, augmented, missed
from stagecert.solvers.base import AbstractSolver, guide_of, repaired_report


class MirrorState(eqx.Module):
    """The evaluation where the search stands, the last steps, and the residuals' changes.

    `centre`, `tau` and `hidden` are of side constraints, as in `PolishState`.
    """

    here: Evaluation
    steps: Any
    turns: Any
    size: Any
    centre: Sides
    tau: Any
    hidden: Any


class Mirror(AbstractSolver):
    """Mirror steps with extrapolation; the set of inputs must be seen from inside.

    Attributes:
        pairs: how many steps the extrapolation remembers.
        tau: first width of the augmented Lagrangian, in units of each constraint.
        shrink: factor on the width when moving the multipliers no longer halves what it hides.
    """

    name: ClassVar[str] = "mirror"
    pairs: int = 6
    tau: float = 0.1
    shrink: float = 0.5
    patience: int = 10
    progress: float = 0.9

    def init(self, problem, point):
        point = Point(problem.inputs.project(point.inputs), point.fractions)
        dtype = jax.tree.leaves(point)[0].dtype
        centre, tau = guide_of(problem).centre, jnp.asarray(self.tau, dtype)
        here = self._evaluated(problem, point, centre, tau)
        flat, _ = jax.flatten_util.ravel_pytree(point.inputs)
        empty = jnp.zeros((self.pairs, flat.size), flat.dtype)
        infinity = jnp.full((), jnp.inf, dtype)
        one = jnp.ones_like(here.value)
        state = MirrorState(here, empty, empty, one, centre, tau, infinity)
        return state, repaired_report(problem, here, passes_of_evaluate(with_gradient=False))

    def _evaluated(self, problem: Problem, point: Point, centre: Sides, tau) -> Evaluation:
        widths = jax.tree.map(lambda w: tau * w, guide_of(problem).widths)
        rule: SideRule = augmented(centre, widths)
        return evaluate(problem, point, with_gradient=False, rule=rule)

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
        new = self._evaluated(problem, target, state.centre, state.tau)
        turn = residual(new) - now
        usable = jnp.all(jnp.isfinite(turn)) & jnp.isfinite(new.done.total)
        moved = jax.flatten_util.ravel_pytree(target.inputs)[0] - flat
        before = here.done.total
        rounding = 10 * jnp.finfo(flat.dtype).eps * (1 + jnp.abs(before))
        promised = jnp.minimum(-(now @ moved), 0)
        lower = new.done.total <= before + 1e-4 * promised + rounding
        good = usable & lower & (new.crossing.amount == 0)
        # How fast the residual falls along the step: one over the step size that would end it.
        steep = -jnp.sum(weights * step * turn)
        length = jnp.sum(weights * step**2)
        ideal = length / jnp.where(steep > 0, steep, 1)
        size = state.size
        grown = jnp.clip(jnp.where(steep > 0, ideal, 2 * size), 0.1 * size, 10 * size)
        shrunk = jnp.clip(jnp.where(steep > 0, ideal, 0), 0.01 * size, 0.25 * size)
        taught = replace(
            state,
            here=new,
            steps=jnp.roll(state.steps, 1, axis=0).at[0].set(step),
            turns=jnp.roll(state.turns, 1, axis=0).at[0].set(turn),
            size=grown,
        )
        empty = jnp.zeros_like(state.steps)
        forgotten = replace(state, steps=empty, turns=empty, size=shrunk)
        stuck = ~good & (state.size < 1e-9)
        found = repaired_report(problem, new, passes_of_evaluate(with_gradient=False), stuck)
        state = tree.select(good, taught, forgotten)
        return (self._recentred(problem, state) if jax.tree.leaves(state.centre) else state), found

    def _recentred(self, problem: Problem, state: MirrorState) -> MirrorState:
        """Moves the multipliers if the augmented Lagrangian is solved to what it hides."""
        here = state.here
        widths = guide_of(problem).widths
        hidden = missed(here.done.held, here.done.sides)
        moved = jax.tree.map(
            lambda l, c, w: jnp.sum(state.tau * w / 2 * (l - c) ** 2),
            here.done.held,
            state.centre,
            widths,
        )
        hidden = jax.tree.reduce(jnp.add, moved, hidden)
        rounding = 10 * jnp.finfo(here.value.dtype).eps * (1 + jnp.abs(here.value))
        ready = (here.lagrangian_gap <= 3 * hidden) & (hidden > rounding)

        def recentred():
            slow = hidden > 0.5 * state.hidden
            tau = jnp.where(slow, state.tau * self.shrink, state.tau)
            again = self._evaluated(problem, here.point, here.done.held, tau)
            return replace(state, here=again, centre=here.done.held, tau=tau, hidden=hidden)

        return jax.lax.cond(ready, recentred, lambda: state)

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
