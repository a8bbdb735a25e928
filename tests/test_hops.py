"""How many files a call visits on its way to the answer: what a reader has to open, at the most.

The numbers are those of docs/architecture.md. They may fall; a change that raises one should have a
reason that a reader of the walk would accept.
"""

import inspect
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import stagecert
from stagecert import networks
from stagecert.verify import verify

SOURCES = str(Path(stagecert.__file__).parent.parent) + "/"
MOST = {"ibp": 15, "backward": 23}
MOST_OF_VERIFY = 58


def visited(call) -> list[str]:
    """The files below src of which a function ran, in any thread."""
    seen = set()

    def look(frame, event, _):
        code = frame.f_code
        # Bodies of modules and classes, which run when they are imported, are not optimised.
        runs = event == "call" and code.co_flags & inspect.CO_OPTIMIZED
        if runs and code.co_filename.startswith(SOURCES):
            seen.add(code.co_filename.removeprefix(SOURCES))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(seen)


@pytest.mark.parametrize("method", MOST)
def test_a_bound_visits_few_files(method):
    size = 11  # of no other test: what is traced already is not visited again
    network = networks.from_jax(lambda x: jax.nn.relu(x) @ jnp.ones(size), np.zeros(size))
    low, high = np.full((1, size), -1.0), np.ones((1, size))
    files = visited(lambda: networks.bound(network, low, high, method=method))
    assert "stagecert/networks/bounding/bounds.py" in files
    assert len(files) <= MOST[method], files


def test_a_verdict_visits_few_files():
    weights = np.random.default_rng(0).normal(size=(2, 12, 12)).astype(np.float32)
    helper = onnx.helper
    nodes = [
        helper.make_node("MatMul", ["X", "W0"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "W1"], ["Y"]),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 12]) for name in "XY"]
    stored = [onnx.numpy_helper.from_array(w, f"W{k}") for k, w in enumerate(weights)]
    graph = helper.make_graph(nodes, "dense", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    lines = [f"(declare-const {v}_{k} Real)" for v in "XY" for k in range(12)]
    lines += [f"(assert (<= X_{k} 0.01))(assert (>= X_{k} -0.01))" for k in range(12)]
    property = "\n".join([*lines, "(assert (>= Y_0 100))"])
    verdicts = []
    files = visited(lambda: verdicts.append(verify(model.SerializeToString(), property)))
    assert verdicts[0].checked
    assert "stagecert_check/checker.py" in files
    assert len(files) <= MOST_OF_VERIFY, files
