"""Loops over nodes and edges, compiled by Numba where it is installed, plain Python otherwise."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)

try:
    from numba import njit
except ImportError:
    COMPILED = False

    def compiled(function: Function) -> Function:
        """The function itself: Numba is not installed."""
        return function

else:
    COMPILED = True

    def compiled(function: Function) -> Function:
        """The function compiled at its first call; later processes find it in a cache."""
        return njit(cache=True)(function)
