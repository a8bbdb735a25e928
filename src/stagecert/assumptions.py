"""What `solve` finds out about the assumptions behind its bound.

First a proof by composition rules (stagecert.curvature), for all numbers that the parameters could
be, and if that fails for the numbers at hand. What is not proven is probed along a few random
segments, as `check` does, once for all problems of one shape; a witness is an error.

The same walk tells whether slopes may be infinite at the border of the inputs' set.
"""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.batch import lane_of
from stagecert.check import JENSEN, Violation, confirmed_violations
from stagecert.curvature import (
    CONCAVE,
    CONVEX,
    Known,
    Walk,
    constant,
    parameter,
    unknown,
    variable,
)
from stagecert.errors import ProblemError
from stagecert.evidence import Assumptions, Evidence
from stagecert.problem import Problem, ScanStage, as_arrays
from stagecert.sets import AbstractSet, Product, Simplex

PROBES = 32  # segments, for each of a few problems of a batch
KEPT = 128  # shapes, and sets of numbers of each shape, that are remembered


@dataclass(frozen=True)
class Examined:
    """What is known about a problem: its assumptions, and whether it is steep at the border."""

    assumptions: Assumptions
    steep: bool
    gentle: bool = False  # not steep, whatever the numbers


@dataclass
class _Shape:
    """What is remembered about all problems with the same functions and shapes."""

    traced: list
    for_all_numbers: Examined | None = None  # where no number could change the answer
    sampled: bool = False
    # Which arrays' numbers the proof looks at; None while nothing is proven by them.
    looked_at: tuple[bool, ...] | None = None
    by_numbers: OrderedDict = field(default_factory=OrderedDict)


_shapes: OrderedDict = OrderedDict()
_lock = threading.Lock()


def examine(problem: Problem, axes=None, check: bool = True) -> Examined:
    """What is known about a problem, or a batch of them; ProblemError if something is refuted.

    Without `check` the assumptions are not looked at.
    """
    key = (check, key_of(problem, axes))
    with _lock:
        shape = _shapes.get(key)
        if shape is not None:
            _shapes.move_to_end(key)
    if shape is not None and shape.for_all_numbers is not None:
        return shape.for_all_numbers
    if shape is not None:
        found = shape.by_numbers.get(_digest(problem, shape.looked_at))
        if found is not None:
            return found
    with jax.enable_x64(True):
        arrays = as_arrays(problem, jnp.float64)
        if shape is None:
            shape = _Shape(traced_functions(lane_of(arrays, axes, 0)))
        found = _examined(arrays, axes, shape, check)
    with _lock:
        _shapes[key] = shape
        if shape.for_all_numbers is None:
            shape.by_numbers[_digest(problem, shape.looked_at)] = found
        for held in (_shapes, shape.by_numbers):
            while len(held) > KEPT:
                held.popitem(last=False)
    return found


def key_of(problem, axes):
    """Functions by identity, arrays by shape, whole numbers by value (functions index by them)."""
    leaves, structure = jax.tree.flatten(problem)
    return structure, tuple(map(_kind, leaves)), jax.tree.structure(axes)


def _kind(leaf):
    if isinstance(leaf, float):
        return float
    if not hasattr(leaf, "dtype"):
        return leaf
    array = np.asarray(leaf) if not jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    kind = (array.shape, str(array.dtype))
    return kind if array is leaf and array.dtype.kind == "f" else (*kind, array.tobytes())


def _digest(problem, looked_at: tuple[bool, ...] | None) -> tuple:
    """The numbers of the arrays that a proof looks at, or of all of them."""
    leaves = [x for x in jax.tree.leaves(problem) if isinstance(x, float) or hasattr(x, "dtype")]
    if looked_at is not None:
        leaves = [x for x, seen in zip(leaves, looked_at, strict=True) if seen]
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).data)
    return looked_at, digest.digest()


