"""Optimal control beside PIQP's multistage solver and CVXPY with Clarabel.

Ours and the peers take the same arrays, on one thread. Each is run several times, in turn, and the
least time counts, in seconds of CPU (the machine may have other work). Ours stops at a certified
relative gap of 1e-4; peers at their own tolerances, which prove nothing. What one process pays once
(compiling the wedge) is measured apart.
"""

# ruff: noqa: E402
import os

# Before NumPy and JAX are imported: seconds of CPU are those of one thread.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from benchmarks.applications import records
from stagecert.applications import control

PACKAGES = ("numpy", "scipy", "jax", "piqp", "clarabel", "cvxpy")
REPEATS = 5
RTOL = 1e-4
SHAPES = {"700": (10, 4, 50), "10,000": (40, 10, 200), "70,000": (100, 40, 500)}
CURVE = 0.01


# -- instances ------------------------------------------------------------------------------------


def plant(states: int, inputs: int, horizon: int, seed: int = 0) -> dict:
    """A contractive plant (row sums of |A| are 0.9) that follows sines, inputs in [-1, 1].

    Also the data of a wedge: a multiple of (D x)^2 below and its chord above, over intervals that
    the states cannot leave.
    """
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(states, states))
    A *= rng.random((states, states)) < max(0.15, 3 / states)
    np.fill_diagonal(A, 1 + 3 * np.sqrt(0.15 * states))
    A *= 0.9 / np.abs(A).sum(axis=1, keepdims=True)
    B = rng.normal(size=(states, inputs))
    B *= 0.15 / np.abs(B).sum(axis=1, keepdims=True)
    times = np.arange(1, horizon + 1)[:, None]
    phase = 2 * np.pi * times / horizon * rng.integers(1, 4, states)
    reference = 0.8 * np.sin(phase + rng.uniform(0, 2 * np.pi, states))
    initial = 0.3 * rng.normal(size=states)
    D = np.zeros((states, states))
    for row in D:
        row[rng.choice(states, 2, replace=False)] = 0.5 * rng.choice([-1, 1], 2)
    middle, extent, slope, height = initial, np.zeros(states), [], []
    for _ in range(horizon):
        v, r = D @ middle, np.abs(D) @ extent
        slope.append(2 * CURVE * v)
        height.append(-CURVE * (v - r) * (v + r))
        rise = CURVE * np.maximum((v - r) ** 2, (v + r) ** 2)
        middle, extent = A @ middle + 0.5 * rise, np.abs(A) @ extent + 0.15 + 0.5 * rise
    return dict(
        A=A, B=B, Q=rng.uniform(0.1, 1.0, states), R=np.full(inputs, 0.01), initial=initial,
        reference=reference, D=D, slope=np.array(slope), height=np.array(height), horizon=horizon,
    )  # fmt: skip


def masses(count: int = 20, horizon: int = 500, seed: int = 0, dt: float = 0.1) -> dict:
    """Double integrators: positions and velocities of masses, forces in [-1, 1]."""
    rng = np.random.default_rng(seed)
    one, zero = np.eye(count), np.zeros((count, count))
    return dict(
        A=np.block([[one, dt * one], [zero, one]]), B=np.vstack([zero, dt * one]),
        Q=np.repeat([1.0, 0.1], count), R=np.full(count, 0.1),
        initial=np.concatenate([5 * rng.normal(size=count), rng.normal(size=count)]),
        reference=np.zeros((horizon, 2 * count)), horizon=horizon,
    )  # fmt: skip


# -- ours and the peers ---------------------------------------------------------------------------


def ours_box(data: dict, rtol: float = RTOL, limit: float | None = None):
    limits = {} if limit is None else {"state_lower": -limit, "state_upper": limit}
    problem = control.LinearQuadratic(
        data["A"], data["B"], data["Q"], data["R"], data["initial"],
        reference=data["reference"], lower=-1.0, upper=1.0, **limits,
    )  # fmt: skip
    return control.solve(problem, atol=0.0, rtol=rtol)


