"""What a node of a network may do: linear operations, a shift, an activation, a maximum, a product.

Every operation is a small frozen dataclass: its fields are what compilation may depend on, arrays
(weights) are passed in. A *linear* operation is linear in its arguments taken together, and each
coefficient is a product of its weights; so the same operation with the weights' absolute values
carries radii of intervals (`radius`), which is all that interval bounds need to know.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Operation:
    """Calls are `operation(weights, *arguments)`."""

    label: ClassVar[str]  # the class's name, unless it says otherwise

    def __init_subclass__(cls) -> None:
        if "label" not in cls.__dict__:
            cls.label = cls.__name__.lower()

    def __call__(self, weights, *arguments) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(Operation):
    """Linear in all arguments together."""

    def radius(self, weights, *radii):
        """The radius of the output's interval, from those of the arguments."""
        return self(jax.tree.map(_magnitude, weights), *radii)

    def size(self, weights, *arguments):
        """At least the sum of the absolute values of all terms, up to rounding."""
        return self.radius(weights, *map(jnp.abs, arguments))

    def terms(self, weights, *shapes) -> int:
        """How many products are added up for one entry; 0 where entries only move."""
        return 0

    def back_terms(self, weights, shapes) -> int:
        """The same for the transposed operation: in how many products an entry of x is used."""
        return 1


def _magnitude(weights):
    floating = jnp.issubdtype(jnp.asarray(weights).dtype, jnp.floating)
    return jnp.abs(weights) if floating else weights


@dataclass(frozen=True)
class MatMul(Linear):
    """x @ weights, or weights @ x if `left`.

    The numbers that are meant are within `loose` * 2^-52 of the weights, relative to each of these:
    importers compute constants that float64 cannot hold, such as 1/3. Bounds are charged for it.
    """

    left: bool = False
    loose: int = 0

    def __call__(self, weights, x):
        return jnp.matmul(weights, x) if self.left else jnp.matmul(x, weights)

    def terms(self, weights, *shapes) -> int:
        return (shapes[0][-1] if not self.left else jnp.shape(weights)[-1]) + self.loose

    def back_terms(self, weights, shapes) -> int:
        shape = jnp.shape(weights)
        return math.prod(shape) // shape[-1 if self.left else -2] + self.loose


@dataclass(frozen=True)
class Conv(Linear):
    """Convolution of any rank: x is (N, C, *space), weights (O, C / groups, *kernel).

    `input_dilation` above one inserts zeros between the entries of x: a transposed convolution.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    input_dilation: tuple[int, ...]
    groups: int = 1

    def __call__(self, weights, x):
        simple = self.groups == 1 and set(self.input_dilation) == {1}
        simple = simple and (set(self.strides) == {1} or set(self.dilation) == {1})
        if simple and (x.dtype == np.float64 or jax.default_backend() != "cpu"):
            return _own_conv(self, weights, x)
        return self.plain(weights, x)

    def plain(self, weights, x):
        """The convolution by XLA's own operation, and its own way back."""
        dtype = jnp.result_type(weights, x)
        weights, x = weights.astype(dtype), x.astype(dtype)
        return jax.lax.conv_general_dilated(
            x,
            weights,
            self.strides,
            self.padding,
            lhs_dilation=self.input_dilation,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
        )

    def size(self, weights, *arguments):
        # As if all entries were as large as the largest: one convolution for all boxes together.
        (x,) = arguments
        return self.radius(weights, jnp.ones(x.shape, x.dtype)) * jnp.max(jnp.abs(x))

    def terms(self, weights, *shapes) -> int:
        return math.prod(jnp.shape(weights)[1:])

    def back_terms(self, weights, shapes) -> int:
        shape = jnp.shape(weights)
        return shape[0] // self.groups * math.prod(shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _own_conv(conv: Conv, weights, x):
    """A convolution with a fast way back.

    XLA's transposed convolutions in float64 on CPUs are four to ten times slower than these, and
    with uneven padding its plain ones are up to thirty times slower than on arrays padded before.
    On GPUs, those with strides or few channels are up to six times slower; and in float64 their
    libraries compute convolutions without the units that matrix products have.
    """
    if x.dtype != np.float64:
        return conv.plain(weights, x)
    padded = jnp.pad(x, ((0, 0), (0, 0), *conv.padding))
    bare = dataclasses.replace(conv, padding=((0, 0),) * len(conv.padding))
    if jax.default_backend() != "cpu" and _patches_are_small(conv, weights):
        return _as_product(bare, weights, padded)
    return bare.plain(weights, padded)


