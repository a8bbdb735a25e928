"""Policies within budgets against HiGHS, over the visits of all times, states and actions."""

from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from scipy.optimize import linprog

import stagecert as sc
from stagecert.applications.mdp import MDP, Budget, Effects, Mixture, Resource, solve
from stagecert.errors import ProblemError
from stagecert.solution import Status

STATES, ACTIONS, HORIZON = 6, 3, 4


def process(rng, **options):
    moves = rng.dirichlet(np.ones(STATES), size=(ACTIONS, STATES))
    return MDP(moves, HORIZON, **{"final": rng.normal(size=STATES)} | options)


def truth(mdp, tables, resources):
    """The value by HiGHS, None if infeasible: visits of all rows, and the least of the tables.

    tables: (scenarios, horizon, states, actions).
    """
    horizon, actions, states = mdp.shape
    count = horizon * actions * states
    flow, moves = np.zeros((horizon * states, count + 1)), None
    for t in range(horizon):
        moves = mdp.matrix(t).toarray().reshape(actions, states, states)
        for a in range(actions):
            for s in range(states):
                column = (t * actions + a) * states + s
                flow[t * states + s, column] += 1
                if t + 1 < horizon:
                    flow[(t + 1) * states : (t + 2) * states, column] -= moves[a, s]
    final = np.zeros(count)
    final[-actions * states :] = (moves @ mdp.final).ravel()
    full = (horizon, states, actions)
    uses = [np.broadcast_to(r.use, full).swapaxes(1, 2).ravel() for r in resources]
    earned = [-np.swapaxes(table, 1, 2).ravel() - final for table in tables]
    rows = np.vstack([np.append(row, 1.0) for row in earned] + [np.append(u, 0.0) for u in uses])
    right = np.append(np.zeros(len(earned)), [r.budget for r in resources])
    answer = linprog(
        np.append(np.zeros(count), -1.0), rows, right, flow,
        np.append(mdp.initial, np.zeros((horizon - 1) * states)),
        [(0, None)] * count + [(None, None)],
    )  # fmt: skip
    assert answer.status in (0, 2)
    return None if answer.status else -answer.fun


def over_time(tables):
    return np.broadcast_to(tables[:, None], (len(tables), HORIZON, STATES, ACTIONS))


def assert_solved(found, optimum, resources):
    """The answer is HiGHS's, and its policy, run forth anew, keeps within the budgets."""
    if optimum is None:
        assert found.status is Status.INFEASIBLE
        assert found.value == found.bound == -np.inf
        assert found.gap == np.inf
        return
    assert found.status is Status.GAP_REACHED
    assert found.bound - 1e-7 <= optimum <= found.value + 1e-7
    for used, resource in zip(found.uses, resources, strict=True):
        assert np.sum(found.visits * resource.use) <= used <= resource.budget


@pytest.mark.parametrize("seed", range(16))
def test_budgets_of_resources_equal_highs(seed):
    rng = np.random.default_rng(seed)
    mdp = process(rng)
    tables = rng.normal(size=(1 + seed % 4, STATES, ACTIONS))
    resources = [
        Resource(rng.uniform(size=(STATES, ACTIONS)), rng.uniform(0.5, 2.0)),
        Resource(rng.normal(size=(HORIZON, STATES, ACTIONS)), rng.uniform(-1.0, 1.0)),
    ][: 1 + seed % 2]
    found = solve(mdp, Mixture(tables), resources=resources)
    assert_solved(found, truth(mdp, over_time(tables), resources), resources)


def test_the_seeds_above_have_both_kinds():
    """Feasible and infeasible ones, so that the test above says something of each."""
    kinds = set()
    for seed in range(16):
        rng = np.random.default_rng(seed)
        mdp = process(rng)
        rng.normal(size=(1 + seed % 4, STATES, ACTIONS))
        resource = Resource(rng.uniform(size=(STATES, ACTIONS)), rng.uniform(0.5, 2.0))
        kinds.add(truth(mdp, np.zeros((1, HORIZON, STATES, ACTIONS)), [resource]) is None)
    assert kinds == {True, False}


