"""Certificates: files that prove an "unsat" to anybody who runs `stagecert check`.

    proof = certificates.proof_of("model.onnx", "property.vnnlib", verdict.proof)
    certificates.write("proof.cert", proof)

The format is described in docs/certificates.md. Nothing here is trusted by the checker.
"""

import gzip
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import stagecert
from stagecert import properties
from stagecert.errors import ProblemError
from stagecert.networks import Network, load
from stagecert.networks.intermediate import Intermediate, _exact, _interval, _refined
from stagecert.networks.operations import Activation
from stagecert.networks.regions import Regions, regions_of
from stagecert.networks.relaxation import Split, split
from stagecert.networks.search import (
    Relaxed,
    backward_bounds,
    first_lines,
    proposed_lines,
    relax,
    search,
)
from stagecert.problem import as_arrays
from stagecert.verify.queries import for_users, groups_of

# Claimed boxes are wider than what was computed, and lines further out, so that a checker that
# rounds differently agrees.
_WIDER = 1e-9
_FURTHER = 1e-12

Line = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Leaf:
    """What refutes a case on one box.

    Attributes:
        multipliers: one for each output row of the case and then for each row of its inputs.
        boxes: (low, high) of every activation's argument.
        justify: for every activation None, if intervals prove its box, or the lines of all earlier
            activations that do. A line is (low_slope, low_offset, high_slope, high_offset), or None
            where the default of relu is meant.
        lines: of every activation, for the bound itself.
    """

    multipliers: np.ndarray
    boxes: tuple[tuple[np.ndarray, np.ndarray], ...]
    justify: tuple[tuple[Line | None, ...] | None, ...]
    lines: tuple[Line | None, ...]


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


def write(path, proof: Proof) -> None:
    """Writes a certificate. The file appears whole or not at all."""
    path = Path(path)
    arrays: dict[bytes, str] = {}
    known: dict[int, str] = {}  # arrays that were met before, which the proof keeps alive
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:

            def name(array: np.ndarray) -> str:
                if id(array) in known:
                    return known[id(array)]
                data = io.BytesIO()
                plain = np.ascontiguousarray(array, "<f8").reshape(np.shape(array))
                np.lib.format.write_array(data, plain, allow_pickle=False)
                digest = hashlib.sha256(data.getvalue()).digest()
                if digest not in arrays:
                    arrays[digest] = f"a{len(arrays)}"
                    out.writestr(_member(f"{arrays[digest]}.npy"), data.getvalue())
                known[id(array)] = arrays[digest]
                return arrays[digest]

            header = _header(proof, name)
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


def _header(proof: Proof, name) -> dict[str, Any]:
    def lines(given):
        return ["default" if line is None else [name(x) for x in line] for line in given]

    def leaf(one: Leaf):
        return {
            "multipliers": name(one.multipliers),
            "boxes": [[name(low), name(high)] for low, high in one.boxes],
            "justify": ["ibp" if given is None else lines(given) for given in one.justify],
            "lines": lines(one.lines),
        }

    return {
        "format": "stagecert certificate",
        "version": 1,
        "stagecert": stagecert.__version__,
        "model_sha256": hashlib.sha256(proof.model).hexdigest(),
        "property_sha256": hashlib.sha256(proof.property).hexdigest(),
        "cases": [
            {
                "splits": [None if s is None else [int(s[0]), float(s[1])] for s in case.splits],
                "leaves": [leaf(one) for one in case.leaves],
            }
            for case in proof.cases
        ],
    }


# -- boxes and lines -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Claims:
    """Boxes of all activations' arguments for a batch of input boxes, each with what proves it.

    Attributes:
        intermediate: ((low, high), ...) as `networks.bound` takes them, each (batch, *shape).
        refined: for every activation and input box, whether it needs lines.
    """

    network: Network
    parts: Split
    regions: Regions
    relaxed: Relaxed
    first: tuple  # lines in the middle of every box: those that prove the boxes
    intermediate: tuple
    refined: tuple[np.ndarray, ...]


