"""Infinite slopes at the border: entropy in all its spellings, and what stands behind it."""

from typing import Any

import cvxpy as cp
import jax.numpy as jnp
import jax.scipy.special as js
import numpy as np
import pytest
from scipy.special import logsumexp

import stagecert as sc
from stagecert.assumptions import examine
from stagecert.inside import Inside

COSTS = 1.2 * np.random.default_rng(7).normal(size=8)
SPELLINGS = {
    "entr": lambda s: -js.entr(s),
    "xlogy": lambda s: js.xlogy(s, s),
    "rel_entr": lambda s: js.rel_entr(s, jnp.ones(8)),
    "s log s": lambda s: s * jnp.log(s),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_entropy_is_solved_in_all_its_spellings(name, scale):
    # entr, xlogy and rel_entr stalled far from the optimum, or ended with a wrong bound: JAX's
    # derivative of rel_entr at zero is zero.
    def objective(costs, s, z):
        return jnp.sum(SPELLINGS[name](s)) + costs @ s

    problem = sc.Problem(sc.Simplex(8), (), sc.Objective(objective, params=scale * COSTS))
    solution = sc.solve(problem, atol=1e-6, rtol=0.0)
    optimum = -logsumexp(-scale * COSTS)
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.stats.passes <= 200
    assert solution.bound <= optimum + 1e-12
    assert solution.value >= optimum - 1e-12
    assert str(solution.assumptions) == "proven"
    assert solution.certificate.derive(problem) == pytest.approx(solution.bound, abs=1e-12)
    assert np.allclose(
        solution.inputs, np.exp(-scale * COSTS - logsumexp(-scale * COSTS)), atol=1e-3
    )


@pytest.mark.parametrize("name", SPELLINGS)
def test_with_a_stage_behind_it(name):
    stage = sc.Stage(lambda s, z: SPELLINGS[name](s), lambda s, z: s)
    problem = sc.Problem(
        sc.Simplex(8), (stage,), sc.Objective(lambda c, s, z: jnp.sum(z[0]) + c @ s, params=COSTS)
    )
    solution = sc.solve(problem, atol=1e-6, rtol=0.0)
    optimum = -logsumexp(-COSTS)
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.stats.passes <= 200
    assert solution.bound <= optimum + 1e-12 <= solution.value + 2e-12


def test_a_distance_to_a_distribution_has_its_minimum_there():
    # Value 0.259 and bound -1.50 were the end of this; the optimum is 0.
    q = np.random.default_rng(1).dirichlet(np.ones(8))
    solution = sc.solve(
        sc.Problem(sc.Simplex(8), (), lambda s, z: jnp.sum(js.rel_entr(s, q))), atol=1e-6, rtol=0.0
    )
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.stats.passes <= 200
    assert solution.bound <= 1e-12
    assert np.allclose(solution.inputs, q, atol=1e-4)


def test_entropy_with_curvature_behind_it():
    A = np.random.default_rng(3).normal(size=(5, 8))
    stage = sc.Stage(lambda s, z: (A @ s) ** 2, lambda s, z: jnp.full(5, 30.0))
    problem = sc.Problem(
        sc.Simplex(8), (stage,), lambda s, z: jnp.sum(js.xlogy(s, s)) + COSTS @ s + jnp.sum(z[0])
    )
    solution = sc.solve(problem, atol=1e-6, rtol=0.0)
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.stats.passes <= 200


@pytest.mark.slow
def test_entropy_with_kinks():
    """Steep at the border and kinked inside: mirror steps hand over to the polishing search."""
    rng = np.random.default_rng(2)
    A, b = rng.normal(size=(4, 8)), 0.2 * rng.normal(size=4)

    def objective(s, z):
        return jnp.sum(js.xlogy(s, s)) + COSTS @ s + 0.5 * jnp.sum(sc.abs(A @ s - b))

    solution = sc.solve(sc.Problem(sc.Simplex(8), (), objective), atol=1e-6, rtol=0.0)
    s = cp.Variable(8)
    kinks = cp.sum(cp.abs(A @ s - b))
    stated = cp.Minimize(-cp.sum(cp.entr(s)) + COSTS @ s + 0.5 * kinks)
    whole: Any = cp.sum(s) == 1
    optimum: Any = cp.Problem(stated, [whole]).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10
    )
    assert np.abs(A @ np.asarray(s.value) - b).min() < 1e-8  # at a kink
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.bound - 1e-8 <= optimum <= solution.value + 1e-8


