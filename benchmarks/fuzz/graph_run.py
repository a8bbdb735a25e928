"""The long run over written graphs: `python -m benchmarks.fuzz graphs --count 10000 --seed 0`.

Its record says of every operator how many graphs have it, how many of these the importer and the
checker refused, and how many were bounded; and what was checked how often, so that nobody takes a
run that refused everything for one that found nothing.
"""

import collections
import dataclasses
import json
import os
import random
import resource
import tempfile
from pathlib import Path

import jax

from benchmarks.fuzz import runner

PORTION = 500
SECONDS = 900.0  # compilations, at a low priority on a busy machine
_MOST_MEMORY = 3 * 2**29
_CACHE = "JAX_COMPILATION_CACHE_DIR"

_checks = None  # one for each worker


def tried(seed: int, number: int, folder: Path) -> tuple[dict[str, int], list[str]]:
    """What is counted of one graph, and what was violated."""
    global _checks
    from benchmarks.fuzz import graphs
    from benchmarks.fuzz.checks import Checks

    if _checks is None:
        _checks = Checks(folder=folder)
    if _resident() > _MOST_MEMORY:
        jax.clear_caches()  # it keeps what it compiled for every shape
    graph = graphs.write(seed, number)
    found = _checks.run(graph, random.Random(f"checks {seed} {number}"))
    counts: collections.Counter[str] = collections.Counter(found.done)
    counts["graphs"] += 1
    counts["exact graphs"] += graph.exact
    counts["tame graphs"] += graph.tame
    for operator in found.seen:
        counts[f"operator {operator} seen"] += 1
        counts[f"operator {operator} bounded"] += bool(found.done["ibp"])
        counts[f"operator {operator} checked"] += bool(found.done["checker"])
    for reason in found.refused:
        counts[f"refused {reason}"] += 1
    if found.checker_refused:
        counts["checker refused"] += 1
        counts[f"checker refused by {_operator(found.checker_refused)}"] += 1
    failures = [f"{v['check']}: {v['what']}" for v in found.violations]
    for violation in found.violations:
        counts[f"violation {violation['check']}"] += 1
    return dict(counts), failures


def _resident() -> int:
    """Bytes of memory that this process has at the moment."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _operator(reason: str) -> str:
    first = reason.split(" '")[0]
    return first if first.isalpha() else "no operator: " + reason[:60]


def run(count: int, seed: int, jobs: int, out: Path) -> dict:
    """All graphs; what was finished before is not done again."""
    parts = out / f"graphs_seed{seed}.parts.jsonl"
    with tempfile.TemporaryDirectory() as cache:
        # Graphs share shapes, so workers share what they compile.
        os.environ.setdefault(_CACHE, cache)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        record = runner.run(
            "graphs", count, seed, jobs, parts=parts, portion=PORTION, seconds=SECONDS
        )
    parts.unlink(missing_ok=True)
    return readable(record)


def readable(record: dict) -> dict:
    """The record with a table of operators in the place of single counts."""
    outcomes = record["outcomes"]
    operators: dict[str, dict[str, int]] = collections.defaultdict(dict)
    rest, refused, unchecked, violations = {}, {}, {}, {}
    for name, count in outcomes.items():
        kind, _, what = name.partition(" ")
        if kind == "operator":
            operator, _, how = what.partition(" ")
            operators[operator][how] = count
        elif kind == "refused":
            refused[what] = count
        elif name.startswith("checker refused by "):
            unchecked[name.removeprefix("checker refused by ")] = count
        elif kind == "violation":
            violations[what] = count
        else:
            rest[name] = count
    order = sorted(refused.items(), key=lambda pair: -pair[1])
    return {
        **record,
        "outcomes": rest,
        "violations": violations,
        "operators": dict(sorted(operators.items())),
        "refused": dict(order[:60]),
        "not_checked": dict(sorted(unchecked.items(), key=lambda pair: -pair[1])),
    }


def main(count: int, seed: int, jobs: int, out: Path) -> dict:
    """Runs, writes the record, and gives it back."""
    from benchmarks.fuzz.checks import Shares

    record = {**run(count, seed, jobs, out), "shares": dataclasses.asdict(Shares())}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"graphs_seed{seed}.json").write_text(json.dumps(record, indent=1) + "\n")
    return record
