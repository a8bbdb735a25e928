"""solve() and solve_batch(): one loop for every solver, stopping, batches, progress."""

import contextlib
import time
from collections.abc import Callable, Sequence
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
from stagecert.codes import CROSSED, MET, OUT_OF_STEPS, PROVEN, REACHED, RUNNING, STUCK
from stagecert.errors import ProblemError
from stagecert.evidence import Assumptions
from stagecert.inside import seen_from_inside
from stagecert.lanes import (
    CHUNK,
    History,
    Lane,
    Stopping,
    advance_lanes,
    certify_lanes,
    change_lanes,
    start_lanes,
    step_lanes,
)
from stagecert.problem import Problem, as_arrays
from stagecert.reformulation import Point, full_point
from stagecert.solution import Solution
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


def named_solver(solver, steep: bool = False) -> tuple[AbstractSolver, ...]:
    """The solvers to run one after the other: a name, an object, or a sequence of these.

    `steep` says that slopes may be infinite at the border of the inputs' set, where corners lie.
    """
    names = {
        "auto": (Mirror() if steep else Greedy(patience=0, progress=0.5), Polish()),
        "damped": (Damped(),),
        "greedy": (Greedy(),),
        "accelerated": (Accelerated(),),
        "simple": (Simple(),),
        "safe": (Safe(),),
        "mirror": (Mirror(),),
        "polish": (Polish(),),
        "slope_ascent": (Greedy(patience=0, progress=0.5), SlopeAscent()),
    }
    if isinstance(solver, str):
        if solver not in names:
            raise ProblemError(f"Unknown solver '{solver}'; known are {', '.join(names)}.")
        return names[solver]
    if isinstance(solver, AbstractSolver):
        return (solver,)
    if isinstance(solver, Sequence) and solver:
        return tuple(s for entry in solver for s in named_solver(entry, steep))
    raise ProblemError(
        f"solver must be a name, an AbstractSolver or a sequence of these, not {solver!r}."
    )


# -- the loop on the host -------------------------------------------------------------------------


class _Search:
    """Runs solvers on a batch of lanes; finished lanes leave the batch."""

    def __init__(self, problem, axes, solvers, clock: "_Clock", progress, single_steps=False):
        self.problem, self.axes, self.solvers = problem, axes, solvers
        self.clock, self.progress, self.single_steps = clock, progress, single_steps
        self.size = 0  # how many lanes there are
        self.chunk = 1  # iterations between two looks at the clock
        # Lanes without their solvers' states. Numbers are on the host; points and proposals may be
        # large, and stay on a device that has a memory of its own.
        self.kept: Any = None
        self.records: list[tuple[np.ndarray, History, str]] = []

    def problems(self, indices):
        """The problem with its batched leaves restricted to some lanes."""
        if self.axes is None or np.array_equal(indices, np.arange(len(self.kept.code))):
            return self.problem
        arrays, static = eqx.partition(self.problem, eqx.is_array)
        is_none = lambda axis: axis is None  # noqa: E731
        shared, stacked = (
            jax.tree.map(
                lambda axis, x, want=want: x if (axis is None) == want else None,
                self.axes,
                arrays,
                is_leaf=is_none,
            )
            for want in (True, False)
        )
        return eqx.combine(shared, _take(stacked, indices), static)

    def run(self, points: Point, stopping: Stopping) -> None:
        """From starting points until every lane has stopped."""
        lanes = start_lanes(self.axes, self.problem, self.solvers[0], stopping, points)
        self.size = lanes.code.shape[0]
        everyone = np.arange(self.size)
        self.kept = self._from_device(lanes)
        self._phases(everyone, stopping, lanes)

    def resume(self, indices: np.ndarray, stopping: Stopping) -> None:
        """Runs the last solver again on lanes that stopped too early."""
        self.kept.code[indices] = RUNNING
        self._phase(indices, stopping, len(self.solvers) - 1, None)

    def _phases(self, indices, stopping, lanes):
        for number in range(len(self.solvers)):
            waiting = np.isin(self.kept.code[indices], (RUNNING, STUCK))
            if number > 0:
                indices, lanes = indices[waiting], None
            if not waiting.any():
                return
            self._phase(indices, stopping, number, lanes)

    def _phase(self, indices, stopping, number, lanes):
        """One solver on some lanes, in ever smaller batches."""
        solver = self.solvers[number]
        place = indices  # which lane each row of the current batch is; padding repeats the last
        problems = self.problems(place)
        limits = _take(stopping, place)
        if lanes is None:
            lanes, place, problems, limits = self._gathered(indices, stopping)
            lanes = change_lanes(self.axes, problems, solver, limits, lanes)
        while True:
            codes = np.asarray(lanes.code)
            running = codes == RUNNING
            if not running.any() or self.clock.over():
                break
            rows = _padded(np.flatnonzero(running), self.size)
            if 2 * len(rows) <= len(running):
                self._keep(place, lanes)
                state = _take(lanes.state, rows)
                lanes, place, problems, limits = self._gathered(place[running], stopping)
                lanes = eqx.tree_at(lambda l: l.state, lanes, state, is_leaf=lambda x: x is None)
            begin = time.perf_counter()
            if self.single_steps:
                lanes, history = step_lanes(self.axes, problems, solver, limits, lanes)
            else:
                limit = jnp.asarray(self.chunk)
                lanes, history = advance_lanes(self.axes, problems, solver, limits, lanes, limit)
            lanes.code.block_until_ready()
            # Look at the clock about every half second, however slow the problem.
            if time.perf_counter() - begin < 0.25:
                self.chunk = min(2 * self.chunk, CHUNK)
            self.records.append((place, jax.tree.map(np.asarray, history), solver.name))
            self.progress(self, place, np.asarray(lanes.code))
        self._keep(place, lanes)

    def _gathered(self, indices, stopping):
        """Lanes from the host, padded so that few sizes are ever compiled."""
        place = _padded(indices, self.size) if self.axes is not None else indices
        lanes = _take(self.kept, place)
        # Padding repeats the last lane; its copies do not run.
        code = np.asarray(lanes.code).copy()
        code[len(indices) :] = OUT_OF_STEPS
        lanes = eqx.tree_at(lambda l: l.code, lanes, jnp.asarray(code))
        return lanes, place, self.problems(place), _take(stopping, place)

    def _keep(self, place, lanes):
        count = len(np.unique(place))
        new = self._from_device(lanes)
        if count == self.size:
            self.kept = new
            return

        def write(kept, leaf):
            if isinstance(kept, np.ndarray):
                kept[place[:count]] = leaf[:count]
                return kept
            # Rows that only fill up the batch are written nowhere.
            at = np.where(np.arange(len(place)) < count, place, self.size)
            return _written(kept, jnp.asarray(at), leaf)

        self.kept = jax.tree.map(write, self.kept, new)

    def _from_device(self, lanes: Lane) -> Lane:
        stateless = eqx.tree_at(lambda l: l.state, lanes, None)
        if _on_host(lanes):
            return jax.tree.map(np.array, stateless)
        large = lambda l: (l.point, l.proposal)  # noqa: E731
        rest = jax.tree.map(np.array, eqx.tree_at(large, stateless, (None, None)))
        return eqx.tree_at(large, rest, large(stateless), is_leaf=lambda x: x is None)


