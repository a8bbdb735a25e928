"""What an engine hands back: the best fit and the best bound so far, and when to stop."""

import time
from dataclasses import dataclass, replace

import numpy as np

from stagecert.solution import Status


@dataclass(frozen=True)
class Tolerance:
    """The gap asked for: value - bound <= absolute + relative * |bound|."""

    absolute: float
    relative: float

    def allowed(self, bound: float) -> float:
        """The largest gap that will do."""
        return self.absolute + self.relative * abs(bound)

    def reached(self, search: "Search") -> bool:
        """Whether a search is done."""
        return search.value - search.bound <= self.allowed(search.bound)


@dataclass(frozen=True)
class Search:
    """An isotonic fit of the nodes, its value, a proven lower bound and its multipliers."""

    engine: str
    fit: np.ndarray
    multipliers: np.ndarray
    value: float
    bound: float
    status: Status = Status.STALLED
    iterations: int = 0

    @staticmethod
    def nothing(engine: str) -> "Search":
        """Before anything is known."""
        return Search(engine, np.empty(0), np.empty(0), np.inf, -np.inf)

    def better(self, candidate, iterations: int) -> "Search":
        """With the better value and the better bound of the two."""
        fit, multipliers, value, bound = candidate
        search = replace(self, iterations=iterations)
        if value < search.value:
            search = replace(search, fit=fit, value=value)
        if bound > search.bound:
            search = replace(search, multipliers=multipliers, bound=bound)
        return search

    def joined(self, other: "Search", tolerance: Tolerance) -> "Search":
        """What two searches know together, under the name of the second."""
        both = replace(self, engine=f"{self.engine}, {other.engine}").better(
            (other.fit, other.multipliers, other.value, other.bound), other.iterations
        )
        return both.ended(tolerance, self.iterations + other.iterations)

    def ended(self, tolerance, iterations=0, max_iterations=np.inf, deadline=np.inf) -> "Search":
        """With the reason why the search ended."""
        status = Status.STALLED
        if tolerance.reached(self):
            status = Status.GAP_REACHED
        elif time.perf_counter() > deadline:
            status = Status.TIME_LIMIT
        elif iterations >= max_iterations:
            status = Status.ITERATION_LIMIT
        return replace(self, status=status, iterations=iterations)
