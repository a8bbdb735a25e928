"""Tighter intervals for the arguments of activations, by slopes that a certificate can hold."""

import numpy as np

from stagecert.verify.ascent import ascend
from stagecert.verify.certificates import Arrays, Leaf, Rows
from stagecert.verify.nodes import Aim, Form, Lanes, default_slopes
from stagecert_check.bounds import Facts
from stagecert_check.checker import Checker

STEPS = 8  # of ascent, on each end of each interval
NUMBERS = 100_000  # in an array of slopes that are searched for at a time
WORTH = 1e-3  # of an interval's width: smaller gains are not kept


class OutOfTime(Exception):
    """There is no time to go on."""


class Tightener:
    """Searches for slopes that make the intervals of activations tighter, one after the other.

    `Facts.derive` calls it for every activation. What it found is in `boxes`, as certificates hold
    it: the checker makes the same intervals of it.
    """

    def __init__(self, checker: Checker, form: Form, low, high, stop):
        self.checker, self.form, self.stop = checker, form, stop
        self.ends = low.astype(np.float32), high.astype(np.float32)
        self.boxes: list[Rows | None] = []

    def __call__(self, facts: Facts, index: int, argument: int) -> None:
        checker, place = self.checker, len(self.boxes)
        self.boxes.append(None)
        function = checker.program.nodes[index].operation
        ends = facts.low[argument], facts.high[argument]
        entries = np.flatnonzero(function.bent(*ends))  # type: ignore
        if place == 0 or not len(entries):
            return
        both = np.concatenate([entries, entries])
        sides = np.repeat([1, -1], len(entries))
        slopes, bounds = self._searched(facts, argument, both, sides)
        low, high = (x.reshape(-1)[both] for x in ends)
        gain = bounds - np.where(sides > 0, low, -high)
        kept = np.flatnonzero(gain > WORTH * (high - low))
        if not len(kept):
            return
        earlier = list(self.form.layers.values())[:place]
        self.boxes[-1] = Rows(
            both[kept].astype("<i4"),
            sides[kept].astype("<i4"),
            tuple(_slopes(layer, *(x[kept] for x in slopes)) for layer in earlier),
        )
        held = Arrays()
        none = (None,) * (len(checker.activations) - len(self.boxes))
        leaf = held.leaf(Leaf(np.ones(1), (None,) * len(checker.activations), (*self.boxes, *none)))
        checker.given.tighten(held, leaf, facts, index, argument)  # type: ignore

    def _searched(self, facts: Facts, argument: int, entries, sides):
        """Slopes below and above (rows, neurons), and lower bounds on sides * entries."""
        form = self.form
        boxes = [facts.boxes[k] for k in self.checker.activations if k in facts.boxes]
        # Of this activation and later ones nothing is known, and nothing is needed.
        rest = form.neurons - sum(box[0].size for box in boxes)
        low, high = (
            np.concatenate([*(box[k].reshape(-1) for box in boxes), np.zeros(rest)])[None]
            for k in (0, 1)
        )
        low, high = low.astype(np.float32), high.astype(np.float32)
        below, above = default_slopes(form, low, high)
        at_once = max(NUMBERS // form.neurons, 16)
        found: list[tuple] = []
        for begin in range(0, len(entries), at_once):
            if self.stop():
                raise OutOfTime
            some = slice(begin, begin + at_once)
            count = len(entries[some])

            def repeated(x, count=count):
                return np.repeat(x, count, axis=0)

            nothing = np.zeros((count, form.neurons), np.float32)
            start = repeated(below)
            lanes = Lanes(
                (repeated(self.ends[0]), repeated(self.ends[1])), repeated(low), repeated(high),
                nothing.astype(np.int8), np.zeros((count, 1, 0), np.float32),
                np.zeros((count, 1), np.float32), start,
                repeated(above) if form.curved else start, nothing,
                np.ones((count, 1), np.float32),
                np.zeros((count, len(form.layers)), np.float32), np.ones(count, np.float32),
            )  # fmt: skip
            aim = Aim(argument, entries[some], sides[some])
            better = ascend(form, lanes, STEPS, np.full(count, np.inf), aim)
            found.append((better.lanes.below, better.lanes.above, better.bound))
        slopes_below, slopes_above, bounds = map(np.concatenate, zip(*found, strict=True))
        return (slopes_below, slopes_above), bounds


def _slopes(layer, below, above):
    if layer.maximum:
        return None
    shape = len(below), *layer.shape
    if layer.relu:
        return np.clip(below[:, layer.some], 0, 1).reshape(shape).astype("<f2"), None
    pair = below[:, layer.some], above[:, layer.some]
    return tuple(x.reshape(shape).astype("<f4") for x in pair)
