"""The nonconvex reformulation: one forward pass, and one way back with one rule.

z_i = (1 - theta_i) lower_i + theta_i upper_i leaves only the inputs and the fractions theta in
[0, 1] to search over (the paper's eq. 2). Going back, a cotangent g at z_i is shared between the
two bounds in proportion to fractions `shares`, and everything in the paper that sweeps backwards
differs only in how the shares are chosen:

    ordinary gradient (eq. 5)         shares = theta
    Fix-Degeneracy(q)                 the corner (0 where g > 0, 1 where g < 0) for entries whose
                                      p = theta g+ + (1 - theta) g- exceeds 2 q (omega + width);
                                      theta elsewhere
    Escape-Exact-Local-Min            Fix-Degeneracy with q = infinity: only where the width is zero
    consistent multipliers, greedy    Fix-Degeneracy with q = 0: the corner everywhere

with width = upper - lower, and omega the distance that later blocks were moved. So there is one
`custom_vjp`, below, and a sweep is chosen by the numbers (corrected, q).
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stagecert.pieces import Treatment
from stagecert.problem import Pick, Problem
from stagecert.sides import SideRule, Sides, without


class Point(eqx.Module):
    """Where a search stands: inputs in S and fractions theta in [0, 1], one array for each block.

    As the start of `solve`, `fractions` may be one number for all, and `inputs` may be None (the
    centre of the set).
    """

    inputs: Any = None
    fractions: Any = 0.5


class ForwardPass(eqx.Module):
    """One evaluation of the problem: value, blocks, their bounds, records of nonsmooth pieces.

    `total` is the value with what the side constraints add to it by the rule of the pass, `sides`
    their values, `held` the multipliers that the rule gave them.
    """

    value: Float[Array, ""]
    total: Float[Array, ""]
    blocks: tuple[Float[Array, "*block"], ...]
    lower: tuple[Float[Array, "*block"], ...]
    upper: tuple[Float[Array, "*block"], ...]
    records: Any
    sides: Sides
    held: Sides

    def widths(self) -> tuple:
        """upper - lower for each block."""
        return tuple(u - l for l, u in zip(self.lower, self.upper, strict=True))


class Sweep(eqx.Module):
    """One way back: what the rule made of the cotangents.

    multipliers: g_i = d psi_i / d z_i, the cotangent at each block; y "as drawn" for the ordinary
        rule.
    shares: the fractions with which cotangents went to the upper bounds (theta-hat).
    inputs: the cotangent at the inputs (grad_s psi_0 for the ordinary rule).
    moved: omega_0 = sum |theta - shares| * width.
    slack: by how much slopes chosen for nonsmooth pieces lower the linearisation: those of the
        stages, and those of the objective.
    """

    multipliers: tuple[Float[Array, "*block"], ...]
    shares: tuple[Float[Array, "*block"], ...]
    inputs: Any
    moved: Float[Array, ""]
    slack: tuple[Float[Array, ""], Float[Array, ""]]


@jax.custom_vjp
def mix(
    fractions: Float[Array, "*block"],
    lower: Float[Array, "*block"],
    upper: Float[Array, "*block"],
    channel: Any,
) -> tuple[Float[Array, "*block"], Any]:
    """(1 - fractions) lower + fractions upper; the channel passes through.

    The channel is a dummy vector whose *cotangent* (omega, corrected, q) runs backwards through
    the stages beside the cotangents of the blocks: it tells each stage the rule, and what was
    moved later.
    """
    return (1 - fractions) * lower + fractions * upper, channel


def _mix_fwd(fractions, lower, upper, channel):
    return mix(fractions, lower, upper, channel), (fractions, lower, upper)


def _mix_bwd(residuals, cotangents):
    fractions, lower, upper = residuals
    g, (omega, corrected, q) = cotangents
    width = upper - lower
    p = complementarity(g, fractions)
    reach = omega + width
    # q = infinity times a zero reach must mean zero, not NaN: there every p > 0 is corrected.
    threshold = jnp.where(reach > 0, 2 * q * jnp.where(reach > 0, reach, 1), 0)
    fix = (corrected > 0) & (p > threshold)
    shares = jnp.where(fix, jnp.where(g > 0, 0, 1).astype(fractions.dtype), fractions)
    omega = omega + jnp.sum(jnp.abs(fractions - shares) * jnp.maximum(width, 0))
    # Each fraction is used once, so the slot of its cotangent is free to carry the shares out.
    return shares, (1 - shares) * g, shares * g, (omega, corrected, q)


mix.defvjp(_mix_fwd, _mix_bwd)


def complementarity(multipliers, fractions):
    """theta g+ + (1 - theta) g-: zero where each multiplier's own bound is attained."""
    return fractions * jnp.maximum(multipliers, 0) + (1 - fractions) * jnp.maximum(-multipliers, 0)


def full_point(problem: Problem, start: Point | None, dtype) -> Point:
    """A complete, projected starting point from what the user gave."""
    start = Point() if start is None else start
    inputs = problem.inputs.centre() if start.inputs is None else start.inputs
    inputs = jax.tree.map(lambda x: jnp.asarray(x, dtype), inputs)
    shapes = problem.block_shapes()
    given = start.fractions
    if not isinstance(given, (tuple, list)):
        given = (given,) * len(shapes)
    fractions = tuple(
        jnp.clip(jnp.broadcast_to(jnp.asarray(f, dtype), s.shape), 0, 1)
        for f, s in zip(given, shapes, strict=True)
    )
    return Point(problem.inputs.project(inputs), fractions)


