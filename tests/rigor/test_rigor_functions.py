"""Lines and activations: what the checker says of them, against formulas written down again."""

from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
import scipy.special
from flint import arb, ctx

from stagecert_check import functions, tables
from stagecert_check.functions import activation_of


def _sigmoid(x):
    return scipy.special.expit(x)


KINDS = {
    ("relu",): lambda x: np.maximum(x, 0),
    ("leaky_relu", ("alpha", 0.1)): lambda x: np.where(x > 0, x, 0.1 * x),
    ("leaky_relu", ("alpha", 1.5)): lambda x: np.where(x > 0, x, 1.5 * x),
    ("abs",): np.abs,
    ("clip", ("low", -0.5), ("high", 1.0)): lambda x: np.clip(x, -0.5, 1),
    ("clip", ("low", -np.inf), ("high", 0.3)): lambda x: np.minimum(x, 0.3),
    ("hard_sigmoid", ("alpha", 0.2), ("beta", 0.4)): lambda x: np.clip(0.2 * x + 0.4, 0, 1),
    ("hard_sigmoid", ("alpha", -0.25), ("beta", 0.5)): lambda x: np.clip(-0.25 * x + 0.5, 0, 1),
    ("hard_sigmoid", ("alpha", 0.0), ("beta", 0.3)): lambda x: np.clip(0 * x + 0.3, 0, 1),
    ("hard_swish",): lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    ("elu", ("alpha", 0.5)): lambda x: np.where(x > 0, x, 0.5 * np.expm1(np.minimum(x, 0))),
    ("elu", ("alpha", 2.0)): lambda x: np.where(x > 0, x, 2 * np.expm1(np.minimum(x, 0))),
    ("elu", ("alpha", -1.0)): lambda x: np.where(x > 0, x, -np.expm1(np.minimum(x, 0))),
    ("selu", ("alpha", 1.6), ("gamma", 1.05)): lambda x: (
        1.05 * np.where(x > 0, x, 1.6 * np.expm1(np.minimum(x, 0)))
    ),
    ("celu", ("alpha", 2.0)): lambda x: np.where(x > 0, x, 2 * np.expm1(np.minimum(x, 0) / 2)),
    ("softsign",): lambda x: x / (1 + np.abs(x)),
    ("square",): np.square,
    ("exp",): np.exp,
    ("softplus",): lambda x: np.logaddexp(x, 0),
    ("sigmoid",): _sigmoid,
    ("tanh",): np.tanh,
    ("gelu",): lambda x: x * scipy.special.ndtr(x),
    ("gelu_tanh",): lambda x: x * _sigmoid(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)),
    ("silu",): lambda x: x * _sigmoid(x),
    ("mish",): lambda x: x * np.tanh(np.logaddexp(x, 0)),
    ("erf",): scipy.special.erf,
    ("power", ("exponent", 3.0)): lambda x: x**3,
    ("power", ("exponent", 4.0)): lambda x: x**4,
}


def _intervals(random, count):
    middle, width = 3 * random.normal(size=count), np.abs(random.normal(size=count)) * 3
    width[:4] = 0
    return middle - width / 2, middle + width / 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_lines_and_images_against_samples(kind):
    name, *settings = kind
    made, f = activation_of(name, **dict(settings)), KINDS[kind]
    low, high = _intervals(np.random.default_rng(0), 40)
    x = low + (high - low) * np.linspace(0, 1, 4001)[:, None]
    knots = [np.clip(knot, low, high) for knot in (-3, -2, -0.5, 0, 0.3, 1, 2, 3)]  # of all kinds
    x = np.stack([*knots, *x])
    values = f(x)
    least, most = made.image(low, high)
    assert np.all(least <= values.min(0) + 1e-14)
    assert np.all(most >= values.max(0) - 1e-14)
    rough = 2e-5 * (1 + np.abs(values).max(0))
    assert np.all(values.min(0) - least < rough)
    assert np.all(most - values.max(0) < rough)
    steep = (f(high) - f(low)) / np.where(high > low, high - low, 1)
    defaults = made.slopes(low, high)
    for slope in (steep, steep + 0.2, 0 * steep, 0 * steep + 1, *defaults):
        rest = values - slope * x
        for side, best in ((1, rest.min(0)), (-1, rest.max(0))):
            # A grid finds the extreme value roughly.
            found = made.offset(low, high, slope, side)
            dust = 1e-14 * (1 + np.abs(values).max(0) + np.abs(slope * x).max(0))
            assert np.all(side * found <= side * best + dust)
            assert np.all(side * (best - found) < rough)
    # Where it is linear on an interval, both default lines are the function.
    straight = ~made.bent(low, high)
    for slope, side in zip(defaults, (1, -1), strict=True):
        line = slope * x + made.offset(low, high, slope, side)
        assert np.all(np.abs(line - values)[:, straight] < 1e-12)


