"""Activations: their values, their ranges, and the tightest convex wedge around each."""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.errors import ProblemError
from stagecert.networks import hulls
from stagecert.networks.hulls import AbstractSide, Profile


class AbstractWedge(eqx.Module):
    """A convex function below and a concave one above an activation on an interval, entrywise.

    `straight` says that both are made of lines alone.
    """

    straight: ClassVar[bool] = False

    @abc.abstractmethod
    def lower(self, x) -> Any:
        """Convex, and below the activation on the interval."""

    @abc.abstractmethod
    def upper(self, x) -> Any:
        """Concave, and above the activation on the interval."""

    @abc.abstractmethod
    def slopes(self) -> tuple[tuple, tuple]:
        """First weights for the nonsmooth pieces of `lower` and of `upper`, in program order."""


class AbstractActivation(abc.ABC):
    """One nonlinear function of each entry."""

    @abc.abstractmethod
    def __call__(self, x, weights=None, /, **settings) -> Any:
        """The function."""

    @abc.abstractmethod
    def image(self, low, high, weights=None, /, **settings) -> tuple[Any, Any]:
        """An interval that contains the function's values on [low, high]."""

    @abc.abstractmethod
    def wedge(self, low, high, weights=None, /, **settings) -> AbstractWedge:
        """The convex hull of the function on [low, high].

        If a bound is not finite (or near overflow), the wedge is infinite there: it proves nothing.
        """


class HullWedge(AbstractWedge):
    """The two sides of a convex hull."""

    below: AbstractSide
    above: AbstractSide

    def lower(self, x):
        return self.below(x)

    def upper(self, x):
        return self.above(x)

    def slopes(self):
        return self.below.first(), self.above.first()


class StraightWedge(HullWedge):
    """A hull made of lines alone."""

    straight: ClassVar[bool] = True


# -- one kink at zero ------------------------------------------------------------------------------


class ReluWedge(AbstractWedge):
    """The triangle of relu. It is the hot path: two numbers for each entry, all else is cheap."""

    straight: ClassVar[bool] = True

    low: Any
    high: Any

    def lower(self, x):
        # Where relu is linear on the interval both lines are the same, so nothing is nonsmooth.
        return pieces.maximum(jnp.where(self.high <= 0, 0, x), jnp.where(self.low >= 0, x, 0))

    def upper(self, x):
        low, high = self.low, self.high
        unstable = ~((low >= 0) | (high <= 0))  # also if a bound is not a number
        width = jnp.where(unstable, high - low, 1)
        known = jnp.isfinite(width)
        slope = jnp.where(unstable, high / jnp.where(known, width, jnp.inf), low >= 0)
        # The larger offset holds at both ends however the slope was rounded; the last term covers
        # the roundings of the line itself.
        offset = jnp.maximum(-slope * low, high - slope * high)
        offset = offset + 8 * jnp.finfo(low.dtype).eps * high
        offset = jnp.where(unstable, jnp.where(known, offset, jnp.inf), 0)
        return jnp.where(known, slope, 0) * x + offset

    def slopes(self):
        # CROWN's choice: the line that leaves the smaller triangle.
        return (pieces.First(jnp.where(self.high > -self.low, 1, 0).astype(self.low.dtype)),), ()


class _Relu(AbstractActivation):
    def __call__(self, x, weights=None, /):
        return jnp.maximum(x, 0)

    def image(self, low, high, weights=None, /):
        return jnp.maximum(low, 0), jnp.maximum(high, 0)

    def wedge(self, low, high, weights=None, /):
        return ReluWedge(low, high)


def _kinked_wedge(low, high, left, right) -> StraightWedge:
    """The wedge of left * x for x < 0 and right * x for x > 0, entrywise in the slopes too."""
    left, right = (jnp.asarray(s, low.dtype) for s in (left, right))
    stable = (low >= 0) | (high <= 0) | (left == right)
    slope = jnp.where(low >= 0, right, left)
    points = (low, jnp.zeros_like(low), high)
    values = (left * low, jnp.zeros_like(low), right * high)
    chord = hulls.secant_slope(low, values[0], high, values[2])
    sides = []
    for sign in (1, -1):
        bent = sign * left < sign * right  # the kink is a corner of this side
        offset = hulls.supporting_offset(sign, chord, points, values)
        one = jnp.where(stable, slope, jnp.where(bent, left, chord))
        two = jnp.where(stable, slope, jnp.where(bent, right, chord))
        offset = jnp.where(stable | bent, 0, offset)
        sides.append(hulls.lines(sign, (one, two), (offset, offset), low, high))
    return StraightWedge(*sides)


def _one_line(side: hulls.Lines) -> hulls.Line:
    """The first of several equal lines."""
    zero = jnp.zeros_like(side.slopes[..., 0])
    return hulls.Line(side.slopes[..., 0], zero, side.offsets[..., 0])


