"""Total orders: fits in almost linear time, multipliers in closed form."""

import numpy as np
from scipy.optimize import isotonic_regression

from stagecert.applications.isotonic.certificate import Samples, lower_bound
from stagecert.applications.isotonic.partition import (
    by_best_suffix,
    split_by_constants,
    split_by_targets,
)
from stagecert.applications.isotonic.result import Search, Tolerance


def solve_chain(samples: Samples, tolerance: Tolerance) -> Search:
    """Pool-adjacent-violators for losses that fit means; splitting at suffixes for the others."""
    rounds = 1
    if samples.loss.fits_means:
        fit = _pooled(samples)
    elif samples.loss.kinked:
        fit, rounds = split_by_targets(samples, by_best_suffix)
    else:
        fit, rounds = split_by_constants(samples, by_best_suffix)
    fit = np.maximum.accumulate(fit)  # equal up to rounding may be in the wrong order
    multipliers = _chain_multipliers(samples, fit)
    clipped = samples.clipped(fit)
    search = Search.nothing("pava").better(
        (clipped, multipliers, samples.value(clipped), lower_bound(samples, multipliers, clipped)),
        rounds,
    )
    return search.ended(tolerance, rounds)


def _pooled(samples: Samples) -> np.ndarray:
    weighted = np.flatnonzero(samples.node_weight > 0)
    pooled = isotonic_regression(
        samples.node_mean[weighted], weights=samples.node_weight[weighted]
    ).x
    # Nodes without samples take the value of the one below them.
    below = np.searchsorted(weighted, np.arange(samples.order.count), side="right") - 1
    return pooled[np.maximum(below, 0)]


def _chain_multipliers(samples: Samples, fit: np.ndarray) -> np.ndarray:
    """What passes from each node to the next one when every run of equal values is in balance.

    With slopes between `left` and `right`, as much is passed on as the nodes so far can give
    (minus their left slopes) and the nodes to come can take (their right slopes).
    """
    left, right = samples.loss.slopes(samples.y, fit[samples.node])
    left, right = (
        samples.by_node(np.nan_to_num(samples.weight * slope)) for slope in (left, right)
    )
    starts = np.concatenate([[True], fit[1:] != fit[:-1]])
    run = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(fit)) - 1
    given, taken = np.cumsum(-left), np.cumsum(right)
    can_give = given - (given - (-left))[first][run]
    can_take = taken[last][run] - taken
    inside = run[1:] == run[:-1]
    return np.where(inside, np.maximum(np.minimum(can_give, can_take), 0.0)[:-1], 0.0)
