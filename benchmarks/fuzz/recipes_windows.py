"""Recipes for convolutions, pools and reductions."""

import math
from typing import Any

from benchmarks.fuzz.graphs import Writer


def _image(w: Writer) -> str:
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
        items, settings = [x], dict[str, Any](keepdims=w.draw.choice((None, 0, 1)))
        if w.has(operator, "axes"):
            settings["axes"] = axes or None
        else:
            if axes or w.draw.random() < 0.5:
                items.append(w.ints(axes) if axes else "")
            if not axes and w.draw.random() < 0.4:
                settings["noop_with_empty_axes"] = 1
        w.emit(operator, items, **settings)

    return recipe


RECIPES = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "AveragePool": _pool("AveragePool"),
    "MaxPool": _pool("MaxPool"), "GlobalAveragePool": _global_pool("GlobalAveragePool"),
    "GlobalMaxPool": _global_pool("GlobalMaxPool"), "ReduceSum": _reduce("ReduceSum"),
    "ReduceMean": _reduce("ReduceMean"), "ReduceMax": _reduce("ReduceMax"),
    "ReduceMin": _reduce("ReduceMin"),
}  # fmt: skip
