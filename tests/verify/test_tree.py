"""The search through splits of neurons: against enumeration, gridding, and the checker."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from exact import dense, random_layers, row_text, smallest_violation, vnnlib

from stagecert.verify import complete, nodes, proving, resuming, splitting, verify
from stagecert.verify import tree as tree_
from stagecert.verify.ascent import ascend
from stagecert.verify.choosing import parts_bounds, split_points
from stagecert.verify.models import OpenModel
from stagecert.verify.pruning import Tried, tried
from stagecert.verify.queries import groups_of
from stagecert_check import properties
from stagecert_check.checker import Checker

LOW, HIGH = [-1, -1], [1, 1]


@pytest.fixture(autouse=True)
def no_splits_of_inputs(monkeypatch):
    """Inputs with few entries would be split themselves."""
    monkeypatch.setattr(splitting, "LARGEST_DIMENSION", 0)


def searched(model, text, tight: bool = False, most: int = 2000) -> complete.Complete:
    """A search without attacks, finished in at most so many steps."""
    model = OpenModel(model)
    wanted = properties.load(text)
    _, groups = groups_of(model.network, wanted)
    found = complete.Complete(Checker(model.program, wanted), groups)
    open_ = [np.ones(len(group.numbers), bool) for group in groups]
    if tight:
        assert found.tighten(open_, lambda: False)
    assert found.plant(open_, lambda: False)
    assert found.tree is not None
    for _ in range(most):
        found.tree.step()
        if found.tree.done or found.tree.stuck:
            break
    return found


def random_case(seed: int):
    """A network, rows that must hold together, and how far they are from doing so."""
    draw = np.random.default_rng(seed)
    layers = random_layers(seed, (2, 4, 3, 3))
    rows = [
        (np.round(draw.normal(size=3), 2), np.round(draw.normal(size=2), 2), 0.0)
        for _ in range(1 + seed % 3)
    ]
    return layers, rows, smallest_violation(layers, LOW, HIGH, rows)


def shifted(rows, by: float) -> str:
    text = "".join(row_text(a, c, round(b + by, 9)) for a, c, b in rows)
    return vnnlib(LOW, HIGH, f"(and {text})", 3)


@pytest.mark.parametrize("slack", [0.1, 1e-3, 1e-6])
def test_random_networks_are_decided_as_enumeration_says(slack):
    for seed in range(3):
        layers, rows, least = random_case(seed)
        none = verify(dense(layers), shifted(rows, least - slack), 60)
        assert none.answer == "unsat", (seed, none.reason)
        assert none.checked
        some = verify(dense(layers), shifted(rows, least + slack), 60)
        assert some.answer == "sat" or (some.answer == "unknown" and slack < 1e-5)


@pytest.mark.parametrize("stations", [False, True])
@pytest.mark.parametrize("tight", [False, True])
def test_the_checker_refutes_every_leaf(tight, stations, monkeypatch):
    """Also where intervals are derived anew as early as possible."""
    monkeypatch.setattr(tree_, "STEPS_A_NODE", 1e9 if stations else 1e-9)
    splits = used = 0
    for seed in range(4, 8):
        layers, rows, least = random_case(seed)
        text = shifted(rows, least - 0.02)
        found = searched(dense(layers), text, tight)
        assert found.tree is not None
        assert found.tree.done
        for branches in found.branches():
            checker = Checker(found.program, properties.load(text))
            assert tried(checker, branches).refuted.all()
            splits += branches.leaves - 1
            used += len(branches.stations)
    assert splits > 3
    assert (used > 3) == stations


def test_neurons_that_are_zero_are_left_out_and_come_back_in_certificates():
    layers, rows, least = random_case(6)
    # Neurons that are off on the whole box, before, between and after the others.
    for k in (0, 1):
        w, b = layers[k]
        order = np.insert(np.arange(len(w)), [0, 2, len(w)], -1)
        off = order < 0
        w = np.where(off[:, None], w[0], w[order]).astype(np.float32)
        layers[k] = w, np.where(off, -50, b[order]).astype(np.float32)
        after, bias = layers[k + 1]
        layers[k + 1] = np.where(off, 1, after[:, order]).astype(np.float32), bias
    text = shifted(rows, least - 0.02)
    found = searched(dense(layers), text, True)
    assert found.tree is not None
    assert found.tree.done
    assert found.tree.form.neurons <= found.form.neurons - 6
    (tree,) = found.branches()
    assert tried(Checker(found.program, properties.load(text)), tree).refuted.all()
    wrong = searched(dense(layers), shifted(rows, least + 1e-4), True)
    assert wrong.tree is not None
    assert not wrong.tree.done


def test_what_is_proven_by_cases_is_true_of_the_network():
    """On a grid; what was proven is in the certificate."""
    signs = nearer = 0
    for seed in range(2):
        layers = random_layers(seed, (2, 8, 8, 8, 3))
        rows = [(np.array([1.0, -1.0, 0.5]), np.zeros(2), 0.0)]
        grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 101)] * 2), axis=-1).reshape(-1, 2)
        arguments, value = [], grid
        for w, b in layers:
            arguments.append(value @ w.astype(float).T + b)
            value = np.maximum(arguments[-1], 0)
        text = shifted(rows, float(np.min(arguments[-1] @ rows[0][0])) - 0.05)
        found = searched(dense(layers), text, True)
        assert found.tree is not None
        assert found.tree.done
        (tree,) = found.branches()
        assert tried(Checker(found.program, properties.load(text)), tree).refuted.all()
        given = [(k, x.cases) for k, x in enumerate(tree.whole) if x is not None and x.cases]
        for k, cases in given:
            constant = np.all(cases.sides * arguments[k][:, cases.entries] > 0, axis=0)
            signs, nearer = signs + int(np.sum(constant)), nearer + int(np.sum(~constant))
        whole, met = found.whole(0), np.concatenate(arguments[:-1], axis=1)
        assert np.all(whole.low <= met + 1e-9)
        assert np.all(met <= whole.high + 1e-9)
    assert signs > 2
    assert nearer > 2


@pytest.mark.parametrize("stations", [False, True])
def test_a_property_with_a_counterexample_is_never_refuted(stations, monkeypatch):
    monkeypatch.setattr(tree_, "STEPS_A_NODE", 1e9 if stations else 1e-9)
    for seed in range(14, 18):
        layers, rows, least = random_case(seed)
        found = searched(dense(layers), shifted(rows, least + 1e-4))
        assert found.tree is not None
        assert not found.tree.done
        assert found.tree.stuck


def test_bounds_of_nodes_hold_at_their_points():
    # Random splits, forces and slopes: the bound is below the objective at every point of the node.
    layers, rows, _ = random_case(2)
    model = OpenModel(dense(layers))
    wanted = properties.load(shifted(rows, 0.0))
    _, (group,) = groups_of(model.network, wanted)
    found = complete.Complete(Checker(model.program, wanted), (group,))
    assert found.plant([np.ones(1, bool)], lambda: False)
    assert found.tree is not None
    taken = found.tree.stack.pop(1)
    draw, count, form = np.random.default_rng(0), 64, found.tree.form
    x = draw.uniform(-1, 1, (4000, 2))
    first = x @ layers[0][0].T.astype(float) + layers[0][1]
    second = np.maximum(first, 0) @ layers[1][0].T.astype(float) + layers[1][1]
    y = np.maximum(second, 0) @ layers[2][0].T.astype(float) + layers[2][1]
    values, ends = np.hstack([first, second]), np.hstack([y, x])
    low, high = (np.repeat(box, count, axis=0) for box in found.tree.boxes)
    lanes = nodes.Lanes(
        (low, high),
        **{name: np.repeat(taken[name], count, axis=0) for name in ("low", "high", "held")},
        rows=np.repeat(found.tree.rows, count, axis=0),
        limits=np.repeat(found.tree.limits, count, axis=0),
        below=draw.random((count, form.neurons)).astype(np.float32),
        above=draw.random((count, form.neurons)).astype(np.float32),
        force=np.zeros((count, form.neurons), np.float32),
        weights=draw.random((count, len(rows))).astype(np.float32),
        units=np.zeros((count, 2), np.float32),
        scale=np.ones(count, np.float32),
    )
    side = draw.integers(0, 3, lanes.low.shape) * ((lanes.low < 0) & (lanes.high > 0))
    lanes.held[:] = side
    lanes.force[:] = draw.random(side.shape) * np.select([side == 1, side == 2], [-1, 1])
    lanes.low[side == 1] = 0
    lanes.high[side == 2] = 0
    found_bounds = nodes.back(form, lanes, nodes.lines_of(form, lanes)).bound
    better = ascend(form, lanes, 5, np.full(count, np.inf))
    assert np.all(better.bound >= found_bounds)
    met = 0
    for k in range(count):
        inside = np.all((values >= lanes.low[k] - 1e-9) & (values <= lanes.high[k] + 1e-9), axis=1)
        met += int(inside.any())
        # Forces lower the objective at points of the node, so the rows alone are enough.
        for weights, bound in (
            (lanes.weights[k], found_bounds[k]),
            (better.lanes.weights[k], better.bound[k]),
        ):
            objective = ends[inside] @ (weights @ lanes.rows[k]) - weights @ lanes.limits[k]
            assert np.all(objective >= bound - 1e-4)
    assert met > 10
    # Splitting can only help, with the same slopes and forces, where lines get tighter.
    picks = np.argsort(-better.scores, axis=1)[:, :2]
    parts = parts_bounds(form, better.lanes, picks)
    assert np.isfinite(parts).all()
    cuts = split_points(form, lanes.low, lanes.high)
    assert np.all(cuts == 0)


def test_forces_become_large_where_splits_contradict_the_box():
    # For x up to 1, x - 2 is held above zero: a force f gives f - 13.
    layers = [(np.ones((1, 1)), np.array([-2])), (np.ones((1, 1)), np.zeros(1))]
    wanted = properties.load(vnnlib([-1], [1], "(<= Y_0 12)", 1))
    form = nodes.Form(Checker(OpenModel(dense(layers)).program, wanted).program)
    one = np.ones((1, 1), np.float32)
    lanes = nodes.Lanes(
        (-one, one), 0 * one, one, np.ones((1, 1), np.int8), one[:, :, None], 12 * one,
        0 * one, 0 * one, 0 * one, one, one, one[0],
    )  # fmt: skip
    assert ascend(form, lanes, 1, np.zeros(1)).bound[0] == -15
    found = ascend(form, lanes, 12, np.zeros(1))
    assert found.bound[0] > 0
    assert found.lanes.force[0, 0] < -13


def smooth_model(kind: str, seed: int) -> tuple[onnx.ModelProto, list]:
    layers = random_layers(seed, (2, 6, 5, 1))
    layers = [(3 * w, b) for w, b in layers]
    model = dense(layers)
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = kind
    return model, layers


@pytest.mark.parametrize(
    ("kind", "function", "steepest", "slack"),
    [
        ("Sigmoid", lambda x: 1 / (1 + np.exp(-x)), 0.25, 0.1),
        ("LeakyRelu", lambda x: np.where(x > 0, x, np.float32(0.01) * x), 1.0, 1e-3),
    ],
)
def test_other_activations_are_decided_as_a_fine_grid_says(kind, function, steepest, slack):
    model, layers = smooth_model(kind, 3)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 801)] * 2), axis=-1).reshape(-1, 2)
    value, speed = grid, np.eye(2)
    for k, (w, b) in enumerate(layers):
        value = value @ w.T.astype(float) + b
        speed = np.abs(w.astype(float)) @ speed
        if k < len(layers) - 1:
            value, speed = function(value), steepest * speed
    least, spread = float(value.min()), float(np.ptp(value))
    # Between two points of the grid the network moves by no more than this.
    slip = float(np.sum(speed)) / 800
    assert slip < 0.04 * spread
    limit = least - slip - slack * spread
    none = verify(model, vnnlib(LOW, HIGH, f"(<= Y_0 {limit:.6f})", 1), 120)
    assert (none.answer, none.checked) == ("unsat", True), none.reason
    some = verify(model, vnnlib(LOW, HIGH, f"(<= Y_0 {least + 0.01 * spread:.6f})", 1), 60)
    assert some.answer == "sat"


def test_leaves_that_the_checker_does_not_confirm_are_opened_again(monkeypatch):
    layers, rows, least = random_case(5)
    # Bounds that are nearly as good as needed pass in the search, and not in the checker.
    monkeypatch.setattr(complete, "ROUNDING", -1e-3)
    reopened = []
    real = complete.Complete.reopen

    def watched(self, open_):
        reopened.append(open_)
        real(self, open_)
        assert self.tree is not None
        self.tree.margin[:] = 1e-6

    monkeypatch.setattr(complete.Complete, "reopen", watched)
    found = verify(dense(layers), shifted(rows, least - 1e-3), 60)
    assert (found.answer, found.checked) == ("unsat", True), found.reason
    assert reopened


def test_time_and_memory_limits_are_kept():
    layers = random_layers(1, (30, 60, 60, 2))
    low, high = [-1] * 30, [1] * 30
    model = OpenModel(dense(layers))
    wanted = properties.load(vnnlib(low, high, "(<= Y_0 -2)", 2))
    _, groups = groups_of(model.network, wanted)
    found = complete.Complete(Checker(model.program, wanted), groups, memory=1e-4)
    # Once time is up, intervals are not searched for any more, and nothing is planted.
    assert not found.tighten([np.ones(1, bool)], lambda: True)
    assert not found.plant([np.ones(1, bool)], lambda: True)
    assert found.tree is None
    assert found.plant([np.ones(1, bool)], lambda: False)
    assert found.tree is not None
    for _ in range(60):
        found.tree.step()
        assert len(found.tree.stack) <= found.tree.most + found.tree.batch
    assert found.tree.seen > 60


def test_products_are_split_and_their_planes_tilted():
    # With p and q, the relus of x, the least value of p q (p - 1) on the box is -1 / 4; planes
    # through the corners of the boxes allow -1 / 2.
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[1, 2] x) => (float[1, 1] y)
        <float[2, 1] first = {1, 0}, float[2, 1] second = {0, 1}, float one = {1}> {
            a = MatMul(x, first)
            b = MatMul(x, second)
            p = Relu(a)
            q = Relu(b)
            m = Mul(p, q)
            n = Sub(p, one)
            y = Mul(m, n)
        }
        """
    )
    text = vnnlib(LOW, HIGH, "(<= Y_0 -0.3)", 1)
    found = searched(model, text)
    assert found.tree is not None
    assert found.tree.done
    (tree,) = found.branches()
    assert tree.leaves > 1
    assert tried(Checker(found.program, properties.load(text)), tree).refuted.all()
    never = searched(model, vnnlib(LOW, HIGH, "(<= Y_0 -0.24)", 1), most=20)
    assert never.tree is not None
    assert not never.tree.done


