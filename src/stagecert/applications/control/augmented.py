"""Limits on states by the method of multipliers, where the dynamics contract.

States beyond their limits cost a quadratic around multipliers; accelerated projected gradient steps
in the inputs lower that sum, and whenever it is nearly lowest the multipliers move to what the
quadratic pulls with. Any multipliers prove a bound, so every look at the search may end it.

Limits are taken a little tighter than they are, by what the tolerance allows at the multipliers'
prices: then steps end within the limits, not next to them.
"""

from dataclasses import dataclass

import numpy as np

from stagecert.applications.control.certificate import Certifier
from stagecert.applications.control.linear import LinearQuadratic, apply, apply_transposed
from stagecert.applications.control.result import Evaluated, Limits, Search
from stagecert.applications.control.sweeps import (
    gradient,
    linear_recursion,
    roll_out,
    sweep_back,
)

# Steps between two looks, and looks before the multipliers move at the latest.
_LOOK, _PATIENCE = 8, 5
# The penalty's first weight, in units of Q, and what it grows by where states stay out.
_WEIGHT, _GROW = 10.0, 3.0
# The share of the tolerance that tighter limits may cost, and of a limit's range they may take.
_SHARE, _MOST = 0.3, 0.02


@dataclass
class _Penalty:
    """A quadratic on what is beyond the limits: its weights, multipliers and margin."""

    lower: np.ndarray
    upper: np.ndarray
    weight: np.ndarray
    multipliers: np.ndarray
    margin: float = 0.0

    def pull(self, states: np.ndarray) -> np.ndarray:
        """Its slope in the states x_1, ..., x_T; also the multipliers to move to."""
        shifted = states[1:] + self.multipliers / self.weight
        within = np.clip(shifted, self.lower + self.margin, self.upper - self.margin)
        return self.weight * (shifted - within)

    def hidden(self, states: np.ndarray, pull: np.ndarray) -> float:
        """What moving the multipliers may still change."""
        with np.errstate(invalid="ignore"):
            above = np.where(pull > 0, np.abs(states[1:] - self.upper + self.margin), 0.0)
            below = np.where(pull < 0, np.abs(states[1:] - self.lower - self.margin), 0.0)
        return float(np.sum(np.abs(pull) * (above + below)))


def search_augmented(
    problem: LinearQuadratic, certifier: Certifier, inputs: np.ndarray, limits: Limits, most: int
) -> Search:
    """Steps until the gap is reached, `most` steps are made or the clock says so."""
    assert certifier.limits is not None
    lower, upper = certifier.limits
    # States without a weight of their own still need one where they have limits.
    diagonal = np.diagonal(problem.Q, axis1=1, axis2=2)
    weight = _WEIGHT * np.maximum(diagonal, 1e-3 * max(float(diagonal.max()), 1e-300))
    penalty = _Penalty(lower, upper, weight, np.zeros_like(lower))
    steepest = 1.1 * _steepest(problem, weight)
    width = float(np.min(upper - lower))
    states = roll_out(problem, inputs)
    old_inputs, old_states, momentum = inputs, states, 1.0
    search, looks, before = Search(states, inputs), 0, np.inf
    for step in range(1, most + 1):
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum**2))
        ahead = (momentum - 1.0) / following
        # States are linear in the inputs: those of extrapolated inputs need no pass.
        point = inputs + ahead * (inputs - old_inputs)
        there = states + ahead * (states - old_states)
        slope = gradient(problem, point, sweep_back(problem, there, penalty.pull(there)))
        old_inputs, old_states = inputs, states
        inputs = problem.project(point - slope / steepest)
        states = roll_out(problem, inputs)
        if not np.all(np.isfinite(states)):
            return search.counted(step)
        # Momentum that points uphill is dropped.
        uphill = float(np.sum((point - inputs) * (inputs - old_inputs))) > 0
        momentum = 1.0 if uphill else following
        if step % _LOOK and step < most:
            continue
        pull = penalty.pull(states)
        now, left = _evaluated(problem, certifier, states, inputs, pull)
        search = search.seen(now)
        if limits.late() or limits.reached(search.value, search.bound):
            return search.counted(step)
        looks += 1
        solved = left <= 3 * penalty.hidden(states, pull)
        if not solved and looks < _PATIENCE:
            continue
        out = max(float(np.max(states[1:] - upper)), float(np.max(lower - states[1:])), 0.0)
        if solved and out > 0.5 * before:
            penalty.weight = _GROW * penalty.weight
            steepest *= _GROW
        penalty.multipliers, looks, before, momentum = pull, 0, out, 1.0
        total = float(np.abs(pull).sum())
        if total > 0:
            penalty.margin = min(_SHARE * limits.allowed(search.bound) / total, _MOST * width)
    return search.counted(most)


def _evaluated(problem, certifier, states, inputs, pull) -> tuple[Evaluated, float]:
    """A trajectory with its proof; and how far the penalised cost may still fall."""
    multipliers = sweep_back(problem, states, pull)
    slope = gradient(problem, inputs, multipliers)
    proof = certifier.certify(states, inputs, multipliers, slope, pull)
    left = -certifier.least(slope, inputs, problem.input_curvature)[0]
    evaluated = Evaluated(states, inputs, multipliers, slope, proof.value, proof.bound, pull)
    return evaluated, left


def _steepest(problem: LinearQuadratic, weight: np.ndarray) -> float:
    """About the largest curvature in the inputs, were all states beyond their limits."""
    direction = np.random.default_rng(0).normal(size=(problem.horizon, problem.inputs))
    found = 0.0
    for _ in range(_LOOK):
        direction = direction / np.linalg.norm(direction)
        moved = linear_recursion(problem.A, np.zeros(problem.states), apply(problem.B, direction))
        swept = sweep_back(problem, moved, weight * moved[1:] + apply(problem.Q, problem.reference))
        turned = apply(problem.R, direction) + apply_transposed(problem.B, swept)
        found, direction = float(np.sum(direction * turned)), turned
    return found
