"""Searches that are interrupted go on from a file, which is never trusted."""

import zipfile
from dataclasses import replace

import pytest
from exact import dense, random_layers, row_text, smallest_violation, vnnlib

from stagecert.errors import ProblemError
from stagecert.verify import resuming, splitting, tree
from stagecert.verify.attack import Attacker
from stagecert.verify.grafts import Grafter
from stagecert.verify.verify import Verification

LOW, HIGH = [-1, -1], [1, 1]
LAYERS = random_layers(5, (2, 5, 4, 3))
ROW = ([1.0, -0.5, 0.25], [0.0, 0.0], 0.0)


@pytest.fixture(scope="module")
def least():
    return smallest_violation(LAYERS, LOW, HIGH, [ROW])


def text(limit: float) -> str:
    return vnnlib(LOW, HIGH, row_text(*ROW[:2], limit), 3)


@pytest.fixture
def small_steps(monkeypatch):
    """Splits of neurons, a node or two at a time."""
    import sys

    monkeypatch.setattr(splitting, "LARGEST_DIMENSION", 0)
    monkeypatch.setattr(tree, "HERE", replace(tree.HERE, lanes=2))
    monkeypatch.setattr(sys.modules["stagecert.verify.verify"], "FIRST_TREE_STEPS", 1)


def interrupted(property: str, file, line: str, after: int) -> Verification:
    """A run that is interrupted after it has said so many lines of a kind."""
    said = 0

    def hear(what: str) -> None:
        nonlocal said
        said += what.startswith(line)
        if said == after:
            work.interrupt()

    work = Verification(dense(LAYERS), property, 120, progress=hear, resume=file)
    return work


def test_a_tree_is_decided_in_many_runs(least, tmp_path, small_steps):
    file, nodes = tmp_path / "search", []
    for _ in range(200):
        verdict = interrupted(text(least - 1e-3), file, "splits of neurons", 4).run()
        nodes.append(verdict.boxes)
        if verdict.decided:
            break
        assert (verdict.answer, verdict.reason) == ("unknown", "Interrupted.")
        assert file.exists()
        assert verdict.closed is not None
        assert 0 <= verdict.closed <= 1
        assert f"{verdict.boxes} nodes were seen" in (verdict.standing or "")
    assert (verdict.answer, verdict.checked) == ("unsat", True), verdict.reason
    assert len(nodes) > 2
    assert nodes[1:-1] == sorted(set(nodes[1:-1]))
    assert not file.exists()


def test_splits_of_inputs_go_on_too(least, tmp_path, monkeypatch):
    file, seen = tmp_path / "search", []
    monkeypatch.setattr(splitting, "BATCH", 2)
    monkeypatch.setattr(Grafter, "able", lambda program: False)
    for _ in range(200):
        verdict = interrupted(text(least - 1e-2), file, "splitting", 5).run()
        seen.append(verdict.boxes)
        if verdict.decided:
            break
        assert file.exists()
    assert (verdict.answer, verdict.checked) == ("unsat", True), verdict.reason
    assert len(seen) > 2
    assert seen == sorted(set(seen))


def test_files_of_other_questions_are_refused(least, tmp_path, small_steps):
    file = tmp_path / "search"
    interrupted(text(least - 1e-3), file, "splits of neurons", 3).run()
    kept = file.read_bytes()
    with pytest.raises(ProblemError, match="of another property"):
        Verification(dense(LAYERS), text(least - 1e-2), 60, resume=file).run()
    with pytest.raises(ProblemError, match="of another property"):
        Verification(dense(LAYERS), text(least - 1e-3), 60, check=False, resume=file).run()
    other = dense(random_layers(2, (2, 5, 4, 3)))
    with pytest.raises(ProblemError, match="of another model"):
        Verification(other, text(least - 1e-3), 60, resume=file).run()
    assert file.read_bytes() == kept
    for damaged in (b"", b"PK", kept[:200], kept[:-200]):
        file.write_bytes(damaged)
        with pytest.raises(ProblemError, match="cannot be read as an interrupted search"):
            Verification(dense(LAYERS), text(least - 1e-3), 60, resume=file).run()
        assert file.read_bytes() == damaged


def test_what_a_file_claims_is_not_believed(least, tmp_path, small_steps, monkeypatch):
    # The finished tree of a property that holds, put forward for one that does not.
    file = tmp_path / "search"
    done = Verification(dense(LAYERS), text(least - 1e-2), 60)
    assert done.run().answer == "unsat"
    false = text(least + 1e-3)
    monkeypatch.setattr(Attacker, "try_plans", lambda *_, **__: None)
    asked = Verification(dense(LAYERS), false, 20, resume=file)
    assert done.opened is not None
    resuming.save(
        file, done.opened.contents.digest, asked.property.digest, {"complete": done.complete}
    )
    assert asked.run().answer != "unsat"


def test_a_file_makes_no_other_objects(tmp_path):
    file = tmp_path / "search"

    class Anything:
        pass

    for wrong in ("os.system", "stagecert.verify.verify.Path", "stagecert.verify.tree.np"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("search.json", (
                f'{{"kind": "stagecert search", "version": "{resuming.__version__}", "model": "m", '
                '"property": "p", "search": {"it": {"class": "x.Anything", '
                f'"has": {{"part": {{"class": "{wrong}", "has": {{}}}}}}}}}}}}'
            ))  # fmt: skip
        with pytest.raises(ProblemError, match="unknown kind"):
            resuming.restore(file, "m", "p", {"it": Anything()})
