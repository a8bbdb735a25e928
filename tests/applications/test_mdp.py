"""Robust policies against HiGHS, brute force, closed forms and rational arithmetic."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import cvxpy as cp
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import linprog

import stagecert as sc
from stagecert.applications import mdp
from stagecert.applications.mdp import MDP, Budget, Effects, Mixture, solve, worst_case
from stagecert.errors import ProblemError
from stagecert.sets import BoxBall


def random_mdp(rng, states=8, actions=3, horizon=5, successors=4, **options):
    """Sparse stationary transitions."""
    matrices = []
    for _ in range(actions):
        dense = np.zeros((states, states))
        for s in range(states):
            to = rng.choice(states, successors, replace=False)
            dense[s, to] = rng.dirichlet(np.ones(successors))
        matrices.append(sp.csr_array(dense))
    return MDP(matrices, horizon, **options)


def dense_transitions(process):
    """Shape (horizon, actions, states, states)."""
    shape = (process.actions, process.states, process.states)
    return np.stack([process.matrix(t).toarray().reshape(shape) for t in range(process.horizon)])


def robust_value(process, nominal, effects, mixture=False, budget=None):
    """The linear programme, one row for each time, action and state, written out and by HiGHS.

    nominal: (horizon, states, actions); effects: (weights, horizon, states, actions).
    """
    moves = dense_transitions(process)
    T, S, A = nominal.shape
    count = len(effects)
    rows, right = [], []
    for t in range(T):
        for s in range(S):
            for a in range(A):
                row = np.zeros(T * S + count)
                row[t * S + s] -= 1
                constant = nominal[t, s, a]
                if t + 1 < T:
                    row[(t + 1) * S : (t + 2) * S] += moves[t, a, s]
                else:
                    constant += moves[t, a, s] @ process.final
                row[T * S :] = effects[:, t, s, a]
                rows.append(row)
                right.append(-constant)
    total = np.concatenate([np.zeros(T * S), np.ones(count)])
    equal: dict[str, Any] = {}
    if mixture:
        equal = dict(A_eq=total[None], b_eq=[1.0])
    else:
        rows.append(total)
        right.append(budget)
    cost = np.zeros(T * S + count)
    cost[:S] = process.initial
    bounds = [(None, None)] * (T * S) + [(0, 1)] * count
    answer = linprog(cost, A_ub=sp.csr_array(np.array(rows)), b_ub=right, **equal, bounds=bounds)
    assert answer.status == 0
    return answer.fun


def over_time(process, array, leading=0):
    shape = array.shape[:leading]
    if array.ndim == leading + 2:
        array = np.expand_dims(array, leading)
    return np.broadcast_to(array, (*shape, process.horizon, process.states, process.actions))


def each_entry(process, deviation, per_step):
    """The effects of a budget set, one weight for each entry."""
    T, S, A = process.horizon, process.states, process.actions
    count = T * S * A if per_step else S * A
    units = np.eye(count).reshape(count, *((T, S, A) if per_step else (1, S, A)))
    return -np.broadcast_to(deviation, (T, S, A)) * units


def assert_robust(found, truth, process, rewards, rtol=1e-6):
    """Solved; equal to the truth; and policy, visits and reward are what they are said to be."""
    assert found.status is sc.Status.GAP_REACHED
    slack = 1e-7 * (1 + abs(truth))  # HiGHS's own tolerance
    assert found.bound - slack <= truth <= found.value + slack
    assert found.gap <= 1e-8 + rtol * abs(truth)
    assert abs(found.value - truth) <= 1e-6 * (1 + abs(truth))
    assert abs(found.bound - truth) <= 1e-6 * (1 + abs(truth))
    assert found.policy.min() >= 0
    np.testing.assert_allclose(found.policy.sum(axis=-1), 1, atol=1e-12)
    assert found.policy.shape == (process.horizon, process.states, process.actions)
    # The policy earns its bound in a simulation by hand; the reward leaves no more than the value.
    visits = visits_by_hand(process, found.policy)
    np.testing.assert_allclose(found.visits, visits, atol=1e-12)
    end = np.einsum("sa,asr->r", visits[-1], dense_transitions(process)[-1])
    reward = over_time(process, found.worst_reward)
    earned = np.sum(visits * reward) + end @ process.final
    assert found.bound - 1e-9 <= earned <= found.value + 1e-9
    best = best_by_hand(process, reward)
    assert best <= found.value + 1e-12
    assert found.value <= best + 1e-7 * (1 + abs(best))
    bound, worst, _ = worst_case(process, rewards, found.policy)
    assert bound == pytest.approx(found.bound, abs=1e-9)
    assert np.sum(visits * over_time(process, worst)) + end @ process.final >= bound - 1e-9


def visits_by_hand(process, policy):
    moves = dense_transitions(process)
    mass, visits = process.initial, []
    for t in range(process.horizon):
        visits.append(mass[:, None] * policy[t])
        mass = np.einsum("sa,asr->r", visits[-1], moves[t])
    return np.array(visits)


def best_by_hand(process, reward):
    moves, value = dense_transitions(process), process.final
    for t in reversed(range(process.horizon)):
        value = np.max(reward[t].T + moves[t] @ value, axis=0)
    return process.initial @ value


# -- against HiGHS --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", mdp.ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_mixtures_equal_highs(seed, engine):
    rng = np.random.default_rng(seed)
    process = random_mdp(rng, initial=rng.dirichlet(np.ones(8)), final=rng.normal(size=8))
    shape = (4, 5, 8, 3) if seed == 1 else (4, 8, 3)
    scenarios = 10.0**seed * rng.normal(size=shape)
    rewards = Mixture(scenarios)
    truth = robust_value(
        process, np.zeros((5, 8, 3)), over_time(process, scenarios, 1), mixture=True
    )
    assert_robust(solve(process, rewards, engine=engine), truth, process, rewards)


@pytest.mark.parametrize("engine", mdp.ENGINES)
@pytest.mark.parametrize(("per_step", "budget"), [(True, 6.5), (False, 3), (True, 0.5)])
def test_budgets_equal_highs(per_step, budget, engine):
    rng = np.random.default_rng(3)
    process = random_mdp(rng)
    nominal, deviation = rng.normal(size=(8, 3)), rng.uniform(0, 2, (8, 3))
    rewards = Budget(nominal, deviation, budget, over_time=per_step)
    effects = each_entry(process, deviation, per_step)
    truth = robust_value(process, over_time(process, nominal), effects, budget=budget)
    found = solve(process, rewards, engine=engine)
    assert_robust(found, truth, process, rewards)
    assert found.weights.min() >= 0
    assert found.weights.max() <= 1
    assert sum(map(Fraction, found.weights.ravel().tolist())) <= budget
    lowered = nominal - deviation * found.weights
    np.testing.assert_allclose(found.worst_reward, lowered, atol=1e-14)


def test_transitions_over_time_equal_highs():
    rng = np.random.default_rng(4)
    moves = rng.dirichlet(np.ones(5), size=(4, 2, 5))
    process = MDP(moves, 4, initial=2)
    as_matrices = MDP([[sp.csr_matrix(m) for m in step] for step in moves], 4, initial=2)
    nominal = rng.normal(size=(4, 5, 2))
    rewards = Budget(nominal, 1.0, 5.0)
    truth = robust_value(process, nominal, each_entry(process, 1.0, True), budget=5.0)
    for one in (process, as_matrices):
        assert_robust(solve(one, rewards), truth, process, rewards)


def test_effects_with_a_budget_equal_highs():
    rng = np.random.default_rng(5)
    process = random_mdp(rng)
    nominal, effects = rng.normal(size=(8, 3)), -rng.exponential(size=(6, 8, 3))
    rewards = Effects(nominal, effects, budget=2.5)
    truth = robust_value(
        process, over_time(process, nominal), over_time(process, effects, 1), budget=2.5
    )
    assert_robust(solve(process, rewards), truth, process, rewards)


def frozen_lake(rows):
    """A slippery lake from its rules: a third each for the way meant and both sides of it."""
    size = len(rows)
    flat = "".join(rows)
    moves = [(0, -1), (1, 0), (0, 1), (-1, 0)]
    table = {}
    for s, cell in enumerate(flat):
        table[s] = {}
        for a in range(4):
            if cell in "GH":
                table[s][a] = [(1.0, s, 0, True)]
                continue
            table[s][a] = []
            for turn in (-1, 0, 1):
                dy, dx = moves[(a + turn) % 4]
                y = min(max(s // size + dy, 0), size - 1)
                x = min(max(s % size + dx, 0), size - 1)
                new = y * size + x
                step = (1 / 3, new, float(flat[new] == "G"), flat[new] in "GH")
                table[s][a].append(step)
    return table


def test_frozen_lake_equals_highs():
    process, rewards = mdp.from_gymnasium(frozen_lake(["SFFF", "FHFH", "FFFH", "HFFG"]), 12)
    assert rewards.sum() == pytest.approx(4 / 3 - 1 / 3)  # three of four ways lead to the goal
    rng = np.random.default_rng(0)
    sets = {
        "mixture": Mixture(rewards + 0.2 * rng.normal(size=(5, 16, 4))),
        "budget": Budget(rewards, 0.3, 4),
        "steps": Budget(rewards, 0.3, 7.5, over_time=True),
    }
    nominal = over_time(process, rewards)
    truths = {
        "mixture": robust_value(
            process, 0 * nominal, over_time(process, sets["mixture"].scenarios, 1), mixture=True
        ),
        "budget": robust_value(process, nominal, each_entry(process, 0.3, False), budget=4),
        "steps": robust_value(process, nominal, each_entry(process, 0.3, True), budget=7.5),
    }
    for name, chosen in sets.items():
        assert_robust(solve(process, chosen), truths[name], process, chosen)


@pytest.mark.parametrize(
    ("name", "horizon"), [("FrozenLake-v1", 10), ("CliffWalking-v1", 8), ("Taxi-v4", 4)]
)
def test_environments_equal_highs(name, horizon):
    gymnasium = pytest.importorskip("gymnasium")
    environment = gymnasium.make(name)
    process, rewards = mdp.from_gymnasium(environment, horizon)
    table = environment.unwrapped.P
    assert rewards[3, 1] == pytest.approx(sum(p * r for p, _, r, _ in table[3][1]))
    scenarios = rewards + np.random.default_rng(0).normal(0, 0.3, (4, *rewards.shape))
    chosen = Mixture(scenarios)
    truth = robust_value_sparse(process, np.zeros_like(rewards), scenarios, mixture=True)
    assert_robust(solve(process, chosen), truth, process, chosen)
    sensors = -np.random.default_rng(1).uniform(0, 1, (10, *rewards.shape))
    chosen = Effects(rewards, sensors, budget=3)
    truth = robust_value_sparse(process, rewards, sensors, budget=3)
    assert_robust(solve(process, chosen), truth, process, chosen)


def robust_value_sparse(process, nominal, effects, mixture=False, budget: Any = None):
    """The same programme by CVXPY, for more states; rewards do not change over time."""
    moves = [
        process.matrix(0)[a * process.states : (a + 1) * process.states]
        for a in range(process.actions)
    ]
    x = cp.Variable(len(effects), nonneg=True)
    limits: Any = [cp.sum(x) == 1] if mixture else [cp.sum(x) <= budget, x <= 1]
    later = process.final
    for _ in range(process.horizon):
        value = cp.Variable(process.states)
        for a, matrix in enumerate(moves):
            limits.append(value >= matrix @ later + nominal[:, a] + effects[:, :, a].T @ x)
        later = value
    problem = cp.Problem(cp.Minimize(process.initial @ later), limits)
    problem.solve(solver=cp.HIGHS)
    return problem.value


# -- other sets -----------------------------------------------------------------------------------


def robust_value_conic(process, nominal, make):
    """By Clarabel: `make(reward variable)` lists the set's constraints; rewards by action."""
    moves = dense_transitions(process)[0]
    reward = cp.Variable(nominal.shape)
    limits, later = list(make(reward)), process.final
    for _ in range(process.horizon):
        value = cp.Variable(process.states)
        limits += [value >= moves[a] @ later + reward[:, a] for a in range(process.actions)]
        later = value
    problem = cp.Problem(cp.Minimize(process.initial @ later), limits)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    return problem.value


