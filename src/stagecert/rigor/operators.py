"""One function for each ONNX operator: what it makes of the values and constants that it reads."""

import math

import numpy as np

from stagecert.rigor import linear
from stagecert.rigor.functions import Activation, Refused, Value, activation_of, maximum
from stagecert.rigor.graph import FLOATS, MOST_ENTRIES, Call, handles, stored

# -- sums and products -----------------------------------------------------------------------------


@handles("Add", "Sub", "Sum")
def _sum(call: Call):
    signs = (1, -1) if call.operator == "Sub" else (1,) * len(call.items)
    items = list(zip(call.items, signs, strict=True))
    if all(isinstance(x, np.ndarray) and x.dtype == np.int64 for x, _ in items):
        return sum(sign * x for x, sign in items)
    variables = [(x, sign) for x, sign in items if isinstance(x, Value)]
    shape = np.broadcast_shapes(*(x.shape for x in call.items))
    terms = [call.broadcast(x, shape) for x, _ in variables]
    if not terms:
        raise Refused("adds constants that are not integers")
    total = terms[0]
    if len(terms) > 1 or variables[0][1] < 0:
        total = call.apply(linear.Sum([s for _, s in variables]), *terms, shape=shape)
    for k, (x, sign) in enumerate(items):
        if not isinstance(x, Value):
            total = call.shift(total, sign * call.floats(k))
    return total


@handles("Mul")
def _mul(call: Call):
    x, y = call.items
    if isinstance(x, Value) and isinstance(y, Value):
        for one, gate in ((x, y), (y, x)):
            if (function := _gated(one, gate)) is not None:
                return call.activate(function, one)
        raise Refused("multiplies two variables")
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        if x.dtype != np.int64 or y.dtype != np.int64:
            raise Refused("multiplies constants that are not integers")
        return x * y
    k = 0 if isinstance(x, np.ndarray) else 1
    return call.scale(call.value(1 - k), call.exact(call.floats(k)))


def _gated(x: Value, gate: Value) -> Activation | None:
    """The activation that x * gate(x) is."""
    if gate.index == x.index:
        return activation_of("square")
    function, argument = getattr(gate, "gate", (None, None))
    if function is None or argument is None or argument.index != x.index:
        return None
    return activation_of("silu") if function.kind == "sigmoid" else None


@handles("Div")
def _div(call: Call):
    return call.scale(
        call.value(), call.reciprocal(call.floats(1)), loose=call.reader.arithmetic.one
    )


@handles("Neg")
def _neg(call: Call):
    return -call.items[0] if isinstance(call.items[0], np.ndarray) else call.negated(call.value())


@handles("MatMul")
def _matmul(call: Call):
    left = isinstance(call.item(0), np.ndarray)
    return _product(call, call.value(1 if left else 0), call.floats(0 if left else 1), left)


def _product(call: Call, x: Value, weights: np.ndarray, left: bool) -> Value:
    while weights.ndim > 2 and len(weights) == 1 and len(x.shape) >= weights.ndim:
        weights = weights[0]
    if weights.ndim != 2 or len(x.shape) < 2 or x.shape[-2 if left else -1] != weights.shape[left]:
        raise Refused(f"multiplies shapes {x.shape} and {weights.shape}")
    if left:
        shape = (*x.shape[:-2], weights.shape[0], x.shape[-1])
    else:
        shape = (*x.shape[:-1], weights.shape[1])
    return call.apply(linear.MatMul(call.exact(weights), left), x, shape=shape)


