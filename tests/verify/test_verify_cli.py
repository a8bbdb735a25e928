"""The command `stagecert verify`: output, files, exit statuses, limits and signals."""

import gzip
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exact import dense, random_layers, vnnlib

from stagecert.verify import CaseBounds, Verdict
from stagecert.verify.replay import Counterexample

# The package's name for the function hides the module.
command = importlib.import_module("stagecert.cli.verify")
PROGRAM = [sys.executable, "-c", "from stagecert.cli import main; main()", "verify"]
LOW, HIGH = (-1, -1), (1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify")
    (path / "model.onnx").write_bytes(dense(random_layers(0)).SerializeToString())
    (path / "holds.vnnlib").write_text(vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3))
    (path / "fails.vnnlib").write_text(vnnlib(LOW, HIGH, "(<= Y_0 1000)", 3))
    # Wide enough that no method decides a property this close to the optimum within the tests.
    wide = [(np.random.default_rng(0).normal(size=(m, n)), np.zeros(m)) for n, m in
            ((20, 60), (60, 60), (60, 60), (60, 1))]  # fmt: skip
    (path / "hard.onnx").write_bytes(dense(wide).SerializeToString())
    (path / "hard.vnnlib").write_text(vnnlib([-1] * 20, [1] * 20, "(<= Y_0 -8000)", 1))
    return path


def environment(folder):
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}


