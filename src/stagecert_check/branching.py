"""Trees that split neurons: leaves in batches, which share the facts of their boxes."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts
from stagecert_check.cases import by_cases
from stagecert_check.certificate import Leaf, Rows, Source
from stagecert_check.functions import Refused
from stagecert_check.leaves import Clipped, pushes, splits_of
from stagecert_check.narrowing import WORTH, Narrow, narrowed, refined
from stagecert_check.objectives import Objectives
from stagecert_check.properties import Property
from stagecert_check.slopes import Given, Stacks
from stagecert_check.tree import Path, Station, Task, boxes_of

_MOST_STATIONS = 64  # whose facts are kept
_MOST_STACKED = 2**28  # bytes of slopes of leaves that are kept
_MOST_WHOLE, _WHOLE_NUMBERS = 64, 2**22  # boxes whose facts are kept, and the numbers in these


class Branching:
    """Bounds for the leaves of such trees."""

    def __init__(self, given: Given, wanted: Property, objectives: Objectives, *at_once: int):
        self._given, self._wanted, self._objectives = given, wanted, objectives
        self._program, self._real = objectives.program, objectives.real
        self._boxes_at_once, self._leaf_numbers = at_once
        self._source: Source | None = None
        self._stacks: OrderedDict[Leaf, Stacks] = OrderedDict()  # those read last, of the source
        self._latest: tuple[Any, Narrow | None] = None, None  # facts of boxes, and which
        self._stations: OrderedDict[tuple[bytes, ...], Narrow] = OrderedDict()
        self._known: OrderedDict[tuple[bytes, bytes], Facts] = OrderedDict()
        numbers = sum(math.prod(node.shape) for node in self._program.nodes)
        self._most_known = min(max(_WHOLE_NUMBERS // numbers, 1), _MOST_WHOLE)

    def own(self, certificate: Source, task: Task) -> tuple[bytes, ...]:
        """What the bound on a leaf depends on besides its box, its multipliers and `leaf.boxes`."""
        path, stacks = task.path, self._read(certificate, task.leaf)
        assert path is not None
        found = path_of(path)
        for index, pair in stacks.items():
            for side, x in enumerate(pair):
                if x is not None:
                    row = x[0 if len(x) == 1 else task.number]
                    found.append(f"{index} {side} {x.dtype.str}".encode() + row.tobytes())
        return tuple(found)

    def bounds(
        self, certificate: Source, tasks: list[Task], digests: dict[Any, bytes]
    ) -> Iterator[tuple[list[Task], Any]]:
        """(some leaves, their lower bounds); infinite where there are no points at all.

        `digests` say by `leaf`, and by station, what its boxes are.
        """
        kinds: dict[tuple[int, Any], list[Task]] = {}
        for task in tasks:
            kinds.setdefault((task.case, task.leaf), []).append(task)
        # By station and box, whatever the case is: facts there are the same for all of them.
        below: dict[tuple[bytes, ...], list[Task]] = {}
        for (number, leaf), same in kinds.items():
            boxes: dict[bytes, list[Task]] = {}
            for task, box in boxes_of(same):
                if task.station is None:
                    boxes.setdefault(box, []).append(task)
                else:
                    key = digests[leaf], digests[task.station], box, self._pattern(leaf)
                    below.setdefault(key, []).append(task)
            whole = self._whole(certificate, number, leaf, digests[leaf])
            every = list(boxes.values())
            for begin in range(0, len(every), self._boxes_at_once):
                batch = every[begin : begin + self._boxes_at_once]
                facts = self._facts(batch, whole, digests[leaf])
                leaves = [(task, box) for box, some in enumerate(batch) for task in some]
                yield from self._in_turn(certificate, facts, leaves)
        needed = self._needed(list(itertools.chain(*below.values())), digests)
        self._stations.clear()
        # A way comes after those that lead to it, so that few facts have to be kept.
        for same in sorted(below.values(), key=lambda same: same[0].station.steps):  # type: ignore
            leaf, station = same[0].leaf, same[0].station
            assert leaf is not None
            assert station is not None
            whole = self._whole(certificate, same[0].case, leaf, digests[leaf], True)
            assert whole is not None
            base = self._station(certificate, digests, (leaf, whole), station, needed)
            yield from self._in_turn(certificate, base, [(task, 0) for task in same])

    def _needed(
        self, tasks: list[Task], digests: dict[Any, bytes]
    ) -> dict[bytes, dict[int, np.ndarray]]:
        """By station: which neurons are split anywhere below it, by activation."""
        found: dict[bytes, set[int]] = {}
        stations: dict[bytes, Station] = {}
        for task in tasks:
            assert task.path is not None
            station = task.station
            found.setdefault(digests[station], set()).update(task.path.neurons.tolist())
            while station is not None and digests[station] not in stations:
                stations[digests[station]] = station
                station = station.above
        for digest, station in sorted(
            stations.items(), key=lambda one: len(one[1].path.neurons), reverse=True
        ):
            found.setdefault(digest, set())
            if station.above is not None:
                found.setdefault(digests[station.above], set()).update(found[digest])
        starts = np.cumsum([0, *self._given.sizes.values()])
        return {
            digest: {
                index: neurons[(neurons >= start) & (neurons < start + size)] - start
                for start, (index, size) in zip(starts, self._given.sizes.items(), strict=False)
            }
            for digest, neurons in ((d, np.array(sorted(some), int)) for d, some in found.items())
        }

    def _in_turn(
        self, certificate: Source, base: Narrow, leaves: list[tuple[Task, int]]
    ) -> Iterator[tuple[list[Task], Any]]:
        """The same for leaves on the boxes that facts are about, some at a time."""
        numbers = sum(math.prod(node.shape) for node in base.facts.program.nodes)
        at_once = max(self._leaf_numbers // numbers, 1)
        for first in range(0, len(leaves), at_once):
            some = leaves[first : first + at_once]
            now, of = [task for task, _ in some], np.array([box for _, box in some])
            yield now, self._together(certificate, base, of, now)

    def _pattern(self, leaf: Leaf) -> bytes:
        """For which activations leaves have slopes of their own."""
        return repr([pair and [x is None for x in pair] for pair in leaf.slopes]).encode()

    def _read(self, certificate: Source, leaf: Leaf | None) -> Stacks:
        """The slopes of all leaves, as they are stored: by activation, below and above."""
        assert leaf is not None
        if self._source is not certificate:
            self._source = certificate
            self._stacks.clear()
        if leaf not in self._stacks:
            self._stacks[leaf] = self._given.stacks(certificate, leaf.slopes, leaf.count)
            while len(self._stacks) > 1 and self._stacked() > _MOST_STACKED:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(leaf)
        return self._stacks[leaf]

    def _stacked(self) -> int:
        """Bytes of all slopes that are kept."""
        pairs = [pair for known in self._stacks.values() for pair in known.values()]
        return sum(x.nbytes for pair in pairs for x in pair if x is not None)

    def _whole(
        self, certificate: Source, number: int, leaf: Leaf, digest: bytes, wanted: bool = False
    ) -> Narrow | None:
        """The facts of a case's box, if the tree says how to make them tighter, or if wanted."""
        inputs = self._wanted.cases[number].inputs
        low, high = (np.array([x], float) for x in (inputs.lower64, inputs.upper64))
        if not any(leaf.boxes) and not wanted:
            return None

        def make() -> Narrow:
            plain = self.plain(low, high)
            return self.refined(certificate, plain, leaf.boxes) if any(leaf.boxes) else plain

        return self._kept((digest, low.tobytes(), high.tobytes()), make)

    def refined(
        self,
        certificate: Source,
        narrow: Narrow,
        boxes: tuple[Rows | None, ...],
        path: Path | None = None,
        needed: Mapping[int, np.ndarray] = {},
    ) -> Narrow:
        """Facts of one box, or of its part at the end of a path, with given passes.

        Neurons that are `needed` are not left out, though they may be zero.
        """

        def tighter(known: Narrow, facts: Facts, index: int, argument: int) -> None:
            given = boxes[self._given.activations.index(index)]
            if given is not None:
                self._given.passes(certificate, given, facts, (index, argument), known, path)
                if given.cases is not None:
                    by_cases(self._given, (certificate, given.cases), facts, index, known)

        return refined(narrow, self._given.sizes, path, tighter, needed)

    def _station(
        self,
        certificate: Source,
        digests: dict[Any, bytes],
        given: tuple[Leaf, Narrow],
        station: Station,
        needed: dict[bytes, dict[int, np.ndarray]],
    ) -> Narrow:
        """The facts at a station; some are kept, for those below it."""
        leaf, whole = given
        ends = (x.tobytes() for x in whole.facts.inputs)
        key = digests[leaf], digests[station], *ends
        if key not in self._stations:
            if station.above is not None:
                if not station.above.leads_to(station.path):
                    raise Refused("a station is not below the one before")
                whole = self._station(certificate, digests, given, station.above, needed)
            below = needed[digests[station]]
            self._stations[key] = self.refined(
                certificate, whole, station.boxes, station.path, below
            )
        self._stations.move_to_end(key)
        while len(self._stations) > _MOST_STATIONS:
            self._stations.popitem(last=False)
        return self._stations[key]

    def _facts(self, batch: list[list[Task]], whole: Narrow | None, digest: bytes) -> Narrow:
        """The facts of some boxes; they are parts of the whole one."""
        low = np.stack([same[0].low for same in batch])
        high = np.stack([same[0].high for same in batch])
        if whole is None:
            return self._kept((low.tobytes(), high.tobytes()), lambda: self.plain(low, high))
        if np.array_equal((low, high), whole.facts.inputs):
            return whole
        parts = Facts(self._real, whole.facts.program, low, high)
        known = whole.facts
        parts.derive(lambda facts, _, k: facts.meet(k, known.low[k], known.high[k]))
        return Narrow(parts, whole.kept, lambda: self.plain(low, high, 1.0))

    def plain(self, low: np.ndarray, high: np.ndarray, share: float = WORTH) -> Narrow:
        """The facts of some boxes, without neurons that are zero if these are a share of all."""
        facts = self.known(low, high)
        if facts is None:
            facts = Facts(self._real, self._program, low, high).derive()
            if len(low) == 1:
                # Several cases have the same box, and who searches has asked for it before.
                self._known[low.tobytes(), high.tobytes()] = facts.sealed()
                while len(self._known) > self._most_known:
                    self._known.popitem(last=False)
        return narrowed(Narrow(facts), share)

    def known(self, low: np.ndarray, high: np.ndarray) -> Facts | None:
        """The facts of a box that were derived before, with default slopes."""
        return self._known.get((low.tobytes(), high.tobytes())) if len(low) == 1 else None

    def _kept(self, key: tuple[bytes, ...], make: Callable[[], Narrow]) -> Narrow:
        """Facts that are made once, as long as no others are wanted."""
        if self._latest[0] != key or self._latest[1] is None:
            self._latest = key, make()
        return self._latest[1]  # type: ignore

    def _together(
        self, certificate: Source, narrow: Narrow, of: np.ndarray, tasks: list[Task]
    ) -> np.ndarray:
        """The bounds on some leaves, which are on the boxes `of`."""
        given = splits_of([task.path for task in tasks], self._given.sizes)  # type: ignore
        narrow, splits = narrow.reaching(given)
        stacks = [self._read(certificate, task.leaf) for task in tasks]

        def own(index: int, side: int) -> np.ndarray | None:
            given = [x for known in stacks if (x := known[index][side]) is not None]
            if not given:
                return None
            if len(given[0]) == 1 and all(x is given[0] for x in given):
                return np.broadcast_to(given[0], (len(tasks), *given[0].shape[1:]))
            return np.stack([
                x[0 if len(x) == 1 else task.number]
                for x, task in zip(given, tasks, strict=True)
            ])  # fmt: skip

        slopes = {}
        for index, pair in stacks[0].items():
            every = [own(index, side) for side in range(len(pair))]
            slopes[index] = tuple(
                None if x is None else narrow.slopes(index, x).astype(np.float64) for x in every
            )
        for task in tasks:
            if task.station is not None and not task.station.leads_to(task.path):  # type: ignore
                raise Refused("a leaf is not below its station")
        clipped = Clipped(narrow.facts, of, splits, slopes)
        rows = np.arange(len(tasks))
        more = pushes(self._real, narrow.facts.program, len(tasks), splits)
        found = self._objectives.bounds(clipped, rows, tasks, {}, more)
        return np.where(clipped.empty, np.inf, found)


def path_of(path: Path) -> list[bytes]:
    """All that a path says."""
    return [x.tobytes() for x in (path.neurons, path.cuts, path.sides, path.forces)]
