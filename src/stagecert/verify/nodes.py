"""Lower bounds on the nodes of a search tree, many at a time, in single precision.

A node is a box of inputs with splits of neurons: ends of intervals that arguments of activations
are held to. What is bounded is a weighted sum of a case's rows minus their limits, plus
force * (x - end) for every end that a split holds. Any slopes of the lines around activations, any
forces of the right sign and any weights give a bound, by one pass back through the network. The way
forwards from where that bound is attained, with lines in the place of activations, says how each of
these should change. A few such steps make the bound better.

Nothing here is a proof: the checker evaluates what is found. So the passes go through the checker's
own reading of the model. They are written in NumPy: most properties need some hundred nodes, which
take less time than compiling would. Arrays on a GPU go through the same lines (`gpu`): NumPy's
functions leave them to the library whose arrays they are.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.networks.bounding.neurons import single
from stagecert.verify.curves import convex
from stagecert_check.functions import Activation, Maximum, Product
from stagecert_check.graph import Program, Shift
from stagecert_check.linear import Conv

# Numbers in an array of many lanes: so many that arrays of a pass fit into a processor's caches;
# on a GPU, so that a pass takes longer than to start it.
LANE_NUMBERS, LANE_NUMBERS_THERE = 100_000, 2**25


@dataclass(eq=False)
class Layer:
    """An activation: where its argument is on the axis of all neurons, and what it is.

    A maximum and a product read the last axis of their argument: they are joint functions.
    """

    function: Activation
    some: slice
    shape: tuple[int, ...]
    relu: bool
    maximum: bool
    joint: bool


class Form:
    """A checker's program in single precision, with the arguments of activations side by side."""

    def __init__(self, program: Program):
        self.nodes = [single(node) for node in program.nodes]
        self.inputs, self.outputs = program.inputs, program.outputs
        self.sizes = [math.prod(node.shape) for node in self.nodes]
        self.layers: dict[int, Layer] = {}
        begin = 0
        for index in program.activations:
            function: Any = program.nodes[index].operation
            argument = self.nodes[index].arguments[0]
            some = slice(begin, begin + self.sizes[argument])
            begin = some.stop
            relu, maximum = getattr(function, "kind", "") == "relu", isinstance(function, Maximum)
            joint = maximum or isinstance(function, Product)
            shape = self.nodes[argument].shape
            self.layers[index] = Layer(function, some, shape, relu, maximum, joint)
        self.neurons = begin
        self.curved = not all(layer.relu or layer.maximum for layer in self.layers.values())
        # Convolutions make passes back so dear that nodes with clipped intervals win.
        self.dear = any(isinstance(node.operation, Conv) for node in program.nodes)
        ends = [layer.some.stop for layer in self.layers.values()]
        self.of_neuron = np.searchsorted(ends, np.arange(begin), side="right")
        self.like = np.empty(0)  # what new arrays are like
        self.there: Form | None = None  # the same on a GPU, where nodes are bounded then

    def lanes_at_once(self, inputs: int) -> int:
        """How many lanes to bound together, for a network with so many inputs."""
        numbers = LANE_NUMBERS if self.there is None else LANE_NUMBERS_THERE
        return max(numbers // max(self.neurons, inputs, 1), 16)

    def held(self, lanes: "Lanes") -> list[bool]:
        """In which layers splits hold ends of some lanes."""
        return [bool(lanes.held[:, layer.some].any()) for layer in self.layers.values()]

    def joined(self, per_layer) -> np.ndarray:
        """Arrays (lanes, *shape) of all layers, side by side."""
        return np.concatenate([x.reshape(len(x), -1) for x in per_layer], axis=1)


@dataclass(eq=False)
class Lanes:
    """Nodes, side by side; arrays have an axis of lanes.

    Attributes:
        box: (lanes, inputs) twice, the ends of the inputs.
        low, high: (lanes, neurons), intervals of the arguments.
        held: (lanes, neurons), 1 where a split holds the lower end, 2 the upper end, 3 both.
        rows: (lanes, rows, outputs then inputs), at most `limits` at a counterexample.
        limits: (lanes, rows); infinite for rows that are not there.
        below, above: (lanes, neurons), slopes of the lines.
        force: (lanes, neurons), positive on upper ends, negative on lower ones.
        weights: (lanes, rows), of the rows.
        units: (lanes, layers), the least size of a step of a force.
        scale: (lanes,), at most one: what all steps are multiplied by.
    """

    box: tuple[np.ndarray, np.ndarray]
    low: np.ndarray
    high: np.ndarray
    held: np.ndarray
    rows: np.ndarray
    limits: np.ndarray
    below: np.ndarray
    above: np.ndarray
    force: np.ndarray
    weights: np.ndarray
    units: np.ndarray
    scale: np.ndarray

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, some) -> "Lanes":
        given = {
            name: getattr(self, name)[some] for name in self.__dataclass_fields__ if name != "box"
        }
        return Lanes(box=(self.box[0][some], self.box[1][some]), **given)


