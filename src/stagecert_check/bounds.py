"""Intervals forwards and passes back: what follows from a box of inputs, for many boxes at once.

`Facts` holds an interval for every value of the network, box by box. `lower_bounds` starts from
objective = sum of g_v . v  over some values v and replaces, from the last value to the first, each
v by what makes it. Throughout,

    objective >= total - slip + sum of g_v . v    for all inputs in the box

holds for the numbers as they were computed: whatever a step rounds is added to `slip` at once. A
computed cotangent W^T g is off by at most n eps |W|^T |g|, which is n eps |g| . (|W| |x|) in the
objective; |W| |x| is bounded once in the forward pass (`sizes`).
"""

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from stagecert_check.folding import Folded, folded, linear_interval, magnitude
from stagecert_check.functions import Activation, Refused
from stagecert_check.graph import Node, Program, Shift
from stagecert_check.linear import Linear, MatMul, Move, Reshape, Shape
from stagecert_check.numbers import LARGEST, Arithmetic
from stagecert_check.planes import Planes

# A computed slip is a sum of up to billions of terms: it may itself be rounded by less than this.
_GENEROUS = 1 + 1e-6
_MANY_ROWS = 64
_ENTRIES_AT_ONCE = 2**16  # of a cotangent with many rows: more fall out of the caches
_LEAST_ROWS = 8  # at once, all the same: each step of a pass has a cost of its own
# Numbers in all cotangents of passes back for the ends of one activation's arguments: more of them
# take minutes. It limits what attention has many of; see `few`.
_MOST_NUMBERS = 2**28

_WIDE = 2**32  # more than any value has entries

# low_slope, low_offset, high_slope, high_offset, and perhaps planes above some neurons
Lines = tuple[Any, ...]


def few(function: Activation) -> bool:
    """Whether an activation has few arguments for what it does.

    Attention compares every two tokens, and multiplies: that is where nearly all passes back are.
    """
    return function.kind not in ("product", "exp", "reciprocal")


