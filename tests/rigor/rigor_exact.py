"""The exact truth about relu networks of two inputs: polygons on which they are linear.

All numbers are rational (python-flint's fmpq), so nothing is rounded. This shares nothing with the
library but the files' formats.
"""

from typing import Any

import onnx
from flint import arb, fmpq


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
        assert all(a.name in ("alpha", "beta") and a.i == 1 for a in node.attribute)
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
    for polygon, outputs, _ in traced(layers, low, high):
        yield polygon, outputs


def traced(layers, low, high):
    """The same with the arguments of all relu, one layer after the other, as affine functions."""
    (x, y), (u, v) = low, high
    one, zero = fmpq(1), fmpq(0)
    stack = [([(x, y), (u, y), (u, v), (x, v)], 0, [(one, zero, zero), (zero, one, zero)], [])]
    while stack:
        polygon, number, values, hidden = stack.pop()
        matrix, bias = layers[number]
        made = [
            tuple(
                sum((w * f[k] for w, f in zip(row, values, strict=True)), b if k == 2 else zero)
                for k in range(3)
            )
            for row, b in zip(matrix, bias, strict=True)
        ]
        if number == len(layers) - 1:
            yield polygon, made, hidden
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
        stack += [(part, number + 1, done, hidden + made) for part, done in parts]


def least(made, row) -> fmpq:
    """The minimum of row . outputs over all `pieces`."""
    values = []
    for polygon, outputs in made:
        f = [sum((r * o[k] for r, o in zip(row, outputs, strict=True)), fmpq(0)) for k in range(3)]
        values += [f[0] * x + f[1] * y + f[2] for x, y in polygon]
    return min(values)


def holds(model: onnx.ModelProto, property) -> bool:
    """Whether no point of the box satisfies all rows of any case; strict rows count as weak."""
    try:
        layers = layers_of(model)
    except AssertionError:  # another network than a chain of relu
        return holds_by_balls(model, property)
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


_BALLS = {
    "Relu": lambda x: x.max(arb(0)),
    "Abs": abs,
    "Tanh": lambda x: x.tanh(),
    "Sigmoid": lambda x: 1 / (1 + (-x).exp()),
}


def _outputs(model: onnx.ModelProto, box) -> list[arb]:
    """Enclosures of the outputs over a box, node by node."""
    stored = {t.name: onnx.numpy_helper.to_array(t).astype(float) for t in model.graph.initializer}
    (info,) = model.graph.input
    values = {info.name: list(box)}
    for node in model.graph.node:
        x = values[node.input[0]]
        if node.op_type == "Gemm":
            assert all(a.name in ("alpha", "beta") and a.i == 1 for a in node.attribute)
            matrix, bias = (stored[name] for name in node.input[1:])
            assert matrix.shape == (len(x), *bias.shape)
            made = [
                sum((arb(float(w)) * v for w, v in zip(column, x, strict=True)), arb(float(b)))
                for column, b in zip(matrix.T, bias, strict=True)
            ]
        else:
            assert not node.attribute
            made = [_BALLS[node.op_type](v) for v in x]
        values[node.output[0]] = made
    return values[model.graph.output[0].name]


def holds_by_balls(model: onnx.ModelProto, property) -> bool:
    """The same for other activations: boxes are halved until ball arithmetic decides each."""
    for case in property.cases:
        ends = zip(case.inputs.lower, case.inputs.upper, strict=True)
        stack = [[(arb(fmpq(a.numerator, a.denominator)), arb(fmpq(b.numerator, b.denominator)))
                  for a, b in ends]]  # fmt: skip
        for _ in range(100_000):
            if not stack:
                break
            box = stack.pop()
            inputs = [a.union(b) for a, b in box]
            outputs = _outputs(model, inputs)
            excess = [
                sum((arb(fmpq(c.numerator, c.denominator)) * values[k]
                     for values, terms in ((inputs, row.inputs), (outputs, row.outputs))
                     for k, c in terms), -arb(fmpq(row.bound.numerator, row.bound.denominator)))
                for row in (*case.outputs, *case.input_rows)
            ]  # fmt: skip
            if any(x > 0 for x in excess):
                continue
            widths = [float((b - a).mid()) for a, b in box]
            axis = widths.index(max(widths))
            a, b = box[axis]
            middle = arb(((a + b) / 2).mid())
            for part in ((a, middle), (middle, b)):
                stack.append([part if k == axis else pair for k, pair in enumerate(box)])
        if stack:
            return False
    return True


def value(layers, point) -> list[fmpq]:
    """The outputs at a point, for a check of the pieces."""
    x: Any = [v if isinstance(v, fmpq) else exact(v) for v in point]
    for number, (matrix, bias) in enumerate(layers):
        x = [sum((w * v for w, v in zip(row, x, strict=True)), b)
             for row, b in zip(matrix, bias, strict=True)]  # fmt: skip
        if number < len(layers) - 1:
            x = [max(v, fmpq(0)) for v in x]
    return x
