"""Elementary functions with proven errors, in NumPy; the rare ones by ball arithmetic (Arb).

exp and log are written here from the arithmetic operations, because no library promises its errors.
Write u = 2^-53 for the largest relative error of a rounding.

exp(x) = 2^k exp(r), with k the integer nearest to x / ln 2 and r = x - k ln 2, |r| < 0.35. ln 2 is
HIGH + LOW up to 2^-85, and k HIGH is exact (32 + 11 bits), so r is off by less than 0.71 u: twice
0.35 u for the two subtractions, the rest below 1e-6 u. Taylor's polynomial of degree 13 is off by
0.35^14 / 14! e^0.35 < 0.07 u; evaluated by Horner's rule, where each step takes 0.35 of the error
before and adds u (|c| + |r q| + |q|), by less than 2.5 u, relative to at least 0.7. Together below
4.5 u; 8 u is charged. The steps from inside out, with q_j = sum of r^i / (i + j)!: the error e_3
is below 0.6 u; e_2 <= 0.35 e_3 + u (0.5 + 0.07 + 0.57); as the coefficients 1 are exact,
e_1 <= 0.35 e_2 + u (0.21 + 1.2) and e_0 <= 0.35 e_1 + u (0.42 + 1.42).

log(x) = e ln 2 + log m with m in [0.7, 1.42], and log m = 2 atanh f = 2 f (1 + s/3 + s^2/5 + ...)
with f = (m - 1) / (m + 1), s = f^2 < 0.0296. m - 1 is exact, so f is off by 2 u of itself; the
terms after s^10 / 21 are below 1e-18; the bracket is off by 1.2 u, their product by less than 5 u.
For e != 0, |log m| is at most 1.01 times the result, and three more roundings are added: below
7.2 u; again 8 u is charged. log1p takes f = x / (2 + x) for small x, expm1 the polynomial q_1
times x.

Arb's results are balls that enclose the true ones; it is trusted, as it is by stagecert_check.
"""

import math
from collections.abc import Callable

import numpy as np
from flint import arb, ctx

from stagecert.enclosure.intervals import (
    LARGEST,
    SMALLEST,
    Interval,
    absolute,
    add,
    constant,
    divide,
    down,
    multiply,
    square,
    undefined_where,
    up,
)

_HIGH = float.fromhex("0x1.62e42feep-1")  # the first 32 bits of ln 2
_LOW = float.fromhex("0x1.a39ef35793c76p-33")  # ln 2 - _HIGH, rounded
_TAYLOR = [1 / math.factorial(k) for k in range(14)]
_ATANH = [1 / (2 * k + 1) for k in range(11)]
_OFF = 2.0**-49  # twice the 8 u of the docstring, which pays for applying it
_ONE = constant(1.0)


def _horner(coefficients, x):
    total = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total


def _around(y) -> tuple[np.ndarray, np.ndarray]:
    """(not above, not below) what y approximates with a relative error of 8 u."""
    slack = np.abs(y) * _OFF + 4 * SMALLEST
    return y - slack, y + slack


def _exp_points(x):
    """(not above, not below) exp(x)."""
    inside = np.clip(x, -760.0, 720.0)
    k = np.rint(inside * (1 / math.log(2)))
    r = (inside - k * _HIGH) - k * _LOW
    y = np.ldexp(_horner(_TAYLOR, r), k.astype(np.int64))
    low, high = _around(np.minimum(y, 0.99 * LARGEST))
    exact = inside == 0
    low = np.where(exact, 1, np.where(x < -750, 0, np.maximum(low, 0)))
    return low, np.where(exact, 1, np.where(y >= 0.99 * LARGEST, np.inf, high))


def _series(f):
    """2 atanh(f) for |f| <= 0.172."""
    return 2 * f * _horner(_ATANH, f * f)


