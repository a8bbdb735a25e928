"""Exact fits by splitting: a block stays together unless raising an upper part of it pays.

Start with one block. Put each block at its best constant; find the upper set of the block that
gains most by being raised (a minimum cut; on a total order the best suffix). If there is none, the
constant is optimal for the block; otherwise the two parts are split for good. This is exact for
every convex loss (Luss and Rosset 2014). Losses with kinks are split between two neighbouring
target values instead, halving the range of values that a block may take.
"""

from collections.abc import Callable

import numpy as np

from stagecert.applications.isotonic.certificate import Samples
from stagecert.applications.isotonic.flows import best_upper_set

# (gain, block, lower, upper) -> which nodes to raise; nodes of one block are numbered in order.
Oracle = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def by_minimum_cuts(gain, block, lower, upper) -> np.ndarray:
    """On any order. Blocks do not touch, so that one flow serves all of them."""
    return best_upper_set(gain, lower, upper)


def by_best_suffix(gain, block, lower, upper) -> np.ndarray:
    """On a total order, where each block is a run of consecutive nodes."""
    run = np.cumsum(np.concatenate([[0], block[1:] != block[:-1]]))
    first = np.flatnonzero(np.concatenate([[True], run[1:] != run[:-1]]))
    before = np.cumsum(gain) - gain
    # The best suffix starts where the sum of what comes before is least; the last such place.
    least = np.minimum.reduceat(before, first)
    place = np.where(before == least[run], np.arange(len(gain)), -1)
    begin = np.maximum.reduceat(place, first)
    last = np.append(first[1:], len(gain))
    total = np.cumsum(gain)[last - 1]
    pays = total - least > 0
    return pays[run] & (np.arange(len(gain)) >= begin[run])


def split_by_constants(samples: Samples, oracle: Oracle) -> tuple[np.ndarray, int]:
    """The fit for smooth losses, and how often the oracle was asked."""
    parts = _Parts(samples)
    rounds = 0
    # A part that was raised stays above the constant of its block, one that was not below it.
    # That matters where a loss is flat and has many best constants.
    low, high = np.full(1, -np.inf), np.full(1, np.inf)
    while len(parts.nodes):
        level = np.clip(_best_constants(samples, parts), low, high)
        z = level[parts.block[parts.member_node]]
        _, slope = samples.loss.slopes(parts.y, z)
        gain = -parts.by_node(np.nan_to_num(parts.weight * slope))
        raised = oracle(gain, parts.block, *parts.comparisons)
        rounds += 1
        # What is gained must be more than rounding, or the block would split for ever.
        gained = parts.by_block(np.where(raised, gain, 0.0))
        enough = gained > 1e-12 * parts.by_block(np.abs(gain))
        rest = parts.by_block((~raised).astype(float)) > 0
        split = enough & rest
        parts.settle_and_split(raised, split, level)
        low = np.concatenate([low[split], level[split]])
        high = np.concatenate([level[split], high[split]])
    return parts.fit, rounds


def split_by_targets(samples: Samples, oracle: Oracle) -> tuple[np.ndarray, int]:
    """The fit for losses that are linear between neighbouring targets."""
    values, place = np.unique(samples.y, return_inverse=True)
    place = place.reshape(-1)
    parts = _Parts(samples)
    low = np.zeros(1, np.int64)
    high = np.full(1, len(values) - 1)
    rounds = 0
    while len(parts.nodes):
        # A block's best values lie between the least and the greatest target in it.
        block = parts.block[parts.member_node]
        mine = place[parts.members]
        low = np.maximum(low, _extreme(np.minimum, mine, block, parts.blocks, low))
        high = np.minimum(high, _extreme(np.maximum, mine, block, parts.blocks, high))
        middle = (low + high) // 2
        _, slope = samples.loss.slopes(parts.y, values[middle][block])
        gain = -parts.by_node(parts.weight * slope)
        raised = oracle(gain, parts.block, *parts.comparisons)
        rounds += 1
        # One value left: nothing to split. Otherwise each part keeps its half of the range.
        open_range = low < high
        some = parts.by_block(raised.astype(float)) > 0
        rest = parts.by_block((~raised).astype(float)) > 0
        upper_only, lower_only = open_range & some & ~rest, open_range & ~some
        new_low = np.where(upper_only, middle + 1, low)
        new_high = np.where(lower_only, middle, high)
        split = open_range & some & rest
        kept = parts.settle_and_split(
            raised, split, values[low], still_open=upper_only | lower_only
        )
        lows, highs = np.where(split, low, new_low), np.where(split, middle, new_high)
        low = np.concatenate([lows[kept], (middle + 1)[split]])
        high = np.concatenate([highs[kept], high[split]])
    return parts.fit, rounds


