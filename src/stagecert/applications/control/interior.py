"""An interior-point method for boxes and balls: every iteration is one Riccati recursion.

Each constraint g(u) >= 0 (u - lower, upper - u, or (radius^2 - |u - middle|^2) / 2) has a
multiplier z > 0; steps aim at g z = target, and the target falls to zero. The number of iterations
hardly depends on the problem. Inputs stay strictly inside, and the feedback keeps unstable dynamics
in check.
"""

import numpy as np

from stagecert.applications.control.certificate import Certifier
from stagecert.applications.control.linear import LinearQuadratic
from stagecert.applications.control.result import Evaluated, Limits, Search, evaluate
from stagecert.applications.control.sweeps import follow, optimal_feedback, riccati

# How much of the way to the boundary a step may go.
_NEARLY = 0.995
# What is left of the target after a good step and after a poor one.
_GOOD, _POOR = 0.05, 0.5


class _Box:
    """u - lower >= 0 and upper - u >= 0, where these are finite."""

    def __init__(self, problem: LinearQuadratic):
        self.lower, self.upper = problem.lower, problem.upper
        width = self.upper - self.lower
        # Inputs whose bounds agree have no interior: they are held instead.
        self.free = width > 0
        self.ends = np.stack([np.isfinite(self.lower), np.isfinite(self.upper)]) & self.free
        margin = 0.1 * np.where(np.isfinite(width), width, 1.0)
        self.inner = self.lower + margin, self.upper - margin

    def within(self, t, u):
        return np.clip(u, self.inner[0][t], self.inner[1][t])

    def room(self, inputs):
        return np.where(self.ends, np.stack([inputs - self.lower, self.upper - inputs]), 1.0)

    def pull(self, inputs, z):
        return z[0] - z[1]

    def weight(self, inputs, z, room):
        return np.sum(z / room, axis=0)[:, :, None] * np.eye(inputs.shape[1])

    def change(self, inputs, move):
        return np.where(self.ends, np.stack([move, -move]), 0.0)


class _Ball:
    """(radius^2 - |u - middle|^2) / 2 >= 0 at every time."""

    def __init__(self, problem: LinearQuadratic):
        self.middle, self.radius = problem.middle, problem.radius
        self.ends, self.free = np.ones((1, problem.horizon), bool), None

    def within(self, t, u):
        away, most = u - self.middle[t], 0.9 * self.radius[t]
        return self.middle[t] + away * min(1.0, most / max(float(np.linalg.norm(away)), most))

    def room(self, inputs):
        return 0.5 * (self.radius**2 - np.sum((inputs - self.middle) ** 2, axis=1))[None]

    def pull(self, inputs, z):
        return -z[0][:, None] * (inputs - self.middle)

    def weight(self, inputs, z, room):
        away = inputs - self.middle
        outer = away[:, :, None] * away[:, None, :]
        return z[0][:, None, None] * (outer / room[0][:, None, None] + np.eye(away.shape[1]))

    def change(self, inputs, move):
        return -np.sum((inputs - self.middle) * move, axis=1)[None]


def search_interior(
    problem: LinearQuadratic,
    certifier: Certifier,
    start: Evaluated,
    limits: Limits,
    most: int,
) -> Search:
    """Steps until the gap is reached, no step helps, `most` are made or the clock says so."""
    search = Search(start.states, start.inputs).seen(start)
    constraint = _Box(problem) if problem.radius is None else _Ball(problem)
    ends, count = constraint.ends, int(constraint.ends.sum())
    try:
        states, inputs = follow(problem, optimal_feedback(problem), constraint.within)
        now = evaluate(problem, certifier, inputs, states)
        room = constraint.room(inputs)
        # All products g z agree, and their sum is about what the cost may still fall by.
        target = max(min(now.value - now.bound, now.value), 1e-12) / count
        z = np.where(ends, target / room, 0.0)
        for steps in range(most):
            search = search.seen(now)
            if limits.late() or limits.reached(search.value, search.bound):
                return search.counted(steps)
            right = now.slope - constraint.pull(inputs, np.where(ends, target / room, 0.0))
            weight = problem.R + constraint.weight(inputs, z, room)
            feedback = riccati(problem, right, weight, constraint.free)
            _, whole = feedback.roll_out(problem, states, inputs, 1.0)
            move = whole - inputs
            change = constraint.change(inputs, move)
            of_z = np.where(ends, (target - z * change) / room - z, 0.0)
            length = min(_longest(z, of_z), _longest(room, change))
            while np.any(constraint.room(inputs + length * move) <= (1 - _NEARLY) * room):
                length *= 0.8
                if length < 1e-8:
                    return search.counted(steps + 1)
            states, inputs = feedback.roll_out(problem, states, inputs, length)
            room = constraint.room(inputs)
            if not (np.all(room > 0) and np.all(np.isfinite(room))):
                return search.counted(steps + 1)
            z = z + length * of_z
            average = float(np.sum(z * room * ends)) / count
            target = average * (_GOOD if length > 0.9 else _POOR)
            now = evaluate(problem, certifier, inputs, states)
    except np.linalg.LinAlgError:
        return search
    return search.seen(now).counted(most)


def _longest(amount: np.ndarray, change: np.ndarray) -> float:
    """The longest step up to 1 that leaves amounts positive."""
    falling = change < 0
    ratio = np.min(amount[falling] / -change[falling], initial=np.inf)
    return float(min(1.0, _NEARLY * ratio))
