"""Trees that split neurons: bounds on leaves against the exact truth, and certificates by hand."""

import itertools
import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import rigor_exact
import rigor_models as models
import rigor_soundness
import rigor_trees
from flint import arb, fmpq

from stagecert.verify import certificates
from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.models import opened
from stagecert.verify.proving import Refutation, Rejected, certify
from stagecert.verify.pruning import pruned, tried
from stagecert.verify.queries import groups_of
from stagecert_check import certificate as certificate_
from stagecert_check import check, command, properties
from stagecert_check.bounds import Facts
from stagecert_check.certificate import Certificate
from stagecert_check.functions import Refused


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
        case, pieces = _pieces(checkers[0], model)
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


def _pieces(checker, model):
    """The only case, and all linear pieces of the network on its box."""
    (case,) = checker.wanted.cases
    box = [[fmpq(v.numerator, v.denominator) for v in side]
           for side in (case.inputs.lower, case.inputs.upper)]  # fmt: skip
    return case, list(rigor_exact.traced(rigor_exact.layers_of(model), *box))


def test_so_they_are_with_forces_and_weights_of_all_sizes():
    leaves = 0
    for seed in range(30):
        random = np.random.default_rng(seed)
        model = rigor_soundness.random_model(random, (2, 4, 4, 2))
        (low, *_), (high, *_), _ = rigor_soundness.random_problems(random, 2)
        text = models.vnnlib(low, high + 1e-6, 2, "(assert (>= Y_0 Y_1))(assert (<= Y_0 0.3))")
        checker = rigor_trees.checker_of(model, text)
        tree = rigor_trees.random_tree(random, checker)
        powers = random.choice([-310, -300, -20, 5, 15, 25], size=len(tree.forces))
        tree = replace(tree, forces=tree.forces * 10.0**powers)
        case, pieces = _pieces(checker, model)
        for task, bound in zip(*rigor_trees.bounds_of(checker, tree), strict=True):
            truth = rigor_trees.exact_minimum(pieces, case, task)
            assert truth is None or rigor_exact.exact(bound) <= truth
            leaves += truth is not None
    assert leaves > 50


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


def test_a_tree_made_by_hand_is_accepted(proven, capsys):
    paths, trees = proven
    report = check(*paths)
    assert report.accepted, report.reasons
    assert check(*paths, exact=True).accepted
    assert max(len(tree.axes) for tree in trees) > 10
    # Some leaves have no points, so that their bounds are infinite: JSON has no such number.
    assert any(np.isinf(bound) for case in report.bounds for bound in case)
    assert command.run(*paths, as_json=True) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["accepted"]
    assert found["bounds"][0] == [b if np.isfinite(b) else None for b in report.bounds[0]]
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


def test_the_prover_takes_trees_and_names_leaves_that_are_open(proven, tmp_path, monkeypatch):
    paths, trees = proven
    wanted = properties.load(paths[1].read_bytes())
    model = opened(paths[0], wanted)
    made = Refutation(*groups_of(model.network, wanted), {}, None, (trees[1],))
    certificate = tmp_path / "c.cert"
    # The other case has no tree: the prover splits its box.
    certificate.write_bytes(certify(model, wanted, made).certificate)
    assert check(paths[0], paths[1], certificate).accepted
    assert Certificate(certificate).version == 2

    with monkeypatch.context() as patch:  # a file that is larger than certificates may be
        patch.setattr(certificate_, "_LARGEST_FILE", 100)
        with pytest.raises(Rejected, match="larger than 100 bytes"):
            certify(model, wanted, made)

    weak = replace(trees[1], forces=np.zeros(len(trees[1].forces)))
    checker = rigor_trees.checker_of(onnx.load(paths[0]), paths[1].read_text())
    with pytest.raises(Rejected, match="leaves of trees and 0 boxes are not refuted; 0") as caught:
        certify(model, wanted, replace(made, branches=(trees[0], weak)))
    assert list(caught.value.open) == [1]
    np.testing.assert_array_equal(
        caught.value.open[1], np.flatnonzero(~tried(checker, weak).refuted)
    )


