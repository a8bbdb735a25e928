"""The boxes around images, rounded so that what is claimed holds for the exact boxes.

The exact box of a pixel x is [x - eps, x + eps], cut by the range of pixels and then normalised:
(pixel - mean) / std. Every step is done on intervals of float64 that enclose the exact number:
after each operation, both ends move outwards by one unit in the last place, more than it may have
rounded. Proofs use the outer ends of the results, counterexamples the inner ones.
"""

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np

from stagecert.errors import ProblemError

LARGEST = 10**30


def written(eps: Fraction | str) -> str:
    """A radius as people write it: in 255ths where that is whole, as pixels are levels of 255."""
    levels = Fraction(eps) * 255
    return f"{levels}/255" if levels.denominator == 1 and 0 < levels < 255 else str(eps)


@dataclass(frozen=True)
class Preparation:
    """How images become boxes of network inputs.

    Attributes:
        eps: how far each pixel may move.
        clip: the range of pixels, or None.
        mean, std: for each channel (the first of an image's three axes), or one for all.
    """

    eps: Fraction
    clip: tuple[Fraction, Fraction] | None = (Fraction(0), Fraction(1))
    mean: tuple[Fraction, ...] = (Fraction(0),)
    std: tuple[Fraction, ...] = (Fraction(1),)

    def check(self, images: np.ndarray) -> None:
        """Says what is wrong with the numbers, alone or for these images."""
        if self.eps < 0:
            raise ProblemError(f"eps must not be negative, but is {self.eps}.")
        for name, values in (("eps", (self.eps,)), ("clip", self.clip or ()),
                             ("mean", self.mean), ("std", self.std)):  # fmt: skip
            if any(abs(v) > LARGEST for v in values):
                raise ProblemError(f"{name} must be at most 1e30.")
        if any(s <= 0 for s in self.std):
            raise ProblemError("std must be positive.")
        channels = images.shape[1] if images.ndim == 4 else 1
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise ProblemError(
                    f"{name} has {len(values)} entries, but images have {channels} channels."
                )
        if self.clip is None:
            return
        low, high = self.clip
        if not low < high:
            raise ProblemError(f"clip must be a range LOW,HIGH, not {low},{high}.")
        if images.dtype == np.uint8:
            if low > 0 or high < 1:
                raise ProblemError("clip must contain 0,1 for images in uint8.")
            return
        outside = np.argwhere((images < float(low)) | (images > float(high)))
        if len(outside):
            at = outside[0].tolist()
            raise ProblemError(
                f"images has {images[tuple(at)]:g} at {at}, outside of {low},{high}. Scale the "
                "images, or say what the range of pixels is (--clip LOW,HIGH or --clip none)."
            )

    def warning(self, images: np.ndarray) -> str | None:
        """What is allowed but hardly meant: a radius that takes every image to every other."""
        if self.clip is not None:
            low, high = map(float, self.clip)
        elif images.dtype == np.uint8:
            low, high = 0.0, 1.0
        else:
            low, high = float(images.min()), float(images.max())
        if not low < high or self.eps < high - low:
            return None
        meant = f" Did you mean {self.eps}/255?" if 1 <= self.eps < 255 and high <= 1 else ""
        return (
            f"eps is {self.eps}, but pixels lie between {low:g} and {high:g}: every picture is "
            f"within reach of every other then, and hardly an image can be robust.{meant}"
        )


@dataclass(frozen=True, eq=False)
class Boxes:
    """Inputs of a network, (count, *shape).

    Attributes:
        centre: the images themselves, as float32.
        lower, upper: float64 boxes that contain the exact ones.
        least, most: float32 boxes inside of the exact ones; where an exact one has no float32, the
            image itself.
    """

    centre: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    least: np.ndarray
    most: np.ndarray


def boxes_around(images: np.ndarray, how: Preparation) -> Boxes:
    """The boxes around some images."""
    if images.dtype == np.uint8:
        return _of_levels(images, how)
    return _boxes(images, how)


def _of_levels(images: np.ndarray, how: Preparation) -> Boxes:
    """The same for pixels that have few levels: the boxes of each level, looked up."""
    levels = np.arange(256, dtype=np.uint8)
    channels = max(len(how.mean), len(how.std))
    if channels == 1:
        table = _boxes(levels[None], how)
        return Boxes(*(getattr(table, f.name)[0][images] for f in fields(Boxes)))
    # One row of levels for each channel; images are (count, channels, height, width).
    table = _boxes(np.broadcast_to(levels, (1, channels, 1, 256)), how)
    every = np.arange(channels)[:, None, None]
    return Boxes(*(getattr(table, f.name)[0, every, 0, images] for f in fields(Boxes)))


