"""Side constraints g(inputs, blocks) <= 0, and how multipliers and searches take them.

For any multipliers l >= 0, f + l . g is an objective like any other and nowhere above f at a
feasible point, so a bound on it is a bound on the problem. There are two kinds of side constraints:
those that a problem declares, and lower - upper <= 0 of stages whose bounds may cross. Points where
bounds cross are not feasible, but the stages can be followed there all the same.

A search takes constraints by their augmented Lagrangian: the maximum over l >= 0 of
l . g - width/2 |l - centre|^2. That is what smoothing does to a nonsmooth piece, with multipliers
instead of weights, and the same proximal method raises them: when the smoothed problem is nearly
solved, the centre moves to the multipliers found.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import tree


class Sides(eqx.Module):
    """One array for each declared constraint, and for each stage whose order is enforced.

    Values of g, multipliers, or anything else that has an entry for each of them.
    """

    constraints: tuple = ()
    order: tuple = ()


class Guide(eqx.Module):
    """What a search knows of a problem's side constraints before it starts.

    Attributes:
        widths: of the augmented Lagrangian, for each entry: where the multiplier's unit is one.
        centre: the multipliers to start from.
        interior: (inputs, blocks), a point in which all constraints hold strictly, if one is known.
        slack: the constraints' values there; not negative where no such point is known.
        margins: how far below zero a repaired constraint is to be, so that rounding does not undo
            the repair.
        ordered: whether the order of the stages' bounds is enforced as a side constraint.
        followed: whether the stages are followed where their bounds cross. Otherwise a crossing is
            the end of a search.
    """

    widths: Sides = Sides()
    centre: Sides = Sides()
    interior: Any = None
    slack: Sides = Sides()
    margins: Sides = Sides()
    ordered: bool = eqx.field(static=True, default=False)
    followed: bool = eqx.field(static=True, default=False)


# What a pass makes of the constraints' values: (a number to add to the objective, multipliers).
SideRule = Callable[[Sides], tuple[Any, Sides]]


def without(values: Sides) -> tuple[Any, Sides]:
    """No multipliers: the objective alone."""
    return 0.0, jax.tree.map(jnp.zeros_like, values)


def with_multipliers(multipliers: Sides) -> SideRule:
    """The Lagrangian with given multipliers; numbers that are none count as zero."""

    def rule(values: Sides):
        held = jax.tree.map(lambda l: jnp.maximum(jnp.nan_to_num(l, posinf=0.0), 0), multipliers)
        return weighted(held, values), held

    return rule


def augmented(centre: Sides, widths: Sides) -> SideRule:
    """The augmented Lagrangian around some multipliers."""

    def rule(values: Sides):
        held = jax.tree.map(
            lambda c, g, w: jax.lax.stop_gradient(jnp.maximum(c + g / w, 0)), centre, values, widths
        )
        # The multipliers are a maximiser, so they are the slope: no need to differentiate them.
        away = jax.tree.map(lambda l, c, w: jnp.sum(w / 2 * (l - c) ** 2), held, centre, widths)
        return weighted(held, values) - jax.tree.reduce(jnp.add, away, 0.0), held

    return rule


def weighted(multipliers: Sides, values: Sides):
    """l . g."""
    return tree.dot(multipliers, values) if jax.tree.leaves(values) else 0.0


def missed(multipliers: Sides, values: Sides):
    """sum |l g|: what multipliers on constraints that are not attained, or violated, hide."""
    parts = jax.tree.map(lambda l, g: jnp.sum(jnp.abs(l * g)), multipliers, values)
    return jax.tree.reduce(jnp.add, parts, 0.0)


def share_to_interior(values: Sides, slack: Sides, margins: Sides):
    """How much of the way to the interior brings all constraints to zero, by convexity; 0 if none.

    No number in [0, 1] where some constraint that counts does not hold strictly at the interior
    point.
    """

    def share(g, inside, margin):
        over = g + jnp.minimum(margin, -0.5 * inside)
        needed = over / jnp.where(over > inside, over - inside, 1)
        needed = jnp.where(inside < 0, needed, jnp.inf)
        return jnp.max(jnp.where(over > 0, needed, 0), initial=0)

    return jax.tree.reduce(jnp.maximum, jax.tree.map(share, values, slack, margins), 0.0)
