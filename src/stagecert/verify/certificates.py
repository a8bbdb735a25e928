"""Certificates: files that prove an "unsat" to anybody who runs `stagecert check`.

The format is described in docs/certificates.md. This module writes it; `proving` finds what there
is to write.
"""

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

import stagecert
from stagecert.verify.branches import Branches
from stagecert_check import certificate as format_

Slopes = tuple[np.ndarray | None, np.ndarray | None]


@dataclass(frozen=True, eq=False)
class Rows:
    """Slopes for single entries of an activation's argument: see docs/certificates.md."""

    entries: np.ndarray
    sides: np.ndarray
    slopes: tuple[Slopes | None, ...]
    forces: np.ndarray | None = None
    cases: "Cases | None" = None


@dataclass(frozen=True, eq=False)
class Cases:
    """Trees that bound single entries of an activation's argument: see docs/certificates.md."""

    entries: np.ndarray
    sides: np.ndarray
    axes: np.ndarray
    cuts: np.ndarray
    forces: np.ndarray
    slopes: tuple[Slopes | None, ...]


@dataclass(frozen=True, eq=False)
class Above:
    """Planes above neurons of an activation: see docs/certificates.md."""

    entries: np.ndarray
    shares: np.ndarray
    kept: np.ndarray


@dataclass(frozen=True, eq=False)
class Leaf:
    """What refutes a case on one box.

    Attributes:
        multipliers: one for each output row of the case and then for each row of its inputs.
        slopes: for every activation None, or slopes below and above; None where the checker's own
            are meant.
        boxes: for every activation None, or slopes that bound its argument.
        planes: for every activation None, or planes above some of its neurons.
    """

    multipliers: np.ndarray
    slopes: tuple[Slopes | None, ...] = ()
    boxes: tuple[Rows | None, ...] = ()
    planes: tuple[Above | None, ...] = ()


@dataclass(frozen=True, eq=False)
class CaseProof:
    """How a case's box is split, in preorder ((axis, position), or None for a leaf), and leaves."""

    splits: tuple[tuple[int, float] | None, ...]
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, eq=False)
class Cuts:
    """The same for many leaves that need nothing but multipliers: axes (-1 for a leaf) and cuts."""

    axes: np.ndarray
    cuts: np.ndarray
    multipliers: np.ndarray


@dataclass(frozen=True, eq=False)
class Proof:
    """All that a certificate says; `model` and `property` are the digests of the files."""

    model: str
    property: str
    cases: tuple[CaseProof | Cuts | Branches, ...]


class Arrays:
    """Arrays by name: in a zip file, or in memory, where the checker can read them too."""

    def __init__(self, out: zipfile.ZipFile | None = None):
        self._out, self._held = out, {}
        self._names: dict[bytes, str] = {}
        self._boxes: dict[int, tuple[Any, tuple[format_.Rows | None, ...]]] = {}

    def add(self, array: np.ndarray) -> str:
        """The name of an array, which is kept unless it is there already."""
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
        """An array in memory; see `stagecert_check.certificate.Certificate.array`."""
        return self._held[name]

    def slopes(self, name: str, shape) -> np.ndarray:
        """Slopes in memory, as float64."""
        return self._held[name].astype(np.float64)

    def named(self, slopes) -> tuple:
        """The same slopes by their names."""
        return tuple(
            None if pair is None else tuple(None if x is None else self.add(x) for x in pair)
            for pair in slopes
        )

    def leaf(self, one: Leaf) -> format_.Leaf | None:
        """The leaf as the checker takes it; None if it has no slopes of its own."""
        if not any(one.slopes) and not any(one.boxes) and not any(one.planes):
            return None
        planes = tuple(
            None if x is None
            else format_.Above(self.add(x.entries), self.add(x.shares), self.add(x.kept))
            for x in one.planes
        )  # fmt: skip
        return format_.Leaf(self.named(one.slopes), self.boxes(one.boxes), planes=planes)

    def boxes(self, boxes) -> tuple[format_.Rows | None, ...]:
        """The same boxes with arrays by their names; trees of several cases share theirs."""
        if id(boxes) not in self._boxes:
            self._boxes[id(boxes)] = boxes, self._named_boxes(boxes)
        return self._boxes[id(boxes)][1]

    def _named_boxes(self, boxes) -> tuple[format_.Rows | None, ...]:
        return tuple(
            None if rows is None
            else format_.Rows(
                self.add(rows.entries), self.add(rows.sides), self.named(rows.slopes),
                None if rows.forces is None else self.add(rows.forces),
                None if rows.cases is None else self.cases(rows.cases),
            )
            for rows in boxes
        )  # fmt: skip

    def cases(self, one: Cases) -> format_.Cases:
        """The same proofs by cases with arrays by their names."""
        entries, sides, axes, cuts, forces = map(
            self.add, (one.entries, one.sides, one.axes, one.cuts, one.forces)
        )
        return format_.Cases(entries, sides, axes, cuts, forces, self.named(one.slopes))

    def tree(self, one: Branches) -> format_.Case:
        """A tree that splits neurons as the checker takes it."""
        everywhere = format_.Leaf(self.named(one.slopes), self.boxes(one.whole), one.leaves)
        stations = {node: self.boxes(boxes) for node, boxes in one.stations.items()}
        return format_.Case(
            one.axes, one.cuts, one.multipliers, {}, one.forces, everywhere, stations
        )


