"""Fuzzing, each kind with a record in benchmarks/results/fuzz:

python -m benchmarks.fuzz onnx --count N --seed S     mutated models
python -m benchmarks.fuzz vnnlib --count N --seed S   mutated properties
python -m benchmarks.fuzz graphs --count N --seed S   written models, against exact evaluation
python -m benchmarks.fuzz points --count N --seed S   bounds against points and corners of boxes
python -m benchmarks.fuzz mutants                     whether faults in stagecert would be found

The exit status is 0 if there are no failures. A run of graphs that was ended goes on where it was.
"""

import argparse
import json
import os
from pathlib import Path

from benchmarks.fuzz.runner import TRIES, run

RESULTS = Path(__file__).parents[1] / "results" / "fuzz"
_COUNTS = {"graphs": 10_000, "mutants": 400, "points": 12_000}


def main() -> None:
    """Runs one kind and writes its record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("kind", choices=sorted([*TRIES, *_COUNTS]))
    parser.add_argument("--count", type=int, help="inputs; for mutants, the most for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    options = parser.parse_args()
    count = options.count or _COUNTS.get(options.kind, 100_000)
    if options.kind == "graphs":
        from benchmarks.fuzz import graph_run

        record = graph_run.main(count, options.seed, options.jobs, options.out)
    elif options.kind == "mutants":
        from benchmarks.fuzz import mutant_run

        record = mutant_run.main(count, options.seed, options.jobs, options.out)
    elif options.kind == "points":
        from benchmarks.fuzz import points

        record = points.run(count, options.seed)
        path = options.out / f"points_seed{options.seed}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
    else:
        record = run(options.kind, count, options.seed, options.jobs)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.kind}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    raise SystemExit(1 if record["failures"] else 0)


if __name__ == "__main__":
    main()
