"""Any convex loss written in JAX: the order as a stagewise problem, solved by the library's core.

Nodes that need the same number of steps from the bottom form a stage, bounded below by the largest
of the nodes directly below and above by the upper end of the range.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stagecert as sc
from stagecert.applications.isotonic.orders import Order
from stagecert.applications.isotonic.result import Search, Tolerance
from stagecert.errors import ProblemError

# Every stage is compiled on its own; beyond this, compilation takes minutes.
MOST_STAGES = 200


def solve_stagewise(
    loss: Callable,
    samples: tuple[np.ndarray, np.ndarray, np.ndarray],
    order: Order,
    limits: tuple[float, float],
    tolerance: Tolerance,
    max_iterations: int,
    time_limit: float | None,
) -> Search:
    """Fits by the core's solver; the bound is the core's, evaluated in float64.

    `samples` are targets, weights and nodes, `limits` what encloses some optimal fit.
    """
    (y, weight, node), (low, high) = samples, limits
    level = _levels(order)
    if level.max(initial=0) >= MOST_STAGES:
        raise ProblemError(
            f"The order has chains of {level.max() + 1} nodes; losses without a closed form are "
            f"solved stage by stage, for chains of at most {MOST_STAGES} nodes."
        )
    by_level = np.argsort(level, kind="stable")
    place = np.empty(order.count, np.int64)
    place[by_level] = np.arange(order.count)
    sizes = np.bincount(level)
    first = np.concatenate([[0], np.cumsum(sizes)])
    stages = tuple(
        _stage(order, by_level[first[k] : first[k + 1]], place, high, f"level {k}")
        for k in range(1, len(sizes))
    )
    target, amount, where = jnp.asarray(y), jnp.asarray(weight), place[node]

    def objective(bottom, blocks):
        fit = jnp.concatenate([bottom, *blocks])[where]
        return jnp.sum(amount * loss(fit, target))

    with jax.enable_x64(True):
        box = sc.Box(np.full(sizes[0], low), np.full(sizes[0], high))
        solution = sc.solve(
            sc.Problem(box, stages, objective),
            atol=tolerance.absolute,
            rtol=tolerance.relative,
            max_iterations=max_iterations,
            time_limit=time_limit,
        )
    fit = np.concatenate([np.asarray(solution.inputs), *map(np.asarray, solution.blocks)])[place]
    return Search(
        "stagewise", fit, np.zeros(len(order.lower)), solution.value, solution.bound,
        solution.status, solution.stats.iterations,
    )  # fmt: skip


def _levels(order: Order) -> np.ndarray:
    """The length of the longest chain below each node."""
    level = [0] * order.count
    for below, above in zip(order.lower.tolist(), order.upper.tolist(), strict=True):
        level[above] = max(level[above], level[below] + 1)
    return np.array(level)


def _stage(order: Order, nodes: np.ndarray, place: np.ndarray, high: float, name: str) -> Any:
    below = [place[order.lower[order.start[i] : order.start[i + 1]]] for i in nodes]
    width = max(len(row) for row in below)
    # Rows of equal length: a node listed twice does not change the maximum.
    index = np.stack([np.concatenate([row, np.repeat(row[:1], width - len(row))]) for row in below])

    def lower(bottom, blocks):
        return sc.max(jnp.concatenate([bottom, *blocks])[index])

    def upper(bottom, blocks):
        return jnp.full(len(nodes), high)

    return sc.Stage(lower=lower, upper=upper, name=name)
