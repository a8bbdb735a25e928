"""Activations that exporters spell out, correctly and nearly, and sums and products that cancel.

A program that recognises them must relax the function that is there, not the one it resembles.
"""

import math

import numpy as np

from benchmarks.fuzz.graphs import Skip, Writer


def _near(w: Writer, value: float) -> str:
    """A constant: the value in the graph's type, its neighbour, or one that is off by more."""
    value = float(np.asarray(value, w.dtype))
    kind = w.draw.randrange(5)
    if kind == 1:
        value = float(np.nextafter(np.asarray(value, w.dtype), np.asarray(np.inf, w.dtype)))
    elif kind == 2:
        value *= 1 + w.draw.choice((1e-7, -1e-7, 8e-7, 3e-7, -9e-7))
    elif kind == 3:
        value *= 1 + w.draw.choice((1e-3, 1e-9, 1e-12))
    return w.scalar_of(value)


def _near_number(w: Writer, value: float) -> float:
    """An attribute near a value."""
    off = w.draw.choice((0, 0, 1e-7, 9e-7, -5e-7, 1e-4))
    return float(np.float32(value * (1 + off)))


def _times(w: Writer, x: str, y: str) -> str:
    return w.one("Mul", x, y) if w.draw.random() < 0.5 else w.one("Mul", y, x)


def _plus(w: Writer, x: str, y: str) -> str:
    return w.one("Add", x, y) if w.draw.random() < 0.5 else w.one("Add", y, x)


def _enlarged(w: Writer, y: str) -> None:
    """Perhaps times a large number, which shows small errors."""
    if w.draw.random() < 0.4:
        w.one("Mul", y, w.scalar_of(w.draw.choice((1e6, 1e4, -1e6, 65536.0))))


def _silu(w: Writer) -> None:
    x = w.pick()
    inner = x if w.draw.random() < 0.4 else _times(w, x, _near(w, w.draw.choice((1.0, 1.702))))
    outer = w.draw.choice((x, x, inner))
    _enlarged(w, _times(w, outer, w.one("Sigmoid", inner)))


def _hard_swish(w: Writer) -> None:
    x = w.pick()
    if w.draw.random() < 0.5:
        settings = {"alpha": _near_number(w, 1 / 6), "beta": w.draw.choice((0.5, 0.5, 0.50000006))}
        _enlarged(w, _times(w, x, w.one("HardSigmoid", x, **settings)))
        return
    moved = _plus(w, x, _near(w, 3.0))
    if w.opset >= 11:
        items = [moved, w.scalar_of(0.0), w.scalar_of(w.draw.choice((6.0, 6.0, 6.0000005)))]
        clipped = w.emit("Clip", items)[0]
    else:
        clipped = w.emit("Clip", [moved], min=0.0, max=6.0)[0]
    if w.draw.random() < 0.5:
        gate = w.one("Div", clipped, _near(w, 6.0))
        _enlarged(w, _times(w, x, gate))
    else:
        _enlarged(w, w.one("Div", _times(w, x, clipped), _near(w, 6.0)))


def _gelu(w: Writer) -> None:
    x = w.pick()
    if w.draw.random() < 0.5:
        inner = w.one("Div", x, _near(w, math.sqrt(2)))
    else:
        inner = _times(w, x, _near(w, math.sqrt(0.5)))
    gate = _plus(w, w.one("Erf", inner), _near(w, 1.0))
    kind = w.draw.randrange(3)
    if kind == 0:
        _enlarged(w, _times(w, _times(w, x, gate), _near(w, 0.5)))
    elif kind == 1:
        _enlarged(w, _times(w, _times(w, x, _near(w, 0.5)), gate))
    else:
        _enlarged(w, _times(w, x, _times(w, gate, _near(w, 0.5))))


