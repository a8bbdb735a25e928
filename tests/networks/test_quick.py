"""Quick steps on CPUs: against the network itself, the search, and the general evaluation."""

import zlib
from fractions import Fraction
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import affine, flatten, relu, run

from stagecert import networks
from stagecert.certificate import Proposal
from stagecert.networks import operations as op
from stagecert.networks.bounding import bounds, quick
from stagecert.networks.bounding.chain_checks import checked
from stagecert.networks.bounding.chains import to_first, to_last
from stagecert.networks.bounding.intervals import interval_bounds
from stagecert.networks.bounding.relaxation import Segment, split
from stagecert.networks.bounding.search import checked_in_groups, relax
from stagecert.networks.graph import Builder, Node
from stagecert.pieces import First
from stagecert.problem import as_arrays
from stagecert.reformulation import Point
from stagecert.sets import Box
from stagecert.solution import Status

# Kernels (out, in, height, width), strides and padding of two convolutions each.
SHAPES = {
    "plain": [((4, 2, 3, 3), (1, 1), [(0, 0), (0, 0)]), ((3, 4, 2, 2), (1, 1), [(0, 0), (0, 0)])],
    "strided": [((8, 2, 3, 2), (2, 1), [(1, 1), (0, 1)]), ((3, 8, 4, 4), (2, 2), [(1, 2), (1, 1)])],
    "narrow": [((9, 1, 3, 3), (1, 1), [(1, 1), (1, 1)]), ((3, 9, 3, 3), (2, 3), [(0, 0), (2, 0)])],
}  # fmt: skip


def network_of(name):
    random = np.random.default_rng(3)
    build = Builder()
    h = build.input("image", (1, SHAPES[name][0][0][1], 7, 8), True)
    for shape, strides, padding in SHAPES[name]:
        kernel = 1.5 * random.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
        conv = op.Conv(strides, tuple(padding), (1, 1), (1, 1))
        h = build.add(conv, h, weights=kernel)
        bias = 0.3 * random.normal(size=(1, shape[0], 1, 1))
        h = relu(build, build.add(op.Shift(), h, weights=bias))
    h = flatten(build, h)
    for place, size in enumerate((6, 3)):
        h = relu(build, h) if place else h
        matrix = random.normal(size=(h.shape[1], size)) / np.sqrt(h.shape[1])
        h = affine(build, h, matrix, 0.3 * random.normal(size=size))
    return build.network([h])


def boxes_for(network, count=3, radius=0.1):
    random = np.random.default_rng(7)
    centres = random.normal(size=(count, *network.input_shapes[0][1:]))
    return centres - radius, centres + radius, random.normal(size=(count, 2, 3))


def _prepared(name, dtype=np.float32):
    network = network_of(name)
    low, high, rows = boxes_for(network)
    with jax.enable_x64(True):
        parts = as_arrays(split(network), jnp.float64)
        chains = quick.chains_of(parts, network.input_shapes, dtype)
        boxes = ((jnp.asarray(low[:, None]), jnp.asarray(high[:, None])),)
        arguments = jax.vmap(lambda boxes: interval_bounds(parts, boxes)[0])(boxes)
        relaxed = relax(parts.layers, parts.last, boxes, arguments)
        return parts, chains, relaxed, Box(*boxes[0]), jnp.asarray(rows)


@pytest.mark.parametrize("name", SHAPES)
def test_maps_are_those_of_the_network(name):
    parts, chains, *_ = _prepared(name)
    assert chains is not None
    random = np.random.default_rng(0)
    shapes = [(1, SHAPES[name][0][0][1], 7, 8), *chains.exact.shapes]
    segments = [*(layer.segment for layer in parts.layers), parts.last]
    with jax.enable_x64(True):
        for k, (segment, affine, shape) in enumerate(
            zip(segments, chains.exact.maps, shapes, strict=True)
        ):
            x = jnp.asarray(random.normal(size=(2, *shape)))
            known = (None,) * max(k - 1, 0)

            def plain(x, segment=segment, known=known, k=k):
                return segment(x, ()) if k == 0 else segment(None, (*known, x))

            wanted = jax.vmap(plain)(x)
            to = wanted.shape[1:]
            got = to_first(affine(to_last(x, shape)), to)
            np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)
            y = jnp.asarray(random.normal(size=wanted.shape))
            back = to_first(affine.back(to_last(y, to)), shape)
            linear = jax.vmap(plain)(x) - jax.vmap(plain)(jnp.zeros_like(x))
            np.testing.assert_allclose(jnp.vdot(back, x), jnp.vdot(y, linear), rtol=1e-10)
            constant = affine.constant(to_last(y, to))
            zero = jax.vmap(plain)(jnp.zeros_like(x))
            np.testing.assert_allclose(jnp.sum(constant), jnp.vdot(y, zero), rtol=1e-10)


