"""Sums, products, reductions, activations and maxima: what ONNX operators make of what they read.

Operators that move entries are in moves.py, those with windows in windows.py, those made of others
in composed.py, and activations that are spelt out as products in patterns.py.
"""

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb

from stagecert_check import (
    branches,  # noqa: F401  (these register their operators)
    composed,  # noqa: F401
    linear,
    moves,  # noqa: F401
    patterns,
    reductions,  # noqa: F401
    windows,  # noqa: F401
)
from stagecert_check.constants import balls, gemm, larger, settled
from stagecert_check.functions import Refused, Value, activation_of, maximum
from stagecert_check.graph import Call, handles

# -- sums and products -----------------------------------------------------------------------------


@handles("Add", "Sub", "Sum", "Mean")
def _sum(call: Call):
    signs = (1, -1) if call.operator == "Sub" else (1,) * len(call.items)
    total = added(call, list(zip(call.items, signs, strict=True)))
    if call.operator == "Mean":
        total = call.scale(total, settled(1 / arb(len(call.items))))
    return total


def added(call: Call, items: list[tuple[Any, int]]) -> Value:
    """The sum of variables and constants, each times its sign; constants are added up first."""
    variables = [(x, sign) for x, sign in items if isinstance(x, Value)]
    constants = [
        settled(balls(x) * sign) if sign < 0 else x for x, sign in items if not isinstance(x, Value)
    ]
    if any(not isinstance(x, np.ndarray) or x.dtype not in (np.float64, object) for x in constants):
        raise Refused("adds something that is no floating-point number")
    shape = np.broadcast_shapes(*(x.shape for x, _ in items))
    terms = [call.broadcast(x, shape) for x, _ in variables]
    total = terms[0]
    if len(terms) > 1:
        total = call.apply(linear.Sum([s for _, s in variables]), *terms, shape=shape)
    elif variables[0][1] < 0:
        total = call.negated(total)
    if constants:
        total = call.shift(total, _total(constants))
    return total


def _total(constants: list[np.ndarray]) -> np.ndarray:
    if len(constants) == 1:
        return constants[0]
    return settled(sum(balls(x) for x in constants[1:]) + balls(constants[0]))


@handles("Mul")
def _mul(call: Call):
    x, y = call.items
    if isinstance(x, Value) and isinstance(y, Value):
        return patterns.product(call, x, y)
    k = 0 if isinstance(x, np.ndarray) else 1
    return call.scale(call.value(1 - k), call.floats(k))


@handles("Div")
def _div(call: Call):
    x, y = call.items
    if isinstance(y, Value):
        return patterns.quotient(call, x if isinstance(x, Value) else call.floats(0), y)
    if any(not ball != 0 for ball in balls(call.floats(1)).flat):
        raise Refused("divides by zero")
    number = 1 / Fraction(y.item()) if y.size == 1 and y.dtype == np.float64 else None
    return call.scale(x, settled(1 / balls(y)), number)


@handles("Neg")
def _neg(call: Call):
    return call.negated(call.value())


@handles("MatMul")
def _matmul(call: Call):
    return matrix_product(call, *call.items)


def matrix_product(call: Call, a: Any, b: Any) -> Value:
    """a @ b."""
    if isinstance(a, Value) and isinstance(b, Value):
        return _of_variables(call, a, b)
    left = not isinstance(a, Value)
    if (a if left else b).dtype not in (np.float64, object):
        raise Refused("needs weights that are floating-point numbers")
    a, b, drop = _matrices(call, a, b)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    x, constant = (b, a) if left else (a, b)
    weights, loose = call.weights(constant)
    x = call.broadcast(x, (*batch, *x.shape[-2:]))
    while weights.ndim > 2 and len(weights) == 1:
        weights = weights[0]
    shape = (*batch, a.shape[-2], b.shape[-1])
    made = call.apply(linear.MatMul(weights, left, loose), x, shape=shape)
    return call.move(lambda v: np.squeeze(v, tuple(drop)), made) if drop else made


def _matrices(call: Call, a: Any, b: Any) -> tuple[Any, Any, list[int]]:
    """Factors as matrices: vectors are one row or column, which the result does not have."""
    if not a.shape or not b.shape:
        raise Refused("multiplies a single number")
    drop = [k for k, x in ((-2, a), (-1, b)) if len(x.shape) == 1]
    a = call.move(lambda v: v[None], a) if len(a.shape) == 1 else a
    b = call.move(lambda v: v[:, None], b) if len(b.shape) == 1 else b
    if a.shape[-1] != b.shape[-2]:
        raise Refused(f"multiplies shapes {a.shape} and {b.shape}")
    return a, b, drop


def _of_variables(call: Call, a: Value, b: Value) -> Value:
    """a @ b of two variables: all products of entries, added up."""
    a, b, drop = _matrices(call, a, b)
    a = call.move(lambda v: v[..., :, None, :], a)
    b = call.move(lambda v: np.swapaxes(v, -1, -2)[..., None, :, :], b)
    products = patterns.multiplied(call, a, b)
    axis, shape = len(products.shape) - 1, products.shape[:-1]
    total = call.apply(linear.Reduce([axis], products.shape), products, shape=(*shape, 1))
    # Rows or columns of vectors are gone again.
    return call.move(lambda v: np.squeeze(v[..., 0], tuple(drop)) if drop else v[..., 0], total)


