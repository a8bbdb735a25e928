"""`verify` against the exact truth, and what counts as a counterexample."""

import warnings
from dataclasses import replace
from fractions import Fraction

import numpy as np
import onnxruntime
import pytest
from exact import dense, random_layers, row_text, smallest_violation, vnnlib

from stagecert.errors import ProblemError
from stagecert.networks import load
from stagecert.verify import Verification, verify
from stagecert.verify.attack import Attacker
from stagecert.verify.complete import Complete
from stagecert.verify.grafts import Grafter
from stagecert.verify.queries import groups_of
from stagecert.verify.replay import Float32Box, Replay
from stagecert_check import properties

LOW, HIGH = (-1, -1), (1, 1)


def replayed(model, point):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return np.asarray(session.run(None, {"x": point[None]})[0])[0]


def random_rows(draw, count, mixed):
    rows = []
    for _ in range(count):
        a = draw.integers(-3, 4, 3) * 0.3
        a[draw.integers(3)] = 0.7
        c = draw.integers(-2, 3, 2) * 0.25 if mixed else np.zeros(2)
        rows.append([a, c, 0.0])
    return rows


@pytest.mark.parametrize("mixed", [False, True], ids=["outputs", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_true_on_both_sides_of_the_optimum(seed, mixed):
    layers = random_layers(seed)
    model = dense(layers)
    draw = np.random.default_rng(100 + seed)
    rows = random_rows(draw, 2, mixed)
    least = smallest_violation(layers, LOW, HIGH, [tuple(row) for row in rows])
    for shift, expected in ((-0.01, "unsat"), (0.01, "sat")):
        moved = [(a, c, b + least + shift) for a, c, b in rows]
        text = vnnlib(LOW, HIGH, f"(and {' '.join(row_text(*row) for row in moved)})", 3)
        found = verify(model, text, 60)
        assert found.answer == expected
        point = found.counterexample
        assert (point is not None) == (expected == "sat")
        if point is not None:
            assert point.tolerance == 0
            outputs = replayed(model, point.inputs)
            assert outputs.tolist() == point.outputs.tolist()
            assert properties.load(text).counterexample(point.inputs, outputs)


def test_a_disjunction_over_two_boxes_needs_every_case_refuted():
    layers = random_layers(7)
    model = dense(layers)
    rows = [(np.eye(3)[k], np.zeros(2), 0.0) for k in range(3)]
    boxes = (((-1, -1), (0, 1)), ((0, -1), (1, 1)))
    least = [[smallest_violation(layers, *box, [row]) for row in rows] for box in boxes]

    def text(shift):
        parts = []
        for number, (low, high) in enumerate(boxes):
            limits = [f"(<= Y_{k} {least[number][k] - 0.01:.12f})" for k in range(3)]
            if number == 1:
                limits[2] = f"(<= Y_2 {least[1][2] + shift:.12f})"
            ends = " ".join(
                f"(>= X_{k} {l}) (<= X_{k} {u})"
                for k, (l, u) in enumerate(zip(low, high, strict=True))
            )
            parts.append(f"(and {ends} (or {' '.join(limits)}))")
        return vnnlib(LOW, HIGH, f"(or {' '.join(parts)})", 3)

    held = verify(model, text(-0.01), 60)
    assert held.answer == "unsat"
    assert [case.refuted for case in held.cases] == [True] * 6
    assert held.checked
    found = verify(model, text(0.01), 60)
    assert found.answer == "sat"
    assert found.counterexample is not None
    assert found.counterexample.inputs[0] >= 0


@pytest.fixture
def only_inputs(monkeypatch):
    """Boxes are cut until linear bounds refute them: no splits of neurons."""
    monkeypatch.setattr(Grafter, "able", lambda program: False)


def test_the_split_tree_covers_the_box_and_every_leaf_is_closed(only_inputs):
    layers = random_layers(3)
    least = smallest_violation(layers, LOW, HIGH, [(np.array([1, -1, 0]), np.zeros(2), 0.0)])
    text = vnnlib(LOW, HIGH, f"(<= (- Y_0 Y_1) {least - 1e-3:.12f})", 3)
    work = Verification(dense(layers), text, 60)
    found = work.run()
    assert found.answer == "unsat"
    assert work.splitter is not None
    tree = work.splitter.tree
    assert tree is not None
    closed = {(node, case) for node, case, _, _ in tree.closed}
    stack, area = [(0, np.array(LOW, float), np.array(HIGH, float))], 0.0
    while stack:
        node, low, high = stack.pop()
        if (node, 0) in closed:
            area += np.prod(high - low)
            continue
        axis, cut = tree.axis[node], tree.cut[node]
        assert low[axis] < cut < high[axis]
        below, above = high.copy(), low.copy()
        below[axis] = above[axis] = cut
        first = tree.children[node]
        stack += [(first, low, below), (first + 1, above, high)]
    assert area == 4.0
    assert found.boxes >= len(tree.closed)
    # What was proven is that of the parts, not that of the whole box.
    (case,) = found.cases
    assert case.bounds[0] < 0 < case.proven <= 1e-3 * (1 + 1e-6)


def test_what_splitting_proves_of_several_rows_holds(only_inputs):
    """Rows of different sizes, some boxes refuted by both of them together."""
    layers = random_layers(3)
    # Not quite opposite: cases with opposite rows are refuted when they are read.
    other = np.array([-1, 0.001, 0])
    rows = [(np.array([3, 0, 0]), np.zeros(2), 0.0), (other, np.zeros(2), 0.0)]
    least = smallest_violation(layers, LOW, HIGH, rows) - 0.05
    texts = ("(* 3.0 Y_0)", "(+ (* -1.0 Y_0) (* 0.001 Y_1))")
    limits = " ".join(f"(<= {row} {least:.12f})" for row in texts)
    work = Verification(dense(layers), vnnlib(LOW, HIGH, f"(and {limits})", 3), 60)
    (case,) = work.run().cases
    assert work.splitter is not None
    assert work.splitter.tree.mixed
    assert case.how == "splitting"
    assert 0 < case.proven <= 0.05 * (1 + 1e-6)


def test_boxes_are_split_only_where_that_is_needed():
    """Whole boxes refute all cases, and the checker agrees; or nothing is kept of them."""
    layers = random_layers(5)
    least = smallest_violation(layers, LOW, HIGH, [(np.array([1, 0, 0]), np.zeros(2), 0.0)])
    answers = []
    for cases in ((-50, -60), (-50, -1e-3)):
        rows = " ".join(f"(and (<= Y_0 {least + below:.12f}))" for below in cases)
        work = Verification(dense(layers), vnnlib(LOW, HIGH, f"(or {rows})", 3), 60)
        found = work.run()
        answers.append((found.answer, work.splitter is None, {case.how for case in found.cases}))
    assert answers == [("unsat", True, {"backward"}), ("unsat", False, {"splitting"})]


def test_few_inputs_are_not_split_where_whole_boxes_are_enough(monkeypatch):
    def never(*args, **more):
        raise AssertionError("it was searched")

    layers = random_layers(5)
    least = smallest_violation(layers, LOW, HIGH, [(np.array([1, 0, 0]), np.zeros(2), 0.0)])
    monkeypatch.setattr(Attacker, "try_plans", never)
    monkeypatch.setattr(Verification, "_split", never)
    easy = verify(dense(layers), vnnlib(LOW, HIGH, f"(<= Y_0 {least - 50})", 3), 60)
    assert (easy.answer, easy.checked, easy.cases[0].how) == ("unsat", True, "backward")


def test_whole_boxes_are_enough_without_splitting(monkeypatch):
    from stagecert.verify import splitting

    monkeypatch.setattr(splitting, "LARGEST_DIMENSION", 0)
    layers = random_layers(5)
    model = dense(layers)
    least = smallest_violation(layers, LOW, HIGH, [(np.array([1, 0, 0]), np.zeros(2), 0.0)])
    easy = verify(model, vnnlib(LOW, HIGH, f"(<= Y_0 {least - 50})", 3), 60)
    assert (easy.answer, easy.cases[0].how, easy.cases[0].row) == ("unsat", "backward", 0)
    monkeypatch.setattr(Verification, "_plantable", lambda self: False)
    easy = verify(model, vnnlib(LOW, HIGH, f"(<= Y_0 {least - 50})", 3), 60)
    assert (easy.answer, easy.cases[0].how, easy.cases[0].row) == ("unsat", "ibp", 0)
    hard = verify(model, vnnlib(LOW, HIGH, f"(<= Y_0 {least - 1e-7:.12f})", 3), 60)
    assert hard.answer == "unknown"
    (case,) = hard.cases
    assert not case.refuted
    assert 0 < case.shortfall == -case.bounds[0]
    assert case.nearest > 0


def test_strict_rows_allow_equality_with_the_limit():
    model = dense([(np.array([[1.0, 0.0]]), [0.0])])
    network = load(model)
    for sign, expected in (("<", True), ("<=", False)):
        property = properties.load(vnnlib(LOW, HIGH, f"({sign} Y_0 0.5)", 1))
        _, (group,) = groups_of(network, property)
        assert group.passes(group.limits).tolist() == [expected]
        assert group.passes(np.nextafter(group.limits, np.inf)).tolist() == [True]
        assert group.passes(np.nextafter(group.limits, -np.inf)).tolist() == [False]
        for bad in (np.nan, np.inf, -np.inf):
            assert not group.passes(np.array([bad])).any()
    # At x = -1 the output is -1 exactly: the closed row has a point, the strict one has none.
    closed = verify(model, vnnlib(LOW, HIGH, "(<= Y_0 -1)", 1), 60)
    assert closed.answer == "sat"
    strict = verify(model, vnnlib(LOW, HIGH, "(< Y_0 -1)", 1), 10)
    assert strict.answer in ("unsat", "unknown", "timeout")


def test_coefficients_that_are_no_floats_are_scaled_or_paid_for():
    model = dense([(np.array([[1.0, 0.0], [0.0, 1.0]]), [0.0, 0.0])])
    third = properties.load(vnnlib(LOW, HIGH, "(<= (+ (* (/ 1 3) Y_0) (* 0.1 Y_1)) -0.25)", 2))
    _, (group,) = groups_of(load(model), third)
    (one,) = group.scaled
    assert one.differences == ()
    assert Fraction(one.coefficients[0]) == one.scale / 3
    assert Fraction(one.coefficients[1]) == one.scale / 10
    assert Fraction(group.limits[0]) >= one.scale * Fraction(-1, 4)
    odd = "(<= (+ (* 1.000000000000000000000001 Y_0) (* 3 Y_1)) -0.25)"
    _, (group,) = groups_of(load(model), properties.load(vnnlib(LOW, HIGH, odd, 2)))
    (one,) = group.scaled
    assert one.differences
    slip = sum(d for _, d in one.differences)
    assert Fraction(group.limits[0]) >= one.scale * Fraction(-1, 4) + slip


def test_a_property_without_inputs_holds():
    model = dense(random_layers(0))
    text = vnnlib((1, 0), (0, 1), "(<= Y_0 100)", 3)
    found = verify(model, text, 30)
    assert (found.answer, found.cases) == ("unsat", ())
    assert "nothing to verify" in found.reason


def test_rows_on_inputs_cut_the_box():
    model = dense([(np.array([[1.0, 1.0]]), [0.0])])
    cut = "(and (>= (+ X_0 X_1) 0.5) (<= Y_0 {}))"
    held = verify(model, vnnlib(LOW, HIGH, cut.format("0.4"), 1), 60)
    assert held.answer == "unsat"
    found = verify(model, vnnlib(LOW, HIGH, cut.format("0.6"), 1), 60)
    assert found.answer == "sat"
    assert found.counterexample is not None
    assert found.counterexample.inputs.astype(float).sum() >= 0.5


def test_no_answer_is_given_when_replay_disagrees(monkeypatch):
    """ONNX Runtime has the last word on counterexamples."""
    model = dense(random_layers(1))
    text = vnnlib(LOW, HIGH, "(<= Y_0 100)", 3)
    assert verify(model, text, 20).answer == "sat"
    monkeypatch.setattr(Replay, "run", lambda self, point: np.full(3, np.float32(1e6)))
    assert verify(model, text, 3).answer in ("unknown", "timeout")
    monkeypatch.setattr(Replay, "run", lambda self, point: np.full(3, np.float32(np.nan)))
    assert verify(model, text, 3).answer in ("unknown", "timeout")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bounds_that_are_not_finite_prove_nothing(bad, monkeypatch, only_inputs):
    from stagecert import networks
    from stagecert.networks.bounding.stepwise import Passes
    from stagecert.verify import splitting
    from stagecert.verify.checked import CheckedPasses

    real_bound, real_passes, checked_passes = networks.bound, Passes.bound, CheckedPasses.bound

    def broken_bound(*arguments, **options):
        found = real_bound(*arguments, **options | {"method": "ibp", "intermediate": "ibp"})
        return replace(found, bound=np.full_like(found.bound, bad))

    def broken_passes(*arguments):
        found = real_passes(*arguments)
        return replace(found, bound=np.full_like(found.bound, bad))

    def broken_checked_passes(*arguments):
        found = checked_passes(*arguments)
        return replace(found, bound=np.full_like(found.bound, bad))

    monkeypatch.setattr(networks, "bound", broken_bound)
    monkeypatch.setattr(Passes, "bound", broken_passes)
    monkeypatch.setattr(CheckedPasses, "bound", broken_checked_passes)
    # The checker's own bounds would decide this.
    monkeypatch.setattr(Verification, "_refute_whole_boxes", lambda self: None)
    model, text = dense(random_layers(0)), vnnlib(LOW, HIGH, "(<= Y_0 -1000)", 3)
    assert verify(model, text, 2).answer in ("unknown", "timeout")
    with monkeypatch.context() as compiled:
        compiled.setattr(splitting, "CHECKED_BOXES", 0)
        compiled.setattr(splitting, "MOSTLY_FIXED", 0)
        assert verify(model, text, 2).answer in ("unknown", "timeout")
    monkeypatch.setattr(splitting, "LARGEST_DIMENSION", 0)
    monkeypatch.setattr(Complete, "_bounds", lambda self, facts, rows: np.full(len(rows), bad))
    (case,) = verify(model, text, 60).cases
    assert (case.refuted, case.how) == (True, "tree")
    monkeypatch.setattr(Verification, "_plantable", lambda self: False)
    assert verify(model, text, 2).answer in ("unknown", "timeout")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_prove_nothing(bad):
    layers = random_layers(0)
    layers[1][0][0, 0] = bad
    try:
        found = verify(dense(layers), vnnlib(LOW, HIGH, "(<= Y_0 -1000)", 3), 2)
    except ProblemError:
        return
    assert found.answer in ("unknown", "timeout")


def test_float32_points_of_a_box():
    property = properties.load(vnnlib((0.1, 0.3), (0.1, 0.6), "(<= Y_0 0)", 1))
    box = Float32Box(property.cases[0].inputs)
    assert box.tolerance == 1e-6
    x = box.clip([5.0, 0.6])
    assert abs(float(x[0]) - 0.1) < 1e-8
    assert Fraction(float(x[1])) <= Fraction(6, 10)
    assert float(np.nextafter(x[1], np.float32(1))) > 0.6
    open_box = Float32Box(properties.load(vnnlib((0.1,), (0.2,), "(<= Y_0 0)", 1)).cases[0].inputs)
    assert open_box.tolerance == 0
    assert Fraction(float(open_box.clip([0.0])[0])) >= Fraction(1, 10)


def test_fixed_inputs_that_are_no_floats_state_their_tolerance():
    model = dense([(np.array([[1.0, 1.0]]), [0.0])])
    found = verify(model, vnnlib((0.1, -1), (0.1, 1), "(<= Y_0 0)", 1), 30)
    assert found.answer == "sat"
    assert found.counterexample is not None
    assert found.counterexample.tolerance == 1e-6


def test_digits_classifier_is_robust_on_small_boxes_and_not_on_large_ones():
    sklearn = pytest.importorskip("sklearn.datasets")
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    images, labels = sklearn.load_digits(return_X_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mlp = MLPClassifier((16,), max_iter=30, random_state=0).fit(images / 16, labels)
    layers = [(w.T, b) for w, b in zip(mlp.coefs_, mlp.intercepts_, strict=True)]
    model = dense(layers)
    image, label = images[0] / 16, labels[0]
    others = [k for k in range(10) if k != label]
    wrong = "(or " + " ".join(f"(and (>= Y_{k} Y_{label}))" for k in others) + ")"
    for radius, expected in ((0.01, "unsat"), (0.5, "sat")):
        text = vnnlib(
            [f"{v - radius:.9f}" for v in image], [f"{v + radius:.9f}" for v in image], wrong, 10
        )
        found = verify(model, text, 60)
        assert found.answer == expected
        assert len(found.cases) == 9
        if found.counterexample is not None:
            outputs = replayed(model, found.counterexample.inputs)
            assert np.argmax(outputs) != label


def test_what_does_not_fit_is_an_error():
    model = dense(random_layers(0))
    with pytest.raises(ProblemError, match="declares 3 inputs, but the network has 2"):
        verify(model, vnnlib((0, 0, 0), (1, 1, 1), "(<= Y_0 0)", 3))
    with pytest.raises(ProblemError, match="declares 2 outputs, but the network has 3"):
        verify(model, vnnlib(LOW, HIGH, "(<= Y_0 0)", 2))
    with pytest.raises(ProblemError, match="timeout"):
        verify(model, vnnlib(LOW, HIGH, "(<= Y_0 0)", 3), 0)


def test_partial_results_before_any_work():
    work = Verification(dense(random_layers(0)), vnnlib(LOW, HIGH, "(<= Y_0 0)", 3))
    found = work.so_far("timeout", "Time is up.")
    assert (found.answer, found.cases) == ("timeout", ())


def test_the_nearest_violation_is_in_the_units_of_the_property():
    layers = random_layers(3)
    row = (np.array([1.0, -1.0, 0.0]), np.zeros(2), 0.0)
    least = smallest_violation(layers, LOW, HIGH, [row])
    moved = (row[0], row[1], least - 1.0)  # missed by one
    found = verify(dense(layers), vnnlib(LOW, HIGH, row_text(*moved), 3), 60)
    assert found.answer == "unsat"
    (case,) = found.cases
    assert case.bounds.max() <= 1 + 1e-9
    assert case.nearest >= 1 - 1e-3