def test_default_slopes_are_those_of_the_hull_in_the_middle():
    low, high = np.array([-1.0, -3.0, -2.0, 0.5]), np.array([3.0, 1.0, 2.0, 2.0])
    below, above = activation_of("relu").slopes(low, high)
    assert below.tolist() == [1, 0, 0, 1]
    assert above.tolist() == [0.75, 0.25, 0.5, 1]
    # A convex function has tangents below and a chord above.
    below, above = activation_of("exp").slopes(np.zeros(1), np.ones(1))
    assert np.allclose(below, np.exp(0.5), rtol=1e-3)
    assert np.allclose(above, np.e - 1)


def test_offsets_of_piecewise_linear_functions_in_rationals():
    random = np.random.default_rng(0)
    count = 3000
    low = random.normal(size=count) * 10.0 ** random.integers(-300, 20, count)
    high = low + np.abs(random.normal(size=count)) * 10.0 ** random.integers(-300, 20, count)
    low[::7], high[::11] = -np.abs(low[::7]), np.maximum(low[::11], 0)
    slope = random.normal(size=count) * 10.0 ** random.integers(-10, 10, count)
    slope[::3] = random.integers(-1, 2, len(slope[::3]))
    made = activation_of("relu")
    slope[::5] = made.slopes(low, high)[1][::5]
    for side in (1, -1):
        found = made.offset(low, high, slope, side)
        for l, h, a, b in zip(low, high, slope, found, strict=True):
            ends = [Fraction(float(v)) for v in (l, h)] + ([Fraction(0)] if l < 0 < h else [])
            rest = [max(x, 0) - Fraction(float(a)) * x for x in ends]
            best = min(rest) if side > 0 else max(rest)
            assert side * Fraction(float(b)) <= side * best
            size = abs(a) * max(abs(l), abs(h)) + max(abs(l), abs(h))
            assert abs(Fraction(float(b)) - best) <= Fraction(float(1e-14 * size + 1e-300))
    # Nothing is lost where nothing is rounded: a strict row can depend on it.
    zero, one = np.zeros(1), np.ones(1)
    assert made.offset(-one, one, zero, 1) == 0
    assert made.offset(-one, one, one, 1) == 0
    assert made.offset(zero, one, one, -1) == 0
    assert made.offset(-one, zero, zero, -1) == 0


def test_gelu_by_tanh_with_another_factor_of_the_cube():
    made = activation_of("gelu_tanh", cube=0.044714994)
    x = np.linspace(-3, 3, 13)
    wanted = [
        v * (1 + ((2 / arb.pi()).sqrt() * (v + arb(0.044714994) * v**3)).tanh()) / 2
        for v in map(arb, x.tolist())
    ]
    low, high = made.image(x, x)
    for l, value, u in zip(low.tolist(), wanted, high.tolist(), strict=True):
        assert arb(l) <= value
        assert value <= arb(u)
        assert u - l < 1e-14
    with pytest.raises(functions.Refused):
        activation_of("gelu_tanh", cube=0.0447)


