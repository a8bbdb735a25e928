"""No point of the network is ever below a bound: random networks, hostile boxes, exact arithmetic.

Bounds claim to hold in real arithmetic, so nothing is allowed for rounding: the lowest points that
sampling and a few gradient steps find are evaluated anew with fractions, or in extended precision
where a function is not rational. Weights are arrays: one architecture is compiled once and then
runs with many weights.
"""

import decimal
import functools
import itertools
import math
import zlib
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from stagecert import networks
from stagecert.networks import operations as op
from stagecert.networks.graph import Builder

# -- architectures ---------------------------------------------------------------------------------


def normal(random, *shape):
    """Numbers of very different sizes, some of them zero, some on a coarse grid."""
    x = random.normal(size=shape)
    kind = random.integers(5)
    if kind == 0:
        x = np.round(x * 4) / 4
    if kind == 1:
        x = x * 10.0 ** random.integers(-6, 4, size=shape)
    if kind == 2:
        x = np.where(random.random(shape) < 0.5, 0, x)
    if kind == 3:
        x = x.astype(np.float32).astype(float)
    return x


def layer(build, random, x, size):
    """A dense layer."""
    n = x.shape[-1]
    matrix = normal(random, n, size) / math.sqrt(n)
    return models.affine(build, x, matrix, normal(random, size))


def act(build, x, kind, weights=None, **settings):
    """An activation."""
    return build.add(op.Activation(kind, tuple(settings.items())), x, weights=weights)


def dense(random, sizes=(3, 6, 5, 4, 2), kind="relu"):
    build = Builder()
    h = build.input("x", sizes[:1], False)
    for size in sizes[1:-1]:
        h = act(build, layer(build, random, h, size), kind)
    return build.network([layer(build, random, h, sizes[-1])])


RATIONAL = [
    ("relu", {}),
    ("leaky_relu", {}),
    ("leaky_relu", {"alpha": 1.5}),
    ("leaky_relu", {"alpha": -0.5}),
    ("prelu", {}),
    ("abs", {}),
    ("clip", {"low": -0.5, "high": 0.75}),
    ("clip", {"low": 0.1, "high": 1e9}),
    ("hard_sigmoid", {}),
    ("hard_sigmoid", {"alpha": -0.3, "beta": 0.4}),
    ("hard_swish", {}),
    ("square", {}),
]
SMOOTH = [
    ("elu", {}),
    ("elu", {"alpha": 2.0}),
    ("elu", {"alpha": -0.7}),
    ("selu", {}),
    ("celu", {"alpha": 0.5}),
    ("celu", {"alpha": 2.0}),
    ("softplus", {}),
    ("exp", {}),
    ("sigmoid", {}),
    ("tanh", {}),
    ("softsign", {}),
    ("gelu", {}),
    ("gelu_tanh", {}),
    ("silu", {}),
    ("mish", {}),
]


def side_by_side(random, kinds, inputs=3, outputs=2, shrink=1.0, depth=1):
    """Every activation on an entry of its own, once or several times over."""
    build = Builder()
    h = build.input("x", (inputs,), False)
    for _ in range(depth):
        matrix = shrink * normal(random, h.shape[0], len(kinds)) / math.sqrt(h.shape[0])
        h = models.affine(build, h, matrix, normal(random, len(kinds)))
        parts = []
        for k, (kind, settings) in enumerate(kinds):
            part = build.add(op.Slice((k,), (k + 1,), (1,)), h)
            weights = normal(random, 1) if kind == "prelu" else None
            parts.append(act(build, part, kind, weights, **settings))
        h = build.add(op.Concat(0), *parts)
    h = act(build, layer(build, random, h, 3), "relu")
    return build.network([layer(build, random, h, outputs)])


