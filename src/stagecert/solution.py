"""What `solve` returns."""

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagecert.certificate import Certificate
from stagecert.evidence import Assumptions
from stagecert.html import facts_table


class Status(enum.Enum):
    """Why a solve ended; each value is the sentence a user reads."""

    GAP_REACHED = "The gap is within the tolerance asked for."
    TARGET_PROVEN = "The lower bound is above the target: no feasible point is that low."
    TARGET_MET = "A feasible point is at or below the target: the target cannot be proven."
    ITERATION_LIMIT = "The iteration limit was reached; value and bound are still valid."
    TIME_LIMIT = "The time limit was reached; value and bound are still valid."
    STALLED = "The search made no more progress; value and bound are still valid."
    BOUNDS_CROSSED = (
        "A lower bound exceeds its upper bound at a point the search met, so feasible points "
        "cannot be built stage by stage; the lower bound on the optimum is still valid."
    )
    CONTRADICTED = (
        "The lower bound exceeds the value of a feasible point, so the problem is not what it was "
        "declared to be (convex objective and lower bounds, concave upper bounds, curvature); "
        "stagecert.check looks for the place."
    )
    INFEASIBLE = (
        "No point is feasible: without the objective, the certificate's bound is positive, and no "
        "feasible point could be above it."
    )
    NOT_FINITE = "An evaluation was not finite; value and bound are the best found before that."

    @property
    def solved(self) -> bool:
        """Whether there is an answer of the kind that was asked for."""
        return self in (Status.GAP_REACHED, Status.TARGET_PROVEN, Status.TARGET_MET)


@dataclass(frozen=True)
class Trace:
    """What the search knew after each iteration, in its own precision; the best so far.

    Attributes:
        value, bound: arrays, one entry for each iteration.
        passes: how many forward or backward passes had been made.
        solver: the name of the solver that made the iteration.
    """

    value: np.ndarray
    bound: np.ndarray
    passes: np.ndarray
    solver: tuple[str, ...]


@dataclass(frozen=True)
class Stats:
    """What a solve cost.

    Attributes:
        iterations: steps of the solvers, those that look for a feasible point included.
        passes: forward or backward passes over the stages that the search made; certifying its
            result in float64 takes five more.
        seconds: wall time, compilation included; of the whole batch for `solve_batch`.
        trace: one entry for each iteration on the problem itself; for infeasible problems, on the
            largest side constraint (each in its own unit), whose bound became positive.
    """

    iterations: int
    passes: int
    seconds: float
    trace: Trace


@dataclass(frozen=True)
class Solution:
    """A feasible point, a proven lower bound, and the gap between them.

    Attributes:
        value: objective at the best feasible point found; an upper bound on the optimum. Infinite
            while no point that satisfies the side constraints is known.
        bound: the best certified lower bound; infinite for infeasible problems.
        status: why the search ended; `status.value` is a sentence.
        inputs, blocks: the feasible point.
        certificate: what proves the bound.
        stats: iterations, passes, seconds, trace.
        message: the status with its particulars (which stage and entry, for crossed bounds).
        assumptions: what is known of the convexity that the bound rests on, part by part; `str` of
            it is "proven", "sampled" or "unchecked".
    """

    value: float
    bound: float
    status: Status
    inputs: Any
    blocks: tuple
    certificate: Certificate
    stats: Stats
    message: str = field(default="")
    assumptions: Assumptions = field(default_factory=lambda: Assumptions.unchecked(0))

    @property
    def gap(self) -> float:
        """value - bound: how far the value can be from the optimum."""
        return float(self.value - self.bound) if np.isfinite(self.value) else float("inf")

    @property
    def relative_gap(self) -> float:
        """gap / max(|bound|, |value|), or 0 if the gap is 0."""
        if not np.isfinite(self.gap):
            return float("inf")
        scale = max(abs(self.bound), abs(self.value))
        return self.gap / scale if self.gap > 0 else 0.0

    def __repr__(self) -> str:
        return (
            f"Solution(value={self.value:.10g}, bound={self.bound:.10g}, gap={self.gap:.3g}, "
            f"status={self.status.name}, passes={self.stats.passes})"
        )

    def _repr_html_(self) -> str:
        """What notebooks show."""
        facts = {
            "value": f"{self.value:.10g}",
            "bound": f"{self.bound:.10g}",
            "gap": f"{self.gap:.3g}",
            "status": f"{self.status.name}: {self.message or self.status.value}",
            "assumptions": str(self.assumptions),
            "iterations": self.stats.iterations,
            "passes": self.stats.passes,
            "seconds": f"{self.stats.seconds:.3g}",
        }
        return facts_table("Solution", facts)
