"""Reads a certificate: a zip of a JSON header and of NumPy arrays; see docs/certificates.md."""

import io
import json
import math
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from stagecert_check.errors import ProblemError
from stagecert_check.functions import Refused
from stagecert_check.numbers import LARGEST

FORMAT = "stagecert certificate"
VERSIONS = (1, 2, 3, 4)
LEAF = -1  # in a tree
SLOPES = ("<f2", "<f4", "<f8")
FORCES = ("<f4", "<f8")

# Limits, in bytes unless it says otherwise; see docs/certificates.md.
_LARGEST_FILE = 2**30
_LARGEST_HEADER = 2**22
_LARGEST_ARRAY = 2**28
_LARGEST_TOTAL = 2**30  # of all members, unpacked
_MOST_MEMBERS = 2**16
_MOST_LEAVES = 2**20
_MOST_MULTIPLIERS = 2**24
_MOST_FORCES = 2**24
# A packed file must be worth the work that it asks for: so many leaves and stations in any case,
# and so many more for each byte. (Of a tree that is cut into equal parts, which packs best, a leaf
# takes 1/6 byte; a station that shares all arrays with others takes four.)
_FEW_LEAVES, _LEAVES_A_BYTE = 2**12, 8
_FEW_STATIONS, _STATIONS_A_BYTE = 2**10, 1 / 4

Slopes = tuple[str | None, str | None]  # names of the arrays below and above; None: default


