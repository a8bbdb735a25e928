"""Constants that importers compute: exact where float64 can hold them, intervals where it cannot.

A constant is a NumPy array, whose numbers are meant as they are, or an `Enclosure` of numbers that
no float64 is. Arithmetic here loses nothing: a result is an array only if it is exact, which is
found out by error-free transformations.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from flint import arb, ctx, fmpq

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
# Relative errors of weights, in units of EPS, that operations know (`loose`). They are few, because
# each is compiled for itself.
_LOOSE = (4, 64, 1024)
# Numbers of moderate size: products of two are exact sums of two numbers.
_LEAST, _MOST = 2.0**-900, 2.0**900
# More entries than this take too long one by one.
_SLOW = 2**16
_PRECISION = 160


class Refused(Exception):
    """Why something cannot be converted; the text continues the operator's name."""


class Enclosure:
    """Numbers between `low` and `high`, float64 arrays of one shape."""

    def __init__(self, low: np.ndarray, high: np.ndarray):
        self.low, self.high = np.asarray(low, np.float64), np.asarray(high, np.float64)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape

    @property
    def size(self) -> int:
        return self.low.size

    @property
    def exact(self) -> bool:
        """Whether every number is known."""
        return bool(np.array_equal(self.low, self.high))

    def moved(self, function: Callable[[np.ndarray], np.ndarray]) -> "Constant":
        """What a function that only moves entries makes of it."""
        return simplified(Enclosure(function(self.low), function(self.high)))


Constant: TypeAlias = np.ndarray | Enclosure
CONSTANT = (np.ndarray, Enclosure)


def enclosed(x: Constant) -> Enclosure:
    """A constant made of finite floating-point numbers."""
    if not isinstance(x, Enclosure):
        if not np.issubdtype(x.dtype, np.floating):
            raise Refused(f"computes with constants of the type {x.dtype}, which is not supported")
        x = Enclosure(x, x)
    if not (np.isfinite(x.low).all() and np.isfinite(x.high).all()):
        raise Refused("computes with constants that are NaN or infinite")
    return x


def simplified(x: Enclosure) -> Constant:
    """The numbers, where all of them are known."""
    return x.low if x.exact else x


def rational(value: Fraction) -> Constant:
    """One number."""
    try:
        near = np.array(float(value))
    except OverflowError:
        raise Refused("computes a number that is too large for float64") from None
    if Fraction(float(near)) == value:
        return near
    return Enclosure(*_around(near))


def irrational(value: Callable[[], arb]) -> Constant:
    """One number that is computed in balls."""
    with ctx.workprec(_PRECISION):
        low, high = _ends(value())
    return simplified(Enclosure(np.array(low), np.array(high)))


def ball(value: Fraction) -> arb:
    """A rational number as a ball."""
    return arb(fmpq(value.numerator, value.denominator))


def uniform(x: Constant) -> Fraction | None:
    """The number that all entries are; None if they differ or are not known."""
    if isinstance(x, Enclosure) or not x.size or x.dtype.kind != "f":
        return None
    first = x.flat[0]
    return Fraction(float(first)) if np.isfinite(first) and np.all(x == first) else None


def weights_of(x: Constant) -> tuple[np.ndarray, int]:
    """Weights, and by how many EPS of themselves the numbers that are meant may be off."""
    if not isinstance(x, Enclosure):
        return x, 0
    known = x.low == x.high
    middle = np.clip(x.low / 2 + x.high / 2, x.low, x.high)
    size = np.abs(middle)
    if np.any(~known & ((x.low <= 0) & (x.high >= 0) | (size < _LEAST))):
        raise Refused("has weights that are the rounded result of a calculation, and next to zero")
    away = np.maximum(x.high - middle, middle - x.low) / np.where(known, 1, size * EPS)
    most = float(np.max(away * (1 + 4 * EPS), initial=0))
    for loose in _LOOSE:
        if most <= loose:
            return middle, loose
    raise Refused(
        "has weights that are the result of a calculation which cancels nearly all their digits"
    )


# -- arithmetic ------------------------------------------------------------------------------------


def add(x: Constant, y: Constant) -> Constant:
    """x + y."""
    x, y = enclosed(x), enclosed(y)
    return _checked(_plus(x.low, y.low)[0], _plus(x.high, y.high)[1])


def negative(x: Constant) -> Constant:
    """-x."""
    # NumPy turns arrays without axes into scalars, which are no arrays.
    return np.asarray(-x) if not isinstance(x, Enclosure) else Enclosure(-x.high, -x.low)


