"""Small ONNX models of many operators, and ways to damage them: bytes, fields, structure."""

import contextlib
import random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Constants that nodes name by themselves, so that models stay short.
_WEIGHTS = {
    "w34": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "w43": np.linspace(1, -1, 12, dtype=np.float32).reshape(4, 3),
    "b4": np.linspace(-0.5, 0.5, 4, dtype=np.float32),
    "b3": np.linspace(-0.5, 0.5, 3, dtype=np.float32),
    "one": np.float32(1).reshape(()),
    "half": np.float32(0.5).reshape(()),
    "two": np.float32(2).reshape(()),
    "k": np.linspace(-1, 1, 18, dtype=np.float32).reshape(1, 2, 3, 3),
    "k2": np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 2, 2, 2),
    "b2": np.linspace(-0.5, 0.5, 2, dtype=np.float32),
    "v2": np.array([0.5, 2.0], np.float32),
    "i_flat": np.array([0, -1], np.int64),
    "i_0": np.array([0], np.int64),
    "i_1": np.array([1], np.int64),
    "i_2": np.array([2], np.int64),
    "i_shape": np.array([1, 2, 4, 4], np.int64),
    "i_pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    "i_take": np.array([1, 0, 1], np.int64),
    "i_tile": np.array([1, 2], np.int64),
    "i_split": np.array([1, 3], np.int64),
}

# Operator, inputs, outputs, attributes; "x" is the input, "y" the output.
_MODELS = {
    "dense": ([1, 3], [
        ("Gemm", "x w34 b4", "a", {"alpha": 0.5}), ("Relu", "a", "b", {}),
        ("MatMul", "b w43", "c", {}), ("Add", "c b3", "d", {}), ("LeakyRelu", "d", "e", {}),
        ("Gemm", "e w34", "f", {}), ("Sigmoid", "f", "y", {}),
    ]),
    "conv": ([1, 2, 4, 4], [
        ("Conv", "x k2 b2", "a", {"pads": [1, 1, 0, 0], "strides": [1, 1]}), ("Relu", "a", "b", {}),
        ("BatchNormalization", "b b2 b2 b2 v2", "c", {}),
        ("MaxPool", "c", "d", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("ConvTranspose", "d k2", "e", {"strides": [2, 2]}),
        ("AveragePool", "e", "f", {"kernel_shape": [2, 2]}), ("GlobalAveragePool", "f", "g", {}),
        ("Flatten", "g", "y", {}),
    ]),
    "shapes": ([1, 2, 4, 4], [
        ("Pad", "x i_pads half", "a", {}), ("Transpose", "a", "b", {"perm": [0, 2, 3, 1]}),
        ("Slice", "b i_1 i_2 i_1", "c", {}), ("Reshape", "c i_flat", "d", {}),
        ("Gather", "d i_take", "e", {"axis": 1}), ("Unsqueeze", "e i_2", "f", {}),
        ("Squeeze", "f i_2", "g", {}), ("Tile", "g i_tile", "h", {}),
        ("Concat", "h d", "y", {"axis": 1}),
    ]),
    "split": ([1, 4], [
        ("Split", "x i_split", "a b", {"axis": 1}), ("Expand", "a i_tile", "c", {}),
        ("ReduceSum", "b i_1", "d", {}), ("ReduceMax", "b i_1", "e", {}),
        ("Sum", "d e", "f", {}), ("Sub", "f c", "g", {}), ("Clip", "g half two", "y", {}),
    ]),
    "spelt": ([1, 4], [
        ("Sigmoid", "x", "a", {}), ("Mul", "x a", "b", {}), ("Erf", "b", "c", {}),
        ("Add", "c one", "d", {}), ("Mul", "b d", "e", {}), ("Abs", "x", "f", {}),
        ("Add", "f one", "g", {}), ("Div", "x g", "h", {}), ("Exp", "x", "i", {}),
        ("Add", "i one", "j", {}), ("Log", "j", "k9", {}), ("Pow", "x two", "l", {}),
        ("Max", "h k9 l", "m", {}), ("Min", "m x", "y", {}),
    ]),
    "constants": ([1, 3], [
        ("Shape", "x", "a", {}), ("Gather", "a i_1", "b", {}),
        ("ConstantOfShape", "b", "d", {}), ("Add", "x d", "e", {}),
        ("Cast", "e", "f", {"to": 1}), ("Dropout", "f", "g", {}), ("Identity", "g", "h", {}),
        ("Reshape", "h i_flat", "y", {}),
    ]),
    "curves": ([1, 4], [
        ("Elu", "x", "a", {}), ("Selu", "a", "b", {}), ("Celu", "b", "c", {"alpha": 0.5}),
        ("Softplus", "c", "d", {}), ("Softsign", "d", "e", {}), ("Tanh", "e", "f", {}),
        ("HardSigmoid", "f", "g", {}), ("HardSwish", "g", "h", {}), ("Mish", "h", "i", {}),
        ("PRelu", "i b4", "j", {}), ("Neg", "j", "k9", {}), ("Mean", "k9 x", "y", {}),
    ]),
}  # fmt: skip

ODD_INTEGERS = (0, -1, 1, 2, 3, 7, 255, -(2**31), 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63))
ODD_FLOATS = (0.0, -0.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
PATHS = ("missing.bin", "../../etc/hostname", "/etc/hostname", "/dev/zero", "", "a\0b", ".")


def model(name: str) -> onnx.ModelProto:
    """One of the models."""
    shape, nodes = _MODELS[name]
    made = [
        helper.make_node(operator, inputs.split(), outputs.split(), **attributes)
        for operator, inputs, outputs, attributes in nodes
    ]
    used = {one for node in made for one in node.input}
    constants = [numpy_helper.from_array(v, k) for k, v in _WEIGHTS.items() if k in used]
    graph = helper.make_graph(
        made, name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *shape[1:]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], constants,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


NAMES = tuple(_MODELS)
_OPERATORS = sorted({op for _, nodes in _MODELS.values() for op, *_ in nodes} | {
    "If", "Loop", "Softmax", "LSTM", "Einsum", "Constant", "Range", "TopK", "NoSuchOperator",
    "RandomNormal", "Resize", "CastLike", "Size",
})  # fmt: skip


def damaged(rng: random.Random) -> bytes:
    """A model with a few faults, at the level of fields or of bytes."""
    proto = model(rng.choice(NAMES))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        # Some values are refused by protocol buffers themselves.
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            rng.choice(_FAULTS)(rng, proto)
    data = bytearray(proto.SerializeToString())
    for _ in range(rng.choice((0, 0, 0, 1, 2, 8))):
        _byte_fault(rng, data)
    return bytes(data)


def _byte_fault(rng: random.Random, data: bytearray) -> None:
    if not data:
        return
    at, kind = rng.randrange(len(data)), rng.randrange(5)
    if kind == 0:
        data[at] = rng.randrange(256)
    elif kind == 1:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at : at + rng.randrange(1, 16)]
    else:
        data[at:at] = data[rng.randrange(len(data)) :][: rng.randrange(1, 64)]


