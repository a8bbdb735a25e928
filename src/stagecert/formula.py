"""Lower bounds: one trusted formula, valid for any anchor point and any multipliers.

The Lagrangian L = f + sum_i (y_i+ lower_i - y_i- upper_i - y_i z_i) is convex in (inputs, blocks)
for any multipliers y, and nowhere above f at a feasible point. So its linearisation at any anchor
point, minimised over the inputs' set (and over enclosing boxes of the blocks, where its slope
there is not zero), is a lower bound on the optimum. Searching for good anchors and multipliers is
somebody else's business: a poor choice gives a weak bound, never a wrong one.

Side constraints g <= 0 add l . g for multipliers l >= 0. Without f, a positive bound proves that
there is no feasible point.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import pieces, tree
from stagecert.problem import Objective, Problem
from stagecert.reformulation import constraint_values
from stagecert.sides import Sides, weighted, with_multipliers


class Anchor(eqx.Module):
    """The point (inputs, blocks) at which a Lagrangian is linearised; it need not be feasible."""

    inputs: Any
    blocks: tuple


class BoundParts(eqx.Module):
    """A lower bound in floating point, and an estimate of what rounding may have added to it.

    `minimiser` is the point of the inputs' set where the linearisation is least.
    """

    computed: Any
    rounding: Any
    minimiser: Any

    def bound(self):
        """The bound to report: lowered by the allowance; -inf where nothing was proven."""
        lowered = self.computed - self.rounding
        return jnp.where(jnp.isnan(lowered), -jnp.inf, lowered)


def lower_bound(
    problem: Problem,
    anchor: Anchor,
    multipliers: tuple,
    slopes=None,
    sides: Sides | None = None,
    feasibility: bool = False,
) -> BoundParts:
    """A lower bound on the optimum from any anchor and any multipliers. Two passes.

    Args:
        problem: the problem; its own functions are used, never smoothed ones.
        anchor: where the Lagrangian is linearised.
        multipliers: one array for each block; positive entries act on lower bounds, negative ones
            on upper bounds.
        slopes: weights for the nonsmooth pieces (as recorded by a forward pass); None takes exact
            subgradients at the anchor.
        sides: multipliers of side constraints: an array for each declared one, and one for each
            stage whose order counts (lower <= upper). Negative entries count as zero; None: zero.
        feasibility: leave the objective out. A positive bound then says that nothing is feasible.

    >>> import stagecert as sc
    >>> problem = sc.Problem(
    ...     sc.Box(-1.0, 1.0),
    ...     (sc.Stage(lambda s, z: s**2 - 1, lambda s, z: 1 - s**2),),
    ...     lambda s, z: z[0],
    ... )
    >>> anchor = sc.Anchor(inputs=jnp.array(0.2), blocks=(jnp.array(0.0),))
    >>> round(float(sc.lower_bound(problem, anchor, (jnp.array(1.0),)).bound()), 3)
    -1.44
    """
    treatment_of = pieces.exactly_sloped if slopes is None else pieces.given_slopes
    sides = Sides() if sides is None else sides
    order = sides.order or (0.0,) * len(problem.stages)
    order = tuple(jnp.maximum(jnp.asarray(o), 0) for o in order)

    def lagrangian(inputs, blocks, slack_shares):
        treatment, of_objective = map(treatment_of, slack_shares)
        value = jnp.zeros_like(one)
        if not feasibility:
            value, _ = problem.objective.evaluate(
                inputs, blocks, of_objective, None if slopes is None else slopes[1]
            )
        total, size, reach = value, jnp.abs(value), ()
        for i, stage in enumerate(problem.stages):
            lower, upper, _ = stage.bounds(
                inputs, blocks[:i], blocks[i], treatment, None if slopes is None else slopes[0][i]
            )
            y, z = multipliers[i], blocks[i]
            reach = (*reach, jnp.abs(z) + jnp.abs(lower) + jnp.abs(upper))
            up, down = jnp.maximum(y, 0) + order[i], jnp.maximum(-y, 0) + order[i]
            total = total + jnp.sum(up * (lower - z) - down * (upper - z))
            size = size + jnp.sum(up * (jnp.abs(lower) + jnp.abs(z)))
            size = size + jnp.sum(down * (jnp.abs(upper) + jnp.abs(z)))
        if sides.constraints:
            values, _ = constraint_values(
                problem, inputs, blocks, treatment, None if slopes is None else slopes[2]
            )
            held = with_multipliers(Sides(sides.constraints))(Sides(values))[1]
            total = total + weighted(held, Sides(values))
            size = size + weighted(held, jax.tree.map(jnp.abs, Sides(values)))
        return total, (size, reach)

    one = jnp.ones((), jnp.result_type(*jax.tree.leaves(anchor.inputs)))
    (value, (size, reach)), (of_inputs, of_blocks, slack) = jax.value_and_grad(
        lagrangian, argnums=(0, 1, 2), has_aux=True
    )(anchor.inputs, anchor.blocks, (one, one))
    if feasibility:  # what it declares is about the objective, which is left out
        problem = replace(problem, objective=Objective(problem.objective.function))
    tangent = Linearisation(value, size, of_inputs, of_blocks, slack)
    return minimum_of_linearisation(problem, anchor, tangent, multipliers, reach)


class Linearisation(NamedTuple):
    """value - slack + slope . (point - anchor), which is nowhere above the Lagrangian.

    Attributes:
        value: at the anchor.
        size: the sum of the absolute values that went into it, for the rounding allowance.
        of_inputs, of_blocks: the slope. None says that it is zero in the blocks by construction.
        slack: (of the stages, of the objective): how far the lines are below what they support.
    """

    value: Any
    size: Any
    of_inputs: Any
    of_blocks: tuple | None
    slack: tuple


def minimum_of_linearisation(
    problem: Problem, anchor: Anchor, line: Linearisation, multipliers, reach=()
) -> BoundParts:
    """The minimum of a linearisation (with the objective's declared curvature added).

    `reach` is the magnitude of each block and its bounds, for the rounding allowance.
    """
    value, size, of_inputs, of_blocks, (of_stages, of_objective) = line
    eps = jnp.finfo(value.dtype).eps
    value, size = value - of_stages - of_objective, size + of_stages + of_objective
    # The curvature adds to a tangent of the objective. Slopes that are no subgradient at the anchor
    # (they have slack) make a line that is lower, but need not stay lower with curvature added.
    tangent = of_objective == 0
    curvature = problem.objective.curvature_inputs
    if curvature is None:
        best = problem.inputs.minimise_linear(of_inputs)
        term = problem.inputs.linear_minimum(of_inputs) - tree.dot(of_inputs, anchor.inputs)
    else:
        curvature = jax.tree.map(lambda c: jnp.where(tangent, c, 0), curvature)
        best, term = problem.inputs.minimise_quadratic(of_inputs, anchor.inputs, curvature)
    sizes = jax.tree.map(
        lambda g, b, a: jnp.sum(jnp.abs(g) * (jnp.abs(b) + jnp.abs(a))),
        of_inputs,
        best,
        anchor.inputs,
    )
    total, size = value + term, size + jax.tree.reduce(jnp.add, sizes) + jnp.abs(term)
    charge = jnp.zeros_like(value)
    if of_blocks is not None:
        largest = jnp.zeros_like(value)
        for y in multipliers:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(y), initial=0))
        for i in range(len(problem.stages)):
            term, extra = _block_minimum(
                problem, i, of_blocks[i], anchor.blocks[i], tangent, largest, reach[i]
            )
            total, charge = total + term, charge + extra
            size = size + jnp.where(jnp.isfinite(term), jnp.abs(term), 0)
    return BoundParts(total, 4 * eps * size + charge, best)


def _block_minimum(problem, index, slope, block, tangent, largest, reach):
    """min of slope . d + curvature/2 d^2 over the block's box, or over everything; and a charge."""
    box, curvatures = problem.stages[index].box, problem.objective.curvature_blocks
    curvature = jnp.asarray(0.0 if curvatures is None else curvatures[index], block.dtype)
    curvature = jnp.where(tangent, jnp.broadcast_to(curvature, block.shape), 0)
    curved = curvature > 0
    newton = -slope / jnp.where(curved, curvature, 1)
    if box is not None:
        lowest, highest = (jnp.broadcast_to(jnp.asarray(b), block.shape) for b in box)
        corner = jnp.where(slope > 0, lowest - block, highest - block)
        # A curved entry is minimised at the Newton step, brought into the box.
        step = jnp.where(curved, jnp.clip(newton, lowest - block, highest - block), corner)
        step = jnp.where((slope == 0) & ~curved, 0, step)
        return jnp.sum(slope * step + 0.5 * curvature * step**2), jnp.zeros_like(largest)
    # Without a box and without curvature only a zero slope gives a bound. Consistent multipliers
    # make it zero up to rounding, and what rounding left is charged at the block's own magnitude.
    negligible = jnp.abs(slope) <= 1e4 * jnp.finfo(block.dtype).eps * largest
    with_curvature = jnp.where(curved, 0.5 * slope * newton, 0)
    without = jnp.where(negligible, 0, -jnp.inf)
    charge = jnp.where(curved, 0, jnp.abs(slope) * (1 + reach))
    term = jnp.sum(jnp.where(curved, with_curvature, without))
    return term, jnp.sum(charge)
