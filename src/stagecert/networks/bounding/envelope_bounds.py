"""From triangles to envelopes: what `networks.bound(relaxation="envelope")` adds to a result.

Box by box, on NumPy arrays: nothing is compiled. The triangle's bounds stay where they are better.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.bounding.envelope import ROOM, Envelope
from stagecert.networks.bounding.envelope_search import search
from stagecert.networks.bounding.programs import program_of
from stagecert.networks.graph import Network
from stagecert_check.bounds import Facts
from stagecert_check.functions import Refused
from stagecert_check.graph import Program
from stagecert_check.numbers import Arithmetic

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
    """

    steps: tuple[int, int]
    gap: tuple[float, float]
    deadline: float | None
    memory: float


@dataclass(eq=False)
class Improved:
    """For every problem (boxes, rows): bounds, values, points and passes; some were not reached.

    Attributes:
        reached: (boxes, rows).
        inputs: (boxes, rows, entries of all inputs).
    """

    reached: np.ndarray
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
        np.zeros(shape, bool), np.full(shape, -np.inf), np.full(shape, np.inf),
        np.zeros((*shape, low.shape[1])), np.zeros(shape, int),
    )  # fmt: skip
    for box in np.flatnonzero(open_.any(axis=1)):
        if limits.deadline is not None and time.monotonic() > limits.deadline:
            break
        some = np.flatnonzero(open_[box])
        given = [tuple(np.asarray(x[box], float) for x in pair) for pair in arguments]
        try:
            with np.errstate(all="ignore"):
                facts = facts_of(program, low[box], high[box], given)
                _work(program, facts, rows[box, some], goal[box, some], limits, found, (box, some))
        except Refused as error:
            raise ProblemError(f"relaxation='envelope', box {box + 1}: {error}.") from None
        show("envelopes", int(box) + 1, count)
    return found


def facts_of(program: Program, low, high, arguments) -> Facts:
    """What follows from a box, with given intervals of the activations' arguments."""
    given = dict(zip(program.activations, arguments, strict=True))

    def tighter(facts: Facts, index: int, argument: int) -> None:
        facts.meet(argument, *(x.reshape(facts.low[argument].shape) for x in given[index]))

    return Facts(Arithmetic(), program, low[None], high[None]).derive(tighter, passes=False)


def _work(
    program: Program, facts: Facts, rows, goal, limits: Limits, found: Improved, at: Any
) -> None:
    room = int(min(ROOM, limits.memory * 2**30 / 64))
    relaxation = Envelope(program, facts, room)
    start = relaxation.start(rows, relaxation.default_slopes(len(rows)))
    result = search(relaxation, rows, start, limits.steps, goal, limits.gap)
    size = np.concatenate([facts.magnitude(k).reshape(-1) for k in program.outputs])
    found.bound[at] = relaxation.certified(rows, result.state)
    found.value[at] = result.value + ROUNDING * (np.abs(rows) @ np.asarray(size, float))
    found.inputs[at] = np.clip(result.inputs, facts.inputs[0][0], facts.inputs[1][0])
    found.passes[at] = result.passes
    found.reached[at] = True
