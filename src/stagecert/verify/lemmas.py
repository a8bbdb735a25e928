"""Neurons that are on, or off, on the whole box, where only a proof by cases shows it.

Intervals by passes back leave many neurons of trained networks open, most of which never change
their sign. That one does not is a property of the network up to it, which a small tree of splits
decides. Later layers, and the search for the property itself, then have a fraction of the neurons
to deal with. For what stays open, such trees bring the ends of intervals nearer to what is
attained: lines lose less then, and later layers have fewer open neurons.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.verify.branches import LEAF
from stagecert.verify.certificates import Cases
from stagecert.verify.choosing import values_at
from stagecert.verify.harvest import Leaves, walked
from stagecert.verify.nodes import Form
from stagecert.verify.team import Team
from stagecert.verify.tree import Root, Tree
from stagecert_check.bounds import Facts
from stagecert_check.cases import known_before
from stagecert_check.functions import Activation
from stagecert_check.graph import Shift
from stagecert_check.narrowing import Narrow, narrowed

# Nodes that a neuron's tree may have, round by round; for the last round only few may be left.
PATIENCE, FEW = (16, 128, 1024), 16
SHARE = 0.05  # of the neurons of a round: if fewer are decided, no further round is tried
# Ends come nearer by this share of the way to what is attained. Nodes that a tree may have for it,
# and those of all of a layer may have together; gains that are a smaller share of the interval are
# not worth one.
NEARER, NODES, ALL_NODES, WORTH = 0.75, 256, 2**14, 0.02
POINTS = 64  # corners that show which sign a neuron has
ROUNDING = 4e-6  # single precision is off by less than this share of an interval's size


@dataclass(frozen=True, eq=False)
class Lemmas:
    """Ends of intervals that were found, in the terms of a narrow network.

    Attributes:
        entries: of the argument.
        sides: 1 for a lower end, -1 for an upper one.
        neurons: the trees in preorder, one after the other, with -1 for leaves: numbers of neurons
            of all earlier activations of the network that `facts` are about.
        cuts: where.
        forces: for every leaf one for each split on the way to it.
        below: (leaves, those neurons), slopes.
    """

    entries: np.ndarray
    sides: np.ndarray
    neurons: np.ndarray
    cuts: np.ndarray
    forces: np.ndarray
    below: np.ndarray


class Prover:
    """Decides signs of the entries of an argument of relu, and brings ends of intervals nearer."""

    def __init__(self, facts: Facts, argument: int, team: Team, stop: Callable[[], bool]):
        self.facts, self.argument, self.team, self.stop = facts, argument, team, stop
        # What is off already takes no part.
        self.narrow = narrowed(Narrow(known_before(facts, argument)))
        self.program = self.narrow.facts.program
        self.form = Form(self.program)
        boxes = [self.narrow.facts.boxes[k] for k in self.program.activations]
        self.low, self.high = (np.concatenate([box[k].reshape(-1) for box in boxes])
                               for k in (0, 1))  # fmt: skip
        self.ends = [x[argument].reshape(-1).astype(float) for x in (facts.low, facts.high)]
        self.box = tuple(x[0] for x in facts.inputs)
        corners = np.random.default_rng(0).random((POINTS, len(self.box[0]))) < 0.5
        self.least, self.most = np.full((2, len(self.ends[0])), [[np.inf], [-np.inf]])
        self._look(np.where(corners, *self.box).astype(np.float32))

    def __getstate__(self) -> dict[str, Any]:
        """What trees need that another process grows."""
        kept = ("argument", "program", "low", "high", "ends", "box", "least", "most")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.form, self.stop = Form(self.program), lambda: False

    def _look(self, points: np.ndarray) -> None:
        """Which values the argument has at some points."""
        values: list[np.ndarray] = []
        begin = 0
        for index, node in enumerate(self.form.nodes):
            if node.operation is None:
                some = points[:, begin : begin + self.form.sizes[index]]
                value, begin = some.reshape(-1, *node.shape), begin + some.shape[1]
            elif isinstance(node.operation, Activation):
                at = values[node.arguments[0]].reshape(len(points), -1)
                value = values_at(self.form.layers[index], at).reshape(-1, *node.shape)
            elif isinstance(node.operation, Shift):
                value = values[node.arguments[0]] + node.operation.constant
            else:
                value = node.operation.forward([values[k] for k in node.arguments])
            values.append(value)
        found = values[self.argument].reshape(len(points), -1)
        self.least = np.minimum(self.least, found.min(axis=0))
        self.most = np.maximum(self.most, found.max(axis=0))

    def _either(self, entries: np.ndarray) -> np.ndarray:
        """Whether entries are known to have both signs."""
        return (self.least[entries] < 0) & (self.most[entries] > 0)

    def proven(self, entries: np.ndarray) -> Lemmas | None:
        """What is found of some entries; None if that is nothing, or there is no time."""
        found = self._signs(entries)
        settled = [entry for entry, *_ in found]
        found += self._nearer(np.setdiff1d(entries, settled))
        return self._joined(found) if found else None

    def _signs(self, entries: np.ndarray) -> list[tuple]:
        """(entry, side, walk, slopes below) of those whose sign is found."""
        found: list[tuple] = []
        for patience in PATIENCE:
            entries = entries[~self._either(entries)]
            if not len(entries) or (patience == PATIENCE[-1] and len(entries) > FEW):
                break
            sides = np.where(self.least[entries] >= 0, 1, -1)
            proofs = self._grown(entries, sides, np.zeros(len(entries)), patience)
            found += [proof for proof in proofs if proof is not None]
            entries = entries[[proof is None for proof in proofs]]
            if len(proofs) - len(entries) < SHARE * len(proofs):
                break
        return found

    def _nearer(self, entries: np.ndarray) -> list[tuple]:
        """The same for ends of the intervals of others."""
        both, sides = np.tile(entries, 2), np.repeat([1, -1], len(entries))
        known = np.where(sides > 0, self.ends[0][both], -self.ends[1][both])
        goals = known + NEARER * (self._attained(both, sides) - known)
        some = goals - known > WORTH * (self.ends[1] - self.ends[0])[both]
        patience = min(NODES, ALL_NODES // max(int(np.sum(some)), 1))
        proofs = self._grown(both[some], sides[some], goals[some], patience)
        return [proof for proof in proofs if proof is not None]

    def _attained(self, entries: np.ndarray, sides: np.ndarray) -> np.ndarray:
        """The smallest values of sides * entries that were met."""
        return np.where(sides > 0, self.least[entries], -self.most[entries])

    def _grown(
        self, entries: np.ndarray, sides: np.ndarray, goals: np.ndarray, patience: int
    ) -> list[tuple | None]:
        """Proofs that sides * entries exceed goals, or None; nothing at all without time."""
        proofs: list[tuple | None] = [None] * len(entries)

        def part(k: int, count: int) -> tuple:
            return self, *(x[k::count] for x in (entries, sides, goals)), patience

        shares = self.team.deal(Prover.trees, part, self.stop) if len(entries) else []
        for k, (found, least, most) in enumerate(shares or ()):
            if found is None:
                return []
            proofs[k :: len(shares)] = found  # type: ignore
            self.least, self.most = np.minimum(self.least, least), np.maximum(self.most, most)
        return proofs if shares else []

    def trees(
        self, entries: np.ndarray, sides: np.ndarray, goals: np.ndarray, patience: int
    ) -> tuple[list[tuple | None] | None, np.ndarray, np.ndarray]:
        """The proofs, or None without time, and which values have been met by then."""
        if not len(entries):
            return [], self.least, self.most
        roots = []
        for k, (entry, side) in enumerate(zip(entries, sides, strict=True)):
            row = np.zeros((1, len(self.ends[0])))
            row[0, entry] = side
            margin = ROUNDING * max(abs(end[entry]) for end in self.ends)
            limits = goals[k : k + 1]
            roots.append(
                Root(0, k, self.box, self.low, self.high, row, limits, margin)  # type: ignore
            )
        tree = Tree(self.program, self.form, roots, patience=patience)
        while not tree.done:
            if self.stop():
                return None, self.least, self.most
            met = tree.step()
            if len(met.points):
                self._look(met.points)
                tree.give_up(self._attained(entries, sides) < goals)
        leaves, found = Leaves(tree), []
        for k in range(len(entries)):
            if tree.lost[k]:
                found.append(None)
                continue
            walk = walked(tree, k, leaves)
            rows = np.array([leaves.rows[node] for node in walk.order.tolist()])
            found.append((entries[k], sides[k], walk, leaves.joined("below")[rows]))
        return found, self.least, self.most

    def _joined(self, found: list[tuple]) -> Lemmas:
        # Low ends and high ends each have entries in order.
        found = sorted(found, key=lambda one: (one[1], one[0]))
        walks = [walk for _, _, walk, _ in found]
        neurons = np.concatenate([walk.neurons for walk in walks])
        place, size = self._places()
        below = np.zeros((sum(len(one[3]) for one in found), size), np.float16)
        below[:, place] = np.concatenate([one[3] for one in found])
        return Lemmas(
            np.array([one[0] for one in found]), np.array([one[1] for one in found]),
            np.where(neurons == LEAF, LEAF, place[np.where(neurons == LEAF, 0, neurons)]),
            np.concatenate([walk.cuts for walk in walks]),
            np.concatenate([np.array(walk.forces, float) for walk in walks]), below,
        )  # fmt: skip

    def _places(self) -> tuple[np.ndarray, int]:
        """Where the tree's neurons are among those of `facts`, and how many these are."""
        found, begin = [], 0
        for k in self.program.activations:
            size = int(np.prod(self.facts.boxes[k][0].shape[1:]))
            found.append(begin + self.narrow.kept.get(k, np.arange(size)))
            begin += size
        return np.concatenate(found), begin