@jax.jit
def _written(array, rows, values):
    return array.at[rows].set(values, mode="drop")


def _on_host(tree) -> bool:
    """Whether the arrays of a tree are in the computer's own memory, where NumPy finds them."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return all(d.platform == "cpu" for leaf in leaves for d in leaf.devices())


def _take(tree, rows):
    """Some rows of every array of a tree.

    On CPUs by NumPy, which shares memory with JAX: JAX's own indexing, array by array, costs more
    than a step of a small problem, and compiling it for every size more still.
    """
    if _on_host(tree):
        return jax.tree.map(lambda x: np.asarray(x)[rows], tree)
    return _take_on_device(tree, jnp.asarray(rows))


@eqx.filter_jit
def _take_on_device(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


def _padded(indices: np.ndarray, most: int) -> np.ndarray:
    """Indices repeated up to one of few sizes: every size is traced and compiled once."""
    # On accelerators, few lanes take as long as some more, and compiling takes much longer.
    size, growth = (8, 2) if jax.default_backend() == "cpu" else (64, 4)
    while size < len(indices):
        size *= growth
    size = max(min(size, most), len(indices))
    return np.concatenate([indices, np.repeat(indices[-1:], size - len(indices))])


class _Clock:
    def __init__(self, limit: float | None):
        self.begin, self.limit = time.perf_counter(), limit

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def over(self) -> bool:
        return self.limit is not None and self.seconds() > self.limit


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
        solver: "auto" (greedy steps, then polishing), "greedy", "polish", "accelerated", "simple",
            "safe", a solver object, or a sequence of these to run one after the other.
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
    solvers = named_solver(solver, examined.steep)
    if examined.steep or any(isinstance(s, Mirror) for s in solvers):
        problem = seen_from_inside(problem)
        axes = None if axes is None else seen_from_inside(axes)
    dtype = _common_dtype(problem)
    arrays = as_arrays(problem, dtype)
    points = _starting_points(arrays, axes, size, start)
    eps = _data_eps(problem)
    return search_lanes(
        arrays, axes, size, points, lambda kept: _certified(problem, axes, kept, eps, rigorous),
        solvers, atol=atol, rtol=rtol, target=target, max_iterations=max_iterations,
        time_limit=time_limit, progress=progress, assumptions=examined.assumptions,
    )  # fmt: skip


def search_lanes(
    arrays: Problem,
    axes,
    size: int,
    points: Point,
    certifier: Callable[[Lane], Certified],
    solvers: tuple[AbstractSolver, ...],
    *,
    atol: float,
    rtol: float,
    target: Any = None,
    max_iterations: int = 1000,
    time_limit: float | None = None,
    progress: Any = False,
    single_steps: bool = False,
    aim: float = 1.0,
    assumptions: Assumptions | None = None,
) -> BatchSolution:
    """The search itself, on arrays of one precision, from complete points.

    Args:
        arrays, axes: the problem, and which of its leaves have a leading axis of lanes.
        certifier: evaluates what the search kept in float64: the numbers that are published.
        single_steps: for expensive steps, run them one by one instead of in compiled loops.
        aim: the search stops at this share of the tolerances. Below 1, float64 rarely disagrees.
        assumptions: what is known of the problem's convexity; None: nobody looked.
    """
    validate_options(atol, rtol, max_iterations, time_limit)
    target = validate_target(target, size)
    clock = _Clock(time_limit)
    dtype = _common_dtype(arrays)

    def each(value):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (size,))

    goal = -np.inf if target is None else target
    met, proof = (
        each(-jnp.inf if target is None else goal),
        each(jnp.inf if target is None else goal),
    )
    stopping = Stopping(
        each(aim * atol),
        each(aim * rtol),
        met,
        proof,
        jnp.full((size,), min(max_iterations, 2**31 - 1), jnp.int32),
    )
    with _shown(progress, size) as show:
        search = _Search(arrays, axes, solvers, clock, show, single_steps)
        search.run(points, stopping)
        certified = certifier(search.kept)
        # The search stops on bounds in its own precision. Where float64 disagrees, search on for
        # more.
        for _ in range(3):
            early = _not_yet(search.kept, certified, atol, rtol, target)
            early &= search.kept.iteration < max_iterations
            if not early.any() or clock.over():
                break
            lag = jnp.asarray(np.maximum(search.kept.bound - certified.bound, 0), dtype)
            stopping = Stopping(
                0.5 * stopping.atol,
                0.5 * stopping.rtol,
                met,
                stopping.proof + jnp.where(jnp.asarray(early), 2 * lag, 0),
                stopping.iterations,
            )
            search.resume(np.flatnonzero(early), stopping)
            certified = certifier(search.kept)
    return BatchSolution(
        search.kept, certified, search.records, clock.seconds(), clock.over(), atol, rtol, target,
        tuple(arrays.stage_name(i) for i in range(len(arrays.stages))), assumptions,
    )  # fmt: skip


def _data_eps(problem) -> float:
    """The relative accuracy of the problem's own numbers: bounds may cross by a little of that."""
    sizes = [leaf.dtype for leaf in jax.tree.leaves(problem) if hasattr(leaf, "dtype")]
    single = [d for d in sizes if jnp.issubdtype(d, jnp.floating) and d != np.float64]
    # Data computed in float32 is in order only up to float32's rounding; a few units of it.
    return 0.032 * float(jnp.finfo(np.float32).eps) if single else float(np.finfo(float).eps)


