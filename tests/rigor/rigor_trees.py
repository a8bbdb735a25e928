"""Trees that split inputs and neurons: at random, and such as prove properties of small networks.

The truth about a leaf of a relu network is the exact minimum over all linear pieces, clipped by the
leaf's splits, in rational numbers. Trees that prove something split all neurons that can change
sign: then each leaf is a linear program, and its multipliers are the forces.
"""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import rigor_exact
import rigor_models as models
import scipy.optimize
from flint import fmpq
from onnx import numpy_helper

from stagecert.verify import Verification, certificates, splitting, verify
from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.certificates import Arrays
from stagecert.verify.models import OpenModel
from stagecert_check import graph, operators, properties  # noqa: F401
from stagecert_check.bounds import Facts
from stagecert_check.checker import Checker
from stagecert_check.numbers import Arithmetic


def checker_of(model: onnx.ModelProto, text: str, exact: bool = False) -> Checker:
    """The checker of a model and a property."""
    program = graph.read(model.SerializeToString(), Arithmetic(exact))
    return Checker(program, properties.load(text.encode()), exact)


def bounds_of(checker: Checker, tree: Branches) -> tuple[list, np.ndarray]:
    """The leaves of a tree as the checker sees them, and its bounds on them."""
    arrays = Arrays()
    with np.errstate(all="ignore"):
        tasks = list(checker.tasks(tree.case, arrays.tree(tree)))
        found = np.full(len(tasks), np.nan)
        for some, bounds in checker.bounds(arrays, tasks):  # type: ignore
            for task, bound in zip(some, bounds, strict=True):
                found[task.number] = (
                    float(bound) if not hasattr(bound, "p") else int(bound.p) / int(bound.q)
                )
    return tasks, found


def random_tree(random: np.random.Generator, checker: Checker, depth: int = 4) -> Branches:
    """Cuts of inputs and splits of neurons, with multipliers, forces and slopes at random."""
    inputs = checker.wanted.cases[0].inputs
    low, high = np.array(inputs.lower64, float), np.array(inputs.upper64, float)
    facts = Facts(Arithmetic(), checker.program, low[None], high[None]).derive()
    arguments = [facts.boxes[k] for k in checker.activations]
    ends = [np.concatenate([x[side].reshape(-1) for x in arguments]) for side in (0, 1)]
    axes, cuts, forces = [], [], []

    def grow(low, high, path, left):
        if left == 0 or random.integers(6) == 0:
            axes.append(LEAF)
            cuts.append(0.0)
            scale = 10.0 ** random.uniform(-2, 1)
            made = scale * random.exponential(size=len(path)) * random.integers(2, size=len(path))
            forces.extend(made)
            return
        if random.integers(4) == 0:
            axis = int(random.integers(len(low)))
            at = float(
                random.choice([low[axis], high[axis], random.uniform(low[axis], high[axis])])
            )
            at = min(max(at, low[axis]), high[axis])
            axes.append(axis)
            cuts.append(at)
            for k, new in ((1, high.copy()), (0, low.copy())):
                new[axis] = at
                grow(*((low, new) if k else (new, high)), path, left - 1)
            return
        neuron = int(random.choice([*path, random.integers(len(ends[0]))]))
        middle = random.uniform(ends[0][neuron], ends[1][neuron])
        others = [0, ends[0][neuron] - 1, ends[1][neuron]]
        at = float(random.choice([*others, *[middle] * 9]))
        axes.append(len(low) + neuron)
        cuts.append(at)
        for _ in range(2):
            grow(low, high, [*path, neuron], left - 1)

    grow(low, high, [], depth)
    leaves, rows = axes.count(LEAF), len(checker.wanted.cases[0].outputs)
    multipliers = random.exponential(size=(leaves, rows)) * random.integers(0, 3, (leaves, rows))
    slopes = []
    for index in checker.activations:
        shape = checker.given.shape(index, int(random.choice([1, leaves])))
        pair = [random.uniform(-0.5, 1.5, shape).astype(random.choice(["<f2", "<f4", "<f8"]))
                if random.integers(2) else None for _ in range(2)]  # fmt: skip
        slopes.append(None if random.integers(3) == 0 else tuple(pair))
    return Branches(0, np.array(axes), np.array(cuts), multipliers, np.array(forces), tuple(slopes))


