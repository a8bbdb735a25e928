"""Slopes that a certificate gives: lines of activations, and passes back for single entries."""

import math
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts, Lines
from stagecert_check.certificate import FORCES, SLOPES, Cases, Leaf, Rows, Slopes, Source
from stagecert_check.functions import Activation, Piecewise, Refused
from stagecert_check.graph import Program
from stagecert_check.leaves import Pushes, pushes, splits_of, sum_bounds
from stagecert_check.narrowing import Narrow
from stagecert_check.numbers import LARGEST
from stagecert_check.planes import planes_above, read_planes
from stagecert_check.tree import Path

Pair = list[np.ndarray | None]  # slopes below and above; None: default
Stacks = dict[int, tuple[np.ndarray | None, ...]]  # those of all leaves, by activation

_ROWS_AT_ONCE = 2**22  # numbers in the slopes of a leaf's boxes


class Given:
    """Reads the slopes of certificates for one model.

    Attributes:
        sizes: by activation, how many entries its argument has.
    """

    def __init__(self, program: Program):
        self.program, self.activations = program, program.activations
        self.sizes = {k: math.prod(self.shape(k)) for k in self.activations}

    def shape(self, index: int, rows: int | None = None) -> tuple[int, ...]:
        """The shape of an activation's argument, or of many."""
        shape = self.program.nodes[self.program.nodes[index].arguments[0]].shape
        return shape if rows is None else (rows, *shape)

    def slopes(
        self, certificate: Source, slopes: tuple[Slopes | None, ...], rows: int | None = None
    ) -> dict[int, Pair]:
        """The arrays (rows, *shape) by activation, below and above; None is the default."""
        found = {}
        for index, pair in zip(self.activations, slopes, strict=False):
            if pair is not None:
                found[index] = [
                    None if name is None
                    else certificate.slopes(name, self.shape(index, rows)).reshape(
                        -1 if rows is None else rows, *self.shape(index))
                    for name in pair
                ]  # fmt: skip
        return found

    def stacks(
        self, certificate: Source, slopes: tuple[Slopes | None, ...], leaves: int | None
    ) -> Stacks:
        """The slopes of all leaves of a tree, as they are stored: by activation, below and above.

        They are for one leaf, which stands for all, or for so many.
        """
        found: Stacks = {}
        for index, pair in zip(self.activations, slopes, strict=False):
            arrays = tuple(
                None if name is None
                else certificate.array(name, SLOPES, (None, *self.shape(index)))
                for name in pair or ()
            )  # fmt: skip
            for x in arrays:
                if x is not None and len(x) not in (1, leaves):
                    raise Refused(f"slopes are for {len(x)} leaves, and not for one or all")
                if x is not None and np.any(np.abs(x) > LARGEST):
                    raise Refused("slopes are too large")
            if arrays:
                found[index] = arrays
        return found

    def lines(
        self, facts: Facts, slopes: dict[int, Pair], box: int, rows: Any = None
    ) -> dict[int, Lines]:
        """Lines with given slopes for one box; of the slopes some `rows` if there are many."""
        lines, of = {}, slice(box, box + 1)
        for index, pair in slopes.items():
            function, ends = self.program.nodes[index].operation, facts.boxes[index]
            assert isinstance(function, Activation)
            default, pieces = (), isinstance(function, Piecewise)
            if any(x is None for x in pair) or pieces:
                default = function.slopes(*(x[of] for x in ends))
            # Where a function is linear on its interval, its default lines are the function itself.
            used = function.bent(*(x[of] for x in ends)) if pieces else True
            shape = 1 if rows is None else len(rows), *ends[0].shape[1:]
            both = []
            for k, x in enumerate(pair):
                given = x if x is None or rows is None else x[rows]
                if given is None or pieces:
                    given = default[k] if given is None else np.where(used, given, default[k])
                both.append(np.broadcast_to(given, shape))
            lines[index] = facts.line(index, of, *both)
        return lines

    def planes(self, certificate: Source, leaf: Leaf, facts: Facts, box: int) -> dict[int, Lines]:
        """The lines of one box, with the leaf's own slopes and the planes that it gives."""
        lines = self.lines(facts, self.slopes(certificate, leaf.slopes), box)
        for index, above in zip(self.activations, leaf.planes, strict=False):
            if above is not None:
                given = read_planes(certificate, self.program, index, above)
                if not len(given.entries):
                    continue
                default = tuple(x[box : box + 1] for x in facts.lines[index])
                made = planes_above(facts, index, np.array([box]), given)
                lines[index] = (*lines.get(index, default), made)
        return lines

    def entries(
        self, certificate: Source, index: int, given: Rows | Cases
    ) -> tuple[np.ndarray, np.ndarray]:
        """Entries of an activation's argument, each at most once for a side, and their sides."""
        entries = certificate.array(given.entries, ("<i4",), (None,))
        sides = certificate.array(given.sides, ("<i4",), entries.shape)
        if np.any(entries < 0) or np.any(entries >= self.sizes[index]):
            raise Refused("a box has entries that are not there")
        if np.any(np.abs(sides) != 1):
            raise Refused("a box has sides other than 1 and -1")
        if any(np.any(np.diff(entries[sides == side]) <= 0) for side in (1, -1)):
            raise Refused("the entries of a box do not increase on each side")
        return entries, sides

    def tighten(
        self, certificate: Source, leaf: Leaf, facts: Facts, index: int, argument: int
    ) -> None:
        """Passes back with slopes that the leaf gives for single entries of an argument."""
        given = leaf.boxes[self.activations.index(index)]
        if given is not None:
            self.passes(certificate, given, facts, (index, argument))

    def passes(
        self, certificate: Source, given: Rows, facts: Facts, at: tuple[int, int],
        narrow: Narrow | None = None, path: Path | None = None,
    ) -> None:  # fmt: skip
        """Passes back for single entries of an argument.

        Args:
            certificate: where the arrays are.
            given: which entries, and with which slopes and forces.
            facts: those known so far; they become better.
            at: the activation and its argument.
            narrow: which neurons `facts` are about; all if there is none.
            path: the splits that the forces pull at.
        """
        index, argument = at
        narrow = narrow or Narrow(facts)
        entries, sides = self.entries(certificate, index, given)
        places = narrow.places(index, entries)  # of neurons that are zero no more is wanted
        slopes = self.slopes(certificate, given.slopes, len(entries))
        slopes = {k: [x if x is None else narrow.slopes(k, x) for x in pair]
                  for k, pair in slopes.items()}  # fmt: skip
        forces = self.forces(certificate, given, len(entries), path)
        width = sum(facts.boxes[k][0][0].size for k in slopes)
        at_once = max(_ROWS_AT_ONCE // max(width, 1), 1)
        for sign in (1, -1):
            mine = np.flatnonzero((sides == sign) & (places >= 0))
            for begin in range(0, len(mine), at_once):
                rows = mine[begin : begin + at_once]
                lines, of = self.lines(facts, slopes, 0, rows), np.zeros(len(rows), int)
                more = self._pushes(narrow, facts, argument, path, forces[rows])
                if more is None:
                    found = facts.unit_bounds(argument, of, places[rows], sign, lines)
                else:
                    goal = units(facts, argument, places[rows], sign)
                    found = sum_bounds(facts, of, goal, more, lines)
                facts.improve(argument, of, places[rows], sign, found)

    def forces(self, certificate: Source, given: Rows, rows: int, path: Path | None) -> np.ndarray:
        """(rows, splits), not negative; nothing if there are no splits."""
        splits = 0 if path is None else len(path.neurons)
        if given.forces is None:
            return np.zeros((rows, splits))
        found = certificate.array(given.forces, FORCES, (rows, splits)).astype(np.float64)
        if np.any(found < 0) or np.any(found > LARGEST):
            raise Refused("forces must not be negative, nor too large")
        return found

    def _pushes(
        self, narrow: Narrow, facts: Facts, argument: int, path: Path | None, forces: np.ndarray
    ) -> Pushes | None:
        """What splits with some forces add to the entries of an argument; None if nothing."""
        if path is None or not np.any(forces):
            return None
        # A row has few of them, as a rule, and splits of later values are no help here.
        paths = [Path(path.neurons[k], path.cuts[k], path.sides[k], row[k])
                 for row, k in ((row, row > 0) for row in forces)]  # fmt: skip
        splits = narrow.splits(splits_of(paths, self.sizes))
        assert splits is not None
        for index in splits:
            if self.program.nodes[index].arguments[0] > argument:
                raise Refused("a force pulls at a value that comes later")
        return pushes(facts.arithmetic, facts.program, len(forces), splits)


def units(facts: Facts, index: int, entries: np.ndarray, sign: Any) -> Pushes:
    """sign * single entries of a value, as what is to be bounded."""
    shape, real = facts.low[index].shape[1:], facts.arithmetic
    rows = np.zeros((len(entries), math.prod(shape)))
    rows[np.arange(len(rows)), entries] = sign
    near = real.array(rows).reshape(-1, *shape)
    nothing = real.array(np.zeros(len(rows)))
    return Pushes({index: (near, 0 * near)}, nothing, nothing)
