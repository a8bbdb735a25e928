"""Properties of networks from VNN-LIB files, versions 1.0 and 2.0.

    property = stagecert_check.properties.load("prop_1.vnnlib")
    for case in property.cases:
        case.input_lower64, case.input_upper64, case.outputs

A file describes the counterexamples. `Property.cases` lists every way to be one.
"""

import dataclasses
import gzip
import hashlib
import io
import os
import zlib
from pathlib import Path

from stagecert_check.properties.errors import PropertyError
from stagecert_check.properties.model import Case, Dense, InputSet, Network, Property, Row, Tensor
from stagecert_check.properties.normal import normalise
from stagecert_check.properties.reader import Reader

__all__ = [
    "Case", "Dense", "InputSet", "Network", "Property", "PropertyError", "Row", "Tensor", "load",
]  # fmt: skip


def load(
    source: str | bytes | os.PathLike[str], *, max_bytes: int = 1 << 26, max_cases: int = 100_000
) -> Property:
    """Reads a VNN-LIB property, plain or gzipped.

    `source` is a path, or the contents: bytes always are, and a string is if it has a line break,
    starts with a bracket or a semicolon, or is too long for a path. Numbers are exact fractions of
    the decimals in the file. A file that cannot be read, that is larger than `max_bytes` once
    unpacked, or that needs more than `max_cases` cases ends in a `PropertyError`.
    """
    name = "<text>"
    if isinstance(source, str) and (
        len(source) > 4096
        or "\n" in source
        or "\r" in source
        or source.removeprefix("\ufeff").lstrip()[:1] in ("", "(", ";")
    ):
        data: bytes | str = source.removeprefix("\ufeff")
    elif isinstance(source, bytes):
        data = source
    elif isinstance(source, (str, os.PathLike)):  # pyright: ignore  (callers without types)
        name = os.fsdecode(source)
        try:
            with Path(name).open("rb") as file:
                data = file.read(max_bytes + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PropertyError(f"{name}: cannot be read: {reason}.", source=name) from None
    else:
        raise PropertyError(
            f"A property is a path, a string or bytes, not a {type(source).__name__}."
        )
    if isinstance(data, bytes) and data[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(max_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise PropertyError(f"{name}: not a whole gzip file: {error}.", source=name) from None
    if len(data) > max_bytes:
        raise PropertyError(
            f"{name}: larger than {max_bytes:,} bytes; raise `max_bytes` if it is meant to be.",
            source=name,
        )
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if isinstance(data, bytes):
        # Comments may be in any encoding; elsewhere a replaced character is an error anyway.
        data = data.decode("utf-8-sig", errors="replace")
    found = normalise(Reader(data, name).read(), name, max_cases)
    return dataclasses.replace(found, digest=hashlib.sha256(raw).hexdigest())
