"""Small ONNX models and properties, and certificates as plain data that tests can change."""

import hashlib
import io
import itertools
import json
import zipfile
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx import helper as h

from stagecert.verify import certificates, proving
from stagecert.verify.models import opened as opened_for
from stagecert_check import properties


class Maker:
    """Puts an ONNX model together."""

    def __init__(self, seed: int = 0, opset: int = 20):
        self.nodes, self.initializers, self.opset = [], [], opset
        self.random = np.random.default_rng(seed)

    def constant(self, array) -> str:
        """A stored array; floats are stored in single precision."""
        array = np.asarray(array)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array.astype(np.int64)
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weights(self, *shape, size=None) -> str:
        """Random weights."""
        fan = np.prod(shape[1:]) if size is None else size
        return self.constant(self.random.normal(size=shape) / np.sqrt(fan))

    def node(self, operator: str, *inputs: str, outputs: int = 1, **attributes) -> Any:
        """A node; returns its output, or all of them."""
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(h.make_node(operator, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def model(self, inputs, outputs) -> onnx.ModelProto:
        """The model; inputs and outputs are (name, shape)."""

        def info(pairs):
            return [h.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in pairs]

        graph = h.make_graph(self.nodes, "g", info(inputs), info(outputs), self.initializers)
        return h.make_model(graph, opset_imports=[h.make_opsetid("", self.opset)], ir_version=10)


def kinds_of(program) -> list[str]:
    """The kinds of a program's activations, in order."""
    return [program.nodes[k].operation.kind for k in program.activations]


def mlp(sizes=(4, 8, 6, 3), activation="Relu", seed: Any = 0, **attributes) -> onnx.ModelProto:
    """A multilayer perceptron."""
    make, x = Maker(seed), "x"
    for k, (n, m) in enumerate(itertools.pairwise(sizes)):
        bias = make.constant(0.2 * make.random.normal(size=m))
        x = make.node("Gemm", x, make.weights(n, m, size=n), bias)
        if k < len(sizes) - 2:
            x = make.node(activation, x, **attributes)
    return make.model([("x", [1, sizes[0]])], [(x, [1, sizes[-1]])])


# Every activation, with attributes that are stored.
ACTIVATIONS = [
    ("Relu", {}),
    ("LeakyRelu", {"alpha": 0.125}),
    ("Elu", {"alpha": 1.0}),
    ("Elu", {"alpha": 2.5}),
    ("Selu", {"alpha": 1.5, "gamma": 1.25}),
    ("Celu", {"alpha": 1.5}),
    ("Softplus", {}),
    ("Sigmoid", {}),
    ("Tanh", {}),
    ("HardSigmoid", {"alpha": 0.25, "beta": 0.5}),
    ("HardSwish", {}),
    ("Mish", {}),
    ("Softsign", {}),
    ("Abs", {}),
    ("Exp", {}),
    ("Gelu", {}),
    ("Gelu", {"approximate": "tanh"}),
]


def digits(seed=0) -> onnx.ModelProto:
    """A digits-sized network: convolutions, a residual block, pools, and every activation."""
    make = Maker(seed)
    x = make.node("Conv", "x", make.weights(4, 1, 3, 3), make.weights(4, size=16), pads=[1] * 4)
    scale, bias, mean = (make.random.normal(size=4) * 0.3 + k for k in (1, 0, 0))
    variance = make.random.uniform(0.5, 2, 4)
    x = make.node("BatchNormalization", x, *map(make.constant, (scale, bias, mean, variance)),
                  epsilon=2**-10)  # fmt: skip
    x = make.node("Relu", x)
    y = make.node("Conv", x, make.weights(4, 2, 3, 3), pads=[1] * 4, group=2)
    x = make.node("Relu", make.node("Add", x, y))
    x = make.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = make.node("AveragePool", x, kernel_shape=[2, 2], strides=[1, 1])
    x = make.node("Flatten", x)
    count = 2 * (len(ACTIVATIONS) + 4)
    bias = make.constant(make.random.normal(size=count))
    x = make.node("Gemm", x, make.weights(count, 36), bias, transB=1)
    pieces = make.node("Split", x, outputs=count // 2, axis=1, num_outputs=count // 2)
    made = [
        make.node(name, piece, **attributes)
        for piece, (name, attributes) in zip(pieces, ACTIVATIONS, strict=False)
    ]
    clip, slopes, gate, pair = pieces[len(ACTIVATIONS) :]
    made.append(make.node("Clip", clip, make.constant(-0.5), make.constant(0.75)))
    made.append(make.node("PRelu", slopes, make.constant([0.25, -0.5])))
    made.append(make.node("Mul", gate, make.node("Sigmoid", gate)))
    made.append(make.node("Min", pair, gate, make.constant([0.25, 0.5])))
    x = make.node("Concat", *made, axis=1)
    x = make.node("MatMul", x, make.weights(count, 3, size=count))
    return make.model([("x", ["N", 1, 8, 8])], [(x, ["N", 3])])


def run(model: onnx.ModelProto, x) -> np.ndarray:
    """What ONNX Runtime computes, for a batch of inputs of one network."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (info,) = session.get_inputs()
    x = np.asarray(x, np.float32)
    shape = [n if isinstance(n, int) else 1 for n in info.shape]
    return np.stack(
        [
            np.ravel(np.asarray(session.run(None, {info.name: point.reshape(shape)})[0]))
            for point in x
        ]
    )


def vnnlib(low, high, outputs: int, formula: str) -> str:
    """A property: a box of inputs, and what a counterexample's outputs satisfy."""
    lines = [f"(declare-const X_{k} Real)" for k in range(len(low))]
    lines += [f"(declare-const Y_{k} Real)" for k in range(outputs)]
    for k, (l, u) in enumerate(zip(low, high, strict=True)):
        lines += [f"(assert (>= X_{k} {l:.12f}))", f"(assert (<= X_{k} {u:.12f}))"]
    return "\n".join([*lines, formula, ""])


def robust(label: int, classes: int) -> str:
    """Some other class is at least as large."""
    others = [k for k in range(classes) if k != label]
    return "(assert (or " + " ".join(f"(and (>= Y_{k} Y_{label}))" for k in others) + "))"


def read(path) -> tuple[dict, dict[str, np.ndarray]]:
    """The header and the arrays of a certificate."""
    with zipfile.ZipFile(path) as file:
        arrays = {
            name[:-4]: np.load(io.BytesIO(file.read(name)))
            for name in file.namelist()
            if name.endswith(".npy")
        }
        return json.loads(file.read("header.json")), arrays


def write(path, header: dict, arrays: dict, model=None, text=None) -> None:
    """A certificate from a header and arrays, with new hashes if files are given."""
    if model is not None:
        header = header | {"model_sha256": hashlib.sha256(model).hexdigest()}
    if text is not None:
        header = header | {"property_sha256": hashlib.sha256(text).hexdigest()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", json.dumps(header))
        for name, array in arrays.items():
            data = io.BytesIO()
            np.save(data, array)
            file.writestr(f"{name}.npy", data.getvalue())


def proof_of(model, text, found: proving.Refutation | None = None) -> certificates.Proof:
    """The proof that a property holds, ready to be written; every step of it was tried."""
    wanted = properties.load(text)
    opened, wanted = opened_for(model, wanted).stating(wanted)
    with np.errstate(all="ignore"):
        checker = proving._checker(opened, wanted)
        return proving._proof(checker, opened, found, 1.0, None, lambda: False)
