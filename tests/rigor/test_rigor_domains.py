"""Lines of the checker below and above sin, cos, 1 / x, log, sqrt, steps and products."""

from fractions import Fraction

import numpy as np
import pytest
from flint import arb

from stagecert_check.functions import Refused, activation_of, product

BALLS = {
    "sin": arb.sin,
    "cos": arb.cos,
    "log": arb.log,
    "sqrt": arb.sqrt,
    "reciprocal": lambda x: 1 / x,
}
COUNT = 60


def _intervals(kind, random):
    if kind in ("sin", "cos"):
        middle = random.uniform(-59, 59, COUNT)
        width = random.uniform(size=COUNT) * random.choice([0, 1e-15, 1e-6, 1, 3, 9], COUNT)
        low, high = np.clip(middle - width, -60, 60), np.clip(middle + width, -60, 60)
        low[::6] = np.round(low[::6] / np.pi) * np.pi  # at inflections
        return low, np.maximum(low, high)
    low = 10 ** random.uniform(-20, 15, COUNT)
    high = low * (1 + 10 ** random.uniform(-16, 6, COUNT))
    high[::7] = low[::7]
    if kind == "sqrt":
        low[::5] = 0
    if kind == "reciprocal":
        low[::2], high[::2] = -high[::2], -low[::2]
    return low, high


@pytest.mark.parametrize("kind", BALLS)
def test_lines_are_safe_and_tight(kind):
    random = np.random.default_rng(3)
    made, exact = activation_of(kind), BALLS[kind]
    low, high = _intervals(kind, random)
    below, above = made.slopes(low, high)
    shares = (1 - np.cos(np.linspace(0, np.pi, 25))) / 2
    for slope in (below, above, np.zeros(COUNT), random.normal(size=COUNT)):
        for side in (1, -1):
            found = side * made.offset(low, high, slope, side)
            for l, h, a, b in zip(low, high, slope, found, strict=True):
                places = np.clip([l + (h - l) * t for t in shares], l, h)
                rests = [side * (exact(arb(x)) - arb(a) * arb(x)) for x in map(float, places)]
                assert not any(arb(b) > rest for rest in rests), (l, h, a, side)
                if h - l <= 6.3 or kind not in ("sin", "cos"):
                    least = min(float(rest.mid()) for rest in rests)
                    size = max(abs(float(exact(arb(x)).mid())) + abs(a * x) for x in (l, h))
                    # The grid misses the least by the square of its step.
                    assert least - b <= 1e-11 * (1 + size) + 0.05 * (high - low).max() ** 2


def test_waves_far_out_are_within_one():
    made = activation_of("sin")
    low, high = np.array([-1e6, 100.0, 0.0]), np.array([1e6, 100.5, 7.0])
    least, most = made.image(low, high)
    assert np.all((least <= -1) & (least > -1 - 1e-12))
    assert np.all((most >= 1) & (most < 1 + 1e-12))
    slope = np.full(3, 0.25)
    x = low + (high - low) * np.linspace(0, 1, 1001)[:, None]
    assert np.all(slope * x + made.offset(low, high, slope, 1) <= np.sin(x))
    assert np.all(slope * x + made.offset(low, high, slope, -1) >= np.sin(x))


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("log", 0.0, 1.0), ("sqrt", -1e-300, 1.0), ("reciprocal", -1.0, 1.0),
     ("reciprocal", 0.0, 1.0), ("reciprocal", -1.0, 0.0)],
)  # fmt: skip
def test_where_a_function_is_not_defined_it_is_refused(kind, low, high):
    made = activation_of(kind)
    for question in (made.image, made.slopes):
        with pytest.raises(Refused, match="not defined"):
            question(np.array([low]), np.array([high]))


STEPS = {"floor": np.floor, "ceil": np.ceil, "round": np.rint, "sign": np.sign}


@pytest.mark.parametrize("kind", STEPS)
def test_lines_of_steps_in_rationals(kind):
    random = np.random.default_rng(5)
    made, f = activation_of(kind), STEPS[kind]
    low = random.choice([0.25, 0.5, 1.0, 0.3], 200) * random.integers(-9, 9, 200)
    high = low + random.choice([0, 0.25, 0.5, 1, 2.5, 3.7], 200)
    least, most = made.image(low, high)
    assert np.all((least == f(low)) & (most == f(high)))
    below, above = made.slopes(low, high)
    for slope in (below, above, random.normal(size=200), np.zeros(200), np.ones(200)):
        for side in (1, -1):
            found = made.offset(low, high, slope, side)
            for l, h, a, b in zip(low, high, slope, found, strict=True):
                # All places where it may be extreme: ends, jumps, and just beside jumps.
                jumps = [k / 2 for k in range(-40, 41) if l <= k / 2 <= h]
                near = [np.nextafter(j, s * np.inf) for j in jumps for s in (-1, 1)]
                places = [l, h, *jumps, *(x for x in near if l <= x <= h)]
                rests = [
                    side * (Fraction(float(f(x))) - Fraction(float(a)) * Fraction(float(x)))
                    for x in places
                ]
                assert Fraction(float(side * b)) <= min(rests) + Fraction(1, 2**48)
                assert min(rests) - Fraction(float(side * b)) <= Fraction(1, 10**12)
    assert np.all(made.bent(low, high) == (f(low) != f(high)))


def test_lines_of_products_in_rationals():
    random = np.random.default_rng(2)
    made = product()
    low = random.normal(size=(150, 2)) * 10.0 ** random.integers(-6, 7, (150, 1))
    high = low + np.abs(random.normal(size=(150, 2))) * random.choice([0, 1e-9, 1, 100], (150, 2))
    below, above = made.slopes(low, high)
    least, most = made.image(low, high)
    for slope in (below, above, random.normal(size=(150, 2))):
        for side in (1, -1):
            found = made.offset(low, high, slope, side)
            for k in range(150):
                a, b = (Fraction(float(s)) for s in slope[k])
                corners = [
                    (Fraction(float(x)), Fraction(float(y)))
                    for x in (low[k, 0], high[k, 0]) for y in (low[k, 1], high[k, 1])
                ]  # fmt: skip
                exact = min(side * (x * y - a * x - b * y) for x, y in corners)
                size = max(abs(x * y) + abs(a * x) + abs(b * y) for x, y in corners)
                offset = side * Fraction(float(found[k]))
                assert offset <= exact
                assert exact - offset <= Fraction(1, 10**14) * size + Fraction(1, 10**300)
                assert Fraction(float(least[k])) <= min(x * y for x, y in corners)
                assert Fraction(float(most[k])) >= max(x * y for x, y in corners)
    wide = np.asarray((high > low).all(axis=-1))
    assert np.all(made.bent(low, high) == wide[:, None])
