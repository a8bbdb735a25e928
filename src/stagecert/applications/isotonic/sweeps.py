"""Passes over an order: topological numbering, running maxima, blocks of equal values.

Nodes are numbered so that edges go from lower to higher numbers, and edges are sorted by their
upper end: `lower[start[i] : start[i + 1]]` are the nodes directly below node i.
"""

import numpy as np

from stagecert.applications.isotonic.compiling import compiled


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
def joined_blocks(multipliers, threshold, lower, start):
    """Numbers 0, 1, ... of the components joined by edges whose multiplier exceeds a threshold."""
    count = len(start) - 1
    parent = np.arange(count)
    for i in range(count):
        for e in range(start[i], start[i + 1]):
            if multipliers[e] > threshold:
                a, b = lower[e], i
                while parent[a] != a:
                    parent[a] = parent[parent[a]]
                    a = parent[a]
                while parent[b] != b:
                    parent[b] = parent[parent[b]]
                    b = parent[b]
                # The smaller number is the root, so that roots come before their members below.
                if a < b:
                    parent[b] = a
                else:
                    parent[a] = b
    block = np.empty(count, np.int64)
    blocks = 0
    for i in range(count):
        root = i
        while parent[root] != root:
            root = parent[root]
        if root == i:
            block[i] = blocks
            blocks += 1
        else:
            block[i] = block[root]
    return block, blocks


@compiled
def ascend(y, inverse, lower, upper, step, multipliers, ahead, momentum, count):
    """Accelerated ascent of the edge dual of sum_i (z_i - y_i)^2 / (2 inverse_i).

    Changes `multipliers` and the extrapolated point `ahead` in place; returns the momentum. One
    pass over the edges an iteration: the pass that moves the multipliers also collects the net
    outflow of every node for the next one.
    """
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
