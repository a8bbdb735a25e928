"""Planes above neurons: linear in all that a neuron reads, not only in its argument.

The argument of an activation is y = w . v + b, with v the nearest earlier values that are no affine
functions of others: inputs and outputs of activations. For f(y) = max(a y, b y) with slopes that
are not negative, as relu has, and any slopes s whatever,

    f(y) <= s . v + offset,    offset = the largest a y - s . v for both slopes a in the box of v,

and a linear function is largest in a corner of the box: that is all there is to show. How good a
plane is depends on s, and is no concern of the checker. A certificate gives s as shares of w.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert_check.certificate import Above, Source
from stagecert_check.functions import Activation, Piecewise, Refused
from stagecert_check.graph import Program

MOST_NUMBERS = 2**24  # slopes of the planes above one activation, on one leaf
NUMBERS_AT_ONCE = 2**22  # in the cotangents of planes that are made together


def slopes_of(function: Any) -> tuple[float, ...]:
    """The slopes of a function max(a y, b y) that does not fall; none for other functions."""
    if not isinstance(function, Piecewise) or function.kind not in ("relu", "leaky_relu"):
        return ()
    found = tuple(float(slope) for slope, _ in function.pieces)
    return found if 0 <= found[0] <= found[1] else ()


def sources_of(program: Program, index: int) -> list[int]:
    """The values that the argument of an activation is an affine function of, in order."""
    found: set[int] = set()
    seen, stack = set(), list(program.nodes[index].arguments)
    while stack:
        k = stack.pop()
        if k in seen:
            continue
        seen.add(k)
        node = program.nodes[k]
        if node.operation is None or isinstance(node.operation, Activation):
            found.add(k)
        else:
            stack += node.arguments
    return sorted(found)


@dataclass(frozen=True, eq=False)
class Planes:
    """Planes above neurons of one activation, for rows of a pass back.

    Attributes:
        rows, entries: for which row each is, and above which neuron.
        shares: from 0 to 1: how much of a cotangent takes the plane; the rest takes the line.
        slopes: by value: (planes, entries of the value).
        offsets: (planes,).
    """

    rows: np.ndarray
    entries: np.ndarray
    shares: np.ndarray
    slopes: dict[int, Any]
    offsets: Any

    def __getitem__(self, some: slice) -> "Planes":
        """Those for a slice of the rows."""
        mine = (self.rows >= some.start) & (self.rows < some.stop)
        slopes = {k: x[mine] for k, x in self.slopes.items()}
        return Planes(self.rows[mine] - some.start, self.entries[mine], self.shares[mine], slopes,
                      self.offsets[mine])  # fmt: skip


def planes_above(facts: Any, index: int, of: np.ndarray, given: "Given") -> Planes:
    """The planes that a certificate gives above neurons of an activation.

    Args:
        facts: what is known of the boxes.
        index: the activation.
        of: for each row of the pass, on which of the boxes.
        given: what the certificate says.
    """
    program, real = facts.program, facts.arithmetic
    slopes = slopes_of(program.nodes[index].operation)
    if not slopes:
        raise Refused("planes are given above an activation that has none")
    sources = sources_of(program, index)
    sizes = [int(np.prod(program.nodes[k].shape)) for k in sources]
    (argument,) = program.nodes[index].arguments
    widest = max(int(np.prod(node.shape)) for node in program.nodes)
    parts: dict[int, list[np.ndarray]] = {k: [] for k in sources}
    offsets = []
    for first in range(0, len(given.rows), max(NUMBERS_AT_ONCE // widest, 1)):
        some = slice(first, first + max(NUMBERS_AT_ONCE // widest, 1))
        boxes = of[given.rows[some]]
        # y <= top + w . v for the numbers as they are.
        top, weights = facts.affine(argument, boxes, given.entries[some], sources)
        kept = real.array(given.kept[some])
        ends = np.cumsum(sizes)[:-1]
        plane = [x * w for x, w in zip(np.split(kept, ends, axis=1), weights, strict=True)]
        best = None
        for slope in slopes:
            found = _largest(facts, (slope, top), zip(sources, weights, plane, strict=True), boxes)
            best = found if best is None else np.maximum(best, found)
        offsets.append(best)
        for k, x in zip(sources, plane, strict=True):
            parts[k].append(x)
    joined = {k: np.concatenate(x) for k, x in parts.items()}
    return Planes(given.rows, given.entries, given.shares, joined, np.concatenate(offsets))


def _largest(
    facts: Any,
    line: tuple[float, Any],
    parts: Iterable[tuple[int, np.ndarray, np.ndarray]],
    boxes: np.ndarray,
) -> np.ndarray:
    """At least slope * (top + w . v) - s . v in the box of v; `parts` are (value, w, s)."""
    real, (slope, top) = facts.arithmetic, line
    steep = real.array(np.array(slope))
    total = steep * top
    size, terms = np.abs(total), 8
    for k, w, s in parts:
        low, high = (x[k][boxes].reshape(len(boxes), -1) for x in (facts.low, facts.high))
        rest = steep * w - s
        total = total + np.maximum(rest * low, rest * high).sum(axis=1)
        size = size + ((np.abs(steep * w) + np.abs(s)) * np.maximum(abs(low), abs(high))).sum(
            axis=1
        )
        terms += w.shape[1] + 8
    if real.exact:
        return total
    # Each term is rounded four times, and added up with the others; sizes are rounded themselves.
    return np.nextafter(total + 2 * real.slip(terms, 0) * size + real.tiny(4 * terms), np.inf)


@dataclass(frozen=True, eq=False)
class Given:
    """Planes as a certificate gives them.

    Attributes:
        rows, entries, shares: as those of `Planes`.
        kept: (planes, entries of all sources): what share of the neuron's weights the slopes are.
    """

    rows: np.ndarray
    entries: np.ndarray
    shares: np.ndarray
    kept: np.ndarray


def read_planes(certificate: Source, program: Program, index: int, above: Above) -> Given:
    """What a certificate gives for one row: `above` names the arrays."""
    entries = certificate.array(above.entries, ("<i4",), (None,))
    (argument,) = program.nodes[index].arguments
    size = int(np.prod(program.nodes[argument].shape))
    if np.any(entries < 0) or np.any(entries >= size) or np.any(np.diff(entries) <= 0):
        raise Refused("planes are above neurons that are not there, or not in order")
    shares = certificate.slopes(above.shares, entries.shape)
    if np.any(shares < 0) or np.any(shares > 1):
        raise Refused("a share of a plane is not between 0 and 1")
    reads = sum(int(np.prod(program.nodes[k].shape)) for k in sources_of(program, index))
    if len(entries) * reads > MOST_NUMBERS:
        raise Refused(f"planes have more than {MOST_NUMBERS} slopes")
    kept = certificate.slopes(above.kept, (len(entries), reads))
    return Given(np.zeros(len(entries), int), entries, shares, kept)
