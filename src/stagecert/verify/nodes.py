"""Lower bounds on the nodes of a search tree, many at a time, in single precision.

A node is a box of inputs with splits of neurons: ends of intervals that arguments of activations
are held to. What is bounded is a weighted sum of a case's rows minus their limits, plus
force * (x - end) for every end that a split holds. Any slopes of the lines around activations, any
forces of the right sign and any weights give a bound, by one pass back through the network. The way
forwards from where that bound is attained, with lines in the place of activations, says how each of
these should change. A few such steps make the bound better.

Nothing here is a proof: the checker evaluates what is found. So the passes go through the checker's
own reading of the model. They are written in NumPy: most properties need some hundred nodes, which
take less time than compiling would.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert_check.functions import Activation, Maximum
from stagecert_check.graph import Program, Shift

# How far slopes move at each step. Powers of two: slopes are then numbers of half precision.
SLOPE_STEPS = (0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.03125)
# The first step of a force, in units of its layer's mean cotangent; later ones shrink by DECAY.
FORCE_STEP, DECAY = 0.5, 0.85
WEIGHT_STEP = 0.5
MEAN, SQUARE = 0.7, 0.9  # what forces remember of earlier slopes, and of their squares
SAMPLES = 8  # points of a curve that stand for it where a slope is chosen


@dataclass(eq=False)
class Layer:
    """An activation: where its argument is on the axis of all neurons, and what it is."""

    function: Activation
    some: slice
    shape: tuple[int, ...]
    relu: bool
    maximum: bool


class Form:
    """A checker's program in single precision, with the arguments of activations side by side."""

    def __init__(self, program: Program):
        self.nodes = [_single(node) for node in program.nodes]
        self.inputs, self.outputs = program.inputs, program.outputs
        self.sizes = [math.prod(node.shape) for node in self.nodes]
        self.layers: dict[int, Layer] = {}
        begin = 0
        for index in program.activations:
            function: Any = program.nodes[index].operation
            argument = self.nodes[index].arguments[0]
            some = slice(begin, begin + self.sizes[argument])
            begin = some.stop
            relu = getattr(function, "kind", "") == "relu"
            self.layers[index] = Layer(
                function, some, self.nodes[argument].shape, relu, isinstance(function, Maximum)
            )
        self.neurons = begin
        self.curved = not all(layer.relu or layer.maximum for layer in self.layers.values())
        ends = [layer.some.stop for layer in self.layers.values()]
        self.of_neuron = np.searchsorted(ends, np.arange(begin), side="right")

    def joined(self, per_layer) -> np.ndarray:
        """Arrays (lanes, *shape) of all layers, side by side."""
        return np.concatenate([x.reshape(len(x), -1) for x in per_layer], axis=1)


