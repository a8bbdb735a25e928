"""Copies of a number are found, and bounded once."""

import numpy as np

from stagecert import networks
from stagecert.networks import from_jax
from stagecert.networks.bounding.relaxation import copied, split


def test_factors_of_a_matrix_product_are_repeated():
    network = from_jax(lambda x: x[:, 1:] @ (2 * x).T[:2], np.zeros((3, 3), np.float32))
    (layer,) = split(network).layers
    first = copied(layer.segment, [(3, 3)])
    # Each product has two factors: 6 different numbers of x, and 6 of 2 x.
    x = np.random.default_rng(0).normal(size=(3, 3))
    values = np.asarray(layer.segment(x, ())).ravel()
    assert len(set(first.tolist())) == len(set(values.tolist())) == 12
    assert values[first].tolist() == values.tolist()
    # The first of all that are the same.
    assert all(np.flatnonzero(first == k)[0] == k for k in set(first.tolist()))


def test_without_copies_every_entry_stands_for_itself():
    weights = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    network = from_jax(lambda x: abs(x @ weights), np.zeros(3, np.float32))
    (layer,) = split(network).layers
    assert copied(layer.segment, [(3,)]).tolist() == [0, 1, 2, 3]


def test_bounds_hold_where_numbers_are_repeated():
    def function(x):
        y = abs(x)  # so that intervals are tightened by passes back
        return (y[:, None] * (y @ np.ones((3, 3), np.float32) - x)[None, :]).sum(axis=0)

    network = from_jax(function, np.zeros(3, np.float32))
    random = np.random.default_rng(1)
    low = random.normal(size=(2, 3))
    high = low + 0.5
    points = low + (high - low) * random.uniform(size=(200, 2, 3))
    values = np.stack([np.asarray(network(p)) for p in points])
    for intermediate in ("ibp", "backward"):
        found = networks.bound(network, low, high, method="backward", intermediate=intermediate)
        assert np.all(found.bound <= values.min(axis=0) + 1e-5)
    assert np.all(found.bound > values.min(axis=0) - 3)
