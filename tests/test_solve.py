"""The default solver on every problem of the zoo, and what must always hold."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog
from zoo import CASES

import stagecert as sc
from stagecert.compiling import compiled
from stagecert.solvers import Accelerated, Greedy, Polish, Safe, Simple, SlopeAscent

TOLERANCE = {True: 1e-6, False: 1e-5}  # smooth, nonsmooth


def assert_brackets(solution, optimum):
    slack = 1e-9 * (1 + abs(optimum))  # the truths are good to that
    assert solution.bound <= optimum + slack
    assert solution.value >= optimum - slack
    assert np.isfinite(solution.bound)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow)
        if case.name == "isotonic_grid"  # half a minute
        else pytest.param(case, id=case.name)
        for case in CASES
    ],
)
def test_default_reaches_the_asked_gap_on_the_zoo(case):
    problem = case.make()
    rtol = TOLERANCE[case.smooth]
    solution = sc.solve(problem, atol=0.0, rtol=rtol)
    assert solution.status is sc.Status.GAP_REACHED, solution
    assert solution.gap <= rtol * abs(solution.bound)
    assert_brackets(solution, case.value)
    # The point is feasible, has that value, and its inputs are in the set.
    blocks = tuple(map(jnp.asarray, solution.blocks))
    for i, stage in enumerate(problem.stages):
        lower, upper, _ = stage.bounds(solution.inputs, blocks[:i], blocks[i])
        size = 1 + np.abs(blocks[i])
        assert np.all(lower - blocks[i] <= 1e-12 * size)
        assert np.all(blocks[i] - upper <= 1e-12 * size)
    moved = jax.tree.map(
        lambda a, b: np.max(np.abs(a - b), initial=0),
        problem.inputs.project(solution.inputs),
        solution.inputs,
    )
    assert max(jax.tree.leaves(moved)) <= 1e-12
    assert float(problem.objective(solution.inputs, blocks)) == pytest.approx(
        solution.value, rel=1e-12
    )
    # The certificate proves the bound by itself.
    assert solution.certificate.derive(problem) == pytest.approx(solution.bound, rel=1e-12)


@pytest.mark.parametrize("name", ["lens", "curved", "relu_kinks", "lqr_box", "chain", "wedge"])
@pytest.mark.parametrize(
    "solver",
    [
        "greedy",
        "accelerated",
        "simple",
        "safe",
        "polish",
        "slope_ascent",
        "damped",
        (Greedy(), Accelerated()),
    ],
    ids=str,
)
def test_every_solver_brackets_the_optimum(name, solver):
    case = next(case for case in CASES if case.name == name)
    solution = sc.solve(case.make(), rtol=1e-8, solver=solver, max_iterations=40)
    assert_brackets(solution, case.value)
    trace = solution.stats.trace
    assert np.all(np.diff(trace.value) <= 0)
    assert np.all(np.diff(trace.bound) >= 0)
    assert np.all(np.diff(trace.passes) > 0)
    assert len(trace.solver) == len(trace.value) == solution.stats.iterations


@pytest.mark.parametrize("solver", [Simple(drawn=True), Accelerated(drawn=True), Safe(drawn=True)])
def test_multipliers_as_drawn_reach_the_optimum_where_boxes_are_given(solver):
    box = (np.array(-1.0), np.array(1.0))
    problem = sc.Problem(
        sc.Box(-1.0, 1.0),
        (sc.Stage(lambda s, z: s**2 - 1, lambda s, z: 1 - s**2, box=box),),
        lambda s, z: z[0],
    )
    solution = sc.solve(problem, atol=1e-6, rtol=0.0, solver=solver, start=sc.Point(0.3, 0.4))
    assert solution.status is sc.Status.GAP_REACHED
    assert_brackets(solution, -1.0)


@pytest.mark.parametrize("start", [0.0, 0.5, 1.0])
def test_chain_of_100000_stages_is_solved_at_once(start):
    n = 100_000
    problem = sc.Problem(
        sc.Box(0.0, 1.0),
        (
            sc.ScanStage(
                lower=lambda _, x: -jnp.ones_like(x),
                upper=lambda _, x: x,
                length=n - 1,
                initial=lambda s, z: s,
            ),
        ),
        lambda s, z: -z[0][-1],
    )
    solution = sc.solve(problem, atol=1e-9, rtol=0.0, start=sc.Point(0.0, start))
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.gap <= 1e-9
    assert solution.stats.iterations <= 3
    assert solution.bound <= -1.0 <= solution.value


# -- random linear problems against HiGHS ---------------------------------------------------------


def _lower(p, s, z):
    return sc.relu(p["a"] @ (z[-1] if z else s) + p["b"]) - p["c"]


def _upper(p, s, z):
    return sc.minimum(p["d"] @ (z[-1] if z else s) + p["e"], p["f"])


def _objective(p, s, z):
    return p["g"] @ s + p["h"] @ z[0] + p["k"] @ z[1] + sc.abs(p["m"] @ z[1])


def random_linear_problem(seed: int, inputs: int = 3, width: int = 4):
    """Two blocks between relu and min-affine bounds, wide enough apart to be in order."""
    draw = np.random.default_rng(seed)
    low, high = -np.ones(inputs), draw.uniform(0.5, 1.5, inputs)
    box_low, box_high = low, high
    stages = []
    for _ in range(2):
        n = len(low)
        a, d = draw.normal(size=(2, width, n))
        b = draw.normal(size=width)
        middle, half = (low + high) / 2, (high - low) / 2
        top = np.maximum(a @ middle + np.abs(a) @ half + b, 0)  # of the relu
        least = d @ middle - np.abs(d) @ half
        e = top - least + draw.uniform(0, 1, width) * draw.integers(0, 2, width)
        f = top + draw.uniform(0, 1, width)
        c = draw.uniform(0, 1, width)
        stages.append({"a": a, "b": b, "c": c, "d": d, "e": e, "f": f})
        low, high = -c, f
    g, h, k, m = (draw.normal(size=size) for size in (inputs, width, width, width))
    objective = {"g": g, "h": h, "k": k, "m": m}
    problem = sc.Problem(
        sc.Box(box_low, box_high),
        tuple(sc.Stage(_lower, _upper, params=p) for p in stages),
        sc.Objective(_objective, params=objective),
    )
    return problem, linear_truth(box_low, box_high, stages, objective)


def linear_truth(low, high, stages, objective) -> float:
    """The same problem for HiGHS: variables (s, z_1, z_2, t >= |m z_2|)."""
    n, width = len(low), len(stages[0]["b"])
    size = n + 2 * width + 1
    blocks = [slice(0, n), slice(n, n + width), slice(n + width, n + 2 * width)]
    rows, right = [], []

    def add(coefficients, bound):
        row = np.zeros(size)
        for where, value in coefficients:
            row[where] += value
        rows.append(row)
        right.append(bound)

    for i, p in enumerate(stages):
        before, here = blocks[i], blocks[i + 1]
        for j in range(width):
            unit = np.eye(width)[j]
            add([(before, p["a"][j]), (here, -unit)], p["c"][j] - p["b"][j])
            add([(here, -unit)], p["c"][j])
            add([(here, unit), (before, -p["d"][j])], p["e"][j])
            add([(here, unit)], p["f"][j])
    for sign in (1, -1):
        add([(blocks[2], sign * objective["m"]), (slice(size - 1, size), np.array([-1.0]))], 0.0)
    cost = np.concatenate([objective["g"], objective["h"], objective["k"], [1.0]])
    bounds = list(zip(low, high, strict=True)) + [(None, None)] * (size - n)
    result = linprog(cost, np.array(rows), np.array(right), bounds=bounds, method="highs")
    assert result.status == 0
    return result.fun


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_bound_optimum_value_are_in_order_on_random_linear_problems(seed):
    problem, optimum = random_linear_problem(seed)
    solution = sc.solve(problem, atol=1e-7, rtol=1e-5, max_iterations=150)
    assert_brackets(solution, optimum)
    # Most are far closer by then; the widest gap seen was 0.11 %.
    assert solution.gap <= 1e-2 * (1 + abs(optimum)), (seed, solution)


# -- stopping ------------------------------------------------------------------------------------


def lens(**options):
    return sc.Problem(
        sc.Box(-1.0, 1.0),
        (sc.Stage(lambda s, z: s**2 - 1, lambda s, z: 1 - s**2, **options),),
        lambda s, z: z[0],
    )


def test_targets_decide():
    proven = sc.solve(lens(), target=-1.5)
    assert proven.status is sc.Status.TARGET_PROVEN
    assert proven.bound > -1.5
    met = sc.solve(lens(), target=-0.5)
    assert met.status is sc.Status.TARGET_MET
    assert met.value <= -0.5
    assert met.status.solved


def test_limits_leave_valid_numbers():
    problem = next(case for case in CASES if case.name == "inventory")
    short = sc.solve(problem.make(), rtol=1e-9, max_iterations=3, solver=["greedy", "polish"])
    assert short.status is sc.Status.ITERATION_LIMIT
    assert short.stats.iterations == 3
    assert_brackets(short, problem.value)
    none = sc.solve(problem.make(), rtol=1e-9, max_iterations=0)
    assert none.stats.iterations == 0
    assert_brackets(none, problem.value)
    rushed = sc.solve(problem.make(), rtol=1e-12, time_limit=1e-6)
    assert rushed.status is sc.Status.TIME_LIMIT
    assert_brackets(rushed, problem.value)


def test_crossed_bounds_name_stage_and_entry():
    # The paper's infeasible example: S = [-1.5, 1.5], where the bounds cross beyond +-1.
    problem = sc.Problem(
        sc.Box(-1.5, 1.5),
        (sc.Stage(lambda s, z: s**2 - 1, lambda s, z: 1 - s**2, name="lens"),),
        lambda s, z: z[0],
    )
    solution = sc.solve(problem, start=sc.Point(1.2, 1.0), solver="greedy")
    assert solution.status is sc.Status.BOUNDS_CROSSED
    assert "Stage 0 ('lens')" in solution.message
    assert "by 0.88 at entry 0" in solution.message
    assert solution.bound <= -1.0
    assert solution.value == np.inf
    assert solution.gap == np.inf
    # Solvers that know multipliers take the order of the bounds as a side constraint.
    solved = sc.solve(problem, start=sc.Point(1.2, 1.0))
    assert solved.status is sc.Status.GAP_REACHED
    assert_brackets(solved, -1.0)


def test_not_finite_is_a_status():
    problem = sc.Problem(
        sc.Box(-1.0, 1.0),
        (),
        lambda s, z: jnp.where(s < -0.5, jnp.nan, s),
    )
    solution = sc.solve(problem)
    assert solution.status is sc.Status.NOT_FINITE
    assert -0.5 <= solution.value <= 0.0  # the best before that
    assert not np.isnan(solution.bound)


@pytest.mark.parametrize(
    "objective",
    [
        lambda s, z: jnp.linalg.norm(s),  # the derivative at the start is nan
        lambda s, z: 2 * sc.relu(s[0]) - sc.relu(s[0]),  # a piece used downwards
        lambda s, z: jnp.nan * s[0],
        lambda s, z: jnp.inf + s[0],
    ],
)
def test_nothing_proven_is_never_called_solved(objective):
    solution = sc.solve(sc.Problem(sc.Box(-np.ones(2), np.ones(2)), (), objective))
    assert not np.isnan(solution.bound)
    if not np.isfinite(solution.bound):
        assert not solution.status.solved
        assert solution.gap == np.inf
        assert not np.isnan(solution.relative_gap)


def test_a_problem_that_is_not_convex_is_contradicted():
    # -s**2 is concave: linearising it at 0.5 "proves" more than the value at 1.
    problem = sc.Problem(sc.Box(-1.0, 1.0), (), lambda s, z: -(s**2) + 0.1 * s)
    solution = sc.solve(problem, start=sc.Point(0.3), check=False)
    assert solution.status is sc.Status.CONTRADICTED
    assert not solution.status.solved


def test_curvature_is_not_added_to_slopes_that_are_no_subgradients():
    slope = np.array([1e-3] * 7 + [0.5])
    problem = sc.Problem(
        sc.Box(-np.ones(8), 1.2 * np.ones(8)),
        (),
        sc.Objective(
            lambda p, s, z: 0.5 * jnp.sum(sc.abs(s) ** 2) + p @ s,
            params=slope,
            curvature_inputs=np.ones(8),
        ),
    )
    start = sc.Point(np.array([1e-2] * 7 + [1.0]), 0.5)
    solution = sc.solve(problem, 1e-9, 1e-9, solver="polish", start=start)
    assert_brackets(solution, -0.5 * np.sum(slope**2))


def test_pieces_used_downwards_prove_nothing_wrong():
    def objective(s, z):  # relu(s) + 0.4 s, written with a piece of negative weight
        wide = sc.max(jnp.stack([s[0], 0 * s[0], 0 * s[0] - 100.0]))
        return 2 * wide - sc.relu(s[0]) + 0.4 * s[0]

    problem = sc.Problem(sc.Box(-np.ones(1), 2 * np.ones(1)), (), objective)
    for start in (0.05, 0.5, 2.0):
        solution = sc.solve(
            problem, solver=SlopeAscent(), start=sc.Point(np.array([start])), max_iterations=40
        )
        assert solution.bound <= -0.4


def test_small_crossings_are_not_hidden_by_single_precision():
    with jax.enable_x64(False):
        problem = sc.Problem(
            sc.Box(-1.0, 1.0),
            (sc.Stage(lambda s, z: 1e-4 * s, lambda s, z: 0 * s),),
            lambda s, z: -s + z[0],
        )
        stopped = sc.solve(problem, solver="greedy")
        solved = sc.solve(problem)
    assert stopped.status is sc.Status.BOUNDS_CROSSED
    assert stopped.value >= 0.0
    assert solved.bound <= 0.0 <= solved.value <= 1e-2


def test_mixed_precision_and_large_limits():
    box = sc.Box(-np.ones(2, np.float32), np.ones(2, np.float32))
    stage = sc.Stage(lambda p, s, z: p * s - 9, lambda p, s, z: s + 9, params=np.ones(2))
    problem = sc.Problem(box, (stage,), lambda s, z: jnp.sum(z[0]))
    with jax.numpy_dtype_promotion("standard"):  # what the user's function relies on
        solution = sc.solve(problem, max_iterations=2**40)
    assert solution.status is sc.Status.GAP_REACHED
    assert_brackets(solution, -20.0)


def test_float32_search_is_certified_in_float64():
    case = next(case for case in CASES if case.name == "softplus_net")
    with jax.enable_x64(False):
        problem = jax.tree.map(
            lambda x: np.asarray(x, np.float32) if hasattr(x, "dtype") else x, case.make()
        )
        solution = sc.solve(problem, rtol=1e-3)
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.certificate.multipliers[0].dtype == np.float64
    exact = sc.solve(problem, rtol=1e-9)
    assert solution.bound <= exact.value
    assert solution.value >= exact.bound


def test_the_start_is_used_and_new_numbers_do_not_recompile():
    first, optimum = random_linear_problem(1)
    sc.solve(first, solver=Polish(), max_iterations=5)
    before, _ = compiled()
    second, optimum = random_linear_problem(2)
    solution = sc.solve(second, solver=Polish(), max_iterations=5, atol=1e-5)
    assert compiled()[0] == before
    assert_brackets(solution, optimum)


def test_slope_ascent_raises_the_bound_of_greedy():
    case = next(case for case in CASES if case.name == "relu_deep")
    greedy = sc.solve(case.make(), rtol=1e-9, solver=Greedy(patience=0, progress=0.5))
    ascent = sc.solve(
        case.make(), rtol=1e-9, solver=(Greedy(patience=0, progress=0.5), SlopeAscent())
    )
    assert_brackets(ascent, case.value)
    assert case.value - ascent.bound < 0.2 * (case.value - greedy.bound)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_users_may_ask_jax_for_strict_promotion(dtype):
    """The search mixed types by itself: floats of two sizes, and truth values with integers."""
    box = sc.Box(np.array(-1, dtype), np.array(1, dtype))
    stage = sc.Stage(lambda s, z: s**2 - 1, lambda s, z: 1 - s**2)
    with jax.numpy_dtype_promotion("strict"):
        solution = sc.solve(sc.Problem(box, (stage,), lambda s, z: z[0]))
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.bound <= -1 <= solution.value
