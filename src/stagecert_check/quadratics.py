"""Lower bounds where variables are multiplied: sums of products as a quadratic form of the inputs.

Planes beside single products know nothing of each other: of x'Px with x in a box they lose every
product by itself, and that P has no negative eigenvalue is lost with them. Here the entries of a
box are x = centre + radius * t with -1 <= t <= 1, and every value on the way to a product is

    c + G . (t, e) +- off,    |t|, |e| <= 1,

where each neuron that is not linear on the box adds an e of its own. So a sum of products is

    c + l . t + t'Ht + (terms with an e) +- off.

With any matrix M and any vector s, t'Ht = |M't|^2 + t'Rt for R = H - MM', and |M't|^2 is at least
2 s . M't - |s|^2, since squares are not negative. That is exact where H has no negative eigenvalue
and s is right, and it needs no trust in how M and s were found. All else is bounded entry by entry.

What lies between inputs, neurons and products is linear, and the same for all parts of a case's
box: it is worked out once, by passes back over the whole box (`bounds`).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert_check.bounds import Facts, linear_parts
from stagecert_check.functions import Activation, Product, Refused
from stagecert_check.graph import Program
from stagecert_check.numbers import EPS, LARGEST, TINY, Arithmetic
from stagecert_check.objectives import Objective

# A computed allowance is a sum of up to thousands of terms: it may itself be rounded.
_GENEROUS = 1 + 1e-9
_MANY = 2**30  # more than there are underflows
_SWEEPS = 8  # over the entries, for the point where a form is smallest
# Larger networks are not worth it: forms have an entry for each free input and each neuron.
MOST_FREE, MOST_ENTRIES = 16, 256


@dataclass(frozen=True, eq=False)
class Goals:
    """Linear functions of (inputs and neurons, products), from below: one in each row."""

    constant: np.ndarray
    values: np.ndarray
    products: np.ndarray


@dataclass(frozen=True, eq=False)
class Forms:
    """What values are on some boxes: centres and coefficients, (boxes, 1 + symbols, entries).

    Attributes:
        values, sides: inputs and neurons; both factors of the products, one after the other.
        off, sides_off: (boxes, entries), how far they are off for any symbols.
        sizes, sides_sizes: at least the absolute values of a centre, of all its coefficients and of
            how far it is off, added up.
        arguments: of the neurons, layer by layer.
    """

    values: np.ndarray
    off: np.ndarray
    sizes: np.ndarray
    sides: np.ndarray
    sides_off: np.ndarray
    sides_sizes: np.ndarray
    arguments: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class Sums:
    """Goals as quadratic forms: constant + linear . t + t'Ht, on each goal's box.

    The goals are off from these by `neurons`, one number for each of them, and `rest` at most.
    """

    constant: np.ndarray
    linear: np.ndarray
    square: np.ndarray
    neurons: np.ndarray
    rest: np.ndarray


@dataclass(frozen=True, eq=False)
class _Layer:
    """A nonlinear function: its argument is weights . values + constant, up to `off`."""

    function: Activation
    shape: tuple[int, ...]  # of the argument
    weights: np.ndarray
    sizes: np.ndarray  # their absolute values
    constant: np.ndarray
    off: np.ndarray


class Quadratics:
    """Quadratic forms on parts of a box, for one program.

    Attributes:
        free: which entries of the inputs are not fixed by the box: the first symbols.
        symbols: how many there are; those of a neuron come after the neurons before it.
    """

    def __init__(self, program: Program, low: np.ndarray, high: np.ndarray):
        """Works out what is linear; `applicable` says for what this is meant.

        Raises:
            Refused: intervals on the whole box cannot be had.
        """
        self.program = program
        self.free = np.flatnonzero(high > low)
        facts = Facts(Arithmetic(), program, low[None], high[None]).derive(passes=False)
        self.facts = facts
        self.last = _last_products(program)
        self.inner = [k for k in program.activations if k not in self.last]
        self.sources = [*program.inputs, *self.inner]
        self.stops = [*self.sources, *self.last]
        self.inputs = sum(_size(program, k) for k in program.inputs)
        self.layers = [self._layer(k) for k in self.inner]
        self.symbols = len(self.free) + sum(_size(program, k) for k in self.inner)
        parts = [self._layer(k) for k in self.last]
        # Both factors of all products: first those on the left.
        order = np.concatenate([np.arange(len(x.constant)) + n for n, x in _offsets(parts)])
        order = np.concatenate([order[::2], order[1::2]])
        self._sides = _Layer(
            Product(), (len(order) // 2, 2),
            np.concatenate([part.weights for part in parts])[order],
            np.concatenate([part.sizes for part in parts])[order],
            np.concatenate([part.constant for part in parts])[order],
            np.concatenate([part.off for part in parts])[order],
        )  # fmt: skip

    @staticmethod
    def applicable(program: Program, low: np.ndarray, high: np.ndarray) -> bool:
        """Whether there are products at the end of a network that is small enough."""
        entries = sum(_size(program, program.nodes[k].arguments[0]) for k in program.activations)
        free = int(np.sum(high > low))
        fits = 0 < free <= MOST_FREE and len(low) + entries <= MOST_ENTRIES
        return fits and bool(_last_products(program))

    def _layer(self, index: int) -> _Layer:
        """An activation's argument as a linear function of inputs and neurons before it."""
        (argument,) = self.program.nodes[index].arguments
        shape, count = self.program.nodes[argument].shape, _size(self.program, argument)
        unit = np.eye(count).reshape(-1, *shape)
        below, weights = linear_parts(self.facts, {argument: unit}, self.stops)
        above, negated = linear_parts(self.facts, {argument: -unit}, self.stops)
        matrix = self._columns(weights, self.sources, count)
        if not np.array_equal(matrix, -self._columns(negated, self.sources, count)):
            raise Refused("a linear function is rounded in two ways")  # no arithmetic does that
        least, most = below, -above
        middle = 0.5 * least + 0.5 * most
        off = np.nextafter(np.maximum(most - middle, middle - least), np.inf)
        function = self.program.nodes[index].operation
        assert isinstance(function, Activation)
        return _Layer(function, shape, matrix, np.abs(matrix), middle, off)

    def _columns(self, weights: dict[int, Any], stops: list[int], rows: int) -> np.ndarray:
        parts = [
            weights[k].reshape(rows, -1) if k in weights
            else np.zeros((rows, _size(self.program, k)))
            for k in stops
        ]  # fmt: skip
        return np.concatenate(parts, axis=1) if parts else np.zeros((rows, 0))

    def goals(self, wanted: list[Objective]) -> Goals:
        """What tasks want to be above zero, as functions of inputs, neurons and products."""
        rows, start = len(wanted), {}
        slip = np.zeros(rows)
        for index in sorted({k for one in wanted for k in one.terms}):
            count = _size(self.program, index)
            near, off = np.zeros((rows, count)), np.zeros((rows, count))
            for k, one in enumerate(wanted):
                if index in one.terms:
                    near[k], off[k] = one.terms[index]
            start[index] = near.reshape(-1, *self.program.nodes[index].shape)
            slip += (off * self.facts.magnitude(index).reshape(-1)).sum(axis=1) * _GENEROUS
        constant = np.array([one.constant[0] for one in wanted], float)
        slip += np.array([one.constant[1] for one in wanted], float)
        least, weights = linear_parts(self.facts, start, self.stops)
        slip += 8 * EPS * (np.abs(least) + np.abs(constant) + slip)
        return Goals(
            least + constant - slip,
            self._columns(weights, self.sources, rows),
            self._columns(weights, self.last, rows),
        )

    def forms(self, low: np.ndarray, high: np.ndarray) -> Forms:
        """The forms of all values on parts of the box."""
        boxes, free = len(low), len(self.free)
        width = self.inputs + sum(_size(self.program, k) for k in self.inner)
        values = np.zeros((boxes, 1 + self.symbols, width))
        off, sizes = np.zeros((boxes, width)), np.zeros((boxes, width))
        centre = 0.5 * low + 0.5 * high
        radius = np.nextafter(np.maximum(high - centre, centre - low), np.inf)
        values[:, 0, : self.inputs] = centre
        values[:, 1 + np.arange(free), self.free] = radius[:, self.free]
        fixed = np.ones(self.inputs, bool)
        fixed[self.free] = False
        off[:, : self.inputs] = np.where(fixed, radius, 0)
        sizes[:, : self.inputs] = np.abs(centre) + radius
        at, symbol, arguments = self.inputs, 1 + free, list[np.ndarray]()
        for layer in self.layers:
            form, over, size = self._argument(layer, values[:, :symbol], off, sizes, at)
            arguments.append(form)
            new, gap, over, size = _output(layer, form, over, size)
            count = new.shape[-1]
            values[:, :symbol, at : at + count] = new
            values[:, symbol + np.arange(count), at + np.arange(count)] = gap
            off[:, at : at + count], sizes[:, at : at + count] = over, size
            at, symbol = at + count, symbol + count
        sides, over, size = self._argument(self._sides, values, off, sizes, at)
        return Forms(values, off, sizes, sides, over, size, arguments)

    @staticmethod
    def _argument(
        layer: _Layer, values: np.ndarray, off: np.ndarray, sizes: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The form of an argument, which reads the first `width` values."""
        weights, boxes = layer.weights[:, :width], len(values)
        flat = np.ascontiguousarray(values[..., :width]).reshape(-1, width)
        form = (flat @ weights.T).reshape(boxes, -1, len(weights))
        form[:, 0] += layer.constant
        # Every coefficient is a sum of `width` products. What these are off by adds up, over all
        # symbols, to no more than so many roundings of `size`.
        size = sizes[:, :width] @ layer.sizes[:, :width].T + np.abs(layer.constant) + layer.off
        over = (off[:, :width] @ layer.sizes[:, :width].T + layer.off) * _GENEROUS
        over += (2 * width + 16) * EPS * size + values.shape[1] * (width + 8) * TINY
        return form, over, size * _GENEROUS + TINY

    def sums(self, forms: Forms, of: np.ndarray, goals: Goals) -> Sums:
        """Goals as quadratic forms, each on the box that `of` says."""
        free, half = 1 + len(self.free), goals.products.shape[1]
        plain = np.matmul(forms.values[of], goals.values[:, :, None])[..., 0]
        left, right = forms.sides[..., :half], forms.sides[..., half:]
        scaled = goals.products[:, None, :]
        one = np.matmul(left[of, :free] * scaled, right[of].swapaxes(1, 2))
        other = np.matmul(right[of, :free] * scaled, left[of].swapaxes(1, 2))
        constant = goals.constant + plain[:, 0] + one[:, 0, 0]
        linear = plain[:, 1:] + one[:, 0, 1:] + other[:, 0, 1:]
        square = one[:, 1:, 1:free]
        square = 0.5 * square + 0.5 * square.swapaxes(1, 2)
        mixed = one[:, 1:, free:] + other[:, 1:, free:]
        weights = np.abs(goals.products)
        both = [np.abs(x[:, free:]).sum(axis=1) for x in (left, right)]  # of neurons
        neurons = np.abs(linear[:, free - 1 :]) + np.abs(mixed).sum(axis=1)
        rest = ((both[0] * both[1])[of] * weights).sum(axis=1)
        sizes, off = forms.sides_sizes, forms.sides_off
        product = sizes[:, :half] * sizes[:, half:]
        over = off[:, :half] * sizes[:, half:] + off[:, half:] * sizes[:, :half]
        over += off[:, :half] * off[:, half:]
        # The roundings of all sums above: each product of coefficients is in two of them.
        slip = 4 * (half + goals.values.shape[1] + 16) * EPS
        size = (product[of] * weights).sum(axis=1)
        size += (forms.sizes[of] * np.abs(goals.values)).sum(axis=1) + np.abs(goals.constant)
        rest += (over[of] * weights).sum(axis=1)
        rest += (forms.off[of] * np.abs(goals.values)).sum(axis=1)
        rest = rest * _GENEROUS + slip * size + _MANY * TINY
        return Sums(constant, linear[:, : free - 1], square, neurons * _GENEROUS, rest)

    def bounds(self, forms: Forms, of: np.ndarray, goals: Goals) -> np.ndarray:
        """Lower bounds on goals, each on the box that `of` says."""
        return smallest(self.sums(forms, of, goals))


def smallest(sums: Sums) -> np.ndarray:
    """Lower bounds on forms, for entries between -1 and 1."""
    return least(sums)[0]


def least(sums: Sums) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, nearly where forms are smallest, and what of their squares has the wrong sign."""
    square, linear = sums.square, sums.linear
    values, vectors = np.linalg.eigh(square)
    root = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
    near = np.matmul(root, root.swapaxes(1, 2))
    count = square.shape[1]
    left = square - near
    length = np.sqrt(np.einsum("bii->bi", near))
    slack = (count + 8) * EPS * (np.abs(square) + length[:, :, None] * length[:, None, :])
    # A square of an entry is not negative: what is left of it counts only if it is below zero.
    own = np.einsum("bii->bi", left)
    whole = np.abs(left).sum(axis=(1, 2))
    negative = whole - np.maximum(own, 0).sum(axis=1)
    point = _minimiser(linear, near)
    middle = np.matmul(point[:, None, :], root)[:, 0]
    slope = linear + 2 * np.matmul(root, middle[:, :, None])[..., 0]
    most = np.abs(root).sum(axis=1)  # at least |M't|, entry by entry
    rest = sums.neurons.sum(axis=1) + sums.rest
    size = np.abs(sums.constant) + np.abs(linear).sum(axis=1) + rest
    size += (np.abs(middle) * (np.abs(middle) + 2 * most)).sum(axis=1) + whole
    bound = sums.constant - (middle * middle).sum(axis=1) - np.abs(slope).sum(axis=1)
    bound = bound - negative - slack.sum(axis=(1, 2)) * _GENEROUS - rest
    bound = bound - (count * count + 64) * EPS * size - _MANY * TINY
    return np.where(np.isfinite(bound), bound, -np.inf), point, left


def _minimiser(linear: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Nearly where linear . t + t'Ht is smallest, for H without negative eigenvalues."""
    point = np.zeros_like(linear)
    slope = linear.copy()
    own = 2 * np.einsum("bii->bi", square)
    flat = own <= 0
    step = np.where(flat, 1, own)
    for _ in range(_SWEEPS):
        for k in range(linear.shape[1]):
            aim = np.where(
                flat[:, k], -np.sign(slope[:, k]), point[:, k] - slope[:, k] / step[:, k]
            )
            move = np.clip(aim, -1, 1) - point[:, k]
            point[:, k] += move
            slope += 2 * square[:, k] * move[:, None]
    return point


def _output(
    layer: _Layer, form: np.ndarray, off: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The form of a function of an argument: without the new symbols, whose coefficients follow."""
    function, shape = layer.function, layer.shape
    radius = np.abs(form[:, 1:]).sum(axis=1)
    radius = (radius + off) * (1 + (form.shape[1] + 8) * EPS)
    low, high = (
        np.nextafter(form[:, 0] + side * radius, side * np.inf).reshape(-1, *shape)
        for side in (-1, 1)
    )
    if not (np.all(np.abs(low) <= LARGEST) and np.all(np.abs(high) <= LARGEST)):
        raise Refused(f"a value of the network may be larger than {LARGEST:g}")
    below, slope = function.slopes(low, high)
    least, most = (function.offset(low, high, slope, side) for side in (1, -1))
    if function.kind != "relu":  # of that, what is parallel to its chord is the narrowest
        other, another = (function.offset(low, high, below, side) for side in (1, -1))
        wider = most - least > another - other
        least, most = np.where(wider, other, least), np.where(wider, another, most)
        wider = wider.reshape(*wider.shape, *(1,) * (slope.ndim - wider.ndim))
        slope = np.where(wider, below, slope)
    boxes, count = len(form), math.prod(least.shape[1:])
    each = slope.reshape(boxes, 1, count, -1)
    new = (form.reshape(boxes, form.shape[1], count, -1) * each).sum(axis=-1)
    middle = 0.5 * least + 0.5 * most
    gap = np.nextafter(np.maximum(most - middle, middle - least), np.inf).reshape(boxes, -1)
    new[:, 0] += middle.reshape(boxes, -1)
    steep, terms = np.abs(each[:, 0]), each.shape[-1]
    over = (steep * off.reshape(boxes, count, -1)).sum(axis=-1) * _GENEROUS
    scale = (steep * size.reshape(boxes, count, -1)).sum(axis=-1)
    scale += np.maximum(np.abs(least), np.abs(most)).reshape(boxes, -1)
    over += (2 * terms + 16) * EPS * scale + form.shape[1] * (terms + 8) * TINY
    return new, gap, over, (scale + gap + over) * _GENEROUS


def _last_products(program: Program) -> list[int]:
    """Products that no other activation reads."""
    read: set[int] = set()
    for index in reversed(range(len(program.nodes))):
        node = program.nodes[index]
        if isinstance(node.operation, Activation) or index in read:
            read.update(node.arguments)
    return [
        k for k in program.activations
        if isinstance(program.nodes[k].operation, Product) and k not in read
    ]  # fmt: skip


def _size(program: Program, index: int) -> int:
    return math.prod(program.nodes[index].shape)


def _offsets(parts: list[_Layer]) -> list[tuple[int, _Layer]]:
    found, total = [], 0
    for part in parts:
        found.append((total, part))
        total += len(part.constant)
    return found