def _extreme(best, values, block, blocks, default):
    start = np.iinfo(np.int64).max if best is np.minimum else -1
    found = np.full(blocks, start, np.int64)
    best.at(found, block, values)
    return np.where(found == start, default, found)


class _Parts:
    """The blocks that may still split: their nodes, samples and inner comparisons."""

    def __init__(self, samples: Samples):
        order = samples.order
        self.samples = samples
        self.fit = np.empty(order.count)
        self.nodes = np.arange(order.count)
        self.block = np.zeros(order.count, np.int64)
        self.blocks = 1
        self.comparisons = (order.lower, order.upper)
        self._with_samples(np.arange(len(samples.y)), samples.node)

    def _with_samples(self, members, member_node):
        self.members, self.member_node = members, member_node
        self.y, self.weight = self.samples.y[members], self.samples.weight[members]

    def by_node(self, amounts):
        return np.bincount(self.member_node, weights=amounts, minlength=len(self.nodes))

    def by_block(self, amounts):
        return np.bincount(self.block, weights=amounts, minlength=self.blocks)

    def settle_and_split(self, raised, split, level, still_open=None) -> np.ndarray:
        """Writes the fit of blocks that are done; the others go on, raised parts as new blocks.

        Returns which of the old blocks go on (as the lower part, if they were split); the raised
        parts are numbered after them, in the order of the blocks they come from.
        """
        kept = split if still_open is None else split | still_open
        done = ~kept[self.block]
        self.fit[self.nodes[done]] = level[self.block[done]]
        number = np.full(self.blocks, -1)
        number[kept] = np.arange(int(kept.sum()))
        upper_number = np.full(self.blocks, -1)
        upper_number[split] = int(kept.sum()) + np.arange(int(split.sum()))
        moves = raised & split[self.block]
        block = np.where(moves, upper_number[self.block], number[self.block])
        stay = np.flatnonzero(~done)
        renumber = np.full(len(self.nodes), -1)
        renumber[stay] = np.arange(len(stay))
        lower, upper = self.comparisons
        inside = (block[lower] == block[upper]) & ~done[lower]
        self.comparisons = (
            renumber[lower[inside]].astype(np.int32),
            renumber[upper[inside]].astype(np.int32),
        )
        alive = ~done[self.member_node]
        self._with_samples(self.members[alive], renumber[self.member_node[alive]])
        self.nodes, self.block = self.nodes[stay], block[stay]
        self.blocks = int(kept.sum() + split.sum())
        return kept


def _best_constants(samples: Samples, parts: _Parts) -> np.ndarray:
    """Where each block's loss is least as a constant."""
    block = parts.block[parts.member_node]
    if samples.loss.fits_means:
        total = np.bincount(block, weights=parts.weight * parts.y, minlength=parts.blocks)
        return total / np.bincount(block, weights=parts.weight, minlength=parts.blocks)
    low = np.full(parts.blocks, np.inf)
    high = np.full(parts.blocks, -np.inf)
    np.minimum.at(low, block, parts.y)
    np.maximum.at(high, block, parts.y)
    # Halving until neighbouring numbers: the slope of a block's loss grows with its constant.
    for _ in range(200):
        middle = 0.5 * (low + high)
        if np.all((middle <= low) | (middle >= high)):
            break
        _, slope = samples.loss.slopes(parts.y, middle[block])
        total = np.bincount(block, weights=parts.weight * slope, minlength=parts.blocks)
        low = np.where(total <= 0, middle, low)
        high = np.where(total >= 0, middle, high)
    return 0.5 * (low + high)
