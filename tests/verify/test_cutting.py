"""Where boxes are cut: gains of cuts, and how many boxes that takes."""

import itertools

import numpy as np
import onnx
import pytest
from exact import dense, random_layers, smallest_violation, vnnlib

from stagecert.verify import Verification
from stagecert.verify.checked import CheckedPasses
from stagecert.verify.cutting import gains, telling
from stagecert.verify.grafts import Grafter
from stagecert.verify.models import OpenModel
from stagecert.verify.nodes import Form
from stagecert_check import properties
from stagecert_check.checker import Checker


def bounded(model, low, high):
    """A form, and what the checker knows of boxes."""
    text = vnnlib(low[0], high[0], "(<= Y_0 0)", 1)
    checker = Checker(OpenModel(model).program, properties.load(text))
    passes = CheckedPasses(checker, np.array(low, float), np.array(high, float), lambda: False)
    form = Form(checker.program)
    return form, passes.known(form)


def gained(model, low, high, row=1.0):
    form, known = bounded(model, low, high)
    free, boxes = np.arange(len(low[0])), np.arange(len(low))
    rows = np.zeros((len(low), 1 + len(low[0])))
    rows[:, 0] = row
    return gains(form, known, free, boxes, rows)


def test_they_are_shares_of_what_a_neuron_loses():
    """-relu(3 x - y + z) on boxes around zero: its line above is off by |l| u / (u - l) at zero."""
    layers = [(np.array([[3.0, -1.0, 0.0]]), np.zeros(1)), (np.array([[-1.0]]), np.zeros(1))]
    boxes = [(-1, -1, -1), (-1, -1, -1)], [(1, 1, 1), (1, 0.5, 1)]
    found = gained(dense(layers), *boxes)
    low, high = np.array([-4, -3.5]), np.array([4, 4])
    lost = -low * high / (high - low)
    widths = np.array([[2, 2, 2], [2, 1.5, 2]])
    shares = np.abs([3, -1, 0]) * widths / (high - low)[:, None]
    np.testing.assert_allclose(found, lost[:, None] * shares, rtol=1e-3)


def test_nothing_is_gained_where_nothing_is_lost():
    layers = [(np.array([[1.0, 1.0]]), np.array([5.0])), (np.array([[-1.0]]), np.zeros(1))]
    assert np.all(gained(dense(layers), [(-1, -1)], [(1, 1)]) == 0)


def test_what_does_not_reach_the_row_does_not_count():
    """Two neurons, one for each input; the row has one of them."""
    layers = [(np.eye(2), np.zeros(2)), (np.array([[-1.0, 0.0]]), np.zeros(1))]
    ((first, second),) = gained(dense(layers), [(-1, -1)], [(1, 1)])
    assert first > 0.4
    assert second < 1e-3


def pooled() -> onnx.ModelProto:
    """-max(x, y) of two inputs."""
    node = onnx.helper.make_node
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node("ReduceMax", ["x"], ["m"], axes=[1], keepdims=1), node("Neg", ["m"], ["y"])], "pool",
        [value("x", 1, ["N", 2])], [value("y", 1, ["N", 1])],
    )  # fmt: skip
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)


@pytest.mark.parametrize("kind", ["affine", "maximum"])
def test_networks_without_such_neurons_are_cut_by_their_rows(monkeypatch, kind):
    """y = -x_0 - x_1 / 2, or minus the larger one: the smallest value is known."""
    monkeypatch.setattr(Verification, "_refute_whole_boxes", lambda self: None)
    model = pooled() if kind == "maximum" else dense([(np.array([[-1.0, -0.5]]), np.zeros(1))])
    assert not telling(Form(OpenModel(model).program))
    least = -1.0 if kind == "maximum" else -1.5
    for above, answer in ((-0.01, "unsat"), (0.01, "sat")):
        text = vnnlib((-1, -1), (1, 1), f"(<= Y_0 {least + above})", 1)
        assert Verification(model, text, 60).run().answer == answer


def test_boxes_are_worked_in_parts(monkeypatch):
    draw = np.random.default_rng(0)
    low = draw.uniform(-1, 0, (20, 2))
    high = low + draw.uniform(0.1, 1, (20, 2))
    model = dense(random_layers(1, (2, 6, 5, 1)))
    whole = gained(model, low, high)
    monkeypatch.setattr("stagecert.verify.cutting.NUMBERS", 60)
    np.testing.assert_allclose(gained(model, low, high), whole, rtol=1e-5, atol=1e-9)


def zigzag(steps: int = 8):
    """Y_0 = 2 X_0 + a function of X_1 with kinks: nothing is lost along X_0."""
    at = np.linspace(-0.9, 0.9, steps)
    first = np.array([[1.0, 0.0]] + [[0.0, 1.0]] * steps, np.float32)
    offsets = np.concatenate([[2.0], -at]).astype(np.float32)
    last = np.concatenate([[2.0], np.where(np.arange(steps) % 2, 10.0, -10.0)]).astype(np.float32)
    return [(first, offsets), (last[None], np.zeros(1, np.float32))]


def smallest(layers) -> float:
    """Where X_0 is smallest, and at the kinks or ends of X_1."""
    (first, offsets), (last, _) = layers
    points = np.array([(-1.0, x) for x in (-1.0, 1.0, *(-offsets[1:]))])
    return float(np.min(np.maximum(points @ first.T + offsets, 0) @ last[0]))


@pytest.mark.parametrize("above", [-0.02, 0.02])
def test_inputs_along_which_nothing_is_lost_are_rarely_cut(monkeypatch, above):
    monkeypatch.setattr(Grafter, "able", lambda program: False)
    monkeypatch.setattr(Verification, "_refute_whole_boxes", lambda self: None)
    layers = zigzag()
    limit = smallest(layers) + above
    work = Verification(dense(layers), vnnlib((-1, -1), (1, 1), f"(<= Y_0 {limit:.12f})", 1), 60)
    found = work.run()
    if above > 0:
        assert found.answer == "sat"
        return
    assert (found.answer, found.checked) == ("unsat", True)
    assert work.splitter is not None
    assert work.splitter.tree is not None
    along = list(work.splitter.tree.axis.values())
    # In the end nearly nothing is lost, and the row's slope is what counts.
    assert along[0] == 1
    assert 2 * along.count(0) < along.count(1)


def test_verdicts_beside_exact_answers_where_rows_are_many():
    """Three inputs, two rows a case, boxes only: the truth is that of all activation patterns."""
    for seed, above in itertools.product(range(3), (-1e-3, 1e-3)):
        layers = random_layers(seed, (3, 5, 4, 3))
        low, high = (-1, -1, -1), (1, 1, 1)
        rows = [(np.array([1, 0, 0]), np.zeros(3), 0.0), (np.array([0, 1, -1]), np.zeros(3), 0.0)]
        least = smallest_violation(layers, low, high, rows)
        shift = f"{least + above:.12f}"
        text = vnnlib(low, high, f"(and (<= Y_0 {shift}) (<= (- Y_1 Y_2) {shift}))", 3)
        found = Verification(dense(layers), text, 60).run()
        assert found.answer == ("unsat" if above < 0 else "sat"), (seed, above, found.reason)
