"""Sets of the adversary's weights: starting points, proximal steps, linear minima.

`radius` bounds the distance of any point from the start; `rounding` bounds how far, in proportion,
a point that `feasible` returns is from one exactly in the set; `least_log` is the logarithm of what
entropic steps keep probabilities above.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.sets import AbstractSet, Ball, Box, BoxBall, Simplex

_UNIT = 0.5 * float(np.finfo(float).eps)


class Weights(Protocol):
    """What the engines need of a set of weights."""

    radius: float
    rounding: float
    least_log: float

    def start(self) -> np.ndarray:
        """A point in the middle."""
        ...

    def step(self, x: np.ndarray, gradient: np.ndarray, size: float) -> np.ndarray:
        """The minimiser of size * <gradient, y> + distance(y, x)."""
        ...

    def distance(self, new: np.ndarray, old: np.ndarray) -> float:
        """The Bregman distance that steps are measured in."""
        ...

    def feasible(self, x: np.ndarray) -> np.ndarray:
        """The point, moved into the set if rounding had moved it out."""
        ...

    def minimiser(self, gradient: np.ndarray) -> np.ndarray:
        """A point that minimises <gradient, x>."""
        ...

    def minimum(self, gradient: np.ndarray) -> float:
        """The minimum of <gradient, x>, up to rounding."""
        ...


class Chances:
    """Probabilities, with entropic steps: distances are relative entropies."""

    def __init__(self, count: int):
        self.count = count
        self.radius = float(np.log(count))
        self.rounding = 2 * (count + 2) * _UNIT
        self.least_log = -60.0

    def start(self):
        return np.full(self.count, 1 / self.count)

    def step(self, x, gradient, size):
        floor = np.exp(self.least_log)
        z = np.log(np.maximum(x, floor)) - size * gradient
        chances = np.maximum(np.exp(z - z.max()), floor)
        return chances / chances.sum()

    def distance(self, new, old):
        floor = np.exp(self.least_log)
        new, old = np.maximum(new, floor), np.maximum(old, floor)
        # The second is a bound from below that keeps its digits when both are close.
        curved = float(np.sum((new - old) ** 2 / np.maximum(new, old)))
        return max(float(new @ np.log(new / old)), 0.5 * curved)

    def feasible(self, x):
        return x / x.sum()

    def minimiser(self, gradient):
        return np.eye(1, self.count, int(np.argmin(gradient)))[0]

    def minimum(self, gradient):
        return float(gradient.min())


class _Euclidean:
    """Distances are half the squared Euclidean ones; nothing is entropic."""

    least_log = -np.inf

    def distance(self, new, old):
        move = (new - old).ravel()
        return 0.5 * float(move @ move)


class Capped(_Euclidean):
    """0 <= x <= 1 and sum(x) <= total."""

    def __init__(self, shape: tuple[int, ...], total: float):
        self.shape, self.count = shape, int(np.prod(shape))
        self.total = min(float(total), float(self.count))
        self.radius = 0.5 * self.total * (1 - self.total / self.count)
        self.rounding = 0.0
        self._level = 0.0

    def start(self):
        return np.full(self.shape, self.total / self.count)

    def step(self, x, gradient, size):
        y = x - size * gradient
        clipped = np.clip(y, 0.0, 1.0)
        if clipped.sum() <= self.total:
            return clipped
        # Newton's steps, kept between two ends, for the level whose excess adds up to the total;
        # the level of the last step is a good start.
        low, high = 0.0, float(y.max())
        level = self._level if low < self._level < high else 0.5 * high
        for _ in range(100):
            clipped = np.clip(y - level, 0.0, 1.0)
            excess = float(clipped.sum()) - self.total
            if abs(excess) <= 1e-12 * (self.total + 1):
                break
            low, high = (level, high) if excess > 0 else (low, level)
            inside = np.count_nonzero((clipped > 0) & (clipped < 1))
            level = level + excess / inside if inside else 0.5 * (low + high)
            if not low < level < high:
                level = 0.5 * (low + high)
        self._level = level
        return clipped

    def feasible(self, x):
        x = np.clip(x, 0.0, 1.0)
        slack = 4 * (self.count + 4) * _UNIT
        total = float(x.sum())
        if total * (1 + slack) > self.total and self.total < self.count:
            x = x * (self.total / total * (1 - slack)) if self.total > 0 else np.zeros_like(x)
        return x

    def _top(self, gradient) -> tuple[np.ndarray, int, float]:
        """What a unit of each weight gains, how many weights can be one, what the next one gains.

        The next gain is the multiplier of the budget: any number from zero on proves a minimum.
        """
        gain = -gradient.ravel()
        whole = int(self.total)
        if whole >= self.count:
            return gain, self.count, 0.0
        next_gain = float(np.partition(gain, self.count - 1 - whole)[self.count - 1 - whole])
        return gain, whole, max(next_gain, 0.0)

    def minimiser(self, gradient):
        gain, whole, _ = self._top(gradient)
        x = np.zeros(self.count)
        order = np.argsort(-gain, kind="stable")
        x[order[:whole]] = 1.0
        if whole < self.count:
            x[order[whole]] = self.total - whole
        return np.where(gain > 0, x, 0.0).reshape(self.shape)

    def minimum(self, gradient):
        gain, _, multiplier = self._top(gradient)
        return -float(self.total * multiplier + np.maximum(gain - multiplier, 0.0).sum())


class UnitBall(_Euclidean):
    """Points of at most unit length."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.radius, self.rounding = 0.5, 0.0
        self._slack = 4 * (int(np.prod(shape)) + 4) * _UNIT

    def start(self):
        return np.zeros(self.shape)

    def step(self, x, gradient, size):
        y = x - size * gradient
        return y / max(float(np.linalg.norm(y)), 1.0)

    def feasible(self, x):
        length = float(np.linalg.norm(x))
        return x * ((1 - self._slack) / length) if length > 1 - self._slack else x

    def minimiser(self, gradient):
        length = float(np.linalg.norm(gradient))
        return -gradient / length if length > 0 else np.zeros(self.shape)

    def minimum(self, gradient):
        return -float(np.linalg.norm(gradient))


