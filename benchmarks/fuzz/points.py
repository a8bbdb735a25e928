"""Bounds of random graphs against many points and corners of their boxes, without compiling.

    python -m benchmarks.fuzz points --count N --seed S

The checker reads each graph, and bounds random rows of its outputs on a random box. ONNX Runtime
computes the graph at points of the box and at its corners. A value that is below the bound by more
than rounding explains is computed once more in rationals and balls: it is a failure if it is
certainly below.
"""

import random
import time
from collections import Counter

import numpy as np
from flint import ctx

from benchmarks.fuzz.exact import PRECISION, Vague, evaluate, number, surely_greater
from benchmarks.fuzz.graphs import Graph, write
from benchmarks.fuzz.runtime import Runtime
from stagecert_check import checker, graph
from stagecert_check.bounds import Facts, lower_bounds
from stagecert_check.functions import Refused
from stagecert_check.numbers import Arithmetic

FOCUS = (
    "product", "quotient", "matrix product", "power", "Sin", "Cos", "Erf", "Floor", "Ceil", "Sign",
    "Log", "Sqrt", "Reciprocal", "Softmax", "LogSoftmax", "LayerNormalization",
    "InstanceNormalization", "ReduceL2", "Resize", "Einsum", "LSTM", "GRU", "RNN", "interpolation",
    "ScatterND", "branch",
)  # fmt: skip
POINTS, ROWS = 64, 8  # of each graph; half of the points are corners
NEAR = 1e-4  # what is nearer to the bound, relative to the largest value, is rounding


def run(count: int, seed: int, seconds: float | None = None) -> dict:
    """Checks so many graphs, or as many as fit into the seconds."""
    assert checker  # it registers the operators
    done, seen, failures, runtime = Counter(), Counter(), [], Runtime()
    end = None if seconds is None else time.monotonic() + seconds
    for k in range(count):
        if end is not None and time.monotonic() > end:
            break
        one = write(seed, k, FOCUS)
        draw = np.random.default_rng((seed, k))
        try:
            done["graphs"] += 1
            done.update(_checked(one, draw, runtime, failures, f"{seed} {k}"))
            seen.update(one.seen)
        except Refused:
            done["refused"] += 1
    runtime.close()
    return {
        "seed": seed, "done": dict(sorted(done.items())), "operators": dict(sorted(seen.items())),
        "failures": failures,
    }  # fmt: skip


def _checked(one: Graph, draw, runtime: Runtime, failures: list, name: str) -> Counter:
    program = graph.read(one.model.SerializeToString(), Arithmetic())
    if not one.tame or one.largest > 1e6:
        return Counter({"not tame": 1})
    size = one.points.shape[1]
    centre = one.points[draw.integers(len(one.points))]
    width = draw.choice([0.01, 0.1, 0.5, 1.0])
    low, high = (
        (centre + side * width * draw.random(size)).astype(one.dtype).astype(float)
        for side in (-1, 1)
    )
    with np.errstate(all="ignore"):
        facts = Facts(Arithmetic(), program, low[None], high[None]).derive()
    shapes = [program.nodes[k].shape for k in program.outputs]
    sizes = [int(np.prod(shape)) for shape in shapes]
    rows = one.rows(random.Random(name), ROWS)[:, : sum(sizes)]

    def start(some: slice):
        parts = np.split(rows[some], np.cumsum(sizes)[:-1], axis=1)
        found: dict[int, np.ndarray] = {}
        for k, part, shape in zip(program.outputs, parts, shapes, strict=True):
            part = part.reshape(-1, *shape)
            found[k] = found[k] + part if k in found else part
        return found

    with np.errstate(all="ignore"):
        bounds = lower_bounds(facts, np.zeros(len(rows), int), start, {})
    points = draw.uniform(low, high, (POINTS, size))
    corners = np.where(draw.random((POINTS // 2, size)) < 0.5, low, high)
    points[: POINTS // 2] = corners
    points = np.clip(points.astype(one.dtype).astype(float), low, high)
    feeds = [{n: x.astype(one.dtype) for n, x in one.feeds(p).items()} for p in points]
    outputs = runtime.run(one.model.SerializeToString(), feeds)
    if isinstance(outputs, str):
        return Counter({"runtime refused": 1})
    values = np.array([np.concatenate([np.ravel(y) for y in out]) for out in outputs], float)
    met = values @ rows.T
    largest = 1 + np.max(np.abs(values), initial=0, where=np.isfinite(values))
    doubtful = ~(met >= bounds - NEAR * largest)
    counted = Counter({"bounded": 1, "points": POINTS, "values": met.size})
    for p, r in np.argwhere(doubtful)[:8]:
        counted["looked at exactly"] += 1
        below = _below(one, points[p], rows[r], float(bounds[r]))
        counted["of these at a jump"] += below is None
        if below:
            failures.append({"graph": name, "row": int(r), "bound": float(bounds[r])})
    return counted


def _below(one: Graph, point, row, bound: float) -> bool | None:
    """Whether the exact value of a row is certainly less than the bound; None if nobody can say."""
    with ctx.workprec(PRECISION):
        try:
            found = evaluate(one.model, one.feeds(point))
        except Vague:  # a step at a rounded number
            return None
        outputs = np.concatenate([np.ravel(y) for y in found])
        total = number(0.0)
        for factor, y in zip(row.tolist(), outputs, strict=True):
            total = total + number(factor) * y
        return surely_greater(number(float(bound)), total)
