"""Tighter intervals for the arguments of activations, by slopes that a certificate can hold."""

from dataclasses import replace

import numpy as np

from stagecert.verify.ascent import ascend
from stagecert.verify.certificates import Arrays, Rows
from stagecert.verify.gpu import placed
from stagecert.verify.lemmas import Prover, spelt
from stagecert.verify.nodes import Aim, Form, Lanes, Layer, default_slopes
from stagecert.verify.stations import Station
from stagecert.verify.team import Team
from stagecert_check.bounds import Facts
from stagecert_check.cases import by_cases
from stagecert_check.checker import Checker
from stagecert_check.narrowing import Narrow

STEPS = 8  # of ascent, on each end of each interval
WORTH = 1e-3  # of an interval's width: smaller gains are not kept


class OutOfTime(Exception):
    """There is no time to go on."""


class Tightener:
    """Searches for slopes that make the intervals of activations tighter, one after the other.

    `refined` calls it for every activation. What it found is in `boxes`, as certificates hold it:
    the checker makes the same intervals of it. The form is that of the narrow network.
    """

    def __init__(self, checker: Checker, form: Form, low, high, team: Team, stop):
        placed(form)
        self.checker, self.form, self.team, self.stop = checker, form, team, stop
        self.ends = low.astype(np.float32), high.astype(np.float32)
        self.boxes: list[Rows | None] = []

    def __call__(self, known: Narrow, facts: Facts, index: int, argument: int) -> None:
        self._pass(known, facts, index, argument)
        simple = all(layer.relu for layer in self.form.layers.values()) and not self.form.dear
        if len(self.boxes) > 1 and simple:
            self._prove(known, facts, index, argument)

    def _prove(self, known: Narrow, facts: Facts, index: int, argument: int) -> None:
        """Signs that passes back leave open, by cases."""
        function = self.checker.program.nodes[index].operation
        entries = np.flatnonzero(
            function.bent(facts.low[argument], facts.high[argument])  # type: ignore
        )
        prover = Prover(facts, argument, self.team, self.stop) if len(entries) else None
        lemmas = prover.proven(entries) if prover else None
        if self.stop():
            raise OutOfTime
        if lemmas is None:
            return
        given = self.checker.given
        cases = spelt(lemmas, known, given.sizes, index, given.shape)
        nothing = np.zeros(0, "<i4")
        rows = self.boxes[-1] or Rows(nothing, nothing, (None,) * (len(self.boxes) - 1))
        self.boxes[-1] = replace(rows, cases=cases)
        held = Arrays()
        by_cases(given, (held, held.cases(cases)), facts, index, known)

    def _pass(self, known: Narrow, facts: Facts, index: int, argument: int) -> None:
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
        earlier = list(self.form.layers)[:place]
        found, held = both[kept], Arrays()
        self.boxes[-1] = rows = Rows(
            known.kept.get(index, np.arange(int(facts.low[argument].size)))[found].astype("<i4"),
            sides[kept].astype("<i4"),
            tuple(self._widened(known, k, *(x[kept] for x in slopes)) for k in earlier),
        )
        (given,) = held.boxes((rows,))
        assert given is not None
        checker.given.passes(held, given, facts, (index, argument), known)

    def _widened(self, known: Narrow, index: int, below, above) -> tuple | None:
        """Slopes of one layer, for all its neurons."""
        found = slopes_of(self.form.layers[index], below, above)
        if found is None or index not in known.kept:
            return found
        shape = self.checker.given.shape(index)
        kept, size = known.kept[index], self.checker.given.sizes[index]
        return tuple(
            x if x is None else spread(x.reshape(len(x), -1), kept, size).reshape(-1, *shape)
            for x in found
        )

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
        at_once = form.lanes_at_once(self.ends[0].size)
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


def slopes_of(layer: Layer, below, above, kind="<f2") -> tuple | None:
    """The slopes (rows, *shape) of one layer as certificates hold them, relu's in a kind."""
    if layer.maximum:
        return None
    shape = len(below), *layer.shape
    if layer.relu:
        return np.clip(below[:, layer.some], 0, 1).reshape(shape).astype(kind), None
    pair = below[:, layer.some], above[:, layer.some]
    return tuple(x.reshape(shape).astype("<f4") for x in pair)


def spread(array: np.ndarray, kept: np.ndarray, neurons: int) -> np.ndarray:
    """(rows, those kept) as (rows, all neurons), with zeros for the others."""
    found = np.zeros((len(array), neurons), array.dtype)
    found[:, kept[: array.shape[1]]] = array
    return found


def written(narrow: Form, kept: np.ndarray, form: Form, station: Station) -> tuple:
    """The passes of a station as certificates hold them; `kept` are the narrow form's neurons."""
    neurons = [neuron for neuron, _, _ in station.splits]
    signs = np.array([-1 if above else 1 for _, _, above in station.splits])
    last = {neuron: k for k, neuron in enumerate(neurons)}
    layers, own = list(form.layers.values()), list(narrow.layers.values())
    found: list[Rows | None] = []
    for place, layer in enumerate(layers):
        passes = station.passes.get(place)
        if passes is None or not np.any(passes.kept):
            found.append(None)
            continue
        some = passes.kept
        entries = kept[own[place].some][passes.entries[some]] - layer.some.start
        below = spread(passes.below[some].astype(np.float32), kept, form.neurons)
        above = spread(passes.above[some], kept, form.neurons) if form.curved else below
        # Of several splits of a neuron on one side the last has the force.
        force = np.zeros((int(np.sum(some)), len(neurons)), np.float32)
        for k in last.values():
            force[:, k] = np.maximum(signs[k] * passes.force[some, k], 0)
        found.append(Rows(
            entries.astype("<i4"), passes.sides[some].astype("<i4"),
            tuple(slopes_of(x, below, above) for x in layers[:place]), force,
        ))  # fmt: skip
    return tuple(found)
