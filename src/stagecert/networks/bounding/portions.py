"""Programs for passes back: each takes a portion of rows through one segment.

A row is a linear function whose lower bound is wanted, on one box. Rows of one neuron see the same
windows of everything (see `windows`), so they are kept together: arrays of a portion have an axis
of neurons and one of their rows. What belongs to boxes has an axis of boxes.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.networks.activations.wedges import AbstractWedge
from stagecert.networks.bounding.backward import (
    Lines,
    Span,
    Sums,
    crossed,
    finished,
    lines_at,
    pulled,
    segment_span,
    uncrossed,
)
from stagecert.networks.bounding.intervals import segment_interval
from stagecert.networks.bounding.relaxation import Layer, Segment
from stagecert.networks.bounding.search import magnitude
from stagecert.networks.bounding.windows import Sight, Stretch, Window, inside, look, whole
from stagecert.sets import AbstractSet, Product
from stagecert.solvers.damped import Damped, first_memory


class Known(eqx.Module):
    """What the boxes determine of a segment, with an axis of boxes: how large its output gets, and
    the lines of the activation that follows. The constant part is the same for all boxes."""

    span: Span
    constant: Any
    lines: Lines | None


class Curve(eqx.Module):
    """A layer's wedge on each box, and the widths of the intervals that it was made for."""

    wedge: AbstractWedge
    unit: Any


class Rows(NamedTuple):
    """A portion of rows: the box of each neuron, its place, and what its rows add up to so far.

    One is made for each program that is called; modules would take a tenth of a millisecond.
    """

    boxes: Any
    places: Any
    sums: Sums | None


class State(eqx.Module):
    """Where the search stands at a layer; see `solvers.Damped`.

    fractions: where in the wedge the block is. memory: what is remembered of the wedge's pieces,
    below and above. count: how many steps were made. share: how far this one goes to the corner.
    """

    fractions: Any
    memory: Any
    count: Any
    share: Any


class _Setting:
    """What a program depends on besides arrays. It is looked up at every call: hashed only once."""

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))  # type: ignore

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class View(_Setting):
    """How a pass sees a segment: all that its program depends on, besides the segment itself.

    Attributes:
        sight: what is seen of the segment.
        block: what is seen of the block behind it, and the block's shape; None where rows begin.
        terms: the roundings that are charged.
    """

    sight: Sight
    block: tuple[Window, tuple[int, ...]] | None
    terms: int

    __hash__ = _Setting.__hash__


@dataclass(frozen=True)
class Goal(_Setting):
    """How passes end: all that the last program depends on.

    Attributes:
        windows, shapes: of the inputs.
        boxed: whether the inputs' sets are boxes: windows of these are boxes too.
        consumers: how many segments may have read a value.
        full: whether coefficients and minimisers are asked for.
    """

    windows: tuple[Window, ...]
    shapes: tuple[tuple[int, ...], ...]
    boxed: bool
    consumers: int
    full: bool

    __hash__ = _Setting.__hash__


@eqx.filter_jit
def reach(layer: Layer, pairs: tuple, sizes: tuple):
    """Interval of a layer's argument by intervals, where its activation bends there, its span, its
    constant part."""

    def one(pairs, sizes):
        low, high = segment_interval(layer.segment, (), pairs)
        bent = layer.bent(low, high).reshape(-1)
        return low, high, bent, segment_span(layer.segment, (), sizes)

    return *jax.vmap(one)(pairs, sizes), _constant(layer.segment, sizes)


@eqx.filter_jit
def bent_at(layer: Layer, low, high):
    """Which entries feed an activation that is not linear on its interval, for each box."""
    return jax.vmap(lambda low, high: layer.bent(low, high).reshape(-1))(low, high)


@eqx.filter_jit
def span_of(segment: Segment, sizes: tuple) -> tuple[Span, Any]:
    spans = jax.vmap(lambda sizes: segment_span(segment, (), sizes))(sizes)
    return spans, _constant(segment, sizes)


def _constant(segment: Segment, sizes: tuple):
    """The segment at zero."""
    return segment((), tuple(jnp.zeros(size.shape[1:], size.dtype) for size in sizes))


@eqx.filter_jit
def block_of(layer: Layer, low, high, span: Span):
    """What a layer puts out: its interval, how large it gets, lines around it, its wedge."""

    def one(low, high, span):
        image = layer.image(low, high)
        wedge = layer.wedge(low, high)
        lines = lines_at(wedge, 0.5 * low + 0.5 * high, wedge.slopes(), span)
        return image, magnitude(*image), lines, Curve(wedge, layer.unit(low, high))

    return jax.vmap(one)(low, high, span)


def _seen(x, window: Window, portion: Rows):
    """What a window shows of x[box] for each neuron; x has an axis of boxes.

    Zeros outside of the array. Where all see the same, the axis of neurons has length one. Axes
    that x has behind those of the window are whole.
    """
    shape = x.shape[1:]
    window = window.like([*window.axes, *(Stretch(0, n) for n in shape[len(window.axes) :])])
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
    """vmap over neurons; `tree` may have length one there, and is then the same for all."""
    axes = jax.tree.map(lambda x: None if len(x) == 1 else 0, tree)
    tree = jax.tree.map(lambda x: x[0] if len(x) == 1 else x, tree)
    return jax.vmap(function, in_axes=(axes, *(0 for _ in others)))(tree, *others)


