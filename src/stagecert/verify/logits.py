"""Classifiers that end in Softmax or LogSoftmax, without it: classes keep their order."""

import onnx
import onnx.inliner

from stagecert.verify.contents import in_one_piece
from stagecert_check import external, graph
from stagecert_check.numbers import Arithmetic

_LAST = ("Softmax", "LogSoftmax")


def without_softmax(contents: external.Model) -> tuple[graph.Program, bytes] | None:
    """A model without the Softmax or LogSoftmax of all of its outputs that it ends in.

    None if it does not end so. Both keep the order of the outputs, so that they have no influence
    on which class is the largest. Whether one may be left out is the checker's decision: it reads
    the same file, and would refuse certificates of a search that decides otherwise.

    Returns:
        The program that the checker reads, and the model that is left, with all of its weights.
    """
    if not ends_in_softmax(contents):
        return None
    try:
        program = graph.read(contents.data, Arithmetic(), contents.files, ordered=True)
    except Exception:
        return None  # whoever reads it next says what is wrong
    if program.without is None:
        return None
    model = in_one_piece(contents)
    # The checker has counted what functions stand for.
    model = onnx.inliner.inline_local_functions(model) if model.functions else model
    node = _last(model)
    model.graph.node.remove(node)
    model.graph.output[0].name = node.input[0]
    # Some file may declare that value as an inner one.
    for info in [v for v in model.graph.value_info if v.name == node.input[0]]:
        model.graph.value_info.remove(info)
    return program, model.SerializeToString()


def ends_in_softmax(contents: external.Model) -> bool:
    """Whether a model may be one that `without_softmax` makes shorter."""
    try:
        model = onnx.load_from_string(contents.data)
        # What the functions of a model make is only known once they are put in their places.
        last = model.functions or _last(model).op_type in _LAST
        return len(model.graph.output) == 1 and bool(last)
    except Exception:
        return False  # as above


def _last(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that makes the first output; StopIteration if there is none."""
    name = model.graph.output[0].name
    return next(node for node in model.graph.node if name in node.output)
