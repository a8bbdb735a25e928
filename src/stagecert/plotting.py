"""A picture of a search: value and bound closing in. Needs matplotlib (`stagecert[plot]`)."""

import numpy as np

from stagecert.errors import ProblemError
from stagecert.solution import Solution


def plot_trace(solution: Solution, axes=None):
    """Draws value, bound and gap of a solve against its passes.

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
    trace = solution.stats.trace
    if len(trace.passes) == 0:
        raise ProblemError("There is nothing to plot: the search made no iteration.")
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    ends, gaps = axes
    ends.plot(trace.passes, trace.value, label="value (feasible point)", drawstyle="steps-post")
    ends.plot(trace.passes, trace.bound, label="lower bound", drawstyle="steps-post")
    ends.set(xlabel="passes", ylabel="objective")
    ends.legend()
    gap = np.maximum(trace.value - trace.bound, np.finfo(float).tiny)
    gaps.semilogy(trace.passes, gap, color="black", drawstyle="steps-post")
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
