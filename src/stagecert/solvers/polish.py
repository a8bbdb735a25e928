"""The polishing search: spectral projected gradients on psi_0, smoothed where it has kinks.

Barzilai-Borwein steps with a nonmonotone line search adapt to the curvature of each problem and need
one evaluation of value and gradient an iteration. A rejected trial is not repeated in an inner loop but
shortens the next iteration's step, so that in a batch no problem waits for another's line search.

Nonsmooth pieces are smoothed with a width that shrinks as the search closes in. Smoothing serves the
search alone: every value and bound reported comes from the exact functions; only the *slopes* of the
pieces, which may be anything, are taken from the smoothed ones.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import pieces, tree
from stagecert.certificate import evaluate, passes_of_evaluate
from stagecert.problem import Problem, ScanStage
from stagecert.reformulation import Point, forward_pass, psi_0_and_gradient
from stagecert.solvers.base import AbstractSolver, project, report


def piece_units(problem: Problem, point: Point):
    """The unit of length of every nonsmooth piece: how far apart its arguments are at a point.

    One pass. Steps of a scanned stage share their unit.
    """
    done = forward_pass(problem, point, pieces.measured, None)
    stages, objective = done.records
    shared = tuple(
        jax.tree.map(lambda x: jnp.full_like(x, jnp.mean(x)), records)
        if isinstance(stage, ScanStage)
        else records
        for stage, records in zip(problem.stages, stages, strict=True)
    )
    tiny = jnp.finfo(done.value.dtype).tiny
    return jax.tree.map(lambda x: jnp.maximum(x, tiny), (shared, objective))


class Spectral(eqx.Module):
    """State of the nonmonotone spectral search on the smoothed psi_0."""

    point: Point
    value: Any
    gradient: Point
    recent: Any  # the last values; a trial must be lower than the highest of them
    size: Any  # Barzilai-Borwein step size
    share: Any  # how much of the step the next trial takes
    tau: Any
    units: Any


class Polish(AbstractSolver):
    """Spectral projected gradients, with smoothing where the problem has nonsmooth pieces.

    Attributes:
        tau: first smoothing width, in units of each piece's own arguments.
        shrink: factor on the width.
        inner: trials between two evaluations of the exact problem, if it has nonsmooth pieces.
        memory: how many recent values the nonmonotone line search looks back.
    """

    name: ClassVar[str] = "polish"
    tau: float = 0.1
    shrink: float = 0.5
    inner: int = 10
    memory: int = 8
    patience: int = 60

    def init(self, problem, point):
        units = piece_units(problem, point)
        smooth = not jax.tree.leaves(units)
        tau = jnp.asarray(0.0 if smooth else self.tau, _dtype(point))
        state = self._restarted(problem, point, tau, units, None)
        evaluation = evaluate(
            problem, point, lambda share: pieces.sloped(tau, share), units, with_gradient=False
        )
        return state, report(evaluation, 1 + 2 + passes_of_evaluate(with_gradient=False))

    def step(self, problem, state: Spectral):
        if not jax.tree.leaves(state.units):
            state = self._trial(problem, state)
            evaluation = evaluate(problem, state.point, with_gradient=False)
            return state, report(evaluation, 2 + passes_of_evaluate(with_gradient=False))
        state = jax.lax.fori_loop(
            0, self.inner, lambda _, s: self._trial(problem, s), state
        )
        evaluation = evaluate(
            problem,
            state.point,
            lambda share: pieces.sloped(state.tau, share),
            state.units,
            with_gradient=False,
        )
        cost = 2 * self.inner + passes_of_evaluate(with_gradient=False)
        # What is left of the smoothed problem, against what smoothing itself hides.
        left = self._stationarity(problem, state)
        hidden = jnp.abs(evaluation.value - state.value)
        done = left <= hidden
        tau = jnp.where(done, state.tau * self.shrink, state.tau)
        fresh = self._restarted(problem, state.point, tau, state.units, state.size)
        state = tree.select(done, fresh, state)
        return state, report(evaluation, cost + jnp.where(done, 2, 0))

    def _metric(self, problem, point) -> Point:
        # Inputs are measured in units of their set, fractions are numbers in [0, 1] already.
        scale = jax.tree.map(
            lambda s, x: jnp.broadcast_to(s, x.shape) ** 2, problem.inputs.scale(), point.inputs
        )
        return Point(scale, jax.tree.map(jnp.ones_like, point.fractions))

    def _restarted(self, problem, point, tau, units, size) -> Spectral:
        done, gradient = self._smoothed(problem, point, tau, units)
        if size is None:
            metric = self._metric(problem, point)
            steepest = jax.tree.map(lambda m, g: jnp.max(jnp.abs(jnp.sqrt(m) * g), initial=0), metric, gradient)
            largest = jax.tree.reduce(jnp.maximum, steepest)
            size = jnp.where(largest > 0, 1 / jnp.where(largest > 0, largest, 1), 1)
        recent = jnp.full((self.memory,), done.value)
        one = jnp.ones_like(done.value)
        return Spectral(point, done.value, gradient, recent, size, one, tau, units)

    def _smoothed(self, problem, point, tau, units):
        if not jax.tree.leaves(units):
            return psi_0_and_gradient(problem, point)
        return psi_0_and_gradient(problem, point, lambda _: pieces.smoothed(tau), units)

    def _direction(self, problem, state: Spectral, metric: Point):
        target = jax.tree.map(
            lambda x, m, g: x - state.size * m * g, state.point, metric, state.gradient
        )
        return tree.subtract(project(problem, target), state.point)

    def _trial(self, problem, state: Spectral) -> Spectral:
        metric = self._metric(problem, state.point)
        d = self._direction(problem, state, metric)
        slope = tree.dot(state.gradient, d)
        trial = project(problem, tree.move(state.point, d, state.share))
        done, gradient = self._smoothed(problem, trial, state.tau, state.units)
        model = jnp.max(state.recent) + 1e-4 * state.share * slope
        accepted = done.value <= model
        moved, turned = tree.subtract(trial, state.point), tree.subtract(gradient, state.gradient)
        curvature = tree.dot(moved, turned)
        inverse = jax.tree.map(lambda m: jnp.where(m > 0, 1 / jnp.where(m > 0, m, 1), 0), metric)
        length = tree.dot(jax.tree.map(jnp.multiply, inverse, moved), moved)
        bent = curvature > 0
        size = jnp.where(bent, length / jnp.where(bent, curvature, 1), 10 * state.size)
        size = jnp.clip(size, 1e-12, 1e12)
        taken = Spectral(
            trial,
            done.value,
            gradient,
            jnp.roll(state.recent, 1).at[0].set(done.value),
            size,
            jnp.ones_like(state.share),
            state.tau,
            state.units,
        )
        # Quadratic interpolation along the segment, safeguarded.
        bend = done.value - state.value - state.share * slope
        best = -0.5 * state.share**2 * slope / jnp.where(bend > 0, bend, 1)
        best = jnp.where(bend > 0, best, 0.1 * state.share)
        best = jnp.clip(best, 0.1 * state.share, 0.5 * state.share)
        shorter = eqx.tree_at(lambda s: s.share, state, jnp.maximum(best, 1e-10))
        return tree.select(accepted, taken, shorter)

    def _stationarity(self, problem, state: Spectral):
        """The largest linear decrease of the smoothed psi_0 over the whole box and set."""
        best = problem.inputs.minimise_linear(state.gradient.inputs)
        corner = tuple(jnp.where(g > 0, 0.0, 1.0).astype(g.dtype) for g in state.gradient.fractions)
        return tree.dot(state.gradient, tree.subtract(state.point, Point(best, corner)))


def _dtype(point: Point):
    return jnp.result_type(*jax.tree.leaves(point.inputs))
