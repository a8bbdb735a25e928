"""Networks for tests, and a second opinion on them: NumPy alone, any kind of number, no JAX.

`run` evaluates a graph entry by entry with NumPy's own operations, on floats or on fractions.
`affine_forms` writes what stands before every activation as a constant and a matrix over the inputs
and the blocks (the activations' outputs); linear programs, plain backward bounds and plain
intervals are made from these.
"""

import decimal
import itertools
import math
from fractions import Fraction

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import linprog

from stagecert.networks import operations as op
from stagecert.networks.graph import Builder

# -- networks -------------------------------------------------------------------------------------


def affine(build, x, weights, bias):
    """x @ weights + bias."""
    return build.add(op.Shift(), build.add(op.MatMul(), x, weights=weights), weights=bias)


def dense(weights, activation="relu", settings=(), slopes=None, batch_axis=False):
    """A fully connected network from [(matrix, bias), ...]; activations between the layers."""
    build = Builder()
    size = weights[0][0].shape[0]
    h = build.input("x", (1, size) if batch_axis else (size,), batch_axis)
    for k, (matrix, bias) in enumerate(weights):
        h = affine(build, h, matrix, bias)
        if k + 1 < len(weights):
            h = build.add(op.Activation(activation, settings), h, weights=slopes)
    return build.network([h])


def random_layers(random, sizes, bias=0.5):
    """Matrices and biases of a fully connected network."""
    return [
        (random.normal(size=(n, m)) / np.sqrt(n), bias * random.normal(size=m))
        for n, m in itertools.pairwise(sizes)
    ]


def convolution(build, x, kernel, bias, stride=1, padding=1):
    """A two-dimensional convolution with a bias for each channel."""
    conv = op.Conv((stride,) * 2, ((padding, padding),) * 2, (1, 1), (1, 1))
    return build.add(
        op.Shift(), build.add(conv, x, weights=kernel), weights=bias.reshape(1, -1, 1, 1)
    )


def relu(build, x):
    """max(x, 0)."""
    return build.add(op.Activation("relu"), x)


def flatten(build, x):
    """All entries as one row."""
    return build.add(op.Reshape((1, math.prod(x.shape))), x)


def max_pool(build, x, size=2):
    """The maximum over squares that do not overlap."""
    _, channels, height, width = x.shape
    index = np.arange(channels * height * width).reshape(channels, height, width)
    high, wide = height // size, width // size
    index = index[:, : high * size, : wide * size].reshape(channels, high, size, wide, size)
    index = index.transpose(0, 1, 3, 2, 4).reshape(1, channels, high, wide, size * size)
    return build.add(op.Max(), build.add(op.Take(), x, weights=index.astype(np.int32)))


def conv_net(random, size=5, channels=(1, 3, 3), outputs=3, pool=False):
    """Convolutions, perhaps a maximum pooling, and a dense layer."""
    build = Builder()
    h = build.input("image", (1, channels[0], size, size), True)
    for k, (n, m) in enumerate(itertools.pairwise(channels)):
        kernel = random.normal(size=(m, n, 3, 3)) / np.sqrt(9 * n)
        h = relu(build, convolution(build, h, kernel, 0.3 * random.normal(size=m), stride=1 + k))
        if pool and k == 0:
            h = max_pool(build, h)
    h = flatten(build, h)
    matrix = random.normal(size=(h.shape[1], outputs)) / np.sqrt(h.shape[1])
    return build.network([affine(build, h, matrix, random.normal(size=outputs))])


def residual_net(random, width=8, blocks=2, outputs=3):
    """x + W relu(V x), a few times, with an activation after each sum."""
    build = Builder()
    h = build.input("x", (width,), False)
    for _ in range(blocks):
        inner = relu(build, affine(build, h, *random_layers(random, (width, width))[0]))
        branch = affine(build, inner, *random_layers(random, (width, width))[0])
        h = relu(build, build.add(op.Sum((1, 1)), h, branch))
    return build.network([affine(build, h, *random_layers(random, (width, outputs))[0])])


