"""Finds the proof of an "unsat" in the form that certificates have, and has it checked.

The checker derives every bound by itself, from slopes that it chooses by default. So it is asked
first what it can prove without help; slopes are searched for, and boxes are split further, only
where that is not enough. Whatever the search believes, nothing counts but what the checker accepts:
it reads the model with code of its own.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks import Network
from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.certificates import Arrays, CaseProof, Cuts, Leaf, Proof, Slopes, packed
from stagecert.verify.grafts import Graft, Grafter
from stagecert.verify.models import OpenModel
from stagecert.verify.nodes import Form
from stagecert.verify.planes import Proven
from stagecert.verify.pruning import all_tried, pruned, tried
from stagecert.verify.queries import Group, groups_of
from stagecert.verify.slopes import SlopeSearch, Tightener
from stagecert.verify.splitting import LARGEST_DIMENSION, Tree, divisible
from stagecert.verify.team import Team
from stagecert.verify.tightening import slopes_of
from stagecert_check import joining
from stagecert_check.bounds import Facts
from stagecert_check.certificate import Certificate
from stagecert_check.checker import Checker, Report, Task
from stagecert_check.functions import Refused
from stagecert_check.properties import Property

# How often a box that the checker cannot decide is halved, and how many boxes that may make: so
# many, and so many for each box of the search. Where the search is wrong, all halves stay open.
_DEEPEST = 12
_MORE_BOXES, _MORE_PER_BOX = 64, 2
# A cut that leaves so much of what is missing is of no use; its axis counts as so much shorter.
_USELESS, _DOUBT = 0.9, 0.25
# How long a tree is pruned, as a share of what its leaves took the checker.
_PRUNING = 0.2


class NotCovered(ProblemError):
    """The checker does not understand the model or the property."""


class Rejected(ProblemError):
    """The checker does not accept what the search believes to be proven.

    Attributes:
        open: of trees that split neurons: the leaves that are not refuted, by case.
        boxes: of trees of splits on boxes: (node, case of the group) of boxes with such leaves.
    """

    def __init__(
        self,
        why: str,
        open_: dict[int, np.ndarray] | None = None,
        boxes: set[tuple[int, int]] | None = None,
    ):
        super().__init__(why)
        self.open, self.boxes = open_ or {}, boxes or set()


class OutOfTime(Exception):
    """The time for proving and checking is up."""


@dataclass(frozen=True, eq=False)
class Refutation:
    """What a search found out: which row refutes which case on which box.

    Attributes:
        network: the network whose outputs the rows combine: that of the model, with the inputs as
            further outputs if a row mentions them.
        groups: the boxes with their cases and rows.
        rows: for cases refuted on their whole box, the row of the group that does it.
        tree: the cuts of the boxes and what is refuted on each, if boxes were split.
        branches: trees that split neurons too, each for a case of its own.
        planes: by case, what refutes its row in `rows` with planes above neurons.
        cuts: by case, trees of boxes whose leaves the checker's quadratic forms refute.
        checker: the checker that the search has asked. It has derived the intervals of whole boxes
            by itself, and need not do so again.
        accepted: by case, which leaves of its tree in `branches` that has refuted before.
        team: processes that take part, if there are any.
    """

    network: Network
    groups: tuple[Group, ...]
    rows: dict[int, int] = field(default_factory=dict)
    tree: Tree | None = None
    branches: tuple[Branches, ...] = ()
    planes: dict[int, Proven] = field(default_factory=dict)
    cuts: dict[int, Cuts] = field(default_factory=dict)
    checker: Checker | None = None
    accepted: dict[int, np.ndarray] = field(default_factory=dict)
    team: Team | None = None


@dataclass(frozen=True, eq=False)
class Certified:
    """A certificate that the checker has accepted.

    Attributes:
        certificate: what its file holds.
        report: what the checker said.
        proving, checking: seconds for finding the proof and for checking the certificate.
    """

    certificate: bytes
    report: Report
    proving: float
    checking: float


def certify(
    model: OpenModel,
    wanted: Property,
    found: Refutation | None = None,
    *,
    memory: float = 1.0,
    progress: Callable[[str], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Certified:
    """Proves that a property holds, and has the finished certificate checked.

    Args:
        model: the model.
        wanted: the property.
        found: what a search found out. None tries all rows on the whole boxes.
        memory: GiB that arrays may take.
        progress: is called with a line about what is being done.
        stop: asked now and then; once it says so, `OutOfTime` is raised.

    Raises:
        NotCovered: the checker does not understand the model or the property.
        Rejected: the checker does not accept the proof, or none in its form was found.
    """
    begin = time.monotonic()
    with np.errstate(all="ignore"), jax.default_device(_cpu()):
        checker = found.checker if found is not None else None
        checker = checker or _checker(model, wanted)
        proof = _proof(checker, model, found, memory, progress, stop)
        proven = time.monotonic()
        data = packed(proof)
        try:
            certificate = Certificate(data)
        except Refused as error:  # it is beyond a limit of the format
            raise Rejected(str(error)) from None
        report = checker.accepts(certificate, lambda *_: _look_at_the_clock(stop))
    if not report.accepted:
        raise Rejected("; ".join(report.reasons))
    return Certified(data, report, proven - begin, time.monotonic() - proven)


def _cpu() -> Any:
    """Where slopes are searched: a few rows on one box, which a GPU compiles for minutes.

    None is where everything else runs: programs are then compiled once for both.
    """
    if jax.default_backend() == "cpu":
        return None
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # no such platform was asked for
        return None


def _look_at_the_clock(stop: Callable[[], bool]) -> None:
    if stop():
        raise OutOfTime


def _checker(model: OpenModel, wanted: Property) -> Checker:
    joining.check_names(model.several, wanted)
    try:
        return Checker(model.program, wanted)
    except Refused as error:
        raise NotCovered(str(error)) from None


def _proof(checker: Checker, model: OpenModel, found, memory, progress, stop) -> Proof:
    wanted = checker.wanted
    cases: tuple[CaseProof | Cuts | Branches, ...] = ()
    if wanted.cases:
        if found is None:
            found = Refutation(*groups_of(model.network, wanted))
        try:
            cases = _Prover(checker, found, memory, progress, stop).cases()
        except Refused as error:
            raise Rejected(str(error)) from None
    return Proof(model.contents.digest, wanted.digest, cases)


Weights = dict[int, float]  # of rows of a group, by their places; the others are zero


@dataclass(eq=False)
class _Part:
    """A part of a case's box: a leaf, once it is refuted, or cut into two parts."""

    case: int
    group: int
    low: np.ndarray
    high: np.ndarray
    weights: list["Weights"]  # combinations of rows that may refute the case here
    depth: int = 0
    axis: int = -1
    cut: float = 0.0
    halves: "tuple[_Part, _Part] | None" = None
    leaf: Leaf | None = None
    short: float = field(default=math.inf)  # how much the best bound is below zero
    before: "_Part | None" = None  # what it is a half of, where the prover has halved it
    doubts: dict[int, float] = field(default_factory=dict)  # of axes: cuts there were of no use


