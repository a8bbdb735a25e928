"""The paper's method as its appendix states it, and traces of the library's own search.

FISTA with backtracking on psi_0; all variables are fractions in [0, 1], the inputs too, and start
at 0.5; bounds are those of the linearised Lagrangian with multipliers as drawn, over the input set
and boxes of the blocks. Every problem has its own line search: with one step size for a batch, all
wait for the slowest.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.paper.methods.driver import Found, LaneMethod, Search, Trial
from benchmarks.paper.methods.relaxed import Lane, Shared, distances, problem_of
from stagecert import tree
from stagecert.certificate import Evaluation, certify, evaluate, passes_of_evaluate
from stagecert.degeneracy import FixStatus, any_entry, degenerate_for, fix_degeneracy
from stagecert.networks.bounding.relaxation import Segment, linear_objective
from stagecert.networks.bounding.search import default_solvers
from stagecert.problem import Problem
from stagecert.reformulation import (
    Point,
    forward,
    forward_pass,
    full_point,
    psi_0_and_gradient,
)
from stagecert.sets import Box
from stagecert.solvers import AbstractSolver, Backtracking
from stagecert.solvers.base import Report, paper_report, project


class LineSearch(Trial):
    """Projected gradients from one point with ever smaller steps.

    Attributes:
        start, value, gradient: the point, psi_0 and its gradient there.
        point: where the latest trial went.
        size, trials: its step size, and its number.
    """

    open: Any
    start: Point
    value: Any
    gradient: Point
    point: Point
    size: Any
    trials: Any


class _Momentum(eqx.Module):
    """x_k, y_(k+1), t_(k+1), the step size, and Fix-Degeneracy's threshold."""

    point: Point
    ahead: Point
    t: Any
    size: Any
    q: Any


class Fista(eqx.Module):
    """FISTA with backtracking, without safeguards; with Fix-Degeneracy if asked.

    A line search that comes down to the least step size takes that step. With `fix`, fractions are
    corrected after every step as in Safe-Psi-Minimization; the entries that this changes have no
    momentum. (Where both bounds are one line, fractions mean nothing, and most steps correct some.)

    Attributes:
        search: the line search; its defaults are the paper's.
        fix: whether Fix-Degeneracy runs.
        q: its first threshold; ten times larger after every failure.
    """

    search: Backtracking = Backtracking()
    fix: bool = eqx.field(static=True, default=False)
    q: float = 1.0

    def init(self, problem, point) -> tuple[_Momentum, Report]:
        """The state at a point, and what is known there."""
        evaluation = evaluate(problem, point)
        one = jnp.ones_like(evaluation.value)
        state = _Momentum(point, point, one, one * self.search.first, one * self.q)
        found = paper_report(problem, evaluation, passes_of_evaluate(), False, True)
        return state, found

    def first_trial(self, problem, state: _Momentum) -> LineSearch:
        """The begin of a step's line search, with the step size of the last one."""
        done, gradient = psi_0_and_gradient(problem, state.ahead)
        return self._tried(problem, state.ahead, done.value, gradient, state.size, 1)

    def next_trial(self, problem, last: LineSearch) -> LineSearch:
        """The same with a smaller step."""
        size = jnp.maximum(last.size * self.search.shrink, self.search.floor)
        return self._tried(problem, last.start, last.value, last.gradient, size, last.trials + 1)

    def _tried(self, problem, start, value, gradient, size, trials) -> LineSearch:
        """Is psi_0 below its quadratic model there?"""
        point = project(problem, tree.move(start, gradient, -size))
        d = tree.subtract(point, start)
        model = value + tree.dot(gradient, d) + tree.dot(d, d) / (2 * size)
        rounding = 10 * jnp.finfo(value.dtype).eps * jnp.abs(value)
        found = forward_pass(problem, point).value <= model + rounding
        again = ~found & (size > self.search.floor)
        return LineSearch(again, start, value, gradient, point, size, jnp.asarray(trials))

    def step(self, problem, state: _Momentum, taken: LineSearch) -> tuple[_Momentum, Report]:
        """Takes the step that a line search found."""
        t = (1 + jnp.sqrt(1 + 4 * state.t**2)) / 2
        at, q = evaluate(problem, taken.point), state.q
        if self.fix:
            at, q = _corrected(problem, at, q)
        momentum = jax.tree.map(
            lambda new, x, old: jnp.where(new == x, x - old, 0), at.point, taken.point, state.point
        )
        ahead = project(problem, tree.move(at.point, momentum, (state.t - 1) / t))
        size = jnp.where(taken.trials == 1, taken.size * self.search.grow, taken.size)
        passes = 2 + taken.trials + passes_of_evaluate()
        return _Momentum(at.point, ahead, t, size, q), paper_report(
            problem, at, passes, False, True
        )