def exact_minimum(pieces, case, task) -> fmpq | None:
    """The minimum of a leaf's objective over the leaf, or None if it is empty.

    `pieces` are those of `rigor_exact.traced` on the box of the case.
    """
    rational = rigor_exact.exact
    best = None
    low, high = ([rational(v) for v in side] for side in (task.low, task.high))
    for polygon, outputs, hidden in pieces:
        for axis in range(2):
            unit = [fmpq(int(axis == k)) for k in range(2)]
            ends = [point[axis] for point in polygon]
            if ends and max(ends) > high[axis]:
                polygon = rigor_exact.clip(polygon, unit, high[axis])
            if ends and min(ends) < low[axis]:
                polygon = rigor_exact.clip(polygon, [-v for v in unit], -low[axis])
        total = [fmpq(0)] * 3
        path = task.path
        for neuron, cut, side, force in zip(
            path.neurons, path.cuts, path.sides, path.forces, strict=True
        ):
            a, b, c = hidden[neuron]
            cut, side, force = rational(cut), int(side), rational(force)
            polygon = rigor_exact.clip(polygon, (side * a, side * b), side * (cut - c))
            if not polygon:
                break
            for k, x in enumerate((a, b, c - cut)):
                total[k] += force * side * x
        if not polygon:
            continue
        for row, multiplier in zip(case.outputs, task.multipliers, strict=True):
            weight = rational(multiplier)
            total[2] -= weight * fmpq(row.bound.numerator, row.bound.denominator)
            for place, coefficient in row.outputs:
                for k in range(3):
                    c = fmpq(coefficient.numerator, coefficient.denominator)
                    total[k] += weight * c * outputs[place][k]
            for place, coefficient in row.inputs:
                total[place] += weight * fmpq(coefficient.numerator, coefficient.denominator)
        values = [total[0] * x + total[1] * y + total[2] for x, y in polygon]
        if values:
            best = min(values) if best is None else min(best, *values)
    return best


# -- trees that prove ------------------------------------------------------------------------------


def layers_of(model: onnx.ModelProto) -> list:
    """Weights and biases."""
    stored = {t.name: numpy_helper.to_array(t).astype(float) for t in model.graph.initializer}
    return [tuple(stored[name] for name in node.input[1:]) for node in model.graph.node
            if node.op_type == "Gemm"]  # fmt: skip


def _affine(layers, pattern, inputs: int):
    """Matrices and offsets of the arguments of all relu, and the matrix of the outputs."""
    matrix, offset, hidden, first = np.eye(inputs), np.zeros(inputs), [], 0
    for k, (weights, bias) in enumerate(layers):
        matrix, offset = weights.T @ matrix, weights.T @ offset + bias
        if k < len(layers) - 1:
            hidden.append((matrix, offset))
            on = pattern[first : first + len(bias)]
            first += len(bias)
            matrix, offset = matrix * on[:, None], offset * on
    return np.concatenate([m for m, _ in hidden]), np.concatenate([o for _, o in hidden]), matrix


def complete_tree(model: onnx.ModelProto, checker: Checker, case: int) -> Branches:
    """Splits all neurons of a relu network that can change sign, each at zero.

    The case must have one row of outputs. Forces come from a linear program for each leaf; nothing
    says that they prove anything.
    """
    layers, wanted = layers_of(model), checker.wanted.cases[case]
    low, high = (np.array(x, float) for x in (wanted.inputs.lower64, wanted.inputs.upper64))
    facts = Facts(Arithmetic(), checker.program, low[None], high[None]).derive()
    ends = [np.concatenate([facts.boxes[k][side].reshape(-1) for k in checker.activations])
            for side in (0, 1)]  # fmt: skip
    free = np.flatnonzero((ends[0] < 0) & (ends[1] > 0))
    (row,) = wanted.outputs
    goal = np.zeros(len(layers[-1][1]))
    for place, coefficient in row.outputs:
        goal[place] = float(coefficient)
    axes, multipliers, forces = [], [], []

    def grow(sides):
        if len(sides) < len(free):
            axes.append(len(low) + free[len(sides)])
            for side in (1, -1):
                grow([*sides, side])
            return
        axes.append(LEAF)
        pattern = (ends[0] >= 0).astype(float)
        pattern[free] = [side < 0 for side in sides]
        matrix, offset, outputs = _affine(layers, pattern, len(low))
        signed = np.array(sides)[:, None] * matrix[free] if len(free) else np.zeros((0, len(low)))
        limits = -np.array(sides) * offset[free]
        boxes = list(zip(low, high, strict=True))
        found = scipy.optimize.linprog(goal @ outputs, signed, limits, bounds=boxes)
        if found.status == 2:  # nothing is there: how far the splits must give way
            ones = np.ones((len(free), 1))
            found = scipy.optimize.linprog(
                [*np.zeros(len(low)), 1], np.hstack([signed, -ones]), limits,
                bounds=[*boxes, (0, None)],
            )  # fmt: skip
            multipliers.append([0.0])
        else:
            multipliers.append([1.0])
        forces.extend(np.maximum(-found.ineqlin.marginals, 0))

    grow([])
    return Branches(
        case, np.array(axes), np.zeros(len(axes)), np.array(multipliers), np.array(forces)
    )


