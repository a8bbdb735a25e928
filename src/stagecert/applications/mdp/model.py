"""The process: transitions, horizon, where it begins; and its passes back and forth in time.

Inside, arrays over states and actions have the shape (actions, states), and (horizon, actions,
states) over time: reductions over actions then run along contiguous memory.
"""

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from stagecert.applications.mdp.checking import amount, discounting, numbers, reject, whole
from stagecert.errors import ProblemError

# Rows of probabilities may be off by this much: what users compute is rounded.
_OFF_BY = 1e-8
# Above this share of nonzeros, products with a dense matrix are faster.
_DENSE = 0.3
Matrix = Any  # a csr_array, about which SciPy has no types
_UNIT = 0.5 * float(np.finfo(float).eps)


class MDP:
    """A Markov decision process over a finite horizon, or for ever, without its rewards.

    Args:
        transitions: probabilities, stationary: an array of shape (actions, states, states) or one
            sparse matrix (states, states) for each action; or over time: an array of shape
            (horizon, actions, states, states) or a sequence of such sequences of matrices. Entry
            (a, s, r) is the probability to get from s to r by action a.
        horizon: the number of steps; None is for ever, which needs a discount below one. Then so
            many steps are planned that what comes later is worth at most `tail` of the largest
            total possible, and bounds and values are charged for it: they hold for ever, whatever
            is done later. Rewards must then be the same at all steps.
        initial: the state where the process begins, or a distribution over states.
        final: rewards of shape (states,) for the state after the last step; by default 0.
        ends: the probability of shape (states, actions) that the process ends with a step, which
            the transitions then leave out: rows of the transitions and this add up to one.
        discount: what a reward is worth one step later, above 0 and at most 1.
        tail: see `horizon`.

    Raises:
        ProblemError: bad input; the entry is named.

    >>> process = MDP([[[0.9, 0.1], [0.0, 1.0]], [[0.5, 0.5], [0.2, 0.8]]], horizon=3)
    >>> process
    MDP(states=2, actions=2, horizon=3, stationary, 7 transitions)
    """

    def __init__(
        self,
        transitions: Any,
        horizon: int | None,
        initial: Any = 0,
        final=None,
        ends=None,
        discount: float = 1.0,
        tail: float = 1e-7,
    ):
        self.discount = discounting(discount)
        self.endless = horizon is None
        if horizon is None:
            if self.discount == 1:
                raise ProblemError("A process without a horizon needs a discount below one.")
            if final is not None:
                raise ProblemError("A process without a horizon has no final rewards.")
            if not 0 < amount("tail", tail) < 1:
                raise ProblemError(f"tail = {tail!r}: it must be between 0 and 1.")
            horizon = math.ceil(math.log(tail) / math.log(self.discount))
        self.horizon = whole("horizon", horizon)
        steps = _steps(transitions, self.horizon)
        self.stationary = len(steps) == 1
        self.states, self.actions = steps[0][0].shape[0], len(steps[0])
        if not self.states or not self.actions:
            raise ProblemError("transitions have no states or no actions.")
        ends = self._ends(ends)
        matrices = []
        for t, step in enumerate(steps):
            time = "" if self.stationary else f"{t}, "
            for a, matrix in enumerate(step):
                _check_rows(matrix, f"transitions[{time}{a}]", self.states, ends[:, a])
            stacked: Matrix = sp.vstack(step, format="csr")
            stacked.sum_duplicates()
            stacked.eliminate_zeros()
            stacked.data *= self.discount
            matrices.append(stacked)
        self._matrices = matrices
        self.initial = self._initial(initial)
        self.final = np.zeros(self.states) if final is None else numbers("final", final)
        if self.final.shape != (self.states,):
            raise ProblemError(f"final has shape {self.final.shape}, not ({self.states},).")

    def __repr__(self) -> str:
        kind = "stationary" if self.stationary else "over time"
        count = sum(m.nnz for m in self._matrices)
        discount = f"discount={self.discount:g}, " if self.discount < 1 else ""
        ever = " of infinitely many" if self.endless else ""
        return (
            f"MDP(states={self.states}, actions={self.actions}, horizon={self.horizon}{ever}, "
            f"{discount}{kind}, {count} transitions)"
        )

    def _ends(self, ends) -> np.ndarray:
        shape = (self.states, self.actions)
        ends = np.zeros(shape) if ends is None else numbers("ends", ends)
        if ends.shape != shape:
            raise ProblemError(f"ends has shape {ends.shape}, but (states, actions) is {shape}.")
        reject((ends < 0) | (ends > 1), "ends", ends, "probabilities are between 0 and 1")
        return ends

    def _initial(self, initial) -> np.ndarray:
        if np.ndim(initial) == 0:
            state = whole("initial", initial, 0)
            if state >= self.states:
                raise ProblemError(f"initial = {state}: states are 0, ..., {self.states - 1}.")
            return np.eye(1, self.states, state)[0]
        initial = numbers("initial", initial)
        if initial.shape != (self.states,):
            raise ProblemError(f"initial has shape {initial.shape}, not ({self.states},).")
        reject(initial < 0, "initial", initial, "probabilities must not be negative")
        if abs(initial.sum() - 1) > _OFF_BY:
            raise ProblemError(f"initial sums to {initial.sum():.10g}, not to 1.")
        return initial

    # -- passes -------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int, int]:
        """The inner shape of what varies over time, actions and states."""
        return self.horizon, self.actions, self.states

    def inner(self, name: str, values, leading: int = 0) -> np.ndarray:
        """The array in the inner layout (actions before states), once its shape is known to fit.

        `leading` counts axes before those of time, states and actions.
        """
        array = numbers(name, values)
        shape = (self.states, self.actions)
        if array.shape[leading:] not in (shape, (self.horizon, *shape)):
            front = "(count, " if leading else "("
            end = f"{self.states}, {self.actions})"
            raise ProblemError(
                f"{name} has shape {array.shape}; states and actions make it {front}{end} or, over "
                f"time, {front}{self.horizon}, {end}."
            )
        return np.ascontiguousarray(np.swapaxes(array, -1, -2))

    def without_final(self) -> "MDP":
        """The same process with no rewards for where it ends."""
        made = copy.copy(self)
        made.final = np.zeros(self.states)
        return made

    def matrix(self, t: int) -> Matrix:
        """Transitions of step t, a row for each action and state."""
        return self._matrices[0 if self.stationary else t]

    @cached_property
    def _back(self) -> list:
        products = [_product(matrix) for matrix in self._matrices]
        return products * self.horizon if self.stationary else products

    @cached_property
    def _forth(self) -> list:
        products = [_product(matrix.T) for matrix in self._matrices]
        return products * self.horizon if self.stationary else products

    def over_time(self, reward: np.ndarray) -> np.ndarray:
        """The reward of every step, without copying one that does not change."""
        return np.broadcast_to(reward, self.shape)

    def action_values(self, reward: np.ndarray):
        """Yields (t, values of actions and states, values of states), from the last step on."""
        reward = self.over_time(reward)
        later = self.final
        for t in range(self.horizon - 1, -1, -1):
            values = (self._back[t] @ later).reshape(self.actions, self.states)
            values += reward[t]
            later = values.max(axis=0)
            yield t, values, later

    def best_value(self, reward: np.ndarray) -> float:
        """The value of the best policy for a reward, up to rounding: Bellman's backup."""
        first = self.final
        for _, _, values in self.action_values(reward):
            first = values
        return float(self.initial @ first)

    def greedy(self, reward: np.ndarray) -> np.ndarray:
        """The first best action everywhere, as a policy of the inner shape."""
        policy = np.zeros(self.shape)
        for t, values, _ in self.action_values(reward):
            policy[t, values.argmax(axis=0), np.arange(self.states)] = 1.0
        return policy

    def soft_backup(
        self, reward, log_policy, step: float, least_log: float, new_log_policy, new_policy
    ) -> None:
        """The policy that maximises reward minus the relative entropy to `log_policy` over `step`.

        This is the exact proximal step over all occupancies at once. Writes to the last two; the
        logarithms are kept above `least_log`.
        """
        reward = self.over_time(reward)
        later = self.final
        for t in range(self.horizon - 1, -1, -1):
            z = (self._back[t] @ later).reshape(self.actions, self.states)
            z += reward[t]
            z *= step
            z += log_policy[t]
            top = z.max(axis=0)
            z -= top
            p = np.exp(z, out=new_policy[t])
            total = p.sum(axis=0)
            p /= total
            log_total = np.log(total)
            z -= log_total
            np.maximum(z, least_log, out=new_log_policy[t])
            later = (top + log_total) / step

    def occupancy(self, policy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities of time, action and state under a policy; and of the states at the end."""
        visits = np.empty(self.shape)
        mass = self.initial
        for t in range(self.horizon):
            np.multiply(policy[t], mass, out=visits[t])
            mass = self._forth[t] @ visits[t].ravel()
        return visits, mass

    def policy_of(self, visits: np.ndarray, elsewhere: np.ndarray) -> np.ndarray:
        """The policy with given visits; `elsewhere` where there are none."""
        mass = visits.sum(axis=1, keepdims=True)
        # Ratios of subnormal numbers have lost their digits.
        seen = mass > 1e-290
        policy = np.where(seen, visits / np.where(seen, mass, 1.0), elsewhere)
        return policy / policy.sum(axis=1, keepdims=True)

    # -- rounding -----------------------------------------------------------------------------

    @cached_property
    def _terms(self) -> tuple[int, int]:
        """The most terms of one sum in a pass back, and in a pass forth."""
        back = max(int(np.diff(m.indptr).max(initial=0)) for m in self._matrices)
        forth = max(int(np.bincount(m.indices, minlength=1).max()) for m in self._matrices)
        if any(not sp.issparse(product) for product in self._back):
            back, forth = self.states, self.states * self.actions
        # Discounted probabilities are rounded once.
        rounded = int(self.discount < 1)
        return back + rounded, forth + rounded

    @cached_property
    def _rate(self) -> float:
        """At least the largest sum of a row, discounted."""
        largest = max(float(np.max(m.sum(axis=1), initial=0.0)) for m in self._matrices)
        return largest * (1 + (4 * self.states + 8) * _UNIT)

    @property
    def _growth(self) -> float:
        """At most how much a pass enlarges."""
        return max(self._rate, 1.0)

    @property
    def _start(self) -> float:
        return float(self.initial.sum()) * (1 + 2 * self.states * _UNIT)

    @cached_property
    def mass(self) -> float:
        """A bound on the sum of all visits, and of their remainders at the end."""
        steps = self.horizon * self._growth**self.horizon * (1 + 4 * self.horizon * _UNIT)
        if self._rate < 1:
            steps = min(steps, 1.01 / (1 - self._rate))
        return self._start * steps

    def later(self, size: float) -> float:
        """At most what all steps after the horizon earn or cost, with rewards of this size."""
        if not self.endless:
            return 0.0
        if not self._rate < 1:
            raise ProblemError(
                f"The discount {self.discount} is too near to one for probabilities that sum to "
                f"{self._rate / self.discount:.12g}."
            )
        rest = self._rate**self.horizon * (1 + 8 * self.horizon * _UNIT)
        return 1.01 * self._start * rest / (1 - self._rate) * size

    def value_error(self, size: float) -> float:
        """At most how far `best_value` is off for rewards of at most this size."""
        back, _ = self._terms
        error = 0.0
        most = float(np.abs(self.final).max())
        for _ in range(self.horizon):
            # Far more than the rounding of this sum, and little even over long horizons.
            most = (1 + 1e-9) * (self._growth * most + size)
            # A sum of products of n terms is off by at most n units of the sum of the sizes.
            error = self._growth * error + 1.01 * (back + 3) * _UNIT * most
        return 1.01 * (error + (self.states + 2) * _UNIT * most) + 1e-290

    @property
    def relative_visit_error(self) -> float:
        """At most how far visits, computed from a policy, are off, entry by entry, in proportion.

        Nothing is ever subtracted in a pass forth, so relative errors add up.
        """
        _, forth = self._terms
        return 1.01 * (self.horizon * (forth + 2 * self.actions + 6) + self.states + 4) * _UNIT


def _product(matrix) -> Any:
    """The matrix in the form whose products are fastest."""
    if matrix.nnz > _DENSE * matrix.shape[0] * matrix.shape[1]:
        return np.ascontiguousarray(matrix.toarray())
    return matrix.tocsr()


def _steps(transitions, horizon: int) -> list[list[Matrix]]:
    """Matrices by step and action; one step if all are the same."""
    if isinstance(transitions, Sequence) and any(map(_holds_sparse, transitions)):
        over_time = not any(map(sp.issparse, transitions))
        steps = list(transitions) if over_time else [transitions]
        made = [
            [_sparse(m, f"transitions[{f'{t}, ' if over_time else ''}{a}]")
             for a, m in enumerate(step)]
            for t, step in enumerate(steps)
        ]  # fmt: skip
    else:
        array = numbers("transitions", transitions)
        if array.ndim not in (3, 4) or array.shape[-1] != array.shape[-2]:
            raise ProblemError(
                f"transitions have shape {array.shape}; it must be (actions, states, states) or "
                "(horizon, actions, states, states)."
            )
        over_time = array.ndim == 4
        made: list[list[Matrix]] = [
            [sp.csr_array(m) for m in step] for step in (array if over_time else array[None])
        ]
    if over_time and len(made) != horizon:
        raise ProblemError(f"transitions are for {len(made)} steps, but the horizon is {horizon}.")
    if not made or not made[0]:
        raise ProblemError("transitions are empty.")
    shape: tuple[int, ...] = made[0][0].shape
    for t, step in enumerate(made):
        if len(step) != len(made[0]):
            raise ProblemError(f"transitions[{t}] has {len(step)} actions, not {len(made[0])}.")
        for a, matrix in enumerate(step):
            if matrix.shape != shape or shape[0] != shape[1]:
                raise ProblemError(
                    f"transitions[{f'{t}, ' if over_time else ''}{a}] has shape {matrix.shape}; "
                    f"all must be square and as large as the first, {shape}."
                )
    return made


def _holds_sparse(item) -> bool:
    return sp.issparse(item) or (isinstance(item, Sequence) and any(map(sp.issparse, item)))


def _sparse(matrix, name: str) -> Matrix:
    if not sp.issparse(matrix):
        return sp.csr_array(numbers(name, matrix))
    made: Matrix = sp.csr_array(matrix, copy=True)
    numbers(name, made.data)
    made = made.astype(float)
    made.sum_duplicates()
    return made


def _check_rows(matrix: Matrix, name: str, states: int, ends: np.ndarray) -> None:
    negative = np.flatnonzero(matrix.data < 0)
    if len(negative):
        entry = int(negative[0])
        row = int(np.searchsorted(matrix.indptr, entry, side="right")) - 1
        raise ProblemError(
            f"{name[:-1]}, {row}, {matrix.indices[entry]}] = {matrix.data[entry]}: probabilities "
            "must not be negative."
        )
    total = np.asarray(matrix.sum(axis=1)).ravel() + ends
    wrong = np.flatnonzero(np.abs(total - 1) > _OFF_BY)
    if len(wrong):
        row = int(wrong[0])
        with_ends = " with ends" if ends[row] else ""
        raise ProblemError(f"{name[:-1]}, {row}] sums to {total[row]:.10g}{with_ends}, not to 1.")
