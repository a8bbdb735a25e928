"""Maximum flows on an order: which nodes to raise together, and multipliers that prove a fit.

SciPy's maximum flow takes 32-bit integers, so real numbers are scaled and rounded. Rounding may
cost a little of the fit's value, never the proof's validity: the certificate is evaluated in real
arithmetic for whatever multipliers come out.
"""

import importlib.util

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from stagecert.applications.isotonic.certificate import Samples, net_outflow

# Capacities stay below this, so that a capacity and a flow against it fit in 32 bits together.
_MOST = 2**30
# How many times what rounding left over is routed again, at a finer scale.
_REFINEMENTS = 4


def has_pymaxflow() -> bool:
    """Whether PyMaxflow is installed (GPL: never required)."""
    return importlib.util.find_spec("maxflow") is not None


def best_upper_set(gain: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The smallest set, with every node all nodes above it, whose gains add up to the most."""
    if has_pymaxflow():
        return _upper_set_pymaxflow(gain, lower, upper)
    return _upper_set_scipy(gain, lower, upper)


def _upper_set_pymaxflow(gain, lower, upper):
    import maxflow  # pyright: ignore[reportMissingImports]

    graph = maxflow.GraphFloat(len(gain), len(lower))
    nodes = graph.add_grid_nodes(len(gain))
    graph.add_grid_tedges(nodes, np.maximum(gain, 0.0), np.maximum(-gain, 0.0))
    unlimited = np.full(len(lower), 2.0 * float(np.sum(np.abs(gain))) + 1.0)
    graph.add_edges(lower, upper, unlimited, np.zeros(len(lower)))
    graph.maxflow()
    return ~graph.get_grid_segments(nodes)


def _upper_set_scipy(gain, lower, upper):
    scale = _scale(np.maximum(gain, 0.0), np.maximum(-gain, 0.0))
    supply = np.rint(gain * scale).astype(np.int32)
    count = len(gain)
    capacity = _network(count, supply, lower, upper, np.full(len(lower), _MOST, np.int32))
    flow = maximum_flow(capacity, count, count + 1).flow
    residual = (capacity - flow).tocsr()
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, count, return_predecessors=False)
    raised = np.zeros(count + 2, bool)
    raised[reached] = True
    return raised[:count]


def _scale(*amounts: np.ndarray) -> float:
    """A power of two that makes sums of amounts as large as the capacities allow.

    A power of two, so that whole numbers and halves stay exact.
    """
    # Each rounding adds at most a half.
    most = max(float(np.sum(part)) for part in amounts)
    room = _MOST - max(len(part) for part in amounts) - 1
    # Amounts so small that their scale would overflow count as zero.
    return 2.0 ** min(np.floor(np.log2(room) - np.log2(most)), 1000.0) if most > 0 else 1.0


def _network(count, supply, lower, upper, capacities, backwards=None):
    """Source `count` feeds positive supplies, sink `count + 1` takes the negative ones."""
    nodes = np.arange(count)
    gives, takes = supply > 0, supply < 0
    rows = [np.full(int(gives.sum()), count), nodes[takes], lower]
    columns = [nodes[gives], np.full(int(takes.sum()), count + 1), upper]
    values = [supply[gives], -supply[takes], capacities]
    if backwards is not None:
        rows.append(upper)
        columns.append(lower)
        values.append(backwards)
    return sp.csr_array(
        (
            np.concatenate(values).astype(np.int32),
            (np.concatenate(rows).astype(np.int32), np.concatenate(columns).astype(np.int32)),
        ),
        shape=(count + 2, count + 2),
    )


def multipliers_by_flow(samples: Samples, fit: np.ndarray) -> np.ndarray:
    """Multipliers that prove a fit optimal, where it is; nearly so where it nearly is.

    At an optimum every node's outflow is minus a slope of its loss, and only comparisons that hold
    with equality have multipliers: a flow from nodes that want to rise to nodes that want to fall.
    """
    order = samples.order
    left, right = samples.loss.slopes(samples.y, fit[samples.node])
    least, most = (
        -samples.by_node(np.nan_to_num(samples.weight * slope)) for slope in (right, left)
    )
    tight = np.flatnonzero(fit[order.lower] == fit[order.upper])
    lower, upper = order.lower[tight], order.upper[tight]
    multipliers = np.zeros(len(order.lower))
    for _ in range(_REFINEMENTS):
        outflow = net_outflow(order, multipliers)
        # The nearest outflow in the allowed range is due; the rest of the range is optional.
        due = np.clip(outflow, least, most) - outflow
        aim = outflow + due
        spare = (np.maximum(most - aim, 0.0), np.maximum(aim - least, 0.0))
        size = float(np.max(np.abs(due), initial=0.0))
        if size <= 1e-15 * float(np.max(np.abs(np.concatenate([least, most])), initial=0.0)):
            break
        routed = _routed(due, spare, lower, upper, multipliers[tight])
        multipliers[tight] = np.maximum(multipliers[tight] + routed, 0.0)
    return multipliers


def _routed(due, spare, lower, upper, present):
    """A flow that takes as much as possible from nodes where it is due to where it is owed."""
    count = len(due)
    optional = bool(np.any(spare[0] > 0) or np.any(spare[1] > 0))
    scale = _scale(np.maximum(due, 0.0), np.maximum(-due, 0.0))
    supply = np.rint(due * scale).astype(np.int64)
    backwards = np.floor(np.minimum(present * scale, _MOST - 1)).astype(np.int32)
    forwards = np.full(len(lower), _MOST, np.int32)
    edges = len(lower)
    if optional:
        # A pool takes and gives what is optional; its own balance makes the total zero.
        gives = np.flatnonzero(spare[0] * scale >= 1)
        takes = np.flatnonzero(spare[1] * scale >= 1)
        pool = np.full(len(gives) + len(takes), count, lower.dtype)
        lower = np.concatenate([lower, pool[: len(gives)], takes]).astype(np.int32)
        upper = np.concatenate([upper, gives, pool[len(gives) :]]).astype(np.int32)
        room = np.concatenate([spare[0][gives], spare[1][takes]]) * scale
        forwards = np.concatenate([forwards, np.minimum(room, _MOST).astype(np.int32)])
        backwards = np.concatenate([backwards, np.zeros(len(room), np.int32)])
        supply = np.append(supply, -int(supply.sum()))
        count += 1
    network = _network(count, supply, lower, upper, forwards, backwards)
    network.eliminate_zeros()
    flow = maximum_flow(network, count, count + 1).flow.tocsr()
    through = np.asarray(flow[lower[:edges], upper[:edges]]).reshape(-1)
    return through / scale
