"""Before a search with side constraints: their units, an interior point, or a proof of none.

A few random points tell in which units constraints and objective are measured, and often one of
them satisfies all constraints. If none does, the largest of all constraints (each in its unit) is
minimised: a problem without side constraints, for the same solvers. A negative value is an interior
point, towards which the search repairs its points; a positive bound proves that nothing is
feasible, and the slopes of the maximum are the multipliers that show it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.batch import Certified, lane_of
from stagecert.certificate import Certificate, Proposal, propose, shape_of_certificate
from stagecert.formula import Anchor, lower_bound
from stagecert.lanes import Lane, mapped
from stagecert.problem import Objective, Problem, as_arrays
from stagecert.programme.solver import with_programme
from stagecert.reformulation import Point, constraint_values, forward_pass
from stagecert.searching import Goal, Search
from stagecert.sides import Guide, Sides
from stagecert.solvers import Polish

SAMPLES = 16
# Depth is how far inside the tightest constraint a point is, in units of that constraint.
ENOUGH = 0.05  # where the first search for an interior point stops
LITTLE = 0.01  # a sampled point that is less deep is not good enough
ACCURACY = 1e-8  # of that search, if it finds neither depth nor a proof


class Measured(eqx.Module):
    """What random points showed: a guide, the constraints' units, and how deep its interior is."""

    guide: Guide
    units: Sides
    depth: Any


def attached(problem, axes, guide: Guide):
    """(problem, axes) with a guide whose arrays have a leading axis of lanes."""
    if axes is None:
        return replace(problem, guide=jax.tree.map(lambda x: x[0], guide)), None
    marks = jax.tree.map(lambda _: 0, guide)
    return replace(problem, guide=guide), replace(axes, guide=marks)


@eqx.filter_jit
def measured_lanes(axes, problem: Problem, points: Point) -> Measured:
    """What a few points of each lane show; the problem's guide says whether order counts."""
    return mapped(_measured, axes, problem, points)


def _measured(problem: Problem, start: Point) -> Measured:
    def drawn(key) -> Point:
        of_inputs, of_fractions = jax.random.split(key)
        inputs = problem.inputs.sample(of_inputs)
        keys = jax.random.split(of_fractions, max(len(start.fractions), 1))
        fractions = tuple(
            # Some at the ends, which optima like; most in between.
            jnp.clip(jax.random.uniform(k, f.shape, f.dtype, -0.1, 1.1), 0, 1)
            for k, f in zip(keys, start.fractions, strict=False)
        )
        like = jax.tree.map(lambda x, s: x.astype(s.dtype), inputs, start.inputs)
        return Point(problem.inputs.project(like), fractions)

    random = jax.vmap(drawn)(jax.random.split(jax.random.key(0), SAMPLES))
    points = jax.tree.map(lambda one, many: jnp.concatenate([one[None], many]), start, random)
    done = jax.vmap(lambda p: forward_pass(problem, p))(points)
    units = jax.tree.map(_range, done.sides)
    of_objective = _range(done.value)

    def depth_of(g, unit):
        depth = -g / unit
        return jnp.min(depth.reshape(depth.shape[0], -1), axis=1, initial=jnp.inf)

    depths = jax.tree.reduce(jnp.minimum, jax.tree.map(depth_of, done.sides, units), jnp.inf)
    depths = jnp.where(jnp.isnan(depths) | ~jnp.isfinite(done.value), -jnp.inf, depths)
    best = jnp.argmax(depths)
    guide = Guide(
        jax.tree.map(lambda u: u**2 / of_objective, units),
        jax.tree.map(lambda g: jnp.zeros_like(g[0]), done.sides),
        jax.tree.map(lambda x: x[best], (points.inputs, done.blocks)),
        jax.tree.map(lambda g: g[best], done.sides),
        jax.tree.map(lambda u: 64 * jnp.finfo(u.dtype).eps * u, units),
        problem.guide.ordered,
        problem.guide.followed,
    )
    return Measured(guide, units, depths[best])