def _kinked_image(low, high, left, right):
    values = [_kinked(x, left, right) for x in (low, high)]
    least, most = jnp.minimum(*values), jnp.maximum(*values)
    eps = jnp.finfo(low.dtype).eps  # one product, rounded outwards
    least, most = least - eps * jnp.abs(least), most + eps * jnp.abs(most)
    crosses = (low < 0) & (high > 0)
    least = jnp.where(crosses, jnp.minimum(least, 0), least)
    return least, jnp.where(crosses, jnp.maximum(most, 0), most)


def _kinked(x, left, right):
    return jnp.where(x < 0, left * jnp.minimum(x, 0), right * jnp.maximum(x, 0))


class _LeakyRelu(AbstractActivation):
    def __call__(self, x, weights=None, /, alpha=0.01):
        return _kinked(x, alpha, 1)

    def image(self, low, high, weights=None, /, alpha=0.01):
        return _kinked_image(low, high, alpha, 1)

    def wedge(self, low, high, weights=None, /, alpha=0.01):
        return _single_chord(_kinked_wedge(low, high, alpha, 1), convex=alpha <= 1)


class _PRelu(AbstractActivation):
    def __call__(self, x, weights=None, /):
        return _kinked(x, weights, 1)

    def image(self, low, high, weights=None, /):
        return _kinked_image(low, high, weights, 1)

    def wedge(self, low, high, weights=None, /):
        return _kinked_wedge(low, high, weights, 1)


class _Abs(AbstractActivation):
    def __call__(self, x, weights=None, /):
        return jnp.abs(x)

    def image(self, low, high, weights=None, /):
        least = jnp.maximum(jnp.maximum(low, -high), 0)
        return least, jnp.maximum(jnp.abs(low), jnp.abs(high))

    def wedge(self, low, high, weights=None, /):
        return _single_chord(_kinked_wedge(low, high, -1, 1), convex=True)


def _single_chord(wedge, convex: bool) -> StraightWedge:
    """Writes the side without a kink, known to be one line, as one line."""
    if convex:
        return StraightWedge(wedge.below, _one_line(wedge.above))
    return StraightWedge(_one_line(wedge.below), wedge.above)


# -- two kinks: straight lines between two constants -----------------------------------------------


def _ramp(x, slope, offset, least, most):
    return jnp.minimum(jnp.maximum(slope * x + offset, least), most)


def _ramp_wedge(low, high, slope: float, offset: float, least: float, most: float):
    """The wedge of min(max(slope * x + offset, least), most) with a positive slope."""
    usable = hulls.usable(low, high)
    given = low, high
    low, high = (jnp.where(usable, x, 0) for x in given)
    eps = jnp.finfo(low.dtype).eps
    exact = slope == 1 and offset == 0
    slack = [0 if exact else 4 * eps * (abs(slope * x) + abs(offset)) for x in (low, high)]
    line_low, line_high = slope * low + offset, slope * high + offset
    # Rounding may only make entries look less stable than they are.
    under, over = line_high <= least - slack[1], line_low >= most + slack[0]
    clears = line_low >= least + slack[0]
    stays = line_high <= most - slack[1]
    knots = [jnp.clip((bound - offset) / slope, low, high) for bound in (least, most)]
    points = (low, *knots, high)
    values = tuple(_ramp(x, slope, offset, least, most) for x in points)
    # From each end, the chord to the far corner (or to the far end, where that corner is outside).
    below = hulls.secant_slope(points[1], values[1], high, values[3])
    above = hulls.secant_slope(low, values[0], points[2], values[2])
    sides = []
    for sign, chord, flat, near, far in (
        (1, below, least, clears, stays),
        (-1, above, most, stays, clears),
    ):
        chord_offset = hulls.supporting_offset(sign, chord, points, values)
        one_slope, one_offset = jnp.where(near, chord, 0), jnp.where(near, chord_offset, flat)
        two_slope, two_offset = jnp.where(far, slope, chord), jnp.where(far, offset, chord_offset)
        # A straight ramp within the bounds, and the constants.
        one_slope = jnp.where(near & far, slope, one_slope)
        one_offset = jnp.where(near & far, offset, one_offset)
        for stable, constant in ((under, least), (over, most)):
            one_slope, two_slope = (jnp.where(stable, 0, s) for s in (one_slope, two_slope))
            one_offset = jnp.where(stable, constant, one_offset)
            two_offset = jnp.where(stable, constant, two_offset)
        side = hulls.lines(sign, (one_slope, two_slope), (one_offset, two_offset), *given)
        sides.append(side)
    return StraightWedge(*sides)


def _mirrored_ramp_wedge(low, high, slope, offset, least, most):
    """The same for any slope: a falling ramp is a rising one in -x."""
    if slope >= 0:
        return _ramp_wedge(low, high, slope, offset, least, most)
    wedge = _ramp_wedge(-high, -low, -slope, offset, least, most)
    return eqx.tree_at(lambda w: (w.below.slopes, w.above.slopes), wedge, replace_fn=jnp.negative)


