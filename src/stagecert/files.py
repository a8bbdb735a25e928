"""Files that are there with all of their content, or not at all."""

import contextlib
import csv
import errno
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stagecert.errors import ProblemError


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes its place at the end, if there was no error."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    except OSError as error:  # which names the file of a moment, not the one that was asked for
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Says if a file could not be written, before the work that is to fill it."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ProblemError(f"{path} cannot be written: {error.strerror}.") from None


def write_whole(path: Path, text: str | bytes) -> None:
    """Writes a file so that it is there with all of its text or not at all."""
    with written_whole(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    """Writes a table; None is an empty cell, and floats have all of their digits."""
    with written_whole(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        names = list(columns)
        writer.writerow(names)
        for row in rows:
            writer.writerow([_cell(row[name]) for name in names])
        text.detach()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    # The shortest digits that give the same float back.
    return repr(value) if isinstance(value, float) else str(value)
