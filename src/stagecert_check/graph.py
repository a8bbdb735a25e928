"""Reads an ONNX model as a list of nodes: linear operations, shifts, activations, maxima.

Nothing is guessed: an operator, attribute, type or shape that is not handled here ends in
`Refused`. The model means what it computes in real arithmetic with the numbers that it stores.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from flint import arb, fmpq

from stagecert_check import external, linear
from stagecert_check.constants import FOLDED, MOST_COMPUTED, balls, fold, near, settled
from stagecert_check.functions import Activation, Refused, Value
from stagecert_check.numbers import Arithmetic

OPSETS = range(7, 29)
MOST_ENTRIES = 2**27
_MOST_STEPS = 32  # products and sums with single numbers, one after the other
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


class Part(Activation):
    """What is only understood as a part of an activation: a comparison.

    It has no bounds of its own, so none may be left when a model is read.
    """

    def __init__(self, kind: str):
        self.kind = kind


@dataclass
class Program:
    """The nodes in an order in which each reads earlier ones only; inputs come first.

    `without` is the last operator, where that was left out: see `read`.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    without: str | None = None

    @property
    def activations(self) -> list[int]:
        """The numbers of the activations and maxima, in order."""
        return [k for k, node in enumerate(self.nodes) if isinstance(node.operation, Activation)]


def read(
    data: bytes,
    arithmetic: Arithmetic,
    files: dict[str, bytes] | None = None,
    ordered: bool = False,
) -> Program:
    """The program of a model file's contents; `files` are those that hold its external data.

    With `ordered`, only the order of the outputs has to be the model's: a Softmax or LogSoftmax of
    all outputs together, which is the last operator, is left out.
    """
    model = parsed(data)
    versions = sorted({o.version for o in model.opset_import if o.domain in ("", "ai.onnx")})
    if len(versions) != 1 or versions[0] not in OPSETS:
        raise Refused(f"the model needs one opset between 7 and {OPSETS[-1]}, not {versions}")
    graph = model.graph
    if graph.sparse_initializer or graph.quantization_annotation:
        raise Refused("the model has sparse initialisers or quantisation")
    if not graph.output:
        raise Refused("the model has no outputs")
    nodes = external.inlined(model, versions[0])
    reader = _Reader(arithmetic, versions[0], files or {})
    if ordered and len(graph.output) == 1:
        reader.ordered = graph.output[0].name
    reader.read(graph, nodes)
    return reader.program


