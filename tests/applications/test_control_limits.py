"""Limits on states and rates, against Clarabel."""

from fractions import Fraction

import cvxpy as cp
import numpy as np
import pytest

from stagecert import ProblemError, Status
from stagecert.applications import control
from stagecert.applications.answer import Answer

A = np.array([[1.0, 0.3], [0.0, 0.95]])
B = np.array([[0.045], [0.3]])
T = 8


def cart(start, **limits) -> control.LinearQuadratic:
    return control.LinearQuadratic(
        A, B, [1.0, 0.2], [0.1], start, T, lower=-2.0, upper=2.0, **limits
    )


def optimum(start, speed, rate) -> float:
    x, u = cp.Variable((T + 1, 2)), cp.Variable((T, 1))
    rows = [x[0] == start, x[1:] == x[:-1] @ A.T + u @ B.T, cp.abs(u) <= 2]
    rows += [cp.abs(x[1:, 1]) <= speed, cp.abs(u[1:] - u[:-1]) <= rate]
    cost = 0.5 * (cp.sum_squares(x[1:, 0]) + 0.2 * cp.sum_squares(x[1:, 1]))
    problem = cp.Problem(cp.Minimize(cost + 0.05 * cp.sum_squares(u)), rows)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11)
    return float(np.asarray(problem.value))


def test_the_gap_of_what_is_infeasible_is_infinite_and_not_nan():
    class Refuted(Answer):
        value = bound = np.inf

    assert Refuted().gap == np.inf


@pytest.mark.slow
def test_states_and_rates_against_clarabel():
    limits = dict(state_lower=[-np.inf, -0.5], state_upper=[np.inf, 0.5], rate=0.6)
    problem = cart([1.5, 0.0], **limits)
    assert problem.limited
    found = control.solve(problem, atol=0.0, rtol=1e-6)
    best = optimum([1.5, 0.0], 0.5, 0.6)
    assert found.status is Status.GAP_REACHED
    assert found.engine == "stagewise"
    assert found.bound - 1e-9 <= best <= found.value + 1e-9
    assert np.abs(found.states[1:, 1]).max() <= 0.5
    assert np.abs(np.diff(found.inputs, axis=0)).max() <= 0.6
    np.testing.assert_allclose(found.states[1:], found.states[:-1] @ A.T + found.inputs @ B.T)
    # Both limits are felt.
    assert optimum([1.5, 0.0], 9.0, 0.6) < best - 0.01
    assert optimum([1.5, 0.0], 0.5, 9.0) < best - 0.01
    # Too fast to brake within a step.
    refuted = control.solve(cart([1.5, 3.0], **limits), rtol=1e-6)
    assert refuted.status is Status.INFEASIBLE
    assert refuted.value == refuted.gap == np.inf


def contracting(seed, **limits):
    """Three states, one without weight; inputs push them beyond their limits."""
    rng = np.random.default_rng(seed)
    dynamics = np.diag([0.6, 0.5, 0.4]) + 0.1 * rng.normal(size=(3, 3))
    return control.LinearQuadratic(
        dynamics, rng.normal(size=(3, 2)), [1.0, 0.5, 0.3], [0.05, 0.1], [0.1, 0.0, -0.1], 6,
        reference=rng.normal(size=(6, 3)), offset=0.05 * rng.normal(size=3),
        lower=-1.0, upper=1.0, **limits,
    )  # fmt: skip


def limited_optimum(p) -> float:
    x, u = cp.Variable((7, 3)), cp.Variable((6, 2))
    rows = [x[0] == p.initial, cp.abs(u) <= 1]
    rows += [x[1:] == x[:-1] @ p.A[0].T + u @ p.B[0].T + p.offset]
    rows += [x[1:, 0] <= p.state_upper[0], x[1:, 1] >= p.state_lower[1]]
    cost = cp.sum(cp.multiply(np.diag(p.Q[0])[None], cp.square(x[1:] - p.reference)))
    cost += cp.sum(cp.multiply(np.diag(p.R[0])[None], cp.square(u)))
    problem = cp.Problem(cp.Minimize(0.5 * cost), rows)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11)
    return float(np.asarray(problem.value))


