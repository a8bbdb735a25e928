"""Bounds over the whole boxes of open cases, noted as they are found."""

from collections.abc import Callable

import numpy as np

from stagecert.networks.bounding.search import few_sizes
from stagecert.verify.attacker import Attacker
from stagecert.verify.complete import Complete
from stagecert.verify.findings import Findings
from stagecert.verify.ladder import Boxes, Ladder
from stagecert.verify.planes import bounds_by_planes
from stagecert_check.bounds import few
from stagecert_check.functions import Refused

# Boxes that are bounded in one call.
BOXES = 1024


class WholeBoxes:
    """Bounds the rows of open cases, compiled (`ladder`) or as the checker does (`complete`).

    Args:
        known: what is known of the cases; bounds are noted there.
        ladder: methods of rising cost.
        attacker: is shown the points where bounds are attained.
        over: whether to stop.
        say: called with a line of text now and then.
    """

    def __init__(
        self,
        known: Findings,
        ladder: Ladder,
        attacker: Attacker,
        over: Callable[[], bool],
        say: Callable[[str], None],
    ):
        self.known, self.ladder, self.attacker = known, ladder, attacker
        self.over, self.say = over, say

    def bound(self, how: str) -> None:
        """Bounds the rows of open cases over their boxes; see `CaseBounds.how`."""
        waiting = sorted({g for g, _ in self.known.open()})
        for begin in range(0, len(waiting), BOXES):
            self._bound_some(how, waiting[begin : begin + BOXES])
            if self.over():
                return

    def _bound_some(self, how: str, chosen: list[int]) -> None:
        picks = [
            np.unique(
                np.concatenate(
                    [
                        self.known.groups[g].places[c]
                        for c in np.flatnonzero(~self.known.states[g].refuted)
                    ]
                )
            )
            for g in chosen
        ]
        if not any(map(len, picks)):
            return
        # So that fewer sizes are compiled; the first row fills up the others.
        most = few_sizes(self.ladder.parts.layers, max(map(len, picks)), len(chosen))
        picks = [np.concatenate([p, np.repeat(p[:1], most - len(p))]) for p in picks]
        self.say(f"bounding {len(chosen)} boxes x {most} rows: {how}")
        found = self.ladder.bound(how, self._asked(chosen, picks))
        if found is None:
            return
        for k, (g, pick) in enumerate(zip(chosen, picks, strict=True)):
            self.known.note(how, g, pick, found.bound[k])
        if not self.known.decided() and how != "ibp":
            self.attacker.try_minimisers(found.points, chosen)

    def _asked(self, chosen: list[int], picks: list) -> Boxes:
        """The boxes of groups, and the picked rows of each."""
        groups = [self.known.groups[g] for g in chosen]
        return Boxes(
            chosen,
            np.stack([group.inputs.lower64 for group in groups]).astype(float),
            np.stack([group.inputs.upper64 for group in groups]).astype(float),
            np.stack([group.matrix[p] for group, p in zip(groups, picks, strict=True)]),
            np.stack([group.limits[p] for group, p in zip(groups, picks, strict=True)]),
        )

    def bound_by_checker(self, complete: Complete) -> None:
        """Bounds over whole boxes as the checker derives them: nothing has to be compiled."""
        for g in sorted({g for g, _ in self.known.open()}):
            self.say(f"bounding box {g + 1} of {len(self.known.groups)}: backward")
            try:
                bounds = complete.whole(g).bounds
            except Refused:
                continue
            self.known.note("backward", g, np.arange(len(bounds)), bounds)
            if self.over():
                return

    def bound_roughly(self, complete: Complete) -> None:
        """The same with fewer passes back, which is where nearly all of the time goes."""
        for passes in (False, few):
            for g in sorted({g for g, _ in self.known.open()}):
                self.say(f"bounding box {g + 1} of {len(self.known.groups)}: intervals")
                try:
                    bounds = complete.rough(g, passes)
                except Refused:
                    continue
                self.known.note("backward", g, np.arange(len(bounds)), bounds)
                if self.over():
                    return

    def bound_by_planes(self, complete: Complete) -> None:
        """Bounds over whole boxes that look at all inputs of neurons."""
        for g in sorted({g for g, _ in self.known.open()}):
            self.say(f"bounding box {g + 1} of {len(self.known.groups)}: envelopes")
            group, state = self.known.groups[g], self.known.states[g]
            open_ = np.flatnonzero(~state.refuted)
            places = np.unique(np.concatenate([group.places[c] for c in open_]))
            places = places[np.isfinite(group.limits[places])]
            try:
                proven = bounds_by_planes(complete.program, group, places, self.ladder.memory)
            except Refused:
                continue
            bounds = np.array([one.bound for one in proven.values()])
            self.known.note("envelope", g, np.array(list(proven), int), bounds)
            for c in open_:
                row = state.row[c]
                if state.refuted[c] and row in proven:
                    self.known.planes[group.numbers[c]] = proven[row]
            if self.over():
                return
