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

# What a search runs through.
_CODE = (
    "assumptions.py",
    "batch.py",
    "certificate.py",
    "codes.py",
    "degeneracy.py",
    "formula.py",
    "guiding.py",
    "inside.py",
    "lanes.py",
    "pieces.py",
    "problem.py",
    "programme/quadratic.py",
    "programme/reading.py",
    "programme/rows.py",
    "programme/solver.py",
    "programme/values.py",
    "programme/writing.py",
    "ordering.py",
    "reformulation.py",
    "repairing.py",
    "searching.py",
    "sets.py",
    "sides.py",
    "solving.py",
    "tree.py",
    "solvers/base.py",
)
# Imported by these, but free to change without making results out of date: what is said about input
# and answers, and proofs of convexity, which a search does not wait for.
_ASIDE = (
    "check.py",
    "curvature",
    "errors.py",
    "evidence.py",
    "files.py",
    "jaxprs.py",
    "solution.py",
    "validate.py",
)
_RIGOROUS = "enclosure"  # what bounds run through besides where they are rigorous
_SOLVERS = {
    "auto": ("greedy.py", "mirror.py", "polish.py", "quasi_newton.py"),
    "greedy": ("greedy.py",),
    "polish": ("polish.py", "quasi_newton.py"),
    "accelerated": ("gradient.py",),
    "simple": ("gradient.py",),
    "safe": ("safe.py", "gradient.py"),
    "slope_ascent": ("greedy.py", "slope_ascent.py"),
}
_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "scipy", "highspy", "clarabel", "cvxpy")


@functools.cache
def code_version(solver: str | None = None, rigorous: bool = False) -> str:
    """A short hash of the code that a search with a solver (None: with any) runs through.

    Blind to comments, docstrings and layout.
    """
    digest = hashlib.sha256()
    source = ROOT / "src" / "stagecert"
    names = sorted(set().union(*_SOLVERS.values()) if solver is None else _SOLVERS[solver])
    paths = [source / name for name in _CODE] + [source / "solvers" / name for name in names]
    if rigorous:
        paths += sorted((source / _RIGOROUS).glob("*.py"))
    for path in paths:
        digest.update(f"{path.relative_to(source)}\n{_dumped(path)}\n".encode())
    return digest.hexdigest()[:12]


@functools.cache
def _dumped(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_docstring(part)]  # type: ignore
    return ast.dump(tree)


def _is_docstring(node) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def part_version(part: str) -> str:
    """The hash of the code that a part measures."""
    return code_version(rigorous=part == "rigor")


def provenance(part: str) -> dict:
    """With what the measurements of this run are made."""
    command = " ".join(["python -m benchmarks.core", *sys.argv[1:]])
    return {"command": command, "code": part_version(part), **machine.made(_PACKAGES)}


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
    text = json.dumps({"made": provenance(part), "records": records}, indent=1, allow_nan=False)
    write_whole(path, text + "\n")


def number(x) -> float | None:
    """A float for JSON, which has no NaN and no infinities."""
    x = float(x)
    return x if abs(x) < float("inf") else None
