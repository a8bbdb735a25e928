"""Intervals for the arguments of all activations, layer by layer.

Every one is a stagewise problem over the earlier layers: minimise and maximise one entry of a
layer's argument. Intervals solve it crudely, zero steps of the search (one pass back) much better,
a few steps better still. Only entries whose activation is not already linear on the interval are
worth the effort.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.intervals import interval_bounds, segment_interval
from stagecert.networks.regions import Regions
from stagecert.networks.relaxation import Layer, Segment, Split
from stagecert.networks.search import CACHED_NUMBERS, backward_bounds, hints, relax, search
from stagecert.networks.stepwise import Passes, exact
from stagecert.solvers import Damped

KINDS = ("ibp", "backward", "optimised")


@dataclass(frozen=True)
class Intermediate:
    """How the arguments of activations are bounded.

    Attributes:
        kind: "ibp", "backward" or "optimised".
        steps: search steps for each entry, for "optimised".
        given: ready intervals ((low, high), ...), one pair for each activation, which are used
            as they are; None if they are to be computed.
    """

    kind: str = "backward"
    steps: int = 3
    given: tuple | None = None

    @staticmethod
    def named(what: Any) -> "Intermediate":
        """From what users write."""
        if isinstance(what, Intermediate):
            how = what
        elif isinstance(what, str):
            how = Intermediate(what)
        elif isinstance(what, (tuple, list)):
            how = Intermediate("ibp", given=tuple(what))
        else:
            raise ProblemError(
                f"intermediate must be one of {', '.join(KINDS)}, an Intermediate or intervals, "
                f"not {what!r}."
            )
        if how.kind not in KINDS:
            raise ProblemError(
                f"Unknown intermediate bounds '{how.kind}'; known are {', '.join(KINDS)}."
            )
        if how.steps < 1:
            raise ProblemError(f"Intermediate: steps must be at least 1, not {how.steps}.")
        return how

    def require(self, boxes: int) -> None:
        """Refuses intervals of more boxes than there are; chunks would not notice."""
        for pair in self.given or ():
            for ends in pair:
                if np.ndim(ends) and len(ends) > boxes:
                    raise ProblemError(
                        f"intermediate: there are {boxes} boxes, but intervals of {len(ends)}."
                    )

    def chunk(self, rows: slice) -> "Intermediate":
        """The same for some boxes."""
        if self.given is None:
            return self
        return replace(self, given=tuple((low[rows], high[rows]) for low, high in self.given))


@eqx.filter_jit
def _interval(layers: tuple[Layer, ...], segment: Segment, boxes, arguments):
    def one(boxes, arguments):
        blocks = tuple(layer.image(*pair) for layer, pair in zip(layers, arguments, strict=True))
        return segment_interval(segment, boxes, blocks)

    return jax.vmap(one)(boxes, arguments)


@eqx.filter_jit
def _all_intervals(parts: Split, boxes):
    return jax.vmap(lambda boxes: interval_bounds(parts, boxes)[0])(boxes)


def enclose(parts: Split, regions: Regions, how: Intermediate, memory: float, show) -> tuple:
    """(low, high) of every layer's argument, each with a leading axis of boxes."""
    if how.given is not None:
        return _given(parts, regions, how.given)
    if how.kind == "ibp":
        return _all_intervals(parts, regions.boxes)
    if how.kind == "backward":
        width = rows_at_once(parts, regions.shapes, memory)
        passes = Passes(parts, regions, width, share=lambda done, size: show("layers", done, size))
        return passes.arguments
    arguments: tuple = ()
    for index, layer in enumerate(parts.layers):
        before = parts.layers[:index]
        low, high = _interval(before, layer.segment, regions.boxes, arguments)
        if not (index == 0 and regions.boxed and exact(layer.segment)):
            low, high = _refined(
                before, layer, regions, arguments, (low, high), how, memory,
                lambda done, size, k=index: show(f"layer {k + 1}", done, size),
            )  # fmt: skip
        arguments = (*arguments, (low, high))
    return arguments


