"""Problems and network bound problems as CVXPY problems, for any of its solvers.

Needs the extra `cvxpy` (and a solver; CVXPY brings some).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

try:
    import cvxpy as cp
    import scipy.sparse as sparse
except ImportError as error:
    raise ImportError(
        "Exporting needs CVXPY and SciPy: install stagecert[cvxpy], or cvxpy itself."
    ) from error
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.interop.translate import Affine, Translator, Value, matrix_of
from stagecert.networks.activations import hulls
from stagecert.networks.activations.kinked import ReluWedge
from stagecert.networks.activations.maxima import MaxWedge
from stagecert.networks.activations.products import ProductWedge
from stagecert.networks.activations.wedges import HullWedge
from stagecert.networks.bounding.intermediate import Intermediate, enclose
from stagecert.networks.bounding.jobs import objective_rows
from stagecert.networks.bounding.relaxation import Layer, Segment, Split, split
from stagecert.networks.graph import Network
from stagecert.networks.operations import Activation
from stagecert.networks.regions import regions_of
from stagecert.problem import Problem, as_arrays
from stagecert.reformulation import Point, forward_pass
from stagecert.sets import AbstractSet, Ball, Box, BoxBall, Product, Simplex
from stagecert.validate import validate


@dataclass(frozen=True)
class Exported:
    """A CVXPY problem with its variables. All variables are vectors: arrays in C order.

    Attributes:
        problem: the CVXPY problem, a minimisation.
        inputs: the inputs' variables: one, or a tree of them like the inputs themselves.
        blocks: one variable for each stage (for networks: each activation's output).
        arguments: for networks, what enters each activation; otherwise empty.
        names: all variables by name: "inputs", and the stages' names (or "block 0", ...).
        shapes: the arrays' shapes, by the same names.
        outputs: for networks, the outputs as one expression; for other objectives on the same
            constraints.
    """

    problem: cp.Problem
    inputs: Any
    blocks: tuple[cp.Variable, ...]
    arguments: tuple[cp.Variable, ...]
    names: dict[str, cp.Variable]
    shapes: dict[str, tuple[int, ...]]
    outputs: Any = None

    def value_of(self, name: str) -> np.ndarray | None:
        """The value of a variable in its own shape; None before the problem was solved."""
        value = self.names[name].value
        return None if value is None else np.asarray(value).reshape(self.shapes[name])

    def assign(self, inputs: Any, blocks: tuple) -> float:
        """Puts a point into the variables; returns the objective there.

        `violation` then says by how much it misses the constraints. For networks, `arguments` are
        left as they are.
        """
        variables = jax.tree.leaves(self.inputs, is_leaf=_is_variable)
        pairs = zip(variables, jax.tree.leaves(inputs), strict=True)
        for variable, array in [*pairs, *zip(self.blocks, blocks, strict=True)]:
            variable.value = np.asarray(array, float).reshape(variable.shape)
        value: Any = self.problem.objective.value
        return float(value)

    @property
    def violation(self) -> float:
        """By how much the variables' values miss a constraint at most."""
        amounts: list[Any] = [c.violation() for c in self.problem.constraints]
        return max((float(np.max(amount)) for amount in amounts), default=0.0)


def _is_variable(x) -> bool:
    return isinstance(x, cp.Variable)


def to_cvxpy(problem: Problem) -> Exported:
    """A problem written down for CVXPY.

    Everything that a problem is made of has to have a form in CVXPY: affine parts, `relu`, `abs`,
    `maximum` and the other pieces, squares, quadratic forms, Euclidean norms, exp, log, softplus
    and log-sum-exp; the sets Box, Ball, BoxBall, Simplex and Product. Arbitrary JAX functions
    cannot be exported. What was written down is compared with the original at a few random points.

    Raises:
        ProblemError: names the stage (or the constraint, the objective, the set) that cannot be
            exported.

    >>> import stagecert as sc
    >>> problem = sc.Problem(
    ...     inputs=sc.Box(-1.0, 1.0),
    ...     stages=(sc.Stage(lower=lambda s, z: s**2 - 1, upper=lambda s, z: 1 - s**2),),
    ...     objective=lambda s, z: z[0],
    ... )
    >>> exported = to_cvxpy(problem)
    >>> round(float(exported.problem.solve(solver="CLARABEL")), 6)
    -1.0
    >>> exported.value_of("block 0").round(3).tolist()
    -1.0
    """
    validate(problem)
    with jax.enable_x64(True):
        problem = as_arrays(problem, jnp.float64)
        return _export(problem)


def _export(problem: Problem) -> Exported:
    likes, structure = jax.tree.flatten(jax.eval_shape(problem.inputs.centre))
    shapes = [like.shape for like in likes] + [like.shape for like in problem.block_shapes()]
    variables = [cp.Variable(int(np.prod(shape, dtype=int))) for shape in shapes]
    translator = Translator(variables)
    values = [translator.variable(k, shape) for k, shape in enumerate(shapes)]
    inputs = structure.unflatten(values[: len(likes)])
    blocks = tuple(values[len(likes) :])
    constraints = []
    leaves = iter(variables[: len(likes)])
    for part, _ in _parts_of(problem.inputs):
        constraints += _in_set(part, next(leaves))
    checks: list[tuple[str, Any, Callable]] = []
    for index, stage in enumerate(problem.stages):
        name, z = problem.stage_name(index), variables[len(likes) + index]
        lower, upper = translator.function(
            lambda i, b, z, stage=stage: stage.bounds(i, b, z)[:2],
            (inputs, blocks[:index], blocks[index]),
        )
        sides = [
            translator.expression(_whole(translator, side, shapes[len(likes) + index]), what)
            for side, what in ((lower, f"{name}: lower"), (upper, f"{name}: upper"))
        ]
        constraints += _between(name, lower, upper, sides, z)
        checks.append((f"{name}: lower", sides[0], lambda done, k=index: done.lower[k]))
        checks.append((f"{name}: upper", sides[1], lambda done, k=index: done.upper[k]))
    for index, constraint in enumerate(problem.constraints):
        name = problem.constraint_name(index)
        (found,) = translator.function(constraint, (inputs, blocks))
        side = translator.expression(found, name)
        if not side.is_convex():
            raise ProblemError(
                f"{name} has no form that CVXPY recognises as convex. It must follow the rules of "
                f"disciplined convex programming; CVXPY sees {side.curvature.lower()}."
            )
        constraints.append(side <= 0)
        checks.append((name, side, lambda done, k=index: done.sides.constraints[k]))
    (value,) = translator.function(problem.objective, (inputs, blocks))
    cost: Any = cp.sum(translator.expression(value, "The objective"))
    if not cost.is_convex():
        raise ProblemError(
            "The objective has no form that CVXPY recognises as convex. It must follow the rules "
            "of disciplined convex programming."
        )
    checks.append(("The objective", cost, lambda done: done.value))
    _compare(problem, variables, checks)
    block_variables = tuple(variables[len(likes) :])
    names, named_shapes = _named(problem, variables, shapes, len(likes))
    return Exported(
        cp.Problem(cp.Minimize(cost), constraints),
        structure.unflatten(variables[: len(likes)]),
        block_variables,
        (),
        names,
        named_shapes,
    )


def _whole(translator: Translator, value: Value, shape) -> Value:
    """A bound as large as its block: a constant may be one number for all."""
    return translator._broadcast(value, shape)


def _named(problem: Problem, variables, shapes, count: int) -> tuple[dict, dict]:
    labels = ["inputs"] if count == 1 else [f"inputs {k}" for k in range(count)]
    labels += [
        stage.name if stage.name is not None else f"block {k}"
        for k, stage in enumerate(problem.stages)
    ]
    # Where stages share a name, their numbers tell them apart.
    unique = [
        label if labels.count(label) == 1 else f"{label} ({k - count})"
        for k, label in enumerate(labels)
    ]
    return dict(zip(unique, variables, strict=True)), dict(zip(unique, shapes, strict=True))


def _parts_of(inputs: AbstractSet) -> list[tuple[AbstractSet, Any]]:
    """The sets of a product in the order of its points' leaves."""
    if isinstance(inputs, Product):
        found = []
        leaves = jax.tree.leaves(inputs.parts, is_leaf=lambda x: isinstance(x, AbstractSet))
        for part in leaves:
            found += _parts_of(part)
        return found
    return [(inputs, None)]


def _in_set(part: AbstractSet, x: cp.Variable) -> list:
    def flat(array):
        return np.broadcast_to(np.asarray(array, float), like).ravel()

    like = jax.eval_shape(part.centre).shape
    constraints = []
    if isinstance(part, (Box, BoxBall)):
        constraints += [x >= flat(part.lower), x <= flat(part.upper)]
    if isinstance(part, (Ball, BoxBall)):
        constraints.append(cp.norm(x - flat(part.middle), 2) <= float(part.radius))
    if isinstance(part, Simplex):
        constraints += [x >= 0, cp.sum(x) == float(part.total)]
    if not constraints:
        raise ProblemError(
            f"The inputs' set {type(part).__name__} cannot be exported; Box, Ball, BoxBall, "
            "Simplex and Product can."
        )
    return constraints


def _between(name: str, lower: Value, upper: Value, sides, z: cp.Variable) -> list:
    for what, side, right in (
        ("lower", sides[0], sides[0].is_convex()),
        ("upper", sides[1], sides[1].is_concave()),
    ):
        if not right:
            raise ProblemError(
                f"{name}: {what} has no form that CVXPY recognises as "
                f"{'convex' if what == 'lower' else 'concave'}. It must follow the rules of "
                f"disciplined convex programming; CVXPY sees {side.curvature.lower()}."
            )
    if isinstance(lower, Affine) and isinstance(upper, Affine) and _equal(lower, upper):
        return [z == sides[0]]
    return [sides[0] <= z, z <= sides[1]]


def _equal(one: Affine, two: Affine) -> bool:
    keys = {*one.matrices, *two.matrices}
    return np.array_equal(one.constant, two.constant) and all(
        k in one.matrices and k in two.matrices and (one.matrices[k] != two.matrices[k]).nnz == 0
        for k in keys
    )


def _compare(problem: Problem, variables, checks, samples: int = 3) -> None:
    """Compares expressions with the functions they came from at random feasible points."""
    before = [variable.value for variable in variables]
    points, passes = _random_points(problem, jax.random.split(jax.random.key(0), samples))
    for number in range(samples):
        inputs, done = jax.tree.map(lambda x, n=number: np.asarray(x[n]), (points, passes))
        arrays = [*jax.tree.leaves(inputs), *done.blocks]
        for variable, array in zip(variables, arrays, strict=True):
            variable.value = np.asarray(array, float).reshape(variable.shape)
        for what, expression, pick in checks:
            ours = np.asarray(pick(done), float).ravel()
            theirs = np.asarray(expression.value, float).ravel()
            if not np.allclose(ours, theirs, rtol=1e-6, atol=1e-8 * (1 + np.abs(ours).max())):
                raise ProblemError(
                    f"{what} was not exported correctly: at a random point it is "
                    f"{ours.tolist()}, what was written down {theirs.tolist()}."
                )
    for variable, value in zip(variables, before, strict=True):
        variable.value = value


@eqx.filter_jit
def _random_points(problem: Problem, keys):
    """Inputs, and the forward passes from there with random fractions."""
    shapes = problem.block_shapes()

    def one(key):
        of_inputs, *of_blocks = jax.random.split(key, 1 + len(shapes))
        inputs = problem.inputs.project(problem.inputs.sample(of_inputs))
        fractions = tuple(
            jax.random.uniform(k, like.shape, jnp.float64)
            for k, like in zip(of_blocks, shapes, strict=True)
        )
        return inputs, forward_pass(problem, Point(inputs, fractions))

    return jax.vmap(one)(keys)


# -- networks --------------------------------------------------------------------------------------


def networks_to_cvxpy(
    network: Network,
    lower,
    upper,
    objective,
    intermediate: str | Intermediate | tuple = "backward",
) -> Exported:
    """The relaxed problem that `networks.bound` solves for one box and one objective.

    Args:
        network: from `networks.load`, `from_torch` or `from_jax`.
        lower, upper: one box, of the network's input shape (no batch axis); tuples of arrays for
            several inputs.
        objective: coefficients of the (flattened) outputs, to be minimised.
        intermediate: how the arguments of activations are bounded, as in `networks.bound`; ready
            intervals have a batch axis of length one.

    Activations can be exported if the two sides of their hull can: relu, leaky relu, prelu, abs,
    clip, hard sigmoid, steps, maxima, products (lines), softplus, exp and square (curves with a
    chord). Affine layers, convolutions too, become sparse matrices; what enters an activation is a
    variable of its own, which keeps them sparse.

    Beyond its interval a curve goes on as itself here, but along its tangent in `networks.bound`;
    with intermediate="ibp" no argument leaves its interval, and the two problems are the same.

    Raises:
        ProblemError: bad input, or an activation that cannot be exported; it is named.

    >>> from stagecert import networks
    >>> net = networks.from_jax(lambda x: jax.nn.relu(x) - 0.5 * x + 1, np.zeros(1))
    >>> exported = networks_to_cvxpy(net, [-1.0], [1.0], [1.0])
    >>> round(float(exported.problem.solve(solver="HIGHS")), 6)
    1.0
    """
    single = len(network.input_shapes) == 1
    how = Intermediate.named(intermediate)

    def batch(box):
        return np.asarray(box, float)[None] if single else tuple(np.asarray(b)[None] for b in box)

    with jax.enable_x64(True):
        regions = regions_of(network, batch(lower), batch(upper), None)
        row = np.asarray(objective, float)
        row = objective_rows(network, 1, row[None] if row.ndim == 1 else row)
        if row.shape[1] != 1:
            raise ProblemError(f"objective must be one row, but there are {row.shape[1]}.")
        parts = as_arrays(split(network), jnp.float64)
        arguments = enclose(parts, regions, how, 2.0, lambda *progress: None)
        intervals = jax.tree.map(lambda x: x[0], arguments)
        return _network(network, parts, regions, intervals, row[0, 0])


def _network(network: Network, parts: Split, regions, intervals, row) -> Exported:
    inputs = [cp.Variable(int(np.prod(shape, dtype=int))) for shape in network.input_shapes]
    constraints: list = []
    for x, (low, high) in zip(inputs, regions.boxes, strict=True):
        constraints += [x >= np.asarray(low[0]).ravel(), x <= np.asarray(high[0]).ravel()]
    blocks: list[cp.Variable] = []
    arguments: list[cp.Variable] = []
    shapes = tuple(layer.shape for layer in parts.layers)
    for layer, name, (low, high) in zip(parts.layers, parts.names, intervals, strict=True):
        a = cp.Variable(int(np.prod(low.shape, dtype=int)))
        z = cp.Variable(int(np.prod(layer.shape, dtype=int)))
        constraints.append(
            a == _segment(layer.segment, network.input_shapes, shapes, inputs, blocks)
        )
        constraints += _hull(layer, name, low, high, a, z)
        arguments.append(a)
        blocks.append(z)
    outputs = _segment(parts.last, network.input_shapes, shapes, inputs, blocks)
    cost = row @ outputs
    labels = list(network.labels.inputs) if len(inputs) > 1 else ["inputs"]
    names: dict[str, cp.Variable] = dict(zip(labels, inputs, strict=True))
    sizes: dict[str, tuple] = dict(zip(labels, network.input_shapes, strict=True))
    for k, (name, z, a) in enumerate(zip(parts.names, blocks, arguments, strict=True)):
        name = name if name not in names else f"{name} ({k})"
        names |= {name: z, f"argument of {name}": a}
        sizes |= {name: shapes[k], f"argument of {name}": intervals[k][0].shape}
    return Exported(
        cp.Problem(cp.Minimize(cost), constraints),
        inputs[0] if len(inputs) == 1 else tuple(inputs),
        tuple(blocks),
        tuple(arguments),
        names,
        sizes,
        outputs,
    )


def _segment(segment: Segment, input_shapes, block_shapes, inputs, blocks):
    """An affine segment of the inputs' and blocks' variables."""
    shapes = [input_shapes[k] if is_input else block_shapes[k] for is_input, k in segment.sources]
    # The sources, numbered from zero, are all that the segment reads.
    local = Segment(segment.nodes, tuple((False, k) for k in range(len(shapes))), segment.output)
    zeros = tuple(jnp.zeros(shape) for shape in shapes)
    constant = local((), zeros)
    total = cp.Constant(np.asarray(constant, float).ravel())
    for place, ((is_input, k), shape) in enumerate(zip(segment.sources, shapes, strict=True)):

        def alone(x, place=place):
            read = tuple(x if j == place else zero for j, zero in enumerate(zeros))
            return local((), read) - constant

        variable = inputs[k] if is_input else blocks[k]
        total = total + matrix_of(jax.jit(alone), shape) @ variable
    return total


# Convex activations whose hull is the function below and a chord above.
_CURVES: dict[str, Callable] = {"softplus": cp.logistic, "exp": cp.exp, "square": cp.square}


def _hull(layer: Layer, name: str, low, high, a: cp.Variable, z: cp.Variable) -> list:
    """Constraints that put (argument, block) into the activation's hull."""
    kind = layer.operation.kind if isinstance(layer.operation, Activation) else "a joint operation"
    wedge = layer.wedge(low, high)
    if isinstance(wedge, MaxWedge):
        return _max_hull(wedge, a, z)
    if isinstance(wedge, ProductWedge):
        below = _planes(wedge.low_slopes, wedge.low_offsets, a, z)
        above = _planes(wedge.high_slopes, wedge.high_offsets, a, z)
        return [*(plane <= z for plane in below), *(z <= plane for plane in above)]
    if isinstance(wedge, ReluWedge):
        offsets, slopes = jax.jvp(wedge.upper, (jnp.zeros_like(low),), (jnp.ones_like(low),))
        zero, one = jnp.zeros_like(low), jnp.ones_like(low)
        below = [(jnp.where(high <= 0, 0, one), zero), (jnp.where(low >= 0, one, 0), zero)]
        return _lines_hull(below, [(slopes, offsets)], a, z)
    if isinstance(wedge, HullWedge):
        above = _lines_of(wedge.above)
        if kind in _CURVES and above is not None:
            return [_CURVES[kind](a) <= z, *_lines_hull([], above, a, z)]
        below = _lines_of(wedge.below)
        if above is not None and below is not None:
            return _lines_hull(below, above, a, z)
    raise ProblemError(
        f"Layer '{name}': the hull of '{kind}' is not made of lines or of functions that CVXPY "
        f"knows, so it cannot be exported. Lines and {', '.join(_CURVES)} can."
    )


def _lines_of(side: hulls.AbstractSide) -> list | None:
    """[(slopes, offsets), ...] of a side that is made of lines."""
    if isinstance(side, hulls.Line):
        return [(side.slope, side.value - side.slope * side.anchor)]
    if isinstance(side, hulls.Lines):
        return [(side.slopes[..., k], side.offsets[..., k]) for k in range(side.slopes.shape[-1])]
    return None


def _lines_hull(below: list, above: list, a: cp.Variable, z: cp.Variable) -> list:
    def flat(lines):
        return [tuple(np.asarray(x, float).ravel() for x in pair) for pair in lines]

    below, above = flat(below), flat(above)
    # Where the first line of both sides is all there is, on both sides, an equation says so.
    every = [*below, *above]
    straight = np.all(
        [np.equal(s, every[0][0]) & np.equal(o, every[0][1]) for s, o in every], axis=0
    ) if below and above else np.zeros(z.size, bool)  # fmt: skip
    constraints = []
    fixed, free = np.flatnonzero(straight), np.flatnonzero(~straight)
    if len(fixed):
        slope, offset = every[0]
        constraints.append(z[fixed] == cp.multiply(slope[fixed], a[fixed]) + offset[fixed])
    if len(free):
        for lines, sign in ((below, 1), (above, -1)):
            for slope, offset in lines:
                line = cp.multiply(slope[free], a[free]) + offset[free]
                constraints.append(sign * line <= sign * z[free])
    return constraints


def _max_hull(wedge: MaxWedge, a: cp.Variable, z: cp.Variable) -> list:
    slopes, offsets = (np.asarray(x, float) for x in (wedge.low_slopes, wedge.low_offsets))
    entries = slopes.shape[-1]
    constraints = []
    for k in range(entries):
        pick = np.arange(z.size) * entries + k
        line = cp.multiply(slopes[..., k].ravel(), a[pick]) + offsets[..., k].ravel()
        constraints.append(line <= z)
    return [*constraints, *(z <= plane for plane in _planes(wedge.slopes_, wedge.offsets, a, z))]


def _planes(slopes, offsets, a: cp.Variable, z: cp.Variable) -> list:
    """Affine functions of the entries that belong to each entry of z: (..., planes, entries)."""
    slopes, offsets = np.asarray(slopes, float), np.asarray(offsets, float)
    entries = slopes.shape[-1]
    rows = np.repeat(np.arange(z.size), entries)
    planes = []
    for k in range(offsets.shape[-1]):
        weights = slopes[..., k, :].ravel()
        matrix = sparse.csr_array((weights, (rows, np.arange(a.size))), shape=(z.size, a.size))
        planes.append(matrix @ a + offsets[..., k].ravel())
    return planes