def test_lines_of_maxima():
    random, made = np.random.default_rng(0), functions.maximum()
    for _ in range(200):
        low = random.normal(size=(1, 3))
        high = low + np.abs(random.normal(size=(1, 3))) * random.choice([0, 1, 3])
        corners = np.stack(np.meshgrid(*np.stack([low[0], high[0]], 1)), -1).reshape(-1, 3)
        points = random.uniform(low, high, size=(200, 3))
        below, above = made.slopes(low, high)
        # Above: the maximum minus a line is convex, so corners decide.
        for slope in (random.normal(size=(1, 3)), above):
            best = (corners.max(1) - corners @ slope[0]).max()
            found = made.offset(low, high, slope, -1)[0]
            assert best <= found < best + 1e-12
        if not made.bent(low, high).any():  # one entry is the largest everywhere
            assert np.allclose(points.max(1), points @ above[0] + found)
        for slope in (np.abs(random.normal(size=(1, 3))), below):
            found = made.offset(low, high, slope, 1)[0]
            assert np.all(points @ slope[0] + found <= points.max(1))
        assert abs(found) < 1e-12  # a single entry is below the maximum
    with pytest.raises(functions.Refused):
        made.offset(low, high, -np.ones((1, 3)), 1)


def _curvature(kind, x):
    """The second derivative divided by something positive."""
    if kind == "gelu":  # f'' = (2 - x^2) density(x)
        return 2 - x * x
    if kind == "silu":  # f'' = s'(x) (2 - x tanh(x / 2)) with the sigmoid s
        return 2 - x * (x / 2).tanh()
    if kind == "gelu_tanh":  # f = x s(y): f'' = s'(y) (2 y' + x y'' - x y'^2 tanh(y / 2))
        c, k = (8 / arb.pi()).sqrt(), arb("0.044715", "1e-8")  # any of these
        y, first, second = c * (x + k * x**3), c * (1 + 3 * k * x * x), 6 * c * k * x
        return 2 * first + x * second - x * first**2 * (y / 2).tanh()
    # mish with w = exp(x) and D = w^2 + 2 w + 2: f'' is 4 w / D^3 times this
    w = x.exp()
    return 2 * w**3 + 6 * w**2 + 8 * w + 4 + x * (2 + 2 * w - 3 * w**2 - 2 * w**3)


def _signs(kind, low, high, sign, depth=0):
    """Whether the curvature has one sign on [low, high], by bisection in ball arithmetic."""
    if sign * _curvature(kind, low.union(high)) > 0:
        return True
    assert depth < 200, (kind, low, high)
    middle = arb(((low + high) / 2).mid())
    return _signs(kind, low, middle, sign, depth + 1) and _signs(
        kind, middle, high, sign, depth + 1
    )


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "mish"])
def test_curvature_changes_its_sign_at_the_inflections_only(kind):
    reach = 40  # beyond this the last term outweighs the others many times
    precision, ctx.prec = ctx.prec, 400
    try:
        for region in cast(Any, activation_of(kind)).regions:
            if region.bend is None:
                assert _curvature(kind, region.start) * _curvature(kind, region.end) < 0
                continue
            low = region.start if region.start > -reach else arb(-reach)
            high = region.end if region.end < reach else arb(reach)
            assert _signs(kind, low, high, region.bend)
    finally:
        ctx.prec = precision


# -- tables ----------------------------------------------------------------------------------------

# Formulas in balls, written down again.
_ROOT = arb(8).sqrt() / arb.pi().sqrt()
BALLS = {
    "hard_swish": lambda x: arb(0) if x <= -3 else x if x >= 3 else x * (x + 3) / 6,
    "elu": lambda x, alpha: x if x >= 0 else alpha * x.expm1(),
    "selu": lambda x, alpha, gamma: gamma * x if x >= 0 else arb(gamma) * alpha * x.expm1(),
    "celu": lambda x, alpha: x if x >= 0 else alpha * (x / alpha).expm1(),
    "softsign": lambda x: x / (1 + abs(x)),
    "square": lambda x: x**2,
    "exp": lambda x: x.exp(),
    "softplus": lambda x: x.exp().log1p(),
    "sigmoid": lambda x: (1 + (x / 2).tanh()) / 2,
    "tanh": lambda x: x.tanh(),
    "gelu": lambda x: x * (-x / arb(2).sqrt()).erfc() / 2,
    "gelu_tanh": lambda x, cube="0.044715": (
        x * (1 + (_ROOT / 2 * (x + arb(cube) * x**3)).tanh()) / 2
    ),
    "silu": lambda x: x / (1 + (-x).exp()),
    "mish": lambda x: x * x.exp().log1p().tanh(),
    "erf": arb.erf,
    "power": lambda x, exponent: x ** int(exponent),
}
ODD = {  # for which tables are not good everywhere
    ("celu", ("alpha", 1e-4)): lambda x: np.where(x > 0, x, 1e-4 * np.expm1(x / 1e-4)),
    ("celu", ("alpha", 300.0)): lambda x: np.where(x > 0, x, 300 * np.expm1(x / 300)),
    ("elu", ("alpha", 0.0)): lambda x: np.maximum(x, 0),
}
SMOOTH = {kind: f for kind, f in KINDS.items() if kind[0] in BALLS} | ODD