def parsed(data: bytes) -> onnx.ModelProto:
    """A model file's contents as a protocol buffer."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:
        raise Refused(f"the model is no ONNX file: {error}") from None
    return model


class _Reader:
    def __init__(self, arithmetic: Arithmetic, opset: int, files: dict[str, bytes]):
        self.arithmetic, self.opset, self.files = arithmetic, opset, files
        self.program = Program()
        self.values: dict[str, Any] = {}  # NumPy arrays are constants, Values are not
        self.steps: dict[int, tuple[Value, arb, arb]] = {}  # nodes a * x + b with single numbers
        # The same where the numbers are rational, and what comparisons say: see branches.py.
        self.rationals: dict[int, tuple[Value, Fraction, Fraction]] = {}
        self.conditions: dict[int, Any] = {}
        self.floats: set[int] = set()  # the floating-point types that the model has
        self.ordered = ""  # the output of which only the order matters
        self._computed = 0  # entries of constants

    def read(self, graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
        """Reads a graph's tensors, inputs, nodes and outputs."""
        for tensor in graph.initializer:
            self._set(tensor.name, self.stored(tensor))
        for info in graph.input:
            if info.name not in self.values:
                self._set(info.name, self._input(info))
        if not self.program.inputs:
            raise Refused("the model has no inputs")
        for node in _needed(graph, nodes):
            self._node(node)
        for info in graph.output:
            value = self.values.get(info.name)
            if value is None:
                raise Refused(f"no node makes the output '{info.name}'")
            if not isinstance(value, Value):
                value = self._constant_output(info.name, value)
            self.program.outputs.append(value.index)
        _drop_unused(self.program)
        for node in self.program.nodes:
            if isinstance(node.operation, Part):
                raise Refused(f"{node.operation.kind} is only supported inside activations")

    def _set(self, name: str, value: Any) -> None:
        if not name or name in self.values:
            raise Refused(f"the name '{name}' is empty or used twice")
        self.values[name] = value

    def _input(self, info: onnx.ValueInfoProto) -> Value:
        tensor = info.type.tensor_type
        if not tensor.HasField("shape"):
            raise Refused(f"the input '{info.name}' has no shape")
        lengths = [d.dim_value if d.HasField("dim_value") else 0 for d in tensor.shape.dim]
        if lengths and lengths[0] <= 0:
            lengths[0] = 1  # a batch of any size: one point
        if tensor.elem_type not in FLOATS or any(n <= 0 for n in lengths):
            raise Refused(f"the input '{info.name}' has no fixed shape of floating-point numbers")
        self.floats.add(tensor.elem_type)
        value = self.add(None, (), tuple(lengths))
        self.program.inputs.append(value.index)
        return value

    def _constant_output(self, name: str, array: np.ndarray) -> Value:
        """An output that does not depend on the inputs: zero times one, shifted."""
        if array.dtype not in (np.float64, object) or not array.size:
            raise Refused(f"the output '{name}' is constant and made of no floating-point numbers")
        index = self.program.inputs[0]
        x = Value(index, self.program.nodes[index].shape)
        call = Call(self, "output", [x, array], {}, ())
        x = call.move(lambda a: np.broadcast_to(a.reshape(-1)[0], array.shape), x)
        return call.shift(call.scale(x, np.zeros(())), array)

    def _node(self, node: onnx.NodeProto) -> None:
        name = f"{node.op_type} '{node.name}'"
        handler = HANDLERS.get(node.op_type)
        if node.domain not in ("", "ai.onnx") or (handler is None and node.op_type not in FOLDED):
            raise Refused(f"{name} is not supported")
        items = []
        for source in node.input:
            if source and source not in self.values:
                raise Refused(f"{name} reads '{source}', which no earlier node makes")
            items.append(self.values[source] if source else None)
        attributes = _attributes(node, name, self.opset)
        call = Call(self, node.op_type, items, attributes, tuple(node.output))
        try:
            if node.op_type in FOLDED and not any(isinstance(x, Value) for x in items):
                made = fold(call)
            elif handler is None:
                raise Refused("is only supported for constants")
            else:
                made = handler(call)
        except Refused as error:
            raise Refused(f"{name}: {error}") from None
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise Refused(f"{name} is malformed: {error}") from None
        if call.attributes:
            raise Refused(f"{name} has the attributes {sorted(call.attributes)}")
        made = made if isinstance(made, list) else [made]
        # Further outputs (masks, indices) stay undefined: who reads them is refused.
        for output, value in zip(node.output, made, strict=False):
            if output:
                self._set(output, value)

    def stored(self, tensor: onnx.TensorProto) -> np.ndarray:
        """A stored tensor: floats as float64 (nothing is lost), or int64, or bool."""
        if any(n < 0 for n in tensor.dims) or math.prod(tensor.dims) > MOST_ENTRIES:
            raise Refused(f"'{tensor.name}' has an impossible shape")
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            tensor = external.fetched(tensor, self.files)
        try:
            array = onnx.numpy_helper.to_array(tensor)
        except Exception as error:
            raise Refused(f"'{tensor.name}' is damaged: {error}") from None
        if tensor.data_type in FLOATS:
            self.floats.add(tensor.data_type)
            return array.astype(np.float64)
        if array.dtype in (np.int32, np.int64):
            return array.astype(np.int64)
        # Integers of other types wrap around earlier: nothing is computed with them.
        if array.dtype.kind in "iub" and array.dtype != np.uint64:
            return array
        raise Refused(f"'{tensor.name}' has the type {array.dtype}")

    def compute(self, count: int) -> None:
        """Says that so many entries of constants are about to be computed."""
        self._computed += count
        if self._computed > MOST_COMPUTED:
            raise Refused(f"computes more than {MOST_COMPUTED} entries of constants")

    def add(self, operation: Any, arguments: tuple[int, ...], shape: Sequence[int]) -> Value:
        """A new node."""
        if not 0 < math.prod(shape) <= MOST_ENTRIES:
            raise Refused(f"a value of shape {shape} is empty or too large")
        self.program.nodes.append(Node(operation, arguments, tuple(map(int, shape))))
        return Value(len(self.program.nodes) - 1, self.program.nodes[-1].shape)


