"""The paper's method, ours and the baselines, behind one interface.

>>> named("ibp").label
'IBP'
"""

from benchmarks.paper.methods.base import BINS, Method, Outcome, PaperProblems, Stop, Trace
from benchmarks.paper.methods.cvxpy_solvers import Clarabel, Ecos, Highs, Scs
from benchmarks.paper.methods.deepverify import DeepVerify
from benchmarks.paper.methods.nonconvex import OursTraced, PaperMethod, PaperMethodFixed
from benchmarks.paper.methods.ours import Backward, Ibp, Ours
from benchmarks.paper.methods.pdhg import Pdhg
from benchmarks.paper.methods.peers import AutoLirpa, JaxVerify

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Ibp, Backward, Ours, OursTraced, PaperMethod, PaperMethodFixed, DeepVerify, Pdhg,
        Scs, Ecos, Clarabel, Highs, AutoLirpa, JaxVerify,
    )
}  # fmt: skip


def named(name: str, **settings) -> Method:
    """A method by its name, with settings of its own."""
    if name not in METHODS:
        raise ValueError(f"Unknown method '{name}'; known are {', '.join(METHODS)}.")
    return METHODS[name](**settings)


__all__ = ["BINS", "METHODS", "Method", "Outcome", "PaperProblems", "Stop", "Trace", "named"]
