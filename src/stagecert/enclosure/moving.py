"""Primitives that move entries (slices, gathers, pads), and convolutions, on NumPy arrays."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.lax import GatherScatterMode

from stagecert.enclosure.intervals import EPS, Interval, down, products, up
from stagecert.errors import ProblemError


def pad(x: np.ndarray, value, config) -> np.ndarray:
    """JAX's pad: (before, after, between) for each axis; negative numbers cut."""
    shape = [b + a + n + i * max(n - 1, 0) for n, (b, a, i) in zip(x.shape, config, strict=True)]
    whole = [
        max(n + max(-b, 0) + max(-a, 0), 0) for n, (b, a, _) in zip(shape, config, strict=True)
    ]
    out = np.full(whole, value, x.dtype)
    inside = tuple(
        slice(max(b, 0), max(b, 0) + n + i * max(n - 1, 0), i + 1)
        for n, (b, _, i) in zip(x.shape, config, strict=True)
    )
    out[inside] = x
    kept = tuple(
        slice(max(-b, 0), max(-b, 0) + n) for n, (b, *_) in zip(shape, config, strict=True)
    )
    return out[kept]


def starts_of(indices: list[Interval], shape, sizes) -> list[int]:
    """Where a dynamic slice begins: brought into the array, as JAX does."""
    found = []
    for index, n, size in zip(indices, shape, sizes, strict=True):
        first = whole_numbers(index, "the start of a dynamic slice")
        found.append(min(max(int(first), 0), n - size))
    return found


def whole_numbers(x: Interval, what: str) -> np.ndarray:
    """The whole numbers that an interval decides; a ProblemError if it does not."""
    if not x.is_point and not np.array_equal(x.low, x.high):
        raise ProblemError(f"Rounding leaves open what {what} is: no rigorous bound.")
    return x.low


class _Windows(NamedTuple):
    """Parts of an array that indices choose.

    Attributes:
        axes: of the windows' entries, in the result.
        skipped: axes of the array that windows do not have.
        index_map: the axes of the array that the indices' numbers are about.
        batching: pairs (axis of the array, axis of `indices`).
        sizes: of a window, along all axes of the array.
        mode: what is done with windows that are not inside.
    """

    axes: Sequence[int]
    skipped: Sequence[int]
    index_map: Sequence[int]
    batching: Sequence[tuple[int, int]]
    sizes: Sequence[int]
    mode: Any


def _places(indices, shape, out_rank: int, windows: _Windows):
    """For every entry of the windows: its place in the array, and whether that is inside."""
    axes, skipped, index_map, batching, sizes, mode = windows
    batch_axes = [k for k in range(out_rank) if k not in axes]
    kept = [d for d in range(len(shape)) if d not in skipped]
    inside: np.ndarray = np.array(True)
    places = []

    def along(array, where):
        """An array whose axes are some of the result's."""
        expanded = [1] * out_rank
        for axis, n in zip(where, array.shape, strict=True):
            expanded[axis] = n
        return array.reshape(expanded)

    for d, n in enumerate(shape):
        first: np.ndarray = np.zeros([1] * out_rank, np.int64)
        if d in index_map:
            first = along(indices[..., index_map.index(d)], batch_axes)
            last = n - sizes[d]
            if mode in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
                first = np.clip(first, 0, last)
            else:
                ok = (first >= 0) & (first <= last)
                inside, first = inside & ok, np.where(ok, first, 0)
        for own, of_indices in batching:
            if own == d:
                first = along(np.arange(n), [batch_axes[of_indices]])
        if d in kept:
            first = first + along(np.arange(sizes[d]), [axes[kept.index(d)]])
        places.append(first)
    return tuple(places), inside


def gather(x: Interval, indices: Interval, shape, params) -> Interval:
    """JAX's gather."""
    numbers = params["dimension_numbers"]
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    windows = _Windows(
        numbers.offset_dims,
        (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims),
        numbers.start_index_map,
        list(batching),
        params["slice_sizes"],
        params["mode"],
    )
    places, inside = _places(whole_numbers(indices, "an index"), x.shape, len(shape), windows)
    fill = params.get("fill_value")
    outside = np.nan if fill is None and x.is_float else fill or 0

    def taken(array):
        found = np.broadcast_to(array[np.broadcast_arrays(*places)] if places else array, shape)
        return found if np.all(inside) else np.where(inside, found, outside)

    return x.map(taken)


def scatter_add(x: Interval, indices: Interval, updates: Interval, params) -> Interval:
    """JAX's scatter-add."""
    numbers = params["dimension_numbers"]
    skipped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(x.low.ndim) if d not in skipped]
    sizes = [1] * x.low.ndim
    for d, axis in zip(kept, numbers.update_window_dims, strict=True):
        sizes[d] = updates.shape[axis]
    batching = zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    )
    windows = _Windows(
        numbers.update_window_dims,
        skipped,
        numbers.scatter_dims_to_operand_dims,
        list(batching),
        sizes,
        params["mode"],
    )
    places, inside = _places(whole_numbers(indices, "an index"), x.shape, updates.low.ndim, windows)
    inside = np.broadcast_to(inside, updates.shape)
    at = tuple(np.broadcast_to(place, updates.shape)[inside] for place in places)
    count = np.zeros(x.shape)
    np.add.at(count, at, 1.0)

    def summed(array, update):
        total, size = np.array(array, np.float64), np.abs(array).astype(np.float64)
        alone = (count <= 1) & (array == 0)
        np.add.at(total, at, update[inside])
        np.add.at(size, at, np.abs(update[inside]))
        return total, np.where(alone, 0, (count + 1) * EPS * size)

    low, off = summed(x.low, updates.low)
    if x.is_point and updates.is_point:
        high, off_high = low, off
    else:
        high, off_high = summed(x.high, updates.high)
    return Interval(
        np.where(off == 0, low, down(low - off)), np.where(off_high == 0, high, up(high + off_high))
    )


def convolution(x: Interval, kernel: Interval, params) -> Interval:
    """JAX's conv_general_dilated."""
    numbers = params["dimension_numbers"]
    groups = params["feature_group_count"]
    flat = [(0, 0, 0), (0, 0, 0)]
    spread = [
        (before, after, d - 1)
        for (before, after), d in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    back = np.argsort(numbers.out_spec)

    def convolved(image, weights):
        image = pad(image.transpose(numbers.lhs_spec), 0.0, [*flat, *spread])
        weights = weights.transpose(numbers.rhs_spec)
        window = weights.shape[2:]
        views = np.lib.stride_tricks.sliding_window_view(
            image,
            [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)],
            axis=tuple(range(2, image.ndim)),
        )
        space = tuple(slice(None, None, s) for s in strides)
        inner = tuple(slice(None, None, d) for d in dilation)
        views = views[(slice(None), slice(None), *space, *inner)]
        count = views.shape[2 : 2 + len(window)]
        batch, channels = image.shape[:2]
        views = views.reshape(batch, groups, channels // groups, math.prod(count), -1)
        rows = views.transpose(0, 1, 3, 2, 4).reshape(batch, groups, math.prod(count), -1)
        matrices = weights.reshape(groups, weights.shape[0] // groups, -1)
        out = np.matmul(rows, matrices.swapaxes(1, 2)[None]).swapaxes(2, 3)
        return out.reshape(batch, weights.shape[0], *count).transpose(back)

    spec = numbers.rhs_spec
    terms = math.prod(kernel.shape) // kernel.shape[spec[0]]
    return products(x, kernel, convolved, terms)
