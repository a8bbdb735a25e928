"""Greedy steps with a memory: the slopes of nonsmooth pieces move gradually instead of jumping.

A greedy step answers the latest slopes with the best corner, and takes the slopes of the pieces
from there; at an optimum with kinks the two chase each other for ever. Here the slopes remember:
max(x) = max over weights w of w . x, and each step moves w towards the weights that x asks for by
w <- projection of w + x / width, a proximal step on the dual side, which is free because x is known
from the forward pass. The width of each piece grows with how much its own x has jumped so far (as
in AdaGrad), so steps shrink where, and only where, the search still oscillates. The point goes to
the corner, from the fourth step on half of the way, and less and less: it becomes an average of the
corners, which settles what curved stages do and finds the kinks, where no corner is.

A step costs two passes, whatever happens: one forward, one back.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import pieces, tree
from stagecert.certificate import Crossing, Proposal, evaluate, passes_of_evaluate
from stagecert.problem import Problem
from stagecert.reformulation import Point
from stagecert.solvers.base import AbstractSolver, Report, report
from stagecert.solvers.polish import is_datum, smoothing_data


class Memory(eqx.Module):
    """What is remembered of one nonsmooth piece.

    weights: its slopes; unit: the range of its arguments; jumps: the sum of the squares by which
    its arguments changed from step to step; last: the arguments of the last step.
    """

    weights: Any
    unit: Any
    jumps: Any
    last: Any


def _is_memory(node) -> bool:
    return isinstance(node, Memory)


class DampedState(eqx.Module):
    """Where the search stands, where the greedy corner is, and what the pieces remember."""

    point: Point
    corner: Point
    memory: Any
    count: Any


class Damped(AbstractSolver):
    """Greedy steps with damped slopes.

    Attributes:
        hints: problem -> (unit, first weights) for every nonsmooth piece, arranged like the records
            of a forward pass. None: both are measured at the starting point.
        rate: how far the slopes move: a piece whose arguments differ by `base` times its unit moves
            them by rate / 2.
        base: share of a piece's unit that counts as a small difference.
        whole: how many steps go all the way to the corner.
        settle: of the later steps, the k-th goes settle / (settle + k) / 2 of the way.
    """

    name: ClassVar[str] = "damped"
    hints: Callable[[Problem], Any] | None = eqx.field(static=True, default=None)
    rate: float = 1.4
    base: float = 0.08
    whole: int = 3
    settle: float = 10.0
    patience: int = 8
    progress: float = 0.9

    def init(self, problem, point):
        # With hints, the first step evaluates the starting point: one compiled step does all.
        if self.hints is None:
            exact = evaluate(problem, point, pieces.measured, with_gradient=False)
            data = smoothing_data(exact.done.records)
            slopes = jax.tree.map(lambda r: r[1], exact.done.records, is_leaf=is_datum)
            exact = eqx.tree_at(lambda e: e.done.records, exact, slopes)
            found = report(exact, passes_of_evaluate(with_gradient=False))
            corner = Point(exact.minimiser, exact.consistent.shares)
        else:
            data = self.hints(problem)
            slopes = jax.tree.map(lambda datum: datum[1], data, is_leaf=is_datum)
            infinity = jnp.full((), jnp.inf, jax.tree.leaves(point)[0].dtype)
            nowhere = Crossing(jnp.zeros_like(infinity), jnp.array(-1), jnp.array(-1))
            proposal = Proposal(point, slopes, jnp.ones_like(infinity))
            zero = jnp.zeros((), jnp.int32)
            found = Report(
                point,
                infinity,
                nowhere,
                -infinity,
                proposal,
                zero,
                jnp.array(False),
                jnp.array(True),
            )
            corner = point
        memory = jax.tree.map(first_memory, data, is_leaf=is_datum)
        return DampedState(point, corner, memory, jnp.zeros((), jnp.int32)), found

    def remember(self, x, memory: Memory, count) -> Memory:
        """What a piece remembers of a step in which its arguments were x, after `count` others."""
        compared, jump = pieces.compared(x, memory.last)
        jumps = jnp.where(count > 0, memory.jumps + jump**2, memory.jumps)
        width = jnp.sqrt((self.base * memory.unit) ** 2 + jumps) / self.rate
        # A piece that cannot move (all arguments equal) has no width: any weights will do.
        width = jnp.where(width > 0, width, 1)
        weights = pieces.smooth_weights(x, width, memory.weights)
        return Memory(weights, memory.unit, jumps, compared)

    def step(self, problem, state: DampedState):
        dtype = jax.tree.leaves(state.point)[0].dtype
        point = tree.between(state.point, state.corner, self.share(state.count, dtype))
        evaluation = evaluate(
            problem, point, self._remembering(state.count), state.memory, with_gradient=False
        )
        memory = evaluation.done.records
        weights = jax.tree.map(lambda m: m.weights, memory, is_leaf=_is_memory)
        evaluation = eqx.tree_at(lambda e: e.done.records, evaluation, weights)
        corner = Point(evaluation.minimiser, evaluation.consistent.shares)
        passes = passes_of_evaluate(with_gradient=False)
        return DampedState(point, corner, memory, state.count + 1), report(evaluation, passes)

    def share(self, count, dtype):
        """How far towards the corner the step goes that comes after `count` others."""
        late = jnp.maximum(count - self.whole, 0).astype(dtype)
        return jnp.where(late == 0, 1.0, 0.5 * self.settle / (self.settle + late)).astype(dtype)

    def _remembering(self, count):
        def treatment_of(slack_share):
            def treat(x, memory: Memory):
                new = self.remember(jax.lax.stop_gradient(x), memory, count)
                return pieces.sloped_max(x, new.weights, slack_share), new

            return treat

        return treatment_of


def first_memory(datum) -> Memory:
    """A piece of which only its unit and its first weights are known."""
    unit, weights = datum
    zero = jnp.zeros_like(unit)
    return Memory(weights, unit, zero, pieces.nothing_compared(weights, unit))