def run(folder, *arguments, both=False, **options):
    arguments = [str(folder / a) if str(a).endswith((".onnx", ".vnnlib", ".gz")) else str(a)
                 for a in arguments]  # fmt: skip
    return subprocess.run(
        [*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, env=environment(folder),
        stderr=subprocess.STDOUT if both else subprocess.PIPE, timeout=120, check=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_search_that_had_not_begun_leaves_no_file_and_says_so(folder, more):
    file = folder / "not begun"
    limits = ("--timeout", "0.1", "--resume", file)
    done = run(folder, "hard.onnx", "hard.vnnlib", *limits, *more)
    assert done.returncode == 10
    assert f"The search had not begun: there is no file {file}." in done.stderr
    assert not file.exists()


def test_unsat_with_result_file_and_certificate(folder):
    result, proof = folder / "unsat.txt", folder / "proof.cert"
    done = run(folder, "model.onnx", "holds.vnnlib", "--result", result, "--certificate", proof)
    assert (done.returncode, done.stdout) == (0, "unsat\n"), done.stderr
    assert result.read_text() == "unsat\n"
    assert proof.stat().st_size > 0
    assert not list(folder.glob("*.part"))


def test_sat_is_followed_by_the_counterexample(folder):
    result = folder / "sat.txt"
    done = run(folder, "model.onnx", "fails.vnnlib", "--result", result, "--timeout", 60)
    assert done.returncode == 0
    number = r"[-+.e\d]+"
    pattern = rf"sat\n\(\(X_0 {number}\)\n\(X_1 {number}\)\n(\(Y_\d {number}\)\n?){{3}}\)\n"
    assert re.fullmatch(pattern, done.stdout)
    assert result.read_text() == done.stdout


def finished(monkeypatch, verdict, terminal=False, certificate=None) -> tuple[str, str]:
    """What a verdict prints, on standard output and on standard error."""
    streams = []
    for name in ("stdout", "stderr"):
        stream = io.StringIO()
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, name, stream)
        streams.append(stream)
    monkeypatch.setattr(command, "end", lambda code: None)
    command._Outcome(None, certificate, False, False).finish(verdict)
    return tuple(stream.getvalue() for stream in streams)


def verdict_of(answer, cases=(), counterexample=None) -> Verdict:
    return Verdict(answer, counterexample, cases, 1.0, "Because.")


def case_of(number, bound, nearest, refuted=False) -> CaseBounds:
    return CaseBounds(number, refuted, None, None, np.array([bound]), bound, -bound, nearest)


def test_splits_of_neurons_prove_no_gap():
    """Their bound of 0 stands for "above zero": the distance to it is no gap."""
    tree = replace(case_of(0, 0.0, 4.0, True), how="tree")
    assert verdict_of("unsat", (tree, case_of(1, 1.0, 3.0, True))).gap is None
    # A bound by other means that is as far as it goes.
    assert verdict_of("unsat", (replace(tree, proven=0.5), case_of(1, 1.0, 3.0, True))).gap == 2.5
    assert verdict_of("unknown", (case_of(0, -1.0, 3.0),)).gap == 4
    assert verdict_of("unknown", (case_of(0, -np.inf, 3.0),)).gap is None
    assert verdict_of("unknown", (case_of(0, np.nan, 3.0),)).gap is None
    assert verdict_of("unsat", ()).gap is None


def test_answers_other_than_unsat_say_that_they_have_no_certificate(monkeypatch):
    _, said = finished(monkeypatch, verdict_of("unknown"), certificate=Path("proof.cert"))
    assert "no file proof.cert: only unsat has a proof" in said
    _, said = finished(monkeypatch, verdict_of("unknown"))
    assert "certificate" not in said


def test_verdicts_show_themselves_in_a_line():
    known = verdict_of("unknown", (case_of(0, -1.0, 2.0), case_of(1, 1.0, 2.0, refuted=True)))
    assert repr(known) == "Verdict(unknown, 1 of 2 cases refuted, 1 s: Because.)"


def test_unknown_says_what_is_missing(monkeypatch):
    cases = (case_of(0, 0.5, 0.6, refuted=True), case_of(1, -0.25, 0.125), case_of(2, -0.5, 0.75))
    out, err = finished(monkeypatch, verdict_of("unknown", cases))
    assert out == "unknown\n"
    assert err.splitlines() == [
        "Because. 1 of 3 cases refuted, 1.0 s",
        "The weakest bound is -0.5 (case 2), 0.5 short of a proof; the input nearest to a "
        "counterexample misses by 0.125.",
    ]
    _, err = finished(monkeypatch, verdict_of("timeout", (case_of(0, -np.inf, np.inf),)))
    assert err.splitlines()[1:] == ["Case 0 has no bound yet."]
    _, err = finished(monkeypatch, verdict_of("unsat", cases[:1]))
    assert "short of" not in err


def test_long_counterexamples_are_cut_on_terminals_only(monkeypatch):
    point = Counterexample(np.zeros(784, np.float32), np.ones(10, np.float32), 0, 0.0)
    verdict = verdict_of("sat", counterexample=point)
    out, err = finished(monkeypatch, verdict, terminal=True)
    lines = out.splitlines()
    assert lines[:2] == ["sat", "((X_0 0.0)"]
    assert len(lines) == 26
    assert lines[15] == "... 770 inputs more: --result FILE, --json and pipes have all of it"
    assert lines[16:] == [f"(Y_{k} 1.0)" for k in range(9)] + ["(Y_9 1.0))"]
    assert err.startswith("Because.")
    out, _ = finished(monkeypatch, verdict)
    assert out == f"sat\n{point.text()}\n"


def test_the_summary_comes_before_the_counterexample(folder):
    done = run(folder, "model.onnx", "fails.vnnlib", both=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[-7:-4]] == ["sat", "ONNX", "((X_0"]


def test_files_that_cannot_be_written_are_told_before_the_work(folder):
    for option, path in (("--certificate", folder / "nowhere" / "proof"), ("--result", folder)):
        done = run(folder, "model.onnx", "absent.vnnlib", option, path)
        assert (done.returncode, done.stdout) == (2, "")
        # Named as given, and not the property that is not there either.
        assert done.stderr.startswith(f"{path} cannot be written: ")
        assert done.stderr.count("\n") == 1


def test_json_and_quiet(folder):
    packed = folder / "model.onnx.gz"
    packed.write_bytes(gzip.compress((folder / "model.onnx").read_bytes()))
    done = run(folder, "model.onnx.gz", "fails.vnnlib", "--json")
    said = json.loads(done.stdout)
    assert said["answer"] == "sat"
    assert len(said["counterexample"]["inputs"]) == 2
    assert said["counterexample"]["tolerance"] == 0
    assert said["cases"][0]["nearest"] < 0
    quiet = run(folder, "model.onnx", "holds.vnnlib", "--quiet")
    assert (quiet.stdout, quiet.stderr, quiet.returncode) == ("unsat\n", "", 0)


@pytest.mark.parametrize(
    ("model", "property", "message"),
    [
        ("absent.onnx", "holds.vnnlib", "absent.onnx"),
        ("model.onnx", "absent.vnnlib", "absent.vnnlib"),
        ("model.onnx", "broken.vnnlib", "broken.vnnlib"),
        ("broken.onnx", "holds.vnnlib", "ONNX"),
    ],
)
def test_bad_input(folder, model, property, message):
    (folder / "broken.vnnlib").write_text("(declare-const X_0 Real")
    (folder / "broken.onnx").write_bytes(b"not a model")
    done = run(folder, model, property, "--result", folder / "error.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "error.txt").read_text() == "error\n"


def test_the_time_limit_holds_also_while_compiling(folder):
    """Two seconds are over before anything is compiled."""
    begin = time.monotonic()
    done = run(folder, "hard.onnx", "hard.vnnlib", "--timeout", 2, "--result", folder / "t.txt")
    assert time.monotonic() - begin < 4
    assert (done.returncode, done.stdout) == (10, "timeout\n")
    assert (folder / "t.txt").read_text() == "timeout\n"


def _catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal, as Linux tells."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def _wait_for_handlers(process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not _catches(process.pid, signal.SIGTERM):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(4)
    assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_a_result(folder, number):
    result = folder / f"{number}.txt"
    process = subprocess.Popen(
        [*PROGRAM, str(folder / "hard.onnx"), str(folder / "hard.vnnlib"), "--json",
         "--result", str(result)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder),
    )  # fmt: skip
    try:
        _wait_for_handlers(process)
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 10
    assert json.loads(out)["answer"] == "unknown"
    assert result.read_text() == "unknown\n"


def test_a_signal_ends_the_process_though_nobody_reads(folder):
    """Neither its messages, nor is there a folder for its result: it went on for ever once."""
    gone = folder / "gone"
    gone.mkdir()
    process = subprocess.Popen(
        [*PROGRAM, str(folder / "hard.onnx"), str(folder / "hard.vnnlib"),
         "--result", str(gone / "result.txt")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(folder),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        _wait_for_handlers(process)
        process.stdout.close()
        process.stderr.close()
        gone.rmdir()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 2
    finally:
        process.kill()


def test_the_result_is_written_though_nobody_reads(folder):
    result = folder / "unread.txt"
    command = [*PROGRAM, folder / "model.onnx", folder / "holds.vnnlib", "--result", result]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(folder)
    )
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    assert process.wait(120) == 0
    assert result.read_text() == "unsat\n"
    result.unlink()
    words = " ".join(map(str, command[3:]))
    program = "from stagecert.cli import main; main()"
    closed = f"'{sys.executable}' -c '{program}' {words} 2>&- >&-"
    assert subprocess.run(closed, shell=True, env=environment(folder), check=False).returncode == 0
    assert result.read_text() == "unsat\n"


SLOW_WRITER = """
import os, sys, time
real = os.fsync
def fsync(handle):
    if "late.cert" in os.readlink(f"/proc/self/fd/{handle}"):
        print("writing", file=sys.stderr, flush=True)
        time.sleep(60)
    real(handle)
os.fsync = fsync
from stagecert.cli import main
main()
"""


def test_a_signal_while_the_certificate_is_written_leaves_the_answer(folder):
    """The answer stands; of the certificate there is nothing, not even a part."""
    proof, result = folder / "late.cert", folder / "late.txt"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, "verify", str(folder / "model.onnx"),
         str(folder / "holds.vnnlib"), "--certificate", str(proof), "--result", str(result)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == "writing":
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (4, "unsat\n")
    assert "late.cert was not written" in err
    assert result.read_text() == "unsat\n"
    assert [path for path in folder.iterdir() if "late.cert" in path.name] == []


def test_bad_options(folder):
    done = run(folder, "model.onnx", "holds.vnnlib", "--timeout", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--timeout must be positive" in done.stderr


def planted(work: str) -> list[str]:
    """The program with other work to do, which runs in the place of the verification."""
    script = f"""
import os, sys
from stagecert.verify import Verification
def run(self):
    print("working", file=sys.stderr, flush=True)
    {work}
Verification.run = run
from stagecert.cli import main
main()
"""
    return [sys.executable, "-c", script, "verify"]


# Minutes in C without releasing Python's lock, as in some parts of XLA's compiler.
HOLDS_THE_LOCK = "3 ** 10**9"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux only")


@linux
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_time_limit_holds_though_no_thread_can_run(folder, more):
    """On a GPU, 25 seconds became 47 while a program was compiled."""
    result = folder / "held.txt"
    command = [*planted(HOLDS_THE_LOCK), str(folder / "model.onnx"), str(folder / "holds.vnnlib"),
               "--timeout", "6", "--result", str(result), *more]  # fmt: skip
    begin = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(folder), timeout=60, check=False
    )
    assert time.monotonic() - begin < 8
    assert done.returncode == 10
    assert "working" in done.stderr
    assert "Time is up" in done.stderr
    answer = json.loads(done.stdout)["answer"] if more else done.stdout.strip()
    assert answer == "timeout"
    assert result.read_text() == "timeout\n"


@linux
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_work_that_is_killed_leaves_an_answer(folder, number):
    result = folder / "killed.txt"
    work = f"os.kill(os.getpid(), {int(number)})"
    command = [*planted(work), str(folder / "model.onnx"), str(folder / "holds.vnnlib"),
               "--result", str(result)]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(folder), timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "unknown\n")
    assert f"ended with the signal {number.name}" in done.stderr
    assert result.read_text() == "unknown\n"


@linux
def test_signals_end_work_that_no_thread_can_interrupt(folder):
    command = [*planted(HOLDS_THE_LOCK), str(folder / "model.onnx"), str(folder / "holds.vnnlib")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder)
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == "working":
            break
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - begin < 7
    assert (process.returncode, out) == (10, "unknown\n")
    assert "Interrupted" in err


@linux
def test_an_answer_on_its_way_is_not_overtaken(folder):
    """The child has the answer, but its reader is slow: the deadline is no reason to kill it."""
    command = [*planted("raise ValueError('y' * 300_000)"), str(folder / "model.onnx"),
               str(folder / "holds.vnnlib"), "--timeout", "5"]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder)
    )
    time.sleep(8)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (3, "unknown\n")
    assert len(err) > 300_000
