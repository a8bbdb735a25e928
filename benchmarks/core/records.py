"""Result files: what was measured, with what, when, and by which version of the code."""

import ast
import functools
import hashlib
import json
import sys
from pathlib import Path

from benchmarks.data import ROOT
from stagecert import machine
from stagecert.files import write_whole

RESULTS = ROOT / "benchmarks" / "results" / "core"

# What a search runs through. Other modules (plots, checks, applications) may change without making
# results out of date.
_CODE = (
    "batch.py",
    "certificate.py",
    "codes.py",
    "degeneracy.py",
    "lanes.py",
    "pieces.py",
    "problem.py",
    "reformulation.py",
    "sets.py",
    "solving.py",
    "tree.py",
    "solvers/base.py",
)
_SOLVERS = {
    "auto": ("greedy.py", "polish.py", "quasi_newton.py"),
    "greedy": ("greedy.py",),
    "polish": ("polish.py", "quasi_newton.py"),
    "accelerated": ("gradient.py",),
    "simple": ("gradient.py",),
    "safe": ("safe.py", "gradient.py"),
    "slope_ascent": ("greedy.py", "slope_ascent.py"),
}
_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "scipy", "highspy", "clarabel", "cvxpy")


@functools.cache
def code_version(solver: str | None = None) -> str:
    """A short hash of the code that a search with a solver (None: with any) runs through.

    Blind to comments, docstrings and layout.
    """
    digest = hashlib.sha256()
    source = ROOT / "src" / "stagecert"
    names = sorted(set().union(*_SOLVERS.values()) if solver is None else _SOLVERS[solver])
    for path in [source / name for name in _CODE] + [source / "solvers" / name for name in names]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [part for part in body if not _is_docstring(part)]  # type: ignore
        digest.update(f"{path.relative_to(source)}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:12]


def _is_docstring(node) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def provenance() -> dict:
    """With what the measurements of this run are made."""
    command = " ".join(["python -m benchmarks.core", *sys.argv[1:]])
    return {"command": command, "code": code_version(), **machine.made(_PACKAGES)}


def path_of(part: str) -> Path:
    """The result file of a part."""
    return RESULTS / f"{part}.json"


def load(part: str) -> dict | None:
    """The results of a part, or None."""
    path = path_of(part)
    return json.loads(path.read_text()) if path.exists() else None


def save(part: str, records: list[dict]) -> None:
    """Writes results, in one piece, so that an interrupted run leaves a whole file."""
    path = path_of(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"made": provenance(), "records": records}, indent=1, allow_nan=False)
    write_whole(path, text + "\n")


def number(x) -> float | None:
    """A float for JSON, which has no NaN and no infinities."""
    x = float(x)
    return x if abs(x) < float("inf") else None