def test_ball_equals_clarabel():
    rng = np.random.default_rng(6)
    process, middle = random_mdp(rng), rng.normal(size=(8, 3))
    truth = robust_value_conic(process, middle, lambda r: [cp.norm(r - middle, "fro") <= 0.7])
    rewards = sc.Ball(middle, 0.7)
    found = solve(process, rewards)
    assert_robust(found, truth, process, rewards)
    assert np.linalg.norm(found.worst_reward - middle) <= 0.7
    assert found.engine == "primal-dual"


def test_box_and_ball_of_the_library_equals_clarabel():
    rng = np.random.default_rng(7)
    process, middle = random_mdp(rng), rng.normal(size=(8, 3))
    rewards = BoxBall(middle - 0.3, middle + 1.0, middle, 0.8)
    truth = robust_value_conic(
        process, middle,
        lambda r: [cp.norm(r - middle, "fro") <= 0.8, r >= middle - 0.3, r <= middle + 1],
    )  # fmt: skip
    assert_robust(solve(process, rewards), truth, process, rewards)


class L1Ball(sc.AbstractSet):
    """A set of the user's own, |x|_1 <= 1 in the shape (8, 3)."""

    def project(self, point):
        size = jnp.abs(point).ravel()
        inside = sc.Simplex(size.size).project(size).reshape(point.shape)
        return jnp.where(size.sum() <= 1, point, jnp.sign(point) * inside)

    def minimise_linear(self, gradient):
        at = jnp.argmax(jnp.abs(gradient).ravel())
        unit = jnp.zeros(gradient.size).at[at].set(-jnp.sign(gradient.ravel()[at]))
        return unit.reshape(gradient.shape)

    def sample(self, key):
        raise NotImplementedError

    def centre(self):
        return jnp.zeros((8, 3))

    def scale(self):
        return jnp.ones((8, 3))

    def validate(self):
        pass