def rows_at_once(parts: Split, shapes, memory: float) -> int:
    """How many rows go back through a whole network at a time: a power of two."""
    entries = sum(math.prod(layer.shape) for layer in parts.layers)
    entries = max(entries + 2 * sum(map(math.prod, shapes)), 1)
    rows = int(memory * 2**30 / (8 * 32 * entries))
    if jax.default_backend() == "cpu":  # larger arrays fall out of the caches
        rows = min(rows, max(2 * CACHED_NUMBERS // entries, 16))
    return _floor_power(min(rows, 4096))


def _given(parts: Split, regions: Regions, given: tuple) -> tuple:
    """Ready intervals, once their shapes and order are seen to be right."""
    if len(given) != len(parts.layers):
        raise ProblemError(
            f"intermediate: there are {len(parts.layers)} activations, but {len(given)} intervals."
        )
    likes = jax.eval_shape(lambda boxes: _shapes_of_arguments(parts, boxes), regions.boxes)
    checked = []
    for name, like, pair in zip(parts.names, likes, given, strict=True):
        low, high = (np.asarray(x, np.float64) for x in pair)
        if low.shape != like.shape or high.shape != like.shape:
            raise ProblemError(
                f"intermediate: intervals of '{name}' must have shape {like.shape}, but have "
                f"{low.shape} and {high.shape}."
            )
        if not np.all(low <= high):
            raise ProblemError(f"intermediate: an interval of '{name}' is empty or NaN.")
        checked.append((jnp.asarray(low), jnp.asarray(high)))
    return tuple(checked)


def _shapes_of_arguments(parts: Split, boxes):
    def one(boxes):
        inputs = tuple(low for low, _ in boxes)
        inputs = inputs[0] if len(inputs) == 1 else inputs
        blocks = tuple(jnp.zeros(layer.shape) for layer in parts.layers)
        return tuple(layer.segment(inputs, blocks) for layer in parts.layers)

    return jax.vmap(one)(boxes)


@eqx.filter_jit
def _bent(layer: Layer, low, high):
    """Which entries feed an activation that is not linear on its interval."""
    return jax.vmap(layer.bent)(low, high)


def _refined(before, layer: Layer, regions, arguments, interval, how, memory, show):
    """The interval of one layer's argument, tightened where that can help."""
    low, high = (np.array(x) for x in interval)
    shape = low.shape[1:]
    boxes = len(low)
    bent = np.asarray(_bent(layer, *interval)).reshape(boxes, -1)
    entries = [np.flatnonzero(row) for row in bent]
    most = max(map(len, entries))
    if most == 0:
        return interval
    neurons = sum(math.prod(one.shape) for one in before) + math.prod(shape)
    inputs = sum(math.prod(s) for s in regions.shapes)
    of_row = (32 if how.kind == "backward" else 160) * (neurons + 2 * inputs)
    at_once = max(int(memory * 2**30 / of_row) // 2, 1)
    some_boxes = min(boxes, max(at_once // min(most, 64), 1))
    some_rows = max(min(_power_of_two(most), _floor_power(at_once // some_boxes)), 1)
    finished, total = 0, sum(map(len, entries))
    for begin in range(0, boxes, some_boxes):
        group = np.arange(begin, min(begin + some_boxes, boxes))
        longest = max(len(entries[b]) for b in group)
        if longest == 0:
            continue
        part = regions[slice(begin, begin + some_boxes)]
        relaxed = relax(
            before,
            layer.segment,
            part.boxes,
            jax.tree.map(lambda x, b=begin: x[b : b + some_boxes], arguments),
        )
        for first in range(0, longest, some_rows):
            chosen = np.zeros((len(group), some_rows), int)
            used = np.zeros((len(group), some_rows), bool)
            for k, b in enumerate(group):
                mine = entries[b][first : first + some_rows]
                chosen[k, : len(mine)], used[k, : len(mine)] = mine, True
            least, minus_most = _both_ends(before, layer.segment, relaxed, part, chosen, shape, how)
            for k, b in enumerate(group):
                at = chosen[k][used[k]]
                flat_low, flat_high = low[b].reshape(-1), high[b].reshape(-1)
                flat_low[at] = np.maximum(flat_low[at], least[k][used[k]])
                flat_high[at] = np.minimum(flat_high[at], -minus_most[k][used[k]])
            finished += int(used.sum())
            show(finished, total)
    return jnp.asarray(low), jnp.asarray(high)


def _both_ends(before, segment, relaxed, part, chosen, shape, how):
    """Lower bounds on x_j and on -x_j for the chosen entries: two (boxes, rows) arrays."""
    rows = _unit_rows(jnp.asarray(chosen), math.prod(shape)).reshape(*chosen.shape, *shape)
    rows = jnp.concatenate([rows, -rows], axis=1)
    found = np.asarray(backward_bounds(before, segment, relaxed, part.sets, rows).bound)
    if how.kind == "optimised":
        solver = (Damped(hints=hints, patience=how.steps + 1),)
        with jax.enable_x64(False):
            searched = search(
                before, segment, relaxed, part.sets, rows, solvers=solver, atol=1e-9, rtol=1e-3,
                max_iterations=how.steps,
            )  # fmt: skip
        found = np.maximum(found, searched.bound.reshape(found.shape))
    half = chosen.shape[1]
    return found[:, :half], found[:, half:]


@eqx.filter_jit
def _unit_rows(chosen, size: int):
    return jax.nn.one_hot(chosen, size, dtype=jnp.float64)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _floor_power(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1
