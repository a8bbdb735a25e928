"""Limits on states and rates, against Clarabel."""

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
    return float(problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11))


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