def _changed(paths, trees, **changes) -> str:
    """Why a certificate is refused whose second tree is changed behind the back of `Branches`."""
    broken = replace(trees[1])
    for name, value in changes.items():
        object.__setattr__(broken, name, value)
    rigor_trees.write(paths, [trees[0], broken])
    report = check(*paths)
    assert not report.accepted
    return report.reasons[0]


def test_what_is_wrong_with_a_tree_is_said(proven, tmp_path):
    files, trees = proven
    paths = [*files[:2], tmp_path / "c.cert"]
    tree = trees[1]
    split = tree.axes.tolist().index(max(tree.axes))

    def refused(**changes) -> str:
        return _changed(paths, trees, **changes)

    def put(array, value):
        array = array.copy()
        array.reshape(-1)[split % array.size] = value
        return array

    one = np.ones((1, 1, 5), "<f4")
    assert "fewer forces" in refused(forces=tree.forces[:-1])
    assert "more forces" in refused(forces=np.append(tree.forces, 0))
    assert "forces must not be negative" in refused(forces=put(tree.forces, -1e-9))
    assert "nor too large" in refused(forces=put(tree.forces, 1e31))
    assert "not finite" in refused(forces=put(tree.forces, np.nan))
    assert "multipliers must not be" in refused(multipliers=put(tree.multipliers, -1))
    assert "no input and no neuron" in refused(axes=put(tree.axes, 2 + 9))
    assert "outside of its box" in refused(axes=put(tree.axes, -2))
    assert "too large" in refused(cuts=put(tree.cuts, 1e31))
    assert "more nodes than parts" in refused(axes=tree.axes[::-1].copy())
    assert "'slopes' is not a list of 2" in refused(slopes=((one, None),))
    assert "its shape" in refused(slopes=(None, (one, None)))
    assert "for 2 leaves" in refused(slopes=((np.concatenate([one, one]), None), None))
    assert "too large" in refused(slopes=((one.astype("<f8") * 1e31, None), None))
    assert "one split less" in refused(axes=tree.axes[:-1], cuts=tree.cuts[:-1])
    rigor_trees.write(paths, trees)
    header, arrays = models.read(paths[2])
    models.write(paths[2], header | {"version": 1}, arrays)
    assert "exactly the keys" in check(*paths).reasons[0]


def test_boxes_of_the_whole_case_hold_on_its_parts():
    """Some bounds are better with them, and none is above the exact minimum."""
    better = 0
    for seed in (4, 18, 24):
        random, model, text = _problem(seed)
        checker = rigor_trees.checker_of(model, text)
        tree = replace(rigor_trees.random_tree(random, checker), slopes=())
        tasks, plain = rigor_trees.bounds_of(checker, tree)
        entries = np.tile(np.arange(4, dtype="<i4"), 2)
        slopes = random.uniform(0, 1, (8, 1, 5)).astype("<f4")
        sides = np.repeat([1, -1], 4).astype("<i4")
        whole = None, certificates.Rows(entries, sides, ((slopes, None),))
        _, found = rigor_trees.bounds_of(checker, replace(tree, whole=whole))
        case, pieces = _pieces(checker, model)
        for task, bound in zip(tasks, found, strict=True):
            truth = rigor_trees.exact_minimum(pieces, case, task)
            assert truth is None or rigor_exact.exact(bound) <= truth
        better += int(np.sum(found > plain + 1e-9))
    assert better > 0


