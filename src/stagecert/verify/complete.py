"""From a property to a tree of splits, and from the finished tree to what certificates hold."""

import math
from collections.abc import Callable

import numpy as np

from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.nodes import Form
from stagecert.verify.queries import Group
from stagecert.verify.tree import Root, Tree
from stagecert_check.bounds import Facts
from stagecert_check.graph import Program
from stagecert_check.numbers import Arithmetic

# Single precision is off by less than this share of the size that the rows can have.
ROUNDING = 4e-6


class Complete:
    """The search through splits of neurons for the open cases of some groups.

    Raises `stagecert_check.functions.Refused` where the checker cannot bound the network.

    Attributes:
        tree: the search itself; `tree.roots` are the cases.
        possible: False if a case has no row that could be refuted.
    """

    def __init__(
        self,
        program: Program,
        groups: tuple[Group, ...],
        open_cases: list[np.ndarray],
        *,
        memory: float = 1.0,
        keep: bool = True,
        stop: Callable[[], bool] = lambda: False,
    ):
        self.program, self.groups = program, groups
        self._order: dict[int, np.ndarray] = {}  # by case: the leaves of its tree, in preorder
        self.form = Form(program)
        roots: list[Root] = []
        self.possible = True
        for g, (group, open_) in enumerate(zip(groups, open_cases, strict=True)):
            if not open_.any() or stop():
                continue
            with np.errstate(all="ignore"):
                facts = self._facts(group)
            for c in np.flatnonzero(open_):
                places = group.places[c]
                if not np.isfinite(group.limits[places]).any():
                    self.possible = False
                    continue
                roots.append(self._root(g, int(c), facts))
        self.tree = Tree(self.form, roots, memory=memory, keep=keep) if roots else None

    def _facts(self, group: Group) -> Facts:
        """Intervals as the checker derives them for the group's box."""
        low, high = (np.array(x, float)[None] for x in (group.inputs.lower64, group.inputs.upper64))
        return Facts(Arithmetic(), self.program, low, high).derive()

    def _root(self, g: int, c: int, facts: Facts) -> Root:
        group = self.groups[g]
        places = group.places[c]
        ends = [facts.boxes[index] for index in self.program.activations]
        low, high = (
            np.concatenate([pair[k].reshape(-1) for pair in ends]) if ends else np.zeros(0)
            for k in (0, 1)
        )
        sizes = np.concatenate(
            [facts.magnitude(k).reshape(-1) for k in (*self.program.outputs, *self.program.inputs)]
        )
        rows, limits = group.matrix[places], group.limits[places]
        reach = np.abs(rows) @ sizes[: rows.shape[1]] + np.where(
            np.isfinite(limits), np.abs(limits), 0
        )
        box = facts.inputs[0][0], facts.inputs[1][0]
        return Root(g, c, box, low, high, rows, limits, ROUNDING * float(np.max(reach)))

    def branches(self) -> tuple[Branches, ...]:
        """The finished tree of every root."""
        if self.tree is None or not self.tree.done:
            return ()
        leaves = _Leaves(self.tree)
        return tuple(self._exported(k, root, leaves) for k, root in enumerate(self.tree.roots))

    def reopen(self, open_: dict[int, np.ndarray]) -> None:
        """Goes on with leaves, by their places in the trees of cases, that were not refuted."""
        assert self.tree is not None
        leaves = _Leaves(self.tree)
        nodes = np.concatenate([self._order[case][places] for case, places in open_.items()])
        rows = np.array([leaves.rows[node] for node in nodes.tolist()])
        force = np.zeros((len(nodes), self.form.neurons), np.float32)
        for k, node in enumerate(nodes.tolist()):
            for neuron, value in leaves.forces[node].items():
                force[k, neuron] = value
        below, above, weights = (leaves.joined(x)[rows] for x in ("below", "above", "weights"))
        self.tree.reopen(nodes, below, above, force, weights)

    def _exported(self, number: int, root: Root, leaves: "_Leaves") -> Branches:
        tree, group = self.tree, self.groups[root.group]
        assert tree is not None
        inputs = len(root.box[0])
        child, neuron, cut = (tree.nodes[name] for name in ("child", "neuron", "cut"))
        axes, cuts, order, forces = [], [], [], []
        stack: list[tuple[int, tuple[tuple[int, int], ...]]] = [(number, ())]
        while stack:
            node, path = stack.pop()
            if child[node] < 0:
                axes.append(LEAF)
                cuts.append(0.0)
                order.append(node)
                forces += _forces_of(path, leaves.forces[node])
                continue
            j = int(neuron[node])
            axes.append(inputs + j)
            cuts.append(float(cut[node]))
            first = int(child[node])
            stack += [(first + 1, (*path, (j, -1))), (first, (*path, (j, 1)))]
        case, places = group.numbers[root.case], group.places[root.case]
        self._order[case] = np.array(order)
        scales = np.array([float(group.scaled[k].scale) for k in places])
        rows = np.array([leaves.rows[node] for node in order])
        weights = leaves.joined("weights")[rows][:, : len(places)].astype(float)
        return Branches(
            case, np.array(axes), np.array(cuts), weights * scales,
            np.array(forces, float), self._slopes(leaves, rows),
        )  # fmt: skip

    def _slopes(self, leaves: "_Leaves", rows: np.ndarray) -> tuple:
        below, above = leaves.joined("below")[rows], leaves.joined("above")[rows]
        found = []
        for layer in self.form.layers.values():
            shape = len(rows), *layer.shape
            if layer.maximum:
                found.append(None)
            elif layer.relu:
                slopes = np.clip(below[:, layer.some].reshape(shape), 0, 1)
                found.append((slopes.astype("<f4" if self.form.curved else "<f2"), None))
            else:
                found.append((below[:, layer.some].reshape(shape).astype("<f4"),
                              above[:, layer.some].reshape(shape).astype("<f4")))  # fmt: skip
        return tuple(found)


class _Leaves:
    """What refutes each leaf, from all steps of a search."""

    def __init__(self, tree: Tree):
        self._batches = tree.leaves
        self.rows: dict[int, int] = {}
        self.forces: dict[int, dict[int, float]] = {}
        self._held: dict[str, np.ndarray] = {}
        count = 0
        for batch in tree.leaves:
            nodes = batch["node"].tolist()
            for node in nodes:
                self.rows[node] = count
                self.forces[node] = {}
                count += 1
            for leaf, neuron, force in zip(
                batch["leaf"].tolist(),
                batch["neuron"].tolist(),
                batch["force"].tolist(),
                strict=True,
            ):
                self.forces[nodes[leaf]][neuron] = force

    def joined(self, name: str) -> np.ndarray:
        """An array of all leaves, in the order of `rows`."""
        if name not in self._held:
            self._held[name] = np.concatenate([batch[name] for batch in self._batches])
        return self._held[name]


def _forces_of(path: tuple[tuple[int, int], ...], forces: dict[int, float]) -> list[float]:
    """The force of every split on a path; of several on one side of a neuron the last has it."""
    found, left = [0.0] * len(path), dict(forces)
    for k in range(len(path) - 1, -1, -1):
        neuron, side = path[k]
        force = left.get(neuron, 0.0)
        if math.copysign(1, force) == side and force:
            found[k] = abs(force)
            del left[neuron]
    return found
