"""Where the rows of a sweep are kept, so that a killed sweep can go on.

A store is a folder with one SQLite database. SQLite commits rows atomically and syncs them to disk,
and after a crash it undoes a half-written commit by itself, which a file format of our own would
have to be taught. Its plain rollback journal is used, not the write-ahead log: that one needs
memory shared between processes, which network file systems do not have. Commits are rare (one for a
batch of items), so its speed would gain nothing.

A store belongs to one configuration: everything that influences the rows, apart from the item
itself. The table of rows depends neither on the order in which they were stored nor on how often
the sweep was interrupted. Times are kept beside the rows, not in them.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagecert.errors import ProblemError

DATABASE, LOCK = "rows.sqlite", "lock"
FORMAT = 1
# Seconds that a commit waits for readers to finish, and a reader for a commit.
PATIENCE = 600.0
# SQLite allows no more variables than this in a query, in its older versions.
AT_ONCE = 500

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE rows (
    key TEXT PRIMARY KEY,    -- identifies the item
    place INTEGER NOT NULL,  -- its place in the list of items
    data TEXT NOT NULL,      -- what was found, as JSON
    blob BLOB,               -- arrays that belong to it
    seconds REAL NOT NULL    -- how long it took
) WITHOUT ROWID;
CREATE INDEX places ON rows (place);
"""


@dataclass(frozen=True)
class Row:
    """What is known of one item.

    Attributes:
        key: identifies the item by its content.
        place: its place in the list of items; tables are sorted by it.
        data: the columns of the table: plain values, the same in every run.
        seconds: how long it took.
        blob: bytes that belong to the row but not to the table.
    """

    key: str
    place: int
    data: dict[str, Any]
    seconds: float = 0.0
    blob: bytes | None = None


