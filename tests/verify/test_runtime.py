"""ONNX Runtime in a process of its own: the same numbers, and crashes that are only errors."""

import gc
import os
import signal
import subprocess
import sys
import time

import numpy as np
import onnxruntime
import pytest
from exact import dense, random_layers, vnnlib
from onnx import TensorProto, helper, numpy_helper

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.verify import verify
from stagecert.verify.runtime import RUNTIME, Runtime, Session


@pytest.fixture
def runtime():
    made = Runtime()
    yield made
    made.close()


def model_of(nodes, *, inputs=(("x", [1, 2]),), kind=TensorProto.FLOAT, constants=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs],
        [helper.make_tensor_value_info("y", kind, None)],
        list(constants),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def crashing():
    """An optional input of Sum is left out, which its reader in ONNX Runtime does not expect."""
    return model_of([helper.make_node("Sum", ["x", "", "x"], ["y"])])


def test_the_numbers_are_those_of_onnx_runtime_here(runtime, tmp_path):
    model = dense(random_layers(0))
    points = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    here = onnxruntime.InferenceSession(model.SerializeToString())
    wanted = np.concatenate([np.asarray(here.run(None, {"x": point[None]})[0]) for point in points])
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for source in (model, model.SerializeToString(), path, str(path)):
        found = Session(source, runtime).run(points)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted)


def test_an_input_without_axes(runtime):
    """It was handed on as a number, which ONNX Runtime does not take."""
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], inputs=(("x", []),))
    found = Session(model, runtime).run(np.array([[-1.0], [2.0]], np.float32))
    np.testing.assert_array_equal(found, [[0.0], [2.0]])


def test_several_inputs_and_types(runtime):
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    model = model_of(nodes, inputs=(("a", [2, 2]), ("b", [2])), kind=TensorProto.DOUBLE)
    session = Session(model, runtime)
    assert session.inputs == [("a", (2, 2), np.float64), ("b", (2,), np.float64)]
    found = session.run(np.array([[1, 2, 3, 4, 10, 20.5]]))
    assert found.dtype == np.float64
    assert found.tolist() == [[11, 22.5, 13, 24.5]]
    with pytest.raises(ProblemError, match="takes 6 numbers, but the property 5"):
        session.run(np.zeros((1, 5)))


def test_a_crash_is_an_error_and_other_models_are_opened_again(runtime):
    """It was the end of the whole program, without an answer."""
    good = Session(dense(random_layers(0)), runtime)
    before = good.run(np.zeros((1, 2)))
    with pytest.raises(ProblemError, match=r"ONNX Runtime crashes when it \w+ this model \(SIG"):
        Session(crashing(), runtime).run(np.zeros((1, 2)))
    np.testing.assert_array_equal(good.run(np.zeros((1, 2))), before)
    assert runtime.life == 2


def test_errors_of_onnx_runtime_are_errors(runtime):
    with pytest.raises(ProblemError, match="cannot load the model"):
        Session(b"no model", runtime)
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    shape = numpy_helper.from_array(np.array([3, 3]), "s")
    with pytest.raises(ProblemError, match=r"ONNX Runtime cannot (load|run) the model"):
        Session(model_of(nodes, constants=[shape]), runtime).run(np.zeros((1, 2)))
    assert runtime.life == 1


def test_models_are_closed_with_their_owners(runtime):
    kept = Session(dense(random_layers(0)), runtime)
    others = [Session(dense(random_layers(1)), runtime) for _ in range(3)]
    assert not runtime.unwanted
    del others
    gc.collect()
    assert len(runtime.unwanted) == 3
    kept.run(np.zeros((1, 2)))
    assert not runtime.unwanted


def test_an_interrupted_question_does_not_get_the_next_answer(runtime, monkeypatch):
    from stagecert.verify import runtime as module

    session = Session(dense(random_layers(0)), runtime)
    wanted = session.run(np.ones((1, 2)))

    def interrupted(stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(np.zeros((1, 2)))
    np.testing.assert_array_equal(session.run(np.ones((1, 2))), wanted)


def test_memory_is_limited(runtime):
    """12 GiB of zeros from a file of a hundred bytes."""
    size = numpy_helper.from_array(np.array([3 << 30]), "n")
    nodes = [
        helper.make_node("Expand", ["x", "n"], ["big"]),
        helper.make_node("ReduceMax", ["big"], ["y"]),
    ]
    session = Session(model_of(nodes, inputs=(("x", [1]),), constants=[size]), runtime)
    with pytest.raises(ProblemError, match=r"ONNX Runtime cra|ONNX Runtime cannot run"):
        session.run(np.zeros((1, 1)))


def _alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="asks Linux for processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_parent_and_not_before(number):
    """A signal for the whole group is the parent's business: the process waits for its end."""
    script = (
        "import sys, time\n"
        "from stagecert.verify.runtime import RUNTIME\n"
        "RUNTIME.start()\n"
        "try:\n"
        "    print(RUNTIME._process.pid, flush=True)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt: print(RUNTIME._process.poll(), flush=True)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert _alive(child)
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)
        assert parent.stdout.readline() == "None\n"
    else:
        parent.kill()
    parent.wait(30)
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_verify_says_that_onnx_runtime_crashes(monkeypatch):
    """The importer refuses this model by now; the next one that crashes will not be refused."""
    with pytest.raises(ProblemError, match=r"Sum '' lacks an input"):
        verify(crashing(), vnnlib([0, 0], [1, 1], "(<= Y_0 1)", 2), 30)
    linear = networks.load(dense([(np.eye(2), [0, 0])]))
    monkeypatch.setattr(networks, "load", lambda *_: linear)
    with pytest.raises(ProblemError, match=r"ONNX Runtime crashes"):
        verify(crashing(), vnnlib([0, 0], [1, 1], "(<= Y_0 1)", 2), 30)
    monkeypatch.undo()
    # Nothing is wrong with the next one.
    model = dense(random_layers(1))
    assert verify(model, vnnlib([-1, -1], [1, 1], "(<= Y_0 100)", 3), 30).answer == "sat"
    assert RUNTIME.life >= 2
