"""Certificates: files that prove an "unsat" to anybody who runs `stagecert check`.

    proof = certificates.proof_of("model.onnx", "property.vnnlib", verdict.proof)
    certificates.write("proof.cert", proof)

The format is described in docs/certificates.md. The checker derives every bound by itself, from
slopes that it chooses by default. So it is asked first what it can prove without help; slopes are
searched for, and boxes are split further, only where that is not enough.
"""

import functools
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import stagecert
from stagecert import properties
from stagecert.errors import ProblemError
from stagecert.networks import load
from stagecert.networks.regions import regions_of
from stagecert.networks.relaxation import Split, split
from stagecert.networks.search import hints, proposed_lines, relax, search
from stagecert.problem import as_arrays
from stagecert.rigor import certificate as format_
from stagecert.rigor import graph
from stagecert.rigor.bounds import Facts
from stagecert.rigor.checker import Checker, Task, contents
from stagecert.rigor.functions import Refused
from stagecert.rigor.numbers import Arithmetic
from stagecert.solvers import Damped
from stagecert.verify.queries import for_users, groups_of
from stagecert.verify.splitting import LARGEST_DIMENSION, divisible

# How often a box that the checker cannot decide is halved.
_DEEPEST = 12

Slopes = tuple[np.ndarray | None, np.ndarray | None]


@dataclass(frozen=True, eq=False)
class Rows:
    """Slopes for single entries of an activation's argument: see docs/certificates.md."""

    entries: np.ndarray
    sides: np.ndarray
    slopes: tuple[Slopes | None, ...]


@dataclass(frozen=True, eq=False)
class Leaf:
    """What refutes a case on one box.

    Attributes:
        multipliers: one for each output row of the case and then for each row of its inputs.
        slopes: for every activation None, or slopes below and above; None where the checker's own
            are meant.
        boxes: for every activation None, or slopes that bound its argument.
    """

    multipliers: np.ndarray
    slopes: tuple[Slopes | None, ...] = ()
    boxes: tuple[Rows | None, ...] = ()


@dataclass(frozen=True, eq=False)
class CaseProof:
    """How a case's box is split, in preorder ((axis, position), or None for a leaf), and leaves."""

    splits: tuple[tuple[int, float] | None, ...]
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, eq=False)
class Proof:
    """All that a certificate says; `model` and `property` are the files' (unpacked) contents."""

    model: bytes
    property: bytes
    cases: tuple[CaseProof, ...]


# -- writing ---------------------------------------------------------------------------------------


class _Arrays:
    """Arrays by name: in a zip file, or in memory, where the checker can read them too."""

    def __init__(self, out: zipfile.ZipFile | None = None):
        self._out, self._held = out, {}
        self._names: dict[bytes, str] = {}

    def add(self, array: np.ndarray) -> str:
        data = io.BytesIO()
        plain = np.ascontiguousarray(array).reshape(np.shape(array))
        np.lib.format.write_array(data, plain, version=(1, 0), allow_pickle=False)
        digest = hashlib.sha256(data.getvalue()).digest()
        name = self._names.setdefault(digest, f"a{len(self._names)}")
        if self._out is None:
            self._held[name] = plain
        elif f"{name}.npy" not in self._out.NameToInfo:
            self._out.writestr(_member(f"{name}.npy"), data.getvalue())
        return name

    def array(self, name: str, kinds, shape) -> np.ndarray:
        return self._held[name]

    def slopes(self, name: str, shape) -> np.ndarray:
        return self._held[name].astype(np.float64)

    def named(self, slopes) -> tuple:
        """The same slopes by their names."""
        return tuple(
            None if pair is None else tuple(None if x is None else self.add(x) for x in pair)
            for pair in slopes
        )

    def leaf(self, one: Leaf) -> format_.Leaf | None:
        """The leaf as the checker takes it; None if it has no slopes of its own."""
        if not any(one.slopes) and not any(one.boxes):
            return None
        boxes = tuple(
            None if rows is None
            else format_.Rows(self.add(rows.entries), self.add(rows.sides), self.named(rows.slopes))
            for rows in one.boxes
        )  # fmt: skip
        return format_.Leaf(self.named(one.slopes), boxes)