def exact_dual(p, multipliers, pull) -> Fraction:
    """The Lagrangian's least value in rationals; Q and R are diagonal."""

    def exact(array):
        return np.vectorize(Fraction)(np.asarray(array, float))

    A, B, l, pull = exact(p.A[0]), exact(p.B[0]), exact(multipliers), exact(pull)
    q, r, reference, offset = exact(np.diag(p.Q[0])), exact(np.diag(p.R[0])), *map(
        exact, (p.reference, p.offset)
    )  # fmt: skip
    total = (A @ exact(p.initial)) @ l[0]
    for t in range(6):
        total += offset[t] @ l[t]
        slope = pull[t] - l[t] + (A.T @ l[t + 1] if t < 5 else 0)
        for i in range(3):
            if pull[t, i]:
                ends = p.state_upper if pull[t, i] > 0 else p.state_lower
                total -= pull[t, i] * Fraction(float(ends[i]))
            total += slope[i] * reference[t, i] - slope[i] ** 2 / (2 * q[i])
        for j, g in enumerate(B.T @ l[t]):
            u = min(max(-g / r[j], Fraction(-1)), Fraction(1))
            total += g * u + r[j] * u * u / 2
    return total


@pytest.mark.parametrize("seed", range(3))
def test_limits_on_states_of_contracting_dynamics(seed):
    """The method of multipliers: Clarabel's optimum, limits kept, the proof in rationals."""
    free = contracting(seed)
    highest = control.solve(free, rtol=1e-8).states[1:].max(axis=0)
    lowest = control.solve(free, rtol=1e-8).states[1:].min(axis=0)
    problem = contracting(
        seed,
        state_upper=np.array([0.8 * highest[0], np.inf, np.inf]),
        state_lower=np.array([-np.inf, 0.8 * lowest[1], -np.inf]),
    )
    assert (highest[0] > 0) & (lowest[1] < 0)
    found = control.solve(problem, atol=0.0, rtol=1e-5)
    best = limited_optimum(problem)
    assert found.status is Status.GAP_REACHED
    assert found.engine == "augmented"
    assert found.bound - 1e-9 <= best <= found.value + 1e-9
    assert np.all(found.states[1:, 0] <= problem.state_upper[0])
    assert np.all(found.states[1:, 1] >= problem.state_lower[1])
    assert control.solve(free, rtol=1e-8).value < best - 1e-4
    dual = exact_dual(problem, found.multipliers, found.limit_multipliers)
    assert Fraction(found.bound) <= dual <= Fraction(best + 1e-8)
    # Both kinds of limits have their multipliers.
    assert np.any(found.limit_multipliers > 0)
    assert np.any(found.limit_multipliers < 0)


def test_the_engine_for_limits_is_for_limits_on_states_alone():
    with pytest.raises(ProblemError, match="'augmented' needs limits on states"):
        control.solve(cart([1.0, 0.0], rate=0.5), engine="augmented")
    with pytest.raises(ProblemError, match="'augmented' needs limits on states"):
        control.solve(cart([1.0, 0.0]), engine="augmented")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (dict(state_lower=[0.0]), r"state_low has shape \(1,\)"),
        (dict(state_lower=1.0, state_upper=0.0), r"No state is allowed at \[0, 0\]"),
        (dict(rate=-1.0), "rate has a negative entry"),
        (dict(rate=np.nan), "rate = nan"),
    ],
    ids=str,
)
def test_bad_limits(limits, message):
    with pytest.raises(ProblemError, match=message):
        control.solve(cart([1.0, 0.0], **limits))


def test_limits_need_bounded_inputs_and_the_core():
    free = control.LinearQuadratic(A, B, [1.0, 0.2], [0.1], [1.0, 0.0], T, state_upper=2.0)
    with pytest.raises(ProblemError, match="need inputs in a finite box"):
        control.solve(free)
    with pytest.raises(ProblemError, match="without limits on states or rates"):
        control.solve(cart([1.0, 0.0], state_upper=2.0), engine="newton")
