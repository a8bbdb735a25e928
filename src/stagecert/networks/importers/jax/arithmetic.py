"""Equations that compute: sums, products, powers, maxima, contractions, windows."""

import math

import jax
import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.activations.smooth import MOST_EXPONENT
from stagecert.networks.graph import Value
from stagecert.networks.importers import enclosures
from stagecert.networks.importers.enclosures import Constant
from stagecert.networks.importers.jax.calls import Call, converts
from stagecert.networks.importers.jax.recognising import single
from stagecert.networks.importers.jax.walking import Traced
from stagecert.networks.importers.onnx.nodes import Refused
from stagecert.networks.importers.onnx.reductions import MOST_FACTORS

TWO_VARIABLES = "is nonlinear in two variables: both of its arguments depend on the input"


@converts("add", "add_any", "sub")
def _add(call: Call):
    signs = (1, -1 if call.name == "sub" else 1)
    if len(call.variables) == 2:
        return call.add(op.Sum(signs), *(x.value for x in call.variables))
    place = 0 if isinstance(call.operands[0], Traced) else 1
    x, shift = call.variable(place), call.enclosed(1 - place, "terms")
    x = x if signs[place] > 0 else call.negate(x)
    x = call.broadcast(x, call.shapes[0])
    if enclosures.uniform(shift) == 0:
        return x
    shift = shift if signs[1 - place] > 0 else enclosures.negative(shift)
    return call.draft.apply(op.Shift, x, shift, name=call.name)


@converts("neg")
def _neg(call: Call):
    return call.negate(call.variable())


@converts("mul")
def _mul(call: Call):
    if len(call.variables) == 2:
        x, y = call.variables
        if x.value is y.value:
            return call.activation("square", x.value)
        return call.product(x.value, y.value, call.shapes[0])
    place = 0 if isinstance(call.operands[0], Traced) else 1
    return _scaled(call, call.variable(place), call.enclosed(1 - place, "factors"))


@converts("div")
def _div(call: Call):
    if isinstance(call.operands[1], Traced):
        inverse = call.activation("reciprocal", call.variable(1))
        if len(call.variables) == 2:
            return call.product(call.variable(), inverse, call.shapes[0])
        return _scaled(call, inverse, call.enclosed(0, "dividends"))
    return _scaled(call, call.variable(), enclosures.reciprocal(call.enclosed(1, "divisors")))


def _scaled(call: Call, x: Value, factor: Constant) -> Value:
    if enclosures.uniform(factor) == 1:
        return call.broadcast(x, call.shapes[0])
    return call.draft.apply(op.Scale, x, factor, name=call.name)


_PLAIN = {
    "tanh": "tanh", "logistic": "sigmoid", "abs": "abs", "exp": "exp", "square": "square",
    "sin": "sin", "cos": "cos", "log": "log", "sqrt": "sqrt", "erf": "erf", "floor": "floor",
    "ceil": "ceil", "sign": "sign",
}  # fmt: skip


@converts(*_PLAIN)
def _plain(call: Call):
    return call.activation(_PLAIN[call.name], call.variable())


@converts("exp2")
def _exp2(call: Call):
    logarithm = enclosures.function("log", np.array(2.0))
    return call.activation("exp", _scaled(call, call.variable(), logarithm))


@converts("expm1")
def _expm1(call: Call):
    y = call.activation("exp", call.variable())
    return call.add(op.Shift(), y, weights=np.array(-1.0))


@converts("reduce_prod")
def _reduce_prod(call: Call):
    axes = tuple(int(k) for k in call.params["axes"])
    x = call.variable()
    rest = [k for k in range(len(x.shape)) if k not in axes]
    shape = tuple(x.shape[k] for k in rest)
    x = call.reshape(call.transpose(x, (*rest, *axes)), (*shape, -1))
    count = x.shape[-1]
    if count > MOST_FACTORS:
        raise Refused(f"multiplies {count} variables; up to {MOST_FACTORS} do")
    parts = [call.add(op.Take(len(shape)), x, weights=np.array(k, np.int32)) for k in range(count)]
    total = parts[0]
    for part in parts[1:]:
        total = call.product(total, part, shape)
    return total


@converts("rsqrt")
def _rsqrt(call: Call):
    return call.activation("reciprocal", call.activation("sqrt", call.variable()))


@converts("round")
def _round(call: Call):
    if call.params["rounding_method"] != jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        raise Refused("is only supported where halves are rounded to even numbers")
    return call.activation("round", call.variable())


@converts("integer_pow", "pow")
def _pow(call: Call):
    power = call.params.get("y")
    if call.name == "pow":
        power = single(call.constant(1, "exponents"))
    x = call.broadcast(call.variable(), call.shapes[0])
    return _raised(call, x, power)


def _raised(call: Call, x: Value, power) -> Value:
    """x to the power of a number."""
    if power == 1:
        return x
    if power == 2:
        return call.activation("square", x)
    if power == 0.5:
        return call.activation("sqrt", x)
    if power < 0:
        return call.activation("reciprocal", _raised(call, x, -power))
    if power != int(power) or not 3 <= power <= MOST_EXPONENT:
        raise Refused(f"is only supported with whole exponents up to {MOST_EXPONENT}, and 0.5")
    return call.activation("power", x, exponent=power)