def _common_dtype(problem):
    """One floating-point type for all arrays of the search."""
    leaves = [leaf for leaf in jax.tree.leaves(as_arrays(problem)) if hasattr(leaf, "dtype")]
    floating = [leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.promote_types(jnp.result_type(*floating), jnp.float32)


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
        done, crossing, certificate, bound, points = certify_lanes(
            axes, problem, points, proposals, eps
        )
        crossing = jax.tree.map(np.asarray, crossing)
        value = np.array(done.value, np.float64)
        value[~np.isfinite(kept.value) | ~np.isfinite(value) | (crossing.amount > 0)] = np.inf
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
    arrays, static = eqx.partition(as_arrays(problem, jnp.float64), eqx.is_array)
    arrays = jax.tree.map(np.asarray, arrays)
    bounds = np.empty(size)
    for i in range(size):
        lane = arrays if axes is None else rows_of(axes, arrays, i)
        held = jax.tree.map(lambda x, i=i: x[i], certificate)
        bounds[i] = held.derive(eqx.combine(lane, static), rigorous=True)
    return bounds


def _not_yet(kept: Lane, certified, atol, rtol, target) -> np.ndarray:
    """Lanes that stopped on numbers which float64 does not confirm."""
    stopped = np.isin(kept.code, (REACHED, PROVEN, MET))
    return stopped & ~_confirmed(certified, atol, rtol, target)


def _confirmed(certified, atol, rtol, target) -> np.ndarray:
    finite = np.isfinite(certified.value) & np.isfinite(certified.bound)
    with np.errstate(invalid="ignore"):
        good = certified.value - certified.bound <= atol + rtol * np.abs(certified.bound)
    good = good & finite
    if target is not None:
        good = good | (certified.bound > target) | (certified.value <= target)
    return good


@contextlib.contextmanager
def _shown(progress, size):
    """The function that the search calls after each chunk."""
    finished = np.zeros(size, bool)

    def count(search, place, codes):
        finished[:] = ~np.isin(search.kept.code, (RUNNING, STUCK))
        finished[place[~np.isin(codes, (RUNNING, STUCK))]] = True
        return int(finished.sum())

    if callable(progress):
        yield lambda search, place, codes: progress(count(search, place, codes), size)
    elif progress:
        from rich.progress import Progress

        with Progress() as bar:
            task = bar.add_task("solving", total=size)
            yield lambda search, place, codes: bar.update(
                task, completed=count(search, place, codes)
            )
            bar.update(task, completed=size)
    else:
        yield lambda search, place, codes: None
