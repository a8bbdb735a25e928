"""How each operator gets into a random graph: its inputs, attributes and corner cases."""

import math

import numpy as np
from onnx import TensorProto, helper

from benchmarks.fuzz import patterns
from benchmarks.fuzz.chains import computed_range
from benchmarks.fuzz.graphs import Skip, Writer

# -- arithmetic ------------------------------------------------------------------------------------


def _beside(w: Writer, shape) -> tuple[int, ...]:
    """A shape that broadcasts with `shape`: the same, fewer axes, ones, or more of them."""
    shape = tuple(shape)
    kind = w.draw.randrange(6)
    if kind == 0:
        return ()
    if kind == 1:
        return (1,)
    if kind == 2 and shape:
        return shape[w.draw.randrange(len(shape)) :]
    if kind == 3 and shape:
        return tuple(n if w.draw.random() < 0.5 else 1 for n in shape)
    if kind == 4 and math.prod(shape) <= 8:
        return (2, *(n if w.draw.random() < 0.5 else 1 for n in shape))
    return shape


def _other(w: Writer, x: str, operator: str) -> str:
    """A second operand: a constant, or a variable that broadcasts."""
    if w.draw.random() < 0.35:
        y = w.pick()
        try:
            np.broadcast_shapes(w.shape(x), w.shape(y))
        except ValueError:
            pass
        else:
            if w.opset >= 8 or operator in ("Add", "Sub") or w.shape(x) == w.shape(y):
                return y
    same = w.opset < 8 and operator not in ("Add", "Sub", "Mul", "Div")
    return w.floats(w.shape(x) if same else _beside(w, w.shape(x)))


def _sums(operator: str):
    def recipe(w: Writer) -> None:
        x = w.pick()
        items = [x, _other(w, x, operator)]
        if operator in ("Sum", "Mean", "Max", "Min"):
            if w.draw.random() < 0.15:
                items = [x]
            while w.draw.random() < 0.4 and len(items) < 5:
                items.append(_other(w, x, operator))
        w.draw.shuffle(items)
        w.emit(operator, items)

    return recipe


def _mul(w: Writer) -> None:
    x = w.pick()
    pair = [x, w.floats(_beside(w, w.shape(x)))]
    w.draw.shuffle(pair)
    w.emit("Mul", pair)


def _div(w: Writer) -> None:
    x = w.pick()
    array = w.palette.array(_beside(w, w.shape(x)))
    w.emit("Div", [x, w.floats(array.shape, np.where(array == 0, 3, array))])


def _pow(w: Writer) -> None:
    x = w.pick()
    shape = w.draw.choice(((), (1,), w.shape(x)))
    exponent = w.draw.choice((1, 2, 2, 2, 3))
    if w.opset >= 12 and w.draw.random() < 0.3:
        w.emit("Pow", [x, w.keep(np.full(shape, exponent, np.int64))])
    else:
        w.emit("Pow", [x, w.floats(shape, np.full(shape, exponent))])


def _matmul(w: Writer) -> None:
    x = w.pick(least=1)
    shape, n = w.shape(x), w.draw.choice((1, 2, 3))
    left = w.draw.random() < 0.35
    if left:
        inner = shape[-2] if len(shape) > 1 else shape[0]
        other = w.draw.choice(((n, inner), (n, inner), (inner,), (1, n, inner), (2, n, inner)))
    else:
        other = w.draw.choice(
            ((shape[-1], n), (shape[-1], n), (shape[-1],), (1, shape[-1], n), (2, shape[-1], n))
        )
    y = w.floats(other)
    w.emit("MatMul", [y, x] if left else [x, y])


