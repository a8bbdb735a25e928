"""Instance lists as VNN-COMP has them: model, property, seconds, and perhaps the known answer."""

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagecert.errors import ProblemError

# What the columns are called in lists with a heading, and their order in lists without one.
_NAMES = {
    "model": ("model", "onnx", "network"),
    "property": ("property", "vnnlib"),
    "timeout": ("timeout",),
    "expected": ("expected", "answer"),
}
# A conflict is an answer on which tools disagree.
ANSWERS = ("unsat", "sat", "unknown", "conflict")


@dataclass(frozen=True)
class Instance:
    """One line of a list.

    Attributes:
        set: the name of the list.
        model, property: as the list names them, relative to the list's folder.
        model_path, property_path: where these files are, from the root; that of the packed file
            (.gz) if only that is there. Of several networks, (("f", path), ("g", path)).
        timeout: seconds.
        expected: "sat" or "unsat" if the answer is known, "unknown" or "conflict" if it is said not
            to be, None if nothing is said.
    """

    set: str
    model: str
    property: str
    model_path: Path | tuple[tuple[str, Path], ...]
    property_path: Path
    timeout: float
    expected: str | None = None

    def name(self) -> str:
        """Model and property without folders and endings."""
        return f"{self.model_name()} {stem(self.property)}"

    def model_name(self) -> str:
        """The model, or all networks, without folders and endings."""
        if isinstance(self.model_path, Path):
            return stem(self.model)
        return " ".join(f"{name}={stem(path.name)}" for name, path in self.model_path)


def read_lists(
    paths: Sequence[str | Path],
    *,
    timeout: float | None = None,
    answers: Sequence[str | Path] = (),
    limit: int | None = None,
) -> list[Instance]:
    """The instances of one or more lists, in their order.

    Lists are CSV files with the columns model, property, timeout and, if answers are known,
    expected. A heading (with VNN-COMP's names onnx and vnnlib, too) may put them in another order.
    Blank lines and those that begin with # are skipped. Files are looked for in the list's folder,
    packed ones too; `onnx/a/f.onnx` that is not there may be the only `f.onnx` below `onnx`.

    Args:
        paths: the lists.
        timeout: seconds for every instance, instead of those of the lists.
        answers: files of known answers: columns model (or onnx), property (or vnnlib), expected,
            with a heading.
        limit: at most this many instances of each list, evenly spread over it.

    Raises:
        ProblemError: a list cannot be read; the message names the line. Whether the files that it
            names can be read is not looked at.
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise ProblemError(f"timeout must be a positive number of seconds, not {timeout!r}.")
    if limit is not None and limit < 1:
        raise ProblemError(f"limit must be at least 1, not {limit!r}.")
    known: dict[tuple[str, str], str] = {}
    for path in map(Path, answers):
        for where, row in _rows(path, heading=True):
            known[_identity(path, row)] = _expected(where, row)
    lists = [Path(path) for path in paths]
    found = []
    for path, name in zip(lists, _set_names(lists), strict=True):
        instances = [_instance(where, row, path, name, timeout) for where, row in _rows(path)]
        if not instances:
            raise ProblemError(f"{path} has no instances.")
        for one in spread(instances, limit):
            answer = known.get(_identity(path, {"model": one.model, "property": one.property}))
            found.append(one if answer is None else replace(one, expected=answer))
    return found


def spread(items: list, limit: int | None) -> list:
    """At most `limit` items, evenly spread over the list."""
    if limit is None or limit >= len(items):
        return items
    return [items[round(k * (len(items) - 1) / max(limit - 1, 1))] for k in range(limit)]


def stem(name: str) -> str:
    """A file's name without folders and endings."""
    name = Path(name).name
    for ending in (".gz", ".onnx", ".vnnlib"):
        name = name.removesuffix(ending)
    return name


