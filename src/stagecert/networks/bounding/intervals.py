"""Interval bounds: boxes carried through the network, rounded outward.

An interval is (centre, radius). A linear operation maps centres by itself and radii by its weights'
absolute values. Rounding is accounted for a priori: a sum of n products, in whatever order, is off
by at most n * eps * (sum of the absolute values), so the radius is widened by a little more than
that.
"""

import jax.numpy as jnp

from stagecert.networks.bounding.relaxation import Segment, Split
from stagecert.networks.operations import Linear, Shift


def widened(radius, magnitude, terms: int):
    """A radius that covers rounding errors of sums of `terms` products of total `magnitude`."""
    eps = jnp.finfo(radius.dtype).eps
    tiny = jnp.finfo(radius.dtype).tiny
    return (radius + (3 * (terms + 2) * eps) * magnitude) * (1 + 8 * eps) + 8 * (terms + 1) * tiny


def unbounded_if_nan(low, high):
    """Ends that overflow has made NaN, as infinities."""
    return jnp.where(jnp.isnan(low), -jnp.inf, low), jnp.where(jnp.isnan(high), jnp.inf, high)


def segment_interval(segment: Segment, inputs: tuple, blocks: tuple):
    """(low, high) of a segment's output where inputs and blocks are (low, high) pairs."""
    if not segment.nodes:  # nothing is rounded: what is not negative stays so
        return unbounded_if_nan(*segment.pick(inputs, blocks)[segment.output])
    intervals = [_centred(*pair) for pair in segment.pick(inputs, blocks)]
    for node in segment.nodes:
        operation, weights = node.operation, node.weights
        arguments = [intervals[k] for k in node.arguments]
        if isinstance(operation, Linear):
            centres, radii = zip(*arguments, strict=True)
            centre = operation(weights, *centres)
            radius = operation.radius(weights, *radii)
            terms = operation.terms(weights, *(jnp.shape(c) for c in centres))
            if terms:
                magnitude = operation.size(weights, *centres) + radius
                radius = widened(radius, magnitude, terms)
        else:
            assert isinstance(operation, Shift)
            ((centre, radius),) = arguments
            centre = operation(weights, centre)
            radius = widened(jnp.broadcast_to(radius, centre.shape), jnp.abs(centre) + radius, 1)
            if operation.loose:  # the sum may be much smaller than the weights
                radius = widened(radius, jnp.abs(weights), operation.loose)
        intervals.append((centre, radius))
    return _ends(*intervals[segment.output])


def _centred(low, high):
    centre = 0.5 * low + 0.5 * high
    radius = jnp.maximum(high - centre, centre - low)
    return centre, widened(radius, jnp.abs(centre) + radius, 0)


def _ends(centre, radius):
    low = jnp.nextafter(centre - radius, -jnp.inf)
    high = jnp.nextafter(centre + radius, jnp.inf)
    return unbounded_if_nan(low, high)


def interval_bounds(parts: Split, inputs: tuple):
    """Intervals of every layer's argument, and of the outputs; `inputs` are (low, high) pairs."""
    blocks: tuple = ()
    arguments = []
    for layer in parts.layers:
        low, high = segment_interval(layer.segment, inputs, blocks)
        arguments.append((low, high))
        blocks = (*blocks, layer.image(low, high))
    return tuple(arguments), segment_interval(parts.last, inputs, blocks)
