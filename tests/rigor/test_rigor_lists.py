"""The checker reads what the search reads, and refuses what it refuses."""

import numpy as np
import onnxruntime
import pytest
import rigor_catalogue as catalogue

from stagecert.errors import ProblemError
from stagecert.networks.importers.onnx import model as importer
from stagecert_check import checker, graph  # noqa: F401  (the checker registers operators)
from stagecert_check.functions import Refused
from stagecert_check.numbers import Arithmetic

ENTRIES = [*catalogue.READ, *catalogue.REFUSED]


def test_the_lists_of_operators_are_equal():
    assert sorted(graph.HANDLERS) == importer.supported()


def test_the_catalogue_has_every_operator():
    # So that no operator can be added to one side without being compared.
    used = {node.op_type for entry in catalogue.READ for node in entry.model().graph.node}
    assert set(graph.HANDLERS) - {"Constant"} <= used


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in ENTRIES])
def test_both_read_or_both_refuse(entry):
    data, outcomes = entry.model().SerializeToString(), []
    for read, refusal in (
        (lambda: graph.read(data, Arithmetic()), Refused),
        (lambda: importer.load(data), ProblemError),
    ):
        try:
            read()
        except refusal as error:
            outcomes.append(str(error))
        else:
            outcomes.append("read")
    assert (outcomes[0] == "read") == (outcomes[1] == "read"), outcomes
    assert (outcomes[0] == "read") == (entry in catalogue.READ)


@pytest.mark.parametrize(
    "entry", [pytest.param(e, id=e.name) for e in (*catalogue.REDUCTIONS, *catalogue.BLENDED)]
)
def test_the_importer_computes_what_runtimes_do(entry):
    model = entry.model()
    network = importer.load(model.SerializeToString())
    points = np.random.default_rng(0).normal(size=(3, *entry.shape)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for x in points if entry.runtime else ():
        (found,) = map(np.asarray, session.run(None, {"x": x}))
        (value,) = network.run(x)
        np.testing.assert_allclose(np.asarray(value), found, rtol=1e-4, atol=1e-5)
