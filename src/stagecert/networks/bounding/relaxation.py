"""A network as a stagewise convex problem: one stage for each activation, nothing else.

Between two activations a network is affine. `split` cuts it there: what comes out are *layers*,
each an affine `Segment` of the inputs and earlier blocks followed by an activation, a maximum or a
product, and a last segment that makes the outputs. A block is what an activation puts out; affine
values are never variables of the problem.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks.activations import find
from stagecert.networks.activations.maxima import max_image, max_unit, max_wedge
from stagecert.networks.activations.products import product_image, product_unit, product_wedge
from stagecert.networks.activations.wedges import AbstractWedge
from stagecert.networks.graph import Network, Node
from stagecert.networks.operations import (
    Activation,
    Broadcast,
    Concat,
    Joint,
    Reshape,
    Slice,
    Take,
    Transpose,
)
from stagecert.pieces import evaluate
from stagecert.problem import AbstractStage, Objective, StageTrace

# Of operations on the last axis, by their labels: the wedge, the range, and the unit.
_JOINT = {
    "max": (max_wedge, max_image, max_unit),
    "product": (product_wedge, product_image, product_unit),
}


class Segment(eqx.Module):
    """An affine function of the inputs and of earlier blocks.

    `sources` says what the first values are: (True, k) is input k, (False, k) is block k.
    """

    nodes: tuple[Node, ...]
    sources: tuple[tuple[bool, int], ...] = eqx.field(static=True)
    output: int = eqx.field(static=True)

    def pick(self, inputs, blocks) -> list:
        """The values that the segment reads."""
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        return [inputs[k] if is_input else blocks[k] for is_input, k in self.sources]

    @property
    def local(self) -> "Segment":
        """The segment with its sources numbered from zero: equal layers look equal."""
        return Segment(self.nodes, tuple((False, k) for k in range(len(self.sources))), self.output)

    def node_shapes(self, shapes) -> tuple[tuple[int, ...], ...]:
        """The shapes of all nodes, from those of what the segment reads."""
        every = list(shapes)
        for node in self.nodes:
            shape = node.shape
            if not shape:  # those that join the outputs do not say theirs
                like = [jax.ShapeDtypeStruct(every[k], jnp.float32) for k in node.arguments]
                shape = jax.eval_shape(node.operation, node.weights, *like).shape
            every.append(shape)
        return tuple(every[len(shapes) :])

    def shape(self, shapes) -> tuple[int, ...]:
        """The shape of the output, from those of what the segment reads."""
        return (*shapes, *self.node_shapes(shapes))[self.output]

    def __call__(self, inputs, blocks):
        values = self.pick(inputs, blocks)
        for node in self.nodes:
            values.append(node.operation(node.weights, *(values[k] for k in node.arguments)))
        return values[self.output]


# Operations that only move entries, on NumPy arrays: (operation, weights, arguments).
MOVING: dict[type, Callable[[Any, Any, list], np.ndarray]] = {
    Broadcast: lambda o, _, xs: np.broadcast_to(xs[0], o.shape),
    Concat: lambda o, _, xs: np.concatenate(xs, axis=o.axis),
    Reshape: lambda o, _, xs: np.reshape(xs[0], o.shape),
    Slice: lambda o, _, xs: xs[0][
        tuple(slice(*ends) for ends in zip(o.starts, o.stops, o.steps, strict=True))
    ],
    Take: lambda o, weights, xs: np.take(xs[0], np.asarray(weights), axis=o.axis),
    Transpose: lambda o, _, xs: np.transpose(xs[0], o.axes),
}


def copied(segment: Segment, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """For every entry of a segment's output the place of the first one that is the same number.

    Products repeat their factors many times; what is known of one copy is known of all. `shapes`
    are those of the values that the segment reads.
    """
    count, total = len(shapes), 0
    known: dict[int, np.ndarray] = {}

    def entries(index: int) -> np.ndarray:
        nonlocal total
        if index not in known:
            node = segment.nodes[index - count] if index >= count else None
            if node is not None and type(node.operation) in MOVING:
                arguments = [entries(k) for k in node.arguments]
                move = MOVING[type(node.operation)]
                known[index] = move(node.operation, node.weights, arguments)
            else:
                shape = shapes[index] if node is None else node.shape
                known[index] = (total + np.arange(math.prod(shape))).reshape(shape)
                total += math.prod(shape)
        return known[index]

    _, first, back = np.unique(entries(segment.output), return_index=True, return_inverse=True)
    return first[back.reshape(-1)]


class Layer(eqx.Module):
    """A segment and the nonlinear node that follows it."""

    segment: Segment
    operation: Activation | Joint = eqx.field(static=True)
    weights: Any
    shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def local(self) -> "Layer":
        """The layer with a local segment: layers of one kind and shape share compiled programs."""
        return Layer(self.segment.local, self.operation, self.weights, self.shape)

    def wedge(self, low, high) -> AbstractWedge:
        """The convex hull of the nonlinear node where its arguments are in [low, high]."""
        if isinstance(self.operation, Joint):
            return _JOINT[self.operation.label][0](low, high)
        settings = dict(self.operation.settings)
        return find(self.operation.kind).wedge(low, high, self.weights, **settings)

    def image(self, low, high):
        """An interval that contains the block where the arguments are in [low, high]."""
        if isinstance(self.operation, Joint):
            return _JOINT[self.operation.label][1](low, high)
        settings = dict(self.operation.settings)
        return find(self.operation.kind).image(low, high, self.weights, **settings)

    def unit(self, low, high):
        """How far apart the pieces of each entry's wedge can be."""
        if isinstance(self.operation, Joint):
            return _JOINT[self.operation.label][2](low, high)
        return high - low

    def bent(self, low, high):
        """Which arguments feed an activation that is not linear on its interval."""
        wedge = self.wedge(low, high)
        middle = 0.5 * low + 0.5 * high
        wide = wedge.upper(middle) > wedge.lower(middle)
        # Maxima and products have one block entry for several arguments.
        wide = wide if wide.ndim == low.ndim else wide[..., None]
        return jnp.broadcast_to(wide, low.shape) & (high > low)


