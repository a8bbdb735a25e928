"""Descents towards counterexamples: always in the box, and out of basins that lead nowhere."""

import numpy as np
import pytest
from exact import dense, random_layers, vnnlib

from stagecert import networks
from stagecert.verify import attack
from stagecert.verify.queries import groups_of
from stagecert_check import properties


def problem(model, low, high, formula, outputs):
    network = networks.load(model)
    return groups_of(network, properties.load(vnnlib(low, high, formula, outputs)))


def hidden_valley():
    """Y_0 is small only where X_0 is nearly one, and flat elsewhere: its slope says nothing.

    Y_1 = X_0 shows the way: who makes it large gets there.
    """
    first = (np.array([[1, 0], [1, 0]]), np.array([-0.95, 1]))
    return dense([first, (np.array([[-20, 0], [0, 1]]), np.array([0.5, -1]))])


@pytest.mark.parametrize("plan", [*attack.SHORT, *attack.LONG, attack.NEAR])
def test_points_stay_in_the_box_and_violations_are_those_of_the_points(plan):
    network, groups = problem(
        dense(random_layers(0)), (-1, 0.25), (0.5, 0.25), "(and (<= Y_0 -2) (<= Y_1 Y_2))", 3
    )
    draw = np.random.default_rng(0)
    lanes = [(0, 0)] * 16
    goal = attack.targets(groups, lanes)
    starts = attack.start_points(goal.lower[0], goal.upper[0], 16, draw)
    found = attack.descend(network, starts, goal, plan, draw)
    assert np.all(found.points >= goal.lower)
    assert np.all(found.points <= goal.upper)
    rows = np.asarray(network(found.points)) @ groups[0].matrix.T - groups[0].goals
    np.testing.assert_allclose(found.violation, rows.max(axis=1), rtol=1e-4, atol=1e-4)
    # No lane ends worse than where it began, unless it was spread out first.
    if not plan.spread:
        before = np.asarray(network(starts)) @ groups[0].matrix.T - groups[0].goals
        assert np.all(found.violation <= before.max(axis=1) + 1e-4)


def test_diverse_points_find_a_valley_that_gradients_do_not_show():
    """From where the slope is zero no descent moves, however long it is."""
    network, groups = problem(hidden_valley(), (-1, -1), (1, 1), "(<= Y_0 -0.2)", 2)
    lanes = [(0, 0)] * 64
    goal = attack.targets(groups, lanes)
    draw = np.random.default_rng(0)
    starts = np.full((64, 2), -0.5) + draw.uniform(-0.1, 0.1, (64, 2))
    for plan in (*attack.SHORT, attack.LONG[0]):
        assert attack.descend(network, starts, goal, plan, draw).violation.min() > 0
    assert attack.descend(network, starts, goal, attack.LONG[1], draw).violation.min() <= 0


def edge():
    """Y_0 goes down with X_0 and X_1, but where both are smallest and X_2 is near 0.3 it is least.

    Y_0 = -X_0 - X_1 - 1000 relu(0.01 - (X_0 + 1) - (X_1 + 1) - 0.05 |X_2 - 0.3|)
    """
    first = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, -1]], float)
    second = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [-1, -1, -0.05, -0.05]])
    return dense([
        (first, np.array([1, 1, -0.3, 0.3])), (second, np.array([0, 0, 0.01])),
        (np.array([[-1, -1, -1000]]), np.array([2])),
    ])  # fmt: skip


def test_regions_along_an_edge_are_found_by_points_on_faces():
    """At -3 there is nothing else: elsewhere Y_0 is at least -2. Descents lead to X = (1, 1)."""
    network, groups = problem(edge(), (-1, -1, -1), (1, 1, 1), "(<= Y_0 -3)", 1)
    lanes = [(0, 0)] * 1024
    goal, draw = attack.targets(groups, lanes), np.random.default_rng(0)
    for plan in (*attack.SHORT, *attack.LONG):
        starts = attack.start_points(goal.lower[0], goal.upper[0], len(lanes), draw)
        assert attack.descend(network, starts, goal, plan, draw).violation.min() > 0
    faces = attack.points_on_faces(goal.lower, goal.upper, draw)
    assert np.all((goal.lower <= faces) & (faces <= goal.upper))
    seen = attack.descend(network, faces, goal, attack.LOOK)
    np.testing.assert_array_equal(seen.points, faces.astype(np.float32))
    assert seen.violation.min() < 0
    # Two of three entries are at an end.
    assert np.mean((faces == goal.lower) | (faces == goal.upper)) == pytest.approx(2 / 3, abs=0.05)
