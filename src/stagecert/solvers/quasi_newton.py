"""Projected quasi-Newton steps: a limited-memory model of the curvature, minimised over the set.

The model g . d + 1/2 d . B d is minimised over the set by spectral projected gradients, which
cost vector operations but no pass over the stages; so bounds are respected exactly, whatever the
set, and one evaluation of value and gradient an iteration buys a step with curvature in it
(Schmidt et al. 2009).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp


def bends(step, turn):
    """Whether the gradient grows along a step, by more than rounding."""
    eps = jnp.finfo(step.dtype).eps
    return step @ turn > jnp.sqrt(eps) * jnp.linalg.norm(step) * jnp.linalg.norm(turn)


class Curvature(eqx.Module):
    """The last steps and the changes of the gradient along them; rows of zeros are unused."""

    steps: Any
    turns: Any

    @staticmethod
    def none(memory: int, like) -> "Curvature":
        """No curvature known yet."""
        empty = jnp.zeros((memory, like.size), like.dtype)
        return Curvature(empty, empty)

    def extended(self, step, turn, bent) -> "Curvature":
        """With one more pair if it is `bent`; the oldest is forgotten."""
        steps = jnp.roll(self.steps, -1, axis=0).at[-1].set(step)
        turns = jnp.roll(self.turns, -1, axis=0).at[-1].set(turn)
        return Curvature(jnp.where(bent, steps, self.steps), jnp.where(bent, turns, self.turns))

    def model(self, first_scale) -> "Model":
        """B by the compact form of the BFGS matrix (Byrd, Nocedal and Schnabel 1994).

        `first_scale` is the multiple of the identity to use while nothing is known.
        """
        s, y = self.steps, self.turns
        sy = s @ y.T
        diagonal = jnp.diagonal(sy)
        used = diagonal > 0
        last = jnp.where(
            used[-1], jnp.sum(y[-1] ** 2) / jnp.where(used[-1], diagonal[-1], 1), first_scale
        )
        blank = jnp.where(used, 0, 1)
        middle = jnp.block(
            [
                [last * (s @ s.T) + jnp.diag(blank), jnp.tril(sy, -1)],
                [jnp.tril(sy, -1).T, -jnp.diag(diagonal + blank)],
            ]
        )
        wings = jnp.concatenate([last * s, y])
        # Ill-conditioned pairs make a useless model, not a wrong answer: the line search decides.
        inverse = jnp.linalg.inv(middle)

        def times(v):
            return last * v - (inverse @ (wings @ v)) @ wings

        def solved(free, right):
            return _conjugate_gradients(lambda v: free * times(free * v), free * right)

        return Model(times, solved)


class Whole(eqx.Module):
    """The same for short vectors: the BFGS matrix itself, which forgets nothing.

    Kinks change the curvature whenever one is met; a short memory then learns the rest of it again
    and again. A matrix this small also costs less than the last steps would.
    """

    matrix: Any
    known: Any  # whether there was a pair yet

    @staticmethod
    def none(like) -> "Whole":
        """No curvature known yet."""
        return Whole(jnp.zeros((like.size, like.size), like.dtype), jnp.zeros((), bool))

    def extended(self, step, turn, bent) -> "Whole":
        """With one more pair if it is `bent`."""
        along = jnp.where(bent, step @ turn, 1)
        first = (turn @ turn) / along * jnp.eye(len(step), dtype=step.dtype)
        matrix = jnp.where(self.known, self.matrix, first)
        image = matrix @ step
        curve = step @ image
        matrix = matrix - jnp.outer(image, image) / jnp.where(curve > 0, curve, 1)
        matrix = matrix + jnp.outer(turn, turn) / along
        return Whole(jnp.where(bent, matrix, self.matrix), self.known | bent)

    def model(self, first_scale) -> "Model":
        """As that of `Curvature`."""
        one = jnp.eye(len(self.matrix), dtype=self.matrix.dtype)
        matrix = jnp.where(self.known, self.matrix, first_scale * one)

        def solved(free, right):
            held = jnp.outer(free, free) * matrix + (1 - free) * one
            x = jnp.linalg.solve(held, free * right)
            return jnp.where(jnp.all(jnp.isfinite(x)), x, 0)  # rounding may make it singular

        return Model(lambda v: matrix @ v, solved)


class Model(NamedTuple):
    """v -> B v; and (free, right) -> x, zero where `free` is, with B x = right elsewhere."""

    times: Callable
    solved: Callable


def model_step(point, gradient, model: Model, project: Callable, first_size, rounds: int):
    """A step d with point + d in the set that (nearly) minimises gradient . d + 1/2 d . B d.

    Each round makes a few projected-gradient steps, which find out where the set binds, and then
    solves for the entries that it leaves free, exactly where nothing new comes to bind.
    """

    def searched(d, slope, p):
        """The best point of the segment from d to d + p."""
        bent = model.times(p)
        curve = p @ bent
        share = jnp.clip(-(slope @ p) / jnp.where(curve > 0, curve, 1), 0, 1)
        share = jnp.where(slope @ p < 0, jnp.where(curve > 0, share, 1), 0)
        size = jnp.where(curve > 0, (p @ p) / jnp.where(curve > 0, curve, 1), first_size)
        return d + share * p, slope + share * bent, size

    def projected(_, carry):
        d, slope, size = carry
        return searched(d, slope, project(point + d - size * slope) - point - d)

    def one_round(_, carry):
        d, slope, size = jax.lax.fori_loop(0, 5, projected, carry)
        # An entry is free if it can move downhill by a little without the set taking it back.
        little = jnp.sqrt(jnp.finfo(d.dtype).eps)
        nudge = -little * jnp.sign(slope)
        moved = project(point + d + nudge) - point - d
        free = (jnp.abs(moved - nudge) <= 0.1 * little).astype(d.dtype)
        inward = model.solved(free, -slope)
        d, slope, _ = searched(d, slope, project(point + d + inward) - point - d)
        return d, slope, size

    start = (jnp.zeros_like(point), gradient, jnp.asarray(first_size, point.dtype))
    d, _, _ = jax.lax.fori_loop(0, rounds, one_round, start)
    return d


def _conjugate_gradients(times: Callable, right, iterations: int = 40):
    """Nearly solves times(x) = right, for `times` symmetric and positive on the span of `right`."""
    tolerance = 1e-16 * (right @ right)

    def going_on(carry):
        _, _, _, square, k = carry
        return (square > tolerance) & (k < iterations)

    def body(carry):
        x, r, p, square, k = carry
        bent = times(p)
        curve = p @ bent
        share = jnp.where(curve > 0, square / jnp.where(curve > 0, curve, 1), 0)
        x, r = x + share * p, r - share * bent
        new = jnp.where(curve > 0, r @ r, 0)  # no positive curvature: stop with what there is
        return x, r, r + new / square * p, new, k + 1

    return jax.lax.while_loop(
        going_on, body, (jnp.zeros_like(right), right, right, right @ right, jnp.array(0))
    )[0]