def claim(network: Network, lower, upper, kind: str = "backward", memory: float = 1.0) -> Claims:
    """Boxes that a checker can follow, by one pass back or by intervals (kind "ibp").

    `lower` and `upper` are (batch, *input_shape), as for `networks.bound`.
    """
    how = Intermediate.named(kind)
    with jax.enable_x64(True):
        regions = regions_of(network, lower, upper, None)
        parts = as_arrays(split(network), jnp.float64)
        arguments: tuple = ()
        refined = []
        for index, layer in enumerate(parts.layers):
            before = parts.layers[:index]
            plain = _interval(before, layer.segment, regions.boxes, arguments)
            low, high = plain
            if kind != "ibp" and not (index == 0 and _exact(layer.segment)):
                low, high = _refined(
                    before, layer, regions, arguments, plain, how, memory, lambda *_: None
                )
            axes = tuple(range(1, low.ndim))
            refined.append(np.any(np.asarray((low > plain[0]) | (high < plain[1])), axis=axes))
            low, high = np.asarray(low), np.asarray(high)
            size = np.maximum(np.abs(low), np.abs(high))
            margin = _WIDER * np.maximum(size, 1e-3 * size.max(axis=axes, keepdims=True))
            arguments = (*arguments, (jnp.asarray(low - margin), jnp.asarray(high + margin)))
        relaxed = relax(parts.layers, parts.last, regions.boxes, arguments)
        first = tuple(_first(relaxed))
    intermediate = jax.tree.map(np.asarray, arguments)
    return Claims(network, parts, regions, relaxed, first, intermediate, tuple(refined))


@eqx.filter_jit
def _first(relaxed):
    return jax.vmap(first_lines)(relaxed)


@eqx.filter_jit
def _proposed(layers, relaxed, proposals, count: int):
    def grid(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float64).reshape(-1, count, *x.shape[1:]), tree)

    inner = jax.vmap(lambda r, p: proposed_lines(layers, r, p, jnp.float64), in_axes=(None, 0))
    return jax.vmap(inner)(relaxed, grid(proposals))


@dataclass(frozen=True, eq=False)
class Found:
    """Bounds (batch, rows) and the lines behind them, each (batch, rows, *shape)."""

    bound: np.ndarray
    lines: tuple


def find_lines(claims: Claims, rows, limits, max_iterations: int = 500) -> Found:
    """Lines whose bounds exceed the limits, for rows (batch, targets, outputs), where possible."""
    rows, limits = np.asarray(rows, float), np.asarray(limits, float)
    parts, relaxed, sets = claims.parts, claims.relaxed, claims.regions.sets
    with jax.enable_x64(True):
        jrows = jnp.asarray(rows)
        simple = backward_bounds(parts.layers, parts.last, relaxed, sets, jrows)
        bound = np.array(simple.bound)
        lines = jax.tree.map(
            lambda x: np.repeat(np.asarray(x)[:, None], rows.shape[1], axis=1), claims.first
        )
        poor = ~(bound > limits)
        if np.any(poor) and parts.layers:
            kept: list = []
            with jax.enable_x64(False):
                solution = search(
                    parts.layers, parts.last, relaxed, sets, jrows, target=limits.reshape(-1),
                    atol=1e-9, rtol=1e-4, max_iterations=max_iterations, keep=kept.append,
                )  # fmt: skip
            searched = _proposed(parts.layers, relaxed, kept[-1], rows.shape[1])
            better = solution.bound.reshape(bound.shape) > bound
            bound = np.where(better, solution.bound.reshape(bound.shape), bound)

            def choose(new, old):
                return np.where(better.reshape(*better.shape, *(1,) * (old.ndim - 2)), new, old)

            lines = jax.tree.map(choose, jax.tree.map(np.asarray, searched), lines)
    return Found(bound, lines)


def leaf(claims: Claims, found: Found, box: int, row: int, multipliers) -> Leaf:
    """The leaf of one box and one row."""
    return _Leaves(claims).leaf(found, box, row, multipliers)


