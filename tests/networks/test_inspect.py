"""`stagecert inspect` on supported, unsupported and unreadable models."""

import json
from importlib.resources import files

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from stagecert.cli import app
from stagecert.networks.importers.onnx.model import describe

GOOD = """
    <ir_version: 8, opset_import: ["" : 17]>
    graph (float[N, 3, 4] x) => (float[N, 5] y, float[N, 4] top)
    <float[12, 5] w = {WEIGHTS}, float[5] b = {1, 2, 3, 4, 5}, float half = {0.5}, float one = {1},
     float root = {1.4142135}>
    {
        [flat] f = Flatten(x)
        h = Gemm(f, w, b)
        shape = Constant <value_ints = [0, 5]> ()
        r = Reshape(h, shape)
        s = Div(r, root)
        e = Erf(s)
        a = Add(e, one)
        m = Mul(r, a)
        [last] y = Mul(m, half)
        top = ReduceMax <axes = [1], keepdims = 0> (x)
        unused = Relu(f)
    }
""".replace("WEIGHTS", ", ".join(["0.5"] * 60))


@pytest.fixture
def run(tmp_path, monkeypatch):
    # As wide as what is piped is: there, columns once vanished, or were three letters wide.
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(model, *options):
        path = tmp_path / "model.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        return CliRunner().invoke(app, ["inspect", str(path), *options], catch_exceptions=False)

    return invoke


@pytest.fixture
def good():
    return onnx.parser.parse_model(GOOD)


@pytest.fixture
def bad():
    return onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[N, 3] x) => (float[N, 3] y) {
            [soft] s = Hardmax(x)
            [relu] r = Relu(s)
            [top] v, i = TopK(r, k)
            [sum] t = Add(v, v)
            [red] y = Tanh(t)
        }
        """.replace("=> (float[N, 3] y) {", "=> (float[N, 3] y) <int64[1] k = {2}> {")
    )


def test_describe(good):
    found = describe(good)
    roles = [row.role for row in found.rows]
    assert roles == [
        "affine",
        "affine",
        "constant",
        "affine",
        "merged",
        "merged",
        "merged",
        "gelu",
        "affine",
        "max",
        "unused",
    ]
    assert found.refused == ()
    assert found.inputs == (("x", (1, 3, 4)),)
    assert found.outputs == (("y", (1, 5)), ("top", (1, 4)))
    assert found.parameters == 60 + 5 + 3
    assert found.neurons == 5 + 4
    assert found.rows[1].parameters == 65
    assert found.rows[1].shapes == ((1, 5),)


def test_relaxations():
    found = describe(
        onnx.parser.parse_model(
            """
            <ir_version: 8, opset_import: ["" : 17]>
            graph (float[N, 3] x) => (float[N, 3] y, float z) {
                s = Softmax(x)
                f = Floor(s)
                y = Mul(x, f)
                t = Transpose(y)
                z = MatMul(y, t)
            }
            """
        )
    )
    assert [row.role for row in found.rows] == [
        "exp, reciprocal", "floor", "product", "affine", "product"
    ]  # fmt: skip
    relaxations = [row.relaxation for row in found.rows]
    assert relaxations == ["hulls", "hull", "hull", "exact", "hulls"]
    assert [row.steps for row in found.rows] == [2, 1, 1, 0, 1]


def test_table(run, good):
    result = run(good)
    assert result.exit_code == 0
    assert "input x: 1 x 3 x 4" in result.stdout
    assert "output top: 1 x 4" in result.stdout
    line = next(line for line in result.stdout.splitlines() if "Gemm" in line)
    assert " ".join(line.split()) == "2 Gemm 1x5 65 affine exact"
    line = next(line for line in result.stdout.splitlines() if "gelu" in line)
    assert " ".join(line.split()) == "8 Mul 1x5 0 gelu hull"
    assert "68 parameters; 9 neurons" in result.stdout
    assert "0 unsupported nodes" in " ".join(result.stdout.split())


def test_unsupported_nodes_are_shown(run, bad):
    result = run(bad)
    assert result.exit_code == 1
    assert "Node 1, Hardmax 'soft': is nonlinear in several variables at once." in result.stdout
    assert "Node 3, TopK 'top': is not continuous." in result.stdout
    assert "2 unsupported nodes" in " ".join(result.stdout.split())
    # What comes after them is listed too.
    assert "Tanh" in result.stdout


def test_narrow(run, good, monkeypatch):
    """At 80 columns every node is one line as long as its role fits, with or without its name."""
    for node in good.graph.node:
        node.name = f"model.features.{node.output[0]}_of_a_long_path_in_some_module"
    table = run(good).stdout
    assert max(map(len, table.splitlines())) <= 80
    assert "2 Gemm 1x5 65 affine exact" in " ".join(table.split())
    assert "features" not in table
    monkeypatch.setenv("COLUMNS", "160")
    assert good.graph.node[1].name in run(good).stdout
    monkeypatch.setenv("COLUMNS", "80")
    bundled = files("stagecert") / "digits" / "transformer.onnx"
    table = run(bundled.read_bytes()).stdout
    for line in (
        "1 Conv 1x16x2x2 272 affine exact",
        "10 Unsqueeze 1x4x1x3x16 0 affine exact",
        "28 MatMul 1x2x4x4 0 product sum of planes",
        "40 Gelu 1x4x32 0 gelu hull",
    ):
        assert any(" ".join(found.split()) == line for found in table.splitlines()), line
    assert "5 hulls" in table  # of a layer normalisation


def test_json(run, good, bad):
    result = run(good, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["unsupported"] == 0
    assert len(found["rows"]) == 11
    assert all(row["supported"] for row in found["rows"])
    result = run(bad, "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert [row["supported"] for row in rows] == [False, True, False, None, None]
    assert [row["role"] for row in rows] == ["refused", "relu", "refused", "unknown", "unknown"]
    # Whether the rest is supported is not known, and not said to be.
    lines = run(bad).stdout.splitlines()
    for role, wanted in (
        ("relu", "hull"),
        ("unknown", "not known"),
        ("refused", "unsupported"),
    ):
        assert all(line.rstrip().endswith(wanted) for line in lines if f" {role} " in line)


def test_names_do_not_format_the_table(run, good):
    good.graph.node[0].name = "[red]\x1b[31m"
    result = run(good)
    assert "[red]?[31m" in result.stdout


def test_unreadable_files(run, tmp_path):
    result = run(b"rubbish")
    assert result.exit_code == 2
    assert "is no ONNX model" in result.stderr
    assert result.stdout == ""
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "missing.onnx")])
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


def test_large_model(run):
    """Shapes and counts are written out in full."""
    weights = onnx.numpy_helper.from_array(np.ones((1000, 1000), np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "g", [info("x", 1, [1, 1000])], [info("y", 1, [1, 1000])], [weights]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    assert "1,000,000 parameters" in run(model).stdout
