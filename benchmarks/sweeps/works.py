"""The works that engines are measured on."""

import os
import time
from collections import Counter
from pathlib import Path

import numpy as np

import stagecert
from stagecert.robust.robust import Robustness
from stagecert.sweeps import Item, Row

DIGITS = Path(stagecert.__file__).parent / "digits"


class Counted:
    """Another work, with a line "place pid" in a file for every item that is begun."""

    def __init__(self, work, log: Path):
        self.work, self.log = work, log

    def prepare(self):
        """See `sweeps.Work`."""
        compute = self.work.prepare()
        # Opened for appending: lines of several processes do not mix.
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def rows(items):
            for item in items:
                os.write(log, f"{item.place} {os.getpid()}\n".encode())
            return compute(items)

        return rows

    def failed(self, item: Item, why: str) -> Row:
        """See `sweeps.Work`."""
        return self.work.failed(item, why)


def read(log: Path) -> tuple[Counter, list[int]]:
    """How often each place was begun, and the processes that did, the latest last."""
    if not log.exists():
        return Counter(), []
    text = log.read_text()
    lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return Counter(int(place) for place, _ in lines), list(
        dict.fromkeys(int(process) for _, process in lines)
    )


class Spin:
    """Keeps one core busy for some milliseconds an item, or does nothing at all."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def prepare(self):
        """See `sweeps.Work`."""
        return lambda items: [self._row(item) for item in items]

    def _row(self, item: Item) -> Row:
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass
        return Row(item.key, item.place, {"place": item.place, "note": None}, self.seconds)

    def failed(self, item: Item, why: str) -> Row:
        """See `sweeps.Work`."""
        return Row(item.key, item.place, {"place": item.place, "note": why})


def images(count: int, batch: int, method: str) -> Robustness:
    """The digits that come with stagecert, repeated as often as needed."""
    with np.load(DIGITS / "digits.npz") as file:
        times = -(-count // len(file["labels"]))
        pictures = np.concatenate([file["images"]] * times)
        labels = np.concatenate([file["labels"]] * times)
    return Robustness(
        DIGITS / "digits.onnx", pictures, labels, "0.08", limit=count, batch=batch, method=method
    )
