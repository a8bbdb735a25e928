"""Dynamics in a wedge and convex stage costs against Clarabel."""

from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert import ProblemError, Status, check
from stagecert.applications import control
from stagecert.applications.control.convex import Balls

ConvexControl = control.ConvexControl


# -- a square above, its chord below --------------------------------------------------------------


def wedge_lower(fixed, now, x, u):
    return fixed["A"] @ x + fixed["B"] @ u + 0.01 * (fixed["D"] @ x) ** 2


def wedge_upper(fixed, now, x, u):
    return fixed["A"] @ x + fixed["B"] @ u + now["slope"] * (fixed["D"] @ x) + now["height"]


def tracking(fixed, now, x, u):
    return 0.5 * jnp.sum(fixed["Q"] * (x - now["reference"]) ** 2) + 0.005 * jnp.sum(u**2)


def wedge(n, m, T, seed=0):
    """States between a square and its chord over intervals that states cannot leave."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(n, n)) * (rng.random((n, n)) < 0.2) + 3 * np.eye(n)
    A *= 0.9 / np.abs(A).sum(axis=1, keepdims=True)
    B = rng.normal(size=(n, m))
    B *= 0.15 / np.abs(B).sum(axis=1, keepdims=True)
    D = 0.5 * (np.eye(n) - np.roll(np.eye(n), 1, axis=1))
    initial = 0.3 * rng.normal(size=n)
    middle, extent, slope, height = initial, np.zeros(n), [], []
    for _ in range(T):
        v, r = D @ middle, np.abs(D) @ extent
        slope.append(0.02 * v)
        height.append(-0.01 * (v - r) * (v + r))
        most = 0.01 * np.maximum((v - r) ** 2, (v + r) ** 2)
        middle, extent = A @ middle + 0.5 * most, np.abs(A) @ extent + 0.15 + 0.5 * most
    times = np.arange(1, T + 1)[:, None]
    reference = 0.8 * np.sin(2 * np.pi * times / T * rng.integers(1, 4, n) + rng.uniform(0, 6, n))
    Q = rng.uniform(0.1, 1, n)
    return ConvexControl(
        tracking, wedge_lower, wedge_upper, initial, T,
        constants=dict(A=A, B=B, D=D, Q=Q),
        params=dict(slope=np.array(slope), height=np.array(height), reference=reference),
        low=-np.ones(m), high=1.0, state_curvature=Q, input_curvature=0.01,
    )  # fmt: skip


def wedge_by_clarabel(p):
    fixed = {name: np.asarray(array) for name, array in p.constants.items()}
    now = {name: np.asarray(array) for name, array in p.params.items()}
    x = cp.Variable((p.horizon + 1, len(p.initial)))
    u = cp.Variable((p.horizon, fixed["B"].shape[1]))
    linear, v = x[:-1] @ fixed["A"].T + u @ fixed["B"].T, x[:-1] @ fixed["D"].T
    cost = 0.5 * cp.sum(cp.multiply(fixed["Q"][None], cp.square(x[1:] - now["reference"])))
    problem = cp.Problem(
        cp.Minimize(cost + 0.005 * cp.sum_squares(u)),
        [
            x[0] == p.initial,
            cp.abs(u) <= 1,
            x[1:] >= linear + 0.01 * cp.square(v),
            x[1:] <= linear + cp.multiply(now["slope"], v) + now["height"],
        ],
    )
    problem.solve(solver=cp.CLARABEL)
    assert problem.status == cp.OPTIMAL
    return float(np.asarray(problem.value))


def assert_feasible(p, found, slack=1e-10):
    x = found.states
    given = [g for g in (p.constants, p.params) if g is not None]
    axes = [None if g is p.constants else 0 for g in given]
    with jax.enable_x64(True):
        upper = p.lower if p.upper is None else p.upper
        low, high = (
            np.asarray(jax.vmap(f, in_axes=(*axes, 0, 0))(*given, x[:-1], found.inputs))
            for f in (p.lower, upper)
        )
    np.testing.assert_array_equal(x[0], p.initial)
    assert np.all(x[1:] >= low - slack)
    assert np.all(x[1:] <= high + slack)


@pytest.mark.parametrize("shape", [(10, 4, 50), (40, 10, 200)], ids=["700", "10,000"])
def test_wedge_equals_clarabel(shape):
    p = wedge(*shape)
    truth = wedge_by_clarabel(p)
    found = control.solve(p)
    assert found.status is Status.GAP_REACHED
    assert found.engine == "stagewise"
    assert found.value == pytest.approx(truth, rel=1e-5)
    assert found.bound <= truth * (1 + 1e-7)
    assert found.gap <= 1e-6 * found.bound + 1e-9
    assert_feasible(p, found)


def test_wedge_is_what_it_says():
    assert "No violation" in str(check(wedge(4, 2, 6).stagewise()))


def test_new_numbers_do_not_compile_again():
    compiled = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    start = np.zeros((6, 2))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        control.solve(wedge(4, 2, 6, seed=1), start=start)
        first = len(compiled)
        control.solve(wedge(4, 2, 6, seed=2), start=start)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert first > 0
    assert len(compiled) == first


DOUBLE = np.kron([[1.0, 0.1], [0.0, 1.0]], np.eye(2))
PUSH = np.kron([[0.0], [0.1]], np.eye(2))


def drifting_lower(x, u):
    return DOUBLE @ x + PUSH @ u - 0.02 + 0.002 * jnp.tile(u, 2) ** 2


def drifting_upper(x, u):
    return DOUBLE @ x + PUSH @ u + 0.02 - 0.002 * jnp.tile(u, 2) ** 2


def quadratic(x, u):
    return 0.5 * jnp.sum(jnp.array([1.0, 1.0, 0.1, 0.1]) * x**2) + 0.05 * jnp.sum(u**2)


def test_marginally_stable_wedge_equals_clarabel():
    p = ConvexControl(
        quadratic, drifting_lower, drifting_upper, [2.0, -1.0, 0.5, 0.0], 60,
        low=[-1.0, -1.0], high=1.0, state_curvature=[1.0, 1.0, 0.1, 0.1], input_curvature=0.1,
    )  # fmt: skip
    found = control.solve(p, rtol=1e-4)
    x, u = cp.Variable((61, 4)), cp.Variable((60, 2))
    off = x[1:] - x[:-1] @ DOUBLE.T - u @ PUSH.T
    room = 0.02 - 0.002 * cp.square(cp.hstack([u, u]))
    weights = np.array([[1.0, 1.0, 0.1, 0.1]])
    problem = cp.Problem(
        cp.Minimize(
            0.5 * cp.sum(cp.multiply(weights, cp.square(x[1:]))) + 0.05 * cp.sum_squares(u)
        ),
        [x[0] == p.initial, cp.abs(u) <= 1, off <= room, -off <= room],
    )
    truth = float(np.asarray(problem.solve(solver=cp.CLARABEL)))
    assert found.status is Status.GAP_REACHED
    assert found.bound <= truth * (1 + 1e-7)
    assert truth <= found.value * (1 + 1e-7)
    assert_feasible(p, found)


# -- convex costs ---------------------------------------------------------------------------------

A = np.array([[1.0, 0.2], [0.0, 0.9]])
B = np.array([[0.0, 0.1], [0.2, 0.0]])


def linear(x, u):
    return A @ x + B @ u


def huber_cost(x, u):
    size = jnp.sqrt(1 + jnp.sum((x - 1.0) ** 2))
    return size + 0.1 * jnp.sum(jnp.exp(u)) + 0.1 * jnp.sum(u**2)


def test_convex_costs_on_balls_equal_clarabel():
    middle, radius = np.array([0.2, -0.1]), 0.8
    p = ConvexControl(
        huber_cost, linear, None, [2.0, -1.0], 15, radius=radius, middle=middle,
        input_curvature=0.2,
    )  # fmt: skip
    found = control.solve(p)
    x, u = cp.Variable((16, 2)), cp.Variable((15, 2))
    size = sum(cp.norm(cp.hstack([1.0, x[t + 1] - 1.0])) for t in range(15))
    problem = cp.Problem(
        cp.Minimize(size + 0.1 * cp.sum(cp.exp(u)) + 0.1 * cp.sum_squares(u)),
        [x[0] == p.initial, x[1:] == x[:-1] @ A.T + u @ B.T]
        + [cp.norm(u[t] - middle) <= radius for t in range(15)],
    )
    truth = float(np.asarray(problem.solve(solver=cp.CLARABEL)))
    assert found.status is Status.GAP_REACHED
    assert found.value == pytest.approx(truth, rel=2e-6)
    assert found.bound <= truth * (1 + 1e-8)
    assert np.all(np.linalg.norm(found.inputs - middle, axis=1) <= radius * (1 + 1e-12))
    assert_feasible(p, found)


def test_agrees_with_the_linear_quadratic_engines():
    lq = control.LinearQuadratic(A, B, [1.0, 0.5], [0.1, 0.2], [2.0, 0.0], 20, lower=-1, upper=1)

    def cost(x, u):
        weighted = x**2 @ jnp.array([1.0, 0.5]) + u**2 @ jnp.array([0.1, 0.2])
        return 0.5 * weighted

    p = ConvexControl(
        cost, linear, None, lq.initial, 20, low=[-1.0, -1.0], high=1.0,
        state_curvature=[1.0, 0.5], input_curvature=[0.1, 0.2],
    )  # fmt: skip
    one, other = control.solve(lq), control.solve(p)
    assert one.value == pytest.approx(other.value, rel=2e-6)
    assert max(one.bound, other.bound) <= min(one.value, other.value)


# -- balls ----------------------------------------------------------------------------------------


def test_balls():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        balls = Balls(rng.normal(size=(4, 3)), rng.uniform(0.5, 2, 4))
        slope, centre = rng.normal(size=(2, 4, 3))
        curvature = np.repeat(rng.uniform(0.1, 1, (4, 1)), 3, axis=1)

        def quadratic(x):
            return np.sum(slope * (x - centre) + 0.5 * curvature * (x - centre) ** 2)

        best, least = balls.minimise_quadratic(slope, centre, curvature)
        assert quadratic(best) == pytest.approx(float(least))
        nearest = balls.project(centre)
        for key in jax.random.split(jax.random.key(0), 50):
            x = np.asarray(balls.sample(key))
            assert np.all(np.linalg.norm(x - balls.middle, axis=1) <= balls.radius + 1e-12)
            assert quadratic(x) >= least - 1e-12
            assert np.sum(slope * x) >= np.sum(slope * balls.minimise_linear(slope)) - 1e-12
            assert np.sum((centre - nearest) * (x - nearest)) <= 1e-12


# -- bad input ------------------------------------------------------------------------------------

GOOD: dict[str, Any] = dict(
    cost=huber_cost, lower=linear, upper=None, initial=[1.0, 0.0], horizon=4
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(), "low is missing"),
        (dict(low=-1.0, high=1.0), "must be a vector"),
        (dict(low=[1.0, 0.0], high=0.5), "empty"),
        (dict(low=np.zeros((3, 2)), high=1.0), r"low has shape \(3, 2\)"),
        (dict(low=[-np.inf, 0.0], high=1.0), r"low\[0\] = -inf"),
        (dict(radius=[1.0, 1.0, -1.0, 1.0], middle=[0.0, 0.0]), r"radius\[2\] = -1.0"),
        (dict(radius=1.0, low=[0.0, 0.0]), "not both"),
        (dict(horizon=0), "horizon = 0"),
        (dict(initial=[np.nan, 0.0]), r"initial\[0\] = nan"),
        (dict(params={"a": np.zeros(3)}), r"params\['a'\] has shape \(3,\)"),
        (dict(params={"a": np.array([0, 0, np.nan, 0])}), r"params\['a'\]\[2\] = nan"),
        (dict(constants={"c": np.inf}), r"constants\['c'\] = inf"),
    ],
)
def test_bad_data(changes, message):
    with pytest.raises(ProblemError, match=message):
        ConvexControl(**(GOOD | changes))


def test_costs_that_are_no_number_or_not_convex_are_told():
    box: dict[str, Any] = dict(low=[-1.0, -1.0], high=1.0)
    for cost, message in (
        (lambda x, u: x**2, r"cost must return one number, .* of shape \(\d,\); jnp.sum"),
        (lambda x, u: -jnp.sum(x**2), "The objective: it is not convex"),
    ):
        with pytest.raises(ProblemError, match=message):
            control.solve(ConvexControl(**(GOOD | {"cost": cost}), **box))


def test_bad_options():
    p = ConvexControl(**GOOD, low=[-1.0, -1.0], high=1.0)
    with pytest.raises(ProblemError, match="is for LinearQuadratic"):
        control.solve(p, engine="newton")
    with pytest.raises(ProblemError, match=r"start has shape \(3, 2\)"):
        control.solve(p, start=np.zeros((3, 2)))
