"""Rows on hidden values and on products of variables: outputs that the model gets."""

import numpy as np
import pytest
from exact import dense

from stagecert.errors import ProblemError
from stagecert.verify import verify
from stagecert.verify.models import OpenModel
from stagecert_check import check, properties

# y = relu(x0 + x1) - relu(x0 - x1); the hidden value h0 is what the relus are of.
LAYERS = [([[1.0, 1.0], [1.0, -1.0]], [0.0, 0.0]), ([[1.0, -1.0]], [0.0])]
HEAD = """(vnnlib-version <2.0>)
(declare-network f (declare-input X real [1,2]) (declare-hidden H real [1,2] "NODE")
    (declare-output Y real [1,1]))
(assert (and (>= X[0,0] -1) (<= X[0,0] 1) (>= X[0,1] -1) (<= X[0,1] 1)))
"""


def text(assertion, node="h0"):
    return HEAD.replace("NODE", node) + f"(assert {assertion})"


@pytest.fixture
def model():
    return dense(LAYERS)


def test_values_of_the_larger_model(model):
    assertion = "(<= (+ (* X[0,0] X[0,0]) (* 2 X[0,1] Y[0,0] H[0,1]) H[0,0]) (* Y[0,0] X[0,0]))"
    property = properties.load(text(assertion))
    larger, wanted = OpenModel(model).stating(property)
    points = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)
    found = larger.session.run(points)
    np.testing.assert_allclose(np.asarray(larger.network(points)), found, rtol=1e-6, atol=1e-6)
    (x0, x1), (y, h0, h1) = points.T, found.T[:3]
    np.testing.assert_array_equal(h0, np.maximum(x0 + x1, 0))
    truth = x0 * x0 + 2 * x1 * y * h1 + h0 - y * x0
    (row,) = wanted.cases[0].outputs
    assert (row.hidden, wanted.products, wanted.sizes) == ((), (), (2, found.shape[1], 0))
    value = sum(float(c) * found[:, k] for k, c in row.outputs)
    np.testing.assert_allclose(value, truth, atol=1e-6)
    for point, all_, sign in zip(points, found, truth, strict=True):
        assert property.counterexample(point, all_[:1], hidden=all_[1:3]) == (sign <= 0)
    # The certificate is for the file, whatever is added to it.
    assert larger.contents.digest == OpenModel(model).contents.digest


def test_a_property_with_neither_leaves_the_model_alone(model):
    opened = OpenModel(model)
    plain = text("(<= Y[0,0] 5)").replace('(declare-hidden H real [1,2] "h0")', "")
    property = properties.load(plain)
    assert opened.stating(property) == (opened, property)


@pytest.mark.parametrize(
    ("assertion", "answer"),
    [
        ("(>= H[0,0] 2.1)", "unsat"),
        ("(>= H[0,0] 1.9)", "sat"),
        ("(and (>= H[0,0] 1) (<= X[0,0] -0.1))", "unsat"),
        ("(>= (* X[0,0] X[0,1]) 1.01)", "unsat"),
        ("(<= (* X[0,0] X[0,0]) -0.01)", "unsat"),
        ("(<= (* X[0,0] Y[0,0] H[0,1]) -0.2)", "sat"),
    ],
)
def test_answers(model, tmp_path, assertion, answer):
    found = verify(model, text(assertion), 120)
    assert found.answer == answer
    if answer == "unsat":
        for name, data in (
            ("m.onnx", model.SerializeToString()),
            ("p.vnnlib", text(assertion).encode()),
            ("c", found.certificate),
        ):
            (tmp_path / name).write_bytes(data)
        assert check(*(tmp_path / name for name in ("m.onnx", "p.vnnlib", "c"))).accepted
    else:
        point = found.counterexample
        assert (len(point.outputs), len(point.hidden)) == (1, 2)


def test_hidden_values_of_the_second_network(tmp_path):
    for name, factor in (("f", 1.0), ("g", 2.0)):
        layers = [(factor * np.array(LAYERS[0][0]), LAYERS[0][1]), LAYERS[1]]
        (tmp_path / name).write_bytes(dense(layers).SerializeToString())
    property = properties.load(
        """(vnnlib-version <2.0>)
        (declare-network f (declare-input X real [2]) (declare-output Y real [1]))
        (declare-network g (declare-input V real [2]) (declare-hidden H real [2] "h0")
            (declare-output W real [1]))
        (assert (and (== X[0] 1) (== X[1] 0.5) (== V[0] 1) (== V[1] 0.25)))
        (assert (<= H[1] (* Y[0] W[0])))"""
    )
    pairs = [("f", tmp_path / "f"), ("g", tmp_path / "g")]
    model, wanted = OpenModel(pairs).stating(property)
    values = model.session.run(np.array([[1, 0.5, 1, 0.25]], np.float32))[0]
    np.testing.assert_array_equal(values, [1, 1, 2.5, 1.5, 1])
    assert wanted.cases[0].outputs[0].outputs == ((3, 1), (4, -1))


def test_what_cannot_be_stated_is_refused(model):
    with pytest.raises(ProblemError, match="no node has an output of that name"):
        verify(model, text("(<= H[0,0] 1)", "nothing"), 20)
    wrong = text("(<= H[0,0] 1)").replace("H real [1,2]", "H real [1,3]")
    with pytest.raises(ProblemError, match="declares 4 outputs, but the network has 3"):
        verify(model, wrong, 20)
    # Sizes that agree only together are not enough.
    two = text("(<= H[0,0] 1)").replace(
        "(declare-output", '(declare-hidden G real [1] "h0") (declare-output'
    )
    two = two.replace("H real [1,2]", "H real [1,3]")
    with pytest.raises(ProblemError, match=r"have the sizes \[1, 3, 1\]"):
        verify(model, two, 20)


def test_a_node_that_is_named_but_its_output_is_not(model):
    for node in model.graph.node:
        node.name = f"node {node.output[0]}"
    property = properties.load(text("(<= H[0,0] 1)", "node z0"))
    larger, _ = OpenModel(model).stating(property)
    values = larger.session.run(np.array([[-1, 0.5]], np.float32))[0]
    np.testing.assert_array_equal(values[1:], [-0.5, -1.5])