def _constant_wedge(low, high, value):
    zero = jnp.zeros_like(low)
    line = hulls.Line(zero, zero, zero + value)
    return StraightWedge(line, line)


class _Clip(AbstractActivation):
    def __call__(self, x, weights=None, /, low=-np.inf, high=np.inf):
        return jnp.minimum(jnp.maximum(x, low), high)

    def image(self, low, high, weights=None, /, **settings):
        return self(low, **settings), self(high, **settings)

    def wedge(self, low, high, weights=None, /, **settings):
        least, most = settings.get("low", -np.inf), settings.get("high", np.inf)
        if least >= most:
            return _constant_wedge(low, high, most)
        return _ramp_wedge(low, high, 1.0, 0.0, least, most)


class _HardSigmoid(AbstractActivation):
    def __call__(self, x, weights=None, /, alpha=0.2, beta=0.5):
        # With a zero slope, 0 * inf would not be a number.
        return _ramp(x if alpha else jnp.zeros_like(x), alpha, beta, 0, 1)

    def image(self, low, high, weights=None, /, alpha=0.2, beta=0.5):
        eps = jnp.finfo(low.dtype).eps
        values = []
        for sign in (-1, 1):
            ends = [
                alpha * x + beta + sign * 4 * eps * (abs(alpha * x) + abs(beta))
                for x in (low, high)
            ]
            best = jnp.minimum(*ends) if sign < 0 else jnp.maximum(*ends)
            values.append(jnp.clip(best, 0, 1))
        return values[0], values[1]

    def wedge(self, low, high, weights=None, /, alpha=0.2, beta=0.5):
        if alpha == 0:
            return _constant_wedge(low, high, min(max(beta, 0), 1))
        return _mirrored_ramp_wedge(low, high, alpha, beta, 0.0, 1.0)


# -- smooth functions ------------------------------------------------------------------------------
#
# Each pair is (function, derivative), written so that no digits cancel and nothing overflows.


def _differentiable(function, derivative) -> Callable:
    """The function, with its derivative as written instead of JAX's own."""
    wrapped = jax.custom_jvp(function)
    wrapped.defjvps(lambda t, _, x: derivative(x) * t)
    return wrapped


def _sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def _sigmoid_slope(x):
    return _sigmoid(x) * _sigmoid(-x)


def _tanh_slope(x):
    e = jnp.exp(-2 * jnp.abs(x))
    return 4 * e / (1 + e) ** 2


def _softplus(x):
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _softsign(x):
    size = jnp.abs(x)
    large = size > 1
    small = jnp.where(large, 1, size)
    big = jnp.where(large, size, 1)
    return jnp.sign(x) * jnp.where(large, 1 / (1 + 1 / big), small / (1 + small))


def _softsign_slope(x):
    return (1 / (1 + jnp.abs(x))) ** 2


# Below this, x times a tail is zero in any precision; above, it keeps inf * 0 away.
_TAIL = 2000.0
_ROOT_HALF = float(np.sqrt(0.5))


def _gelu(x):
    left = jnp.maximum(x, -_TAIL)
    return 0.5 * left * jax.scipy.special.erfc(-_ROOT_HALF * left)


def _gelu_slope(x):
    near = jnp.clip(x, -_TAIL, _TAIL)
    density = jnp.exp(-0.5 * near * near) * float(1 / np.sqrt(2 * np.pi))
    return 0.5 * jax.scipy.special.erfc(-_ROOT_HALF * near) + near * density


def _gelu_size(x, value):
    # The tail is exp(-x^2 / 2), and the exponent's rounding counts as often as it is large.
    left = jnp.clip(x, -_TAIL, 0)
    return jnp.abs(value) * (1 + left * left)


_TANH_SCALE = float(np.sqrt(8 / np.pi))
_TANH_CUBE = 0.044715


def _gelu_tanh(x):
    # x (1 + tanh(y)) / 2 = x sigmoid(2 y)
    left = jnp.maximum(x, -_TAIL)
    return left * _sigmoid(_gelu_tanh_inner(left))


def _gelu_tanh_inner(x):
    near = jnp.clip(x, -_TAIL, _TAIL)
    return _TANH_SCALE * (near + _TANH_CUBE * near**3)


def _gelu_tanh_slope(x):
    near = jnp.clip(x, -_TAIL, _TAIL)
    y = _gelu_tanh_inner(near)
    inner = _TANH_SCALE * (1 + 3 * _TANH_CUBE * near * near)
    return _sigmoid(y) + near * inner * _sigmoid_slope(y)


def _gelu_tanh_size(x, value):
    return jnp.abs(value) * (1 + jnp.maximum(-_gelu_tanh_inner(x), 0))


def _silu(x):
    return jnp.maximum(x, -_TAIL) * _sigmoid(x)


