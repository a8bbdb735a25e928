"""Bounds by planes above neurons: the relaxation that looks at all inputs of a neuron at once.

Above a neuron there is its line, which sees the argument only, and a plane (`neurons`); any mixture
of the two gives a bound, by one pass back. `envelope_search` looks for good ones.

Planes need a number for each input of a neuron. So they are for those neurons where the triangle
loses most, problem by problem, as many as there is room for. What is found is handed to the passes
of `stagecert_check`, which account for every rounding: nothing here is a proof.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stagecert.networks.bounding.neurons import TINY, Neurons, envelope, read, single
from stagecert_check.bounds import Facts, lower_bounds
from stagecert_check.functions import Activation
from stagecert_check.graph import Program, Shift
from stagecert_check.planes import Given, planes_above, slopes_of, sources_of

ROOM = 2**22  # numbers in an array of allocations
MOST = 32  # neurons of an activation that get planes: see docs/envelope.md
# Arrays of a state, or of a search's memory, with an axis of planes.
PLANES = ("mix", "kept", "line", "line jumps", "t", "jumps")


# From arguments (problems, *shape) to what is below and above an activation there.
Hull = Callable[[Any], tuple[Any, Any]]


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
    """Arrays with an axis of problems, by name and activation; of planes, one of neurons follows.

    `neurons` are those with planes: arrays of theirs have an axis of problems too.
    """

    def __init__(self):
        self.arrays: dict[tuple[str, int], np.ndarray] = {}
        self.neurons: dict[int, Neurons] = {}

    def __getitem__(self, key: tuple[str, int]) -> np.ndarray:
        return self.arrays[key]

    def __setitem__(self, key: tuple[str, int], value: np.ndarray) -> None:
        self.arrays[key] = value

    def of(self, some) -> "State":
        """Some of the problems."""
        new = State()
        new.arrays = {key: x[some] for key, x in self.arrays.items()}
        new.neurons = {index: x[some] for index, x in self.neurons.items()}
        return new

    def put(self, some, other: "State", rows) -> None:
        """Takes over some problems from rows of another state with the same planes."""
        for key, x in other.arrays.items():
            if key in self.arrays:
                self.arrays[key][some] = x[rows]

    def narrow(self, index: int, order: np.ndarray) -> None:
        """Keeps some planes of an activation, in an order: (problems, planes)."""
        for name in PLANES:
            x = self.arrays.pop((name, index), None)
            if x is not None and order.shape[1]:
                at = order if x.ndim == 2 else order[..., None]
                self[name, index] = np.take_along_axis(x, at, axis=1)
        neurons = self.neurons.pop(index, None)
        if neurons is not None and order.shape[1]:
            self.neurons[index] = neurons.along(order)


class Envelope:
    """The relaxation of a program on one box.

    Args:
        program: what computes.
        facts: of the box, in float64; the first one, if there are several.
        room: how many numbers there may be in an array of allocations; 0: triangles alone.
        most: how many neurons of an activation get planes, at most.
    """

    def __init__(self, program: Program, facts: Facts, room: int = ROOM, most: int = MOST):
        self.program, self.facts, self.room, self.most = program, facts, room, most
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

    def shares(self, index: int, values: list) -> np.ndarray:
        """How far what is read has moved up, as a share of the way: (problems, entries)."""
        low, high = self._ends(index)
        x = self._read(values, index)
        return ((x - low) / np.where(high > low, high - low, 1)).astype(x.dtype)

    def ahead(self, rows: np.ndarray, point: np.ndarray, rule: Callable) -> np.ndarray:
        """Objectives at a point (inputs); `rule` makes an activation's value of (index, values)."""
        values: list[Any] = []
        count, begin = len(point), 0
        for index, node in enumerate(self.nodes):
            if node.operation is None:
                size = self.sizes[index]
                value = point[:, begin : begin + size].reshape(count, *node.shape)
                begin += size
            elif isinstance(node.operation, Activation):
                value = rule(index, values).reshape(count, *node.shape)
            elif isinstance(node.operation, Shift):
                value = values[node.arguments[0]] + node.operation.constant
            else:
                value = node.operation.forward([values[k] for k in node.arguments])
            values.append(value)
        ends = [values[k].reshape(count, -1) for k in self.program.outputs]
        return np.einsum("bo,bo->b", rows, np.concatenate(ends, axis=1))

    def forth(
        self, rows: np.ndarray, point: np.ndarray, state: State,
        hulls: dict[int, Hull] | None = None,
    ):  # fmt: skip
        """Objectives at a point of the relaxation, the arguments there, and what planes read.

        `point` are inputs; where blocks are between their bounds, `state` says. `hulls` take the
        place of lines around activations that are not max(a y, b y).
        """
        arguments: dict[int, np.ndarray] = {}
        reads: dict[int, tuple] = {}

        def rule(index: int, values: list) -> np.ndarray:
            x = values[self.nodes[index].arguments[0]]
            if index not in self.kinked:
                theta = state["theta", index]
                low, high = (hulls or {}).get(index, partial(self._lines, index))(x)
                theta = theta.reshape(low.shape)
                return ((1 - theta) * low + theta * high).astype(x.dtype)
            arguments[index] = y = x.reshape(len(x), -1)
            lower, upper, reads[index] = self.bounds(index, y, values, state)
            theta = state["theta", index]
            return (1 - theta) * lower + theta * upper

        return self.ahead(rows, point, rule), arguments, reads

    def bounds(self, index: int, y, values, state: State):
        """Both bounds of a kinked activation; of planes how far inputs moved, and both uppers."""
        layer = self.kinked[index]
        a, b = layer.slopes
        lower = np.maximum(a * y, b * y)
        upper = np.maximum(layer.chord * y + layer.over, lower)
        if index not in state.neurons:
            return lower, upper, ()
        neurons = state.neurons[index]
        t = neurons.moved(self.shares(index, values))
        at = np.arange(len(y))[:, None], neurons.entries
        plane, line = a * y[at] + (b - a) * envelope(t, neurons), upper[at]
        upper[at] = np.maximum(np.minimum(line, plane), lower[at])
        return lower, upper, (t, line, plane)

    def _lines(self, index: int, x) -> tuple[np.ndarray, np.ndarray]:
        """The lines around an activation that is not max(a y, b y)."""
        below, under, above, over = self.fixed[index]
        low, high = below * x, above * x
        if below.ndim > len(self.nodes[index].shape) + 1:
            low, high = low.sum(axis=-1), high.sum(axis=-1)
        return low + under, high + over

    def value(self, rows, point, state: State, hulls: dict[int, Hull]) -> np.ndarray:
        """Objectives at a point of the relaxation with the envelopes of all neurons.

        A search leaves out planes that it does not need, and lines are wider than hulls: what is
        between those need not be between these. Where there are too many numbers, infinite.
        """
        every, numbers = State(), 1
        every.arrays = {key: x for key, x in state.arrays.items() if key[0] == "theta"}
        for index, layer in self.kinked.items():
            some = np.flatnonzero(layer.bent)
            if not self.room or not len(some):
                continue
            size = len(some) * sum(self.sizes[k] for k in layer.sources)
            if size > 8 * ROOM:
                return np.full(len(rows), np.inf)
            every.neurons[index] = read(self.program, index, some, *self._ends(index))
            numbers = max(numbers, every.neurons[index].delta.size)
        at_once = max(ROOM // numbers, 1)
        found = []
        for first in range(0, len(rows), at_once):
            some = slice(first, first + at_once)
            here = State()
            here.arrays = {key: x[some] for key, x in every.arrays.items()}
            here.neurons = every.neurons
            rows32 = np.asarray(rows[some], np.float32)
            found.append(self.forth(rows32, point[some], here, hulls=hulls)[0])
        return np.concatenate(found)

    def behind(self, rows: np.ndarray, rule: Callable) -> tuple[np.ndarray, np.ndarray]:
        """What constants add to objectives, and the cotangents of inputs.

        `rule(index, g)` takes an activation's cotangents, and says what it adds to the objectives,
        and which nodes get which cotangents.
        """
        count, nodes = len(rows), self.nodes
        bound = np.zeros(count, np.float32)
        reached: dict[int, np.ndarray] = {}

        def send(index: int, g) -> None:
            g = g.reshape(count, *nodes[index].shape)
            reached[index] = reached[index] + g if index in reached else g

        begin = 0
        for index in self.program.outputs:
            size = self.sizes[index]
            send(index, rows[:, begin : begin + size])
            begin += size
        for index in range(len(nodes) - 1, -1, -1):
            if index not in reached or index in self.program.inputs:
                continue
            g, node = reached.pop(index), nodes[index]
            if isinstance(node.operation, Activation):
                more, to = rule(index, g)
                bound = bound + more
                for k, part in to:
                    send(k, part)
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
        return bound, c

    def back(self, rows: np.ndarray, state: State):
        """Bounds with what a state says, and the cotangents of blocks and of inputs."""
        count = len(rows)
        blocks: dict[int, np.ndarray] = {}

        def rule(index: int, g: np.ndarray) -> tuple[Any, list]:
            (argument,) = self.nodes[index].arguments
            if index not in self.kinked:
                blocks[index] = g
                below, under, above, over = self.fixed[index]
                up, down = np.maximum(g, 0), np.maximum(-g, 0)
                more = (up * under - down * over).reshape(count, -1).sum(axis=1)
                if below.ndim > g.ndim:
                    up, down = up[..., None], down[..., None]
                return more, [(argument, (up * below - down * above).astype(np.float32))]
            blocks[index] = g = g.reshape(count, -1)
            up, down, more, to = np.maximum(g, 0), np.maximum(-g, 0), 0, []
            if index in state.neurons:
                more, down, to = self._through(index, down, state)
            layer = self.kinked[index]
            to.append((argument, up * state["below", index] - down * layer.chord))
            return more - down @ layer.over, to

        bound, c = self.behind(rows, rule)
        bound = bound + np.einsum("ij,ij->i", c, np.where(c > 0, *self.box))
        return bound, blocks, c

    def _through(self, index: int, down, state: State):
        """Shares of cotangents through planes: what they add, what is left, what sources get."""
        layer, neurons = self.kinked[index], state.neurons[index]
        a, b = layer.slopes
        count = len(down)
        at = np.arange(count)[:, None], neurons.entries
        taken = down[at] * state["mix", index]
        down = down.copy()
        down[at] -= taken
        weights = state["kept", index] * ((b - a) * taken)[..., None]
        more, sent = self.through(index, neurons, weights)
        if a:  # a y goes through the argument, as a line without an offset does
            at_argument = np.zeros(down.shape, np.float32)
            at_argument[at] = -a * taken
            sent.append((self.nodes[index].arguments[0], at_argument))
        return more, down, sent

    def through(self, index: int, neurons: Neurons, weights: np.ndarray) -> tuple[Any, list]:
        """Minus weights . delta t as a function of what is read: its constant, its slopes."""
        # t is (x - low) / way, or 1 less that.
        low, high = self._ends(index)
        back = weights * neurons.delta
        falling = back * neurons.falls
        constant = falling.reshape(len(falling), -1).sum(axis=1)
        falling *= 2
        back -= falling
        g = -neurons.sent(back, len(low)) / np.where(high > low, high - low, 1)
        more = -constant - g @ low
        sent, begin = [], 0
        for k in self.kinked[index].sources:
            sent.append((k, g[:, begin : begin + self.sizes[k]].astype(np.float32)))
            begin += self.sizes[k]
        return more.astype(np.float32), sent

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

    @property
    def helps(self) -> bool:
        """Whether any neuron can have a plane that is not its line."""
        return any(layer.bent.any() for layer in self.kinked.values())

    def complete(self, state: State) -> bool:
        """Whether all neurons that bend have planes, and there are no other activations."""
        return not self.fixed and all(
            index in state.neurons and state.neurons[index].entries.shape[1] >= layer.bent.sum()
            for index, layer in self.kinked.items()
            if layer.bent.any()
        )

    def choose(self, state: State, blocks: dict[int, np.ndarray]) -> None:
        """Gives planes to those neurons where triangles lose most, problem by problem."""
        for index, layer in self.kinked.items():
            if index not in blocks or not layer.bent.any() or not self.room:
                continue
            lost = np.maximum(-blocks[index], 0) * layer.over
            count, reads = len(lost), sum(self.sizes[k] for k in layer.sources)
            # Where nothing is lost now something may be later; what is not bent is of no use.
            some = min(int(layer.bent.sum()), max(self.room // (count * reads), 1), self.most)
            picked = np.argsort(np.where(layer.bent, -lost, 1), axis=1, kind="stable")[:, :some]
            entries, place = np.unique(picked, return_inverse=True)
            found = read(self.program, index, entries, *self._ends(index))
            state.neurons[index] = neurons = found[place.reshape(picked.shape)]
            share = neurons.most / np.maximum(neurons.most + neurons.deficit, TINY)
            state["kept", index] = np.broadcast_to(share[..., None], neurons.delta.shape).copy()
            state["mix", index] = np.zeros(picked.shape, np.float32)

    # -- what is proven --------------------------------------------------------------------------

    def given(self, index: int, state: State, blocks: dict[int, np.ndarray]) -> Given:
        """The planes of an activation as a certificate gives them: those that cotangents take."""
        layer, neurons = self.kinked[index], state.neurons[index]
        a, b = layer.slopes
        g = np.take_along_axis(blocks[index], neurons.entries, axis=1)
        rows, place = np.nonzero((state["mix", index] > 0) & (g < 0))
        neurons = neurons[rows, place]
        share = a + (b - a) * np.clip(state["kept", index][rows, place], 0, 1)
        kept = np.where(neurons.delta > 0, share, 0).astype(np.float32)
        if neurons.columns is not None:
            full = np.zeros((len(rows), sum(self.sizes[k] for k in layer.sources)), np.float32)
            # Columns that a neuron does not read stand for others, with nothing to add.
            np.maximum.at(full, (np.arange(len(rows))[:, None], neurons.columns), kept)
            kept = full
        return Given(rows, neurons.entries, state["mix", index][rows, place].astype(float), kept)

    def certified(self, rows: np.ndarray, state: State) -> np.ndarray:
        """What a state proves of each problem, with every rounding accounted for."""
        facts, found = self.facts, []
        reads = [
            sum(self.sizes[k] for k in layer.sources) * state["mix", index].shape[1]
            for index, layer in self.kinked.items()
            if index in state.neurons
        ]
        at_once = max(2**23 // max(sum(reads), 1), 1)
        for first in range(0, len(rows), at_once):
            some = slice(first, first + at_once)
            found.append(self._certified(facts, np.asarray(rows[some], float), state.of(some)))
        return np.concatenate(found)

    def _certified(self, facts: Facts, rows: np.ndarray, state: State) -> np.ndarray:
        of = np.zeros(len(rows), int)
        blocks = self.back(np.asarray(rows, np.float32), state)[1]
        lines: dict[int, Any] = {}
        for index in self.kinked:
            low, high = (x[:1] for x in facts.boxes[index])
            function = self.program.nodes[index].operation
            assert isinstance(function, Activation)
            shape = len(rows), *low.shape[1:]
            slope = state["below", index].astype(float).reshape(shape)
            above = np.broadcast_to(function.slopes(low, high)[1], shape)
            lines[index] = facts.line(index, slice(0, 1), slope, above)
            if index in state.neurons and index in blocks:
                given = self.given(index, state, blocks)
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
