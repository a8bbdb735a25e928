"""Lower bounds that are proofs: the bound's formula in interval arithmetic with outward rounding."""

from stagecert.enclosure.bound import refuse, rigorous_bound
from stagecert.enclosure.primitives import UnknownPrimitives
from stagecert.enclosure.sets import least_linear

__all__ = ["UnknownPrimitives", "least_linear", "refuse", "rigorous_bound"]
