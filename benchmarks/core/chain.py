"""The chain (eq. 3): long for a search whose news travels one constraint an iteration."""

import numpy as np

import stagecert as sc
from benchmarks.core import records
from benchmarks.core.instances import chain

LONG = 100_000
SHORT = 200
STARTS = (0.0, 0.5, 1.0)
GAP = 1e-9


def pdhg_iterates(n: int, step: float = 0.49):
    """Primal-dual hybrid gradients on the chain from zero; yields x after each iteration.

    min over x_1 in [0, 1], x_i >= -1 and max over y >= 0 of -x_n + sum_i y_i (x_(i+1) - x_i). The
    norm of the differences is below 2, so any steps below 1/2 are allowed.
    """
    x, y = np.zeros(n), np.zeros(n - 1)
    lowest, highest = np.full(n, -1.0), np.full(n, np.inf)
    lowest[0], highest[0] = 0.0, 1.0
    while True:
        slope = np.zeros(n)
        slope[-1] = -1.0
        slope[1:] += y
        slope[:-1] -= y
        new = np.clip(x - step * slope, lowest, highest)
        y = np.maximum(y + step * np.diff(2 * new - x), 0)
        x = new
        yield x


def pdhg_first_move(n: int) -> int:
    """The first iteration (from 1) after which x_1 > 0."""
    for k, x in enumerate(pdhg_iterates(n), start=1):
        if x[0] > 0:
            return k
    raise AssertionError("unreachable")


def pdhg_near(n: int, distance: float, limit: int) -> int | None:
    """The first iteration after which all entries are within `distance` of one, the optimum."""
    for k, x in enumerate(pdhg_iterates(n), start=1):
        if np.abs(x - 1).max() <= distance:
            return k
        if k == limit:
            return None
    raise AssertionError("unreachable")


def run() -> None:
    """The default from three starts on the long chain; PDHG on the short one."""
    problem = chain(LONG)
    out = []
    for theta in STARTS:
        start = sc.Point(fractions=theta)
        for _ in range(2):  # the first compiles
            solution = sc.solve(problem, atol=GAP, rtol=0.0, start=start)
        record = {
            "method": "auto",
            "n": LONG,
            "theta": theta,
            "iterations": solution.stats.iterations,
            "passes": solution.stats.passes,
            "value": records.number(solution.value),
            "bound": records.number(solution.bound),
            "gap": records.number(solution.gap),
            "status": solution.status.name,
            "seconds": round(solution.stats.seconds, 3),
            "ok": solution.gap <= GAP and solution.stats.iterations <= 3,
        }
        out.append(record)
        print(f"  auto, n = {LONG}, theta = {theta}: {solution}", flush=True)
        if not record["ok"]:
            print("      SUSPICIOUS: more than 3 iterations, or the gap is too large")
    move, near = pdhg_first_move(SHORT), pdhg_near(SHORT, 0.01, 1_000_000)
    out.append(
        {"method": "PDHG", "n": SHORT, "first_move": move, "near": near, "ok": move >= SHORT - 1}
    )
    print(f"  PDHG, n = {SHORT}: x_1 first moves in iteration {move}; all within 1 % after {near}")
    records.save("chain", out)
