"""What the equations of a traced function make of affine values."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse as sparse

from stagecert import jaxprs, pieces
from stagecert.curvature import NUMPY, PLACES, STRUCTURAL, constant, mover
from stagecert.programme.rows import Written
from stagecert.programme.values import (
    MOST_ENTRIES,
    Affine,
    NoProgrammeError,
    Products,
    added,
    affine,
    entries,
    negative,
    picking,
    size_of,
)


class Reader:
    """What an equation makes of values: arrays of numbers, or `Affine`."""

    def __init__(self, w: Written):
        self.w = w

    def __call__(self, equation, values: list) -> list | None:
        if jaxprs.body_of_call(equation) is not None:
            return None
        name = equation.primitive.name
        shape = tuple(equation.outvars[0].aval.shape)
        is_piece = equation.primitive in pieces.PIECES
        if all(isinstance(v, np.ndarray) for v in values) and not is_piece:
            return _computed(equation, values)
        if name in STRUCTURAL:
            return [_moved(equation, values, shape)]
        rule = _RULES.get(name)
        if rule is None:
            raise NoProgrammeError
        found = rule(self.w, equation, shape, *values)
        return found if isinstance(found, list) else [found]


def _computed(equation, values: list) -> list:
    name = equation.primitive.name
    if name in NUMPY and all(v.dtype in (np.float64, np.bool_) for v in values):
        return [np.asarray(NUMPY[name](*values))]
    if name in STRUCTURAL and name not in PLACES:
        move = mover(equation, [])
        if move is not None:
            return [np.asarray(move(*values))]
    return [np.asarray(x) for x in jaxprs.bind(equation, [jnp.asarray(v) for v in values])]


def _moved(equation, values: list, shape) -> Affine:
    """Entries of arguments, in other places; those from nowhere are refused."""
    places: list[Any] = [constant(v) if isinstance(v, np.ndarray) else None for v in values]
    name = equation.primitive.name
    first, last = PLACES.get(name, (len(values), len(values)))
    if any(place is None for place in places[first:last]):
        raise NoProgrammeError
    move = mover(equation, places)
    assert move is not None
    values = values[:first] + (values[last:] if last is not None else [])
    sizes = [size_of(v.shape) for v in values]
    starts = np.cumsum([0, *sizes])
    numbers = move(
        *(
            s + np.arange(n, dtype=float).reshape(v.shape)
            for s, n, v in zip(starts, sizes, values, strict=False)
        )
    )
    if np.isnan(numbers).any():
        raise NoProgrammeError
    pick = picking(np.asarray(numbers).astype(np.int64), starts[-1])
    parts = [
        affine(v, v.shape).mapped(pick[:, begin : begin + n], shape)
        for v, begin, n in zip(values, starts, sizes, strict=False)
    ]
    return added(shape, *parts)


def _plus(sign: float) -> Callable:
    def rule(w, equation, shape, a, b):
        a, b = affine(a, shape), affine(b, shape)
        return added(shape, a, b if sign > 0 else negative(b))

    return rule


def _scaled(x: Affine, by: Any, shape) -> Affine:
    by = np.broadcast_to(np.asarray(by, float), shape).ravel()
    return affine(x, shape).mapped(sparse.csr_array(sparse.diags_array(by)), shape)


def _times(w, equation, shape, a, b):
    if isinstance(b, np.ndarray):
        return _scaled(a, b, shape)
    if isinstance(a, np.ndarray):
        return _scaled(b, a, shape)
    return _product(shape, sparse.eye_array(size_of(shape), format="csr"), a, b)


def _product(shape, weights, a: Affine, b: Affine) -> Affine:
    if a.products is not None or b.products is not None:
        raise NoProgrammeError
    # What is constant or affine in the product is left to `quadratic`, which multiplies it out.
    nothing = sparse.csr_array((size_of(shape), 0))
    return Affine(tuple(shape), nothing, np.zeros(size_of(shape)), Products(weights, a, b))


def _over(w, equation, shape, a, b):
    if not isinstance(b, np.ndarray):
        raise NoProgrammeError
    return _scaled(a, 1 / np.asarray(b, float), shape)


def _power(w, equation, shape, x):
    if equation.params["y"] != 2:
        raise NoProgrammeError
    return _times(w, equation, shape, x, x)


def _squared(w, equation, shape, x):
    return _times(w, equation, shape, x, x)


def _same(w, equation, shape, x):
    if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        raise NoProgrammeError
    return x


def _summed(w, equation, shape, x):
    size, axes = size_of(x.shape), equation.params["axes"]
    kept = np.arange(size_of(shape)).reshape([1 if k in axes else n for k, n in enumerate(x.shape)])
    rows = np.broadcast_to(kept, x.shape).ravel()
    return x.mapped(entries(1.0, rows, np.arange(size), (size_of(shape), size)), shape)


def _contracted(w, equation, shape, a, b):
    (of_a, of_b), (batch_a, batch_b) = equation.params["dimension_numbers"]

    def arranged(x, contracted, batch):
        free = [k for k in range(len(x.shape)) if k not in (*contracted, *batch)]
        sizes = [size_of([x.shape[k] for k in axes]) for axes in (batch, free, contracted)]
        numbers = np.arange(size_of(x.shape)).reshape(x.shape)
        return numbers.transpose(*batch, *free, *contracted).reshape(sizes)

    i, j = arranged(a, of_a, batch_a), arranged(b, of_b, batch_b)
    (batches, ones, length), twos = i.shape, j.shape[1]
    total = batches * ones * twos * length
    if total > MOST_ENTRIES:
        raise NoProgrammeError
    rows = np.arange(batches * ones * twos).reshape(batches, ones, twos, 1)
    i, j = (np.broadcast_to(x, (batches, ones, twos, length)) for x in (i[:, :, None], j[:, None]))
    rows = np.broadcast_to(rows, i.shape)
    for x, where, other, there in ((a, i, b, j), (b, j, a, i)):
        if isinstance(other, np.ndarray):
            numbers = np.asarray(other, float).ravel()[there]
            return x.mapped(
                entries(numbers, rows, where, (size_of(shape), size_of(x.shape))), shape
            )
    sums = entries(1.0, rows.ravel(), np.arange(total), (size_of(shape), total))
    one, two = (
        x.mapped(picking(where, size_of(x.shape)), (total,)) for x, where in ((a, i), (b, j))
    )
    return _product(shape, sums, one, two)


def _chosen(w, equation, shape, which, *cases):
    if not isinstance(which, np.ndarray):
        raise NoProgrammeError
    parts = [_scaled(affine(x, shape), which == k, shape) for k, x in enumerate(cases)]
    return added(shape, *parts)


def _largest_of(sign: float) -> Callable:
    def rule(w: Written, equation, shape, *arguments):
        parts = [sign * x if isinstance(x, np.ndarray) else _scaled(x, sign, x.shape)
                 for x in arguments]  # fmt: skip
        top, _ = w.maximum(parts, shape)
        return _scaled(top, sign, shape)

    return rule


def _magnitude(w: Written, equation, shape, x):
    return w.maximum([x, negative(x)], shape)[0]


def _along(x, axes, shape) -> list:
    """The entries that are combined when axes are reduced, as values of the result's shape."""
    kept = [k for k in range(len(x.shape)) if k not in axes]
    order = np.arange(size_of(x.shape)).reshape(x.shape).transpose(*kept, *axes)
    columns = order.reshape(size_of(shape), -1).T
    if isinstance(x, np.ndarray):
        return [x.ravel()[c].reshape(shape) for c in columns]
    return [x.mapped(picking(c, size_of(x.shape)), shape) for c in columns]


