"""The proof of a trajectory: any multipliers of the dynamics give a lower bound on the optimum.

With a multiplier l_t for each step, every trajectory of the system costs as much as

    cost(x, u) + sum_t l_t' (A_t x_t + B_t u_t + offset_t - x_{t+1}),

which falls apart into one quadratic for each state and one for each step's inputs. Multipliers
swept back from a trajectory make the states' quadratics least there, up to rounding; the inputs'
are minimised over their sets exactly, with a diagonal below R_t for curvature. What rounding may
have done is bounded and taken off, so that the bound holds in real arithmetic for the numbers as
given.
Limits on states have multipliers, too, positive for those above and negative for those below: their
terms, multiplier (x - limit), are never positive where limits are kept.
(A Q_t whose least eigenvalue is within rounding of zero counts as semidefinite.)
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagecert.applications.control.linear import (
    LinearQuadratic,
    apply_transposed,
    is_fixed,
    sizes,
)
from stagecert.applications.control.sweeps import gradient

_EPS = float(np.finfo(float).eps)
# The part of the inputs' curvature that answers for rounding in their slopes.
_KEPT = 1e-3
# Bounds on states beyond this come from ever growing norms: then whole matrices are propagated.
_FAR = 1e6


@dataclass(frozen=True)
class Proof:
    """A trajectory's cost, rounded up, and a proven lower bound on every trajectory's cost."""

    value: float
    bound: float


@dataclass(frozen=True, eq=False)
class Certifier:
    """Certifies trajectories of one problem.

    Attributes:
        problem: its data, without limits on states.
        limits: on the states x_1, ..., x_T from below and above, two arrays (T, n).
    """

    problem: LinearQuadratic
    limits: tuple[np.ndarray, np.ndarray] | None = None

    @cached_property
    def _norms(self):
        p = self.problem
        return sizes(p.A), sizes(p.B), sizes(p.Q), sizes(p.R)

    def certify(
        self,
        states: np.ndarray,
        inputs: np.ndarray,
        multipliers: np.ndarray,
        slope: np.ndarray | None = None,
        pull: np.ndarray | None = None,
    ) -> Proof:
        """The value and the bound that follow from a trajectory and multipliers.

        Args:
            states: x_0, ..., x_T; they follow the dynamics up to rounding.
            inputs: within their sets.
            multipliers: any; see `sweeps.sweep_back`.
            slope: `sweeps.gradient` of these, where it is known already.
            pull: (T, n) any multipliers of limits on states, positive for those above.
        """
        p = self.problem
        n, m = p.states, p.inputs
        with np.errstate(over="ignore", invalid="ignore"):
            slope = gradient(p, inputs, multipliers) if slope is None else slope
            d, w = states[1:] - p.reference, inputs - p.input_reference
            value = p.cost(states, inputs)
            of_A, of_B, of_Q, of_R = self._norms
            x, u, l = (np.linalg.norm(rows, axis=1) for rows in (states, inputs, multipliers))
            length_d, length_w = np.linalg.norm(d, axis=1), np.linalg.norm(w, axis=1)
            unit = (2 * max(n, m) + 64) * _EPS
            rounded = unit * 0.5 * float(np.sum(of_Q * length_d**2) + np.sum(of_R * length_w**2))
            of_offset = np.linalg.norm(p.offset, axis=1)
            # How far one step of the states is from the dynamics, and of the multipliers from
            # theirs; more than rounding where the caller's are not what the sweeps make.
            step = unit * (of_A * x[:-1] + of_B * u + of_offset + x[1:])
            off_step, off_sweep = self._residuals(states, inputs, multipliers, d, pull)
            off_step += step
            following = np.append(l[1:] * of_A[1:], 0.0)
            off_sweep += unit * (following + of_Q * length_d + l)
            off_slope = unit * (of_R * length_w + of_B * l)
            short = 0.0
            if pull is not None:
                off_sweep += unit * np.linalg.norm(pull, axis=1)
                short, terms = self._short(states, pull)
                rounded += unit * terms
            curvature = p.input_curvature
            inner, size = self.least(slope, inputs, (1 - _KEPT) * curvature)
            loss = float(
                np.sum(l * off_step)
                + np.sum(off_slope**2 / (2 * _KEPT * curvature.min(axis=1)))
                + unit * size
            )
            loss += self._states_loss(off_sweep, off_step, value + rounded, u)
            bound = value + inner - short - 1.01 * (loss + rounded) - unit * abs(inner)
        if self.limits is not None:
            within = np.all((states[1:] >= self.limits[0]) & (states[1:] <= self.limits[1]))
            value = value if within else np.inf
            if not np.isfinite(bound):
                bound = -np.inf
            upper = float(np.nextafter(value + 1.01 * rounded, np.inf))
            return Proof(upper, float(np.nextafter(bound, -np.inf)))
        if not np.isfinite(value + rounded):
            return Proof(np.inf, -np.inf)
        return Proof(
            float(np.nextafter(value + 1.01 * rounded, np.inf)),
            float(np.nextafter(bound, -np.inf)) if np.isfinite(bound) else -np.inf,
        )

    def _short(self, states, pull):
        """What the terms of limits fall short of zero by, and the size of what was added up."""
        assert self.limits is not None
        x = states[1:]
        # Limits that are infinite have no multipliers.
        limit = np.where(pull > 0, self.limits[1], np.where(pull < 0, self.limits[0], 0.0))
        size = np.sum(np.abs(pull) * (np.abs(x) + np.abs(limit)))
        return float(np.sum(pull * (limit - x))), float(size)

    def _residuals(self, states, inputs, multipliers, d, pull):
        """Norms of what the computed states and multipliers miss their recursions by."""
        p = self.problem
        step = _rows(p.A, states[:-1]) + _rows(p.B, inputs) + p.offset - states[1:]
        sweep = _rows(p.Q, d) - multipliers
        if pull is not None:
            sweep += pull
        sweep[:-1] += apply_transposed(p.A[1:], multipliers[1:])
        return np.linalg.norm(step, axis=1), np.linalg.norm(sweep, axis=1)

    def least(self, slope, inputs, curvature):
        """sum_t min of slope . du + 1/2 curvature du^2 over the sets; the size of its terms."""
        p = self.problem
        if p.radius is None:
            with np.errstate(divide="ignore"):
                move = np.clip(-slope / curvature, p.lower - inputs, p.upper - inputs)
        else:
            curvature = curvature.min(axis=1, keepdims=True)
            wish = inputs - slope / curvature - p.middle
            length = np.linalg.norm(wish, axis=1)
            scale = np.minimum(1.0, p.radius / np.maximum(length, p.radius))
            move = p.middle + scale[:, None] * wish - inputs
        terms = slope * move + 0.5 * curvature * move**2
        size = np.sum(np.abs(slope * move)) + np.sum(curvature * move**2)
        if p.radius is not None:
            reach = p.radius + np.linalg.norm(p.middle, axis=1) + np.linalg.norm(inputs, axis=1)
            size += np.sum(np.linalg.norm(slope, axis=1) * reach)
        return float(np.sum(terms)), float(size)

    def _states_loss(self, off_sweep, off_step, value, u) -> float:
        """At most how much the states' quadratics fall below their values on the trajectory."""
        curved = self.problem.state_curvature
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.where(off_sweep > 0, off_sweep**2 / (2 * curved), 0.0)
        if np.all(curved > 0):
            return float(np.sum(loss))
        away = self._distances(off_step, value, u)
        return float(np.sum(np.minimum(loss, off_sweep * away)))

    def _distances(self, off_step, value, u) -> np.ndarray:
        """Bounds on |x_t - optimal x_t| for t = 1, ..., T, from how far optimal inputs can be."""
        p = self.problem
        growth = self._growth
        of_Q = self._norms[2]
        # The exact states of these inputs, their cost, and so how far optimal inputs can be.
        astray = np.sqrt(growth * np.cumsum(off_step**2))
        root = np.sqrt(2 * value) + np.sqrt(np.sum(of_Q * astray**2))
        far = np.full(p.horizon, root / np.sqrt(p.input_curvature.min()))
        if self.limits is not None:  # the trajectory may cost less than the best within them
            far[:] = np.inf
        far += np.linalg.norm(p.input_reference, axis=1)
        if p.radius is None:
            extent = np.linalg.norm(np.maximum(np.abs(p.lower), np.abs(p.upper)), axis=1)
        else:
            extent = p.radius + np.linalg.norm(p.middle, axis=1)
        push = self._norms[1] * (np.minimum(far, extent) + u) + off_step
        return 1.01 * np.sqrt(growth * np.cumsum(push**2))

    @cached_property
    def _growth(self) -> np.ndarray:
        """(T,) bounds g: |x_t|^2 <= g_t sum_{s<t} |w_s|^2 if x_{t+1} = A_t x_t + w_t, x_0 = 0."""
        A = self.problem.A
        norms = np.minimum(
            self._norms[0],
            np.sqrt(np.abs(A).sum(axis=1).max(axis=1) * np.abs(A).sum(axis=2).max(axis=1)),
        )
        simple = np.empty(len(A))
        total = 0.0
        for t, norm in enumerate(norms.tolist()):
            total = 1.0 + (norm * norm * total if t else 0.0)
            simple[t] = total
            if total > _FAR:
                break
        else:
            return 1.01 * simple
        # The sum of squared norms of all products A_t ... A_{s+1}: exact, where norms add up.
        growth = np.empty(len(A))
        spread = np.zeros_like(A[0])
        last = A[0] if is_fixed(A) else None
        identity = np.eye(len(spread))
        for t in range(len(A)):
            matrix = A[t] if last is None else last
            spread = matrix.dot(spread).dot(matrix.T) + identity
            growth[t] = np.trace(spread)
        return 1.01 * growth


def _rows(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return apply_transposed(np.swapaxes(matrices, 1, 2), vectors)
