"""Looking for counterexamples: projected gradient descent from many points at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import Network
from stagecert.powers import power_below
from stagecert.problem import as_arrays
from stagecert.verify.queries import Group, shaped

# Numbers that the activations of all lanes may take together, and the most lanes. Accelerators
# take a step of thousands of lanes in the time of a few.
NUMBERS, LANES = 2_000_000, 256
ON_ACCELERATORS = 400_000_000, 4096


@dataclass(frozen=True)
class Plan:
    """How gradients are followed.

    Attributes:
        rate: the first step's length, as a share of the box. Steps get shorter, down to nothing.
        steps: how many there are.
        momentum: how much of earlier directions is kept.
        spread: so many steps first, which do not look at the goal: each lane makes a random
            combination of the outputs large. Starting points that lead to the same place by
            themselves then lead to different ones.
    """

    rate: float
    steps: int = 20
    momentum: float = 0.0
    spread: int = 0


# Long steps find far points, short ones narrow regions.
SHORT = (Plan(0.25), Plan(0.08), Plan(0.025))
# What these miss is left to more steps. Points that are spread out first help where the inputs have
# many entries, and do harm where they have few.
LONG = (Plan(0.25, steps=100, momentum=0.75), Plan(0.25, steps=100, momentum=0.75, spread=10))
# What is tried after a first round, and at last.
SECOND = (*SHORT, SHORT[0], *LONG)
LAST = (*SHORT, LONG[0], *SHORT, LONG[1]) * 5
# From points that are good already.
NEAR = Plan(0.05)
# No descent: how good points are.
LOOK = Plan(0.0, steps=0)
# The share of entries that are at an end, in points on faces; and the numbers that the activations
# at all such points take.
AT_END, LOOK_NUMBERS = 2 / 3, 4_000_000


@dataclass(frozen=True)
class Points:
    """What a descent found: one point for each lane, and its violation in float32.

    `violation` is the largest of the case's scaled rows minus their goals: at most zero at a
    counterexample.
    """

    points: np.ndarray
    violation: np.ndarray


class Targets(eqx.Module):
    """For each lane the box to stay in and the rows to satisfy."""

    lower: Any
    upper: Any
    rows: Any
    goals: Any
    used: Any


def targets(groups: tuple[Group, ...], lanes: list[tuple[int, int]]) -> Targets:
    """The targets of lanes (group, case of the group)."""
    widest = max(1, *(len(rows) for group in groups for rows in group.places))
    size = groups[0].matrix.shape[1]
    entries = len(groups[0].inputs.lower64)
    made = Targets(
        np.zeros((len(lanes), entries), np.float32),
        np.zeros((len(lanes), entries), np.float32),
        np.zeros((len(lanes), widest, size), np.float32),
        np.zeros((len(lanes), widest), np.float32),
        np.zeros((len(lanes), widest), bool),
    )
    for lane, (g, c) in enumerate(lanes):
        group = groups[g]
        chosen = group.places[c]
        made.lower[lane], made.upper[lane] = group.inputs.lower64, group.inputs.upper64
        made.rows[lane, : len(chosen)] = group.matrix[chosen]
        with np.errstate(over="ignore"):
            made.goals[lane, : len(chosen)] = group.goals[chosen]
        made.used[lane, : len(chosen)] = True
    return made


def _size(network: Network) -> int:
    return sum(int(np.prod(node.shape)) for node in network.nodes) or 1


def lanes_at_once(network: Network) -> int:
    """How many points are followed at once: a power of two."""
    numbers, most = (NUMBERS, LANES) if jax.default_backend() == "cpu" else ON_ACCELERATORS
    return min(power_below(numbers // _size(network)), most)


def looks(network: Network) -> int:
    """How many points on faces are worth a look."""
    return LOOK_NUMBERS // _size(network)


def in_lanes(network: Network, count: int) -> Iterator[tuple[np.ndarray, int]]:
    """Places 0 to count, as many at a time as are followed at once; and how many of them count.

    The first of them fills up the last ones, so that one compilation serves all.
    """
    width = lanes_at_once(network)
    for begin in range(0, count, width):
        some = np.arange(begin, begin + width)
        yield np.where(some < count, some, begin), min(width, count - begin)


def start_points(lower, upper, restarts: int, draw: np.random.Generator, first: bool = True):
    """(restarts, entries): the centre and random corners if `first`, and random points."""
    lower, upper = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
    points = lower + draw.random((restarts, len(lower))) * (upper - lower)
    if first:
        corners = restarts // 4
        points[0] = 0.5 * lower + 0.5 * upper
        pick = draw.integers(0, 2, (corners, len(lower))).astype(bool)
        points[1 : 1 + corners] = np.where(pick, upper, lower)[: restarts - 1]
    return points


def points_on_faces(lower, upper, draw: np.random.Generator) -> np.ndarray:
    """A random point on a face of each box (boxes, entries): edges, planes, now and then a corner.

    Narrow regions often lie along one. Descents that start inside a box do not end there: as soon
    as a free entry has moved far enough, the others have moved too.
    """
    points = lower + draw.random(lower.shape) * (upper - lower)
    ends = np.where(draw.random(lower.shape) < 0.5, lower, upper)
    return np.where(draw.random(lower.shape) < AT_END, ends, points)


class Pace(eqx.Module):
    """A plan's numbers: arrays, so that all plans share one compiled program."""

    rate: Any
    steps: Any
    momentum: Any
    spread: Any