def sparse_problem(data: dict, limit: float = np.inf):
    """(P, c, A, b, l, u, constant) of the box problem, variables u_0, x_1, u_1, x_2, ..."""
    n, m = data["B"].shape
    T, width = data["horizon"], n + m
    each = sp.identity(T, format="csc")
    before = sp.diags([np.ones(T - 1)], [-1], shape=(T, T), format="csc")
    here = sp.csc_matrix(np.hstack([-data["B"], np.eye(n)]))
    last = sp.csc_matrix(np.hstack([np.zeros((n, m)), -data["A"]]))
    A = (sp.kron(each, here) + sp.kron(before, last)).tocsc()
    b = np.zeros(T * n)
    b[:n] = data["A"] @ data["initial"]
    P = sp.diags(np.tile(np.concatenate([data["R"], data["Q"]]), T), format="csc")
    slope, low = np.zeros((T, width)), np.full((T, width), -limit)
    slope[:, m:] = -data["Q"] * data["reference"]
    low[:, :m] = -1.0
    constant = 0.5 * float(np.sum(data["Q"] * data["reference"] ** 2))
    return P, slope.ravel(), A, b, low.ravel(), -low.ravel(), constant


def by_piqp(problem) -> float:
    import piqp

    P, c, A, b, low, high, constant = problem
    solver = piqp.SparseSolver()
    solver.settings.kkt_solver = piqp.KKTSolver.sparse_multistage
    solver.setup(P, c, A, b, sp.csc_matrix((0, len(c))), None, None, low, high)
    status = solver.solve()
    if status != piqp.PIQP_SOLVED:
        raise RuntimeError(f"PIQP: {status}")
    x = np.asarray(solver.result.x)
    return float(0.5 * x @ (P @ x) + c @ x + constant)


def clarabel_point(problem) -> np.ndarray:
    """Where Clarabel says that the optimum is: inputs and states, side by side."""
    import clarabel

    P, c, A, b, low, high, _ = problem
    bounded = np.flatnonzero(np.isfinite(low))
    pick = sp.identity(len(c), format="csc")[bounded]
    rows = sp.vstack([A, pick, -pick], format="csc")
    right = np.concatenate([b, high[bounded], -low[bounded]])
    cones = [clarabel.ZeroConeT(len(b)), clarabel.NonnegativeConeT(2 * len(bounded))]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    solution = clarabel.DefaultSolver(sp.triu(P, format="csc"), c, rows, right, cones, settings)
    return np.asarray(solution.solve().x)


def by_clarabel(problem) -> float:
    P, c, _, _, _, _, constant = problem
    x = clarabel_point(problem)
    return float(0.5 * x @ (P @ x) + c @ x + constant)


def wedge_lower(fixed, now, x, u):
    return fixed["A"] @ x + fixed["B"] @ u + CURVE * (fixed["D"] @ x) ** 2


def wedge_upper(fixed, now, x, u):
    return fixed["A"] @ x + fixed["B"] @ u + now["slope"] * (fixed["D"] @ x) + now["height"]


def wedge_cost(fixed, now, x, u):
    follow = 0.5 * jnp.sum(fixed["Q"] * (x - now["reference"]) ** 2)
    return follow + 0.5 * jnp.sum(fixed["R"] * u**2)


def ours_wedge(data: dict, rtol: float = RTOL):
    problem = control.ConvexControl(
        wedge_cost, wedge_lower, wedge_upper, data["initial"], data["horizon"],
        constants={name: data[name] for name in ("A", "B", "D", "Q", "R")},
        params={name: data[name] for name in ("slope", "height", "reference")},
        low=-np.ones(data["B"].shape[1]), high=1.0,
        state_curvature=data["Q"], input_curvature=data["R"],
    )  # fmt: skip
    return control.solve(problem, atol=0.0, rtol=rtol)


def wedge_by_cvxpy(data: dict) -> float:
    import cvxpy as cp

    n, m = data["B"].shape
    x, u = cp.Variable((data["horizon"] + 1, n)), cp.Variable((data["horizon"], m))
    linear, v = x[:-1] @ data["A"].T + u @ data["B"].T, x[:-1] @ data["D"].T
    follow = cp.sum(cp.multiply(data["Q"][None], cp.square(x[1:] - data["reference"])))
    effort = cp.sum(cp.multiply(data["R"][None], cp.square(u)))
    rules = [
        x[0] == data["initial"],
        u <= 1,
        u >= -1,
        x[1:] >= linear + CURVE * cp.square(v),
        x[1:] <= linear + cp.multiply(data["slope"], v) + data["height"],
    ]
    problem = cp.Problem(cp.Minimize(0.5 * follow + 0.5 * effort), rules)
    return float(problem.solve(solver=cp.CLARABEL))


