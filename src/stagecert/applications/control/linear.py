"""Linear-quadratic control problems as a user writes them down: data, checked entry by entry."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from stagecert.errors import ProblemError

_EPS = float(np.finfo(float).eps)


@dataclass(frozen=True, eq=False, repr=False)
class LinearQuadratic:
    """Minimises the cost of a linear system's states x_1, ..., x_T and inputs u_0, ..., u_{T-1}.

        1/2 sum_t (x_{t+1} - reference_t)' Q_t (x_{t+1} - reference_t)
                  + (u_t - input_reference_t)' R_t (u_t - input_reference_t)

        x_{t+1} = A_t x_t + B_t u_t + offset_t,    x_0 = initial,    u_t in a box or a ball

    Matrices are the same for all times, or have a leading axis of times. Q_t and R_t belong to what
    step t makes and takes: Q[T - 1] weights the last state.

    Args:
        A: (n, n) or (T, n, n).
        B: (n, m) or (T, n, m).
        Q: symmetric, positive semidefinite; (n, n) or (T, n, n), or (n,) for a diagonal.
        R: symmetric, positive definite; (m, m) or (T, m, m), or (m,) for a diagonal.
        initial: the state x_0, (n,).
        horizon: T, needed where no argument has an axis of times.
        terminal: stands in for Q at the last state; a matrix or a diagonal.
        reference: the states to follow, (n,) or (T, n); by default zero.
        input_reference: the inputs to follow, (m,) or (T, m); by default zero.
        offset: (n,) or (T, n); by default zero.
        lower, upper: a box for the inputs: a number, (m,) or (T, m), may be infinite.
        radius: a ball for the inputs of each step: a number or (T,). Not together with a box.
        middle: the ball's middle, (m,) or (T, m); by default zero.
        state_lower, state_upper: limits on the states x_1, ..., x_T: a number, (n,) or (T, n), may
            be infinite.
        rate: how much each input may change from one step to the next: a number, (m,) or
            (T - 1, m). Problems with limits on states or rates need inputs in a finite box or a
            ball, and are solved by the library's core.

    >>> import numpy as np
    >>> double = np.array([[1.0, 0.1], [0.0, 1.0]])
    >>> push = np.array([[0.0], [0.1]])
    >>> p = LinearQuadratic(
    ...     double, push, [1.0, 0.1], [0.1], [1.0, 0.0], horizon=50, lower=-1, upper=1
    ... )
    >>> p.horizon, p.states, p.inputs
    (50, 2, 1)
    """

    A: Any
    B: Any
    Q: Any
    R: Any
    initial: Any
    horizon: int = None  # type: ignore[assignment]  # known after __post_init__
    terminal: Any = field(default=None, kw_only=True)
    reference: Any = field(default=None, kw_only=True)
    input_reference: Any = field(default=None, kw_only=True)
    offset: Any = field(default=None, kw_only=True)
    lower: Any = field(default=None, kw_only=True)
    upper: Any = field(default=None, kw_only=True)
    radius: Any = field(default=None, kw_only=True)
    middle: Any = field(default=None, kw_only=True)
    state_lower: Any = field(default=None, kw_only=True)
    state_upper: Any = field(default=None, kw_only=True)
    rate: Any = field(default=None, kw_only=True)

    def __post_init__(self):
        initial = checked_numbers("initial", self.initial)
        if initial.ndim != 1 or not len(initial):
            raise ProblemError(f"initial must be a vector, not of shape {initial.shape}.")
        n = len(initial)
        A, B = checked_numbers("A", self.A), checked_numbers("B", self.B)
        if A.ndim >= 2 and B.ndim >= 2 and A.shape[-1] == B.shape[-2] != n:
            raise ProblemError(
                f"initial has {n} entries, but A and B are those of {A.shape[-1]} states."
            )
        if B.ndim not in (2, 3) or B.shape[-2] != n or not B.shape[-1]:
            raise ProblemError(
                f"B has shape {B.shape}, but initial has {n} states: it must be ({n}, inputs) or "
                f"(times, {n}, inputs)."
            )
        m = B.shape[-1]
        given = {
            "A": (A, (n, n)),
            "B": (B, (n, m)),
            "Q": (_diagonal("Q", self.Q, n), (n, n)),
            "R": (_diagonal("R", self.R, m), (m, m)),
            "reference": (checked_numbers("reference", self.reference, np.zeros(n)), (n,)),
            "input_reference": (
                checked_numbers("input_reference", self.input_reference, np.zeros(m)),
                (m,),
            ),
            "offset": (checked_numbers("offset", self.offset, np.zeros(n)), (n,)),
        }
        if self.radius is None:
            if self.middle is not None:
                raise ProblemError("middle is given without radius.")
            for name, default in (("lower", -np.inf), ("upper", np.inf)):
                ends = checked_numbers(name, getattr(self, name), default, finite=False)
                given[name] = (np.broadcast_to(ends, (m,)) if ends.ndim == 0 else ends, (m,))
        else:
            if self.lower is not None or self.upper is not None:
                raise ProblemError("Give a box (lower, upper) or a ball (radius), not both.")
            given["radius"] = (checked_numbers("radius", self.radius), ())
            given["middle"] = (checked_numbers("middle", self.middle, np.zeros(m)), (m,))
        horizon = _common_horizon(self.horizon, given)
        arrays = {
            name: np.broadcast_to(array, (horizon, *shape))
            for name, (array, shape) in given.items()
        }
        if self.terminal is not None:
            terminal = _diagonal("terminal", self.terminal, n)
            if terminal.shape != (n, n):
                raise ProblemError(f"terminal has shape {terminal.shape}, it must be ({n}, {n}).")
            _check_semidefinite("terminal", terminal[None])
            arrays["Q"] = np.concatenate([arrays["Q"][:-1], terminal[None]])
        _check_semidefinite("Q", given["Q"][0].reshape(-1, n, n))
        least = _check_semidefinite("R", given["R"][0].reshape(-1, m, m))
        if np.any(least <= 0):
            raise ProblemError(
                f"R{_place(given['R'][0], least <= 0)} is not positive definite: its least "
                f"eigenvalue is {least.min():.3g}."
            )
        _check_sets(arrays)
        for name, array in {"initial": initial, "horizon": horizon, **arrays}.items():
            object.__setattr__(self, name, array)

    def __repr__(self) -> str:
        return (
            f"LinearQuadratic(horizon={self.horizon}, states={self.states}, inputs={self.inputs}, "
            f"constrained={self.constrained})"
        )

    @property
    def states(self) -> int:
        """How many states there are."""
        return self.B.shape[1]

    @property
    def inputs(self) -> int:
        """How many inputs each step has."""
        return self.B.shape[2]

    @property
    def constrained(self) -> bool:
        """Whether inputs are in a ball or have any finite bound."""
        return self.radius is not None or bool(
            np.any(np.isfinite(self.lower)) or np.any(np.isfinite(self.upper))
        )

    @property
    def limited(self) -> bool:
        """Whether there are limits on states or rates."""
        return any(x is not None for x in (self.state_lower, self.state_upper, self.rate))

    @cached_property
    def state_curvature(self) -> np.ndarray:
        """For each time, at most the least eigenvalue of Q_t; zero if that is not positive."""
        return _over_times(self.Q, least_eigenvalues)

    @cached_property
    def input_curvature(self) -> np.ndarray:
        """(T, m) positive numbers d with diag(d_t) <= R_t; equal within a step for balls."""
        return _over_times(self.R, _diagonals_below)

    def project(self, inputs: np.ndarray) -> np.ndarray:
        """The nearest inputs that are allowed."""
        if self.radius is None:
            return np.clip(inputs, self.lower, self.upper)
        away = inputs - self.middle
        # A little inwards, so that rounding does not leave the ball.
        radius = self.radius * (1 - 8 * _EPS)
        scale = np.minimum(1.0, radius / np.maximum(np.linalg.norm(away, axis=1), radius))
        return self.middle + scale[:, None] * away

    def project_one(self, t: int, inputs: np.ndarray) -> np.ndarray:
        """The nearest inputs of step t that are allowed."""
        if self.radius is None:
            return np.minimum(np.maximum(inputs, self.lower[t]), self.upper[t])
        away, most = inputs - self.middle[t], self.radius[t] * (1 - 8 * _EPS)
        return self.middle[t] + away * min(1.0, most / max(float(np.linalg.norm(away)), most))

    def default_inputs(self) -> np.ndarray:
        """The allowed inputs that are nearest to those to follow."""
        return self.project(np.array(self.input_reference))

    def cost(self, states: np.ndarray, inputs: np.ndarray) -> float:
        """The cost of states x_0, ..., x_T and inputs, as computed."""
        d, w = states[1:] - self.reference, inputs - self.input_reference
        return 0.5 * float(np.sum(d * apply(self.Q, d)) + np.sum(w * apply(self.R, w)))


def is_fixed(matrices: np.ndarray) -> bool:
    """Whether all times share one matrix."""
    return len(matrices) == 1 or (len(matrices) > 1 and matrices.strides[0] == 0)


def apply(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """matrices[t] @ vectors[t] for all t."""
    if is_fixed(matrices):
        return vectors @ matrices[0].T
    return np.matmul(matrices, vectors[:, :, None])[:, :, 0]


def apply_transposed(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """matrices[t].T @ vectors[t] for all t."""
    if is_fixed(matrices):
        return vectors @ matrices[0]
    return np.matmul(vectors[:, None, :], matrices)[:, 0, :]


def sizes(matrices: np.ndarray) -> np.ndarray:
    """The Frobenius norm of each matrix."""
    return _over_times(matrices, lambda each: np.linalg.norm(each, axis=(1, 2)))


def _over_times(matrices: np.ndarray, function) -> np.ndarray:
    """function(matrices), computed once where all times share one matrix."""
    if is_fixed(matrices):
        one = function(matrices[:1])
        return np.broadcast_to(one, (len(matrices), *one.shape[1:]))
    return function(matrices)


def is_diagonal(matrices: np.ndarray) -> np.ndarray:
    """For each matrix, whether it is diagonal."""
    off = matrices * (1 - np.eye(matrices.shape[1]))
    return ~np.any(off, axis=(1, 2))


def least_eigenvalues(matrices: np.ndarray) -> np.ndarray:
    """Numbers below the least eigenvalues, by no more than rounding; zero where not positive."""
    entries = np.diagonal(matrices, axis1=1, axis2=2).min(axis=1)
    values = np.linalg.eigvalsh(matrices)
    slack = 16 * matrices.shape[1] * _EPS * np.abs(values).max(axis=1)
    return np.maximum(np.where(is_diagonal(matrices), entries, values[:, 0] - slack), 0.0)


def _diagonals_below(matrices: np.ndarray) -> np.ndarray:
    """A diagonal below each matrix: itself if it is one; else by Gershgorin or an eigenvalue."""
    entries = np.diagonal(matrices, axis1=1, axis2=2)
    least = least_eigenvalues(matrices)[:, None]
    off = np.abs(matrices).sum(axis=2) - np.abs(entries)
    dominant = (entries - off) - 4 * matrices.shape[1] * _EPS * (entries + off)
    dominant = np.where(is_diagonal(matrices)[:, None], entries, dominant)
    better = dominant.min(axis=1, keepdims=True) >= 0.5 * least
    return np.where(better, dominant, least)


# -- checks ---------------------------------------------------------------------------------------


def checked_numbers(name: str, values, default=None, finite: bool = True) -> np.ndarray:
    """An array of floating-point numbers; the first entry that is not finite is named."""
    values = default if values is None else values
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ProblemError(f"{name} is not an array of numbers: {error}") from error
    if not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)):
        raise ProblemError(f"{name} must hold real numbers, not {array.dtype}.")
    array = array.astype(float)
    wrong = ~np.isfinite(array) if finite else np.isnan(array)
    if wrong.any():
        place = _place(array, wrong)
        value = array[np.unravel_index(np.argmax(wrong), array.shape)]
        raise ProblemError(
            f"{name}{place} = {value}: it must be {'finite' if finite else 'given'}."
        )
    return array


def _place(array: np.ndarray, wrong: np.ndarray) -> str:
    """[i, j] of the first wrong entry; nothing for a single number or a matrix of all times."""
    if wrong.ndim == 0 or array.ndim == 2 > wrong.ndim:
        return ""
    index = np.unravel_index(np.argmax(wrong), wrong.shape)
    return f"[{', '.join(str(int(i)) for i in index)}]"


def _diagonal(name: str, values, size: int) -> np.ndarray:
    array = checked_numbers(name, values)
    if array.ndim == 0:
        raise ProblemError(
            f"{name} is a single number; it must be a matrix ({size}, {size}) or its diagonal, "
            f"({size},): np.full({size}, {array}), for example."
        )
    return np.diag(array) if array.shape == (size,) else array


def _common_horizon(horizon, given: dict) -> int:
    if horizon is not None and (
        not isinstance(horizon, (int, np.integer)) or isinstance(horizon, bool) or horizon < 1
    ):
        raise ProblemError(f"horizon = {horizon!r}: it must be a whole number from 1 on.")
    length, source = horizon, "horizon"
    for name, (array, shape) in given.items():
        if array.shape == shape:
            continue
        if array.ndim != len(shape) + 1 or array.shape[1:] != shape:
            timed = f"({', '.join(['times', *map(str, shape)])})"
            raise ProblemError(
                f"{name} has shape {array.shape}; it must be {shape} or {timed}, to go with the "
                "other arguments."
            )
        if length is None:
            length, source = array.shape[0], name
        elif array.shape[0] != length:
            raise ProblemError(f"{name} has {array.shape[0]} times, but {source} has {length}.")
    if not length:
        raise ProblemError("No argument has an axis of times: give the horizon.")
    return int(length)


def _check_semidefinite(name: str, matrices: np.ndarray) -> np.ndarray:
    """Raises unless symmetric and, up to rounding, semidefinite; the least eigenvalues."""
    timed = len(matrices) > 1
    size = np.abs(matrices).max(axis=(1, 2))
    apart = np.abs(matrices - np.swapaxes(matrices, 1, 2))
    if np.any(apart > 0):
        t, i, j = (int(k) for k in np.unravel_index(np.argmax(apart), apart.shape))
        place = f"{t}, {i}, {j}" if timed else f"{i}, {j}"
        raise ProblemError(
            f"{name} is not symmetric at [{place}]: it differs from its transpose by "
            f"{apart.max():.3g}; use (M + M.T) / 2."
        )
    values = np.linalg.eigvalsh(matrices)[:, 0]
    diagonal = is_diagonal(matrices)
    values = np.where(diagonal, np.diagonal(matrices, axis1=1, axis2=2).min(axis=1), values)
    slack = np.where(diagonal, 0.0, 16 * matrices.shape[1] * _EPS * size * matrices.shape[1])
    wrong = values < -slack
    if wrong.any():
        t = int(np.argmax(wrong))
        raise ProblemError(
            f"{name}{f'[{t}]' if timed else ''} is indefinite: its least eigenvalue is "
            f"{values[t]:.3g}."
        )
    return values


def _check_sets(arrays: dict) -> None:
    if "radius" in arrays:
        wrong = arrays["radius"] <= 0
        if wrong.any():
            t = int(np.argmax(wrong))
            raise ProblemError(f"radius[{t}] = {arrays['radius'][t]}: it must be positive.")
        return
    lower, upper = arrays["lower"], arrays["upper"]
    wrong = (lower > upper) | (lower == np.inf) | (upper == -np.inf)
    if wrong.any():
        t, i = (int(k) for k in np.unravel_index(np.argmax(wrong), wrong.shape))
        raise ProblemError(
            f"The box of inputs is empty at [{t}, {i}]: lower is {lower[t, i]} and upper "
            f"{upper[t, i]}."
        )
