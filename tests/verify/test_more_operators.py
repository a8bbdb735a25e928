"""Properties of networks with products, waves, steps and softmax: proven through the gate."""

import numpy as np
import onnx
import pytest
from exact import vnnlib

from stagecert.verify import attack, verify
from stagecert.verify.complete import Complete


def _model(body: str, weights: np.ndarray) -> onnx.ModelProto:
    """A graph from two inputs to one output, after a first layer of three relus."""
    numbers = ", ".join(map(str, weights.ravel()))
    return onnx.parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[1, 2] x) => (float[1, 1] y)
        <float[2, 3] w = {{{numbers}}}, float half = {{0.5}}, float[1] last = {{1}},
         int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}> {{
            l = MatMul(x, w)
            h = Relu(l)
            a = Slice(h, zero, one, one)
            b = Slice(h, one, two, one)
            {body}
        }}
        """
    )


BODIES = {
    "product": ("y = Mul(a, b)", lambda h: h[0] * h[1]),
    "quotient": ("d = Add(b, half)  y = Div(a, d)", lambda h: h[0] / (h[1] + 0.5)),
    "wave": ("s = Sin(a)  c = Cos(b)  y = Add(s, c)", lambda h: np.sin(h[0]) + np.cos(h[1])),
    "steps": ("f = Floor(a)  s = Sign(b)  y = Add(f, s)", lambda h: np.floor(h[0]) + np.sign(h[1])),
    "roots": ("p = Add(a, half)  s = Sqrt(p)  m = Log(p)  y = Mul(s, m)",
              lambda h: np.sqrt(h[0] + 0.5) * np.log(h[0] + 0.5)),
    "softmax": ("s = Softmax(h)  y = Slice(s, zero, one, one)",
                lambda h: np.exp(h[0]) / np.exp(h).sum(axis=0)),
    "matrix product": ("t = Transpose(h)  y = MatMul(h, t)", lambda h: (h * h).sum(axis=0)),
    "normalisation": ("w1 = Constant <value_floats = [1.0, 1.0, 1.0]> ()"
                      "  n = LayerNormalization <epsilon = 0.5> (h, w1)"
                      "  y = Slice(n, zero, one, one)",
                      lambda h: (h[0] - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + 0.5)),
    "logarithm of a sum": ("y = ReduceLogSumExp <axes = [1]> (h)",
                           lambda h: np.log(np.exp(h).sum(axis=0))),
    "product of three": ("p = Add(h, half)  y = ReduceProd <axes = [1]> (p)",
                         lambda h: (h + 0.5).prod(axis=0)),
    "unit length": ("p = Add(h, half)  u = LpNormalization(p)  s = CumSum(u, one)"
                    "  y = Slice(s, one, two, one)",
                    lambda h: (h[0] + h[1] + 1) / np.linalg.norm(h + 0.5, axis=0)),
    "choice": ("c = Less(a, b)  e = Exp(a)  y = Where(c, e, b)",
               lambda h: np.where(h[0] < h[1], np.exp(h[0]), h[1])),
    "powers of two": ("base = Constant <value_float = 2.0> ()  p = Pow(base, b)  y = Sub(a, p)",
                      lambda h: h[0] - 2.0 ** h[1]),
}  # fmt: skip


QUICK = ("product", "steps")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BODIES],
)
def test_decided_both_ways(name):
    """Above the largest value on a fine grid there is nothing; below it there is."""
    body, function = BODIES[name]
    weights = np.array([[1.0, -0.5, 0.25], [0.5, 1.0, -1.0]], np.float32)
    model = _model(body, weights)
    grid = np.stack(np.meshgrid(*[np.linspace(0.1, 0.9, 81)] * 2), -1).reshape(-1, 2)
    most = function(np.maximum(grid @ weights, 0).T).max()
    low, high = (0.1, 0.1), (0.9, 0.9)
    found = verify(model, vnnlib(low, high, f"(>= Y_0 {most + 0.1:.6f})", 1), 120)
    assert (found.answer, found.checked) == ("unsat", True)
    found = verify(model, vnnlib(low, high, f"(>= Y_0 {most - 0.05:.6f})", 1), 120)
    assert found.answer == "sat"


def test_many_inputs_are_multiplied_without_compiling(monkeypatch):
    """What compiles for long, attacks included, comes after the checker's own bounds."""
    numbers = ", ".join(["0.05"] * 30)
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[1, 30] x) => (float[1, 1] y)
        <float[30, 1] w = {{{numbers}}}> {{
            l = MatMul(x, w)
            a = Relu(l)
            y = Mul(a, l)
        }}
        """
    )

    def never(*_):
        raise AssertionError("nothing is to be attacked")

    monkeypatch.setattr(attack, "descend", never)
    bounds, rough = [], Complete.rough
    monkeypatch.setattr(
        Complete, "rough", lambda *asked: bounds.append(rough(*asked)) or bounds[-1]
    )
    found = verify(model, vnnlib([0] * 30, [1] * 30, "(>= Y_0 2.3)", 1), 120)
    assert (found.answer, found.checked, len(bounds)) == ("unsat", True, 1)
