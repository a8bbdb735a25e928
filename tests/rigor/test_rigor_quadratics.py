"""Quadratic forms of the inputs: never above the truth, exact where a form has no wrong sign."""

import numpy as np
import onnx
import pytest
import scipy.optimize
from numpy.testing import assert_allclose

from stagecert.verify import verify
from stagecert_check import Report, check, properties, quadratics
from stagecert_check import checker as checking
from stagecert_check.graph import read
from stagecert_check.numbers import Arithmetic
from stagecert_check.objectives import Objectives
from stagecert_check.quadratics import Quadratics, Sums, smallest


def _numbers(array) -> str:
    return "{" + ", ".join(repr(float(x)) for x in np.ravel(array)) + "}"


def _lyapunov(random, neurons: int = 5) -> tuple[onnx.ModelProto, tuple[np.ndarray, ...]]:
    """x -> (V(x'), V(x), x') with V = x'Px and x' = x + Relu(xA + b)C, in three dimensions."""
    a, b = random.normal(size=(3, neurons)), random.normal(size=neurons)
    c, root = 0.3 * random.normal(size=(neurons, 3)), random.normal(size=(3, 3))
    a, b, c, p = (np.float32(x).astype(float) for x in (a, b, c, root @ root.T))
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[1, 3] x) => (float[1, 5] y)
        <float[3, {neurons}] a = {_numbers(a)}, float[{neurons}] b = {_numbers(b)},
         float[{neurons}, 3] c = {_numbers(c)}, float[3, 3] p = {_numbers(p)},
         int64[1] one = {{1}}> {{
            l = MatMul(x, a)  m = Add(l, b)  h = Relu(m)  d = MatMul(h, c)  z = Add(x, d)
            px = MatMul(x, p)  vx = Mul(x, px)  v = ReduceSum(vx, one)
            pz = MatMul(z, p)  vz = Mul(z, pz)  w = ReduceSum(vz, one)
            y = Concat <axis = 1> (w, v, z)
        }}
        """
    )
    return model, (a, b, c, p)


def _outputs(x: np.ndarray, weights) -> np.ndarray:
    a, b, c, p = weights
    z = x + np.maximum(x @ a + b, 0) @ c
    return np.concatenate(
        [np.sum(z @ p * z, -1, keepdims=True), np.sum(x @ p * x, -1, keepdims=True), z], axis=-1
    )


def _property(rows: list[str], radius: float = 1.0) -> str:
    text = [f"(declare-const X_{k} Real)" for k in range(3)]
    text += [f"(declare-const Y_{k} Real)" for k in range(5)]
    text += [f"(assert (<= X_{k} {radius})) (assert (>= X_{k} -{radius}))" for k in range(3)]
    return "\n".join(text + [f"(assert {row})" for row in rows])


ROWS = ["(<= Y_0 0.5)", "(>= Y_1 0.25)", "(<= Y_2 0.125)", "(>= Y_0 Y_1)"]


@pytest.mark.parametrize("seed", range(4))
def test_never_above_points_of_boxes(seed):
    random = np.random.default_rng(seed)
    model, weights = _lyapunov(random)
    wanted = properties.load(_property(ROWS))
    program = read(model.SerializeToString(), Arithmetic())
    inputs = wanted.cases[0].inputs
    whole = np.array(inputs.lower64, float), np.array(inputs.upper64, float)
    assert Quadratics.applicable(program, *whole)
    forms, objectives = Quadratics(program, *whole), Objectives(program, wanted, Arithmetic())
    count = 200
    centre = random.uniform(-1, 1, size=(count, 3))
    radius = random.choice([1e-9, 1e-3, 0.05, 0.3, 1, 2], size=(count, 3))
    radius[:20] = 1e-9
    low, high = np.clip(centre - radius, *whole), np.clip(centre + radius, *whole)
    multipliers = random.uniform(size=(count, 4)) * random.choice([0, 1], size=(count, 4))
    goals = forms.goals([objectives.of(0, tuple(row.tolist())) for row in multipliers])
    with np.errstate(all="ignore"):
        bounds = forms.bounds(forms.forms(low, high), np.arange(count), goals)
    shares = random.uniform(size=(500, count, 3))
    shares = np.where(random.uniform(size=shares.shape) < 0.5, np.round(shares), shares)
    points = np.clip(low + shares * (high - low), low, high)
    y = _outputs(points, weights)
    rows = np.stack(
        [y[..., 0] - 0.5, 0.25 - y[..., 1], y[..., 2] - 0.125, y[..., 1] - y[..., 0]], axis=-1
    )
    values = np.einsum("pbr,br->pb", rows, multipliers)
    size = np.abs(rows).max(axis=(0, 2)) + 1
    assert np.all(np.isfinite(bounds))
    assert np.all(bounds <= values.min(axis=0) + 1e-13 * size)  # the points' own rounding
    # Tiny boxes lose next to nothing.
    tiny = radius.max(axis=1) < 1e-6
    assert_allclose(bounds[tiny], values[:, tiny].min(axis=0), atol=1e-6)


def test_forms_without_wrong_signs_are_bounded_by_their_minimum(monkeypatch):
    monkeypatch.setattr(quadratics, "_SWEEPS", 200)
    random = np.random.default_rng(0)
    root = random.normal(size=(50, 4, 4))
    square, linear = root @ root.swapaxes(1, 2) + 2 * np.eye(4), random.normal(size=(50, 4))
    nothing = np.zeros(50)
    found = smallest(Sums(nothing, linear, square, np.zeros((50, 0)), nothing))
    for k in range(50):
        truth = scipy.optimize.minimize(
            lambda t, k=k: linear[k] @ t + t @ square[k] @ t, np.zeros(4),
            jac=lambda t, k=k: linear[k] + 2 * square[k] @ t, bounds=[(-1, 1)] * 4,
            options={"ftol": 1e-15, "gtol": 1e-10},
        ).fun  # fmt: skip
        assert found[k] <= truth + 1e-12
        assert found[k] >= truth - 1e-8


def test_forms_with_wrong_signs_are_bounded_below_all_points():
    random = np.random.default_rng(1)
    square = random.normal(size=(100, 4, 4))
    square, linear = square + square.swapaxes(1, 2), random.normal(size=(100, 4))
    neurons = random.uniform(size=(100, 2))
    found = smallest(Sums(np.ones(100), linear, square, neurons, np.full(100, 0.5)))
    points = np.clip(random.uniform(-2, 2, size=(4000, 4)), -1, 1)
    values = 1 + points @ linear.T + np.einsum("pi,bij,pj->pb", points, square, points)
    assert np.all(found <= values.min(axis=0) - 0.5 - neurons.sum(axis=1))


# A step towards zero: V falls by a quarter at least, but for a neuron that pulls a little.
SHRINKS = """
<ir_version: 8, opset_import: ["" : 17]>
graph (float[1, 2] x) => (float[1, 2] y)
<float[2, 2] half = {0.5, 0.25, -0.25, 0.5}, float[2, 2] p = {1, 0.9, 0.9, 1},
 float[2, 1] w = {1, -1}, float[1, 2] c = {0.03125, 0.03125}, int64[1] one = {1}> {
    l = MatMul(x, w)  h = Relu(l)  d = MatMul(h, c)  m = MatMul(x, half)  z = Add(m, d)
    px = MatMul(x, p)  vx = Mul(x, px)  v = ReduceSum(vx, one)
    pz = MatMul(z, p)  vz = Mul(z, pz)  w2 = ReduceSum(vz, one)
    f = Sub(w2, v)
    y = Concat <axis = 1> (f, v)
}
"""
BAND = """
(declare-const X_0 Real) (declare-const X_1 Real)
(declare-const Y_0 Real) (declare-const Y_1 Real)
(assert (<= X_0 1)) (assert (>= X_0 -1)) (assert (<= X_1 1)) (assert (>= X_1 -1))
(assert (>= Y_1 0.5)) (assert (<= Y_1 1))
(assert (or (and (>= Y_0 {drop})) (and (<= Y_1 0.25))))
"""


def _decided(tmp_path, drop: float):
    model = onnx.parser.parse_model(SHRINKS)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "property.vnnlib").write_text(BAND.format(drop=drop))
    return verify(str(tmp_path / "model.onnx"), str(tmp_path / "property.vnnlib"))


def _steepest() -> float:
    """The largest change of V in the band, on a fine grid."""
    x = np.stack(np.meshgrid(*[np.linspace(-1, 1, 2001)] * 2), axis=-1).reshape(-1, 2)
    p, half = np.array([[1, 0.9], [0.9, 1]]), np.array([[0.5, 0.25], [-0.25, 0.5]])
    z = x @ half + np.maximum(x @ [1, -1], 0)[:, None] * 0.03125
    v = np.sum(x @ p * x, axis=1)
    return float(np.max((np.sum(z @ p * z, axis=1) - v)[(v >= 0.5) & (v <= 1)]))


def test_a_band_of_a_quadratic_form_is_refuted_and_checked(tmp_path):
    """Product by product this took boxes without end; lines alone do not follow it."""
    verdict = _decided(tmp_path, _steepest() + 0.01)
    assert verdict.answer == "unsat", verdict.reason
    assert verdict.checked
    assert "forms" in {case.how for case in verdict.cases}
    assert verdict.boxes < 600
    path = tmp_path / "proof.cert"
    path.write_bytes(verdict.certificate)
    files = tmp_path / "model.onnx", tmp_path / "property.vnnlib", path
    assert check(*files).accepted
    bounds = checking.Quadratics.bounds
    weaker = check_with(lambda *given: bounds(*given) - 1, *files)
    assert not weaker.accepted
    assert "refutes nothing" in weaker.reasons[0]


@pytest.mark.slow
def test_a_band_with_a_counterexample_is_sat(tmp_path):
    assert _decided(tmp_path, _steepest() - 0.01).answer == "sat"


def check_with(bounds, *files) -> Report:
    """What the checker says with other bounds by quadratic forms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking.Quadratics, "bounds", bounds)
        return check(*files)
