"""Searches for lines, planes and mixtures of them that bound rows on one box.

First, steps like those of `solvers.Damped`, on NumPy arrays: a pass forwards at a point that
becomes an average of corners, which moves the slopes of lines, the allocations of planes and the
mixtures; and a pass back with these, which gives a bound and the next corner. Means over these
steps often bound better than any of them. The best is kept, and without planes it is the
triangle's, so that nothing is lost.

Then, where a gap is left, the steps of `envelope_saddle`.
"""

import copy
from dataclasses import dataclass

import numpy as np

from stagecert.networks.bounding.envelope import Envelope, State
from stagecert.networks.bounding.envelope_saddle import close
from stagecert.networks.bounding.neurons import allocated

# As in solvers.Damped.
RATE, BASE, WHOLE, SETTLE = 1.4, 0.08, 3, 10.0
TRIANGLES = 20  # steps without planes
PRUNED = 2  # the step after which planes are left out that nothing goes through
FEW_NUMBERS = 2**15  # allocations that cost little: all of those stay
AVERAGED = 8  # steps between two looks at their mean
STALLED = 1.0  # of the gap that is good enough: bounds that rise by less in a while are left
VARIED = ("below", "mix", "kept")


@dataclass(eq=False)
class Found:
    """What was found for each problem.

    Attributes:
        bound: in single precision; no proof.
        value: the objective at a feasible point of the relaxation, with planes as they were left
            and lines around activations that are not max(a y, b y).
        inputs: (problems, inputs): that point's.
        at: where its blocks are between their bounds.
        state: what the bound rests on.
        passes: how many passes over the network.
    """

    bound: np.ndarray
    value: np.ndarray
    inputs: np.ndarray
    at: State
    state: State
    passes: np.ndarray

    def better(self, some: np.ndarray, bound: np.ndarray, state: State) -> None:
        """Keeps what is better than before, of some problems."""
        higher = bound > self.bound[some]
        self.bound[some[higher]] = bound[higher]
        self.state.put(some[higher], state, higher)

    def nearer(self, some: np.ndarray, value: np.ndarray, point: np.ndarray, state: State) -> None:
        """Keeps points that are better than before, of some problems."""
        lower = value < self.value[some]
        self.value[some[lower]], self.inputs[some[lower]] = value[lower], point[lower]
        self.at.put(some[lower], state, lower)


class _Mean:
    """The mean of slopes, shares and planes over some steps."""

    def __init__(self):
        self.sums, self.count = State(), 0

    def add(self, state: State) -> None:
        for (name, index), x in state.arrays.items():
            if name in VARIED:
                # Of a plane as much counts as is used.
                x = x * state["mix", index][..., None] if name == "kept" else x
                key = name, index
                self.sums[key] = self.sums[key] + x if self.count else x
        self.count += 1

    def state(self, like: State) -> State:
        new = State()
        new.arrays, new.neurons = dict(like.arrays), like.neurons
        for (name, index), x in self.sums.arrays.items():
            if name == "kept":
                mix = self.sums["mix", index][..., None]
                new[name, index] = np.where(
                    mix > 0, x / np.where(mix > 0, mix, 1), like[name, index]
                )
            else:
                new[name, index] = x / np.float32(self.count)
        return new


def search(
    relaxation: Envelope, rows: np.ndarray, state: State, steps: tuple[int, int], goal: np.ndarray,
    gap: tuple[float, float],
) -> Found:  # fmt: skip
    """Improves bounds; a problem is left once its bound exceeds its goal or the gap is closed.

    Args:
        relaxation: of one box.
        rows: (problems, outputs).
        state: from `Envelope.start`, where triangles begin; planes are chosen here.
        steps: at most so many of the first and of the second kind.
        goal: (problems,).
        gap: absolute and relative tolerances on value - bound.
    """
    rows = np.asarray(rows, np.float32)
    count = len(rows)
    bound, blocks, c = relaxation.back(rows, state)
    point = np.where(c > 0, *relaxation.box)
    at = State()
    at.arrays = {key: x.copy() for key, x in state.arrays.items() if key[0] == "theta"}
    found = Found(bound, np.full(count, np.inf, np.float32), point, at, copy.deepcopy(state),
                  np.ones(count, int))  # fmt: skip
    wanted = _Wanted(goal, gap)
    # With triangles first: they are cheap, and say where planes are worth most.
    _damped(relaxation, rows, found, wanted, min(TRIANGLES, steps[0]), blocks)
    if not np.any(~(found.bound > goal)):
        return found
    _, blocks, c = relaxation.back(rows, found.state)
    found.value[:], found.inputs = np.inf, np.where(c > 0, *relaxation.box)
    relaxation.choose(found.state, blocks)
    _damped(relaxation, rows, found, wanted, steps[0], blocks)
    some = np.flatnonzero(wanted.left(found))
    # Where neurons were left out no steps can close the gap, and bounds hardly rise any more.
    if len(some) and steps[1] and relaxation.complete(found.state):
        close(relaxation, rows, found, wanted, steps[1], some)
    return found


