"""Networks without the neurons that are zero: relu whose arguments are nowhere positive.

On a box, most neurons of a trained network may be off. Their columns and rows of the matrices are
left out: what is left is the same function on the box, and a fraction of the work.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts
from stagecert_check.graph import Node, Program, Shift
from stagecert_check.leaves import Clipped, Splits, splits_of
from stagecert_check.linear import MatMul
from stagecert_check.tree import Path

WORTH = 0.1  # share of all neurons from which on it pays


@dataclass(frozen=True, eq=False)
class Narrow:
    """Facts of a network that neurons were left out of.

    Attributes:
        facts: of what is left.
        kept: by activation, which entries of its argument are left, in order; all if it has none.
        wider: makes facts of a network that more is left of; None if all is left.
    """

    facts: Facts
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    wider: "Callable[[], Narrow] | None" = None

    def slopes(self, index: int, array: np.ndarray) -> np.ndarray:
        """Slopes (rows, *shape) of an activation, without those of neurons that are left out."""
        if index not in self.kept:
            return array
        shape = self.facts.program.nodes[index].shape
        return array.reshape(len(array), -1)[:, self.kept[index]].reshape(-1, *shape)

    def places(self, index: int, entries: np.ndarray) -> np.ndarray:
        """Where entries of an activation's argument are now; -1 for those that are left out."""
        if index not in self.kept:
            return entries
        kept = self.kept[index]
        at = np.minimum(np.searchsorted(kept, entries), len(kept) - 1)
        return np.where(kept[at] == entries, at, -1)

    def splits(self, given: dict[int, Splits]) -> dict[int, Splits] | None:
        """The same splits; None if one is of a neuron that is left out."""
        found = {}
        for index, some in given.items():
            places = self.places(index, some.entries)
            if np.any(places < 0):
                return None
            found[index] = Splits(some.rows, places, some.cuts, some.sides, some.forces)
        return found

    def reaching(self, given: dict[int, Splits]) -> "tuple[Narrow, dict[int, Splits]]":
        """Facts of a network that has all neurons that are split, and the splits there."""
        narrow = self
        while (found := narrow.splits(given)) is None:
            assert narrow.wider is not None
            narrow = narrow.wider()
        return narrow, found


def narrowed(given: Narrow, share: float = 0.0, needed: Mapping[int, np.ndarray] = {}) -> Narrow:
    """Leaves out what is zero on all boxes, if that is at least a share of all neurons.

    Entries that are split, now or later, are `needed` all the same.
    """
    facts, program = given.facts, given.facts.program
    alive = {
        index: np.any(facts.boxes[index][1].reshape(len(facts.boxes[index][1]), -1) > 0, axis=0)
        for index in _simple(program)
    }
    for index in alive.keys() & needed.keys():
        places = given.places(index, needed[index])
        alive[index][places[places >= 0]] = True
    some = {index: keep for index, keep in alive.items() if not np.all(keep)}
    neurons = sum(box[0][0].size for box in facts.boxes.values())
    if sum(int(np.sum(~keep)) for keep in some.values()) <= share * neurons:
        return given
    places, kept = {}, dict(given.kept)
    for index, keep in some.items():
        if not np.any(keep):
            keep[0] = True  # arrays without entries are a case of their own
        places[index] = np.flatnonzero(keep)
        kept[index] = kept[index][places[index]] if index in kept else places[index]
    return Narrow(_sliced(facts, places), kept, given.wider or (lambda: given))


def _simple(program: Program) -> list[int]:
    """The relu between two matrices: each of the values in between is read once."""
    readers: dict[int, list[int]] = {}
    for k, node in enumerate(program.nodes):
        for argument in node.arguments:
            readers.setdefault(argument, []).append(k)
    found = []
    for index in program.activations:
        if getattr(program.nodes[index].operation, "kind", "") != "relu":
            continue
        way = _way(program, index)
        after = readers.get(index, [])
        if (
            _is_product(program, way[-1])
            and all(_is_product(program, k) for k in after)
            and all(len(readers[k]) == 1 for k in way[1:])
            and not any(k in program.outputs for k in way)
        ):
            found.append(index)
    return found


