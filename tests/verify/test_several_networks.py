"""Properties of several networks: one joint model, in the search and in the checker."""

import itertools

import numpy as np
import onnx
import pytest
from exact import dense, random_layers

from stagecert.errors import ProblemError
from stagecert.verify import verify
from stagecert.verify.instances import read_lists
from stagecert.verify.models import OpenModel
from stagecert.verify.sweep import Sweep
from stagecert_check import check, joining, properties, stating

# f is not decreasing in its first input if its weights are not negative; g is the same network.
LAYERS = [([[1.0, 0.5], [0.25, -1.0]], [0.1, 0.2]), ([[1.0, 0.5]], [0.0])]
TEXT = """
(vnnlib-version <2.0>)
(declare-network f (declare-input X_f real [1,2]) (declare-output Y_f real [1,1]))
(declare-network g RELATION (declare-input X_g real [1,2]) (declare-output Y_g real [1,1]))
(assert (and (>= X_f[0,0] -1.0) (<= X_f[0,0] 1.0) (>= X_f[0,1] -1.0) (<= X_f[0,1] 1.0)))
(assert (and (>= X_g[0,0] -1.0) (<= X_g[0,0] 1.0) (>= X_g[0,1] -1.0) (<= X_g[0,1] 1.0)))
(assert (== X_f[0,1] X_g[0,1]))
(assert (>= X_f[0,0] X_g[0,0]))
(assert (<= Y_f[0,0] (- Y_g[0,0] BY)))
"""


def _files(tmp_path, layers=LAYERS):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.onnx"
    arrays = [(np.array(w, np.float32), np.array(b, np.float32)) for w, b in layers]
    path.write_bytes(dense(arrays).SerializeToString())
    return path


def _text(relation="", by=0.5):
    return TEXT.replace("RELATION", relation).replace("BY", str(by))


def test_a_monotone_network_is_proven_monotone(tmp_path):
    path = _files(tmp_path)
    pairs = [("f", path), ("g", path)]
    text = _text("(equal-to f)")
    found = verify(pairs, text, 120)
    assert (found.answer, found.checked) == ("unsat", True)
    (tmp_path / "p.vnnlib").write_text(text)
    (tmp_path / "c.cert").write_bytes(found.certificate)
    spelt = repr([(name, str(p)) for name, p in pairs])
    for given in (pairs, spelt):
        assert check(given, tmp_path / "p.vnnlib", tmp_path / "c.cert").accepted
    # The certificate is for these two networks, in this order.
    other = [("f", path), ("g", _files(tmp_path, [*LAYERS[:1], ([[1.0, 0.4]], [0.0])]))]
    (tmp_path / "q.vnnlib").write_text(_text())
    assert not check(other, tmp_path / "q.vnnlib", tmp_path / "c.cert").accepted


def test_a_counterexample_of_two_networks(tmp_path):
    one, other = _files(tmp_path), _files(tmp_path, [*LAYERS[:1], ([[1.0, 0.5]], [2.0])])
    found = verify([("f", one), ("g", other)], _text("(isomorphic-to f)"), 120)
    assert found.answer == "sat"
    assert found.counterexample is not None