def multiply(x: Constant, y: Constant) -> Constant:
    """x * y."""
    x, y = enclosed(x), enclosed(y)
    if x.exact and y.exact:
        return _checked(*_times(x.low, y.low))
    ends = [_times(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    lows, highs = zip(*ends, strict=True)
    return _checked(np.minimum.reduce(lows), np.maximum.reduce(highs))


def divide(x: Constant, y: Constant) -> Constant:
    """x / y."""
    x, y = enclosed(x), enclosed(y)
    if np.any((y.low <= 0) & (y.high >= 0)):
        raise Refused("divides by a constant that has zeros")
    if x.exact and y.exact:
        return _checked(*_over(x.low, y.low))
    ends = [_over(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    lows, highs = zip(*ends, strict=True)
    return _checked(np.minimum.reduce(lows), np.maximum.reduce(highs))


def reciprocal(x: Constant) -> Constant:
    """1 / x."""
    return divide(np.ones(()), x)


def root(x: Constant) -> Constant:
    """The square root."""
    x = enclosed(x)
    if np.any(x.low < 0):
        raise Refused("takes the root of a negative constant")
    return _checked(_root(x.low)[0], _root(x.high)[1])


def absolute(x: Constant) -> Constant:
    """|x|."""
    if not isinstance(x, Enclosure):
        return np.asarray(np.abs(x))
    crosses = (x.low < 0) & (x.high > 0)
    low = np.where(crosses, 0, np.minimum(np.abs(x.low), np.abs(x.high)))
    return Enclosure(low, np.maximum(np.abs(x.low), np.abs(x.high)))


def power(x: Constant, exponent: float) -> Constant:
    """x to a small whole number, or its root."""
    if exponent in (0.5, -0.5):
        return root(x) if exponent > 0 else reciprocal(root(x))
    if not float(exponent).is_integer() or not 0 < abs(exponent) <= 16:
        raise Refused(f"raises constants to {exponent:g}, which is not supported")
    result = x
    for _ in range(abs(int(exponent)) - 1):
        result = multiply(result, x)
    return result if exponent > 0 else reciprocal(result)


def monotone(function: Callable[..., np.ndarray], *operands: Constant) -> Constant:
    """An exact function that does not fall in any argument, such as a maximum."""
    sides = [x if isinstance(x, Enclosure) else Enclosure(x, x) for x in operands]
    low, high = (function(*ends) for ends in ([x.low for x in sides], [x.high for x in sides]))
    if np.isnan(low).any() or np.isnan(high).any():
        raise Refused("computes with constants that are NaN")
    return simplified(Enclosure(low, high))


def matmul(x: Constant, y: Constant) -> Constant:
    """x @ y."""
    x, y = enclosed(x), enclosed(y)
    (a, da), (b, db), terms = _centred(x), _centred(y), x.shape[-1]
    size = np.abs(a) @ np.abs(b)
    if x.exact and y.exact and _adds_up_exactly(size, _unit(a), _unit(b)):
        return np.asarray(a @ b)
    if x.exact and y.exact and np.size(size) * terms <= _SLOW:
        rows = a if a.ndim > 1 else a[None]
        columns = np.swapaxes(b, -1, -2) if b.ndim > 1 else b[None]
        low, high = _times(rows[..., :, None, :], columns[..., None, :, :])
        shape = np.shape(size)
        return _checked(_summed(low)[0].reshape(shape), _summed(high)[1].reshape(shape))
    found = enclosed(_near(a @ b, size, np.abs(a) @ db + da @ (np.abs(b) + db), terms))
    nothing = np.sign(np.abs(a) + da) @ np.sign(np.abs(b) + db) == 0  # times zero, all of it
    return simplified(Enclosure(*(np.where(nothing, 0, end) for end in (found.low, found.high))))


def total(x: Constant, axes: Sequence[int], keepdims: bool) -> Constant:
    """The sum over some axes."""
    x = enclosed(x)

    def over(array):
        return np.sum(array, axis=tuple(axes), keepdims=keepdims)

    middle, wide = _centred(x)
    size = over(np.abs(middle))
    if x.exact and _adds_up_exactly(size, _unit(middle), 0):
        return np.asarray(over(middle))
    if x.size <= _SLOW:
        low, high = (_together(end, axes) for end in (x.low, x.high))
        shape = np.shape(size)
        return _checked(_summed(low)[0].reshape(shape), _summed(high)[1].reshape(shape))
    return _near(over(middle), size, over(wide), math.prod(x.shape[k] for k in axes))


def _together(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The given axes as one, behind the others."""
    rest = [k for k in range(x.ndim) if k not in axes]
    return np.transpose(x, (*rest, *axes)).reshape(*(x.shape[k] for k in rest), -1)


def _summed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 numbers around the sums over the last axis."""
    low, high = [], []
    for row in x.reshape(-1, x.shape[-1]).tolist():
        near = math.fsum(row)
        rest = math.fsum([*row, -near])
        low.append(near if rest >= 0 else math.nextafter(near, -math.inf))
        high.append(near if rest <= 0 else math.nextafter(near, math.inf))
    return np.array(low).reshape(x.shape[:-1]), np.array(high).reshape(x.shape[:-1])


def product(x: Constant, axes: Sequence[int], keepdims: bool) -> Constant:
    """The product over some axes."""
    x = enclosed(x)
    if math.prod(x.shape[k] for k in axes) > 1024:
        raise Refused("multiplies more than 1024 constants")
    low, high = (_together(end, axes) for end in (x.low, x.high))
    result: Constant = np.ones(low.shape[:-1])
    for k in range(low.shape[-1]):
        result = multiply(result, Enclosure(low[..., k], high[..., k]))
    kept = tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    shape = kept if keepdims else result.shape
    if isinstance(result, Enclosure):
        return result.moved(lambda end: end.reshape(shape))
    return result.reshape(shape)


_FUNCTIONS: dict[str, Callable[[arb], arb]] = {
    "exp": lambda x: x.exp(),
    "expm1": lambda x: x.expm1(),
    "log": lambda x: x.log(),
    "log1p": lambda x: x.log1p(),
    "erf": lambda x: x.erf(),
    "erfc": lambda x: x.erfc(),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "tanh": lambda x: x.tanh(),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "softplus": lambda x: x.exp().log1p(),
}


def function(name: str, x: Constant) -> Constant:
    """A function of each entry, in balls."""
    x = enclosed(x)
    if x.size > _SLOW:
        raise Refused(f"is not supported for more than {_SLOW} constants")
    with ctx.workprec(_PRECISION):
        balls = (
            arb(a).union(arb(b))
            for a, b in zip(x.low.ravel().tolist(), x.high.ravel().tolist(), strict=True)
        )
        ends = [_ends(_FUNCTIONS[name](one)) for one in balls]
    low, high = np.array(ends, np.float64).reshape(-1, 2).T
    return _checked(low.reshape(x.shape), high.reshape(x.shape))


def _checked(low: np.ndarray, high: np.ndarray) -> Constant:
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise Refused("computes constants that are NaN or infinite")
    return simplified(Enclosure(low, high))


def _around(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.nextafter(x, -np.inf), np.nextafter(x, np.inf)


def _ends(value: arb) -> tuple[float, float]:
    """Float64 numbers around a ball."""
    if not value.is_finite():
        return -math.inf, math.inf
    low, high = float(value.lower()), float(value.upper())
    low = low if arb(low) <= value.lower() else math.nextafter(low, -math.inf)
    return low, high if arb(high) >= value.upper() else math.nextafter(high, math.inf)


def _plus(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 numbers around a + b."""
    with np.errstate(all="ignore"):
        s = a + b
        t = s - a
        error = (a - (s - t)) + (b - t)  # a + b = s + error (Knuth)
    below, above = _around(s)
    return np.where(error < 0, below, s), np.where(error > 0, above, s)


def _times(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 numbers around a * b."""
    with np.errstate(all="ignore"):
        p = a * b
        (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
        error = a_low * b_low - (((p - a_high * b_high) - a_low * b_high) - a_high * b_low)
        size = np.abs(p)
        sized = (size > _LEAST) & (size < _MOST) & (np.abs(a) < _MOST) & (np.abs(b) < _MOST)
    # a * b = p + error (Dekker), unless something is too large or too small for that.
    below, above = _around(p)
    zero = (a == 0) | (b == 0)
    low = np.where(sized, np.where(error < 0, below, p), np.where(zero, 0, below))
    high = np.where(sized, np.where(error > 0, above, p), np.where(zero, 0, above))
    return low, high


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    c = x * (2.0**27 + 1)
    high = c - (c - x)
    return high, x - high


def _over(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        q = np.asarray(a / b)
    low, high = _times(q, b)
    exact = (low == a) & (high == a)
    below, above = _around(q)
    return np.where(exact, q, below), np.where(exact, q, above)


def _root(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r = np.sqrt(x)
    low, high = _times(r, r)
    exact = (low == x) & (high == x)
    below, above = _around(r)
    return np.where(exact, r, np.maximum(below, 0)), np.where(exact, r, above)


def _centred(x: Enclosure) -> tuple[np.ndarray, np.ndarray]:
    """Middles and radii."""
    if x.exact:
        return x.low, np.zeros_like(x.low)
    middle = np.clip(x.low / 2 + x.high / 2, x.low, x.high)
    return middle, np.nextafter(np.maximum(x.high - middle, middle - x.low), np.inf)


def _unit(x: np.ndarray) -> int:
    """The exponent of a power of two that divides every entry."""
    fraction, exponent = np.frexp(x[x != 0])
    if not fraction.size:
        return 0
    whole = np.abs(fraction * 2.0**53).astype(np.int64)
    zeros = np.log2((whole & -whole).astype(np.float64)).astype(np.int64)
    return int(np.min(exponent - 53 + zeros))


def _adds_up_exactly(size: np.ndarray, *units: int) -> bool:
    """Whether multiples of a power of two add up to no more than 53 bits, in whatever order."""
    # One bit less, because the size is rounded itself.
    return sum(units) >= -1022 and bool(np.all(size <= 2.0 ** min(sum(units) + 52, 1023)))


def _near(middle, size, wide, terms: int) -> Constant:
    """Sums of `terms` products that were computed in some order."""
    radius = (wide + (2 * terms + 8) * EPS * (size + wide)) * (1 + 8 * EPS) + 8 * (terms + 1) * TINY
    return _checked(np.nextafter(middle - radius, -np.inf), np.nextafter(middle + radius, np.inf))
