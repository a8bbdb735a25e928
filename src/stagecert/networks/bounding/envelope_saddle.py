"""The last steps with planes: the relaxation as a saddle point, by a primal-dual method.

A point of the relaxation and multipliers of its lines and planes take steps in turn, as in PDLP:
steps as long as the last one allows, and again from their mean where that has halved the gap. The
values of bent neurons are variables of their own here, and no step rests on the sign of a
cotangent, where steps on slopes come to rest. What comes out is a bound like every other: slopes
and mixtures are the multipliers of a neuron's lines and planes, as shares of their sums.

What the arrays of a `State` are called here: "in" (of -1): inputs, and "at": values of activations,
as shares of their ways. "low", "steep" are the multipliers of the two pieces, which are below;
"line", "plane" of what is above; all in the units of the objective. "kept" are allocations.
"""

from typing import Any

import numpy as np

from stagecert.networks.bounding.envelope import Envelope, State
from stagecert.networks.bounding.neurons import TINY, allocated

LOOK = 20  # steps between two looks at what they prove
FIRST = np.float32(0.3)  # how long the first step is
ENOUGH = 0.4  # of a gap: where so little is left of it, steps begin anew
LONG = 0.36  # of all steps: after so many since the last time, they begin anew
ROOM = -0.5, 1.5  # where values may be, beyond their bounds: what never binds needs no multiplier
PUSHED = 2.0  # no plane is so little used that a step moves more of it than so
LESS = np.float32(0.3)  # of multipliers both below and above, which go at every step
POINT, MULTIPLIERS = ("in", "at"), ("low", "steep", "line", "plane")


def close(relaxation: Envelope, rows, found, wanted, steps: int, going: np.ndarray) -> None:
    """At most so many steps for some problems; what is better stays in `found`."""
    saddle = _Saddle(relaxation)
    run = _Run(saddle, rows[going], found.inputs[going], found.at.of(going), found.state.of(going))
    run.gap = found.value[going] - found.bound[going]
    for step in range(1, steps + 1):
        run.step(step)
        found.passes[going] += 2
        if step % LOOK and step < steps:
            continue
        mean, gaps = run.mean(), []
        for one in (run.z, mean):
            state = saddle.state(one, found.state.of(going))
            bound = relaxation.back(run.rows, state)[0]
            value, point, at = saddle.feasible(run.rows, one)
            found.better(going, bound, state)
            found.nearer(going, value, point, at)
            found.passes[going] += 2
            gaps.append(value - bound)
        run.restart(step, mean, gaps)
        left = wanted.left(found, going)
        if not left.any():
            return
        if not left.all():
            going = going[left]
            run.keep(left)


