"""Network bound problems in CVXPY: against programs stated independently, and our bounds."""

import sys
from pathlib import Path
from typing import Any

import cvxpy as cp
import numpy as np
import pytest

import stagecert as sc
from stagecert import networks
from stagecert.interop import networks_to_cvxpy
from stagecert.networks import operations as op
from stagecert.networks.graph import Builder

sys.path.insert(0, str(Path(__file__).parents[1] / "networks"))
import models

RELU_NETWORKS = {
    "dense": lambda random: models.dense(models.random_layers(random, (4, 8, 6, 3))),
    "residual": lambda random: models.residual_net(random, width=5),
    "convolutions and pooling": lambda random: models.conv_net(random, size=5, pool=True),
}


def _box(random, network, width=0.3):
    centre = random.normal(size=network.input_shape)
    return centre - width, centre + width


def _intervals(network, low, high):
    """Interval bounds of what enters the activations."""
    found = networks.bound(network, low[None], high[None], method="ibp", intermediate="ibp")
    return [(l[0], u[0]) for l, u in found.intermediate]


@pytest.mark.parametrize("name", RELU_NETWORKS)
def test_relu_networks_are_the_linear_program(name):
    random = np.random.default_rng(1)
    network = RELU_NETWORKS[name](random)
    low, high = _box(random, network)
    row = random.normal(size=network.output_size)
    exported = networks_to_cvxpy(network, low, high, row, intermediate="ibp")
    optimum = exported.problem.solve(solver="HIGHS")
    intervals = _intervals(network, low, high)
    truth = models.triangle_program(network, low.ravel(), high.ravel(), row, intervals)
    assert optimum == pytest.approx(truth, rel=1e-7, abs=1e-7)


def test_our_bound_and_value_enclose_the_optimum():
    random = np.random.default_rng(1)
    network = RELU_NETWORKS["dense"](random)
    low, high = _box(random, network)
    row = random.normal(size=network.output_size)
    found = networks.bound(network, low[None], high[None], row[None], rtol=1e-5)
    for intermediate in ("backward", found.intermediate):
        exported = networks_to_cvxpy(network, low, high, row, intermediate=intermediate)
        optimum: Any = exported.problem.solve(solver="HIGHS")
        assert found.bound[0, 0] - 1e-7 <= optimum <= found.value[0, 0] + 1e-7
        assert optimum - found.bound[0, 0] <= 1e-4 * max(abs(optimum), 0.01)


def softplus_program(network, low, high, row, intermediate):
    """The relaxation of a softplus network, from its affine forms."""
    *forms, last = models.affine_forms(network)
    x = cp.Variable(last.matrix.shape[1])
    constraints = [x[: len(low)] >= low, x[: len(low)] <= high]
    for form, (l, u) in zip(forms, intermediate, strict=True):
        l, u = l.ravel(), u.ravel()
        a, z = form.matrix @ x + form.constant, x[form.variables]
        slope = (np.logaddexp(u, 0) - np.logaddexp(l, 0)) / (u - l)
        chord = cp.multiply(slope, a - l) + np.logaddexp(l, 0)
        constraints += [z >= cp.logistic(a), z <= chord]
    cost = row @ (last.matrix @ x + last.constant)
    return cp.Problem(cp.Minimize(cost), constraints).solve(solver="CLARABEL")


def test_softplus_network_is_the_conic_program():
    random = np.random.default_rng(2)
    network = models.dense(models.random_layers(random, (4, 8, 6, 3)), activation="softplus")
    low, high = _box(random, network)
    row = random.normal(size=3)
    exported = networks_to_cvxpy(network, low, high, row, intermediate="ibp")
    optimum = exported.problem.solve(solver="CLARABEL")
    truth = softplus_program(network, low, high, row, _intervals(network, low, high))
    assert optimum == pytest.approx(truth, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"), [("leaky_relu", (("alpha", 0.1),)), ("abs", ()), ("hard_sigmoid", ())]
)
def test_other_hulls_made_of_lines(kind, settings):
    random = np.random.default_rng(3)
    layers = models.random_layers(random, (3, 6, 2))
    network = models.dense(layers, activation=kind, settings=settings)
    low, high = _box(random, network, 1.0)
    row = random.normal(size=2)
    found = networks.bound(network, low[None], high[None], row[None], intermediate="ibp", rtol=1e-6)
    exported = networks_to_cvxpy(network, low, high, row, intermediate="ibp")
    optimum = exported.problem.solve(solver="HIGHS")
    assert found.bound[0, 0] - 1e-7 <= optimum <= found.value[0, 0] + 1e-7
    assert found.gap[0, 0] < 1e-4