def test_leaves_that_are_never_confirmed_end_in_no_answer(monkeypatch):
    layers, rows, least = random_case(5)
    monkeypatch.setattr(
        proving, "all_tried", lambda _, trees, *__: [
            Tried(np.full(tree.leaves, -1.0), np.zeros(tree.leaves, bool)) for tree in trees
        ],
    )  # fmt: skip
    found = verify(dense(layers), shifted(rows, least - 1e-2), 120)
    assert found.answer == "unknown"
    assert found.rejected
    assert "not refuted" in (found.objection or "")


def test_nodes_with_open_maxima_are_no_linear_programs():
    # |x_0| + |x_1| as maxima of pairs: the least value is zero, in the middle.
    eye = np.eye(2, dtype=np.float32)
    nodes_ = [
        onnx.helper.make_node("Neg", ["x"], ["n"]),
        onnx.helper.make_node("Max", ["x", "n"], ["h"]),
        onnx.helper.make_node("Gemm", ["h", "w", "b"], ["y"]),
    ]
    stored = [onnx.numpy_helper.from_array(a, name)
              for name, a in (("w", eye), ("b", np.zeros(2, np.float32)))]  # fmt: skip
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2])
            for name in "xy"]  # fmt: skip
    graph = onnx.helper.make_graph(nodes_, "g", ends[:1], ends[1:], stored)
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    # Nothing is left to split, but where both arguments may win the network is not affine.
    none = verify(model, vnnlib(LOW, HIGH, "(<= (+ Y_0 Y_1) -0.05)", 2), 60)
    assert (none.answer, none.rejected) == ("unknown", False)
    assert "neither be split nor refuted" in none.reason
    some = verify(model, vnnlib(LOW, HIGH, "(<= (+ Y_0 Y_1) 0.05)", 2), 60)
    assert some.answer == "sat"


