"""Passes over an order as loops: topological numbering, running maxima, means over blocks.

Nodes are numbered so that edges go from lower to higher numbers, and edges are sorted by their
upper end: `lower[start[i] : start[i + 1]]` are the nodes directly below node i.

Numba compiles them where it is installed; otherwise they are plain Python.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import numba
except ImportError:
    numba = None

COMPILED = numba is not None


def compiled(function: Callable) -> Any:
    """The function, compiled at its first call if it can be; later processes find it in a cache."""
    return function if numba is None else numba.njit(cache=True)(function)


@compiled
def topological_order(count, heads, start):
    """Nodes in an order that no edge contradicts, and how many could be placed (Kahn's algorithm).

    `heads[start[i] : start[i + 1]]` are the nodes directly above node i.
    """
    below = np.zeros(count, np.int64)
    for e in range(len(heads)):
        below[heads[e]] += 1
    order = np.empty(count, np.int64)
    placed = 0
    for i in range(count):
        if below[i] == 0:
            order[placed] = i
            placed += 1
    done = 0
    while done < placed:
        i = order[done]
        done += 1
        for e in range(start[i], start[i + 1]):
            j = heads[e]
            below[j] -= 1
            if below[j] == 0:
                order[placed] = j
                placed += 1
    return order, placed


@compiled
def running_maximum(values, lower, start):
    """The smallest isotonic vector that is nowhere below `values`."""
    raised = values.copy()
    for i in range(len(values)):
        most = raised[i]
        for e in range(start[i], start[i + 1]):
            most = max(most, raised[lower[e]])
        raised[i] = most
    return raised


@compiled
def running_minimum(values, lower, start):
    """The largest isotonic vector that is nowhere above `values`."""
    lowered = values.copy()
    for i in range(len(values) - 1, -1, -1):
        least = lowered[i]
        for e in range(start[i], start[i + 1]):
            j = lower[e]
            lowered[j] = min(lowered[j], least)
    return lowered


@compiled
def _root(parent, i):
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@compiled
def block_means(y, weight, multipliers, threshold, lower, upper, merges):
    """Means over the blocks that multipliers above a threshold join, and how many are out of order.

    Neighbouring blocks in the wrong order are merged, at most `merges` times.
    """
    count, edges = len(y), len(lower)
    parent = np.arange(count)
    for e in range(edges):
        if multipliers[e] > threshold:
            parent[_root(parent, upper[e])] = _root(parent, lower[e])
    total = np.empty(count)
    mass = np.empty(count)
    means = np.empty(count)
    wrong = 0
    for attempt in range(merges + 1):
        total[:] = 0.0
        mass[:] = 0.0
        for i in range(count):
            root = _root(parent, i)
            parent[i] = root
            total[root] += weight[i] * y[i]
            mass[root] += weight[i]
        for i in range(count):
            root = parent[i]
            means[i] = total[root] / mass[root]
        wrong = 0
        for e in range(edges):
            if means[lower[e]] > means[upper[e]]:
                wrong += 1
                if attempt < merges:
                    parent[_root(parent, upper[e])] = _root(parent, lower[e])
        if wrong == 0:
            break
    return means, wrong


@compiled
def ascend(y, inverse, ends, step, point, momentum, count):
    """Accelerated ascent of the edge dual of sum_i (z_i - y_i)^2 / (2 inverse_i).

    `ends` are the (lower, upper) nodes of the edges, `point` the multipliers and the extrapolated
    ones ahead of them. These change in place; the momentum is returned. One
    pass over the edges an iteration: the pass that moves the multipliers also collects the net
    outflow of every node for the next one.
    """
    lower, upper = ends
    multipliers, ahead = point
    nodes, edges = len(y), len(lower)
    fit = np.empty(nodes)
    outflow = np.zeros(nodes)
    for e in range(edges):
        outflow[lower[e]] += ahead[e]
        outflow[upper[e]] -= ahead[e]
    for _ in range(count):
        for i in range(nodes):
            fit[i] = y[i] - inverse[i] * outflow[i]
            outflow[i] = 0.0
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum * momentum))
        weight = (momentum - 1.0) / following
        uphill = 0.0
        for e in range(edges):
            i, j = upper[e], lower[e]
            point = ahead[e]
            new = max(0.0, point + step[e] * (fit[j] - fit[i]))
            change = new - multipliers[e]
            uphill += (new - point) * change
            moved = new + weight * change
            multipliers[e] = new
            ahead[e] = moved
            outflow[j] += moved
            outflow[i] -= moved
        # The step went against the momentum: start it again (O'Donoghue and Candes 2015).
        momentum = 1.0 if uphill < 0.0 else following
    return momentum


@compiled
def path_cover(count, lower, upper, from_last):
    """Disjoint paths through all nodes: the comparison to the next node of each, -1 at the ends.

    Takes comparisons as they come (or from the last one) if both ends are still free. Also returns
    which nodes start a path.
    """
    edges = len(lower)
    following = np.full(count, -1, np.int64)
    starts = np.ones(count, np.bool_)
    for k in range(edges):
        e = edges - 1 - k if from_last else k
        if following[lower[e]] < 0 and starts[upper[e]]:
            following[lower[e]] = e
            starts[upper[e]] = False
    return following, starts


@compiled
def pool_paths(y, weight, upper, following, starts, multipliers):
    """Sets the multipliers on paths to the best ones: pools adjacent violators on each path."""
    count = len(y)
    node = np.empty(count, np.int64)
    first = np.empty(count + 1, np.int64)
    total = np.empty(count)
    mass = np.empty(count)
    for start in range(count):
        if not starts[start] or following[start] < 0:
            continue
        length, blocks = 0, 0
        i = start
        while True:
            node[length] = i
            total[blocks], mass[blocks], first[blocks] = weight[i] * y[i], weight[i], length
            blocks += 1
            length += 1
            while blocks > 1 and total[blocks - 2] * mass[blocks - 1] >= (
                total[blocks - 1] * mass[blocks - 2]
            ):
                total[blocks - 2] += total[blocks - 1]
                mass[blocks - 2] += mass[blocks - 1]
                blocks -= 1
            if following[i] < 0:
                break
            i = upper[following[i]]
        first[blocks] = length
        for block in range(blocks):
            mean = total[block] / mass[block]
            passed = 0.0
            for place in range(first[block], first[block + 1]):
                i = node[place]
                passed += weight[i] * (y[i] - mean)
                if following[i] >= 0:
                    within = place + 1 < first[block + 1]
                    multipliers[following[i]] = max(passed, 0.0) if within else 0.0
