"""Problems exported to CVXPY: the same optimum as other ways to it, and errors that say what."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagecert as sc
from stagecert.interop import to_cvxpy

sys.path.insert(0, str(Path(__file__).parents[1]))
import zoo

CASES = {case.name: case for case in zoo.CASES}
# Softplus and chords; a scan with quadratics; a product of sets; maxima; entropy.
QUICK = ["softplus_net", "lqr_box", "box_and_ball", "max_pool", "entropy"]


def _export_agrees(case):
    exported = to_cvxpy(case.make())
    assert exported.problem.is_dcp()
    optimum: Any = exported.problem.solve(solver="CLARABEL")
    assert optimum == pytest.approx(case.value, rel=1e-6, abs=1e-6)
    return exported, optimum


@pytest.mark.parametrize("name", QUICK)
def test_optimum_is_the_known_one(name):
    _export_agrees(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_optimum_is_the_known_one_everywhere(name):
    _export_agrees(CASES[name])


@pytest.mark.parametrize("name", ["ladder", pytest.param("relu_kinks", marks=pytest.mark.slow)])
def test_our_point_and_bound_enclose_the_optimum(name):
    case = CASES[name]
    exported, optimum = _export_agrees(case)
    solution = sc.solve(case.make())
    at_our_point = exported.assign(solution.inputs, solution.blocks)
    assert at_our_point == pytest.approx(solution.value, rel=1e-9, abs=1e-9)
    assert exported.violation < 1e-9
    assert solution.bound - 1e-7 <= optimum <= solution.value + 1e-7


def _solved(inputs, objective, stages=()):
    exported = to_cvxpy(sc.Problem(inputs, stages, objective))
    return exported, exported.problem.solve(solver="CLARABEL")


def test_closed_forms():
    ball = sc.Ball(np.array([3.0, 4.0]), 1.0)
    assert _solved(ball, lambda s, z: jnp.linalg.norm(s))[1] == pytest.approx(4, abs=1e-6)
    assert _solved(ball, lambda s, z: s @ s)[1] == pytest.approx(16, abs=1e-6)
    form = np.array([[2.0, 1.0], [1.0, 3.0]])
    value = _solved(sc.Box(np.ones(2), 2.0), lambda s, z: s @ (form @ s))[1]
    assert value == pytest.approx(7, abs=1e-6)
    # The sum of exponentials is least where entries are equal.
    simplex = sc.Simplex(4, 2.0)
    value = _solved(simplex, lambda s, z: jax.nn.logsumexp(s))[1]
    assert value == pytest.approx(0.5 + np.log(4), abs=1e-6)
    value = _solved(simplex, lambda s, z: sc.maximum(s[0], s[1], 0.7) + sc.relu(s[2] - 1))[1]
    assert value == pytest.approx(0.7, abs=1e-6)


def test_variables_have_names_and_shapes():
    stage = sc.Stage(lambda s, z: 2 * s["a"], lambda s, z: 2 * s["a"], name="doubled")
    parts = sc.Product({"a": sc.Box(np.zeros((2, 3)), 1.0), "b": sc.Simplex(2)})
    problem = sc.Problem(parts, (stage,), lambda s, z: jnp.sum(z[0]) - s["b"][0])
    exported = to_cvxpy(problem)
    assert exported.problem.solve(solver="CLARABEL") == pytest.approx(-1, abs=1e-6)
    assert set(exported.names) == {"inputs 0", "inputs 1", "doubled"}
    assert exported.value_of("doubled").shape == (2, 3)
    assert exported.inputs["b"].size == 2


@pytest.mark.parametrize(
    ("lower", "upper", "words"),
    [
        (lambda s, z: jnp.sin(s), lambda s, z: 2 + s, ["'wavy'", "lower", "'sin'"]),
        (lambda s, z: s - 9, lambda s, z: s**2, ["'wavy'", "upper", "concave", "convex"]),
        (lambda s, z: jnp.trunc(s).astype(int) - 9.0, lambda s, z: 2 + s, ["'wavy'", "lower"]),
        (lambda s, z: s.astype(int) + 0.5 * s, lambda s, z: 9 + s, ["'convert_element_type'"]),
        (lambda s, z: s[0] * s[1] - 9 + 0 * s, lambda s, z: s + 9, ["'wavy'", "convex"]),
    ],
)
def test_what_cannot_be_exported_is_named(lower, upper, words):
    stage = sc.Stage(lower, upper, name="wavy")
    problem = sc.Problem(sc.Box(-np.ones(2), 1.0), (stage,), lambda s, z: jnp.sum(z[0]))
    with pytest.raises(sc.ProblemError) as error:
        to_cvxpy(problem)
    for word in words:
        assert word in str(error.value)


def test_objective_and_set_are_named():
    box = sc.Box(np.ones(2), 2.0)
    with pytest.raises(sc.ProblemError, match=r"objective cannot be written.*'cos'"):
        to_cvxpy(sc.Problem(box, (), lambda s, z: jnp.sum(jnp.cos(s))))

    class Strange(sc.AbstractSet):
        inner: sc.Box

        def project(self, point):
            return self.inner.project(point)

        def minimise_linear(self, gradient):
            return self.inner.minimise_linear(gradient)

        def sample(self, key):
            return self.inner.sample(key)

        def centre(self):
            return self.inner.centre()

        def scale(self):
            return self.inner.scale()

        def validate(self):
            self.inner.validate()

    with pytest.raises(sc.ProblemError, match="Strange cannot be exported"):
        to_cvxpy(sc.Problem(Strange(box), (), lambda s, z: jnp.sum(s)))


def test_a_log_sum_exp_that_is_none_is_found_out():
    def impostor(s, z):
        top = jax.lax.stop_gradient(jnp.max(s))
        return jnp.log(jnp.sum(jnp.exp(s - 2 * top))) + top  # subtracts twice what it adds

    with pytest.raises(sc.ProblemError, match=r"cannot be written|not exported correctly"):
        to_cvxpy(sc.Problem(sc.Box(np.ones(2), 2.0), (), impostor))

    def other_impostor(s, z):
        return jnp.log(jnp.sum(jnp.exp(s - jax.lax.stop_gradient(jnp.max(s))))) + (
            jax.lax.stop_gradient(jnp.min(s))
        )

    with pytest.raises(sc.ProblemError, match="not exported correctly"):
        to_cvxpy(sc.Problem(sc.Box(np.ones(2), 2.0), (), other_impostor))