class _Saddle:
    """The Lagrangian of a relaxation."""

    def __init__(self, relaxation: Envelope):
        self.relaxation = relaxation
        self.low, high = relaxation.box
        self.way = high - self.low
        self.least, self.ways, self.units = {}, {}, {}
        for index, layer in relaxation.kinked.items():
            a, b = layer.slopes
            least, most = (np.maximum(a * x, b * x) for x in (layer.low, layer.high))
            # An argument may move far above a value that hardly does: lines are in its units, and
            # values in between.
            way, unit = most - least, np.maximum(layer.high - layer.low, most - least)
            self.least[index] = least
            self.ways[index] = np.where(layer.bent, np.sqrt(way * unit), 1).astype(np.float32)
            self.units[index] = np.where(layer.bent, unit, 1).astype(np.float32)

    def _argument(self, index: int, values: list) -> np.ndarray:
        y = values[self.relaxation.nodes[index].arguments[0]]
        return y.reshape(len(y), -1)

    def start(self, rows, inputs, at: State, state: State) -> State:
        """From a point, and from slopes and planes."""
        relaxation, z = self.relaxation, State()
        z.neurons = state.neurons
        z["in", -1] = np.clip((inputs - self.low) / np.where(self.way > 0, self.way, 1), 0, 1)

        def rule(index: int, values: list) -> np.ndarray:
            lower, upper, _ = relaxation.bounds(index, self._argument(index, values), values, state)
            theta = at["theta", index]
            value = (1 - theta) * lower + theta * upper
            z["at", index] = (value - self.least[index]) / self.ways[index]
            return value

        relaxation.ahead(rows, inputs, rule)
        blocks = relaxation.back(rows, state)[1]
        for index, layer in relaxation.kinked.items():
            a, b = layer.slopes
            g = blocks.get(index, np.zeros_like(z["at", index])) * self.units[index] * layer.bent
            up, down = np.maximum(g, 0), np.maximum(-g, 0)
            share = (state["below", index] - a) / (b - a)
            z["steep", index], z["low", index] = up * share, up * (1 - share)
            if index in z.neurons:
                z["plane", index] = _of(down, z, index) * state["mix", index]
                _of(down, z, index, -z["plane", index])
                z["kept", index] = state["kept", index]
            z["line", index] = down
        return z

    def slopes(self, rows, z: State) -> State:
        """The slopes of the Lagrangian in the point."""
        relaxation, out = self.relaxation, State()

        def rule(index: int, g: np.ndarray) -> tuple[Any, list]:
            layer, unit = relaxation.kinked[index], self.units[index]
            a, b = layer.slopes
            g = g.reshape(len(rows), -1)
            low, steep, line = (z[name, index] / unit for name in ("low", "steep", "line"))
            own, sent = g - low - steep + line, []
            to = a * low + b * steep - layer.chord * line
            if index in z.neurons:
                neurons = z.neurons[index]
                plane = z["plane", index] / unit[neurons.entries]
                _of(own, z, index, plane)
                _of(to, z, index, -a * plane)
                weights = z["kept", index] * ((b - a) * plane)[..., None]
                sent = relaxation.through(index, neurons, weights)[1]
            out["at", index] = np.where(layer.bent, own * self.ways[index], 0)
            sent.append((relaxation.nodes[index].arguments[0],
                         np.where(layer.bent, to, g * layer.chord)))  # fmt: skip
            return 0, sent

        out["in", -1] = relaxation.behind(rows, rule)[1] * self.way
        for index in relaxation.kinked:
            if ("at", index) not in out.arrays:  # nothing depends on it
                out["at", index] = np.zeros_like(z["at", index])
        return out

    def ascend(self, rows, z: State, ahead: State, size: np.ndarray) -> dict:
        """Multipliers and allocations after a step, by how much a point violates what is above
        and below it."""
        relaxation, new = self.relaxation, {}
        size = size[:, None]

        def rule(index: int, values: list) -> np.ndarray:
            layer, unit = relaxation.kinked[index], self.units[index]
            a, b = layer.slopes
            y = self._argument(index, values)
            value = self.least[index] + self.ways[index] * ahead["at", index]
            value = np.where(layer.bent, value, layer.chord * y)
            bent = size * layer.bent / unit
            for name, off in (("low", a * y - value), ("steep", b * y - value),
                              ("line", value - layer.chord * y - layer.over)):  # fmt: skip
                new[name, index] = np.maximum(z[name, index] + bent * off, 0)
            if index in z.neurons:
                neurons, plane = z.neurons[index], z["plane", index]
                t = neurons.moved(relaxation.shares(index, values))
                push = (b - a) * size / np.maximum(plane, PUSHED * size)
                new["kept", index] = kept = allocated(
                    z["kept", index], push[..., None] * t, neurons
                )
                high = np.einsum("bmi,bmi->bm", kept * neurons.delta, t)
                off = _of(value - a * y, z, index) - (b - a) * high
                new["plane", index] = np.maximum(plane + _of(bent, z, index) * off, 0)
            self._lessen(new, z, index)
            return value

        relaxation.ahead(rows, self.low + self.way * ahead["in", -1], rule)
        return new

    def _lessen(self, new: dict, z: State, index: int) -> None:
        """Takes a part off multipliers below and above that a neuron has both of.

        Where both bounds meet, both may have some without an effect on the Lagrangian at the
        point; slopes of cotangents, which have one sign, have no use for them.
        """
        up, down = new["low", index] + new["steep", index], new["line", index].copy()
        if index in z.neurons:
            _of(down, z, index, new["plane", index])
        both = LESS * np.minimum(up, down)
        for names, total in ((("low", "steep"), up), (("line",), down)):
            for name in names:
                new[name, index] = new[name, index] * (1 - both / np.maximum(total, TINY))
        if index in z.neurons:
            new["plane", index] *= _of(1 - both / np.maximum(down, TINY), z, index)

    def state(self, z: State, like: State) -> State:
        """Slopes, mixtures and planes of multipliers; where there are none, as in another state."""
        new = State()
        new.arrays, new.neurons = dict(like.arrays), like.neurons
        for index, layer in self.relaxation.kinked.items():
            a, b = layer.slopes
            low, steep = z["low", index], z["steep", index]
            share = a + (b - a) * steep / np.maximum(low + steep, TINY)
            used = layer.bent & (low + steep > TINY)
            new["below", index] = np.where(used, share, like["below", index]).astype(np.float32)
            if index in z.neurons:
                line, plane = _of(z["line", index], z, index), z["plane", index]
                share = plane / np.maximum(line + plane, TINY)
                used = line + plane > TINY
                new["mix", index] = np.where(used, share, like["mix", index]).astype(np.float32)
                new["kept", index] = z["kept", index]
        return new

    def feasible(self, rows, z: State) -> tuple[np.ndarray, np.ndarray, State]:
        """A point of the relaxation near that of z: its value, its inputs, where its blocks are."""
        relaxation, at = self.relaxation, State()
        point = self.low + self.way * z["in", -1]

        def rule(index: int, values: list) -> np.ndarray:
            lower, upper, _ = relaxation.bounds(index, self._argument(index, values), values, z)
            value = self.least[index] + self.ways[index] * z["at", index]
            room = np.where(upper > lower, upper - lower, 1)
            at["theta", index] = theta = np.clip((value - lower) / room, 0, 1).astype(np.float32)
            return (1 - theta) * lower + theta * upper

        return relaxation.ahead(rows, point, rule), point, at


