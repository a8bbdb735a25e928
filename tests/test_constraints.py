"""Side constraints: solved, bounded, certified, and refuted where nothing satisfies them."""

from typing import Any, cast

import cvxpy as cp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog
from zoo_constrained import CASES

import stagecert as sc
from stagecert.sides import share_to_interior
from stagecert.solving import _refuse_without_multipliers, named_solver

TOLERANCE = {True: 1e-6, False: 1e-5}  # smooth, nonsmooth
QUICK = {"qp_rows", "balls_apart", "crossed_lens"}


def lp(A, b, c) -> sc.Problem:
    side = sc.Constraint(rows_over, {"A": A, "b": b}, name="rows")
    ones = np.ones(len(c))
    return sc.Problem(sc.Box(-ones, ones), (), sc.Objective(linear, c), (side,))


def rows_over(p, s, z):
    return p["A"] @ s - p["b"]


def linear(c, s, z):
    return jnp.dot(c, s)


def optimum_of(A, b, c) -> float | None:
    found = linprog(c, A, b, bounds=[(-1, 1)] * len(c))
    assert found.status in (0, 2), found.message
    return None if found.status == 2 else found.fun


def assert_near_the_unique_optimum(case, solution):
    """Point and multipliers, not the value alone; a gap leaves each as much room as its curvature.

    Where there is none (a vertex), the room is proportional to the gap; else to its root.
    """
    truth = case.truth()
    room = np.sqrt(solution.gap) if case.smooth else 100 * solution.gap
    room += 1e-6  # the truths are good to that
    if truth.primal is not None:
        assert np.abs(solution.inputs - truth.primal).max() <= room
    if truth.sides is not None:
        for held, dual in zip(solution.certificate.sides.constraints, truth.sides, strict=True):
            apart = np.ravel(held) - np.ravel(dual)
            assert np.abs(apart).max() <= room * (1 + np.abs(dual).max())


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else pytest.mark.slow) for c in CASES],
)
def test_zoo(case):
    problem, rtol = case.make(), TOLERANCE[case.smooth]
    solution = sc.solve(problem, atol=0.0, rtol=rtol)
    if case.value is None:
        assert solution.status is sc.Status.INFEASIBLE
        assert solution.value == solution.bound == np.inf
        assert not solution.status.solved
        assert solution.certificate.derive(problem) > 0
        assert solution.certificate.derive(problem, rigorous=True) > 0
        return
    assert solution.status is sc.Status.GAP_REACHED, solution
    assert solution.gap <= rtol * abs(solution.bound)
    slack = 1e-8 * (1 + abs(case.value))  # the truths are good to that
    assert solution.bound <= case.value + slack
    assert solution.value >= case.value - slack
    assert_near_the_unique_optimum(case, solution)
    blocks = tuple(map(jnp.asarray, solution.blocks))
    for constraint in problem.constraints:
        assert np.max(constraint(solution.inputs, blocks)) <= 0
    for i, stage in enumerate(problem.stages):
        lower, upper, _ = stage.bounds(solution.inputs, blocks[:i], blocks[i])
        size = 1 + np.abs(blocks[i])
        assert np.all(lower - blocks[i] <= 1e-12 * size)
        assert np.all(blocks[i] - upper <= 1e-12 * size)
    derived = solution.certificate.derive(problem)
    assert derived == pytest.approx(solution.bound, rel=1e-12)
    rigorous = solution.certificate.derive(problem, rigorous=True)
    assert rigorous == pytest.approx(derived, rel=1e-8)
    assert rigorous <= case.value + slack


