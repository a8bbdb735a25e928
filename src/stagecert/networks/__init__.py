"""Neural networks: read them, and bound linear functions of their outputs with a certificate."""

from stagecert.networks.activations import register, register_relaxation
from stagecert.networks.bounds import Bounds, bound, margins
from stagecert.networks.graph import Network
from stagecert.networks.intermediate import Intermediate

__all__ = [
    "Bounds",
    "Intermediate",
    "Network",
    "bound",
    "load",
    "margins",
    "register",
    "register_relaxation",
]


def load(source, *, batched=None) -> Network:
    """Reads an ONNX model: a path (.onnx or .onnx.gz), bytes, or an onnx.ModelProto.

    Args:
        source: the model.
        batched: whether the first axis of the inputs is a batch axis. None: it is if its length is
            not fixed, or is 1 and there are other axes.

    Raises:
        ProblemError: the file cannot be read, or has operators that are not supported; the message
            lists all of them.
    """
    from stagecert.networks.onnx import load as load_onnx

    return load_onnx(source, batched=batched)
