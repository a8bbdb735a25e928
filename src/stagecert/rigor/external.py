"""A model's files: its own contents, and the files beside it that hold weights."""

import gzip
import hashlib
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from stagecert.errors import ProblemError
from stagecert.rigor.functions import Refused

_LARGEST_FILE = 2**31


@dataclass(frozen=True)
class Model:
    """The (unpacked) contents of a model file, and of its external files by location."""

    data: bytes
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of the model, followed by the external files in the order of their locations."""
        found = hashlib.sha256(self.data)
        for location in sorted(self.files):
            found.update(self.files[location])
        return found.hexdigest()


def contents(path) -> bytes:
    """A file's contents, unpacked if it is gzipped."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                data = file.read(_LARGEST_FILE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"{path}: cannot be read: {error}.") from None
    if len(data) > _LARGEST_FILE:
        raise ProblemError(f"{path}: larger than 2 GiB.")
    return data


def model_contents(path) -> Model:
    """A model file and the files that it refers to, which are in its folder or below.

    Raises:
        ProblemError: one of them cannot be read.
    """
    path, data = Path(path), contents(path)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        return Model(data)  # whoever reads it will say so
    locations = sorted({location for tensor in _tensors(model) for location in _locations(tensor)})
    if locations and path.open("rb").read(2) == b"\x1f\x8b":
        raise ProblemError(f"{path}: is gzipped, but keeps weights in another file; unpack it.")
    files: dict[str, bytes] = {}
    for location in locations:
        files[location] = contents_beside(path, location)
        if sum(map(len, files.values())) > _LARGEST_FILE:
            raise ProblemError(f"{path}: the files with its weights are larger than 2 GiB.")
    return Model(data, files)


def contents_beside(path: Path, location: str) -> bytes:
    """A file in the folder of a model or below it."""
    parts = Path(location).parts
    folder = path.resolve().parent
    target = (folder / location).resolve()
    if (
        not location
        or Path(location).is_absolute()
        or "\\" in location
        or ".." in parts
        or not target.is_relative_to(folder)
    ):
        raise ProblemError(
            f"{path}: keeps weights in '{location}', which is not in the model's own folder."
        )
    if not target.is_file():
        raise ProblemError(f"{path}: keeps weights in '{location}', which is missing.")
    try:
        with target.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ProblemError(f"{target}: cannot be read: {error}.") from None
    if len(data) > _LARGEST_FILE:
        raise ProblemError(f"{target}: larger than 2 GiB.")
    return data


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All tensors that the checker may read."""
    yield from model.graph.initializer
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            for item in node.attribute:
                yield from (item.t, *item.tensors)


def _locations(tensor: onnx.TensorProto) -> list[str]:
    return [entry.value for entry in tensor.external_data if entry.key == "location"]


def fetched(tensor: onnx.TensorProto, files: dict[str, bytes]) -> onnx.TensorProto:
    """The tensor with its data in it."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = f"'{tensor.name}', which is stored in another file,"
    if len(entries) != len(tensor.external_data) or not entries.keys() <= {
        "location", "offset", "length", "checksum",
    }:  # fmt: skip
        raise Refused(f"{name} has entries that are not understood")
    data = files.get(entries.get("location", ""))
    if data is None:
        raise Refused(f"{name} is missing")
    try:
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except KeyError:
        raise Refused(f"{name} has an unknown type") from None
    size = math.prod(tensor.dims) * kind.itemsize
    numbers = [entries.get("offset", "0"), entries.get("length", str(size))]
    if not all(n.isascii() and n.isdigit() and len(n) < 20 for n in numbers):
        raise Refused(f"{name} has an impossible offset or length")
    offset, length = map(int, numbers)
    if length != size or offset + length > len(data):
        raise Refused(f"{name} has an offset and a length that do not fit its shape or the file")
    found = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    found.raw_data = data[offset : offset + length]
    return found
