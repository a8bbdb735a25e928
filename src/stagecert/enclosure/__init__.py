"""Lower bounds that are proofs: their formula in interval arithmetic with outward rounding."""

from stagecert.enclosure.bound import refuse, rigorous_bound
from stagecert.enclosure.primitives import UnknownPrimitives
from stagecert.enclosure.sets import even, least_linear, least_on_balls

__all__ = [
    "UnknownPrimitives",
    "even",
    "least_linear",
    "least_on_balls",
    "refuse",
    "rigorous_bound",
]
