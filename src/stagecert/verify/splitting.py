"""Branch and bound over the inputs: boxes are halved until each is decided, many at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import Network
from stagecert.networks.bounding.relaxation import Split, split
from stagecert.networks.bounding.stepwise import Passes, rows_at_once
from stagecert.networks.regions import regions_of
from stagecert.powers import power_below
from stagecert.problem import as_arrays
from stagecert.verify.checked import CheckedPasses, Known
from stagecert.verify.cutting import gains, telling
from stagecert.verify.grafts import Graft, Grafter
from stagecert.verify.mixing import mix
from stagecert.verify.nodes import Form
from stagecert.verify.queries import Group, for_users, shaped
from stagecert_check.checker import Checker
from stagecert_check.functions import Refused

# Inputs with more free entries than this are not split.
LARGEST_DIMENSION = 24
# Boxes at a time.
BATCH = 256
FEW = 8
# So many boxes are bounded by the checker's passes, which need no compilation. After these,
# compiled passes are faster by more than compiling takes, unless most inputs are fixed: these the
# checker leaves out; or trees of splits of neurons are grown on boxes, which need its facts.
CHECKED_BOXES, MOSTLY_FIXED = 2**15, 0.25
# How much the change of a linear bound counts beside what cuts of a box gain at its neurons.
SLOPE_SHARE = 0.25
# How much more trees on boxes must exceed their limits once the checker has not followed.
MORE_MARGIN = 8
# Neurons times boxes that cost next to nothing.
CHEAP_NUMBERS = 100_000
# Points times cases whose violations are computed, and coefficients that are mixed, at a time.
POINT_NUMBERS = 4_000_000
MIXED_NUMBERS = 4_000_000


@dataclass
class Tree:
    """How the boxes were cut, and which row refutes which case on each box that was closed.

    Nodes are numbered; the first ones are the boxes of the groups. Node k has the children
    `children[k]` and `children[k] + 1` where it was cut along `axis[k]` at `cut[k]`: the first one
    below the cut, the second one above. `closed` holds (node, case, row, bound), with the case's
    and the row's places in their group. A case that is closed on a node is closed below it too.
    Where no row does it alone, `mixed` has weights for all rows of the group, by (node, case).
    What trees of splits of neurons have closed is in `grafts` instead, by (node, case). Where there
    may be such trees, `below` has the default slopes on nodes that rows have closed, as bits.
    """

    group: list[int] = field(default_factory=list)
    children: dict[int, int] = field(default_factory=dict)
    axis: dict[int, int] = field(default_factory=dict)
    cut: dict[int, float] = field(default_factory=dict)
    closed: list[tuple[int, int, int, float]] = field(default_factory=list)
    mixed: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    grafts: dict[tuple[int, int], Graft] = field(default_factory=dict)
    below: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, group: int) -> int:
        """A new node."""
        self.group.append(group)
        return len(self.group) - 1


@dataclass
class Boxes:
    """A stack of boxes. Only entries of the input that are free in some group are kept."""

    lower: np.ndarray
    upper: np.ndarray
    group: np.ndarray
    node: np.ndarray
    open: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, rows) -> "Boxes":
        return Boxes(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def joined(self, other: "Boxes") -> "Boxes":
        """These boxes and others on top of them."""
        return Boxes(
            *(
                np.concatenate([getattr(self, name), getattr(other, name)])
                for name in self.__dataclass_fields__
            )
        )


class Splitter:
    """Splits the boxes of groups until every case is refuted, or a caller has had enough.

    Attributes:
        stack: the boxes that are not decided yet.
        tree: how they came about; None unless asked for.
        finished: which share of each group's box is decided.
        seen: how many boxes were bounded.
        proven: (groups, cases), in the units of the property: the violation is proven to be at
            least this on all boxes on which the case was closed. Infinite where there are none.
    """

    def __init__(
        self,
        network: Network,
        groups: tuple[Group, ...],
        open_cases: list[np.ndarray],
        *,
        keep: bool = False,
        memory: float = 1.0,
        checker: Checker | None = None,
    ):
        """Begins with the boxes of all groups.

        Args:
            network: whose outputs the rows of the groups combine.
            groups: the boxes with their cases and rows.
            open_cases: which of them are open, by group.
            keep: whether the tree is kept.
            memory: GiB that arrays may take.
            checker: bounds boxes by its own passes, where that is faster than compiled ones.
        """
        self.network, self.groups, self.checker = network, groups, checker
        # What they find is single precision's word: they are for those who have it checked.
        self.form = None if checker is None else Form(checker.program)
        self.grafter = None
        if keep and checker is not None and self.form is not None and Grafter.able(checker.program):
            self.grafter = Grafter(checker.program, self.form)
        # What cuts gain is only known of networks whose neurons all say what their lines lose.
        self.weighs = self.form is not None and telling(self.form)
        lower = np.stack([group.inputs.lower64 for group in groups]).astype(float)
        upper = np.stack([group.inputs.upper64 for group in groups]).astype(float)
        self.base = lower, upper
        self.free = np.flatnonzero(np.any(divisible(lower, upper), axis=0))
        with jax.enable_x64(True):
            self.parts = as_arrays(split(network), jnp.float64)
            self.double = as_arrays(network, jnp.float64)
        cases = max(len(group.numbers) for group in groups)
        rows = max(max(len(group.rows) for group in groups), 1)
        # How many rows a case has, at most.
        widest = max(1, *(len(places) for group in groups for places in group.places))
        entries, outputs = lower.shape[1], network.output_size
        self.batch = boxes_at_once(
            self.parts, rows * (6 * entries + 2 * outputs) + 4 * cases * widest, memory
        )
        # Points of a box that are tried as counterexamples: all, unless there are many rows.
        self.points = int(np.clip(POINT_NUMBERS // (self.batch * cases * widest), 2, rows + 1))
        neurons = sum(math.prod(layer.shape) for layer in self.parts.layers)
        # A batch is filled up, so that one compilation serves all. Where filling is expensive, few
        # boxes have a size of their own.
        dear = self.batch > FEW and neurons * self.batch > CHEAP_NUMBERS
        self.sizes = [FEW, self.batch] if dear else [self.batch]
        self.lanes = rows_at_once(self.parts, memory)
        self.matrix = np.zeros((len(groups), rows, network.output_size))
        self.limits = np.full((len(groups), rows), np.inf)
        self.goals = np.full((len(groups), rows), np.inf)
        self.strict = np.zeros((len(groups), rows), bool)
        self.units = np.ones((len(groups), rows))
        # Places of each case's rows; where it has fewer, the first one again, not `used`.
        self.places = np.zeros((len(groups), cases, widest), np.intp)
        self.used = np.zeros((len(groups), cases, widest), bool)
        open_ = np.zeros((len(groups), cases), bool)
        for g, group in enumerate(groups):
            count = len(group.rows)
            self.matrix[g, :count] = group.matrix
            self.limits[g, :count], self.goals[g, :count] = group.limits, group.goals
            self.strict[g, :count] = group.strict
            for c, places in enumerate(group.places):
                self.places[g, c, : len(places)] = places
                self.used[g, c, : len(places)] = True
            self.units[g, :count] = [float(row.scale) for row in group.scaled]
            open_[g, : len(group.numbers)] = open_cases[g]
        self.tree = Tree() if keep else None
        nodes = np.array([self._node(g) for g in range(len(groups))])
        stack = Boxes(
            lower[:, self.free], upper[:, self.free], np.arange(len(groups)), nodes, open_
        )
        self.stack = stack[np.flatnonzero(open_.any(axis=1))]
        self.share = np.ones(len(self.stack))
        self.finished = 0.0
        self.total = float(len(self.stack))
        self.seen = 0
        self.proven = np.full(open_.shape, np.inf)
        # A box takes its two ends, and a few numbers more.
        of_box = 16 * len(self.free) + cases + 64
        self.most = max(int(memory * 2**30 / of_box), 4 * self.batch)

    @staticmethod
    def worthwhile(groups: tuple[Group, ...]) -> bool:
        """Whether there are few enough free entries in the inputs."""
        free = [np.sum(divisible(group.inputs.lower64, group.inputs.upper64)) for group in groups]
        return 0 < int(max(free)) <= LARGEST_DIMENSION

    def _node(self, group: int) -> int:
        return self.tree.add(group) if self.tree is not None else -1

    def full(self, boxes: Boxes) -> tuple[np.ndarray, np.ndarray]:
        """Both ends with all entries of the inputs."""
        lower, upper = (end[boxes.group] for end in self.base)
        lower[:, self.free], upper[:, self.free] = boxes.lower, boxes.upper
        return lower, upper

    def step(self, stop: Callable[[], bool] = lambda: False) -> "Step":
        """Bounds the boxes on top of the stack, closes what is decided and halves the others."""
        count = min(self.batch, len(self.stack))
        boxes, share = self.stack[-count:], self.share[-count:]
        size = next(size for size in self.sizes if size >= count)
        padded = boxes[np.concatenate([np.arange(count), np.zeros(size - count, int)])]
        lower, upper = self.full(padded)
        found = self._bounds(lower, upper, padded, count, stop)
        if found is None or stop():
            # The boxes stay on the stack: a step that came too late changes nothing.
            return Step(None, None, None, None, None)
        self.stack, self.share = self.stack[:-count], self.share[:-count]
        self.seen += count
        g = boxes.group
        left = boxes.open & ~found.refuted
        b, c = np.nonzero(found.refuted)
        np.minimum.at(self.proven, (g[b], c), found.margin[b, c])
        if self.tree is not None:
            for b, c in np.argwhere(found.refuted):
                node, row = int(boxes.node[b]), int(found.best[b, c])
                if (b, c) in found.grafts:
                    self.tree.grafts[node, int(c)] = found.grafts[b, c]
                    continue
                if found.below is not None:
                    self.tree.below[node] = found.below[b]
                self.tree.closed.append((node, int(c), row, float(found.bound[b, row])))
                if (b, c) in found.weights:
                    self.tree.mixed[node, int(c)] = found.weights[b, c]
        done = ~left.any(axis=1)
        self.finished += float(share[done].sum())
        stuck = not self._halve(boxes, left, share, found.scores, np.flatnonzero(~done))
        roots = [(int(g[k]), found.bound[k]) for k in np.flatnonzero(share == 1)]
        return Step(found.points, found.violation, g, boxes.open, roots, stuck)

    def _halve(self, boxes: Boxes, left, share, scores, rest) -> bool:
        """Puts the halves of boxes on the stack; False if a box cannot be halved."""
        if not len(rest):
            return True
        lower, upper = boxes.lower[rest], boxes.upper[rest]
        middle = 0.5 * lower + 0.5 * upper
        possible = (middle > lower) & (middle < upper)
        if not possible.any(axis=1).all():
            return False
        axis = np.argmax(np.where(possible, scores[rest], -np.inf), axis=1)
        at = np.arange(len(rest))
        cut = middle[at, axis]
        low_upper, high_lower = upper.copy(), lower.copy()
        low_upper[at, axis] = cut
        high_lower[at, axis] = cut
        nodes = np.full((2, len(rest)), -1)
        if self.tree is not None:
            for k, b in enumerate(rest):
                parent = int(boxes.node[b])
                group = int(boxes.group[b])
                nodes[0, k], nodes[1, k] = self.tree.add(group), self.tree.add(group)
                self.tree.children[parent] = int(nodes[0, k])
                self.tree.axis[parent] = int(self.free[axis[k]])
                self.tree.cut[parent] = float(cut[k])
        group, still = boxes.group[rest], left[rest]
        below = Boxes(lower, low_upper, group, nodes[0], still)
        above = Boxes(high_lower, upper, group, nodes[1], still)
        self.stack = self.stack.joined(below).joined(above)
        self.share = np.concatenate([self.share, 0.5 * share[rest], 0.5 * share[rest]])
        return True

    def reopen(self, refuted: set[tuple[int, int]]) -> bool:
        """Cuts boxes, (node, case), whose trees the checker does not confirm; False if it cannot.

        From now on, bounds of such trees have to be better.
        """
        tree = self.tree
        assert tree is not None
        assert self.grafter is not None
        self.grafter.rounding *= MORE_MARGIN
        tree.grafts = {at: graft for at, graft in tree.grafts.items() if at not in refuted}
        tree.closed = [one for one in tree.closed if one[:2] not in refuted]
        tree.mixed = {at: weights for at, weights in tree.mixed.items() if at not in refuted}
        cases: dict[int, set[int]] = {}
        for node, c in refuted:
            cases.setdefault(node, set()).add(c)
        # Where a box was cut for other cases, its parts are open for these now.
        nodes, lows, highs, shares, left = [], [], [], [], []
        stack: list[tuple] = [
            (g, lower[self.free], upper[self.free], 1.0, set())
            for g, (lower, upper) in enumerate(zip(*self.base, strict=True))
        ]
        while stack:
            node, low, high, part, mine = stack.pop()
            mine = mine | cases.get(node, set())
            if (child := tree.children.get(node)) is not None:
                axis = int(np.searchsorted(self.free, tree.axis[node]))
                below, above = high.copy(), low.copy()
                below[axis] = above[axis] = tree.cut[node]
                stack += [
                    (child, low, below, part / 2, mine),
                    (child + 1, above, high, part / 2, mine),
                ]
            elif mine:
                nodes.append(node)
                lows.append(low)
                highs.append(high)
                shares.append(part)
                left.append([c in mine for c in range(self.places.shape[1])])
        lower, upper, share, open_ = (np.array(x) for x in (lows, highs, shares, left))
        group = np.array([tree.group[node] for node in nodes])
        self.finished -= float(share.sum())
        boxes = Boxes(lower, upper, group, np.array(nodes), open_)
        whole = (self.base[1] - self.base[0])[group][:, self.free]
        scores = (upper - lower) / np.where(whole > 0, whole, np.inf)
        return self._halve(boxes, open_, share, scores, np.arange(len(nodes)))

    def _bounds(self, lower, upper, boxes: Boxes, count: int, stop) -> "Found | None":
        g = boxes.group
        with jax.enable_x64(True):
            passes = self._passes(lower, upper, count, stop)
            if not passes.complete:
                return None
            # Rows of cases that are open on the box; the others keep the bound that says nothing.
            wanted = self._rows_of(g[:count], boxes.open[:count])
            b, r = np.nonzero(wanted)
            found = passes.bound(b, self.matrix[g[b], r])
            bound = np.full(wanted.shape, -np.inf)
            bound[b, r] = found.bound
            coefficients = np.zeros((*wanted.shape, lower.shape[1]))
            coefficients[b, r] = found.coefficients
            minimisers = np.repeat(
                0.5 * lower[:count, None] + 0.5 * upper[:count, None], wanted.shape[1], axis=1
            )
            minimisers[b, r] = found.minimisers
            points = self._points(g[:count], lower[:count], upper[:count], bound, minimisers)
            violation = self._violation(g, points)
        part = boxes[np.arange(count)]
        ends = lower[:count], upper[:count]
        found = self._judged(part, bound, coefficients, minimisers, points, violation, ends)
        known = None
        if self.weighs and self.form is not None and isinstance(passes, CheckedPasses):
            known = passes.known(self.form)
        if self.grafter is not None and known is not None:
            self._graft(self.grafter, part, known, found, stop)
        found.scores = self._scores(part, coefficients, found.refuted, known)
        return found

    def _graft(self, grafter: Grafter, boxes: Boxes, known: Known, found: "Found", stop) -> None:
        """Tries splits of neurons on boxes that are open, and notes what they refute."""
        found.below = grafter.default(known)
        left = boxes.open & ~found.refuted & grafter.promising(known)[:, None]
        places = np.argwhere(left)
        wanted = []
        for b, c in places:
            g = boxes.group[b]
            rows = self.places[g, c][self.used[g, c]]
            wanted.append((int(b), self.matrix[g, rows], self.limits[g, rows]))
        for k, graft in (grafter.grown(known, wanted, stop) if wanted else {}).items():
            b, c = places[k]
            found.grafts[int(b), int(c)] = graft
            found.refuted[b, c], found.margin[b, c] = True, 0.0

    def _passes(self, lower, upper, count: int, stop) -> Passes | CheckedPasses:
        fixed = len(self.free) <= MOSTLY_FIXED * lower.shape[1]
        more = fixed or self.grafter is not None
        if self.checker is not None and (more or self.seen < CHECKED_BOXES):
            try:
                return CheckedPasses(self.checker, lower[:count], upper[:count], stop)
            except Refused:
                self.checker = None
        regions = regions_of(
            self.network, for_users(self.network, lower), for_users(self.network, upper), None
        )
        return Passes(self.parts, regions, self.lanes, count=count, stop=stop)

    def _rows_of(self, g, open_) -> np.ndarray:
        """(boxes, rows): which rows belong to a case that is open on the box."""
        rows = np.zeros((len(g), self.matrix.shape[1]), bool)
        b, c = np.nonzero(open_)
        used = self.used[g[b], c]
        rows[np.broadcast_to(b[:, None], used.shape)[used], self.places[g[b], c][used]] = True
        return rows

    def _points(self, g, lower, upper, bound, minimisers) -> np.ndarray:
        """(boxes, points, entries): where rows are smallest, and the centre.

        Where that is too many, those of the rows with the lowest bounds: nearest to a violation.
        """
        if self.points <= bound.shape[1]:
            low = np.where(np.isfinite(bound), bound - self.limits[g], np.inf)
            best = np.argpartition(low, self.points - 2, axis=1)[:, : self.points - 1]
            minimisers = np.take_along_axis(minimisers, best[..., None], axis=1)
        return np.concatenate([minimisers, 0.5 * lower[:, None] + 0.5 * upper[:, None]], axis=1)

    def _judged(
        self, boxes: Boxes, bound, coefficients, minimisers, points, violation, ends
    ) -> "Found":
        """Which cases are refuted, by one row or by several, and which entries matter."""
        g = boxes.group
        limits, strict = self.limits[g], self.strict[g]
        proven = np.isfinite(bound) & ((bound > limits) | (strict & (bound >= limits)))
        # All of these are (boxes, cases, rows of a case).
        at = np.arange(len(g))[:, None, None], self.places[g]
        usable = self.used[g] & np.isfinite(bound)[at]
        over = np.where(usable, (bound - limits)[at], -np.inf)
        nearest = np.argmax(over, axis=2)[..., None]
        best = np.take_along_axis(self.places[g], nearest, axis=2)[..., 0]
        refuted = boxes.open & (self.used[g] & proven[at]).any(axis=2)
        units = self.units[g][at]
        margin = np.max(np.where(usable, over / units, -np.inf), axis=2)
        weights: dict[tuple[int, int], np.ndarray] = {}
        alone = np.sum(usable & np.isfinite(over), axis=2) <= 1
        every = np.argwhere(boxes.open & ~refuted & ~alone)
        at_once = max(MIXED_NUMBERS // (self.places.shape[2] * coefficients.shape[2]), 1)
        for begin in range(0, len(every), at_once):
            b, c = every[begin : begin + at_once].T
            rows = b[:, None], self.places[g[b], c]
            found = mix(
                coefficients[rows], minimisers[rows], (bound - limits)[rows],
                (np.abs(bound) + np.abs(limits))[rows], self.used[g[b], c], ends[0][b], ends[1][b],
            )  # fmt: skip
            for k in np.flatnonzero(found.bound > 0):
                refuted[b[k], c[k]] = True
                # If a weighted mean is at least this, so is one of the rows.
                largest = np.max(units[b[k], c[k]], where=self.used[g[b[k]], c[k]], initial=0)
                margin[b[k], c[k]] = found.bound[k] / np.sum(found.weights[k]) / largest
                of_rows = np.zeros(bound.shape[1])
                np.add.at(of_rows, rows[1][k], found.weights[k])
                weights[int(b[k]), int(c[k])] = of_rows
        return Found(
            bound, points, violation, np.zeros(boxes.lower.shape), refuted, best, weights, margin,
        )  # fmt: skip

    def _scores(self, boxes: Boxes, coefficients, refuted, known: Known | None) -> np.ndarray:
        """How much each free entry matters to the rows of open cases, and how wide it still is."""
        g = boxes.group
        rows = self._rows_of(g, boxes.open & ~refuted)
        size = np.abs(coefficients[:, :, self.free])
        influence = np.sum(np.where(rows[..., None] & np.isfinite(size), size, 0), axis=1)
        # Entries without influence on the linear bounds may still matter: they are cut in the end.
        influence += 1e-3 * np.max(influence, axis=1, keepdims=True) + 1e-12
        width = boxes.upper - boxes.lower
        # The numbers here were chosen by trial; see docs/verify.md.
        if known is not None and self.form is not None:
            b, r = np.nonzero(rows)
            gained = gains(self.form, known, self.free, b, self.matrix[g[b], r])
            return gained + SLOPE_SHARE * influence * width
        whole = (self.base[1] - self.base[0])[g][:, self.free]
        # Long boxes have loose bounds.
        return influence * width * (width / np.where(whole > 0, whole, np.inf)) ** 0.25

    def _violation(self, g, points: np.ndarray) -> np.ndarray:
        """(boxes, points, cases): the largest of the case's rows minus its goal."""
        full = np.concatenate([points, np.repeat(points[:1], len(g) - len(points), axis=0)])
        values = np.asarray(_outputs(self.double, jnp.asarray(full)))[: len(points)]
        violation = np.empty((*points.shape[:2], self.places.shape[1]))
        of_box = points.shape[1] * max(self.places[0].size, self.matrix.shape[1])
        at_once = max(POINT_NUMBERS // of_box, 1)
        for begin in range(0, len(points), at_once):
            some = slice(begin, begin + at_once)
            own = g[: len(points)][some]
            with np.errstate(invalid="ignore", over="ignore"):
                excess = np.einsum("bro,bpo->brp", self.matrix[own], values[some])
                excess -= self.goals[own][..., None]
            # (boxes, cases, rows of a case, points)
            excess = excess[np.arange(len(own))[:, None, None], self.places[own]]
            largest = np.max(np.where(self.used[own][..., None], excess, -np.inf), axis=2)
            violation[some] = np.swapaxes(largest, 1, 2)
        return violation


@dataclass
class Step:
    """What a step met.

    Attributes:
        points: (boxes, points, entries) of the inputs, or None if the step came too late.
        violation: (boxes, points, cases): the largest row minus its goal at each of them.
        group: the boxes' groups.
        open: (boxes, cases) that were open.
        roots: bounds of the rows for boxes that are whole: (group, bounds).
        stuck: whether a box is too small to halve.
    """

    points: np.ndarray | None
    violation: np.ndarray | None
    group: np.ndarray | None
    open: np.ndarray | None
    roots: list[tuple[int, np.ndarray]] | None
    stuck: bool = False


@dataclass
class Found:
    """Results for every box of a batch.

    Attributes:
        bound: (boxes, rows).
        points, violation: see Step.
        scores: (boxes, free entries), how much it helps to cut there.
        refuted: (boxes, cases).
        best: (boxes, cases), the row that is nearest to refuting the case, or does.
        weights: of the rows, for (box, case) that only several rows refute together.
        margin: (boxes, cases), in the units of the property: the violation is at least this.
        grafts: the trees of splits of neurons that refute (box, case).
        below: the checker's slopes, as bits, where there may be such trees.
    """

    bound: np.ndarray
    points: np.ndarray
    violation: np.ndarray
    scores: np.ndarray
    refuted: np.ndarray
    best: np.ndarray
    weights: dict[tuple[int, int], np.ndarray]
    margin: np.ndarray
    grafts: dict[tuple[int, int], Graft] = field(default_factory=dict)
    below: np.ndarray | None = None


def divisible(lower, upper) -> np.ndarray:
    """Which entries are free. A number like 0.1 that is no float64 is the interval around it."""
    lower, upper = np.asarray(lower, float), np.asarray(upper, float)
    return upper > np.nextafter(np.nextafter(lower, np.inf), np.inf)


def boxes_at_once(parts: Split, numbers: int, memory: float) -> int:
    """How many boxes are bounded at a time, each with so many numbers for its rows and cases."""
    neurons = sum(math.prod(layer.shape) for layer in parts.layers) or 1
    boxes = min(int(memory * 2**30 / (8 * (64 * neurons + numbers))), BATCH)
    return power_below(boxes)


@eqx.filter_jit
def _outputs(network: Network, points):
    """Outputs at (boxes, points, entries)."""
    return jax.vmap(jax.vmap(lambda x: network.flat_outputs(*shaped(network, x))))(points)
