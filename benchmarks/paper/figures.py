"""The paper's figures: the example, the traces, the distances to degenerate points."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

import stagecert as sc
from benchmarks.paper import plan
from benchmarks.paper.records import Records
from stagecert.degeneracy import escape_exact_local_min
from stagecert.reformulation import psi_0, psi_0_and_gradient

COLOURS = {
    "paper": "tab:blue",
    "deepverify": "tab:orange",
    "ours": "tab:green",
}
Drawn = tuple[str, Figure, str]  # name of the file, figure, caption


def lens(reach: float = 1.0) -> sc.Problem:
    """The paper's example: minimise z with s**2 - 1 <= z <= 1 - s**2 and |s| <= reach."""
    return sc.Problem(
        inputs=sc.Box(-reach, reach),
        stages=(sc.Stage(lower=lambda s, z: s**2 - 1, upper=lambda s, z: 1 - s**2, name="lens"),),
        objective=lambda s, z: z[0],
    )


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, columns))


def _feasible_set(axes, reach: float) -> None:
    s = np.linspace(-reach, reach, 81)
    low, high = s**2 - 1, 1 - s**2
    axes.fill_between(s, low, high, where=high >= low, color="tab:blue", alpha=0.2)
    axes.plot(s, low, color="tab:blue", label="μ₁(s) = s² − 1")
    axes.plot(s, high, color="tab:red", label="η₁(s) = 1 − s²")
    axes.set(xlabel="s₁", ylabel="z₁")


def landscape(axes, count: int = 41) -> None:
    """Contours of psi_0 of the example over (s, theta), by the library's own psi_0."""
    problem = lens()
    s, theta = np.linspace(-1, 1, count), np.linspace(0, 1, count)
    at = jax.vmap(jax.vmap(lambda a, b: psi_0(problem, a, (b,)), (0, None)), (None, 0))
    with jax.enable_x64(True):
        values = np.asarray(at(s, theta))
    filled = axes.contourf(s, theta, values, levels=np.linspace(-1, 1, 15), cmap="viridis")
    axes.figure.colorbar(filled, ax=axes, label="ψ₀(s₁, θ₁)", ticks=[-1, -0.5, 0, 0.5, 1])
    for tip in (-1, 1):
        label = "spurious local minimisers" if tip < 0 else None
        axes.plot([tip, tip], [0.5, 1], color="red", linewidth=4, label=label)
    axes.plot(0, 0, "*", color="gold", markeredgecolor="black", markersize=14, zorder=5,
              label="global minimiser")  # fmt: skip
    axes.set(xlabel="s₁", ylabel="θ₁", xlim=(-1.08, 1.08), ylim=(-0.06, 1.04))


def _legend_below(axes) -> None:
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def descent(start: sc.Point, steps: int = 25, size: float = 0.15) -> np.ndarray:
    """Points (s, theta) of projected gradient descent on psi_0 of the example."""
    problem = lens()
    with jax.enable_x64(True):
        s, theta = np.float64(start.inputs), np.float64(start.fractions[0])
        path = [(s, theta)]
        for _ in range(steps):
            _, slopes = psi_0_and_gradient(problem, sc.Point(s, (theta,)))
            s = np.clip(s - size * float(slopes.inputs), -1, 1)
            theta = np.clip(theta - size * float(slopes.fractions[0]), 0, 1)
            path.append((s, theta))
    return np.array(path)


# The start of the drawing of the escape: a tip of the lens, with the wrong fraction.
STUCK = sc.Point(1.0, (0.8,))


def example(records: Records) -> Iterator[Drawn]:
    """The drawings of the example and of its reformulation."""
    figure, (left, right) = _figure(9, 4.2, 2)
    _feasible_set(left, 1.0)
    left.plot(0, -1, "*", color="black", markersize=12, label="optimum")
    left.plot([-1, 1], [0, 0], "o", color="red", label="tips, where μ₁ = η₁")
    _legend_below(left)
    landscape(right)
    _legend_below(right)
    yield (
        "example",
        figure,
        "The convex problem (left): minimise z on the lens. Its reformulation (right): at the tips "
        "s = ±1, fractions above 1/2 are spurious local minimisers.",
    )
    figure, (axes,) = _figure(5.5, 4.2)
    landscape(axes)
    start = (float(STUCK.inputs), float(STUCK.fractions[0]))
    stuck = descent(STUCK)
    with jax.enable_x64(True):
        freed = escape_exact_local_min(lens(), STUCK)
    path = descent(sc.Point(freed.inputs, freed.fractions))
    axes.plot(*stuck.T, "X", color="white", markeredgecolor="red", markersize=11, zorder=5,
              label="descent stays here")  # fmt: skip
    axes.annotate(
        "", path[0], start,
        arrowprops={"arrowstyle": "->", "color": "black", "lw": 2, "shrinkA": 8, "shrinkB": 4},
    )  # fmt: skip
    axes.text(start[0] - 0.04, 0.3, "escape", color="white", ha="right")
    axes.plot(*path.T, ".-", color="white", markeredgecolor="black", markersize=9,
              label="descent after the escape")  # fmt: skip
    _legend_below(axes)
    yield (
        "escape",
        figure,
        "Gradient descent on the example from s = 1, θ = 0.8 does not move. Moving the fraction to "
        "the corner that its multiplier asks for (Escape-Exact-Local-Min) leaves z as it is and "
        "lets descent reach the optimum.",
    )
    figure, (axes,) = _figure(5, 3.6)
    _feasible_set(axes, 1.5)
    mu = 1.2**2 - 1
    axes.plot([1.2, 1.2], [-mu, mu], "k:")
    axes.plot(1.2, -mu, "o", color="red", label="s = 1.2, θ = 1: μ₁ > η₁, infeasible")
    _legend_below(axes)
    yield (
        "infeasible",
        figure,
        "The example on [−1.5, 1.5], where the bounds cross: the reformulation then has points "
        "that the convex problem does not.",
    )


