"""Works for sweeps that log every item they begin with, and misbehave where they are told to."""

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from stagecert.sweeps import Item, Row

CONFIGURATION = {"task": "test"}


def items(count: int) -> list[Item]:
    return [Item(place, f"k{place}") for place in range(count)]


@dataclass
class Logged:
    """Squares the place.

    Attributes:
        log: a file that gets a line "place pid" for each item when it is begun.
        bad: what is wrong with some places: "exit", "segfault", "memory", "hang", "raise".
        seconds: what each item takes.
        gates: from such a place on, items wait until this many processes have begun something:
            a process that starts slowly still gets its share.
    """

    log: Path
    bad: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    gates: dict[int, int] = field(default_factory=dict)

    def prepare(self):
        # Opened for appending: lines of several processes do not mix.
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def rows(some):
            for item in some:
                os.write(log, f"{item.place} {os.getpid()}\n".encode())
            return [self.row(item) for item in some]

        return rows

    def row(self, item: Item) -> Row:
        misbehave(self.bad.get(item.place))
        for place, count in self.gates.items():
            if place <= item.place:
                wait_until(lambda count=count: len(self.processes()) >= count)
        time.sleep(self.seconds)
        return Row(item.key, item.place, {"square": item.place**2, "note": None})

    def failed(self, item: Item, why: str) -> Row:
        return Row(item.key, item.place, {"square": None, "note": why})

    def begun(self) -> Counter:
        """How often each place was begun."""
        return Counter(place for place, _ in self.lines())

    def processes(self) -> list[int]:
        """Those that computed something, the latest last."""
        return list(dict.fromkeys(process for _, process in self.lines()))

    def lines(self) -> list[tuple[int, int]]:
        if not self.log.exists():
            return []
        text = self.log.read_text()
        whole = text[: text.rfind("\n") + 1]
        return [(int(a), int(b)) for a, b in map(str.split, whole.splitlines())]


@dataclass
class Fickle(Logged):
    """Cannot be prepared the second time."""

    def prepare(self):
        with open(f"{self.log}-starts", "a") as file:
            file.write("+")
        if self.starts() == 2:
            raise OSError("not now")
        return super().prepare()

    def starts(self) -> int:
        return Path(f"{self.log}-starts").stat().st_size


def misbehave(how: str | None) -> None:
    if how == "exit":
        os._exit(3)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        time.sleep(3600)
    if how == "raise":
        raise ValueError("this one is bad")
    if how == "memory":
        kept = []
        while True:
            kept.append(b"x" * 2**24)


def table(store) -> list[tuple]:
    return [(row.key, row.place, row.data) for row in store.rows()]


def squares(count: int, notes: dict[int, str] | None = None) -> list[tuple]:
    """The table that a sweep must leave."""
    notes = notes or {}
    return [
        (f"k{n}", n, {"square": None if n in notes else n**2, "note": notes.get(n)})
        for n in range(count)
    ]


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
