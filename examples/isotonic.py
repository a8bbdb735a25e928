"""Isotonic regression on a partial order: the fit may not fall along any chain of comparisons.

The cells of a grid are ordered componentwise: the fit must grow along rows and along columns. Cells
of one anti-diagonal are not comparable, so each anti-diagonal is one block, bounded below by its
neighbours before it (one at the edge, listed twice) and above by the largest observation.
"""

from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np

import stagecert as sc

jax.config.update("jax_enable_x64", True)


def observations(rows=3, columns=3, seed=0):
    """A noisy increasing surface."""
    noise = np.random.default_rng(seed).normal(0.0, 0.2, (rows, columns))
    return 0.1 * np.add.outer(np.arange(rows), np.arange(columns)) + noise


def diagonal(d, before, cells, high):
    """The stage of diagonal d: every cell is at least the largest of its neighbours before it."""
    place = {cell: k for k, cell in enumerate(before)}
    known = [[place.get((i - 1, j)), place.get((i, j - 1))] for i, j in cells]
    index = np.array([[a if b is None else b, b if a is None else a] for a, b in known])

    def lower(s, z):
        return sc.max((z[-1] if z else s)[index])

    return sc.Stage(lower, lambda s, z: jnp.full(len(cells), high), name=f"diagonal {d}")


def squares(targets, s, z):
    """The squared distance of the fit from the observations."""
    return sum(jnp.sum((fit - t) ** 2) for fit, t in zip((s, *z), targets, strict=True))


def isotonic(y):
    """Least squares over increasing fits; the input is the first cell, the blocks are the rest."""
    cells = [list(level) for _, level in groupby(sorted(np.ndindex(y.shape), key=sum), sum)]
    stages = [diagonal(d, cells[d - 1], cells[d], y.max()) for d in range(1, len(cells))]
    targets = [np.array([y[cell] for cell in level]) for level in cells]
    objective = sc.Objective(squares, targets, 2.0, (2.0,) * len(stages))
    return sc.Problem(sc.Box(np.full(1, y.min()), y.max()), stages, objective)


def main():
    """Fit a small grid."""
    solution = sc.solve(isotonic(observations()), rtol=1e-6)
    print(solution)
    return solution


if __name__ == "__main__":
    main()
