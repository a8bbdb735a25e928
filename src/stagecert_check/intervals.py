"""Intervals of linear operations, rounded outward."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagecert_check.linear import Linear, Move, Reshape
from stagecert_check.numbers import Arithmetic


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