def test_effects_with_a_budget_and_boxes():
    rng = np.random.default_rng(3)
    mdp = process(rng)
    nominal = rng.normal(size=(STATES, ACTIONS))
    effects = -rng.uniform(size=(2, STATES, ACTIONS))
    resources = (Resource(rng.uniform(size=(STATES, ACTIONS)), 1.8),)
    found = solve(mdp, Effects(nominal, effects, budget=1.0), resources=resources)
    # The corners of the weights, one effect or none, are scenarios of a mixture.
    corners = np.stack([nominal, nominal + effects[0], nominal + effects[1]])
    assert_solved(found, truth(mdp, over_time(corners), resources), resources)
    box = solve(mdp, sc.Box(nominal - 1, nominal), resources=resources)
    assert_solved(box, truth(mdp, over_time(nominal[None] - 1), resources), resources)
    assert np.array_equal(box.worst_reward, nominal - 1)


def test_a_place_that_must_never_be_visited():
    """A budget of zero has nothing inside it; visits that are exactly zero keep it all the same."""
    rng = np.random.default_rng(4)
    mdp = process(rng)
    reward = rng.normal(size=(STATES, ACTIONS))
    reward[:, 2] += 5.0
    resources = (Resource(np.eye(ACTIONS)[2] * np.ones((STATES, 1)), 0),)
    found = solve(mdp, reward, resources=resources)
    assert_solved(found, truth(mdp, over_time(reward[None]), resources), resources)
    assert not found.visits[..., 2].any()


def test_a_budget_that_every_policy_exhausts_needs_a_tolerance():
    rng = np.random.default_rng(5)
    mdp, reward = process(rng), rng.normal(size=(STATES, ACTIONS))
    each = np.ones((STATES, ACTIONS))
    unproven = solve(mdp, reward, resources=[Resource(each, HORIZON)])
    assert unproven.status is Status.STALLED
    assert (unproven.bound, unproven.gap) == (-np.inf, np.inf)
    free = solve(mdp, reward)
    found = solve(mdp, reward, resources=[Resource(each, HORIZON, tolerance=1e-9)])
    assert found.status is Status.GAP_REACHED
    assert found.bound <= free.value
    assert free.bound <= found.value
    assert found.uses[0] <= HORIZON + 1e-9


def test_units_do_not_matter():
    rng = np.random.default_rng(6)
    mdp, reward = process(rng), rng.normal(size=(STATES, ACTIONS))
    use = rng.uniform(size=(STATES, ACTIONS))
    found = [
        solve(mdp, reward, resources=Resource(unit * use, unit * 1.7)) for unit in (1e-8, 1.0, 1e8)
    ]
    assert [each.status for each in found] == [Status.GAP_REACHED] * 3
    assert np.ptp([each.value for each in found]) < 1e-8
    assert found[0].prices[0] * 1e-8 == pytest.approx(found[2].prices[0] * 1e8, rel=1e-6)


def _exact_best(mdp, reward, final):
    """Bellman's backup in rationals; reward: (states, actions) of Fractions."""
    moves = [mdp.matrix(0).toarray()[a * STATES : (a + 1) * STATES] for a in range(ACTIONS)]
    chances = [[[Fraction(float(p)) for p in row] for row in move] for move in moves]
    later = [Fraction(float(v)) for v in final]
    for _ in range(mdp.horizon):
        later = [
            max(
                reward[s][a] + sum(p * v for p, v in zip(chances[a][s], later, strict=True))
                for a in range(ACTIONS)
            )
            for s in range(STATES)
        ]
    return sum(Fraction(float(p)) * v for p, v in zip(mdp.initial, later, strict=True))


