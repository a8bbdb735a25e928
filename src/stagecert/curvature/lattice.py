"""What is known about the curvature of a value: a small lattice, joined by "or".

The rules are those of disciplined convex programming: sums, maxima and multiples of convex
functions, and compositions with functions whose slope has a known sign. `Known` says of every entry
of an array which properties are *in doubt* as a function of the variables (one bit each), and
between which numbers it lies. A bit that is not set is a proof. Adding values joins their doubts,
so most rules are one bitwise or.

Properties that no user asks for, but that proofs go through: the logarithm of an entry is convex
(sums and products of such entries are of that kind again, and logsumexp is the logarithm of one);
its square root is convex (sums of squares are of that kind, and norms the roots of them).

Ends of intervals are rounded outwards, because their signs decide.

To prove a declared curvature, `Slope` says which entries are a * v + constant for one variable
entry v; `Bend` that a value is still convex after 1/2 sum(weight * v**2) is taken off. Squares of
sloped entries bend; sums and nonnegative multiples keep it. Everything else forgets, which is never
wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Slope:
    """Entry by entry: which variable entry it is a multiple of (-1: none), and the multiple."""

    who: np.ndarray
    times: np.ndarray

    def scaled(self, factor) -> "Slope | None":
        """Multiplied by known numbers; None where shapes differ."""
        factor = np.asarray(factor)
        if np.broadcast_shapes(factor.shape, self.who.shape) != self.who.shape:
            return None
        return Slope(self.who, self.times * factor)


@dataclass(frozen=True)
class Bend:
    """A list of (flat entry of the value, variable entry, weight)."""

    entry: np.ndarray
    who: np.ndarray
    weight: np.ndarray

    def scaled(self, least, shape) -> "Bend":
        """Multiplied by numbers that are at least these, and not negative."""
        factor = np.broadcast_to(least, shape).ravel()[self.entry]
        return Bend(self.entry, self.who, self.weight * factor)

    def summed(self, shape, axes) -> "Bend":
        """Summed over some axes."""
        kept = np.arange(int(np.prod([n for k, n in enumerate(shape) if k not in axes], initial=1)))
        sizes = [1 if k in axes else n for k, n in enumerate(shape)]
        goal = np.broadcast_to(kept.reshape(sizes), shape).ravel()
        return Bend(goal[self.entry], self.who, self.weight)

    def of(self, who: np.ndarray) -> np.ndarray:
        """The total weight of each of these variable entries in a scalar."""
        found, inverse = np.unique(self.who, return_inverse=True)
        if not found.size:
            return np.zeros(who.shape)
        totals = np.bincount(inverse, self.weight)
        place = np.clip(np.searchsorted(found, who), 0, found.size - 1)
        return np.where(found[place] == who, totals[place], 0)


def entries_of(number: int, size: int) -> np.ndarray:
    """The names of a variable's entries."""
    return (number << 32) + np.arange(size)


def joined(a: Bend | None, b: Bend | None) -> Bend | None:
    """That of a sum."""
    if a is None or b is None:
        return a if b is None else b
    pairs = zip((a.entry, a.who, a.weight), (b.entry, b.who, b.weight), strict=True)
    return Bend(*(np.concatenate(pair) for pair in pairs))


def squared(slope: Slope | None) -> Bend | None:
    """That of the entrywise square."""
    if slope is None:
        return None
    who, times = slope.who.ravel(), slope.times.ravel()
    (entry,) = np.nonzero(who >= 0)
    return Bend(entry, who[entry], 2 * times[entry] ** 2)


def moved(values: list[Any], taken) -> Slope | None:
    """The slopes of entries that were only moved."""
    if all(v.slope is None for v in values):
        return None
    slopes = [v.slope or Slope(np.full(v.shape, -1), np.zeros(v.shape)) for v in values]
    return Slope(taken([s.who for s in slopes]), taken([s.times for s in slopes]))


CONVEX, CONCAVE, CONSTANT, LOG_CONVEX, ROOT_CONVEX = 1, 2, 4, 8, 16
NOTHING_KNOWN = 31
AFFINE = CONSTANT | LOG_CONVEX | ROOT_CONVEX  # the doubts about a variable
SIGNED = LOG_CONVEX | ROOT_CONVEX  # what only nonnegative values can be
ROUNDING = 4 * float(np.finfo(float).eps)


@dataclass(frozen=True)
class Origin:
    """Which value an array's entries were copied from, and which entry each is a copy of."""

    number: int
    index: np.ndarray

    def same(self, other: "Origin | None") -> bool:
        """Whether the two arrays are entry by entry the same."""
        return (
            other is not None
            and self.number == other.number
            and self.index.shape == other.index.shape
            and bool(np.array_equal(self.index, other.index))
        )


