"""Random small networks whose answer is known exactly: all are decided, and none wrongly.

    python tests/rigor/rigor_complete.py --networks 5000 --out RESULT.json

Networks of two inputs with relu, LeakyRelu, Clip or maxima of pairs. The linear pieces of each are
enumerated in rational numbers, with the exact minimum of a row over the box. Of every network two
properties are asked: one whose limit is a little below the minimum, which holds, and one whose
limit is a little above, which does not. For smooth activations the minimum is enclosed by a grid
and a Lipschitz constant. The answers come from the search through splits of neurons (of inputs,
for a share of the networks, for maxima and smooth activations); certificates are read and checked
once more by a checker of its own. With --out the counts are written now and then; if that file is
there already, what it has counted is not asked again.
"""

import argparse
import datetime
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import rigor_exact
from flint import fmpq
from onnx import TensorProto, helper, numpy_helper
from rigor_models import vnnlib

import stagecert_check
from stagecert.verify import splitting, verify
from stagecert.verify.models import OpenModel

SIZES = ((2, 4, 2), (2, 6, 3), (2, 5, 4, 2), (2, 4, 3, 3, 2))
KINDS = ("Relu", "LeakyRelu", "Clip", "Max")
SMOOTH = {
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 0.25),
    "Tanh": (np.tanh, 1.0),
}
ALPHA = np.float32(0.125)
SLACKS = (0.1, 1e-2, 1e-3)  # of how much the row can change over the box
GRID = 401
LIMIT = 600  # seconds for a property; most take less than one, on a machine that does nothing else
WRITE_EVERY = 20  # seconds
INPUTS_EVERY = 8  # every so manieth network is decided by splits of inputs

Affine = tuple  # (a, b, c) stands for a * x_0 + b * x_1 + c


def combined(weights, functions: list[Affine], constant: fmpq) -> Affine:
    """A weighted sum of affine functions, and a constant."""
    zero = fmpq(0)
    return tuple(
        sum((w * f[k] for w, f in zip(weights, functions, strict=True)),
            constant if k == 2 else zero)
        for k in range(3)
    )  # fmt: skip


def options(kind: str, arguments: list[Affine]) -> list[list[tuple[list[Affine], Affine]]]:
    """For every unit: (functions that are at most zero, what it puts out there), for each piece."""
    one, zero = fmpq(1), fmpq(0)

    def less(f, g):
        return combined((one, -one), [f, g], zero)

    if kind == "Max":
        half = len(arguments) // 2
        pairs = zip(arguments[:half], arguments[half:], strict=True)
        return [[([less(g, f)], f), ([less(f, g)], g)] for f, g in pairs]
    nothing = (zero, zero, zero)
    found = []
    for f in arguments:
        if kind == "Clip":
            top = (zero, zero, one)
            found.append([([f], nothing), ([less(f, top), less(nothing, f)], f),
                          ([less(top, f)], top)])  # fmt: skip
        else:
            slope = zero if kind == "Relu" else rigor_exact.exact(ALPHA)
            found.append([([f], tuple(slope * v for v in f)), ([less(nothing, f)], f)])
    return found


def outputs_of(kind: str, layers, low, high):
    """(polygon, outputs as affine functions) for all linear pieces of a network."""
    (x, y), (u, v) = low, high
    one, zero = fmpq(1), fmpq(0)
    whole = [(x, y), (u, y), (u, v), (x, v)]
    stack = [(whole, 0, [(one, zero, zero), (zero, one, zero)])]
    while stack:
        polygon, number, values = stack.pop()
        matrix, bias = layers[number]
        made = [combined(row, values, b) for row, b in zip(matrix, bias, strict=True)]
        if number == len(layers) - 1:
            yield polygon, made
            continue
        parts = [(polygon, [])]
        for unit in options(kind, made):
            divided = []
            for part, done in parts:
                for conditions, result in unit:
                    rest = part
                    for a, b, c in conditions:
                        rest = rigor_exact.clip(rest, (a, b), -c) if rest else rest
                    if rest:
                        divided.append((rest, [*done, result]))
            parts = divided
        stack += [(part, number + 1, done) for part, done in parts]


