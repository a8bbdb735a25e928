"""A few instances of each VNN-COMP set: answers never contradict what is known."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from stagecert.verify import verify
from stagecert_check import properties

DATA = Path(os.environ.get("STAGECERT_DATA", Path(__file__).parents[3] / "shared" / "data"))
ROOT = DATA / "vnncomp"
pytestmark = pytest.mark.skipif(
    not ROOT.is_dir(), reason="the benchmark sets are not here; STAGECERT_DATA names their folder"
)

# (set, place in the set, whether it is decided within the time)
QUICK = [
    ("acasxu", 0, True),
    ("acasxu_v2", 60, False),
    ("cersyve", 0, True),
    ("collins_rul_cnn", 0, True),
    ("dist_shift", 0, False),
    ("mnist_fc", 1, False),
    ("reach_prob_density", 0, True),
    ("rl_benchmarks", 0, True),
]


@pytest.mark.parametrize(("name", "place", "decided"), QUICK)
def test_answers_agree_with_what_is_known(name, place, decided):
    if not (ROOT / name / "expected.csv").is_file():
        pytest.skip(f"the set {name} is not here")
    with (ROOT / name / "expected.csv").open() as file:
        row = list(csv.DictReader(file))[place]
    property = properties.load(ROOT / name / row["vnnlib"])
    found = verify(ROOT / name / row["onnx"], property, 300 if decided else 3)
    if decided:
        assert found.answer == row["expected"]
    assert found.answer in (row["expected"], "unknown", "timeout")
    if found.counterexample is not None:
        point = found.counterexample
        tolerance = 2e-6 * max(1.0, float(np.abs(point.inputs).max())) if point.tolerance else 0
        assert property.counterexample(point.inputs, point.outputs, tolerance)
