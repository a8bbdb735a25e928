"""A robot crosses a building where an adversary mixes over placements of two sensors.

A step costs 0.1, one that is seen 1 more; arriving (lower right) pays 30. McMahan et al. (2003).
"""

import matplotlib.pyplot as plt
import numpy as np

from stagecert.applications.mdp import MDP, Effects, solve, worst_case

PLAN = """
.....o....#.....o...#.o.
..####...........####...
..#...o...##.o......#...
..#.###....#..........o.
......#....####..#......
.o.##.#..o....o..#..o...
..#........#............"""


def building(horizon=60, reach=3.2):
    """Cells, places of sensors, the process, costs of steps, costs of each sensor where it sees."""
    plan = np.array([list(row) for row in PLAN.split()])
    cells, places = np.argwhere(plan != "#"), np.argwhere(plan == "o")
    number = {tuple(cell): k for k, cell in enumerate(cells.tolist())}
    chances = np.zeros((4, len(cells), len(cells)))
    for a, move in enumerate([(0, 1), (1, 0), (0, -1), (-1, 0)]):
        for k, cell in enumerate(cells[:-1]):  # from the last cell, the goal, nothing leads away
            chances[a, k, number.get(tuple((cell + move).tolist()), k)] = 0.9
        chances[a] += np.diag(1 - chances[a].sum(axis=1))  # wheels slip; walls do not give way
    lines = np.linspace(places[:, None], cells[None], 30).round().astype(int)
    seen = np.all(plan[lines[..., 0], lines[..., 1]] != "#", axis=0)
    seen &= np.linalg.norm(places[:, None] - cells, axis=-1) <= reach
    away = np.repeat(np.arange(len(cells))[:, None] < len(cells) - 1, 4, axis=1)
    process = MDP(chances, horizon, final=30.0 * ~away[:, 0])
    return cells, places, process, -0.1 * away, -1.0 * (seen[..., None] & away)


def main():
    """Solve, compare with the shortest path, draw."""
    cells, places, process, steps, sensors = building()
    rewards = Effects(steps, sensors, budget=2)
    found = {"shortest path": solve(process, steps), "robust policy": solve(process, rewards)}
    figure, axes = plt.subplots(2, 1, figsize=(7, 4.6), layout="constrained")
    for axis, (name, one) in zip(axes, found.items(), strict=True):
        earned, _, answer = worst_case(process, rewards, one.policy)
        print(f"{name}: earns at least {earned:.4f}")
        used = one.weights if name == "robust policy" else answer
        picture = np.ma.masked_all(cells.max(axis=0) + 1)
        picture[tuple(cells.T)] = one.visits.sum(axis=(0, 2))
        image = axis.imshow(picture, cmap="Blues", vmin=0, vmax=1.2)
        axis.scatter(*places.T[::-1], s=10 + 500 * used, color="tab:red", alpha=0.8)
        axis.set(title=f"{name}: at least {earned:.2f}", xticks=[], yticks=[], facecolor="0.4")
    figure.colorbar(image, ax=axes, label="expected steps in a cell", extend="max")
    figure.savefig("mdp_sensors.png", dpi=120)
    return process, rewards, found


if __name__ == "__main__":
    main()
