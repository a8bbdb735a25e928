"""From triangles to envelopes: what `networks.bound(relaxation="envelope")` adds to a result.

Box by box, on NumPy arrays: nothing is compiled. The triangle's bounds stay where they are better.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.bounding.envelope import MOST, ROOM, Envelope, Hull
from stagecert.networks.bounding.envelope_search import search
from stagecert.networks.bounding.programs import program_of
from stagecert.networks.bounding.relaxation import split
from stagecert.networks.graph import Network
from stagecert_check.bounds import Facts
from stagecert_check.functions import Refused
from stagecert_check.graph import Program
from stagecert_check.numbers import Arithmetic
from stagecert_check.planes import slopes_of

# Values in single precision are off by less than this share of what the rows can be.
ROUNDING = 4e-6


@dataclass(frozen=True, eq=False)
class Limits:
    """How far to go.

    Attributes:
        steps: of the two kinds.
        gap: absolute and relative tolerances.
        deadline: of `time.monotonic`, or None.
        memory: GiB.
        planes: neurons of an activation that get planes, at most.
        narrow: intervals are narrower than those of triangles: bounds are worth a search even
            where no neuron bends.
    """

    steps: tuple[int, int]
    gap: tuple[float, float]
    deadline: float | None
    memory: float
    planes: int = MOST
    narrow: bool = False


@dataclass(eq=False)
class Improved:
    """For every problem (boxes, rows): bounds, values, points and passes; some were not reached.

    Attributes:
        reached: (boxes, rows).
        same: (boxes, 1): no neuron can have a plane there: triangles are all there is.
        inputs: (boxes, rows, entries of all inputs).
    """

    reached: np.ndarray
    same: np.ndarray
    bound: np.ndarray
    value: np.ndarray
    inputs: np.ndarray
    passes: np.ndarray


def improve(
    network: Network, boxes: tuple, arguments: tuple, rows: np.ndarray, open_: np.ndarray,
    goal: np.ndarray, limits: Limits, show: Callable[[str, int, int], None],
) -> Improved:  # fmt: skip
    """Bounds by envelopes for the open problems.

    Args:
        network: what computes.
        boxes: (low, high) of every input, (boxes, *shape).
        arguments: (low, high) of every activation's argument, (boxes, *shape).
        rows: (boxes, rows, outputs).
        open_: (boxes, rows), which problems to work on.
        goal: (boxes, rows); bounds above it are good enough.
        limits: how far to go.
        show: is called with how many of how many boxes are done.
    """
    program, count = program_of(network), len(rows)
    low, high = (
        np.concatenate([np.asarray(pair[k], float).reshape(count, -1) for pair in boxes], axis=1)
        for k in (0, 1)
    )
    shape = rows.shape[:2]
    found = Improved(
        np.zeros(shape, bool), np.zeros((shape[0], 1), bool), np.full(shape, -np.inf),
        np.full(shape, np.inf), np.zeros((*shape, low.shape[1])), np.zeros(shape, int),
    )  # fmt: skip
    hulls = _Hulls(network, program, arguments)
    for box in np.flatnonzero(open_.any(axis=1)):
        if limits.deadline is not None and time.monotonic() > limits.deadline:
            break
        some = np.flatnonzero(open_[box])
        given = [tuple(np.asarray(x[box], float) for x in pair) for pair in arguments]
        try:
            with np.errstate(all="ignore"):
                facts = facts_of(program, low[box], high[box], given)
                room = int(min(ROOM, limits.memory * 2**30 / 64))
                relaxation = Envelope(program, facts, room, limits.planes)
                works = relaxation.helps or limits.narrow
                found.same[box] = not works
                if works:
                    problems = rows[box, some], goal[box, some]
                    _work(relaxation, problems, limits, hulls.of(int(box)), found, (box, some))
        except Refused as error:
            raise ProblemError(f"relaxation='envelope', box {box + 1}: {error}.") from None
        show("envelopes", int(box) + 1, count)
    return found


INTERVAL_STEPS = 8  # for an end of an interval: with more, ends hardly move
INTERVALS_AT_ONCE = 32


def tighten(network: Network, boxes: tuple, arguments: tuple, limits: Limits, show) -> tuple:
    """Intervals of arguments made narrower by envelopes; arguments as those of `improve`.

    Activation by activation: each end of an interval that has a bend in it is a row of the network
    up to there, over the relaxation with the intervals found before.
    """
    program, count = program_of(network), len(arguments[0][0]) if arguments else 0
    low, high = (
        np.concatenate([np.asarray(pair[k], float).reshape(count, -1) for pair in boxes], axis=1)
        for k in (0, 1)
    )
    found = [tuple(np.array(x, float) for x in pair) for pair in arguments]
    room = int(min(ROOM, limits.memory * 2**30 / 64))
    for box in range(count):
        if limits.deadline is not None and time.monotonic() > limits.deadline:
            break
        given = [tuple(x[box] for x in pair) for pair in found]  # views: what is met stays
        for k, index in enumerate(program.activations):
            if slopes_of(program.nodes[index].operation):
                try:
                    with np.errstate(all="ignore"):
                        _tighten(program, index, (low[box], high[box]), given, k, room)
                except Refused as error:
                    raise ProblemError(
                        f"intermediate='envelope', box {box + 1}: {error}."
                    ) from None
        show("intervals by envelopes", box + 1, count)
    return tuple(found)


def _tighten(program: Program, index: int, box: tuple, given: list, k: int, room: int) -> None:
    ends = [x.reshape(-1) for x in given[k]]
    some = np.flatnonzero((ends[0] < 0) & (ends[1] > 0))
    (argument,) = program.nodes[index].arguments
    part = replace(program, nodes=program.nodes[: argument + 1], outputs=[argument])
    before = len(part.activations)
    if not len(some) or not before:
        return
    relaxation = Envelope(part, facts_of(part, box[0], box[1], given[:before]), room)
    for sign, side, best in ((1, 0, np.maximum), (-1, 1, np.minimum)):
        for first in range(0, len(some), INTERVALS_AT_ONCE):
            mine = some[first : first + INTERVALS_AT_ONCE]
            rows = np.zeros((len(mine), len(ends[0])))
            rows[np.arange(len(mine)), mine] = sign
            start = relaxation.start(rows, relaxation.default_slopes(len(rows)))
            # A neuron that turns out not to bend needs no better interval.
            result = search(
                relaxation, rows, start, (INTERVAL_STEPS, 0), np.zeros(len(rows)), (0.0, 1e-2)
            )
            ends[side][mine] = best(
                ends[side][mine], sign * relaxation.certified(rows, result.state)
            )


def facts_of(program: Program, low, high, arguments) -> Facts:
    """What follows from a box, with given intervals of the activations' arguments."""
    given = dict(zip(program.activations, arguments, strict=True))

    def tighter(facts: Facts, index: int, argument: int) -> None:
        facts.meet(argument, *(x.reshape(facts.low[argument].shape) for x in given[index]))

    return Facts(Arithmetic(), program, low[None], high[None]).derive(tighter, passes=False)


