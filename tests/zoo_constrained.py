"""More of the zoo: problems with side constraints, and their optima from HiGHS and Clarabel.

A case without a value is infeasible. Truths are stated by hand for CVXPY, not exported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import cvxpy as cp
import jax.numpy as jnp
import numpy as np
from zoo import _previous, _solve_conic, _solve_linear

import stagecert as sc


@dataclass(frozen=True)
class Truth:
    """An optimum; the inputs that attain it and the constraints' multipliers where unique."""

    value: float
    primal: np.ndarray | None = None
    sides: tuple[np.ndarray, ...] | None = None


@dataclass(frozen=True)
class Case:
    """A problem and its optimum; None where nothing is feasible."""

    name: str
    make: Callable[[], sc.Problem]
    truth: Callable[[], Truth | None]
    smooth: bool

    @property
    def value(self) -> float | None:
        truth = self.truth()
        return None if truth is None else truth.value


CASES: list[Case] = []


def _add(name, make, truth, *, smooth):
    CASES.append(Case(name, make, lru_cache(maxsize=None)(truth), smooth))


def _optimum(cost, constraints, linear=False, primal=None, sides=None) -> Truth | None:
    """`primal` is the variable of the inputs, if unique; `sides`, the rows with unique duals."""
    problem = cp.Problem(cp.Minimize(cost), constraints)
    if linear:
        problem.solve(solver=cp.HIGHS)
    else:
        problem.solve(solver=cp.CLARABEL)
    if problem.status in (cp.INFEASIBLE, cp.INFEASIBLE_INACCURATE):
        return None
    _solve_linear(problem) if linear else _solve_conic(problem)
    return Truth(
        float(np.asarray(problem.value)),
        None if primal is None else np.asarray(primal.value),
        None if sides is None else tuple(np.stack([*map(_dual_of, s)]).squeeze() for s in sides),
    )


def _dual_of(row) -> np.ndarray:
    return np.asarray(row.dual_value)


# -- linear programs -------------------------------------------------------------------------------


def _rows(p, s, z):
    return p["A"] @ s - p["b"]


def _linear(c, s, z):
    return jnp.dot(c, s)


@lru_cache
def _lp_data(seed, rows, columns, shift, scaled=False):
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(rows, columns))
    if scaled:
        A *= 10.0 ** rng.uniform(-2, 2, size=(rows, 1))
    inside = rng.uniform(-0.5, 0.5, size=columns)
    b = A @ inside + shift * np.linalg.norm(A, axis=1)
    return {"A": A, "b": b, "c": rng.normal(size=columns)}


def _make_lp(*arguments):
    p = _lp_data(*arguments)
    side = sc.Constraint(_rows, {"A": p["A"], "b": p["b"]}, name="rows")
    ones = np.ones(p["c"].size)
    return sc.Problem(sc.Box(-ones, ones), (), sc.Objective(_linear, p["c"]), (side,))


def _truth_lp(*arguments):
    p = _lp_data(*arguments)
    x = cp.Variable(p["c"].size)
    rows = p["A"] @ x <= p["b"]
    return _optimum(p["c"] @ x, [rows, cp.abs(x) <= 1], linear=True, primal=x, sides=[[rows]])


for _name, _arguments in {
    "lp_rows": (0, 12, 8, 0.1),
    "lp_scaled": (1, 10, 6, 0.1, True),
}.items():
    _add(
        _name,
        lambda a=_arguments: _make_lp(*a),
        lambda a=_arguments: _truth_lp(*a),
        smooth=False,
    )


@lru_cache
def _transport_data():
    rng = np.random.default_rng(2)
    return {
        "cost": rng.uniform(1, 5, size=(4, 5)),
        "supply": np.array([3.0, 4.0, 2.0, 5.0]),
        "demand": np.array([1.0, 2.5, 2.0, 1.5, 3.0]),
    }


def _over_supply(supply, s, z):
    return jnp.sum(s, axis=1) - supply


def _under_demand(demand, s, z):
    return demand - jnp.sum(s, axis=0)


def _freight(cost, s, z):
    return jnp.sum(cost * s)


def _make_transport():
    p = _transport_data()
    sides = (
        sc.Constraint(_over_supply, p["supply"], name="supply"),
        sc.Constraint(_under_demand, p["demand"], name="demand"),
    )
    box = sc.Box(np.zeros((4, 5)), np.full((4, 5), 5.0))
    return sc.Problem(box, (), sc.Objective(_freight, p["cost"]), sides)


def _truth_transport():
    p = _transport_data()
    x = cp.Variable((4, 5), nonneg=True)
    rows = [cp.sum(x, axis=1) <= p["supply"], cp.sum(x, axis=0) >= p["demand"], x <= 5]
    cost = cp.sum(cp.multiply(p["cost"], x))
    return _optimum(cost, rows, linear=True, primal=x, sides=[[rows[0]], [rows[1]]])


