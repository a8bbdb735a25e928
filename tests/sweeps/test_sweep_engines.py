"""Engines on one machine: the same table whatever crashes, hangs or is killed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sweep_works import CONFIGURATION, Logged, alive, items, squares, table, wait_until

from stagecert import sweeps
from stagecert.errors import ProblemError
from stagecert.sweeps import InProcess, Item, Processes, Row, Store, sweep
from stagecert.sweeps.engines import environments
from stagecert.sweeps.tasks import Outcome, Tasks


@pytest.fixture
def store():
    with Store(None, CONFIGURATION) as store:
        yield store


@pytest.mark.parametrize("engine", [InProcess(), Processes(2)])
def test_all_rows_each_computed_once(engine, store, tmp_path):
    work, shown = Logged(tmp_path / "log"), []
    sweeps.run(items(50), work, store, batch=4, engine=engine, progress=shown.extend)
    assert table(store) == squares(50)
    assert set(work.begun().values()) == {1}
    assert sorted(row.place for row in shown) == list(range(50))
    before = work.processes()
    assert (os.getpid() in before) == (engine == InProcess())
    sweeps.run(items(51), work, store, batch=4, engine=engine)
    assert table(store) == squares(51)
    assert work.begun()[50] == 1
    assert not any(alive(process) for process in work.processes() if process != os.getpid())


def test_items_that_break_their_process_get_rows_that_say_so(store, tmp_path):
    bad = {3: "exit", 9: "memory", 20: "raise", 25: "segfault"}
    work = Logged(tmp_path / "log", bad)
    sweeps.run(items(30), work, store, batch=6, engine=Processes(2), memory=1.0, retries=0)
    notes = {
        3: "its process ended with status 3",
        9: "took more than 1 GiB of memory",
        20: "ValueError: this one is bad",
        25: "its process was killed by SIGSEGV",
    }
    assert table(store) == squares(30, notes)
    # Once with its batch and once alone.
    assert max(work.begun().values()) == 2


def test_an_item_that_takes_too_long(store, tmp_path):
    work = Logged(tmp_path / "log", {2: "hang"})
    sweeps.run(items(6), work, store, batch=3, engine=Processes(1), timeout=2.0)
    assert table(store) == squares(6, {2: "took more than 2 s"})
    assert work.begun()[2] == 2


def test_in_this_process_exceptions_are_isolated_and_limits_refused(store, tmp_path):
    work = Logged(tmp_path / "log", {7: "raise"})
    limits: list[dict[str, Any]] = [{"timeout": 1.0}, {"memory": 1.0}]
    for limit in limits:
        with pytest.raises(ProblemError, match="need workers or Ray"):
            sweeps.run(items(1), work, store, batch=4, **limit)
    sweeps.run(items(10), work, store, batch=4)
    assert table(store) == squares(10, {7: "ValueError: this one is bad"})


def test_killed_workers_lose_nothing(store, tmp_path):
    # The third process is the one that takes the place of the killed one.
    work = Logged(tmp_path / "log", seconds=0.02, gates={0: 2, 50: 3})
    draw = random.Random(0)

    def kill():
        wait_until(lambda: len(work.lines()) > 10)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(work.processes()[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    sweeps.run(items(100), work, store, batch=4, engine=Processes(2))
    killer.join()
    assert table(store) == squares(100)
    begun = work.begun()
    assert max(begun.values()) <= 2
    assert sum(begun.values()) <= 100 + 4
    assert len(work.processes()) == 3


DRIVER = """
import sys
from pathlib import Path
from sweep_works import CONFIGURATION, Logged, items
from stagecert import sweeps
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with sweeps.Store(folder / "out", CONFIGURATION) as store:
        work = Logged(folder / "log", seconds=0.02, gates={0: 2})
        sweeps.run(items(100), work, store, batch=4, engine=sweeps.Processes(2))
