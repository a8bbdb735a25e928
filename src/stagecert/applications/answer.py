"""What the answers of all applications have in common."""

import math

from stagecert.solution import Status


class Answer:
    """A value and a proven bound, with how they were found; for frozen dataclasses to inherit."""

    value: float
    bound: float
    status: Status
    engine: str

    @property
    def gap(self) -> float:
        """value - bound: how far the answer can be from the best; infinite if either is."""
        ends = self.value, self.bound
        return self.value - self.bound if all(map(math.isfinite, ends)) else math.inf

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(value={self.value:.10g}, bound={self.bound:.10g}, "
            f"gap={self.gap:.3g}, status={self.status.name}, engine={self.engine!r})"
        )