@eqx.filter_jit
def _descend(network: Network, points, goal: Targets, directions, pace: Pace):
    width = goal.upper - goal.lower

    def outputs(point):
        return network.flat_outputs(*shaped(network, point))

    def slope(point, rows, goals, used, direction, early):
        values, pull = jax.vjp(outputs, point)

        def loss(values):
            over = jnp.where(used, rows @ values - goals, -jnp.inf)
            worst = jnp.max(over)
            # The sum makes progress on all violated rows at a time, the maximum goes on past zero.
            return worst + jnp.sum(jnp.maximum(over, 0)), worst

        towards, worst = jax.grad(loss, has_aux=True)(values)
        (g,) = pull(jnp.where(early, -direction, towards))
        return g, worst

    def step(k, carry):
        x, along, best, least = carry
        early = k < pace.spread
        g, worst = jax.vmap(slope, in_axes=(0, 0, 0, 0, 0, None))(
            x, goal.rows, goal.goals, goal.used, directions, early
        )
        better = (worst < least) & ~early
        best = jnp.where(better[:, None], x, best)
        least = jnp.where(better, worst, least)
        # Gradients of one size, so that none is forgotten because a later one is larger.
        size = jnp.sum(jnp.abs(g), axis=1, keepdims=True)
        kept = pace.momentum * along + g / jnp.where(size > 0, size, 1)
        new = jnp.where((pace.momentum > 0) & ~early, kept, g)
        share = jnp.where(early, 1, 1 - (k - pace.spread) / jnp.maximum(pace.steps, 1))
        moved = jnp.clip(x - pace.rate * share * width * jnp.sign(new), goal.lower, goal.upper)
        return moved, jnp.where(early, along, new), best, least

    least = jnp.full(len(points), jnp.inf, points.dtype)
    start = (points, jnp.zeros_like(points), points, least)
    count = pace.spread + pace.steps + 1
    _, _, best, least = jax.lax.fori_loop(jnp.zeros_like(count), count, step, start)
    return best, least


def descend(
    network: Network, points, goal: Targets, plan: Plan, draw: np.random.Generator | None = None
) -> Points:
    """Follows gradients from each point; always in float32.

    `draw` makes the directions of a plan that spreads points out.
    """
    directions = np.zeros((len(points), network.output_size))
    if plan.spread:
        assert draw is not None
        directions = draw.uniform(-1, 1, directions.shape)
    with jax.enable_x64(False):
        best, least = followed(
            as_arrays(network, jnp.float32),
            jnp.asarray(np.asarray(points, np.float32)),
            jax.tree.map(jnp.asarray, goal),
            plan,
            jnp.asarray(directions, jnp.float32),
        )
        return Points(np.asarray(best), np.asarray(least))


def followed(network: Network, points, goal: Targets, plan: Plan, directions=None):
    """(points, violations) where gradients lead to, on the device; all in float32."""
    if directions is None:
        assert not plan.spread
        directions = np.zeros((len(points), network.output_size), np.float32)
    pace = Pace(
        np.float32(plan.rate),
        np.int32(plan.steps),
        np.float32(plan.momentum),
        np.int32(plan.spread),
    )
    return _descend(network, points, goal, directions, pace)
