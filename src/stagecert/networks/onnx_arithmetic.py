"""ONNX arithmetic: sums and products with constants, activations, maxima, and activations that
exporters spell out as products (x * Sigmoid(x) is silu)."""

import math
from collections.abc import Sequence

import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Value
from stagecert.networks.onnx_nodes import (
    LARGEST_COMPUTED,
    Call,
    Item,
    Placeholder,
    Refused,
    check_size,
    converts,
    place,
    precise,
)

_TWO_VARIABLES = "of two variables is nonlinear in several variables at once"


@converts("Identity")
def _identity(call: Call):
    return call.variable()


@converts("Neg")
def _neg(call: Call):
    return negate(call, call.variable())


def negate(call: Call, x: Value) -> Value:
    """Minus x."""
    return call.scale(x, np.float32(-1))


@converts("Add", "Sub", "Sum", "Mean")
def _sum(call: Call):
    signs = [1, -1] if call.operator == "Sub" else [1] * len(call.inputs)
    total = add_up(call, call.inputs, signs)
    if call.operator == "Mean":
        total = call.scale(total, np.float64(1 / len(call.inputs)))
    return total


def add_up(call: Call, items: Sequence[Item | None], signs: Sequence[int]) -> Value:
    """The sum of variables and constants, each times its sign."""
    terms = list(zip(items, signs, strict=True))
    variables = [(x, sign) for x, sign in terms if isinstance(x, Value)]
    constants = [x if sign > 0 else -x for x, sign in terms if isinstance(x, np.ndarray)]
    if len(variables) == 1:
        total, sign = variables[0]
        total = total if sign > 0 else negate(call, total)
    else:
        sign = tuple(sign for _, sign in variables)
        total = call.add(op.Sum(sign), *(x for x, _ in variables))
    if constants:
        # One constant is kept as it is stored; several are added up precisely.
        many = len(constants) > 1
        check_size(np.broadcast_shapes(*(c.shape for c in constants)), LARGEST_COMPUTED)
        shift = sum(map(precise, constants)) if many else constants[0]
        total = call.add(op.Shift(), total, weights=shift)
    return total


@converts("Mul", "Div")
def _product(call: Call):
    x, y = call.inputs
    if call.operator == "Div":
        if isinstance(y, Value):
            if isinstance(x, Value) and _is_one_plus_abs(call, x, y):
                return call.activation("softsign", x)
            raise Refused("by a variable is only supported inside softsign: x / (1 + |x|)")
        assert isinstance(x, Value)
        assert isinstance(y, np.ndarray)
        if not y.all():
            raise Refused("divides by a constant that has zeros")
        return call.scale(x, 1 / precise(y))
    if isinstance(x, Value) and isinstance(y, Value):
        return _variables(call, x, y)
    x, y = (x, y) if isinstance(x, Value) else (y, x)
    assert isinstance(x, Value)
    return call.scale(x, y)


def _is_one_plus_abs(call: Call, x: Value, y: Value) -> bool:
    root, a, b = call.affine(y)
    made = call.draft.made(root)
    if made is None or made.operation != op.Activation("abs"):
        return False
    return (a, b) == (1, 1) and _same(made.arguments[0], x)


@converts("Pow")
def _pow(call: Call):
    exponent = call.constant(1, "exponents")
    x = call.variable()
    if np.broadcast_shapes(x.shape, exponent.shape) != x.shape:
        raise Refused("is not supported where the exponent has more axes than the base")
    if np.all(exponent == 1):
        return x
    if np.all(exponent == 2):
        return call.activation("square", x)
    if np.all(exponent == 3):
        return call.add(Placeholder("cube", x.shape), x)
    raise Refused("is only supported with the exponents 1 and 2")


@converts("MatMul")
def _matmul(call: Call):
    x, y = call.inputs
    if isinstance(x, Value) and isinstance(y, Value):
        raise Refused(_TWO_VARIABLES)
    if isinstance(x, Value):
        return call.add(op.MatMul(), x, weights=y)
    assert isinstance(y, Value)
    return call.add(op.MatMul(left=True), y, weights=x)


