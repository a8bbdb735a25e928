"""Runs `stagecert verify` on VNN-COMP's sets and writes a table: `python -m benchmarks.vnncomp`.

The data is looked for in the folder that STAGECERT_DATA names, or in ../shared/data. An answer is
wrong if it contradicts expected.csv, where sat is backed by a counterexample and unsat by agreement
of the competition's tools. Each instance is a process of its own, so times include its start.
"""

import argparse
import csv
import datetime
import json
import os
import platform
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


def run(name: str, item: dict, timeout: float, certificates: bool = False) -> dict:
    """Verifies one instance in a process of its own, and checks the certificate in another."""
    files = [_existing(DATA / name / item[key]) for key in ("model", "property")]
    program = [sys.executable, "-c", "from stagecert.cli import main; main()"]
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
        said = json.loads(done.stdout)
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


def table() -> str:
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
    for path in sorted(RESULTS.glob("*.json")):
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
    return "\n".join([*lines, *_certificates()]) + "\n"


def _certificates() -> list[str]:
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
    for path in sorted(RESULTS.glob("*.json")):
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
    parser.add_argument(
        "--certificates", action="store_true", help="write and check a certificate of every unsat"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, write the table")
    options = parser.parse_args()
    if not there:
        parser.error(f"no sets in {DATA}; set STAGECERT_DATA")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in () if options.table else options.sets:
        everything = instances(name)
        rows = []
        for item in sample(everything, options.limit):
            rows.append(run(name, item, options.timeout, options.certificates))
            last = rows[-1]
            print(
                f"{name} {Path(item['model']).name} {Path(item['property']).name}: "
                f"{last['answer']} (expected {last['expected']}) {last['seconds']:.1f} s"
                + (" WRONG" if last["wrong"] else "")
                + (f" {last['certificate']}" if "certificate" in last else ""),
                flush=True,
            )
        held = {
            "set": name,
            "all": len(everything),
            "timeout": options.timeout,
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
            "instances": rows,
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(held, indent=1) + "\n")
        (RESULTS / "README.md").write_text(table())
    (RESULTS / "README.md").write_text(table())


if __name__ == "__main__":
    main()
