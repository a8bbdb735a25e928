"""Compilation: seconds until a first solve of short and long scans, and what is compiled again."""

import json
import subprocess
import sys

import jax
import numpy as np

import stagecert as sc
from benchmarks.core import records
from benchmarks.core.instances import isotonic_level, relu_network, scan_band

LENGTHS = (1_000, 100_000)
ITERATIONS = 20
BATCH = 8


def _batch(seed):
    rng = np.random.default_rng(seed)
    problem = relu_network(32, (64, 64), eps=0.3)
    middle = rng.normal(size=(BATCH, 32))
    stacked = sc.Problem(
        sc.Box(middle - 0.3, middle + 0.3),
        problem.stages,
        sc.Objective(problem.objective.function, params=rng.normal(size=(BATCH, 64))),
    )
    return sc.Batch.of(stacked, lambda p: (p.inputs, p.objective.params))


INSTANCES = {
    "relu network, 64-128-128": lambda seed: relu_network(64, (128, 128), eps=0.3, seed=seed),
    "scan, 200 steps": lambda seed: scan_band(200, 4, 2, seed=seed),
    "isotonic level, 256 + 256 nodes": lambda seed: isotonic_level(256, seed=seed),
    f"batch of {BATCH} relu networks, 32-64-64": _batch,
}


class Compilations:
    """Counts XLA compilations from now on."""

    def __init__(self):
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            self.count, self.seconds = self.count + 1, self.seconds + seconds

    def since(self, earlier: int) -> int:
        """Compilations after there had been `earlier` of them."""
        return self.count - earlier


def first_solve(length: int) -> dict:
    """Times of a first and a second solve of a scan; in a process of its own."""
    jax.config.update("jax_enable_x64", True)
    compilations = Compilations()
    seconds = []
    for seed in (0, 1):
        problem = scan_band(length, 2, 1, seed=seed)
        solution = sc.solve(problem, atol=0.0, rtol=1e-12, max_iterations=ITERATIONS)
        seconds.append(solution.stats.seconds)
        if seed == 0:
            compiled, compile_seconds = compilations.count, compilations.seconds
    return {
        "length": length,
        "first_solve_seconds": round(seconds[0], 2),
        "second_solve_seconds": round(seconds[1], 2),
        "xla_seconds": round(compile_seconds, 2),
        "compilations": compiled,
    }


def recompilations() -> list[dict]:
    """How often XLA is called for a second and third instance of the same shape."""
    compilations = Compilations()
    out = []
    for label, make in INSTANCES.items():
        counts, used = [], []
        for seed in (0, 1, 2):
            problem, before = make(seed), compilations.count
            options = {"atol": 0.0, "rtol": 1e-8, "max_iterations": 40}
            if isinstance(problem, sc.Batch):
                solution = sc.solve_batch(problem, **options)[0]
            else:
                solution = sc.solve(problem, **options)
            counts.append(compilations.since(before))
            used.append(sorted(set(solution.stats.trace.solver)))
        out.append({"instance": label, "compilations": counts, "used": used})
        print(f"  {label}: compilations {counts}", flush=True)
    return out


def run() -> None:
    """Scans in fresh processes, then recompilations."""
    scans = []
    for length in LENGTHS:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.core.compiling", str(length)],
            check=True,
            capture_output=True,
            text=True,
            cwd=records.ROOT,
        )
        scans.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"  scan of {length} steps: {scans[-1]}", flush=True)
    again = recompilations()
    for record in again:
        if any(record["compilations"][1:]):
            print(f"      SUSPICIOUS: {record['instance']} compiled again")
    records.save("compile", scans + again)


if __name__ == "__main__":
    print(json.dumps(first_solve(int(sys.argv[1]))))
