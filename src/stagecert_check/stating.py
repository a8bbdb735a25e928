"""Hidden values and products of variables that a property has rows on, as outputs of the model;
and inputs of several networks that it says are equal, as one input of the joint model.

Both the search and the checker read the model with these, and the property in terms of them. So
nothing else has to know that there are rows on anything but inputs and outputs.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stagecert_check.errors import ProblemError
from stagecert_check.external import Model
from stagecert_check.properties import Case, Property, Row, Tensor
from stagecert_check.properties.model import InputSet
from stagecert_check.properties.reader import HIDDEN, OUTPUT

_FIRST = 5  # opset; before that, the new shape is no input of Reshape


def stated(model: Model, wanted: Property) -> tuple[Model, Property]:
    """The model with the hidden values and the products as last outputs, and rows on these.

    Both are what they were if the property has neither. Cases keep their places, and the model
    its digest.

    Raises:
        ProblemError: the model has no such hidden value, or is one to which nothing can be added.
    """
    if not wanted.cases or not (wanted.hidden or wanted.products):
        return model, wanted
    there = wanted.sizes[1]

    def moved(row: Row) -> Row:
        more = tuple((there + index, c) for index, c in row.hidden)
        return dataclasses.replace(row, outputs=(*row.outputs, *more), hidden=())

    products = (Tensor("products", "real", (len(wanted.products),)),) if wanted.products else ()
    networks = [dataclasses.replace(one, hidden=()) for one in wanted.networks]
    last = (*networks[-1].outputs, *wanted.hidden, *products)
    networks[-1] = dataclasses.replace(networks[-1], outputs=last)
    shell = dataclasses.replace(wanted, networks=tuple(networks), cases=(), products=())
    cases = tuple(
        Case(case.inputs, tuple(map(moved, case.outputs)), shell.sizes) for case in wanted.cases
    )
    data = _extended(model.data, wanted)
    larger = Model(data, model.files, digest_of_parts=model.digest)
    return larger, dataclasses.replace(shell, cases=cases)


def _extended(data: bytes, wanted: Property) -> bytes:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        raise ProblemError("This is no ONNX model, or it is damaged.") from None
    opset = next((item.version for item in model.opset_import if not item.domain), _FIRST)
    if opset < _FIRST:
        raise ProblemError(
            f"Rows on hidden values and products need opset {_FIRST}, the model has {opset}."
        )
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [info.name for info in graph.input if info.name not in stored]
    outputs = [info.name for info in graph.output]
    add = _adder(graph)
    hidden = [
        add("Reshape", [_place(graph, wanted, number, tensor), np.array([-1])])
        for number, network in enumerate(wanted.networks)
        for tensor in network.hidden
    ]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in hidden)
    if wanted.products:
        flat = [add("Reshape", [name, np.array([-1])]) for name in (*inputs, *outputs)]
        sizes = wanted.sizes
        starts = {0: 0, OUTPUT: sizes[0], HIDDEN: sizes[0] + sizes[1]}
        name = _products(wanted, [*flat, *hidden], starts, add)
        graph.output.append(onnx.ValueInfoProto(name=name))
    return model.SerializeToString()


Add = Callable[..., str]


def _adder(graph: onnx.GraphProto) -> Add:
    """A function that adds a node of one output, with a name that no value has, and returns it.

    Inputs are names, or constants.
    """
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {item.name for item in (*graph.input, *graph.initializer)}
    count = 0

    def fresh() -> str:
        nonlocal count
        count += 1
        while (name := f"row value {count}") in taken:
            count += 1
        return name

    def add(kind: str, inputs: list[Any], **attributes: Any) -> str:
        names = []
        for item in inputs:
            if isinstance(item, np.ndarray):
                graph.initializer.append(numpy_helper.from_array(item.astype(np.int64), fresh()))
                item = graph.initializer[-1].name
            names.append(item)
        graph.node.append(helper.make_node(kind, names, [fresh()], **attributes))
        return graph.node[-1].output[0]

    return add


def _place(graph: onnx.GraphProto, wanted: Property, number: int, tensor: Tensor) -> str:
    """The value that a hidden tensor of a network is: by its own name, or else its node's."""
    prefix = f"{number} " if len(wanted.networks) > 1 else ""  # see joining.py
    name = prefix + (tensor.node or "")
    if any(name in node.output for node in graph.node):
        return name
    nodes = [node for node in graph.node if node.name == name and len(node.output) == 1]
    if len(nodes) != 1:
        network = wanted.networks[number].name
        raise ProblemError(
            f"The hidden value {tensor.name} is to be {tensor.node!r} of the network {network}, "
            "but no node has an output of that name, nor is it the name of one node with one."
        )
    return nodes[0].output[0]