@handles("Gemm")
def _gemm(call: Call):
    left = isinstance(call.item(0), np.ndarray)
    flips = [call.get("transA", 0), call.get("transB", 0)]
    sides = [
        call.move(np.transpose, x) if f else x for x, f in zip(call.items[:2], flips, strict=True)
    ]
    call.items[:2] = sides
    x, weights = call.value(1 if left else 0), call.floats(0 if left else 1)
    if len(x.shape) != 2 or weights.ndim != 2:
        raise Refused("needs matrices")
    product = _product(call, x, weights, left)
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if alpha != 1:
        product = call.scale(product, call.exact(np.array(alpha)))
    c = call.item(2)
    if c is None or beta == 0:
        return product
    if np.broadcast_shapes(product.shape, c.shape) != product.shape:
        raise Refused("adds a matrix of another shape")
    if isinstance(c, np.ndarray) and beta == 1:
        return call.shift(product, call.floats(2))
    if isinstance(c, np.ndarray):
        # beta * (product / beta + c) would round; a constant times beta is a shift of zero, scaled.
        c = call.shift(call.scale(product, call.exact(np.zeros(()))), call.floats(2))
    c = call.broadcast(c, product.shape)
    c = call.scale(c, call.exact(np.array(beta))) if beta != 1 else c
    return call.apply(linear.Sum((1, 1)), product, c, shape=product.shape)


@handles("BatchNormalization")
def _batch_normalization(call: Call):
    call.get("momentum")
    if call.get("training_mode", 0) or call.get("spatial", 1) != 1 or call.outputs != 1:
        raise Refused("is only supported for inference")
    x = call.value()
    scale, bias, mean, variance = (call.floats(k) for k in range(1, 5))
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    spread = variance + call.get("epsilon", float(np.float32(1e-5)))
    if any(a.shape != x.shape[1:2] for a in (scale, bias, mean, variance)) or np.any(spread <= 0):
        raise Refused("has impossible parameters")
    # Rounded in the sum (at most 2 after the root is taken), the root, and the quotient; also in
    # exact mode, since the root is not rational.
    factor = call.exact((scale / np.sqrt(spread)).reshape(shape))
    centred = call.shift(x, -mean.reshape(shape))
    return call.shift(call.scale(centred, factor, loose=8), bias.reshape(shape))


# -- windows ---------------------------------------------------------------------------------------


