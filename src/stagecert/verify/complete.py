"""From a property to a tree of splits, and from the finished tree to what certificates hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.certificates import Arrays
from stagecert.verify.checked import starts
from stagecert.verify.harvest import Leaves, walked
from stagecert.verify.lending import Lender
from stagecert.verify.nodes import Form
from stagecert.verify.queries import Group
from stagecert.verify.stations import Station
from stagecert.verify.team import Team
from stagecert.verify.tightening import OutOfTime, Tightener, slopes_of, spread, written
from stagecert.verify.tree import Root, Tree
from stagecert_check.bounds import Facts, lower_bounds
from stagecert_check.checker import Checker
from stagecert_check.functions import Activation
from stagecert_check.graph import Program
from stagecert_check.narrowing import Narrow, narrow_program, refined
from stagecert_check.tree import ABOVE, BELOW, Path

# Single precision is off by less than this share of the size that the rows can have.
ROUNDING = 4e-6


@dataclass(frozen=True, eq=False)
class Whole:
    """What the checker derives for the whole box of a group.

    Attributes:
        box: the ends of the inputs.
        low, high: intervals of all arguments of activations, side by side.
        sizes: the largest absolute values of the outputs, then of the inputs.
        bounds: of every row: a certified lower bound, with the checker's own lines.
        passes: what made the intervals tighter, as certificates hold it.
    """

    box: tuple[np.ndarray, np.ndarray]
    low: np.ndarray
    high: np.ndarray
    sizes: np.ndarray
    bounds: np.ndarray
    passes: tuple = ()


class Complete:
    """The search through splits of neurons for the cases of some groups.

    Attributes:
        tree: the search itself, once it is planted; `tree.roots` are the cases.
    """

    def __init__(
        self, checker: Checker, groups: tuple[Group, ...], *, memory=1.0, keep=True,
        team: Team | None = None,
    ):  # fmt: skip
        self.checker, self.program, self.groups = checker, checker.program, groups
        self.memory, self.keep, self.team = memory, keep, team or Team()
        self.form = Form(self.program)
        self.tree: Tree | None = None
        self.kept = np.arange(self.form.neurons)  # those that the tree is about
        # The checker's facts, without neurons that are zero: with default lines, and the latest.
        self._plain: dict[int, Narrow] = {}
        self._narrow: dict[int, Narrow] = {}
        self._wholes: dict[int, Whole] = {}
        self._order: dict[int, np.ndarray] = {}  # by case: the leaves of its tree, in preorder
        self._written: dict[Station, tuple] = {}
        self._accepted: dict[int, np.ndarray] = {}  # by case: leaves that the checker has refuted

    def whole(self, g: int) -> Whole:
        """Intervals and bounds over a group's box.

        Raises `stagecert_check.functions.Refused` where the checker cannot bound the network.
        """
        if g not in self._wholes:
            self._wholes[g] = self._derived(g, None)
        return self._wholes[g]

    def rough(self, g: int, passes: bool | Callable[[Activation], bool]) -> np.ndarray:
        """Bounds over a group's box from intervals of fewer passes back: see `Facts.derive`."""
        inputs = self.groups[g].inputs
        low, high = (np.array(x, float)[None] for x in (inputs.lower64, inputs.upper64))
        with np.errstate(all="ignore"):
            facts = Facts(self.checker.real, self.program, low, high).derive(passes=passes)
            return self._bounds(facts, self.groups[g].matrix)

    def tighten(self, open_cases: list[np.ndarray], stop: Callable[[], bool]) -> bool:
        """Searches for tighter intervals of the groups with open cases; False if time is up."""
        for g, open_ in enumerate(open_cases):
            if open_.any():
                box = self.whole(g).box
                form = Form(self._plain[g].facts.program)
                ends = box[0][None], box[1][None]
                tightener = Tightener(self.checker, form, *ends, self.team, stop)
                try:
                    self._wholes[g] = self._derived(g, tightener)
                except OutOfTime:
                    return False
        return True

    def _derived(self, g: int, tightener: Tightener | None) -> Whole:
        group, program = self.groups[g], self.program
        box = (np.array(x, float)[None] for x in (group.inputs.lower64, group.inputs.upper64))
        low, high = box
        with np.errstate(all="ignore"):
            if g not in self._plain:
                self._plain[g] = self.checker.branching.plain(low, high)
            narrow = plain = self._plain[g]
            if tightener is not None:
                narrow = refined(plain, self.checker.given.sizes, None, tightener)
            facts = narrow.facts
            bounds = self._bounds(facts, group.matrix)
        everything = plain.wider() if plain.wider else plain
        lows, highs = (_side_by_side(everything, k) for k in (0, 1))
        kept = _places(self.form, program, narrow)
        lows[kept], highs[kept] = (_side_by_side(narrow, k) for k in (0, 1))
        ends = (*program.outputs, *program.inputs)
        sizes = np.concatenate([facts.magnitude(k).reshape(-1) for k in ends])
        passes = tuple(tightener.boxes) if tightener else ()
        self._narrow[g] = narrow
        return Whole((low[0], high[0]), lows, highs, sizes, bounds, passes)

    def _bounds(self, facts: Facts, rows: np.ndarray) -> np.ndarray:
        """Lower bounds of rows of the outputs, then the inputs, in float64."""
        start = starts(self.program, rows)
        of = np.zeros(len(rows), int)
        return lower_bounds(facts, of, lambda some: {k: x[some] for k, x in start.items()}, {})

    def plant(self, open_cases: list[np.ndarray], stop: Callable[[], bool]) -> bool:
        """Makes the tree of all open cases; False if time is up or a case has no row to refute."""
        roots: list[Root] = []
        for g, (group, open_) in enumerate(zip(self.groups, open_cases, strict=True)):
            for c in np.flatnonzero(open_):
                if stop() or not np.isfinite(group.limits[group.places[c]]).any():
                    return False
                roots.append(self._root(g, int(c)))
        program, form = self.program, self.form
        if len({root.group for root in roots}) == 1:
            # What is zero on the box is left out.
            narrow = self._narrow[roots[0].group]
            self.kept, program = _places(form, program, narrow), narrow.facts.program
            form = Form(program)
            roots = [replace(root, low=root.low[self.kept], high=root.high[self.kept])
                     for root in roots]  # fmt: skip
        else:
            self.kept = np.arange(form.neurons)
        self.tree = Tree(program, form, roots, memory=self.memory, keep=self.keep)
        self.tree.stop = stop
        return True

    def share(self) -> None:
        """Has the team work on the tree from now on, unless a GPU does."""
        assert self.tree is not None
        if self.team.size > 1 and self.tree.form.there is None and self.tree.lender is None:
            self.tree.lender = Lender(self.tree, self.team)

    def gather(self, seconds: float) -> None:
        """Has back what the team works on; as it was lent, if that takes longer."""
        if self.tree is not None and self.tree.lender is not None:
            self.tree.lender.recall(seconds)

    def adopted(self, stop: Callable[[], bool]) -> Tree:
        """The tree that a file gave, at home in this search; see `resuming`."""
        tree = self.tree
        assert tree is not None
        kept = {}
        for index, layer in self.form.layers.items():
            mine = (layer.some.start <= self.kept) & (self.kept < layer.some.stop)
            if np.sum(mine) < layer.some.stop - layer.some.start:
                kept[index] = self.kept[mine] - layer.some.start
        program = narrow_program(self.program, kept)
        vars(tree).update(program=program, keep=self.keep, stop=stop)
        tree.settle(Form(program))
        return tree

    def _root(self, g: int, c: int) -> Root:
        group, whole = self.groups[g], self.whole(g)
        rows, limits = (x[group.places[c]] for x in (group.matrix, group.limits))
        reach = np.abs(rows) @ whole.sizes[: rows.shape[1]]
        reach += np.where(np.isfinite(limits), np.abs(limits), 0)
        margin = ROUNDING * float(np.max(reach))
        return Root(g, c, whole.box, whole.low, whole.high, rows, limits, margin)

    def branches(self) -> tuple[Branches, ...]:
        """The finished tree of every root."""
        if self.tree is None or not self.tree.done:
            return ()
        leaves = Leaves(self.tree)
        return tuple(self._exported(k, root, leaves) for k, root in enumerate(self.tree.roots))

    def accepted(self) -> dict[int, np.ndarray]:
        """By case: which leaves the checker has refuted before, of the trees handed over last."""
        return {case: np.isin(self._order[case], nodes) for case, nodes in self._accepted.items()}

    def reopen(self, open_: dict[int, np.ndarray]) -> None:
        """Goes on with leaves, by their places in the trees of cases, that were not refuted.

        Their intervals become those of the checker. A bound with given slopes may be worse on
        narrower intervals: the search has to find out what is good on these.
        """
        assert self.tree is not None
        for case, order in self._order.items():
            self._accepted[case] = np.delete(order, open_.get(case, np.zeros(0, int)))
        leaves = Leaves(self.tree)
        nodes = np.concatenate([self._order[case][places] for case, places in open_.items()])
        rows = np.array([leaves.rows[node] for node in nodes.tolist()])
        force = np.zeros((len(nodes), self.tree.form.neurons), np.float32)
        for k, node in enumerate(nodes.tolist()):
            for neuron, value in leaves.forces[node].items():
                force[k, neuron] = value
        below, above, weights = (leaves.joined(x)[rows] for x in ("below", "above", "weights"))
        self._follow(np.unique(self.tree.nodes["station"][nodes]))
        self.tree.reopen(nodes, below, above, force, weights)

    def _follow(self, numbers: np.ndarray) -> None:
        """Gives stations the intervals that the checker has there."""
        tree, arrays, known = self.tree, Arrays(), {}
        assert tree is not None
        by_splits = {station.splits: station for station in tree.stations}

        def narrow(splits: tuple) -> Narrow:
            if not splits:
                return self._narrow[tree.roots[0].group]
            if splits not in known:
                above, station = narrow(splits[:-1]), by_splits[splits]
                neurons, cuts, sides = (np.array(x) for x in zip(*splits, strict=True))
                path = Path(
                    self.kept[neurons], cuts.astype(float), np.where(sides, ABOVE, BELOW),
                    np.zeros(len(neurons)),
                )  # fmt: skip
                boxes = arrays.boxes(self._passes(station))
                known[splits] = self.checker.branching.refined(arrays, above, boxes, path)
            return known[splits]

        for number in numbers[numbers >= 0].tolist():
            station = tree.stations[number]
            found = narrow(station.splits)
            if found.facts.empty[0]:
                continue  # its leaves are refuted
            ends = np.zeros((2, self.form.neurons))
            ends[:, self.kept] = station.low, np.minimum(station.high, 0)
            places = _places(self.form, self.program, found)
            ends[:, places] = _side_by_side(found, 0), _side_by_side(found, 1)
            low, high = ends[:, self.kept].astype(np.float32)
            station.low, station.high = np.minimum(low, high), high

    def _exported(self, number: int, root: Root, leaves: Leaves) -> Branches:
        tree, group = self.tree, self.groups[root.group]
        assert tree is not None
        inputs = len(root.box[0])
        walk = walked(tree, number, leaves)
        split = walk.neurons != LEAF
        axes = np.where(split, inputs + self.kept[np.where(split, walk.neurons, 0)], LEAF)
        stations = {node: self._passes(tree.stations[k]) for node, k in walk.stations.items()}
        order = walk.order.tolist()
        case, places = group.numbers[root.case], group.places[root.case]
        self._order[case] = walk.order
        scales = np.array([float(group.scaled[k].scale) for k in places])
        rows = np.array([leaves.rows[node] for node in order])
        weights = leaves.joined("weights")[rows][:, : len(places)].astype(float)
        return Branches(
            case, axes, walk.cuts, weights * scales,
            np.array(walk.forces, float), self._slopes(leaves, rows), self.whole(root.group).passes,
            stations,
        )  # fmt: skip

    def _passes(self, station: Station) -> tuple:
        """What made the intervals at a station tighter, as certificates hold it."""
        assert self.tree is not None
        if station not in self._written:
            self._written[station] = written(self.tree.form, self.kept, self.form, station)
        return self._written[station]

    def _slopes(self, leaves: Leaves, rows: np.ndarray) -> tuple:
        below, above = leaves.joined("below")[rows], leaves.joined("above")[rows]
        below = spread(below, self.kept, self.form.neurons)
        above = spread(above, self.kept, self.form.neurons) if above.size else below
        kind = "<f4" if self.form.curved else "<f2"
        return tuple(slopes_of(layer, below, above, kind) for layer in self.form.layers.values())


def _side_by_side(narrow: Narrow, k: int) -> np.ndarray:
    """The lower (k = 0) or upper ends of all arguments of activations."""
    facts = narrow.facts
    boxes = [facts.boxes[index][k].reshape(-1) for index in facts.program.activations]
    return np.concatenate([np.zeros(0), *boxes])


def _places(form: Form, program: Program, narrow: Narrow) -> np.ndarray:
    """Which neurons are left, among all of them side by side."""
    found = [np.zeros(0, int)]
    for index in program.activations:
        some = form.layers[index].some
        found.append(some.start + narrow.kept.get(index, np.arange(some.stop - some.start)))
    return np.concatenate(found)