def _silu_slope(x):
    near = jnp.clip(x, -_TAIL, _TAIL)
    return _sigmoid(near) + near * _sigmoid_slope(near)


def _mish_gate(x):
    """tanh(log(1 + exp(x))) and its derivative."""
    w = jnp.exp(-jnp.abs(x))
    numerator = jnp.where(x < 0, w * (2 + w), 1 + 2 * w)
    rest = jnp.where(x < 0, 2, 2 * w * w)
    gate = numerator / (numerator + rest)
    # 4 e^x (1 + e^x) / (e^2x + 2 e^x + 2)^2, divided by e^4x on the right
    top = jnp.where(x < 0, w * (1 + w), w * w * (1 + w))
    return gate, 4 * top / (numerator + rest) ** 2


def _mish(x):
    return jnp.maximum(x, -_TAIL) * _mish_gate(x)[0]


def _mish_slope(x):
    near = jnp.clip(x, -_TAIL, _TAIL)
    gate, slope = _mish_gate(near)
    return gate + near * slope


def _make(function, derivative, **more) -> Profile:
    return Profile(_differentiable(function, derivative), derivative, **more)


def _exp_reach(dtype):
    return -np.inf, float(np.log(jnp.finfo(dtype).max)) - 2


def _square_reach(dtype):
    most = float(np.sqrt(jnp.finfo(dtype).max)) / 4
    return -most, most


_PROFILES = {
    "softplus": _make(_softplus, _sigmoid),
    "exp": _make(jnp.exp, jnp.exp, reach=_exp_reach),
    "square": _make(jnp.square, lambda x: 2 * x, reach=_square_reach),
    "sigmoid": _make(_sigmoid, _sigmoid_slope, knots=(0.0,)),
    "tanh": _make(jnp.tanh, _tanh_slope, knots=(0.0,)),
    "softsign": _make(_softsign, _softsign_slope, knots=(0.0,)),
    "gelu": _make(
        _gelu, _gelu_slope, knots=(-float(np.sqrt(2)), float(np.sqrt(2))), bend=-1, size=_gelu_size
    ),
    "gelu_tanh": _make(
        _gelu_tanh,
        _gelu_tanh_slope,
        knots=(-1.4185040087908284, 1.4185040087908284),
        bend=-1,
        size=_gelu_tanh_size,
    ),
    "silu": _make(_silu, _silu_slope, knots=(-2.3993572805154677, 2.3993572805154677), bend=-1),
    "mish": _make(_mish, _mish_slope, knots=(-2.2563763963607931, 1.4905711794854285), bend=-1),
}

# Where the function is least, and its value there.
_MINIMA = {
    "square": (0.0, 0.0),
    "gelu": (-0.75179152469356446, -0.16997120747990366),
    "gelu_tanh": (-0.75246142207101626, -0.17004075057125405),
    "silu": (-1.2784645427610738, -0.27846454276107380),
    "mish": (-1.1924312145154952, -0.30884341301725041),
    "hard_swish": (-1.5, -0.375),
}

# No value lies outside these, however it was rounded.
_RANGES = {
    "softplus": (0, np.inf),
    "exp": (0, np.inf),
    "square": (0, np.inf),
    "sigmoid": (0, 1),
    "tanh": (-1, 1),
    "softsign": (-1, 1),
}


def _image(profile, low, high, minimum=None, span=(-np.inf, np.inf)):
    """The range of a function that rises (or falls and then rises), rounded outwards."""
    ends = profile.at(low, high)
    least = jnp.minimum(*(end.value - end.rounding for end in ends))
    most = jnp.maximum(*(end.value + end.rounding for end in ends))
    if minimum is not None:
        where, value = minimum
        bottom = value - 4 * jnp.finfo(low.dtype).eps * abs(value)
        # Next to the minimum the function is flat: a rounded place makes no difference.
        inside = (low <= where + 1e-6) & (high >= where - 1e-6)
        least = jnp.where(inside, jnp.minimum(least, bottom), jnp.maximum(least, bottom))
    return jnp.maximum(least, span[0]), jnp.minimum(most, span[1])


class _Smooth(AbstractActivation):
    """A function with a profile and no settings."""

    def __init__(self, profile: Profile, minimum=None, span=(-np.inf, np.inf)):
        self.profile, self.minimum, self.span = profile, minimum, span

    def __call__(self, x, weights=None, /):
        return self.profile.function(x)

    def image(self, low, high, weights=None, /):
        return _image(self.profile, low, high, self.minimum, self.span)

    def wedge(self, low, high, weights=None, /):
        return HullWedge(*hulls.hull(self.profile, low, high))


# -- a line on the right, an exponential on the left -----------------------------------------------