def _examined(problem: Problem, axes, shape: _Shape, check: bool) -> Examined:
    count = len(jax.tree.leaves(eqx.filter(problem, eqx.is_array)))
    none, every = (False,) * count, (True,) * count
    if not shape.by_numbers:
        found = _proven(problem, axes, shape.traced, none)
        if _settled(found) or (found.gentle and not check):
            shape.for_all_numbers = found if check else Examined(_unchecked(problem), False)
            return shape.for_all_numbers
    if shape.looked_at is not None:
        found = _proven(problem, axes, shape.traced, shape.looked_at)
        if _settled(found):
            return found
        # These numbers need another proof, or have none.
        shape.looked_at = None
    found = _proven(problem, axes, shape.traced, every)
    if not check:
        return Examined(_unchecked(problem), found.steep)
    if _settled(found):
        shape.looked_at = _looked_at(problem, axes, shape.traced, count)
    if found.assumptions.weakest is not Evidence.PROVEN and not shape.sampled:
        _probe(problem, axes, found.assumptions)
        shape.sampled = True
    return Examined(_after_sampling(found.assumptions), found.steep)


def _settled(found: Examined) -> bool:
    return found.gentle and found.assumptions.weakest is Evidence.PROVEN


def _looked_at(problem: Problem, axes, traced, count: int) -> tuple[bool, ...]:
    """The arrays whose numbers a proof needs: all but those that it can do without, one by one.

    So a plan from another initial state, or with other prices, is not looked at again.
    """
    of_set = len(jax.tree.leaves(eqx.filter(problem.inputs, eqx.is_array)))
    needed = [True] * count
    groups = [range(of_set), *([k] for k in range(of_set, min(count, 64)))]
    for group in groups:
        trial = [held and k not in group for k, held in enumerate(needed)]
        if _settled(_proven(problem, axes, traced, tuple(trial))):
            needed = trial
    return tuple(needed)


def _unchecked(problem: Problem) -> Assumptions:
    stages, sides = len(problem.stages), len(problem.constraints)
    return Assumptions.unchecked(stages, _declares_curvature(problem), sides)


def _declares_curvature(problem: Problem) -> bool:
    objective = problem.objective
    return bool(jax.tree.leaves((objective.curvature_inputs, objective.curvature_blocks)))


# -- proofs ----------------------------------------------------------------------------------------


def traced_functions(problem: Problem) -> list:
    """The bounds of each stage, the constraints, and then the objective.

    They are jaxprs of (arrays, inputs, blocks).
    """
    arrays, static = eqx.partition(problem, eqx.is_array)
    inputs = jax.eval_shape(problem.inputs.centre)
    shapes = problem.block_shapes()
    traced = []
    for index in range(len(problem.stages)):

        def bounds(arrays, inputs, blocks, index=index):
            stage = eqx.combine(arrays, static).stages[index]
            return stage.bounds(inputs, blocks[:index], blocks[index])[:2]

        traced.append(jax.make_jaxpr(bounds)(arrays, inputs, shapes))

    for index in range(len(problem.constraints)):

        def constraint(arrays, inputs, blocks, index=index):
            return eqx.combine(arrays, static).constraints[index](inputs, blocks)

        traced.append(jax.make_jaxpr(constraint)(arrays, inputs, shapes))

    def objective(arrays, inputs, blocks):
        return jnp.asarray(eqx.combine(arrays, static).objective(inputs, blocks))

    traced.append(jax.make_jaxpr(objective)(arrays, inputs, shapes))
    return traced


def _proven(problem: Problem, axes, traced, numbers: tuple[bool, ...]) -> Examined:
    """What the rules prove, for any numbers in those arrays that `numbers` does not mark.

    The arrays of the inputs' set come first; they count only all together.
    """
    lane = lane_of(problem, axes, 0)
    parameters = _parameters(problem, axes, numbers)
    of_set = len(jax.tree.leaves(eqx.filter(problem.inputs, eqx.is_array)))
    inputs = _ranges(problem, axes, all(numbers[:of_set]))
    blocks = [variable(np.full(s.shape, -np.inf), np.inf) for s in lane.block_shapes()]
    walker = Walk()
    evidence: dict[str, list[Evidence]] = {"lower": [], "upper": []}
    for index, stage in enumerate(lane.stages):
        lower, upper = _bounds(walker, stage, index, traced[index], parameters, inputs, blocks)
        evidence["lower"].append(_evidence(lower, CONVEX))
        evidence["upper"].append(_evidence(upper, CONCAVE))
        lo, hi = np.minimum(lower.lo, upper.lo), np.maximum(lower.hi, upper.hi)
        blocks[index] = variable(np.broadcast_to(lo, blocks[index].shape), hi)
    known = [*parameters, *inputs, *blocks]
    sides = [_followed(walker, closed, known)[0] for closed in traced[len(lane.stages) : -1]]
    (value,) = _followed(walker, traced[-1], known)
    assumptions = Assumptions(
        _evidence(value, CONVEX),
        tuple(evidence["lower"]),
        tuple(evidence["upper"]),
        _declared(problem, axes, numbers, value, inputs, blocks),
        tuple(_evidence(g, CONVEX) for g in sides),
    )
    return Examined(assumptions, walker.steep, walker.gentle)


