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
from stagecert.curvature.walking import Walk, follow

__all__ = [
    "CONCAVE",
    "CONVEX",
    "Known",
    "Walk",
    "constant",
    "follow",
    "parameter",
    "unknown",
    "variable",
]
