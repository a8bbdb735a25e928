"""Slopes that a certificate gives: lines of activations, and passes back for single entries."""

import math
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts, Lines
from stagecert_check.certificate import Leaf, Rows, Slopes
from stagecert_check.functions import Activation, Refused
from stagecert_check.graph import Program
from stagecert_check.planes import planes_above, read_planes

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

    def slopes(self, certificate, slopes: tuple[Slopes | None, ...], rows: int | None = None):
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

    def lines(self, facts: Facts, slopes: dict, box: int, rows: Any = None) -> dict[int, Lines]:
        """Lines with given slopes for one box; of the slopes some `rows` if there are many."""
        lines, of = {}, slice(box, box + 1)
        for index, pair in slopes.items():
            function, ends = self.program.nodes[index].operation, facts.boxes[index]
            assert isinstance(function, Activation)
            default = ()
            if any(x is None for x in pair):
                default = function.slopes(*(x[of] for x in ends))
            shape = self.shape(index, 1 if rows is None else len(rows))
            low, high = (
                np.broadcast_to(default[k] if x is None else x if rows is None else x[rows], shape)
                for k, x in enumerate(pair)
            )
            lines[index] = facts.line(index, of, low, high)
        return lines

    def planes(self, certificate, leaf: Leaf, facts: Facts, box: int) -> dict[int, Lines]:
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

    def entries(self, certificate, index: int, given: Rows) -> tuple[np.ndarray, np.ndarray]:
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

    def tighten(self, certificate, leaf: Leaf, facts: Facts, index: int, argument: int) -> None:
        """Passes back with slopes that the leaf gives for single entries of an argument."""
        given = leaf.boxes[self.activations.index(index)]
        if given is None:
            return
        entries, sides = self.entries(certificate, index, given)
        slopes = self.slopes(certificate, given.slopes, len(entries))
        width = sum(self.sizes[k] for k in slopes)
        at_once = max(_ROWS_AT_ONCE // max(width, 1), 1)
        for sign in (1, -1):
            mine = np.flatnonzero(sides == sign)
            for begin in range(0, len(mine), at_once):
                rows = mine[begin : begin + at_once]
                lines = self.lines(facts, slopes, 0, rows)
                of = np.zeros(len(rows), int)
                found = facts.unit_bounds(argument, of, entries[rows], sign, lines)
                facts.improve(argument, of, entries[rows], sign, found)
