"""Solvers: small objects that one loop (stagecert.searching) runs."""

from stagecert.solvers.base import AbstractSolver, Report
from stagecert.solvers.damped import Damped
from stagecert.solvers.gradient import Accelerated, Backtracking, Simple
from stagecert.solvers.greedy import Greedy
from stagecert.solvers.mirror import Mirror
from stagecert.solvers.polish import Polish
from stagecert.solvers.safe import Safe
from stagecert.solvers.slope_ascent import SlopeAscent

__all__ = [
    "AbstractSolver", "Accelerated", "Backtracking", "Damped", "Greedy", "Mirror", "Polish",
    "Report", "Safe", "Simple", "SlopeAscent",
]  # fmt: skip