def _range(values):
    """How much each entry differs between points; its own size where it does not."""
    values = jnp.where(jnp.isfinite(values), values, jnp.nan)
    low, high = jnp.nanmin(values, axis=0), jnp.nanmax(values, axis=0)
    size = jnp.maximum(jnp.abs(low), jnp.abs(high))
    floor = 1e-3 * jnp.maximum(size, jnp.nan_to_num(jnp.nanmean(size)))
    width = jnp.nan_to_num(jnp.maximum(high - low, floor))
    return jnp.where(width > 0, width, 1)


# -- the largest constraint ------------------------------------------------------------------------


class _Held(eqx.Module):
    """What the largest constraint is made of; the stages only where their order counts."""

    problem: Any
    units: Sides


def _nothing(inputs, blocks):
    return jnp.zeros((), jnp.result_type(*jax.tree.leaves(inputs)))


def _largest(held: _Held, inputs, blocks):
    problem, values = held.problem, []
    found, _ = constraint_values(problem, inputs, blocks)
    for g, unit in zip(found, held.units.constraints, strict=True):
        values.append(jnp.ravel(g / unit))
    for i, unit in enumerate(held.units.order):
        lower, upper, _ = problem.stages[i].bounds(inputs, blocks[:i], blocks[i])
        values.append(jnp.ravel((lower - upper) / unit))
    return pieces.max(jnp.concatenate(values))


def _of_largest(problem: Any, units: Sides, functions=(_largest, _nothing)) -> Any:
    """The problem of minimising the largest constraint; with no functions, the axes of a batch."""
    largest, nothing = functions
    held = _Held(replace(problem, objective=Objective(nothing), guide=None), units)
    objective, guide = Objective(largest, held), Guide(followed=True)
    return replace(problem, objective=objective, constraints=(), guide=guide)


