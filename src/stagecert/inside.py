"""Sets seen from inside: for functions whose slopes are infinite at the border.

Entropy is the standard case: s log s has the slope -inf at s = 0. A search that projects onto the
border learns nothing there, and what JAX makes of such a slope need not be one (that of `rel_entr`
at zero is zero). `Inside` keeps all points that searches and certificates use a little inside,
while bounds are still minimised over the whole set, and lets points move in coordinates in which
the border is infinitely far away: the logarithms of a simplex's entries, and the log-odds between
the two ends of a box.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import tree
from stagecert.sets import AbstractSet, Bound, Box, Point, Product, Simplex

MARGIN = 1e-10  # share of the way to the centre


class Inside(AbstractSet):
    """A set whose points stay off the border; its minima are those of the whole set.

    Args:
        whole: the set.
    """

    whole: AbstractSet

    def _inner(self, point: Point) -> Point:
        return tree.between(point, self.whole.centre(), MARGIN)

    def project(self, point: Point) -> Point:
        return self._inner(self.whole.project(point))

    def minimise_linear(self, gradient: Point) -> Point:
        return self._inner(self.whole.minimise_linear(gradient))

    def linear_minimum(self, gradient: Point) -> jax.Array:
        return self.whole.linear_minimum(gradient)

    def minimise_quadratic(self, gradient: Point, centre: Point, curvature: Point) -> Bound:
        point, value = self.whole.minimise_quadratic(gradient, centre, curvature)
        return self._inner(point), value

    def sample(self, key: jax.Array) -> Point:
        return self._inner(self.whole.sample(key))

    def centre(self) -> Point:
        return self.whole.centre()

    def scale(self) -> Point:
        return self.whole.scale()

    def ends(self) -> tuple[Point, Point]:
        return self.whole.ends()

    def validate(self) -> None:
        self.whole.validate()

    def moved(self, point: Point, step: Point) -> Point:
        """The point after a step in the coordinates in which the border is infinitely far away."""
        return self._inner(_on_parts(_moved, self.whole, point, step))

    def residual(self, point: Point, gradient: Point) -> Point:
        """Minus the gradient, without what no step can change: zero at a minimum inside."""
        return _on_parts(_residual, self.whole, point, gradient)

    def softness(self, point: Point) -> Point:
        """How far a unit step moves each entry."""
        return _on_parts(_softness, self.whole, point, point)


def seen_from_inside(problem: Any) -> Any:
    """A problem (or the axes of a batch) whose set of inputs is seen from inside."""
    return eqx.tree_at(
        lambda p: p.inputs, problem, Inside(problem.inputs), is_leaf=lambda x: x is None
    )


def _on_parts(function, whole: AbstractSet, point: Point, other: Point) -> Point:
    if isinstance(whole, Product):
        return jax.tree.map(
            lambda part, x, y: _on_parts(function, part, x, y),
            whole.parts,
            point,
            other,
            is_leaf=lambda x: isinstance(x, AbstractSet),
        )
    return function(whole, point, other)


def _moved(whole: AbstractSet, point, step):
    tiny = jnp.finfo(step.dtype).tiny
    if isinstance(whole, Simplex):
        return whole.total * jax.nn.softmax(jnp.log(jnp.maximum(point, tiny)) + step)
    if isinstance(whole, Box):
        below = jnp.maximum(point - whole.lower, tiny)
        above = jnp.maximum(whole.upper - point, tiny)
        share = jax.nn.sigmoid(jnp.log(below) - jnp.log(above) + step)
        # From the nearer end, so that small distances keep their digits.
        width = whole.upper - whole.lower
        rest = jax.nn.sigmoid(jnp.log(above) - jnp.log(below) - step)
        moved = jnp.where(share < 0.5, whole.lower + share * width, whole.upper - rest * width)
        return jnp.clip(moved, whole.lower, whole.upper)
    return whole.project(point + step)


def _residual(whole: AbstractSet, point, gradient):
    if isinstance(whole, Simplex):
        return jnp.sum(gradient * point) / jnp.sum(point) - gradient
    return -gradient


def _softness(whole: AbstractSet, point, _):
    if isinstance(whole, Simplex):
        return point
    if isinstance(whole, Box):
        width = jnp.where(whole.upper > whole.lower, whole.upper - whole.lower, 1)
        return (point - whole.lower) * (whole.upper - point) / width
    return jnp.ones_like(point)
