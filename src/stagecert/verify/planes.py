"""Rows refuted on whole boxes by planes above neurons, in the form that certificates have."""

from dataclasses import dataclass

import numpy as np

from stagecert.networks.bounding.envelope import ROOM, Envelope, State
from stagecert.networks.bounding.envelope_search import search
from stagecert.verify.certificates import Above, Slopes
from stagecert.verify.queries import Group
from stagecert_check.bounds import Facts
from stagecert_check.graph import Program
from stagecert_check.numbers import Arithmetic

STEPS = 40, 100  # of the two kinds: with more, bounds hardly rise
MARGIN = 1e-6  # by so much, relative to what a row can be, bounds in single precision must exceed


@dataclass(frozen=True, eq=False)
class Proven:
    """A certified lower bound of a row, and what it rests on: see `certificates.Leaf`."""

    bound: float
    slopes: tuple[Slopes | None, ...]
    planes: tuple[Above | None, ...]


def bounds_by_planes(
    program: Program, group: Group, rows: np.ndarray, memory: float
) -> dict[int, Proven]:
    """Bounds of some rows of a group over its whole box.

    Raises `stagecert_check.functions.Refused` where the checker cannot bound the network.
    """
    count = sum(int(np.prod(program.nodes[k].shape)) for k in program.outputs)
    # Rows on inputs have no planes to gain from.
    rows = np.array([k for k in rows if not np.any(group.matrix[k, count:])], int)
    if not len(rows):
        return {}
    matrix, limits = group.matrix[rows, :count], group.limits[rows]
    low, high = (np.array([x], float) for x in (group.inputs.lower64, group.inputs.upper64))
    with np.errstate(all="ignore"):
        facts = Facts(Arithmetic(), program, low, high).derive()
        size = np.concatenate([facts.magnitude(k).reshape(-1) for k in program.outputs])
        relaxation = Envelope(program, facts, int(min(ROOM, memory * 2**30 / 64)))
        if not any(layer.bent.any() for layer in relaxation.kinked.values()):
            return {}
        start = relaxation.start(matrix, relaxation.default_slopes(len(rows)))
        goal = limits + MARGIN * (np.abs(limits) + np.abs(matrix) @ size)
        found = search(relaxation, matrix, start, STEPS, goal, (0.0, 1e-3))
        bounds = relaxation.certified(matrix, found.state)
        blocks = relaxation.back(np.asarray(matrix, np.float32), found.state)[1]
    return {
        int(row): Proven(float(bound), *_held(relaxation, found.state, blocks, slice(k, k + 1)))
        for k, (row, bound) in enumerate(zip(rows, bounds, strict=True))
    }


def _held(
    relaxation: Envelope, state: State, blocks: dict[int, np.ndarray], one: slice
) -> tuple[tuple, tuple]:
    """Slopes and planes of one problem, as a certificate holds them."""
    state, blocks = state.of(one), {k: x[one] for k, x in blocks.items()}
    slopes: list[Slopes | None] = []
    planes: list[Above | None] = []
    for index in relaxation.program.activations:
        if index not in relaxation.kinked:
            slopes.append(None)
            planes.append(None)
            continue
        argument = relaxation.program.nodes[relaxation.program.nodes[index].arguments[0]]
        slopes.append((state["below", index].reshape(argument.shape).astype("<f4"), None))
        above = None
        if ("mix", index) in state.arrays and index in blocks:
            given = relaxation.given(index, state, blocks)
            order = np.argsort(given.entries)
            if len(order):
                above = Above(given.entries[order].astype("<i4"), given.shares[order].astype("<f4"),
                              given.kept[order].astype("<f4"))  # fmt: skip
        planes.append(above)
    return tuple(slopes), tuple(planes)
