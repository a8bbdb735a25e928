"""Losses of one prediction z for one target y: convex in z and least at z = y.

All are per unit of weight. Every loss says how large its terms are, so that the certificate can
charge for rounding: a value computed in floating point is within `ROUNDING * size` of the true one.
"""

import abc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stagecert.errors import ProblemError

# Sixteen units in the last place: the formulas below take fewer operations than that, and the
# logarithms of the usual mathematical libraries are within four.
ROUNDING = 16 * float(np.finfo(float).eps)


@dataclass(frozen=True)
class Loss(abc.ABC):
    """A convex loss.

    Attributes:
        name: how users call it.
        fits_means: whether the best constant is the weighted mean. The isotonic fits of all such
            losses are one and the same (they are Bregman divergences), that of least squares.
        kinked: whether it is piecewise linear with its only kink at the target.
    """

    name: ClassVar[str]
    fits_means: ClassVar[bool] = False
    kinked: ClassVar[bool] = False

    def check_targets(self, y: np.ndarray) -> None:
        """Raises an error that names the first target for which there is no loss."""
        return

    @abc.abstractmethod
    def value(self, y, z) -> np.ndarray:
        """The loss."""

    def size(self, y, z) -> np.ndarray:
        """The sum of the magnitudes of the terms that `value` adds up."""
        return self.value(y, z)

    @abc.abstractmethod
    def slopes(self, y, z) -> tuple[np.ndarray, np.ndarray]:
        """The derivatives to the left and to the right of z."""

    def slope_size(self, y, z) -> np.ndarray:
        """The sum of the magnitudes of the terms of the slopes."""
        left, right = self.slopes(y, z)
        return np.maximum(np.abs(left), np.abs(right))

    @abc.abstractmethod
    def tilted(self, y, tilt, low, high) -> np.ndarray:
        """Where loss(z) + tilt * z is least on [low, high], up to rounding."""

    def curvature(self, z) -> np.ndarray:
        """slope(z) / (z - y), for losses that fit means; 0 where z is at the edge of its domain."""
        raise NotImplementedError


@dataclass(frozen=True)
class Squared(Loss):
    """(z - y)^2."""

    name = "squared"
    fits_means = True

    def value(self, y, z):
        return (z - y) ** 2

    def slopes(self, y, z):
        slope = 2.0 * (z - y)
        return slope, slope

    def tilted(self, y, tilt, low, high):
        return np.clip(y - 0.5 * tilt, low, high)

    def curvature(self, z):
        return np.full_like(z, 2.0)


@dataclass(frozen=True)
class Quantile(Loss):
    """level * (y - z) where z < y, (1 - level) * (z - y) where z > y, times a scale."""

    level: float = 0.5
    scale: float = 1.0
    name = "quantile"
    kinked = True

    def value(self, y, z):
        return self.scale * np.where(z < y, self.level * (y - z), (1.0 - self.level) * (z - y))

    def slopes(self, y, z):
        below, above = -self.scale * self.level, self.scale * (1.0 - self.level)
        return np.where(z <= y, below, above), np.where(z < y, below, above)

    def tilted(self, y, tilt, low, high):
        least = np.where(tilt > self.scale * self.level, low, y)
        least = np.where(tilt < -self.scale * (1.0 - self.level), high, least)
        return np.clip(least, low, high)


@dataclass(frozen=True)
class Huber(Loss):
    """(z - y)^2 / 2 where |z - y| <= delta, delta * (|z - y| - delta / 2) beyond."""

    delta: float = 1.0
    name = "huber"

    def value(self, y, z):
        distance = np.abs(z - y)
        straight = self.delta * (distance - 0.5 * self.delta)
        return np.where(distance <= self.delta, 0.5 * distance**2, straight)

    def slopes(self, y, z):
        slope = np.clip(z - y, -self.delta, self.delta)
        return slope, slope

    def tilted(self, y, tilt, low, high):
        least = np.where(tilt > self.delta, low, y - tilt)
        least = np.where(tilt < -self.delta, high, least)
        return np.clip(least, low, high)


