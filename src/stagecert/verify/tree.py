"""The complete search: cases are refuted on a tree of splits of neurons, many nodes at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagecert.verify.ascent import Found, ascend
from stagecert.verify.choosing import parts_bounds, split_points, undecided_maxima
from stagecert.verify.corners import solve
from stagecert.verify.gpu import placed
from stagecert.verify.nodes import Form, Lanes, default_slopes
from stagecert.verify.stations import STEPS, Station, parts_of
from stagecert_check.graph import Program

# Steps of ascent on a root, and one more on other nodes for so many splits of them.
ROOT_STEPS, MORE_STEPS_EVERY = 30, 12
# Steps on the nodes of a new station: slopes and forces are those of the one before.
STATION_STEPS = 12
# So many steps of passes back cost what a node does; stations that are split at a time.
STEPS_A_NODE, STATIONS_AT_ONCE = 10, 16
# Neurons whose split of a station is tried, and steps on the nodes of its parts then.
TRIED_AT_STATIONS, TRIAL_STEPS = 6, 3


@dataclass(frozen=True)
class Pace:
    """How much is done at a time.

    Attributes:
        lanes: nodes, at most.
        steps: of ascent on a node that is no root.
        tried: neurons whose split is tried before one is chosen.
    """

    lanes: int
    steps: int
    tried: int


# On a GPU steps cost next to nothing, and every leaf has to be checked on a processor.
HERE, THERE = Pace(512, 6, 3), Pace(4096, 16, 8)


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

    def keep(self, some: np.ndarray) -> None:
        """Keeps those rows for which it says so."""
        left = np.flatnonzero(some)
        for array in self._arrays.values():
            array[: len(left)] = array[left]
        self.count = len(left)

    def taken(self, some: np.ndarray) -> dict[str, np.ndarray]:
        """Takes those rows away for which it says so."""
        rows = {name: x[: self.count][some] for name, x in self._arrays.items()}
        self.keep(~some)
        return rows

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


@dataclass(eq=False)
class Plot:
    """The nodes of all open cases at one station, and what grows below them.

    Attributes:
        station: its number; -1 is the whole box.
        fields: rows of the stack for its nodes, and then what these were bounded with.
        scores: of neurons, added up over the cases that their first bounds left open.
        budget: nodes that may be seen before the station itself is split.
        seen: nodes so far.
        closed: by root, the share that was refuted here.
    """

    station: int
    fields: dict[str, np.ndarray]
    scores: np.ndarray
    budget: float
    seen: int = 0
    closed: dict[int, float] = field(default_factory=dict)

    def __post_init__(self):
        self.places = {int(node): k for k, node in enumerate(self.fields["node"])}


class Tree:
    """Splits neurons until every root is refuted, or a caller has had enough.

    Attributes:
        seen: how many nodes were bounded.
        closed: which share of the roots is refuted, if the parts of a split count alike.
        worst: the smallest bound of the last step.
        stuck: whether a node can neither be split nor refuted.
        lost: by root, whether it was given up.
        spare: bytes that passes of stations may take.
        lender: the `lending.Lender` that has other processes work on parts of the tree, or None.
    """

    lender: Any = None

    def __init__(
        self, program: Program, form: Form, roots: list[Root], *, memory=1.0, keep: bool = True,
        patience: int | None = None,
    ):  # fmt: skip
        """Plants the roots.

        Args:
            program: the network, as the checker reads it.
            form: the same in single precision.
            roots: the cases.
            memory: GiB that the nodes may take.
            keep: whether what refutes leaves is kept.
            patience: nodes of a root after which it is given up; then there are no stations.
        """
        self.program, self.roots, self.keep = program, roots, keep
        self.settle(form)
        self.patience, self.nodes_of = patience, np.zeros(len(roots), int)
        self.lost = np.zeros(len(roots), bool)
        n, width = form.neurons, max(len(root.rows) for root in roots)
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
                           cut=((), np.float64), root=((), np.int32),
                           station=((), np.int32))  # fmt: skip
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
        self.stop: Callable[[], bool] = lambda: False
        self.stations: list[Station] = []
        self.plots: list[Plot] = []  # that wait; the last is next
        self.active = {-1: self._plant(known)}  # those of the nodes on the stack, by station
        # And what passes of a split of a station take at a time.
        self.spare = 0.5 * memory * 2**30
        self._bytes_a_node = 12 * n * STEPS_A_NODE / STEPS

    def settle(self, form: Form) -> None:
        """Works with a form from now on, on a GPU if there is one."""
        placed(form)
        self.form, self.pace = form, HERE if form.there is None else THERE
        self.batch = min(form.lanes_at_once(len(self.roots[0].box[0])), self.pace.lanes)

    def _plant(self, known) -> Plot:
        count, n = len(self.roots), self.form.neurons
        low = np.stack([root.low for root in self.roots]).astype(np.float32)
        high = np.stack([root.high for root in self.roots]).astype(np.float32)
        nothing = np.full(count, -1)
        self.nodes.extend(parent=nothing, child=nothing, neuron=nothing, cut=np.zeros(count),
                          root=np.arange(count), station=nothing)  # fmt: skip
        below, above = default_slopes(self.form, low, high)
        fields = {
            "root": np.arange(count), "node": np.arange(count), "depth": np.zeros(count),
            "low": low, "high": high, "held": np.zeros((count, n), np.int8), "below": below,
            "above": above[:, : self.above], "force": np.zeros((count, n), np.float32),
            "weights": known / np.sum(known, axis=1, keepdims=True),
            "scale": np.ones(count, np.float32),
        }  # fmt: skip
        self.stack.extend(**fields)
        # Of curves, and of products of earlier values, slopes that hold at a station are not known.
        alone = len({root.group for root in self.roots}) == 1 and not self.form.curved
        alone &= self.patience is None and not self.form.dear
        budget = self._budget(low[0], high[0]) if alone else np.inf
        return Plot(-1, fields, np.zeros(n), budget)

    def _budget(self, low: np.ndarray, high: np.ndarray) -> float:
        """How many nodes cost about what the passes back for two parts of a station do."""
        rows = 0
        for layer in list(self.form.layers.values())[1:]:
            ends = (x[layer.some].astype(float).reshape(1, *layer.shape) for x in (low, high))
            rows += 0 if layer.maximum else int(np.sum(layer.function.bent(*ends)))
        return 4 * rows * STEPS / STEPS_A_NODE

    def reopen(self, nodes, below, above, force, weights) -> None:
        """Puts refuted leaves back, with what they rested on: the checker does not follow there.

        From now on, bounds of these roots have to be better.
        """
        root, n = self.nodes["root"][nodes], self.form.neurons
        self.margin[np.unique(root)] *= 8
        at = self.nodes["station"][nodes]
        known = [self.stations[s] if s >= 0 else self.roots[k]
                 for s, k in zip(at, root, strict=True)]  # fmt: skip
        low = np.stack([one.low for one in known]).astype(np.float32)
        high = np.stack([one.high for one in known]).astype(np.float32)
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
        # Nothing is known of these stations' other nodes any more: they are not split again.
        for number in np.unique(at).tolist():
            self.active[number] = Plot(number, {"node": nodes[:0]}, np.zeros(n), np.inf)
        self.stack.extend(
            root=root, node=nodes, depth=depth, low=low, high=high, held=held, below=below,
            above=above, force=force, weights=weights, scale=np.ones(len(nodes)),
        )  # fmt: skip

    @property
    def done(self) -> bool:
        """Whether every root is refuted."""
        away = self.lender is not None and self.lender.loans
        return not len(self.stack) and not self.plots and not self.stuck and not away

    def step(self) -> Met:
        """Bounds the nodes on top of the stack, closes what is refuted and splits the others."""
        if self.lender is not None:
            self.lender.tend()
            if not len(self.stack) and not self.plots:
                self.lender.wait()
                return self._nothing()
        # Only finite bounds count, and products of matrices warn of numbers that are not theirs.
        with np.errstate(all="ignore"):
            return self._step()

    def _step(self) -> Met:
        if self._deepen():
            return self._nothing()
        self._refill()
        room = max((self.most - len(self.stack)) // 2, 1)
        taken = self.stack.pop(min(self.batch, len(self.stack), room))
        root, lanes = taken["root"], self._lanes(taken)
        whole = bool(np.any(taken["depth"] == 0))
        margin = self.margin[root]
        steps = min(self.pace.steps + int(np.max(taken["depth"])) // MORE_STEPS_EVERY, ROOT_STEPS)
        if any(not self.active[k].seen for k in np.unique(self.nodes["station"][taken["node"]])):
            steps = STATION_STEPS
        steps = ROOT_STEPS if whole else steps
        found = ascend(self.form, lanes, steps, margin, fresh=whole)
        if whole:
            first = taken["depth"] == 0
            self.units[root[first]] = found.units[first]
        refuted = np.isfinite(found.bound) & (found.bound > margin)
        self.seen += len(root)
        self.worst = float(np.min(found.bound))
        for k in np.flatnonzero(~refuted & ~(found.scores > 0).any(axis=1)):
            if self.patience is None:
                refuted[k] = self._solve(found, int(k))
            else:
                self.give_up(np.arange(len(self.roots)) == root[k])
        self._close(taken, found, np.flatnonzero(refuted))
        open_ = np.flatnonzero(~refuted)
        self._note(taken, found, open_)
        met = Met(found.points[open_], root[open_], found.bound[open_])
        if self.patience is not None:
            np.add.at(self.nodes_of, root, 1)
            self.give_up(self.nodes_of > self.patience)
            open_ = open_[~self.lost[root[open_]]]
        if len(open_) and not self.stuck:
            self._split(taken, found, open_)
        return met

    def _nothing(self) -> Met:
        return Met(self.boxes[0][:0], np.zeros(0, int), np.zeros(0))

    def give_up(self, roots: np.ndarray) -> None:
        """Leaves some roots as they are: no more of their nodes are bounded."""
        new = roots & ~self.lost
        if new.any():
            self.lost |= new
            self.stack.keep(~self.lost[self.stack["root"]])

    def _lanes(self, taken: dict[str, np.ndarray]) -> Lanes:
        """Rows of the stack as lanes."""
        root, below = taken["root"], taken["below"].astype(np.float32)
        return Lanes(
            (self.boxes[0][root], self.boxes[1][root]), taken["low"], taken["high"], taken["held"],
            self.rows[root], self.limits[root], below, taken["above"] if self.above else below,
            taken["force"], taken["weights"].astype(np.float32), self.units[root], taken["scale"],
        )  # fmt: skip

    def _note(self, taken, found: Found, open_) -> None:
        """Keeps what the nodes of stations were bounded with."""
        station = self.nodes["station"][taken["node"]]
        numbers, counts = np.unique(station, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.active[number].seen += count
        for k in open_:
            plot = self.active[int(station[k])]
            at = plot.places.get(int(taken["node"][k]))
            if at is not None:
                plot.scores += found.scores[k]
                for name in ("below", "force", "weights", "scale"):
                    plot.fields[name][at] = getattr(found.lanes, name)[k]
                plot.fields["above"][at] = found.lanes.above[k, : self.above]

    def _refill(self) -> None:
        """Takes up stations that wait, so that there is a batch of nodes to bound."""
        while self.plots and 2 * len(self.stack) < self.batch:
            plot = self.plots.pop()
            self.active[plot.station] = plot
            self.stack.extend(**plot.fields)

    def _deepen(self) -> bool:
        """Splits stations that have had their share of nodes, for all cases that are open there.

        Whether there were any.
        """
        of = self.nodes["station"][self.stack["node"]]
        due, splits, spare = [], [], self.spare
        for number in np.unique(of).tolist():
            plot = self.active[number]
            if plot.seen > plot.budget and len(due) < STATIONS_AT_ONCE:
                # Not more than memory is left for; without it, there are only nodes.
                cost = plot.budget * self._bytes_a_node + 1
                known = self.stations[number] if number >= 0 else self._root_station()
                some = self._station_splits(plot, known)[: max(int(spare // cost), 0)]
                if not some:
                    plot.budget = plot.budget if due else np.inf
                    continue
                spare -= len(some) * cost
                due.append((plot, slice(len(splits), len(splits) + len(some))))
                splits += [(known, *split) for split in some]
        box = self.boxes[0][0], self.boxes[1][0]
        found = parts_of(self.form, box, splits, self.stop) if due else None
        if found is None:
            return False
        for plot, some in due:
            open_ = np.unique(self.stack["root"][of == plot.station])
            parts = found[2 * some.start : 2 * some.stop]
            k = self._best(plot, splits[some], open_, parts)
            self._divide(plot, splits[some][k][1:], open_, parts[2 * k : 2 * k + 2])
            del self.active[plot.station]
        self.stack.keep(~np.isin(of, [plot.station for plot, _ in due]))
        return True

    def _best(self, plot: Plot, splits, open_, parts: list[Station]) -> int:
        """Which of some splits of a station is best for the cases that are open there."""
        if len(splits) == 1:
            return 0
        cases = np.flatnonzero(np.isin(plot.fields["root"], open_))
        of, rows = (x.reshape(-1) for x in np.meshgrid(np.arange(len(parts)), cases, indexing="ij"))
        fields = {name: x[rows] for name, x in plot.fields.items()}
        neuron = np.array([neuron for _, neuron, _ in splits])[of // 2]
        fields["held"][np.arange(len(of)), neuron] |= np.where(of % 2, 1, 2).astype(np.int8)
        for name in ("low", "high"):
            fields[name] = np.stack([getattr(station, name) for station in parts])[of]
        found = ascend(
            self.form, self._lanes(fields), TRIAL_STEPS, self.margin[fields["root"]], fresh=False
        )
        empty = np.array([station.empty for station in parts])[of]
        missing = np.where(empty, 0, np.minimum(found.bound, 0))
        return int(np.argmax(np.bincount(of // 2, missing)))

    def _divide(self, plot: Plot, split: tuple[int, float], open_, parts: list[Station]) -> None:
        """Both parts of a station get the cases that are open, and begin anew with them."""
        neuron, cut = split
        self.closed -= sum(plot.closed.get(int(k), 0.0) for k in open_)
        mine = {name: x[np.isin(plot.fields["root"], open_)] for name, x in plot.fields.items()}
        first = len(self.nodes) + 2 * np.arange(len(open_))
        for name, values in (("child", first), ("neuron", neuron), ("cut", cut)):
            self.nodes[name][mine["node"]] = values
        both = np.repeat(np.arange(len(open_)), 2)
        nothing, numbers = np.full(len(both), -1), len(self.stations) + np.arange(2)
        self.nodes.extend(parent=mine["node"][both], child=nothing, neuron=nothing,
                          cut=np.zeros(len(both)), root=mine["root"][both],
                          station=np.tile(numbers, len(open_)))  # fmt: skip
        self.stations += parts
        self.spare -= sum(station.size for station in parts)
        for side, station in enumerate(parts):
            fields = {name: x.copy() for name, x in mine.items()}
            fields["node"], fields["depth"] = first + side, mine["depth"] + 1
            fields["low"][:], fields["high"][:] = station.low, station.high
            fields["held"][:, neuron] |= 1 if side else 2
            if station.empty:
                self._abandon(fields)
                continue
            budget = self._budget(station.low, station.high)
            self.plots.append(Plot(int(numbers[side]), fields, np.zeros(self.form.neurons), budget))

    def _root_station(self) -> Station:
        low, high = (x.astype(np.float32) for x in (self.roots[0].low, self.roots[0].high))
        return Station((), low, high, {})

    def _station_splits(self, plot: Plot, known: Station) -> list[tuple[int, float]]:
        """Neurons at which to split a station, and where; none if later layers have no need."""
        scores, last = plot.scores.copy(), 0
        for k, layer in enumerate(self.form.layers.values()):
            ends = (x[layer.some].astype(float).reshape(1, *layer.shape)
                    for x in (known.low, known.high))  # fmt: skip
            bent = not layer.maximum and np.any(layer.function.bent(*ends))
            last = k if bent else last
        start = list(self.form.layers.values())[last].some.start
        scores[start:] = 0
        best = np.argsort(-scores, kind="stable")[:TRIED_AT_STATIONS]
        cuts = split_points(self.form, known.low[None], known.high[None])[0]
        return [(int(k), float(cuts[k])) for k in best if scores[k] > 0]

    def _abandon(self, fields) -> None:
        """Closes nodes whose splits contradict each other: the checker sees that too."""
        self.closed += float(np.sum(0.5 ** fields["depth"])) / len(self.roots)
        if self.keep:
            self.leaves.append({
                "node": fields["node"], "weights": fields["weights"], "below": fields["below"],
                "above": fields["above"], "leaf": np.zeros(0, int), "neuron": np.zeros(0, int),
                "force": np.zeros(0),
            })  # fmt: skip

    def _close(self, taken, found: Found, rows) -> None:
        station = self.nodes["station"][taken["node"]]
        for k in rows.tolist():
            share, root = float(0.5 ** taken["depth"][k]) / len(self.roots), int(taken["root"][k])
            self.closed += share
            plot = self.active[int(station[k])]
            plot.closed[root] = plot.closed.get(root, 0.0) + share
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
        tried = min(self.pace.tried, scores.shape[1])
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
                          cut=np.zeros(len(both)), root=root[both],
                          station=self.nodes["station"][parent][both])  # fmt: skip
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