_add("lp_transport", _make_transport, _truth_transport, smooth=False)


# -- quadratic programs, and constraints that are curved ------------------------------------------


def _distance(target, s, z):
    return jnp.sum((s - target) ** 2)


def _make_qp(*arguments):
    p = _lp_data(*arguments)
    side = sc.Constraint(_rows, {"A": p["A"], "b": p["b"]})
    ones = np.ones(p["c"].size)
    objective = sc.Objective(_distance, 2 * p["c"], curvature_inputs=2 * ones)
    return sc.Problem(sc.Box(-ones, ones), (), objective, (side,))


def _truth_qp(*arguments):
    p = _lp_data(*arguments)
    x = cp.Variable(p["c"].size)
    rows = p["A"] @ x <= p["b"]
    cost = cp.sum_squares(x - 2 * p["c"])
    return _optimum(cost, [rows, cp.abs(x) <= 1], primal=x, sides=[[rows]])


for _name, _arguments in {"qp_rows": (3, 8, 6, 0.1), "qp_empty": (4, 20, 4, -0.15)}.items():
    _add(
        _name,
        lambda a=_arguments: _make_qp(*a),
        lambda a=_arguments: _truth_qp(*a),
        smooth=True,
    )


def _in_balls(p, s, z):
    return jnp.sum((s - p["middle"]) ** 2, axis=1) - p["square"]


def _make_balls(squares):
    middle = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.5], [0.0, 1.0, -0.5]])
    side = sc.Constraint(_in_balls, {"middle": middle, "square": np.array(squares)})
    threes = 3 * np.ones(3)
    objective = sc.Objective(_linear, np.array([-1.0, -2.0, 0.5]))
    return sc.Problem(sc.Box(-threes, threes), (), objective, (side,))


def _truth_balls(squares):
    middle = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.5], [0.0, 1.0, -0.5]])
    x = cp.Variable(3)
    inside = [cp.sum_squares(x - m) <= q for m, q in zip(middle, squares, strict=True)]
    cost = np.array([-1.0, -2.0, 0.5]) @ x
    return _optimum(cost, [*inside, cp.abs(x) <= 3], primal=x, sides=[inside])


_add(
    "balls",
    lambda: _make_balls([1.5, 1.2, 1.3]),
    lambda: _truth_balls([1.5, 1.2, 1.3]),
    smooth=True,
)
_add(
    "balls_apart",
    lambda: _make_balls([0.2, 0.1, 0.1]),
    lambda: _truth_balls([0.2, 0.1, 0.1]),
    smooth=True,
)


# -- kinks in the objective, in a stage and in a constraint ----------------------------------------


def _hinges(p, s, z):
    return jnp.sum(sc.relu(1 - z[0])) + 0.1 * jnp.sum(s**2)


def _scores(p, s, z):
    return p @ s


def _length(limit, s, z):
    return jnp.sum(sc.abs(s)) - limit


@lru_cache
def _hinge_data():
    return np.random.default_rng(5).normal(size=(9, 4))


def _make_hinge():
    p = _hinge_data()
    fours = 4 * np.ones(4)
    stage = sc.Stage(_scores, _scores, p)
    side = sc.Constraint(_length, 1.0, name="length")
    return sc.Problem(sc.Box(-fours, fours), stage, sc.Objective(_hinges, 0.0), side)


def _truth_hinge():
    p, s = _hinge_data(), cp.Variable(4)
    cost = cp.sum(cp.pos(1 - p @ s)) + 0.1 * cp.sum_squares(s)
    length = cp.norm1(s) <= 1
    return _optimum(cost, [length, cp.abs(s) <= 4], primal=s, sides=[[length]])


_add("hinge_in_a_diamond", _make_hinge, _truth_hinge, smooth=False)


# -- control with limits on states and rates -------------------------------------------------------

STEPS = 12
A = np.array([[1.0, 0.3], [0.0, 0.95]])
B = np.array([[0.045], [0.3]])


def _cart(p, u, x):
    return p[0] @ x + p[1] @ u


def _feed(s, z):
    return s


def _cart_cost(weight, s, z):
    return 0.5 * jnp.sum(z[0] ** 2) + 0.5 * weight * jnp.sum(s**2)


def _speed(limit, s, z):
    return jnp.concatenate([z[0][:, 1] - limit, -limit - z[0][:, 1]])


def _rates(limit, s, z):
    change = s[1:] - s[:-1]
    return jnp.stack([change - limit, -limit - change])


