"""The arithmetics of the checker: float64 with an allowance for every rounding, or rationals."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
from flint import fmpq

EPS = float(np.finfo(np.float64).eps)  # twice the largest relative error of one rounding
TINY = float(np.finfo(np.float64).tiny)  # more than an underflow can lose
# Intervals beyond this are refused: then nothing can overflow.
LARGEST = 10**30


class Arithmetic:
    """Arrays of float64, or object arrays of rationals if `exact`."""

    def __init__(self, exact: bool = False):
        self.exact = exact
        self.one = 0 if exact else 1  # roundings in one operation
        self.half: Any = fmpq(1, 2) if exact else 0.5

    def array(self, x: Any) -> Any:
        """Float64 numbers, exactly."""
        x = np.asarray(x, np.float64)
        return rational(x) if self.exact else x

    def slip(self, terms: int, loose: int) -> Any:
        """The relative error of sums of `terms` products whose coefficients have `loose` more."""
        count = loose if self.exact else terms + loose
        return fmpq(count, 2**52) if self.exact else count * EPS

    def tiny(self, terms: int) -> Any:
        """What `terms` underflows can lose."""
        return 0 if self.exact else terms * TINY

    def down(self, x: Any) -> Any:
        """No more than x, however it was rounded once."""
        return x if self.exact else np.nextafter(x, -np.inf)

    def up(self, x: Any) -> Any:
        """No less than x, however it was rounded once."""
        return x if self.exact else np.nextafter(x, np.inf)

    def outward(self, low: Any, high: Any) -> tuple[np.ndarray, np.ndarray]:
        """Float64 intervals around intervals."""
        return (_floor64(low), -_floor64(-high)) if self.exact else (low, high)

    def near(self, value: Fraction) -> tuple[Any, Any]:
        """A number near a rational one, and a bound on how far it is off."""
        if self.exact:
            return fmpq(value.numerator, value.denominator), 0
        number = value.numerator / value.denominator
        off = abs(value - Fraction(number))
        return number, 0.0 if off == 0 else abs(number) * EPS + TINY


def _rational(x: float) -> fmpq:
    return fmpq(*float(x).as_integer_ratio())


def _below(x: fmpq | int) -> float:
    x = fmpq(x)  # zeros that padding adds are integers
    number = int(x.p) / int(x.q)
    return number if _rational(number) <= x else math.nextafter(number, -math.inf)


def _floor64(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.frompyfunc(_below, 1, 1)(x), np.float64)


_rationals = np.frompyfunc(_rational, 1, 1)


def rational(x: np.ndarray) -> np.ndarray:
    """Float64 numbers as rationals."""
    return np.asarray(_rationals(x), dtype=object)
