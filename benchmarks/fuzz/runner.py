"""Feeds mutated files to a parser and counts what becomes of them.

Every input is a function of the seed and its number. Workers are processes of their own with a
limit on their address space; one that dies, or that works on one input for too long, is noted with
that input's number and replaced. What is read must be usable: a network runs at one point, and
without NaN if nothing overflows on the way; a property lists its cases.

Each outcome is one of: read, refused (with the documented error), or a failure.
"""

import collections
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
    from stagecert.networks.onnx import describe

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

    from stagecert import properties

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


def _work(kind: str, seed: int, begin: int, end: int, current, results) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    counts: collections.Counter[str] = collections.Counter()
    failures, slowest = [], (0.0, begin)
    outcome(kind, seed, begin, Path(tempfile.gettempdir()))  # imports are not part of its time
    with tempfile.TemporaryDirectory() as folder:
        for number in range(begin, end):
            current.value = number
            start = time.process_time()
            what, detail = outcome(kind, seed, number, Path(folder))
            slowest = max(slowest, (time.process_time() - start, number))
            counts[f"{what} {detail}".strip() if what == "refused" else what] += 1
            if what == "failure":
                failures.append({"number": number, "what": detail})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak > RESIDENT:
        failures.append({"number": begin, "what": f"{peak / 2**30:.1f} GiB in this portion"})
    results.put((dict(counts), failures, slowest, peak))


def run(kind: str, count: int, seed: int, jobs: int, say=print) -> dict:
    """All inputs; the record that is written down."""
    context = multiprocessing.get_context("spawn")
    portions = [(b, min(b + PORTION, count)) for b in range(0, count, PORTION)]
    counts: collections.Counter[str] = collections.Counter()
    failures, slowest, peak, begun = [], (0.0, 0), 0, time.monotonic()
    running: list = []
    while portions or running:
        while portions and len(running) < jobs:
            begin, end = portions.pop()
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
                late = number >= 0 and time.monotonic() - since > SECONDS
                if worker.is_alive() and not late:
                    continue
                if worker.exitcode == 0 and not item[5]:
                    item[5] = True  # its results may be on their way
                    continue
                worker.kill()
                worker.join()
                why = "took too long" if late else f"died with {worker.exitcode}"
                failures.append({"number": max(now, begin), "what": why})
                counts["failure"] += 1
                # What it counted before is lost with it.
                at = max(now, begin)
                portions += [(b, e) for b, e in ((begin, at), (at + 1, end)) if b < e]
            else:
                worker.join()
                counts.update(new)
                failures += bad
                slowest, peak = max(slowest, slow), max(peak, used)
            running.remove(item)
            say(f"{kind}: {sum(counts.values())} of {count}, {len(failures)} failures", flush=True)
    return {
        "kind": kind,
        "count": count,
        "seed": seed,
        "outcomes": dict(sorted(counts.items())),
        "failures": sorted(failures, key=lambda one: one["number"])[:50],
        "slowest": {"cpu_seconds": round(slowest[0], 2), "number": slowest[1]},
        "peak_memory_mib": round(peak / 2**20),
        "limits": {"seconds": SECONDS, "address_space_gib": ADDRESS_SPACE / 2**30},
        "seconds": round(time.monotonic() - begun),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
    }
