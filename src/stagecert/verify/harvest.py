"""What a finished tree hands over: the trees of its roots in preorder, and what refutes leaves."""

import math
from dataclasses import dataclass

import numpy as np

from stagecert.verify.branches import LEAF
from stagecert.verify.tree import Tree


@dataclass(frozen=True, eq=False)
class Walk:
    """The tree of one root in preorder.

    Attributes:
        neurons: of every node the neuron that is split there, or -1 for a leaf.
        cuts: where.
        order: the nodes that are leaves.
        forces: for every leaf one for each split on the way to it, not negative.
        stations: by node, in preorder: the station that begins there.
    """

    neurons: np.ndarray
    cuts: np.ndarray
    order: np.ndarray
    forces: list[float]
    stations: dict[int, int]


def walked(tree: Tree, root: int, leaves: "Leaves") -> Walk:
    """Goes through the tree of a root that is refuted."""
    child, neuron, cut = (tree.nodes[name] for name in ("child", "neuron", "cut"))
    neurons, cuts, order, forces, stations = [], [], [], [], {}
    stack: list[tuple[int, tuple[tuple[int, int], ...]]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        # A node has the station of its parent, or one of its own.
        station, parent = int(tree.nodes["station"][node]), int(tree.nodes["parent"][node])
        if station >= 0 and (parent < 0 or tree.nodes["station"][parent] != station):
            stations[len(neurons)] = station
        if child[node] < 0:
            neurons.append(LEAF)
            cuts.append(0.0)
            order.append(node)
            forces += _forces_of(path, leaves.forces[node])
            continue
        j = int(neuron[node])
        neurons.append(j)
        cuts.append(float(cut[node]))
        first = int(child[node])
        stack += [(first + 1, (*path, (j, -1))), (first, (*path, (j, 1)))]
    return Walk(np.array(neurons), np.array(cuts), np.array(order), forces, stations)


class Leaves:
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
