"""Rigorous bounds against optima that are known exactly."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from flint import arb

import stagecert as sc
from benchmarks.core.exact import FAMILIES
from benchmarks.core.rigor import certificate_at_centre, compare
from stagecert import pieces
from stagecert.applications.control.convex import Balls
from stagecert.enclosure import intervals as iv
from stagecert.enclosure import primitives, rigorous_bound
from stagecert.enclosure import sets as sets_rules
from stagecert.enclosure.intervals import Interval
from stagecert.errors import ProblemError
from stagecert.problem import as_arrays


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bound_is_above_the_exact_optimum(family):
    result = compare(family, 40, seed=7)
    assert result["above"] == 0
    assert result["loss"] < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bound_of_many_is_above_the_exact_optimum(family):
    result = compare(family, 2_500, seed=0)
    assert result["above"] == 0
    assert result["loss"] < 1e-9


def test_families_with_side_constraints_have_both_kinds():
    rng = np.random.default_rng(7)
    held = [FAMILIES["sides"](rng).certificate.sides.constraints[0] for _ in range(40)]
    assert sum(np.any(l > 0) for l in held) > 20  # rows that bind
    # Proofs that nothing is feasible, and feasible problems that nothing may refute.
    drawn = [FAMILIES["empty"](rng) for _ in range(40)]
    refuted = [i.certificate.derive(i.problem, rigorous=True) > 0 for i in drawn]
    may_be = [not i.above(np.nextafter(0.0, 1.0)) for i in drawn]
    assert 5 < sum(refuted) <= sum(may_be) < 35


def _too_high(equation, *values):
    good = ORIGINAL[equation.primitive.name](equation, *values)
    return Interval(good.high + np.abs(good.high) * 1e-12)


ORIGINAL = dict(primitives.TABLE)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("exponentials", "reduce_sum"),
        ("kinks", "mul"),
        ("stages", "dot_general"),
        ("sides", "dot_general"),
        ("empty", "sub"),
    ],
)
def test_a_wrong_primitive_is_seen_in_bounds(monkeypatch, family, name):
    monkeypatch.setitem(primitives.TABLE, name, _too_high)
    assert compare(family, 40, seed=7, plain=False)["above"] > 0


def test_a_wrong_rule_of_a_set_is_seen_in_bounds(monkeypatch):
    def at_the_middle(slope, curvature, low, high):
        return iv.multiply(slope, Interval(0.5 * (low.middle() + high.middle())))

    monkeypatch.setattr(sets_rules, "least_on_intervals", at_the_middle)
    assert compare("squares", 40, seed=7, plain=False)["above"] > 0


def _derived(problem, inputs, **options):
    certificate = sc.Certificate(inputs, (), (), ((), ()), 0.0)
    return certificate.derive(problem, **options)


def test_box_and_ball_by_duality():
    rng = np.random.default_rng(0)
    for _ in range(20):
        c, middle = rng.normal(size=4), rng.uniform(-0.5, 0.5, 4)
        radius = float(rng.uniform(0.1, 2))
        problem = sc.Problem(
            sc.BoxBall(-np.ones(4), np.ones(4), middle, radius),
            (),
            sc.Objective(lambda p, s, z: p @ s, params=c),
        )
        found = _derived(problem, np.zeros(4), rigorous=True)
        point = np.asarray(problem.inputs.minimise_linear(c))
        assert found <= float(c @ point) + 1e-12
        assert found >= float(c @ point) - 1e-6


def test_rows_in_balls_have_a_rule():
    rng = np.random.default_rng(2)
    balls = Balls(rng.normal(size=(4, 3)), rng.uniform(0.5, 2, 4))
    slope, anchor = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    curvature = np.repeat(rng.uniform(0.1, 2, (4, 1)), 3, axis=1)
    linear = sets_rules.least_linear(balls, Interval(slope), anchor)
    exact = np.sum(slope * (balls.middle - anchor))
    exact -= np.sum(balls.radius * np.linalg.norm(slope, axis=1))
    assert exact - 1e-12 < float(linear.low) <= exact + 1e-14
    curved = sets_rules.least_quadratic(balls, Interval(slope), anchor, curvature)
    _, least = balls.minimise_quadratic(slope, anchor, curvature)
    assert float(least) - 1e-10 < float(curved.low) <= float(least) + 1e-12


@pytest.mark.parametrize("curvature", [0.5, 2.0])
def test_declared_curvature_on_a_ball_and_a_simplex(curvature):
    """min of c . s + q/2 |s|^2 with the tangent taken far from the minimiser."""
    rng = np.random.default_rng(1)
    c = rng.normal(size=3)
    for inputs in (sc.Ball(np.zeros(3), 1.0), sc.Simplex(3)):
        objective = sc.Objective(
            lambda p, s, z: p @ s + curvature / 2 * s @ s, params=c, curvature_inputs=curvature
        )
        problem = sc.Problem(inputs, (), objective)
        anchor = np.asarray(inputs.centre()) + 0.1
        found = _derived(problem, anchor, rigorous=True)
        best, _ = inputs.minimise_quadratic(c, np.zeros(3), np.full(3, curvature))
        best = np.asarray(best, float)
        least = c @ best + curvature / 2 * best @ best
        assert least - 1e-5 < found <= least + 1e-7  # the point itself is in single precision


def test_slack_of_the_objective_leaves_most_of_the_curvature():
    """Enclosed slopes of a kink are no exact subgradients; the curvature was dropped altogether."""

    def value(s, z):
        return sc.relu(s[0] * 0.1 + 0.7) + 0.5 * s @ s

    problem = sc.Problem(
        sc.Box(-np.ones(2), np.ones(2)), (), sc.Objective(value, curvature_inputs=1.0)
    )
    weights = (pieces.First(np.array(1.0)),)
    certificate = sc.Certificate(np.array([0.3, -0.2]), (), (), ((), weights), 0.0)
    plain, found = certificate.derive(problem), certificate.derive(problem, rigorous=True)
    optimum = 0.7 - 0.1**2 / 2
    assert found <= optimum
    assert plain - 1e-3 < found


def test_a_set_without_a_rule_is_refused():
    class Mine(sc.Box):
        pass

    class Other(sc.AbstractSet):
        box: sc.Box

        def project(self, point):
            return self.box.project(point)

        def minimise_linear(self, gradient):
            return self.box.minimise_linear(gradient)

        def sample(self, key):
            return self.box.sample(key)

        def centre(self):
            return self.box.centre()

        def scale(self):
            return self.box.scale()

        def validate(self):
            self.box.validate()

    box = sc.Box(-np.ones(2), np.ones(2))
    with pytest.raises(ProblemError, match="no rule for rigorous minima over Other"):
        sc.solve(sc.Problem(Other(box), (), lambda s, z: s @ s), rigorous=True)
    problem = sc.Problem(sc.Product(Mine(-np.ones(2), np.ones(2)), Other(box)), (),
                         lambda s, z: s[0] @ s[0])  # fmt: skip
    with pytest.raises(ProblemError, match="Other"):
        sc.solve(problem, rigorous=True)


def test_a_function_that_is_undefined_at_the_anchor_proves_nothing():
    problem = sc.Problem(
        sc.Box(np.array([1.0]), np.array([2.0])), (), lambda s, z: jnp.maximum(-jnp.log(s[0]), -5.0)
    )
    assert _derived(problem, np.array([-1.0]), rigorous=True) == -np.inf
    assert np.isfinite(_derived(problem, np.array([1.5]), rigorous=True))


def test_multipliers_that_are_not_consistent_are_replaced_where_there_is_no_box():
    """The plain formula has no bound for such multipliers; real arithmetic has other ones."""
    instance = FAMILIES["stages"](np.random.default_rng(3))
    off = eqx.tree_at(lambda c: c.multipliers, instance.certificate, (np.ones(3), np.ones(2)))
    assert off.derive(instance.problem) == -np.inf
    found = off.derive(instance.problem, rigorous=True)
    assert not instance.above(found)
    assert found == pytest.approx(instance.optimum, rel=1e-9)


def test_a_long_scan_that_adds_up_is_enclosed_at_once():
    """Errors of multipliers grow along an integrator; all steps are enclosed together."""
    t = 2_000
    rng = np.random.default_rng(0)
    demand, price = rng.uniform(0, 1, t), rng.normal(size=t)
    problem = sc.Problem(
        sc.Box(np.zeros(t), np.ones(t)),
        (
            sc.ScanStage(
                lambda d, u, x: x + u - d, lambda d, u, x: x + u - d + 0.1, t, 0.0,
                feed=lambda s, z: s, params=demand,
            ),
        ),
        sc.Objective(lambda p, s, z: p @ z[0], params=price),
    )  # fmt: skip
    y = np.cumsum(price[::-1])[::-1]
    anchor = rng.uniform(0, 1, t)
    slopes = ((((), ()),), ())
    certificate = sc.Certificate(anchor, (rng.normal(size=t),), (y,), slopes, 0.0)
    found = certificate.derive(problem, rigorous=True)
    exact = [arb(0)] * t
    total = arb(0)
    for k in reversed(range(t)):
        total += arb(price[k])
        exact[k] = total
    optimum = sum((g for g in exact if g < 0), arb(0))
    for g, d in zip(exact, demand, strict=True):
        optimum += (arb(0.1) * g if g < 0 else arb(0)) - g * arb(d)
    assert not arb(found) > optimum
    assert float(optimum.mid()) - found < 1e-9 * abs(found)


def test_solve_and_solve_batch_publish_the_rigorous_bound():
    case = next(case for case in zoo.CASES if case.name == "lens")
    problem = case.make()
    solution = sc.solve(problem, rigorous=True)
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.bound == rigorous_bound(problem, solution.certificate)
    assert solution.bound == solution.certificate.bound
    assert solution.bound <= case.value <= solution.value + 1e-12


def _squared(s, z):
    return s @ s


def test_a_batch_has_the_rigorous_bounds_of_its_problems():
    problems = [sc.Problem(sc.Ball(np.array([x, 0.1]), 1.0), (), _squared) for x in (2.0, 3.0)]
    batch = sc.solve_batch(problems, rigorous=True)
    for problem, solution in zip(problems, batch, strict=True):
        assert solution.status is sc.Status.GAP_REACHED
        assert solution.bound == solution.certificate.derive(problem, rigorous=True)
        assert solution.bound < solution.certificate.derive(problem) + 1e-12


ZOO = {case.name: case for case in zoo.CASES}
QUICK = {"pinched", "lqr", "markowitz", "relu_kinks", "box_and_ball"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ZOO]
)
def test_the_zoo_has_rigorous_bounds_next_to_the_plain_ones(name):
    problem = ZOO[name].make()
    certificate = jax.tree.map(np.asarray, certificate_at_centre(as_arrays(problem)))
    found, plain = certificate.derive(problem, rigorous=True), float(certificate.bound)
    assert np.isfinite(found)
    assert abs(found - plain) <= 1e-11 * max(abs(plain), 1)
    assert found <= ZOO[name].value + 1e-9


def test_a_processor_that_flushes_to_zero_is_refused(monkeypatch):
    monkeypatch.setattr(iv, "SMALLEST", 0.0)
    with pytest.raises(ProblemError, match="flush subnormal"):
        iv.check_arithmetic()


def test_data_in_single_precision_is_taken_as_it_is():
    # The function closes over single precision, and is evaluated in double.
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        c = jnp.asarray([0.1, -0.7], jnp.float32)
        problem = sc.Problem(sc.Box(-jnp.ones(2), jnp.ones(2)), (), lambda s, z: c @ s)
        found = _derived(problem, np.zeros(2, np.float32), rigorous=True)
        assert jnp.zeros(1).dtype == jnp.float32
    exact = -float(c[0]) + float(c[1])
    assert found <= exact
    assert found == pytest.approx(exact, rel=1e-14)
