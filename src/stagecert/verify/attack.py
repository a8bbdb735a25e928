"""Looking for counterexamples: projected gradient descent from many points at once."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import Network
from stagecert.problem import as_arrays
from stagecert.verify.queries import Group, shaped

# Numbers that the activations of all lanes may take together.
NUMBERS = 2_000_000
STEPS = 20


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

    lower: np.ndarray
    upper: np.ndarray
    rows: np.ndarray
    goals: np.ndarray
    used: np.ndarray


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


def lanes_at_once(network: Network) -> int:
    """How many points are followed at once: a power of two, at most 256."""
    neurons = sum(int(np.prod(node.shape)) for node in network.nodes) or 1
    return 1 << min(max(NUMBERS // neurons, 1).bit_length() - 1, 8)


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


@eqx.filter_jit
def _descend(network: Network, points, goal: Targets, rate, steps: int = STEPS):
    width = goal.upper - goal.lower

    def violations(point, rows, goals):
        return rows @ network.flat_outputs(*shaped(network, point)) - goals

    def loss(point, rows, goals, used):
        over = jnp.where(used, violations(point, rows, goals), -jnp.inf)
        worst = jnp.max(over)
        # The sum makes progress on all violated rows at a time, the maximum goes on past zero.
        return worst + jnp.sum(jnp.maximum(over, 0)), worst

    slope = jax.vmap(jax.value_and_grad(loss, has_aux=True))

    def step(carry, k):
        x, best, least = carry
        (_, worst), g = slope(x, goal.rows, goal.goals, goal.used)
        better = worst < least
        best = jnp.where(better[:, None], x, best)
        least = jnp.where(better, worst, least)
        length = rate * (1 - k / steps)
        x = jnp.clip(x - length * width * jnp.sign(g), goal.lower, goal.upper)
        return (x, best, least), None

    start = (points, points, jnp.full(len(points), jnp.inf, points.dtype))
    (_, best, least), _ = jax.lax.scan(step, start, jnp.arange(steps + 1))
    return best, least


def descend(network: Network, points, goal: Targets, rate: float = 0.25) -> Points:
    """Follows gradients from each point, a fixed number of steps; always in float32."""
    with jax.enable_x64(False):
        single = as_arrays(network, jnp.float32)
        best, least = _descend(
            single,
            jnp.asarray(np.asarray(points, np.float32)),
            jax.tree.map(jnp.asarray, goal),
            jnp.float32(rate),
        )
        return Points(np.asarray(best), np.asarray(least))
