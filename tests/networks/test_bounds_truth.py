"""`bound` against the truth: linear programs by HiGHS, convex ones by Clarabel, plain NumPy."""

import functools
import warnings

import models
import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from stagecert import networks

TIGHT = dict(atol=1e-7, rtol=1e-5, max_iterations=3000)


def random_boxes(random, network, count, width):
    """Boxes as (count, *input_shape)."""
    centre = random.normal(size=(count, *network.input_shape))
    return centre - width, centre + width


@functools.cache
def trained(hidden):
    """A classifier of digits, trained for a moment: the network, and images it was not shown."""
    data = load_digits()
    x, y = data.data / 16, data.target
    classifier = MLPClassifier(hidden, max_iter=20, random_state=0, learning_rate_init=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is told to stop early
        classifier.fit(x[:1200], y[:1200])
    layers = list(zip(classifier.coefs_, classifier.intercepts_, strict=True))
    right = np.flatnonzero(classifier.predict(x[1200:]) == y[1200:]) + 1200
    return models.dense(layers), x[right], y[right]


# -- linear programs ------------------------------------------------------------------------------


def assert_matches_program(network, low, high, rows, intermediate, precision="float32"):
    """Bounds and values enclose the optimum of the linear program, and bounds closely."""
    result = networks.bound(
        network, low, high, rows, intermediate=intermediate, precision=precision, **TIGHT
    )
    rows = np.broadcast_to(rows, (len(low), *rows.shape[-2:]))
    worst = 0.0
    for b in range(len(low)):
        intervals = [(l[b], u[b]) for l, u in result.intermediate]
        for t, row in enumerate(rows[b]):
            best = models.triangle_program(network, low[b].ravel(), high[b].ravel(), row, intervals)
            slack = 1e-9 * abs(best) + 1e-7  # of the program's own solution
            assert result.bound[b, t] <= best + slack
            assert result.value[b, t] >= best - slack
            assert result.value[b, t] >= result.bound[b, t]
            distance = (best - result.bound[b, t]) / max(abs(best), 1e-2)
            assert distance <= 1e-4, (b, t, best, result.bound[b, t], result.status[b, t])
            worst = max(worst, distance)
    return worst


ARCHITECTURES = {
    "dense": lambda random: models.dense(models.random_layers(random, (5, 16, 16, 3))),
    "deep": lambda random: models.dense(models.random_layers(random, (4, 10, 10, 10, 10, 2))),
    "residual": lambda random: models.residual_net(random),
    "convolution": lambda random: models.conv_net(random),
    "pooled": lambda random: models.pooled_net(random),
    "pooled image": lambda random: models.conv_net(random, size=6, pool=True),
}
# Weights are arrays, so that one architecture is compiled once.
CASES = [
    *((name, "backward", draw) for name in ARCHITECTURES for draw in range(4)),
    *((name, "ibp", draw) for name in ARCHITECTURES for draw in (4,)),
    *((name, "optimised", draw) for name in ("dense", "pooled") for draw in (5, 6)),
]


@pytest.mark.parametrize(("name", "intermediate", "draw"), CASES)
def test_random_networks_reach_the_linear_program(name, intermediate, draw):
    random = np.random.default_rng(draw)
    network = ARCHITECTURES[name](random)
    low, high = random_boxes(random, network, 2, 0.1 + 0.2 * random.random())
    rows = random.normal(size=(2, network.output_size))
    assert_matches_program(network, low, high, rows, intermediate)


@pytest.mark.parametrize("draw", range(4))
def test_trained_networks_reach_the_linear_program(draw):
    network, images, labels = trained((24, 24))
    some = slice(2 * draw, 2 * draw + 2)
    low, high = images[some] - 0.03, images[some] + 0.03
    rows = networks.margins(labels[some], 10)[:, :2]
    assert_matches_program(network, low, high, rows, "backward")


def test_double_precision_reaches_the_linear_program():
    random = np.random.default_rng(3)
    network = ARCHITECTURES["dense"](random)
    low, high = random_boxes(random, network, 2, 0.3)
    rows = random.normal(size=(2, 3))
    assert assert_matches_program(network, low, high, rows, "backward", "float64") < 2e-5
