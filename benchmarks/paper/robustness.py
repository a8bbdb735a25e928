"""`robust` on all test images on one accelerator: `python -m benchmarks.paper.robustness --help`.

Clean, attacked and certified accuracy with `stagecert.robust.robust` as users call it, the table,
the counterexamples and the summary written to a folder. The first run compiles; the runs after it
are timed as a whole, each in a new folder. One more is timed by what it spends its time on.
"""

import argparse
import collections
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.data import DATA, ROOT, images_file, network_file, require
from stagecert import machine
from stagecert.compiling import compiled, keep_programs
from stagecert.errors import ProblemError
from stagecert.files import write_whole
from stagecert.robust import robust, work

# Methods of `work.Work`, and what they are called in the record; what is within another counts
# for that.
PHASES = (
    (work, "boxes_around", "boxes"),
    (work.OpenModel, "run", "ONNX Runtime"),
    (work.Work, "_attack", "attack"),
    (work.Work, "_descend_from_minima", "attack from minima"),
    (work.Work, "_passes_the_gate", "checker"),
    (work.Work, "_bound", "bounds"),
)


def timed_phases(run) -> dict[str, float]:
    """Seconds of each phase of a run, without what other phases within it take."""
    seconds: dict[str, float] = collections.defaultdict(float)
    before = [getattr(owner, name) for owner, name, _ in PHASES]
    inside: list[list[float]] = []

    def patched(function, label):
        def call(*arguments, **options):
            begin = time.perf_counter()
            inside.append([0.0])
            try:
                return function(*arguments, **options)
            finally:
                spent = time.perf_counter() - begin
                seconds[label] += spent - inside.pop()[0]
                if inside:
                    inside[-1][0] += spent

        return call

    for (owner, name, label), function in zip(PHASES, before, strict=True):
        setattr(owner, name, patched(function, label))
    try:
        begin = time.perf_counter()
        run()
        whole = time.perf_counter() - begin
    finally:
        for (owner, name, _), function in zip(PHASES, before, strict=True):
            setattr(owner, name, function)
    return {**seconds, "everything": whole}


def main() -> None:
    """Writes one JSON file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.robustness", description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--network", default="medium_relu_adv")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--eps", default="8/255")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--unchecked", action="store_true", help="leave the checker out")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "paper" / "robustness.json")
    options = parser.parse_args()
    try:
        require(options.data, [options.network])
    except ProblemError as error:
        parser.error(str(error))
    keep_programs()
    with np.load(images_file(options.data)) as file:
        images, labels = file["images"], file["labels"]

    def run():
        with tempfile.TemporaryDirectory() as folder:
            return robust(
                network_file(options.data, options.network), images, labels, options.eps,
                limit=options.images, check=not options.unchecked, out=Path(folder) / "robust",
            )  # fmt: skip

    def timed():
        begin = time.perf_counter()
        report = run()
        return report, time.perf_counter() - begin

    before = compiled()
    report, first = timed()
    after = compiled()
    record = {
        "network": options.network,
        "images": report.images,
        "eps": options.eps,
        "checked": not options.unchecked,
        "device": jax.devices()[0].device_kind,
        "correct": report.correct,
        "attacked": report.attacked,
        "certified": report.certified,
        "unknown": report.unknown,
        "methods": dict(report.methods),
        "first": first,
        "programs": after[0] - before[0],
        "compiling": after[1] - before[1],
        "seconds": [timed()[1] for _ in range(options.runs)],
        "phases": timed_phases(run),
        "made": machine.made(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
