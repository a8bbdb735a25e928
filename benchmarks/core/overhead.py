"""What a pass of a search costs beyond the pass: vector work, bookkeeping, calls from the host."""

import stagecert as sc
from benchmarks.core import gradient, records
from benchmarks.core.instances import LARGE

SOLVERS = ("greedy", "polish", "accelerated", "simple", "safe")
ITERATIONS = 32
REPEATS = 3


def solve_stats(problem: sc.Problem, solver: str) -> sc.Stats:
    """The quickest of a few solves, the first of which compiles and does not count."""
    options = {"solver": solver, "max_iterations": ITERATIONS}
    solutions = [sc.solve(problem, atol=0.0, rtol=1e-14, **options) for _ in range(REPEATS + 1)]
    return min((s.stats for s in solutions[1:]), key=lambda stats: stats.seconds)


def run() -> None:
    """Seconds a pass in a whole solve, over the seconds of a compiled forward pass alone."""
    out = []
    for label, make in LARGE.items():
        problem = make()
        for name in SOLVERS:
            stats = solve_stats(problem, name)
            alone = min(gradient.times_of(problem, ("forward",))["forward"])
            record = {
                "instance": label,
                "solver": name,
                "iterations": stats.iterations,
                "passes": stats.passes,
                "seconds": round(stats.seconds, 4),
                "forward_microseconds": round(1e6 * alone, 1),
                "ratio": round(stats.seconds / stats.passes / alone, 1),
            }
            out.append(record)
            print(f"  {label}, {name}: {record['ratio']} forward passes a pass", flush=True)
    records.save("overhead", out)
