"""Trees that split neurons: bounds on leaves against the exact truth, and certificates by hand."""

import itertools
from dataclasses import replace

import numpy as np
import onnx
import pytest
import rigor_exact
import rigor_models as models
import rigor_soundness
import rigor_trees
from flint import arb, fmpq

from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.models import opened
from stagecert.verify.proving import Refutation, Rejected, certify
from stagecert.verify.pruning import pruned, tried
from stagecert.verify.queries import groups_of
from stagecert_check import check, properties
from stagecert_check.certificate import Certificate


def _problem(seed: int, activation="Relu"):
    random = np.random.default_rng(seed)
    model = models.mlp((2, 5, 4, 3), activation, seed=seed)
    centre, radius = random.normal(size=2), random.choice([0.1, 0.5, 2])
    formula = "(assert (>= Y_0 Y_1))(assert (<= Y_2 0.3))"
    return random, model, models.vnnlib(centre - radius, centre + radius, 3, formula)


def test_bounds_of_leaves_are_never_above_the_exact_minimum():
    near = leaves = 0
    for seed in range(12):
        random, model, text = _problem(seed)
        checkers = [rigor_trees.checker_of(model, text, exact) for exact in (False, True)]
        tree = rigor_trees.random_tree(random, checkers[0])
        tasks, found = rigor_trees.bounds_of(checkers[0], tree)
        _, exact = rigor_trees.bounds_of(checkers[1], tree)
        case = checkers[0].wanted.cases[0]
        box = [[fmpq(v.numerator, v.denominator) for v in side]
               for side in (case.inputs.lower, case.inputs.upper)]  # fmt: skip
        pieces = list(rigor_exact.traced(rigor_exact.layers_of(model), *box))
        for task, bound, other in zip(tasks, found, exact, strict=True):
            truth = rigor_trees.exact_minimum(pieces, case, task)
            if truth is None:
                continue
            assert rigor_exact.exact(bound) <= truth
            # Rationals show that nothing is allowed for that is not there.
            assert bound <= other + 1e-12 * (1 + abs(other))
            assert bound >= other - 1e-9 * (1 + abs(other))
            near += int(truth.p) / int(truth.q) - bound < 1e-9
            leaves += 1
    assert leaves > 30
    assert near > 5


@pytest.mark.parametrize("activation", ["Tanh", "Gelu"])
def test_bounds_of_leaves_of_smooth_networks_are_below_all_values(activation):
    function, inside = rigor_soundness.SMOOTH[activation], 0
    for seed in range(4):
        random, model, text = _problem(seed, activation)
        checker = rigor_trees.checker_of(model, text)
        tasks, found = rigor_trees.bounds_of(checker, rigor_trees.random_tree(random, checker))
        case = checker.wanted.cases[0]
        low, high = (np.array(x, float) for x in (case.inputs.lower64, case.inputs.upper64))
        for point in itertools.product(*np.linspace(low, high, 9).T):
            hidden, outputs = _balls(model, function, point)
            for task, bound in zip(tasks, found, strict=True):
                if np.all(task.low <= point) and np.all(point <= task.high):
                    value = _objective(case, task, hidden, outputs)
                    if value is not None:
                        assert arb(float(bound)) <= value
                        inside += 1
    assert inside > 100


def _balls(model, function, point) -> tuple[list[arb], list[arb]]:
    """The arguments of all activations and the outputs at a point."""
    x, hidden, layers = [arb(float(v)) for v in point], [], rigor_trees.layers_of(model)
    for number, (weights, bias) in enumerate(layers):
        x = [sum((arb(float(w)) * v for w, v in zip(column, x, strict=True)), arb(float(b)))
             for column, b in zip(weights.T, bias, strict=True)]  # fmt: skip
        if number < len(layers) - 1:
            hidden += x
            x = [function(v) for v in x]
    return hidden, x


def _objective(case, task, hidden, outputs) -> arb | None:
    """What is bounded on a leaf; None if the point may not be on it."""
    total, path = arb(0), task.path
    for neuron, cut, side, force in zip(
        path.neurons, path.cuts, path.sides, path.forces, strict=True
    ):
        excess = int(side) * (hidden[neuron] - arb(float(cut)))
        if not excess <= 0:
            return None
        total += arb(float(force)) * excess
    for row, multiplier in zip(case.outputs, task.multipliers, strict=True):
        excess = -arb(fmpq(row.bound.numerator, row.bound.denominator))
        for place, c in row.outputs:
            excess += arb(fmpq(c.numerator, c.denominator)) * outputs[place]
        total += arb(float(multiplier)) * excess
    return total


@pytest.fixture(scope="module")
def proven(tmp_path_factory):
    """Paths of a model, a property that holds by little, and a certificate of version 2."""
    return rigor_trees.proven(tmp_path_factory.mktemp("proven"))


def test_a_tree_made_by_hand_is_accepted(proven):
    paths, trees = proven
    report = check(*paths)
    assert report.accepted, report.reasons
    assert check(*paths, exact=True).accepted
    assert max(len(tree.axes) for tree in trees) > 10
    rigor_trees.write(paths, [_root_only(tree) for tree in trees])
    assert not check(*paths).accepted  # splits are needed
    rigor_trees.write(paths, trees)


def _root_only(tree: Branches) -> Branches:
    ones = np.ones((1, tree.multipliers.shape[1]))
    return Branches(tree.case, np.array([LEAF]), np.zeros(1), ones, np.zeros(0), tree.slopes)


def test_trees_are_pruned(proven):
    paths, trees = proven
    checker = rigor_trees.checker_of(onnx.load(paths[0]), paths[1].read_text())
    for tree in trees:
        small = pruned(checker, tree)
        assert np.all(tried(checker, small).refuted)
        assert small.leaves < tree.leaves / 3
        assert pruned(checker, tree, lambda: True).leaves == tree.leaves  # no time for it


def test_the_prover_takes_trees_and_names_leaves_that_are_open(proven, tmp_path):
    paths, trees = proven
    model, wanted = opened(paths[0]), properties.load(paths[1].read_bytes())
    made = Refutation(*groups_of(model.network, wanted), branches=(trees[1],))
    certificate = tmp_path / "c.cert"
    # The other case has no tree: the prover splits its box.
    certificate.write_bytes(certify(model, wanted, made).certificate)
    assert check(*paths[:2], certificate).accepted
    assert Certificate(certificate).version == 2

    weak = replace(trees[1], forces=np.zeros(len(trees[1].forces)))
    checker = rigor_trees.checker_of(onnx.load(paths[0]), paths[1].read_text())
    with pytest.raises(Rejected, match="leaves of trees are not refuted; 0") as caught:
        certify(model, wanted, replace(made, branches=(trees[0], weak)))
    assert list(caught.value.open) == [1]
    np.testing.assert_array_equal(
        caught.value.open[1], np.flatnonzero(~tried(checker, weak).refuted)
    )
