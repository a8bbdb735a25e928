"""What accelerators do first: checked here on the CPU, against the search and against the truth."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.networks.bounding import accelerated, bounds
from stagecert.networks.bounding.held import Held
from stagecert.networks.operations import Conv
from stagecert.networks.operations import _own_conv as own_conv
from stagecert.solution import Status

RANDOM = np.random.default_rng(5)
WEIGHTS = [RANDOM.normal(size=shape) / np.sqrt(shape[0]) for shape in ((4, 6), (6, 5), (5, 3))]


def _network(activation):
    def function(x):
        for w in WEIGHTS[:-1]:
            x = activation(x @ w)
        return x @ WEIGHTS[-1]

    return networks.from_jax(function, np.zeros(4))


NETS = {"relu": _network(jax.nn.relu), "softplus": _network(jax.nn.softplus)}
CENTRES = RANDOM.normal(size=(11, 4))
LOW, HIGH = CENTRES - 0.6, CENTRES + 0.6
ROWS = RANDOM.normal(size=(11, 2, 3))


@pytest.fixture
def opening(monkeypatch):
    """Searches begin with the first steps, as on accelerators."""
    monkeypatch.setattr(bounds, "opens", lambda: True)


def _both(name, monkeypatch, **options):
    plain = networks.bound(NETS[name], LOW, HIGH, ROWS, **options)
    monkeypatch.setattr(bounds, "opens", lambda: True)
    return plain, networks.bound(NETS[name], LOW, HIGH, ROWS, **options)


@pytest.mark.parametrize(
    ("name", "rtol"),
    [
        ("relu", 1e-1),
        ("softplus", 1e-1),
        pytest.param("relu", 1e-3, marks=pytest.mark.slow),
        pytest.param("softplus", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_agrees_with_the_search(name, rtol, monkeypatch):
    options = dict(intermediate="ibp", rtol=rtol)
    plain, opened = _both(name, monkeypatch, **options)
    # Both have intervals that contain the relaxation's optimum.
    assert np.all(opened.bound <= plain.value)
    assert np.all(plain.bound <= opened.value)
    assert np.all(opened.gap <= 1e-6 + rtol * np.abs(opened.bound))
    assert np.all(opened.status == Status.GAP_REACHED)
    for mine, theirs in zip(opened.intermediate, plain.intermediate, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert opened.inputs.shape == plain.inputs.shape
    assert opened.inputs.dtype == np.float64
    assert np.all((opened.inputs >= LOW[:, None]) & (opened.inputs <= HIGH[:, None]))
    assert np.all(opened.attained >= opened.bound)


def test_values_belong_to_inputs(opening):
    """With exact intervals of zero width, the relaxation is the network."""
    points = np.zeros_like(LOW) + CENTRES
    result = networks.bound(NETS["relu"], points, points, ROWS)
    np.testing.assert_allclose(result.inputs, np.repeat(points[:, None], 2, axis=1))
    np.testing.assert_allclose(result.attained, result.value, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_slices_change_nothing(opening):
    options: dict[str, Any] = dict(intermediate="ibp", rtol=1e-2)
    whole = networks.bound(NETS["relu"], LOW, HIGH, ROWS, **options)
    parts = networks.bound(NETS["relu"], LOW, HIGH, ROWS, memory=3e-5, **options)
    assert np.all(parts.bound <= whole.value)
    assert np.all(whole.bound <= parts.value)
    for mine, theirs in zip(parts.intermediate, whole.intermediate, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)
    # The inputs are those of the right problem.
    assert np.all((parts.inputs >= LOW[:, None]) & (parts.inputs <= HIGH[:, None]))


def test_slices_are_of_one_size_and_cover_all():
    for count in range(1, 30):
        for at_once in range(1, 12):
            slices = accelerated._equal_slices(count, at_once)
            assert len({some.stop - some.start for some, _ in slices}) == 1
            assert slices[0][0].stop - slices[0][0].start <= at_once
            fresh = [k for some, new in slices for k in range(some.start + new, some.stop)]
            assert fresh == list(range(count))


@pytest.mark.parametrize(("name", "rtol"), [("relu", 1e-1), ("softplus", 1e-3)])
def test_what_is_open_gets_more_steps(name, rtol, opening, monkeypatch):
    calls = []
    before = accelerated._more_steps

    def counted(job, boxes, targets, size, held):
        calls.append((boxes, targets, size))
        return before(job, boxes, targets, size, held)

    monkeypatch.setattr(accelerated, "_more_steps", counted)
    monkeypatch.setattr(accelerated.opening, "steps_of", lambda _: 1)
    result = networks.bound(NETS[name], LOW, HIGH, ROWS, intermediate="ibp", rtol=rtol)
    ((boxes, targets, size),) = calls
    assert size == len(LOW)
    one, more = accelerated.opening.passes(1), accelerated.opening.passes(accelerated.opening.MORE)
    taken = np.full(result.passes.shape, one)
    taken[boxes, targets] += more
    assert np.all(result.passes >= taken)
    assert np.all(result.passes[taken == one] == one)
    assert np.all(result.gap <= 1e-6 + rtol * np.abs(result.bound))
    assert result.inputs.shape == (11, 2, 4)
    assert np.all((result.inputs >= LOW[:, None]) & (result.inputs <= HIGH[:, None]))
    assert np.all(result.attained >= result.bound)
    # More steps are a matter of effort, not of what can be proven.
    exact = networks.bound(NETS[name], LOW, HIGH, ROWS, intermediate="ibp", rtol=1e-2)
    assert np.all(result.bound <= exact.value)
    assert np.all(exact.bound <= result.value)


def test_thresholds(opening):
    exact = networks.bound(NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp")
    below = exact.bound - 0.1 * np.abs(exact.bound) - 0.1
    above = exact.value + 0.1 * np.abs(exact.value) + 0.1
    proven = networks.bound(NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp", threshold=below)
    assert np.all(proven.status == Status.TARGET_PROVEN)
    assert np.all(proven.bound > below)
    met = networks.bound(NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp", threshold=above)
    assert np.all(met.status == Status.TARGET_MET)
    assert np.all(met.value <= above)


def test_limits_leave_valid_bounds(opening):
    exact = networks.bound(NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp")
    limits: list[tuple[dict[str, Any], Status]] = [
        (dict(max_iterations=1), Status.ITERATION_LIMIT),
        (dict(max_iterations=4), Status.ITERATION_LIMIT),
        (dict(time_limit=1e-9), Status.TIME_LIMIT),
    ]
    for limit, expected in limits:
        result = networks.bound(
            NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp", rtol=0.0, atol=0.0, **limit
        )
        assert np.all(result.bound <= exact.value)
        assert np.all(result.value >= exact.bound)
        assert expected in set(result.status.ravel())


def test_useless_intervals(opening):
    endless = tuple((np.full((11, n), -np.inf), np.full((11, n), np.inf)) for n in (6, 5))
    result = networks.bound(NETS["relu"], LOW, HIGH, ROWS, intermediate=endless)
    assert not np.any(np.isnan(result.bound))
    assert not np.any(result.status == Status.GAP_REACHED)


@pytest.mark.slow
def test_values_that_are_not_finite_are_none(opening):
    def overflowing(x):
        for _ in range(9):
            x = 1e36 * jax.nn.relu(x)
        return -x

    with np.errstate(over="ignore"):
        net = networks.from_jax(overflowing, np.zeros(1))
        result = networks.bound(net, [[0.1]], [[1.0]], intermediate="ibp", threshold=-5.0)
    assert result.value[0, 0] == np.inf
    assert result.status[0, 0] not in (Status.TARGET_MET, Status.GAP_REACHED)


def test_bad_options_are_refused_before_any_work(opening, monkeypatch):
    monkeypatch.setattr(bounds, "opened", None)
    every: list[dict[str, Any]] = [
        dict(rtol=-0.1, atol=10.0),
        dict(rtol=np.nan),
        dict(time_limit=-1.0),
        dict(max_iterations=-1),
        dict(intermediate=tuple((np.zeros((12, n)), np.ones((12, n))) for n in (6, 5))),
    ]
    for bad in every:
        with pytest.raises(ProblemError):
            networks.bound(NETS["relu"], LOW, HIGH, ROWS, **bad)


def test_nothing_to_open(opening):
    """No steps are allowed, or there is nothing to search over."""
    result = networks.bound(
        NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp", rtol=0.0, atol=0.0, max_iterations=0
    )
    assert Status.ITERATION_LIMIT in set(result.status.ravel())
    affine = networks.from_jax(lambda x: x @ WEIGHTS[0], np.zeros(4))
    result = networks.bound(affine, LOW, HIGH, atol=0.0, rtol=0.0)
    least = np.minimum(WEIGHTS[0], 0).T @ HIGH.T + np.maximum(WEIGHTS[0], 0).T @ LOW.T
    np.testing.assert_allclose(result.bound, least.T, rtol=1e-9)


def test_crossed_bounds_are_said_without_time(opening):
    near = CENTRES - 0.2, CENTRES + 0.2
    narrow = networks.bound(NETS["softplus"], *near, ROWS, intermediate="ibp")
    result = networks.bound(
        NETS["softplus"], LOW, HIGH, ROWS, intermediate=narrow.intermediate, time_limit=1e-9
    )
    assert Status.BOUNDS_CROSSED in set(result.status.ravel())


def test_pickles_keep_double_precision(opening):
    result = networks.bound(NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp")
    written = pickle.dumps(result)
    with jax.enable_x64(False):
        again = pickle.loads(written)
        np.testing.assert_array_equal(again.inputs, result.inputs)
        assert again.inputs.dtype == np.float64
        for mine, theirs in zip(again.intermediate, result.intermediate, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_balls(opening):
    ball = (CENTRES, 0.5)
    result = networks.bound(NETS["softplus"], objectives=ROWS, ball=ball, intermediate="ibp")
    distance = np.linalg.norm(result.inputs - CENTRES[:, None], axis=-1)
    assert np.all(distance <= 0.5 * (1 + 1e-12))
    assert np.all(result.attained >= result.bound)
    assert np.all(result.gap <= 1e-6 + 1e-2 * np.abs(result.bound))


def test_progress(opening):
    seen = []
    networks.bound(
        NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp", progress=lambda *what: seen.append(what)
    )
    assert "searching" in {what for what, _, _ in seen}
    assert all(done <= size for _, done, size in seen)


# -- results that stay where they are -------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 300, 1e9])
def test_held(room):
    whole = {"a": RANDOM.normal(size=(10, 3)), "b": RANDOM.normal(size=(10, 2, 2))}
    held = Held(room)
    for some in (slice(0, 4), slice(4, 8), slice(8, 10)):
        held.add({name: jnp.asarray(x[some], jnp.float32) for name, x in whole.items()})
    for name, x in whole.items():
        pick = lambda part, name=name: part[name]  # noqa: E731
        np.testing.assert_array_equal(held.numpy(pick), x.astype(np.float32))
        rows = np.array([0, 3, 3, 5, 9, 9])
        np.testing.assert_array_equal(held.take(rows, pick), x.astype(np.float32)[rows])


# -- the way back of convolutions -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kernel", "conv"),
    [
        ((2, 3, 8, 9), (32, 3, 3, 3), Conv((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1))),  # narrow
        ((2, 6, 8, 9), (4, 6, 3, 3), Conv((1, 1), ((1, 1), (0, 2)), (1, 1), (1, 1))),  # wide
        ((2, 6, 9, 9), (4, 6, 3, 3), Conv((1, 1), ((1, 0), (0, 1)), (2, 1), (1, 1))),  # dilated
        ((2, 4, 9, 8), (5, 4, 4, 4), Conv((2, 2), ((0, 0), (1, 2)), (1, 1), (1, 1))),
        ((2, 4, 11, 10), (5, 4, 3, 2), Conv((3, 2), ((1, 1), (0, 0)), (1, 1), (1, 1))),
    ],
)  # fmt: skip
def test_single_precision_convolutions(shape, kernel, conv):
    """What accelerators do instead of XLA's transposed convolutions."""
    x, w = (RANDOM.normal(size=s).astype(np.float32) for s in (shape, kernel))
    value: Any
    value, back = jax.vjp(lambda x: own_conv(conv, w, x), x)
    expected: Any
    expected, plain_back = jax.vjp(lambda x: conv.plain(w, x), x)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    y = RANDOM.normal(size=value.shape).astype(np.float32)
    np.testing.assert_allclose(back(y)[0], plain_back(y)[0], rtol=1e-4, atol=1e-4)


def test_coarse_products_leave_bounds_valid(opening):
    exact = networks.bound(NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp")
    coarse = networks.bound(NETS["relu"], LOW, HIGH, ROWS, intermediate="ibp", precision="tf32")
    assert np.all(coarse.bound <= exact.value)
    assert np.all(exact.bound <= coarse.value)
