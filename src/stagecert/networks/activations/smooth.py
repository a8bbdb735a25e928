"""Smooth activations, powers, and what is smooth but for a joint: ELU and hard swish."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.errors import ProblemError
from stagecert.networks.activations import hulls
from stagecert.networks.activations.hulls import Profile
from stagecert.networks.activations.wedges import AbstractActivation, HullWedge

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


def _erf_slope(x):
    return float(2 / np.sqrt(np.pi)) * jnp.exp(-x * x)


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
# The factors of the cube that the hull and the image of gelu_tanh hold for: models store constants
# in float32, so that theirs is not quite the one of the definition.
TANH_CUBES = (_TANH_CUBE - 1e-8, _TANH_CUBE + 1e-8)
# x sigmoid(s (x + c x^3)) with s = sqrt(8 / pi) has the derivative s x^4 sigmoid'(...) in c, which
# is below 0.6 for all x and all c >= 0.0447 (tested): 1e-8 in c is less than this in the value.
_TANH_ROOM = 6.5e-9


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


def make_profile(function, derivative, **more) -> Profile:
    """A profile whose function is differentiated as written."""
    return Profile(_differentiable(function, derivative), derivative, **more)


def _exp_reach(dtype):
    return -np.inf, float(np.log(jnp.finfo(dtype).max)) - 2


def _square_reach(dtype):
    most = float(np.sqrt(jnp.finfo(dtype).max)) / 4
    return -most, most


PROFILES = {
    "softplus": make_profile(_softplus, _sigmoid),
    "exp": make_profile(jnp.exp, jnp.exp, reach=_exp_reach),
    "square": make_profile(jnp.square, lambda x: 2 * x, reach=_square_reach),
    "sigmoid": make_profile(_sigmoid, _sigmoid_slope, knots=(0.0,)),
    "erf": make_profile(jax.scipy.special.erf, _erf_slope, knots=(0.0,)),
    "tanh": make_profile(jnp.tanh, _tanh_slope, knots=(0.0,)),
    "softsign": make_profile(_softsign, _softsign_slope, knots=(0.0,)),
    "gelu": make_profile(
        _gelu, _gelu_slope, knots=(-float(np.sqrt(2)), float(np.sqrt(2))), bend=-1, size=_gelu_size
    ),
    "gelu_tanh": make_profile(
        _gelu_tanh,
        _gelu_tanh_slope,
        knots=(-1.4185040087908284, 1.4185040087908284),
        bend=-1,
        size=_gelu_tanh_size,
    ),
    "silu": make_profile(
        _silu, _silu_slope, knots=(-2.3993572805154677, 2.3993572805154677), bend=-1
    ),
    "mish": make_profile(
        _mish, _mish_slope, knots=(-2.2563763963607931, 1.4905711794854285), bend=-1
    ),
}

# Where the function is least, and its value there.
MINIMA = {
    "square": (0.0, 0.0),
    "gelu": (-0.75179152469356446, -0.16997120747990366),
    "gelu_tanh": (-0.75246142207101626, -0.17004075057125405),
    "silu": (-1.2784645427610738, -0.27846454276107380),
    "mish": (-1.1924312145154952, -0.30884341301725041),
    "hard_swish": (-1.5, -0.375),
}

ROOMS = {"gelu_tanh": _TANH_ROOM}

# No value lies outside these, however it was rounded.
RANGES = {
    "softplus": (0, np.inf),
    "exp": (0, np.inf),
    "square": (0, np.inf),
    "sigmoid": (0, 1),
    "tanh": (-1, 1),
    "erf": (-1, 1),
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


class Smooth(AbstractActivation):
    """A function with a profile and no settings.

    Hull and image also hold for every function that is nowhere further from it than `room`.
    """

    def __init__(self, profile: Profile, minimum=None, span=(-np.inf, np.inf), room: float = 0):
        self.profile, self.minimum, self.span, self.room = profile, minimum, span, room

    def __call__(self, x, weights=None, /):
        return self.profile.function(x)

    def image(self, low, high, weights=None, /):
        least, most = _image(self.profile, low, high, self.minimum, self.span)
        return least - self.room, most + self.room

    def wedge(self, low, high, weights=None, /):
        sides = hulls.hull(self.profile, low, high)
        return HullWedge(*(hulls.moved_out(side, self.room) for side in sides))


# -- powers ----------------------------------------------------------------------------------------

MOST_EXPONENT = 12


@functools.cache
def _power(exponent: int) -> Profile:
    def function(x):
        return x**exponent

    def derivative(x):
        return exponent * x ** (exponent - 1)

    if exponent % 2:
        return make_profile(function, derivative, knots=(0.0,), bend=-1)
    return make_profile(function, derivative)


class Power(AbstractActivation):
    """x to the power of a whole number from three on."""

    def _profile(self, exponent: float) -> Profile:
        if not (exponent == int(exponent) and 3 <= exponent <= MOST_EXPONENT):
            raise ProblemError(
                f"Powers have a whole exponent from 3 to {MOST_EXPONENT}, not {exponent}."
            )
        return _power(int(exponent))

    def __call__(self, x, weights=None, /, exponent=3.0):
        return self._profile(exponent).function(x)

    def image(self, low, high, weights=None, /, exponent=3.0):
        minimum = None if exponent % 2 else (0.0, 0.0)
        least, most = _image(self._profile(exponent), low, high, minimum)
        # Where it overflows, infinity less infinity was computed.
        return jnp.where(jnp.isnan(least), -jnp.inf, least), jnp.where(
            jnp.isnan(most), jnp.inf, most
        )

    def wedge(self, low, high, weights=None, /, exponent=3.0):
        profile = self._profile(exponent)
        # What would overflow is as good as unbounded.
        most = float(jnp.finfo(low.dtype).max) ** (1 / exponent) / 8
        low = jnp.where(low > -most, low, -jnp.inf)
        high = jnp.where(high < most, high, jnp.inf)
        return HullWedge(*hulls.hull(profile, low, high))


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
    kinked = make_profile(*function(right), knots=(0.0,), bend=bend)
    smooth = make_profile(*function(size / unit), bend=bend)
    return kinked, smooth


class Exponential(AbstractActivation):
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


def elu_numbers(alpha=1.0):
    return float(alpha), 1.0, 1.0


def selu_numbers(alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return float(gamma) * float(alpha), 1.0, float(gamma)


def celu_numbers(alpha=1.0):
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


class HardSwish(AbstractActivation):
    """Zero, a parabola on [-3, 3], the identity: both joints are concave kinks."""

    profile = make_profile(
        _hard_swish,
        _hard_swish_slope,
        knots=(-3.0, 3.0),
        bend=-1,
    )

    def __call__(self, x, weights=None, /):
        return self.profile.function(x)

    def image(self, low, high, weights=None, /):
        least, most = _image(self.profile, low, high, MINIMA["hard_swish"])
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
