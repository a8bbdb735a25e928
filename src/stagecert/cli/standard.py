"""Networks and counterexamples on the command line as the VNN-LIB standard has them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from stagecert.errors import ProblemError
from stagecert.files import write_whole
from stagecert_check.external import contents
from stagecert_check.properties import Network, Property, Tensor


def networks(given: list[str], wanted: Property) -> Any:
    """The model of a property, from `name=path` for each network that is not equal to another.

    Raises:
        ProblemError: a network is missing or unknown, or its types are not those of the property.
    """
    paths: dict[str, Path] = {}
    for one in given:
        name, sign, path = one.partition("=")
        if not (name and sign and path) or name in paths:
            raise ProblemError(
                f"--network {one}: give NAME=FILE, once for each network of the property."
            )
        paths[name] = Path(path)
    needed = {one.name for one in wanted.networks if one.equal_to is None}
    equal = {one.name for one in wanted.networks} - needed
    if missing := sorted(needed - paths.keys()):
        raise ProblemError(
            f"The property's network {missing[0]} needs --network {missing[0]}=FILE."
        )
    if unknown := sorted(paths.keys() - needed):
        why = "is equal to another, whose file it has" if unknown[0] in equal else "is none of its"
        raise ProblemError(f"--network {unknown[0]}: the property's network {why}.")
    pairs = [(one.name, paths[one.equal_to or one.name]) for one in wanted.networks]
    for network, (_, path) in zip(wanted.networks, pairs, strict=True):
        _check_types(network, path)
    return pairs if len(pairs) > 1 else pairs[0][1]


def _check_types(network: Network, path: Path) -> None:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(contents(path))
    except ProblemError:
        raise
    except Exception:
        return  # whoever reads it will say so
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [info for info in model.graph.input if info.name not in stored]
    pairs = [
        *zip(network.inputs, inputs, strict=False),
        *zip(network.outputs, model.graph.output, strict=False),
    ]
    for tensor, info in pairs:
        kind = onnx.TensorProto.DataType.Name(info.type.tensor_type.elem_type).lower()
        kind = {"float": "float32", "double": "float64"}.get(kind, kind)
        if tensor.dtype.lower() not in ("real", kind):
            raise ProblemError(
                f"{tensor.name} is declared as {tensor.dtype}, but {path} has {kind} there. "
                "Declare it so, or as real."
            )


def types_that_are_not_real(wanted: Property) -> str | None:
    """What has to be said of a property that is not over real numbers."""
    kinds = {
        tensor.dtype
        for network in wanted.networks
        for tensor in (*network.inputs, *network.outputs, *network.hidden)
    }
    kinds = {kind for kind in kinds if kind.lower() != "real"}
    if not kinds:
        return None
    return (
        f"Warning: the query declares {', '.join(sorted(kinds))}. Proofs are in real arithmetic, "
        "as if it said real; counterexamples are what ONNX Runtime computes."
    )


def _values(wanted: Property, point: Any) -> list[tuple[Tensor, np.ndarray]]:
    """The tensors of a counterexample, in the order of the declarations."""
    at = [0, 0, 0]
    found = []
    for network in wanted.networks:
        for kind, (tensors, values) in enumerate(
            (
                (network.inputs, point.inputs),
                (network.hidden, point.hidden),
                (network.outputs, point.outputs),
            )
        ):
            for tensor in tensors:
                part = values[at[kind] : at[kind] + tensor.size]
                at[kind] += tensor.size
                found.append((tensor, part))
    return found


def assignment(wanted: Property, point: Any) -> str:
    """A counterexample as the standard prints it."""
    lines = []
    for tensor, values in _values(wanted, point):
        lines.append(f"{tensor.name} {tensor.dtype} [{','.join(map(str, tensor.shape))}]")
        lines += [repr(float(value)) for value in values]
    return "\n".join(lines)


def serialise(wanted: Property, point: Any, folder: Path) -> None:
    """Writes a counterexample as one file with a TensorProto for each tensor.

    Those that are declared as real have single precision, as ONNX Runtime was given them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for tensor, values in _values(wanted, point):
        kind = np.float32 if tensor.dtype.lower() == "real" else np.dtype(tensor.dtype.lower())
        array = np.asarray(values, kind).reshape(tensor.shape)
        data = numpy_helper.from_array(array, tensor.name).SerializeToString()
        write_whole(folder / f"{tensor.name}.pb", data)
