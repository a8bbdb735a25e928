"""What a search knows: the best weights and the best visits so far, and when to stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stagecert.applications.mdp.adversary import Adversary
from stagecert.applications.mdp.model import MDP
from stagecert.solution import Status

Report = Callable[[int, float, float], None]  # is called with iterations, value and bound


@dataclass(frozen=True)
class Limits:
    """When to stop: value - bound <= absolute + relative * |bound|, or a limit."""

    absolute: float
    relative: float
    iterations: int
    deadline: float
    report: Report


@dataclass
class Search:
    """The best of what was offered.

    Attributes:
        x: feasible weights, whose reward proves the value.
        visits, mass: of a policy, which prove the bound.
    """

    mdp: MDP
    adversary: Adversary
    limits: Limits
    x: np.ndarray = field(init=False)
    visits: np.ndarray = field(init=False)
    mass: np.ndarray = field(init=False)
    value: float = np.inf
    bound: float = -np.inf
    iterations: int = 0

    def begin(self) -> None:
        """Starts with the uniform policy and weights in the middle, so that something is known."""
        uniform = np.full(self.mdp.shape, 1 / self.mdp.actions)
        self.offer_visits(*self.mdp.occupancy(uniform))
        self.offer_weights(self.adversary.weights.start())

    def offer_weights(self, x: np.ndarray) -> float:
        """Keeps the weights if they are the best so far; returns their value."""
        x = self.adversary.weights.feasible(x)
        value = self.adversary.value(self.mdp, self.adversary.reward(x))
        if value < self.value:
            self.value, self.x = value, x.copy()
        return value

    def offer_visits(self, visits: np.ndarray, mass: np.ndarray) -> float:
        """Keeps the visits if they are the best so far; returns their bound."""
        bound = self.adversary.bound(self.mdp, visits, mass)
        if bound > self.bound:
            self.bound, self.visits, self.mass = bound, visits.copy(), mass
        return bound

    @property
    def gap(self) -> float:
        """value - bound."""
        return self.value - self.bound

    def within(self, relative: float) -> bool:
        """Whether the gap is within the tolerance, or at least within a coarser relative one."""
        relative = max(relative, self.limits.relative)
        near = self.gap <= self.limits.absolute + relative * abs(self.bound)
        return bool(np.isfinite(self.bound) and near)

    @property
    def relative_tolerance(self) -> float:
        """The tolerance as a share of the largest reward, or of the bound where that is less."""
        size = self.adversary.size or 1.0
        return self.limits.relative * min(abs(self.bound) / size, 1.0) + self.limits.absolute / size

    @property
    def exhausted(self) -> bool:
        """Whether all that is left of the gap is what rounding is charged."""
        charge = self.adversary.value_charge(self.mdp) + self.adversary.bound_charge(self.mdp)
        return self.gap <= 2 * charge

    def status(self) -> Status:
        """Why the search ended."""
        if self.value == -np.inf:
            return Status.INFEASIBLE
        if self.within(0.0):
            return Status.GAP_REACHED
        if time.perf_counter() > self.limits.deadline:
            return Status.TIME_LIMIT
        if self.iterations >= self.limits.iterations:
            return Status.ITERATION_LIMIT
        return Status.STALLED

    @property
    def over_limits(self) -> bool:
        """Whether a limit is reached."""
        late = time.perf_counter() > self.limits.deadline
        return late or self.iterations >= self.limits.iterations

    @property
    def over(self) -> bool:
        """Whether a limit is reached, or nothing more can be won."""
        return self.over_limits or self.exhausted
