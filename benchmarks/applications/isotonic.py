"""Isotonic regression beside minimum-cut partitioning (PyMaxflow), Clarabel and scikit-learn.

Peers and ours take the same arrays: targets and a list of comparisons. Each is run several times,
in turn, and the least time counts, in seconds of CPU (the machine may have other work). What one
process pays once (imports, compiling the loops) is measured apart.
"""

import subprocess
import sys
import time

import numpy as np

from benchmarks.applications import records
from stagecert.applications import isotonic
from stagecert.applications.isotonic import fitting, flows, loops, vectorised

PACKAGES = ("numpy", "scipy", "numba", "scikit-learn", "PyMaxflow", "clarabel", "jax")
SIZES = (1_000, 10_000, 100_000)
REPEATS = 5
# Ascent steps in one measurement of the loops.
STEPS = 20


# -- instances ------------------------------------------------------------------------------------


def grid(count: int, seed: int = 0, noise: float = 0.5):
    """A noisy plane over a square grid; comparisons along rows and columns."""
    side = round(count**0.5)
    rows, columns = np.divmod(np.arange(side * side), side)
    rng = np.random.default_rng(seed)
    y = (rows + columns) / (side - 1) + rng.normal(0, noise, side * side)
    cell = np.arange(side * side)
    down, right = cell[rows < side - 1], cell[columns < side - 1]
    lower = np.concatenate([down, right])
    return y, np.stack([lower, np.concatenate([down + side, right + 1])], axis=1)


def dag(count: int, seed: int = 0, noise: float = 0.5, degree: int = 3):
    """Each node is above three nodes drawn from all earlier ones; the trend is its height."""
    rng = np.random.default_rng(seed)
    upper = np.repeat(np.arange(1, count), degree)
    pairs = np.stack([(rng.random(len(upper)) * upper).astype(int), upper], axis=1)
    pairs = np.unique(pairs, axis=0)
    pairs = pairs[np.argsort(pairs[:, 1], kind="stable")]
    height = [0] * count
    for below, above in pairs.tolist():
        height[above] = max(height[above], height[below] + 1)
    return 2 * np.array(height) / max(height) + rng.normal(0, noise, count), pairs


KINDS = {"grid": grid, "dag": dag}


# -- peers ----------------------------------------------------------------------------------------


def maxflow_partitioning(y, pairs):
    """Least squares by splitting blocks at minimum cuts, all blocks in one flow, by PyMaxflow."""
    import maxflow

    count = len(y)
    block = np.zeros(count, int)
    blocks = 1
    active = np.ones(count, bool)
    lower, upper = pairs.T
    while True:
        size = np.bincount(block, minlength=blocks)
        fit = (np.bincount(block, weights=y, minlength=blocks) / size)[block]
        nodes = np.flatnonzero(active)
        if not len(nodes):
            return fit
        place = np.full(count, -1)
        place[nodes] = np.arange(len(nodes))
        inside = np.flatnonzero((block[lower] == block[upper]) & active[lower])
        pull = (y - fit)[nodes]
        graph = maxflow.GraphFloat(len(nodes), len(inside))
        graph.add_nodes(len(nodes))
        graph.add_grid_tedges(np.arange(len(nodes)), np.maximum(pull, 0), np.maximum(-pull, 0))
        unlimited = np.full(len(inside), 1e18)
        graph.add_edges(
            place[lower[inside]], place[upper[inside]], unlimited, np.zeros(len(inside))
        )
        graph.maxflow()
        raised = ~graph.get_grid_segments(np.arange(len(nodes)))
        mine = block[nodes]
        gain = np.bincount(mine, weights=np.where(raised, pull, 0), minlength=blocks)
        part = np.bincount(mine, weights=raised, minlength=blocks)
        split = (part > 0) & (part < size) & (gain > 1e-9)
        number = np.full(blocks, -1)
        number[split] = blocks + np.arange(int(split.sum()))
        moves = split[mine] & raised
        block[nodes[moves]] = number[mine[moves]]
        goes_on = np.concatenate([split, np.ones(int(split.sum()), bool)])
        active = goes_on[block]
        blocks += int(split.sum())


