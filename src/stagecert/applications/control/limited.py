"""Linear-quadratic problems with limits on states and rates: side constraints of the core.

The engines for linear-quadratic problems know limits on inputs alone, so these problems are solved
stage by stage.
"""

import jax.numpy as jnp
import numpy as np

from stagecert.applications.control.convex import ConvexControl
from stagecert.applications.control.linear import LinearQuadratic
from stagecert.errors import ProblemError


def as_convex(problem: LinearQuadratic) -> ConvexControl:
    """The same problem, with its limits, for the library's core."""
    p = problem
    if p.radius is None and not (np.isfinite(p.lower).all() and np.isfinite(p.upper).all()):
        raise ProblemError(
            "Limits on states or rates need inputs in a finite box (lower, upper) or a ball "
            "(radius)."
        )
    sets = (
        {"low": p.lower, "high": p.upper}
        if p.radius is None
        else {"radius": p.radius, "middle": p.middle}
    )
    params = {
        name: np.array(getattr(p, name))
        for name in ("A", "B", "offset", "Q", "R", "reference", "input_reference")
    }
    return ConvexControl(
        _cost,
        _step,
        None,
        p.initial,
        p.horizon,
        params=params,
        state_curvature=np.broadcast_to(p.state_curvature[:, None], (p.horizon, p.states)),
        input_curvature=p.input_curvature,
        state_low=p.state_lower,
        state_high=p.state_upper,
        rate=p.rate,
        **sets,
    )


def _step(p, x, u):
    return p["A"] @ x + p["B"] @ u + p["offset"]


def _cost(p, x, u):
    d, w = x - p["reference"], u - p["input_reference"]
    return 0.5 * (jnp.dot(d, p["Q"] @ d) + jnp.dot(w, p["R"] @ w))
