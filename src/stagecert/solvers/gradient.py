"""Simple-Psi-Minimization: projected gradients, with backtracking, and with FISTA's momentum."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import tree
from stagecert.certificate import Evaluation, evaluate, passes_of_evaluate
from stagecert.problem import Problem
from stagecert.reformulation import Point, forward_pass, psi_0_and_gradient
from stagecert.solvers.base import AbstractSolver, paper_report, project, step_progress


class Backtracking(eqx.Module):
    """The paper's line search: start from the last step size, shrink until the model holds.

    Attributes:
        first: step size of the first iteration.
        shrink, grow: factors after a failed trial, and after an iteration without one.
        floor: no smaller step size is tried.
    """

    first: float = 100.0
    shrink: float = 0.8
    grow: float = 1.5
    floor: float = 1e-5


class Stepped(eqx.Module):
    """A projected-gradient step that passed its test (`found`), or the last one tried."""

    point: Point
    value: Any
    size: Any
    trials: Any
    found: Any


def projected_step(
    problem: Problem, search: Backtracking, point: Point, value, gradient: Point, size
) -> Stepped:
    """Projected gradient from `point`, shrunk until psi_0 is below its quadratic model.

    Then the gain is at least delta_L with L = 1 / size. One pass for each trial.
    """
    eps = 10 * jnp.finfo(value.dtype).eps

    def attempt(size, trials) -> Stepped:
        target = project(problem, tree.move(point, gradient, -size))
        d = tree.subtract(target, point)
        reached = forward_pass(problem, target).value
        model = value + tree.dot(gradient, d) + tree.dot(d, d) / (2 * size)
        return Stepped(target, reached, size, trials, reached <= model + eps * jnp.abs(value))

    return jax.lax.while_loop(
        lambda last: ~last.found & (last.size > search.floor),
        lambda last: attempt(jnp.maximum(last.size * search.shrink, search.floor), last.trials + 1),
        attempt(size, jnp.array(1, jnp.int32)),
    )


def grown(search: Backtracking, stepped: Stepped):
    """The size that the next iteration tries first."""
    return jnp.where(stepped.trials == 1, stepped.size * search.grow, stepped.size)


class Simple(AbstractSolver):
    """Projected gradient descent with backtracking (Simple-Psi-Minimization).

    Attributes:
        search: the line search.
        smoothness: L, if known: then every step has size 1 / L and there is no line search.
        drawn: take the paper's multipliers, as drawn, for the bound; needs boxes around all blocks.
    """

    name: ClassVar[str] = "simple"
    search: Backtracking = Backtracking()
    smoothness: float | None = None
    drawn: bool = False
    patience: int = 200
    progress: float = 0.99

    def init(self, problem, point):
        evaluation = evaluate(problem, point)
        size = jnp.asarray(self.search.first, evaluation.value.dtype)
        found = paper_report(problem, evaluation, passes_of_evaluate(), False, self.drawn)
        return (evaluation, size), found

    def step(self, problem, state):
        evaluation, size = state
        gradient = evaluation.gradient()
        if self.smoothness is None:
            stepped = projected_step(
                problem, self.search, evaluation.point, evaluation.value, gradient, size
            )
            target, trials, stuck = stepped.point, stepped.trials, ~stepped.found
            size = grown(self.search, stepped)
        else:
            target = tree.move(evaluation.point, gradient, -1 / self.smoothness)
            target, trials, stuck = project(problem, target), 0, jnp.array(False)
        new = evaluate(problem, target)
        new = tree.select(stuck, evaluation, new)
        passes = trials + passes_of_evaluate()
        return (new, size), paper_report(problem, new, passes, stuck, self.drawn)


class Momentum(eqx.Module):
    """FISTA's state: where we are, the point before, t_k, and the step size."""

    evaluation: Evaluation
    previous: Point
    t: Any
    size: Any


class Accelerated(AbstractSolver):
    """FISTA with backtracking at the paper's settings, safeguarded.

    A step that gains less than the projected gradient would (delta_L with L = 1 / size) is replaced
    by a projected-gradient step, and the momentum starts anew.

    Attributes:
        search: the line search.
        drawn: take the paper's multipliers, as drawn, for the bound; needs boxes around all blocks.
    """

    name: ClassVar[str] = "accelerated"
    search: Backtracking = Backtracking()
    drawn: bool = False
    patience: int = 200
    progress: float = 0.99

    def init(self, problem, point):
        evaluation = evaluate(problem, point)
        one = jnp.ones_like(evaluation.value)
        state = Momentum(evaluation, point, one, one * self.search.first)
        return state, paper_report(problem, evaluation, passes_of_evaluate(), False, self.drawn)

    def step(self, problem, state: Momentum):
        here = state.evaluation
        t = (1 + jnp.sqrt(1 + 4 * state.t**2)) / 2
        ahead = tree.move(here.point, tree.subtract(here.point, state.previous), (state.t - 1) / t)
        ahead = project(problem, ahead)
        done, gradient = psi_0_and_gradient(problem, ahead)
        fast = projected_step(problem, self.search, ahead, done.value, gradient, state.size)

        sure = step_progress(problem, here.point, here.gradient(), 1 / fast.size)
        good = fast.found & (fast.value <= here.value - sure)

        def plain():
            return projected_step(
                problem, self.search, here.point, here.value, here.gradient(), state.size
            )

        taken = jax.lax.cond(good, lambda: fast, plain)
        trials = fast.trials + jnp.where(good, 0, taken.trials)
        stuck = ~taken.found
        new = tree.select(stuck, here, evaluate(problem, taken.point))
        state = Momentum(
            new, here.point, jnp.where(good, t, jnp.ones_like(t)), grown(self.search, taken)
        )
        passes = 2 + trials + passes_of_evaluate()
        return state, paper_report(problem, new, passes, stuck, self.drawn)
