"""Arrays of intervals in float64, with outward rounding.

An `Interval` holds two NumPy arrays; what real arithmetic would give lies between them. Single
operations are rounded to the nearest number by IEEE 754, so results are moved outward by eps of
themselves; zeros stay zeros, and signs are kept, where they are certain. A sum of n products, in
whatever order it is computed, with or without fused multiply-add, is off by at most n eps times the
sum of their magnitudes, and by the smallest subnormal number for each product that underflows (eps
is twice the largest relative error of a rounding: that pays for the roundings of the bound itself).

Trusted: NumPy's +, -, *, / and sqrt as IEEE 754 has them, and matrix products that are sums of
products. `check_arithmetic` looks for the two settings of a processor that would break this.

Truth values and whole numbers are intervals, too: a truth value that is not decided is
[False, True]. An entry where a function may be undefined (a divisor that may be zero, the root of
what may be negative) is NaN at both ends. NaN is passed on by everything but a choice that
certainly takes something else, decides no comparison, and in the end is no bound: -inf.
"""

import math
from typing import Any

import numpy as np

from stagecert.errors import ProblemError

EPS = 2.0**-52
SMALLEST = 5e-324  # the smallest positive number
LARGEST = float(np.finfo(np.float64).max)
BLOCK = 64  # long sums are made of sums of so many terms


class Interval:
    """All numbers from `low` to `high`, entry by entry; a point if both are the same array.

    `note` is what a rule tells a later one about where it came from.
    """

    __slots__ = ("high", "low", "note")

    def __init__(self, low: Any, high: Any = None, note: Any = None):
        self.low = np.asarray(low)
        self.high = self.low if high is None else np.asarray(high)
        self.note = note

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape

    @property
    def is_point(self) -> bool:
        """Whether it is known to be one number for each entry."""
        return self.high is self.low

    @property
    def is_float(self) -> bool:
        return self.low.dtype.kind == "f"

    def middle(self) -> np.ndarray:
        """Some number of each interval, or near it."""
        return self.low if self.is_point else 0.5 * self.low + 0.5 * self.high

    def magnitude(self) -> np.ndarray:
        """The largest absolute value."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def map(self, function) -> "Interval":
        """What a function that only moves entries makes of it."""
        return Interval(function(self.low), None if self.is_point else function(self.high))

    def __repr__(self) -> str:
        return f"Interval({self.low}, {self.high})"


def constant(x: Any) -> Interval:
    """A point; floating-point numbers in float64, which holds every shorter one."""
    array = np.asarray(x)
    if array.dtype.kind not in "biufc":  # bfloat16 and the like
        array = array.astype(np.float64)
    if array.dtype.kind == "c":
        raise ProblemError("Complex numbers have no order: no bound can be proven with them.")
    kind = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}[array.dtype.kind]
    return Interval(array.astype(kind, copy=False))


def undefined_where(mask, x: Interval) -> Interval:
    """NaN where the mask holds."""
    return Interval(np.where(mask, np.nan, x.low), np.where(mask, np.nan, x.high))


def union(x: Interval, y: Interval) -> Interval:
    """The smallest interval that contains both."""
    return Interval(np.minimum(x.low, y.low), np.maximum(x.high, y.high))


def check_arithmetic() -> None:
    """Raises ProblemError if this processor does not round as the proofs here assume."""
    one, tiny = np.ones(8), np.full(8, SMALLEST)
    half = 2.0**-53
    nearest = np.all(one + half == 1) and np.all(one + 1.5 * half > 1) and np.all(-one - half == -1)
    if not nearest or not np.all(tiny * 1 > 0) or not np.all(tiny + tiny > 0):
        raise ProblemError(
            "The processor is set to flush subnormal numbers to zero, or not to round to nearest "
            "(some libraries do that when they are imported): no rigorous bound in this process."
        )


def down(x):
    """The next smaller number."""
    return np.nextafter(x, -np.inf)


def up(x):
    """The next larger number."""
    return np.nextafter(x, np.inf)


# -- arithmetic, entry by entry --------------------------------------------------------------------


def negative(x: Interval) -> Interval:
    return Interval(-x.high, None if x.is_point else -x.low)


def _outward(low, high) -> Interval:
    """An interval around results that were rounded once; they have not underflowed.

    |x| eps is at least one step at x, so that less than half of it is lost in subtracting.
    """
    if high is low:
        off = np.abs(low) * EPS
        return Interval(low - off, low + off)
    return Interval(low - np.abs(low) * EPS, high + np.abs(high) * EPS)


def add(x: Interval, y: Interval) -> Interval:
    if not x.is_float and not y.is_float:
        return Interval(x.low + y.low, x.high + y.high)
    # Sums do not underflow: a sum that comes out as zero, or subnormal, is exact.
    low = x.low + y.low
    return _outward(low, low if x.is_point and y.is_point else x.high + y.high)


def subtract(x: Interval, y: Interval) -> Interval:
    return add(x, negative(y))


def _is_power_of_two(x: Interval) -> bool:
    return x.is_point and x.low.size == 1 and abs(math.frexp(float(x.low.flat[0]))[0]) == 0.5


def _range_of(operation, x: Interval, y: Interval):
    """The least and the largest of an operation's results at the ends."""
    if x.is_point and y.is_point:
        low = operation(x.low, y.low)
        return low, low
    ends = [(x.low, y.low), (x.high, y.high)]
    ends += [] if x.is_point or y.is_point else [(x.low, y.high), (x.high, y.low)]
    results = [operation(a, b) for a, b in ends]
    return np.minimum.reduce(results), np.maximum.reduce(results)


