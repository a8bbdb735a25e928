"""Isotonic fits equal those of scikit-learn and CVXPY; bounds hold in exact arithmetic."""

import subprocess
import sys
import warnings
from fractions import Fraction
from typing import Any, cast

import cvxpy as cp
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression as SklearnIsotonic

from stagecert import ProblemError, Status
from stagecert.applications import isotonic
from stagecert.applications.isotonic import (
    certificate,
    dual,
    estimator,
    fitting,
    flows,
    loops,
    losses,
    vectorised,
)

QUANTILE, DELTA = 0.3, 0.4


# -- instances and independent truth --------------------------------------------------------------


def grid_pairs(rows, columns):
    place = np.arange(rows * columns).reshape(rows, columns)
    down = np.stack([place[:-1].ravel(), place[1:].ravel()], 1)
    right = np.stack([place[:, :-1].ravel(), place[:, 1:].ravel()], 1)
    return np.concatenate([down, right])


def random_pairs(count, degree, rng):
    """Comparisons of shuffled names, so that numbers do not give the order away."""
    above = np.repeat(np.arange(1, count), degree)
    below = (rng.random(len(above)) * above).astype(int)
    return rng.permutation(count)[np.stack([below, above], 1)]


PAIRS = {
    "chain": lambda rng: np.stack([np.arange(79), np.arange(1, 80)], 1),
    "grid": lambda rng: grid_pairs(8, 10),
    "dag": lambda rng: random_pairs(80, 3, rng),
}


def targets(loss, node, count, rng):
    trend = node / count
    if loss == "logistic":
        return (rng.random(len(node)) < trend).astype(float)
    if loss == "poisson":
        return rng.poisson(4 * trend).astype(float)
    return trend + rng.normal(0, 0.5, len(node))


def convex_loss(loss, z, y):
    """The loss as CVXPY states it."""
    return {
        "squared": lambda: cp.square(z - y),
        "absolute": lambda: cp.abs(z - y),
        "quantile": lambda: cp.maximum(QUANTILE * (y - z), (1 - QUANTILE) * (z - y)),
        "huber": lambda: 0.5 * cp.huber(z - y, cast(Any, DELTA)),
        "logistic": lambda: -cp.multiply(y, cp.log(z)) - cp.multiply(1 - y, cp.log(1 - z)),
        "poisson": lambda: z - y + y * np.log(np.maximum(y, 1e-300)) - cp.multiply(y, cp.log(z)),
    }[loss]()


