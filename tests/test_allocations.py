"""The best allocation of a budget: a piece whose weights have caps."""

import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog

import stagecert as sc
from stagecert import pieces

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
    centre, other = (
        pieces.on_simplex(goods, jnp.asarray(draw.uniform(0, 1, len(x)))) for _ in range(2)
    )
    value, w = pieces.smooth_max(goods, width, centre)
    top = float(pieces.value_of(goods))
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
