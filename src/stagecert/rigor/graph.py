"""Reads an ONNX model as a list of nodes: linear operations, shifts, activations, maxima.

Nothing is guessed: an operator, attribute, type or shape that is not handled here ends in
`Refused`. The model means what it computes in real arithmetic with the numbers that it stores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from stagecert.rigor import linear
from stagecert.rigor.functions import Activation, Refused, Value
from stagecert.rigor.numbers import Arithmetic

OPSETS = range(7, 29)
MOST_ENTRIES = 2**27
FLOATS = (1, 10, 11, 16)  # TensorProto: FLOAT, FLOAT16, DOUBLE, BFLOAT16


@dataclass
class Node:
    """One value of the network: an input, an activation, a shift or a linear operation."""

    operation: "linear.Linear | Activation | Shift | None"
    arguments: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Shift:
    """x plus a constant of x's shape."""

    constant: Any


@dataclass
class Program:
    """The nodes in an order in which each reads earlier ones only; inputs come first."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    @property
    def activations(self) -> list[int]:
        """The numbers of the activations and maxima, in order."""
        return [k for k, node in enumerate(self.nodes) if isinstance(node.operation, Activation)]


def read(data: bytes, arithmetic: Arithmetic) -> Program:
    """The program of a model file's contents."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:
        raise Refused(f"the model is no ONNX file: {error}") from None
    versions = sorted({o.version for o in model.opset_import if o.domain in ("", "ai.onnx")})
    if len(versions) != 1 or versions[0] not in OPSETS:
        raise Refused(f"the model needs one opset between 7 and {OPSETS[-1]}, not {versions}")
    graph = model.graph
    if model.functions or graph.sparse_initializer or graph.quantization_annotation:
        raise Refused("the model has functions, sparse initialisers or quantisation")
    if not graph.output:
        raise Refused("the model has no outputs")
    reader = _Reader(arithmetic, versions[0], graph)
    return reader.program


class _Reader:
    def __init__(self, arithmetic: Arithmetic, opset: int, graph: onnx.GraphProto):
        self.arithmetic, self.opset = arithmetic, opset
        self.program = Program()
        self.values: dict[str, Any] = {}  # NumPy arrays are constants, Values are not
        for tensor in graph.initializer:
            self._set(tensor.name, stored(tensor))
        for info in graph.input:
            if info.name not in self.values:
                self._set(info.name, self._input(info))
        for node in _needed(graph):
            self._node(node)
        for info in graph.output:
            value = self.values.get(info.name)
            if not isinstance(value, Value):
                raise Refused(f"the output '{info.name}' does not depend on the inputs")
            self.program.outputs.append(value.index)
        _drop_unused(self.program)

    def _set(self, name: str, value: Any) -> None:
        if not name or name in self.values:
            raise Refused(f"the name '{name}' is empty or used twice")
        self.values[name] = value

    def _input(self, info: onnx.ValueInfoProto) -> Value:
        tensor = info.type.tensor_type
        lengths = [d.dim_value if d.HasField("dim_value") else 0 for d in tensor.shape.dim]
        if lengths and lengths[0] <= 0:
            lengths[0] = 1  # a batch of any size: one point
        if tensor.elem_type not in FLOATS or any(n <= 0 for n in lengths):
            raise Refused(f"the input '{info.name}' has no fixed shape of floating-point numbers")
        value = self.add(None, (), tuple(lengths))
        self.program.inputs.append(value.index)
        return value

    def _node(self, node: onnx.NodeProto) -> None:
        name = f"{node.op_type} '{node.name}'"
        handler = HANDLERS.get(node.op_type)
        if node.domain not in ("", "ai.onnx") or handler is None:
            raise Refused(f"{name} is not supported")
        items = []
        for source in node.input:
            if source and source not in self.values:
                raise Refused(f"{name} reads '{source}', which no earlier node makes")
            items.append(self.values[source] if source else None)
        attributes = {}
        for item in node.attribute:
            if item.ref_attr_name or item.name in attributes:
                raise Refused(f"{name} has an attribute '{item.name}' twice or by reference")
            attributes[item.name] = onnx.helper.get_attribute_value(item)
        call = Call(self, node.op_type, items, attributes, len(node.output))
        try:
            made = handler(call)
        except Refused as error:
            raise Refused(f"{name}: {error}") from None
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise Refused(f"{name} is malformed: {error}") from None
        if call.attributes:
            raise Refused(f"{name} has the attributes {sorted(call.attributes)}")
        made = made if isinstance(made, list) else [made]
        # Further outputs (masks, indices) stay undefined: who reads them is refused.
        for output, value in zip(node.output, made, strict=False):
            if output:
                self._set(output, value)

    def add(self, operation, arguments: tuple[int, ...], shape: tuple[int, ...]) -> Value:
        """A new node."""
        if not 0 < math.prod(shape) <= MOST_ENTRIES:
            raise Refused(f"a value of shape {shape} is empty or too large")
        self.program.nodes.append(Node(operation, arguments, tuple(map(int, shape))))
        return Value(len(self.program.nodes) - 1, self.program.nodes[-1].shape)


