"""Newton steps on the active set of a box: inputs at their bounds are held, the others follow from
one Riccati recursion; then inputs beyond the box are held too, and those that pull inwards freed.

These are semismooth Newton steps: a handful from a good start, such as the last solution of a
receding horizon. The feedback keeps unstable dynamics in check, which inputs alone would not.
"""

import numpy as np

from stagecert.applications.control.certificate import Certifier
from stagecert.applications.control.linear import LinearQuadratic, apply
from stagecert.applications.control.result import Evaluated, Limits, Search, evaluate
from stagecert.applications.control.sweeps import gradient, riccati, sweep_back

# The gap must halve in so many steps; otherwise the active sets go in circles.
_PATIENCE = 3
# The share of a box's width that is near its bounds.
_NEAR = 0.01


def search_by_newton(
    problem: LinearQuadratic,
    certifier: Certifier,
    start: Evaluated,
    limits: Limits,
    most: int,
) -> Search:
    """Steps until the gap is reached, no step helps, `most` are made or the clock says so."""
    search = Search(start.states, start.inputs).seen(start)
    lower, upper = problem.lower, problem.upper
    at_lower, at_upper = _held(problem, start)
    origin = np.zeros_like(start.states)
    steps, gaps = 0, []
    while steps < most and not limits.late() and not limits.reached(search.value, search.bound):
        steps += 1
        held = np.where(at_lower, lower, np.where(at_upper, upper, 0.0))
        try:
            feedback = riccati(
                problem,
                apply(problem.R, held - problem.input_reference),
                free=~(at_lower | at_upper),
                state_slope=-apply(problem.Q, problem.reference),
                drift=problem.offset + apply(problem.B, held),
            )
        except np.linalg.LinAlgError:
            break
        states, inputs = feedback.roll_out(problem, origin, held, 1.0)
        slope = gradient(problem, inputs, sweep_back(problem, states))
        cut_off = feedback.roll_out(problem, origin, held, 1.0, problem.project_one)
        if not np.all(np.isfinite(slope)):
            break
        search = search.seen(evaluate(problem, certifier, cut_off[1], cut_off[0]))
        gaps.append(search.value - search.bound)
        if len(gaps) > _PATIENCE and not gaps[-1] <= 0.5 * gaps[-1 - _PATIENCE] < np.inf:
            break
        at_lower, at_upper = (
            np.where(at_lower, slope > 0, inputs < lower),
            np.where(at_upper, slope < 0, inputs > upper),
        )
    return search.counted(steps)


def _held(problem: LinearQuadratic, start: Evaluated):
    """Which inputs are near a bound, and would go to it by a gradient step.

    Near, not at: warm starts come from interior points, too.
    """
    lower, upper = problem.lower, problem.upper
    width = upper - lower
    near = _NEAR * np.where(np.isfinite(width), width, 1.0)
    step = start.slope / problem.input_curvature
    at_lower = (start.inputs <= lower + near) & (step > 0) & (start.inputs - step <= lower)
    at_upper = (start.inputs >= upper - near) & (step < 0) & (start.inputs - step >= upper)
    return at_lower, at_upper
