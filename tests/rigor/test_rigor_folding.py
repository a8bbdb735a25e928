"""Inputs that are fixed become constants, and columns of matrices are taken as they are.

The truth is that of linear functions over boxes, and of relu networks of two inputs, in rationals.
"""

from typing import Any

import numpy as np
import onnx
import pytest
import rigor_exact
from flint import fmpq
from rigor_models import Maker

from stagecert.verify.checked import CheckedPasses, starts
from stagecert_check import folding, graph, operators, properties  # noqa: F401
from stagecert_check.bounds import Facts, lower_bounds
from stagecert_check.checker import Checker
from stagecert_check.linear import MatMul
from stagecert_check.numbers import Arithmetic

INPUTS, FREE = 12, (3, 10)


def _box(random) -> tuple[np.ndarray, np.ndarray]:
    """A box of two free entries; some of the others are not fixed but for one rounding."""
    low = np.round(random.normal(size=(3, INPUTS)), 1)
    high = low.copy()
    high[:, ::4] = np.nextafter(high[:, ::4], np.inf)
    high[:, FREE] += random.uniform(0.1, 1, (3, 2))
    return low, high


def _least(rows, low, high):
    """The minimum of a linear function over a box."""
    ends = zip(rows, map(rigor_exact.exact, low), map(rigor_exact.exact, high), strict=True)
    return sum((g * (l if g > 0 else h) for g, l, h in ends), fmpq(0))


def _rational(x):
    """A bound of either arithmetic."""
    return x if isinstance(x, fmpq) else rigor_exact.exact(x)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_linear_functions_of_few_free_inputs(seed, exact):
    """y = A (x - m) + B x, and rows of the inputs too: folded twice, and read in another way."""
    random = np.random.default_rng(seed)
    # Large numbers that cancel: what is rounded is more than what is left.
    a = random.normal(size=(INPUTS, 3)) * 1e7
    b = np.float32(-a) + np.float32(random.normal(size=(INPUTS, 3)))
    a, b, m = (x.astype(np.float32) for x in (a, b, random.normal(size=(1, 3, 4))))
    maker = Maker()
    moved = maker.node("Flatten", maker.node("Sub", "x", maker.constant(m)))
    one = maker.node("MatMul", moved, maker.constant(a))
    other = maker.node("MatMul", maker.node("Flatten", "x"), maker.constant(b))
    maker.nodes.append(onnx.helper.make_node("Add", [one, other], ["y"]))
    model = maker.model([("x", [1, 3, 4])], [("y", [1, 3])])
    program = graph.read(model.SerializeToString(), Arithmetic(exact))
    low, high = _box(random)
    facts = Facts(Arithmetic(exact), program, low, high).derive()
    products = [k for k, node in enumerate(program.nodes) if isinstance(node.operation, MatMul)]
    assert [list(facts.folded(k).free) for k in products] == [list(FREE)] * 2
    rows = np.round(random.normal(size=(6, 3 + INPUTS)), 2)
    rows[:3, 3:] = 0  # of the outputs alone
    of = np.array([0, 1, 2, 0, 1, 2])
    start = {k: Arithmetic(exact).array(x) for k, x in starts(program, rows).items()}
    found = lower_bounds(facts, of, lambda some: {k: x[some] for k, x in start.items()}, {})
    to_rational: Any = np.frompyfunc(rigor_exact.exact, 1, 1)
    ra, rb, rm, rr = (to_rational(np.asarray(x, float)) for x in (a, b, m.reshape(-1), rows))
    for row, box, bound in zip(rr, of, found, strict=True):
        g = (ra + rb) @ row[:3]
        truth = _least(g + row[3:], low[box], high[box]) - (ra @ row[:3]) @ rm
        assert _rational(bound) <= truth
        # Charges for rounding 1e8 to 16 places, or intervals of one rounding's width: no more.
        assert truth - _rational(bound) < fmpq(1, 1000)


