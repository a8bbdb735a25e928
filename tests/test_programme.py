"""Problems that are linear or quadratic programmes: read rightly, solved, judged as proposals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sparse
from scipy.optimize import linprog
from zoo import CASES

import stagecert as sc
from stagecert import solving
from stagecert.problem import as_arrays
from stagecert.programme.quadratic import Quadratic, minimise
from stagecert.programme.values import NoProgrammeError
from stagecert.programme.writing import written


def never():
    return False


@pytest.mark.parametrize("scaled", [False, True])
def test_linear_programs_agree_with_highs(scaled):
    """Entries of 1e-3 to 1e3 included, on which first-order steps stall."""
    rng = np.random.default_rng(int(scaled))
    for _ in range(15):
        n, m, p = rng.integers(2, 10), rng.integers(1, 14), rng.integers(0, 2)
        G = rng.normal(size=(m, n)) * (rng.random((m, n)) < 0.6)
        c, inside = rng.normal(size=n), rng.uniform(size=n)
        if scaled:
            G, c = G * 10.0 ** rng.uniform(-3, 3, G.shape), c * 10.0 ** rng.uniform(-3, 3, n)
        h = G @ inside + rng.random(m) * (rng.random(m) < 0.7)
        A = rng.normal(size=(p, n))
        rows = sparse.csr_array(np.vstack([G, np.eye(int(n)), -np.eye(int(n))]))
        sides = np.concatenate([h, np.ones(n), np.zeros(n)])
        nothing = sparse.csr_array((n, n))
        found = minimise(Quadratic(nothing, c, sparse.csr_array(A), A @ inside, rows, sides), never)
        assert found is not None
        truth = linprog(c, G, h, A if p else None, A @ inside if p else None, (0, 1)).fun
        assert c @ found.x == pytest.approx(truth, rel=1e-6, abs=1e-8)
        assert np.abs(c + A.T @ found.y + rows.T @ found.z).max() <= 1e-6 * np.abs(c).max()


MATRIX = np.array([[2.0, -1.0, 0.5], [0.3, 1.0, -2.0]])


def mixed(s, z):
    (block,) = z
    turned = jnp.concatenate([s[::-1], block[1:] - 0.5])
    chosen = jnp.where(jnp.array([True, False, True]), s, -2.0 * s)
    form = s @ (MATRIX.T @ MATRIX) @ s
    spread = jnp.sum(jnp.outer(block, jnp.ones(2)).reshape(2, -1)[:, 1:] ** 2)
    return form + jnp.sum(turned**2) / 3 + (MATRIX @ chosen)[0] + spread - block[0] * 4


def test_functions_are_read_for_what_they_are():
    stage = sc.Stage(lambda s, z: s - 1.0, lambda s, z: 2.0 * s + 3.0)
    problem = sc.Problem(sc.Box(np.zeros(3), np.ones(3)), stage, mixed)
    with jax.enable_x64(True):
        programme = written(as_arrays(problem, jnp.float64)).quadratic()
    rng = np.random.default_rng(0)
    points = rng.normal(size=(6, 6))
    read = [0.5 * x @ (programme.Q @ x) + programme.c @ x for x in points]
    true = [float(mixed(jnp.asarray(x[:3]), (jnp.asarray(x[3:]),))) for x in points]
    np.testing.assert_allclose(np.diff(read), np.diff(true), rtol=1e-12, atol=1e-12)
    # Six rows of the box, then lower <= block <= upper.
    x = points[0]
    np.testing.assert_allclose(
        programme.G @ x - programme.h,
        np.concatenate([-x[:3], x[:3] - 1, x[:3] - 1 - x[3:], x[3:] - 2 * x[:3] - 3]),
    )


def test_a_programme_of_the_zoo_closes_at_once():
    """It took 1,230 passes."""
    case = next(case for case in CASES if case.name == "inventory")
    solution = sc.solve(case.make(), atol=0.0, rtol=1e-8)
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.stats.passes <= 20
    slack = 1e-7 * (1 + abs(case.value))
    assert solution.bound - slack <= case.value <= solution.value + slack
    assert solution.certificate.derive(case.make()) == pytest.approx(solution.bound, rel=1e-12)


@pytest.mark.parametrize(
    "problem",
    [
        sc.Problem(sc.Box(-np.ones(2), np.ones(2)), (), lambda s, z: jnp.sum(jnp.exp(s))),
        sc.Problem(sc.Ball(np.zeros(2), 1.0), (), lambda s, z: jnp.sum(s)),
        sc.Problem(
            sc.Box(-np.ones(2), np.ones(2)),
            sc.Stage(lambda s, z: s**2, lambda s, z: 2 + s),
            lambda s, z: jnp.sum(z[0]),
        ),
    ],
    ids=["exp", "ball", "squares in bounds"],
)
def test_other_problems_are_left_alone(problem):
    with jax.enable_x64(True), pytest.raises(NoProgrammeError):
        written(as_arrays(problem, jnp.float64))


def test_nothing_is_searched_where_nothing_is_feasible(monkeypatch):
    """The main search was compiled for problems that are proven infeasible before it."""

    def searched(*_):
        raise AssertionError("there is nothing to search for")

    monkeypatch.setattr(solving._Job, "_searched", searched)
    ones = np.ones(2)
    problem = sc.Problem(
        sc.Box(-ones, ones), (), lambda s, z: jnp.sum(s), sc.Constraint(lambda s, z: 3 - jnp.sum(s))
    )
    solution = sc.solve(problem)
    assert solution.status is sc.Status.INFEASIBLE
    assert solution.certificate.derive(problem, rigorous=True) > 0
