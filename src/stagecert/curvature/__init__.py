"""Proofs of convexity by composition: a lattice, a table of rules, a walk through jaxprs."""

from stagecert.curvature.lattice import CONCAVE, CONVEX, Known, constant, parameter, variable
from stagecert.curvature.walking import follow

__all__ = ["CONCAVE", "CONVEX", "Known", "constant", "follow", "parameter", "variable"]
