"""The importer's network against ONNX Runtime: faults are found and placed, rounding is none."""

import numpy as np
import pytest
from exact import dense, random_layers, vnnlib
from onnx import TensorProto, helper, numpy_helper

from stagecert.errors import Disagreement
from stagecert.networks.importers.onnx.model import CONVERTERS
from stagecert.verify import agreement
from stagecert.verify.models import OpenModel
from stagecert.verify.queries import groups_of
from stagecert_check import properties


def checked(model, size=2, outputs=3, low: float = -1, high: float = 1) -> None:
    text = vnnlib([low] * size, [high] * size, "(<= Y_0 0)", outputs)
    opened = OpenModel(model)
    _, groups = groups_of(opened.network, properties.load(text))
    agreement.check(opened, groups)


def graph_of(nodes, constants, size, kind=TensorProto.FLOAT):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, [1, size])],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("operator", "node"), [("Relu", "node 2 of 5, Relu"), ("Gemm", "node 1 of 5, Gemm")]
)
def test_a_planted_fault_is_placed(monkeypatch, operator, node):
    real = CONVERTERS[operator]

    def planted(call):
        if operator == "Relu":
            return CONVERTERS["Identity"](call)
        call.attributes["alpha"] = 1.0001
        return real(call)

    model = dense(random_layers(0))
    checked(model)
    monkeypatch.setitem(CONVERTERS, operator, planted)
    with pytest.raises(Disagreement, match=f"They part at {node}.*please report it"):
        checked(dense(random_layers(0)))


def test_the_last_of_many_layers_is_found(monkeypatch):
    nodes, value = [], "x"
    for k in range(40):
        nodes.append(
            helper.make_node("Tanh" if k == 33 else "Sigmoid", [value], [f"v{k}"], f"n{k}")
        )
        value = f"v{k}"
    nodes[-1].output[0] = "y"
    monkeypatch.setitem(CONVERTERS, "Tanh", CONVERTERS["Identity"])
    with pytest.raises(Disagreement, match="node 34 of 40, Tanh 'n33', which computes 'v33'"):
        checked(graph_of(nodes, {}, 2), outputs=2)


def test_rounding_is_no_fault():
    """Where everything cancels, float32 has no correct digit; that is no error of ours."""
    draw = np.random.default_rng(0)
    for seed in range(3):
        wild = [(w * 10.0 ** draw.integers(-3, 4), b * 10.0 ** draw.integers(-3, 4))
                for w, b in random_layers(seed, (8, 64, 64, 64, 64, 3))]  # fmt: skip
        checked(dense(wild), size=8)
    w = draw.normal(size=(4, 500)).astype(np.float32)
    twice = np.concatenate([w, -w * (1 + np.float32(1e-7))], axis=1)
    checked(dense([(np.concatenate([np.eye(500)] * 2), np.full(1000, 1e4)), (twice, np.zeros(4))]),
            size=500, outputs=4)  # fmt: skip


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE])
def test_sums_of_large_and_small_numbers(kind):
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    nodes = [
        helper.make_node("Add", ["x", "large"], ["sum"]),
        helper.make_node("Sub", ["sum", "large"], ["y"]),
    ]
    checked(graph_of(nodes, {"large": np.array([3e7], dtype)}, 2, kind), outputs=2)


def test_differences_of_activations_that_cancel():
    """No weight stands beside the rounded values, whose difference is nothing but rounding."""
    nodes = [
        helper.make_node("Mul", ["x", "tiny"], ["t"]),
        helper.make_node("Sigmoid", ["t"], ["a"]),
        helper.make_node("Neg", ["t"], ["u"]),
        helper.make_node("Sigmoid", ["u"], ["b"]),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    checked(graph_of(nodes, {"tiny": np.array(1e-7, np.float32)}, 2), outputs=2)


def test_numbers_that_are_too_large_or_too_small_for_float32():
    nodes = [
        helper.make_node("Mul", ["x", "first"], ["t"]),
        helper.make_node("Mul", ["t", "second"], ["y"]),
    ]
    for first, second in ((1e-30, 1e30), (1e30, 1e30), (1e30, 1e-30)):
        constants = {
            "first": np.array([first], np.float32),
            "second": np.array([second], np.float32),
        }
        checked(graph_of(nodes, constants, 2), outputs=2, low=1e-12, high=1e-9)


def test_a_lost_bias_is_a_fault_in_double_precision_too(monkeypatch):
    nodes = [helper.make_node("Add", ["x", "c"], ["y"])]
    model = graph_of(nodes, {"c": np.array([1e-9])}, 2, TensorProto.DOUBLE)
    checked(model, outputs=2)
    monkeypatch.setitem(CONVERTERS, "Add", lambda call: CONVERTERS["Identity"](call))
    with pytest.raises(Disagreement, match="node 1 of 1, Add"):
        checked(model, outputs=2)


def test_activations_that_onnx_runtime_rounds_inside_are_no_fault():
    """Celu of a small number is exp(x) - 1 in single precision, which loses most digits."""
    model = graph_of([helper.make_node("Celu", ["x"], ["y"])], {}, 2)
    checked(model, outputs=2, low=-3e-6, high=-1e-7)


def test_constants_that_onnx_runtime_rounds_are_no_fault():
    """1e4 + 1e-4 - 1e4 is 1e-4 to the importer and to the checker, and zero in single precision."""
    constants = {name: np.array([v], np.float32) for name, v in
                 (("large", 1e4), ("small", 1e-4), ("less", -1e4))}  # fmt: skip
    nodes = [
        helper.make_node("Add", ["large", "small"], ["a"]),
        helper.make_node("Add", ["a", "less"], ["b"]),
        helper.make_node("Mul", ["x", "small"], ["c"]),
        helper.make_node("Add", ["c", "b"], ["y"]),
    ]
    checked(graph_of(nodes, constants, 2), outputs=2)