def _rounded(low, high, x: Interval, y: Interval, is_zero) -> Interval:
    """An interval around rounded products or quotients, which may have underflowed.

    `is_zero` says where the exact results are zero.
    """
    result = _outward(low, high)
    small = np.minimum(np.abs(low), np.abs(high)) < 1e-290
    if not small.any():
        return result
    off = np.where(is_zero, 0, 4 * SMALLEST)
    below, above = result.low - off, result.high + off
    # What underflows keeps its sign.
    same = ((x.low >= 0) & (y.low >= 0)) | ((x.high <= 0) & (y.high <= 0))
    opposite = ((x.low >= 0) & (y.high <= 0)) | ((x.high <= 0) & (y.low >= 0))
    below = np.where(same, np.maximum(below, 0), below)
    above = np.where(opposite, np.minimum(above, 0), above)
    return Interval(np.where(small, below, result.low), np.where(small, above, result.high))


def multiply(x: Interval, y: Interval) -> Interval:
    low, high = _range_of(np.multiply, x, y)
    if not x.is_float and not y.is_float:
        return Interval(low, high)
    if (_is_power_of_two(x) or _is_power_of_two(y)) and np.all(np.abs(low) > 1e-290):
        return Interval(low, None if low is high else high)
    zero = ((x.low == 0) & (x.high == 0)) | ((y.low == 0) & (y.high == 0))
    return _rounded(low, high, x, y, zero)


def square(x: Interval) -> Interval:
    size = absolute(x)
    return multiply(size, size)


def divide(x: Interval, y: Interval) -> Interval:
    """Undefined where the divisor may be zero."""
    unknown = (y.low <= 0) & (y.high >= 0)
    if unknown.any():
        return undefined_where(unknown, divide(x, y.map(lambda a: np.where(unknown, 1, a))))
    low, high = _range_of(np.divide, x, y)
    return _rounded(low, high, x, y, (x.low == 0) & (x.high == 0))


def maximum(x: Interval, y: Interval) -> Interval:
    if x.is_point and y.is_point:
        return Interval(np.maximum(x.low, y.low))
    return Interval(np.maximum(x.low, y.low), np.maximum(x.high, y.high))


def minimum(x: Interval, y: Interval) -> Interval:
    return negative(maximum(negative(x), negative(y)))


def absolute(x: Interval) -> Interval:
    if x.is_point:
        return Interval(np.abs(x.low))
    least = np.where((x.low <= 0) & (x.high >= 0), 0, np.minimum(np.abs(x.low), np.abs(x.high)))
    return Interval(least, x.magnitude())


def select(which: Interval, no: Interval, yes: Interval) -> Interval:
    """`yes` where `which` holds, `no` where it does not, all of both where that is not decided."""
    if which.is_point or np.array_equal(which.low, which.high):
        low = np.where(which.low, yes.low, no.low)
        if yes.is_point and no.is_point:
            return Interval(low)
        return Interval(low, np.where(which.low, yes.high, no.high))
    both = union(no, yes)
    return Interval(
        np.where(which.low, yes.low, np.where(which.high, both.low, no.low)),
        np.where(which.low, yes.high, np.where(which.high, both.high, no.high)),
    )


# -- sums ------------------------------------------------------------------------------------------


