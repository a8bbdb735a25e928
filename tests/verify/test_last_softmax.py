"""Models that end in Softmax or LogSoftmax: properties that compare outputs do without it."""

import numpy as np
import onnx
import pytest

from stagecert.verify import verify
from stagecert.verify.models import OpenModel
from stagecert.verify.replay import Replay
from stagecert_check import check, graph, properties
from stagecert_check.numbers import Arithmetic

COMPARING = (
    "(<= Y_0 Y_1)",
    "(>= Y_2 Y_0)",
    "(< Y_1 Y_0)",
    "(<= (- Y_0 Y_1) 0)",
    "(> 0 (- Y_2 Y_0))",
)
OTHER = ("(<= Y_0 0.3)", "(<= (- Y_0 Y_1) 0.1)", "(<= (+ Y_0 Y_1) 0)", "(<= (* 2 Y_0) Y_1)")


def model(operator="Softmax", weights="4, 0, 0, 0, 2, 1", bias="1, 0, 0", axis=1) -> bytes:
    text = f"""
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[N, 2] x) => (float[N, 3] y)
        <float[2, 3] w = {{{weights}}}, float[3] b = {{{bias}}}>
        {{
            h = Gemm(x, w, b)
            y = {operator} <axis = {axis}> (h)
        }}
    """
    return onnx.parser.parse_model(text).SerializeToString()


def asking(*rows: str) -> str:
    """Inputs from 0 to 1; each row is a way to be a counterexample."""
    declared = [f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1", "Y_2")]
    box = [f"(assert (>= X_{k} 0)) (assert (<= X_{k} 1))" for k in range(2)]
    ways = " ".join(f"(and {row})" for row in rows)
    return "\n".join([*declared, *box, f"(assert (or {ways}))"])


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_decided_on_the_logits(operator, tmp_path):
    """Logits 1 + 4 a, 2 b, b: probabilities have curved bounds, logits have exact ones."""
    data = model(operator, bias="3, 0, 0")
    text = asking("(<= Y_0 Y_1)", "(<= Y_0 Y_2)")
    verdict = verify(data, text, timeout=60)
    assert (verdict.answer, verdict.without) == ("unsat", operator)
    # 3 + 4 a - 2 b is at least 1, where probabilities differ by less.
    assert verdict.cases[0].proven == pytest.approx(1)
    files = [tmp_path / name for name in ("model.onnx", "p.vnnlib", "p.cert")]
    for file, contents in zip(files, (data, text.encode(), verdict.certificate), strict=True):
        file.write_bytes(contents)
    for exact in (False, True):
        report = check(*files, exact=exact)
        assert report.accepted, report.reasons
    # It is bound to this file: the logits alone are another model.
    files[0].write_bytes(
        data.replace(b"LogSoftmax" if operator == "LogSoftmax" else b"Softmax", b"Relu")
    )
    assert not check(*files).accepted


def test_counterexamples_are_the_models():
    read_before = OpenModel(model())
    verdict = verify(read_before, asking("(<= Y_0 Y_1)"), timeout=60)
    assert (verdict.answer, verdict.without) == ("sat", "Softmax")
    assert sum(verdict.counterexample.outputs) == pytest.approx(1, rel=1e-6)
    # The same open model, and a property that needs the probabilities.
    verdict = verify(read_before, asking("(<= Y_0 -0.1)"), timeout=60)
    assert (verdict.answer, verdict.without) == ("unsat", None)


def test_ties_in_floating_point_are_no_counterexamples():
    """Both probabilities underflow to zero, though one is larger than the other."""
    data = model(weights="0, 1, 1, 0, 1, 1", bias="300, 0.00005, 0")
    text = asking("(<= Y_1 Y_2)")
    opened, wanted = OpenModel(data, logits=True), properties.load(text)
    point = np.array([0.5, 0.5], np.float32)
    assert Replay(opened.replayed, wanted).check(point, 0) is not None
    assert Replay(opened.replayed, wanted, opened.session).check(point, 0) is None
    assert verify(data, text, timeout=60).answer == "unsat"


@pytest.mark.parametrize(("rows", "wanted"), [(COMPARING, True), (OTHER, False)])
def test_which_properties_compare(rows, wanted):
    for row in rows:
        assert properties.load(asking(row)).compares == wanted, row
    assert not properties.load(asking(COMPARING[0], OTHER[0])).compares
    assert not properties.load(asking("(<= (+ Y_0 X_0) Y_1)")).compares


def without(data: bytes, ordered: bool = True) -> str | None:
    return graph.read(data, Arithmetic(), ordered=ordered).without


def test_which_softmax_the_checker_leaves_out():
    assert without(model()) == "Softmax"
    assert without(model(axis=-1)) == "Softmax"
    assert without(model(), ordered=False) is None
    assert without(model(axis=0)) is None  # of one number each: all ones
    text = '<ir_version: 8, opset_import: ["" : {}]> graph (float[2, 3] x) => ({}) {{ {} }}'
    for opset, outputs, nodes, wanted in (
        (17, "float[2, 3] y", "y = Softmax(x)", None),  # two of them, side by side
        (17, "float[6] y", "f = Reshape(x, s) y = Softmax(f)", "Softmax"),
        (17, "float[2, 3] y", "r = Softmax(x) y = Relu(r)", None),
        (17, "float[2, 3] y, float[2, 3] x2", "y = Softmax(x) x2 = Relu(y)", None),
        (11, "float[2, 3] y", "y = Softmax<axis = 0>(x)", "Softmax"),  # all axes from this one on
        (11, "float[2, 3] y", "y = Softmax(x)", None),
    ):
        made = onnx.parser.parse_model(
            text.format(
                opset, outputs, "s = Constant<value_ints = [6]>() " + nodes if opset > 12 else nodes
            )
        )
        assert without(made.SerializeToString()) == wanted, nodes


def test_a_softmax_in_a_function():
    """Exporters keep modules as functions: the search and the checker see through them alike."""
    made = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        graph (float[N, 2] x) => (float[N, 2] y) { h = Relu(x) y = own.Head(h) }
        <domain: "own", opset_import: ["" : 17]>
        Head (a) => (b) { c = Neg(a) b = Softmax <axis = 1> (c) }
        """
    ).SerializeToString()
    assert without(made) == "Softmax"
    opened = OpenModel(made, logits=True)
    assert opened.dropped == "Softmax"
    assert opened.run(np.array([[1, 2]], np.float32)).tolist() == [[-1, -2]]
