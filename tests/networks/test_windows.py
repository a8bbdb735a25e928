"""Passes back that see no more than their neurons do: the bounds of whole arrays, and the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert import networks
from stagecert.networks import operations as op
from stagecert.networks.bounding.intermediate import Intermediate
from stagecert.networks.bounding.relaxation import split
from stagecert.networks.bounding.search import backward_bounds, relax
from stagecert.networks.bounding.stepwise import Passes
from stagecert.networks.bounding.windows import Planner
from stagecert.networks.graph import Builder
from stagecert.networks.regions import regions_of
from stagecert.problem import as_arrays

DRAW = np.random.default_rng(7)


def conv(build, x, outputs, kernel, strides=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    shape = outputs, x.shape[1] // groups, *kernel
    weights = DRAW.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
    pads = tuple(p if isinstance(p, tuple) else (p, p) for p in padding)
    y = build.add(op.Conv(strides, pads, dilation, (1, 1), groups), x, weights=weights)
    return build.add(op.Shift(), y, weights=0.1 * DRAW.normal(size=(1, outputs, 1, 1)))


def relu(build, x):
    return build.add(op.Activation("relu"), x)


def plain(build, x):
    """Strides, uneven padding, and a window that leaves the image on all sides."""
    y = relu(build, conv(build, x, 3, (3, 3), padding=(1, 1)))
    y = relu(build, conv(build, y, 4, (3, 2), strides=(2, 1), padding=((2, 0), (0, 1))))
    return relu(build, conv(build, y, 2, (2, 2), padding=(1, 0)))


def residual(build, x):
    """Two branches, one with a stride of its own, scales as of a batch norm, average pooling."""
    y = relu(build, conv(build, x, 3, (3, 3), padding=(1, 1)))
    scale = DRAW.uniform(0.5, 1.5, (1, 4, 1, 1))
    one = build.add(op.Scale(), conv(build, y, 4, (3, 3), (2, 2), (1, 1)), weights=scale)
    two = conv(build, y, 4, (1, 1), (2, 2))
    y = relu(build, build.add(op.Sum((1, 1)), one, two))
    z = relu(build, build.add(op.Sum((1, -1)), conv(build, y, 4, (3, 3), padding=(1, 1)), y))
    pool = op.WindowSum((1, 1, 2, 2), (1, 1, 1, 1), (1, 1, 1, 1), ((0, 0),) * 4)
    return relu(build, conv(build, build.add(pool, z), 2, (2, 2), padding=(1, 1)))


def pooled(build, x):
    """Maxima of overlapping windows, whose argument has an axis more."""
    y = conv(build, x, 3, (3, 3), padding=(1, 1))
    y = build.add(op.Windows((1, 1, 3, 2), (1, 1, 2, 1), (1, 1, 1, 2)), y)
    y = build.add(op.Max(), y)
    return relu(build, conv(build, y, 2, (2, 2), padding=(1, 0)))


def chained(build, x):
    """Two convolutions without an activation between them: zeros stand next to the first one."""
    y = relu(build, conv(build, x, 2, (3, 3), dilation=(2, 1), padding=(2, 1)))
    y = conv(build, conv(build, y, 3, (3, 3), padding=(2, 2)), 4, (3, 3), padding=(2, 2), groups=1)
    y = build.add(op.Slice((0, 0, 1, 1), (1, 4, *(n - 1 for n in y.shape[2:])), (1, 1, 2, 1)), y)
    return build.add(op.Activation("tanh"), y)


def made(body, size=11):
    build = Builder()
    y = body(build, build.input("x", (1, 2, size, size), hidden_axis=True))
    y = build.add(op.Reshape((1, int(np.prod(y.shape)))), y)
    weights = DRAW.normal(size=(y.shape[1], 3)) / np.sqrt(y.shape[1])
    return build.network([build.add(op.MatMul(), y, weights=weights)])


def boxes(network):
    centre = DRAW.normal(size=(2, *network.input_shape))
    width = np.array([0.02, 0.3]).reshape(2, 1, 1, 1)
    return centre - width, centre + width


def arguments_at(parts, point):
    """The activations' arguments at a point, in float64."""
    blocks, found = (), []
    for layer in parts.layers:
        x = layer.segment(point, blocks)
        found.append(np.asarray(x))
        if isinstance(layer.operation, op.Max):
            blocks = (*blocks, jnp.max(x, axis=-1))
        else:
            relu = layer.operation.kind == "relu"
            blocks = (*blocks, jnp.maximum(x, 0) if relu else jnp.tanh(x))
    return found


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(plain, marks=pytest.mark.slow),
        residual,
        pytest.param(pooled, marks=pytest.mark.slow),
        chained,
    ],
    ids=lambda f: f.__name__,
)
def test_windows_change_no_bound(body, monkeypatch):
    network = made(body)
    lower, upper = boxes(network)
    with jax.enable_x64(True):
        parts = as_arrays(split(network), jnp.float64)
        regions = regions_of(network, lower, upper, None)
        planner = Planner(parts.layers, regions.shapes, True)
        shapes = [layer.segment.shape(planner.read(layer.segment)) for layer in parts.layers]
        plans = [
            planner.plan(layer.segment, shape)
            for layer, shape in zip(parts.layers, shapes, strict=True)
        ]
        assert any(plan.first.moves and plan.steps for plan in plans)  # the test is about these
        seen = Passes(parts, regions, 64).arguments
        for box in range(2):
            for turn in range(20):
                corner = DRAW.integers(0, 2, lower[box].shape)
                t = corner if turn % 2 else DRAW.random(lower[box].shape)
                point = jnp.asarray((lower[box] + t * (upper - lower)[box])[None])
                for x, (low, high) in zip(arguments_at(parts, point), seen, strict=True):
                    assert np.all(np.asarray(low)[box] <= x)
                    assert np.all(x <= np.asarray(high)[box])
        # One program for all layers, an independent way back, from the same intervals.
        *before, last = parts.layers
        before, shape, rows = tuple(before), shapes[-1], 24
        relaxed = relax(before, last.segment, regions.boxes, seen[:-1])
        entry = DRAW.integers(0, np.prod(shape), rows)
        unit = np.zeros((2, rows, np.prod(shape)))
        unit[:, np.arange(rows), entry] = 1
        units = jnp.asarray(unit.reshape(2, rows, *shape))
        expected = np.asarray(
            backward_bounds(before, last.segment, relaxed, regions.sets, units).bound
        )
        low, high = (np.asarray(x).reshape(2, -1)[:, entry] for x in seen[-1])
        # What intervals show to be linear is left at that.
        refined = (expected < 0) & (high > 0)
        assert refined.sum() > 10
        excess = low - expected
        assert np.all(excess[refined] > -1e-9)
        assert np.any(excess[refined] < 1e-9)  # intervals are better for some
        monkeypatch.setattr(Planner, "plan", without_windows)
        whole = Passes(parts, regions, 64).arguments
        for pair, other in zip(seen, whole, strict=True):
            for mine, theirs in zip(pair, other, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)


