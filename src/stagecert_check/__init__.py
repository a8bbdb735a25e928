"""An independent check of certificates: it uses nothing of the search that finds them.

    report = stagecert_check.check("model.onnx", "property.vnnlib", "proof.cert")
    report.accepted, report.reasons

This package imports NumPy, onnx and python-flint, and nothing of `stagecert`, which does import it:
what is trusted is this package alone. Names are loaded when they are first used: who only reads
properties needs neither onnx nor flint.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagecert_check.checker import Report, check

__all__ = ["Report", "check"]
__version__ = "0.1.0"


if not TYPE_CHECKING:  # for a type checker, a module with this function has every name

    def __getattr__(name: str):
        if name in __all__:
            return getattr(importlib.import_module("stagecert_check.checker"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