@converts("max", "min")
def _max(call: Call):
    sign = 1 if call.name == "max" else -1
    shape = call.shapes[0]
    if len(call.variables) == 2:
        x, y = (call.broadcast(v.value, shape) for v in call.variables)
        if call.variables[0] is call.variables[1]:
            return x
        columns = [v if sign > 0 else call.negate(v) for v in (x, y)]
        columns = [call.reshape(v, (*shape, 1)) for v in columns]
        largest = call.maximum(call.add(op.Concat(len(shape)), *columns))
        return largest if sign > 0 else call.negate(largest)
    place = 0 if isinstance(call.operands[0], Traced) else 1
    x, bound = call.variable(place), call.constant(1 - place, "bounds")
    return _bounded(call, call.broadcast(x, shape), bound, sign)


def _bounded(call: Call, x: Value, bound: np.ndarray, sign: int) -> Value:
    """The maximum of x and a constant, or the minimum if the sign is negative."""
    if np.all(bound == -sign * np.inf):
        return x
    if not np.isfinite(bound).all():
        raise Refused("has a bound that is NaN or infinite")
    number = single(bound)
    if number is not None:
        if sign > 0 and number == 0:
            return call.activation("relu", x)
        low, high = (number, math.inf) if sign > 0 else (-math.inf, number)
        return call.activation("clip", x, low=low, high=high)
    # max(x, c) = c + relu(x - c), and min(x, c) = c - relu(c - x)
    x = call.add(op.Shift(), x, weights=-bound)
    x = call.activation("relu", x if sign > 0 else call.negate(x))
    return call.add(op.Shift(), x if sign > 0 else call.negate(x), weights=bound)


@converts("clamp")
def _clamp(call: Call):
    x, low, high = call.variable(1), call.constant(0, "bounds"), call.constant(2, "bounds")
    least, most = single(low), single(high)
    finite = [b is not None and math.isfinite(b) for b in (least, most)]
    if least is not None and most is not None and all(finite) and least <= most:
        return call.activation("clip", x, low=least, high=most)
    return _bounded(call, _bounded(call, x, low, 1), high, -1)


@converts("reduce_sum")
def _reduce_sum(call: Call):
    axes = tuple(int(k) for k in call.params["axes"])
    return call.add(op.Reduce(axes, False), call.variable()) if axes else call.operands[0]


@converts("reduce_max", "reduce_min")
def _reduce_max(call: Call):
    axes = tuple(int(k) for k in call.params["axes"])
    x = call.variable() if call.name == "reduce_max" else call.negate(call.variable())
    rest = [k for k in range(len(x.shape)) if k not in axes]
    x = call.reshape(call.transpose(x, (*rest, *axes)), (*(x.shape[k] for k in rest), -1))
    largest = call.maximum(x)
    return largest if call.name == "reduce_max" else call.negate(largest)


@converts("dot_general")
def _dot_general(call: Call):
    if len(call.variables) == 2:
        return _products_summed(call)
    contracted, batches = call.params["dimension_numbers"]
    place = 0 if isinstance(call.operands[0], Traced) else 1
    x = call.variable(place)
    weights, loose = enclosures.weights_of(call.enclosed(1 - place, "weights"))
    shared, own = contracted[place], [*contracted[place], *batches[place]]
    free = [k for k in range(len(x.shape)) if k not in own]
    others = [*contracted[1 - place], *batches[1 - place]]
    new = [k for k in range(weights.ndim) if k not in others]
    batch = tuple(x.shape[k] for k in batches[place])
    rows = tuple(x.shape[k] for k in free)
    columns = tuple(weights.shape[k] for k in new)
    length = math.prod(x.shape[k] for k in shared)
    ahead = (math.prod(batch),) if batch else ()
    # Batch axes, what is left of x, and the axis that is summed over.
    x = call.transpose(x, (*batches[place], *free, *shared))
    x = call.reshape(x, (*ahead, *((math.prod(rows),) if batch else rows), length))
    weights = weights.transpose((*batches[1 - place], *contracted[1 - place], *new))
    weights = np.ascontiguousarray(weights.reshape(*ahead, length, math.prod(columns)))
    y = call.add(op.MatMul(loose=loose), x, weights=weights)
    y = call.reshape(y, (*batch, *rows, *columns))
    if place == 0:
        return y
    first, second = len(batch), len(batch) + len(rows)
    order = [*range(first), *range(second, second + len(columns)), *range(first, second)]
    return call.transpose(y, order)