def random_layers(random: np.random.Generator, sizes, kind: str) -> list:
    """(weights (out, in), biases) in single precision; before maxima there are twice as many."""
    found = []
    for k, (n, m) in enumerate(itertools.pairwise(sizes)):
        m = 2 * m if kind == "Max" and k < len(sizes) - 2 else m
        weights, bias = random.normal(size=(m, n)), 0.3 * random.normal(size=m)
        if random.integers(4) == 0:  # whole numbers, many zeros
            weights, bias = np.round(1.2 * weights), np.round(bias)
        found.append((weights.astype(np.float32), bias.astype(np.float32)))
    return found


def model_of(kind: str, layers) -> onnx.ModelProto:
    """The network as an ONNX model."""
    nodes, stored, value = [], [], "x"

    def constant(name, array):
        stored.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    for k, (weights, bias) in enumerate(layers):
        if k == len(layers) - 1:
            names = [constant("w", weights), constant("b", bias)]
            nodes.append(helper.make_node("Gemm", [value, *names], ["y"], transB=1))
        elif kind == "Max":
            for part, rows in enumerate(np.split(np.arange(len(bias)), 2)):
                names = [constant(f"w{k}{part}", weights[rows]),
                         constant(f"b{k}{part}", bias[rows])]  # fmt: skip
                made = [f"z{k}{part}"]
                nodes.append(helper.make_node("Gemm", [value, *names], made, transB=1))
            nodes.append(helper.make_node("Max", [f"z{k}0", f"z{k}1"], [f"h{k}"]))
        else:
            names = [constant(f"w{k}", weights), constant(f"b{k}", bias)]
            nodes.append(helper.make_node("Gemm", [value, *names], [f"z{k}"], transB=1))
            more = [constant(f"l{k}", 0), constant(f"u{k}", 1)] if kind == "Clip" else []
            attributes: Any = {"alpha": float(ALPHA)} if kind == "LeakyRelu" else {}
            nodes.append(helper.make_node(kind, [f"z{k}", *more], [f"h{k}"], **attributes))
        value = f"h{k}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, s])
            for n, s in (("x", 2), ("y", len(layers[-1][1])))]  # fmt: skip
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def extremes(kind: str, layers, low, high, row) -> tuple[float, float, float]:
    """The minimum of row . outputs between two numbers, and how much it changes over the box."""
    if kind in SMOOTH:
        function, steepest = SMOOTH[kind]
        axes = [np.linspace(a, b, GRID) for a, b in zip(low, high, strict=True)]
        value = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)
        # Per unit of each input: no entry moves faster than the absolute weights allow.
        speed = np.eye(2)
        for k, (weights, bias) in enumerate(layers):
            value = value @ weights.T.astype(float) + bias
            speed = np.abs(weights.astype(float)) @ speed
            if k < len(layers) - 1:
                value, speed = function(value), steepest * speed
        value = value @ row
        half = np.array([axis[1] - axis[0] for axis in axes]) / 2
        slip = float(np.abs(row) @ speed @ half)
        return float(value.min()) - slip, float(value.min()), float(np.ptp(value))
    rational = [([[rigor_exact.exact(v) for v in line] for line in weights],
                 [rigor_exact.exact(v) for v in bias]) for weights, bias in layers]  # fmt: skip
    exact = [[rigor_exact.exact(v) for v in end] for end in (low, high)]
    pieces = list(outputs_of(kind, rational, *exact))
    weights = [rigor_exact.exact(v) for v in row]
    least = rigor_exact.least(pieces, weights)
    most = -rigor_exact.least(pieces, [-w for w in weights])
    middle = int(least.p) / int(least.q)
    return middle, middle, int(most.p) / int(most.q) - middle


def formula(row, limit: float) -> str:
    """row . outputs <= limit."""
    terms = " ".join(f"(* {v:.6f} Y_{k})" for k, v in enumerate(row))
    return f"(assert (<= (+ {terms}) {limit:.12f}))"


