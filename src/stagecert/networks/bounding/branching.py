"""Tighter bounds than one relaxation gives: a tree of cuts of inputs and splits of neurons.

A node is a set of inputs with intervals for the arguments of all activations. It is split in two:
at a number, an entry of the inputs (where they are boxes) or a neuron is at most that on one part
and at least that on the other. Every point belongs to a part, so the least bound of all leaves is
one for the whole. On a node, lines are those of its own intervals, and the ends of the intervals
are known inequalities, whose multipliers (`backward.Force`) are searched along with the slopes of
the lines. What a node counts for is evaluated by `backward.dual_bound`, which charges for rounding.
"""

import heapq
import itertools
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.networks.activations.wedges import AbstractWedge
from stagecert.networks.bounding.backward import (
    Force,
    Lines,
    Span,
    dual_bound,
    lines_at,
    segment_span,
)
from stagecert.networks.bounding.intervals import segment_interval
from stagecert.networks.bounding.relaxation import Layer, Split
from stagecert.networks.bounding.search import magnitude
from stagecert.networks.operations import Joint
from stagecert.networks.regions import Regions, set_of_boxes
from stagecert.powers import power_below
from stagecert.sets import AbstractSet

# Steps of ascent on a root, on its parts, and on those of them that are only tried: without a few
# steps there are no forces yet, and splits of neurons would seem worse than they are.
ROOT_STEPS, STEPS, TRIAL_STEPS = 30, 12, 6
# The first steps of slopes (weights in [0, 1]) and of forces (in mean cotangents of their layer).
SLOPE_STEP, FORCE_STEP, DECAY = 0.25, 1.0, 0.85
# Neurons whose split is tried on every leaf, besides the cut of one input.
TRIED = 2
# Of the leaves of a problem, the worst one and at most this share of all is split at a time.
SHARE = 4
# Nodes at a time, and neurons of all of these: one number for each network, so that one program
# serves all trees.
FEW, MOST, NUMBERS = 16, 128, 20_000
# The score of neurons whose lines lose nothing where they would be split, in proportion.
LAST_RESORT = 1e-4
# Activations whose kink is at zero: they are split there, wherever that is in the interval.
KINKED = ("relu", "leaky_relu", "prelu", "abs")


class Guess(eqx.Module):
    """What a bound is made of: weights of the wedges' pieces, where they are touched, forces."""

    weights: tuple
    at: tuple
    strength: tuple


class Outcome(eqx.Module):
    """What is known of a node.

    bound: certified; infinite if the node has no points.
    value: the objective of the network itself at `minimiser`, where the bound is attained.
    arguments: the node's intervals.
    scores: of every layer: what the lines lose where a neuron would be split.
    cuts: where that is.
    coefficients: for every input: those of the linear bound.
    """

    bound: Any
    value: Any
    minimiser: Any
    guess: Guess
    arguments: tuple
    scores: tuple
    cuts: tuple
    coefficients: tuple


def _clipped(parts: Split, boxes: tuple, arguments: tuple):
    """Intervals that also hold by interval arithmetic from those before; whether one is empty."""
    blocks: tuple = ()
    found, empty = [], jnp.zeros((), bool)
    for layer, (low, high) in zip(parts.layers, arguments, strict=True):
        least, most = segment_interval(layer.segment, boxes, blocks)
        low, high = jnp.maximum(low, least), jnp.minimum(high, most)
        gone = low > high
        empty |= jnp.any(gone)
        low, high = jnp.where(gone, high, low), jnp.where(gone, low, high)
        found.append((low, high))
        blocks = (*blocks, layer.image(low, high))
    return tuple(found), empty


def _spans(parts: Split, boxes: tuple, arguments: tuple) -> tuple[tuple[Span, ...], Span]:
    sizes = tuple(magnitude(*pair) for pair in boxes)
    blocks: tuple = ()
    spans = []
    for layer, pair in zip(parts.layers, arguments, strict=True):
        spans.append(segment_span(layer.segment, sizes, blocks))
        blocks = (*blocks, magnitude(*layer.image(*pair)))
    return tuple(spans), segment_span(parts.last, sizes, blocks)


