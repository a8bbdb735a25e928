"""What an imported network computes in real arithmetic, by its own list of operations.

An importer that rounds, loses or misplaces a number makes a network with another value. Weights
that are `loose` stand for all numbers so near to them, so they are balls here.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from flint import arb, ctx, fmpq

from benchmarks.fuzz import exact
from benchmarks.fuzz.exact import PRECISION, number, numbers
from stagecert.networks import Network
from stagecert.networks import operations as op
from stagecert.networks.activations.smooth import TANH_CUBES


def outputs(network: Network, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The flattened outputs at a point; the inputs are float64 arrays."""
    values: list[np.ndarray] = [
        numbers(x).reshape(shape) for x, shape in zip(inputs, network.input_shapes, strict=True)
    ]
    with ctx.workprec(PRECISION):
        for node in network.nodes:
            arguments = [values[k] for k in node.arguments]
            made = _apply(node.operation, node.weights, arguments)
            if made.shape != tuple(node.shape):
                raise ValueError(f"{node.operation} makes {made.shape}, not {node.shape}")
            values.append(made)
    return np.concatenate([values[k].reshape(-1) for k in network.outputs])


def _weights(weights: Any, loose: int = 0) -> np.ndarray:
    array = numbers(np.asarray(weights, np.float64))
    if not loose:
        return array
    out = np.empty(array.shape, object)
    for k in np.ndindex(*array.shape):
        out[k] = exact.ball(array[k]) * arb(1, loose * 2.0**-52)
    return out


def _array(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    out = np.empty((), object)
    out[()] = x
    return out


def _apply(operation: op.Operation, weights: Any, xs: list[np.ndarray]) -> np.ndarray:
    x = xs[0]
    match operation:
        case op.MatMul():
            matrix = _weights(weights, operation.loose)
            return _array(np.matmul(matrix, x) if operation.left else np.matmul(x, matrix))
        case op.Scale():
            return _array(x * _weights(weights, operation.loose))
        case op.Shift():
            return _array(x + _weights(weights, operation.loose))
        case op.Sum():
            total = sum((s * y for s, y in zip(operation.signs, xs, strict=True)), fmpq(0))
            return _array(total)
        case op.Reshape():
            return x.reshape(operation.shape)
        case op.Broadcast():
            return np.broadcast_to(x, operation.shape)
        case op.Transpose():
            return np.transpose(x, operation.axes)
        case op.Slice():
            parts = zip(operation.starts, operation.stops, operation.steps, strict=True)
            return x[tuple(slice(*part) for part in parts)]
        case op.Take():
            return _array(np.take(x, np.asarray(weights), operation.axis))
        case op.Concat():
            return np.concatenate(xs, operation.axis)
        case op.Pad():
            return _padded(x, operation.widths)
        case op.Reduce():
            return _array(np.sum(x, axis=operation.axes, keepdims=operation.keepdims))
        case op.WindowSum():
            return _window_sum(operation, x)
        case op.Windows():
            return _windows(operation, x)
        case op.Conv():
            return _conv(operation, _weights(weights), x)
        case op.Product():
            return _array(x[..., 0] * x[..., 1])
        case op.Max():
            return _array(np.frompyfunc(exact.larger, 2, 1).reduce(x, axis=-1))
        case op.Activation():
            return _activation(operation, weights, x)
    raise ValueError(f"{operation} is not evaluated")


def _padded(x: np.ndarray, widths) -> np.ndarray:
    cut = tuple(
        slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(x.shape, widths, strict=True)
    )
    x, around = x[cut], [(max(a, 0), max(b, 0)) for a, b in widths]
    out = np.empty([n + a + b for n, (a, b) in zip(x.shape, around, strict=True)], object)
    out[...] = fmpq(0)
    out[tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, around, strict=True))] = x
    return out


def _places(counts, kernel, strides, dilations):
    """(window, place in the kernel, entry of the padded input)."""
    for place, offset in itertools.product(np.ndindex(*counts), np.ndindex(*kernel)):
        yield (
            place,
            offset,
            tuple(
                p * s + o * d for p, s, o, d in zip(place, strides, offset, dilations, strict=True)
            ),
        )


def _counts(space, kernel, strides, dilations) -> list[int]:
    return [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, s, d in zip(space, kernel, strides, dilations, strict=True)
    ]


def _window_sum(operation: op.WindowSum, x: np.ndarray) -> np.ndarray:
    x = _padded(x, operation.padding)
    rest = operation.window, operation.strides, operation.dilation
    out = np.empty(_counts(x.shape, *rest), object)
    out[...] = fmpq(0)
    for place, _, at in _places(out.shape, *rest):
        out[place] = out[place] + x[at]
    return out


