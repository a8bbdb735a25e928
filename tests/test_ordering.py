"""Bounds that cross: the order's multipliers where fractions do not matter, and what they buy."""

import cvxpy as cp
import equinox as eqx
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import stagecert as sc
from stagecert.ordering import Centre
from stagecert.problem import as_arrays
from stagecert.reformulation import Point, linearise
from stagecert.sides import Guide, Sides, with_multipliers
from stagecert.solvers.polish import Smoothed

LENGTH = 4


def lower(p, u, x):
    return p["a"] * x**2 + p["b"] * u**2 - p["c"]


def upper(p, u, x):
    return p["d"] - p["e"] * x - p["f"] * u**2


def feed(s, z):
    return s


def cost(weights, s, z):
    return jnp.dot(weights[0], z[0]) + jnp.dot(weights[1], s)


def drawn(seed):
    rng = np.random.default_rng(seed)
    ends = {"a": (0.1, 0.4), "b": (0.5, 1.5), "c": (0.3, 0.7), "d": (0.2, 0.6), "e": (-0.3, 0.3)}
    p = {name: rng.uniform(*end, LENGTH) for name, end in (ends | {"f": (0.5, 1.5)}).items()}
    return p, rng.normal(size=(2, LENGTH)) * [[1], [2]]


def random_scan(seed, guide=None) -> sc.Problem:
    p, weights = drawn(seed)
    stage = sc.ScanStage(lower, upper, length=LENGTH, initial=np.array(0.5), feed=feed, params=p)
    ones = np.ones(LENGTH)
    return sc.Problem(sc.Box(-ones, ones), stage, sc.Objective(cost, weights), guide=guide)


def optimum_of_scan(seed) -> float:
    p, weights = drawn(seed)
    u, x = cp.Variable(LENGTH), cp.Variable(LENGTH)
    before, square = cp.hstack([np.array([0.5]), x[:-1]]), cp.square(u)
    low = cp.multiply(p["a"], cp.square(before)) + cp.multiply(p["b"], square) - p["c"]
    high = p["d"] - cp.multiply(p["e"], before) - cp.multiply(p["f"], square)
    rows: list[cp.Constraint] = [low <= x, x <= high, cp.abs(u) <= 1]
    problem = cp.Problem(cp.Minimize(weights[0] @ x + weights[1] @ u), rows)
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-10)
    problem.solve(solver=cp.CLARABEL, **tight)
    assert problem.status == cp.OPTIMAL
    return float(np.asarray(problem.value))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_scans_with_crossing_bounds_are_solved(seed):
    # Seven of these once stalled, with bounds that were off by up to 1.5.
    solution, optimum = sc.solve(random_scan(seed), atol=0.0, rtol=1e-6), optimum_of_scan(seed)
    assert solution.certificate.sides.order
    assert solution.status is sc.Status.GAP_REACHED, solution
    assert solution.bound <= optimum + 1e-7
    assert solution.value >= optimum - 1e-7


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_multipliers_at_corners_pull_as_those_at_fractions(seed):
    rng = np.random.default_rng(seed)
    problem = as_arrays(random_scan(seed, Guide(ordered=True, followed=True)))
    inputs, theta = rng.uniform(-1, 1, LENGTH), rng.uniform(0, 1, LENGTH)
    point = Point(jnp.asarray(inputs), (jnp.asarray(theta),))
    # As large as cotangents can be here, so that no multiplier at corners is below zero.
    held = Sides((), (jnp.asarray(rng.uniform(20, 30, LENGTH)),))
    _, back = linearise(problem, point, rule=with_multipliers(held))
    ordinary = back(0, 0)
    found = Centre.found(held, ordinary.multipliers, point.fractions)
    assert np.all(found.sides.order[0] < held.order[0])
    _, back = linearise(problem, point, rule=with_multipliers(found.sides))
    consistent = back(1, 0)
    np.testing.assert_allclose(consistent.multipliers[0], ordinary.multipliers[0], rtol=1e-9)
    np.testing.assert_allclose(consistent.inputs, ordinary.inputs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.at(point.fractions).order[0], held.order[0], rtol=1e-12)


@given(
    held=st.floats(0, 3), cotangent=st.floats(-3, 3), theta=st.sampled_from([0.0, 0.2, 0.9, 1.0])
)
def test_moving_the_centre_changes_no_multiplier_where_it_was_found(held, cotangent, theta):
    one = lambda x: (jnp.asarray(x),)  # noqa: E731
    found = Centre.found(Sides((), one(held)), one(cotangent), one(theta))
    assert found.sides.order[0] >= 0
    assert found.at(one(theta)).order[0] == pytest.approx(held, rel=1e-9, abs=1e-12)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10)
def test_gradient_of_the_augmented_lagrangian_is_that_of_differences(seed):
    rng = np.random.default_rng(seed)
    guide = Guide(
        widths=Sides((), (jnp.asarray(rng.uniform(0.5, 2, LENGTH)),)), ordered=True, followed=True
    )
    problem = as_arrays(random_scan(seed, guide))
    order, cotangents = rng.uniform(0, 1, LENGTH), rng.normal(size=LENGTH)
    centre = Centre(Sides((), (jnp.asarray(order),)), (jnp.asarray(cotangents),))
    like = Point(jnp.zeros(LENGTH), (jnp.zeros(LENGTH),))
    smooth = Smoothed(problem, like, jnp.asarray(1.0), ((((), ()),), ()), centre)
    at = rng.uniform(0.1, 0.9, 2 * LENGTH)
    evaluate = eqx.filter_jit(smooth.evaluate)
    _, gradient, _ = evaluate(jnp.asarray(at))
    step = 1e-6 * np.eye(2 * LENGTH)
    differences = [(evaluate(at + d)[0] - evaluate(at - d)[0]) / 2e-6 for d in step]
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-6)
