"""What a user writes down: inputs from a set, stages of blocks, an objective, constraints."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stagecert.pieces import Treatment, evaluate
from stagecert.sets import AbstractSet


class StageTrace(eqx.Module):
    """What one stage did in a forward pass: its block, the two bounds, records of its pieces."""

    block: Any
    lower: Any
    upper: Any
    records: Any


# (fractions, lower, upper, channel) -> (block, channel): how a stage picks its block; see
# reformulation.mix, which also defines how cotangents come back and what the channel is for.
Mix = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class Pick(NamedTuple):
    """How a block is picked between its bounds: by `mix` at some fractions.

    `probe` is added to it: zeros, whose cotangent is the multiplier.
    """

    mix: Mix
    fractions: Any
    probe: Any


class AbstractStage(eqx.Module):
    """A block z_i with lower(inputs, earlier blocks) <= z_i <= upper(inputs, earlier blocks)."""

    if TYPE_CHECKING:  # type checkers take abstract fields for the first arguments of every stage

        @property
        def name(self) -> str | None: ...

        @property
        def box(self) -> Any: ...
    else:
        name: eqx.AbstractVar[str | None]
        box: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def trace(
        self,
        inputs,
        blocks: tuple,
        pick: Pick,
        channel,
        treatment: Treatment | None,
        data,
    ) -> tuple[StageTrace, Any]:
        """Picks the block between its bounds; these, and the channel afterwards."""

    @abc.abstractmethod
    def bounds(
        self, inputs, blocks: tuple, block, treatment: Treatment | None = None, data=None
    ) -> tuple[Any, Any, Any]:
        """(lower, upper, records) with the whole block given; nothing is picked."""

    @abc.abstractmethod
    def shape(self, inputs, blocks: tuple) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the block."""


def _with_params(function, params) -> Callable:
    return function if params is None else lambda *arguments: function(params, *arguments)


class Stage(AbstractStage):
    """One block of entries that do not depend on each other.

    Args:
        lower: (inputs, blocks) -> array, convex; `blocks` is the tuple of earlier blocks.
        upper: (inputs, blocks) -> array of the same shape, concave.
        params: arrays that `lower` and `upper` then take as a first argument. New values of the
            same shapes never recompile, and differ between the problems of a batch.
        name: how messages call the stage.
        box: (lowest, highest), arrays that enclose the block at every feasible point. Optional; the
            multipliers "as drawn" of the paper need it.
    """

    lower: Callable
    upper: Callable
    params: Any = None
    name: str | None = eqx.field(static=True, default=None)
    box: Any = None

    def _functions(self):
        return _with_params(self.lower, self.params), _with_params(self.upper, self.params)

    def _evaluate(self, inputs, blocks, treatment, data):
        lower, upper = self._functions()
        of_lower, of_upper = (None, None) if data is None else data
        low, low_records = evaluate(lower, (inputs, blocks), treatment, of_lower)
        high, high_records = evaluate(upper, (inputs, blocks), treatment, of_upper)
        return jnp.asarray(low), jnp.asarray(high), (low_records, high_records)

    def trace(self, inputs, blocks, pick, channel, treatment, data):
        lower, upper, records = self._evaluate(inputs, blocks, treatment, data)
        block, channel = pick.mix(pick.fractions, lower, upper, channel)
        return StageTrace(block + pick.probe, lower, upper, records), channel

    def bounds(self, inputs, blocks, block, treatment=None, data=None):
        return self._evaluate(inputs, blocks, treatment, data)

    def shape(self, inputs, blocks):
        lower, _ = self._functions()
        return jax.eval_shape(lambda i, b: jnp.asarray(lower(i, b)), inputs, blocks)


