"""Isotonic regression on total and partial orders, with a proven bound whatever the loss."""

from typing import TYPE_CHECKING

from stagecert.applications.isotonic.fitting import ENGINES, IsotonicFit, fit
from stagecert.applications.isotonic.losses import LOSSES
from stagecert.applications.isotonic.orders import Order, chain, coordinatewise, from_comparisons

if TYPE_CHECKING:
    from stagecert.applications.isotonic.estimator import IsotonicRegression

__all__ = [
    "ENGINES",
    "LOSSES",
    "IsotonicFit",
    "IsotonicRegression",
    "Order",
    "chain",
    "coordinatewise",
    "fit",
    "from_comparisons",
]


def __getattr__(name: str):
    # The estimator needs scikit-learn; everything else does without.
    if name == "IsotonicRegression":
        from stagecert.applications.isotonic.estimator import IsotonicRegression

        return IsotonicRegression
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
