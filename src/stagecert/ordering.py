"""The order of a stage's bounds as a side constraint: multipliers that do not depend on fractions.

Let l >= 0 be the multiplier of lower - upper <= 0, and g the cotangent at the block. A pass pulls
at the lower bound with (1 - theta) g + l, and at the upper one with theta g - l. Multipliers that
prove something leave all of g at its corner, so for the same pulls the order needs l less
theta g+ + (1 - theta) g-, the complementarity.

Where l > 0 at an optimum, the bounds meet and theta may be anything: nothing brings it to its
corner. Worse, an augmented Lagrangian lets bounds cross a little, and a block between crossed
bounds gains by leaving its corner; multipliers that suit one theta are then wrong for the next, and
a search runs in circles. So the multipliers that are kept are those at corners, and those at
fractions follow from them with the cotangents that were last found. Where these are right, the
augmented Lagrangian no longer depends on theta.
"""

import equinox as eqx
import jax.numpy as jnp

from stagecert.reformulation import complementarity
from stagecert.sides import Sides


class Centre(eqx.Module):
    """What an augmented Lagrangian is around; those of the order are multipliers at corners.

    `cotangents` are those of the blocks; there are none where the order is not enforced.
    """

    sides: Sides
    cotangents: tuple = ()

    @staticmethod
    def given(sides: Sides) -> "Centre":
        """Multipliers alone, the same at all fractions."""
        return Centre(sides, tuple(jnp.zeros_like(l) for l in sides.order))

    @staticmethod
    def found(held: Sides, cotangents: tuple, fractions: tuple) -> "Centre":
        """What a pass at some fractions found: the multipliers it held, its cotangents."""
        if not held.order:
            return Centre(held)
        corners, kept = (), ()
        for l, g, theta in zip(held.order, cotangents, fractions, strict=True):
            less = complementarity(g, theta)
            corners = (*corners, jnp.maximum(l - less, 0))
            # A multiplier that is too small for its corner has fractions that must go there: keep
            # only as much of the cotangent as leaves the multiplier what it is.
            share = jnp.where(less > l, l / jnp.where(less > l, less, 1), 1)
            kept = (*kept, jnp.where(l > 0, share * g, 0))
        return Centre(Sides(held.constraints, corners), kept)

    def at(self, fractions: tuple) -> Sides:
        """The multipliers at some fractions."""
        if not self.sides.order:
            return self.sides
        order = tuple(
            l + complementarity(g, theta)
            for l, g, theta in zip(self.sides.order, self.cotangents, fractions, strict=True)
        )
        return Sides(self.sides.constraints, order)

    def gradient(self, fractions: tuple, held: Sides, widths: Sides) -> tuple:
        """How the augmented Lagrangian changes with the fractions because its centre does."""
        around = self.at(fractions)
        return tuple(
            g * width * (l - c)
            for g, width, l, c in zip(
                self.cotangents, widths.order, held.order, around.order, strict=True
            )
        )
