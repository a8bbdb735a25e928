"""The training program, end to end on the 8 x 8 digits of scikit-learn."""

import json
from typing import Any

import jax
import numpy as np
import onnxruntime
import pytest
from sklearn.datasets import load_digits

from benchmarks.paper import train
from benchmarks.paper.training import loop
from benchmarks.paper.training.architectures import PAPER, hidden_units, parse
from benchmarks.paper.training.loop import Images, Settings, Trainer
from benchmarks.paper.training.model import logits
from stagecert import networks

EPS = 0.1
QUICK = {
    "architecture": "conv4x3/1 fc24",
    "eps": EPS,
    "steps": 250,
    "batch": 100,
    "rate": 5e-3,
    "attack_steps": 3,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Files with images for training and for testing."""
    data: Any = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)[..., None]
    folder = tmp_path_factory.mktemp("digits")
    for name, some in (("train", slice(0, 1400)), ("test", slice(1400, None))):
        np.savez(folder / f"{name}.npz", images=images[some], labels=data.target[some])
    return folder


@pytest.fixture(scope="module")
def both(digits):
    return Images.load(digits / "train.npz"), Images.load(digits / "test.npz")


@pytest.fixture(scope="module")
def trained(both):
    """Networks trained in every way."""
    found = {}
    for training in ("plain", "adv", "ibp"):
        found[training] = Trainer(Settings(training=training, **QUICK), both[0])
        found[training].run()
    return found


def test_architectures_have_the_papers_numbers_of_hidden_units():
    counts = [hidden_units(parse(name, 10), (3, 32, 32)) for name in PAPER]
    assert counts == [100, 8308, 46912]


@pytest.mark.parametrize("text", ["conv8", "fc0", "fc10 dense3", "conv8x3/0", "conv0x3/1"])
def test_bad_architectures_are_named(text):
    with pytest.raises(ValueError, match="architecture: '"):
        parse(text, 10)


def test_training_teaches(both, trained):
    fresh = Trainer(Settings(**QUICK), both[0])
    start = np.argmax(logits(fresh.layers, "relu", fresh.parameters, both[1].images), axis=1)
    found = {name: trainer.measure(both[1]) for name, trainer in trained.items()}
    assert np.mean(start == both[1].labels) < 0.3
    assert min(found[name]["clean"] for name in found) > 0.75
    # Each kind of training is best at its own aim.
    assert found["adv"]["attacked"] > found["plain"]["attacked"] + 0.05
    assert found["ibp"]["intervals"] > found["plain"]["intervals"] + 0.2
    assert found["ibp"]["intervals"] > found["adv"]["intervals"] + 0.05
    for accuracy in found.values():
        assert accuracy["intervals"] <= accuracy["attacked"] <= accuracy["clean"]


def test_certified_accuracy_agrees_with_the_librarys_intervals(both, trained, tmp_path):
    """What training calls certified by intervals, `networks.bound` proves by its own intervals."""
    test = Images(both[1].images[:100], both[1].labels[:100])
    trainer = trained["ibp"]
    trainer.save_onnx(tmp_path / "net.onnx")
    lower, upper = (np.clip(test.images + s * EPS, 0, 1) for s in (-1, 1))
    rows = networks.margins(test.labels, 10)
    network = networks.load(tmp_path / "net.onnx")
    # One pass back is never worse here than intervals with the last layer merged, which is what
    # training measures; intervals on the outputs are never better.
    plain = networks.bound(network, lower, upper, rows, method="ibp", intermediate="ibp")
    back = networks.bound(network, lower, upper, rows, method="backward", intermediate="ibp")
    share = trainer.measure(test)["intervals"]
    assert np.mean(np.all(plain.bound > 0, axis=1)) <= share
    assert share <= np.mean(np.all(np.maximum(back.bound, plain.bound) > 0, axis=1)) + 0.05


def test_exported_file_computes_the_same(both, trained, tmp_path):
    for training, trainer in trained.items():
        path = tmp_path / f"{training}.onnx"
        trainer.save_onnx(path)
        images = both[1].images[:50]
        ours = logits(trainer.layers, "relu", trainer.parameters, images)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (theirs,) = map(np.asarray, session.run(None, {"input": images}))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        network = networks.load(path)
        read = jax.vmap(network.flat_outputs)(
            images.astype(np.float64)[:, None]
        )  # one image a batch
        np.testing.assert_allclose(read, theirs, rtol=1e-4, atol=1e-4)


def test_going_on_from_a_checkpoint_changes_nothing(both, tmp_path):
    settings = Settings(**{**QUICK, "steps": 12, "architecture": "fc8", "augment": True})
    whole = Trainer(settings, both[0])
    whole.run()
    first = Trainer(settings, both[0])
    first.run(tmp_path / "checkpoint", until=7)
    second = Trainer(settings, both[0])
    second.restore(tmp_path / "checkpoint")
    assert second.step == 7
    second.run()
    for one, other in zip(
        jax.tree.leaves(whole.parameters), jax.tree.leaves(second.parameters), strict=True
    ):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def test_checkpoints_of_other_settings_are_refused(both, tmp_path):
    short = Settings(**{**QUICK, "steps": 1, "architecture": "fc8"})
    trainer = Trainer(short, both[0])
    trainer.run(tmp_path / "checkpoint")
    other = Trainer(Settings(**{**QUICK, "steps": 1, "architecture": "fc8", "seed": 1}), both[0])
    with pytest.raises(ValueError, match="seed = 0, not 1"):
        other.restore(tmp_path / "checkpoint")


def test_schedule_of_interval_training():
    settings = Settings(training="ibp", eps=0.2, steps=100, warm_up=0.1, ramp=0.5, kappa=0.4)
    assert settings.schedule(0) == (0, 1)
    assert settings.schedule(10) == (0, 1)
    assert settings.schedule(35) == pytest.approx((0.1, 0.7))
    assert settings.schedule(60) == pytest.approx((0.2, 0.4))
    assert settings.schedule(99) == pytest.approx((0.2, 0.4))


def test_every_image_is_seen_once_an_epoch():
    seen = np.concatenate([loop._batches(30, 10, 5, step) for step in range(3)])
    assert sorted(seen) == list(range(30))
    assert not np.array_equal(loop._batches(30, 10, 5, 0), loop._batches(30, 10, 5, 3))


def test_command_line(digits, tmp_path, capsys):
    arguments = [
        *("--data", digits / "train.npz", "--test", digits / "test.npz", "--out", tmp_path),
        *("--networks", "tiny_softplus_ibp", "--architecture", "fc16", "--eps", "1/20"),
        *("--steps", 60, "--rate", 0.01),
    ]
    train.main([str(a) for a in arguments])
    record = json.loads((tmp_path / "tiny_softplus_ibp.json").read_text())
    assert record["settings"]["activation"] == "softplus"
    assert record["hidden units"] == 16
    assert record["accuracy"]["clean"] > 0.5
    assert networks.load(tmp_path / "tiny_softplus_ibp.onnx").output_size == 10
    assert not (tmp_path / "tiny_softplus_ibp.checkpoint").exists()
    with pytest.raises(SystemExit, match="is of other settings"):
        train.main([str(a) for a in arguments] + ["--seed", "3"])


def test_bad_data_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 4, 4, 1)), labels=[0, 1])
    with pytest.raises(ValueError, match="must be uint8"):
        Images.load(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", images=np.zeros((2, 4, 4, 1), np.uint8))
    with pytest.raises(ValueError, match="no array 'labels'"):
        Images.load(tmp_path / "b.npz")
    with pytest.raises(SystemExit, match="error: "):
        train.main(["--data", str(tmp_path / "none.npz"), "--out", str(tmp_path)])
