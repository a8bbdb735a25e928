"""Sparse quadratic programmes by an interior-point method: for proposals, not for proofs.

Minimise 1/2 x'Qx + c'x subject to Ax = b, Gx <= h. The steps are Mehrotra's predictor and
corrector; SciPy factorises one sparse matrix for each. Nothing here has to be right: what is found
becomes a point and multipliers, which `lower_bound` judges like any others. So there is no
infeasibility to detect and no status: the best iterate is handed back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sparse
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.sparse.linalg import splu

ACCURACY = 1e-9  # relative, of residuals and gap
MOST_STEPS = 60
PATIENCE = 4  # steps without a better iterate: rounding has taken over
REGULAR = 1e-9  # added to the diagonal; refinement takes it out again
NEARLY = 0.995  # how much of the way to the boundary a step may go
LONG = 12  # rows with more entries are not multiplied out, which would fill the matrix
MOST_WORK = 3e8  # operations for a factorisation, roughly: half a second


@dataclass(frozen=True)
class Quadratic:
    """The data of a programme; matrices are sparse, in rows."""

    Q: Any
    c: np.ndarray
    A: Any
    b: np.ndarray
    G: Any
    h: np.ndarray


@dataclass(frozen=True)
class Iterate:
    """A point, its slacks h - Gx, and the multipliers of equations and inequalities."""

    x: np.ndarray
    y: np.ndarray
    s: np.ndarray
    z: np.ndarray


def minimise(given: Quadratic, over: Callable[[], bool]) -> Iterate | None:
    """The best iterate; None where factorising would take too long. `over` says when time is up."""
    programme, columns, rows, cost = _balanced(given)
    method = _Method(programme)
    if method.work() > MOST_WORK:
        return None
    best, least, since = None, np.inf, 0
    at = method.start()
    for _ in range(MOST_STEPS):
        residuals = method.residuals(at)
        error = residuals.error
        if error < least:
            best, least, since = at, error, 0
        since += 1
        if not np.isfinite(error) or error < ACCURACY or since > PATIENCE or over():
            break
        try:
            at = method.step(at, residuals)
        except RuntimeError:  # no pivot is left: rounding has taken over
            break
    if best is None:
        return None
    # In the units of the programme as it was given.
    equal, below = np.split(rows, [len(given.b)])
    return Iterate(columns * best.x, equal * best.y / cost, best.s / below, below * best.z / cost)


def _balanced(given: Quadratic) -> tuple[Quadratic, Any, Any, float]:
    """Rows and columns whose largest entries are about one: (programme, columns, rows, cost)."""
    n, p = len(given.c), len(given.b)
    everything: Any = sparse.csr_array(sparse.vstack([given.A, given.G]))
    columns, rows = np.ones(n), np.ones(everything.shape[0])
    for _ in range(4):
        row, column = (_largest(everything, axis) for axis in (1, 0))
        row, column = (1 / np.sqrt(np.where(m > 0, m, 1)) for m in (row, column))
        everything = sparse.csr_array(sparse.diags_array(row) @ everything)
        everything = sparse.csr_array(everything @ sparse.diags_array(column))
        rows, columns = rows * row, columns * column
    scale = sparse.diags_array(columns)
    Q, c = sparse.csr_array(scale @ given.Q @ scale), columns * given.c
    cost = 1 / max(np.abs(c).max(initial=0), abs(Q).max() if Q.nnz else 0, 1e-300)
    return (
        Quadratic(cost * Q, cost * c, everything[:p], rows[:p] * given.b, everything[p:],
                  rows[p:] * given.h),
        columns, rows, cost,
    )  # fmt: skip


def _largest(matrix: Any, axis: int) -> np.ndarray:
    if 0 in matrix.shape:
        return np.zeros(matrix.shape[1 - axis])
    return abs(matrix).max(axis=axis).toarray().ravel()


@dataclass(frozen=True)
class _Residuals:
    dual: np.ndarray
    equal: np.ndarray
    below: np.ndarray
    gap: float
    error: float


class _Method:
    def __init__(self, programme: Quadratic):
        self.p = programme
        self.n = len(programme.c)
        self.of_A, self.of_G = (sparse.csr_array(m.T) for m in (programme.A, programme.G))
        lengths = np.diff(programme.G.indptr)
        self.long = lengths > LONG
        self.short = programme.G[~self.long]
        self.kept = sparse.csr_array(sparse.vstack([programme.A, programme.G[self.long]]))
        self.of_short, self.of_kept = (sparse.csr_array(m.T) for m in (self.short, self.kept))

    def work(self) -> float:
        """Operations of a factorisation, roughly: those of a band, and of the columns beside it."""
        matrix: Any = self._matrix(np.ones(len(self.p.h)))
        size = matrix.shape[0]
        full = np.diff(matrix.indptr) > 16 + 2 * np.sqrt(size)
        inner = matrix.tocsr()[~full][:, ~full]
        order = reverse_cuthill_mckee(inner, symmetric_mode=True)
        place = np.empty(len(order), int)
        place[order] = np.arange(len(order))
        entries = inner.tocoo()
        apart = np.abs(place[entries.row] - place[entries.col])
        return size * float(apart.max(initial=0) + full.sum()) ** 2

    def start(self) -> Iterate:
        """The least-squares point, with slacks and multipliers made positive."""
        p = self.p
        solve = self._factorised(np.ones(len(p.h)))
        x, y = solve(self.of_G @ p.h - p.c, p.b)
        s = p.h - p.G @ x
        z = -s
        return Iterate(x, y, *(v + max(0.0, 1.0 - v.min(initial=1.0)) for v in (s, z)))

    def residuals(self, at: Iterate) -> _Residuals:
        p = self.p
        bent = p.Q @ at.x
        dual = bent + p.c + self.of_A @ at.y + self.of_G @ at.z
        equal, below = p.A @ at.x - p.b, p.G @ at.x + at.s - p.h
        gap = float(at.s @ at.z)
        value = p.c @ at.x + 0.5 * (at.x @ bent)
        largest = max(np.abs(p.b).max(initial=0), np.abs(p.h).max(initial=0))
        missed = max(np.abs(equal).max(initial=0), np.abs(below).max(initial=0))
        error = max(np.abs(dual).max(), missed / (1 + largest), gap / (1e-3 + abs(value)))
        return _Residuals(dual, equal, below, gap, float(error))

    def step(self, at: Iterate, r: _Residuals) -> Iterate:
        """One predictor and corrector."""
        p, count = self.p, len(self.p.h)
        solve = self._factorised(at.z / at.s)

        def towards(complementarity):
            # s dz + z ds = -complementarity, with ds = -below - G dx.
            right = self.of_G @ ((at.z * r.below - complementarity) / at.s)
            dx, dy = solve(-r.dual - right, -r.equal)
            ds = -r.below - p.G @ dx
            return dx, dy, ds, (-complementarity - at.z * ds) / at.s

        _, _, ds, dz = towards(at.s * at.z)
        after = (at.s + _share(at.s, ds) * ds) @ (at.z + _share(at.z, dz) * dz)
        centring = (after / r.gap) ** 3 * r.gap / count
        dx, dy, ds, dz = towards(at.s * at.z + ds * dz - centring)
        primal, dual = (min(1.0, NEARLY * _share(*v)) for v in ((at.s, ds), (at.z, dz)))
        if p.Q.nnz:  # both residuals know of x then
            primal = dual = min(primal, dual)
        return Iterate(
            at.x + primal * dx, at.y + dual * dy, at.s + primal * ds, at.z + dual * dz
        )  # fmt: skip

    def _matrix(self, weights):
        """The quasidefinite matrix: short inequalities multiplied out, long ones as rows."""
        short = self.of_short @ (sparse.diags_array(weights[~self.long]) @ self.short)
        corner = self.p.Q + short + REGULAR * sparse.eye_array(self.n)
        last = np.concatenate([np.full(len(self.p.b), REGULAR), 1 / weights[self.long] + REGULAR])
        return sparse.block_array(
            [[corner, self.of_kept], [self.kept, -sparse.diags_array(last)]], format="csc"
        )

    def _factorised(self, weights) -> Callable:
        """Solves (Q + G'WG) x + A'y = first, A x = second, to what refinement makes of it."""
        factors = splu(
            self._matrix(weights), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )  # fmt: skip
        of_long = np.flatnonzero(self.long)
        rows = len(self.p.b)

        def product(v):
            x, y, long = np.split(v, [self.n, self.n + rows])
            first = self.p.Q @ x + self.of_short @ (weights[~self.long] * (self.short @ x))
            rest = self.kept @ x
            rest[rows:] -= long / weights[of_long]
            return np.concatenate([first + self.of_kept @ np.concatenate([y, long]), rest])

        def solve(first, second):
            right = np.concatenate([first, second, np.zeros(len(of_long))])
            found = factors.solve(right)
            for _ in range(2):
                found = found + factors.solve(right - product(found))
            return found[: self.n], found[self.n : self.n + rows]

        return solve


def _share(v, dv) -> float:
    """How far v + share dv stays positive; 1 at most."""
    falling = dv < 0
    return min(1.0, float(np.min(-v[falling] / dv[falling], initial=1.0)))
