"""How much is compiled, where it is kept, and who hears of it."""

import os
import subprocess
import sys
import threading
import time
from importlib.resources import files
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.networks import ours
from stagecert import compiling, networks
from stagecert.cli import app
from stagecert.compiling import compiled, keep_programs, use_compilation_cache
from stagecert.networks.bounding import bounds
from stagecert.verify import OpenModel, verify

DRAW = np.random.default_rng(3)


def programs(depth: int, width: int, **options) -> int:
    """How many programs bounds of a network with so many equal layers compile."""
    weights = [DRAW.normal(size=(width, width)) / np.sqrt(width) for _ in range(depth)]

    def function(x):
        for w in weights:
            x = jax.nn.relu(x @ w + 0.1)
        return x

    network = networks.from_jax(function, np.zeros(width))
    before, _ = compiled()
    networks.bound(network, -np.ones((1, width)), np.ones((1, width)), **options)
    return compiled()[0] - before


@pytest.mark.parametrize("kind", ["backward", "optimised"])
def test_equal_layers_share_their_programs(kind):
    options = dict(method="backward", intermediate=kind)
    few = programs(4, 23 if kind == "backward" else 25, **options)
    # Other shapes, so that nothing was compiled before.
    many = programs(9, 24 if kind == "backward" else 26, **options)
    assert 0 < many <= few <= 40


def test_a_property_compiles_little_and_the_next_one_nothing():
    """Of a small network only the comparison with ONNX Runtime and the attack are compiled."""
    folder = Path(str(files("stagecert"))) / "digits"
    model = OpenModel(folder / "digits.onnx")
    begin, _ = compiled()
    first = verify(model, folder / "a-small-radius.vnnlib", timeout=60)
    after, _ = compiled()
    assert first.answer == "unsat"
    assert after - begin <= 12
    assert 0 <= first.compiling <= first.seconds
    assert first.to_dict()["compiling_seconds"] == round(first.compiling, 3)
    second = verify(model, folder / "b-larger-radius.vnnlib", timeout=60)
    assert second.answer == "unsat"
    assert compiled()[0] == after
    assert second.compiling == 0


@pytest.fixture
def settings():
    """JAX's settings, put back afterwards."""
    names = (
        "jax_enable_x64",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_one_folder_of_the_user(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    folder = keep_programs()
    assert folder is not None
    assert folder.parent == tmp_path / "stagecert" / "compiled"
    assert getattr(jax.config, compiling.CACHE) == str(folder)
    # What JAX was told before stays.
    assert use_compilation_cache(tmp_path / "mine") == tmp_path / "mine"
    assert keep_programs() == tmp_path / "mine"
    jax.jit(lambda x: x * 3.25 + 1)(np.arange(7.0))
    assert list((tmp_path / "mine").iterdir())


def test_a_home_that_cannot_be_written_does_no_harm(settings, monkeypatch, tmp_path):
    closed = tmp_path / "file"
    closed.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    jax.config.update("jax_compilation_cache_dir", None)
    assert keep_programs() is None
    assert getattr(jax.config, compiling.CACHE) is None
    with pytest.raises(NotADirectoryError):
        use_compilation_cache()


IMPORTED = """
import jax
before = jax.config.jax_compilation_cache_dir
import stagecert.networks
print(before, jax.config.jax_compilation_cache_dir)
jax.jit(lambda x: x * 3.25 + 1)(jax.numpy.arange(7.0))
"""


@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_importing_networks_turns_the_cache_on(closed, tmp_path):
    """In a process of its own, as a user's is: nothing has told JAX of a folder."""
    folder = tmp_path / "cache"
    if closed:
        folder.write_text("no folder")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    environment |= {"XDG_CACHE_HOME": str(folder), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTED], env=environment, capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    before, after = done.stdout.split()
    assert before == "None"
    if closed:
        assert after == "None"
        assert folder.read_text() == "no folder"
    else:
        assert Path(after).parent == folder / "stagecert" / "compiled"
        assert list(Path(after).iterdir())


@pytest.fixture
def watch(monkeypatch):
    """The watch of a fresh process, which JAX does not know: tests say what it hears."""
    found = compiling._Watch()
    monkeypatch.setattr(found, "listen", lambda: None)
    monkeypatch.setattr(compiling, "_WATCH", found)
    return found


def begin(watch):
    watch.begins("/jax/compilation_cache/compile_requests_use_cache")


def end(watch, seconds):
    watch.ends("/jax/core/compile/backend_compile_duration", seconds, fun_name="f")


def test_long_compilations_are_announced(watch, monkeypatch):
    """Commands tell of each compilation that goes on; not of quick ones, or of other events."""
    told, held = [], threading.Event()
    monkeypatch.setattr(compiling, "LONG", 0.05)
    begin(watch)  # nobody wants to know yet
    compiling.announce(lambda text: told.append(text) or held.set())
    begin(watch)
    end(watch, 0.01)
    watch.begins("/jax/another/event")
    assert not held.wait(0.1)
    begin(watch)
    assert held.wait(10)
    assert told == [compiling.TEXT]


def test_bounds_log_one_line_while_they_compile(watch, monkeypatch, caplog):
    monkeypatch.setattr(compiling, "PATIENCE", 60.0)
    with compiling.announced():
        for _ in range(2):
            begin(watch)
            end(watch, 1.0)
        assert not caplog.records
        assert watch.call.left == 58
        # Many programs take long together: the next one is told of at once, and only that.
        begin(watch)
        end(watch, 58.0)
        for _ in range(2):
            begin(watch)
            until = time.monotonic() + 10
            while time.monotonic() < until and not caplog.records:
                time.sleep(0.01)
            end(watch, 1.0)
        assert len(caplog.records) == 1
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("stagecert", "WARNING")
    assert "compiling" in record.message
    assert watch.call is None


def test_bounds_are_announced(watch, monkeypatch):
    """`bound` is such a call, and silent in commands, which have their own words."""
    seen = []
    monkeypatch.setattr(bounds, "regions_of", lambda *_: seen.append(watch.call) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        networks.bound(networks.from_jax(lambda x: 2 * x, np.zeros(1)), [[0.0]], [[1.0]])
    assert isinstance(seen[0], compiling._Call)


@pytest.mark.parametrize(("name", "options"), [
    ("robust", ["m.onnx", "--data", "d.npz", "--eps", "1", "--out", "o"]),
    ("sweep", ["list.csv", "--out", "o"]),
])  # fmt: skip
def test_commands_announce_compilations(name, options, monkeypatch, settings):
    def stop(tell):
        tell("compiling something")
        tell("compiling something")
        raise typer.Exit(7)

    monkeypatch.setattr(compiling, "announce", stop)
    # The package has the command under the module's name.
    monkeypatch.setattr(sys.modules[f"stagecert.cli.{name}"], "Watcher", lambda *_: Mock())
    for more, words in (([], ["Compiling something"]), (["--quiet"], [])):
        done = CliRunner().invoke(app, [name, *options, *more])
        assert done.exit_code == 7
        assert done.stderr.splitlines() == words


def test_times_of_the_benchmark_are_of_runs_without_compilation():
    runs = []
    program = jax.jit(lambda x: np.float64(2.5) * x + 0.125)

    def work(first):
        runs.append(first)
        # The first whole run compiles something that the run before it did not.
        return float(np.sum(program(np.ones(5 if first is not None else 6))))

    result, times = ours._timed(work, 1)
    assert result == 2.625 * 6
    assert runs == [1, None, None]
    assert times["compiling"] == 0
    assert times["cpu"] >= 0
