"""Arithmetic on constants: what the model computes from stored numbers alone.

A constant is a NumPy array of truth values, of int64, of float64 (these numbers are meant), or,
where float64 does not hold a result exactly, an object array of Arb balls that contain it.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from flint import arb

from stagecert_check.functions import Refused
from stagecert_check.numbers import EPS

MOST_COMPUTED = 2**22  # entries of constants that a model may compute: balls are slow
_MOST_LOOSE = 1024
_WHOLE = 2**31  # integers beyond this may wrap around in some type: they are not computed with


def balls(array: np.ndarray) -> np.ndarray:
    """The numbers of a constant as balls."""
    if array.dtype == np.float64 and not np.all(np.isfinite(array)):
        raise Refused("reads constants that are not finite")
    if array.dtype not in (np.float64, np.int64, object):
        raise Refused("needs numbers")
    return _each(lambda x: x if isinstance(x, arb) else arb(x), array)


def near(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Float64 numbers near a constant's, and by how many EPS these are off at most, relatively."""
    numbers, loose = _each(_double, balls(array)).astype(np.float64), 0
    if not np.all(np.isfinite(numbers)):
        raise Refused("computes a constant that is too large")
    if array.dtype == object:
        for ball, number in zip(array.flat, numbers.flat, strict=True):
            while not abs(ball - arb(number)) <= loose * EPS * abs(arb(number)):
                loose = 2 * loose or 1
                if loose > _MOST_LOOSE:
                    raise Refused("computes a constant that is not known precisely enough")
    return numbers, loose


def settled(array: Any) -> np.ndarray:
    """Whole numbers as int64, balls as float64 where these hold all of them exactly."""
    array = np.asarray(array, None if isinstance(array, np.ndarray) else object)
    if array.dtype != object:
        return array
    if all(isinstance(x, int) for x in array.flat):
        if any(abs(x) >= _WHOLE for x in array.flat):
            raise Refused("computes integers that are too large")
        return array.astype(np.int64)
    if not all(ball.is_finite() for ball in array.flat):
        raise Refused("computes constants that are not finite")
    numbers = _each(_double, array).astype(np.float64)
    exact = all(arb(n) == ball for n, ball in zip(numbers.flat, array.flat, strict=True))
    return numbers if exact else array


def _double(ball: arb) -> float:
    try:
        return float(ball.mid())
    except OverflowError:
        return math.inf


def _each(function: Callable[..., Any], *arrays: Any) -> np.ndarray:
    """A function of single entries; the result is an object array, also if it is empty or 0-d."""
    found = np.frompyfunc(function, len(arrays), 1)(*arrays)
    return np.asarray(found, dtype=object)


# -- functions of constants ------------------------------------------------------------------------


def _quotient(a: Any, b: Any):
    if isinstance(a, arb):
        return a / b
    if b == 0 or (a % b and (a < 0) != (b < 0)):
        raise Refused("divides integers by zero, or rounds a negative quotient")
    return a // b


def _power(a: Any, b: Any):
    whole = b if isinstance(b, int) else b.unique_fmpz() if b.is_integer() else None
    if whole is None and isinstance(a, int):
        raise Refused("rounds powers of integers")
    if whole is None:
        return a**b
    if abs(whole) > 1000 or (isinstance(a, int) and whole < 0):
        raise Refused(f"has the exponent {whole}")
    return a ** int(whole)


def larger(a: Any, b: Any):
    """The larger of two numbers."""
    return a.max(b) if isinstance(a, arb) else max(a, b)


def _softplus(a: arb) -> arb:
    return a.exp().log1p()


def _sigmoid(a: arb) -> arb:
    return 1 / (1 + (-a).exp())


# Functions of single entries: of integers and balls, and of balls only.
_NUMBERS: dict[str, Any] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _quotient,
    "Pow": _power, "Neg": operator.neg, "Abs": abs, "Relu": lambda a: larger(a, 0 * a),
}  # fmt: skip
_BALLS: dict[str, Any] = {
    "Sqrt": arb.sqrt, "Exp": arb.exp, "Log": arb.log, "Erf": arb.erf, "Sin": arb.sin,
    "Cos": arb.cos, "Tanh": arb.tanh, "Sigmoid": _sigmoid, "Softplus": _softplus,
    "Reciprocal": lambda a: 1 / a,
}  # fmt: skip
# Functions of several constants, from left to right.
_REPEATED: dict[str, Any] = {
    "Sum": operator.add, "Mean": operator.add, "Max": larger, "Min": lambda a, b: -larger(-a, -b),
}  # fmt: skip
# Functions of whole arrays that jump: balls are refused.
_EXACT: dict[str, tuple[Any, str]] = {
    "Equal": (np.equal, "bif"), "Less": (np.less, "if"), "LessOrEqual": (np.less_equal, "if"),
    "Greater": (np.greater, "if"), "GreaterOrEqual": (np.greater_equal, "if"),
    "And": (np.logical_and, "b"), "Or": (np.logical_or, "b"), "Xor": (np.logical_xor, "b"),
    "Not": (np.logical_not, "b"), "Floor": (np.floor, "f"), "Ceil": (np.ceil, "f"),
    "Round": (np.round, "f"), "Sign": (np.sign, "if"),
}  # fmt: skip
_REDUCED: dict[str, Any] = {
    "ReduceSum": operator.add, "ReduceMean": operator.add, "ReduceProd": operator.mul,
    "ReduceMax": larger, "ReduceMin": _REPEATED["Min"],
}  # fmt: skip

