"""`stagecert demo`, and the network that it is about."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from sklearn.datasets import load_digits

import stagecert
from stagecert_check import check, properties

ROOT = Path(__file__).parent.parent
DIGITS = Path(stagecert.__file__).parent / "digits"
PROGRAM = [sys.executable, "-c", "from stagecert.cli import main; main()", "demo"]


def run(*arguments):
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    process = run("--out", tmp_path / "file")
    assert process.returncode == 2
    assert process.stderr == f"{tmp_path / 'file'} cannot be used as a folder: File exists.\n"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new"
    process = run("--json", "--out", out)
    assert process.returncode == 0, process.stderr
    return out, {line["file"]: line for line in json.loads(process.stdout)}


def test_answers(done):
    _, lines = done
    answers = {name[0]: line["answer"] for name, line in lines.items()}
    assert answers == {"a": "unsat", "b": "unsat", "c": "unsat", "d": "sat", "e": "unsat"}
    for line in lines.values():
        assert (line["certificate"] == "accepted") == (line["answer"] == "unsat")
        assert (line["counterexample"] is not None) == (line["answer"] == "sat")
        if line["bound"] is not None:
            assert line["bound"] <= line["met"] + 1e-5
            proven = line["bound"] > 0 or (line["how"] == "tree" and line["bound"] == 0)
            assert proven == (line["answer"] == "unsat")


def test_the_counterexample_replays(done):
    out, lines = done
    point = np.array(lines["d-violated.vnnlib"]["counterexample"]["inputs"], np.float32)
    session = onnxruntime.InferenceSession(out / "digits.onnx", providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"image": point.reshape(1, 1, 8, 8)})[0]
    assert properties.load(out / "d-violated.vnnlib").counterexample(point, outputs)


def test_certificates_belong_to_their_properties(done):
    out, _ = done
    model, proof = out / "digits.onnx", out / "a-small-radius.cert"
    assert check(model, out / "a-small-radius.vnnlib", proof).accepted
    assert not check(model, out / "b-larger-radius.vnnlib", proof).accepted


def test_bundled_files_are_what_the_script_writes():
    images, labels = load_digits(return_X_y=True)
    script = runpy.run_path(str(ROOT / "scripts" / "train_digits.py"))
    tests = (images[script["TRAINED_ON"] :] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    truth = labels[script["TRAINED_ON"] :]
    with np.load(DIGITS / "digits.npz") as file:
        assert np.array_equal(file["images"], tests)
        assert np.array_equal(file["labels"], truth)
    written = script["properties"](tests, truth)
    assert {p.stem: p.read_text() for p in DIGITS.glob("*.vnnlib")} == written
    assert sum(path.stat().st_size for path in DIGITS.iterdir()) < 200_000


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    process = run("--out", tmp_path / "file")
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
