"""Combinations of a case's rows: what every counterexample makes at most zero, and bounds on it."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts, Lines
from stagecert_check.functions import Refused
from stagecert_check.graph import Program
from stagecert_check.leaves import Pushes, sum_bounds
from stagecert_check.numbers import Arithmetic
from stagecert_check.properties import Property
from stagecert_check.tree import Task

_MOST_OBJECTIVES = 10_000


@dataclass(frozen=True, eq=False)
class Objective:
    """What every counterexample makes <= 0, or < 0 if `strict`: sum of g_v . v, plus a constant.

    `terms` has g_v by node, and how far its entries are off; so have the constants.
    """

    terms: dict[int, tuple[Any, Any]]
    constant: tuple[Any, Any]
    strict: bool


class Objectives:
    """The combinations of rows that tasks want, and bounds on them."""

    def __init__(self, program: Program, wanted: Property, real: Arithmetic):
        self.program, self.wanted, self.real = program, wanted, real
        self._held: OrderedDict[tuple[int, tuple[float, ...]], Objective] = OrderedDict()

    def bounds(
        self,
        facts: Facts,
        of: np.ndarray,
        tasks: list[Task],
        lines: dict[int, Lines],
        more: Pushes | None,
    ) -> np.ndarray:
        """Lower bounds on what tasks want, each with the facts `of` a box; `more` is added."""
        goals = [self.of(task.case, task.multipliers) for task in tasks]
        dtype = object if self.real.exact else float

        def stacked(index: int, k: int) -> np.ndarray:
            """The coefficients of a value in all objectives (k = 0), or how far they are off."""
            shape = self.program.nodes[index].shape
            nothing = np.zeros(int(np.prod(shape)), dtype), np.zeros(int(np.prod(shape)), dtype)
            rows = [goal.terms.get(index, nothing)[k] for goal in goals]
            return np.stack(rows).reshape(-1, *shape)

        nodes = sorted({index for goal in goals for index in goal.terms})
        given = {index: (stacked(index, 0), stacked(index, 1)) for index in nodes}
        constant, slip = (np.array([goal.constant[k] for goal in goals], dtype) for k in (0, 1))
        return sum_bounds(facts, of, Pushes(given, constant, slip), more, lines)

    def of(self, number: int, multipliers: tuple[float, ...]) -> Objective:
        """The sum of multiplier * (row . (X, Y) - bound) over the rows of a case."""
        key = number, multipliers
        if key in self._held:
            return self._held[key]
        case = self.wanted.cases[number]
        if min(multipliers, default=0) < 0:
            raise Refused("multipliers must not be negative")
        sums: dict[int, dict[int, Fraction]] = {}
        constant, strict = Fraction(0), False
        for row, multiplier in zip((*case.outputs, *case.input_rows), multipliers, strict=True):
            if not multiplier:
                continue
            if row.hidden:
                raise Refused("rows on hidden values are not supported")
            weight = Fraction(multiplier)
            strict |= row.strict
            constant -= weight * row.bound
            for nodes, terms in (
                (self.program.inputs, row.inputs),
                (self.program.outputs, row.outputs),
            ):
                for place, coefficient in terms:
                    for index in nodes:  # which of the values the place is in
                        size = int(np.prod(self.program.nodes[index].shape))
                        if place < size:
                            break
                        place -= size
                    else:
                        raise Refused("a row is about an entry that is not there")
                    of = sums.setdefault(index, {})
                    of[place] = of.get(place, Fraction(0)) + weight * coefficient
        terms, dtype = {}, object if self.real.exact else float
        for index, of in sums.items():
            size = math.prod(self.program.nodes[index].shape)
            terms[index] = near, off = np.zeros(size, dtype), np.zeros(size, dtype)
            for place, coefficient in of.items():
                near[place], off[place] = self.real.near(coefficient)
        self._held[key] = found = Objective(terms, self.real.near(constant), strict)
        while len(self._held) > _MOST_OBJECTIVES:
            self._held.popitem(last=False)
        return found