# -- measurements ---------------------------------------------------------------------------------


def _compared(methods: dict, about: dict) -> list[dict]:
    """Every method in turn, several times; one record for each."""
    cpu = {name: [] for name in methods}
    answers = {}
    for _ in range(REPEATS):
        for name, method in methods.items():
            if len(cpu[name]) >= 2 and sum(cpu[name]) > 10:
                continue
            begin = time.process_time()
            answers[name] = method()
            cpu[name].append(time.process_time() - begin)
    rows = []
    for name, answer in answers.items():
        row = about | {"method": name, "cpu": min(cpu[name]), "cpu_all": cpu[name]}
        if isinstance(answer, float):
            row |= {"value": answer}
        else:
            row |= {
                "value": answer.value, "bound": answer.bound, "engine": answer.engine,
                "relative_gap": answer.gap / answer.bound, "iterations": answer.iterations,
                "status": answer.status.name,
            }  # fmt: skip
        rows.append(row)
        print(f"  {about} {name}: {row['cpu']:.3f} s, {row['value']:.6f}", flush=True)
    return rows


def run_box() -> list[dict]:
    """Boxes: contractive plants, and double integrators."""
    found = []
    cases = {(f"contractive, {size}", s): plant(*SHAPES[size], seed=s)
             for size in SHAPES for s in (0, 1)}  # fmt: skip
    cases |= {("20 double integrators, 30,000", s): masses(seed=s) for s in (0, 1)}
    for (name, seed), data in cases.items():
        problem = sparse_problem(data)
        methods = {
            "stagecert": lambda data=data: ours_box(data),
            "stagecert, 1e-6": lambda data=data: ours_box(data, 1e-6),
            "PIQP multistage": lambda problem=problem: by_piqp(problem),
        }
        if len(problem[1]) <= 30_000:
            methods["Clarabel"] = lambda problem=problem: by_clarabel(problem)
        found += _compared(methods, dict(instance=name, seed=seed))
    return found


def run_limited() -> list[dict]:
    """Boxes of inputs and limits on all states, which one or two states in a hundred would pass."""
    found = []
    for size, limit in (("10,000", 0.4), ("70,000", 0.17)):
        for seed in (0, 1):
            data = plant(*SHAPES[size], seed=seed)
            data["initial"] = np.clip(data["initial"], -0.5 * limit, 0.5 * limit)
            problem = sparse_problem(data, limit)
            methods = {
                "stagecert": lambda data=data, limit=limit: ours_box(data, RTOL, limit),
                "PIQP multistage": lambda problem=problem: by_piqp(problem),
            }
            if size != "70,000":  # where Clarabel takes minutes
                methods["Clarabel"] = lambda problem=problem: by_clarabel(problem)
            about = dict(instance=f"limited states, {size}", seed=seed)
            found += _compared(methods, about)
    return found


def run_wedge() -> list[dict]:
    """Wedges; the solvers of each shape are compiled before."""
    found = []
    for size, shape in SHAPES.items():
        begin = time.process_time()
        ours_wedge(plant(*shape, seed=9), 1e-6)
        first = time.process_time() - begin
        for seed in (0, 1):
            data = plant(*shape, seed=seed)
            methods = {
                "stagecert": lambda data=data: ours_wedge(data),
                "stagecert, 1e-6": lambda data=data: ours_wedge(data, 1e-6),
            }
            if size != "70,000":
                methods["CVXPY and Clarabel"] = lambda data=data: wedge_by_cvxpy(data)
            about = dict(instance=f"wedge, {size}", seed=seed, first_solve=first)
            found += _compared(methods, about)
    return found


def run_receding() -> list[dict]:
    """A receding horizon, every solve from scratch or from the last solution."""
    data = masses(count=5, horizon=100)
    found = []
    for start in ("cold", "warm"):
        rng = np.random.default_rng(0)
        state, last = data["initial"], None
        for step in range(50):
            problem = control.LinearQuadratic(
                data["A"], data["B"], data["Q"], data["R"], state, 100, lower=-1.0, upper=1.0
            )
            warm = None if start == "cold" or last is None else last.shifted()
            begin = time.process_time()
            last = control.solve(problem, atol=0.0, rtol=1e-6, start=warm)
            found.append(
                dict(
                    start=start, step=step, cpu=time.process_time() - begin,
                    iterations=last.iterations, engine=last.engine, status=last.status.name,
                )
            )  # fmt: skip
            state = last.states[1] + 0.01 * rng.normal(size=len(state))
    return found


