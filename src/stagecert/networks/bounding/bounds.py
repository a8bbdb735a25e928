"""`bound`: certified bounds on linear functions of a network's outputs, for many boxes at once."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.codes import contradicts
from stagecert.compiling import announced
from stagecert.errors import ProblemError
from stagecert.html import table
from stagecert.networks.bounding import opening
from stagecert.networks.bounding.branching import Branching
from stagecert.networks.bounding.held import Held
from stagecert.networks.bounding.intermediate import Intermediate, enclose
from stagecert.networks.bounding.intervals import segment_interval
from stagecert.networks.bounding.relaxation import Split
from stagecert.networks.bounding.relaxation import split as cut_at_activations
from stagecert.networks.bounding.search import (
    CACHED_NUMBERS,
    Check,
    backward_bounds,
    checked_in_groups,
    join_arrays,
    relax,
    search,
)
from stagecert.networks.graph import Network
from stagecert.networks.regions import regions_of
from stagecert.powers import few_counts
from stagecert.problem import as_arrays
from stagecert.solution import Status
from stagecert.validate import validate_options

Method = Literal["ibp", "backward", "nonconvex"]
METHODS = ("ibp", "backward", "nonconvex")
Relaxation = Literal["triangle", "envelope"]
RELAXATIONS = ("triangle", "envelope")
# What the search's arrays are, and how their products are computed where there is a choice.
PRECISIONS = {
    "float32": (np.float32, "highest"),
    "float64": (np.float64, "highest"),
    "tf32": (np.float32, "tensorfloat32"),
}
_SHOWN = 10  # problems that a notebook shows


@dataclass(frozen=True)
class Bounds:
    """Bounds on the minimum of every objective over every box.

    Attributes:
        bound: certified lower bounds, (batch, targets); they hold in real arithmetic.
        value: upper bounds on what the relaxation can prove: the objective at a feasible point of
            it. No method on the same relaxation can prove more than `value`.
        gap: value - bound.
        status: why each search ended, an array of Status.
        inputs: the input that belongs to `value`, (batch, targets, *input_shape).
        passes: how many passes over the network, forwards or backwards, each problem took.
        intermediate: (low, high) of every activation's argument, each (batch, *shape).
        network, objectives: what was asked.

    On a GPU, `inputs` and `intermediate` may stay there until they are first read.
    """

    bound: np.ndarray
    value: np.ndarray
    status: np.ndarray
    passes: np.ndarray
    network: Network
    objectives: np.ndarray
    given_inputs: Any  # as below, or a function that fetches them
    given_intermediate: Any

    @property
    def inputs(self) -> Any:
        """The input that belongs to each value."""
        return self._fetched("given_inputs")

    @property
    def intermediate(self) -> Any:
        """The intervals of the activations' arguments: ((low, high), ...)."""
        return self._fetched("given_intermediate")

    def _fetched(self, name: str) -> Any:
        given = getattr(self, name)
        if callable(given):
            given = given()
            object.__setattr__(self, name, given)  # the device's memory is free again
        return given

    def __getstate__(self) -> dict:
        # Arrays of JAX may be read in single precision by whoever unpickles them.
        return {**self.__dict__, "given_inputs": self.inputs,
                "given_intermediate": self.intermediate}  # fmt: skip

    @property
    def attained(self) -> np.ndarray:
        """The objectives of the network itself at `inputs`: upper bounds on the true minima."""
        return attained(self.network, self.objectives, self.inputs)

    @property
    def gap(self) -> np.ndarray:
        """value - bound."""
        return self.value - self.bound

    def __repr__(self) -> str:
        batch, targets = self.bound.shape
        return f"Bounds({batch} boxes x {targets} objectives, largest gap {self.gap.max():.3g})"

    def _repr_html_(self) -> str:
        """What notebooks show: the first few problems."""
        shown = list(np.ndindex(self.bound.shape))[:_SHOWN]
        names = {at: status.name for at, status in np.ndenumerate(self.status)}
        rows = [(*at, self.bound[at], self.value[at], self.gap[at], names[at]) for at in shown]
        more = self.bound.size - len(shown)
        title = repr(self) + (f"; the first {len(shown)} of {self.bound.size}" if more else "")
        return table(["box", "objective", "bound", "value", "gap", "status"], rows, title)