def _boxes(images: np.ndarray, how: Preparation) -> Boxes:
    single = _pixels(images)
    exact = _Interval.of(single.astype(np.float64))
    low, high = _ends(exact, how)
    centre = _rounded(_normalised(exact, how).middle())
    lower, upper = low.low, high.high
    if images.dtype in (np.uint8, np.float64):
        # Proofs cover the box around the number that was stored too, not only around the float32
        # that it becomes.
        stored = images.astype(np.float64)
        pixels = _Interval.of(stored)
        pixels = pixels / _Interval.of(255.0) if images.dtype == np.uint8 else pixels
        also_low, also_high = _ends(pixels, how)
        lower, upper = np.minimum(lower, also_low.low), np.maximum(upper, also_high.high)
    # What the network gets for the image itself is covered too, whatever rounding made of it.
    lower, upper = np.minimum(lower, centre), np.maximum(upper, centre)
    least, most = _up32(low.high), -_up32(-high.low)
    none = least > most
    least, most = np.where(none, centre, least), np.where(none, centre, most)
    return Boxes(centre, lower, upper, least, most)


def _pixels(images: np.ndarray) -> np.ndarray:
    """Pixels in float32, uint8 divided by 255, as networks usually get them."""
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255)
    return _rounded(images.astype(np.float64))


def _rounded(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if not np.all(np.isfinite(single)):
        raise ProblemError("An image has numbers that are too large for single precision.")
    return single


@dataclass(frozen=True, eq=False)
class _Interval:
    """Intervals [low, high] that contain exact numbers."""

    low: Any
    high: Any

    @staticmethod
    def of(value) -> "_Interval":
        """Numbers as they are; a Fraction between its neighbours, if it is not a float itself."""
        if not isinstance(value, Fraction):
            return _Interval(value, value)
        nearest = float(value)
        if Fraction(nearest) == value:
            return _Interval(nearest, nearest)
        return _Interval(np.nextafter(nearest, -np.inf), np.nextafter(nearest, np.inf))

    def __add__(self, other: "_Interval") -> "_Interval":
        return _widened(self.low + other.low, self.high + other.high)

    def __neg__(self) -> "_Interval":
        return _Interval(-self.high, -self.low)

    def __truediv__(self, other: "_Interval") -> "_Interval":
        """Divided by a positive number."""
        ends = [a / b for a in (self.low, self.high) for b in (other.low, other.high)]
        return _widened(np.minimum.reduce(ends), np.maximum.reduce(ends))

    def middle(self):
        """About the middle."""
        return 0.5 * self.low + 0.5 * self.high


def _widened(low, high) -> _Interval:
    return _Interval(np.nextafter(low, -np.inf), np.nextafter(high, np.inf))


def _ends(pixels: _Interval, how: Preparation) -> tuple[_Interval, _Interval]:
    """Both ends of the boxes around pixels, in the network's units."""
    # Moving by nothing is exact.
    eps = _Interval.of(how.eps)
    low, high = (pixels + -eps, pixels + eps) if how.eps else (pixels, pixels)
    if how.clip is not None:
        least, most = map(_Interval.of, how.clip)
        low = _Interval(np.maximum(low.low, least.low), np.maximum(low.high, least.high))
        high = _Interval(np.minimum(high.low, most.low), np.minimum(high.high, most.high))
    return _normalised(low, how), _normalised(high, how)


def _normalised(pixels: _Interval, how: Preparation) -> _Interval:
    if set(how.mean) == {Fraction(0)} and set(how.std) == {Fraction(1)}:
        return pixels
    shape = (-1, *(1,) * (np.ndim(pixels.low) - 2))

    def each(values):
        parts = [_Interval.of(v) for v in values]
        return _Interval(
            np.array([p.low for p in parts]).reshape(shape),
            np.array([p.high for p in parts]).reshape(shape),
        )

    return (pixels + -each(how.mean)) / each(how.std)


def _up32(values: np.ndarray) -> np.ndarray:
    """The smallest float32 numbers that are not below."""
    single = values.astype(np.float32)
    return np.where(
        single.astype(np.float64) < values, np.nextafter(single, np.float32(np.inf)), single
    ).astype(np.float32)