def _cuts(layer: Layer, low, high):
    """Where every argument would be split: at zero if that is a kink or leaves two fair parts."""
    middle = 0.5 * low + 0.5 * high
    kinked = getattr(layer.operation, "kind", "") in KINKED
    fair = kinked | (jnp.abs(middle) <= 0.25 * (high - low))
    return jnp.where((low < 0) & (high > 0) & fair, 0, middle)


def _scores(layer: Layer, wedge: AbstractWedge, line: Lines, slope: Lines, pair, cuts):
    """What lines lose at the cuts, times the block's cotangents: the bound's slopes in offsets."""
    low, high = pair
    up, down = jnp.maximum(slope.low_offset, 0), jnp.maximum(-slope.high_offset, 0)
    middle = 0.5 * low + 0.5 * high
    gap = (up + down) * jnp.maximum(wedge.upper(middle) - wedge.lower(middle), 0)
    if isinstance(layer.operation, Joint):
        width = high - low
        scores = gap[..., None] * width / jnp.maximum(jnp.sum(width, axis=-1, keepdims=True), 1e-30)
    else:
        value = layer.operation(layer.weights, cuts)
        under = value - line.low_slope * cuts - line.low_offset
        over = line.high_slope * cuts + line.high_offset - value
        scores = up * jnp.maximum(under, 0) + down * jnp.maximum(over, 0) + LAST_RESORT * gap
    # Where the wedge has no width, the activation is linear.
    bent = gap > 0
    bent = bent[..., None] if bent.ndim < low.ndim else bent
    inside = bent & (low < cuts) & (cuts < high)
    return jnp.where(inside & jnp.isfinite(scores), scores, 0)


def _value(parts: Split, inputs, row):
    blocks: tuple = ()
    for layer in parts.layers:
        blocks = (*blocks, layer.operation(layer.weights, layer.segment(inputs, blocks)))
    value = jnp.sum(row * parts.last(inputs, blocks))
    return jnp.where(jnp.isnan(value), jnp.inf, value)


def _first_guesses(parts: Split, arguments: tuple) -> Guess:
    """What one pass back would take, for many boxes."""
    weights = tuple(
        _first_weights(layer.local, *pair)
        for layer, pair in zip(parts.layers, arguments, strict=True)
    )
    at = tuple(0.5 * low + 0.5 * high for low, high in arguments)
    return jax.tree.map(np.asarray, Guess(weights, at, tuple(map(np.zeros_like, at))))


@eqx.filter_jit
def _first_weights(layer: Layer, low, high):
    return jax.vmap(lambda low, high: layer.wedge(low, high).slopes())(low, high)


class _Ascent(eqx.Module):
    """The loop's state: the latest guess, the best one, and what it proved."""

    guess: Guess
    best: Guess
    bound: Any
    lines: tuple
    slopes: tuple  # the bound's derivatives in the best lines
    minimiser: Any
    coefficients: tuple


