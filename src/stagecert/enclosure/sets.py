"""The least of a linear or quadratic function with interval coefficients over a set of inputs.

What the sets of `stagecert.sets` compute in floating point is a point, and a value there; a lower
bound needs a rule of its own. Every rule bounds min over x in the set of <slope, x - anchor> below,
for every slope in an interval. Other sets can join: `least_linear.register(MySet)`.
"""

from functools import singledispatch
from typing import Any

import equinox as eqx
import jax
import numpy as np

from stagecert.enclosure import intervals as iv
from stagecert.enclosure.functions import sqrt
from stagecert.enclosure.intervals import Interval, constant
from stagecert.errors import ProblemError
from stagecert.inside import Inside
from stagecert.sets import AbstractSet, Ball, Box, BoxBall, Product, Simplex


def is_interval(x: Any) -> bool:
    return isinstance(x, Interval)


def _is_set(x: Any) -> bool:
    return isinstance(x, AbstractSet)


def _differences(ends, anchor) -> list[Interval]:
    return [iv.subtract(constant(end), constant(anchor)) for end in ends]


def dot(slope: Interval, move: Interval) -> Interval:
    """The sum of products of all entries."""
    return iv.total(iv.multiply(slope, move))


@singledispatch
def least_linear(inputs: AbstractSet, slope: Any, anchor: Any) -> Interval:
    """An interval whose lower end is below <slope, x - anchor> everywhere in the set."""
    raise ProblemError(
        f"There is no rule for rigorous minima over {type(inputs).__name__}: rigorous=True knows "
        "Box, Ball, BoxBall, Simplex and Product, and sets that were registered with "
        "stagecert.enclosure.least_linear."
    )


@least_linear.register
def _box(inputs: Box, slope, anchor):
    low, high = _differences((inputs.lower, inputs.upper), anchor)
    return iv.total(least_on_intervals(slope, None, low, high))


@least_linear.register
def _ball(inputs: Ball, slope, anchor):
    as_row = slope.map(lambda a: a.reshape(1, -1))
    rows = (np.reshape(x, (1, -1)) for x in (inputs.middle, anchor))
    middle, anchor = (np.broadcast_to(row, as_row.shape) for row in rows)
    return least_on_balls(middle, np.reshape(inputs.radius, 1), as_row, anchor)


@least_linear.register
def _simplex(inputs: Simplex, slope, anchor):
    least = slope.map(lambda a: a.min(axis=-1))
    return iv.subtract(iv.multiply(constant(inputs.total), least), dot(slope, constant(anchor)))


@least_linear.register
def _box_ball(inputs: BoxBall, slope, anchor):
    low, high = _differences((inputs.lower, inputs.upper), inputs.middle)
    (move,) = _differences([inputs.middle], anchor)
    # Any multiplier k / 2 >= 0 of |x - middle|^2 <= radius^2 gives a bound; so does none.
    k = float(_multiplier(inputs, slope.middle()))
    radius = constant(inputs.radius)
    least = iv.total(least_on_intervals(slope, None, low, high))
    if np.isfinite(k) and k > 0:
        lowest = iv.total(least_on_intervals(slope, np.full(slope.shape, k), low, high))
        taken = iv.multiply(constant(0.5 * k), iv.square(radius))
        least = iv.maximum(least, iv.subtract(lowest, taken))
    return iv.add(dot(slope, move), least)


@least_linear.register
def _inside(inputs: Inside, slope, anchor):
    return least_linear(inputs.whole, slope, anchor)


@least_linear.register
def _product(inputs: Product, slope, anchor):
    parts = jax.tree.leaves(inputs.parts, is_leaf=_is_set)
    structure = jax.tree.structure(inputs.parts, is_leaf=_is_set)
    slopes, anchors = structure.flatten_up_to(slope), structure.flatten_up_to(anchor)
    total = constant(0.0)
    for part, g, a in zip(parts, slopes, anchors, strict=True):
        total = iv.add(total, least_linear(part, g, a))
    return total


def least_on_balls(middle, radius, slope: Interval, anchor) -> Interval:
    """The same for rows that are each in a ball of its own."""
    (move,) = _differences([middle], anchor)
    lengths = sqrt(iv.sum_last(iv.square(slope)))
    return iv.subtract(dot(slope, move), dot(constant(radius), lengths))


@eqx.filter_jit
def _multiplier(inputs: BoxBall, slope):
    return inputs.multiplier(slope)


def least_on_intervals(slope: Interval, curvature, low: Interval, high: Interval) -> Interval:
    """Below slope * d + curvature / 2 * d^2 for all d in [low, high], entry by entry.

    A convex function lies above its tangent at any point, here near its least one.
    """
    if curvature is None:
        return iv.minimum(iv.multiply(slope, low), iv.multiply(slope, high))
    newton = -slope.middle() / np.where(curvature > 0, curvature, 1)
    at = np.clip(newton, low.middle(), np.maximum(high.middle(), low.middle()))
    at = constant(np.where((curvature > 0) & np.isfinite(at), at, 0))
    k = constant(curvature)
    half = iv.multiply(constant(0.5), iv.multiply(k, at))
    value = iv.multiply(iv.add(slope, half), at)
    tangent = iv.add(slope, iv.multiply(k, at))
    ends = [iv.multiply(tangent, iv.subtract(end, at)) for end in (low, high)]
    return iv.add(value, iv.minimum(*ends))


@singledispatch
def even(inputs: AbstractSet, curvature: np.ndarray) -> np.ndarray:
    """A curvature, nowhere larger, for which `minimise_quadratic` finds the least point."""
    return np.full_like(curvature, curvature.min(initial=np.inf))


@even.register
def _even_box(inputs: Box, curvature):
    return curvature


def least_quadratic(inputs: AbstractSet, slope: Any, anchor: Any, curvature: Any) -> Interval:
    """The same for <slope, x - anchor> + 1/2 sum of curvature * (x - anchor)^2."""
    if isinstance(inputs, Inside):
        return least_quadratic(inputs.whole, slope, anchor, curvature)
    if isinstance(inputs, Product):
        structure = jax.tree.structure(inputs.parts, is_leaf=_is_set)
        trees = [structure.flatten_up_to(t) for t in (slope, anchor, curvature)]
        parts = jax.tree.leaves(inputs.parts, is_leaf=_is_set)
        total = constant(0.0)
        for part, g, a, c in zip(parts, *trees, strict=True):
            total = iv.add(total, least_quadratic(part, g, a, c))
        return total
    if not is_interval(slope):
        raise ProblemError(
            f"A curvature of the inputs on the set {type(inputs).__name__}, whose points are "
            "trees, has no rigorous rule."
        )
    if not np.any(curvature > 0):
        return least_linear(inputs, slope, anchor)
    if isinstance(inputs, Box):
        low, high = _differences((inputs.lower, inputs.upper), anchor)
        return iv.total(least_on_intervals(slope, curvature, low, high))
    curvature = even(inputs, curvature)
    at = np.asarray(_near_minimiser(inputs, slope.middle(), np.asarray(anchor), curvature))
    move = iv.subtract(constant(at), constant(anchor))
    turn = iv.multiply(constant(curvature), move)
    value = dot(iv.add(slope, iv.multiply(constant(0.5), turn)), move)
    return iv.add(value, least_linear(inputs, iv.add(slope, turn), at))


@eqx.filter_jit
def _near_minimiser(inputs, slope, anchor, curvature):
    return inputs.minimise_quadratic(slope, anchor, curvature)[0]
