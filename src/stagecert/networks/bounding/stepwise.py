"""Passes back, layer by layer: for deep networks, convolutions and many boxes.

The same bounds as `backward.dual_bound`, with the same charges for rounding. There, one program
goes back through all layers. Here, a program goes through one layer only (see `portions`): layers
of the same kind and shape share it, and so does every pass that crosses them, wherever it began.
What a neuron does not see is left out (see `windows`). Rows are worked off in portions of one size,
each with its own box.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks.bounding.backward import Lines, Sums, roundings
from stagecert.networks.bounding.portions import (
    Curve,
    Goal,
    Known,
    Rows,
    State,
    View,
    bent_at,
    block_of,
    finish,
    first_state,
    forward,
    reach,
    span_of,
    through,
)
from stagecert.networks.bounding.relaxation import Segment, Split, copied
from stagecert.networks.bounding.windows import Plan, Planner, Sight, Source, Window
from stagecert.networks.operations import Conv, MatMul, Reduce, Sum, WindowSum
from stagecert.networks.regions import Regions
from stagecert.powers import power_below
from stagecert.solvers.damped import Damped

# Neurons that go back at a time, at most.
LARGEST_PORTION = 2048
# Neurons times rows at a time: on CPUs, larger arrays fall out of the caches.
LANE_NUMBERS = 400_000
# Plans and views of networks' layers that are remembered: they take longer than small passes.
KEPT_PLANS = 1024
_seen_before: dict[tuple, tuple[Plan, View, dict[int, View]]] = {}


@dataclass(frozen=True)
class Found:
    """Results for every row that was asked: NumPy arrays.

    Attributes:
        bound: lower bounds.
        coefficients: of the inputs in the linear bound, flattened and joined.
        minimisers: where that is smallest in the row's box, flattened and joined.
    """

    bound: np.ndarray
    coefficients: np.ndarray
    minimisers: np.ndarray


@dataclass(frozen=True, eq=False)
class Start:
    """A segment from which rows go back, and how.

    Attributes:
        segment: with its sources numbered from zero.
        sources: what they are.
        known: what the boxes determine of it.
        plan, first, views: how the segment is seen, and all layers before it.
    """

    segment: Segment
    sources: tuple[Source, ...]
    known: Known
    plan: Plan
    first: View
    views: dict[int, View]


@dataclass(frozen=True, eq=False)
class Way:
    """A finished pass.

    Attributes:
        bound: of all rows.
        coefficients, minimisers: of each input, where asked for.
        cotangents: those that arrived at each block.
    """

    bound: Any
    coefficients: tuple
    minimisers: tuple
    cotangents: dict[int, tuple]


class Passes:
    """Intervals of all activations' arguments for a batch of boxes, and passes back from there.

    Args:
        parts: the network in float64.
        regions: the boxes.
        rows_at_once: how many rows go back at a time.
        refine: how intervals are tightened where that can help: 0 not at all, 1 by a pass back,
            1 + k by k steps of the search after it.
        count: only the first so many boxes matter; the others fill up the batch.
        stop: asked between steps; once it says so, `complete` is False and nothing else counts.
        share: called with a layer's number, and how many of how many of its neurons are done.

    Attributes:
        arguments: (low, high) of every layer's argument, each with a leading axis of boxes.
        complete: False if `stop` came first.
    """

    def __init__(
        self,
        parts: Split,
        regions: Regions,
        rows_at_once: int,
        *,
        refine: int = 1,
        count: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        share: Callable[[int, int, int], None] = lambda layer, done, size: None,
    ):
        self._set_up(parts, regions, rows_at_once)
        count = regions.count if count is None else count
        self.share = share
        for index in range(len(self.layers)):
            if stop():
                return
            interval, bent, known = self._measured(index)
            if refine and not (self._of_inputs(index) and exact(parts.layers[index].segment)):
                for steps in (0, refine - 1)[:refine]:
                    where = np.asarray(bent)[:count]
                    interval = self._refined(index, known, interval, where, (steps, stop))
                    if interval is None:
                        return
                    # The search is worth its time only where a pass back does not settle it.
                    bent = bent_at(self.layers[index], *interval) if refine > 1 else bent
            self._append(index, known, interval)
        self._end()

    @classmethod
    def on(cls, parts: Split, regions: Regions, rows_at_once: int, arguments) -> "Passes":
        """Passes on given intervals of the first layers' arguments."""
        made = cls.__new__(cls)
        made._set_up(parts, regions, rows_at_once)
        for index, (low, high) in enumerate(arguments):
            made._append(index, made._measured(index)[2], (jnp.asarray(low), jnp.asarray(high)))
        if len(made.arguments) == len(parts.layers):
            made._end()
        return made

    # -- intervals, layer by layer ---------------------------------------------------------------

    def _set_up(self, parts: Split, regions: Regions, rows_at_once: int) -> None:
        self.parts, self.sets, self.width = parts, regions.sets, rows_at_once
        self.boxed = regions.boxed
        self.layers = [layer.local for layer in parts.layers]
        self.last = parts.last.local
        self.planner = Planner(parts.layers, regions.shapes, regions.boxed)
        leaves, structure = jax.tree.flatten((parts.layers, parts.last))
        shapes = tuple(np.shape(leaf) for leaf in leaves)
        self.kind = structure, shapes, tuple(map(tuple, regions.shapes)), regions.boxed
        self.pairs: dict[Source, Any] = {(True, k): p for k, p in enumerate(regions.boxes)}
        self.sizes: dict[Source, Any] = {k: _size(*p) for k, p in self.pairs.items()}
        self.known: list[Known] = []
        self.curves: list[Curve] = []
        self.arguments: tuple = ()
        self.complete = False

    def _end(self) -> None:
        span, constant = span_of(self.last, self._of(self.sizes, self.parts.last.sources))
        self.known_last = Known(span, constant, None)
        self.complete = True

    def _of(self, known: dict, sources) -> tuple:
        return tuple(known[source] for source in sources)

    def _of_inputs(self, index: int) -> bool:
        """Whether a layer reads boxes of inputs alone."""
        return self.boxed and all(is_input for is_input, _ in self._sources(index))

    def _sources(self, index: int) -> tuple[Source, ...]:
        return self.parts.layers[index].segment.sources

    def _measured(self, index: int):
        """A layer's argument by intervals, where the activation bends, what else is known of it."""
        sources = self._sources(index)
        pairs, sizes = self._of(self.pairs, sources), self._of(self.sizes, sources)
        low, high, bent, span, constant = reach(self.layers[index], pairs, sizes)
        return (low, high), bent, Known(span, constant, None)

    def _append(self, index: int, known: Known, interval) -> None:
        low, high = interval
        image, size, lines, curve = block_of(self.layers[index], low, high, known.span)
        self.known.append(Known(known.span, known.constant, lines))
        self.curves.append(curve)
        self.pairs[False, index], self.sizes[False, index] = image, size
        self.arguments = (*self.arguments, interval)

    def _refined(self, index: int, known: Known, interval, bent: np.ndarray, effort):
        """The interval, tightened where (boxes, entries) are `bent`; None if there is no time."""
        of_box, entry = np.nonzero(bent)
        if not len(of_box):
            return interval
        shapes = [self.planner.shapes[source] for source in self._sources(index)]
        # Of several copies of a number the first alone goes back.
        first = copied(self.parts.layers[index].segment, shapes)
        of_box, entry = np.divmod(np.unique(of_box * len(first) + first[entry]), len(first))
        steps, stop = effort
        ends = tuple(np.array(x) for x in interval)
        flat_low, flat_high = (x.reshape(len(x), -1) for x in ends)
        start = self._start(index, known)
        for some in self._portions(start, len(of_box)):
            if stop():
                return None
            b, e = of_box[some], entry[some]
            boxes, places, rows = self._both_ends(start, b, e, some.stop - some.start)
            way = self._back(start, boxes, places, rows, full=steps > 0)
            bound = np.asarray(way.bound)
            if steps:
                bound = self._searched(start, (boxes, places, rows), way, steps)[0]
            least, minus_most = bound[: len(b)].T
            flat_low[b, e] = np.maximum(flat_low[b, e], least)
            flat_high[b, e] = np.minimum(flat_high[b, e], -minus_most)
            self.share(index + 1, min(some.stop, len(of_box)), len(of_box))
        # What holds for it holds for all of them.
        return tuple(jnp.asarray(x.reshape(len(x), -1)[:, first].reshape(x.shape)) for x in ends)

    def _start(self, index: int | None, known: Known, windows: bool = True) -> Start:
        """Where rows of a layer's argument begin, or of the outputs."""
        local, segment = self.last, self.parts.last
        if index is not None:
            local, segment = self.layers[index].segment, self.parts.layers[index].segment
        key = self.kind, index, windows
        if key not in _seen_before:
            if len(_seen_before) >= KEPT_PLANS:
                _seen_before.clear()
            plan = self.planner.plan(segment, known.constant.shape, windows)
            views = {k: self._view(self.layers[k].segment, sight, k) for k, sight in plan.steps}
            _seen_before[key] = plan, self._view(local, plan.first, None), views
        return Start(local, segment.sources, known, *_seen_before[key])

    def _portions(self, start: Start, count: int) -> list[slice]:
        """Slices of one size of the neurons that go back: of those that see little, more at a time.

        The last one may end behind them.
        """
        # Whole arrays are as many as those of the network, or fewer: one size for all layers.
        entries = max(start.plan.entries, 1)
        more = max(self.planner.entries(start.plan) // entries, 1)
        size = min(power_below(self.width * more // 2), LARGEST_PORTION)
        return [slice(begin, begin + size) for begin in range(0, count, size)]

    def _both_ends(self, start: Start, of_box, entry, size: int):
        """Boxes, places and rows of neurons, filled up to a size: each entry, and minus it."""
        pad = (0, size - len(of_box))
        at = np.unravel_index(np.pad(entry, pad), start.known.constant.shape)
        places = np.stack(at, axis=1).astype(np.int32)
        return np.pad(of_box, pad).astype(np.int32), places, _units(places, start.plan.first.out)

    # -- passes ----------------------------------------------------------------------------------

    def _view(self, segment: Segment, sight: Sight, index: int | None) -> View:
        """How the segment of a layer is seen, or one where rows begin."""
        block = None
        if index is not None:
            shape = self.planner.shapes[False, index]
            # A maximum's argument has one axis more.
            block = sight.out.like(sight.out.axes[: len(shape)]), shape
        shapes = sight.shapes[: len(segment.sources)]
        return View(sight, block, roundings(segment, list(shapes), len(self.layers) + 1))

    def _back(self, start: Start, boxes, places, rows, lines=None, full: bool = False) -> Way:
        """Bounds of rows (neurons, rows of each, ...) of a segment: one pass back.

        Args:
            lines: of each layer, where rows have their own.
            full: whether coefficients, minimisers and cotangents are asked for.
        """
        arriving: dict[Source, tuple] = {}
        met: dict[int, tuple] = {}
        zeros = np.zeros(rows.shape[:2])
        sums = Sums(zeros, zeros, zeros)

        def go(segment: Segment, sources, view: View, known: Known, cotangents, own) -> None:
            nonlocal sums
            portion = Rows(boxes, _places(places, view.sight.moves), sums)
            out, sums = through(segment, view, known, portion, cotangents, own)
            for source, cotangent in zip(sources, out, strict=True):
                arriving[source] = (*arriving.get(source, ()), cotangent)

        go(start.segment, start.sources, start.first, start.known, (rows,), None)
        for index, view in start.views.items():
            met[index] = arriving.pop((False, index))
            segment = self.layers[index].segment
            own = None if lines is None else lines[index]
            go(segment, self._sources(index), view, self.known[index], met[index], own)
        inputs = range(self.planner.inputs)
        shapes = tuple(self.planner.shapes[True, k] for k in inputs)
        goal = Goal(start.plan.inputs, shapes, self.boxed, len(self.layers) + 1, full)
        moves = any(window.moves for window in goal.windows)
        arrived = tuple(arriving.get((True, k), ()) for k in inputs)
        portion = Rows(boxes, _places(places, moves), sums)
        bound, coefficients, minimisers = finish(self.sets, goal, portion, arrived)
        return Way(bound, coefficients, minimisers, met)

    def _searched(self, start: Start, where, way: Way, steps: int):
        """The best bounds of a pass and a few steps after it, and the lines of the best step.

        These are the steps of `solvers.Damped`: a pass forwards at the corner that the pass back
        before it proposed, which moves the slopes of the lines, and a pass back with these.
        """
        boxes, places, rows = where
        damped = Damped()
        first = np.asarray(way.bound)
        best, kept = np.full_like(first, -np.inf), None
        states: dict[int, State] = {}
        inputs = way.minimisers
        for count in range(steps):
            late = max(count - damped.whole, 0)
            share = 1.0 if late == 0 else 0.5 * damped.settle / (damped.settle + late)
            inputs = tuple(
                new if share == 1 else (1 - share) * old + share * new
                for old, new in zip(inputs, way.minimisers, strict=True)
            )
            values: dict[Source, Any] = {(True, k): x for k, x in enumerate(inputs)}
            lines: dict[int, Lines] = {}
            for index, view in reversed(start.views.items()):
                layer, curve = self.layers[index], self.curves[index]
                state = states.get(index) or first_state(view, curve, rows.shape[:2])
                state = State(state.fractions, state.memory, np.int32(count), np.float64(share))
                portion = Rows(boxes, _places(places, view.sight.moves), None)
                values[False, index], lines[index], states[index] = forward(
                    layer, view, (self.known[index], curve), portion,
                    self._of(values, self._sources(index)), way.cotangents[index], state,
                )  # fmt: skip
            way = self._back(start, boxes, places, rows, lines, full=True)
            bound = np.asarray(way.bound)
            higher = bound > best
            kept = lines if kept is None else _chosen(higher, lines, kept)
            best = np.where(higher, bound, best)
        return np.maximum(best, first), kept

    def slopes(
        self, index: int, entry: np.ndarray, steps: int, pause: Callable[[], None]
    ) -> list[tuple]:
        """Slopes for both ends of entries of a layer's argument on the first box, by a few steps.

        The lines below and above of every layer before it: arrays (entries, 2, ...), the lower end
        first. `pause` is called between portions.
        """
        start = self._start(index, self._measured(index)[2], windows=False)
        found = []
        for some in self._portions(start, len(entry)):
            pause()
            e = entry[some]
            where = self._both_ends(start, np.zeros(len(e), int), e, some.stop - some.start)
            way = self._back(start, *where, full=True)
            lines = self._searched(start, where, way, steps)[1]
            assert lines is not None
            found.append(
                [
                    tuple(np.asarray(x)[: len(e)] for x in (line.low_slope, line.high_slope))
                    for line in (lines[k] for k in sorted(lines))
                ]
            )
        return [
            tuple(np.concatenate(side) for side in zip(*layer, strict=True))
            for layer in zip(*found, strict=True)
        ]

    def bound(self, of_box: np.ndarray, rows: np.ndarray) -> Found:
        """Lower bounds of rows . outputs, each row (count, outputs) over the box given with it."""
        known = self.known_last
        start = self._start(None, known, windows=False)
        # Two rows of a box at a time, as of neurons: the programs are the same.
        order, pairs, place = _pairs(of_box)
        size = max(self.width // 2, 1)
        shape = known.constant.shape
        found: list[list] = [[], [], []]
        for begin in range(0, len(pairs), size):
            some = slice(begin, min(begin + size, len(pairs)))
            boxes = np.zeros(size, np.int32)
            boxes[: some.stop - begin] = pairs[some]
            at = (place[:, 0] >= begin) & (place[:, 0] < begin + size)
            both = np.zeros((size, 2, *shape))
            both[place[at, 0] - begin, place[at, 1]] = rows[order[at]]
            nowhere = np.zeros((size, 0), np.int32)
            way = self._back(start, boxes, nowhere, both, full=True)
            for column, x in zip(found, (way.bound, way.coefficients, way.minimisers), strict=True):
                x = np.asarray(x)[..., None] if column is found[0] else _flat(x)
                column.append(x[place[at, 0] - begin, place[at, 1]])
        if not pairs.size:
            shapes = (self.planner.shapes[True, k] for k in range(self.planner.inputs))
            entries = sum(map(math.prod, shapes))
            return Found(np.zeros(0), np.zeros((0, entries)), np.zeros((0, entries)))
        back = np.argsort(order, kind="stable")
        bound, coefficients, minimisers = (np.concatenate(column)[back] for column in found)
        return Found(bound[:, 0], coefficients, minimisers)


def rows_at_once(parts: Split, memory: float) -> int:
    """How many rows go back through a network at a time, with so many GiB: a power of two."""
    neurons = sum(math.prod(layer.shape) for layer in parts.layers) or 1
    rows = min(int(memory * 2**30 / (8 * 32 * neurons)), 4096)
    if jax.default_backend() == "cpu":
        rows = min(rows, max(LANE_NUMBERS // neurons, 16), 1024)
    return power_below(rows)


def exact(segment: Segment) -> bool:
    """Whether intervals of a box lose nothing: at most one node adds entries up."""
    mixing = (MatMul, Conv, Sum, Reduce, WindowSum)
    return sum(isinstance(node.operation, mixing) for node in segment.nodes) <= 1


def _size(low, high) -> np.ndarray:
    return np.maximum(np.abs(low), np.abs(high))


def _places(places: np.ndarray, moves: bool) -> np.ndarray:
    """Programs that need no places are the same for all neurons."""
    return places if moves else places[:, :0]


def _pairs(of_box: np.ndarray):
    """Rows two by two, each pair of one box.

    The rows sorted by box, the box of each pair, and for each sorted row its pair and its place
    there.
    """
    order = np.argsort(of_box, kind="stable")
    boxes, counts = np.unique(of_box, return_counts=True)
    of_each = -(-counts // 2)
    first_row, first_pair = np.cumsum(counts) - counts, np.cumsum(of_each) - of_each
    rank = np.arange(len(order)) - np.repeat(first_row, counts)
    place = np.stack([np.repeat(first_pair, counts) + rank // 2, rank % 2], axis=1)
    return order, np.repeat(boxes, of_each), place


def _flat(arrays: tuple) -> np.ndarray:
    """Arrays (pairs, 2, ...) with all other axes flattened and joined."""
    return np.concatenate([np.asarray(x).reshape(*x.shape[:2], -1) for x in arrays], axis=2)


def _units(places: np.ndarray, window: Window) -> np.ndarray:
    """Rows that pick entries, and the same rows negated, as their neurons see them."""
    rows = np.zeros((len(places), 2, *window.sizes))
    at = [
        np.zeros(len(places), int) if axis.step else places[:, k]
        for k, axis in enumerate(window.axes)
    ]
    rows[(np.arange(len(places)), 0, *at)] = 1
    rows[(np.arange(len(places)), 1, *at)] = -1
    return rows


def _chosen(higher: np.ndarray, new: dict[int, Lines], old: dict[int, Lines]) -> dict[int, Lines]:
    """The new lines of rows that are better with them, the old ones of the others."""

    def pick(a, b):
        a, b = np.asarray(a), np.asarray(b)
        return np.where(higher.reshape(*higher.shape, *(1,) * (a.ndim - 2)), a, b)

    return {k: jax.tree.map(pick, new[k], old[k]) for k in new}
