"""The complete search: cases are refuted on a tree of splits of neurons, many nodes at a time."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.verify.ascent import Found, ascend
from stagecert.verify.choosing import parts_bounds, split_points, undecided_maxima
from stagecert.verify.corners import solve
from stagecert.verify.nodes import Form, Lanes, default_slopes
from stagecert_check.graph import Program

# Lanes at a time: so many that the arrays of all fit into the caches, but not more than this.
LANES, LANE_NUMBERS = 512, 100_000
# Steps of ascent on a root, on another node, and one more for so many splits of it.
ROOT_STEPS, NODE_STEPS, MORE_STEPS_EVERY = 30, 6, 12
# Neurons whose split is tried before one is chosen.
TRIED = 3


@dataclass(frozen=True, eq=False)
class Root:
    """A case to refute on its box.

    Attributes:
        group, case: the group, and the case's place in it.
        box: the ends of the inputs.
        low, high: intervals of all arguments of activations, side by side.
        rows, limits: the case's rows; a counterexample has rows @ outputs <= limits.
        margin: what a bound in single precision must exceed.
    """

    group: int
    case: int
    box: tuple[np.ndarray, np.ndarray]
    low: np.ndarray
    high: np.ndarray
    rows: np.ndarray
    limits: np.ndarray
    margin: float


class Grown:
    """Arrays with one row for each of a growing number of things."""

    def __init__(self, **kinds):
        self.count = 0
        self._arrays = {
            name: np.empty((64, *shape), dtype) for name, (shape, dtype) in kinds.items()
        }

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name][: self.count]

    def extend(self, **rows) -> None:
        """Adds rows at the end."""
        more = len(next(iter(rows.values())))
        for name, array in self._arrays.items():
            if self.count + more > len(array):
                room = max(2 * len(array), self.count + more)
                larger = np.empty((room, *array.shape[1:]), array.dtype)
                larger[: self.count] = array[: self.count]
                self._arrays[name] = array = larger
            array[self.count : self.count + more] = rows[name]
        self.count += more

    def pop(self, count: int) -> dict[str, np.ndarray]:
        """Takes the last rows away."""
        self.count -= count
        return {name: x[self.count : self.count + count].copy() for name, x in self._arrays.items()}


@dataclass
class Met:
    """What a step met: points of inputs, the roots whose cases they might violate, and bounds."""

    points: np.ndarray
    roots: np.ndarray
    bounds: np.ndarray


class Tree:
    """Splits neurons until every root is refuted, or a caller has had enough.

    Attributes:
        seen: how many nodes were bounded.
        closed: which share of the roots is refuted, if the parts of a split count alike.
        worst: the smallest bound of the last step.
        stuck: whether a node can neither be split nor refuted.
    """

    def __init__(
        self, program: Program, form: Form, roots: list[Root], *, memory=1.0, keep: bool = True
    ):
        self.program, self.form, self.roots, self.keep = program, form, roots, keep
        n, width = form.neurons, max(len(root.rows) for root in roots)
        self.batch = int(np.clip(LANE_NUMBERS // max(n, 1), 16, LANES))
        self.above = n if form.curved else 0
        self.stack = Grown(
            root=((), np.int32), node=((), np.int64), depth=((), np.int32),
            low=((n,), np.float32), high=((n,), np.float32), held=((n,), np.int8),
            below=((n,), np.float32 if form.curved else np.float16),
            above=((self.above,), np.float32), force=((n,), np.float32),
            weights=((width,), np.float32), scale=((), np.float32),
        )  # fmt: skip
        of_node = 17 * n + 4 * self.above + 4 * width + 32
        self.most = max(int(0.5 * memory * 2**30 / of_node), 64)
        # All nodes that were ever made: where each was split, and where its parts are.
        self.nodes = Grown(parent=((), np.int64), child=((), np.int64), neuron=((), np.int32),
                           cut=((), np.float64), root=((), np.int32))  # fmt: skip
        self.leaves: list[dict[str, Any]] = []
        self.rows = np.zeros((len(roots), width, roots[0].rows.shape[1]), np.float32)
        self.limits = np.full((len(roots), width), np.inf, np.float32)
        for k, root in enumerate(roots):
            self.rows[k, : len(root.rows)] = root.rows
            self.limits[k, : len(root.rows)] = root.limits
        known = np.isfinite(self.limits)
        self.margin = np.array([root.margin for root in roots], np.float32)
        self.boxes = [np.stack([root.box[k] for root in roots]).astype(np.float32) for k in (0, 1)]
        # How large cotangents are at the roots, layer by layer.
        self.units = np.zeros((len(roots), len(form.layers)), np.float32)
        self.seen, self.closed, self.worst, self.stuck = 0, 0.0, -np.inf, False
        self._plant(known)

    def _plant(self, known) -> None:
        count, n = len(self.roots), self.form.neurons
        low = np.stack([root.low for root in self.roots]).astype(np.float32)
        high = np.stack([root.high for root in self.roots]).astype(np.float32)
        nothing = np.full(count, -1)
        self.nodes.extend(parent=nothing, child=nothing, neuron=nothing, cut=np.zeros(count),
                          root=np.arange(count))  # fmt: skip
        below, above = default_slopes(self.form, low, high)
        self.stack.extend(
            root=np.arange(count), node=np.arange(count), depth=np.zeros(count), low=low, high=high,
            held=np.zeros((count, n)), below=below, above=above[:, : self.above],
            force=np.zeros((count, n)), weights=known / np.sum(known, axis=1, keepdims=True),
            scale=np.ones(count),
        )  # fmt: skip

    def reopen(self, nodes, below, above, force, weights) -> None:
        """Puts refuted leaves back, with what they rested on: the checker does not follow there.

        From now on, bounds of these roots have to be better.
        """
        root = self.nodes["root"][nodes]
        self.margin[np.unique(root)] *= 8
        low = np.stack([self.roots[k].low for k in root]).astype(np.float32)
        high = np.stack([self.roots[k].high for k in root]).astype(np.float32)
        held, depth = np.zeros(low.shape, np.int8), np.zeros(len(nodes), np.int32)
        for k, node in enumerate(nodes):
            while (parent := int(self.nodes["parent"][node])) >= 0:
                j, cut = self.nodes["neuron"][parent], np.float32(self.nodes["cut"][parent])
                if self.nodes["child"][parent] == node:
                    high[k, j], held[k, j] = min(high[k, j], cut), held[k, j] | 2
                else:
                    low[k, j], held[k, j] = max(low[k, j], cut), held[k, j] | 1
                depth[k] += 1
                node = parent
        self.closed -= float(np.sum(0.5**depth)) / len(self.roots)
        self.stack.extend(
            root=root, node=nodes, depth=depth, low=low, high=high, held=held, below=below,
            above=above, force=force, weights=weights, scale=np.ones(len(nodes)),
        )  # fmt: skip

    @property
    def done(self) -> bool:
        """Whether every root is refuted."""
        return not len(self.stack) and not self.stuck

    def step(self) -> Met:
        """Bounds the nodes on top of the stack, closes what is refuted and splits the others."""
        room = max((self.most - len(self.stack)) // 2, 1)
        taken = self.stack.pop(min(self.batch, len(self.stack), room))
        root = taken["root"]
        below = taken["below"].astype(np.float32)
        lanes = Lanes(
            (self.boxes[0][root], self.boxes[1][root]), taken["low"], taken["high"], taken["held"],
            self.rows[root], self.limits[root], below, taken["above"] if self.above else below,
            taken["force"], taken["weights"], self.units[root], taken["scale"],
        )  # fmt: skip
        whole = bool(np.any(taken["depth"] == 0))
        margin = self.margin[root]
        steps = min(NODE_STEPS + int(np.max(taken["depth"])) // MORE_STEPS_EVERY, ROOT_STEPS)
        found = ascend(self.form, lanes, ROOT_STEPS if whole else steps, margin)
        if whole:
            first = taken["depth"] == 0
            self.units[root[first]] = found.units[first]
        refuted = np.isfinite(found.bound) & (found.bound > margin)
        self.seen += len(root)
        self.worst = float(np.min(found.bound))
        for k in np.flatnonzero(~refuted & ~(found.scores > 0).any(axis=1)):
            refuted[k] = self._solve(found, int(k))
        self._close(taken, found, np.flatnonzero(refuted))
        open_ = np.flatnonzero(~refuted)
        if len(open_) and not self.stuck:
            self._split(taken, found, open_)
        return Met(found.points[open_], root[open_], found.bound[open_])

    def _close(self, taken, found: Found, rows) -> None:
        self.closed += float(np.sum(0.5 ** taken["depth"][rows])) / len(self.roots)
        if not self.keep or not len(rows):
            return
        force = found.lanes.force[rows]
        leaf, neuron = np.nonzero(force)
        kind = np.float32 if self.form.curved else np.float16
        self.leaves.append({
            "node": taken["node"][rows], "weights": found.lanes.weights[rows],
            "below": found.lanes.below[rows].astype(kind),
            "above": found.lanes.above[rows, : self.above],
            "leaf": leaf, "neuron": neuron, "force": force[leaf, neuron],
        })  # fmt: skip

    def _solve(self, found: Found, k: int) -> bool:
        """Whether a node is refuted on which nothing is left to split; it is stuck if not."""
        if self.form.curved and not all(
            layer.maximum or hasattr(layer.function, "knots") for layer in self.form.layers.values()
        ):
            self.stuck = True
            return False
        if undecided_maxima(self.form, found.lanes[k : k + 1]):
            self.stuck = True
            return False
        corner = solve(self.program, self.form, found.lanes[k : k + 1])
        if corner.weights is None:
            self.stuck = True
            found.points[k] = found.points[k] if corner.point is None else corner.point
            return False
        # These numbers may be precise to the last digit.
        lanes = found.lanes
        lanes.weights, lanes.force = lanes.weights.astype(float), lanes.force.astype(float)
        lanes.weights[k], lanes.force[k] = corner.weights, corner.force
        if self.form.curved:
            # What was solved has the slopes of the linear pieces, and not those of the ascent.
            ends = lanes.low[k : k + 1], lanes.high[k : k + 1]
            (lanes.below[k],), (lanes.above[k],) = default_slopes(self.form, *ends)
        return True

    def _split(self, taken, found: Found, open_) -> None:
        lanes, scores = found.lanes[open_], found.scores[open_]
        tried = min(TRIED, scores.shape[1])
        picks = np.argpartition(-scores, tried - 1, axis=1)[:, :tried]
        gains = parts_bounds(self.form, lanes, picks)
        possible = np.take_along_axis(scores, picks, axis=1) > 0
        worth = np.where(possible, _worth(gains, found.bound[open_]), -np.inf)
        best = np.argmax(worth, axis=1)
        at = np.arange(len(best))
        neuron = picks[at, best]
        cuts = split_points(self.form, lanes.low, lanes.high)[at, neuron]
        self._push(taken, lanes, open_, neuron, cuts, gains[at, best].reshape(-1))

    def _push(self, taken, lanes: Lanes, open_, neuron, cuts, bounds) -> None:
        first = len(self.nodes) + 2 * np.arange(len(open_))
        parent, root = taken["node"][open_], taken["root"][open_]
        for name, values in (("child", first), ("neuron", neuron), ("cut", cuts)):
            self.nodes[name][parent] = values
        both = np.repeat(np.arange(len(open_)), 2)
        nothing = np.full(len(both), -1)
        self.nodes.extend(parent=parent[both], child=nothing, neuron=nothing,
                          cut=np.zeros(len(both)), root=root[both])  # fmt: skip
        at = np.arange(len(both))
        above = at % 2 == 1
        # The worse part goes on top: a counterexample is more likely there.
        order = np.argsort(-bounds, kind="stable")
        parts = lanes[both]
        j, cut = neuron[both], cuts[both]
        parts.low[at, j] = np.where(above, cut, parts.low[at, j])
        parts.high[at, j] = np.where(above, parts.high[at, j], cut)
        parts.held[at, j] |= np.where(above, 1, 2).astype(np.int8)
        fields = {
            "root": root[both], "node": (first[:, None] + [0, 1]).reshape(-1),
            "depth": taken["depth"][open_][both] + 1, "low": parts.low, "high": parts.high,
            "held": parts.held, "below": parts.below, "above": parts.above[:, : self.above],
            "force": parts.force, "weights": parts.weights, "scale": parts.scale,
        }  # fmt: skip
        self.stack.extend(**{name: x[order] for name, x in fields.items()})


def _worth(parts: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """How good splits are: what both parts gain together, up to their refutation."""
    return np.sum(np.minimum(parts, 0) - np.minimum(bound, 0)[:, None, None], axis=2)
