"""Envelopes over all inputs of neurons: against linear programmes with all cuts, and the truth."""

import itertools

import envelope_truth as truth
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog

import stagecert as sc
from stagecert import networks
from stagecert.networks.bounding import neurons
from stagecert.networks.bounding.envelope_bounds import Limits, improve, tighten
from stagecert.networks.bounding.programs import program_of
from stagecert_check.bounds import Facts
from stagecert_check.numbers import Arithmetic

ROWS = np.array([[1.0, -1.0], [-1.0, 1.0]])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31))
def test_a_neuron_has_the_envelope_over_all_corners_of_its_box(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 6))
    w, low = draw.normal(size=n), draw.normal(size=n)
    high = low + draw.uniform(0.1, 2, size=n)
    delta = np.abs(w) * (high - low)
    least = np.where(w >= 0, w * low, w * high).sum()
    b = -least - draw.uniform(0.05, 0.95) * delta.sum()
    x = draw.uniform(low, high)
    deficit = -(least + b)
    single = [
        np.array(v)[None] for v in (0, delta, (w < 0).astype(float), delta.sum() - deficit, deficit)
    ]
    neuron = neurons.Neurons(single[0], None, *single[1:])
    t = neuron.moved(((x - low) / (high - low))[None])
    corners = np.array(list(itertools.product(*zip(low, high, strict=True))))
    values = np.maximum(corners @ w + b, 0)
    hull = linprog(-values, A_eq=np.vstack([corners.T, np.ones(2**n)]), b_eq=np.append(x, 1))
    ((mine,),) = neurons.envelope(t, neuron)
    assert mine <= -hull.fun + 1e-9
    # The threshold is known to 2^-13 of what inputs have moved.
    assert mine == pytest.approx(-hull.fun, abs=2e-4 * delta.sum())
    # Any allocation is a line above it.
    first = np.full((1, 1, n), 1 - deficit / delta.sum())
    ((kept,),) = neurons.allocated(first, draw.normal(size=(1, 1, n)), neuron)
    assert kept @ delta == pytest.approx(delta.sum() - deficit, rel=1e-5)
    assert np.all((kept > -1e-6) & (kept < 1 + 1e-6))
    assert np.sum(kept * delta * t) >= mine - 1e-5 * delta.sum()


@pytest.mark.parametrize("size", [0.1, 1, 8])
def test_an_allocation_is_the_nearest_one_however_long_the_step(size):
    # Long steps gave equal shares, from which no search ever moved again.
    draw = np.random.default_rng(0)
    delta = draw.uniform(0.1, 1, size=(50, 8))
    most = delta.sum(axis=1) * draw.uniform(0.02, 0.98, size=50)
    neuron = neurons.Neurons(np.arange(50), None, delta, 0 * delta, most, delta.sum(axis=1) - most)
    first = np.broadcast_to((most / delta.sum(axis=1))[:, None], delta.shape)
    push = size * draw.uniform(size=delta.shape)
    wanted = first - push
    low, high = np.full(50, -size - 2.0), np.full(50, size + 2.0)
    for _ in range(60):
        at = (low + high) / 2
        less = np.sum(delta * np.clip(wanted + at[:, None], 0, 1), axis=1) < most
        low, high = np.where(less, at, low), np.where(less, high, at)
    kept = neurons.allocated(first, push, neuron)
    off = np.abs(kept - np.clip(wanted + high[:, None], 0, 1)).max(axis=1)
    assert np.mean(off < 1e-6) > 0.8
    assert np.all(np.isclose(np.sum(kept * delta, axis=1), most, rtol=1e-5))


def _found(chain, network, shape, radius, seed, steps=(60, 300)):
    """What is proven, values, and the optima of the programmes with triangles and with all cuts."""
    x = np.random.default_rng(seed + 100).normal(size=shape)
    low, high = (x - radius).reshape(1, -1), (x + radius).reshape(1, -1)
    program = program_of(network)
    facts = Facts(Arithmetic(), program, low, high).derive()
    arguments = tuple(facts.boxes[k] for k in program.activations)
    limits = Limits(steps, (0, 1e-6), None, 1.0)
    every = np.ones((1, 2), bool)
    found = improve(
        network, ((low, high),), arguments, ROWS[None], every, np.full((1, 2), np.inf), limits,
        lambda *_: None,
    )  # fmt: skip
    ends = [tuple(y[0].reshape(-1) for y in pair) for pair in arguments]
    programmes = [
        np.array([truth.least(chain, low[0], high[0], ends, row, cuts) for row in ROWS])
        for cuts in (False, True)
    ]
    draw = np.random.default_rng(seed)
    points = draw.uniform(low, high, size=(2000, x.size))
    points[::2] = np.where(draw.uniform(size=points[::2].shape) < 0.5, low, high)
    true = (truth.exact(chain, points) @ ROWS.T).min(axis=0)
    return found.bound[0], found.value[0], *programmes, true