@functools.cache
def _exponential(size: float, unit: float, right: float) -> tuple[Profile, Profile]:
    """size * (exp(x / unit) - 1) for x < 0, right * x for x > 0; and the same without a kink."""

    def function(slope):
        def value(x):
            return jnp.where(
                x > 0, slope * jnp.maximum(x, 0), size * jnp.expm1(jnp.minimum(x, 0) / unit)
            )

        def derivative(x):
            return jnp.where(x > 0, slope, size / unit * jnp.exp(jnp.minimum(x, 0) / unit))

        return value, derivative

    bend = 1 if size >= 0 else -1
    kinked = _make(*function(right), knots=(0.0,), bend=bend)
    smooth = _make(*function(size / unit), bend=bend)
    return kinked, smooth


class _Exponential(AbstractActivation):
    """elu, selu and celu; `numbers` turns the settings into (size, unit, right)."""

    def __init__(self, numbers: Callable):
        self.numbers = numbers

    def __call__(self, x, weights=None, /, **settings):
        return _exponential(*self.numbers(**settings))[0].function(x)

    def image(self, low, high, weights=None, /, **settings):
        size, unit, right = self.numbers(**settings)
        profile = _exponential(size, unit, right)[0]
        least, most = _image(profile, low, high)
        # Both parts are monotone, so values lie between those at the ends and zero.
        crosses = (low < 0) & (high > 0)
        least = jnp.where(crosses, jnp.minimum(least, 0), least)
        return least, jnp.where(crosses, jnp.maximum(most, 0), most)

    def wedge(self, low, high, weights=None, /, **settings):
        size, unit, right = self.numbers(**settings)
        kinked, smooth = _exponential(size, unit, right)
        sign = kinked.bend  # the left part is convex in this direction
        stable = low >= 0
        jump = sign * (right - size / unit)
        if jump >= 0:  # convex everywhere, perhaps with a kink
            inner = hulls.curve(smooth, sign, low, high)
            if jump == 0:
                first = hulls.through_origin(inner, stable, right)
            else:
                # Not infinite where bounds are: weights of zero could not be multiplied with it.
                margin = jnp.minimum(inner.margin, jnp.finfo(low.dtype).max)
                inner = eqx.tree_at(lambda c: c.margin, inner, margin)
                middle = low / 2 + high / 2
                both = jnp.stack([right * middle, inner(middle)], axis=-1)
                usable = hulls.usable(low, high)[..., None]
                weights = pieces.exact_weights(jnp.where(usable, sign * both, 0))
                first = hulls.Kinked(inner, jnp.full_like(low, right), weights, sign)
            line = hulls.chord(kinked, -sign, low, high)
            zero = jnp.zeros_like(low)
            second = hulls.Line(
                jnp.where(stable, right, line.slope),
                jnp.where(stable, zero, line.anchor),
                jnp.where(stable, zero, line.value),
            )
        else:
            (first,) = hulls.curves(kinked, (sign,), low, high)
            first = hulls.through_origin(first, stable, right)
            second = hulls.corner_hull(kinked, -sign, low, high, 0.0, right=right)
        return HullWedge(first, second) if sign > 0 else HullWedge(second, first)


def _elu_numbers(alpha=1.0):
    return float(alpha), 1.0, 1.0


