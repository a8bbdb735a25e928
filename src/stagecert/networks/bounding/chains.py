"""Chains of convolutions and matrices with channels last, as CPUs compute them fastest.

XLA's convolutions on CPUs have the channels last. Where arrays are kept like that all the way,
nothing is transposed between a convolution and what is done to single entries, and that takes
longer than the products do. Only for searches: roundings are not accounted for.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert.networks.bounding.relaxation import Layer, Segment
from stagecert.networks.operations import Concat, Conv, MatMul, Reshape, Shift


def to_last(x, shape: tuple[int, ...]):
    """Entries of arrays (..., *shape), moved to where they are with channels last."""
    lead = x.shape[: x.ndim - len(shape)]
    if len(shape) != 4:
        return x.reshape(*lead, math.prod(shape))
    return jnp.moveaxis(x.reshape(*lead, *shape[1:]), len(lead), -1)


def to_first(x, shape: tuple[int, ...]):
    """The inverse of `to_last`."""
    if len(shape) != 4:
        return x.reshape(*x.shape[:-1], *shape)
    return jnp.moveaxis(x, -1, -3).reshape(*x.shape[:-3], *shape)


class Dense(eqx.Module):
    """x -> x @ matrix + bias, of all entries of x."""

    matrix: Any
    bias: Any
    shape: tuple[int, ...] = eqx.field(static=True)  # of x, without its axis of lanes

    def __call__(self, x):
        return x.reshape(len(x), -1) @ self.matrix + self.bias

    def back(self, y):
        return (y @ self.matrix.T).reshape(len(y), *self.shape)

    def constant(self, y):
        return y @ self.bias


class Convolution(eqx.Module):
    """A convolution of images with channels last; `kernel` is (height, width, in, out)."""

    kernel: Any
    bias: Any
    strides: tuple[int, ...] = eqx.field(static=True)
    padding: tuple[tuple[int, int], ...] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, x):
        if self._narrow:
            return self._product(x) + self.bias
        return _convolved(x, self.kernel, self.strides, self.padding) + self.bias

    @property
    def _narrow(self) -> bool:
        """Whether all patches together are not much more numbers than what comes out."""
        height, width, channels, outputs = self.kernel.shape
        return height * width * channels <= 2 * outputs

    def _product(self, x):
        """A matrix product of all patches: of few channels twice as fast as a convolution."""
        height, width, channels, outputs = self.kernel.shape
        x = jnp.pad(x, ((0, 0), *self.padding, (0, 0)))
        (down, right) = self.strides
        rows, columns = (x.shape[1] - height) // down + 1, (x.shape[2] - width) // right + 1
        patches = [
            x[:, i : i + (rows - 1) * down + 1 : down, j : j + (columns - 1) * right + 1 : right]
            for i in range(height)
            for j in range(width)
        ]
        entries = jnp.concatenate(patches, axis=-1).reshape(-1, height * width * channels)
        found = entries @ self.kernel.reshape(-1, outputs)
        return found.reshape(len(x), rows, columns, outputs)

    def constant(self, y):
        return jnp.sum(y, axis=(1, 2)) @ self.bias

    def back(self, y):
        sizes = [n + sum(p) for n, p in zip(self.shape[:2], self.padding, strict=True)]
        if self.strides == (1, 1):
            full = self._spread(y, sizes) if self._narrow else self._transposed(y)
        else:
            full = self._interleaved(y, sizes)
        (top, _), (left, _) = self.padding
        return full[:, top : top + self.shape[0], left : left + self.shape[1]]

    def _transposed(self, y):
        around = [(k - 1, k - 1) for k in self.kernel.shape[:2]]
        kernel = jnp.flip(self.kernel, (0, 1)).swapaxes(2, 3)
        return _convolved(y, kernel, (1, 1), around)

    def _spread(self, y, sizes):
        """A matrix product, whose entries are added up where they belong."""
        height, width, channels, outputs = self.kernel.shape
        flat = self.kernel.reshape(-1, outputs).T
        products = (y.reshape(-1, outputs) @ flat).reshape(*y.shape[:3], height, width, channels)
        total: Any = 0
        for i in range(height):
            for j in range(width):
                places = (i, sizes[0] - y.shape[1] - i), (j, sizes[1] - y.shape[2] - j)
                total = total + jnp.pad(products[..., i, j, :], ((0, 0), *places, (0, 0)))
        return total

    def _interleaved(self, y, sizes):
        """As in `operations`: for every remainder modulo the stride a plain convolution of y."""
        height, width, channels, outputs = self.kernel.shape
        (down, right) = self.strides
        taps = -(-height // down), -(-width // right)
        counts = -(-sizes[0] // down), -(-sizes[1] // right)
        missing = (0, taps[0] * down - height), (0, taps[1] * right - width)
        kernel = jnp.pad(self.kernel, (*missing, (0, 0), (0, 0)))
        kernel = kernel.reshape(taps[0], down, taps[1], right, channels, outputs)
        kernel = jnp.flip(kernel, (0, 2)).transpose(0, 2, 5, 1, 3, 4)
        kernel = kernel.reshape(*taps, outputs, down * right * channels)
        around = [(t - 1, c - n) for t, c, n in zip(taps, counts, y.shape[1:3], strict=True)]
        found = _convolved(y, kernel, (1, 1), around)
        found = found.reshape(len(y), *counts, down, right, channels).transpose(0, 1, 3, 2, 4, 5)
        found = found.reshape(len(y), counts[0] * down, counts[1] * right, channels)
        return found[:, : sizes[0], : sizes[1]]


def _convolved(x, kernel, strides, padding):
    if x.dtype == jnp.float64:
        # With padding, XLA's convolutions in float64 are much slower; it must not see that
        # there is some.
        x = jax.lax.optimization_barrier(jnp.pad(x, ((0, 0), *padding, (0, 0))))
        padding = ((0, 0),) * 2
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def chain_of(layers: tuple[Layer, ...], last: Segment, shape: tuple[int, ...]) -> tuple | None:
    """The segments as maps of arrays with channels last; None if they are not such a chain.

    Args:
        shape: that of the input.
    """
    maps: list[Any] = []
    for k, segment in enumerate((*(layer.segment for layer in layers), last)):
        read = layers[k - 1].shape if k else shape
        chained = segment.sources == ((k == 0, max(k - 1, 0)),)
        found = _map_of(segment, read) if chained else None
        # A layer behind a matrix has no channels.
        if isinstance(found, Dense) and k < len(layers) and len(layers[k].shape) == 4:
            return None
        if found is None:
            return None
        maps.append(found)
    return tuple(maps)


def _map_of(segment: Segment, shape: tuple[int, ...]) -> Dense | Convolution | None:
    if shape[0] != 1 and len(shape) > 1:
        return None
    if any(node.arguments != (k,) for k, node in enumerate(segment.nodes)):
        return None
    moving = Reshape, Concat
    kinds = [node for node in segment.nodes if not isinstance(node.operation, moving)]
    if segment.output != len(segment.nodes) or not 1 <= len(kinds) <= 2:
        return None
    product, shift = kinds[0], kinds[1] if len(kinds) == 2 else None
    if shift is not None and not isinstance(shift.operation, Shift):
        return None
    bias = None if shift is None else shift.weights
    if isinstance(product.operation, Conv) and len(kinds) == len(segment.nodes):
        return _convolution(product.operation, product.weights, bias, shape)
    if isinstance(product.operation, MatMul) and not product.operation.left:
        return _dense(segment, product.weights, bias, shape)
    return None


def _convolution(conv: Conv, weights, bias, shape) -> Convolution | None:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and set(conv.input_dilation) == {1}
    outputs = weights.shape[0]
    bias = jnp.zeros((1, outputs, 1, 1), weights.dtype) if bias is None else bias
    if not plain or len(shape) != 4 or bias.shape not in ((1, outputs, 1, 1), (outputs, 1, 1)):
        return None
    kernel = jnp.moveaxis(weights, (0, 1), (3, 2))
    bias = bias.reshape(-1)
    return Convolution(kernel, bias, conv.strides, conv.padding, (*shape[2:], shape[1]))


def _dense(segment: Segment, matrix, bias, shape) -> Dense | None:
    if matrix.ndim != 2 or matrix.shape[0] != math.prod(shape):
        return None
    bias = jnp.zeros(matrix.shape[1:], matrix.dtype) if bias is None else bias
    # A shift may repeat what it is added to.
    if not bias.size == matrix.shape[1] == math.prod(segment.shape([shape])):
        return None
    place = to_last(jnp.arange(math.prod(shape)).reshape(shape), shape)
    return Dense(matrix[place.reshape(-1)], bias.reshape(-1), place.shape)