def optimum(y, weight, node, count, pairs, loss, low=None, high=None):
    z = cp.Variable(count)
    constraints: Any = [z[pairs[:, 0]] <= z[pairs[:, 1]]]
    constraints += [] if low is None else [z >= low]
    constraints += [] if high is None else [z <= high]
    # Terms that do not depend on z (0 log z) would be infinite at z = 0.
    objective = cp.sum(cp.multiply(weight, convex_loss(loss, z[node], y)))
    problem = cp.Problem(cp.Minimize(objective), constraints)
    tight = dict(tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "may be inaccurate": the tolerances are beyond its own
        problem.solve(solver=cp.CLARABEL, **tight)
    # Not problem.value: rounding may have put z a little outside the logarithm's domain.
    return float(problem.solution.opt_val)


def assert_certified(found, truth, tolerance=1e-6):
    slack = tolerance * (1 + abs(truth))
    assert found.status is Status.GAP_REACHED
    assert found.value == pytest.approx(truth, abs=slack)
    assert found.bound <= truth + slack
    assert 0 <= found.gap <= 1.01e-6 * abs(found.bound) + 1e-12


# -- every loss, every kind of order --------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "cuts"])
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("loss", isotonic.LOSSES)
@pytest.mark.parametrize("bounds", [(None, None), (0.3, 0.7)])
def test_equals_cvxpy(loss, kind, engine, bounds):
    rng = np.random.default_rng(3)
    pairs = PAIRS[kind](rng)
    count = 80
    # Two samples at some nodes.
    node = np.concatenate([np.arange(count), rng.integers(0, count, 40)])
    y, weight = targets(loss, node, count, rng), rng.uniform(0.5, 2, len(node))
    order, number = isotonic.from_comparisons(pairs, count)
    found = isotonic.fit(
        y, order, node=number[node], weight=weight, loss=loss, quantile=QUANTILE, delta=DELTA,
        y_min=bounds[0], y_max=bounds[1], engine=engine,
    )  # fmt: skip
    fitted = found.fitted[number]
    assert np.all(fitted[pairs[:, 0]] <= fitted[pairs[:, 1]])
    if bounds[0] is not None:
        assert bounds[0] <= fitted.min() <= fitted.max() <= bounds[1]
    assert_certified(found, optimum(y, weight, node, count, pairs, loss, *bounds))
    expected = "cuts" if engine == "cuts" or kind != "chain" else "pava"
    assert found.engine.startswith(expected)


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson"])
@pytest.mark.parametrize("kind", ["grid", "dag"])
def test_the_dual_engine_equals_cvxpy(loss, kind):
    rng = np.random.default_rng(4)
    pairs = PAIRS[kind](rng)
    node = np.concatenate([np.arange(80), rng.integers(0, 80, 40)])
    y, weight = targets(loss, node, 80, rng), rng.uniform(0.5, 2, len(node))
    order, number = isotonic.from_comparisons(pairs, 80)
    found = isotonic.fit(y, order, node=number[node], weight=weight, loss=loss, engine="dual")
    assert found.engine == "dual"
    assert_certified(found, optimum(y, weight, node, 80, pairs, loss))


@pytest.mark.parametrize(
    "count", [1000, pytest.param(10_000, marks=pytest.mark.slow)], ids=["1000", "10000"]
)
@pytest.mark.parametrize("kind", ["grid", "dag"])
@pytest.mark.parametrize("engine", ["dual", "cuts"])
def test_large_orders_equal_clarabel(kind, count, engine):
    rng = np.random.default_rng(5)
    side = round(count**0.5)
    count = side * side if kind == "grid" else count
    pairs = grid_pairs(side, side) if kind == "grid" else random_pairs(count, 3, rng)
    y = rng.normal(0, 0.5, count)
    order, number = isotonic.from_comparisons(pairs, count)
    found = isotonic.fit(y, order, node=number, engine=engine)
    z = cp.Variable(count)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(z - y)), [z[pairs[:, 0]] <= z[pairs[:, 1]]])
    problem.solve(solver=cp.CLARABEL, tol_gap_rel=1e-9, tol_gap_abs=1e-9)
    assert_certified(found, float(np.asarray(problem.value)))