@converts("Gemm")
def _gemm(call: Call):
    a, b, c = call.item(0), call.item(1), call.item(2)
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    flip_a, flip_b = call.get("transA", 0), call.get("transB", 0)
    assert a is not None
    assert b is not None
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise Refused("needs matrices")
    if isinstance(a, Value) and isinstance(b, Value):
        raise Refused(_TWO_VARIABLES)
    a, b = _flipped(call, a, flip_a), _flipped(call, b, flip_b)
    if isinstance(a, Value):
        product = call.add(op.MatMul(), a, weights=_times(alpha, b))
    elif isinstance(b, Value):
        product = call.add(op.MatMul(left=True), b, weights=_times(alpha, a))
    else:
        check_size((a.shape[0], b.shape[1]), LARGEST_COMPUTED)
        product = alpha * (precise(a) @ precise(b))
    if c is None or beta == 0:
        return product
    rows = product.shape
    if np.broadcast_shapes(c.shape, rows) != rows:
        raise Refused("adds a matrix of another shape")
    c = call.scale(c, np.float64(beta)) if isinstance(c, Value) else _times(beta, c)
    return add_up(call, [product, c], [1, 1])


def _flipped(call: Call, x: Item, flip: int) -> Item:
    if not flip:
        return x
    return call.add(op.Transpose((1, 0)), x) if isinstance(x, Value) else x.T


def _times(factor: float, x: Item) -> np.ndarray:
    assert isinstance(x, np.ndarray)
    return x if factor == 1 else factor * precise(x)


@converts("BatchNormalization")
def _batch_normalization(call: Call):
    if call.get("training_mode", 0) or any(call.outputs[1:]):
        raise Refused("is only supported for inference; export the model in evaluation mode")
    if not call.get("spatial", 1):
        raise Refused("is not supported with spatial=0")
    x = call.variable()
    names = ("scales", "biases", "means", "variances")
    scale, bias, mean, variance = (precise(call.constant(k + 1, n)) for k, n in enumerate(names))
    if len(x.shape) < 2 or any(w.shape != (x.shape[1],) for w in (scale, bias, mean, variance)):
        raise Refused("needs one scale, bias, mean and variance for each channel")
    spread = variance + call.get("epsilon", _single(1e-5))
    if not np.all(spread > 0):
        raise Refused("has a variance that is not positive")
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    factor = scale / np.sqrt(spread)
    x = call.scale(x, factor.reshape(shape))
    return call.add(op.Shift(), x, weights=(bias - mean * factor).reshape(shape))


def _single(x: float) -> float:
    """The float32 nearest to x: attributes of ONNX are float32, and so are their defaults."""
    return float(np.float32(x))


