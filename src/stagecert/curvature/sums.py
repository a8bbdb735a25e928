"""Rules for sums, products, quotients and powers, entry by entry, and for contractions.

Dot products and convolutions are sums of products with constants, or quadratic forms.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.curvature.lattice import (
    CONCAVE,
    CONSTANT,
    CONVEX,
    LOG_CONVEX,
    NOTHING_KNOWN,
    ROOT_CONVEX,
    ROUNDING,
    Known,
    Linear,
    Origin,
    Shifted,
    cleared,
    composed,
    constant,
    definite,
    joined,
    known,
    negative,
    outward,
    product_ends,
    rule,
    scaled_doubts,
    squared,
    sum_down,
    unknown,
)

# -- sums and products -----------------------------------------------------------------------------


@rule("add", "add_any")
def plus(x: Known, y: Known, **_) -> Known:
    for a, b in ((x, y), (y, x)):
        # log(sum(exp(x - m))) + m, whatever m is.
        note = shifted_at(a, "logarithm")
        if note is not None and note.by.same(b.origin):
            convex = (note.doubts & LOG_CONVEX) == 0
            doubts = np.where(convex, NOTHING_KNOWN ^ CONVEX, NOTHING_KNOWN)
            return known(-np.inf, np.inf, doubts)
    lo, hi = sum_down(x.lo, y.lo), -sum_down(-x.hi, -y.hi)
    linear = next(
        (a.linear for a, b in ((x, y), (y, x)) if a.linear and b.constant and a.shape == lo.shape),
        None,
    )
    out = known(lo, hi, x.doubts | y.doubts, linear=linear)
    fits = [v for v in (x, y) if v.shape == out.shape]
    slope = next((v.slope for v in fits if (y if v is x else x).constant), None)
    bend = None
    if out.has(CONVEX).all():
        bend = joined(*([v.bend for v in fits] + [None])[:2])
    return replace(out, slope=slope, bend=bend)


def shifted_at(x: Known, stage: str) -> Shifted | None:
    """The note of x, if it has come so far on the way to a logsumexp."""
    return x.shifted if x.shifted is not None and x.shifted.stage == stage else None


@rule("neg")
def turned(x: Known, **_) -> Known:
    return negative(x)


@rule("sub")
def minus(x: Known, y: Known, **_) -> Known:
    out = plus(x, negative(y))
    if y.constant or x.shape != out.shape:
        return out
    # exp(x) is log-convex where x is convex; what is subtracted is added again after a logarithm.
    doubts = np.where(x.has(CONVEX), 0, LOG_CONVEX).astype(np.uint8)
    index = np.broadcast_to(y.origin.index, out.shape)
    return replace(out, shifted=Shifted(doubts, Origin(y.origin.number, index)))


@rule("mul")
def times(x: Known, y: Known, **_) -> Known:
    lo, hi = product_ends(x, y)
    doubts = np.full(lo.shape, NOTHING_KNOWN, np.uint8)
    both = x.has(LOG_CONVEX) & y.has(LOG_CONVEX) & (x.lo >= 0) & (y.lo >= 0)
    doubts = np.where(both, CONCAVE | CONSTANT, doubts)
    doubts = np.where(y.has(CONSTANT), scaled_doubts(x.doubts, y.lo, y.hi), doubts)
    doubts = np.where(x.has(CONSTANT), scaled_doubts(y.doubts, x.lo, x.hi), doubts)
    out = known(lo, hi, doubts)
    for a, b in ((x, y), (y, x)):
        if a.constant:
            return replace(out, **_scaled_notes(b, a, out.shape))
        if a.logarithm_of is not None and a.logarithm_of.same(b.origin):
            # x log x, which is not a number where x < 0.
            return cleared(out, b.has(CONVEX | CONCAVE), CONVEX)
        if a.linear is not None and _reads(a.linear, b):
            return replace(out, quadratic=a.linear)
    if x.origin.same(y.origin):
        return whole_power(x, 2)
    return out


def _scaled_notes(x: Known, factor: Known, shape) -> dict[str, Any]:
    """What survives multiplication by a constant."""
    notes: dict[str, Any] = {}
    if x.shape != shape:
        return notes
    if factor.exact and np.unique(factor.lo).size == 1:
        number = float(factor.lo.flat[0])
        for note in ("linear", "quadratic"):
            held = getattr(x, note)
            if held is not None:
                notes[note] = replace(held, matrix=number * held.matrix)
    if factor.exact and x.slope is not None:
        notes["slope"] = x.slope.scaled(factor.lo)
    if (factor.lo >= 0).all():
        notes["bend"] = None if x.bend is None else x.bend.scaled(factor.lo, shape)
        notes["shifted"] = shifted_at(x, "exponential")
    return notes


def _reads(linear: Linear, root: Known) -> bool:
    """Whether the array has, along the linear value's columns, the entries that it was made of."""
    if root.origin.number != linear.number or linear.axis >= len(root.shape):
        return False
    index = np.moveaxis(root.origin.index, linear.axis, -1)
    return index.shape == linear.rows.shape and np.array_equal(index, linear.rows)


