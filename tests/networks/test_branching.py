"""`bound(..., split=N)`: trees against enumeration, exact values, and grids."""

import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.solution import Status

sys.path.insert(0, str(Path(__file__).parent.parent / "verify"))
from exact import smallest_violation  # type: ignore  # of the tests of verify

LOW, HIGH = -np.ones((1, 3)), np.ones((1, 3))
ROWS = np.array([[1.0, -1.0], [0.0, 1.0]])
QUICK: Any = dict(method="backward", rtol=1e-9, atol=1e-12)


def random_net(seed: int):
    layers = models.random_layers(np.random.default_rng(seed), (3, 5, 3, 2))
    return layers, models.dense(layers)


def exact_minima(layers) -> np.ndarray:
    plain = [(np.asarray(w, float).T, np.asarray(b, float)) for w, b in layers]
    return np.array([smallest_violation(plain, LOW[0], HIGH[0], [(row, [0] * 3, 0.0)])
                     for row in ROWS])  # fmt: skip


def test_larger_trees_come_nearer_to_the_exact_minima_and_never_beyond():
    for seed in (1, 2):
        layers, net = random_net(seed)
        exact = exact_minima(layers)
        known = networks.bound(net, LOW, HIGH, ROWS, **QUICK).bound
        first = exact - known[0]
        for nodes in (1, 3, 15, 121):
            found = networks.bound(net, LOW, HIGH, ROWS, split=nodes, **QUICK)
            assert np.all(found.bound <= exact + 1e-9)
            assert np.all(found.value >= exact - 1e-9)
            # Another number of nodes at a time may be rounded otherwise.
            assert np.all(found.bound >= known - 1e-9 * np.abs(known))
            # Without any tolerance: no bound exceeds what the network attains somewhere.
            for row, point, bound in zip(ROWS, found.inputs[0], found.bound[0], strict=True):
                outputs = models.run(net, point, kind=models.exactly)
                assert models.exactly(bound) <= models.exactly(row) @ outputs
            known = found.bound
        assert np.all(exact - known[0] <= 0.1 * first + 1e-9)


def test_a_tree_ends_where_the_question_is_answered():
    layers, net = random_net(2)
    exact = exact_minima(layers)
    every = networks.bound(net, LOW, HIGH, ROWS, split=121, **QUICK)
    near = networks.bound(net, LOW, HIGH, ROWS, split=121, **{**QUICK, "rtol": 0.9})
    assert np.all(near.status == Status.GAP_REACHED)
    assert np.all(near.gap <= 0.9 * np.abs(near.bound))
    proven = networks.bound(net, LOW, HIGH, ROWS, split=121, threshold=exact[None] - 0.1, **QUICK)
    assert np.all(proven.status == Status.TARGET_PROVEN)
    for early in (near, proven):
        # Which may be at the same split that closes all of it.
        assert np.all(early.passes <= every.passes)
        assert early.passes.sum() < every.passes.sum() / 2
    late = networks.bound(net, LOW, HIGH, ROWS, split=10**6, time_limit=1e-3, **QUICK)
    assert np.all(late.bound <= exact + 1e-9)
    assert Status.TIME_LIMIT in late.status


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tanh", "abs"])
def test_trees_of_other_activations_on_balls_and_boxes(kind):
    random = np.random.default_rng(5)
    net = models.dense(models.random_layers(random, (2, 4, 1)), activation=kind)
    low, high = -np.ones((2, 2)), np.array([[1.0, 1.0], [0.5, 1.0]])
    axis = np.linspace(-1, 1, 401)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    values = np.asarray(net(grid))[:, 0]
    inside = [np.all((grid >= a) & (grid <= b), axis=1) for a, b in zip(low, high, strict=True)]
    least = np.array([values[some].min() for some in inside])
    first = networks.bound(net, low, high, [[1.0]], **QUICK).bound[:, 0]
    found = networks.bound(net, low, high, [[1.0]], split=61, **QUICK).bound[:, 0]
    assert np.all(found <= least + 1e-6)
    assert np.all(least - found <= 0.2 * (least - first) + 1e-3)
    # On a ball only neurons are split.
    centre, radius = np.zeros((1, 2)), 0.8
    most = np.linalg.norm(grid, axis=1) <= radius
    first = networks.bound(net, objectives=[[1.0]], ball=(centre, radius), **QUICK).bound[0, 0]
    found = networks.bound(net, objectives=[[1.0]], ball=(centre, radius), split=61, **QUICK).bound[
        0, 0
    ]
    assert first <= found <= values[most].min() + 1e-6
    assert found - first >= 0.3 * (values[most].min() - first) - 1e-3


@pytest.mark.parametrize("nodes", [0, -3, 2.5, True])
def test_a_number_of_nodes_is_asked_for(nodes):
    _, net = random_net(1)
    with pytest.raises(ProblemError, match="split must be a number of nodes"):
        networks.bound(net, LOW, HIGH, ROWS, split=nodes)
