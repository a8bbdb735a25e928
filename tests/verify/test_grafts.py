"""Splits of neurons on boxes of splits of inputs. The truth is that of rationals."""

import numpy as np
import pytest
from exact import dense, random_layers, smallest_violation, vnnlib

from stagecert import networks
from stagecert.verify import Verification, grafts, resuming, verify
from stagecert.verify.grafts import Grafter
from stagecert.verify.models import OpenModel
from stagecert.verify.queries import groups_of
from stagecert.verify.splitting import Splitter
from stagecert_check import check, properties
from stagecert_check.checker import Checker

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


def test_boxes_that_the_checker_does_not_confirm_are_cut(grown, monkeypatch):
    """Trees that are wrong at first cost boxes, but no answer."""
    real, reopened = Splitter.reopen, []

    def honest(self, refuted):
        reopened.append(len(refuted))
        assert self.grafter is not None
        self.grafter.rounding = 1e-5
        return real(self, refuted)

    monkeypatch.setattr(Splitter, "reopen", honest)
    monkeypatch.setattr(grafts, "ROUNDING", -0.05)
    for seed in range(4):
        found = verify(*close(seed, -1e-3), 60)
        assert (found.answer, found.checked) == ("unsat", True), found.reason
    assert grown
    assert reopened


def test_what_is_reopened_are_the_boxes_of_the_case_and_no_others():
    """Of two cases: boxes that were cut for the second have parts that are open for the first."""
    layers = random_layers(2)
    rows = [(np.array([1, 0, 0]), np.zeros(2), 0.0), (np.array([0, 1, 0]), np.zeros(2), 0.0)]
    limits = [smallest_violation(layers, LOW, HIGH, [row]) - 1e-3 for row in rows]
    formula = f"(or (<= Y_0 {limits[0]:.12f}) (<= Y_1 {limits[1]:.12f}))"
    text = vnnlib(LOW, HIGH, formula, 3)
    network, groups = groups_of(networks.load(dense(layers)), properties.load(text))
    checker = Checker(OpenModel(dense(layers)).program, properties.load(text))
    splitter = Splitter(network, groups, [np.ones(2, bool)], keep=True, checker=checker)
    tree = splitter.tree
    assert tree is not None
    # The box is cut twice; the first case was refuted on the whole of it, the second on the parts.
    tree.group += [0] * 4
    tree.children, tree.axis, tree.cut = {0: 1, 2: 3}, {0: 0, 2: 1}, {0: 0.25, 2: -0.5}
    tree.closed = [(0, 0, 0, 1.0), (1, 1, 1, 1.0), (3, 1, 1, 1.0), (4, 1, 1, 1.0)]
    splitter.stack, splitter.share = splitter.stack[:0], splitter.share[:0]
    splitter.finished = 1.0
    assert splitter.reopen({(0, 0), (4, 1)})
    assert splitter.finished == 0
    assert tree.closed == [(1, 1, 1, 1.0), (3, 1, 1, 1.0)]
    stack = splitter.stack
    area = np.prod(stack.upper - stack.lower, axis=1)
    assert area.sum() == pytest.approx(4)
    assert np.all(stack.open[:, 0])
    part = np.all((stack.lower >= [0.25, -0.5]) & (stack.upper <= [1, 1]), axis=1)
    np.testing.assert_array_equal(stack.open[:, 1], part)
    assert area[part].sum() == pytest.approx(0.75 * 1.5)
    np.testing.assert_allclose(splitter.share.sum(), 1)
    # Cuts that were there stay as they are.
    assert {k: tree.children[k] for k in (0, 2)} == {0: 1, 2: 3}


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
