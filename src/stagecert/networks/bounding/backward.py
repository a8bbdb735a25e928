"""Lower bounds from lines: one pass back through the network, sound in floating point.

Each activation is between two lines, a * x + b below and c * x + d above. A linear function of the
outputs is then bounded by going back: a cotangent g at a block takes the lower line where g > 0 and
the upper line where g < 0; what remains at the inputs is minimised over their set. This is the
trusted formula of `stagecert.formula.lower_bound` for networks, with the Lagrangian's slope in
the blocks zero by construction, and it is CROWN's backward pass.

Rounding is charged a priori. A computed cotangent is off from the exact one by at most
(number of terms) * eps * |W|^T |cotangent of the output|; multiplied by the largest magnitude of
the block and added up, that is (number of terms) * eps * |cotangent of the output| . |W| magnitude,
and |W| magnitude does not depend on the cotangents: it is computed once for each box (`Spans`). So
a rigorous bound costs one inner product a layer more than a plain one. Numbers below the smallest
normal one count as zero on many machines: every operation may also be off by that much (`tiny`).
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stagecert import pieces
from stagecert.networks.activations.wedges import AbstractWedge
from stagecert.networks.bounding.relaxation import Layer, Segment
from stagecert.networks.operations import Linear, Shift
from stagecert.sets import AbstractSet


class Force(eqx.Module):
    """Multipliers of what is known of an activation's argument: x <= end, or x >= end.

    strength: positive where x <= end is known, negative where x >= end is: strength * (x - end) is
        then at most zero, and adding it to an objective leaves a lower bound one.
    end: finite wherever the strength is not zero.
    magnitude: the largest absolute value of x, as in `Span`.
    """

    strength: Float[Array, "*block"]
    end: Float[Array, "*block"]
    magnitude: Float[Array, "*block"]


class Lines(eqx.Module):
    """low_slope * x + low_offset <= activation(x) <= high_slope * x + high_offset.

    For a maximum over a last axis, the slopes have that axis too. `force` acts on x, if there is
    one.
    """

    low_slope: Float[Array, "*argument"]
    low_offset: Float[Array, "*block"]
    high_slope: Float[Array, "*argument"]
    high_offset: Float[Array, "*block"]
    force: Force | None = None


class Span(eqx.Module):
    """How large a segment's output can get: the sum of the absolute values of all its terms.

    magnitude: for each entry; never so small that eps * magnitude does not cover underflow.
    total: the magnitudes of all values on the way, the sources too, added up: where an underflow on
        the way back ends up.
    """

    magnitude: Float[Array, "*argument"]
    total: Float[Array, ""] | float


class DualBound(eqx.Module):
    """A lower bound with what proved it.

    uncharged: the bound as computed, without the charge for rounding: for searches.
    shares: for each block 0 where its lower line was used and 1 where its upper line was: the
        corner that a greedy step goes to, together with `minimiser`.
    """

    bound: Float[Array, ""]
    uncharged: Float[Array, ""]
    minimiser: Any
    shares: tuple[Float[Array, "*block"], ...]


def _lined(x, weights):
    """A maximum replaced by the line with these weights."""
    weights = pieces.on_simplex(x, weights)
    return pieces.weighted(x, weights), weights


def lines_at(wedge: AbstractWedge, x, slopes, span: Span) -> Lines:
    """The lines that touch a wedge at x, moved outward by more than rounding can have moved them.

    `slopes` are the weights of the wedge's nonsmooth pieces; see AbstractWedge.slopes.
    """
    exact = wedge.lines(slopes)
    if exact is not None:
        return Lines(*exact)
    of_lower, of_upper = slopes
    info = jnp.finfo(x.dtype)
    dust = info.tiny / info.eps  # eps * dust is an underflow
    # A wedge made of lines has the same ones everywhere: at zero nothing is rounded.
    x = jnp.zeros_like(x) if wedge.straight else x

    def line(function, weights, outward):
        value, pull = jax.vjp(lambda x: pieces.evaluate(function, (x,), _lined, weights)[0], x)
        (slope,) = pull(jnp.ones_like(value))
        wide = slope.ndim > 0 and slope.shape != value.shape
        total = (lambda t: jnp.sum(t, axis=-1)) if wide else (lambda t: t)
        reach = (jnp.abs(slope) + dust) * (jnp.abs(x) + span.magnitude)
        size = jnp.abs(value) + dust + total(reach)
        terms = 32 + (x.shape[-1] if wide else 0)
        allowance = terms * info.eps * size
        return slope, value - total(slope * x) + outward * allowance

    low_slope, low_offset = line(wedge.lower, of_lower, -1)
    high_slope, high_offset = line(wedge.upper, of_upper, 1)
    return Lines(low_slope, low_offset, high_slope, high_offset)


def segment_span(segment: Segment, input_magnitudes: tuple, block_magnitudes: tuple) -> Span:
    """Sum of the absolute values of all terms of a segment's output, rounded up."""
    values = segment.pick(input_magnitudes, block_magnitudes)
    for node in segment.nodes:
        arguments = [values[k] for k in node.arguments]
        if isinstance(node.operation, Linear):
            value = node.operation.radius(node.weights, *arguments)
            terms = node.operation.terms(node.weights, *(x.shape for x in arguments))
        else:
            value, terms = arguments[0] + jnp.abs(node.weights), 1
        info = jnp.finfo(value.dtype)
        values.append(value + 8 * (terms + 1) * info.tiny / info.eps)
    total = sum(jnp.sum(value) for value in values)
    return Span(values[segment.output] * (1 + 1e-6), total * (1 + 1e-6))