def test_boxes_have_a_border_too():
    def objective(s, z):
        return jnp.sum(js.xlogy(s, s) + js.xlogy(1 - s, 1 - s)) + COSTS @ s

    solution = sc.solve(
        sc.Problem(sc.Box(np.zeros(8), np.ones(8)), (), objective), atol=1e-6, rtol=0
    )
    optimum = -np.sum(np.logaddexp(0, -COSTS))
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.stats.passes <= 200
    assert solution.bound <= optimum + 1e-12
    assert np.allclose(solution.inputs, 1 / (1 + np.exp(COSTS)), atol=1e-3)


@pytest.mark.parametrize("solver", ["auto", "greedy", "polish", "simple"])
def test_no_solver_proves_more_than_the_optimum(solver):
    # Anchors at the border with the slope that JAX gives there proved -11.90 for -12.16.
    problem = sc.Problem(
        sc.Simplex(8), (), lambda s, z: jnp.sum(js.rel_entr(s, jnp.ones(8))) + 10 * COSTS @ s
    )
    solution = sc.solve(problem, solver=solver, max_iterations=30)
    optimum = -logsumexp(-10 * COSTS)
    assert solution.bound <= optimum + 1e-12 <= solution.value + 2e-12


def test_a_batch_of_entropies():
    def objective(costs, s, z):
        return jnp.sum(js.xlogy(s, s)) + costs @ s

    scales = (0.1, 1.0, 5.0)
    problems = [
        sc.Problem(sc.Simplex(8), (), sc.Objective(objective, params=k * COSTS)) for k in scales
    ]
    batch = sc.solve_batch(problems, atol=1e-6, rtol=0.0)
    optimum = [-logsumexp(-k * COSTS) for k in scales]
    assert np.allclose(batch.value, optimum, atol=1e-6)
    assert (batch.bound <= np.asarray(optimum) + 1e-12).all()


def test_only_what_touches_the_border_is_steep():
    def steep(inputs, objective):
        return examine(sc.Problem(inputs, (), objective)).steep

    ones = np.ones(2)
    assert steep(sc.Simplex(2), lambda s, z: jnp.sum(s * jnp.log(s)))
    assert steep(sc.Box(0 * ones, ones), lambda s, z: -jnp.sum(jnp.sqrt(1 - s)))
    assert not steep(sc.Box(0.1 * ones, ones), lambda s, z: -jnp.sum(jnp.log(s)))
    assert not steep(sc.Box(0 * ones, ones), lambda s, z: jnp.linalg.norm(s))
    assert not steep(sc.Simplex(2), lambda s, z: jnp.sum((s + 0.05) * jnp.log(s + 0.05)))


def test_a_set_seen_from_inside_has_the_minima_of_the_whole():
    whole = sc.Product({"a": sc.Simplex(3), "b": sc.Box(0.0, np.ones(2))})
    inside = Inside(whole)
    gradient = {"a": jnp.array([1.0, 2.0, 3.0]), "b": jnp.array([1.0, -1.0])}
    assert float(inside.linear_minimum(gradient)) == float(whole.linear_minimum(gradient))
    corner = inside.minimise_linear(gradient)
    assert (np.asarray(corner["a"]) > 0).all()
    assert (np.asarray(corner["b"]) > 0).all()
    assert (np.asarray(corner["b"]) < 1).all()
    step = {"a": jnp.array([0.0, 0.0, 700.0]), "b": jnp.array([700.0, -700.0])}
    moved = inside.moved(inside.centre(), step)
    assert np.allclose(moved["a"], [0, 0, 1])
    assert (np.asarray(moved["a"]) > 0).all()
    assert np.allclose(moved["b"], [1, 0])
