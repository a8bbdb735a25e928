"""Random small problems: no bound is above the true minimum.

    python tests/rigor/rigor_soundness.py --problems 100000 --out RESULT.json

Networks of two inputs with random weights (some of them whole numbers, so that kinks, corners and
zeros coincide), boxes of many sizes (points too), random rows. For relu the truth is the exact
minimum in rational numbers; for smooth activations it is the value at points of the box in ball
arithmetic, those where the bounds are attained among them. Compared are `networks.bound` with all
its methods, the search in single precision, and what the checker of certificates derives.
"""

import argparse
import datetime
import itertools
import json
import time
from pathlib import Path

import numpy as np
import onnx
import rigor_exact
from flint import arb, ctx, fmpq
from onnx import TensorProto, helper, numpy_helper

from stagecert import networks
from stagecert.networks.bounding import bounds
from stagecert_check import graph, operators  # noqa: F401  (operators registers itself)
from stagecert_check.bounds import Facts, lower_bounds
from stagecert_check.numbers import Arithmetic

SIZES = ((2, 4, 2), (2, 6, 3), (2, 5, 4, 2), (2, 4, 4, 4, 2))
METHODS = ("ibp", "backward", "nonconvex")
SMOOTH = {
    "Tanh": lambda x: x.tanh(),
    "Sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "Softplus": lambda x: (1 + x.exp()).log(),
    "Gelu": lambda x: x * (1 + (x / arb(2).sqrt()).erf()) / 2,
    "Elu": lambda x: x if x > 0 else x.exp() - 1,
    "Mish": lambda x: x * (1 + x.exp()).log().tanh(),
    "Softsign": lambda x: x / (1 + abs(x)),
}
BOXES, ROWS = 32, 2  # in one call


def random_model(random: np.random.Generator, sizes, activation="Relu") -> onnx.ModelProto:
    """A multilayer perceptron, in single or double precision."""
    nodes, stored, value = [], [], "x"
    double = bool(random.integers(2))
    scale = 10.0 ** random.choice([-3, 0, 0, 0, 0, 2]) if activation == "Relu" else 1.0
    for k, (n, m) in enumerate(itertools.pairwise(sizes)):
        weights, bias = random.normal(size=(n, m)), 0.3 * random.normal(size=m)
        if random.integers(3) == 0:  # whole numbers, many zeros
            weights, bias = np.round(1.2 * weights), np.round(bias)
        kind = np.float64 if double else np.float32
        stored.append(numpy_helper.from_array((scale * weights).astype(kind), f"w{k}"))
        stored.append(numpy_helper.from_array((scale * bias).astype(kind), f"b{k}"))
        last = k == len(sizes) - 2
        made = "y" if last else f"z{k}"
        nodes.append(helper.make_node("Gemm", [value, f"w{k}", f"b{k}"], [made]))
        if not last:
            nodes.append(helper.make_node(activation, [made], [f"h{k}"]))
            value = f"h{k}"
    kind = TensorProto.DOUBLE if double else TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(n, kind, [1, s])
            for n, s in (("x", sizes[0]), ("y", sizes[-1]))]  # fmt: skip
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def random_problems(random: np.random.Generator, outputs: int):
    """Boxes (batch, 2) and rows (batch, targets, outputs)."""
    centre = random.normal(size=(BOXES, 2))
    centre = np.where(random.integers(3, size=(BOXES, 1)) == 0, np.round(centre), centre)
    width = random.choice([0, 1e-9, 1e-3, 0.1, 0.5, 1, 2], size=(BOXES, 1))
    width = width * random.choice([0, 1, 1, 1], size=(BOXES, 2))
    rows = random.normal(size=(BOXES, ROWS, outputs))
    rows[::3] = np.round(rows[::3])
    return centre - width, centre + width, rows


def checker_bounds(model: onnx.ModelProto, low, high, rows) -> np.ndarray:
    """What the checker of certificates derives with its default slopes."""
    program = graph.read(model.SerializeToString(), Arithmetic())
    with np.errstate(all="ignore"):
        facts = Facts(Arithmetic(), program, low, high).derive()
        (output,) = program.outputs
        flat = rows.reshape(-1, 1, rows.shape[-1])
        of = np.repeat(np.arange(len(low)), rows.shape[1])
        return lower_bounds(facts, of, lambda some: {output: flat[some]}, {}).reshape(
            rows.shape[:2]
        )


def all_bounds(model: onnx.ModelProto, low, high, rows) -> tuple[dict[str, np.ndarray], list]:
    """The bounds of all methods, and points where they may be attained (batch, targets, 2)."""
    network, found, points = networks.load(model), {}, []
    for method in METHODS:
        made = networks.bound(network, low, high, rows, method=method, max_iterations=30)
        found[method] = made.bound
        points.append(np.asarray(made.inputs).reshape(*rows.shape[:2], 2))
    found["checker"] = checker_bounds(model, low, high, rows)
    return found, points


