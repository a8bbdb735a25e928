"""Rules for dot products and convolutions: sums of products with constants, and quadratic forms."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.curvature.lattice import (
    CONCAVE,
    CONSTANT,
    CONVEX,
    LOG_CONVEX,
    ROOT_CONVEX,
    Known,
    Linear,
    Origin,
    cleared,
    definite,
    known,
    outward,
    rule,
    unknown,
)
from stagecert.curvature.sums import reduce_sum, times, whole_power


@rule("dot_general")
def _dot_general(x: Known, y: Known, dimension_numbers, **_) -> Known:
    (of_x, of_y), (batch_x, batch_y) = dimension_numbers
    if len(x.shape) == len(y.shape) == len(of_x) == 1:
        return reduce_sum(times(x, y), axes=(0,))
    a, b = _arranged(x, of_x, batch_x), _arranged(y, of_y, batch_y)
    free = [
        tuple(n for k, n in enumerate(v.shape) if k not in (*used, *batch))
        for v, used, batch in ((x, of_x, batch_x), (y, of_y, batch_y))
    ]
    batch = tuple(x.shape[k] for k in batch_x)
    shape = (*batch, *free[0], *free[1])
    if x.constant or y.constant:
        out = _weighted_sums(b, a, lambda w, v: v @ np.swapaxes(w, -1, -2)) if y.constant else (
            _weighted_sums(a, b, lambda w, v: w @ np.swapaxes(v, -1, -2))
        )  # fmt: skip
        out = known(*(part.reshape(shape) for part in out))
        return replace(out, linear=_linear(x, y, dimension_numbers))
    terms = _products(a, b)
    if terms is not None:
        return _reshaped(reduce_sum(terms, axes=(3,)), shape)
    for form, root, axes, batch_axes, roots, root_batch in (
        (x.linear, y, of_x, batch_x, of_y, batch_y),
        (y.linear, x, of_y, batch_y, of_x, batch_x),
    ):
        if form is None or form.axis not in axes or root.origin.number != form.number:
            continue
        # All other axes must be paired as well, so that every entry meets its own.
        pairs = dict(zip((*axes, *batch_axes), (*roots, *root_batch), strict=True))
        if len(pairs) != len(root.shape) or len(root.shape) != form.rows.ndim:
            continue
        index = np.transpose(root.origin.index, [pairs[k] for k in range(len(pairs))])
        index = np.moveaxis(index, form.axis, -1)
        if np.array_equal(index, form.rows):
            return cleared(unknown(shape), True, definite(form.matrix))
    return unknown(shape)


def _reshaped(x: Known, shape) -> Known:
    return known(x.lo.reshape(shape), x.hi.reshape(shape), x.doubts.reshape(shape))


def _arranged(x: Known, contracted, batch) -> Known:
    """With axes (batch, free, contracted), each of them flattened."""
    rest = [k for k in range(len(x.shape)) if k not in (*contracted, *batch)]
    sizes = [int(np.prod([x.shape[k] for k in g], initial=1)) for g in (batch, rest, contracted)]

    def arrange(array):
        return np.transpose(array, [*batch, *rest, *contracted]).reshape(sizes)

    origin = Origin(x.origin.number, arrange(x.origin.index))
    return Known(arrange(x.lo), arrange(x.hi), arrange(x.doubts), origin)


def _products(a: Known, b: Known) -> Known | None:
    """All products of a small contraction, where some of them have a rule of their own."""
    count, rows, terms = a.lo.shape
    if count * rows * b.lo.shape[1] * terms > 1_000_000 or a.origin.number != b.origin.number:
        return None

    def spread(v: Known, axis) -> Known:
        parts = (np.expand_dims(p, axis) for p in (v.lo, v.hi, v.doubts))
        return known(*parts, origin=Origin(v.origin.number, np.expand_dims(v.origin.index, axis)))

    a, b = spread(a, 2), spread(b, 1)
    same = np.broadcast_arrays(a.origin.index, b.origin.index)
    out = times(a, b)
    squares = whole_power(a, 2)
    equal = same[0] == same[1]
    return known(
        np.where(equal, squares.lo, out.lo),
        np.where(equal, squares.hi, out.hi),
        np.where(equal, squares.doubts, out.doubts),
    )


def _weighted_sums(weights: Known, values: Known, combine: Callable):
    """(lo, hi, doubts) of sums of values times constant weights.

    combine(w, v) sums products over the contracted axis, in the order of the output.
    """

    def some(w, v):
        return combine(w.astype(np.float32), v.astype(np.float32)) > 0

    up, down = weights.hi > 0, weights.lo < 0
    doubts = 0
    convex, concave = (values.doubts & CONVEX) > 0, (values.doubts & CONCAVE) > 0
    plain = np.ones_like(convex)
    doubts = doubts | np.where(some(up, convex) | some(down, concave), CONVEX, 0)
    doubts = doubts | np.where(some(up, concave) | some(down, convex), CONCAVE, 0)
    doubts = doubts | np.where(some(up | down, (values.doubts & CONSTANT) > 0), CONSTANT, 0)
    negative_terms = some(down, plain)
    for kind in (LOG_CONVEX, ROOT_CONVEX):
        bad = some(up, (values.doubts & kind) > 0) | negative_terms
        doubts = doubts | np.where(bad, kind, 0)
    # The ends: positive weights take the same end, negative ones the other. Where an end is
    # infinite, only whether it is used matters.
    finite_lo, finite_hi = np.isfinite(values.lo), np.isfinite(values.hi)
    low, high = np.where(finite_lo, values.lo, 0), np.where(finite_hi, values.hi, 0)
    if weights.exact:
        plus, minus = np.maximum(weights.lo, 0), np.minimum(weights.lo, 0)
        lo = combine(plus, low) + combine(minus, high)
        hi = combine(plus, high) + combine(minus, low)
    else:
        ends = [np.where(np.isfinite(w), w, 0) for w in (weights.lo, weights.hi)]
        plus = [np.maximum(w, 0) for w in ends]
        minus = [np.minimum(w, 0) for w in ends]
        low_n, low_p = np.minimum(low, 0), np.maximum(low, 0)
        high_n, high_p = np.minimum(high, 0), np.maximum(high, 0)
        lo = combine(plus[1], low_n) + combine(plus[0], low_p) + combine(minus[0], high_p)
        lo = lo + combine(minus[1], high_n)
        hi = combine(plus[1], high_p) + combine(plus[0], high_n) + combine(minus[0], low_n)
        hi = hi + combine(minus[1], low_p)
    size = combine(
        np.maximum(*(np.where(np.isfinite(w), np.abs(w), 0) for w in (weights.lo, weights.hi))),
        np.maximum(np.abs(low), np.abs(high)),
    )
    lo, hi = outward(lo, hi, size, 2 * max(weights.shape[-1], 1))
    nonnegative = ~(some(up, values.lo < 0) | some(down, values.hi > 0))
    nonpositive = ~(some(up, values.hi > 0) | some(down, values.lo < 0))
    lo = np.where(nonnegative, np.maximum(lo, 0), lo)
    hi = np.where(nonpositive, np.minimum(hi, 0), hi)
    endless = ~np.isfinite(weights.lo) | ~np.isfinite(weights.hi)
    wild = some(endless, np.ones_like(convex) & ((values.lo != 0) | (values.hi != 0)))
    lo = np.where(some(up, ~finite_lo) | some(down, ~finite_hi), -np.inf, lo)
    hi = np.where(some(up, ~finite_hi) | some(down, ~finite_lo), np.inf, hi)
    lo = np.where(wild, np.where(nonnegative, 0, -np.inf), lo)
    hi = np.where(wild, np.where(nonpositive, 0, np.inf), hi)
    return lo, hi, doubts


def _linear(x: Known, y: Known, dimension_numbers) -> Linear | None:
    """Notes a product of an array and a square matrix of numbers, for quadratic forms."""
    (of_x, of_y), (batch, _) = dimension_numbers
    if batch or len(of_x) != 1:
        return None
    (a,), (b,) = of_x, of_y
    for matrix, value, m, v, first in ((y, x, b, a, False), (x, y, a, b, True)):
        square = len(matrix.shape) == 2 and matrix.shape[0] == matrix.shape[1]
        if matrix.exact and square and not value.constant and value.affine:
            rows = np.moveaxis(value.origin.index, v, -1)
            arranged = matrix.lo if m == 0 else matrix.lo.T
            axis = 0 if first else len(value.shape) - 1
            return Linear(value.origin.number, rows, arranged, axis)
    return None


@rule("conv_general_dilated")
def _convolution(x: Known, y: Known, **parameters) -> Known:
    if not (x.constant or y.constant):
        shape = jax.eval_shape(
            lambda a, b: jax.lax.conv_general_dilated_p.bind(a, b, **parameters),
            *(jax.ShapeDtypeStruct(v.shape, np.float32) for v in (x, y)),
        ).shape
        return unknown(shape)

    def combine(w, v):
        pair = (v, w) if y.constant else (w, v)
        types = dict(parameters, preferred_element_type=np.result_type(w, v))
        return np.asarray(
            jax.lax.conv_general_dilated_p.bind(*(jnp.asarray(p) for p in pair), **types)
        )

    weights, values = (y, x) if y.constant else (x, y)
    # A sum has at most as many terms as there are weights.
    lo, hi, doubts = _weighted_sums(weights, values, combine)
    return known(lo, hi, doubts)