def _of(x: np.ndarray, z: State, index: int, more: np.ndarray | None = None) -> np.ndarray:
    """Entries of an array that have planes; `more` is added to them."""
    at = np.arange(len(x))[:, None], z.neurons[index].entries
    if more is not None:
        x[at] += more
    return x[at]


class _Run:
    """Steps of some problems.

    `size` is how long their steps are, `weight` how much longer those of multipliers than those of
    the point, `gap` what it was when they last began anew, `since` so many steps ago.
    """

    def __init__(self, saddle: _Saddle, rows, inputs, at: State, state: State):
        self.saddle, self.rows = saddle, rows
        self.z = self.anchor = saddle.start(rows, inputs, at, state)
        self.slopes = saddle.slopes(rows, self.z)
        count = len(rows)
        self.size = np.full(count, FIRST)
        self.since, self.gap = np.zeros(count, int), np.full(count, np.inf)
        self.weight = self._balanced(np.ones(count, np.float32), None)
        self.sums, self.total = {}, np.zeros(count, np.float32)

    def step(self, number: int) -> None:
        z, size, weight = self.z, self.size, self.weight
        new, ahead = State(), State()
        new.neurons = ahead.neurons = z.neurons
        for key, slope in self.slopes.arrays.items():
            ends = (0, 1) if key[0] == "in" else ROOM
            new[key] = np.clip(z[key] - (size / weight)[:, None] * slope, *ends)
            ahead[key] = 2 * new[key] - z[key]
        new.arrays.update(self.saddle.ascend(self.rows, z, ahead, size * weight))
        slopes = self.saddle.slopes(self.rows, new)
        # How long a step may be: by what this one did, as in PDLP.
        moved = crossed = np.zeros(len(size), np.float32)
        for (name, index), x in new.arrays.items():
            far = x - z[name, index]
            if name in POINT:
                moved = moved + weight * np.sum(far**2, axis=1)
                turned = slopes[name, index] - self.slopes[name, index]
                crossed = crossed + np.sum(far * turned, axis=1)
            elif name in MULTIPLIERS:
                moved = moved + np.sum(far**2, axis=1) / weight
        limit = 0.5 * moved / np.maximum(np.abs(crossed), TINY)
        shorter = np.maximum((1 - (number + 1) ** -0.3) * limit, 0.3 * size)
        self.size = np.minimum(shorter, (1 + number**-0.6) * size).astype(np.float32)
        self.z, self.slopes = new, slopes
        self.total, self.since = self.total + self.size, self.since + 1
        for key, x in new.arrays.items():
            # Of a plane as much counts as is used.
            x = x * new["plane", key[1]][..., None] if key[0] == "kept" else x
            x = x * _wide(self.size, x)
            self.sums[key] = self.sums[key] + x if key in self.sums else x

    def mean(self) -> State:
        """Of all steps since the last time they began anew."""
        mean = State()
        mean.neurons = self.z.neurons
        for (name, index), x in self.sums.items():
            if name == "kept":
                used = self.sums["plane", index][..., None]
                mean[name, index] = np.where(
                    used > TINY, x / np.maximum(used, TINY), self.z[name, index]
                )
            else:
                mean[name, index] = x / _wide(self.total, x)
        return mean

    def restart(self, number: int, mean: State, gaps: list) -> None:
        """Begins anew where it is time to, from the better of the last step and the mean."""
        gap, better = np.minimum(*gaps), gaps[1] < gaps[0]
        again = (gap < ENOUGH * self.gap) | (self.since > max(LONG * number, 3 * LOOK))
        if not again.any():
            return
        pick = better & again
        new, anchor = State(), State()
        new.neurons = anchor.neurons = self.z.neurons
        for key, x in self.z.arrays.items():
            new[key] = np.where(_wide(pick, x), mean[key], x)
        self.z = new
        self.weight = np.where(again, self._balanced(self.weight, self.anchor), self.weight)
        for key, x in self.z.arrays.items():
            anchor[key] = np.where(_wide(again, x), x, self.anchor[key])
            self.sums[key] = np.where(_wide(again, x), 0, self.sums[key])
        self.anchor = anchor
        self.total, self.since = np.where(again, 0, self.total), np.where(again, 0, self.since)
        self.gap = np.where(again, gap, self.gap)
        self.slopes = self.saddle.slopes(self.rows, self.z)

    def _balanced(self, weight: np.ndarray, since: State | None) -> np.ndarray:
        """As far as multipliers go for each part that the point goes; half the way there."""
        far = []
        for names in (POINT, MULTIPLIERS):
            ones = [x - (since[key] if since else 0) for key, x in self.z.arrays.items()
                    if key[0] in names]  # fmt: skip
            far.append(np.sqrt(np.sum([np.sum(x**2, axis=1) for x in ones], axis=0)))
        known = np.minimum(*far) > 1e-6
        ratio = np.where(known, far[1] / np.where(known, far[0], 1), weight)
        return (np.sqrt(ratio * weight) if since else ratio).astype(np.float32)

    def keep(self, some: np.ndarray) -> None:
        """Goes on with some problems."""
        self.z, self.anchor, self.slopes = (x.of(some) for x in (self.z, self.anchor, self.slopes))
        self.sums = {key: x[some] for key, x in self.sums.items()}
        for name in ("rows", "size", "weight", "gap", "since", "total"):
            setattr(self, name, getattr(self, name)[some])


def _wide(numbers: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One number for each problem, beside an array of several axes."""
    return numbers.reshape(-1, *(1,) * (x.ndim - 1))
