"""Markov decision processes over a finite horizon whose rewards an adversary picks from a set."""

from stagecert.applications.mdp.environments import from_gymnasium
from stagecert.applications.mdp.model import MDP
from stagecert.applications.mdp.resources import Resource
from stagecert.applications.mdp.rewards import Budget, Effects, Mixture
from stagecert.applications.mdp.solving import (
    ENGINES,
    RobustPolicy,
    WorstCase,
    solve,
    worst_case,
)

__all__ = [
    "ENGINES", "MDP", "Budget", "Effects", "Mixture", "Resource", "RobustPolicy", "WorstCase",
    "from_gymnasium", "solve", "worst_case",
]  # fmt: skip
