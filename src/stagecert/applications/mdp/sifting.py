"""Linear programmes over the actions that matter, for the last digits.

Weights with linear constraints make the robust value a linear programme with a row for each time,
action and state. Near its solution few rows matter: those of reachable states and of actions that
are nearly best. HiGHS solves the programme of these; its multipliers are visits of a policy. Rows
that the new weights make matter are added, until the proven gap is as small as asked.
"""

import time

import numpy as np
import scipy.sparse as sp
from scipy.optimize import linprog

from stagecert.applications.mdp.adversary import Linear
from stagecert.applications.mdp.model import MDP
from stagecert.applications.mdp.search import Search
from stagecert.applications.mdp.weights import Capped, Chances

# Programmes with more rows take longer than first-order steps.
_MOST_ROWS = 10_000
_ROUNDS = 30


def can_sift(search: Search) -> bool:
    """Whether the weights have linear constraints that are known."""
    return isinstance(search.adversary.weights, Capped | Chances)


def few_rows_matter(search: Search) -> bool:
    """Whether a programme of the rows that matter where the search stands is not too large."""
    none = np.zeros(search.mdp.shape, bool)
    return int(np.count_nonzero(_grown(search, none, search.x, search.gap))) <= _MOST_ROWS


def sift(search: Search) -> bool:
    """Improves what the search knows; returns whether any programme was solved."""
    rows = np.zeros(search.mdp.shape, bool)
    solved = False
    for _ in range(_ROUNDS):
        before = search.gap
        rows = _grown(search, rows, search.x, before)
        if np.count_nonzero(rows) > _MOST_ROWS:
            break
        x, visits = _programme(search, rows)
        if x is None or visits is None:
            break
        solved = True
        policy = search.mdp.policy_of(visits, search.mdp.greedy(search.adversary.reward(x)))
        search.offer_visits(*search.mdp.occupancy(policy))
        search.offer_weights(x)
        search.limits.report(search.iterations, search.value, search.bound)
        if search.within(0.0) or search.over:
            break
        rows = _grown(search, rows, x, search.gap)
    return solved


def _grown(search: Search, rows: np.ndarray, x: np.ndarray, gap: float) -> np.ndarray:
    """The rows, and those of reachable states' actions that are within the gap of the best."""
    mdp = search.mdp
    near = rows.copy()
    for t, values, best in mdp.action_values(search.adversary.reward(x)):
        near[t] |= values >= best - gap
    near |= search.visits > 1e-9
    reached = mdp.initial > 0
    for t in range(mdp.horizon):
        near[t] &= reached
        reached = mdp.matrix(t).T @ near[t].ravel().astype(float) > 0
    return near


def _programme(search: Search, rows: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Weights and visits that solve the programme of some rows, or None twice.

    Minimise <initial, v_0> over values v and weights x, with for every row
    v >= (transitions) v_later + nominal + (effects) x.
    """
    mdp, weights = search.mdp, search.adversary.weights
    states = rows.any(axis=1)
    values = int(np.count_nonzero(states))
    number = np.full(states.shape, -1)
    number[states] = np.arange(values)
    t, _, s = np.nonzero(rows)
    count = len(t)
    here = sp.csr_array((np.ones(count), (np.arange(count), number[t, s])), shape=(count, values))
    later, earned = _later(mdp, rows, number, values)
    influence, used = _influence(search.adversary.effects, mdp, rows)
    matrix = sp.hstack([later - here, influence], format="csr")
    limits = -(mdp.over_time(search.adversary.nominal)[rows] + earned)
    cost = np.zeros(values + len(used))
    begins = np.flatnonzero(mdp.initial > 0)
    cost[number[0, begins]] = mdp.initial[begins]
    total = sp.csr_array(np.concatenate([np.zeros(values), np.ones(len(used))])[None])
    equal = {}
    if isinstance(weights, Chances):
        equal = {"A_eq": total, "b_eq": [1.0]}
    elif isinstance(weights, Capped):
        matrix = sp.vstack([matrix, total], format="csr")
        limits = np.append(limits, weights.total)
    seconds = search.limits.deadline - time.perf_counter()
    answer = linprog(
        cost, A_ub=matrix, b_ub=limits, **equal,
        bounds=np.array([(-np.inf, np.inf)] * values + [(0.0, 1.0)] * len(used)),
        options={"time_limit": max(seconds, 0.0)} if np.isfinite(seconds) else {},
    )  # fmt: skip
    if answer.status != 0:
        return None, None
    start = weights.start()
    x = np.zeros(start.size)
    x[used] = answer.x[values:]
    visits = np.zeros(mdp.shape)
    visits[rows] = np.maximum(-answer.ineqlin.marginals[:count], 0.0)
    return x.reshape(start.shape), visits


def _later(mdp: MDP, rows: np.ndarray, number: np.ndarray, values: int):
    """Transitions between numbered values for every row, and what the final states earn."""
    blocks, earned = [], []
    for t in range(mdp.horizon):
        chosen = mdp.matrix(t)[np.flatnonzero(rows[t])]
        last = t == mdp.horizon - 1
        earned.append(chosen @ mdp.final if last else np.zeros(chosen.shape[0]))
        block = chosen.tocoo()
        shape = (block.shape[0], values)
        made = sp.csr_array(shape)
        if not last:
            made = sp.csr_array((block.data, (block.row, number[t + 1][block.col])), shape=shape)
        blocks.append(made)
    return sp.vstack(blocks, format="csr"), np.concatenate(earned)


def _influence(effects, mdp: MDP, rows: np.ndarray):
    """What the weights add to every row, as a matrix, and which weights its columns are."""
    if isinstance(effects, Linear):
        over_time = np.broadcast_to(
            effects.effects.reshape(len(effects.effects), -1, mdp.actions, mdp.states),
            (len(effects.effects), *mdp.shape),
        )
        return sp.csr_array(over_time[:, rows].T), np.arange(len(effects.effects))
    index = np.broadcast_to(np.arange(effects.scale.size).reshape(effects.scale.shape), mdp.shape)
    used, column = np.unique(index[rows], return_inverse=True)
    scale = mdp.over_time(effects.scale)[rows]
    place = (np.arange(len(column)), column)
    return sp.csr_array((scale, place), shape=(len(column), len(used))), used
