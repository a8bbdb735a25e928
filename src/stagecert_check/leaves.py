"""Leaves of a tree that splits neurons: their intervals, and bounds on them.

A leaf's intervals are those of its box of inputs, clipped by the splits on the way to it, and what
interval arithmetic makes of that. All that follows is true for the points of the leaf, and no more
is needed: `Clipped` are facts of many leaves at once, as `Facts` are of many boxes.

For these points side * (x - cut) <= 0 for each split. Like rows of the property, these are
multiplied by numbers that are not negative, the forces, and added to the objective: `pushes`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts, Lines, lower_bounds
from stagecert_check.folding import Folded
from stagecert_check.functions import Activation, Piecewise
from stagecert_check.graph import Program
from stagecert_check.numbers import EPS, TINY, Arithmetic
from stagecert_check.tree import ABOVE, BELOW, Path


@dataclass(frozen=True, eq=False)
class Splits:
    """Splits of neurons of one activation, on many leaves: arrays with an entry for each split.

    Attributes:
        rows: on which of the leaves.
        entries: which neurons: entries of the activation's argument.
        cuts, sides, forces: as in a path.
    """

    rows: np.ndarray
    entries: np.ndarray
    cuts: np.ndarray
    sides: np.ndarray
    forces: np.ndarray

    def at(self, side: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """The (rows, entries) with splits on a side, and the cuts."""
        mine = self.sides == side
        return (self.rows[mine], self.entries[mine]), self.cuts[mine]


def splits_of(paths: Sequence[Path], sizes: dict[int, int]) -> dict[int, Splits]:
    """The splits on the ways to some leaves, by activation; `sizes` are those of its arguments."""
    rows = np.repeat(np.arange(len(paths)), [len(path.neurons) for path in paths])
    neurons, cuts, sides, forces = (
        np.concatenate([getattr(path, name) for path in paths])
        for name in ("neurons", "cuts", "sides", "forces")
    )
    found, first = {}, 0
    for index, size in sizes.items():
        mine = (first <= neurons) & (neurons < first + size)
        if np.any(mine):
            # Forces so small that they could underflow are taken for zero, which is as safe.
            strong = np.where(forces[mine] < TINY, 0, forces[mine])
            found[index] = Splits(
                rows[mine], neurons[mine] - first, cuts[mine], sides[mine], strong
            )
        first += size
    return found


class Clipped(Facts):
    """Facts of leaves: those of their boxes, clipped by splits."""

    def __init__(
        self,
        facts: Facts,
        of: np.ndarray,
        splits: dict[int, Splits],
        slopes: dict[int, tuple[Any, ...]],
        tighter: Callable[[Facts, int, int], None] | None = None,
    ):
        """Leaves on the boxes `of`; `slopes` are pairs (below, above) by activation, or None.

        `tighter` may make intervals tighter, as that of `Facts.derive` may.
        """
        self._facts, self._of, self._splits, self._given = facts, of, splits, slopes
        self._tighter = tighter
        super().__init__(facts.arithmetic, facts.program, *map(self._each, facts.inputs))
        self.empty = facts.empty[of]
        self._reached: set[int] = set()  # values that differ from those of the boxes
        self.derive(self._clip, passes=False)

    def _each(self, x: Any) -> Any:
        """What the boxes have, leaf by leaf."""
        if x is None or len(x) > 1:
            return None if x is None else x[self._of]
        return np.broadcast_to(x, (len(self._of), *x.shape[1:]))

    def folded(self, index: int) -> Folded | None:
        """That of the boxes: leaves have the same inputs."""
        found = self._facts.folded(index)
        if found is None:
            return None
        own = (self._each(x) for x in (found.low, found.high, found.sizes))
        return Folded(found.origin, found.free, found.matrix, found.terms, *own)

    def _taken(self, index: int) -> bool:
        facts, node = self._facts, self.program.nodes[index]
        reached = index in self._splits or any(k in self._reached for k in node.arguments)
        if reached or self._tighter is not None:
            self._reached.add(index)
            return False
        for mine, theirs in ((self.low, facts.low), (self.high, facts.high),
                             (self.sizes, facts.sizes), (self.totals, facts.totals)):  # fmt: skip
            mine.append(self._each(theirs[index]))
        if index in facts.lines:
            low, high = self.boxes[index] = tuple(map(self._each, facts.boxes[index]))
            if index in self._given:
                self.lines[index] = self.line(index, slice(None), *self._slopes(index, low, high))
            else:
                self.lines[index] = tuple(map(self._each, facts.lines[index]))
        return True

    def _clip(self, _: Facts, index: int, argument: int) -> None:
        """The interval of an activation's argument: the box's, in the parts where the leaf is."""
        real, shape = self.arithmetic, self.low[argument].shape
        own = self._each(self._facts.low[argument]), self._each(self._facts.high[argument])
        low = np.maximum(self.low[argument], own[0]).reshape(len(self._of), -1)
        high = np.minimum(self.high[argument], own[1]).reshape(len(self._of), -1)
        if index in self._splits:
            (where, cuts), (other, others) = (self._splits[index].at(x) for x in (ABOVE, BELOW))
            np.maximum.at(low, where, real.array(cuts))
            np.minimum.at(high, other, real.array(others))
            self._reached.add(argument)
        self._set(argument, low.reshape(shape), high.reshape(shape), own)
        if self._tighter is not None:
            self._tighter(self, index, argument)
            self._set(argument, self.low[argument], self.high[argument], own)

    def _set(
        self, argument: int, low: np.ndarray, high: np.ndarray, own: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Intervals of a value; leaves where one is empty get those of their boxes."""
        # Nothing is where an interval is empty; whatever follows for such a leaf is not used.
        nothing = np.any((low > high).reshape(len(low), -1), axis=1)
        self.empty = self.empty | nothing
        if np.any(nothing):
            low, high = low.copy(), high.copy()
            low[nothing], high[nothing] = own[0][nothing], own[1][nothing]
        self.low[argument], self.high[argument] = low, high
        self._magnitudes.pop(argument, None)

    def _slopes(self, index: int, low: np.ndarray, high: np.ndarray) -> tuple[Any, ...]:
        function = self.program.nodes[index].operation
        assert isinstance(function, Activation)
        given, pieces = self._given.get(index, (None, None)), isinstance(function, Piecewise)
        if not pieces and all(x is not None for x in given):
            return given
        default = function.slopes(low, high)
        # Where a function is linear on the leaf, its default lines are the function itself.
        used = function.bent(low, high) if pieces else True
        return tuple(
            own if x is None else np.where(used, x, own)
            for x, own in zip(given, default, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Pushes:
    """What splits add to the objectives of leaves, or such an objective itself.

    Attributes:
        terms: by value: coefficients (leaves, *shape) and how far they are off.
        constant: (leaves,).
        slip: how far it is off.
    """

    terms: dict[int, tuple[Any, Any]]
    constant: Any
    slip: Any


def pushes(real: Arithmetic, program: Program, leaves: int, splits: dict[int, Splits]) -> Pushes:
    """The sums of force * side * (x - cut) over the splits of each leaf."""
    terms: dict[int, tuple[Any, Any]] = {}
    constant, size, count = real.array(np.zeros(leaves)), np.zeros(leaves), np.zeros(leaves)
    for index, some in splits.items():
        (argument,) = program.nodes[index].arguments
        shape, where = program.nodes[argument].shape, (some.rows, some.entries)
        weights = real.array(some.forces * some.sides)  # nothing is rounded
        near = real.array(np.zeros((leaves, math.prod(shape))))
        np.add.at(near, where, weights)
        # Only where a neuron is split several times, numbers are added up.
        times, sizes = np.zeros(near.shape), np.zeros(near.shape)
        np.add.at(times, where, 1)
        np.add.at(sizes, where, some.forces)
        off = _allowed(real, np.where(times > 1, times, 0), sizes)
        found = near.reshape(-1, *shape), off.reshape(-1, *shape)
        terms[argument] = added(real, terms[argument], found) if argument in terms else found
        np.add.at(constant, some.rows, -weights * real.array(some.cuts))
        np.add.at(size, some.rows, np.abs(some.forces * some.cuts))
        np.add.at(count, some.rows, 1)
    return Pushes(terms, constant, _allowed(real, count + 1, size))


def sum_bounds(
    facts: Facts, of: np.ndarray, goal: Pushes, more: Pushes | None, lines: dict[int, Lines]
) -> np.ndarray:
    """Lower bounds on goals, with what splits add to them, each with the facts `of` a box."""
    real, given = facts.arithmetic, dict(goal.terms)
    constant, slip, size = goal.constant, goal.slip, np.abs(goal.constant)
    if more is not None:
        for index, pair in more.terms.items():
            given[index] = added(real, given[index], pair) if index in given else pair
        constant, slip = constant + more.constant, slip + more.slip
        size = size + np.abs(more.constant)
    bound = lower_bounds(
        facts, of, lambda some: {k: near[some] for k, (near, _) in given.items()}, lines
    )
    for index, (_, off) in given.items():
        if np.any(off):
            off = (off * facts.magnitude(index)[of]).reshape(len(of), -1).sum(axis=1)
            slip = slip + off * 1.001
    if real.exact:
        return bound + constant - slip
    return bound + constant - slip - 8 * EPS * (np.abs(bound) + size + slip)


def added(real: Arithmetic, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """The sum of two arrays of coefficients that may be off, and how far it is off."""
    (near, off), (more, further) = one, other
    if not real.exact:
        off = off + 2 * EPS * (np.abs(near) + np.abs(more)) + TINY
    return near + more, off + further


def _allowed(real: Arithmetic, times: np.ndarray, size: np.ndarray) -> Any:
    """How far sums of so many products are off; `size` are the sums of their absolute values."""
    return real.array(real.one * times * (2 * EPS * size + 2 * TINY))
