"""`robust` against closed forms, ONNX Runtime and itself interrupted."""

import csv
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow.parquet
import pytest
from exact import dense

import stagecert
from stagecert.errors import Disagreement, ProblemError
from stagecert.networks.importers.onnx.model import CONVERTERS
from stagecert.robust import Robustness, robust, table
from stagecert.robust.table import COLUMNS
from stagecert.verify.contents import contents_of, digest_of
from stagecert.verify.models import without_softmax

DIGITS = Path(stagecert.__file__).parent / "digits"
MODEL = DIGITS / "digits.onnx"
EPS = "0.08"  # large enough that some images are attacked, certified and undecided


@pytest.fixture(scope="module")
def data() -> Any:
    with np.load(DIGITS / "digits.npz") as file:
        return file["images"][50:90], file["labels"][50:90]


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("robust") / "whole"
    return out, robust(MODEL, data[0], data[1], EPS, out=out, batch=16)


@pytest.fixture(scope="module")
def run():
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"image": images.astype(np.float32)})[0]


def files(out):
    """What must be the same in all runs, byte for byte; the summary once had the seconds."""
    names = ("results.csv", "counterexamples.npz", "summary.json")
    return [(out / name).read_bytes() for name in names]


def smallest_margin(outputs, label):
    outputs = np.asarray(outputs, np.float64)
    return np.min(outputs[:, [label]] - np.delete(outputs, label, axis=1))


def test_every_status_is_there_and_counted(done, data):
    _, report = done
    statuses = [row["status"] for row in report.rows]
    assert {"misclassified", "attacked", "certified", "unknown"} == set(statuses)
    assert report.images == report.done == len(statuses) == 40
    assert report.attacked == statuses.count("attacked")
    assert report.certified == statuses.count("certified") == sum(report.methods.values())
    assert report.unknown == statuses.count("unknown")
    assert report.correct == 40 - statuses.count("misclassified")
    assert report.certified_accuracy == report.certified / 40
    assert report.attacked_accuracy == (report.certified + report.unknown) / 40
    assert [row["label"] for row in report.rows] == data[1].tolist()


def test_predictions_are_those_of_onnx_runtime(done, data, run):
    predicted = np.argmax(run(data[0]), axis=1)
    assert [row["predicted"] for row in done[1].rows] == predicted.tolist()
    assert [row["correct"] for row in done[1].rows] == (predicted == data[1]).tolist()


def test_sampling_finds_nothing_below_the_bounds(done, data, run):
    draw = np.random.default_rng(0)
    for row, image in zip(done[1].rows, data[0], strict=True):
        if row["bound"] is None:
            assert row["status"] in ("misclassified", "attacked")
            continue
        corners = image + float(EPS) * draw.choice((-1, 1), (300, 1, 8, 8))
        outputs = run(np.clip(corners, 0, 1))
        # The bound is about real arithmetic, the outputs are rounded to float32.
        assert row["bound"] <= smallest_margin(outputs, row["label"]) + 1e-4
        assert row["bound"] <= row["attack"] + 1e-4
        assert row["gap"] == row["attack"] - row["bound"]
        if row["certified"]:
            assert row["bound"] > 0
            assert np.all(np.argmax(outputs, axis=1) == row["label"])


def test_counterexamples_replay_and_lie_in_the_exact_box(done, data, run):
    out, report = done
    attacked = [row for row in report.rows if row["attacked"]]
    with np.load(out / "counterexamples.npz") as file:
        index, points = file["index"], file["inputs"]
    assert index.tolist() == [row["index"] for row in attacked]
    assert points.dtype == np.float32
    eps = Fraction(EPS)
    for row, point in zip(attacked, points, strict=True):
        outputs = run(point[None])
        assert np.argmax(outputs) == row["becomes"] != row["label"]
        assert row["attack"] == pytest.approx(smallest_margin(outputs, row["label"]), abs=1e-5)
        for x, y in zip(data[0][row["index"]].flat, point.flat, strict=True):
            assert abs(Fraction(float(x)) - Fraction(float(y))) <= eps
            assert 0 <= y <= 1


