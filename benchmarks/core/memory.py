"""Memory of the batched iterations against the size of the batch."""

import numpy as np

import stagecert as sc
from benchmarks.core import lowering, records
from benchmarks.core.instances import relu_network

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SIZES = (64, (128, 128))
SOLVERS = ("greedy", "polish")


def batch_of(size: int) -> sc.Batch:
    """One network; a box of inputs and an objective for each problem."""
    problem = relu_network(SIZES[0], SIZES[1])
    rng = np.random.default_rng(1)
    middle = rng.normal(size=(size, SIZES[0]))
    stacked = sc.Problem(
        sc.Box(middle - 0.05, middle + 0.05),
        problem.stages,
        sc.Objective(problem.objective.function, params=rng.normal(size=(size, SIZES[1][-1]))),
    )
    return sc.Batch.of(stacked, lambda p: (p.inputs, p.objective.params))


def fitted(sizes, amounts) -> tuple[float, float, float]:
    """(constant, slope, largest relative deviation) of the line nearest to the amounts."""
    sizes, amounts = np.asarray(sizes, float), np.asarray(amounts, float)
    # Weighted so that small batches count as much as large ones.
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / amounts[:, None]
    (constant, slope), *_ = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)
    deviation = np.abs((constant + slope * sizes) / amounts - 1).max()
    return float(constant), float(slope), float(deviation)


def run() -> None:
    """Bytes that the compiled iterations need, as XLA plans them."""
    out = []
    for name in SOLVERS:
        solver = lowering.solver_object(name)
        amounts = []
        for size in BATCHES:
            plan = lowering.compiled_advance(batch_of(size), solver).memory_analysis()
            parts = {
                "arguments": plan.argument_size_in_bytes,
                "outputs": plan.output_size_in_bytes,
                "temporaries": plan.temp_size_in_bytes,
            }
            amounts.append({"batch": size, **parts, "total": sum(parts.values())})
            print(f"  {name}, batch {size}: {amounts[-1]['total']:,} bytes", flush=True)
        constant, slope, deviation = fitted(BATCHES, [a["total"] for a in amounts])
        record = {"solver": name, "amounts": amounts, "constant": round(constant)}
        out.append(record | {"slope": round(slope), "deviation": round(deviation, 4)})
        print(
            f"  {name}: {slope:,.0f} bytes a problem, within {deviation:.1%} of a line", flush=True
        )
    records.save("memory", out)