class Source(Protocol):
    """Where arrays are: a certificate, or what is to become one."""

    def array(self, name: str, kinds: tuple[str, ...], shape: tuple[int | None, ...]) -> np.ndarray:
        """An array of one of the given types and the given shape; None is any length."""
        ...

    def slopes(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        """Slopes as float64."""
        ...


@dataclass(frozen=True)
class Cases:
    """Trees of splits that bound single entries of an activation's argument: names of arrays.

    Attributes:
        entries: flat indices, one for each tree.
        sides: 1 (low ends) and -1 (high ends).
        axes: the trees in preorder, one after the other: neurons of earlier activations, or -1.
        cuts: where.
        forces: for every leaf one number for each split on the way to it.
        slopes: of all earlier activations, with an axis of leaves in front, or of length 1.
    """

    entries: str
    sides: str
    axes: str
    cuts: str
    forces: str
    slopes: tuple[Slopes | None, ...]


@dataclass(frozen=True)
class Rows:
    """Entries of an activation's argument that get a pass back with slopes of their own.

    Attributes:
        entries: the name of an array of flat indices.
        sides: the name of an array of 1 (low ends) and -1 (high ends).
        slopes: of all earlier activations, with an axis of rows in front.
        forces: the name of an array (rows, splits) of forces of the splits on the way to a node
            of a tree. None stands for zeros, and is all there is for a whole box.
        cases: what is proven by cases besides, for the whole box.
    """

    entries: str
    sides: str
    slopes: tuple[Slopes | None, ...]
    forces: str | None = None
    cases: Cases | None = None


@dataclass(frozen=True)
class Above:
    """Planes above neurons of an activation: names of arrays; see `planes`.

    Attributes:
        entries: flat indices of the neurons.
        shares: how much of each takes its plane.
        kept: (planes, entries of all that neurons read): slopes, as shares of weights.
    """

    entries: str
    shares: str
    kept: str


@dataclass(frozen=True)
class Leaf:
    """What one leaf uses instead of the defaults, or all leaves of a tree that splits neurons.

    Attributes:
        slopes: of every activation, for the bound; None is the default.
        boxes: for every activation the rows that make its argument's interval tighter, or None.
        count: of leaves, if it is for all: then slopes have an axis of leaves in front, or of
            length 1, and boxes are for the box of the whole case.
        planes: for every activation planes above some of its neurons, or None; or nothing at all.
    """

    slopes: tuple[Slopes | None, ...]
    boxes: tuple[Rows | None, ...]
    count: int | None = None
    planes: tuple[Above | None, ...] = ()


@dataclass(frozen=True)
class Case:
    """The splits of a case in preorder, and what refutes it on the leaves.

    Attributes:
        axes: for every node of the tree the axis that it is cut along, or -1 for a leaf. After the
            inputs, axes count neurons.
        cuts: where.
        multipliers: (leaves, rows), of the case's output rows and then of its input rows.
        leaves: those that need more than defaults, by number.
        forces: for every leaf one number for each neuron split on the way to it. None if neurons
            are not split; then there may be `leaves`, otherwise what is for `all`.
        stations: by node, in preorder: rows that make intervals tighter below that node.
    """

    axes: np.ndarray
    cuts: np.ndarray
    multipliers: np.ndarray
    leaves: dict[int, Leaf]
    forces: np.ndarray | None = None
    all: Leaf | None = None
    stations: dict[int, tuple[Rows | None, ...]] = field(default_factory=dict)


class Certificate:
    """An open certificate."""

    def __init__(self, source: Path | str | bytes | BinaryIO):
        """Opens a file, or what is in one.

        Raises:
            ProblemError: it is no certificate.
            Refused: it is one, but damaged or beyond the format's limits.
        """
        if isinstance(source, (str, Path)):
            self._name_of, file = str(source), Path(source)
        else:
            self._name_of = "the certificate"
            file = io.BytesIO(source) if isinstance(source, bytes) else source
        try:
            size = file.stat().st_size if isinstance(file, Path) else file.seek(0, io.SEEK_END)
            if size > _LARGEST_FILE:
                raise Refused(f"the certificate is larger than {_LARGEST_FILE} bytes")
            self._most_leaves = min(_FEW_LEAVES + _LEAVES_A_BYTE * size, _MOST_LEAVES)
            self._most_stations = _FEW_STATIONS + int(_STATIONS_A_BYTE * size)
            self._zip = self._opened(file)
        except OSError as error:
            raise ProblemError(
                f"{self._name_of}: cannot be read: {error.strerror or error}."
            ) from None
        self._header = header = self._read_header()
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise self._none(f"header.json does not have the format '{FORMAT}'")
        if type(header.get("version")) is not int or header["version"] not in VERSIONS:
            which = str(header.get("version"))[:60]
            raise ProblemError(
                f"{self._name_of}: is of version {which}; this checker reads versions "
                f"{VERSIONS[0]} to {VERSIONS[-1]}."
            )
        members = self._zip.infolist()
        self._members, self._used = {info.filename for info in members}, {"header.json"}
        self._parts = 0  # leaves of proofs by cases
        if len(members) != len(self._members):
            raise Refused("the certificate has two members of one name")
        if len(members) > _MOST_MEMBERS:
            raise Refused(f"the certificate has {len(members)} members, more than {_MOST_MEMBERS}")
        if sum(info.file_size for info in members) > _LARGEST_TOTAL:
            raise Refused(f"the certificate has more than {_LARGEST_TOTAL} bytes when unpacked")
        _keys(header, "format version stagecert model_sha256 property_sha256 cases")
        self.version: int = header["version"]
        self.model, self.property = header["model_sha256"], header["property_sha256"]

    def _none(self, why: str) -> ProblemError:
        return ProblemError(f"{self._name_of}: is no stagecert certificate: {why}.")

    def _opened(self, file: Path | BinaryIO) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(file)
        except OSError:
            raise
        except Exception as error:
            if isinstance(file, Path):
                with file.open("rb") as opened:
                    start = opened.read(512)
            else:
                file.seek(0)
                start = file.read(512)
            raise self._none(f"{_kind_of(start)} ({str(error)[:200]})") from None

    def _read_header(self) -> Any:
        try:
            info = self._zip.getinfo("header.json")
        except KeyError:
            raise self._none("the zip file has no member header.json") from None
        if info.file_size > _LARGEST_HEADER:
            raise Refused(f"the header is larger than {_LARGEST_HEADER} bytes")
        try:
            return json.loads(self._unpacked(info), object_pairs_hook=_unique)
        except Exception as error:  # damaged files are damaged in many ways
            raise self._none(f"header.json cannot be read: {str(error)[:200]}") from None

    def _unpacked(self, info: zipfile.ZipInfo) -> bytes:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("it is packed neither by deflate nor not at all")
        return self._zip.read(info)

    def cases(self, activations: int, rows: list[int]) -> list[Case]:
        """All cases, for a model with so many activations and cases with so many rows."""
        given = _list(self._header["cases"], len(rows), "cases")
        found: list[Case] = []
        leaves = multipliers = forces = stations = 0
        for case, count in zip(given, rows, strict=True):
            found.append(self._case(case, activations, count))
            leaves += len(found[-1].multipliers)
            multipliers += found[-1].multipliers.size
            forces += 0 if found[-1].forces is None else len(found[-1].forces)
            stations += len(found[-1].stations)
            self._justified(leaves + self._parts, stations)
            if multipliers > _MOST_MULTIPLIERS or forces > _MOST_FORCES:
                raise Refused(
                    f"there are more than {_MOST_MULTIPLIERS} multipliers or {_MOST_FORCES} forces"
                )
        if self._used != self._members:
            extra = sorted(self._members - self._used)
            raise Refused(f"the certificate has members that nothing refers to: {extra[:3]}")
        return found

    def _justified(self, leaves: int, stations: int) -> None:
        """Refuses more leaves or stations than a file of this size may have."""
        for count, most, what in (
            (leaves, self._most_leaves, "leaves"),
            (stations, self._most_stations, "stations"),
        ):
            if count > most:
                raise Refused(
                    f"there are more than {most} {what}, too many for the size of the certificate"
                )

    def array(self, name: str, kinds: tuple[str, ...], shape: tuple[int | None, ...]) -> np.ndarray:
        """A finite array of one of the given types and the given shape; None is any length."""
        try:
            info = self._zip.getinfo(f"{name}.npy")
            if info.file_size > _LARGEST_ARRAY:
                raise ValueError(f"it is larger than {_LARGEST_ARRAY} bytes")
            data = io.BytesIO(self._unpacked(info))
            if np.lib.format.read_magic(data) != (1, 0):
                raise ValueError("it has another version of NumPy's format")
            length, fortran, dtype = np.lib.format.read_array_header_1_0(data)
            if fortran or dtype not in map(np.dtype, kinds):
                raise ValueError(f"it is {dtype}, not {' or '.join(kinds)} in C order")
            if len(length) != len(shape) or any(
                n not in (m, None) for m, n in zip(length, shape, strict=True)
            ):
                raise ValueError(f"its shape is {length}, not {shape}")
            rest = data.read()
            if len(rest) != math.prod(length) * dtype.itemsize:
                raise ValueError("its length does not fit its shape")
        except Exception as error:
            raise Refused(f"the array '{name}' is damaged: {str(error)[:200]}") from None
        found = np.frombuffer(rest, dtype).reshape(length)
        if not np.all(np.isfinite(found)):
            raise Refused(f"the array '{name}' has entries that are not finite")
        return found

    def slopes(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        """Slopes as float64."""
        found = self.array(name, SLOPES, shape).astype(np.float64)
        if np.any(np.abs(found) > LARGEST):
            raise Refused(f"the array '{name}' has entries that are too large")
        return found

    def _name(self, name: Any) -> str:
        member = f"{name}.npy"
        if type(name) is not str or member not in self._members:
            raise Refused(f"the array {str(name)[:60]!r} is missing")
        self._used.add(member)
        return name

    def _case(self, case: Any, activations: int, rows: int) -> Case:
        stacked = self.version > 1 and isinstance(case, dict) and "forces" in case
        more = " stations" if stacked and "stations" in case else ""
        _keys(
            case, "axes cuts multipliers " + (f"forces slopes boxes{more}" if stacked else "leaves")
        )
        axes = self.array(self._name(case["axes"]), ("<i4",), (None,))
        cuts = self.array(self._name(case["cuts"]), ("<f8",), axes.shape)
        shape = (int(np.sum(axes == LEAF)), rows)
        self._justified(shape[0], 0)
        if len(axes) != 2 * shape[0] - 1:
            raise Refused("a tree does not have one split less than leaves")
        multipliers = self.array(self._name(case["multipliers"]), ("<f8",), shape)
        if stacked:
            forces = self.array(self._name(case["forces"]), ("<f8",), (None,))
            if np.any(forces < 0) or np.any(forces > LARGEST):
                raise Refused("forces must not be negative, nor too large")
            # Empty lists stand for nothing but defaults.
            slopes = self._slopes(case["slopes"], activations if case["slopes"] else 0)
            boxes = self._boxes(case["boxes"], activations if case["boxes"] else 0, "cases")
            everywhere = Leaf(slopes, boxes, len(multipliers))
            stations = self._stations(case.get("stations", []), axes, activations)
            return Case(axes, cuts, multipliers, {}, forces, everywhere, stations)
        leaves: dict[int, Leaf] = {}
        for leaf in _list(case["leaves"], None, "leaves"):
            _keys(leaf, "number slopes boxes" + (" planes" if self.version > 2 else ""))
            number = leaf["number"]
            if type(number) is not int or not 0 <= number < len(multipliers) or number in leaves:
                raise Refused(f"there is no leaf {str(number)[:60]}, or it is given twice")
            slopes = self._slopes(leaf["slopes"], activations)
            planes = self._planes(leaf.get("planes", []), activations)
            leaves[number] = Leaf(slopes, self._boxes(leaf["boxes"], activations), planes=planes)
        return Case(axes, cuts, multipliers, leaves)

    def _slopes(self, items: Any, count: int) -> tuple[Slopes | None, ...]:
        found = []
        for item in _list(items, count, "slopes"):
            if item is not None:
                item = tuple(None if x is None else self._name(x) for x in _list(item, 2, "slopes"))
            found.append(item)
        return tuple(found)

    def _stations(
        self, items: Any, axes: np.ndarray, activations: int
    ) -> dict[int, tuple[Rows | None, ...]]:
        found: dict[int, tuple[Rows | None, ...]] = {}
        self._justified(0, len(_list(items, None, "stations")))
        for item in items:
            _keys(item, "node boxes")
            node = item["node"]
            if type(node) is not int or not 0 <= node < len(axes) or node in found:
                raise Refused(f"there is no node {str(node)[:60]}, or it is given twice")
            found[node] = self._boxes(item["boxes"], activations, "forces")
        return found

    def _planes(self, items: Any, count: int) -> tuple[Above | None, ...]:
        found = []
        for item in _list(items, count if items else 0, "planes"):
            if item is not None:
                _keys(item, "entries shares kept")
                item = Above(*(self._name(item[key]) for key in ("entries", "shares", "kept")))
            found.append(item)
        return tuple(found)

    def _boxes(self, items: Any, count: int, more: str = "") -> tuple[Rows | None, ...]:
        """Rows with forces, or perhaps with cases: what there may be more of."""
        listed = _list(items, count, "boxes")
        return tuple(self._rows(x, k, more) for k, x in enumerate(listed))

    def _rows(self, item: Any, before: int, more: str) -> Rows | None:
        if item is None:
            return None
        split = more == "cases" and self.version > 3 and isinstance(item, dict) and more in item
        _keys(item, f"entries sides slopes {more if split or more == 'forces' else ''}")
        forces = item.get("forces")
        return Rows(
            self._name(item["entries"]), self._name(item["sides"]),
            self._slopes(item["slopes"], before),
            None if forces is None else self._name(forces),
            self._cases(item["cases"], before) if split else None,
        )  # fmt: skip

    def _cases(self, item: Any, before: int) -> Cases:
        _keys(item, "entries sides axes cuts forces slopes")
        entries, sides, axes, cuts, forces = (
            self._name(item[key]) for key in ("entries", "sides", "axes", "cuts", "forces")
        )
        self._parts += int(np.sum(self.array(axes, ("<i4",), (None,)) == LEAF))
        self._justified(self._parts, 0)
        return Cases(entries, sides, axes, cuts, forces, self._slopes(item["slopes"], before))


def _kind_of(start: bytes) -> str:
    """What a file that is no zip file begins like."""
    if not start:
        return "the file is empty"
    for magic, kind in ((b"\x1f\x8b", "a gzip file"), (b"PK", "a damaged zip file")):
        if start.startswith(magic):
            return f"it is {kind}"
    if b"(declare-" in start or b"(assert" in start:
        return "it is a VNN-LIB property"
    printable = all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
    return "it is a text file" if printable else "it is no zip file"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _keys(found: Any, keys: str) -> None:
    if not isinstance(found, dict) or sorted(found) != sorted(keys.split()):
        raise Refused(f"an entry of the header must have exactly the keys {keys}")


def _list(found: Any, length: int | None, what: str) -> list[Any]:
    if type(found) is not list or (length is not None and len(found) != length):
        raise Refused(f"'{what}' is not a list" + ("" if length is None else f" of {length}"))
    return found
