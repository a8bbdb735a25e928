"""Einsum, LSTM, GRU, linear Resize and ScatterND: importer and checker against ONNX Runtime."""

from typing import Any, cast

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.networks import operations as op
from stagecert_check import checker, graph
from stagecert_check.bounds import Facts, lower_bounds
from stagecert_check.functions import Refused
from stagecert_check.numbers import Arithmetic

DRAW = np.random.default_rng(0)


def floats(*shape) -> np.ndarray:
    return DRAW.normal(size=shape).astype(np.float32) * 0.7


def single(operator, shapes, constants=(), outputs=("y",), opset=18, **attributes):
    """A model of one node; inputs are given by shapes, constants by (place, array)."""
    places = dict(constants)
    count = len(shapes) + len(places)
    rest, names, inputs, kept = iter(shapes), [], [], []
    for k in range(max(places, default=count - 1) + 1 if count else 0):
        if k in places:
            if places[k] is None:
                names.append("")
                continue
            kept.append(numpy_helper.from_array(places[k], f"c{k}"))
        else:
            inputs.append(helper.make_tensor_value_info(f"x{k}", TensorProto.FLOAT, next(rest)))
        names.append(f"c{k}" if k in places else f"x{k}")
    for shape in rest:
        names.append(f"x{len(names)}")
        inputs.append(helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, shape))
    node = helper.make_node(operator, names, list(outputs), **attributes)
    ends = [onnx.ValueInfoProto(name=name) for name in outputs if name]
    return helper.make_model(
        helper.make_graph([node], "g", inputs, ends, kept),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=8,
    )


def cells(gates: int, size: int, width: int, ways: int = 1, bias: bool = True) -> list:
    found = [(1, floats(ways, gates * size, width)), (2, floats(ways, gates * size, size))]
    return [*found, (3, floats(ways, 2 * gates * size))] if bias else found


NONE = [(4, None)]
MODELS = {
    "einsum, constant": single("Einsum", [(2, 3, 4)], [(1, floats(4, 5))], equation="bij,jk->bki"),
    "einsum, variables": single("Einsum", [(2, 3, 4), (2, 5, 4)], equation="bid,bjd->bij"),
    "einsum, constant first": single("Einsum", [(4, 2)], [(0, floats(3, 4))], equation="ij,jk->ik"),
    "einsum, dots": single("Einsum", [(2, 3, 4)], [(1, floats(4, 2))], equation="...j,jk->...k"),
    "einsum, implicit": single("Einsum", [(3, 4)], [(1, floats(4, 2))], equation="ij,jk"),
    "einsum, three": single(
        "Einsum", [(2, 3), (3, 2)], [(2, floats(2, 4))], equation="ab,bc,cd->ad"
    ),
    "einsum, summed": single("Einsum", [(2, 3, 2)], equation="abc->ca"),
    "einsum, outer": single("Einsum", [(3,), (2,)], equation="i,j->ji"),
    "einsum, entries": single("Einsum", [(3, 2), (3, 2)], equation="ij,ij->ij"),
    "lstm": single("LSTM", [(3, 1, 2)], cells(4, 3, 2), ("y", "h", "c"), hidden_size=3),
    "lstm, last state": single("LSTM", [(3, 2, 2)], cells(4, 2, 2), ("", "h"), hidden_size=2),
    "lstm, both ways": single(
        "LSTM", [(3, 1, 2)], cells(4, 2, 2, 2), ("y", "h"), hidden_size=2,
        direction="bidirectional",
    ),
    "lstm, initial constants": single(
        "LSTM", [(2, 1, 2)], [*cells(4, 2, 2), *NONE, (5, floats(1, 1, 2)), (6, floats(1, 1, 2))],
        hidden_size=2,
    ),
    "lstm, initial variables": single(
        "LSTM", [(2, 1, 2), (1, 1, 2), (1, 1, 2)], [*cells(4, 2, 2), *NONE], hidden_size=2,
    ),
    "gru": single("GRU", [(3, 1, 2)], cells(3, 2, 2), ("y", "h"), hidden_size=2),
    "gru, linear first": single(
        "GRU", [(3, 1, 2)], cells(3, 2, 2, 2), ("y",), hidden_size=2, linear_before_reset=1,
        direction="bidirectional",
    ),
    "gru, initial constants": single(
        "GRU", [(2, 1, 2)], [*cells(3, 2, 2), *NONE, (5, floats(1, 1, 2))], hidden_size=2,
        linear_before_reset=1,
    ),
    "gru, initial variables": single(
        "GRU", [(2, 1, 2), (1, 1, 2)], [*cells(3, 2, 2, bias=False), (3, None), *NONE],
        hidden_size=2,
    ),
    "rnn, backwards": single(
        "RNN", [(3, 1, 2)], cells(1, 2, 2), hidden_size=2, direction="reverse",
        activations=["Relu"],
    ),
    **{
        f"resize, {way}": single(
            "Resize", [(1, 2, 3, 4)],
            [(1, None), (2, None), (3, np.array([1, 2, 5, 6]))] if way != "asymmetric"
            else [(1, None), (2, np.array([1, 1, 2, 1.5], np.float32))],
            mode="linear", coordinate_transformation_mode=way,
        )
        for way in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
    },
    "resize, smaller": single(
        "Resize", [(1, 1, 4, 6)], [(1, None), (2, np.array([1, 1, 0.5, 0.5], np.float32))],
        mode="linear",
    ),
    "scatter, into constants": single(
        "ScatterND", [(2, 3)], [(0, floats(4, 3)), (1, np.array([[2], [-4]]))],
    ),
    "scatter, constants": single(
        "ScatterND", [(4, 3)], [(1, np.array([[0, 1], [3, 2]])), (2, floats(2))],
    ),
    "scatter, variables": single("ScatterND", [(4, 3), (2, 3)], [(1, np.array([[1], [3]]))]),
}  # fmt: skip


