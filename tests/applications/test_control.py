"""Linear-quadratic control against Riccati's recursion, dense least squares and Clarabel."""

from typing import Any

import cvxpy as cp
import numpy as np
import pytest
from scipy.linalg import solve_discrete_are

from stagecert import ProblemError, Status
from stagecert.applications import control
from stagecert.applications.control.certificate import Certifier
from stagecert.applications.control.sweeps import gradient, roll_out, sweep_back

LinearQuadratic = control.LinearQuadratic


def definite(rng, size, least=0.1):
    half = rng.normal(size=(size, size))
    full = half @ half.T / size + least * np.eye(size)
    return 0.5 * (full + full.T)


def random_problem(seed, n=5, m=3, T=20, growth=1.0, singular=False, **sets):
    """Everything varies with time; matrices are full."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(T, n, n))
    A *= growth / np.abs(np.linalg.eigvals(A)).max(axis=1)[:, None, None]
    B = rng.normal(size=(T, n, m))
    Q = np.stack([definite(rng, n) for _ in range(T)])
    if singular:
        Q[:, :, 0] = 0.0
        Q[:, 0, :] = 0.0
    R = np.stack([definite(rng, m) for _ in range(T)])
    return LinearQuadratic(
        A, B, Q, R, rng.normal(size=n), reference=rng.normal(size=(T, n)),
        input_reference=0.3 * rng.normal(size=(T, m)), offset=0.1 * rng.normal(size=(T, n)), **sets,
    )  # fmt: skip


def masses(count=4, horizon=100, seed=0, dt=0.1, **changes):
    """Double integrators: positions and velocities, pushed by forces in a box."""
    rng = np.random.default_rng(seed)
    one, zero = np.eye(count), np.zeros((count, count))
    A, B = np.block([[one, dt * one], [zero, one]]), np.vstack([zero, dt * one])
    given: dict[str, Any] = dict(
        Q=np.repeat([1.0, 0.1], count), R=np.full(count, 0.1),
        initial=np.concatenate([3 * rng.normal(size=count), rng.normal(size=count)]),
        horizon=horizon, lower=-1.0, upper=1.0,
    )  # fmt: skip
    return LinearQuadratic(A, B, **(given | changes))


def box_instance(n, m, T, seed=0):
    """Contractive: absolute row sums of A are 0.9."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(n, n)) * (rng.random((n, n)) < 0.3) + 3 * np.eye(n)
    A *= 0.9 / np.abs(A).sum(axis=1, keepdims=True)
    B = rng.normal(size=(n, m))
    B *= 0.15 / np.abs(B).sum(axis=1, keepdims=True)
    times = np.arange(1, T + 1)[:, None]
    reference = 0.8 * np.sin(2 * np.pi * times / T * rng.integers(1, 4, n) + rng.uniform(0, 6, n))
    return LinearQuadratic(
        A, B, rng.uniform(0.1, 1, n), np.full(m, 0.01), 0.3 * rng.normal(size=n),
        reference=reference, lower=-1.0, upper=1.0,
    )  # fmt: skip


def by_clarabel(p):
    """The optimum by CVXPY and Clarabel."""
    x, u = cp.Variable((p.horizon + 1, p.states)), cp.Variable((p.horizon, p.inputs))
    cost, rules = 0, [x[0] == p.initial]
    for t in range(p.horizon):
        cost += cp.quad_form(x[t + 1] - p.reference[t], cp.psd_wrap(p.Q[t]))
        cost += cp.quad_form(u[t] - p.input_reference[t], cp.psd_wrap(p.R[t]))
        rules.append(x[t + 1] == p.A[t] @ x[t] + p.B[t] @ u[t] + p.offset[t])
        if p.radius is not None:
            rules.append(cp.norm(u[t] - p.middle[t]) <= p.radius[t])
    if p.radius is None:
        for bound, sign in ((p.lower, 1), (p.upper, -1)):
            finite = np.isfinite(bound)
            if finite.any():
                rules.append(sign * u[finite] >= sign * bound[finite])
    problem = cp.Problem(cp.Minimize(0.5 * cost), rules)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    assert problem.status == cp.OPTIMAL
    return float(np.asarray(problem.value))


