"""The first steps of a search as one compiled program, for a whole grid of (box, objective).

Most problems of a network are within a percent after a few greedy steps. These are the steps of
`solvers.Damped`, without what a long search needs: the wedges of a box are shared by all of its
objectives instead of copied, nothing is recorded, and nothing but the outcome leaves the program.
An accelerator spends far less time on that than on the steps of `search`, whose states are written
to memory and read again. What is found is evaluated anew in float64, as there; problems that are
still open get some more steps of the same program, and then are left to `search`.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert import pieces
from stagecert.certificate import Proposal
from stagecert.networks.bounding.backward import dual_bound, lines_at
from stagecert.networks.bounding.search import Relaxed, default_solvers, first_lines
from stagecert.problem import as_arrays
from stagecert.reformulation import Point
from stagecert.solvers.damped import Damped, Memory, first_memory
from stagecert.tree import between, select

# After so many steps nearly all problems with straight or curved wedges are within a percent. What
# is open then gets more, from the beginning.
STRAIGHT, CURVED, MORE = 3, 4, 6


class Opened(eqx.Module):
    """What the steps found: arrays with one axis for all problems, box by box.

    point: where the value is attained. proposal: what proves the bound. Both are in the precision
    of the steps.
    """

    point: Point
    value: Any
    proposal: Proposal
    bound: Any


def passes(steps: int) -> int:
    """How many passes over the network so many steps take: one back, then two for each."""
    return 1 + 2 * steps


def steps_of(wedges) -> int:
    """How many steps are taken first with wedges of these kinds."""
    return STRAIGHT if all(wedge.straight for wedge in wedges) else CURVED


class _State(eqx.Module):
    """Between two steps: where the search stands, where it goes, what pieces remember.

    All of this is written to memory after each step, so there is nothing in it that can be made
    anew: memories have no units.
    """

    point: Point
    corner: Point
    memory: tuple
    best: Opened


@eqx.filter_jit
def opened(layers, last, relaxed: Relaxed, inputs, rows, dtype, steps) -> Opened:
    """Takes so many steps on all problems; the other arguments are those of `search`.

    `steps` is an array: one program, which has a single step in it, takes any number.
    """
    layers, last, relaxed, inputs, rows = as_arrays((layers, last, relaxed, inputs, rows), dtype)
    straight = all(wedge.straight for wedge in relaxed.wedges)
    damped = default_solvers(straight)[0]

    def start(relaxed: Relaxed, inputs, row) -> _State:
        bound, corner = _corner(layers, last, first_lines(relaxed), relaxed, inputs, row)
        if not straight:  # the first lines touch curves where no point is
            bound = jnp.full_like(bound, -jnp.inf)
        memory = tuple(
            tuple(tuple(first_memory((unit, w)) for w in side) for side in wedge.slopes())
            for wedge, unit in zip(relaxed.wedges, _units(layers, relaxed), strict=True)
        )
        best = _opened(straight, corner, jnp.full_like(bound, jnp.inf), memory, bound)
        return _State(corner, corner, _without_units(memory), best)

    def step(count, relaxed: Relaxed, inputs, row, state: _State) -> _State:
        # The same arithmetic as that of `Damped.step`.
        point = between(state.point, state.corner, damped.share(count, row.dtype))
        memory = _with_units(state.memory, _units(layers, relaxed))
        value, lines, memory = _forward(damped, layers, last, relaxed, row, point, memory, count)
        bound, corner = _corner(layers, last, lines, relaxed, inputs, row)
        best = _better(state.best, _opened(straight, point, value, memory, bound))
        return _State(point, corner, _without_units(memory), best)

    def advanced(count, state: _State) -> _State:
        of_row = jax.vmap(functools.partial(step, count), in_axes=(None, None, 0, 0))
        return jax.vmap(of_row)(relaxed, inputs, rows, state)

    begun = jax.vmap(jax.vmap(start, in_axes=(None, None, 0)))(relaxed, inputs, rows)
    found = jax.lax.fori_loop(0, steps, advanced, begun).best
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


def _units(layers, relaxed: Relaxed) -> list:
    return [
        layer.unit(low, high) for layer, (low, high) in zip(layers, relaxed.arguments, strict=True)
    ]


def _with_units(memory: tuple, units: list) -> tuple:
    return tuple(
        tuple(tuple(Memory(m.weights, unit, m.jumps, m.last) for m in side) for side in sides)
        for sides, unit in zip(memory, units, strict=True)
    )


def _without_units(memory: tuple) -> tuple:
    return _with_units(memory, [None] * len(memory))


def _opened(straight: bool, point: Point, value, memory: tuple, bound) -> Opened:
    """What a step has found."""
    weights = tuple(tuple(tuple(m.weights for m in side) for side in sides) for sides in memory)
    # Wedges made of lines have the same ones wherever they are touched.
    touched: Any = None if straight else point
    return Opened(point, value, Proposal(touched, (weights, ()), None), bound)


def _better(one: Opened, other: Opened) -> Opened:
    lower, higher = other.value < one.value, other.bound > one.bound
    return Opened(
        select(lower, other.point, one.point),
        jnp.where(lower, other.value, one.value),
        select(higher, other.proposal, one.proposal),
        jnp.where(higher, other.bound, one.bound),
    )


def _corner(layers, last, lines, relaxed: Relaxed, inputs, row) -> tuple[Any, Point]:
    """One pass back: a bound, and the corner where it is attained."""
    back = dual_bound(layers, last, lines, relaxed.spans, relaxed.last_span, inputs, row)
    bound = jnp.where(jnp.isnan(back.uncharged), -jnp.inf, back.uncharged)
    return bound, Point(back.minimiser, back.shares)


def _forward(damped: Damped, layers, last, relaxed: Relaxed, row, point: Point, memory, count):
    """One pass forward: the value at a point, lines for the next pass back, and the memory."""
    blocks: tuple = ()
    lines, after = [], []
    for layer, wedge, span, share, pair in zip(
        layers, relaxed.wedges, relaxed.spans, point.fractions, memory, strict=True
    ):
        x = layer.segment(point.inputs, blocks)

        def treat(arguments, piece: Memory):
            return pieces.value_of(arguments), damped.remember(arguments, piece, count)

        lower, below = pieces.evaluate(wedge.lower, (x,), treat, pair[0])
        upper, above = pieces.evaluate(wedge.upper, (x,), treat, pair[1])
        weights = tuple(tuple(m.weights for m in side) for side in (below, above))
        lines.append(lines_at(wedge, x, weights, span))
        after.append((below, above))
        blocks = (*blocks, (1 - share) * lower + share * upper)
    value = jnp.sum(row * last(point.inputs, blocks))
    return jnp.where(jnp.isnan(value), jnp.inf, value), tuple(lines), tuple(after)
