"""What the gate costs in CPU time: `python -m benchmarks.vnncomp.gate`.

Of each set in vnncomp/tree, some properties that were proven within a few seconds, spread over the
set, are decided twice; the second time nothing is compiled. Proving and checking together are the
gate; deciding is the rest. CPU seconds say the same on a busy machine.
"""

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.vnncomp.__main__ import DATA, RESULTS
from stagecert.compiling import use_compilation_cache
from stagecert.machine import made
from stagecert.verify.instances import spread

FILE = RESULTS / "gate_cpu.json"
LIMIT = 120.0  # seconds for a property


def measured(name: str, row: dict) -> dict:
    """Deciding, and the gate, of one property."""
    module: Any = importlib.import_module("stagecert.verify.verify")
    certify, spent, whole, answer = module.certify, [0.0], 0.0, ""

    def timed(*given, **options):
        begin = time.process_time()
        try:
            return certify(*given, **options)
        finally:
            spent[0] += time.process_time() - begin

    paths = [DATA / name / row[key] for key in ("model", "property")]
    paths = [path if path.exists() else path.with_name(path.name + ".gz") for path in paths]
    module.certify = timed
    try:
        for _ in range(2):
            spent[0], begin = 0.0, time.process_time()
            answer = module.verify(*paths, LIMIT).answer
            whole = time.process_time() - begin
    finally:
        module.certify = certify
    return {
        "model": row["model"], "property": row["property"], "answer": answer, "how": row["how"],
        "deciding": round(whole - spent[0], 4), "gate": round(spent[0], 4),
    }  # fmt: skip


def main() -> None:
    """Measures all sets and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=8, help="properties of each set")
    parser.add_argument("--longest", type=float, default=5.0, help="seconds of deciding on record")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    use_compilation_cache()
    sets: dict[str, Any] = {}
    result: dict[str, Any] = {}
    for path in sorted((RESULTS / "tree").glob("*.json")):
        held = json.loads(path.read_text())
        rows = [row for row in held["instances"] if row["answer"] == "unsat"
                and row["certificate"]["deciding"] <= options.longest]  # fmt: skip
        found = [measured(held["set"], row) for row in spread(rows, options.count)]
        shares = [one["gate"] / max(one["deciding"], 1e-4) for one in found]
        sets[held["set"]] = {"median": round(statistics.median(shares), 4), "properties": found}
        print(f"{held['set']}: {sets[held['set']]['median']:.0%} of {len(found)}", flush=True)
        result = {"sets": sets, "median": statistics.median(x["median"] for x in sets.values())}
        options.out.write_text(json.dumps(result | {"made": made()}, indent=1) + "\n")
    print(f"median of the sets: {result['median']:.0%}")


if __name__ == "__main__":
    main()
