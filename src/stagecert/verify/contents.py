"""What the files of a model hold, read once for all who ask."""

import onnx

from stagecert.errors import ProblemError
from stagecert_check import external, joining
from stagecert_check.functions import Refused


def contents_of(source) -> external.Model:
    """A file with the files of its weights; or what is in memory: bytes, an onnx.ModelProto.

    Several networks, [("f", path), ("g", path)], are one model.
    """
    if isinstance(source, onnx.ModelProto):
        return external.Model(source.SerializeToString())
    if isinstance(source, bytes):
        return external.Model(source)
    several = joining.named(source)
    if several is not None:
        return joining.joint_contents(several)
    return external.model_contents(source)


def digest_of(source) -> str:
    """Identifies a model by its content, with the weights that it keeps in other files."""
    return contents_of(source).digest


def in_one_piece(contents: external.Model) -> onnx.ModelProto:
    """A model with all of its weights in it.

    Raises:
        ProblemError: it is no ONNX model, or says something impossible about its weights.
    """
    try:
        model = onnx.load_from_string(contents.data)
        for tensor in external.tensors(model) if contents.files else ():
            if tensor.external_data:
                tensor.CopyFrom(external.fetched(tensor, contents.files))
    except Refused as error:
        raise ProblemError(f"The ONNX model cannot be read: {error}.") from None
    except Exception as error:  # damaged ones raise errors of many types
        raise ProblemError(f"This is no ONNX model, or it is damaged: {error}") from None
    return model


def bytes_of(contents: external.Model) -> bytes:
    """A model as one file."""
    return in_one_piece(contents).SerializeToString() if contents.files else contents.data