_plan = Planner.plan


def without_windows(planner, segment, shape, windows=True):
    return _plan(planner, segment, shape, False)


def test_balls_have_no_windows():
    """A part of a ball is no ball: the inputs stay whole, and bounds hold."""
    network = made(plain, size=9)
    centre = DRAW.normal(size=(1, *network.input_shape))
    found = networks.bound(network, None, None, None, ball=(centre, 0.3), method="backward")
    step = DRAW.normal(size=(200, *network.input_shape))
    step *= 0.3 / np.sqrt(np.sum(step**2, axis=(1, 2, 3), keepdims=True))
    values = np.asarray(network(centre + step))
    assert np.all(found.bound[0] <= values.min(axis=0))
    box = networks.bound(network, centre - 0.3, centre + 0.3, None, method="backward")
    assert np.all(found.bound >= box.bound - 1e-9)
    assert np.any(found.bound > box.bound + 1e-3)


def test_the_search_of_a_network_with_windows_is_that_of_whole_arrays(monkeypatch):
    network = made(residual, size=8)
    lower, upper = boxes(network)
    how = Intermediate("optimised", steps=6)  # more than go all the way to the corner
    seen = networks.bound(network, lower, upper, None, method="backward", intermediate=how)
    monkeypatch.setattr(Planner, "plan", without_windows)
    whole = networks.bound(network, lower, upper, None, method="backward", intermediate=how)
    for pair, other in zip(seen.intermediate, whole.intermediate, strict=True):
        for mine, theirs in zip(pair, other, strict=True):
            # Rounding may decide where a step goes.
            assert np.mean(np.abs(mine - theirs) > 1e-7) < 0.05
    # Better intervals need not make better lines; those of the second layer have the same ones.
    one_pass = networks.bound(network, lower, upper, None, method="backward")
    low, better = (found.intermediate[1][0] for found in (one_pass, seen))
    assert np.all(better >= low - 1e-12)  # with windows, sums are added up in another order
    assert np.any(better > low + 1e-3)
    points = lower[:, None] + DRAW.random((2, 100, *network.input_shape)) * (upper - lower)[:, None]
    for bound, some in zip(seen.bound, points, strict=True):
        assert np.all(bound <= np.asarray(network(some)).min(axis=0))
