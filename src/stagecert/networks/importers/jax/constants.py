"""What a JAX function computes from constants alone: exactly, or enclosed.

JAX would round every step to the type at hand. Bounds hold for the function that is written down,
so its arithmetic on floating-point constants is that of `enclosures`. What JAX only moves, or does
with integers, it may do itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.importers import enclosures
from stagecert.networks.importers.enclosures import Constant, Enclosure, Refused, simplified
from stagecert.networks.importers.onnx.nodes import words

_MOVED = words(
    "reshape squeeze expand_dims broadcast_in_dim transpose slice rev concatenate pad gather "
    "dynamic_slice dynamic_update_slice scatter select_n split tile stack copy copy_p "
    "stop_gradient optimization_barrier device_put sharding_constraint name pvary"
)
# These make numbers of integers, or of nothing.
_EXACT = words("iota convert_element_type")


def array_of(item: Any) -> np.ndarray:
    """A constant as an array; short floating-point types become float32, which loses nothing."""
    array = np.asarray(item)
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float32)  # NumPy does not count all short types as floating
    return array


def computed(equation, operands: Sequence[Any]) -> list:
    """The results of an equation whose operands are all constant."""
    name, params = equation.primitive.name, equation.params
    floating = any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in equation.outvars)
    inexact = any(isinstance(x, Enclosure) for x in operands)
    if not floating and not inexact:
        return bound_to(equation, operands)
    try:
        if name in _MOVED:
            return _moved(equation, operands) if inexact else bound_to(equation, operands)
        if name in _EXACT:
            return [_converted(equation, operands[0])] if inexact else bound_to(equation, operands)
        if name not in _ARITHMETIC:
            raise Refused("is not supported for constants; compute them outside the function")
        constants = [x if isinstance(x, Enclosure) else array_of(x) for x in operands]
        result = _ARITHMETIC[name](params, *constants)
    except Refused as error:
        raise ProblemError(f"The function computes constants by {name}, which {error}.") from error
    shape = tuple(equation.outvars[0].aval.shape)
    assert tuple(result.shape) == shape, (name, result.shape, shape)
    return [result]


def bound_to(equation, operands) -> list:
    """The results of an equation as JAX computes them."""
    made = equation.primitive.bind(*operands, **equation.params)
    return list(made) if equation.primitive.multiple_results else [made]


# Loops over constants that are longer than this are a mistake.
_MOST_STEPS = 10_000


def looped(equation, operands: Sequence[Any], run: Callable[[Any, Sequence[Any]], list]) -> list:
    """The results of a loop over constants, step by step; `run` computes a body."""
    params = equation.params
    if equation.primitive.name == "while":
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        state = list(operands[last:])
        for _ in range(_MOST_STEPS):
            (goes_on,) = run(params["cond_jaxpr"], [*operands[:first], *state])
            if not goes_on:
                return state
            state = run(params["body_jaxpr"], [*operands[first:last], *state])
        raise ProblemError(
            f"The function has a loop over constants of more than {_MOST_STEPS} steps."
        )
    first, length = params["num_consts"], params["length"]
    last = first + params["num_carry"]
    if length > _MOST_STEPS:
        raise ProblemError(f"The function loops over constants for {length} steps.")
    state, made = list(operands[first:last]), []
    order = range(length)[::-1] if params["reverse"] else range(length)
    for k in order:
        rows = [
            x.moved(lambda end, k=k: end[k]) if isinstance(x, Enclosure) else x[k]
            for x in operands[last:]
        ]
        results = run(params["jaxpr"], [*operands[:first], *state, *rows])
        state, more = results[: params["num_carry"]], results[params["num_carry"] :]
        made.append(more)
    made = made[::-1] if params["reverse"] else made
    shapes = [v.aval for v in equation.outvars[params["num_carry"] :]]
    return [*state, *(_stacked([row[k] for row in made], like) for k, like in enumerate(shapes))]


def _stacked(rows: list, like) -> Any:
    if not rows:
        return np.zeros(like.shape, like.dtype)
    if not any(isinstance(row, Enclosure) for row in rows):
        return np.stack([np.asarray(row) for row in rows])
    ends = [
        (row.low, row.high) if isinstance(row, Enclosure) else (array_of(row),) * 2 for row in rows
    ]
    low, high = (np.stack(side) for side in zip(*ends, strict=True))
    return simplified(Enclosure(low, high))


def _moved(equation, operands) -> list:
    with jax.enable_x64(True):
        ends = [
            bound_to(equation, [jnp.asarray(getattr(x, side)) if isinstance(x, Enclosure)
                              else _widened(x) for x in operands])
            for side in ("low", "high")
        ]  # fmt: skip
        return [
            simplified(Enclosure(np.asarray(a), np.asarray(b))) for a, b in zip(*ends, strict=True)
        ]


def _widened(x):
    array = array_of(x)
    return jnp.asarray(array, np.float64 if array.dtype.kind == "f" else None)


def _converted(equation, x: Enclosure) -> Constant:
    kind = equation.outvars[0].aval.dtype
    if not jnp.issubdtype(kind, jnp.floating) or jnp.finfo(kind).bits < 32:
        raise Refused("rounds numbers that are results of a calculation")
    return x


def _dot(params, x: Constant, y: Constant) -> Constant:
    contracted, batches = params["dimension_numbers"]
    if batches[0] or len(contracted[0]) != 1:
        raise Refused("is not supported for constants with batches; compute them outside")

    def moved(a: Constant, axis: int, to: int) -> Constant:
        return enclosures.enclosed(a).moved(lambda end: np.moveaxis(end, axis, to))

    x, y = moved(x, contracted[0][0], -1), moved(y, contracted[1][0], 0)
    length, rows, columns = x.shape[-1], x.shape[:-1], y.shape[1:]
    flat = enclosures.matmul(
        enclosures.enclosed(x).moved(lambda end: end.reshape(-1, length)),
        enclosures.enclosed(y).moved(lambda end: end.reshape(length, -1)),
    )
    return enclosures.enclosed(flat).moved(lambda end: end.reshape(*rows, *columns))


def _exact(function: Callable) -> Callable[..., Constant]:
    return lambda params, *operands: enclosures.monotone(function, *operands)


def _entrywise(function: Callable[..., Constant]) -> Callable[..., Constant]:
    return lambda params, *operands: function(*operands)


def _power(params, x: Constant, *exponent: Constant) -> Constant:
    number = params.get("y") if not exponent else enclosures.uniform(exponent[0])
    if number is None:
        raise Refused("is not supported for constants with several exponents")
    return enclosures.power(x, float(number))


_ARITHMETIC: dict[str, Callable[..., Constant]] = {
    "add": _entrywise(enclosures.add),
    "add_any": _entrywise(enclosures.add),
    "sub": _entrywise(lambda x, y: enclosures.add(x, enclosures.negative(y))),
    "mul": _entrywise(enclosures.multiply),
    "div": _entrywise(enclosures.divide),
    "neg": _entrywise(enclosures.negative),
    "abs": _entrywise(enclosures.absolute),
    "sqrt": _entrywise(enclosures.root),
    "rsqrt": _entrywise(lambda x: enclosures.reciprocal(enclosures.root(x))),
    "square": _entrywise(lambda x: enclosures.multiply(x, x)),
    "integer_pow": _power,
    "pow": _power,
    "max": _exact(np.maximum),
    "min": _exact(np.minimum),
    "clamp": _exact(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "sign": _exact(np.sign),
    "floor": _exact(np.floor),
    "ceil": _exact(np.ceil),
    "reduce_sum": lambda params, x: enclosures.total(x, params["axes"], False),
    "reduce_prod": lambda params, x: enclosures.product(x, params["axes"], False),
    "reduce_max": lambda params, x: enclosures.monotone(
        lambda end: np.max(end, axis=tuple(params["axes"])), x
    ),
    "reduce_min": lambda params, x: enclosures.monotone(
        lambda end: np.min(end, axis=tuple(params["axes"])), x
    ),
    "dot_general": _dot,
    **{
        name: _entrywise(lambda x, kind=kind: enclosures.function(kind, x))
        for name, kind in (
            ("exp", "exp"), ("expm1", "expm1"), ("log", "log"), ("log1p", "log1p"),
            ("erf", "erf"), ("erfc", "erfc"), ("sin", "sin"), ("cos", "cos"), ("tanh", "tanh"),
            ("logistic", "sigmoid"),
        )
    },
}  # fmt: skip
