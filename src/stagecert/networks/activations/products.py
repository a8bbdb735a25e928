"""The product of two numbers in a box: its range and its convex hull (McCormick's).

On l <= x <= u, a product (x - l1) (y - l2) or (u1 - x) (u2 - y) of two nonnegative numbers is not
negative, and (x - l1) (u2 - y) or (u1 - x) (y - l2) is not either. Multiplied out, x y lies above
the larger of two planes and below the smaller of two others, and nothing convex is tighter.
"""

from typing import Any, ClassVar

import jax.numpy as jnp

from stagecert import pieces
from stagecert.networks.activations import hulls
from stagecert.networks.activations.wedges import AbstractWedge


class ProductWedge(AbstractWedge):
    """Lower: the larger of two planes. Upper: the smaller of two."""

    straight: ClassVar[bool] = True

    low_slopes: Any  # (..., planes, 2)
    low_offsets: Any  # (..., planes)
    high_slopes: Any
    high_offsets: Any

    def lower(self, x):
        return pieces.max(jnp.sum(self.low_slopes * x[..., None, :], axis=-1) + self.low_offsets)

    def upper(self, x):
        return pieces.min(jnp.sum(self.high_slopes * x[..., None, :], axis=-1) + self.high_offsets)

    def slopes(self):
        # In the middle of the box the planes of a side meet.
        half = jnp.full_like(self.low_offsets, 0.5)
        return (half,), (half,)


def product_image(low, high):
    """The range of the product over the last axis."""
    corners = jnp.stack([a[..., 0] * b[..., 1] for a in (low, high) for b in (low, high)])
    info = jnp.finfo(low.dtype)
    off = 2 * info.eps * jnp.max(jnp.abs(corners), axis=0) + info.tiny
    least, most = jnp.min(corners, axis=0) - off, jnp.max(corners, axis=0) + off
    # Zero times infinity: nothing is known.
    nothing = jnp.isnan(least) | jnp.isnan(most)
    return jnp.where(nothing, -jnp.inf, least), jnp.where(nothing, jnp.inf, most)


def product_unit(low, high):
    """How far apart the two planes of a side can be."""
    return jnp.prod(high - low, axis=-1)


def product_wedge(low, high) -> ProductWedge:
    """The convex hull of the product over the last axis on a box."""
    info = jnp.finfo(low.dtype)
    most = jnp.sqrt(info.max) / 8  # products of these do not overflow
    known = hulls.usable(low, high) & (jnp.abs(low) < most) & (jnp.abs(high) < most)
    usable = jnp.all(known, axis=-1)
    l, u = (jnp.where(usable[..., None], x, 0) for x in (low, high))

    def planes(sign, *touched):
        """x y = b x + a y - a b + (x - a) (y - b) for each touched corner (a, b)."""
        slopes = jnp.stack([jnp.stack([b, a], axis=-1) for a, b in touched], axis=-2)
        products = jnp.stack([a * b for a, b in touched], axis=-1)
        off = 2 * info.eps * jnp.abs(products) + info.tiny
        offsets = -products - sign * off
        # Not infinite: weights of zero could not be multiplied with it.
        return slopes, jnp.where(usable[..., None], offsets, -sign * info.max)

    (l1, l2), (u1, u2) = (jnp.moveaxis(x, -1, 0) for x in (l, u))
    return ProductWedge(*planes(1, (l1, l2), (u1, u2)), *planes(-1, (l1, u2), (u1, l2)))
