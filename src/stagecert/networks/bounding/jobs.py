"""What `bound` is asked, read and checked; how much of it is done at once."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.bounding.intermediate import Intermediate
from stagecert.networks.bounding.relaxation import Split
from stagecert.networks.bounding.results import closed, contradictory, judged
from stagecert.networks.bounding.search import CACHED_NUMBERS
from stagecert.networks.graph import Network


@dataclass(frozen=True)
class Job:
    """What `bound` was asked, read and checked."""

    network: Network
    parts: Split
    regions: Any
    rows: np.ndarray
    goal: np.ndarray | None
    how: Intermediate
    limits: dict
    dtype: Any
    memory: float
    show: "Progress"

    def part(self, some: np.ndarray) -> "Job":
        """The same for some of the boxes."""
        return replace(
            self,
            regions=self.regions[some],
            rows=self.rows[some],
            goal=None if self.goal is None else self.goal[some],
            how=self.how.chunk(some),
            show=self.show.part(int(some[0]), self.regions.count),
        )

    def done(self, value, bound, some: Any = slice(None), limits: Any = None) -> np.ndarray:
        """Which problems are finished with these numbers; `limits` are others on the gap."""
        done = closed(value, bound, limits or self.limits)
        if self.goal is not None:
            done |= (bound > self.goal[some]) | (value <= self.goal[some])
        # What contradicts itself is left to the search, which says so.
        return done & ~contradictory(value, bound)

    def judged(self, value, bound, otherwise: np.ndarray, some: Any = slice(None)) -> np.ndarray:
        """Statuses of some problems by these numbers; see `judged`."""
        goal = None if self.goal is None else self.goal[some]
        return judged(value, bound, goal, self.limits, otherwise)


class Progress:
    """Tells the user how far a job is; see `bound`."""

    def __init__(self, given, before: int = 0, total: int = 0):
        self.given, self.before, self.total = given, before, total

    def part(self, before: int, total: int) -> "Progress":
        """The same, for a part of the boxes."""
        return Progress(self.given, before, total)

    def __call__(self, what: str, finished: int, all_of_them: int) -> None:
        if callable(self.given):
            self.given(what, finished, all_of_them)
        elif self.given:
            from rich.console import Console

            Console(stderr=True).print(
                f"boxes from {self.before + 1} of {self.total}: {what} {finished}/{all_of_them}"
            )


def objective_rows(network: Network, boxes: int, objectives: Any) -> np.ndarray:
    size = network.output_size
    rows: Any = np.eye(size) if objectives is None else np.asarray(objectives, np.float64)
    if rows.ndim == 2:
        rows = np.broadcast_to(rows, (boxes, *rows.shape))
    if rows.ndim != 3 or rows.shape[0] != boxes or rows.shape[2] != size:
        raise ProblemError(
            f"objectives must have shape ({boxes}, targets, {size}) or (targets, {size}): boxes, "
            f"objectives, outputs; they have shape {rows.shape}."
        )
    if rows.shape[1] == 0:
        raise ProblemError("objectives has no rows.")
    if not np.all(np.isfinite(rows)):
        at = np.argwhere(~np.isfinite(rows))[0].tolist()
        raise ProblemError(f"objectives is not finite at {at}.")
    tiny = float(np.finfo(np.float64).tiny)
    if np.any((rows != 0) & (np.abs(rows) < tiny)):
        raise ProblemError(
            f"objectives has entries below {tiny:.3g}, which processors take for zero; scale them."
        )
    return rows


def goal_of(threshold, shape) -> np.ndarray | None:
    if threshold is None:
        return None
    goal = np.asarray(threshold, np.float64)
    try:
        goal = np.broadcast_to(goal, shape)
    except ValueError:
        raise ProblemError(
            f"threshold must be a number or have shape {shape}, not {goal.shape}."
        ) from None
    if np.any(np.isnan(goal)):
        raise ProblemError("threshold has a NaN.")
    return goal


def default_memory() -> float:
    """GiB that arrays may take if nothing else is said."""
    known = {} if jax.default_backend() == "cpu" else jax.devices()[0].memory_stats() or {}
    return known.get("bytes_limit", 2**32) / 2**31


def boxes_at_once(parts: Split, shapes, targets: int, memory: float, quick: bool = False) -> int:
    """How many boxes of inputs of these shapes are bounded together, each for some targets.

    `quick`: by quick steps, which need fewer numbers of each neuron than the search.
    """
    neurons = sum(math.prod(layer.shape) for layer in parts.layers)
    inputs = sum(math.prod(shape) for shape in shapes)
    # The search holds about 40 numbers of 4 bytes for each neuron of a lane.
    of_lane = 160 * (neurons + 2 * inputs)
    lanes = max(int(memory * 2**30 / max(of_lane, 1)), 1)
    if jax.default_backend() == "cpu":
        cached = (9 if quick else 3) * CACHED_NUMBERS
        lanes = min(lanes, max(cached // max(neurons, 1), 1))
    return max(lanes // targets, 1)
