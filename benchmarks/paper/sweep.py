"""Runs what is planned and keeps what was found, item by item, so that a stopped run can go on.

What is stored of an item is the same in every run, apart from times; those stand beside it.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.data import images_file, network_file
from benchmarks.paper import plan
from benchmarks.paper.methods import Outcome, PaperProblems, Stop, Trace, named
from stagecert import sweeps
from stagecert.compiling import use_compilation_cache
from stagecert.sweeps import Engine, InProcess, Item, Processes, Row, Store
from stagecert.sweeps.worker import settings


class Failed(Exception):
    """Some items could not be computed; the others were."""


def configuration(data: Path) -> dict[str, Any]:
    """What all items of a store have in common."""
    return {
        "benchmark": "paper",
        "eps": plan.EPS,
        "chunk": plan.CHUNK,
        "data": _mark([images_file(data), *network_file(data, "any").parent.glob("*.onnx")]),
        "methods": _mark((Path(__file__).parent / "methods").glob("*.py")),
    }


def _mark(paths: Iterable[Path]) -> str:
    """Tells files apart: a hash of their names and contents."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compute(
    works: Sequence[plan.Work],
    store: Store,
    data: Path,
    progress: Callable[[plan.Work, int, int], None] | None = None,
    finished: Callable[[plan.Work, bool], None] | None = None,
    workers: int = 1,
) -> None:
    """Computes what the store does not have yet.

    Args:
        works: what is planned.
        store: where rows are, and go.
        data: the folder of networks and images.
        progress: called with an item, how many of its problems are finished, and how many it has;
            by one worker only.
        finished: called after every item: with it, and whether it was computed just now.
        workers: items are computed in so many processes, each of one thread; 1 is this process,
            with all threads that libraries like to have.

    Raises:
        Failed: some items ended with an error; the others are stored.
    """
    most = {
        name: max(w.first + w.count for w in works if w.network == name)
        for name in {w.network for w in works}
    }
    named_works = {work.key: work for work in works}
    done = finished or (lambda work, computed: None)
    # What was refused may not be refused any more: a solver may have been installed.
    refused = [row.key for row in store.rows() if "refused" in row.data]
    store.remove(key for key in refused if key in named_works)
    for key in store.known(named_works):
        done(named_works[key], False)
    engine = _Keeping(InProcess() if workers == 1 else Processes(workers))
    # Large networks first: no worker shall have a long item when the others have nothing left. Of
    # each, our search first: by the time its tight run comes, its programs are compiled.
    ordered = sorted(
        works, key=lambda work: (-plan.NETWORKS.index(work.network), work.run.name != "ours")
    )
    with nullcontext() if workers == 1 else _beside_each_other(store.folder):
        # Runs that stop at the bounds of others come when those are stored.
        for some in (
            [work for work in ordered if work.run.target is None],
            [work for work in ordered if work.run.target is not None],
        ):
            sweeps.run(
                [Item(place, work.key) for place, work in enumerate(some)],
                _PaperWork(
                    {work.key: (work, _target(store, work)) for work in some},
                    data, most, progress if workers == 1 else None,
                ),
                store, batch=1, engine=engine,
                progress=lambda rows: [done(named_works[row.key], True) for row in rows],
            )  # fmt: skip
    for key in engine.failures:
        done(named_works[key], False)
    if engine.failures:
        raise Failed("\n".join(f"{key}: {why}" for key, why in engine.failures.items()))


# What JAX's CPU backend, BLAS, PyTorch and Clarabel ask for the number of their threads.
_THREADS = ("NPROC", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS")


_CACHE = tuple(name for name in settings() if "cache" in name)


@contextmanager
def _beside_each_other(folder: Path | None) -> Iterator[None]:
    """Processes that are started meanwhile compute in one thread, and share compiled programs.

    So do later runs. Networks of one architecture need the same programs.
    """
    threads = {name: os.environ.get(name) for name in _THREADS}
    cache = {name: getattr(jax.config, name) for name in _CACHE}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    if folder is not None:
        use_compilation_cache(folder / "compiled")
    try:
        yield
    finally:
        for name, value in threads.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        for name, value in cache.items():
            jax.config.update(name, value)


_FAILED = "failed"


class _Keeping:
    """An engine that keeps failures to itself: without a row, an item is tried again next time."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failures: dict[str, str] = {}

    def results(self, tasks, work, limits):
        """See `Engine`."""
        with closing(self.engine.results(tasks, work, limits)) as found:
            for rows in found:
                failed = {row.key: row.data[_FAILED] for row in rows if _FAILED in row.data}
                self.failures |= failed
                yield [row for row in rows if row.key not in failed]


@dataclass(frozen=True)
class _PaperWork:
    """Items as a work of `sweeps.run`, by their keys, with the bounds at which they stop."""

    works: Mapping[str, tuple[plan.Work, np.ndarray | None]]
    data: Path
    most: Mapping[str, int]
    progress: Callable[[plan.Work, int, int], None] | None

    def prepare(self):
        """Methods are compiled as part of their item: nothing yet."""
        context = _Context(self.data, self.most, self.progress)
        return lambda items: [_row(*self.works[i.key], i.place, context) for i in items]

    def failed(self, item: Item, why: str) -> Row:
        """A row that is not stored."""
        return Row(item.key, item.place, {_FAILED: why})


class _Context:
    """What items share: problems of the latest network, and which shapes are compiled."""

    def __init__(self, data: Path, most: Mapping[str, int], progress):
        self.data, self.most, self.progress = data, most, progress
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


def _row(item: plan.Work, target: np.ndarray | None, place: int, context: _Context) -> Row:
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
        if target is None:
            raise ValueError(f"no bounds of '{item.run.target}', which '{item.run.name}' stops at")
        stop = replace(stop, target=target)
    shape = (item.network, item.run.name, item.count)
    begin = time.perf_counter()
    # What a trace needs besides, distances and times, compiles when it comes.
    if shape not in context.prepared and item.run.kind != "trace":
        method.prepare(problems, stop)
        context.prepared.add(shape)
    preparing = time.perf_counter() - begin
    found = method.run(
        problems,
        stop,
        trace=item.run.kind == "trace",
        progress=None if progress is None else lambda done, size: progress(item, done, size),
    )
    if found.bound.shape != problems.shape:
        raise ValueError(f"bounds of shape {found.bound.shape} for problems {problems.shape}")
    times = {"preparing": preparing, "compiling": found.compiling, "about": found.about}
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


def _target(store: Store, item: plan.Work) -> np.ndarray | None:
    """Bounds that the run at whose bounds this one stops has found for the same images, if all."""
    if item.run.target is None:
        return None
    target = plan.Work(item.network, plan.RUNS[item.run.target], 0, 1)
    lines = {}
    for row in store.rows():
        known = row.data
        if (
            (known["network"], known["run"]) == (target.network, target.run.name)
            and row.key.endswith(target.mark)
            and "refused" not in known
        ):
            lines |= dict(enumerate(known["bound"], start=known["first"]))
    wanted = range(item.first, item.first + item.count)
    return array([lines[k] for k in wanted]) if lines.keys() >= {*wanted} else None


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


__all__ = ["Failed", "Outcome", "compute", "configuration", "outcomes"]
