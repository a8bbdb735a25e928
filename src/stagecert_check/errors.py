"""Bad input, of the checker and of the whole library."""


class ProblemError(ValueError):
    """Bad input, found before any work: says what is wrong, where, and what to do about it."""
