"""The greedy step: policy iteration over the stages.

Sweep back with the consistent rule; send every fraction to its corner and the inputs to the
minimiser of the linearisation; search the segment to that point. This is Fix-Degeneracy with q =
0 joined to a conditional-gradient step in the inputs, and exact in a step or two where the
optimum has no kinks.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import tree
from stagecert.certificate import Evaluation, evaluate, passes_of_evaluate
from stagecert.reformulation import Point
from stagecert.solvers.base import AbstractSolver, Report, report


class _Trials(eqx.Module):
    """The trial just made, how many there were, and the best bound that any of them proved."""

    last: Evaluation
    count: Any
    bound: Any
    proposal: Any


class Greedy(AbstractSolver):
    """Greedy steps with a halving line search; stuck when no trial is lower.

    Attributes:
        halvings: how often the step of the inputs, and then the whole step, is halved.
    """

    name: ClassVar[str] = "greedy"
    halvings: int = 6
    patience: int = 50
    progress: float = 0.99

    def init(self, problem, point):
        evaluation = evaluate(problem, point, with_gradient=False)
        return evaluation, report(evaluation, passes_of_evaluate(with_gradient=False))

    def step(self, problem, state: Evaluation):
        def trial_point(trial) -> Point:
            # First the whole step. Then shorten the step of the inputs alone: where bounds meet,
            # the corners are right whatever the inputs do. Then shorten everything.
            halvings = jnp.where(trial <= self.halvings, trial, trial - self.halvings)
            share = 2.0 ** -halvings.astype(state.value.dtype)
            joint = jnp.where(trial <= self.halvings, 1, share)
            return Point(
                tree.between(state.point.inputs, state.minimiser, share),
                tree.between(state.point.fractions, state.consistent.shares, joint),
            )

        def attempt(trials: _Trials) -> _Trials:
            new = evaluate(problem, trial_point(trials.count), with_gradient=False)
            better = new.bound > trials.bound
            return _Trials(
                new,
                trials.count + 1,
                jnp.where(better, new.bound, trials.bound),
                tree.select(better, new.proposal(), trials.proposal),
            )

        def lower(new: Evaluation):
            return (new.value < state.value) & (new.crossing.amount == 0)

        none = _Trials(state, jnp.array(0, jnp.int32), state.bound, state.proposal())
        trials = jax.lax.while_loop(
            lambda t: (t.count == 0) | (~lower(t.last) & (t.count <= 2 * self.halvings)),
            attempt,
            none,
        )
        new, stuck = trials.last, ~lower(trials.last)
        found = Report(
            new.point,
            new.value,
            new.crossing,
            trials.bound,
            trials.proposal,
            trials.count * passes_of_evaluate(with_gradient=False),
            stuck,
            new.feasible,
        )
        return tree.select(stuck, state, new), found