@given(seed=st.integers(0, 10**6), shift=st.sampled_from([-0.3, -0.02, 0.02, 0.2]))
@settings(max_examples=20)
def test_random_linear_programs_are_bracketed_or_refuted(seed, shift):
    rng = np.random.default_rng(seed)
    A, c = rng.normal(size=(7, 3)), rng.normal(size=3)
    b = A @ rng.uniform(-0.5, 0.5, size=3) + shift
    solution, optimum = sc.solve(lp(A, b, c), atol=1e-9, rtol=1e-5), optimum_of(A, b, c)
    if optimum is None:
        assert solution.value == np.inf
        assert solution.status is sc.Status.INFEASIBLE
    else:
        assert solution.status is not sc.Status.INFEASIBLE
        assert solution.bound <= optimum + 1e-9
        assert solution.value >= optimum - 1e-9
        assert solution.status is sc.Status.GAP_REACHED, (solution, optimum)


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), shift=st.sampled_from([-0.3, -0.02, 0.02, 0.2]))
@settings(max_examples=20)
def test_random_quadratic_programs_are_bracketed_or_refuted(seed, shift):
    rng = np.random.default_rng(seed)
    A, root, c = rng.normal(size=(7, 3)), rng.normal(size=(2, 3)), 2 * rng.normal(size=3)
    b = A @ rng.uniform(-0.5, 0.5, size=3) + shift
    side = sc.Constraint(rows_over, {"A": A, "b": b}, name="rows")
    objective = sc.Objective(quadratic, {"root": root, "c": c})
    problem = sc.Problem(sc.Box(-np.ones(3), np.ones(3)), (), objective, (side,))
    solution = sc.solve(problem, atol=1e-9, rtol=1e-5)
    if optimum_of(A, b, c) is None:
        assert solution.status is sc.Status.INFEASIBLE
        assert solution.certificate.derive(problem, rigorous=True) > 0
        return
    x = cp.Variable(3)
    truth = cp.Problem(
        cp.Minimize(0.5 * cp.sum_squares(root @ x) + c @ x), [A @ x <= b, cp.abs(x) <= 1]
    )
    optimum: Any = truth.solve(
        solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11
    )
    assert solution.status is sc.Status.GAP_REACHED, (solution, optimum)
    assert solution.bound <= optimum + 1e-8
    assert solution.value >= optimum - 1e-8


def quadratic(p, s, z):
    return 0.5 * jnp.sum((p["root"] @ s) ** 2) + jnp.dot(p["c"], s)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_any_multipliers_at_any_anchor_give_a_bound(seed):
    rng = np.random.default_rng(seed)
    A, c = rng.normal(size=(4, 3)), rng.normal(size=3)
    b = A @ rng.uniform(-0.5, 0.5, size=3) + 0.1
    held = rng.normal(size=4) * 10.0 ** rng.uniform(-2, 2)  # negative ones count as zero
    certificate = sc.Certificate(
        rng.uniform(-1, 1, 3), (), (), ((), (), ((),)), 0.0, sides=sc.Sides((held,))
    )
    problem, optimum = lp(A, b, c), optimum_of(A, b, c)
    plain = certificate.derive(problem)
    l = np.maximum(held, 0)
    assert plain == pytest.approx(-l @ b - np.abs(c + A.T @ l).sum(), rel=1e-9, abs=1e-9)
    assert plain <= optimum + 1e-9
    assert certificate.derive(problem, rigorous=True) <= plain + 1e-9 * (1 + abs(plain))


def test_a_batch_with_an_infeasible_problem():
    rng = np.random.default_rng(0)
    A, c = rng.normal(size=(7, 3)), rng.normal(size=3)
    # So many that finished ones leave the batch, in both searches.
    right = [A @ rng.uniform(-0.5, 0.5, 3) + shift for shift in (0.05, -1.0, 0.4) * 6]
    batch = sc.solve_batch([lp(A, b, c) for b in right], atol=0.0, rtol=1e-5)
    truths = [optimum_of(A, b, c) for b in right]
    infeasible = [k for k, truth in enumerate(truths) if truth is None]
    assert 1 in infeasible
    for k in infeasible:
        assert batch.status[k] is sc.Status.INFEASIBLE
        assert batch[k].certificate.derive(lp(A, right[k], c)) > 0
        # The trace is that of the search which found the proof.
        trace = batch[k].stats.trace
        assert 0 < trace.bound[-1] <= trace.value[-1]
        assert trace.passes[-1] <= batch[k].stats.passes
    for k in sorted({*range(len(right))} - {*infeasible}):
        assert batch.status[k] is sc.Status.GAP_REACHED
        assert batch.bound[k] - 1e-9 <= truths[k] <= batch.value[k] + 1e-9
        assert not batch[k].certificate.feasibility