class Store:
    """The rows of a sweep in a folder; without a folder, in memory.

    Only one process may have a folder's store open for writing; `Store.reader` may be used besides.

    >>> store = Store(None, {"eps": "1/10"})
    >>> store.add([Row("a", 1, {"bound": 0.5}), Row("b", 0, {"bound": 0.25})])
    >>> for row in store.rows():
    ...     print(row.place, row.data["bound"])
    0 0.25
    1 0.5
    >>> store.close()
    """

    def __init__(self, folder: Path | None, configuration: dict[str, Any]):
        """Opens a store, or makes one.

        Raises:
            ProblemError: the folder holds another configuration's rows, belongs to another process
                or cannot be used.
        """
        self.folder = folder
        self.configuration = configuration
        self._lock: sqlite3.Connection | None = None
        if folder is None:
            self._base = sqlite3.connect(":memory:", isolation_level=None)
            self._open()
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProblemError(f"{folder} cannot be used as a folder: {error.strerror}.") from None
        self._lock = _locked(folder)
        try:
            self._base = sqlite3.connect(folder / DATABASE, isolation_level=None, timeout=PATIENCE)
            self._base.execute("PRAGMA journal_mode = TRUNCATE")
            # Also syncs the folder, so that not even a power failure undoes a commit.
            self._base.execute("PRAGMA synchronous = EXTRA")
            if self._base.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("it is damaged")
            self._open()
        except sqlite3.Error as error:
            self.close()
            raise ProblemError(
                f"{folder / DATABASE} cannot be used: {error}. Give another folder, or remove it."
            ) from None
        except BaseException:
            self.close()
            raise

    @staticmethod
    def reader(folder: Path) -> "Store":
        """A store to be read only, also while another process or thread writes to it."""
        store = object.__new__(Store)
        store.folder, store._lock = folder, None
        try:
            # Not opened as read-only: what a killed writer left must be undone before reading.
            place = (folder / DATABASE).resolve(strict=True).as_uri() + "?mode=rw"
            store._base = sqlite3.connect(place, uri=True, isolation_level=None, timeout=PATIENCE)
            store._base.execute("PRAGMA query_only = ON")
            about = dict(store._base.execute("SELECT name, value FROM about"))
            store.configuration = json.loads(about["configuration"])
        except (OSError, sqlite3.Error, KeyError, ValueError) as error:
            raise ProblemError(f"{folder} holds no results that can be read: {error}") from None
        return store

    def _open(self) -> None:
        tables = self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not tables:
            # One transaction: the store is there with its configuration, or not at all.
            self._base.execute("BEGIN IMMEDIATE")
            for statement in _TABLES.split(";\n")[:-1]:
                self._base.execute(statement)
            about = {"format": str(FORMAT), "configuration": json.dumps(self.configuration)}
            self._base.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            self._base.execute("COMMIT")
            return
        about = dict(self._base.execute("SELECT name, value FROM about"))
        if about.get("format") != str(FORMAT):
            raise ProblemError(
                f"{self.folder} has results in format {about.get('format')!r}; this version of "
                f"stagecert writes format {FORMAT}. Give another folder."
            )
        self._compare(json.loads(about["configuration"]))

    def _compare(self, there: dict[str, Any]) -> None:
        if there == self.configuration:
            return
        names = [*there, *(name for name in self.configuration if name not in there)]
        lines = [
            f"  {name}: {there.get(name)!r} there, {self.configuration.get(name)!r} now"
            for name in names
            if there.get(name) != self.configuration.get(name)
        ]
        raise ProblemError(
            f"{self.folder} holds results of another configuration:\n"
            + "\n".join(lines)
            + "\nGive another folder, or the same options."
        )

    @property
    def hash(self) -> str:
        """Identifies the configuration."""
        return hash_of(self.configuration)

    def __len__(self) -> int:
        return self._base.execute("SELECT count(*) FROM rows").fetchone()[0]

    def known(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys that have rows."""
        keys, found = list(keys), set()
        for begin in range(0, len(keys), AT_ONCE):
            some = keys[begin : begin + AT_ONCE]
            marks = ",".join("?" * len(some))
            query = f"SELECT key FROM rows WHERE key IN ({marks})"
            found.update(key for (key,) in self._base.execute(query, some))
        return found

    def add(self, rows: Iterable[Row]) -> None:
        """Stores rows, all of them or none; they are on the disk when this returns.

        Raises:
            ProblemError: an item has a row already, or the disk is full.
        """
        values = [(row.key, row.place, json.dumps(row.data), row.blob, row.seconds) for row in rows]
        self._change("INSERT INTO rows VALUES (?, ?, ?, ?, ?)", values)

    def remove(self, keys: Iterable[str]) -> None:
        """Forgets rows, all of them or none, so that their items are computed again."""
        self._change("DELETE FROM rows WHERE key = ?", [(key,) for key in keys])

    def _change(self, statement: str, values: list[tuple]) -> None:
        try:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                self._base.executemany(statement, values)
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise ProblemError(f"Rows cannot be stored in {self.folder}: {error}.") from None

    def rows(self, *, blobs: bool = False) -> Iterator[Row]:
        """All rows in the order of their places, one at a time; their blobs only if asked for."""
        query = f"SELECT key, place, data, seconds, {'blob' if blobs else 'NULL'} FROM rows"
        for key, place, data, seconds, blob in self._base.execute(query + " ORDER BY place, key"):
            yield Row(key, place, json.loads(data), seconds, blob)

    def close(self) -> None:
        """Lets other processes have the store."""
        for connection in (getattr(self, "_base", None), self._lock):
            if connection is not None:
                connection.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def hash_of(configuration: dict[str, Any]) -> str:
    """A hash of plain data, whatever the order of its entries."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()


def _locked(folder: Path) -> sqlite3.Connection:
    """A lock that ends with the process, however that ends.

    It is SQLite's lock on an empty database of its own, so that the rows can be read meanwhile.
    """
    lock = sqlite3.connect(folder / LOCK, isolation_level=None, timeout=0)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        lock.close()
        if "locked" in str(error):
            raise ProblemError(f"Another process is writing to {folder}.") from None
        raise ProblemError(f"{folder / LOCK} cannot be locked: {error}.") from None
    return lock