def _window(call: Call, x: Value, kernel):
    """(strides, dilations, pads before, pads after, how many windows) along each axis."""
    rank, space = len(x.shape) - 2, x.shape[2:]
    if rank < 1 or x.shape[0] != 1 or len(kernel) != rank or min(kernel) < 1:
        raise Refused(f"has a window {kernel} over a tensor of shape {x.shape}")
    strides, dilations = (call.get(n, [1] * rank) for n in ("strides", "dilations"))
    pads, ceil = list(call.get("pads", [0] * 2 * rank)), call.get("ceil_mode", 0)
    auto = call.get("auto_pad", b"NOTSET")
    if min([*strides, *dilations, *(p + 1 for p in pads)]) < 1:
        raise Refused("has impossible strides, dilations or pads")
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto in (b"SAME_UPPER", b"SAME_LOWER") and max(dilations) == 1 and not ceil:
        totals = [
            (-(-n // s) - 1) * s + r - n for n, s, r in zip(space, strides, reach, strict=True)
        ]
        if min(totals) < 0:
            raise Refused("has strides beyond its window")
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = less + more if auto == b"SAME_UPPER" else more + less
    elif auto not in (b"NOTSET", b"", b"VALID") or (auto == b"VALID" and (ceil or any(pads))):
        raise Refused(f"has auto_pad={auto!r} in a combination that is not supported")
    before, after = pads[:rank], pads[rank:]
    count = []
    for n, s, r, b, a in zip(space, strides, reach, before, after, strict=True):
        free = n + b + a - r
        if free < 0:
            raise Refused("has a window that is larger than its input")
        number = (-(-free // s) if ceil else free // s) + 1
        # No window starts behind the input.
        count.append(number - 1 if ceil and (number - 1) * s >= n + b else number)
    return strides, dilations, before, after, count


def _kernel(call: Call, x: Value) -> np.ndarray:
    weights = call.floats(1)
    if list(call.get("kernel_shape", weights.shape[2:])) != list(weights.shape[2:]):
        raise Refused("has weights of another shape than its kernel_shape")
    if weights.ndim != len(x.shape) or weights.ndim < 3:
        raise Refused(f"has weights of shape {weights.shape} for a tensor of shape {x.shape}")
    return weights


def _biased(call: Call, y: Value) -> Value:
    if call.item(2) is None:
        return y
    if call.floats(2).shape != (y.shape[1],):
        raise Refused("has biases of the wrong shape")
    return call.shift(y, call.floats(2).reshape(1, -1, *(1 for _ in y.shape[2:])))


@handles("Conv")
def _conv(call: Call):
    x = call.value()
    weights, groups = _kernel(call, x), call.get("group", 1)
    strides, dilations, before, _, count = _window(call, x, weights.shape[2:])
    if groups < 1 or x.shape[1] != groups * weights.shape[1] or weights.shape[0] % groups:
        raise Refused(f"has weights of shape {weights.shape} for {x.shape[1]} channels")
    conv = linear.Conv(call.exact(weights), groups, strides, dilations, before, count)
    return _biased(call, call.apply(conv, x, shape=(1, weights.shape[0], *count)))


@handles("ConvTranspose")
def _conv_transpose(call: Call):
    x = call.value()
    weights, groups = _kernel(call, x), call.get("group", 1)
    rank, space = len(x.shape) - 2, x.shape[2:]
    strides, dilations = (call.get(n, [1] * rank) for n in ("strides", "dilations"))
    pads, extra = call.get("pads", [0] * 2 * rank), call.get("output_padding", [0] * rank)
    if call.get("auto_pad", b"NOTSET") != b"NOTSET" or min([*pads, *extra]) < 0:
        raise Refused("has auto_pad or negative pads")
    if groups < 1 or weights.shape[0] != x.shape[1] or x.shape[1] % groups or x.shape[0] != 1:
        raise Refused(f"has weights of shape {weights.shape} for a tensor of shape {x.shape}")
    length = [
        (n - 1) * s + (k - 1) * d + 1 + e - b - a
        for n, s, k, d, e, b, a in zip(
            space, strides, weights.shape[2:], dilations, extra, pads[:rank], pads[rank:],
            strict=True,
        )
    ]  # fmt: skip
    conv = linear.Conv(call.exact(weights), groups, strides, dilations, pads[:rank], space)
    shape = (1, weights.shape[1] * groups, *length)
    return _biased(call, call.apply(linear.ConvTranspose(conv, shape), x, shape=shape))


def _positions(space, kernel, strides, dilations, before, count) -> list[np.ndarray]:
    """For each axis, (count, kernel): which entries each window covers; some are padding."""
    return [
        np.arange(c)[:, None] * s - b + np.arange(k) * d
        for c, s, b, k, d in zip(count, strides, before, kernel, dilations, strict=True)
    ]


@handles("AveragePool")
def _average_pool(call: Call):
    x, kernel = call.value(), call.get("kernel_shape")
    strides, dilations, before, after, count = _window(call, x, kernel)
    inside = call.get("count_include_pad", 0)
    entries = np.ones(())
    at = _positions(x.shape[2:], kernel, strides, dilations, before, count)
    for positions, n, b, a in zip(at, x.shape[2:], before, after, strict=True):
        low, high = (-b, n + a) if inside else (0, n)
        entries = entries[..., None] * ((positions >= low) & (positions < high)).sum(1)
    channels = x.shape[1]
    ones = call.exact(np.ones((channels, 1, *kernel)))
    conv = linear.Conv(ones, channels, strides, dilations, before, count)
    total = call.apply(conv, x, shape=(1, channels, *count))
    return call.scale(total, call.reciprocal(entries[None, None]), loose=call.reader.arithmetic.one)


@handles("MaxPool")
def _max_pool(call: Call):
    x, kernel = call.value(), call.get("kernel_shape")
    if call.get("storage_order", 0):
        raise Refused("has another storage order")
    strides, dilations, before, _, count = _window(call, x, kernel)
    rank, flat = len(kernel), np.zeros((1,) * 2 * len(kernel), np.int64)
    at = _positions(x.shape[2:], kernel, strides, dilations, before, count)
    for axis, (positions, n) in enumerate(zip(at, x.shape[2:], strict=True)):
        valid = (positions >= 0) & (positions < n)
        if not valid.any(1).all():
            raise Refused("has a window that covers padding only")
        # In the place of padding stands the first entry that the window covers.
        first = np.take_along_axis(positions, valid.argmax(1)[:, None], axis=1)
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = positions.shape
        flat = flat * n + np.where(valid, positions, first).reshape(shape)
    flat = flat.reshape(*count, -1)
    stacked = call.move(lambda a: a.reshape(*a.shape[:2], -1)[:, :, flat], x)
    return call.activate(maximum(), stacked, stacked.shape[:-1])


@handles("GlobalAveragePool", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "GlobalMaxPool")
def _reduce(call: Call):
    x = call.value()
    rank = len(x.shape)
    if call.operator.startswith("Global"):
        axes, keep = range(2, rank), 1
    else:
        axes, keep = call.integers("axes", 1) or [], call.get("keepdims", 1)
        if call.get("noop_with_empty_axes", 0) and not axes:
            return x
        axes = axes or range(rank)
    axes = call.axes(axes, rank)
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
            size = np.array(float(math.prod(x.shape[k] for k in axes)))
            total = call.scale(total, call.reciprocal(size), loose=call.reader.arithmetic.one)
    return call.move(lambda a: a.reshape(shape), total)


# -- moving entries --------------------------------------------------------------------------------


@handles("Identity", "Dropout", "Cast", "CastLike")
def _identity(call: Call):
    if call.operator == "Dropout":
        call.get("ratio")
        call.get("seed")
        if call.item(2) is not None and np.any(call.constant(2)):
            raise Refused("is only supported for inference")
    if call.operator == "Cast":
        call.get("saturate")
        kind = call.get("to")
        if isinstance(call.item(0), np.ndarray) and kind in (6, 7):  # INT32, INT64
            if call.constant(0).dtype == np.float64:
                raise Refused("rounds constants")
            return call.constant(0).astype(np.int64)
        if isinstance(call.item(0), np.ndarray):
            # Integers below 2**24 and float64 are floats; what float32 rounds is refused.
            cast = call.constant(0).astype(np.float64)
            if kind not in (1, 11) or not np.array_equal(cast.astype(np.float32), cast):
                raise Refused("rounds constants")
            return cast
        if kind not in FLOATS:
            raise Refused("is only supported between floating-point types")
    if call.operator == "CastLike" and not isinstance(call.item(1), Value):
        call.floats(1)
    return call.item(0)


@handles("Constant")
def _constant(call: Call):
    if len(call.attributes) != 1:
        raise Refused("needs one value")
    ((name, value),) = call.attributes.items()
    call.attributes.clear()
    if name == "value":
        return stored(value)
    if name in ("value_float", "value_floats") and np.all(np.isfinite(value)):
        return np.array(value, np.float64)
    if name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    raise Refused(f"has the value {name}")


@handles("ConstantOfShape")
def _constant_of_shape(call: Call):
    shape = call.integers("shape", 0) or []
    value = call.get("value")
    value = np.zeros(1) if value is None else stored(value)
    if value.size != 1 or any(n < 0 for n in shape) or math.prod(shape) > MOST_ENTRIES:
        raise Refused("has an impossible shape")
    return np.broadcast_to(value.reshape(()), shape)


@handles("Shape")
def _shape(call: Call):
    shape = call.item(0).shape
    return np.array(shape[call.get("start", 0) : call.get("end", len(shape))], np.int64)


@handles("Reshape")
def _reshape(call: Call):
    x, shape = call.item(0), call.integers("shape", 1) or []
    if not call.get("allowzero", 0):
        shape = [n if n else x.shape[k] for k, n in enumerate(shape)]
    if any(n < -1 for n in shape):
        raise Refused(f"has the impossible shape {shape}")
    return call.move(lambda a: a.reshape(shape), x)


@handles("Flatten")
def _flatten(call: Call):
    x, axis = call.item(0), call.get("axis", 1)
    if not -len(x.shape) <= axis <= len(x.shape):
        raise Refused(f"has the impossible axis {axis}")
    axis = axis + len(x.shape) if axis < 0 else axis
    shape = (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return call.move(lambda a: a.reshape(shape), x)


@handles("Squeeze")
def _squeeze(call: Call):
    x, axes = call.item(0), call.integers("axes", 1)
    axes = None if axes is None else call.axes(axes, len(x.shape))
    return call.move(lambda a: np.squeeze(a, axes), x)


@handles("Unsqueeze")
def _unsqueeze(call: Call):
    x, axes = call.item(0), call.integers("axes", 1) or []
    axes = call.axes(axes, len(x.shape) + len(axes))
    return call.move(lambda a: np.expand_dims(a, axes), x)


@handles("Transpose")
def _transpose(call: Call):
    order = call.get("perm")
    return call.move(lambda a: np.transpose(a, order), call.item(0))


@handles("Concat")
def _concat(call: Call):
    axis = call.get("axis", 0)
    if all(isinstance(x, np.ndarray) for x in call.items) or not any(
        isinstance(x, np.ndarray) for x in call.items
    ):
        return call.move(lambda *arrays: np.concatenate(arrays, axis), *call.items)
    # Constant parts are zeros first, and shifted then.
    variables = [x for x in call.items if isinstance(x, Value)]

    def joined(*arrays):
        rest = iter(arrays)
        parts = [next(rest) if isinstance(x, Value) else np.full(x.shape, -1) for x in call.items]
        return np.concatenate(parts, axis)

    shift = [np.zeros(x.shape) if isinstance(x, Value) else call.floats(k)
             for k, x in enumerate(call.items)]  # fmt: skip
    return call.shift(call.move(joined, *variables), np.concatenate(shift, axis))


@handles("Slice")
def _slice(call: Call):
    x = call.item(0)
    starts, ends = call.integers("starts", 1) or [], call.integers("ends", 2) or []
    axes, steps = call.integers("axes", 3), call.integers("steps", 4)
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    call.axes(axes, len(x.shape))
    slices = [slice(None)] * len(x.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        slices[axis] = slice(start, end, step)
    return call.move(lambda a: a[tuple(slices)], x)


@handles("Split")
def _split(call: Call):
    x, axis, sizes = call.item(0), call.get("axis", 0), call.integers("split", 1)
    (axis,) = call.axes([axis], len(x.shape))
    count = call.get("num_outputs", call.outputs)
    if sizes is None:
        size = -(-x.shape[axis] // count)
        sizes = [min(size, x.shape[axis] - k * size) for k in range(count)]
    if sum(sizes) != x.shape[axis] or min(sizes) <= 0 or len(sizes) != call.outputs:
        raise Refused(f"cannot split {x.shape[axis]} entries into {sizes}")
    ends = np.cumsum([0, *sizes])
    return [
        call.move(lambda a, k=k: np.take(a, range(ends[k], ends[k + 1]), axis), x)
        for k in range(len(sizes))
    ]


@handles("Gather")
def _gather(call: Call):
    x, indices, axis = call.item(0), call.constant(1), call.get("axis", 0)
    n = x.shape[axis]
    if indices.dtype != np.int64 or np.any(indices < -n) or np.any(indices >= n):
        raise Refused("has impossible indices")
    return call.move(lambda a: np.take(a, indices, axis), x)


@handles("Expand")
def _expand(call: Call):
    x = call.item(0)
    shape = np.broadcast_shapes(x.shape, tuple(call.integers("shape", 1) or []))
    if math.prod(shape) > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    return call.move(lambda a: np.broadcast_to(a, shape), x)


@handles("Tile")
def _tile(call: Call):
    repeats = call.integers("repeats", 1) or []
    if math.prod(repeats) * math.prod(call.item(0).shape) > MOST_ENTRIES or min(repeats) < 1:
        raise Refused("has impossible repeats")
    return call.move(lambda a: np.tile(a, repeats), call.item(0))


@handles("Pad")
def _pad(call: Call):
    x, mode = call.value(), call.get("mode", b"constant").decode()
    pads, axes = call.integers("pads", 1) or [], call.integers("axes", 3)
    axes = list(range(len(x.shape)) if axes is None else axes)
    call.axes(axes, len(x.shape))
    value = call.get("value", call.number(2, 0.0))
    widths = [(0, 0)] * len(x.shape)
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        widths[axis] = (before, after)
    size = math.prod(n + a + b for n, (a, b) in zip(x.shape, widths, strict=True))
    if min(map(min, widths)) < 0 or size > MOST_ENTRIES:
        raise Refused(f"has impossible widths {widths}")
    if mode == "constant":
        padded = call.move(lambda a: np.pad(a, widths, constant_values=-1), x)
        if value == 0:
            return padded
        shift = np.pad(np.zeros(x.shape), widths, constant_values=float(value))
        return call.shift(padded, shift)
    longest = [n - 1 if mode == "reflect" else n for n in x.shape]
    if mode not in ("reflect", "edge") or any(
        max(w) > n for w, n in zip(widths, longest, strict=True)
    ):
        raise Refused(f"has the mode {mode}, or widths beyond its input")
    return call.move(lambda a: np.pad(a, widths, mode=mode), x)


# -- activations -----------------------------------------------------------------------------------

_SELU = {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}
_PLAIN: dict[str, tuple[str, dict[str, float]]] = {
    "Relu": ("relu", {}),
    "LeakyRelu": ("leaky_relu", {"alpha": float(np.float32(0.01))}),
    "Elu": ("elu", {"alpha": 1.0}),
    "Selu": ("selu", _SELU),
    "Celu": ("celu", {"alpha": 1.0}),
    "HardSigmoid": (
        "hard_sigmoid",
        {"alpha": float(np.float32(0.2)), "beta": 0.5},
    ),
    "Softplus": ("softplus", {}),
    "Sigmoid": ("sigmoid", {}),
    "Tanh": ("tanh", {}),
    "HardSwish": ("hard_swish", {}),
    "Mish": ("mish", {}),
    "Softsign": ("softsign", {}),
    "Abs": ("abs", {}),
    "Exp": ("exp", {}),
}


@handles(*_PLAIN)
def _plain(call: Call):
    kind, defaults = _PLAIN[call.operator]
    settings = {name: float(call.get(name, default)) for name, default in defaults.items()}
    return call.activate(activation_of(kind, **settings), call.value())


@handles("PRelu")
def _prelu(call: Call):
    x, slope = call.value(), call.floats(1)
    return call.activate(activation_of("prelu", slope=np.broadcast_to(slope, x.shape)), x)


@handles("Gelu")
def _gelu(call: Call):
    kinds = {b"none": "gelu", b"tanh": "gelu_tanh"}
    return call.activate(activation_of(kinds[call.get("approximate", b"none")]), call.value())


@handles("Pow")
def _pow(call: Call):
    x, exponent = call.value(), call.constant(1)
    if np.broadcast_shapes(x.shape, exponent.shape) != x.shape or np.any(exponent != 2):
        raise Refused("is only supported with the exponent 2")
    return call.activate(activation_of("square"), x)


@handles("Clip")
def _clip(call: Call):
    low = float(call.get("min", call.number(1, -math.inf)))
    high = float(call.get("max", call.number(2, math.inf)))
    return _clipped(call, call.value(), low, high)


def _clipped(call: Call, x: Value, low: float, high: float) -> Value:
    # Values of 1e38 are refused elsewhere, so bounds there are no bounds.
    low = -math.inf if low <= -1e38 else low
    high = math.inf if high >= 1e38 else high
    if not low <= high:
        raise Refused(f"has bounds that are not in order: {low} and {high}")
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
    if not variables:
        raise Refused("reads constants only")
    bound = None
    if constants:
        together = np.stack(np.broadcast_arrays(*constants))
        bound = sign * np.max(sign * together, axis=0)
    if len(variables) == 1 and bound is None:
        return variables[0]
    single = len(variables) == 1 and shape == variables[0].shape
    if single and bound is not None and bound.size == 1:
        number = float(bound.item())
        ends = (number, math.inf) if sign > 0 else (-math.inf, number)
        return _clipped(call, variables[0], *ends)
    variables = [x if sign > 0 else call.negated(x) for x in variables]
    variables = [call.broadcast(x, shape) for x in variables]
    zero = [] if bound is None else [np.full(shape, -1)]  # a constant is one more column
    stacked = call.move(lambda *arrays: np.stack([*arrays, *zero], axis=-1), *variables)
    if bound is not None:
        column = np.zeros((*shape, len(variables) + 1))
        column[..., -1] = sign * bound
        stacked = call.shift(stacked, column)
    largest = call.activate(maximum(), stacked, shape)
    return largest if sign > 0 else call.negated(largest)
