"""The greedy step: policy iteration over the stages.

Sweep back with the consistent rule; send every fraction to its corner and the inputs to the minimiser of
the linearisation; search the segment to that point. This is Fix-Degeneracy with q = 0 joined to a
conditional-gradient step in the inputs, and exact in a step or two where the optimum has no kinks.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from stagecert import tree
from stagecert.certificate import Evaluation, crossing_of, evaluate, passes_of_evaluate
from stagecert.reformulation import Point, forward_pass
from stagecert.solvers.base import AbstractSolver, Report, report


class Greedy(AbstractSolver):
    """Greedy steps with a halving line search; stuck when no trial is lower.

    Attributes:
        halvings: how often the step of the inputs, and then the whole step, is halved.
    """

    name: ClassVar[str] = "greedy"
    halvings: int = 6
    patience: int = 50

    def init(self, problem, point):
        evaluation = evaluate(problem, point, with_gradient=False)
        return evaluation, report(evaluation, passes_of_evaluate(with_gradient=False))

    def step(self, problem, state: Evaluation):
        target = Point(state.minimiser, state.consistent.shares)
        # Optimistic: the whole segment, evaluated with its bound; a line search only if that fails.
        whole = evaluate(problem, target, with_gradient=False)
        cost = passes_of_evaluate(with_gradient=False)
        lower = (whole.value < state.value) & (whole.crossing.amount == 0)

        def near(trial) -> Point:
            # First shorten the step of the inputs alone: the corners are right whatever the inputs do
            # where bounds meet, and the whole way there may lead over a hill. Then shorten everything.
            share = 2.0 ** -(trial % self.halvings + 1)
            joint = jnp.where(trial < self.halvings, 1, share).astype(state.value.dtype)
            share = jnp.asarray(share, state.value.dtype)
            inputs = tree.between(state.point.inputs, target.inputs, share)
            return Point(inputs, tree.between(state.point.fractions, target.fractions, joint))

        def attempt(trial):
            done = forward_pass(problem, near(trial))
            good = (done.value < state.value) & (crossing_of(done).amount == 0)
            return trial, good

        def search():
            trial, _ = jax.lax.while_loop(
                lambda carry: ~carry[1] & (carry[0] < 2 * self.halvings - 1),
                lambda carry: attempt(carry[0] + 1),
                attempt(jnp.array(0, jnp.int32)),
            )
            return evaluate(problem, near(trial), with_gradient=False), trial + 1

        new, trials = jax.lax.cond(lower, lambda: (whole, jnp.array(0, jnp.int32)), search)
        stuck = ~(new.value < state.value)
        passes = cost + jnp.where(lower, 0, trials + cost)
        found = report(new, passes, stuck)
        # The far end of the segment may have proven more than the point that was taken.
        better = whole.bound > new.bound
        found = Report(
            found.point,
            found.value,
            found.crossing,
            jnp.where(better, whole.bound, new.bound),
            tree.select(better, whole.proposal(), new.proposal()),
            found.passes,
            stuck,
        )
        return tree.select(stuck, state, new), found
