"""What `robust` does on accelerators, checked on the CPU; and what runs on devices everywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import stagecert
from stagecert import networks
from stagecert.networks.bounding import bounds
from stagecert.robust import boxes as boxes_module
from stagecert.robust import robust, work
from stagecert.robust.boxes import Preparation, boxes_around
from stagecert.robust.data import number
from stagecert.verify import ladder
from stagecert.verify.descents import Descents, _starts
from stagecert.verify.runtime import Session
from stagecert.verify.runtime_server import MANY

DIGITS = Path(stagecert.__file__).parent / "digits"
MODEL = DIGITS / "digits.onnx"


@pytest.fixture(scope="module")
def data() -> Any:
    with np.load(DIGITS / "digits.npz") as file:
        return file["images"][50:90], file["labels"][50:90]


@pytest.fixture
def accelerated(monkeypatch):
    monkeypatch.setattr(work, "TRIAL", 4)
    monkeypatch.setattr(bounds, "opens", lambda: True)


@pytest.fixture
def asked(monkeypatch):
    """The methods that were asked for, with how many different boxes."""
    calls = []
    before = ladder.Ladder.bound

    def noted(self, method, boxes):
        calls.append((method, len(set(boxes.numbers)), len(boxes.numbers)))
        return before(self, method, boxes)

    monkeypatch.setattr(ladder.Ladder, "bound", noted)
    return calls


def test_same_answers(data, accelerated, asked, monkeypatch):
    found = robust(MODEL, data[0], data[1], "0.08", batch=40, memory=1.0)
    assert {size for _, _, size in asked} == {4, 40}
    monkeypatch.setattr(bounds, "opens", lambda: False)
    plain = robust(MODEL, data[0], data[1], "0.08", batch=40)
    assert [row["status"] for row in found.rows] == [row["status"] for row in plain.rows]
    assert found.certified > 0
    for row in found.rows:
        assert row["checked"] == row["certified"]
        if row["bound"] is not None:
            assert row["bound"] <= row["attack"] + 1e-4


def test_dear_methods_end_where_they_do_not_pay(data, accelerated, asked, monkeypatch):
    monkeypatch.setattr(work.Work, "_passes_the_gate", lambda *_: False)  # nothing is certified
    found = robust(MODEL, data[0], data[1], "0.08", batch=40, memory=1.0)
    assert found.certified == 0
    assert found.unknown > 4
    # The most promising images are tried; the others are not.
    assert [count for method, count, _ in asked if method == "backward"] == [4]
    assert [count for method, count, _ in asked if method == "nonconvex"] == [4]


def _descents(count, places):
    with np.load(DIGITS / "digits.npz") as file:
        images = file["images"][list(places)]
    boxes = boxes_around(images, Preparation(number("0.1", "eps")))
    aims = np.tile(np.arange(1, 4), (count, 1))
    return boxes, Descents(
        networks.load(MODEL), boxes, np.zeros(count, int), aims, np.array(places), 3
    )


def test_starting_points_depend_on_the_place_only():
    boxes, one = _descents(3, [5, 9, 11])
    _, other = _descents(2, [11, 5])
    least, most = (x.reshape(3, 1, -1) for x in (boxes.least, boxes.most))
    for turn in range(4):
        starts = np.asarray(_starts(one._images, one._key, np.arange(3), 3, turn)).reshape(3, 3, -1)
        again = np.asarray(_starts(other._images, other._key, np.array([1, 0]), 3, turn)).reshape(
            2, 3, -1
        )
        np.testing.assert_array_equal(again, starts[[0, 2]])
        assert np.all((starts >= least) & (starts <= most))
        if turn == 0:
            np.testing.assert_array_equal(starts[:, 0], boxes.centre.reshape(3, -1))
        if turn == 1:
            assert np.all((starts == least) | (starts == most))
        if turn:
            assert np.any(starts[:, 0] != starts[:, 1])


def test_descents_say_what_the_network_computes():
    _, descents = _descents(3, [5, 9, 11])
    descents.at_once = 2  # groups are filled up
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    seen = []
    for found in descents.from_scratch(np.arange(3), 2):
        seen += found.images.tolist()
        margins = np.asarray(found.margins)
        points = np.concatenate([np.asarray(found.best)[:, None], found.others], axis=1)
        assert np.all(np.diff(margins, axis=1) >= 0)
        for k in range(len(found.images)):
            outputs: Any
            (outputs,) = session.run(None, {"image": points[k].reshape(-1, 1, 8, 8)})
            best = (outputs[:, :1] - outputs[:, 1:4]).min(axis=1)
            assert np.all(margins[k] >= best - 1e-4)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("shape", "mean", "std"),
    [((6, 8, 8), ["0.1"], ["0.3"]), ((5, 3, 4, 4), ["0.1", "0.2", "0.3"], ["0.5"]),
     ((5, 3, 4, 4), ["0"], ["1"])],
)  # fmt: skip
def test_boxes_of_levels_are_those_of_their_pixels(shape, mean, std):
    images = np.random.default_rng(2).integers(0, 256, shape).astype(np.uint8)
    how = Preparation(
        number("8/255", "eps"),
        mean=tuple(number(v, "mean") for v in mean),
        std=tuple(number(v, "std") for v in std),
    )
    found, expected = boxes_around(images, how), boxes_module._boxes(images, how)
    for name in ("centre", "lower", "upper", "least", "most"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_many_points_in_threads_are_the_same_bits(data):
    session = Session(MODEL)
    points = np.tile(data[0].reshape(40, -1), (3, 1)).astype(np.float32)
    assert len(points) >= MANY
    many = session.run(points)
    few = np.concatenate([session.run(points[k : k + 1]) for k in range(40)])
    np.testing.assert_array_equal(many, np.tile(few, (3, 1)))
