"""The exception types of the package."""

from stagecert_check.errors import ProblemError

__all__ = ["Disagreement", "ProblemError"]


class Disagreement(ProblemError):
    """The importer and ONNX Runtime compute different things: an error of the program."""