def _way(program: Program, index: int) -> list[int]:
    """An activation, its argument and, if that adds a constant, what it is added to."""
    way = [index, program.nodes[index].arguments[0]]
    if isinstance(program.nodes[way[-1]].operation, Shift):
        way.append(program.nodes[way[-1]].arguments[0])
    return way


def _is_product(program: Program, index: int) -> bool:
    """Whether a value is a vector times one matrix."""
    node = program.nodes[index]
    operation = node.operation
    if not isinstance(operation, MatMul) or operation.left or operation.weights.ndim != 2:
        return False
    shapes = node.shape, program.nodes[node.arguments[0]].shape
    return all(shape and np.prod(shape) == shape[-1] for shape in shapes)


def _sliced(facts: Facts, places: dict[int, np.ndarray]) -> Facts:
    """The same facts about the entries of activations at some places."""
    of = {k: keep for index, keep in places.items() for k in _way(facts.program, index)}
    program = narrow_program(facts.program, places)
    found = Facts(facts.arithmetic, program, *facts.inputs)

    def cut(k: int, x: Any) -> Any:
        return x if x is None or k not in of else x[..., of[k]]

    for name in ("low", "high", "sizes"):
        setattr(found, name, [cut(k, x) for k, x in enumerate(getattr(facts, name))])
    # Sums over all entries are no less than those over some.
    found.totals, found.empty = list(facts.totals), facts.empty
    found.boxes = {k: tuple(cut(k, x) for x in box) for k, box in facts.boxes.items()}  # type: ignore
    found.lines = {k: tuple(cut(k, x) for x in line) for k, line in facts.lines.items()}
    return found


def narrow_program(program: Program, places: dict[int, np.ndarray]) -> Program:
    """The program with those entries of activations only; where there are none given, with all."""
    of = {k: keep for index, keep in places.items() for k in _way(program, index)}
    found = copy.copy(program)
    found.nodes = [_node(program, k, of) for k in range(len(program.nodes))]
    return found


def _node(program: Program, k: int, of: dict[int, np.ndarray]) -> Node:
    node = copy.copy(program.nodes[k])
    if isinstance(node.operation, MatMul):
        weights, (argument,) = node.operation.weights, node.arguments
        weights = weights[of[argument]] if argument in of else weights
        weights = weights[:, of[k]] if k in of else weights
        if weights is not node.operation.weights:
            node.operation = MatMul(np.ascontiguousarray(weights), False, node.operation.loose)
    elif k in of and isinstance(node.operation, Shift):
        node.operation = Shift(np.asarray(node.operation.constant)[..., of[k]])
    if k in of:
        node.shape = *node.shape[:-1], len(of[k])
    return node


def refined(
    narrow: Narrow,
    sizes: dict[int, int],
    path: Path | None,
    tighter: Callable[[Narrow, Facts, int, int], None],
    needed: Mapping[int, np.ndarray] = {},
) -> Narrow:
    """Facts of one box, or of its part at the end of a path, made better by `tighter`.

    That is called with what is known before, and then as `Facts.derive` would. `sizes` are those
    of the arguments of all activations. Entries that are `needed` are not left out.
    """
    given = {} if path is None else splits_of([path], sizes)
    narrow, splits = narrow.reaching(given)
    found = Clipped(narrow.facts, np.zeros(1, int), splits, {}, lambda *at: tighter(narrow, *at))
    needed = {
        index: np.union1d(needed.get(index, ()), given[index].entries if index in given else ())
        .astype(int) for index in (*needed, *given)
    }  # fmt: skip
    return narrowed(Narrow(found, narrow.kept, narrow.wider), needed=needed)