def _selu_numbers(alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return float(gamma) * float(alpha), 1.0, float(gamma)


def _celu_numbers(alpha=1.0):
    if not alpha > 0:
        raise ProblemError(f"celu needs alpha > 0, but alpha is {alpha}.")
    return float(alpha), float(alpha), 1.0


# -- hard swish --------------------------------------------------------------------------------


def _hard_swish(x):
    near = jnp.clip(x, -3, 3)
    return jnp.where(x > 3, x, near * (near + 3) / 6)


def _hard_swish_slope(x):
    near = jnp.clip(x, -3, 3)
    return jnp.where(x < -3, 0, jnp.where(x > 3, 1, near / 3 + 0.5))


class _HardSwish(AbstractActivation):
    """Zero, a parabola on [-3, 3], the identity: both joints are concave kinks."""

    profile = _make(
        _hard_swish,
        _hard_swish_slope,
        knots=(-3.0, 3.0),
        bend=-1,
    )

    def __call__(self, x, weights=None, /):
        return self.profile.function(x)

    def image(self, low, high, weights=None, /):
        least, most = _image(self.profile, low, high, _MINIMA["hard_swish"])
        # Between -3 and 0 values are negative, before that zero.
        return least, jnp.where((low <= -3) & (high <= 0), 0, most)

    def wedge(self, low, high, weights=None, /):
        (below,) = hulls.curves(self.profile, (1,), low, high)
        below = hulls.through_origin(below, low >= 3, 1)
        below = hulls.through_origin(below, high <= -3, 0)
        # At most one of the joints is a corner from above: beyond both, the chord is above them.
        first = hulls.corner_hull(self.profile, -1, low, high, -3.0, left=0.0)
        last = hulls.corner_hull(self.profile, -1, low, high, 3.0, right=1.0)
        above = jax.tree.map(lambda a, b: jnp.where((high <= 3)[..., None], a, b), first, last)
        return HullWedge(below, above)


# -- finding and registering -----------------------------------------------------------------------

_REGISTERED: dict[str, AbstractActivation] = {
    "relu": _Relu(),
    "leaky_relu": _LeakyRelu(),
    "prelu": _PRelu(),
    "abs": _Abs(),
    "clip": _Clip(),
    "hard_sigmoid": _HardSigmoid(),
    "hard_swish": _HardSwish(),
    "elu": _Exponential(_elu_numbers),
    "selu": _Exponential(_selu_numbers),
    "celu": _Exponential(_celu_numbers),
    **{
        kind: _Smooth(profile, _MINIMA.get(kind), _RANGES.get(kind, (-np.inf, np.inf)))
        for kind, profile in _PROFILES.items()
    },
}


def find(kind: str) -> AbstractActivation:
    """The activation that is registered under a name."""
    if kind not in _REGISTERED:
        raise ProblemError(f"Unknown activation '{kind}'; known are {', '.join(_REGISTERED)}.")
    return _REGISTERED[kind]


def _name_is_free(name: str, replace: bool):
    if name in _REGISTERED and not replace:
        raise ProblemError(
            f"An activation '{name}' is already registered; pass replace=True to replace it."
        )


def register(
    name: str,
    function: Callable,
    derivative: Callable | None = None,
    inflections: Sequence[float] = (),
    *,
    replace: bool = False,
) -> None:
    """Registers a function of one number that bends at most twice; its hulls are then exact.

    The function must work entry by entry on arrays, in JAX, and be finite at least on [-20, 20].
    What you give is checked by sampling, which finds mistakes but proves nothing: that the
    curvature changes sign at the inflections only is for you to know.

    Args:
        name: what networks call it.
        function: the function.
        derivative: its derivative, if you have a better one than JAX. At a kink it must lie
            between the slopes on both sides.
        inflections: where the function changes between convex and concave, in order; at most two.
            These points, and only these, may be kinks against the curvature around them.
        replace: whether a function of the same name may be replaced.

    Raises:
        ProblemError: if the name is taken, or if what was given does not fit together.

    >>> register("doc_logcosh", lambda x: jnp.logaddexp(x, -x))
    >>> _, most = find("doc_logcosh").image(jnp.array(-1.0), jnp.array(0.0))
    >>> round(float(most), 3)
    1.127
    """
    _name_is_free(name, replace)
    knots = tuple(float(x) for x in inflections)
    if len(knots) > 2:
        raise ProblemError(
            f"Activation '{name}' has {len(knots)} inflections, but exact hulls are made for at "
            "most two. Register a relaxation of it instead (register_relaxation)."
        )
    if not all(np.isfinite(knots)) or any(a >= b for a, b in itertools.pairwise(knots)):
        raise ProblemError(f"The inflections of '{name}' must be finite and in order: {knots}.")
    slope = derivative or _autodiff(function)
    with jax.enable_x64(True):
        profile = _survey(name, function, slope, derivative is not None, knots)
        activation = _Registered(profile, _stationary(profile))
        _check_hull(name, activation)
    _REGISTERED[name] = activation


def register_relaxation(
    name: str,
    function: Callable,
    lower: Callable,
    upper: Callable,
    image: Callable,
    *,
    replace: bool = False,
) -> None:
    """Registers a function of one number with a relaxation of your own.

    Soundness is then yours: every bound that is proven with this activation is only as true as the
    relaxation. What you give is checked by sampling, which finds mistakes but proves nothing.

    Args:
        name: what networks call it.
        function: the function, entry by entry on arrays, in JAX.
        lower: (x, low, high) -> a convex function of x below the function on [low, high].
        upper: (x, low, high) -> a concave one above it.
        image: (low, high) -> (least, most), which contain the values on [low, high].
        replace: whether a function of the same name may be replaced.

    Raises:
        ProblemError: if the name is taken, or if a sample contradicts what was given.
    """
    _name_is_free(name, replace)
    activation = _Relaxed(function, lower, upper, image)
    with jax.enable_x64(True):
        _check_hull(name, activation)
    _REGISTERED[name] = activation


class _Registered(_Smooth):
    """A registered function; `stationary` are the points where it may turn."""

    def __init__(self, profile, stationary):
        super().__init__(profile)
        self.stationary = stationary

    def image(self, low, high, weights=None, /):
        points = [jnp.clip(jnp.asarray(x, low.dtype), low, high) for x in self.stationary]
        at = self.profile.at(low, high, *points)
        least, most = at[0].value - at[0].rounding, at[0].value + at[0].rounding
        for other in at[1:]:
            least = jnp.minimum(least, other.value - other.rounding)
            most = jnp.maximum(most, other.value + other.rounding)
        return least, most


class _RelaxedWedge(AbstractWedge):
    low: Any
    high: Any
    functions: tuple[Callable, Callable] = eqx.field(static=True)

    def lower(self, x):
        return self.functions[0](x, self.low, self.high)

    def upper(self, x):
        return self.functions[1](x, self.low, self.high)

    def slopes(self):
        middle = self.low / 2 + self.high / 2
        exact = pieces.exactly_sloped(jnp.zeros((), middle.dtype))
        below, above = (
            pieces.evaluate(side, (middle,), exact)[1] for side in (self.lower, self.upper)
        )
        return below, above


class _Relaxed(AbstractActivation):
    def __init__(self, function, lower, upper, image):
        self.function, self.functions, self.bounds = function, (lower, upper), image

    def __call__(self, x, weights=None, /):
        return self.function(x)

    def image(self, low, high, weights=None, /):
        return self.bounds(low, high)

    def wedge(self, low, high, weights=None, /):
        return _RelaxedWedge(low, high, self.functions)


# -- checks of what users register -----------------------------------------------------------------


def _autodiff(function) -> Callable:
    def derivative(x):
        return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]

    return derivative