def _declared(problem: Problem, axes, numbers, value: Known, inputs, blocks):
    """What is known of the declared curvature: that squares of single variables add up to it."""
    if not _declares_curvature(problem):
        return None
    marks = jax.tree.unflatten(jax.tree.structure(eqx.filter(problem, eqx.is_array)), numbers)
    seen = jax.tree.leaves((marks.objective.curvature_inputs, marks.objective.curvature_blocks))
    if not all(seen) or value.bend is None or not value.has(CONVEX).all():
        return Evidence.UNCHECKED
    lanes = range(1 if axes is None else _size(problem, axes))
    for index in lanes:
        objective = lane_of(problem, axes, index).objective
        of_inputs, of_blocks = objective.curvature_inputs, objective.curvature_blocks
        given = [] if of_inputs is None else jax.tree.leaves(of_inputs)
        pairs = [*zip(inputs, given, strict=False)]
        pairs += [*zip(blocks, of_blocks or (), strict=False)]
        for held, declared in pairs:
            # What rounding adds to the sum of weights is in the bound's own allowance.
            most = value.bend.of(held.slope.who) * (1 + 4 * np.finfo(float).eps)
            if (np.asarray(declared, float) > most).any():
                return Evidence.UNCHECKED
    return Evidence.PROVEN


def _followed(walker: Walk, closed, arguments: list[Known]) -> list[Known]:
    try:
        return walker.follow(closed, arguments)
    except Exception:
        # A primitive used in a way that no rule foresaw proves nothing, and is no reason not to
        # solve. Staying off the border is never wrong.
        walker.steep, walker.gentle = True, False
        return [unknown(v.shape) for v in closed.out_avals]


def _bounds(walker: Walk, stage, index, traced, parameters, inputs, blocks):
    """(lower, upper) of a stage."""
    if isinstance(stage, ScanStage):
        # By induction: if states that are not negative lead to no others, there are no others.
        states = variable(np.zeros(blocks[index].shape), np.inf)
        guess = [*blocks[:index], states, *blocks[index + 1 :]]
        trial = Walk()
        lower, upper = _followed(trial, traced, [*parameters, *inputs, *guess])
        if (lower.lo >= 0).all() and (upper.lo >= 0).all():
            walker.steep = walker.steep or trial.steep
            walker.gentle = walker.gentle and trial.gentle
            return lower, upper
    return _followed(walker, traced, [*parameters, *inputs, *blocks])


def _evidence(value: Known, wanted: int) -> Evidence:
    return Evidence.PROVEN if value.has(wanted).all() else Evidence.UNCHECKED


def _parameters(problem: Problem, axes, numbers: tuple[bool, ...]) -> list[Known]:
    """The problem's own arrays: whole numbers as they are, others by their ends over a batch."""
    arrays = eqx.filter(problem, eqx.is_array)
    if axes is None:
        stacked = jax.tree.map(lambda _: False, arrays)
    else:  # functions are leaves of `axes`, but no arrays
        stacked = jax.tree.map(
            lambda axis, x: None if x is None else axis is not None,
            axes,
            arrays,
            is_leaf=lambda a: a is None,
        )
    out = []
    for leaf, many, seen in zip(*map(jax.tree.leaves, (arrays, stacked)), numbers, strict=True):
        array = np.asarray(leaf)
        ends = (array.min(axis=0), array.max(axis=0)) if many else (array, array)
        if not seen and np.issubdtype(array.dtype, np.floating):
            out.append(parameter(np.full(ends[0].shape, -np.inf), np.inf))
        else:
            out.append(constant(array) if not many else parameter(*ends))
    return out