def test_what_linear_programs_refute_has_the_slopes_of_its_pieces(monkeypatch):
    # Hardly any ascent: slopes are then those of the root unless a linear program brings its own.
    monkeypatch.setattr(tree_, "ROOT_STEPS", 1)
    monkeypatch.setattr(tree_, "HERE", replace(tree_.HERE, steps=1))
    real, refuted = tree_.Tree._solve, 0

    def watched(self, found, k):
        nonlocal refuted
        done = real(self, found, k)
        if done:
            refuted += 1
            lane = found.lanes[k : k + 1]
            below, above = nodes.default_slopes(self.form, lane.low, lane.high)
            assert np.array_equal(lane.below, below)
            assert np.array_equal(lane.above, above)
        return done

    monkeypatch.setattr(tree_.Tree, "_solve", watched)
    layers = [(2 * w, b) for w, b in random_layers(1, (2, 4, 3, 1))]
    model = dense(layers)
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "LeakyRelu"
    value = np.stack(np.meshgrid(*[np.linspace(-1, 1, 201)] * 2), axis=-1).reshape(-1, 2)
    for k, (w, b) in enumerate(layers):
        value = value @ w.T.astype(float) + b
        value = np.where(value > 0, value, 0.01 * value) if k < len(layers) - 1 else value
    limit = value.min() - 0.01 * np.ptp(value)
    found = searched(model, vnnlib(LOW, HIGH, f"(<= Y_0 {limit:.6f})", 1))
    assert found.tree is not None
    assert found.tree.done
    assert refuted > 0


