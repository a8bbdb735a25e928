"""What an ONNX graph computes in real arithmetic on the numbers that it stores.

Numbers are rationals as long as that is possible, and balls (Arb) behind a root or a transcendental
function, so an interval around the truth. Nothing here is shared with stagecert, which is what it
is compared with; it follows the text of the ONNX standard. Rounding casts between floating-point
types are not part of the function; where the standard leaves open what a node means, or runtimes
differ, `Vague` is raised.

Tensors are NumPy arrays: objects (fmpq or arb) for floating-point numbers, int64 or bool.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from flint import arb, ctx, fmpq
from onnx import helper, numpy_helper

PRECISION = 400  # bits
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE,
          onnx.TensorProto.BFLOAT16)  # fmt: skip
_INTEGERS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32}


class Vague(Exception):
    """The graph has no value that everybody agrees on."""


Number = Any  # fmpq or arb


def number(x: float) -> fmpq:
    """A floating-point number as a rational."""
    if not math.isfinite(x):
        raise Vague("a number is not finite")
    return fmpq(*float(x).as_integer_ratio())


def numbers(array) -> np.ndarray:
    """Floating-point numbers as rationals."""
    array = np.asarray(array, np.float64)
    out = np.empty(array.shape, object)
    for k in np.ndindex(*array.shape):
        out[k] = number(float(array[k]))
    return out


def ball(x: Number) -> arb:
    """A ball around a number."""
    return x if isinstance(x, arb) else arb(x)


def larger(x: Number, y: Number) -> Number:
    """The maximum of two numbers."""
    if isinstance(x, fmpq) and isinstance(y, fmpq):
        return max(x, y)
    return ball(x).max(ball(y))


def smaller(x: Number, y: Number) -> Number:
    """The minimum of two numbers."""
    if isinstance(x, fmpq) and isinstance(y, fmpq):
        return min(x, y)
    return ball(x).min(ball(y))


def surely_greater(x: Number, y: Number) -> bool:
    """Whether x > y whatever the balls are."""
    return bool(x > y)


def stored(tensor: onnx.TensorProto) -> np.ndarray:
    """A stored tensor."""
    array = numpy_helper.to_array(tensor)
    if tensor.data_type in FLOATS:
        return numbers(array.astype(np.float64))
    if array.dtype == bool:
        return array
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    raise Vague(f"type {array.dtype}")


def _tensor(x: Any) -> np.ndarray:
    """An array, also of what NumPy has made a single number."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, (fmpq, arb)):
        out = np.empty((), object)
        out[()] = x
        return out
    return np.asarray(x)


def each(function: Callable[..., Number], *arrays) -> np.ndarray:
    """A function of each entry."""
    return _tensor(np.frompyfunc(function, len(arrays), 1)(*arrays))


def is_float(array: np.ndarray) -> bool:
    """Whether a tensor has floating-point numbers."""
    return array.dtype == object


class Call:
    """One node: inputs, attributes with the defaults of its opset, names of its outputs."""

    def __init__(self, node: onnx.NodeProto, items: Sequence, attributes: dict, opset: int):
        self.operator, self.items, self.opset = node.op_type, list(items), opset
        self.attributes, self.outputs = attributes, len(node.output)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def item(self, k: int) -> Any:
        """An input or None."""
        return self.items[k] if k < len(self.items) else None

    def real(self, name: str) -> fmpq:
        """An attribute that is a number."""
        return number(self.attributes[name])

    def integers(self, name: str, k: int | None = None) -> list[int] | None:
        """Integers, by attribute or input."""
        if name in self.attributes:
            return [int(n) for n in self.attributes[name]]
        item = None if k is None else self.item(k)
        return None if item is None else [int(n) for n in item.reshape(-1)]


COMPUTES: dict[str, Callable[[Call], Any]] = {}


def computes(*operators: str):
    """Registers a function for operators; it returns the output, or a list."""

    def register(function):
        for operator in operators:
            COMPUTES[operator] = function
        return function

    return register


