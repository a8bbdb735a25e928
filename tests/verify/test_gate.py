"""No "unsat" leaves unchecked: what the search believes is no answer until the checker agrees."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exact import dense, random_layers, smallest_violation, vnnlib

from stagecert.errors import ProblemError
from stagecert.networks import operations as op
from stagecert.networks.graph import Builder
from stagecert.networks.importers.onnx import model as importer  # noqa: F401  (registers operators)
from stagecert.networks.importers.onnx import nodes
from stagecert.robust import robust
from stagecert.robust.work import Work
from stagecert.verify import Verification, agreement, proving, splitting, verify
from stagecert.verify.grafts import Grafter
from stagecert.verify.models import opened
from stagecert.verify.replay import Replay
from stagecert_check import check, graph, properties
from stagecert_check.bounds import Facts
from stagecert_check.checker import Checker

LOW, HIGH = (-1, -1), (1, 1)


@pytest.fixture
def faulty(monkeypatch):
    """An importer that loses all biases of Gemm; nothing else notices."""
    right = nodes.CONVERTERS["Gemm"]

    def wrong(call):
        call.inputs = call.inputs[:2]
        return right(call)

    monkeypatch.setitem(nodes.CONVERTERS, "Gemm", wrong)
    unseen(monkeypatch)


def unseen(monkeypatch):
    """Nothing but the gate is left to notice a fault: ONNX Runtime is not asked.

    Nor does the search bound boxes with the checker's passes: it would not make the fault.
    """
    monkeypatch.setattr(splitting, "CHECKED_BOXES", 0)
    monkeypatch.setattr(splitting, "MOSTLY_FIXED", 0)
    monkeypatch.setattr(Grafter, "able", lambda program: False)
    monkeypatch.setattr(agreement, "compare", lambda *_: None)
    monkeypatch.setattr(Replay, "check", lambda *_: None)
    monkeypatch.setattr(Work, "_replay", lambda *_: None)


def shifted(bias: float):
    """y = x_0 + x_1 + bias, after a relu that is always open."""
    return dense([([[1, 1]], [bias]), ([[1]], [0])])


def test_an_unsat_brings_a_certificate_that_the_checker_accepts(tmp_path):
    model, text = dense(random_layers(1)), vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3)
    found = verify(model, text)
    assert (found.answer, found.checked, found.objection) == ("unsat", True, None)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "p.vnnlib").write_text(text)
    (tmp_path / "c.cert").write_bytes(found.certificate)
    again = check(tmp_path / "m.onnx", tmp_path / "p.vnnlib", tmp_path / "c.cert")
    assert again.accepted
    assert again.bounds == found.certified.report.bounds
    assert found.to_dict()["checked"]


def test_intervals_of_whole_boxes_are_derived_once(monkeypatch):
    """The search asks the checker for them; the proof is checked with what it has derived."""
    derived, derive = [], Facts.derive
    monkeypatch.setattr(
        Facts,
        "derive",
        lambda self, *a, **k: derived.append(len(self.inputs[0])) or derive(self, *a, **k),
    )
    found = verify(dense(random_layers(1)), vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3))
    assert (found.answer, found.checked, derived) == ("unsat", True, [1])


def test_what_the_checker_keeps_cannot_be_written_to():
    model, text = dense(random_layers(1)), vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3)
    wanted = properties.load(text)
    checker = Checker(opened(model, wanted).program, wanted)
    low, high = np.array([LOW], float), np.array([HIGH], float)
    assert checker.branching.known(low, high) is None
    checker.branching.plain(low, high)
    assert checker.branching.known(low, high + 1) is None
    facts = checker.branching.known(low, high)
    assert facts is not None
    for some in (facts.low, facts.high, facts.totals, facts.inputs, *facts.lines.values()):
        for array in some:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_a_wrong_importer_leads_to_no_unsat(faulty):
    """y = x_0 + x_1 + 5 reaches 3; without the bias it does not, and the search "proves" that."""
    text = vnnlib(LOW, HIGH, "(>= Y_0 3)", 1)
    believed = verify(shifted(5), text, check=False)
    assert (believed.answer, believed.checked, believed.certificate) == ("unsat", False, None)
    found = verify(shifted(5), text)
    assert found.answer == "unknown"
    assert found.rejected
    assert not found.checked
    assert found.reason.startswith("The checker rejects the proof: case 1")


@pytest.mark.parametrize("seed", range(3))
def test_planted_faults_never_lead_to_unsat(seed, monkeypatch):
    """Properties with a counterexample, on a network whose weights the importer got wrong."""
    layers = random_layers(seed)
    least = smallest_violation(layers, LOW, HIGH, [(np.array([1, 0, 0]), np.zeros(2), 0.0)])
    text = vnnlib(LOW, HIGH, f"(<= Y_0 {least + 1e-3:.12f})", 3)
    add = Builder.add

    def wrong(self, operation, *arguments, weights=None, name=""):
        if isinstance(operation, op.Shift):
            weights = weights + 1
        return add(self, operation, *arguments, weights=weights, name=name)

    monkeypatch.setattr(Builder, "add", wrong)
    unseen(monkeypatch)
    assert verify(dense(layers), text, 30, check=False).answer == "unsat"
    assert verify(dense(layers), text, 30).answer != "unsat"


def test_what_the_checker_does_not_cover_is_unknown(monkeypatch):
    monkeypatch.delitem(graph.HANDLERS, "Relu")
    text = vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3)
    found = verify(dense(random_layers(1)), text)
    assert (found.answer, found.rejected) == ("unknown", False)
    assert "The checker cannot follow: Relu ''" in found.reason
    assert verify(dense(random_layers(1)), text, check=False).answer == "unsat"


def test_time_that_runs_out_while_checking_is_a_timeout(monkeypatch):
    work = Verification(dense(random_layers(1)), vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3), 60)
    seen = []

    def slow(*args, **options):
        # What another thread would say at this moment.
        seen.append(work.so_far("timeout", "Time is up.").answer)
        raise proving.OutOfTime

    monkeypatch.setattr(sys.modules[Verification.__module__], "certify", slow)
    found = work.run()
    assert seen == ["timeout"]
    assert (found.answer, found.checked) == ("timeout", False)
    assert found.reason == "Every case is refuted, but no proof is checked. Time is up."


def test_the_prover_looks_at_the_clock():
    work = Verification(dense(random_layers(1)), vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3))
    work.run()
    model = opened(dense(random_layers(1)), work.property)
    with pytest.raises(proving.OutOfTime):
        proving.certify(model, work.property, stop=lambda: True)


def test_a_certificate_that_is_changed_on_its_way_is_rejected(monkeypatch):
    """What is checked is what was written, not what was meant."""
    packed = proving.packed

    def negative(proof):
        for case in proof.cases:
            for leaf in case.leaves:
                leaf.multipliers[:] *= -1
        return packed(proof)

    monkeypatch.setattr(proving, "packed", negative)
    found = verify(dense(random_layers(1)), vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3))
    assert (found.answer, found.rejected) == ("unknown", True)
    assert "multipliers must not be negative" in found.reason


def test_a_property_without_inputs_is_checked_too():
    text = vnnlib((1, 0), (0, 1), "(<= Y_0 0)", 3)
    found = verify(dense(random_layers(0)), text)
    assert (found.answer, found.checked) == ("unsat", True)
    assert found.reason.startswith("No input satisfies")


def test_properties_know_what_their_file_held(tmp_path):
    import gzip
    import hashlib

    text = vnnlib(LOW, HIGH, "(>= Y_0 1000)", 3)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "p.vnnlib.gz").write_bytes(gzip.compress(text.encode()))
    for source in (text, text.encode(), tmp_path / "p.vnnlib.gz"):
        assert properties.load(source).digest == digest


def test_images_are_certified_only_where_the_checker_agrees(faulty):
    """With its biases the classifier prefers the other class at the end of the box."""
    model = dense([([[1, 0], [-1, 0]], [0, 1.2]), (np.eye(2), [0, 0])]).SerializeToString()
    image, eps = np.array([[0.75, 0.5]]), "1/5"
    (row,) = robust(model, image, [0], eps, method="ibp", check=False).rows
    assert row["status"] == "certified"
    (row,) = robust(model, image, [0], eps, method="ibp").rows
    assert (row["status"], row["certified"], row["checked"]) == ("unknown", False, False)
    assert "the checker rejects the proof" in row["note"]
    (row,) = robust(model, image, [0], "1/100", method="ibp").rows
    assert (row["status"], row["certified"], row["checked"]) == ("certified", True, True)
    (row,) = robust(model, image, [0], "1/100", method="ibp", check=False).rows
    assert (row["status"], row["certified"], row["checked"]) == ("certified", True, False)


def test_models_that_the_checker_does_not_cover_certify_no_images(monkeypatch):
    monkeypatch.delitem(graph.HANDLERS, "Relu")
    model = dense(random_layers(1)).SerializeToString()
    image, label = np.array([[0.5, 0.5]]), [0]
    with pytest.raises(ProblemError, match=r"The checker cannot follow this model.*--unchecked"):
        robust(model, image, label, "1/100")
    assert robust(model, image, label, "1/100", check=False).done == 1


FAULTY = """
from stagecert.networks.importers.onnx import nodes
import stagecert.networks.importers.onnx.model
right = nodes.CONVERTERS["Gemm"]
def wrong(call):
    call.inputs = call.inputs[:2]
    return right(call)