@rule("div")
def over(x: Known, y: Known, **_) -> Known:
    if y.constant:
        safe = (y.lo > 0) | (y.hi < 0)
        inverse = known(np.where(safe, 1 / y.hi, -np.inf), np.where(safe, 1 / y.lo, np.inf), 0)
        lo, hi = outward(inverse.lo, inverse.hi, np.abs(inverse.lo) + np.abs(inverse.hi))
        signed = known(
            np.where(y.lo > 0, np.maximum(lo, 0), lo), np.where(y.hi < 0, np.minimum(hi, 0), hi), 0
        )
        if y.exact:
            signed = constant(1 / y.lo)
        return times(x, signed)
    inverse = whole_power(y, -1)
    if x.constant:
        return times(x, inverse)
    out = times(x, inverse)
    # A square over a positive concave value.
    return cleared(out, x.has(ROOT_CONVEX) & y.has(CONCAVE) & (y.lo >= 0), CONVEX)


@rule("reduce_sum")
def reduce_sum(x: Known, axes, **_) -> Known:
    terms = int(np.prod([x.shape[a] for a in axes], initial=1))
    size = np.sum(np.where(np.isfinite(x.lo) & np.isfinite(x.hi), np.abs(x.lo) + np.abs(x.hi), 0),
                  axis=axes)  # fmt: skip
    lo, hi = outward(x.lo.sum(axis=axes), x.hi.sum(axis=axes), size, terms)
    lo = np.where((x.lo >= 0).all(axis=axes), np.maximum(lo, 0), lo)
    hi = np.where((x.hi <= 0).all(axis=axes), np.minimum(hi, 0), hi)
    bend = None if x.bend is None or not x.has(CONVEX).all() else x.bend.summed(x.shape, axes)
    out = known(lo, hi, np.bitwise_or.reduce(x.doubts, axis=axes), bend=bend)
    form = x.quadratic
    if form is not None and form.axis in axes:
        return cleared(out, True, definite(form.matrix))
    note = shifted_at(x, "exponential")
    if note is not None and terms:
        index = note.by.index
        if (index.max(axis=axes) == index.min(axis=axes)).all():
            by = Origin(note.by.number, index.max(axis=axes))
            doubts = np.bitwise_or.reduce(note.doubts, axis=axes)
            return replace(out, shifted=Shifted(doubts, by, "exponential"))
    return out


@rule("cumsum")
def _cumsum(x: Known, axis, reverse, **_) -> Known:
    turn = (lambda a: np.flip(a, axis)) if reverse else (lambda a: a)

    def along(function, array):
        return turn(function.accumulate(turn(array), axis=axis))

    size = along(np.add, np.where(np.isfinite(x.lo + x.hi), np.abs(x.lo) + np.abs(x.hi), 0))
    lo, hi = outward(along(np.add, x.lo), along(np.add, x.hi), size, x.shape[axis])
    lo = np.where(along(np.minimum, x.lo) >= 0, np.maximum(lo, 0), lo)
    hi = np.where(along(np.maximum, x.hi) <= 0, np.minimum(hi, 0), hi)
    return known(lo, hi, along(np.bitwise_or, x.doubts))


