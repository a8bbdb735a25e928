"""The checker's own reading of ONNX operators, against ONNX Runtime, and transposes."""

import numpy as np
import pytest
import rigor_catalogue as catalogue
import rigor_models as models

from stagecert_check import (
    checker,  # noqa: F401  (it registers all operators)
    graph,
    operators,
)
from stagecert_check.bounds import Facts
from stagecert_check.functions import Refused
from stagecert_check.linear import Linear
from stagecert_check.numbers import Arithmetic


def _ids(entries):
    return [pytest.param(entry, id=entry.name) for entry in entries]


@pytest.mark.parametrize("entry", _ids(e for e in [*catalogue.READ, *catalogue.WIDER] if e.runtime))
def test_intervals_contain_what_runtimes_compute(entry):
    model, shape = entry.model(), entry.shape
    random = np.random.default_rng(1)
    x = 1.5 * random.normal(size=(3, int(np.prod(shape)))).astype(np.float32)
    wanted = models.run(model, x)
    for exact in (False, True):
        program = graph.read(model.SerializeToString(), Arithmetic(exact))
        for width in (0.0, 0.25):
            low, high = x.min(0).astype(float) - width, x.max(0).astype(float) + width
            if not width:
                low = high = x[0].astype(float)
            facts = Facts(Arithmetic(exact), program, low[None], high[None]).derive()
            found_low, found_high = (
                _floats(side[program.outputs[0]]) for side in (facts.low, facts.high)
            )
            some = wanted if width else wanted[:1]
            assert np.all(found_low <= some + 2e-5 * (1 + np.abs(some)))
            assert np.all(found_high >= some - 2e-5 * (1 + np.abs(some)))
            if not width:
                assert np.all(found_high - found_low <= entry.slack * (1 + np.abs(some)))
    _check_transposes(program)


def _floats(x):
    return np.array([int(v.p) / int(v.q) if hasattr(v, "p") else v for v in np.ravel(x)])


def _check_transposes(program):
    random = np.random.default_rng(2)
    for node in program.nodes:
        if not isinstance(node.operation, Linear):
            continue
        shapes = [program.nodes[k].shape for k in node.arguments]
        # Small whole numbers in rationals: equal means equal.
        xs = [random.integers(-5, 5, (1, *shape)).astype(object) for shape in shapes]
        g = random.integers(-5, 5, (1, *node.shape)).astype(object)
        y = node.operation.forward(xs)
        assert y.shape == (1, *node.shape)
        backs = node.operation.transposed(g, shapes)
        assert (g * y).sum() == sum((b * x).sum() for b, x in zip(backs, xs, strict=True))
        ones = [np.abs(x) for x in xs]
        assert np.all(node.operation.forward(ones, absolute=True) >= np.abs(y))


@pytest.mark.parametrize("entry", _ids(catalogue.REFUSED))
def test_what_is_not_understood_is_refused(entry):
    with pytest.raises(Refused):
        graph.read(entry.model().SerializeToString(), Arithmetic())


def test_operators_are_registered():
    assert operators.handles is graph.handles
    assert len(graph.HANDLERS) > 50