def test_the_table_on_disk_is_that_of_the_report(done, data):
    out, report = done
    with open(out / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    for text, row in zip(rows, report.rows, strict=True):
        for name, kind in COLUMNS.items():
            if row[name] is None:
                assert text[name] == ""
            elif kind is bool:
                assert text[name] == str(row[name]).lower()
            else:
                assert kind(text[name]) == row[name]
    again = robust(MODEL, data[0], data[1], EPS, out=out, batch=16, format="parquet")
    assert again.rows == report.rows
    found = pyarrow.parquet.read_table(out / "results.parquet")
    assert found.to_pylist() == list(report.rows)


class Stop(Exception):
    pass


def test_interrupted_runs_go_on_to_the_same_files(done, data, tmp_path):
    out, computed = tmp_path / "parts", []

    def interrupt(rows):
        computed.extend(row.place for row in rows)
        raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            robust(MODEL, data[0], data[1], EPS, out=out, batch=16, progress=interrupt)
    (out / "results.csvx.part").write_text("left by a killed process")
    robust(
        MODEL, data[0], data[1], Fraction(EPS), out=out, batch=16,
        progress=lambda rows: computed.extend(row.place for row in rows),
    )  # fmt: skip
    assert computed == list(range(40))
    assert files(out) == files(done[0])
    assert not list(out.glob("*.part"))
    for change in ({"eps": "0.09"}, {"seed": 1}, {"clip": None}, {"method": "ibp"}, {"std": 2}):
        arguments = {"eps": EPS, "batch": 16, **change}
        with pytest.raises(ProblemError, match="another configuration"):
            robust(MODEL, *data, out=out, **arguments)


def test_a_limit_can_be_raised(data, done, tmp_path):
    for limit in (16, 40):
        computed = []
        report = robust(
            MODEL,
            data[0],
            data[1],
            EPS,
            out=tmp_path,
            batch=16,
            limit=limit,
            progress=computed.append,
        )
        assert report.images == limit
    assert sum(map(len, computed)) == 24
    assert files(tmp_path) == files(done[0])


def linear_model(weights, bias) -> bytes:
    return dense([(weights, bias)]).SerializeToString()


def test_linear_classifiers_are_decided_as_the_closed_form_says():
    draw = np.random.default_rng(1)
    weights = draw.normal(size=(4, 6)).astype(np.float32)
    bias = draw.normal(size=4).astype(np.float32)
    images = draw.random((30, 6)).astype(np.float32)
    labels = np.argmax(images @ weights.T + bias, axis=1)
    w = [[Fraction(float(v)) for v in row] for row in weights]
    b = [Fraction(float(v)) for v in bias]

    def truth(image, label, eps):
        x = [Fraction(float(v)) for v in image]
        ends = [(max(v - eps, Fraction(0)), min(v + eps, Fraction(1))) for v in x]
        least = []
        for other in range(4):
            if other != label:
                slopes = [p - q for p, q in zip(w[label], w[other], strict=True)]
                terms = (
                    s * (lo if s > 0 else hi) for s, (lo, hi) in zip(slopes, ends, strict=True)
                )
                least.append(b[label] - b[other] + sum(terms))
        return min(least)

    model, seen = linear_model(weights, bias), set()
    for eps in (Fraction(1, 50), Fraction(1, 7)):
        report = robust(model, images, labels, eps)
        for row, image in zip(report.rows, images, strict=True):
            exact = truth(image, row["label"], eps)
            seen.add(row["status"])
            if row["certified"]:
                assert exact > 0
            if row["attacked"]:
                assert exact <= 1e-5  # float32 of ONNX Runtime
            if row["bound"] is not None:
                assert Fraction(row["bound"]) <= exact
                # Intervals alone are too wide, but may be enough.
                assert row["method"] == "ibp" or float(exact) - row["bound"] < 1e-9
            assert row["certified"] or exact < 1e-9
            assert row["attacked"] or exact > -1e-5
    assert seen == {"certified", "attacked"}


def test_a_box_that_just_misses_and_one_that_just_reaches_the_boundary():
    """Margin 2 x_0 - 1 over x_0 >= 3/4 - eps: positive exactly if eps < 1/4."""
    model = linear_model([[1.0, 0.0], [-1.0, 0.0]], [0.0, 1.0])
    image = np.array([[0.75, 0.5]])
    for eps, certified in (
        (Fraction(1, 4), False),
        (Fraction(1, 4) - Fraction(1, 10**12), True),
        (Fraction(1, 4) + Fraction(1, 10**30), False),
    ):
        (row,) = robust(model, image, [0], eps).rows
        assert row["certified"] == certified
        # ONNX Runtime computes equal outputs at 1/2, which is no other class.
        assert not row["attacked"]


def test_uint8_and_normalisation_mean_what_they_say():
    """On pixels 100 and 200 of 255, with (x - 1/2) / (1/4), margin 4 (x_1 - x_0)."""
    model = linear_model([[0.0, 1.0], [1.0, 0.0]], [0.0, 0.0])
    image = np.array([[100, 200]], np.uint8)
    for levels, certified in ((49, True), (50, False)):
        (row,) = robust(model, image, [0], Fraction(levels, 255), mean="1/2", std=0.25).rows
        assert row["certified"] == certified
        exact = 4 * Fraction(100 - 2 * levels, 255)
        assert Fraction(row["bound"]) <= exact
        assert float(exact) - row["bound"] < 1e-5  # a pixel in float32 is off by 1e-8


def test_weights_in_another_file_belong_to_the_model(tmp_path):
    path, where = tmp_path / "model.onnx", tmp_path / "weights"

    def save(weights):
        where.unlink(missing_ok=True)
        onnx.save(
            onnx.load_from_string(linear_model(weights, np.zeros(2))), path, location="weights",
            save_as_external_data=True, size_threshold=0,
        )  # fmt: skip

    def run():
        return robust(path, np.array([[0.75, 0.25]]), [0], "1/10", out=tmp_path / "out")

    save(np.eye(2))
    assert run().certified == 1
    before = path.read_bytes()
    save(-np.eye(2))
    assert path.read_bytes() == before
    with pytest.raises(ProblemError, match=r"model: .* there, .* now"):
        run()


def test_outputs_that_are_not_finite_are_error_rows():
    model = linear_model([[3e38] * 2, [0.0] * 2], [0.0, 0.0])
    report = robust(model, np.array([[1.0, 1.0], [0.0, 0.5]]), [0, 0], "1/10")
    assert report.rows[0]["status"] == "error"
    assert report.errors == 1
    assert "not finite" in report.rows[0]["note"]


def test_a_network_that_is_not_the_model_is_no_classifier(monkeypatch):
    """Without the check there is no gate: a wrong importer certified images."""
    layers = [(np.eye(2), np.zeros(2)), (np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([0.0, 0.5]))]
    model, images = dense(layers).SerializeToString(), np.array([[0.2, 0.2]])
    monkeypatch.setitem(CONVERTERS, "Relu", CONVERTERS["Identity"])
    with pytest.raises(Disagreement, match="node 2 of 3, Relu"):
        robust(model, images, [1], "1/4", clip=None, check=False)


def two_inputs() -> bytes:
    value = lambda name: onnx.helper.make_tensor_value_info(name, 1, [1, 2])  # noqa: E731
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["a", "b"], ["y"])], "g", [value("a"), value("b")],
        [value("y")],
    )  # fmt: skip
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


