"""Problems that are linear or quadratic programmes, written down sparsely; a solver by these.

Objectives that are convex quadratics of affine functions and of maxima, with bounds and constraints
that are affine or such maxima, over boxes and simplices, are quadratic programmes. The traced
functions are read equation by equation: a value is a sparse matrix times the variables, plus
products of two such. Scanned stages are read through their vmapped step, so the work grows with the
length and nothing is unrolled. A maximum becomes a variable above its arguments; the multipliers of
these inequalities are its slopes.

The solution is a proposal like any other. Where the steps of `polish` wait for news to travel
through long horizons of kinks, the factorisations of an interior-point method do not.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sparse

from stagecert import jaxprs, pieces
from stagecert.assumptions import key_of, traced_functions
from stagecert.certificate import Proposal, evaluate, passes_of_evaluate
from stagecert.curvature.lattice import constant
from stagecert.curvature.moving import PLACES, STRUCTURAL, mover
from stagecert.curvature.walking import NUMPY
from stagecert.problem import Problem, as_arrays
from stagecert.quadratic import Iterate, Quadratic, minimise
from stagecert.reformulation import Point
from stagecert.repairing import fractions_of
from stagecert.sets import AbstractSet, Box, Product, Simplex
from stagecert.sides import Sides, with_multipliers
from stagecert.solvers.base import AbstractSolver, guide_of, repaired_report

MOST_ENTRIES = 5_000_000  # of a matrix
KEPT = 64  # shapes of problems whose functions are remembered


class NoProgrammeError(Exception):
    """The problem is no quadratic programme, or too large a one."""


class Found(eqx.Module):
    """A programme's solution: inputs and blocks, slopes of pieces, multipliers of constraints."""

    inputs: Any
    blocks: tuple
    slopes: Any
    sides: Sides


class Programme(AbstractSolver):
    """An interior-point method for problems that are sparse linear or quadratic programmes.

    Its one step evaluates the programme's solution, which the loop on the host asks for (`propose`)
    and puts into the state. Other problems it leaves as they are.
    """

    name: ClassVar[str] = "programme"
    patience: int = 0
    progress: float = 1.0

    def init(self, problem, point):
        rule = with_multipliers(guide_of(problem).centre)
        exact = evaluate(problem, point, with_gradient=False, rule=rule)
        found = repaired_report(problem, exact, passes_of_evaluate(with_gradient=False))
        done = exact.done
        return Found(point.inputs, done.blocks, done.records, done.held), found

    def step(self, problem, state: Found):
        # The solution's own lower and upper bounds may be looser than the true ones.
        inputs = problem.inputs.project(state.inputs)
        point = Point(inputs, fractions_of(problem, inputs, state.blocks))
        exact = evaluate(
            problem,
            point,
            pieces.given_slopes,
            state.slopes,
            with_gradient=False,
            rule=with_multipliers(state.sides),
        )
        passes = 1 + passes_of_evaluate(with_gradient=False)
        return state, repaired_report(problem, exact, passes, stuck=True)

    def propose(self, problem: Problem, like: Proposal, over: Callable[[], bool]):
        """The solution, arranged as `like`, or None; on the host, for one problem."""
        try:
            with jax.enable_x64(True), np.errstate(all="ignore"):
                plain = as_arrays(replace(problem, guide=None), jnp.float64)
                written = _written(plain)
                found = minimise(written.quadratic(), over)
                return None if found is None else _found(written, found, like)
        except NoProgrammeError:
            return None


def with_programme(solver: AbstractSolver, batch: bool) -> tuple[AbstractSolver, ...]:
    """A solver and `Programme`, in the order that suits.

    One programme is best solved at once. Many are searched side by side, and those that stall are
    solved one by one.
    """
    return (solver, Programme()) if batch else (Programme(), solver)


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Products:
    """weights @ (left * right): sums of products of two affine values."""

    weights: Any
    left: "Affine"
    right: "Affine"


@dataclass(frozen=True)
class Affine:
    """matrix @ variables + constant, and products; arrays are vectors in C order."""

    shape: tuple[int, ...]
    matrix: Any
    constant: np.ndarray
    products: Products | None = None

    def mapped(self, matrix, shape) -> "Affine":
        """A linear map of it."""
        products = self.products
        if products is not None:
            weights = sparse.csr_array(matrix @ products.weights)
            products = Products(weights, products.left, products.right)
        linear = sparse.csr_array(matrix @ self.matrix)
        return Affine(tuple(shape), linear, matrix @ self.constant, products)