def traces(records: Records) -> Iterator[Drawn]:
    """Relative gap against time and against iterations."""
    for network, curves in records.traces.items():
        figure, (left, right) = _figure(9.5, 3.6, 2)
        for run, curve in curves.items():
            name = run.removeprefix("trace-")
            colour = COLOURS.get(name, "grey")
            label = plan.RUNS[name].title if name in plan.RUNS else name
            if name == "ours":
                label = "stagecert"
            share = 1 / curve["problems"]
            low, middle, high = (np.array(x, float) for x in curve["distance"])
            floor = 1e-9
            seconds = 1e3 * np.array(curve["seconds"]) * share
            for axes, x in ((left, seconds), (right, np.array(curve["iteration"]))):
                axes.plot(x, np.maximum(middle, floor), color=colour, label=label)
                axes.fill_between(
                    x, np.maximum(low, floor), np.maximum(high, floor), color=colour, alpha=0.15,
                    linewidth=0,
                )  # fmt: skip
                if "gap" in curve:
                    gap = np.maximum(np.array(curve["gap"], float), floor)
                    axes.plot(x, gap, color=colour, linestyle="--")
        left.set(xlabel="milliseconds a problem", ylabel="relative gap", yscale="log", xscale="log")
        right.set(xlabel="iterations", yscale="log", xscale="symlog")
        right.set_xlim(left=0)
        left.legend(fontsize="small")
        figure.suptitle(
            f"{plan.title_of(network)}, {plan.TRAININGS[network.rsplit('_', 1)[1]]}", fontsize=11
        )
        yield (
            f"traces_{network}",
            figure,
            f"{network}: median over the problems (shaded: middle half) of the bound's distance "
            "from the least value of the relaxation that any method found, relative to it. Dashed: "
            "the certified relative gap of methods that have one.",
        )


def distances(records: Records) -> Iterator[Drawn]:
    """How far activations stay from the corners of their hulls, over the paper's search."""
    found = {
        network: curves["trace-paper"]
        for network, curves in records.traces.items()
        if curves.get("trace-paper", {}).get("histogram")
    }
    if not found:
        return
    figure, all_axes = _figure(4.4 * len(found), 3.4, len(found))
    for axes, (network, curve) in zip(all_axes, found.items(), strict=True):
        counts = np.array(curve["histogram"], float)
        edges = np.linspace(0, 0.5, len(counts) + 1)
        axes.stairs(counts / counts.sum(), edges, fill=True, color="tab:blue")
        training = plan.TRAININGS[network.rsplit("_", 1)[1]]
        axes.set(
            title=f"{plan.title_of(network)}, {training}",
            xlabel=f"distance (least {curve['least']:.2g})",
            ylabel="share of activations",
            yscale="log",
        )
        axes.title.set_fontsize(10)
    yield (
        "distances",
        figure,
        "Distance min(z − l, u − z) / (u − l) of activations to the ends of their intervals, where "
        "degeneracy is possible, over all iterations of the paper's method.",
    )


FIGURES: dict[str, Callable[[Records], Iterator[Drawn]]] = {
    "traces": traces,
    "distances": distances,
    "example": example,
}
TITLES = {
    "traces": "Optimisation traces",
    "distances": "Distances to degenerate points",
    "example": "The example and its reformulation",
}


def save(drawn: Drawn, folder: Path) -> None:
    """Writes a figure as SVG and as PNG; the same figure gives the same files."""
    name, figure, _ = drawn
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    save_png(drawn, folder / f"{name}.png")


def save_png(drawn: Drawn, path: Path) -> None:
    """Writes a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn[1].savefig(path, dpi=100, metadata={"Software": None})