class LibrarySet(_Euclidean):
    """A set of `stagecert` whose points are single arrays; its methods run in JAX, in float64."""

    def __init__(self, inputs: AbstractSet, shape: tuple[int, ...], name: str, swap: bool = False):
        inputs.validate()
        self._set, self._swap = inputs, swap
        centre = self._compiled(inputs.centre)()
        expected = (*shape[:-2], shape[-1], shape[-2]) if swap else shape
        if centre.shape != expected:
            raise ProblemError(
                f"{name}: points of {type(inputs).__name__} have shape {centre.shape}, "
                f"not {expected}."
            )
        self._start = centre
        scale = self._compiled(inputs.scale)()
        self.radius = 0.5 * float(np.sum(scale * scale))
        # Projections of the library are exact up to rounding of their sums.
        self.rounding = 8 * (centre.size + 8) * _UNIT
        self.largest = self._largest(centre)
        self._project = self._compiled(inputs.project)
        self.minimiser = self._compiled(inputs.minimise_linear)
        self._minimum = self._compiled(inputs.linear_minimum)

    def _inner(self, array) -> np.ndarray:
        array = np.asarray(array, float)
        if self._swap and array.ndim >= 2:
            return np.ascontiguousarray(np.swapaxes(array, -1, -2))
        return array

    def _compiled(self, method: Callable) -> Callable[..., np.ndarray]:
        """A method of the set as a function of arrays in the inner layout."""
        # A function of its own: bound methods of modules are not hashable.
        run = jax.jit(lambda *points: method(*points))

        def call(*arrays):
            with jax.enable_x64(True):
                points = [jnp.asarray(self._inner(array), jnp.float64) for array in arrays]
                return self._inner(run(*points))

        return call

    def _largest(self, centre: np.ndarray) -> np.ndarray:
        """At most how large each entry of a point is."""
        s = self._set
        if isinstance(s, Box | BoxBall):
            largest = np.maximum(np.abs(s.lower), np.abs(s.upper))
        elif isinstance(s, Ball):
            largest = np.abs(np.asarray(s.middle)) + float(np.asarray(s.radius))
        elif isinstance(s, Simplex):
            largest = np.asarray(s.total)
        else:
            return self._probed(centre)
        largest = np.asarray(largest, float)
        if self._swap and largest.ndim >= 2:
            largest = np.swapaxes(largest, -1, -2)
        return np.broadcast_to(largest * (1 + 4 * _UNIT), centre.shape)

    def _probed(self, centre: np.ndarray) -> np.ndarray:
        """By one linear minimum for each entry and direction; for sets that users define."""
        outer = self._inner(centre).shape

        def both(entry):
            unit = jax.nn.one_hot(entry, centre.size, dtype=jnp.float64).reshape(outer)
            s = self._set
            return jnp.maximum(-s.linear_minimum(unit), -s.linear_minimum(-unit))

        with jax.enable_x64(True):
            found = np.asarray(jax.lax.map(both, jnp.arange(centre.size)))
        return self._inner(np.maximum(found, 0.0).reshape(outer) * (1 + 64 * centre.size * _UNIT))

    def start(self):
        return self._start

    def step(self, x, gradient, size):
        return self._project(x - size * gradient)

    def feasible(self, x):
        return self._project(x)

    def minimum(self, gradient):
        return float(self._minimum(gradient))
