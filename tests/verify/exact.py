"""Small networks as ONNX models, and the truth about them by enumerating activation patterns."""

import itertools

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from scipy.optimize import linprog


def dense(layers) -> onnx.ModelProto:
    """A model of dense layers (weights (out, in), biases) with relu between them."""
    nodes, constants = [], []
    value = "x"
    for k, (w, b) in enumerate(layers):
        constants.append(numpy_helper.from_array(np.asarray(w, np.float32), f"w{k}"))
        constants.append(numpy_helper.from_array(np.asarray(b, np.float32), f"b{k}"))
        last = k == len(layers) - 1
        nodes.append(
            helper.make_node(
                "Gemm", [value, f"w{k}", f"b{k}"], ["y" if last else f"z{k}"], transB=1
            )
        )
        if not last:
            nodes.append(helper.make_node("Relu", [f"z{k}"], [f"h{k}"]))
            value = f"h{k}"
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", np.shape(layers[0][0])[1]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", len(layers[-1][1])])],
        constants,
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


def random_layers(seed: int, sizes=(2, 5, 4, 3)):
    """Random layers whose weights are float32 numbers."""
    draw = np.random.default_rng(seed)
    return [
        (
            draw.normal(size=(m, n)).astype(np.float32) / np.float32(np.sqrt(n)),
            draw.normal(size=m).astype(np.float32) * np.float32(0.3),
        )
        for n, m in itertools.pairwise(sizes)
    ]


def smallest_violation(layers, lower, upper, rows) -> float:
    """The minimum over the box of the largest a.y + c.x - b; `rows` are (a, c, b).

    Every activation pattern is a linear program.
    """
    hidden = [len(b) for _, b in layers[:-1]]
    size = len(lower)
    least = np.inf
    for flat in itertools.product((0, 1), repeat=sum(hidden)):
        matrix, offset = np.eye(size), np.zeros(size)
        at, left, right = 0, [], []
        for (w, b), count in zip(layers, [*hidden, None], strict=True):
            matrix, offset = w.astype(float) @ matrix, w.astype(float) @ offset + b
            if count is None:
                break
            on = np.array(flat[at : at + count])
            at += count
            sign = np.where(on, -1.0, 1.0)[:, None]
            left.append(np.c_[sign * matrix, np.zeros(count)])
            right.append(-sign[:, 0] * offset)
            matrix, offset = on[:, None] * matrix, on * offset
        for a, c, b in rows:
            left.append(np.r_[np.asarray(a) @ matrix + np.asarray(c), -1.0][None])
            right.append([b - np.asarray(a) @ offset])
        found = linprog(
            np.r_[np.zeros(size), 1.0],
            A_ub=np.concatenate(left),
            b_ub=np.concatenate(right),
            bounds=[*zip(lower, upper, strict=True), (None, None)],
        )
        if found.status == 0:
            least = min(least, found.fun)
    return float(least)


def vnnlib(lower, upper, formula: str, outputs: int) -> str:
    """A property in VNN-LIB 1.0: a box and one assertion."""
    lines = [f"(declare-const X_{k} Real)" for k in range(len(lower))]
    lines += [f"(declare-const Y_{k} Real)" for k in range(outputs)]
    for k, (low, high) in enumerate(zip(lower, upper, strict=True)):
        lines += [f"(assert (>= X_{k} {low}))", f"(assert (<= X_{k} {high}))"]
    return "\n".join([*lines, f"(assert {formula})", ""])


def row_text(a, c, b) -> str:
    """The formula a.y + c.x <= b."""
    terms = [f"(* {float(v):.17f} Y_{k})" for k, v in enumerate(a) if v]
    terms += [f"(* {float(v):.17f} X_{k})" for k, v in enumerate(c) if v]
    total = f"(+ {' '.join(terms)})" if len(terms) > 1 else terms[0]
    return f"(<= {total} {b:.17f})"
