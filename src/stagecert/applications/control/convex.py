"""Convex stage costs and dynamics in a wedge, as a stagewise problem of the library's core.

The horizon is one scanned stage: it compiles as one step, and memory is linear in the horizon. The
engines for linear-quadratic problems know limits on inputs alone: with limits on states and rates,
these come here too (`as_convex`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import stagecert as sc
from stagecert import enclosure
from stagecert.applications.control.linear import LinearQuadratic, checked_numbers
from stagecert.errors import ProblemError
from stagecert.solvers import Accelerated, Polish
from stagecert.solvers.gradient import Backtracking

# Accelerated steps while they do well, then polishing. Line searches that halve and grow carefully
# were measured to need the fewest passes. Over long horizons of marginally stable dynamics the gap
# stands still for hundreds of steps before it closes: hence the patience.
STAGEWISE_SOLVERS = (
    Accelerated(search=Backtracking(first=1.0, shrink=0.5, grow=1.2), patience=2000, progress=0.9),
    Polish(patience=300),
)
CONSTRAINED_SOLVER = Polish(patience=300)  # with side constraints


@dataclass(frozen=True, eq=False)
class ConvexControl:
    """Minimises sum_t cost(x_{t+1}, u_t) where lower(x_t, u_t) <= x_{t+1} <= upper(x_t, u_t).

    Functions are JAX functions of one time's state (n,) and inputs (m,), after `constants` and
    `params` where these are given: f(x, u), f(constants, x, u), f(params_t, x, u) or
    f(constants, params_t, x, u). Solves with the same functions and shapes compile once, whatever
    the numbers are.

    Args:
        cost: of (x_{t+1}, u_t), a number; convex.
        lower: of (x_t, u_t), the state's lower bound; every entry convex.
        upper: likewise, concave. None: the next state equals `lower`, which must be affine.
        initial: the state x_0, (n,).
        horizon: how many steps.
        constants: arrays that all times share.
        params: arrays with a leading axis of times.
        low, high: a box for the inputs, finite: a number, (m,) or (T, m).
        radius: a ball for the inputs of each step: a number or (T,). Not together with a box.
        middle: the ball's middle, (m,) or (T, m).
        state_curvature, input_curvature: numbers c >= 0, or arrays of shape (n,) or (T, n), (m,) or
            (T, m), such that the cost less 1/2 sum(c x^2) and 1/2 sum(c u^2) is still convex: the
            better these are, the sooner the gap is proven to be small.
        state_box: (lowest, highest) states that any feasible trajectory stays between; optional.
        state_low, state_high: limits on the states x_1, ..., x_T: a number, (n,) or (T, n), may be
            infinite. They are side constraints: the trajectory that is found keeps to them.
        rate: how much each input may change from one step to the next: a number, (m,) or
            (T - 1, m), may be infinite.
    """

    cost: Callable
    lower: Callable
    upper: Callable | None
    initial: Any
    horizon: int
    constants: Any = field(default=None, kw_only=True)
    params: Any = field(default=None, kw_only=True)
    low: Any = field(default=None, kw_only=True)
    high: Any = field(default=None, kw_only=True)
    radius: Any = field(default=None, kw_only=True)
    middle: Any = field(default=None, kw_only=True)
    state_curvature: Any = field(default=0.0, kw_only=True)
    input_curvature: Any = field(default=0.0, kw_only=True)
    state_box: Any = field(default=None, kw_only=True)
    state_low: Any = field(default=None, kw_only=True)
    state_high: Any = field(default=None, kw_only=True)
    rate: Any = field(default=None, kw_only=True)

    def __post_init__(self):
        if not isinstance(self.horizon, (int, np.integer)) or self.horizon < 1:
            raise ProblemError(f"horizon = {self.horizon!r}: it must be a whole number from 1 on.")
        initial = checked_numbers("initial", self.initial)
        if initial.ndim != 1 or not len(initial):
            raise ProblemError(f"initial must be a vector, not of shape {initial.shape}.")
        object.__setattr__(self, "initial", initial)
        for path, leaf in jax.tree.leaves_with_path(self.params):
            if np.ndim(leaf) == 0 or np.shape(leaf)[0] != self.horizon:
                raise ProblemError(
                    f"params{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}; its first "
                    f"axis must be the {self.horizon} times."
                )
        for name in ("constants", "params"):
            # On the device once, rather than in every solve.
            object.__setattr__(self, name, _on_device(name, getattr(self, name)))
        _ = self.input_set, self.constraints  # checked here rather than in a solve

    @cached_property
    def input_set(self) -> sc.AbstractSet:
        """The inputs' box or balls."""
        names = ("low", "high") if self.radius is None else ("radius", "middle")
        if self.radius is not None and not (self.low is None and self.high is None):
            raise ProblemError("Give a box (low, high) or a ball (radius), not both.")
        parts = {}
        for name in names:
            if getattr(self, name) is None:
                raise ProblemError(f"{name} is missing: inputs need a box (low, high) or a ball.")
            parts[name] = checked_numbers(name, getattr(self, name))
        vectors = [parts[name] for name in names if name != "radius" and parts[name].ndim]
        if not vectors:
            raise ProblemError(f"{' or '.join(names)} must be a vector: it says how many inputs.")
        shape = (self.horizon, vectors[0].shape[-1])
        for name, array in parts.items():
            want = shape[:1] if name == "radius" else shape
            if array.shape not in ((), want, want[1:]):
                raise ProblemError(
                    f"{name} has shape {array.shape}; it must be {want[1:]} or {want}."
                )
            parts[name] = np.broadcast_to(array, want)
        if self.radius is not None:
            balls = Balls(parts["middle"], parts["radius"])
            balls.validate()
            return balls
        box = sc.Box(parts["low"], parts["high"])
        box.validate()
        return box

    @cached_property
    def state_limits(self) -> tuple[np.ndarray, np.ndarray]:
        """The limits on states from below and above, (T, n)."""
        shape = (int(self.horizon), len(self.initial))
        low = _limits("state_low", self.state_low, -np.inf, shape)
        high = _limits("state_high", self.state_high, np.inf, shape)
        if (low > high).any():
            t, i = (int(k) for k in np.argwhere(low > high)[0])
            raise ProblemError(
                f"No state is allowed at [{t}, {i}]: state_low is {low[t, i]} and state_high "
                f"{high[t, i]}."
            )
        return low, high

    @cached_property
    def constraints(self) -> tuple[sc.Constraint, ...]:
        """The limits on states and rates as side constraints; only what is finite counts."""
        low, high = self.state_limits
        shape = (int(self.horizon) - 1, self.input_set.centre().shape[1])
        rate = _limits("rate", self.rate, np.inf, shape)
        if (rate < 0).any():
            raise ProblemError(f"rate has a negative entry ({rate.min()}).")
        ends = (
            (_above, high, "highest states"),
            (_below, low, "lowest states"),
            (_changing, rate, "rates"),
        )
        return tuple(
            sc.Constraint(function, (np.flatnonzero(finite), limit[finite]), name=name)
            for function, limit, name in ends
            if (finite := np.isfinite(limit)).any()
        )

    def stagewise(self) -> sc.Problem:
        """The problem that the core solves."""
        with jax.enable_x64(True):
            n = len(self.initial)
            m = self.input_set.centre().shape[1]
            upper = self.lower if self.upper is None else self.upper
            stage = sc.ScanStage(
                lower=_Dynamics(self.lower, self.constants),
                upper=_Dynamics(upper, self.constants),
                length=int(self.horizon),
                initial=self.initial,
                feed=_inputs,
                params=self.params,
                name="dynamics",
                box=self.state_box,
            )
            curvature = [
                np.broadcast_to(checked_numbers(name, getattr(self, name)), (self.horizon, size))
                for name, size in (("input_curvature", m), ("state_curvature", n))
            ]
            objective = sc.Objective(
                _Cost(self.cost, self.constants),
                params=_Params(self.params),
                curvature_inputs=curvature[0],
                curvature_blocks=(curvature[1],),
            )
            return sc.Problem(self.input_set, (stage,), objective, self.constraints)