def _size(shape) -> int:
    return int(np.prod(shape, dtype=int))


def _wide(matrix, columns: int):
    """The same matrix with more variables."""
    parts = (matrix.data, matrix.indices, matrix.indptr)
    return sparse.csr_array(parts, shape=(matrix.shape[0], columns))


def _entries(values, rows, columns, shape):
    if np.size(rows) > MOST_ENTRIES:
        raise NoProgrammeError
    values, rows, columns = (np.ravel(x) for x in np.broadcast_arrays(values, rows, columns))
    some = values != 0
    return sparse.csr_array((values[some], (rows[some], columns[some])), shape=shape)


def _picking(places: np.ndarray, size: int):
    """The matrix that takes entries from places."""
    places = places.ravel()
    return _entries(1.0, np.arange(places.size), places, (places.size, size))


def _added(shape, *parts: Affine) -> Affine:
    columns = max(part.matrix.shape[1] for part in parts)
    matrix = parts[0].matrix if len(parts) == 1 else sum(_wide(p.matrix, columns) for p in parts)
    products = [p.products for p in parts if p.products is not None]
    joined = products[0] if products else None
    if len(products) > 1:
        weights = sparse.csr_array(sparse.hstack([p.weights for p in products]))
        joined = Products(
            weights,
            _stacked([p.left for p in products]),
            _stacked([p.right for p in products]),
        )
    return Affine(tuple(shape), sparse.csr_array(matrix), sum(p.constant for p in parts), joined)


def _stacked(parts: list[Affine]) -> Affine:
    columns = max(part.matrix.shape[1] for part in parts)
    matrix = sparse.csr_array(sparse.vstack([_wide(p.matrix, columns) for p in parts]))
    return Affine((matrix.shape[0],), matrix, np.concatenate([p.constant for p in parts]))


# -- reading a problem -----------------------------------------------------------------------------


@dataclass
class _Written:
    """A problem as a programme: rows collected so far, and where everything is found again."""

    problem: Problem
    count: int = 0  # of variables
    equal: list[Affine] = field(default_factory=list)  # = 0
    below: list[Affine] = field(default_factory=list)  # <= 0
    objective: Affine | None = None
    inputs: list[Affine] = field(default_factory=list)
    blocks: list[Affine] = field(default_factory=list)
    # For each stage: which entries have two bounds, and the rows of both in `below`.
    stages: list[tuple] = field(default_factory=list)
    # For each nonsmooth piece: the rows of its arguments, or its weights if these are constant.
    of_stages: list = field(default_factory=list)
    of_objective: list = field(default_factory=list)
    of_constraints: list = field(default_factory=list)
    constraints: list[int] = field(default_factory=list)
    pieces: list = field(default_factory=list)  # the one of the three that is being written

    def variable(self, shape) -> Affine:
        size = _size(shape)
        eye = _entries(1.0, np.arange(size), self.count + np.arange(size), (size, self.count + size))
        self.count += size
        return Affine(tuple(shape), eye, np.zeros(size))

    def no_more_than_zero(self, value: Affine) -> int:
        """Adds rows; which of `below` they are."""
        if value.products is not None:
            raise NoProgrammeError
        self.below.append(value)
        return len(self.below) - 1

    def maximum(self, arguments: list, shape) -> tuple[Affine, list[int]]:
        """A variable above its arguments, and their rows."""
        top = self.variable(shape)
        under = _negative(top)
        return top, [
            self.no_more_than_zero(_added(shape, _affine(x, shape), under)) for x in arguments
        ]

    def quadratic(self) -> Quadratic:
        """Minimise what the objective says of the variables."""
        value = self.objective
        assert value is not None
        n = self.count
        linear, bent = _wide(value.matrix, n).toarray().ravel(), sparse.csr_array((n, n))
        if value.products is not None:
            one, two = value.products.left, value.products.right
            weights = value.products.weights.toarray().ravel()
            a, b = _wide(one.matrix, n), _wide(two.matrix, n)
            half = a.T @ (sparse.diags_array(weights) @ b)
            bent = sparse.csr_array(half + half.T)
            linear = linear + a.T @ (weights * two.constant) + b.T @ (weights * one.constant)
        empty = Affine((0,), sparse.csr_array((0, n)), np.zeros(0))
        equal, below = (_stacked([empty, *rows]) for rows in (self.equal, self.below))
        return Quadratic(
            bent, linear, equal.matrix, -equal.constant, below.matrix, -below.constant
        )  # fmt: skip


