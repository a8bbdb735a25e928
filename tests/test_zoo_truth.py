"""The truths of the zoo, checked by evaluating its functions: no solver, neither ours nor another.

Given primal and dual solutions are proof of optimality together: the primal is feasible, and the
Lagrangian with the given multipliers is nowhere lower. The second half is checked near the solution
(where it suffices, by convexity) and far from it.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES

import stagecert as sc

SAMPLES = 64
STEP = 1e-5  # so small that curvature cannot hide a slope, so large that rounding does not


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def slack_of(value):
    return 1e-7 * (1 + abs(value))


# -- plain evaluation -----------------------------------------------------------------------------


def call(function, params, *arguments):
    return function(*arguments) if params is None else function(params, *arguments)


def bounds(stage, inputs, blocks, pick):
    """(block, lower, upper); pick(t, lower, upper) gives the block, or step t of it for a scan."""
    if isinstance(stage, sc.Stage):
        lower = call(stage.lower, stage.params, inputs, blocks)
        upper = call(stage.upper, stage.params, inputs, blocks)
        return pick(None, lower, upper), lower, upper
    state = stage.initial(inputs, blocks) if callable(stage.initial) else stage.initial
    feed = None if stage.feed is None else stage.feed(inputs, blocks)
    steps = []
    for t in range(stage.length):
        params_t, feed_t = jax.tree.map(lambda x: x[t], (stage.params, feed))  # noqa: B023
        lower = call(stage.lower, params_t, feed_t, state)
        upper = call(stage.upper, params_t, feed_t, state)
        state = pick(t, lower, upper)
        steps.append((state, lower, upper))
    return tuple(jnp.stack(column) for column in zip(*steps, strict=True))


def build(problem, inputs, fractions):
    """The feasible point with z = (1 - theta) mu + theta eta: (blocks, lowers, uppers)."""
    blocks, lowers, uppers = (), (), ()
    for stage, theta in zip(problem.stages, fractions, strict=True):

        def pick(t, lower, upper, theta=theta):
            share = theta if t is None else theta[t]
            return (1 - share) * lower + share * upper

        block, lower, upper = bounds(stage, inputs, blocks, pick)
        blocks, lowers, uppers = (*blocks, block), (*lowers, lower), (*uppers, upper)
    return blocks, lowers, uppers


class Evaluator:
    """The functions of a case, compiled once for a batch of SAMPLES points; NumPy in, NumPy out."""

    def __init__(self, case):
        self.problem = case.make()
        self.shapes = [shape.shape for shape in self.problem.block_shapes()]
        self._build = jax.jit(jax.vmap(lambda s, theta: build(self.problem, s, theta)))
        self._evaluate = jax.jit(jax.vmap(self._one))

    def _one(self, inputs, blocks):
        pairs = []
        for i, (stage, block) in enumerate(zip(self.problem.stages, blocks, strict=True)):

            def pick(t, lower, upper, block=block):
                return block if t is None else block[t]

            pairs.append(bounds(stage, inputs, blocks[:i], pick)[1:])
        return self.problem.objective(inputs, blocks), *zip(*pairs, strict=True)

    def build(self, inputs, fractions):
        """(blocks, lowers, uppers) of feasible points."""
        return jax.tree.map(np.asarray, self._build(inputs, fractions))

    def __call__(self, inputs, blocks):
        """(values, lowers, uppers) with the blocks given, feasible or not."""
        return jax.tree.map(np.asarray, self._evaluate(inputs, blocks))

    def one(self, inputs, blocks):
        """The same at a single point."""
        return jax.tree.map(lambda x: x[0], self(*self.repeat(inputs, blocks)))

    def repeat(self, inputs, blocks):
        """A batch of one point."""
        return jax.tree.map(lambda x: np.broadcast_to(x, (SAMPLES, *x.shape)), (inputs, blocks))


evaluator = lru_cache(Evaluator)


def total(x):
    """The sum over all but the batch."""
    return x.reshape(len(x), -1).sum(axis=1)


# -- sets, by NumPy -------------------------------------------------------------------------------


def is_set(x):
    return isinstance(x, (sc.Box, sc.Ball, sc.Simplex, sc.Product))


def over_parts(function, inputs, *trees):
    """Applies a function to a set, or to every part of a product."""
    if isinstance(inputs, sc.Product):
        return jax.tree.map(function, inputs.parts, *trees, is_leaf=is_set)
    return function(inputs, *trees)


def outside(part, x):
    """By how much x leaves a set."""
    if isinstance(part, sc.Box):
        return max(np.max(part.lower - x), np.max(x - part.upper))
    if isinstance(part, sc.Ball):
        return np.linalg.norm(x - part.middle) - part.radius
    return max(np.max(-x), abs(x.sum() - part.total))


def draw_inputs(rng, part):
    """Points of a set: its interior, and its corners, which optima like."""
    if isinstance(part, sc.Box):
        lower, upper = np.asarray(part.lower), np.asarray(part.upper)
        t = rng.uniform(size=(SAMPLES, *lower.shape))
        t[::2] = np.clip(2 * t[::2] - 0.5, 0, 1)
        return (1 - t) * lower + t * upper
    if isinstance(part, sc.Ball):
        direction = rng.normal(size=(SAMPLES, *part.middle.shape))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        length = np.minimum(1, 2 * rng.uniform(size=(SAMPLES, 1)))
        return part.middle + part.radius * length * direction
    return part.total * rng.dirichlet(0.5 * np.ones(part.size), size=SAMPLES)


def extreme_points(part):
    """Points of a set in the direction of each of its entries."""
    if isinstance(part, sc.Simplex):
        return list(part.total * np.eye(part.size))
    if isinstance(part, sc.Ball):
        radii = part.radius * np.eye(part.middle.size)
        return [*(part.middle + radii), *(part.middle - radii)]
    return None


def single_moves(problem, inputs, blocks):
    """Points that differ from a given one in one entry, or (inputs that must stay in their set) by
    a small move towards an extreme point.
    """
    leaves, structure = jax.tree.flatten((inputs, blocks))
    is_product = isinstance(problem.inputs, sc.Product)
    parts = (
        jax.tree.leaves(problem.inputs.parts, is_leaf=is_set) if is_product else [problem.inputs]
    )
    out = []
    for i, x in enumerate(leaves):
        part = parts[i] if i < len(parts) else None
        targets = extreme_points(part)
        if targets is not None:
            moved = [x + STEP * (target - x) for target in targets]
        else:
            units = STEP * np.eye(x.size).reshape(x.size, *x.shape)
            moved = [*(x + units), *(x - units)]
        if isinstance(part, sc.Box):
            moved = [np.clip(y, part.lower, part.upper) for y in moved]
        out += [structure.unflatten([*leaves[:i], y, *leaves[i + 1 :]]) for y in moved]
    return out


@lru_cache
def draw(case):
    """Random feasible points, by inductive construction: (inputs, (blocks, lowers, uppers))."""
    at = evaluator(case)
    rng = np.random.default_rng(0)
    inputs = over_parts(lambda part: draw_inputs(rng, part), at.problem.inputs)
    fractions = []
    for shape in at.shapes:
        theta = rng.uniform(size=(SAMPLES, *shape))
        theta[1::2] = np.clip(3 * theta[1::2] - 1, 0, 1)
        theta[0], theta[1] = 0, 1
        fractions.append(theta)
    return inputs, at.build(inputs, fractions)


# -- tests ----------------------------------------------------------------------------------------


def test_names_differ_and_kinds_are_covered():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 16
    assert {case.smooth for case in CASES} == {True, False}


@every_case
def test_feasible_points_are_no_better(case):
    at = evaluator(case)
    inputs, (blocks, lowers, uppers) = draw(case)
    for stage, block, lower, upper in zip(at.problem.stages, blocks, lowers, uppers, strict=True):
        assert np.all(np.isfinite(block))
        assert np.all(lower <= upper + 1e-9)  # Assumption 3
        if stage.box is not None:
            assert np.all(stage.box[0] - 1e-9 <= block)
            assert np.all(block <= stage.box[1] + 1e-9)
    values, _, _ = at(inputs, blocks)
    assert np.min(values) >= case.value - slack_of(case.value)


@every_case
def test_functions_are_convex_and_concave(case):
    """At midpoints of feasible points; the objective without the curvature that it declares."""
    at = evaluator(case)
    inputs, (blocks, _, _) = draw(case)
    objective = at.problem.objective

    def evaluate(inputs, blocks):
        value, lowers, uppers = at(inputs, blocks)
        for points, curvature in (
            (inputs, objective.curvature_inputs),
            (blocks, objective.curvature_blocks),
        ):
            if curvature is not None:
                parts = jax.tree.map(lambda c, x: total(c * x**2) / 2, curvature, points)
                value = value - sum(jax.tree.leaves(parts))
        return value, lowers, jax.tree.map(np.negative, uppers)

    first = (inputs, blocks)
    second = jax.tree.map(lambda x: np.roll(x, 1, axis=0), first)
    middle = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    leaves = [jax.tree.leaves(evaluate(*points)) for points in (first, second, middle)]
    for a, b, m in zip(*leaves, strict=True):
        assert np.all(m <= (a + b) / 2 + 1e-9 * (1 + abs(a) + abs(b)))


@every_case
def test_primal(case):
    if case.blocks is None:
        pytest.skip("not unique")
    at = evaluator(case)
    assert [block.shape for block in case.blocks] == at.shapes
    gaps = over_parts(outside, at.problem.inputs, case.inputs)
    assert max(jax.tree.leaves(gaps)) <= 1e-8
    value, lowers, uppers = at.one(case.inputs, case.blocks)
    for block, lower, upper in zip(case.blocks, lowers, uppers, strict=True):
        assert np.all(lower - 1e-8 <= block)
        assert np.all(block <= upper + 1e-8)
    assert value == pytest.approx(case.value, rel=1e-7)


@every_case
def test_dual(case):
    if case.multipliers is None:
        pytest.skip("not unique")
    at = evaluator(case)
    assert [y.shape for y in case.multipliers] == at.shapes
    _, lowers, uppers = at.one(case.inputs, case.blocks)
    for y, block, lower, upper in zip(case.multipliers, case.blocks, lowers, uppers, strict=True):
        assert np.all((y < 1e-6) | (block <= lower + 1e-6))
        assert np.all((y > -1e-6) | (block >= upper - 1e-6))

    def lagrangian(inputs, blocks):
        value, lowers, uppers = at(inputs, blocks)
        for y, z, mu, eta in zip(case.multipliers, blocks, lowers, uppers, strict=True):
            value = value + total(np.maximum(y, 0) * mu - np.maximum(-y, 0) * eta - y * z)
        return value

    inputs, (blocks, _, _) = draw(case)
    least = case.value - slack_of(case.value)
    assert np.min(lagrangian(inputs, blocks)) >= least
    # The blocks may leave the feasible set, in particular to the other side of the optimum. (Not
    # far: logarithms end.)
    for step in (0.01, -0.01):

        def towards(x, y, step=step):
            return x + step * (y - x)

        near_inputs = jax.tree.map(lambda x, y: towards(x, y, 0.01), case.inputs, inputs)
        near_blocks = jax.tree.map(towards, case.blocks, blocks)
        assert np.min(lagrangian(near_inputs, near_blocks)) >= least
    # One entry at a time, a wrong multiplier cannot hide: it is the slope of that entry.
    at_optimum = lagrangian(*at.repeat(case.inputs, case.blocks))[0]
    assert at_optimum == pytest.approx(case.value, rel=1e-7)
    moved = single_moves(at.problem, case.inputs, case.blocks)
    for start in range(0, len(moved), SAMPLES):
        batch = moved[start : start + SAMPLES]
        batch += [(case.inputs, case.blocks)] * (SAMPLES - len(batch))
        values = lagrangian(*jax.tree.map(lambda *x: np.stack(x), *batch))
        assert np.min(values) >= at_optimum - 1e-5 * STEP
