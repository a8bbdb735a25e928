"""A point where gradients vanish that is no minimum, and three ways to deal with it.

The feasible set is a lens: s**2 - 1 <= z <= 1 - s**2 for s in [-1, 1], and z is minimised. At the
tips s = -1 and s = 1 the two bounds meet, so the fraction between them does not change z; but it
does change the gradient, and a plain gradient method that starts at a tip with the wrong fraction
stays there.
"""

import jax

import stagecert as sc

jax.config.update("jax_enable_x64", True)


def lens():
    """Minimise z on the lens; the optimum is -1, at s = 0."""
    return sc.Problem(
        inputs=sc.Box(-1.0, 1.0),
        stages=(sc.Stage(lower=lambda s, z: s**2 - 1, upper=lambda s, z: 1 - s**2, name="lens"),),
        objective=lambda s, z: z[0],
    )


def main():
    """Solve from the tip s = 1 with fraction 0.9, a spurious minimum of the reformulation."""
    problem = lens()
    tip = sc.Point(inputs=1.0, fractions=0.9)
    solutions = {}
    for solver in ("simple", "safe", "greedy", "auto"):
        solution = sc.solve(problem, solver=solver, start=tip)
        solutions[solver] = solution
        print(f"{solver:>6}: value {solution.value:+.6f}, bound {solution.bound:+.6f}", end="")
        print(f", {solution.status.name}")
    return solutions


if __name__ == "__main__":
    main()