def test_another_right_hand_side_does_not_trace_anew():
    traced = []

    def side(b, s, z):
        traced.append(b)
        return jnp.sum(s) - b

    def problem(b):
        ones = np.ones(2)
        return sc.Problem(sc.Box(-ones, ones), (), linear_cost, (sc.Constraint(side, b),))

    first = sc.solve(problem(0.5))
    count = len(traced)
    second = sc.solve(problem(0.25))
    # `validate` looks at shapes alone, each time.
    assert len(traced) <= count + 2
    assert first.value == pytest.approx(-0.5, rel=1e-4)
    assert second.value == pytest.approx(-0.25, rel=1e-4)


def linear_cost(s, z):
    return -jnp.sum(s)


def test_certificates_are_saved_with_their_multipliers(tmp_path):
    A, c = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([-1.0, -0.5])
    problem = lp(A, np.array([0.5, 0.5]), c)
    solution = sc.solve(problem, rigorous=True)
    solution.certificate.save(tmp_path / "kept.npz")
    loaded = sc.Certificate.load(tmp_path / "kept.npz", problem)
    assert loaded.derive(problem, rigorous=True) == solution.bound
    assert np.any(loaded.sides.constraints[0] > 0)
    assert loaded.assumptions.constraints == (sc.Evidence.PROVEN,)
    three = lp(np.ones((3, 2)), np.ones(3), c)
    with pytest.raises(sc.ProblemError, match="sides_0 should have shape"):
        sc.Certificate.load(tmp_path / "kept.npz", three)
    # Contradicting rows: the certificate says what kind of proof it is.
    empty = lp(np.array([[1.0, 1.0], [-1.0, -1.0]]), np.array([0.5, -0.6]), c)
    refuted = sc.solve(empty, rigorous=True)
    assert refuted.status is sc.Status.INFEASIBLE
    refuted.certificate.save(tmp_path / "empty.npz")
    loaded = sc.Certificate.load(tmp_path / "empty.npz", empty)
    assert loaded.feasibility
    assert loaded.derive(empty, rigorous=True) > 0
    # It proves nothing about another problem.
    assert loaded.derive(problem, rigorous=True) < 0


def test_multipliers_of_crossed_bounds_are_saved(tmp_path):
    case = next(c for c in CASES if c.name == "crossed_lens")
    problem = case.make()
    solution = sc.solve(problem)
    assert solution.certificate.sides.order[0] > 0
    solution.certificate.save(tmp_path / "kept.npz")
    loaded = sc.Certificate.load(tmp_path / "kept.npz", problem)
    assert loaded.derive(problem) == pytest.approx(solution.bound, rel=1e-12)
    assert -3.001 <= loaded.derive(problem, rigorous=True) <= -3


@pytest.mark.slow
def test_equations_need_a_tolerance_and_are_bounded_without():
    def problem(tolerance):
        side = sc.Constraint(equation, tolerance=tolerance)
        ones = np.ones(2)
        return sc.Problem(sc.Box(-ones, ones), (), squares, (side,))

    exact = sc.solve(problem(0.0), max_iterations=60)
    assert exact.bound == pytest.approx(0.5, rel=1e-4)
    assert exact.bound <= 0.5
    if exact.value == np.inf:
        assert "No point that satisfies the side constraints is known" in exact.message
    loose = sc.solve(problem(1e-5), rtol=1e-3)
    assert loose.status is sc.Status.GAP_REACHED
    assert np.max(np.abs(equation(loose.inputs, ()))) <= 1e-5


def equation(s, z):
    return jnp.stack([s[0] + s[1] - 1, 1 - s[0] - s[1]])


def squares(s, z):
    return jnp.sum(s**2)