@functools.cache
def defaults(operator: str, opset: int) -> dict[str, Any]:
    """The attributes that a node has when it does not say otherwise."""
    schema = onnx.defs.get_schema(operator, opset, "")
    found = {}
    for name, attribute in schema.attributes.items():
        proto = attribute.default_value
        if proto.type != onnx.AttributeProto.UNDEFINED:
            found[name] = helper.get_attribute_value(proto)
    return found


def node_outputs(
    node: onnx.NodeProto,
    items: Sequence,
    opset: int,
    functions: dict[tuple[str, str], onnx.FunctionProto],
    given: dict[str, Any] | None = None,
) -> list[np.ndarray]:
    """The outputs of a node. `given` are attributes of the function that it is in."""
    attributes = {}
    for item in node.attribute:
        if item.ref_attr_name:
            if item.ref_attr_name in (given or {}):
                attributes[item.name] = (given or {})[item.ref_attr_name]
        else:
            attributes[item.name] = helper.get_attribute_value(item)
    if (node.domain, node.op_type) in functions:
        return _function(functions[node.domain, node.op_type], items, attributes, functions)
    if node.domain not in ("", "ai.onnx") or node.op_type not in COMPUTES:
        raise Vague(f"{node.domain} {node.op_type} is not evaluated")
    attributes = {**defaults(node.op_type, opset), **attributes}
    with ctx.workprec(PRECISION):
        made = COMPUTES[node.op_type](Call(node, items, attributes, opset))
    made = made if isinstance(made, list) else [made]
    return [_tensor(x) for x in made]


def _function(function: onnx.FunctionProto, items, attributes, functions):
    values: dict[str, Any] = {"": None}
    values.update(zip(function.input, items, strict=False))
    for name in function.input[len(items) :]:
        values[name] = None
    given = {item.name: helper.get_attribute_value(item) for item in function.attribute_proto}
    given.update(attributes)
    (opset,) = (o.version for o in function.opset_import if o.domain in ("", "ai.onnx"))
    for node in function.node:
        made = node_outputs(node, [values[n] for n in node.input], opset, functions, given)
        values.update(zip(node.output, made, strict=False))
    return [values[name] for name in function.output]


