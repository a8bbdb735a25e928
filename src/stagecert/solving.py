"""solve() and solve_batch(): one loop for every solver, stopping, batches, progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.assumptions import Examined, examine
from stagecert.batch import (
    Batch,
    BatchSolution,
    Certified,
    rows_of,
    stack,
    validate_batch,
    validate_batch_start,
)
from stagecert.certificate import shape_of_certificate
from stagecert.codes import CROSSED, INFEASIBLE
from stagecert.errors import ProblemError
from stagecert.evidence import Assumptions
from stagecert.guiding import Before, prepared
from stagecert.inside import seen_from_inside
from stagecert.lanes import Lane, certify_lanes
from stagecert.problem import Problem, as_arrays
from stagecert.programme.solver import Programme, with_programme
from stagecert.reformulation import Point, full_point
from stagecert.searching import Clock, Goal, Search, common_dtype, shown
from stagecert.solution import Solution, Status
from stagecert.solvers import (
    AbstractSolver,
    Accelerated,
    Damped,
    Greedy,
    Mirror,
    Polish,
    Safe,
    Simple,
    SlopeAscent,
)
from stagecert.validate import validate, validate_options, validate_start, validate_target

HAVE_MULTIPLIERS = (Mirror, Polish, Programme)  # for side constraints


def named_solver(
    solver, steep: bool = False, constrained: bool = False, batch: bool = False
) -> tuple[AbstractSolver, ...]:
    """The solvers to run one after the other: a name, an object, or a sequence of these.

    `steep` says that slopes may be infinite at the border of the inputs' set, where corners lie;
    `constrained`, that there are side constraints; `batch`, that there are many problems.
    """
    greedy = () if constrained else (Greedy(patience=0, progress=0.5),)
    names = {
        "auto": (Mirror(), Polish()) if steep else greedy + with_programme(Polish(), batch),
        "damped": (Damped(),),
        "greedy": (Greedy(),),
        "accelerated": (Accelerated(),),
        "simple": (Simple(),),
        "safe": (Safe(),),
        "mirror": (Mirror(),),
        "polish": (Polish(),),
        "programme": (Programme(),),
        "slope_ascent": (Greedy(patience=0, progress=0.5), SlopeAscent()),
    }
    if isinstance(solver, str):
        if solver not in names:
            raise ProblemError(f"Unknown solver '{solver}'; known are {', '.join(names)}.")
        return names[solver]
    if isinstance(solver, AbstractSolver):
        return (solver,)
    if isinstance(solver, Sequence) and solver:
        return tuple(s for e in solver for s in named_solver(e, steep, constrained, batch))
    raise ProblemError(
        f"solver must be a name, an AbstractSolver or a sequence of these, not {solver!r}."
    )


# -- what users call ------------------------------------------------------------------------------


def solve(
    problem: Problem,
    atol: float = 1e-6,
    rtol: float = 1e-4,
    *,
    solver: Any = "auto",
    start: Point | None = None,
    target: float | None = None,
    max_iterations: int = 1000,
    time_limit: float | None = None,
    rigorous: bool = False,
    check: bool = True,
) -> Solution:
    """Solves a problem to a certified gap: value - bound <= atol + rtol * |bound|.

    The search runs in the precision of the data; the value and the bound that are returned are
    evaluated in float64.

    Args:
        problem: what to solve.
        atol, rtol: absolute and relative tolerance on the gap.
        solver: "auto", "greedy", "polish", "programme", "mirror", "accelerated", "simple", "safe",
            "damped", "slope_ascent", a solver object, or a sequence of these to run one after the
            other. "auto" is greedy steps, then an interior-point method where the problem is a
            linear or quadratic programme, then polishing; no greedy steps with side constraints;
            and where slopes are infinite at the border of the inputs' set (entropy), mirror steps
            first. Side constraints need multipliers, which "auto", "polish", "programme" and
            "mirror" have.
        start: where to start; by default the centre of the set, fractions 0.5.
        target: stop as soon as `bound > target` (proven) or `value <= target` (cannot be proven).
        max_iterations: limit on the steps of all solvers together.
        time_limit: seconds, looked at every few iterations.
        rigorous: evaluate the bound in interval arithmetic. It then holds in real arithmetic,
            whatever was rounded, as long as the problem is convex as declared.
        check: prove what can be proven of the problem's convexity, and probe the rest along random
            segments, once for each shape; `solution.assumptions` says what came of it. False: the
            convexity is yours alone.

    Raises:
        ProblemError: bad input, or functions that are not convex or concave as they should be,
            before any work; with `rigorous`, also functions of JAX that have no enclosure, by name.

    >>> import stagecert as sc
    >>> problem = sc.Problem(sc.Ball([3.0, 4.0], 1.0), (), lambda s, z: s @ s)
    >>> solution = sc.solve(problem)
    >>> round(solution.value, 3), solution.status.name
    (16.0, 'GAP_REACHED')
    """
    validate(problem)
    validate_start(problem, start)
    if rigorous:
        _refuse_what_has_no_enclosure(problem)
    batch = _solve(
        problem, None, 1, None if start is None else _one_lane(start), atol, rtol, solver, target,
        max_iterations, time_limit, False, rigorous, examine(problem, None, check),
    )  # fmt: skip
    return batch[0]


def _one_lane(start: Point) -> Point:
    return jax.tree.map(lambda x: np.asarray(x)[None], start)


def solve_batch(
    problems: "Batch | Sequence[Problem]",
    atol: float = 1e-6,
    rtol: float = 1e-4,
    *,
    solver: Any = "auto",
    start: Point | None = None,
    target: Any = None,
    max_iterations: int = 1000,
    time_limit: float | None = None,
    progress: bool | Callable[[int, int], None] = False,
    rigorous: bool = False,
    check: bool = True,
) -> BatchSolution:
    """Solves many problems of one shape at once, each with its own steps, stopping and status.

    Args:
        problems: a `Batch`, or problems that differ in their arrays only (see `stack`).
        target: one number, or one for each problem.
        start: a Point whose arrays have a leading axis of problems; plain numbers are for all.
        progress: True draws a progress bar; a function is called with (finished, all).

    The other arguments are those of `solve`; `time_limit` is for the whole batch.

    >>> import stagecert as sc
    >>> f = lambda s, z: s @ s
    >>> balls = [sc.Problem(sc.Ball(np.array([x, 0.0]), 1.0), (), f) for x in (2.0, 3.0, 5.0)]
    >>> sc.solve_batch(balls).value.round(3).tolist()
    [1.0, 4.0, 16.0]
    """
    batch = problems if isinstance(problems, Batch) else stack(problems)
    validate_batch(batch)
    validate_batch_start(batch, start)
    if rigorous:
        _refuse_what_has_no_enclosure(batch.lane(0))
    return _solve(
        batch.problem, batch.axes, batch.size, start, atol, rtol, solver, target,
        max_iterations, time_limit, progress, rigorous, examine(batch.problem, batch.axes, check),
    )  # fmt: skip


def _refuse_what_has_no_enclosure(problem: Problem) -> None:
    from stagecert.enclosure import refuse

    refuse(problem, shape_of_certificate(problem))


def _solve(
    problem, axes, size, start, atol, rtol, solver, target, max_iterations, time_limit, progress,
    rigorous, examined: Examined,
) -> BatchSolution:  # fmt: skip
    validate_options(atol, rtol, max_iterations, time_limit)
    target = validate_target(target, size)
    clock = Clock(time_limit)
    if problem.constraints:
        _refuse_without_multipliers(solver)
    solvers = named_solver(solver, examined.steep, bool(problem.constraints), size > 1)
    if examined.steep or any(isinstance(s, Mirror) for s in solvers):
        problem = seen_from_inside(problem)
        axes = None if axes is None else seen_from_inside(axes)
    points = _starting_points(as_arrays(problem, common_dtype(problem)), axes, size, start)
    goal = Goal(atol, rtol, target, target, max_iterations)
    with shown(progress, size) as show:
        job = _Job(problem, axes, points, goal, clock, show, rigorous, examined.assumptions)
        found = job.constrained(solvers, False) if problem.constraints else job.plain(solvers)
        with_multipliers = tuple(s for s in solvers if isinstance(s, HAVE_MULTIPLIERS))
        crossed = Status.BOUNDS_CROSSED in found.status and not clock.over()
        if crossed and isinstance(solvers[-1], HAVE_MULTIPLIERS):
            # Feasible points cannot be built stage by stage: let order be a side constraint.
            found = job.constrained(with_multipliers, True)
    return found


def _refuse_without_multipliers(solver) -> None:
    for each in named_solver(solver, constrained=True):
        if not isinstance(each, HAVE_MULTIPLIERS):
            raise ProblemError(
                f"The solver '{each.name}' has no multipliers for side constraints; use 'auto', "
                "'polish', 'programme' or 'mirror'."
            )


@dataclass(frozen=True)
class _Job:
    """One call of `solve` or `solve_batch`, in the precision that the search uses."""

    problem: Problem
    axes: Any
    points: Point
    goal: Goal
    clock: Clock
    show: Callable
    rigorous: bool
    assumptions: Assumptions

    def plain(self, solvers) -> BatchSolution:
        """The search on a problem without side constraints."""
        search, certified = self._searched(self.problem, self.axes, solvers, self.goal)
        return self._solution(search.kept, certified, search.records)

    def constrained(self, solvers, ordered: bool) -> BatchSolution:
        """The search with side constraints, after a look whether anything is feasible."""
        before = Before(
            ordered,
            self.goal.iterations,
            self.clock,
            lambda problem, axes, kept: self._certified(problem, axes, kept, False),
            lambda problem, axes, proof: self._derived(problem, axes, proof),
        )
        known = prepared(self.problem, self.axes, self.points, before)
        if known.infeasible.all():  # nothing to search for, nor to compile
            kept, best, proof = known.kept, known.best, known.proof
            assert kept is not None
            assert best is not None
            assert proof is not None
            kept.code[:] = INFEASIBLE
            best = replace(best, certificate=replace(proof, feasibility=False))
            certified = best.infeasible_where(known.infeasible, proof)
            return self._solution(kept, certified, known.records)
        left = np.maximum(self.goal.iterations - known.iterations, 0)
        goal = replace(self.goal, iterations=np.where(known.infeasible, 0, left))
        search, certified = self._searched(known.problem, known.axes, solvers, goal)
        kept = search.kept
        kept.iteration[:] += known.iterations
        kept.passes[:] += known.passes
        if known.infeasible.any():
            kept.code[known.infeasible] = INFEASIBLE
            certified = certified.infeasible_where(known.infeasible, known.proof)
        # Where nothing is feasible, the search that showed it is the one there is to look at.
        shown = [
            (np.where(known.infeasible[place], place, -1), history, name)
            for place, history, name in known.records
        ]
        return self._solution(kept, certified, shown + search.records)

    def _searched(self, problem, axes, solvers, goal: Goal):
        arrays = as_arrays(problem, common_dtype(problem))
        search = Search(arrays, axes, solvers, self.clock, self.show)
        certified = search.towards(
            goal, self.points, lambda kept: self._certified(problem, axes, kept, self.rigorous)
        )
        return search, certified

    def _certified(self, problem, axes, kept: Lane, rigorous: bool) -> Certified:
        return _certified(problem, axes, kept, _data_eps(self.problem), rigorous)

    def _derived(self, problem, axes, proof) -> np.ndarray:
        """The bounds that certificates prove, in the arithmetic that was asked for."""
        bound = np.asarray(proof.bound)
        return _rigorous_bounds(problem, axes, proof, len(bound)) if self.rigorous else bound

    def _solution(self, kept, certified, records) -> BatchSolution:
        goal, problem = self.goal, self.problem
        return BatchSolution(
            kept, certified, records, self.clock.seconds(), self.clock.over(), goal.atol, goal.rtol,
            goal.met, tuple(problem.stage_name(i) for i in range(len(problem.stages))),
            self.assumptions,
        )  # fmt: skip


def _data_eps(problem) -> float:
    """The relative accuracy of the problem's own numbers: bounds may cross by a little of that."""
    sizes = [leaf.dtype for leaf in jax.tree.leaves(problem) if hasattr(leaf, "dtype")]
    single = [d for d in sizes if jnp.issubdtype(d, jnp.floating) and d != np.float64]
    # Data computed in float32 is in order only up to float32's rounding; a few units of it.
    return 0.032 * float(jnp.finfo(np.float32).eps) if single else float(np.finfo(float).eps)


