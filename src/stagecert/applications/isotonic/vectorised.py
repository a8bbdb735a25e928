"""The sweeps without a compiler: whole arrays at a time, by NumPy and SciPy."""

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components


def ascend(y, inverse, lower, upper, step, multipliers, ahead, momentum, count):
    """As `loops.ascend`."""
    edges = np.arange(len(lower))
    ones = np.ones(len(lower))
    differences = sp.csr_array(
        (
            np.concatenate([ones, -ones]),
            (np.concatenate([edges, edges]), np.concatenate([lower, upper])),
        ),
        shape=(len(lower), len(y)),
    )
    gather = differences.T.tocsr()
    for _ in range(count):
        fit = y - inverse * (gather @ ahead)
        new = np.maximum(ahead + step * (differences @ fit), 0.0)
        change = new - multipliers
        uphill = (new - ahead) @ change
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum * momentum))
        ahead[:] = new + ((momentum - 1.0) / following) * change
        multipliers[:] = new
        momentum = 1.0 if uphill < 0.0 else following
    return momentum


def block_means(y, weight, multipliers, threshold, lower, upper, merges):
    """As `loops.block_means`."""
    joins = multipliers > threshold
    for attempt in range(merges + 1):
        graph = sp.csr_array(
            (np.ones(int(joins.sum()), np.int8), (lower[joins], upper[joins])),
            shape=(len(y), len(y)),
        )
        blocks, block = connected_components(graph, directed=False)
        means = np.bincount(block, weights=weight * y, minlength=blocks)
        means = (means / np.bincount(block, weights=weight, minlength=blocks))[block]
        wrong = means[lower] > means[upper]
        if attempt == merges or not wrong.any():
            break
        joins |= wrong
    return means, int(wrong.sum())


def running_maximum(values, lower, start):
    """As `loops.running_maximum`. Lists, because single entries of arrays are slow to reach."""
    raised, below, begin = values.tolist(), lower.tolist(), start.tolist()
    for i in range(len(raised)):
        first, last = begin[i], begin[i + 1]
        if first < last:
            raised[i] = max(raised[i], *(raised[j] for j in below[first:last]))
    return np.array(raised)


def running_minimum(values, lower, start):
    """As `loops.running_minimum`."""
    lowered, below, begin = values.tolist(), lower.tolist(), start.tolist()
    for i in range(len(lowered) - 1, -1, -1):
        least = lowered[i]
        for j in below[begin[i] : begin[i + 1]]:
            if lowered[j] > least:
                lowered[j] = least
    return np.array(lowered)
