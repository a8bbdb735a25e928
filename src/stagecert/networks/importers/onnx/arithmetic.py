"""ONNX arithmetic: sums and products with constants, activations, maxima, products of variables,
and activations that exporters spell out as products (x * Sigmoid(x) is silu)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from flint import arb

from stagecert.networks import operations as op
from stagecert.networks.activations.smooth import MOST_EXPONENT, TANH_CUBES
from stagecert.networks.graph import Value
from stagecert.networks.importers import enclosures
from stagecert.networks.importers.enclosures import CONSTANT, Constant
from stagecert.networks.importers.onnx.nodes import (
    Call,
    Item,
    Refused,
    check_size,
    converts,
    places,
)


@converts("Identity")
def _identity(call: Call):
    return call.variable()


@converts("Neg")
def _neg(call: Call):
    return negate(call, call.variable())


def negate(call: Call, x: Value) -> Value:
    """Minus x."""
    return call.scale(x, Fraction(-1))


@converts("Add", "Sub", "Sum", "Mean")
def _sum(call: Call):
    signs = [1, -1] if call.operator == "Sub" else [1] * len(call.inputs)
    total = add_up(call, call.inputs, signs)
    if call.operator == "Mean":
        total = call.scale(total, Fraction(1, len(call.inputs)))
    return total


def add_up(call: Call, items: Sequence[Item | None], signs: Sequence[int]) -> Value:
    """The sum of variables and constants, each times its sign."""
    variables: list[tuple[Value, int]] = []
    constants: list[Constant] = []
    for x, sign in zip(items, signs, strict=True):
        if isinstance(x, Value):
            variables.append((x, sign))
        elif isinstance(x, CONSTANT):
            constants.append(x if sign > 0 else enclosures.negative(x))
        else:
            raise Refused("lacks an input")
    if len(variables) == 1:
        total, sign = variables[0]
        total = total if sign > 0 else negate(call, total)
    else:
        sign = tuple(sign for _, sign in variables)
        total = call.add(op.Sum(sign), *(x for x, _ in variables))
    for constant in _together(constants):
        total = call.shift(total, constant)
    return total


def _together(constants: list[Constant]) -> list[Constant]:
    """The constants, as one if their sum is exact."""
    if len(constants) < 2:
        return constants
    check_size(np.broadcast_shapes(*(c.shape for c in constants)))
    total = constants[0]
    for constant in constants[1:]:
        total = enclosures.add(total, constant)
    return [total] if isinstance(total, np.ndarray) else constants


@converts("Mul", "Div")
def _product(call: Call):
    x, y = call.inputs
    if call.operator == "Div":
        if isinstance(y, Value):
            return quotient(call, x, y)
        assert isinstance(x, Value)
        assert isinstance(y, CONSTANT)
        number = enclosures.uniform(y)
        return call.scale(x, enclosures.reciprocal(y), 1 / number if number else None)
    if isinstance(x, Value) and isinstance(y, Value):
        return product(call, x, y)
    x, y = (x, y) if isinstance(x, Value) else (y, x)
    assert isinstance(x, Value)
    assert isinstance(y, CONSTANT)
    return call.scale(x, y)


def quotient(call: Call, x: Item | None, y: Value) -> Value:
    """x / y: softsign, or x times the reciprocal."""
    if isinstance(x, Value) and _is_one_plus_abs(call, x, y):
        return call.activation("softsign", x)
    inverse = call.activation("reciprocal", y)
    if isinstance(x, Value):
        return product(call, x, inverse)
    assert isinstance(x, CONSTANT)
    return call.scale(inverse, x)


def _is_one_plus_abs(call: Call, x: Value, y: Value) -> bool:
    root, a, b = call.affine(y)
    made = call.draft.made(root)
    if made is None or made.operation != op.Activation("abs"):
        return False
    return (a, b) == (1, 1) and _same(made.arguments[0], x)


@converts("Pow")
def _pow(call: Call):
    if isinstance(call.item(1), Value):
        return _exponential(call, call.item(0), call.variable(1))
    exponent = call.constant(1, "exponents")
    x = call.variable()
    if np.broadcast_shapes(x.shape, exponent.shape) != x.shape:
        raise Refused("is not supported where the exponent has more entries than the base")
    if np.any(exponent != exponent.flat[0]):
        raise Refused("needs one exponent for all entries")
    return _raised(call, x, float(exponent.flat[0]))


def _raised(call: Call, x: Value, exponent: float) -> Value:
    """x to the power of a number."""
    if exponent == 0:  # one everywhere, also at zero
        return call.shift(call.scale(x, Fraction(0)), Fraction(1))
    if exponent == 1:
        return x
    if exponent == 2:
        return call.activation("square", x)
    if exponent == 0.5:
        return call.activation("sqrt", x)
    if exponent < 0:
        return call.activation("reciprocal", _raised(call, x, -exponent))
    if exponent != int(exponent) or not 3 <= exponent <= MOST_EXPONENT:
        raise Refused(f"has the exponent {exponent:g}; whole ones up to {MOST_EXPONENT} and 0.5 do")
    return call.activation("power", x, exponent=exponent)


def _exponential(call: Call, base: Item | None, x: Value) -> Value:
    """base ** x = exp(x * log(base))."""
    if not isinstance(base, CONSTANT):
        raise Refused("needs a base or an exponent that is constant")
    if not np.all(enclosures.enclosed(base).low > 0):
        raise Refused("needs a base that is positive")
    return call.activation("exp", call.scale(x, enclosures.function("log", base)))


@converts("MatMul")
def _matmul(call: Call):
    x, y = call.inputs
    if isinstance(x, Value) and isinstance(y, Value):
        return matrix_product(call, x, y)
    left = isinstance(y, Value)
    x, constant = call.variable(1 if left else 0), call.item(0 if left else 1)
    assert isinstance(constant, CONSTANT)
    weights, loose = enclosures.weights_of(constant)
    if not x.shape or not weights.ndim:
        raise Refused("needs tensors with axes")
    matmul = op.MatMul(left, loose)
    if weights.ndim > 1:
        return call.add(matmul, x, weights=weights)
    # A vector is a matrix with one row or column, which is gone afterwards.
    product = call.add(matmul, x, weights=weights[None] if left else weights[:, None])
    axis = len(product.shape) - (2 if left and len(x.shape) > 1 else 1)
    return call.add(op.Reshape((*product.shape[:axis], *product.shape[axis + 1 :])), product)


def matrix_product(call: Call, x: Value, y: Value) -> Value:
    """x @ y of two variables: all products of entries, added up."""
    if not x.shape or not y.shape:
        raise Refused("needs tensors with axes")
    # Vectors are matrices with one row or column, which is gone afterwards.
    rows, columns = x.shape[-2:-1], y.shape[-1:] if len(y.shape) > 1 else ()
    inner = y.shape[max(len(y.shape) - 2, 0)]
    if x.shape[-1] != inner:
        raise Refused(f"multiplies tensors of the shapes {x.shape} and {y.shape}")
    stack = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    # (stack, rows, columns, inner)
    x = call.add(op.Reshape((*x.shape[:-1], *(1 for _ in columns), inner)), x)
    if len(y.shape) > 1:
        axes = range(len(y.shape))
        y = call.add(op.Transpose((*axes[:-2], axes[-1], axes[-2])), y)
    y = call.add(
        op.Reshape((*y.shape[:-2], *(1 for _ in rows), *y.shape[-2 if columns else -1 :])), y
    )
    shape = (*stack, *rows, *columns, inner)
    products = call.add(op.Product(), _stacked(call, (x, y), shape))
    return call.add(op.Reduce((len(shape) - 1,), False), products)


@converts("Gemm")
def _gemm(call: Call):
    a, b, c = call.item(0), call.item(1), call.item(2)
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    flip_a, flip_b = call.get("transA", 0), call.get("transB", 0)
    assert a is not None
    assert b is not None
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise Refused("needs matrices")
    if not math.isfinite(alpha) or not math.isfinite(beta):
        raise Refused("has an attribute that is NaN or infinite")
    if isinstance(a, Value) and isinstance(b, Value):
        a, b = (
            call.add(op.Transpose((1, 0)), x) if flip else x
            for x, flip in ((a, flip_a), (b, flip_b))
        )
        product = call.scale(matrix_product(call, a, b), np.array(alpha))
    elif isinstance(a, CONSTANT) and isinstance(b, CONSTANT):
        a, b = (_turned(x) if flip else x for x, flip in ((a, flip_a), (b, flip_b)))
        check_size((a.shape[0], b.shape[1]))
        product = enclosures.multiply(np.array(alpha), enclosures.matmul(a, b))
    else:
        left = isinstance(b, Value)
        x = call.variable(1 if left else 0)
        weights = call.constant(0 if left else 1, "weights")
        weights = weights.T if (flip_a if left else flip_b) else weights
        x = call.add(op.Transpose((1, 0)), x) if (flip_b if left else flip_a) else x
        # Float32 numbers times alpha are exact; where they are not, the product is scaled.
        scaled = weights if alpha == 1 else enclosures.multiply(np.array(alpha), weights)
        exact = isinstance(scaled, np.ndarray)
        product = call.add(op.MatMul(left), x, weights=scaled if exact else weights)
        product = product if exact else call.scale(product, np.array(alpha))
    if c is None or beta == 0:
        return product
    rows = product.shape
    if np.broadcast_shapes(c.shape, rows) != rows:
        raise Refused("adds a matrix of another shape")
    if isinstance(c, Value):
        c = call.scale(c, np.array(beta))
    elif beta != 1:
        c = enclosures.multiply(np.array(beta), c)
    return add_up(call, [product, c], [1, 1])


def _turned(x: Constant) -> Constant:
    return x.T if isinstance(x, np.ndarray) else x.moved(np.transpose)


@converts("BatchNormalization")
def _batch_normalization(call: Call):
    if call.get("training_mode", 0) or any(call.outputs[1:]):
        raise Refused("is only supported for inference; export the model in evaluation mode")
    if not call.get("spatial", 1):
        raise Refused("is not supported with spatial=0")
    x = call.variable()
    names = ("scales", "biases", "means", "variances")
    scale, bias, mean, variance = (call.constant(k + 1, n) for k, n in enumerate(names))
    if len(x.shape) < 2 or any(w.shape != (x.shape[1],) for w in (scale, bias, mean, variance)):
        raise Refused("needs one scale, bias, mean and variance for each channel")
    spread = enclosures.add(variance, np.array(call.get("epsilon", _single(1e-5))))
    if not np.all(enclosures.enclosed(spread).low > 0):
        raise Refused("has a variance that is not positive")
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    # Not scaled and shifted by bias - mean * factor, where everything may cancel.
    factor = enclosures.divide(scale.reshape(shape), _reshaped(enclosures.root(spread), shape))
    x = call.shift(x, -mean.reshape(shape)) if np.any(mean) else x
    x = call.scale(x, factor)
    return call.shift(x, bias.reshape(shape)) if np.any(bias) else x


def _reshaped(x: Constant, shape) -> Constant:
    return x.reshape(shape) if isinstance(x, np.ndarray) else x.moved(lambda a: a.reshape(shape))


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
    if alpha == 0 or not math.isfinite(alpha):
        raise Refused(f"is not supported with alpha={alpha}")
    # x sigmoid(alpha x) = silu(alpha x) / alpha
    y = call.activation("silu", call.scale(call.variable(), Fraction(alpha)))
    return call.scale(y, 1 / Fraction(alpha))


@converts("Clip")
def _clip(call: Call):
    low = call.get("min", call.number(1, "bounds", -math.inf))
    high = call.get("max", call.number(2, "bounds", math.inf))
    return clip(call, call.variable(), low, high)


def clip(call: Call, x: Value, low: float, high: float) -> Value:
    """x between two numbers, of which infinite ones mean none."""
    # Also the largest float32, which ONNX names as the default of attributes, is a number.
    if not low <= high or low == math.inf or high == -math.inf:
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
    constants = [
        call.constant(k, "bounds") for k, x in enumerate(call.inputs) if not isinstance(x, Value)
    ]
    if any(c.dtype.kind != "f" for c in constants):
        raise Refused("needs bounds that are floating-point numbers")
    shape = np.broadcast_shapes(*(x.shape for x in variables), *(c.shape for c in constants))
    extreme = np.max if sign > 0 else np.min
    bound = None
    if constants:
        check_size((len(constants), *shape))
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
    variables = [x if sign > 0 else negate(call, x) for x in variables]
    stacked = _stacked(call, variables, shape)
    if bound is not None:
        # A constant is one more column: zeros, shifted.
        stacked = call.add(op.Pad(((0, 0),) * len(shape) + ((0, 1),)), stacked)
        zeros = np.zeros((*bound.shape, len(variables)), bound.dtype)
        shift = np.concatenate([zeros, sign * bound[..., None]], axis=-1)
        stacked = call.add(op.Shift(), stacked, weights=shift)
    largest = call.add(op.Max(), stacked)
    return largest if sign > 0 else negate(call, largest)


def _stacked(call: Call, variables: Sequence[Value], shape) -> Value:
    """Variables, repeated to a shape, side by side along a new last axis."""
    check_size((*shape, len(variables)))
    columns = []
    for x in variables:
        x = x if x.shape == shape else call.add(op.Broadcast(tuple(shape)), x)
        columns.append(call.add(op.Reshape((*shape, 1)), x))
    return call.add(op.Concat(len(shape)), *columns) if len(columns) > 1 else columns[0]


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


@converts("Log")
def _log(call: Call):
    # log(1 + exp(x)) is softplus.
    root, a, b = call.affine(call.variable())
    made = call.draft.made(root)
    if (a, b) == (1, 1) and made and made.operation == op.Activation("exp"):
        return call.activation("softplus", made.arguments[0])
    # log(sigmoid(x)) is -softplus(-x).
    if (a, b) == (1, 0) and made and made.operation == op.Activation("sigmoid"):
        return negate(call, call.activation("softplus", negate(call, made.arguments[0])))
    return call.activation("log", call.variable())


# -- products of two variables ---------------------------------------------------------------------


def _same(x: Value, y: Value) -> bool:
    return (x.is_input, x.index) == (y.is_input, y.index)


def product(call: Call, x: Value, y: Value) -> Value:
    """x * y: a function of one variable if it is one after all, such as a square."""
    if x.shape == y.shape:
        if _same(x, y):
            return call.activation("square", x)
        for one, two in ((x, y), (y, x)):
            for known in (_gated, _cubed):
                found = known(call, one, two)
                if found is not None:
                    return found
        (root, a, b), (other, c, d) = call.affine(x), call.affine(y)
        if _same(root, other):
            return _quadratic(call, root, a * c, a * d + b * c, b * d)
    return multiplied(call, x, y)


def multiplied(call: Call, x: Value, y: Value) -> Value:
    """x * y of two variables, entry by entry."""
    shape = np.broadcast_shapes(x.shape, y.shape)
    return call.add(op.Product(), _stacked(call, (x, y), shape))


def _quadratic(call: Call, x: Value, second: Fraction, first: Fraction, zeroth: Fraction) -> Value:
    """second * x**2 + first * x + zeroth: only the square is not linear."""
    total = call.scale(call.activation("square", x), second)
    if first:
        total = call.add(op.Sum((1, 1)), total, call.scale(x, first))
    return call.shift(total, zeroth) if zeroth else total


def _cubed(call: Call, x: Value, y: Value) -> Value | None:
    """x * y where y is the square of a multiple of x."""
    root, a, b = call.affine(x)
    square, c, d = call.affine(y)
    made = call.draft.made(square)
    if made is None or made.operation != op.Activation("square") or b != 0 or d != 0:
        return None
    other, e, f = call.affine(made.arguments[0])
    if not _same(root, other) or f != 0:
        return None
    return call.scale(call.activation("power", root, exponent=3.0), a * c * e * e)


@dataclass(frozen=True)
class _Gate:
    """factor * kind(u) / u where u = unit * (p * g + q); `unit` may be irrational (None is one).

    All other numbers are exact: an activation is only recognised where it is what is written. What
    is not quite a known one (constants are rounded) is a multiple of it at a multiple of x.
    """

    kind: str
    g: Value
    p: Fraction
    q: Fraction
    factor: Fraction
    unit: Callable[[], arb] | None = None


def _gated(call: Call, x: Value, y: Value) -> Value | None:
    """x * y where y is the gate of a known activation of a multiple of x."""
    gate, a, b = call.affine(y)
    known = _gate(call, gate, a, b)
    if known is None:
        return None
    root, inner, offset = call.affine(known.g)
    inner, offset = known.p * inner, known.p * offset + known.q
    origin, c, d = call.affine(x)
    # u = unit * (inner * root + offset), and x has to be a multiple of it.
    if not _same(root, origin) or inner == 0 or d * inner != c * offset:
        return None
    unit, behind = known.unit, known.factor * c / inner
    if unit is None:
        if c == inner:
            argument = x
        elif (known.p, known.q) == (1, 0):
            argument = known.g
        else:
            argument = call.scale(root, inner)
            argument = call.shift(argument, offset) if offset else argument
        return call.scale(call.activation(known.kind, argument), behind)
    assert known.q == 0
    start, ahead = (known.g, known.p) if offset else (root, inner)
    argument = call.scale(start, enclosures.irrational(lambda: enclosures.ball(ahead) * unit()))
    value = call.activation(known.kind, argument)
    return call.scale(value, enclosures.irrational(lambda: enclosures.ball(behind) / unit()))


def _gate(call: Call, gate: Value, a: Fraction, b: Fraction) -> _Gate | None:
    """The gate that a * gate + b is."""
    made = call.draft.made(gate)
    if made is None or not made.arguments:
        return None
    g, one, zero = made.arguments[0], Fraction(1), Fraction(0)
    if not isinstance(made.operation, op.Activation):
        return None
    kind, settings = made.operation.kind, dict(made.operation.settings)
    if kind == "erf" and a == b:
        return _Gate("gelu", g, one, zero, 2 * a, root_two)
    if kind == "tanh" and a == b:
        return _tanh_gate(call, g, a)
    if b != 0:
        return None
    if kind == "sigmoid":
        return _Gate("silu", g, one, zero, a)
    if kind == "hard_sigmoid" and settings["alpha"] != 0 and settings["beta"] == 0.5:
        return _Gate("hard_swish", g, 6 * Fraction(settings["alpha"]), zero, a)
    if kind == "clip" and settings == {"low": 0, "high": 6}:
        return _Gate("hard_swish", g, one, Fraction(-3), 6 * a)
    before = call.draft.made(g)
    if kind == "tanh" and before and before.operation == op.Activation("softplus"):
        return _Gate("mish", before.arguments[0], one, zero, a)
    return None


def _tanh_gate(call: Call, y: Value, a: Fraction) -> _Gate | None:
    """The gate a * (1 + tanh(y)) of the approximate gelu, if y is the right polynomial."""
    found = _cubic(call, y)
    if found is None:
        return None
    x, first, third = found
    # first * x + third * x^3 = sqrt(2 / pi) * (u + cube * u^3) with u = sqrt(pi / 2) * first * x
    if not is_gelu_cube(first, third):
        return None
    return _Gate("gelu_tanh", x, first, Fraction(0), 2 * a, root_half_pi)


def root_two() -> arb:
    """sqrt(2)."""
    return arb(2).sqrt()


def root_half_pi() -> arb:
    """sqrt(pi / 2)."""
    return (arb.pi() / 2).sqrt()


def is_gelu_cube(first: Fraction, third: Fraction) -> bool:
    """Whether the polynomial of an approximate gelu has a factor that its activation allows for."""
    if first == 0:
        return False
    ratio = third / first**3
    cube = enclosures.irrational(lambda: 2 * enclosures.ball(ratio) / arb.pi())
    ends = enclosures.enclosed(cube)
    return TANH_CUBES[0] <= float(ends.low) and float(ends.high) <= TANH_CUBES[1]


_CUBE = op.Activation("power", (("exponent", 3.0),))


def _cubic(call: Call, y: Value) -> tuple[Value, Fraction, Fraction] | None:
    """(x, a, c) if y = a * x + c * x**3."""
    whole, scale, offset = call.affine(y)
    made = call.draft.made(whole)
    if offset != 0 or made is None or not isinstance(made.operation, op.Sum):
        return None
    if len(made.arguments) != 2 or any(x.shape != whole.shape for x in made.arguments):
        return None
    terms = [
        (*call.affine(x), sign * scale)
        for x, sign in zip(made.arguments, made.operation.signs, strict=True)
    ]
    for (root, a, b, factor), (other, c, d, third) in (terms, terms[::-1]):
        cube = call.draft.made(other)
        if d != 0 or cube is None or cube.operation != _CUBE:
            continue
        (x,) = cube.arguments
        origin, e, f = call.affine(x)
        # a * root + b has to be a multiple of x = e * origin + f.
        if _same(root, origin) and e != 0 and b * e == a * f:
            return x, factor * a / e, third * c
    return None


@converts("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean")
def _reduce(call: Call):
    x, keepdims = call.variable(), bool(call.get("keepdims", 1))
    axes = reduced_axes(call, len(x.shape))
    if not axes:
        return x
    if call.operator == "ReduceMax":
        return maximum(call, x, axes, keepdims)
    if call.operator == "ReduceMin":
        return negate(call, maximum(call, negate(call, x), axes, keepdims))
    total = call.add(op.Reduce(axes, keepdims), x)
    if call.operator == "ReduceSum":
        return total
    return call.scale(total, Fraction(1, math.prod(x.shape[k] for k in axes)))


def reduced_axes(call: Call, rank: int) -> tuple[int, ...]:
    """The axes that a reduction runs over."""
    axes = call.integers("axes", 1) or []
    if not axes and call.get("noop_with_empty_axes", 0):
        return ()
    return places(axes or range(rank), rank)