def _negative(x: Affine) -> Affine:
    return x.mapped(-sparse.eye_array(_size(x.shape), format="csr"), x.shape)


def _affine(x, shape) -> Affine:
    """A value (or a constant) as large as a shape."""
    size = _size(shape)
    if isinstance(x, np.ndarray):
        flat = np.broadcast_to(np.asarray(x, float), shape).ravel()
        return Affine(tuple(shape), sparse.csr_array((size, 0)), flat)
    if x.shape == tuple(shape):
        return x
    places = np.broadcast_to(np.arange(_size(x.shape)).reshape(x.shape), shape)
    return x.mapped(_picking(places, _size(x.shape)), shape)


_traced: OrderedDict = OrderedDict()
_lock = threading.Lock()


def _functions(problem: Problem) -> list | None:
    """The traced functions, remembered; None where one of them cannot be read."""
    key = key_of(problem, None)
    with _lock:
        if key in _traced:
            _traced.move_to_end(key)
            return _traced[key]
    found: list | None = traced_functions(problem)
    names = {e.primitive.name for closed in found for e in jaxprs.equations(closed.jaxpr)}
    if names & _NEVER:
        found = None
    with _lock:
        _traced[key] = found
        while len(_traced) > KEPT:
            _traced.popitem(last=False)
    return found


def _written(problem: Problem) -> _Written:
    functions = _functions(problem)
    if functions is None:
        raise NoProgrammeError
    arrays = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(problem, eqx.is_array))]
    if sum(x.size for x in arrays) > MOST_ENTRIES:
        raise NoProgrammeError
    w = _Written(problem)
    likes = jax.tree.leaves(jax.eval_shape(problem.inputs.centre))
    w.inputs = [w.variable(like.shape) for like in likes]
    w.blocks = [w.variable(like.shape) for like in problem.block_shapes()]
    _write_set(w, problem.inputs, iter(w.inputs))
    count = len(problem.stages)

    def read(closed):
        known = [*arrays, *w.inputs, *w.blocks]
        return jaxprs.walk(closed.jaxpr, closed.consts, known, _Reader(w), np.asarray)

    w.pieces = w.of_stages
    for closed, block in zip(functions[:count], w.blocks, strict=True):
        lower, upper = (_affine(x, block.shape) for x in read(closed))
        w.stages.append(_write_stage(w, block, lower, upper))
    w.pieces = w.of_constraints
    for closed in functions[count:-1]:
        (value,) = read(closed)
        w.constraints.append(w.no_more_than_zero(_affine(value, value.shape)))
    w.pieces = w.of_objective
    (value,) = read(functions[-1])
    w.objective = _affine(value, ())
    return w


def _write_set(w: _Written, inputs: AbstractSet, variables) -> None:
    if isinstance(inputs, Product):
        for part in jax.tree.leaves(inputs.parts, is_leaf=lambda x: isinstance(x, AbstractSet)):
            _write_set(w, part, variables)
        return
    x = next(variables)
    size = _size(x.shape)
    if isinstance(inputs, Box):
        low, high = (
            np.broadcast_to(np.asarray(end, float), x.shape).ravel()
            for end in (inputs.lower, inputs.upper)
        )
        fixed = low >= high
        for rows, end, sign in ((fixed, low, 0), (~fixed, low, -1), (~fixed, high, 1)):
            at = np.flatnonzero(rows)
            moved = x.mapped((sign or 1) * _picking(at, size), (at.size,))
            value = replace(moved, constant=-(sign or 1) * end[at])
            (w.below if sign else w.equal).append(value)
    elif isinstance(inputs, Simplex):
        w.below.append(_negative(x))
        total = x.mapped(_entries(1.0, np.zeros(size, int), np.arange(size), (1, size)), (1,))
        w.equal.append(replace(total, constant=-np.asarray(inputs.total, float).reshape(1)))
    else:
        raise NoProgrammeError


