"""A Markov decision process over a finite horizon whose rewards an adversary picks.

The player collects rewards; the adversary mixes a few reward tables to leave the player as little
as possible. The value of a state is at least Bellman's maximum over actions: convex, with kinks.
The inputs are the mixture; one scanned stage is the horizon, run backwards in time.
"""

import jax
import jax.numpy as jnp
import numpy as np

import stagecert as sc

jax.config.update("jax_enable_x64", True)

STATES, ACTIONS, HORIZON, TABLES = 6, 3, 10, 4


def data(seed=0):
    """Transition probabilities, reward tables over time, and a ceiling on the values."""
    rng = np.random.default_rng(seed)
    moves = rng.dirichlet(np.ones(STATES), size=(ACTIONS, STATES))
    tables = rng.uniform(0, 1, (HORIZON, TABLES, ACTIONS, STATES))
    return moves, tables, np.arange(1.0, HORIZON + 1)  # rewards are at most 1 a step


def mdp(moves, tables, ceiling):
    """Minimise over mixtures the value of state 0 with the whole horizon to go."""

    def lower(step, mixture, later):
        return sc.max(jnp.tensordot(mixture, step[0], axes=1) + moves @ later, axis=0)

    horizon = sc.ScanStage(
        lower,
        upper=lambda step, mixture, later: jnp.full(STATES, step[1]),
        length=HORIZON,
        initial=np.zeros(STATES),
        feed=lambda s, z: jnp.broadcast_to(s, (HORIZON, TABLES)),
        params=(tables, ceiling),
        name="values",
    )
    return sc.Problem(sc.Simplex(TABLES), (horizon,), lambda s, z: z[0][-1, 0])


def main():
    """Solve, and draw how the gap closed if matplotlib is installed."""
    solution = sc.solve(mdp(*data()), rtol=1e-6)
    print(solution)
    try:
        sc.plot_trace(solution).savefig("adversarial_mdp.png")
    except sc.ProblemError as error:
        print(error)
    return solution


if __name__ == "__main__":
    main()
