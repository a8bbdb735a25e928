"""The sweeps without a compiler: whole arrays at a time, by NumPy and SciPy."""

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components


def ascend(y, inverse, lower, upper, step, multipliers, ahead, momentum, count):
    """As `sweeps.ascend`."""
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


def joined_blocks(multipliers, threshold, lower, start):
    """As `sweeps.joined_blocks`, with other numbers."""
    count = len(start) - 1
    joins = multipliers > threshold
    upper = np.repeat(np.arange(count), np.diff(start))[joins]
    graph = sp.csr_array(
        (np.ones(len(upper), np.int8), (lower[joins], upper)), shape=(count, count)
    )
    blocks, block = connected_components(graph, directed=False)
    return block, blocks


def running_maximum(values, lower, start):
    """As `sweeps.running_maximum`. Lists, because single entries of arrays are slow to reach."""
    raised, below, begin = values.tolist(), lower.tolist(), start.tolist()
    for i in range(len(raised)):
        first, last = begin[i], begin[i + 1]
        if first < last:
            raised[i] = max(raised[i], *(raised[j] for j in below[first:last]))
    return np.array(raised)


def running_minimum(values, lower, start):
    """As `sweeps.running_minimum`."""
    lowered, below, begin = values.tolist(), lower.tolist(), start.tolist()
    for i in range(len(lowered) - 1, -1, -1):
        least = lowered[i]
        for j in below[begin[i] : begin[i + 1]]:
            if lowered[j] > least:
                lowered[j] = least
    return np.array(lowered)
