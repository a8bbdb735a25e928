"""Stagewise convex problems, solved with a certificate.

Names are loaded when they are first used, and JAX with them: the command line answers `--help`, and
a checker of certificates its question, without it.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

from stagecert_check import __version__ as __version__

if TYPE_CHECKING:  # what type checkers and the reference see; a test compares it with HOMES
    from stagecert import applications as applications
    from stagecert import interop as interop
    from stagecert import networks as networks
    from stagecert import properties as properties
    from stagecert import rigor as rigor
    from stagecert import robust as robust
    from stagecert import solvers as solvers
    from stagecert import sweeps as sweeps
    from stagecert import verify as verify
    from stagecert.batch import Batch, BatchSolution, stack
    from stagecert.certificate import Certificate
    from stagecert.check import Findings, Violation, check
    from stagecert.compiling import use_compilation_cache
    from stagecert.errors import ProblemError
    from stagecert.evidence import Assumptions, Evidence
    from stagecert.formula import Anchor, lower_bound
    from stagecert.pieces import (
        abs,
        max,
        max_allocation,
        maximum,
        min,
        min_allocation,
        minimum,
        piecewise_linear,
        relu,
    )
    from stagecert.plotting import plot_trace
    from stagecert.problem import (
        AbstractStage,
        Constraint,
        Objective,
        Problem,
        ScanStage,
        Stage,
        StageTrace,
    )
    from stagecert.reformulation import Point
    from stagecert.sets import AbstractSet, Ball, Box, BoxBall, Product, Simplex
    from stagecert.sides import Sides
    from stagecert.solution import Solution, Stats, Status, Trace
    from stagecert.solvers import AbstractSolver
    from stagecert.solving import solve, solve_batch
    from stagecert.validate import validate

# Packages that are attributes as soon as they are asked for, some with dependencies of their own.
PACKAGES = (
    "applications", "interop", "networks", "properties", "rigor", "robust", "solvers", "sweeps",
    "verify",
)  # fmt: skip

# The module that defines each name.
HOMES = {
    name: module
    for module, names in {
        "batch": "Batch BatchSolution stack",
        "certificate": "Certificate",
        "check": "Findings Violation check",
        "compiling": "use_compilation_cache",
        "errors": "ProblemError",
        "evidence": "Assumptions Evidence",
        "formula": "Anchor lower_bound",
        "pieces": "abs max max_allocation maximum min min_allocation minimum piecewise_linear relu",
        "plotting": "plot_trace",
        "problem": "AbstractStage Constraint Objective Problem ScanStage Stage StageTrace",
        "reformulation": "Point",
        "sets": "AbstractSet Ball Box BoxBall Product Simplex",
        "sides": "Sides",
        "solution": "Solution Stats Status Trace",
        "solvers": "AbstractSolver",
        "solving": "solve solve_batch",
        "validate": "validate",
    }.items()
    for name in names.split()
}

__all__ = [
    "AbstractSet", "AbstractSolver", "AbstractStage", "Anchor", "Assumptions", "Ball", "Batch",
    "BatchSolution", "Box", "BoxBall", "Certificate", "Constraint", "Evidence", "Findings",
    "Objective", "Point", "Problem", "ProblemError", "Product", "ScanStage", "Sides", "Simplex",
    "Solution", "Stage", "StageTrace", "Stats", "Status", "Trace", "Violation", "abs", "check",
    "lower_bound", "max", "max_allocation", "maximum", "min", "min_allocation", "minimum",
    "networks", "piecewise_linear", "plot_trace", "relu", "solve", "solve_batch", "stack",
    "use_compilation_cache", "validate",
]  # fmt: skip


if not TYPE_CHECKING:  # for a type checker, a module with this function has every name

    def __getattr__(name: str):
        try:
            if name in HOMES:
                value = getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
                globals()[name] = value
                return value
            if not name.startswith("_"):
                return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":  # something that the module needs is missing
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *PACKAGES})


class _Package(types.ModuleType):
    """This package, where `check` and `validate` are functions.

    The import system puts each module that it has loaded into its package, under its name. Two
    modules share their name with the function that users call.
    """

    def __setattr__(self, name: str, value) -> None:
        if HOMES.get(name) == name and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
