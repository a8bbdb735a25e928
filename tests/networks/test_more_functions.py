"""Hulls of sin, cos, 1 / x, log, sqrt, erf, powers, steps and products: safe, tight, closed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert.networks.activations import find
from stagecert.networks.activations.products import product_image, product_wedge

Long = np.longdouble
COUNT, INSIDE = 90, 41  # intervals, and points in each


def _erf(x):
    """By its power series in extended precision; from seven on it is one to twenty digits."""
    near = np.clip(x, -7, 7)
    term, total = near, near
    for n in range(1, 250):
        term = term * 2 * near * near / (2 * n + 1)
        total = total + term
    found = 2 / np.sqrt(Long("3.14159265358979323846264338327950288")) * np.exp(-near * near)
    return np.where(np.abs(x) < 7, found * total, np.sign(x))


# Functions, and the numbers that they are tried on.
KINDS = {
    "sin": (np.sin, 12), "cos": (np.cos, 12), "erf": (_erf, 4), "log": (np.log, 0),
    "sqrt": (np.sqrt, 0), "reciprocal": (lambda x: 1 / x, 0), "floor": (np.floor, 5),
    "ceil": (np.ceil, 5), "round": (np.round, 5), "sign": (np.sign, 3),
    "power": (lambda x: x**3, 4), "power 4": (lambda x: x**4, 4), "power 7": (lambda x: x**7, 2),
}  # fmt: skip
STEPS = ("floor", "ceil", "round", "sign")


def _intervals(kind, reach):
    random = np.random.default_rng(len(kind))
    if not reach:
        ends = 10 ** random.uniform(-4, 4, (2, COUNT))
        ends[0, ::5] = ends[1, ::5] * (1 + 10 ** random.uniform(-14, -1, COUNT // 5))
        ends[:, ::2] *= -1 if kind == "reciprocal" else 1
    else:
        middle = random.uniform(-reach, reach, COUNT)
        width = random.uniform(0, 1, COUNT) * random.choice([1e-12, 1e-3, 0.5, 3, 9], COUNT)
        ends = np.stack([middle - width, middle + width])
        # Ends where the functions bend or jump.
        ends[0, ::7], ends[1, 1::7] = np.round(2 * ends[0, ::7]) / 2, np.round(ends[1, 1::7])
        ends[0, ::11] = np.round(ends[0, ::11] / np.pi) * np.pi
    low, high = ends.min(axis=0), ends.max(axis=0)
    low[2], high[3] = high[2], low[3]
    return low, high


@functools.cache
def _both(kind):
    name, *exponent = kind.split()
    settings = {"exponent": float(exponent[0])} if exponent else {}

    @jax.jit
    def run(low, high, x):
        wedge = find(name).wedge(low, high, **settings)
        sides = jax.vmap(wedge.lower)(x), jax.vmap(wedge.upper)(x)
        return *sides, find(name).image(low, high, **settings)

    return run


def _hull(x, y, at):
    """The least concave function above points, at one of these."""
    order = np.argsort(x, kind="stable")
    kept: list[int] = []
    for k in order:
        while len(kept) > 1 and (x[k] - x[kept[-1]]) * (y[kept[-1]] - y[kept[-2]]) <= (
            x[kept[-1]] - x[kept[-2]]
        ) * (y[k] - y[kept[-1]]):
            kept.pop()
        kept.append(k)
    return np.interp(at.astype(float), x[kept].astype(float), y[kept].astype(float))


@pytest.mark.parametrize("kind", KINDS)
def test_hulls_are_safe_and_tight(kind):
    function, reach = KINDS[kind]
    low, high = _intervals(kind, reach)
    share = (1 - np.cos(np.pi * np.linspace(0, 1, INSIDE)))[:, None] / 2
    with jax.enable_x64(True):
        x = np.clip(low + (high - low) * share, low, high)
        lower, upper, (least, most) = map(
            lambda t: jax.tree.map(np.asarray, t), _both(kind)(low, high, x)
        )
    value = function(x.astype(Long))
    size = 1 + np.abs(value)
    assert np.all(lower <= value)
    assert np.all(value <= upper)
    assert np.all(least <= value + 1e-18 * size)
    assert np.all(value <= most + 1e-18 * size)
    # Tight: no further out than the hull of many points, but for what lies between these. Where
    # the function jumps, the limits at the jumps belong to the hull.
    for k in np.flatnonzero((high - low < 6) | (kind not in ("sin", "cos"))):
        dense = low[k] + (high[k] - low[k]) * np.linspace(0, 1, 1501).astype(Long)
        dense = np.concatenate([dense, x[:, k].astype(Long)])
        values = function(dense)
        if kind in STEPS:
            jumps = np.arange(-40, 41) / 2
            jumps = jumps[(jumps >= low[k]) & (jumps <= high[k])]
            inner = [j + s * 1e-12 for j in jumps for s in (-1, 1)]
            inner = np.clip(np.array([*jumps, *inner]), low[k], high[k]).astype(Long)
            dense, values = (
                np.concatenate([dense, inner]), np.concatenate([values, function(inner)])
            )  # fmt: skip
        above, below = _hull(dense, values, x[:, k]), -_hull(dense, -values, x[:, k])
        scale = np.max(np.abs(values)) + (1 if reach else 0)
        rough = 2e-5 if (high[k] - low[k]) > 1e-9 else 1e-8
        # At an end that is a jump, the hull of a closed graph holds both limits.
        inner = slice(1, -1) if kind in STEPS else slice(None)
        assert np.all(upper[inner, k] <= (above + rough * scale)[inner])
        assert np.all(lower[inner, k] >= (below - rough * scale)[inner])
        assert most[k] - values.max() <= 1e-5 * scale
        assert values.min() - least[k] <= 1e-5 * scale


@pytest.mark.parametrize("kind", ["sin", "cos", "reciprocal", "log", "sqrt", "power"])
def test_hulls_touch_the_function_at_the_ends(kind):
    function, reach = KINDS[kind]
    low, high = _intervals(kind, reach)
    short = high - low < 6 if reach else high < 1e3
    low, high = (np.where(short, x, 1.0) for x in (low, high))
    with jax.enable_x64(True):
        for x in (low, high):
            lower, upper, _ = _both(kind)(low, high, np.tile(x, (INSIDE, 1)))
            value = function(x.astype(Long))
            for side in (np.asarray(lower)[0], np.asarray(upper)[0]):
                size = 1 + np.max(np.abs(function(np.stack([low, high]).astype(Long))), axis=0)
                assert np.all(np.abs(side - value) <= 1e-12 * size)


def test_outside_of_its_domain_a_function_has_no_hull():
    for kind, low, high in (
        ("log", 0.0, 1.0), ("log", -1.0, 1.0), ("sqrt", -1e-9, 1.0), ("reciprocal", -1.0, 1.0),
        ("reciprocal", 0.0, 1.0), ("reciprocal", -1.0, 0.0), ("sin", -np.inf, 1.0),
        ("log", 1.0, np.inf), ("power", -1e200, 1.0),
    ):  # fmt: skip
        with jax.enable_x64(True):
            low_, high_, x = (jnp.full(COUNT, v) for v in (low, high, 0.5))
            lower, upper, (least, most) = _both(kind)(low_, high_, jnp.tile(x, (INSIDE, 1)))
        assert np.all(lower == -np.inf), kind
        assert np.all(upper == np.inf), kind
        assert not np.any(np.isnan(least) | np.isnan(most))


def test_a_whole_period_reaches_from_minus_one_to_one():
    with jax.enable_x64(True):
        low = jnp.linspace(-20, 20, COUNT)
        lower, upper, (least, most) = _both("cos")(low, low + 6.3, jnp.tile(low, (INSIDE, 1)))
    assert np.all((least == -1) & (most == 1))
    assert np.all((lower <= -1) & (lower >= -1 - 1e-12))
    assert np.all((upper >= 1) & (upper <= 1 + 1e-12))


def test_the_hull_of_a_product_is_mccormicks():
    random = np.random.default_rng(1)
    low = random.normal(size=(200, 2))
    high = low + np.abs(random.normal(size=(200, 2))) * random.choice([0, 1e-9, 1, 5], (200, 2))
    t = random.uniform(size=(50, 200, 2))
    t[:9] = np.array([(a, b) for a in (0, 0.5, 1) for b in (0, 0.5, 1)])[:, None]
    x = np.clip(low + (high - low) * t, low, high)
    with jax.enable_x64(True):
        wedge = product_wedge(jnp.asarray(low), jnp.asarray(high))
        lower, upper = (
            np.asarray(wedge.lower(jnp.asarray(x))),
            np.asarray(wedge.upper(jnp.asarray(x))),
        )
        least, most = map(np.asarray, product_image(jnp.asarray(low), jnp.asarray(high)))
    value = x[..., 0].astype(Long) * x[..., 1]
    room = 1e-14 * (np.abs(low) + np.abs(high)).prod(axis=-1) + 1e-300
    assert np.all(lower <= value + room)
    assert np.all(upper >= value - room)
    assert np.all((least <= value) & (value <= most))
    # The planes touch the product in the corners, and leave a quarter of the box's area inside.
    area = (high - low).prod(axis=-1)
    for k in (0, 2, 6, 8):
        assert np.all(upper[k] - lower[k] <= 1e-12 * (1 + np.abs(value[k])))
    assert np.all(upper[4] - lower[4] <= area / 2 + 1e-12 * (1 + np.abs(value[4])))


def test_unbounded_factors_prove_nothing():
    with jax.enable_x64(True):
        low, high = jnp.array([[-jnp.inf, 0.0], [0.0, 1.0]]), jnp.array([[1.0, 0.0], [1.0, 1e200]])
        wedge = product_wedge(low, high)
        x = jnp.array([[0.5, 0.0], [0.5, 0.5]])
        assert np.all(wedge.lower(x) < -1e300)
        assert np.all(wedge.upper(x) > 1e300)
        least, most = product_image(low, high)
    assert np.all(least <= 0)
    assert np.all(most >= 0)
    assert (least[0], most[0]) == (-np.inf, np.inf)
