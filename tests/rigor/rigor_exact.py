"""The exact truth about relu networks of two inputs: polygons on which they are linear.

All numbers are rational (python-flint's fmpq), so nothing is rounded. This shares nothing with the
library but the files' formats.
"""

import onnx
from flint import fmpq


def exact(x) -> fmpq:
    """A float as a rational number."""
    return fmpq(*float(x).as_integer_ratio())


def layers_of(model: onnx.ModelProto) -> list[tuple[list, list]]:
    """(weights, biases) of a chain of Gemm and Relu, and nothing else, as rationals."""
    stored = {t.name: onnx.numpy_helper.to_array(t).astype(float) for t in model.graph.initializer}
    (info,) = model.graph.input
    value, layers = info.name, []
    for number, node in enumerate(model.graph.node):
        assert node.input[0] == value
        (value,) = node.output
        if number % 2:
            assert node.op_type == "Relu"
            assert not node.attribute
            continue
        assert node.op_type == "Gemm"
        assert not node.attribute
        assert not node.domain
        matrix, bias = (stored[name] for name in node.input[1:])
        assert matrix.ndim == 2
        assert bias.shape == matrix.shape[1:]
        layers.append(([[exact(v) for v in row] for row in matrix.T], [exact(v) for v in bias]))
    assert value == model.graph.output[0].name
    assert [d.dim_value for d in info.type.tensor_type.shape.dim] == [1, 2]
    return layers


def clip(polygon: list, normal, level) -> list:
    """The part of a convex polygon with normal . x <= level; corners in order."""
    found = []
    values = [normal[0] * x + normal[1] * y - level for x, y in polygon]
    for k, (x, y) in enumerate(polygon):
        here, before = values[k], values[k - 1]
        if here * before < 0:
            t = before / (before - here)
            u, v = polygon[k - 1]
            found.append((u + t * (x - u), v + t * (y - v)))
        if here <= 0:
            found.append((x, y))
    return found


def pieces(layers, low, high):
    """(polygon, outputs as affine functions (a, b, c) of the inputs) for all linear pieces."""
    (x, y), (u, v) = low, high
    one, zero = fmpq(1), fmpq(0)
    stack = [([(x, y), (u, y), (u, v), (x, v)], 0, [(one, zero, zero), (zero, one, zero)])]
    while stack:
        polygon, number, values = stack.pop()
        matrix, bias = layers[number]
        made = [
            tuple(
                sum((w * f[k] for w, f in zip(row, values, strict=True)), b if k == 2 else zero)
                for k in range(3)
            )
            for row, b in zip(matrix, bias, strict=True)
        ]
        if number == len(layers) - 1:
            yield polygon, made
            continue
        parts = [(polygon, [])]
        for a, b, c in made:
            divided = []
            for part, done in parts:
                ends = [a * p + b * q + c for p, q in part]
                if max(ends) > 0:
                    above = clip(part, (-a, -b), c) if min(ends) < 0 else part
                    divided.append((above, [*done, (a, b, c)]))
                if max(ends) <= 0 or min(ends) < 0:
                    below = clip(part, (a, b), -c) if max(ends) > 0 else part
                    divided.append((below, [*done, (zero, zero, zero)]))
            parts = divided
        stack += [(part, number + 1, done) for part, done in parts]


def minimum(layers, low, high, row) -> fmpq:
    """The minimum of row . outputs over a box."""
    best = None
    for polygon, outputs in pieces(layers, low, high):
        f = [sum((r * o[k] for r, o in zip(row, outputs, strict=True)), fmpq(0)) for k in range(3)]
        value = min(f[0] * x + f[1] * y + f[2] for x, y in polygon)
        best = value if best is None else min(best, value)
    assert best is not None
    return best


def holds(model: onnx.ModelProto, property) -> bool:
    """Whether no point of the box satisfies all rows of any case; strict rows count as weak."""
    layers = layers_of(model)
    if property.sizes[:2] != (2, len(layers[-1][1])):
        return False

    def rational(x):
        return fmpq(x.numerator, x.denominator)

    for case in property.cases:
        low, high = ([rational(v) for v in side] for side in (case.inputs.lower, case.inputs.upper))
        for polygon, outputs in pieces(layers, low, high):
            for row in (*case.outputs, *case.input_rows):
                f = [fmpq(0)] * 3
                for k, c in row.outputs:
                    f = [p + rational(c) * q for p, q in zip(f, outputs[k], strict=True)]
                for k, c in row.inputs:
                    f[k] += rational(c)
                polygon = clip(polygon, f[:2], rational(row.bound) - f[2])
            if polygon:
                return False
    return True


def value(layers, point) -> list[fmpq]:
    """The outputs at a point, for a check of the pieces."""
    x = [exact(v) for v in point]
    for number, (matrix, bias) in enumerate(layers):
        x = [sum((w * v for w, v in zip(row, x, strict=True)), b)
             for row, b in zip(matrix, bias, strict=True)]  # fmt: skip
        if number < len(layers) - 1:
            x = [max(v, fmpq(0)) for v in x]
    return x
