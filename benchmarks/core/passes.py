"""Passes to a certified relative gap, for every solver on every case of the zoo."""

import concurrent.futures
import multiprocessing
import tempfile
from pathlib import Path

import jax
import numpy as np

import stagecert as sc
from benchmarks.core import records
from benchmarks.core.instances import zoo

LEVELS = (1e-2, 1e-3, 1e-5)
SOLVERS = ("auto", "greedy", "polish", "accelerated", "simple", "safe", "slope_ascent")
MAX_ITERATIONS = 2000
TIME_LIMIT = 300.0
TINY = 1e-12
TRUTH = 1e-7  # how far, relative to 1 + |optimum|, the optima of the zoo can be trusted


def first_at(distance: np.ndarray, scale, passes: np.ndarray) -> list[int | None]:
    """For each level, the passes made when distance <= level * scale first held."""
    out = []
    for level in LEVELS:
        reached = np.flatnonzero(distance <= level * np.maximum(scale, TINY))
        out.append(int(passes[reached[0]]) if len(reached) else None)
    return out


def measure(name: str, solver: str) -> dict:
    """Solves one case with one solver, twice: the first solve compiles, the second is recorded."""
    case = zoo()[name]
    problem, optimum = case.make(), float(case.value)
    options = {"max_iterations": MAX_ITERATIONS, "time_limit": TIME_LIMIT, "solver": solver}
    for _ in range(2):
        solution = sc.solve(problem, atol=0.0, rtol=LEVELS[-1], **options)
    trace, stats = solution.stats.trace, solution.stats
    value, bound, passes = (np.asarray(x) for x in (trace.value, trace.bound, trace.passes))
    if not len(passes):  # the starting point was good enough
        value, bound = np.array([solution.value]), np.array([solution.bound])
        passes = np.array([stats.passes])
    return {
        "case": name,
        "solver": solver,
        "pieces": bool(jax.tree.leaves(solution.certificate.slopes)),
        "to_gap": first_at(value - bound, np.abs(bound), passes),
        "bound_to_optimum": first_at(optimum - bound, abs(optimum), passes),
        "optimum": optimum,
        "value": records.number(solution.value),
        "bound": records.number(solution.bound),
        "status": solution.status.name,
        "iterations": stats.iterations,
        "passes": stats.passes,
        "seconds": round(stats.seconds, 2),
        "used": sorted(set(trace.solver)),
        "monotone": bool(np.all(np.diff(value) <= 0) and np.all(np.diff(bound) >= 0)),
    }


def suspicions(record: dict) -> list[str]:
    """What no correct search may do."""
    if "error" in record:
        return [f"raised {record['error']}"]
    value, bound, optimum = record["value"], record["bound"], record["optimum"]
    slack = TRUTH * (1 + abs(optimum))
    found = []
    if value is None or bound is None:
        found.append(f"value {value}, bound {bound}")
    else:
        if value < optimum - slack:
            found.append(f"value {optimum - value:.2g} below the optimum")
        if bound > optimum + slack:
            found.append(f"bound {bound - optimum:.2g} above the optimum")
        if record["to_gap"][-1] is not None and record["status"] != "GAP_REACHED":
            found.append(f"the trace reached the gap, the status says {record['status']}")
    if record["status"] not in ("GAP_REACHED", "STALLED", "ITERATION_LIMIT", "TIME_LIMIT"):
        found.append(record["status"])
    if not record["monotone"]:
        found.append("the trace is not monotone")
    return found


def _prepare_worker():
    jax.config.update("jax_enable_x64", True)
    # Compiled code is kept between runs: pass counts do not depend on it, reruns are much quicker.
    cache = Path(tempfile.gettempdir()) / "stagecert-benchmark-cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _measured(name: str, solver: str) -> dict:
    try:
        record = measure(name, solver)
    except Exception as error:  # a solver that raises is a result too
        record = {"case": name, "solver": solver, "error": f"{type(error).__name__}: {error}"}
    return record | {"code": records.code_version(solver)}


def run(options) -> None:
    """Measures what is missing or was measured with other code; saves after every solve.

    `options` has cases, solvers, jobs, fresh and keep, as the command line has them.
    """
    wanted = [(c, s) for c in options.cases or zoo() for s in options.solvers or SOLVERS]
    held = records.load("passes")
    done = {(r["case"], r["solver"]): r for r in held["records"]} if held else {}

    def current(pair):
        if pair not in done or options.fresh:
            return False
        return options.keep or done[pair]["code"] == records.code_version(pair[1])

    todo = [pair for pair in wanted if not current(pair)]
    print(f"passes: {len(todo)} of {len(wanted)} solves to run")
    if not todo:
        return
    order = {pair: k for k, pair in enumerate((n, s) for n in zoo() for s in SOLVERS)}
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, multiprocessing.get_context("spawn"), _prepare_worker
    ) as pool:
        waiting = {pool.submit(_measured, *pair) for pair in todo}
        try:
            for k, future in enumerate(concurrent.futures.as_completed(waiting), start=1):
                record = future.result()
                pair = record["case"], record["solver"]
                done[pair] = record
                # Cases that left the zoo leave the results too.
                kept = sorted((p for p in done if p in order), key=order.__getitem__)
                records.save("passes", [done[p] for p in kept])
                shown = record.get("error") or f"{record['to_gap']}  {record['status']}"
                print(f"  [{k}/{len(todo)}] {pair[0]:14} {pair[1]:12} {shown}", flush=True)
                for suspicion in suspicions(record):
                    print(f"      SUSPICIOUS: {suspicion}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
