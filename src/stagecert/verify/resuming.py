"""A search that was interrupted, as a file from which it goes on.

The file holds plain data: numbers, texts, arrays, and objects of the search's own classes by their
names and attributes. Reading it runs no code of the file's making. It is not trusted: what it says
is refuted goes through the checker like everything else, and points are replayed. So a file that
somebody has changed can cost an answer, and not make it wrong. It is read by the version that wrote
it, for the same model and property.
"""

import importlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from stagecert import __version__
from stagecert.errors import ProblemError
from stagecert.files import written_whole

_KIND = "stagecert search"
# Where classes of the search may come from, and what of objects is made anew instead.
_HOME = "stagecert.verify."
_MADE_ANEW = {
    "Complete": {
        "checker", "program", "groups", "memory", "keep", "team", "form", "_plain", "_narrow",
        "_written", "_accepted",
    },
    "Tree": {"program", "form", "keep", "stop", "pace", "lender"},
    "Splitter": {
        "network", "groups", "base", "free", "parts", "double", "batch", "points", "sizes", "lanes",
        "matrix", "limits", "goals", "strict", "units", "places", "used", "most", "checker",
        "form", "grafter", "weighs",
    },
}  # fmt: skip


def save(path: Path, model: str, property: str, search: dict[str, Any]) -> None:
    """Writes a search's objects, by name, for a model and a property with these digests."""
    arrays: dict[str, np.ndarray] = {}
    held = {
        "kind": _KIND,
        "version": __version__,
        "model": model,
        "property": property,
        "search": {name: _plain(value, arrays) for name, value in search.items()},
    }
    with written_whole(path) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("search.json", json.dumps(held))
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)


def restore(path: Path, model: str, property: str, into: dict[str, Any]) -> set[str]:
    """Gives objects the attributes that a file has for them; returns the names that it has.

    Raises:
        ProblemError: it is no such file, or one of another version, model or property.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            held = json.loads(archive.read("search.json"))
            known = isinstance(held, dict) and held.get("kind") == _KIND
            if not known:
                raise ValueError("it says nothing of a search")
            for what, mine in (("version", __version__), ("model", model), ("property", property)):
                if held.get(what) != mine:
                    raise ProblemError(
                        f"{path} is of another {what}: a search can only go on with what it began "
                        "with. Give another file, or remove this one."
                    )
            reader = _Reader(archive)
            found = {
                name: _attributes(reader, held["search"][name], type(into[name]).__name__)
                for name in into
                if name in held["search"]
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ProblemError(
            f"{path} cannot be read as an interrupted search: {error}. Remove it to begin anew."
        ) from None
    for name, attributes in found.items():
        into[name].__dict__.update(attributes)
    return set(found)


def _attributes(reader: "_Reader", plain: Any, kind: str) -> dict[str, Any]:
    if plain["class"].rsplit(".", 1)[-1] != kind:
        raise ValueError(f"there is a {plain['class']} where a {kind} should be")
    return {name: reader(value) for name, value in plain["has"].items()}


def _plain(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A value as JSON; arrays are put aside under a name."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (np.bool_, np.integer)):
        return value.item()
    if isinstance(value, (float, np.floating)):
        return {"float": float(value).hex()}
    if isinstance(value, np.ndarray):
        name = f"a{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_plain(one, arrays) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(k, arrays), _plain(v, arrays)] for k, v in value.items()]}
    kind = type(value)
    if not kind.__module__.startswith(_HOME):
        raise TypeError(f"a search holds a {kind.__module__}.{kind.__qualname__}")
    left_out = _MADE_ANEW.get(kind.__name__, set())
    has = {k: _plain(v, arrays) for k, v in value.__dict__.items() if k not in left_out}
    return {"class": f"{kind.__module__}.{kind.__name__}", "has": has}


class _Reader:
    """The way back."""

    def __init__(self, archive: zipfile.ZipFile):
        self._archive = archive

    def __call__(self, plain: Any) -> Any:
        if not isinstance(plain, dict):
            return plain
        if "float" in plain:
            return float.fromhex(plain["float"])
        if "array" in plain:
            with self._archive.open(f"{plain['array']}.npy") as part:
                return np.lib.format.read_array(part, allow_pickle=False)
        if "list" in plain:
            return [self(one) for one in plain["list"]]
        if "tuple" in plain:
            return tuple(self(one) for one in plain["tuple"])
        if "dict" in plain:
            return {self(key): self(value) for key, value in plain["dict"]}
        module, _, name = plain["class"].rpartition(".")
        kind = getattr(importlib.import_module(module), name) if module.startswith(_HOME) else None
        if not isinstance(kind, type) or kind.__module__ != module:
            raise ValueError(f"it has an object of an unknown kind, {plain['class']}")
        made = object.__new__(kind)
        made.__dict__.update({k: self(v) for k, v in plain["has"].items()})
        return made