def ask(seed: int, kind: str, folder: Path) -> dict[str, int]:
    """Asks both properties of one network; counts what came out."""
    random = np.random.default_rng([seed, len(kind)])
    sizes = SIZES[seed % len(SIZES)]
    layers = random_layers(random, sizes, kind)
    low = np.round(random.uniform(-2, 0, 2), 3)
    high = np.round(low + random.choice([0.25, 1, 2], 2), 3)
    row = np.round(random.normal(size=sizes[-1]), 3)
    below, above, spread = extremes(kind, layers, low, high, row)
    slack = float(random.choice(SLACKS)) * spread + 1e-4
    proto = model_of(kind, layers)
    model = OpenModel(proto)
    # Where a neuron has to be split many times, cuts of the two inputs are better.
    by_inputs = seed % INPUTS_EVERY == 0 or kind == "Max" or kind in SMOOTH
    splitting.LARGEST_DIMENSION = 24 if by_inputs else 0
    counts: dict[str, int] = dict.fromkeys(
        ("unsat", "sat", "undecided", "wrong", "rejected", "nodes"), 0
    )
    for limit, expected in ((below - slack, "unsat"), (above + slack, "sat")):
        text = vnnlib(low, high, sizes[-1], formula(row, limit))
        found = verify(model, text, LIMIT, seed=seed)
        counts["nodes"] += found.boxes
        if found.answer not in ("unsat", "sat"):
            counts["undecided"] += 1
            print(f"{kind} {seed}: {expected} is {found.answer}: {found.reason}", flush=True)
        elif found.answer != expected:
            counts["wrong"] += 1
            print(f"{kind} {seed}: {expected} is {found.answer}", flush=True)
        else:
            counts[expected] += 1
        if found.answer == "unsat":
            files = folder / "m.onnx", folder / "p.vnnlib", folder / "c"
            files[0].write_bytes(proto.SerializeToString())
            files[1].write_text(text)
            files[2].write_bytes(found.certificate or b"")
            counts["rejected"] += not stagecert_check.check(*files).accepted
    return counts


def main() -> None:
    """Asks all networks and writes the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=5000)
    parser.add_argument("--smooth", type=int, default=0, help="of smooth activations, besides")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=np.inf, help="end after so many")
    parser.add_argument(
        "--again", action="store_true", help="ask again what was not decided in time"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin, last = time.monotonic(), 0.0
    result: dict[str, Any] = {"kinds": {}, "first seed": options.first, "seconds": 0, "open": []}
    if options.out is not None and options.out.exists():
        result = json.loads(options.out.read_text())
        if result["first seed"] != options.first:
            parser.error(f"{options.out} begins with seed {result['first seed']}")
    held, spent = result["kinds"], result["seconds"]

    def write() -> None:
        result["seconds"] = round(spent + time.monotonic() - begin)
        result["date"] = datetime.date.today().isoformat()
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    asked = itertools.chain(
        ((seed, KINDS[seed // len(SIZES) % len(KINDS)])
         for seed in range(options.first, options.first + options.networks)),
        ((seed, list(SMOOTH)[seed // len(SIZES) % len(SMOOTH)])
         for seed in range(options.first, options.first + options.smooth)),
    )  # fmt: skip
    passed: dict[str, int] = {}  # of every kind, how many networks were counted before
    with tempfile.TemporaryDirectory() as folder:
        for seed, kind in asked:
            passed[kind] = passed.get(kind, 0) + 1
            if passed[kind] <= held.get(kind, {}).get("networks", 0):
                continue
            if time.monotonic() - begin > options.seconds:
                break
            counts = {"networks": 1, **ask(seed, kind, Path(folder))}
            if counts["undecided"] or counts["wrong"] or counts["rejected"]:
                result["open"].append(f"{kind} {seed}")
            for name, count in counts.items():
                held.setdefault(kind, dict.fromkeys(counts, 0))[name] += count
            if time.monotonic() - last > WRITE_EVERY:
                last = time.monotonic()
                write()
        for name in list(result["open"]) if options.again else ():
            kind, seed = name.split()
            counts = ask(int(seed), kind, Path(folder))
            if counts["undecided"] or counts["wrong"] or counts["rejected"]:
                continue
            result["open"].remove(name)
            of_kind = held[kind]
            # One of its two properties is decided now, and was not then.
            of_kind["undecided"] -= 1
            of_kind["unsat" if of_kind["unsat"] < of_kind["sat"] else "sat"] += 1
    write()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