def roundings(segment: Segment, shapes: list, consumers: int) -> int:
    """How many roundings stand between a segment's cotangent and those of what it reads.

    Those of its constant part, which is computed forwards, are counted too, and those of weights
    that were rounded before (`loose`). `shapes` are those of what the segment reads.
    """
    shapes = [*shapes, *segment.node_shapes(shapes)]
    total = math.prod(shapes[segment.output]) + consumers + 16
    for node, shape in zip(segment.nodes, shapes[-len(segment.nodes) :], strict=False):
        read = [shapes[k] for k in node.arguments]
        if isinstance(node.operation, Linear):
            # What a node reads several times gets several cotangents from it.
            uses = max(map(node.arguments.count, node.arguments))
            total += uses * node.operation.back_terms(node.weights, read)
            total += node.operation.terms(node.weights, *read)
        else:  # a shift, which may repeat its argument
            assert isinstance(node.operation, Shift)
            total += math.prod(shape) // max(math.prod(read[0]), 1) + 1
            total += node.operation.loose
    return total


class Sums(NamedTuple):
    """What a pass back has added up so far for a row.

    total: the bound's constant part, as computed.
    slip: a bound on the errors of all roundings on the way.
    size: the absolute values of all terms of `total`.
    """

    total: Any
    slip: Any
    size: Any


def added(x):
    """The sum of all entries: of four parts at once, because one waits for each of its additions.

    CPUs take half of the time for that.
    """
    flat = x.reshape(-1)
    length = flat.size // 4
    if length < 16:
        return jnp.sum(flat)
    first, second, third, fourth = (flat[k * length : (k + 1) * length] for k in range(4))
    total = jnp.sum((first + second) + (third + fourth))
    return total if flat.size == 4 * length else total + jnp.sum(flat[4 * length :])


class Crossing(NamedTuple):
    """A row behind an activation's lines.

    cotangent: that of the activation's argument.
    offsets, absolute: what the lines' offsets add to the bound, entry by entry, and its size.
    """

    cotangent: Any
    offsets: Any
    absolute: Any


def uncrossed(g) -> Crossing:
    """A row where it begins."""
    nothing = jnp.zeros((), g.dtype)
    return Crossing(g, nothing, nothing)


def crossed(line: Lines, g) -> Crossing:
    """A block's cotangent through its activation's lines."""
    up, down = jnp.maximum(g, 0), jnp.maximum(-g, 0)
    offsets = up * line.low_offset - down * line.high_offset
    absolute = up * jnp.abs(line.low_offset) + down * jnp.abs(line.high_offset)
    if line.low_slope.ndim > g.ndim:
        up, down = up[..., None], down[..., None]
    return Crossing(up * line.low_slope - down * line.high_slope, offsets, absolute)


def forced(sums: Sums, force: Force, crossing: Crossing) -> tuple[Sums, Crossing]:
    """With a force on the argument of the activation that was crossed."""
    cotangent, strength = crossing.cotangent, force.strength
    eps, tiny = jnp.finfo(cotangent.dtype).eps, jnp.finfo(cotangent.dtype).tiny
    # Where there is no force, the end may be infinite.
    terms = jnp.where(strength == 0, 0, strength * jnp.where(strength == 0, 0, force.end))
    absolute = jnp.sum(jnp.abs(terms))
    # The sum of both cotangents is rounded once.
    moved = jnp.sum((jnp.abs(cotangent) + jnp.abs(strength)) * force.magnitude)
    charge = (strength.size + 8) * (eps * absolute + 4 * tiny)
    charge = charge + 4 * (eps * moved + 4 * tiny * (1 + jnp.sum(force.magnitude)))
    sums = Sums(sums.total - jnp.sum(terms), sums.slip + charge, sums.size + absolute)
    return sums, Crossing(cotangent + strength, crossing.offsets, crossing.absolute)