class Split(eqx.Module):
    """A network cut at its activations."""

    layers: tuple[Layer, ...]
    last: Segment
    names: tuple[str, ...] = eqx.field(static=True)


def split(network: Network) -> Split:
    """Cuts a network at its activations; the last segment gives all outputs as one vector."""
    count = len(network.input_shapes)
    # Where a value comes from: an input, a block, or an affine node.
    block_of: dict[int, int] = {}
    layers, names = [], []

    def segment(target: int, extra: tuple[Node, ...] = (), roots: tuple[int, ...] = ()):
        """The affine nodes between `target` (or `roots`, joined by `extra`) and their sources."""
        needed: set[int] = set()
        stack = [target] if not roots else list(roots)
        sources: set[int] = set()
        while stack:
            index = stack.pop()
            if index < count or index in block_of:
                sources.add(index)
            elif index not in needed:
                needed.add(index)
                stack.extend(network.nodes[index - count].arguments)
        inner, outer = sorted(needed), sorted(sources)
        place = {index: k for k, index in enumerate([*outer, *inner])}
        nodes = tuple(
            Node(node.operation, tuple(place[a] for a in node.arguments), node.weights, node.shape)
            for node in (network.nodes[index - count] for index in inner)
        )
        named = tuple((k < count, k if k < count else block_of[k]) for k in outer)
        if not roots:
            return Segment(nodes, named, place[target])
        joined, ends = [], []
        for root in roots:
            joined.append(Node(Reshape((-1,)), (place[root],), None, ()))
            ends.append(len(outer) + len(nodes) + len(joined) - 1)
        joined.append(Node(Concat(0), tuple(ends), None, ()))
        nodes = (*nodes, *joined)
        return Segment(nodes, named, len(outer) + len(nodes) - 1)

    for number, node in enumerate(network.nodes):
        if isinstance(node.operation, (Activation, Joint)):
            before = segment(node.arguments[0])
            layers.append(Layer(before, node.operation, node.weights, node.shape))
            names.append(network.labels.nodes[number] or f"layer {len(layers)}")
            block_of[count + number] = len(layers) - 1
    return Split(tuple(layers), segment(-1, roots=network.outputs), tuple(names))


class LayerStage(AbstractStage):
    """The stage of one layer. The affine part runs once for both bounds, forwards and backwards."""

    segment: Segment
    wedge: AbstractWedge
    unit: Any  # how wide the interval of each argument is
    name: str | None = eqx.field(static=True, default=None)
    box: Any = None

    def _bounds(self, inputs, blocks, treatment, data):
        x = self.segment(inputs, blocks)
        of_lower, of_upper = (None, None) if data is None else data
        lower, low_records = evaluate(self.wedge.lower, (x,), treatment, of_lower)
        upper, high_records = evaluate(self.wedge.upper, (x,), treatment, of_upper)
        return lower, upper, (low_records, high_records)

    def trace(self, inputs, blocks, pick, channel, treatment, data):
        lower, upper, records = self._bounds(inputs, blocks, treatment, data)
        block, channel = pick.mix(pick.fractions, lower, upper, channel)
        return StageTrace(block + pick.probe, lower, upper, records), channel

    def bounds(self, inputs, blocks, block, treatment=None, data=None):
        return self._bounds(inputs, blocks, treatment, data)

    def shape(self, inputs, blocks):
        return jax.eval_shape(lambda i, b: self._bounds(i, b, None, None)[0], inputs, blocks)


def _combination(params, inputs, blocks):
    segment, row = params
    return jnp.vdot(row, segment(inputs, blocks))


def linear_objective(segment: Segment, row) -> Objective:
    """row . segment(inputs, blocks)."""
    return Objective(_combination, (segment, row))
