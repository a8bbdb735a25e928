"""What is wrong with a property file, and where."""

from stagecert_check.errors import ProblemError


class PropertyError(ProblemError):
    """A property that cannot be read, or a question about it that cannot be answered.

    `source` names the file. `line` and `column` count from 1, and `found` and `expected` say what
    stood there and what should have; they are None where the fault has no single place.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        line: int | None = None,
        column: int | None = None,
        found: str | None = None,
        expected: str | None = None,
    ):
        super().__init__(message)
        self.source = source
        self.line = line
        self.column = column
        self.found = found
        self.expected = expected