def by_clarabel(y, pairs):
    """Least squares by an interior-point method."""
    import clarabel
    import scipy.sparse as sp

    count, rows = len(y), np.arange(len(pairs))
    ones = np.ones(len(pairs))
    differences = sp.csc_array(
        (np.concatenate([ones, -ones]), (np.concatenate([rows, rows]), pairs.T.ravel())),
        shape=(len(pairs), count),
    )
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    solver = clarabel.DefaultSolver(
        sp.csc_array(2 * sp.identity(count)), -2 * y, differences, np.zeros(len(pairs)),
        [clarabel.NonnegativeConeT(len(pairs))], settings,
    )  # fmt: skip
    return np.array(solver.solve().x)


# -- ours -----------------------------------------------------------------------------------------


def ours(y, pairs, **options):
    """The fit in the order of y, from the list of comparisons on."""
    order, number = isotonic.from_comparisons(pairs, len(y))
    found = isotonic.fit(y, order, node=number, **options)
    return found.fitted[number], found


def with_scipy_flows(y, pairs, **options):
    """As if PyMaxflow were not installed."""
    held = flows.has_pymaxflow, fitting.has_pymaxflow
    flows.has_pymaxflow = fitting.has_pymaxflow = lambda: False
    try:
        return ours(y, pairs, **options)
    finally:
        flows.has_pymaxflow, fitting.has_pymaxflow = held


METHODS = {
    "PyMaxflow partitioning": lambda y, p: (maxflow_partitioning(y, p), None),
    "Clarabel": lambda y, p: (by_clarabel(y, p), None),
    "dual, 1e-4": lambda y, p: ours(y, p, engine="dual", rtol=1e-4),
    "dual, 1e-6": lambda y, p: ours(y, p, engine="dual", rtol=1e-6),
    "cuts, PyMaxflow": lambda y, p: ours(y, p, engine="cuts"),
    "cuts, SciPy": lambda y, p: with_scipy_flows(y, p, engine="cuts"),
}


def run_peers() -> list[dict]:
    """Least squares on grids and random orders."""
    for method in METHODS.values():
        method(*grid(100))  # compiles and imports
    found = []
    for size in SIZES:
        for kind, make in KINDS.items():
            for seed in (0, 1):
                y, pairs = make(size, seed)
                skipped = {"Clarabel"} if size > 10_000 else set()
                chosen = {k: m for k, m in METHODS.items() if k not in skipped}
                found += _compared(chosen, y, pairs, dict(kind=kind, size=size, seed=seed))
    return found


def _compared(methods, y, pairs, about) -> list[dict]:
    cpu = {name: [] for name in methods}
    wall = {name: [] for name in methods}
    answers = {}
    for _ in range(REPEATS):
        for name, method in methods.items():
            if len(cpu[name]) >= 2 and sum(cpu[name]) > 5:
                continue
            begin, clock = time.process_time(), time.perf_counter()
            answers[name] = method(y, pairs)
            cpu[name].append(time.process_time() - begin)
            wall[name].append(time.perf_counter() - clock)
    best = float(np.sum((answers["PyMaxflow partitioning"][0] - y) ** 2))
    rows = []
    for name, (fit, certificate) in answers.items():
        value = float(np.sum((fit - y) ** 2))
        row = about | {
            "method": name, "cpu": min(cpu[name]), "cpu_all": cpu[name], "wall": min(wall[name]),
            "value": value, "above_partitioning": (value - best) / best,
            "violation": float(np.max(fit[pairs[:, 0]] - fit[pairs[:, 1]], initial=0.0)),
        }  # fmt: skip
        if certificate is not None:
            row |= {
                "relative_gap": certificate.gap / certificate.bound,
                "iterations": certificate.iterations,
                "engine": certificate.engine,
            }
        rows.append(row)
        print(f"  {about} {name}: {row['cpu']:.3f} s", flush=True)
    return rows