def write(path, proof: Proof) -> None:
    """Writes a certificate. The file appears whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as out:
            arrays = _Arrays(out)
            header = {
                "format": format_.FORMAT,
                "version": format_.VERSION,
                "stagecert": stagecert.__version__,
                "model_sha256": hashlib.sha256(proof.model).hexdigest(),
                "property_sha256": hashlib.sha256(proof.property).hexdigest(),
                "cases": [_case(case, arrays) for case in proof.cases],
            }
            out.writestr(_member("header.json"), json.dumps(header, allow_nan=False))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _member(name: str) -> zipfile.ZipInfo:
    # Without a date: the same proof makes the same file.
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _case(case: CaseProof, arrays: _Arrays) -> dict[str, Any]:
    leaves = []
    for number, one in enumerate(case.leaves):
        leaf = arrays.leaf(one)
        if leaf is not None:
            boxes = [
                rows and {"entries": rows.entries, "sides": rows.sides, "slopes": rows.slopes}
                for rows in leaf.boxes
            ]
            leaves.append({"number": number, "slopes": leaf.slopes, "boxes": boxes})
    axes = [-1 if s is None else s[0] for s in case.splits]
    return {
        "axes": arrays.add(np.array(axes, "<i4")),
        "cuts": arrays.add(np.array([0.0 if s is None else s[1] for s in case.splits], "<f8")),
        "multipliers": arrays.add(np.array([one.multipliers for one in case.leaves], "<f8")),
        "leaves": leaves,
    }


# -- proofs of properties --------------------------------------------------------------------------


@dataclass(eq=False)
class _Part:
    """A part of a case's box: a leaf, once it is refuted, or cut into two parts."""

    case: int
    group: int
    low: np.ndarray
    high: np.ndarray
    weights: list[np.ndarray]  # of the group's rows: combinations that may refute the case here
    depth: int = 0
    axis: int = -1
    cut: float = 0.0
    halves: "tuple[_Part, _Part] | None" = None
    leaf: Leaf | None = None
    short: float = field(default=math.inf)  # how much the best bound is below zero


