"""The maximum of several entries in a box: its range and its convex hull.

The maximum itself is convex. Its concave envelope over the box is the least of the affine functions
    x -> t + sum_j (least concave function above max(x_j - t, 0) on [l_j, u_j])
over the levels t in {max l} and {u_j > max l}: any t gives an upper bound, the expression is convex
and piecewise linear in t with breakpoints at the ends of the intervals, and below max l it falls.
"""

from typing import Any, ClassVar

import jax.numpy as jnp

from stagecert import pieces
from stagecert.networks.activations.wedges import AbstractWedge

LEVELS = 16  # most levels t that are used; fewer give a valid, wider wedge


class MaxWedge(AbstractWedge):
    """Lower: the maximum over the last axis. Upper: the least of a few affine functions."""

    straight: ClassVar[bool] = True

    first: Any
    low_slopes: Any  # 0 for entries that are never the largest, so that they drop out
    low_offsets: Any
    slopes_: Any  # (..., levels, entries)
    offsets: Any  # (..., levels)

    def lower(self, x):
        return pieces.max(x * self.low_slopes + self.low_offsets)

    def upper(self, x):
        return pieces.min(jnp.sum(self.slopes_ * x[..., None, :], axis=-1) + self.offsets)

    def slopes(self):
        levels = self.offsets.shape[-1]
        return (self.first,), (jnp.full_like(self.offsets, 1 / levels),)


def max_image(low, high):
    """The range of the maximum over the last axis."""
    return jnp.max(low, axis=-1), jnp.max(high, axis=-1)


def max_unit(low, high):
    """How far apart the entries can be."""
    return jnp.max(high - low, axis=-1)


def max_wedge(low, high) -> MaxWedge:
    """The convex hull of the maximum over the last axis on a box."""
    floor = jnp.max(low, axis=-1, keepdims=True)
    # An entry that cannot exceed the floor does not count; it is replaced by the floor itself.
    matters = (high > floor) | (low >= floor)
    ends = jnp.maximum(jnp.where(matters, high, floor), floor)
    highest = jnp.flip(jnp.sort(ends, axis=-1), axis=-1)[..., :LEVELS]
    # At t = the highest end the bound is a constant; every level is between floor and that.
    levels = jnp.concatenate([floor, highest], axis=-1)
    t, l, u = levels[..., None], low[..., None, :], high[..., None, :]
    width = u - l
    wide = width > 0
    chord = jnp.where(wide, jnp.maximum(u - t, 0) / jnp.where(wide, width, 1), 0)
    above = l >= t  # the entry never falls below the level: no chord is needed
    slopes = jnp.where(above, 1, chord)
    pieces_at = jnp.where(above, -t, -chord * l)
    offsets = t[..., 0] + jnp.sum(pieces_at, axis=-1)
    first = jnp.where(high == jnp.max(high, axis=-1, keepdims=True), 1.0, 0.0)
    first = first / jnp.sum(first, axis=-1, keepdims=True)
    return MaxWedge(
        first.astype(low.dtype),
        jnp.where(matters, 1, 0).astype(low.dtype),
        jnp.where(matters, 0, floor).astype(low.dtype),
        slopes.astype(low.dtype),
        offsets,
    )
