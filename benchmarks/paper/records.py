"""Data files: all that tables, figures and the report are made from.

    data/NETWORK.json   for each run: bounds, values, iterations, early stops of all problems, times
    data/traces.json    for each traced network and run: how the gap fell, distances to corners
    data/summary.csv    a line for each network and run
    data/made.json      machine, versions, and all sessions: date, command line, minutes

Bounds here are lower bounds on margins. Numbers have eight digits.
"""

import csv
import io
import json
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import plan
from benchmarks.paper.sweep import array, outcomes, plain
from stagecert import machine
from stagecert.files import write_whole
from stagecert.sweeps import Store

PACKAGES = (*machine.PACKAGES, "cvxpy", "scs", "ecos", "clarabel", "highspy", "auto_LiRPA")
QUANTILES = (0.25, 0.5, 0.75)
CURVE = 60  # points of a trace that are kept, evenly on a logarithmic scale of iterations
DIGITS = 8


@dataclass(frozen=True)
class Record:
    """What a run found on a network.

    Attributes:
        bound, value: (images, targets), NaN where there is none.
        iterations, early: likewise.
        seconds: of all problems together, without compilation.
        refused: why there is nothing.
        about: what the method says of itself.
    """

    network: str
    run: str
    bound: np.ndarray
    value: np.ndarray
    iterations: np.ndarray
    early: np.ndarray
    seconds: float
    refused: str | None = None
    stop: dict = field(default_factory=dict)
    about: dict = field(default_factory=dict)

    @property
    def finished(self) -> np.ndarray:
        """Which problems have a bound."""
        return np.isfinite(self.bound)

    @property
    def images(self) -> int:
        """On how many images it ran."""
        return len(self.bound)

    def first(self, count: int) -> "Record":
        """The same of the first images; seconds are shared out evenly."""
        names = ("bound", "value", "iterations", "early")
        some = {name: getattr(self, name)[:count] for name in names}
        return replace(self, **some, seconds=self.seconds * count / max(self.images, 1))

    @property
    def mean_bound(self) -> float | None:
        """The mean bound over the problems that have one."""
        return float(self.bound[self.finished].mean()) if self.finished.any() else None

    @property
    def milliseconds(self) -> float | None:
        """Time for a problem, of those that were tried."""
        return 1e3 * self.seconds / self.bound.size if self.bound.size else None

    @property
    def early_share(self) -> float | None:
        """The share of problems that stopped early."""
        return float(self.early.mean()) if self.early.size else None

    @property
    def mean_iterations(self) -> float | None:
        """The mean number of iterations."""
        return float(self.iterations.mean()) if self.iterations.size else None


@dataclass(frozen=True)
class Records:
    """All that was found: records by network and run, traces, with what it was made; the GPU's."""

    of: dict[tuple[str, str], Record]
    traces: dict[str, dict[str, dict]]
    made: dict[str, Any]
    gpu: dict[str, Any] = field(default_factory=dict)

    def get(self, network: str, run: str) -> Record | None:
        """A record, if it is there and not a refusal."""
        found = self.of.get((network, run))
        return found if found is not None and found.refused is None else None


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(x) for x in value]
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    return value


def _write(path: Path, value, indent: int | None = None) -> None:
    text = json.dumps(_rounded(value), indent=indent, allow_nan=False)
    if indent is None and isinstance(value, dict):
        # A line for every entry: files are kept by git.
        lines = [
            f"{json.dumps(key)}: {json.dumps(_rounded(x), allow_nan=False)}"
            for key, x in value.items()
        ]
        text = "{\n" + ",\n".join(lines) + "\n}"
    write_whole(path, text + "\n")


def write(out: Path, store: Store, works, session: dict) -> None:
    """Writes the data files from the store's rows of what is planned.

    `session` says how they came about: command line, minutes, and how much was computed.
    """
    folder = out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    found = outcomes(store, works)
    kinds = {name: run.kind for name, run in plan.RUNS.items()}
    for network in dict.fromkeys(name for name, _ in found):
        runs = {
            run: _joined(rows)
            for (name, run), rows in found.items()
            if name == network and kinds[run] == "method"
        }
        if runs:
            path = folder / f"{network}.json"
            held = json.loads(path.read_text()) if path.exists() else {}
            # Runs that were not asked for this time keep what they have.
            _write(path, {name: (held | runs)[name] for name in plan.RUNS if name in held | runs})
    path = folder / "traces.json"
    traces = json.loads(path.read_text()) if path.exists() else {}
    for network, curves in _traces(found, kinds).items():
        traces[network] = traces.get(network, {}) | curves
    if traces:
        _write(path, traces)
    path = folder / "made.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    made = machine.made(PACKAGES)
    session = {"date": made["date"], "load": made.get("load"), **session}
    sessions = held.get("sessions", [])
    # A session that computed nothing only wrote the same files again.
    if session["computed"] or not sessions:
        _write(path, {"eps": plan.EPS, **made, "sessions": [*sessions, session]}, indent=1)
    write_whole(folder / "summary.csv", summary(read(out)))


