"""Constants of an ONNX model: stored tensors, and nodes that only read constants.

What is stored is exact, and what only moves is moved by ONNX's own reference. Arithmetic is not
left to anybody who rounds: integers are added up as integers, and floating-point numbers by
`enclosures`, whatever type the model gives them.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import onnx
import onnx.external_data_helper
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from stagecert.networks.importers import enclosures
from stagecert.networks.importers.enclosures import Constant, Enclosure, simplified
from stagecert.networks.importers.onnx.arithmetic import reduced_axes
from stagecert.networks.importers.onnx.nodes import (
    LARGEST,
    LARGEST_COMPUTED,
    Call,
    Item,
    Refused,
    check_size,
    words,
)

_SHORT = ("float16", "bfloat16")
_KNOWN = ("float32", "float64", "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))

_MOVED = words(
    "Concat ConstantOfShape DepthToSpace Expand Flatten Gather GatherElements GatherND Identity "
    "Reshape ScatterND Shape Size Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze "
    "Where"
)
_CASTS = words("Cast CastLike")
# More integers than this take too long one by one.
_MOST_INTEGERS = 2**20


def stored(tensor: onnx.TensorProto) -> np.ndarray:
    """A stored tensor, as precise as it is stored."""
    if any(n < 0 for n in tensor.dims):
        raise Refused("has a tensor with a negative length")
    if math.prod(tensor.dims) > LARGEST:
        raise Refused(f"has a tensor of {math.prod(tensor.dims)} entries, more than {LARGEST}")
    if onnx.external_data_helper.uses_external_data(tensor):
        raise Refused(
            "keeps its numbers in another file, which is missing; load the model by its path, "
            "with that file beside it"
        )
    try:
        return _usable(onnx.numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"is corrupt: {error}") from error


def _usable(array) -> np.ndarray:
    """Half precision becomes single: nothing is lost."""
    array = np.asarray(array)
    if array.dtype.name in _SHORT:
        return array.astype(np.float32)
    if array.dtype.name not in _KNOWN:
        raise Refused(f"has numbers of the type {array.dtype.name}, which is not supported")
    return array


def constant(attributes: dict) -> np.ndarray:
    """The value of a Constant node."""
    if len(attributes) != 1:
        raise Refused("needs one value")
    ((name, value),) = attributes.items()
    if name == "value":
        return stored(value)
    if name in ("value_float", "value_floats"):
        return np.array(value, np.float32)
    if name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    raise Refused(f"is not supported with {name}")


def fold(
    call: Call,
    node: onnx.NodeProto,
    like: int | None = None,
    limit: int = LARGEST_COMPUTED,
    own: int | None = None,
) -> list[Constant]:
    """The outputs of a node whose inputs are all constant; at most `limit` entries.

    `like` is the type of what a CastLike imitates, `own` that of the first input, if
    that has floating-point numbers.
    """
    operator, known = call.operator, [x for x in call.inputs if x is not None]
    if operator not in _MOVED | _CASTS and operator not in _WHOLE and operator not in _FLOATING:
        raise Refused("is not supported, not even for constants")
    check_size([_size(operator, known, call.attributes)], limit)
    if operator in _MOVED:
        return _moved(call, node)
    if operator in _CASTS:
        to = call.get("to") if operator == "Cast" else like
        # To its own type a cast does nothing, also where numbers are computed exactly.
        same = own == to and _is_floating(_first(call))
        return [_first(call) if same else _cast(_first(call), to)]
    floating = [_is_floating(x) for x in known]
    table = _FLOATING if floating[0] else _WHOLE
    if operator not in table or (not floating[0] and any(floating)):
        raise Refused("is not supported for constants of this type")
    return [table[operator](call)]


def _first(call: Call, k: int = 0) -> Constant:
    item = call.item(k)
    assert isinstance(item, enclosures.CONSTANT)
    return item


def _is_floating(x: Item) -> bool:
    return not isinstance(x, np.ndarray) or x.dtype.kind == "f"


def _constants(call: Call) -> list[Constant]:
    return [_first(call, k) for k in range(len(call.inputs))]


# -- entries that only move ------------------------------------------------------------------------


def _moved(call: Call, node: onnx.NodeProto) -> list[Constant]:
    if call.get("reduction", b"none") != b"none":
        raise Refused("is not supported where it adds up")
    data = call.inputs[1:] if call.operator == "Where" else call.inputs
    kinds = {_is_floating(x) for x in data if x is not None}
    if call.operator in ("Concat", "Where") and len(kinds) > 1:
        raise Refused("mixes floating-point numbers with others")
    arrays = [[_end(x, side) for x in call.inputs] for side in ("low", "high")]
    if not any(isinstance(x, Enclosure) for x in call.inputs):
        return [*_evaluated(node, arrays[0], call.opset)]
    low, high = (_evaluated(node, side, call.opset) for side in arrays)
    return [
        simplified(Enclosure(a, b)) if a.dtype.kind == "f" else a
        for a, b in zip(low, high, strict=True)
    ]


def _end(x, side: str):
    return getattr(x, side) if isinstance(x, Enclosure) else x


def _evaluated(node: onnx.NodeProto, inputs: Sequence, opset: int) -> list[np.ndarray]:
    """What ONNX's reference makes of arrays."""
    names = [f"x{k}" if x is not None else "" for k, x in enumerate(inputs)]
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("input")
    copy.input.extend(names)
    declared = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
        )
        for name, x in zip(names, inputs, strict=True)
        if x is not None
    ]
    results = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = onnx.helper.make_graph([copy], "constants", declared, results)
    opsets = [onnx.helper.make_opsetid("", opset)]
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = onnx.helper.make_model(graph, opset_imports=opsets)
        found = iter(ReferenceEvaluator(model).run(None, feeds))
    return [_usable(next(found)) if name else np.zeros(0) for name in node.output]