def margins(labels, classes: int) -> np.ndarray:
    """Objectives "true class minus every other class": (batch, classes - 1, classes).

    The classifier is right on all of a box if all of these are positive there.

    >>> margins([1], 3).tolist()
    [[[-1.0, 1.0, 0.0], [0.0, 1.0, -1.0]]]
    """
    labels = np.atleast_1d(np.asarray(labels))
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ProblemError("margins: labels must be whole numbers, one for each box.")
    if classes < 2 or labels.min(initial=0) < 0 or labels.max(initial=0) >= classes:
        raise ProblemError(f"margins: labels must lie in 0 .. {classes - 1}.")
    others = np.array([[k for k in range(classes) if k != label] for label in labels])
    rows = np.zeros((len(labels), classes - 1, classes))
    rows[np.arange(len(labels))[:, None], np.arange(classes - 1)[None], others] = -1
    rows[np.arange(len(labels)), :, labels] = 1
    return rows


def bound(
    network: Network,
    lower=None,
    upper=None,
    objectives=None,
    method: Method = "nonconvex",
    intermediate: str | Intermediate | tuple | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-2,
    threshold: Any = None,
    *,
    ball: tuple | None = None,
    split: int | None = None,
    max_iterations: int = 500,
    time_limit: float | None = None,
    precision: Literal["float32", "float64", "tf32"] = "float32",
    relaxation: Relaxation = "triangle",
    planes: int | None = None,
    memory: float | None = None,
    progress: bool | Callable[[str, int, int], None] = False,
) -> Bounds:
    """Bounds the minimum of each objective over each box, with a certified gap.

    Args:
        network: from `load`, `from_torch` or `from_jax`.
        lower, upper: the boxes, (batch, *input_shape); tuples of arrays for several inputs.
        objectives: (batch, targets, outputs), or (targets, outputs) for all boxes alike: each row
            is a linear function of the (flattened) outputs. None bounds every output by itself.
            An upper bound on a function is minus the lower bound on its negative.
        method: "ibp" (intervals throughout), "backward" (one pass back) or "nonconvex" (search
            until the gap is at most atol + rtol * |bound|).
        intermediate: how the arguments of activations are bounded: "ibp", "backward" (one pass back
            for each unstable neuron), "optimised" (a few search steps for each), "envelope" (a few
            with planes, for relaxation="envelope": often much narrower; see docs/envelope.md), an
            `Intermediate` with settings, or ready intervals ((low, high), ...), for example those
            of an earlier result. The bounds hold only if these do. None is "ibp" for the method
            "ibp", and "backward" for the others.
        atol, rtol: tolerances on the gap, for "nonconvex".
        threshold: stop a problem as soon as bound > threshold (proven) or value <= threshold (this
            relaxation cannot prove it); a number or (batch, targets).
        ball: (centre, radius): inputs are also within this Euclidean distance of the centre;
            `lower` and `upper` may then be None.
        split: go on with a tree of at most so many nodes for each objective of each box. The worst
            leaf is split, at an entry of the inputs or at a neuron; the bound is the least of all
            leaves, and a larger tree never has a worse one. Ends early where the bound is within
            the tolerances of what the network attains. `value` is then what the network itself
            attains at `inputs`: no method at all can prove more.
        max_iterations, time_limit: limits on the search; bounds found until then are valid. (On
            GPUs, two steps for all problems come before the search, and are not counted.)
        precision: of the search: "float32", "float64", or "tf32", which on GPUs multiplies numbers
            of 11 bits, about twice as fast; for gaps well below 1 % that is too coarse. What is
            returned is always evaluated in float64.
        relaxation: what stands for a neuron: "triangle" (the hull of its activation on the interval
            of its argument) or "envelope" (for relu and leaky relu also the smallest concave
            function above the neuron over the box of all its inputs), for "nonconvex". The second
            is never worse, and takes longer; see the table of docs/envelope.md.
        planes: of how many neurons, at most, of each activation the envelope is looked at, for
            "envelope": for every objective, those where triangles lose most. None is 32.
        memory: GiB that arrays may take; larger jobs are cut into chunks. None is 2 GiB on CPUs,
            and half of what the device lends elsewhere.
        progress: True draws progress bars; a function is called with (what, finished, all).

    Raises:
        ProblemError: bad input, before any work.

    >>> from stagecert import networks
    >>> net = networks.from_jax(lambda x: jax.nn.relu(x) - 0.5 * x + 1, np.zeros(1))
    >>> result = networks.bound(net, [[-1.0]], [[1.0]], [[1.0]], rtol=1e-7)
    >>> result.bound.round(6).tolist(), result.value.round(6).tolist()
    ([[1.0]], [[1.0]])
    """
    if not isinstance(network, Network):
        raise ProblemError(
            f"bound needs a network, not {type(network).__name__}: from networks.load (ONNX), "
            "networks.from_torch or networks.from_jax."
        )
    if memory is not None and not 0 < memory < math.inf:
        raise ProblemError(f"memory must be a positive number of GiB, not {memory!r}.")
    if method not in METHODS:
        raise ProblemError(f"Unknown method '{method}'; known are {', '.join(METHODS)}.")
    if precision not in PRECISIONS:
        known = ", ".join(map(repr, PRECISIONS))
        raise ProblemError(f"precision must be one of {known}, not {precision!r}.")
    if method == "nonconvex" or split is not None:
        validate_options(atol, rtol, max_iterations, time_limit)
    if relaxation not in RELAXATIONS:
        raise ProblemError(
            f"Unknown relaxation '{relaxation}'; known are {', '.join(RELAXATIONS)}."
        )
    if relaxation == "envelope" and (method != "nonconvex" or ball is not None):
        raise ProblemError(
            "relaxation='envelope' is searched for on boxes: it needs method='nonconvex' and no "
            "ball."
        )
    if planes is not None and (
        isinstance(planes, bool) or not isinstance(planes, int) or planes < 1
    ):
        raise ProblemError(f"planes must be a number of neurons, 1 or more, not {planes!r}.")
    if split is not None and (isinstance(split, bool) or not isinstance(split, int) or split < 1):
        raise ProblemError(f"split must be a number of nodes, 1 or more, not {split!r}.")
    end = None if time_limit is None else time.monotonic() + time_limit
    if intermediate is None:
        intermediate = "ibp" if method == "ibp" else "backward"
    how = Intermediate.named(intermediate)
    narrow = how.kind == "envelope"
    if narrow and relaxation != "envelope":
        raise ProblemError(
            "intermediate='envelope' needs relaxation='envelope': the search with triangles "
            "assumes intervals that triangles imply."
        )
    how = Intermediate("backward") if narrow else how
    memory = default_memory() if memory is None else memory
    dtype, products = PRECISIONS[precision]
    # JAX's default on GPUs is TF32; CPUs have no choice.
    products = None if jax.default_backend() == "cpu" else products
    with announced(), jax.enable_x64(True), jax.default_matmul_precision(products):
        regions = regions_of(network, lower, upper, ball)
        how.require(regions.count)
        rows = _rows(network, regions.count, objectives)
        goal = _threshold(threshold, rows.shape[:2])
        parts = as_arrays(cut_at_activations(network), jnp.float64)
        show = Progress(progress)
        limits = dict(atol=atol, rtol=rtol, max_iterations=max_iterations)
        if method == "nonconvex" and opens() and parts.layers and max_iterations > opening.STEPS:
            job = _Job(network, parts, regions, rows, goal, how, limits, dtype, memory, show)
            found = _opened(job, time_limit)
            if relaxation == "envelope":
                found = _enveloped(
                    found,
                    regions,
                    goal,
                    {**limits, "planes": planes, "narrow": narrow},
                    memory,
                    show,
                    end,
                )
            return found if split is None else _grown(job, found, split, end)
        # Intervals are those of boxes, whatever is asked of these.
        lanes = 1 if method == "ibp" and how.kind == "ibp" else rows.shape[1]
        chunk = boxes_at_once(parts, regions.shapes, lanes, memory)
        results = []
        for first in range(0, regions.count, chunk):
            # Numbers of boxes of which there are few, so that little is compiled.
            count = min(few_counts(min(chunk, regions.count - first)), chunk)
            some = np.minimum(np.arange(first, first + count), regions.count - 1)
            results.append(
                _bound_chunk(
                    network,
                    parts,
                    regions[some],
                    rows[some],
                    None if goal is None else goal[some],
                    method,
                    how.chunk(some),
                    limits,
                    time_limit,
                    dtype,
                    memory,
                    show.part(first, regions.count),
                )
            )
        found = _joined(results, regions.count)
        if relaxation == "envelope":
            found = _enveloped(
                found,
                regions,
                goal,
                {**limits, "planes": planes, "narrow": narrow},
                memory,
                show,
                end,
            )
        if split is None:
            return found
        job = _Job(network, parts, regions, rows, goal, how, limits, dtype, memory, show)
        return _grown(job, found, split, end)


