"""Looking for counterexamples: projected gradient descent from many points at once."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import Network
from stagecert.powers import power_below
from stagecert.problem import as_arrays
from stagecert.verify.findings import Findings
from stagecert.verify.queries import Group, shaped
from stagecert.verify.replay import Replay

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


# -- on the open cases of a property ---------------------------------------------------------------


# Points with a larger violation than this, in the attack's float32, are not worth a replay.
NEARLY = 1e-4


class Attacker:
    """Looks for counterexamples of open cases.

    Args:
        network: that of the groups.
        known: what is known of the cases; counterexamples are noted there.
        replay: confirms points.
        over: whether to stop.
        say: called with a line of text now and then.
        seed: for starting points.
        places: which entry of a point each of the model's inputs has, if a property ties some.
    """

    def __init__(
        self,
        network: Network,
        known: Findings,
        replay: Replay,
        over: Callable[[], bool],
        say: Callable[[str], None],
        seed: int,
        places: np.ndarray | None = None,
    ):
        self.places = places
        self.network, self.known, self.replay = network, known, replay
        self.over, self.say = over, say
        self.draw = np.random.default_rng(seed)
        self.draw_long = np.random.default_rng([seed, 1])
        self.draw_faces = np.random.default_rng([seed, 2])

    def try_plans(self, plans: Sequence[Plan], corners: bool = True) -> None:
        """Projected gradients on all open cases, for each plan from new points.

        The first ones are the centre, corners and random points, the others random ones; all are if
        `corners` is False.
        """
        width = lanes_at_once(self.network)
        for turn, plan in enumerate(plans):
            cases = self.known.open()
            restarts = max(width // max(len(cases), 1), 4)
            lanes = [case for case in cases for _ in range(restarts)]
            self.say(f"attacking {len(cases)} cases")
            for places, _ in in_lanes(self.network, len(lanes)):
                some = [lanes[k] for k in places]
                goal = targets(self.known.groups, some)
                # Short descents have the same starting points whether there are long ones or not.
                draw = self.draw if plan in SHORT else self.draw_long
                points = self._starts(goal, some, corners and turn == 0, draw)
                found = descend(self.network, points, goal, plan, draw)
                self._judge(found.points, found.violation, some)
                if self.over():
                    return

    def try_faces(self) -> None:
        """Looks at many points on faces of the boxes, and goes on from the best ones.

        Where points are dear, there are none.
        """
        cases, width = self.known.open(), lanes_at_once(self.network)
        each = looks(self.network) // len(cases)
        lanes = [case for case in cases for _ in range(each)]
        if not lanes:
            return
        points, violation = [], []
        for places, count in in_lanes(self.network, len(lanes)):
            goal = targets(self.known.groups, [lanes[k] for k in places])
            starts = points_on_faces(goal.lower, goal.upper, self.draw_faces)
            found = descend(self.network, starts, goal, LOOK)
            points.append(found.points[:count])
            violation.append(found.violation[:count])
            if self.over():
                return
        best = np.argsort(np.concatenate(violation))[:width]
        self.descend_from(np.concatenate(points)[best], [lanes[k] for k in best])

    def _starts(self, goal: Targets, lanes, first: bool, draw) -> np.ndarray:
        points = np.empty_like(goal.lower)
        begin = 0
        while begin < len(lanes):
            end = begin
            while end < len(lanes) and lanes[end] == lanes[begin]:
                end += 1
            points[begin:end] = start_points(
                goal.lower[begin], goal.upper[begin], end - begin, draw, first
            )
            begin = end
        return points

    def _judge(self, points, violation, lanes) -> None:
        """Notes the best violations, and replays the points that look like counterexamples."""
        order = np.argsort(np.where(np.isnan(violation), np.inf, violation))
        for k in order:
            g, c = lanes[k]
            state = self.known.states[g]
            state.nearest[c] = min(state.nearest[c], float(violation[k]))
        for k in order[:8]:
            if violation[k] <= NEARLY and self._confirmed(points[k], *lanes[k]):
                return

    def _confirmed(self, point, g: int, c: int) -> bool:
        number = self.known.groups[g].numbers[c]
        whole = point if self.places is None else point[self.places]
        self.known.found = self.replay.check(whole, number)
        return self.known.found is not None

    def try_minimisers(self, points: np.ndarray, chosen: list[int]) -> None:
        """Attacks from the points where bounds are attained: (boxes, rows, entries)."""
        every = (
            (k, g, int(c), r)
            for k, g in enumerate(chosen)
            for c in np.flatnonzero(~self.known.states[g].refuted)
            for r in range(points.shape[1])
        )
        # There are as many as cases times rows.
        some = list(itertools.islice(every, 4 * lanes_at_once(self.network)))
        self.descend_from(
            np.array([points[k, r] for k, _, _, r in some]), [(g, c) for _, g, c, _ in some]
        )

    def descend_from(self, starts: np.ndarray, lanes: list[tuple[int, int]]) -> None:
        for some, _ in in_lanes(self.network, len(lanes)):
            chosen = [lanes[k] for k in some]
            goal = targets(self.known.groups, chosen)
            found = descend(self.network, starts[some], goal, NEAR)
            self._judge(found.points, found.violation, chosen)
            if self.over():
                return

    def watch(self, step, descend: bool) -> None:
        """Looks at the points that the splitter met, and sometimes goes on from the best."""
        assert step.points is not None
        assert step.violation is not None
        assert step.group is not None
        assert step.open is not None
        worth = np.where(step.open[:, None], step.violation, np.inf)
        worth = np.where(np.isnan(worth), np.inf, worth)
        flat = worth.reshape(-1)
        some = min(lanes_at_once(self.network) if descend else 8, flat.size)
        best = np.argpartition(flat, some - 1)[:some]
        best = best[np.argsort(flat[best], kind="stable")]
        best = best[np.isfinite(flat[best])]
        if not len(best):
            return
        b, p, c = np.unravel_index(best, worth.shape)
        lanes = [(int(step.group[i]), int(k)) for i, k in zip(b, c, strict=True)]
        starts = step.points[b, p]
        self._judge(starts, worth[b, p, c], lanes)
        if descend and not self.over():
            self.descend_from(starts, lanes)