class _Hulls:
    """The hulls of activations that are not max(a y, b y), box by box, as triangles have them."""

    def __init__(self, network: Network, program: Program, arguments: tuple):
        self.network, self.program, self.arguments = network, program, arguments

    @functools.cached_property
    def _layers(self) -> tuple:
        return split(self.network).layers

    def of(self, box: int) -> dict[int, Hull]:
        """By activation."""
        found: dict[int, Hull] = {}
        for k, index in enumerate(self.program.activations):
            if not slopes_of(self.program.nodes[index].operation):
                low, high = (jnp.asarray(x[box]) for x in self.arguments[k])
                found[index] = _hull(self._layers[k].wedge(low, high))
        return found


def _hull(wedge: Any) -> Hull:
    def bounds(x):
        low, high = (np.asarray(jax.vmap(f)(jnp.asarray(x, float)))
                     for f in (wedge.lower, wedge.upper))  # fmt: skip
        # As in the search with triangles: bounds may cross by a little rounding.
        crossed = low - high > 4e-6 * (1 + np.abs(low) + np.abs(high))
        return np.where(crossed, np.nan, low), high

    return bounds


def _work(
    relaxation: Envelope, problems: tuple, limits: Limits, hulls: dict[int, Hull],
    found: Improved, at: Any,
) -> None:  # fmt: skip
    (rows, goal), program, facts = problems, relaxation.program, relaxation.facts
    start = relaxation.start(rows, relaxation.default_slopes(len(rows)))
    result = search(relaxation, rows, start, limits.steps, goal, limits.gap)
    size = np.concatenate([facts.magnitude(k).reshape(-1) for k in program.outputs])
    value = relaxation.value(rows, result.inputs, result.at, hulls)
    value = np.where(np.isfinite(value), value, np.inf)
    found.bound[at] = relaxation.certified(rows, result.state)
    found.value[at] = value + ROUNDING * (np.abs(rows) @ np.asarray(size, float))
    found.inputs[at] = np.clip(result.inputs, facts.inputs[0][0], facts.inputs[1][0])
    found.passes[at] = result.passes + 1
    found.reached[at] = True
