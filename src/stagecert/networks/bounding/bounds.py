"""`bound`: certified bounds on linear functions of a network's outputs, for many boxes at once."""

import math
import time
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.compiling import announced
from stagecert.errors import ProblemError
from stagecert.networks.bounding import opening
from stagecert.networks.bounding.accelerated import opened
from stagecert.networks.bounding.branching import Branching
from stagecert.networks.bounding.intermediate import Intermediate, enclose
from stagecert.networks.bounding.intervals import segment_interval
from stagecert.networks.bounding.jobs import (
    Job,
    Progress,
    boxes_at_once,
    default_memory,
    goal_of,
    objective_rows,
)
from stagecert.networks.bounding.quick import Chains, chains_of
from stagecert.networks.bounding.relaxation import Split
from stagecert.networks.bounding.relaxation import split as cut_at_activations
from stagecert.networks.bounding.results import Bounds, attained, joined, judged, unhidden
from stagecert.networks.bounding.search import backward_bounds, relax, search
from stagecert.networks.bounding.starting import found_by
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
            GPUs, two to four steps for all problems come before the search, and are not counted.)
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
        rows = objective_rows(network, regions.count, objectives)
        goal = goal_of(threshold, rows.shape[:2])
        parts = as_arrays(cut_at_activations(network), jnp.float64)
        limits = dict(atol=atol, rtol=rtol, max_iterations=max_iterations)
        job = Job(
            network, parts, regions, rows, goal, how, limits, dtype, memory, Progress(progress)
        )
        if method == "nonconvex" and opens() and parts.layers and max_iterations > opening.CURVED:
            found = opened(job, time_limit)
        else:
            found = _in_chunks(job, method, time_limit)
        if relaxation == "envelope":
            wanted = {**limits, "planes": planes, "narrow": narrow}
            found = _enveloped(found, regions, goal, wanted, memory, job.show, end)
        return found if split is None else _grown(job, found, split, end)


def _in_chunks(job: Job, method: Method, time_limit: float | None) -> Bounds:
    """As many boxes at once as fit into memory."""
    # Intervals are those of boxes, whatever is asked of these.
    lanes = 1 if method == "ibp" and job.how.kind == "ibp" else job.rows.shape[1]
    boxes = job.regions.count
    shapes = job.regions.shapes
    chains = chains_of(job.parts, shapes, job.dtype) if method == "nonconvex" else None
    chunk = boxes_at_once(job.parts, shapes, lanes, job.memory, quick=chains is not None)
    results = []
    for first in range(0, boxes, chunk):
        # Numbers of boxes of which there are few, so that little is compiled.
        count = min(few_counts(min(chunk, boxes - first)), chunk)
        some = np.minimum(np.arange(first, first + count), boxes - 1)
        results.append(_bound_chunk(job.part(some), method, time_limit, chains))
    return joined(results, boxes)


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
    status = judged(value, bound, goal, limits, status)
    return Bounds(
        bound, value, status, found.passes + more.passes, found.network, found.objectives, inputs,
        arguments,
    )  # fmt: skip


def _bound_chunk(
    job: Job, method: Method, time_limit: float | None, chains: Chains | None
) -> Bounds:
    network, parts, regions, rows, goal = job.network, job.parts, job.regions, job.rows, job.goal
    arguments = enclose(parts, regions, job.how, job.memory, job.show)
    if method == "ibp":
        return _by_intervals(network, parts, regions, rows, goal, arguments)
    relaxed = relax(parts.layers, parts.last, regions.boxes, arguments)
    jrows = jnp.asarray(rows)
    if method == "backward":
        found = backward_bounds(parts.layers, parts.last, relaxed, regions.sets, jrows)
        return _with_network_values(
            network, rows, goal, np.asarray(found.bound), found.minimiser, arguments, 1
        )
    shape = rows.shape[:2]
    if chains is not None:
        found = found_by(job, chains, relaxed, time_limit)
        inputs = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found.inputs)
        return Bounds(
            found.bound, found.value, found.status, found.passes, network, rows,
            unhidden(network, inputs), jax.tree.map(np.asarray, arguments),
        )  # fmt: skip
    with jax.enable_x64(job.dtype == np.float64):
        solution = search(
            parts.layers,
            parts.last,
            relaxed,
            regions.sets,
            jrows,
            dtype=job.dtype,
            target=None if goal is None else goal.reshape(-1),
            time_limit=time_limit,
            progress=lambda done, size: job.show("searching", done, size),
            **job.limits,
        )
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
        unhidden(network, inputs),
        jax.tree.map(np.asarray, arguments),
    )


def opens() -> bool:
    """Whether searches begin with `opening`: on CPUs that gains nothing."""
    return jax.default_backend() != "cpu"


def _grown(job: Job, found: Bounds, nodes: int, end: float | None) -> Bounds:
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
    new = unhidden(job.network, tight.points)
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
    status = judged(value, bound, job.goal, job.limits, status, certain=False)
    return Bounds(bound, value, status, found.passes + tight.passes, job.network, job.rows, inputs,
                  found.intermediate)  # fmt: skip


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
    inputs = unhidden(network, jax.tree.map(np.asarray, inputs))
    value = attained(network, rows, inputs)
    inputs = jax.tree.map(lambda x: np.broadcast_to(x, (*found.shape, *x.shape[2:])), inputs)
    value = np.where(np.isnan(value), np.inf, value)  # the network itself overflows
    stalled = np.full(found.shape, Status.STALLED, dtype=object)
    status = judged(value, found, goal, None, stalled, certain=False)
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
