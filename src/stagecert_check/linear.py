"""The linear operations of a network, forwards and transposed.

All arrays have a leading axis (several right-hand sides at once); entries are float64, or rationals
in exact mode: the code is the same. Every operation says how many roundings there can be between
what it reads and one entry of what it makes: a sum of n products, in whatever order it is computed,
is off by at most n * eps * (the sum of the products' absolute values).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]


class Linear:
    """y = sum of W_k x_k.

    `terms`: how many roundings are in an entry of y; `back_terms`: in an entry of a cotangent;
    `loose`: how many more because coefficients are rounded themselves, even in exact mode.
    """

    terms = 0
    back_terms = 0
    loose = 0

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        """sum of W_k x_k, or of |W_k| x_k."""
        raise NotImplementedError

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """W_k^T g for every k; `shapes` are those of the x_k."""
        raise NotImplementedError


class Reshape(Linear):
    """The same entries in another shape."""

    def __init__(self, shape: Shape):
        self.shape = shape

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        return xs[0].reshape(len(xs[0]), *self.shape)

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [g.reshape(len(g), *shapes[0])]


class Move(Linear):
    """Every entry of y is an entry of some x, or zero.

    `index` says which one: it counts through all entries of all x; -1 is zero.
    """

    def __init__(self, index: np.ndarray):
        self.index = index
        flat = index.reshape(-1)
        self.places = np.flatnonzero(flat >= 0)
        order = np.argsort(flat[self.places], kind="stable")
        self.places = self.places[order]  # those that are not zero, sorted by what they read
        self.read, self.starts = np.unique(flat[self.places], return_index=True)
        counts = np.diff(np.append(self.starts, len(self.places)))
        most = int(counts.max(initial=1))
        self.copies = 0  # if every entry is read as often as the others: how often, else 0
        if len(counts) and counts.min() == most:
            # One copy of all entries after the other: adding them up is many times faster.
            self.copies = most
            self.places = self.places.reshape(-1, most).T.reshape(-1)
        self.back_terms = most if most > 1 else 0  # nothing is added up if nothing is read twice

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        rows = len(xs[0])
        flat = [x.reshape(rows, -1) for x in xs]
        flat.append(np.zeros((rows, 1), flat[0].dtype, like=flat[0]))  # index -1 is this column
        return np.concatenate(flat, axis=1)[:, self.index]

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        rows, sizes = len(g), [math.prod(shape) for shape in shapes]
        whole = np.zeros((rows, sum(sizes)), g.dtype, like=g)
        sorted_g = g.reshape(rows, -1)[:, self.places]
        if self.copies:
            whole[:, self.read] = sorted_g.reshape(rows, self.copies, -1).sum(axis=1)
        elif len(self.places):
            whole[:, self.read] = np.add.reduceat(sorted_g, self.starts, axis=1)
        parts = np.split(whole, np.cumsum(sizes)[:-1], axis=1)
        return [part.reshape(rows, *shape) for part, shape in zip(parts, shapes, strict=True)]


class MatMul(Linear):
    """x @ W, or W @ x if `left`; W is a matrix, or several for the axes of x before the last two.

    Axes of W are as long as those of x, or of length one.
    """

    def __init__(self, weights: np.ndarray, left: bool, loose: int = 0):
        self.weights, self.left, self.loose = weights, left, loose
        out, inner = weights.shape[-2:] if left else weights.shape[-2:][::-1]
        self.terms, self.back_terms = inner, out

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        return self._times(xs[0], np.abs(self.weights) if absolute else self.weights)

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [self._times(g, np.swapaxes(self.weights, -1, -2))]

    @property
    def plain(self) -> bool:
        """Whether it is x @ W with one matrix W, whose numbers are those of the model."""
        return not self.left and self.weights.ndim == 2 and not self.loose

    def of_units(self, entry: np.ndarray, shape: Shape) -> np.ndarray:
        """W^T g without rounding for each g that is one at an entry of y and zero elsewhere.

        Where the operation is `plain`; `shape` is that of x.
        """
        row, column = np.divmod(entry, self.weights.shape[1])
        columns = self.weights.T[column]
        if math.prod(shape) == len(self.weights):
            return columns.reshape(-1, *shape)
        rows = math.prod(shape) // len(self.weights)
        found = np.zeros((len(entry), rows, len(self.weights)), self.weights.dtype)
        found[np.arange(len(entry)), row] = columns
        return found.reshape(-1, *shape)

    def _times(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if self.left:
            flipped = self._right(np.swapaxes(x, -1, -2), np.swapaxes(weights, -1, -2))
            return np.swapaxes(flipped, -1, -2)
        return self._right(x, weights)

    @staticmethod
    def _right(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if weights.ndim > 2:
            return np.matmul(x, weights)
        # One product of two matrices is much faster than many small ones.
        return (x.reshape(-1, len(weights)) @ weights).reshape(*x.shape[:-1], -1)


class Scale(Linear):
    """x times a constant, entry by entry."""

    terms = back_terms = 1

    def __init__(self, weights: np.ndarray, loose: int = 0):
        self.weights, self.loose = weights, loose

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        return xs[0] * (np.abs(self.weights) if absolute else self.weights)

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [g * self.weights]


class Sum(Linear):
    """The sum of values of one shape, each times 1 or -1."""

    def __init__(self, signs: Sequence[int]):
        self.signs = tuple(signs)
        self.terms = len(self.signs)

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        total = xs[0] if absolute or self.signs[0] > 0 else -xs[0]
        for x, sign in zip(xs[1:], self.signs[1:], strict=True):
            total = total + x if absolute or sign > 0 else total - x
        return total

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [g if sign > 0 else -g for sign in self.signs]


class Reduce(Linear):
    """The sum over some axes, which stay with length one."""

    def __init__(self, axes: Sequence[int], shape: Shape):
        self.axes = tuple(axis + 1 for axis in axes)
        self.terms = math.prod(shape[axis] for axis in axes)

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        return np.sum(xs[0], axis=self.axes, keepdims=True)

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [np.broadcast_to(g, (len(g), *shapes[0]))]


class Conv(Linear):
    """A convolution: x is (N, C, *space), weights are (O, C / groups, *kernel).

    `count` is how many windows there are along each axis.
    """

    def __init__(
        self,
        weights: np.ndarray,
        groups: int,
        strides: Sequence[int],
        dilations: Sequence[int],
        before: Sequence[int],
        count: Any,
        loose: Any = 0,
    ):
        self.weights, self.groups, self.loose = weights, groups, loose
        self.strides, self.dilations, self.before, self.count = strides, dilations, before, count
        self.terms = math.prod(weights.shape[1:])
        self.back_terms = weights.shape[0] // groups * math.prod(weights.shape[2:])

    def _padded(self, space: Sequence[int]) -> list[int]:
        """The lengths of the padded axes: as far as any window or the input itself reaches."""
        kernel = self.weights.shape[2:]
        reach = [
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(self.count, self.strides, kernel, self.dilations, strict=True)
        ]
        return [max(r, b + n) for r, b, n in zip(reach, self.before, space, strict=True)]

    def _windows(self) -> Iterator[tuple[np.ndarray, tuple[slice, ...]]]:
        """For every place in the kernel: its weights by group, and the entries that it reads."""
        weights = self.weights.reshape(self.groups, -1, *self.weights.shape[1:])
        for offset in np.ndindex(*self.weights.shape[2:]):
            slices = tuple(
                slice(i * d, i * d + (n - 1) * s + 1, s)
                for i, d, n, s in zip(offset, self.dilations, self.count, self.strides, strict=True)
            )
            yield weights[(..., *offset)], (slice(None), slice(None), *slices)

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        # The axis N is counted with the rows.
        x = xs[0].reshape(-1, *xs[0].shape[2:])
        rows, channels, *space = x.shape
        padded = np.zeros((rows, channels, *self._padded(space)), x.dtype, like=x)
        inside = tuple(slice(b, b + n) for b, n in zip(self.before, space, strict=True))
        padded[(slice(None), slice(None), *inside)] = x
        total: Any = 0
        for weights, window in self._windows():
            weights = np.abs(weights) if absolute else weights
            read = padded[window].reshape(rows, self.groups, channels // self.groups, -1)
            total = total + np.matmul(weights, read)
        return total.reshape(*xs[0].shape[:2], -1, *self.count)

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        rows, (_, channels, *space) = g.shape[0] * g.shape[1], shapes[0]
        g = g.reshape(rows, self.groups, self.weights.shape[0] // self.groups, -1)
        padded = np.zeros((rows, channels, *self._padded(space)), g.dtype, like=g)
        if self._tiles():
            self._lay(padded, g)
        else:
            for weights, window in self._windows():
                back = np.matmul(weights.swapaxes(1, 2), g)
                padded[window] += back.reshape(rows, channels, *self.count)
        inside = tuple(slice(b, b + n) for b, n in zip(self.before, space, strict=True))
        return [padded[(slice(None), slice(None), *inside)].reshape(-1, *shapes[0])]

    def _tiles(self) -> bool:
        """Whether windows lie side by side, as patches of an image do."""
        apart = all(d == 1 for d in self.dilations)
        return apart and tuple(self.strides) == self.weights.shape[2:]

    def _lay(self, padded: np.ndarray, g: np.ndarray) -> None:
        """Writes all windows of a transposed convolution, which do not overlap."""
        kernel, count = self.weights.shape[2:], tuple(self.count)
        weights = self.weights.reshape(self.groups, g.shape[2], -1)
        back = np.matmul(weights.swapaxes(1, 2), g).reshape(*padded.shape[:2], *kernel, *count)
        n = len(kernel)
        order = [axis for k in range(n) for axis in (2 + n + k, 2 + k)]
        whole = tuple(c * k for c, k in zip(count, kernel, strict=True))
        tiles = back.transpose(0, 1, *order).reshape(*padded.shape[:2], *whole)
        padded[(slice(None), slice(None), *map(slice, whole))] = tiles


class ConvTranspose(Linear):
    """The transpose of a convolution whose input has the shape `shape`."""

    def __init__(self, conv: Conv, shape: Shape):
        self.conv, self.shape = conv, shape
        self.terms, self.back_terms, self.loose = conv.back_terms, conv.terms, conv.loose

    def forward(self, xs: Sequence[np.ndarray], absolute: bool = False) -> np.ndarray:
        conv = self.conv
        if absolute:
            conv = Conv(
                np.abs(conv.weights), conv.groups, conv.strides, conv.dilations, conv.before,
                conv.count,
            )  # fmt: skip
        return conv.transposed(xs[0], [self.shape])[0]

    def transposed(self, g: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [self.conv.forward([g])]