def _by_cases(random) -> certificates.Cases:
    """Trees over the first activation's neurons, with random numbers, for those of the second."""
    axes, cuts, forces = [], [], []
    for _ in range(8):
        open_ = [0]
        while open_:
            depth = open_.pop()
            leaf = depth > 2 or (depth > 0 and random.integers(3) == 0)
            axes.append(-1 if leaf else int(random.integers(5)))
            cuts.append(0.0 if leaf or random.integers(2) else float(random.normal()))
            forces += [0.2 * float(x) for x in random.exponential(size=depth) if leaf]
            open_ += [] if leaf else [depth + 1] * 2
    leaves = sum(axis == LEAF for axis in axes)
    slopes = random.uniform(0, 1, (leaves, 1, 5)).astype("<f2")
    zeroed = np.array(forces) * random.integers(2, size=len(forces))
    return certificates.Cases(
        np.tile(np.arange(4, dtype="<i4"), 2), np.repeat([1, -1], 4).astype("<i4"),
        np.array(axes, "<i4"), np.array(cuts, "<f8"), zeroed, ((slopes, None),),
    )  # fmt: skip


def _with_cases(tree: Branches, cases: certificates.Cases) -> Branches:
    nothing = np.zeros(0, "<i4")
    return replace(tree, whole=(None, certificates.Rows(nothing, nothing, (None,), cases=cases)))


def test_intervals_that_are_proven_by_cases_hold():
    """Some bounds are better with them, and none is above the exact minimum."""
    better = checked = 0
    for seed in (2, 4, 7, 9, 18, 24):
        random, model, text = _problem(seed)
        checkers = [rigor_trees.checker_of(model, text, exact) for exact in (False, True)]
        tree = replace(rigor_trees.random_tree(random, checkers[0]), slopes=())
        tasks, plain = rigor_trees.bounds_of(checkers[0], tree)
        tree = _with_cases(tree, _by_cases(random))
        _, found = rigor_trees.bounds_of(checkers[0], tree)
        _, exact = rigor_trees.bounds_of(checkers[1], tree)
        case, pieces = _pieces(checkers[0], model)
        for task, bound, other in zip(tasks, found, exact, strict=True):
            truth = rigor_trees.exact_minimum(pieces, case, task)
            if truth is not None:
                checked += 1
                assert rigor_exact.exact(bound) <= truth
                assert abs(bound - other) <= 1e-9 * (1 + abs(other))
        better += int(np.sum(found > plain + 1e-9))
    assert checked > 15
    assert better > 3


def test_proofs_by_cases_that_are_none_are_refused():
    random, model, text = _problem(4)
    checker = rigor_trees.checker_of(model, text)
    tree = Branches(0, np.array([-1]), np.zeros(1), np.ones((1, 2)), np.zeros(0))
    good = _by_cases(random)
    ((slopes, _),) = good.slopes  # type: ignore
    good = replace(good, slopes=((slopes[:1], None),))  # those of all leaves
    later = np.where(good.axes == LEAF, LEAF, 5).astype("<i4")  # the second activation's first
    for changes, why in (
        ({"axes": good.axes[:-1], "cuts": good.cuts[:-1]}, "fewer nodes than parts"),
        ({"axes": np.append(good.axes, good.axes[-1]), "cuts": np.append(good.cuts, 0)}, "more"),
        ({"axes": later}, "no neuron that can be split"),
        ({"forces": good.forces[:-1]}, "fewer forces"),
        ({"forces": np.append(good.forces, 0)}, "more than the trees"),
        ({"forces": good.forces - 1}, "forces must not be negative"),
        ({"entries": good.entries[::-1].copy()}, "do not increase"),
        ({"entries": good.entries[:7], "sides": good.sides[:7]}, "more than the trees"),
        ({"slopes": ((slopes[:2], None),)}, "slopes are for 2 leaves"),
    ):
        with pytest.raises(Refused, match=why):
            rigor_trees.bounds_of(checker, _with_cases(tree, replace(good, **changes)))