def test_a_search_goes_on_from_a_file_with_its_stations(tmp_path, monkeypatch):
    monkeypatch.setattr(tree_, "STEPS_A_NODE", 1e9)
    layers, rows, least = random_case(6)
    # A neuron that is off: it is left out of the tree, and of what is read from the file.
    w, b = layers[0]
    layers[0] = np.vstack([w, w[:1]]), np.append(b, np.float32(-50))
    layers[1] = np.hstack([layers[1][0], layers[1][0][:, :1]]), layers[1][1]
    text = shifted(rows, least - 0.02)
    model, wanted = OpenModel(dense(layers)), properties.load(text)
    _, groups = groups_of(model.network, wanted)
    first, second = (complete.Complete(Checker(model.program, wanted), groups) for _ in range(2))
    assert first.plant([np.ones(1, bool)], lambda: False)
    assert first.tree is not None
    while not first.tree.stations:
        first.tree.step()
    resuming.save(tmp_path / "search", "model", "property", {"complete": first})
    resuming.restore(tmp_path / "search", "model", "property", {"complete": second})
    tree = second.adopted(lambda: False)
    assert tree.form.neurons < second.form.neurons
    while not tree.done:
        tree.step()
    (found,) = second.branches()
    assert found.stations
    assert tried(Checker(model.program, wanted), found).refuted.all()


