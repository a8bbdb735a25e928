"""Replaces calls of a model's own functions by the functions' nodes."""

from typing import Any

import onnx

from stagecert_check.functions import Refused

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