def half_precision() -> bytes:
    value = lambda name: onnx.helper.make_tensor_value_info(name, 10, [1, 2])  # noqa: E731
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value("x")], [value("y")]
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": b"rubbish"}, "ONNX"),
        ({"model": half_precision()}, "float16"),
        ({"model": "missing.onnx"}, "missing.onnx: cannot be read"),
        ({"model": two_inputs()}, "The model has 2 inputs"),
        ({"model": linear_model([[1.0, 1.0]], [0.0])}, "one output"),
        ({"eps": "-1/255"}, "eps must not be negative"),
        ({"eps": "many"}, "eps must be a number"),
        ({"method": "magic"}, "method must be one of ibp, backward"),
        ({"restarts": 0}, "restarts must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"limit": 1.5}, "limit must be at least 1"),
        ({"memory": 0}, "memory must be a positive"),
        ({"memory": float("nan")}, "memory must be a positive"),
        ({"clip": (0,)}, "clip must be a range"),
        ({"clip": 3}, "clip must be a range"),
        ({"mean": ()}, "mean is empty"),
        ({"format": "excel"}, "format must be csv or parquet"),
    ],
)
def test_bad_arguments(change, message, tmp_path):
    arguments = {
        "model": linear_model(np.eye(2), np.zeros(2)), "images": np.zeros((1, 2)), "labels": [0],
        "eps": "1/10", "out": tmp_path / "out", **change,
    }  # fmt: skip
    with pytest.raises(ProblemError, match=message):
        robust(**arguments)
    assert not (tmp_path / "out").exists()