def _cast(x: Constant, to: int | None) -> Constant:
    """The same numbers in another type, which must be able to hold them."""
    rounds = Refused("rounds constants: the type that it casts to cannot hold them")
    if isinstance(x, Enclosure):
        if to != TensorProto.DOUBLE:
            raise rounds
        return x
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(to)) if to else np.dtype(object)
    if dtype.name not in (*_SHORT, *_KNOWN):
        raise Refused(f"to the type {dtype.name} is not supported")
    if dtype.kind == "b" or x.dtype.kind == "b":
        if x.dtype.kind == "f" and np.isnan(x).any():
            raise rounds
        return _usable(x.astype(dtype))
    if x.dtype.kind in "iu" and dtype.kind in "iu":
        return _fitting(x.astype(object), dtype)
    # Between 2**53 and its negative, float64 holds all integers.
    whole = x.dtype.kind in "iu" or dtype.kind in "iu"
    if whole and x.size and not np.max(np.abs(x.astype(np.float64))) <= 2.0**53:
        raise rounds
    if dtype.kind in "iu":
        if np.any(x != np.rint(x)):
            raise rounds
        return _fitting(x.astype(np.int64).astype(object), dtype)
    with np.errstate(all="ignore"):
        cast = x.astype(np.float64).astype(dtype)
    if not np.array_equal(cast.astype(np.float64), x.astype(np.float64)):
        raise rounds
    return _usable(cast)


# -- integers and truth values ---------------------------------------------------------------------


