"""Running a sweep: the items that have no row yet, batch by batch, on some engine."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stagecert.errors import ProblemError
from stagecert.sweeps.engines import Engine, InProcess, Limits
from stagecert.sweeps.store import Row, Store
from stagecert.sweeps.tasks import Item, Tasks, Work

# Storing may take this share of the time, as long as rows wait no longer than LONGEST seconds, and
# no more than MANY rows or LARGE bytes of blobs wait.
SHARE, LONGEST, MANY, LARGE = 0.05, 0.5, 10_000, 2**25


def run(
    items: Sequence[Item],
    work: Work,
    store: Store,
    *,
    batch: int,
    engine: Engine | None = None,
    timeout: float | None = None,
    memory: float | None = None,
    retries: int = 1,
    progress: Callable[[list[Row]], None] | None = None,
) -> None:
    """Computes and stores the rows of all items that have none.

    The list is cut into batches of fixed length, always at the same places, whatever the engine,
    and whether or not the sweep was interrupted before. An item that raises an exception, crashes
    its process or exceeds a limit gets the row `work.failed(item, why)`; all others are computed.

    Args:
        items: what there is to do. Their keys must differ.
        work: makes the rows; see `Work`. Processes and Ray need to pickle it.
        store: where rows go. Only this process writes to it.
        batch: how many items are computed together.
        engine: what computes; this process by default.
        timeout: seconds that an item may take; a batch may take as many times that. Not in-process.
        memory: GiB that a worker process may take. Not in-process.
        retries: how often a batch is tried again whose process died.
        progress: called with the rows that were just stored.

    Raises:
        ProblemError: bad arguments, the engine cannot be started, or rows cannot be stored.
    """
    for name, value in (("timeout", timeout), ("memory", memory)):
        if value is not None and not 0 < value < float("inf"):
            raise ProblemError(f"{name} must be positive, not {value!r}.")
    if batch < 1 or retries < 0:
        raise ProblemError("batch must be at least 1, and retries at least 0.")
    if len({item.key for item in items}) < len(items):
        raise ProblemError("Two items have the same key.")
    tasks = Tasks(_missing(items, store, batch), work.failed, retries)
    found = (engine or InProcess()).results(tasks, work, Limits(timeout, memory))
    keeper = _Keeper(store, progress)
    try:
        with closing(found):
            for rows in found:
                keeper.add(rows)
    finally:
        keeper.flush()


def _missing(items: Sequence[Item], store: Store, batch: int) -> Iterator[list[Item]]:
    for begin in range(0, len(items), batch):
        some = items[begin : begin + batch]
        known = store.known(item.key for item in some)
        if len(known) < len(some):
            yield [item for item in some if item.key not in known]


class _Keeper:
    """Stores rows soon, but not so often that the sweep waits for the disk.

    A commit is synced to the disk, which takes milliseconds, as much as thousands of trivial items.
    So rows wait until commits take no more than a small share of the time. What is lost if the
    process is killed meanwhile was computed in the short time since the last commit.
    """

    def __init__(self, store: Store, progress: Callable[[list[Row]], None] | None):
        self._store, self._progress = store, progress
        self._rows: list[Row] = []
        self._bytes = 0
        self._next = -float("inf")

    def add(self, rows: list[Row]) -> None:
        """Takes rows, perhaps none, and stores what there is if it is time."""
        self._rows += rows
        self._bytes += sum(len(row.blob) for row in rows if row.blob is not None)
        full = len(self._rows) >= MANY or self._bytes >= LARGE
        if full or time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Stores what there is."""
        if not self._rows:
            return
        rows, self._rows, self._bytes = self._rows, [], 0
        begin = time.monotonic()
        self._store.add(rows)
        now = time.monotonic()
        self._next = now + min((now - begin) * (1 - SHARE) / SHARE, LONGEST)
        if self._progress is not None:
            self._progress(rows)


class Campaign(ABC):
    """What the sweeps over images and over instances have in common.

    Attributes:
        items: what there is to do.
        configuration: what the rows depend on: a store belongs to one.
        work: makes the rows.
        batch: how many items are computed together.
        verdict: the column that says "error" of an item that failed.
    """

    items: list[Item]
    configuration: dict[str, Any]
    work: Work
    batch: int = 1
    verdict: str

    def store(self, out: str | Path | None) -> Store:
        """The store in a folder, which is made if need be; or one in memory."""
        store = Store(None if out is None else Path(out), self.configuration)
        if out is not None:
            # What a killed process did not finish writing.
            for rest in Path(out).glob("**/*.part"):
                rest.unlink(missing_ok=True)
        return store

    def known(self, store: Store) -> int:
        """How many items have a row."""
        return len(store.known(item.key for item in self.items))

    def run(
        self, store: Store, progress: Callable[[list[Row]], None] | None = None, **options: Any
    ) -> None:
        """Computes and stores all rows that are missing; for the options see `sweeps.run`."""
        run(self.items, self.work, store, batch=self.batch, progress=progress, **options)

    def forget_errors(self, store: Store) -> None:
        """Removes the rows of items that failed, so that `run` computes them again."""
        mine = {item.key for item in self.items}
        failed = [row.key for row in store.rows() if row.data[self.verdict] == "error"]
        store.remove(key for key in failed if key in mine)

    @abstractmethod
    def export(self, store: Store, format: str = "csv") -> Any:
        """Writes the files into the store's folder; returns a summary."""