# Operators whose activation takes the attributes as they are, with ONNX's defaults.
_PLAIN: dict[str, tuple[str, dict[str, float]]] = {
    "Relu": ("relu", {}),
    "LeakyRelu": ("leaky_relu", {"alpha": _single(0.01)}),
    "Elu": ("elu", {"alpha": 1.0}),
    "Selu": ("selu", {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}),
    "Celu": ("celu", {"alpha": 1.0}),
    "Softplus": ("softplus", {}),
    "Sigmoid": ("sigmoid", {}),
    "Tanh": ("tanh", {}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": _single(0.2), "beta": 0.5}),
    "HardSwish": ("hard_swish", {}),
    "Mish": ("mish", {}),
    "Softsign": ("softsign", {}),
    "Abs": ("abs", {}),
    "Exp": ("exp", {}),
}


@converts(*_PLAIN)
def _plain(call: Call):
    kind, defaults = _PLAIN[call.operator]
    settings = {name: call.get(name, default) for name, default in defaults.items()}
    return call.activation(kind, call.variable(), **settings)


@converts("PRelu")
def _prelu(call: Call):
    x, slope = call.variable(), call.constant(1, "slopes")
    if np.broadcast_shapes(x.shape, slope.shape) != x.shape:
        raise Refused(f"has slopes of shape {slope.shape} for a tensor of shape {x.shape}")
    return call.activation("prelu", x, weights=slope)


@converts("Gelu")
def _gelu(call: Call):
    approximate = call.get("approximate", b"none")
    kinds = {b"none": "gelu", b"tanh": "gelu_tanh"}
    if approximate not in kinds:
        raise Refused(f"has an unknown approximation, {approximate!r}")
    return call.activation(kinds[approximate], call.variable())


@converts("Swish")
def _swish(call: Call):
    alpha = call.get("alpha", 1.0)
    if alpha == 0:
        raise Refused("is not supported with alpha=0")
    # x sigmoid(alpha x) = silu(alpha x) / alpha
    x = call.scale(call.variable(), np.float64(alpha)) if alpha != 1 else call.variable()
    y = call.activation("silu", x)
    return call.scale(y, np.float64(1 / alpha)) if alpha != 1 else y


@converts("Clip")
def _clip(call: Call):
    low = call.get("min", call.number(1, "bounds", -math.inf))
    high = call.get("max", call.number(2, "bounds", math.inf))
    return clip(call, call.variable(), low, high)


def clip(call: Call, x: Value, low: float, high: float) -> Value:
    """x between two numbers."""
    # ONNX means no bound by the largest float32 where the attribute form leaves one out.
    largest = float(np.finfo(np.float32).max)
    low = -math.inf if low <= -largest else low
    high = math.inf if high >= largest else high
    if not low <= high:
        raise Refused(f"has bounds that are not in order: {low} and {high}")
    if low == -math.inf and high == math.inf:
        return x
    if low == 0 and high == math.inf:
        return call.activation("relu", x)
    return call.activation("clip", x, low=low, high=high)


@converts("Max", "Min")
def _max(call: Call):
    sign = 1 if call.operator == "Max" else -1
    variables = [x for x in call.inputs if isinstance(x, Value)]
    constants = [x for x in call.inputs if isinstance(x, np.ndarray)]
    shape = np.broadcast_shapes(*(x.shape for x in variables), *(c.shape for c in constants))
    extreme = np.max if sign > 0 else np.min
    bound = None
    if constants:
        check_size((len(constants), *shape), LARGEST_COMPUTED)
        bound = extreme(np.stack(np.broadcast_arrays(*constants)), axis=0)
    if len(variables) == 1 and bound is None:
        return variables[0]
    if (
        len(variables) == 1
        and bound is not None
        and bound.size == 1
        and shape == variables[0].shape
    ):
        number = float(bound.item())
        ends = (number, math.inf) if sign > 0 else (-math.inf, number)
        return clip(call, variables[0], *ends)
    check_size((*shape, len(variables) + 1))
    columns = []
    for x in variables:
        x = x if sign > 0 else negate(call, x)
        x = x if x.shape == shape else call.add(op.Broadcast(shape), x)
        columns.append(call.add(op.Reshape((*shape, 1)), x))
    stacked = call.add(op.Concat(len(shape)), *columns) if len(columns) > 1 else columns[0]
    if bound is not None:
        # A constant is one more column: zeros, shifted.
        stacked = call.add(op.Pad(((0, 0),) * len(shape) + ((0, 1),)), stacked)
        zeros = np.zeros((*bound.shape, len(columns)), bound.dtype)
        shift = np.concatenate([zeros, sign * bound[..., None]], axis=-1)
        stacked = call.add(op.Shift(), stacked, weights=shift)
    largest = call.add(op.Max(), stacked)
    return largest if sign > 0 else negate(call, largest)


def maximum(call: Call, x: Value, axes: Sequence[int], keepdims: bool) -> Value:
    """The maximum over some axes."""
    rest = [k for k in range(len(x.shape)) if k not in axes]
    shape = tuple(x.shape[k] for k in rest)
    y = call.add(op.Transpose((*rest, *axes)), x)
    largest = call.add(op.Max(), call.add(op.Reshape((*shape, -1)), y))
    if not keepdims:
        return largest
    return call.add(
        op.Reshape(tuple(1 if k in axes else n for k, n in enumerate(x.shape))), largest
    )


@converts("Erf")
def _erf(call: Call):
    # There is no such activation: it must disappear into a Gelu.
    x = call.variable()
    return call.add(Placeholder("erf", x.shape), x)


@converts("Log")
def _log(call: Call):
    # log(1 + exp(x)) is softplus.
    root, a, b = call.affine(call.variable())
    made = call.draft.made(root)
    if (a, b) == (1, 1) and made and made.operation == op.Activation("exp"):
        return call.activation("softplus", made.arguments[0])
    raise Refused("is only supported inside softplus: Log(1 + Exp(x))")


def _variables(call: Call, x: Value, y: Value) -> Value:
    """x * y where it is a function of one variable after all."""
    if x.shape == y.shape:
        (root, a, b), (other, c, d) = call.affine(x), call.affine(y)
        if _same(x, y):
            return call.activation("square", x)
        if _same(root, other) and b == d == 0:
            return call.scale(call.activation("square", root), np.float64(a * c))
        for one, two in ((x, y), (y, x)):
            gated = _gated(call, one, two)
            if gated is not None:
                return gated
    raise Refused(_TWO_VARIABLES)


def _same(x: Value, y: Value) -> bool:
    return (x.is_input, x.index) == (y.is_input, y.index)


def _close(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-12)


def _gated(call: Call, x: Value, y: Value) -> Value | None:
    """x * y where y is the gate of a known activation of a multiple of x."""
    gate, a, b = call.affine(y)
    known = _gate(call, gate, a, b)
    if known is None:
        return None
    kind, g, p, q, factor = known
    # y = factor * kind(inner) / inner with inner = p g + q, so x has to be a multiple of inner.
    root, inner, offset = call.affine(g)
    inner, offset = p * inner, p * offset + q
    inner = 1.0 if _close(inner, 1) else inner
    origin, c, d = call.affine(x)
    if not _same(root, origin) or inner == 0:
        return None
    ratio = 1.0 if _close(c, inner) else c / inner
    if not _close(d, ratio * offset):
        return None
    if ratio == 1:
        argument = x
    elif (p, q) == (1, 0):
        argument = g
    else:
        argument = root if inner == 1 else call.add(op.Scale(), root, weights=np.float64(inner))
        if not _close(offset, 0):
            argument = call.add(op.Shift(), argument, weights=np.float64(offset))
    value = call.activation(kind, argument)
    factor *= ratio
    return value if _close(factor, 1) else call.scale(value, np.float64(factor))


def _gate(call: Call, gate: Value, a: float, b: float):
    """(kind, g, p, q, factor) if a * gate + b = factor * kind(p g + q) / (p g + q)."""
    made = call.draft.made(gate)
    if made is None or not made.arguments:
        return None
    g = made.arguments[0]
    if isinstance(made.operation, Placeholder):
        if made.operation.kind == "erf" and _close(a, b):
            return "gelu", g, math.sqrt(2), 0.0, 2 * a
        return None
    if not isinstance(made.operation, op.Activation):
        return None
    kind, settings = made.operation.kind, dict(made.operation.settings)
    if kind == "tanh" and _close(a, b):
        x = _cubic(call, g)
        return None if x is None else ("gelu_tanh", x, 1.0, 0.0, 2 * a)
    if b != 0:
        return None
    if kind == "sigmoid":
        return "silu", g, 1.0, 0.0, a
    if kind == "hard_sigmoid" and _close(settings["alpha"], 1 / 6) and settings["beta"] == 0.5:
        return "hard_swish", g, 1.0, 0.0, a
    if kind == "clip" and settings == {"low": 0, "high": 6}:
        return "hard_swish", g, 1.0, -3.0, 6 * a
    before = call.draft.made(g)
    if kind == "tanh" and before and before.operation == op.Activation("softplus"):
        return "mish", before.arguments[0], 1.0, 0.0, a
    return None


def _cubic(call: Call, y: Value) -> Value | None:
    """x if y = sqrt(2 / pi) * (x + 0.044715 * x**3)."""
    root, a, b = call.affine(y)
    made = call.draft.made(root)
    if b != 0 or not _close(a, math.sqrt(2 / math.pi)) or made is None:
        return None
    if made.operation != op.Sum((1, 1)):
        return None
    for x, other in (made.arguments, made.arguments[::-1]):
        cube, c, d = call.affine(other)
        before = call.draft.made(cube)
        if before is None or before.operation != Placeholder("cube", x.shape):
            continue
        if d == 0 and _close(c, 0.044715) and _same(before.arguments[0], x):
            return x
    return None


@converts("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean")
def _reduce(call: Call):
    x, keepdims = call.variable(), bool(call.get("keepdims", 1))
    axes = call.integers("axes", 1) or []
    if not axes:
        if call.get("noop_with_empty_axes", 0):
            return x
        axes = range(len(x.shape))
    axes = [place(axis, len(x.shape)) for axis in axes]
    axes = tuple(sorted(set(axes)))
    if not axes:
        return x
    if call.operator == "ReduceMax":
        return maximum(call, x, axes, keepdims)
    if call.operator == "ReduceMin":
        return negate(call, maximum(call, negate(call, x), axes, keepdims))
    total = call.add(op.Reduce(axes, keepdims), x)
    if call.operator == "ReduceSum":
        return total
    return call.scale(total, np.float64(1 / math.prod(x.shape[k] for k in axes)))