def test_orders_close_to_a_chain_start_from_their_paths(monkeypatch):
    rng = np.random.default_rng(15)
    pairs = grid_pairs(2, 1000)
    y = np.tile(np.arange(1000) / 500, 2) + rng.normal(0, 0.2, 2000)
    weight = rng.uniform(0.5, 2, 2000)
    order, number = isotonic.from_comparisons(pairs, 2000)
    found = isotonic.fit(y, order, node=number, weight=weight, engine="dual")
    exact = isotonic.fit(y, order, node=number, weight=weight, engine="cuts")
    assert_certified(found, exact.value)
    with monkeypatch.context() as patch:
        patch.setattr(dual, "_NARROW", np.inf)
        plain = isotonic.fit(y, order, node=number, weight=weight, engine="dual")
    assert found.iterations < plain.iterations
    # On one path it is the optimum itself.
    alone = isotonic.fit(y[:1000], isotonic.chain(1000), weight=weight[:1000], engine="dual")
    assert alone.iterations <= 50
    assert alone.value == pytest.approx(
        isotonic.fit(y[:1000], isotonic.chain(1000), weight=weight[:1000]).value, rel=1e-9
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bounds", [(None, None), (0.2, 1.1)])
def test_total_orders_equal_scikit_learn(weighted, bounds):
    rng = np.random.default_rng(6)
    x = rng.integers(0, 60, 200).astype(float)
    y = x / 40 + rng.normal(0, 0.4, 200)
    weight = rng.uniform(0.1, 3, 200) if weighted else None
    theirs = SklearnIsotonic(y_min=bounds[0], y_max=bounds[1], out_of_bounds="clip")
    theirs.fit(x, y, sample_weight=weight)
    ours = isotonic.IsotonicRegression(y_min=bounds[0], y_max=bounds[1])
    ours.fit(x[:, None], y, sample_weight=weight)
    new = np.linspace(-5, 65, 301)
    assert ours.engine_ == "pava"
    np.testing.assert_allclose(ours.predict(new[:, None]), theirs.predict(new), atol=1e-12)
    assert ours.gap_ <= 1e-10 * ours.objective_


def test_a_loss_of_ones_own_equals_cvxpy():
    rng = np.random.default_rng(7)
    pairs = grid_pairs(2, 2)
    y = np.array([0.3, 0.1, 0.9, 0.4]) + rng.normal(0, 0.1, 4)
    order, number = isotonic.from_comparisons(pairs, 4)

    def linex(z, y):
        return jnp.exp(z - y) - (z - y) - 1

    found = isotonic.fit(y, order, node=number, loss=linex, rtol=1e-5)
    assert found.engine == "stagewise"
    z = cp.Variable(4)
    problem = cp.Problem(
        cp.Minimize(cp.sum(cp.exp(z - y) - (z - y) - 1)), [z[pairs[:, 0]] <= z[pairs[:, 1]]]
    )
    problem.solve(solver=cp.CLARABEL)
    assert found.value == pytest.approx(problem.value, rel=2e-5)
    assert found.bound <= float(np.asarray(problem.value)) + 1e-7
    fitted = found.fitted[number]
    assert np.all(fitted[pairs[:, 0]] <= fitted[pairs[:, 1]] + 1e-12)


# -- bounds hold in exact arithmetic --------------------------------------------------------------


def exact_least_squares(y, weight):
    """Pool adjacent violators in fractions: the exact optimum for the numbers as given."""
    blocks = []
    for target, amount in zip(map(Fraction, y), map(Fraction, weight), strict=True):
        blocks.append([amount * target, amount, [(target, amount)]])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    return sum(
        amount * (target - total / mass) ** 2
        for total, mass, members in blocks
        for target, amount in members
    )


numbers = st.floats(-1e3, 1e3, allow_nan=False) | st.integers(-3, 3).map(float)


@given(st.lists(st.tuples(numbers, st.floats(1e-3, 1e3)), min_size=1, max_size=12))
def test_bounds_hold_exactly(samples):
    y, weight = (list(part) for part in zip(*samples, strict=True))
    truth = exact_least_squares(y, weight)
    order = isotonic.chain(len(y))
    for engine in ("pava", "dual", "cuts"):
        found = isotonic.fit(y, order, weight=weight, engine=engine)
        assert Fraction(found.bound) <= truth <= Fraction(found.value)


@given(
    st.lists(st.tuples(numbers, st.floats(0, 10)), min_size=2, max_size=8),
    st.lists(st.floats(0, 1e4), min_size=7, max_size=7),
)
def test_any_multipliers_give_a_bound(samples, multipliers):
    y, fit = (np.array(part) for part in zip(*samples, strict=True))
    order = isotonic.chain(len(y))
    truth = exact_least_squares(y.tolist(), [1.0] * len(y))
    problem = certificate.Samples(
        y, np.ones(len(y)), np.arange(len(y)), order, losses.Squared(), y.min(), y.max()
    )
    bound = certificate.lower_bound(problem, np.array(multipliers[: len(y) - 1]), fit)
    assert bound == -np.inf or Fraction(bound) <= truth


@pytest.mark.parametrize("loss", isotonic.LOSSES)
def test_any_multipliers_give_a_bound_for_every_loss(loss):
    """No feasible fit that was drawn is below the bound of random multipliers."""
    rng = np.random.default_rng(8)
    pairs = grid_pairs(3, 4)
    order, number = isotonic.from_comparisons(pairs, 12)
    node = np.concatenate([np.arange(12), rng.integers(0, 12, 6)])
    for _ in range(50):
        y = targets(loss, node, 12, rng)
        chosen = losses.named_loss(loss, quantile=QUANTILE, delta=DELTA)
        problem = certificate.Samples(
            y, rng.uniform(0.5, 2, 18), number[node], order, chosen, y.min(), y.max()
        )
        start = rng.uniform(y.min(), y.max(), 12)
        bound = certificate.lower_bound(problem, rng.exponential(0.3, len(pairs)), start)
        best = isotonic.fit(
            y, order, node=number[node], weight=problem.weight, loss=loss, quantile=QUANTILE,
            delta=DELTA,
        )  # fmt: skip
        assert np.isfinite(bound)
        assert bound <= best.value
        feasible = loops.running_maximum(start, order.lower, order.start)
        assert best.bound <= problem.value(feasible)


# -- orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "dimensions", "levels"),
    [(60, 2, 8), (80, 2, 10_000), (90, 3, 4), (90, 3, 10_000), (70, 5, 3), (40, 10, 50)],
)
def test_coordinatewise_orders_are_reduced_to_covers(count, dimensions, levels):
    rng = np.random.default_rng(9)
    points = rng.integers(0, levels, (count, dimensions)).astype(float)
    order, node = isotonic.coordinatewise(points)
    distinct = np.empty((order.count, dimensions))
    distinct[node] = points
    below = np.all(distinct[:, None] <= distinct[None], axis=2) & ~np.eye(order.count, dtype=bool)
    covers = below & ~((below.astype(int) @ below.astype(int)) > 0)
    found = np.zeros_like(covers)
    found[order.lower, order.upper] = True
    assert np.array_equal(found, covers)
    assert np.all(order.lower < order.upper)


