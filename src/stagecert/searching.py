"""The loop on the host: solvers run on batches of lanes, until each has stopped."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.batch import BatchSolution, Certified, lane_of
from stagecert.codes import MET, OUT_OF_STEPS, PROVEN, REACHED, RUNNING, STUCK
from stagecert.evidence import Assumptions
from stagecert.lanes import (
    CHUNK,
    History,
    Lane,
    Stopping,
    advance_lanes,
    change_lanes,
    start_lanes,
    step_lanes,
)
from stagecert.problem import Problem, as_arrays
from stagecert.programme.solver import Programme
from stagecert.reformulation import Point
from stagecert.solvers import AbstractSolver
from stagecert.validate import validate_options, validate_target


@dataclass(frozen=True)
class Goal:
    """When lanes stop: at a gap, at a value (`met`), above a bound (`proof`), after iterations.

    `met`, `proof` and `iterations` are one for all, or one for each lane; `aim` is the share of the
    tolerances at which the search itself stops.
    """

    atol: float
    rtol: float
    met: Any = None
    proof: Any = None
    iterations: Any = 1000
    aim: float = 1.0

    def stopping(self, size: int, dtype) -> Stopping:
        def each(value):
            return jnp.broadcast_to(jnp.asarray(value, dtype), (size,))

        most = np.broadcast_to(np.minimum(self.iterations, 2**31 - 1), (size,))
        return Stopping(
            each(self.aim * self.atol),
            each(self.aim * self.rtol),
            each(-jnp.inf if self.met is None else self.met),
            each(jnp.inf if self.proof is None else self.proof),
            jnp.asarray(most, jnp.int32),
        )

    def confirmed(self, certified: Certified) -> np.ndarray:
        """Where value and bound are good enough."""
        finite = np.isfinite(certified.value) & np.isfinite(certified.bound)
        with np.errstate(invalid="ignore"):
            gap = certified.value - certified.bound
            good = (gap <= self.atol + self.rtol * np.abs(certified.bound)) & finite
        if self.proof is not None:
            good = good | (certified.bound > self.proof)
        if self.met is not None:
            good = good | (certified.value <= self.met)
        return good


class Search:
    """Runs solvers on a batch of lanes; finished lanes leave the batch."""

    def __init__(self, problem, axes, solvers, clock: "Clock", progress, single_steps=False):
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

    def towards(
        self, goal: Goal, points: Point, certifier: Callable[[Lane], Certified]
    ) -> Certified:
        """Searches until each lane has reached the goal, or cannot; what float64 makes of it."""
        size = len(jax.tree.leaves(points)[0])
        dtype = common_dtype(self.problem)
        stopping = goal.stopping(size, dtype)
        met = stopping.met
        self.run(points, stopping)
        certified = certifier(self.kept)
        # The search stops on bounds in its own precision. Where float64 disagrees, search on for
        # more.
        for _ in range(3):
            early = np.isin(self.kept.code, (REACHED, PROVEN, MET)) & ~goal.confirmed(certified)
            early &= self.kept.iteration < goal.iterations
            if not early.any() or self.clock.over():
                break
            lag = jnp.asarray(np.maximum(self.kept.bound - certified.bound, 0), dtype)
            stopping = Stopping(
                0.5 * stopping.atol,
                0.5 * stopping.rtol,
                met,
                stopping.proof + jnp.where(jnp.asarray(early), 2 * lag, 0),
                stopping.iterations,
            )
            self.resume(np.flatnonzero(early), stopping)
            certified = certifier(self.kept)
        return certified

    def run(self, points: Point, stopping: Stopping) -> None:
        """From starting points until every lane has stopped."""
        first = self.solvers[next(iter(self._stepping()), 0)]
        lanes = start_lanes(self.axes, self.problem, first, stopping, points)
        self.size = lanes.code.shape[0]
        everyone = np.arange(self.size)
        self.kept = self._from_device(lanes)
        self._phases(everyone, stopping, lanes)

    def resume(self, indices: np.ndarray, stopping: Stopping) -> None:
        """Runs the last solver again on lanes that stopped too early."""
        stepping = self._stepping()
        if stepping:  # programmes are solved as well as they can be
            self.kept.code[indices] = RUNNING
            self._phase(indices, stopping, stepping[-1], None)

    def _stepping(self) -> list[int]:
        """Which solvers make steps; the others solve programmes on the host."""
        return [k for k, solver in enumerate(self.solvers) if not isinstance(solver, Programme)]

    def _phases(self, indices, stopping, lanes):
        for number, solver in enumerate(self.solvers):
            waiting = np.isin(self.kept.code[indices], (RUNNING, STUCK))
            if not waiting.any():
                return
            if isinstance(solver, Programme):
                # Where nothing is found, the next solver starts as if it were the first.
                found = self._by_programme(indices[waiting], stopping, solver)
                lanes = None if found else lanes
                continue
            indices = indices if lanes is not None else indices[waiting]
            self._phase(indices, stopping, number, lanes)
            lanes = None

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

    def _by_programme(self, indices, stopping, solver: Programme) -> bool:
        """Lanes that are quadratic programmes, solved one by one on the host; whether any is."""
        self.kept.code[indices] = STUCK  # as those that are none
        like = jax.tree.map(np.asarray, self.kept.proposal)
        found = {}
        for index in indices:
            if not self.clock.over():
                lane = lane_of(self.problem, self.axes, int(index))
                row = jax.tree.map(lambda x, i=index: x[i], like)
                found[index] = solver.propose(lane, row, self.clock.over)
        chosen = np.array([i for i in found if found[i] is not None], int)
        if not len(chosen):
            return False
        self.kept.code[chosen] = RUNNING
        lanes, place, problems, limits = self._gathered(chosen, stopping)
        state = jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *(found[i] for i in place))
        lanes = eqx.tree_at(lambda l: l.state, lanes, state, is_leaf=lambda x: x is None)
        lanes, history = step_lanes(self.axes, problems, solver, limits, lanes)
        self.records.append((place, jax.tree.map(np.asarray, history), solver.name))
        self.progress(self, place, np.asarray(lanes.code))
        self._keep(place, lanes)
        return True

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


class Clock:
    def __init__(self, limit: float | None):
        self.begin, self.limit = time.perf_counter(), limit

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def over(self) -> bool:
        return self.limit is not None and self.seconds() > self.limit


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
    clock = Clock(time_limit)
    goal = Goal(atol, rtol, target, target, max_iterations, aim)
    with shown(progress, size) as show:
        search = Search(arrays, axes, solvers, clock, show, single_steps)
        certified = search.towards(goal, points, certifier)
    return BatchSolution(
        search.kept, certified, search.records, clock.seconds(), clock.over(), atol, rtol, target,
        tuple(arrays.stage_name(i) for i in range(len(arrays.stages))), assumptions,
    )  # fmt: skip


def common_dtype(problem):
    """One floating-point type for all arrays of the search."""
    leaves = [leaf for leaf in jax.tree.leaves(as_arrays(problem)) if hasattr(leaf, "dtype")]
    floating = [leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # Not by promotion, which is an error where users have asked JAX for the strict kind.
    return max((np.dtype(np.float32), *floating), key=lambda kind: kind.itemsize)


@contextlib.contextmanager
def shown(progress, size):
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