def test_a_set_of_the_users_own_equals_clarabel():
    process = random_mdp(np.random.default_rng(8))
    truth = robust_value_conic(process, np.zeros((8, 3)), lambda r: [cp.sum(cp.abs(r)) <= 1])
    assert_robust(solve(process, L1Ball()), truth, process, L1Ball())


def test_weights_in_a_set_of_the_library():
    rng = np.random.default_rng(9)
    process = random_mdp(rng)
    scenarios = rng.normal(size=(4, 8, 3))
    direct = solve(process, Mixture(scenarios))
    rewards = Effects(np.zeros((8, 3)), scenarios, weights=sc.Simplex(4))
    assert_robust(solve(process, rewards), direct.value, process, rewards)


@pytest.mark.parametrize("shape", [(8, 3), (5, 8, 3)])
def test_boxes_take_one_backward_induction(shape):
    rng = np.random.default_rng(10)
    process = random_mdp(rng)
    lower = rng.normal(size=shape)
    rewards = sc.Box(lower, lower + rng.exponential(size=shape))
    found = solve(process, rewards)
    assert found.engine == "backward induction"
    assert_robust(found, best_by_hand(process, over_time(process, lower)), process, rewards)
    np.testing.assert_array_equal(found.worst_reward, lower)
    assert set(np.unique(found.policy)) == {0.0, 1.0}


