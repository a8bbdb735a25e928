"""A sweep in parts: what there is to do, where its rows are, doing it, trying failures again."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagecert.sweeps.store import Row, Store
from stagecert.sweeps.sweep import run
from stagecert.sweeps.tasks import Item, Work


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