_FIRST_SOLVE = """
import sys, time
from benchmarks.applications.control import ours_wedge, plant

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

ours_wedge(plant(50, 10, 10))  # what does not depend on the horizon
data = plant(50, 10, int(sys.argv[1]))
before = peak()
begin, clock = time.process_time(), time.perf_counter()
found = ours_wedge(data)
cpu, wall = time.process_time() - begin, time.perf_counter() - clock
begin = time.process_time()
ours_wedge(data)
again = time.process_time() - begin
print(cpu, wall, again, peak() - before, found.status.name)
"""


def run_scan() -> list[dict]:
    """The first solve of a shape with 50 states, compiling included, and the memory it adds."""
    found = []
    for horizon in (250, 1_000, 4_000, 16_000):
        out = subprocess.run(
            [sys.executable, "-c", _FIRST_SOLVE, str(horizon)],
            check=True, capture_output=True, text=True, cwd=records.ROOT,
        ).stdout.split()  # fmt: skip
        cpu, wall, again, peak = map(float, out[:4])
        found.append(
            dict(horizon=horizon, cpu=cpu, wall=wall, again=again, peak_kb=peak, status=out[4])
        )
        print(f"  {found[-1]}", flush=True)
    return found


PARTS = {
    "box": run_box, "limited": run_limited, "wedge": run_wedge, "receding": run_receding,
    "scan": run_scan,
}  # fmt: skip


# -- tables ---------------------------------------------------------------------------------------


def _of(part: str) -> list[dict]:
    held = records.load("control", part)
    return held["records"] if held else []


def _beside(part: str, peer: str) -> str:
    rows = _of(part)
    names = list(dict.fromkeys(r["method"] for r in rows))
    lines = []
    for instance, seed in dict.fromkeys((r["instance"], r["seed"]) for r in rows):
        here = {r["method"]: r for r in rows if (r["instance"], r["seed"]) == (instance, seed)}
        cells = [f"{here[n]['cpu']:.3f}" if n in here else "-" for n in names]
        ratio = f"{here['stagecert']['cpu'] / here[peer]['cpu']:.3f}" if peer in here else "-"
        engine, gap = here["stagecert"]["engine"], here["stagecert"]["relative_gap"]
        lines.append([f"{instance}, seed {seed}", engine, *cells, ratio, f"{gap:.1e}"])
    return records.table(["instance", "engine", *names, f"ratio to {peer}", "gap"], lines)


def _receding_table() -> str:
    lines = []
    for start in ("cold", "warm"):
        rows = [r for r in _of("receding") if r["start"] == start and r["step"] > 0]
        if rows:
            solved = sum(r["status"] == "GAP_REACHED" for r in rows)
            steps = np.mean([r["iterations"] for r in rows])
            cpu = 1e3 * np.median([r["cpu"] for r in rows])
            lines.append([start, f"{solved} of {len(rows)}", f"{steps:.1f}", f"{cpu:.1f}"])
    return records.table(["start", "certified 1e-6", "mean steps", "median ms"], lines)


def _scan_table() -> str:
    return records.table(
        ["horizon", "first solve, s", "again, s", "memory added, MB"],
        [
            [
                f"{r['horizon']:,}",
                f"{r['cpu']:.1f}",
                f"{r['again']:.2f}",
                f"{r['peak_kb'] / 1e3:.0f}",
            ]
            for r in _of("scan")
        ],
    )


TABLES = {
    "box": ("Linear-quadratic, inputs in a box", lambda: _beside("box", "PIQP multistage")),
    "limited": (
        "Linear-quadratic, inputs in a box, states within limits",
        lambda: _beside("limited", "PIQP multistage"),
    ),
    "wedge": ("Dynamics in a wedge", lambda: _beside("wedge", "CVXPY and Clarabel")),
    "receding": ("Receding horizon: 5 masses, 100 steps ahead", _receding_table),
    "scan": ("A wedge with 50 states: compiling and memory", _scan_table),
}


def tables() -> str:
    """All tables of the application."""
    return records.render(
        "control", "Optimal control", "Seconds of CPU on one thread, least of several runs.", TABLES
    )