def _gemm(w: Writer) -> None:
    x = w.pick(2)
    rows, columns = w.shape(x)
    n, left = w.draw.choice((1, 2, 3)), w.draw.random() < 0.25
    flip, flip_weights = w.draw.randrange(2), w.draw.randrange(2)
    if left:
        inner, width = (columns, rows) if flip else (rows, columns)
        weights = (inner, n) if flip_weights else (n, inner)
        out, pair = (n, width), [w.floats(weights), x]
        settings = {"transA": flip_weights, "transB": flip}
    else:
        height, inner = (columns, rows) if flip else (rows, columns)
        weights = (n, inner) if flip_weights else (inner, n)
        out, pair = (height, n), [x, w.floats(weights)]
        settings = {"transA": flip, "transB": flip_weights}
    shapes = [(), (1,), (out[1],), (1, out[1]), (out[0], 1), (1, 1), out]
    if w.opset < 11 or w.draw.random() < 0.85:
        pair.append(w.floats(w.draw.choice(shapes)))
    for name in ("alpha", "beta"):
        if w.draw.random() < 0.5:
            settings[name] = _attribute(w.draw.choice((0.5, 2.0, 0.1, -1.0, 0, w.palette.entry())))
    w.emit("Gemm", pair, **{k: v for k, v in settings.items() if v or k in ("alpha", "beta")})


def _attribute(value: float) -> float:
    """A number that an attribute can hold."""
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    if not math.isfinite(value):
        raise Skip("infinite")
    return value


def _batch_normalization(w: Writer) -> None:
    x = w.pick(2, 3, 4)
    n = w.shape(x)[1]
    variance = np.asarray([w.palette.positive() for _ in range(n)])
    weights = [w.floats((n,)) for _ in range(3)]
    epsilon = w.draw.choice((None, None, 1e-5, 1e-3, 0.0, 1e-12))
    w.emit("BatchNormalization", [x, *weights, w.floats((n,), variance)],
           epsilon=epsilon, momentum=w.draw.choice((None, 0.5)))  # fmt: skip


# -- windows ---------------------------------------------------------------------------------------