def test_constraints_that_are_not_convex_are_errors():
    def hollow(s, z):
        return 0.25 - jnp.sum(s**2)

    ones = np.ones(2)
    side = sc.Constraint(hollow, name="hollow")
    problem = sc.Problem(sc.Box(-ones, ones), (), squares, (side,))
    with pytest.raises(sc.ProblemError, match=r"Constraint 0 \('hollow'\): it is not convex"):
        sc.solve(problem)
    (violation,) = sc.check(problem).violations
    assert (violation.kind, violation.where) == (
        "constraint not convex",
        "Constraint 0 ('hollow')",
    )


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (3.0, "Constraint 0 must be a Constraint or a function"),
        (sc.Constraint(cast(Any, 3.0)), "Constraint 0 must be a function"),
        (lambda s, z: jnp.sum(s > 0), "Constraint 0 returns int"),
        (lambda s, z: z[0], "Constraint 0 reads block 0"),
        (lambda s, z: s[:0], "Constraint 0 has no entries"),
        (sc.Constraint(lambda b, s, z: s - b, np.array([np.nan, 0])), "params is not finite"),
        (sc.Constraint(squares, tolerance=-1.0), "tolerance must be a finite number >= 0"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_constraints(constraint, message):
    ones = np.ones(2)
    problem = sc.Problem(sc.Box(-ones, ones), (), squares, (constraint,))
    with pytest.raises(sc.ProblemError, match=message):
        sc.solve(problem)


def test_solvers_without_multipliers_refuse():
    problem = lp(np.ones((1, 2)), np.ones(1), np.ones(2))
    with pytest.raises(sc.ProblemError, match="'simple' has no multipliers for side constraints"):
        sc.solve(problem, solver="simple")


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_the_repair_of_linear_constraints_is_a_ratio_test(seed):
    rng = np.random.default_rng(seed)
    A, inside, outside = rng.normal(size=(6, 3)), rng.normal(size=3), rng.normal(size=3)
    b = A @ inside + rng.uniform(0.1, 1, size=6)
    values, slack = (sc.Sides((A @ x - b,)) for x in (outside, inside))
    margins = sc.Sides((np.full(6, 1e-12),))
    share = float(share_to_interior(values, slack, margins))
    over = (A @ (outside + share * (inside - outside)) - b).max()
    # No more than is needed: the point ends on the border, less the margin.
    assert -3e-12 <= over <= 0 if share > 0 else (A @ outside <= b).all()


@pytest.mark.parametrize("solver", [["auto"], ("mirror", "auto"), (("auto",), "polish")])
def test_sequences_of_solvers_know_of_constraints(solver):
    # "auto" within a sequence used to become greedy steps, which were then refused.
    names = [each.name for each in named_solver(solver, constrained=True)]
    assert "greedy" not in names
    assert "greedy" in [each.name for each in named_solver(solver)]
    _refuse_without_multipliers(solver)


@pytest.mark.slow
def test_float32_points_are_feasible_in_float64():
    rng = np.random.default_rng(1)
    A, c = rng.normal(size=(7, 3)), rng.normal(size=3)
    b = A @ np.zeros(3) + 0.1
    problem = jax.tree.map(
        lambda x: x.astype(np.float32) if isinstance(x, np.ndarray) else x, lp(A, b, c)
    )
    solution = sc.solve(problem, rtol=1e-3)
    p = problem.constraints[0].params
    assert solution.status is sc.Status.GAP_REACHED
    over = p["A"].astype(float) @ solution.inputs.astype(float) - p["b"].astype(float)
    assert over.max() <= 0


@pytest.mark.parametrize("name", ["lp_scaled", "balls", "mpc_rates", "mdp_budget"])
def test_exported_constraints_give_the_same_optimum(name):
    case = next(c for c in CASES if c.name == name)
    exported = sc.interop.to_cvxpy(case.make())
    found = exported.problem.solve(solver="CLARABEL")
    assert found == pytest.approx(case.value, rel=1e-6)
