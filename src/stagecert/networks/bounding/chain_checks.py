"""What float64 says of points and slopes on chains of relu, channels last.

The same numbers, and the same charges for rounding, as `search.checked_in_groups` gets from
`backward.dual_bound`. Sums have the same terms in another order, and charges do not depend on that.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks.bounding.backward import Sums, finished, roundings
from stagecert.networks.bounding.chains import to_first, to_last
from stagecert.networks.bounding.quick import Chain, Quick, Sides, lanes_of, sides_of, sums_of
from stagecert.networks.bounding.relaxation import Split
from stagecert.networks.bounding.search import Check, Relaxed


@eqx.filter_jit
def checked(parts: Split, chain: Chain, relaxed: Relaxed, inputs, rows, found: Quick) -> Check:
    """A Check of some boxes: all arrays have axes of boxes and rows, neurons channels last."""
    dtype = rows.dtype
    sides = tuple(map(sides_of, relaxed.wedges, chain.shapes))
    at, fractions, weights = jax.tree.map(
        lambda x: x.astype(dtype), (found.inputs, found.fractions, found.weights)
    )
    at = jax.vmap(jax.vmap(lambda s, x: s.project(x), (None, 0)))(inputs, at)
    value, excess = _value(chain.maps, sides, rows, at, fractions)
    bound = _bound(parts, chain, relaxed, sides, inputs, rows, weights)
    return Check(value, bound, at, excess)


def _value(maps, sides: tuple[Sides, ...], rows, at, fractions):
    """The value at a point, and by how much the sides of a wedge cross there."""
    block = to_last(lanes_of(rows, at), at.shape[2:])
    excess: Any = jnp.zeros(rows.shape[:2], rows.dtype)
    for affine, side, share in zip(maps, sides, fractions, strict=False):
        x = affine(block).reshape(share.shape)
        below, above = jnp.maximum(side.least * x, side.most * x), side.slope * x + side.offset
        # As in `search`: sides may cross by a little of the search's rounding.
        over = below - above - 4e-6 * (1 + jnp.abs(below) + jnp.abs(above))
        excess = jnp.maximum(excess, jnp.max(over, axis=tuple(range(2, x.ndim))))
        block = lanes_of(rows, (1 - share) * below + share * above)
    value = jnp.sum(rows * maps[-1](block).reshape(rows.shape), axis=-1)
    return value, excess


def _bound(parts: Split, chain: Chain, relaxed: Relaxed, sides, inputs, rows, weights):
    """One pass back for all lanes, charged as in `backward`."""
    eps, tiny = jnp.finfo(rows.dtype).eps, jnp.finfo(rows.dtype).tiny
    consumers = len(parts.layers) + 1
    like = jax.tree.leaves(jax.eval_shape(inputs.centre))[0]
    shapes = (like.shape[1:], *chain.shapes)
    total = slip = size = jnp.zeros(rows.shape[:2], rows.dtype)

    def grid(x):
        return x.reshape(*rows.shape[:2], *x.shape[1:])

    def pulled(k: int, segment, span, y, offsets):
        """As `backward.pulled`; offsets are subtracted, and never negative."""
        nonlocal total, slip, size
        reach = to_last(span.magnitude, chain.shapes[k])[:, None] if k < len(sides) else None
        reach = span.magnitude.reshape(len(rows), 1, -1) if reach is None else reach
        moved = offsets + grid(sums_of(lanes_of(rows, jnp.abs(y) * reach)))
        affine, terms = chain.maps[k], roundings(segment, [shapes[k]], consumers)
        total = total - offsets + grid(affine.constant(lanes_of(rows, y)))
        underflow = 4 * tiny * (2 + jnp.reshape(span.total, (-1, 1)))
        slip = slip + terms * (eps * moved + underflow)
        size = size + moved
        return grid(affine.back(lanes_of(rows, y)))

    g = pulled(len(sides), parts.last, relaxed.last_span, rows, jnp.zeros_like(total))
    for k in reversed(range(len(sides))):
        side, down = sides[k], jnp.minimum(g, 0)
        # A line below has weights in [0, 1] where a neuron is unstable, and no offset.
        weight = jnp.where(weights[k] > side.least, jnp.minimum(weights[k], side.most), side.least)
        offsets = grid(sums_of(lanes_of(rows, -down * side.offset)))
        y = jnp.maximum(g, 0) * weight + down * side.slope
        g = pulled(k, parts.layers[k].segment, relaxed.spans[k], y, offsets)
    gradient = to_first(g, shapes[0])
    entries = int(np.prod(shapes[0]))

    def end(box, total, slip, size, gradient):
        return finished(Sums(total, slip, size), box, gradient, entries, consumers).bound

    of_rows = jax.vmap(jax.vmap(end, (None, 0, 0, 0, 0)))
    return of_rows(inputs, total, slip, size, gradient)
