"""What accelerators do with arrays, checked on the CPU: convolutions as products, boxes sent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.networks import operations
from stagecert.networks import regions as regions_module
from stagecert.networks.operations import Conv, _as_product, _own_conv
from stagecert.networks.regions import regions_of

RANDOM = np.random.default_rng(8)
CASES = [
    ((2, 3, 8, 9), (5, 3, 3, 3), Conv((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1))),
    ((2, 6, 8, 9), (4, 6, 3, 3), Conv((1, 1), ((1, 1), (0, 2)), (1, 1), (1, 1))),
    ((2, 6, 9, 9), (4, 6, 3, 3), Conv((1, 1), ((1, 0), (0, 1)), (2, 1), (1, 1))),
    ((2, 4, 9, 8), (5, 4, 4, 4), Conv((2, 2), ((0, 0), (1, 2)), (1, 1), (1, 1))),
    ((2, 4, 11, 10), (5, 4, 3, 2), Conv((3, 2), ((1, 1), (0, 0)), (1, 1), (1, 1))),
    ((3, 2, 9), (4, 2, 5), Conv((1,), ((2, 2),), (1,), (1,))),
    ((1, 2, 5, 6, 7), (3, 2, 2, 2, 2), Conv((1, 2, 1), ((0, 0),) * 3, (1, 1, 1), (1, 1, 1))),
]


@pytest.mark.parametrize(("shape", "kernel", "conv"), CASES)
def test_same_numbers(shape, kernel, conv, monkeypatch):
    with jax.enable_x64(True):
        x, w, y = (jnp.asarray(RANDOM.normal(size=s)) for s in (shape, kernel, (1,)))
        expected: Any
        expected, plain_back = jax.vjp(lambda x: conv.plain(w, x), x)
        y = jnp.asarray(RANDOM.normal(size=expected.shape))
        used = []

        def counted(*arguments):
            used.append(arguments)
            return _as_product(*arguments)

        monkeypatch.setattr(operations, "_as_product", counted)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        found: Any
        found, back = jax.vjp(lambda x: _own_conv(conv, w, x), x)
        assert used
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(back(y)[0], plain_back(y)[0], rtol=1e-12, atol=1e-12)
        many = jax.vmap(lambda x: _own_conv(conv, w, x))(jnp.stack([x, 2 * x]))
        np.testing.assert_allclose(many[1], 2 * expected, rtol=1e-12, atol=1e-12)


def test_large_patches_are_no_product():
    """They would take more memory than anything else."""
    conv = Conv((1, 1), ((2, 2), (2, 2)), (1, 1), (1, 1))
    assert not operations._patches_are_small(conv, np.zeros((4, 3, 5, 5)))
    assert operations._patches_are_small(conv, np.zeros((4, 3, 3, 3)))


def test_single_precision_boxes_are_sent_as_they_are():
    net = networks.from_jax(lambda x: jax.nn.relu(x) - x, np.zeros(3))
    low = RANDOM.normal(size=(5, 3)).astype(np.float32)
    high = low + np.float32(0.3)
    regions = regions_of(net, low, high, None)
    assert len(regions.singles) == 2
    with jax.enable_x64(True):
        ((some_low, some_high),) = regions[np.array([3, 1])].boxes
    assert some_low.dtype == some_high.dtype == np.float64
    np.testing.assert_array_equal(some_low, low[[3, 1]].astype(np.float64))
    np.testing.assert_array_equal(some_high, high[[3, 1]].astype(np.float64))
    # Some processors take such numbers for zero.
    low[2, 1], high[2, 1] = -1e-42, 1e-42
    assert not regions_of(net, low, high, None).singles
    assert not regions_of(net, low.tolist(), high.tolist(), None).singles


def test_large_arrays_are_looked_at_in_threads(monkeypatch):
    net = networks.from_jax(lambda x: jax.nn.relu(x) - x, np.zeros(3))
    low = RANDOM.normal(size=(50, 3)).astype(np.float32)
    monkeypatch.setattr(regions_module, "LARGE", 1)
    found = regions_of(net, low, low + 1, None)
    np.testing.assert_array_equal(found.boxes[0][0], low.astype(np.float64))
    low[40, 2] = np.nan
    with pytest.raises(ProblemError, match=r"\[40, 2\]"):
        regions_of(net, low, low + 1, None)