def _smooth(kind):
    name, *settings = kind
    made = activation_of(name, **dict(settings))
    assert isinstance(made, functions.Smooth)
    return made, lambda x: BALLS[name](arb(float(x)), **dict(settings))


def _all_sizes(random, reach, count):
    """Intervals of all sizes: points, tiny ones, such around zero and inflections, all there is."""
    middle = random.normal(size=count) * 10.0 ** random.integers(-8, 5, count)
    middle[::5] = random.choice([0, -3, 3, 1.4142135623730951, -2.256376396360793, 4, 40], count)[
        ::5
    ]
    width = np.abs(random.normal(size=count)) * 10.0 ** random.integers(-18, 5, count)
    width[::6] = 0
    low, high = np.clip(middle - width, -reach, reach), np.clip(middle + width, -reach, reach)
    low[1], high[1] = -reach, reach
    low[2], high[2] = 0, 5e-324
    low[3], high[3] = -1e-310, 0
    return low, high


def _extreme(f, low, high, slope, side):
    """Roughly where side * (f(x) - slope * x) is the least, by zooming in on a grid."""
    powers = 10.0 ** np.linspace(-6, 4, 300)
    points = np.concatenate([-powers, powers])[:, None] + 0 * low
    points = np.concatenate([points, low + (high - low) * np.linspace(0, 1, 65)[:, None]])
    x = np.sort(np.clip(points, low, high), axis=0)
    with np.errstate(all="ignore"):
        for _ in range(8):
            best = np.argmin(side * (f(x) - slope * x), axis=0)
            first, here, last = (
                np.take_along_axis(x, np.clip(best + k, 0, len(x) - 1)[None], 0)[0]
                for k in (-1, 0, 1)
            )
            x = first + (last - first) * np.linspace(0, 1, 65)[:, None]
    return np.clip(here, low, high)  # type: ignore


@pytest.mark.parametrize("kind", SMOOTH, ids=lambda kind: "-".join(map(str, kind)))
def test_lines_of_smooth_functions_are_safe_and_tight(kind):
    """Compared with values in ball arithmetic, at the ends and where the difference is least."""
    made, exact = _smooth(kind)
    assert made._parts is not None
    random = np.random.default_rng(7)
    low, high = _all_sizes(random, min(made.reach, 1e4), 120)
    below, above = made.slopes(low, high)
    count = len(low)
    wild = random.normal(size=count) * 10.0 ** random.integers(-6, 12, count)
    for slope in (below, above, np.zeros(count), np.ones(count), random.uniform(size=count), wild):
        for side in (1, -1):
            found = made.offset(low, high, slope, side)
            places = [low, high]
            for part in made._parts.parts:  # each has one minimum
                begin, end = np.clip(part.start, low, high), np.clip(part.end, low, high)
                places.append(_extreme(SMOOTH[kind], begin, end, slope, side))
            for l, h, x, a, b in zip(low, high, np.stack(places, 1), slope, found, strict=True):
                values = [side * (exact(v) - arb(float(a)) * arb(float(v))) for v in x]
                assert not any(arb(float(side * b)) > value for value in values), (l, h, a, side)
                size = max(float(abs(exact(v)).mid()) for v in (l, h)) + abs(a) * max(-l, h)
                loss = min(float(value.mid()) for value in values) - side * b
                assert loss <= 1e-11 * (1 + size), (l, h, a, side, loss)