class Tally:
    """Counts bounds and those above the truth; how near the best ones come to it."""

    def __init__(self):
        self.problems = {"relu": 0, "smooth": 0}
        self.above: dict[str, int] = dict.fromkeys((*METHODS, "checker"), 0)
        self.near: dict[str, int] = dict.fromkeys((*METHODS, "checker"), 0)
        self.unknown: dict[str, int] = dict.fromkeys((*METHODS, "checker"), 0)

    def add(self, method: str, bound: float, truth) -> None:
        """Compares a bound with the exact minimum."""
        if bound == -np.inf:
            self.unknown[method] += 1
            return
        rational = rigor_exact.exact(bound) if np.isfinite(bound) else None
        if rational is None or rational > truth:
            self.above[method] += 1
        elif truth - rational <= (abs(truth) + fmpq(1, 1000)) * fmpq(1, 10**12):
            self.near[method] += 1


def relu_problems(random: np.random.Generator, tally: Tally, sizes) -> None:
    """One network, many boxes and rows."""
    model = random_model(random, sizes)
    low, high, rows = random_problems(random, sizes[-1])
    found, _ = all_bounds(model, low, high, rows)
    layers = rigor_exact.layers_of(model)
    rational = np.vectorize(rigor_exact.exact, otypes=[object])
    for b in range(BOXES):
        made = list(rigor_exact.pieces(layers, rational(low[b]), rational(high[b])))
        for r in range(ROWS):
            truth = rigor_exact.least(made, rational(rows[b, r]))
            for method, bound in found.items():
                tally.add(method, float(bound[b, r]), truth)
    tally.problems["relu"] += BOXES * ROWS


def smooth_problems(random: np.random.Generator, tally: Tally, sizes, kind: str) -> None:
    """One network with a smooth activation: no bound is above any value."""
    model = random_model(random, sizes, kind)
    low, high, rows = random_problems(random, sizes[-1])
    found, points = all_bounds(model, low, high, rows)
    stored = [numpy_helper.to_array(t).astype(float) for t in model.graph.initializer]
    precision, ctx.prec = ctx.prec, 200
    try:
        for b in range(BOXES):
            for r in range(ROWS):
                places = [np.clip(p[b, r], low[b], high[b]) for p in points]
                places += [low[b], high[b], random.uniform(low[b], high[b])]
                values = [_value(stored, SMOOTH[kind], p, rows[b, r]) for p in places]
                for method, bound in found.items():
                    number = float(bound[b, r])
                    tally.unknown[method] += number == -np.inf
                    if np.isnan(number) or any(arb(number) > value for value in values):
                        tally.above[method] += 1
    finally:
        ctx.prec = precision
    tally.problems["smooth"] += BOXES * ROWS


def _value(stored, function, point, row) -> arb:
    x = [arb(float(v)) for v in point]
    for k in range(0, len(stored), 2):
        weights, bias = stored[k : k + 2]
        x = [
            sum((arb(float(w)) * v for w, v in zip(column, x, strict=True)), arb(float(b)))
            for column, b in zip(weights.T, bias, strict=True)
        ]
        x = [function(v) for v in x] if k < len(stored) - 2 else x
    return sum((arb(float(c)) * v for c, v in zip(row, x, strict=True)), arb(0))


def run(problems: int, seed: int, sizes=SIZES, kinds=tuple(SMOOTH), say=lambda _: None) -> Tally:
    """At least so many problems; every fifth network is smooth. Each architecture is compiled."""
    random, tally, number = np.random.default_rng(seed), Tally(), 0
    while sum(tally.problems.values()) < problems:
        if number % 5 == 4:
            smooth_problems(random, tally, sizes[0], str(random.choice(kinds)))
        else:
            relu_problems(random, tally, sizes[random.integers(len(sizes))])
        number += 1
        if number % 20 == 0:
            say(f"{sum(tally.problems.values())} problems, above the truth: {tally.above}")
    return tally


def main() -> None:
    """Runs many problems and writes the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--opening", action="store_true", help="searches begin as on accelerators")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.opening:
        bounds.opens = lambda: True
    begin = time.monotonic()
    tally = run(options.problems, options.seed, say=lambda line: print(line, flush=True))
    held = {
        "problems": tally.problems,
        "above the truth": tally.above,
        "no bound": tally.unknown,
        "relu, within 1e-12 of the exact minimum": tally.near,
        "seed": options.seed,
        "opening": options.opening,
        "seconds": round(time.monotonic() - begin),
        "date": datetime.date.today().isoformat(),
    }
    options.out.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