def _products_summed(call: Call) -> Value:
    """The product of two variables along some axes: all products of entries, added up."""
    contracted, batches = call.params["dimension_numbers"]
    batch = tuple(call.variable(0).shape[k] for k in batches[0])
    sides, free = [], []
    for k in range(2):
        x, own = call.variable(k), [*contracted[k], *batches[k]]
        rest = [axis for axis in range(len(x.shape)) if axis not in own]
        length = math.prod(x.shape[axis] for axis in contracted[k])
        free.append(tuple(x.shape[axis] for axis in rest))
        x = call.transpose(x, (*batches[k], *rest, *contracted[k]))
        # Batch axes, the axes of the first variable, those of the second, what is summed over.
        sides.append((x, length))
    (x, length), (y, _) = sides
    x = call.reshape(x, (*batch, *free[0], *(1 for _ in free[1]), length))
    y = call.reshape(y, (*batch, *(1 for _ in free[0]), *free[1], length))
    shape = (*batch, *free[0], *free[1], length)
    return call.add(op.Reduce((len(shape) - 1,), False), call.product(x, y, shape))


@converts("conv_general_dilated")
def _conv(call: Call):
    if len(call.variables) == 2:
        raise Refused(TWO_VARIABLES)
    params = call.params
    if params["batch_group_count"] != 1:
        raise Refused("is not supported with batch groups")
    x, weights = call.variable(), call.constant(1, "weights")
    numbers = params["dimension_numbers"]
    x = call.transpose(x, numbers.lhs_spec)
    weights = np.ascontiguousarray(weights.transpose(numbers.rhs_spec))
    dilation = tuple(int(d) for d in params["rhs_dilation"])
    spread = tuple(int(d) for d in params["lhs_dilation"])
    padding = tuple((int(a), int(b)) for a, b in params["padding"])
    most = [(k - 1) * d for k, d in zip(weights.shape[2:], dilation, strict=True)]
    if any(min(pad) < 0 or max(pad) > n for pad, n in zip(padding, most, strict=True)):
        # XLA's convolutions on CPUs get negative padding wrong, and wide padding is negative in the
        # adjoint: both are done before.
        x = call.spread(x, (1, 1, *spread))
        x = call.pad(x, ((0, 0), (0, 0), *padding))
        spread, padding = (1,) * len(spread), ((0, 0),) * len(padding)
    strides = tuple(int(s) for s in params["window_strides"])
    groups = int(params["feature_group_count"])
    y = call.add(op.Conv(strides, padding, dilation, spread, groups), x, weights=weights)
    return call.transpose(y, [numbers.out_spec.index(k) for k in range(len(y.shape))])


@converts("cumsum")
def _cumsum(call: Call):
    x, axis = call.variable(), call.params["axis"]
    n, rank = x.shape[axis], len(x.shape)
    pad = (0, n - 1) if call.params["reverse"] else (n - 1, 0)
    ones = (1,) * rank
    window = tuple(n if k == axis else 1 for k in range(rank))
    padding = tuple(pad if k == axis else (0, 0) for k in range(rank))
    return call.add(op.WindowSum(window, ones, ones, padding), x)


@converts("reduce_window_sum")
def _window_sum(call: Call):
    params = call.params
    x = call.spread(call.variable(), params["base_dilation"])
    padding = tuple((int(a), int(b)) for a, b in params["padding"])
    if any(min(pad) < 0 for pad in padding):
        x, padding = call.pad(x, padding), ((0, 0),) * len(padding)
    window, strides, dilation = (
        tuple(int(n) for n in params[key])
        for key in ("window_dimensions", "window_strides", "window_dilation")
    )
    return call.add(op.WindowSum(window, strides, dilation, padding), x)


@converts("reduce_window_max", "reduce_window_min")
def _window_max(call: Call):
    params = call.params
    x = call.variable()
    if any(d != 1 for d in params["base_dilation"]):
        raise Refused("is not supported with base_dilation")
    x = x if call.name == "reduce_window_max" else call.negate(x)
    if any(map(any, params["padding"])):
        windows = call.add(op.Take(), x, weights=_padded_windows(call, x.shape))
    else:
        keys = ("window_dimensions", "window_strides", "window_dilation")
        windows = call.add(op.Windows(*(tuple(map(int, params[key])) for key in keys)), x)
    largest = call.maximum(windows)
    return largest if call.name == "reduce_window_max" else call.negate(largest)


def _padded_windows(call: Call, read) -> np.ndarray:
    """Which entries of a flattened array each window covers, along a last axis."""
    params, shape = call.params, call.shapes[0]
    rank = len(shape)
    flat = np.zeros((1,) * (2 * rank), np.int64)
    for axis, n in enumerate(read):
        start = np.arange(shape[axis])[:, None] * params["window_strides"][axis]
        inside = np.arange(params["window_dimensions"][axis]) * params["window_dilation"][axis]
        at = start - params["padding"][axis][0] + inside
        valid = (at >= 0) & (at < n)
        if not valid.any(1).all():
            raise Refused("has a window that covers padding only")
        # Padding must not win: in its place stands an entry that the window has already.
        at = np.where(valid, at, np.take_along_axis(at, valid.argmax(1)[:, None], axis=1))
        places = [1] * (2 * rank)
        places[axis], places[rank + axis] = at.shape
        flat = flat * n + at.reshape(places)
    return flat.reshape(*shape, -1).astype(np.int32)
