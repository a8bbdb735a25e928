"""Isotonic regression on total and partial orders, with a proven bound whatever the loss."""

from typing import TYPE_CHECKING

from stagecert.applications.isotonic.fitting import ENGINES, IsotonicFit, fit
from stagecert.applications.isotonic.losses import LOSSES
from stagecert.applications.isotonic.orders import Order, chain, coordinatewise, from_comparisons

if TYPE_CHECKING:
    from stagecert.applications.isotonic.estimator import IsotonicRegression

__all__ = [
    "ENGINES", "LOSSES", "IsotonicFit", "IsotonicRegression", "Order", "chain", "coordinatewise",
    "fit", "from_comparisons",
]  # fmt: skip


def __getattr__(name: str):
    # The estimator needs scikit-learn; everything else does without.
    if name == "IsotonicRegression":
        try:
            from stagecert.applications.isotonic.estimator import IsotonicRegression
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "sklearn":
                raise
            raise ImportError(
                'IsotonicRegression needs scikit-learn: pip install "stagecert[isotonic]"'
            ) from error
        return IsotonicRegression
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
