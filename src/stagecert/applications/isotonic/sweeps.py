"""The passes over an order, by compiled loops where Numba is installed."""

from stagecert.applications.isotonic.loops import COMPILED

if COMPILED:
    from stagecert.applications.isotonic.loops import (
        ascend,
        block_means,
        running_maximum,
        running_minimum,
    )
else:
    from stagecert.applications.isotonic.vectorised import (
        ascend,
        block_means,
        running_maximum,
        running_minimum,
    )

__all__ = ["ascend", "block_means", "running_maximum", "running_minimum"]
