"""Activations made of lines, planes and steps: their ranges, and lines of given slopes beside them.

A line may have any slope: its offset is derived here, as far in as is safe. The difference of
function and line is extreme at an end, a kink, a jump or a corner of a box.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert_check.numbers import EPS, TINY

Entrywise = Callable[[np.ndarray], np.ndarray]


class Refused(Exception):
    """Why the checker does not accept something."""


@dataclass
class Value:
    """A value of the network: its number and shape."""

    index: int
    shape: tuple[int, ...]


class Activation:
    """A nonlinear function of each entry, or of the last axis. All arrays are float64.

    Arrays have an axis of boxes in front of the shapes in the network.
    """

    kind = ""
    settings: dict[str, Any] = {}  # noqa: RUF012  (those that it was made with; nobody changes them)

    def image(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Intervals that contain all values on the intervals."""
        raise NotImplementedError

    def offset(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int) -> np.ndarray:
        """Offsets with slope * x + offset below (side 1) or above (side -1) on the intervals."""
        raise NotImplementedError

    def bent(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Which entries of the argument are worth a tighter interval."""
        raise NotImplementedError

    def slopes(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The default slopes below and above. Any others are as safe."""
        raise NotImplementedError


def hull_slope(x: np.ndarray, f: Any, side: int, at: Any = None) -> np.ndarray:
    """The slope of the lower (side 1) or upper hull of points (x, f), in the middle of all x.

    The first axis counts the points, from left to right. `at` is another place than the middle.
    """
    at = 0.5 * x[0] + 0.5 * x[-1] if at is None else at
    best, slope = np.full(at.shape, np.inf), np.zeros(at.shape)
    for i in range(len(x)):
        for j in range(i + 1, len(x)):
            over = (x[i] <= at) & (at <= x[j]) & (x[i] < x[j])
            chord = (f[j] - f[i]) / np.where(over, x[j] - x[i], 1)
            value = side * (f[i] + chord * (at - x[i]))
            better = over & (value < best)
            best, slope = np.where(better, value, best), np.where(better, chord, slope)
    return slope


class Piecewise(Activation):
    """slopes[k] * x + offsets[k] between knot k - 1 and knot k; it may jump at knots.

    Bounds hold at a knot for both pieces, and so for whatever is between them. Knots are pairs of
    numbers with the knot between them: pieces are checked on all of that.
    """

    def __init__(self, kind: str, knots: Any, slopes: Any, offsets: Any):
        self.kind, self.knots, self.pieces = kind, knots, list(zip(slopes, offsets, strict=True))

    def _ends(self, low: np.ndarray, high: np.ndarray):
        """(slope, offset, where, x) for both ends of every piece; it meets the box `where`."""
        starts = [-math.inf, *(before for before, _ in self.knots)]
        ends = [*(after for _, after in self.knots), math.inf]
        for (slope, offset), start, end in zip(self.pieces, starts, ends, strict=True):
            first, last = np.maximum(low, start), np.minimum(high, end)
            where = first <= last
            for x in (first, last):
                yield slope, offset, where, np.where(where, x, 0)

    def _least(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int) -> np.ndarray:
        """A lower bound on side * (f(x) - slope * x), exact where nothing is rounded."""
        least = np.full(np.shape(low), np.inf)
        for s, t, where, x in self._ends(low, high):
            steep = s - slope
            product = steep * x
            # Products with 0 and 1 are not rounded, nor are sums with zero.
            rounds = np.where((steep == 0) | (x == 0), 0.0, 1.0)
            whole = (np.abs(steep) == 1) & ((slope == 0) | (s == 0)) & (np.asarray(t) == 0)
            off = np.where(whole, 0, rounds * (4 * EPS * (np.abs(product) + np.abs(t)) + 4 * TINY))
            least = np.where(where, np.minimum(least, side * (product + t) - off), least)
        return least

    def image(self, low: np.ndarray, high: np.ndarray):
        zero = np.zeros(np.shape(low))
        return self._least(low, high, zero, 1), -self._least(low, high, zero, -1)

    def offset(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int):
        return side * self._least(low, high, slope, side)

    def bent(self, low: np.ndarray, high: np.ndarray):
        return np.any([(low < after) & (high > before) for before, after in self.knots], axis=0)

    def slopes(self, low: np.ndarray, high: np.ndarray):
        knots = [np.clip(before, low, high) for before, _ in self.knots]
        x = np.stack([low, *knots, high])
        # At a jump, the smaller value counts below and the larger one above.
        least, most = np.full(x.shape, np.inf), np.full(x.shape, -np.inf)
        for s, t, where, _ in itertools.islice(self._ends(x, x), 0, None, 2):  # ends are equal
            least = np.where(where, np.minimum(least, s * x + t), least)
            most = np.where(where, np.maximum(most, s * x + t), most)
        return hull_slope(x, least, 1), hull_slope(x, most, -1)


class Relu(Piecewise):
    """max(x, 0), the same in fewer steps: most networks have nothing else."""

    def __init__(self):
        super().__init__("relu", [(0.0, 0.0)], [0.0, 1.0], [0.0, 0.0])

    def _least(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int) -> np.ndarray:
        found = []
        for x in (low, high):
            right = x > 0
            steep = right - slope
            value = steep * x
            # Products with 0 and 1 are not rounded.
            exact = (value == 0) & ((steep == 0) | (x == 0))
            exact |= np.where(right, slope == 0, np.abs(slope) == 1)
            off = np.where(exact, 0, 4 * EPS * np.abs(value) + 4 * TINY)
            found.append(side * value - off)
        least = np.minimum(*found)
        return np.where((low <= 0) & (high >= 0), np.minimum(least, 0), least)

    def image(self, low: np.ndarray, high: np.ndarray):
        return np.maximum(low, 0), np.maximum(high, 0)

    def slopes(self, low: np.ndarray, high: np.ndarray):
        on, bent = (low >= 0) & (low < high), self.bent(low, high)
        chord = high / np.where(bent, high - low, 1)
        below = on | (bent & (0.5 * low + 0.5 * high > 0))
        return below.astype(float), np.where(bent, chord, on)


class Maximum(Activation):
    """The maximum over the last axis."""

    kind = "max"

    def image(self, low: np.ndarray, high: np.ndarray):
        return low.max(axis=-1), high.max(axis=-1)

    def offset(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int):
        size = np.abs(slope) * np.maximum(np.abs(low), np.abs(high))
        slip = (8 * low.shape[-1] + 32) * EPS
        floor, ceiling = self.image(low, high)
        most = np.maximum(np.abs(floor), np.abs(ceiling))
        if side > 0:
            # With a >= 0: max >= a . x + (1 - sum a) * max, and max is between its own bounds.
            if np.any(slope < 0):
                raise Refused("a slope below a maximum is negative")
            rest = 1 - slope.sum(axis=-1)
            off = slip * (1 + slope.sum(axis=-1)) * most + TINY
            return np.minimum(rest * floor, rest * ceiling) - off
        # x_k - a . x is linear, so its maximum is at a corner, for every k.
        each = np.maximum(-slope * low, -slope * high)
        other = np.maximum((1 - slope) * low, (1 - slope) * high)
        value = (each.sum(axis=-1)[..., None] - each + other).max(axis=-1)
        largest = np.maximum(np.abs(low), np.abs(high)).max(axis=-1)
        return value + 2 * slip * (size.sum(axis=-1) + largest) + TINY

    def bent(self, low: np.ndarray, high: np.ndarray):
        rivals = high > low.max(axis=-1, keepdims=True)
        return rivals & (rivals.sum(axis=-1, keepdims=True) > 1)

    def slopes(self, low: np.ndarray, high: np.ndarray):
        first = np.zeros(low.shape)
        np.put_along_axis(first, high.argmax(axis=-1)[..., None], 1, axis=-1)
        # max x <= t + sum of max(x_j - t, 0) <= t + the sum of their chords, for any level t; the
        # best of some levels in the middle of the box is taken.
        floor, width = low.max(axis=-1), high - low
        best, slopes = np.full(floor.shape, np.inf), np.zeros(low.shape)
        for t in (floor, *(np.maximum(high[..., k], floor) for k in range(high.shape[-1]))):
            over = np.maximum(high - t[..., None], 0)
            chord = np.where(low >= t[..., None], 1, over / np.where(width > 0, width, 1))
            ends = np.where(low >= t[..., None], low - t[..., None], 0)
            value = t + (ends + chord * width / 2).sum(axis=-1)
            better = value < best
            best = np.where(better, value, best)
            slopes = np.where(better[..., None], chord, slopes)
        return first, slopes


class Product(Activation):
    """The product of the two entries of the last axis.

    x y - a x - b y is linear in x and in y, so it is extreme in a corner of the box.
    """

    kind = "product"

    def image(self, low: np.ndarray, high: np.ndarray):
        zero = np.zeros(low.shape)
        return self.offset(low, high, zero, 1), self.offset(low, high, zero, -1)

    def offset(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int):
        best = np.inf
        for x in (low[..., 0], high[..., 0]):
            for y in (low[..., 1], high[..., 1]):
                product, lines = x * y, (slope[..., 0] * x, slope[..., 1] * y)
                # Five roundings, of which each is less than EPS times what is added up.
                size = np.abs(product) + np.abs(lines[0]) + np.abs(lines[1])
                value = side * (product - lines[0] - lines[1]) - 4 * EPS * size - 4 * TINY
                best = np.minimum(best, value)
        return side * best

    def bent(self, low: np.ndarray, high: np.ndarray):
        wide = high > low
        return wide & wide.all(axis=-1, keepdims=True)

    def slopes(self, low: np.ndarray, high: np.ndarray):
        # The planes that touch two opposite corners meet in the middle; this is between them.
        middle = 0.5 * low + 0.5 * high
        return middle[..., ::-1], middle[..., ::-1]


class Steps(Activation):
    """A function that climbs by jumps, from v to v + 1 at `jump`(v), and is level between.

    At a jump both limits count, whichever is the value: lines are below (above) the closed graph.
    """

    def __init__(self, kind: str, value: Entrywise, jump: Entrywise):
        self.kind, self.value, self.jump = kind, value, jump

    def corners(
        self, low: np.ndarray, high: np.ndarray, side: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The corners (x, f) of the closed graph that matter below or above, from left to right.

        All corners at jumps lie on a line, so that the first and the last are enough.
        """
        first, last = self.value(low), self.value(high)
        climbs = first < last
        over = np.where(climbs & (side < 0), 1, 0)
        begin = np.where(climbs, self.jump(first), low)
        stop = np.where(climbs, self.jump(last - 1), high)
        values = [first, first + over, last - climbs + over, last]
        return np.stack([low, begin, stop, high]), np.stack(values)

    def image(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.value(low), self.value(high)

    def offset(self, low: np.ndarray, high: np.ndarray, slope: np.ndarray, side: int):
        x, f = self.corners(low, high, side)
        product = slope * x
        # Rounded are the place and the value of a corner far out, the product and the difference.
        off = 4 * EPS * (np.abs(f) + np.abs(product)) + TINY
        off = np.where((slope == 0) | (x == 0), 0, off)
        return side * (side * (f - product) - off).min(axis=0)

    def bent(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return self.value(low) != self.value(high)

    def slopes(self, low: np.ndarray, high: np.ndarray):
        below, above = (hull_slope(*self.corners(low, high, side), side) for side in (1, -1))
        return below, above


class Sign(Steps):
    """-1, 0 or 1."""

    def __init__(self):
        super().__init__("sign", np.sign, np.zeros_like)

    def corners(self, low: np.ndarray, high: np.ndarray, side: int):
        first, last = np.sign(low), np.sign(high)
        limit = np.minimum(first, 0) if side > 0 else np.maximum(last, 0)
        inner = np.where(first == last, first, limit)
        return np.stack([low, np.clip(0.0, low, high), high]), np.stack([first, inner, last])