def _ascended(parts: Split, boxes: tuple, arguments: tuple, row, inputs, guess: Guess, steps):
    """Improves the bound of one node, and says where to split it."""
    spans, last_span = _spans(parts, boxes, arguments)
    wedges = tuple(layer.wedge(*pair) for layer, pair in zip(parts.layers, arguments, strict=True))

    def lines_of(weights, at, strength) -> tuple:
        found = []
        for wedge, x, w, s, span, (low, high) in zip(
            wedges, at, weights, strength, spans, arguments, strict=True
        ):
            line = lines_at(wedge, jnp.clip(x, low, high), w, span)
            force = Force(s, jnp.where(s > 0, high, low), span.magnitude)
            found.append(replace(line, force=force))
        return tuple(found)

    def proved(lines: tuple, inputs: AbstractSet):
        found = dual_bound(parts.layers, parts.last, lines, spans, last_span, inputs, row)
        return found.uncharged, found

    def step(k, state: _Ascent) -> _Ascent:
        now = state.guess
        lines, pull = jax.vjp(lambda w: lines_of(w, now.at, now.strength), now.weights)
        grad = jax.grad(proved, argnums=(0, 1), has_aux=True, allow_int=True)
        (slopes, of_inputs), found = grad(lines, inputs)
        coefficients = tuple(jax.tree.leaves(of_inputs))
        better = found.bound > state.bound
        best, best_lines, best_slopes, minimiser, coefficients = jax.tree.map(
            lambda new, old: jnp.where(better, new, old),
            (now, lines, slopes, found.minimiser, coefficients),
            (state.best, state.lines, state.slopes, state.minimiser, state.coefficients),
        )
        (of_weights,) = pull(slopes)
        size = DECAY**k
        weights = jax.tree.map(
            lambda w, g: w + SLOPE_STEP * size * jnp.sign(g), now.weights, of_weights
        )
        weights = jax.tree.map(
            pieces.nearest_weights, weights, is_leaf=lambda x: isinstance(x, pieces.First)
        )
        at, strength = [], []
        for line, slope, (low, high), old in zip(lines, slopes, arguments, now.at, strict=True):
            s = line.force.strength
            # Where the bound is attained; see `_forced`.
            x = slope.force.strength + jnp.where(s == 0, 0, line.force.end)
            wide = line.low_slope.ndim > slope.low_offset.ndim
            up, down = (t[..., None] if wide else t for t in (slope.low_offset, -slope.high_offset))
            unit = jnp.mean(jnp.abs(up * line.low_slope - down * line.high_slope))
            unit = jnp.maximum(unit, jnp.mean(jnp.abs(s)))
            beyond = jnp.where(
                s > 0, x - high,
                jnp.where(s < 0, x - low, jnp.maximum(x - high, 0) + jnp.minimum(x - low, 0)),
            )  # fmt: skip
            scale = jnp.maximum(jnp.max(jnp.abs(beyond)), 1e-30)
            moved = s + FORCE_STEP * size * unit * beyond / scale
            # A force that would turn around first comes to rest.
            moved = jnp.where(s * moved < 0, 0, moved)
            moved = jnp.where((moved > 0) & jnp.isinf(high), 0, moved)
            strength.append(jnp.where((moved < 0) & jnp.isinf(low), 0, moved))
            at.append(0.5 * old + 0.5 * jnp.clip(x, low, high))
        guess = Guess(weights, tuple(at), tuple(strength))
        bound = jnp.fmax(state.bound, found.bound)
        return _Ascent(guess, best, bound, best_lines, best_slopes, minimiser, coefficients)

    def nothing(like):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    lines = jax.eval_shape(lines_of, guess.weights, guess.at, guess.strength)
    centre = inputs.centre()
    start = _Ascent(guess, guess, jnp.array(-jnp.inf, row.dtype), nothing(lines), nothing(lines),
                    centre, nothing(tuple(jax.tree.leaves(inputs))))  # fmt: skip
    return jax.lax.fori_loop(0, steps, step, start), wedges


@eqx.filter_jit
def _bounded(parts: Split, boxes: tuple, sets, arguments, rows, guess: Guess, steps):
    """What is known of many nodes; `sets` are None where the boxes are the sets of inputs."""

    def one(boxes, given, arguments, row, guess) -> Outcome:
        inputs = set_of_boxes(boxes) if given is None else given
        arguments, empty = _clipped(parts, boxes, arguments)
        end, wedges = _ascended(parts, boxes, arguments, row, inputs, guess, steps)
        bound = jnp.where(empty, jnp.inf, end.bound)
        cuts = tuple(
            _cuts(layer, *pair) for layer, pair in zip(parts.layers, arguments, strict=True)
        )
        scores = tuple(
            _scores(layer, wedge, line, slope, pair, cut)
            for layer, wedge, line, slope, pair, cut in zip(
                parts.layers, wedges, end.lines, end.slopes, arguments, cuts, strict=True)
        )  # fmt: skip
        # Of the derivatives in the ends of a box one is the coefficient, and the other one zero.
        ends = end.coefficients if given is None else ()
        coefficients = tuple(
            jnp.abs(a) + jnp.abs(b) for a, b in zip(ends[::2], ends[1::2], strict=True)
        )
        return Outcome(bound, _value(parts, end.minimiser, row), end.minimiser, end.best,
                       arguments, scores, cuts, coefficients)  # fmt: skip

    return jax.vmap(one)(boxes, sets, arguments, rows, guess)


# -- the tree --------------------------------------------------------------------------------------


@dataclass(order=True)
class _Leaf:
    """A leaf of a problem's tree: the worst come first."""

    bound: float
    number: int
    boxes: tuple = field(compare=False)
    found: Outcome = field(compare=False)  # without the axis of nodes


