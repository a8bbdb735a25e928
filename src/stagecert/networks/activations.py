"""Activations: their values, their ranges, and the tightest convex wedge around each."""

import abc
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.errors import ProblemError
from stagecert.networks import hulls
from stagecert.networks.hulls import AbstractSide, Profile


class AbstractWedge(eqx.Module):
    """A convex function below and a concave one above an activation on an interval, entrywise."""

    @abc.abstractmethod
    def lower(self, x):
        """Convex, and below the activation on the interval."""

    @abc.abstractmethod
    def upper(self, x):
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


# -- one kink at zero ------------------------------------------------------------------------------


class LineWedge(AbstractWedge):
    """lower = max over k of low_slopes * x + low_offsets; upper = one line."""

    low_slopes: Any
    low_offsets: Any
    first: Any
    slope: Any
    offset: Any

    def lower(self, x):
        return pieces.max(x[..., None] * self.low_slopes + self.low_offsets)

    def upper(self, x):
        return self.slope * x + self.offset

    def slopes(self):
        return (self.first,), ()


class _Relu(AbstractActivation):
    def __call__(self, x, weights=None, /):
        return jnp.maximum(x, 0)

    def image(self, low, high, weights=None, /):
        return jnp.maximum(low, 0), jnp.maximum(high, 0)

    def wedge(self, low, high, weights=None, /):
        on, off = low >= 0, high <= 0
        unstable = ~on & ~off
        width = jnp.where(unstable, high - low, 1)
        known = jnp.isfinite(width)
        slope = jnp.where(unstable, high / jnp.where(known, width, jnp.inf), on)
        # The larger offset holds at both ends however the slope was rounded; the last term covers
        # the roundings of the line itself.
        offset = jnp.maximum(-slope * low, high - slope * high)
        offset = offset + 8 * jnp.finfo(low.dtype).eps * high
        offset = jnp.where(unstable, jnp.where(known, offset, jnp.inf), 0)
        slope = jnp.where(known, slope, 0)
        low_slopes = jnp.stack([~off, on], axis=-1).astype(low.dtype)
        first = jnp.where(high > -low, 1.0, 0.0)
        first = jnp.stack([first, 1 - first], axis=-1).astype(low.dtype)
        return LineWedge(low_slopes, jnp.zeros_like(low_slopes), first, slope, offset)


def _kinked_wedge(low, high, left, right) -> AbstractWedge:
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
    return HullWedge(*sides)


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


def _single_chord(wedge, convex: bool) -> AbstractWedge:
    """Writes the side without a kink, known to be one line, as one line."""
    if convex:
        return HullWedge(wedge.below, _one_line(wedge.above))
    return HullWedge(_one_line(wedge.below), wedge.above)


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
    return HullWedge(*sides)


def _mirrored_ramp_wedge(low, high, slope, offset, least, most):
    """The same for any slope: a falling ramp is a rising one in -x."""
    if slope >= 0:
        return _ramp_wedge(low, high, slope, offset, least, most)
    wedge = _ramp_wedge(-high, -low, -slope, offset, least, most)
    return eqx.tree_at(
        lambda w: (w.below.slopes, w.above.slopes),
        wedge,
        (-wedge.below.slopes, -wedge.above.slopes),
    )


def _constant_wedge(low, high, value):
    zero = jnp.zeros_like(low)
    line = hulls.Line(zero, zero, zero + value)
    return HullWedge(line, line)


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
        return _ramp(x, alpha, beta, 0, 1)

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


def _gelu_size(x):
    # The tail is exp(-x^2 / 2), and the exponent's rounding counts as often as it is large.
    left = jnp.clip(x, -_TAIL, 0)
    return jnp.abs(_gelu(x)) * (1 + left * left)


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


def _gelu_tanh_size(x):
    return jnp.abs(_gelu_tanh(x)) * (1 + jnp.maximum(-_gelu_tanh_inner(x), 0))


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


def _log_reach(dtype):
    return float(np.log(jnp.finfo(dtype).max)) - 2


def _root_reach(dtype):
    return float(np.sqrt(jnp.finfo(dtype).max)) / 4


_PROFILES = {
    "softplus": _make(_softplus, _sigmoid),
    "exp": _make(jnp.exp, jnp.exp, reach=_log_reach),
    "square": _make(jnp.square, lambda x: 2 * x, reach=_root_reach),
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
    ends = [(profile.function(x), profile.rounding(x)) for x in (low, high)]
    least = jnp.minimum(*(value - rounding for value, rounding in ends))
    most = jnp.maximum(*(value + rounding for value, rounding in ends))
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
        return HullWedge(*(hulls.hull(self.profile, sign, low, high) for sign in (1, -1)))


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
                middle = low / 2 + high / 2
                both = jnp.stack([right * middle, inner(middle)], axis=-1)
                usable = hulls.usable(low, high)[..., None]
                weights = pieces.exact_weights(jnp.where(usable, sign * both, 0))
                first = hulls.Kinked(inner, jnp.asarray(right, low.dtype), weights, sign)
            line = hulls.chord(kinked, -sign, low, high)
            zero = jnp.zeros_like(low)
            second = hulls.Line(
                jnp.where(stable, right, line.slope),
                jnp.where(stable, zero, line.anchor),
                jnp.where(stable, zero, line.value),
            )
        else:
            first = hulls.through_origin(hulls.hull(kinked, sign, low, high), stable, right)
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
        below = hulls.hull(self.profile, 1, low, high)
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
