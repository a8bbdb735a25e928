"""Several rows that no point satisfies together, though each of them can be satisfied alone.

On a box, every row r is at least c_r . (x - x_r) + bound_r, a linear function that is smallest at
x_r. A point of a case has row_r <= limit_r for all its rows. So the case is refuted where, for some
weights that are not negative, the weighted sum of c_r . (x - x_r) + bound_r - limit_r is positive
on the whole box. The best weights solve a small linear program; a few steps of a multiplicative
update come close enough, and whatever they find is a proof once rounding is accounted for.

That is what the core does with side constraints and no objective. It stays by hand because a search
through boxes asks for it by the thousand: on 256 random problems of 4 rows in 5 inputs, of which 88
can be refuted, `solve_batch` refutes all 88 in 146 ms of processor time after compiling, this 86 in
3.4 ms without; and splitting decides what is left.
"""

from dataclasses import dataclass

import numpy as np

STEPS = 40


@dataclass(frozen=True)
class Mix:
    """Weights of the rows (problems, rows), and a rigorous lower bound on the weighted sum."""

    weights: np.ndarray
    bound: np.ndarray


def mix(coefficients, minimisers, gaps, sizes, used, lower, upper) -> Mix:
    """Good weights for each problem.

    Args:
        coefficients: (problems, rows, entries), c_r.
        minimisers: of the same shape, x_r.
        gaps: (problems, rows), bound_r - limit_r.
        sizes: (problems, rows), |bound_r| + |limit_r|, which says how much the gaps are rounded.
        used: (problems, rows), which rows there are.
        lower, upper: (problems, entries), the boxes.
    """
    used = used & np.isfinite(gaps) & np.all(np.isfinite(coefficients), axis=2)
    c = np.where(used[..., None], coefficients, 0.0)
    gaps, sizes = np.where(used, gaps, 0.0), np.where(used, sizes, 0.0)
    at_own = np.einsum("prn,prn->pr", c, minimisers)
    reach = np.maximum(np.abs(lower), np.abs(upper))
    magnitude = 2 * np.einsum("prn,pn->pr", np.abs(c), reach) + sizes
    slip = 4 * (c.shape[1] + c.shape[2] + 16) * np.finfo(float).eps
    # Rows are compared in units of how much they vary over the box.
    unit = np.abs(gaps) + np.einsum("prn,pn->pr", np.abs(c), upper - lower) + 1e-300
    # Without any rows all is zero, which refutes nothing.
    used = used | ~used.any(axis=1, keepdims=True)
    log = np.where(used, 0.0, -np.inf)
    best = Mix(np.zeros(gaps.shape), np.full(len(gaps), -np.inf))
    for step in range(STEPS):
        share = np.exp(log - log.max(axis=1, keepdims=True)) / unit
        weights = share / np.sum(share, axis=1, keepdims=True)
        total = np.einsum("pr,prn->pn", weights, c)
        point = np.where(total > 0, lower, upper)
        values = np.einsum("prn,pn->pr", c, point) - at_own + gaps
        bound = np.sum(weights * values, axis=1)
        bound = bound - slip * np.sum(weights * magnitude, axis=1)
        better = bound > best.bound
        best = Mix(
            np.where(better[:, None], weights, best.weights),
            np.where(better, bound, best.bound),
        )
        log = np.where(used, log + 2.0 / np.sqrt(1 + step) * values / unit, -np.inf)
    return best