def image(random):
    """Convolutions of all kinds, sums over windows, padding, maxima."""
    build = Builder()
    x = build.input("image", (1, 2, 5, 4), True)
    conv = op.Conv((2, 1), ((1, 0), (0, 2)), (1, 2), (1, 1))
    h = build.add(conv, x, weights=normal(random, 4, 2, 2, 2))
    h = act(build, build.add(op.Shift(), h, weights=normal(random, 1, 4, 1, 1)), "relu")
    grouped = op.Conv((1, 1), ((1, 1), (0, 0)), (1, 1), (1, 1), groups=2)
    side = build.add(grouped, h, weights=normal(random, 4, 2, 3, 1))
    h = build.add(op.Sum((1, -1)), h, side)
    h = build.add(
        op.WindowSum((1, 1, 2, 2), (1, 1, 1, 2), (1,) * 4, ((0, 0),) * 2 + ((1, 0),) * 2), h
    )
    h = act(build, h, "leaky_relu", alpha=0.1)
    wide = op.Conv((1, 1), ((1, 1), (1, 1)), (1, 1), (2, 2))  # a transposed convolution
    h = build.add(wide, h, weights=normal(random, 2, 4, 2, 2))
    h = build.add(op.Pad(((0, 0), (0, 0), (-1, 1), (1, -1))), h)
    h = models.max_pool(build, h)
    h = build.add(op.Reduce((2,), True), h)
    return build.network([layer(build, random, models.flatten(build, h), 2)])


def shapes(random):
    """Two inputs, three outputs, and every operation that moves, repeats and adds entries."""
    build = Builder()
    x, y = build.input("x", (2, 3), False), build.input("y", (3,), False)
    left = build.add(op.MatMul(left=True), x, weights=normal(random, 4, 2))
    sum_ = build.add(op.Sum((1, -1, 1)), left, y, y)
    h = act(build, build.add(op.Scale(), sum_, weights=normal(random, 4, 1)), "relu")
    taken = build.add(op.Take(1), h, weights=np.array([[0, 2], [2, 2]], np.int32))
    mixed = build.add(op.Transpose((2, 0, 1)), taken)
    moved = build.add(op.Slice((0, 1, 0), (2, 4, 2), (1, 2, 1)), mixed)
    many = build.add(op.Concat(1), moved, moved, moved)
    small = build.add(op.Reduce((0, 2), False), many)
    spread = build.add(op.Broadcast((4, 6)), small)
    shifted = build.add(
        op.Shift(), build.add(op.Reduce((0,), True), y), weights=normal(random, 4, 6)
    )
    both = build.add(op.Sum((-1, 1)), spread, shifted)
    second = build.add(op.Max(), both)
    back = build.add(op.Take(), second, weights=np.array([3, 0, 0, 1], np.int32))
    third = act(build, build.add(op.Sum((1, -1)), back, second), "clip", low=-1.0, high=2.0)
    return build.network([layer(build, random, third, 2), y, second])


def residual(random):
    build = Builder()
    h = build.input("x", (4,), False)
    for _ in range(2):
        branch = layer(build, random, act(build, layer(build, random, h, 5), "relu"), 4)
        h = act(build, build.add(op.Sum((1, -1)), h, branch), "abs")
    return build.network([layer(build, random, h, 2)])


def wide_maximum(random):
    """Maxima of more entries than there are levels, and of one."""
    build = Builder()
    x = build.input("x", (3,), False)
    h = build.add(op.Reshape((2, 20)), layer(build, random, x, 40))
    h = build.add(op.Max(), h)
    h = build.add(op.Max(), build.add(op.Reshape((3, 1)), layer(build, random, h, 3)))
    return build.network([layer(build, random, h, 2)])


def bare(random):
    """Activations on the input itself, and the input as an output."""
    build = Builder()
    x = build.input("x", (3,), False)
    h = act(build, act(build, x, "relu"), "square")
    return build.network([build.add(op.Scale(), h, weights=normal(random, 3)), x])


def straight(random):
    """No activation at all."""
    build = Builder()
    h = build.input("x", (3,), False)
    for size in (8, 4, 2):
        h = layer(build, random, h, size)
    return build.network([h])


ARCHITECTURES = {
    "dense": dense,
    "small": functools.partial(dense, sizes=(2, 4, 3, 1)),
    "thin": functools.partial(dense, sizes=(1, 1, 1, 1, 1)),
    "rational": functools.partial(side_by_side, kinds=RATIONAL),
    "smooth": functools.partial(side_by_side, kinds=SMOOTH, shrink=0.3),
    "image": image,
    "shapes": shapes,
    "residual": residual,
    "wide maximum": wide_maximum,
    "bare": bare,
    "straight": straight,
    "rational twice": functools.partial(side_by_side, kinds=RATIONAL, depth=2),
    "smooth twice": functools.partial(side_by_side, kinds=SMOOTH, shrink=0.3, depth=2),
}
EXTENDED = {"smooth", "smooth twice"}  # not rational
SLOW = {"rational twice", "smooth twice"}


