"""Lines and activations: what the checker says of them, against formulas written down again."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.special
from flint import arb, ctx

from stagecert.rigor import functions
from stagecert.rigor.functions import activation_of


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
        for region in activation_of(kind).regions:
            if region.bend is None:
                assert _curvature(kind, region.start) * _curvature(kind, region.end) < 0
                continue
            low = region.start if region.start > -reach else arb(-reach)
            high = region.end if region.end < reach else arb(reach)
            assert _signs(kind, low, high, region.bend)
    finally:
        ctx.prec = precision
