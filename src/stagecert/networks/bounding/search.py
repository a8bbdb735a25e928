"""Searching for tight bounds: a grid of (box, objective) problems, handed to the core, certified.

The search runs on the core's Problems, in single precision unless asked otherwise. What it finds
are a point and, for every layer, where to touch the wedge; both are evaluated anew in float64, the
bound by `backward.dual_bound`, which accounts for rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.batch import BatchSolution, Certified
from stagecert.codes import CROSSED
from stagecert.networks.bounding.backward import (
    Span,
    dual_bound,
    lines_at,
    segment_span,
)
from stagecert.networks.bounding.relaxation import Layer, LayerStage, Segment, linear_objective
from stagecert.powers import power_above
from stagecert.problem import Problem, as_arrays
from stagecert.reformulation import Point
from stagecert.searching import search_lanes
from stagecert.sets import AbstractSet
from stagecert.solvers import Damped, Polish


class Relaxed(eqx.Module):
    """Everything that one box determines: wedges, how wide they are, magnitudes for rounding.

    Arrays have a leading axis of boxes.
    """

    arguments: tuple  # (low, high) of every layer's argument
    wedges: tuple
    spans: tuple[Span, ...]
    last_span: Span


def magnitude(low, high):
    """The largest absolute value in an interval."""
    return jnp.maximum(jnp.abs(low), jnp.abs(high))


def relax(layers: tuple[Layer, ...], last: Segment, boxes: tuple, arguments: tuple) -> Relaxed:
    """Wedges and spans from intervals of the layers' arguments; all have an axis of boxes."""
    sizes = {(True, k): _magnitudes(*pair) for k, pair in enumerate(boxes)}
    spans, wedges = [], []
    for index, (layer, pair) in enumerate(zip(layers, arguments, strict=True)):
        read = tuple(sizes[source] for source in layer.segment.sources)
        span, wedge, sizes[False, index] = _relaxed(layer.local, read, pair)
        spans.append(span)
        wedges.append(wedge)
    last_span = _spans(last.local, tuple(sizes[source] for source in last.sources))
    return Relaxed(arguments, tuple(wedges), tuple(spans), last_span)


_magnitudes = jax.jit(magnitude)


@eqx.filter_jit
def _relaxed(layer: Layer, sizes: tuple, interval: tuple):
    """Of one layer: its span, its wedge, and how large what it puts out gets."""

    def one(sizes, interval):
        return (
            segment_span(layer.segment, (), sizes),
            layer.wedge(*interval),
            magnitude(*layer.image(*interval)),
        )

    return jax.vmap(one)(sizes, interval)


@eqx.filter_jit
def _spans(segment: Segment, sizes: tuple) -> Span:
    return jax.vmap(lambda sizes: segment_span(segment, (), sizes))(sizes)


def first_lines(relaxed: Relaxed) -> tuple:
    """Lines that touch each wedge in the middle of its interval; for one box."""
    return tuple(
        lines_at(wedge, 0.5 * low + 0.5 * high, wedge.slopes(), span)
        for wedge, span, (low, high) in zip(
            relaxed.wedges, relaxed.spans, relaxed.arguments, strict=True
        )
    )


@eqx.filter_jit
def backward_bounds(layers, last: Segment, relaxed: Relaxed, inputs: AbstractSet, rows):
    """One pass back for every (box, row): (boxes, rows, ...) arrays of a DualBound."""

    def one_box(relaxed, inputs, rows):
        lines = first_lines(relaxed)
        return jax.vmap(
            lambda row: dual_bound(
                layers, last, lines, relaxed.spans, relaxed.last_span, inputs, row
            )
        )(rows)

    return jax.vmap(one_box)(relaxed, inputs, rows)


def hints(problem: Problem):
    """For every nonsmooth piece of the wedges: the width of its interval, and first weights."""
    stages = []
    for stage in problem.stages:
        low, high = stage.wedge.slopes()  # type: ignore
        unit = stage.unit  # type: ignore
        stages.append((tuple((unit, w) for w in low), tuple((unit, w) for w in high)))
    return tuple(stages), ()


def default_solvers(straight: bool) -> tuple:
    """Damped greedy steps, then polishing where those stall.

    Wedges made of lines have their optima in corners or at kinks; curved ones touch their optima
    somewhere in between, so the point has to settle sooner.
    """
    damped = Damped(hints=hints, patience=100)
    if not straight:
        damped = Damped(hints=hints, patience=100, whole=1, settle=3.0)
    return damped, Polish()


