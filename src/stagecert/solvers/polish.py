"""The polishing search: projected quasi-Newton steps on psi_0, smoothed where it has kinks.

A rejected trial is not repeated in an inner loop but shortens the next iteration's step, so that
in a batch no problem waits for another's line search.

A nonsmooth piece max(x) = max over weights w of w . x is smoothed to the maximum of w . x -
width/2 |w - centre|^2. When the smoothed problem is nearly solved, the centres move to the
weights found: the proximal method of multipliers. The weights then converge to those that certify
the optimum, at a width that need not go to zero, so the smoothed problem stays well conditioned.
Side constraints are smoothed, and their multipliers moved, in the same way: that is the method of
multipliers for an augmented Lagrangian (stagecert.sides, stagecert.ordering).
Smoothing serves the search alone: every value and bound reported comes from the exact functions;
only the *slopes* of the pieces, which may be anything, are taken from the smoothed ones.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp

from stagecert import pieces, tree
from stagecert.certificate import evaluate, passes_of_evaluate
from stagecert.ordering import Centre
from stagecert.problem import Problem
from stagecert.reformulation import Point, fractions_gradient, linearise
from stagecert.sides import Sides, augmented, missed, with_multipliers
from stagecert.solvers.base import AbstractSolver, guide_of, project, repaired_report, report
from stagecert.solvers.quasi_newton import Curvature, Whole, bends, model_step

# Units are per entry, so that badly scaled rows are smoothed in their own measure, but no smaller
# than this share of the mean of their piece.
UNIT_FLOOR = 0.1
# Up to this length the model of the curvature is a whole matrix where the problem has kinks;
# without them, the last steps tell more of a curvature that changes smoothly.
SHORT = 64


def smoothing_data(records):
    """For every nonsmooth piece (its unit of length, weights in the middle of the simplex).

    The unit is how far apart the piece's arguments were when `records` were made (pieces.measured).
    """
    means = [jnp.mean(unit) for unit, *_ in jax.tree.leaves(records, is_leaf=is_datum)]
    largest = jnp.max(jnp.stack(means)) if means else 1.0

    def datum(record):
        unit, _, uniform = record
        # Arguments may happen to coincide at this point; their unit must not be zero.
        mean = jnp.mean(unit)
        mean = jnp.where(mean > 0, mean, jnp.where(largest > 0, 1e-3 * largest, 1))
        return jnp.hypot(unit, UNIT_FLOOR * mean), uniform

    return jax.tree.map(datum, records, is_leaf=is_datum)


def is_datum(node) -> bool:
    """Whether a node of a tree of records or data is that of one piece: (unit, weights, ...)."""
    return (
        isinstance(node, tuple)
        and len(node) in (2, 3)
        and hasattr(node[0], "dtype")
        and all(hasattr(x, "dtype") or pieces.is_weights(x) for x in node[1:])
    )


def recentred(data, slopes):
    """The data with the recorded slopes as new centres."""
    return jax.tree.map(lambda datum, w: (datum[0], w), data, slopes, is_leaf=is_datum)


class Slopes(eqx.Module):
    """What a smoothed pass found: slopes of the pieces, multipliers of the side constraints.

    `held` are the multipliers of the pass itself; those of `found` prove bounds.
    """

    pieces: Any
    held: Sides
    found: Centre


class Smoothed(eqx.Module):
    """The smoothed psi_0 as a function of one vector, with inputs in units of their set."""

    problem: Problem
    like: Point
    tau: Any
    data: Any
    centre: Centre

    def vector(self, point: Point):
        """The point as a vector."""
        scaled = jax.tree.map(jnp.divide, point, self._units())
        return jax.flatten_util.ravel_pytree(scaled)[0]

    def point(self, vector) -> Point:
        """The vector as a point."""
        _, back = jax.flatten_util.ravel_pytree(self.like)
        return jax.tree.map(jnp.multiply, back(vector), self._units())

    def _units(self) -> Point:
        # Inputs are measured in units of their set; fractions are numbers in [0, 1] already.
        units = jax.tree.map(
            lambda s, x: jnp.broadcast_to(jnp.where(s > 0, s, 1), x.shape).astype(x.dtype),
            self.problem.inputs.scale(),
            self.like.inputs,
        )
        return Point(units, jax.tree.map(jnp.ones_like, self.like.fractions))

    def project(self, vector):
        """The nearest vector whose point is in the set."""
        return self.vector(project(self.problem, self.point(vector)))

    def gradient(self, vector) -> Point:
        """A gradient in the vector's units as one in the point's."""
        _, back = jax.flatten_util.ravel_pytree(self.like)
        return jax.tree.map(jnp.divide, back(vector), self._units())

    def evaluate(self, vector):
        """(value, gradient, `Slopes`). Two passes."""
        treatment_of = (lambda _: pieces.smoothed(self.tau)) if jax.tree.leaves(self.data) else None
        widths = jax.tree.map(lambda w: self.tau * w, guide_of(self.problem).widths)
        point = self.point(vector)
        rule = augmented(self.centre.at(point.fractions), widths)
        done, back = linearise(self.problem, point, treatment_of, self.data, rule)
        sweep = back(0, 0)
        of_fractions = fractions_gradient(done, sweep)
        if done.held.order:
            of_centre = self.centre.gradient(point.fractions, done.held, widths)
            of_fractions = tree.move(of_fractions, of_centre, 1)
        gradient = Point(sweep.inputs, of_fractions)
        scaled = jax.tree.map(jnp.multiply, gradient, self._units())
        found = Centre.found(done.held, sweep.multipliers, point.fractions)
        slopes = Slopes(done.records, done.held, found)
        return done.total, jax.flatten_util.ravel_pytree(scaled)[0], slopes


class PolishState(eqx.Module):
    """Where the search stands, what it knows of the curvature, and the smoothing.

    `jump` is 1 when the next trial does not follow the model but goes to `target`: to evaluate
    anew after the centres moved (target = at), or to correct degenerate entries.
    """

    at: Any
    value: Any
    gradient: Any
    slopes: Slopes
    recent: Any  # the last values; a trial must be lower than the highest of them
    curvature: Curvature | Whole
    share: Any  # how much of the step the next trial takes
    tau: Any
    data: Any
    centre: Centre  # the multipliers of side constraints that the augmented Lagrangian is around
    hidden: Any  # what smoothing hid when the centres were last moved
    q: Any  # threshold for correcting degenerate entries, as in Fix-Degeneracy
    corrected: Any  # whether a correction was tried since the search last got on
    jump: Any
    target: Any


class Polish(AbstractSolver):
    """Projected quasi-Newton steps, with smoothing where the problem has nonsmooth pieces.

    Attributes:
        tau: first smoothing width, in units of each piece's own arguments.
        shrink: factor on the width when moving the centres no longer halves what smoothing hides.
        inner: trials between two evaluations of the exact problem, if it has nonsmooth pieces.
        pairs: how many steps the model of the curvature remembers; all of them where there are
            kinks or side constraints and vectors are no longer than `SHORT`.
        rounds: how many rounds of vector operations minimise that model.
        memory: how many recent values the nonmonotone line search looks back.
    """

    name: ClassVar[str] = "polish"
    tau: float = 0.1
    shrink: float = 0.5
    eager: float = 5.0
    slow: float = 0.5
    inner: int = 5
    pairs: int = 20
    rounds: int = 2
    memory: int = 4
    patience: int = 60
    progress: float = 0.99

    def init(self, problem, point):
        centre = Centre.given(guide_of(problem).centre)
        rule = with_multipliers(centre.sides)
        exact = evaluate(problem, point, pieces.measured, with_gradient=False, rule=rule)
        data = smoothing_data(exact.done.records)
        slopes = jax.tree.map(lambda record: record[1], exact.done.records, is_leaf=is_datum)
        exact = eqx.tree_at(lambda e: e.done.records, exact, slopes)
        tau = jnp.asarray(self.tau, exact.value.dtype)
        like = jax.tree.map(jnp.zeros_like, point)
        at = Smoothed(problem, like, tau, data, centre).vector(point)
        infinity = jnp.full_like(exact.value, jnp.inf)
        whole = bool(jax.tree.leaves((data, centre))) and at.size <= SHORT
        state = PolishState(
            at,
            infinity,
            jnp.zeros_like(at),
            Slopes(slopes, exact.done.held, centre),
            jnp.full((self.memory,), infinity),
            Whole.none(at) if whole else Curvature.none(min(self.pairs, at.size), at),
            jnp.ones_like(infinity),
            tau,
            data,
            centre,
            infinity,
            jnp.ones_like(infinity),
            jnp.array(False),
            jnp.array(True),
            at,
        )
        return (state, like), report(exact, passes_of_evaluate(with_gradient=False))

    def step(self, problem, carried):
        state, like = carried
        smooth = Smoothed(problem, like, state.tau, state.data, state.centre)
        kinks = bool(jax.tree.leaves((state.data, state.centre)))
        before = state.value
        trials = self.inner if kinks else 1
        if kinks:
            state = jax.lax.fori_loop(0, trials, lambda _, s: self._trial(smooth, s), state)
        else:
            state = self._trial(smooth, state)
        point = smooth.point(state.at)
        # The slopes are those of the smoothed pass, where they balance; at the blocks of the
        # exact pass the smoothed slopes would be others, and the bound far worse.
        exact = evaluate(
            problem,
            point,
            pieces.given_slopes,
            state.slopes.pieces,
            with_gradient=False,
            fix=state.q,
            rule=with_multipliers(state.slopes.found.sides),
        )
        left = self._left(smooth, state)
        held = state.slopes.held
        hidden = jnp.abs(exact.done.total - state.value) + missed(held, exact.done.sides)
        gap = exact.lagrangian_gap
        got_on = state.value < before - 1e-3 * gap
        state = eqx.tree_at(lambda s: s.corrected, state, state.corrected & ~got_on)
        # Stationary, little hidden, and still a gap: entries whose bounds meet hold the search.
        stopped = (left + hidden <= 0.1 * gap) & ~state.corrected
        # Solved to what smoothing hides: move the centres.
        rounding = 10 * jnp.finfo(hidden.dtype).eps * (1 + jnp.abs(exact.value))
        ready = (left <= self.eager * hidden) & (hidden > rounding) & ~stopped & kinks
        state = tree.select(ready, self._recentred(state, hidden), state)
        state = tree.select(stopped, self._correcting(smooth, state, exact.fixed), state)
        passes = 2 * trials + passes_of_evaluate(with_gradient=False, fix=True)
        return (state, like), repaired_report(problem, exact, passes)

    def _trial(self, smooth: Smoothed, state: PolishState) -> PolishState:
        steepest = jnp.max(jnp.abs(state.gradient))
        scale = jnp.where(steepest > 0, steepest, 1)
        d = model_step(
            state.at,
            state.gradient,
            state.curvature.model(scale),
            smooth.project,
            1 / scale,
            self.rounds,
        )
        slope = state.gradient @ d
        at = jnp.where(state.jump, state.target, smooth.project(state.at + state.share * d))
        value, gradient, slopes = smooth.evaluate(at)
        step, turn = at - state.at, gradient - state.gradient
        bent = bends(step, turn)
        limit = jnp.max(state.recent) + 1e-4 * (state.gradient @ step)
        # Near the optimum differences of values are rounding; the gradient still tells the way.
        rounding = jnp.finfo(value.dtype).eps * (1 + jnp.abs(state.value))
        good = value <= jnp.where(state.jump, state.value + 100 * rounding, limit + 4 * rounding)
        learned = state.curvature.extended(step, turn, bent)
        learned = tree.select(state.jump, state.curvature, learned)
        recent = jnp.roll(state.recent, 1).at[0].set(value)
        taken = PolishState(
            at,
            value,
            gradient,
            slopes,
            jnp.where(state.jump, value, recent),
            learned,
            # A step along which the gradient does not grow could have been longer.
            jnp.where(bent | state.jump, 1, jnp.minimum(2 * state.share, 1e8)),
            state.tau,
            state.data,
            state.centre,
            state.hidden,
            state.q,
            state.corrected,
            jnp.array(False),
            at,
        )
        # Quadratic interpolation along the segment, safeguarded. A step that needs a tiny share
        # comes from a bad model: forget it. Even a rejected trial taught something about the
        # curvature.
        bend = value - state.value - state.share * slope
        best = -0.5 * state.share**2 * slope / jnp.where(bend > 0, bend, 1)
        best = jnp.where(bend > 0, best, 0.1 * state.share)
        best = jnp.clip(best, 0.1 * state.share, 0.5 * state.share)
        tiny = best < 1e-4
        forgotten = jax.tree.map(jnp.zeros_like, learned)
        shorter = eqx.tree_at(
            lambda s: (s.share, s.curvature),
            state,
            (jnp.where(tiny, 1, best), tree.select(tiny, forgotten, learned)),
        )
        # A correction that did not help: correct fewer entries next time, as Fix-Degeneracy does.
        declined = eqx.tree_at(lambda s: (s.q, s.jump), state, (10 * state.q, jnp.array(False)))
        return tree.select(good, taken, tree.select(state.jump, declined, shorter))

    def _recentred(self, state: PolishState, hidden) -> PolishState:
        """The smoothed problem is solved to what smoothing itself hides: move the centres."""
        slow = hidden > self.slow * state.hidden
        return eqx.tree_at(
            lambda s: (s.tau, s.data, s.centre, s.hidden, s.value, s.corrected, s.jump, s.target),
            state,
            (
                jnp.where(slow, state.tau * self.shrink, state.tau),
                recentred(state.data, state.slopes.pieces),
                state.slopes.found,
                hidden,
                jnp.full_like(state.value, jnp.inf),
                jnp.array(False),
                jnp.array(True),
                state.at,
            ),
        )

    def _correcting(self, smooth: Smoothed, state: PolishState, fractions) -> PolishState:
        """Try corrected fractions next."""
        target = smooth.vector(Point(smooth.point(state.at).inputs, fractions))
        return eqx.tree_at(
            lambda s: (s.corrected, s.jump, s.target),
            state,
            (jnp.array(True), jnp.array(True), target),
        )

    def _left(self, smooth: Smoothed, state: PolishState):
        """The largest linear decrease of the smoothed psi_0 over the whole set."""
        true = smooth.gradient(state.gradient)
        best = smooth.problem.inputs.minimise_linear(true.inputs)
        corner = tuple(jnp.where(g > 0, 0, 1).astype(g.dtype) for g in true.fractions)
        return tree.dot(true, tree.subtract(smooth.point(state.at), Point(best, corner)))