def _log_points(x):
    """(not above, not below) log(x), x >= 0."""
    inside = np.clip(x, SMALLEST, LARGEST)
    m, e = np.frexp(inside)
    small = m < 0.7071
    m, e = np.where(small, 2 * m, m), (e - small).astype(np.float64)
    y = e * _HIGH + (e * _LOW + _series((m - 1) / (m + 1)))
    low, high = _around(y)
    exact = inside == 1
    low, high = np.where(exact, 0, low), np.where(exact, 0, high)
    high = np.where(x > LARGEST, np.inf, high)
    return np.where(x <= 0, -np.inf, low), np.where(x <= 0, -np.inf, high)


def _log1p_points(x):
    inside = np.clip(x, -0.25, 0.4)
    low, high = _around(_series(inside / (2 + inside)))
    low, high = np.where(inside == 0, 0, low), np.where(inside == 0, 0, high)
    shifted = add(Interval(x), _ONE)
    far = inside != x
    return (np.where(far, _log_points(np.maximum(shifted.low, 0))[0], low),
            np.where(far, _log_points(np.maximum(shifted.high, 0))[1], high))  # fmt: skip


def _expm1_points(x):
    inside = np.clip(x, -0.35, 0.35)
    low, high = _around(inside * _horner(_TAYLOR[1:], inside))
    low, high = np.where(inside == 0, 0, low), np.where(inside == 0, 0, high)
    of_exp = _exp_points(x)
    far = inside != x
    return (np.where(far, np.maximum(down(of_exp[0] - 1), -1), low),
            np.where(far, up(of_exp[1] - 1), high))  # fmt: skip


def _increasing(points: Callable) -> Callable[[Interval], Interval]:
    """A function of intervals from bounds at points, of an increasing function."""

    def function(x: Interval) -> Interval:
        low, high = points(x.low)
        return Interval(low, high if x.is_point else points(x.high)[1])

    return function


exp = _increasing(_exp_points)
expm1 = _increasing(_expm1_points)


def _from(lowest: float, function) -> Callable[[Interval], Interval]:
    """A function that is defined from `lowest` on."""

    def checked(x: Interval) -> Interval:
        outside = x.low < lowest
        if not outside.any():
            return function(x)
        return undefined_where(outside, function(x.map(lambda a: np.maximum(a, lowest))))

    return checked


def _sqrt_points(x):
    root = np.sqrt(x)
    exact = (x == 0) | (x == 1)
    return np.where(exact, root, np.maximum(down(root), 0)), np.where(exact, root, up(root))


log = _from(0.0, _increasing(_log_points))
log1p = _from(-1.0, _increasing(_log1p_points))
sqrt = _from(0.0, _increasing(_sqrt_points))


def rsqrt(x: Interval) -> Interval:
    return divide(_ONE, sqrt(x))


def _tanh_points(x):
    low, high = _expm1_points(2 * np.abs(x))
    low, high = np.clip(low, 0, 1e300), np.clip(high, 0, 1e300)
    least = np.clip(down(low / up(low + 2)), 0, 1)
    most = np.clip(up(high / down(high + 2)), 0, 1)
    least, most = np.where(x == 0, 0, least), np.where(x == 0, 0, most)
    return np.where(x < 0, -most, least), np.where(x < 0, -least, most)


def _logistic_points(x):
    low, high = _exp_points(-x)
    return np.maximum(down(1 / up(1 + high)), 0), np.minimum(up(1 / down(1 + low)), 1)


tanh = _increasing(_tanh_points)
logistic = _increasing(_logistic_points)


def integer_power(x: Interval, n: int) -> Interval:
    if n < 0:
        return divide(constant(1.0), integer_power(x, -n))
    if n == 0:
        return Interval(np.ones(x.shape))
    if n == 2:
        return square(x)
    if n % 2 and n > 1:
        return Interval(_odd_power(x.low, n).low, _odd_power(x.high, n).high)
    return x if n == 1 else _power(absolute(x), n)