def shapes_of(model) -> list[tuple[int, ...]]:
    return [tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input]


def program_of(model):
    assert checker  # it registers the operators
    return graph.read(model.SerializeToString(), Arithmetic())


@pytest.mark.parametrize("name", MODELS)
def test_importer_and_checker_compute_what_onnx_runtime_does(name):
    model, draw = MODELS[name], np.random.default_rng(1)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    shapes = shapes_of(model)
    sizes = [int(np.prod(shape)) for shape in shapes]
    points = draw.uniform(-1, 1, (6, sum(sizes))).astype(np.float32)
    parts = np.split(points, np.cumsum(sizes)[:-1], axis=1)
    wanted = [
        np.concatenate([np.ravel(np.asarray(y)) for y in session.run(None, dict(zip(
            [i.name for i in model.graph.input],
            [part[k].reshape(shape) for part, shape in zip(parts, shapes, strict=True)],
            strict=True)))])
        for k in range(len(points))
    ]  # fmt: skip
    network = networks.load(model, batched=False)
    with jax.enable_x64(True):
        arguments = [
            part.astype(np.float64).reshape(-1, *shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        found = np.asarray(network(tuple(arguments) if len(arguments) > 1 else arguments[0]))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    program = program_of(model)
    facts = Facts(Arithmetic(), program, points.astype(float), points.astype(float)).derive()
    low, high = (
        np.concatenate([ends[k].reshape(len(points), -1) for k in program.outputs], axis=1)
        for ends in (facts.low, facts.high)
    )
    np.testing.assert_allclose(low, high, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(low, found, rtol=1e-9, atol=1e-9)
    # Both make the same activations, in the same order.
    made = [
        n.operation for n in network.nodes if isinstance(n.operation, (op.Activation, op.Joint))
    ]
    kinds = [x.kind if isinstance(x, op.Activation) else x.label for x in made]
    assert [cast(Any, program.nodes[k].operation).kind for k in program.activations] == kinds


@pytest.mark.parametrize(
    "name", ["einsum, variables", "lstm", "gru, linear first", "rnn, backwards"]
)
def test_bounds_hold_at_points_and_corners(name):
    model, draw = MODELS[name], np.random.default_rng(2)
    program = program_of(model)
    size = sum(int(np.prod(shape)) for shape in shapes_of(model))
    centre = draw.uniform(-1, 1, size)
    low, high = (centre - 0.4)[None], (centre + 0.4)[None]
    facts = Facts(Arithmetic(), program, low, high).derive()
    points = np.concatenate([
        draw.uniform(low, high, (100, size)), np.where(draw.random((100, size)) < 0.5, low, high)
    ])  # fmt: skip
    values = Facts(Arithmetic(), program, points, points).derive(passes=False)
    out = program.outputs[0]
    outputs = values.low[out].reshape(len(points), -1)
    rows = draw.normal(size=(10, outputs.shape[1]))
    shape = (-1, *program.nodes[out].shape)
    bounds = lower_bounds(
        facts, np.zeros(10, int), lambda some: {out: rows[some].reshape(shape)}, {}
    )
    assert np.all((outputs @ rows.T).min(axis=0) >= bounds - 1e-9)
    # They are not trivial either.
    assert np.all(bounds >= (outputs @ rows.T).min(axis=0) - 40)


REFUSED = {
    "a diagonal": single("Einsum", [(3, 3)], equation="ii->i"),
    "another clip": single("LSTM", [(2, 1, 2)], cells(4, 2, 2), hidden_size=2, clip=1.0),
    "another function": single(
        "GRU", [(2, 1, 2)], cells(3, 2, 2), hidden_size=2, activations=["HardSigmoid", "Tanh"]
    ),
    "sequences that end": single(
        "RNN", [(2, 1, 2)], [*cells(1, 2, 2), (4, np.array([1], np.int32))], hidden_size=2
    ),
    "cubes": single(
        "Resize", [(1, 1, 4, 4)], [(1, None), (2, np.array([1, 1, 2, 2], np.float32))], mode="cubic"
    ),
    # The importer took the sizes for those of the result.
    "sizes that are limits": single(
        "Resize", [(1, 1, 3, 4)], [(1, None), (2, None), (3, np.array([1, 1, 6, 12]))], opset=18,
        keep_aspect_ratio_policy="not_larger",
    ),
    "sizes of some axes": single(
        "Resize", [(1, 1, 3, 4)], [(1, None), (2, None), (3, np.array([6, 8]))], opset=18,
        axes=[2, 3],
    ),
    "sums": single(
        "ScatterND", [(4, 3), (2, 3)], [(1, np.array([[1], [1]]))], reduction="add"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_both(name):
    model = REFUSED[name]
    with pytest.raises(ProblemError):
        networks.load(model, batched=False)
    with pytest.raises(Refused):
        program_of(model)
