"""The paper's tables and the checks, from the data files.

Bounds are shown as in the paper: upper bounds on the adversary's objective, which are minus our
lower bounds on margins, so less is tighter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.paper import plan, published
from benchmarks.paper.records import Records

TIGHT = "ours-tight"
SAME = 1e-6  # relative: bounds that differ by less are called equal, because most are in float32
NEAR_SOLVERS = 1e-3
CROSSING = 1e-5  # relative to max(1, |value|): bounds that are above a value by more are wrong


@dataclass(frozen=True)
class Table:
    """A table: plain cells, with notes to stand below it."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        rule = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = [self.columns, rule, *self.rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join([text, *self.notes])


def number(x: float | None) -> str:
    """Four digits, or a dash.

    >>> number(1234567.0), number(0.5), number(None)
    ('1.235e+06', '0.5', '–')
    """
    return "–" if x is None or not np.isfinite(x) else f"{x:.4g}"


def percent(x: float | None) -> str:
    """A share in per cent."""
    return "–" if x is None else f"{100 * x:.0f} %"


def _runs(records: Records, networks: Sequence[str]) -> list[plan.Run]:
    """Runs that have a result on one of the networks."""
    return [
        run
        for run in plan.RUNS.values()
        if any(records.get(network, run.name) for network in networks)
    ]


def _names(activation: str, training: str) -> list[str]:
    return [f"{size}_{activation}_{training}" for size in plan.SIZES]


def most_images(records: Records, network: str) -> int:
    """On how many images the run with most of them was."""
    return max((r.images for (name, _), r in records.of.items() if name == network), default=0)


def _bound_cell(records: Records, network: str, run: str) -> str:
    record = records.get(network, run)
    if record is None or record.mean_bound is None:
        return "–"
    text = number(-record.mean_bound)
    ours = records.get(network, TIGHT)
    partial = record.images < most_images(records, network) or not record.finished.all()
    if partial and ours is not None and ours.images >= record.images:
        same = ours.bound[: record.images][record.finished].mean()
        text += f" ({number(-same)})"
    return text


def _time_cell(records: Records, network: str, run: str) -> str:
    record = records.get(network, run)
    return "–" if record is None else number(record.milliseconds)


def _images_cell(records: Records, networks: Sequence[str], run: str) -> str:
    counts = [records.get(name, run) for name in networks]
    return "/".join("–" if record is None else str(record.images) for record in counts)


_SIZES = tuple(size.capitalize() for size in plan.SIZES)
_BRACKETS = (
    "In brackets, where a method ran on fewer images or did not finish all its problems: stagecert "
    "(tight) on the same problems. Images: tiny/small/medium, 9 problems each."
)


def bounds_and_times(records: Records, training: str) -> list[Table]:
    """Average bound and time of every method: Table 1 (or the same for interval training)."""
    tables = []
    for activation, title in plan.ACTIVATIONS.items():
        networks = _names(activation, training)
        rows = [
            [run.title]
            + [_bound_cell(records, name, run.name) for name in networks]
            + [_time_cell(records, name, run.name) for name in networks]
            + [_images_cell(records, networks, run.name)]
            for run in _runs(records, networks)
        ]
        rows += [
            [f"*published:* {label}"]
            + [number(published.BOUND.get((name, network))) for network in networks]
            + [number(published.MILLISECONDS.get((name, network))) for network in networks]
            + ["all"]
            for name, label in _PUBLISHED.items()
            if any((name, network) in published.MILLISECONDS for network in networks)
        ]
        tables.append(
            Table(
                f"table1_{activation}_{training}",
                f"{title}, {plan.TRAININGS[training]}: average bound and milliseconds a problem",
                ["method"]
                + [f"bound, {size}" for size in _SIZES]
                + [f"ms, {size}" for size in _SIZES]
                + ["images"],
                rows,
                [_BRACKETS, *_refusals(records, networks)],
            )
        )
    return tables


_PUBLISHED = {
    "ibp": "IBP",
    "deepverify": "DeepVerify",
    "paper": "NonConvex",
    "scs": "CVXPY (SCS)",
    "ecos": "CVXPY (ECOS)",
}