def _attributes(node: onnx.NodeProto, name: str, opset: int) -> dict[str, Any]:
    """The attributes of a node, whose form must be that of the opset."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        raise Refused(f"{name} does not exist in opset {opset}") from None
    if not schema.min_input <= len(node.input) <= schema.max_input:
        raise Refused(f"{name} has {len(node.input)} inputs, which opset {opset} does not allow")
    if not schema.min_output <= len(node.output) <= schema.max_output:
        raise Refused(f"{name} has {len(node.output)} outputs, which opset {opset} does not allow")
    repeated = len(schema.inputs) < len(node.input)  # a list of inputs, such as those of Concat
    if not all(node.input[: None if repeated else schema.min_input]):
        raise Refused(f"{name} lacks an input")
    known: dict[str, Any] = dict(schema.attributes)
    found: dict[str, Any] = {}
    for item in node.attribute:
        declared = known.get(item.name)
        if declared is None or declared.type.value != item.type or item.ref_attr_name:
            raise Refused(f"{name} has an attribute '{item.name}' that opset {opset} does not know")
        if item.name in found:
            raise Refused(f"{name} has the attribute '{item.name}' twice")
        found[item.name] = onnx.helper.get_attribute_value(item)
        if item.type == onnx.AttributeProto.FLOAT and math.isnan(item.f):
            raise Refused(f"{name} has an attribute that is NaN")
    missing = [n for n, item in known.items() if item.required and n not in found]
    if missing:
        raise Refused(f"{name} lacks the attribute '{missing[0]}'")
    return found


def _needed(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes that outputs depend on."""
    names, needed = {info.name for info in graph.output}, []
    for node in reversed(nodes):
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


