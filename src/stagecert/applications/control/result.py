"""What an engine hands back: the best trajectory and the best bound so far, and when to stop."""

import time
from dataclasses import dataclass, replace

import numpy as np

from stagecert.applications.control.certificate import Certifier
from stagecert.applications.control.linear import LinearQuadratic
from stagecert.applications.control.sweeps import gradient, roll_out, sweep_back
from stagecert.solution import Status


@dataclass(frozen=True)
class Limits:
    """When to stop: value - bound <= absolute + relative * |bound|, steps, or the clock."""

    absolute: float
    relative: float
    iterations: int
    deadline: float = np.inf

    def reached(self, value: float, bound: float) -> bool:
        """Whether the gap is small enough."""
        return value - bound <= self.allowed(bound)

    def allowed(self, bound: float) -> float:
        """The largest gap that will do."""
        return self.absolute + self.relative * abs(bound) if np.isfinite(bound) else 0.0

    def late(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() > self.deadline


@dataclass(frozen=True)
class Search:
    """The best trajectory and the best bound, each with what it came from."""

    states: np.ndarray
    inputs: np.ndarray
    value: float = np.inf
    bound: float = -np.inf
    multipliers: np.ndarray | None = None
    pull: np.ndarray | None = None
    iterations: int = 0

    def seen(self, step: "Evaluated") -> "Search":
        """With the better value and the better bound of the two."""
        search = self
        if step.value < search.value:
            search = replace(search, states=step.states, inputs=step.inputs, value=step.value)
        if step.bound > search.bound:
            search = replace(search, multipliers=step.multipliers, pull=step.pull, bound=step.bound)
        return search

    def joined(self, other: "Search") -> "Search":
        """What two searches know together."""
        search = self.counted(other.iterations)
        if other.value < search.value:
            search = replace(search, states=other.states, inputs=other.inputs, value=other.value)
        if other.bound > search.bound:
            search = replace(
                search, multipliers=other.multipliers, pull=other.pull, bound=other.bound
            )
        return search

    def counted(self, iterations: int) -> "Search":
        """After more iterations."""
        return replace(self, iterations=self.iterations + iterations)

    def status(self, limits: Limits) -> Status:
        """Why a search that ended here ended."""
        if limits.reached(self.value, self.bound):
            return Status.GAP_REACHED
        if limits.late():
            return Status.TIME_LIMIT
        if self.iterations >= limits.iterations:
            return Status.ITERATION_LIMIT
        return Status.STALLED


@dataclass(frozen=True)
class Evaluated:
    """A trajectory with its multipliers, the gradient in its inputs, its value and its bound.

    `pull` are multipliers of limits on states, where there are such.
    """

    states: np.ndarray
    inputs: np.ndarray
    multipliers: np.ndarray
    slope: np.ndarray
    value: float
    bound: float
    pull: np.ndarray | None = None


def evaluate(
    problem: LinearQuadratic,
    certifier: Certifier,
    inputs: np.ndarray,
    states: np.ndarray | None = None,
) -> Evaluated:
    """Inputs with all that follows from them; states where a feedback has made them already."""
    states = roll_out(problem, inputs) if states is None else states
    multipliers = sweep_back(problem, states)
    slope = gradient(problem, inputs, multipliers)
    proof = certifier.certify(states, inputs, multipliers, slope)
    return Evaluated(states, inputs, multipliers, slope, proof.value, proof.bound)
