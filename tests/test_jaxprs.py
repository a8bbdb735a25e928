"""The walk through traced functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert import jaxprs


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def _function(x):
    y = jax.jit(lambda a: jax.nn.relu(a) + np.arange(3.0))(x)
    y = jax.checkpoint(jnp.sin)(doubled(y))
    return y + jax.lax.fori_loop(0, 3, lambda _, c: c * 0.5, x)


def test_a_walk_that_runs_every_equation_is_the_function():
    x = jnp.array([-1.0, 0.5, 2.0])
    closed = jax.make_jaxpr(_function)(x)
    seen = []

    def rule(equation, values):
        if jaxprs.body_of_call(equation) is not None:
            return None
        seen.append(equation.primitive.name)
        return jaxprs.bind(equation, values)

    (out,) = jaxprs.walk(closed.jaxpr, closed.consts, [x], rule)
    np.testing.assert_allclose(out, _function(x))
    assert {"max", "sin"} <= set(seen)
    assert not jaxprs.CALLS & set(seen)


def test_constants_and_literals_become_values():
    closed = jax.make_jaxpr(lambda x: x * np.array([3.0, 4.0]) + 1.0)(jnp.ones(2))
    made = []
    jaxprs.walk(
        closed.jaxpr, closed.consts, [jnp.ones(2)], jaxprs.bind,
        constant=lambda c: made.append(np.asarray(c).tolist()) or c,
    )  # fmt: skip
    assert [3.0, 4.0] in made
    assert 1.0 in made


def test_all_equations_are_found_in_loops_and_branches():
    closed = jax.make_jaxpr(
        lambda x: jax.lax.cond(x > 0, lambda: jax.jit(jnp.exp)(x), lambda: jax.nn.relu(jnp.sin(x)))
    )(1.0)
    names = {equation.primitive.name for equation in jaxprs.equations(closed.jaxpr)}
    assert {"cond", "exp", "sin", "max"} <= names
    assert not jaxprs.CALLS & names


def test_a_rule_that_has_no_answer_is_named():
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    with pytest.raises(TypeError, match="no answer for 'sin'"):
        jaxprs.walk(closed.jaxpr, closed.consts, [1.0], lambda equation, values: None)