def _starting_points(problem, axes, size, start) -> Point:
    """Complete starting points with a leading axis of lanes."""
    given = as_arrays(Point() if start is None else start)
    # A plain number for all fractions is shared; arrays have a leading axis of lanes.
    axis = jax.tree.map(lambda x: None if np.ndim(x) == 0 else 0, given)
    return _start_points(axes, problem, axis, given, size)


@eqx.filter_jit
def _start_points(axes, problem, axis, given, size: int) -> Point:
    arrays, static = eqx.partition(problem, eqx.is_array)

    def one(arrays, inputs, fractions):
        lane = eqx.combine(arrays, static)
        dtype = jnp.result_type(*jax.tree.leaves(lane.inputs.centre()))
        return full_point(lane, Point(inputs, fractions), dtype)

    return jax.vmap(one, in_axes=(axes, axis.inputs, axis.fractions), axis_size=size)(
        arrays, given.inputs, given.fractions
    )


def _certified(problem, axes, kept: Lane, eps: float, rigorous: bool) -> "Certified":
    """Values and bounds of the lanes' best points, evaluated in float64."""
    given = problem
    with jax.enable_x64(True):
        problem, points, proposals = as_arrays((problem, kept.point, kept.proposal), jnp.float64)
        done, crossing, feasible, certificate, bound, points = certify_lanes(
            axes, problem, points, proposals, eps
        )
        crossing = jax.tree.map(np.asarray, crossing)
        value = np.array(done.value, np.float64)
        no_point = ~np.isfinite(kept.value) | ~np.asarray(feasible)
        value[no_point | ~np.isfinite(value) | (crossing.amount > 0)] = np.inf
        # A crossing that the search's precision did not resolve ends the search here.
        newly = (crossing.amount > 0) & np.isfinite(kept.value)
        kept.code[newly] = CROSSED
        for name in ("amount", "stage", "entry"):
            getattr(kept.crossing, name)[newly] = getattr(crossing, name)[newly]
        inputs, blocks, certificate = jax.tree.map(
            np.asarray, (points.inputs, done.blocks, certificate)
        )
        bound = np.array(bound, np.float64)
        if rigorous:
            bound = _rigorous_bounds(given, axes, certificate, len(bound))
        return Certified(value, bound, inputs, blocks, certificate)


def _rigorous_bounds(problem, axes, certificate, size: int) -> np.ndarray:
    """The bounds that the lanes' certificates prove in interval arithmetic."""
    with jax.enable_x64(True):
        arrays, static = eqx.partition(as_arrays(problem, jnp.float64), eqx.is_array)
        arrays = jax.tree.map(np.asarray, arrays)
    bounds = np.empty(size)
    for i in range(size):
        lane = arrays if axes is None else rows_of(axes, arrays, i)
        held = jax.tree.map(lambda x, i=i: x[i], certificate)
        bounds[i] = held.derive(eqx.combine(lane, static), rigorous=True)
    return bounds