def _single(node):
    """A node whose numbers are in single precision."""
    node = copy.copy(node)
    if isinstance(node.operation, Shift):
        node.operation = Shift(np.asarray(node.operation.constant, np.float32))
    elif hasattr(node.operation, "weights"):
        node.operation = copy.copy(node.operation)
        node.operation.weights = np.asarray(node.operation.weights, np.float32)
    elif hasattr(node.operation, "conv"):
        node.operation = copy.copy(node.operation)
        node.operation.conv = copy.copy(node.operation.conv)
        node.operation.conv.weights = np.asarray(node.operation.conv.weights, np.float32)
    return node


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

    Offsets of a maximum are in the place of its first argument.
    """

    below: np.ndarray
    under: np.ndarray
    above: np.ndarray
    over: np.ndarray

    def __getitem__(self, some) -> "Lines":
        return Lines(self.below[some], self.under[some], self.above[some], self.over[some])


@dataclass(eq=False)
class Pass:
    """What one pass back met: the bound, cotangents of blocks by node, of arguments and inputs."""

    bound: np.ndarray
    blocks: dict[int, np.ndarray]
    units: np.ndarray  # (lanes, layers), mean absolute cotangents of arguments
    inputs: np.ndarray


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
    below, above = lanes.below.copy(), lanes.above.copy()
    under, over = np.zeros(below.shape, np.float32), np.zeros(below.shape, np.float32)
    for layer in form.layers.values():
        some = layer.some
        low, high = lanes.low[:, some], lanes.high[:, some]
        if layer.relu:
            bent = (low < 0) & (high > 0)
            steep = low >= 0
            below[:, some] = np.where(bent, below[:, some], steep)
            chord = np.where(bent, high / np.where(bent, high - low, 1), steep)
            above[:, some], over[:, some] = chord, np.where(bent, -chord * low, 0)
        else:
            _offsets(layer, low, high, (below, under, above, over))
    return Lines(below, under, above, over)


def _offsets(layer: Layer, low, high, lines) -> None:
    """The offsets that the slopes of one layer need."""
    count, some = len(low), layer.some
    ends = [x.astype(float).reshape(count, *layer.shape) for x in (low, high)]
    for slopes, offsets, side in ((lines[0], lines[1], 1), (lines[2], lines[3], -1)):
        given = slopes[:, some].astype(float).reshape(count, *layer.shape)
        found = layer.function.offset(*ends, given, side)
        if layer.maximum:
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


def back(form: Form, lanes: Lanes, lines: Lines) -> Pass:
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
    # Where forces pull: at a neuron's upper end if positive, else at its lower one.
    lane, neuron = np.nonzero(lanes.force)
    force = lanes.force[lane, neuron]
    end = np.where(force > 0, lanes.high[lane, neuron], lanes.low[lane, neuron])
    bound -= np.bincount(lane, force * end, count).astype(np.float32)
    blocks: dict[int, np.ndarray] = {}
    units = np.zeros((count, len(form.layers)), np.float32)
    order = {index: k for k, index in enumerate(form.layers)}
    if len(lane):  # an argument may be forced even if nothing else needs it
        for index in {list(form.layers)[k] for k in np.unique(form.of_neuron[neuron])}:
            send(index, np.zeros((count, *nodes[index].shape), np.float32))
    for index in range(len(nodes) - 1, -1, -1):
        if index not in reached or index in form.inputs:
            continue
        g, node = reached.pop(index), nodes[index]
        if isinstance(node.operation, Activation):
            layer = form.layers[index]
            blocks[index] = g
            part = lines[:, layer.some]
            up, sent = np.maximum(g, 0), g.reshape(count, -1)
            wide = np.repeat(sent, layer.shape[-1], axis=1) if layer.maximum else sent
            up = np.maximum(wide, 0)
            down = up - wide
            bound += _offset_terms(layer, up, down, part)
            to = up * part.below - down * part.above
            units[:, order[index]] = np.mean(np.abs(to), axis=1)
            mine = (neuron >= layer.some.start) & (neuron < layer.some.stop)
            if mine.any():
                to[lane[mine], neuron[mine] - layer.some.start] += force[mine]
            send(node.arguments[0], to.reshape(count, *layer.shape))
        elif isinstance(node.operation, Shift):
            bound += _inner(g, node.operation.constant)
            send(node.arguments[0], g)
        else:
            shapes = [nodes[k].shape for k in node.arguments]
            for k, part in zip(node.arguments, node.operation.transposed(g, shapes), strict=True):
                send(k, part)
    c = form.joined([
        reached[k] if k in reached else np.zeros((count, *nodes[k].shape), np.float32)
        for k in form.inputs
    ])  # fmt: skip
    bound += np.einsum("ij,ij->i", c, np.where(c > 0, *lanes.box))
    return Pass(bound, blocks, units, c)


def _offset_terms(layer: Layer, up, down, part: Lines) -> np.ndarray:
    found = -np.einsum("ij,ij->i", down, part.over)
    return found if layer.relu else found + np.einsum("ij,ij->i", up, part.under)


def forth(form: Form, lanes: Lanes, lines: Lines, found: Pass) -> tuple[np.ndarray, np.ndarray]:
    """Arguments of activations and outputs (with the inputs) where a bound is attained."""
    count, nodes = len(lanes), form.nodes
    x = np.where(found.inputs > 0, *lanes.box)
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
            g = np.zeros((count, 1), np.float32) if g is None else g.reshape(count, -1)
            if layer.maximum:
                g = np.repeat(g, layer.shape[-1], axis=1) if g.shape[1] > 1 else g
            up = g > 0
            value = np.where(up, part.below, part.above) * at
            value += np.where(up, part.under, part.over)
            if layer.maximum:
                value = value.reshape(count, *layer.shape).sum(axis=-1)
            value = value.reshape(count, *node.shape)
        elif isinstance(node.operation, Shift):
            value = values[node.arguments[0]] + node.operation.constant
        else:
            value = node.operation.forward([values[k] for k in node.arguments])
        values.append(value)
    ends = form.joined([values[k] for k in (*form.outputs, *form.inputs)])
    return np.concatenate(arguments, axis=1) if arguments else x[:, :0], ends


# -- ascent ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Found:
    """The best bounds, and what says where to split.

    Attributes:
        lanes: the lanes with the slopes, forces and weights of the best bounds.
        lines: their lines.
        bound: (lanes,).
        points: (lanes, inputs), where the linear bound is smallest.
        scores: (lanes, neurons), what lines lose where a neuron would be split.
    """

    lanes: Lanes
    bound: np.ndarray
    points: np.ndarray
    scores: np.ndarray


def ascend(form: Form, lanes: Lanes, steps: int, goal: np.ndarray) -> Found:
    """Improves the bounds of lanes for so many steps; lanes that exceed their goal stop."""
    count = len(lanes)
    best = lanes[np.arange(count)]
    bound = np.full(count, -np.inf, np.float32)
    points = np.zeros(lanes.box[0].shape, np.float32)
    scores = np.zeros(lanes.low.shape, np.float32)
    going, work = np.arange(count), lanes[np.arange(count)]
    lines = lines_of(form, work)
    memory = None
    for k in range(steps):
        found = back(form, work, lines)
        better = found.bound > bound[going]
        some = going[better]
        bound[some] = found.bound[better]
        for name in ("below", "above", "force", "weights"):
            getattr(best, name)[some] = getattr(work, name)[better]
        points[some] = np.where(found.inputs > 0, *work.box)[better]
        scores[some] = _scores(form, work, lines, found)[better]
        left = ~(bound[going] > goal[going])
        if k + 1 == steps or not left.any():
            break
        values, ends = forth(form, work, lines, found)
        if memory is None:
            memory = _Memory(work)
        if not left.all():
            going, work, lines, memory = going[left], work[left], lines[left], memory.kept(left)
            values, ends = values[left], ends[left]
            found = Pass(found.bound[left], {i: g[left] for i, g in found.blocks.items()},
                         found.units[left], found.inputs[left])  # fmt: skip
        _move(form, work, lines, found, values, ends, k, memory)
    return Found(best, bound, points, scores)


class _Memory:
    """Running means of the slopes of forces and of their squares, for the ends that are held."""

    def __init__(self, lanes: Lanes):
        self.lane, self.neuron = np.nonzero(lanes.held)
        self.mean = np.zeros(len(self.lane), np.float32)
        self.square = np.zeros(len(self.lane), np.float32)

    def kept(self, some: np.ndarray) -> "_Memory":
        new = copy.copy(self)
        mine = some[self.lane]
        new.lane = (np.cumsum(some) - 1)[self.lane[mine]]
        new.neuron, new.mean, new.square = self.neuron[mine], self.mean[mine], self.square[mine]
        return new

    def step(self, slope) -> np.ndarray:
        self.mean = MEAN * self.mean + (1 - MEAN) * slope
        self.square = SQUARE * self.square + (1 - SQUARE) * slope * slope
        return self.mean / (np.sqrt(self.square) + 1e-12)


def _move(form: Form, lanes: Lanes, lines: Lines, found: Pass, values, ends, k, memory) -> None:
    """One step of slopes, forces and weights, in place."""
    size = SLOPE_STEPS[min(k, len(SLOPE_STEPS) - 1)]
    for index, layer in form.layers.items():
        if layer.maximum or index not in found.blocks:
            continue
        some, g = layer.some, found.blocks[index].reshape(len(lanes), -1)
        x = values[:, some]
        if layer.relu:
            # Where a line below is used, its slope grows with x.
            step = np.copysign(np.float32(size), x)
            step *= g > 0
            step += lanes.below[:, some]
            np.clip(step, 0, 1, out=step)
            lanes.below[:, some] = step
            bent = lines.over[:, some] > 0
            np.copyto(lines.below[:, some], step, where=bent)
        else:
            _turn(layer, lanes, g, x, size)
            low, high = lanes.low[:, some], lanes.high[:, some]
            lines.below[:, some], lines.above[:, some] = lanes.below[:, some], lanes.above[:, some]
            _offsets(layer, low, high, (lines.below, lines.under, lines.above, lines.over))
    if len(memory.lane):
        _push(form, lanes, found, values, k, memory)
    if lanes.weights.shape[1] > 1:
        excess = np.einsum("bro,bo->br", lanes.rows, ends[:, : lanes.rows.shape[2]])
        known = np.isfinite(lanes.limits)
        excess = np.where(known, excess - np.where(known, lanes.limits, 0), 0)
        unit = np.max(np.abs(excess), axis=1, keepdims=True) + 1e-12
        grown = lanes.weights * np.exp(WEIGHT_STEP * DECAY**k * excess / unit)
        lanes.weights[:] = grown / np.sum(grown, axis=1, keepdims=True)


def _push(form: Form, lanes: Lanes, found: Pass, values, k: int, memory: _Memory) -> None:
    """Forces grow where the end that they hold is not kept."""
    at = memory.lane, memory.neuron
    x, low, high, force, held = (
        values[at],
        lanes.low[at],
        lanes.high[at],
        lanes.force[at],
        lanes.held[at],
    )
    at_zero = np.maximum(x - high, 0) + np.minimum(x - low, 0)
    slope = np.where(force > 0, x - high, np.where(force < 0, x - low, at_zero))
    unit = found.units[memory.lane, form.of_neuron[memory.neuron]]
    new = force + FORCE_STEP * DECAY**k * unit * memory.step(slope)
    new = np.where(held & 1, new, np.maximum(new, 0))
    lanes.force[at] = np.where(held & 2, new, np.minimum(new, 0))


def _turn(layer: Layer, lanes: Lanes, g, x, size: float) -> None:
    """Turns the used lines of a curve towards those that touch its hull at x."""
    some = layer.some
    low, high = lanes.low[:, some].astype(float), lanes.high[:, some].astype(float)
    at = np.clip(x, low, high)
    t = np.linspace(0, 1, SAMPLES)
    xs = np.stack([low + (high - low) * share for share in t])
    fs = _values(layer, xs.reshape(-1, *low.shape[1:])).reshape(xs.shape)
    for slopes, side in ((lanes.below, 1), (lanes.above, -1)):
        used = g > 0 if side > 0 else g < 0
        wanted = _hull_slope(xs, fs, at, side)
        old = slopes[:, some]
        slopes[:, some] = np.where(used, old + 2 * min(size, 0.5) * (wanted - old), old)


def _values(layer: Layer, x) -> np.ndarray:
    """The activation at points (many, entries): the middle of what encloses it."""
    x = x.reshape(len(x), *layer.shape)
    low, high = layer.function.image(x, x)
    return (0.5 * low + 0.5 * high).reshape(len(x), -1)


def _hull_slope(xs, fs, at, side: int) -> np.ndarray:
    """The slope at a point of the lower (side 1) or upper hull of points on a curve."""
    best, slope = np.full(at.shape, np.inf), np.zeros(at.shape)
    for i in range(len(xs)):
        for j in range(i + 1, len(xs)):
            over = (xs[i] <= at) & (at <= xs[j]) & (xs[i] < xs[j])
            chord = (fs[j] - fs[i]) / np.where(over, xs[j] - xs[i], 1)
            value = side * (fs[i] + chord * (at - xs[i]))
            better = over & (value < best)
            best, slope = np.where(better, value, best), np.where(better, chord, slope)
    return slope


# -- where to split --------------------------------------------------------------------------------


def split_points(form: Form, low, high) -> np.ndarray:
    """(lanes, neurons): where each argument would be split: at a kink, or in the middle."""
    cuts = 0.5 * low + 0.5 * high
    for layer in form.layers.values():
        some = layer.some
        if layer.relu:
            cuts[:, some] = 0
        elif not layer.maximum:
            kinks, sharp = kinks_of(layer.function)
            best = cuts[:, some].copy()
            off = np.full(best.shape, np.inf)
            for kink in kinks:
                away = np.abs(kink - cuts[:, some])
                # A bend that is no corner attracts the split where it leaves two fair parts.
                inside = (low[:, some] < kink) & (kink < high[:, some])
                inside &= sharp | (away <= 0.25 * (high - low)[:, some])
                nearer = inside & (away < off)
                best, off = np.where(nearer, kink, best), np.where(nearer, away, off)
            cuts[:, some] = best
    return cuts


def kinks_of(function: Activation) -> tuple[tuple[float, ...], bool]:
    """Where an activation has its kinks or bends the other way; whether it is linear between."""
    knots = getattr(function, "knots", None)
    if knots is not None:
        return tuple(before for before, _ in knots), True
    return ((-3.0, 3.0) if function.kind == "hard_swish" else (0.0,)), False


def _scores(form: Form, lanes: Lanes, lines: Lines, found: Pass) -> np.ndarray:
    """(lanes, neurons): how far the used lines are from the activation where it would be split."""
    scores = np.zeros(lanes.low.shape, np.float32)
    cuts = split_points(form, lanes.low, lanes.high) if form.curved else None
    for index, layer in form.layers.items():
        if index not in found.blocks or layer.maximum:
            continue
        some, g = layer.some, found.blocks[index].reshape(len(lanes), -1)
        part = lines[:, some]
        if layer.relu:
            scores[:, some] = np.maximum(-g, 0) * part.over
        else:
            assert cuts is not None
            at = cuts[:, some].astype(float)
            slope, offset = (
                np.where(g > 0, part.below, part.above),
                np.where(g > 0, part.under, part.over),
            )
            wide = lanes.high[:, some] > lanes.low[:, some]
            scores[:, some] = np.abs(g * (_values(layer, at) - slope * at - offset)) * wide
    return scores


def parts_bounds(form: Form, lanes: Lanes, picks: np.ndarray) -> np.ndarray:
    """(lanes, picks, 2): bounds of the parts below and above after a split of each neuron picked.

    By one pass back each, with the slopes and forces that there are.
    """
    found = np.empty((*picks.shape, 2), np.float32)
    cuts = split_points(form, lanes.low, lanes.high)
    at = np.arange(len(lanes))
    for k in range(picks.shape[1]):
        pick = picks[:, k]
        for side, ends in enumerate((lanes.high, lanes.low)):
            old = ends[at, pick]
            ends[at, pick] = cuts[at, pick]
            found[:, k, side] = back(form, lanes, lines_of(form, lanes)).bound
            ends[at, pick] = old
    return found