def _exact_use(mdp, policy, use):
    """What a policy uses, in rationals."""
    moves = [mdp.matrix(0).toarray()[a * STATES : (a + 1) * STATES] for a in range(ACTIONS)]
    mass = [Fraction(float(p)) for p in mdp.initial]
    total = Fraction(0)
    for t in range(mdp.horizon):
        after = [Fraction(0)] * STATES
        for s in range(STATES):
            row = [Fraction(float(p)) for p in policy[t, s]]
            for a in range(ACTIONS):
                visit = mass[s] * row[a] / sum(row)
                total += visit * Fraction(float(use[s, a]))
                for r in range(STATES):
                    after[r] += visit * Fraction(float(moves[a][s, r]))
        mass = after
    return total


def test_prices_prove_in_rational_arithmetic():
    """Value and infeasibility by one exact backup at the prices given; uses by one pass forth."""
    rng = np.random.default_rng(7)
    mdp = process(rng)
    reward, use = rng.normal(size=(STATES, ACTIONS)), rng.uniform(size=(STATES, ACTIONS))
    found = solve(mdp, reward, resources=Resource(use, 1.6))
    price = Fraction(float(found.prices[0]))
    assert price > 0
    exact = [
        [Fraction(float(r)) - price * Fraction(float(c)) for r, c in zip(*rows, strict=True)]
        for rows in zip(reward, use, strict=True)
    ]
    budget = Fraction(1.6)
    assert _exact_best(mdp, exact, mdp.final) + price * budget <= Fraction(found.value)
    assert _exact_use(mdp, found.policy, use) <= budget

    poor = solve(mdp, reward, resources=Resource(use, 0.2))
    assert poor.status is Status.INFEASIBLE
    price = Fraction(float(poor.prices[0]))
    saving = [[-price * Fraction(float(c)) for c in row] for row in use]
    assert -_exact_best(mdp, saving, np.zeros(STATES)) > price * Fraction(0.2)


def test_for_ever_uses_count_for_ever():
    """Two actions: earn 1 and use 1, or neither. Half of the steps, discounted, may use."""
    mdp = MDP([[[1.0]], [[1.0]]], horizon=None, discount=0.75)
    found = solve(mdp, [[1.0, 0.0]], resources=Resource([[1.0, 0.0]], 2.0))
    assert found.status is Status.GAP_REACHED
    assert found.bound <= 2.0 <= found.value < 2.00001
    assert found.uses[0] <= 2.0


def test_limits_still_give_proofs():
    rng = np.random.default_rng(8)
    mdp = process(rng)
    tables = rng.normal(size=(4, STATES, ACTIONS))
    resources = (Resource(rng.uniform(size=(STATES, ACTIONS)), 1.8),)
    optimum: Any = truth(mdp, over_time(tables), resources)
    limits: list[dict[str, Any]] = [{"max_iterations": 3}, {"time_limit": 0.0}]
    for options in limits:
        found = solve(mdp, Mixture(tables), resources=resources, **options)
        assert found.status in (Status.ITERATION_LIMIT, Status.TIME_LIMIT)
        assert found.bound - 1e-9 <= optimum <= found.value + 1e-9


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (["fuel"], "resources\\[0\\] must be a Resource, not str"),
        (Resource(np.ones((2, 2)), 1.0, name="fuel"), "resources\\[0\\] \\(fuel\\) has shape"),
        (Resource(np.ones((STATES, ACTIONS)), np.nan), "budget .* = nan"),
        (Resource(np.ones((STATES, ACTIONS)), cast(Any, [1.0, 2.0])), "one number"),
        (Resource(np.ones((STATES, ACTIONS)), 1.0, tolerance=-1.0), "tolerance"),
    ],
)
def test_bad_resources_are_named(resources, message):
    with pytest.raises(ProblemError, match=message):
        solve(process(np.random.default_rng(0)), np.ones((STATES, ACTIONS)), resources=resources)


def test_sets_that_have_no_small_programme_are_refused():
    ones = np.ones((STATES, ACTIONS))
    with pytest.raises(ProblemError, match="Budgets of resources go with"):
        solve(process(np.random.default_rng(0)), Budget(ones, 0.5, 2), resources=Resource(ones, 1))