def _limits(name: str, given, default: float, shape: tuple[int, int]) -> np.ndarray:
    limits = checked_numbers(name, given, default, finite=False)
    if limits.shape not in ((), shape[1:], shape):
        raise ProblemError(f"{name} has shape {limits.shape}; it must be {shape[1:]} or {shape}.")
    return np.broadcast_to(limits, shape)


# Side constraints: the places that have a finite limit, and the limits there.


def _above(places, inputs, blocks):
    where, limit = places
    return blocks[0].ravel()[where] - limit


def _below(places, inputs, blocks):
    where, limit = places
    return limit - blocks[0].ravel()[where]


def _changing(places, inputs, blocks):
    where, limit = places
    change = (inputs[1:] - inputs[:-1]).ravel()[where]
    return jnp.stack([change - limit, -change - limit])


def _inputs(inputs, blocks):
    return inputs


def _on_device(name: str, tree):
    with jax.enable_x64(True):
        return jax.tree.map_with_path(
            lambda path, leaf: jnp.asarray(
                checked_numbers(f"{name}{jax.tree_util.keystr(path)}", leaf)
            ),
            tree,
        )


# Modules, not closures: two of them with the same function are equal, and compile once.


class _Params(eqx.Module):
    held: Any


class _Dynamics(eqx.Module):
    function: Callable = eqx.field(static=True)
    constants: Any

    def __call__(self, *arguments):
        *params, inputs, previous = arguments
        constants = () if self.constants is None else (self.constants,)
        return jnp.asarray(self.function(*constants, *params, previous, inputs))