def _make_cart(start, speed, rate):
    stage = sc.ScanStage(
        _cart,
        _cart,
        length=STEPS,
        initial=np.asarray(start),
        feed=_feed,
        params=(np.tile(A, (STEPS, 1, 1)), np.tile(B, (STEPS, 1, 1))),
        name="cart",
    )
    ones = np.ones((STEPS, 1))
    objective = sc.Objective(
        _cart_cost, 0.1, curvature_inputs=0.1 * ones, curvature_blocks=(np.ones((STEPS, 2)),)
    )
    sides = [sc.Constraint(_speed, speed, name="speed")]
    if rate is not None:
        sides.append(sc.Constraint(_rates, rate, name="rate"))
    return sc.Problem(sc.Box(-2 * ones, 2 * ones), (stage,), objective, sides)


def _truth_cart(start, speed, rate):
    u, x = cp.Variable((STEPS, 1)), cp.Variable((STEPS, 2))
    rows = [x == _previous(np.asarray(start)[None], x) @ A.T + u @ B.T, cp.abs(u) <= 2]
    sides = [[x[:, 1] <= speed, -x[:, 1] <= speed]]
    if rate is not None:
        change = u[1:, 0] - u[:-1, 0]
        sides.append([change <= rate, -change <= rate])
    cost = 0.5 * cp.sum_squares(x) + 0.05 * cp.sum_squares(u)
    return _optimum(cost, [*rows, *(row for side in sides for row in side)], False, u, sides)


for _name, _arguments in {
    "mpc_states": ((1.5, 0.0), 0.4, None),
    "mpc_rates": ((1.5, 0.0), 0.6, 0.5),
    "mpc_too_fast": ((1.5, 2.0), 0.6, None),
}.items():
    _add(
        _name,
        lambda a=_arguments: _make_cart(*a),
        lambda a=_arguments: _truth_cart(*a),
        smooth=True,
    )


# -- a battery: linear costs, losses, limits on the charge -----------------------------------------


@lru_cache
def _battery_data():
    hours = np.arange(24)
    return {
        "price": 3 + 2 * np.sin(hours / 24 * 4 * np.pi) + 0.5 * np.cos(hours),
        "most": 4.0,
        "initial": 1.0,
    }


def _charge(feed, x):
    buy, sell = feed
    return x + 0.9 * buy - sell / 0.9


def _trade(price, s, z):
    buy, sell = s[:, 0], s[:, 1]
    return jnp.sum(price * (buy - sell))


def _trade_feed(s, z):
    return s[:, 0], s[:, 1]


def _battery_limits(most, s, z):
    return jnp.stack([z[0] - most, -z[0]])


def _make_battery():
    p = _battery_data()
    stage = sc.ScanStage(
        _charge, _charge, length=24, initial=np.array(p["initial"]), feed=_trade_feed
    )
    side = sc.Constraint(_battery_limits, p["most"], name="charge")
    box = sc.Box(np.zeros((24, 2)), np.ones((24, 2)))
    return sc.Problem(box, (stage,), sc.Objective(_trade, p["price"]), (side,))


def _truth_battery():
    p = _battery_data()
    buy, sell, x = cp.Variable(24), cp.Variable(24), cp.Variable(24)
    before = cp.hstack([np.array([p["initial"]]), x[:-1]])
    rows = [x == before + 0.9 * buy - sell / 0.9, x >= 0, x <= p["most"]]
    rows += [buy >= 0, buy <= 1, sell >= 0, sell <= 1]
    primal = cp.vstack([buy, sell]).T  # many multipliers belong to it
    return _optimum(p["price"] @ (buy - sell), rows, linear=True, primal=primal)


_add("battery", _make_battery, _truth_battery, smooth=False)


# -- entropy with a budget -------------------------------------------------------------------------

COSTS = np.array([0.3, -0.2, 0.5, 0.1, -0.4])
PRICES = np.array([1.0, 3.0, 2.0, 0.5, 4.0])


def _entropy(costs, s, z):
    return jnp.sum(s * jnp.log(s)) + jnp.dot(costs, s)


def _budget(p, s, z):
    return jnp.dot(p["prices"], s) - p["most"]


def _make_entropy(most):
    side = sc.Constraint(_budget, {"prices": PRICES, "most": most}, name="budget")
    return sc.Problem(sc.Simplex(5), (), sc.Objective(_entropy, COSTS), (side,))


def _truth_entropy(most):
    s = cp.Variable(5)
    cost = -cp.sum(cp.entr(s)) + COSTS @ s
    budget = PRICES @ s <= most
    return _optimum(cost, [s >= 0, cp.sum(s) == 1, budget], primal=s, sides=[[budget]])


for _name, _most in {"entropy_budget": 1.2, "entropy_too_dear": 0.4}.items():
    _add(_name, lambda m=_most: _make_entropy(m), lambda m=_most: _truth_entropy(m), smooth=True)


# -- a Markov decision process with a budget, in occupancies ---------------------------------------

STATES, ACTIONS, HORIZON = 3, 2, 4


