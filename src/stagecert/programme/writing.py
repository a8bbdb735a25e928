"""A problem as a programme, and the programme's solution as a proposal for the problem."""

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np

from stagecert import jaxprs
from stagecert.assumptions import key_of, traced_functions
from stagecert.certificate import Proposal
from stagecert.problem import Problem
from stagecert.programme.quadratic import Iterate
from stagecert.programme.reading import NEVER, Reader
from stagecert.programme.rows import Written
from stagecert.programme.values import (
    MOST_ENTRIES,
    Affine,
    NoProgrammeError,
    added,
    affine,
    entries,
    negative,
    picking,
    size_of,
    wide,
)
from stagecert.sets import AbstractSet, Box, Product, Simplex
from stagecert.sides import Sides

KEPT = 64  # shapes of problems whose functions are remembered


class Found(eqx.Module):
    """A programme's solution: inputs and blocks, slopes of pieces, multipliers of constraints."""

    inputs: Any
    blocks: tuple
    slopes: Any
    sides: Sides


_traced: OrderedDict = OrderedDict()
_lock = threading.Lock()


def _functions(problem: Problem) -> list | None:
    """The traced functions, remembered; None where one of them cannot be read."""
    key = key_of(problem, None)
    with _lock:
        if key in _traced:
            _traced.move_to_end(key)
            return _traced[key]
    found: list | None = traced_functions(problem)
    names = {e.primitive.name for closed in found for e in jaxprs.equations(closed.jaxpr)}
    if names & NEVER:
        found = None
    with _lock:
        _traced[key] = found
        while len(_traced) > KEPT:
            _traced.popitem(last=False)
    return found


def written(problem: Problem) -> Written:
    functions = _functions(problem)
    if functions is None:
        raise NoProgrammeError
    arrays = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(problem, eqx.is_array))]
    if sum(x.size for x in arrays) > MOST_ENTRIES:
        raise NoProgrammeError
    w = Written()
    likes = jax.tree.leaves(jax.eval_shape(problem.inputs.centre))
    w.inputs = [w.variable(like.shape) for like in likes]
    w.blocks = [w.variable(like.shape) for like in problem.block_shapes()]
    _write_set(w, problem.inputs, iter(w.inputs))
    count = len(problem.stages)

    def read(closed):
        known = [*arrays, *w.inputs, *w.blocks]
        return jaxprs.walk(closed.jaxpr, closed.consts, known, Reader(w), np.asarray)

    w.pieces = w.of_stages
    for closed, block in zip(functions[:count], w.blocks, strict=True):
        lower, upper = (affine(x, block.shape) for x in read(closed))
        w.stages.append(_write_stage(w, block, lower, upper))
    w.pieces = w.of_constraints
    for closed in functions[count:-1]:
        (value,) = read(closed)
        w.constraints.append(w.no_more_than_zero(affine(value, value.shape)))
    w.pieces = w.of_objective
    (value,) = read(functions[-1])
    w.objective = affine(value, ())
    return w


def _write_set(w: Written, inputs: AbstractSet, variables) -> None:
    if isinstance(inputs, Product):
        for part in jax.tree.leaves(inputs.parts, is_leaf=lambda x: isinstance(x, AbstractSet)):
            _write_set(w, part, variables)
        return
    x = next(variables)
    size = size_of(x.shape)
    if isinstance(inputs, Box):
        low, high = (
            np.broadcast_to(np.asarray(end, float), x.shape).ravel()
            for end in (inputs.lower, inputs.upper)
        )
        fixed = low >= high
        for rows, end, sign in ((fixed, low, 0), (~fixed, low, -1), (~fixed, high, 1)):
            at = np.flatnonzero(rows)
            moved = x.mapped((sign or 1) * picking(at, size), (at.size,))
            value = replace(moved, constant=-(sign or 1) * end[at])
            (w.below if sign else w.equal).append(value)
    elif isinstance(inputs, Simplex):
        w.below.append(negative(x))
        total = x.mapped(entries(1.0, np.zeros(size, int), np.arange(size), (1, size)), (1,))
        w.equal.append(replace(total, constant=-np.asarray(inputs.total, float).reshape(1)))
    else:
        raise NoProgrammeError


def _write_stage(w: Written, block: Affine, lower: Affine, upper: Affine):
    """Rows of lower <= block <= upper; of equations where both are the same."""
    if lower.products is not None or upper.products is not None:
        raise NoProgrammeError
    apart = added(block.shape, lower, negative(upper))
    same = (np.diff(_cleaned(apart.matrix).indptr) == 0) & (apart.constant == 0)
    size = block.constant.size
    at, rest = (picking(np.flatnonzero(rows), size) for rows in (same, ~same))
    over, under = (added(block.shape, v, negative(block)) for v in (lower, upper))
    w.equal.append(over.mapped(at, (at.shape[0],)))
    low = w.no_more_than_zero(over.mapped(rest, (rest.shape[0],)))
    return ~same, low, w.no_more_than_zero(under.mapped(-rest, (rest.shape[0],)))


def _cleaned(matrix):
    matrix = matrix.copy()
    matrix.eliminate_zeros()
    return matrix


# -- the way back ----------------------------------------------------------------------------------


def found_from(w: Written, found: Iterate, like: Proposal) -> Found:
    """What the solution says about inputs, blocks, slopes and multipliers of constraints."""
    ends = np.cumsum([0, *(rows.constant.size for rows in w.below)])

    def multipliers(row: int) -> np.ndarray:
        return found.z[ends[row] : ends[row + 1]]

    def value(x: Affine) -> np.ndarray:
        return (wide(x.matrix, w.count) @ found.x + x.constant).reshape(x.shape)

    inputs = jax.tree.unflatten(jax.tree.structure(like.point.inputs), [*map(value, w.inputs)])
    order = []
    for block, (apart, low, high) in zip(w.blocks, w.stages, strict=True):
        both = np.zeros(apart.size)
        both[apart] = np.minimum(multipliers(low), multipliers(high))
        order.append(both.reshape(block.shape))

    def weights(piece):
        if isinstance(piece, np.ndarray):
            return piece
        rows, shape, pair = piece
        pulls = np.stack([multipliers(row) for row in rows], axis=-1)
        pulls = np.maximum(pulls, 1e-300)
        shares = (pulls / pulls.sum(axis=-1, keepdims=True)).reshape(*shape, len(rows))
        return shares[..., 0] if pair else shares

    found_pieces = [*w.of_stages, *w.of_objective, *w.of_constraints]
    leaves, structure = jax.tree.flatten(like.slopes)
    if len(leaves) != len(found_pieces):
        raise NoProgrammeError
    slopes = structure.unflatten(
        [
            # A piece that is the same for all steps of a scan is written once.
            np.broadcast_to(weights(piece), np.shape(leaf))
            for piece, leaf in zip(found_pieces, leaves, strict=True)
        ]
    )
    sides = Sides(
        tuple(
            multipliers(row).reshape(np.shape(l))
            for row, l in zip(w.constraints, like.sides.constraints, strict=False)
        ),
        tuple(order) if like.sides.order else (),
    )
    made = Found(inputs, tuple(map(value, w.blocks)), slopes, sides)
    point = like.point
    arranged = Found(point.inputs, point.fractions, like.slopes, like.sides)
    return jax.tree.map(lambda new, old: np.asarray(new, np.asarray(old).dtype), made, arranged)