@dataclass(eq=False)
class Lines:
    """below * x + under <= activation(x) <= above * x + over; (lanes, neurons).

    Offsets of a joint function are in the place of its first argument.
    """

    below: np.ndarray
    under: np.ndarray
    above: np.ndarray
    over: np.ndarray

    def __getitem__(self, some) -> "Lines":
        return Lines(self.below[some], self.under[some], self.above[some], self.over[some])


@dataclass(eq=False)
class Aim:
    """What is bounded instead of rows of the outputs: sides * entries of a value, lane by lane."""

    node: int
    entries: np.ndarray
    sides: np.ndarray

    def __getitem__(self, some) -> "Aim":
        return Aim(self.node, self.entries[some], self.sides[some])


@dataclass(eq=False)
class Pass:
    """What one pass back met.

    Attributes:
        bound: (lanes,).
        blocks: cotangents of activations, by node.
        units: (lanes, layers), mean absolute cotangents of arguments.
        point: (lanes, inputs), where the bound is attained.
    """

    bound: np.ndarray
    blocks: dict[int, np.ndarray]
    units: np.ndarray
    point: np.ndarray

    def __getitem__(self, some) -> "Pass":
        blocks = {index: g[some] for index, g in self.blocks.items()}
        return Pass(self.bound[some], blocks, self.units[some], self.point[some])


def default_slopes(form: Form, low, high) -> tuple[np.ndarray, np.ndarray]:
    """The slopes that the checker would take."""
    below, above = np.zeros(low.shape, np.float32), np.zeros(low.shape, np.float32)
    for layer in form.layers.values():
        ends = (x[:, layer.some].astype(float).reshape(-1, *layer.shape) for x in (low, high))
        found = layer.function.slopes(*ends)
        for flat, one in zip((below, above), found, strict=True):
            flat[:, layer.some] = one.reshape(len(low), -1)
    return below, above


def lines_of(form: Form, lanes: Lanes) -> Lines:
    """The lines with the lanes' slopes on the lanes' intervals."""
    nothing = np.zeros(lanes.below.shape, np.float32, like=form.like)
    lines = Lines(lanes.below.copy(), nothing, lanes.above.copy(), nothing.copy())
    for layer in form.layers.values():
        set_lines(layer, lanes, lines)
    return lines


def set_lines(layer: Layer, lanes: Lanes, lines: Lines) -> None:
    """Writes the lines of one layer."""
    some = layer.some
    low, high = lanes.low[:, some], lanes.high[:, some]
    below, above = lanes.below[:, some], lanes.above[:, some]
    if layer.relu:
        bent = (low < 0) & (high > 0)
        steep = low >= 0
        chord = np.where(bent, high / np.where(bent, high - low, 1), steep)
        lines.below[:, some] = np.where(bent, below, steep)
        lines.above[:, some], lines.over[:, some] = chord, np.where(bent, -chord * low, 0)
        return
    if hasattr(layer.function, "knots"):
        # Where it is linear the checker takes the function itself.
        ends = [x.astype(float).reshape(-1, *layer.shape) for x in (low, high)]
        bent = layer.function.bent(*ends).reshape(low.shape)
        own = (x.reshape(low.shape) for x in layer.function.slopes(*ends))
        below, above = (np.where(bent, x, y) for x, y in zip((below, above), own, strict=True))
    lines.below[:, some], lines.above[:, some] = below, above
    offsets(layer, low, high, (lines.below, lines.under, lines.above, lines.over))


def offsets(layer: Layer, low, high, lines) -> None:
    """The offsets that the slopes of one layer need."""
    count, some = len(low), layer.some
    ends = [x.astype(float).reshape(count, *layer.shape) for x in (low, high)]
    curve = convex(layer.function, ends[0])
    for slopes, offsets, side in ((lines[0], lines[1], 1), (lines[2], lines[3], -1)):
        given = slopes[:, some].astype(float).reshape(count, *layer.shape)
        found = (curve or layer.function).offset(ends[0], ends[1], given, side)
        if layer.joint:
            part = np.zeros((count, *layer.shape), np.float32)
            part[..., 0] = found
            found = part
        offsets[:, some] = found.reshape(count, -1)


# -- passes ----------------------------------------------------------------------------------------


def _inner(g, x) -> np.ndarray:
    g = g.reshape(len(g), -1)
    return (
        g @ x.reshape(-1)
        if x.size == g.shape[1]
        else np.einsum("ij,ij->i", g, x.reshape(len(g), -1))
    )