@dataclass(frozen=True, eq=False)
class _Wanted:
    """When a problem is done: its bound exceeds the goal, or the gap is closed."""

    goal: np.ndarray
    gap: tuple[float, float]

    def left(self, found: Found, some: np.ndarray | None = None) -> np.ndarray:
        """Which problems, of some of them, are to go on."""
        some = np.arange(len(self.goal)) if some is None else some
        bound, value = found.bound[some], found.value[some]
        return (value - bound > self._wide(bound)) & ~(bound > self.goal[some])

    def _wide(self, bound: np.ndarray) -> np.ndarray:
        return self.gap[0] + self.gap[1] * np.abs(bound)

    def rose(self, found: Found, some: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Which bounds rose by enough for the tolerances that more steps are worth their time."""
        return found.bound[some] - before > STALLED * self._wide(found.bound[some])


def _damped(relaxation: Envelope, rows, found: Found, wanted: _Wanted, steps: int, blocks) -> None:
    going, work = np.arange(len(rows)), copy.deepcopy(found.state)
    point = found.inputs.copy()
    _to_corner(work, blocks, 1.0)
    memory, mean, before = State(), _Mean(), found.bound.copy()
    for step in range(steps):
        value, arguments, reads = relaxation.forth(rows[going], point, work)
        found.nearer(going, value, point, work)
        _move(relaxation, work, memory, arguments, reads, step)
        bound, blocks, c = relaxation.back(rows[going], work)
        found.passes[going] += 2
        found.better(going, bound, work)
        mean.add(work)
        if step % AVERAGED == AVERAGED - 1:
            settled = mean.state(work)
            found.better(going, relaxation.back(rows[going], settled)[0], settled)
            found.passes[going] += 1
            mean = _Mean() if (step + 1) & step == 0 else mean
        late = max(step - WHOLE, 0)
        share = np.float32(1.0 if late == 0 else 0.5 * SETTLE / (SETTLE + late))
        point = point + share * (np.where(c > 0, *relaxation.box) - point)
        _to_corner(work, blocks, share)
        if step == PRUNED and found.state.neurons:
            best = relaxation.back(rows, found.state)[1]
            _prune(found.state, (best, blocks), going, (work, memory, mean.sums))
        left = wanted.left(found, going)
        if step % AVERAGED == AVERAGED - 1 and work.neurons:
            left &= wanted.rose(found, going, before[going])
            before = found.bound.copy()
        if not left.any():
            break
        if not left.all():
            going, work, memory, point = going[left], work.of(left), memory.of(left), point[left]
            mean.sums = mean.sums.of(left)


def _prune(best: State, blocks: tuple, going: np.ndarray, others: tuple[State, ...]) -> None:
    """Leaves out planes that nothing goes through, of a state and of others for some of it.

    `blocks` are the cotangents of the state and of the first of the others.
    """
    for index in list(best.neurons):
        if best["kept", index].size <= FEW_NUMBERS:
            continue
        used = _taken(best, blocks[0], index)
        used[going] |= _taken(others[0], blocks[1], index)
        order = np.argsort(~used, axis=1, kind="stable")[:, : used.sum(axis=1).max()]
        best.narrow(index, order)
        for other in others:
            other.narrow(index, order[going])


def _taken(state: State, blocks: dict[int, np.ndarray], index: int) -> np.ndarray:
    """Which planes cotangents go through."""
    g = np.take_along_axis(blocks[index], state.neurons[index].entries, axis=1)
    return (state["mix", index] > 0) & (g < 0)


def _to_corner(state: State, blocks: dict[int, np.ndarray], share) -> None:
    """Blocks go so far to the bounds that cotangents ask for."""
    for index, g in blocks.items():
        theta = state["theta", index]
        g = g.reshape(theta.shape)
        corner = np.where(g > 0, 0, np.where(g < 0, 1, theta)).astype(np.float32)
        state["theta", index] = theta + np.float32(share) * (corner - theta)


def _move(relaxation: Envelope, state: State, memory: State, arguments, reads, step: int) -> None:
    """Slopes, allocations and mixtures go towards those that the point asks for."""
    for index, y in arguments.items():
        layer = relaxation.kinked[index]
        a, b = layer.slopes
        width = _width(memory, ("y", index), y, layer.high - layer.low, step)
        below = np.clip(state["below", index] + (b - a) * y / (2 * width), a, b)
        state["below", index] = np.where(layer.bent, below, state["below", index])
        if not reads.get(index):
            continue
        t, line, plane = reads[index]
        neurons = state.neurons[index]
        unit = layer.over[neurons.entries]
        width = _width(memory, ("line", index), line - plane, unit, step)
        mix = np.clip(state["mix", index] + (line - plane) / (2 * width), 0, 1)
        state["mix", index] = np.where(unit > 0, mix, 0)  # a plane is only above a bend
        jump = t - memory["t", index] if step else t * 0
        far = jump.max(axis=-1) - jump.min(axis=-1)
        jumps = far**2 if not step else memory["jumps", index] + far**2
        memory["t", index], memory["jumps", index] = t, jumps
        width = np.sqrt(BASE**2 + jumps) / RATE
        push = t / (2 * width[..., None])
        state["kept", index] = allocated(state["kept", index], push, neurons)


def _width(memory: State, key: tuple[str, int], x, unit, step: int) -> np.ndarray:
    """How wide the step of a pair is: the more, the more its argument has jumped so far."""
    name, index = key
    jumps = np.zeros_like(x)
    if step:
        jumps = memory[name + " jumps", index] + (x - memory[name, index]) ** 2
    memory[name, index], memory[name + " jumps", index] = x, jumps
    width = np.sqrt((BASE * unit) ** 2 + jumps) / RATE
    return np.where(width > 0, width, 1)