# -- what solve calls ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A problem with its guide; which lanes are infeasible, the proof of it, and what it cost.

    `records` are those of the search for the smallest largest constraint, as a `Search` keeps them;
    `kept` and `best` are how it ended, None where there was none.
    """

    problem: Problem
    axes: Any
    infeasible: np.ndarray
    proof: Certificate | None
    iterations: np.ndarray
    passes: np.ndarray
    records: list
    kept: Lane | None = None
    best: Certified | None = None


@dataclass(frozen=True)
class Before:
    """What is needed of the search that comes after.

    ordered: whether the order of bounds is enforced; iterations: the most there may be; certified:
    (problem, axes, kept) -> values and bounds in float64; derived: (problem, axes, certificates) ->
    the bounds that these prove.
    """

    ordered: bool
    iterations: int
    clock: Any
    certified: Callable[[Any, Any, Lane], Certified]
    derived: Callable[[Any, Any, Certificate], np.ndarray]


def prepared(problem: Problem, axes, points: Point, before: Before) -> Prepared:
    """Measures the constraints and finds interior points, or proofs that there is none."""
    dtype = jax.tree.leaves(points)[0].dtype
    size = len(jax.tree.leaves(points)[0])
    blank = replace(problem, guide=Guide(ordered=before.ordered, followed=before.ordered))
    found: Measured = measured_lanes(axes, as_arrays(blank, dtype), points)
    depth = np.asarray(found.depth, float)
    shallow = depth < LITTLE
    nothing = np.zeros(size, np.int32)
    if not shallow.any():
        problem, axes = attached(problem, axes, found.guide)
        return Prepared(problem, axes, np.zeros(size, bool), None, nothing, nothing, [])
    units = found.units if axes is not None else jax.tree.map(lambda x: x[0], found.units)
    largest = _of_largest(problem, units)
    marks = None
    if axes is not None:
        marks = _of_largest(axes, jax.tree.map(lambda _: 0, units), (None, None))
    arrays = as_arrays(largest, dtype)
    solvers = with_programme(Polish(), size > 1)
    loop = Search(arrays, marks, solvers, before.clock, lambda *_: None)
    goal = Goal(ACCURACY, 0.0, -ENOUGH, 0.0, np.where(shallow, before.iterations, 0))
    best = loop.towards(goal, points, lambda kept: before.certified(largest, marks, kept))
    kept = loop.kept
    deeper = best.value < -np.maximum(depth, 0)
    inside = (best.inputs, best.blocks)
    guide = _with_interior(axes, as_arrays(blank, dtype), found.guide, inside, deeper)
    refuted, proof = shallow & (best.bound > 0), None
    if refuted.any():
        like = shape_of_certificate(lane_of(problem, axes, 0)).slopes
        proof = _proof(axes, problem, _refuting(kept, found.units, like), like)
        bound = before.derived(problem, axes, proof)
        proof, refuted = replace(proof, bound=bound), refuted & (bound > 0)
    problem, axes = attached(problem, axes, guide)
    spent = kept.iteration, kept.passes
    return Prepared(problem, axes, refuted, proof, *spent, loop.records, kept, best)


def _with_interior(axes, problem, guide: Guide, inside, deeper) -> Guide:
    """The guide with other interior points where these are deeper."""
    inside = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), inside, guide.interior)
    slack = _sides_at(axes, problem, inside)

    def chosen(new, old):
        return jax.vmap(jnp.where)(jnp.asarray(deeper), new, old)

    return replace(
        guide,
        interior=jax.tree.map(chosen, inside, guide.interior),
        slack=jax.tree.map(chosen, slack, guide.slack),
    )


@eqx.filter_jit
def _sides_at(axes, problem, inside) -> Sides:
    def sides(problem, inside):
        inputs, blocks = inside
        values, _ = constraint_values(problem, inputs, blocks)
        order = ()
        if problem.guide.ordered:
            for i, stage in enumerate(problem.stages):
                lower, upper, _ = stage.bounds(inputs, blocks[:i], blocks[i])
                order = (*order, lower - upper)
        return Sides(values, order)

    return mapped(sides, axes, problem, inside)


def _refuting(kept: Lane, units: Sides, like) -> Proposal:
    """The multipliers of each constraint from the slopes of the largest one, lane by lane.

    `like` is how the slopes of the problem itself are arranged.
    """
    proposal = kept.proposal
    of_stages, of_largest = proposal.slopes
    *inner, weights = of_largest
    leaves, structure = jax.tree.flatten(units)
    sizes = [int(np.prod(unit.shape[1:], dtype=int)) for unit in leaves]
    parts = np.split(np.asarray(weights), np.cumsum(sizes)[:-1], axis=-1)
    sides = structure.unflatten(
        [w.reshape(u.shape) / np.asarray(u) for w, u in zip(parts, leaves, strict=True)]
    )
    slopes = [of_stages, ()]
    for part in like[2:]:
        of_constraints = ()
        for own in part:
            of_constraints = (*of_constraints, tuple(inner[: len(own)]))
            inner = inner[len(own) :]
        slopes.append(of_constraints)
    return Proposal(proposal.point, tuple(slopes), proposal.corrected, sides)


def _proof(axes, problem: Problem, proposal: Proposal, like) -> Certificate:
    """Certificates of infeasibility, in float64."""
    with jax.enable_x64(True):
        problem, proposal = as_arrays((problem, proposal), jnp.float64)
        return jax.tree.map(np.asarray, _proof_lanes(axes, problem, proposal, like[1]))


@eqx.filter_jit
def _proof_lanes(axes, problem, proposal, like) -> Certificate:
    def one(problem: Problem, proposal: Proposal):
        inputs = problem.inputs.project(proposal.point.inputs)
        proposal = replace(proposal, point=Point(inputs, proposal.point.fractions))
        order = Guide(ordered=bool(proposal.sides.order), followed=True)
        done, multipliers = propose(
            replace(problem, objective=Objective(_nothing), guide=order), proposal
        )
        of_stages, _, *rest = done.records
        # The objective has no say, but all certificates of a problem are arranged alike.
        unused = jax.tree.map(lambda s: jnp.zeros(s.shape), like)
        slopes = (of_stages, unused, *rest)
        anchor = Anchor(inputs, done.blocks)
        bound = lower_bound(problem, anchor, multipliers, slopes, done.held, True).bound()
        return Certificate(
            inputs, done.blocks, multipliers, slopes, bound, sides=done.held, feasibility=True
        )

    return mapped(one, axes, problem, proposal)
