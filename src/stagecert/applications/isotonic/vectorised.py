"""The sweeps without a compiler: whole arrays at a time, by NumPy and SciPy."""

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components


def ascend(y, inverse, ends, step, point, momentum, count):
    """As `loops.ascend`."""
    lower, upper = ends
    multipliers, ahead = point
    edges = len(lower)
    # One row for each comparison, 1 at its lower end and -1 at its upper end.
    differences = sp.csr_array(
        (
            np.tile([1.0, -1.0], edges),
            np.stack([lower, upper], axis=1).ravel(),
            np.arange(0, 2 * edges + 1, 2, dtype=np.int32),
        ),
        shape=(edges, len(y)),
    )
    gather = differences.T
    for _ in range(count):
        fit = y - inverse * (gather @ ahead)
        new = np.maximum(ahead + step * (differences @ fit), 0.0)
        change = new - multipliers
        # Not a dot product, which would wake the threads of the linear algebra library.
        uphill = np.sum((new - ahead) * change)
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
    raised = values.tolist()
    upper = np.repeat(np.arange(len(values)), np.diff(start))
    for j, i in zip(lower.tolist(), upper.tolist(), strict=True):
        if raised[j] > raised[i]:
            raised[i] = raised[j]
    return np.array(raised)


def running_minimum(values, lower, start):
    """As `loops.running_minimum`."""
    lowered = values.tolist()
    upper = np.repeat(np.arange(len(values)), np.diff(start))
    for j, i in zip(lower[::-1].tolist(), upper[::-1].tolist(), strict=True):
        if lowered[j] > lowered[i]:
            lowered[j] = lowered[i]
    return np.array(lowered)
