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
from stagecert.networks.bounding.stepwise import Passes, rows_at_once
from stagecert.networks.regions import regions_of
from stagecert.problem import as_arrays
from stagecert.verify.queries import for_users

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
