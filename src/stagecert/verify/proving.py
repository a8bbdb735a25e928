"""Finds the proof of an "unsat" in the form that certificates have, and has it checked.

The checker derives every bound by itself, from slopes that it chooses by default. So it is asked
first what it can prove without help; slopes are searched for, and boxes are split further, only
where that is not enough. Whatever the search believes, nothing counts but what the checker accepts:
it reads the model with code of its own.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks import Network
from stagecert.networks.regions import Regions, regions_of
from stagecert.networks.relaxation import Split, split
from stagecert.networks.search import few_sizes, proposed_lines, relax, search
from stagecert.networks.stepwise import Passes, rows_at_once
from stagecert.problem import as_arrays
from stagecert.properties import Property
from stagecert.rigor.bounds import Facts
from stagecert.rigor.certificate import Certificate
from stagecert.rigor.checker import Checker, Report, Task
from stagecert.rigor.functions import Refused
from stagecert.verify.certificates import Arrays, CaseProof, Leaf, Proof, Rows, Slopes, packed
from stagecert.verify.models import OpenModel, opened
from stagecert.verify.queries import Group, for_users, groups_of
from stagecert.verify.splitting import LARGEST_DIMENSION, Tree, divisible

# How often a box that the checker cannot decide is halved, and how many boxes that may make: so
# many, and so many for each box of the search. Where the search is wrong, all halves stay open.
_DEEPEST = 12
_MORE_BOXES, _MORE_PER_BOX = 64, 2


class NotCovered(ProblemError):
    """The checker does not understand the model or the property."""


class Rejected(ProblemError):
    """The checker does not accept what the search believes to be proven."""


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
    """

    network: Network
    groups: tuple[Group, ...]
    rows: dict[int, int] = field(default_factory=dict)
    tree: Tree | None = None


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
        checker = _checker(model, wanted)
        proof = _proof(checker, model, found, memory, progress, stop)
        proven = time.monotonic()
        data = packed(proof)
        report = checker.accepts(Certificate(data), lambda *_: _look_at_the_clock(stop))
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


def proof_of(model, property, found: Refutation | None = None, *, memory: float = 1.0) -> Proof:
    """The proof that a property holds, ready to be written; every step of it was tried.

    Args:
        model: what `OpenModel` takes, or one.
        property: what `properties.load` takes, or what it returned.
        found: what a search found out. None tries all rows on the whole boxes.
        memory: GiB that arrays may take.

    Raises:
        NotCovered, Rejected: see `certify`.
    """
    from stagecert import properties

    model = opened(model)
    wanted = property if isinstance(property, Property) else properties.load(property)
    with np.errstate(all="ignore"), jax.default_device(_cpu()):
        return _proof(_checker(model, wanted), model, found, memory, None, lambda: False)


def _checker(model: OpenModel, wanted: Property) -> Checker:
    try:
        return Checker(model.program, wanted)
    except Refused as error:
        raise NotCovered(str(error)) from None


def _proof(checker: Checker, model: OpenModel, found, memory, progress, stop) -> Proof:
    wanted = checker.wanted
    cases: tuple[CaseProof, ...] = ()
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


