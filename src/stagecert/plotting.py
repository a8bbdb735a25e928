"""A picture of a search: value and bound closing in. Needs matplotlib (`stagecert[plot]`)."""

import numpy as np

from stagecert.errors import ProblemError
from stagecert.solution import Solution, Status, Trace

_NO_GAP = "no gap: no feasible point is known"


def plot_trace(solution: Solution, axes=None):
    """Draws value, bound and gap of a solve against its passes.

    For an infeasible problem, these are the value and the bound of the largest side constraint:
    nothing is feasible once the bound is above zero.

    Args:
        solution: what `solve` returned.
        axes: a pair of matplotlib axes; made if not given.

    Returns:
        The matplotlib figure.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ProblemError(
            "Plots need matplotlib: install it with pip install 'stagecert[plot]'."
        ) from error
    trace, infeasible = solution.stats.trace, solution.status is Status.INFEASIBLE
    if len(trace.passes) == 0 and infeasible:
        # The starting point was enough for a proof: its bound is all there is to draw.
        bound, passes = np.array([solution.certificate.bound]), np.array([solution.stats.passes])
        trace = Trace(np.array([np.inf]), bound, passes, ("start",))
    if len(trace.passes) == 0:
        raise ProblemError("There is nothing to plot: the search made no iteration.")
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    ends, gaps = axes
    known = "largest side constraint" if infeasible else "value (feasible point)"
    if np.isfinite(trace.value).any():
        ends.plot(trace.passes, trace.value, label=known, drawstyle="steps-post")
    ends.plot(
        trace.passes,
        trace.bound,
        "C1" if len(trace.passes) > 1 else "C1o",
        label="lower bound",
        drawstyle="steps-post",
    )
    ends.set(xlabel="passes", ylabel="side constraint, in its unit" if infeasible else "objective")
    if infeasible:
        ends.axhline(0, color="grey", linewidth=0.5)
        ends.set_title("bound above zero: no point is feasible", fontsize="small")
    ends.legend()
    gap = np.maximum(trace.value - trace.bound, np.finfo(float).tiny)
    if np.isfinite(gap).any():
        gaps.semilogy(trace.passes, gap, color="black", drawstyle="steps-post")
    else:
        gaps.set(xlim=ends.get_xlim(), yticks=[])
        gaps.text(0.5, 0.5, _NO_GAP, transform=gaps.transAxes, ha="center", va="center")
    gaps.set(xlabel="passes", ylabel="gap")
    names = np.array(trace.solver)
    for start in np.flatnonzero(np.r_[True, names[1:] != names[:-1]]):
        gaps.axvline(trace.passes[start], color="grey", linewidth=0.5)
        gaps.annotate(
            names[start],
            (trace.passes[start], 1),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            fontsize="small",
        )
    return ends.figure