def _stations(random, tree, inputs: int) -> dict:
    """Passes with random slopes and forces for the second activation, at some nodes of a tree."""
    found, open_ = (
        {},
        [(0, False)],
    )  # (splits of neurons, whether inputs are cut) of what is to come
    for node, axis in enumerate(tree.axes.tolist()):
        splits, cut = open_.pop()
        if not cut and random.integers(3):
            entries = np.tile(np.arange(4, dtype="<i4"), 2)
            sides = np.repeat([1, -1], 4).astype("<i4")
            slopes = random.uniform(0, 1, (8, 1, 5)).astype("<f2")
            forces = random.exponential(size=(8, splits)) * random.integers(2, size=(8, splits))
            rows = certificates.Rows(entries, sides, ((slopes, None),), forces.astype("<f4"))
            found[node] = None, rows
        if axis >= 0:
            open_ += [(splits + (axis >= inputs), cut or axis < inputs)] * 2
    return found


def test_intervals_that_are_derived_at_nodes_hold_on_their_leaves():
    """Some bounds are better with stations, and none is above the exact minimum."""
    better = checked = 0
    for seed in (2, 4, 7, 9, 18, 24):
        random, model, text = _problem(seed)
        checkers = [rigor_trees.checker_of(model, text, exact) for exact in (False, True)]
        tree = replace(rigor_trees.random_tree(random, checkers[0]), slopes=())
        tasks, plain = rigor_trees.bounds_of(checkers[0], tree)
        tree = replace(tree, stations=_stations(random, tree, 2))
        _, found = rigor_trees.bounds_of(checkers[0], tree)
        _, exact = rigor_trees.bounds_of(checkers[1], tree)
        case, pieces = _pieces(checkers[0], model)
        for task, bound, other in zip(tasks, found, exact, strict=True):
            truth = rigor_trees.exact_minimum(pieces, case, task)
            if truth is not None:
                checked += 1
                assert rigor_exact.exact(bound) <= truth
                assert abs(bound - other) <= 1e-9 * (1 + abs(other))
        better += int(np.sum(found > plain + 1e-9))
    assert checked > 15
    assert better > 3


def test_a_station_is_for_the_leaves_below_it():
    """Its intervals, and passes of others, are of no use elsewhere."""
    _, model, text = _problem(4)
    checker = rigor_trees.checker_of(model, text)
    # Neuron 0 is split, and its part above again: the station is at the part below.
    tree = Branches(0, np.array([2, -1, 3, -1, -1]), np.zeros(5), np.ones((3, 2)), np.zeros(5))
    rows = certificates.Rows(np.arange(4, dtype="<i4"), np.ones(4, "<i4"), (None,),
                             np.ones((4, 1), "<f4"))  # fmt: skip
    for node, below in ((0, (0, 1, 2)), (1, (0,)), (2, (1, 2)), (4, (2,))):
        splits = {0: 0, 1: 1, 2: 1, 4: 2}[node]
        own = replace(rows, forces=np.ones((4, splits), "<f4"))
        arrays = certificates.Arrays()
        case = arrays.tree(replace(tree, stations={node: (None, own)}))
        tasks = list(checker.tasks(0, case))
        assert [task.number for task in tasks if task.station] == list(below)
        assert all(task.station.leads_to(task.path) for task in tasks if task.station and task.path)


def test_stations_that_are_none_are_refused():
    _, model, text = _problem(4)
    checker = rigor_trees.checker_of(model, text)
    low = float(checker.wanted.cases[0].inputs.lower64[0])
    entries, sides = np.arange(4, dtype="<i4"), np.ones(4, "<i4")

    def rows(force: float):
        return certificates.Rows(entries, sides, (), np.full((4, 1), force, "<f4"))

    cut = Branches(0, np.array([0, -1, -1]), np.full(3, low), np.ones((2, 2)), np.zeros(0))
    # Neuron 5 is the first of the second activation.
    early, late = (
        Branches(0, np.array([axis, -1, -1]), np.zeros(3), np.ones((2, 2)), np.zeros(2))
        for axis in (2, 7)
    )
    for tree, station, why in (
        (cut, (None, rows(0)), "a part of the box"),
        (early, (None, rows(-1)), "must not be negative"),
        (early, (None, rows(1e31)), "too large"),
        (late, (rows(1), None), "comes later"),
    ):
        with pytest.raises(Refused, match=why):
            rigor_trees.bounds_of(checker, replace(tree, stations={1: station}))


