"""PDHG (Chambolle and Pock) on the relaxation as a saddle problem.

    min over s in S, (a, z) in the hulls of max over m of row . last(s, z) + m . (segment(s, z) - a)

The primal step is a projection: a clip for the inputs, the nearest point of a hull in the plane for
each neuron. Multipliers give a lower bound in closed form, for which a step has all it needs;
feasible values take a pass of their own, and are looked at every few steps.

Steps are diagonal (Pock and Chambolle, 2011) in units of the intervals' widths, in which the
constraints' rows have absolute sums of two whatever the network's scale.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.paper.methods.driver import Found, LaneMethod, Search
from benchmarks.paper.methods.relaxed import (
    Lane,
    Shared,
    absolute,
    activation,
    arguments_at,
    dual_value,
    problem_of,
    pulled_back,
)
from stagecert.reformulation import Point, forward_pass

NEWTON_STEPS = 16  # where the error is down to rounding, whatever the hull


def _on_segment(point, start, end, units):
    """The nearest point of a segment in the plane, distances measured in units; all are pairs."""
    d = [(e - s) / u for s, e, u in zip(start, end, units, strict=True)]
    p = [(x - s) / u for x, s, u in zip(point, start, units, strict=True)]
    length = d[0] ** 2 + d[1] ** 2
    along = d[0] * p[0] + d[1] * p[1]
    t = jnp.clip(along / jnp.where(length > 0, length, 1), 0, 1)
    return tuple(s + t * (e - s) for s, e in zip(start, end, strict=True))


def _on_curve(point, low, high, units):
    """The nearest point of softplus's graph over [low, high] to a point below the graph.

    Half the squared distance falls up to there and rises from there on: Newton's method, with
    bisection wherever it would leave the bracket.
    """
    a, z = point
    one, two = (1 / unit**2 for unit in units)

    def improve(_, state):
        left, right, at = state
        small = jnp.exp(-jnp.abs(at))
        height = jnp.maximum(at, 0) + jnp.log1p(small)
        slope = jnp.where(at >= 0, 1, small) / (1 + small)
        rise = (at - a) * one + (height - z) * slope * two
        bend = one + (slope**2 + (height - z) * slope * (1 - slope)) * two
        left, right = jnp.where(rise < 0, at, left), jnp.where(rise < 0, right, at)
        newton = at - rise / jnp.where(bend > 0, bend, 1)
        inside = (bend > 0) & (newton >= left) & (newton <= right)
        return left, right, jnp.where(inside, newton, 0.5 * left + 0.5 * right)

    start = jnp.clip(a, low, high)
    *_, nearest = jax.lax.fori_loop(0, NEWTON_STEPS, improve, (low, high, start))
    return nearest, activation("softplus", nearest)


def onto_hull(kind: str, point, low, high, units):
    """The point of the hull of an activation's graph over [low, high] that is nearest.

    Args:
        kind: "relu" or "softplus".
        point: (argument, block).
        units: (of arguments, of blocks) in which distances are measured.
    """
    a, z = point
    ends = ((low, activation(kind, low)), (high, activation(kind, high)))
    chord = _on_segment(point, *ends, units)
    if kind == "relu":
        corner = jnp.clip(0.0, low, high)
        corner = (corner, activation(kind, corner))
        others = [_on_segment(point, end, corner, units) for end in ends]
    else:
        others = [_on_curve(point, low, high, units)]

    def distance(other):
        return sum(((x - y) / u) ** 2 for x, y, u in zip(point, other, units, strict=True))

    best, least = chord, distance(chord)
    for other in others:
        far = distance(other)
        best = tuple(jnp.where(far < least, o, b) for o, b in zip(other, best, strict=True))
        least = jnp.minimum(far, least)
    width = jnp.where(high > low, high - low, 1)
    above = ends[0][1] + (ends[1][1] - ends[0][1]) * (a - low) / width
    inside = (a >= low) & (a <= high) & (z >= activation(kind, a)) & (z <= above)
    return tuple(jnp.where(inside, p, b) for p, b in zip(point, best, strict=True))


class Primal(eqx.Module):
    """Inputs, arguments and blocks."""

    inputs: Any
    arguments: tuple
    blocks: tuple


class Steps(eqx.Module):
    """Step sizes of everything, and the units of neurons' (arguments, blocks)."""

    inputs: Any
    pairs: tuple  # of arguments and of blocks, in their units squared
    multipliers: tuple
    units: tuple


class _State(eqx.Module):
    primal: Primal
    multipliers: tuple
    steps: Steps


def _half_width(pair):
    low, high = pair
    scale = 1e-6 * (1 + jnp.abs(low) + jnp.abs(high))  # something, where an interval is a point
    return jnp.maximum(0.5 * (high - low), scale)


