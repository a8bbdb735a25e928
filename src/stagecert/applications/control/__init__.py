"""Optimal control with a proven bound: linear-quadratic, convex costs, dynamics in a wedge."""

from typing import TYPE_CHECKING

from stagecert.applications.control.linear import LinearQuadratic
from stagecert.applications.control.solving import ENGINES, Trajectory, solve

if TYPE_CHECKING:
    from stagecert.applications.control.convex import ConvexControl

__all__ = ["ENGINES", "ConvexControl", "LinearQuadratic", "Trajectory", "solve"]


def __getattr__(name: str):
    # Needs JAX, which linear-quadratic problems do without.
    if name == "ConvexControl":
        from stagecert.applications.control.convex import ConvexControl

        return ConvexControl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
