"""Branch and bound over the inputs: boxes are halved until each is decided, many at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import Network
from stagecert.networks.backward import dual_bound
from stagecert.networks.intervals import segment_interval
from stagecert.networks.regions import regions_of
from stagecert.networks.relaxation import Layer, Split, split
from stagecert.networks.search import backward_bounds, first_lines, relax
from stagecert.problem import as_arrays
from stagecert.verify.queries import Group, for_users, shaped

# Inputs with more free entries than this are not split.
LARGEST_DIMENSION = 24
# Boxes at a time.
BATCH = 256
# Neurons times rows at a time: larger arrays fall out of the caches.
LANE_NUMBERS = 400_000


@dataclass
class Tree:
    """How the boxes were cut, and which row refutes which case on each box that was closed.

    Nodes are numbered; the first ones are the boxes of the groups. Node k has the children
    `children[k]` and `children[k] + 1` where it was cut along `axis[k]` at `cut[k]`: the first one
    below the cut, the second one above. `closed` holds (node, case, row, bound), with the case's
    and the row's places in their group. A case that is closed on a node is closed below it too.
    """

    group: list[int] = field(default_factory=list)
    children: dict[int, int] = field(default_factory=dict)
    axis: dict[int, int] = field(default_factory=dict)
    cut: dict[int, float] = field(default_factory=dict)
    closed: list[tuple[int, int, int, float]] = field(default_factory=list)

    def add(self, group: int) -> int:
        """A new node."""
        self.group.append(group)
        return len(self.group) - 1


@dataclass
class Boxes:
    """A stack of boxes. Only entries of the input that are free in some group are kept."""

    lower: np.ndarray
    upper: np.ndarray
    group: np.ndarray
    node: np.ndarray
    open: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, rows) -> "Boxes":
        return Boxes(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def joined(self, other: "Boxes") -> "Boxes":
        """These boxes and others on top of them."""
        return Boxes(
            *(
                np.concatenate([getattr(self, name), getattr(other, name)])
                for name in self.__dataclass_fields__
            )
        )


class Splitter:
    """Splits the boxes of groups until every case is refuted, or a caller has had enough.

    Attributes:
        stack: the boxes that are not decided yet.
        tree: how they came about; None unless asked for.
        finished: which share of each group's box is decided.
        seen: how many boxes were bounded.
    """

    def __init__(
        self,
        network: Network,
        groups: tuple[Group, ...],
        open_cases: list[np.ndarray],
        *,
        keep: bool = False,
        memory: float = 1.0,
    ):
        self.network, self.groups = network, groups
        lower = np.stack([group.inputs.lower64 for group in groups]).astype(float)
        upper = np.stack([group.inputs.upper64 for group in groups]).astype(float)
        self.base = lower
        self.free = np.flatnonzero(np.any(upper > lower, axis=0))
        with jax.enable_x64(True):
            self.parts = as_arrays(split(network), jnp.float64)
            self.double = as_arrays(network, jnp.float64)
        self.batch, self.lanes = _sizes(self.parts, memory)
        cases = max(len(group.numbers) for group in groups)
        rows = max(max(len(group.rows) for group in groups), 1)
        self.matrix = np.zeros((len(groups), rows, network.output_size))
        self.limits = np.full((len(groups), rows), np.inf)
        self.goals = np.full((len(groups), rows), np.inf)
        self.strict = np.zeros((len(groups), rows), bool)
        self.members = np.zeros((len(groups), cases, rows), bool)
        open_ = np.zeros((len(groups), cases), bool)
        for g, group in enumerate(groups):
            count = len(group.rows)
            self.matrix[g, :count] = group.matrix
            self.limits[g, :count], self.goals[g, :count] = group.limits, group.goals
            self.strict[g, :count] = group.strict
            self.members[g, : len(group.numbers), :count] = group.members
            open_[g, : len(group.numbers)] = open_cases[g]
        self.tree = Tree() if keep else None
        nodes = np.array([self._node(g) for g in range(len(groups))])
        stack = Boxes(
            lower[:, self.free], upper[:, self.free], np.arange(len(groups)), nodes, open_
        )
        self.stack = stack[np.flatnonzero(open_.any(axis=1))]
        self.share = np.ones(len(self.stack))
        self.finished = 0.0
        self.total = float(len(self.stack))
        self.seen = 0
        # A box takes its two ends, and a few numbers more.
        of_box = 16 * len(self.free) + cases + 64
        self.most = max(int(memory * 2**30 / of_box), 4 * self.batch)

    @staticmethod
    def worthwhile(groups: tuple[Group, ...]) -> bool:
        """Whether there are few enough free entries in the inputs."""
        free = [np.sum(group.inputs.upper64 > group.inputs.lower64) for group in groups]
        return 0 < int(max(free)) <= LARGEST_DIMENSION

    def _node(self, group: int) -> int:
        return self.tree.add(group) if self.tree is not None else -1

    def full(self, boxes: Boxes) -> tuple[np.ndarray, np.ndarray]:
        """Both ends with all entries of the inputs."""
        lower, upper = self.base[boxes.group], self.base[boxes.group].copy()
        lower[:, self.free], upper[:, self.free] = boxes.lower, boxes.upper
        return lower, upper

    def step(self, stop: Callable[[], bool] = lambda: False) -> "Step":
        """Bounds the boxes on top of the stack, closes what is decided and halves the others."""
        count = min(self.batch, len(self.stack))
        boxes, share = self.stack[-count:], self.share[-count:]
        # The batch is filled up with copies of a box, so that one compiled function serves all.
        padded = boxes[np.concatenate([np.arange(count), np.zeros(self.batch - count, int)])]
        lower, upper = self.full(padded)
        g = padded.group
        found = self._bounds(lower, upper, g, padded.open, count, stop)
        if found is None or stop():
            # The boxes stay on the stack: a step that came too late changes nothing.
            return Step(None, None, None, None, None)
        self.stack, self.share = self.stack[:-count], self.share[:-count]
        self.seen += count
        found = jax.tree.map(lambda x: np.asarray(x)[:count], found)
        g = boxes.group
        limits, strict = self.limits[g], self.strict[g]
        proven = np.isfinite(found.bound) & (
            (found.bound > limits) | (strict & (found.bound >= limits))
        )
        refutes = self.members[g] & proven[:, None, :]
        now = boxes.open & refutes.any(axis=2)
        left = boxes.open & ~now
        if self.tree is not None:
            for b, c in np.argwhere(now):
                row = int(np.argmax(np.where(refutes[b, c], found.bound[b] - limits[b], -np.inf)))
                self.tree.closed.append(
                    (int(boxes.node[b]), int(c), row, float(found.bound[b, row]))
                )
        done = ~left.any(axis=1)
        self.finished += float(share[done].sum())
        stuck = not self._halve(boxes, left, share, found.scores, np.flatnonzero(~done))
        points = np.concatenate([found.points, (0.5 * lower + 0.5 * upper)[:count, None]], axis=1)
        roots = [(int(g[k]), found.bound[k]) for k in np.flatnonzero(share == 1)]
        return Step(points, found.violation, g, boxes.open, roots, stuck)

    def _halve(self, boxes: Boxes, left, share, scores, rest) -> bool:
        """Puts the halves of boxes on the stack; False if a box cannot be halved."""
        if not len(rest):
            return True
        lower, upper = boxes.lower[rest], boxes.upper[rest]
        middle = 0.5 * lower + 0.5 * upper
        possible = (middle > lower) & (middle < upper)
        if not possible.any(axis=1).all():
            return False
        axis = np.argmax(np.where(possible, scores[rest], -np.inf), axis=1)
        at = np.arange(len(rest))
        cut = middle[at, axis]
        low_upper, high_lower = upper.copy(), lower.copy()
        low_upper[at, axis] = cut
        high_lower[at, axis] = cut
        nodes = np.full((2, len(rest)), -1)
        if self.tree is not None:
            for k, b in enumerate(rest):
                parent = int(boxes.node[b])
                group = int(boxes.group[b])
                nodes[0, k], nodes[1, k] = self.tree.add(group), self.tree.add(group)
                self.tree.children[parent] = int(nodes[0, k])
                self.tree.axis[parent] = int(self.free[axis[k]])
                self.tree.cut[parent] = float(cut[k])
        group, still = boxes.group[rest], left[rest]
        below = Boxes(lower, low_upper, group, nodes[0], still)
        above = Boxes(high_lower, upper, group, nodes[1], still)
        self.stack = self.stack.joined(below).joined(above)
        self.share = np.concatenate([self.share, 0.5 * share[rest], 0.5 * share[rest]])
        return True

    def _bounds(self, lower, upper, g, open_, count: int, stop) -> "Found | None":
        with jax.enable_x64(True):
            asked = Asked(
                self.matrix[g],
                self.limits[g],
                self.goals[g],
                self.members[g],
                open_,
                lower,
                upper,
                self.free,
            )
            regions = regions_of(
                self.network, for_users(self.network, lower), for_users(self.network, upper), None
            )
            arguments = _enclose(self.parts, regions.sets, regions.boxes, count, self.lanes, stop)
            if arguments is None:
                return None
            return _evaluate(
                self.double,
                self.parts,
                regions.sets,
                regions.boxes,
                arguments,
                asked,
            )


@dataclass
class Step:
    """What a step met.

    Attributes:
        points: (boxes, points, entries) of the inputs, or None if the step came too late.
        violation: (boxes, points, cases): the largest row minus its goal at each of them.
        group: the boxes' groups.
        open: (boxes, cases) that were open.
        roots: bounds of the rows for boxes that are whole: (group, bounds).
        stuck: whether a box is too small to halve.
    """

    points: np.ndarray | None
    violation: np.ndarray | None
    group: np.ndarray | None
    open: np.ndarray | None
    roots: list[tuple[int, np.ndarray]] | None
    stuck: bool = False


class Asked(eqx.Module):
    """What is asked for every box of a batch: its ends, rows and limits; the free entries."""

    rows: Any
    limits: Any
    goals: Any
    members: Any
    open: Any
    lower: Any
    upper: Any
    free: Any


class Found(eqx.Module):
    """Results for every box of a batch."""

    bound: Any
    points: Any
    violation: Any
    scores: Any


def _sizes(parts: Split, memory: float) -> tuple[int, int]:
    """How many boxes are handled at a time, and how many neurons of theirs; powers of two."""
    neurons = sum(math.prod(layer.shape) for layer in parts.layers) or 1
    boxes = min(int(memory * 2**30 / (8 * 64 * neurons)), BATCH)
    lanes = min(int(memory * 2**30 / (8 * 32 * neurons)), LANE_NUMBERS // neurons, 1024)
    return tuple(1 << max(n, 1).bit_length() - 1 for n in (boxes, max(lanes, 16)))  # type: ignore


def _enclose(parts: Split, sets, boxes, count: int, lanes: int, stop) -> tuple | None:
    """Intervals of all layers' arguments; one pass back for each entry that needs it.

    The entries that need one, of the first `count` boxes together, are worked off in portions of
    one size. None if `stop` said so on the way: the first time, every layer is compiled.
    """
    arguments: tuple = ()
    for index, layer in enumerate(parts.layers):
        if stop():
            return None
        before = parts.layers[:index]
        low, high, bent, relaxed = _intervals(before, layer, boxes, arguments)
        of_box, entry = np.nonzero(np.asarray(bent)[:count]) if index else ((), ())
        if len(of_box):
            new_low, new_high = np.array(low), np.array(high)
            flat_low, flat_high = (x.reshape(len(x), -1) for x in (new_low, new_high))
            for begin in range(0, len(of_box), lanes):
                b, e = of_box[begin : begin + lanes], entry[begin : begin + lanes]
                pad = lanes - len(b)
                least, most = _both_ends(
                    before, layer.segment, relaxed, sets,
                    jnp.asarray(np.pad(b, (0, pad))), jnp.asarray(np.pad(e, (0, pad))),
                )  # fmt: skip
                flat_low[b, e] = np.maximum(flat_low[b, e], np.asarray(least)[: len(b)])
                flat_high[b, e] = np.minimum(flat_high[b, e], np.asarray(most)[: len(b)])
            low, high = jnp.asarray(new_low), jnp.asarray(new_high)
        arguments = (*arguments, (low, high))
    return arguments


@eqx.filter_jit
def _intervals(before, layer: Layer, boxes, arguments):
    """The interval of one layer's argument, where it matters, and the relaxation before it."""

    def one(boxes, arguments):
        blocks = tuple(one.image(*pair) for one, pair in zip(before, arguments, strict=True))
        low, high = segment_interval(layer.segment, boxes, blocks)
        wedge = layer.wedge(low, high)
        middle = 0.5 * low + 0.5 * high
        wide = wedge.upper(middle) > wedge.lower(middle)
        # A maximum has one block entry for several arguments.
        wide = wide if wide.ndim == low.ndim else wide[..., None]
        bent = jnp.broadcast_to(wide, low.shape) & (high > low)
        return low, high, bent.reshape(-1)

    relaxed = relax(before, layer.segment, boxes, arguments)
    return *jax.vmap(one)(boxes, arguments), relaxed


