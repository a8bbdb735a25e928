"""Sweeps over VNN-COMP's sets, and their table: `python -m benchmarks.vnncomp`.

The data is looked for in the folder that STAGECERT_DATA names, or in ../shared/data. An answer is
wrong if it contradicts expected.csv, where sat is backed by a counterexample and unsat by agreement
of the competition's tools.

With --jobs N, N workers decide an instance each at a time. What is finished is kept in SET.partial;
the same command goes on from there after an interruption.
"""

import argparse
import json
import os
import shutil
import statistics
from pathlib import Path

from benchmarks import data

RESULTS = data.ROOT / "benchmarks" / "results" / "vnncomp"
DATA = data.DATA / "vnncomp"
ANSWERS = ("unsat", "sat", "unknown", "timeout", "error")
# Seconds beyond its time limit, and for finding and checking a proof, before a worker is ended.
LEEWAY = 600.0


def run_set(name: str, options) -> dict:
    """Decides a sample of a set; what the file of results holds."""
    from stagecert.machine import made
    from stagecert.sweeps import Processes
    from stagecert.verify.instances import read_lists
    from stagecert.verify.sweep import Sweep

    lists, answers = [DATA / name / "instances.csv"], [DATA / name / "expected.csv"]
    everything = read_lists(lists)
    instances = read_lists(lists, answers=answers, timeout=options.timeout, limit=options.limit)
    sweep = Sweep(instances, certificates=options.certificates)
    done = 0

    def show(rows) -> None:
        nonlocal done
        done += len(rows)
        for row in rows:
            one = instances[row.place]
            print(
                f"{name} {done}/{len(sweep.items)} {one.name()}: {row.data['verdict']} "
                f"(expected {one.expected}) {row.seconds:.1f} s {row.data['certificate'] or ''}",
                flush=True,
            )

    partial = options.out / f"{name}.partial"
    with sweep.store(partial) as store:
        done = len(store)
        sweep.run(
            store, show, engine=Processes(options.jobs), timeout=options.timeout + LEEWAY
        )  # fmt: skip
        rows = [result(line) for line in sweep.lines(store, attached=True)]
    shutil.rmtree(partial)
    return {
        "set": name,
        "all": len(everything),
        "timeout": options.timeout,
        "jobs": options.jobs,
        "start": False,
        "made": made(),
        "date": made()["date"],
        "instances": rows,
    }


def result(line) -> dict:
    """An instance as the file of results has it."""
    found = line.data
    held = {
        "model": found["model"],
        "property": found["property"],
        "expected": found["expected"],
        "answer": found["verdict"],
        "wrong": found["wrong"],
        "seconds": round(line.seconds, 2),
        "boxes": found["boxes"] or 0,
        "how": (found["how"] or "").split(),
        "reason": found["note"] or "",
    }
    if found["certificate"] is not None:
        held["certificate"] = {
            "accepted": found["certificate"] == "accepted",
            "reason": found["note"] or found["certificate"],
            "bytes": line.size,
            "deciding": round(line.seconds, 3),
            "writing": round(line.times.get("writing", 0.0), 3),
            "checking": round(line.times.get("checking", 0.0), 3),
        }
    return held


def files(folder: Path) -> list[Path]:
    """The results of sets; those of attacks have a program of their own."""
    return sorted(path for path in folder.glob("*.json") if path.name != "attacks.json")


def table(folder: Path) -> str:
    """The Markdown table of all results that are there."""
    lines = [
        "# VNN-COMP sets",
        "",
        "Written by `python -m benchmarks.vnncomp`. Samples are spread evenly over each set. Times",
        "are medians over all instances of the sample, compilation included; functions compiled in",
        "earlier runs were in the cache. Where *start* says yes, each instance was a process of",
        "its own, whose start is included. Each file names the machine.",
        "",
        "| set | sample | unsat | sat | unknown | timeout | error | wrong | median time | start | "
        "limit | date |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in files(folder):
        held = json.loads(path.read_text())
        rows = held["instances"]
        counts = [sum(row["answer"] == answer for row in rows) for answer in ANSWERS]
        lines.append(
            f"| {held['set']} | {len(rows)} of {held['all']} | "
            + " | ".join(map(str, counts))
            + f" | {sum(row['wrong'] for row in rows)} "
            f"| {statistics.median(row['seconds'] for row in rows):.1f} s "
            f"| {'yes' if held.get('start', True) else 'no'} "
            f"| {held['timeout']:g} s | {held['date']} |"
        )
    return "\n".join([*lines, *_certificates(folder)]) + "\n"


def _certificates(folder: Path) -> list[str]:
    """The table of certificates, for the sets that were run with --certificates."""
    lines = [
        "",
        "Certificates of the `unsat` answers above (`--certificates`). Deciding excludes the start",
        "of the process; writing includes finding the proof; checking includes the start of a",
        "process where the table above says so. Medians, with the maximum in brackets.",
        "",
        "| set | unsat | accepted | size | deciding | writing | checking |",
        "|---|---|---|---|---|---|---|",
    ]
    count = len(lines)
    for path in files(folder):
        held = json.loads(path.read_text())
        found = [row["certificate"] for row in held["instances"] if "certificate" in row]
        if found:
            accepted = [one for one in found if one["accepted"]]
            cells = [f"{held['set']} | {len(found)} | {len(accepted)}"]
            for key, unit, scale in (
                ("bytes", "kB", 1e-3), ("deciding", "s", 1), ("writing", "s", 1),
                ("checking", "s", 1),
            ):  # fmt: skip
                numbers = [one[key] * scale for one in accepted] or [0]
                cells.append(f"{statistics.median(numbers):.1f} ({max(numbers):.1f}) {unit}")
            lines.append("| " + " | ".join(cells) + " |")
    return lines if len(lines) > count else []


def main() -> None:
    """Runs the sets and writes a file for each, and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vnncomp", description=__doc__)
    there = sorted(path.parent.name for path in DATA.glob("*/expected.csv"))
    parser.add_argument("--sets", nargs="+", choices=there, default=there)
    parser.add_argument("--limit", type=int, help="at most this many instances of each set")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for an instance")
    parser.add_argument("--jobs", type=int, default=1, help="instances at a time")
    parser.add_argument(
        "--certificates", action="store_true", help="write and check a certificate of every unsat"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, write the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if not there:
        parser.error(f"no sets in {DATA}; set STAGECERT_DATA")
    # Before JAX is imported, here and in the workers.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.jobs > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
    from stagecert.compiling import use_compilation_cache

    use_compilation_cache()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in () if options.table else options.sets:
        held = run_set(name, options)
        (options.out / f"{name}.json").write_text(json.dumps(held, indent=1) + "\n")
        (options.out / "README.md").write_text(table(options.out))
    (options.out / "README.md").write_text(table(options.out))


if __name__ == "__main__":
    main()
