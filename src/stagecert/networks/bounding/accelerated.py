"""`bound` on accelerators: a few steps for all problems at once, then the search for the rest."""

import functools
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks.bounding import opening
from stagecert.networks.bounding.held import Held
from stagecert.networks.bounding.intermediate import enclose
from stagecert.networks.bounding.jobs import Job, boxes_at_once
from stagecert.networks.bounding.results import Bounds, unhidden
from stagecert.networks.bounding.search import (
    Check,
    Relaxed,
    checked_in_groups,
    join_arrays,
    numbers_of,
    relax,
    search,
)
from stagecert.networks.graph import Network
from stagecert.powers import power_above
from stagecert.solution import Status


def opened(job: Job, time_limit: float | None) -> Bounds:
    begin = time.perf_counter()

    def left() -> float | None:
        return None if time_limit is None else time_limit - (time.perf_counter() - begin)

    shape = job.rows.shape[:2]
    value, bound = np.full(shape, np.inf), np.full(shape, -np.inf)
    crossed = np.zeros(shape, bool)
    # Points and intervals stay on the device, if they take no more than a quarter of the memory.
    held = Held(job.memory * 2**28)

    def absorb(some: slice, new: int, checks: list[Check]) -> None:
        rows = slice(some.start + new, some.stop)
        found = numbers_of(checks)
        value[rows], bound[rows] = found.value[new:], found.bound[new:]
        crossed[rows] = found.crossed[new:]
        done = job.done(value[: some.stop], bound[: some.stop], slice(some.stop))
        job.show.part(some.start, shape[0])("searching", int(done.sum()), value.size)

    slices, steps = _equal_slices(shape[0], _boxes_to_open(job)), 0
    pending = None
    for some, new in slices:
        arguments, steps, checks = _first_steps(job, some)
        held.add(_kept(checks, arguments, new))
        if pending is not None:  # while the device computes these, those before are read
            absorb(*pending)
        pending = some, new, checks
    if pending is not None:
        absorb(*pending)
    passes = np.full(shape, opening.passes(steps))
    # What there is no time left for stays as it is.
    otherwise = np.full(shape, Status.TIME_LIMIT, dtype=object)
    otherwise[crossed] = Status.BOUNDS_CROSSED
    status = job.judged(value, bound, otherwise)
    late = []

    def improve(some, found: "_Searched", status_of) -> None:
        better = found.value < value[some]
        late.append((tuple(x[better] for x in some), better, found.inputs))
        value[some] = np.where(better, found.value, value[some])
        bound[some] = np.fmax(found.bound, bound[some])
        passes[some] += found.passes
        status[some] = job.judged(value[some], bound[some], status_of, some)

    if job.limits["max_iterations"] > opening.MORE:
        size = slices[0][0].stop - slices[0][0].start
        open_ones = np.nonzero(~job.done(value, bound))
        for some in _by_boxes(open_ones, size):
            if (seconds := left()) is not None and seconds <= 0:
                break
            improve(some, _more_steps(job, *some, size, held), status[some])
    boxes, targets = np.nonzero(~job.done(value, bound))
    at_once = boxes_at_once(job.parts, job.regions.shapes, 1, job.memory / 2)
    for first in range(0, len(boxes), at_once):
        some = boxes[first : first + at_once], targets[first : first + at_once]
        if (seconds := left()) is not None and seconds <= 0:
            break
        found = _searched(job, *some, at_once, held, seconds)
        improve(some, found, found.status)
    return Bounds(
        bound,
        value,
        status,
        passes,
        job.network,
        job.rows,
        functools.partial(_late_inputs, job.network, held, late),
        functools.partial(held.numpy, _arguments),
    )


class _Kept(eqx.Module):
    """What stays on the device: the points of the first steps, and the intervals."""

    inputs: Any
    arguments: Any


def _inputs(kept: _Kept):
    return kept.inputs


def _arguments(kept: _Kept):
    return kept.arguments


def _first_steps(job: Job, some: slice) -> tuple[Any, int, list[Check]]:
    """Intervals of some boxes, how many steps were taken, and what float64 says of these."""
    show = job.show.part(some.start, job.regions.count)
    part = job.regions[some]
    arguments = enclose(job.parts, part, job.how.chunk(some), job.memory, show)
    relaxed = relax(job.parts.layers, job.parts.last, part.boxes, arguments)
    steps = opening.steps_of(relaxed.wedges)
    return arguments, steps, _steps(job, relaxed, part.sets, job.rows[some], steps)


def _steps(job: Job, relaxed: Relaxed, sets, rows: np.ndarray, steps: int) -> list[Check]:
    problems = job.parts.layers, job.parts.last, relaxed, sets, jnp.asarray(rows)
    # Coarse products are as good for the first few steps: what they find is evaluated in float64,
    # and what is not good enough is searched for in the precision that was asked for.
    single = job.dtype == np.float32 and jax.default_backend() != "cpu"
    products = jax.default_matmul_precision("tensorfloat32") if single else nullcontext()
    with jax.enable_x64(job.dtype == np.float64), products:
        found = opening.opened(*problems, job.dtype, np.asarray(steps, np.int32))
    return checked_in_groups(*problems, found.point, found.proposal)