def run_losses() -> list[dict]:
    """Every loss on 100,000 points, by the engine that is picked for it."""
    found = []
    for kind, make in KINDS.items():
        trend, pairs = make(100_000)
        rng = np.random.default_rng(1)
        for loss in isotonic.LOSSES:
            y = trend
            if loss == "logistic":
                y = (rng.random(len(trend)) < np.clip(trend / 2, 0, 1)).astype(float)
            if loss == "poisson":
                y = rng.poisson(np.clip(2 * trend, 0, None)).astype(float)
            begin = time.process_time()
            _, result = with_scipy_flows(y, pairs, loss=loss, quantile=0.9, delta=0.3)
            found.append(
                dict(
                    kind=kind, loss=loss, engine=result.engine, cpu=time.process_time() - begin,
                    relative_gap=result.gap / result.bound, status=result.status.name,
                    iterations=result.iterations,
                )
            )  # fmt: skip
            print(f"  {found[-1]}", flush=True)
    return found


def run_chain() -> list[dict]:
    """A total order of 100,000 points beside scikit-learn."""
    from sklearn.isotonic import IsotonicRegression

    rng = np.random.default_rng(0)
    x = np.arange(100_000.0)
    y = x / len(x) + rng.normal(0, 0.5, len(x))
    order = isotonic.chain(len(x))
    runs = {
        "scikit-learn": lambda: IsotonicRegression().fit_transform(x, y),
        "pava": lambda: isotonic.fit(y, order).fitted,
    }
    fits = {name: run() for name, run in runs.items()}
    seconds = {name: min(_timed(run) for _ in range(REPEATS)) for name, run in runs.items()}
    apart = float(np.max(np.abs(fits["pava"] - fits["scikit-learn"])))
    return [dict(method=name, cpu=s, largest_difference=apart) for name, s in seconds.items()]


def run_orders() -> list[dict]:
    """Cover relations of random points."""
    rng = np.random.default_rng(0)
    found = []
    for dimensions in (2, 3):
        isotonic.coordinatewise(rng.random((100, dimensions)))  # compiles
    for count in (1_000, 10_000, 100_000):
        for dimensions in (2, 3, 4):
            if count * dimensions > 300_000:
                continue
            points = rng.random((count, dimensions))
            begin = time.process_time()
            order, _ = isotonic.coordinatewise(points)
            found.append(
                dict(
                    count=count, dimensions=dimensions, comparisons=len(order.lower),
                    cpu=time.process_time() - begin,
                )
            )  # fmt: skip
            print(f"  {found[-1]}", flush=True)
    return found


def run_loops() -> list[dict]:
    """One ascent step and one running maximum: Numba's loops, NumPy and SciPy, and JAX."""
    found = []
    for kind, make in KINDS.items():
        y, pairs = make(100_000)
        order, number = isotonic.from_comparisons(pairs, len(y))
        values = np.empty(len(y))
        values[number] = y
        step = np.full(len(order.lower), 0.1)
        ones = np.ones(len(y))
        for name, module in (("Numba", loops), ("NumPy and SciPy", vectorised)):

            def ascend(module=module, values=values, order=order, step=step, ones=ones):
                start = np.zeros(len(step))
                module.ascend(
                    values, ones, order.lower, order.upper, step, start, start.copy(), 1.0, STEPS
                )

            def sweep(module=module, values=values, order=order):
                module.running_maximum(values, order.lower, order.start)

            ascend(), sweep()
            found += [
                dict(kind=kind, what="ascent step", how=name, cpu=_least(ascend) / STEPS),
                dict(kind=kind, what="running maximum", how=name, cpu=_least(sweep)),
            ]
        step_by_jax = _jax_ascent(values, order, step)
        found.append(
            dict(kind=kind, what="ascent step", how="JAX", cpu=_least(step_by_jax) / STEPS)
        )
    program = "import time; t = time.process_time()\n{}\nprint(time.process_time() - t)"
    fit = (
        "import numpy as np; from stagecert.applications import isotonic; "
        "X = np.random.default_rng(0).random((3000, 2)); o, n = isotonic.coordinatewise(X); "
        "isotonic.fit(X.sum(1), o, node=n, engine='dual')"
    )
    for what, code in (("import of Numba", "import numba"), ("first fit of a process", fit)):
        out = subprocess.run(
            [sys.executable, "-c", program.format(code)], check=True, capture_output=True, text=True
        )
        found.append(dict(kind="-", what=what, how="Numba", cpu=float(out.stdout)))
    for record in found:
        print(f"  {record}", flush=True)
    return found


