"""What a pass of a search costs beyond the pass: vector work, bookkeeping, calls from the host."""

import json
import os
import subprocess
import sys

import jax

import stagecert as sc
from benchmarks.core import gradient, records
from benchmarks.core.instances import LARGE

SOLVERS = ("greedy", "accelerated", "simple", "safe", "polish")
ITERATIONS = 32
REPEATS = 3


def solve_stats(problem: sc.Problem, solver: str) -> sc.Stats:
    """The quickest of a few solves, the first of which compiles and does not count."""
    options = {"solver": solver, "max_iterations": ITERATIONS}
    solutions = [sc.solve(problem, atol=0.0, rtol=1e-14, **options) for _ in range(REPEATS + 1)]
    return min((s.stats for s in solutions[1:]), key=lambda stats: stats.seconds)


def measure(label: str, solver: str) -> dict:
    """Seconds a pass in a whole solve, over the seconds of a compiled forward pass alone."""
    problem = LARGE[label]()
    stats = solve_stats(problem, solver)
    alone = min(gradient.times_of(problem, ("forward",))["forward"])
    return {
        "instance": label,
        "solver": solver,
        "iterations": stats.iterations,
        "passes": stats.passes,
        "seconds": round(stats.seconds, 4),
        "forward_microseconds": round(1e6 * alone, 1),
        "ratio": round(stats.seconds / stats.passes / alone, 1),
    }


def _with_one_thread(label: str, solver: str) -> dict:
    """The same with OpenBLAS, which JAX calls for small dense algebra, held to one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.core.overhead", label, solver],
        check=True,
        capture_output=True,
        text=True,
        cwd=records.ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def run() -> None:
    """All solvers on the large instances; `polish` also with one BLAS thread."""
    out = []
    for label in LARGE:
        for name in SOLVERS:
            out.append(measure(label, name) | {"blas": "default"})
            print(f"  {label}, {name}: {out[-1]['ratio']} forward passes a pass", flush=True)
        out.append(_with_one_thread(label, "polish") | {"blas": "one thread"})
        print(f"  {label}, polish, one BLAS thread: {out[-1]['ratio']}", flush=True)
    records.save("overhead", out)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(json.dumps(measure(*sys.argv[1:])))