def _node(rng, proto):
    return rng.choice(proto.graph.node) if proto.graph.node else onnx.NodeProto()


def _values(proto) -> list[str]:
    names = [name for node in proto.graph.node for name in (*node.input, *node.output)]
    return [*names, "x", "y", "", "nowhere"]


def _attribute(rng, proto) -> None:
    node = _node(rng, proto)
    if not node.attribute or rng.random() < 0.3:
        name = rng.choice(("axis", "pads", "alpha", "kernel_shape", "to", "perm", "auto_pad",
                           "group", "strides", "dilations", "keepdims", "bogus"))  # fmt: skip
        value = rng.choice((rng.choice(ODD_INTEGERS), rng.choice(ODD_FLOATS), "SAME_UPPER",
                            rng.choices(ODD_INTEGERS, k=rng.randrange(1, 5))))  # fmt: skip
        node.attribute.append(helper.make_attribute(name, value))
        return
    item = rng.choice(node.attribute)
    kind = rng.randrange(5)
    if kind == 0:
        item.i = rng.choice(ODD_INTEGERS)
    elif kind == 1:
        item.f = rng.choice(ODD_FLOATS)
    elif kind == 2 and item.ints:
        item.ints[rng.randrange(len(item.ints))] = rng.choice(ODD_INTEGERS)
    elif kind == 3:
        item.ints.extend([rng.choice(ODD_INTEGERS)] * rng.choice((1, 2, 1000)))
    else:
        item.type = rng.randrange(16)


