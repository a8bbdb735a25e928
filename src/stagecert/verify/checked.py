"""Bounds of rows over boxes by the checker's own passes, for branch and bound over inputs.

They need no compilation, leave fixed inputs out (`stagecert_check.folding`), and what they refute
the checker refutes once more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagecert.networks.bounding.stepwise import Found
from stagecert.verify.nodes import Form
from stagecert_check.bounds import Facts, linear_parts, lower_bounds
from stagecert_check.checker import Checker
from stagecert_check.graph import Program


@dataclass(frozen=True, eq=False)
class Known:
    """Both ends of boxes, and what the checker knows of them; arrays have an axis of boxes.

    Attributes:
        ends: of the inputs.
        low, high: intervals of all arguments of activations, side by side.
        sizes: the largest absolute values of the outputs, then of the inputs.
    """

    ends: tuple[np.ndarray, np.ndarray]
    low: np.ndarray
    high: np.ndarray
    sizes: np.ndarray

    def __getitem__(self, some) -> "Known":
        ends = self.ends[0][some], self.ends[1][some]
        return Known(ends, self.low[some], self.high[some], self.sizes[some])


class CheckedPasses:
    """The checker's facts of some boxes, and passes back from there.

    Attributes:
        complete: False if `stop` came first; then nothing else counts.
    """

    def __init__(
        self, checker: Checker, low: np.ndarray, high: np.ndarray, stop: Callable[[], bool]
    ):
        """Derives the facts of boxes (boxes, entries).

        Raises `stagecert_check.functions.Refused` where the checker cannot bound the network.
        """
        self.program, self.ends = checker.program, (low, high)
        self.size, self.complete = checker.boxes_at_once, False
        self.facts: list[Facts] = []
        with np.errstate(all="ignore"):
            for begin in range(0, len(low), self.size):
                if stop():
                    return
                some = slice(begin, begin + self.size)
                facts = Facts(checker.real, self.program, low[some], high[some])
                self.facts.append(facts.derive())
        self.complete = True

    def known(self, form: Form) -> Known:
        """What they found out; the form is that of the same program."""
        program = self.program
        low, high = (
            np.concatenate([
                form.joined([facts.boxes[k][end] for k in program.activations])
                for facts in self.facts
            ])
            for end in (0, 1)
        )  # fmt: skip
        ends = (*program.outputs, *program.inputs)
        sizes = [form.joined([facts.magnitude(k) for k in ends]) for facts in self.facts]
        return Known(self.ends, low, high, np.concatenate(sizes))

    def bound(self, of_box: np.ndarray, rows: np.ndarray) -> Found:
        """Lower bounds of rows of the outputs, then the inputs, each over the box given with it."""
        bound, coefficients = np.zeros(len(rows)), np.zeros((len(rows), self.ends[0].shape[1]))
        with np.errstate(all="ignore"):
            for k, facts in enumerate(self.facts):
                mine = np.flatnonzero(of_box // self.size == k)
                if len(mine):
                    of = of_box[mine] % self.size
                    bound[mine], coefficients[mine] = self._of(facts, of, rows[mine])
        low, high = (end[of_box] for end in self.ends)
        return Found(bound, coefficients, np.where(coefficients > 0, low, high))

    def _of(self, facts: Facts, of: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start = starts(self.program, rows)
        bound = lower_bounds(facts, of, lambda some: {k: x[some] for k, x in start.items()}, {})
        _, met = linear_parts(facts, start, self.program.inputs, of)
        sizes = {k: math.prod(self.program.nodes[k].shape) for k in self.program.inputs}
        parts = [
            met[k].reshape(len(rows), -1) if k in met else np.zeros((len(rows), size))
            for k, size in sizes.items()
        ]
        return bound, np.concatenate(parts, axis=1)


def starts(program: Program, rows: np.ndarray) -> dict[int, np.ndarray]:
    """Rows of the outputs, then the inputs, as cotangents of these values."""
    start: dict[int, np.ndarray] = {}
    begin = 0
    for index in (*program.outputs, *program.inputs):
        shape = program.nodes[index].shape
        size = math.prod(shape)
        if begin < rows.shape[1]:
            part = rows[:, begin : begin + size].reshape(-1, *shape)
            start[index] = start[index] + part if index in start else part
        begin += size
    return start