def _of_segment(known: Known, view: View, portion: Rows) -> tuple[Span, Any]:
    """What is seen of a segment's span and of its constant part."""
    total = known.span.total
    span = Span(
        _seen(known.span.magnitude, view.sight.out, portion),
        total if len(total) == 1 else total[portion.boxes],
    )
    return span, _seen(known.constant[None], view.sight.out, portion)


@functools.partial(jax.jit, static_argnums=1)
def through(
    segment: Segment, view: View, known: Known, portion: Rows, cotangents: tuple, lines: Any
):
    """Rows through a segment: cotangents of what it reads, and the sums.

    Args:
        cotangents: those of the block behind the segment, from all that read it, or of its output.
        lines: those of the rows; None: those of their boxes.
    """
    sight = view.sight
    g: Any = sum(cotangents[1:], start=cotangents[0])
    of_boxes = None
    if known.lines is not None and lines is None:
        of_boxes = jax.tree.map(lambda x: _seen(x, view.block[0], portion), known.lines)  # type: ignore
    zeros = tuple(
        jnp.zeros(window.sizes, g.dtype) for window in sight.windows[: len(segment.sources)]
    )

    def one(seen, place, sums, g, own):
        of_box, (span, constant) = seen
        _, back = jax.vjp(lambda sources: sight.run(segment, sources, place), zeros)

        def row(sums, g, own):
            line = of_box if own is None else own
            crossing = uncrossed(g) if line is None else crossed(line, g)
            (out,) = back(crossing.cotangent)
            return out, pulled(sums, crossing, constant, span, view.terms)

        return jax.vmap(row)(sums, g, own)

    seen = of_boxes, _of_segment(known, view, portion)
    return _over(one, seen, portion.places, portion.sums, g, lines)


@eqx.filter_jit
def forward(
    layer: Layer, view: View, of_boxes: tuple[Known, Curve], portion: Rows, sources: tuple,
    cotangents: tuple, state: State,
):  # fmt: skip
    """A step of the search at one layer: the block, lines for the next pass back, the state.

    Args:
        of_boxes: what boxes determine of the layer.
        sources: what the segment reads at the rows' points.
        cotangents: of the block, in the pass before: they say in which corner of the wedge it is.
    """
    known, curve = of_boxes
    assert view.block is not None
    window, shape = view.block
    g: Any = sum(cotangents[1:], start=cotangents[0])
    # Where nothing pulls, the block stays where it is.
    still = jnp.where(state.count == 0, 1.0, state.fractions)
    corner = jnp.where(g > 0, 0.0, jnp.where(g < 0, 1.0, still))

    def one(seen, place, sources, corner, fractions, memory):
        curve, (span, constant) = seen
        there = inside(window, shape, place)

        def row(sources, corner, fractions, memory):
            x = view.sight.run(layer.segment, sources, place) + constant
            first = first_memories(curve)
            memory = jax.tree.map(lambda a, b: jnp.where(state.count == 0, a, b), first, memory)

            def treat(arguments, piece):
                return pieces.value_of(arguments), Damped().remember(arguments, piece, state.count)

            lower, below = pieces.evaluate(curve.wedge.lower, (x,), treat, memory[0])
            upper, above = pieces.evaluate(curve.wedge.upper, (x,), treat, memory[1])
            weights = tuple(tuple(m.weights for m in side) for side in (below, above))
            lines = lines_at(curve.wedge, x, weights, span)
            fractions = (1 - state.share) * fractions + state.share * corner
            block = (1 - fractions) * lower + fractions * upper
            if window.leaves(shape):
                block, lines = jax.tree.map(
                    lambda s: jnp.where(there if s.ndim == there.ndim else there[..., None], s, 0),
                    (block, lines),
                )
            return block, lines, fractions, (tuple(below), tuple(above))

        return jax.vmap(row)(sources, corner, fractions, memory)

    seen = (
        jax.tree.map(lambda x: _seen(x, window, portion), curve),
        _of_segment(known, view, portion),
    )
    block, lines, fractions, memory = _over(
        one, seen, portion.places, sources, corner, state.fractions, state.memory
    )
    return block, lines, State(fractions, memory, state.count + 1, state.share)


def first_memories(curve: Curve):
    """What is known of the pieces of a wedge before the first step; for one box."""
    return tuple(
        tuple(first_memory((curve.unit, weights)) for weights in side)
        for side in curve.wedge.slopes()
    )


def first_state(view: View, curve: Curve, like: tuple[int, ...]) -> State:
    """A state of which the first step reads nothing; `like` are the axes before the block's."""
    assert view.block is not None
    sizes, rank = view.block[0].sizes, len(view.block[1])

    def shown(x):
        return jax.ShapeDtypeStruct((*sizes, *x.shape[1 + rank :]), x.dtype)

    memory = jax.eval_shape(first_memories, jax.tree.map(shown, curve))
    zeros = jax.tree.map(lambda x: np.zeros((*like, *x.shape), x.dtype), memory)
    return State(np.zeros((*like, *sizes)), zeros, np.int32(0), 1.0)


@functools.partial(jax.jit, static_argnums=1)
def finish(sets: AbstractSet, goal: Goal, portion: Rows, cotangents: tuple):
    """The bounds; if `goal.full` also the coefficients of the inputs, and the minimisers."""
    entries = sum(map(math.prod, goal.shapes))
    assert portion.sums is not None
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
                return end.bound, (), ()
            return end.bound, of_inputs, tuple(jax.tree.leaves(end.minimiser))

        return jax.vmap(row)(sums, of_inputs)

    return _over(one, sets, portion.sums, of_inputs)