def spelt(lemmas: Lemmas, known: Narrow, sizes: dict[int, int], index: int, shapes) -> Cases:
    """Lemmas as certificates hold them, in the terms of the whole network."""
    earlier = [k for k in sizes if k < index]
    places, begin = [], 0
    for k in earlier:
        places.append(begin + known.kept.get(k, np.arange(sizes[k])))
        begin += sizes[k]
    place = np.concatenate(places)
    split = lemmas.neurons != LEAF
    axes = np.where(split, place[np.where(split, lemmas.neurons, 0)], LEAF)
    slopes, first = [], 0
    for k in earlier:
        kept = known.kept.get(k, np.arange(sizes[k]))
        below = np.zeros((len(lemmas.below), sizes[k]), np.float16)
        below[:, kept] = np.clip(lemmas.below[:, first : first + len(kept)], 0, 1)
        first += len(kept)
        slopes.append((below.reshape(-1, *shapes(k)), None))
    entries = known.kept.get(index, np.arange(sizes[index]))[lemmas.entries]
    return Cases(
        entries.astype("<i4"), lemmas.sides.astype("<i4"), axes.astype("<i4"),
        lemmas.cuts.astype("<f8"), lemmas.forces.astype("<f8"), tuple(slopes),
    )  # fmt: skip