def pulled(sums: Sums, crossing: Crossing, constant, span: Span, terms: int) -> Sums:
    """With the offsets, the constant part of a segment, and the charge for both and its way back.

    `terms` is that of `roundings`, and more than the entries of the block behind the segment.
    """
    g = crossing.cotangent
    eps, tiny = jnp.finfo(g.dtype).eps, jnp.finfo(g.dtype).tiny
    parts = crossing.offsets, g * constant
    sizes = crossing.absolute, jnp.abs(g) * span.magnitude
    if parts[0].shape == g.shape:
        total, size = added(parts[0] + parts[1]), added(sizes[0] + sizes[1])
    else:
        total, size = added(parts[0]) + added(parts[1]), added(sizes[0]) + added(sizes[1])
    return Sums(
        sums.total + total,
        sums.slip + terms * (eps * size + 4 * tiny * (2 + span.total)),
        sums.size + size,
    )


class End(eqx.Module):
    """A row's bound, without the charge for rounding too, and where it is attained."""

    bound: Any
    uncharged: Any
    minimiser: Any


def finished(sums: Sums, inputs: AbstractSet, gradient, entries: int, consumers: int) -> End:
    """The bound, from what has arrived at the inputs, which have so many entries."""
    eps, tiny = jnp.finfo(sums.total.dtype).eps, jnp.finfo(sums.total.dtype).tiny
    minimiser = inputs.minimise_linear(gradient)
    term = inputs.linear_minimum(gradient)
    sizes = jax.tree.map(
        lambda g, x, c: jnp.sum(jnp.abs(g) * (jnp.abs(x) + jnp.abs(c))),
        gradient, minimiser, inputs.centre(),
    )  # fmt: skip
    size = jax.tree.reduce(jnp.add, sizes) + jnp.abs(term)
    slip = sums.slip + (entries + 8) * (eps * size + 4 * tiny)
    slip = slip + 4 * (consumers + 4) * eps * (sums.size + size)
    uncharged = sums.total + term
    bound = uncharged - slip * (1 + 1e-6)
    return End(jnp.where(jnp.isnan(bound), -jnp.inf, bound), uncharged, minimiser)


def dual_bound(
    layers: tuple[Layer, ...],
    last: Segment,
    lines: tuple[Lines, ...],
    layer_spans: tuple[Span, ...],
    last_span: Span,
    inputs: AbstractSet,
    row,
) -> DualBound:
    """A lower bound on row . last(inputs, blocks). One pass back.

    Args:
        layers: the layers before `last`; `lines` and `layer_spans` belong to them.
        last: the affine function whose combination is bounded, with `last_span`.
        row: its coefficients, of the shape of `last`'s output.
    """
    dtype = row.dtype
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), jax.eval_shape(inputs.centre))
    nothing = tuple(jnp.zeros(layer.shape, dtype) for layer in layers)
    of_inputs, of_blocks = zeros, list(nothing)
    consumers = len(layers) + 1

    def pull(segment: Segment, span: Span, crossing: Crossing, sums: Sums) -> Sums:
        nonlocal of_inputs
        # The segment at zero is its constant part; its transpose is what goes back.
        constant, back = jax.vjp(lambda i, b: segment(i, b), zeros, nothing)
        to_inputs, to_blocks = back(crossing.cotangent)
        of_inputs = jax.tree.map(jnp.add, of_inputs, to_inputs)
        for k in {k for is_input, k in segment.sources if not is_input}:
            of_blocks[k] = of_blocks[k] + to_blocks[k]
        read = [x.shape for x in segment.pick(zeros, nothing)]
        return pulled(sums, crossing, constant, span, roundings(segment, read, consumers))

    zero = jnp.zeros((), dtype)
    sums = pull(last, last_span, uncrossed(row), Sums(zero, zero, zero))
    shares = []
    for index in reversed(range(len(layers))):
        g = of_blocks[index]
        shares.append(jnp.where(g > 0, 0, 1).astype(dtype))
        crossing, force = crossed(lines[index], g), lines[index].force
        if force is not None:
            sums, crossing = forced(sums, force, crossing)
        sums = pull(layers[index].segment, layer_spans[index], crossing, sums)
    entries = sum(math.prod(x.shape) for x in jax.tree.leaves(zeros))
    end = finished(sums, inputs, of_inputs, entries, consumers)
    return DualBound(end.bound, end.uncharged, end.minimiser, tuple(reversed(shares)))
