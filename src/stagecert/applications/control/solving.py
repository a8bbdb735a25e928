"""solve(): picks the engine by structure, returns the trajectory with its certificate."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stagecert.applications.answer import Answer
from stagecert.applications.control.augmented import search_augmented
from stagecert.applications.control.certificate import Certifier
from stagecert.applications.control.gradient import expected_steps, search_by_gradients
from stagecert.applications.control.interior import search_interior
from stagecert.applications.control.linear import LinearQuadratic, checked_numbers
from stagecert.applications.control.newton import search_by_newton
from stagecert.applications.control.result import Evaluated, Limits, Search, evaluate
from stagecert.applications.control.sweeps import follow, optimal_feedback, riccati
from stagecert.errors import ProblemError
from stagecert.solution import Status

if TYPE_CHECKING:
    from stagecert.applications.control.convex import ConvexControl

ENGINES = ("auto", "riccati", "gradient", "newton", "interior", "augmented", "stagewise")
_SEARCHES = {
    "gradient": search_by_gradients,
    "newton": search_by_newton,
    "interior": search_interior,
}
# Limits on states take some times the steps that the same problem takes without them; problems that
# would take more than so many are for the core.
_TIMES, _AUGMENTED_STEPS = 5, 1_000
# What Newton's steps usually take, to compare with; beyond what the interior-point method takes.
_USUAL_NEWTON_STEPS, _INTERIOR_STEPS = 8, 60


@dataclass(frozen=True, repr=False)
class Trajectory(Answer):
    """A trajectory, with the proof of how good it is.

    Attributes:
        states: x_0, ..., x_T, an array (T + 1, n).
        inputs: u_0, ..., u_{T-1}, an array (T, m), within their sets.
        value: the cost of the trajectory.
        bound: a proven lower bound on the cost of every trajectory.
        status: why the search ended.
        engine: what found it; names in the order of use.
        iterations: steps of the engines.
        multipliers: (T, n), of the dynamics; they prove the bound.
        seconds: wall time.
        limit_multipliers: (T, n), of limits on states, positive for those above and negative for
            those below: with the others they prove the bound. None where there are none, and from
            the core, whose bound rests on multipliers of its own.
    """

    states: np.ndarray
    inputs: np.ndarray
    value: float
    bound: float
    status: Status
    engine: str
    iterations: int
    multipliers: np.ndarray | None
    seconds: float
    limit_multipliers: np.ndarray | None = None

    def shifted(self, steps: int = 1) -> np.ndarray:
        """The inputs some steps later, the last repeated: a warm start for a receding horizon."""
        return np.concatenate([self.inputs[steps:], np.repeat(self.inputs[-1:], steps, axis=0)])


def solve(
    problem: "LinearQuadratic | ConvexControl",
    *,
    atol: float = 1e-9,
    rtol: float = 1e-6,
    engine: str = "auto",
    start=None,
    max_iterations: int = 10_000,
    time_limit: float | None = None,
) -> Trajectory:
    """Solves a control problem to a certified gap.

    Args:
        problem: what to solve.
        atol, rtol: stop when value - bound <= atol + rtol * |bound|.
        engine: "auto" picks by structure: "riccati" without constraints; "gradient" (accelerated
            projected gradient steps) where the dynamics contract, so that few will do; else
            "newton" (Newton steps on the active set, by Riccati's recursion) for boxes, and
            "interior" (an interior-point method, by the same recursion) for balls and where Newton
            does not finish. Limits on states take "augmented" (gradient steps and the method of
            multipliers) where the dynamics contract. A `ConvexControl`, limits on rates and all
            other limits on states are solved by the library's core ("stagewise").
        start: inputs (T, m) to start from, for example `Trajectory.shifted()` of the last solve.
        max_iterations, time_limit: limits on the steps and the seconds of each engine.

    Raises:
        ProblemError: bad input; the entry is named.

    >>> import numpy as np
    >>> from stagecert.applications import control
    >>> problem = control.LinearQuadratic(
    ...     A=[[1.0, 0.1], [0.0, 1.0]],
    ...     B=[[0.0], [0.1]],
    ...     Q=[1.0, 0.1],
    ...     R=[0.1],
    ...     initial=[1.0, 0.0],
    ...     horizon=50,
    ...     lower=-1.0,
    ...     upper=1.0,
    ... )
    >>> found = control.solve(problem)
    >>> found.status.name, found.inputs[:3, 0].round(3).tolist()
    ('GAP_REACHED', [-1.0, -1.0, -1.0])
    """
    begin = time.perf_counter()
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not (np.isreal(value) and 0 <= value < np.inf):
            raise ProblemError(f"{name} = {value!r}: it must be a number that is not negative.")
    deadline = np.inf if time_limit is None else begin + time_limit
    limits = Limits(float(atol), float(rtol), max_iterations, deadline)
    if isinstance(problem, LinearQuadratic) and problem.limited:
        return _solve_limited(problem, limits, engine, start, time_limit, begin)
    if not isinstance(problem, LinearQuadratic):
        return _solve_stagewise(problem, limits, engine, start, time_limit, begin)
    _check_engine(engine, problem)
    given = _starting_inputs(problem, start)
    # States of unstable dynamics may overflow; what is not finite is never taken for better.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        search, names = _search(problem, Certifier(problem), given, engine, limits)
    return Trajectory(
        search.states, search.inputs, search.value, search.bound, search.status(limits),
        ", ".join(names), search.iterations, search.multipliers, time.perf_counter() - begin,
    )  # fmt: skip


def _solve_limited(problem, limits: Limits, engine, start, time_limit, begin) -> Trajectory:
    """Limits on states or rates: the method of multipliers where that is fast, else the core."""
    # Imported on use: it needs JAX, the other engines do not.
    from stagecert.applications.control.convex import as_convex

    # Also checks the limits.
    stated = as_convex(problem)
    low, high = stated.state_limits
    fast = problem.rate is None and bool(np.all(high > low))
    if engine == "augmented" and not fast:
        raise ProblemError(
            "The engine 'augmented' needs limits on states, with room between them, and none on "
            "rates."
        )
    if engine == "auto" and fast:
        fast = _TIMES * expected_steps(problem, limits) <= _AUGMENTED_STEPS
    names = ""
    if engine in ("auto", "augmented") and fast:
        inputs = _starting_inputs(problem, start)
        inputs = problem.default_inputs() if inputs is None else inputs
        most = min(limits.iterations, _AUGMENTED_STEPS)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            certifier = Certifier(problem, (low, high))
            search = search_augmented(problem, certifier, inputs, limits, most)
        status = search.status(limits)
        if engine == "augmented" or status in (Status.GAP_REACHED, Status.TIME_LIMIT):
            return Trajectory(
                search.states, search.inputs, search.value, search.bound, status, "augmented",
                search.iterations, search.multipliers, time.perf_counter() - begin, search.pull,
            )  # fmt: skip
        names, engine, start = "augmented, ", "stagewise", search.inputs
    found = _solve_stagewise(stated, limits, engine, start, time_limit, begin)
    return replace(found, engine=names + found.engine)


def _solve_stagewise(problem, limits: Limits, engine, start, time_limit, begin) -> Trajectory:
    # Imported on use: it needs JAX, the other engines do not.
    import jax

    import stagecert as sc
    from stagecert.applications.control.convex import (
        CONSTRAINED_SOLVER,
        STAGEWISE_SOLVERS,
        ConvexControl,
    )

    if not isinstance(problem, ConvexControl):
        raise ProblemError(
            f"problem must be a LinearQuadratic or a ConvexControl, not {type(problem).__name__}."
        )
    if engine not in ("auto", "stagewise"):
        raise ProblemError(
            f"The engine {engine!r} is for LinearQuadratic problems without limits on states or "
            "rates."
        )
    shape = problem.input_set.centre().shape
    inputs = None if start is None else _checked_start(start, shape)
    with jax.enable_x64(True):
        solution = sc.solve(
            problem.stagewise(),
            atol=limits.absolute,
            rtol=limits.relative,
            solver=CONSTRAINED_SOLVER if problem.constraints else STAGEWISE_SOLVERS,
            start=None if inputs is None else sc.Point(problem.input_set.project(inputs)),
            max_iterations=limits.iterations,
            time_limit=time_limit,
        )
    states = np.concatenate([problem.initial[None], np.asarray(solution.blocks[0])])
    return Trajectory(
        states, np.asarray(solution.inputs), solution.value, solution.bound, solution.status,
        "stagewise", solution.stats.iterations, np.asarray(solution.certificate.multipliers[0]),
        time.perf_counter() - begin,
    )  # fmt: skip


def _search(problem, certifier, start, engine, limits: Limits):
    """The engines one after the other, each from the best trajectory so far."""
    most = limits.iterations
    if engine == "riccati" or (engine == "auto" and not problem.constrained):
        plan: list[tuple[str, Callable]] = [("riccati", _search_riccati)]
    elif engine != "auto":
        plan = [(engine, partial(_SEARCHES[engine], most=most))]
    else:
        worth, plan = min(_worth(problem), most), []
        if expected_steps(problem, limits) <= worth:
            plan = [("gradient", partial(search_by_gradients, most=worth, give_up=True))]
        newton = ("newton", partial(search_by_newton, most=most))
        interior = ("interior", partial(search_interior, most=min(_INTERIOR_STEPS, most)))
        plan += [newton, interior, newton] if problem.radius is None else [interior]
    search, names = None, []
    for name, run in plan:
        begin = _start(problem, certifier, start, search, policy=name == "newton")
        found = run(problem, certifier, begin, limits)
        search = found if search is None else search.joined(found)
        names.append(name)
        if limits.reached(search.value, search.bound) or limits.late():
            break
    assert search is not None
    return search, names


def _start(problem, certifier, start, search: Search | None, policy: bool) -> Evaluated:
    """The best trajectory to begin with: given, found, or of the optimal policy, cut off."""
    if search is None:
        inputs = problem.default_inputs() if start is None else start
        best = evaluate(problem, certifier, inputs)
    else:
        best = evaluate(problem, certifier, search.inputs, search.states)
    if policy and start is None:
        states, inputs = follow(problem, optimal_feedback(problem), problem.project_one)
        cut_off = evaluate(problem, certifier, inputs, states)
        return cut_off if cut_off.value < best.value else best
    return best


def _search_riccati(problem, certifier, start: Evaluated, limits: Limits) -> Search:
    """The optimal policy without constraints; a second sweep takes off what rounding left."""
    states, inputs = follow(problem, optimal_feedback(problem))
    first = evaluate(problem, certifier, inputs, states)
    search = Search(first.states, first.inputs).seen(first).counted(1)
    if limits.reached(search.value, search.bound):
        return search
    states, inputs = riccati(problem, first.slope).roll_out(problem, states, inputs, 1.0)
    return search.seen(evaluate(problem, certifier, inputs, states)).counted(1)


def _worth(problem: LinearQuadratic) -> int:
    """How many gradient steps cost as much as a solve by Newton's steps."""
    n, m = problem.states, problem.inputs
    # Seconds of one time of the horizon, as measured: what a call costs and what arithmetic costs.
    newton = 5e-5 + 1e-10 * (2 * n * n * (n + m) + 2 * n * (n + m) ** 2 + n * m * m + 2 * n * n * m)
    gradient = 5e-6 + 5e-10 * (4 * n * n + 4 * n * m)
    return max(20, int(_USUAL_NEWTON_STEPS * newton / gradient))


def _check_engine(engine: str, problem: LinearQuadratic) -> None:
    if engine not in ENGINES:
        raise ProblemError(f"Unknown engine {engine!r}; known are {', '.join(ENGINES)}.")
    if engine == "riccati" and problem.constrained:
        raise ProblemError("The engine 'riccati' needs inputs without constraints.")
    if engine == "augmented":
        raise ProblemError("The engine 'augmented' needs limits on states.")
    if engine == "stagewise":
        raise ProblemError("The engine 'stagewise' is for ConvexControl problems.")
    if engine == "interior" and not problem.constrained:
        raise ProblemError("The engine 'interior' needs constraints on the inputs.")
    if engine == "newton" and problem.radius is not None:
        raise ProblemError("The engine 'newton' needs a box; balls are for 'interior'.")


def _starting_inputs(problem: LinearQuadratic, start) -> np.ndarray | None:
    if start is None:
        return None
    return problem.project(_checked_start(start, (problem.horizon, problem.inputs)))


def _checked_start(start, shape) -> np.ndarray:
    inputs = checked_numbers("start", start)
    if inputs.shape != shape:
        raise ProblemError(f"start has shape {inputs.shape}, but the inputs have {shape}.")
    return inputs