def _check(found, tolerance=1e-3):
    bound, value, triangle, optima, true = found
    # Programmes are solved to 1e-7.
    assert np.all(bound <= optima + 3e-6)
    assert np.all(bound <= true)
    assert np.all(value >= optima - 3e-6)
    assert np.all(bound >= optima - tolerance * (1 + np.abs(optima)))
    return int(np.sum(bound > triangle + 0.02))


def test_dense_networks_reach_the_optimum_with_all_cuts():
    found = [_check(_found(*truth.dense(k), (4,), 0.5, k)) for k in (0, 2)]
    assert sum(found) >= 3  # these gain a lot


def test_convolutions_reach_the_optimum_with_all_cuts():
    assert _check(_found(*truth.convolved(0), truth.CONVOLVED, 0.3, 0)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["dense", "convolved"])
def test_forty_networks_reach_the_optimum_with_all_cuts(kind, seed):
    shape, radius = ((4,), 0.5) if kind == "dense" else (truth.CONVOLVED, 0.3)
    chain, network = getattr(truth, kind)(seed)
    _check(_found(chain, network, shape, radius, seed, (60, 4000)), 1e-4)


@pytest.mark.slow
def test_leaky_relu_and_other_activations_are_never_worse():
    draw = np.random.default_rng(1)
    first, second = draw.normal(size=(3, 6)), draw.normal(size=(6, 2))

    def function(x):
        return jax.nn.tanh(jax.nn.leaky_relu(jax.nn.leaky_relu(x @ first) @ second, 0.1))

    network = networks.from_jax(function, np.zeros(3))
    box = -np.ones((1, 3)), np.ones((1, 3))
    triangle = networks.bound(network, *box, ROWS)
    envelope = networks.bound(network, *box, ROWS, relaxation="envelope")
    assert np.all(envelope.bound >= triangle.bound)
    points = draw.uniform(-1, 1, size=(1000, 3))
    true = (np.asarray(network(points)) @ ROWS.T).min(axis=0)
    assert np.all(envelope.bound <= true)
    assert np.all(envelope.value >= envelope.bound)


def _bent(function):
    draw = np.random.default_rng(1)
    first, second = draw.normal(size=(3, 6)), draw.normal(size=(6, 2))
    network = networks.from_jax(lambda x: function(x @ first) @ second, np.zeros(3))
    box = -np.ones((1, 3)), np.ones((1, 3))
    return [networks.bound(network, *box, ROWS, relaxation=x) for x in ("triangle", "envelope")]


@pytest.mark.slow
def test_where_no_neuron_has_a_plane_the_answer_is_that_of_triangles():
    # A leaky relu that falls first has no planes: values were lost to the network's own.
    triangle, envelope = _bent(lambda y: jax.nn.leaky_relu(y, -0.2))
    np.testing.assert_array_equal(envelope.value, triangle.value)
    np.testing.assert_array_equal(envelope.bound, triangle.bound)
    assert np.all(envelope.status == triangle.status)


@pytest.mark.parametrize("kind", ["abs", pytest.param("mixed", marks=pytest.mark.slow)])
def test_values_are_those_of_the_relaxation_with_other_activations(kind):
    """What `bound` does with them is in the slow tests."""
    matrix = np.random.default_rng(1).normal(size=(3, 3))

    def function(x):
        x = jax.numpy.abs(x @ matrix)
        return (x if kind == "abs" else jax.nn.relu(x @ matrix - 0.5))[:2]

    network = networks.from_jax(function, np.zeros(3))
    program, box = program_of(network), (-np.ones((1, 3)), np.ones((1, 3)))
    facts = Facts(Arithmetic(), program, *box).derive()
    arguments = tuple(facts.boxes[k] for k in program.activations)
    found = improve(
        network, (box,), arguments, ROWS[None], np.ones((1, 2), bool), np.full((1, 2), np.inf),
        Limits((10, 0), (0, 1e-6), None, 1.0), lambda *_: None,
    )  # fmt: skip
    assert found.same.all() == (kind == "abs")
    assert found.reached.all() == (kind == "mixed")
    if kind == "mixed":
        assert np.all(np.isfinite(found.value))  # infinite before
        assert np.all(found.bound <= found.value)


