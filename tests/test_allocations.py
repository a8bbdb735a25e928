"""The best allocation of a budget: a piece whose weights have caps."""

import itertools
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog

import stagecert as sc
from stagecert import pieces
from stagecert.enclosure.intervals import Interval
from stagecert.enclosure.primitives import enclose

seeds = st.integers(0, 2**31)


def _random(seed: int, n: int | None = None):
    draw = np.random.default_rng(seed)
    n = n or (2, 5)[seed % 2]  # few sizes: each is compiled
    x, caps = draw.normal(size=n), draw.uniform(0, 2, size=n)
    if seed % 3 == 0:  # ties
        x = np.round(x)
    return x, caps, float(draw.uniform(0, 1) * caps.sum())


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_value_is_that_of_the_linear_programme(seed):
    x, caps, total = _random(seed)
    for function, sign in ((sc.max_allocation, -1), (sc.min_allocation, 1)):
        found = linprog(
            sign * x, A_eq=np.ones((1, len(x))), b_eq=[total], bounds=[(0, c) for c in caps]
        )
        assert float(function(x, caps, total)) == pytest.approx(sign * found.fun, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([1, 2, 4]))
def test_with_the_caps_of_a_neuron_it_is_its_envelope_over_the_box(seed, n):
    """The least concave function above relu(w . x + b) on the box's corners, by a programme."""
    draw = np.random.default_rng(seed)
    w, low = draw.normal(size=n), draw.normal(size=n)
    high = low + draw.uniform(0.1, 2, size=n)
    delta = np.abs(w) * (high - low)
    least = np.where(w >= 0, w * low, w * high).sum()
    b = -least - draw.uniform(0.05, 0.95) * delta.sum()
    x = draw.uniform(low, high)
    t = np.where(w >= 0, x - low, high - x) / (high - low)
    mine = np.sum(delta * t) - float(sc.max_allocation(t, delta, -(least + b)))
    corners = np.array(list(itertools.product(*zip(low, high, strict=True))))
    values = np.maximum(corners @ w + b, 0)
    hull = linprog(
        -values, A_eq=np.vstack([corners.T, np.ones(len(corners))]), b_eq=np.append(x, 1)
    )
    assert mine == pytest.approx(-hull.fun, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(seeds, st.floats(1e-3, 10))
def test_the_smoothed_form_is_below_close_and_has_the_best_weights(seed, width):
    x, caps, total = _random(seed)
    caps = jnp.asarray(caps / max(total, 1e-3))
    caps = caps / jnp.minimum(jnp.sum(caps), 1)  # enough for a whole
    goods = pieces.Goods(jnp.asarray(x), caps)
    draw = np.random.default_rng(seed)
    centre: Any
    other: Any
    centre, other = (
        pieces.on_simplex(goods, jnp.asarray(draw.uniform(0, 1, len(x)))) for _ in range(2)
    )
    w: Any
    value, w = pieces.smooth_max(goods, width, centre)
    top = float(pieces.value_of(goods))
    weights: Any
    for weights in (w, centre, other, pieces.exact_weights(goods), pieces.nearest_weights(other)):
        np.testing.assert_allclose(jnp.sum(weights.shares), 1, rtol=1e-9)
        assert np.all(weights.shares >= -1e-12)
        assert np.all(weights.shares <= caps + 1e-12)
        assert float(pieces.weighted(goods, weights)) <= top + 1e-9
    assert top - width - 1e-9 <= value <= top + 1e-9
    worse = pieces.weighted(goods, other) - width / 2 * jnp.sum((other.shares - centre.shares) ** 2)
    assert worse <= value + 1e-8


def test_derivatives_are_the_allocation_and_the_prices_of_caps():
    x, caps = jnp.array([1.0, 3.0, 2.0]), jnp.array([1.0, 0.5, 0.7])
    slopes = jax.grad(sc.max_allocation, argnums=(0, 1, 2))(x, caps, 1.0)
    np.testing.assert_allclose(slopes[0], [0, 0.5, 0.5], atol=1e-12)
    np.testing.assert_allclose(slopes[1], [0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(slopes[2], 2)
    batch = jax.vmap(sc.max_allocation, in_axes=(0, None, None))(jnp.stack([x, -x]), caps, 1.0)
    np.testing.assert_allclose(batch, [2.5, -1.0])


def test_what_cannot_be_allocated_is_no_number():
    assert np.isnan(sc.max_allocation([1.0, 2.0], [0.4, 0.5], 1.0))
    assert np.isnan(sc.max_allocation([1.0, 2.0], [1.0, 1.0], -1.0))
    assert float(sc.max_allocation([1.0, 2.0], [1.0, 1.0], 0.0)) == 0


def test_a_problem_with_allocations_is_solved_to_its_optimum():
    """A budget of harm: an adversary spends it where it hurts most, we choose where that is."""
    draw = np.random.default_rng(3)
    matrix, caps = draw.normal(size=(4, 3)), draw.uniform(0.3, 1, size=4)

    def harm(s, _):
        return sc.max_allocation(matrix @ s, caps, 1.2) + 0.1 * jnp.sum(s)

    with jax.enable_x64(True):
        solution = sc.solve(sc.Problem(sc.Box(-np.ones(3), np.ones(3)), (), harm), rtol=1e-7)
    # min over s of max over a: with the dual of the inner one, 1.2 t + caps . u, u >= M s - t.
    cost = np.concatenate([np.full(3, 0.1), [1.2], caps])
    found = linprog(
        cost, A_ub=np.hstack([matrix, -np.ones((4, 1)), -np.eye(4)]), b_ub=np.zeros(4),
        bounds=[*[(-1, 1)] * 3, (None, None), *[(0, None)] * 4],
    )  # fmt: skip
    assert solution.bound <= found.fun + 1e-9
    assert solution.value == pytest.approx(found.fun, abs=1e-5)
    assert solution.bound == pytest.approx(found.fun, abs=1e-5)


def test_caps_that_depend_on_variables_prove_nothing():
    problem = sc.Problem(
        sc.Box(np.full(2, 0.5), np.ones(2)), (), lambda s, _: sc.max_allocation(s, 1 + s, 1.0)
    )
    assert sc.solve(problem, max_iterations=3).bound == -np.inf


def _exact(x, caps):
    """The most that a whole is worth, in rationals."""
    left, worth = Fraction(1), Fraction(0)
    for value, cap in sorted(zip(x, caps, strict=True), reverse=True):
        taken = min(left, cap)
        left, worth = left - taken, worth + taken * value
    return worth


def test_the_enclosure_of_an_allocation_contains_it_exactly():
    jaxpr = jax.make_jaxpr(pieces.allocation_p.bind)(jnp.zeros(4), jnp.zeros(4))
    wide = 0
    for seed in range(300):
        draw = np.random.default_rng(seed)
        x, caps = draw.normal(size=4) * 10.0 ** draw.integers(-3, 4), draw.uniform(0, 1, size=4)
        caps = caps / min(caps.sum(), 1) * (1 + 1e-15)
        x = np.round(x, 1) if seed % 3 == 0 else x  # ties
        off = [0, 0, 1e-9, 0.1][seed % 4] * draw.uniform(size=(2, 4))
        box = Interval(x - off[0], x + off[1]) if seed % 4 > 1 else Interval(x)
        (found,) = enclose(jaxpr.jaxpr, jaxpr.consts, [box, Interval(caps)])
        if sum(map(Fraction, caps)) < 1:
            continue
        ends = [_exact(map(Fraction, side), map(Fraction, caps)) for side in (box.low, box.high)]
        assert Fraction(float(found.low)) <= ends[0] <= ends[1] <= Fraction(float(found.high))
        wide = max(wide, seed % 4 < 2 and float(found.high - found.low) / (1 + abs(x).max()))
    assert wide < 1e-12
    for bad in ([0.2, 0.3, 0.1, 0.1], [2.0, -0.5, 0.0, 0.0]):
        arguments = [Interval(np.ones(4)), Interval(np.array(bad))]
        (found,) = enclose(jaxpr.jaxpr, jaxpr.consts, arguments)
        assert np.isnan(found.low)


@pytest.mark.slow
def test_bounds_with_allocations_can_be_rigorous():
    # There was no enclosure of the sorting inside.
    matrix, caps = np.array([[1.0, -2.0], [0.5, 1.0], [-1.0, 0.3]]), np.array([0.5, 0.6, 0.7])

    def harm(s, _):
        return sc.max_allocation(matrix @ s, caps, 1.2) + 0.1 * jnp.sum(s)

    problem = sc.Problem(sc.Box(-np.ones(2), np.ones(2)), (), harm)
    with jax.enable_x64(True):
        plain, proven = sc.solve(problem, rtol=1e-7), sc.solve(problem, rtol=1e-7, rigorous=True)
    assert proven.bound == pytest.approx(plain.bound, abs=1e-6)
    assert proven.bound <= plain.value


@pytest.mark.slow
def test_the_upper_bound_of_a_stage_may_be_an_allocation():
    """Work is done by three machines that share a budget: as much as the cheapest one allows."""
    caps, costs = np.array([0.5, 0.6, 0.7]), np.array([0.3, 0.6, 1.3])

    def upper(s, _):
        return sc.min_allocation(s, caps, 1.2)[None]

    stage = sc.Stage(lambda s, _: jnp.zeros(1), upper)
    problem = sc.Problem(
        sc.Box(np.zeros(3), np.ones(3)), (stage,), lambda s, z: costs @ s - 2 * z[0][0]
    )
    with jax.enable_x64(True):
        solution = sc.solve(problem, rtol=1e-6, atol=1e-6)
    # z <= min over a of a . s = max over (p, u) of 1.2 p - caps . u with p - u <= s, u >= 0.
    cost = np.concatenate([costs, [-2 * 1.2], 2 * caps])
    found = linprog(
        cost, A_ub=np.hstack([-np.eye(3), np.ones((3, 1)), -np.eye(3)]), b_ub=np.zeros(3),
        bounds=[*[(0, 1)] * 3, (None, None), *[(0, None)] * 3],
    )  # fmt: skip
    assert found.fun < -0.1
    assert solution.bound == pytest.approx(found.fun, abs=1e-4)
    assert solution.value == pytest.approx(found.fun, abs=1e-4)