def _refusals(records: Records, networks: Sequence[str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for (network, run), record in records.of.items():
        if network in networks and record.refused is not None:
            reasons.setdefault(f"{plan.RUNS[run].title}: {record.refused}", []).append(network)
    return [f"Not run: {reason}" for reason in reasons]


def stopping(records: Records, training: str) -> list[Table]:
    """Early stopping and iterations: Table 2 (or the same for interval training)."""
    short = {"deepverify": "DV", "paper": "NC", "paper-fixed": "NC, fixed", "ours": "stagecert"}
    runs = [run for run in short if run in plan.RUNS and (training, run) != ("adv", "paper-fixed")]
    early, iterations = [], []
    for activation in plan.ACTIVATIONS:
        for network in _names(activation, training):
            found = [records.get(network, run) for run in runs]
            if not any(found):
                continue
            theirs = [published.STOPPING.get((run, network)) for run in ("deepverify", "paper")]
            name = plan.title_of(network)
            images = "/".join("–" if r is None else str(r.images) for r in found)
            early.append(
                [name, *(percent(record and record.early_share) for record in found)]
                + ["–" if t is None else f"{t[0]:g} %" for t in theirs]
                + [images]
            )
            iterations.append(
                [name, *(number(record and record.mean_iterations) for record in found)]
                + [number(t and t[1]) for t in theirs]
                + [images]
            )
    columns = ["network", *(short[run] for run in runs), "*published* DV", "*published* NC"]
    title = plan.TRAININGS[training].capitalize()
    return [
        Table(
            f"table2_early_{training}",
            f"{title}: share of problems that stop early",
            [*columns, "images"],
            early,
        ),
        Table(
            f"table2_iterations_{training}",
            f"{title}: average number of iterations",
            [*columns, "images"],
            iterations,
            [
                "DV: DeepVerify, stopped early when its bound passes that of NC. NC: the paper's "
                "method as its appendix states it. An iteration of stagecert is a pass forward and "
                "one back."
            ],
        ),
    ]


def degeneracy(records: Records) -> list[Table]:
    """The paper's method with and without fixing degeneracy, on the images that both have."""
    rows = []
    for network in plan.NETWORKS:
        plain, fixed = (records.get(network, run) for run in ("paper", "paper-fixed"))
        if plain is None or fixed is None:
            continue
        count = min(plain.images, fixed.images)
        ours = records.get(network, TIGHT)
        row = [network, str(count)]
        both = [record.first(count) for record in (plain, fixed)]
        row += [number(float(np.nanmean(r.value - r.bound))) for r in both]
        row += [percent(r.early_share) for r in both]
        row += [number(r.mean_iterations) for r in both]
        row += [number(-r.bound.mean()) for r in both]
        known = ours is not None and ours.images >= count
        row += [number(-ours.bound[:count].mean() if known and ours is not None else None)]
        rows.append(row)
    pairs = [
        f"{what}, {which}"
        for what in ("mean gap", "early", "iterations", "bound")
        for which in ("plain", "fixed")
    ]
    return [
        Table(
            "degeneracy",
            "The paper's method without (plain) and with (fixed) Fix-Degeneracy",
            ["network", "images", *pairs, "bound, stagecert (tight)"],
            rows,
        )
    ]


@dataclass(frozen=True)
class Check:
    """One comparison with its outcome.

    Attributes:
        ours, theirs: mean lower bounds on the problems that both have.
        relative: (ours - theirs) / the mean size of theirs.
        worst: the least (or for solvers the farthest from 0) of this for a single problem.
        share: of problems where ours is at least theirs, up to rounding.
        wrong: problems left out because "their bound" is above a feasible value.
    """

    network: str
    run: str
    kind: str
    problems: int
    ours: float
    theirs: float
    relative: float
    worst: float
    share: float
    wrong: int
    passed: bool


def least_values(records: Records, network: str) -> np.ndarray:
    """The least value of the relaxation known for each problem, evaluated in float64."""
    runs = [
        r
        for (name, run), r in records.of.items()
        if name == network and not r.refused and plan.RUNS[run].group != "peer"
    ]
    images = max((r.images for r in runs), default=0)
    targets = max((r.bound.shape[1] for r in runs), default=0)
    least = np.full((images, targets), np.inf)
    for record in runs:
        least[: record.images] = np.fmin(least[: record.images], record.value)
    return least


def checks(records: Records, ours: str = TIGHT) -> list[Check]:
    """Our bound beside every other: at least as tight, or near it where a solver finished."""
    found = []
    for (network, run), record in records.of.items():
        mine = records.get(network, ours)
        if mine is None or record.refused is not None or plan.RUNS[run].method == "ours":
            continue
        count = min(mine.images, record.images)
        theirs, both = record.bound[:count], mine.bound[:count]
        known = np.isfinite(theirs) & np.isfinite(both)
        solver = plan.RUNS[run].group == "solver"
        value = least_values(records, network)[:count]
        wrong = known & (theirs > value + CROSSING * np.maximum(np.abs(value), 1)) & (not solver)
        known &= ~wrong
        if not known.any():
            continue
        theirs, both = theirs[known], both[known]
        size = np.mean(np.abs(theirs))
        difference = both - theirs
        relative = float(difference.mean() / max(size, 1e-12))
        single = difference / np.maximum(np.maximum(np.abs(theirs), size * 1e-2), 1e-12)
        worst = single[np.argmax(np.abs(single))] if solver else single.min()
        passed = abs(relative) <= NEAR_SOLVERS if solver else relative >= -SAME
        found.append(
            Check(
                network, run, "solver" if solver else "first-order", int(known.sum()),
                float(both.mean()), float(theirs.mean()), relative, float(worst),
                float(np.mean(single >= -SAME)), int(wrong.sum()), bool(passed),
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class Crossing:
    """Whether any bound of a run is above a feasible value that any run has found."""

    network: str
    run: str
    problems: int
    highest: float
    passed: bool


def crossings(records: Records) -> list[Crossing]:
    """Bounds against the least values known: all methods bound the same relaxation."""
    found = []
    for network in plan.NETWORKS:
        least = least_values(records, network)
        runs = {
            run: r for (name, run), r in records.of.items() if name == network and not r.refused
        }
        for run, record in runs.items():
            count = min(record.images, len(least))
            bound, value = record.bound[:count], least[:count]
            known = np.isfinite(bound) & np.isfinite(value)
            if known.any():
                above = (bound - value) / np.maximum(np.abs(value), 1.0)
                highest = float(above[known].max())
                tolerance = NEAR_SOLVERS if plan.RUNS[run].group == "solver" else CROSSING
                count = int(known.sum())
                found.append(Crossing(network, run, count, highest, highest <= tolerance))
    return found


def verdict(passed: bool) -> str:
    """For people."""
    return "pass" if passed else "FAIL"


def check_tables(records: Records) -> list[Table]:
    """The checks as tables."""
    rows = [
        [
            check.network,
            plan.RUNS[check.run].title,
            str(check.problems),
            number(-check.ours),
            number(-check.theirs),
            f"{100 * check.relative:+.4f} %",
            f"{100 * check.worst:+.4f} %",
            percent(check.share),
            str(check.wrong),
            verdict(check.passed),
        ]
        for check in checks(records)
    ]
    tight = Table(
        "checks_tightness",
        "Is our bound at least as tight as first-order baselines', and within 1e-3 of solvers'?",
        ["network", "beside", "problems", "ours", "theirs", "ours tighter by", "worst problem",
         "as tight on", "left out", "verdict"],
        rows,
        [
            "Ours is stagecert (tight), on the same problems. First-order: pass if our mean "
            f"bound is at least theirs, up to {SAME:g} of its size. CVXPY: pass if the means "
            f"differ by at most {NEAR_SOLVERS:g} of their size. Single problems are shown, not "
            "judged. Left out: problems where what they call a bound is above a feasible value "
            "(`checks_values`, the next table of the report)."
        ],
    )  # fmt: skip
    rows = [
        [c.network, plan.RUNS[c.run].title, str(c.problems), f"{c.highest:+.2e}", verdict(c.passed)]
        for c in crossings(records)
    ]
    crossing = Table(
        "checks_values",
        "Is every bound below every feasible value of the relaxation that any method found?",
        ["network", "method", "problems", "highest bound above a value", "verdict"],
        rows,
        [
            "Relative to max(1, |value|); pass up to 1e-5 (peers and searches are in "
            f"float32), for CVXPY's solvers up to {NEAR_SOLVERS:g} (their tolerances). "
            "Peers' own values do not count as feasible."
        ],
    )
    return [tight, crossing]


def on_gpu(records: Records) -> list[Table]:
    """All test images on one accelerator: time, and where it goes (`benchmarks.paper.gpu`)."""
    gpu = records.gpu
    found = {name: gpu[name] for name in ("float32", "tf32") if name in gpu}
    if not found:
        return []
    count = gpu["problems"]

    def row(label: str, value: Callable[[dict], str]) -> list[str]:
        return [label, *(value(one) for one in found.values())]

    def seconds(*names: str) -> Callable[[dict], str]:
        return lambda one: number(sum(one["phases"][name] for name in names))

    def kernels(kind: str) -> Callable[[dict], str]:
        return lambda one: number(one["kernels"]["by kind"].get(kind, 0.0))

    times = Table(
        "gpu_times",
        f"{count:,} problems of {gpu['network']} on one {gpu['device']}: seconds",
        [f"seconds on one {gpu['device']}", *(f"search in {name}" for name in found)],
        [
            row("**everything, warm** (best of the runs)", lambda one: number(min(one["seconds"]))),
            row("a problem, ms", lambda one: number(1e3 * min(one["seconds"]) / count)),
            row("**search** (the next two lines)", lambda one: number(one["search"])),
            row("first steps, all problems", seconds("search: first steps")),
            row("the rest of the search, evaluated", seconds("search: what is left, evaluated")),
            row("**rigorous, in float64** (the next three)", lambda one: number(one["rigorous"])),
            row("intervals", seconds("intervals")),
            row("wedges", seconds("wedges")),
            row("evaluation of bounds and values", seconds("evaluation")),
            row(
                "besides: boxes checked and sent, host",
                lambda one: number(min(one["seconds"]) - one["search"] - one["rigorous"]),
            ),
            row("floor of the search", lambda one: number(sum(one["floor"].values()))),
            row("search over floor", lambda one: number(one["search over floor"])),
            row("the first time, compiling", lambda one: number(one["cold"])),
            row("problems within 1 %", lambda one: percent(one["within"])),
        ],
        [
            f"Made on {gpu['made']['date']}; at most {gpu['peak bytes'] / 2**30:.1f} GiB of the "
            "device's memory. Phases are timed in a run of their own that waits for the device "
            "after each; what they do not explain of the best run is in the line 'besides'. "
            "Copying the minimisers to the computer "
            f"takes {number(gpu['copying inputs'])} s more, and the intervals of all neurons "
            f"{number(gpu['copying intervals'])} s; both are copied when first read, if ever."
        ],
    )
    kinds = list(dict.fromkeys(k for one in found.values() for k in one["kernels"]["by kind"]))
    profile = Table(
        "gpu_kernels",
        "What the device does meanwhile: seconds of kernels by kind",
        ["kernels", *(f"search in {name}" for name in found)],
        [row(kind, kernels(kind)) for kind in kinds]
        + [row("all", lambda one: number(one["kernels"]["all"]))],
    )
    return [times, profile]


TABLES: dict[str, Callable[[Records], list[Table]]] = {
    "table1": lambda records: bounds_and_times(records, "adv"),
    "table2": lambda records: stopping(records, "adv"),
    "ibp-table1": lambda records: bounds_and_times(records, "ibp"),
    "ibp-table2": lambda records: stopping(records, "ibp"),
    "degeneracy": degeneracy,
    "gpu": on_gpu,
    "checks": check_tables,
}
TITLES: dict[str, Any] = {
    "table1": "Table 1: bounds and times, adversarial training",
    "table2": "Table 2: early stopping and iterations, adversarial training",
    "ibp-table1": "Appendix: bounds and times, interval-bound training",
    "ibp-table2": "Appendix: early stopping and iterations, interval-bound training",
    "degeneracy": "With and without fixing degeneracy",
    "gpu": "All test images on one GPU",
    "checks": "Checks",
}