def _reach(values) -> float:
    """The largest power of ten, from 20 on, up to which samples are finite."""
    best = 20.0
    for size in (100.0, 1e3, 1e4):
        if not np.all(np.isfinite(values(size))):
            break
        best = size
    return best


def _survey(name, function, slope, own, knots) -> Profile:
    """Finds out how the function bends between its knots."""

    def at(x):
        x = jnp.asarray(x, float)
        try:
            parts = function(x), slope(x)
        except Exception as error:
            raise ProblemError(f"Activation '{name}' fails on an array: {error}") from error
        for part, what in zip(parts, ("function", "derivative"), strict=True):
            if jnp.shape(part) != x.shape:
                raise ProblemError(
                    f"The {what} of '{name}' must work entry by entry: an array of shape {x.shape} "
                    f"gave one of shape {jnp.shape(part)}."
                )
        return tuple(np.asarray(part) for part in parts)

    low = -_reach(lambda size: at([-size]))
    high = _reach(lambda size: at([size]))
    if knots and (knots[0] <= low or knots[-1] >= high):
        raise ProblemError(f"The function '{name}' is not finite around its inflections {knots}.")
    bends = []
    for start, end in itertools.pairwise((low, *knots, high)):
        grid = np.sinh(np.linspace(np.arcsinh(start), np.arcsinh(end), 2001))
        near = np.linspace(max(start, -20), min(end, 20), 2001) if start < 20 and end > -20 else []
        x = np.unique(np.concatenate([grid, near]))[1:-1]  # knots may be kinks
        values, slopes = at(x)
        if not (np.all(np.isfinite(values)) and np.all(np.isfinite(slopes))):
            raise ProblemError(f"Activation '{name}' must be finite on [{low:g}, {high:g}].")
        if own:
            _check_derivative(name, x, values, slopes)
        steps = np.diff(slopes)
        steep = np.abs(slopes)
        central = np.max(steep[np.abs(x) <= 20], initial=0)
        noise = 1e-9 * np.maximum(steep[1:], steep[:-1]) + 1e-13 * central
        rises, falls = np.any(steps > noise), np.any(steps < -noise)
        if rises and falls:
            turn = x[
                np.argmax(np.diff(np.sign(np.where(np.abs(steps) > noise, steps, 0))) != 0) + 1
            ]
            raise ProblemError(
                f"The derivative of '{name}' both rises and falls on ({start:g}, {end:g}), near "
                f"x = {turn:g}: the function is neither convex nor concave there. Give all its "
                "inflections (at most two), or register a relaxation."
            )
        bends.append(int(rises) - int(falls))
    bend = _alternate(name, knots, bends)

    def size(x, value):  # nothing is known about the formula, but that x itself may be rounded
        return jnp.abs(value) + jnp.abs(x * slope(x))

    profile = _make(function, slope, knots=knots, bend=bend, size=size)
    if len(knots) < 2:
        return profile
    return dataclasses.replace(profile, bitangent=_bitangent(profile, low, high))


def _check_derivative(name, x, values, slopes):
    steps, runs = np.diff(values), np.diff(x)
    # A mean slope lies between the derivatives at the ends, as these are monotone on the grid.
    least, most = np.minimum(slopes[1:], slopes[:-1]), np.maximum(slopes[1:], slopes[:-1])
    noise = 1e-9 * (1 + np.abs(values[1:]) + np.max(np.abs(slopes)) * runs) / runs * 1e-3
    noise = noise + 1e-6 * np.max(np.abs(slopes))
    off = np.maximum(steps / runs - most, least - steps / runs) - noise
    if np.any(off > 0):
        k = int(np.argmax(off))
        raise ProblemError(
            f"The derivative of '{name}' does not match the function near x = {x[k]:g}: it says "
            f"{slopes[k]:g}, but the function's slope is {steps[k] / runs[k]:g}."
        )


