"""Proofs of convexity by composition: a lattice, a table of rules, a walk through jaxprs."""

from stagecert.curvature.lattice import (
    CONCAVE,
    CONVEX,
    Known,
    constant,
    parameter,
    unknown,
    variable,
)
from stagecert.curvature.moving import PLACES, STRUCTURAL, mover
from stagecert.curvature.walking import NUMPY, Walk, follow

__all__ = [
    "CONCAVE", "CONVEX", "NUMPY", "PLACES", "STRUCTURAL", "Known", "Walk", "constant", "follow",
    "mover", "parameter", "unknown", "variable",
]  # fmt: skip
