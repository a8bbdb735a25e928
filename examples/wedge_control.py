"""Optimal control of a cart whose drag is only known to lie in a wedge.

Each step the next velocity lies between a convex and a concave function of force and state. The
optimum is what the best force could achieve with the most helpful drag: a lower bound on the cost
under every drag law in the wedge. Forces of at most 1 keep the speed at most 2, where the wedge is
open (lower <= upper).
"""

import jax
import jax.numpy as jnp

import stagecert as sc

jax.config.update("jax_enable_x64", True)

STEPS, DT = 30, 0.1


def lower(force, state):
    """The lower edge of the wedge, convex in (force, state)."""
    x, v = state
    return jnp.stack([x + DT * v, v + DT * (force - 0.5 * v + 0.1 * (v**2 - 4))])


def upper(force, state):
    """The upper edge of the wedge, concave in (force, state)."""
    x, v = state
    return jnp.stack([x + DT * v, v + DT * (force - 0.5 * v - 0.1 * (v**2 - 4))])


def cost(force, blocks):
    """Quadratic in forces and states."""
    return 0.05 * jnp.sum(force**2) + jnp.sum(blocks[0] ** 2)


def control(limit=1.0):
    """All forces are inputs; the whole horizon is one scanned stage."""
    start = jnp.array([1.0, 0.0])
    horizon = sc.ScanStage(lower, upper, STEPS, start, feed=lambda s, z: s, name="cart")
    # The cost is this strongly convex; saying so makes the lower bound much better.
    objective = sc.Objective(cost, curvature_inputs=0.1, curvature_blocks=(2.0,))
    return sc.Problem(sc.Box(-limit * jnp.ones(STEPS), limit), (horizon,), objective)


def main():
    """Look for violated assumptions, then solve."""
    problem = control()
    print(sc.check(problem))
    solution = sc.solve(problem, rtol=1e-6)
    print(solution)
    return solution


if __name__ == "__main__":
    main()
