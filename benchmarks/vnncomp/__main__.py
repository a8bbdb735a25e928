"""Runs `stagecert verify` on VNN-COMP's sets and writes a table: `python -m benchmarks.vnncomp`.

The data is looked for in the folder that STAGECERT_DATA names, or in ../shared/data. An answer is
wrong if it contradicts expected.csv, where sat is backed by a counterexample and unsat by agreement
of the competition's tools. Each instance is a process of its own, so times include its start.

With --jobs N, N instances run at a time, each on one core of its own. What is finished is kept in
SET.partial.jsonl; the same command goes on from there after an interruption.
"""

import argparse
import concurrent.futures
import csv
import datetime
import importlib.metadata
import json
import os
import platform
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "vnncomp"
DATA = Path(os.environ.get("STAGECERT_DATA", ROOT.parent / "shared" / "data")) / "vnncomp"
ANSWERS = ("unsat", "sat", "unknown", "timeout", "error")


def instances(name: str) -> list[dict]:
    """All instances of a set: model, property, expected answer."""
    with (DATA / name / "expected.csv").open() as file:
        return [
            {"model": row["onnx"], "property": row["vnnlib"], "expected": row["expected"]}
            for row in csv.DictReader(file)
        ]


def sample(items: list, limit: int | None) -> list:
    """At most `limit` items, evenly spread over the list."""
    if limit is None or limit >= len(items):
        return items
    return [items[round(k * (len(items) - 1) / max(limit - 1, 1))] for k in range(limit)]


