"""Sweeps on real Ray clusters: the table of one process, whatever is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sweep_works
from sweep_works import CONFIGURATION, Logged, alive, items, squares, table, wait_until

import stagecert
from benchmarks.sweeps.nodes import Nodes
from stagecert import sweeps
from stagecert.errors import ProblemError
from stagecert.sweeps import Ray, Store

ray = pytest.importorskip("ray")
HERE = Path(__file__).parent
# Ray's processes end with the session, and its sockets with them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

# Workers cannot import modules of tests.
ray.cloudpickle.register_pickle_by_value(sweep_works)


@pytest.fixture(scope="module")
def nodes():
    with Nodes(1, 1) as nodes:
        yield nodes


@pytest.fixture
def store():
    with Store(None, CONFIGURATION) as store:
        yield store


def test_two_nodes_one_of_which_is_killed(nodes, store, tmp_path):
    work = Logged(tmp_path / "log", seconds=0.02, gates={0: 2})
    engine = Ray(nodes.address, workers=2)
    sweeps.run(items(60), work, store, batch=4, engine=engine)
    assert table(store) == squares(60)
    assert set(work.begun().values()) == {1}
    assert len(work.processes()) == 2
    wait_until(lambda: not any(map(alive, work.processes())))

    again = Logged(tmp_path / "again", seconds=0.02, gates={0: 2})

    def kill():
        wait_until(lambda: len(again.processes()) == 2)
        nodes.kill_or_add()

    killer = threading.Thread(target=kill)
    killer.start()
    with Store(None, CONFIGURATION) as store:
        sweeps.run(items(200), again, store, batch=4, engine=engine)
        killer.join()
        assert table(store) == squares(200)
    assert max(again.begun().values()) <= 2
    nodes.kill_or_add()


@pytest.mark.slow
def test_the_same_table_of_200_images_whatever_computes_it(nodes, tmp_path):
    digits = Path(stagecert.__file__).parent / "digits"
    arguments = [
        sys.executable, "-c", "from stagecert.cli import main; main()", "robust",
        digits / "digits.onnx", "--data", digits / "digits.npz", "--eps", "0.08", "--limit", "200",
        "--batch", "25", "--method", "backward", "--restarts", "1", "--quiet", "--no-report",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    tables = {}
    for name, engine in (
        ("process", []), ("processes", ["--workers", "2"]),
        ("ray", ["--ray", nodes.address, "--workers", "2"]),
    ):  # fmt: skip
        out = tmp_path / name
        done = subprocess.run(
            [*arguments, "--out", out, *engine], env=environment, check=False, text=True,
            capture_output=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert json.loads((out / "summary.json").read_text())["complete"]
        names = ("results.csv", "counterexamples.npz", "summary.json")
        tables[name] = [(out / file).read_bytes() for file in names]
    assert tables["process"] == tables["processes"] == tables["ray"]


DRIVER = """
import sys
from pathlib import Path
import ray
import sweep_works
from stagecert import sweeps
ray.cloudpickle.register_pickle_by_value(sweep_works)
folder = Path(sys.argv[1])
with sweeps.Store(folder / "out", sweep_works.CONFIGURATION) as store:
    work = sweep_works.Logged(folder / "log", seconds=0.02)
    engine = sweeps.Ray(sys.argv[2], workers=2)
    sweeps.run(sweep_works.items(200), work, store, batch=4, engine=engine)
"""


def test_the_driver_and_a_worker_are_killed(nodes, tmp_path):
    work = Logged(tmp_path / "log")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, tmp_path, nodes.address],
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    wait_until(lambda: len(work.lines()) > 30)
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(map(alive, work.processes())))
    before = work.begun()
    rest = Logged(tmp_path / "rest", seconds=0.02)

    def kill():
        wait_until(lambda: len(rest.lines()) > 10)
        os.kill(rest.processes()[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with Store(tmp_path / "out", CONFIGURATION) as store:
        stored = {row.place for row in store.rows()}
        assert stored
        sweeps.run(items(200), rest, store, batch=4, engine=Ray(nodes.address, workers=2))
        killer.join()
        assert table(store) == squares(200)
    after = rest.begun()
    assert not stored & set(after)
    assert max(before.values()) == 1
    assert max(after.values()) <= 2


@pytest.mark.slow
def test_a_cluster_of_its_own_isolates_what_breaks(store, tmp_path):
    bad = {3: "exit", 9: "memory", 14: "raise", 20: "hang"}
    work = sweep_works.Fickle(tmp_path / "log", bad)
    sweeps.run(
        items(22), work, store, batch=2, engine=Ray("local", 1), timeout=5, memory=1.0, retries=0
    )
    notes = {
        3: "its process ended with status 3",
        9: "took more than 1 GiB of memory",
        14: "ValueError: this one is bad",
        20: "took more than 5 s",
    }
    assert table(store) == squares(22, notes)
    assert not ray.is_initialized()
    assert work.starts() > 2
    wait_until(lambda: not any(map(alive, work.processes())))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "There is no Ray cluster at"),
        ("127.0.0.1:port", "There is no Ray cluster at"),
        ("ray://127.0.0.1:10001", "give HOST:PORT"),
        ("somewhere", "address is HOST:PORT"),
    ],
)
def test_clusters_that_are_not_there(address, message, store, tmp_path):
    work = Logged(tmp_path / "log")
    with pytest.raises(ProblemError, match=message):
        sweeps.run(items(1), work, store, batch=1, engine=Ray(address))
    with pytest.raises(ProblemError, match="workers must be at least 1"):
        Ray(workers=0)