class Lanes(eqx.Module):
    """A grid of problems as the core's search sees it: one lane for each (box, row)."""

    problem: Problem
    start: Point


@eqx.filter_jit
def _lanes(layers, last, relaxed: Relaxed, inputs, rows, dtype) -> Lanes:
    """The lanes in the search's precision, starting from the corner of one pass back."""
    layers, last, relaxed, inputs, rows = as_arrays((layers, last, relaxed, inputs, rows), dtype)
    start = backward_bounds(layers, last, relaxed, inputs, rows)
    boxes, count = rows.shape[:2]

    def repeated(tree):
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), tree)

    def flat(tree):
        return jax.tree.map(lambda x: x.reshape(boxes * count, *x.shape[2:]), tree)

    stages = []
    for layer, wedge, (low, high) in zip(layers, relaxed.wedges, relaxed.arguments, strict=True):
        unit = repeated(layer.unit(low, high))
        stages.append(LayerStage(segment=layer.segment, wedge=repeated(wedge), unit=unit))
    objective = linear_objective(last, flat(rows))
    problem = Problem(repeated(inputs), tuple(stages), objective)
    return Lanes(problem, Point(flat(start.minimiser), flat(start.shares)))


def _axes(problem: Problem):
    """Which leaves of the lanes' problem have a leading axis of lanes: all but the weights."""

    def axis(path, _):
        names = [getattr(key, "name", None) for key in path]
        return None if "nodes" in names else 0

    return jax.tree_util.tree_map_with_path(axis, eqx.filter(problem, eqx.is_array))


class Check(eqx.Module):
    """What float64 says of a lane's point and proposal."""

    value: Any
    bound: Any
    inputs: Any
    crossing: Any


def _forward(layers, relaxed, point, dtype):
    arguments, blocks, excess = [], (), jnp.zeros((), dtype)
    for layer, wedge, theta in zip(layers, relaxed.wedges, point.fractions, strict=True):
        x = layer.segment(point.inputs, blocks)
        lower, upper = wedge.lower(x), wedge.upper(x)
        arguments.append(x)
        blocks = (*blocks, (1 - theta) * lower + theta * upper)
        size = 1 + jnp.abs(lower) + jnp.abs(upper)
        # As in the core: bounds may cross by a little of the search's rounding.
        over = jnp.max(lower - upper - 4e-6 * size, initial=0)
        excess = jnp.maximum(excess, over)
    return tuple(arguments), blocks, excess


def proposed_lines(layers, relaxed: Relaxed, proposal, dtype) -> tuple:
    """The lines that a search's proposal stands for; for one box and one row."""
    # Wedges made of lines need no point to touch them at.
    straight = all(wedge.straight for wedge in relaxed.wedges)
    at = [low for low, _ in relaxed.arguments]
    at = at if straight else _forward(layers, relaxed, proposal.point, dtype)[0]
    return tuple(
        lines_at(wedge, x, slopes, span)
        for wedge, x, slopes, span in zip(
            relaxed.wedges, at, proposal.slopes[0], relaxed.spans, strict=True
        )
    )


@eqx.filter_jit
def _checked(layers, last, relaxed, inputs, rows, points, proposals) -> Check:
    def one(relaxed, inputs, row, point, proposal):
        point = Point(inputs.project(point.inputs), point.fractions)
        _, blocks, excess = _forward(layers, relaxed, point, rows.dtype)
        value = jnp.sum(row * last(point.inputs, blocks))
        lines = proposed_lines(layers, relaxed, proposal, rows.dtype)
        proof = dual_bound(layers, last, lines, relaxed.spans, relaxed.last_span, inputs, row)
        return Check(value, proof.bound, point.inputs, excess)

    def grid(tree):
        return jax.tree.map(
            lambda x: x.astype(rows.dtype).reshape(*rows.shape[:2], *x.shape[1:]), tree
        )

    inner = jax.vmap(one, in_axes=(None, None, 0, 0, 0))
    return jax.vmap(inner)(relaxed, inputs, rows, grid(points), grid(proposals))


# On CPUs, larger arrays than this fall out of the caches, and cost twice as much a number.
CACHED_NUMBERS = 200_000


# Single precision is off by less than this share of the gaps that are asked for.
AIM = 0.98


# Neurons times rows that cost next to nothing, compared with compiling for another number of rows.
CHEAP_NUMBERS = 20_000