def _run(problem, point, probes, channel, treatments, data, rule) -> tuple[ForwardPass, Any]:
    inputs, fractions = point
    of_stages, of_objective = treatments
    traces: tuple = ()
    for index, stage in enumerate(problem.stages):
        trace, channel = stage.trace(
            inputs,
            tuple(t.block for t in traces),
            Pick(mix, fractions[index], probes[index]),
            channel,
            of_stages,
            None if data is None else data[0][index],
        )
        traces = (*traces, trace)
    blocks = tuple(t.block for t in traces)
    value, records = problem.objective.evaluate(
        inputs, blocks, of_objective, None if data is None else data[1]
    )
    lower, upper = tuple(t.lower for t in traces), tuple(t.upper for t in traces)
    given = None if data is None or not problem.constraints else data[2]
    values, more = constraint_values(problem, inputs, blocks, of_stages, given)
    sides = Sides(values, order_of(problem, lower, upper))
    term, held = rule(sides)
    records = (tuple(t.records for t in traces), records, *([more] if problem.constraints else []))
    total = value + term
    return ForwardPass(value, total, blocks, lower, upper, records, sides, held), channel


def constraint_values(problem: Problem, inputs, blocks, treatment=None, data=None):
    """(the values of the declared constraints, records of their pieces)."""
    found = [
        constraint.evaluate(inputs, blocks, treatment, None if data is None else data[k])
        for k, constraint in enumerate(problem.constraints)
    ]
    return tuple(values for values, _ in found), tuple(records for _, records in found)


def order_of(problem: Problem, lower: tuple, upper: tuple) -> tuple:
    """lower - upper of each stage, where their order is enforced as a side constraint."""
    if problem.guide is None or not problem.guide.ordered:
        return ()
    return tuple(l - u for l, u in zip(lower, upper, strict=True))


def _channel(dtype, omega=0.0, corrected=0.0, q=0.0):
    return tuple(jnp.asarray(x, dtype) for x in (omega, corrected, q))


def forward_pass(
    problem: Problem, point: Point, treatment: Treatment | None = None, data=None
) -> ForwardPass:
    """Runs the stages at a point. One pass."""
    zeros = jax.tree.map(jnp.zeros_like, point.fractions)
    dtype = jnp.result_type(*jax.tree.leaves(point.inputs))
    treatments = (treatment, treatment)
    at = (point.inputs, point.fractions)
    return _run(problem, at, zeros, _channel(dtype), treatments, data, without)[0]


def forward(problem: Problem, inputs, fractions) -> tuple:
    """The blocks at (inputs, fractions): the paper's Forward."""
    return forward_pass(problem, Point(inputs, fractions)).blocks


def psi_0(problem: Problem, inputs, fractions):
    """The objective at (inputs, fractions): the paper's psi_0."""
    return forward_pass(problem, Point(inputs, fractions)).value


def linearise(
    problem: Problem,
    point: Point,
    treatment_of: Callable[[Any], Treatment] | None = None,
    data=None,
    rule: SideRule = without,
) -> tuple[ForwardPass, Callable[[Any, Any], Sweep]]:
    """A forward pass, and the function (corrected, q) -> Sweep that goes back from it.

    One pass forward, and one for each call of the returned function. `treatment_of` takes the dummy
    scalar whose cotangent collects the slack of chosen slopes (see pieces.sloped_max); `rule` says
    how side constraints count.
    """
    dtype = jnp.result_type(*jax.tree.leaves(point.inputs))

    def run(inputs, fractions, probes, channel, slack_shares):
        treatments = tuple(None if treatment_of is None else treatment_of(s) for s in slack_shares)
        at = (inputs, fractions)
        done, channel = _run(problem, at, probes, channel, treatments, data, rule)
        return (done.total, channel), done

    zeros = jax.tree.map(jnp.zeros_like, point.fractions)
    (value, _), pull, done = jax.vjp(
        run,
        point.inputs,
        point.fractions,
        zeros,
        _channel(dtype),
        (jnp.ones((), dtype), jnp.ones((), dtype)),
        has_aux=True,
    )

    def back(corrected, q) -> Sweep:
        seed = (jnp.ones_like(value), _channel(dtype, 0, corrected, q))
        inputs, shares, multipliers, (moved, _, _), slack = pull(seed)
        return Sweep(multipliers, shares, inputs, moved, slack)

    return done, back


def psi_0_and_gradient(problem: Problem, point: Point, treatment_of=None, data=None, rule=without):
    """(forward pass, gradient of psi_0 as a Point): eq. 5. Two passes."""
    done, back = linearise(problem, point, treatment_of, data, rule)
    sweep = back(0, 0)
    return done, Point(sweep.inputs, fractions_gradient(done, sweep))


def fractions_gradient(done: ForwardPass, sweep: Sweep) -> tuple:
    """d psi_0 / d theta_i = g_i * (upper_i - lower_i)."""
    return tuple(g * w for g, w in zip(sweep.multipliers, done.widths(), strict=True))