def _fitting(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Python's integers in another type."""
    if dtype.kind != "b" and x.size:
        info = np.iinfo(dtype)
        if not (info.min <= np.min(x) and np.max(x) <= info.max):
            raise Refused(f"computes an integer that is too large for {dtype.name}")
    return np.asarray(x).astype(dtype)


def _whole(function: Callable[..., np.ndarray]) -> Callable[[Call], np.ndarray]:
    """A function of Python's integers, which never overflow, of the type of the first input."""

    def computed(call: Call) -> np.ndarray:
        arrays = [call.constant(k, "integers") for k in range(len(call.inputs))]
        _check_count(arrays)
        numbers = [np.asarray(x.astype(object)) for x in arrays]
        return _fitting(np.asarray(function(*numbers), object), arrays[0].dtype)

    return computed


def _check_count(arrays: Sequence[np.ndarray]) -> None:
    if math.prod(np.broadcast_shapes(*(x.shape for x in arrays))) > _MOST_INTEGERS:
        raise Refused(f"computes with more than {_MOST_INTEGERS} integers")


def _entrywise(function: Callable) -> Callable[..., np.ndarray]:
    return np.frompyfunc(function, function.__code__.co_argcount, 1)


def _quotient(a: int, b: int) -> int:
    # Towards zero, as runtimes do.
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _to_the_power(a: int, b: int) -> int:
    if not 0 <= b <= 64:
        raise Refused(f"raises integers to the power {b}, which is not supported")
    return a**b


def _remainders(call: Call) -> np.ndarray:
    truncated = call.get("fmod", 0)
    return _whole(_entrywise(lambda a, b: a - b * (_quotient(a, b) if truncated else a // b)))(call)


def _reduced_integers(function: Callable) -> Callable[[Call], np.ndarray]:
    def computed(call: Call) -> np.ndarray:
        x = call.constant(0, "integers")
        _check_count([x])
        axes, keepdims = reduced_axes(call, x.ndim), bool(call.get("keepdims", 1))
        if not axes or x.dtype.kind == "b":
            return x
        result = function(x.astype(object), axis=axes, keepdims=keepdims)
        return _fitting(np.asarray(result, object), x.dtype)

    return computed


def _logical(function: Callable[..., np.ndarray]) -> Callable[[Call], np.ndarray]:
    def computed(call: Call) -> np.ndarray:
        return np.asarray(function(*(call.constant(k, "") for k in range(len(call.inputs)))))

    return computed


def _integer_range(call: Call) -> np.ndarray:
    start, limit, step = (int(call.constant(k, "integers").item()) for k in range(3))
    return np.array(range(start, limit, step), call.constant(0, "integers").dtype)


# Comparisons are exact between integers of one type.
_WHOLE: dict[str, Callable[[Call], np.ndarray]] = {
    "Add": _whole(np.add),
    "Sub": _whole(np.subtract),
    "Mul": _whole(np.multiply),
    "Div": _whole(_entrywise(_quotient)),
    "Mod": _remainders,
    "Pow": _whole(_entrywise(_to_the_power)),
    "Neg": _whole(np.negative),
    "Abs": _whole(np.abs),
    "Sign": _whole(_entrywise(lambda a: (a > 0) - (a < 0))),
    "Max": _whole(lambda *numbers: _extreme(np.maximum, numbers)),
    "Min": _whole(lambda *numbers: _extreme(np.minimum, numbers)),
    "ReduceSum": _reduced_integers(np.sum),
    "ReduceProd": _reduced_integers(np.prod),
    "ReduceMax": _reduced_integers(np.max),
    "ReduceMin": _reduced_integers(np.min),
    "Range": _integer_range,
    "Equal": _logical(np.equal),
    "Less": _logical(np.less),
    "LessOrEqual": _logical(np.less_equal),
    "Greater": _logical(np.greater),
    "GreaterOrEqual": _logical(np.greater_equal),
    "And": _logical(np.logical_and),
    "Or": _logical(np.logical_or),
    "Xor": _logical(np.logical_xor),
    "Not": _logical(np.logical_not),
}


def _extreme(function: Callable, numbers: Sequence[np.ndarray]) -> np.ndarray:
    result = numbers[0]
    for other in numbers[1:]:
        result = function(result, other)
    return result


# -- floating-point numbers ------------------------------------------------------------------------


def _added(call: Call) -> Constant:
    total, *others = _constants(call)
    for k, other in enumerate(others):
        subtracted = call.operator == "Sub" and k == 0
        total = enclosures.add(total, enclosures.negative(other) if subtracted else other)
    if call.operator == "Mean":
        total = enclosures.divide(total, np.array(float(len(others) + 1)))
    return total


def _of_two(function: Callable[[Constant, Constant], Constant]) -> Callable[[Call], Constant]:
    return lambda call: function(_first(call), _first(call, 1))


def _of_one(function: Callable[[Constant], Constant]) -> Callable[[Call], Constant]:
    return lambda call: function(_first(call))


def _power(call: Call) -> Constant:
    exponent = call.constant(1, "exponents")
    if exponent.size != 1:
        raise Refused("is not supported for constants with several exponents")
    x = enclosures.power(_first(call), float(exponent.item()))
    ones = np.ones(exponent.shape)
    return x if not exponent.ndim else enclosures.multiply(x, ones)


def _gemm(call: Call) -> Constant:
    a, b = (
        enclosures.enclosed(_first(call, k)).moved(np.transpose)
        if call.get(name, 0)
        else _first(call, k)
        for k, name in enumerate(("transA", "transB"))
    )
    alpha, beta = (np.array(float(call.get(name, 1.0))) for name in ("alpha", "beta"))
    product = enclosures.multiply(alpha, enclosures.matmul(a, b))
    if call.item(2) is None or beta == 0:
        return product
    return enclosures.add(product, enclosures.multiply(beta, _first(call, 2)))


def _clipped(call: Call) -> Constant:
    low = call.get("min", call.number(1, "bounds", -math.inf))
    high = call.get("max", call.number(2, "bounds", math.inf))
    if not low <= high:
        raise Refused(f"has bounds that are not in order: {low} and {high}")
    return enclosures.monotone(lambda x: np.clip(x, low, high), _first(call))


def _reduced(call: Call) -> Constant:
    x, keepdims = _first(call), bool(call.get("keepdims", 1))
    axes = reduced_axes(call, len(x.shape))
    if not axes:
        return x
    if call.operator in ("ReduceMax", "ReduceMin"):
        extreme = np.max if call.operator == "ReduceMax" else np.min
        return enclosures.monotone(lambda a: extreme(a, axis=axes, keepdims=keepdims), x)
    if call.operator == "ReduceProd":
        return enclosures.product(x, axes, keepdims)
    total = enclosures.total(x, axes, keepdims)
    if call.operator == "ReduceSum":
        return total
    return enclosures.divide(total, np.array(float(math.prod(x.shape[k] for k in axes))))


def _range(call: Call) -> Constant:
    start, limit, step = (
        np.array(call.number(k, "ends and steps", math.nan), np.float64) for k in range(3)
    )
    if not np.isfinite([start, limit, step]).all() or step == 0:
        raise Refused("has ends or steps that are not finite, or no step")
    first, last, by = (Fraction(float(x)) for x in (start, limit, step))
    numbers = np.arange(max(math.ceil((last - first) / by), 0), dtype=np.float64)
    return enclosures.add(start, enclosures.multiply(numbers, step))


def _compared(call: Call) -> np.ndarray:
    x, y = (enclosures.enclosed(_first(call, k)) for k in range(2))
    if call.operator.startswith("Greater"):
        x, y = y, x
    if call.operator == "Equal":
        yes = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
        no = (x.high < y.low) | (y.high < x.low)
    elif call.operator.endswith("OrEqual"):
        yes, no = x.high <= y.low, x.low > y.high
    else:
        yes, no = x.high < y.low, x.low >= y.high
    if not np.all(yes | no):
        raise Refused("compares constants whose rounding decides")
    return np.asarray(yes)


def _rounded(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Call], Constant]:
    return lambda call: enclosures.monotone(function, _first(call))


_FLOATING: dict[str, Callable[[Call], Constant]] = {
    **dict.fromkeys(("Add", "Sub", "Sum", "Mean"), _added),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin"), _reduced),
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _compared),
    "Mul": _of_two(enclosures.multiply),
    "Div": _of_two(enclosures.divide),
    "MatMul": _of_two(enclosures.matmul),
    "Neg": _of_one(enclosures.negative),
    "Abs": _of_one(enclosures.absolute),
    "Sqrt": _of_one(enclosures.root),
    "Reciprocal": _of_one(enclosures.reciprocal),
    "Pow": _power,
    "Gemm": _gemm,
    "Clip": _clipped,
    "Range": _range,
    "Max": lambda call: enclosures.monotone(
        lambda *ends: _extreme(np.maximum, ends), *_constants(call)
    ),
    "Min": lambda call: enclosures.monotone(
        lambda *ends: _extreme(np.minimum, ends), *_constants(call)
    ),
    "Relu": _rounded(lambda x: np.maximum(x, 0)),
    "Floor": _rounded(np.floor),
    "Ceil": _rounded(np.ceil),
    "Round": _rounded(np.rint),
    "Sign": _rounded(np.sign),
    **{
        operator: _of_one(lambda x, name=name: enclosures.function(name, x))
        for operator, name in (
            ("Exp", "exp"), ("Log", "log"), ("Erf", "erf"), ("Sin", "sin"), ("Cos", "cos"),
            ("Tanh", "tanh"), ("Sigmoid", "sigmoid"), ("Softplus", "softplus"),
        )
    },
}  # fmt: skip


def _size(operator: str, inputs: Sequence, attributes: dict) -> int:
    """No fewer entries than the results have; at least one."""

    def product(numbers) -> int:
        return math.prod(max(int(n), 1) for n in numbers)

    first = inputs[0]
    if operator == "ConstantOfShape":
        return product(first.ravel())
    if operator == "Range":
        start, limit, step = (float(x.item()) for x in inputs)
        return max(int((limit - start) / step) + 1, 1)
    if operator in ("Tile", "Expand"):
        return max(first.size, 1) * product(inputs[1].ravel())
    if operator == "Gather":
        # Every index brings at most a whole slice.
        axis = attributes.get("axis", 0)
        return max(first.size // max(first.shape[axis], 1) * inputs[1].size, 1)
    if operator == "GatherND":
        return max(first.size * inputs[1].size, 1)
    if operator in ("MatMul", "Gemm"):
        return max(math.prod(x.size for x in inputs[:2]) // max(first.shape[-1], 1) ** 2, 1)
    try:
        together = product(np.broadcast_shapes(*(x.shape for x in inputs)))
    except ValueError:
        together = 1
    return max(together, sum(x.size for x in inputs), 1)