def test_what_else_has_a_lowest_reward_takes_one_backward_induction():
    rng = np.random.default_rng(11)
    process, low = random_mdp(rng), rng.normal(size=(8, 3))
    truth = best_by_hand(process, over_time(process, low))
    ordered = Mixture([low + 1, low, low + rng.exponential(size=(8, 3))])
    for rewards in (low, ordered, Budget(low + 2, 2.0, 24), Budget(low, 2.0, 0)):
        found = solve(process, rewards)
        assert found.engine == "backward induction"
        assert_robust(found, truth, process, rewards)


def test_without_a_choice_the_adversary_alone_decides():
    rng = np.random.default_rng(12)
    process = random_mdp(rng, actions=1)
    scenarios = rng.normal(size=(5, 8, 1))
    visits = visits_by_hand(process, np.ones((5, 8, 1)))
    truth = min(np.sum(visits * table) for table in scenarios)
    found = solve(process, Mixture(scenarios))
    assert found.engine == "linear minimisation"
    assert_robust(found, truth, process, Mixture(scenarios))


# -- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_one_step_is_a_matrix_game(seed):
    """Matching pennies and the like: one state, one step, rows against columns."""
    rng = np.random.default_rng(seed)
    payoff = rng.normal(size=(4, 5))  # scenario, action
    p, v = cp.Variable(5, nonneg=True), cp.Variable()
    limits: Any = [payoff @ p >= v, cp.sum(p) == 1]
    problem = cp.Problem(cp.Maximize(v), limits)
    problem.solve(solver=cp.HIGHS)
    process = MDP(np.ones((5, 1, 1)), 1)
    found = solve(process, Mixture(payoff[:, None, :]))
    assert found.value == pytest.approx(problem.value, abs=1e-6)
    assert found.bound == pytest.approx(problem.value, abs=1e-6)