nodes.CONVERTERS["Gemm"] = wrong
from stagecert.verify import agreement, splitting
from stagecert.verify.replay import Replay
splitting.CHECKED_BOXES = splitting.MOSTLY_FIXED = 0
splitting.Grafter.able = lambda program: False
if agree:
    agreement.compare = lambda *_: None
Replay.check = lambda *_: None
from stagecert.cli import main
main()
"""


def test_exit_statuses_and_warnings(tmp_path):
    (tmp_path / "m.onnx").write_bytes(shifted(5).SerializeToString())
    (tmp_path / "p.vnnlib").write_text(vnnlib(LOW, HIGH, "(>= Y_0 3)", 1))

    def run(*more, agree=True):
        program = f"agree = {agree}\n" + FAULTY
        command = [sys.executable, "-c", program, "verify", "m.onnx", "p.vnnlib"]
        return subprocess.run(
            [*command, *more], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = run("--certificate", "c.cert")
    assert (done.returncode, done.stdout) == (5, "unknown\n"), done.stderr
    assert "The checker rejects the proof" in done.stderr
    assert "Please report this" in done.stderr
    assert not (tmp_path / "c.cert").exists()
    done = run("--unchecked")
    assert (done.returncode, done.stdout) == (0, "unsat\n"), done.stderr
    assert "Warning: this answer rests on the search alone" in done.stderr
    done = run("--unchecked", "--certificate", "c.cert")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--unchecked makes none" in done.stderr
    # The comparison with ONNX Runtime at a few points comes before any search.
    done = run("--unchecked", agree=False)
    assert (done.returncode, done.stdout) == (3, "unknown\n")
    assert "They part at node 1 of 3, Gemm" in done.stderr


@pytest.mark.parametrize(("missing", "axis"), [(1.0, 1), (0.4, 0)])
def test_boxes_are_not_halved_again_where_that_was_of_no_use(missing, axis):
    """A random network with maxima was `unknown`: all spare boxes were cuts of an idle input."""
    inputs = SimpleNamespace(lower64=np.zeros(2), upper64=np.ones(2))
    prover: Any = SimpleNamespace(groups=[SimpleNamespace(inputs=inputs)])
    part = proving._Part(0, 0, np.zeros(2), np.array([1, 0.5]), [], short=1.0)
    half, _ = proving._Prover._halved(prover, part)
    half.short = missing
    proving._Prover._halved(prover, half)
    assert (part.axis, half.axis) == (0, axis)
