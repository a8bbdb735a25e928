"""Feeds mutated files to a parser and counts what becomes of them.

Every input is a function of the seed and its number. Workers are processes of their own with a
limit on their address space; one that dies, or that works on one input for too long, is noted with
that input's number and replaced. What is read must be usable: a network runs at one point, and
without NaN if nothing overflows on the way; a property lists its cases.

Each outcome is one of: read, refused (with the documented error), or a failure. Graphs that are
written, not mutated, are counted by what was checked of them: see benchmarks.fuzz.graph_run.
"""

import collections
import json
import multiprocessing
import os
import platform
import queue
import random
import resource
import tempfile
import time
import traceback
from pathlib import Path

# A worker is replaced after this many inputs: JAX keeps what it compiled for each shape.
PORTION = 1000
SECONDS = 60.0
ADDRESS_SPACE = 8 * 2**30
RESIDENT = 3 * 2**30


class Failure(Exception):
    """Something that should not have been accepted."""


def try_onnx(data: bytes, rng: random.Random, folder: Path) -> None:
    """Reads a model, from a file so that it may name other files, and runs it at one point."""
    import jax
    import numpy as np

    from stagecert import networks
    from stagecert.networks.importers.onnx.model import describe

    path = folder / "model.onnx"
    path.write_bytes(data)
    source = path if rng.random() < 0.5 else data
    if rng.random() < 0.1:
        describe(source)
    network = networks.load(source)
    if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(network)):
        raise Failure("weights that are not finite")
    if sum(int(np.prod(node.shape)) for node in network.nodes) > 100_000:
        return
    values = [np.full(shape, 0.25, np.float32) for shape in network.input_shapes]
    with jax.disable_jit():
        overflow = False
        for node in network.nodes:
            new = np.asarray(node.operation(node.weights, *(values[k] for k in node.arguments)))
            if new.shape != node.shape:
                raise Failure(f"shape {new.shape} instead of {node.shape}")
            overflow = overflow or bool(np.any(np.isinf(new)))
            if np.any(np.isnan(new)) and not overflow:
                raise Failure("NaN")
            values.append(new)


def try_vnnlib(data: bytes, rng: random.Random, folder: Path) -> None:
    """Reads a property and looks at its cases."""
    import numpy as np

    from stagecert_check import properties

    del rng, folder
    for case in properties.load(data).cases[:100]:
        if np.any(np.isnan(case.input_lower64)) or np.any(case.input_lower64 > case.input_upper64):
            raise Failure("a box that is empty or NaN")


TRIES = {"onnx": try_onnx, "vnnlib": try_vnnlib}


def one_input(kind: str, seed: int, number: int) -> tuple[bytes, random.Random]:
    """The input with this number, and random numbers for what is done with it."""
    if kind == "onnx":
        from benchmarks.fuzz.onnx_models import damaged
    else:
        from benchmarks.fuzz.vnnlib_files import damaged
    rng = random.Random(f"{kind} {seed} {number}")
    return damaged(rng), rng


def outcome(kind: str, seed: int, number: int, folder: Path) -> tuple[str, str]:
    """What became of one input: ("read" | "refused" | "failure", a word about it)."""
    from stagecert.errors import ProblemError

    data, rng = one_input(kind, seed, number)
    try:
        TRIES[kind](data, rng, folder)
    except ProblemError as error:
        text = str(error)
        memory = "allocate" in text or "MemoryError" in text or "RESOURCE_EXHAUSTED" in text
        if memory or not text.strip():
            return "failure", f"error without a cause, or memory: {text[:200]!r}"
        return "refused", type(error).__name__
    except Exception:
        return "failure", traceback.format_exc(limit=-3)[-800:]
    return "read", ""


def _tried(kind: str, seed: int, number: int, folder: Path) -> tuple[dict[str, int], list[str]]:
    """What is counted of one input, and its failures."""
    if kind == "graphs":
        from benchmarks.fuzz.graph_run import tried

        return tried(seed, number, folder)
    what, detail = outcome(kind, seed, number, folder)
    name = f"{what} {detail}".strip() if what == "refused" else what
    return {name: 1}, [detail] if what == "failure" else []


