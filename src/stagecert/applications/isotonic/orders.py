"""Partial orders as sparse graphs: from a list of comparisons, or from coordinates."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from stagecert.applications.isotonic.covers import (
    cover_relations,
    monotone_numbering,
    plane_relations,
)
from stagecert.applications.isotonic.loops import topological_order
from stagecert.errors import ProblemError

# Removing shortcuts multiplies the matrix of comparisons by itself; beyond this many operations
# the work is not worth what it saves.
_SHORTCUT_WORK = 200_000_000


@dataclass(frozen=True)
class Order:
    """Nodes 0, ..., count - 1 with comparisons fit[lower[e]] <= fit[upper[e]].

    Numbers agree with the order (lower[e] < upper[e]); comparisons are sorted by their upper end,
    and those of node i are start[i] : start[i + 1]. Make one by `chain`, `from_comparisons` or
    `coordinatewise`.
    """

    count: int
    lower: np.ndarray
    upper: np.ndarray
    start: np.ndarray

    @cached_property
    def is_chain(self) -> bool:
        """Whether any two nodes are comparable through their neighbours: a total order."""
        return len(self.lower) == self.count - 1 and bool(
            np.array_equal(self.upper, np.arange(1, self.count))
            and np.array_equal(self.lower, np.arange(self.count - 1))
        )


def _sorted_order(count: int, lower: np.ndarray, upper: np.ndarray) -> Order:
    below = sp.csr_array((np.ones(len(lower), np.int8), (upper, lower)), shape=(count, count))
    below.sort_indices()
    start = below.indptr.astype(np.int64)
    # Half the memory traffic of 64-bit numbers; orders of 2^31 nodes do not fit in memory.
    sorted_upper = np.repeat(np.arange(count, dtype=np.int32), np.diff(start))
    return Order(count, below.indices.astype(np.int32), sorted_upper, start)


def chain(count: int) -> Order:
    """The total order of 0, ..., count - 1."""
    nodes = np.arange(count)
    return _sorted_order(count, nodes[:-1], nodes[1:])


def from_comparisons(comparisons, count: int) -> tuple[Order, np.ndarray]:
    """The order that a list of comparisons generates, and the number of each node in it.

    Comparisons that follow from two others are left out.

    Args:
        comparisons: pairs (i, j), an array of shape (m, 2): the fit at i is at most that at j.
        count: how many nodes there are.

    Raises:
        ProblemError: a node that does not exist, or a cycle (it is named).
    """
    pairs = _checked_pairs(comparisons, count)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]  # i <= i always holds
    above = sp.csr_array(
        (np.ones(len(pairs), np.int32), (pairs[:, 0], pairs[:, 1])), shape=(count, count)
    )
    above.sum_duplicates()
    above.data[:] = 1
    order, placed = topological_order(count, above.indices, above.indptr)
    if placed < count:
        raise ProblemError(_cycle_message(above, order[:placed]))
    above = _without_shortcuts(above)
    number = np.empty(count, np.int64)
    number[order] = np.arange(count)
    ends = above.tocoo()
    return _sorted_order(count, number[ends.row], number[ends.col]), number


def _checked_pairs(comparisons, count: int) -> np.ndarray:
    pairs = np.asarray(comparisons)
    if pairs.size == 0:
        pairs = np.empty((0, 2), np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ProblemError(f"The comparisons must have shape (m, 2), not {pairs.shape}.")
    if not np.issubdtype(pairs.dtype, np.integer):
        whole = np.issubdtype(pairs.dtype, np.floating) and np.all(np.isfinite(pairs))
        if not whole or np.any(pairs != np.floor(pairs)):
            raise ProblemError(f"The comparisons must be integers, not {pairs.dtype}.")
    outside = (pairs < 0) | (pairs >= count)
    if outside.any():
        row, side = np.argwhere(outside)[0]
        raise ProblemError(
            f"comparisons[{row}, {side}] = {pairs[row, side]}: nodes are 0, ..., {count - 1}."
        )
    return pairs.astype(np.int64)


def _cycle_message(above: Any, placed: np.ndarray) -> str:
    left = np.ones(above.shape[0], bool)
    left[placed] = False
    below = above.T.tocsr()
    # Every node that is left has one below it that is left too: walking down comes round.
    walk, seen = [int(np.flatnonzero(left)[0])], {}
    while walk[-1] not in seen:
        seen[walk[-1]] = len(walk) - 1
        node = walk[-1]
        under = below.indices[below.indptr[node] : below.indptr[node + 1]]
        walk.append(int(under[left[under]][0]))
    cycle = walk[seen[walk[-1]] :][::-1]
    shown = cycle if len(cycle) <= 12 else [*cycle[:10], "...", cycle[-1]]
    return f"The order has a cycle: {' <= '.join(map(str, shown))}."


def _without_shortcuts(above: Any) -> Any:
    """Leaves out the comparisons that follow from two others.

    The longest path between two nodes has no shortcuts on it, so that all can be left out at once.
    """
    outgoing = np.diff(above.indptr)
    if int(outgoing[above.indices].sum()) > _SHORTCUT_WORK:
        return above
    steps = (above @ above).multiply(above).tocoo()
    if steps.nnz == 0:
        return above
    shortcut = sp.csr_array((np.ones(steps.nnz, np.int32), (steps.row, steps.col)), above.shape)
    kept = above - shortcut
    kept.eliminate_zeros()
    return kept


def coordinatewise(points: np.ndarray) -> tuple[Order, np.ndarray]:
    """The order of points by all coordinates at once, and each point's node.

    Equal points share a node. Only comparisons between neighbours (cover relations) are kept.

    Args:
        points: array of shape (n, d).
    """
    distinct, node = np.unique(points, axis=0, return_inverse=True)
    node = node.reshape(-1)
    if distinct.shape[1] == 1:
        return chain(len(distinct)), node
    ranks = np.stack(
        [np.unique(column, return_inverse=True)[1].reshape(-1) for column in distinct.T], axis=1
    )
    permutation = monotone_numbering(ranks)
    number = np.empty(len(permutation), np.int64)
    number[permutation] = np.arange(len(permutation))
    if ranks.shape[1] == 2:
        lower, upper = plane_relations(ranks)  # `distinct` is sorted
        lower, upper = number[lower], number[upper]
    else:
        lower, upper = cover_relations(np.ascontiguousarray(ranks[permutation], np.int32))
    return _sorted_order(len(distinct), lower, upper), number[node]
