"""Intervals forwards and one pass back: what is derived from claimed boxes and lines.

`Facts` holds what is known for one box of inputs: an interval for every value of the network.
`lower_bounds` starts from  objective = sum of g_v . v  over some values v and replaces, from the
last value to the first, each v by what makes it. Throughout,

    objective >= total - slip + sum of g_v . v    for all inputs in the box

holds for the numbers as they were computed: whatever a step rounds is added to `slip` at once. A
computed cotangent W^T g is off by at most n eps |W|^T |g|, which is n eps |g| . (|W| |x|) in the
objective; |W| |x| is bounded once in the forward pass (`sizes`).
"""

from typing import Any

import numpy as np

from stagecert.rigor.functions import Activation, Refused
from stagecert.rigor.graph import Program, Shift
from stagecert.rigor.linear import Linear, Move, Reshape
from stagecert.rigor.numbers import LARGEST, Arithmetic

# A computed slip is a sum of up to billions of terms: it may itself be rounded by less than this.
_GENEROUS = 1 + 1e-6
_ENTRIES_AT_ONCE = 2**24  # of a cotangent with many rows


class Facts:
    """Intervals of the network's values for one box of inputs, as far as they are derived."""

    def __init__(self, arithmetic: Arithmetic, program: Program, low, high):
        self.arithmetic, self.program = arithmetic, program
        self.low: list[Any] = []
        self.high: list[Any] = []
        self.sizes: list[Any] = []  # for linear operations: at least |W| |x|
        self._box = low, high  # of the flattened inputs, one after the other
        self._used = 0

    def magnitude(self, index: int) -> Any:
        """The largest absolute value of every entry."""
        return np.maximum(np.abs(self.low[index]), np.abs(self.high[index]))

    def derive(self) -> tuple[Any, Any]:
        """The interval of the next value (not of activations); the caller appends it."""
        index = len(self.low)
        node, real = self.program.nodes[index], self.arithmetic
        size = None
        if node.operation is None:
            count = int(np.prod(node.shape))
            some = slice(self._used, self._used + count)
            self._used += count
            low, high = (real.array(x[some].reshape(node.shape)) for x in self._box)
        elif isinstance(node.operation, Shift):
            (k,) = node.arguments
            low = real.down(self.low[k] + node.operation.constant)
            high = real.up(self.high[k] + node.operation.constant)
        else:
            assert isinstance(node.operation, Linear)
            low, high, size = self._linear(node.operation, node.arguments)
        self.sizes.append(size)
        return low, high

    def _linear(self, operation: Linear, arguments):
        real = self.arithmetic
        lows, highs = (
            [self.low[k][None] for k in arguments],
            [self.high[k][None] for k in arguments],
        )
        if isinstance(operation, (Move, Reshape)):  # nothing is computed
            low, high = operation.forward(lows)[0], operation.forward(highs)[0]
            return low, high, np.maximum(np.abs(low), np.abs(high))
        centres = [(low + high) * real.half for low, high in zip(lows, highs, strict=True)]
        radii = [
            real.up(np.maximum(real.up(h - c), real.up(c - l)))
            for l, c, h in zip(lows, centres, highs, strict=True)
        ]
        centre = operation.forward(centres)[0]
        radius = operation.forward(radii, absolute=True)[0]
        largest = [np.maximum(np.abs(l), np.abs(h)) for l, h in zip(lows, highs, strict=True)]
        size = operation.forward(largest, absolute=True)[0]
        # Centre and radius are each off by their own roundings; `size` is at least |W| |centre|,
        # and |W| radius is at most twice that. Its own rounding, and that of the sums of this line,
        # are in the last terms.
        terms = 4 * (operation.terms + 4)
        off = real.slip(terms, 4 * operation.loose) * size + real.tiny(terms)
        size = size * (1 + real.slip(operation.terms + 2, operation.loose)) + real.tiny(terms)
        return real.down(centre - radius - off), real.up(centre + radius + off), size

    def append(self, low: Any, high: Any) -> None:
        """Settles the interval of the next value."""
        if np.any(np.abs(low) > LARGEST) or np.any(np.abs(high) > LARGEST):
            raise Refused(f"a value of the network may be larger than {LARGEST:g}")
        if not np.all(low <= high):
            raise Refused("an interval is empty or not a number")
        self.low.append(low)
        self.high.append(high)


