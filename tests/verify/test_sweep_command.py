"""`stagecert sweep`: the table, its files, resuming, interruptions and exit statuses.

The networks are linear or have one relu, so that the answers are known without any solver.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from exact import dense

import stagecert
from stagecert import networks, rigor, sweeps
from stagecert.errors import ProblemError
from stagecert.files import _cell
from stagecert.sweeps import InProcess, Item, Processes, Row, Store
from stagecert.verify.instances import read_lists
from stagecert.verify.judging import LATE, Judging, _Kept
from stagecert.verify.sweep import Sweep

DIGITS = Path(stagecert.__file__).parent / "digits"
PROGRAM = [sys.executable, "-c", "from stagecert.cli import main; main()", "sweep"]
# y = x0 + x1 and y = |x0| - x1 on boxes.
SUM = [(np.array([[1.0, 1.0]]), np.zeros(1))]
FOLD = [(np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), np.zeros(4)),
        (np.array([[1.0, 1, -1, 1]]), np.zeros(1))]  # fmt: skip


def property_text(low: float, high: float, at_least: float) -> str:
    """Counterexamples: inputs in [low, high]^2 whose output is at least a number."""
    lines = [f"(declare-const X_{k} Real)" for k in range(2)] + ["(declare-const Y_0 Real)"]
    for k in range(2):
        lines += [f"(assert (>= X_{k} {low}))", f"(assert (<= X_{k} {high}))"]
    return "\n".join([*lines, f"(assert (>= Y_0 {at_least}))"]) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep")
    for name, layers in (("sum", SUM), ("fold", FOLD)):
        (path / f"{name}.onnx").write_bytes(dense(layers).SerializeToString())
    # Over [0, 1]^2 the sum is at most 2 and the fold at most 1.
    for name, least in (("above-2", 2.5), ("above-1", 1.5), ("below-1", 0.5)):
        (path / f"{name}.vnnlib").write_text(property_text(0, 1, least))
    (path / "broken.vnnlib").write_text("(assert (")
    (path / "small.csv").write_text(
        "model,property,timeout,expected\n"
        "sum.onnx,above-2.vnnlib,60,unsat\n"
        "sum.onnx,above-1.vnnlib,60,\n"
        "fold.onnx,above-1.vnnlib,60,unsat\n"
        "fold.onnx,below-1.vnnlib,60,unsat\n"  # The list is wrong.
        "gone.onnx,above-1.vnnlib,60,\n"
        "sum.onnx,broken.vnnlib,60,sat\n"
        "sum.onnx,above-2.vnnlib,60,unsat\n"
    )
    return path


VERDICTS = ["unsat", "sat", "unsat", "sat", "error", "error", "unsat"]


def run(folder, *arguments, **options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True, text=True, env=environment, cwd=folder, timeout=300, check=False,
        **options,
    )  # fmt: skip


def table(out) -> list[dict]:
    with (out / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def swept(folder):
    """A sweep with certificates; what it printed, and where it is."""
    return run(folder, "small.csv", "--out", "out", "--certificates"), folder / "out"


def test_verdicts_and_exit_status(swept):
    done, out = swept
    # One of the known answers is contradicted.
    assert done.returncode == 1, done.stderr
    rows = table(out)
    assert [row["verdict"] for row in rows] == VERDICTS
    assert [row["wrong"] for row in rows] == ["false"] * 3 + ["true"] + ["false"] * 3
    assert rows[4]["note"] == "gone.onnx cannot be read: No such file or directory."
    assert rows[5]["note"].startswith("broken.vnnlib: ")
    assert re.search(r"small +3 +2 +0 +0 +2", done.stdout)
    assert "5 answers are known; 1 verdicts are wrong." in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["verdicts"] == {"unsat": 3, "sat": 2, "unknown": 0, "timeout": 0, "error": 2}
    assert (summary["wrong"], summary["complete"]) == (1, True)


def test_bounds_hold_and_gaps_are_theirs(swept):
    _, out = swept
    # The least violations, at corners of the box where every attack ends: 2.5 - 2, 1.5 - 2, ...
    for row, truth in zip(table(out)[:4], (0.5, -0.5, 0.5, -0.5), strict=True):
        if row["verdict"] == "unsat":
            # Refuted over the whole box, before any attack: nothing was met.
            assert truth - 1e-6 < float(row["bound"]) <= truth
            assert (row["nearest"], row["gap"]) == ("", "")
        else:
            assert float(row["nearest"]) == pytest.approx(truth, abs=1e-6)


def test_the_table_can_be_a_parquet_file(swept, folder):
    import pyarrow.parquet

    _, out = swept
    done = run(folder, "small.csv", "--out", "out", "--certificates", "--format", "parquet")
    assert "results.parquet" in done.stdout
    found = pyarrow.parquet.read_table(out / "results.parquet").to_pylist()
    assert [{name: _cell(value) for name, value in row.items()} for row in found] == table(out)
    assert run(folder, "small.csv", "--out", "out", "--format", "xlsx").returncode == 2


def test_certificates_are_accepted_and_belong_to_their_instance(swept, folder):
    _, out = swept
    rows = table(out)
    assert [row["certificate"] for row in rows] == [
        "accepted",
        "",
        "accepted",
        "",
        "",
        "",
        "accepted",
    ]
    for row in (rows[0], rows[2]):
        files = folder / row["model"], folder / row["property"], out / row["file"]
        assert rigor.check(*files).accepted
    # The two have different models.
    assert not rigor.check(folder / rows[2]["model"], folder / rows[2]["property"],
                           out / rows[0]["file"]).accepted  # fmt: skip
    assert rows[0]["file"] == rows[6]["file"]


def test_counterexamples_are_ones(swept, folder):
    _, out = swept
    for row, least in ((table(out)[1], 1.5), (table(out)[3], 0.5)):
        text = (out / row["file"]).read_text()
        assert text.startswith("sat\n((X_0 ")
        x = [float(v) for v in re.findall(r"\(X_\d+ (\S+)\)", text)]
        assert all(0 <= v <= 1 for v in x)
        session = onnxruntime.InferenceSession(folder / row["model"])
        (y,) = map(np.asarray, session.run(None, {"x": np.array([x], np.float32)}))
        assert y.item() >= least


def test_times_are_beside_the_table(swept):
    _, out = swept
    with (out / "times.csv").open(newline="") as file:
        times = list(csv.DictReader(file))
    assert [row["index"] for row in times] == [str(k) for k in range(7)]
    assert all(float(row["seconds"]) >= 0 for row in times)
    assert [bool(row["checking"]) for row in times] == [v == "unsat" for v in VERDICTS]


def test_the_same_command_computes_nothing_again(swept, folder):
    _, out = swept
    before = {name: (out / name).read_bytes() for name in ("results.csv", "times.csv")}
    again = run(folder, "small.csv", "--out", "out", "--certificates", "--json")
    assert again.returncode == 1
    # The two equal lines are one item.
    assert "6 of 6 instances are there already." in again.stderr
    assert json.loads(again.stdout) == json.loads((out / "summary.json").read_text())
    assert {name: (out / name).read_bytes() for name in before} == before
    other = Sweep(read_lists([folder / "small.csv"]))
    with pytest.raises(ProblemError, match="certificates: True there, False now"):
        other.store(out)


def test_processes_give_the_same_table(swept, folder):
    _, out = swept
    done = run(folder, "small.csv", "--out", "processes", "--certificates", "--workers", "2",
               "--worker-memory", "16", "--no-report", "--quiet")  # fmt: skip
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert (folder / "processes" / "results.csv").read_bytes() == (out / "results.csv").read_bytes()
    assert not (folder / "processes" / "report.html").exists()
    for path in out.glob("c*/*"):
        other = folder / "processes" / path.relative_to(out)
        assert other.read_bytes() == path.read_bytes()


def test_bad_input(folder):
    (folder / "bad.csv").write_text("sum.onnx,above-1.vnnlib,soon\n")
    done = run(folder, "bad.csv", "--out", "bad")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad.csv, line 1: the timeout must be" in done.stderr
    with pytest.raises(ProblemError, match="memory must be a positive number"):
        sweep_of(folder, "sum.onnx,above-1.vnnlib,5\n", memory=0)
    with pytest.raises(ProblemError, match="seed must be at least 0"):
        sweep_of(folder, "sum.onnx,above-1.vnnlib,5\n", seed=-1)


def test_a_report_that_cannot_be_written_ends_the_command(folder):
    (folder / "one.csv").write_text("sum.onnx,above-2.vnnlib,60\n")
    (folder / "blocked" / "report.html").mkdir(parents=True)
    done = run(folder, "one.csv", "--out", "blocked")
    assert done.returncode == 2
    assert "report.html" in done.stderr
    assert (folder / "blocked" / "results.csv").exists()


def test_interrupted_sweeps_leave_a_table(folder):
    shutil.copy(DIGITS / "digits.onnx", folder)
    shutil.copy(DIGITS / "e-hard.vnnlib", folder)
    (folder / "long.csv").write_text(
        "sum.onnx,above-1.vnnlib,60\ndigits.onnx,e-hard.vnnlib,600\nsum.onnx,above-2.vnnlib,60\n"
    )
    out = folder / "interrupted"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    process = subprocess.Popen(
        [*PROGRAM, "long.csv", "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while _stored(out) < 1:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "1 of 3 instances are done" in said
    assert [row["verdict"] for row in table(out)] == ["sat"]
    assert "1 of 3 instances are done." in (out / "report.html").read_text()


def _stored(out) -> int:
    try:
        with Store.reader(out) as store:
            return len(store)
    except ProblemError:
        return 0


# -- without the command ---------------------------------------------------------------------------


def sweep_of(folder, text, **options):
    path = folder / "some.csv"
    path.write_text(text)
    return Sweep(read_lists([path]), **options)


def test_a_changed_list_reuses_what_is_known(folder, tmp_path):
    first = sweep_of(folder, "gone.onnx,above-1.vnnlib,60\nsum.onnx,broken.vnnlib,60\n")
    with first.store(tmp_path) as store:
        first.run(store)
    shutil.copy(folder / "broken.vnnlib", folder / "copy.vnnlib")
    second = sweep_of(
        folder,
        "sum.onnx,none.vnnlib,60\nsum.onnx,copy.vnnlib,60\nsum.onnx,broken.vnnlib,61\n"
        "gone.onnx,above-1.vnnlib,60\n",
    )
    new = []
    with second.store(tmp_path) as store:
        second.run(store, new.extend)
        lines = list(second.lines(store))
    # Files count by what they contain, and another timeout is another instance.
    assert [row.place for row in new] == [0, 2]
    assert [line.data["index"] for line in lines] == [0, 1, 2, 3]
    assert {line.data["verdict"] for line in lines} == {"error"}


def test_a_file_that_changes_during_the_sweep_is_an_error(folder, tmp_path):
    shutil.copy(folder / "sum.onnx", tmp_path)
    shutil.copy(folder / "above-1.vnnlib", tmp_path / "p.vnnlib")
    work = sweep_of(tmp_path, "sum.onnx,p.vnnlib,60\n")
    (tmp_path / "p.vnnlib").write_text(property_text(0, 1, 0.1))
    with work.store(None) as store:
        work.run(store)
        (line,) = work.lines(store)
    assert line.data["verdict"] == "error"
    assert "p.vnnlib has changed since the sweep began" in line.data["note"]


def test_an_answer_that_comes_too_late_is_none(folder, monkeypatch):
    module = sys.modules["stagecert.verify.verify"]

    class Slow(module.Verification):
        def run(self):
            time.sleep(0.3)
            return module.Verdict("unsat", None, (), 0.3, "")

    monkeypatch.setattr(module, "Verification", Slow)
    work = sweep_of(folder, "sum.onnx,above-2.vnnlib,0.2\nsum.onnx,above-2.vnnlib,20\n")
    with work.store(None) as store:
        work.run(store)
        late, early = work.lines(store)
    assert (late.data["verdict"], early.data["verdict"]) == ("timeout", "unsat")
    assert "came too late" in late.data["note"]


def test_exceptions_are_rows_until_they_are_tried_again(folder, monkeypatch):
    module = sys.modules["stagecert.verify.verify"]

    class Broken(module.Verification):
        def run(self):
            raise FloatingPointError("overflow")

    monkeypatch.setattr(module, "Verification", Broken)
    work = sweep_of(folder, "sum.onnx,above-2.vnnlib,20\n")
    with work.store(None) as store:
        work.run(store)
        (line,) = work.lines(store)
        assert (line.data["verdict"], line.data["note"]) == (
            "error",
            "FloatingPointError: overflow",
        )
        monkeypatch.undo()
        work.run(store)
        assert [line.data["verdict"] for line in work.lines(store)] == ["error"]
        work.forget_errors(store)
        work.run(store)
        assert [line.data["verdict"] for line in work.lines(store)] == ["unsat"]
        work.forget_errors(store)
        assert len(store) == 1


class Sleeper:
    """Work that takes too long."""

    def prepare(self):
        return self.rows

    def rows(self, items):
        time.sleep(60)
        return []

    def failed(self, item, why):
        return Row(item.key, item.place, {"why": why})


def test_workers_that_are_ended_for_their_time_count_as_timeouts():
    with Store(None, {}) as store:
        sweeps.run([Item(0, "a")], Sleeper(), store, batch=1, engine=Processes(1), timeout=0.3)
        (row,) = store.rows()
    assert LATE.fullmatch(row.data["why"])
    judging = Judging({}, {}, check=True, certificates=False, seed=0, memory=1.0)
    late = judging.failed(Item(0, "a"), row.data["why"])
    assert late.data["verdict"] == "timeout"
    assert late.seconds == 0.3  # what it took, not nothing
    died = judging.failed(Item(0, "a"), "its process was killed by SIGKILL")
    assert (died.data["verdict"], died.data["note"]) == (
        "error",
        "its process was killed by SIGKILL",
    )


def test_workers_keep_what_they_used_last():
    kept = _Kept(10)
    for name, size in (("a", 4), ("b", 4)):
        kept.keep(name, name.upper(), size)
    assert kept["a"] == "A"
    kept.keep("c", "C", 4)
    assert ["a" in kept, "b" in kept, "c" in kept] == [True, False, True]
    # Whatever is too large by itself is kept as long as it is used.
    kept.keep("d", "D", 100)
    assert kept["d"] == "D"
    assert "c" not in kept


def test_models_are_read_once(folder, monkeypatch):
    opened = []
    load = networks.load
    monkeypatch.setattr(networks, "load", lambda path: opened.append(path) or load(path))
    work = sweep_of(folder, "".join(f"sum.onnx,none-{k}.vnnlib,5\n" for k in range(3)))
    with work.store(None) as store:
        work.run(store, engine=InProcess())
    assert len(opened) == 1
