"""Reads a certificate: a zip of a JSON header and of NumPy arrays; see docs/certificates.md."""

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagecert.errors import ProblemError
from stagecert.rigor.functions import Refused

FORMAT = "stagecert certificate"
VERSION = 1
_LARGEST_HEADER = 2**28
_LARGEST_ARRAY = 2**31


@dataclass(frozen=True)
class Leaf:
    """What refutes one part of a case's box; arrays are given by their names.

    Attributes:
        multipliers: of the case's output rows and then of its input rows.
        boxes: (low, high) for the argument of every activation.
        justify: for every activation None (interval arithmetic) or the lines of all earlier ones.
        lines: of every activation, for the bound itself. A line is four names, or None for the
            default.
    """

    multipliers: str
    boxes: tuple[tuple[str, str], ...]
    justify: tuple[tuple | None, ...]
    lines: tuple[tuple[str, str, str, str] | None, ...]


@dataclass(frozen=True)
class Tree:
    """Splits in preorder, (axis, position) or None for a leaf, and the leaves in that order."""

    splits: tuple[tuple[int, float] | None, ...]
    leaves: tuple[Leaf, ...]


class Certificate:
    """An open certificate."""

    def __init__(self, path: Path):
        try:
            self._zip = zipfile.ZipFile(path)
            names = self._zip.namelist()
            if self._zip.getinfo("header.json").file_size > _LARGEST_HEADER:
                raise ProblemError(f"{path}: the header is too large.")
            header = json.loads(self._zip.read("header.json"), object_pairs_hook=_unique)
        except OSError as error:
            raise ProblemError(f"{path}: cannot be read: {error.strerror or error}.") from None
        except ProblemError:
            raise
        except Exception as error:  # damaged files are damaged in many ways
            raise ProblemError(f"{path}: is no certificate: {error}.") from None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ProblemError(f"{path}: is no stagecert certificate.")
        if type(header.get("version")) is not int or header["version"] != VERSION:
            raise ProblemError(f"{path}: has a version other than {VERSION}.")
        self._members, self._used = set(names), {"header.json"}
        if len(names) != len(self._members):
            raise Refused("the certificate has two members of one name")
        _keys(header, "format version stagecert model_sha256 property_sha256 cases")
        self.model, self.property = header["model_sha256"], header["property_sha256"]
        self.cases = [self._tree(case) for case in _list(header["cases"])]
        if self._used != self._members:
            extra = sorted(self._members - self._used)
            raise Refused(f"the certificate has members that nothing refers to: {extra[:3]}")

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A finite float64 array of the given shape."""
        info = self._zip.getinfo(f"{name}.npy")
        if info.file_size > _LARGEST_ARRAY:
            raise Refused(f"the array '{name}' is too large")
        try:
            with self._zip.open(info) as file:
                data = io.BytesIO(file.read())
            found = np.lib.format.read_array(data, allow_pickle=False)
        except Exception as error:
            raise Refused(f"the array '{name}' is damaged: {error}") from None
        if data.read(1) or found.dtype != np.dtype("<f8") or found.shape != shape:
            raise Refused(
                f"the array '{name}' is {found.dtype} {found.shape} instead of float64 {shape}"
            )
        if not np.all(np.isfinite(found)):
            raise Refused(f"the array '{name}' has entries that are not finite")
        return np.ascontiguousarray(found)

    def _name(self, name: Any) -> str:
        member = f"{name}.npy"
        if type(name) is not str or member not in self._members:
            raise Refused(f"the array {name!r} is missing")
        self._used.add(member)
        return name

    def _names(self, names: Any, count: int) -> tuple:
        return tuple(self._name(name) for name in _list(names, count))

    def _lines(self, items: Any, count: int | None = None) -> tuple:
        return tuple(
            None if item == "default" else self._names(item, 4) for item in _list(items, count)
        )

    def _tree(self, case: Any) -> Tree:
        _keys(case, "splits leaves")
        splits: list[tuple[int, float] | None] = []
        for split in _list(case["splits"]):
            if split is not None:
                axis, at = _list(split, 2)
                if type(axis) is not int or type(at) is not float:
                    raise Refused(f"{split} is no split")
                split = axis, at
            splits.append(split)
        return Tree(tuple(splits), tuple(self._leaf(leaf) for leaf in _list(case["leaves"])))

    def _leaf(self, leaf: Any) -> Leaf:
        _keys(leaf, "multipliers boxes justify lines")
        boxes = tuple(self._names(pair, 2) for pair in _list(leaf["boxes"]))
        justify = []
        for k, item in enumerate(_list(leaf["justify"], len(boxes))):
            justify.append(None if item == "ibp" else self._lines(item, k))
        lines = self._lines(leaf["lines"], len(boxes))
        return Leaf(self._name(leaf["multipliers"]), boxes, tuple(justify), lines)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _keys(found: Any, keys: str) -> None:
    if not isinstance(found, dict) or sorted(found) != sorted(keys.split()):
        raise Refused(f"an entry of the header must have exactly the keys {keys}")


def _list(found: Any, length: int | None = None) -> list:
    if type(found) is not list or (length is not None and len(found) != length):
        raise Refused(f"the header has {str(found)[:60]!r} where a list of {length} should be")
    return found