@pytest.mark.slow
def test_a_network_and_one_with_other_weights_stay_close(tmp_path):
    # Both have a range of 0.5 on the box, five times what is claimed: neither alone proves it, nor
    # do both without the rows that say that their inputs are the same.
    rng = np.random.default_rng(3)
    sizes = (3, 16, 16, 1)
    f = [
        (rng.normal(size=(m, n)) / n**0.5, 0.1 * rng.normal(size=m))
        for n, m in itertools.pairwise(sizes)
    ]
    g = [(w + 0.01 * rng.normal(size=w.shape), b) for w, b in f]
    pairs = [("f", _files(tmp_path, f)), ("g", _files(tmp_path, g))]
    x = rng.uniform(-0.5, 0.5, (2000, 3))
    run = [OpenModel(path).session.run(x) for _, path in pairs]
    assert min(map(np.ptp, run)) > 0.45
    assert 0.02 < np.abs(run[0] - run[1]).max() < 0.05
    box = " ".join(
        f"(>= X_{name}[0,{i}] -0.5) (<= X_{name}[0,{i}] 0.5)" for name in "fg" for i in range(3)
    )
    text = f"""(vnnlib-version <2.0>)
    (declare-network f (declare-input X_f real [1,3]) (declare-output Y_f real [1,1]))
    (declare-network g (isomorphic-to f)
        (declare-input X_g real [1,3]) (declare-output Y_g real [1,1]))
    (assert (and {box} {" ".join(f"(== X_f[0,{i}] X_g[0,{i}])" for i in range(3))}))
    (assert (or (> Y_g[0,0] (+ Y_f[0,0] BY)) (< Y_g[0,0] (- Y_f[0,0] BY))))"""
    found = verify(pairs, text.replace("BY", "0.1"), 120)
    assert (found.answer, found.checked) == ("unsat", True)
    assert verify(pairs, text.replace("BY", "0.02"), 120).answer == "sat"


def test_networks_must_be_those_of_the_property(tmp_path):
    path, other = _files(tmp_path), _files(tmp_path, [*LAYERS[:1], ([[1.0, 0.4]], [0.0])])
    for given, relation, reason in (
        (path, "", "is about 2 networks"),
        ([("g", path), ("f", path)], "", "in this order"),
        ([("f", path), ("g", other)], "(equal-to f)", "their files differ"),
        ([("f", path)], "", "in this order"),
        ([("f", path), ("f", path)], "", "are given as"),
        ("[('f', ", "", "is no list of networks"),
    ):
        with pytest.raises(ProblemError, match=reason):
            verify(given, _text(relation), 20)


def test_the_joint_network_computes_what_its_parts_do(tmp_path):
    paths = [_files(tmp_path, random_layers(seed)) for seed in (1, 2)]
    model = OpenModel([("f", paths[0]), ("g", paths[1])])
    x = np.random.default_rng(0).normal(size=(5, 4))
    parts = [OpenModel(path).session.run(x[:, 2 * k : 2 * k + 2]) for k, path in enumerate(paths)]
    np.testing.assert_allclose(model.session.run(x), np.concatenate(parts, axis=1), rtol=1e-6)
    assert model.network.output_size == 6


def test_what_cannot_be_joined_is_refused(tmp_path):
    model = dense(random_layers(1))
    plain = model.SerializeToString()
    model.opset_import[0].version += 1
    with pytest.raises(ProblemError, match="different opsets"):
        joining.joined([("f", plain), ("g", model.SerializeToString())])
    model.graph.sparse_initializer.add()
    with pytest.raises(ProblemError, match="sparse"):
        joining.joined([("f", model.SerializeToString())])
    with pytest.raises(ProblemError, match="no ONNX file"):
        joining.joined([("f", b"rubbish")])
    whole = onnx.load_from_string(joining.joined([("f", plain), ("g", plain)]))
    names = [name for node in whole.graph.node for name in node.output]
    assert len(set(names)) == len(names)


def test_a_list_of_instances_names_several_networks(tmp_path):
    # The rows say that g is both above and below f: nothing has to be bounded.
    (tmp_path / "onnx").mkdir()
    for name in ("f", "g"):
        _files(tmp_path / "onnx").rename(tmp_path / "onnx" / f"{name}.onnx")
    text = _text("(equal-to f)") + "(assert (>= Y_f[0,0] Y_g[0,0]))"
    (tmp_path / "p.vnnlib").write_text(text)
    line = "\"[('f', 'onnx/f.onnx'), ('g', 'onnx/g.onnx')]\",./p.vnnlib,60"
    (tmp_path / "instances.csv").write_text(line)
    (one,) = read_lists([tmp_path / "instances.csv"])
    folder = tmp_path / "onnx"
    assert one.model_path == (("f", folder / "f.onnx"), ("g", folder / "g.onnx"))
    assert one.name() == "f=f g=g p"
    sweep = Sweep([one])
    with sweep.store(None) as store:
        sweep.run(store)
        (line,) = sweep.lines(store)
    assert (line.data["verdict"], line.data["certificate"]) == ("unsat", "accepted")


