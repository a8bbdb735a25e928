"""The lower bound of a certificate in interval arithmetic: a proof for convex problems.

The formula is that of `stagecert.formula`: the objective, the side constraints with their
multipliers, and then stage by stage from the last to the first, with two differences that real
arithmetic asks for.

- A block without a box and without curvature needs a tangent that does not slope in it at all, and
  rounded multipliers only nearly achieve that. Any multipliers give a bound, so those that do are
  meant, and enclosed: the slope at a block from the objective and all later stages *is* its
  multiplier. Where the bounds of a stage depend on its own block (a ScanStage), this is an equation
  for the multipliers; an interval that the equation maps into itself contains a solution (Brouwer).
- The objective's declared curvature adds to a tangent. Enclosed slopes of kinks may have a slack e
  that is not exactly zero. If f - c/2 |x|^2 is convex and f(x) >= f(a) + g d - e for all d = x - a,
  then f(x) >= f(a) + g d + (1 - t) c/2 |d|^2 - e / t for every t in (0, 1]: the difference
  quotients of a convex function along a ray rise. `SHARE` is that t.
"""

import math
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.enclosure import intervals as iv
from stagecert.enclosure.intervals import Interval, constant
from stagecert.enclosure.primitives import enclose, refuse_unknown
from stagecert.enclosure.sets import is_interval, least_linear, least_on_intervals, least_quadratic
from stagecert.problem import Problem, as_arrays

SHARE = 2.0**-10
ATTEMPTS = 4  # at enclosing the multipliers of one stage
MOST_SLOPES = 10**7  # of a scan's steps that are looked at to foresee how errors grow


def rigorous_bound(problem: Problem, certificate: Any) -> float:
    """A number that is not above the optimum in real arithmetic, if the problem is convex.

    -inf where nothing could be proven.

    Raises:
        UnknownPrimitives: a function uses what has no enclosure.
    """
    iv.check_arithmetic()
    held = (problem, certificate.inputs, certificate.blocks, certificate.slopes)
    leaves, structure = jax.tree.flatten(held)
    leaves = [_plain(leaf) for leaf in leaves]
    sides = jax.tree.map(_not_negative, certificate.sides)
    key = tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf
        for leaf in leaves
    )
    with jax.enable_x64(True), np.errstate(all="ignore"):
        functions = _functions(structure, key)
        problem, inputs, blocks, slopes = jax.tree.unflatten(structure, leaves)
        multipliers = tuple(np.asarray(y, np.float64) for y in certificate.multipliers)
        formula = _Formula(functions, (problem, inputs, blocks, slopes), multipliers, leaves, sides)
        low = float(formula.bound(certificate.feasibility).low)
    return low if math.isfinite(low) else -math.inf


def _not_negative(multipliers) -> np.ndarray:
    """Multipliers of side constraints; what is no number >= 0 counts as zero."""
    array = np.asarray(multipliers, np.float64)
    return np.where(np.isfinite(array) & (array > 0), array, 0.0)


