"""A chunk of problems on a CPU: quick steps for all of them, the search for those still open."""

import math
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks.bounding import quick
from stagecert.networks.bounding.chain_checks import checked
from stagecert.networks.bounding.jobs import Job
from stagecert.networks.bounding.search import (
    AIM,
    CACHED_NUMBERS,
    Check,
    Relaxed,
    join_arrays,
    numbers_of,
    search,
)
from stagecert.powers import power_above
from stagecert.solution import Status


@dataclass
class Found:
    """Arrays with axes of boxes and rows; inputs have one axis for all problems, box by box."""

    value: np.ndarray
    bound: np.ndarray
    status: np.ndarray
    passes: np.ndarray
    inputs: Any


def found_by(job: Job, chains: quick.Chains, relaxed: Relaxed, time_limit: float | None) -> Found:
    """What quick steps find, and the search where these are not enough."""
    begin = time.perf_counter()
    chain, exact = chains.fast, chains.exact
    sets, rows = job.regions.sets, jnp.asarray(job.rows)
    tight = {name: AIM * job.limits[name] for name in ("atol", "rtol")}
    most = min(job.limits["max_iterations"], quick.STEPS)

    def left() -> float:
        return math.inf if time_limit is None else time_limit - (time.perf_counter() - begin)

    def done(value: np.ndarray, bound: np.ndarray) -> np.ndarray:
        return job.done(value, bound, limits=tight) | (left() <= 0)

    with jax.enable_x64(job.dtype == np.float64):
        steps, taken = quick.steps_for(chain, relaxed, sets, rows, job.dtype, most, done)
    checks = _checks(job, exact, (relaxed, sets, rows, steps))
    numbers = numbers_of(checks)
    value, bound = numbers.value, numbers.bound
    inputs = jax.tree.map(lambda *xs: join_arrays(xs), *(check.inputs for check in checks))
    inputs = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), inputs)
    searching = taken < job.limits["max_iterations"]
    otherwise = np.full(value.shape, Status.ITERATION_LIMIT, dtype=object)
    otherwise[searching] = Status.TIME_LIMIT
    otherwise[numbers.crossed] = Status.BOUNDS_CROSSED
    status = job.judged(value, bound, otherwise)
    found = Found(value, bound, status, 1 + 2 * taken, inputs)
    job.show("searching", int(job.done(value, bound).sum()), value.size)
    if left() > 0:
        _search_on(job, relaxed, found, searching, None if time_limit is None else left())
    return found


def _checks(job: Job, exact: quick.Chain, every: tuple) -> list[Check]:
    """What float64 says, so few boxes at a time that their arrays fit into caches.

    `every` are the other arguments of `checked`; all arrays begin with the axis of boxes.
    """
    boxes, targets = job.rows.shape[:2]
    neurons = sum(math.prod(layer.shape) for layer in job.parts.layers)
    group = min(max(CACHED_NUMBERS // (neurons * targets), 1), boxes)
    parts = []
    with jax.enable_x64(True):
        for begin in range(0, boxes, group):
            # The last group is filled up with boxes from the one before: one compilation for all.
            first = min(begin, boxes - group)
            some = slice(first, first + group)
            # By NumPy, which copies nothing.
            part = every if group == boxes else _rows(every, some)
            found = checked(job.parts, exact, *part)
            parts.append(found if begin == first else _rows(found, slice(begin - first, None)))
    return parts


def _rows(tree, some: slice):
    return jax.tree.map(lambda x: np.asarray(x)[some], tree)


def _search_on(
    job: Job, relaxed: Relaxed, found: Found, searching: np.ndarray, time_limit: float | None
) -> None:
    """The search for problems that are open: each is a grid of its own, of one box and one row."""
    boxes, targets = np.nonzero(searching & ~job.done(found.value, found.bound))
    if not len(boxes):
        return
    # Filled up with copies of the last problem, so that few sizes are ever compiled.
    count, every = len(boxes), found.value.size
    size = min(max(power_above(count), 8), max(found.value.size, count))
    fill = np.minimum(np.arange(size), count - 1)
    boxes, targets = boxes[fill], targets[fill]
    some = jax.tree.map(lambda x: np.asarray(x)[boxes], relaxed)
    rows = jnp.asarray(job.rows[boxes, targets][:, None])
    with jax.enable_x64(job.dtype == np.float64):
        more = search(
            job.parts.layers,
            job.parts.last,
            some,
            job.regions[boxes].sets,
            rows,
            dtype=job.dtype,
            target=None if job.goal is None else job.goal[boxes, targets],
            time_limit=time_limit,
            progress=lambda done, _: job.show("searching", every - count + min(done, count), every),
            **job.limits,
        )
    at = boxes[:count], targets[:count]
    better = more.value[:count] < found.value[at]
    flat = np.ravel_multi_index(at, found.value.shape)

    def replaced(x, new):
        x = np.array(x)
        x[flat[better]] = np.asarray(new)[:count][better]
        return x

    found.inputs = jax.tree.map(replaced, found.inputs, more.inputs)
    found.value[at] = np.where(better, more.value[:count], found.value[at])
    found.bound[at] = np.fmax(more.bound[:count], found.bound[at])
    found.passes[at] += more.passes[:count] + 1  # one more: the pass back that it starts from
    status = np.array(more.status[:count], dtype=object)
    found.status[at] = job.judged(found.value[at], found.bound[at], status, at)