def run(
    name: str, item: dict, timeout: float, certificates: bool = False, core: int | None = None
) -> dict:
    """Verifies one instance in a process of its own, and checks the certificate in another."""
    files = [_existing(DATA / name / item[key]) for key in ("model", "property")]
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    program = [*pinned, sys.executable, "-c", "from stagecert.cli import main; main()"]
    begin = time.monotonic()
    folder = tempfile.TemporaryDirectory()
    proof = Path(folder.name) / "certificate"
    wanted = ["--certificate", str(proof)] if certificates else []
    done = subprocess.run(
        [*program, "verify", *files, "--json", "--timeout", str(timeout), *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - begin
    try:
        said: dict = json.loads(done.stdout)
    except ValueError:
        said = {"answer": "error", "reason": done.stderr.strip()[-500:]}
    checked = {}
    if certificates and said["answer"] == "unsat":
        checked = {"certificate": _checked([*program, "check", *files], proof, said, done.stderr)}
    folder.cleanup()
    hows = sorted({case["how"] for case in said.get("cases", ()) if case["how"]})
    return {
        **item,
        "answer": said["answer"],
        "wrong": {said["answer"], item["expected"]} == {"sat", "unsat"},
        "seconds": round(seconds, 2),
        "boxes": said.get("boxes", 0),
        "how": hows,
        "reason": said.get("reason", ""),
        **checked,
    }


def _checked(program: list[str], proof: Path, said: dict, errors: str) -> dict:
    """What became of a certificate: whether it is accepted, its size, and what it cost."""
    if not proof.exists():
        return {"accepted": False, "reason": errors.strip()[-500:]}
    begin = time.monotonic()
    done = subprocess.run([*program, str(proof)], capture_output=True, text=True, check=False)
    return {
        "accepted": done.returncode == 0,
        "reason": (done.stdout + done.stderr).strip()[-500:],
        "bytes": proof.stat().st_size,
        "deciding": said["seconds"],
        "writing": said["certificate_seconds"],
        "checking": round(time.monotonic() - begin, 2),
    }


def _existing(path: Path) -> str:
    packed = path.with_name(path.name + ".gz")
    return str(packed if packed.exists() and not path.exists() else path)


def table(folder: Path) -> str:
    """The Markdown table of all results that are there."""
    lines = [
        "# VNN-COMP sets",
        "",
        "Written by `python -m benchmarks.vnncomp`. Samples are spread evenly over each set. Times",
        "are medians over all instances of the sample, process start and compilation included;",
        "functions compiled in earlier runs were in the cache. Each file names the machine.",
        "",
        "| set | sample | unsat | sat | unknown | timeout | error | wrong | median time | limit | "
        "date |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        held = json.loads(path.read_text())
        rows = held["instances"]
        counts = [sum(row["answer"] == answer for row in rows) for answer in ANSWERS]
        lines.append(
            f"| {held['set']} | {len(rows)} of {held['all']} | "
            + " | ".join(map(str, counts))
            + f" | {sum(row['wrong'] for row in rows)} "
            f"| {statistics.median(row['seconds'] for row in rows):.1f} s "
            f"| {held['timeout']:g} s | {held['date']} |"
        )
    return "\n".join([*lines, *_certificates(folder)]) + "\n"


def _certificates(folder: Path) -> list[str]:
    """The table of certificates, for the sets that were run with --certificates."""
    lines = [
        "",
        "Certificates of the `unsat` answers above (`--certificates`). Deciding excludes the start",
        "of the process; writing includes finding the proof; checking is a process of its own,",
        "start included. Medians, with the maximum in brackets.",
        "",
        "| set | unsat | accepted | size | deciding | writing | checking |",
        "|---|---|---|---|---|---|---|",
    ]
    count = len(lines)
    for path in sorted(folder.glob("*.json")):
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


def machine(jobs: int) -> str:
    """The machine and the versions that matter, in words."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines()
                 if line.startswith("model name")]  # fmt: skip
        model = names[0] if names else model
    packages = ("jax", "onnxruntime", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    how = "one instance at a time" if jobs == 1 else f"{jobs} instances at a time, a core each"
    return f"{model}, {os.cpu_count()} cores, {how}; Python {platform.python_version()}, {versions}"


def run_set(name: str, items: list[dict], options) -> list[dict]:
    """All rows of one set, in the order of the items; those of an interrupted run are kept."""
    settings = {"timeout": options.timeout, "certificates": options.certificates}
    partial = options.out / f"{name}.partial.jsonl"
    known = {}
    if partial.exists():
        for line in partial.read_text().splitlines():
            try:
                held = json.loads(line)
            except ValueError:
                continue  # a line that was cut off
            if held["settings"] == settings:
                known[held["row"]["model"], held["row"]["property"]] = held["row"]
    cores: queue.Queue[int | None] = queue.Queue()
    there = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pin = options.jobs > 1 and shutil.which("taskset") is not None
    for k in range(options.jobs):
        cores.put(there[k % len(there)] if pin and there else None)

    def work(item: dict) -> dict:
        core = cores.get()
        try:
            return run(name, item, options.timeout, options.certificates, core)
        finally:
            cores.put(core)

    waiting = [item for item in items if (item["model"], item["property"]) not in known]
    with partial.open("a") as file, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        tasks = [pool.submit(work, item) for item in waiting]
        try:
            for task in concurrent.futures.as_completed(tasks):
                row = task.result()
                known[row["model"], row["property"]] = row
                file.write(json.dumps({"settings": settings, "row": row}) + "\n")
                file.flush()
                print(
                    f"{name} {len(known)}/{len(items)} {Path(row['model']).name} "
                    f"{Path(row['property']).name}: {row['answer']} (expected {row['expected']}) "
                    f"{row['seconds']:.1f} s" + (" WRONG" if row["wrong"] else "")
                    + (f" {row['certificate']}" if "certificate" in row else ""),
                    flush=True,
                )  # fmt: skip
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
    return [known[item["model"], item["property"]] for item in items]


def main() -> None:
    """Runs the sets and writes a file for each, and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vnncomp", description=__doc__)
    there = sorted(path.parent.name for path in DATA.glob("*/expected.csv"))
    parser.add_argument("--sets", nargs="+", choices=there, default=there)
    parser.add_argument("--limit", type=int, help="at most this many instances of each set")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for an instance")
    parser.add_argument("--jobs", type=int, default=1, help="instances at a time, a core for each")
    parser.add_argument(
        "--certificates", action="store_true", help="write and check a certificate of every unsat"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, write the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if not there:
        parser.error(f"no sets in {DATA}; set STAGECERT_DATA")
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.jobs > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
    folder = options.out
    folder.mkdir(parents=True, exist_ok=True)
    for name in () if options.table else options.sets:
        everything = instances(name)
        rows = run_set(name, sample(everything, options.limit), options)
        held = {
            "set": name,
            "all": len(everything),
            "timeout": options.timeout,
            "date": datetime.date.today().isoformat(),
            "machine": machine(options.jobs),
            "instances": rows,
        }
        (folder / f"{name}.json").write_text(json.dumps(held, indent=1) + "\n")
        (folder / f"{name}.partial.jsonl").unlink(missing_ok=True)
        (folder / "README.md").write_text(table(folder))
    (folder / "README.md").write_text(table(folder))


if __name__ == "__main__":
    main()