def refuse(problem: Problem, certificate: Any) -> None:
    """Raises ProblemError now if `rigorous_bound` would; the certificate may be mere shapes."""
    held = (problem, certificate.inputs, certificate.blocks, certificate.slopes)
    leaves, structure = jax.tree.flatten(held)

    def shape(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            return jax.ShapeDtypeStruct(leaf.shape, np.float64 if floating else leaf.dtype)
        leaf = _plain(leaf)
        is_array = isinstance(leaf, np.ndarray)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf

    with jax.enable_x64(True):
        _functions(structure, tuple(map(shape, leaves)))
        for part in jax.tree.leaves(problem.inputs, is_leaf=_is_plain_set):
            if _is_plain_set(part) and least_linear.dispatch(type(part)) is _UNKNOWN_SET:
                least_linear(part, None, None)


_UNKNOWN_SET = least_linear.dispatch(object)


def _is_plain_set(x: Any) -> bool:
    from stagecert.sets import AbstractSet, Product

    return isinstance(x, AbstractSet) and not isinstance(x, Product)


def _plain(leaf):
    """Numbers and arrays as NumPy arrays, floating ones in float64; everything else as it is."""
    if isinstance(leaf, (float, np.ndarray, np.generic, jax.Array)):
        array = np.asarray(leaf)
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(np.float64, copy=False) if floating else array
    return leaf


# -- tracing ---------------------------------------------------------------------------------------


def _functions(structure, key) -> "_Functions":
    try:
        return _traced(structure, key)
    except TypeError:  # parts that cannot be compared are traced anew each time
        return _traced.__wrapped__(structure, key)


class _Functions:
    """The jaxprs of an objective, side constraints and stages, all with their derivatives."""

    def __init__(self, objective, constraints, stages, depends):
        self.objective, self.constraints = objective, constraints
        self.stages, self.depends = stages, depends


@lru_cache(maxsize=64)
def _traced(structure, key) -> _Functions:
    arrays = [x for x in key if isinstance(x, jax.ShapeDtypeStruct)]

    def filled(arrays):
        values = iter(arrays)
        return jax.tree.unflatten(
            structure, [next(values) if isinstance(x, jax.ShapeDtypeStruct) else x for x in key]
        )

    problem, _, blocks, _ = jax.tree.unflatten(structure, key)
    objective = jax.make_jaxpr(lambda *a: _objective(filled(a)))(*arrays)
    refuse_unknown(objective.jaxpr, "The objective")
    constraints = []
    for k in range(len(problem.constraints)):
        values = jax.eval_shape(lambda *a, k=k: _values(filled(a), k), *arrays)
        closed = jax.make_jaxpr(lambda l, *a, k=k: _constraint(filled(a), k, l))(values, *arrays)
        refuse_unknown(closed.jaxpr, problem.constraint_name(k))
        constraints.append(closed)
    stages, depends = [], []
    for i in range(len(problem.stages)):
        closed = jax.make_jaxpr(lambda up, down, *a, i=i: _stage(filled(a), i, up, down))(
            blocks[i], blocks[i], *arrays
        )
        refuse_unknown(closed.jaxpr, problem.stage_name(i))
        stages.append(closed)
        alone = jax.make_jaxpr(lambda block, *a, i=i: _own_bounds(filled(a), i, block))(
            blocks[i], *arrays
        )
        own = alone.jaxpr.invars[0]
        depends.append(any(v is own for equation in alone.jaxpr.eqns for v in equation.invars))
    return _Functions(objective, constraints, stages, depends)


def _objective(held):
    """(value, slopes in inputs and blocks, slack of the chosen slopes of kinks)."""
    problem, inputs, blocks, slopes = held

    def value(inputs, blocks, share):
        treatment = pieces.given_slopes(share)
        return problem.objective.evaluate(inputs, blocks, treatment, slopes[1])[0]

    found, of_all = jax.value_and_grad(value, argnums=(0, 1, 2))(inputs, blocks, jnp.ones(()))
    return found, *of_all


def _values(held, index):
    problem, inputs, blocks, _ = held
    return problem.constraints[index](inputs, blocks)


def _constraint(held, index, multipliers):
    """The values of a side constraint, and the slopes of multipliers . values."""
    problem, inputs, blocks, slopes = held

    def values(inputs, blocks, share):
        treatment, data = pieces.given_slopes(share), slopes[2][index]
        return problem.constraints[index].evaluate(inputs, blocks, treatment, data)[0]

    found, pull = jax.vjp(values, inputs, blocks, jnp.ones(()))
    return found, *pull(multipliers)


def _stage(held, index, up, down):
    """The bounds of a stage, and the slopes of up . lower - down . upper."""
    problem, inputs, blocks, slopes = held

    def bounds(inputs, blocks, share):
        treatment, data = pieces.given_slopes(share), slopes[0][index]
        stage, earlier, own = problem.stages[index], blocks[:-1], blocks[-1]
        lower, upper, _ = stage.bounds(inputs, earlier, own, treatment, data)
        return jnp.broadcast_to(lower, own.shape), jnp.broadcast_to(upper, own.shape)

    found, pull = jax.vjp(bounds, inputs, blocks[: index + 1], jnp.ones(()))
    return *found, *pull((up, -down))


def _own_bounds(held, index, block):
    problem, inputs, blocks, _ = held
    return problem.stages[index].bounds(inputs, blocks[:index], block)[:2]


# -- the formula -----------------------------------------------------------------------------------


class _Formula:
    def __init__(self, functions, held, multipliers, leaves, sides):
        self.functions, self.held, self.multipliers = functions, held, multipliers
        self.sides = sides
        self.problem, self.inputs, self.blocks, _ = held
        self.points = [constant(x) for x in leaves if isinstance(x, np.ndarray)]
        self.shape_of_inputs = jax.tree.structure(self.inputs)

    def bound(self, feasibility: bool) -> Interval:
        """An interval whose lower end is the bound; for `feasibility`, without the objective."""
        count = self.shape_of_inputs.num_leaves
        if feasibility:
            total, curved = constant(0.0), 0.0
            leaves = [*jax.tree.leaves(self.inputs), *self.blocks]
            slopes = [constant(np.zeros(np.shape(x))) for x in leaves]
        else:
            value, *slopes, slack = self._run(self.functions.objective, [])
            curved, slack = self._curved(value, slack)
            total = iv.subtract(value, slack)
        for closed, held in zip(
            self.functions.constraints, self.sides.constraints or (), strict=False
        ):
            if not np.any(held):
                continue
            held = constant(held)
            values, *more, slack = self._run(closed, [held])
            total = iv.subtract(iv.add(total, iv.total(iv.multiply(held, values))), slack)
            slopes = list(map(_add, slopes, more))
        of_inputs, of_blocks = slopes[:count], slopes[count:]
        for i in reversed(range(len(self.blocks))):
            found = self._stage_term(i, of_blocks[i], curved)
            if found is None:
                return constant(-np.inf)
            term, more_inputs, more_blocks = found
            total = iv.add(total, term)
            of_inputs = list(map(_add, of_inputs, more_inputs))
            of_blocks = list(map(_add, of_blocks[:i], more_blocks))
        slope = self.shape_of_inputs.unflatten(of_inputs)
        return iv.add(total, self._inputs_term(slope, curved))

    def _run(self, closed, more: list[Interval]) -> list[Interval]:
        return enclose(closed.jaxpr, closed.consts, [*more, *self.points])

    def _curved(self, value: Interval, slack: Interval) -> tuple[float, Interval]:
        """The share of the declared curvature that counts, and what the slack then costs."""
        objective = self.problem.objective
        declared = objective.curvature_inputs is not None or objective.curvature_blocks is not None
        if not declared or np.all(slack.high == 0):
            return 1.0, slack
        if not slack.high <= 1e-9 * (1 + value.magnitude()):
            return 0.0, slack
        return 1 - SHARE, iv.multiply(constant(1 / SHARE), slack)

    def _inputs_term(self, slope, curved: float) -> Interval:
        curvature = self.problem.objective.curvature_inputs
        if curvature is None or curved == 0:
            return least_linear(self.problem.inputs, slope, self.inputs)
        shapes = jax.tree.map(lambda g: g.low, slope, is_leaf=is_interval)
        curvature = jax.tree.map(
            lambda c, a: _lowered(np.broadcast_to(c, a.shape), curved),
            jax.tree.broadcast(curvature, shapes),
            shapes,
        )
        return least_quadratic(self.problem.inputs, slope, self.inputs, curvature)

    def _block_curvature(self, i: int, curved: float) -> np.ndarray:
        declared = self.problem.objective.curvature_blocks
        c = 0.0 if declared is None or curved == 0 else declared[i]
        return _lowered(np.broadcast_to(np.asarray(c, np.float64), self.blocks[i].shape), curved)

    def _stage_term(self, i: int, given: Interval, curved: float):
        """What a stage adds: (a number, slopes in the inputs, slopes in the earlier blocks)."""
        stage, curvature = self.problem.stages[i], self._block_curvature(i, curved)
        free = (curvature <= 0) & (stage.box is None)
        found = self._multipliers(i, given, free)
        if found is None:
            return None
        y, (lower, upper, *slopes, slack) = found
        count = self.shape_of_inputs.num_leaves
        of_inputs, of_earlier, own = slopes[:count], slopes[count:-1], slopes[-1]
        z = constant(self.blocks[i])
        up, down = self._parts(i, y)
        active = iv.subtract(
            iv.multiply(up, iv.subtract(lower, z)), iv.multiply(down, iv.subtract(upper, z))
        )
        term = iv.subtract(iv.total(active), slack)
        if not np.all(free):
            slope = iv.subtract(_add(given, own), y)
            # The multipliers of free entries are such that there is no slope.
            slope = iv.select(constant(free), slope, constant(np.zeros(free.shape)))
            term = iv.add(term, self._block_term(stage, slope, curvature, free, z))
        return term, of_inputs, of_earlier

    def _block_term(self, stage, slope, curvature, free, z) -> Interval:
        """Below slope . d + curvature / 2 d^2 for d = block - anchor, in its box or anywhere."""
        if stage.box is not None:
            low, high = (
                iv.subtract(constant(np.broadcast_to(_plain(end), z.shape)), z) for end in stage.box
            )
            return iv.total(least_on_intervals(slope, curvature, low, high))
        twice = constant(np.where(free, -1.0, -2 * curvature))
        return iv.total(iv.divide(iv.square(slope), twice))

    def _parts(self, i: int, y: Interval) -> tuple[Interval, Interval]:
        """The multipliers of the lower and of the upper bound: max(y, 0), max(-y, 0), and order."""
        zero = constant(0.0)
        up, down = iv.maximum(y, zero), iv.maximum(iv.negative(y), zero)
        if not self.sides.order or not np.any(self.sides.order[i]):
            return up, down
        order = constant(np.broadcast_to(self.sides.order[i], y.shape))
        return iv.add(up, order), iv.add(down, order)

    def _multipliers(self, i: int, given: Interval, free: np.ndarray):
        """(multipliers, the stage's bounds and slopes for them); None if there is no enclosure."""
        stored = constant(self.multipliers[i])
        closed = self.functions.stages[i]

        def run(y):
            return self._run(closed, list(self._parts(i, y)))

        if not np.any(free) or not self.functions.depends[i]:
            y = iv.select(constant(free), stored, given)
            return y, run(y)
        out = run(stored)
        away = iv.subtract(_add(given, out[-2]), stored).magnitude()
        width = np.asarray(_foreseen(as_arrays(self.held), i, as_arrays((stored.low, away))))
        for _ in range(ATTEMPTS):
            if not np.all(np.isfinite(width)):
                return None
            around = Interval(iv.down(stored.low - width), iv.up(stored.low + width))
            y = iv.select(constant(free), stored, around)
            out = run(y)
            mapped = _add(given, out[-2])
            inside = (mapped.low >= y.low) & (mapped.high <= y.high)
            if np.all(inside | ~free):
                return y, out
            width = 4 * np.maximum(width, iv.subtract(mapped, stored).magnitude())
        return None


def _lowered(curvature: np.ndarray, share: float) -> np.ndarray:
    return curvature if share == 1 else np.maximum(iv.down(curvature * share), 0)


def _add(x: Interval, y: Interval) -> Interval:
    """x + y, where many are zero."""
    if not np.any(y.low) and not np.any(y.high):
        return x
    return y if not np.any(x.low) and not np.any(x.high) else iv.add(x, y)


@eqx.filter_jit
def _foreseen(held, index, arrays):
    """How far the multipliers of a stage that reads its own block may be off: an estimate.

    `away` says how far each is off by itself; errors of a step reach the step before through the
    slopes of its bounds. Whether the estimate is good enough is found out afterwards.
    """
    y, away = arrays
    steps, size = y.shape[0], math.prod(y.shape[1:])
    floor = 2 * away + 1e-18 * jnp.max(jnp.abs(y), initial=0)
    if steps * size**2 > MOST_SLOPES:
        return floor * jnp.arange(steps, 0, -1).reshape(-1, *[1] * (y.ndim - 1))

    def own(up, down):
        return _stage(held, index, up, down)[3][-1]

    units = jnp.eye(size).reshape(size, 1, *y.shape[1:])
    units = jnp.broadcast_to(units, (size, *y.shape))
    none = jnp.zeros_like(y)
    of_lower = jnp.abs(jax.vmap(lambda e: own(e, none))(units)).reshape(size, steps, size)
    of_upper = jnp.abs(jax.vmap(lambda e: own(none, e))(units)).reshape(size, steps, size)
    y, floor = y.reshape(steps, size), floor.reshape(steps, size)
    near = 1e-6 * jnp.max(jnp.abs(y), initial=0)

    def back(later, now):
        low, high, next_y, least = now  # slopes at this step of the bounds of the next
        acts = jnp.where((next_y >= -near)[:, None], low, 0)
        acts = acts + jnp.where((next_y <= near)[:, None], high, 0)
        width = least + (1 + 1e-10) * (later @ acts)
        return width, width

    next_y = jnp.concatenate([y[1:], jnp.zeros_like(y[:1])])
    slices = (of_lower.swapaxes(0, 1), of_upper.swapaxes(0, 1), next_y, floor)
    _, widths = jax.lax.scan(back, jnp.zeros_like(y[0]), slices, reverse=True)
    return widths.reshape(none.shape)
