"""Multi-head attention as PyTorch's exporters write it: one graph for each, built by hand."""

import numpy as np
import onnx
import onnxruntime
import pytest

from stagecert.networks import bound, load
from stagecert.networks import operations as op
from stagecert_check import checker, graph  # noqa: F401  (the checker registers operators)
from stagecert_check.numbers import Arithmetic

TOKENS, WIDTH, HEADS = 3, 4, 2
DEPTH = WIDTH // HEADS

HEAD = """
<ir_version: 8, opset_import: ["" : 18]>
attention (float[1, 3, 4] x) => (float[1, 3, 4] y)
<float[4, 12] w = {%s}, float[12] b = {%s}, float[4, 4] o = {%s},
 int64[1] zero = {0}, int64[1] four = {4}, int64[1] eight = {8}, int64[1] twelve = {12},
 int64[1] two = {2}, int64[4] split = {0, 0, 2, 2}, int64[3] join = {0, 0, 4},
 float root = {1.4142135}, float fourth = {0.8408964}>
"""
# Query, key and value from one matrix, cut with Slice; the scores are divided.
SCRIPT = """{
    m = MatMul(x, w)   l = Add(m, b)
    q0 = Slice(l, zero, four, two)   k0 = Slice(l, four, eight, two)
    v0 = Slice(l, eight, twelve, two)
    q1 = Reshape(q0, split)   k1 = Reshape(k0, split)   v1 = Reshape(v0, split)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    s0 = MatMul(q, k)   s = Div(s0, root)   p = Softmax <axis = -1> (s)
    h = MatMul(p, v)
    t = Transpose <perm = [0, 2, 1, 3]> (h)   r = Reshape(t, join)   y = MatMul(r, o)
}"""
# scaled_dot_product_attention: both factors are scaled by a fourth root; Split instead of Slice.
DYNAMO = """{
    m = MatMul(x, w)   l = Add(b, m)
    q0, k0, v0 = Split <axis = 2, num_outputs = 3> (l)
    q1 = Reshape <allowzero = 0> (q0, split)   k1 = Reshape <allowzero = 0> (k0, split)
    v1 = Reshape <allowzero = 0> (v0, split)
    q2 = Transpose <perm = [0, 2, 1, 3]> (q1)
    k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    k3 = Transpose <perm = [0, 1, 3, 2]> (k2)
    q = Mul(q2, fourth)   k = Mul(k3, fourth)
    s = MatMul(q, k)   p = Softmax <axis = -1> (s)   h = MatMul(p, v)
    t = Transpose <perm = [0, 2, 1, 3]> (h)   r = Reshape <allowzero = 0> (t, join)
    y = MatMul(r, o)
}"""


def _model(body: str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = ((WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH))
    numbers = tuple(", ".join(f"{v:.4f}" for v in rng.normal(size=s).ravel()) for s in shapes)
    return onnx.parser.parse_model(HEAD % numbers + body)


@pytest.mark.parametrize("body", [SCRIPT, DYNAMO], ids=["script", "dynamo"])
def test_attention_of_both_exporters(body):
    model = _model(body)
    network = load(model)
    x = np.random.default_rng(1).normal(size=(4, TOKENS, WIDTH)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    truth = np.stack([np.ravel(np.asarray(session.run(None, {"x": one[None]})[0])) for one in x])
    np.testing.assert_allclose(np.asarray(network(x)), truth, rtol=1e-4, atol=1e-5)
    # Scores, exponentials of their differences, one reciprocal, and the values' shares.
    found = [
        getattr(node.operation, "kind", node.operation.label)
        for node in network.nodes
        if isinstance(node.operation, (op.Activation, op.Joint))
    ]
    assert found == ["product", "exp", "reciprocal", "product"]
    # The checker reads the same.
    program = graph.read(model.SerializeToString(), Arithmetic())
    kinds = [program.nodes[k].operation.kind for k in program.activations]  # type: ignore
    assert kinds == found


def test_bounds_of_both_forms_hold_and_agree():
    x = np.random.default_rng(1).normal(size=(1, TOKENS, WIDTH))
    low, high = x - 0.05, x + 0.05
    found = [bound(load(_model(body)), low, high, method="ibp").bound for body in (SCRIPT, DYNAMO)]
    np.testing.assert_allclose(*found, rtol=1e-3)
    points = np.random.default_rng(2).uniform(low, high, (500, TOKENS, WIDTH)).astype(np.float32)
    for body, least in zip((SCRIPT, DYNAMO), found, strict=True):
        assert np.all(np.asarray(load(_model(body))(points)) >= least - 1e-5)