def _sum_with_error(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sum over the last axis, how far it can be off): blocks first, then their sums."""
    size = np.abs(x)
    depth = 0
    while x.shape[-1] > 1:
        n = x.shape[-1]
        width = n if n <= 2 * BLOCK else BLOCK
        whole = n // width * width
        parts = []
        for array in (x, size):
            sums = array[..., :whole].reshape(*array.shape[:-1], -1, width).sum(axis=-1)
            parts.append(np.concatenate([sums, array[..., whole:]], axis=-1))
        x, size = parts
        depth += width
    if x.shape[-1] == 0:
        return np.zeros(x.shape[:-1]), np.zeros(x.shape[:-1])
    return x[..., 0], depth * EPS * size[..., 0]


def sum_last(x: Interval) -> Interval:
    """The sum over the last axis."""
    if not x.is_float:
        return Interval(x.low.sum(axis=-1), x.high.sum(axis=-1))
    low, off = _sum_with_error(x.low)
    high, off_high = (low, off) if x.is_point else _sum_with_error(x.high)
    return _spread(low, off, high, off_high)


def _spread(low, off, high, off_high) -> Interval:
    """[low - off, high + off_high]; exact where nothing is off."""
    return Interval(
        np.where(off == 0, low, down(low - off)), np.where(off_high == 0, high, up(high + off_high))
    )


def total(x: Interval) -> Interval:
    """The sum of all entries."""
    return sum_last(x.map(np.ravel))


def cumulative_sum(x: Interval, axis: int) -> Interval:
    """Sums from the first entry of an axis to each."""
    if not x.is_float:
        return x.map(lambda a: np.cumsum(a, axis))
    shape = [1] * x.low.ndim
    shape[axis] = -1
    count = np.arange(x.shape[axis]).reshape(shape) * EPS

    def summed(a):
        return np.cumsum(a, axis), count * np.cumsum(np.abs(a), axis)

    low, off = summed(x.low)
    high, off_high = (low, off) if x.is_point else summed(x.high)
    return _spread(low, off, high, off_high)


# -- products of matrices --------------------------------------------------------------------------


def _radius(x: Interval, middle: np.ndarray) -> np.ndarray | None:
    if x.is_point:
        return None
    radius = np.maximum(up(x.high - middle), up(middle - x.low))
    return np.where(x.low == x.high, 0, radius)


def _add_up(a, b):
    """Not below a + b, for numbers >= 0; zero where both are."""
    return np.where((a == 0) & (b == 0), 0, up(a + b))


def products(x: Interval, y: Interval, multiply_arrays, terms: int) -> Interval:
    """A bilinear function made of sums of at most `terms` products, by middles and radii.

    `multiply_arrays` evaluates it on two arrays of float64.
    """
    with np.errstate(all="ignore"):
        a, b = x.middle(), y.middle()
        ra, rb = _radius(x, a), _radius(y, b)
        result = multiply_arrays(a, b)
        size_a, size_b = np.abs(a), np.abs(b)
        # The sum is off by terms * eps * |a| |b|, and |ab - a'b'| <= |a| rb + ra (|b| + rb): once
        # more sums of products, of numbers >= 0, with allowances for their own rounding.
        spread = np.where(size_b == 0, 0, (terms + 2) * EPS * size_b + 4 * SMALLEST)
        reach = size_b if rb is None else _add_up(size_b, rb)
        off = multiply_arrays(size_a, spread if rb is None else _add_up(spread, rb))
        if ra is not None:
            off = off + multiply_arrays(ra, reach)
            size_a = _add_up(size_a, ra)
        if np.any(off == 0):
            # Nothing underflows where one factor of every product is zero: such sums are exact.
            # One factor of |a| * 1 and 1 * |b| cannot underflow; the smaller array is replaced.
            small_b = size_b.size <= size_a.size
            first = size_a if small_b else (size_a != 0).astype(np.float64)
            some = multiply_arrays(first, (reach != 0).astype(np.float64) if small_b else reach)
        else:
            some = off
        off = up((1 + (terms + 8) * EPS) * off + (terms + 2) * 4 * SMALLEST)
        off = np.where(some == 0, 0, off)
        low = np.where(off == 0, result, down(result - off))
        high = np.where(off == 0, result, up(result + off))
    return undefined_where(~(np.isfinite(result) & np.isfinite(off)), Interval(low, high))


def dot_general(x: Interval, y: Interval, contracting, batch) -> Interval:
    """Sums of products over the contracting axes, as JAX's primitive of this name has them."""
    (cx, cy), (bx, by) = contracting, batch
    fx = [k for k in range(x.low.ndim) if k not in (*cx, *bx)]
    fy = [k for k in range(y.low.ndim) if k not in (*cy, *by)]
    batches = [x.shape[k] for k in bx]
    rows, columns = [x.shape[k] for k in fx], [y.shape[k] for k in fy]
    inner = math.prod(x.shape[k] for k in cx)

    def as_matrices(a, b):
        a = a.transpose((*bx, *fx, *cx)).reshape((*batches, math.prod(rows), inner))
        b = b.transpose((*by, *cy, *fy)).reshape((*batches, inner, math.prod(columns)))
        if not batches and 1 in (a.shape[0], b.shape[1]):
            # A matrix times a vector: BLAS would start threads for it, which spin on busy machines.
            one_row = a.shape[0] == 1
            found = np.einsum("j,jk->k", a[0], b) if one_row else np.einsum("ij,j->i", a, b[:, 0])
        else:
            found = np.matmul(a, b)
        return found.reshape((*batches, *rows, *columns))

    if not x.is_float:
        if not (x.is_point and y.is_point):
            raise ProblemError("A product of matrices of undecided whole numbers has no enclosure.")
        return Interval(as_matrices(x.low, y.low))
    return products(x, y, as_matrices, inner)
