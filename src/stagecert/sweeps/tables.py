"""Tables of a sweep as CSV or Parquet files, whole or not at all."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from stagecert.errors import ProblemError
from stagecert.files import write_csv, written_whole

Format = Literal["csv", "parquet"]
# Rows of a Parquet file that are held at a time.
TOGETHER = 10_000


def check_format(format: str) -> None:
    """Says if tables cannot be written in a format."""
    if format not in ("csv", "parquet"):
        raise ProblemError(f"format must be csv or parquet, not {format!r}.")
    if format == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ProblemError(
                'Parquet files need the package pyarrow: pip install "stagecert[parquet]"'
            ) from error


def write_table(
    path: Path, columns: Mapping[str, type], rows: Iterable[dict[str, Any]], format: str
) -> Path:
    """Writes a table to the path with the format's ending, and returns that.

    Args:
        path: without an ending.
        columns: the types of their entries, any of which may be None.
        rows: a dictionary each.
        format: "csv" or "parquet".
    """
    path = path.with_name(f"{path.name}.{format}")
    if format == "parquet":
        _write_parquet(path, columns, rows)
    else:
        write_csv(path, columns, rows)
    return path


def _write_parquet(path: Path, columns: Mapping[str, type], rows: Iterable[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    types = {
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
        str: pyarrow.string(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    with written_whole(path) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        group: list[dict[str, Any]] = []
        for row in rows:
            group.append(row)
            if len(group) == TOGETHER:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group = []
        writer.write_table(pyarrow.Table.from_pylist(group, schema))
