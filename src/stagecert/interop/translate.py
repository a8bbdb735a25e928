"""JAX functions as CVXPY expressions.

A function is traced, and its equations are taken over one by one. Values are vectors (arrays in C
order) of one of a few kinds: constants, affine functions of the variables (as sparse matrices),
expressions of CVXPY, and a few intermediate things that only mean something together with what
comes next, such as the shifted exponentials of a log-sum-exp.

Any primitive that is affine in its unknown arguments needs no code of its own: its matrix is what
it does to unit vectors. What cannot be taken over becomes a `Gap`, which is an error only if the
result depends on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sparse

from stagecert import jaxprs
from stagecert.errors import ProblemError
from stagecert.pieces import max_p, pair_p

COLUMNS_AT_ONCE = 256


@dataclass
class Affine:
    """matrices[variable] @ variable, added up, plus a constant."""

    shape: tuple[int, ...]
    matrices: dict[int, Any]
    constant: np.ndarray


@dataclass
class Bent:
    """A CVXPY expression.

    squares: a matrix whose rows' sums of squares it is, if any; log_of: whose logarithm it is.
    """

    shape: tuple[int, ...]
    expression: Any
    squares: Any = None
    log_of: Affine | None = None


@dataclass
class Product:
    """Entrywise products of two affine values."""

    shape: tuple[int, ...]
    one: Affine
    two: Affine


@dataclass
class Shift:
    """Some number that a stable log-sum-exp subtracts first and adds again last."""

    shape: tuple[int, ...]


@dataclass
class Shifted:
    """`rows` less a shift; exponentials of that; their sums; the logarithms of those."""

    shape: tuple[int, ...]
    stage: str  # "less", "exp", "sum", "log"
    rows: Any


@dataclass
class Gap:
    """What could not be taken over, and why."""

    shape: tuple[int, ...]
    why: str


Value = Any  # np.ndarray or one of the above


def _size(shape) -> int:
    return int(np.prod(shape, dtype=int))


def matrix_of(function: Callable, shape: tuple[int, ...]) -> sparse.csr_array:
    """The matrix of a linear JAX function of one array; arrays are vectors in C order."""
    size = _size(shape)
    mapped = jax.vmap(function)
    columns = []
    at_once = min(COLUMNS_AT_ONCE, size)
    for begin in range(0, size, max(at_once, 1)):
        count = min(at_once, size - begin)
        units = np.zeros((at_once, size))
        units[np.arange(count), begin + np.arange(count)] = 1
        out = np.asarray(mapped(jnp.asarray(units.reshape(at_once, *shape))))
        columns.append(sparse.csr_array(out.reshape(at_once, -1)[:count]))
    if not columns:
        rows = _size(jax.eval_shape(function, jnp.zeros(shape)).shape)
        return sparse.csr_array((rows, 0))
    return sparse.csr_array(sparse.vstack(columns).T)


class Translator:
    """Takes functions of some variables over.

    Args:
        variables: all variables, as CVXPY vectors; affine values refer to them by position.
    """

    def __init__(self, variables: list[cp.Variable]):
        self.variables = variables

    def variable(self, index: int, shape: tuple[int, ...]) -> Affine:
        """A variable as a value of some shape."""
        size = _size(shape)
        return Affine(shape, {index: sparse.eye_array(size, format="csr")}, np.zeros(size))

    def expression(self, value: Value, what: str):
        """A value as a CVXPY vector; raises ProblemError, naming `what`, if it has none."""
        if isinstance(value, np.ndarray):
            return cp.Constant(value.ravel())
        if isinstance(value, Affine):
            return self._affine(value)
        if isinstance(value, Product):
            value = _squares_of(self, value)
        if isinstance(value, Bent):
            return value.expression
        why = value.why if isinstance(value, Gap) else "a log-sum-exp is not finished"
        raise ProblemError(
            f"{what} cannot be written in CVXPY: {why}. Only functions made of affine parts, "
            "maxima and minima, absolute values, squares and quadratic forms, norms, exp, log, "
            "softplus and log-sum-exp can be exported; other JAX functions cannot."
        )

    def _affine(self, value: Affine):
        total = cp.Constant(value.constant)
        for index, matrix in value.matrices.items():
            if matrix.nnz:
                total = total + matrix @ self.variables[index]
        return total

    def function(self, function: Callable, arguments: Any) -> list[Value]:
        """The outputs of a JAX function; `arguments` is a tree of values and arrays."""
        is_value = lambda x: isinstance(x, (Affine, np.ndarray))  # noqa: E731
        leaves, structure = jax.tree.flatten(arguments, is_leaf=is_value)
        likes = [jax.ShapeDtypeStruct(leaf.shape, jnp.float64) for leaf in leaves]
        closed = jax.make_jaxpr(lambda *xs: function(*jax.tree.unflatten(structure, xs)))(*likes)
        return jaxprs.walk(closed.jaxpr, closed.consts, leaves, self._equation, np.asarray)

    def _equation(self, equation, values: list[Value]) -> list[Value] | None:
        name = equation.primitive.name
        if all(isinstance(value, np.ndarray) for value in values):
            return [np.asarray(x) for x in _bind(equation, values)]
        shape = tuple(equation.outvars[0].aval.shape)
        call = jaxprs.body_of_call(equation)
        if call is not None:
            names = [inner.primitive.name for inner in call[0].eqns]
            is_known = names == _LOG_ADD_EXP and len(values) == 2
            return [self._log_add_exp(shape, *values)] if is_known else None
        special = _SPECIAL.get(equation.primitive, _SPECIAL.get(name))
        if special is not None:
            found = special(self, equation, shape, *values)
            if found is not None:
                return [found]
        values = [_squares_of(self, v) if isinstance(v, Product) else v for v in values]
        gap = next((value for value in values if isinstance(value, Gap)), None)
        if gap is not None:
            return [Gap(tuple(v.aval.shape), gap.why) for v in equation.outvars]
        unknown = [k for k, value in enumerate(values) if not isinstance(value, np.ndarray)]
        plain = all(isinstance(values[k], (Affine, Bent)) for k in unknown)
        rounded = any(not jnp.issubdtype(v.aval.dtype, jnp.floating) for v in equation.outvars)
        if plain and not rounded and (name in _LINEAR or _is_product(name, unknown)):
            return self._linear(equation, values, unknown)
        why = f"it uses '{name}' of something that depends on the variables"
        return [Gap(tuple(v.aval.shape), why) for v in equation.outvars]

    def _linear(self, equation, values, unknown) -> list[Value]:
        """An equation that is affine in its unknown arguments together."""
        zeros = [np.zeros(v.shape) if k in unknown else v for k, v in enumerate(values)]
        at_zero = [np.asarray(x, float) for x in _bind(equation, zeros)]
        outputs = []
        for number, constant in enumerate(at_zero):
            parts = []
            for k in unknown:

                def alone(x, k=k, number=number, constant=constant):
                    given = [x if j == k else jnp.asarray(z) for j, z in enumerate(zeros)]
                    return _bind(equation, given)[number] - constant

                matrix = _short_cut(equation.primitive.name, alone, values[k].shape, constant.size)
                parts.append((matrix, values[k]))
            outputs.append(self._sum(constant.shape, parts, constant.ravel()))
        return outputs

    def _sum(self, shape, parts, constant: np.ndarray) -> Value:
        if all(isinstance(value, Affine) for _, value in parts):
            matrices: dict[int, Any] = {}
            for matrix, value in parts:
                constant = constant + matrix @ value.constant
                for index, other in value.matrices.items():
                    product = sparse.csr_array(matrix @ other)
                    matrices[index] = matrices[index] + product if index in matrices else product
            return Affine(shape, matrices, constant)
        total = cp.Constant(constant)
        for matrix, value in parts:
            total = total + matrix @ self.expression(value, "a part")
        return Bent(shape, total)

    def _log_add_exp(self, shape, a, b) -> Value:
        spread = [self._broadcast(x, shape) for x in (a, b)]
        if not all(isinstance(x, (np.ndarray, Affine, Bent)) for x in spread):
            return Gap(shape, "it uses 'logaddexp' of something that could not be taken over")
        one, two = (self.expression(x, "an argument of logaddexp") for x in spread)
        return Bent(shape, cp.logistic(one - two) + two)

    def _broadcast(self, value: Value, shape) -> Value:
        if value.shape == shape or not isinstance(value, (np.ndarray, Affine)):
            return value
        if isinstance(value, np.ndarray):
            return np.broadcast_to(value, shape)
        matrix = matrix_of(lambda x: jnp.broadcast_to(x, shape), value.shape)
        return self._sum(shape, [(matrix, value)], np.zeros(_size(shape)))


def _short_cut(name: str, function: Callable, shape, rows: int) -> sparse.csr_array:
    """The matrix of a linear primitive, from one evaluation where that is enough."""
    size = _size(shape)
    if name in _MOVES:
        # Entries are numbered from 1, so that zero means none of them.
        numbers = np.arange(1, size + 1, dtype=float).reshape(shape)
        found = np.asarray(function(jnp.asarray(numbers))).ravel().astype(int)
        at = np.flatnonzero(found)
        return sparse.csr_array((np.ones(len(at)), (at, found[at] - 1)), shape=(rows, size))
    if name in _ENTRYWISE and size in (rows, 1):
        scale = np.asarray(function(jnp.ones(shape))).ravel()
        columns = np.arange(rows) if size == rows else np.zeros(rows, int)
        return sparse.csr_array((scale, (np.arange(rows), columns)), shape=(rows, size))
    return matrix_of(function, shape)


def _bind(equation, values) -> list:
    return jaxprs.bind(equation, list(map(jnp.asarray, values)))


# What jax.numpy.logaddexp is made of; softplus calls it with zero.
_LOG_ADD_EXP = ["max", "sub", "ne", "add", "abs", "neg", "exp", "log1p", "add", "select_n"]

# Each entry is an entry of an argument, or a constant.
_MOVES = {
    "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "concatenate",
    "pad", "rev", "copy", "copy_p", "split", "stack", "gather", "dynamic_slice", "select_n",
}  # fmt: skip

# Each entry depends on the same entry of an argument only.
_ENTRYWISE = {"neg", "add", "add_any", "sub", "mul", "div", "convert_element_type"}

# Affine in all arguments that are not constants.
_LINEAR = {
    "neg", "add", "add_any", "sub", "reshape", "transpose", "squeeze", "expand_dims",
    "broadcast_in_dim", "slice", "concatenate", "stack", "pad", "rev", "reduce_sum", "cumsum",
    "copy", "copy_p", "convert_element_type", "reduce_precision", "split", "optimization_barrier",
}  # fmt: skip


def _is_product(name: str, unknown: list[int]) -> bool:
    """Whether a primitive is affine in these arguments if the others are constants."""
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return len(unknown) == 1
    if name in ("div", "gather", "dynamic_slice", "reduce_window_sum"):
        return unknown == [0]  # not in what it is divided by, nor in indices
    return name == "select_n" and 0 not in unknown  # the first argument chooses


# -- primitives that are not affine ----------------------------------------------------------------


def _unary(atom: Callable) -> Callable:
    def translate(self: Translator, equation, shape, x):
        if not isinstance(x, (Affine, Bent)):
            return None
        return Bent(shape, atom(self.expression(x, "an argument")))

    return translate


def _pairwise(atom: Callable, neutral: float) -> Callable:
    def translate(self: Translator, equation, shape, a, b):
        for one, two in ((a, b), (b, a)):
            # A log-sum-exp takes the maximum of its largest entry and minus infinity.
            if isinstance(one, np.ndarray) and np.all(one == neutral) and two.shape == shape:
                return two
        spread = [self._broadcast(x, shape) for x in (a, b)]
        if not all(isinstance(x, (np.ndarray, Affine, Bent)) for x in spread):
            return None
        return Bent(shape, atom(*(self.expression(x, "an argument") for x in spread)))

    return translate


def _rows(shape, axes) -> np.ndarray:
    """Which entries are combined when axes are reduced: one row for each that remains."""
    kept = [k for k in range(len(shape)) if k not in axes]
    order = np.arange(_size(shape)).reshape(shape).transpose(*kept, *axes)
    return order.reshape(_size([shape[k] for k in kept]), -1)


def _in_rows(expression, rows: np.ndarray):
    return cp.reshape(expression[rows.ravel()], rows.shape, order="C")


def _reduced(atom: Callable) -> Callable:
    def translate(self: Translator, equation, shape, x):
        if not isinstance(x, (Affine, Bent)):
            return None
        axes = equation.params.get("axes", (len(x.shape) - 1,))
        table = _in_rows(self.expression(x, "an argument"), _rows(x.shape, axes))
        return Bent(shape, atom(table, axis=1))

    return translate


def _same(one: Affine, two: Affine) -> bool:
    return one is two or (
        one.matrices.keys() == two.matrices.keys()
        and np.array_equal(one.constant, two.constant)
        and all((one.matrices[k] != two.matrices[k]).nnz == 0 for k in one.matrices)
    )


def _square(self: Translator, shape, x: Affine) -> Bent:
    root = self.expression(x, "an argument")
    return Bent(shape, cp.square(root), cp.reshape(root, (_size(shape), 1), order="C"))


def _multiplied(self: Translator, equation, shape, a, b):
    if isinstance(a, Affine) and isinstance(b, Affine) and a.shape == b.shape:
        return _square(self, shape, a) if _same(a, b) else Product(shape, a, b)
    for one, two in ((a, b), (b, a)):
        of = two.log_of if isinstance(two, Bent) else None
        if of is not None and isinstance(one, Affine) and _same(one, of):
            return Bent(shape, -cp.entr(self.expression(one, "an argument")))
    return None


def _power(self: Translator, equation, shape, x):
    exponent = equation.params["y"]
    if exponent == 2 and isinstance(x, Affine):
        return _square(self, shape, x)
    if not isinstance(x, (Affine, Bent)) or exponent == 1:
        return x if exponent == 1 else None
    return Bent(shape, cp.power(self.expression(x, "an argument"), exponent))


def _squared(self: Translator, equation, shape, x):
    return _square(self, shape, x) if isinstance(x, Affine) else _unary(cp.square)(
        self, equation, shape, x
    )  # fmt: skip


def _quadratic(self: Translator, one: Affine, two: Affine) -> Value:
    """one . two as a quadratic form, if that is convex or concave."""
    if _same(one, two):
        root = self.expression(one, "an argument")
        return Bent((), cp.reshape(cp.sum_squares(root), (1,), order="C"),
                    cp.reshape(root, (1, root.size), order="C"))  # fmt: skip
    keys = sorted({*one.matrices, *two.matrices})
    sizes = [self.variables[k].size for k in keys]

    def whole(value: Affine):
        rows = len(value.constant)
        blocks = [
            value.matrices.get(k, sparse.csr_array((rows, n)))
            for k, n in zip(keys, sizes, strict=True)
        ]
        return sparse.hstack(blocks, format="csr")

    a, b = whole(one), whole(two)
    form = (a.T @ b).toarray()
    form = 0.5 * (form + form.T)
    linear = b.T @ one.constant + a.T @ two.constant
    x = cp.hstack([self.variables[k] for k in keys])
    eigenvalues = np.linalg.eigvalsh(form)
    slack = 1e-12 * max(np.abs(eigenvalues).max(initial=0), 1e-300)
    if eigenvalues.min(initial=0) >= -slack:
        bent = cp.quad_form(x, cp.psd_wrap(form))
    elif eigenvalues.max(initial=0) <= slack:
        bent = -cp.quad_form(x, cp.psd_wrap(-form))
    else:
        return Gap((), "a quadratic form is neither convex nor concave")
    total = bent + linear @ x + float(one.constant @ two.constant)
    return Bent((), cp.reshape(total, (1,), order="C"))


def _squares_of(self: Translator, value: Product) -> Value:
    """Products x_i * (c_i x_i + d_i): each a quadratic form of its own, where there are few."""
    n = _size(value.shape)
    terms = []
    for k in range(n):
        pick = sparse.csr_array(([1.0], ([0], [k])), shape=(1, n))
        parts = [self._sum((), [(pick, x)], np.zeros(1)) for x in (value.one, value.two)]
        form = _quadratic(self, *parts)
        if isinstance(form, Gap):
            return Gap(value.shape, "a product of two different functions is not convex")
        terms.append(form.expression)
    return Bent(value.shape, cp.hstack(terms))


def _added(self: Translator, equation, shape, x):
    axes = equation.params["axes"]
    if isinstance(x, Product):
        if shape == ():
            return _quadratic(self, x.one, x.two)
        x = _squares_of(self, x)
        return x if isinstance(x, Gap) else self._linear(equation, [x], [0])[0]
    if isinstance(x, Shifted) and x.stage == "exp":
        expression, of_shape = x.rows
        return Shifted(shape, "sum", _in_rows(expression, _rows(of_shape, axes)))
    if isinstance(x, Bent) and x.squares is not None and x.squares.shape[1] == 1:
        rows = _rows(x.shape, axes)
        (found,) = self._linear(equation, [x], [0])
        root = cp.reshape(x.squares, (x.squares.size,), order="C")
        return Bent(shape, found.expression, _in_rows(root, rows))
    return None


def _dotted(self: Translator, equation, shape, a, b):
    if not (isinstance(a, Affine) and isinstance(b, Affine)):
        return None
    (one, two), batch = equation.params["dimension_numbers"]
    vectors = len(a.shape) == 1 and len(b.shape) == 1 and (tuple(one), tuple(two)) == ((0,), (0,))
    return _quadratic(self, a, b) if vectors and not batch[0] else None


def _root(self: Translator, equation, shape, x):
    if isinstance(x, Bent) and x.squares is not None:
        return Bent(shape, cp.norm(x.squares, 2, axis=1))
    return _unary(cp.sqrt)(self, equation, shape, x)


def _stopped(self: Translator, equation, shape, x):
    return x if isinstance(x, Affine) else Shift(shape)


def _minus(self: Translator, equation, shape, a, b):
    if isinstance(b, Shift) and isinstance(a, (Affine, Bent)) and a.shape == shape:
        return Shifted(shape, "less", (self.expression(a, "an argument"), a.shape))
    return None


def _plus(self: Translator, equation, shape, a, b):
    for one, two in ((a, b), (b, a)):
        if isinstance(one, Shifted) and one.stage == "log" and isinstance(two, Shift):
            return Bent(shape, cp.log_sum_exp(one.rows, axis=1))
    return None


def _exponential(self: Translator, equation, shape, x):
    if isinstance(x, Shifted) and x.stage == "less":
        return Shifted(shape, "exp", x.rows)
    return _unary(cp.exp)(self, equation, shape, x)


def _logarithm(self: Translator, equation, shape, x):
    if isinstance(x, Shifted) and x.stage == "sum":
        return Shifted(shape, "log", x.rows)
    found = _unary(cp.log)(self, equation, shape, x)
    if isinstance(x, Affine):
        found.log_of = x
    return found


def _magnitude(self: Translator, equation, shape, x):
    if isinstance(x, Shifted) and x.stage == "sum":
        return x  # sums of exponentials are positive
    return _unary(cp.abs)(self, equation, shape, x)


def _moved(self: Translator, equation, shape, x, *rest):
    """Reshaping leaves shifts, and rows that are one entry each, what they are."""
    if isinstance(x, Shift):
        return Shift(shape)
    if isinstance(x, Shifted) and x.stage in ("sum", "log") and _size(shape) == _size(x.shape):
        return Shifted(shape, x.stage, x.rows)
    return None


_SPECIAL: dict[Any, Callable] = {
    max_p: _reduced(cp.max),
    pair_p: _pairwise(cp.maximum, -np.inf),
    "max": _pairwise(cp.maximum, -np.inf),
    "min": _pairwise(cp.minimum, np.inf),
    "reduce_max": _reduced(cp.max),
    "reduce_min": _reduced(cp.min),
    "reduce_sum": _added,
    "abs": _magnitude,
    "exp": _exponential,
    "log": _logarithm,
    "log1p": _unary(lambda x: cp.log(1 + x)),
    "sqrt": _root,
    "square": _squared,
    "integer_pow": _power,
    "mul": _multiplied,
    "dot_general": _dotted,
    "stop_gradient": _stopped,
    "sub": _minus,
    "add": _plus,
    "reshape": _moved,
    "broadcast_in_dim": _moved,
    "squeeze": _moved,
    "expand_dims": _moved,
}