@pytest.mark.parametrize("seed", range(8))
def test_products_with_cotangents_are_charged(seed):
    """The columns of free entries add up to almost nothing: rounding is all there is."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=(INPUTS, 64)).astype(np.float32)
    weights[:, 32:] = -weights[:, :32] + np.float32(1e-12) * random.normal(size=32)
    maker = Maker()
    maker.node("MatMul", "x", maker.constant(weights))
    maker.nodes[-1].output[0] = "y"
    model = maker.model([("x", [1, INPUTS])], [("y", [1, 64])])
    program = graph.read(model.SerializeToString(), Arithmetic())
    low, high = np.zeros((2, 1, INPUTS))
    low[:, FREE], high[:, FREE] = 1, 1.001
    facts = Facts(Arithmetic(), program, low, high).derive()
    one = 1 + 0.3 * random.normal(size=(40, 32))
    rows = np.concatenate([one, one], axis=1)
    found = lower_bounds(facts, np.zeros(40, int), lambda some: starts(program, rows[some]), {})
    to_rational: Any = np.frompyfunc(rigor_exact.exact, 1, 1)
    truths = to_rational(rows) @ to_rational(weights.astype(float).T)
    for truth, bound in zip(truths, found, strict=True):
        assert rigor_exact.exact(bound) <= _least(truth, low[0], high[0])


def _network(random):
    """(model, the same as a chain of two free inputs on one box): relu, INPUTS - 5 - 4 - 2."""
    sizes, maker, value, layers = (INPUTS, 5, 4, 2), Maker(), "x", []
    for k in range(3):
        w = random.normal(size=sizes[k : k + 2]).astype(np.float32)
        b = random.normal(size=sizes[k + 1]).astype(np.float32)
        value = maker.node("Gemm", value, maker.constant(w), maker.constant(b))
        value = maker.node("Relu", value) if k < 2 else value
        layers.append((w.astype(float), b.astype(float)))
    maker.nodes[-1].output[0] = "y"
    model = maker.model([("x", [1, INPUTS])], [("y", [1, 2])])

    def folded(x):
        """The fixed entries in the biases, as rationals."""
        exact, found = rigor_exact.exact, []
        for k, (w, b) in enumerate(layers):
            matrix = [[exact(v) for v in row] for row in w.T]
            bias = [exact(v) for v in b]
            if not k:
                rest = [j for j in range(INPUTS) if j not in FREE]
                for i, row in enumerate(matrix):
                    bias[i] += sum(row[j] * exact(x[j]) for j in rest)
                matrix = [[row[j] for j in FREE] for row in matrix]
            found.append((matrix, bias))
        return found

    return model, folded


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_networks_of_few_free_inputs(seed, exact, monkeypatch):
    """No bound is above the exact minimum, and none is looser than without folding."""
    random = np.random.default_rng(seed)
    model, folded = _network(random)
    low, high = _box(random)
    rows = np.round(random.normal(size=(3, 2)), 2)
    found = []
    for share in (folding._SHARE, 0):
        monkeypatch.setattr(folding, "_SHARE", share)
        if not share:
            monkeypatch.setattr(Facts, "_made_by", lambda *_: None)
        program = graph.read(model.SerializeToString(), Arithmetic(exact))
        facts = Facts(Arithmetic(exact), program, low, high).derive()
        start = Arithmetic(exact).array(rows[:, None])
        every = lower_bounds(
            facts,
            np.arange(3),
            lambda some, index=program.outputs[0], start=start: {index: start[some]},
            {},
        )
        found.append((every, facts.boxes))
    (bound, boxes), (plain, plain_boxes) = found
    assert np.allclose(bound.astype(float), plain.astype(float), rtol=0, atol=1e-9)
    for k in boxes:
        assert np.allclose(boxes[k], plain_boxes[k], rtol=0, atol=1e-9)
    for k in range(3):
        free = [[rigor_exact.exact(v) for v in x[k, list(FREE)]] for x in (low, high)]
        # Fixed entries that are intervals of one rounding's width: both of their ends.
        for x in (low[k], high[k]):
            least = min(
                sum(
                    rigor_exact.exact(r) * (f[0] * u + f[1] * v + f[2])
                    for r, f in zip(rows[k], outputs, strict=True)
                )
                for polygon, outputs in rigor_exact.pieces(folded(x), *free)
                for u, v in polygon
            )
            assert _rational(bound[k]) <= least


def test_boxes_of_a_search():
    """Coefficients and bounds that the search takes are below the network at all its points."""
    random = np.random.default_rng(3)
    model, _ = _network(random)
    program = graph.read(model.SerializeToString(), Arithmetic())
    ends = "".join(f"(assert (<= X_{k} 1))(assert (>= X_{k} -1))" for k in range(INPUTS))
    names = "".join(f"(declare-const X_{k} Real)" for k in range(INPUTS))
    wanted = properties.load(
        f"{names}(declare-const Y_0 Real)(declare-const Y_1 Real){ends}(assert (<= Y_0 0))".encode()
    )
    checker = Checker(program, wanted)
    checker.boxes_at_once = 2  # the third box is in another batch
    low, high = _box(random)
    passes = CheckedPasses(checker, low, high, lambda: False)
    assert passes.complete
    of, rows = np.array([2, 0, 1, 2]), random.normal(size=(4, 2))
    found = passes.bound(of, rows)
    weights = [node.operation for node in program.nodes]
    for k, box in enumerate(of):
        assert np.all((found.minimisers[k] == low[box]) | (found.minimisers[k] == high[box]))
        x = value = random.uniform(low[box], high[box], (200, INPUTS))
        for step in weights[1:]:
            if isinstance(step, MatMul):
                value = value @ step.weights
            elif isinstance(step, graph.Shift):
                value = value + step.constant
            else:
                value = np.maximum(value, 0)
        line = found.bound[k] + (x - found.minimisers[k]) @ found.coefficients[k]
        assert np.all(line <= value @ rows[k] + 1e-9)
    assert not CheckedPasses(checker, low, high, lambda: True).complete