def _products(wanted: Property, values: list[str], starts: dict[int, int], add: Add) -> str:
    """A vector of all products, in the order of the property."""
    pool, length = add("Concat", values, axis=0), sum(wanted.sizes)
    # A product may have products as its factors; those are made first.
    places: dict[int, int] = {}  # of products in the pool, by their numbers
    first = HIDDEN + wanted.sizes[2]

    def place(variable: int) -> int | None:
        if variable >= first:
            return places.get(variable - first)
        kind = max(k for k in starts if k <= variable)
        return starts[kind] + variable - kind

    while len(places) < len(wanted.products):
        ready = [
            (number, left, right)
            for number, (one, other) in enumerate(wanted.products)
            if number not in places
            and (left := place(one)) is not None
            and (right := place(other)) is not None
        ]
        # Squares apart: they are recognised where both factors are the same value.
        for same in (True, False):
            some = [item for item in ready if (item[1] == item[2]) == same]
            if some:
                left, right = (np.array([item[k] for item in some]) for k in (1, 2))
                factor = add("Gather", [pool, left], axis=0)
                other = factor if same else add("Gather", [pool, right], axis=0)
                pool = add("Concat", [pool, add("Mul", [factor, other])], axis=0)
                for number, *_ in some:
                    places[number], length = length, length + 1
    order = np.array([places[number] for number in range(len(wanted.products))])
    return add("Gather", [pool, order], axis=0)


# -- inputs that are equal -------------------------------------------------------------------------

# Two networks on the same inputs have half as many free inputs as the property has. Where every
# case has the rows x_i - x_j <= 0 and x_j - x_i <= 0, its points are those with x = z[places] for a
# vector z of the inputs that are left, and the joint model on z computes the same.
_INPUT, _PLACES, _SHAPE = "tied inputs", "tied places", "tied shape"


def places_of(wanted: Property) -> np.ndarray | None:
    """For every entry of the inputs which one of those that are left it is; None if all are."""
    if len(wanted.networks) < 2 or not wanted.cases:
        return None
    same = [_equal(case.inputs) for case in wanted.cases]
    first = np.arange(wanted.sizes[0])  # the first of all entries that are equal
    for i, j in sorted(set.intersection(*same)):
        a, b = sorted((int(first[i]), int(first[j])))
        first[first == b] = a
    left, places = np.unique(first, return_inverse=True)
    return None if len(left) == len(first) else places


def tied(model: Model, wanted: Property) -> tuple[Model, Property]:
    """Model and property with one input for all that are equal; the model keeps its digest.

    Both are what they were if none are, or if the model's inputs are not of fixed shapes.
    """
    places = places_of(wanted)
    data = None if places is None else _gathered(model.data, wanted, places)
    if places is None or data is None:
        return model, wanted
    known: dict[int, InputSet] = {}
    for inputs, _ in wanted.groups:
        known[id(inputs)] = _smaller(inputs, places)
        if np.any(known[id(inputs)].lower > known[id(inputs)].upper):
            return model, wanted  # there is nothing to verify; the rows say so too
    count = int(places.max()) + 1
    networks = [dataclasses.replace(one, inputs=()) for one in wanted.networks]
    networks[0] = dataclasses.replace(networks[0], inputs=(Tensor(_INPUT, "real", (1, count)),))
    sizes = count, *wanted.sizes[1:]
    cases = tuple(
        Case(known[id(case.inputs)], tuple(_moved(row, places) for row in case.outputs), sizes)
        for case in wanted.cases
    )
    changed = dataclasses.replace(wanted, networks=tuple(networks), cases=cases)
    return Model(data, model.files, digest_of_parts=model.digest), changed


