"""The command line as the VNN-LIB standard has it."""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from exact import dense
from onnx import numpy_helper
from typer.testing import CliRunner

import stagecert as sc
from stagecert.cli import app, standard
from stagecert.errors import ProblemError
from stagecert.networks.importers.onnx import model as importer
from stagecert.verify.replay import Counterexample
from stagecert_check import properties

QUERY = """(vnnlib-version <2.0>)
(declare-network f (declare-input A float32 [1,2]) (declare-hidden H real [2] "h0")
    (declare-output Y float32 [1]))
(declare-network g (equal-to f) (declare-input C float32 [1,2]) (declare-output Z float32 [1]))
(assert (and (>= A[0,0] -1) (<= A[0,0] 1) (>= A[0,1] -1) (<= A[0,1] 1)))
(assert (and (== C[0,0] A[0,0]) (== C[0,1] 0.5)))
(assert (>= (* Y[0] Y[0]) Z[0]))
"""
LAYERS = [([[1.0, 1.0], [1.0, -1.0]], [0.0, 0.0]), ([[1.0, -1.0]], [0.0])]
POINT = Counterexample(
    np.array([0.5, 0.25, 0.5, 0.5], np.float32),
    np.array([0.5, 1], np.float32),
    0,
    0.0,
    np.array([0.75, 0.25], np.float32),
)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "m.onnx").write_bytes(dense(LAYERS).SerializeToString())
    (tmp_path / "q.vnnlib").write_text(QUERY)
    return tmp_path / "m.onnx"


def test_networks_by_name(path):
    query = properties.load(QUERY)
    assert standard.networks([f"f={path}"], query) == [("f", path), ("g", path)]
    one = properties.load(QUERY[: QUERY.index("(declare-network g")] + "(assert (== A[0,0] 0))"
                          "(assert (== A[0,1] 0))")  # fmt: skip
    assert standard.networks([f"f={path}"], one) == path
    for given, reason in (
        ([], "needs --network f=FILE"),
        ([f"f={path}", f"g={path}"], "g: the property's network is equal to another"),
        ([f"f={path}", f"h={path}"], "h: the property's network is none of its"),
        ([f"f={path}"] * 2, "once for each"),
        (["f"], "give NAME=FILE"),
    ):
        with pytest.raises(ProblemError, match=reason):
            standard.networks(given, query)
    with pytest.raises(ProblemError, match=r"A is declared as float64, but .* has float32 there"):
        standard.networks([f"f={path}"], properties.load(QUERY.replace("float32", "float64")))


def test_assignments(tmp_path):
    query = properties.load(QUERY)
    lines = standard.assignment(query, POINT).splitlines()
    assert lines == [
        "A float32 [1,2]", "0.5", "0.25", "H real [2]", "0.75", "0.25", "Y float32 [1]", "0.5",
        "C float32 [1,2]", "0.5", "0.5", "Z float32 [1]", "1.0",
    ]  # fmt: skip
    standard.serialise(query, POINT, tmp_path / "new" / "folder")
    found = {}
    for file in (tmp_path / "new" / "folder").iterdir():
        tensor = onnx.TensorProto.FromString(file.read_bytes())
        found[file.name] = numpy_helper.to_array(tensor)
    assert set(found) == {f"{name}.pb" for name in "AHYCZ"}
    assert found["A.pb"].dtype == np.float32
    np.testing.assert_array_equal(found["A.pb"], [[0.5, 0.25]])
    np.testing.assert_array_equal(found["H.pb"], [0.75, 0.25])


def test_types_are_read_as_real():
    assert "declares float32. Proofs are in real" in (
        standard.types_that_are_not_real(properties.load(QUERY)) or ""
    )
    assert (
        standard.types_that_are_not_real(properties.load(QUERY.replace("float32", "Real"))) is None
    )


@pytest.mark.slow
def test_the_program(path, tmp_path):
    program = [sys.executable, "-m", "stagecert", "verify", str(tmp_path / "q.vnnlib")]
    more = ["--network", f"f={path}", "--timeout", "100"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*arguments):
        return subprocess.run(
            [*program, *arguments], capture_output=True, text=True, env=environment, check=False
        )

    done = run(*more)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[:2]) == (0, ["sat", "A float32 [1,2]"]), done.stderr
    assert "Proofs are in real arithmetic" in done.stderr
    done = run(*more, "--serialise-assignments", str(tmp_path / "point"))
    assert (done.stdout, len(list((tmp_path / "point").iterdir()))) == ("sat\n", 5), done.stderr
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "a property and --network" in done.stderr


def test_what_is_supported():
    runner = CliRunner()

    def said(*arguments):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.output.split("\n")[:-1]

    assert said("--name") == ["stagecert"]
    assert said("--version") == [f"stagecert {sc.__version__}"]
    assert said("supports", "--onnx-operators") == importer.supported()
    assert said("supports", "--onnx-element-types") == ["real"]
    assert said("supports", "--vnnlib-versions") == ["1.0", "2.0"]
    assert said("supports", "--arithmetic-complexity-theories")[-1] == "POLY"
    assert int(said("supports", "--onnx-opset-versions")[1]) >= 20
    assert runner.invoke(app, ["supports", "--nothing"]).exit_code == 2