@dataclass(frozen=True)
class Logistic(Loss):
    """-y log z - (1 - y) log(1 - z): z is a probability, y is 0, 1 or a frequency between."""

    name = "logistic"
    fits_means = True

    def check_targets(self, y):
        _name_first(y, (y < 0) | (y > 1), "the logistic loss needs targets between 0 and 1")

    def value(self, y, z):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ones = np.where(y > 0, -y * np.log(z), 0.0)
            zeros = np.where(y < 1, -(1.0 - y) * np.log1p(-z), 0.0)
        return ones + zeros

    def _terms(self, y, z):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(y > 0, -y / z, 0.0), np.where(y < 1, (1.0 - y) / (1.0 - z), 0.0)

    def slopes(self, y, z):
        down, up = self._terms(y, z)
        return down + up, down + up

    def slope_size(self, y, z):
        down, up = self._terms(y, z)
        return up - down

    def tilted(self, y, tilt, low, high):
        # The root of tilt z^2 - (tilt + 1) z + y in [0, 1], without cancellation.
        middle = tilt + 1.0
        root = np.sqrt(np.maximum(middle**2 - 4.0 * tilt * y, 0.0))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            least = np.where(middle >= 0, 2.0 * y / (middle + root), (middle - root) / (2.0 * tilt))
        return np.clip(np.where(np.isnan(least), y, least), low, high)

    def curvature(self, z):
        # Also 0 where it would overflow: the multiplier it scales is no more than rounding there.
        inside = (z > 1e-300) & (z < 1)
        return np.where(inside, 1.0 / np.where(inside, z * (1.0 - z), 1.0), 0.0)


@dataclass(frozen=True)
class Poisson(Loss):
    """z - y + y log(y / z), half the Poisson deviance: z is a rate, y a count or a mean count."""

    name = "poisson"
    fits_means = True

    def check_targets(self, y):
        _name_first(y, y < 0, "the Poisson loss needs targets that are not negative")

    def _logarithm(self, y, z):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(y > 0, y * np.log(np.where(y > 0, y, 1.0) / z), 0.0)

    def value(self, y, z):
        return (z - y) + self._logarithm(y, z)

    def size(self, y, z):
        # The quotient inside the logarithm is rounded too: an absolute error of a unit, times y.
        return np.abs(z - y) + np.abs(self._logarithm(y, z)) + y

    def slopes(self, y, z):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            slope = np.where(y > 0, (z - y) / z, 1.0)
        return slope, slope

    def tilted(self, y, tilt, low, high):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            least = np.where(tilt > -1.0, y / (1.0 + tilt), high)
        return np.clip(least, low, high)

    def curvature(self, z):
        inside = z > 1e-300
        return np.where(inside, 1.0 / np.where(inside, z, 1.0), 0.0)


def _name_first(y, wrong, what: str) -> None:
    if np.any(wrong):
        entry = int(np.flatnonzero(wrong)[0])
        raise ProblemError(f"y[{entry}] = {y[entry]}: {what}.")


LOSSES = ("squared", "absolute", "quantile", "huber", "logistic", "poisson")


def named_loss(name: str, *, quantile: float = 0.5, delta: float = 1.0) -> Loss:
    """The loss of a name, with its parameter where it has one."""
    if name == "quantile" and not (np.isreal(quantile) and 0.0 < quantile < 1.0):
        raise ProblemError(f"quantile = {quantile!r}: it must be between 0 and 1.")
    if name == "huber" and not (np.isreal(delta) and 0.0 < delta < np.inf):
        raise ProblemError(f"delta = {delta!r}: it must be positive and finite.")
    losses = {
        "squared": Squared,
        "absolute": lambda: Quantile(0.5, 2.0),
        "quantile": lambda: Quantile(float(quantile)),
        "huber": lambda: Huber(float(delta)),
        "logistic": Logistic,
        "poisson": Poisson,
    }
    if name not in losses:
        raise ProblemError(f"Unknown loss {name!r}; known are {', '.join(LOSSES)}.")
    return losses[name]()
