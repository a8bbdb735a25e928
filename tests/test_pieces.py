"""Nonsmooth pieces: exact values, smoothed forms, slopes, and where they may stand."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

import stagecert as sc
from stagecert import pieces

numbers = st.floats(-10, 10, allow_subnormal=False)
rows = st.integers(2, 5).flatmap(lambda k: arrays(float, (3, k), elements=numbers))


@given(rows)
def test_values_are_those_of_numpy(x):
    np.testing.assert_array_equal(sc.max(x), np.max(x, -1))
    np.testing.assert_array_equal(sc.min(x, axis=0), np.min(x, 0))
    np.testing.assert_array_equal(sc.relu(x), np.maximum(x, 0))
    np.testing.assert_array_equal(sc.abs(x), np.abs(x))
    np.testing.assert_array_equal(sc.maximum(x, 1.0, -x), np.maximum(np.maximum(x, 1.0), -x))
    np.testing.assert_array_equal(sc.minimum(x, 1.0), np.minimum(x, 1.0))
    lines = sc.piecewise_linear(x, [1.0, -2.0], [0.0, 3.0])
    np.testing.assert_allclose(lines, np.maximum(x, -2 * x + 3), rtol=1e-14)


@given(rows, st.floats(1e-3, 10), st.integers(0, 2**31))
def test_smoothed_maximum_is_below_close_and_smooth(x, width, seed):
    centre = np.random.default_rng(seed).dirichlet(np.ones(x.shape[-1]), size=3)
    w: Any
    value, w = pieces.smooth_max(jnp.asarray(x), width, centre)
    top = np.max(x, -1)
    assert np.all(value <= top + 1e-12 * (1 + np.abs(top)))
    assert np.all(value >= top - width - 1e-12 * (1 + np.abs(top)))
    np.testing.assert_allclose(np.sum(w, -1), 1, rtol=1e-12)
    assert np.all(w >= 0)
    # w is the best of the simplex: random weights do no better.
    for other in np.random.default_rng(seed + 1).dirichlet(np.ones(x.shape[-1]), size=(5, 3)):
        worse = np.sum(other * x, -1) - width / 2 * np.sum((other - centre) ** 2, -1)
        assert np.all(worse <= value + 1e-9)
    # And it is the gradient, by differences.
    step = 1e-6 * np.random.default_rng(seed + 2).normal(size=x.shape)
    moved, _ = pieces.smooth_max(jnp.asarray(x + step), width, centre)
    bend = np.sum(step**2, -1) / width
    np.testing.assert_allclose(
        moved - value, np.sum(w * step, -1), atol=float(np.max(bend)) + 1e-13
    )


def test_ties_share_the_weight():
    np.testing.assert_array_equal(pieces.exact_weights(jnp.array([1.0, 1.0, 0.0])), [0.5, 0.5, 0])
    np.testing.assert_array_equal(jax.grad(lambda x: sc.relu(x))(0.0), 0.5)


def _with_own_derivative(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (function(*primals), 0 * tangents[0]))
    return wrapped


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(lambda x: jax.vmap(f)(x[None])[0]),
        lambda f: _with_own_derivative(f),
    ],
    ids=["plain", "jit", "checkpoint", "vmap in jit", "custom_jvp"],
)
def test_pieces_are_found_inside_other_transformations(wrap):
    function = wrap(lambda x: sc.relu(3 * x) + x)
    x = jnp.array([-1.0, 0.0, 2.0])

    def halved(y, _):
        return pieces.value_of(y) / 2, y

    out, records = pieces.evaluate(function, (x,), halved)
    np.testing.assert_allclose(out, np.maximum(3 * x, 0) / 2 + x)
    assert len(records) == 1


def test_pieces_inside_loops_are_refused_with_advice():
    def loop(s, z):
        return jax.lax.fori_loop(0, 3, lambda _, x: sc.relu(x - 0.1), s)

    problem = sc.Problem(sc.Box(-1.0, 1.0), (), loop)
    with pytest.raises(sc.ProblemError, match=r"inside '(scan|while)'.*ScanStage"):
        sc.solve(problem)


def test_static_arguments_pass_through():
    def function(params, x):
        return sc.max(x * params["scale"], axis=params["axis"])

    arguments = ({"scale": 2.0, "axis": 0}, jnp.array([[1.0, 5.0], [3.0, 2.0]]))
    records: Any
    out, records = pieces.evaluate(function, arguments, lambda x, _: (pieces.value_of(x), x))
    np.testing.assert_array_equal(out, [6.0, 10.0])
    assert records[0].shape == (2, 2)


def test_slack_of_given_slopes_is_charged():
    def total(x, share):
        return jnp.sum(pieces.sloped_max(x, jnp.array([0.25, 0.75]), share))

    x = jnp.array([2.0, 1.0])
    slope, slack = jax.grad(total, argnums=(0, 1))(x, 1.0)
    np.testing.assert_array_equal(slope, [0.25, 0.75])
    assert slack == pytest.approx(2.0 - 1.25)
    pair = (jnp.array([2.0]), jnp.array([1.0]))
    first = pieces.First(jnp.array([0.25]))
    slopes, slack = jax.grad(lambda p, s: jnp.sum(pieces.sloped_max(p, first, s)), (0, 1))(
        pair, 1.0
    )
    np.testing.assert_array_equal(jnp.concatenate(slopes), [0.25, 0.75])
    assert slack == pytest.approx(2.0 - 1.25)
    # A negative sign is not a line from below: the charge is infinite.
    assert jax.grad(lambda share: -total(x, share))(1.0) == jnp.inf


def test_a_compiled_function_with_arrays_of_its_own_may_have_pieces():
    """Constants of an inner jit were lost on the way: an error from inside the walk."""
    inner = jax.jit(lambda x: pieces.relu(x) + np.arange(3.0))
    value, _ = pieces.evaluate(lambda x: inner(x).sum(), (jnp.ones(3),), pieces.exactly_sloped(1.0))
    assert value == 6