def test_slopes_where_clips_are_linear_are_those_of_the_checker(monkeypatch):
    # Other lines there may be better for a bound, but the checker does not take them.
    monkeypatch.setattr(tree_, "ROOT_STEPS", 1)
    monkeypatch.setattr(tree_, "HERE", replace(tree_.HERE, steps=1))
    layers = [(2 * w, b) for w, b in random_layers(2, (2, 4, 3, 1))]
    model = dense(layers)
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "Clip"
            node.input.extend(["zero", "one"])
    for name, end in (("zero", 0), ("one", 1)):
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.array(end, np.float32), name)
        )
    value = np.stack(np.meshgrid(*[np.linspace(-1, 1, 201)] * 2), axis=-1).reshape(-1, 2)
    for k, (w, b) in enumerate(layers):
        value = value @ w.T.astype(float) + b
        value = np.clip(value, 0, 1) if k < len(layers) - 1 else value
    limit = value.min() - 0.05 * np.ptp(value)
    text = vnnlib(LOW, HIGH, f"(<= Y_0 {limit:.6f})", 1)
    found = searched(model, text)
    assert found.tree is not None
    assert found.tree.done
    checker = Checker(found.program, properties.load(text))
    for branches in found.branches():
        assert branches.leaves > 3
        assert tried(checker, branches).refuted.all()


def test_networks_with_convolutions_have_no_stations():
    """Their passes cost more than the nodes that stations save."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[1, 1, 2] x) => (float[1, 1, 2] y)
        <float[1, 1, 1] weights = {2}> {
            a = Conv(x, weights)
            b = Relu(a)
            c = Conv(b, weights)
            y = Relu(c)
        }
        """
    )
    found = searched(model, vnnlib(LOW, HIGH, "(>= Y_0 4.5)", 2), most=1)
    assert found.tree is not None
    assert np.isinf(found.tree._plant(np.ones((1, 1), bool)).budget)
    layers = random_layers(1, (2, 4, 3, 2))
    dense_one = searched(dense(layers), vnnlib(LOW, HIGH, "(>= Y_0 1e5)", 2), most=1)
    assert dense_one.tree is not None
    assert np.isfinite(dense_one.tree._plant(np.ones((1, 1), bool)).budget)
