"""What engines cost: time on 2,000 small items, the driver's memory on 100,000 trivial ones."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable

from benchmarks.sweeps.nodes import Nodes

# How often a case is run; the quickest run counts, since others may use the machine. Then its
# name, what is computed, how many, how many at once, seconds of each.
CASES = (
    (3, "images of digits", "backward", 2000, 32, 0.0),
    (1, "10 ms of one core", "spin", 2000, 10, 0.01),
    (1, "nothing", "spin", 100_000, 100, 0.0),
)
ENGINES = ("in-process", "processes", "ray, joined", "ray, started")
WORKERS = 2


def measure(say: Callable[[str], None]) -> list[dict]:
    """All runs."""
    # Compiled programs are kept: the first run of images is not measured.
    _run("images of digits", "backward", 64, 32, 0.0, "in-process")
    found = []
    for times, *case in CASES:
        for engine in ENGINES:
            runs = []
            for _ in range(times):
                if engine == "ray, joined":
                    with Nodes(WORKERS) as node:
                        runs.append(_run(*case, engine, node.address))
                else:
                    runs.append(_run(*case, engine))
                say(json.dumps(runs[-1]))
            quickest = min(runs, key=lambda run: run["seconds"])
            found.append({**quickest, "all_seconds": [run["seconds"] for run in runs]})
    return found


def _run(name, what, count, batch, seconds, engine, address="local") -> dict:
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "what": what, "engine": engine.split(",")[0], "folder": folder, "count": count,
            "batch": batch, "seconds": seconds, "workers": WORKERS, "address": address,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.sweeps.driver", json.dumps(arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    held = json.loads(done.stdout.splitlines()[-1])
    return {
        "items": name,
        "count": count,
        "batch": batch,
        "engine": engine,
        "seconds": round(held["seconds"], 2),
        "until_first": round(held["first"], 2),
        "grown_by_mib": round(held["most"] - held["before"], 1),
    }
