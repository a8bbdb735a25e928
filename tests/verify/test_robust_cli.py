"""The command `stagecert robust`: output, exit statuses, signals, and kill -9."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from exact import dense

import stagecert
from stagecert.errors import ProblemError
from stagecert.sweeps import Store

DIGITS = Path(stagecert.__file__).parent / "digits"
PROGRAM = [sys.executable, "-c", "from stagecert.cli import main; main()", "robust"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("robust")
    draw = np.random.default_rng(0)
    layers = [(draw.normal(size=(3, 4)), np.zeros(3))]
    model = dense(layers)
    (path / "model.onnx").write_bytes(model.SerializeToString())
    (output,) = model.graph.output
    model.graph.node.append(onnx.helper.make_node("Softmax", [output.name], ["end"], axis=1))
    output.name = "end"
    (path / "softmax.onnx").write_bytes(model.SerializeToString())
    images = draw.random((64, 4)).astype(np.float32)
    labels = np.argmax(images @ layers[0][0].T, axis=1)
    np.savez(path / "data.npz", x=images, y=labels)
    return path


def environment(folder):
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}


def command(model, data, out, *more):
    return [*PROGRAM, str(model), "--data", str(data), "--eps", "1/20", "--out", str(out), *more]


def run(folder, out, *more, **options):
    model = options.pop("model", "model.onnx")
    return subprocess.run(
        command(folder / model, folder / "data.npz", folder / out, *more),
        capture_output=True, text=True, env=environment(folder), timeout=120, check=False,
        **options,
    )  # fmt: skip


def test_several_radii_and_one_that_is_too_large(folder):
    # The last --eps counts.
    done = run(folder, "radii", "--limit", "4", "--eps", "1/255,8", model="softmax.onnx")
    assert done.returncode == 0, done.stderr
    # That is said of the model, not of each radius.
    assert done.stderr.count("ends in Softmax") == 1
    # The small one is fine.
    assert done.stderr.count("Warning") == 1
    assert "eps is 8, but pixels lie between 0 and 1" in done.stderr
    assert "Did you mean 8/255?" in done.stderr
    for name in ("report.html", "eps-1_255/report.html", "eps-8/results.csv"):
        assert (folder / "radii" / name).exists()
        assert str(folder / "radii" / name) in done.stdout  # it says where they are
    text = (folder / "radii" / "report.html").read_text()
    assert "certified accuracy" in text
    assert "href='eps-1_255/report.html'" in text
    done = run(folder, "radii", "--limit", "4", "--eps", "1/255,8", "--json", model="softmax.onnx")
    assert [one["configuration"]["eps"] for one in json.loads(done.stdout)] == ["1/255", "8"]
    assert json.loads(done.stdout)[1]["certified"] == 0


def test_summary_as_text_and_as_json(folder):
    done = run(folder, "out", "--limit", "20")
    assert done.returncode == 0, done.stderr
    for word in ("clean", "attacked", "certified", "20 images computed now, 0 before"):
        assert word in done.stdout
    assert len((folder / "out" / "results.csv").read_text().splitlines()) == 21
    done = run(folder, "out", "--json")
    assert done.returncode == 0, done.stderr
    assert "20 of 64 images are there already" in done.stderr
    summary = json.loads(done.stdout)
    assert summary.pop("seconds") > 0
    assert summary == json.loads((folder / "out" / "summary.json").read_text())
    assert summary["clean_accuracy"] == 1
    assert summary["complete"] is True
    done = run(folder, "out", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--eps=-1"], "eps must not be negative"),
        (["--clip", "0"], "clip must be a range"),
        (["--labels", "z"], "has no array 'z'. Its arrays: x, y."),
        (["--images", "y", "--labels", "y"], "images are int64"),
    ],
)
def test_bad_input(folder, more, message):
    done = run(folder, "bad", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "bad").exists()


def stored(out) -> int:
    try:
        with Store.reader(out) as store:
            return len(store)
    except ProblemError:
        return 0


def wait_for(process, out, rows: int) -> None:
    while process.poll() is None and stored(out) < rows:
        time.sleep(0.005)


def test_interrupts_leave_a_table_and_the_lock_holds_meanwhile(folder):
    out = folder / "interrupted"
    arguments = command(folder / "model.onnx", folder / "data.npz", out, "--batch", "1")
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(folder),
    )  # fmt: skip
    wait_for(process, out, 1)
    process.send_signal(signal.SIGSTOP)
    other = run(folder, "interrupted", "--batch", "1")
    assert other.returncode == 2
    assert "Another process is writing" in other.stderr
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "The same command goes on from there" in errors
    summary = json.loads((out / "summary.json").read_text())
    assert 1 <= summary["done"] < 64
    assert not summary["complete"]
    assert len((out / "results.csv").read_text().splitlines()) == summary["done"] + 1
    done = run(folder, "interrupted", "--batch", "1")
    assert done.returncode == 0
    assert "64 images" in done.stdout


@pytest.mark.slow
def test_kill_9_ten_times_in_the_middle_of_200_images(tmp_path):
    """The final table equals the uninterrupted one; storing a row twice would be an error."""
    more = ["--limit", "200", "--batch", "4", "--eps", "0.08"]

    def arguments(out):
        return command(DIGITS / "digits.onnx", DIGITS / "digits.npz", tmp_path / out, *more)

    options = {"env": environment(tmp_path), "stderr": subprocess.DEVNULL}
    done = subprocess.run([*arguments("whole"), "--quiet"], check=False, **options)
    assert done.returncode == 0
    draw = random.Random(0)
    before, counts = 0, []
    for turn in range(10):
        process = subprocess.Popen([*arguments("killed"), "--quiet"], **options)
        # Twice while starting, else when some more rows are there; then at any moment.
        if turn not in (0, 5):
            wait_for(process, tmp_path / "killed", before + draw.choice((1, 4, 8)))
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        now = stored(tmp_path / "killed")
        assert now >= before
        assert now % 4 == 0
        counts.append(now)
        before = now
    assert 0 < before < 200, counts
    assert len(set(counts)) >= 6, counts
    last = subprocess.run([*arguments("killed"), "--json"], capture_output=True, text=True,
                          check=False, env=environment(tmp_path))  # fmt: skip
    assert last.returncode == 0, last.stderr
    assert f"{before} of 200 images are there already" in last.stderr
    for name in ("results.csv", "counterexamples.npz", "summary.json"):
        whole, killed = (tmp_path / out / name for out in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )
