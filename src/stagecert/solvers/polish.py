"""The polishing search: projected quasi-Newton steps on psi_0, smoothed where it has kinks.

A rejected trial is not repeated in an inner loop but shortens the next iteration's step, so that in a
batch no problem waits for another's line search.

A nonsmooth piece max(x) = max over weights w of w . x is smoothed to the maximum of
w . x - width/2 |w - centre|^2. When the smoothed problem is nearly solved, the centres move to the weights
found: the proximal method of multipliers. The weights then converge to those that certify the optimum, at
a width that need not go to zero, so the smoothed problem stays well conditioned. Smoothing serves the
search alone: every value and bound reported comes from the exact functions; only the *slopes* of the
pieces, which may be anything, are taken from the smoothed ones.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp

from stagecert import pieces, tree
from stagecert.certificate import evaluate, passes_of_evaluate
from stagecert.problem import Problem
from stagecert.reformulation import Point, forward_pass, linearise, psi_0_and_gradient
from stagecert.solvers.base import AbstractSolver, project, report
from stagecert.solvers.quasi_newton import Curvature, model_step


def smoothing_data(problem: Problem, point: Point):
    """For every nonsmooth piece (its unit of length, weights in the middle of the simplex).

    The unit is how far apart the piece's arguments are at a point. One pass. Steps of a scanned stage
    share their unit.
    """
    records = forward_pass(problem, point, pieces.measured, None).records
    means = [jnp.mean(unit) for unit, _ in jax.tree.leaves(records, is_leaf=_is_datum)]
    largest = jnp.max(jnp.stack(means)) if means else 1.0
    # Arguments may happen to coincide at this point; their unit must not be zero.
    floor = jnp.where(largest > 0, 1e-3 * largest, 1)

    def shared(record):
        unit, centre = record
        return jnp.maximum(jnp.full_like(unit, jnp.mean(unit)), floor), centre

    return jax.tree.map(shared, records, is_leaf=_is_datum)


def _is_datum(node) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and all(hasattr(x, "dtype") for x in node)


def recentred(data, slopes):
    """The data with the recorded slopes as new centres."""
    return jax.tree.map(lambda datum, w: (datum[0], w), data, slopes, is_leaf=_is_datum)


class Smoothed(eqx.Module):
    """The smoothed psi_0 as a function of one vector, with inputs in units of their set."""

    problem: Problem
    like: Point
    tau: Any
    data: Any

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

    def treatment_of(self):
        """How nonsmooth pieces are treated, for `linearise`."""
        return (lambda _: pieces.smoothed(self.tau)) if jax.tree.leaves(self.data) else None

    def evaluate(self, vector):
        """(value, gradient, slopes of the pieces). Two passes."""
        done, gradient = psi_0_and_gradient(
            self.problem, self.point(vector), self.treatment_of(), self.data
        )
        scaled = jax.tree.map(jnp.multiply, gradient, self._units())
        return done.value, jax.flatten_util.ravel_pytree(scaled)[0], done.records


class PolishState(eqx.Module):
    """Where the search stands, what it knows of the curvature, and the smoothing."""

    at: Any
    value: Any
    gradient: Any
    slopes: Any
    recent: Any  # the last values; a trial must be lower than the highest of them
    curvature: Curvature
    share: Any  # how much of the step the next trial takes
    tau: Any
    data: Any
    hidden: Any  # what smoothing hid when the centres were last moved
    q: Any  # threshold for correcting degenerate entries, as in Fix-Degeneracy


class Polish(AbstractSolver):
    """Projected quasi-Newton steps, with smoothing where the problem has nonsmooth pieces.

    Attributes:
        tau: first smoothing width, in units of each piece's own arguments.
        shrink: factor on the width when moving the centres no longer halves what smoothing hides.
        inner: trials between two evaluations of the exact problem, if it has nonsmooth pieces.
        pairs: how many steps the model of the curvature remembers.
        rounds: how many vector iterations minimise that model.
        memory: how many recent values the nonmonotone line search looks back.
    """

    name: ClassVar[str] = "polish"
    tau: float = 0.1
    shrink: float = 0.5
    inner: int = 10
    pairs: int = 20
    rounds: int = 50
    memory: int = 4
    patience: int = 60

    def init(self, problem, point):
        data = smoothing_data(problem, point)
        like = jax.tree.map(jnp.zeros_like, point)
        dtype = jnp.result_type(*jax.tree.leaves(point.inputs))
        smooth = Smoothed(problem, like, jnp.asarray(self.tau, dtype), data)
        at = smooth.vector(point)
        value, gradient, slopes = smooth.evaluate(at)
        state = PolishState(
            at,
            value,
            gradient,
            slopes,
            jnp.full((self.memory,), value),
            Curvature.none(self.pairs, at),
            jnp.ones_like(value),
            smooth.tau,
            data,
            jnp.full_like(value, jnp.inf),
            jnp.ones_like(value),
        )
        exact = self._exact(problem, point, state)
        return (state, like), report(exact, 1 + 2 + passes_of_evaluate(with_gradient=False))

    def step(self, problem, carried):
        state, like = carried
        smooth = Smoothed(problem, like, state.tau, state.data)
        kinks = bool(jax.tree.leaves(state.data))
        if kinks:
            state = jax.lax.fori_loop(0, self.inner, lambda _, s: self._trial(smooth, s), state)
        else:
            state = self._trial(smooth, state)
        exact = self._exact(problem, smooth.point(state.at), state)
        cost = 2 * (self.inner if kinks else 1) + passes_of_evaluate(with_gradient=False)
        left = self._left(smooth, state)
        hidden = jnp.abs(exact.value - state.value)
        # Stationary, nothing hidden, and still a gap: entries whose bounds meet hold the search.
        held = left + hidden <= 0.1 * (exact.value - exact.bound)
        ready = (left <= hidden) & kinks
        state, extra = jax.lax.switch(
            jnp.where(held, 2, jnp.where(ready, 1, 0)),
            [
                lambda: (state, 0),
                lambda: self._recentred(smooth, state, hidden),
                lambda: self._corrected(smooth, state),
            ],
        )
        return (state, like), report(exact, cost + extra)

    def _exact(self, problem, point, state: PolishState):
        # The slopes are those of the smoothed pass, where they balance; at the blocks of the exact pass
        # the smoothed slopes would be others, and the bound far worse.
        return evaluate(problem, point, pieces.given_slopes, state.slopes, with_gradient=False)

    def _trial(self, smooth: Smoothed, state: PolishState) -> PolishState:
        steepest = jnp.max(jnp.abs(state.gradient))
        scale = jnp.where(steepest > 0, steepest, 1)
        d = model_step(
            state.at, state.gradient, state.curvature.times(scale), smooth.project, 1 / scale, self.rounds
        )
        slope = state.gradient @ d
        at = smooth.project(state.at + state.share * d)
        value, gradient, slopes = smooth.evaluate(at)
        good = value <= jnp.max(state.recent) + 1e-4 * state.share * slope
        curvature = state.curvature.extended(at - state.at, gradient - state.gradient)
        taken = PolishState(
            at,
            value,
            gradient,
            slopes,
            jnp.roll(state.recent, 1).at[0].set(value),
            curvature,
            jnp.ones_like(state.share),
            state.tau,
            state.data,
            state.hidden,
            state.q,
        )
        # Quadratic interpolation along the segment, safeguarded. A step that needs a tiny share comes
        # from a bad model: forget it. Even a rejected trial taught something about the curvature.
        bend = value - state.value - state.share * slope
        best = -0.5 * state.share**2 * slope / jnp.where(bend > 0, bend, 1)
        best = jnp.where(bend > 0, best, 0.1 * state.share)
        best = jnp.clip(best, 0.1 * state.share, 0.5 * state.share)
        tiny = best < 1e-4
        forgotten = jax.tree.map(jnp.zeros_like, curvature)
        shorter = eqx.tree_at(
            lambda s: (s.share, s.curvature),
            state,
            (jnp.where(tiny, 1, best), tree.select(tiny, forgotten, curvature)),
        )
        return tree.select(good, taken, shorter)

    def _recentred(self, smooth: Smoothed, state: PolishState, hidden):
        """The smoothed problem is solved to what smoothing itself hides: move the centres."""
        slow = hidden > 0.5 * state.hidden
        tau = jnp.where(slow, state.tau * self.shrink, state.tau)
        data = recentred(state.data, state.slopes)
        moved = Smoothed(smooth.problem, smooth.like, tau, data)
        return self._restarted(moved, state, state.at, hidden, state.q), 2

    def _corrected(self, smooth: Smoothed, state: PolishState):
        """Fix-Degeneracy on the smoothed problem; where it does not help, q grows tenfold."""
        point = smooth.point(state.at)
        _, back = linearise(smooth.problem, point, smooth.treatment_of(), smooth.data)
        at = smooth.vector(Point(point.inputs, back(1, state.q).shares))
        new = self._restarted(smooth, state, at, state.hidden, state.q)
        slack = 100 * jnp.finfo(state.value.dtype).eps * (1 + jnp.abs(state.value))
        worse = eqx.tree_at(lambda s: s.q, state, 10 * state.q)
        return tree.select(new.value <= state.value + slack, new, worse), 4

    def _restarted(self, smooth: Smoothed, state: PolishState, at, hidden, q) -> PolishState:
        value, gradient, slopes = smooth.evaluate(at)
        return PolishState(
            at,
            value,
            gradient,
            slopes,
            jnp.full_like(state.recent, value),
            state.curvature,
            jnp.ones_like(state.share),
            smooth.tau,
            smooth.data,
            hidden,
            q,
        )

    def _left(self, smooth: Smoothed, state: PolishState):
        """The largest linear decrease of the smoothed psi_0 over the whole set."""
        gradient = smooth.point(state.gradient)  # units enter twice and cancel in the product below
        units = smooth._units()
        true = jax.tree.map(lambda g, u: g / u**2, gradient, units)
        point = smooth.point(state.at)
        best = smooth.problem.inputs.minimise_linear(true.inputs)
        corner = tuple(jnp.where(g > 0, 0, 1).astype(g.dtype) for g in true.fractions)
        return tree.dot(true, tree.subtract(point, Point(best, corner)))