class _Prover:
    def __init__(self, checker: Checker, found: Refutation, memory: float, progress, stop):
        self.checker, self.wanted, self.memory = checker, checker.wanted, memory
        self.network, self.groups, self.found = found.network, found.groups, found
        self.say, self._stop = progress or (lambda _: None), stop
        self.slopes = SlopeSearch(found.network, checker, memory, self.look_at_the_clock)
        self.places = {
            case: rows
            for group in self.groups
            for case, rows in zip(group.numbers, group.places, strict=True)
        }
        self._own_places: dict[int, tuple[dict[int, int], int]] = {}  # see `_multipliers`

    def look_at_the_clock(self) -> None:
        """Ends the work if time is up."""
        _look_at_the_clock(self._stop)

    def cases(self) -> tuple[CaseProof | Cuts | Branches, ...]:
        """Proofs of all cases."""
        # Those of quadratic forms rest on the checker's own bounds: they are not tried before.
        trees = {**self._trees(), **self.found.cuts}
        roots: dict[int, _Part] = {}
        for g, group in enumerate(self.groups):
            for c, case in enumerate(group.numbers):
                if case not in trees:
                    roots[case] = self._root(g, c, case)
        open_ = [part for root in roots.values() for part in _leaves(root)]
        spare = _MORE_BOXES + _MORE_PER_BOX * len(open_)
        open_ = self._by_default(self._by_planes(open_))
        # Another row may do where the one that verification took does not, or all together.
        for part in open_:
            part.weights += self._candidates(part.case)
        open_ = self._by_default(open_)
        if any(not self._divisible(part) for part in open_) and not self.slopes.fits():
            raise Rejected("it reads other activations in the model than the search does")
        while open_:
            narrow = [part for part in open_ if self._divisible(part)]
            wide = [part for part in open_ if not self._divisible(part)]
            spare -= 2 * len(narrow)
            if spare < 0:
                raise self._rejection(narrow)
            halves = [half for part in narrow for half in self._halved(part)]
            open_ = self._by_default(halves)
            if left := self._searched(wide):
                raise self._rejection(left)
        return tuple(
            trees[number] if number in trees else _flat(roots[number])
            for number in range(len(self.wanted.cases))
        )

    def _trees(self) -> dict[int, Branches]:
        """The trees that split neurons, once the checker has refuted all their leaves."""
        found, open_, boxes, short = {}, {}, set(), 0.0
        trees = self.found.branches
        leaves = sum(tree.leaves for tree in trees)
        if trees:
            self.say(f"certificate: {leaves} leaves of {len(trees)} cases to check")
        begin = time.monotonic()
        found_ = self.found
        every = all_tried(self.checker, trees, self.look_at_the_clock, found_.accepted, found_.team)
        a_leaf = (time.monotonic() - begin) / max(leaves, 1)
        for tree, now in zip(trees, every, strict=True):
            if not np.all(now.refuted):
                open_[tree.case] = np.flatnonzero(~now.refuted)
                short = max(short, now.short)
                continue
            # Pruning makes certificates smaller by a few per cent, and is worth no more.
            end = time.monotonic() + _PRUNING * a_leaf * tree.leaves
            found[tree.case] = pruned(
                self.checker, tree, lambda end=end: time.monotonic() > end or self._stop()
            )
        for tree, c, nodes in self._grafted():
            self.say(f"certificate: {tree.leaves} leaves of case {tree.case + 1} to check")
            now = tried(self.checker, tree, self.look_at_the_clock)
            if not np.all(now.refuted):
                boxes |= {(node, c) for node in nodes[~now.refuted].tolist()}
                short = max(short, now.short)
            found[tree.case] = tree
        if open_ or boxes:
            left = f"{sum(map(len, open_.values()))} leaves of trees and {len(boxes)} boxes"
            raise Rejected(f"{left} are not refuted; {short:g} are missing", open_, boxes)
        return found

    def _grafted(self) -> Iterator[tuple[Branches, int, np.ndarray]]:
        """The trees of cases for which neurons were split on some boxes.

        With them come the case's place in its group, and by leaf the node of the box that it is on.
        """
        tree = self.found.tree
        if tree is None or not tree.grafts:
            return
        grafter = Grafter(self.checker.program, Form(self.checker.program))
        for g, c in sorted({(tree.group[node], c) for node, c in tree.grafts}):
            joined, nodes = self._joined(tree, grafter, g, c)
            yield joined, c, nodes

    def _joined(self, tree: Tree, grafter: Grafter, g: int, c: int) -> tuple[Branches, np.ndarray]:
        """The boxes of a case with the trees on them, as one tree; and the nodes of its leaves."""
        group, form = self.groups[g], grafter.form
        case = group.numbers[c]
        ends = np.array(group.inputs.lower64, float), np.array(group.inputs.upper64, float)
        root, inputs = _Part(case, g, *ends, []), ends[0].size
        closed = {node: row for node, k, row, *_ in tree.closed if k == c}
        axes, cuts, forces, multipliers, below, nodes = [], [], [], [], [], []
        stack = [tree.group.index(g)]
        while stack:
            node = stack.pop()
            if (node, c) in tree.grafts:
                graft = tree.grafts[node, c]
                split = graft.neurons != LEAF
                axes.append(np.where(split, inputs + graft.neurons, LEAF))
                cuts.append(graft.cuts)
                forces.append(graft.forces)
                multipliers.append(self._of_graft(root, group, graft, c))
                below.append(graft.below.astype(np.float16))
                nodes += [node] * len(graft.below)
            elif node in closed:
                weights = {closed[node]: 1.0}
                if (node, c) in tree.mixed:
                    mixed = tree.mixed[node, c][: len(group.rows)]
                    weights = {int(k): float(mixed[k]) for k in np.flatnonzero(mixed)}
                axes.append([LEAF])
                cuts.append([0.0])
                multipliers.append([self._multipliers(root, weights)])
                below.append(grafter.slopes(tree.below[node])[None])
                nodes.append(node)
            else:
                axes.append([tree.axis[node]])
                cuts.append([tree.cut[node]])
                stack += [tree.children[node] + 1, tree.children[node]]
        slopes = np.concatenate(below)
        joined = Branches(
            case, np.concatenate(axes), np.concatenate(cuts), np.concatenate(multipliers),
            np.concatenate([np.zeros(0), *forces]),
            tuple(slopes_of(layer, slopes, slopes) for layer in form.layers.values()),
        )  # fmt: skip
        return joined, np.array(nodes)

    def _of_graft(self, root: _Part, group: Group, graft: Graft, c: int) -> np.ndarray:
        """Multipliers (leaves, rows) of the case's own rows."""
        found = np.array([self._multipliers(root, {})] * len(graft.weights))
        own = self._own_places[root.case][0]
        for weights, place in zip(graft.weights.T, group.places[c].tolist(), strict=True):
            found[:, own[place]] = weights * float(group.scaled[place].scale)
        return found

    @staticmethod
    def _rejection(parts: Sequence[_Part]) -> Rejected:
        part = max(parts, key=lambda part: part.short)
        return Rejected(
            f"case {part.case + 1} of the property is not refuted by lines that a certificate can "
            f"hold; {part.short:g} are missing"
        )

    def _root(self, g: int, c: int, case: int) -> _Part:
        """A case's box, cut as verification did."""
        group, tree = self.groups[g], self.found.tree
        low, high = (np.array(x, float) for x in (group.inputs.lower64, group.inputs.upper64))
        row = self.found.rows.get(case)
        chosen = self._candidates(case) if row is None else [{row: 1.0}]
        root = _Part(case, g, low, high, chosen)
        if row is not None or tree is None:
            return root
        closed = {node: row for node, k, row, *_ in tree.closed if k == c}
        stack = [(tree.group.index(g), root)]
        while stack:
            node, part = stack.pop()
            if node in closed:
                part.weights = [{closed[node]: 1.0}]
                if (node, c) in tree.mixed:
                    mixed = tree.mixed[node, c][: len(group.rows)]
                    part.weights = [{int(k): float(mixed[k]) for k in np.flatnonzero(mixed)}]
            elif node in tree.children:
                below, above = _cut(part, tree.axis[node], tree.cut[node])
                stack += [(tree.children[node], below), (tree.children[node] + 1, above)]
        return root

    def _candidates(self, case: int) -> list[Weights]:
        """Each row of a case by itself, and all of them together."""
        places = np.unique(self.places[case]).tolist()
        together = [dict.fromkeys(places, 1.0)] if len(places) > 1 else []
        return [*({place: 1.0} for place in places), *together]

    def _multipliers(self, part: _Part, weights: Weights) -> tuple[float, ...]:
        """Weights of the group's scaled rows as multipliers of the case's own rows."""
        group = self.groups[part.group]
        if part.case not in self._own_places:
            case = self.wanted.cases[part.case]
            own = {row: k for k, row in enumerate((*case.outputs, *case.input_rows))}
            # To hash a row takes long, and there are as many parts as leaves.
            mine = {k: own[group.rows[k]] for k in self.places[part.case].tolist()}
            self._own_places[part.case] = mine, len(own)
        places, count = self._own_places[part.case]
        multipliers = [0.0] * count
        for k, weight in weights.items():
            scale = float(group.scaled[k].scale) if len(weights) > 1 else 1.0
            multipliers[places[k]] = weight * scale
        return tuple(multipliers)

    def _by_default(self, parts: Sequence[_Part]) -> list[_Part]:
        """Lets the checker try what it can do by itself; those parts that it cannot refute."""
        self.say(f"certificate: {len(parts)} boxes to prove")
        tasks, of = [], {}
        for part in parts:
            for weights in part.weights:
                multipliers = self._multipliers(part, weights)
                tasks.append(Task(part.case, 0, part.low, part.high, multipliers))
                of[id(tasks[-1])] = part
        finished = 0
        for some, bounds in self.checker.bounds(Arrays(), tasks):
            for task, bound in zip(some, bounds, strict=True):
                self._note(of[id(task)], task, bound, Leaf(np.array(task.multipliers)))
            finished += len(some)
            self.look_at_the_clock()
            self.say(f"certificate: {finished} of {len(tasks)} boxes checked")
        return [part for part in parts if part.leaf is None]

    def _by_planes(self, parts: Sequence[_Part]) -> list[_Part]:
        """Lets the checker try the planes that verification found; those parts that are left."""
        held, none = Arrays(), (None,) * len(self.checker.activations)
        for part in parts:
            proven = self.found.planes.get(part.case)
            if proven is None:
                continue
            multipliers = self._multipliers(part, part.weights[0])
            leaf = Leaf(np.array(multipliers), proven.slopes, none, proven.planes)
            task = Task(part.case, 0, part.low, part.high, multipliers, held.leaf(leaf))
            for some, bounds in self.checker.bounds(held, [task]):
                self._note(part, some[0], bounds[0], leaf)
            self.look_at_the_clock()
        return [part for part in parts if part.leaf is None]

    def _note(self, part: _Part, task: Task, bound: float, leaf: Leaf) -> None:
        if self.checker.refutes(task, bound):
            part.leaf = leaf
        elif not math.isnan(bound):
            part.short = min(part.short, -float(bound))

    def _divisible(self, part: _Part) -> bool:
        group = self.groups[part.group]
        free = int(np.sum(divisible(group.inputs.lower64, group.inputs.upper64)))
        return 0 < free <= LARGEST_DIMENSION and part.depth < _DEEPEST

    def _halved(self, part: _Part) -> tuple[_Part, _Part]:
        """Two halves along the axis that is the widest compared with the case's box.

        Less so where the last cut was of no use: boxes of the search may be long in an axis because
        it does not matter.
        """
        inputs = self.groups[part.group].inputs
        whole = np.array(inputs.upper64 - inputs.lower64, float)
        free = divisible(inputs.lower64, inputs.upper64)
        doubts = dict(part.before.doubts) if part.before is not None else {}
        if part.before is not None and part.short > _USELESS * part.before.short:
            doubts[part.before.axis] = doubts.get(part.before.axis, 1.0) * _DOUBT
        part.doubts = doubts
        share = (part.high - part.low) / np.where(free, whole, np.inf)
        share[list(doubts)] *= list(doubts.values())
        axis = int(np.argmax(share))
        halves = _cut(part, axis, float(0.5 * part.low[axis] + 0.5 * part.high[axis]))
        for half in halves:
            half.before = part
        return halves

    # -- slopes ------------------------------------------------------------------------------------

    def _searched(self, parts: Sequence[_Part]) -> list[_Part]:
        """Searches for slopes, box by box; those parts that are still not refuted."""
        boxes: dict[tuple, list[_Part]] = {}
        for part in parts:
            boxes.setdefault((part.low.tobytes(), part.high.tobytes()), []).append(part)
        for number, same in enumerate(boxes.values()):
            self.look_at_the_clock()
            self.say(f"certificate: searching slopes for box {number + 1} of {len(boxes)}")
            low, high = same[0].low[None], same[0].high[None]
            checker = self.checker
            facts = Facts(checker.real, checker.program, low, high).derive()
            self._refute(same, facts, ())
            rest = [part for part in same if part.leaf is None]
            if rest:
                self.say("certificate: searching slopes for the boxes of activations")
                tightener = Tightener(self.slopes, low, high)
                facts = Facts(checker.real, checker.program, low, high).derive(tightener)
                self._refute(rest, facts, tuple(tightener.boxes))
        return [part for part in parts if part.leaf is None]

    def _refute(self, parts: Sequence[_Part], facts: Facts, boxes: tuple) -> None:
        """Searches for slopes with which rows refute parts of one box."""
        pairs = [(part, weights) for part in parts for weights in part.weights]
        rows, limits = [], []
        for part, weights in pairs:
            group, used = self.groups[part.group], list(weights)
            rows.append(np.array(list(weights.values())) @ group.matrix[used])
            limits.append(np.array(list(weights.values())) @ group.limits[used])
        rows, limits = np.array(rows), np.array(limits)
        goals = limits + 1e-7 * (np.abs(limits) + 1e-3)
        arguments = [facts.boxes[k] for k in self.checker.activations]
        low, high = facts.inputs
        slopes = self.slopes.found(low, high, arguments, rows, goals, 500)
        # The second round has slopes for boxes too: the checker's own are tried first.
        held = Arrays()
        for k, (part, weights) in enumerate(pairs):
            for given in ([()] if boxes else []) + [tuple(_kept(s, k) for s in slopes)]:
                if part.leaf is not None:
                    continue
                multipliers = self._multipliers(part, weights)
                none = (None,) * len(self.checker.activations)
                leaf = Leaf(np.array(multipliers), given or none, boxes or none)
                task = Task(part.case, 0, part.low, part.high, multipliers, held.leaf(leaf))
                for some, bounds in self.checker.bounds(held, [task]):
                    self._note(part, some[0], bounds[0], leaf)


def _kept(pair: Slopes, row: int) -> Slopes:
    low, high = pair
    return None if low is None else low[row], None if high is None else high[row]


def _cut(part: _Part, axis: int, at: float) -> tuple[_Part, _Part]:
    left, right = part.high.copy(), part.low.copy()
    left[axis] = right[axis] = at
    part.axis, part.cut = axis, at
    below = _Part(part.case, part.group, part.low, left, list(part.weights), part.depth + 1)
    above = _Part(part.case, part.group, right, part.high, list(part.weights), part.depth + 1)
    part.halves = below, above
    return part.halves


def _preorder(root: _Part):
    stack = [root]
    while stack:
        part = stack.pop()
        yield part
        if part.halves is not None:
            stack += part.halves[::-1]


def _leaves(root: _Part) -> list[_Part]:
    parts = [part for part in _preorder(root) if part.halves is None]
    for part in parts:
        part.depth = 0
    return parts


def _flat(root: _Part) -> CaseProof:
    parts = list(_preorder(root))
    splits = tuple(None if part.halves is None else (part.axis, part.cut) for part in parts)
    return CaseProof(splits, tuple(part.leaf for part in parts if part.leaf is not None))