SAME = """
(vnnlib-version <2.0>)
(declare-network f (declare-input X_f real [1,2]) (declare-output Y_f real [1,1]))
(declare-network g (declare-input X_g real [1,2]) (declare-output Y_g real [1,1]))
(assert (and (>= X_f[0,0] -1.0) (<= X_f[0,0] 1.0) (>= X_f[0,1] -1.0) (<= X_f[0,1] 0.5)))
(assert (and (>= X_g[0,0] -0.5) (<= X_g[0,0] 2.0) (>= X_g[0,1] -1.0) (<= X_g[0,1] 1.0)))
(assert (== X_f[0,0] X_g[0,0])) (assert (== X_g[0,1] X_f[0,1]))
(assert (<= X_f[0,0] X_g[0,1]))
(assert (>= Y_f[0,0] (+ Y_g[0,0] BY)))
"""


def test_equal_inputs_are_one(tmp_path):
    """Both networks read the same two numbers; before, four of them were free."""
    pairs = [("f", _files(tmp_path)), ("g", _files(tmp_path, [*LAYERS[:1], ([[1.0, 0.4]], [0.0])]))]
    property = properties.load(SAME.replace("BY", "1"))
    model, wanted = OpenModel(pairs).stating(property)
    assert model.places is not None
    assert model.places.tolist() == [0, 1, 0, 1]
    (case,) = wanted.cases
    assert case.input_lower.tolist() == [-0.5, -1]
    assert case.input_upper.tolist() == [1, 0.5]
    (row,) = case.input_rows
    assert row.inputs == ((0, 1), (1, -1))
    points = np.random.default_rng(0).uniform(-0.5, 0.5, (20, 2)).astype(np.float32)
    np.testing.assert_allclose(model.run(points), model.untied.run(points[:, [0, 1, 0, 1]]))


# f - g = relu(x_0 / 4 - x_1 + 0.2) / 10: most at (-0.5, -0.5), 0.0575, since x_1 is not
# less than x_0, which is at least -0.5 for g.
@pytest.mark.parametrize(("by", "answer"), [
    (1, "unsat"), pytest.param(0.06, "unsat", marks=pytest.mark.slow), (0.055, "sat"),
])  # fmt: skip
def test_networks_on_equal_inputs_are_decided_and_checked(tmp_path, by, answer):
    pairs = [("f", _files(tmp_path)), ("g", _files(tmp_path, [*LAYERS[:1], ([[1.0, 0.4]], [0.0])]))]
    text = SAME.replace("BY", str(by))
    found = verify(pairs, text, 120)
    assert found.answer == answer
    if answer == "sat":
        assert len(found.counterexample.inputs) == 4
        assert properties.load(text).counterexample(
            found.counterexample.inputs, found.counterexample.outputs
        )
    else:
        (tmp_path / "p.vnnlib").write_text(text)
        (tmp_path / "c.cert").write_bytes(found.certificate)
        assert check(pairs, tmp_path / "p.vnnlib", tmp_path / "c.cert").accepted


def test_inputs_that_are_not_always_equal_stay_apart():
    text = SAME.replace("(assert (== X_f[0,0] X_g[0,0]))", "(assert (<= X_f[0,0] X_g[0,0]))")
    assert stating.places_of(properties.load(text.replace("BY", "1"))).tolist() == [0, 1, 2, 1]
    text = SAME.replace("(assert (== X_f[0,0] X_g[0,0]))", "").replace(
        "(assert (== X_g[0,1] X_f[0,1]))",
        "(assert (or (== X_g[0,1] X_f[0,1]) (== X_g[0,0] X_f[0,0])))",
    )
    assert stating.places_of(properties.load(text.replace("BY", "1"))) is None
