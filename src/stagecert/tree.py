"""Arithmetic on points that are trees of arrays."""

from typing import Any

import jax
import jax.numpy as jnp


def dot(a, b):
    """The inner product of two trees."""
    products = jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)
    return jax.tree.reduce(jnp.add, products)


def subtract(a, b) -> Any:
    """a - b."""
    return jax.tree.map(jnp.subtract, a, b)


def move(a, direction, step) -> Any:
    """a + step * direction."""
    return jax.tree.map(lambda x, d: x + step * d, a, direction)


def between(a, b, share) -> Any:
    """(1 - share) a + share b: exactly a at 0 and b at 1, inside a convex set in between."""
    return jax.tree.map(lambda x, y: (1 - share) * x + share * y, a, b)


def select(condition, a, b) -> Any:
    """a where the (scalar) condition holds, else b."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
