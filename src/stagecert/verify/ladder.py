"""Bounds over whole boxes by methods of rising cost: what one of them finds serves the next.

`verify` asks for the boxes of a property's cases, `robust` for those around images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert import networks
from stagecert.networks import Network
from stagecert.networks.bounding.relaxation import Split, split
from stagecert.networks.bounding.search import few_sizes
from stagecert.networks.bounding.stepwise import Passes, rows_at_once
from stagecert.networks.regions import regions_of
from stagecert.problem import as_arrays
from stagecert.verify.attack import Attacker
from stagecert.verify.complete import Complete
from stagecert.verify.findings import Findings
from stagecert.verify.planes import bounds_by_planes
from stagecert.verify.queries import for_users
from stagecert_check.bounds import few
from stagecert_check.functions import Refused

# Intervals; one pass back; a search on the intervals of that pass; a search on intervals that were
# searched for, too.
METHODS = ("ibp", "backward", "nonconvex", "optimised")


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of inputs and what is asked of each.

    Attributes:
        numbers: which boxes they are: what is found for one is remembered under its number.
        lower, upper: (boxes, entries).
        rows: (boxes, rows, outputs), the functions of the outputs to bound.
        limits: the search for a bound ends above this; (boxes, rows) or (boxes, 1).
    """

    numbers: Sequence[int]
    lower: np.ndarray
    upper: np.ndarray
    rows: np.ndarray
    limits: np.ndarray


@dataclass(frozen=True, eq=False)
class Bounded:
    """Lower bounds (boxes, rows), and where they are attained: (boxes, rows, entries)."""

    bound: np.ndarray
    points: np.ndarray


class Ladder:
    """Bounds on linear functions of a network's outputs, method by method.

    Args:
        network: the network.
        memory: GiB that arrays may take.
        left: seconds that are left; None if there is no limit.
        say: is told now and then how far things are.
        searching: "ibp" is the search on intervals, not one pass back: on accelerators it costs no
            more.
    """

    def __init__(
        self,
        network: Network,
        memory: float,
        left: Callable[[], float | None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        searching: bool = False,
    ):
        self.network, self.memory, self.left, self.say = network, memory, left, say
        self.searching = searching
        self._arguments: dict[int, tuple] = {}  # of activations: intervals, by one pass back

    @cached_property
    def parts(self) -> Split:
        """The network, cut at its activations, as float64 arrays."""
        with jax.enable_x64(True):
            return as_arrays(split(self.network), jnp.float64)

    def forget(self) -> None:
        """Other boxes come, under the same numbers."""
        self._arguments.clear()

    def bound(self, method: str, boxes: Boxes) -> Bounded | None:
        """Bounds by one of the METHODS; "nonconvex" needs what "backward" found for these boxes.

        None if time was up before there was any.
        """
        by_passes = METHODS[1:2] if self.searching else METHODS[:2]
        return (self._by_passes if method in by_passes else self._by_search)(method, boxes)

    def _by_passes(self, method: str, boxes: Boxes) -> Bounded | None:
        """One pass back, on intervals or on intervals that passes back have tightened."""
        count, rows, _ = boxes.rows.shape
        with jax.enable_x64(True):
            passes = Passes(
                self.parts,
                regions_of(self.network, *self._ends(boxes), None),
                rows_at_once(self.parts, self.memory),
                refine=method == "backward",
                stop=lambda: self.left() == 0,
                share=lambda layer, done, size: self.say(
                    f"bounding: {method}, layer {layer} of {len(self.parts.layers)}, "
                    f"{done} of {size}"
                ),
            )
            if not passes.complete:
                return None
            found = passes.bound(
                np.repeat(np.arange(count), rows), boxes.rows.reshape(count * rows, -1)
            )
            if method == "backward":
                for k, pairs in self._each(passes.arguments, boxes):
                    self._arguments[k] = pairs
        return Bounded(found.bound.reshape(count, rows), found.minimisers.reshape(count, rows, -1))

    def _each(self, arguments, boxes: Boxes):
        arrays = jax.tree.map(np.asarray, arguments)
        for place, number in enumerate(boxes.numbers):
            yield number, tuple((low[place], high[place]) for low, high in arrays)

    def _by_search(self, method: str, boxes: Boxes) -> Bounded:
        """The search of `networks.bound`."""
        left = self.left()
        found = networks.bound(
            self.network,
            *self._ends(boxes),
            boxes.rows,
            method="nonconvex",
            intermediate=self._earlier(boxes) if method == "nonconvex" else method,
            threshold=np.where(np.isfinite(boxes.limits), boxes.limits, np.finfo(float).max),
            time_limit=None if left is None else max(left, 0.01),
            memory=self.memory,
        )
        inputs = found.inputs if isinstance(found.inputs, tuple) else (found.inputs,)
        shape = boxes.rows.shape[:2]
        points = np.concatenate([x.reshape(*shape, -1) for x in inputs], axis=2)
        return Bounded(found.bound, points)

    def _earlier(self, boxes: Boxes) -> tuple:
        """The intervals that one pass back gave."""
        per_box = [self._arguments[k] for k in boxes.numbers]
        return tuple(
            tuple(map(np.stack, zip(*pairs, strict=True))) for pairs in zip(*per_box, strict=True)
        )

    def _ends(self, boxes: Boxes) -> tuple[Any, Any]:
        return for_users(self.network, boxes.lower), for_users(self.network, boxes.upper)


# -- boxes of open cases ---------------------------------------------------------------------------


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
        self._bound_each("backward", lambda g: complete.whole(g).bounds)

    def bound_roughly(self, complete: Complete) -> None:
        """The same with fewer passes back, which is where nearly all of the time goes."""
        self._bound_each("intervals", lambda g: complete.rough(g, False))
        if not self.over():
            self._bound_each("intervals", lambda g: complete.rough(g, few))

    def _bound_each(self, how: str, bounds_of: Callable[[int], np.ndarray]) -> None:
        for g in sorted({g for g, _ in self.known.open()}):
            self.say(f"bounding box {g + 1} of {len(self.known.groups)}: {how}")
            try:
                bounds = bounds_of(g)
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
