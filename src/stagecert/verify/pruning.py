"""Lets the checker try the leaves of a tree, and makes the tree smaller where it accepts that.

Two leaves become one where what refutes one of them refutes their parent; and where no leaf on one
side of a split needs it, the other side goes with the split. Whether that is so, the checker says:
nothing is left out but what it has refuted in another way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.certificates import Arrays
from stagecert.verify.team import Team
from stagecert_check.checker import Checker
from stagecert_check.graph import Program
from stagecert_check.properties import Property
from stagecert_check.tree import ABOVE, BELOW, Path, Task

SHARED = 500  # leaves that are worth the way to other processes
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


def tried(checker: Checker, tree: Branches, watch: Callable[[], None] = lambda: None) -> Tried:
    """Lets the checker try all leaves of a tree; `watch` is called now and then.

    Raises:
        Refused: the tree is none, or refers to what is not there.
    """
    return all_tried(checker, [tree], watch)[0]


def all_tried(
    checker: Checker, trees: Sequence[Branches], watch: Callable[[], None] = lambda: None,
    accepted: Mapping[int, np.ndarray] = {}, team: Team | None = None,
) -> list[Tried]:  # fmt: skip
    """The same for some trees, each of a case of its own: stations that they share are worked once.

    Leaves that are `accepted`, by case, were refuted before. A `team` shares what is much.
    """
    found = {}
    for tree in trees:
        known = accepted.get(tree.case, np.zeros(tree.leaves, bool))
        found[tree.case] = Tried(np.full(tree.leaves, np.nan), known.copy())
    open_ = {case: np.flatnonzero(~one.refuted) for case, one in found.items()}

    def part(k: int, count: int) -> tuple:
        return (*((checker.program, checker.wanted) if k else (checker, None)), trees, open_,
                (k, count), watch if k == 0 else None)  # fmt: skip

    def stop() -> bool:
        watch()
        return False

    much = team is not None and sum(map(len, open_.values())) >= SHARED
    shares = team.deal(_part_tried, part, stop) if much and team else [_part_tried(*part(0, 1))]
    for told, remembered in shares or ():
        checker.recall(remembered)
        for case, number, bound, refutes in told:
            one = found[case]
            one.bounds[number], one.refuted[number] = bound, refutes
    return [found[tree.case] for tree in trees]


def _part_tried(
    given: Checker | Program, wanted: Property | None, trees: Sequence[Branches],
    open_: Mapping[int, np.ndarray], part: tuple[int, int], watch: Callable[[], None] | None,
) -> tuple[list[tuple[int, int, float, bool]], dict[bytes, Any]]:  # fmt: skip
    """(case, number, bound, whether it refutes) of part k of n of the open leaves.

    What is at one station is in one part, as a rule. With it comes what a checker that had to be
    made for it remembers.
    """
    here = isinstance(given, Checker)
    if here:
        checker = given
    else:
        assert wanted is not None
        checker = Checker(given, wanted)
    arrays, (k, count) = Arrays(), part
    tasks = []
    for tree in trees:
        of_tree = set(open_[tree.case].tolist())
        tasks += [x for x in checker.tasks(tree.case, arrays.tree(tree)) if x.number in of_tree]
    if count > 1:
        tasks.sort(key=lambda task: task.station.steps if task.station else [])
        tasks = tasks[len(tasks) * k // count : len(tasks) * (k + 1) // count]
    told = []
    with np.errstate(all="ignore"):
        for task, bound, refutes in _asked(checker, arrays, tasks):
            told.append((task.case, task.number, bound, refutes))
            if watch is not None:
                watch()
    return told, {} if here else checker.remembered()


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
