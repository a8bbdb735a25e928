"""What there is to do, what became of it, and what is tried again."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from stagecert.sweeps.store import Row


@dataclass(frozen=True)
class Item:
    """One of the things to be done: where it is in the list, and what identifies it."""

    place: int
    key: str


Compute = Callable[[Sequence[Item]], list[Row]]


class Work(Protocol):
    """How rows are made. It is pickled once and sent to every worker once."""

    def prepare(self) -> Compute:
        """Loads and compiles what is needed, once in each process.

        Returns what makes the rows of some items, one for each, in their order. Rows must not
        depend on which items come together.
        """
        ...

    def failed(self, item: Item, why: str) -> Row:
        """The row of an item that crashed, raised an exception or used too much time or memory."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What became of some items.

    Attributes:
        kind: "rows" if they were computed, "raised" an exception, "late", "died" with the process,
            or "lost" with all that looked after it. Of a process that is starting: "ready",
            "unprepared" if the work could not be prepared, "stillborn" if it ended before that.
        rows: for "rows".
        why: for all others.
    """

    kind: Literal["rows", "raised", "late", "died", "lost", "ready", "unprepared", "stillborn"]
    rows: Sequence[Row] = ()
    why: str = ""


@dataclass
class Task:
    """Items to be computed together."""

    items: list[Item]
    deaths: int = 0  # of processes that were computing them


class Tasks:
    """Hands out batches, and isolates the items that break them.

    A batch whose process died is tried again, since it may have died for reasons of its own: it was
    killed, the machine went down, another process took the memory. If that happens too often, its
    items are tried one by one, each as often again, and those whose process still dies get rows
    that say so. An exception or a timeout will not go away: the items are tried one by one at once,
    and only once.
    """

    def __init__(
        self, batches: Iterator[list[Item]], failed: Callable[[Item, str], Row], retries: int
    ):
        self._batches, self._failed, self._retries = batches, failed, retries
        self._again: deque[Task] = deque()
        self._out = 0

    @property
    def left(self) -> bool:
        """Whether there is something to take."""
        if not self._again and (items := next(self._batches, None)) is not None:
            self._again.append(Task(items))
        return bool(self._again)

    def take(self) -> Task | None:
        """Something to do, if there is anything now."""
        if not self.left:
            return None
        self._out += 1
        return self._again.popleft()

    def give_back(self, task: Task) -> None:
        """Says that a task was not begun."""
        self._out -= 1
        self._again.appendleft(task)

    def settle(self, task: Task, outcome: Outcome) -> list[Row]:
        """Says what became of a task; returns the rows that are final."""
        self._out -= 1
        if outcome.kind == "rows":
            return list(outcome.rows)
        if outcome.kind == "died":
            task.deaths += 1
            if task.deaths <= self._retries:
                self._again.append(task)
                return []
        if len(task.items) > 1:
            self._again.extend(Task([item]) for item in task.items)
            return []
        return [self._failed(task.items[0], outcome.why)]

    @property
    def under_way(self) -> bool:
        """Whether a task was taken that is not settled."""
        return self._out > 0


def attempt(compute: Compute, items: Sequence[Item]) -> Outcome:
    """Computes rows; exceptions are outcomes."""
    try:
        rows = compute(items)
        if [row.key for row in rows] != [item.key for item in items]:
            raise ValueError("the rows are not those of the items")
    except Exception as error:
        return Outcome("raised", why=said(error))
    return Outcome("rows", rows)


def said(error: BaseException) -> str:
    """An exception as text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