def diagonal_steps(shared: Shared, lane: Lane, weight: float) -> Steps:
    """Steps 1 / (sums of absolute values of columns and rows), balanced by the row's size."""
    inputs = jax.tree.map(lambda x: jnp.maximum(x, 1e-6), lane.inputs.scale())
    units = tuple(
        (_half_width(argument), _half_width(image))
        for argument, image in zip(lane.arguments, lane.images, strict=True)
    )
    blocks = tuple(two for _, two in units)

    def radii(inputs, blocks):
        return tuple(absolute(layer.segment, inputs, blocks) for layer in shared.parts.layers)

    reach, back = jax.vjp(radii, inputs, blocks)
    of_inputs, of_blocks = back(tuple(1 / one for one, _ in units))
    # In units, every argument is of size one, and so is what multiplies it at best: the objective's
    # slope, in units of its variables, is the size that multipliers have.
    slope_inputs, slope_blocks = pulled_back(
        shared, lane, tuple(jnp.zeros_like(one) for one, _ in units)
    )
    sizes = jax.tree.map(
        lambda g, u: jnp.max(jnp.abs(g * u)), (slope_inputs, slope_blocks), (inputs, blocks)
    )
    omega = weight * jnp.maximum(
        jax.tree.reduce(jnp.maximum, sizes), jnp.finfo(reach[0].dtype).tiny
    )
    of_inputs = jax.tree.map(
        lambda g, u: u**2 / jnp.maximum(g * u, 1e-3) / omega, of_inputs, inputs
    )
    pairs = tuple(
        1 / jnp.maximum(1, g * two) / omega for g, (_, two) in zip(of_blocks, units, strict=True)
    )
    multipliers = tuple(
        omega / (r / one + 1) / one**2 for r, (one, _) in zip(reach, units, strict=True)
    )
    return Steps(of_inputs, pairs, multipliers, units)


class PrimalDual(Search):
    """The iteration; see the module."""

    weight: float = 0.05
    look_every: int = eqx.field(static=True, default=20)

    def start(self, shared, lane):
        inputs = lane.inputs.centre()
        arguments = tuple(0.5 * low + 0.5 * high for low, high in lane.arguments)
        blocks = tuple(
            0.5 * wedge.lower(a) + 0.5 * wedge.upper(a)
            for wedge, a in zip(lane.wedges, arguments, strict=True)
        )
        primal = Primal(inputs, arguments, blocks)
        multipliers = tuple(jnp.zeros_like(a) for a in arguments)
        state = _State(primal, multipliers, diagonal_steps(shared, lane, self.weight))
        bound = dual_value(shared, lane, multipliers, *pulled_back(shared, lane, multipliers))
        return state, self._found(bound, state)

    def _found(self, bound, state: _State, value=None) -> Found:
        value = jnp.full_like(bound, jnp.inf) if value is None else value
        point = Point(state.primal.inputs, tuple(jnp.zeros_like(z) for z in state.primal.blocks))
        return Found(bound, state.multipliers, value, point)

    def step(self, shared, lane, state: _State, trial):
        old, m, steps = state.primal, state.multipliers, state.steps
        of_inputs, of_blocks = pulled_back(shared, lane, m)
        bound = dual_value(shared, lane, m, of_inputs, of_blocks)
        found = self._found(bound, state)
        inputs = lane.inputs.project(
            jax.tree.map(lambda x, g, t: x - t * g, old.inputs, of_inputs, steps.inputs)
        )
        pairs = []
        for k, kind in enumerate(shared.kinds):
            t, (one, two) = steps.pairs[k], steps.units[k]
            moved = (
                old.arguments[k] + t * one**2 * m[k],
                old.blocks[k] - t * two**2 * of_blocks[k],
            )
            pairs.append(onto_hull(kind, moved, *lane.arguments[k], (one, two)))
        new = Primal(inputs, tuple(a for a, _ in pairs), tuple(z for _, z in pairs))
        ahead = jax.tree.map(lambda x, y: 2 * x - y, new, old)
        reached = arguments_at(shared, ahead.inputs, ahead.blocks)
        m = tuple(
            y + t * (x - a)
            for y, t, x, a in zip(m, steps.multipliers, reached, ahead.arguments, strict=True)
        )
        return _State(new, m, steps), found

    def look(self, shared, lane, state: _State):
        """The bound of the latest multipliers, and a feasible point near the iterate."""
        m = state.multipliers
        bound = dual_value(shared, lane, m, *pulled_back(shared, lane, m))
        fractions = []
        for wedge, a, z in zip(
            lane.wedges, state.primal.arguments, state.primal.blocks, strict=True
        ):
            low, high = wedge.lower(a), wedge.upper(a)
            room = high > low
            fractions.append(
                jnp.clip(jnp.where(room, z - low, 0) / jnp.where(room, high - low, 1), 0, 1)
            )
        point = Point(state.primal.inputs, tuple(fractions))
        value = forward_pass(problem_of(shared, lane), point).value
        return Found(bound, m, value, point)

    def bound_of(self, shared, lane, proof):
        return dual_value(shared, lane, proof, *pulled_back(shared, lane, proof))


class Pdhg(LaneMethod):
    """PDHG with a limit on its steps.

    Args:
        weight: balances primal and dual steps: larger ones make multipliers move faster.
        precision: of the search.
    """

    name = "pdhg"
    label = "PDHG"
    limit = 2000

    def __init__(self, weight: float = 0.05, precision: str = "float32"):
        super().__init__(precision)
        self.weight = weight

    def refusal(self, problems):
        if len(problems.network.input_shapes) > 1:
            return "PDHG is written for networks with one input"
        return super().refusal(problems)

    def search(self, shared, trace):
        return PrimalDual(self.weight)
