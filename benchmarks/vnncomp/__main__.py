"""Sweeps over VNN-COMP's sets, and their table: `python -m benchmarks.vnncomp`.

The data is looked for in the folder that STAGECERT_DATA names, or in ../shared/data. An answer is
wrong if it contradicts expected.csv, where sat is backed by a counterexample and unsat by agreement
of the competition's tools.

With --jobs N, N workers decide an instance each at a time; one alone has all cores for it. What is
finished is kept in SET.partial; the same command goes on from there after an interruption.
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
# Seconds beyond its time limit before a worker is ended.
LEEWAY = 60.0


def run_set(name: str, options) -> dict:
    """Decides a sample of a set; what the file of results holds."""
    from stagecert.machine import made
    from stagecert.sweeps import Processes
    from stagecert.verify.instances import read_lists
    from stagecert.verify.sweep import Sweep

    lists, answers = [DATA / name / "instances.csv"], [DATA / name / "expected.csv"]
    everything = read_lists(lists)
    instances = read_lists(lists, answers=answers, timeout=options.timeout, limit=options.limit)
    sweep = Sweep(instances, check=not options.unchecked, certificates=options.certificates,
                  processes=None if options.jobs == 1 else 1)  # fmt: skip
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
        proving, checking = (line.times.get(name, 0.0) for name in ("proving", "checking"))
        held["certificate"] = {
            "state": found["certificate"],
            "bytes": line.size,
            "deciding": round(line.seconds - proving - checking, 3),
            "proving": round(proving, 3),
            "checking": round(checking, 3),
        }
    return held


def files(folder: Path) -> list[Path]:
    """The results of sets; other programs write files into the folder too."""
    return sorted(path for path in folder.glob("*.json") if "set" in json.loads(path.read_text()))


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
    """What the gate costs: no `unsat` is said before the checker has accepted its certificate."""
    lines = [
        "",
        "What it costs that no `unsat` is said before the independent checker has accepted its",
        "proof. *Proven* is what the search believes, *accepted* what the checker accepts; the",
        "others are `unknown`. Deciding is the search, proving finds the certificate, trying its",
        "steps with the checker's code, checking reads what was written. The gate is proving and",
        "checking, as a share of deciding. Medians, with the maximum in brackets; all of it is",
        "part of the time limit.",
        "",
        "| set | proven | accepted | deciding | proving | checking | gate |",
        "|---|---|---|---|---|---|---|",
    ]
    every: list[float] = []
    for path in files(folder):
        held = json.loads(path.read_text())
        found = [row.get("certificate", {}) for row in held["instances"]]
        found = [one for one in found if "state" in one]  # older results have none
        if found:
            accepted = [one for one in found if one["state"] == "accepted"]
            cells = [f"{held['set']} | {len(found)} | {len(accepted)}"]
            for key in ("deciding", "proving", "checking"):
                numbers = [one[key] for one in accepted] or [0]
                cells.append(f"{statistics.median(numbers):.2f} ({max(numbers):.1f}) s")
            shares = [_gate(one) for one in accepted]
            every += shares
            cells.append(_percent(shares))
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"The gate over all {len(every)} of them: {_percent(every)}."]
    return lines if every else []


def _gate(one: dict) -> float:
    return (one["proving"] + one["checking"]) / max(one["deciding"], 1e-3)


def _percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%} ({max(shares):.0%})" if shares else "-"


def main() -> None:
    """Runs the sets and writes a file for each, and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vnncomp", description=__doc__)
    there = sorted(path.parent.name for path in DATA.glob("*/expected.csv"))
    parser.add_argument("--sets", nargs="+", choices=there, default=there)
    parser.add_argument("--limit", type=int, help="at most this many instances of each set")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for an instance")
    parser.add_argument("--jobs", type=int, default=1, help="instances at a time")
    parser.add_argument(
        "--certificates", action="store_true", help="keep the certificates to learn their sizes"
    )
    parser.add_argument("--unchecked", action="store_true", help="without the checker")
    parser.add_argument("--table", action="store_true", help="run nothing, write the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if not there:
        parser.error(f"no sets in {DATA}; set STAGECERT_DATA")
    # Before JAX is imported, here and in the workers.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The checker's products are small: on a busy machine, two threads wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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