@dataclass
class _Problem:
    """The tree of one (box, row)."""

    box: int
    row: np.ndarray
    leaves: list[_Leaf]
    value: float
    point: Any
    nodes: int = 1
    steps: int = ROOT_STEPS
    done: float = math.inf  # the least bound of leaves that cannot be split

    @property
    def bound(self) -> float:
        """What is proven of the whole."""
        return min(self.leaves[0].bound if self.leaves else math.inf, self.done)


@dataclass(frozen=True, eq=False)
class Tightened:
    """Results (boxes, rows): bounds, the network's values at `points`, and passes taken.

    `late` says whether time was up.
    """

    bound: np.ndarray
    value: np.ndarray
    points: Any
    passes: np.ndarray
    late: bool


class Branching:
    """Trees of at most so many nodes, one for each (box, row)."""

    def __init__(self, parts: Split, regions: Regions, arguments: tuple, memory: float):
        self.parts, self.regions, self.memory = parts, regions, memory
        self.arguments = jax.tree.map(np.asarray, arguments)
        self.boxes = jax.tree.map(np.asarray, regions.boxes)
        neurons = sum(math.prod(pair[0].shape[1:]) for pair in self.arguments)
        inputs = sum(math.prod(shape) for shape in regions.shapes)
        most = min(max(NUMBERS // max(neurons, 1), FEW), MOST)
        self.size = power_below(most)
        # A leaf keeps its intervals, what its bound is made of, and scores, in double precision.
        self.of_leaf = 8 * (10 * neurons + 4 * inputs) + 1024
        self.numbers = itertools.count()

    def run(self, rows: np.ndarray, known: np.ndarray, nodes: int, enough, end: float | None):
        """Grows all trees; `known` are bounds (boxes, rows) that hold already.

        A tree is finished if `enough(box, row, bound, value)`.
        """
        where = list(np.ndindex(*rows.shape[:2]))
        guesses = _first_guesses(self.parts, self.arguments)
        whole = [_picked((self.boxes, self.arguments, guesses), b) for b in range(len(rows))]
        roots = self._asked(
            [(boxes, b, arguments, rows[b, t], guess)
             for b, t in where for boxes, arguments, guess in (whole[b],)], ROOT_STEPS,
        )  # fmt: skip
        problems = []
        for (b, t), root in zip(where, roots, strict=True):
            bound = float(np.fmax(root.bound, known[b, t]))
            leaf = _Leaf(bound, next(self.numbers), whole[b][0], root)
            problems.append(_Problem(b, rows[b, t], [leaf], float(root.value), root.minimiser))
        late = False
        room = self.memory * 2**30 / self.of_leaf
        while not late:
            open_ = [
                problem for problem, at in zip(problems, where, strict=True)
                if problem.leaves and problem.nodes + 2 <= nodes
                and problem.leaves[0].bound <= problem.done
                and not enough(*at, problem.bound, problem.value)
            ]  # fmt: skip
            if not open_ or sum(len(problem.leaves) for problem in problems) > room:
                break
            late = end is not None and time.monotonic() > end
            if not late:
                self._split(open_, nodes)
        shape = rows.shape[:2]
        points = jax.tree.map(lambda *x: np.stack(x).reshape(*shape, *x[0].shape),
                              *(problem.point for problem in problems))  # fmt: skip
        return Tightened(
            np.array([problem.bound for problem in problems]).reshape(shape),
            np.array([problem.value for problem in problems]).reshape(shape),
            points,
            np.array([2 * problem.steps for problem in problems]).reshape(shape),
            late,
        )

    def _split(self, problems: list[_Problem], nodes: int) -> None:
        """Splits the worst leaves of problems."""
        chosen: list[tuple[_Problem, _Leaf]] = []
        for problem in problems:
            # How many depends on the tree alone: a larger limit gives the same tree, and more.
            wanted = max(len(problem.leaves) // SHARE, 1)
            for _ in range(min(wanted, (nodes - problem.nodes) // 2)):
                chosen.append((problem, heapq.heappop(problem.leaves)))
                problem.nodes += 2
        tries, of = [], []
        for k, (problem, leaf) in enumerate(chosen):
            for parts in self._candidates(problem, leaf):
                tries += parts
                of.append(k)
        found = self._asked(tries, TRIAL_STEPS)
        best: dict[int, tuple[float, int]] = {}
        for n, k in enumerate(of):
            leaf = chosen[k][1]
            pair = [max(float(found[2 * n + s].bound), leaf.bound) for s in (0, 1)]
            # What both parts gain together; one that is empty gains as much as the other.
            finite = [x for x in pair if math.isfinite(x)]
            worth = 2 * sum(finite) / len(finite) if finite else math.inf
            if k not in best or worth > best[k][0]:
                best[k] = worth, n
        for k, (problem, leaf) in enumerate(chosen):
            if k not in best:
                problem.done = min(problem.done, leaf.bound)
        picks = [(k, best[k][1]) for k in sorted(best)]
        parts = [tries[2 * n + s] for _, n in picks for s in (0, 1)]
        for place, outcome in enumerate(self._asked(parts, STEPS)):
            problem, leaf = chosen[picks[place // 2][0]]
            problem.steps += STEPS + TRIAL_STEPS
            if outcome.value < problem.value:
                problem.value, problem.point = float(outcome.value), outcome.minimiser
            bound = float(np.fmax(outcome.bound, leaf.bound))
            if bound < math.inf:
                part = _Leaf(bound, next(self.numbers), parts[place][0], outcome)
                heapq.heappush(problem.leaves, part)

    def _candidates(self, problem: _Problem, leaf: _Leaf) -> list[list[tuple]]:
        """Pairs of nodes that a leaf may be split into."""
        found, outcome = [], leaf.found

        def node(boxes, arguments):
            return boxes, problem.box, arguments, problem.row, outcome.guess

        scores = np.concatenate([x.reshape(-1) for x in outcome.scores] or [np.zeros(0)])
        order = np.argsort(-scores, kind="stable")[:TRIED]
        for place in order[scores[order] > 0]:
            layer, entry = self._neuron(outcome, int(place))
            cut = outcome.cuts[layer].reshape(-1)[entry]
            found.append([
                node(leaf.boxes, _moved(outcome.arguments, layer, entry, side, cut))
                for side in (1, 0)
            ])  # fmt: skip
        best, at = 0.0, None
        for k, c in enumerate(outcome.coefficients):
            low, high = leaf.boxes[k]
            middle = 0.5 * low + 0.5 * high
            # An entry that does not matter to the linear bound may matter to the network.
            worth = (np.abs(c) + 1e-3 * np.max(np.abs(c), initial=0) + 1e-12) * (high - low)
            worth = np.where((low < middle) & (middle < high) & np.isfinite(worth), worth, 0)
            if worth.size and worth.max() > best:
                best, at = float(worth.max()), (k, int(np.argmax(worth)), middle)
        if at is not None:
            k, entry, middle = at
            cut = middle.reshape(-1)[entry]
            found.append([
                node(_moved(leaf.boxes, k, entry, side, cut), outcome.arguments) for side in (1, 0)
            ])  # fmt: skip
        return found

    @staticmethod
    def _neuron(outcome: Outcome, place: int) -> tuple[int, int]:
        for layer, scores in enumerate(outcome.scores):
            if place < scores.size:
                return layer, place
            place -= scores.size
        raise AssertionError("there is no such neuron")

    def _asked(self, nodes: list[tuple], steps: int) -> list[Outcome]:
        """What is known of nodes: (boxes, number of the region, intervals, row, guess)."""
        found: list[Outcome] = []
        for begin in range(0, len(nodes), self.size):
            some = nodes[begin : begin + self.size]
            full = some + some[:1] * (self.size - len(some))
            boxes, of, arguments, rows, guesses = zip(*full, strict=True)
            sets = None
            if not self.regions.boxed:
                sets = jax.tree.map(lambda x, of=of: np.asarray(x)[list(of)], self.regions.sets)
            outcome = _bounded(
                self.parts, _stacked(boxes), sets, _stacked(arguments), np.stack(rows),
                _stacked(guesses), jnp.asarray(steps),
            )  # fmt: skip
            outcome = jax.tree.map(np.asarray, outcome)
            found += [_picked(outcome, k) for k in range(len(some))]
        return found


def _picked(tree, k: int) -> Any:
    return jax.tree.map(lambda x: x[k], tree)


def _stacked(trees) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def _moved(pairs: tuple, place: int, entry: int, side: int, cut) -> tuple:
    """Intervals of which one has another end: the upper one if the side is 1."""
    ends = [np.array(x) for x in pairs[place]]
    ends[side].reshape(-1)[entry] = cut
    return (*pairs[:place], tuple(ends), *pairs[place + 1 :])
