"""Writes random valid ONNX graphs with adversarial constants, and what they compute exactly.

Every node is evaluated as it is added (benchmarks.fuzz.exact), at all points that will be asked
about: what has no finite value, or one beyond the limits, is left out again. So a graph and its
truth come together. Every graph is a function of a seed and a number.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from flint import fmpq
from onnx import TensorProto, helper, numpy_helper

from benchmarks.fuzz import exact
from benchmarks.fuzz.palette import Palette

NEWEST = onnx.defs.onnx_opset_version()
OPSETS = range(7, NEWEST + 1)
MOST_ENTRIES = 48
_TYPES = {TensorProto.FLOAT: "tensor(float)", TensorProto.DOUBLE: "tensor(double)",
          TensorProto.FLOAT16: "tensor(float16)"}  # fmt: skip
_NUMPY = {TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64,
          TensorProto.FLOAT16: np.float16}  # fmt: skip
_DOMAIN = "own"


class Skip(Exception):
    """This node is not added after all."""


@dataclass
class Entry:
    """A value of the graph: at each point, or once if it is constant."""

    arrays: list[np.ndarray]
    constant: bool
    type: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape


@dataclass
class Graph:
    """A model with boxes of inputs, points in them, and the exact outputs there.

    Attributes:
        model: the model.
        low, high: (boxes, entries of all inputs, flattened).
        points: (points, entries), each in the box `of`.
        values: (points, outputs): rationals or balls.
        tame: whether all numbers are of moderate size, so that runtimes can be compared.
        exact: whether all values are rationals.
        seen: the operators, those of functions included.
        largest: no value anywhere in the graph is larger, at any of the points.
    """

    model: onnx.ModelProto
    low: np.ndarray
    high: np.ndarray
    points: np.ndarray
    of: np.ndarray
    values: np.ndarray
    tame: bool
    exact: bool
    seen: frozenset[str]
    largest: float
    shapes: list[tuple[int, ...]]
    dtype: Any

    def feeds(self, point: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs by name, from a flat point."""
        return _feeds(self.names, self.shapes, point)

    @property
    def names(self) -> list[str]:
        stored = {tensor.name for tensor in self.model.graph.initializer}
        return [info.name for info in self.model.graph.input if info.name not in stored]

    def rows(self, draw: random.Random, count: int) -> np.ndarray:
        """Random objectives: single outputs and small combinations, with either sign."""
        outputs = self.values.shape[1]
        rows = np.zeros((count, outputs))
        for k in range(0, count, 2):
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                rows[k, draw.randrange(outputs)] = draw.choice((1, 1, 1, -1, 2, 0.5))
            rows[k + 1] = -rows[k]
        return rows


def _feeds(names, shapes, point) -> dict[str, np.ndarray]:
    feeds, start = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        size = math.prod(shape)
        feeds[name] = np.asarray(point[start : start + size]).reshape(shape)
        start += size
    return feeds


