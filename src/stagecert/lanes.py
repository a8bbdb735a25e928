"""One problem's search as pure JAX functions, and the same for a batch of them.

A lane is one problem with its solver's state and the best of what the solver reported. Nothing
here knows about clocks, batches on the host or what users see; that is stagecert.searching.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import tree
from stagecert.certificate import Crossing, Proposal, certify, standing
from stagecert.codes import (
    CONTRADICTED,
    CROSSED,
    MET,
    NOT_FINITE,
    OUT_OF_STEPS,
    PROVEN,
    REACHED,
    RUNNING,
    STUCK,
    contradicts,
)
from stagecert.problem import Problem
from stagecert.reformulation import Point, forward_pass
from stagecert.repairing import repaired
from stagecert.solvers.base import AbstractSolver, Report

CHUNK = 16  # most iterations between two looks at the clock


class Stopping(eqx.Module):
    """When a lane stops; arrays, so that other numbers do not recompile."""

    atol: Any
    rtol: Any
    met: Any  # stop when value <= met
    proof: Any  # stop when bound > proof
    iterations: Any


class Lane(eqx.Module):
    """One problem's search: the solver's state and the best of what it reported."""

    state: Any
    point: Point
    value: Any
    proposal: Proposal
    bound: Any
    crossing: Crossing
    iteration: Any
    passes: Any
    stale: Any
    smallest: Any
    code: Any


class History(eqx.Module):
    """What a chunk of iterations recorded."""

    value: Any
    bound: Any
    passes: Any


def _absorbed(
    lane: Lane, found: Report, stopping: Stopping, solver: AbstractSolver, running: Any = True
) -> Lane:
    """The lane after a report: best point and best bound kept, stopping rules applied.

    A lane that is not `running` stays as it is, but for its solver's state, which nothing reads.
    """
    finite = jnp.isfinite(found.value)
    crossed = found.crossing.amount > 0
    better = finite & ~crossed & found.feasible & (found.value < lane.value) & running
    higher = (found.bound > lane.bound) & jnp.isfinite(found.bound) & running
    value = jnp.where(better, found.value, lane.value)
    bound = jnp.where(higher, found.bound, lane.bound)
    gap = value - bound
    smaller = gap <= solver.progress * lane.smallest
    stale = jnp.where(smaller, 0, lane.stale + 1)
    code = jnp.array(RUNNING)
    code = jnp.where(lane.iteration >= stopping.iterations, OUT_OF_STEPS, code)
    code = jnp.where(found.stuck | (stale > solver.patience), STUCK, code)
    # A report without a pass only says where the solver will start.
    code = jnp.where(~finite & (found.passes > 0), NOT_FINITE, code)
    code = jnp.where(crossed, CROSSED, code)
    # An infinite bound proves nothing: inf <= inf must not count as a gap within tolerance.
    within = gap <= stopping.atol + stopping.rtol * jnp.abs(bound)
    code = jnp.where(jnp.isfinite(gap) & within, REACHED, code)
    code = jnp.where(value <= stopping.met, MET, code)
    code = jnp.where(bound > stopping.proof, PROVEN, code)
    eps = jnp.finfo(value.dtype).eps
    code = jnp.where(jnp.isfinite(gap) & contradicts(value, bound, eps), CONTRADICTED, code)
    return Lane(
        lane.state,
        tree.select(better, found.point, lane.point),
        value,
        tree.select(higher, found.proposal, lane.proposal),
        bound,
        tree.select(crossed & running, found.crossing, lane.crossing),
        lane.iteration,
        jnp.where(running, lane.passes + found.passes, lane.passes),
        jnp.where(running, stale, lane.stale),
        jnp.where(smaller & running, gap, lane.smallest),
        jnp.where(running, code, lane.code).astype(jnp.int32),
    )


def _start(problem: Problem, solver: AbstractSolver, stopping: Stopping, point: Point) -> Lane:
    state, found = solver.init(problem, point)
    infinity = jnp.full((), jnp.inf, found.value.dtype)
    zero = jnp.zeros((), jnp.int32)
    lane = Lane(
        state,
        found.point,
        infinity,
        found.proposal,
        -infinity,
        Crossing(jnp.zeros_like(infinity), jnp.array(-1), jnp.array(-1)),
        zero,
        zero,
        zero,
        infinity,
        zero,
    )
    return _absorbed(lane, found, stopping, solver)


def _change_solver(problem, solver: AbstractSolver, stopping: Stopping, lane: Lane) -> Lane:
    """Hands the best point over to the next solver, and the best multipliers of constraints."""
    if problem.guide is not None:
        problem = eqx.tree_at(lambda p: p.guide.centre, problem, lane.proposal.sides)
    state, found = solver.init(problem, lane.point)
    lane = eqx.tree_at(lambda l: l.state, lane, state, is_leaf=lambda x: x is None)
    lane = eqx.tree_at(lambda l: l.stale, lane, jnp.zeros_like(lane.stale))
    new = _absorbed(lane, found, stopping, solver)
    # Rows that only fill up a batch stay stopped.
    padding = lane.code == OUT_OF_STEPS
    return eqx.tree_at(lambda l: l.code, new, jnp.where(padding, lane.code, new.code))


def _certify(problem, point: Point, proposal: Proposal, eps):
    """Both ends of the gap, anew.

    A float32 point may lie outside of S, where functions need not be convex: project it again.
    """
    point = Point(problem.inputs.project(point.inputs), point.fractions)
    point, done = repaired(problem, point, forward_pass(problem, point))
    anchor = Point(problem.inputs.project(proposal.point.inputs), proposal.point.fractions)
    certificate, bound = certify(
        problem, Proposal(anchor, proposal.slopes, proposal.corrected, proposal.sides)
    )
    crossing, feasible = standing(problem, done, eps)
    return done, crossing, feasible, certificate, bound, point


# -- jitted entry points --------------------------------------------------------------------------
# Everything that belongs to lanes has a leading axis. `axes` says which leaves of the problem
# have one too; None is the single problem, run without vmap, so that lax.cond takes one branch
# only.


def mapped(function, axes, problem, *lanewise):
    if axes is None:
        out = function(problem, *jax.tree.map(lambda x: x[0], lanewise))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], out)
    arrays, static = eqx.partition(problem, eqx.is_array)
    return jax.vmap(
        lambda arrays, *lanewise: function(eqx.combine(arrays, static), *lanewise),
        in_axes=(axes, *(0 for _ in lanewise)),
    )(arrays, *lanewise)


@eqx.filter_jit
def start_lanes(axes, problem, solver, stopping, points) -> Lane:
    return mapped(lambda p, s, x: _start(p, solver, s, x), axes, problem, stopping, points)


@eqx.filter_jit
def change_lanes(axes, problem, solver, stopping, lanes) -> Lane:
    return mapped(lambda p, s, x: _change_solver(p, solver, s, x), axes, problem, stopping, lanes)


def _stepped(axes, problem, solver, stopping, lanes: Lane) -> Lane:
    """One iteration of the lanes that are running."""
    running = lanes.code == RUNNING
    state, found = mapped(solver.step, axes, problem, lanes.state)
    iteration = lanes.iteration + running.astype(lanes.iteration.dtype)
    lanes = eqx.tree_at(lambda l: (l.state, l.iteration), lanes, (state, iteration))
    return jax.vmap(lambda l, f, s, r: _absorbed(l, f, s, solver, r))(
        lanes, found, stopping, running
    )


def _nothing_yet(lanes: Lane, length: int) -> History:
    size = lanes.code.shape[0]
    nothing = jnp.full((size, length), jnp.nan, lanes.value.dtype)
    return History(nothing, nothing, jnp.full((size, length), -1, jnp.int32))


def _recorded(history: History, k, running, lanes: Lane) -> History:
    return History(
        history.value.at[:, k].set(lanes.value),
        history.bound.at[:, k].set(lanes.bound),
        history.passes.at[:, k].set(jnp.where(running, lanes.passes, -1)),
    )


@eqx.filter_jit
def advance_lanes(axes, problem, solver, stopping, lanes, limit) -> tuple[Lane, History]:
    """Up to `limit` (at most CHUNK) iterations, fewer if all lanes stop.

    The loop is around the batch, not in it: a loop under vmap would copy every lane's whole state
    in every iteration to hold back those that have stopped.
    """

    def body(carry):
        lanes, history, k = carry
        running = lanes.code == RUNNING
        lanes = _stepped(axes, problem, solver, stopping, lanes)
        return lanes, _recorded(history, k, running, lanes), k + 1

    lanes, history, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[0].code == RUNNING) & (carry[2] < limit),
        body,
        (lanes, _nothing_yet(lanes, CHUNK), jnp.array(0)),
    )
    return lanes, history


@eqx.filter_jit
def step_lanes(axes, problem, solver, stopping, lanes) -> tuple[Lane, History]:
    """One iteration, without a compiled loop around it.

    For expensive steps: inside of compiled loops, XLA's convolutions on CPUs are up to eight times
    slower.
    """
    running = lanes.code == RUNNING
    lanes = _stepped(axes, problem, solver, stopping, lanes)
    return lanes, _recorded(_nothing_yet(lanes, 1), 0, running, lanes)


@eqx.filter_jit
def certify_lanes(axes, problem, points, proposals, eps):
    return mapped(lambda p, x, y: _certify(p, x, y, eps), axes, problem, points, proposals)