def _joined(rows) -> dict:
    refusals = [row.data["refused"] for row in rows if "refused" in row.data]
    if refusals:
        return {"refused": refusals[0]}
    details = [json.loads(row.blob) for row in rows]
    first = rows[0].data
    entry = {
        "stop": first["stop"],
        "images": sum(row.data["count"] for row in rows),
        "seconds": sum(row.seconds for row in rows),
        "preparing": sum(detail["preparing"] for detail in details),
        "compiling": sum(detail["compiling"] for detail in details),
        "about": details[0]["about"],
    }
    for name in ("bound", "value", "iterations", "early"):
        parts = [row.data[name] for row in rows]
        entry[name] = None if parts[0] is None else list(chain.from_iterable(parts))
    entry["early"] = [[int(x) for x in line] for line in entry["early"]]
    return entry


def _traces(found, kinds) -> dict[str, dict]:
    """Curves of every traced network, as quantiles over its problems."""
    raw: dict[str, dict[str, dict]] = {}
    for (network, run), rows in found.items():
        if kinds[run] == "trace" and "refused" not in rows[0].data:
            trace = json.loads(rows[0].blob).get("trace")
            if trace is not None:
                raw.setdefault(network, {})[run] = trace
    curves: dict[str, dict] = {}
    for network, traces in raw.items():
        best = _best_values(network, found, traces)
        curves[network] = {run: _curve(trace, best) for run, trace in traces.items()}
    return curves


def _best_values(network: str, found, traces: dict) -> np.ndarray:
    """The least value of the relaxation known for each problem: all but the optimum."""
    values = [array(row) for t in traces.values() if t["value"] is not None for row in t["value"]]
    for (name, run), rows in found.items():
        if name == network and plan.RUNS[run].group != "peer" and "refused" not in rows[0].data:
            for row in rows[:1]:
                if row.data["value"] is not None:
                    values.append(array(row.data["value"]))
    images = max(len(value) for value in values)
    best = np.full((images, values[0].shape[1]), np.inf)
    for value in values:
        best[: len(value)] = np.fmin(best[: len(value)], value)
    return best


def _curve(trace: dict, best: np.ndarray) -> dict:
    bound = array(trace["bound"])
    best = best[: bound.shape[1]]
    # Relative to the optimum's size; a bound cannot be above the least value, up to rounding.
    distance = (best[None] - bound) / np.maximum(np.abs(best), 1e-12)[None]
    kept = np.unique(np.geomspace(1, len(bound), CURVE).round().astype(int)) - 1
    distance, bound = distance[kept], bound[kept]
    curve = {
        "iteration": array(trace["iteration"])[kept].astype(int).tolist(),
        "seconds": array(trace["seconds"])[kept].tolist(),
        "problems": int(bound[0].size),
        "distance": plain(np.quantile(distance.reshape(len(bound), -1), QUANTILES, axis=1)),
    }
    if trace["value"] is not None:
        # There may be no value at first: the gap is then infinite.
        gap = np.nan_to_num(array(trace["value"])[kept] - bound, nan=np.inf, posinf=np.inf)
        relative = gap / np.maximum(np.abs(bound), 1e-12)
        middle = np.median(relative.reshape(len(bound), -1), axis=1)
        curve["gap"] = plain(middle)
    if trace["distances"] is not None:
        curve["histogram"] = np.sum(trace["distances"], axis=0).astype(int).tolist()
        curve["least"] = plain(np.nanmin(array(trace["least"])))
    return curve


def read(out: Path) -> Records:
    """What the data files say."""
    folder = out / "data"
    records = {}
    for network in plan.NETWORKS:
        path = folder / f"{network}.json"
        held = json.loads(path.read_text()) if path.exists() else {}
        for run, entry in held.items():
            records[network, run] = _record(network, run, entry)

    def file(path: Path) -> dict:
        return json.loads(path.read_text()) if path.exists() else {}

    return Records(
        records,
        file(folder / "traces.json"),
        file(folder / "made.json"),
        file(out / "gpu.json"),
    )


def _record(network: str, run: str, entry: dict) -> Record:
    if "refused" in entry:
        none = np.zeros((0, 0))
        return Record(network, run, none, none, none, none, 0.0, entry["refused"])
    bound = array(entry["bound"])
    value = np.full(bound.shape, np.nan) if entry["value"] is None else array(entry["value"])
    return Record(
        network, run, bound, value, array(entry["iterations"]), array(entry["early"]),
        entry["seconds"], None, entry["stop"], entry["about"],
    )  # fmt: skip


def summary(records: Records) -> str:
    """A line for each network and run, as CSV."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(
        ["network", "run", "images", "problems", "finished", "mean_bound", "ms_per_problem",
         "early_share", "mean_iterations", "refused"]
    )  # fmt: skip
    for (network, run), record in records.of.items():
        numbers = (
            record.mean_bound, record.milliseconds, record.early_share, record.mean_iterations
        )  # fmt: skip
        table.writerow(
            [network, run, record.images, record.bound.size, int(record.finished.sum())]
            + ["" if x is None else f"{x:.8g}" for x in numbers]
            + [record.refused or ""]
        )
    return file.getvalue()
