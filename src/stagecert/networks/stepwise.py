"""One pass back, compiled layer by layer: for deep networks, convolutions and many boxes.

The same bounds as `backward.dual_bound`, with the same charges for rounding. There, one program
goes back through all layers. Here, a program goes through one layer only: layers of the same kind
and shape share it, and so does every pass that crosses them, wherever it began. What a neuron does
not see is left out (see `windows`). Rows are worked off in portions, each with its own box.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks.backward import (
    Lines,
    Span,
    Sums,
    crossed,
    finished,
    lines_at,
    pulled,
    roundings,
    segment_span,
)
from stagecert.networks.intervals import segment_interval
from stagecert.networks.operations import Conv, MatMul, Reduce, Sum, WindowSum
from stagecert.networks.regions import Regions
from stagecert.networks.relaxation import Layer, Segment, Split
from stagecert.networks.search import magnitude
from stagecert.networks.windows import Plan, Planner, Sight, Source, Window, look, whole
from stagecert.sets import AbstractSet, Product

# Neurons that go back at a time, at most.
LARGEST_PORTION = 2048


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


class Known(eqx.Module):
    """What the boxes determine of a segment, with an axis of boxes: how large its output gets, and
    the lines of the activation that follows. The constant part is the same for all boxes."""

    span: Span
    constant: Any
    lines: Lines | None


class Rows(eqx.Module):
    """A portion of a pass: the box of each row, the place of its neuron, what is added up so far.

    Several rows of one box and place are together: `sums` have two axes.
    """

    boxes: Any
    places: Any
    sums: Sums


@dataclass(frozen=True)
class View:
    """How a pass sees a segment: all that its program depends on, besides the segment itself.

    Attributes:
        sight: what is seen of the segment.
        block: what is seen of the block behind it, and the block's shape; None where rows begin.
        terms: the roundings that are charged.
    """

    sight: Sight
    block: tuple[Window, tuple[int, ...]] | None
    terms: int


@dataclass(frozen=True, eq=False)
class Start:
    """A segment from which rows go back: with its sources numbered from zero, and what they are."""

    segment: Segment
    sources: tuple[Source, ...]
    plan: Plan
    known: Known


@dataclass(frozen=True)
class Goal:
    """How passes end: all that the last program depends on.

    Attributes:
        windows, shapes: of the inputs.
        boxed: whether the inputs' sets are boxes: windows of these are boxes too.
        consumers: how many segments may have read a value.
        full: whether coefficients and minimisers are asked for; then windows are whole.
    """

    windows: tuple[Window, ...]
    shapes: tuple[tuple[int, ...], ...]
    boxed: bool
    consumers: int
    full: bool


class Passes:
    """Intervals of all activations' arguments for a batch of boxes, and passes back from there.

    Args:
        parts: the network in float64.
        regions: the boxes.
        rows_at_once: how many rows go back at a time.
        refine: whether intervals are tightened by passes back where that can help.
        count: only the first so many boxes matter; the others fill up the batch.
        stop: asked between steps; once it says so, `complete` is False and nothing else counts.
        share: called with how many of how many layers are done.

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
        refine: bool = True,
        count: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        share: Callable[[int, int], None] = lambda done, size: None,
    ):
        self.sets, self.width = regions.sets, rows_at_once
        self.count = regions.count if count is None else count
        self.boxed = regions.boxed
        self.layers = [
            eqx.tree_at(lambda layer: layer.segment, layer, local(layer.segment))
            for layer in parts.layers
        ]
        self.sources = [layer.segment.sources for layer in parts.layers]
        self.last = local(parts.last)
        self.planner = Planner(parts.layers, regions.shapes)
        self.parts = parts
        self.pairs: dict[Source, Any] = {(True, k): p for k, p in enumerate(regions.boxes)}
        self.sizes: dict[Source, Any] = {k: magnitude(*p) for k, p in self.pairs.items()}
        self.known: list[Known] = []
        self.arguments: tuple = ()
        self.complete = False
        for index, layer in enumerate(self.layers):
            if stop() or not self._add(index, layer, refine, stop):
                return
            share(index + 1, len(self.layers))
        self.known_last = Known(*_span(self.last, self._of(self.sizes, parts.last.sources)), None)
        self.complete = True

    def _of(self, known: dict, sources) -> tuple:
        return tuple(known[source] for source in sources)

    def _add(self, index: int, layer: Layer, refine: bool, stop) -> bool:
        sources = self.sources[index]
        pairs, sizes = self._of(self.pairs, sources), self._of(self.sizes, sources)
        low, high, bent, span, constant = _reach(layer, pairs, sizes)
        of_inputs = all(is_input for is_input, _ in sources)
        if refine and not (of_inputs and self.boxed and exact(layer.segment)):
            of_box, entry = np.nonzero(np.asarray(bent)[: self.count])
            if len(of_box):
                low, high = np.array(low), np.array(high)
                known = Known(span, constant, None)
                if not self._refine(index, known, (low, high), (of_box, entry), stop):
                    return False
                low, high = jnp.asarray(low), jnp.asarray(high)
        image, size, lines = _block(layer, low, high, span)
        self.known.append(Known(span, constant, lines))
        self.pairs[False, index], self.sizes[False, index] = image, size
        self.arguments = (*self.arguments, (low, high))
        return True

    def _refine(self, index: int, known: Known, ends, chosen, stop) -> bool:
        """Tightens the chosen entries of a layer's argument; False if there is no time."""
        flat_low, flat_high = (x.reshape(len(x), -1) for x in ends)
        of_box, entry = chosen
        shape = known.constant.shape
        plan = self.planner.plan(self.parts.layers[index].segment, shape)
        start = Start(self.layers[index].segment, self.sources[index], plan, known)
        portion = self._portion(plan)
        for begin in range(0, len(of_box), portion):
            if stop():
                return False
            b, e = of_box[begin : begin + portion], entry[begin : begin + portion]
            pad = portion - len(b)
            places = np.stack(np.unravel_index(np.pad(e, (0, pad)), shape), axis=1)
            both = _units(places, plan.first.out)
            found = self._back(start, np.pad(b, (0, pad)), places, both)
            least, minus_most = np.asarray(found)[: len(b)].T
            flat_low[b, e] = np.maximum(flat_low[b, e], least)
            flat_high[b, e] = np.minimum(flat_high[b, e], -minus_most)
        return True

    def _portion(self, plan: Plan) -> int:
        """How many neurons go back at a time: those that see little, more of them."""
        every = sum(math.prod(shape) for shape in self.planner.shapes.values())
        neurons = max(self.width * every // (2 * max(plan.entries, 1)), 1)
        return min(1 << neurons.bit_length() - 1, LARGEST_PORTION)

    def _back(self, start: Start, boxes, places, rows, full: bool = False):
        """Bounds of rows (places, rows of a place, ...) of a segment: one pass back.

        `full` asks for coefficients and minimisers too.
        """
        consumers = len(self.layers) + 1
        arriving: dict[Source, tuple] = {}
        sums = Sums.none(rows.shape[:2], jnp.float64)

        def go(at: Start, sight: Sight, block, cotangents: tuple) -> None:
            nonlocal sums
            shapes = sight.shapes[: len(at.sources)]
            view = View(sight, block, roundings(at.segment, list(shapes), consumers))
            # Programs that need no places are the same for all neurons.
            portion = Rows(boxes, places if sight.moves else places[:, :0], sums)
            out, sums = _through(at.segment, view, at.known, portion, cotangents)
            for source, cotangent in zip(at.sources, out, strict=True):
                arriving[source] = (*arriving.get(source, ()), cotangent)

        go(start, start.plan.first, None, (rows,))
        for index, sight in start.plan.steps:
            shape = self.planner.shapes[False, index]
            # A maximum's argument has one axis more.
            window = sight.out.like(sight.out.axes[: len(shape)])
            layer = Start(
                self.layers[index].segment, self.sources[index], start.plan, self.known[index]
            )
            go(layer, sight, (window, shape), arriving.pop((False, index)))
        inputs = range(self.planner.inputs)
        shapes = tuple(self.planner.shapes[True, k] for k in inputs)
        goal = Goal(start.plan.inputs, shapes, self.boxed, consumers, full)
        arrived = tuple(arriving.get((True, k), ()) for k in inputs)
        moves = any(window.moves for window in goal.windows)
        portion = Rows(boxes, places if moves else places[:, :0], sums)
        return _finish(self.sets, goal, portion, arrived)

    def bound(self, of_box: np.ndarray, rows: np.ndarray) -> Found:
        """Lower bounds of rows . outputs, each row (count, outputs) over the box given with it."""
        known, last = self.known_last, self.parts.last
        plan = self.planner.plan(last, known.constant.shape)
        start = Start(self.last, last.sources, plan, known)
        parts = []
        for begin in range(0, len(of_box), self.width):
            b, r = of_box[begin : begin + self.width], rows[begin : begin + self.width]
            pad = self.width - len(b)
            boxes, some = np.pad(b, (0, pad)), np.pad(r, ((0, pad), (0, 0)))
            nowhere = np.zeros((len(boxes), 0), int)
            found = self._back(start, boxes, nowhere, some[:, None], full=True)
            parts.append([np.asarray(x)[: len(b), 0] for x in found])
        if not parts:
            shapes = (self.planner.shapes[True, k] for k in range(self.planner.inputs))
            entries = sum(map(math.prod, shapes))
            return Found(np.zeros(0), np.zeros((0, entries)), np.zeros((0, entries)))
        return Found(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def local(segment: Segment) -> Segment:
    """The segment with its sources numbered from zero: equal layers look equal."""
    return Segment(
        segment.nodes, tuple((False, k) for k in range(len(segment.sources))), segment.output
    )


def exact(segment: Segment) -> bool:
    """Whether intervals of a box lose nothing: at most one node adds entries up."""
    mixing = (MatMul, Conv, Sum, Reduce, WindowSum)
    return sum(isinstance(node.operation, mixing) for node in segment.nodes) <= 1


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


# -- programs --------------------------------------------------------------------------------------


@eqx.filter_jit
def _reach(layer: Layer, pairs: tuple, sizes: tuple):
    """Interval of a layer's argument by intervals, where its activation bends there, its span, its
    constant part."""

    def one(pairs, sizes):
        low, high = segment_interval(layer.segment, (), pairs)
        bent = layer.bent(low, high).reshape(-1)
        return low, high, bent, segment_span(layer.segment, (), sizes)

    return *jax.vmap(one)(pairs, sizes), _constant(layer.segment, sizes)


@eqx.filter_jit
def _span(segment: Segment, sizes: tuple) -> tuple[Span, Any]:
    spans = jax.vmap(lambda sizes: segment_span(segment, (), sizes))(sizes)
    return spans, _constant(segment, sizes)


def _constant(segment: Segment, sizes: tuple):
    """The segment at zero."""
    return segment((), tuple(jnp.zeros(size.shape[1:], size.dtype) for size in sizes))


@eqx.filter_jit
def _block(layer: Layer, low, high, span: Span):
    """What a layer puts out: its interval, how large it gets, and lines around it."""

    def one(low, high, span):
        image = layer.image(low, high)
        wedge = layer.wedge(low, high)
        lines = lines_at(wedge, 0.5 * low + 0.5 * high, wedge.slopes(), span)
        return image, magnitude(*image), lines

    return jax.vmap(one)(low, high, span)


def _seen(x, window: Window, portion: Rows):
    """What a window shows of x[box] for each place; x has an axis of boxes.

    Zeros outside of the array. Where all see the same, the axis of places has length one.
    """
    shape = x.shape[1:]
    if not window.moves:
        rows = x if len(x) == 1 else x[portion.boxes]
        return jax.vmap(lambda one: look(one, whole(shape), window, shape, ()))(rows)
    margins = window.margins(shape)
    padded = jnp.pad(x, ((0, 0), *margins))

    def one(box, place):
        begin = [k + before for k, (before, _) in zip(window.begin(place), margins, strict=True)]
        return jax.lax.dynamic_slice(padded, (box, *begin), (1, *window.sizes))[0]

    return jax.vmap(one)(portion.boxes, portion.places)


def _over(function, tree, *others):
    """vmap over places; `tree` may have length one there, and is then the same for all."""
    axes = jax.tree.map(lambda x: None if len(x) == 1 else 0, tree)
    tree = jax.tree.map(lambda x: x[0] if len(x) == 1 else x, tree)
    return jax.vmap(function, in_axes=(axes, *(0 for _ in others)))(tree, *others)


@eqx.filter_jit
def _through(segment: Segment, view: View, known: Known, portion: Rows, cotangents: tuple):
    """Rows through a segment: cotangents of what it reads, and the sums.

    `cotangents` are those of the block behind it, from all that read it, or of its output.
    """
    sight = view.sight
    g = sum(cotangents[1:], start=cotangents[0])
    # Slopes are those of the argument, offsets those of the block: for maxima they differ.
    lines = None
    if known.lines is not None:
        assert view.block is not None
        as_argument = lambda x: _seen(x, sight.out, portion)  # noqa: E731
        as_block = lambda x: _seen(x, view.block[0], portion)  # noqa: E731
        lines = Lines(
            as_argument(known.lines.low_slope), as_block(known.lines.low_offset),
            as_argument(known.lines.high_slope), as_block(known.lines.high_offset),
        )  # fmt: skip
    total = known.span.total
    span = Span(
        _seen(known.span.magnitude, sight.out, portion),
        total if len(total) == 1 else total[portion.boxes],
    )
    constant = _seen(known.constant[None], sight.out, portion)
    zeros = tuple(
        jnp.zeros(window.sizes, g.dtype) for window in sight.windows[: len(segment.sources)]
    )

    def one(seen, place, sums, g):
        lines, span, constant = seen
        _, back = jax.vjp(lambda sources: sight.run(segment, sources, place), zeros)

        def row(sums, g):
            if lines is not None:
                sums, g = crossed(sums, lines, g, math.prod(view.block[1]))
            (out,) = back(g)
            return out, pulled(sums, g, constant, span, view.terms)

        return jax.vmap(row)(sums, g)

    return _over(one, (lines, span, constant), portion.places, portion.sums, g)


@eqx.filter_jit
def _finish(sets: AbstractSet, goal: Goal, portion: Rows, cotangents: tuple):
    """The bounds; if `goal.full` also the coefficients of the inputs, and the minimisers."""
    entries = sum(map(math.prod, goal.shapes))
    of_inputs = tuple(
        sum(some[1:], start=some[0])
        if some
        else jnp.zeros((*portion.sums.total.shape, *window.sizes))
        for some, window in zip(cotangents, goal.windows, strict=True)
    )
    if goal.boxed:
        boxes = sets.parts if isinstance(sets, Product) else (sets,)
        boxes = tuple(
            jax.tree.map(lambda x, w=window: _seen(x, w, portion), box)
            for box, window in zip(boxes, goal.windows, strict=True)
        )
        sets = boxes[0] if len(boxes) == 1 else Product(*boxes)
    else:
        sets = jax.tree.map(lambda x: x if len(x) == 1 else x[portion.boxes], sets)

    def one(sets, sums, of_inputs):
        def row(sums, of_inputs):
            gradient = of_inputs if len(of_inputs) > 1 else of_inputs[0]
            end = finished(sums, sets, gradient, entries, goal.consumers)
            if not goal.full:
                return end.bound
            flat = lambda tree: jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
            return end.bound, flat(gradient), flat(end.minimiser)

        return jax.vmap(row)(sums, of_inputs)

    return _over(one, sets, portion.sums, of_inputs)