def _patches_are_small(conv: Conv, weights) -> bool:
    """Whether all patches together are not much larger than what they are cut from."""
    return math.prod(weights.shape[2:]) <= 9 * math.prod(conv.strides)


def _as_product(conv: Conv, weights, x):
    """A convolution without padding as a matrix product: sums of the same products."""
    kernel = weights.shape[2:]
    sizes = zip(x.shape[2:], kernel, conv.strides, conv.dilation, strict=True)
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in sizes]
    patches = []
    for offset in np.ndindex(*kernel):
        first = [i * d for i, d in zip(offset, conv.dilation, strict=True)]
        ends = zip(first, counts, conv.strides, strict=True)
        last = [i + (n - 1) * s + 1 for i, n, s in ends]
        steps = (1, 1, *conv.strides)
        patch = jax.lax.slice(x, (0, 0, *first), (*x.shape[:2], *last), steps)
        patches.append(patch.reshape(*x.shape[:2], -1))
    outputs, channels = weights.shape[:2]
    flat = jnp.moveaxis(weights.reshape(outputs, channels, -1), 2, 1).reshape(outputs, -1)
    entries = jnp.concatenate(patches, axis=1)
    found = jnp.einsum("ok,nkp->nop", flat, entries, precision="highest")
    return found.reshape(len(x), outputs, *counts)


def _own_conv_fwd(conv: Conv, weights, x):
    return _own_conv(conv, weights, x), (weights, x.shape)


def _own_conv_bwd(conv: Conv, residuals, y):
    weights, shape = residuals
    # Nothing here differentiates by weights; if somebody does, they shall notice.
    nothing = jnp.full_like(weights, jnp.nan)
    outputs, *of_output = weights.shape
    # What `_spread` writes on its way must not be much more than it reads.
    narrow = math.prod(of_output) <= 2 * outputs
    if set(conv.strides) == {1} and not narrow and y.dtype != np.float64:
        like = jax.ShapeDtypeStruct(shape, y.dtype)
        (x,) = jax.linear_transpose(lambda x: conv.plain(weights, x), like)(y)
        return nothing, x
    padded = [n + sum(widths) for n, widths in zip(shape[2:], conv.padding, strict=True)]
    back = _spread if set(conv.strides) == {1} else _interleaved
    full = back(weights, y, padded, conv)
    for axis, (n, (before, _)) in enumerate(zip(shape[2:], conv.padding, strict=True), 2):
        full = jax.lax.slice_in_dim(full, before, before + n, axis=axis)
    return nothing, full


def _spread(weights, y, sizes, conv: Conv):
    """The way back of stride 1: a matrix product, whose entries are added up where they belong."""
    batch, _, *out = y.shape
    channels, *kernel = weights.shape[1:]
    flat = weights.reshape(weights.shape[0], -1)
    products = jnp.einsum("ok,nop->nkp", flat, y.reshape(batch, y.shape[1], -1))
    products = products.reshape(batch, channels, *kernel, *out)
    total = jnp.zeros((batch, channels, *sizes), y.dtype)
    for offset in np.ndindex(*kernel):
        shift = [i * d for i, d in zip(offset, conv.dilation, strict=True)]
        widths = [(q, size - n - q) for q, size, n in zip(shift, sizes, out, strict=True)]
        term = products[(slice(None), slice(None), *offset)]
        total = total + jnp.pad(term, ((0, 0), (0, 0), *widths))
    return total


