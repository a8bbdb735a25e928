"""Intervals that are derived anew at a node of a tree, with the splits on the way to it.

A split of an early layer makes the intervals of all later ones tighter, and more so than clipping
shows. Passes back find out: for both ends of every interval, with slopes and forces of their own.
That costs as much as some hundred nodes, but it is done once for all cases that share the node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stagecert.verify.ascent import ascend
from stagecert.verify.nodes import Aim, Form, Lanes, default_slopes

STEPS, FIRST_STEPS = 2, 6  # of ascent, on each end: after those of the node above, or without
WORTH = 1e-3  # of an interval's width: smaller gains are not kept
ROUNDING = 4e-6  # single precision is off by less than this share of an interval's size


@dataclass(eq=False)
class Passes:
    """Passes back for entries of one layer.

    Attributes:
        entries, sides: which ends: 1 the lower one, -1 the upper one.
        below, above: (rows, neurons) of all earlier layers; the latter for curves only.
        force: (rows, splits), of the splits on the way to the station; positive on upper ends.
        kept: the rows that make an interval tighter.
    """

    entries: np.ndarray
    sides: np.ndarray
    below: np.ndarray
    above: np.ndarray
    force: np.ndarray
    kept: np.ndarray


@dataclass(eq=False)
class Station:
    """What is known at a node, for all cases.

    Attributes:
        splits: (neuron, cut, whether it is the part above) from the root on.
        low, high: intervals of all arguments, side by side.
        passes: by the layer's place; what made them tighter than those of the station before.
        empty: whether the splits contradict each other.
        size: of the arrays of all passes, in bytes.
    """

    splits: tuple[tuple[int, float, bool], ...]
    low: np.ndarray
    high: np.ndarray
    passes: dict[int, Passes]
    empty: bool = False

    @property
    def size(self) -> int:
        arrays = (x for one in self.passes.values() for x in (one.below, one.above, one.force))
        return sum(x.nbytes for x in arrays)


def parts_of(
    form: Form, box, parents: Sequence[tuple[Station, int, float]], stop: Callable[[], bool]
) -> list[Station] | None:
    """The stations below and above splits of neurons; None if there is no time left.

    Args:
        form: the network.
        box: the ends of the inputs.
        parents: the stations that are split, by which neuron, and where.
        stop: whether time is up.
    """
    pairs = []
    for known, neuron, cut in parents:
        for above in (False, True):
            low, high = known.low.copy(), known.high.copy()
            (low if above else high)[neuron] = cut
            splits = (*known.splits, (neuron, cut, above))
            pairs.append((known, Station(splits, low, high, {})))
    for place in range(1, len(form.layers)):
        if not _tightened(form, box, pairs, place, stop):
            return None
    return [station for _, station in pairs]


def _tightened(
    form: Form, box, pairs: list[tuple[Station, Station]], place: int, stop: Callable[[], bool]
) -> bool:
    """Passes back for one layer of parts of stations; False if there is no time left."""
    stations = [station for _, station in pairs]
    layer = list(form.layers.values())[place]
    some = layer.some
    if layer.maximum:
        return True
    low, high = (np.stack([getattr(x, name) for x in stations]) for name in ("low", "high"))
    ends = (x[:, some].astype(float).reshape(-1, *layer.shape) for x in (low, high))
    bent = layer.function.bent(*ends).reshape(len(stations), -1)
    # A split has no say in its own layer and earlier ones.
    bent[[x.empty or form.of_neuron[x.splits[-1][0]] >= place for x in stations]] = False
    of, entries = np.nonzero(bent)
    if not len(of):
        return True
    of, entries = np.concatenate([of, of]), np.concatenate([entries, entries])
    sides = np.repeat([1, -1], len(of) // 2)
    below, above = default_slopes(form, low, high)
    below, above, force = below[of], above[of], np.zeros((len(of), form.neurons), np.float32)
    steps = STEPS
    for k, (known, _) in enumerate(pairs):
        mine = np.flatnonzero(of == k)
        if place in known.passes:
            given = entries[mine], sides[mine]
            _started(known, place, mine, given, (below, above, force))
        elif len(mine):
            steps = FIRST_STEPS
    held = np.zeros(low.shape, np.int8)
    for k, station in enumerate(stations):
        for neuron, _, is_above in station.splits:
            # Of this layer and later ones nothing is pulled at.
            held[k, neuron] |= (1 if is_above else 2) if neuron < some.start else 0
    index = list(form.layers)[place]
    aim = Aim(form.nodes[index].arguments[0], entries, sides)
    at_once, bounds = form.lanes_at_once(len(box[0])), []
    for begin in range(0, len(of), at_once):
        if stop():
            return False
        rows = np.arange(begin, min(begin + at_once, len(of)))
        mine = of[rows]
        slopes = below[rows]
        lanes = Lanes(
            tuple(np.repeat(x[None], len(rows), axis=0) for x in box),  # type: ignore
            low[mine], high[mine], held[mine], np.zeros((len(rows), 1, 0), np.float32),
            np.zeros((len(rows), 1), np.float32), slopes, above[rows] if form.curved else slopes,
            force[rows], np.ones((len(rows), 1), np.float32),
            np.zeros((len(rows), len(form.layers)), np.float32), np.ones(len(rows), np.float32),
        )  # fmt: skip
        found = ascend(
            form, lanes, steps, np.full(len(rows), np.inf), aim[rows], fresh=steps == FIRST_STEPS
        )
        below[rows], above[rows] = found.lanes.below, found.lanes.above
        force[rows] = found.lanes.force
        bounds.append(found.bound)
    rows = of, entries, sides
    arrays, at = (below, above, force), (place, some)
    _noted(stations, at, rows, np.concatenate(bounds), arrays, form.curved)
    return True


def _started(station: Station, layer: int, rows, ends, arrays) -> None:
    """What the station before had for the same ends is where to begin."""
    known, (entries, sides) = station.passes[layer], ends
    place = np.full((2, int(max(known.entries.max(), entries.max(initial=0))) + 1), -1)
    place[(known.sides < 0).astype(int), known.entries] = np.arange(len(known.entries))
    old = place[(sides < 0).astype(int), entries]
    there = np.flatnonzero(old >= 0)
    for array, given in zip(arrays, (known.below, known.above), strict=False):
        array[rows[there], : given.shape[1]] = given[old[there]]
    for k, (neuron, _, _) in enumerate(station.splits):
        arrays[2][rows[there], neuron] = known.force[old[there], k]


def _noted(
    stations: list[Station], at: tuple[int, slice], rows, bounds, arrays, curved: bool
) -> None:
    """Makes the intervals of a layer tighter where that is worth it."""
    (place, some), (of, entries, sides) = at, rows
    for k, station in enumerate(stations):
        mine = np.flatnonzero(of == k)
        if not len(mine):
            continue
        neuron, side = some.start + entries[mine], sides[mine]
        low, high = station.low[neuron], station.high[neuron]
        size = np.maximum(np.abs(low), np.abs(high))
        bound = bounds[mine] - ROUNDING * size
        gain = bound - np.where(side > 0, low, -high)
        kept = np.isfinite(bound) & (gain > WORTH * (high - low))
        lower, upper = kept & (side > 0), kept & (side < 0)
        station.low[neuron[lower]] = bound[lower]
        station.high[neuron[upper]] = -bound[upper]
        crossed = station.low[some] > station.high[some]
        if np.any(station.low[some] - station.high[some] > 1e-4 * np.max(size)):
            station.empty = True
        station.high[some] = np.where(crossed, station.low[some], station.high[some])
        below, above, force = (x[mine] for x in arrays)
        # Slopes of relu are numbers of half precision.
        below = below[:, : some.start].astype(np.float32 if curved else np.float16)
        above = above[:, : some.start if curved else 0]
        force = force[:, [neuron for neuron, _, _ in station.splits]]
        station.passes[place] = Passes(entries[mine], side, below, above, force, kept)
