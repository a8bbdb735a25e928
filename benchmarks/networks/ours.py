"""stagecert on the benchmark's problems: `python -m benchmarks.networks.ours --help`.

Times are CPU times without compilation: what is timed has run before on as many images as are
worked on at once, and on as many as are left over, and again until XLA has nothing to compile any
more (what it did compile is recorded). Everything else is included: interval bounds, the search,
the evaluation in float64 that makes bounds rigorous.
"""

import argparse
import json
import math
import time
from fractions import Fraction
from pathlib import Path

import numpy as np

from benchmarks.networks.peers.common import load_problems
from stagecert import networks
from stagecert.compiling import compiled
from stagecert.networks.bounding.jobs import boxes_at_once, default_memory
from stagecert.networks.bounding.quick import chains_of
from stagecert.networks.bounding.relaxation import split

TOLERANCES = (1e-2, 1e-3, 1e-4)
STEPS = (1, 2, 3, 4, 6, 9, 14, 20)


def _timed(function, first: int):
    """The result, CPU seconds and seconds of a run in which nothing was compiled.

    Seconds of compilation are wall time, other threads' too: they cannot be taken off CPU time. So
    a run in which something is compiled after all is not counted, and made again.
    """
    function(first)
    for _ in range(3):
        begin, wall, before = time.process_time(), time.perf_counter(), compiled()[1]
        result = function(None)
        times = {
            "cpu": time.process_time() - begin,
            "wall": time.perf_counter() - wall,
            "compiling": compiled()[1] - before,
        }
        if times["compiling"] == 0:
            break
    return result, times


def run(
    path: Path, count: int, eps: float, data: Path, tolerances, steps_of_curve, seconds
) -> dict:
    """All methods on one network."""
    problems = load_problems(data, count, eps)
    network = networks.load(path)
    targets = problems.rows.shape[1]
    parts, shapes = split(network), network.input_shapes
    quick = chains_of(parts, shapes, np.float32) is not None
    at_once = min(boxes_at_once(parts, shapes, targets, default_memory(), quick), count)
    limit = seconds / math.ceil(count / at_once)
    first = min(at_once + count % at_once, count)

    def bound(some, **options):
        lower, upper, rows = (x[:some] for x in (problems.lower, problems.upper, problems.rows))
        return networks.bound(network, lower, upper, rows, intermediate="ibp", **options)

    methods = []
    for name in ("ibp", "backward"):
        result, times = _timed(lambda some, name=name: bound(some, method=name), first)
        methods.append({"method": name, **times, "bounds": result.bound.tolist()})
    for rtol in tolerances:
        result, times = _timed(
            lambda some, rtol=rtol: bound(some, rtol=rtol, max_iterations=2000, time_limit=limit),
            first,
        )
        within = result.gap <= 1e-6 + rtol * np.abs(result.bound)
        methods.append(
            {
                "method": "nonconvex",
                "rtol": rtol,
                **times,
                "within": float(within.mean()),
                "passes": result.passes.ravel().tolist(),
                "bounds": result.bound.tolist(),
                "values": result.value.tolist(),
            }
        )
        middle, most, nearly_all = np.percentile(result.passes, [50, 95, 99])
        print(
            f"{path.stem} rtol {rtol:g}: {times['cpu'] / within.size * 1e3:.2f} ms of CPU a "
            f"problem, within {within.mean():.3f}, passes 50/95/99 % {middle:g} {most:g} "
            f"{nearly_all:g}",
            flush=True,
        )
    curve = []
    for steps in steps_of_curve:
        result, times = _timed(
            lambda some, steps=steps: bound(some, rtol=0.0, atol=1e-9, max_iterations=steps),
            first,
        )
        curve.append({"steps": steps, **times, "bounds": result.bound.tolist()})
    return {
        "network": path.stem,
        "images": count,
        "eps": eps,
        "limit": seconds,
        "methods": methods,
        "curve": curve,
    }


def main() -> None:
    """Writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", type=Path, required=True)
    parser.add_argument("--images", type=int, default=36)
    parser.add_argument("--eps", type=lambda s: float(Fraction(s)), default=8 / 255)
    parser.add_argument("--data", type=Path, required=True, help="FILE.npz: images, labels")
    parser.add_argument("--tolerances", type=float, nargs="+", default=TOLERANCES)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a tolerance")
    parser.add_argument("--steps", type=int, nargs="*", default=STEPS, help="of the curve")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record = run(
        options.network,
        options.images,
        options.eps,
        options.data,
        options.tolerances,
        options.steps,
        options.limit,
    )
    options.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
