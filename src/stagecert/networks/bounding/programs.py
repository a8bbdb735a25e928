"""A network as the checker's program: NumPy arrays, nothing to compile, and roundings counted.

What only moves entries becomes one operation that says where each entry comes from; all else has
its like in `stagecert_check.linear`.
"""

import math
from typing import Any

import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks import operations as ours
from stagecert.networks.bounding.relaxation import MOVING
from stagecert.networks.graph import Network, Node
from stagecert_check import graph, linear
from stagecert_check.functions import Maximum, Product, Refused, activation_of


class _Writer:
    def __init__(self):
        self.program = graph.Program()

    def add(self, operation: Any, arguments, shape) -> int:
        self.program.nodes.append(graph.Node(operation, tuple(arguments), tuple(shape)))
        return len(self.program.nodes) - 1

    def shape(self, index: int) -> tuple[int, ...]:
        return self.program.nodes[index].shape

    def places(self, arguments) -> list[np.ndarray]:
        """For every entry of the arguments a number, from 0 on."""
        found, first = [], 0
        for k in arguments:
            size = math.prod(self.shape(k))
            found.append(first + np.arange(size).reshape(self.shape(k)))
            first += size
        return found

    def move(self, arguments, index: np.ndarray) -> int:
        return self.add(linear.Move(index), arguments, index.shape)

    def repeated(self, index: int, shape) -> int:
        """A value with axes repeated to a shape."""
        if self.shape(index) == tuple(shape):
            return index
        return self.move([index], np.broadcast_to(self.places([index])[0], shape).copy())

    def node(self, node: Node, arguments: list[int]) -> int:
        operation, shape = node.operation, tuple(node.shape)
        weights = None if node.weights is None else np.asarray(node.weights)
        if isinstance(operation, ours.Reshape):
            return self.add(linear.Reshape(shape), arguments, shape)
        if type(operation) in MOVING:
            moved = MOVING[type(operation)](operation, node.weights, self.places(arguments))
            return self.move(arguments, np.ascontiguousarray(moved))
        if isinstance(operation, ours.Activation):
            return self.add(_activation(operation, weights, shape), arguments, shape)
        if isinstance(operation, ours.Joint):
            kind = {"max": Maximum, "product": Product}.get(operation.label)
            if kind is None:
                raise Refused(f"'{operation.label}' is not known")
            return self.add(kind(), arguments, shape)
        if isinstance(operation, ours.Sum):
            summands = [self.repeated(k, shape) for k in arguments]
            return self.add(linear.Sum(operation.signs), summands, shape)
        if isinstance(operation, (ours.Scale, ours.Shift)):
            argument = self.repeated(arguments[0], shape)
            constant = np.broadcast_to(np.asarray(weights, float), shape)
            if isinstance(operation, ours.Scale):
                return self.add(linear.Scale(constant, operation.loose), [argument], shape)
            if operation.loose:
                raise Refused("a number that is added is known to rounding only")
            return self.add(graph.Shift(constant), [argument], shape)
        if isinstance(operation, ours.MatMul):
            return self._product(operation, np.asarray(weights, float), arguments[0], shape)
        if isinstance(operation, ours.Conv):
            return self._conv(operation, np.asarray(weights, float), arguments[0], shape)
        return self._more(operation, arguments[0], shape)

    def _product(self, operation: ours.MatMul, weights, argument: int, shape) -> int:
        left = operation.left and len(self.shape(argument)) > 1
        if operation.left and not left:  # a vector has no last axis but one
            weights = np.swapaxes(weights, -1, -2)
        made = linear.MatMul(weights, left, operation.loose)
        return self.add(made, [argument], shape)

    def _conv(self, operation: ours.Conv, weights, argument: int, shape) -> int:
        if set(operation.input_dilation) != {1}:
            raise Refused("transposed convolutions are not known here")
        before = [max(first, 0) for first, _ in operation.padding]
        if any(x < 0 for pair in operation.padding for x in pair):
            raise Refused("a convolution with negative padding is not known here")
        made = linear.Conv(
            weights, operation.groups, operation.strides, operation.dilation, before, shape[2:]
        )
        return self.add(made, [argument], shape)

    def _more(self, operation: Any, argument: int, shape) -> int:
        (places,) = self.places([argument])
        if isinstance(operation, ours.Pad):
            cut = tuple(
                slice(max(-a, 0), n - max(-b, 0))
                for (a, b), n in zip(operation.widths, places.shape, strict=True)
            )
            widths = [(max(a, 0), max(b, 0)) for a, b in operation.widths]
            return self.move([argument], np.pad(places[cut], widths, constant_values=-1))
        if isinstance(operation, ours.Reduce):
            kept = tuple(1 if k in operation.axes else n for k, n in enumerate(places.shape))
            made = self.add(linear.Reduce(operation.axes, places.shape), [argument], kept)
            return self.add(linear.Reshape(shape), [made], shape)
        if isinstance(operation, (ours.Windows, ours.WindowSum)):
            padding = getattr(operation, "padding", ((0, 0),) * places.ndim)
            padded = np.pad(places, padding, constant_values=-1)
            windows = ours.Windows(operation.window, operation.strides, operation.dilation)
            found = _windows(windows, padded)
            made = self.move([argument], found)
            if isinstance(operation, ours.Windows):
                return made
            total = self.add(
                linear.Reduce([found.ndim - 1], found.shape), [made], (*found.shape[:-1], 1)
            )
            return self.add(linear.Reshape(shape), [total], shape)
        raise Refused(f"'{operation.label}' is not known")


def _windows(operation: ours.Windows, x: np.ndarray) -> np.ndarray:
    counts, found = operation.counts(x.shape), []
    for place in np.ndindex(*operation.window):
        ends = zip(place, operation.dilation, counts, operation.strides, strict=True)
        found.append(x[tuple(slice(i * d, i * d + (n - 1) * s + 1, s) for i, d, n, s in ends)])
    return np.stack(found, axis=-1)


def _activation(operation: ours.Activation, weights, shape) -> Any:
    settings: dict[str, Any] = dict(operation.settings)
    if weights is not None:
        settings["slope"] = np.broadcast_to(np.asarray(weights, float), shape)
    try:
        return activation_of(operation.kind, **settings)
    except (KeyError, TypeError):
        raise Refused(f"the activation '{operation.kind}' is not known") from None


def program_of(network: Network) -> graph.Program:
    """The program that computes what a network does.

    Raises:
        ProblemError: the network has an operation that the checker does not know.
    """
    writer = _Writer()
    for shape in network.input_shapes:
        writer.program.inputs.append(writer.add(None, (), shape))
    places = list(writer.program.inputs)
    for number, node in enumerate(network.nodes):
        try:
            places.append(writer.node(node, [places[k] for k in node.arguments]))
        except Refused as error:
            name = network.labels.nodes[number] if network.labels.nodes else ""
            raise ProblemError(
                f"relaxation='envelope' does not work here: {error} "
                f"(node {number + 1}{f', {name}' if name else ''})."
            ) from None
    writer.program.outputs = [places[k] for k in network.outputs]
    return writer.program
