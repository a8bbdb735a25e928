"""The truths of the zoo, checked by evaluating its functions: no solver, neither ours nor another.

Given primal and dual solutions are proof of optimality together: the primal is feasible, and the
Lagrangian with the given multipliers is nowhere lower. The second half is checked near the solution
(where it suffices, by convexity) and far from it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES

import stagecert as sc

SAMPLES = 64


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def size_of(value):
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


def bounds_at(problem, inputs, blocks):
    """All (lower, upper) with the blocks given, feasible or not."""
    pairs = []
    for i, (stage, block) in enumerate(zip(problem.stages, blocks, strict=True)):

        def pick(t, lower, upper, block=block):
            return block if t is None else block[t]

        pairs.append(bounds(stage, inputs, blocks[:i], pick)[1:])
    return pairs


def lagrangian(problem, multipliers, inputs, blocks):
    value = problem.objective(inputs, blocks)
    for y, z, (mu, eta) in zip(
        multipliers, blocks, bounds_at(problem, inputs, blocks), strict=True
    ):
        value += jnp.sum(jnp.maximum(y, 0) * mu - jnp.maximum(-y, 0) * eta - y * z)
    return value


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


def draw(problem):
    """Random feasible points, by inductive construction: (inputs, (blocks, lowers, uppers))."""
    rng = np.random.default_rng(0)
    inputs = over_parts(lambda part: draw_inputs(rng, part), problem.inputs)
    fractions = []
    for shape in problem.block_shapes():
        theta = rng.uniform(size=(SAMPLES, *shape.shape))
        theta[1::2] = np.clip(3 * theta[1::2] - 1, 0, 1)
        theta[:2] = np.array([0, 1]).reshape(2, *(1 for _ in shape.shape))
        fractions.append(theta)
    return inputs, jax.vmap(lambda s, theta: build(problem, s, theta))(inputs, fractions)


# -- tests ----------------------------------------------------------------------------------------


def test_names_differ_and_kinds_are_covered():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 16
    assert {case.smooth for case in CASES} == {True, False}


@every_case
def test_feasible_points_are_no_better(case):
    problem = case.make()
    inputs, (blocks, lowers, uppers) = draw(problem)
    for stage, block, lower, upper in zip(problem.stages, blocks, lowers, uppers, strict=True):
        assert np.all(np.isfinite(block))
        assert np.all(lower <= upper + 1e-9)  # Assumption 3
        if stage.box is not None:
            assert np.all(stage.box[0] - 1e-9 <= block)
            assert np.all(block <= stage.box[1] + 1e-9)
    values = jax.vmap(problem.objective)(inputs, blocks)
    assert np.min(values) >= case.value - size_of(case.value)


@every_case
def test_functions_are_convex_and_concave(case):
    """At midpoints of feasible points; the objective without the curvature that it declares."""
    problem = case.make()
    inputs, (blocks, _, _) = draw(problem)
    ends = [jax.tree.map(lambda x: x[part], (inputs, blocks)) for part in (slice(32), slice(32, 64))]
    middle = jax.tree.map(lambda a, b: (a + b) / 2, *ends)
    objective = problem.objective

    def evaluate(inputs, blocks):
        value = objective(inputs, blocks)
        for points, curvature in (
            (inputs, objective.curvature_inputs),
            (blocks, objective.curvature_blocks),
        ):
            if curvature is not None:
                parts = jax.tree.map(lambda c, x: jnp.sum(c * x**2) / 2, curvature, points)
                value -= sum(jax.tree.leaves(parts))
        lowers, uppers = zip(*bounds_at(problem, inputs, blocks), strict=True)
        return value, lowers, jax.tree.map(jnp.negative, uppers)

    at_ends = [jax.vmap(evaluate)(*end) for end in ends]
    at_middle = jax.vmap(evaluate)(*middle)
    for m, a, b in zip(*map(jax.tree.leaves, (at_middle, *at_ends)), strict=True):
        assert np.all(m <= (a + b) / 2 + 1e-9 * (1 + abs(a) + abs(b)))


@every_case
def test_primal(case):
    if case.blocks is None:
        pytest.skip("not unique")
    problem = case.make()
    shapes = [shape.shape for shape in problem.block_shapes()]
    assert [block.shape for block in case.blocks] == shapes
    gaps = over_parts(outside, problem.inputs, case.inputs)
    assert max(jax.tree.leaves(gaps)) <= 1e-8
    for block, (lower, upper) in zip(
        case.blocks, bounds_at(problem, case.inputs, case.blocks), strict=True
    ):
        assert np.all(lower - 1e-8 <= block)
        assert np.all(block <= upper + 1e-8)
    assert problem.objective(case.inputs, case.blocks) == pytest.approx(case.value, rel=1e-7)


@every_case
def test_dual(case):
    if case.multipliers is None:
        pytest.skip("not unique")
    problem = case.make()
    assert [y.shape for y in case.multipliers] == [block.shape for block in case.blocks]
    for y, block, (lower, upper) in zip(
        case.multipliers, case.blocks, bounds_at(problem, case.inputs, case.blocks), strict=True
    ):
        assert np.max(np.maximum(y, 0) * (block - lower)) <= 1e-8
        assert np.max(np.maximum(-y, 0) * (upper - block)) <= 1e-8

    def value(inputs, blocks):
        return lagrangian(problem, case.multipliers, inputs, blocks)

    optimum = (case.inputs, case.blocks)
    assert value(*optimum) == pytest.approx(case.value, rel=1e-7)
    inputs, (blocks, _, _) = draw(problem)
    for step in (1, 1e-2, 1e-3):
        # Blocks may leave the feasible set, in particular to the other side of the optimum. (Not
        # far: logarithms end.)
        for side in (1, -1) if step < 1 else (1,):

            def towards(x, y, step=step):
                return x + step * (y - x)

            near_inputs = jax.tree.map(towards, case.inputs, inputs)
            near = jax.tree.map(lambda x, y: towards(x, x + side * (y - x)), case.blocks, blocks)
            assert np.min(jax.vmap(value)(near_inputs, near)) >= case.value - size_of(case.value)
