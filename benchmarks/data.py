"""The data of benchmarks: where they are, what is missing, and how images are read."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stagecert.errors import ProblemError

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("STAGECERT_DATA") or ROOT.parent / "shared" / "data")


def network_file(data: Path, network: str) -> Path:
    """Where one of the paper's networks is."""
    return data / "networks" / "paper" / f"{network}.onnx"


def images_file(data: Path) -> Path:
    """Where the test images are."""
    return data / "cifar10" / "test.npz"


def require(data: Path, networks: Sequence[str]) -> None:
    """Says what is missing from the folder of data, if anything is."""
    needed = [images_file(data), *(network_file(data, name) for name in networks)]
    missing = [path for path in needed if not path.is_file()]
    if missing:
        raise ProblemError(
            f"{missing[0]} is not there"
            + (f" ({len(missing)} files are missing)" if len(missing) > 1 else "")
            + ".\nGive the folder of the data with --data, or set STAGECERT_DATA to it. It has"
            "\n  cifar10/test.npz: `images` (uint8, batch x height x width x channels), `labels`"
            "\n  networks/paper/NAME.onnx: the networks, NAME as in tiny_relu_adv"
            "\nNetworks are trained by `python -m benchmarks.paper.train`."
        )


def read_images(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """`images` (uint8, batch x height x width [x channels]) and `labels` of an .npz file.

    Raises:
        ProblemError: the file is damaged, or is another one.
        OSError: there is no file that may be read.
    """
    with path.open("rb") as stream:
        try:
            with np.load(stream) as file:
                arrays = {name: file[name] for name in ("images", "labels") if name in file.files}
        except Exception as error:  # NumPy raises whatever the layer that fails does
            raise ProblemError(f"{path} cannot be read: {error}") from error
    for name in ("images", "labels"):
        if name not in arrays:
            raise ProblemError(f"{path} has no array '{name}'")
    images, labels = arrays["images"], arrays["labels"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ProblemError(
            f"{path}: images must be uint8, batch x height x width x channels; they are "
            f"{images.dtype} of shape {images.shape}"
        )
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise ProblemError(f"{path}: labels must be whole numbers, one for each image")
    if len(labels) == 0 or labels.min() < 0:
        raise ProblemError(f"{path}: there must be images, and labels from 0 on")
    return images, labels
