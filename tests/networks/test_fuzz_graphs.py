"""A few hundred written graphs; `python -m benchmarks.fuzz graphs` runs ten thousand.

Every graph comes with its exact values, so a wrong network, a bound that does not hold and a
certificate of something false are all noticed. Some planted faults show that they are.
"""

import collections
import json
import random
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from flint import fmpq

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.fuzz import exact, graph_run, graphs, points
from benchmarks.fuzz.__main__ import RESULTS
from benchmarks.fuzz.checks import Checks, Shares, property_text
from benchmarks.fuzz.mutant_run import hunt
from benchmarks.fuzz.mutants import all_mutants, operators_with_mutants
from stagecert.networks.importers.onnx.model import supported
from stagecert_check import properties
from stagecert_check.graph import HANDLERS

CHEAP = Shares(ibp=0, backward=0, compiled=0, forged=0.3, rational=0.1, proofs=0, verify=0)


def _checked(shares: Shares, seed: int, count: int, focus=()):
    checks, done, violations = Checks(shares), collections.Counter(), []
    try:
        for number in range(count):
            found = checks.run(graphs.write(seed, number, focus), random.Random(number))
            done.update(found.done)
            violations += [(number, one) for one in found.violations]
    finally:
        checks.close()
    return done, violations


def test_networks_and_checker_compute_what_graphs_mean():
    done, violations = _checked(CHEAP, 3, 200)
    assert violations == []
    # A fuzzer that everything is refused to finds nothing.
    assert done["loaded"] >= 120
    assert done["checker"] >= 120
    assert done["checker bounds"] >= 2000
    assert done["forged"] >= 25
    assert done["runtime"] >= 40  # where the exact evaluation itself was compared


def test_bounds_hold_without_tolerance():
    shares = Shares(ibp=1, backward=0.2, compiled=0, forged=0, rational=0, proofs=0, verify=0)
    done, violations = _checked(shares, 4, 6)
    assert violations == []
    assert done["ibp"] >= 4
    assert done["finite bounds"] >= 50


def test_every_operator_is_written_and_models_are_reproducible():
    seen = set()
    for number in range(1500):
        seen |= graphs.write(5, number).seen
        if seen >= set(supported()):
            break
    assert set(supported()) <= seen
    one, other = graphs.write(5, 17), graphs.write(5, 17)
    assert one.model.SerializeToString() == other.model.SerializeToString()
    assert graphs.write(6, 17).model.SerializeToString() != one.model.SerializeToString()


def test_exact_values():
    def value(operator, *inputs, opset=18, **settings):
        names = [f"x{k}" for k in range(len(inputs))]
        node = onnx.helper.make_node(operator, names, ["y"], **settings)
        arrays = [exact.numbers(x) for x in inputs]
        return exact.node_outputs(node, arrays, opset, {})[0]

    third = fmpq(1, 3)
    assert value("Mean", [1.0], [0.0], [0.0]).tolist() == [third]
    assert value("Div", [1.0], [3.0]).tolist() == [third]
    # Default numbers of ONNX are float32.
    (leaky,) = value("LeakyRelu", [-1.0]).tolist()
    assert leaky == -exact.number(float(np.float32(0.01)))
    assert value("Sum", [1.0], [1e30], [1.0], [-1e30]).tolist() == [fmpq(2)]
    assert value("HardSwish", [1.0]).tolist() == [fmpq(2, 3)]
    (gelu,) = value("Gelu", [1.0], opset=20).tolist()
    assert abs(float(gelu.mid()) - 0.8413447460685429) < 1e-15
    assert gelu.rad() < 1e-100
    with pytest.raises(exact.Vague):
        value("Div", [1.0], [0.0])


def test_properties_say_exactly_what_is_meant():
    graph = graphs.write(7, 3)
    case = (2, graph.rows(random.Random(0), 2)[0], fmpq(1, 2**70) + 5)
    (read,) = properties.load(property_text(graph, [case])).cases
    assert read.inputs.lower64.tolist() == graph.low[2].tolist()
    assert read.inputs.upper64.tolist() == graph.high[2].tolist()
    (row,) = read.outputs
    found = fmpq(row.bound.numerator, row.bound.denominator)
    # The reader may multiply a row by a positive number.
    place, factor = row.outputs[0]
    assert (
        found / fmpq(factor.numerator, factor.denominator) * exact.number(case[1][place]) == case[2]
    )


@pytest.mark.parametrize("name", [
    "importer: Gemm ignores beta", "importer: Conv swaps its pads",
    "importer: hard_swish is recognised with a tolerance",
    "importer: sums of constants are rounded",
    "importer: float64 weights are stored in float32",
    "checker: AveragePool counts padding", "checker: Slice walks forwards always",
    "checker: Clip ignores its upper bound", "checker: entries are moved by one place",
    "checker: intervals are tightened too far", "checker: rounding is not charged",
    "checker: certificates are accepted with a tolerance",
])  # fmt: skip
def test_planted_faults_are_found(name):
    found = hunt(all_mutants()[name], 80, 0, gate=False)
    assert found["killed_by"]


def test_the_record_says_what_was_tested(tmp_path):
    counts, failures = graph_run.tried(3, 0, tmp_path)
    assert failures == []
    assert counts["graphs"] == 1
    record = graph_run.readable({"outcomes": {**counts, "violation network": 2}})
    assert record["violations"] == {"network": 2}
    assert all(row["seen"] == 1 for row in record["operators"].values())


def test_every_operator_has_a_mutant_and_the_record_has_every_mutant():
    assert operators_with_mutants() >= {*supported(), *HANDLERS}
    mutants = all_mutants()
    record = json.loads((RESULTS / "mutants.json").read_text())
    assert {f"{row['side']}: {row['mutant']}" for row in record["rows"]} == set(mutants)
    assert record["failures"] == []
    assert sum(one.side == "importer" for one in mutants.values()) >= 30
    assert sum(one.side == "checker" for one in mutants.values()) >= 30


def test_points_and_corners_are_above_bounds_and_a_planted_fault_is_found(monkeypatch):
    record = points.run(30, 3)
    assert record["failures"] == []
    assert record["done"]["points"] >= 300
    right = points.lower_bounds
    monkeypatch.setattr(points, "lower_bounds", lambda *args: right(*args) + 0.5)
    assert points.run(30, 3)["failures"]