def few_sizes(layers: tuple[Layer, ...], rows: int, boxes: int = 1) -> int:
    """A number of rows on each box, no smaller, of which there are few: powers of two.

    Small numbers are all the same where that costs next to nothing.
    """
    neurons = max(sum(math.prod(layer.shape) for layer in layers) * boxes, 1)
    least = min(max(CHEAP_NUMBERS // neurons, 1), 8)
    return power_above(max(rows, least))


def _rows(tree, some: slice):
    return jax.tree.map(lambda x: x[some], tree)


def join_arrays(parts):
    """Arrays one after the other, in the memory where they are."""
    if len(parts) == 1:
        return parts[0]
    host = all(device.platform == "cpu" for device in parts[0].devices())
    return np.concatenate(parts) if host else jnp.concatenate(parts)


def checked_in_groups(layers, last, relaxed, inputs, rows, points, proposals) -> list[Check]:
    """What float64 says of points and proposals, which have one axis of lanes, box by box.

    On CPUs a few boxes at a time, in order; the arrays of a Check have axes of boxes and rows.
    """
    boxes, count = rows.shape[:2]
    group = boxes
    if jax.default_backend() == "cpu":
        neurons = sum(math.prod(layer.shape) for layer in layers)
        group = min(boxes, max(CACHED_NUMBERS // max(neurons * count, 1), 1))
    parts = []
    with jax.enable_x64(True):
        for begin in range(0, boxes, group):
            # The last group is filled up with boxes from the one before: one compilation for all.
            first = min(begin, boxes - group)
            some = (relaxed, inputs, rows), (points, proposals)
            if group < boxes:  # slicing array by array takes its time
                some = (
                    _rows(some[0], slice(first, first + group)),
                    _rows(some[1], slice(first * count, (first + group) * count)),
                )
            checked = _checked(layers, last, *some[0], *some[1])
            parts.append(checked if begin == first else _rows(checked, slice(begin - first, None)))
    return parts


@dataclass(frozen=True)
class Numbers:
    """What is read of Checks: arrays with axes of boxes and rows."""

    value: np.ndarray
    bound: np.ndarray
    crossed: np.ndarray


def numbers_of(checks: list[Check]) -> Numbers:
    value, bound, crossing = (
        np.concatenate([np.asarray(getattr(check, name)) for check in checks])
        for name in ("value", "bound", "crossing")
    )
    return Numbers(
        np.where((crossing > 0) | ~np.isfinite(value), np.inf, value), bound, crossing > 0
    )


def search(
    layers: tuple[Layer, ...],
    last: Segment,
    relaxed: Relaxed,
    inputs: AbstractSet,
    rows,
    *,
    solvers=None,
    dtype=jnp.float32,
    keep: Callable | None = None,
    **options,
) -> BatchSolution:
    """Solves the grid of problems (box, row); see stagecert.solve_batch for the options.

    `keep` is called with the proposals behind the bounds, with a leading axis of lanes, whenever
    these are certified; the last call counts.
    """
    # One name for each type: programs are compiled for the type as it is given.
    lanes = _lanes(layers, last, relaxed, inputs, rows, np.dtype(dtype).type)
    boxes, count = rows.shape[:2]
    # The problems' numbers were checked when the boxes were.
    axes = _axes(lanes.problem)
    straight = all(wedge.straight for wedge in relaxed.wedges)

    def certifier(kept) -> Certified:
        parts = checked_in_groups(layers, last, relaxed, inputs, rows, kept.point, kept.proposal)

        def joined(pick, join):
            pieces = [pick(part) for part in parts]
            flat = [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x) for x in pieces]
            return jax.tree.map(lambda *xs: join(xs), *flat)

        value, bound, crossing = joined(
            lambda part: jax.tree.map(np.asarray, (part.value, part.bound, part.crossing)),
            np.concatenate,
        )
        if keep is not None:
            keep(kept.proposal)
        crossed = crossing > 0
        value[~np.isfinite(kept.value) | ~np.isfinite(value) | crossed] = np.inf
        kept.code[crossed] = CROSSED
        # These may be large: they stay where they are until somebody reads them.
        with jax.enable_x64(True):
            at = joined(lambda part: part.inputs, join_arrays)
        return Certified(value, bound, at, (), None)

    return search_lanes(
        lanes.problem, axes, boxes * count, lanes.start, certifier,
        solvers or default_solvers(straight), single_steps=True, aim=AIM, **options,
    )  # fmt: skip
