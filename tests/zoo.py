"""The zoo: small stagewise convex problems whose solutions are known without stagecert.

Truths come from closed forms, a Riccati recursion, HiGHS (linear programs) and Clarabel (the rest),
the two solvers through CVXPY. They are solved when first asked for, so importing is cheap.

Multipliers follow L = f + sum_i (y_i^+ mu_i - y_i^- eta_i - y_i z_i) with y_i^+ = max(y_i, 0) and
y_i^- = max(-y_i, 0): y_i is the net multiplier, that of mu_i <= z_i minus that of z_i <= eta_i.

A truth leaves out (None) what is not unique, so whatever is given can be compared with a solver's
answer entry by entry.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

import stagecert as sc


@dataclass(frozen=True)
class Truth:
    """An optimal value; the solutions where they are unique."""

    value: float
    inputs: Any = None
    blocks: tuple | None = None
    multipliers: tuple | None = None


@dataclass(frozen=True)
class Case:
    """A problem and its truth.

    `smooth` is False where a function has kinks, and for the chain: affine, but with no curvature
    anywhere it behaves like the kinked linear programs.
    """

    name: str
    make: Callable[[], sc.Problem]
    truth: Callable[[], Truth]
    smooth: bool
    source: str

    @property
    def value(self) -> float:
        return self.truth().value

    @property
    def inputs(self):
        return self.truth().inputs

    @property
    def blocks(self) -> tuple | None:
        return self.truth().blocks

    @property
    def multipliers(self) -> tuple | None:
        return self.truth().multipliers


CASES: list[Case] = []


def _add(name, make, truth, *, smooth, source):
    CASES.append(Case(name, make, lru_cache(maxsize=None)(truth), smooth, source))


def _jax(tree):
    """NumPy arrays as JAX arrays, so that every leaf of a problem is one."""
    return jax.tree.map(jnp.asarray, tree)


def _solve_linear(problem):
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    problem.solve(solver=cp.HIGHS, **tight)
    if problem.status != cp.OPTIMAL:
        raise RuntimeError(f"no truth: {problem.status}")


def _solve_conic(problem):
    # As tight as rounding allows, which differs between problems; the value is then good to about
    # 1e-11, a primal solution to about the root of the curvature times that.
    for tolerance in (1e-13, 1e-12, 1e-11):
        tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Solution may be inaccurate")
            problem.solve(solver=cp.CLARABEL, **tight)
        if problem.status == cp.OPTIMAL:
            return
    raise RuntimeError(f"no truth: {problem.status}")


class Model:
    """States a problem for CVXPY, stage by stage, and reads the net multipliers off.

    `lower` and `upper` are lists: the maximum and the minimum of their entries bound the block. The
    multiplier of a maximum is the sum over its entries.
    """

    def __init__(self):
        self.constraints = []
        self.blocks = []
        self.pairs = []

    def stage(self, shape, lower: Any, upper: Any):
        """Adds a block; `lower` and `upper` are lists, or functions z -> list for a scan."""
        z = cp.Variable(shape)
        lower = lower(z) if callable(lower) else lower
        upper = upper(z) if callable(upper) else upper
        below = [z >= entry for entry in lower]
        above = [z <= entry for entry in upper]
        return self._keep(z, below, above)

    def equal(self, shape, value):
        """Adds a block that equals an affine expression (function z -> expression for a scan)."""
        z = cp.Variable(shape)
        value = value(z) if callable(value) else value
        # CVXPY's multiplier of `value == z` belongs to value - z: the sign of ours.
        return self._keep(z, [value == z], [])

    def _keep(self, z, below, above):
        self.blocks.append(z)
        self.pairs.append((below, above))
        self.constraints += below + above
        return z

    def solve(self, objective, inputs, *extra, linear=False, unique="all") -> Truth:
        """Solves; `extra` puts the inputs in their set. `unique`: "all", "primal" or "value"."""
        problem = cp.Problem(cp.Minimize(objective), [*self.constraints, *extra])
        _solve_linear(problem) if linear else _solve_conic(problem)
        value = float(np.asarray(problem.value))
        if unique == "value":
            return Truth(value)
        primal = jax.tree.map(lambda variable: np.asarray(variable.value), inputs)
        blocks = tuple(np.asarray(z.value) for z in self.blocks)
        if unique == "primal":
            return Truth(value, primal, blocks)
        multipliers = tuple(
            np.asarray(
                sum((c.dual_value for c in below), np.zeros(z.shape))
                - sum((c.dual_value for c in above), np.zeros(z.shape))
            )
            for z, (below, above) in zip(self.blocks, self.pairs, strict=True)
        )
        return Truth(value, primal, blocks, multipliers)


def _in_box(variable, lower, upper):
    return [variable >= lower, variable <= upper]


def _previous(initial, z):
    """For a scan: the states before each step, as rows."""
    return cp.vstack([initial, z[:-1]])


def _interval(matrix, lower, upper):
    """Range of matrix @ x over lower <= x <= upper."""
    positive, negative = np.maximum(matrix, 0), np.minimum(matrix, 0)
    return positive @ lower + negative @ upper, positive @ upper + negative @ lower


def _feed_inputs(s, z):
    return s


def _softplus(x):
    return np.logaddexp(x, 0)


# -- the paper's example, and one with its optimum where the block has no room --------------------


def _lens_lower(s, z):
    return s**2 - 1


def _lens_upper(s, z):
    return 1 - s**2


def _lens_objective(s, z):
    return z[0]


def _make_lens():
    stage = sc.Stage(_lens_lower, _lens_upper)
    return sc.Problem(sc.Box(jnp.asarray(-1.0), jnp.asarray(1.0)), (stage,), _lens_objective)


def _truth_lens():
    one = np.ones(())
    return Truth(-1.0, 0 * one, (-one,), (one,))


_add("lens", _make_lens, _truth_lens, smooth=True, source="closed form; the paper's example")


def _pinched_objective(s, z):
    return z[0] - 3 * s


def _make_pinched():
    stage = sc.Stage(_lens_lower, _lens_upper)
    return sc.Problem(sc.Box(jnp.asarray(-1.0), jnp.asarray(1.0)), (stage,), _pinched_objective)


def _truth_pinched():
    # s^2 - 1 - 3 s falls on all of [-1, 1]; at s = 1 both bounds of z meet at 0.
    one = np.ones(())
    return Truth(-3.0, one, (0 * one,), (one,))


_add(
    "pinched", _make_pinched, _truth_pinched, smooth=True, source="closed form; mu = eta at optimum"
)


# -- stages without room anywhere, by functions that differ off the feasible set ------------------
#
# The width eta - mu is concave and not negative, so a width of zero at an interior point, such as
# the centre that a search starts from, means zero everywhere. The two bounds of the middle stage
# agree because the first stage is an equation and the third input is fixed; their slopes differ.


@lru_cache
def _flat_data():
    rng = np.random.default_rng(10)
    return {
        "lower": np.array([-1.0, -1.0, 0.5]),
        "upper": np.array([1.0, 1.0, 0.5]),
        "M": rng.normal(size=(2, 3)),
        "g": 2 * rng.normal(size=3),
        "h": np.array([1.5, -6.0]),
    }


def _flat_linear(p, s, z):
    return p["M"] @ s


def _flat_middle_lower(p, s, z):
    return z[0] + 2 * (z[0] - p["M"] @ s) + (s[2] - 0.5) ** 2


def _flat_middle_upper(p, s, z):
    return z[0] - 0.5 * (z[0] - p["M"] @ s) - 2 * (s[2] - 0.5) ** 2


def _flat_last_lower(p, s, z):
    return z[1] ** 2


def _flat_last_upper(p, s, z):
    return jnp.full(2, 100.0) + z[0]


def _flat_objective(p, s, z):
    return jnp.sum(z[2]) + p["h"] @ z[1] + p["g"] @ s


def _make_flat():
    p = _jax(_flat_data())
    stages = (
        sc.Stage(_flat_linear, _flat_linear, params=p, name="linear"),
        sc.Stage(_flat_middle_lower, _flat_middle_upper, params=p, name="middle"),
        sc.Stage(_flat_last_lower, _flat_last_upper, params=p, name="last"),
    )
    objective = sc.Objective(_flat_objective, params=p)
    return sc.Problem(sc.Box(p["lower"], p["upper"]), stages, objective)


def _truth_flat():
    p = _flat_data()
    # |M s|^2 + h . M s + g . s, without the middle stage: it has no interior, from which an
    # interior-point method would suffer.
    s = cp.Variable(3)
    w = p["M"] @ s
    cost = cp.sum_squares(w) + p["h"] @ w + p["g"] @ s
    problem = cp.Problem(cp.Minimize(cost), [s[2] == 0.5, cp.abs(s[:2]) <= 1])
    _solve_conic(problem)
    w = p["M"] @ s.value
    last, middle = np.ones(2), 2 * w + p["h"]
    # A positive multiplier belongs to mu, of slope 1 + 2 in z_1; a negative one to eta, 1 - 1/2.
    first = np.where(middle > 0, 3 * middle, 0.5 * middle)
    return Truth(float(np.asarray(problem.value)), s.value, (w, w, w**2), (first, middle, last))


_add("flat", _make_flat, _truth_flat, smooth=True, source="Clarabel; width zero at the centre")


# -- a ladder: at s = 0 all room is lost, and fractions of 0 hold a search there ------------------


def _ladder_lower(feed, x):
    return jnp.zeros_like(x)


def _ladder_upper(feed, x):
    return 1.2 * x - 0.2 * x**2  # from 0 to 0 and from 1 to 1


def _ladder_objective(s, z):
    return jnp.sum(s) - 3 * jnp.sum(z[0][-1])


def _make_ladder():
    stage = sc.ScanStage(_ladder_lower, _ladder_upper, length=4, initial=_feed_inputs)
    return sc.Problem(sc.Box(jnp.zeros(2), jnp.ones(2)), (stage,), _ladder_objective)


def _truth_ladder():
    # The upper bound grows at 0.8 at least on [0, 1], and 1 - 3 * 0.8**4 < 0: all the way up.
    rise = 0.8 ** np.arange(3, -1, -1)
    multipliers = np.stack([-3 * rise, -3 * rise], axis=1)
    return Truth(-4.0, np.ones(2), (np.ones((4, 2)),), (multipliers,))


_add("ladder", _make_ladder, _truth_ladder, smooth=True, source="closed form; no width at s = 0")


# -- softplus network between the function and its chords -----------------------------------------


@lru_cache
def _softplus_data():
    rng = np.random.default_rng(2)
    sizes = (6, 10, 8)
    lower, upper = -np.ones(6), np.ones(6)
    layers = []
    low, high = lower, upper
    for n_in, n_out in pairwise(sizes):
        W = rng.normal(size=(n_out, n_in)) / np.sqrt(n_in)
        b = 0.3 * rng.normal(size=n_out)
        l, u = _interval(W, low, high)
        l, u = l + b, u + b
        low, high = _softplus(l), _softplus(u)
        slope = (high - low) / (u - l)
        layers.append({"W": W, "b": b, "slope": slope, "shift": low - slope * l})
        layers[-1] |= {"low": low, "high": high}
    return {"lower": lower, "upper": upper, "c": rng.normal(size=8)}, layers


def _layer_input(s, z):
    return z[-1] if z else s


def _softplus_lower(p, s, z):
    return jax.nn.softplus(p["W"] @ _layer_input(s, z) + p["b"])


def _chord_upper(p, s, z):
    return p["slope"] * (p["W"] @ _layer_input(s, z) + p["b"]) + p["shift"]


def _last_block_objective(c, s, z):
    return c @ z[-1]


def _make_softplus():
    p, layers = _jax(_softplus_data())
    stages = tuple(
        sc.Stage(_softplus_lower, _chord_upper, params=layer, box=(layer["low"], layer["high"]))
        for layer in layers
    )
    objective = sc.Objective(_last_block_objective, params=p["c"])
    return sc.Problem(sc.Box(p["lower"], p["upper"]), stages, objective)


def _truth_softplus():
    p, layers = _softplus_data()
    s, model = cp.Variable(6), Model()
    z = s
    for q in layers:
        a = q["W"] @ z + q["b"]
        z = model.stage(a.shape, [cp.logistic(a)], [cp.multiply(q["slope"], a) + q["shift"]])
    return model.solve(p["c"] @ z, s, *_in_box(s, p["lower"], p["upper"]))


_add(
    "softplus_net",
    _make_softplus,
    _truth_softplus,
    smooth=True,
    source="Clarabel, exponential cone",
)


# -- linear dynamics, quadratic cost --------------------------------------------------------------


@lru_cache
def _lqr_data():
    rng = np.random.default_rng(3)
    n, m, T = 4, 2, 15
    A = rng.normal(size=(n, n))
    A *= 0.9 / np.linalg.norm(A, 2)
    return {
        "A": A,
        "B": rng.normal(size=(n, m)),
        "Q": np.array([1.0, 0.5, 2.0, 0.1]),
        "R": np.array([0.3, 1.0]),
        "Q_last": np.array([5.0, 5.0, 1.0, 1.0]),
        "x0": np.array([2.0, -1.0, 1.5, -2.0]),
        "T": T,
    }


def _linear_step(p, u, x):
    A, B = p
    return A @ x + B @ u


def _lqr_objective(p, u, z):
    return 0.5 * jnp.sum(p["R"] * u**2) + 0.5 * jnp.sum(p["Q"] * z[0] ** 2)


def _lqr_weights():
    p = _lqr_data()
    Q = np.tile(p["Q"], (p["T"], 1))
    Q[-1] = p["Q_last"]
    return {"R": np.tile(p["R"], (p["T"], 1)), "Q": Q}


def _make_lqr(limit):
    p, weights = _lqr_data(), _jax(_lqr_weights())
    T = p["T"]
    stage = sc.ScanStage(
        _linear_step,
        _linear_step,
        length=T,
        initial=jnp.asarray(p["x0"]),
        feed=_feed_inputs,
        params=_jax((np.tile(p["A"], (T, 1, 1)), np.tile(p["B"], (T, 1, 1)))),
    )
    objective = sc.Objective(
        _lqr_objective,
        params=weights,
        curvature_inputs=weights["R"],
        curvature_blocks=(weights["Q"],),
    )
    limits = jnp.full((T, 2), limit)
    return sc.Problem(sc.Box(-limits, limits), (stage,), objective)


def _truth_lqr():
    p = _lqr_data()
    A, B, R = p["A"], p["B"], np.diag(p["R"])
    P, gains = np.diag(p["Q_last"]), []
    costs = [P]  # costs[t]: cost to go from state t + 1, its own stage cost included
    for t in reversed(range(p["T"])):
        K = np.linalg.solve(R + B.T @ P @ B, B.T @ P @ A)
        gains.insert(0, K)
        closed = A - B @ K
        P = closed.T @ P @ closed + K.T @ R @ K
        if t > 0:
            P = P + np.diag(p["Q"])
            costs.insert(0, P)
    x, states, controls = p["x0"], [], []
    for K in gains:
        controls.append(-K @ x)
        x = A @ x - B @ K @ x
        states.append(x)
    value = 0.5 * p["x0"] @ P @ p["x0"]
    costates = np.stack([P @ x for P, x in zip(costs, states, strict=True)])
    return Truth(float(value), np.stack(controls), (np.stack(states),), (costates,))


def _truth_lqr_box():
    p, weights = _lqr_data(), _lqr_weights()
    u, model = cp.Variable((p["T"], 2)), Model()
    z = model.equal((p["T"], 4), lambda z: _previous(p["x0"][None], z) @ p["A"].T + u @ p["B"].T)
    cost = cp.sum(cp.multiply(weights["R"], u**2)) + cp.sum(cp.multiply(weights["Q"], z**2))
    return model.solve(0.5 * cost, u, cp.abs(u) <= 0.1)


_add("lqr", lambda: _make_lqr(10.0), _truth_lqr, smooth=True, source="Riccati recursion")
_add("lqr_box", lambda: _make_lqr(0.1), _truth_lqr_box, smooth=True, source="Clarabel; active box")


# -- dynamics in a wedge between a square and its chord -------------------------------------------


@lru_cache
def _wedge_data():
    rng = np.random.default_rng(4)
    n, T = 3, 10
    A = rng.normal(size=(T, n, n))
    A *= 0.8 / np.linalg.norm(A, 2, axis=(1, 2), keepdims=True)
    B = rng.normal(size=(T, n, 1))
    k = 0.15 * rng.uniform(size=(T, n))
    q = rng.normal(size=(T, n))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    x0 = np.array([0.5, -0.5, 1.0])
    chord_low, chord_high, box_low, box_high = [], [], [], []
    low, high = x0 - 0.3, x0 + 0.3  # part of the inputs shifts the initial state
    for t in range(T):
        w_low, w_high = _interval(q[t][None], low, high)
        chord_low.append(w_low[0])
        chord_high.append(w_high[0])
        low, high = _interval(A[t], low, high)
        # The square is at least 0; the chord is at most its larger end.
        low = low - np.abs(B[t]).sum(axis=1) * 0.5
        high = high + np.abs(B[t]).sum(axis=1) * 0.5 + k[t] * max(w_low[0] ** 2, w_high[0] ** 2)
        box_low.append(low)
        box_high.append(high)
    return {
        "A": A,
        "B": B,
        "k": k,
        "q": q,
        "l": np.array(chord_low),
        "u": np.array(chord_high),
    }, {
        "x0": x0,
        "box": (np.array(box_low), np.array(box_high)),
        "target": rng.normal(size=(T, n)),
        "g": 0.5 * rng.normal(size=(T, n)),
    }


def _wedge_lower(p, u, x):
    return p["A"] @ x + p["B"] @ u + p["k"] * (p["q"] @ x) ** 2


def _wedge_upper(p, u, x):
    l, h = p["l"], p["u"]
    return p["A"] @ x + p["B"] @ u + p["k"] * ((l + h) * (p["q"] @ x) - l * h)


def _wedge_initial(s, z):
    return jnp.asarray(_wedge_data()[1]["x0"]) + s["shift"]


def _wedge_feed(s, z):
    return s["u"]


def _wedge_objective(p, s, z):
    quadratic = jnp.sum((z[0] - p["target"]) ** 2) + jnp.sum(s["u"] ** 2) + jnp.sum(s["shift"] ** 2)
    return 0.5 * quadratic + jnp.sum(p["g"] * z[0])


def _make_wedge():
    steps, p = _jax(_wedge_data())
    stage = sc.ScanStage(
        _wedge_lower,
        _wedge_upper,
        length=10,
        initial=_wedge_initial,
        feed=_wedge_feed,
        params=steps,
        box=p["box"],
    )
    objective = sc.Objective(
        _wedge_objective,
        params=p,
        curvature_inputs={"u": jnp.ones((10, 1)), "shift": jnp.ones(3)},
        curvature_blocks=(jnp.ones((10, 3)),),
    )
    inputs = sc.Product(
        {
            "u": sc.Box(jnp.full((10, 1), -0.5), jnp.full((10, 1), 0.5)),
            "shift": sc.Box(jnp.full(3, -0.3), jnp.full(3, 0.3)),
        }
    )
    return sc.Problem(inputs, (stage,), objective)


def _truth_wedge():
    steps, p = _wedge_data()
    s, model = {"u": cp.Variable((10, 1)), "shift": cp.Variable(3)}, Model()
    initial = (p["x0"] + s["shift"])[None, :]

    def rows(z, bend):
        before = _previous(initial, z)
        out = []
        for t in range(10):
            step = {name: value[t] for name, value in steps.items()}
            bent = step["k"] * bend(step, step["q"] @ before[t])
            out.append(step["A"] @ before[t] + step["B"] @ s["u"][t] + bent)
        return cp.vstack(out)

    z = model.stage(
        (10, 3),
        lambda z: [rows(z, lambda p, w: cp.square(w))],
        lambda z: [rows(z, lambda p, w: (p["l"] + p["u"]) * w - p["l"] * p["u"])],
    )
    cost = 0.5 * (cp.sum_squares(z - p["target"]) + cp.sum_squares(s["u"]))
    cost += 0.5 * cp.sum_squares(s["shift"]) + cp.sum(cp.multiply(p["g"], z))
    return model.solve(cost, s, cp.abs(s["u"]) <= 0.5, cp.abs(s["shift"]) <= 0.3)


_add("wedge", _make_wedge, _truth_wedge, smooth=True, source="Clarabel")


# -- exponentials and squares below, logarithms and roots above -----------------------------------


@lru_cache
def _curved_data():
    rng = np.random.default_rng(5)
    lows, highs = [-np.ones(3)], [np.ones(3)]
    stages = []
    for size in (2, 3, 2):
        low, high = np.concatenate(lows), np.concatenate(highs)
        C = 0.6 * rng.normal(size=(size, low.size)) / np.sqrt(low.size)
        E = 0.6 * rng.normal(size=(size, low.size)) / np.sqrt(low.size)
        C_low, C_high = _interval(C, low, high)
        E_low, E_high = _interval(E, low, high)
        stages.append({"C": C, "E": E, "C_low": C_low, "C_high": C_high, "E_low": E_low})
        # exp(a) - exp(C_high) <= 0 <= log(1.1), and likewise for the other two pairs of bounds.
        if len(stages) == 1:
            new_low, new_high = np.exp(C_low) - np.exp(C_high), np.ones(size)
            stages[-1]["scale"] = np.maximum(-E_low, E_high)
        elif len(stages) == 2:
            new_low, new_high = np.exp(C_low) - np.exp(C_high), np.log(1.1 + E_high - E_low)
        else:
            stages[-1]["top"] = np.maximum(C_low**2, C_high**2)
            new_low, new_high = -stages[-1]["top"], np.sqrt(0.1 + E_high - E_low)
        stages[-1]["box"] = (new_low, new_high)
        lows.append(new_low)
        highs.append(new_high)
    costs = {
        "c1": np.array([-0.8, 1.0]),
        "c2": np.array([1.2, -1.0, 0.7]),
        "c3": np.array([1.0, -1.6]),
        "s0": 0.5 * rng.normal(size=3),
    }
    return stages, costs


def _all_before(s, z):
    return jnp.concatenate([s, *z])


def _exp_lower(p, s, z):
    return jnp.exp(p["C"] @ _all_before(s, z)) - jnp.exp(p["C_high"])


def _square_lower(p, s, z):
    return (p["C"] @ _all_before(s, z)) ** 2 - p["top"]


def _square_upper(p, s, z):
    return 1 - 0.5 * (p["E"] @ _all_before(s, z) / p["scale"]) ** 2


def _log_upper(p, s, z):
    return jnp.log(1.1 + p["E"] @ _all_before(s, z) - p["E_low"])


def _root_upper(p, s, z):
    return jnp.sqrt(0.1 + p["E"] @ _all_before(s, z) - p["E_low"])


def _curved_objective(p, s, z):
    linear = p["c1"] @ z[0] + p["c2"] @ z[1] + p["c3"] @ z[2]
    return linear + 0.5 * jnp.sum((s - p["s0"]) ** 2) + jax.nn.logsumexp(z[2])


def _make_curved():
    data, costs = _jax(_curved_data())
    functions = (
        (_exp_lower, _square_upper),
        (_exp_lower, _log_upper),
        (_square_lower, _root_upper),
    )
    stages = tuple(
        sc.Stage(lower, upper, params=p, box=p["box"])
        for (lower, upper), p in zip(functions, data, strict=True)
    )
    objective = sc.Objective(_curved_objective, params=costs, curvature_inputs=jnp.ones(3))
    return sc.Problem(sc.Box(-jnp.ones(3), jnp.ones(3)), stages, objective)


def _truth_curved():
    (p1, p2, p3), costs = _curved_data()
    s, model = cp.Variable(3), Model()
    lower = cp.exp(p1["C"] @ s) - np.exp(p1["C_high"])
    upper = 1 - 0.5 * cp.square(cp.multiply(1 / p1["scale"], p1["E"] @ s))
    z1 = model.stage(2, [lower], [upper])
    x = cp.hstack([s, z1])
    lower = cp.exp(p2["C"] @ x) - np.exp(p2["C_high"])
    z2 = model.stage(3, [lower], [cp.log(1.1 + p2["E"] @ x - p2["E_low"])])
    x = cp.hstack([s, z1, z2])
    lower = cp.square(p3["C"] @ x) - p3["top"]
    z3 = model.stage(2, [lower], [cp.sqrt(0.1 + p3["E"] @ x - p3["E_low"])])
    cost = costs["c1"] @ z1 + costs["c2"] @ z2 + costs["c3"] @ z3
    cost += 0.5 * cp.sum_squares(s - costs["s0"]) + cp.log_sum_exp(z3)
    return model.solve(cost, s, cp.abs(s) <= 1)


_add("curved", _make_curved, _truth_curved, smooth=True, source="Clarabel, exponential cone")


# -- ball: distance to a point, in two stages -----------------------------------------------------


@lru_cache
def _ball_data():
    rng = np.random.default_rng(6)
    return {"middle": rng.normal(size=5), "radius": np.array(1.5), "g": 3 * rng.normal(size=5)}


def _half_square(s, z):
    return 0.5 * s**2


def _constant_30(s, z):
    return jnp.full_like(s, 30.0)


def _sum_before(s, z):
    return jnp.sum(z[0])


def _sum_before_and_one(s, z):
    return jnp.sum(z[0]) + 1


def _ball_objective(g, s, z):
    return z[1] + g @ s


def _make_ball():
    p = _jax(_ball_data())
    stages = (
        sc.Stage(_half_square, _constant_30),  # |s_i| <= |middle_i| + radius < 7
        sc.Stage(_sum_before, _sum_before_and_one),
    )
    objective = sc.Objective(_ball_objective, params=p["g"])
    return sc.Problem(sc.Ball(p["middle"], p["radius"]), stages, objective)


def _truth_ball():
    p = _ball_data()
    # Minimising |s|^2 / 2 + g . s projects -g onto the ball.
    away = -p["g"] - p["middle"]
    s = p["middle"] + away * min(1, p["radius"] / np.linalg.norm(away))
    z = 0.5 * s**2
    one = np.ones(())
    return Truth(float(z.sum() + p["g"] @ s), s, (z, z.sum() * one), (np.ones(5), one))


_add("ball", _make_ball, _truth_ball, smooth=True, source="closed form")


# -- simplex --------------------------------------------------------------------------------------


def _entropy_costs():
    return 1.2 * np.random.default_rng(7).normal(size=8)


def _entropy_lower(s, z):
    return (s + 0.05) * jnp.log(s + 0.05)  # the shift keeps the slope finite at 0


def _entropy_upper(s, z):
    low, high = 0.05 * np.log(0.05), 1.05 * np.log(1.05)
    return low + s * (high - low)


def _entropy_objective(g, s, z):
    return jnp.sum(z[0]) + g @ s


def _make_entropy():
    stage = sc.Stage(_entropy_lower, _entropy_upper)
    objective = sc.Objective(_entropy_objective, params=jnp.asarray(_entropy_costs()))
    return sc.Problem(sc.Simplex(8), (stage,), objective)


def _truth_entropy():
    g = _entropy_costs()

    def shares(level):
        return np.maximum(0, np.exp(level - 1 - g) - 0.05)

    s = shares(
        brentq(lambda level: shares(level).sum() - 1, -10, 10, xtol=1e-14, rtol=np.float64(1e-14))
    )
    z = (s + 0.05) * np.log(s + 0.05)
    return Truth(float(z.sum() + g @ s), s, (z,), (np.ones(8),))


_add(
    "entropy", _make_entropy, _truth_entropy, smooth=True, source="optimality condition, SciPy root"
)


@lru_cache
def _markowitz_data():
    rng = np.random.default_rng(8)
    return {
        "F": rng.normal(size=(4, 12)),
        "k": rng.uniform(0.5, 2, size=4),
        "d": rng.uniform(0.2, 1, size=12),
        "r": rng.normal(size=12),
    }


def _markowitz_lower(p, s, z):
    return p["k"] * (p["F"] @ s) ** 2


def _markowitz_upper(p, s, z):
    # On the simplex of total 2, (F s)^2 <= 4 max F^2.
    return 4 * p["k"] * jnp.max(p["F"] ** 2, axis=1)


def _markowitz_objective(p, s, z):
    return jnp.sum(z[0]) + 0.5 * jnp.sum(p["d"] * s**2) - p["r"] @ s


def _make_markowitz():
    p = _jax(_markowitz_data())
    stage = sc.Stage(_markowitz_lower, _markowitz_upper, params=p)
    objective = sc.Objective(_markowitz_objective, params=p, curvature_inputs=p["d"])
    return sc.Problem(sc.Simplex(12, total=2.0), (stage,), objective)


def _truth_markowitz():
    p = _markowitz_data()
    s, model = cp.Variable(12), Model()
    top = 4 * p["k"] * np.max(p["F"] ** 2, axis=1)
    z = model.stage(4, [cp.multiply(p["k"], cp.square(p["F"] @ s))], [top])
    cost = cp.sum(z) + 0.5 * cp.sum(cp.multiply(p["d"], s**2)) - p["r"] @ s
    return model.solve(cost, s, s >= 0, cp.sum(s) == 2)


_add("markowitz", _make_markowitz, _truth_markowitz, smooth=True, source="Clarabel")


# -- product of a box and a ball ------------------------------------------------------------------


@lru_cache
def _product_data():
    rng = np.random.default_rng(9)
    return {
        "P": 0.5 * rng.normal(size=(3, 4)),
        "Q": 0.5 * rng.normal(size=(3, 3)),
        "G": rng.normal(size=(2, 3)) / 10,
        "H": rng.normal(size=(2, 3)),
        "a0": np.array([0.8, -2.0, 0.1, 3.0]),
        "g": np.array([1.0, -0.5, 0.7]),
        "w": np.array([2.0, 1.0]),
    }


def _product_first_lower(p, s, z):
    return (p["P"] @ s["a"] + p["Q"] @ s["b"]) ** 2


def _product_first_upper(p, s, z):
    # |b_i| <= 1 and |a_i| <= 1
    return (jnp.sum(jnp.abs(p["P"]), axis=1) + jnp.sum(jnp.abs(p["Q"]), axis=1)) ** 2


def _product_second_lower(p, s, z):
    return jax.nn.softplus(p["G"] @ z[0] + p["H"] @ s["b"])


def _product_second_upper(p, s, z):
    # softplus(x) <= 1 + |x|; the stage above bounds z[0].
    top = jnp.abs(p["G"]) @ _product_first_upper(p, s, ()) + jnp.sum(jnp.abs(p["H"]), axis=1)
    return 1 + top


def _product_objective(p, s, z):
    of_inputs = jnp.sum((s["a"] - p["a0"]) ** 2) / 8 + p["g"] @ s["b"]
    return p["w"] @ z[1] + jnp.sum(z[0]) / 4 + of_inputs


def _make_product():
    p = _jax(_product_data())
    stages = (
        sc.Stage(_product_first_lower, _product_first_upper, params=p),
        sc.Stage(_product_second_lower, _product_second_upper, params=p),
    )
    inputs = sc.Product(
        {
            "a": sc.Box(-jnp.ones(4), jnp.ones(4)),
            "b": sc.Ball(jnp.zeros(3), jnp.asarray(1.0)),
        }
    )
    return sc.Problem(inputs, stages, sc.Objective(_product_objective, params=p))


def _truth_product():
    p = _product_data()
    s, model = {"a": cp.Variable(4), "b": cp.Variable(3)}, Model()
    top1 = (np.abs(p["P"]).sum(axis=1) + np.abs(p["Q"]).sum(axis=1)) ** 2
    z1 = model.stage(3, [cp.square(p["P"] @ s["a"] + p["Q"] @ s["b"])], [top1])
    top2 = 1 + np.abs(p["G"]) @ top1 + np.abs(p["H"]).sum(axis=1)
    z2 = model.stage(2, [cp.logistic(p["G"] @ z1 + p["H"] @ s["b"])], [top2])
    cost = p["w"] @ z2 + cp.sum(z1) / 4 + cp.sum_squares(s["a"] - p["a0"]) / 8 + p["g"] @ s["b"]
    return model.solve(cost, s, cp.abs(s["a"]) <= 1, cp.norm(s["b"]) <= 1)


_add(
    "box_and_ball", _make_product, _truth_product, smooth=True, source="Clarabel, exponential cone"
)


# -- a stage that feeds a scan that feeds a stage -------------------------------------------------


@lru_cache
def _sandwich_data():
    rng = np.random.default_rng(11)
    T = 6
    K = rng.normal(size=(T, 2, 4)) / 4
    A = rng.normal(size=(2, 2))
    A *= 0.7 / np.linalg.norm(A, 2)
    k = np.array([0.3, 0.2])
    top = np.abs(K).sum(axis=-1) ** 2
    slopes, shifts, lows, highs = [], [], [], []
    low, high = -2 * np.ones(2), 2 * np.ones(2)
    for t in range(T):
        slope = (_softplus(high) - _softplus(low)) / (high - low)
        slopes.append(slope)
        shifts.append(_softplus(low) - slope * low)
        A_low, A_high = _interval(A, low, high)
        low, high = A_low - 1 + k * _softplus(low), A_high - 1 + top[t] + k * _softplus(high)
        lows.append(low)
        highs.append(high)
    reach = np.maximum(-low, high)
    return {
        "first": {"K": K, "top": top},
        "steps": {
            "A": np.tile(A, (T, 1, 1)),
            "k": np.tile(k, (T, 1)),
            "slope": np.array(slopes),
            "shift": np.array(shifts),
        },
        "box": (np.array(lows), np.array(highs)),
        # 1/2 x^2 + 1/4 (x - s)^2 <= last, as |s| <= 1
        "last": 0.5 * reach**2 + 0.25 * (reach + 1) ** 2,
        "cost": {
            "target": 2 * rng.normal(size=(T, 2)),
            "v": 0.5 * rng.normal(size=(T, 2)),
            "c": np.array([1.0, -0.5]),
            "g": rng.normal(size=4),
        },
    }


def _sandwich_first_lower(p, s, z):
    return (p["K"] @ s) ** 2


def _sandwich_first_upper(p, s, z):
    return p["top"]


def _sandwich_initial(s, z):
    return s[:2] - s[2:]


def _feed_first_block(s, z):
    return z[0]


def _sandwich_step_lower(p, v, x):
    return p["A"] @ x + v - 1 + p["k"] * jax.nn.softplus(x)


def _sandwich_step_upper(p, v, x):
    return p["A"] @ x + v - 1 + p["k"] * (p["slope"] * x + p["shift"])


def _sandwich_last_lower(p, s, z):
    return 0.5 * z[1][-1] ** 2


def _sandwich_last_upper(p, s, z):
    return p - 0.25 * (z[1][-1] - s[:2]) ** 2


def _sandwich_objective(p, s, z):
    tracking = 0.5 * jnp.sum((z[1] - p["target"]) ** 2)
    return tracking + jnp.sum(p["v"] * z[0]) + p["c"] @ z[2] + p["g"] @ s


def _make_sandwich():
    p = _jax(_sandwich_data())
    stages = (
        sc.Stage(_sandwich_first_lower, _sandwich_first_upper, params=p["first"], name="first"),
        sc.ScanStage(
            _sandwich_step_lower,
            _sandwich_step_upper,
            length=6,
            initial=_sandwich_initial,
            feed=_feed_first_block,
            params=p["steps"],
            name="steps",
            box=p["box"],
        ),
        sc.Stage(_sandwich_last_lower, _sandwich_last_upper, params=p["last"], name="last"),
    )
    curvature = (jnp.zeros((6, 2)), jnp.ones((6, 2)), jnp.zeros(2))
    objective = sc.Objective(_sandwich_objective, params=p["cost"], curvature_blocks=curvature)
    return sc.Problem(sc.Box(-jnp.ones(4), jnp.ones(4)), stages, objective)


def _truth_sandwich():
    p = _sandwich_data()
    s, model = cp.Variable(4), Model()
    products = cp.vstack([K @ s for K in p["first"]["K"]])
    v = model.stage((6, 2), [cp.square(products)], [p["first"]["top"]])
    steps, initial = p["steps"], cp.reshape(s[:2] - s[2:], (1, 2), order="C")

    def linear(z):
        return _previous(initial, z) @ steps["A"][0].T + v - 1

    x = model.stage(
        (6, 2),
        lambda z: [linear(z) + cp.multiply(steps["k"], cp.logistic(_previous(initial, z)))],
        lambda z: [
            linear(z)
            + cp.multiply(steps["k"] * steps["slope"], _previous(initial, z))
            + steps["k"] * steps["shift"]
        ],
    )
    z = model.stage(2, [0.5 * cp.square(x[-1])], [p["last"] - 0.25 * cp.square(x[-1] - s[:2])])
    q = p["cost"]
    cost = 0.5 * cp.sum_squares(x - q["target"]) + cp.sum(cp.multiply(q["v"], v))
    return model.solve(cost + q["c"] @ z + q["g"] @ s, s, cp.abs(s) <= 1)


_add("sandwich", _make_sandwich, _truth_sandwich, smooth=True, source="Clarabel, exponential cone")


# -- the chain: gradients must travel through 49 steps --------------------------------------------


def _chain_lower(feed, x):
    return -jnp.ones_like(x)


def _chain_upper(feed, x):
    return x


def _chain_objective(s, z):
    return -z[0][-1, 0]


def _make_chain():
    stage = sc.ScanStage(_chain_lower, _chain_upper, length=49, initial=_feed_inputs)
    return sc.Problem(sc.Box(jnp.zeros(1), jnp.ones(1)), (stage,), _chain_objective)


def _truth_chain():
    ones = np.ones((49, 1))
    return Truth(-1.0, np.ones(1), (ones,), (-ones,))


_add("chain", _make_chain, _truth_chain, smooth=False, source="closed form")


# -- triangle relaxations of ReLU networks --------------------------------------------------------


def _relu_layer(rng, low, high, size):
    """A random layer with the triangle over the interval bounds, and bounds of its output."""
    W = rng.normal(size=(size, low.size)) * np.sqrt(2 / low.size)
    b = 0.2 * rng.normal(size=size)
    l, u = _interval(W, low, high)
    l, u = l + b, u + b
    low, high = np.maximum(l, 0), np.maximum(u, 0)
    slope = (high - low) / (u - l)  # 0 and 1 for units that cannot switch
    layer = {"W": W, "b": b, "slope": slope, "shift": low - slope * l, "low": low, "high": high}
    return layer, low, high


@lru_cache
def _relu_data(seed, n_in, sizes, eps):
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=n_in)
    lower, upper = middle - eps, middle + eps
    low, high, layers = lower, upper, []
    for size in sizes:
        layer, low, high = _relu_layer(rng, low, high, size)
        layers.append(layer)
    return {"lower": lower, "upper": upper, "c": rng.normal(size=sizes[-1])}, layers


def _relu_lower(p, s, z):
    return sc.relu(p["W"] @ _layer_input(s, z) + p["b"])


def _relu_stage(p):
    return sc.Stage(_relu_lower, _chord_upper, params=p, box=(p["low"], p["high"]))


def _model_relu(model, p, x):
    a = p["W"] @ x + p["b"]
    return model.stage(a.shape, [a, 0], [cp.multiply(p["slope"], a) + p["shift"]])


_DEEP = (12, 8, (20, 20, 20), 0.8)


def _make_relu_deep():
    p, layers = _jax(_relu_data(*_DEEP))
    objective = sc.Objective(_last_block_objective, params=p["c"])
    return sc.Problem(sc.Box(p["lower"], p["upper"]), tuple(map(_relu_stage, layers)), objective)


def _truth_relu_deep():
    p, layers = _relu_data(*_DEEP)
    s, model = cp.Variable(p["lower"].size), Model()
    z = s
    for layer in layers:
        z = _model_relu(model, layer, z)
    box = _in_box(s, p["lower"], p["upper"])
    return model.solve(p["c"] @ z, s, *box, linear=True)


_add("relu_deep", _make_relu_deep, _truth_relu_deep, smooth=False, source="HiGHS")


_KINKS = (13, 5, (12,), 3.0)


def _kinks_output(p, s, z):
    return p["V"] @ z[0] + p["d"] @ s


def _kinks_objective(s, z):
    return jnp.sum(z[1])


@lru_cache
def _kinks_output_data():
    rng = np.random.default_rng(113)
    # Mostly positive weights: the optimum then sits where units switch, rather than in a corner.
    return {"V": np.abs(rng.normal(size=(2, 12))), "d": 0.1 * rng.normal(size=(2, 5))}


def _make_relu_kinks():
    p, (layer,) = _jax(_relu_data(*_KINKS))
    output = sc.Stage(_kinks_output, _kinks_output, params=_jax(_kinks_output_data()))
    inputs = sc.Box(p["lower"], p["upper"])
    return sc.Problem(inputs, (_relu_stage(layer), output), _kinks_objective)


def _truth_relu_kinks():
    p, (layer,) = _relu_data(*_KINKS)
    q = _kinks_output_data()
    s, model = cp.Variable(5), Model()
    z1 = _model_relu(model, layer, s)
    z2 = model.equal(2, q["V"] @ z1 + q["d"] @ s)
    return model.solve(cp.sum(z2), s, *_in_box(s, p["lower"], p["upper"]), linear=True)


_add(
    "relu_kinks",
    _make_relu_kinks,
    _truth_relu_kinks,
    smooth=False,
    source="HiGHS; kinks at optimum",
)


# -- isotonic regression on a partial order -------------------------------------------------------


@lru_cache
def _isotonic_data(kind):
    """The order as levels: two earlier nodes (numbered in order of levels) for each later node."""
    predecessors = []
    if kind == "random":
        rng = np.random.default_rng(33)
        sizes = [6, 8, 8, 6]
        for level, size in enumerate(sizes[1:], start=1):
            # From any earlier level, so that stages read more than the last block.
            count = sum(sizes[:level])
            choices = [rng.choice(count, 2, replace=False) for _ in range(size)]
            predecessors.append(np.stack(choices))
        d = rng.normal(size=sum(sizes))
    else:
        rng = np.random.default_rng(34)
        n = 6
        levels = [[(i, k - i) for i in range(n) if 0 <= k - i < n] for k in range(2 * n - 1)]
        nodes = [node for level in levels for node in level]
        for level in levels[1:]:
            rows = []
            for i, j in level:
                below = [nodes.index(x) for x in ((i - 1, j), (i, j - 1)) if x in nodes]
                rows.append([below[0], below[-1]])  # a node on the edge has one, named twice
            predecessors.append(np.array(rows))
        sizes = [len(level) for level in levels]
        d = np.array([0.2 * (i + j - n) for i, j in nodes]) + 0.7 * rng.normal(size=n * n)
    return {
        "predecessors": predecessors,
        "d": d,
        "w": rng.uniform(0.5, 2, size=d.size),
        "cuts": np.cumsum(sizes)[:-1],
        "low": np.array(-1.2),
        "high": np.array(1.2),
    }


def _isotonic_lower(p, s, z):
    return sc.maximum(p["low"], sc.max(_all_before(s, z)[p["predecessors"]], axis=1))


def _isotonic_upper(p, s, z):
    return jnp.full(p["predecessors"].shape[0], p["high"])


def _isotonic_objective(p, s, z):
    return 0.5 * jnp.sum(p["w"] * (_all_before(s, z) - p["d"]) ** 2)


def _make_isotonic(kind):
    p = _isotonic_data(kind)
    limits = {"low": p["low"], "high": p["high"]}
    stages = tuple(
        sc.Stage(_isotonic_lower, _isotonic_upper, params=_jax({"predecessors": index} | limits))
        for index in p["predecessors"]
    )
    of_inputs, *of_blocks = _jax(np.split(p["w"], p["cuts"]))
    objective = sc.Objective(
        _isotonic_objective,
        params=_jax({"w": p["w"], "d": p["d"]}),
        curvature_inputs=of_inputs,
        curvature_blocks=tuple(of_blocks),
    )
    inputs = sc.Box(jnp.full_like(of_inputs, p["low"]), jnp.full_like(of_inputs, p["high"]))
    return sc.Problem(inputs, stages, objective)


def _truth_isotonic(kind, unique):
    p = _isotonic_data(kind)
    s, model = cp.Variable(p["cuts"][0]), Model()
    x = s
    for index in p["predecessors"]:
        lower = [x[index[:, 0]], x[index[:, 1]], p["low"]]
        x = cp.hstack([x, model.stage(len(index), lower, [p["high"]])])
    cost = 0.5 * cp.sum(cp.multiply(p["w"], cp.square(x - p["d"])))
    return model.solve(cost, s, *_in_box(s, p["low"], p["high"]), unique=unique)


_add(
    "isotonic",
    lambda: _make_isotonic("random"),
    lambda: _truth_isotonic("random", "all"),
    smooth=False,
    source="Clarabel",
)
# Ties around a square of the grid share their multipliers in more than one way.
_add(
    "isotonic_grid",
    lambda: _make_isotonic("grid"),
    lambda: _truth_isotonic("grid", "primal"),
    smooth=False,
    source="Clarabel; multipliers not unique",
)


# -- the mixture of reward tables that is worst for a decision maker ------------------------------


@lru_cache
def _mdp_data():
    rng = np.random.default_rng(15)
    T, n, actions, tables = 25, 10, 3, 5
    # No tiny probabilities: HiGHS would drop them and lose the ninth digit of the value.
    P = 0.05 / n + 0.95 * rng.dirichlet(0.3 * np.ones(n), size=(T, n, actions))
    return {
        "P": P,
        "top": np.arange(1.0, T + 1),  # rewards are at most 1 a step
        "R": rng.uniform(size=(tables, n, actions)),
        "start": rng.dirichlet(np.ones(n)),
    }


def _mdp_lower(p, R, v):
    return sc.max(p["P"] @ v + R, axis=1)


def _mdp_upper(p, R, v):
    return jnp.full_like(v, p["top"])


def _mdp_feed(s, z):
    R = jnp.tensordot(s, jnp.asarray(_mdp_data()["R"]), 1)
    return jnp.broadcast_to(R, (25, *R.shape))


def _mdp_objective(start, s, z):
    return start @ z[0][-1]


def _make_mdp():
    p = _jax(_mdp_data())
    stage = sc.ScanStage(
        _mdp_lower,
        _mdp_upper,
        length=25,
        initial=jnp.zeros(10),
        feed=_mdp_feed,
        params={"P": p["P"], "top": p["top"]},
    )
    objective = sc.Objective(_mdp_objective, params=p["start"])
    return sc.Problem(sc.Simplex(5), (stage,), objective)


def _truth_mdp():
    p = _mdp_data()
    s, model = cp.Variable(5), Model()

    def action(z, a):
        reward = s @ p["R"][:, :, a]
        before = _previous(np.zeros((1, 10)), z)
        return cp.vstack([p["P"][t, :, a] @ before[t] + reward for t in range(25)])

    top = np.tile(p["top"][:, None], (1, 10))
    z = model.stage((25, 10), lambda z: [action(z, a) for a in range(3)], [top])
    return model.solve(p["start"] @ z[-1], s, s >= 0, cp.sum(s) == 1, linear=True)


_add("mdp", _make_mdp, _truth_mdp, smooth=False, source="HiGHS")


# -- inventory: kinks in the objective ------------------------------------------------------------


@lru_cache
def _inventory_data():
    rng = np.random.default_rng(16)
    T = 12
    return {
        "demand": rng.uniform(0.2, 1.5, size=(T, 2)),
        "price": rng.uniform(0.5, 2, size=(T, 2)),
        "weight": rng.uniform(0.5, 1.5, size=(T, 2)),
        "smoothing": rng.uniform(0.02, 0.1, size=(T - 1, 2)),
        # backlog, shortage, holding, overflow
        "slopes": np.array([-3.0, -1.0, 0.3, 1.5]),
        "intercepts": np.array([-1.0, 0.0, 0.0, -1.8]),
        "x0": np.array([0.5, 0.0]),
        "most": np.full((T, 2), 1.4),
    }


def _inventory_step(demand, u, x):
    return x + u - demand


def _inventory_objective(p, s, z):
    stock = sc.piecewise_linear(z[0], p["slopes"], p["intercepts"])
    changes = sc.abs(s[1:] - s[:-1])
    costs = jnp.sum(p["weight"] * stock) + jnp.sum(p["smoothing"] * changes)
    return costs + jnp.sum(p["price"] * s)


def _make_inventory():
    p = _jax(_inventory_data())
    stage = sc.ScanStage(
        _inventory_step,
        _inventory_step,
        length=12,
        initial=p["x0"],
        feed=_feed_inputs,
        params=p["demand"],
    )
    objective = sc.Objective(_inventory_objective, params=p)
    return sc.Problem(sc.Box(jnp.zeros((12, 2)), p["most"]), (stage,), objective)


def _truth_inventory():
    p = _inventory_data()
    u, model = cp.Variable((12, 2)), Model()
    z = model.equal((12, 2), lambda z: _previous(p["x0"][None], z) + u - p["demand"])
    pieces = [a * z + b for a, b in zip(p["slopes"], p["intercepts"], strict=True)]
    cost = cp.sum(cp.multiply(p["weight"], cp.maximum(*pieces)))
    cost += cp.sum(cp.multiply(p["smoothing"], cp.abs(u[1:] - u[:-1])))
    cost += cp.sum(cp.multiply(p["price"], u))
    return model.solve(cost, u, *_in_box(u, 0, p["most"]), linear=True)


_add("inventory", _make_inventory, _truth_inventory, smooth=False, source="HiGHS")


# -- production: minima above ---------------------------------------------------------------------


@lru_cache
def _production_data():
    rng = np.random.default_rng(17)
    return {
        "W": rng.uniform(size=(6, 5)),
        "cap1": rng.uniform(0.8, 1.5, size=6),
        "R": rng.uniform(0.8, 2.0, size=(4, 6)),
        "S": rng.uniform(size=(4, 5)),
        "V": rng.uniform(size=(3, 4)),
        "cap3": rng.uniform(0.5, 1.2, size=3),
        "price": rng.uniform(2, 4, size=3),
        "c0": rng.uniform(0.1, 0.6, size=5),
        "c1": rng.uniform(0.05, 0.2, size=6),
        "c2": rng.uniform(0.05, 0.2, size=4),
    }


def _nothing(size):
    def lower(p, s, z):
        return jnp.zeros(size)

    return lower


_NOTHING = {size: _nothing(size) for size in (6, 4, 3)}


def _parts_upper(p, s, z):
    return sc.minimum(p["cap1"], p["W"] @ s)


def _assembly_upper(p, s, z):
    # Every product needs every part, and some of the raw inputs.
    return sc.minimum(sc.min(p["R"] * z[0], axis=1), p["S"] @ s)


def _packing_upper(p, s, z):
    return sc.minimum(p["cap3"], p["V"] @ z[1], 0.5 + z[0][:3])


def _production_objective(p, s, z):
    return p["c0"] @ s + p["c1"] @ z[0] + p["c2"] @ z[1] - p["price"] @ z[2]


def _make_production():
    p = _jax(_production_data())
    stages = (
        sc.Stage(_NOTHING[6], _parts_upper, params=p, name="parts"),
        sc.Stage(_NOTHING[4], _assembly_upper, params=p, name="assembly"),
        sc.Stage(_NOTHING[3], _packing_upper, params=p, name="packing"),
    )
    objective = sc.Objective(_production_objective, params=p)
    return sc.Problem(sc.Box(jnp.zeros(5), jnp.ones(5)), stages, objective)


def _truth_production():
    p = _production_data()
    s, model = cp.Variable(5), Model()
    z1 = model.stage(6, [0], [p["cap1"], p["W"] @ s])
    parts = [cp.multiply(p["R"][:, j], z1[j]) for j in range(6)]
    z2 = model.stage(4, [0], [*parts, p["S"] @ s])
    z3 = model.stage(3, [0], [p["cap3"], p["V"] @ z2, 0.5 + z1[:3]])
    cost = p["c0"] @ s + p["c1"] @ z1 + p["c2"] @ z2 - p["price"] @ z3
    return model.solve(cost, s, *_in_box(s, 0, 1), linear=True)


_add("production", _make_production, _truth_production, smooth=False, source="HiGHS")


# -- max pooling ----------------------------------------------------------------------------------


@lru_cache
def _pool_data():
    rng = np.random.default_rng(23)
    lower, upper = -0.6 * np.ones(8), 0.6 * np.ones(8)
    first, low, high = _relu_layer(rng, lower, upper, 15)
    low, high = low.reshape(5, 3), high.reshape(5, 3)
    # max_j z_j <= max_j l_j + sum_j (z_j - l_j), as every z_j >= l_j
    pool = {"shift": low.max(axis=1) - low.sum(axis=1), "top": high.max(axis=1)}
    pool |= {"low": low.max(axis=1), "high": high.max(axis=1)}
    last, _, _ = _relu_layer(rng, pool["low"], pool["high"], 4)
    p = {"lower": lower, "upper": upper, "c": np.array([1.0, -1.0, 0.5, -0.3])}
    # A price on the first block: a unit below the maximum of its group would otherwise be free.
    p["d"] = 0.1 * rng.normal(size=15)
    return p, first, pool, last


def _pool_lower(p, s, z):
    return sc.max(z[0].reshape(5, 3), axis=1)


def _pool_upper(p, s, z):
    return sc.minimum(jnp.sum(z[0].reshape(5, 3), axis=1) + p["shift"], p["top"])


def _pool_objective(p, s, z):
    return p["c"] @ z[2] + p["d"] @ z[0]


def _make_pool():
    p, first, pool, last = _jax(_pool_data())
    stages = (
        _relu_stage(first),
        sc.Stage(_pool_lower, _pool_upper, params=pool, box=(pool["low"], pool["high"])),
        _relu_stage(last),
    )
    objective = sc.Objective(_pool_objective, params=p)
    return sc.Problem(sc.Box(p["lower"], p["upper"]), stages, objective)


def _truth_pool():
    p, first, pool, last = _pool_data()
    s, model = cp.Variable(8), Model()
    z1 = _model_relu(model, first, s)
    groups = [z1[j::3] for j in range(3)]
    z2 = model.stage(5, groups, [sum(groups) + pool["shift"], pool["top"]])
    z3 = _model_relu(model, last, z2)
    cost = p["c"] @ z3 + p["d"] @ z1
    return model.solve(cost, s, *_in_box(s, p["lower"], p["upper"]), linear=True)


_add("max_pool", _make_pool, _truth_pool, smooth=False, source="HiGHS")


# -- expected shortfall of a portfolio: a product of a simplex and an interval --------------------


@lru_cache
def _shortfall_data():
    rng = np.random.default_rng(19)
    return {"R": rng.normal(0.1, 1, size=(25, 6)), "tail": 0.13}  # 25 * 0.13 is no whole number


def _shortfall_lower(R, s, z):
    weights, level = s
    return sc.relu(-R @ weights - level)


def _shortfall_upper(R, s, z):
    return jnp.max(jnp.abs(R), axis=1) + 3


def _shortfall_objective(tail, s, z):
    return s[1][0] + jnp.mean(z[0]) / tail


def _make_shortfall():
    p = _jax(_shortfall_data())
    stage = sc.Stage(_shortfall_lower, _shortfall_upper, params=p["R"])
    inputs = sc.Product(sc.Simplex(6), sc.Box(jnp.full(1, -3.0), jnp.full(1, 3.0)))
    return sc.Problem(inputs, (stage,), sc.Objective(_shortfall_objective, params=p["tail"]))


def _truth_shortfall():
    p = _shortfall_data()
    s, model = (cp.Variable(6), cp.Variable(1)), Model()
    top = np.abs(p["R"]).max(axis=1) + 3
    z = model.stage(25, [0, -p["R"] @ s[0] - s[1]], [top])
    cost = cp.sum(s[1]) + cp.sum(z) / 25 / p["tail"]
    box = [s[0] >= 0, cp.sum(s[0]) == 1, cp.abs(s[1]) <= 3]
    return model.solve(cost, s, *box, linear=True)


_add("shortfall", _make_shortfall, _truth_shortfall, smooth=False, source="HiGHS")
