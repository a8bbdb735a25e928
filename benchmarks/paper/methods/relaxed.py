"""The paper's relaxation as arrays: what first-order methods work on, one lane a problem.

Between activations a network is affine, so a problem is: minimise row . last(s, z) over inputs s in
a box and blocks z, where each neuron's argument a = segment(s, z) and block z lie in the convex
hull of the activation's graph over [l, u].
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.paper.methods.base import BINS, PaperProblems, even
from stagecert.networks.activations.wedges import AbstractWedge
from stagecert.networks.bounding.intermediate import Intermediate, enclose
from stagecert.networks.bounding.jobs import boxes_at_once
from stagecert.networks.bounding.relaxation import (
    Layer,
    LayerStage,
    Segment,
    Split,
    linear_objective,
    split,
)
from stagecert.networks.operations import Activation, Linear
from stagecert.networks.regions import regions_of
from stagecert.problem import Problem, as_arrays
from stagecert.reformulation import forward_pass
from stagecert.sets import AbstractSet

KINDS = ("relu", "softplus")  # activations with the closed forms below


class Shared(eqx.Module):
    """What all lanes share: the network, and its affine parts at zero."""

    parts: Split
    constants: tuple  # of every layer's segment
    last_constant: Any

    @property
    def kinds(self) -> tuple[str, ...]:
        """The activation of every layer."""
        return tuple(kind_of(layer) for layer in self.parts.layers)


class Lane(eqx.Module):
    """One problem; in arrays of lanes, every leaf has a leading axis."""

    inputs: AbstractSet
    arguments: tuple  # (low, high) of every layer's argument
    images: tuple  # (low, high) of every block
    wedges: tuple[AbstractWedge, ...]
    row: Any


def kind_of(layer: Layer) -> str:
    """The activation's name."""
    return layer.operation.kind if isinstance(layer.operation, Activation) else "max"


def unsupported(problems: PaperProblems) -> str | None:
    """Why the closed forms here do not serve; None if they do."""
    kinds = {kind_of(layer) for layer in split(problems.network).layers} - {*KINDS}
    return f"no closed forms for {', '.join(sorted(kinds))}" if kinds else None


def shared_of(problems: PaperProblems) -> Shared:
    """The network in float64; call under jax.enable_x64."""
    parts = as_arrays(split(problems.network), jnp.float64)
    return _shared(parts, problems.network.input_shapes)


@eqx.filter_jit
def _shared(parts: Split, shapes) -> Shared:
    zeros = tuple(jnp.zeros(shape, jnp.float64) for shape in shapes)
    inputs = zeros if len(zeros) > 1 else zeros[0]
    blocks = tuple(jnp.zeros(layer.shape, jnp.float64) for layer in parts.layers)
    constants = tuple(layer.segment(inputs, blocks) for layer in parts.layers)
    return Shared(parts, constants, parts.last(inputs, blocks))


def images_at_once(shared: Shared, problems: PaperProblems) -> int:
    """How many images are worked on together."""
    images, rows = problems.shape
    return even(images, boxes_at_once(shared.parts, problems.network.input_shapes, rows, 1.0))


def lanes_of(shared: Shared, problems: PaperProblems) -> Lane:
    """All (image, target) problems in float64; intervals are made here, by interval arithmetic."""
    regions = regions_of(problems.network, problems.lower, problems.upper, None)
    arguments = enclose(
        shared.parts, regions, Intermediate.named("ibp"), 2.0, lambda *progress: None
    )
    return _lanes(shared, regions.sets, arguments, jnp.asarray(problems.rows, jnp.float64))


@eqx.filter_jit
def _lanes(shared: Shared, sets, arguments, rows) -> Lane:
    def one(inputs, arguments, row):
        pairs = list(zip(shared.parts.layers, arguments, strict=True))
        images = tuple(layer.image(*pair) for layer, pair in pairs)
        wedges = tuple(layer.wedge(*pair) for layer, pair in pairs)
        return Lane(inputs, arguments, images, wedges, row)

    sets, arguments = jax.tree.map(
        lambda x: jnp.repeat(x, rows.shape[1], axis=0), (sets, arguments)
    )
    return jax.vmap(one)(sets, arguments, rows.reshape(-1, rows.shape[-1]))


def problem_of(shared: Shared, lane: Lane) -> Problem:
    """A lane as the core's stagewise convex problem, with boxes around the blocks."""
    stages = tuple(
        LayerStage(layer.segment, wedge, high - low, box=image)
        for layer, wedge, (low, high), image in zip(
            shared.parts.layers, lane.wedges, lane.arguments, lane.images, strict=True
        )
    )
    return Problem(lane.inputs, stages, linear_objective(shared.parts.last, lane.row))


def value_at(shared: Shared, lane: Lane, point) -> Any:
    """The relaxation's objective at the feasible point that inputs and fractions stand for."""
    return forward_pass(problem_of(shared, lane), point).value


