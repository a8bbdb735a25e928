"""Tabular environments of Gymnasium as processes."""

from typing import Any

import numpy as np
import scipy.sparse as sp

from stagecert.applications.mdp.checking import whole
from stagecert.applications.mdp.model import MDP
from stagecert.errors import ProblemError


def from_gymnasium(
    environment: Any, horizon: int | None, initial: Any = None, discount: float = 1.0
) -> tuple[MDP, np.ndarray]:
    """Reads a tabular environment (FrozenLake, CliffWalking, Taxi, ...).

    Args:
        environment: one with `unwrapped.P`, or that table itself: `P[state][action]` is a list of
            (probability, next state, reward, whether the episode ends).
        horizon, discount: as for `MDP`.
        initial: a state or a distribution; by default the environment's own distribution, state 0
            for a table alone.

    Returns:
        The process, and the expected rewards of shape (states, actions). Steps that end the episode
        lead nowhere, and nothing is earned after them.

    >>> table = {
    ...     0: {0: [(1.0, 1, 0.0, False)]},
    ...     1: {0: [(0.5, 0, 1.0, False), (0.5, 1, 5.0, True)]},
    ... }
    >>> process, rewards = from_gymnasium(table, horizon=4)
    >>> rewards.tolist()
    [[0.0], [3.0]]
    """
    inner = getattr(environment, "unwrapped", environment)
    table = getattr(inner, "P", environment)
    sized = hasattr(table, "__getitem__") and hasattr(table, "__len__")
    if isinstance(table, str) or not sized or not len(table):
        raise ProblemError(
            f"{environment!r} has no table P of transitions; give a tabular environment, as "
            "gymnasium.make returns it, or its table."
        )
    if initial is None:
        initial = getattr(inner, "initial_state_distrib", 0)
    states, actions = len(table), len(table[0])
    rewards, ends = np.zeros((states, actions)), np.zeros((states, actions))
    entries: list[tuple[list, list, list]] = [([], [], []) for _ in range(actions)]
    for s in range(states):
        if s not in table and not isinstance(table, list):
            raise ProblemError(f"P has no state {s}; states must be 0, ..., {states - 1}.")
        if len(table[s]) != actions:
            raise ProblemError(f"P[{s}] has {len(table[s])} actions, but P[0] has {actions}.")
        for a in range(actions):
            for k, step in enumerate(table[s][a]):
                where = f"P[{s}][{a}][{k}]"
                if len(step) != 4:
                    raise ProblemError(f"{where} must have 4 entries, not {len(step)}.")
                chance, following, reward, done = step
                if not (0 <= chance <= 1):
                    raise ProblemError(f"{where} has the probability {chance}.")
                if not np.isfinite(reward):
                    raise ProblemError(f"{where} has the reward {reward}.")
                following = whole(f"The next state of {where}", following, 0)
                if following >= states:
                    raise ProblemError(f"{where} leads to {following}; the last is {states - 1}.")
                rewards[s, a] += chance * reward
                if done:
                    ends[s, a] += chance
                elif chance:
                    for part, item in zip(entries[a], (chance, s, following), strict=True):
                        part.append(item)
    matrices = [
        sp.csr_array((chance, (row, column)), shape=(states, states))
        for chance, row, column in entries
    ]
    return MDP(matrices, horizon, initial, ends=np.minimum(ends, 1.0), discount=discount), rewards
