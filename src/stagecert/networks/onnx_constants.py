"""Constants of an ONNX model: stored tensors, and nodes that only read constants."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import onnx
import onnx.external_data_helper
from onnx.reference import ReferenceEvaluator

from stagecert.networks.onnx_nodes import LARGEST, LARGEST_COMPUTED, Refused, check_size, words

_SHORT = ("float16", "bfloat16")
_KNOWN = ("float32", "float64", "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))

# What may be computed while loading: functions of their inputs alone (no random numbers), whose
# results `_size` can bound.
_FOLDED = words(
    "Abs Add And Cast CastLike Ceil Clip Concat ConstantOfShape Cos Div Equal Erf Exp Expand "
    "Flatten Floor Gather Gemm Greater GreaterOrEqual Identity Less LessOrEqual Log MatMul Max "
    "Mean Min Mod Mul Neg Not Or Pow Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum Relu Reshape Round Shape Sigmoid Sign Sin Size Slice Softplus Split Sqrt Squeeze "
    "Sub Sum Tanh Tile Transpose Unsqueeze Where Xor"
)


def stored(tensor: onnx.TensorProto) -> np.ndarray:
    """A stored tensor, as precise as it is stored."""
    if any(n < 0 for n in tensor.dims):
        raise Refused("has a tensor with a negative length")
    if math.prod(tensor.dims) > LARGEST:
        raise Refused(f"has a tensor of {math.prod(tensor.dims)} entries, more than {LARGEST}")
    if onnx.external_data_helper.uses_external_data(tensor):
        raise Refused(
            "keeps its numbers in another file, which is missing; load the model by its path, "
            "with that file beside it"
        )
    try:
        return _usable(onnx.numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"is corrupt: {error}") from error


def _usable(array) -> np.ndarray:
    """Half precision becomes single: nothing is lost."""
    array = np.asarray(array)
    if array.dtype.name in _SHORT:
        return array.astype(np.float32)
    if array.dtype.name not in _KNOWN:
        raise Refused(f"has numbers of the type {array.dtype.name}, which is not supported")
    return array


def constant(attributes: dict) -> np.ndarray:
    """The value of a Constant node."""
    if len(attributes) != 1:
        raise Refused("needs one value")
    ((name, value),) = attributes.items()
    if name == "value":
        return stored(value)
    if name in ("value_float", "value_floats"):
        return np.array(value, np.float32)
    if name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    raise Refused(f"is not supported with {name}")


def fold(
    node: onnx.NodeProto,
    inputs: Sequence[np.ndarray | None],
    attributes: dict,
    opset: int,
    limit: int = LARGEST_COMPUTED,
) -> list[np.ndarray]:
    """The outputs of a node whose inputs are all constant; at most `limit` entries."""
    if node.op_type not in _FOLDED:
        raise Refused("is not supported, not even for constants")
    known = [x for x in inputs if x is not None]
    check_size([_size(node.op_type, known, attributes)], limit)
    names = [f"x{k}" if x is not None else "" for k, x in enumerate(inputs)]
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("input")
    copy.input.extend(names)
    declared = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
        )
        for name, x in zip(names, inputs, strict=True)
        if x is not None
    ]
    results = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = onnx.helper.make_graph([copy], "constants", declared, results)
    opsets = [onnx.helper.make_opsetid("", opset)]
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = onnx.helper.make_model(graph, opset_imports=opsets)
        found = iter(ReferenceEvaluator(model).run(None, feeds))
    return [_usable(next(found)) if name else np.zeros(0) for name in node.output]


def _size(operator: str, inputs: Sequence[np.ndarray], attributes: dict) -> int:
    """No fewer entries than the results have; at least one."""

    def product(numbers) -> int:
        return math.prod(max(int(n), 1) for n in numbers)

    first = inputs[0]
    if operator == "ConstantOfShape":
        return product(first.ravel())
    if operator == "Range":
        start, limit, step = (float(x.item()) for x in inputs)
        return max(int((limit - start) / step) + 1, 1)
    if operator in ("Tile", "Expand"):
        return max(first.size, 1) * product(inputs[1].ravel())
    if operator == "Gather":
        # Every index brings at most a whole slice.
        axis = attributes.get("axis", 0)
        return max(first.size // max(first.shape[axis], 1) * inputs[1].size, 1)
    if operator in ("MatMul", "Gemm"):
        return max(math.prod(x.size for x in inputs[:2]) // max(first.shape[-1], 1) ** 2, 1)
    try:
        together = product(np.broadcast_shapes(*(x.shape for x in inputs)))
    except ValueError:
        together = 1
    return max(together, sum(x.size for x in inputs), 1)