# -- regions ---------------------------------------------------------------------------------------

WIDTHS = (0.0, 1e-12, 1e-6, 1e-2, 0.3, 1.0, 10.0, 1e6)


def boxes(random, network) -> tuple[Any, Any]:
    """A box of every width, one-sided ones and ones on the float32 grid; a tuple per input."""
    lows, highs = [], []
    for shape in network.input_shapes:
        centre = normal(random, len(WIDTHS), *shape)
        width = np.reshape(WIDTHS, (-1,) + (1,) * len(shape)) * random.random(centre.shape)
        side = random.integers(4)
        low = centre - (0 if side == 1 else width)
        high = centre + (0 if side == 2 else width)
        if side == 3:
            low, high = (x.astype(np.float32).astype(float) for x in (low, high))
            low, high = np.minimum(low, high), np.maximum(low, high)
        lows.append(low)
        highs.append(high)
    return tuple(lows), tuple(highs)


# -- looking for low points ------------------------------------------------------------------------

SAMPLES = 64


@jax.jit
def _values(network, rows, *points):
    """(boxes, targets, samples) objectives."""
    outputs = jax.vmap(jax.vmap(network.flat_outputs))(*points)
    return jnp.einsum("bto,bso->bts", rows, outputs)


@jax.jit
def _slopes(network, rows, *points):
    """Gradients of every objective at its own point: (boxes, targets, *shape) for each input."""

    def one(row, *point):
        return row @ network.flat_outputs(*point)

    count = len(points)
    return jax.vmap(jax.vmap(jax.grad(one, tuple(range(1, count + 1)))))(rows, *points)