def lower_bounds(facts: Facts, start: dict[int, Any], lines: dict[int, tuple]) -> np.ndarray:
    """For each row a lower bound on the sum of start[v] . v over the values v.

    `start` has arrays (rows, *shape); `lines` has (low_slope, low_offset, high_slope, high_offset)
    of activations, by node.
    """
    rows = len(next(iter(start.values())))
    nodes = facts.program.nodes
    widest = max(int(np.prod(node.shape)) for node in nodes)
    at_once = max(_ENTRIES_AT_ONCE // widest, 1)
    parts = []
    for begin in range(0, rows, at_once):
        some = {k: g[begin : begin + at_once] for k, g in start.items()}
        parts.append(_Pass(facts, some, lines).bounds())
    return np.concatenate(parts)


class _Pass:
    def __init__(self, facts: Facts, start: dict[int, Any], lines: dict[int, tuple]):
        self.facts, self.real = facts, facts.arithmetic
        self.lines, self.cotangents = lines, dict(start)
        self.rows = len(next(iter(start.values())))
        zero = self.real.array(np.zeros(self.rows))
        self.total, self.slip, self.size, self.added = zero, zero, zero, 0

    def _inner(self, one, other) -> Any:
        """The inner product of every row of one array with another array."""
        return (one * other).reshape(self.rows, -1).sum(axis=1)

    def _charge(self, terms: int, loose: int, g, magnitude) -> None:
        """A relative error in every entry of g . magnitude."""
        rate = self.real.slip(terms, loose)
        if rate:
            self.slip = self.slip + rate * self._inner(np.abs(g), magnitude)

    def _underflows(self, terms: int, magnitude) -> None:
        if not self.real.exact:
            self.slip = self.slip + self.real.tiny(terms) * (magnitude.sum() + 1)

    def _add(self, g, constant, magnitude) -> None:
        """g . constant goes to the total."""
        self.total = self.total + self._inner(g, constant)
        count = int(np.prod(g.shape[1:])) + 2
        self._charge(count, 0, g, magnitude)
        self._underflows(count, np.zeros(1))
        if not self.real.exact:
            self.size = self.size + self._inner(np.abs(g), magnitude)
        self.added += 1

    def _send(self, index: int, g) -> None:
        """Adds to the cotangent of a value."""
        if index in self.cotangents:
            old = self.cotangents[index]
            magnitude = self.facts.magnitude(index)
            self._charge(1, 0, np.abs(old) + np.abs(g), magnitude)
            self._underflows(1, magnitude)
            g = old + g
        self.cotangents[index] = g

    def bounds(self) -> np.ndarray:
        facts, nodes = self.facts, self.facts.program.nodes
        for index in range(max(self.cotangents), -1, -1):
            if index not in self.cotangents:
                continue
            g, node = self.cotangents.pop(index), nodes[index]
            if node.operation is None:
                ends = np.where(g > 0, facts.low[index], facts.high[index])
                self._add(g, ends, facts.magnitude(index))
            elif isinstance(node.operation, Shift):
                constant = node.operation.constant
                self._add(g, constant, np.abs(constant))
                self._send(node.arguments[0], g)
            elif isinstance(node.operation, Activation):
                self._activation(node.arguments[0], g, self.lines[index])
            else:
                self._linear(node, g, facts.sizes[index])
        # The totals of all values are sums of `added` numbers.
        self.slip = self.slip + self.real.slip(2 * self.added + 2, 0) * self.size
        if self.real.exact:
            return self.total - self.slip
        return np.nextafter(self.total - self.slip * _GENEROUS, -np.inf)

    def _activation(self, argument: int, g, line) -> None:
        low_slope, low_offset, high_slope, high_offset = line
        up, down = np.where(g > 0, g, 0), np.where(g < 0, -g, 0)
        self._add(up, low_offset, np.abs(low_offset))
        self._add(-down, high_offset, np.abs(high_offset))
        if low_slope.ndim >= g.ndim:  # a maximum
            up, down = up[..., None], down[..., None]
        back = up * low_slope - down * high_slope  # one of the two is zero
        magnitude = self.facts.magnitude(argument)
        self._charge(1, 0, back, magnitude)
        self._underflows(2, magnitude)
        self._send(argument, back)

    def _linear(self, node, g, size) -> None:
        operation, nodes = node.operation, self.facts.program.nodes
        shapes = [nodes[k].shape for k in node.arguments]
        self._charge(operation.back_terms, operation.loose, g, size)
        for k, back in zip(node.arguments, operation.transposed(g, shapes), strict=True):
            if operation.back_terms:
                self._underflows(operation.back_terms, self.facts.magnitude(k))
            self._send(k, back)