def _by_boxes(problems, size: int):
    """Problems (boxes, targets), so many boxes of them at a time."""
    boxes, targets = problems
    every = np.unique(boxes)
    for first in range(0, len(every), size):
        some = np.isin(boxes, every[first : first + size])
        yield boxes[some], targets[some]


def _more_steps(job: Job, boxes, targets, size: int, held: Held) -> "_Searched":
    """More of the first steps, for all problems of the boxes: nothing new is compiled for that."""
    every, place = np.unique(boxes, return_inverse=True)
    fill = every[np.minimum(np.arange(size), len(every) - 1)]
    part = job.regions[fill]
    relaxed = relax(job.parts.layers, job.parts.last, part.boxes, held.take(fill, _arguments))
    checks = _steps(job, relaxed, part.sets, job.rows[fill], opening.MORE)
    found = numbers_of(checks)
    inputs = jax.tree.map(lambda *xs: join_arrays(xs), *(check.inputs for check in checks))
    at = place, targets
    flat = place * job.rows.shape[1] + targets
    fill = np.minimum(np.arange(power_above(len(flat))), len(flat) - 1)
    with jax.enable_x64(True):
        inputs = _picked_points(inputs, flat[fill])
    return _Searched(
        found.value[at],
        found.bound[at],
        inputs,
        np.full(len(place), opening.passes(opening.MORE)),
        np.full(len(place), None),
    )


@dataclass(frozen=True)
class _Searched:
    """What the search found for some problems; there are more inputs, on the device."""

    value: np.ndarray
    bound: np.ndarray
    inputs: Any
    passes: np.ndarray
    status: np.ndarray


def _searched(
    job: Job, boxes, targets, most: int, held: Held, time_limit: float | None
) -> _Searched:
    """The search itself, for some problems: each is a grid of its own, of one box and one row."""
    count = len(boxes)
    size = 64
    while size < count:
        size *= 4
    # Filled up with copies of the last problem, so that few sizes are ever compiled.
    fill = np.minimum(np.arange(min(size, most)), count - 1)
    boxes, targets = boxes[fill], targets[fill]
    part = job.regions[boxes]
    arguments = held.take(boxes, _arguments)
    relaxed = relax(job.parts.layers, job.parts.last, part.boxes, arguments)
    rows = jnp.asarray(job.rows[boxes, targets][:, None])
    with jax.enable_x64(job.dtype == np.float64):
        found = search(
            job.parts.layers,
            job.parts.last,
            relaxed,
            part.sets,
            rows,
            dtype=job.dtype,
            target=None if job.goal is None else job.goal[boxes, targets],
            time_limit=time_limit,
            progress=lambda done, _: job.show("searching on", min(done, count), count),
            **job.limits,
        )
    return _Searched(
        found.value[:count],
        found.bound[:count],
        found.inputs,
        found.passes[:count] + 1,  # one more: the pass back that the search starts from
        np.array(found.status[:count], dtype=object),
    )


@jax.jit
def _picked_points(inputs, rows):
    """Some points of those of all boxes and objectives."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[rows], inputs)


def _kept(checks: list[Check], arguments, new: int) -> _Kept:
    inputs = jax.tree.map(lambda *arrays: join_arrays(arrays), *(check.inputs for check in checks))
    whole = _Kept(inputs, arguments)
    return jax.tree.map(lambda x: x[new:], whole) if new else whole


def _late_inputs(network: Network, held: Held, late: list) -> Any:
    """What the first steps found, and in its place what the search found later."""
    inputs = jax.tree.map(np.array, held.numpy(_inputs))
    for some, better, found in late:
        chosen = np.flatnonzero(better)  # of more, which only fill an array up
        jax.tree.map(
            lambda x, new, some=some, rows=chosen: x.__setitem__(some, np.asarray(new)[rows]),
            inputs,
            found,
        )
    return unhidden(network, inputs)


def _equal_slices(count: int, at_once: int) -> list[tuple[slice, int]]:
    """Slices of one size, so that one compilation serves all, and from where on each is new."""
    size = -(-count // -(-count // at_once))
    firsts = [(begin, min(begin, count - size)) for begin in range(0, count, size)]
    return [(slice(first, first + size), begin - first) for begin, first in firsts]


def _boxes_to_open(job: Job) -> int:
    """How many boxes the first steps are taken on together."""
    neurons = sum(math.prod(layer.shape) for layer in job.parts.layers)
    inputs = sum(math.prod(shape) for shape in job.regions.shapes)
    # Evaluating in float64 takes most: about 12 numbers for each neuron of a lane, 20 of a box.
    of_box = 8 * (12 * job.rows.shape[1] + 20) * (neurons + 2 * inputs)
    return max(int(job.memory * 2**30 / max(of_box, 1)), 1)
