"""Accelerated projected gradient steps in the inputs: the engine for contractive dynamics.

The cost is quadratic in the inputs, so that the gradient at an extrapolated point is the same
extrapolation of gradients: every iteration is one pass forwards and one back, at allowed inputs,
and these two passes also are the certificate's.
"""

import numpy as np

from stagecert.applications.control.certificate import Certifier
from stagecert.applications.control.linear import LinearQuadratic, apply
from stagecert.applications.control.result import Evaluated, Limits, Search, evaluate
from stagecert.applications.control.sweeps import linear_recursion

# After so many steps, and whenever they have doubled, progress is judged.
_FIRST_LOOK = 10


def search_by_gradients(
    problem: LinearQuadratic,
    certifier: Certifier,
    start: Evaluated,
    limits: Limits,
    most: int,
    give_up: bool = False,
) -> Search:
    """Steps until the gap is reached, `most` steps are made or the clock says so.

    With `give_up`, they also end when the gap falls too slowly to be closed by `most` steps.
    """
    search = Search(start.states, start.inputs).seen(start)
    old = new = start
    curvature = float(problem.input_curvature.max())
    weight, steps = 1.0, 0
    look, before = _FIRST_LOOK, search.value - search.bound
    while steps < most and not limits.late() and not limits.reached(search.value, search.bound):
        if steps >= look:
            gap = search.value - search.bound
            if give_up and not _promising(before, gap, limits.allowed(search.bound), look, most):
                break
            look, before = 2 * look, gap
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * weight**2))
        ahead = (weight - 1.0) / following
        point = new.inputs + ahead * (new.inputs - old.inputs)
        slope = new.slope + ahead * (new.slope - old.slope)
        while True:
            tried = evaluate(problem, certifier, problem.project(point - slope / curvature))
            steps += 1
            move = tried.inputs - point
            square = float(np.sum(move**2))
            along = float(np.sum(move * (tried.slope - slope)))
            if not np.isfinite(along):
                return search.counted(steps)
            if along <= curvature * square * (1 + 1e-9) or steps >= most:
                break
            # The curvature along the move, and a little more: the next move turns to steeper ones.
            curvature = max(1.2 * along / square, 1.5 * curvature)
        search = search.seen(tried)
        # Momentum that points uphill is dropped.
        if float(np.sum((point - tried.inputs) * (tried.inputs - new.inputs))) > 0:
            following = 1.0
        old, new, weight = new, tried, following
    return search.counted(steps)


def expected_steps(problem: LinearQuadratic, limits: Limits) -> float:
    """About how many steps it will take: few where the dynamics contract, else thousands.

    Steps grow with the root of the condition number. The curvature is least along R at best, and
    about greatest along inputs that stay the same for all times, which integrators add up.
    """
    signs = np.random.default_rng(0).choice([-1.0, 1.0], problem.inputs)
    inputs = np.broadcast_to(signs, (problem.horizon, problem.inputs))
    states = linear_recursion(problem.A, np.zeros(problem.states), apply(problem.B, inputs))
    curvature = np.sum(states[1:] * apply(problem.Q, states[1:]))
    curvature += np.sum(inputs * apply(problem.R, inputs))
    condition = curvature / inputs.size / problem.input_curvature.min()
    if not np.isfinite(condition):
        return np.inf
    return 0.5 * np.sqrt(condition) * np.log(1 / max(limits.relative, 1e-12))


def _promising(before: float, gap: float, allowed: float, steps: int, most: int) -> bool:
    """Whether a gap that fell from `before` to `gap` in half of `steps` will be closed in time."""
    if not (np.isfinite(gap) and gap < before):
        return False
    rate = np.log(before / gap) / (0.5 * steps) if np.isfinite(before) else np.inf
    return steps + np.log(max(gap / max(allowed, 1e-300), 1.0)) / rate <= most
