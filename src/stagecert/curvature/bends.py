"""How curved a value is at least in single variables, to prove a declared curvature.

`Slope` says which entries are a * v + constant for one variable entry v; `Bend` that a value is
still convex after 1/2 sum(weight * v**2) is taken off. Squares of sloped entries bend; sums and
nonnegative multiples keep it. Everything else forgets, which is never wrong.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Slope:
    """Entry by entry: which variable entry it is a multiple of (-1: none), and the multiple."""

    who: np.ndarray
    times: np.ndarray

    def scaled(self, factor) -> "Slope | None":
        """Multiplied by known numbers; None where shapes differ."""
        factor = np.asarray(factor)
        if np.broadcast_shapes(factor.shape, self.who.shape) != self.who.shape:
            return None
        return Slope(self.who, self.times * factor)


@dataclass(frozen=True)
class Bend:
    """A list of (flat entry of the value, variable entry, weight)."""

    entry: np.ndarray
    who: np.ndarray
    weight: np.ndarray

    def scaled(self, least, shape) -> "Bend":
        """Multiplied by numbers that are at least these, and not negative."""
        factor = np.broadcast_to(least, shape).ravel()[self.entry]
        return Bend(self.entry, self.who, self.weight * factor)

    def summed(self, shape, axes) -> "Bend":
        """Summed over some axes."""
        kept = np.arange(int(np.prod([n for k, n in enumerate(shape) if k not in axes], initial=1)))
        sizes = [1 if k in axes else n for k, n in enumerate(shape)]
        goal = np.broadcast_to(kept.reshape(sizes), shape).ravel()
        return Bend(goal[self.entry], self.who, self.weight)

    def of(self, who: np.ndarray) -> np.ndarray:
        """The total weight of each of these variable entries in a scalar."""
        found, inverse = np.unique(self.who, return_inverse=True)
        if not found.size:
            return np.zeros(who.shape)
        totals = np.bincount(inverse, self.weight)
        place = np.clip(np.searchsorted(found, who), 0, found.size - 1)
        return np.where(found[place] == who, totals[place], 0)


def entries_of(number: int, size: int) -> np.ndarray:
    """The names of a variable's entries."""
    return (number << 32) + np.arange(size)


def joined(a: Bend | None, b: Bend | None) -> Bend | None:
    """That of a sum."""
    if a is None or b is None:
        return a if b is None else b
    pairs = zip((a.entry, a.who, a.weight), (b.entry, b.who, b.weight), strict=True)
    return Bend(*(np.concatenate(pair) for pair in pairs))


def squared(slope: Slope | None) -> Bend | None:
    """That of the entrywise square."""
    if slope is None:
        return None
    who, times = slope.who.ravel(), slope.times.ravel()
    (entry,) = np.nonzero(who >= 0)
    return Bend(entry, who[entry], 2 * times[entry] ** 2)


def moved(values: list[Any], taken) -> Slope | None:
    """The slopes of entries that were only moved."""
    if all(v.slope is None for v in values):
        return None
    slopes = [v.slope or Slope(np.full(v.shape, -1), np.zeros(v.shape)) for v in values]
    return Slope(taken([s.who for s in slopes]), taken([s.times for s in slopes]))