def _write_stage(w: _Written, block: Affine, lower: Affine, upper: Affine):
    """Rows of lower <= block <= upper; of equations where both are the same."""
    if lower.products is not None or upper.products is not None:
        raise NoProgrammeError
    apart = _added(block.shape, lower, _negative(upper))
    same = (np.diff(_cleaned(apart.matrix).indptr) == 0) & (apart.constant == 0)
    size = block.constant.size
    at, rest = (_picking(np.flatnonzero(rows), size) for rows in (same, ~same))
    over, under = (_added(block.shape, v, _negative(block)) for v in (lower, upper))
    w.equal.append(over.mapped(at, (at.shape[0],)))
    low = w.no_more_than_zero(over.mapped(rest, (rest.shape[0],)))
    return ~same, low, w.no_more_than_zero(under.mapped(-rest, (rest.shape[0],)))


def _cleaned(matrix):
    matrix = matrix.copy()
    matrix.eliminate_zeros()
    return matrix


# -- equations -------------------------------------------------------------------------------------


class _Reader:
    """What an equation makes of values: arrays of numbers, or `Affine`."""

    def __init__(self, w: _Written):
        self.w = w

    def __call__(self, equation, values: list) -> list | None:
        if jaxprs.body_of_call(equation) is not None:
            return None
        name = equation.primitive.name
        shape = tuple(equation.outvars[0].aval.shape)
        is_piece = equation.primitive in pieces.PIECES
        if all(isinstance(v, np.ndarray) for v in values) and not is_piece:
            return _computed(equation, values)
        if name in STRUCTURAL:
            return [_moved(equation, values, shape)]
        rule = _RULES.get(name)
        if rule is None:
            raise NoProgrammeError
        found = rule(self.w, equation, shape, *values)
        return found if isinstance(found, list) else [found]


def _computed(equation, values: list) -> list:
    name = equation.primitive.name
    if name in NUMPY and all(v.dtype in (np.float64, np.bool_) for v in values):
        return [np.asarray(NUMPY[name](*values))]
    if name in STRUCTURAL and name not in PLACES:
        move = mover(equation, [])
        if move is not None:
            return [np.asarray(move(*values))]
    return [np.asarray(x) for x in jaxprs.bind(equation, [jnp.asarray(v) for v in values])]


def _moved(equation, values: list, shape) -> Affine:
    """Entries of arguments, in other places; those from nowhere are refused."""
    places = [constant(v) if isinstance(v, np.ndarray) else None for v in values]
    name = equation.primitive.name
    first, last = PLACES.get(name, (len(values), len(values)))
    if any(place is None for place in places[first:last]):
        raise NoProgrammeError
    move = mover(equation, places)
    assert move is not None
    values = values[:first] + (values[last:] if last is not None else [])
    sizes = [_size(v.shape) for v in values]
    starts = np.cumsum([0, *sizes])
    numbers = move(
        *(
            s + np.arange(n, dtype=float).reshape(v.shape)
            for s, n, v in zip(starts, sizes, values, strict=False)
        )
    )
    if np.isnan(numbers).any():
        raise NoProgrammeError
    pick = _picking(np.asarray(numbers).astype(np.int64), starts[-1])
    parts = [
        _affine(v, v.shape).mapped(pick[:, begin : begin + n], shape)
        for v, begin, n in zip(values, starts, sizes, strict=False)
    ]
    return _added(shape, *parts)


def _plus(sign: float) -> Callable:
    def rule(w, equation, shape, a, b):
        a, b = _affine(a, shape), _affine(b, shape)
        return _added(shape, a, b if sign > 0 else _negative(b))

    return rule


def _scaled(x: Affine, by: np.ndarray, shape) -> Affine:
    by = np.broadcast_to(np.asarray(by, float), shape).ravel()
    return _affine(x, shape).mapped(sparse.csr_array(sparse.diags_array(by)), shape)


def _times(w, equation, shape, a, b):
    if isinstance(b, np.ndarray):
        return _scaled(a, b, shape)
    if isinstance(a, np.ndarray):
        return _scaled(b, a, shape)
    return _product(shape, sparse.eye_array(_size(shape), format="csr"), a, b)


