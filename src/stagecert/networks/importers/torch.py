"""Networks from PyTorch modules, through PyTorch's own ONNX exporter."""

import contextlib
import io
import logging
import warnings
from typing import Any

from stagecert.errors import ProblemError
from stagecert.networks.graph import Network

_INSTALL = 'from_torch needs PyTorch and onnxscript: pip install "stagecert[torch]"'


def from_torch(module: Any, example: Any) -> Network:
    """The network that a PyTorch module computes in evaluation mode.

    Args:
        module: a torch.nn.Module. It is exported in evaluation mode (dropout is off, batch
            normalisation uses its running statistics), and left in the modes that it had.
        example: an input with a batch axis of length one, of which only shape and type matter: a
            tensor, or a tuple of tensors if the module takes several.

    Raises:
        ProblemError: if PyTorch is not installed or cannot export the module, or for all operators
            of the exported model that are not supported.
    """
    try:
        # The exporter needs onnxscript. Both are optional, so they may be missing when types are
        # checked too.
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
        import torch  # pyright: ignore[reportMissingImports]

        from stagecert.networks.importers.onnx.model import load
    except ImportError as error:
        raise ProblemError(f"{_INSTALL} ({error})") from error

    if not isinstance(module, torch.nn.Module):
        raise ProblemError(
            f"from_torch takes a torch.nn.Module, not {type(module).__name__}; wrap a function in a"
            " module, or use from_jax for JAX functions."
        )
    inputs = example if isinstance(example, tuple) else (example,)
    for k, x in enumerate(inputs):
        _check(torch, x, k)
    if not inputs:
        raise ProblemError("from_torch: the example is an empty tuple; a network needs an input.")
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        model = _exported(torch, module, inputs)
    finally:
        for part, training in modes:
            part.training = training
    return load(model, batched=True)


def _check(torch, x: Any, k: int) -> None:
    name = f"from_torch: input {k + 1} of the example"
    if not isinstance(x, torch.Tensor):
        raise ProblemError(f"{name} must be a tensor, not {type(x).__name__}.")
    if not x.is_floating_point():
        raise ProblemError(
            f"{name} is of type {x.dtype}, but networks need floating-point inputs, which vary "
            "continuously."
        )
    if x.ndim == 0 or x.shape[0] != 1:
        raise ProblemError(
            f"{name} must have a batch axis of length one first, but its shape is "
            f"{tuple(x.shape)}; try x[:1] or x[None]."
        )
    if x.numel() == 0:
        raise ProblemError(f"{name} is empty: its shape is {tuple(x.shape)}.")


def _exported(torch, module, inputs) -> Any:
    """The module as an ONNX model."""
    try:
        with _quiet(), torch.no_grad():
            module(*inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ProblemError(
            f"The module fails on the example, of shape {shapes}: {_first_line(error)}"
        ) from error
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(module, inputs, dynamo=True, verbose=False)
            return _rejoined(program.model_proto)
    except Exception as error:
        # The exporter's messages are long reports; what went wrong is named by the first cause.
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise ProblemError(
            f"PyTorch cannot export the module to ONNX: {_first_line(first)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def _quiet():
    """Keeps the exporter's progress and its warnings about itself from the user's screen.

    Its errors too: they are tracebacks of what is raised in any case.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.ERROR))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# PyTorch's softplus is the identity from some point on. Where softplus differs from that by less
# than float32 can show, it is how PyTorch rounds and not another function.
_SOFTPLUS_THRESHOLD = 16.0


def _rejoined(model) -> Any:
    """The model with activations as one node each where the exporter writes several."""
    from onnx import numpy_helper

    numbers = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if all(n == 1 for n in tensor.dims)
    }
    makers = {name: node for node in model.graph.node for name in node.output}

    def inputs(name: str, operator: str) -> list[str] | None:
        """What a node reads, if it made this value and is of this kind."""
        node = makers.get(name)
        return list(node.input) if node is not None and node.op_type == operator else None

    def become(node, operator: str, name: str) -> None:
        node.op_type = operator
        node.ClearField("attribute")
        node.ClearField("input")
        node.input.append(name)

    for node in model.graph.node:
        if node.op_type == "Div":
            # x / (|x| + 1)
            terms = inputs(node.input[1], "Add")
            for one, other in (terms, terms[::-1]) if terms else ():
                if other in numbers and numbers[other] == 1:
                    if inputs(one, "Abs") == [node.input[0]]:
                        become(node, "Softsign", node.input[0])
                    break
        elif node.op_type == "Where":
            # threshold < beta * x ? x : softplus(beta * x) / beta
            condition, x, smooth = node.input
            scaled, threshold = inputs(condition, "Greater") or ("", "")
            if threshold not in numbers or not numbers[threshold] >= _SOFTPLUS_THRESHOLD:
                continue
            plain = inputs(smooth, "Softplus") == [x] and scaled == x
            curve, beta = inputs(smooth, "Div") or ("", "")
            steep = inputs(curve, "Softplus") == [scaled] and inputs(scaled, "Mul") == [x, beta]
            if plain or (steep and beta in numbers and numbers[beta] > 0):
                become(node, "Identity", smooth)
    return model
