"""The solver: a programme's solution, evaluated once."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.certificate import Proposal, evaluate, passes_of_evaluate
from stagecert.problem import Problem, as_arrays
from stagecert.programme.quadratic import minimise
from stagecert.programme.values import NoProgrammeError
from stagecert.programme.writing import Found, found_from, written
from stagecert.reformulation import Point
from stagecert.repairing import fractions_of
from stagecert.sides import with_multipliers
from stagecert.solvers.base import AbstractSolver, guide_of, repaired_report


class Programme(AbstractSolver):
    """An interior-point method for problems that are sparse linear or quadratic programmes.

    Its one step evaluates the programme's solution, which the loop on the host asks for (`propose`)
    and puts into the state. Other problems it leaves as they are.
    """

    name: ClassVar[str] = "programme"
    patience: int = 0
    progress: float = 1.0

    def init(self, problem, point):
        rule = with_multipliers(guide_of(problem).centre)
        exact = evaluate(problem, point, with_gradient=False, rule=rule)
        found = repaired_report(problem, exact, passes_of_evaluate(with_gradient=False))
        done = exact.done
        return Found(point.inputs, done.blocks, done.records, done.held), found

    def step(self, problem, state: Found):
        # The solution's own lower and upper bounds may be looser than the true ones.
        inputs = problem.inputs.project(state.inputs)
        point = Point(inputs, fractions_of(problem, inputs, state.blocks))
        exact = evaluate(
            problem,
            point,
            pieces.given_slopes,
            state.slopes,
            with_gradient=False,
            rule=with_multipliers(state.sides),
        )
        passes = 1 + passes_of_evaluate(with_gradient=False)
        return state, repaired_report(problem, exact, passes, stuck=True)

    def propose(self, problem: Problem, like: Proposal, over: Callable[[], bool]):
        """The solution, arranged as `like`, or None; on the host, for one problem."""
        try:
            with jax.enable_x64(True), np.errstate(all="ignore"):
                plain = as_arrays(replace(problem, guide=None), jnp.float64)
                programme = written(plain)
                found = minimise(programme.quadratic(), over)
                return None if found is None else found_from(programme, found, like)
        except NoProgrammeError:
            return None


def with_programme(solver: AbstractSolver, batch: bool) -> tuple[AbstractSolver, ...]:
    """A solver and `Programme`, in the order that suits.

    One programme is best solved at once. Many are searched side by side, and those that stall are
    solved one by one.
    """
    return (solver, Programme()) if batch else (Programme(), solver)