def _jax_ascent(values, order, step):
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True):
        y, size = jnp.asarray(values), jnp.asarray(step)
        lower, upper = jnp.asarray(order.lower), jnp.asarray(order.upper)

        @jax.jit
        def run(multipliers):
            def one(_, state):
                old, ahead, momentum = state
                fit = y - jnp.zeros_like(y).at[lower].add(ahead).at[upper].add(-ahead)
                new = jnp.maximum(ahead + size * (fit[lower] - fit[upper]), 0)
                following = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
                return new, new + (momentum - 1) / following * (new - old), following

            return jax.lax.fori_loop(0, STEPS, one, (multipliers, multipliers, 1.0))[0]

        start = jnp.zeros(len(step))
        run(start).block_until_ready()

    def again():
        with jax.enable_x64(True):
            run(start).block_until_ready()

    return again


def _timed(run) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def _least(run) -> float:
    return min(_timed(run) for _ in range(REPEATS))


PARTS = {
    "peers": run_peers,
    "losses": run_losses,
    "chain": run_chain,
    "orders": run_orders,
    "loops": run_loops,
}


# -- tables ---------------------------------------------------------------------------------------


def _of(part: str) -> list[dict]:
    held = records.load("isotonic", part)
    return held["records"] if held else []


def _peers_table() -> str:
    rows = _of("peers")
    instances = list(dict.fromkeys((r["kind"], r["size"], r["seed"]) for r in rows))
    names = [name for name in METHODS if any(r["method"] == name for r in rows)]
    lines = []
    for kind, size, seed in instances:
        here = {
            r["method"]: r for r in rows if (r["kind"], r["size"], r["seed"]) == (kind, size, seed)
        }
        peer = here["PyMaxflow partitioning"]["cpu"]
        cells = [f"{here[n]['cpu']:.3f}" if n in here else "-" for n in names]
        ratios = [f"{here[n]['cpu'] / peer:.2f}" for n in ("dual, 1e-4", "dual, 1e-6")]
        lines.append([f"{kind}, {size:,}, seed {seed}", *cells, *ratios])
    return records.table(["instance", *names, "ratio 1e-4", "ratio 1e-6"], lines)


def _losses_table() -> str:
    return records.table(
        ["order, loss", "engine", "seconds", "relative gap"],
        [
            [
                f"{r['kind']}, {r['loss']}",
                r["engine"],
                f"{r['cpu']:.2f}",
                f"{r['relative_gap']:.1e}",
            ]
            for r in _of("losses")
        ],
    )


def _chain_table() -> str:
    return records.table(
        ["method", "seconds", "largest difference"],
        [[r["method"], f"{r['cpu']:.4f}", f"{r['largest_difference']:.1e}"] for r in _of("chain")],
    )


def _orders_table() -> str:
    return records.table(
        ["points", "dimensions", "comparisons", "seconds"],
        [
            [f"{r['count']:,}", r["dimensions"], f"{r['comparisons']:,}", f"{r['cpu']:.2f}"]
            for r in _of("orders")
        ],
    )


def _loops_table() -> str:
    return records.table(
        ["what", "order", "how", "milliseconds"],
        [[r["what"], r["kind"], r["how"], f"{1e3 * r['cpu']:.2f}"] for r in _of("loops")],
    )


TABLES = {
    "peers": ("Least squares beside peers", _peers_table),
    "losses": ("Every loss at 100,000 points, certified 1e-6, by SciPy's flows", _losses_table),
    "chain": ("A total order of 100,000 points", _chain_table),
    "orders": ("Cover relations of random points", _orders_table),
    "loops": ("Loops at 100,000 points", _loops_table),
}


def tables() -> str:
    """All tables of the application."""
    return records.render(
        "isotonic", "Isotonic regression", "Seconds of CPU, least of several runs.", TABLES
    )
