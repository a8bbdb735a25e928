"""Running a sweep: the items that have no row yet, batch by batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagecert.sweeps.store import Row, Store


@dataclass(frozen=True)
class Item:
    """One of the things to be done: where it is in the list, and what identifies it."""

    place: int
    key: str


def run(
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], list[Row]],
    store: Store,
    *,
    batch: int,
    progress: Callable[[list[Row]], None] | None = None,
) -> None:
    """Computes and stores the rows of all items that have none.

    The list is cut into batches of fixed length, always at the same places. A batch is computed at
    once and its rows are stored together, so whoever resumes a sweep computes the same batches as
    if nothing had happened. (Numbers may depend on the batch in their last digits.)

    Args:
        items: what there is to do.
        work: makes the rows of some items.
        store: where rows go.
        batch: how many items are computed together.
        progress: called with the rows that were just stored.
    """
    for begin in range(0, len(items), batch):
        some = items[begin : begin + batch]
        known = store.known(item.key for item in some)
        missing = [item for item in some if item.key not in known]
        if missing:
            rows = work(missing)
            store.add(rows)
            if progress is not None:
                progress(rows)