def assert_valid(p, found, truth, rtol):
    """The trajectory is one, its value is its cost, and the optimum is between bound and value."""
    step = np.einsum("tij,tj->ti", p.A, found.states[:-1]) + p.offset
    step += np.einsum("tij,tj->ti", p.B, found.inputs)
    scale = 1 + np.abs(found.states).max()
    np.testing.assert_allclose(found.states[1:], step, rtol=0, atol=1e-12 * scale)
    np.testing.assert_array_equal(found.states[0], p.initial)
    if p.radius is None:
        assert np.all((found.inputs >= p.lower) & (found.inputs <= p.upper))
    else:
        assert np.all(np.linalg.norm(found.inputs - p.middle, axis=1) <= p.radius)
    d, w = found.states[1:] - p.reference, found.inputs - p.input_reference
    cost = 0.5 * (np.einsum("ti,tij,tj->", d, p.Q, d) + np.einsum("ti,tij,tj->", w, p.R, w))
    assert found.value == pytest.approx(cost, rel=1e-11)
    slack = 1e-8 * (1 + abs(truth))
    assert found.bound - slack <= truth <= found.value + slack
    assert found.status is Status.GAP_REACHED
    assert found.gap <= rtol * abs(found.bound) + 1e-9


# -- without constraints --------------------------------------------------------------------------


def dense_optimum(p):
    """Least squares in all inputs at once."""
    T, n, m = p.horizon, p.states, p.inputs
    map_u, free = np.zeros((T, n, T * m)), np.zeros((T, n))
    into, state = np.zeros((n, T * m)), p.initial
    for t in range(T):
        into = p.A[t] @ into
        into[:, t * m : (t + 1) * m] += p.B[t]
        state = p.A[t] @ state + p.offset[t]
        map_u[t], free[t] = into, state
    H: Any = sum(map_u[t].T @ p.Q[t] @ map_u[t] for t in range(T))
    g: Any = sum(map_u[t].T @ p.Q[t] @ (free[t] - p.reference[t]) for t in range(T))
    for t in range(T):
        here = slice(t * m, (t + 1) * m)
        H[here, here] += p.R[t]
        g[here] -= p.R[t] @ p.input_reference[t]
    return np.linalg.solve(H, -g).reshape(T, m)


@pytest.mark.parametrize(("growth", "singular"), [(0.8, False), (1.0, True), (1.3, False)])
def test_without_constraints_equals_least_squares(growth, singular):
    p = random_problem(1, growth=growth, singular=singular)
    found = control.solve(p)
    inputs = dense_optimum(p)
    np.testing.assert_allclose(found.inputs, inputs, atol=1e-8 * np.abs(inputs).max())
    truth = p.cost(roll_out(p, inputs), inputs)
    assert_valid(p, found, truth, rtol=1e-6)
    assert found.engine == "riccati"


def riccati_gains(A, B, Q, R, T):
    P, gains = Q, []
    for _ in range(T):
        K = np.linalg.solve(R + B.T @ P @ B, B.T @ P @ A)
        gains.append(K)
        P = Q + A.T @ P @ A - A.T @ P @ B @ K
    return P - Q, gains[::-1]


@pytest.mark.parametrize("growth", [0.9, 1.0, 1.1])
def test_lqr_equals_riccati(growth):
    rng = np.random.default_rng(3)
    A = rng.normal(size=(6, 6))
    A *= growth / np.abs(np.linalg.eigvals(A)).max()
    B, Q, R = rng.normal(size=(6, 2)), definite(rng, 6), definite(rng, 2)
    initial = rng.normal(size=6)
    found = control.solve(LinearQuadratic(A, B, Q, R, initial, horizon=60))
    P, gains = riccati_gains(A, B, Q, R, 60)
    x, states = initial, [initial]
    for K in gains:
        x = (A - B @ K) @ x
        states.append(x)
    np.testing.assert_allclose(found.states, states, atol=1e-8)
    truth = 0.5 * initial @ P @ initial
    assert found.value == pytest.approx(truth, rel=1e-8)
    assert 0 <= found.gap <= 1e-6 * truth
    assert found.bound <= truth * (1 + 1e-12)


def test_long_horizon_approaches_the_algebraic_equation():
    p = masses(lower=None, upper=None, horizon=400)
    found = control.solve(p)
    P = solve_discrete_are(p.A[0], p.B[0], p.Q[0], p.R[0])
    truth = 0.5 * p.initial @ (P - p.Q[0]) @ p.initial
    assert found.value == pytest.approx(truth, rel=1e-8)
    assert found.gap <= 1e-6 * truth


# -- with constraints -----------------------------------------------------------------------------

SETS = {
    "box": dict(lower=-0.3, upper=[0.2, 0.3, 0.4]),
    "half-infinite box": dict(lower=[-0.2, -np.inf, -0.1], upper=[np.inf, 0.1, 0.3]),
    "pinned": dict(lower=[0.1, -1, -1], upper=[0.1, 1, 1]),
    "ball": dict(radius=0.5, middle=[0.1, 0.0, -0.1]),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("growth", "singular"), [(0.6, False), (1.0, True), (1.2, False)])