class ScanStage(AbstractStage):
    """Many equal steps, each bounded by functions of the one before; compiles as one step.

    Step t = 0, 1, ... is bounded by lower(feed_t, previous) and upper(feed_t, previous), where
    `previous` is step t - 1, or `initial`. The block has shape (length, *state).

    Args:
        lower: (feed_t, previous) -> state, convex. With `params`: (params_t, feed_t, previous).
        upper: likewise, concave.
        length: how many steps.
        initial: the state before the first step: an array, or an *affine* function
            (inputs, blocks) -> array.
        feed: an *affine* (inputs, blocks) -> arrays with leading axis `length`: what each step
            reads of the inputs and earlier blocks. None: nothing (feed_t is None).
        params: arrays with leading axis `length`.
        name: how messages call the stage.
        box: (lowest, highest), arrays that enclose the block; optional.
    """

    lower: Callable
    upper: Callable
    length: int = eqx.field(static=True)
    initial: Any
    feed: Callable | None = None
    params: Any = None
    name: str | None = eqx.field(static=True, default=None)
    box: Any = None

    def _start(self, inputs, blocks):
        initial = self.initial(inputs, blocks) if callable(self.initial) else self.initial
        feed = None if self.feed is None else self.feed(inputs, blocks)
        return jnp.asarray(initial), feed

    def _step(self, params, feed, previous, treatment, data):
        of_lower, of_upper = (None, None) if data is None else data
        lower = _with_params(self.lower, params)
        upper = _with_params(self.upper, params)
        low, low_records = evaluate(lower, (feed, previous), treatment, of_lower)
        high, high_records = evaluate(upper, (feed, previous), treatment, of_upper)
        return jnp.asarray(low), jnp.asarray(high), (low_records, high_records)

    def trace(self, inputs, blocks, pick, channel, treatment, data):
        initial, feed = self._start(inputs, blocks)
        arrays, static = eqx.partition(self.params, eqx.is_array)

        def step(carry, slices):
            previous, channel = carry
            params, feed_t, fractions_t, probe_t, data_t = slices
            params = eqx.combine(params, static)
            lower, upper, records = self._step(params, feed_t, previous, treatment, data_t)
            block, channel = pick.mix(fractions_t, lower, upper, channel)
            block = block + probe_t
            return (block, channel), StageTrace(block, lower, upper, records)

        carry = (initial.astype(pick.fractions.dtype), channel)
        slices = (arrays, feed, pick.fractions, pick.probe, data)
        (_, channel), trace = jax.lax.scan(step, carry, slices, length=self.length)
        return trace, channel

    def bounds(self, inputs, blocks, block, treatment=None, data=None):
        # With the block given, the steps no longer wait for each other: one vmap, no scan.
        initial, feed = self._start(inputs, blocks)
        previous = jnp.concatenate([initial[None].astype(block.dtype), block[:-1]])

        arrays, static = eqx.partition(self.params, eqx.is_array)

        def step(slices):
            params, feed_t, previous_t, data_t = slices
            params = eqx.combine(params, static)
            return self._step(params, feed_t, previous_t, treatment, data_t)

        return jax.vmap(step)((arrays, feed, previous, data))

    def shape(self, inputs, blocks):
        def first_step(inputs, blocks, params):
            initial, feed = self._start(inputs, blocks)
            params, feed = jax.tree.map(
                lambda x: x[0] if hasattr(x, "shape") else x, (params, feed)
            )
            return jnp.asarray(_with_params(self.lower, params)(feed, initial))

        arrays, static = eqx.partition(self.params, eqx.is_array)
        out = jax.eval_shape(
            lambda i, b, p: first_step(i, b, eqx.combine(p, static)), inputs, blocks, arrays
        )
        return jax.ShapeDtypeStruct((self.length, *out.shape), out.dtype)


class Objective(eqx.Module):
    """A convex objective that carries parameters, or says how curved it is.

    Args:
        function: (inputs, blocks) -> scalar; with `params`: (params, inputs, blocks) -> scalar.
        params: arrays, as in Stage.
        curvature_inputs: numbers c >= 0, of the shape of the inputs or broadcast to it, such that
            function - 1/2 sum(c * inputs**2) - (the same for the blocks) is still convex. Bounds
            use it, and shrink the gap of strongly convex problems many times over. (Where slopes
            of the objective's own nonsmooth pieces are no subgradients, they do without.)
        curvature_blocks: a tuple with such numbers for each stage.
    """

    function: Callable
    params: Any = None
    curvature_inputs: Any = None
    curvature_blocks: tuple | None = None

    def __call__(self, inputs, blocks):
        return _with_params(self.function, self.params)(inputs, blocks)

    def evaluate(self, inputs, blocks, treatment: Treatment | None = None, data=None):
        """(value, records of the nonsmooth pieces)."""
        value, records = evaluate(self, (inputs, blocks), treatment, data)
        return jnp.asarray(value), records


