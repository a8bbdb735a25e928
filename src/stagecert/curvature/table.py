"""The table of rules, by the names of primitives."""

from collections.abc import Callable

from stagecert.curvature.lattice import Known

RULES: dict[str, Callable[..., Known]] = {}


def rule(*names: str):
    """Registers a function as the rule of some primitives."""

    def register(function):
        for name in names:
            RULES[name] = function
        return function

    return register