def _interleaved(weights, y, sizes, conv: Conv):
    """The way back of strides above 1, without dilation.

    Entry i of the kernel at output q touches entry stride * q + i of the input. Sorted by their
    remainders modulo the stride, the entries of the input are so many plain convolutions of y: one
    with so many times the channels.
    """
    (outputs, channels, *kernel), strides = weights.shape, conv.strides
    rank = len(kernel)
    taps = [-(-k // s) for k, s in zip(kernel, strides, strict=True)]
    counts = [-(-n // s) for n, s in zip(sizes, strides, strict=True)]
    missing = [(0, t * s - k) for t, s, k in zip(taps, strides, kernel, strict=True)]
    split = [n for pair in zip(taps, strides, strict=True) for n in pair]
    weights = jnp.pad(weights, ((0, 0), (0, 0), *missing)).reshape(outputs, channels, *split)
    of_taps, of_phases = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    weights = jnp.flip(weights, of_taps).transpose(*of_phases, 1, 0, *of_taps)
    weights = weights.reshape(math.prod(strides) * channels, outputs, *taps)
    around = [(t - 1, c - n) for t, c, n in zip(taps, counts, y.shape[2:], strict=True)]
    padded = jnp.pad(y, ((0, 0), (0, 0), *around))
    ones = (1,) * rank
    found = jnp.asarray(_own_conv(Conv(ones, ((0, 0),) * rank, ones, ones), weights, padded))
    found = found.reshape(len(y), *strides, channels, *counts)
    order = [k for i in range(rank) for k in (2 + rank + i, 1 + i)]
    found = found.transpose(0, 1 + rank, *order)
    found = found.reshape(len(y), channels, *(c * s for c, s in zip(counts, strides, strict=True)))
    return found[(slice(None), slice(None), *(slice(n) for n in sizes))]


_own_conv.defvjp(_own_conv_fwd, _own_conv_bwd)


@dataclass(frozen=True)
class Scale(Linear):
    """x * weights, with broadcasting; `loose` is that of MatMul."""

    loose: int = 0

    def __call__(self, weights, x):
        return x * weights

    def terms(self, weights, *shapes) -> int:
        return 1 + self.loose

    def back_terms(self, weights, shapes) -> int:
        return max(math.prod(jnp.shape(weights)), 1) + self.loose


@dataclass(frozen=True)
class Sum(Linear):
    """The sum of the arguments, each times 1 or -1, with broadcasting."""

    signs: tuple[int, ...]

    def __call__(self, weights, *arguments):
        total: Any = 0
        for sign, x in zip(self.signs, arguments, strict=True):
            total = total + x if sign > 0 else total - x
        return total

    def radius(self, weights, *radii):
        return sum(radii)

    def terms(self, weights, *shapes) -> int:
        return len(self.signs)

    def back_terms(self, weights, shapes) -> int:
        return math.prod(np.broadcast_shapes(*shapes))


@dataclass(frozen=True)
class Reshape(Linear):
    """The entries in another shape."""

    shape: tuple[int, ...]

    def __call__(self, weights, x):
        return jnp.reshape(x, self.shape)


@dataclass(frozen=True)
class Broadcast(Linear):
    """Repeats entries along axes of length one or new leading axes."""

    shape: tuple[int, ...]

    def __call__(self, weights, x):
        return jnp.broadcast_to(x, self.shape)

    def back_terms(self, weights, shapes) -> int:
        return math.prod(self.shape) // max(math.prod(shapes[0]), 1)


@dataclass(frozen=True)
class Transpose(Linear):
    """The axes in another order."""

    axes: tuple[int, ...]

    def __call__(self, weights, x):
        return jnp.transpose(x, self.axes)


@dataclass(frozen=True)
class Slice(Linear):
    """x[start:stop:step] along every axis; steps are positive."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    steps: tuple[int, ...]

    def __call__(self, weights, x):
        return jax.lax.slice(x, self.starts, self.stops, self.steps)


@dataclass(frozen=True)
class Take(Linear):
    """Entries by index: along one axis, or of the flattened array if `axis` is None.

    The weights are an array of nonnegative integers, whose shape replaces the axis.
    """

    axis: int | None = None

    def __call__(self, weights, x):
        return jnp.take(x, weights, axis=self.axis)

    def back_terms(self, weights, shapes) -> int:
        return math.prod(jnp.shape(weights))


@dataclass(frozen=True)
class Concat(Linear):
    """The arguments one after the other along an axis."""

    axis: int

    def __call__(self, weights, *arguments):
        return jnp.concatenate(arguments, axis=self.axis)


@dataclass(frozen=True)
class Pad(Linear):
    """Zeros around x: (before, after) for every axis; negative numbers cut."""

    widths: tuple[tuple[int, int], ...]

    def __call__(self, weights, x):
        return jax.lax.pad(x, jnp.zeros((), x.dtype), [(a, b, 0) for a, b in self.widths])


@dataclass(frozen=True)
class Reduce(Linear):
    """The sum over some axes."""

    axes: tuple[int, ...]
    keepdims: bool

    def __call__(self, weights, x):
        return jnp.sum(x, axis=self.axes, keepdims=self.keepdims)

    def terms(self, weights, *shapes) -> int:
        return math.prod(shapes[0][k] for k in self.axes)


@dataclass(frozen=True)
class WindowSum(Linear):
    """The sum over a sliding window; one number for each axis of x."""

    label: ClassVar[str] = "window sum"
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def __call__(self, weights, x):
        zero = np.zeros((), x.dtype)
        return jax.lax.reduce_window(
            x, zero, jax.lax.add, self.window, self.strides, self.padding, None, self.dilation
        )

    def terms(self, weights, *shapes) -> int:
        return math.prod(self.window)

    def back_terms(self, weights, shapes) -> int:
        return math.prod(self.window)


@dataclass(frozen=True)
class Windows(Linear):
    """The entries of sliding windows, along a new last axis; one number for each axis of x."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]

    def counts(self, shape: tuple[int, ...]) -> list[int]:
        """How many windows fit into an array along each axis."""
        sizes = zip(shape, self.window, self.strides, self.dilation, strict=True)
        return [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in sizes]

    def __call__(self, weights, x):
        counts = self.counts(x.shape)
        found = []
        for place in np.ndindex(*self.window):
            first = [i * d for i, d in zip(place, self.dilation, strict=True)]
            ends = zip(first, counts, self.strides, strict=True)
            last = [i + (n - 1) * s + 1 for i, n, s in ends]
            found.append(jax.lax.slice(x, first, last, self.strides))
        return jnp.stack(found, axis=-1)

    def back_terms(self, weights, shapes) -> int:
        return math.prod(self.window)


@dataclass(frozen=True)
class Shift(Operation):
    """x + weights, with broadcasting; `loose` is that of MatMul."""

    loose: int = 0

    def __call__(self, weights, x):
        return x + weights


@dataclass(frozen=True)
class Activation(Operation):
    """One nonlinear function of each entry: see stagecert.networks.activations.

    `kind` is the name that the function is registered under; `settings` are its fixed numbers, as
    (name, value) pairs; arrays that go with the entries (the slopes of PRelu) are the weights.
    """

    kind: str
    settings: tuple[tuple[str, float], ...] = ()

    def __call__(self, weights, x):
        from stagecert.networks.activations import find

        return find(self.kind)(x, weights, **dict(self.settings))


@dataclass(frozen=True)
class Joint(Operation):
    """One number made of the entries along the last axis."""


@dataclass(frozen=True)
class Max(Joint):
    """The maximum over the last axis."""

    def __call__(self, weights, x):
        return jnp.max(x, axis=-1)


@dataclass(frozen=True)
class Product(Joint):
    """The product of the two entries of the last axis."""

    def __call__(self, weights, x):
        return x[..., 0] * x[..., 1]
