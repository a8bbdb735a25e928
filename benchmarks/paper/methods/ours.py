"""Methods of the library: intervals, one pass back, the default search."""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from benchmarks.paper.methods.base import Method, Outcome, PaperProblems, Stop, Stopwatch
from stagecert import networks
from stagecert.solution import Status


class _Bound(Method):
    """`networks.bound` on the paper's relaxation."""

    method: ClassVar[Literal["ibp", "backward", "nonconvex"]]

    def run(self, problems, stop=None, *, trace=False, progress=None) -> Outcome:
        watch = Stopwatch()
        found = self._bound(problems, stop or Stop(), progress)
        iterations, early = self._iterations(found)
        return Outcome(
            found.bound, self._value(found), iterations, early, watch.seconds, watch.compiling
        )

    def _bound(self, problems: PaperProblems, stop: Stop, progress) -> networks.Bounds:
        return networks.bound(
            problems.network, problems.lower, problems.upper, problems.rows,
            method=self.method, intermediate="ibp",
        )  # fmt: skip

    def _value(self, found: networks.Bounds) -> np.ndarray | None:
        return None  # of the network, not of the relaxation

    def _iterations(self, found: networks.Bounds):
        return np.zeros(found.bound.shape, int), np.ones(found.bound.shape, bool)


class Ibp(_Bound):
    """Interval bound propagation."""

    name = "ibp"
    label = "IBP"
    method = "ibp"


class Backward(_Bound):
    """One pass back from the objective, as CROWN's, on interval bounds; no search."""

    name = "backward"
    label = "One pass back"
    method = "backward"


class Ours(_Bound):
    """The library's default search, bounds evaluated in float64 with all rounding accounted for."""

    name = "ours"
    label = "stagecert"
    method = "nonconvex"
    limit = 500

    def prepare(self, problems, stop=None):
        # Later phases of the search, on the problems that are left then, compile when they come.
        self.run(problems, dataclasses.replace(stop or Stop(), iterations=2))

    def _bound(self, problems, stop, progress):
        return networks.bound(
            problems.network, problems.lower, problems.upper, problems.rows,
            method="nonconvex", intermediate="ibp", rtol=stop.rtol, atol=stop.atol,
            max_iterations=stop.iterations or self.limit, time_limit=stop.seconds,
            progress=False if progress is None else lambda _, done, size: progress(done, size),
        )  # fmt: skip

    def _value(self, found):
        return found.value

    def _iterations(self, found):
        # A step is one pass forward and one back; the search starts from one pass back.
        return (found.passes - 1) // 2, found.status == Status.GAP_REACHED