def test_comparisons_that_follow_are_left_out():
    everything = np.array([(i, j) for i in range(30) for j in range(i, 30)])
    order, number = isotonic.from_comparisons(np.concatenate([everything, everything]), 30)
    assert order.is_chain
    assert number.tolist() == list(range(30))


def test_cycles_are_named():
    with pytest.raises(ProblemError, match=r"cycle: (3 <= 5 <= 4|5 <= 4 <= 3|4 <= 3 <= 5) <= \d"):
        isotonic.from_comparisons([(0, 3), (3, 5), (5, 4), (4, 3), (4, 1)], 6)


def test_nodes_without_samples_take_part_in_the_order():
    """0 <= 2 <= 1 where only 0 and 1 have samples, in the wrong order."""
    order, number = isotonic.from_comparisons([(0, 2), (2, 1), (0, 3), (3, 4)], 5)
    found = isotonic.fit([3.0, 1.0], order, node=number[[0, 1]])
    assert found.fitted[number[[0, 2, 1]]].tolist() == [2.0, 2.0, 2.0]
    assert found.value == pytest.approx(2.0)
    assert found.status is Status.GAP_REACHED


# -- without the libraries that are optional ------------------------------------------------------


def test_sweeps_by_arrays_equal_the_loops():
    rng = np.random.default_rng(10)
    order, _ = isotonic.from_comparisons(random_pairs(60, 3, rng), 60)
    y, weight = rng.normal(size=60), rng.uniform(0.5, 2, 60)
    for name in ("running_maximum", "running_minimum"):
        results = [getattr(m, name)(y, order.lower, order.start) for m in (loops, vectorised)]
        assert np.array_equal(*results)
    after = []
    for module in (loops, vectorised):
        multipliers, ahead = np.zeros(len(order.lower)), np.zeros(len(order.lower))
        step = np.full(len(order.lower), 0.02)
        momentum = module.ascend(
            y, 1 / weight, (order.lower, order.upper), step, (multipliers, ahead), 1.0, 40
        )
        means = module.block_means(y, weight, multipliers, 1e-9, order.lower, order.upper, 3)
        after.append((momentum, multipliers, ahead, *means))
    for ours, theirs in zip(*after, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_cuts_by_scipy_equal_those_by_pymaxflow(monkeypatch):
    rng = np.random.default_rng(11)
    order, number = isotonic.from_comparisons(random_pairs(100, 3, rng), 100)
    y = rng.normal(size=100)
    monkeypatch.setattr(flows, "has_pymaxflow", lambda: False)
    monkeypatch.setattr(fitting, "has_pymaxflow", lambda: False)
    scipy = isotonic.fit(y, order, node=number, engine="cuts")
    assert scipy.engine == "cuts (scipy)"
    monkeypatch.undo()
    if not flows.has_pymaxflow():
        pytest.skip("PyMaxflow is not installed")
    other = isotonic.fit(y, order, node=number, engine="cuts")
    np.testing.assert_allclose(scipy.fitted, other.fitted, atol=1e-9)


def test_works_without_numba():
    program = """
import sys
sys.modules["numba"] = None
import numpy as np
from stagecert.applications import isotonic
from stagecert.applications.isotonic import loops
assert not loops.COMPILED
rng = np.random.default_rng(0)
X = rng.random((120, 3))
y = X.sum(1) + rng.normal(0, 0.3, 120)
order, node = isotonic.coordinatewise(X)
found = [isotonic.fit(y, order, node=node, engine=e, rtol=1e-8) for e in ("dual", "cuts")]
assert abs(found[0].value - found[1].value) < 1e-7 * found[1].value, found
order, node = isotonic.coordinatewise(X[:, :2])
assert isotonic.fit(y, order, node=node).status.solved
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.skipif(not loops.COMPILED, reason="Numba is not installed")
def test_loops_are_compiled():
    assert hasattr(loops.ascend, "py_func")


# -- limits and bad input -------------------------------------------------------------------------


@pytest.mark.parametrize("loss", isotonic.LOSSES)
@pytest.mark.parametrize("y", [[0.25, 0.5, 0.5, 0.75], [1.0, 1.0, 1.0, 1.0]])
def test_perfect_fits_are_recognised(loss, y):
    order, number = isotonic.from_comparisons([(0, 1), (0, 2), (1, 3), (2, 3)], 4)
    found = isotonic.fit(y, order, node=number, loss=loss)
    assert found.status is Status.GAP_REACHED
    assert found.fitted[number].tolist() == y


def test_limits_are_kept_and_said():
    rng = np.random.default_rng(12)
    pairs = grid_pairs(30, 30)
    order, number = isotonic.from_comparisons(pairs, 900)
    y = rng.normal(size=900)
    found = isotonic.fit(y, order, node=number, engine="dual", max_iterations=25)
    assert found.status is Status.ITERATION_LIMIT
    truth = isotonic.fit(y, order, node=number, engine="cuts")
    assert found.bound <= truth.value
    assert truth.bound <= found.value
    found = isotonic.fit(y, order, node=number, engine="dual", time_limit=0.0)
    assert found.status is Status.TIME_LIMIT


def test_auto_turns_to_cuts_where_the_ascent_is_slow():
    rng = np.random.default_rng(13)
    order, number = isotonic.from_comparisons(grid_pairs(50, 50), 2500)
    weight = 10.0 ** rng.uniform(-6, 6, 2500)
    found = isotonic.fit(
        rng.normal(size=2500), order, node=number, weight=weight, max_iterations=50
    )
    assert found.engine.startswith("dual, cuts")
    assert found.status is Status.GAP_REACHED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(y=[1.0, np.nan, 2.0]), r"y\[1\] = nan"),
        (dict(y=[1.0, np.inf, 2.0]), r"y\[1\] = inf"),
        (dict(y=["a", "b", "c"]), "y must hold numbers"),
        (dict(y=[[1.0], [2.0], [3.0]]), "y must be one-dimensional"),
        (dict(y=[]), "y is empty"),
        (dict(y=[1.0, 2.0]), "y has 2 entries, but the order has 3 nodes"),
        (dict(y=[1.0, 1e200, 2.0]), "scale the data"),
        (dict(weight=[1.0, 1.0]), r"weight has shape \(2,\), but y has shape \(3,\)"),
        (dict(weight=[1.0, -1.0, 1.0]), r"weight\[1\] = -1.0"),
        (dict(weight=[0.0, 0.0, 0.0]), "All weights are zero"),
        (dict(node=[0, 1, 3]), r"node\[2\] = 3"),
        (dict(node=[0.0, 1.0, 2.0]), "node must hold integers"),
        (dict(loss="cubic"), "Unknown loss 'cubic'"),
        (dict(loss="quantile", quantile=1.0), "quantile = 1.0"),
        (dict(loss="huber", delta=0.0), "delta = 0.0"),
        (dict(loss="logistic"), r"y\[1\] = 3.0.*between 0 and 1"),
        (dict(loss="poisson", y=[1.0, -3.0, 2.0]), r"y\[1\] = -3.0.*not negative"),
        (dict(loss="logistic", y=[0.0, 1.0, 0.0], y_max=2.0), "y_max = 2.0"),
        (dict(y_min=2.0, y_max=1.0), "no fit is between"),
        (dict(engine="magic"), "Unknown engine 'magic'"),
        (dict(engine="dual", loss="absolute"), "'dual' needs a loss that fits means"),
        (dict(engine="stagewise"), "JAX functions"),
        (dict(rtol=-1.0), "rtol = -1.0"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = dict(y=[1.0, 3.0, 2.0], order=isotonic.chain(3)) | change
    with pytest.raises(ProblemError, match=message):
        isotonic.fit(arguments.pop("y"), arguments.pop("order"), **arguments)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1), (1, 5)], r"comparisons\[1, 1\] = 5"),
        ([(0, 1), (-1, 2)], r"comparisons\[1, 0\] = -1"),
        ([(0, 1, 2)], r"shape \(m, 2\)"),
        ([(0.5, 1.0)], "integers"),
    ],
)
def test_bad_comparisons_are_named(pairs, message):
    with pytest.raises(ProblemError, match=message):
        isotonic.from_comparisons(pairs, 3)


def test_extensions_enclose_every_monotone_function():
    rng = np.random.default_rng(14)
    points = rng.random((60, 3))
    order, node = isotonic.coordinatewise(points)
    fitted = isotonic.fit(points.sum(1), order, node=node).fitted  # already monotone
    inside = np.empty((order.count, 3))
    inside[node] = points
    ends = estimator.corners(inside, fitted, order)
    new = rng.random((200, 3))
    low, middle, high = (estimator.extend(new, *ends, w) for w in ("lower", "middle", "upper"))
    truth = new.sum(1)
    surrounded = (low > fitted.min()) & (high < fitted.max())
    assert surrounded.any()
    assert np.all((low <= truth + 1e-12)[surrounded])
    assert np.all((truth <= high + 1e-12)[surrounded])
    assert np.all((low <= middle) & (middle <= high))


def test_flows_of_tiny_amounts_are_finite():
    from stagecert.applications.isotonic.flows import _upper_set_scipy

    none = np.zeros(0, np.int32)
    assert not _upper_set_scipy(np.array([5e-324]), none, none).any()
    order = np.array([0], np.int32), np.array([1], np.int32)
    assert _upper_set_scipy(np.array([-1e-280, 2e-280]), *order).tolist() == [False, True]
