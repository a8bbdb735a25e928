"""Weights of several rows against linear programs, and in exact arithmetic."""

from fractions import Fraction

import numpy as np
from scipy.optimize import linprog

from stagecert.verify.mixing import mix


def problems(count, rows, entries, seed):
    draw = np.random.default_rng(seed)
    lower = draw.normal(size=(count, entries))
    upper = lower + draw.random((count, entries))
    c = draw.normal(size=(count, rows, entries))
    at = np.where(c > 0, lower[:, None], upper[:, None])
    gaps = -draw.random((count, rows)) * 1.5
    return c, at, gaps, lower, upper


def least(c, at, gaps, lower, upper):
    """The smallest t such that some point of the box has all rows at most t."""
    rows, entries = c.shape
    left = np.c_[c, -np.ones(rows)]
    right = np.einsum("rn,rn->r", c, at) - gaps
    bounds = [*zip(lower, upper, strict=True), (None, None)]
    return linprog(np.r_[np.zeros(entries), 1.0], A_ub=left, b_ub=right, bounds=bounds).fun


def test_refutes_only_what_has_no_point_and_most_of_that():
    c, at, gaps, lower, upper = problems(200, 3, 4, 0)
    used = np.ones(gaps.shape, bool)
    found = mix(c, at, gaps, np.abs(gaps), used, lower, upper)
    truth = np.array([least(*one) for one in zip(c, at, gaps, lower, upper, strict=True)])
    refuted = found.bound > 0
    assert np.all(truth[refuted] > 0)
    clear = truth > 0.1
    assert clear.sum() > 20
    assert refuted[clear].mean() > 0.9
    # No single row refutes anything here.
    assert np.all(gaps < 0)


def test_bounds_hold_in_exact_arithmetic():
    c, at, gaps, lower, upper = problems(20, 3, 5, 1)
    found = mix(c, at, gaps, np.abs(gaps), np.ones(gaps.shape, bool), lower, upper)
    for k in range(20):
        weights = [Fraction(w) for w in found.weights[k]]
        total = sum(w * Fraction(g) for w, g in zip(weights, gaps[k], strict=True))
        for i in range(5):
            slope = sum(w * Fraction(c[k, r, i]) for r, w in enumerate(weights))
            ends = slope * Fraction(lower[k, i]), slope * Fraction(upper[k, i])
            own = sum(w * Fraction(c[k, r, i]) * Fraction(at[k, r, i])
                      for r, w in enumerate(weights))  # fmt: skip
            total += min(ends) - own
        assert Fraction(found.bound[k]) <= total


def test_rows_that_say_nothing_are_left_out():
    c, at, gaps, lower, upper = problems(3, 2, 2, 2)
    gaps[0, 0], c[1, 1, 0] = -np.inf, np.nan
    used = np.array([[True, True], [True, True], [False, False]])
    found = mix(c, at, gaps, np.abs(gaps), used, lower, upper)
    assert found.weights[0, 0] == 0
    assert found.weights[1, 1] == 0
    assert not np.any(found.bound > 0)