def _rows(path: Path, heading: bool = False) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of a list: (where it is, {column: cell}); empty cells are left out."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ProblemError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ProblemError(f"{path} is no CSV file: it is not text.") from None
    columns: list[str | None] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        if line.lstrip().startswith("#"):
            continue
        if line.count('"') % 2:
            raise ProblemError(f"{where}: a quotation mark is not closed.")
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
        except csv.Error as error:  # such as a field of more than 131,072 characters
            raise ProblemError(f"{where} is no line of a CSV file: {error}.") from None
        if not any(cells):
            continue
        if columns is None:
            columns = _heading(cells)
            if columns is not None:
                continue
            if heading:
                raise ProblemError(
                    f"{where}: a heading is needed, with the columns model (or onnx), property "
                    f"(or vnnlib) and expected, not {','.join(cells)!r}."
                )
            columns = list(_NAMES)
        row = {
            name: cell for name, cell in zip(columns, cells, strict=False) if name and cell
        }  # fmt: skip
        for name in ("model", "property"):
            if name not in row:
                raise ProblemError(f"{where}: there is no {name} in {','.join(cells)!r}.")
        if any(cells[len(columns) :]):
            raise ProblemError(
                f"{where}: {len(cells)} columns, but there are {len(columns)} at most: "
                f"{', '.join(name or '-' for name in columns)}."
            )
        yield where, row


def _heading(cells: list[str]) -> list[str | None] | None:
    """Which column each cell of a heading names; None if this is no heading."""
    meaning = {name: column for column, names in _NAMES.items() for name in names}
    columns = [meaning.get(cell.lower()) for cell in cells]
    return columns if {"model", "property"} <= set(columns) else None


def _instance(
    where: str, row: dict[str, str], path: Path, name: str, timeout: float | None
) -> Instance:
    if timeout is None:
        if "timeout" not in row:
            raise ProblemError(f"{where}: there is no timeout, in seconds; or give --timeout.")
        try:
            timeout = float(row["timeout"])
        except ValueError:
            timeout = math.nan
        if not 0 < timeout < math.inf:
            raise ProblemError(
                f"{where}: the timeout must be a positive number of seconds, not "
                f"{row['timeout']!r}."
            )
    from stagecert_check import joining

    several = joining.named(row["model"])
    model_path: Path | tuple[tuple[str, Path], ...]
    if several is None:
        model_path = _there(path.parent, row["model"])
    else:
        model_path = tuple((name, _there(path.parent, file)) for name, file in several)
    return Instance(
        set=name,
        model=row["model"],
        property=row["property"],
        model_path=model_path,
        property_path=_there(path.parent, row["property"]),
        timeout=timeout,
        expected=_expected(where, row) if "expected" in row else None,
    )


def _expected(where: str, row: dict[str, Any]) -> str:
    answer = row.get("expected", "").lower()
    if answer not in ANSWERS:
        raise ProblemError(
            f"{where}: the expected answer must be {', '.join(ANSWERS[:-1])} or {ANSWERS[-1]}, "
            f"not {answer!r}."
        )
    return answer


def _there(folder: Path, file: str | Path) -> Path:
    """Where a file is that a list in this folder names.

    As it is named, or packed. If there is neither: the only file of that name, packed or not, below
    the first folder that is named, because published lists can name folders that the set lacks.
    """
    # Workers may have another working directory.
    root = Path(os.path.abspath(folder))
    path = Path(os.path.abspath(root / file))
    names = (path.name, path.name + ".gz")
    for name in names:
        if path.with_name(name).exists():
            return path.with_name(name)
    if not path.is_relative_to(root):
        return path
    first = root / path.relative_to(root).parts[0]
    others = [one for one in first.rglob("*") if one.name in names]
    return others[0] if len(others) == 1 else path


def _identity(path: Path, row: dict[str, str]) -> tuple[str, str]:
    """The files of a line, however it spells them."""
    model, property = (
        os.path.abspath(path.parent / row[name]).removesuffix(".gz")
        for name in ("model", "property")
    )
    return model, property


def _set_names(paths: list[Path]) -> list[str]:
    """Short names of lists: the folder for instances.csv, else the file; paths if two are equal."""
    names = [
        path.absolute().parent.name if path.name == "instances.csv" else path.stem for path in paths
    ]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise ProblemError(f"{max(names, key=names.count)} is given twice.")
    return names
