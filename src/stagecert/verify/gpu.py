"""Nodes of the search on a GPU: the same passes, on arrays of CuPy.

The passes are written in NumPy, whose functions leave arrays of another library to that library. So
a form whose weights lie on the GPU, and lanes that are sent there, are all that is needed. CuPy is
used if it is installed and finds a GPU; JAX_PLATFORMS=cpu keeps the search on the processor, as it
does with JAX.
"""

import copy
import dataclasses
import functools
import math
import os
from typing import Any

import numpy as np

from stagecert_check.functions import Activation
from stagecert_check.graph import Shift
from stagecert_check.linear import Conv, Linear, MatMul, Reduce, Reshape, Scale, Shape, Sum

# Passes with fewer multiplications are over sooner on a processor than a GPU is told of them.
LEAST_WORK = 300_000
# Numbers that matrices in the place of convolutions may have.
MOST_WEIGHTS = 2**29


class Dense(Linear):
    """A linear operation as one matrix: many times faster on a GPU than a loop over a kernel."""

    def __init__(self, weights: Any, shape: Shape):
        self.weights, self.shape = weights, shape

    def forward(self, xs, absolute: bool = False) -> Any:
        return (xs[0].reshape(len(xs[0]), -1) @ self.weights).reshape(-1, *self.shape)

    def transposed(self, g, shapes) -> list:
        return [(g.reshape(len(g), -1) @ self.weights.T).reshape(-1, *shapes[0])]


@functools.cache
def library() -> Any:
    """CuPy, or None where it is not to be used."""
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return None
    # Kernels of NVIDIA's library for sums take more than a second each to compile.
    os.environ.setdefault("CUPY_ACCELERATORS", "")
    try:
        import cupy  # type: ignore

        return cupy if cupy.cuda.runtime.getDeviceCount() else None
    except Exception:  # not installed, no driver, no device: each has an exception of its own
        return None


def placed(form: Any) -> None:
    """Gives a form a copy on the GPU, `form.there`, if there is one that is worth it."""
    if form.there is None and able(form) and (arrays := library()) is not None:
        form.there = _copy(form, arrays)


def able(form: Any) -> bool:
    """Whether a network has operations that are known here, relus only, and enough to do."""
    simple = (MatMul, Scale, Sum, Reduce, Reshape, Conv, Shift, type(None))
    work = 0
    for node in form.nodes:
        operation = node.operation
        if not isinstance(operation, (*simple, Activation)):
            return False
        if isinstance(operation, (MatMul, Conv)):
            work += operation.terms * math.prod(node.shape)
    return work >= LEAST_WORK and all(layer.relu for layer in form.layers.values())


def _copy(form: Any, arrays: Any) -> Any:
    there = copy.copy(form)
    there.like, there.of_neuron = arrays.empty(0), arrays.asarray(form.of_neuron)
    there.nodes, left = [], MOST_WEIGHTS
    for node in form.nodes:
        node = copy.copy(node)
        operation = node.operation = copy.copy(node.operation)
        if isinstance(operation, Shift):
            operation.constant = arrays.asarray(operation.constant)
        elif hasattr(operation, "weights"):
            operation.weights = arrays.asarray(operation.weights)
        if isinstance(operation, Conv):
            shape = form.nodes[node.arguments[0]].shape
            size = math.prod(shape) * math.prod(node.shape)
            if size <= left:
                left -= size
                units = arrays.eye(math.prod(shape), dtype=np.float32).reshape(-1, *shape)
                matrix = operation.forward([units]).reshape(len(units), -1)
                node.operation = Dense(matrix, node.shape)
        there.nodes.append(node)
    return there


def sent(x: Any) -> Any:
    """Arrays, and what is made of arrays, on the GPU."""
    arrays = library()
    return _mapped(x, lambda y: arrays.asarray(y) if isinstance(y, np.ndarray) else y)


def fetched(x: Any) -> Any:
    """The same, back in NumPy."""
    return _mapped(x, lambda y: y.get() if hasattr(y, "get") and hasattr(y, "shape") else y)


def _mapped(x: Any, function: Any) -> Any:
    if dataclasses.is_dataclass(x):
        fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        found = {name: _mapped(value, function) for name, value in fields.items()}
        return type(x)(**found)  # type: ignore
    if isinstance(x, tuple):
        return tuple(_mapped(one, function) for one in x)
    return function(x)
