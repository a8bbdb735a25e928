"""The store of sweeps: rows survive kill -9, once stored they are never computed again."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from stagecert import sweeps
from stagecert.errors import ProblemError
from stagecert.sweeps import Item, Row, Store

HOW = {"eps": "1/10", "seed": 0}


def row(place: int) -> Row:
    return Row(f"k{place}", place, {"bound": place / 7}, 0.5, b"x" * (place % 3) or None)


def test_rows_come_back_in_order_of_their_places(tmp_path):
    with Store(tmp_path / "new" / "folder", HOW) as store:
        store.add([row(2), row(0)])
        store.add([row(1)])
        assert len(store) == 3
        assert store.known(["k0", "k7", "k2"]) == {"k0", "k2"}
    with Store(tmp_path / "new" / "folder", dict(reversed(HOW.items()))) as store:
        assert list(store.rows(blobs=True)) == [row(0), row(1), row(2)]
        assert all(one.blob is None for one in store.rows())


def test_adding_is_all_or_nothing_and_nothing_is_added_twice(tmp_path):
    with Store(tmp_path, HOW) as store:
        store.add([row(0)])
        with pytest.raises(ProblemError, match="cannot be stored"):
            store.add([row(1), row(0)])
        assert len(store) == 1
        store.add([row(1)])


def test_removed_rows_are_computed_again(tmp_path):
    with Store(tmp_path, HOW) as store:
        store.add([row(0), row(1), row(2)])
        store.remove(["k2", "k0", "k9"])
        assert list(store.rows(blobs=True)) == [row(1)]
        store.add([row(0)])
        assert store.known(["k0", "k1", "k2"]) == {"k0", "k1"}


def test_another_configuration_is_refused_with_the_difference(tmp_path):
    Store(tmp_path, HOW).close()
    with pytest.raises(ProblemError, match=r"another configuration:\n  seed: 0 there, 1 now\n"):
        Store(tmp_path, {**HOW, "seed": 1})
    with pytest.raises(ProblemError, match=r"clip: None there, '0,1' now"):
        Store(tmp_path, {**HOW, "clip": "0,1"})
    # The lock was given back.
    Store(tmp_path, HOW).close()


def test_one_writer_at_a_time_and_readers_besides(tmp_path):
    with Store(tmp_path, HOW) as store:
        store.add([row(0)])
        with pytest.raises(ProblemError, match="Another process is writing"):
            Store(tmp_path, HOW)
        with Store.reader(tmp_path) as reader:
            assert [one.place for one in reader.rows()] == [0]
            assert reader.configuration == HOW
            assert reader.hash == store.hash
            with pytest.raises(ProblemError, match="readonly"):
                reader.add([row(1)])
        store.add([row(1)])
    Store(tmp_path, HOW).close()


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemError, match=r"file cannot be used as a folder: File exists\.$"):
        Store(tmp_path / "file", HOW)
    with pytest.raises(ProblemError, match="no results that can be read"):
        Store.reader(tmp_path / "nothing")
    (tmp_path / "rows.sqlite").write_bytes(b"rubbish" * 1000)
    with pytest.raises(ProblemError, match=r"rows.sqlite cannot be used: file is not a database"):
        Store(tmp_path, HOW)
    other = tmp_path / "other"
    Store(other, HOW).close()
    with sqlite3.connect(other / "rows.sqlite") as base:
        base.execute("UPDATE about SET value = '99' WHERE name = 'format'")
    base.close()
    with pytest.raises(ProblemError, match="in format '99'"):
        Store(other, HOW)


def test_a_sweep_computes_each_item_once_in_fixed_batches():
    items = [Item(place, f"k{place}") for place in range(10)]
    seen, shown = [], []

    class Work:
        def prepare(self):
            def rows(some):
                seen.append([item.place for item in some])
                if len(seen) == 3:
                    raise KeyboardInterrupt
                return [row(item.place) for item in some]

            return rows

        def failed(self, item, why):
            raise AssertionError(why)

    work = Work()
    with Store(None, HOW) as store:
        with pytest.raises(KeyboardInterrupt):
            sweeps.run(items, work, store, batch=4)
        sweeps.run(items, work, store, batch=4, progress=lambda rows: shown.append(len(rows)))
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [8, 9]]
        assert shown == [2]
        sweeps.run(items, work, store, batch=4)
        assert len(seen) == 4
        assert [one.place for one in store.rows()] == list(range(10))


def test_a_reader_undoes_what_a_killed_writer_left(tmp_path):
    """As kill -9 in the middle of a commit: the journal is there, and the database half changed."""
    folder, copy = tmp_path / "live", tmp_path / "killed"
    with Store(folder, HOW) as store:
        store.add([row(0)])
        store._base.execute("PRAGMA cache_size = 1")  # so that changes spill before the commit
        store._base.execute("BEGIN IMMEDIATE")
        for place in range(1, 200):
            store._base.execute(
                "INSERT INTO rows VALUES (?, ?, ?, ?, ?)", (f"k{place}", place, "{}", b"x" * 999, 0)
            )
        shutil.copytree(folder, copy)
        store._base.execute("ROLLBACK")
    assert (copy / "rows.sqlite-journal").stat().st_size > 0
    assert (copy / "rows.sqlite").stat().st_size > (folder / "rows.sqlite").stat().st_size
    with Store.reader(copy) as reader:
        assert list(reader.rows(blobs=True)) == [row(0)]
    with Store(copy, HOW) as store:
        store.add([row(1)])
        assert len(store) == 2


WRITER = """
import sys
from pathlib import Path
from stagecert.sweeps import Row, Store
with Store(Path(sys.argv[1]), {"eps": "1/10"}) as store:
    print("open", flush=True)
    place = len(store)
    while True:
        store.add([Row(f"k{n}", n, {"text": "x" * 500}) for n in range(place, place + 5)])
        place += 5
        print(place, flush=True)
"""


def test_kill_9_while_writing_leaves_whole_batches(tmp_path):
    draw = random.Random(0)
    told = 0
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        told = int(lines[-1]) if lines else told
        with Store.reader(tmp_path) as reader:
            assert len(reader) in (told, told + 5)
        with Store(tmp_path, {"eps": "1/10"}) as store:
            places = [one.place for one in store.rows()]
        # Nothing that was reported is lost; at most the one commit after it may be there too.
        assert places in (list(range(told)), list(range(told + 5)))
        told = len(places)
    assert told > 0
