"""Cover relations of points ordered by all coordinates: the neighbours from which all else follows.

Points are numbered along a Z-curve, which agrees with the order and keeps near points together. A
binary tree over that numbering holds the box around each run of points. The nodes directly below a
point are found by walking down the tree from high numbers to low ones: a box is skipped when none
of its points can be below, or when all that are below are below a neighbour found before. So the
work is close to the number of relations found.
"""

import numpy as np

from stagecert.applications.isotonic.loops import compiled
from stagecert.errors import ProblemError

# How many points a leaf of the tree has.
_LEAF = 8
# More cover relations than this do not fit in the memory of a usual machine.
MOST_RELATIONS = 100_000_000


def monotone_numbering(ranks: np.ndarray) -> np.ndarray:
    """Points sorted along a Z-curve; a point below another comes first.

    Args:
        ranks: non-negative integers, shape (n, d).
    """
    dimensions = ranks.shape[1]
    bits = max(1, int(ranks.max(initial=0)).bit_length())
    used = min(bits, 63 // dimensions)
    code = np.zeros(len(ranks), np.int64)
    for bit in range(bits - 1, bits - used - 1, -1):
        for column in ranks.T:
            code = (code << 1) | ((column >> bit) & 1)
    # Equal codes: the bits that did not fit decide, coordinate by coordinate.
    return np.lexsort((*ranks.T[::-1], code))


def cover_relations(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (i, j) where j covers i, for distinct points numbered by `monotone_numbering`."""
    count = len(points)
    lowest, highest = _tree(points)
    lower = np.empty(16 * count + 64, np.int32)
    upper = np.empty_like(lower)
    found, row = 0, 0
    while True:
        row, found = _collect(points, lowest, highest, row, found, lower, upper)
        if row == count:
            return lower[:found].astype(np.int64), upper[:found].astype(np.int64)
        lower, upper = _doubled(lower, upper, count)


def plane_relations(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (i, j) where j covers i, for distinct points of two coordinates in sorted order.

    Points enter from left to right. The latest of those no higher than the new one is covered by
    it; so is the latest of those higher than that one; and so on.
    """
    count = len(points)
    leaves = 1
    while leaves <= int(points[:, 1].max(initial=0)):
        leaves *= 2
    latest = np.full(2 * leaves, -1, np.int32)
    heights = np.ascontiguousarray(points[:, 1], np.int64)
    lower = np.empty(16 * count + 64, np.int32)
    upper = np.empty_like(lower)
    found, row = 0, 0
    while True:
        row, found = _sweep(heights, latest, row, found, lower, upper)
        if row == count:
            return lower[:found].astype(np.int64), upper[:found].astype(np.int64)
        lower, upper = _doubled(lower, upper, count)


def _doubled(lower, upper, count):
    if 2 * len(lower) > MOST_RELATIONS + 32 * count:
        raise ProblemError(
            f"The coordinatewise order of {count} points has more than {MOST_RELATIONS:,} "
            "cover relations; round the features to fewer distinct values, or order by fewer."
        )
    return tuple(np.concatenate([part, np.empty_like(part)]) for part in (lower, upper))


@compiled
def _latest_between(latest, above, upto):
    """The largest entry of a tree of maxima over leaves above + 1, ..., upto."""
    leaves = len(latest) // 2
    left, right = above + 1 + leaves, upto + 1 + leaves
    best = -1
    while left < right:
        if left & 1:
            best = max(best, latest[left])
            left += 1
        if right & 1:
            right -= 1
            best = max(best, latest[right])
        left >>= 1
        right >>= 1
    return best


@compiled
def _sweep(heights, latest, row, found, lower, upper):
    """Appends the covers of points row, row + 1, ... until all are done or the space is used up."""
    leaves = len(latest) // 2
    while row < len(heights):
        first = found
        above = -1
        while True:
            j = _latest_between(latest, above, heights[row])
            if j < 0:
                break
            if found == len(lower):
                return row, first
            lower[found] = j
            upper[found] = row
            found += 1
            above = heights[j]
        place = heights[row] + leaves
        while place > 0:
            latest[place] = row
            place >>= 1
        row += 1
    return row, found


def _tree(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Boxes of a complete binary tree over runs of points; node 1 is the root."""
    leaves = 1
    while leaves * _LEAF < len(points):
        leaves *= 2
    dimensions = points.shape[1]
    lowest = np.full((2 * leaves, dimensions), np.iinfo(np.int32).max, np.int32)
    highest = np.full((2 * leaves, dimensions), -1, np.int32)
    first = np.arange(0, len(points), _LEAF)
    lowest[leaves : leaves + len(first)] = np.minimum.reduceat(points, first, axis=0)
    highest[leaves : leaves + len(first)] = np.maximum.reduceat(points, first, axis=0)
    level = leaves
    while level > 1:
        level //= 2
        for box, best in ((lowest, np.minimum), (highest, np.maximum)):
            children = box[2 * level : 4 * level].reshape(level, 2, dimensions)
            box[level : 2 * level] = best(children[:, 0], children[:, 1])
    return lowest, highest


@compiled
def _is_below_any(corner, near, known):
    """Whether a corner is below one of the known points, which then moves to the front."""
    for e in range(known):
        below = True
        for k in range(len(corner)):
            if corner[k] > near[e, k]:
                below = False
                break
        if below:
            # The point that covers one box often covers the next one too.
            for k in range(len(corner)):
                near[e, k], near[e // 2, k] = near[e // 2, k], near[e, k]
            return True
    return False


@compiled
def _collect(points, lowest, highest, row, found, lower, upper):
    """Appends the covers of points row, row + 1, ... until all are done or the space is used up."""
    count, dimensions = points.shape
    leaves = len(lowest) // 2
    stack = np.empty(128, np.int64)
    near = np.empty((256, dimensions), np.int32)  # the coordinates of the neighbours found so far
    corner = np.empty(dimensions, np.int32)
    while row < count:
        first = found
        stack[0] = 1
        height = 1
        while height > 0:
            height -= 1
            node = stack[height]
            possible = True
            for k in range(dimensions):
                if lowest[node, k] > points[row, k]:
                    possible = False
                    break
                corner[k] = min(highest[node, k], points[row, k])
            if not possible or _is_below_any(corner, near, found - first):
                continue
            if node < leaves:
                # The right child is looked at first: it has the higher numbers.
                stack[height] = 2 * node
                stack[height + 1] = 2 * node + 1
                height += 2
                continue
            begin = (node - leaves) * _LEAF
            for j in range(min(begin + _LEAF, row) - 1, begin - 1, -1):
                below = True
                for k in range(dimensions):
                    if points[j, k] > points[row, k]:
                        below = False
                        break
                if not below or _is_below_any(points[j], near, found - first):
                    continue
                if found == len(lower):
                    return row, first
                if found - first == len(near):
                    near = np.concatenate((near, np.empty_like(near)))
                near[found - first] = points[j]
                lower[found] = j
                upper[found] = row
                found += 1
        row += 1
    return row, found
