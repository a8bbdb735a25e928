"""Activations as PyTorch's exporters spell them, written down node by node.

`default` is `torch.onnx.export(...)` of PyTorch 2.9 and later, which is `dynamo=True` before;
`unoptimised` is the same with `optimize=False`, and `script` is `dynamo=False`. Seen with PyTorch
2.13 for the opsets that it writes by default, and for 17 and 18, which earlier versions write. What
2.6, 2.7, 2.9, 2.12 and 2.15 write for these modules was read and compared with ONNX Runtime, too.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIZE = 6


class Graph:
    """A graph under construction: called with an operator and its inputs; numbers are constants."""

    def __init__(self, loose: bool = False):
        self.nodes, self.constants, self.loose = [], [], loose

    def __call__(self, operator: str, *inputs, **attributes) -> str:
        name = f"v{len(self.nodes)}"
        names = [x if isinstance(x, str) else self.number(x) for x in inputs]
        self.nodes.append(helper.make_node(operator, names, [name], **attributes))
        return name

    def number(self, value: float) -> str:
        """A constant; unoptimised graphs cast it to the type of the input."""
        if self.loose:
            node = helper.make_node("Constant", [], [f"c{len(self.nodes)}"], value_float=value)
            self.nodes.append(node)
            return self("CastLike", node.output[0], "x")
        array = np.array(value, np.float32)
        self.constants.append(numpy_helper.from_array(array, f"n{len(self.constants)}"))
        return self.constants[-1].name

    def shape(self, *lengths: int) -> str:
        """A constant of whole numbers."""
        name = f"n{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(lengths, np.int64), name))
        return name

    def model(self, output: str, opset: int) -> onnx.ModelProto:
        """The model of one input and this output."""
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, SIZE])
            for name in ("x", output)
        ]
        graph = helper.make_graph(self.nodes, "g", ends[:1], ends[1:], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        model.ir_version = 8
        return model


def softplus(g, x, beta=1.0, threshold=20.0):
    """nn.Softplus, by the default exporter; a beta of one is left out of optimised graphs."""
    plain = beta == 1 and not g.loose
    scaled = x if plain else g("Mul", x, beta)
    soft = g("Softplus", scaled)
    soft = soft if plain else g("Div", soft, beta)
    return g("Where", g("Greater", scaled, threshold), x, soft)


def softplus_script(g, x, beta=1.0):
    """By the other one, which knows no threshold."""
    return g("Softplus", x) if beta == 1 else g("Div", g("Softplus", g("Mul", x, beta)), beta)


def softshrink(g, x, limit=0.5):
    """nn.Softshrink."""
    far = g("Greater", g("Abs", x), limit)
    moved = g("Sub", x, g("Mul", g("Sign", x), limit))
    return g("Where", far, moved, g("Mul", x, 0.0))


def softshrink_script(g, x, limit=0.5):
    """nn.Softshrink."""
    above = g("Where", g("Greater", x, limit), g("Sub", x, limit), 0.0)
    below = g("Where", g("Less", x, -limit), g("Add", x, limit), 0.0)
    return g("Add", above, below)


def hardshrink(g, x, limit=0.5):
    """nn.Hardshrink."""
    return g("Where", g("LessOrEqual", g("Abs", x), limit), 0.0, x)


def hardshrink_script(g, x, limit=0.5):
    """nn.Hardshrink."""
    above = g("Cast", g("Greater", x, limit), to=TensorProto.BOOL)
    below = g("Cast", g("Less", x, -limit), to=TensorProto.BOOL)
    return g("Where", g("Or", above, below), x, 0.0)


def threshold(g, x, at=0.1, value=20.0):
    """nn.Threshold."""
    return g("Where", g("LessOrEqual", x, at), value, x)


def gelu_18(g, x):
    """nn.GELU, before ONNX had an operator for it."""
    return g("Mul", x, g("Mul", 0.5, g("Add", g("Erf", g("Div", x, 2**0.5)), 1.0)))


def gelu_17(g, x):
    """nn.GELU."""
    return g("Mul", g("Mul", x, g("Add", g("Erf", g("Div", x, 2**0.5)), 1.0)), 0.5)


def gelu_tanh_18(g, x):
    """nn.GELU(approximate="tanh")."""
    inner = g("Add", x, g("Mul", 0.044715, g("Pow", x, 3.0)))
    gate = g("Mul", 0.5, g("Add", g("Tanh", g("Mul", (2 / np.pi) ** 0.5, inner)), 1.0))
    return g("Mul", x, gate)


def gelu_tanh_17(g, x):
    """nn.GELU(approximate="tanh")."""
    inner = g("Add", x, g("Mul", 0.044715, g("Mul", x, g("Mul", x, x))))
    gate = g("Add", 1.0, g("Tanh", g("Mul", (2 / np.pi) ** 0.5, inner)))
    return g("Mul", 0.5, g("Mul", x, gate))


def plain(operator, **attributes):
    """One node."""
    return lambda g, x: g(operator, x, **attributes)


def log_sigmoid(g, x):
    """nn.LogSigmoid."""
    return g("Log", g("Sigmoid", x))


def mish_script(g, x):
    """nn.Mish."""
    return g("Mul", x, g("Tanh", g("Softplus", x)))


def _soft(x, beta=1.0, at=20.0):
    return np.where(beta * x > at, x, np.logaddexp(0, beta * x) / beta)


def _gelu(x):
    from scipy.special import erf

    return x * (1 + erf(x / 2**0.5)) / 2


def _gelu_tanh(x):
    return x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


T = float(np.float32(0.1))
# (module, exporter): (spelling, opset, kinds of activations, what it is in float64)
SPELLINGS = {
    ("Softplus()", "default"): (softplus, 20, ["reverting_softplus"], _soft),
    ("Softplus()", "unoptimised"): (softplus, 20, ["reverting_softplus"], _soft),
    ("Softplus()", "script"): (softplus_script, 17, ["softplus"], lambda x: np.logaddexp(0, x)),
    ("Softplus(beta=3, threshold=2)", "default"): (
        lambda g, x: softplus(g, x, 3.0, 2.0), 20, ["reverting_softplus"],
        lambda x: _soft(x, 3, 2),
    ),
    ("Softplus(beta=3, threshold=2)", "script"): (
        lambda g, x: softplus_script(g, x, 3.0), 17, ["softplus"],
        lambda x: np.logaddexp(0, 3 * x) / 3,
    ),
    ("LogSigmoid()", "all"): (log_sigmoid, 20, ["softplus"], lambda x: -np.logaddexp(0, -x)),
    ("Softshrink()", "default"): (
        softshrink, 20, ["broken_line"], lambda x: x - np.clip(x, -0.5, 0.5)
    ),
    ("Softshrink()", "script"): (
        softshrink_script, 17, ["broken_line"] * 2, lambda x: x - np.clip(x, -0.5, 0.5)
    ),
    ("Hardshrink()", "default"): (
        hardshrink, 20, ["broken_line"], lambda x: np.where(abs(x) > 0.5, x, 0)
    ),
    ("Hardshrink()", "script"): (
        hardshrink_script, 17, ["broken_line"], lambda x: np.where(abs(x) > 0.5, x, 0)
    ),
    ("Threshold(0.1, 20)", "default"): (
        threshold, 20, ["broken_line"], lambda x: np.where(x > T, x, 20)
    ),
    ("Mish()", "default"): (
        plain("Mish"), 20, ["mish"], lambda x: x * np.tanh(np.logaddexp(0, x))
    ),
    ("Mish()", "script"): (
        mish_script, 17, ["mish"], lambda x: x * np.tanh(np.logaddexp(0, x))
    ),
    ("GELU()", "opset 20"): (plain("Gelu"), 20, ["gelu"], _gelu),
    ("GELU()", "default, opset 18"): (gelu_18, 18, ["gelu"], _gelu),
    ("GELU()", "script, opset 17"): (gelu_17, 17, ["gelu"], _gelu),
    ("GELU('tanh')", "opset 20"): (
        plain("Gelu", approximate="tanh"), 20, ["gelu_tanh"], _gelu_tanh
    ),
    ("GELU('tanh')", "default, opset 18"): (gelu_tanh_18, 18, ["gelu_tanh"], _gelu_tanh),
    ("GELU('tanh')", "script, opset 17"): (gelu_tanh_17, 17, ["gelu_tanh"], _gelu_tanh),
}  # fmt: skip


def model_of(key) -> onnx.ModelProto:
    """The model of one activation."""
    spelling, opset, _, _ = SPELLINGS[key]
    graph = Graph(loose=key[1] == "unoptimised")
    return graph.model(spelling(graph, "x"), opset)


def table() -> str:
    """The spellings as a table in Markdown."""
    lines = ["| `torch.nn` | exporter | nodes | read as |", "|---|---|---|---|"]
    for (module, exporter), (_, _, kinds, _) in SPELLINGS.items():
        nodes = [node.op_type for node in model_of((module, exporter)).graph.node]
        lines.append(f"| `{module}` | {exporter} | {', '.join(nodes)} | `{', '.join(kinds)}` |")
    return "\n".join(lines)