@pytest.mark.slow
def test_networks_with_other_activations_have_a_value_of_their_relaxation():
    # Hulls of tanh, envelopes of relu: at most the triangle's, never below the bound.
    draw = np.random.default_rng(2)
    middle = draw.normal(size=(6, 6))
    triangle, envelope = _bent(lambda y: jax.nn.tanh(jax.nn.relu(y) @ middle))
    assert np.all(envelope.value >= envelope.bound)
    assert np.all(envelope.value < envelope.attained - 0.01)
    assert np.all(envelope.bound >= triangle.bound)


def test_a_threshold_ends_the_search_and_what_is_proven_stays():
    _, network = truth.dense(0)
    x = np.random.default_rng(100).normal(size=4)
    box = [x - 0.5], [x + 0.5]
    found = networks.bound(network, *box, ROWS, relaxation="envelope", threshold=-1.3)
    triangle = networks.bound(network, *box, ROWS)
    assert triangle.bound.min() < -1.3
    assert found.status.tolist() == [[sc.Status.TARGET_PROVEN] * 2]
    assert np.all(found.bound > -1.3)
    # Without time, the triangle's bounds are all there is, and values are the network's own.
    late = networks.bound(network, *box, ROWS, relaxation="envelope", time_limit=1e-9)
    assert np.all(late.status == sc.Status.TIME_LIMIT)
    np.testing.assert_allclose(late.value, late.attained)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"relaxation": "square"}, "Unknown relaxation 'square'; known are triangle, envelope"),
        ({"relaxation": "envelope", "method": "backward"}, "needs method='nonconvex'"),
        ({"intermediate": "envelope"}, "needs relaxation='envelope'"),
        ({"relaxation": "envelope", "planes": 0}, "planes must be a number of neurons, 1 or more"),
        ({"relaxation": "envelope", "ball": (np.zeros((1, 4)), 1.0)}, "no ball"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    _, network = truth.dense(0)
    box = -np.ones((1, 4)), np.ones((1, 4))
    with pytest.raises(sc.ProblemError, match=words):
        networks.bound(network, *box, ROWS, **options)


def test_intervals_by_envelopes_are_narrower_and_hold():
    chain, network = truth.dense(0)
    x = np.random.default_rng(100).normal(size=4)
    low, high = (x - 0.5)[None], (x + 0.5)[None]
    program = program_of(network)
    facts = Facts(Arithmetic(), program, low, high).derive()
    before = tuple(facts.boxes[k] for k in program.activations)
    after = tighten(
        network, ((low, high),), before, Limits((0, 0), (0, 0), None, 1.0), lambda *_: None
    )
    for old, new in zip(before, after, strict=True):
        assert np.all(new[0] >= old[0])
        assert np.all(new[1] <= old[1])
    width = [np.sum(pair[1][1] - pair[1][0]) for pair in (before, after)]
    assert width[1] < 0.95 * width[0]
    points = np.random.default_rng(0).uniform(low, high, size=(2000, 4))
    points[::2] = np.where(points[::2] > x, high, low)
    for (matrix, constant), (lower, upper) in zip(chain, after, strict=False):
        y = points @ matrix + constant
        assert np.all((y >= lower) & (y <= upper))
        points = np.maximum(y, 0)


@pytest.mark.slow
def test_bound_takes_intervals_by_envelopes():
    _, network = truth.dense(0)
    x = np.random.default_rng(100).normal(size=(2, 4))
    usual, narrow = (
        networks.bound(network, x - 0.5, x + 0.5, ROWS, intermediate=how, relaxation="envelope")
        for how in ("backward", "envelope")
    )
    assert np.all(narrow.bound >= usual.bound - 1e-2 * (1 + np.abs(usual.bound)))
    assert narrow.bound.mean() > usual.bound.mean()
    assert np.all(narrow.value >= narrow.bound)
    points = np.random.default_rng(0).uniform(x - 0.5, x + 0.5, size=(500, 2, 4))
    values = np.stack([np.asarray(network(p)) @ ROWS.T for p in points])
    assert np.all(narrow.bound <= values.min(axis=0))