def pooled_net(random, inputs=6, width=12, group=3, outputs=2):
    """A dense layer, maxima over groups of its entries, a dense layer with relu, a dense layer."""
    build = Builder()
    h = affine(
        build, build.input("x", (inputs,), False), *random_layers(random, (inputs, width))[0]
    )
    h = build.add(op.Max(), build.add(op.Reshape((width // group, group)), h))
    h = relu(build, affine(build, h, *random_layers(random, (width // group, width))[0]))
    return build.network([affine(build, h, *random_layers(random, (width, outputs))[0])])


def split_net(random, kinds, inputs=4, width=2, hidden=6, outputs=2, last="relu", scale=1.0):
    """A dense layer whose entries go through different activations, side by side.

    `kinds` are Activation operations, each for `width` entries; then come a dense layer, the
    activation `last` and another dense layer.
    """
    build = Builder()
    x = build.input("x", (inputs,), False)
    matrix, bias = random_layers(random, (inputs, width * len(kinds)))[0]
    h = affine(build, x, scale * matrix, scale * bias)
    parts = []
    for k, kind in enumerate(kinds):
        part = build.add(op.Slice((k * width,), ((k + 1) * width,), (1,)), h)
        slopes = np.full(width, 0.3) if kind.kind == "prelu" else None
        parts.append(build.add(kind, part, weights=slopes))
    h = build.add(op.Concat(0), *parts)
    h = affine(build, h, *random_layers(random, (width * len(kinds), hidden))[0])
    h = build.add(op.Activation(last), h)
    return build.network([affine(build, h, *random_layers(random, (hidden, outputs))[0])])


# -- evaluation -----------------------------------------------------------------------------------


def _zero(x):
    return type(x.flat[0])(0) if x.dtype == object else x.dtype.type(0)


def _places(shape, kernel, strides, dilation):
    """Every offset of a window, with the slices of the entries that it reads."""
    out = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(shape, kernel, strides, dilation, strict=True)
    ]
    for offset in np.ndindex(*kernel):
        parts = zip(offset, dilation, strides, out, strict=True)
        yield offset, tuple(slice(i * d, i * d + s * (n - 1) + 1, s) for i, d, s, n in parts)


def _conv(conv, weights, x):
    spread = [(n - 1) * d + 1 for n, d in zip(x.shape[2:], conv.input_dilation, strict=True)]
    wide = np.full((*x.shape[:2], *spread), _zero(x), x.dtype)
    wide[(..., *(slice(None, None, d) for d in conv.input_dilation))] = x
    wide = np.pad(wide, ((0, 0), (0, 0), *conv.padding), constant_values=_zero(x))
    outer, inner, *kernel = weights.shape
    channels = []
    for o in range(outer):
        first = o // (outer // conv.groups) * inner
        total = _zero(x)
        for offset, place in _places(wide.shape[2:], kernel, conv.strides, conv.dilation):
            for c in range(inner):
                part = wide[(slice(None), first + c, *place)]
                total = total + weights[(o, c, *offset)] * part
        channels.append(total)
    return np.stack(channels, axis=1)


def _window_sum(operation, x):
    wide = np.pad(x, operation.padding, constant_values=_zero(x))
    parts = _places(wide.shape, operation.window, operation.strides, operation.dilation)
    return sum((wide[place] for _, place in parts), _zero(x))


def _cut(x, widths):
    pairs = zip(widths, x.shape, strict=True)
    x = x[tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in pairs)]
    return np.pad(x, [(max(a, 0), max(b, 0)) for a, b in widths], constant_values=_zero(x))


def linear(operation, weights, *x):
    """A linear operation on arrays of floats or fractions."""
    match operation:
        case op.MatMul(left=left):
            return np.matmul(weights, x[0]) if left else np.matmul(x[0], weights)
        case op.Conv():
            return _conv(operation, weights, x[0])
        case op.Scale():
            return x[0] * weights
        case op.Sum(signs=signs):
            return sum((s * v for s, v in zip(signs, x, strict=True)), _zero(x[0]))
        case op.Reshape(shape=shape):
            return x[0].reshape(shape)
        case op.Broadcast(shape=shape):
            return np.broadcast_to(x[0], shape)
        case op.Transpose(axes=axes):
            return x[0].transpose(axes)
        case op.Slice(starts=starts, stops=stops, steps=steps):
            return x[0][tuple(map(slice, starts, stops, steps))]
        case op.Take(axis=axis):
            return np.take(x[0], weights, axis=axis)
        case op.Concat(axis=axis):
            return np.concatenate(x, axis=axis)
        case op.Pad(widths=widths):
            return _cut(x[0], widths)
        case op.Reduce(axes=axes, keepdims=keepdims):
            return np.sum(x[0], axis=axes, keepdims=keepdims)
        case op.WindowSum():
            return _window_sum(operation, x[0])
        case op.Windows():
            at = _places(x[0].shape, operation.window, operation.strides, operation.dilation)
            return np.stack([x[0][place] for _, place in at], axis=-1)
    raise NotImplementedError(operation)


def _ramp(x, slope, offset):
    return np.minimum(np.maximum(slope * x + offset, 0), 1)


def _erfc(z):
    """In extended precision: a series near zero, a continued fraction far out."""
    size = np.abs(z)
    near = np.minimum(size, 1.6)
    term, total = near, near
    for n in range(1, 60):
        term = term * 2 * near * near / (2 * n + 1)
        total = total + term
    near = 1 - 2 / np.sqrt(_PI) * np.exp(-near * near) * total
    far = np.maximum(size, 1.6)
    fraction = far
    for k in range(200, 0, -1):
        fraction = far + np.longdouble(k) / 2 / fraction
    result = np.where(size < 1.6, near, np.exp(-far * far) / np.sqrt(_PI) / fraction)
    return np.where(z < 0, 2 - result, result)


_PI = np.longdouble("3.14159265358979323846264338327950288")
DEFAULTS = {
    "leaky_relu": {"alpha": 0.01},
    "hard_sigmoid": {"alpha": 0.2, "beta": 0.5},
    "elu": {"alpha": 1.0},
    "celu": {"alpha": 1.0},
    "selu": {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
}


def _sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x > 0, 1, e) / (1 + e)


def _exponential(x, size, unit, right):
    return np.where(x > 0, right * x, size * np.expm1(np.minimum(x, 0) / unit))


def _mish(x):
    e = np.exp(-np.abs(x))
    top = np.where(x < 0, e * (2 + e), 1 + 2 * e)
    return x * top / (top + np.where(x < 0, 2, 2 * e * e))


def _gelu_tanh(x):
    near = np.clip(x, -300, 300)
    inner = 2 * np.sqrt(2 / _PI) * (near + np.longdouble("0.044715") * near**3)
    return np.maximum(x, -300) * _sigmoid(inner)


# Functions for floats, and accurate in extended precision.
SMOOTH = {
    "elu": lambda x, _, alpha: _exponential(x, alpha, 1.0, 1.0),
    "selu": lambda x, _, alpha, gamma: gamma * _exponential(x, alpha, 1.0, 1.0),
    "celu": lambda x, _, alpha: _exponential(x, alpha, alpha, 1.0),
    "softplus": lambda x, _: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "exp": lambda x, _: np.exp(x),
    "sigmoid": lambda x, _: _sigmoid(x),
    "tanh": lambda x, _: np.tanh(x),
    "softsign": lambda x, _: x / (1 + np.abs(x)),
    "gelu": lambda x, _: x / 2 * _erfc(-x / np.sqrt(np.longdouble(2))),
    "gelu_tanh": lambda x, _: _gelu_tanh(x),
    "silu": lambda x, _: x * _sigmoid(x),
    "mish": lambda x, _: _mish(x),
}

# Functions that are rational, so that they can be had exactly.
RATIONAL = {
    "relu": lambda x, _: np.maximum(x, 0),
    "leaky_relu": lambda x, _, alpha: np.where(x < 0, alpha * x, x),
    "prelu": lambda x, w: np.where(x < 0, w * x, x),
    "abs": lambda x, _: np.abs(x),
    "clip": lambda x, _, low, high: np.minimum(np.maximum(x, low), high),
    "hard_sigmoid": lambda x, _, alpha, beta: _ramp(x, alpha, beta),
    "hard_swish": lambda x, _: x * np.minimum(np.maximum(x + 3, 0), 6) / 6,
    "square": lambda x, _: x * x,
}


def exactly(x):
    """An array of fractions."""
    x = np.asarray(x, float)
    return np.array([Fraction(float(v)) for v in x.ravel()], object).reshape(x.shape)


DIGITS = decimal.Context(prec=150, Emin=-9999, Emax=9999)


def decimals(x):
    """An array of decimal numbers with 150 digits: faster than fractions, and exact enough."""
    x = np.asarray(x, float)
    return np.array(
        [DIGITS.create_decimal_from_float(float(v)) for v in x.ravel()], object
    ).reshape(x.shape)


def extended(x):
    """An array in extended precision."""
    return np.asarray(x, np.longdouble)


def run(network, *inputs, kind):
    """All outputs at one point as one vector, in numbers of a kind: `exactly`, `decimals`, ..."""
    with decimal.localcontext(DIGITS), np.errstate(over="ignore", invalid="ignore"):
        values = [kind(x) for x in inputs]
        for node in network.nodes:
            values.append(np.asarray(_node(node, kind, *(values[k] for k in node.arguments))))
        return np.concatenate([values[k].ravel() for k in network.outputs])


def _node(node, kind, *x):
    weights = node.weights
    if weights is not None and not np.issubdtype(np.asarray(weights).dtype, np.integer):
        weights = kind(weights)
    match node.operation:
        case op.Shift():
            return x[0] + weights
        case op.Max():
            return np.max(x[0], axis=-1)
        case op.Activation(kind=name, settings=settings):
            numbers = DEFAULTS.get(name, {}) | dict(settings)
            numbers = {key: kind(value).item() for key, value in numbers.items()}
            return (RATIONAL | SMOOTH)[name](x[0], weights, **numbers)
    return linear(node.operation, weights, *x)


# -- affine forms ---------------------------------------------------------------------------------


class Form:
    """What stands before an activation: `constant + matrix @ (inputs, blocks)`, flattened."""

    def __init__(self, constant, matrix, operation=None, shape=(), first=0):
        self.constant, self.matrix = constant, matrix
        self.operation, self.shape, self.first = operation, shape, first

    @property
    def variables(self):
        """Which variables the activation's own outputs are."""
        size = math.prod(self.shape)
        group = self.shape[-1] if isinstance(self.operation, op.Max) else 1
        return np.arange(self.first, self.first + size // group)


def affine_forms(network):
    """A Form for every activation and, last, one for the outputs.

    Variables are the entries of all inputs, then those of every activation's output.
    """
    sizes = [math.prod(s) for s in network.input_shapes]
    blocks = [isinstance(n.operation, (op.Activation, op.Max)) for n in network.nodes]
    total = sum(sizes) + sum(
        math.prod(n.shape) for n, block in zip(network.nodes, blocks, strict=True) if block
    )
    # Row 0 of a value is its constant part, row k + 1 what variable k contributes.
    first, values, forms = 0, [], []

    def variables(shape):
        nonlocal first
        size = math.prod(shape)
        value = np.zeros((total + 1, size))
        value[1 + first + np.arange(size), np.arange(size)] = 1
        first += size
        return value.reshape(total + 1, *shape)

    values = [variables(shape) for shape in network.input_shapes]
    for node, block in zip(network.nodes, blocks, strict=True):
        x = [values[k] for k in node.arguments]
        if block:
            flat = x[0].reshape(total + 1, -1)
            forms.append(Form(flat[0], flat[1:].T, node.operation, x[0].shape[1:], first))
            values.append(variables(node.shape))
        elif isinstance(node.operation, op.Shift):
            value = np.broadcast_to(x[0], (total + 1, *node.shape)).copy()
            value[0] += node.weights
            values.append(value)
        else:
            rows = [linear(node.operation, node.weights, *row) for row in zip(*x, strict=True)]
            values.append(np.stack(rows))
    flat = np.concatenate([values[k].reshape(total + 1, -1) for k in network.outputs], axis=1)
    return [*forms, Form(flat[0], flat[1:].T)]


def max_lines(low, high):
    """Slopes and offsets of the lines above max(x) on a box: one line for each level."""
    floor = low.max()
    lines = []
    for level in {floor, *high[high > floor]}:
        slopes, offset = np.zeros(len(low)), level
        for j, (l, u) in enumerate(zip(low, high, strict=True)):
            if l >= level:
                slopes[j], offset = 1, offset - level
            elif u > level:
                slopes[j] = (u - level) / (u - l)
                offset -= slopes[j] * l
        lines.append((slopes, offset))
    return lines


def triangle_program(network, low, high, row, intermediate):
    """The least row . outputs over the linear relaxation with these intervals, by HiGHS.

    `low` and `high` are the box as one vector; `intermediate` are (low, high) for each activation.
    Only relu and maxima.
    """
    *forms, last = affine_forms(network)
    count = last.matrix.shape[1]
    bounds = np.full((count, 2), [-np.inf, np.inf])
    bounds[: len(low), 0], bounds[: len(low), 1] = low, high
    above, above_right, equal, equal_right = [], [], [], []

    def unit(k):
        e = np.zeros(count)
        e[k] = 1
        return e

    for form, (l, u) in zip(forms, intermediate, strict=True):
        l, u = l.ravel(), u.ravel()
        if isinstance(form.operation, op.Max):
            group = form.shape[-1]
            for j, k in enumerate(form.variables):
                part = slice(j * group, (j + 1) * group)
                rows, constants = form.matrix[part], form.constant[part]
                for a, c in zip(rows, constants, strict=True):
                    above.append(a - unit(k))
                    above_right.append(-c)
                for slopes, offset in max_lines(l[part], u[part]):
                    above.append(unit(k) - slopes @ rows)
                    above_right.append(slopes @ constants + offset)
            continue
        for k, a, c, lj, uj in zip(form.variables, form.matrix, form.constant, l, u, strict=True):
            if uj <= 0:
                bounds[k] = 0, 0
            elif lj >= 0:
                equal.append(unit(k) - a)
                equal_right.append(c)
            else:
                slope = uj / (uj - lj)
                bounds[k] = 0, uj
                above += [a - unit(k), unit(k) - slope * a]
                above_right += [-c, slope * (c - lj)]
    cost = row @ last.matrix

    def matrix(rows):
        return sparse.csr_array(np.array(rows)) if rows else None

    found = linprog(
        cost,
        matrix(above),
        above_right or None,
        matrix(equal),
        equal_right or None,
        bounds,
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert found.status == 0, found.message
    return found.fun + row @ last.constant


# -- plain bounds ---------------------------------------------------------------------------------


def concretised(matrix, constant, low, high):
    """The range of an affine function of a box."""
    positive, negative = np.maximum(matrix, 0), np.minimum(matrix, 0)
    return (
        positive @ low + negative @ high + constant,
        positive @ high + negative @ low + constant,
    )


def plain_intervals(network, low, high):
    """Intervals of every relu's argument, segment by segment, and of the outputs."""
    count = len(low)
    *forms, last = affine_forms(network)
    total = last.matrix.shape[1]
    lower, upper = np.zeros(total), np.zeros(total)
    lower[:count], upper[:count] = low, high
    found = []
    for form in forms:
        found.append(concretised(form.matrix, form.constant, lower, upper))
        lower[form.variables], upper[form.variables] = (np.maximum(x, 0) for x in found[-1])
    return found, concretised(last.matrix, last.constant, lower, upper)


def plain_backward(network, low, high, best_of=None):
    """CROWN with adaptive slopes: intervals of every relu's argument, and of the outputs.

    With `best_of`, intervals of the same entries, each is intersected with those.
    """
    *forms, last = affine_forms(network)
    count = len(low)
    found = []

    def least(matrix, constant, before):
        matrix, constant = matrix.copy(), constant.copy()
        for form, (l, u) in reversed(list(zip(forms[:before], found[:before], strict=True))):
            g = matrix[:, form.variables]
            matrix[:, form.variables] = 0
            unstable = (l < 0) & (u > 0)
            upper_slope = np.where(unstable, u / np.where(unstable, u - l, 1), l >= 0)
            upper_offset = np.where(unstable, -upper_slope * l, 0)
            lower_slope = np.where(unstable, u > -l, l >= 0)
            up, down = np.maximum(g, 0), np.minimum(g, 0)
            slopes = up * lower_slope + down * upper_slope
            matrix += slopes @ form.matrix
            constant += slopes @ form.constant + down @ upper_offset
        return concretised(matrix[:, :count], constant, low, high)[0]

    for k, form in enumerate(forms):
        lower = least(form.matrix, form.constant, k)
        upper = -least(-form.matrix, -form.constant, k)
        if best_of is not None:
            lower, upper = np.maximum(lower, best_of[k][0]), np.minimum(upper, best_of[k][1])
        found.append((lower, upper))
    end = len(forms)
    return found, (
        least(last.matrix, last.constant, end),
        -least(-last.matrix, -last.constant, end),
    )