def test_constraints_equal_clarabel(name, growth, singular):
    p = random_problem(2, growth=growth, singular=singular, T=15, **SETS[name])
    assert_valid(p, control.solve(p), by_clarabel(p), rtol=1e-6)


@pytest.mark.parametrize("engine", ["gradient", "newton", "interior"])
def test_every_engine_alone(engine):
    p = box_instance(6, 3, 25)
    found = control.solve(p, engine=engine)
    assert found.engine == engine
    assert_valid(p, found, by_clarabel(p), rtol=1e-6)


@pytest.mark.parametrize("engine", ["gradient", "newton"])
def test_engines_without_constraints(engine):
    p = box_instance(4, 2, 20)
    p = LinearQuadratic(p.A, p.B, p.Q, p.R, p.initial, reference=p.reference)
    truth = control.solve(p, engine="riccati").value
    assert_valid(p, control.solve(p, engine=engine), truth, rtol=1e-6)
    with pytest.raises(ProblemError, match="needs constraints"):
        control.solve(p, engine="interior")


@pytest.mark.parametrize("name", ["pinned", "ball"])
def test_interior_point_method(name):
    p = random_problem(3, **SETS[name])
    assert_valid(p, control.solve(p, engine="interior"), by_clarabel(p), rtol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_double_integrators(seed):
    p = masses(seed=seed)
    found = control.solve(p)
    assert_valid(p, found, by_clarabel(p), rtol=1e-6)
    assert not found.engine.endswith("gradient")


@pytest.mark.parametrize("shape", [(10, 4, 50), (40, 10, 200)], ids=["700", "10,000"])
def test_box_equals_clarabel(shape):
    p = box_instance(*shape)
    truth = by_clarabel(p)
    for engine in ("auto", "newton", "interior"):
        found = control.solve(p, engine=engine)
        assert found.value == pytest.approx(truth, rel=1e-5)
        assert_valid(p, found, truth, rtol=1e-6)


def test_unstable_dynamics():
    # Without feedback, states would grow 10^8-fold within the horizon.
    A = np.diag([1.2, 0.5]) + np.array([[0, 0.1], [0.1, 0]])
    p = LinearQuadratic(
        A, [[1.0], [0.5]], [1.0, 0.0], [0.1], [0.5, -1.0], horizon=100, lower=-0.3, upper=0.3
    )
    assert_valid(p, control.solve(p), by_clarabel(p), rtol=1e-6)


@pytest.mark.parametrize("horizon", [300, 3000])
def test_states_that_no_input_holds_claim_nothing(horizon):
    p = LinearQuadratic([[3.0]], [[1.0]], [1.0], [1.0], [10.0], horizon, lower=-1.0, upper=1.0)
    found = control.solve(p)
    assert found.status is Status.STALLED
    assert found.bound == -np.inf
    assert found.value > 1e280


def test_warm_start_needs_fewer_steps():
    first = control.solve(masses(count=5, horizon=150, seed=3))
    again = masses(count=5, horizon=150, initial=first.states[1])
    cold = control.solve(again)
    warm = control.solve(again, engine="newton", start=first.shifted())
    assert_valid(again, warm, by_clarabel(again), rtol=1e-6)
    assert warm.iterations <= 5 < cold.iterations


# -- the certificate ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["box", "ball"])
@pytest.mark.parametrize("singular", [False, True])
def test_any_multipliers_give_a_bound(name, singular):
    p = random_problem(4, T=8, singular=singular, **SETS[name])
    truth = by_clarabel(p)
    certifier = Certifier(p)
    rng = np.random.default_rng(0)
    best = control.solve(p)
    for noise in (0, 1e-9, 1e-6, 1e-3, 0.1, 1.0):
        inputs = p.project(best.inputs + noise * rng.normal(size=best.inputs.shape))
        states = roll_out(p, inputs)
        multipliers = sweep_back(p, states)
        for wrong in (0, noise):
            moved = multipliers + wrong * rng.normal(size=multipliers.shape)
            proof = certifier.certify(states, inputs, moved)
            assert proof.bound <= truth + 1e-9 * abs(truth)
            assert proof.value >= truth - 1e-9 * abs(truth)
    exact = certifier.certify(best.states, best.inputs, sweep_back(p, best.states))
    assert exact.bound >= truth - 1e-5 * abs(truth)


def test_bound_is_below_the_exact_optimum_of_a_tiny_problem():
    # One state, one step: 1/2 (0.1 + u)^2 + 1/2 0.3 u^2, least at u = -0.1 / 1.3.
    from fractions import Fraction as F

    start, weight = F(0.1), F(0.3)
    u = -start / (1 + weight)
    truth = ((start + u) ** 2 + weight * u**2) / 2
    p = LinearQuadratic([[1.0]], [[1.0]], [1.0], [0.3], [0.1], horizon=1)
    found = control.solve(p)
    assert F(found.bound) <= truth <= F(found.value)
    assert found.gap <= 1e-15


def test_gradient_equals_differences():
    p = random_problem(5, T=6)
    rng = np.random.default_rng(0)
    inputs, move = rng.normal(size=(2, 6, 3))
    slope = gradient(p, inputs, sweep_back(p, roll_out(p, inputs)))
    ends = [p.cost(roll_out(p, u), u) for u in (inputs + move, inputs - move)]
    assert np.sum(slope * move) == pytest.approx(0.5 * (ends[0] - ends[1]), rel=1e-10)


def test_limits_are_kept():
    p = masses(count=3, horizon=60)
    few = control.solve(p, engine="gradient", max_iterations=5)
    assert few.status is Status.ITERATION_LIMIT
    assert few.bound <= by_clarabel(p) <= few.value
    assert control.solve(p, engine="gradient", time_limit=0.0).status is Status.TIME_LIMIT


# -- bad input ------------------------------------------------------------------------------------

GOOD: dict[str, Any] = dict(
    A=np.eye(2), B=np.ones((2, 1)), Q=np.eye(2), R=np.eye(1), initial=[1.0, 0.0], horizon=5
)
TIMED = np.repeat(np.eye(2)[None], 5, axis=0)
INDEFINITE = TIMED.copy()
INDEFINITE[3] = [[1.0, 2.0], [2.0, 1.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(Q=[[1.0, 2.0], [2.0, 1.0]]), "Q is indefinite: its least eigenvalue is -1"),
        (dict(Q=INDEFINITE), r"Q\[3\] is indefinite"),
        (dict(Q=[1.0, -1.0]), "Q is indefinite"),
        (dict(Q=[[1.0, 0.5], [0.0, 1.0]]), r"Q is not symmetric at \[0, 1\]"),
        (dict(Q=2.0), r"Q is a single number; .* its diagonal, \(2,\): np.full\(2, 2.0\)"),
        (dict(R=0.5), r"R is a single number; it must be a matrix \(1, 1\)"),
        (dict(initial=[1.0, 0.0, 0.0]), "initial has 3 entries, but A and B are those of 2 states"),
        (dict(R=[-1.0]), "R is indefinite"),
        (dict(R=[0.0]), "R is not positive definite"),
        (dict(terminal=[1.0, -2.0]), "terminal is indefinite"),
        (dict(terminal=np.eye(3)), r"terminal has shape \(3, 3\)"),
        (dict(A=np.eye(3)), r"A has shape \(3, 3\); it must be \(2, 2\)"),
        (dict(B=np.ones((3, 1))), r"B has shape \(3, 1\), but initial has 2 states"),
        (dict(A=TIMED[:4]), "A has 4 times, but horizon has 5"),
        (dict(horizon=None), "give the horizon"),
        (dict(horizon=0), "horizon = 0"),
        (dict(A=[[1.0, np.nan], [0.0, 1.0]]), r"A\[0, 1\] = nan"),
        (dict(reference=[0.0, np.inf]), r"reference\[1\] = inf"),
        (dict(initial=[[1.0]]), "initial must be a vector"),
        (dict(lower=1.0, upper=0.0), r"empty at \[0, 0\]: lower is 1.0 and upper 0.0"),
        (dict(lower=np.nan), "lower = nan"),
        (dict(upper=np.zeros(3)), r"upper has shape \(3,\)"),
        (dict(radius=0.0), r"radius\[0\] = 0.0"),
        (dict(radius=1.0, lower=0.0), "not both"),
        (dict(middle=[0.0]), "without radius"),
        (dict(A="abc"), "A must hold real numbers"),
        (dict(A=[[1.0], [1.0, 2.0]]), "A is not an array of numbers"),
    ],
)
def test_bad_data(changes, message):
    with pytest.raises(ProblemError, match=message):
        LinearQuadratic(**(GOOD | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(engine="magic"), "Unknown engine 'magic'"),
        (dict(engine="riccati"), "without constraints"),
        (dict(rtol=-1.0), "rtol = -1.0"),
        (dict(start=np.zeros((4, 1))), r"start has shape \(4, 1\)"),
        (dict(start=np.full((5, 1), np.nan)), r"start\[0, 0\] = nan"),
        (dict(engine="stagewise"), "for ConvexControl"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ProblemError, match=message):
        control.solve(LinearQuadratic(**GOOD, lower=-1.0, upper=1.0), **options)


def test_other_problems_are_refused():
    with pytest.raises(ProblemError, match="must be a LinearQuadratic"):
        control.solve("problem")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="needs a box"):
        control.solve(LinearQuadratic(**GOOD, radius=1.0), engine="newton")