def _equal(inputs: InputSet) -> set[tuple[int, int]]:
    """Pairs of entries that are equal: each is at most the other."""
    most: set[tuple[int, int]] = set()
    for row in inputs.rows:
        if len(row.inputs) == 2 and row.bound == 0 and not row.strict:
            (i, factor), (j, other) = row.inputs
            if i != j and factor == -other:
                most.add((i, j) if factor > 0 else (j, i))
    return {(i, j) for i, j in most if (j, i) in most and i < j}


def _moved(row: Row, places: np.ndarray) -> Row:
    sums: dict[int, Fraction] = {}
    for index, factor in row.inputs:
        place = int(places[index])
        sums[place] = sums.get(place, Fraction(0)) + factor
    return dataclasses.replace(row, inputs=tuple((k, c) for k, c in sorted(sums.items()) if c))


def _smaller(inputs: InputSet, places: np.ndarray) -> InputSet:
    """The box of what is left, and the rows that still say something."""
    groups = [np.flatnonzero(places == k) for k in range(int(places.max()) + 1)]

    def each(ends: np.ndarray, best: object) -> np.ndarray:
        assert callable(best)
        return np.array([best(ends[some].tolist()) for some in groups], ends.dtype)

    rows = [_moved(row, places) for row in inputs.rows]
    # A row without variables that is true says nothing; one that is not true refutes the case.
    kept = tuple(row for row in rows if row.inputs or not row.holds((), (), ()))
    return InputSet(
        each(inputs.lower, max), each(inputs.upper, min),
        each(inputs.lower64, max), each(inputs.upper64, min), kept,
    )  # fmt: skip


def _gathered(data: bytes, wanted: Property, places: np.ndarray) -> bytes | None:
    """The model on the inputs that are left; None if its own have no fixed shapes that fit."""
    model = onnx.ModelProto()
    model.ParseFromString(data)
    opset = next((item.version for item in model.opset_import if not item.domain), 0)
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [info for info in graph.input if info.name not in stored]
    shapes = [[item.dim_value for item in info.type.tensor_type.shape.dim] for info in inputs]
    # A first axis of any length is one of examples: there is one.
    shapes = [[first or 1, *rest] for first, *rest in filter(None, shapes)]
    fits = [math.prod(shape) for shape in shapes] == [tensor.size for tensor in wanted.inputs]
    kinds = {info.type.tensor_type.elem_type for info in inputs}
    taken = stored | {name for node in graph.node for name in (*node.input, *node.output)}
    if opset < _FIRST or not fits or kinds != {onnx.TensorProto.FLOAT}:
        return None
    if any(name.startswith("tied ") for name in taken):
        return None
    kept = [info for info in graph.input if info.name in stored]
    del graph.input[:]
    graph.input.append(
        helper.make_tensor_value_info(_INPUT, onnx.TensorProto.FLOAT, [1, int(places.max()) + 1])
    )
    graph.input.extend(kept)
    first: list[onnx.NodeProto] = []
    begin = 0
    for number, (info, shape) in enumerate(zip(inputs, shapes, strict=True)):
        size = math.prod(shape)
        some, names = places[begin : begin + size], [f"{x} {number}" for x in (_PLACES, _SHAPE)]
        begin += size
        for array, name in zip((some, np.array(shape)), names, strict=True):
            graph.initializer.append(numpy_helper.from_array(array.astype(np.int64), name))
        value = f"tied value {number}"
        first.append(helper.make_node("Gather", [_INPUT, names[0]], [value], axis=1))
        first.append(helper.make_node("Reshape", [value, names[1]], [info.name]))
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*first, *nodes])
    return model.SerializeToString()
