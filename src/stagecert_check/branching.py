"""Trees that split neurons: leaves in batches, which share the facts of their boxes."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts
from stagecert_check.certificate import SLOPES, Leaf
from stagecert_check.functions import Refused
from stagecert_check.leaves import Clipped, pushes, splits_of
from stagecert_check.numbers import LARGEST
from stagecert_check.objectives import Objectives
from stagecert_check.properties import Property
from stagecert_check.slopes import Given
from stagecert_check.tree import Task, boxes_of

Stacks = dict[int, tuple[np.ndarray | None, ...]]


class Branching:
    """Bounds for the leaves of such trees."""

    def __init__(self, given: Given, wanted: Property, objectives: Objectives, *at_once: int):
        self._given, self._wanted, self._objectives = given, wanted, objectives
        self._program, self._real = objectives.program, objectives.real
        self._boxes_at_once, self._leaves_at_once = at_once
        self._stacks: tuple[Any, Leaf | None, Stacks] = None, None, {}  # those read last
        self._latest: tuple[Any, Facts | None] = None, None  # facts of boxes, and which

    def own(self, certificate, task: Task) -> tuple[bytes, ...]:
        """What the bound on a leaf depends on besides its box, its multipliers and `leaf.boxes`."""
        path, stacks = task.path, self._read(certificate, task.leaf)
        assert path is not None
        found = [x.tobytes() for x in (path.neurons, path.cuts, path.sides, path.forces)]
        for index, pair in stacks.items():
            for side, x in enumerate(pair):
                if x is not None:
                    row = x[0 if len(x) == 1 else task.number]
                    found.append(f"{index} {side} {x.dtype}".encode() + row.tobytes())
        return tuple(found)

    def bounds(self, certificate, tasks: list[Task], digests: dict[Any, bytes]) -> Iterator:
        """(some leaves, their lower bounds); infinite where there are no points at all.

        `digests` say by `leaf` what its boxes are.
        """
        kinds: dict[tuple[int, Any], list[Task]] = {}
        for task in tasks:
            kinds.setdefault((task.case, task.leaf), []).append(task)
        for (number, leaf), same in kinds.items():
            whole = self._whole(certificate, number, leaf, digests[leaf])
            boxes: dict[bytes, list[Task]] = {}
            for task, box in boxes_of(same):
                boxes.setdefault(box, []).append(task)
            every = list(boxes.values())
            for begin in range(0, len(every), self._boxes_at_once):
                batch = every[begin : begin + self._boxes_at_once]
                facts = self._facts(batch, whole, digests[leaf])
                leaves = [(task, box) for box, tasks in enumerate(batch) for task in tasks]
                for first in range(0, len(leaves), self._leaves_at_once):
                    some = leaves[first : first + self._leaves_at_once]
                    now = [task for task, _ in some]
                    yield (
                        now,
                        self._together(certificate, facts, np.array([b for _, b in some]), now),
                    )

    def _read(self, certificate, leaf: Leaf | None) -> Stacks:
        """The slopes of all leaves, as they are stored: by activation, below and above."""
        if self._stacks[0] is certificate and self._stacks[1] == leaf:
            return self._stacks[2]
        found: Stacks = {}
        assert leaf is not None
        for index, pair in zip(self._given.activations, leaf.slopes, strict=False):
            arrays = tuple(
                None if name is None
                else certificate.array(name, SLOPES, (None, *self._given.shape(index)))
                for name in pair or ()
            )  # fmt: skip
            for x in arrays:
                if x is not None and len(x) not in (1, leaf.count):
                    raise Refused(f"slopes are for {len(x)} leaves, and not for one or all")
                if x is not None and np.any(np.abs(x) > LARGEST):
                    raise Refused("slopes are too large")
            if arrays:
                found[index] = arrays
        self._stacks = certificate, leaf, found
        return found

    def _whole(self, certificate, number: int, leaf: Leaf, digest: bytes) -> Facts | None:
        """The facts of a case's box, if the tree says how to make them tighter."""
        if not any(leaf.boxes):
            return None
        inputs = self._wanted.cases[number].inputs
        low, high = (np.array([x], float) for x in (inputs.lower64, inputs.upper64))
        return self._kept(
            (digest, low.tobytes(), high.tobytes()),
            lambda: Facts(self._real, self._program, low, high).derive(
                lambda *of: self._given.tighten(certificate, leaf, *of)
            ),
        )

    def _facts(self, batch: list[list[Task]], whole: Facts | None, digest: bytes) -> Facts:
        """The facts of some boxes; they are parts of the whole one."""
        low = np.stack([same[0].low for same in batch])
        high = np.stack([same[0].high for same in batch])
        if whole is None:
            return self._kept(
                (low.tobytes(), high.tobytes()),
                lambda: Facts(self._real, self._program, low, high).derive(),
            )
        if np.array_equal((low, high), whole.inputs):
            return whole
        return Facts(self._real, self._program, low, high).derive(
            lambda facts, _, argument: facts.meet(argument, whole)
        )

    def _kept(self, key: tuple, make) -> Facts:
        """Facts that are made once, as long as no others are wanted."""
        if self._latest[0] != key or self._latest[1] is None:
            self._latest = key, make()
        return self._latest[1]  # type: ignore

    def _together(self, certificate, facts: Facts, of: np.ndarray, tasks: list[Task]) -> np.ndarray:
        """The bounds on some leaves, which are on the boxes `of`."""
        numbers = np.array([task.number for task in tasks])
        slopes = {}
        for index, pair in self._read(certificate, tasks[0].leaf).items():
            shape = self._given.shape(index, len(tasks))
            slopes[index] = tuple(
                None if x is None
                else np.broadcast_to(x if len(x) == 1 else x[numbers], shape).astype(np.float64)
                for x in pair
            )  # fmt: skip
        splits = splits_of([task.path for task in tasks], self._given.sizes)  # type: ignore
        clipped = Clipped(facts, of, splits, slopes)
        more = pushes(self._real, self._program, len(tasks), splits)
        rows = np.arange(len(tasks))
        found = self._objectives.bounds(clipped, rows, tasks, {}, more)
        return np.where(clipped.empty, np.inf, found)
