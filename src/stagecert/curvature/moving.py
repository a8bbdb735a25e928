"""Rules for primitives that only move entries around."""

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
    Known,
    Origin,
    known,
    moved,
    outward,
    rule,
    unknown,
)
from stagecert.jaxprs import bind

# -- moving entries around -------------------------------------------------------------------------

STRUCTURAL = frozenset(
    {
        "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "rev",
        "concatenate", "pad", "gather", "dynamic_slice", "dynamic_update_slice", "scatter",
        "stack", "tile",
    }
)  # fmt: skip

# For these the last arguments say where; they must be numbers.
PLACES = {"gather": (1, None), "dynamic_slice": (1, None), "dynamic_update_slice": (2, None),
           "scatter": (1, 2)}  # fmt: skip


def mover(equation, values: list[Known]) -> Callable | None:
    """What moves the entries of arrays as the equation does; None if variables say how."""
    name, parameters = equation.primitive.name, equation.params
    if name == "reshape" and parameters.get("dimensions") is None:
        return lambda a: a.reshape(parameters["new_sizes"])
    if name == "transpose":
        return lambda a: np.transpose(a, parameters["permutation"])
    if name == "squeeze":
        return lambda a: np.squeeze(a, tuple(parameters["dimensions"]))
    if name == "rev":
        return lambda a: np.flip(a, tuple(parameters["dimensions"]))
    if name == "slice":
        steps = parameters["strides"] or (1,) * len(parameters["start_indices"])
        cut = tuple(
            slice(b, e, s)
            for b, e, s in zip(
                parameters["start_indices"], parameters["limit_indices"], steps, strict=True
            )
        )
        return lambda a: a[cut]
    if name == "broadcast_in_dim":
        shape, places = parameters["shape"], parameters["broadcast_dimensions"]

        def spread(a):
            sizes = [1] * len(shape)
            for place, size in zip(places, a.shape, strict=True):
                sizes[place] = size
            return np.broadcast_to(a.reshape(sizes), shape)

        return spread
    if name == "concatenate":
        return lambda *arrays: np.concatenate(arrays, axis=parameters["dimension"])
    first, last = PLACES.get(name, (len(values), None))
    places = values[first:last]
    if not all(place.exact for place in places):
        return None
    indices = [
        jnp.asarray(p.lo.astype(atom.aval.dtype))
        for p, atom in zip(places, equation.invars[first:last], strict=True)
    ]

    if name == "gather" and not parameters["dimension_numbers"].operand_batching_dims:
        return _gathering(places[0].lo.astype(np.int64), **parameters)

    def move(*arrays):
        arrays = [jnp.asarray(a) for a in arrays]
        tail = arrays[first:]
        return np.asarray(bind(equation, [*arrays[:first], *indices, *tail])[0])

    return move


def _gathering(starts, dimension_numbers, slice_sizes, mode, **_) -> Callable:
    """jax.lax.gather in NumPy: JAX would compile one for every shape."""
    batch = starts.shape[:-1]
    offsets = dimension_numbers.offset_dims
    kept = [k for k in range(len(slice_sizes)) if k not in dimension_numbers.collapsed_slice_dims]
    rank = len(batch) + len(offsets)
    of_batch = [k for k in range(rank) if k not in offsets]

    def placed(array, axes):
        sizes = [1] * rank
        for axis, size in zip(axes, np.shape(array), strict=True):
            sizes[axis] = size
        return np.reshape(array, sizes)

    def move(operand):
        index, inside = [], True
        for k, size in enumerate(slice_sizes):
            start = np.zeros(batch, np.int64)
            if k in dimension_numbers.start_index_map:
                start = starts[..., dimension_numbers.start_index_map.index(k)]
            last = operand.shape[k] - size
            if mode != jax.lax.GatherScatterMode.CLIP:
                inside = inside & placed((start >= 0) & (start <= last), of_batch)
            place = placed(np.clip(start, 0, last), of_batch)
            if k in kept:
                place = place + placed(np.arange(size), [offsets[kept.index(k)]])
            index.append(place)
        return np.where(inside, operand[tuple(np.broadcast_arrays(*index))], np.nan)

    return move


