"""Images and their counterexamples as pictures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from stagecert.robust.data import DataSet

# Flat inputs of at least so many pixels, a square number, are shown as squares.
SQUARE = 64


@dataclass(frozen=True, eq=False)
class Shown:
    """How arrays of a data set become pictures.

    Attributes:
        data: the images.
        shape: (height, width), or (channels, height, width) with one channel or three.
        eps: how far pixels may move.
        clip: the range of pixels, or None.
        mean, std: what undoes the normalisation, for each channel.
    """

    data: DataSet
    shape: tuple[int, ...]
    eps: float
    clip: tuple[float, float] | None
    mean: np.ndarray
    std: np.ndarray

    @staticmethod
    def of(data: DataSet, configuration: Mapping[str, Any]) -> "Shown | None":
        """For a run with this configuration; None if its inputs are no pictures."""
        shape = _picture(data.images.shape[1:])
        if shape is None:
            return None
        clip = configuration["clip"]
        mean, std = (
            np.array([float(Fraction(v)) for v in configuration[name]]).reshape(-1, 1)
            for name in ("mean", "std")
        )
        return Shown(
            data,
            shape,
            float(Fraction(configuration["eps"])),
            None if clip is None else (float(Fraction(clip[0])), float(Fraction(clip[1]))),
            mean,
            std,
        )

    def pictures(self, place: int, point: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """An image, its change and the changed one.

        Args:
            place: of the image.
            point: what the model got instead, normalised.
        """
        image = self.data.images[place].astype(float)
        if self.data.images.dtype == np.uint8:
            image = image / 255
        channels = max(len(self.mean), len(self.std))
        changed = point.astype(float).reshape(channels, -1) * self.std + self.mean
        changed = changed.reshape(image.shape)
        low, high = self.clip or (image.min(), image.max())
        scale = high - low or 1.0
        change = 0.5 + 0.5 * (changed - image) / (self.eps or 1.0)
        one, other = (image - low) / scale, (changed - low) / scale
        return self._arranged(one), self._arranged(change), self._arranged(other)

    def _arranged(self, image: np.ndarray) -> np.ndarray:
        image = image.reshape(self.shape)
        if image.ndim == 2:
            return image
        return image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)


def _picture(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape as which inputs of this one are shown; None if they are no pictures."""
    if len(shape) == 3 and shape[0] in (1, 3):
        return shape
    if len(shape) == 2 and min(shape) > 1:
        return shape
    size = math.prod(shape)
    side = math.isqrt(size)
    return (side, side) if size >= SQUARE and side * side == size and max(shape) == size else None
