"""`robust` as a sweep: its rows do not depend on which images come together."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from sweep_works import CONFIGURATION

import stagecert
from stagecert import sweeps
from stagecert.cli.running import engine_of, with_address
from stagecert.errors import ProblemError
from stagecert.robust.robust import Robustness
from stagecert.sweeps import InProcess, Item, Processes, Ray, Row, Store

DIGITS = Path(stagecert.__file__).parent / "digits"
EPS, LIMIT, BATCH = "0.08", 24, 8


@pytest.fixture(scope="module")
def run():
    with np.load(DIGITS / "digits.npz") as file:
        images, labels = file["images"][50:], file["labels"][50:]
    return Robustness(DIGITS / "digits.onnx", images, labels, EPS, limit=LIMIT, batch=BATCH)


def test_rows_do_not_depend_on_which_images_come_together(run):
    """So a batch whose process died twice can be taken apart without any change of the table."""
    work = pickle.loads(pickle.dumps(run.work))
    compute = work.prepare()

    def rows(size: int) -> list[tuple]:
        parts = (run.items[begin : begin + size] for begin in range(0, LIMIT, size))
        return [(row.key, row.data, row.blob) for part in parts for row in compute(part)]

    whole = rows(BATCH)
    assert {"attacked", "certified", "unknown"} <= {data["status"] for _, data, _ in whole}
    assert rows(1) == whole
    assert rows(3) == whole


def test_an_image_that_fails_is_an_error_in_the_table(run):
    class Fails:
        def prepare(self):
            def rows(items):
                if any(item.place == 5 for item in items):
                    raise RuntimeError("RESOURCE_EXHAUSTED")
                return [run.work.failed(item, "") for item in items]

            return rows

        def failed(self, item: Item, why: str) -> Row:
            return run.work.failed(item, why)

    with Store(None, CONFIGURATION) as store:
        sweeps.run(run.items, Fails(), store, batch=BATCH)
        found = list(store.rows())
        run.forget_errors(store)
        assert len(store) == 0
    assert len(found) == LIMIT
    assert found[5].data["status"] == "error"
    assert found[5].data["note"] == "RuntimeError: RESOURCE_EXHAUSTED"
    assert not found[5].data["certified"]
    assert found[5].data["label"] == run.work._data.labels[5]


def test_options_say_which_engine(monkeypatch):
    updates = []
    monkeypatch.setattr("jax.config.update", lambda *change: updates.append(change))
    assert engine_of(None, None) == InProcess()
    assert not updates
    assert engine_of("3", None) == Processes(3)
    assert engine_of("auto", None) == Processes(None)
    assert updates[-1] == ("jax_platforms", "cpu")
    assert engine_of(None, "any") == Ray(None, None)
    assert engine_of("2", "head:6379") == Ray("head:6379", 2)
    for workers in ("0", "-1", "many"):
        with pytest.raises(ProblemError, match="--workers must be auto or at least 1"):
            engine_of(workers, None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("robust m.onnx --ray", "robust m.onnx --ray=any"),
        ("robust --ray m.onnx", "robust --ray=any m.onnx"),
        ("robust --ray --quiet m.onnx", "robust --ray=any --quiet m.onnx"),
        ("robust m.onnx --ray head:6379", "robust m.onnx --ray head:6379"),
        ("robust m.onnx --ray auto", "robust m.onnx --ray auto"),
        ("robust m.onnx --ray=head:6379", "robust m.onnx --ray=head:6379"),
    ],
)
def test_an_address_need_not_be_given(before, after):
    assert with_address(before.split()) == after.split()