def _work(kind: str, seed: int, begin: int, end: int, current, results) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    counts: collections.Counter[str] = collections.Counter()
    failures, slowest, parent = [], (0.0, begin), os.getppid()
    if kind != "graphs":
        outcome(kind, seed, begin, Path(tempfile.gettempdir()))  # imports are not part of its time
    with tempfile.TemporaryDirectory() as folder:
        for number in range(begin, end):
            if os.getppid() != parent:
                return  # the run was ended
            current.value = number
            start = time.process_time()
            new, bad = _tried(kind, seed, number, Path(folder))
            slowest = max(slowest, (time.process_time() - start, number))
            counts.update(new)
            failures += [{"number": number, "what": what} for what in bad]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak > RESIDENT:
        failures.append({"number": begin, "what": f"{peak / 2**30:.1f} GiB in this portion"})
    results.put((dict(counts), failures, slowest, peak))


class _Parts:
    """The results of finished portions, on disk, so that a run that was ended goes on there."""

    def __init__(self, path: Path | None, key: list):
        self.path, self.found = path, []
        if path is not None and path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines() if line[-1] == "}"]
            self.found = [line for line in lines if line["key"] == key]
        self.key, self.resumed = key, bool(self.found)

    def add(self, begin: int, end: int, counts: dict, failures: list, slowest, peak: int) -> None:
        """Keeps a portion."""
        part = {"key": self.key, "portion": [begin, end], "counts": counts, "failures": failures,
                "slowest": list(slowest), "peak": peak}  # fmt: skip
        self.found.append(part)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(part) + "\n")

    def missing(self, count: int, size: int) -> list[tuple[int, int]]:
        """The portions that are still to be worked."""
        done = {tuple(part["portion"]) for part in self.found}
        covered = {n for begin, end in done for n in range(begin, end)}
        portions = []
        for begin in range(0, count, size):
            left = [n for n in range(begin, min(begin + size, count)) if n not in covered]
            if left:
                portions.append((left[0], left[-1] + 1))
        return portions


def run(
    kind: str,
    count: int,
    seed: int,
    jobs: int,
    say=print,
    *,
    parts: Path | None = None,
    portion: int = PORTION,
    seconds: float = SECONDS,
) -> dict:
    """All inputs; the record that is written down. `parts` is a file to go on from."""
    context = multiprocessing.get_context("spawn")
    kept = _Parts(parts, [kind, seed])
    portions = kept.missing(count, portion)
    begun = time.monotonic()
    running: list = []
    while portions or running:
        while portions and len(running) < jobs:
            begin, end = portions.pop(0)
            current, results = context.Value("q", -1), context.Queue()
            worker = context.Process(target=_work, args=(kind, seed, begin, end, current, results))
            worker.start()
            item = [worker, current, results, (-1, time.monotonic()), (begin, end), False]
            running.append(item)
        for item in list(running):
            worker, current, results, (number, since), (begin, end), _ = item
            try:
                new, bad, slow, used = results.get(timeout=0.2)
            except queue.Empty:
                now = current.value
                if now != number:
                    item[3] = (now, time.monotonic())
                late = number >= 0 and time.monotonic() - since > seconds
                if worker.is_alive() and not late:
                    continue
                if worker.exitcode == 0 and not item[5]:
                    item[5] = True  # its results may be on their way
                    continue
                worker.kill()
                worker.join()
                why = "took too long" if late else f"died with {worker.exitcode}"
                at = max(now, begin)
                kept.add(at, at + 1, {"failure": 1}, [{"number": at, "what": why}], (0.0, at), 0)
                # What it counted before is lost with it.
                portions += [(b, e) for b, e in ((begin, at), (at + 1, end)) if b < e]
            else:
                worker.join()
                kept.add(begin, end, new, bad, slow, used)
            running.remove(item)
            finished = sum(e - b for b, e in (part["portion"] for part in kept.found))
            failed = sum(len(part["failures"]) for part in kept.found)
            say(f"{kind}: {finished} of {count}, {failed} failures", flush=True)
    took = None if kept.resumed else round(time.monotonic() - begun)
    return _record(kind, count, seed, kept.found, took, seconds)


def _record(kind, count, seed, parts, took: int | None, limit: float) -> dict:
    counts: collections.Counter[str] = collections.Counter()
    for part in parts:
        counts.update(part["counts"])
    failures = sorted((f for p in parts for f in p["failures"]), key=lambda one: one["number"])
    slowest = max((tuple(part["slowest"]) for part in parts), default=(0.0, 0))
    peak = max((part["peak"] for part in parts), default=0)
    return {
        "kind": kind,
        "count": count,
        "seed": seed,
        "outcomes": dict(sorted(counts.items())),
        "failures": failures[:50],
        "slowest": {"cpu_seconds": round(slowest[0], 2), "number": slowest[1]},
        "peak_memory_mib": round(peak / 2**20),
        "limits": {"seconds": limit, "address_space_gib": ADDRESS_SPACE / 2**30},
        "seconds": took,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
    }
