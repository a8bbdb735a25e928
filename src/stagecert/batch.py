"""Many problems of one shape: how they are given, and how their solutions come back."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import numpy as np

from stagecert import codes
from stagecert.errors import ProblemError
from stagecert.evidence import Assumptions
from stagecert.problem import Problem, as_arrays
from stagecert.reformulation import Point
from stagecert.solution import Solution, Stats, Status, Trace
from stagecert.validate import validate, validate_numbers, validate_start


@dataclass(frozen=True)
class Batch:
    """A problem some of whose arrays have a leading axis, one row for each problem of the batch.

    Attributes:
        problem: the problem with stacked arrays.
        axes: a tree like `problem` with 0 for the arrays that are stacked and None for shared ones.
        size: how many problems.

    Made by `stack` from a list of problems, or by `Batch.of` from stacked arrays directly.
    """

    problem: Problem
    axes: Any
    size: int

    @staticmethod
    def of(problem: Problem, stacked: Any) -> "Batch":
        """A batch from a problem whose arrays are stacked already.

        `stacked` is a function that picks the stacked parts, for example
        `lambda p: (p.inputs, p.objective.params)`; all else is shared.
        """
        problem = as_arrays(problem)
        shared = jax.tree.map(lambda _: None, eqx.filter(problem, eqx.is_array))
        arrays = eqx.filter(problem, eqx.is_array)
        marked = jax.tree.map(lambda _: 0, stacked(arrays))
        axes = eqx.tree_at(stacked, shared, marked, is_leaf=lambda x: x is None)
        sizes = {leaf.shape[0] if leaf.ndim else -1 for leaf in jax.tree.leaves(stacked(arrays))}
        if len(sizes) != 1 or -1 in sizes:
            raise ProblemError(
                f"The stacked arrays must have one common leading axis; their lengths are "
                f"{sorted(sizes)} (-1: no axis)."
            )
        return Batch(problem, axes, sizes.pop())

    def lane(self, index: int) -> Problem:
        """One problem of the batch."""
        return lane_of(as_arrays(self.problem), self.axes, index)


def lane_of(problem: Problem, axes, index: int) -> Problem:
    """One problem of a batch; the problem itself where `axes` is None."""
    if axes is None:
        return problem
    arrays, static = eqx.partition(problem, eqx.is_array)
    return eqx.combine(rows_of(axes, arrays, index), static)


def rows_of(axes, arrays, index):
    """The stacked arrays restricted to some rows; the shared ones as they are."""
    # An axis of None is a missing leaf of `axes`, so it is matched as a leaf here.
    return jax.tree.map(
        lambda axis, x: x if axis is None else x[index], axes, arrays, is_leaf=lambda a: a is None
    )


def stack(problems: Sequence[Problem]) -> Batch:
    """A batch from problems that differ in their arrays only.

    Arrays that are one and the same object in all problems are shared, not copied.
    """
    if isinstance(problems, Problem) or not isinstance(problems, Iterable):
        raise ProblemError(
            f"A batch is a sequence of problems, or a Batch, not {type(problems).__name__}."
        )
    problems = list(problems)
    if not problems:
        raise ProblemError("A batch needs at least one problem.")
    for index, problem in enumerate(problems):
        if not isinstance(problem, Problem):
            raise ProblemError(f"Entry {index} of the batch is no Problem but {problem!r}.")
    leaves, structures = zip(*(jax.tree.flatten(p) for p in problems), strict=True)
    for index, structure in enumerate(structures):
        if structure != structures[0]:
            raise ProblemError(
                f"Problem {index} of the batch has another structure than problem 0. Problems of a "
                "batch must share their functions (the same objects) and the shapes of their "
                "arrays; what differs goes into params."
            )
    out, axes = [], []
    for column in zip(*leaves, strict=True):
        first = column[0]
        if not isinstance(first, (np.ndarray, np.generic, jax.Array, float)):
            if any(type(other) is not type(first) or other != first for other in column):
                raise ProblemError(
                    f"Problems of a batch must share their functions and whole numbers: {first!r} "
                    "differs. What differs goes into params, as arrays."
                )
            out.append(first)
            axes.append(None)
        elif all(other is first for other in column):
            out.append(first)
            axes.append(None)
        else:
            shapes = {np.shape(other) for other in column}
            if len(shapes) > 1:
                raise ProblemError(
                    f"Arrays of the problems of a batch have different shapes: {sorted(shapes)}."
                )
            out.append(np.stack([np.asarray(other) for other in column]))
            axes.append(0)
    structure = structures[0]
    return Batch(
        jax.tree.unflatten(structure, out), jax.tree.unflatten(structure, axes), len(problems)
    )


def validate_batch(batch: Batch) -> None:
    """Raises ProblemError if a problem of the batch is not well formed."""
    validate(batch.lane(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch.problem):
        if isinstance(leaf, (np.ndarray, jax.Array)) and np.issubdtype(leaf.dtype, np.floating):
            bad = np.argwhere(~np.isfinite(np.asarray(leaf)))
            if len(bad):
                raise ProblemError(
                    f"Batch: {jax.tree_util.keystr(path)} is not finite at {bad[0].tolist()}."
                )
    # Shapes are common to all lanes; what numbers must satisfy is looked at lane by lane, in NumPy.
    arrays, static = eqx.partition(batch.problem, eqx.is_array)
    arrays = jax.tree.map(np.asarray, arrays)
    for index in range(1, batch.size):
        lane = eqx.combine(rows_of(batch.axes, arrays, index), static)
        try:
            validate_numbers(lane)
        except ProblemError as error:
            raise ProblemError(f"Problem {index} of the batch: {error}") from error


def validate_batch_start(batch: Batch, start) -> None:
    """Raises ProblemError unless `start` has a row for each problem, and the first one fits."""
    if start is None:
        return
    if not isinstance(start, Point):
        raise ProblemError(f"start must be a stagecert.Point, not {type(start).__name__}.")
    leaves = [leaf for leaf in jax.tree.leaves(start) if np.ndim(leaf) > 0]
    for leaf in leaves:
        if len(leaf) != batch.size:
            raise ProblemError(
                f"start: arrays need a leading axis with a row for each of the {batch.size} "
                f"problems; one has shape {np.shape(leaf)}."
            )
        if not np.all(np.isfinite(np.asarray(leaf, float))):
            raise ProblemError("start is not finite.")
    validate_start(
        batch.lane(0), jax.tree.map(lambda x: x if np.ndim(x) == 0 else np.asarray(x)[0], start)
    )


@dataclass(frozen=True)
class Certified:
    """Values and bounds in float64, the points that attain the values, and the certificates."""

    value: np.ndarray
    bound: np.ndarray
    inputs: Any
    blocks: tuple
    certificate: Any  # a Certificate, or None where the caller keeps its own
    infeasible: np.ndarray | None = None  # lanes whose certificate proves that nothing is feasible

    def infeasible_where(self, lanes: np.ndarray, proof: Any) -> "Certified":
        """The same with some lanes proven infeasible."""

        def chosen(new, old):
            return np.where(lanes.reshape(-1, *[1] * (np.ndim(old) - 1)), new, old)

        certificate = jax.tree.map(chosen, replace(proof, feasibility=False), self.certificate)
        value, bound = (np.where(lanes, np.inf, x) for x in (self.value, self.bound))
        return replace(
            self, value=value, bound=bound, certificate=certificate, infeasible=lanes.copy()
        )


class BatchSolution:
    """The solutions of a batch; `batch[i]` is the Solution of problem i.

    Attributes:
        value, bound, gap: arrays, one entry for each problem.
        status: a list of Status.
        inputs, blocks: the feasible points, with a leading axis of problems.
        iterations, passes: arrays.
        seconds: wall time of the whole batch.
        assumptions: what is known of the convexity that the bounds rest on, for all problems.
    """

    def __init__(
        self, kept, certified, records, seconds, out_of_time, atol, rtol, target, stage_names,
        assumptions=None,
    ):  # fmt: skip
        self.value, self.bound = certified.value, certified.bound
        with np.errstate(invalid="ignore"):
            self.gap = np.where(np.isfinite(self.value), self.value - self.bound, np.inf)
        self.inputs, self.blocks = certified.inputs, certified.blocks
        self.iterations, self.passes = np.asarray(kept.iteration), np.asarray(kept.passes)
        self.seconds = seconds
        self.assumptions = assumptions or Assumptions.unchecked(len(stage_names))
        self._constrained = bool(self.assumptions.constraints)
        self._certificate, self._infeasible = certified.certificate, certified.infeasible
        self._crossing, self._records, self._stage_names = kept.crossing, records, stage_names
        self.status = [
            _status(int(code), value, bound, atol, rtol, _of_lane(target, i), out_of_time)
            for i, (code, value, bound) in enumerate(
                zip(kept.code, self.value, self.bound, strict=True)
            )
        ]

    def __len__(self) -> int:
        return len(self.status)

    def __iter__(self) -> Iterator[Solution]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Solution:
        index = range(len(self))[operator.index(index)]
        inputs, blocks, certificate = jax.tree.map(
            lambda x: x[index], (self.inputs, self.blocks, self._certificate)
        )
        refuted = self._infeasible is not None and bool(self._infeasible[index])
        certificate = replace(
            certificate,
            bound=float(certificate.bound if refuted else self.bound[index]),
            assumptions=self.assumptions,
            feasibility=refuted,
        )
        return Solution(
            value=float(self.value[index]),
            bound=float(self.bound[index]),
            status=self.status[index],
            inputs=inputs,
            blocks=blocks,
            certificate=certificate,
            stats=Stats(
                int(self.iterations[index]),
                int(self.passes[index]),
                self.seconds,
                self._trace(index),
            ),
            message=self._message(index),
            assumptions=self.assumptions,
        )

    def __repr__(self) -> str:
        solved = sum(s.solved for s in self.status)
        return (
            f"BatchSolution({len(self)} problems, {solved} solved, "
            f"largest gap {self.gap.max():.3g})"
        )

    def _trace(self, index: int) -> Trace:
        value, bound, passes, solver = [], [], [], []
        for place, history, name in self._records:
            for row in np.flatnonzero(place == index)[:1]:
                used = history.passes[row] >= 0
                value.append(history.value[row][used])
                bound.append(history.bound[row][used])
                passes.append(history.passes[row][used])
                solver += [name] * int(used.sum())
        join = lambda parts: np.concatenate(parts) if parts else np.zeros(0)  # noqa: E731
        return Trace(join(value), join(bound), join(passes), tuple(solver))

    def _message(self, index: int) -> str:
        status = self.status[index]
        if np.isinf(self.value[index]) and status in _WITHOUT_A_POINT:
            return f"{status.value} {_NO_POINT}" if self._constrained else status.value
        crossing = jax.tree.map(lambda x: np.asarray(x)[index], self._crossing)
        if status is not Status.BOUNDS_CROSSED or crossing.amount <= 0:
            return status.value
        return (
            f"{self._stage_names[int(crossing.stage)]}: lower bound exceeds upper bound by "
            f"{float(crossing.amount):.3g} at entry {int(crossing.entry)}; check that the stage's "
            "bounds are ordered wherever earlier stages can lead (stagecert.check looks for such "
            "points)."
        )


_WITHOUT_A_POINT = (Status.ITERATION_LIMIT, Status.TIME_LIMIT, Status.STALLED, Status.TARGET_PROVEN)
_NO_POINT = (
    "No point that satisfies the side constraints is known, so the value is infinite; the bound "
    "holds all the same. Where the constraints leave no interior, give them a tolerance."
)


def _of_lane(target, index: int) -> float | None:
    if target is None:
        return None
    return float(target if np.ndim(target) == 0 else target[index])


def _status(code, value, bound, atol, rtol, target, out_of_time) -> Status:
    finite = np.isfinite(value) and np.isfinite(bound)
    if code == codes.INFEASIBLE:
        return Status.INFEASIBLE
    if finite and codes.contradicts(value, bound, np.finfo(float).eps):
        return Status.CONTRADICTED
    if target is not None and bound > target:
        return Status.TARGET_PROVEN
    if target is not None and value <= target:
        return Status.TARGET_MET
    if finite and value - bound <= atol + rtol * abs(bound):
        return Status.GAP_REACHED
    if code == codes.RUNNING:
        return Status.TIME_LIMIT
    return {
        codes.OUT_OF_STEPS: Status.ITERATION_LIMIT,
        codes.CROSSED: Status.BOUNDS_CROSSED,
        codes.NOT_FINITE: Status.NOT_FINITE,
        codes.CONTRADICTED: Status.CONTRADICTED,
    }.get(code, Status.TIME_LIMIT if out_of_time else Status.STALLED)
