"""Loops over nodes and edges, compiled by Numba where it is installed, plain Python otherwise."""

from collections.abc import Callable
from typing import Any

try:
    import numba
except ImportError:
    numba = None

COMPILED = numba is not None


def compiled(function: Callable) -> Any:
    """The function, compiled at its first call if it can be; later processes find it in a cache."""
    return function if numba is None else numba.njit(cache=True)(function)
