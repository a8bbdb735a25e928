"""A rough comparison with HiGHS and Clarabel on three instances, in one run."""

import time

import cvxpy as cp
import numpy as np
import scipy.sparse as sparse
from scipy.optimize import linprog

import stagecert as sc
from benchmarks.core import records
from benchmarks.core.instances import chain, relu_layers, relu_network, scan_band

RTOL = 1e-4
REPEATS = 3
NETWORK = (128, (128, 128, 128))
CHAIN = 10_000
SCAN = (200, 8, 3)


def _timed(call):
    """(least seconds of a few calls, what the last one returned)."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        out = call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), out


def _highs(c, A, b, bounds):
    # A x <= b
    seconds, done = _timed(lambda: linprog(c, A, b, bounds=bounds, method="highs"))
    return seconds, done.fun


def _network_peer():
    lowest, highest, layers, c = relu_layers(*NETWORK)
    width = sum(len(layer["b"]) for layer in layers)
    total = len(lowest) + width
    rows, right = [], []
    before, start = 0, len(lowest)
    for layer in layers:
        n_out, n_in = layer["W"].shape
        W = sparse.lil_matrix((n_out, total))
        W[:, before : before + n_in] = layer["W"]
        unit = sparse.lil_matrix((n_out, total))
        unit[:, start : start + n_out] = sparse.identity(n_out)
        slope = sparse.diags(layer["slope"])
        rows += [W - unit, unit - slope @ W]
        right += [-layer["b"], layer["slope"] * layer["b"] + layer["shift"]]
        before, start = start, start + n_out
    cost = np.zeros(total)
    cost[before:] = c
    bounds = [*zip(lowest, highest, strict=True), *[(0, None)] * width]
    return "HiGHS", *_highs(cost, sparse.vstack(rows).tocsr(), np.concatenate(right), bounds)


def _chain_peer():
    n = CHAIN
    cost = np.zeros(n)
    cost[-1] = -1
    A = sparse.diags([-np.ones(n - 1), np.ones(n - 1)], [0, 1], shape=(n - 1, n)).tocsr()
    return "HiGHS", *_highs(cost, A, np.zeros(n - 1), [(0, 1), *[(-1, None)] * (n - 1)])


def _scan_peer():
    problem = scan_band(*SCAN)
    stage, target = problem.stages[0], np.asarray(problem.objective.params)
    A, B, width = (np.asarray(x)[0] for x in stage.params)
    u, z = cp.Variable((SCAN[0], SCAN[2])), cp.Variable((SCAN[0], SCAN[1]))
    before = cp.vstack([np.asarray(stage.initial)[None], z[:-1]])
    middle = before @ A.T + u @ B.T
    cost = 0.5 * cp.sum_squares(z - target) + 0.05 * cp.sum_squares(u)
    room = [z >= middle - width[None], z <= middle + width[None], cp.abs(u) <= 1]
    stated = cp.Problem(cp.Minimize(cost), room)
    # Clarabel's own time, without CVXPY's: the least of a few solves.
    seconds = []
    for _ in range(REPEATS):
        stated.solve(solver=cp.CLARABEL)
        seconds.append(stated.solver_stats.solve_time)
    return "Clarabel", min(seconds), float(stated.value)


INSTANCES = {
    "relu network, 128 inputs, 3 x 128 units": (lambda: relu_network(*NETWORK), _network_peer),
    f"chain, n = {CHAIN}": (lambda: chain(CHAIN), _chain_peer),
    "scan, {} steps, {} states, {} controls".format(*SCAN): (
        lambda: scan_band(*SCAN),
        _scan_peer,
    ),
}


def run() -> None:
    """Times to a certified gap, compiled before, beside the peers at their own tolerances."""
    out = []
    for label, (make, peer) in INSTANCES.items():
        problem = make()
        begin = time.perf_counter()
        solution = sc.solve(problem, atol=0.0, rtol=RTOL)
        compiling = time.perf_counter() - begin
        seconds, solution = _timed(lambda p=problem: sc.solve(p, atol=0.0, rtol=RTOL))
        name, peer_seconds, peer_value = peer()
        record = {
            "instance": label,
            "seconds": round(seconds, 4),
            "first_seconds": round(compiling, 2),
            "passes": solution.stats.passes,
            "relative_gap": records.number(solution.relative_gap),
            "status": solution.status.name,
            "value": records.number(solution.value),
            "bound": records.number(solution.bound),
            "peer": name,
            "peer_seconds": round(peer_seconds, 4),
            "peer_value": records.number(peer_value),
        }
        out.append(record)
        print(f"  {label}: {seconds:.3f} s ({solution}); {name} {peer_seconds:.3f} s", flush=True)
    records.save("peers", out)
