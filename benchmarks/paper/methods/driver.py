"""Runs a first-order method on many problems at once, each with its own stopping.

A `Search` is the method itself: pure functions of one lane. `LaneMethod` maps them over lanes,
keeps the best bound and value of each, takes finished lanes out when few are left, and evaluates
what was found anew in float64. Neither steps nor the trials of a line search are put in a compiled
loop: XLA's convolutions are up to eight times slower there on CPUs.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.paper.methods.base import (
    Method,
    Outcome,
    PaperProblems,
    Stop,
    Stopwatch,
    Trace,
    chunks,
    joined,
)
from benchmarks.paper.methods.relaxed import (
    Distances,
    Lane,
    Shared,
    images_at_once,
    lanes_of,
    shared_of,
    unsupported,
    value_at,
)
from stagecert.problem import as_arrays
from stagecert.tree import select

SHRINK = 4  # lanes are packed anew when at most one in so many is still running,
WORTH_PACKING = 32  # if there are at least so many: every size is compiled once


class Found(eqx.Module):
    """What a step found: a bound with what proves it, a value with its point, distances.

    A method without bounds or values in a step gives -inf or inf there.
    """

    bound: Any
    proof: Any
    value: Any
    point: Any
    distances: Distances | None = None


class Trial(eqx.Module):
    """What a line search has tried; `open` says whether it has to try again."""

    open: eqx.AbstractVar[Any]


class Search(eqx.Module):
    """A first-order method on one lane.

    Attributes:
        look_every: `look` is called after every so many steps; 0: never.
        tries: whether steps have a line search, that is `first_trial` and `next_trial`.
    """

    look_every: eqx.AbstractVar[int]
    tries: ClassVar[bool] = False

    @abc.abstractmethod
    def start(self, shared: Shared, lane: Lane) -> tuple[Any, Found]:
        """The state before the first step, and what is known there."""

    def first_trial(self, shared: Shared, lane: Lane, state) -> Trial:
        """The begin of a line search."""
        raise NotImplementedError

    def next_trial(self, shared: Shared, lane: Lane, trial) -> Trial:
        """Its next trial, after one that is open."""
        raise NotImplementedError

    @abc.abstractmethod
    def step(self, shared: Shared, lane: Lane, state, trial) -> tuple[Any, Found]:
        """One iteration; `trial` is the last one of its line search, None without."""

    def look(self, shared: Shared, lane: Lane, state) -> Found:
        """What costs too much to be asked after every step."""
        raise NotImplementedError

    @abc.abstractmethod
    def bound_of(self, shared: Shared, lane: Lane, proof) -> Any:
        """The bound that a proof stands for, in the precision of the arguments."""


class _Best(eqx.Module):
    bound: Any
    proof: Any
    value: Any
    point: Any


def _absorbed(best: _Best, found: Found) -> _Best:
    higher = found.bound > best.bound  # never if not a number
    lower = found.value < best.value
    return _Best(
        jnp.where(higher, found.bound, best.bound),
        select(higher, found.proof, best.proof),
        jnp.where(lower, found.value, best.value),
        select(lower, found.point, best.point),
    )


@eqx.filter_jit
def _start(search: Search, shared: Shared, lanes: Lane):
    def one(lane):
        state, found = search.start(shared, lane)
        infinity = jnp.full((), jnp.inf, lane.row.dtype)
        nothing = _Best(-infinity, found.proof, infinity, found.point)
        return state, _absorbed(nothing, found), found.distances

    return jax.vmap(one)(lanes)


@eqx.filter_jit
def _first_trial(search: Search, shared: Shared, lanes: Lane, state):
    return jax.vmap(lambda lane, state: search.first_trial(shared, lane, state))(lanes, state)


@eqx.filter_jit
def _next_trial(search: Search, shared: Shared, lanes: Lane, trial):
    def one(lane, trial):
        return select(trial.open, search.next_trial(shared, lane, trial), trial)

    return jax.vmap(one)(lanes, trial)


@eqx.filter_jit
def _step(search: Search, shared: Shared, lanes: Lane, state, trial, best: _Best):
    def one(lane, state, trial, best):
        state, found = search.step(shared, lane, state, trial)
        return state, _absorbed(best, found), found.distances

    return jax.vmap(one)(lanes, state, trial, best)


@eqx.filter_jit
def _look(search: Search, shared: Shared, lanes: Lane, state, best: _Best):
    return jax.vmap(lambda l, s, b: _absorbed(b, search.look(shared, l, s)))(lanes, state, best)


@eqx.filter_jit
def _certified(search: Search, shared: Shared, lanes: Lane, best: _Best):
    def one(lane, best):
        point = best.point
        value = jnp.asarray(jnp.inf) if point is None else value_at(shared, lane, point)
        return search.bound_of(shared, lane, best.proof), value

    return jax.vmap(one)(lanes, best)


@eqx.filter_jit
def _rows(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


@eqx.filter_jit
def _with_rows(tree, rows, new):
    return jax.tree.map(lambda x, y: x.at[rows].set(y), tree, new)


def _filled(rows: np.ndarray, size: int) -> np.ndarray:
    """The numbers of rows filled up to a size: the first is repeated, and finds the same again."""
    return np.concatenate([rows, np.repeat(rows[:1], size - len(rows))])


def _searched(search: Search, shared: Shared, lanes: Lane, state) -> Any:
    """The last trial of every lane's line search; None for methods that have none.

    One lane may need many more trials than others, so only those that do go on.
    """
    if not search.tries:
        return None
    trial = _first_trial(search, shared, lanes, state)
    while len(again := np.flatnonzero(np.asarray(trial.open))):
        size, count = _fitting(lanes.row.shape[0], len(again)), len(again)
        rows = _filled(again, size)
        some, tried = _rows((lanes, trial), rows)
        while count and _fitting(size, count) == size:
            tried = _next_trial(search, shared, some, tried)
            count = np.count_nonzero(np.asarray(tried.open)[: len(again)])
        trial = _with_rows(trial, rows, tried)
    return trial


class LaneMethod(Method):
    """A method that is a `Search` on every lane.

    Args:
        precision: of the search; what is returned is evaluated in float64.
    """

    limit: int  # iterations, unless told otherwise
    has_values: bool = True

    def __init__(self, precision: str = "float32"):
        self.precision = precision

    @abc.abstractmethod
    def search(self, shared: Shared, trace: bool) -> Search:
        """The search; with `trace`, one that measures distances."""

    def refusal(self, problems):
        return unsupported(problems)

    def prepare(self, problems, stop=None):
        # One step; the last one is always looked at.
        stop = dataclasses.replace(stop or Stop(), iterations=1, seconds=None)
        with jax.enable_x64(True):
            shared = shared_of(problems)
            at_once = images_at_once(shared, problems)
            for size in {min(at_once, len(problems.rows)), len(problems.rows) % at_once} - {0}:
                few = problems[:size]
                self._chunk(shared, few, stop[:size], False, Stopwatch())

    def run(self, problems, stop=None, *, trace=False, progress=None) -> Outcome:
        stop = stop or Stop()
        watch = Stopwatch()
        outcomes = []
        with jax.enable_x64(True):
            shared = shared_of(problems)
            for some in chunks(problems, images_at_once(shared, problems)):
                begin = watch.seconds, watch.compiling
                outcome = self._chunk(shared, problems[some], stop[some], trace, watch)
                seconds, compiling = watch.seconds - begin[0], watch.compiling - begin[1]
                outcomes.append(dataclasses.replace(outcome, seconds=seconds, compiling=compiling))
                if progress is not None:
                    progress(some.stop * problems.shape[1], problems.rows[..., 0].size)
        return dataclasses.replace(joined(outcomes), seconds=watch.seconds)

    def _precision(self):
        return jax.enable_x64(self.precision == "float64")

    def _in_precision(self, shared, lanes, trace):
        dtype = jnp.dtype(self.precision)
        return self.search(shared, trace), as_arrays(shared, dtype), as_arrays(lanes, dtype)

    def _chunk(self, shared: Shared, problems: PaperProblems, stop: Stop, trace, watch) -> Outcome:
        exact = lanes_of(shared, problems)
        search, rounded, lanes = self._in_precision(shared, exact, trace)
        with self._precision():
            run = _Run(search, rounded, lanes, stop, problems.shape, watch, trace)
            run.until(stop.iterations or self.limit)
        proof, point = as_arrays((run.best.proof, run.best.point), jnp.float64)
        best = _Best(run.best.bound, proof, run.best.value, point)
        bound, value = _certified(search, shared, exact, best)
        shape = problems.shape
        return Outcome(
            np.asarray(bound).reshape(shape),
            np.asarray(value).reshape(shape) if self.has_values else None,
            run.iterations.reshape(shape),
            run.early.reshape(shape),
            0.0,
            trace=run.trace(self.has_values),
        )


def _smaller(size: int) -> int:
    """The next size of a batch that shrinks; 0 if it stays."""
    return -(-size // SHRINK) if size >= WORTH_PACKING else 0


def _fitting(size: int, count: int) -> int:
    """The least size of a batch that shrinks from `size` and still has room for `count` rows."""
    while (smaller := _smaller(size)) >= max(count, 1):
        size = smaller
    return size


class _Run:
    """One batch of lanes, from the start until all have stopped."""

    def __init__(self, search, shared, lanes, stop: Stop, shape, watch: Stopwatch, trace: bool):
        self.search, self.shared, self.lanes = search, shared, lanes
        self.stop, self.watch, self.shape = stop, watch, shape
        self.begin = watch.seconds
        size = shape[0] * shape[1]
        self.target = np.broadcast_to(
            np.inf if stop.target is None else np.asarray(stop.target, float), shape
        ).ravel()
        self.place = np.arange(size)  # which lane each row of the batch is
        self.alive = np.ones(size, bool)
        self.early = np.zeros(size, bool)
        self.iterations = np.zeros(size, int)
        self.records: list[tuple] | None = [] if trace else None
        self.rows = lanes
        self.state, best, found = _start(search, shared, lanes)
        self.best = jax.tree.map(np.array, best)
        self.current = best
        self._note(0, found)

    def until(self, limit: int) -> None:
        """Steps until all lanes have stopped, at most so many."""
        step = 0
        while self.alive.any() and step < limit and not self._out_of_time():
            self._pack()
            step += 1
            trial = _searched(self.search, self.shared, self.rows, self.state)
            self.state, self.current, found = _step(
                self.search, self.shared, self.rows, self.state, trial, self.current
            )
            every = self.search.look_every
            if every and (step % every == 0 or step == limit):
                self.current = _look(self.search, self.shared, self.rows, self.state, self.current)
            self._note(step, found)
        self._keep()

    def _out_of_time(self) -> bool:
        limit = self.stop.seconds
        return limit is not None and self.watch.seconds > limit

    def _running(self) -> np.ndarray:
        return self.alive[self.place]

    def _note(self, step: int, found: Distances | None) -> None:
        """Looks at the numbers after a step: who is finished?"""
        running = self._running()
        lanes = self.place[running]
        self.best.bound[lanes] = np.asarray(self.current.bound)[running]
        self.best.value[lanes] = np.asarray(self.current.value)[running]
        self.iterations[lanes] = step
        bound, value = (x[lanes].astype(np.float64) for x in (self.best.bound, self.best.value))
        gap = value - bound
        done = np.isfinite(gap) & (gap <= self.stop.atol + self.stop.rtol * np.abs(bound))
        done |= bound >= self.target[lanes]
        if done.any():
            self._keep()  # before finished rows go on
        self.early[lanes[done]] = True
        self.alive[lanes[done]] = False
        if self.records is not None:
            counts = least = None
            if found is not None:
                counts = np.asarray(found.counts)[running].sum(axis=0)
                least = np.asarray(found.least)[running].min()
            seconds = self.watch.seconds - self.begin
            values = (self.best.bound.copy(), self.best.value.copy(), counts, least)
            self.records.append((step, seconds, *values))

    def _keep(self) -> None:
        """Copies what running rows have found to the host."""
        running = self._running()
        lanes = self.place[running]

        def write(kept, leaf):
            kept[lanes] = np.asarray(leaf)[running]

        jax.tree.map(write, self.best, self.current)

    def _pack(self) -> None:
        """Fewer rows, once few of them are running."""
        running = np.flatnonzero(self._running())
        size = _smaller(len(self.place))
        if not size or len(running) > size:
            return
        rows = _filled(running, size)
        self.rows, self.state, self.current = _rows((self.rows, self.state, self.current), rows)
        self.place = self.place[rows]

    def trace(self, has_values: bool) -> Trace | None:
        """The records, if any."""
        if self.records is None:
            return None
        step, seconds, bound, value, counts, least = zip(*self.records, strict=True)
        grid = (len(step), *self.shape)
        return Trace(
            np.array(step),
            np.array(seconds),
            np.stack(bound).reshape(grid),
            np.stack(value).reshape(grid) if has_values else None,
            None if counts[0] is None else np.stack(counts),
            None if least[0] is None else np.array(least),
        )