def _alternate(name, knots, bends) -> int:
    """The first region's bend: regions must alternate, and straight ones fit either way."""
    for bend in (1, -1):
        wanted = [bend * (-1) ** k for k in range(len(bends))]
        if all(b in (0, w) for b, w in zip(bends, wanted, strict=True)):
            return bend
    words = {1: "convex", -1: "concave", 0: "straight"}
    raise ProblemError(
        f"Activation '{name}' is {', '.join(words[b] for b in bends)} between the inflections "
        f"{knots}: it must change between convex and concave at each."
    )


def _zero(function, low, high) -> float | None:
    """Where a monotone function of a float is zero, or None if its sign does not change."""
    below, above = function(low), function(high)
    if not below * above < 0:
        return None
    while low < (middle := (low + high) / 2) < high:
        if (function(middle) < 0) == (below < 0):
            low = middle
        else:
            high = middle
    return middle


def _host(function) -> Callable[[float], float]:
    compiled = jax.jit(function)
    return lambda x: float(compiled(jnp.asarray(x, float)))


_FAR = 1e4


def _regions(profile):
    nudged = [
        (knot - 1e-13 * (1 + abs(knot)), knot + 1e-13 * (1 + abs(knot))) for knot in profile.knots
    ]
    ends = [-_FAR, *(x for pair in nudged for x in pair), _FAR]
    return list(zip(ends[::2], ends[1::2], strict=True))


def _stationary(profile: Profile) -> tuple[float, ...]:
    """Where the function may turn: zeros of the derivative, and kinks."""
    slope = _host(profile.derivative)
    zeros = [_zero(slope, low, high) for low, high in _regions(profile)]
    return (*profile.knots, *(x for x in zeros if x is not None))


def _bitangent(profile: Profile, low, high) -> tuple[float, float] | None:
    """The line that touches both outer regions, found by its slope."""
    f, d = _host(profile.function), _host(profile.derivative)
    sign = profile.bend
    (_, first), _, (last, _) = _regions(profile)

    def places(m):
        one = _zero(lambda x: d(x) - m, low, first)
        two = _zero(lambda x: d(x) - m, last, high)
        return (low if one is None else one), (high if two is None else two)

    def gap(m):
        one, two = places(m)
        return sign * (f(one) - m * one - f(two) + m * two)

    slopes = [sorted((d(low), d(first))), sorted((d(last), d(high)))]
    least, most = max(slopes[0][0], slopes[1][0]), min(slopes[0][1], slopes[1][1])
    room = 1e-9 * (most - least)
    m = _zero(gap, least + room, most - room) if room > 0 else None
    return None if m is None else places(m)


def _check_hull(name: str, activation: AbstractActivation):
    """Looks for points that contradict a relaxation."""
    random = np.random.default_rng(0)
    middle, width = random.normal(size=256) * 3, np.abs(random.normal(size=256)) * 4
    width[:8] = 0
    low, high = jnp.asarray(middle - width / 2), jnp.asarray(middle + width / 2)
    x = low + (high - low) * jnp.linspace(0, 1, 41)[:, None]

    @jax.jit
    def everything(low, high, x):
        wedge = activation.wedge(low, high)
        sides = [
            jax.vmap(lambda x, side=side: jax.jvp(side, (x,), (jnp.ones_like(x),)))(x)
            for side in (wedge.lower, wedge.upper)
        ]
        return sides, activation.image(low, high), activation(x)

    try:
        ((below, left), (above, right)), (least, most), value = everything(low, high, x)
    except Exception as error:
        raise ProblemError(f"The relaxation of '{name}' fails on arrays: {error}") from error
    slack = 1e-9 * (1 + jnp.abs(value))
    shape = value.shape
    for part, what in ((below, "lower"), (above, "upper"), (least, "image"), (most, "image")):
        if jnp.shape(part) not in (shape, shape[1:]):
            raise ProblemError(
                f"The {what} of '{name}' must work entry by entry: it gave shape "
                f"{jnp.shape(part)[-1:]} for {shape[-1:]}."
            )

    def chords(side):
        return side[1:-1] - (side[:-2] + side[2:]) / 2

    faults = {
        "lower is not finite": ~jnp.isfinite(below) | ~jnp.isfinite(left),
        "upper is not finite": ~jnp.isfinite(above) | ~jnp.isfinite(right),
        "lower is above the function": ~(below <= value + slack),
        "upper is below the function": ~(above >= value - slack),
        "lower is not convex": chords(below) > slack[1:-1],
        "upper is not concave": chords(above) < -slack[1:-1],
        "the image misses a value": ~((least - slack <= value) & (value <= most + slack)),
    }
    for fault, found in faults.items():
        if bool(jnp.any(found)):
            entry = int(jnp.argmax(jnp.any(found, axis=0)))
            place = x[int(jnp.argmax(found[:, entry])), entry]
            raise ProblemError(
                f"Activation '{name}' on [{float(low[entry]):g}, {float(high[entry]):g}]: {fault}, "
                f"near x = {float(place):g}."
            )
