"""The exception types of the package."""


class ProblemError(ValueError):
    """Bad input, found before any work: says what is wrong, where, and what to do about it."""


class Disagreement(ProblemError):
    """The importer and ONNX Runtime compute different things: an error of the program."""
