"""Products of variables, and activations that a model spells out with them, matched exactly.

A value x times a gate: with a multiple u of x, u * (1 + Erf(u / sqrt(2))) / 2 is gelu(u), and
u * Sigmoid(u) is silu(u), for example. Which multiple u is of x follows from the model's constants
in ball arithmetic; two numbers are equal only if both are exact and the same. What a pattern has
replaced (an Erf, a cube) is dropped if nothing else reads it.
"""

from typing import Any

import numpy as np
from flint import arb

from stagecert_check import linear
from stagecert_check.constants import settled
from stagecert_check.functions import (
    CUBES,
    Activation,
    Value,
    activation_of,
    cube_near,
)
from stagecert_check.functions import product as pairwise
from stagecert_check.graph import Call


def product(call: Call, x: Value, y: Value) -> Value:
    """x * y: a function of one value if it is one."""
    if x.index == y.index:
        return call.activate(activation_of("square"), x)
    for one, other in ((x, y), (y, x)) if x.shape == y.shape else ():
        made = _gated(call, one, other)
        if made is not None:
            return made
    same = {v.index: (a, b) for v, a, b in call.lines(y)}
    for v, a, b in reversed(call.lines(x)) if x.shape == y.shape else ():
        if v.index in same:
            return _quadratic(call, v, (a, b), same[v.index])
    return multiplied(call, x, y)


def multiplied(call: Call, x: Value, y: Value) -> Value:
    """x * y of two values, entry by entry."""
    shape = np.broadcast_shapes(x.shape, y.shape)
    pair = (call.broadcast(x, shape), call.broadcast(y, shape))
    stacked = call.move(lambda *arrays: np.stack(arrays, axis=-1), *pair)
    return call.activate(pairwise(), stacked, shape)


def _quadratic(call: Call, v: Value, x: tuple[arb, arb], y: tuple[arb, arb]) -> Value:
    """(a v + b) * (c v + d)."""
    (a, b), (c, d) = x, y
    total = _scaled(call, call.activate(activation_of("square"), v), a * c)
    first = a * d + b * c
    if not first.is_zero():
        total = call.apply(linear.Sum((1, 1)), total, _scaled(call, v, first), shape=v.shape)
    constant = b * d
    return total if constant.is_zero() else call.shift(total, settled(constant))


def quotient(call: Call, x: Any, y: Value) -> Value:
    """x / y: softsign, or x times the reciprocal."""
    root, a, b = call.lines(y)[-1]
    function, argument = _made(call, root)
    if _kind(function) == "abs" and a == b and a != 0 and isinstance(x, Value):
        found = _multiple(call, x, argument, arb(0)) if x.shape == y.shape else None
        if found is not None:
            v, p, q, r = found
            made = call.activate(activation_of("softsign"), _line(call, v, p, q))
            return _scaled(call, made, r / a)
    inverse = call.activate(activation_of("reciprocal"), y)
    return product(call, x, inverse) if isinstance(x, Value) else call.scale(inverse, x)


def logarithm(call: Call, x: Value) -> Value:
    """Log(x), which may be softplus, or log(sigmoid(y)) = -softplus(-y)."""
    root, a, b = call.lines(x)[-1]
    function, argument = _made(call, root)
    if _kind(function) == "exp" and a == 1 and b == 1:
        return call.activate(activation_of("softplus"), argument)
    if _kind(function) == "sigmoid" and a == 1 and b.is_zero():
        return call.negated(call.activate(activation_of("softplus"), call.negated(argument)))
    return call.activate(activation_of("log"), x)


def _gated(call: Call, x: Value, y: Value) -> Value | None:
    """x * y, where y is the gate of an activation of a multiple of x, or 1 + x**2."""
    root, a, b = call.lines(y)[-1]
    function, argument = _made(call, root)
    if _kind(function) == "square":
        found = _multiple(call, x, argument, arb(0))
        return None if found is None else _cubic(call, argument, found[3] * b, found[3] * a)
    gate = _gate(call, function, argument, a, b)
    if gate is None:
        return None
    activation, inner, offset, unit, factor = gate
    found = _multiple(call, x, inner, offset)
    if found is None:
        return None
    v, p, q, r = found
    made = call.activate(activation, _line(call, v, unit * p, unit * q))
    return _scaled(call, made, factor * r)