class _Cost(eqx.Module):
    function: Callable = eqx.field(static=True)
    constants: Any

    def __call__(self, params: _Params, inputs, blocks):
        constants = () if self.constants is None else (self.constants,)
        given = () if params.held is None else (params.held,)

        def one(*arguments):
            cost = jnp.asarray(self.function(*constants, *arguments))
            if cost.ndim:
                raise ProblemError(
                    f"cost must return one number, but returns an array of shape {cost.shape}; "
                    "jnp.sum adds up its entries."
                )
            return cost

        return jnp.sum(jax.vmap(one)(*given, blocks[0], inputs))


class Balls(sc.AbstractSet):
    """Inputs (T, m) whose row t is within `radius[t]` of `middle[t]`.

    >>> Balls(np.zeros((2, 2)), np.array([1.0, 5.0])).project(np.full((2, 2), [0.0, 4.0])).tolist()
    [[0.0, 1.0], [0.0, 4.0]]
    """

    middle: Any
    radius: Any

    def project(self, point):
        away = point - self.middle
        length = jnp.linalg.norm(away, axis=1)
        inside = length <= self.radius
        factor = jnp.where(inside, 1.0, self.radius / jnp.where(inside, 1.0, length))
        return jnp.where(inside[:, None], point, self.middle + factor[:, None] * away)

    def minimise_linear(self, gradient):
        length = jnp.linalg.norm(gradient, axis=1)
        factor = self.radius / jnp.where(length > 0, length, 1.0)
        return self.middle - factor[:, None] * gradient

    def minimise_quadratic(self, gradient, centre, curvature):
        """Exact where the curvature is uniform in each row; else its least stands in."""
        c = jnp.min(jnp.broadcast_to(curvature, gradient.shape), axis=1, keepdims=True)
        curved = c > 1e-12 * jnp.max(jnp.abs(gradient), axis=1, keepdims=True)
        near = self.project(centre - gradient / jnp.where(curved, c, 1.0))
        best = jnp.where(curved, near, self.minimise_linear(gradient))
        move = best - centre
        return best, jnp.sum((gradient + jnp.where(curved, 0.5 * c, 0.0) * move) * move)

    def sample(self, key):
        of_direction, of_length = jax.random.split(key)
        direction = jax.random.normal(of_direction, self.middle.shape)
        direction = direction / jnp.linalg.norm(direction, axis=1, keepdims=True)
        length = jax.random.uniform(of_length, self.radius.shape) ** (1 / self.middle.shape[1])
        return self.middle + (self.radius * length)[:, None] * direction

    def centre(self):
        return jnp.asarray(self.middle)

    def scale(self):
        return jnp.broadcast_to(jnp.asarray(self.radius)[:, None], self.middle.shape)

    def validate(self):
        wrong = np.asarray(self.radius) <= 0
        if wrong.any():
            t = int(np.argmax(wrong))
            raise ProblemError(f"radius[{t}] = {self.radius[t]}: it must be positive.")


@enclosure.least_linear.register
def _least_on_balls(inputs: Balls, slope, anchor):
    return enclosure.least_on_balls(inputs.middle, inputs.radius, slope, anchor)


@enclosure.even.register
def _even_in_rows(inputs: Balls, curvature):
    return np.broadcast_to(curvature.min(axis=1, keepdims=True), curvature.shape)


# -- linear-quadratic problems with limits on states and rates -------------------------------------


def as_convex(problem: LinearQuadratic) -> ConvexControl:
    """The same problem, with its limits, for the library's core."""
    p = problem
    if p.radius is None and not (np.isfinite(p.lower).all() and np.isfinite(p.upper).all()):
        raise ProblemError(
            "Limits on states or rates need inputs in a finite box (lower, upper) or a ball "
            "(radius)."
        )
    sets = (
        {"low": p.lower, "high": p.upper}
        if p.radius is None
        else {"radius": p.radius, "middle": p.middle}
    )
    params = {
        name: np.array(getattr(p, name))
        for name in ("A", "B", "offset", "Q", "R", "reference", "input_reference")
    }
    return ConvexControl(
        _cost,
        _step,
        None,
        p.initial,
        p.horizon,
        params=params,
        state_curvature=np.broadcast_to(p.state_curvature[:, None], (p.horizon, p.states)),
        input_curvature=p.input_curvature,
        state_low=p.state_lower,
        state_high=p.state_upper,
        rate=p.rate,
        **sets,
    )


def _step(p, x, u):
    return p["A"] @ x + p["B"] @ u + p["offset"]


def _cost(p, x, u):
    d, w = x - p["reference"], u - p["input_reference"]
    return 0.5 * (jnp.dot(d, p["Q"] @ d) + jnp.dot(w, p["R"] @ w))
