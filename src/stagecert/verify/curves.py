"""Convex functions that the search through splits evaluates without a proof.

Attention has hundreds of thousands of exponentials. The checker encloses what it evaluates; a
search whose results the checker evaluates anew needs no more than what NumPy computes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagecert_check.functions import Activation


@dataclass(frozen=True, eq=False)
class Convex:
    """A convex function on its intervals: its values, slopes, and where it has a slope."""

    value: Callable[[np.ndarray], np.ndarray]
    slope: Callable[[np.ndarray], np.ndarray]
    where: Callable[[np.ndarray], np.ndarray]

    def chord(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """The slope of the line through both ends; of the tangent where there is one end only."""
        width = high - low
        rise = self.value(high) - self.value(low)
        return np.where(width > 0, rise / np.where(width > 0, width, 1), self.slope(low))

    def offset(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int) -> np.ndarray:
        """The offset of the line of a slope below (side 1) or above the function."""
        if side < 0:
            return np.maximum(self.value(low) - slope * low, self.value(high) - slope * high)
        with np.errstate(all="ignore"):
            # Where there is no such slope, the function climbs, or falls, less than the line.
            at = np.nan_to_num(self.where(slope), nan=-np.inf)
        at = np.clip(at, low, high)
        ends = (self.value(x) - slope * x for x in (low, at, high))
        return np.minimum.reduce(list(ends))


_EXP = Convex(np.exp, np.exp, np.log)
_RECIPROCAL = Convex(lambda x: 1 / x, lambda x: -1 / (x * x), lambda s: 1 / np.sqrt(-s))


def convex(function: Activation, low: np.ndarray) -> Convex | None:
    """The function on intervals with these lower ends, if it is one of those."""
    if function.kind == "exp":
        return _EXP
    if function.kind == "reciprocal" and np.all(low > 0):
        return _RECIPROCAL
    return None