@pytest.mark.parametrize("name", SHAPES)
def test_evaluated_as_by_the_search(name):
    """Bounds, charges, values and points of random proposals are those of the general way."""
    parts, chains, relaxed, sets, rows = _prepared(name)
    random = np.random.default_rng(1)
    lanes = rows.shape[:2]
    shapes = chains.exact.shapes
    with jax.enable_x64(True):
        at = jnp.asarray(random.normal(size=(*lanes, *sets.lower.shape[1:])))
        # Weights outside of [0, 1] and such that are no numbers must do no harm.
        fractions, weights = (
            [jnp.asarray(random.uniform(a, b, size=(*lanes, *s))) for s in shapes]
            for a, b in ((0, 1), (-0.2, 1.2))
        )
        weights[0] = weights[0].at[0, 0].set(jnp.nan)
        flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
        point = Point(flat(at), tuple(map(flat, fractions)))
        slopes = tuple(((First(flat(w)),), ()) for w in weights)
        proposal = Proposal(None, (slopes, ()), None)  # type: ignore
        (plain,) = checked_in_groups(parts.layers, parts.last, relaxed, sets, rows, point, proposal)
        last = [tuple(map(to_last, xs, shapes)) for xs in (fractions, weights)]
        mine = checked(parts, chains.exact, relaxed, sets, rows, quick.Quick(at, *last))
        np.testing.assert_allclose(mine.value, plain.value, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(mine.bound, plain.bound, rtol=1e-12, atol=1e-11)
        np.testing.assert_array_equal(mine.inputs, plain.inputs)
        assert np.all(np.isfinite(mine.bound))
        # The charge for rounding is not forgotten.
        exact = checked(
            parts, chains.exact, _without_spans(relaxed), sets, rows, quick.Quick(at, *last)
        )
        charge, wanted = exact.bound - mine.bound, 1e-14 * np.abs(mine.value)
        assert np.all(charge > 0)
        assert np.all(charge > 0.1 * wanted)
        # Term by term it is that of the general way, if segments are so large that it can be seen.
        for place in range(len(shapes) + 1):
            wide = _with_spans(relaxed, place, 1e11)
            (plain,) = checked_in_groups(
                parts.layers, parts.last, wide, sets, rows, point, proposal
            )
            mine = checked(parts, chains.exact, wide, sets, rows, quick.Quick(at, *last))
            assert np.all(plain.bound < exact.bound - 1e-4)
            np.testing.assert_allclose(mine.bound, plain.bound, rtol=1e-9)


def _without_spans(relaxed):
    nothing = jax.tree.map(lambda x: 0 * x, (relaxed.spans, relaxed.last_span))
    return type(relaxed)(relaxed.arguments, relaxed.wedges, *nothing)


def _with_spans(relaxed, place, size):
    """With one segment's magnitudes so many times as large."""
    spans = [*relaxed.spans, relaxed.last_span]
    spans[place] = jax.tree.map(lambda x: size * x, spans[place])
    return type(relaxed)(relaxed.arguments, relaxed.wedges, tuple(spans[:-1]), spans[-1])


@pytest.mark.parametrize("name", SHAPES)
def test_agrees_with_the_search(name, monkeypatch):
    network = network_of(name)
    low, high, rows = boxes_for(network)
    options: Any = dict(intermediate="ibp", rtol=1e-3, atol=1e-4)
    mine = networks.bound(network, low, high, rows, **options)
    monkeypatch.setattr(bounds, "chains_of", lambda *_: None)
    plain = networks.bound(network, low, high, rows, **options)
    assert np.all(mine.status == Status.GAP_REACHED)
    assert np.all(mine.bound <= plain.value)
    assert np.all(plain.bound <= mine.value)
    assert np.all(mine.gap <= 1e-4 + 1e-3 * np.abs(mine.bound))
    assert mine.inputs.shape == plain.inputs.shape
    assert np.all((mine.inputs >= low[:, None]) & (mine.inputs <= high[:, None]))
    assert np.all(mine.attained >= mine.bound)


def test_bounds_hold_at_points():
    network = network_of("strided")
    low, high, rows = boxes_for(network, radius=0.5)
    options: Any = dict(intermediate="ibp", max_iterations=3, rtol=0.0, atol=1e-12)
    result = networks.bound(network, low, high, rows, **options)
    assert np.all(result.passes == 7)
    random = np.random.default_rng(2)
    for box in range(len(low)):
        for share in random.uniform(size=(30, *low.shape[1:])).round():
            outputs = run(network, (low[box] + share * (high - low)[box])[None], kind=np.asarray)
            assert np.all(rows[box] @ np.asarray(outputs, float).reshape(-1) >= result.bound[box])


def test_more_steps_are_never_worse():
    network = network_of("plain")
    low, high, rows = boxes_for(network, radius=0.4)
    before = np.full(rows.shape[:2], -np.inf)
    for steps in (1, 2, 5, quick.STEPS, quick.STEPS + 6):
        found = networks.bound(
            network, low, high, rows, intermediate="ibp", rtol=0, atol=1e-12, max_iterations=steps
        )
        assert np.all(found.bound >= before - 1e-5 * np.abs(before))
        before = found.bound


def test_a_threshold_ends_the_steps():
    network = network_of("plain")
    low, high, rows = boxes_for(network)
    found = networks.bound(network, low, high, rows, intermediate="ibp", rtol=0, atol=0.0)
    least = np.asarray(found.bound) - 0.5 * np.abs(found.bound) - 1
    proven = networks.bound(network, low, high, rows, intermediate="ibp", threshold=least)
    assert np.all(proven.status == Status.TARGET_PROVEN)
    assert np.all(proven.passes <= found.passes)


def test_intervals_that_contradict_themselves_are_told():
    network = network_of("plain")
    low, high, rows = boxes_for(network)
    found = networks.bound(network, low, high, rows, method="ibp")
    shifted = tuple((a + 50, b + 50) for a, b in found.intermediate)
    result = networks.bound(
        network, low, high, rows, intermediate=shifted, max_iterations=2, rtol=0, atol=1e-9
    )
    ends = Status.BOUNDS_CROSSED, Status.ITERATION_LIMIT, Status.STALLED
    assert all(status in ends for status in result.status.ravel())


def test_other_networks_are_left_to_the_search():
    for function, example in (
        (lambda x: jax.nn.softplus(x @ np.ones((3, 2))), np.zeros(3)),
        (lambda x: jax.nn.relu(x) + x, np.zeros(3)),
    ):
        network = networks.from_jax(function, example)
        with jax.enable_x64(True):
            parts = as_arrays(split(network), jnp.float64)
            assert quick.chains_of(parts, network.input_shapes, np.float32) is None


# -- against rational arithmetic -------------------------------------------------------------------

# Image, then kernels (out, in, height, width), strides and padding.
SMALL = {
    "uneven": ((2, 4, 3), [((2, 2, 2, 3), (1, 1), ((0, 1), (2, 0)))]),
    "points": (
        (3, 2, 3),
        [((4, 3, 1, 1), (1, 1), ((0, 0), (0, 0))), ((1, 4, 2, 1), (2, 3), ((1, 1), (0, 1)))],
    ),
    "strided": (
        (1, 5, 4),
        [((2, 1, 3, 2), (2, 3), ((1, 0), (2, 1))), ((2, 2, 1, 2), (1, 1), ((0, 0), (1, 1)))],
    ),
    "dense": ((5,), []),
}  # fmt: skip


def _sizes(random, shape):
    """Numbers of one size, or of very different ones, some of them zero."""
    x = random.normal(size=shape)
    kind = random.integers(4)
    if kind == 0:
        x = x * 10.0 ** random.integers(-9, 6, size=shape)
    if kind == 1:
        x = np.where(random.random(shape) < 0.5, 0, np.round(4 * x) / 4)
    return x * 10.0 ** random.integers(-150, 40) if kind == 2 else x


def _small_network(name, random):
    shape, convolutions = SMALL[name]
    build = Builder()
    h = build.input("x", (1, *shape), True)
    for kernel, strides, padding in convolutions:
        conv = op.Conv(strides, padding, (1, 1), (1, 1))
        h = build.add(conv, h, weights=_sizes(random, kernel))
        h = build.add(op.Shift(), h, weights=_sizes(random, (1, kernel[0], 1, 1)))
        h = relu(build, h)
    h = flatten(build, h) if convolutions else h
    for place, size in enumerate((4, 2)):
        h = relu(build, h) if place else h
        h = affine(build, h, _sizes(random, (h.shape[1], size)), _sizes(random, size))
    return build.network([h])


@eqx.filter_jit
def _relaxed_by_intervals(parts, boxes):
    arguments = jax.vmap(lambda boxes: interval_bounds(parts, boxes)[0])(boxes)
    return relax(parts.layers, parts.last, boxes, arguments)


@eqx.filter_jit
def _matrices(parts, shapes):
    """Each segment as (matrix, constant): products with one and sums with zeros round nothing."""
    found = []
    for k, segment in enumerate((*(layer.segment for layer in parts.layers), parts.last)):
        known = (None,) * max(k - 1, 0)
        unshifted = [
            Node(n.operation, n.arguments, 0 * n.weights, n.shape)
            if isinstance(n.operation, op.Shift)
            else n
            for n in segment.nodes
        ]
        linear = Segment(tuple(unshifted), segment.sources, segment.output)

        def of(segment, x, known=known, k=k):
            return (segment(x, ()) if k == 0 else segment(None, (*known, x))).reshape(-1)

        size = int(np.prod(shapes[k]))
        units = jnp.eye(size).reshape(size, *shapes[k])
        columns = jax.vmap(lambda x, linear=linear, of=of: of(linear, x))(units)
        found.append((columns, of(segment, jnp.zeros(shapes[k]))))
    return found


@jax.jit
def _sides_and_lines(wedge, weights):
    return jax.vmap(lambda w: wedge.lines(((First(w),), ())), in_axes=1)(weights)


def _fractions(x):
    return np.vectorize(lambda v: Fraction(float(v)), otypes=[object])(np.asarray(x))


def _exact_bound(matrices, lines, low, high, row):
    """The bound that these lines prove, in rational arithmetic, and the size of its terms."""
    total, size, y = Fraction(0), Fraction(0), row
    for (matrix, constant), line in zip(matrices[::-1], [*lines[::-1], None], strict=True):
        total += y @ constant
        size += np.abs(y) @ np.abs(constant)
        g = matrix @ y
        if line is None:
            ends = np.where(g > 0, low, high)
            return total + g @ ends, size + np.abs(g) @ np.abs(ends)
        under, slope, offset = line
        down = np.where(g < 0, g, 0 * g)
        total += down @ offset
        size -= down @ offset
        y = np.where(g > 0, g * under, down * slope)
    raise AssertionError


@pytest.mark.parametrize("name", SMALL)
def test_never_above_what_the_lines_prove_exactly(name):
    """The evaluation in float64 against the same dual bound without any rounding."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    close = 0
    for _ in range(12):
        network = _small_network(name, random)
        shape = network.input_shapes[0]
        middle = _sizes(random, (3, *shape))
        wide = np.abs(_sizes(random, (3, *shape))) * 10.0 ** random.integers(-8, 2)
        low, high = middle - wide, middle + wide
        rows = _sizes(random, (3, 2, 2))
        with jax.enable_x64(True):
            parts = as_arrays(split(network), jnp.float64)
            chains = quick.chains_of(parts, network.input_shapes, np.float32)
            assert chains is not None
            shapes = chains.exact.shapes
            boxes = ((jnp.asarray(low), jnp.asarray(high)),)
            relaxed = _relaxed_by_intervals(parts, boxes)
            weights = [
                jnp.asarray(random.uniform(-0.1, 1.1, (3, 2, *s)).astype(np.float32))
                for s in shapes
            ]
            halves = [jnp.full(w.shape, 0.5) for w in weights]
            at = jnp.asarray(np.broadcast_to(middle[:, None], (3, 2, *shape)))
            to = lambda xs, s=shapes: tuple(map(to_last, xs, s))  # noqa: E731
            found = quick.Quick(at, to(halves), to(weights))
            check = checked(parts, chains.exact, relaxed, Box(*boxes[0]), jnp.asarray(rows), found)
            bounds_found = np.asarray(check.bound)
            matrices = _matrices(parts, (shape, *shapes))
            lines = [
                _sides_and_lines(wedge, jnp.asarray(w, jnp.float64))
                for wedge, w in zip(relaxed.wedges, weights, strict=True)
            ]
        matrices = [tuple(map(_fractions, pair)) for pair in matrices]
        assert not np.any(np.isnan(bounds_found))
        for box, target in np.ndindex(3, 2):
            of_lane = [
                tuple(_fractions(x[target, box]).reshape(-1) for x in (under, slope, offset))
                for under, _, slope, offset in lines
            ]
            least, most = (_fractions(x[box]).reshape(-1) for x in (low, high))
            wanted = _fractions(rows[box, target])
            exact, size = _exact_bound(matrices, of_lane, least, most, wanted)
            found = Fraction(float(bounds_found[box, target]))
            assert found <= exact
            close += found >= exact - Fraction(1, 10**10) * size - Fraction(1, 10**200)
    # A charge that is far too large would hide what is wrong.
    assert close > 24


def test_a_shift_that_repeats_values_is_left_to_the_search():
    build = Builder()
    h = relu(build, affine(build, build.input("x", (1, 3), True), np.eye(3), np.zeros(3)))
    h = build.add(op.MatMul(), h, weights=np.eye(3))
    h = build.add(op.Shift(), build.add(op.Reshape((3,)), h), weights=np.arange(3.0)[:, None])
    network = build.network([build.add(op.Reshape((1, 9)), h)])
    found = networks.bound(network, -np.ones((1, 3)), np.ones((1, 3)))
    np.testing.assert_allclose(found.bound[0], np.repeat(np.arange(3.0), 3), atol=1e-5)
