"""Robustness of classifiers on whole data sets: `robust`."""

from stagecert.robust.robust import Robustness, robust
from stagecert.robust.table import Report

__all__ = ["Report", "Robustness", "robust"]