class _Leaves:
    """Leaves from one batch; the lines that prove boxes are made once for each box."""

    def __init__(self, claims: Claims):
        self.claims = claims
        self._boxes: dict[int, tuple] = {}
        self._first: dict[int, tuple] = {}

    def boxes(self, box: int) -> tuple:
        if box not in self._boxes:
            self._boxes[box] = tuple((l[box], h[box]) for l, h in self.claims.intermediate)
        return self._boxes[box]

    def _lines(self, lines, box: int) -> tuple[Line | None, ...]:
        layers = self.claims.parts.layers
        return tuple(
            _line(layer, pair, one)
            for layer, pair, one in zip(layers, self.boxes(box), lines, strict=True)
        )

    def leaf(self, found: Found, box: int, row: int, multipliers) -> Leaf:
        if box not in self._first:
            first = jax.tree.map(lambda x: np.asarray(x)[box], self.claims.first)
            self._first[box] = self._lines(first, box)
        first = self._first[box]
        lines = jax.tree.map(lambda x: x[box, row], found.lines)
        return Leaf(
            np.asarray(multipliers, float),
            self.boxes(box),
            tuple(first[:k] if r[box] else None for k, r in enumerate(self.claims.refined)),
            self._lines(lines, box),
        )


def _line(layer, pair, lines) -> Line | None:
    """One activation's lines, moved outward a little; None where they are the default."""
    low, high = pair
    one: Line = (lines.low_slope, lines.low_offset, lines.high_slope, lines.high_offset)
    one = tuple(np.asarray(x, float) for x in one)  # type: ignore
    size = np.maximum(np.abs(low), np.abs(high))
    if layer.operation == Activation("relu"):
        plain = _relu_lines(low, high)
        tolerances = 1e-12, 1e-10 * size, 1e-12, 1e-10 * size
        if all(np.all(np.abs(a - b) <= t) for a, b, t in zip(one, plain, tolerances, strict=True)):
            return None
    reach = [np.abs(slope) * size for slope in (one[0], one[2])]
    if one[0].ndim > one[1].ndim:
        reach = [x.sum(axis=-1) for x in reach]
    further = [_FURTHER * (r + np.abs(x)) for r, x in zip(reach, (one[1], one[3]), strict=True)]
    slopes = one[0], one[2]
    if one[0].ndim > one[1].ndim:  # weights that must not be negative
        slopes = np.maximum(one[0], 0), one[2]
    return slopes[0], one[1] - further[0], slopes[1], one[3] + further[1]


def _relu_lines(low, high) -> Line:
    """The documented default, written down a second time: the checker's own is not used here."""
    unstable = (low < 0) & (high > 0)
    below = np.where(unstable, high > -low, low >= 0).astype(float)
    slope = np.where(unstable, high / np.where(unstable, high - low, 1), below)
    return below, np.zeros_like(low), slope, np.where(unstable, -slope * low, 0)


# -- proofs of properties --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """A box on which one row of a group has to refute a case."""

    case: int
    place: int  # which leaf of the case
    group: int
    row: int