def packed(proof: Proof) -> bytes:
    """A certificate as a file holds it. The same proof makes the same bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        arrays = Arrays(out)
        header = {
            "format": format_.FORMAT,
            "version": (version := _version(proof)),
            "stagecert": stagecert.__version__,
            "model_sha256": proof.model,
            "property_sha256": proof.property,
            "cases": [
                _tree(case, arrays)
                if isinstance(case, Branches)
                else _cuts(case, arrays)
                if isinstance(case, Cuts)
                else _case(case, arrays, version)
                for case in proof.cases
            ],
        }
        out.writestr(_member("header.json"), json.dumps(header, allow_nan=False))
    return file.getvalue()


def _member(name: str) -> zipfile.ZipInfo:
    # Without a date: the same proof makes the same file.
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _version(proof: Proof) -> int:
    """The first version that has all that a proof needs."""
    trees = [isinstance(case, Branches) for case in proof.cases]
    plain = [case for case in proof.cases if isinstance(case, CaseProof)]
    wholes = [case.whole for case in proof.cases if isinstance(case, Branches)]
    if any(rows is not None and rows.cases is not None for boxes in wholes for rows in boxes):
        return 4
    if any(any(leaf.planes) for case in plain for leaf in case.leaves):
        return 3
    return 2 if any(trees) else 1


def _case(case: CaseProof, arrays: Arrays, version: int) -> dict[str, Any]:
    leaves = []
    for number, one in enumerate(case.leaves):
        leaf = arrays.leaf(one)
        if leaf is not None:
            item = {"number": number, "slopes": leaf.slopes, "boxes": _boxes(leaf.boxes)}
            planes = [
                x and {"entries": x.entries, "shares": x.shares, "kept": x.kept}
                for x in leaf.planes
            ]
            leaves.append(item | ({"planes": planes} if version > 2 else {}))
    axes = [-1 if s is None else s[0] for s in case.splits]
    return {
        "axes": arrays.add(np.array(axes, "<i4")),
        "cuts": arrays.add(np.array([0.0 if s is None else s[1] for s in case.splits], "<f8")),
        "multipliers": arrays.add(np.array([one.multipliers for one in case.leaves], "<f8")),
        "leaves": leaves,
    }


def _cuts(case: Cuts, arrays: Arrays) -> dict[str, Any]:
    return {
        "axes": arrays.add(case.axes.astype("<i4")),
        "cuts": arrays.add(case.cuts.astype("<f8")),
        "multipliers": arrays.add(case.multipliers.astype("<f8")),
        "leaves": [],
    }


def _boxes(boxes: tuple[format_.Rows | None, ...], pulled: bool = False) -> list:
    found: list[dict[str, Any] | None] = [
        rows and {"entries": rows.entries, "sides": rows.sides, "slopes": rows.slopes}
        for rows in boxes
    ]
    for item, rows in zip(found, boxes, strict=True):
        if item is not None and rows is not None:
            if pulled:
                item["forces"] = rows.forces
            if rows.cases is not None:
                item["cases"] = dict(vars(rows.cases))
    return found


def _tree(tree: Branches, arrays: Arrays) -> dict[str, Any]:
    return {
        "axes": arrays.add(tree.axes),
        "cuts": arrays.add(tree.cuts),
        "multipliers": arrays.add(tree.multipliers),
        "forces": arrays.add(tree.forces),
        "slopes": arrays.named(tree.slopes),
        "boxes": _boxes(arrays.boxes(tree.whole)),
        "stations": [
            {"node": node, "boxes": _boxes(arrays.boxes(boxes), True)}
            for node, boxes in tree.stations.items()
        ],
    }
