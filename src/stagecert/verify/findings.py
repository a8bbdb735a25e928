"""What is known of the cases of a property, as it becomes known."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagecert.verify.planes import Proven
from stagecert.verify.queries import Group
from stagecert.verify.replay import Counterexample
from stagecert.verify.splitting import Splitter
from stagecert.verify.verdict import CaseBounds


@dataclass
class State:
    """What is known of one group, as it becomes known."""

    bounds: np.ndarray
    refuted: np.ndarray
    how: list[str | None]
    row: list[int | None]
    nearest: np.ndarray


class Findings:
    """What is known of all groups of cases.

    Attributes:
        groups, states: the groups, and what is known of each.
        found: a counterexample.
        rows: by case, the row of the group that refutes it as a whole.
        planes: by case, what refutes its row.
    """

    def __init__(self, groups: Sequence[Group] = ()):
        self.groups = tuple(groups)
        self.states = [
            State(
                np.full(len(group.rows), -np.inf),
                np.zeros(len(group.numbers), bool),
                [None] * len(group.numbers),
                [None] * len(group.numbers),
                np.full(len(group.numbers), np.inf),
            )
            for group in self.groups
        ]
        self.found: Counterexample | None = None
        self.rows: dict[int, int] = {}
        self.planes: dict[int, Proven] = {}

    def decided(self) -> bool:
        """Whether there is a counterexample, or the search has refuted every case."""
        return self.found is not None or all(state.refuted.all() for state in self.states)

    def open(self) -> list[tuple[int, int]]:
        """Cases that are not refuted: (group, case of the group)."""
        return [
            (g, int(c))
            for g, state in enumerate(self.states)
            for c in np.flatnonzero(~state.refuted)
        ]

    def note(self, how: str, g: int, pick: np.ndarray, bounds: np.ndarray) -> None:
        """Keeps bounds of some rows of a group: each is a proof by itself."""
        group, state = self.groups[g], self.states[g]
        np.maximum.at(state.bounds, pick, np.where(np.isnan(bounds), -np.inf, bounds))
        passes = np.zeros(len(group.rows), bool)
        passes[pick] = group.passes(bounds, pick)
        for c in np.flatnonzero(~state.refuted):
            rows_that = group.places[c][passes[group.places[c]]]
            if len(rows_that):
                row = int(rows_that[np.argmax((state.bounds - group.limits)[rows_that])])
                state.how[c], state.row[c] = how, row
                state.refuted[c] = True
                self.rows[group.numbers[c]] = row

    def cases(self, splitter: Splitter | None) -> tuple[CaseBounds, ...]:
        """For a verdict."""
        cases = []
        for g, (group, state) in enumerate(zip(self.groups, self.states, strict=True)):
            margins = group.margin(state.bounds)
            for c, number in enumerate(group.numbers):
                rows = group.places[c].tolist()
                best = float(np.max(margins[rows])) if rows else -np.inf
                refuted = bool(state.refuted[c])
                row = state.row[c]
                scales = {group.scaled[r].scale for r in rows}
                unit = float(scales.pop()) if len(scales) == 1 else 1.0
                cases.append(
                    CaseBounds(
                        number,
                        refuted,
                        state.how[c],
                        None if row is None else rows.index(row),
                        margins[rows],
                        self._proven(g, c, best, splitter),
                        0.0 if refuted else max(-best, 0.0),
                        float(state.nearest[c]) / unit,
                    )
                )
        return tuple(sorted(cases, key=lambda one: one.case))

    def _proven(self, g: int, c: int, best: float, splitter: Splitter | None) -> float:
        """A lower bound on the violation of a case, from the best one over its whole box."""
        if splitter and self.states[g].how[c] == "splitting":
            return float(splitter.proven[g, c])
        # Leaves that split neurons refute a combination of rows: there is no violation of zero.
        return max(best, 0.0) if self.states[g].how[c] in ("tree", "forms") else best