def _product(shape, weights, a: Affine, b: Affine) -> Affine:
    if a.products is not None or b.products is not None:
        raise NoProgrammeError
    # What is constant or affine in the product is left to `quadratic`, which multiplies it out.
    nothing = sparse.csr_array((_size(shape), 0))
    return Affine(tuple(shape), nothing, np.zeros(_size(shape)), Products(weights, a, b))


def _over(w, equation, shape, a, b):
    if not isinstance(b, np.ndarray):
        raise NoProgrammeError
    return _scaled(a, 1 / np.asarray(b, float), shape)


def _power(w, equation, shape, x):
    if equation.params["y"] != 2:
        raise NoProgrammeError
    return _times(w, equation, shape, x, x)


def _squared(w, equation, shape, x):
    return _times(w, equation, shape, x, x)


def _same(w, equation, shape, x):
    if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        raise NoProgrammeError
    return x


def _summed(w, equation, shape, x):
    size, axes = _size(x.shape), equation.params["axes"]
    kept = np.arange(_size(shape)).reshape([1 if k in axes else n for k, n in enumerate(x.shape)])
    rows = np.broadcast_to(kept, x.shape).ravel()
    return x.mapped(_entries(1.0, rows, np.arange(size), (_size(shape), size)), shape)


def _contracted(w, equation, shape, a, b):
    (of_a, of_b), (batch_a, batch_b) = equation.params["dimension_numbers"]

    def arranged(x, contracted, batch):
        free = [k for k in range(len(x.shape)) if k not in (*contracted, *batch)]
        sizes = [_size([x.shape[k] for k in axes]) for axes in (batch, free, contracted)]
        numbers = np.arange(_size(x.shape)).reshape(x.shape)
        return numbers.transpose(*batch, *free, *contracted).reshape(sizes)

    i, j = arranged(a, of_a, batch_a), arranged(b, of_b, batch_b)
    (batches, ones, length), twos = i.shape, j.shape[1]
    total = batches * ones * twos * length
    if total > MOST_ENTRIES:
        raise NoProgrammeError
    rows = np.arange(batches * ones * twos).reshape(batches, ones, twos, 1)
    i, j = (np.broadcast_to(x, (batches, ones, twos, length)) for x in (i[:, :, None], j[:, None]))
    rows = np.broadcast_to(rows, i.shape)
    for x, where, other, there in ((a, i, b, j), (b, j, a, i)):
        if isinstance(other, np.ndarray):
            numbers = np.asarray(other, float).ravel()[there]
            return x.mapped(_entries(numbers, rows, where, (_size(shape), _size(x.shape))), shape)
    sums = _entries(1.0, rows.ravel(), np.arange(total), (_size(shape), total))
    one, two = (
        x.mapped(_picking(where, _size(x.shape)), (total,)) for x, where in ((a, i), (b, j))
    )
    return _product(shape, sums, one, two)


def _chosen(w, equation, shape, which, *cases):
    if not isinstance(which, np.ndarray):
        raise NoProgrammeError
    parts = [_scaled(_affine(x, shape), which == k, shape) for k, x in enumerate(cases)]
    return _added(shape, *parts)


def _largest_of(sign: float) -> Callable:
    def rule(w: _Written, equation, shape, *arguments):
        parts = [sign * x if isinstance(x, np.ndarray) else _scaled(x, sign, x.shape)
                 for x in arguments]  # fmt: skip
        top, _ = w.maximum(parts, shape)
        return _scaled(top, sign, shape)

    return rule


def _magnitude(w: _Written, equation, shape, x):
    return w.maximum([x, _negative(x)], shape)[0]


def _along(x, axes, shape) -> list:
    """The entries that are combined when axes are reduced, as values of the result's shape."""
    kept = [k for k in range(len(x.shape)) if k not in axes]
    order = np.arange(_size(x.shape)).reshape(x.shape).transpose(*kept, *axes)
    columns = order.reshape(_size(shape), -1).T
    if isinstance(x, np.ndarray):
        return [x.ravel()[c].reshape(shape) for c in columns]
    return [x.mapped(_picking(c, _size(x.shape)), shape) for c in columns]


def _reduced(sign: float) -> Callable:
    def rule(w: _Written, equation, shape, x):
        return _largest_of(sign)(w, equation, shape, *_along(x, equation.params["axes"], shape))

    return rule


