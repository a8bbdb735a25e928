"""Applications of stagewise convex problems, each with the interface its field is used to.

Each is imported when it is first used, since each has dependencies of its own (extras).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagecert.applications import control, isotonic, mdp

__all__ = ["control", "isotonic", "mdp"]


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
