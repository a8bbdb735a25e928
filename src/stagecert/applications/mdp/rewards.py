"""Sets of rewards for users to state; `adversary` turns any of them into what engines work with.

Every set is the image of weights: reward = nominal + effects(weights), weights in a simple set.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagecert.applications.mdp.adversary import Adversary, Entrywise, Linear
from stagecert.applications.mdp.checking import amount, numbers, reject
from stagecert.applications.mdp.model import MDP
from stagecert.applications.mdp.weights import Capped, Chances, LibrarySet, UnitBall
from stagecert.errors import ProblemError
from stagecert.sets import AbstractSet, Ball, Box


@dataclass(frozen=True)
class Mixture:
    """Rewards that are mixtures of scenarios: sum_m w_m scenarios[m], w >= 0, sum w = 1.

    Args:
        scenarios: shape (scenarios, states, actions), or (scenarios, horizon, states, actions).
    """

    scenarios: Any


@dataclass(frozen=True)
class Budget:
    """Rewards nominal - deviation * w with 0 <= w <= 1 and sum w <= budget.

    Args:
        nominal: shape (states, actions), or (horizon, states, actions).
        deviation: how far each reward can fall; a number or an array that broadcasts, not negative.
        budget: how many rewards the adversary can lower by their whole deviation; not negative.
        over_time: whether a reward may be lowered at some steps only. Always so if the nominal
            reward or the deviation is given over time.
    """

    nominal: Any
    deviation: Any
    budget: float
    over_time: bool = False


@dataclass(frozen=True)
class Effects:
    """Rewards nominal + sum_j w_j effects[j], such as those of sensors or blockades.

    Args:
        nominal: shape (states, actions), or (horizon, states, actions).
        effects: shape (effects, states, actions), or (effects, horizon, states, actions).
        budget: if given, 0 <= w <= 1 and sum w <= budget.
        weights: if given, a set of `stagecert` whose points have shape (effects,).
    """

    nominal: Any
    effects: Any
    budget: float | None = None
    weights: AbstractSet | None = field(default=None)


def adversary(rewards: Any, mdp: MDP) -> Adversary:
    """What the engines work with.

    Raises:
        ProblemError: bad input; the entry is named.
    """
    made = _adversary(rewards, mdp)
    if mdp.endless and (made.nominal.ndim == 3 or made.effects.over_time):
        raise ProblemError("Without a horizon, rewards must be the same at all steps.")
    return made


def _adversary(rewards: Any, mdp: MDP) -> Adversary:
    if isinstance(rewards, Mixture):
        return _mixture(rewards, mdp)
    if isinstance(rewards, Budget):
        return _budget(rewards, mdp)
    if isinstance(rewards, Effects):
        return _effects(rewards, mdp)
    if isinstance(rewards, AbstractSet):
        return _library(rewards, mdp)
    if hasattr(rewards, "shape") or isinstance(rewards, list | tuple):
        # A known reward is a mixture of one scenario.
        known = numbers("rewards", rewards)
        mdp.inner("rewards", known)  # a message about this shape, not that of a mixture
        return _mixture(Mixture(known[None]), mdp)
    raise ProblemError(
        f"rewards must be Mixture, Budget, Effects, a set of stagecert or an array, not "
        f"{type(rewards).__name__}."
    )


def _mixture(rewards: Mixture, mdp: MDP) -> Adversary:
    scenarios = mdp.inner("scenarios", rewards.scenarios, leading=1)
    if not len(scenarios):
        raise ProblemError("scenarios are empty: there is no reward to pick.")
    nominal = np.zeros(scenarios.shape[1:])
    lowest = scenarios.min(axis=0)
    least = next((w for w, table in enumerate(scenarios) if np.all(table == lowest)), None)
    return Adversary(
        Chances(len(scenarios)), Linear(scenarios), nominal,
        size=float(np.abs(scenarios).max()),
        lowest=None if least is None else np.eye(1, len(scenarios), least)[0],
    )  # fmt: skip


def _budget(rewards: Budget, mdp: MDP) -> Adversary:
    nominal = mdp.inner("nominal", rewards.nominal)
    deviation = numbers("deviation", rewards.deviation)
    reject(deviation < 0, "deviation", deviation, "it must not be negative")
    shape = (mdp.states, mdp.actions)
    over_time = rewards.over_time or nominal.ndim == 3 or deviation.ndim == 3
    outer = (mdp.horizon, *shape) if over_time else shape
    try:
        deviation = np.broadcast_to(deviation, outer)
    except ValueError:
        raise ProblemError(
            f"deviation has shape {deviation.shape}, which does not broadcast to {outer}."
        ) from None
    deviation = np.ascontiguousarray(np.swapaxes(deviation, -1, -2))
    budget = amount("budget", rewards.budget)
    lowest = None
    if budget == 0 or budget >= deviation.size:
        lowest = np.full(deviation.shape, float(budget > 0))
    return Adversary(
        Capped(deviation.shape, budget), Entrywise(-deviation), nominal,
        size=float(np.max(np.abs(nominal) + deviation)),
        lowest=lowest,
    )  # fmt: skip


def _effects(rewards: Effects, mdp: MDP) -> Adversary:
    nominal = mdp.inner("nominal", rewards.nominal)
    effects = mdp.inner("effects", rewards.effects, leading=1)
    if not len(effects):
        raise ProblemError("effects are empty; a reward that is known is an array.")
    if (rewards.budget is None) == (rewards.weights is None):
        raise ProblemError("Effects needs either a budget or a set of weights.")
    if rewards.budget is not None:
        weights = Capped((len(effects),), amount("budget", rewards.budget))
        largest = np.ones(len(effects))
    else:
        assert rewards.weights is not None
        weights = LibrarySet(rewards.weights, (len(effects),), "weights")
        largest = weights.largest
    spread = np.tensordot(largest, np.abs(effects), axes=1)
    return Adversary(
        weights, Linear(effects), nominal, size=float(np.max(np.abs(nominal) + spread))
    )


def _library(rewards: AbstractSet, mdp: MDP) -> Adversary:
    """A set of the library whose points are rewards of the outer shape."""
    rewards.validate()
    shape = (mdp.states, mdp.actions)
    if isinstance(rewards, Box):
        ends = np.broadcast_arrays(np.asarray(rewards.lower), np.asarray(rewards.upper))
        ends = [np.broadcast_to(end, shape) if end.ndim == 0 else end for end in ends]
        lower, upper = (mdp.inner("Box of rewards", end) for end in ends)
        return Adversary(
            Capped(lower.shape, lower.size), Entrywise(lower - upper), upper,
            size=float(np.max(np.maximum(np.abs(lower), np.abs(upper)))),
            lowest=np.ones(lower.shape), lowest_reward=lower,
        )  # fmt: skip
    if isinstance(rewards, Ball):
        middle = mdp.inner("Ball.middle", rewards.middle)
        radius = float(np.asarray(rewards.radius))
        return Adversary(
            UnitBall(middle.shape), Entrywise(np.full(middle.shape, radius)), middle,
            size=float(np.abs(middle).max()) + radius,
        )  # fmt: skip
    outer = np.shape(rewards.centre())
    if outer not in (shape, (mdp.horizon, *shape)):
        raise ProblemError(
            f"Points of {type(rewards).__name__} have shape {outer}; as rewards they need "
            f"{shape} or, over time, {(mdp.horizon, *shape)}."
        )
    weights = LibrarySet(rewards, outer, "rewards", swap=True)
    swapped = (*outer[:-2], outer[-1], outer[-2])
    return Adversary(
        weights, Entrywise(np.ones(swapped)), np.zeros(swapped), size=float(weights.largest.max())
    )
