"""A craft chases a figure of eight against gusts: a certified plan at every step, warm-started."""

import numpy as np

from stagecert.applications.control import LinearQuadratic, solve

DT, AHEAD, STEPS, FORCE = 0.1, 40, 150, 1.2
A = np.kron([[1.0, DT], [0.0, 0.99]], np.eye(2))  # positions; velocities, with a little drag
B = np.kron([[0.5 * DT**2], [DT]], np.eye(2))
Q, R = np.array([4.0, 4.0, 0.01, 0.01]), np.array([0.05, 0.05])


def target(step):
    """Positions on a figure of eight; velocities hardly matter."""
    angle = 2 * np.pi * np.asarray(step) / 150
    return np.stack([3 * np.sin(angle), 2 * np.sin(2 * angle), 0 * angle, 0 * angle], axis=-1)


def chase(warm: bool):
    """The closed loop: states, and every plan that was made."""
    rng, start, plans = np.random.default_rng(0), None, []
    states = [state := np.array([-2.0, -2.0, 0.0, 0.0])]
    for step in range(STEPS):
        to = target(np.arange(step + 1, step + 1 + AHEAD))
        problem = LinearQuadratic(A, B, Q, R, state, reference=to, lower=-FORCE, upper=FORCE)
        plan = solve(problem, start=start)
        start = plan.shifted() if warm else None
        state = A @ state + B @ (plan.inputs[0] + 0.3 * rng.normal(size=2))
        states, plans = [*states, state], [*plans, plan]
    return np.array(states), plans


def main():
    """With warm starts and without."""
    runs = {name: chase(name == "warm") for name in ("warm", "cold")}
    for name, (_, plans) in runs.items():
        work, gap = np.mean([p.iterations for p in plans]), max(p.gap / p.bound for p in plans)
        print(f"{name} starts: {work:.1f} steps a plan, relative gaps at most {gap:.0e}")
    draw(*runs["warm"])
    return runs


def draw(states, plans):
    import matplotlib.pyplot as plt

    figure, (plane, time) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    plane.plot(*target(np.arange(STEPS))[:, :2].T, "k:", label="target")
    for plan in plans[::15]:
        plane.plot(*plan.states[:, :2].T, color="tab:orange", linewidth=0.8)
    plane.plot(*states[:, :2].T, color="tab:blue", label="craft (orange: plans)")
    plane.legend(loc="upper center")
    time.plot([plan.inputs[0] for plan in plans], label=["force x", "force y"])
    time.axhspan(-FORCE, FORCE, alpha=0.1)
    time.set(xlabel="step", ylim=(-1.5 * FORCE, 1.5 * FORCE))
    time.legend(loc="upper center", ncols=2)
    figure.savefig("control_receding.png", dpi=120)


if __name__ == "__main__":
    main()
