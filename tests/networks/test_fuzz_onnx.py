"""A few mutants of each kind; `python -m benchmarks.fuzz` runs 100,000."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.fuzz import onnx_models, runner, vnnlib_files
from stagecert import networks
from stagecert_check import properties


@pytest.mark.parametrize("kind", ["onnx", "vnnlib"])
def test_mutants_are_read_or_refused(kind, tmp_path):
    found = [runner.outcome(kind, 123, number, tmp_path) for number in range(150)]
    assert [pair for pair in found if pair[0] == "failure"] == []
    assert {what for what, _ in found} == {"read", "refused"}


def test_what_is_mutated_is_sound_to_begin_with():
    for name in onnx_models.NAMES:
        assert networks.load(onnx_models.model(name)).nodes
    for text in vnnlib_files.SEEDS:
        assert properties.load(text).cases


def test_failures_are_noticed(tmp_path, monkeypatch):
    def crash(*_):
        raise IndexError("list index out of range")

    monkeypatch.setitem(runner.TRIES, "vnnlib", crash)
    what, detail = runner.outcome("vnnlib", 0, 0, tmp_path)
    assert what == "failure"
    assert "IndexError" in detail
