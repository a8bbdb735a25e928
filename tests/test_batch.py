"""Batches: the same answers as one by one, whatever leaves the batch when."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from test_solve import random_linear_problem
from zoo import CASES

import stagecert as sc
from stagecert.solvers import Greedy, Polish


@pytest.fixture(scope="module")
def some():
    return [random_linear_problem(seed) for seed in range(11)]


def test_batch_agrees_with_the_truth_and_with_single_solves(some):
    problems, optima = zip(*some, strict=True)
    seen = []
    batch = sc.solve_batch(
        problems, atol=1e-7, rtol=1e-5, progress=lambda done, total: seen.append((done, total))
    )
    assert len(batch) == 11
    assert seen
    assert all(total == 11 for _, total in seen)
    assert batch.bound.shape == batch.value.shape == batch.gap.shape == (11,)
    for i, optimum in enumerate(optima):
        one = batch[i]
        assert one.bound <= optimum + 1e-9 * (1 + abs(optimum))
        assert one.value >= optimum - 1e-9 * (1 + abs(optimum))
        single = sc.solve(problems[i], atol=1e-7, rtol=1e-5)
        assert one.status is single.status, (i, one, single)
        assert one.value == pytest.approx(single.value, abs=1e-4 * (1 + abs(optimum)))
        # The certificate belongs to this very problem.
        assert one.certificate.derive(problems[i]) == pytest.approx(one.bound, rel=1e-12)
        assert len(one.stats.trace.value) == one.stats.iterations


def test_targets_and_statuses_are_per_problem(some):
    problems, optima = zip(*some, strict=True)
    optima = np.array(optima)
    targets = np.where(np.arange(11) % 2 == 0, optima - 0.5, optima + 0.5)
    batch = sc.solve_batch(problems, rtol=1e-7, target=targets)
    for i, solution in enumerate(batch):
        expected = sc.Status.TARGET_PROVEN if i % 2 == 0 else sc.Status.TARGET_MET
        assert solution.status is expected, (i, solution, targets[i], optima[i])


def test_shared_arrays_are_not_stacked():
    case = next(case for case in CASES if case.name == "relu_kinks")
    problem = case.make()
    centre = np.asarray(problem.inputs.centre())
    problems = [
        sc.Problem(sc.Box(centre - r, centre + r), problem.stages, problem.objective)
        for r in (0.01, 0.02, 0.05)
    ]
    batch = sc.stack(problems)
    several: Any = batch.problem.stages[0]
    weights, one = several.params, cast(Any, problem.stages[0]).params
    for stacked, alone in zip(weights.values(), one.values(), strict=True):
        assert stacked is alone
    solutions = sc.solve_batch(batch, rtol=1e-5)
    assert all(status.solved for status in solutions.status)
    # Smaller boxes have larger minima.
    assert solutions.value[0] > solutions.value[1] > solutions.value[2]
    for problem, solution in zip(problems, solutions, strict=True):
        assert solution.value == pytest.approx(sc.solve(problem, rtol=1e-5).value, rel=1e-4)


def test_batch_of_stacked_arrays():
    draw = np.random.default_rng(0)
    middles = draw.normal(size=(5, 2)) + 4
    problem = sc.Problem(sc.Ball(middles, np.ones(5)), (), lambda s, z: s @ s)
    batch = sc.Batch.of(problem, lambda p: (p.inputs.middle, p.inputs.radius))
    assert batch.size == 5
    solutions = sc.solve_batch(batch, rtol=1e-8)
    np.testing.assert_allclose(
        solutions.value, (np.linalg.norm(middles, axis=1) - 1) ** 2, rtol=1e-7
    )


def test_finished_lanes_leave_the_batch():
    # Lanes 0..14 are linear and done at once; lane 15 needs polishing for long.
    def objective(p, s, z):
        return p["c"] @ s + p["k"] * (100 * (s[1] - s[0] / 2) ** 2 + s[0] ** 4)

    box = sc.Box(-np.ones(2), np.full(2, 2.0))
    lanes = [
        sc.Problem(box, (), sc.Objective(objective, params={"c": np.array([1.0, -i]), "k": k}))
        for i, k in [(i, np.array(0.0)) for i in range(15)] + [(1, np.array(1.0))]
    ]
    batch = sc.solve_batch(lanes, rtol=1e-9, atol=0.0)
    for i in range(15):
        assert batch[i].value == pytest.approx(-1.0 - 2.0 * i, abs=1e-12)
        assert batch.iterations[i] <= 2
    assert batch.iterations[15] > 2
    assert batch.status[15].solved
    single = sc.solve(lanes[15], rtol=1e-9, atol=0.0)
    assert batch[15].value == pytest.approx(single.value, rel=1e-8)


def test_lanes_kept_on_a_device_are_those_kept_on_the_host(some, monkeypatch):
    # Limits that some lanes reach in different phases, so that batches shrink and change solvers.
    problems = [problem for problem, _ in some]
    options: dict[str, Any] = dict(rtol=1e-5, target=-6.0, max_iterations=15)
    on_host = sc.solve_batch(problems, **options)
    assert len({status.name for status in on_host.status}) > 1
    assert len(set(on_host.iterations.tolist())) > 3
    monkeypatch.setattr("stagecert.searching._on_host", lambda tree: False)
    on_device = sc.solve_batch(problems, **options)
    assert on_device.status == on_host.status
    for name in ("value", "bound", "iterations", "passes"):
        np.testing.assert_array_equal(getattr(on_device, name), getattr(on_host, name))
    np.testing.assert_array_equal(on_device.inputs, on_host.inputs)


def test_starts_per_lane():
    lens = [
        sc.Problem(sc.Box(-1.0, 1.0), (sc.Stage(_lens_lower, _lens_upper, params=a),), _first)
        for a in (np.array(1.0), np.array(2.0))
    ]
    start = sc.Point(np.array([1.0, -1.0]), (np.array([0.7, 0.9]),))
    solutions = sc.solve_batch(lens, start=start, solver=(Greedy(), Polish()))
    np.testing.assert_allclose(solutions.value, [-1.0, -2.0], atol=1e-6)


def _lens_lower(a, s, z):
    return a * (s**2 - 1)


def _lens_upper(a, s, z):
    return a * (1 - s**2)


def _first(s, z):
    return z[0]


def test_bad_batches_are_refused(some):
    problems = [problem for problem, _ in some]
    with pytest.raises(sc.ProblemError, match="at least one problem"):
        sc.solve_batch([])
    with pytest.raises(sc.ProblemError, match="Entry 1 of the batch is no Problem"):
        sc.solve_batch([problems[0], 3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(sc.ProblemError, match="structure"):
        sc.solve_batch([problems[0], sc.Problem(problems[0].inputs, (), lambda s, z: s[0])])
    other, _ = random_linear_problem(0, width=5)
    with pytest.raises(sc.ProblemError, match="different shapes"):
        sc.solve_batch([problems[0], other])
    # Of NumPy's arrays such a box is refused by itself; JAX's may be those of a batch.
    empty = sc.Box(jnp.ones(3), jnp.zeros(3))
    broken = sc.Problem(empty, problems[0].stages, problems[0].objective)
    with pytest.raises(sc.ProblemError, match="Problem 1 of the batch: Box is empty"):
        sc.solve_batch([problems[0], broken])