def property_of(path: Path, model: onnx.ModelProto, by: float) -> None:
    """Writes a property that holds by so much, or is false by so much."""
    centre, radius = np.array([0.4, -0.1]), 1.0
    low, high = centre - radius, centre + radius
    box = [[rigor_exact.exact(v) for v in side] for side in (low, high)]
    made, formula = list(rigor_exact.pieces(rigor_exact.layers_of(model), *box)), []
    for row in ((1, -1, 0), (0, 1, -1)):
        least = rigor_exact.least(made, [fmpq(c) for c in row])
        terms = " ".join(f"(* {c}.0 Y_{k})" for k, c in enumerate(row) if c)
        formula.append(f"(and (<= (+ {terms}) {int(least.p) / int(least.q) - by:.9f}))")
    path.write_text(models.vnnlib(low, high, 3, f"(assert (or {' '.join(formula)}))"))


def proven(folder: Path) -> tuple[list[Path], list[Branches]]:
    """Files of a model, a property that the whole box does not prove, and trees that do."""
    model = models.mlp((2, 5, 4, 3), seed=4)
    paths = [folder / name for name in ("m.onnx", "p.vnnlib", "c.cert")]
    paths[0].write_bytes(model.SerializeToString())
    property_of(paths[1], model, 0.01)
    checker = checker_of(model, paths[1].read_text())
    trees = [complete_tree(model, checker, k) for k in range(len(checker.wanted.cases))]
    write(paths, trees)
    return paths, trees


# What the search itself makes: (sizes, seed of the network, the most inputs that are cut).
SEARCHED = {
    "lemmas": ((2, 5, 4, 3), 2, 0),  # of ends of intervals, with slopes and forces
    "lemmas on lemmas": ((2, 4, 3, 2, 3), 15, 0),  # for two layers
    "grafts": ((2, 5, 4, 3), 0, 24),  # cuts of inputs, and splits on the boxes that are left
}


def searched(folder: Path, kind: str) -> list[Path]:
    """Files of a model, a property that holds by very little, and the certificate of a search."""
    sizes, seed, inputs = SEARCHED[kind]
    model = models.mlp(sizes, seed=seed)
    paths = [folder / name for name in ("m.onnx", "p.vnnlib", "c.cert")]
    paths[0].write_bytes(model.SerializeToString())
    property_of(paths[1], model, 1e-3)
    with (
        mock.patch.object(splitting, "LARGEST_DIMENSION", inputs),
        mock.patch.object(sys.modules["stagecert.verify.verify"], "FIRST_TREE_STEPS", 1),
        # Whole boxes are not to be enough.
        mock.patch.object(Verification, "_refute_whole_boxes"),
    ):
        found = verify(OpenModel(model), paths[1].read_text(), 600)
    assert found.certificate is not None, found.reason
    paths[2].write_bytes(found.certificate)
    return paths


def with_slopes(checker: Checker, tree: Branches) -> Branches:
    """The same with slopes that are written down: the defaults of each leaf, and shared ones."""
    shapes = [checker.given.shape(k, tree.leaves) for k in checker.activations]
    random = np.random.default_rng(0)
    first = random.integers(2, size=shapes[0]).astype("<f4")
    return replace(tree, slopes=((first, None), (np.ones((1, *shapes[1][1:]), "<f2"), None)))


def write(paths: list[Path], trees: list[Branches]) -> None:
    """Writes the certificate."""
    model, text = (hashlib.sha256(path.read_bytes()).hexdigest() for path in paths[:2])
    paths[2].write_bytes(certificates.packed(certificates.Proof(model, text, tuple(trees))))
