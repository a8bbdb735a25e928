"""Engines of sweeps, killed and measured.

`python -m benchmarks.sweeps [kills] [overhead]` writes kills.json, overhead.json and engines.md
into benchmarks/results/sweeps. What sweeps cost is `python -m benchmarks.sweeps.cost`.
"""

import json
import sys
from pathlib import Path

from benchmarks.sweeps import kills, overhead
from stagecert.files import write_whole
from stagecert.machine import made

RESULTS = Path(__file__).parents[1] / "results" / "sweeps"
PARTS = {"kills": kills.measure, "overhead": overhead.measure}
PACKAGES = ("stagecert", "jax", "jaxlib", "numpy", "ray")


def main(parts: list[str]) -> None:
    """Measures some parts, and writes the table of what is known."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for part in parts or PARTS:
        held = {"made": made(PACKAGES), "runs": PARTS[part](_say)}
        write_whole(RESULTS / f"{part}.json", json.dumps(held, indent=2) + "\n")
    write_whole(RESULTS / "engines.md", _text())


def _say(line: str) -> None:
    print(line, flush=True)


def _text() -> str:
    lines = ["Written by `python -m benchmarks.sweeps`.", ""]
    if (RESULTS / "kills.json").exists():
        lines += _kills(json.loads((RESULTS / "kills.json").read_text()))
    if (RESULTS / "overhead.json").exists():
        lines += _overhead(json.loads((RESULTS / "overhead.json").read_text()))
    return "\n".join(lines)


def _kills(held: dict) -> list[str]:
    lines = [
        f"Sweeps of {kills.IMAGES} images in batches of {kills.BATCH} on two workers; something is "
        "killed at a random time, and a driver is started again. "
        f"({held['made']['cpu']}, load {held['made'].get('load')} when it began.)",
        "",
        "| killed | engine | runs | same table | missing | most often computed | twice, at most | "
        "orphans |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for victim, engine, _ in kills.RUNS:
        runs = [one for one in held["runs"] if (one["victim"], one["engine"]) == (victim, engine)]
        same = sum(one["same_table"] for one in runs)
        missing = max(kills.IMAGES - one["items"] for one in runs)
        most = max(one["computed_at_most"] for one in runs)
        twice = max(one["computed_twice"] for one in runs)
        orphans = max(one.get("orphans", 0) for one in runs)
        lines.append(
            f"| {victim} | {engine} | {len(runs)} | {same} | {missing} | {most} | {twice} | "
            f"{orphans} |"
        )
    return [*lines, ""]


def _overhead(held: dict) -> list[str]:
    lines = [
        "Seconds are those of the whole sweep, and until the first rows were stored: for starting "
        "two workers and, with Ray, a cluster of one node or joining one that is there. Memory is "
        "that of the driver: the most in the sweep, minus that before it. Images were run three "
        "times, of which the quickest counts. "
        f"({held['made']['cpu']}, load {held['made'].get('load')} when it began.)",
        "",
        "| items | count | at once | engine | seconds | first rows | x in-process | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone = {one["items"]: one["seconds"] for one in held["runs"] if one["engine"] == "in-process"}
    for one in held["runs"]:
        lines.append(
            f"| {one['items']} | {one['count']} | {one['batch']} | {one['engine']} | "
            f"{one['seconds']:.1f} | {one['until_first']:.1f} | "
            f"{one['seconds'] / alone[one['items']]:.2f} | {one['grown_by_mib']:.0f} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main(sys.argv[1:])