def _piece_max(w: _Written, equation, shape, x):
    return _piece(w, _along(x, (len(x.shape) - 1,), shape), shape, pair=False)


def _piece_pair(w: _Written, equation, shape, a, b):
    return _piece(w, [a, b], shape, pair=True)


def _piece(w: _Written, arguments: list, shape, pair: bool):
    if all(isinstance(x, np.ndarray) for x in arguments):
        stacked = np.stack(np.broadcast_arrays(*arguments), axis=-1)
        one = np.eye(len(arguments))[np.argmax(stacked, axis=-1)]
        w.pieces.append(one[..., 0] if pair else one)
        return stacked.max(axis=-1)
    top, rows = w.maximum(arguments, shape)
    w.pieces.append((rows, tuple(shape), pair))
    return top


def _negated(w, equation, shape, x):
    return _negative(x)


_RULES: dict[str, Callable] = {
    "add": _plus(1),
    "add_any": _plus(1),
    "sub": _plus(-1),
    "neg": _negated,
    "mul": _times,
    "div": _over,
    "integer_pow": _power,
    "square": _squared,
    "copy": _same,
    "copy_p": _same,
    "convert_element_type": _same,
    "reduce_precision": _same,
    "optimization_barrier": _same,
    "reduce_sum": _summed,
    "dot_general": _contracted,
    "select_n": _chosen,
    "max": _largest_of(1),
    "min": _largest_of(-1),
    "reduce_max": _reduced(1),
    "reduce_min": _reduced(-1),
    "abs": _magnitude,
    pieces.max_p.name: _piece_max,
    pieces.pair_p.name: _piece_pair,
}
# No rule is for these, and they hardly ever are about numbers alone: not worth a walk.
_NEVER = frozenset({"exp", "log", "log1p", "exp2", "expm1", "tanh", "logistic", "erf", "pow",
                    "conv_general_dilated", "while", "scan", "cond", pieces.allocation_p.name})  # fmt: skip


# -- the way back ----------------------------------------------------------------------------------


def _found(w: _Written, found: Iterate, like: Proposal) -> Found:
    """What the solution says about inputs, blocks, slopes and multipliers of constraints."""
    ends = np.cumsum([0, *(rows.constant.size for rows in w.below)])

    def multipliers(row: int) -> np.ndarray:
        return found.z[ends[row] : ends[row + 1]]

    def value(x: Affine) -> np.ndarray:
        return (_wide(x.matrix, w.count) @ found.x + x.constant).reshape(x.shape)

    inputs = jax.tree.unflatten(jax.tree.structure(like.point.inputs), [*map(value, w.inputs)])
    order = []
    for block, (apart, low, high) in zip(w.blocks, w.stages, strict=True):
        both = np.zeros(apart.size)
        both[apart] = np.minimum(multipliers(low), multipliers(high))
        order.append(both.reshape(block.shape))

    def weights(piece):
        if isinstance(piece, np.ndarray):
            return piece
        rows, shape, pair = piece
        pulls = np.stack([multipliers(row) for row in rows], axis=-1)
        pulls = np.maximum(pulls, 1e-300)
        shares = (pulls / pulls.sum(axis=-1, keepdims=True)).reshape(*shape, len(rows))
        return shares[..., 0] if pair else shares

    found_pieces = [*w.of_stages, *w.of_objective, *w.of_constraints]
    leaves, structure = jax.tree.flatten(like.slopes)
    if len(leaves) != len(found_pieces):
        raise NoProgrammeError
    slopes = structure.unflatten(
        [
            # A piece that is the same for all steps of a scan is written once.
            np.broadcast_to(weights(piece), np.shape(leaf))
            for piece, leaf in zip(found_pieces, leaves, strict=True)
        ]
    )
    sides = Sides(
        tuple(
            multipliers(row).reshape(np.shape(l))
            for row, l in zip(w.constraints, like.sides.constraints, strict=False)
        ),
        tuple(order) if like.sides.order else (),
    )
    made = Found(inputs, tuple(map(value, w.blocks)), slopes, sides)
    point = like.point
    arranged = Found(point.inputs, point.fractions, like.slopes, like.sides)
    return jax.tree.map(lambda new, old: np.asarray(new, np.asarray(old).dtype), made, arranged)
