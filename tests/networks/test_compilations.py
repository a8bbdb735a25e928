"""How much is compiled, and where it is kept."""

from importlib.resources import files
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.networks import ours
from stagecert import networks
from stagecert.compiling import compiled, keep_programs, use_compilation_cache
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
    assert jax.config.jax_compilation_cache_dir == str(folder)
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
    assert jax.config.jax_compilation_cache_dir is None
    with pytest.raises(NotADirectoryError):
        use_compilation_cache()


def test_times_of_the_benchmark_are_of_runs_without_compilation():
    jax.monitoring.register_event_duration_secs_listener(ours._note_compilation)
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