def _wiring(rng, proto) -> None:
    node = _node(rng, proto)
    names = _values(proto)
    kind = rng.randrange(5)
    if kind == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif kind == 1 and node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice(names)
    elif kind == 2:
        node.input.extend([rng.choice(names)] * rng.choice((1, 1, 50)))
    elif kind == 3 and node.input:
        del node.input[rng.randrange(len(node.input))]
    else:
        node.output.append(rng.choice(names))


def _operator(rng, proto) -> None:
    node = _node(rng, proto)
    if rng.random() < 0.2:
        node.domain = rng.choice(("ai.onnx", "ai.onnx.ml", "com.microsoft", "x"))
    else:
        node.op_type = rng.choice(_OPERATORS)


def _order(rng, proto) -> None:
    nodes = list(proto.graph.node)
    kind = rng.randrange(4)
    if kind == 0:
        rng.shuffle(nodes)
    elif kind == 1 and nodes:
        nodes.insert(rng.randrange(len(nodes)), rng.choice(nodes))
    elif kind == 2 and nodes:
        del nodes[rng.randrange(len(nodes))]
    else:
        nodes = nodes * rng.choice((2, 20))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(copies)


def _tensor(rng, proto) -> None:
    if not proto.graph.initializer:
        return
    tensor = rng.choice(proto.graph.initializer)
    kind = rng.randrange(8)
    if kind == 0 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(ODD_INTEGERS)
    elif kind == 1:
        tensor.dims.append(rng.choice(ODD_INTEGERS))
    elif kind == 2:
        tensor.data_type = rng.randrange(26)
    elif kind == 3:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    elif kind == 4:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", rng.choice(PATHS)), ("offset", "0"),
                           ("length", rng.choice(("4", "-1", "99999999999", "x")))):  # fmt: skip
            tensor.external_data.add(key=key, value=value)
    elif kind == 5:
        tensor.name = rng.choice(_values(proto))
    else:
        try:
            array = np.array(numpy_helper.to_array(tensor))
        except Exception:  # it was damaged before
            return
        if array.size:
            floats = np.issubdtype(array.dtype, np.floating)
            odd = ODD_FLOATS if floats else ODD_INTEGERS
            array.reshape(-1)[rng.randrange(array.size)] = rng.choice(odd)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _declaration(rng, proto) -> None:
    infos = [*proto.graph.input, *proto.graph.output]
    if not infos:
        return
    info = rng.choice(infos)
    kind = rng.randrange(6)
    dims = info.type.tensor_type.shape.dim
    if kind == 0 and dims:
        dims[rng.randrange(len(dims))].dim_value = rng.choice(ODD_INTEGERS)
    elif kind == 1:
        dims.add().dim_value = rng.choice(ODD_INTEGERS)
    elif kind == 2 and dims:
        dims[rng.randrange(len(dims))].dim_param = "M"
    elif kind == 3:
        info.type.tensor_type.elem_type = rng.randrange(26)
    elif kind == 4:
        info.name = rng.choice(_values(proto))
    else:
        proto.graph.input.append(info)


def _whole(rng, proto) -> None:
    kind = rng.randrange(6)
    if kind == 0 and proto.opset_import:
        proto.opset_import[0].version = rng.choice((*ODD_INTEGERS, 6, 7, 11, 13, 17, 21))
    elif kind == 1:
        proto.opset_import.add(domain=rng.choice(("", "x")), version=rng.choice((1, 18)))
    elif kind == 2:
        proto.graph.sparse_initializer.add()
    elif kind == 3:
        function = proto.functions.add(name="f", domain="x")
        function.input.append("a")
        function.output.append("b")
        # It may call itself.
        function.node.append(helper.make_node(rng.choice(("f", "Relu")), ["a"], ["b"], domain="x"))
        proto.opset_import.add(domain="x", version=1)
        node = _node(rng, proto)
        node.op_type, node.domain = "f", "x"
    elif kind == 4:
        proto.ir_version = rng.choice(ODD_INTEGERS)
    else:
        node = _node(rng, proto)
        inner = helper.make_attribute("then_branch", proto.graph)
        node.attribute.append(inner)


_FAULTS = (_attribute, _attribute, _wiring, _operator, _order, _tensor, _tensor, _tensor,
           _declaration, _whole)  # fmt: skip