def ending_in(operator: str, model: bytes, **attributes) -> bytes:
    """The model with one node more."""
    longer = onnx.load_from_string(model)
    (output,) = longer.graph.output
    longer.graph.node.append(onnx.helper.make_node(operator, [output.name], ["end"], **attributes))
    output.name = "end"
    return longer.SerializeToString()


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_a_last_softmax_is_left_out(operator):
    draw = np.random.default_rng(4)
    logits = linear_model(draw.normal(size=(3, 4)), draw.normal(size=3))
    longer = ending_in(operator, logits, axis=-1)
    images = draw.random((6, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(longer)
    name = session.get_inputs()[0].name
    labels = [int(np.argmax(np.asarray(session.run(None, {name: x[None]})[0]))) for x in images]
    run = Robustness(longer, images, labels, "1/20")
    assert run.notice is not None
    assert operator in run.notice
    assert run.configuration["without"] == operator
    # The file that was given, not what was made of it.
    assert run.configuration["model"] == digest_of(longer) != digest_of(logits)
    with run.store(None) as store:
        run.run(store)
        found = table.report(store, run.keys, rows=True)
    plain = robust(logits, images, labels, "1/20")
    assert found.rows == plain.rows
    assert found.correct == 6


def test_other_softmaxes_are_not():
    model = linear_model(np.eye(3), np.zeros(3))
    assert without_softmax(contents_of(model)) is None
    assert without_softmax(contents_of(ending_in("Softmax", model, axis=0))) is None  # ones
    assert without_softmax(contents_of(b"no model")) is None
    inside = ending_in("Relu", ending_in("Softmax", model, axis=-1).replace(b"end", b"mid"))
    assert without_softmax(contents_of(inside)) is None


def test_a_radius_of_all_pixels_is_warned_of():
    model = linear_model(np.eye(3), np.zeros(3))
    images, labels = np.full((1, 3), [[0.2, 0.4, 0.9]], np.float32), [2]
    with pytest.warns(UserWarning, match=r"eps is 8, .* Did you mean 8/255\?"):
        robust(model, images, labels, 8)
    assert Robustness(model, images, labels, "8/255").warning is None
    assert Robustness(model, images, labels, 1).warning is not None
    assert "between 0.2 and 0.9" in str(Robustness(model, images, labels, 1, clip=None).warning)


# -- the complete search ---------------------------------------------------------------------------


def test_the_complete_search_decides_what_one_relaxation_leaves_open(done, data, run):
    open_ = [row["index"] for row in done[1].rows if row["status"] == "unknown"]
    others = [next(row["index"] for row in done[1].rows if row["status"] == status)
              for status in ("attacked", "misclassified", "certified")]  # fmt: skip
    some = [*open_[:3], *others]
    images, labels = data[0][some], data[1][some]
    report = robust(MODEL, images, labels, EPS, method="complete", time_limit=300, batch=16)
    statuses = [row["status"] for row in report.rows]
    assert statuses[len(open_[:3]) :] == ["attacked", "misclassified", "certified"]
    assert report.unknown == 0
    assert report.methods["complete"] >= 1
    draw = np.random.default_rng(1)
    for row, image in zip(report.rows, images, strict=True):
        if row["method"] == "complete":
            assert (row["gap"] is None) == (row["bound"] == 0)
            assert row["certified"]
            assert row["checked"]
            assert row["bound"] >= 0
            outputs = run(np.clip(image + float(EPS) * draw.choice((-1, 1), (300, 1, 8, 8)), 0, 1))
            assert np.all(np.argmax(outputs, axis=1) == row["label"])
    assert report.configuration["time_limit"] == 300


def test_a_time_limit_of_the_complete_search_leaves_images_open(done, data):
    open_ = [row["index"] for row in done[1].rows if row["status"] == "unknown"][:1]
    images, labels = data[0][open_], data[1][open_]
    report = robust(MODEL, images, labels, EPS, method="complete", time_limit=1e-3, batch=16)
    (row,) = report.rows
    assert (row["status"], row["method"], row["note"]) == ("unknown", None, "Time is up.")
    assert row["bound"] is not None
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ProblemError, match="time_limit must be"):
            robust(MODEL, images, labels, EPS, method="complete", time_limit=wrong)
