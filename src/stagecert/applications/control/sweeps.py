"""Passes over the horizon: states forwards, multipliers backwards, Riccati's recursion.

Each is a loop over times of products by BLAS, which for these sizes outruns compiled scans.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import get_lapack_funcs  # JAX brings SciPy

from stagecert.applications.control.linear import LinearQuadratic, apply, apply_transposed, is_fixed

# Solves with a positive definite matrix; called directly, since SciPy's checks take longer.
(_solve_definite,) = get_lapack_funcs(("posv",), dtype=float)


def roll_out(problem: LinearQuadratic, inputs: np.ndarray) -> np.ndarray:
    """The states x_0, ..., x_T that inputs lead to."""
    drive = apply(problem.B, inputs)
    drive += problem.offset
    return linear_recursion(problem.A, problem.initial, drive)


def linear_recursion(A: np.ndarray, initial: np.ndarray, drive: np.ndarray) -> np.ndarray:
    """x_0 = initial and x_{t+1} = A_t x_t + drive_t."""
    out = np.empty((len(drive) + 1, len(initial)))
    out[0] = initial
    out[1:] = drive
    matrices = [A[0]] * len(A) if is_fixed(A) else A
    state = out[0]
    for matrix, following in zip(matrices, out[1:], strict=True):
        following += matrix.dot(state)
        state = following
    return out


def sweep_back(
    problem: LinearQuadratic, states: np.ndarray, pull: np.ndarray | None = None
) -> np.ndarray:
    """Multipliers of the dynamics: row t is A_{t+1}' (row t + 1) + Q_t (x_{t+1} - reference_t).

    `pull` is what else the states cost: (T, n) slopes to add.
    """
    slopes = apply(problem.Q, states[1:] - problem.reference)
    if pull is not None:
        slopes += pull
    if is_fixed(problem.A):
        transposed = np.ascontiguousarray(problem.A[0].T)
        matrices = [transposed] * (len(slopes) - 1)
    else:
        matrices = np.swapaxes(problem.A[:0:-1], 1, 2)
    later = slopes[-1]
    for matrix, slope in zip(matrices, slopes[-2::-1], strict=True):
        slope += matrix.dot(later)
        later = slope
    return slopes


def gradient(problem: LinearQuadratic, inputs: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """The gradient of the cost in the inputs, given their multipliers."""
    found = apply(problem.R, inputs - problem.input_reference)
    found += apply_transposed(problem.B, multipliers)
    return found


@dataclass(frozen=True)
class Feedback:
    """u_t = old_u_t + step * shift_t + gain_t (x_t - old_x_t)."""

    gain: np.ndarray
    shift: np.ndarray

    def roll_out(self, problem, states, inputs, step: float, within: Callable | None = None):
        """States and inputs of the closed loop; `within` (t, u) -> u brings inputs into a set."""
        new_inputs, new_states = np.empty_like(inputs), np.empty_like(states)
        new_states[0] = problem.initial
        planned = inputs + step * self.shift
        x = problem.initial
        for t in range(problem.horizon):
            u = self.gain[t].dot(x - states[t])
            u += planned[t]
            if within is not None:
                u = within(t, u)
            new_inputs[t] = u
            x = problem.A[t].dot(x)
            x += problem.B[t].dot(u)
            x += problem.offset[t]
            new_states[t + 1] = x
        return new_states, new_inputs


def riccati(
    problem: LinearQuadratic,
    slope: np.ndarray,
    weight: np.ndarray | None = None,
    free: np.ndarray | None = None,
    state_slope: np.ndarray | None = None,
    drift: np.ndarray | None = None,
) -> Feedback:
    """The minimiser of slope . du + state_slope . dx + 1/2 sum (du' weight du + dx' Q dx).

    It comes as a feedback for dx_{t+1} = A_t dx_t + B_t du_t + drift_t.

    Args:
        slope: (T, m), in the inputs.
        weight: (T, m, m) in place of R.
        free: (T, m), which inputs may move; by default all.
        state_slope, drift: (T, n); by default zero.
    """
    A, B, Q = problem.A, problem.B, problem.Q
    weights = problem.R if weight is None else weight
    horizon, n, m = B.shape
    gain, shift = np.empty((horizon, m, n)), np.empty((horizon, m))
    P, p = np.array(Q[-1]), np.zeros(n)
    if state_slope is not None:
        p = np.array(state_slope[-1])
    joint = np.concatenate([A[0], B[0]], axis=1)
    fixed_steps = is_fixed(A) and is_fixed(B)
    right = np.empty((m, n + 1))
    for t in range(horizon - 1, -1, -1):
        step = joint if fixed_steps else np.concatenate([A[t], B[t]], axis=1)
        square = step.T.dot(P.dot(step))
        back = step.T.dot(p if drift is None else p + P.dot(drift[t]))
        curvature = square[n:, n:] + weights[t]
        right[:, :n] = square[n:, :n]
        right[:, n] = slope[t] + back[n:]
        if free is not None and not free[t].all():
            fixed = ~free[t]
            curvature[fixed] = 0.0
            curvature[:, fixed] = 0.0
            curvature[fixed, fixed] = 1.0
            right[fixed] = 0.0
        _, answer, failed = _solve_definite(curvature, right)
        if failed:
            raise np.linalg.LinAlgError(f"no positive curvature at time {t}")
        gain[t], shift[t] = -answer[:, :n], -answer[:, n]
        p = back[:n] + right[:, :n].T.dot(shift[t])
        if t:
            P = square[:n, :n] + right[:, :n].T.dot(gain[t])
            P = 0.5 * (P + P.T)
            P += Q[t - 1]
            if state_slope is not None:
                p += state_slope[t - 1]
    return Feedback(gain, shift)


def optimal_feedback(problem: LinearQuadratic) -> Feedback:
    """The optimal policy without constraints, as a feedback around zero states and inputs."""
    return riccati(
        problem,
        -apply(problem.R, problem.input_reference),
        state_slope=-apply(problem.Q, problem.reference),
        drift=problem.offset,
    )


def follow(problem: LinearQuadratic, feedback: Feedback, within: Callable | None = None):
    """States and inputs of a feedback around zero."""
    states = np.zeros((problem.horizon + 1, problem.states))
    inputs = np.zeros((problem.horizon, problem.inputs))
    return feedback.roll_out(problem, states, inputs, 1.0, within)