def _reduced(sign: float) -> Callable:
    def rule(w: Written, equation, shape, x):
        return _largest_of(sign)(w, equation, shape, *_along(x, equation.params["axes"], shape))

    return rule


def _piece_max(w: Written, equation, shape, x):
    return _piece(w, _along(x, (len(x.shape) - 1,), shape), shape, pair=False)


def _piece_pair(w: Written, equation, shape, a, b):
    return _piece(w, [a, b], shape, pair=True)


def _piece(w: Written, arguments: list, shape, pair: bool):
    if all(isinstance(x, np.ndarray) for x in arguments):
        stacked = np.stack(np.broadcast_arrays(*arguments), axis=-1)
        one = np.eye(len(arguments))[np.argmax(stacked, axis=-1)]
        w.pieces.append(one[..., 0] if pair else one)
        return stacked.max(axis=-1)
    top, rows = w.maximum(arguments, shape)
    w.pieces.append((rows, tuple(shape), pair))
    return top


def _negated(w, equation, shape, x):
    return negative(x)


_RULES: dict[str, Callable] = {
    "add": _plus(1),
    "add_any": _plus(1),
    "sub": _plus(-1),
    "neg": _negated,
    "mul": _times,
    "div": _over,
    "integer_pow": _power,
    "square": _squared,
    "copy": _same,
    "copy_p": _same,
    "convert_element_type": _same,
    "reduce_precision": _same,
    "optimization_barrier": _same,
    "reduce_sum": _summed,
    "dot_general": _contracted,
    "select_n": _chosen,
    "max": _largest_of(1),
    "min": _largest_of(-1),
    "reduce_max": _reduced(1),
    "reduce_min": _reduced(-1),
    "abs": _magnitude,
    pieces.max_p.name: _piece_max,
    pieces.pair_p.name: _piece_pair,
}
# No rule is for these, and they hardly ever are about numbers alone: not worth a walk.
NEVER = frozenset(
    {
        "exp", "log", "log1p", "exp2", "expm1", "tanh", "logistic", "erf", "pow",
        "conv_general_dilated", "while", "scan", "cond", pieces.allocation_p.name,
    }
)  # fmt: skip