@handles("Gemm")
def _gemm(call: Call):
    a, b, c = (call.item(k) for k in range(3))
    beta = arb(call.get("beta", 1.0))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        product = settled(gemm(call, call.floats(0), call.floats(1)))
    else:
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise Refused("needs matrices")
        flips = (call.get("transA", 0), call.get("transB", 0))
        a, b = (call.move(np.transpose, x) if f else x for x, f in zip((a, b), flips, strict=True))
        product = call.scale(matrix_product(call, a, b), settled(arb(call.get("alpha", 1.0))))
    if c is None or beta == 0:
        return product
    if np.broadcast_shapes(product.shape, c.shape) != product.shape:
        raise Refused("adds a matrix of another shape")
    if isinstance(c, Value):
        c = call.scale(c, settled(beta))
    else:
        c = settled(balls(call.floats(2)) * beta)
    return added(call, [(product, 1), (c, 1)])


@handles("BatchNormalization")
def _batch_normalization(call: Call):
    call.get("momentum")
    if call.get("training_mode", 0) or call.get("spatial", 1) != 1 or any(call.outputs[1:]):
        raise Refused("is only supported for inference")
    x = call.value()
    parameters = [call.floats(k) for k in range(1, 5)]
    if len(x.shape) < 2 or any(a.shape != x.shape[1:2] for a in parameters):
        raise Refused("needs one scale, bias, mean and variance for each channel")
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    scale, bias, mean, variance = (balls(a.reshape(shape)) for a in parameters)
    spread = variance + arb(call.get("epsilon", float(np.float32(1e-5))))
    if not all(ball > 0 for ball in spread.flat):
        raise Refused("has a variance that is not positive")
    centred = call.shift(x, settled(-mean))
    scaled = call.scale(centred, settled(scale / spread ** arb(0.5)))
    return call.shift(scaled, settled(bias))


@handles("GlobalAveragePool", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "GlobalMaxPool")
def _reduce(call: Call):
    x = call.value()
    rank = len(x.shape)
    if call.operator.startswith("Global"):
        axes, keep = tuple(range(2, rank)), 1
    else:
        axes, keep = call.reduced(rank)
    if not axes:
        return x
    kept = tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    shape = kept if keep else tuple(n for k, n in enumerate(x.shape) if k not in axes)
    if call.operator in ("GlobalMaxPool", "ReduceMax", "ReduceMin"):
        rest = [k for k in range(rank) if k not in axes]
        lengths = [x.shape[k] for k in rest]
        sign = -1 if call.operator == "ReduceMin" else 1
        x = x if sign > 0 else call.negated(x)
        x = call.move(lambda a: np.transpose(a, (*rest, *axes)).reshape(*lengths, -1), x)
        total = call.activate(maximum(), x, lengths)
        total = total if sign > 0 else call.negated(total)
    else:
        total = call.apply(linear.Reduce(axes, x.shape), x, shape=kept)
        if call.operator != "ReduceSum":
            total = call.scale(total, settled(1 / arb(math.prod(x.shape[k] for k in axes))))
    return call.move(lambda a: a.reshape(shape), total)


# -- activations -----------------------------------------------------------------------------------

