"""Splits of neurons on boxes of splits of inputs. The truth is that of rationals."""

import numpy as np
import pytest
from exact import dense, random_layers, smallest_violation, vnnlib

from stagecert.verify import Verification, grafts, resuming, verify
from stagecert.verify.grafts import Grafter
from stagecert_check import check

LOW, HIGH = (-1, -1), (1, 1)


@pytest.fixture
def grown(monkeypatch):
    """How many trees were grown on boxes."""
    found, real = [], Grafter.grown

    def counted(self, *arguments):
        trees = real(self, *arguments)
        found.extend(trees.values())
        return trees

    monkeypatch.setattr(Grafter, "grown", counted)
    # Neither whole boxes nor trees on them are to decide anything.
    monkeypatch.setattr(Verification, "_refute_whole_boxes", lambda self: None)
    return found


def close(seed: int, above: float):
    """A network, and the property that its first output is at most its minimum plus a number."""
    layers = random_layers(seed)
    least = smallest_violation(layers, LOW, HIGH, [(np.array([1, 0, 0]), np.zeros(2), 0.0)])
    return dense(layers), vnnlib(LOW, HIGH, f"(<= Y_0 {least + above:.12f})", 3)


def test_what_they_refute_the_checker_accepts(grown, tmp_path):
    for seed in range(8):
        model, text = close(seed, -1e-3)
        found = verify(model, text, 60)
        assert (found.answer, found.checked) == ("unsat", True), found.reason
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        (tmp_path / "p.vnnlib").write_text(text)
        (tmp_path / "c.cert").write_bytes(found.certificate)
        assert check(*(tmp_path / name for name in ("m.onnx", "p.vnnlib", "c.cert"))).accepted
    assert grown


@pytest.mark.parametrize("seed", range(4))
def test_a_counterexample_is_never_refuted(grown, seed):
    assert verify(*close(seed, 1e-3), 20).answer != "unsat"


@pytest.mark.parametrize("seed", range(4))
def test_wrong_trees_lead_to_no_unsat(grown, seed, monkeypatch):
    monkeypatch.setattr(grafts, "ROUNDING", -1e3)  # whatever the bound, it counts as proven
    found = verify(*close(seed, 1e-3), 20)
    assert grown or found.answer == "sat"
    assert found.answer != "unsat"


def test_without_a_check_there_are_none(grown):
    assert verify(*close(0, -1e-3), 60, check=False).answer == "unsat"
    assert not grown


def test_they_are_kept_in_files(grown, tmp_path):
    for seed in range(8):
        work = Verification(*close(seed, -1e-3), 60)
        work.run()
        splitter = work.splitter
        if splitter is not None and splitter.tree is not None and splitter.tree.grafts:
            break
    else:
        pytest.fail("no trees were grown")
    resuming.save(tmp_path / "s", "model", "property", {"splitter": splitter})
    kept = splitter.tree.grafts
    splitter.tree.grafts = {}
    resuming.restore(tmp_path / "s", "model", "property", {"splitter": splitter})
    assert splitter.tree is not None
    assert splitter.tree.grafts.keys() == kept.keys()
    for where, graft in splitter.tree.grafts.items():
        assert isinstance(graft, grafts.Graft)
        np.testing.assert_array_equal(graft.forces, kept[where].forces)
