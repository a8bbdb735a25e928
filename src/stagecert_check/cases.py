"""Proofs by cases for single entries of an activation's argument.

Splits of earlier neurons cover the box. On each of their parts a pass back bounds the entry, and
the least of these bounds holds on the whole box. That a neuron is never on, say, is shown like that
where one pass back does not show it.
"""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts
from stagecert_check.certificate import LEAF, Case, Cases, Source
from stagecert_check.functions import Refused
from stagecert_check.leaves import Clipped, Splits, pushes, splits_of, sum_bounds
from stagecert_check.narrowing import Narrow, narrowed
from stagecert_check.numbers import LARGEST
from stagecert_check.slopes import Given, units
from stagecert_check.tree import Path, Task, leaves_of, windows

_NUMBERS_AT_ONCE = 2**20  # in intervals of parts


def by_cases(
    given: Given, source: tuple[Source, Cases], facts: Facts, index: int, known: Narrow
) -> None:
    """Makes the interval of an activation's argument tighter.

    Args:
        given: the model's activations.
        source: where the arrays are, and which.
        facts: those of one box known so far; they become better.
        index: the activation.
        known: which neurons `facts` are about.
    """
    certificate, cases = source
    (argument,) = given.program.nodes[index].arguments
    entries, sides = given.entries(certificate, index, cases)
    places = known.places(index, entries)
    axes, *_ = _arrays(certificate, cases)
    stacks = given.stacks(certificate, cases.slopes, int(np.sum(axes == LEAF)))
    partial = known_before(facts, argument)
    split = np.unique(axes[axes >= 0]).astype(np.int64)
    every = _there(known, splits_of([Path(split, *[np.zeros(len(split))] * 3)], given.sizes))
    inner = narrowed(Narrow(partial), needed={k: some.entries for k, some in every.items()})
    real, program = facts.arithmetic, inner.facts.program
    numbers = sum(int(np.prod(node.shape)) for node in program.nodes)
    at_once = max(_NUMBERS_AT_ONCE // numbers, 1)
    least, end = np.full(len(entries), np.inf), 0
    for some in windows(_parts(given, certificate, cases, len(entries), argument), at_once):
        begin, end = end, end + len(some)
        of, rows = np.array([task.case for task in some]), np.arange(begin, end)
        there = places[of] >= 0  # of neurons that are zero no more is wanted
        some, of, rows = [some[k] for k in np.flatnonzero(there)], of[there], rows[there]
        if not some:
            continue
        splits = _there(known, splits_of([task.path for task in some], given.sizes))  # type: ignore
        splits = inner.splits(splits)
        assert splits is not None
        slopes = {
            k: tuple(None if x is None else _taken(x, rows, (known, inner), k) for x in pair)
            for k, pair in stacks.items()
        }
        parts = Clipped(inner.facts, np.zeros(len(some), int), splits, slopes)
        more = pushes(real, program, len(some), splits)
        goal = units(parts, argument, places[of], sides[of])
        found = sum_bounds(parts, np.arange(len(some)), goal, more, {})
        # Rational numbers are rounded down here.
        found = np.nextafter(np.asarray(found, float), -np.inf)
        # Nothing is where a part is empty. What is not a number bounds nothing.
        found = np.where(parts.empty, np.inf, np.where(np.isnan(found), -np.inf, found))
        np.minimum.at(least, of, found)
    for sign in (1, -1):
        mine = np.flatnonzero((sides == sign) & (places >= 0) & (least > -np.inf))
        # Where no part has any points, the interval may be what it likes.
        end = (facts.high if sign > 0 else facts.low)[argument].reshape(-1)[places[mine]]
        found = real.array(np.minimum(least[mine], sign * np.asarray(end, float)))
        facts.improve(argument, np.zeros(len(mine), int), places[mine], sign, found)


def known_before(facts: Facts, argument: int) -> Facts:
    """Facts of the network that ends with one of its values."""
    found = copy.copy(facts)
    found.program = copy.copy(facts.program)
    found.program.nodes = facts.program.nodes[: argument + 1]
    found.program.outputs = [argument]
    return found


def said_by(given: Given, certificate: Source, index: int, cases: Cases) -> list[Any]:
    """All that a proof by cases says."""
    entries, sides = given.entries(certificate, index, cases)
    axes, cuts, forces = _arrays(certificate, cases)
    leaves = int(np.sum(axes == LEAF))
    stacks = given.stacks(certificate, cases.slopes, leaves)
    found: list[Any] = [x.tobytes() for x in (entries, sides, axes, cuts, forces)]
    for k, pair in stacks.items():
        found += [(k, None if x is None else (str(x.dtype), x.tobytes())) for x in pair]
    return found


def _arrays(certificate: Source, cases: Cases) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    axes = certificate.array(cases.axes, ("<i4",), (None,))
    cuts = certificate.array(cases.cuts, ("<f8",), axes.shape)
    forces = certificate.array(cases.forces, ("<f8",), (None,))
    if np.any(forces < 0) or np.any(forces > LARGEST):
        raise Refused("forces must not be negative, nor too large")
    return axes, cuts, forces


def _parts(
    given: Given, certificate: Source, cases: Cases, count: int, argument: int
) -> Iterator[Task]:
    """The leaves of all trees; their `case` is the number of the tree."""
    axes, cuts, forces = _arrays(certificate, cases)
    neurons = sum(size for k, size in given.sizes.items() if k < argument)
    nothing, begin, used = np.zeros(0), 0, 0
    for number in range(count):
        end, leaves, splits = _tree(axes, begin)
        mine, some = slice(begin, end), forces[used : used + splits]
        case = Case(axes[mine], cuts[mine], np.zeros((leaves, 0)), {}, some)
        yield from leaves_of(number, case, nothing, nothing, neurons)
        begin, used = end, used + splits
    if begin < len(axes) or used < len(forces):
        raise Refused("there is more than the trees of a proof by cases")


def _tree(axes: np.ndarray, begin: int) -> tuple[int, int, int]:
    """Where the tree ends that begins at a node, its leaves, and how many splits these have."""
    waiting, end, leaves, splits = [0], begin, 0, 0
    while waiting:
        if end == len(axes):
            raise Refused("a tree has fewer nodes than parts")
        depth = waiting.pop()
        if axes[end] == LEAF:
            leaves, splits = leaves + 1, splits + depth
        else:
            waiting += [depth + 1, depth + 1]
        end += 1
    return end, leaves, splits


def _taken(
    x: np.ndarray, rows: np.ndarray, narrows: tuple[Narrow, Narrow], index: int
) -> np.ndarray:
    """Slopes of some leaves, of the neurons that are left."""
    x = x if len(x) == 1 else x[rows]
    for narrow in narrows:
        x = narrow.slopes(index, x)
    return np.broadcast_to(x, (len(rows), *x.shape[1:])).astype(np.float64)


def _there(known: Narrow, given: dict[int, Splits]) -> dict[int, Splits]:
    """The splits of neurons that are left; without the others, parts are larger."""
    found = {}
    for index, some in given.items():
        places = known.places(index, some.entries)
        left = places >= 0
        found[index] = Splits(some.rows[left], places[left], some.cuts[left], some.sides[left],
                              some.forces[left])  # fmt: skip
    return found
