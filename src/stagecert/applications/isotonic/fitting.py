"""fit(): checks the data, picks the engine by structure, returns the fit with its certificate."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagecert.applications.answer import Answer
from stagecert.applications.isotonic.certificate import Samples, lower_bound
from stagecert.applications.isotonic.chains import solve_chain
from stagecert.applications.isotonic.dual import solve_dual
from stagecert.applications.isotonic.flows import has_pymaxflow, multipliers_by_flow
from stagecert.applications.isotonic.losses import Loss, named_loss
from stagecert.applications.isotonic.orders import Order
from stagecert.applications.isotonic.partition import (
    by_minimum_cuts,
    split_by_constants,
    split_by_targets,
)
from stagecert.applications.isotonic.result import Search, Tolerance
from stagecert.applications.isotonic.sweeps import running_maximum
from stagecert.errors import ProblemError
from stagecert.solution import Status

# Nodes and comparisons up to which minimum cuts take milliseconds: exactness costs nothing there.
_SMALL = 5_000
ENGINES = ("auto", "pava", "dual", "cuts", "stagewise")


@dataclass(frozen=True, repr=False)
class IsotonicFit(Answer):
    """An isotonic fit, with the proof of how good it is.

    Attributes:
        fitted: the value of each node, exactly isotonic.
        value: the objective at the fit, the weighted sum of the losses.
        bound: a proven lower bound on the objective of every isotonic fit within the bounds.
        status: why the search ended.
        engine: what found it: "pava", "dual", "cuts (scipy)", "cuts (pymaxflow)" or "stagewise".
        iterations: steps of the engine (dual ascent steps, flows, or the core's steps).
        multipliers: one for each comparison of the order; they prove the bound (all zero for
            "stagewise", whose proof is the core's).
        seconds: wall time.
    """

    fitted: np.ndarray
    value: float
    bound: float
    status: Status
    engine: str
    iterations: int
    multipliers: np.ndarray
    seconds: float


def fit(
    y,
    order: Order,
    *,
    node=None,
    weight=None,
    loss: str | Callable = "squared",
    quantile: float = 0.5,
    delta: float = 1.0,
    y_min: float | None = None,
    y_max: float | None = None,
    atol: float | None = None,
    rtol: float = 1e-6,
    engine: str = "auto",
    max_iterations: int = 20_000,
    time_limit: float | None = None,
) -> IsotonicFit:
    """Minimises sum_s weight_s loss(y_s, fit[node_s]) over fits that respect an order.

    Args:
        y: targets, one for each sample.
        order: made by `chain`, `from_comparisons` or `coordinatewise`.
        node: the node of each sample; by default sample i is at node i.
        weight: positive or zero; by default 1.
        loss: "squared" (z - y)^2, "absolute", "quantile", "huber", "logistic" (z is a probability),
            "poisson" (z is a rate, half the deviance), or a JAX function (z, y) -> loss that works
            entry by entry and is convex in z.
        quantile, delta: parameters of the losses "quantile" and "huber".
        y_min, y_max: bounds on the fit. A function as loss has the range of y by default; the other
            losses need no bounds.
        atol, rtol: stop when value - bound <= atol + rtol * |bound|. By default atol is 1e-3 * rtol
            times the loss of the constant in the middle of the targets: the optimum may be zero,
            where rtol alone asks for what rounding does not give.
        engine: "auto" picks by structure: "pava" on total orders; "dual" for losses that fit means
            (squared, logistic, poisson) on large orders; exact minimum "cuts" otherwise, and
            whenever asked for; "stagewise" for functions.
        max_iterations, time_limit: limits on the steps and the seconds of "dual" and "stagewise".
            (The exact engines finish what they began.)

    Raises:
        ProblemError: bad input; the entry is named.

    >>> import numpy as np
    >>> from stagecert.applications import isotonic
    >>> isotonic.fit([1.0, 3.0, 2.0, 4.0], isotonic.chain(4)).fitted.tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    begin = time.perf_counter()
    if not isinstance(order, Order):
        hint = ""
        if isinstance(order, tuple):
            hint = " coordinatewise and from_comparisons return (order, node): give both, as in "
            hint += "fit(y, order, node=node)."
        raise ProblemError(f"order must be an Order, not a {type(order).__name__}.{hint}")
    _check_tolerances(atol, rtol)
    chosen = loss if callable(loss) else named_loss(loss, quantile=quantile, delta=delta)
    y, node, weight = _checked_samples(y, node, weight, order.count, chosen)
    low, high = _range(y, y_min, y_max, chosen)
    if max(high - low, 1.0) > 1e100 or np.max(weight) * len(y) > 1e100:
        raise ProblemError(
            f"y from {low:g} to {high:g}, weights up to {np.max(weight):g}: losses this large "
            "overflow; scale the data."
        )
    if atol is None:
        atol = 1e-3 * rtol * _scale(chosen, y, weight, 0.5 * (low + high))
    tolerance = Tolerance(float(atol), float(rtol))
    name = _picked(engine, order, chosen, bool(np.all(np.bincount(node, minlength=order.count))))
    limit = np.inf if time_limit is None else begin + time_limit
    if name == "stagewise":
        # Imported on use: it needs JAX, the other engines do not.
        from stagecert.applications.isotonic.stagewise import solve_stagewise

        function = chosen if callable(chosen) else _no_function(chosen)
        search = solve_stagewise(
            function, (y, weight, node), order, (low, high), tolerance, max_iterations, time_limit
        )
    else:
        assert isinstance(chosen, Loss)
        samples = Samples(y, weight, node, order, chosen, low, high)
        if name == "pava":
            search = solve_chain(samples, tolerance)
        elif name == "dual":
            search = solve_dual(samples, tolerance, max_iterations, limit)
            if engine == "auto" and not (search.status.solved or time.perf_counter() > limit):
                # Weights of very different sizes slow the ascent down, but not the cuts.
                search = search.joined(_solve_cuts(samples, tolerance), tolerance)
        else:
            search = _solve_cuts(samples, tolerance)
    return IsotonicFit(
        search.fit, search.value, search.bound, search.status, search.engine, search.iterations,
        search.multipliers, time.perf_counter() - begin,
    )  # fmt: skip


def _solve_cuts(samples: Samples, tolerance: Tolerance) -> Search:
    """Exact minimum cuts, then one flow for the proof."""
    split = split_by_targets if samples.loss.kinked else split_by_constants
    found, flows = split(samples, by_minimum_cuts)
    order = samples.order
    found = running_maximum(found, order.lower, order.start)
    multipliers = multipliers_by_flow(samples, found)
    clipped = samples.clipped(found)
    bound = lower_bound(samples, multipliers, clipped)
    library = "pymaxflow" if has_pymaxflow() else "scipy"
    search = Search.nothing(f"cuts ({library})").better(
        (clipped, multipliers, samples.value(clipped), bound), flows
    )
    return search.ended(tolerance, flows)


def _picked(engine: str, order: Order, loss, all_weighted: bool) -> str:
    if engine not in ENGINES:
        raise ProblemError(f"Unknown engine {engine!r}; known are {', '.join(ENGINES)}.")
    if callable(loss):
        if engine not in ("auto", "stagewise"):
            raise ProblemError(f"The engine {engine!r} has no use for a function as loss.")
        return "stagewise"
    means = loss.fits_means
    if engine == "auto":
        if order.is_chain:
            return "pava"
        small = order.count + len(order.lower) <= _SMALL
        return "dual" if means and all_weighted and not small else "cuts"
    if engine == "pava" and not order.is_chain:
        raise ProblemError("The engine 'pava' needs a total order.")
    if engine == "dual" and not means:
        raise ProblemError(
            f"The engine 'dual' needs a loss that fits means (squared, logistic, poisson), "
            f"not {loss.name!r}."
        )
    if engine == "dual" and not all_weighted:
        raise ProblemError("The engine 'dual' needs a sample with weight at every node.")
    return engine


def _no_function(loss: Loss):
    raise ProblemError(
        f"The engine 'stagewise' is for losses given as JAX functions, not for {loss.name!r}."
    )


def _check_tolerances(atol, rtol) -> None:
    for name, value in (("atol", 0.0 if atol is None else atol), ("rtol", rtol)):
        if not (np.isreal(value) and 0 <= value < np.inf):
            raise ProblemError(f"{name} = {value!r}: it must be a number that is not negative.")


def _scale(loss, y, weight, middle: float) -> float:
    """The size of the losses of a constant; at least the smallest that is not lost in rounding."""
    if isinstance(loss, Loss):
        sizes = loss.size(y, np.full_like(y, middle))
    else:
        sizes = np.abs(np.asarray(loss(np.full_like(y, middle), y)))
    total = float(np.sum(weight * np.where(np.isfinite(sizes), sizes, 0.0)))
    return max(total, 1e-280)


def _checked_samples(y, node, weight, count: int, loss):
    y = _vector("y", y)
    if node is None and len(y) != count:
        raise ProblemError(
            f"y has {len(y)} entries, but the order has {count} nodes; say which by `node`."
        )
    node = np.arange(len(y)) if node is None else np.asarray(node)
    weight = np.ones(len(y)) if weight is None else _vector("weight", weight)
    for name, part in (("node", node), ("weight", weight)):
        if part.shape != y.shape:
            raise ProblemError(f"{name} has shape {part.shape}, but y has shape {y.shape}.")
    if not np.issubdtype(node.dtype, np.integer):
        raise ProblemError(f"node must hold integers, not {node.dtype}.")
    outside = (node < 0) | (node >= count)
    if outside.any():
        entry = int(np.flatnonzero(outside)[0])
        raise ProblemError(f"node[{entry}] = {node[entry]}: nodes are 0, ..., {count - 1}.")
    if (weight < 0).any():
        entry = int(np.flatnonzero(weight < 0)[0])
        raise ProblemError(f"weight[{entry}] = {weight[entry]}: weights must not be negative.")
    used = weight > 0
    if not used.any():
        raise ProblemError("All weights are zero: there is nothing to fit.")
    if isinstance(loss, Loss):
        loss.check_targets(y)
    return y[used], node[used], weight[used]


def _vector(name: str, values) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ProblemError(f"{name} must be one-dimensional, not of shape {array.shape}.")
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise ProblemError(f"{name} must hold numbers, not {array.dtype}.")
    array = array.astype(float)
    if not len(array):
        raise ProblemError(f"{name} is empty.")
    wrong = ~np.isfinite(array)
    if wrong.any():
        entry = int(np.flatnonzero(wrong)[0])
        raise ProblemError(f"{name}[{entry}] = {array[entry]}: it must be finite.")
    return array


def _range(y, y_min, y_max, loss) -> tuple[float, float]:
    """An interval with an optimal fit in it, within the bounds asked for."""
    low = -np.inf if y_min is None else float(y_min)
    high = np.inf if y_max is None else float(y_max)
    if np.isnan(low) or np.isnan(high) or low > high:
        raise ProblemError(f"y_min = {y_min} and y_max = {y_max}: no fit is between them.")
    if isinstance(loss, Loss):
        for name, bound in (("y_min", low), ("y_max", high)):
            if loss.name == "logistic" and np.isfinite(bound) and not 0 <= bound <= 1:
                raise ProblemError(f"{name} = {bound}: probabilities are between 0 and 1.")
            if loss.name == "poisson" and np.isfinite(bound) and bound < 0:
                raise ProblemError(f"{name} = {bound}: rates are not negative.")
        return float(np.clip(y.min(), low, high)), float(np.clip(y.max(), low, high))
    return (
        float(y.min()) if y_min is None else low,
        float(y.max()) if y_max is None else high,
    )