@eqx.filter_jit
def _both_ends(before, segment, relaxed, sets, of_box, entry):
    """Bounds of entries of a layer's argument, each on the box given with it."""
    lines = jax.vmap(first_lines)(relaxed)
    pick = lambda tree: jax.tree.map(lambda x: x[of_box], tree)  # noqa: E731
    shape = relaxed.last_span.magnitude.shape[1:]
    unit = jax.nn.one_hot(entry, math.prod(shape), dtype=jnp.float64).reshape(-1, *shape)

    def one(lines, spans, last_span, inputs, unit):
        def least(row):
            return dual_bound(before, segment, lines, spans, last_span, inputs, row).bound

        return least(unit), -least(-unit)

    return jax.vmap(one)(
        pick(lines), pick(relaxed.spans), pick(relaxed.last_span), pick(sets), unit
    )


@eqx.filter_jit
def _evaluate(network: Network, parts: Split, sets, boxes, arguments, asked: Asked) -> Found:
    rows, members, lower, upper = asked.rows, asked.members, asked.lower, asked.upper
    relaxed = relax(parts.layers, parts.last, boxes, arguments)

    def bounds(sets):
        found = backward_bounds(parts.layers, parts.last, relaxed, sets, rows)
        return found.bound, found.minimiser

    bound, pull, minimiser = jax.vjp(bounds, sets, has_aux=True)
    over = jnp.where(members, (bound - asked.limits)[:, None, :], -jnp.inf)
    best = jnp.argmax(over, axis=2)
    undecided = asked.open & ~(jnp.max(over, axis=2) > 0)
    # What the ends of the box contribute to the bounds that are nearest to deciding: the
    # derivative in an end is the linear bound's coefficient there.
    weight = jnp.sum(jax.nn.one_hot(best, rows.shape[1]) * undecided[..., None], axis=1)
    (slopes,) = pull(weight)
    flat = [jnp.abs(x).reshape(len(rows), -1) for x in jax.tree.leaves(slopes)]
    # Leaves alternate between lower and upper ends, one pair for each input.
    coefficients = jnp.concatenate(
        [a + b for a, b in zip(flat[::2], flat[1::2], strict=True)], axis=1
    )[:, asked.free]
    width = (upper - lower)[:, asked.free]
    coefficients = jnp.where(jnp.isfinite(coefficients), coefficients, 0)
    # Entries without influence on the linear bound may still matter: they are cut in the end.
    least = 1e-3 * jnp.max(coefficients, axis=1, keepdims=True) + 1e-12
    scores = (coefficients + least) * width
    inputs = minimiser if isinstance(minimiser, tuple) else (minimiser,)
    points = jnp.concatenate([x.reshape(*rows.shape[:2], -1) for x in inputs], axis=2)
    centre = (0.5 * lower + 0.5 * upper)[:, None]
    values = jax.vmap(jax.vmap(lambda x: network.flat_outputs(*shaped(network, x))))(
        jnp.concatenate([points, centre], axis=1)
    )
    excess = jnp.einsum("bro,bpo->bpr", rows, values) - asked.goals[:, None]
    violation = jnp.max(jnp.where(members[:, None], excess[:, :, None], -jnp.inf), axis=3)
    return Found(bound, points, violation, scores)
