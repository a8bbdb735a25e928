"""The first steps of a search on CPUs, for networks whose activations are all relu.

These are the steps of `solvers.Damped` with what relu allows: what a neuron's wedge says is four
numbers, the same for all objectives of a box, and what a lane remembers of a neuron is four more.
On CPUs nearly all of a step of the general search goes into reading and writing such numbers, not
into products, so few of them are most of the gain. Few boxes are worked on at once, so that they
stay in the caches, and each step is a program of its own: inside of compiled loops XLA's
convolutions are several times slower. What is found is evaluated anew in float64; problems that
are still open are left to `search`.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.networks.activations.kinked import ReluWedge
from stagecert.networks.bounding.chains import chain_of, to_first, to_last
from stagecert.networks.bounding.relaxation import Split
from stagecert.networks.bounding.search import Relaxed, default_solvers
from stagecert.networks.operations import Activation
from stagecert.problem import as_arrays
from stagecert.tree import between, select

# After so many steps most problems are done that these steps finish at all.
STEPS = 24


class Sides(eqx.Module):
    """A layer's wedges: x -> max(least * x, most * x) below, and slope * x + offset above.

    Both sides of stable neurons are the same line: `least` is `most` there. `base` is the square of
    how far apart arguments are that count as close; see `Damped`. Arrays have the axes of boxes,
    one of length one for rows, and those of neurons, channels last.
    """

    least: Any
    most: Any
    slope: Any
    offset: Any
    base: Any
    first: Any


class State(eqx.Module):
    """Where lanes stand, and for every neuron its slope below, its jumps, its last argument."""

    inputs: Any
    fractions: tuple
    weights: tuple
    jumps: tuple
    last: tuple


class Step(eqx.Module):
    """What a step has found: a value at the point before it, a bound by the weights after it."""

    state: State
    value: Any
    bound: Any


_DAMPED = default_solvers(True)[0]


def sides_of(wedge: ReluWedge, shape: tuple[int, ...]) -> Sides:
    """Of every box, from wedges as networks have them. The lines hold in real arithmetic."""
    low, high = wedge.low, wedge.high
    ((first,), _) = wedge.slopes()
    nothing = jnp.zeros_like(low)
    (least, _, slope, offset), (most, *_) = (
        wedge.lines(((pieces.First(nothing + w),), ())) for w in (0, 1)
    )
    base = (_DAMPED.base * (high - low)) ** 2
    every = least, most, slope, offset, base, jnp.clip(first.weight, least, most)
    return Sides(*(to_last(x, shape)[:, None] for x in every))


def lanes_of(rows, x):
    """Arrays with axes of boxes and rows, with one axis of lanes in their place."""
    return x.reshape(rows.shape[0] * rows.shape[1], *x.shape[2:])


def _back(maps, sides, weights, inputs, rows):
    """One pass back for all lanes: the bounds, cotangents of blocks, and where it ends."""
    lanes = functools.partial(lanes_of, rows)

    def grid(x):
        return x.reshape(*rows.shape[:2], *x.shape[1:])

    y = lanes(rows)
    total = maps[-1].constant(y)
    g = grid(maps[-1].back(y))
    cotangents = []
    for affine, side, weight in zip(maps[-2::-1], sides[::-1], weights[::-1], strict=True):
        cotangents.append(g)
        down = jnp.minimum(g, 0)
        y = lanes(jnp.maximum(g, 0) * weight + down * side.slope)
        total = total + sums_of(lanes(down * side.offset)) + affine.constant(y)
        g = grid(affine.back(y))
    shape = jax.tree.leaves(jax.eval_shape(inputs.centre))[0].shape[1:]
    gradient = to_first(g, shape)
    of_rows = jax.vmap(
        jax.vmap(lambda s, g: (s.linear_minimum(g), s.minimise_linear(g)), (None, 0))
    )
    least, minimiser = of_rows(inputs, gradient)
    bound = grid(total) + least
    return jnp.where(jnp.isnan(bound), -jnp.inf, bound), minimiser, cotangents[::-1]


def sums_of(x):
    """Of each lane; over pixels first, which is many additions side by side."""
    x = jnp.sum(x, axis=(1, 2)) if x.ndim == 4 else x
    return jnp.sum(x, axis=1)


@eqx.filter_jit
def _begin(maps, shapes, relaxed: Relaxed, inputs, rows, dtype):
    """What the steps need of each box, in their precision, and the corner of a pass back."""
    wedges, inputs, rows = as_arrays((relaxed.wedges, inputs, rows), dtype)
    sides = tuple(map(sides_of, wedges, shapes))
    first = tuple(side.first for side in sides)
    bound, minimiser, cotangents = _back(maps, sides, first, inputs, rows)
    fractions = tuple(jnp.where(g > 0, 0, 1).astype(g.dtype) for g in cotangents)
    weights = tuple(w + jnp.zeros_like(g) for w, g in zip(first, cotangents, strict=True))
    zeros = tuple(map(jnp.zeros_like, fractions))
    state = State(minimiser, fractions, weights, zeros, zeros)
    return (sides, inputs, rows), Step(state, jnp.full_like(bound, jnp.inf), bound)


@eqx.filter_jit
def _step(maps, sides, inputs, rows, state: State, count) -> Step:
    """One pass forward and one back; `count` steps were taken before."""
    lanes = functools.partial(lanes_of, rows)
    later = (count > 0).astype(rows.dtype)
    shape = state.inputs.shape[2:]
    block = to_last(lanes(state.inputs), shape)
    arguments, weights, jumps = [], [], []
    for k, (affine, side) in enumerate(zip(maps, sides, strict=False)):
        share = state.fractions[k]
        x = affine(block).reshape(share.shape)
        jump = state.jumps[k] + later * (x - state.last[k]) ** 2
        # A neuron that cannot move has no width; its two slopes are the same.
        width = jnp.maximum(side.base + jump, jnp.finfo(x.dtype).tiny)
        move = x * jax.lax.rsqrt(width) * (_DAMPED.rate / 2)
        weights.append(jnp.clip(state.weights[k] + move, side.least, side.most))
        arguments.append(x)
        jumps.append(jump)
        below = jnp.maximum(side.least * x, side.most * x)
        above = side.slope * x + side.offset
        block = lanes(below + share * (above - below))
    value = jnp.sum(rows * maps[-1](block).reshape(rows.shape), axis=-1)
    bound, minimiser, cotangents = _back(maps, sides, weights, inputs, rows)
    share = _DAMPED.share(count + 1, rows.dtype)
    fractions = tuple(
        (1 - share) * old + jnp.where(g > 0, 0, share)
        for old, g in zip(state.fractions, cotangents, strict=True)
    )
    point = between(state.inputs, minimiser, share)
    state = State(point, fractions, tuple(weights), tuple(jumps), tuple(arguments))
    return Step(state, jnp.where(jnp.isnan(value), jnp.inf, value), bound)


class _Best:
    """The best of something that all lanes have, by reference where all change at once."""

    def __init__(self, tree, score):
        self.tree, self.score = tree, np.asarray(score)

    def update(self, tree, score, some):
        """The new ones where they are better, of `some` lanes."""
        score = np.asarray(score)
        better = some & (score > self.score)
        if better.all():
            self.tree = tree
        elif better.any():
            self.tree = _chosen(better, tree, self.tree)
        self.score = np.where(better, score, self.score)


@jax.jit
def _chosen(better, new, old):
    return jax.vmap(jax.vmap(select))(better, new, old)


class Quick(eqx.Module):
    """What the steps found: a point, and slopes below; with axes of boxes and rows."""

    inputs: Any
    fractions: tuple
    weights: tuple


class Chain(eqx.Module):
    """A network that these steps can be taken on."""

    maps: tuple
    shapes: tuple = eqx.field(static=True)


class Chains(eqx.Module):
    """A network in the precision of the steps, and in that of what is published."""

    fast: Chain
    exact: Chain


def chains_of(parts: Split, shapes: tuple, dtype) -> Chains | None:
    """The network as the steps take it; None where the search does all by itself."""
    if jax.default_backend() != "cpu" or len(shapes) != 1 or not parts.layers:
        return None
    operations = [layer.operation for layer in parts.layers]
    if any(not isinstance(o, Activation) or o.kind != "relu" for o in operations):
        return None
    return _chains(parts, shapes[0], np.dtype(dtype).type)


@eqx.filter_jit
def _chains(parts: Split, shape: tuple[int, ...], dtype) -> Chains | None:
    maps = chain_of(parts.layers, parts.last, shape)
    if maps is None:
        return None
    of_layers = tuple(layer.shape for layer in parts.layers)
    return Chains(Chain(as_arrays(maps, dtype), of_layers), Chain(maps, of_layers))


def steps_for(
    chain: Chain, relaxed: Relaxed, inputs, rows, dtype, most: int,
    done: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[Quick, np.ndarray]:  # fmt: skip
    """At most so many steps for a few boxes, and how many each problem took.

    `done` says by values and bounds, (boxes, rows) each, which problems are finished. What is found
    of a problem does not depend on the others: one that is finished keeps what it has.
    """
    maps, shapes = chain.maps, chain.shapes
    (sides, inputs, rows), step = _begin(maps, shapes, relaxed, inputs, rows, dtype)
    weights = _Best(step.state.weights, step.bound)
    points = _Best((step.state.inputs, step.state.fractions), np.full(rows.shape[:2], -np.inf))
    taken, open_ = np.zeros(rows.shape[:2], int), np.ones(rows.shape[:2], bool)
    for count in range(most):
        point = step.state.inputs, step.state.fractions
        step = _step(maps, sides, inputs, rows, step.state, np.asarray(count, np.int32))
        points.update(point, -np.asarray(step.value), open_)
        weights.update(step.state.weights, step.bound, open_)
        taken += open_
        open_ &= ~done(-points.score, weights.score)
        if not open_.any():
            break
    at, fractions = points.tree
    return Quick(at, fractions, weights.tree), taken