class Constraint(eqx.Module):
    """A side constraint: function(inputs, blocks) <= tolerance in every entry.

    Args:
        function: (inputs, blocks) -> array, convex; with `params`: (params, inputs, blocks). It may
            read all blocks.
        params: arrays, as in Stage. Another right-hand side never recompiles.
        name: how messages call the constraint.
        tolerance: zero by default. Constraints that leave no interior (an equation as two
            inequalities) need one, because points are repaired towards the interior. Values and
            bounds are those of the problem with the tolerance.

    Called with (inputs, blocks), it returns what has to be <= 0: function - tolerance.
    """

    function: Callable
    params: Any = None
    name: str | None = eqx.field(static=True, default=None)
    tolerance: Any = 0.0

    def __call__(self, inputs, blocks):
        values = jnp.asarray(_with_params(self.function, self.params)(inputs, blocks))
        return values - jnp.asarray(self.tolerance, values.dtype)

    def evaluate(self, inputs, blocks, treatment: Treatment | None = None, data=None):
        """(values that have to be <= 0, records of the nonsmooth pieces)."""
        values, records = evaluate(self, (inputs, blocks), treatment, data)
        return jnp.asarray(values), records


class Problem(eqx.Module):
    """Minimise objective(inputs, blocks) over a set of inputs and the blocks that stages allow.

    Args:
        inputs: the set S, for example `Box(lower, upper)`.
        stages: the stages in order; each may read the inputs and all earlier blocks.
        objective: (inputs, blocks) -> scalar, convex; or an `Objective`.
        constraints: side constraints g(inputs, blocks) <= 0: `Constraint`s, or plain functions.

    >>> import stagecert as sc
    >>> problem = sc.Problem(
    ...     inputs=sc.Box(-1.0, 1.0),
    ...     stages=(sc.Stage(lower=lambda s, z: s**2 - 1, upper=lambda s, z: 1 - s**2),),
    ...     objective=lambda s, z: z[0],
    ... )
    >>> round(sc.solve(problem).value, 3)
    -1.0
    """

    inputs: AbstractSet
    stages: tuple[AbstractStage, ...]
    objective: Objective
    constraints: tuple[Constraint, ...]
    guide: Any  # what searches add to a problem: see stagecert.sides.Guide

    def __init__(self, inputs, stages, objective, constraints=(), guide=None):
        self.inputs = inputs
        self.stages = tuple(stages) if isinstance(stages, (tuple, list)) else (stages,)
        self.objective = objective if isinstance(objective, Objective) else Objective(objective)
        given = tuple(constraints) if isinstance(constraints, (tuple, list)) else (constraints,)
        plain = lambda c: callable(c) and not isinstance(c, Constraint)  # noqa: E731
        self.constraints = tuple(Constraint(c) if plain(c) else c for c in given)
        self.guide = guide

    def block_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the blocks."""
        inputs = jax.eval_shape(self.inputs.centre)
        shapes: tuple = ()
        for stage in self.stages:
            shapes = (*shapes, stage.shape(inputs, shapes))
        return shapes

    def stage_name(self, index: int) -> str:
        """How messages call a stage."""
        name = self.stages[index].name
        return f"Stage {index}" if name is None else f"Stage {index} ('{name}')"

    def constraint_name(self, index: int) -> str:
        """How messages call a side constraint."""
        name = self.constraints[index].name
        return f"Constraint {index}" if name is None else f"Constraint {index} ('{name}')"


def as_arrays(tree, dtype=None):
    """Floating leaves as JAX arrays (of `dtype`, if given); everything else as it is.

    Numbers are floating leaves too, so that another number never means another compilation; whole
    numbers and truth values stay what they are, because functions use them to index and to branch.
    """

    def convert(leaf):
        if isinstance(leaf, float):
            return jnp.asarray(leaf, float if dtype is None else dtype)
        if isinstance(leaf, (np.ndarray, np.generic, jax.Array)):
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            if floating and dtype == np.float64 and leaf.dtype == np.float32:
                # NumPy keeps what is below float32's normal range; XLA may take it for zero.
                leaf = leaf if isinstance(leaf, Tracer) else np.asarray(leaf, np.float64)
            return jnp.asarray(leaf, dtype if floating else None)
        return leaf

    return jax.tree.map(convert, tree)
