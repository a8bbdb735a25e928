"""DeepVerify: the Lagrangian dual of Dvijotham et al. (2018), raised by Adam.

Arguments a and blocks z of every layer are free within their intervals; multipliers m hold
a = segment(s, z) and, in the standard form, others hold z = activation(a). The minimum of the
Lagrangian falls apart into neurons, each in closed form. In the reduced form, which is the default
of the code that its authors released, z is activation(a) throughout, and the second multipliers,
maximised out, are gone; the bound for the same m is at least as good.

The dual of either form has the optimum of the convex relaxation as its maximum: the hull of a graph
has the same linear minima as the graph.

Multipliers start from zero, where the bound is about that of intervals.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.paper.methods.driver import Found, LaneMethod, Search
from benchmarks.paper.methods.relaxed import (
    Lane,
    Shared,
    constant_of,
    dual_value,
    least_on_graph,
    pulled_back,
)

Form = Literal["reduced", "standard"]


class Adam(eqx.Module):
    """Adam with a step that falls by `factor` every `period` steps."""

    first: float = 1e-2
    factor: float = 0.1
    period: int = 100
    decays: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def size(self, count):
        """The step size of step number `count`, from 0."""
        return self.first * self.factor ** (count // self.period)

    def update(self, count, gradient, mean, square):
        """(what to add to maximise, mean, square)."""
        one, two = self.decays
        mean = jax.tree.map(lambda m, g: one * m + (1 - one) * g, mean, gradient)
        square = jax.tree.map(lambda s, g: two * s + (1 - two) * g**2, square, gradient)

        def move(m, s):
            m, s = m / (1 - one ** (count + 1)), s / (1 - two ** (count + 1))
            return self.size(count) * m / (jnp.sqrt(s) + self.epsilon)

        return jax.tree.map(move, mean, square), mean, square


class Multipliers(eqx.Module):
    """Of `argument = segment` for every layer, and of `block = activation` (standard form only)."""

    affine: tuple
    bent: tuple | None


class _State(eqx.Module):
    at: Multipliers
    gradient: Multipliers
    mean: Multipliers
    square: Multipliers
    count: Any


def dual(shared: Shared, lane: Lane, at: Multipliers):
    """The minimum of the Lagrangian: a lower bound for any multipliers."""
    of_inputs, of_blocks = pulled_back(shared, lane, at.affine)
    if at.bent is None:
        return dual_value(shared, lane, at.affine, of_inputs, of_blocks)
    total = constant_of(shared, lane, at.affine) + lane.inputs.linear_minimum(of_inputs)
    for kind, m, k, g, pair, image in zip(
        shared.kinds, at.affine, at.bent, of_blocks, lane.arguments, lane.images, strict=True
    ):
        slope = g - k
        total = total + jnp.sum(jnp.where(slope > 0, slope * image[0], slope * image[1]))
        total = total + jnp.sum(least_on_graph(kind, -m, k, *pair)[0])
    return total


class DualAscent(Search):
    """Adam on the dual."""

    adam: Adam = Adam()
    form: Form = eqx.field(static=True, default="reduced")
    look_every: int = eqx.field(static=True, default=0)

    def start(self, shared, lane):
        zeros = tuple(jnp.zeros_like(low) for low, _ in lane.arguments)
        blocks = tuple(jnp.zeros_like(low) for low, _ in lane.images)
        at = Multipliers(zeros, blocks if self.form == "standard" else None)
        nothing = jax.tree.map(jnp.zeros_like, at)
        bound, gradient = self._dual(shared, lane, at)
        state = _State(at, gradient, nothing, nothing, jnp.zeros((), jnp.int32))
        return state, self._found(lane, bound, at)

    def step(self, shared, lane, state: _State, trial):
        move, mean, square = self.adam.update(state.count, state.gradient, state.mean, state.square)
        at = jax.tree.map(jnp.add, state.at, move)
        bound, gradient = self._dual(shared, lane, at)
        state = _State(at, gradient, mean, square, state.count + 1)
        return state, self._found(lane, bound, at)

    def _dual(self, shared, lane, at):
        return jax.value_and_grad(lambda at: dual(shared, lane, at))(at)

    def _found(self, lane, bound, at):
        return Found(bound, at, jnp.full((), jnp.inf, lane.row.dtype), None)

    def bound_of(self, shared, lane, proof):
        return dual(shared, lane, proof)


class DeepVerify(LaneMethod):
    """The dual ascent at the paper's settings; give `Stop.target` for its early stopping.

    Args:
        form: "reduced", as in the released code, or "standard", as in the publication.
        precision: of the search.
    """

    name = "deepverify"
    label = "DeepVerify"
    limit = 500
    has_values = False

    def __init__(
        self, form: Form = "reduced", precision: str = "float32", adam: Adam | None = None
    ):
        super().__init__(precision)
        self.form, self.adam = form, adam or Adam()

    def search(self, shared, trace):
        return DualAscent(self.adam, self.form)