def back(form: Form, lanes: Lanes, lines: Lines, aim: Aim | None = None) -> Pass:
    """Lower bounds, by one pass back."""
    count, nodes = len(lanes), form.nodes
    known = np.isfinite(lanes.limits)
    bound = -np.sum(np.where(known, lanes.weights * lanes.limits, 0), axis=1, dtype=np.float32)
    row = np.einsum("br,bro->bo", lanes.weights, lanes.rows)
    reached: dict[int, np.ndarray] = {}

    def send(index: int, g) -> None:
        reached[index] = reached[index] + g if index in reached else g

    begin = 0
    for index in (*form.outputs, *form.inputs):
        if begin == row.shape[1]:
            break
        size = form.sizes[index]
        send(index, row[:, begin : begin + size].reshape(-1, *nodes[index].shape))
        begin += size
    if aim is not None:
        start = np.zeros((count, form.sizes[aim.node]), np.float32, like=form.like)
        start[np.arange(count, like=form.like), aim.entries] = aim.sides
        send(aim.node, start.reshape(-1, *nodes[aim.node].shape))
    blocks: dict[int, np.ndarray] = {}
    units = np.zeros((count, len(form.layers)), np.float32, like=form.like)
    order = {index: k for k, index in enumerate(form.layers)}
    # An argument may be held even if nothing else needs it.
    layers_held = form.held(lanes)
    for index, some in zip(form.layers, layers_held, strict=True):
        if some:
            send(index, np.zeros((count, *nodes[index].shape), np.float32, like=form.like))
    for index in range(len(nodes) - 1, -1, -1):
        if index not in reached or index in form.inputs:
            continue
        g, node = reached.pop(index), nodes[index]
        if isinstance(node.operation, Activation):
            layer = form.layers[index]
            blocks[index] = g
            part = lines[:, layer.some]
            sent = g.reshape(count, -1)
            wide = np.repeat(sent, layer.shape[-1], axis=1) if layer.joint else sent
            down = np.minimum(wide, 0)
            to = wide - down
            bound += np.einsum("ij,ij->i", down, part.over)
            if not layer.relu:
                bound += np.einsum("ij,ij->i", to, part.under)
            to *= part.below
            down *= part.above
            to += down
            units[:, order[index]] = np.mean(np.abs(to), axis=1)
            if layers_held[order[index]]:
                bound += _pulled(lanes, layer.some, to)
            send(node.arguments[0], to.reshape(count, *layer.shape))
        elif isinstance(node.operation, Shift):
            bound += _inner(g, node.operation.constant)
            send(node.arguments[0], g)
        else:
            assert node.operation is not None
            shapes = [nodes[k].shape for k in node.arguments]
            for k, part in zip(node.arguments, node.operation.transposed(g, shapes), strict=True):
                send(k, part)
    c = form.joined([
        reached[k] if k in reached
        else np.zeros((count, *nodes[k].shape), np.float32, like=form.like)
        for k in form.inputs
    ])  # fmt: skip
    point = np.where(c > 0, *lanes.box)
    bound += np.einsum("ij,ij->i", c, point)
    return Pass(bound, blocks, units, point)


def _pulled(lanes: Lanes, some: slice, to) -> np.ndarray:
    """Adds forces to cotangents of a layer's arguments; what that adds to the bounds.

    They pull at a neuron's upper end if positive, else at its lower one.
    """
    force = lanes.force[:, some]
    to += force
    # Where nothing pulls, ends may be infinite.
    end = np.where(force > 0, lanes.high[:, some], np.where(force < 0, lanes.low[:, some], 0))
    return -np.einsum("ij,ij->i", force, end)


def forth(
    form: Form, lanes: Lanes, lines: Lines, found: Pass, aim: Aim | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Arguments of activations and outputs (with the inputs) where a bound is attained.

    Of what comes after an aim, and after all activations that were met, nothing is computed.
    """
    count = len(lanes)
    last = len(form.nodes) if aim is None else max(aim.node, max(found.blocks, default=-1) + 1)
    nodes = form.nodes[:last]
    x = found.point
    values: list[Any] = []
    arguments: list[np.ndarray] = []
    begin = 0
    for index, node in enumerate(nodes):
        if node.operation is None:
            size = form.sizes[index]
            value = x[:, begin : begin + size].reshape(count, *node.shape)
            begin += size
        elif isinstance(node.operation, Activation):
            layer, at = form.layers[index], values[node.arguments[0]].reshape(count, -1)
            arguments.append(at)
            part = lines[:, layer.some]
            g = found.blocks.get(index)
            if g is None:
                g = np.zeros((count, 1), np.float32, like=form.like)
            g = g.reshape(count, -1)
            if layer.joint:
                g = np.repeat(g, layer.shape[-1], axis=1) if g.shape[1] > 1 else g
            up = g > 0
            value = np.where(up, part.below, part.above) * at
            value += np.where(up, part.under, part.over)
            if layer.joint:
                value = value.reshape(count, *layer.shape).sum(axis=-1)
            value = value.reshape(count, *node.shape)
        elif isinstance(node.operation, Shift):
            value = values[node.arguments[0]] + node.operation.constant
        else:
            value = node.operation.forward([values[k] for k in node.arguments])
        values.append(value)
    at = np.concatenate([x[:, :0], *arguments], axis=1)
    return at, x if aim is not None else form.joined(
        [values[k] for k in (*form.outputs, *form.inputs)]
    )
