"""What engines cost: time on 2,000 small items, the driver's memory on 100,000 trivial ones."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable

# Name, what is computed, items, items at once, seconds an item, engine and workers.
SMALL = [
    (name, what, 2000, batch, seconds, engine, workers)
    for name, what, batch, seconds in (
        ("images of digits", "backward", 32, 0.0),
        ("20 ms of one core", "spin", 10, 0.02),
    )
    for engine, workers in (("in-process", 1), ("processes", 1), ("processes", 2), ("ray", 1),
                            ("ray", 2))
]  # fmt: skip
TRIVIAL = [
    ("nothing", "spin", 100_000, 100, 0.0, engine, workers)
    for engine, workers in (("in-process", 1), ("processes", 2), ("ray", 2))
]


def measure(say: Callable[[str], None]) -> list[dict]:
    """All runs."""
    # Compiled programs are kept: the first run of images is not measured.
    _run("images of digits", "backward", 64, 32, 0.0, "in-process", 1)
    found = []
    for case in (*SMALL, *TRIVIAL):
        found.append(_run(*case))
        say(json.dumps(found[-1]))
    return found


def _run(name, what, count, batch, seconds, engine, workers) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "what": what, "engine": engine, "folder": folder, "count": count, "batch": batch,
            "seconds": seconds, "workers": workers,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.sweeps.driver", json.dumps(arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    held = json.loads(done.stdout.splitlines()[-1])
    return {
        "items": name,
        "count": count,
        "batch": batch,
        "engine": engine,
        "workers": workers,
        "seconds": round(held["seconds"], 2),
        "grown_by_mib": round(held["most"] - held["before"], 1),
    }