def _needed(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes that outputs depend on."""
    names, needed = {info.name for info in graph.output}, []
    for node in reversed(graph.node):
        if names.intersection(output for output in node.output if output):
            needed.append(node)
            names.update(node.input)
    return needed[::-1]


def _drop_unused(program: Program) -> None:
    """Leaves out nodes that a recognised pattern has replaced."""
    used, stack = set(program.inputs), list(program.outputs)
    while stack:
        index = stack.pop()
        if index not in used:
            used.add(index)
            stack.extend(program.nodes[index].arguments)
    place = {index: k for k, index in enumerate(sorted(used))}
    program.nodes = [
        Node(node.operation, tuple(place[a] for a in node.arguments), node.shape)
        for node in (program.nodes[index] for index in sorted(used))
    ]
    program.inputs = [place[k] for k in program.inputs]
    program.outputs = [place[k] for k in program.outputs]


def stored(tensor: onnx.TensorProto) -> np.ndarray:
    """A stored tensor: floats as float64 (nothing is lost), or int64, or bool."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise Refused(f"'{tensor.name}' is stored in another file")
    if any(n < 0 for n in tensor.dims) or math.prod(tensor.dims) > MOST_ENTRIES:
        raise Refused(f"'{tensor.name}' has an impossible shape")
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except Exception as error:
        raise Refused(f"'{tensor.name}' is damaged: {error}") from None
    if tensor.data_type in FLOATS:
        array = array.astype(np.float64)
        if not np.all(np.isfinite(array)):
            raise Refused(f"'{tensor.name}' has entries that are not finite")
        return array
    if array.dtype.kind in "iub" and array.dtype != np.uint64:
        return array if array.dtype == bool else array.astype(np.int64)
    raise Refused(f"'{tensor.name}' has the type {array.dtype}")


class Call:
    """One ONNX node that is being read."""

    def __init__(self, reader: _Reader, operator: str, items: list, attributes: dict, outputs: int):
        self.reader, self.operator, self.items = reader, operator, items
        self.attributes, self.outputs = attributes, outputs

    def get(self, name: str, default: Any = None) -> Any:
        """Takes an attribute; those that nobody takes are refused."""
        return self.attributes.pop(name, default)

    def item(self, k: int) -> Any:
        """An input, or None."""
        return self.items[k] if k < len(self.items) else None

    def value(self, k: int = 0) -> Value:
        """An input that is not constant."""
        if not isinstance(self.item(k), Value):
            raise Refused(f"input {k + 1} must depend on the network's inputs")
        return self.items[k]

    def constant(self, k: int) -> np.ndarray:
        """A constant input."""
        if not isinstance(self.item(k), np.ndarray):
            raise Refused(f"input {k + 1} must be constant")
        return self.items[k]

    def floats(self, k: int) -> np.ndarray:
        """A constant input of floating-point numbers."""
        if self.constant(k).dtype != np.float64:
            raise Refused(f"input {k + 1} must be floating-point numbers")
        return self.items[k]

    def integers(self, name: str, k: int | None = None) -> list[int] | None:
        """Integers that are an attribute in some opsets and input k in others."""
        if name in self.attributes:
            return [int(n) for n in self.get(name)]
        if k is None or self.item(k) is None:
            return None
        if self.constant(k).dtype != np.int64 or self.constant(k).ndim > 1:
            raise Refused(f"'{name}' must be a list of integers")
        return [int(n) for n in self.constant(k).reshape(-1)]

    def number(self, k: int, default: float) -> float:
        """An optional constant input with one entry."""
        if self.item(k) is None:
            return default
        if self.floats(k).size != 1:
            raise Refused(f"input {k + 1} must be one number")
        return float(self.floats(k).item())

    def exact(self, array: np.ndarray) -> Any:
        """Stored numbers in the checker's arithmetic."""
        return self.reader.arithmetic.array(array)

    # Building blocks

    def apply(self, operation, *arguments: Value, shape) -> Value:
        """A node."""
        return self.reader.add(operation, tuple(x.index for x in arguments), tuple(shape))

    def activate(self, function: Activation, x: Value, shape=None) -> Value:
        """An activation or maximum."""
        made = self.apply(function, x, shape=x.shape if shape is None else shape)
        made.gate = (function, x)
        return made

    def move(self, function: Callable, *items: Any) -> Any:
        """What `function` makes of arrays by moving entries; zeros that it adds are -1."""
        if all(isinstance(x, np.ndarray) for x in items):
            return np.asarray(function(*items))  # not a NumPy scalar
        if not all(isinstance(x, Value) for x in items):
            raise Refused("mixes constants and variables")
        numbers, total = [], 0
        for x in items:
            size = math.prod(x.shape)
            numbers.append(np.arange(total, total + size).reshape(x.shape))
            total += size
        index = function(*numbers)
        if len(items) == 1 and np.array_equal(index.reshape(-1), np.arange(total)):
            if index.shape == items[0].shape:
                return items[0]
            return self.apply(linear.Reshape(index.shape), *items, shape=index.shape)
        return self.apply(linear.Move(index), *items, shape=index.shape)

    def broadcast(self, x: Value, shape) -> Value:
        """x repeated to a shape."""
        return self.move(lambda a: np.broadcast_to(a, shape), x)

    def scale(self, x: Value, factor: Any, loose: int = 0) -> Value:
        """x times a constant array."""
        shape = np.broadcast_shapes(x.shape, factor.shape)
        return self.apply(linear.Scale(factor, loose), self.broadcast(x, shape), shape=shape)

    def shift(self, x: Value, constant: np.ndarray) -> Value:
        """x plus a constant array of stored numbers."""
        shape = np.broadcast_shapes(x.shape, constant.shape)
        constant = self.exact(np.broadcast_to(constant, shape))
        return self.apply(Shift(constant), self.broadcast(x, shape), shape=shape)

    def negated(self, x: Value) -> Value:
        """Minus x."""
        return self.apply(linear.Sum((-1,)), x, shape=x.shape)

    def reciprocal(self, array: np.ndarray) -> Any:
        """1 / stored numbers, rounded once."""
        if not np.all(array):
            raise Refused("divides by zero")
        return np.asarray(self.exact(np.ones(())) / self.exact(array))

    def axes(self, axes, rank: int) -> tuple[int, ...]:
        """Axes counted from the front, in order."""
        found = sorted(axis + rank if axis < 0 else axis for axis in axes)
        if any(not 0 <= axis < rank for axis in found) or len(set(found)) != len(found):
            raise Refused(f"has impossible axes {list(axes)}")
        return tuple(found)


HANDLERS: dict[str, Callable[[Call], Any]] = {}


def handles(*operators: str):
    """Registers what reads some operators; see operators.py."""

    def register(function):
        for operator in operators:
            HANDLERS[operator] = function
        return function

    return register
