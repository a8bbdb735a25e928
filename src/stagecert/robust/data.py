"""Reading data sets: images and labels, checked before any work."""

import re
import zipfile
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from stagecert.errors import ProblemError

# Names that are tried in this order.
IMAGES = ("images", "inputs", "x", "X", "x_test", "data")
LABELS = ("labels", "y", "Y", "y_test", "targets")


@dataclass(frozen=True, eq=False)
class DataSet:
    """Images as they are stored, in the shape that the network takes, and their labels."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def number(value: Any, name: str) -> Fraction:
    """A number that stands for exactly what is written: '8/255', '0.03', 0.03 or a Fraction."""
    if isinstance(value, str):
        # Longer exponents would make numbers that fill the memory.
        if not re.fullmatch(r"\s*[-+]?[\d_./]{1,400}([eE][-+]?\d{1,3})?\s*", value):
            raise ProblemError(f"{name} must be a number like 8/255 or 0.03, not {value!r}.")
    elif isinstance(value, np.generic):
        value = value.item()
    try:
        return Fraction(value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        raise ProblemError(f"{name} must be a number like 8/255 or 0.03, not {value!r}.") from None


def load(path: Path, images: str | None = None, labels: str | None = None) -> tuple[Any, Any]:
    """The arrays of images and of labels in an .npz file.

    Args:
        path: the file.
        images, labels: their names; by default the first of IMAGES and LABELS that is there.

    Raises:
        ProblemError: the file cannot be read, or has no such array.
    """
    try:
        # Reading as a zip archive first: NumPy takes anything else for pickled data.
        with zipfile.ZipFile(path):
            pass
        with np.load(path, allow_pickle=False) as file:
            names = file.files
            return (
                file[_name(path, names, images, IMAGES, "images")],
                file[_name(path, names, labels, LABELS, "labels")],
            )
    except ProblemError:
        raise
    except FileNotFoundError:
        raise ProblemError(f"{path} does not exist.") from None
    except zipfile.BadZipFile:
        raise ProblemError(f"{path} is no .npz file, which `numpy.savez` makes.") from None
    except Exception as error:  # damaged archives raise errors of many types
        raise ProblemError(f"{path} cannot be read: {error or type(error).__name__}") from None


def _name(path, names, asked: str | None, usual: tuple[str, ...], what: str) -> str:
    there = ", ".join(names) or "none"
    if asked is not None:
        if asked not in names:
            raise ProblemError(f"{path} has no array '{asked}'. Its arrays: {there}.")
        return asked
    for name in usual:
        if name in names:
            return name
    raise ProblemError(
        f"{path} has no array of {what}: none is named {', '.join(usual)}. Its arrays: {there}. "
        f"Name one with --{what}."
    )


def data_set(images, labels, shape: tuple[int, ...], classes: int) -> DataSet:
    """Images in the network's shape, with labels; or what is wrong with them.

    Args:
        images: (count, ...), floating-point numbers or uint8.
        labels: (count,), whole numbers.
        shape: what the network takes, without a batch axis.
        classes: how many outputs it has.
    """
    images, labels = np.asarray(images), np.asarray(labels)
    if images.dtype != np.uint8 and images.dtype not in (np.float16, np.float32, np.float64):
        raise ProblemError(
            f"images are {images.dtype}; they must be uint8 (0 to 255) or floating-point numbers."
        )
    if images.ndim == 0 or len(images) == 0:
        raise ProblemError("images has no images: its first axis must count them.")
    arranged = _arranged(images, shape)
    bad = np.argwhere(~np.isfinite(arranged))
    if len(bad):
        at = bad[0].tolist()
        raise ProblemError(f"images is not finite at {at}: {arranged[tuple(at)]}.")
    return DataSet(arranged, _labels(labels, len(images), classes))


def _labels(labels: np.ndarray, count: int, classes: int) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (count,):
        raise ProblemError(
            f"labels must have shape ({count},), one for each image, but have {labels.shape}."
        )
    if labels.dtype.kind not in "iuf":
        raise ProblemError(f"labels must be whole numbers, but are {labels.dtype}.")
    with np.errstate(invalid="ignore"):
        whole = labels.astype(np.int64)
        wrong = np.flatnonzero((whole != labels) | (labels < 0) | (labels >= classes))
    if len(wrong):
        at = int(wrong[0])
        raise ProblemError(
            f"labels[{at}] is {labels[at]}, but the model has {classes} outputs: labels must be "
            f"whole numbers from 0 to {classes - 1}."
        )
    return whole


def _arranged(images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Images in the shape of the network's input, if there is only one way to get there."""
    given = images.shape[1:]
    if given == shape:
        return images
    # Colours last, as most image libraries have them.
    last_to_first = (*given[-1:], *given[:-1])
    if len(given) == 3 and last_to_first == shape:
        return np.ascontiguousarray(np.moveaxis(images, -1, 1))
    # Without colours there is only one order of pixels: rows from top to bottom.
    plain = len([n for n in given if n > 1]) <= 2 or len(given) == 1
    plain_there = len([n for n in shape if n > 1]) <= 2
    if plain and plain_there and prod(given) == prod(shape):
        spread = [n for n in given if n > 1]
        wanted = [n for n in shape if n > 1]
        if spread == wanted or 1 in (len(spread), len(wanted)):
            return images.reshape(len(images), *shape)
    text = " x ".join(map(str, given)) or "number"
    wants = " x ".join(map(str, shape)) or "number"
    hint = ""
    if prod(given) == prod(shape):
        hint = " Both have as many entries, but in which order is not clear: reshape the images."
    raise ProblemError(f"Each image is {text}, but the model takes {wants}.{hint}")