class Facts:
    """Intervals of the network's values for some boxes of inputs, and default lines.

    Attributes:
        inputs: (low, high) of the flattened inputs, one after the other: (boxes, entries).
        low, high: for every value of the network, with an axis of boxes in front.
        sizes: for linear operations: at least |W| |x|.
        totals: the largest absolute values of a value's entries, added up.
        boxes, lines: of every activation, by node: the interval of its argument as float64, and
            the default lines on it.
        empty: which boxes are known to have no points; nothing else is said of these.
    """

    def __init__(self, arithmetic: Arithmetic, program: Program, low: np.ndarray, high: np.ndarray):
        self.arithmetic, self.program = arithmetic, program
        self.low: list[Any] = []
        self.high: list[Any] = []
        self.sizes: list[Any] = []
        self.totals: list[Any] = []
        self.boxes: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.lines: dict[int, Lines] = {}
        self.inputs = low, high
        self.empty = np.zeros(len(low), bool)
        self._magnitudes: dict[int, Any] = {}
        self._folded: dict[int, Folded | None] = {}
        self._used = 0

    def derive(
        self,
        tighter: Callable[["Facts", int, int], None] | None = None,
        passes: bool | Callable[[Activation], bool] = True,
    ) -> "Facts":
        """Goes through the network.

        Arguments of activations get tighter by a pass back (unless `passes` is False, or says so of
        the activation), and then by `tighter`, which is called with the facts, the activation and
        its argument.
        """
        for index, node in enumerate(self.program.nodes):
            if self._taken(index):
                continue
            size = None
            if isinstance(node.operation, Activation):
                if passes(node.operation) if callable(passes) else passes:
                    self._tighten(node.operation, node.arguments[0])
                if tighter is not None:
                    tighter(self, index, node.arguments[0])
                low, high = self._activation(node.operation, index, node.arguments[0])
            elif node.operation is None:
                low, high = self._next_input(node.shape)
            elif isinstance(node.operation, Shift):
                (k,) = node.arguments
                low = self.arithmetic.down(self.low[k] + node.operation.constant)
                high = self.arithmetic.up(self.high[k] + node.operation.constant)
            else:
                arguments = [(self.low[k], self.high[k]) for k in node.arguments]
                low, high, size = linear_interval(self.arithmetic, node.operation, arguments)
            self.sizes.append(size)
            if not (np.all(np.abs(low) <= LARGEST) and np.all(np.abs(high) <= LARGEST)):
                raise Refused(f"a value of the network may be larger than {LARGEST:g}")
            if not np.all(low <= high):
                raise Refused("an interval is empty")
            self.low.append(low)
            self.high.append(high)
            largest = self.magnitude(index)
            self.totals.append(largest.reshape(len(largest), -1).sum(axis=1))
        return self

    def sealed(self) -> "Facts":
        """The same, but its arrays cannot be written to any more: others may read them."""
        every = [self.low, self.high, self.sizes, self.totals, self.inputs, [self.empty]]
        every += [*self.boxes.values(), *self.lines.values()]
        for array in (x for some in every for x in some if isinstance(x, np.ndarray)):
            array.setflags(write=False)
        return self

    def magnitude(self, index: int) -> Any:
        """The largest absolute value of every entry."""
        if index not in self._magnitudes:
            self._magnitudes[index] = magnitude(self.low[index], self.high[index])
        return self._magnitudes[index]

    def line(self, index: int, of: Any, low_slope: np.ndarray, high_slope: np.ndarray) -> Lines:
        """The lines of an activation with given slopes, for the boxes `of`: as many, or one."""
        function = self.program.nodes[index].operation
        assert isinstance(function, Activation)
        low, high = (x[of] for x in self.boxes[index])
        offsets = [function.offset(low, high, low_slope, 1),
                   function.offset(low, high, high_slope, -1)]  # fmt: skip
        real = self.arithmetic
        return tuple(real.array(x) for x in (low_slope, offsets[0], high_slope, offsets[1]))

    def _taken(self, index: int) -> bool:
        """Whether a value's facts were taken from elsewhere."""
        return False

    def _slopes(self, index: int, low: np.ndarray, high: np.ndarray) -> tuple[Any, ...]:
        """The slopes of an activation's lines on some intervals."""
        function = self.program.nodes[index].operation
        assert isinstance(function, Activation)
        return function.slopes(low, high)

    def _next_input(self, shape: Shape) -> Iterator[np.ndarray]:
        count = int(np.prod(shape))
        some = slice(self._used, self._used + count)
        self._used += count
        return (self.arithmetic.array(x[:, some].reshape(-1, *shape)) for x in self.inputs)

    def folded(self, index: int) -> Folded | None:
        """How a linear operation reads inputs most of which are fixed on all boxes, if it does."""
        if index not in self._folded:
            self._folded[index] = folded(self.arithmetic, self.program, index, self.low, self.high)
        return self._folded[index]

    def _tighten(self, function: Activation, argument: int) -> None:
        """Both ends of those entries of an activation's argument where it matters."""
        shape = self.low[argument].shape
        ends = self.arithmetic.outward(self.low[argument], self.high[argument])
        of, entry = np.nonzero(function.bent(*ends).reshape(shape[0], -1))
        # Of several copies of a number, which products make, only one is bounded: where it is made,
        # so that the pass back does not begin with all its copies.
        origins, first = np.unique(self._origins(argument)[entry], return_inverse=True)
        once, back = np.unique(of * len(origins) + first, return_inverse=True)
        once_of, number = np.divmod(once, max(len(origins), 1))
        made, place = np.divmod(origins[number], _WIDE)
        if not few(function) and self._numbers(made) > _MOST_NUMBERS:
            return
        groups = [np.flatnonzero(made == index) for index in np.unique(made)]
        groups = [some[k : k + 2**16] for some in groups for k in range(0, len(some), 2**16)]
        for sign in (1, -1) if groups else ():
            found = [
                self.unit_bounds(int(made[some[0]]), once_of[some], place[some], sign, {})
                for some in groups
            ]
            order = np.argsort(np.concatenate(groups))
            self.improve(argument, of, entry, sign, np.concatenate(found)[order][back])

    def _numbers(self, made: np.ndarray) -> int:
        """How many numbers the cotangents have in passes back to both ends of entries of values."""
        sizes = np.cumsum([np.prod(node.shape) for node in self.program.nodes])
        return 2 * int(np.sum(sizes[made]))

    def _origins(self, index: int) -> np.ndarray:
        """A number for every entry of a value, the same for entries that were moved from one.

        It is made of where the entry comes from: the value and the place there.
        """
        node = self.program.nodes[index]
        if isinstance(node.operation, Reshape):
            return self._origins(node.arguments[0])
        own = index * _WIDE + np.arange(int(np.prod(node.shape)))
        if isinstance(node.operation, Move):
            read = node.operation.index.reshape(-1)
            parts = [self._origins(k) for k in node.arguments]
            return np.where(read >= 0, np.concatenate(parts)[read], own)  # -1 is zero
        return own

    def unit_bounds(
        self, index: int, of: np.ndarray, entry: np.ndarray, sign: int, lines: dict[int, Lines]
    ) -> np.ndarray:
        """Lower bounds on sign * (an entry of a value), each on the box given with it."""
        shape = self.low[index].shape[1:]

        def start(some: slice) -> dict[int, np.ndarray]:
            rows = np.zeros((len(of[some]), int(np.prod(shape))))
            rows[np.arange(len(rows)), entry[some]] = sign
            return {index: self.arithmetic.array(rows.reshape(-1, *shape))}

        made = self._made_by(index)
        if made is None:
            return lower_bounds(self, of, start, lines, index)
        # What makes an entry is a column of a matrix, and perhaps a constant: nothing is computed.
        matrix, argument, constant = made

        def columns(some: slice) -> dict[int, np.ndarray]:
            rows = matrix.of_units(entry[some], self.program.nodes[argument].shape)
            return {argument: rows if sign > 0 else -rows}

        found = lower_bounds(self, of, columns, lines, argument)
        if constant is None:
            return found
        return self.arithmetic.down(found + sign * constant.reshape(-1)[entry])

    def _made_by(self, index: int) -> tuple[MatMul, int, Any] | None:
        """(operation, what it reads, constant) of a value that is a product with one matrix."""
        node, constant = self.program.nodes[index], None
        if isinstance(node.operation, Shift):
            constant = np.broadcast_to(node.operation.constant, node.shape)
            node = self.program.nodes[node.arguments[0]]
        if not isinstance(node.operation, MatMul) or not node.operation.plain:
            return None
        return node.operation, node.arguments[0], constant

    def affine(
        self, index: int, of: np.ndarray, entry: np.ndarray, sources: list[int]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """(top, weights): an entry of a value is at most top + weights . sources, on its box."""
        shape = self.low[index].shape[1:]
        rows = np.zeros((len(of), int(np.prod(shape))))
        rows[np.arange(len(rows)), entry] = -1
        start = {index: self.arithmetic.array(rows.reshape(-1, *shape))}
        least, met = _Pass(self, of, start, {}).down_to(sources)
        nothing = self.arithmetic.array(np.zeros(1))
        weights = [
            -met[k].reshape(len(of), -1)
            if k in met
            else np.broadcast_to(nothing, (len(of), int(np.prod(self.low[k].shape[1:]))))
            for k in sources
        ]
        return -least, weights

    def improve(
        self, index: int, of: np.ndarray, entry: np.ndarray, sign: int, found: np.ndarray
    ) -> None:
        """Makes intervals tighter by lower bounds on sign * entries."""
        ends = self.low if sign > 0 else self.high
        ends[index] = ends[index].copy()
        flat = ends[index].reshape(len(ends[index]), -1)
        best = np.maximum(sign * flat[of, entry], found)
        flat[of, entry] = sign * best
        self._magnitudes.pop(index, None)

    def meet(self, index: int, low: np.ndarray, high: np.ndarray) -> None:
        """Makes intervals tighter by others that hold too."""
        self.low[index] = np.maximum(self.low[index], low)
        self.high[index] = np.minimum(self.high[index], high)
        self._magnitudes.pop(index, None)

    def _activation(self, function: Activation, index: int, argument: int) -> tuple[Any, ...]:
        real = self.arithmetic
        low, high = self.boxes[index] = real.outward(self.low[argument], self.high[argument])
        self.lines[index] = self.line(index, slice(None), *self._slopes(index, low, high))
        return tuple(map(real.array, function.image(low, high)))


def lower_bounds(
    facts: Facts,
    of: np.ndarray,
    start: Callable[[slice], dict[int, np.ndarray]],
    lines: dict[int, Lines],
    last: int | None = None,
) -> np.ndarray:
    """For each row a lower bound on the sum of start[v] . v over the values v.

    Args:
        of: for each row, on which of the boxes.
        start: a function that gives the arrays (rows, *shape) by node, for a slice of the rows.
        lines: of activations, by node; arrays have an axis of rows. The default ones are used
            where none are given.
        last: none of the values is after this one.
    """
    nodes = facts.program.nodes if last is None else facts.program.nodes[: last + 1]
    widest = max(int(np.prod(node.shape)) for node in nodes)
    at_once = max(_ENTRIES_AT_ONCE // widest, _LEAST_ROWS)
    # Where there are many rows of a box, it is taken by itself: its arrays need no copies.
    ends = [*(np.flatnonzero(np.diff(of)) + 1), len(of)]
    ends = [len(of)] if len(of) < _MANY_ROWS * len(ends) else ends
    slices = [slice(k, min(k + at_once, end)) for begin, end in itertools.pairwise([0, *ends])
              for k in range(begin, end, at_once)]  # fmt: skip
    parts = []
    for some in slices:
        given = {k: tuple(x[some] for x in line) for k, line in lines.items()}
        parts.append(_Pass(facts, of[some], start(some), given).bounds())
    return np.concatenate(parts)


def linear_parts(
    facts: Facts,
    start: dict[int, np.ndarray],
    stops: Collection[int],
    of: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[int, Any]]:
    """(least, weights): the sums of start[v] . v are at least least + weights . stops, by row.

    The facts are of one box, or each row is about the box in `of`. Where all activations before
    `start` are stops, nothing but rounding is lost.
    """
    rows = max(len(x) for x in start.values())
    of = np.zeros(rows, int) if of is None else of
    return _Pass(facts, of, start, {}).down_to(stops)


class _Pass:
    def __init__(
        self, facts: Facts, of: np.ndarray, start: dict[int, np.ndarray], lines: dict[int, Lines]
    ):
        self.facts, self.real, self.of = facts, facts.arithmetic, of
        self.lines, self.cotangents = lines, dict(start)
        self.few: dict[int, np.ndarray] = {}  # cotangents of the free entries of inputs
        self.folded: dict[int, Folded] = {}  # which entries these are
        zero = self.real.array(np.zeros(len(of)))
        self.total, self.slip, self.size, self.added = zero, zero, zero, 0
        # Which boxes the rows are on; one box stands for all rows if it is the only one.
        self.boxes = of if np.any(of != of[0]) else slice(int(of[0]), int(of[0]) + 1)

    def _inner(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """The inner product of every row of one array with that of another, or with one array."""
        one = one.reshape(len(self.of), -1)
        other = other.reshape(-1, one.shape[1])
        if len(other) == 1:
            return one @ other[0]
        return (one * other).sum(axis=1) if self.real.exact else np.einsum("ij,ij->i", one, other)

    def _underflows(self, terms: int, index: int) -> None:
        self.slip = self.slip + self.real.tiny(terms) * (self.facts.totals[index][self.boxes] + 1)

    def _add(self, g: np.ndarray, constant: np.ndarray, magnitude: np.ndarray) -> None:
        """g . constant goes to the total."""
        self.total = self.total + self._inner(g, constant)
        self.added += 1
        if not self.real.exact:
            size, count = self._inner(np.abs(g), magnitude), int(np.prod(g.shape[1:])) + 2
            self.slip = self.slip + self.real.slip(count, 0) * size + self.real.tiny(count)
            self.size = self.size + size

    def _send(self, index: int, g: np.ndarray) -> None:
        """Adds to the cotangent of a value."""
        if index in self.cotangents:
            old = self.cotangents[index]
            if not self.real.exact:
                largest = self.facts.magnitude(index)[self.boxes]
                size = self._inner(np.abs(old) + np.abs(g), largest)
                self.slip = self.slip + self.real.slip(1, 0) * size
                self._underflows(1, index)
            g = old + g
        self.cotangents[index] = g

    def bounds(self) -> np.ndarray:
        return self.down_to(())[0]

    def down_to(self, stops: Collection[int]) -> tuple[np.ndarray, dict[int, Any]]:
        """A bound on what was added up before some values, and the cotangents of these."""
        facts, nodes = self.facts, self.facts.program.nodes
        # Whoever stops somewhere wants the cotangents of all entries.
        fold = not stops
        for index in range(max(self.cotangents, default=-1), -1, -1):
            if index in self.few:
                self._few(index)
            if index not in self.cotangents or index in stops:
                continue
            g, node = self.cotangents.pop(index), nodes[index]
            if node.operation is None:
                low, high = facts.low[index][self.boxes], facts.high[index][self.boxes]
                self._add(g, np.where(g > 0, low, high), facts.magnitude(index)[self.boxes])
            elif isinstance(node.operation, Shift):
                constant = node.operation.constant
                self._add(g, constant, np.abs(constant))
                self._send(node.arguments[0], g)
            elif isinstance(node.operation, Activation):
                self._activation(index, node.arguments[0], g)
            elif not (fold and self._folded(index, g)):
                self._linear(index, node, g)
            if not np.all(np.isfinite(np.asarray(self.slip, float))):
                raise Refused("a pass back overflows")
        # The totals of all values are sums of `added` numbers.
        self.slip = self.slip + self.real.slip(2 * self.added + 2, 0) * self.size
        if self.real.exact:
            return self.total - self.slip, self.cotangents
        if not np.all(np.isfinite(self.total)):  # infinity would refute whatever it is about
            raise Refused("a pass back overflows")
        least = np.nextafter(self.total - self.slip * _GENEROUS, -np.inf)
        return least, self.cotangents

    def _activation(self, index: int, argument: int, g: np.ndarray) -> None:
        line = self.lines.get(index) or [x[self.boxes] for x in self.facts.lines[index]]
        low_slope, low_offset, high_slope, high_offset, *planes = line
        for above in planes:
            g = self._above(index, g, above)
        up = g > 0
        self._add(g, chosen := np.where(up, low_offset, high_offset), np.abs(chosen))
        if low_slope.ndim > g.ndim:  # a maximum
            g, up = g[..., None], up[..., None]
        back = g * np.where(up, low_slope, high_slope)
        if not self.real.exact:
            size = self._inner(np.abs(back), self.facts.magnitude(argument)[self.boxes])
            self.slip = self.slip + self.real.slip(1, 0) * size
            self._underflows(2, argument)
        self._send(argument, back)

    def _above(self, index: int, g: np.ndarray, planes: Planes) -> np.ndarray:
        """Sends shares of negative cotangents through planes; returns what is left."""
        at = planes.rows, planes.entries
        left = g.reshape(len(self.of), -1).copy()
        taken = np.where(left[at] < 0, left[at] * self.real.array(planes.shares), left[at] * 0)
        if not self.real.exact:
            # What is left is rounded, and so is the sum of the two.
            largest = np.broadcast_to(
                self.facts.magnitude(index)[self.boxes].reshape(-1, left.shape[1]), left.shape
            )
            off = np.abs(left[at]) * largest[at]
            self.slip = self.slip + self.real.slip(2, 0) * self._by_row(planes, off)
            self._underflows(2, index)
        left[at] = left[at] - taken
        terms = taken * planes.offsets
        most = int(np.bincount(planes.rows, minlength=1).max()) + 4
        self.total = self.total + self._by_row(planes, terms)
        self.added += 1
        if not self.real.exact:
            size = self._by_row(planes, np.abs(terms))
            self.slip = self.slip + self.real.slip(most, 0) * size + self.real.tiny(most)
            self.size = self.size + size
        for k, slopes in planes.slopes.items():
            back = taken[:, None] * slopes
            if not self.real.exact:
                size = self._inner(
                    self._by_row(planes, np.abs(back)), self.facts.magnitude(k)[self.boxes]
                )
                self.slip = self.slip + self.real.slip(most, 0) * size
                self._underflows(most, k)
            self._send(k, self._by_row(planes, back).reshape(-1, *self.facts.low[k].shape[1:]))
        return left.reshape(g.shape)

    def _by_row(self, planes: Planes, x: np.ndarray) -> np.ndarray:
        """The sums of what belongs to planes, row by row."""
        found = np.zeros((len(self.of), *x.shape[1:]), x.dtype)
        np.add.at(found, planes.rows, x)
        return found

    def _linear(self, index: int, node: Node, g: np.ndarray) -> None:
        operation, nodes = node.operation, self.facts.program.nodes
        assert isinstance(operation, Linear)
        rate = self.real.slip(operation.back_terms, operation.loose)
        if rate:
            size = self.facts.sizes[index][self.boxes]
            self.slip = self.slip + rate * self._inner(np.abs(g), size)
        shapes = [nodes[k].shape for k in node.arguments]
        for k, back in zip(node.arguments, operation.transposed(g, shapes), strict=True):
            if operation.back_terms and not self.real.exact:
                self._underflows(operation.back_terms, k)
            self._send(k, back)

    def _folded(self, index: int, g: np.ndarray) -> bool:
        """Goes on to the free entries of an input at once, if there are few; whether it did."""
        if (found := self.facts.folded(index)) is None:
            return False
        low, high = found.low[self.boxes], found.high[self.boxes]
        self._add(g, np.where(g > 0, low, high), magnitude(low, high))
        operation: Any = self.facts.program.nodes[index].operation
        rate = self.real.slip(found.terms, operation.loose)
        self.slip = self.slip + rate * self._inner(np.abs(g), found.sizes[self.boxes])
        self._underflows(found.terms, found.origin)
        back = g.reshape(len(g), -1) @ found.matrix
        if found.origin in self.few:
            old = self.few[found.origin]
            if not self.real.exact:
                size = self._inner(np.abs(old) + np.abs(back), self._free(found)[2])
                self.slip = self.slip + self.real.slip(1, 0) * size
                self._underflows(1, found.origin)
            back = old + back
        self.few[found.origin], self.folded[found.origin] = back, found
        return True

    def _free(self, found: Folded) -> list[np.ndarray]:
        """Both ends of the free entries of an input, and their magnitudes."""
        facts, k = self.facts, found.origin
        every = (x[self.boxes] for x in (facts.low[k], facts.high[k], facts.magnitude(k)))
        return [x.reshape(len(x), -1)[:, found.free] for x in every]

    def _few(self, index: int) -> None:
        """What has come to the free entries of an input."""
        g, found = self.few.pop(index), self.folded[index]
        if index in self.cotangents:  # it is also read in another way
            shape = self.facts.program.nodes[index].shape
            whole = self.real.array(np.zeros((len(g), int(np.prod(shape)))))
            whole[:, found.free] = g
            self._send(index, whole.reshape(-1, *shape))
            return
        low, high, largest = self._free(found)
        self._add(g, np.where(g > 0, low, high), largest)