def _ranges(problem: Problem, axes, numbers: bool) -> list[Known]:
    """The inputs, between the ends of their set."""
    if not numbers:
        lane = lane_of(problem, axes, 0).inputs
        shapes = jax.tree.leaves(jax.eval_shape(lane.centre))
        lowest = _lowest(lane, len(shapes))
        return [variable(np.full(s.shape, l), np.inf) for s, l in zip(shapes, lowest, strict=True)]
    lanes = range(1 if axes is None else _size(problem, axes))
    pairs = [lane_of(problem, axes, index).inputs.ends() for index in lanes]
    low, high = ([jax.tree.leaves(p[k]) for p in pairs] for k in (0, 1))
    return [
        variable(np.min(a, axis=0), np.max(b, axis=0))
        for a, b in zip(zip(*low, strict=True), zip(*high, strict=True), strict=True)
    ]


def _lowest(inputs, leaves: int) -> list[float]:
    """What the entries of a point cannot be below, whatever the set's numbers are."""
    if isinstance(inputs, Simplex):
        return [0.0]
    if isinstance(inputs, Product):
        parts = jax.tree.leaves(inputs.parts, is_leaf=lambda x: isinstance(x, AbstractSet))
        counts = [len(jax.tree.leaves(jax.eval_shape(part.centre))) for part in parts]
        return [x for part, n in zip(parts, counts, strict=True) for x in _lowest(part, n)]
    return [-np.inf] * leaves


# -- probes ----------------------------------------------------------------------------------------


def _after_sampling(found: Assumptions) -> Assumptions:
    def sampled(evidence):
        return Evidence.SAMPLED if evidence is Evidence.UNCHECKED else evidence

    return replace(
        found,
        objective=sampled(found.objective),
        lower=tuple(map(sampled, found.lower)),
        upper=tuple(map(sampled, found.upper)),
        curvature=None if found.curvature is None else sampled(found.curvature),
        constraints=tuple(map(sampled, found.constraints)),
    )


def _probe(problem: Problem, axes, found: Assumptions) -> None:
    """Raises ProblemError if a random segment refutes what was not proven."""
    size = 1 if axes is None else _size(problem, axes)
    for index in sorted({0, size // 3, 2 * size // 3, size - 1}):
        lane = lane_of(problem, axes, index)
        for violation in confirmed_violations(lane, PROBES, seed=index):
            if not _is_proven(problem, found, violation):
                where = "" if axes is None else f"Problem {index} of the batch: "
                raise ProblemError(where + _sentence(violation))


def _size(problem, axes) -> int:
    arrays = eqx.filter(problem, eqx.is_array)
    stacked = jax.tree.map(
        lambda axis, x: None if axis is None else x, axes, arrays, is_leaf=lambda a: a is None
    )
    return jax.tree.leaves(stacked)[0].shape[0]


def _is_proven(problem: Problem, found: Assumptions, violation: Violation) -> bool:
    """Whether the rules prove what a probe seems to refute: then it is rounding."""
    names = [problem.stage_name(i) for i in range(len(problem.stages))]
    if violation.kind in ("objective not convex", "curvature overstated"):
        held: Any = found.objective if violation.kind == "objective not convex" else found.curvature
        return held is Evidence.PROVEN
    if violation.kind == "constraint not convex":
        sides = [problem.constraint_name(k) for k in range(len(problem.constraints))]
        return found.constraints[sides.index(violation.where)] is Evidence.PROVEN
    index = names.index(violation.where)
    both = {"lower not convex": (found.lower,), "upper not concave": (found.upper,)}
    sides = both.get(violation.kind, (found.lower, found.upper))
    return all(side[index] is Evidence.PROVEN for side in sides)


def _sentence(violation: Violation) -> str:
    (a, b) = violation.witness
    points = " and ".join(_shown(p) for p in (a, b))
    return (
        f"{violation.where}: {JENSEN[violation.kind]}. At the middle of the segment between "
        f"{points} the inequality fails at entry {violation.entry} by {violation.amount:.3g}, "
        "so no lower bound would be valid. Mend the function (stagecert.check shows more), or pass "
        "check=False to go on at your own risk."
    )


def _shown(point) -> str:
    inputs, blocks = point

    def text(tree) -> str:
        arrays = [
            np.array2string(np.asarray(x), precision=4, threshold=8, edgeitems=2, separator=", ")
            for x in jax.tree.leaves(tree)
        ]
        return ", ".join(" ".join(a.split()) for a in arrays)

    return (
        f"(inputs {text(inputs)}; blocks {text(blocks)})" if blocks else f"(inputs {text(inputs)})"
    )