def _values(checker, points):
    """Intervals of the arguments of all activations, of inputs and of outputs at points."""
    with np.errstate(all="ignore"):
        facts = Facts(checker.real, checker.program, points, points).derive(passes=False)
    flat = [
        np.concatenate([ends[k].reshape(len(points), -1) for k in nodes], axis=1)
        for nodes in ([checker.program.nodes[k].arguments[0] for k in checker.activations],
                      checker.program.outputs)
        for ends in (facts.low, facts.high)
    ]  # fmt: skip
    return flat[:2], flat[2:]


def _check_at_points(model, text: str, count: int) -> int:
    """Compares bounds on the leaves of random trees with values at points of theirs; how many."""
    inside = 0
    for seed in range(count):
        random = np.random.default_rng(seed)
        checker = rigor_trees.checker_of(model, text)
        tree = rigor_trees.random_tree(random, checker, depth=3)
        # Slopes below a maximum must not be negative.
        slopes = tuple(pair and tuple(None if x is None else np.abs(x) for x in pair)
                       for pair in tree.slopes)  # fmt: skip
        tasks, found = rigor_trees.bounds_of(checker, replace(tree, slopes=slopes))
        case = checker.wanted.cases[0]
        low, high = (np.array(x, float) for x in (case.inputs.lower64, case.inputs.upper64))
        points = random.uniform(low, high, (50, len(low)))
        (hidden_low, hidden_high), (out_low, out_high) = _values(checker, points)
        for task, bound in zip(tasks, found, strict=True):
            path = task.path
            ends = hidden_low[:, path.neurons], hidden_high[:, path.neurons]
            excess = np.maximum(*(path.sides * (x - path.cuts) for x in ends))
            on = np.all(excess <= 0, axis=1)
            on &= np.all((task.low <= points) & (points <= task.high), axis=1)
            most = excess @ path.forces  # at least the value, up to rounding
            for row, multiplier in zip(case.outputs, task.multipliers, strict=True):
                most = most - multiplier * float(row.bound)
                for place, c in row.outputs:
                    ends = out_low[:, place], out_high[:, place]
                    most = most + multiplier * np.maximum(*(float(c) * x for x in ends))
                for place, c in row.inputs:
                    most = most + multiplier * float(c) * points[:, place]
            assert np.all(bound <= most[on] + 1e-12 * (1 + np.abs(most[on])))
            inside += int(on.sum())
    return inside


def test_leaves_of_a_network_with_all_activations():
    model = models.digits()
    text = models.vnnlib(np.full(64, 0.2), np.full(64, 0.6), 3, "(assert (>= Y_0 Y_1))")
    assert _check_at_points(model, text, 3) > 50


def test_rows_and_splits_of_the_same_value():
    """A relu of the input itself: its argument is in rows, and has forces."""
    make = models.Maker(0)
    x = make.node("Gemm", make.node("Relu", "x"), make.weights(2, 3), make.weights(3, size=4))
    x = make.node("Gemm", make.node("Tanh", x), make.weights(3, 2), make.weights(2, size=4))
    model = make.model([("x", [1, 2])], [(x, [1, 2])])
    formula = "(assert (<= (+ (* 1.5 X_0) Y_0) 0.1)) (assert (>= Y_1 0.2))"
    text = models.vnnlib([-1, -0.5], [0.7, 1], 2, formula)
    assert _check_at_points(model, text, 20) > 200
