"""check(problem): looks for points where the assumptions fail, and shows them.

A certificate is only as good as the assumptions: f, side constraints and the lower functions
convex, the upper functions concave, bounds in order wherever earlier stages can lead. Sampling
cannot prove them; it can refute them.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import tree
from stagecert.errors import ProblemError
from stagecert.problem import Problem, ScanStage, as_arrays
from stagecert.reformulation import Point, forward_pass
from stagecert.validate import validate

# Kinds that make a bound wrong, and not just a search hard: those that a segment shows.
JENSEN = {
    "lower not convex": "the lower bound is not convex",
    "upper not concave": "the upper bound is not concave",
    "objective not convex": "it is not convex",
    "constraint not convex": "it is not convex",
    "curvature overstated": "it is not convex, or less curved than was declared",
    "initial or feed not affine": "initial or feed is not affine",
}


@dataclass(frozen=True)
class Violation:
    """One assumption that fails, with the points that show it.

    Attributes:
        kind: "lower not convex", "upper not concave", "bounds crossed", "objective not convex",
            "constraint not convex", "curvature overstated", "initial or feed not affine", "box too
            small" or "not finite".
        where: the stage, the constraint, or "The objective".
        entry: index into the flattened block or values; 0 for the objective.
        amount: by how much the inequality fails.
        witness: two points (inputs, blocks). Where bounds cross or a box is too small, the first
            shows it; otherwise the middle of the segment between them does.
    """

    kind: str
    where: str
    entry: int
    amount: float
    witness: tuple

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} at entry {self.entry}, by {self.amount:.3g}."


@dataclass(frozen=True)
class Findings:
    """What `check` found; true if nothing."""

    violations: tuple[Violation, ...]
    samples: int

    def __bool__(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        if not self.violations:
            return f"No violation found in {self.samples} samples (which is no proof)."
        return "\n".join(str(v) for v in self.violations)


def check(problem: Problem, samples: int = 256, seed: int = 0, tolerance: float = 1e-7) -> Findings:
    """Probes convexity, concavity, order and curvature by sampling points that stages allow.

    Args:
        problem: what to probe.
        samples: how many pairs of points.
        seed: of the random points.
        tolerance: failures up to this size, relative to the numbers at hand, are taken as rounding.

    Returns:
        Findings: false if anything failed, with the worst witness of each kind and place.

    >>> import stagecert as sc
    >>> wrong = sc.Problem(
    ...     sc.Box(-1.0, 1.0),
    ...     (sc.Stage(lambda s, z: -(s**2), lambda s, z: 1 - s),),
    ...     lambda s, z: z[0],
    ... )
    >>> print(sc.check(wrong).violations[0].kind)
    lower not convex
    """
    validate(problem)
    if not isinstance(samples, int) or samples < 1:
        raise ProblemError(f"samples must be a positive whole number, not {samples!r}.")
    return Findings(_violations(problem, samples, seed, tolerance), samples)


def _violations(problem: Problem, samples: int, seed: int, tolerance: float) -> tuple:
    with jax.enable_x64(True):
        arrays = as_arrays(problem, jnp.float64)
        keys = jax.random.split(jax.random.key(seed), samples)
        rows, witnesses = _probe(arrays, keys, jnp.asarray(tolerance))
        rows, witnesses = jax.tree.map(np.asarray, (rows, witnesses))
    violations = []
    for (kind, where), (excess, entry) in _named(problem, rows):
        worst = int(np.argmax(excess))
        if excess[worst] > 0:
            kind = kind if np.isfinite(excess[worst]) else "not finite"
            witness = jax.tree.map(lambda x, k=worst: x[k], witnesses)
            violations.append(
                Violation(kind, where, int(entry[worst]), float(excess[worst]), witness)
            )
    return tuple(violations)


def confirmed_violations(problem: Problem, samples: int, seed: int = 0) -> tuple[Violation, ...]:
    """Violations of Jensen's inequality that a few segments show, beyond doubt of rounding.

    A violation counts only if it persists, on most of the segment, when the ends are drawn in a
    little: what rounding does changes its sign from point to point. Where bounds cross, a point is
    not feasible, and functions need not be convex there.
    """
    found = _violations(problem, samples, seed, 1e-7)
    kept = [v for v in found if v.kind in JENSEN]
    if not kept:
        return ()
    with jax.enable_x64(True):
        arrays = as_arrays(problem, jnp.float64)
        shares = jnp.linspace(0.001, 0.05, 25)
        return tuple(v for v in kept if _persists(problem, arrays, v, shares))


def _persists(problem: Problem, arrays: Problem, violation: Violation, shares) -> bool:
    excess: dict = {}
    for one, other in (violation.witness, violation.witness[::-1]):
        rows = _probe_shorter(arrays, one, other, shares, jnp.asarray(1e-7))
        for place, (amounts, _) in _named(problem, rows):
            excess[place] = np.maximum(np.asarray(amounts), excess.get(place, 0.0))
    crossed = any((x > 0).any() for (kind, _), x in excess.items() if kind == "bounds crossed")
    amounts = excess[violation.kind, violation.where]
    return not crossed and bool(((amounts >= 0.5 * violation.amount) & (amounts < np.inf)).all())


def _named(problem: Problem, rows):
    stages, sides, objective = rows
    for index, found in enumerate(stages):
        for kind, row in found.items():
            yield (kind, problem.stage_name(index)), row
    for index, row in enumerate(sides):
        yield ("constraint not convex", problem.constraint_name(index)), row
    for kind, row in objective.items():
        yield (kind, "The objective"), row


@eqx.filter_jit
def _probe_shorter(problem: Problem, a, b, shares, tolerance):
    """The rows of segments whose ends are drawn in by some shares."""

    def one(share):
        ends = tree.between(a, b, share), tree.between(a, b, 1 - share)
        return _segment(problem, *ends, tolerance)[0]

    return jax.vmap(one)(shares)


@eqx.filter_jit
def _probe(problem: Problem, keys, tolerance):
    return jax.vmap(lambda key: _probe_pair(problem, key, tolerance))(keys)


def _random_point(problem: Problem, key) -> tuple[Any, tuple]:
    """A feasible point: half of the fractions at random corners, where trouble is likeliest."""
    inputs_key, *keys = jax.random.split(key, 1 + 3 * len(problem.stages))
    fractions = ()
    for i, shape in enumerate(problem.block_shapes()):
        at_corner, corner, inner = keys[3 * i : 3 * i + 3]
        fractions = (
            *fractions,
            jnp.where(
                jax.random.bernoulli(at_corner, 0.5, shape.shape),
                jax.random.bernoulli(corner, 0.5, shape.shape).astype(shape.dtype),
                jax.random.uniform(inner, shape.shape, shape.dtype),
            ),
        )
    inputs = problem.inputs.sample(inputs_key)
    return inputs, forward_pass(problem, Point(inputs, fractions)).blocks


def _excess(amount, size, tolerance):
    """(how much the worst entry fails by, which entry): 0 if nothing fails, inf for NaN."""
    amount, size = jnp.ravel(amount), jnp.ravel(jnp.broadcast_to(size, jnp.shape(amount)))
    floor = 1e-12 * (1 + jnp.max(size, initial=0))  # what rounding alone may do
    fails = jnp.where(amount > tolerance * size + floor, amount, 0)
    fails = jnp.where(jnp.isnan(amount), jnp.inf, fails)
    if fails.size == 0:
        return jnp.zeros(()), jnp.array(0)
    return jnp.max(fails), jnp.argmax(fails)


def _probe_pair(problem: Problem, key, tolerance):
    """One random segment between feasible points: its ends, its middle."""
    first_key, second_key = jax.random.split(key)
    a, b = _random_point(problem, first_key), _random_point(problem, second_key)
    return _segment(problem, a, b, tolerance)


def _segment(problem: Problem, a, b, tolerance):
    """The inequalities at the middle of a segment: (rows of its parts), its ends."""
    middle: tuple[Any, tuple] = tree.between(a, b, 0.5)
    stages = []
    for i, stage in enumerate(problem.stages):
        ends = [stage.bounds(p[0], p[1][:i], p[1][i]) for p in (a, b)]
        lower, upper, _ = stage.bounds(middle[0], middle[1][:i], middle[1][i])
        size = sum(jnp.abs(x) for end in ends for x in end[:2])
        found = {
            "lower not convex": _excess(lower - 0.5 * (ends[0][0] + ends[1][0]), size, tolerance),
            "upper not concave": _excess(0.5 * (ends[0][1] + ends[1][1]) - upper, size, tolerance),
            "bounds crossed": _excess(ends[0][0] - ends[0][1], size, tolerance),
        }
        if stage.box is not None:
            lowest, highest = stage.box
            outside = jnp.maximum(lowest - a[1][i], a[1][i] - highest)
            found["box too small"] = _excess(outside, size, tolerance)
        if isinstance(stage, ScanStage):
            found["initial or feed not affine"] = _affine_excess(stage, i, a, b, middle, tolerance)
        stages.append(found)
    sides = []
    for constraint in problem.constraints:
        one, other, between = (constraint(*p) for p in (a, b, middle))
        size = jnp.abs(one) + jnp.abs(other)
        sides.append(_excess(between - 0.5 * (one + other), size, tolerance))
    values = [problem.objective(*p) for p in (a, b)]
    bend = 0.5 * (values[0] + values[1]) - problem.objective(*middle)
    size = jnp.abs(values[0]) + jnp.abs(values[1])
    objective = {"objective not convex": _excess(-bend, size, tolerance)}
    declared = _declared_bend(problem, a, b)
    if declared is not None:
        objective["curvature overstated"] = _excess(declared - bend, size, tolerance)
    return (stages, sides, objective), (a, b)


def _affine_excess(stage: ScanStage, index, a, b, middle, tolerance):
    starts = [jax.tree.leaves(stage._start(p[0], p[1][:index])) for p in (a, b, middle)]
    excesses = [
        _excess(jnp.abs(m - 0.5 * (x + y)), jnp.abs(x) + jnp.abs(y), tolerance)
        for x, y, m in zip(*starts, strict=True)
    ]
    worst = jnp.argmax(jnp.stack([amount for amount, _ in excesses]))
    amounts, entries = zip(*excesses, strict=True)
    return jnp.stack(amounts)[worst], jnp.stack(entries)[worst]


def _declared_bend(problem: Problem, a, b):
    """How much the declared curvature says that the objective's middle lies below its chord."""
    objective = problem.objective
    if objective.curvature_inputs is None and objective.curvature_blocks is None:
        return None
    bend = jnp.zeros(())
    if objective.curvature_inputs is not None:
        terms = jax.tree.map(
            lambda c, x, y: jnp.sum(c * (x - y) ** 2), objective.curvature_inputs, a[0], b[0]
        )
        bend = bend + jax.tree.reduce(jnp.add, terms)
    for c, x, y in zip(objective.curvature_blocks or (), a[1], b[1], strict=False):
        bend = bend + jnp.sum(c * (x - y) ** 2)
    return bend / 8