class Call:
    """One ONNX node that is being read."""

    def __init__(
        self,
        reader: _Reader,
        operator: str,
        items: list[Any],
        attributes: dict[str, Any],
        outputs: tuple[str, ...],
    ):
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
        if self.constant(k).dtype not in (np.float64, object):
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
        if self.constant(k).size > 2**16:
            raise Refused(f"'{name}' is too long")
        return [int(n) for n in self.constant(k).reshape(-1)]

    def number(self, k: int, default: float) -> float:
        """An optional constant input with one entry, which float64 holds."""
        if self.item(k) is None:
            return default
        if self.floats(k).size != 1 or self.floats(k).dtype != np.float64:
            raise Refused(f"input {k + 1} must be one number that float64 holds")
        return float(self.floats(k).item())

    def bounds(self) -> tuple[float, float]:
        """The bounds of a Clip; those that are left out are infinite."""
        low = float(self.get("min", self.number(1, -math.inf)))
        high = float(self.get("max", self.number(2, math.inf)))
        if not low <= high:
            raise Refused(f"has bounds that are not in order: {low} and {high}")
        return low, high

    def reduced(self, rank: int) -> tuple[tuple[int, ...], int]:
        """The axes that are reduced, and whether they stay with length one."""
        axes, keep = self.integers("axes", 1) or [], self.get("keepdims", 1)
        if self.get("noop_with_empty_axes", 0) and not axes:
            return (), keep
        return self.axes(axes or range(rank), rank), keep

    def exact(self, array: np.ndarray) -> Any:
        """Float64 numbers in the checker's arithmetic."""
        return self.reader.arithmetic.array(array)

    def weights(self, array: np.ndarray) -> tuple[Any, int]:
        """A constant's numbers in the checker's arithmetic, and how loose they are."""
        if array.dtype == np.float64 and np.all(np.isfinite(array)):
            return self.exact(array), 0
        numbers, loose = near(array)
        return self.exact(numbers), loose

    # Building blocks

    def apply(self, operation: Any, *arguments: Value, shape: Sequence[int]) -> Value:
        """A node."""
        return self.reader.add(operation, tuple(x.index for x in arguments), tuple(shape))

    def activate(self, function: Activation, x: Value, shape: Sequence[int] | None = None) -> Value:
        """An activation or maximum."""
        return self.apply(function, x, shape=x.shape if shape is None else shape)

    def move(self, function: Callable[..., np.ndarray], *items: Any) -> Any:
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

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """x repeated to a shape."""
        if math.prod(shape) > MOST_ENTRIES:
            raise Refused(f"makes a tensor of shape {tuple(shape)}, which is too large")
        return self.move(lambda a: np.broadcast_to(a, shape), x)

    def scale(self, x: Value, factor: np.ndarray, number: Fraction | None = None) -> Value:
        """x times a constant; `number` is what a single one is, where float64 does not hold it."""
        shape = np.broadcast_shapes(x.shape, factor.shape)
        x, (numbers, loose) = self.broadcast(x, shape), self.weights(factor)
        if not loose and np.all(numbers == 1):
            return x
        made = self.apply(linear.Scale(numbers, loose), x, shape=shape)
        if factor.size == 1:
            self.reader.steps[made.index] = x, balls(factor).item(), arb(0)
            if factor.dtype == np.float64:
                number = Fraction(factor.item())
            if number is not None:
                self.reader.rationals[made.index] = x, number, Fraction(0)
        return made

    def times(self, x: Value, factor: Fraction) -> Value:
        """x times a rational number."""
        ball = arb(fmpq(factor.numerator, factor.denominator))
        return self.scale(x, settled(ball), factor)

    def shift(self, x: Value, constant: np.ndarray) -> Value:
        """x plus a constant."""
        shape = np.broadcast_shapes(x.shape, constant.shape)
        x, (numbers, loose) = self.broadcast(x, shape), self.weights(constant)
        if not loose:
            made = self.apply(Shift(np.broadcast_to(numbers, shape)), x, shape=shape)
        else:
            # x + 1 * constant: a factor may be loose.
            none = self.apply(linear.Scale(self.exact(np.zeros(()))), x, shape=shape)
            one = self.apply(Shift(self.exact(np.ones(shape))), none, shape=shape)
            one = self.apply(linear.Scale(numbers, loose), one, shape=shape)
            made = self.apply(linear.Sum((1, 1)), x, one, shape=shape)
        if constant.size == 1:
            self.reader.steps[made.index] = x, arb(1), balls(constant).item()
            if constant.dtype == np.float64:
                number = Fraction(constant.item())
                self.reader.rationals[made.index] = x, Fraction(1), number
        return made

    def negated(self, x: Value) -> Value:
        """Minus x."""
        made = self.apply(linear.Sum((-1,)), x, shape=x.shape)
        self.reader.steps[made.index] = x, arb(-1), arb(0)
        self.reader.rationals[made.index] = x, Fraction(-1), Fraction(0)
        return made

    def exactly(self, x: Value) -> tuple[Value, Fraction, Fraction]:
        """(v, a, b) with x = a * v + b, as far back as single rational numbers reach."""
        a, b = Fraction(1), Fraction(0)
        for _ in range(_MOST_STEPS):
            if x.index not in self.reader.rationals:
                break
            x, factor, constant = self.reader.rationals[x.index]
            a, b = a * factor, a * constant + b
        return x, a, b

    def lines(self, x: Value) -> list[tuple[Value, arb, arb]]:
        """(v, a, b) with x = a * v + b, from x itself back as far as single numbers reach."""
        found, a, b = [(x, arb(1), arb(0))], arb(1), arb(0)
        while x.index in self.reader.steps:
            x, factor, constant = self.reader.steps[x.index]
            a, b = a * factor, a * constant + b
            found.append((x, a, b))
        return found

    def axes(self, axes: Any, rank: int) -> tuple[int, ...]:
        """Axes counted from the front, in order."""
        found = sorted(axis + rank if axis < 0 else axis for axis in axes)
        if any(not 0 <= axis < rank for axis in found) or len(set(found)) != len(found):
            raise Refused(f"has impossible axes {list(axes)}")
        return tuple(found)


HANDLERS: dict[str, Callable[[Call], Any]] = {}


def handles(*operators: str):
    """Registers what reads some operators; see operators.py."""

    def register(function: Any):
        for operator in operators:
            HANDLERS[operator] = function
        return function

    return register
