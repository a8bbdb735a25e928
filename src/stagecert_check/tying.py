"""Inputs of several networks that a property says are equal, as one input of the joint model.

Two networks on the same inputs have half as many free inputs as the property has. Where every case
has the rows x_i - x_j <= 0 and x_j - x_i <= 0, its points are those with x = z[places] for a vector
z of the inputs that are left, and the joint model on z computes the same. Both the search and the
checker read model and property like that.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stagecert_check.external import Model
from stagecert_check.properties import Case, Property, Row, Tensor
from stagecert_check.properties.model import InputSet

_FIRST = 5  # opset; before that, the new shape is no input of Reshape
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