def proof_of(
    model,
    property,
    found=None,
    *,
    memory: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> Proof:
    """The proof that a property holds, ready to be written. Everything in it was checked.

    Args:
        model, property: the files' paths.
        found: `Verdict.proof` of `verify(..., proof=True)`: which row refutes which case on which
            box. None tries all rows on the whole boxes.
        memory: GiB that arrays may take.
        progress: is called with a line about what is being done.

    Raises:
        ProblemError: no proof in the certificate's form was found, or the checker does not
            understand the model.
    """
    data, text = contents(model), contents(property)
    wanted = properties.load(text)
    if not wanted.cases:
        return Proof(data, text, ())
    try:
        with np.errstate(all="ignore"):
            checker = Checker(graph.read(data, Arithmetic()), wanted)
            return Proof(data, text, _Prover(checker, data, found, memory, progress).cases())
    except Refused as error:
        raise ProblemError(f"No certificate: the checker says that {error}.") from None


class _Prover:
    def __init__(self, checker: Checker, data: bytes, found, memory: float, progress):
        self.checker, self.wanted, self.memory = checker, checker.wanted, memory
        self.say = progress or (lambda _: None)
        if found is None:
            self.network, self.groups = groups_of(load(data), self.wanted)
        else:
            self.network, self.groups = found.network, found.groups
        self.found = found

    def cases(self) -> tuple[CaseProof, ...]:
        """Proofs of all cases."""
        roots: dict[int, _Part] = {}
        for g, group in enumerate(self.groups):
            for c, case in enumerate(group.numbers):
                roots[case] = self._root(g, c, case)
        open_ = [part for root in roots.values() for part in _leaves(root)]
        open_ = self._by_default(open_)
        # Another row may do where the one that verification took does not, or all together.
        for part in open_:
            part.weights += self._candidates(part.group, part.case)
        open_ = self._by_default(open_)
        while open_:
            narrow = [part for part in open_ if self._divisible(part)]
            wide = [part for part in open_ if not self._divisible(part)]
            halves = [half for part in narrow for half in self._halved(part)]
            open_ = self._by_default(halves)
            for part in self._searched(wide):
                raise ProblemError(
                    f"No certificate: case {part.case + 1} of the property is not refuted by "
                    f"slopes that a certificate can hold; {part.short:g} are missing."
                )
        return tuple(_flat(roots[number]) for number in range(len(self.wanted.cases)))

    def _root(self, g: int, c: int, case: int) -> _Part:
        """A case's box, cut as verification did."""
        group, found = self.groups[g], self.found
        low, high = (np.array(x, float) for x in (group.inputs.lower64, group.inputs.upper64))
        whole = {} if found is None else found.whole
        every = self._candidates(g, case)
        chosen = [np.eye(len(group.rows))[whole[case][1]]] if case in whole else every
        root = _Part(case, g, low, high, chosen)
        if case in whole or found is None or found.tree is None:
            return root
        tree = found.tree
        closed = {node: row for node, k, row, *_ in tree.closed if k == c}
        mixed = getattr(tree, "mixed", {})  # weights of rows that refute a case together
        stack = [(tree.group.index(g), root)]
        while stack:
            node, part = stack.pop()
            if node in closed:
                part.weights = [np.eye(len(group.rows))[closed[node]]]
                if (node, c) in mixed:
                    part.weights = [mixed[node, c][: len(group.rows)]]
            elif node in tree.children:
                below, above = _cut(part, tree.axis[node], tree.cut[node])
                stack += [(tree.children[node], below), (tree.children[node] + 1, above)]
        return root

    def _candidates(self, g: int, case: int) -> list[np.ndarray]:
        """Weights for each row of a case by itself, and for all of them together."""
        group = self.groups[g]
        places = np.unique(group.places[group.numbers.index(case)])
        single = np.zeros((len(places), len(group.rows)))
        single[np.arange(len(places)), places] = 1
        return [*single, *([single.sum(axis=0)] if len(places) > 1 else [])]

    def _multipliers(self, part: _Part, weights: np.ndarray) -> tuple[float, ...]:
        """Weights of the group's scaled rows as multipliers of the case's own rows."""
        case, group = self.wanted.cases[part.case], self.groups[part.group]
        places = {row: k for k, row in enumerate((*case.outputs, *case.input_rows))}
        used = np.flatnonzero(weights)
        scales = [float(group.scaled[k].scale) if len(used) > 1 else 1.0 for k in used]
        multipliers = np.zeros(len(places))
        for k, scale in zip(used, scales, strict=True):
            multipliers[places[group.rows[k]]] = weights[k] * scale
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

    def _searched(self, parts: Sequence[_Part]) -> list[_Part]:
        """Searches for slopes, box by box; those parts that are still not refuted."""
        boxes: dict[tuple, list[_Part]] = {}
        for part in parts:
            boxes.setdefault((part.low.tobytes(), part.high.tobytes()), []).append(part)
        for number, same in enumerate(boxes.values()):
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
            group, used = self.groups[part.group], np.flatnonzero(weights)
            rows.append(weights[used] @ group.matrix[used])
            limits.append(weights[used] @ group.limits[used])
        rows, limits = np.array(rows), np.array(limits)
        goals = limits + 1e-7 * (np.abs(limits) + 1e-3)
        arguments = [facts.boxes[k] for k in self.checker.activations]
        low, high = facts.inputs
        slopes = self.search(low, high, arguments, rows, goals, 500)
        # The second round has slopes for boxes too: the checker's own are tried first.
        held = _Arrays()
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

    def search(self, low, high, arguments, rows, goals, steps: int, of: int | None = None) -> list:
        """Slopes (rows, *shape) of every layer for rows on one box, with given intervals.

        `of` says which layer's argument the rows combine; None: they combine the outputs.
        """
        # A power of two, so that fewer sizes are compiled; the first row fills up the others.
        count = 1 << (len(rows) - 1).bit_length()
        fill = np.concatenate([np.arange(len(rows)), np.zeros(count - len(rows), int)])
        layers, last = self.parts.layers, self.parts.last
        if of is not None:
            layers, last = layers[:of], self.parts.layers[of].segment
        options: dict[str, Any] = {"max_iterations": steps}
        if of is not None:
            options["solvers"] = (Damped(hints=hints, patience=steps + 1),)
        with jax.enable_x64(True):
            regions = regions_of(
                self.network, for_users(self.network, low), for_users(self.network, high), None
            )
            given = tuple((jnp.asarray(a), jnp.asarray(b)) for a, b in arguments[: len(layers)])
            relaxed = relax(layers, last, regions.boxes, given)
            objectives = jnp.asarray(rows[fill][None])
            kept: list = []
            with jax.enable_x64(False):
                search(
                    layers, last, relaxed, regions.sets, objectives,
                    target=None if goals is None else goals[fill], atol=1e-9, rtol=1e-4,
                    keep=kept.append, **options,
                )  # fmt: skip
            lines = _proposed(layers, relaxed, kept[-1])
        return [
            _slopes(operation, line.low_slope, line.high_slope, len(rows), box)
            for line, operation, box in zip(
                lines,
                [self.checker.program.nodes[k].operation for k in self.checker.activations],
                arguments,
                strict=False,
            )
        ]


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
        shape = facts.low[argument].shape[1:]
        rows = np.zeros((2 * len(entries), math.prod(shape)))
        both = np.concatenate([entries, entries])
        sides = np.repeat([1, -1], len(entries))
        rows[np.arange(len(rows)), both] = sides
        arguments = [facts.boxes[k] for k in checker.activations[:place]]
        at_once = max(int(self.prover.memory * 2**24 / max(rows.shape[1], 1)) // 16, 16)
        found = []
        for begin in range(0, len(rows), at_once):
            some = rows[begin : begin + at_once].reshape(-1, *shape)
            found.append(self.prover.search(self.low, self.high, arguments, some, None, 3, place))
        slopes = tuple(
            tuple(None if x[0] is None else np.concatenate(x).astype("<f2")
                  for x in zip(*layer, strict=True))
            for layer in zip(*found, strict=True)
        )  # fmt: skip
        self.boxes[-1] = Rows(both.astype("<i4"), sides.astype("<i4"), slopes)  # type: ignore
        held = _Arrays()
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


def _slopes(operation, low, high, count: int, box) -> Slopes:
    """Slopes as a certificate holds them."""
    low, high = np.asarray(low, float)[:count], np.asarray(high, float)[:count]
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


__all__ = ["CaseProof", "Leaf", "Proof", "Rows", "proof_of", "write"]