def _gate(
    call: Call, function: Any, g: Value, a: arb, b: arb
) -> tuple[Activation, Value, arb, arb, arb] | None:
    """(f, g, s, unit, factor) with (a * function(g) + b) * u = factor * f(unit * u) for u = g + s;
    for another g if the gate is made of several functions."""
    kind, root = _kind(function), arb(2).sqrt()
    if kind == "erf" and a == b:
        # gelu(root * u) = root * u * (1 + erf(u)) / 2
        return activation_of("gelu"), g, arb(0), root, root * a
    if kind == "tanh" and a == b:
        cubic = _of_cubic(call, g)
        if cubic is None:
            return None
        inner, unit, cube = cubic
        # gelu_tanh(unit * u) = unit * u * (1 + tanh) / 2
        return activation_of("gelu_tanh", cube=cube), inner, arb(0), unit, 2 * a / unit
    if not b.is_zero():
        return None
    if kind == "sigmoid":
        return activation_of("silu"), g, arb(0), arb(1), a
    if kind == "hard_sigmoid" and function.settings["beta"] == 0.5 and function.settings["alpha"]:
        # hard_swish(v) = v * clip(v / 6 + 1 / 2, 0, 1)
        unit = 6 * arb(function.settings["alpha"])
        return activation_of("hard_swish"), g, arb(0), unit, a / unit
    if kind == "clip" and function.settings == {"low": 0, "high": 6}:
        # u * clip(u + 3, 0, 6) = 6 * hard_swish(u)
        return activation_of("hard_swish"), g, arb(-3), arb(1), 6 * a
    if kind == "tanh":
        before, argument = _made(call, g)
        if _kind(before) == "softplus":
            return activation_of("mish"), argument, arb(0), arb(1), a
    return None


def _of_cubic(call: Call, h: Value) -> tuple[Value, arb, float] | None:
    """(x, k, c) if h = sqrt(2 / pi) * (k x + c (k x)**3), for a c that `gelu_tanh` has."""
    root, a, b = call.lines(h)[-1]
    node = call.reader.program.nodes[root.index]
    if not isinstance(node.operation, linear.Sum) or len(node.arguments) != 2 or not b.is_zero():
        return None
    terms = [Value(k, root.shape) for k in node.arguments]
    signs = node.operation.signs
    for one, other in ((0, 1), (1, 0)):
        cube, c, d = call.lines(terms[other])[-1]
        function, x = _made(call, cube)
        if not _is_cube(function) or not d.is_zero():
            continue
        found = _multiple(call, terms[one], x, arb(0))
        if found is None:
            continue
        first, third = a * signs[one] * found[3], a * signs[other] * c
        if not first != 0:  # noqa: SIM202  (balls: not certainly another number)
            continue
        unit = first / (2 / arb.pi()).sqrt()
        factor = third / first / unit**2
        cube = float(factor.mid())
        if CUBES.contains(cube_near(cube)) and cube_near(cube).contains(factor):
            return x, unit, cube
    return None


def _cubic(call: Call, x: Value, first: arb, third: arb) -> Value:
    """first * x + third * x**3."""
    cube = _scaled(call, call.activate(activation_of("power", exponent=3.0), x), third)
    if first.is_zero():
        return cube
    return call.apply(linear.Sum((1, 1)), _scaled(call, x, first), cube, shape=x.shape)


def _multiple(call: Call, x: Value, g: Value, offset: arb) -> tuple[Value, arb, arb, arb] | None:
    """(v, p, q, r) with g + offset = p * v + q and x = r * (p * v + q) exactly."""
    of_x = {v.index: (c, d) for v, c, d in call.lines(x)}
    for v, p, q in call.lines(g):
        if v.index in of_x and p != 0:
            (c, d), q = of_x[v.index], q + offset
            if c * q == d * p:
                return v, p, q, c / p
    return None


def _line(call: Call, x: Value, a: arb, b: arb) -> Value:
    """a * x + b."""
    x = _scaled(call, x, a)
    return x if b.is_zero() else call.shift(x, settled(b))


def _scaled(call: Call, x: Value, factor: arb) -> Value:
    return call.scale(x, settled(factor))


def _made(call: Call, x: Value) -> tuple[Any, Value]:
    """What made a value, and the (first) value that this reads."""
    node = call.reader.program.nodes[x.index]
    nodes, argument = call.reader.program.nodes, node.arguments[:1]
    return node.operation, Value(argument[0], nodes[argument[0]].shape) if argument else x


def _is_cube(operation: Any) -> bool:
    return _kind(operation) == "power" and operation.settings["exponent"] == 3


def _kind(operation: Any) -> str:
    return getattr(operation, "kind", "")


__all__ = ["logarithm", "multiplied", "product", "quotient"]
