"""What other weights change, on the 8 x 8 digits of scikit-learn."""

import json
from typing import Any

import numpy as np
import onnxruntime
import pytest
from sklearn.datasets import load_digits

from benchmarks.data import ROOT
from benchmarks.networks.peers import common
from benchmarks.paper import weights
from benchmarks.paper.training.loop import Images, Settings, Trainer

NAME = "tiny_relu_ibp"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with images and a network that intervals had little part in."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "cifar10").mkdir()
    (folder / "networks" / "paper").mkdir(parents=True)
    digits: Any = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    file = folder / "cifar10" / "test.npz"
    np.savez(file, images=images, labels=digits.target)
    trainer = Trainer(Settings(training="ibp", eps=0.01, steps=60), Images.load(file))
    trainer.run()
    trainer.save_onnx(folder / "networks" / "paper" / f"{NAME}.onnx")
    return folder


@pytest.fixture(scope="module")
def record(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    options = f"--networks {NAME} --radii 1/4 --steps 150 --images 2".split()
    folders = ["--data", str(data), "--trained", str(out), "--out", str(out / "weights.json")]
    weights.main([*options, *folders])
    return out, json.loads((out / "weights.json").read_text())


def test_the_first_row_is_the_network_as_it_is(data, record):
    folder, found = record
    given = data / "networks" / "paper" / f"{NAME}.onnx"
    pixels = np.load(data / "cifar10" / "test.npz")["images"][:5].transpose(0, 3, 1, 2)
    feed = {"input": pixels.astype(np.float32) / 255}
    one, other = (
        np.asarray(onnxruntime.InferenceSession(path).run(None, feed)[0])
        for path in (given, folder / f"{NAME}_given.onnx")
    )
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert [row["radius"] for row in found["rows"]] == [None, "1/4"]


def test_what_is_measured(data, record):
    folder, found = record
    problems = common.load_problems(data / "cifar10" / "test.npz", 2, 8 / 255)
    for row, name in zip(found["rows"], ("given", "1_4"), strict=True):
        network = common.load_network(folder / f"{NAME}_{name}.onnx")
        ((low, high), _) = common.interval_bounds(network, problems.lower, problems.upper)
        assert row["neurons of either sign"] == np.sum((low < 0) & (high > 0)) / 2
        assert row["problems"] == 18
        assert 0 <= row["early"] <= 1
        assert row["intervals below the least value"] > 0
    # Training on interval bounds brings them nearer to the least value.
    before, after = (row["intervals below the least value"] for row in found["rows"])
    assert after < before
    assert weights.table(found).count("\n") == 4


def test_weights_of_other_layers_are_refused(data):
    images = Images.load(data / "cifar10" / "test.npz")
    trainer = Trainer(Settings(architecture="fc8", steps=1), images)
    with pytest.raises(ValueError, match="not of these layers"):
        trainer.begin([(np.zeros((9, 64)), np.zeros(9)), (np.zeros((10, 9)), np.zeros(10))])


def test_the_page_has_the_committed_result():
    page = (ROOT / "docs" / "paper.md").read_text()
    assert weights.table(json.loads(weights.RESULT.read_text())) in page