"""


def test_a_killed_driver_leaves_no_processes_and_loses_nothing(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    work = Logged(tmp_path / "log")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    driver = subprocess.Popen([sys.executable, tmp_path / "driver.py", tmp_path], env=environment)
    wait_until(lambda: len(work.lines()) > 30 and len(work.processes()) == 2)
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(map(alive, work.processes())), 10)
    with Store(tmp_path / "out", CONFIGURATION) as store:
        assert len(store) > 0
        sweeps.run(items(100), work, store, batch=4)
        assert table(store) == squares(100)
    assert max(work.begun().values()) <= 2


class Unprepared(Logged):
    def prepare(self):
        raise OSError("no model")


class Stillborn(Logged):
    def prepare(self):
        os._exit(7)


class Unsendable(Logged):
    def row(self, item):
        return Row(item.key, item.place, {"f": lambda: None} if item.place == 1 else {})


class Other(Logged):
    def row(self, item):
        return Row("other", item.place, {})


@pytest.mark.parametrize(
    ("work", "message"),
    [(Unprepared, "cannot be started: OSError: no model"), (Stillborn, "ended with status 7")],
)
def test_workers_that_cannot_start_end_the_sweep(work, message, store, tmp_path):
    with pytest.raises(ProblemError, match=message):
        sweeps.run(items(3), work(tmp_path / "log"), store, batch=1, engine=Processes(1))
    assert len(store) == 0


def test_rows_that_cannot_be_sent_or_are_not_those_asked_for(store, tmp_path):
    sweeps.run(items(2), Unsendable(tmp_path / "log"), store, batch=2, engine=Processes(1))
    notes = [row.data.get("note") for row in store.rows()]
    assert notes[0] is None
    assert "pickle" in notes[1]
    with Store(None, CONFIGURATION) as other:
        sweeps.run(items(1), Other(tmp_path / "log"), other, batch=1)
        assert "not those of the items" in next(other.rows()).data["note"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timeout": 0}, "timeout must be positive"),
        ({"memory": float("nan")}, "memory must be positive"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"retries": -1}, "retries at least 0"),
        ({"items": [Item(0, "a"), Item(1, "a")]}, "the same key"),
    ],
)
def test_bad_arguments_of_a_sweep(change, message, store, tmp_path):
    arguments = {"items": items(2), "work": Logged(tmp_path / "log"), "batch": 1, **change}
    with pytest.raises(ProblemError, match=message):
        sweeps.run(store=store, **arguments)
    with pytest.raises(ProblemError, match="workers must be at least 1"):
        Processes(0)


# -- what is decided without any process ---------------------------------------------------------


def drawn(retries: int, outcome) -> tuple[list[Row], list[list[int]]]:
    """The rows and the tries of four items in a batch; `outcome` says what becomes of places."""
    tasks = Tasks(iter([items(4)]), Logged(Path()).failed, retries)
    rows, tries = [], []
    while (task := tasks.take()) is not None:
        places = [item.place for item in task.items]
        tries.append(places)
        found = outcome(places, len(tries))
        if found == "rows":
            done = Outcome("rows", [Row(item.key, item.place, {}) for item in task.items])
        else:
            done = Outcome(found, why=found)
        rows += tasks.settle(task, done)
    assert not tasks.under_way
    return rows, tries


def test_what_is_tried_again_and_how_often():
    whole, alone = [0, 1, 2, 3], [[0], [1], [2], [3]]
    _, tries = drawn(1, lambda places, turn: "died" if turn == 1 else "rows")
    assert tries == [whole, whole]
    rows, tries = drawn(1, lambda places, turn: "died" if 2 in places else "rows")
    assert sorted(tries) == sorted([whole, whole, *alone, [2]])
    assert [row.data.get("note") for row in sorted(rows, key=lambda row: row.place)] == [
        None, None, "died", None,
    ]  # fmt: skip
    for kind in ("raised", "late"):
        rows, tries = drawn(1, lambda places, turn, kind=kind: kind if 2 in places else "rows")
        assert tries == [whole, *alone]
        assert len(rows) == 4


def test_rows_are_stored_in_groups_so_that_the_disk_takes_a_small_share(monkeypatch, tmp_path):
    """A commit takes 10 ms on this clock and an item 1 ms: one commit is made for 190 items."""
    now, commits, told = [0.0], [], []
    monkeypatch.setattr(sweep.time, "monotonic", lambda: now[0])

    class Slow(Store):
        def add(self, rows: Any):
            commits.append(len(rows))
            now[0] += 0.01
            super().add(rows)

    class Work(Logged):
        def row(self, item):
            now[0] += 0.001
            return super().row(item)

    def progress(rows):
        told.extend(rows)
        assert len(told) == len(store)

    with Slow(None, CONFIGURATION) as store:
        sweeps.run(items(1000), Work(tmp_path / "log"), store, batch=1, progress=progress)
        assert table(store) == squares(1000)
    assert commits[0] == 1
    assert all(189 <= count <= 191 for count in commits[1:-1])
    assert sum(commits) == len(told) == 1000


def test_each_worker_gets_a_gpu_and_its_share(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert environments(3, []) == [{}, {}, {}]
    assert environments(None, ["0", "3"]) == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "3"},
    ]
    assert environments(1, ["0", "3"]) == [{"CUDA_VISIBLE_DEVICES": "0"}]
    shared = environments(3, ["0", "3"])
    assert [one["CUDA_VISIBLE_DEVICES"] for one in shared] == ["0", "3", "0"]
    assert {one["XLA_PYTHON_CLIENT_MEM_FRACTION"] for one in shared} == {"0.450"}
