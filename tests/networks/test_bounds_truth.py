"""`bound` against the truth: linear programs by HiGHS, convex ones by Clarabel, plain NumPy."""

import functools
import warnings
from typing import Any

import cvxpy as cp
import models
import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from stagecert import networks
from stagecert.networks import operations as op

TIGHT: dict[str, Any] = dict(atol=1e-7, rtol=1e-5, max_iterations=3000)


def random_boxes(random, network, count, width):
    """Boxes as (count, *input_shape)."""
    centre = random.normal(size=(count, *network.input_shape))
    return centre - width, centre + width


@functools.cache
def trained(hidden):
    """A classifier of digits, trained for a moment: the network, and images it was not shown."""
    data: Any = load_digits()
    x, y = data.data / 16, data.target
    classifier = MLPClassifier(hidden, max_iter=20, random_state=0, learning_rate_init=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is told to stop early
        classifier.fit(x[:1200], y[:1200])
    layers = list(zip(classifier.coefs_, classifier.intercepts_, strict=True))
    right = np.flatnonzero(classifier.predict(x[1200:]) == y[1200:]) + 1200
    return models.dense(layers), x[right], y[right]


# -- linear programs ------------------------------------------------------------------------------


def assert_matches_program(network, low, high, rows, intermediate, precision: Any = "float32"):
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
    print(f"{len(rows) * len(rows[0])} programs, worst relative distance {worst:.2e}")
    return worst


ARCHITECTURES = {
    "dense": lambda random: models.dense(models.random_layers(random, (5, 16, 16, 3))),
    "residual": lambda random: models.residual_net(random),
    "pooled image": lambda random: models.conv_net(random, size=6, pool=True),
    "deep": lambda random: models.dense(models.random_layers(random, (4, 10, 10, 10, 10, 2))),
    "convolution": lambda random: models.conv_net(random),
    "pooled": lambda random: models.pooled_net(random),
}
# Weights are arrays, so that one architecture is compiled once.
QUICK = {"dense": range(11), "residual": (4, 5, 6, 7), "pooled image": (5,)}
LONG = {"dense": (11,), "residual": (0, 2, 3), "pooled image": (0, 1, 2, 3, 6)}
CASES = [
    *((name, "backward", draw) for name, draws in QUICK.items() for draw in draws),
    *((name, "ibp", 8) for name in QUICK if name != "pooled image"),
]
SLOW = [
    ("pooled image", "ibp", 8),
    *((name, "backward", draw) for name in ARCHITECTURES if name not in QUICK for draw in range(6)),
    *((name, "ibp", 8) for name in ARCHITECTURES if name not in QUICK),
    *((name, "backward", draw) for name, draws in LONG.items() for draw in draws),
    *((name, "optimised", draw) for name in ("dense", "pooled") for draw in (9, 10)),
]


@pytest.mark.parametrize(
    ("name", "intermediate", "draw"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_random_networks_reach_the_linear_program(name, intermediate, draw):
    random = np.random.default_rng(draw)
    network = ARCHITECTURES[name](random)
    low, high = random_boxes(random, network, 2, 0.1 + 0.2 * random.random())
    rows = random.normal(size=(2, network.output_size))
    assert_matches_program(network, low, high, rows, intermediate)


@pytest.mark.parametrize("draw", range(6))
def test_trained_networks_reach_the_linear_program(draw):
    network, images, labels = trained((24, 24))
    some = slice(2 * draw, 2 * draw + 2)
    low, high = images[some] - 0.03, images[some] + 0.03
    rows = networks.margins(labels[some], 10)[:, :2]
    assert_matches_program(network, low, high, rows, "backward")


@pytest.mark.slow
def test_double_precision_reaches_the_linear_program():
    random = np.random.default_rng(3)
    network = ARCHITECTURES["dense"](random)
    low, high = random_boxes(random, network, 2, 0.3)
    rows = random.normal(size=(2, 3))
    assert assert_matches_program(network, low, high, rows, "backward", "float64") < 2e-5


# -- curved activations ---------------------------------------------------------------------------


def assert_gap_closes(network, low, high, rows):
    """The method's own point proves that no more can be had from the relaxation."""
    result = networks.bound(network, low, high, rows, **TIGHT)
    size = np.maximum(np.abs(result.bound), 1e-2)
    assert np.all(result.value >= result.bound)
    assert np.all(result.gap <= 1e-4 * size), (result.gap / size, result.status)
    assert np.all(result.attained >= result.bound)
    return result


CURVED = [
    pytest.param(("softplus", "sigmoid", "gelu")),
    pytest.param(("tanh", "silu", "elu"), marks=pytest.mark.slow),
    pytest.param(("exp", "square", "mish"), marks=pytest.mark.slow),
    pytest.param(("selu", "softsign", "gelu_tanh"), marks=pytest.mark.slow),
    pytest.param(("hard_swish", "celu", "abs"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kinds", CURVED)
def test_curved_activations_close_the_gap(kinds):
    for draw in range(3):
        random = np.random.default_rng(draw)
        network = models.split_net(random, [op.Activation(kind) for kind in kinds])
        low, high = random_boxes(random, network, 2, 0.3)
        assert_gap_closes(network, low, high, random.normal(size=(2, 2)))


CONVEX = {
    "softplus": (cp.logistic, lambda x: np.logaddexp(x, 0)),
    "exp": (cp.exp, np.exp),
    "square": (cp.square, np.square),
}


def convex_program(network, low, high, row, intermediate):
    """The least row . outputs over the relaxation of convex activations and relu, by Clarabel."""
    *forms, last = models.affine_forms(network)
    variables = cp.Variable(last.matrix.shape[1])
    box = variables[: len(low)]
    constraints = [box >= low, box <= high]
    for form, (l, u) in zip(forms, intermediate, strict=True):
        x = form.constant + form.matrix @ variables
        y = variables[form.variables]
        convex, function = CONVEX.get(form.operation.kind, (cp.pos, lambda x: np.maximum(x, 0)))
        slope = (function(u) - function(l)) / (u - l)
        chord = function(l) + cp.multiply(slope, x - l)
        constraints += [y >= convex(x), y <= chord]
    problem = cp.Problem(cp.Minimize(row @ (last.constant + last.matrix @ variables)), constraints)
    problem.solve(cp.CLARABEL)
    return float(np.asarray(problem.value))


def test_convex_activations_reach_the_convex_program():
    for draw in range(4):
        random = np.random.default_rng(draw)
        network = models.split_net(random, [op.Activation(kind) for kind in CONVEX])
        low, high = random_boxes(random, network, 2, 0.3)
        rows = random.normal(size=(2, 2))
        result = assert_gap_closes(network, low, high, rows)
        for b, t in np.ndindex(2, 2):
            intervals = [(l[b], u[b]) for l, u in result.intermediate]
            best = convex_program(network, low[b], high[b], rows[t], intervals)
            slack = 1e-6 * max(abs(best), 1)
            assert result.bound[b, t] <= best + slack
            assert result.value[b, t] >= best - slack
            assert best - result.bound[b, t] <= 1e-4 * max(abs(best), 1e-2)


# -- intermediate bounds --------------------------------------------------------------------------


def wide_network():
    """784-64-64-10, and two images."""
    random = np.random.default_rng(0)
    network = models.dense(models.random_layers(random, (784, 64, 64, 10)))
    images = random.random((2, 784))
    return network, images - 0.02, images + 0.02


def everything(network, low, high, kind):
    """Intervals of both layers' arguments; the outputs are another matter."""
    return networks.bound(network, low, high, method="ibp", intermediate=kind).intermediate


def test_intervals_are_those_of_plain_arithmetic():
    network, low, high = wide_network()
    result = networks.bound(network, low, high, method="ibp", intermediate="ibp")
    for b in range(len(low)):
        plain, outputs = models.plain_intervals(network, low[b], high[b])
        for (l, u), (l2, u2) in zip(result.intermediate, plain, strict=True):
            np.testing.assert_allclose(l[b], l2, atol=1e-9)
            np.testing.assert_allclose(u[b], u2, atol=1e-9)
            assert np.all(l[b] <= l2 + 1e-12)
        np.testing.assert_allclose(result.bound[b], outputs[0], atol=1e-9)


def test_better_intermediate_bounds_are_tighter():
    network, low, high = wide_network()
    intervals, backward, optimised = (
        everything(network, low, high, kind) for kind in ("ibp", "backward", "optimised")
    )
    for b in range(len(low)):
        plain, _ = models.plain_backward(network, low[b], high[b])
        # Entries that intervals show to be stable are left alone.
        (l0, u0), (l1, u1), (l2, u2) = (
            (x[1][0][b], x[1][1][b]) for x in (intervals, backward, optimised)
        )
        unstable = (l0 < 0) & (u0 > 0)
        assert unstable.sum() > 20
        assert np.all(l1[unstable] >= plain[1][0][unstable] - 1e-9)
        assert np.all(u1[unstable] <= plain[1][1][unstable] + 1e-9)
        assert np.all((l1 >= l0) & (u1 <= u0))
        assert np.all((l2 >= l1 - 1e-12) & (u2 <= u1 + 1e-12))
        still = (l1 < 0) & (u1 > 0)
        gained = np.mean((u1 - l1 - u2 + l2)[still] / (u1 - l1)[still])
        assert gained > 1e-3


def test_one_pass_back_is_that_of_plain_arithmetic():
    network, low, high = wide_network()
    result = networks.bound(network, low, high, method="backward")
    for b in range(len(low)):
        intervals, _ = models.plain_intervals(network, low[b], high[b])
        plain, outputs = models.plain_backward(network, low[b], high[b], best_of=intervals)
        np.testing.assert_allclose(result.bound[b], outputs[0], atol=1e-8)
        unstable = (intervals[1][0] < 0) & (intervals[1][1] > 0)
        for ours, theirs in zip(result.intermediate[1], plain[1], strict=True):
            np.testing.assert_allclose(ours[b][unstable], theirs[unstable], atol=1e-9)