def _corrected(problem, at: Evaluation, q) -> tuple[Evaluation, Any]:
    """Fix-Degeneracy where an entry's complementarity is large against its width."""
    needed = any_entry(degenerate_for(at, q))
    fixed = fix_degeneracy(problem, at.point, q)
    point = tree.select(needed, fixed.point, at.point)
    failed = needed & (fixed.status == int(FixStatus.FAILURE))
    return evaluate(problem, point), jnp.where(failed, 10 * q, q)


class Steps(Search):
    """A solver of the core on lanes."""

    solver: AbstractSolver | Fista
    measured: bool = eqx.field(static=True)
    look_every: int = eqx.field(static=True, default=0)

    def problem(self, shared: Shared, lane: Lane) -> Problem:
        """What the solver works on."""
        return problem_of(shared, lane)

    def inputs(self, lane: Lane, inputs):
        """The network's inputs that the solver's stand for."""
        return inputs

    def start(self, shared, lane):
        problem = self.problem(shared, lane)
        state, report = self.solver.init(problem, full_point(problem, None, lane.row.dtype))
        return state, self._found(shared, lane, report)

    def step(self, shared, lane, state, trial):
        state, report = self._stepped(self.problem(shared, lane), state, trial)
        return state, self._found(shared, lane, report)

    def _stepped(self, problem, state, trial):
        return self.solver.step(problem, state)

    def _found(self, shared: Shared, lane: Lane, report) -> Found:
        report = eqx.tree_at(
            lambda r: (r.point.inputs, r.proposal.point.inputs),
            report,
            replace_fn=lambda inputs: self.inputs(lane, inputs),
        )
        bound = jnp.where(jnp.isfinite(report.bound), report.bound, -jnp.inf)
        value = jnp.where(report.crossing.amount > 0, jnp.inf, report.value)
        seen = None
        if self.measured:
            inputs, fractions = report.point.inputs, report.point.fractions
            blocks = forward(problem_of(shared, lane), inputs, fractions)
            seen = distances(shared, lane, inputs, blocks)
        return Found(bound, report.proposal, value, report.point, seen)

    def bound_of(self, shared, lane, proof):
        return certify(problem_of(shared, lane), proof)[1]


class FistaSteps(Steps):
    """FISTA on lanes, its line search trial by trial, with inputs as fractions of their box.

    The step size is one for inputs and fractions, so it matters in which unit inputs are measured:
    in that of pixels, 8/255 is a short way, and steps that suit them are too short for fractions.
    """

    solver: Fista
    tries: ClassVar[bool] = True

    def first_trial(self, shared, lane, state):
        return self.solver.first_trial(self.problem(shared, lane), state)

    def next_trial(self, shared, lane, trial):
        return self.solver.next_trial(self.problem(shared, lane), trial)

    def _stepped(self, problem, state, trial):
        return self.solver.step(problem, state, trial)

    def problem(self, shared, lane):
        low, width = _box(lane)
        given = problem_of(shared, lane)
        stages = tuple(
            eqx.tree_at(lambda s: s.segment, stage, _OfFractions(stage.segment, low, width))
            for stage in given.stages
        )
        last = _OfFractions(shared.parts.last, low, width)
        inputs = Box(jnp.zeros_like(low), jnp.ones_like(low))
        return Problem(inputs, stages, linear_objective(last, lane.row))

    def inputs(self, lane, inputs):
        low, width = _box(lane)
        return lane.inputs.project(low + width * inputs)


def _box(lane: Lane):
    """(lower end, width) of the inputs' box."""
    return lane.inputs.lower, lane.inputs.upper - lane.inputs.lower


class _OfFractions(eqx.Module):
    """A segment as a function of the inputs' fractions."""

    segment: Segment
    low: Any
    width: Any

    def __call__(self, inputs, blocks):
        return self.segment(self.low + self.width * inputs, blocks)


class PaperMethod(LaneMethod):
    """The paper's method: FISTA, at most 50 steps.

    Args:
        fix_degeneracy: whether Fix-Degeneracy runs beside it.
        search: the line search.
        precision: of the search.
    """

    name = "paper"
    label = "NonConvex (paper)"
    limit = 50

    def __init__(
        self,
        fix_degeneracy: bool = False,
        search: Backtracking | None = None,
        precision: str = "float32",
    ):
        super().__init__(precision)
        self.solver = Fista(search or Backtracking(), fix_degeneracy)

    def refusal(self, problems):
        return None

    def search(self, shared, trace):
        return FistaSteps(self.solver, trace)


class PaperMethodFixed(PaperMethod):
    """The same with Fix-Degeneracy."""

    name = "paper_fixed"
    label = "NonConvex (paper), degeneracy fixed"

    def __init__(self, search: Backtracking | None = None, precision: str = "float32"):
        super().__init__(True, search, precision)


class OursTraced(LaneMethod):
    """The first solver of the library's default search, step by step: for traces.

    Its bounds are those of the core's certificate, in float64; `Ours` is what to time.
    """

    name = "ours_traced"
    label = "stagecert"
    limit = 500

    def refusal(self, problems):
        return None

    def search(self, shared, trace):
        straight = all(kind == "relu" for kind in shared.kinds)
        return Steps(default_solvers(straight)[0], trace)