def structural(equation, values: list[Known]) -> Known:
    move = mover(equation, values)
    if move is None:
        return unknown(equation.outvars[0].aval.shape)
    if equation.primitive.name in PLACES:
        first, last = PLACES[equation.primitive.name]
        values = values[:first] + (values[last:] if last is not None else [])
    # Where each entry is from: moved once, whatever there is to know about the entries.
    starts = np.cumsum([0, *(v.lo.size for v in values)])
    places = move(*(s + np.arange(v.lo.size, dtype=float).reshape(v.shape)
                    for s, v in zip(starts, values, strict=False)))  # fmt: skip
    # An index out of bounds reads NaN.
    missing = np.isnan(places)
    places = np.where(missing, 0, places).astype(np.int64)

    def taken(arrays):
        flat = [np.ravel(a) for a in arrays]
        return (flat[0] if len(flat) == 1 else np.concatenate(flat))[places]

    lo = np.where(missing, -np.inf, taken([v.lo for v in values]))
    hi = np.where(missing, np.inf, taken([v.hi for v in values]))
    doubts = np.where(missing, NOTHING_KNOWN, taken([v.doubts for v in values]))
    if missing.any():
        return known(lo, hi, doubts)
    notes: dict[str, Any] = {"slope": moved(values, taken)}
    if len(values) > 1:
        return known(lo, hi, doubts, **notes)
    (x,) = values
    notes["origin"] = _moved(x.origin, taken)
    if x.bend is not None and np.array_equal(places.ravel(), np.arange(x.lo.size)):
        notes["bend"] = x.bend  # only another shape
    if x.logarithm_of is not None:
        notes["logarithm_of"] = _moved(x.logarithm_of, taken)
    if x.shifted is not None:
        notes["shifted"] = replace(
            x.shifted, doubts=taken([x.shifted.doubts]), by=_moved(x.shifted.by, taken)
        )
    return known(lo, hi, doubts, **notes)


def _moved(origin: Origin, taken: Callable) -> Origin:
    return Origin(origin.number, taken([origin.index]))


def parts(equation, x: Known) -> list[Known]:
    """The pieces that an array is cut into."""
    axis, out = equation.params["axis"], []
    sizes = [v.aval.shape for v in equation.outvars]
    drop = equation.primitive.name == "unstack"
    begin = 0
    for shape in sizes:
        width = 1 if drop else shape[axis]
        cut = tuple(
            slice(begin, begin + width) if k == axis else slice(None) for k in range(len(x.shape))
        )

        def take(a, cut=cut, shape=shape):
            return a[cut].reshape(shape)

        out.append(
            known(
                take(x.lo), take(x.hi), take(x.doubts),
                origin=Origin(x.origin.number, take(x.origin.index)),
            )
        )  # fmt: skip
        begin += width
    return out


@rule("scatter-add", "scatter_add")
def _scatter_add(x: Known, where: Known, updates: Known, **parameters) -> Known:
    if not where.exact:
        return unknown(x.shape)

    def added(a, b):
        index = jnp.asarray(where.lo.astype(np.int32))
        out = jax.lax.scatter_add_p.bind(jnp.asarray(a), index, jnp.asarray(b), **parameters)
        return np.asarray(out)

    doubts = np.zeros(x.shape, np.uint8)
    for bit in (CONVEX, CONCAVE, CONSTANT, LOG_CONVEX, ROOT_CONVEX):
        some = added(*(((v.doubts & bit) > 0).astype(float) for v in (x, updates)))
        doubts |= np.where(some > 0, bit, 0).astype(np.uint8)
    lo, hi = added(x.lo, updates.lo), added(x.hi, updates.hi)
    size = added(*(np.nan_to_num(np.abs(v.lo) + np.abs(v.hi), posinf=0) for v in (x, updates)))
    return known(*outward(lo, hi, size, 1 + updates.lo.size), doubts)
