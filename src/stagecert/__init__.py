"""Stagewise convex problems, solved with a certificate."""

from stagecert import networks
from stagecert.batch import Batch, BatchSolution, stack
from stagecert.certificate import Anchor, Certificate, lower_bound
from stagecert.check import Findings, Violation, check
from stagecert.compiling import use_compilation_cache
from stagecert.errors import ProblemError
from stagecert.evidence import Assumptions, Evidence
from stagecert.pieces import abs, max, maximum, min, minimum, piecewise_linear, relu
from stagecert.plotting import plot_trace
from stagecert.problem import AbstractStage, Objective, Problem, ScanStage, Stage, StageTrace
from stagecert.reformulation import Point
from stagecert.sets import AbstractSet, Ball, Box, BoxBall, Product, Simplex
from stagecert.solution import Solution, Stats, Status, Trace
from stagecert.solvers import AbstractSolver
from stagecert.solving import solve, solve_batch
from stagecert.validate import validate

__version__ = "0.1.0"

__all__ = [
    "AbstractSet",
    "AbstractSolver",
    "AbstractStage",
    "Anchor",
    "Assumptions",
    "Ball",
    "Batch",
    "BatchSolution",
    "Box",
    "BoxBall",
    "Certificate",
    "Evidence",
    "Findings",
    "Objective",
    "Point",
    "Problem",
    "ProblemError",
    "Product",
    "ScanStage",
    "Simplex",
    "Solution",
    "Stage",
    "StageTrace",
    "Stats",
    "Status",
    "Trace",
    "Violation",
    "abs",
    "check",
    "lower_bound",
    "max",
    "maximum",
    "min",
    "minimum",
    "networks",
    "piecewise_linear",
    "plot_trace",
    "relu",
    "solve",
    "solve_batch",
    "stack",
    "use_compilation_cache",
    "validate",
]