def evaluate(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a model; `feeds` are float64 arrays, and are taken exactly."""
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    functions = {(f.domain, f.name): f for f in model.functions}
    values: dict[str, Any] = {"": None}
    for tensor in model.graph.initializer:
        values[tensor.name] = stored(tensor)
    for name, array in feeds.items():
        values[name] = numbers(array)
    for node in _needed(model.graph):
        made = node_outputs(node, [values[n] for n in node.input], opset, functions)
        values.update((n, x) for n, x in zip(node.output, made, strict=False) if n)
    return [values[info.name] for info in model.graph.output]


def _needed(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    names, needed = {info.name for info in graph.output}, []
    for node in reversed(graph.node):
        if names & (set(node.output) - {""}):
            needed.append(node)
            names.update(node.input)
    return needed[::-1]


# -- arithmetic ------------------------------------------------------------------------------------


def _quotient(x, y):
    if isinstance(y, fmpq) and y == 0:
        raise Vague("division by zero")
    return x / y


def _whole_quotient(x: int, y: int) -> int:
    if y == 0:
        raise Vague("division by zero")
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


@computes("Add", "Sub", "Mul", "Sum", "Mean", "Div")
def _arithmetic(call: Call):
    first: Any = call.items[0]
    for other in call.items[1:]:
        if call.operator == "Sub":
            first = first - other
        elif call.operator == "Mul":
            first = first * other
        elif call.operator == "Div":
            divide = _quotient if is_float(other) else _whole_quotient
            first = each(divide, first, other)
            first = first if is_float(other) else first.astype(np.int64)
        else:
            first = first + other
    return first / fmpq(len(call.items)) if call.operator == "Mean" else first


@computes("Max", "Min")
def _extreme(call: Call):
    choose = larger if call.operator == "Max" else smaller
    total = call.items[0]
    for other in call.items[1:]:
        if not is_float(other):
            total = (np.maximum if call.operator == "Max" else np.minimum)(total, other)
        else:
            total = each(choose, total, other)
    return total


@computes("Neg")
def _neg(call: Call):
    return -call.items[0]


@computes("Pow")
def _pow(call: Call):
    def power(x, y):
        whole = isinstance(y, int) or (isinstance(y, fmpq) and y.q == 1)
        if whole and abs(int(y)) <= 16:
            if int(y) < 0 and isinstance(x, fmpq) and x == 0:
                raise Vague("division by zero")
            return x ** int(y)
        if not ball(x) > 0:
            raise Vague("a power of a negative number")
        return ball(x) ** ball(y if isinstance(y, (fmpq, arb)) else fmpq(int(y)))

    x, y = call.items
    return each(power, x, y if is_float(y) else y.astype(object))


@computes("MatMul")
def _matmul(call: Call):
    return np.matmul(*call.items)


@computes("Gemm")
def _gemm(call: Call):
    a, b, c = call.item(0), call.item(1), call.item(2)
    a = a.T if call.get("transA") else a
    b = b.T if call.get("transB") else b
    product = call.real("alpha") * np.matmul(a, b)
    return product if c is None else product + call.real("beta") * c


@computes("BatchNormalization")
def _batch_normalization(call: Call):
    if call.get("training_mode", 0) or call.get("spatial", 1) != 1 or call.outputs > 1:
        raise Vague("training")
    x, epsilon = call.items[0], call.real("epsilon")
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    scale, bias, mean, variance = (w.reshape(shape) for w in call.items[1:])
    return each(_quotient, x - mean, each(_root, variance + epsilon)) * scale + bias


def _root(x):
    if not x > 0:
        if isinstance(x, fmpq) and x == 0:
            return x
        raise Vague("a root of a number that is not positive")
    return ball(x).sqrt()


def _logarithm(x):
    if not ball(x) > 0:
        raise Vague("a logarithm of a number that is not positive")
    return ball(x).log()


def _exp(x):
    return fmpq(1) if isinstance(x, fmpq) and x == 0 else ball(x).exp()


def _sigmoid(x):
    return 1 / (1 + _exp(-x))


def _softplus(x):
    return larger(x, fmpq(0)) + ball(_exp(-abs(x))).log1p()


def below(x):
    """min(x, 0)."""
    return smaller(x, fmpq(0))


def above(x):
    """max(x, 0)."""
    return larger(x, fmpq(0))


def _unit(x):
    return smaller(larger(x, fmpq(0)), fmpq(1))


def gelu(x):
    """x times the distribution function of the normal distribution."""
    return x * (1 + (ball(fmpq(1, 2)).sqrt() * x).erf()) / 2


def gelu_tanh(x, cube: Number = fmpq(44715, 10**6)):  # noqa: B008
    """The approximation of gelu by tanh."""
    slope = (ball(fmpq(2)) / arb.pi()).sqrt()
    return x * (1 + (slope * (x + cube * x * x * x)).tanh()) / 2


CURVES: dict[str, Callable[..., Number]] = {
    "Relu": above,
    "LeakyRelu": lambda x, alpha: above(x) + alpha * below(x),
    "Elu": lambda x, alpha: above(x) + alpha * (_exp(below(x)) - 1),
    "Selu": lambda x, alpha, gamma: gamma * (above(x) + alpha * (_exp(below(x)) - 1)),
    "Celu": lambda x, alpha: above(x) + below(alpha * (_exp(_quotient(x, alpha)) - 1)),
    "Softplus": _softplus,
    "Sigmoid": _sigmoid,
    "Tanh": lambda x: ball(x).tanh(),
    "HardSigmoid": lambda x, alpha, beta: _unit(alpha * x + beta),
    "HardSwish": lambda x: x * _unit(x / 6 + fmpq(1, 2)),
    "Mish": lambda x: x * ball(_softplus(x)).tanh(),
    "Softsign": lambda x: x / (1 + abs(x)),
    "Abs": abs,
    "Exp": _exp,
    "Log": _logarithm,
    "Erf": lambda x: ball(x).erf(),
    "Sqrt": _root,
    "Reciprocal": lambda x: _quotient(fmpq(1), x),
    "Swish": lambda x, alpha: x * _sigmoid(alpha * x),
    "Sin": lambda x: ball(x).sin(),
    "Cos": lambda x: ball(x).cos(),
}


@computes(*CURVES)
def _curve(call: Call):
    function = CURVES[call.operator]
    settings = {n: number(v) for n, v in call.attributes.items() if isinstance(v, float)}
    x = call.items[0]
    if not is_float(x):
        if call.operator != "Abs":
            raise Vague("integers")
        return np.abs(x)
    return each(lambda entry: function(entry, **settings), x)


@computes("Gelu")
def _gelu(call: Call):
    return each(gelu_tanh if call.get("approximate") == b"tanh" else gelu, call.items[0])


@computes("PRelu")
def _prelu(call: Call):
    x, slope = call.items
    return each(lambda a, s: above(a) + s * below(a), x, slope)


@computes("Clip")
def _clip(call: Call):
    x = call.items[0]
    if call.opset < 11:
        # Without an attribute the bounds are the largest float32: models mean "none" by that.
        low, high = (_tensor(number(call.attributes[name])) for name in ("min", "max"))
        if any(not abs(entry) < fmpq(10) ** 38 for entry in x.reshape(-1)):
            raise Vague("values as large as the bounds that stand for none")
    else:
        low, high = call.item(1), call.item(2)
    if any(end is not None and end.size != 1 for end in (low, high)):
        raise Vague("bounds must be single numbers")
    x = x if low is None else each(larger, x, low.reshape(()))
    return x if high is None else each(smaller, x, high.reshape(()))


# -- constants and types ---------------------------------------------------------------------------


@computes("Identity", "Dropout")
def _identity(call: Call):
    if call.operator == "Dropout" and call.item(2) is not None and np.any(call.item(2)):
        raise Vague("training")
    x = call.items[0]
    return [x, np.ones(x.shape, bool)][: call.outputs]


@computes("Cast", "CastLike")
def _cast(call: Call):
    x = call.items[0]
    if call.operator == "CastLike":
        return _converted(x, is_float(call.items[1]))
    return _converted(x, call.get("to") in FLOATS)


def _converted(x: np.ndarray, floating: bool) -> np.ndarray:
    if is_float(x) == floating:
        return x
    if floating:
        return numbers(x)
    if any(not isinstance(e, fmpq) or e.q != 1 for e in x.reshape(-1)):
        raise Vague("a cast to integers rounds")
    return x.astype(np.int64)


@computes("Constant")
def _constant(call: Call):
    ((name, value),) = call.attributes.items()
    if name == "value":
        return stored(value)
    if name in ("value_float", "value_floats"):
        return numbers(np.array(value, np.float64))
    if name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    raise Vague(name)


@computes("ConstantOfShape")
def _constant_of_shape(call: Call):
    value = call.get("value")
    value = numbers(np.zeros(1)) if value is None else stored(value)
    return np.broadcast_to(value.reshape(()), tuple(int(n) for n in call.items[0]))


@computes("Range")
def _range(call: Call):
    start, limit, step = (x.reshape(-1)[0] for x in call.items)
    if step == 0:
        raise Vague("a step of zero")
    if not is_float(call.items[0]):
        return np.arange(start, limit, step)
    if not all(isinstance(x, fmpq) for x in (start, limit, step)):
        raise Vague("a range of rounded numbers")
    count = max(int(((limit - start) / step).ceil()), 0)
    out = np.empty(count, object)
    out[:] = [start + k * step for k in range(count)]
    return out


@computes("Where")
def _where(call: Call):
    condition, x, y = np.broadcast_arrays(*call.items)
    return np.where(condition, x, y)


@computes("Floor", "Ceil", "Sign")
def _steps(call: Call):
    x = call.items[0]
    if not is_float(x) or any(not isinstance(e, fmpq) for e in x.reshape(-1)):
        raise Vague("steps of rounded numbers")
    functions = {
        "Floor": lambda e: fmpq(e.floor()),
        "Ceil": lambda e: fmpq(e.ceil()),
        "Sign": lambda e: fmpq(int(e > 0) - int(e < 0)),
    }
    return each(functions[call.operator], x)


# Those register their operators as well.
from benchmarks.fuzz import (  # noqa: E402
    exact_composed,  # noqa: F401
    exact_reductions,  # noqa: F401
    exact_shapes,  # noqa: F401
    exact_unrolled,  # noqa: F401
)
