"""Models of the curvature, against the quadratics that they were shown."""

import jax.numpy as jnp
import numpy as np
import pytest

from stagecert.solvers.quasi_newton import Curvature, Whole

SIZE = 6


@pytest.mark.parametrize("make", [Whole.none, lambda like: Curvature.none(SIZE, like)])
def test_a_quadratic_is_known_after_as_many_conjugate_steps(make):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(SIZE, SIZE))
    hessian = root @ root.T + np.eye(SIZE)
    curvature = make(jnp.zeros(SIZE))
    v = jnp.asarray(rng.normal(size=SIZE))
    # Nothing is known at first, and nothing is learned from a step that does not bend.
    curvature = curvature.extended(v, -v, jnp.array(False))
    assert np.allclose(curvature.model(3.0).times(v), 3.0 * v)
    for step in np.linalg.eigh(hessian)[1].T:
        curvature = curvature.extended(step, hessian @ step, jnp.array(True))
    model = curvature.model(3.0)
    assert np.allclose(model.times(v), hessian @ v, rtol=1e-10)
    free = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    x = np.asarray(model.solved(free, v))
    assert not x[free == 0].any()
    assert np.allclose((hessian @ x)[free == 1], v[free == 1], rtol=1e-6)


def test_a_singular_matrix_makes_no_step():
    whole = Whole(jnp.zeros((SIZE, SIZE)), jnp.array(True))
    assert not np.any(whole.model(1.0).solved(jnp.ones(SIZE), jnp.ones(SIZE)))