def test_the_network_itself_is_feasible():
    random = np.random.default_rng(4)
    network = models.conv_net(random, size=5)
    low, high = _box(random, network)
    row = random.normal(size=network.output_size)
    exported = networks_to_cvxpy(network, low, high, row, intermediate="ibp")
    point = low + (high - low) * random.random(low.shape)
    *forms, _ = models.affine_forms(network)
    values = [point.ravel()]
    for form, argument in zip(forms, exported.arguments, strict=True):
        known = np.concatenate(values)
        argument.value = form.matrix[:, : len(known)] @ known + form.constant
        values.append(np.maximum(argument.value, 0))
    value = exported.assign(point, tuple(values[1:]))
    assert exported.violation < 1e-9
    assert value == pytest.approx(row @ np.asarray(network(point[None]))[0], abs=1e-9)
    assert exported.value_of("inputs").shape == network.input_shapes[0]
    outputs = exported.outputs.value
    assert outputs == pytest.approx(np.asarray(network(point[None]))[0], abs=1e-9)


def test_bad_input_is_named():
    random = np.random.default_rng(5)
    network = models.dense(models.random_layers(random, (3, 4, 2)), activation="tanh")
    box = -np.ones(3), np.ones(3)
    with pytest.raises(sc.ProblemError, match=r"'tanh'.*cannot be exported"):
        networks_to_cvxpy(network, *box, [1.0, 0.0], intermediate="ibp")
    relu = models.dense(models.random_layers(random, (3, 4, 2)))
    with pytest.raises(sc.ProblemError, match="one row"):
        networks_to_cvxpy(relu, *box, np.eye(2))
    with pytest.raises(sc.ProblemError, match="objectives must have shape"):
        networks_to_cvxpy(relu, *box, [1.0, 0.0, 2.0])
    with pytest.raises(sc.ProblemError, match="A box is empty"):
        networks_to_cvxpy(relu, box[1], box[0], [1.0, 0.0])


def test_two_inputs():
    random = np.random.default_rng(6)
    build = Builder()
    one, two = (build.input(name, (3,), False) for name in ("one", "two"))
    hidden = models.relu(build, models.affine(build, one, random.normal(size=(3, 4)), np.zeros(4)))
    other = models.affine(build, two, random.normal(size=(3, 4)), np.ones(4))
    network = build.network([build.add(op.Sum((1, 1)), hidden, other)])
    low, high = (-np.ones(3), np.zeros(3)), (np.ones(3), 2 * np.ones(3))
    row = random.normal(size=4)
    exported = networks_to_cvxpy(network, low, high, row, intermediate="ibp")
    optimum = exported.problem.solve(solver="HIGHS")
    batch = (tuple(x[None] for x in low), tuple(x[None] for x in high))
    found = networks.bound(network, *batch, row[None], method="backward", intermediate="ibp")
    assert found.bound[0, 0] - 1e-7 <= optimum <= found.value[0, 0] + 1e-7
    assert {"one", "two"} <= set(exported.names)


def test_products_are_mccormicks_planes():
    """x * y on [1, 2] x [-1, 3]: the relaxed minimum and maximum are those of the four corners."""

    def function(x):
        return x[:1] * x[1:]

    network = networks.from_jax(function, np.zeros(2))
    for row, optimum in ((1.0, -2.0), (-1.0, -6.0)):
        exported = networks_to_cvxpy(network, [1.0, -1.0], [2.0, 3.0], [row])
        assert exported.problem.solve(solver="HIGHS") == pytest.approx(optimum, abs=1e-7)
