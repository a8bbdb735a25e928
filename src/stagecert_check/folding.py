"""Linear operations on boxes: intervals of their values, rounded outward, and what is fixed.

Where a box fixes most entries of an input, y = W x is

    y = A f + r,    f the free entries,    low <= r <= high,

with A as few columns of W, and an interval of rounding's width for r, which is what W makes of the
fixed entries. A pass back that ends here needs A alone: with 8 free entries of 800, a hundredth of
the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert_check.graph import Program, Shift
from stagecert_check.linear import Linear, Move, Reshape
from stagecert_check.numbers import Arithmetic

# It is worth it where at most this share of the entries is free.
_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class Folded:
    """An operation's value as matrix . (free entries of an input) + rest.

    Attributes:
        origin: the input.
        free: which entries of it are not fixed, flattened.
        matrix: (entries of the value, free entries), off by `terms` roundings.
        terms: roundings in an entry of the matrix, and in one of its products with a cotangent.
        low, high: of the rest, (boxes, entries of the value).
        sizes: at least |matrix| |free entries|, the same shape.
    """

    origin: int
    free: np.ndarray
    matrix: Any
    terms: int
    low: Any
    high: Any
    sizes: Any


def folded(
    real: Arithmetic, program: Program, index: int, low: Sequence[Any], high: Sequence[Any]
) -> Folded | None:
    """How a value is made of few free entries of an input; None if it is not.

    Args:
        index: of the value.
        low, high: intervals of the values before it, with an axis of boxes in front.
    """
    node = program.nodes[index]
    operation = node.operation
    if not isinstance(operation, Linear) or isinstance(operation, (Move, Reshape)):
        return None
    if len(node.arguments) != 1:
        return None
    origin, between = node.arguments[0], []
    while isinstance(program.nodes[origin].operation, (Reshape, Shift)):
        between.append(program.nodes[origin].operation)
        origin = program.nodes[origin].arguments[0]
    if program.nodes[origin].operation is not None:
        return None
    ends = low[origin], high[origin]
    flat = [x.reshape(len(x), -1) for x in real.outward(*ends)]
    # Numbers like 0.1 are intervals around them.
    wide = np.any(flat[1] > np.nextafter(np.nextafter(flat[0], np.inf), np.inf), axis=0)
    free = np.flatnonzero(wide)
    if not 0 < len(free) <= _SHARE * len(wide):
        return None
    shape = ends[0].shape[1:]
    nothing = real.array(np.zeros(shape))
    rest = tuple(np.where(wide.reshape(shape), nothing, x) for x in ends)
    some = np.where(wide.reshape(shape), magnitude(*ends), nothing)
    units = np.zeros((len(free), len(wide)))
    units[np.arange(len(free)), free] = 1
    units = real.array(units.reshape(-1, *shape))
    for step in between[::-1]:
        if isinstance(step, Shift):  # it adds to the rest alone
            rest = real.down(rest[0] + step.constant), real.up(rest[1] + step.constant)
            continue
        assert isinstance(step, Reshape)
        rest = step.forward([rest[0]]), step.forward([rest[1]])
        some, units = step.forward([some]), step.forward([units])
    least, most, _ = linear_interval(real, operation, [rest])
    *_, sizes = linear_interval(real, operation, [(-some, some)])
    matrix = operation.forward([units]).reshape(len(free), -1).T
    return Folded(
        origin, free, np.ascontiguousarray(matrix), operation.terms + operation.back_terms,
        least, most, sizes,
    )  # fmt: skip


def linear_interval(
    real: Arithmetic, operation: Linear, arguments: Sequence[tuple[Any, Any]]
) -> tuple[Any, Any, Any]:
    """(low, high, size) from (low, high) of the arguments; `size` is at least |W| |x|."""
    lows, highs = ([ends[k] for ends in arguments] for k in (0, 1))
    if isinstance(operation, (Move, Reshape)):  # nothing is computed
        low, high = operation.forward(lows), operation.forward(highs)
        return low, high, magnitude(low, high)
    centres = [(low + high) * real.half for low, high in arguments]
    radii = [
        real.up(np.maximum(real.up(h - c), real.up(c - l)))
        for l, c, h in zip(lows, centres, highs, strict=True)
    ]
    centre = operation.forward(centres)
    radius = operation.forward(radii, absolute=True)
    size = operation.forward([magnitude(*ends) for ends in arguments], absolute=True)
    # Centre and radius are each off by their own roundings; `size` is at least |W| |centre|,
    # and |W| radius is at most twice that. Its own rounding, and that of the sums of this line,
    # are in the last terms.
    terms = 4 * (operation.terms + 4)
    off = real.slip(terms, 4 * operation.loose) * size + real.tiny(terms)
    size = size * (1 + real.slip(operation.terms + 2, operation.loose)) + real.tiny(terms)
    return real.down(centre - radius - off), real.up(centre + radius + off), size


def magnitude(low: Any, high: Any) -> Any:
    """The largest absolute value of every entry."""
    return np.maximum(np.abs(low), np.abs(high))
