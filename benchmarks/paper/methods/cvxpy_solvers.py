"""The relaxation in CVXPY, for solvers from outside; one problem at a time, default settings.

A bound is what the solver reports as the optimum, to its own tolerances; NaN if it does not report
one. Interior points often break off on SoftPlus: far from zero, hulls have next to no inside.

Times are those of `Problem.solve`: CVXPY's own transformation and the solver; writing the problem
down is not counted.
"""

import time
import warnings
from typing import ClassVar

import cvxpy as cp
import numpy as np

from benchmarks.paper.methods.base import Method, Outcome, Stop
from stagecert.interop import networks_to_cvxpy
from stagecert.networks.bounding.relaxation import split

SIZE = 500  # neurons; larger networks only if asked


class CvxpySolver(Method):
    """A solver through CVXPY.

    Args:
        any_size: whether networks beyond the tiny ones are tried, too.
    """

    solver: ClassVar[str]
    time_option: ClassVar[str | None]

    def __init__(self, any_size: bool = False):
        self.any_size = any_size

    def refusal(self, problems):
        if self.solver not in cp.installed_solvers():
            return f"{self.solver} is not installed"
        layers = split(problems.network).layers
        kinds = {getattr(layer.operation, "kind", "max") for layer in layers}
        if self.solver == "HIGHS" and kinds != {"relu"}:
            return "HiGHS solves linear programs only"
        neurons = sum(int(np.prod(layer.shape)) for layer in layers)
        if neurons > SIZE and not self.any_size:
            return f"not run on {neurons} neurons unless asked"
        return None

    def prepare(self, problems, stop=None):
        """Nothing is compiled; a first solve loads the solver's libraries."""
        x = cp.Variable()
        cp.Problem(cp.Minimize(x), [x >= 1]).solve(solver=self.solver)

    def run(self, problems, stop=None, *, trace=False, progress=None) -> Outcome:
        stop = stop or Stop()
        options = {}
        if stop.seconds is not None and self.time_option:
            options[self.time_option] = float(stop.seconds)
        if stop.iterations is not None and self.solver in ("SCS", "ECOS"):
            options["max_iters"] = stop.iterations
        images, targets = problems.shape
        bound = np.full((images, targets), np.nan)
        iterations = np.zeros((images, targets), int)
        statuses: dict[str, int] = {}
        seconds = inside = 0.0
        for image in range(images):
            exported = networks_to_cvxpy(
                problems.network, problems.lower[image], problems.upper[image],
                problems.rows[image, 0], intermediate="ibp",
            )  # fmt: skip
            for target in range(targets):
                cost = problems.rows[image, target].astype(float) @ exported.outputs
                problem = cp.Problem(cp.Minimize(cost), exported.problem.constraints)
                begin = time.perf_counter()
                status = self._solve(problem, options)
                seconds += time.perf_counter() - begin
                statuses[status] = statuses.get(status, 0) + 1
                if status == cp.OPTIMAL:  # what is inaccurate bounds nothing
                    stats = problem.solver_stats
                    bound[image, target] = problem.value
                    iterations[image, target] = stats.num_iters or 0
                    inside += stats.solve_time or 0.0
                if progress is not None:
                    progress(image * targets + target + 1, images * targets)
        about = {
            "cvxpy": cp.__version__,
            "statuses": statuses,
            "solver_seconds": inside,  # without CVXPY's transformation
        }
        return Outcome(bound, None, iterations, ~np.isnan(bound), seconds, about=about)

    def _solve(self, problem: cp.Problem, options: dict) -> str:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Solution may be inaccurate")
            try:
                problem.solve(solver=self.solver, **options)
            except cp.SolverError:  # also when it ran out of time
                return "failed"
        return str(problem.status)


class Scs(CvxpySolver):
    """Splitting conic solver."""

    name = "scs"
    label = "CVXPY (SCS)"
    solver = "SCS"
    time_option = "time_limit_secs"


class Ecos(CvxpySolver):
    """Interior points; GPL, so it is not among this project's dependencies."""

    name = "ecos"
    label = "CVXPY (ECOS)"
    solver = "ECOS"
    time_option = None


class Clarabel(CvxpySolver):
    """Interior points."""

    name = "clarabel"
    label = "CVXPY (Clarabel)"
    solver = "CLARABEL"
    time_option = "time_limit"


class Highs(CvxpySolver):
    """Linear programs: ReLU networks."""

    name = "highs"
    label = "CVXPY (HiGHS)"
    solver = "HIGHS"
    time_option = "time_limit"
