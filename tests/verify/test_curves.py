"""What the search evaluates without a proof: against the checker's enclosures."""

import sys

import numpy as np
import onnx
import pytest
from exact import vnnlib

from stagecert.verify import choosing, complete, nodes, splitting, verify
from stagecert.verify.curves import convex
from stagecert.verify.models import OpenModel
from stagecert_check.functions import activation_of


@pytest.mark.parametrize("kind", ["exp", "reciprocal"])
def test_lines_are_those_of_the_checker(kind):
    draw, function = np.random.default_rng(3), activation_of(kind)
    low = draw.uniform(0.1, 3, 400) - (4 if kind == "exp" else 0)
    high = low + draw.uniform(0, 3, 400) * (draw.random(400) > 0.1)
    curve = convex(function, low)
    assert curve is not None
    # Slopes of all signs: some are those of no tangent.
    slope = draw.normal(size=400) * draw.choice([0, 0.1, 10], 400)
    for side in (1, -1):
        wanted = function.offset(low[None], high[None], slope[None], side)[0]
        found = curve.offset(low, high, slope, side)
        assert np.allclose(found, wanted, rtol=1e-6, atol=1e-6)
    ends = np.stack(function.image(low, low))
    assert np.allclose(curve.value(low), ends, rtol=1e-6)
    chord = curve.chord(low, high)
    wide = high > low
    assert np.allclose((chord * (high - low))[wide], (curve.value(high) - curve.value(low))[wide])
    assert np.all(np.isfinite(chord))


def test_a_reciprocal_of_negative_numbers_is_left_to_the_checker():
    assert convex(activation_of("reciprocal"), np.array([-2.0, 1.0])) is None


@pytest.fixture
def attention(monkeypatch):
    """p q / (1 + exp(p)) of two relus, which are split: inputs are not."""
    monkeypatch.setattr(splitting, "LARGEST_DIMENSION", 0)
    return onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[1, 2] x) => (float[1, 1] y)
        <float[2, 1] first = {1, 0.5}, float[2, 1] second = {-0.5, 1}, float one = {1}> {
            a = MatMul(x, first)
            b = MatMul(x, second)
            p = Relu(a)
            q = Relu(b)
            m = Mul(p, q)
            e = Exp(p)
            s = Add(e, one)
            r = Reciprocal(s)
            y = Mul(m, r)
        }
        """
    )


def test_trial_splits_change_the_lines_of_one_layer(attention):
    form = nodes.Form(OpenModel(attention).program)
    draw, count = np.random.default_rng(0), 3
    low = draw.uniform(0.1, 1, (count, form.neurons)).astype(np.float32)
    low[:, : form.layers[next(iter(form.layers))].some.stop] -= 1
    high = low + 1
    below, above = nodes.default_slopes(form, low, high)
    nothing = np.zeros(low.shape, np.float32)
    box = np.full((count, 2), -1, np.float32), np.full((count, 2), 1, np.float32)
    lanes = nodes.Lanes(
        box, low, high, nothing.astype(np.int8), np.ones((count, 1, 1), np.float32),
        np.zeros((count, 1), np.float32), below, above, nothing, np.ones((count, 1), np.float32),
        np.zeros((count, len(form.layers)), np.float32), np.ones(count, np.float32),
    )  # fmt: skip
    picks = np.stack([draw.permutation(form.neurons) for _ in range(count)])
    found = choosing.parts_bounds(form, lanes, picks)
    cuts = choosing.split_points(form, low, high)
    for lane, k in np.ndindex(picks.shape):
        for side, ends in enumerate(("high", "low")):
            one = lanes[[lane]]  # a copy
            getattr(one, ends)[0, picks[lane, k]] = cuts[lane, picks[lane, k]]
            wanted = nodes.back(form, one, nodes.lines_of(form, one)).bound
            assert np.allclose(found[lane, k, side], wanted, atol=1e-5)


def test_one_tree_for_networks_that_multiply(attention, monkeypatch):
    # Tightening failed on reciprocals, and the tree was given up after its first steps.
    monkeypatch.setattr(
        complete.Complete, "tighten", lambda *_: pytest.fail("intervals were tightened")
    )
    monkeypatch.setattr(sys.modules["stagecert.verify.verify"], "FIRST_TREE_STEPS", 2)
    text = vnnlib([-1, -1], [1, 1], "(>= Y_0 0.5)", 1)
    found = verify(attention, text, 60)
    assert (found.answer, found.checked) == ("unsat", True), found.reason
    assert found.boxes > 1
