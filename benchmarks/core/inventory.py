"""Inventories, the hardest case of the zoo: many of them, other schedules, and a long horizon."""

import time

import cvxpy as cp
import jax.numpy as jnp
import numpy as np

import stagecert as sc
from benchmarks.core import records
from benchmarks.core.passes import LEVELS, first_at
from stagecert.solvers import Polish

SEEDS = range(16, 24)  # the zoo's is the first
STEPS, ITEMS = 12, 2
SCHEDULES = {
    "as it is": {},
    "`tau=1.0`": {"tau": 1.0},
    "`eager=20.0`": {"eager": 20.0},
    "`slow=0.8`": {"slow": 0.8},
    "`inner=10`": {"inner": 10},
    "`slow=0.8, inner=10`": {"slow": 0.8, "inner": 10},
}
HORIZON = 5_000
RTOL = 1e-3
TIME_LIMIT = 60.0
MAX_ITERATIONS = 2_000
SLOPES, INTERCEPTS = np.array([-3.0, -1.0, 0.3, 1.5]), np.array([-1.0, 0.0, 0.0, -1.8])
MOST = 1.4


def _step(demand, u, x):
    return x + u - demand


def _feed(s, z):
    return s


def _costs(p, s, z):
    stock = sc.piecewise_linear(z[0], SLOPES, INTERCEPTS)
    changes = sc.abs(s[1:] - s[:-1])
    costs = jnp.sum(p["weight"] * stock) + jnp.sum(p["smoothing"] * changes)
    return costs + jnp.sum(p["price"] * s) + 0.5 * p["bend"] * jnp.sum(s**2)


def _data(steps: int, items: int, seed: int, bend: float):
    rng = np.random.default_rng(seed)
    demand = rng.uniform(0.2, 1.5, size=(steps, items))
    return demand, {
        "price": rng.uniform(0.5, 2, size=(steps, items)),
        "weight": rng.uniform(0.5, 1.5, size=(steps, items)),
        "smoothing": rng.uniform(0.02, 0.1, size=(steps - 1, items)),
        "bend": np.array(bend),
    }


def inventory(steps: int, items: int, seed: int = 16, bend: float = 0.0) -> sc.Problem:
    """The zoo's `inventory` with other numbers; `bend` makes large orders cost more."""
    demand, p = _data(steps, items, seed, bend)
    start = np.array([0.5, 0.0])[:items]
    stage = sc.ScanStage(_step, _step, steps, start, feed=_feed, params=demand)
    box = sc.Box(np.zeros((steps, items)), np.full((steps, items), MOST))
    return sc.Problem(box, (stage,), sc.Objective(_costs, params=p))


def _clarabel(bend: float) -> tuple[float, float]:
    demand, p = _data(HORIZON, 1, 16, bend)
    u, z = cp.Variable((HORIZON, 1)), cp.Variable((HORIZON, 1))
    before = cp.vstack([np.array([[0.5]]), z[:-1]])
    pieces = [a * z + b for a, b in zip(SLOPES, INTERCEPTS, strict=True)]
    cost = cp.sum(cp.multiply(p["weight"], cp.maximum(*pieces)))
    cost += cp.sum(cp.multiply(p["smoothing"], cp.abs(u[1:] - u[:-1])))
    cost += cp.sum(cp.multiply(p["price"], u)) + 0.5 * bend * cp.sum_squares(u)
    stated = cp.Problem(cp.Minimize(cost), [z == before + u - demand, u >= 0, u <= MOST])
    stated.solve(solver=cp.CLARABEL)
    return stated.solver_stats.solve_time, float(stated.value)


def _schedule(label: str, problems, values) -> dict:
    solver = Polish(**SCHEDULES[label])
    found = sc.solve_batch(
        problems, atol=0.0, rtol=LEVELS[-1], solver=solver, max_iterations=400, check=False
    )
    to_gap = []
    for solution in found:
        trace = solution.stats.trace
        to_gap.append(first_at(trace.value - trace.bound, np.abs(trace.bound), trace.passes))
    above = np.sum(found.bound > values + 1e-6)
    return {"schedule": label, "to_gap": to_gap, "bounds_above_a_value": int(above)}


def _long(bend: float) -> dict:
    problem = inventory(HORIZON, 1, bend=bend)
    sc.solve(problem, atol=0.0, rtol=RTOL, time_limit=TIME_LIMIT)  # compiles
    begin, cpu = time.perf_counter(), time.process_time()
    solution = sc.solve(
        problem, atol=0.0, rtol=RTOL, time_limit=TIME_LIMIT, max_iterations=MAX_ITERATIONS
    )
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peer_seconds, peer_value = _clarabel(bend)
    return {
        "instance": f"{HORIZON:,} steps, costs of orders {'curved' if bend else 'linear'}",
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "passes": solution.stats.passes,
        "relative_gap": records.number(solution.relative_gap),
        "status": solution.status.name,
        "value": records.number(solution.value),
        "bound": records.number(solution.bound),
        "peer_seconds": round(peer_seconds, 3),
        "peer_value": peer_value,
    }


def run() -> None:
    """Schedules on eight small inventories."""
    out = []
    problems = [inventory(STEPS, ITEMS, seed) for seed in SEEDS]
    best = sc.solve_batch(problems, rtol=LEVELS[-1], solver=Polish(inner=10)).value
    for label in SCHEDULES:
        out.append(_schedule(label, problems, best))
        print(f"  {out[-1]}", flush=True)
    records.save("inventory", out)


def run_long() -> None:
    """A long horizon beside Clarabel."""
    out = []
    for bend in (1.0, 0.0):
        out.append(_long(bend))
        print(f"  {out[-1]}", flush=True)
    records.save("horizon", out)
