"""Lines and activations: what the checker says of them, against formulas written down again."""

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
    knots = [np.clip(knot, low, high) for knot in (-3, -2, -0.5, 0, 0.3, 1, 3)]  # of all kinds
    x = np.stack([*knots, *x])
    values = f(x)
    least, most = made.image(low, high)
    assert np.all(least <= values.min(0) + 1e-14)
    assert np.all(most >= values.max(0) - 1e-14)
    rough = 2e-5 * (1 + np.abs(values).max(0))
    assert np.all(values.min(0) - least < rough)
    assert np.all(most - values.max(0) < rough)
    steep = (f(high) - f(low)) / np.where(high > low, high - low, 1)
    for slope in (steep, steep + 0.2, 0 * steep, 0 * steep + 1):
        rest = values - slope * x
        for side, best in ((1, rest.min(0)), (-1, rest.max(0))):
            # A grid finds the extreme value roughly; a line that is off by 1e-7 at a point of
            # the grid is wrong for certain.
            assert made.holds(low, high, slope, best - side * rough, side)
            for k in range(len(low)):
                one = slice(k, k + 1)
                over = best[one] + side * 1e-7
                assert not made.holds(low[one], high[one], slope[one], over, side)


def test_tangents_that_touch_are_accepted():
    made = activation_of("tanh")
    x = np.array([0.3, 0.5, 1.0])
    slope = 1 / np.cosh(x) ** 2
    offset = np.tanh(x) - slope * x
    assert made.holds(0 * x + 0.1, x + 2, slope, offset + 1e-13, -1)
    assert not made.holds(0 * x + 0.1, x + 2, slope, offset - 1e-12, -1)


def test_lines_are_compared_exactly():
    relu = activation_of("relu")
    low, high = np.array([-1.0]), np.array([3.0])
    third = np.array([0.75])
    assert relu.holds(low, high, third, np.array([0.75]), -1)
    assert not relu.holds(low, high, third, np.array([np.nextafter(0.75, 0)]), -1)
    assert relu.holds(low, high, np.array([0.5]), np.zeros(1), 1)
    assert not relu.holds(low, high, np.array([0.5]), np.array([5e-324]), 1)
    assert not relu.holds(low, high, np.array([-1e-300]), np.zeros(1), 1)
    assert not relu.holds(low, high, np.array([np.nextafter(1, 2)]), np.zeros(1), 1)


def test_lines_of_maxima():
    random, made = np.random.default_rng(0), functions.maximum()
    for _ in range(200):
        low = random.normal(size=(1, 3))
        high = low + np.abs(random.normal(size=(1, 3))) * random.choice([0, 1, 3])
        corners = np.stack(np.meshgrid(*np.stack([low[0], high[0]], 1)), -1).reshape(-1, 3)
        slope = np.abs(random.normal(size=(1, 3)))
        # Above: the maximum minus a line is convex, so corners decide.
        best = (corners.max(1) - corners @ slope[0]).max()
        assert made.holds(low, high, slope, np.array([best + 1e-12]), -1)
        assert not made.holds(low, high, slope, np.array([best - 1e-7]), -1)
        slope = slope / slope.sum()
        points = random.uniform(low, high, size=(200, 3))
        rest = points.max(1) - points @ slope[0]
        if made.holds(low, high, slope, np.array([0.0]), 1):
            assert rest.min() >= -1e-12
        assert made.holds(low, high, slope, np.array([-1e-12]), 1)
        assert not made.holds(low, high, slope, np.array([rest.max() + 1e-7]), 1)
    assert not made.holds(low, high, -slope, np.array([-100.0]), 1)  # not of the accepted form


def _curvature(kind, x):
    """The second derivative divided by something positive."""
    if kind == "gelu":  # f'' = (2 - x^2) density(x)
        return 2 - x * x
    if kind == "silu":  # f'' = s'(x) (2 - x tanh(x / 2)) with the sigmoid s
        return 2 - x * (x / 2).tanh()
    if kind == "gelu_tanh":  # f = x s(y): f'' = s'(y) (2 y' + x y'' - x y'^2 tanh(y / 2))
        c, k = (8 / arb.pi()).sqrt(), arb("0.044715")
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