# -- affine parts ---------------------------------------------------------------------------------


def arguments_at(shared: Shared, inputs, blocks) -> tuple:
    """Every layer's argument at given inputs and blocks; all at once, not one after the other."""
    return tuple(layer.segment(inputs, blocks) for layer in shared.parts.layers)


def pulled_back(shared: Shared, lane: Lane, multipliers: tuple):
    """Cotangents of (inputs, blocks) from those of all arguments, and from the row."""
    dtype = lane.row.dtype
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), jax.eval_shape(lane.inputs.centre))
    blocks = tuple(jnp.zeros(layer.shape, dtype) for layer in shared.parts.layers)

    def everything(inputs, blocks):
        return (*arguments_at(shared, inputs, blocks), shared.parts.last(inputs, blocks))

    return jax.vjp(everything, zeros, blocks)[1]((*multipliers, lane.row))


def constant_of(shared: Shared, lane: Lane, multipliers: tuple):
    """What multipliers and row make of the affine parts at zero."""
    total = jnp.sum(lane.row * shared.last_constant)
    for m, constant in zip(multipliers, shared.constants, strict=True):
        total = total + jnp.sum(m * constant)
    return total


def absolute(segment: Segment, inputs, blocks):
    """The linear part of a segment with the absolute values of its weights."""
    values = segment.pick(inputs, blocks)
    for node in segment.nodes:
        arguments = [values[k] for k in node.arguments]
        if isinstance(node.operation, Linear):
            values.append(node.operation.radius(node.weights, *arguments))
        else:  # a shift
            values.append(jnp.broadcast_to(arguments[0], node.shape))
    return values[segment.output]


# -- one neuron -----------------------------------------------------------------------------------


def activation(kind: str, a):
    """relu or softplus."""
    return jnp.maximum(a, 0) if kind == "relu" else jnp.logaddexp(a, 0)


def least_on_graph(kind: str, slope, weight, low, high):
    """(min, argmin) over a in [low, high] of slope * a + weight * activation(a); exact.

    A linear function is least on the graph where it is least on the hull, so this is also the
    minimum over the hull. Differentiated with the minimiser held fixed (Danskin).
    """
    ends = (low, high)
    if kind == "relu":
        inner = jnp.clip(0.0, low, high)
    else:
        # The derivative slope + weight * sigmoid(a) vanishes; a minimum if weight > 0.
        bent = weight > 0
        share = jnp.clip(-slope / jnp.where(bent, weight, 1), 0, 1)
        inner = jnp.log(share) - jnp.log1p(-share)
        inner = jnp.where(bent, jnp.clip(inner, low, high), low)
    best = jax.lax.stop_gradient(inner)
    least = slope * best + weight * activation(kind, best)
    for end in ends:
        there = slope * end + weight * activation(kind, end)
        best = jnp.where(there < least, end, best)
        least = jnp.where(there < least, there, least)
    best = jax.lax.stop_gradient(best)
    return slope * best + weight * activation(kind, best), best


def dual_value(shared: Shared, lane: Lane, multipliers: tuple, of_inputs, of_blocks):
    """The Lagrangian's minimum for multipliers of `argument = segment(inputs, blocks)`.

    `of_inputs` and `of_blocks` are `pulled_back(multipliers)`.
    """
    total = constant_of(shared, lane, multipliers) + lane.inputs.linear_minimum(of_inputs)
    for kind, m, g, (low, high) in zip(
        shared.kinds, multipliers, of_blocks, lane.arguments, strict=True
    ):
        total = total + jnp.sum(least_on_graph(kind, -m, g, low, high)[0])
    return total


# -- distances to degenerate points ----------------------------------------------------------------


class Distances(eqx.Module):
    """How near neurons' arguments are to the ends of their intervals: counts, and the least."""

    counts: Any
    least: Any


def distances(shared: Shared, lane: Lane, inputs, blocks) -> Distances:
    """min(a - l, u - a) / (u - l) of the neurons whose activation bends on [l, u].

    The others' bounds are one line, so that they are not near anything.
    """
    counts, least = jnp.zeros(BINS, jnp.int32), jnp.asarray(jnp.inf, lane.row.dtype)
    at = arguments_at(shared, inputs, blocks)
    for layer, a, (low, high) in zip(shared.parts.layers, at, lane.arguments, strict=True):
        bent = layer.bent(low, high)
        width = jnp.where(bent, high - low, 1)
        share = jnp.clip(jnp.minimum(a - low, high - a) / width, 0, 0.5)
        place = jnp.minimum((2 * BINS * share).astype(jnp.int32), BINS - 1)
        place = jnp.where(bent, place, BINS).ravel()
        counts = counts + jnp.bincount(place, length=BINS + 1)[:BINS].astype(jnp.int32)
        least = jnp.minimum(least, jnp.min(jnp.where(bent, share, jnp.inf)))
    return Distances(counts, least)
