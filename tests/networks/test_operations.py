"""Operations whose way back is written by hand, against XLA's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert.networks.bounding.backward import added
from stagecert.networks.operations import Conv


@pytest.mark.parametrize(
    ("strides", "dilation", "kernel", "padding", "space"),
    [
        ((1,), (1,), (3,), ((0, 0),), (7,)),
        ((1, 1), (2, 1), (3, 2), ((1, 0), (2, 1)), (6, 5)),
        ((2, 2), (1, 1), (4, 4), ((0, 0), (0, 0)), (11, 10)),
        ((2, 3), (1, 1), (3, 2), ((1, 2), (0, 1)), (8, 9)),
        ((3, 1), (1, 1), (2, 4), ((0, 1), (3, 2)), (7, 6)),
        ((2, 1, 2), (1, 1, 1), (2, 2, 3), ((0, 0), (1, 1), (1, 0)), (5, 4, 6)),
        ((2, 2), (2, 1), (2, 2), ((0, 0), (1, 1)), (7, 7)),  # both: XLA's own way
    ],
)
def test_the_way_back_of_a_convolution_in_float64(strides, dilation, kernel, padding, space):
    draw = np.random.default_rng(0)
    conv = Conv(strides, padding, dilation, (1,) * len(kernel))
    with jax.enable_x64(True):
        weights = jnp.asarray(draw.normal(size=(3, 2, *kernel)))
        x = jnp.asarray(draw.normal(size=(2, 2, *space)))
        y: Any
        y, back = jax.vjp(lambda x: conv(weights, x), x)
        expected, expected_back = jax.vjp(lambda x: conv.plain(weights, x), x)
        np.testing.assert_array_equal(y, expected)
        cotangent = jnp.asarray(draw.normal(size=y.shape))
        np.testing.assert_allclose(
            back(cotangent)[0], expected_back(cotangent)[0], rtol=0, atol=1e-13
        )


def test_the_size_of_a_convolution_covers_all_of_its_terms():
    draw = np.random.default_rng(1)
    conv = Conv((2, 1), ((1, 0), (2, 1)), (1, 1), (1, 1), groups=2)
    with jax.enable_x64(True):
        weights = jnp.asarray(draw.normal(size=(4, 1, 2, 3)))
        x = jnp.asarray(draw.normal(size=(1, 2, 5, 6)) * 10.0 ** draw.integers(-3, 3, (1, 2, 5, 6)))
        terms: Any = conv(jnp.abs(weights), jnp.abs(x))
        assert np.all(conv.size(weights, x) >= terms * (1 - 1e-12))
        # What is as large everywhere is counted as it is.
        same: Any = conv(jnp.abs(weights), jnp.full_like(x, 7.0))
        np.testing.assert_allclose(conv.size(weights, jnp.full_like(x, -7.0)), same, rtol=1e-13)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 67, 128])
def test_sums_in_parts_have_all_entries(count):
    """Whole numbers, which are added up without rounding."""
    x = np.random.default_rng(2).integers(-1000, 1000, (1, count)).astype(np.float32)
    assert float(added(jnp.asarray(x))) == x.sum(dtype=np.int64)
