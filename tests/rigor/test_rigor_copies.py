"""Values that are copies of others: where passes back begin, and how copies are added up."""

import numpy as np
import onnx
import pytest

from stagecert_check import bounds, graph
from stagecert_check.bounds import Facts
from stagecert_check.linear import Conv, Move
from stagecert_check.numbers import Arithmetic

# Attention without softmax: the products of all pairs of four numbers, which cancel before them.
PAIRS = """
<ir_version: 8, opset_import: ["" : 17]>
graph (float[2, 2] x) => (float[2, 2] y) <float three = {3}> {
    far = Mul(x, three)
    near = Sub(far, x)
    turned = Transpose(near)
    y = MatMul(near, turned)
}
"""


def _facts(exact: bool = False) -> Facts:
    model = onnx.parser.parse_model(PAIRS)
    program = graph.read(model.SerializeToString(), Arithmetic(exact))
    low, high = np.full((1, 4), 0.5), np.ones((1, 4))
    return Facts(Arithmetic(exact), program, low, high)


@pytest.mark.parametrize("exact", [False, True])
def test_passes_back_begin_where_numbers_are_made(exact, monkeypatch):
    begun, real = [], Facts.unit_bounds
    monkeypatch.setattr(
        Facts, "unit_bounds", lambda *args: begun.append((args[1], len(args[2]))) or real(*args)
    )
    facts = _facts(exact).derive()
    # Twice the input; intervals alone take it to be between 0.5 and 2.5, and its products too.
    (product,) = facts.program.activations
    made = {index for index, _ in begun}
    assert all(facts.program.nodes[index].shape == (2, 2) for index in made)
    assert max(count for _, count in begun) == 4  # of 16 entries
    low, high = facts.boxes[product]
    assert np.allclose(low.astype(float), 1)
    assert np.allclose(high.astype(float), 2)


def test_too_many_passes_are_left_to_intervals(monkeypatch):
    monkeypatch.setattr(bounds, "_MOST_NUMBERS", 0)
    facts = _facts().derive()
    (product,) = facts.program.activations
    low, high = facts.boxes[product]
    assert np.allclose((low, high), [[[[[[0.5]]]]], [[[[[2.5]]]]]])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("space", [(3, 7), (4, 6), (3, 5)])
def test_windows_side_by_side(groups, space):
    # Padded on one side, and with entries that no window reads; whole numbers: equal means equal.
    draw = np.random.default_rng(0)
    weights = draw.integers(-5, 5, (6, 4 // groups, 2, 3)).astype(float)
    conv = Conv(weights, groups, (2, 3), (1, 1), (1, 0), (2, space[1] // 3))
    x = draw.integers(-5, 5, (3, 1, 4, *space)).astype(float)
    y = conv.forward([x])
    g = draw.integers(-5, 5, y.shape).astype(float)
    (back,) = conv.transposed(g, [(1, 4, *space)])
    assert back.shape == x.shape
    assert np.array_equal((g * y).sum(axis=(1, 2, 3, 4)), (back * x).sum(axis=(1, 2, 3, 4)))


@pytest.mark.parametrize(
    "index", [[[0, 1, 2], [2, 1, 0]], [[0, 0, 2], [2, -1, 0]], [[1, 2, 0]], [[-1, -1]]]
)
def test_copies_are_added_up(index):
    move, draw = Move(np.array(index)), np.random.default_rng(1)
    x = draw.integers(-5, 5, (4, 3)).astype(object)
    y = move.forward([x])
    g = draw.integers(-5, 5, y.shape).astype(object)
    (back,) = move.transposed(g, [(3,)])
    assert np.array_equal((g * y).reshape(4, -1).sum(axis=1), (back * x).sum(axis=1))