def test_guards_on_equal_roads():
    """Five roads, two guards: each is guarded with probability 2/5, whatever the road."""
    process = MDP(np.ones((5, 1, 1)), 1)
    found = solve(process, Budget(np.ones((1, 5)), 1.0, 2))
    assert found.value == pytest.approx(0.6, abs=1e-6)
    np.testing.assert_allclose(found.policy[0, 0], 0.2, atol=1e-4)
    np.testing.assert_allclose(found.weights, 0.4, atol=1e-4)


# -- soundness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixture", "budget"])
def test_proofs_hold_in_rational_arithmetic(kind):
    """Value and bound, recomputed exactly from policy and weights as they are stored."""
    rng = np.random.default_rng(13)
    process = random_mdp(rng, states=4, actions=2, horizon=4, successors=3)
    scenarios = 1e3 * rng.normal(size=(3, 4, 2))
    rewards = Mixture(scenarios) if kind == "mixture" else Budget(scenarios[0], 700.3, 2.25)
    found = solve(process, rewards, rtol=0, atol=1e-7)
    moves = [[[Fraction(x) for x in row] for row in m] for m in dense_transitions(process)[0]]
    policy = [[[Fraction(x) for x in row] for row in step] for step in found.policy.tolist()]
    weights = [Fraction(x) for x in found.weights.ravel().tolist()]
    tables = [[[Fraction(x) for x in row] for row in table] for table in scenarios.tolist()]
    states, actions = range(4), range(2)
    # The policy, normalised exactly, and its visits.
    mass, visits = [Fraction(int(s == 0)) for s in states], {}
    for t in range(4):
        following = [Fraction(0)] * 4
        for s in states:
            for a in actions:
                d = mass[s] * policy[t][s][a] / sum(policy[t][s])
                visits[s, a] = visits.get((s, a), 0) + d
                for r in states:
                    following[r] += d * moves[a][s][r]
        mass = following
    if kind == "mixture":
        totals = [sum(visits[s, a] * table[s][a] for s in states for a in actions)
                  for table in tables]  # fmt: skip
        worst = min(totals)
        share = [w / sum(weights) for w in weights]
        reward = [[sum(w * table[s][a] for w, table in zip(share, tables, strict=True))
                   for a in actions] for s in states]  # fmt: skip
    else:
        gains = sorted((Fraction(700.3) * d for d in visits.values()), reverse=True)
        nominal = sum(visits[s, a] * tables[0][s][a] for s in states for a in actions)
        worst = nominal - gains[0] - gains[1] - gains[2] / 4
        assert sum(weights) <= Fraction(2.25)
        assert all(0 <= w <= 1 for w in weights)
        reward = [[tables[0][s][a] - Fraction(700.3) * weights[2 * s + a] for a in actions]
                  for s in states]  # fmt: skip
    assert Fraction(found.bound) <= worst
    later = [Fraction(0)] * 4
    for _ in range(4):
        later = [
            max(reward[s][a] + sum(moves[a][s][r] * later[r] for r in states) for a in actions)
            for s in states
        ]
    assert later[0] <= Fraction(found.value)
    assert found.status is sc.Status.GAP_REACHED


def test_limits_still_give_proofs():
    rng = np.random.default_rng(14)
    process = random_mdp(rng, states=20, actions=4, horizon=10)
    rewards = Budget(rng.normal(size=(20, 4)), 1.0, 12.0, over_time=True)
    truth = solve(process, rewards).value
    limits: list[tuple[dict[str, Any], sc.Status]] = [
        (dict(max_iterations=10), sc.Status.ITERATION_LIMIT),
        (dict(time_limit=0.0), sc.Status.TIME_LIMIT),
    ]
    for options, status in limits:
        found = solve(process, rewards, **options)
        assert found.status is status
        assert found.bound <= truth + 1e-6
        assert found.value >= truth - 1e-6
        bound, *_ = worst_case(process, rewards, found.policy)
        assert bound == pytest.approx(found.bound, abs=1e-9)
    # Nothing is closer than rounding allows, and the search sees it.
    assert solve(process, rewards, atol=0, rtol=0).status is sc.Status.STALLED


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_steps_adapt_to_the_scale_of_rewards(scale):
    rng = np.random.default_rng(15)
    process = random_mdp(rng)
    scenarios = rng.normal(size=(4, 8, 3))
    one = solve(process, Mixture(scenarios), engine="primal-dual", atol=0)
    other = solve(process, Mixture(scale * scenarios), engine="primal-dual", atol=0)
    assert other.status is sc.Status.GAP_REACHED
    assert other.value / scale == pytest.approx(one.value, rel=3e-6)