_SELU = {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}
_PLAIN: dict[str, tuple[str, dict[str, float]]] = {
    "Relu": ("relu", {}),
    "LeakyRelu": ("leaky_relu", {"alpha": float(np.float32(0.01))}),
    "Elu": ("elu", {"alpha": 1.0}),
    "Selu": ("selu", _SELU),
    "Celu": ("celu", {"alpha": 1.0}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": float(np.float32(0.2)), "beta": 0.5}),
    "Softplus": ("softplus", {}),
    "Sigmoid": ("sigmoid", {}),
    "Tanh": ("tanh", {}),
    "HardSwish": ("hard_swish", {}),
    "Mish": ("mish", {}),
    "Softsign": ("softsign", {}),
    "Abs": ("abs", {}),
    "Exp": ("exp", {}),
    "Erf": ("erf", {}),
    "Sin": ("sin", {}),
    "Cos": ("cos", {}),
    "Sqrt": ("sqrt", {}),
    "Reciprocal": ("reciprocal", {}),
    "Floor": ("floor", {}),
    "Ceil": ("ceil", {}),
    "Round": ("round", {}),
    "Sign": ("sign", {}),
}


@handles(*_PLAIN)
def _plain(call: Call):
    kind, defaults = _PLAIN[call.operator]
    settings = {name: float(call.get(name, default)) for name, default in defaults.items()}
    if not all(map(math.isfinite, settings.values())):
        raise Refused("has an attribute that is not finite")
    return call.activate(activation_of(kind, **settings), call.value())


@handles("PRelu")
def _prelu(call: Call):
    x, slope = call.value(), call.floats(1)
    if slope.dtype == object or not np.all(np.isfinite(slope)):
        raise Refused("has slopes that float64 does not hold")
    if np.broadcast_shapes(x.shape, slope.shape) != x.shape:
        raise Refused(f"has slopes of shape {slope.shape} for a tensor of shape {x.shape}")
    return call.activate(activation_of("prelu", slope=np.broadcast_to(slope, x.shape)), x)


@handles("Gelu")
def _gelu(call: Call):
    kinds, approximate = {b"none": "gelu", b"tanh": "gelu_tanh"}, call.get("approximate", b"none")
    if approximate not in kinds:
        raise Refused(f"has an unknown approximation, {approximate!r}")
    return call.activate(activation_of(kinds[approximate]), call.value())


@handles("Swish")
def _swish(call: Call):
    # x sigmoid(alpha x) = silu(alpha x) / alpha
    alpha = arb(call.get("alpha", 1.0))
    if alpha == 0 or not alpha.is_finite():
        raise Refused("needs an alpha that is finite and not zero")
    made = call.activate(activation_of("silu"), call.scale(call.value(), settled(alpha)))
    return call.scale(made, settled(1 / alpha))


@handles("Log")
def _log(call: Call):
    return patterns.logarithm(call, call.value())


@handles("Pow")
def _pow(call: Call):
    if isinstance(call.item(1), Value):
        return _exponential(call, call.floats(0), call.value(1))
    x, exponent = call.value(), call.constant(1)
    if np.broadcast_shapes(x.shape, exponent.shape) != x.shape:
        raise Refused("is not supported where the exponent has more axes than the base")
    if exponent.dtype not in (np.int64, np.float64) or np.any(exponent != exponent.flat[0]):
        raise Refused("needs one exponent for all entries")
    return _raised(call, x, float(exponent.flat[0]))


def _raised(call: Call, x: Value, exponent: float) -> Value:
    """x to the power of a number."""
    if exponent == 0:  # one everywhere, also at zero
        return call.shift(call.scale(x, np.zeros(())), np.ones(()))
    if exponent == 1:
        return x
    if exponent == 2:
        return call.activate(activation_of("square"), x)
    if exponent == 0.5:
        return call.activate(activation_of("sqrt"), x)
    if exponent < 0:
        return call.activate(activation_of("reciprocal"), _raised(call, x, -exponent))
    return call.activate(activation_of("power", exponent=exponent), x)


def _exponential(call: Call, base: np.ndarray, x: Value) -> Value:
    """base ** x = exp(x * log(base))."""
    numbers = balls(base)
    if any(not ball > 0 for ball in numbers.flat):
        raise Refused("needs a base that is positive")
    logarithm: Any = np.frompyfunc(arb.log, 1, 1)
    return call.activate(activation_of("exp"), call.scale(x, settled(logarithm(numbers))))


@handles("Clip")
def _clip(call: Call):
    return _clipped(call, call.value(), *call.bounds())


def _clipped(call: Call, x: Value, low: float, high: float) -> Value:
    if not low <= high or low == math.inf or high == -math.inf:
        raise Refused(f"has the bounds {low} and {high}")
    if low == -math.inf and high == math.inf:
        return x
    if low == 0 and high == math.inf:
        return call.activate(activation_of("relu"), x)
    return call.activate(activation_of("clip", low=low, high=high), x)


@handles("Max", "Min")
def _max(call: Call):
    sign = 1 if call.operator == "Max" else -1
    variables = [x for x in call.items if isinstance(x, Value)]
    constants = [call.floats(k) for k, x in enumerate(call.items) if not isinstance(x, Value)]
    shape = np.broadcast_shapes(*(x.shape for x in call.items))
    bound = None
    if len(constants) == 1:
        bound = constants[0]
    elif constants:
        step: Any = np.frompyfunc(lambda a, b: sign * larger(sign * a, sign * b), 2, 1)
        bound = settled(functools.reduce(step, map(balls, constants)))
    if len(variables) == 1 and bound is None:
        return variables[0]
    single = len(variables) == 1 and shape == variables[0].shape
    if single and bound is not None and bound.size == 1:
        if bound.dtype == object:
            raise Refused("has a bound that float64 does not hold")
        number = float(bound.item())
        ends = (number, math.inf) if sign > 0 else (-math.inf, number)
        return _clipped(call, variables[0], *ends)
    variables = [x if sign > 0 else call.negated(x) for x in variables]
    variables = [call.broadcast(x, shape) for x in variables]
    zero = [] if bound is None else [np.full(shape, -1)]  # a constant is one more column
    stacked = call.move(lambda *arrays: np.stack([*arrays, *zero], axis=-1), *variables)
    if bound is not None:
        column = np.zeros((*shape, len(variables) + 1), bound.dtype)
        column[..., -1] = sign * bound
        stacked = call.shift(stacked, column)
    largest = call.activate(maximum(), stacked, shape)
    return largest if sign > 0 else call.negated(largest)
