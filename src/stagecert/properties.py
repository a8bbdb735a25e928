"""Properties of networks from VNN-LIB files: the checker's own reader, under its name of old."""

from stagecert_check.properties import (
    Case,
    Dense,
    InputSet,
    Network,
    Property,
    PropertyError,
    Row,
    Tensor,
    load,
)

__all__ = [
    "Case",
    "Dense",
    "InputSet",
    "Network",
    "Property",
    "PropertyError",
    "Row",
    "Tensor",
    "load",
]