def proof_of(model, property, found=None, *, memory: float = 1.0, boxes_at_once: int = 64) -> Proof:
    """The proof that a property holds, ready to be written.

    Args:
        model, property: the files' paths.
        found: `Verdict.proof` of `verify(..., proof=True)`: which row refutes which case on which
            box. None tries all rows on the whole boxes.
        memory: GiB that arrays may take.
        boxes_at_once: how many input boxes are bounded at a time.

    Raises:
        ProblemError: no proof in the certificate's form was found. Boxes of activations have to
            follow from one pass back, so this happens where only "optimised" ones suffice.
    """
    data, text = _contents(model), _contents(property)
    wanted = properties.load(text)
    if not wanted.cases:
        return Proof(data, text, ())
    if found is None:
        network, groups = groups_of(load(data), wanted)
        whole = {}
    else:
        network, groups, whole = found.network, found.groups, found.whole
    splits: dict[int, tuple] = {}
    jobs: dict[tuple[bytes, bytes], tuple[np.ndarray, np.ndarray, list[_Task]]] = {}
    for g, group in enumerate(groups):
        root = (np.array(group.inputs.lower64, float), np.array(group.inputs.upper64, float))
        for c, case in enumerate(group.numbers):
            if case in whole or found is None or found.tree is None:
                row = whole[case][1] if case in whole else -1
                splits[case], parts = (None,), [(*root, row)]
            else:
                splits[case], parts = _walk(found.tree, g, c, root)
            for place, (low, high, row) in enumerate(parts):
                key = low.tobytes(), high.tobytes()
                tasks = jobs.setdefault(key, (low, high, []))[2]
                rows = [row] if row >= 0 else np.flatnonzero(group.members[c]).tolist()
                tasks.extend(_Task(case, place, g, r) for r in rows)
    leaves: dict[tuple[int, int], tuple[float, Leaf]] = {}
    todo = list(jobs.values())
    for begin in range(0, len(todo), boxes_at_once):
        _refute(network, wanted, groups, todo[begin : begin + boxes_at_once], leaves, memory)
    cases = []
    for number in range(len(wanted.cases)):
        count = sum(s is None for s in splits[number])
        best = [leaves[number, place] for place in range(count)]
        short = min(margin for margin, _ in best)
        if not short >= 0:
            raise ProblemError(
                f"No certificate: case {number + 1} of the property is not refuted by lines that "
                f"a certificate can hold; {-short:g} are missing."
            )
        cases.append(CaseProof(splits[number], tuple(one for _, one in best)))
    return Proof(data, text, tuple(cases))


def _refute(network, wanted, groups, jobs: Sequence, leaves: dict, memory: float) -> None:
    """Leaves for all tasks of some boxes."""
    lower, upper = (np.stack([job[k] for job in jobs]) for k in (0, 1))
    claims = claim(network, for_users(network, lower), for_users(network, upper), memory=memory)
    places = [sorted({(t.group, t.row) for t in tasks}) for _, _, tasks in jobs]
    most = max(map(len, places))
    padded = [list(p) + [p[0]] * (most - len(p)) for p in places]
    rows = np.array([[groups[g].matrix[r] for g, r in p] for p in padded])
    limits = np.array([[groups[g].limits[r] for g, r in p] for p in padded])
    found = find_lines(claims, rows, limits + 1e-9 * (np.abs(limits) + 1e-3))
    makes = _Leaves(claims)
    for box, (_, _, tasks) in enumerate(jobs):
        for task in tasks:
            at = places[box].index((task.group, task.row))
            margin = float(found.bound[box, at] - limits[box, at])
            old = leaves.get((task.case, task.place))
            if old is not None and not margin > old[0]:
                continue
            case = wanted.cases[task.case]
            all_rows = (*case.outputs, *case.input_rows)
            multipliers = np.zeros(len(all_rows))
            multipliers[all_rows.index(groups[task.group].rows[task.row])] = 1
            made = makes.leaf(found, box, at, multipliers)
            leaves[task.case, task.place] = margin, made


def _walk(tree, group: int, case: int, root) -> tuple[tuple, list]:
    """The splits of one case's box in preorder, and its leaves as (low, high, row)."""
    closed = {node: row for node, c, row, _ in tree.closed if c == case}
    splits: list[tuple[int, float] | None] = []
    parts = []
    stack = [(tree.group.index(group), *root)]
    while stack:
        node, low, high = stack.pop()
        if node in closed:
            splits.append(None)
            parts.append((low, high, closed[node]))
            continue
        axis, cut = tree.axis[node], tree.cut[node]
        splits.append((axis, cut))
        left, right = high.copy(), low.copy()
        left[axis] = right[axis] = cut
        child = tree.children[node]
        stack += [(child + 1, right, high), (child, low, left)]
    return tuple(splits), parts


def _contents(path) -> bytes:
    data = Path(path).read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


__all__ = [
    "CaseProof", "Claims", "Found", "Leaf", "Proof", "claim", "find_lines", "leaf", "proof_of",
    "write",
]  # fmt: skip