def _image(w: Writer, rank: int | None = None) -> str:
    """A value of shape (1, channels, *space); another value is reshaped if there is none."""
    draw = w.draw
    names = [
        name for name, e in w.values.items()
        if not e.constant and e.type == w.type and len(e.shape) >= 3 and e.shape[0] == 1
    ]  # fmt: skip
    if names and draw.random() < 0.8:
        return draw.choice((names[-1], draw.choice(names)))
    x = w.pick()
    size = math.prod(w.shape(x))
    choices = [(1, c, size // c) for c in (1, 2, 3) if size % c == 0]
    choices += [(1, c, a, size // c // a) for c in (1, 2) for a in (2, 3) if size % (c * a) == 0]
    choices += [(1, 1, 2, 2, size // 4)] if size % 4 == 0 else []
    return w.one("Reshape", x, w.ints(draw.choice(choices)))


def _window(w: Writer, operator: str, space, kernel) -> dict:
    draw, rank, settings = w.draw, len(space), {}
    if draw.random() < 0.6:
        settings["strides"] = [draw.choice((1, 1, 2, 3)) for _ in range(rank)]
    dilated = operator != "AveragePool" or w.opset >= 19
    dilated = dilated and (operator != "MaxPool" or w.opset >= 10)
    if dilated and draw.random() < 0.3:
        settings["dilations"] = [draw.choice((1, 2)) for _ in range(rank)]
    kind = draw.random()
    if kind < 0.55:
        settings["pads"] = [draw.choice((0, 0, 1, 1, 2)) for _ in range(2 * rank)]
    elif kind < 0.75:
        settings["auto_pad"] = draw.choice(("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"))
    if operator.endswith("Pool") and w.has(operator, "ceil_mode") and draw.random() < 0.4:
        settings["ceil_mode"] = 1
    if operator == "AveragePool" and draw.random() < 0.5:
        settings["count_include_pad"] = draw.randrange(2)
    return settings


def _kernel(w: Writer, space) -> list[int]:
    return [w.draw.choice([k for k in (1, 2, 2, 3) if k <= n + 1]) for n in space]


def _conv(w: Writer) -> None:
    x = _image(w)
    _, channels, *space = w.shape(x)
    groups = w.draw.choice([g for g in (1, 1, channels) if channels % g == 0])
    kernel, outputs = _kernel(w, space), groups * w.draw.choice((1, 1, 2))
    items = [x, w.floats((outputs, channels // groups, *kernel))]
    if w.draw.random() < 0.5:
        items.append(w.floats((outputs,)))
    settings = _window(w, "Conv", space, kernel)
    if groups > 1 or w.draw.random() < 0.3:
        settings["group"] = groups
    if w.draw.random() < 0.5:
        settings["kernel_shape"] = kernel
    w.emit("Conv", items, **settings)


def _conv_transpose(w: Writer) -> None:
    x = _image(w)
    _, channels, *space = w.shape(x)
    groups = w.draw.choice((1, 1, channels))
    kernel = [w.draw.choice((1, 2, 3)) for _ in space]
    items = [x, w.floats((channels, w.draw.choice((1, 2)), *kernel))]
    if w.draw.random() < 0.5:
        items.append(w.floats((w.values[items[1]].shape[1] * groups,)))
    settings = _window(w, "ConvTranspose", space, kernel)
    strides = settings.get("strides", [1] * len(space))
    dilations = settings.get("dilations", [1] * len(space))
    if w.draw.random() < 0.3:
        settings["output_padding"] = [
            w.draw.randrange(max(s, d)) for s, d in zip(strides, dilations, strict=True)
        ]
    if w.draw.random() < 0.15:
        settings.pop("pads", None)
        settings["output_shape"] = [n * s + w.draw.choice((0, 0, 1))
                                    for n, s in zip(space, strides, strict=True)]  # fmt: skip
    if groups > 1:
        settings["group"] = groups
    w.emit("ConvTranspose", items, **settings)


def _pool(operator: str):
    def recipe(w: Writer) -> None:
        x = _image(w)
        kernel = _kernel(w, w.shape(x)[2:])
        settings = _window(w, operator, w.shape(x)[2:], kernel)
        w.emit(operator, [x], kernel_shape=kernel, **settings)

    return recipe


def _global_pool(operator: str):
    return lambda w: w.emit(operator, [_image(w)])


def _reduce(operator: str):
    def recipe(w: Writer) -> None:
        x = w.pick()
        rank = len(w.shape(x))
        some = w.draw.sample(range(rank), w.draw.randint(0, rank))
        axes = [a - rank if w.draw.random() < 0.4 else a for a in some]
        items, settings = [x], {"keepdims": w.draw.choice((None, 0, 1))}
        if w.has(operator, "axes"):
            settings["axes"] = axes or None
        else:
            if axes or w.draw.random() < 0.5:
                items.append(w.ints(axes) if axes else "")
            if not axes and w.draw.random() < 0.4:
                settings["noop_with_empty_axes"] = 1
        w.emit(operator, items, **settings)

    return recipe


# -- moving entries --------------------------------------------------------------------------------


def _axes_of(w: Writer, operator: str, items: list, axes: list[int]) -> dict:
    """Axes as an attribute or as an input, whichever the opset has."""
    if w.has(operator, "axes"):
        return {"axes": axes}
    items.append(w.ints(axes))
    return {}


def _reshape(w: Writer) -> None:
    x = w.pick()
    shape = list(w.shape(x))
    size, kind = math.prod(shape), w.draw.randrange(5)
    if kind == 0:
        new = [-1]
    elif kind == 1:
        new = [0 if k < len(shape) - 1 else -1 for k in range(max(len(shape), 1))]
        new = new if shape else [1]
    elif kind == 2:
        divisor = w.draw.choice([d for d in range(1, size + 1) if size % d == 0])
        new = [1, divisor, size // divisor]
    elif kind == 3:
        new = [] if size == 1 else [size]
    else:
        new = [1, -1]
    settings = {"allowzero": 1} if w.opset >= 14 and 0 not in new and kind == 2 else {}
    if not new:
        w.emit("Reshape", [x, w.keep(np.zeros(0, np.int64))], **settings)
    elif kind == 4 and w.draw.random() < 0.5:
        # The shape is computed, as exporters do.
        length = w.one("Gather", w.one("Shape", x), w.ints([0]), axis=0) if shape else w.ints([1])
        w.emit("Reshape", [x, w.one("Concat", length, w.ints([-1]), axis=0)])
    else:
        w.emit("Reshape", [x, w.ints(new)], **settings)


def _flatten(w: Writer) -> None:
    x = w.pick()
    rank = len(w.shape(x))
    least = -rank if w.opset >= 11 else 0
    w.emit("Flatten", [x], axis=w.draw.choice((None, *range(least, rank + 1))) if rank else 0)


def _squeeze(w: Writer) -> None:
    x = w.pick()
    ones = [k for k, n in enumerate(w.shape(x)) if n == 1]
    if w.draw.random() < 0.3:
        w.emit("Squeeze", [x])
        return
    if not ones:
        raise Skip("no axis of length one")
    axes = w.draw.sample(ones, w.draw.randint(1, len(ones)))
    if w.opset >= 11:
        axes = [a - len(w.shape(x)) if w.draw.random() < 0.3 else a for a in axes]
    items = [x]
    settings = _axes_of(w, "Squeeze", items, axes)
    w.emit("Squeeze", items, **settings)


def _unsqueeze(w: Writer) -> None:
    x = w.pick()
    count = w.draw.choice((1, 1, 2))
    rank = len(w.shape(x)) + count
    if rank > 5:
        raise Skip("many axes")
    axes = w.draw.sample(range(rank), count)
    if w.opset >= 11:
        axes = [a - rank if w.draw.random() < 0.3 else a for a in axes]
    items = [x]
    settings = _axes_of(w, "Unsqueeze", items, axes)
    w.emit("Unsqueeze", items, **settings)


def _transpose(w: Writer) -> None:
    x = w.pick()
    order = list(range(len(w.shape(x))))
    w.draw.shuffle(order)
    w.emit("Transpose", [x], perm=None if w.draw.random() < 0.2 or not order else order)


def _concat(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axis, items = w.draw.randrange(len(shape)), [x]
    for _ in range(w.draw.choice((0, 1, 1, 2))):
        fits = [
            name for name, e in w.values.items()
            if not e.constant and e.type == w.type and len(e.shape) == len(shape)
            and all(m == n or k == axis for k, (m, n) in enumerate(zip(e.shape, shape, strict=True)))
        ]  # fmt: skip
        if w.draw.random() < 0.5:
            items.append(w.draw.choice(fits))
        else:
            length = w.draw.choice((1, 2))
            items.append(w.floats([length if k == axis else n for k, n in enumerate(shape)]))
    w.draw.shuffle(items)
    negative = w.opset >= 11 and w.draw.random() < 0.3
    w.emit("Concat", items, axis=axis - len(shape) if negative else axis)


def _slice(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axes = w.draw.sample(range(len(shape)), w.draw.randint(1, len(shape)))
    starts, ends, steps = [], [], []
    for axis in axes:
        n = shape[axis]
        step = w.draw.choice((1, 1, 1, 2, -1, -2, 3)) if w.opset >= 10 else 1
        if step > 0:
            starts.append(w.draw.choice((0, 0, 1, -1, -n, -n - 3)))
            ends.append(w.draw.choice((n, n, n + 5, 2**31 - 1, -1, 2**63 - 1)))
        else:
            starts.append(w.draw.choice((n - 1, -1, n + 4, 2**31 - 1)))
            ends.append(w.draw.choice((-n - 1, -(2**31), 0, -(2**63) + 1)))
        steps.append(step)
    if w.opset >= 10:
        axes = [a - len(shape) if w.draw.random() < 0.3 else a for a in axes]
    if w.opset < 10:
        w.emit("Slice", [x], starts=starts, ends=ends, axes=axes)
        return
    items = [x, w.ints(starts), w.ints(ends), w.ints(axes)]
    if axes == list(range(len(axes))) and w.draw.random() < 0.5:
        items[3] = ""
    if any(s != 1 for s in steps) or w.draw.random() < 0.3:
        items.append(w.ints(steps))
    while not items[-1]:
        items.pop()
    w.emit("Slice", items)


def _split(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axis = w.draw.randrange(len(shape))
    n, items, settings = shape[axis], [x], {}
    count = w.draw.choice((1, 2, 2, 3))
    if count > n:
        raise Skip("short")
    if w.draw.random() < 0.6:
        cuts = sorted(w.draw.sample(range(1, n), count - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        if w.has("Split", "split"):
            settings["split"] = sizes
        else:
            items.append(w.ints(sizes))
    elif w.opset >= 18:
        settings["num_outputs"] = count
    negative = w.opset >= 11 and w.draw.random() < 0.3
    settings["axis"] = axis - len(shape) if negative else axis
    w.emit("Split", items, count, **settings)


def _gather(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    axis = w.draw.randrange(len(shape))
    n, form = shape[axis], w.draw.choice(((), (1,), (2,), (3,), (2, 2)))
    least = -n if w.opset >= 11 else 0
    indices = [w.draw.randrange(least, n) for _ in range(math.prod(form))]
    array = np.asarray(indices, w.draw.choice((np.int64, np.int32))).reshape(form)
    negative = w.opset >= 11 and w.draw.random() < 0.3
    w.emit("Gather", [x, w.keep(array)], axis=axis - len(shape) if negative else axis)


def _expand(w: Writer) -> None:
    x = w.pick()
    shape = _beside(w, w.shape(x))
    shape = tuple(2 if n == 1 and w.draw.random() < 0.5 else n for n in shape)
    if not shape:
        raise Skip("a scalar")
    w.emit("Expand", [x, w.ints(shape)])


def _tile(w: Writer) -> None:
    x = w.pick(least=1)
    w.emit("Tile", [x, w.ints([w.draw.choice((1, 1, 2, 3)) for _ in w.shape(x)])])


def _pad(w: Writer) -> None:
    x = w.pick(least=1)
    rank = len(w.shape(x))
    modes = ["constant", "constant", "reflect", "edge"] + ["wrap"] * (w.opset >= 19)
    mode = w.draw.choice(modes)
    widths = [w.draw.choice((0, 0, 1, 1, 2, -1)) for _ in range(2 * rank)]
    if mode != "constant":
        widths = [max(n, 0) for n in widths]
    settings = {} if mode == "constant" and w.draw.random() < 0.5 else {"mode": mode}
    value = w.draw.random() < 0.6 and mode == "constant"
    if w.opset < 11:
        if value:
            settings["value"] = _attribute(w.palette.entry())
        w.emit("Pad", [x], pads=widths, **settings)
        return
    if w.opset >= 18 and w.draw.random() < 0.3:
        axes = w.draw.sample(range(rank), w.draw.randint(1, rank))
        items = [x, w.ints([widths[a] for a in axes] + [widths[a + rank] for a in axes])]
        items.append(w.floats((), [w.palette.entry()]) if value else "")
        items.append(w.ints([a - rank if w.draw.random() < 0.3 else a for a in axes]))
    else:
        items = [x, w.ints(widths)]
        if value:
            items.append(w.floats((), [w.palette.entry()]))
    w.emit("Pad", items, **settings)


def _constants(w: Writer) -> None:
    """x plus a constant that depends on x's shape, or that nodes make of nothing."""
    x, kind = w.pick(), w.draw.randrange(4)
    if kind == 0:
        value = w.tensor_of(w.palette.array((1,)))
        constant = w.one("ConstantOfShape", w.one("Shape", x), value=value)
    elif kind == 1:
        constant = computed_range(w)
    elif kind == 2:
        constant = w.one("Cast", w.one("Size", x), to=w.kind)
    else:
        start, end = w.draw.choice(((0, None), (None, None), (-1, None), (0, 1), (1, None)))
        settings = {"start": start, "end": end} if w.opset >= 15 else {}
        constant = w.one("Cast", w.one("Shape", x, **settings), to=w.kind)
    w.emit(w.draw.choice(("Add", "Sub", "Mul", "Max")), [x, constant])


def _constant(w: Writer) -> None:
    """A Constant in one of its other forms, added."""
    x = w.pick()
    if w.opset < 12 or w.kind != TensorProto.FLOAT:
        constant = w.one("Constant", value=w.tensor_of(w.palette.array((1,))))
    elif w.draw.random() < 0.5:
        constant = w.one("Constant", value_float=float(w.palette.array(())))
    else:
        numbers = [float(n) for n in w.palette.array((w.draw.choice((1, 2)),))]
        constant = w.one("Constant", value_floats=numbers)
    w.emit(w.draw.choice(("Add", "Mul", "Max")), [x, constant])


# -- activations and types -------------------------------------------------------------------------


def _unary(operator: str, **ranges):
    def recipe(w: Writer) -> None:
        settings = {}
        for name, numbers in ranges.items():
            if w.draw.random() < 0.7:
                number = w.draw.choice((*numbers, w.draw.uniform(0.01, 2)))
                settings[name] = float(np.float32(number))
        w.emit(operator, [w.pick()], **settings)

    return recipe


def _prelu(w: Writer) -> None:
    x = w.pick()
    shape = _beside(w, w.shape(x))
    shape = shape if np.broadcast_shapes(shape, w.shape(x)) == w.shape(x) else ()
    w.emit("PRelu", [x, w.floats(shape)])


def _gelu(w: Writer) -> None:
    w.emit("Gelu", [w.pick()], approximate=w.draw.choice((None, "none", "tanh")))


def _clip(w: Writer) -> None:
    x = w.pick()
    low, high = sorted((w.palette.entry(), w.palette.entry()))
    if w.draw.random() < 0.1:
        low, high = high, low if w.opset >= 13 else high
    kind = w.draw.randrange(4)
    low, high = None if kind == 1 else low, None if kind == 2 else high
    if w.opset < 11:
        ends = [None if e is None else _attribute(e) for e in (low, high)]
        w.emit("Clip", [x], min=ends[0], max=ends[1])
        return
    items = [x, "" if low is None else w.floats((), [low])]
    if high is not None:
        items.append(w.floats((), [high]))
    w.emit("Clip", items if items[-1] else [x])


def _dropout(w: Writer) -> None:
    x, items, settings = w.pick(), [], {}
    if w.opset < 12:
        settings["ratio"] = 0.5
    else:
        items = [w.keep(np.asarray(0.5, np.float32))] if w.draw.random() < 0.6 else []
        if items and w.draw.random() < 0.5:
            items.append(w.keep(np.zeros((), bool)))
    w.emit("Dropout", [x, *items], w.draw.choice((1, 2)), **settings)


def _cast(w: Writer) -> None:
    """To another floating-point type and back: real arithmetic does not notice."""
    x = w.pick()
    other = w.draw.choice((TensorProto.FLOAT, TensorProto.DOUBLE))
    y = w.one("Cast", x, to=other)
    if w.draw.random() < 0.5:
        y = w.one("Relu", y)
    w.emit("Cast", [y], to=w.kind)


def _cast_like(w: Writer) -> None:
    x = w.pick()
    y = w.one("CastLike", x, w.keep(np.zeros((), w.draw.choice((np.float32, np.float64)))))
    w.emit("CastLike", [y, w.draw.choice((x, w.scalar()))])


def _unused(w: Writer) -> None:
    """A node that no output needs, of an operator that nobody has to know."""
    operator = w.draw.choice(("Softmax", "Sign" if w.opset >= 9 else "Floor", "Relu"))
    node = helper.make_node(operator, [w.pick(least=1)], [w.name()], w.name())
    w.check_types(node)
    w.nodes.append(node)  # it is not evaluated, and has no value


def _local_function(w: Writer) -> None:
    """A local function with an attribute that a node in it refers to, perhaps nested."""
    leaky = helper.make_node("LeakyRelu", ["a"], ["c"])
    reference = helper.make_attribute("alpha", 0.0)
    reference.ClearField("f")
    reference.ref_attr_name = "slope"
    leaky.attribute.append(reference)
    nodes = [
        leaky,
        helper.make_node("Sub", ["c", "b"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
    ]
    outputs = w.draw.choice((["d"], ["e"], ["e", "d"]))
    name = w.function(nodes, ["a", "b"], outputs, ["slope"])
    settings = {"slope": float(np.float32(w.draw.choice((0.01, 0.25, -0.5))))}
    x = w.pick()
    y = w.floats(w.draw.choice(((), w.shape(x))))
    made = w.emit(name, [x, y], len(outputs), domain="own", **settings)
    if w.draw.random() < 0.3:
        inner = helper.make_node(name, ["p", "p"], ["q"] + ["r"] * (len(outputs) - 1), domain="own")
        inner.attribute.append(helper.make_attribute("slope", 0.5))
        outer = w.function([inner], ["p"], ["q"])
        w.functions["own", outer].opset_import.append(helper.make_opsetid("own", 1))
        w.emit(outer, made[:1], domain="own")


RECIPES = {
    "Add": _sums("Add"), "Sub": _sums("Sub"), "Sum": _sums("Sum"), "Mean": _sums("Mean"),
    "Max": _sums("Max"), "Min": _sums("Min"), "Mul": _mul, "Div": _div, "Pow": _pow,
    "Neg": _unary("Neg"), "MatMul": _matmul, "Gemm": _gemm,
    "BatchNormalization": _batch_normalization,
    "Conv": _conv, "ConvTranspose": _conv_transpose, "AveragePool": _pool("AveragePool"),
    "MaxPool": _pool("MaxPool"), "GlobalAveragePool": _global_pool("GlobalAveragePool"),
    "GlobalMaxPool": _global_pool("GlobalMaxPool"), "ReduceSum": _reduce("ReduceSum"),
    "ReduceMean": _reduce("ReduceMean"), "ReduceMax": _reduce("ReduceMax"),
    "ReduceMin": _reduce("ReduceMin"),
    "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Transpose": _transpose, "Concat": _concat, "Slice": _slice, "Split": _split,
    "Gather": _gather, "Expand": _expand, "Tile": _tile, "Pad": _pad, "constants": _constants,
    "Constant": _constant, "Relu": _unary("Relu"), "Abs": _unary("Abs"), "Exp": _unary("Exp"),
    "LeakyRelu": _unary("LeakyRelu", alpha=(0.01, 0.0, 1.0, -0.5, 2.0)), "PRelu": _prelu,
    "Elu": _unary("Elu", alpha=(1.0, 0.5, 2.0)), "Celu": _unary("Celu", alpha=(1.0, 0.5, 3.0)),
    "Selu": _unary("Selu", alpha=(1.0, 1.5), gamma=(1.0, 2.0)), "Sigmoid": _unary("Sigmoid"),
    "Tanh": _unary("Tanh"), "Softplus": _unary("Softplus"), "Softsign": _unary("Softsign"),
    "HardSigmoid": _unary("HardSigmoid", alpha=(0.2, 0.16666667, -0.3), beta=(0.5, 0.0, 2.0)),
    "HardSwish": _unary("HardSwish"), "Mish": _unary("Mish"), "Gelu": _gelu,
    "Swish": _unary("Swish", alpha=(1.0, 2.0, -1.0)), "Clip": _clip,
    "Identity": _unary("Identity"), "Dropout": _dropout, "Cast": _cast, "CastLike": _cast_like,
    "unused": _unused, "function": _local_function, **patterns.PATTERNS,
}  # fmt: skip

_OFTEN = {"Add": 3, "Mul": 3, "Gemm": 4, "MatMul": 3, "Conv": 3, "Relu": 4, "Sum": 2,
          "Pad": 2, "AveragePool": 2, "MaxPool": 2, "Slice": 1.5, "ConvTranspose": 1.5, "Swish": 2,
          "Gelu": 2}  # fmt: skip
_RARE = {"Identity": 0.3, "Dropout": 0.3, "Cast": 0.4, "CastLike": 0.4, "unused": 0.4, "Neg": 0.5,
         "Exp": 0.5, "function": 0.5}  # fmt: skip
WEIGHTS = [
    _OFTEN.get(name, _RARE.get(name, 0.8 if name in patterns.PATTERNS else 1.0)) for name in RECIPES
]
