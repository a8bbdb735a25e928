"""Passes back layer by layer: the same numbers as whole programs give, and sound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert import networks
from stagecert.networks.bounding.relaxation import split
from stagecert.networks.bounding.stepwise import Passes
from stagecert.networks.regions import regions_of
from stagecert.problem import as_arrays

DRAW = np.random.default_rng(0)
A, B, C, D = (DRAW.normal(size=shape) for shape in ((3, 6), (6, 6), (6, 6), (9, 2)))
KERNEL = DRAW.normal(size=(4, 1, 3))


def deep(x):
    for w in (A, B, C):
        x = jax.nn.relu(x @ w)
    return x


def skip(x):
    """A block that two layers read, an input that is read late, three kinds of activations."""
    one = jax.nn.sigmoid(x @ A)
    two = jax.nn.relu(one @ B + one)
    return jnp.concatenate([jnp.tanh(two @ C), x]) @ D


def pooled(x):
    y = jax.lax.conv_general_dilated(x[None, None], jnp.asarray(KERNEL), (1,), [(1, 1)])[0]
    return jax.nn.softplus(jnp.max(jax.nn.relu(y), axis=0) @ A)


@pytest.mark.parametrize("function", [deep, skip, pooled], ids=lambda f: f.__name__)
def test_agrees_with_whole_programs_and_contains_samples(function):
    network = networks.from_jax(function, np.zeros(3))
    centre = DRAW.normal(size=(4, 3))
    width = np.array([0.0, 0.1, 0.5, 2.0])[:, None]
    lower, upper = centre - width, centre + width
    rows = DRAW.normal(size=(4, 3, network.output_size))
    expected = networks.bound(network, lower, upper, rows, method="backward")
    with jax.enable_x64(True):
        parts = as_arrays(split(network), jnp.float64)
        # Fewer rows at a time than there are, and not a divisor.
        passes = Passes(parts, regions_of(network, lower, upper, None), 8)
        assert passes.complete
        of_box, which = np.divmod(np.arange(12), 3)
        found = passes.bound(of_box, rows[of_box, which])
    bound = found.bound.reshape(4, 3)
    np.testing.assert_allclose(bound, expected.bound, rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(passes.arguments, expected.intermediate, strict=True):
        for end, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(end, other, rtol=1e-9, atol=1e-9)
    # The linear bound is what it says: below the network everywhere in the box, and smallest there.
    t = DRAW.random((4, 200, 3))
    points = lower[:, None] + t * (upper - lower)[:, None]
    with jax.enable_x64(True):
        values = np.stack([np.asarray(network(p)) for p in points])
    least = np.einsum("bto,bpo->btp", rows, values).min(axis=2)
    assert np.all(bound <= least)
    coefficients = found.coefficients.reshape(4, 3, 3)
    minimisers = found.minimisers.reshape(4, 3, 3)
    ends = np.where(coefficients > 0, lower[:, None], upper[:, None])
    np.testing.assert_array_equal(minimisers[coefficients != 0], ends[coefficients != 0])
    line = bound[..., None] + np.einsum("bti,btpi->btp", coefficients,
                                        points[:, None] - minimisers[:, :, None])  # fmt: skip
    assert np.all(line <= np.einsum("bto,bpo->btp", rows, values) + 1e-12)


def test_stops_when_asked():
    network = networks.from_jax(deep, np.zeros(3))
    with jax.enable_x64(True):
        parts = as_arrays(split(network), jnp.float64)
        box = regions_of(network, -np.ones((1, 3)), np.ones((1, 3)), None)
        asked = iter([False, False, True])
        assert not Passes(parts, box, 4, stop=lambda: next(asked)).complete


def test_intervals_alone_are_wider():
    network = networks.from_jax(deep, np.zeros(3))
    with jax.enable_x64(True):
        parts = as_arrays(split(network), jnp.float64)
        box = regions_of(network, -np.ones((1, 3)), np.ones((1, 3)), None)
        plain, fine = (Passes(parts, box, 16, refine=refine) for refine in (False, True))
    (low, high), (finer_low, finer_high) = plain.arguments[2], fine.arguments[2]
    assert np.all(low <= finer_low)
    assert np.all(high >= finer_high)
    assert np.any(high > finer_high)
