"""Searches for slopes with which the checker's passes back prove more than with its own."""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import Network
from stagecert.networks.regions import regions_of
from stagecert.networks.relaxation import Split, split
from stagecert.networks.search import hints, proposed_lines, relax, search
from stagecert.problem import as_arrays
from stagecert.solvers import Damped
from stagecert.verify.certificates import Arrays, Leaf, Rows, Slopes
from stagecert.verify.queries import for_users
from stagecert_check.bounds import Facts
from stagecert_check.checker import Checker


class SlopeSearch:
    """Slopes for one network.

    Attributes:
        network: the network whose outputs rows combine.
        checker: who is to follow.
        memory: GiB that arrays may take.
        look_at_the_clock: is called now and then; it raises if time is up.
    """

    def __init__(
        self,
        network: Network,
        checker: Checker,
        memory: float,
        look_at_the_clock: Callable[[], None],
    ):
        self.network, self.checker, self.memory = network, checker, memory
        self.look_at_the_clock = look_at_the_clock

    def fits(self) -> bool:
        """Whether slopes fit the checker's activations, one after the other."""
        nodes, layers = self.checker.program.nodes, self.parts.layers
        mine = [(_kind(nodes[k]), nodes[k].shape) for k in self.checker.activations]
        return mine == [(_kind(layer), layer.shape) for layer in layers]

    @functools.cached_property
    def parts(self) -> Split:
        """The network, cut at its activations, as float64 arrays."""
        with jax.enable_x64(True):
            return as_arrays(split(self.network), jnp.float64)

    def found(self, low, high, arguments, rows, goals, steps: int, of: int | None = None) -> list:
        """Slopes (rows, *shape) of every layer for rows on one box, with given intervals.

        `of` says which layer's argument the rows combine; None: they combine the outputs.
        """
        # A power of two, so that fewer sizes are compiled; the first row fills up the others.
        count = 1 << (len(rows) - 1).bit_length()
        fill = np.concatenate([np.arange(len(rows)), np.zeros(count - len(rows), int)])
        layers, last = self.parts.layers, self.parts.last
        if of is not None:
            layers, last = layers[:of], self.parts.layers[of].segment
        options: dict[str, Any] = {"max_iterations": steps}
        if of is not None:
            options["solvers"] = (Damped(hints=hints, patience=steps + 1),)
        with jax.enable_x64(True):
            regions = regions_of(
                self.network, for_users(self.network, low), for_users(self.network, high), None
            )
            given = tuple((jnp.asarray(a), jnp.asarray(b)) for a, b in arguments[: len(layers)])
            relaxed = relax(layers, last, regions.boxes, given)
            objectives = jnp.asarray(rows[fill][None])
            kept: list = []
            with jax.enable_x64(False):
                search(
                    layers, last, relaxed, regions.sets, objectives,
                    target=None if goals is None else goals[fill], atol=1e-9, rtol=1e-4,
                    keep=kept.append, **options,
                )  # fmt: skip
            lines = _proposed(layers, relaxed, kept[-1])
        return [
            _slopes(operation, line.low_slope, line.high_slope, len(rows), box)
            for line, operation, box in zip(
                lines,
                [self.checker.program.nodes[k].operation for k in self.checker.activations],
                arguments,
                strict=False,
            )
        ]


def _kind(node: Any) -> str:
    """What a nonlinear operation is called; maxima of networks have no name."""
    return getattr(node.operation, "kind", "max")


class Tightener:
    """Searches for slopes that make the intervals of activations tighter, one after the other."""

    def __init__(self, search: SlopeSearch, low, high):
        self.search, self.low, self.high = search, low, high
        self.boxes: list[Rows | None] = []

    def __call__(self, facts: Facts, index: int, argument: int) -> None:
        checker, place = self.search.checker, len(self.boxes)
        self.boxes.append(None)
        function = checker.program.nodes[index].operation
        ends = facts.low[argument], facts.high[argument]
        entries = np.flatnonzero(function.bent(*ends))  # type: ignore
        if place == 0 or not len(entries):
            return
        shape = facts.low[argument].shape[1:]
        rows = np.zeros((2 * len(entries), math.prod(shape)))
        both = np.concatenate([entries, entries])
        sides = np.repeat([1, -1], len(entries))
        rows[np.arange(len(rows)), both] = sides
        arguments = [facts.boxes[k] for k in checker.activations[:place]]
        at_once = max(int(self.search.memory * 2**24 / max(rows.shape[1], 1)) // 16, 16)
        found = []
        for begin in range(0, len(rows), at_once):
            self.search.look_at_the_clock()
            some = rows[begin : begin + at_once].reshape(-1, *shape)
            found.append(self.search.found(self.low, self.high, arguments, some, None, 3, place))
        slopes = tuple(
            tuple(None if x[0] is None else np.concatenate(x).astype("<f2")
                  for x in zip(*layer, strict=True))
            for layer in zip(*found, strict=True)
        )  # fmt: skip
        self.boxes[-1] = Rows(both.astype("<i4"), sides.astype("<i4"), slopes)  # type: ignore
        held = Arrays()
        none = (None,) * len(checker.activations)
        leaf = held.leaf(Leaf(np.ones(1), none, (*self.boxes, *none[len(self.boxes) :])))
        assert leaf is not None
        checker.given.tighten(held, leaf, facts, index, argument)


@eqx.filter_jit
def _proposed(layers, relaxed, proposals):
    one = jax.tree.map(lambda x: x[0], relaxed)
    lines = jax.vmap(lambda p: proposed_lines(layers, one, jax.tree.map(_double, p), jnp.float64))
    return lines(proposals)


def _double(x):
    return x.astype(jnp.float64)


def _slopes(operation, low, high, count: int, box) -> Slopes:
    """Slopes as a certificate holds them."""
    low, high = np.asarray(low, float)[:count], np.asarray(high, float)[:count]
    if operation.kind == "relu":
        # Single precision is precise enough, and the chord above needs no slope.
        low = np.where(operation.bent(*box), low, box[0] >= 0)
        return low.astype("<f4"), None
    if operation.kind == "max":
        low = np.maximum(low, 0)
    return low, high