def test_charges_for_rounding_are_small_over_long_horizons():
    """Two states that alternate, each earning 1 or 2 for staying on the move."""
    process = MDP(np.array([[[0.0, 1.0], [1.0, 0.0]]] * 2), 3000)
    found = solve(process, sc.Box(np.array([[1.0, 0.5], [2.0, 0.0]]), np.full((2, 2), 3.0)))
    assert found.bound <= 4500 <= found.value
    assert found.gap <= 1e-6


def test_progress_is_reported(capsys):
    rng = np.random.default_rng(16)
    process, seen = random_mdp(rng), []
    found = solve(
        process, Mixture(rng.normal(size=(4, 8, 3))), progress=lambda *args: seen.append(args)
    )
    assert seen
    assert seen[-1][1] == found.value
    assert capsys.readouterr().err == ""


def test_any_policy_is_a_proof():
    rng = np.random.default_rng(17)
    process = random_mdp(rng)
    rewards = Budget(rng.normal(size=(8, 3)), 1.0, 3.5)
    best = solve(process, rewards)
    for _ in range(20):
        bound, worst, weights = worst_case(process, rewards, rng.dirichlet(np.ones(3), size=8))
        assert weights.sum() == pytest.approx(3.5)
        assert bound <= best.value
        assert best_by_hand(process, over_time(process, worst)) >= best.bound


# -- bad input ------------------------------------------------------------------------------------

MOVES = np.full((2, 3, 3), 1 / 3)


def changed(array, at, value):
    array = np.array(array, float)
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((changed(MOVES, (1, 2, 0), 0.5), 4), r"transitions\[1, 2\] sums to 1.166"),
        ((changed(MOVES, (0, 1, 2), np.nan), 4), r"transitions\[0, 1, 2\] = nan"),
        ((changed(MOVES, (0, 1), [1.5, -0.5, 0]), 4), r"transitions\[0, 1, 1\] = -0.5"),
        (([sp.csr_array(np.eye(3)), sp.csr_array(2 * np.eye(3))], 4), r"\[1, 0\] sums to 2"),
        (([sp.csr_array(np.eye(3)), sp.csr_array(np.eye(2))], 4), r"transitions\[1\] has shape"),
        ((np.stack([MOVES, MOVES]), 4), "for 2 steps, but the horizon is 4"),
        ((np.stack([MOVES, changed(MOVES, (0, 0, 0), 0)]), 2), r"transitions\[1, 0, 0\] sums"),
        ((np.ones((2, 3, 4)), 4), "shape"),
        ((np.ones((3, 3)), 4), "shape"),
        (([], 4), "shape|empty"),
        ((MOVES, 0), "horizon = 0"),
        ((MOVES, 2.5), "horizon = 2.5"),
        ((MOVES, 4, 3), "initial = 3"),
        ((MOVES, 4, [0.5, 0.4, 0.0]), "initial sums to 0.9"),
        ((MOVES, 4, [1.5, -0.5, 0.0]), r"initial\[1\] = -0.5"),
        ((MOVES, 4, [1.0, 0.0]), "initial has shape"),
        ((MOVES, 4, 0, [0.0, np.inf, 0.0]), r"final\[1\] = inf"),
        ((MOVES, 4, 0, [0.0]), "final has shape"),
        ((MOVES, 4, 0, None, np.full((3, 2), 0.5)), r"transitions\[0, 0\] sums to 1.5 with ends"),
    ],
)
def test_bad_processes_are_named(arguments, message):
    with pytest.raises(sc.ProblemError, match=message):
        MDP(*arguments)


R = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (Mixture(np.zeros((0, 3, 2))), "scenarios are empty"),
        (Mixture(np.zeros((4, 2, 3))), "scenarios has shape"),
        (Mixture(np.zeros((4, 5, 3, 2))), "scenarios has shape"),
        (Mixture([R, changed(R, (1, 0), np.nan)]), r"scenarios\[1, 1, 0\] = nan"),
        (Mixture([["a", "b"]]), "must hold real numbers"),
        (Budget(R, -1.0, 2), "deviation = -1"),
        (Budget(R, changed(R, (2, 1), -3), 2), r"deviation\[2, 1\] = -3"),
        (Budget(R, np.ones(5), 2), "does not broadcast"),
        (Budget(R, 1.0, -2), "budget = -2"),
        (Budget(R, 1.0, np.nan), "budget = nan"),
        (Budget(np.zeros(6), 1.0, 2), "nominal has shape"),
        (Effects(R, np.zeros((0, 3, 2)), budget=1), "effects are empty"),
        (Effects(R, np.zeros((4, 3, 2))), "either a budget or a set"),
        (Effects(R, np.zeros((4, 3, 2)), weights=sc.Simplex(3)), "weights: points of Simplex"),
        (sc.Box(jnp.ones((3, 2)), jnp.zeros((3, 2))), "Box is empty"),
        (sc.Box(np.zeros((2, 2)), np.ones((2, 2))), "Box of rewards has shape"),
        (np.ones((2, 2)), r"rewards has shape \(2, 2\); .* make it \("),
        (sc.Ball(np.zeros((2, 3)), 1.0), "Ball.middle has shape"),
        (sc.Ball(jnp.asarray(R), -1.0), "radius"),
        (sc.Simplex(6), "Points of Simplex have shape"),
        (1e200 * np.ones((3, 2)), "overflow"),
        ("rewards", "not str"),
    ],
)
def test_bad_rewards_are_named(rewards, message):
    with pytest.raises(sc.ProblemError, match=message):
        solve(MDP(MOVES, 4), rewards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rtol=-1.0), "rtol = -1"),
        (dict(atol=np.nan), "atol = nan"),
        (dict(engine="simplex"), "Unknown engine 'simplex'"),
        (dict(max_iterations=0), "max_iterations = 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(sc.ProblemError, match=message):
        solve(MDP(MOVES, 4), R, **options)


def test_bad_policies_are_named():
    process = MDP(MOVES, 4)
    for policy, message in (
        (np.ones((3, 2)), r"The sum of policy\[0\] = 2"),
        (changed(np.full((3, 2), 0.5), (1,), [2, -1]), r"policy\[1, 1\] = -1"),
        (np.ones((2, 3)), "policy has shape"),
    ):
        with pytest.raises(sc.ProblemError, match=message):
            worst_case(process, R, policy)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((0.5, 0, 0.0, False), "sums to 0.5"),
        ((1.5, 0, 0.0, False), r"P\[0\]\[0\]\[0\] has the probability 1.5"),
        ((1.0, 7, 0.0, False), "leads to 7"),
        ((1.0, 0, np.nan, False), "has the reward nan"),
        ((1.0, 0, 0.0), "4 entries"),
    ],
)
def test_bad_tables_are_named(step, message):
    with pytest.raises(sc.ProblemError, match=message):
        mdp.from_gymnasium({0: {0: [step]}}, 3)


def test_what_is_no_environment_is_named():
    with pytest.raises(sc.ProblemError, match="has no table"):
        mdp.from_gymnasium(3, 3)
    with pytest.raises(sc.ProblemError, match=r"'FrozenLake-v1' has no table.*gymnasium\.make"):
        mdp.from_gymnasium("FrozenLake-v1", 3)


def test_ended_episodes_earn_nothing_more():
    table = {
        0: {0: [(0.5, 0, 1.0, False), (0.5, 1, 1.0, True)]},
        1: {0: [(1.0, 1, 100.0, False)]},
    }
    process, rewards = mdp.from_gymnasium(table, 3)
    assert solve(process, rewards).value == pytest.approx(1 + 0.5 + 0.25)


