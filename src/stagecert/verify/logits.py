"""Classifiers that end in Softmax or LogSoftmax, without it: classes keep their order."""

import math

import onnx

from stagecert.verify.contents import in_one_piece
from stagecert_check import external

_LAST = ("Softmax", "LogSoftmax")
# From this opset on, Softmax is along one axis; before, along all from one axis on.
_ONE_AXIS = 13


def without_softmax(contents: external.Model) -> tuple[str, bytes] | None:
    """The operator that a model ends in, and the model without it, with all of its weights.

    None if it does not end in a Softmax or LogSoftmax of all of its outputs together. Both keep the
    order of the outputs, so that they have no influence on which class is the largest.
    """
    try:
        model = onnx.load_from_string(contents.data)
    except Exception:
        return None  # whoever reads it next says what is wrong
    if len(model.graph.output) != 1:
        return None
    (output,) = model.graph.output
    last = [node for node in model.graph.node if output.name in node.output]
    if len(last) != 1 or last[0].op_type not in _LAST or last[0].domain not in ("", "ai.onnx"):
        return None
    (node,) = last
    if any(output.name in other.input for other in model.graph.node):
        return None
    shape = [
        d.dim_value if d.HasField("dim_value") else 1 for d in output.type.tensor_type.shape.dim
    ]
    if not _of_all(node, shape, _opset(model)):
        return None
    full = in_one_piece(contents)
    full.graph.node.remove(next(n for n in full.graph.node if output.name in n.output))
    full.graph.output[0].name = node.input[0]
    # Some file may declare that value as an inner one.
    for info in [v for v in full.graph.value_info if v.name == node.input[0]]:
        full.graph.value_info.remove(info)
    return node.op_type, full.SerializeToString()


def _of_all(node: onnx.NodeProto, shape: list[int], opset: int) -> bool:
    """Whether all outputs are along the axis, or axes, of a Softmax."""
    if not shape:
        return False
    given = {item.name: item.i for item in node.attribute}
    axis = given.get("axis", -1 if opset >= _ONE_AXIS else 1)
    axis = axis + len(shape) if axis < 0 else axis
    if not 0 <= axis < len(shape):
        return False
    along = shape[axis] if opset >= _ONE_AXIS else math.prod(shape[axis:])
    return along > 1 and along == math.prod(shape)


def _opset(model: onnx.ModelProto) -> int:
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