@dataclass(frozen=True)
class Linear:
    """The array is root @ matrix (plus a constant), with the columns along `axis`.

    `rows` holds, with the matrix's contracted axis last, which entries of the root were read.
    """

    number: int
    rows: np.ndarray
    matrix: np.ndarray
    axis: int


@dataclass(frozen=True)
class Shifted:
    """How logsumexp avoids overflow: log(sum(exp(x - m))) + m, which holds whatever m is.

    `stage` says how far an array has come: "difference" (x - m), "exponential" or "logarithm";
    `doubts`, entry by entry, whether exp(x) is log-convex; `by` where m is from.
    """

    doubts: np.ndarray
    by: Origin
    stage: str = "difference"


@dataclass(frozen=True)
class Known:
    """What is known about an array: ends of its entries, doubts, and where it comes from."""

    lo: np.ndarray
    hi: np.ndarray
    doubts: np.ndarray
    origin: Origin
    logarithm_of: Origin | None = None
    linear: Linear | None = None
    quadratic: Linear | None = None  # an entrywise product that is a quadratic form once summed
    shifted: Shifted | None = None
    slope: Slope | None = None
    bend: Bend | None = None
    whole: bool = True  # no entry is ever infinite or not a number

    @property
    def shape(self) -> tuple:
        return self.lo.shape

    @cached_property
    def constant(self) -> bool:
        """Whether no entry depends on the variables."""
        return not (self.doubts & CONSTANT).any()

    @cached_property
    def exact(self) -> bool:
        """Whether all entries are known numbers."""
        return self.constant and bool(np.array_equal(self.lo, self.hi))

    @property
    def affine(self) -> bool:
        return not (self.doubts & (CONVEX | CONCAVE)).any()

    def has(self, properties: int):
        """Where none of the properties is in doubt."""
        return (self.doubts & properties) == 0


_counter = iter(range(1, 2**62))


def known(lo, hi, doubts, **notes: Any) -> Known:
    """A value of its own, with NaN ends widened and the doubts about constants made exact."""
    lo, hi, doubts = np.broadcast_arrays(
        np.asarray(lo, float), np.asarray(hi, float), np.asarray(doubts, np.uint8)
    )
    lo = np.where(np.isnan(lo), -np.inf, lo)
    hi = np.where(np.isnan(hi), np.inf, hi)
    fixed = (doubts & CONSTANT) == 0
    # A constant is affine; it is log-convex and root-convex where it is not negative.
    doubts = np.where(fixed, np.where(lo >= 0, 0, SIGNED), doubts).astype(np.uint8)
    if "origin" not in notes:
        notes["origin"] = Origin(next(_counter), np.arange(lo.size).reshape(lo.shape))
    return Known(lo, hi, doubts, **notes)


def constant(array) -> Known:
    """A known array of numbers."""
    array = np.asarray(array)
    numbers = np.asarray(array, float)
    return known(numbers, numbers, 0)


def variable(lo, hi) -> Known:
    """A variable between two arrays."""
    out = known(lo, hi, AFFINE)
    who = entries_of(out.origin.number, out.lo.size).reshape(out.shape)
    return replace(out, slope=Slope(who, np.ones(out.shape)))


def parameter(lo, hi) -> Known:
    """A constant of which only the ends are known."""
    return known(lo, hi, 0)


def unknown(shape, lo=-np.inf, hi=np.inf) -> Known:
    """Nothing is known but, perhaps, the ends."""
    return known(np.broadcast_to(lo, shape), np.broadcast_to(hi, shape), NOTHING_KNOWN)


# -- ends ------------------------------------------------------------------------------------------


def outward(lo, hi, size, terms: int = 1):
    """Ends computed from `terms` numbers of summed magnitude `size`, with room for rounding."""
    with np.errstate(invalid="ignore", over="ignore"):
        room = ROUNDING * terms * size
        # Zero is exact: it comes from zeros, or from equal numbers.
        lo = np.where((lo == 0) & (size == 0), lo, lo - room)
        hi = np.where((hi == 0) & (size == 0), hi, hi + room)
    return lo, hi