@lru_cache
def _mdp_data():
    rng = np.random.default_rng(7)
    return {
        "P": rng.dirichlet(np.ones(STATES), size=(STATES, ACTIONS)),
        "reward": rng.uniform(0, 1, size=(STATES, ACTIONS)),
        "price": np.array([[0.0, 1.0]] * STATES),
        "start": np.full(STATES, 1 / STATES),
    }


def _no_flow(p, s, z):
    return jnp.zeros((STATES, ACTIONS))


def _inflow(p, s, z):
    flow = jnp.einsum("sa,sat->t", z[-1], p["P"]) if z else p["start"]
    return jnp.broadcast_to(flow[:, None], (STATES, ACTIONS))


def _conserved(p, s, z):
    flows = [p["start"], *(jnp.einsum("sa,sat->t", y, p["P"]) for y in z[:-1])]
    return jnp.stack([jnp.sum(y, axis=1) - f for y, f in zip(z, flows, strict=True)])


def _spent(p, s, z):
    return sum(jnp.sum(p["price"] * y) for y in z) - p["most"]


def _earned(p, s, z):
    return p["least"] - sum(jnp.sum(p["reward"] * y) for y in z)


def _reward(p, s, z):
    return -sum(jnp.sum(p["reward"] * y) for y in z)


def _make_mdp(most, least):
    p = _mdp_data()
    flow = {"P": p["P"], "start": p["start"]}
    stages = tuple(sc.Stage(_no_flow, _inflow, flow) for _ in range(HORIZON))
    sides = (
        sc.Constraint(_conserved, flow, name="flow"),
        sc.Constraint(_spent, {"price": p["price"], "most": most}, name="budget"),
        sc.Constraint(_earned, {"reward": p["reward"], "least": least}, name="reward"),
    )
    objective = sc.Objective(_reward, {"reward": p["reward"]})
    return sc.Problem(sc.Box(np.zeros(1), np.ones(1)), stages, objective, sides)


def _truth_mdp(most, least):
    p = _mdp_data()
    occupied = [cp.Variable((STATES, ACTIONS), nonneg=True) for _ in range(HORIZON)]
    rows, flow = [], p["start"]
    for y in occupied:
        rows.append(cp.sum(y, axis=1) <= flow)
        flow = sum(p["P"][s, a] * y[s, a] for s in range(STATES) for a in range(ACTIONS))
    spent = sum(cp.sum(cp.multiply(p["price"], y)) for y in occupied)
    earned = sum(cp.sum(cp.multiply(p["reward"], y)) for y in occupied)
    return _optimum(-earned, [*rows, spent <= most, earned >= least], linear=True)


for _name, _arguments in {"mdp_budget": (1.0, 0.1), "mdp_too_poor": (0.3, 3.5)}.items():
    _add(
        _name,
        lambda a=_arguments: _make_mdp(*a),
        lambda a=_arguments: _truth_mdp(*a),
        smooth=False,
    )


# -- bounds that cross -----------------------------------------------------------------------------


def _below(p, s, z):
    return s**2 - p


def _above(p, s, z):
    return p - s**2


def _make_crossed(room):
    stage = sc.Stage(_below, _above, room, name="lens")
    return sc.Problem(sc.Box(-1.5, 1.5), stage, _crossed_cost)


def _crossed_cost(s, z):
    return z[0] - 3 * s


_add("crossed_lens", lambda: _make_crossed(1.0), lambda: Truth(-3.0, np.array(1.0)), smooth=True)
_add("crossed_everywhere", lambda: _make_crossed(-0.1), lambda: None, smooth=True)


def _falling(u, x):
    return x**2 / 4 + u**2 - 0.5


def _rising(u, x):
    return 0.4 - 0.2 * x - u**2


def _crossed_scan_cost(s, z):
    return jnp.sum(z[0]) - 2 * jnp.sum(s)


def _make_crossed_scan():
    stage = sc.ScanStage(
        _falling, _rising, length=4, initial=np.array(0.5), feed=_feed, name="steps"
    )
    return sc.Problem(sc.Box(-np.ones(4), np.ones(4)), (stage,), _crossed_scan_cost)


def _truth_crossed_scan():
    u, x = cp.Variable(4), cp.Variable(4)
    before = cp.hstack([np.array([0.5]), x[:-1]])
    rows = [
        cp.square(before) / 4 + cp.square(u) - 0.5 <= x,
        x <= 0.4 - 0.2 * before - cp.square(u),
        cp.abs(u) <= 1,
    ]
    return _optimum(cp.sum(x) - 2 * cp.sum(u), rows)


_add("crossed_scan", _make_crossed_scan, _truth_crossed_scan, smooth=True)


# -- rows that contradict each other ---------------------------------------------------------------

_add("lp_empty", lambda: _make_lp(9, 30, 3, -0.2), lambda: _truth_lp(9, 30, 3, -0.2), smooth=False)
