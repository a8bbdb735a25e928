"""Neural networks: read them, and bound linear functions of their outputs with a certificate."""

from stagecert.compiling import keep_programs
from stagecert.networks.activations.registering import register, register_relaxation
from stagecert.networks.bounding.bounds import bound
from stagecert.networks.bounding.intermediate import Intermediate
from stagecert.networks.bounding.results import Bounds, margins
from stagecert.networks.graph import Network

__all__ = [
    "Bounds", "Intermediate", "Network", "bound", "from_jax", "from_torch", "load", "margins",
    "register", "register_relaxation",
]  # fmt: skip

# Before anything is compiled: JAX looks for its cache once.
keep_programs()


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
    from stagecert.networks.importers.onnx.model import load as load_onnx

    return load_onnx(source, batched=batched)


def from_jax(function, example) -> Network:
    """The network that a JAX function computes.

    Args:
        function: takes one input point, without a batch axis, to an array or a tree of arrays. It
            may close over its weights or be an Equinox module (in inference mode).
        example: an input point, of which only shape and type matter: an array or a
            jax.ShapeDtypeStruct; a tuple of these if the function takes several inputs.

    Raises:
        ProblemError: the function cannot be traced, or has equations that are not supported; the
            message lists all of them.
    """
    from stagecert.networks.importers.jax.functions import from_jax as convert

    return convert(function, example)


def from_torch(module, example) -> Network:
    """The network that a PyTorch module computes in evaluation mode.

    Args:
        module: a torch.nn.Module.
        example: an input with a batch axis of length one: a tensor, or a tuple of tensors if the
            module takes several.

    Raises:
        ProblemError: PyTorch is not installed, cannot export the module, or the module has
            operators that are not supported; the message lists all of them.
    """
    from stagecert.networks.importers.torch import from_torch as convert

    return convert(module, example)