# -- powers ----------------------------------------------------------------------------------------


def monotone(x: Known, function, doubts, up=True, floor=-np.inf, ceiling=np.inf) -> Known:
    """A monotone function with the given doubts about its curvature on [lo, hi]."""
    ends = [np.asarray(function(e), float) for e in (x.lo, x.hi)]
    lo, hi = ends if up else ends[::-1]
    lo = np.where(np.isnan(lo), floor, lo)
    hi = np.where(np.isnan(hi), ceiling, hi)
    # The functions of the C library are trusted to a few units in the last place.
    sizes = [np.where(np.isfinite(e), np.abs(e), 0) for e in (lo, hi)]
    lo, hi = lo - 4 * ROUNDING * sizes[0], hi + 4 * ROUNDING * sizes[1]
    lo, hi = np.maximum(lo, floor), np.minimum(hi, ceiling)
    return composed(x, lo, hi, np.broadcast_to(doubts, x.shape), up, not up)


def _even_power(x: Known, n: int) -> Known:
    ends = np.stack([np.abs(x.lo), np.abs(x.hi)])
    touches = (x.lo <= 0) & (x.hi >= 0)
    low = np.where(touches, 0, ends.min(axis=0)) ** n
    high = ends.max(axis=0) ** n
    lo, hi = outward(low, high, np.where(np.isfinite(low + high), low + high, 0), n)
    out = composed(x, np.maximum(lo, 0), hi, np.full(x.shape, CONCAVE), x.lo >= 0, x.hi <= 0)
    # |x| is convex under the same conditions, and so is every power of it from the first on.
    return cleared(out, out.has(CONVEX), ROOT_CONVEX)


@rule("square")
def _square(x: Known, **_) -> Known:
    return whole_power(x, 2)


@rule("integer_pow")
def whole_power(x: Known, y: int, **_) -> Known:
    if y == 0:
        return constant(np.ones(x.shape))
    if y == 1:
        return x
    if y > 0:
        if y % 2 == 0:
            out = _even_power(x, y)
            out = replace(out, bend=squared(x.slope)) if y == 2 else out
        else:
            doubts = np.where(x.lo >= 0, CONCAVE, np.where(x.hi <= 0, CONVEX, CONVEX | CONCAVE))
            out = monotone(x, lambda e: e**y, doubts)
            out = cleared(out, (x.lo >= 0) & out.has(CONVEX), ROOT_CONVEX)
            out = replace(out, lo=np.where(x.lo >= 0, np.maximum(out.lo, 0), out.lo))
        grown = x.has(LOG_CONVEX) & (x.lo >= 0)
        return cleared(out, grown, CONVEX | LOG_CONVEX | ROOT_CONVEX)
    # Negative powers have a pole at zero, which separates two functions of their own.
    inverse = monotone(x, lambda e: np.where(e == 0, np.inf, 1.0 / e), CONCAVE, False, 0.0)
    turned = monotone(negative(x), lambda e: np.where(e == 0, np.inf, 1.0 / e), CONCAVE, False, 0.0)
    power = inverse if y == -1 else whole_power(inverse, -y)
    other = turned if y == -1 else whole_power(turned, -y)
    other = other if y % 2 == 0 else negative(other)
    # One over a positive concave value is log-convex.
    power = cleared(power, x.has(CONCAVE) & (x.lo >= 0), LOG_CONVEX | ROOT_CONVEX | CONVEX)
    # At zero itself the sign of the infinity is that of the floating-point zero: positive.
    above, below = x.lo >= 0, x.hi < 0
    return known(
        np.where(above, power.lo, np.where(below, other.lo, -np.inf)),
        np.where(above, power.hi, np.where(below, other.hi, np.inf)),
        np.where(above, power.doubts, np.where(below, other.doubts, NOTHING_KNOWN)),
    )


# -- contractions and convolutions -----------------------------------------------------------------


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
