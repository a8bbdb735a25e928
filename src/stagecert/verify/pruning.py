"""Lets the checker try the leaves of a tree, and makes the tree smaller where it accepts that.

Two leaves become one where what refutes one of them refutes their parent; and where no leaf on one
side of a split needs it, the other side goes with the split. Whether that is so, the checker says:
nothing is left out but what it has refuted in another way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.certificates import Arrays
from stagecert_check.checker import Checker
from stagecert_check.tree import ABOVE, BELOW, Path, Task

_AT_ONCE = 512  # tasks that are tried before one looks at the clock


@dataclass(frozen=True, eq=False)
class Tried:
    """What the checker says of the leaves of a tree: its lower bounds, and which it refutes."""

    bounds: np.ndarray
    refuted: np.ndarray

    @property
    def short(self) -> float:
        """How much is missing on the worst leaf."""
        return float(-np.min(self.bounds[~self.refuted], initial=np.inf))


def tried(
    checker: Checker, tree: Branches, watch: Callable[[int, int], None] = lambda *_: None
) -> Tried:
    """Lets the checker try all leaves of a tree; `watch` hears how many are done, and of how many.

    Raises:
        Refused: the tree is none, or refers to what is not there.
    """
    arrays = Arrays()
    tasks = checker.tasks(tree.case, arrays.tree(tree))
    bounds, refuted = np.full(tree.leaves, np.nan), np.zeros(tree.leaves, bool)
    with np.errstate(all="ignore"):
        for done, (task, bound, refutes) in enumerate(_asked(checker, arrays, tasks), 1):
            bounds[task.number], refuted[task.number] = bound, refutes
            watch(done, tree.leaves)
    return Tried(bounds, refuted)


def _asked(checker: Checker, arrays: Arrays, tasks: Iterable[Task]) -> Iterator:
    """(task, bound, whether it refutes) of tasks, as they are done."""
    for some, found in checker.bounds(arrays, tasks):
        for task, bound in zip(some, found, strict=True):
            yield task, float(bound), checker.refutes(task, bound)


@dataclass(eq=False)
class _Node:
    """A node of a tree; a leaf has the row of its multipliers and slopes, and its forces."""

    axis: int = LEAF
    cut: float = 0.0
    parts: "tuple[_Node, _Node] | None" = None
    row: int = -1
    forces: tuple[float, ...] = ()
    settled: bool = False  # it was tried without the split above it

    def leaves(self) -> "list[_Node]":
        """All leaves from here on."""
        found: list[_Node] = []
        stack: list[_Node] = [self]
        while stack:
            node = stack.pop()
            found += [node] if node.parts is None else []
            stack += node.parts or ()
        return found


Way = tuple[tuple[int, float, int], ...]  # (axis, cut, side) from the root


def pruned(checker: Checker, tree: Branches, late: Callable[[], bool] = lambda: False) -> Branches:
    """A tree whose leaves are all refuted, with fewer of them if possible.

    Once it is `late`, what has been reached is enough. A tree with stations stays as it is: what
    refutes its leaves rests on the splits above them.
    """
    if tree.stations:
        return tree
    pruner = _Pruner(checker, tree, late)
    with np.errstate(all="ignore"):
        for wanted in (lambda part, _: part.parts is None, _unused):
            while not late() and pruner.round(wanted):
                pass
    return pruner.tree()


def _unused(part: _Node, place: int | None) -> bool:
    """Whether all leaves of a part have no force at a place: they may do without the split."""
    return place is not None and not any(leaf.forces[place] for leaf in part.leaves())


class _Pruner:
    def __init__(self, checker: Checker, given: Branches, late: Callable[[], bool]):
        self.checker, self.given, self.late = checker, given, late
        self.arrays = Arrays()
        self.everywhere = self.arrays.tree(given).all
        inputs = checker.wanted.cases[given.case].inputs
        self.box = np.array(inputs.lower64, float), np.array(inputs.upper64, float)
        self.boxes: dict[Way, tuple[np.ndarray, np.ndarray]] = {}  # by cuts; tasks share them
        self.root, row, used = _Node(), 0, 0
        stack = [(self.root, 0)]
        for axis, cut in zip(given.axes.tolist(), given.cuts.tolist(), strict=True):
            node, depth = stack.pop()
            node.axis, node.cut = axis, cut
            if axis == LEAF:
                node.row, node.forces = row, tuple(given.forces[used : used + depth].tolist())
                row, used = row + 1, used + depth
            else:
                node.parts = _Node(), _Node()
                stack += [(part, depth + self._is_neuron(axis)) for part in node.parts[::-1]]

    def _is_neuron(self, axis: int) -> bool:
        return axis >= len(self.box[0])

    def round(self, wanted: Callable[[_Node, int | None], bool]) -> bool:
        """Tries to let some parts take the places of the nodes that were split; whether any were.

        `wanted` says which parts to try; it gets the place of the split's force too, if it has one.
        """
        tries: list[tuple[_Node, _Node, int | None, list[Task]]] = []
        spare = _AT_ONCE
        for node, way in self._walk():
            if spare <= 0:
                break
            if node.parts is None or all(part.settled for part in node.parts):
                continue
            place = sum(self._is_neuron(axis) for axis, *_ in way)
            place = place if self._is_neuron(node.axis) else None
            for part in node.parts:
                if not part.settled and wanted(part, place):
                    tasks = [self._task(to, leaf, place) for leaf, to in self._walk(part, way)
                             if leaf.parts is None]  # fmt: skip
                    spare -= len(tasks)
                    part.settled = True
                    tries.append((node, part, place, tasks))
        refuted = self._refuted([task for *_, tasks in tries for task in tasks])
        changed: set[int] = set()
        for node, part, place, tasks in tries:
            # Parents come first: what is below a node that changed is another tree now.
            if id(node) not in changed and all(id(task) in refuted for task in tasks):
                for leaf in part.leaves():
                    leaf.settled = False
                    leaf.forces = _without(leaf.forces, place)
                changed |= {id(below) for below, _ in self._walk(node)}
                node.axis, node.cut, node.parts = part.axis, part.cut, part.parts
                node.row, node.forces, node.settled = part.row, part.forces, False
        return bool(tries)

    def _walk(self, start: _Node | None = None, way: Way = ()) -> Iterator[tuple[_Node, Way]]:
        """All nodes from one on with the ways to them, parents first."""
        stack = [(start or self.root, way)]
        while stack:
            node, way = stack.pop()
            yield node, way
            if node.parts is not None:
                for part, side in zip(node.parts, (BELOW, ABOVE), strict=True):
                    stack.append((part, (*way, (node.axis, node.cut, side))))

    def _task(self, way: Way, leaf: _Node, place: int | None) -> Task:
        """A leaf with another way to it, and without the force at a place."""
        low, high = self._box(tuple(step for step in way if not self._is_neuron(step[0])))
        splits = [step for step in way if self._is_neuron(step[0])]
        path = Path(
            np.array([axis - len(low) for axis, _, _ in splits], np.int64),
            np.array([cut for _, cut, _ in splits], float),
            np.array([side for _, _, side in splits], np.int64),
            np.array(_without(leaf.forces, place), float),
        )
        multipliers = tuple(self.given.multipliers[leaf.row].tolist())
        return Task(self.given.case, leaf.row, low, high, multipliers, self.everywhere, path)

    def _box(self, cuts: Way) -> tuple[np.ndarray, np.ndarray]:
        if cuts not in self.boxes:
            low, high = (x.copy() for x in self.box)
            for axis, cut, side in cuts:
                (high if side == BELOW else low)[axis] = cut
            self.boxes[cuts] = low, high
        return self.boxes[cuts]

    def _refuted(self, tasks: Sequence[Task]) -> set[int]:
        """The ids of those tasks that the checker refutes before it is late."""
        found = set()
        for task, _, refutes in _asked(self.checker, self.arrays, tasks):
            if refutes:
                found.add(id(task))
            if self.late():
                break
        return found

    def tree(self) -> Branches:
        """What is left."""
        axes, cuts, leaves, stack = [], [], [], [self.root]
        while stack:
            node = stack.pop()
            axes.append(node.axis)
            cuts.append(node.cut)
            if node.parts is None:
                leaves.append(node)
            else:
                stack += node.parts[::-1]
        rows, given = [leaf.row for leaf in leaves], self.given
        slopes = tuple(
            pair and tuple(x if x is None or len(x) == 1 else x[rows] for x in pair)
            for pair in given.slopes
        )
        forces = np.array([force for leaf in leaves for force in leaf.forces], float)
        return replace(
            given, axes=np.array(axes), cuts=np.array(cuts), forces=forces, slopes=slopes,
            multipliers=given.multipliers[rows],
        )  # fmt: skip


def _without(forces: tuple[float, ...], place: int | None) -> tuple[float, ...]:
    return forces if place is None else forces[:place] + forces[place + 1 :]
