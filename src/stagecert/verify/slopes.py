"""Searches for slopes with which the checker's passes back prove more than with its own."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import Network
from stagecert.networks.bounding.relaxation import Split, split
from stagecert.networks.bounding.search import few_sizes, proposed_lines, relax, search
from stagecert.networks.bounding.stepwise import Passes, rows_at_once
from stagecert.networks.regions import Regions, regions_of
from stagecert.problem import as_arrays
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

    def found(self, low, high, arguments, rows, goals, steps: int) -> list[Slopes]:
        """Slopes (rows, *shape) of every layer for rows on one box, with given intervals."""
        # So that fewer sizes are compiled; the first row fills up the others.
        count = few_sizes(self.parts.layers, len(rows))
        fill = np.concatenate([np.arange(len(rows)), np.zeros(count - len(rows), int)])
        layers, last = self.parts.layers, self.parts.last
        with jax.enable_x64(True):
            regions = self.regions(low, high)[slice(None)]  # on the device, in float64
            given = tuple((jnp.asarray(a), jnp.asarray(b)) for a, b in arguments)
            relaxed = relax(layers, last, regions.boxes, given)
            objectives = jnp.asarray(rows[fill][None])
            kept: list = []
            with jax.enable_x64(False):
                search(
                    layers, last, relaxed, regions.sets, objectives, target=goals[fill],
                    atol=1e-9, rtol=1e-4, keep=kept.append, max_iterations=steps,
                )  # fmt: skip
            lines = _proposed(layers, relaxed, kept[-1])
        return self.held([(line.low_slope[: len(rows)], line.high_slope[: len(rows)])
                          for line in lines], arguments)  # fmt: skip

    def regions(self, low, high) -> Regions:
        """One box, as the network's inputs."""
        return regions_of(
            self.network, for_users(self.network, low), for_users(self.network, high), None
        )

    def held(self, slopes, arguments) -> list[Slopes]:
        """Slopes of the first layers as a certificate holds them, for arguments in given boxes."""
        operations = [self.checker.program.nodes[k].operation for k in self.checker.activations]
        return [
            _slopes(operation, low, high, box)
            for (low, high), operation, box in zip(slopes, operations, arguments, strict=False)
        ]


def _kind(node: Any) -> str:
    """What a nonlinear operation is called, in the search and in the checker."""
    return getattr(node.operation, "kind", "") or node.operation.label


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
        arguments = [facts.boxes[k] for k in checker.activations[:place]]
        search = self.search
        with jax.enable_x64(True):
            passes = Passes.on(
                search.parts, search.regions(self.low, self.high),
                rows_at_once(search.parts, search.memory), arguments,
            )  # fmt: skip
            # Layer by layer, both ends of each entry; the certificate has all lower ends first.
            found = passes.slopes(place, entries, 3, search.look_at_the_clock)
        found = [tuple(np.concatenate([x[:, 0], x[:, 1]]) for x in pair) for pair in found]
        slopes = tuple(
            tuple(None if x is None else x.astype("<f2") for x in pair)
            for pair in search.held(found, arguments)
        )
        both = np.concatenate([entries, entries])
        sides = np.repeat([1, -1], len(entries))
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


def _slopes(operation, low, high, box) -> Slopes:
    """Slopes as a certificate holds them."""
    low, high = np.asarray(low, float), np.asarray(high, float)
    if operation.kind == "relu":
        # Single precision is precise enough, and the chord above needs no slope.
        low = np.where(operation.bent(*box), low, box[0] >= 0)
        return low.astype("<f4"), None
    if operation.kind == "max":
        low = np.maximum(low, 0)
    return low, high
