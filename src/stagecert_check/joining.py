"""Several networks as one model: their graphs side by side, with names that cannot meet.

A property of several networks speaks of the inputs of all of them, one after the other in the order
of their declarations, and of their outputs likewise: those of the joint model.
"""

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from stagecert_check.errors import ProblemError
from stagecert_check.external import Model, model_contents
from stagecert_check.properties import Property


def named(source: Any) -> tuple[tuple[str, Path], ...] | None:
    """The networks by name, if a source names several: [("f", path), ("g", path)].

    The same may be given as text, as lists of instances of VNN-COMP have it.
    """
    text = str(source).strip() if isinstance(source, (str, Path)) else ""
    if text.startswith("[("):
        try:
            source = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ProblemError(f"{text}: is no list of networks.") from None
    if not isinstance(source, (list, tuple)):
        return None
    pairs = [tuple(pair) for pair in source if isinstance(pair, (list, tuple)) and len(pair) == 2]
    names = [str(name) for name, _ in pairs]
    if not pairs or len(pairs) != len(source) or len(set(names)) != len(names):
        raise ProblemError('Several networks are given as [("f", "f.onnx"), ("g", "g.onnx")].')
    return tuple((str(name), Path(path)) for name, path in pairs)


def joint_contents(pairs: Sequence[tuple[str, Path]]) -> Model:
    """The joint model. Its digest is made of the names and of the digests of all models.

    Raises:
        ProblemError: one of the files cannot be read, or they do not fit together.
    """
    models = [model_contents(path) for _, path in pairs]
    for (name, path), model in zip(pairs, models, strict=True):
        if model.files:
            raise ProblemError(f"{path} ({name}): keeps weights in other files; store them in it.")
    text = "".join(f"{name}\0{m.digest}\0" for (name, _), m in zip(pairs, models, strict=True))
    data = joined([(name, model.data) for (name, _), model in zip(pairs, models, strict=True)])
    return Model(data, digest_of_parts=hashlib.sha256(text.encode()).hexdigest())


def joined(models: Sequence[tuple[str, bytes]]) -> bytes:
    """The graphs of several models side by side."""
    whole = onnx.ModelProto()
    versions: dict[str, int] = {}
    for number, (name, data) in enumerate(models):
        one = onnx.ModelProto()
        try:
            one.ParseFromString(data)
        except Exception:
            raise ProblemError(f"The network {name} is no ONNX file.") from None
        graph = one.graph
        inner = any(
            item.HasField("g") or item.graphs for node in graph.node for item in node.attribute
        )
        if one.functions or inner or graph.sparse_initializer:
            raise ProblemError(
                f"The network {name} has functions, graphs in its nodes or sparse tensors, which "
                "several networks in one property must not have."
            )
        for item in one.opset_import:
            if versions.setdefault(item.domain, item.version) != item.version:
                raise ProblemError("The networks have different opsets; convert them to one.")
        whole.ir_version = max(whole.ir_version, one.ir_version)
        _add(whole.graph, graph, f"{number} ")
    for domain, version in versions.items():
        whole.opset_import.append(onnx.helper.make_opsetid(domain, version))
    whole.graph.name = "joint"
    return whole.SerializeToString()


def _add(whole: onnx.GraphProto, graph: onnx.GraphProto, prefix: str) -> None:
    """All of a graph, with the prefix before every name; a name that is left out stays so."""

    def new(name: str) -> str:
        return prefix + name if name else ""

    stored = {tensor.name for tensor in graph.initializer}
    for tensor in graph.initializer:
        whole.initializer.add().CopyFrom(tensor)
        whole.initializer[-1].name = new(tensor.name)
    for info in graph.input:
        if info.name not in stored:
            whole.input.add().CopyFrom(info)
            whole.input[-1].name = new(info.name)
    for info in graph.output:
        whole.output.add().CopyFrom(info)
        whole.output[-1].name = new(info.name)
    for node in graph.node:
        copy = whole.node.add()
        copy.CopyFrom(node)
        copy.name = new(node.name)
        copy.input[:] = map(new, node.input)
        copy.output[:] = map(new, node.output)


def check_names(pairs: Sequence[tuple[str, Path]] | None, wanted: Property) -> None:
    """Whether the networks that are given are those that a property declares.

    Raises:
        ProblemError: they are not, or one that is to be equal to another is not.
    """
    names = [network.name for network in wanted.networks]
    if pairs is None:
        if len(names) > 1:
            raise ProblemError(
                f"The property is about {len(names)} networks ({', '.join(names)}); give them as "
                '[("f", "f.onnx"), ("g", "g.onnx")], by their names.'
            )
        return
    if [name for name, _ in pairs] != names:
        raise ProblemError(
            f"The property is about the networks {', '.join(names)}, in this order; given are "
            f"{', '.join(name for name, _ in pairs)}."
        )
    digests = {name: model_contents(path).digest for name, path in pairs}
    for network in wanted.networks:
        other = network.equal_to
        if other is not None and digests.get(other) != digests[network.name]:
            raise ProblemError(
                f"The network {network.name} is to be equal to {other}, but their files differ."
            )
