"""Sweeps of 200 images in which a worker, a node or the driver is killed at a random time."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.sweeps.nodes import Nodes
from benchmarks.sweeps.works import read
from stagecert.errors import ProblemError
from stagecert.sweeps import Store

IMAGES, BATCH = 200, 10
# What is killed while which engine runs, and how often.
RUNS = (
    ("worker", "processes", 4),
    ("worker", "ray", 3),
    ("node", "ray", 3),
    ("driver", "processes", 5),
    ("driver", "ray", 5),
)


def measure(say: Callable[[str], None]) -> list[dict]:
    """All runs: what was killed when, and what that changed."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, Nodes(1, 1) as nodes:
        undisturbed = {}
        for engine in ("in-process", "processes", "ray"):
            begin = time.monotonic()
            process = _start(Path(folder) / engine, engine, nodes)
            assert process.wait() == 0
            undisturbed[engine] = _table(Path(folder) / engine)
            say(f"{engine}: {time.monotonic() - begin:.1f} s")
        assert len(set(undisturbed.values())) == 1, "engines differ"
        found = []
        for victim, engine, times in RUNS:
            for turn in range(times):
                out = Path(folder) / f"{victim}-{engine}-{turn}"
                one = _disturbed(out, victim, engine, nodes, draw)
                one["same_table"] = _table(out) == undisturbed["in-process"]
                found.append(one)
                say(json.dumps(one))
        return found


def _disturbed(out: Path, victim: str, engine: str, nodes: Nodes, draw) -> dict:
    process, log = _start(out, engine, nodes), out / "log"
    begin = time.monotonic()
    # When a random number of images is begun, and a random time after that, but not at the end.
    many = draw.randrange(1, IMAGES - 4 * BATCH)
    while read(log)[0].total() < many and process.poll() is None:
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.1))
    if victim == "driver":
        process.kill()
        process.wait()
        workers = read(log)[1]
        stored = _stored(out)
        end = time.monotonic() + 30
        while any(map(_alive, workers)) and time.monotonic() < end:
            time.sleep(0.05)
        orphans = sum(map(_alive, workers))
        resumed = _start(out, engine, nodes)
        assert resumed.wait() == 0
        again = {"orphans": orphans}
    else:
        stored = _stored(out)
        if victim == "node":
            nodes.kill_or_add()
        else:
            living = [worker for worker in read(log)[1] if _alive(worker)]
            if living:
                os.kill(draw.choice(living), signal.SIGKILL)
        assert process.wait() == 0
        if victim == "node":
            nodes.kill_or_add()
        again = {}
    begun, workers = read(log)
    return {
        "victim": victim,
        "engine": engine,
        "stored_when_killed": stored,
        "items": len(begun),
        "computed_at_most": max(begun.values()),
        "computed_twice": sum(count == 2 for count in begun.values()),
        "workers": len(workers),
        "seconds": round(time.monotonic() - begin, 1),
        **again,
    }


def _start(out: Path, engine: str, nodes: Nodes) -> subprocess.Popen:
    arguments = {
        "what": "images", "engine": engine, "folder": str(out), "count": IMAGES, "batch": BATCH,
        "address": nodes.address, "log": True,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.sweeps.driver", json.dumps(arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _table(out: Path) -> str:
    """A hash of all rows with their blobs, without times."""
    content = hashlib.sha256()
    with Store.reader(out) as store:
        for row in store.rows(blobs=True):
            content.update(json.dumps([row.key, row.place, row.data]).encode())
            content.update(row.blob or b"-")
    return content.hexdigest()


def _stored(out: Path) -> int:
    try:
        with Store.reader(out) as store:
            return len(store)
    except ProblemError:
        return 0


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
