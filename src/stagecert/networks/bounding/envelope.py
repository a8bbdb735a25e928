"""Bounds by planes above neurons: the relaxation that looks at all inputs of a neuron at once.

Above a neuron there is its line, which sees the argument only, and a plane (`neurons`); any mixture
of the two gives a bound, by one pass back. `envelope_search` looks for good ones.

Planes need a number for each input of a neuron. So they are for those neurons where the triangle
loses most, problem by problem, as many as there is room for. What is found is handed to the passes
of `stagecert_check`, which account for every rounding: nothing here is a proof.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.networks.bounding.neurons import Neurons, envelope, moved, read, single
from stagecert_check.bounds import Facts, lower_bounds
from stagecert_check.functions import Activation
from stagecert_check.graph import Program, Shift
from stagecert_check.planes import Given, planes_above, slopes_of, sources_of

ROOM = 2**22  # numbers in an array of allocations


@dataclass(eq=False)
class Kinked:
    """An activation max(a y, b y) on one box: its interval, its chord, its sources."""

    slopes: tuple[float, ...]
    low: np.ndarray
    high: np.ndarray
    chord: np.ndarray
    over: np.ndarray
    bent: np.ndarray
    sources: list[int]


class State:
    """Arrays with an axis of problems, by name and activation."""

    def __init__(self):
        self.arrays: dict[tuple[str, int], np.ndarray] = {}

    def __getitem__(self, key: tuple[str, int]) -> np.ndarray:
        return self.arrays[key]

    def __setitem__(self, key: tuple[str, int], value: np.ndarray) -> None:
        self.arrays[key] = value

    def of(self, some) -> "State":
        """Some of the problems."""
        new = State()
        new.arrays = {key: x[some] for key, x in self.arrays.items()}
        return new

    def put(self, some, other: "State", rows) -> None:
        """Takes over some problems from rows of another state."""
        for key, x in other.arrays.items():
            if key in self.arrays:
                self.arrays[key][some] = x[rows]


class Envelope:
    """The relaxation of a program on one box.

    Args:
        program: what computes.
        facts: of the box, in float64; the first one, if there are several.
        room: how many numbers there may be in an array of allocations; 0: triangles alone.
    """

    def __init__(self, program: Program, facts: Facts, room: int = ROOM):
        self.program, self.facts, self.room = program, facts, room
        self.nodes = [single(node) for node in program.nodes]
        self.sizes = [math.prod(node.shape) for node in program.nodes]
        self.box = tuple(np.asarray(x[0], np.float32) for x in facts.inputs)
        self.kinked: dict[int, Kinked] = {}
        self.fixed: dict[int, tuple] = {}
        for index in program.activations:
            slopes = slopes_of(program.nodes[index].operation)
            if slopes:
                self.kinked[index] = self._kinked(index, slopes)
            else:
                self.fixed[index] = tuple(np.asarray(x[:1], float) for x in facts.lines[index])
        self.neurons: dict[int, Neurons] = {}

    def _kinked(self, index: int, slopes) -> Kinked:
        low, high = (np.asarray(x[0], float).reshape(-1) for x in self.facts.boxes[index])
        a, b = slopes
        bent = (low < 0) & (high > 0)
        at_low, at_high = (np.maximum(a * x, b * x) for x in (low, high))
        wide = np.where(bent, high - low, 1)
        chord = np.where(bent, (at_high - at_low) / wide, np.where(low >= 0, b, a))
        over = np.where(bent, at_low - chord * low, 0)
        low, high, chord, over = (x.astype(np.float32) for x in (low, high, chord, over))
        return Kinked(slopes, low, high, chord, over, bent, sources_of(self.program, index))

    # -- passes ----------------------------------------------------------------------------------

    def _read(self, values: list, index: int) -> np.ndarray:
        """What an activation's neurons read: all its sources, side by side."""
        parts = [values[k].reshape(len(values[k]), -1) for k in self.kinked[index].sources]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _ends(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The box of that, in float64."""
        return tuple(
            np.concatenate([np.asarray(x[k][0], float).reshape(-1)
                            for k in self.kinked[index].sources])
            for x in (self.facts.low, self.facts.high)
        )  # type: ignore  # fmt: skip

    def _moved(self, index: int, x: np.ndarray, state: State) -> np.ndarray:
        """How far what is read has moved in the helpful direction: (problems, planes, reads)."""
        low, high = self._ends(index)
        way = np.where(high > low, high - low, 1)
        share = ((x - low) / way).astype(x.dtype)
        neurons, chosen = self.neurons[index], state["chosen", index]
        if neurons.dense:
            read = share[:, None, :]
        else:
            read = share[np.arange(len(x))[:, None, None], neurons.columns[chosen]]
        return moved(read, neurons.up[chosen])

    def forth(self, rows: np.ndarray, point: np.ndarray, state: State, blocks: dict | None = None):
        """Objectives at a point of the relaxation, the arguments there, and what planes read.

        `point` are inputs; where blocks are between their bounds, `state` says. With cotangents of
        `blocks` they are on the lines and planes that a pass back took for these.
        """
        nodes = self.nodes
        values: list[Any] = []
        arguments: dict[int, np.ndarray] = {}
        reads: dict[int, tuple] = {}
        count, begin = len(point), 0
        for index, node in enumerate(nodes):
            if node.operation is None:
                size = self.sizes[index]
                value = point[:, begin : begin + size].reshape(count, *node.shape)
                begin += size
            elif index in self.kinked:
                y = values[node.arguments[0]].reshape(count, -1)
                arguments[index] = y
                if blocks is None:
                    lower, upper, reads[index] = self._bounds(index, y, values, state)
                    theta = state["theta", index]
                    value = ((1 - theta) * lower + theta * upper).reshape(count, *node.shape)
                else:
                    g = blocks.get(index, np.zeros_like(y))
                    value, reads[index] = self._on_lines(index, y, values, state, g)
                    value = value.reshape(count, *node.shape)
            elif isinstance(node.operation, Activation):
                theta = state["theta", index]
                if blocks is not None and index in blocks:
                    theta = (blocks[index].reshape(theta.shape) < 0).astype(np.float32)
                value = self._between(index, values[node.arguments[0]], theta)
            elif isinstance(node.operation, Shift):
                value = values[node.arguments[0]] + node.operation.constant
            else:
                value = node.operation.forward([values[k] for k in node.arguments])
            values.append(value)
        ends = [values[k].reshape(count, -1) for k in self.program.outputs]
        return np.einsum("bo,bo->b", rows, np.concatenate(ends, axis=1)), arguments, reads

    def _bounds(self, index: int, y, values, state: State):
        """Both bounds of a kinked activation; of planes how far inputs moved, and both uppers."""
        layer = self.kinked[index]
        a, b = layer.slopes
        lower = np.maximum(a * y, b * y)
        upper = np.maximum(layer.chord * y + layer.over, lower)
        if ("chosen", index) not in state.arrays:
            return lower, upper, ()
        neurons, chosen = self.neurons[index], state["chosen", index]
        t = self._moved(index, self._read(values, index), state)
        delta, most = neurons.delta[chosen], neurons.most[chosen]
        high = envelope(t, delta, np.maximum(delta.sum(axis=-1) - most, 0))
        at = np.arange(len(y))[:, None], neurons.entries[chosen]
        plane, line = a * y[at] + (b - a) * high, upper[at]
        upper[at] = np.maximum(np.minimum(line, plane), lower[at])
        return lower, upper, (t, line, plane)

    def _on_lines(self, index: int, y, values, state: State, g):
        """The lines and planes of a kinked activation where cotangents g take them."""
        layer = self.kinked[index]
        a, b = layer.slopes
        above = layer.chord * y + layer.over
        value = np.where(g > 0, state["below", index] * y, above)
        if ("chosen", index) not in state.arrays:
            return value, ()
        neurons, chosen, kept = self.neurons[index], state["chosen", index], state["kept", index]
        t = self._moved(index, self._read(values, index), state)
        weights = kept * neurons.delta[chosen]
        spare = np.maximum(neurons.most[chosen] - weights.sum(axis=-1), 0)
        at = np.arange(len(y))[:, None], neurons.entries[chosen]
        plane = a * y[at] + (b - a) * (spare + np.einsum("bmi,bmi->bm", weights, t))
        line = above[at]
        value[at] += np.where(g[at] < 0, state["mix", index] * (plane - line), 0)
        return value, (t, line, plane)

    def _between(self, index: int, x, theta):
        below, under, above, over = self.fixed[index]
        wide = below.ndim > len(self.nodes[index].shape) + 1
        low, high = below * x, above * x
        if wide:
            low, high = low.sum(axis=-1), high.sum(axis=-1)
        low, high = low + under, high + over
        theta = theta.reshape(low.shape)
        return ((1 - theta) * low + theta * high).astype(x.dtype)

    def back(self, rows: np.ndarray, state: State):
        """Bounds with what a state says, and the cotangents of blocks and of inputs."""
        count, nodes = len(rows), self.nodes
        bound = np.zeros(count, np.float32)
        reached: dict[int, np.ndarray] = {}
        blocks: dict[int, np.ndarray] = {}

        def send(index: int, g) -> None:
            reached[index] = reached[index] + g if index in reached else g

        begin = 0
        for index in self.program.outputs:
            size = self.sizes[index]
            send(index, rows[:, begin : begin + size].reshape(count, *nodes[index].shape))
            begin += size
        for index in range(len(nodes) - 1, -1, -1):
            if index not in reached or index in self.program.inputs:
                continue
            g, node = reached.pop(index), nodes[index]
            if index in self.kinked:
                blocks[index] = g = g.reshape(count, -1)
                up, down = np.maximum(g, 0), np.maximum(-g, 0)
                if ("chosen", index) in state.arrays:
                    bound, down, to = self._through(index, bound, down, state)
                    for k, part in to:
                        send(k, part)
                layer = self.kinked[index]
                bound = bound - down @ layer.over
                to = up * state["below", index] - down * layer.chord
                send(node.arguments[0], to.reshape(count, *nodes[node.arguments[0]].shape))
            elif isinstance(node.operation, Activation):
                blocks[index] = g
                below, under, above, over = self.fixed[index]
                up, down = np.maximum(g, 0), np.maximum(-g, 0)
                bound = bound + (up * under - down * over).reshape(count, -1).sum(axis=1)
                if below.ndim > g.ndim:
                    up, down = up[..., None], down[..., None]
                send(node.arguments[0], (up * below - down * above).astype(np.float32))
            elif isinstance(node.operation, Shift):
                bound = bound + (g * node.operation.constant).reshape(count, -1).sum(axis=1)
                send(node.arguments[0], g)
            else:
                shapes = [nodes[k].shape for k in node.arguments]
                for k, part in zip(
                    node.arguments, node.operation.transposed(g, shapes), strict=True
                ):
                    send(k, part)
        c = np.concatenate([
            reached[k].reshape(count, -1) if k in reached
            else np.zeros((count, self.sizes[k]), np.float32) for k in self.program.inputs
        ], axis=1)  # fmt: skip
        bound = bound + np.einsum("ij,ij->i", c, np.where(c > 0, *self.box))
        return bound, blocks, c

    def _through(self, index: int, bound, down, state: State):
        """Shares of cotangents through planes: the bound, what is left, and what sources get."""
        layer, neurons, chosen = self.kinked[index], self.neurons[index], state["chosen", index]
        a, b = layer.slopes
        count = len(down)
        at = np.arange(count)[:, None], neurons.entries[chosen]
        taken = down[at] * state["mix", index]
        down = down.copy()
        down[at] -= taken
        delta, kept = neurons.delta[chosen], state["kept", index]
        low, high = self._ends(index)
        way = np.where(high > low, high - low, 1)
        # The plane is a y + (b - a) (spare + kept . delta t); t is (x - low) / way, or 1 less that.
        paid = np.einsum("bmi,bmi->bm", delta, kept)
        spare = np.maximum(neurons.most[chosen] - paid, 0)
        bound = bound - (b - a) * np.einsum("bm,bm->b", taken, spare)
        back = (kept * delta) * (taken * (b - a))[..., None]
        falling = np.where(neurons.up[chosen], 0, back)
        bound = bound - falling.sum(axis=(1, 2))
        signed = back - 2 * falling
        if neurons.dense:
            moves = signed.sum(axis=1)
        else:
            flat = np.arange(count)[:, None, None] * len(low) + neurons.columns[chosen]
            moves = np.bincount(flat.reshape(-1), signed.reshape(-1), count * len(low))
            moves = moves.reshape(count, -1)
        g = -moves / way
        bound = bound - g @ low
        if a:  # a y goes through the argument, as a line without an offset does
            at_argument = np.zeros(down.shape, np.float32)
            at_argument[at] = -a * taken
            (argument,) = self.nodes[index].arguments
            shape = self.nodes[argument].shape
            sent = [(argument, at_argument.reshape(count, *shape))]
        else:
            sent = []
        begin = 0
        for k in layer.sources:
            part = g[:, begin : begin + self.sizes[k]].astype(np.float32)
            sent.append((k, part.reshape(count, *self.nodes[k].shape)))
            begin += self.sizes[k]
        return bound.astype(np.float32), down, sent

    # -- where searches begin ----------------------------------------------------------------------

    def start(self, rows: np.ndarray, below: dict[int, np.ndarray]) -> State:
        """Where to begin: slopes below kinked activations, (problems, entries), no planes yet."""
        state = State()
        for index, layer in self.kinked.items():
            a, b = layer.slopes
            given = np.clip(np.asarray(below[index], np.float32).reshape(len(rows), -1), a, b)
            exact = np.where(layer.low >= 0, b, a).astype(np.float32)
            state["below", index] = np.where(layer.bent, given, exact)
            state["theta", index] = np.zeros(given.shape, np.float32)
        for index in self.fixed:
            state["theta", index] = np.zeros((len(rows), self.sizes[index]), np.float32)
        return state

    def default_slopes(self, count: int) -> dict[int, np.ndarray]:
        """Slopes below kinked activations to begin with: those of the nearer piece."""
        return {
            index: np.tile(np.where(layer.high > -layer.low, *layer.slopes[::-1]), (count, 1))
            for index, layer in self.kinked.items()
        }

    def choose(self, state: State, blocks: dict[int, np.ndarray]) -> None:
        """Gives planes to those neurons where triangles lose most."""
        for index, layer in self.kinked.items():
            if index not in blocks or not layer.bent.any() or not self.room:
                continue
            lost = np.maximum(-blocks[index], 0) * layer.over
            count, reads = len(lost), sum(self.sizes[k] for k in layer.sources)
            room = max(self.room // (count * reads), 1)
            # Where nothing is lost now something may be later; what is not bent is of no use.
            some = min(int(layer.bent.sum()), room)
            lost = np.where(layer.bent, lost, -1)
            picked = np.argpartition(-lost, some - 1, axis=1)[:, :some]
            entries, place = np.unique(picked, return_inverse=True)
            self.neurons[index] = neurons = read(self.program, index, entries, *self._ends(index))
            state["chosen", index] = chosen = place.reshape(picked.shape)
            delta = neurons.delta[chosen]
            total = np.maximum(delta.sum(axis=-1), np.float32(1e-30))
            share = np.minimum(neurons.most[chosen] / total, 1)
            state["kept", index] = np.broadcast_to(share[..., None], delta.shape).copy()
            state["mix", index] = np.zeros(chosen.shape, np.float32)

    # -- what is proven --------------------------------------------------------------------------

    def given(self, index: int, state: State) -> Given:
        """The planes of an activation as a certificate gives them."""
        layer, neurons, chosen = self.kinked[index], self.neurons[index], state["chosen", index]
        a, b = layer.slopes
        rows, place = np.nonzero(state["mix", index] > 0)
        some = chosen[rows, place]
        kept = np.zeros((len(rows), sum(self.sizes[k] for k in layer.sources)), np.float32)
        at = np.arange(len(rows))[:, None], neurons.columns[some]
        share = a + (b - a) * np.clip(state["kept", index][rows, place], 0, 1)
        # Columns that a neuron does not read stand for the first one, with nothing to add.
        np.maximum.at(kept, at, np.where(neurons.delta[some] > 0, share, 0).astype(np.float32))
        return Given(
            rows, neurons.entries[some], state["mix", index][rows, place].astype(float), kept
        )

    def certified(self, rows: np.ndarray, state: State) -> np.ndarray:
        """What a state proves of each problem, with every rounding accounted for."""
        facts, found = self.facts, []
        reads = [
            sum(self.sizes[k] for k in layer.sources) * state["mix", index].shape[1]
            for index, layer in self.kinked.items()
            if ("mix", index) in state.arrays
        ]
        at_once = max(2**23 // max(sum(reads), 1), 1)
        for first in range(0, len(rows), at_once):
            some = slice(first, first + at_once)
            found.append(self._certified(facts, np.asarray(rows[some], float), state.of(some)))
        return np.concatenate(found)

    def _certified(self, facts: Facts, rows: np.ndarray, state: State) -> np.ndarray:
        of = np.zeros(len(rows), int)
        lines: dict[int, Any] = {}
        for index in self.kinked:
            low, high = (x[:1] for x in facts.boxes[index])
            function = self.program.nodes[index].operation
            assert isinstance(function, Activation)
            shape = len(rows), *low.shape[1:]
            slope = state["below", index].astype(float).reshape(shape)
            above = np.broadcast_to(function.slopes(low, high)[1], shape)
            lines[index] = facts.line(index, slice(0, 1), slope, above)
            if ("chosen", index) in state.arrays:
                given = self.given(index, state)
                if len(given.rows):
                    lines[index] = (*lines[index], planes_above(facts, index, of, given))

        def begin(some: slice) -> dict[int, np.ndarray]:
            start: dict[int, np.ndarray] = {}
            first = 0
            for index in self.program.outputs:
                size, shape = self.sizes[index], self.program.nodes[index].shape
                part = rows[some, first : first + size].reshape(-1, *shape)
                start[index] = start[index] + part if index in start else part
                first += size
            return start

        with np.errstate(all="ignore"):
            return lower_bounds(facts, of, begin, lines)