def test_shared_arrays_where_they_are():
    """The arrays of Gymnasium's environments, where STAGECERT_DATA holds them."""
    import os

    folder = Path(os.environ.get("STAGECERT_DATA", "missing")) / "mdp"
    if not folder.exists():
        pytest.skip("the data are not here; STAGECERT_DATA names their folder")
    for name in ("frozenlake_4x4_slippery", "cliffwalking_slippery", "forest_50"):
        held = np.load(folder / f"{name}.npz")
        process, rewards = MDP(held["T"], 6), held["R"]
        sensors = -np.random.default_rng(0).uniform(0, 1, (8, *rewards.shape))
        chosen = Effects(rewards, sensors, budget=2)
        truth = robust_value_sparse(process, rewards, sensors, budget=2)
        assert_robust(solve(process, chosen), truth, process, chosen)


# -- discounts ---------------------------------------------------------------------------------


def test_discounted_values_are_those_of_exact_arithmetic():
    """A discount of 1/10 is no float: two states, three steps, the best of all by recursion."""
    moves = [[[0.9, 0.1], [0.0, 1.0]], [[0.5, 0.5], [0.2, 0.8]]]
    reward = [[1.0, 0.25], [0.5, 2.0]]
    discount = Fraction(0.1)

    def best(state, left):
        if not left:
            return Fraction(0)
        return max(
            Fraction(reward[state][a])
            + discount * sum(Fraction(moves[a][state][r]) * best(r, left - 1) for r in range(2))
            for a in range(2)
        )

    found = solve(MDP(moves, horizon=3, discount=0.1), np.array(reward))
    assert Fraction(found.bound) <= best(0, 3) <= Fraction(found.value)
    assert found.value - found.bound < 1e-12


def test_for_ever_is_within_the_proven_ends():
    """One state that pays 1 at each step is worth 1 / (1 - discount)."""
    process = MDP([[[1.0]]], horizon=None, discount=0.75)
    found = solve(process, np.ones((1, 1)))
    assert found.bound <= 4 <= found.value
    assert found.value - found.bound < 4e-6
    # What is left out is charged: a short look ahead is an honest, wider answer.
    short = solve(MDP([[[1.0]]], horizon=None, discount=0.75, tail=0.1), np.ones((1, 1)))
    assert short.value - short.bound > 0.4
    assert short.bound <= 4 <= short.value


def test_for_ever_agrees_with_policy_iteration():
    draw = np.random.default_rng(8)
    moves, reward = draw.dirichlet(np.ones(4), size=(3, 4)), draw.normal(size=(4, 3))
    policy = np.zeros(4, int)
    for _ in range(20):
        at = np.arange(4)
        values = np.linalg.solve(np.eye(4) - 0.9 * moves[policy, at], reward[at, policy])
        policy = (reward + 0.9 * np.einsum("asr,r->sa", moves, values)).argmax(axis=1)
    process = MDP(moves, horizon=None, discount=0.9, initial=2)
    found = solve(process, reward)
    assert found.bound <= values[2] + 1e-12
    assert found.value >= values[2] - 1e-12
    assert found.value - found.bound < 1e-4
    assert "of infinitely many" in repr(process)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"discount": 0.0}, "discount = 0"), ({"discount": 1.5}, "discount = 1.5"),
     ({"discount": 1.0}, "needs a discount below one"), ({"tail": 2.0}, "tail"),
     ({"final": [0.0]}, "no final rewards")],
)  # fmt: skip
def test_bad_discounts(change, message):
    with pytest.raises(ProblemError, match=message):
        MDP([[[1.0]]], **{"horizon": None, "discount": 0.5, **change})


def test_rewards_over_time_have_no_place_in_a_process_for_ever():
    process = MDP([[[1.0]], [[1.0]]], horizon=None, discount=0.5)
    with pytest.raises(ProblemError, match="same at all steps"):
        solve(process, Budget(np.ones((1, 2)), 0.5, 1.0, over_time=True))


def test_middling_processes_go_to_their_programme_early():
    """12,800 rows of a lake: first-order steps alone took 13,000 iterations to a gap of 1e-4."""
    gymnasium = pytest.importorskip("gymnasium")
    lake = gymnasium.make("FrozenLake-v1", map_name="8x8")
    process, rewards = mdp.from_gymnasium(lake, horizon=50)
    found = solve(process, Budget(rewards, 0.5 * (rewards > 0) + 0.01, 3))
    assert found.status is sc.Status.GAP_REACHED
    assert found.engine == "primal-dual, linear programmes"
    assert found.iterations <= 4_000