def _windows(operation: op.Windows, x: np.ndarray) -> np.ndarray:
    rest = operation.window, operation.strides, operation.dilation
    counts = _counts(x.shape, *rest)
    out = np.empty((*counts, *operation.window), object)
    for place, offset, at in _places(counts, *rest):
        out[(*place, *offset)] = x[at]
    return out.reshape(*counts, -1)


def _conv(operation: op.Conv, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    spread = [(n - 1) * d + 1 for n, d in zip(x.shape[2:], operation.input_dilation, strict=True)]
    wide = np.empty((*x.shape[:2], *spread), object)
    wide[...] = fmpq(0)
    wide[(..., *(slice(None, None, d) for d in operation.input_dilation))] = x
    wide = _padded(wide, ((0, 0), (0, 0), *operation.padding))
    kernel = weights.shape[2:]
    rest = kernel, operation.strides, operation.dilation
    counts = _counts(wide.shape[2:], *rest)
    out = np.empty((len(x), len(weights), *counts), object)
    out[...] = fmpq(0)
    per, channels = len(weights) // operation.groups, weights.shape[1]
    for o in range(len(weights)):
        first = o // per * channels
        for place, offset, at in _places(counts, *rest):
            for n, c in itertools.product(range(len(x)), range(channels)):
                product = weights[(o, c, *offset)] * wide[(n, first + c, *at)]
                out[(n, o, *place)] = out[(n, o, *place)] + product
    return out


_SAME_NAMES = {
    "relu": "Relu", "leaky_relu": "LeakyRelu", "elu": "Elu", "selu": "Selu", "celu": "Celu",
    "softplus": "Softplus", "sigmoid": "Sigmoid", "tanh": "Tanh", "hard_sigmoid": "HardSigmoid",
    "hard_swish": "HardSwish", "mish": "Mish", "softsign": "Softsign", "abs": "Abs", "exp": "Exp",
    "erf": "Erf", "sin": "Sin", "cos": "Cos", "log": "Log", "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
}  # fmt: skip


def _activation(operation: op.Activation, weights: Any, x: np.ndarray) -> np.ndarray:
    settings, kind = dict(operation.settings), operation.kind
    if kind == "clip":
        return exact.each(lambda e: _clipped(e, settings["low"], settings["high"]), x)
    if kind == "prelu":
        return exact.each(lambda e, s: exact.above(e) + s * exact.below(e), x, _weights(weights))
    if kind == "square":
        return exact.each(lambda e: e * e, x)
    if kind == "broken_line":
        return exact.each(lambda e: _broken(e, settings), x)
    if kind == "reverting_softplus":
        return exact.each(lambda e: _reverting(e, number(settings["threshold"])), x)
    if kind == "power":
        return exact.each(lambda e: e ** int(settings["exponent"]), x)
    if kind in ("floor", "ceil", "round", "sign"):
        node = onnx.helper.make_node(kind.capitalize(), ["x"], ["y"])
        return exact.node_outputs(node, [x], 17, {})[0]
    if kind == "silu":
        return exact.each(lambda e: e * exact.CURVES["Sigmoid"](e), x)
    if kind == "gelu":
        return exact.each(exact.gelu, x)
    if kind == "gelu_tanh":
        low, high = TANH_CUBES
        cube = arb((low + high) / 2, (high - low) * 0.5000001)
        return exact.each(lambda e: exact.gelu_tanh(e, cube), x)
    function = exact.CURVES[_SAME_NAMES[kind]]
    exactly = {name: number(value) for name, value in settings.items()}
    return exact.each(lambda e: function(e, **exactly), x)


def _broken(x, numbers: dict[str, float]):
    if not isinstance(x, fmpq):
        raise exact.Vague("a comparison of rounded numbers")
    k = 0
    while f"knot{k}" in numbers:
        knot = number(numbers[f"knot{k}"])
        if x == knot and f"at{k}" in numbers:
            return number(numbers[f"at{k}"])
        if x < knot or (x == knot and not numbers[f"closed{k}"]):
            break
        k += 1
    return number(numbers[f"slope{k}"]) * x + number(numbers[f"offset{k}"])


def _reverting(x, threshold):
    if not isinstance(x, fmpq):
        raise exact.Vague("a comparison of rounded numbers")
    return x if x > threshold else exact.CURVES["Softplus"](x)


def _clipped(x, low: float, high: float):
    x = x if low == -np.inf else exact.larger(x, number(low))
    return x if high == np.inf else exact.smaller(x, number(high))