def _odd_power(x, n: int) -> Interval:
    size = _power(Interval(np.abs(x)), n)
    return Interval(np.where(x < 0, -size.high, size.low), np.where(x < 0, -size.low, size.high))


def _power(x: Interval, n: int) -> Interval:
    """x^n for x >= 0, by squaring."""
    result = None
    while True:
        if n % 2:
            result = x if result is None else multiply(result, x)
        n //= 2
        if n == 0:
            return result  # type: ignore
        x = square(x)


def power(x: Interval, y: Interval) -> Interval:
    """x^y for x >= 0; whole exponents that are one number for all entries for any x."""
    if y.is_point and y.low.size and np.all(y.low == y.low.flat[0]):
        n = float(y.low.flat[0])
        shape = np.broadcast_shapes(x.shape, y.shape)
        spread = x.map(lambda a: np.broadcast_to(a, shape))
        if n.is_integer() and abs(n) <= 64:
            return integer_power(spread, int(n))
        if n == 0.5:
            return sqrt(spread)
    return exp(multiply(y, log(x)))


def sign(x: Interval) -> Interval:
    return Interval(np.sign(x.low), None if x.is_point else np.sign(x.high))


# -- by Arb, entry by entry ------------------------------------------------------------------------

_BITS = 100


def floor_of(x: arb) -> float:
    """A number that is not above any in the ball."""
    if not x.is_finite():
        return -math.inf
    number = float(x.mid())
    if not math.isfinite(number):
        return -math.inf if number < 0 else LARGEST
    step = math.ulp(number)
    while not arb(number) <= x:
        number, step = math.nextafter(number - step, -math.inf), 2 * step
    return number


def by_arb(function: Callable[[arb], arb], least=-math.inf, most=math.inf):
    """A function of intervals, evaluated by Arb; its values lie between `least` and `most`."""

    def on_entry(low: float, high: float) -> tuple[float, float]:
        if not (math.isfinite(low) and math.isfinite(high)):
            return math.nan, math.nan
        before, ctx.prec = ctx.prec, _BITS
        try:
            ball = arb(low) if low == high else arb(low).union(arb(high))
            y = function(ball)
            return max(floor_of(y), least), min(-floor_of(-y), most)
        finally:
            ctx.prec = before

    def on_intervals(x: Interval) -> Interval:
        pairs = [on_entry(*ends) for ends in zip(x.low.flat, x.high.flat, strict=True)]
        ends = np.array(pairs, np.float64).reshape(*x.shape, 2)
        return Interval(ends[..., 0], ends[..., 1])

    return on_intervals


BY_ARB = {
    "erf": by_arb(lambda x: x.erf(), -1.0, 1.0),
    "erfc": by_arb(lambda x: x.erfc(), 0.0, 2.0),
    "sin": by_arb(lambda x: x.sin(), -1.0, 1.0),
    "cos": by_arb(lambda x: x.cos(), -1.0, 1.0),
    "tan": by_arb(lambda x: x.tan()),
    "atan": by_arb(lambda x: x.atan()),
    "sinh": by_arb(lambda x: x.sinh()),
    "cosh": by_arb(lambda x: x.cosh(), 1.0),
    "asinh": by_arb(lambda x: x.asinh()),
    "exp2": by_arb(lambda x: arb(2) ** x, 0.0),
}

# JAX's derivatives of erf and erfc (in some releases also of exp2) have these numbers in them,
# rounded. The true ones are within one step, and a literal that equals one of them stands for all
# numbers that near.
ROUNDED_IN_DERIVATIVES = frozenset({2 / math.sqrt(math.pi), -2 / math.sqrt(math.pi), math.log(2)})


def literal(x) -> Interval:
    """A literal of a jaxpr."""
    value = constant(x)
    if value.is_float and value.shape == () and float(value.low) in ROUNDED_IN_DERIVATIVES:
        return Interval(down(value.low), up(value.high))
    return value