@pytest.mark.parametrize("kind", SMOOTH, ids=lambda kind: "-".join(map(str, kind)))
def test_values_and_slopes_of_tables(kind):
    made, exact = _smooth(kind)
    random = np.random.default_rng(3)
    reach = min(made.reach, 1e4)
    x = np.concatenate([
        random.normal(size=300) * 10.0 ** random.integers(-320, 4, 300),
        random.integers(-3000, 3000, 200) / 64,  # where cells meet
        np.nextafter(random.integers(-3000, 3000, 100) / 64, np.inf),
        [0.0, -0.0, 4, -4, 40, -40, 64, -64, np.nextafter(64, 65), reach, -reach],
    ])  # fmt: skip
    x = x[np.abs(x) <= reach]
    precise = 0
    assert made._parts is not None
    for region, part in zip(made.regions, made._parts.parts, strict=True):
        mine = x[(x >= part.start) & (x <= part.end)]
        for ball, (found, off) in (
            (region.function, part.form.value(mine)),
            (region.slope, part.form.slope(mine)),
        ):
            for v, number, error in zip(mine, found, off, strict=True):
                true = ball(arb(float(v)))
                assert arb(error) >= abs(true - arb(float(number))), (v, number, error)
                precise += error < 1e-13 * (1 + abs(number))
            if ball is region.function:
                for v in mine[::7]:  # and the regions' formulas are those of the function
                    apart = abs(ball(arb(float(v))) - exact(v)) / (1 + abs(exact(v)))
                    assert not apart > 1e-30
                    assert apart < 1e-14  # the factor of gelu's cube is an interval
    if kind not in ODD:
        assert precise > 1.9 * len(x)
    # Lines that a function is said to approach: far out nothing else is left of it.
    for end, limit in ((-reach, made.regions[0].left), (reach, made.regions[-1].right)):
        if limit is not None and kind not in ODD:
            assert abs(exact(end) - (limit[0] * arb(end) + limit[1])) < 1e-12


def test_without_tables_the_answers_are_the_same():
    random = np.random.default_rng(0)
    low, high = _intervals(random, 50)
    for name in ("tanh", "mish"):
        tabled = activation_of(name)
        assert isinstance(tabled, functions.Smooth)
        regions = [functions.Region(r.start, r.end, r.bend, lambda x, f=r.function: f(arb(x)),
                                    r.slope) for r in tabled.regions]  # fmt: skip
        plain = functions.Smooth(name, regions, tabled.reach)
        assert plain._parts is None  # power series are no arguments of the functions
        for one, other in zip(tabled.slopes(low, high), plain.slopes(low, high), strict=True):
            assert np.allclose(one, other, rtol=0, atol=1e-9)
        slope = random.normal(size=(3, 50))
        for side in (1, -1):
            each = [plain.offset(low, high, a, side) for a in slope]
            assert np.allclose(plain.offset(low[None], high[None], slope, side), each, atol=1e-12)
            assert np.allclose(tabled.offset(low[None], high[None], slope, side), each, atol=1e-12)


def test_regions_that_floats_would_tear_apart_get_no_tables():
    third = arb(1) / 3
    regions = [functions.Region(start, end, 1, lambda x: x * x, lambda x: 2 * x)
               for start, end in ((arb.neg_inf(), third), (third, arb.pos_inf()))]  # fmt: skip
    made = functions.Smooth("test", regions)
    assert made._parts is None
    assert made.offset(np.zeros(1), np.ones(1), np.full(1, 2 / 3), 1) <= -1 / 9


def test_power_series_that_are_cut_off_too_early_are_an_error():
    cap = ctx.cap
    try:
        ctx.cap = 5
        with pytest.raises(ArithmeticError):
            tables.Table(lambda x: x.exp()).value(np.zeros(1))
    finally:
        ctx.cap = cap


def test_default_lines_at_a_jump():
    # The line above a step that falls went through the end of the jump, and was raised by as much.
    step = activation_of("broken_line", knot0=0.0, slope0=0.0, offset0=1.0, slope1=0.0, offset1=0.0)
    low, high = np.array([-1.0, -3.0]), np.array([3.0, 1.0])
    below, above = step.slopes(low, high)
    np.testing.assert_allclose(above, [-1 / 3, 0], rtol=1e-15)
    np.testing.assert_allclose(below, [0, -1 / 3], rtol=1e-15)
    np.testing.assert_allclose(step.offset(low, high, above, -1), [1, 1], rtol=1e-15)
