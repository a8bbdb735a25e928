"""The adversary: weights, their effects on the rewards, and proven values for either player."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from stagecert.applications.mdp.model import MDP
from stagecert.applications.mdp.weights import Weights

_UNIT = 0.5 * float(np.finfo(float).eps)


class Map(Protocol):
    """A linear map from weights to rewards, with its adjoint."""

    def forth(self, x: np.ndarray) -> np.ndarray:
        """What weights add to the nominal reward."""
        ...

    def back(self, visits: np.ndarray) -> np.ndarray:
        """What a unit of each weight adds to the total reward, given visits over time."""
        ...

    @property
    def span(self) -> float:
        """The largest effect of a unit of any weight on any reward."""
        ...

    @property
    def terms(self) -> int:
        """How many weights a reward depends on."""
        ...

    @property
    def over_time(self) -> bool:
        """Whether effects differ from step to step."""
        ...


@dataclass(frozen=True)
class Entrywise:
    """A weight for each reward."""

    scale: np.ndarray

    def forth(self, x):
        return self.scale * x

    def back(self, visits):
        return self.scale * (visits if self.scale.ndim == 3 else visits.sum(axis=0))

    @property
    def span(self):
        return float(np.abs(self.scale).max())

    @property
    def terms(self):
        return 1

    @property
    def over_time(self):
        return self.scale.ndim == 3


@dataclass(frozen=True)
class Linear:
    """An array of effects for each weight."""

    effects: np.ndarray

    @cached_property
    def _flat(self) -> np.ndarray:
        return self.effects.reshape(len(self.effects), -1)

    def forth(self, x):
        return (x @ self._flat).reshape(self.effects.shape[1:])

    def back(self, visits):
        return self._flat @ (visits if self.effects.ndim == 4 else visits.sum(axis=0)).ravel()

    @property
    def span(self):
        return float(np.abs(self.effects).max())

    @property
    def terms(self):
        return len(self.effects)

    @property
    def over_time(self):
        return self.effects.ndim == 4


@dataclass(frozen=True)
class Adversary:
    """Picks reward = nominal + effects(x) for x in a set.

    Attributes:
        weights: the set of x.
        effects: the linear map.
        nominal: the reward at x = 0, (actions, states) or (horizon, actions, states).
        size: a bound on |nominal| + |effects|(|x|), entry by entry, over the set.
        lowest: x with the lowest reward in every entry, if there is one: then nothing is left to
            search, since the value of a process grows with every reward.
        lowest_reward: that reward, where rounding would blur it.
    """

    weights: Weights
    effects: Map
    nominal: np.ndarray
    size: float
    lowest: np.ndarray | None = None
    lowest_reward: np.ndarray | None = None

    def reward(self, x: np.ndarray) -> np.ndarray:
        """The reward of weights."""
        return self.nominal + self.effects.forth(x)

    def value(self, mdp: MDP, reward: np.ndarray) -> float:
        """At least the value of the best policy for `reward(x)`, x feasible, in real arithmetic.

        No policy guarantees more, so this is an upper bound on the robust value.
        """
        return float(np.nextafter(mdp.best_value(reward) + self.value_charge(mdp), np.inf))

    def value_charge(self, mdp: MDP) -> float:
        """What rounding and steps after the horizon may add to a value, whatever the weights."""
        # The reward of a point exactly in the set is this far off, entry by entry.
        rounded = self.weights.rounding + 2 * (self.effects.terms + 3) * _UNIT
        off = 1.01 * rounded * self.size
        rounding = 1.01 * (mdp.value_error(1.01 * self.size) + off * mdp.mass)
        return rounding + mdp.later(1.01 * self.size)

    def bound(self, mdp: MDP, visits: np.ndarray, mass: np.ndarray) -> float:
        """At most what a policy with these visits earns for any reward of the set.

        Args:
            mdp: the process.
            visits: computed by `MDP.occupancy`, or averages of such.
            mass: probabilities of the states at the end, likewise.
        """
        nominal = float(np.sum(visits * self.nominal)) + float(mass @ mdp.final)
        least = nominal + self.weights.minimum(self.effects.back(visits))
        return float(np.nextafter(least - self.bound_charge(mdp), -np.inf))

    def bound_charge(self, mdp: MDP) -> float:
        """What rounding and steps after the horizon may take from a bound, whatever the visits."""
        # Visits are off by `relative_visit_error`; a sum of n terms is off by at most n units of
        # the sum of their sizes. Averages over iterations add as many roundings again.
        terms = int(np.prod(mdp.shape)) + 2 * self.effects.terms + 64
        relative = 2 * mdp.relative_visit_error + 4 * terms * _UNIT
        final = float(np.abs(mdp.final).max())
        rounding = 1.01 * relative * mdp.mass * (1.01 * self.size + final) + 1e-290
        return rounding + mdp.later(1.01 * self.size)
