"""Reads a certificate: a zip of a JSON header and of NumPy arrays; see docs/certificates.md."""

import io
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stagecert.errors import ProblemError
from stagecert.rigor.functions import Refused
from stagecert.rigor.numbers import LARGEST

FORMAT = "stagecert certificate"
VERSION = 1
SLOPES = ("<f2", "<f4", "<f8")
_LARGEST_HEADER = 2**24
_LARGEST_ARRAY = 2**26

Slopes = tuple[str | None, str | None]  # names of the arrays below and above; None: default


@dataclass(frozen=True)
class Rows:
    """Entries of an activation's argument that get a pass back with slopes of their own.

    Attributes:
        entries: the name of an array of flat indices.
        sides: the name of an array of 1 (low ends) and -1 (high ends).
        slopes: of all earlier activations, with an axis of rows in front.
    """

    entries: str
    sides: str
    slopes: tuple[Slopes | None, ...]


@dataclass(frozen=True)
class Leaf:
    """What one leaf uses instead of the defaults.

    Attributes:
        slopes: of every activation, for the bound; None is the default.
        boxes: for every activation the rows that make its argument's interval tighter, or None.
    """

    slopes: tuple[Slopes | None, ...]
    boxes: tuple[Rows | None, ...]


@dataclass(frozen=True)
class Case:
    """The splits of a case's box in preorder, and what refutes it on the leaves.

    Attributes:
        axes: for every node of the tree the axis that it is cut along, or -1 for a leaf.
        cuts: where.
        multipliers: (leaves, rows), of the case's output rows and then of its input rows.
        leaves: those that need more than defaults, by number.
    """

    axes: np.ndarray
    cuts: np.ndarray
    multipliers: np.ndarray
    leaves: dict[int, Leaf]


class Certificate:
    """An open certificate for a model with a number of activations."""

    def __init__(self, path: Path | BinaryIO):
        try:
            self._zip = zipfile.ZipFile(path)
            names = self._zip.namelist()
            if self._zip.getinfo("header.json").file_size > _LARGEST_HEADER:
                raise ProblemError(f"{path}: the header is too large.")
            self._header = json.loads(self._zip.read("header.json"), object_pairs_hook=_unique)
        except OSError as error:
            raise ProblemError(f"{path}: cannot be read: {error.strerror or error}.") from None
        except ProblemError:
            raise
        except Exception as error:  # damaged files are damaged in many ways
            raise ProblemError(f"{path}: is no certificate: {str(error)[:200]}.") from None
        header = self._header
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ProblemError(f"{path}: is no stagecert certificate.")
        if type(header.get("version")) is not int or header["version"] != VERSION:
            raise ProblemError(f"{path}: has a version other than {VERSION}.")
        self._members, self._used = set(names), {"header.json"}
        if len(names) != len(self._members):
            raise Refused("the certificate has two members of one name")
        _keys(header, "format version stagecert model_sha256 property_sha256 cases")
        self.model, self.property = header["model_sha256"], header["property_sha256"]

    def cases(self, activations: int, rows: list[int]) -> list[Case]:
        """All cases, for a model with so many activations and cases with so many rows."""
        given = _list(self._header["cases"], len(rows), "cases")
        found = [self._case(case, activations, count)
                 for case, count in zip(given, rows, strict=True)]  # fmt: skip
        if self._used != self._members:
            extra = sorted(self._members - self._used)
            raise Refused(f"the certificate has members that nothing refers to: {extra[:3]}")
        return found

    def array(self, name: str, kinds: tuple[str, ...], shape: tuple[int | None, ...]) -> np.ndarray:
        """A finite array of one of the given types and the given shape; None is any length."""
        try:
            info = self._zip.getinfo(f"{name}.npy")
            if info.file_size > _LARGEST_ARRAY:
                raise ValueError("it is too large")
            data = io.BytesIO(self._zip.read(info))
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
        _keys(case, "axes cuts multipliers leaves")
        axes = self.array(self._name(case["axes"]), ("<i4",), (None,))
        cuts = self.array(self._name(case["cuts"]), ("<f8",), axes.shape)
        shape = (int(np.sum(axes == -1)), rows)
        multipliers = self.array(self._name(case["multipliers"]), ("<f8",), shape)
        leaves: dict[int, Leaf] = {}
        for leaf in _list(case["leaves"], None, "leaves"):
            _keys(leaf, "number slopes boxes")
            number = leaf["number"]
            if type(number) is not int or not 0 <= number < len(multipliers) or number in leaves:
                raise Refused(f"there is no leaf {str(number)[:60]}, or it is given twice")
            slopes = self._slopes(leaf["slopes"], activations)
            boxes = _list(leaf["boxes"], activations, "boxes")
            leaves[number] = Leaf(slopes, tuple(self._rows(x, k) for k, x in enumerate(boxes)))
        return Case(axes, cuts, multipliers, leaves)

    def _slopes(self, items: Any, count: int) -> tuple[Slopes | None, ...]:
        found = []
        for item in _list(items, count, "slopes"):
            if item is not None:
                item = tuple(None if x is None else self._name(x) for x in _list(item, 2, "slopes"))
            found.append(item)
        return tuple(found)

    def _rows(self, item: Any, before: int) -> Rows | None:
        if item is None:
            return None
        _keys(item, "entries sides slopes")
        return Rows(
            self._name(item["entries"]), self._name(item["sides"]),
            self._slopes(item["slopes"], before),
        )  # fmt: skip


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _keys(found: Any, keys: str) -> None:
    if not isinstance(found, dict) or sorted(found) != sorted(keys.split()):
        raise Refused(f"an entry of the header must have exactly the keys {keys}")


def _list(found: Any, length: int | None, what: str) -> list:
    if type(found) is not list or (length is not None and len(found) != length):
        raise Refused(f"'{what}' is not a list" + ("" if length is None else f" of {length}"))
    return found