class _Prover:
    def __init__(self, checker: Checker, found: Refutation, memory: float, progress, stop):
        self.checker, self.wanted, self.memory = checker, checker.wanted, memory
        self.network, self.groups, self.found = found.network, found.groups, found
        self.say, self._stop = progress or (lambda _: None), stop
        self.places = {
            case: rows
            for group in self.groups
            for case, rows in zip(group.numbers, group.places, strict=True)
        }

    def look_at_the_clock(self) -> None:
        """Ends the work if time is up."""
        _look_at_the_clock(self._stop)

    def cases(self) -> tuple[CaseProof, ...]:
        """Proofs of all cases."""
        roots: dict[int, _Part] = {}
        for g, group in enumerate(self.groups):
            for c, case in enumerate(group.numbers):
                roots[case] = self._root(g, c, case)
        open_ = [part for root in roots.values() for part in _leaves(root)]
        spare = _MORE_BOXES + _MORE_PER_BOX * len(open_)
        open_ = self._by_default(open_)
        # Another row may do where the one that verification took does not, or all together.
        for part in open_:
            part.weights += self._candidates(part.case)
        open_ = self._by_default(open_)
        if any(not self._divisible(part) for part in open_) and not self._same_activations():
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
        return tuple(_flat(roots[number]) for number in range(len(self.wanted.cases)))

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
        case, group = self.wanted.cases[part.case], self.groups[part.group]
        places = {row: k for k, row in enumerate((*case.outputs, *case.input_rows))}
        multipliers = np.zeros(len(places))
        for k, weight in weights.items():
            scale = float(group.scaled[k].scale) if len(weights) > 1 else 1.0
            multipliers[places[group.rows[k]]] = weight * scale
        return tuple(multipliers.tolist())

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
        for some, bounds in self.checker.bounds(None, tasks):
            for task, bound in zip(some, bounds, strict=True):
                self._note(of[id(task)], task, bound, Leaf(np.array(task.multipliers)))
            finished += len(some)
            self.look_at_the_clock()
            self.say(f"certificate: {finished} of {len(tasks)} boxes checked")
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
        """Two halves along the axis that is the widest compared with the case's box."""
        inputs = self.groups[part.group].inputs
        whole = np.array(inputs.upper64 - inputs.lower64, float)
        free = divisible(inputs.lower64, inputs.upper64)
        axis = int(np.argmax((part.high - part.low) / np.where(free, whole, np.inf)))
        return _cut(part, axis, float(0.5 * part.low[axis] + 0.5 * part.high[axis]))

    # -- slopes ------------------------------------------------------------------------------------

    def _same_activations(self) -> bool:
        """Whether slopes of the search fit the checker's activations, one after the other."""
        nodes, layers = self.checker.program.nodes, self.parts.layers
        mine = [(_kind(nodes[k]), nodes[k].shape) for k in self.checker.activations]
        return mine == [(_kind(layer), layer.shape) for layer in layers]

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
                tightener = _Tightener(self, low, high)
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
        slopes = self.search(low, high, arguments, rows, goals, 500)
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
                for some, bounds in self.checker.bounds(held, [task]):  # type: ignore
                    self._note(part, some[0], bounds[0], leaf)

    @functools.cached_property
    def parts(self) -> Split:
        """The network, cut at its activations, as float64 arrays."""
        with jax.enable_x64(True):
            return as_arrays(split(self.network), jnp.float64)

    def search(self, low, high, arguments, rows, goals, steps: int) -> list:
        """Slopes (rows, *shape) of every layer for rows on one box, with given intervals."""
        # So that fewer sizes are compiled; the first row fills up the others.
        count = few_sizes(self.parts.layers, len(rows))
        fill = np.concatenate([np.arange(len(rows)), np.zeros(count - len(rows), int)])
        layers, last = self.parts.layers, self.parts.last
        with jax.enable_x64(True):
            regions = self.regions(low, high)[slice(None)]  # on the device, in float64
            given = tuple((jnp.asarray(a), jnp.asarray(b)) for a, b in arguments)
            relaxed = relax(layers, last, regions.boxes, given)
            objectives = jnp.asarray(rows[fill][None])
            kept: list = []
            with jax.enable_x64(False):
                search(
                    layers, last, relaxed, regions.sets, objectives, target=goals[fill],
                    atol=1e-9, rtol=1e-4, keep=kept.append, max_iterations=steps,
                )  # fmt: skip
            lines = _proposed(layers, relaxed, kept[-1])
        return self.held([(line.low_slope[: len(rows)], line.high_slope[: len(rows)])
                          for line in lines], arguments)  # fmt: skip

    def regions(self, low, high) -> Regions:
        """One box, as the network's inputs."""
        return regions_of(
            self.network, for_users(self.network, low), for_users(self.network, high), None
        )

    def held(self, slopes, arguments) -> list[Slopes]:
        """Slopes of the first layers as a certificate holds them, for arguments in given boxes."""
        operations = [self.checker.program.nodes[k].operation for k in self.checker.activations]
        return [
            _slopes(operation, low, high, box)
            for (low, high), operation, box in zip(slopes, operations, arguments, strict=False)
        ]


def _kind(node: Any) -> str:
    """What a nonlinear operation is called; maxima of networks have no name."""
    return getattr(node.operation, "kind", "max")


class _Tightener:
    """Searches for slopes that make the intervals of activations tighter, one after the other."""

    def __init__(self, prover: _Prover, low, high):
        self.prover, self.low, self.high = prover, low, high
        self.boxes: list[Rows | None] = []

    def __call__(self, facts: Facts, index: int, argument: int) -> None:
        checker, place = self.prover.checker, len(self.boxes)
        self.boxes.append(None)
        function = checker.program.nodes[index].operation
        ends = facts.low[argument], facts.high[argument]
        entries = np.flatnonzero(function.bent(*ends))  # type: ignore
        if place == 0 or not len(entries):
            return
        arguments = [facts.boxes[k] for k in checker.activations[:place]]
        prover = self.prover
        with jax.enable_x64(True):
            passes = Passes.on(
                prover.parts, prover.regions(self.low, self.high),
                rows_at_once(prover.parts, prover.memory), arguments,
            )  # fmt: skip
            # Layer by layer, both ends of each entry; the certificate has all lower ends first.
            found = passes.slopes(place, entries, 3, prover.look_at_the_clock)
        found = [tuple(np.concatenate([x[:, 0], x[:, 1]]) for x in pair) for pair in found]
        slopes = tuple(
            tuple(None if x is None else x.astype("<f2") for x in pair)
            for pair in prover.held(found, arguments)
        )
        both = np.concatenate([entries, entries])
        sides = np.repeat([1, -1], len(entries))
        self.boxes[-1] = Rows(both.astype("<i4"), sides.astype("<i4"), slopes)  # type: ignore
        held = Arrays()
        none = (None,) * len(checker.activations)
        leaf = held.leaf(Leaf(np.ones(1), none, (*self.boxes, *none[len(self.boxes) :])))
        assert leaf is not None
        checker.tighten(held, leaf, facts, index, argument)


@eqx.filter_jit
def _proposed(layers, relaxed, proposals):
    one = jax.tree.map(lambda x: x[0], relaxed)
    lines = jax.vmap(lambda p: proposed_lines(layers, one, jax.tree.map(_double, p), jnp.float64))
    return lines(proposals)


def _double(x):
    return x.astype(jnp.float64)


def _slopes(operation, low, high, box) -> Slopes:
    """Slopes as a certificate holds them."""
    low, high = np.asarray(low, float), np.asarray(high, float)
    if operation.kind == "relu":
        # Single precision is precise enough, and the chord above needs no slope.
        low = np.where(operation.bent(*box), low, box[0] >= 0)
        return low.astype("<f4"), None
    if operation.kind == "max":
        low = np.maximum(low, 0)
    return low, high


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
