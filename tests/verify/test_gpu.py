"""Nodes on a GPU: the same bounds, through arrays that are never mixed with NumPy's."""

import numpy as np
import pytest
from elsewhere import Elsewhere, Library
from exact import dense, random_layers, row_text, smallest_violation, vnnlib

from stagecert.verify import gpu, splitting, verify
from stagecert.verify.ascent import ascend
from stagecert.verify.choosing import parts_bounds
from stagecert.verify.complete import Complete
from stagecert.verify.models import OpenModel
from stagecert.verify.nodes import Form
from stagecert.verify.queries import groups_of
from stagecert_check import properties
from stagecert_check.checker import Checker

LOW, HIGH = [-1, -1], [1, 1]


@pytest.fixture
def there(monkeypatch):
    """A GPU that takes any network."""
    monkeypatch.setattr(splitting, "LARGEST_DIMENSION", 0)
    monkeypatch.setattr(gpu, "library", Library)
    monkeypatch.setattr(gpu, "LEAST_WORK", 0)


def property_of(layers, slack: float) -> str:
    rows = [(np.array([1.0, -0.5, 0.25]), np.array([0.5, 0.25]), 0.0),
            (np.array([-0.5, 1.0, 0.5]), np.array([0.0, -0.5]), 0.0)]  # fmt: skip
    least = smallest_violation(layers, LOW, HIGH, rows)
    text = "".join(row_text(a, c, round(b + least - slack, 9)) for a, c, b in rows)
    return vnnlib(LOW, HIGH, f"(and {text})", 3)


@pytest.mark.parametrize("seed", range(3))
def test_properties_are_decided_there_as_enumeration_says(seed, there):
    layers = random_layers(seed, (2, 4, 3, 3))
    for slack, answer in ((1e-2, "unsat"), (-1e-2, "sat")):
        found = verify(dense(layers), property_of(layers, slack), 60)
        assert found.answer == answer
        assert found.checked or answer == "sat"


def test_the_tree_is_bounded_there(there):
    layers = random_layers(1, (2, 6, 5, 3))
    model = OpenModel(dense(layers))
    wanted = properties.load(property_of(layers, 1e-3))
    search = Complete(Checker(model.program, wanted), groups_of(model.network, wanted)[1])
    assert search.plant([np.ones(1, bool)], lambda: False)
    tree = search.tree
    assert tree is not None
    assert isinstance(tree.form.there.like, Elsewhere)  # type: ignore
    while not tree.done:
        tree.step()
    assert search.branches()[0].leaves > 1
    # The same lanes here and there.
    tree = Complete(Checker(model.program, wanted), search.groups)
    assert tree.plant([np.ones(1, bool)], lambda: False)
    lanes = tree.tree._lanes(tree.tree.stack.pop(1))  # type: ignore
    picks = np.zeros((1, 2), int)
    found = []
    for form in (tree.tree.form, Form(tree.tree.program)):  # type: ignore
        found.append((ascend(form, lanes, 9, np.array([np.inf])), parts_bounds(form, lanes, picks)))
    (one, parts), (other, others) = found
    for name in ("bound", "points", "scores", "units"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.lanes.below, other.lanes.below)
    np.testing.assert_allclose(parts, others, rtol=1e-5, atol=1e-6)


def test_convolutions_are_matrices_there(there):
    from stagecert_check.linear import Conv

    draw = np.random.default_rng(0)
    conv = Conv(
        draw.normal(size=(3, 2, 3, 3)).astype(np.float32), 1, (2, 2), (1, 1), (1, 1), (4, 4)
    )
    unit = np.eye(2 * 8 * 8, dtype=np.float32).reshape(-1, 1, 2, 8, 8)
    dense = gpu.Dense(conv.forward([unit]).reshape(len(unit), -1), (1, 3, 4, 4))
    x, g = (draw.normal(size=(5, 1, *shape)) for shape in ((2, 8, 8), (3, 4, 4)))
    np.testing.assert_allclose(dense.forward([x]), conv.forward([x]), atol=1e-5)
    shapes = [(1, 2, 8, 8)]
    np.testing.assert_allclose(
        dense.transposed(g, shapes)[0], conv.transposed(g, shapes)[0], atol=1e-5
    )


def test_nothing_is_sent_without_a_gpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    gpu.library.cache_clear()
    assert gpu.library() is None
    gpu.library.cache_clear()