def _gelu_tanh(w: Writer) -> None:
    x = w.pick()
    if w.draw.random() < 0.6:
        cube = w.one("Pow", x, w.scalar_of(3.0))
    else:
        cube = _times(w, x, _times(w, x, x))
    inner = _plus(w, x, _times(w, cube, _near(w, 0.044715)))
    gate = w.one("Tanh", _times(w, inner, _near(w, math.sqrt(2 / math.pi))))
    gate = _plus(w, gate, _near(w, 1.0))
    if w.draw.random() < 0.5:
        _enlarged(w, _times(w, _times(w, x, gate), _near(w, 0.5)))
    else:
        _enlarged(w, _times(w, _times(w, x, _near(w, 0.5)), gate))


def _spelt_softplus(w: Writer) -> None:
    x = w.pick()
    y = w.one("Log", _plus(w, w.one("Exp", x), _near(w, 1.0)))
    if w.draw.random() < 0.3:
        y = _times(w, x, w.one("Tanh", y))
    _enlarged(w, y)


def _mish(w: Writer) -> None:
    x = w.pick()
    inner = x if w.draw.random() < 0.7 else _times(w, x, _near(w, 1.0))
    _enlarged(w, _times(w, x, w.one("Tanh", w.one("Softplus", inner))))


def _softsign(w: Writer) -> None:
    x = w.pick()
    _enlarged(w, w.one("Div", x, _plus(w, w.one("Abs", x), _near(w, 1.0))))


def _square(w: Writer) -> None:
    x = w.pick()
    if w.draw.random() < 0.5:
        _enlarged(w, w.one("Mul", x, x))
    else:
        other = _times(w, x, w.scalar())
        _enlarged(w, _times(w, w.draw.choice((x, _times(w, x, w.scalar()))), other))


def _cancelling_sum(w: Writer) -> None:
    big = w.draw.choice((1e30, 1e20, 16777216.0, 1e10))
    x = w.pick()
    if w.draw.random() < 0.5:
        items = [x, *(w.scalar_of(v) for v in (big, w.draw.choice((1.0, 0.1)), -big))]
        w.draw.shuffle(items)
        if w.opset < 8:
            raise Skip("sums do not broadcast")
        _enlarged(w, w.one("Sum", *items))
    else:
        constant = w.one("Add", w.scalar_of(big), w.scalar_of(w.draw.choice((1.0, 3.0))))
        y = w.one("Add", x, constant)
        _enlarged(w, w.one("Sub", y, w.scalar_of(big)))


def _cancelling_products(w: Writer) -> None:
    x = w.pick()
    a = w.draw.choice((3.0, 7.0, 0.1, 1e10, 1e30))
    one = w.scalar_of(a)
    other = w.scalar_of(1 / a)
    for _ in range(w.draw.choice((1, 2, 8, 25))):
        x = w.one("Mul", x, one)
        x = w.one("Mul", x, other) if w.draw.random() < 0.6 else w.one("Div", x, one)
    _enlarged(w, x)


def _large_mean(w: Writer) -> None:
    """A normalisation whose mean is far away: bias - mean * factor cancels."""
    x = w.pick(2, 3, 4)
    n = w.shape(x)[1]
    big = np.asarray([w.draw.choice((1e20, -1e20, 1e10, 0.0)) for _ in range(n)])
    moved = w.one("Add", x, w.floats((n, *(1 for _ in w.shape(x)[2:])), big))
    numbers = [w.palette.array((n,)), w.palette.array((n,)), big,
               np.asarray([w.palette.positive() for _ in range(n)])]  # fmt: skip
    w.emit("BatchNormalization", [moved, *(w.floats((n,), v) for v in numbers)],
           epsilon=w.draw.choice((None, 1e-3)))  # fmt: skip


PATTERNS = {
    "silu": _silu, "hard_swish": _hard_swish, "erf_gelu": _gelu, "tanh_gelu": _gelu_tanh,
    "softplus": _spelt_softplus, "mish": _mish, "softsign": _softsign, "square": _square,
    "cancelling_sum": _cancelling_sum, "cancelling_products": _cancelling_products,
    "large_mean": _large_mean,
}  # fmt: skip