def _enveloped(found: Bounds, regions, goal, limits, memory, show, end) -> Bounds:
    """A result with envelopes in the place of triangles, where there was time for them."""
    from stagecert.networks.bounding.envelope_bounds import MOST, Limits, improve, tighten

    aim = np.full(found.bound.shape, np.inf) if goal is None else goal
    done = found.bound > aim
    gap = limits["atol"], limits["rtol"]
    most = limits["max_iterations"]
    # The first kind of steps is soon as good as it gets.
    narrow, planes = limits["narrow"], limits["planes"] or MOST
    how = Limits((most // 5, most - most // 5), gap, end, memory, planes, narrow)
    arguments = found.intermediate
    if narrow:
        arguments = tighten(found.network, regions.boxes, arguments, how, show)
    more = improve(found.network, regions.boxes, arguments, found.objectives, ~done, aim, how, show)
    shapes = [shape[1:] if hidden else shape for shape, hidden in
              zip(found.network.input_shapes, found.network.hidden_axis, strict=True)]  # fmt: skip
    parts = np.split(more.inputs, np.cumsum([math.prod(shape) for shape in shapes])[:-1], axis=2)
    parts = [x.reshape(*x.shape[:2], *shape) for x, shape in zip(parts, shapes, strict=True)]
    several = isinstance(found.inputs, tuple)
    old = found.inputs if several else (found.inputs,)

    def chosen(x, y):
        return np.where(more.reached.reshape(*more.reached.shape, *(1,) * (x.ndim - 2)), y, x)

    inputs = tuple(chosen(x, y) for x, y in zip(old, parts, strict=True))
    inputs = inputs if several else inputs[0]
    # What triangles cannot prove envelopes might: where these were not reached, only the network's
    # own value says how far a bound could rise.
    own = attained(found.network, found.objectives, inputs)
    kept = done | more.same  # where no neuron can have a plane, triangles are the relaxation
    # Narrower intervals than the relaxation implies: what it can prove is not known then.
    known = more.reached & (not narrow)
    value = np.where(kept, found.value, np.fmin(own, np.where(known, more.value, np.inf)))
    value = np.where(np.isnan(value), np.inf, value)
    bound = np.fmax(found.bound, more.bound)
    status = found.status.copy()
    status[more.reached] = Status.ITERATION_LIMIT
    status[~kept & ~more.reached] = Status.TIME_LIMIT
    status = _judged(value, bound, goal, limits, status)
    return Bounds(
        bound, value, status, found.passes + more.passes, found.network, found.objectives, inputs,
        arguments,
    )  # fmt: skip


def _closed(value, bound, limits: dict) -> np.ndarray:
    """Where the gap is as small as was asked for."""
    with np.errstate(invalid="ignore"):
        small = value - bound <= limits["atol"] + limits["rtol"] * np.abs(bound)
    return np.isfinite(value) & np.isfinite(bound) & small


def _judged(value, bound, goal, limits: dict | None, otherwise, certain: bool = True) -> np.ndarray:
    """Statuses by these numbers; `otherwise` where they are not what was asked for.

    Args:
        value, bound: of every problem.
        goal: bounds above it, and values that are not, end a problem; None if there is none.
        limits: on the gap; None if none was asked for.
        otherwise: statuses.
        certain: values are as exact as bounds, so that a bound above one contradicts it. Those of a
            network are rounded by more, where it is deep.
    """
    status = otherwise.copy()
    if limits is not None:
        status[_closed(value, bound, limits)] = Status.GAP_REACHED
    if goal is not None:
        status[value <= goal] = Status.TARGET_MET
        status[bound > goal] = Status.TARGET_PROVEN
    if certain:
        status[_contradictory(value, bound)] = Status.CONTRADICTED
    return status


def _contradictory(value, bound) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        wrong = contradicts(value, bound, np.finfo(float).eps)
    return np.isfinite(value) & np.isfinite(bound) & wrong


class Progress:
    """Tells the user how far a job is; see `bound`."""

    def __init__(self, given, before: int = 0, total: int = 0):
        self.given, self.before, self.total = given, before, total

    def part(self, before: int, total: int) -> "Progress":
        """The same, for a part of the boxes."""
        return Progress(self.given, before, total)

    def __call__(self, what: str, finished: int, all_of_them: int) -> None:
        if callable(self.given):
            self.given(what, finished, all_of_them)
        elif self.given:
            from rich.console import Console

            Console(stderr=True).print(
                f"boxes from {self.before + 1} of {self.total}: {what} {finished}/{all_of_them}"
            )


def _rows(network: Network, boxes: int, objectives: Any) -> np.ndarray:
    size = network.output_size
    rows: Any = np.eye(size) if objectives is None else np.asarray(objectives, np.float64)
    if rows.ndim == 2:
        rows = np.broadcast_to(rows, (boxes, *rows.shape))
    if rows.ndim != 3 or rows.shape[0] != boxes or rows.shape[2] != size:
        raise ProblemError(
            f"objectives must have shape ({boxes}, targets, {size}) or (targets, {size}): boxes, "
            f"objectives, outputs; they have shape {rows.shape}."
        )
    if rows.shape[1] == 0:
        raise ProblemError("objectives has no rows.")
    if not np.all(np.isfinite(rows)):
        at = np.argwhere(~np.isfinite(rows))[0].tolist()
        raise ProblemError(f"objectives is not finite at {at}.")
    tiny = float(np.finfo(np.float64).tiny)
    if np.any((rows != 0) & (np.abs(rows) < tiny)):
        raise ProblemError(
            f"objectives has entries below {tiny:.3g}, which processors take for zero; scale them."
        )
    return rows


def _threshold(threshold, shape) -> np.ndarray | None:
    if threshold is None:
        return None
    goal = np.asarray(threshold, np.float64)
    try:
        goal = np.broadcast_to(goal, shape)
    except ValueError:
        raise ProblemError(
            f"threshold must be a number or have shape {shape}, not {goal.shape}."
        ) from None
    if np.any(np.isnan(goal)):
        raise ProblemError("threshold has a NaN.")
    return goal


def default_memory() -> float:
    """GiB that arrays may take if nothing else is said."""
    known = {} if jax.default_backend() == "cpu" else jax.devices()[0].memory_stats() or {}
    return known.get("bytes_limit", 2**32) / 2**31


def boxes_at_once(parts: Split, shapes, targets: int, memory: float) -> int:
    """How many boxes of inputs of these shapes are bounded together, each for some targets."""
    neurons = sum(math.prod(layer.shape) for layer in parts.layers)
    inputs = sum(math.prod(shape) for shape in shapes)
    # The search holds about 40 numbers of 4 bytes for each neuron of a lane.
    of_lane = 160 * (neurons + 2 * inputs)
    lanes = max(int(memory * 2**30 / max(of_lane, 1)), 1)
    if jax.default_backend() == "cpu":
        lanes = min(lanes, max(3 * CACHED_NUMBERS // max(neurons, 1), 1))
    return max(lanes // targets, 1)


def _bound_chunk(
    network, parts: Split, regions, rows, goal, method, how, options, time_limit, dtype,
    memory, show,
) -> Bounds:  # fmt: skip
    arguments = enclose(parts, regions, how, memory, show)
    if method == "ibp":
        return _by_intervals(network, parts, regions, rows, goal, arguments)
    relaxed = relax(parts.layers, parts.last, regions.boxes, arguments)
    jrows = jnp.asarray(rows)
    if method == "backward":
        found = backward_bounds(parts.layers, parts.last, relaxed, regions.sets, jrows)
        return _with_network_values(
            network, rows, goal, np.asarray(found.bound), found.minimiser, arguments, 1
        )
    with jax.enable_x64(dtype == np.float64):
        solution = search(
            parts.layers,
            parts.last,
            relaxed,
            regions.sets,
            jrows,
            dtype=dtype,
            target=None if goal is None else goal.reshape(-1),
            time_limit=time_limit,
            progress=lambda done, size: show("searching", done, size),
            **options,
        )
    shape = rows.shape[:2]
    inputs = jax.tree.map(lambda x: np.asarray(x).reshape(*shape, *x.shape[1:]), solution.inputs)
    status = np.array(solution.status, dtype=object).reshape(shape)
    return Bounds(
        solution.bound.reshape(shape),
        solution.value.reshape(shape),
        status,
        # One more: the pass back that the search starts from.
        solution.passes.reshape(shape) + 1,
        network,
        rows,
        _unhidden(network, inputs),
        jax.tree.map(np.asarray, arguments),
    )


# -- on accelerators: a few steps for all problems at once, then the search for what is left ------


def opens() -> bool:
    """Whether searches begin with `opening`: on CPUs that gains nothing."""
    return jax.default_backend() != "cpu"


@dataclass(frozen=True)
class _Job:
    """What `bound` was asked, read and checked."""

    network: Network
    parts: Split
    regions: Any
    rows: np.ndarray
    goal: np.ndarray | None
    how: Intermediate
    limits: dict
    dtype: Any
    memory: float
    show: "Progress"

    def done(self, value, bound, some: Any = slice(None)) -> np.ndarray:
        """Which problems are finished with these numbers."""
        done = _closed(value, bound, self.limits)
        if self.goal is not None:
            done |= (bound > self.goal[some]) | (value <= self.goal[some])
        # What contradicts itself is left to the search, which says so.
        return done & ~_contradictory(value, bound)

    def judged(self, value, bound, otherwise: np.ndarray, some: Any = slice(None)) -> np.ndarray:
        """Statuses of some problems by these numbers; see `_judged`."""
        goal = None if self.goal is None else self.goal[some]
        return _judged(value, bound, goal, self.limits, otherwise)


def _opened(job: _Job, time_limit: float | None) -> Bounds:
    begin = time.perf_counter()
    shape = job.rows.shape[:2]
    value, bound = np.full(shape, np.inf), np.full(shape, -np.inf)
    crossed = np.zeros(shape, bool)
    # Points and intervals stay on the device, if they take no more than a quarter of the memory.
    held = Held(job.memory * 2**28)

    def absorb(some: slice, new: int, checks: list[Check]) -> None:
        rows = slice(some.start + new, some.stop)
        for name, array in (("value", value), ("bound", bound)):
            array[rows] = np.concatenate([np.asarray(getattr(c, name)) for c in checks])[new:]
        crossed[rows] = np.concatenate([np.asarray(c.crossing) > 0 for c in checks])[new:]
        value[rows][crossed[rows] | ~np.isfinite(value[rows])] = np.inf
        done = job.done(value[: some.stop], bound[: some.stop], slice(some.stop))
        job.show.part(some.start, shape[0])("searching", int(done.sum()), value.size)

    pending = None
    for some, new in _equal_slices(shape[0], _boxes_to_open(job)):
        arguments, checks = _first_steps(job, some)
        held.add(_kept(checks, arguments, new))
        if pending is not None:  # while the device computes these, those before are read
            absorb(*pending)
        pending = some, new, checks
    if pending is not None:
        absorb(*pending)
    passes = np.full(shape, opening.passes(opening.STEPS))
    # What there is no time left for stays as it is.
    otherwise = np.full(shape, Status.TIME_LIMIT, dtype=object)
    otherwise[crossed] = Status.BOUNDS_CROSSED
    status = job.judged(value, bound, otherwise)
    late = []
    boxes, targets = np.nonzero(~job.done(value, bound))
    at_once = boxes_at_once(job.parts, job.regions.shapes, 1, job.memory / 2)
    for first in range(0, len(boxes), at_once):
        some = boxes[first : first + at_once], targets[first : first + at_once]
        left = None if time_limit is None else time_limit - (time.perf_counter() - begin)
        if left is not None and left <= 0:
            break
        solution = _searched(job, *some, at_once, held, left)
        better = solution.value < value[some]
        late.append((tuple(x[better] for x in some), _rows_of(solution.inputs, better)))
        value[some] = np.where(better, solution.value, value[some])
        bound[some] = np.fmax(solution.bound, bound[some])
        passes[some] += solution.passes + 1
        status[some] = job.judged(value[some], bound[some], solution.status, some)
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


def _first_steps(job: _Job, some: slice) -> tuple[Any, list[Check]]:
    """Intervals of some boxes, and what float64 says of the first steps."""
    parts, part = job.parts, job.regions[some]
    show = job.show.part(some.start, job.regions.count)
    arguments = enclose(parts, part, job.how.chunk(some), job.memory, show)
    relaxed = relax(parts.layers, parts.last, part.boxes, arguments)
    problems = parts.layers, parts.last, relaxed, part.sets, jnp.asarray(job.rows[some])
    with jax.enable_x64(job.dtype == np.float64):
        found = opening.opened(*problems, job.dtype)
    return arguments, checked_in_groups(*problems, found.point, found.proposal)


@dataclass(frozen=True)
class _Searched:
    """What the search found for some problems."""

    value: np.ndarray
    bound: np.ndarray
    inputs: Any
    passes: np.ndarray
    status: np.ndarray


def _searched(
    job: _Job, boxes, targets, most: int, held: Held, time_limit: float | None
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
        _rows_of(found.inputs, slice(count)),
        found.passes[:count],
        np.array(found.status[:count], dtype=object),
    )


def _grown(job: _Job, found: Bounds, nodes: int, end: float | None) -> Bounds:
    """Bounds that are tightened by trees, which start from what was found."""

    def enough(b: int, t: int, bound: float, value: float) -> bool:
        if job.goal is not None and (bound > job.goal[b, t] or value <= job.goal[b, t]):
            return True
        return value - bound <= job.limits["atol"] + job.limits["rtol"] * abs(bound)

    given = found.inputs if isinstance(found.inputs, tuple) else (found.inputs,)
    before = attained(job.network, job.rows, found.inputs)
    before = np.where(np.isnan(before), np.inf, before)
    trees = Branching(job.parts, job.regions, found.intermediate, job.memory)
    tight = trees.run(job.rows, found.bound, nodes, enough, end)
    new = _unhidden(job.network, tight.points)
    lower = tight.value < before
    inputs = tuple(
        np.where(lower.reshape(*lower.shape, *(1,) * (x.ndim - 2)), x, old)
        for x, old in zip(new if isinstance(new, tuple) else (new,), given, strict=True)
    )
    inputs = inputs if isinstance(found.inputs, tuple) else inputs[0]
    # Evaluated as users would.
    value = attained(job.network, job.rows, inputs)
    value = np.where(np.isnan(value), np.inf, value)
    bound = np.fmax(found.bound, tight.bound)
    status = np.full(bound.shape, Status.ITERATION_LIMIT, dtype=object)
    if tight.late:
        status[:] = Status.TIME_LIMIT
    status = _judged(value, bound, job.goal, job.limits, status, certain=False)
    return Bounds(bound, value, status, found.passes + tight.passes, job.network, job.rows, inputs,
                  found.intermediate)  # fmt: skip


def _rows_of(tree, rows):
    return jax.tree.map(lambda x: np.asarray(x)[rows], tree)


def _kept(checks: list[Check], arguments, new: int) -> _Kept:
    inputs = jax.tree.map(lambda *arrays: join_arrays(arrays), *(check.inputs for check in checks))
    whole = _Kept(inputs, arguments)
    return jax.tree.map(lambda x: x[new:], whole) if new else whole


def _late_inputs(network: Network, held: Held, late: list) -> Any:
    """What the first steps found, and in its place what the search found later."""
    inputs = jax.tree.map(np.array, held.numpy(_inputs))
    for some, found in late:
        jax.tree.map(lambda x, new, some=some: x.__setitem__(some, new), inputs, found)
    return _unhidden(network, inputs)


def _equal_slices(count: int, at_once: int) -> list[tuple[slice, int]]:
    """Slices of one size, so that one compilation serves all, and from where on each is new."""
    size = -(-count // -(-count // at_once))
    firsts = [(begin, min(begin, count - size)) for begin in range(0, count, size)]
    return [(slice(first, first + size), begin - first) for begin, first in firsts]


def _boxes_to_open(job: _Job) -> int:
    """How many boxes the first steps are taken on together."""
    neurons = sum(math.prod(layer.shape) for layer in job.parts.layers)
    inputs = sum(math.prod(shape) for shape in job.regions.shapes)
    # Evaluating in float64 takes most: about 12 numbers for each neuron of a lane, 20 of a box.
    of_box = 8 * (12 * job.rows.shape[1] + 20) * (neurons + 2 * inputs)
    return max(int(job.memory * 2**30 / max(of_box, 1)), 1)


@eqx.filter_jit
def _interval_outputs(parts: Split, boxes, arguments):
    def one(boxes, arguments):
        blocks = tuple(
            layer.image(*pair) for layer, pair in zip(parts.layers, arguments, strict=True)
        )
        return segment_interval(parts.last, boxes, blocks)

    return jax.vmap(one)(boxes, arguments)


def _by_intervals(network, parts, regions, rows, goal, arguments) -> Bounds:
    low, high = (np.asarray(x) for x in _interval_outputs(parts, regions.boxes, arguments))
    ends = np.where(rows > 0, low[:, None], high[:, None])
    info = np.finfo(float)
    with np.errstate(invalid="ignore"):  # an end may be infinite
        products = np.where(rows == 0, 0, rows * ends)
        size = np.sum(np.abs(products), axis=-1)
        slip = (rows.shape[-1] + 4) * (info.eps * size + 4 * info.tiny)
        found = np.sum(products, axis=-1) - slip
    found = np.where(np.isnan(found), -np.inf, found)
    # One point for all objectives of a box: the network is evaluated there once.
    centre = jax.tree.map(lambda x: x[:, None], _centres(regions.sets))
    return _with_network_values(network, rows, goal, found, centre, arguments, 1)


@jax.jit
def _centres(sets):
    return jax.vmap(lambda s: s.centre())(sets)


def _with_network_values(network, rows, goal, found, inputs, arguments, passes) -> Bounds:
    """Bounds of methods that know no point of the relaxation: the network's own values serve.

    `inputs` are points for every objective, or one point for all of a box.
    """
    inputs = _unhidden(network, jax.tree.map(np.asarray, inputs))
    value = attained(network, rows, inputs)
    inputs = jax.tree.map(lambda x: np.broadcast_to(x, (*found.shape, *x.shape[2:])), inputs)
    value = np.where(np.isnan(value), np.inf, value)  # the network itself overflows
    stalled = np.full(found.shape, Status.STALLED, dtype=object)
    status = _judged(value, found, goal, None, stalled, certain=False)
    return Bounds(
        found,
        value,
        status,
        np.full(found.shape, passes),
        network,
        rows,
        inputs,
        jax.tree.map(np.asarray, arguments),
    )


@eqx.filter_jit
def _outputs(network: Network, inputs: tuple):
    network = as_arrays(network, jnp.float64)

    def one(*point):
        shaped = (x.reshape(s) for x, s in zip(point, network.input_shapes, strict=True))
        return network.flat_outputs(*shaped)

    return jax.vmap(jax.vmap(one))(*inputs)


def attained(network: Network, objectives, inputs) -> np.ndarray:
    """Objectives (batch, targets, outputs) at inputs (batch, targets, *shape), in float64."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with jax.enable_x64(True):
        outputs = _outputs(network, tuple(jnp.asarray(x, jnp.float64) for x in inputs))
    with np.errstate(invalid="ignore"):  # where the network itself overflows
        return np.sum(objectives * np.asarray(outputs), axis=-1)


def _unhidden(network: Network, inputs):
    """Arrays in the users' shapes: a hidden batch axis is taken out."""
    several = isinstance(inputs, tuple)
    arrays = inputs if several else (inputs,)
    shown = tuple(
        x[:, :, 0] if hidden else x for x, hidden in zip(arrays, network.hidden_axis, strict=True)
    )
    return shown if several else shown[0]


def _joined(results: list[Bounds], count: int) -> Bounds:
    """The results of chunks as one; of the last one, only what was asked for."""
    if len(results) == 1 and len(results[0].bound) == count:
        return results[0]

    def join(*parts):
        return np.concatenate(parts)[:count]

    first = results[0]
    names = [name for name in first.__dataclass_fields__ if name != "network"]
    joined = {name: jax.tree.map(join, *(getattr(r, name) for r in results)) for name in names}
    return Bounds(**joined, network=first.network)
