"""Mutated inputs: `python -m benchmarks.fuzz onnx|vnnlib --count N --seed S`.

The record is written to benchmarks/results/fuzz; the exit status is 0 if there are no failures.
"""

import argparse
import json
import os
from pathlib import Path

from benchmarks.fuzz.runner import TRIES, run

RESULTS = Path(__file__).parents[1] / "results" / "fuzz"


def main() -> None:
    """Runs one kind and writes its record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("kind", choices=sorted(TRIES))
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    options = parser.parse_args()
    record = run(options.kind, options.count, options.seed, options.jobs)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.kind}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    raise SystemExit(1 if record["failures"] else 0)


if __name__ == "__main__":
    main()
