"""Runs what is planned and keeps what was found, item by item, so that a stopped run can go on.

What is stored of an item is the same in every run, apart from times; those stand beside it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import plan
from benchmarks.paper.methods import Outcome, PaperProblems, Stop, Trace, named
from stagecert import sweeps
from stagecert.errors import ProblemError
from stagecert.sweeps import Item, Row, Store


class Failed(Exception):
    """Some items could not be computed; the others were."""


def network_file(data: Path, network: str) -> Path:
    """Where a network is."""
    return data / "networks" / "paper" / f"{network}.onnx"


def images_file(data: Path) -> Path:
    """Where the test images are."""
    return data / "cifar10" / "test.npz"


def require(data: Path, networks: Sequence[str]) -> None:
    """Says what is missing from the folder of data, if anything is."""
    needed = [images_file(data), *(network_file(data, name) for name in networks)]
    missing = [path for path in needed if not path.is_file()]
    if missing:
        raise ProblemError(
            f"{missing[0]} is not there"
            + (f" ({len(missing)} files are missing)" if len(missing) > 1 else "")
            + ".\nGive the folder of the data with --data, or set STAGECERT_DATA to it. It has"
            "\n  cifar10/test.npz: `images` (uint8, batch x height x width x channels), `labels`"
            "\n  networks/paper/NAME.onnx: the networks, NAME as in tiny_relu_adv"
            "\nNetworks are trained by `python -m benchmarks.paper.train`."
        )


def image_count(data: Path) -> int:
    """How many test images there are."""
    with np.load(images_file(data)) as file:
        return len(file["labels"])


def configuration(data: Path) -> dict[str, Any]:
    """What all items of a store have in common."""
    return {"benchmark": "paper", "eps": plan.EPS, "chunk": plan.CHUNK, "data": data_mark(data)}


def data_mark(data: Path) -> str:
    """Tells data apart: a hash of the images and of all networks."""
    digest = hashlib.sha256(images_file(data).read_bytes())
    for path in sorted(network_file(data, "any").parent.glob("*.onnx")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compute(
    works: Sequence[plan.Work],
    store: Store,
    data: Path,
    progress: Callable[[plan.Work, int, int], None] | None = None,
    finished: Callable[[plan.Work, bool], None] | None = None,
) -> None:
    """Computes what the store does not have yet.

    Args:
        works: what is planned.
        store: where rows are, and go.
        data: the folder of networks and images.
        progress: called with an item, how many of its problems are finished, and how many it has.
        finished: called after every item: with it, and whether it was computed just now.

    Raises:
        Failed: some items ended with an error; the others are stored.
    """
    most = {
        name: max(w.first + w.count for w in works if w.network == name)
        for name in {w.network for w in works}
    }
    context = _Context(store, data, most, progress)
    failures = []
    # One sweep for each item: a run may need the stored bounds of one before it.
    for place, item in enumerate(works):
        had = len(store)
        try:
            sweeps.run([Item(place, item.key)], _ItemWork(item, context), store, batch=1)
        except Failed as failed:
            failures.append(str(failed))
        if finished is not None:
            finished(item, len(store) > had)
    if failures:
        raise Failed("\n".join(failures))


class _Context:
    """What items share: problems of the latest network, and which shapes are compiled."""

    def __init__(self, store: Store, data: Path, most: dict[str, int], progress):
        self.store, self.data, self.most, self.progress = store, data, most, progress
        self.prepared: set[tuple] = set()
        self.latest: tuple[str, PaperProblems] | None = None

    def problems(self, network: str) -> PaperProblems:
        """All problems that any item has on a network."""
        if self.latest is None or self.latest[0] != network:
            found = PaperProblems.load(
                network_file(self.data, network), images_file(self.data), self.most[network],
                plan.EPS,
            )  # fmt: skip
            self.latest = (network, found)
        return self.latest[1]


@dataclass(frozen=True)
class _ItemWork:
    """One item as a work of `sweeps.run`."""

    item: plan.Work
    context: _Context

    def prepare(self):
        """Nothing is prepared here: methods are compiled as part of their item."""
        return lambda items: [_row(self.item, items[0].place, self.context)]

    def failed(self, item: Item, why: str) -> Row:
        """No row, so that the item is tried again next time."""
        raise Failed(f"{self.item.key}: {why}")


def _row(item: plan.Work, place: int, context: _Context) -> Row:
    problems = context.problems(item.network)[item.first : item.first + item.count]
    method = named(item.run.method)
    progress = context.progress
    head = {
        "network": item.network,
        "run": item.run.name,
        "first": item.first,
        "count": item.count,
    }
    refusal = method.refusal(problems)
    if refusal is not None:
        return Row(item.key, place, {**head, "refused": refusal})
    stop = item.run.stop(item.network)
    if item.run.target is not None:
        stop = replace(stop, target=_bounds_of(context.store, item, problems.shape))
    shape = (item.network, item.run.name, item.count)
    if shape not in context.prepared:
        method.prepare(problems, stop)
        context.prepared.add(shape)
    found = method.run(
        problems,
        stop,
        trace=item.run.kind == "trace",
        progress=None if progress is None else lambda done, size: progress(item, done, size),
    )
    if found.bound.shape != problems.shape:
        raise ValueError(f"bounds of shape {found.bound.shape} for problems {problems.shape}")
    times = {"compiling": found.compiling, "about": found.about}
    if found.trace is not None:
        times["trace"] = _plain_trace(found.trace)
    data = {
        **head,
        "stop": _plain_stop(item.run.stop(item.network)),
        "bound": plain(found.bound),
        "value": plain(found.value),
        "iterations": plain(found.iterations),
        "early": plain(found.early),
    }
    return Row(item.key, place, data, found.seconds, json.dumps(times).encode())


def _bounds_of(store: Store, item: plan.Work, shape) -> np.ndarray:
    """Bounds that another run has found for the same images."""
    bounds = np.full(shape, np.nan)
    target = plan.Work(item.network, plan.RUNS[item.run.target or ""], 0, 1)
    for row in store.rows():
        known = row.data
        if (
            (known["network"], known["run"]) != (target.network, target.run.name)
            or not row.key.endswith(target.mark)
            or "refused" in known
        ):
            continue
        for k, line in enumerate(known["bound"], start=known["first"] - item.first):
            if 0 <= k < shape[0]:
                bounds[k] = array(line)
    if np.isnan(bounds).any():
        raise ValueError(f"no bounds of '{item.run.target}', which '{item.run.name}' stops at")
    return bounds


def _plain_stop(stop: Stop) -> dict:
    facts = asdict(stop)
    del facts["target"]
    return {name: value for name, value in facts.items() if value is not None}


def _plain_trace(trace: Trace) -> dict:
    return {name: plain(value) for name, value in vars(trace).items()}


def plain(values):
    """An array as nested lists for JSON, which has neither NaN nor infinities: None instead."""
    if values is None:
        return None
    values = np.asarray(values)
    if values.dtype.kind in "bi":
        return values.tolist()
    lists = values.astype(object)
    lists[~np.isfinite(values)] = None
    return lists.tolist()


def array(lists) -> np.ndarray:
    """The array that was made plain; None is NaN."""
    return np.asarray(lists, dtype=float)


def outcomes(store: Store, works: Sequence[plan.Work]) -> dict[tuple[str, str], list[Row]]:
    """The stored rows of what is planned: (network, run) -> rows in the order of their images."""
    wanted = {work.key for work in works}
    found: dict[tuple[str, str], list[Row]] = {}
    for row in store.rows(blobs=True):
        if row.key in wanted:
            found.setdefault((row.data["network"], row.data["run"]), []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row.data["first"])
    return found


__all__ = ["Failed", "Outcome", "compute", "configuration", "outcomes", "require"]
