"""Long disjunctions and large networks: memory and work that grow with them, not with squares."""

import tracemalloc

import numpy as np
import pytest
from exact import dense, random_layers, vnnlib
from onnx import TensorProto, helper, numpy_helper

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.verify import Verification, verify
from stagecert.verify.models import needed
from stagecert.verify.queries import groups_of
from stagecert.verify.splitting import Splitter
from stagecert_check import properties
from stagecert_check.properties import Row


def disjunction(branches: int, rows: int = 1, limit: float = 0.0) -> str:
    """Branches with random rows on three outputs."""
    draw = np.random.default_rng(0)
    parts = []
    for _ in range(branches):
        of_branch = [
            f"(<= (+ (* {a:.4f} Y_0) (* {b:.4f} Y_1) (* {c:.4f} Y_2)) {limit:.3f})"
            for a, b, c in draw.normal(size=(rows, 3))
        ]
        parts.append(f"(and {' '.join(of_branch)})")
    return f"(or {' '.join(parts)})"


@pytest.mark.parametrize(("branches", "rows"), [(2000, 1), (1000, 3), (40, 2)])
def test_splitting_a_long_disjunction_takes_little_memory(branches, rows):
    """2,000 branches asked for 59.6 GiB: a table of boxes, points, cases and rows."""
    network = networks.load(dense(random_layers(0, (5, 20, 20, 3))))
    text = vnnlib([-1] * 5, [1] * 5, disjunction(branches, rows, -2), 3)
    network, groups = groups_of(network, properties.load(text))
    splitter = Splitter(network, groups, [np.ones(branches, bool)])
    splitter.step()  # which compiles
    tracemalloc.start()
    try:
        for _ in range(4):
            step = splitter.step()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(splitter.stack)
    assert step.violation is not None
    assert step.points is not None
    assert step.violation.shape == (*step.points.shape[:2], branches)
    assert peak < 400e6


def test_violations_are_those_of_the_cases():
    network = networks.load(dense(random_layers(3, (2, 8, 3))))
    property = properties.load(vnnlib([-1, -1], [1, 1], disjunction(30, 2, -0.5), 3))
    network, groups = groups_of(network, property)
    splitter = Splitter(network, groups, [np.ones(30, bool)])
    splitter.points = 3  # fewer than there are rows
    for _ in range(3):
        step = splitter.step()
    assert step.points is not None
    assert step.violation is not None
    assert step.points.shape[1] == 3
    outputs = np.asarray(network(step.points.reshape(-1, 2)))
    for c, case in enumerate(property.cases):
        values = [
            [sum(float(k) * y[i] for i, k in row.outputs) - float(row.bound) for y in outputs]
            for row in case.outputs
        ]
        scale = [float(groups[0].scaled[place].scale) for place in groups[0].places[c]]
        worst = np.max(np.array(values) * np.array(scale)[:, None], axis=0)
        np.testing.assert_allclose(step.violation[..., c].reshape(-1), worst, rtol=1e-4, atol=1e-5)


def test_answers_to_disjunctions_do_not_depend_on_how_many_points_are_tried(monkeypatch):
    from stagecert.verify import splitting

    model = dense(random_layers(0))
    answers = []
    for most in (splitting.POINT_NUMBERS, 1):
        monkeypatch.setattr(splitting, "POINT_NUMBERS", most)
        monkeypatch.setattr(splitting, "MIXED_NUMBERS", most)
        for limit in (-2, -0.6):
            text = vnnlib([-1, -1], [1, 1], disjunction(20, 2, limit), 3)
            answers.append(verify(model, text, 60).answer)
    assert answers[:2] == answers[2:]
    assert answers[0] == "unsat"


def test_what_is_known_so_far_is_told_without_comparing_rows(monkeypatch):
    """8,000 branches kept a run of ten seconds for a minute: each row was looked for."""
    run = Verification(
        dense(random_layers(0)), vnnlib([-1, -1], [1, 1], disjunction(300, 1, -50), 3), 60
    )
    assert run.run().answer == "unsat"
    compared = 0
    real = Row.__eq__

    def counted(self, other):
        nonlocal compared
        compared += 1
        return real(self, other)

    monkeypatch.setattr(Row, "__eq__", counted)
    verdict = run.so_far()
    assert len(verdict.cases) == 300
    assert compared == 0


def expanded(size: int):
    """A hundred bytes that make a network as wide as you like."""
    nodes = [
        helper.make_node("Expand", ["x", "n"], ["e"]),
        helper.make_node("Relu", ["e"], ["r"]),
        helper.make_node("ReduceMean", ["r"], ["y"], axes=[1], keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([1, size]), "n")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_networks_that_do_not_fit_are_refused_with_the_number():
    """2^23 relus took 13.6 GB, though one GiB was allowed."""
    text = vnnlib([-1], [1], "(>= Y_0 2)", 1)
    model = expanded(1 << 23)
    wanted = needed(networks.load(model))
    assert 2 < wanted < 3
    with pytest.raises(ProblemError, match=r"takes about 2\.\d GiB, but 1 GiB are .* --memory 3"):
        verify(model, text, 60)
    with pytest.raises(ProblemError, match=r"takes about \d\S* GiB, but 1e-08 GiB are") as error:
        verify(expanded(4), text, 60, memory=1e-8)
    assert "about 0.0 GiB" not in str(error.value)
    with pytest.raises(ProblemError, match="memory must be a positive number"):
        verify(expanded(4), text, 60, memory=0)
    assert verify(expanded(1 << 14), text, 60).answer == "unsat"
