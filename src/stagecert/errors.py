"""The one exception type for bad input."""


class ProblemError(ValueError):
    """Bad input, found before any work: says what is wrong, where, and what to do about it."""
