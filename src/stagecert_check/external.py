"""What a model has outside of its graph: files beside it that hold weights, its own functions."""

import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from stagecert_check.errors import ProblemError
from stagecert_check.functions import Refused

_LARGEST_FILE = 2**31
_GZIP = b"\x1f\x8b"

FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class Model:
    """The (unpacked) contents of a model file, and of its external files by location."""

    data: bytes
    files: dict[str, bytes] = field(default_factory=dict)
    digest_of_parts: str = ""  # of several models in one; see joining.py

    @property
    def digest(self) -> str:
        """SHA-256 of the model, followed by its external files in the order of their locations.

        Before each of these stand its location and its length, so that no bytes can move from one
        file to another.
        """
        if self.digest_of_parts:
            return self.digest_of_parts
        found = hashlib.sha256(self.data)
        for location, data in sorted(self.files.items()):
            found.update(f"\0{location}\0{len(data)}\0".encode() + data)
        return found.hexdigest()


def contents(path: FilePath) -> bytes:
    """A file's contents, unpacked if it is gzipped."""
    try:
        data = _raw(path)
        if data[:2] == _GZIP:
            with gzip.open(path) as file:
                data = _limited(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"{path}: cannot be read: {error}.") from None
    return data


def _raw(path: FilePath) -> bytes:
    with Path(path).open("rb") as file:
        return _limited(path, file)


def _limited(path: FilePath, file: Any) -> bytes:
    parts, size = [], 0
    # Piece by piece: to read up to a limit at once takes the memory of the limit.
    while part := file.read(2**20):
        parts.append(part)
        size += len(part)
        if size > _LARGEST_FILE:
            raise ProblemError(f"{path}: larger than 2 GiB.")
    return b"".join(parts)


def model_contents(path: FilePath) -> Model:
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
    locations = sorted({location for tensor in tensors(model) for location in _locations(tensor)})
    try:
        with path.open("rb") as file:
            if locations and file.read(2) == _GZIP:
                raise ProblemError(
                    f"{path}: is gzipped, but keeps weights in another file; unpack it."
                )
        targets = {location: _inside(path, location) for location in locations}
        if sum(target.stat().st_size for target in targets.values()) > _LARGEST_FILE:
            raise ProblemError(f"{path}: the files with its weights are larger than 2 GiB.")
        files = {location: _raw(target) for location, target in targets.items()}
    except OSError as error:
        raise ProblemError(f"{path}: its weights cannot be read: {error}.") from None
    return Model(data, files)


def _inside(path: Path, location: str) -> Path:
    """A file in the folder of a model, or in one below it; links must not lead out of it."""
    folder, relative = path.parent.resolve(), Path(location)
    strange = not location or "\\" in location or "\0" in location
    outside = strange or relative.is_absolute() or ".." in relative.parts
    target = folder if outside else (folder / relative).resolve()
    if outside or not target.is_relative_to(folder):
        raise ProblemError(
            f"{path}: keeps weights in '{location}', which is not in the model's own folder."
        )
    if not target.is_file():
        raise ProblemError(f"{path}: keeps weights in '{location}', which is missing.")
    return target


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
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


# -- a model's own functions -----------------------------------------------------------------------


MOST_NODES = 100_000
_DEEPEST = 100

_Key = tuple[str, str, str]
_Functions = dict[_Key, onnx.FunctionProto]


def inlined(model: onnx.ModelProto, opset: int) -> list[onnx.NodeProto]:
    """The nodes of the model's graph, with those of the functions that it calls."""
    if not model.functions:
        return list(model.graph.node)
    functions: _Functions = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise Refused(f"the function '{function.name}' is defined twice")
        # Whatever is standard means what the standard says.
        if function.domain in ("", "ai.onnx"):
            raise Refused(f"the function '{function.name}' is in the standard's own domain")
        versions = {o.version for o in function.opset_import if o.domain in ("", "ai.onnx")}
        if not versions <= {opset}:
            raise Refused(f"the function '{function.name}' uses another opset than the model")
        functions[key] = function
    _count(list(model.graph.node), functions, {}, 0)
    return _expanded(list(model.graph.node), functions, iter(range(MOST_NODES)))


def _key(node: onnx.NodeProto) -> _Key:
    return (node.domain, node.op_type, node.overload)


def _count(nodes: Any, functions: _Functions, known: dict[_Key, int], depth: int) -> int:
    """How many nodes there will be, without making them."""
    if depth > _DEEPEST:
        raise Refused("the model's functions call themselves, or are nested too deep")
    total = 0
    for node in nodes:
        key = _key(node)
        if key not in functions:
            total += 1
            continue
        if key not in known:
            known[key] = _count(functions[key].node, functions, known, depth + 1)
        total += known[key] + 1
        if total > MOST_NODES:
            raise Refused(f"the model has more than {MOST_NODES} nodes with those of its functions")
    return total


def _expanded(nodes: Any, functions: _Functions, numbers: Any) -> list[onnx.NodeProto]:
    found = []
    for node in nodes:
        function = functions.get(_key(node))
        if function is None:
            found.append(node)
        else:
            found += _expanded(_body(node, function, next(numbers)), functions, numbers)
    return found


def _body(call: onnx.NodeProto, function: onnx.FunctionProto, number: int) -> list[onnx.NodeProto]:
    """The function's nodes; their values have names of their own but for inputs and outputs."""
    what = f"the call '{call.name}' of the function '{function.name}'"
    if len(call.input) > len(function.input) or len(call.output) > len(function.output):
        raise Refused(f"{what} has too many inputs or outputs")
    if len(set(function.input)) != len(function.input):
        raise Refused(f"the function '{function.name}' has two inputs of one name")
    given = {item.name: item for item in function.attribute_proto}
    for item in call.attribute:
        if item.name not in given and item.name not in function.attribute:
            raise Refused(f"{what} has an unknown attribute '{item.name}'")
        given[item.name] = item
    names = dict.fromkeys(function.input, "") | dict(zip(function.input, call.input, strict=False))
    outer = dict(zip(function.output, call.output, strict=False))
    nodes = []
    for node in function.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for k, name in enumerate(node.input):
            if name and name not in names:
                raise Refused(f"the function '{function.name}' reads '{name}', which nothing makes")
            copy.input[k] = names[name] if name else ""
        for k, name in enumerate(node.output):
            if name and name in names:
                raise Refused(f"the function '{function.name}' makes '{name}' twice")
            if name:
                names[name] = copy.output[k] = outer.get(name) or f"{name}\0{number}"
        del copy.attribute[:]
        for item in node.attribute:
            value = _resolved(item, given, what)
            if value is not None:
                copy.attribute.append(value)
        nodes.append(copy)
    if any(name not in names or name in function.input for name in function.output):
        raise Refused(f"the function '{function.name}' does not make all of its outputs")
    return nodes


def _resolved(
    item: onnx.AttributeProto, given: dict[str, onnx.AttributeProto], what: str
) -> onnx.AttributeProto | None:
    """An attribute of a function's node; None if it refers to one that the call leaves out."""
    if not item.ref_attr_name:
        return item
    value = given.get(item.ref_attr_name)
    if value is None:
        return None
    if value.ref_attr_name or value.type != item.type:
        raise Refused(f"{what} has an attribute '{item.ref_attr_name}' of another type")
    found = onnx.AttributeProto()
    found.CopyFrom(value)
    found.name = item.name
    return found
