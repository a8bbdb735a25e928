"""Feasible points from nearly feasible ones: towards one in which all constraints hold strictly.

What is feasible is convex in (inputs, blocks), so on the way to an interior point each violated
constraint falls at least linearly, and the share of the way that is enough is known beforehand.
"""

import jax.numpy as jnp

from stagecert import tree
from stagecert.problem import Problem
from stagecert.reformulation import ForwardPass, Point, forward_pass
from stagecert.sides import share_to_interior

PASSES = 2  # that `repaired` makes, where there are side constraints


def fractions_of(problem: Problem, inputs, blocks: tuple) -> tuple:
    """The fractions at which the stages pick some blocks, as nearly as they can. One pass."""
    fractions = ()
    for i, stage in enumerate(problem.stages):
        lower, upper, _ = stage.bounds(inputs, blocks[:i], blocks[i])
        width = upper - lower
        theta = (blocks[i] - lower) / jnp.where(width > 0, width, 1)
        fractions = (*fractions, jnp.clip(jnp.where(width > 0, theta, 0.5), 0, 1))
    return fractions


def repaired(problem: Problem, point: Point, done: ForwardPass) -> tuple[Point, ForwardPass]:
    """A feasible point near a given one, if an interior point is known; else the point itself."""
    guide = problem.guide
    if guide is None or guide.interior is None:
        return point, done
    share = share_to_interior(done.sides, guide.slack, guide.margins)
    known = (share > 0) & (share <= 1)
    share = jnp.where(known, share, 0).astype(done.value.dtype)
    inputs, blocks = tree.between((point.inputs, done.blocks), guide.interior, share)
    fractions = fractions_of(problem, inputs, blocks)
    moved = tree.select(known, Point(inputs, fractions), point)
    return moved, forward_pass(problem, moved)