def sum_down(a, b):
    """a + b, rounded down; exact where the floating-point sum is."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        # What rounding took off, exactly (Knuth); NaN where an end is infinite.
        of_b = total - a
        lost = (a - (total - of_b)) + (b - of_b)
    return np.where(lost >= 0, total, np.nextafter(total, -np.inf))


def product_ends(a: Known, b: Known):
    """Ends of an entrywise product; a zero times anything is zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        corners = np.stack(
            np.broadcast_arrays(*(np.nan_to_num(x * y, nan=0.0, posinf=np.inf, neginf=-np.inf)
                                  for x in (a.lo, a.hi) for y in (b.lo, b.hi)))
        )  # fmt: skip
        lo, hi = corners.min(axis=0), corners.max(axis=0)
        # Rounding to nearest keeps signs, but for underflow, which one step outwards repairs.
        zero = ((a.lo == 0) & (a.hi == 0)) | ((b.lo == 0) & (b.hi == 0))
        nonnegative = ((a.lo >= 0) & (b.lo >= 0)) | ((a.hi <= 0) & (b.hi <= 0))
        nonpositive = ((a.lo >= 0) & (b.hi <= 0)) | ((a.hi <= 0) & (b.lo >= 0))
        out_lo, out_hi = np.nextafter(lo, -np.inf), np.nextafter(hi, np.inf)
        out_lo = np.where(nonnegative, np.maximum(out_lo, 0), out_lo)
        out_hi = np.where(nonpositive, np.minimum(out_hi, 0), out_hi)
    return np.where(zero, 0, out_lo), np.where(zero, 0, out_hi)


# -- rules that all others are made of -------------------------------------------------------------


def flipped(doubts):
    """The doubts about minus a value."""
    kept = doubts & CONSTANT
    swapped = ((doubts & CONVEX) << 1) | ((doubts & CONCAVE) >> 1)
    return (kept | swapped | SIGNED).astype(np.uint8)


def negative(x: Known) -> Known:
    """-x."""
    slope = None if x.slope is None else x.slope.scaled(-1)
    return known(-x.hi, -x.lo, flipped(x.doubts), slope=slope)


def scaled_doubts(doubts, lo, hi):
    """The doubts about a value times a constant between two numbers."""
    affine = (doubts & (CONVEX | CONCAVE)) == 0
    mixed = np.where(affine, doubts | SIGNED, NOTHING_KNOWN)
    out = np.where(lo >= 0, doubts, np.where(hi <= 0, flipped(doubts), mixed))
    return np.where((lo == 0) & (hi == 0), 0, out).astype(np.uint8)


def composed(x: Known, lo, hi, doubts, up, down, notes: dict | None = None) -> Known:
    """A scalar function of x with the given ends and doubts, nondecreasing (up), nonincreasing.

    Convex of affine, convex nondecreasing of convex, convex nonincreasing of concave; and the same
    for concave functions.
    """
    affine = x.has(CONVEX | CONCAVE)
    grows = affine | (up & x.has(CONVEX)) | (down & x.has(CONCAVE))
    falls = affine | (up & x.has(CONCAVE)) | (down & x.has(CONVEX))
    convex = ((doubts & CONVEX) == 0) & grows
    concave = ((doubts & CONCAVE) == 0) & falls
    out = np.full(x.shape, SIGNED | CONSTANT, np.uint8)
    out |= np.where(convex, 0, CONVEX).astype(np.uint8)
    out |= np.where(concave, 0, CONCAVE).astype(np.uint8)
    out = np.where(x.has(CONSTANT), 0, out)
    return known(lo, hi, out, **(notes or {}))


def cleared(x: Known, where, properties: int, **notes: Any) -> Known:
    """x with the doubts about some properties removed where a rule proves them."""
    doubts = np.where(where, x.doubts & (NOTHING_KNOWN ^ properties), x.doubts)
    return replace(x, doubts=doubts.astype(np.uint8), **notes)


def definite(matrix: np.ndarray) -> int:
    """What is proven of x . matrix x: CONVEX, CONCAVE or nothing (0)."""
    if positive_semidefinite(matrix):
        return CONVEX
    return CONCAVE if positive_semidefinite(-matrix) else 0


def positive_semidefinite(matrix: np.ndarray) -> bool:
    """Whether x . matrix x >= 0 for all x, proven with room for rounding.

    Parts that do not touch each other are looked at one by one; a diagonal entry of its own needs
    no more than its sign.
    """
    from scipy.sparse.csgraph import connected_components

    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.isfinite(matrix).all():
        return False
    symmetric = 0.5 * (matrix + matrix.T)
    _, labels = connected_components(symmetric != 0, directed=False)
    for label in range(labels.max(initial=-1) + 1):
        part = np.flatnonzero(labels == label)
        block = symmetric[np.ix_(part, part)]
        if len(part) == 1:
            if block[0, 0] < 0:
                return False
            continue
        room = 10 * len(part) * float(np.finfo(float).eps) * np.linalg.norm(block)
        if np.linalg.eigvalsh(block)[0] <= room:
            return False
    return True


# -- the table of rules, by the names of primitives ------------------------------------------------


RULES: dict[str, Callable[..., Known]] = {}


def rule(*names: str):
    """Registers a function as the rule of some primitives."""

    def register(function):
        for name in names:
            RULES[name] = function
        return function

    return register
