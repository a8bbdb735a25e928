"""The tree of a case: cuts of the box of inputs and splits of neurons, down to its leaves.

Both parts of a cut or split are there, and both have the cut itself: so the leaves cover the box.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from stagecert_check.certificate import LEAF, Case, Leaf, Rows
from stagecert_check.functions import Refused
from stagecert_check.numbers import LARGEST

BELOW, ABOVE = 1, -1
_SPLITS_AT_ONCE = 2**20  # on the ways to leaves that are worked together


@dataclass(frozen=True, eq=False)
class Path:
    """The splits of neurons on the way to a leaf, the root's first.

    For a point of the leaf, side * (x - cut) <= 0 for each: the side is 1 for the part below the
    cut and -1 for the part above. `forces` are what these are multiplied by.
    """

    neurons: np.ndarray
    cuts: np.ndarray
    sides: np.ndarray
    forces: np.ndarray


@dataclass(frozen=True, eq=False)
class Station:
    """A node of a tree below which intervals are tighter: the way to it, and the passes for it.

    The forces of the way are zero: every row has its own. `above` is the last station before.
    """

    path: Path
    boxes: tuple[Rows | None, ...]
    above: "Station | None" = None

    @property
    def steps(self) -> list[tuple[int, float, int]]:
        """The splits on the way."""
        arrays = self.path.neurons, self.path.cuts, self.path.sides
        return list(zip(*(x.tolist() for x in arrays), strict=True))

    def leads_to(self, path: Path) -> bool:
        """Whether a way goes through this node."""
        count = len(self.path.neurons)
        return all(
            np.array_equal(getattr(self.path, name), getattr(path, name)[:count])
            for name in ("neurons", "cuts", "sides")
        )


@dataclass(frozen=True, eq=False)
class Task:
    """A case to refute on a leaf, by some multipliers, with a leaf's own slopes if any.

    With a `path`, `leaf` is for all leaves of the tree, and the leaf may be below a station.
    """

    case: int
    number: int
    low: np.ndarray
    high: np.ndarray
    multipliers: tuple[float, ...]
    leaf: Leaf | None = None
    path: Path | None = None
    station: Station | None = None


def boxes_of(tasks: Iterable[Task]) -> Iterator[tuple[Task, bytes]]:
    """Tasks with digests of their boxes. Arrays that many of them share are read once."""
    known: dict[tuple[int, int], bytes] = {}
    for task in tasks:
        ends = id(task.low), id(task.high)
        if ends not in known:
            known[ends] = hashlib.sha256(task.low.tobytes() + task.high.tobytes()).digest()
        yield task, known[ends]


def windows(tasks: Iterable[Task], most: int | None = None, box: int = 0) -> Iterator[list[Task]]:
    """Some tasks at a time, no more than `most`: they have a million splits of neurons together.

    A task without any has a box of its own, which counts as so many splits; the others share one.
    """
    some: list[Task] = []
    splits = 0
    for task in tasks:
        some.append(task)
        splits += box if task.path is None else len(task.path.neurons)
        if len(some) == most or splits >= _SPLITS_AT_ONCE:
            yield some
            some, splits = [], 0
    if some:
        yield some


class _Walk:
    """Where one is in a tree: the box of inputs, and the splits of neurons.

    On the way to a leaf only what changes is remembered, so that deep trees need no memory.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray, neurons: int):
        self._low, self._high, self._neurons = low, high, neurons
        self._above: list[tuple[int, float, float, bool]] = []  # (axis, cut, old end, is it below)
        self._path: list[tuple[int, float, int]] = []  # (neuron, cut, side)
        self._box: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def depth(self) -> int:
        """How many cuts and splits there are on the way."""
        return len(self._above)

    @property
    def cut(self) -> bool:
        """Whether inputs are cut on the way."""
        return len(self._above) > len(self._path)

    def box(self) -> tuple[np.ndarray, np.ndarray]:
        """The box of inputs; leaves that differ in splits of neurons share it."""
        if self._box is None:
            self._box = self._low.copy(), self._high.copy()
        return self._box

    def path(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Neurons, cuts and sides of the splits."""
        columns = zip(*self._path, strict=True) if self._path else ((), (), ())
        neurons, cuts, sides = columns
        return np.array(neurons, np.int64), np.array(cuts, float), np.array(sides, np.int64)

    def down(self, axis: int, at: float) -> None:
        """To the part below a cut or split."""
        inputs = len(self._low)
        if axis >= inputs:
            if axis >= inputs + self._neurons:
                raise Refused(f"axis {axis} is no input and no neuron that can be split")
            if abs(at) > LARGEST:
                raise Refused(f"a neuron is split at {at}: that is too large")
            self._path.append((axis - inputs, at, BELOW))
            self._above.append((axis, at, at, True))
            return
        if axis < 0 or not self._low[axis] <= at <= self._high[axis]:
            raise Refused(f"a split at {at} along axis {axis} is outside of its box")
        self._above.append((axis, at, float(self._high[axis]), True))
        self._high[axis], self._box = at, None

    def on(self) -> bool:
        """Up to the first split whose part above is still to come, and down there, if any."""
        while self._above:
            axis, at, end, is_below = self._above.pop()
            if axis >= len(self._low):
                neuron, _, _ = self._path.pop()
                if is_below:
                    self._path.append((neuron, at, ABOVE))
                    self._above.append((axis, at, at, False))
                    return True
                continue
            self._box = None
            if is_below:
                self._above.append((axis, at, float(self._low[axis]), False))
                self._high[axis], self._low[axis] = end, at
                return True
            self._low[axis] = end
        return False


def leaves_of(
    number: int, case: Case, low: np.ndarray, high: np.ndarray, neurons: int
) -> Iterator[Task]:
    """The leaves of a case's tree, one after the other.

    Args:
        number: of the case.
        case: what the certificate says of it.
        low, high: its box of inputs.
        neurons: how many there are.
    """
    forces, used = case.forces, 0
    walk = _Walk(low, high, 0 if forces is None else neurons)
    leaf, done = 0, False
    stations: list[tuple[int, Station]] = []  # on the way, with their depths
    for node, (axis, at) in enumerate(zip(case.axes.tolist(), case.cuts.tolist(), strict=True)):
        if done:
            raise Refused("a tree has more nodes than parts")
        while stations and stations[-1][0] >= walk.depth:  # it is not above this node
            stations.pop()
        if node in case.stations:
            if walk.cut:
                raise Refused("a station is on a part of the box of inputs")
            way = walk.path()
            above = stations[-1][1] if stations else None
            station = Station(Path(*way, np.zeros(len(way[0]))), case.stations[node], above)
            stations.append((walk.depth, station))
        if axis != LEAF:
            walk.down(axis, at)
            continue
        multipliers = tuple(case.multipliers[leaf].tolist())
        if forces is None:
            yield Task(number, leaf, *walk.box(), multipliers, case.leaves.get(leaf))
        else:
            path = walk.path()
            mine = forces[used : used + len(path[0])]
            if len(mine) < len(path[0]):
                raise Refused("there are fewer forces than splits of neurons")
            used += len(mine)
            station = stations[-1][1] if stations else None
            way = Path(*path, mine)
            yield Task(number, leaf, *walk.box(), multipliers, case.all, way, station)
        leaf += 1
        done = not walk.on()
    if not done:
        raise Refused("a tree has fewer nodes than parts")
    if forces is not None and used < len(forces):
        raise Refused("there are more forces than splits of neurons")
