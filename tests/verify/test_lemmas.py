"""Ends of intervals that are proven by cases: nearer to what is attained, and never beyond."""

import sys

import numpy as np
import pytest
from exact import dense, random_layers, row_text, smallest_violation, vnnlib

from stagecert.verify import lemmas, splitting, verify
from stagecert.verify.complete import Complete
from stagecert.verify.models import OpenModel
from stagecert.verify.queries import groups_of
from stagecert_check import properties
from stagecert_check.checker import Checker

LOW, HIGH = [-1, -1], [1, 1]
ROWS = [(np.array([1.0, -0.5, 0.25]), np.array([0.5, 0.25]), 0.0)]


@pytest.fixture(autouse=True)
def no_splits_of_inputs(monkeypatch):
    monkeypatch.setattr(splitting, "LARGEST_DIMENSION", 0)


def intervals(layers):
    """Both ends for all neurons, side by side, as the search tightens them."""
    model = OpenModel(dense(layers))
    wanted = properties.load(text_of(layers, 0.01))
    search = Complete(Checker(model.program, wanted), groups_of(model.network, wanted)[1])
    assert search.tighten([np.ones(1, bool)], lambda: False)
    return search.whole(0).low, search.whole(0).high


def text_of(layers, slack: float) -> str:
    least = smallest_violation(layers, LOW, HIGH, ROWS)
    rows = "".join(row_text(a, c, round(b + least - slack, 9)) for a, c, b in ROWS)
    return vnnlib(LOW, HIGH, f"(and {rows})", 3)


def arguments(layers, points):
    """What the neurons read at some points."""
    found, x = [], points
    for weights, bias in layers[:-1]:
        found.append(x @ weights.T + bias)
        x = np.maximum(found[-1], 0)
    return np.concatenate(found, axis=1)


def test_ends_come_nearer_and_stay_outside(monkeypatch):
    points = np.random.default_rng(0).uniform(LOW, HIGH, (20_000, 2))
    nearer = 0.0
    for seed in range(4):
        layers = random_layers(seed, (2, 5, 4, 3))
        low, high = intervals(layers)
        met = arguments(layers, points)
        slip = 1e-5  # what is met is computed in double precision, from weights in single
        assert np.all(low <= met.min(axis=0) + slip)
        assert np.all(high >= met.max(axis=0) - slip)
        with monkeypatch.context() as patch:
            patch.setattr(lemmas.Prover, "_nearer", lambda *_: [])
            wide_low, wide_high = intervals(layers)
        # Neurons that are off on the box have the intervals that show it.
        on = (high > 0) & (wide_high > 0)
        assert np.all((high - low)[on] <= (wide_high - wide_low)[on] * (1 + 1e-6))
        nearer += float(np.sum((wide_high - wide_low - high + low)[on]))
    assert nearer > 1


def test_the_checker_confirms_what_rests_on_them(monkeypatch):
    """All trees begin on these intervals: certificates have the cases."""
    proven = []
    nearer = lemmas.Prover._nearer

    def counted(self, entries):
        found = nearer(self, entries)
        proven.append(len(found))
        return found

    monkeypatch.setattr(lemmas.Prover, "_nearer", counted)
    monkeypatch.setattr(sys.modules["stagecert.verify.verify"], "FIRST_TREE_STEPS", 1)
    for seed in range(3):
        layers = random_layers(seed, (2, 5, 4, 3))
        for slack, answer in ((1e-3, "unsat"), (-1e-3, "sat")):
            found = verify(dense(layers), text_of(layers, slack), 60)
            assert found.answer == answer
            assert found.checked or answer == "sat"
    assert sum(proven) > 0