def lowest(random, network, rows, low, high, inside):
    """The lowest point found for each (box, target): one (boxes, targets, *shape) per input."""
    points = []
    for l, u in zip(low, high, strict=True):
        t = random.random((len(l), SAMPLES, *l.shape[1:]))
        t[:, SAMPLES // 2 :] = np.round(t[:, SAMPLES // 2 :])
        points.append(np.clip(l[:, None] + t * (u - l)[:, None], l[:, None], u[:, None]))
    points = [inside(x) for x in points]
    values = np.asarray(_values(network, rows, *points))
    best = np.nanargmin(np.where(np.isnan(values), np.inf, values), axis=-1)
    found = [np.take_along_axis(x, _like(best, x), axis=1) for x in points]
    value = np.take_along_axis(values, best[..., None], axis=-1)[..., 0]
    for step in (1.0, 1.0, 0.3, 0.1, 0.03):
        slopes = _slopes(network, rows, *found)
        moved = []
        for x, g, l, u in zip(found, slopes, low, high, strict=True):
            x = x - step * np.sign(np.nan_to_num(np.asarray(g))) * (u - l)[:, None]
            moved.append(inside(np.clip(x, l[:, None], u[:, None])))
        new = np.stack([np.asarray(_at(network, rows, *moved))])[0]
        better = new < value
        value = np.where(better, new, value)
        found = [np.where(_like(better, x), y, x) for x, y in zip(found, moved, strict=True)]
    return found


@jax.jit
def _at(network, rows, *points):
    outputs = jax.vmap(jax.vmap(network.flat_outputs))(*points)
    return jnp.sum(rows * outputs, axis=-1)


def _like(x, array):
    return x.reshape(*x.shape, *(1,) * (array.ndim - x.ndim))


def truths(network, rows, found, kind):
    """The objectives at the points found, (boxes, targets), as numbers of a kind."""
    values = np.empty(rows.shape[:2], object)
    for b, t in np.ndindex(values.shape):
        points = [x[b, t].reshape(s) for x, s in zip(found, network.input_shapes, strict=True)]
        outputs = models.run(network, *points, kind=kind)
        with decimal.localcontext(models.DIGITS), np.errstate(invalid="ignore"):
            values[b, t] = np.sum(kind(rows[b, t]) * outputs)
    return values


def assert_below(result, values, kind, slack: Any = 0):
    """No bound is above a value of the network, in exact arithmetic; and bounds are numbers."""
    assert not np.any(np.isnan(result.bound))
    assert not np.any(np.isnan(result.value))
    # Beyond this, exp and square overflow.
    finite = np.ones(len(result.bound), bool)
    for ends in itertools.chain.from_iterable(result.intermediate):
        finite &= np.max(np.abs(ends), axis=tuple(range(1, ends.ndim))) <= 300
    assert np.all(np.isfinite(result.bound[finite])), "an infinite bound from moderate intervals"
    for at in np.ndindex(values.shape):
        bound, value = result.bound[at], values[at]
        if np.isfinite(bound) and (kind is not models.extended or np.isfinite(value)):
            bound = kind(bound).item() if kind is not models.extended else np.longdouble(bound)
            assert bound <= value + slack * abs(value), (at, float(bound), float(bound - value))


# -- tests -----------------------------------------------------------------------------------------


def with_numbers(network):
    """The network with JAX arrays, so that the functions above compile once."""
    return jax.tree.map(jnp.asarray, network)


def attack(name, seed, settings, ball=None):
    """One network, a batch of regions, all the settings (method, intermediate)."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    network = ARCHITECTURES[name](random)
    low, high = boxes(random, network)
    rows = np.stack([normal(random, 2, network.output_size) for _ in WIDTHS])
    inside, options = (lambda x: x), dict[str, Any]()
    given: Any = (low, high) if len(low) > 1 else (low[0], high[0])
    shown = [x.reshape(len(x), *s) for x, s in zip(low, _shown(network), strict=True)]
    if ball is not None:
        centre = np.clip(0.5 * low[0] + 0.5 * high[0], low[0], high[0])
        radius = 0.7 * np.max(high[0] - low[0], axis=tuple(range(1, low[0].ndim))) + 1e-9
        options["ball"] = (centre.reshape(shown[0].shape), radius)
        if ball == "ball":
            given = (None, None)
        wide = radius.reshape(-1, *(1,) * (low[0].ndim - 1))
        if ball == "ball":
            low, high = (centre - wide,), (centre + wide,)
        inside = functools.partial(into_ball, centre, radius)
    if given[0] is not None and len(low) == 1:
        given = tuple(x.reshape(shown[0].shape) for x in given)
    found = lowest(random, with_numbers(network), rows, low, high, inside)
    kind = models.extended if name in EXTENDED else models.decimals
    values = truths(network, rows, found, kind)
    # In extended precision sums are off by a little; the others are as good as exact.
    slack = 256 * np.finfo(np.longdouble).eps if name in EXTENDED else 0
    results = []
    for method, intermediate in settings:
        result = networks.bound(
            network,
            given[0],
            given[1],
            rows,
            method=method,
            intermediate=intermediate,
            max_iterations=20,
            **options,
        )
        try:
            assert_below(result, values, kind, slack)
            if method == "nonconvex":
                assert np.all(result.value >= result.bound)
        except AssertionError as error:
            raise AssertionError(
                f"{name}, seed {seed}, {method}, {intermediate}, {ball}"
            ) from error
        results.append(result)
    return results


def _shown(network):
    shown = network.input_shape
    return shown if len(network.input_shapes) > 1 else (shown,)


def into_ball(centre, radius, x):
    """Points (boxes, any, *shape) moved into the balls, in floats: a little inside."""
    move = x - centre[:, None]
    size = np.sqrt(np.sum(move**2, axis=tuple(range(2, x.ndim)), keepdims=True))
    most = radius.reshape(-1, *(1,) * (x.ndim - 1)) * (1 - 1e-9)
    return centre[:, None] + move * np.minimum(1, most / np.maximum(size, 1e-300))


CHEAP = [(m, i) for m in ("ibp", "backward") for i in ("ibp", "backward")]
INTERVALS = [("ibp", "ibp"), ("backward", "ibp")]
ALL = [*CHEAP, *(("nonconvex", i) for i in ("ibp", "backward", "optimised"))]
# Every layer's intermediate bounds are a compilation of their own: where there are many layers, or
# where the search takes long to compile, less is run.
SETTINGS = {"small": ALL} | dict.fromkeys(
    ("rational", "smooth", "rational twice", "smooth twice"), INTERVALS
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in ARCHITECTURES]
)
def test_bounds_are_sound(name):
    @hypothesis.settings(max_examples=20, phases=[hypothesis.Phase.generate])
    @hypothesis.given(seed=st.integers(0, 2**32 - 1))
    def holds(seed):
        attack(name, seed, SETTINGS.get(name, CHEAP))

    holds()


@pytest.mark.parametrize("ball", ["ball", "both"])
def test_balls_are_sound(ball):
    for seed in range(30):
        attack("thin" if seed % 2 else "residual", seed, INTERVALS, ball)


# -- rounding, underflow, overflow -----------------------------------------------------------------


def assert_exactly_below(network, low, high, point, row=(1.0,), methods=("ibp", "backward")):
    """No bound on a box exceeds the exact value at one of its points."""
    rows = np.asarray(row)[None]
    truth = np.sum(models.exactly(rows[0]) * models.run(network, point, kind=models.exactly))
    for method in methods:
        bound = networks.bound(network, low[None], high[None], rows, method=method).bound[0, 0]
        assert Fraction(float(bound)) <= truth, (method, bound, float(Fraction(bound) - truth))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_values_that_one_node_reads_many_times(sign, reverse):
    """Each of the small weights is lost when it is added to the large one."""
    count = 500
    weights = np.full((count, 1), 0.45 * 2.0**-52)
    weights[-1 if reverse else 0] = 1
    for join in (op.Concat(0), op.Sum((1,) * count)):
        build = Builder()
        x = build.input("x", (1,), False)
        h = build.add(join, *[x] * count)
        if isinstance(join, op.Concat):
            h = build.add(op.MatMul(), h, weights=weights)
        one = np.ones(1)
        assert_exactly_below(build.network([h]), one, one, one, (sign,))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_constants_and_shifts_of_many_terms(sign):
    count = 4096
    small = np.full(count, 0.45 * 2.0**-52)
    small[::64] = 1
    build = Builder()
    x = build.input("x", (count,), False)
    h = build.add(op.Shift(), x, weights=small)
    zero = np.zeros(count)
    net = build.network([build.add(op.MatMul(), h, weights=np.ones((count, 1)))])
    assert_exactly_below(net, zero, zero, zero, (sign,))
    build = Builder()
    h = build.add(op.Shift(), build.input("x", (1,), False), weights=np.zeros(count))
    net = build.network([build.add(op.MatMul(), h, weights=small[:, None])])
    assert_exactly_below(net, np.ones(1), np.ones(1), np.ones(1), (sign,))


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_underflow_is_accounted_for(size):
    """The product of the weights is zero in floating point, but not in truth."""
    build = Builder()
    h = build.input("x", (1,), False)
    for _ in range(2):
        h = build.add(op.MatMul(), h, weights=np.full((1, 1), 1e-200))
    box = np.full(1, size)
    assert_exactly_below(build.network([h]), -box, box, -box)
    build = Builder()
    h = build.add(op.MatMul(), build.input("x", (1,), False), weights=np.full((1, 1), 1e-200))
    h = act(build, h, "leaky_relu", alpha=1e-160)
    assert_exactly_below(build.network([h]), -box, box, -box)


@pytest.mark.parametrize("high", [5e-324, 1e-310, 2e-308])
def test_given_intervals_that_end_below_normal_numbers(high):
    """Processors take such an end for zero, and the neuron for one that is never active."""
    build = Builder()
    h = build.add(op.MatMul(), build.input("x", (1,), False), weights=np.ones((1, 1)))
    h = build.add(op.MatMul(), act(build, h, "relu"), weights=np.full((1, 1), -1e300))
    net = build.network([h])
    given = ((np.full((1, 1), -1.0), np.full((1, 1), high)),)
    for method in ("backward", "nonconvex"):
        found = networks.bound(net, [[-1.0]], [[high]], method=method, intermediate=given)
        assert Fraction(float(found.bound[0, 0])) <= -Fraction(1e300) * Fraction(high)


def test_overflow_never_makes_a_number_that_is_none():
    build = Builder()
    x = build.input("x", (1,), False)
    h = act(build, act(build, act(build, x, "exp"), "exp"), "relu")
    net = build.network([h, x])
    for method in ("ibp", "backward", "nonconvex"):
        result = networks.bound(net, [[-1.0]], [[10.0]], method=method)
        assert not np.any(np.isnan(result.bound))
        assert result.bound[0, 0] == -np.inf
        assert not any(np.any(np.isnan(x)) for pair in result.intermediate for x in pair)