class Writer:
    """A graph under construction."""

    def __init__(self, draw: random.Random):
        self.draw = draw
        self.opset = draw.choice((7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
                                  24, 25, NEWEST, 13, 17, 18, 11))  # fmt: skip
        self.kind = draw.choices(
            (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16), (70, 26, 4)
        )[0]
        self.type = _TYPES[self.kind]
        self.dtype = _NUMPY[self.kind]
        self.palette = Palette(draw, self.dtype)
        self.limit = 1e5 if self.palette.tame else draw.choice((1e12, 1e25, 1e28, 1e36))
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self.values: dict[str, Entry] = {}
        self.functions: dict[tuple[str, str], onnx.FunctionProto] = {}
        self.seen: set[str] = set()
        self.used: set[str] = set()
        self.inputs: list[tuple[str, list]] = []
        self._count = 0
        self._inputs()

    # -- inputs and their points -------------------------------------------------------------------

    def _inputs(self) -> None:
        draw = self.draw
        shapes = [self._input_shape() for _ in range(draw.choice((1, 1, 1, 1, 1, 2, 3)))]
        self.shapes = [tuple(1 if isinstance(n, str) else n for n in s) for s in shapes]
        size = sum(math.prod(shape) for shape in self.shapes)
        single = np.asarray([self.palette.input() for _ in range(size)])
        tiny = np.asarray([self.palette.input() for _ in range(size)])
        wide = np.asarray([self.palette.input() for _ in range(size)])
        little = np.abs(tiny) * draw.choice((1e-7, 1e-13, 2e-16))
        much = self.palette.scale * np.asarray([draw.choice((0, 0.1, 0.5, 2)) for _ in range(size)])
        self.low = np.stack([single, tiny - little, wide - much])
        self.high = np.stack([single, tiny + little, wide + much])
        points, of = [single], [0]
        for box, corners in ((1, 2), (2, 4)):
            low, high = self.low[box], self.high[box]
            for corner in range(corners):
                share = np.asarray([draw.choice((0.0, 1.0)) for _ in range(size)])
                share = np.full(size, float(corner)) if corner < 2 else share
                points.append(np.where(share == 1, high, low))
                of.append(box)
            inside = low + (high - low) * np.asarray([draw.random() for _ in range(size)])
            points.append(np.clip(inside, low, high))
            of.append(box)
        self.points, self.of = np.stack(points), np.asarray(of)
        names = [f"x{k}" for k in range(len(shapes))]
        feeds = [_feeds(names, self.shapes, point) for point in self.points]
        for name, shape in zip(names, shapes, strict=True):
            self.inputs.append((name, list(shape)))
            arrays = [exact.numbers(feed[name]) for feed in feeds]
            self.values[name] = Entry(arrays, False, self.type)

    def _input_shape(self) -> list:
        draw = self.draw
        batch = draw.choice(("N", 1, 1))
        kinds = (
            lambda: [batch, draw.choice((1, 2, 3, 4))],
            lambda: [batch, draw.choice((2, 3)), draw.choice((2, 3))],
            lambda: [batch, draw.choice((1, 2)), draw.choice((3, 4)), draw.choice((3, 4))],
            lambda: [draw.choice((1, 2, 4))],
            list,
            lambda: [2, draw.choice((2, 3))],
        )
        return draw.choices(kinds, (10, 4, 6, 2, 1, 1))[0]()

    # -- constants ---------------------------------------------------------------------------------

    def name(self) -> str:
        """A new name."""
        self._count += 1
        return f"v{self._count}"

    def keep(self, array: np.ndarray) -> str:
        """Stores a tensor, as an initialiser or in a Constant node."""
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise Skip("a number is not finite")
        tensor = numpy_helper.from_array(array, self.name())
        if array.dtype == np.float32 and self.draw.random() < 0.3:
            tensor = helper.make_tensor(tensor.name, TensorProto.FLOAT, array.shape, array.ravel())
        if self.draw.random() < 0.25 and (self.opset >= 9 or array.dtype.kind == "f"):
            return self.emit("Constant", [], value=tensor)[0]
        self.stored.append(tensor)
        self.values[tensor.name] = Entry(
            [exact.stored(tensor)], True, f"tensor({_type_name(array.dtype)})"
        )
        return tensor.name

    def floats(self, shape: Sequence[int], array: Any = None) -> str:
        """A constant of the graph's floating-point type, of random numbers unless given."""
        array = self.palette.array(shape) if array is None else array
        with np.errstate(over="ignore"):
            array = np.asarray(array, np.float64).astype(self.dtype).reshape(tuple(shape))
        name = self.keep(array)
        if self.draw.random() < 0.2:
            from benchmarks.fuzz.chains import chained

            name = chained(self, name)
        return name

    def scalar(self, value: float | None = None) -> str:
        """A constant of one number, in one of the shapes that broadcast like a scalar."""
        value = self.palette.entry() if value is None else value
        return self.floats(self.draw.choice(((), (), (1,))), [value])

    def scalar_of(self, value: float) -> str:
        """A stored scalar, as it is."""
        with np.errstate(over="ignore"):
            return self.keep(np.asarray(value, self.dtype))

    def tensor_of(self, array: np.ndarray) -> onnx.TensorProto:
        """A tensor for an attribute."""
        return numpy_helper.from_array(np.asarray(array, self.dtype))

    def ints(self, values: Any) -> str:
        """Constant int64 numbers."""
        return self.keep(np.asarray(values, np.int64))

    # -- nodes -------------------------------------------------------------------------------------

    def pick(self, *ranks: int, least: int = 0) -> str:
        """A value that depends on the inputs, more often a late one."""
        names = [
            name for name, entry in self.values.items()
            if not entry.constant and entry.type == self.type
            and (not ranks or len(entry.shape) in ranks) and len(entry.shape) >= least
        ]  # fmt: skip
        if not names:
            raise Skip("no such value")
        return self.draw.choice((names[-1], names[-1], self.draw.choice(names)))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return self.values[name].shape

    def has(self, operator: str, attribute: str) -> bool:
        """Whether an operator has an attribute in this opset."""
        return attribute in onnx.defs.get_schema(operator, self.opset, "").attributes

    def version(self, operator: str) -> int:
        """Since which opset the operator is as it is in this one."""
        try:
            return onnx.defs.get_schema(operator, self.opset, "").since_version
        except onnx.defs.SchemaError:
            raise Skip(f"no {operator} in opset {self.opset}") from None

    def emit(self, operator: str, inputs: Sequence[str], outputs: int = 1, **settings) -> list[str]:
        """Adds a node and evaluates it."""
        domain = settings.pop("domain", "")
        names = [self.name() for _ in range(outputs)]
        node = helper.make_node(operator, list(inputs), names, self.name(), domain=domain)
        for key, value in settings.items():
            if value is not None:
                node.attribute.append(helper.make_attribute(key, value))
        if not domain:
            self.check_types(node)
        entries = self._evaluated(node)
        self.nodes.append(node)
        self.values.update(zip(names, entries, strict=False))
        self.used.update(inputs)
        if not domain:
            self.seen.add(operator)
        return names

    def one(self, operator: str, *inputs: str, **settings) -> str:
        """Adds a node with one output."""
        return self.emit(operator, inputs, **settings)[0]

    def check_types(self, node: onnx.NodeProto) -> None:
        self.version(node.op_type)
        schema = onnx.defs.get_schema(node.op_type, self.opset, "")
        allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
        bound: dict[str, str] = {}
        if len(node.input) > schema.max_input or len(node.input) < schema.min_input:
            raise Skip("so many inputs are not allowed")
        for k, name in enumerate(node.input):
            if not name:
                continue
            formal, kind = schema.inputs[min(k, len(schema.inputs) - 1)], self.values[name].type
            if kind not in allowed.get(formal.type_str, {formal.type_str}):
                raise Skip(f"{node.op_type} does not take {kind} in opset {self.opset}")
            if formal.is_homogeneous and bound.setdefault(formal.type_str, kind) != kind:
                raise Skip("types are mixed")
        for attribute in node.attribute:
            if attribute.name not in schema.attributes:
                raise Skip(f"no attribute {attribute.name}")

    def _evaluated(self, node: onnx.NodeProto) -> list[Entry]:
        items = [self.values[name] if name else None for name in node.input]
        constant = all(item is None or item.constant for item in items)
        found: list[list[np.ndarray]] = []
        try:
            for point in range(1 if constant else len(self.points)):
                arrays = [
                    None if item is None else item.arrays[0 if item.constant else point]
                    for item in items
                ]
                found.append(exact.node_outputs(node, arrays, self.opset, self.functions))
        except (exact.Vague, ValueError, IndexError) as error:
            raise Skip(f"{node.op_type}: {error}") from None
        entries = [Entry(list(arrays), constant, self._output_type(node, arrays[0], items))
                   for arrays in zip(*found, strict=True)]  # fmt: skip
        for entry in entries:
            self._check_numbers(entry)
        # What only depends on shapes is constant.
        if node.op_type in ("Shape", "Size"):
            entries = [Entry(entry.arrays[:1], True, entry.type) for entry in entries]
        return entries

    def _check_numbers(self, entry: Entry) -> None:
        if not 0 < entry.arrays[0].size <= MOST_ENTRIES:
            raise Skip("empty, or too large")
        for array in entry.arrays:
            if exact.is_float(array):
                limit = fmpq(int(self.limit)) if not entry.constant else fmpq(10) ** 38
                if not all(abs(x) < limit for x in array.reshape(-1)):
                    raise Skip("a number is too large")

    def _output_type(self, node: onnx.NodeProto, array: np.ndarray, items) -> str:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if array.dtype == np.int64:
            return "tensor(int64)"
        if array.dtype == bool:
            return "tensor(bool)"
        if node.op_type == "Cast":
            return _TYPES[attributes["to"]]
        if node.op_type == "CastLike":
            return items[1].type
        if node.op_type in ("Constant", "ConstantOfShape"):
            value = attributes.get("value")
            return _TYPES[value.data_type] if value is not None else "tensor(float)"
        types = [item.type for item in items if item is not None and "int64" not in item.type]
        types = [kind for kind in types if kind != "tensor(bool)"]
        return types[0] if types else self.type

    # -- whole graphs ------------------------------------------------------------------------------

    def attempt(self, recipe) -> bool:
        """Follows a recipe; leaves nothing behind if that fails."""
        nodes, stored, values = len(self.nodes), len(self.stored), dict(self.values)
        seen, used, functions = set(self.seen), set(self.used), dict(self.functions)
        try:
            recipe(self)
        except Skip:
            del self.nodes[nodes:]
            del self.stored[stored:]
            self.values, self.seen, self.used, self.functions = values, seen, used, functions
            return False
        return True

    def function(self, nodes, inputs, outputs, attributes=()) -> str:
        """A local function; its name."""
        name = f"F{len(self.functions)}"
        opsets = [helper.make_opsetid("", self.opset)]
        made = helper.make_function(
            _DOMAIN, name, list(inputs), list(outputs), nodes, opsets, list(attributes)
        )
        self.functions[_DOMAIN, name] = made
        self.seen.update(node.op_type for node in nodes)
        return name

    def finished(self) -> Graph:
        """The graph."""
        draw = self.draw
        variables = [
            name for name, entry in self.values.items()
            if not entry.constant and entry.type == self.type
        ]  # fmt: skip
        inputs = {name for name, _ in self.inputs}
        made = [name for name in variables if name not in inputs]
        if not made:
            raise Skip("nothing was made")
        outputs = [made[-1]]
        for name in made[:-1]:
            unused = name not in self.used
            if draw.random() < (0.15 if unused else 0.04):
                outputs.append(name)
        outputs = outputs[:3]
        if draw.random() < 0.04:
            outputs.append(self.inputs[0][0])  # what goes in comes out
        draw.shuffle(outputs)
        old = self.opset <= 8
        infos = [helper.make_tensor_value_info(n, self.kind, s) for n, s in self.inputs]
        for tensor in self.stored:
            # Old models list all initialisers as inputs, newer ones may.
            if old or draw.random() < 0.1:
                infos.append(helper.make_tensor_value_info(tensor.name, tensor.data_type,
                                                           list(tensor.dims)))  # fmt: skip
        results = [
            helper.make_tensor_value_info(
                n, self.kind,
                [f"{n}_{k}" if draw.random() < 0.3 else d
                 for k, d in enumerate(self.values[n].shape)],
            )
            for n in outputs
        ]  # fmt: skip
        opsets = [helper.make_opsetid("", self.opset)]
        if self.functions:
            opsets.append(helper.make_opsetid(_DOMAIN, 1))
        graph = helper.make_graph(self.nodes, "random", infos, results, self.stored)
        model = helper.make_model(
            graph, opset_imports=opsets, functions=list(self.functions.values()),
            ir_version=10 if self.functions else 3 if old else draw.choice((8, 9, 10)),
        )  # fmt: skip
        flat = [
            np.concatenate([self.values[n].arrays[p].reshape(-1) for n in outputs])
            for p in range(len(self.points))
        ]
        values = np.stack(flat)
        return Graph(
            model, self.low, self.high, self.points, self.of, values, self.palette.tame,
            all(isinstance(x, fmpq) for x in values.reshape(-1)), frozenset(self.seen),
            self._largest(), self.shapes, self.dtype,
        )  # fmt: skip

    def _largest(self) -> float:
        entries = (
            x for entry in self.values.values() for array in entry.arrays
            if exact.is_float(array) for x in array.reshape(-1)
        )  # fmt: skip
        return max((float(abs(exact.ball(x)).mid()) for x in entries), default=0.0)


def _type_name(dtype) -> str:
    return {"float32": "float", "float64": "double"}.get(np.dtype(dtype).name, np.dtype(dtype).name)


def write(seed: int, number: int, focus: Sequence[str] = ()) -> Graph:
    """The graph with this number; recipes of the names in `focus` come more often."""
    from benchmarks.fuzz.recipes import RECIPES, WEIGHTS

    for again in range(100):
        draw = random.Random(f"graphs {seed} {number} {again} {' '.join(focus)}")
        writer = Writer(draw)
        wanted = draw.choice((1, 2, 3, 4, 5, 6, 8, 10))
        made = tries = 0
        while made < wanted and tries < 40:
            tries += 1
            if focus and draw.random() < 0.5:
                name = draw.choice(list(focus))
            else:
                name = draw.choices(list(RECIPES), WEIGHTS)[0]
            made += writer.attempt(RECIPES[name])
        try:
            graph = writer.finished()
        except Skip:
            continue
        try:
            onnx.checker.check_model(graph.model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            continue  # Squeeze without axes of a batch of any size, for example
        return graph
    raise RuntimeError(f"no graph for seed {seed}, number {number}")