FOLDED = frozenset(
    [*_NUMBERS, *_BALLS, *_REPEATED, *_EXACT, *_REDUCED, "MatMul", "Gemm", "Clip", "Mod", "Where"]
)


def fold(call: Any) -> np.ndarray:
    """What a node makes of constants; the operator is one of FOLDED."""
    kind, items = call.operator, [x for x in call.items if x is not None]
    if kind in _REDUCED or kind == "Clip":  # the others are parameters
        items = items[:1]
    if any(x.dtype == np.float64 and not np.all(np.isfinite(x)) for x in items):
        raise Refused("computes with numbers that are not finite")
    call.reader.compute(max(sum(x.size for x in items), _size(kind, items)))
    if kind in _EXACT:
        function, kinds = _EXACT[kind]
        types = {x.dtype for x in items}
        if len(types) != 1 or items[0].dtype.kind not in kinds:
            raise Refused("is not supported for constants of these types")
        return np.asarray(function(*items))
    if kind == "Where":
        kinds = {x.dtype.kind for x in items[1:]}
        if items[0].dtype != bool or not (len(kinds) == 1 or kinds == {"f", "O"}):
            raise Refused("needs truth values, and two constants of one type")
        items[1:] = [balls(x) for x in items[1:]] if "O" in kinds else items[1:]
        return settled(np.where(*items))
    if kind == "Mod":
        if call.get("fmod", 0) or any(x.dtype != np.int64 for x in items) or not items[1].all():
            raise Refused("is only supported for integers")
        return np.mod(*items)
    if any(not x.size for x in items):
        raise Refused("computes with empty constants")
    whole = all(x.dtype == np.int64 for x in items)
    if not whole and kind != "Pow" and any(x.dtype == np.int64 for x in items):
        raise Refused("mixes integers and floating-point numbers")
    if whole and (kind in _BALLS or kind in ("Clip", "Mean", "ReduceMean", "MatMul", "Gemm")):
        raise Refused("needs floating-point numbers")
    items = [x.astype(object) if x.dtype == np.int64 else balls(x) for x in items]
    return settled(_computed(call, kind, items))


def _size(kind: str, items: list[np.ndarray]) -> int:
    """How many steps a result takes."""
    if kind in ("MatMul", "Gemm"):
        return math.prod(x.size for x in items[:2]) // max(items[0].shape[-1], 1)
    return math.prod(np.broadcast_shapes(*(x.shape for x in items)))


def _computed(call: Any, kind: str, items: list[np.ndarray]) -> Any:
    if kind in _NUMBERS or kind in _BALLS:
        return _each((_NUMBERS | _BALLS)[kind], *items)
    if kind in _REPEATED:
        found = functools.reduce(functools.partial(_each, _REPEATED[kind]), items)
        return found / len(items) if kind == "Mean" else found
    if kind in _REDUCED:
        axes, keep = call.reduced(items[0].ndim)
        count = math.prod(items[0].shape[k] for k in axes)
        if not count:
            raise Refused("reduces an empty axis")
        step = np.frompyfunc(_REDUCED[kind], 2, 1)
        found = items[0]
        for axis in axes[::-1]:  # a function of two objects reduces one axis at a time
            found = np.asarray(step.reduce(found, axis=axis, keepdims=bool(keep)), dtype=object)
        return found / count if kind == "ReduceMean" else found
    if kind == "MatMul":
        return np.matmul(*items)
    if kind == "Gemm":
        return gemm(call, *items)
    low, high = call.bounds()
    found = items[0]
    if low > -math.inf:
        found = _each(lambda a: larger(a, arb(low)), found)
    if high < math.inf:
        found = _each(lambda a: -larger(-a, arb(-high)), found)
    return found


def gemm(call: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
    """alpha * a @ b + beta * c."""
    alpha, beta = (arb(call.get(name, 1.0)) for name in ("alpha", "beta"))
    a, b = (x.T if call.get(flip, 0) else x for x, flip in ((a, "transA"), (b, "transB")))
    if a.ndim != 2 or b.ndim != 2:
        raise Refused("needs matrices")
    product = np.matmul(balls(a), balls(b)) * alpha
    if c is None:
        return product
    if np.broadcast_shapes(product.shape, c.shape) != product.shape:
        raise Refused("adds a matrix of another shape")
    return product + balls(c) * beta
