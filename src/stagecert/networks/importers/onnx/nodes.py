"""One ONNX node on its way into a network: what it reads, and what it may add to the graph.

The modules `arithmetic`, `shapes`, `windows` and their like register one function for each
operator here (`converts`); such a function gets a `Call` and returns the node's outputs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias

import jax.numpy as jnp
import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Builder, Value
from stagecert.networks.importers import enclosures
from stagecert.networks.importers.enclosures import TINY, Constant, Enclosure, Refused

# A file with more bytes, or a stored tensor with more entries, is a mistake or an attack.
LARGEST = 2**31
# What is computed, not stored, costs memory that the file does not account for.
LARGEST_COMPUTED = 2**27
# Axes, widths and lengths are few.
_MOST_INTEGERS = 2**16
# Exact factors with more bits than this are not followed any further.
_MOST_BITS = 4096

Item: TypeAlias = Value | Constant
Affine: TypeAlias = tuple[Value, Fraction, Fraction]


@dataclass(frozen=True)
class Placeholder(op.Operation):
    """Stands for something that has no place in a network, so that the rest can be checked.

    A network is only made when nothing was refused.
    """

    label: ClassVar[str] = "placeholder"
    kind: str
    shape: tuple[int, ...]

    def __call__(self, weights, *arguments):
        return jnp.zeros(self.shape)


@dataclass(frozen=True)
class Made:
    """How a value was made.

    `number` is the rational number that a Scale or Shift means, where it is one for all entries.
    """

    operation: op.Operation
    arguments: tuple[Value, ...]
    weights: Any
    number: Fraction | None = None


class Draft:
    """A network under construction that remembers how its values were made."""

    def __init__(self):
        self.builder = Builder()
        self._made: dict[tuple[bool, int], Made] = {}
        self._affine: dict[tuple[bool, int], Affine] = {}
        self.truths: dict[tuple[bool, int], Any] = {}  # what comparisons say; see `where`

    def add(self, operation: op.Operation, *arguments: Value, weights=None, name="") -> Value:
        """Adds a node, unless its weights or its size are out of bounds."""
        if isinstance(operation, (op.Scale, op.Shift)) and operation.loose == 0:
            return self.apply(type(operation), *arguments, constant=np.asarray(weights), name=name)
        return self._add(Made(operation, arguments, weights), name)

    def apply(
        self,
        kind: type[op.Scale] | type[op.Shift],
        x: Value,
        constant: Constant,
        number: Fraction | None = None,
        name: str = "",
    ) -> Value:
        """x times or plus a constant; `number` is what that means, if it is rational."""
        weights, loose = enclosures.weights_of(constant)
        number = enclosures.uniform(constant) if number is None else number
        return self._add(Made(kind(loose=loose), (x,), weights, number), name)

    def _add(self, made: Made, name: str) -> Value:
        operation, weights = made.operation, made.weights
        if weights is not None:
            weights = np.asarray(weights)
            if not isinstance(operation, op.Take):
                _check_weights(weights)
            made = Made(operation, made.arguments, weights, made.number)
        with np.errstate(over="ignore"):  # shapes are found in float32, where settings may overflow
            value = self.builder.add(operation, *made.arguments, weights=weights, name=name)
        check_size(value.shape, LARGEST_COMPUTED)
        if isinstance(operation, op.Linear):
            # What bounds will ask for, so that nothing loads which they cannot handle.
            shapes = [x.shape for x in made.arguments]
            operation.terms(weights, *shapes)
            operation.back_terms(weights, shapes)
        self._made[value.is_input, value.index] = made
        return value

    def made(self, value: Value) -> Made | None:
        """How a value was made; None for inputs."""
        return self._made.get((value.is_input, value.index))

    def is_condition(self, x: Value) -> bool:
        """Whether a value is what a comparison says."""
        return (x.is_input, x.index) in self.truths

    def affine(self, x: Value) -> Affine:
        """(root, a, b) with x = a * root + b exactly, and the root as far back as numbers reach."""
        path = []
        while (x.is_input, x.index) not in self._affine:
            made = self.made(x)
            if made is None or made.number is None or made.arguments[0].shape != x.shape:
                self._affine[x.is_input, x.index] = x, Fraction(1), Fraction(0)
            else:
                path.append((x, made))
                (x,) = made.arguments
        root, a, b = self._affine[x.is_input, x.index]
        for y, made in reversed(path):
            assert made.number is not None
            if isinstance(made.operation, op.Scale):
                a, b = a * made.number, b * made.number
            else:
                b = b + made.number
            numbers = (a.numerator, a.denominator, b.numerator, b.denominator)
            if max(n.bit_length() for n in numbers) > _MOST_BITS:
                root, a, b = y, Fraction(1), Fraction(0)
            self._affine[y.is_input, y.index] = root, a, b
        return root, a, b

    def live(self, roots: Sequence[Value]) -> set[tuple[bool, int]]:
        """The values that `roots` depend on, themselves included."""
        seen: set[tuple[bool, int]] = set()
        stack = list(roots)
        while stack:
            value = stack.pop()
            if (value.is_input, value.index) not in seen:
                seen.add((value.is_input, value.index))
                made = self.made(value)
                stack.extend(made.arguments if made else ())
        return seen


def _check_weights(weights: np.ndarray) -> None:
    if not np.issubdtype(weights.dtype, np.floating):
        raise Refused(f"has weights of the type {weights.dtype}, not floating-point numbers")
    if not np.isfinite(weights).all():
        raise Refused("has weights that are NaN or infinite")
    if weights.dtype == np.float64 and np.any((weights != 0) & (np.abs(weights) < TINY)):
        # Processors may take these for zero, and however large the other factor is, it matters.
        raise Refused(f"has weights below {TINY:.3g}, the smallest normal number of float64")


class Call:
    """One node: its inputs (constants are arrays, the rest values), attributes and opset."""

    def __init__(
        self,
        draft: Draft,
        operator: str,
        name: str,
        inputs: Sequence[Item | None],
        attributes: dict[str, Any],
        opset: int,
        outputs: Sequence[str],
    ):
        self.draft, self.operator, self.name = draft, operator, name
        self.inputs, self.attributes, self.opset = list(inputs), attributes, opset
        self.outputs = tuple(outputs)
        self.added: list[Value] = []

    def add(self, operation: op.Operation, *arguments: Value, weights=None) -> Value:
        """Adds an operation to the network."""
        label = f"{self.operator} {self.name}".strip()
        value = self.draft.add(operation, *arguments, weights=weights, name=label)
        self.added.append(value)
        return value

    def activation(self, kind: str, x: Value, weights=None, **settings: float) -> Value:
        """Adds an activation."""
        if any(math.isnan(number) for number in settings.values()):
            raise Refused("has an attribute that is NaN")
        if kind != "clip" and any(math.isinf(number) for number in settings.values()):
            raise Refused("has an attribute that is infinite")
        if any(0 < abs(number) < TINY for number in settings.values()):
            raise Refused(f"has an attribute below {TINY:.3g}, the smallest normal number")
        pairs = tuple((name, float(number)) for name, number in settings.items())
        return self.add(op.Activation(kind, pairs), x, weights=weights)

    def scale(self, x: Value, factor: Constant | Fraction, number: Fraction | None = None) -> Value:
        """x times a constant; two that cancel leave nothing behind.

        `number` is what the factor means where that is rational, and is not what it says.
        """
        if isinstance(factor, Fraction):
            factor, number = enclosures.rational(factor), factor
        number = enclosures.uniform(factor) if number is None else number
        root, a, b = self.affine(x)
        shape = np.broadcast_shapes(x.shape, factor.shape)
        if number is not None and b == 0 and a * number == 1 and shape == root.shape:
            return root
        return self._applied(op.Scale, x, factor, number)

    def shift(self, x: Value, constant: Constant | Fraction) -> Value:
        """x plus a constant."""
        number = constant if isinstance(constant, Fraction) else None
        if isinstance(constant, Fraction):
            constant = enclosures.rational(constant)
        return self._applied(op.Shift, x, constant, number)

    def _applied(self, kind, x: Value, constant: Constant, number: Fraction | None) -> Value:
        label = f"{self.operator} {self.name}".strip()
        value = self.draft.apply(kind, x, constant, number, label)
        self.added.append(value)
        return value

    def affine(self, x: Value) -> Affine:
        """See Draft.affine."""
        return self.draft.affine(x)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def item(self, k: int) -> Item | None:
        """An input, or None where an optional one is left out."""
        return self.inputs[k] if k < len(self.inputs) else None

    def variable(self, k: int = 0) -> Value:
        """An input that has to depend on the network's inputs."""
        item = self.item(k)
        if not isinstance(item, Value):
            raise Refused(f"needs its input {k + 1} to depend on the network's input")
        return item

    def constant(self, k: int, what: str) -> np.ndarray:
        """An input that has to be constant."""
        item = self.item(k)
        if isinstance(item, Enclosure):
            raise Refused(
                f"needs exact {what}, but its {what} are the rounded result of a calculation; store"
                " that result in the model"
            )
        if not isinstance(item, np.ndarray):
            raise Refused(f"needs constant {what}")
        return item

    def number(self, k: int, what: str, default: float) -> float:
        """An optional constant input with one entry."""
        if self.item(k) is None:
            return default
        array = self.constant(k, what)
        if array.size != 1 or not np.issubdtype(array.dtype, np.floating):
            raise Refused(f"needs {what} to be one floating-point number")
        return float(array.item())

    def integers(self, name: str, k: int | None = None) -> list[int] | None:
        """Integers that are an attribute in some opsets and input k in others."""
        if name in self.attributes:
            return [int(n) for n in self.attributes[name]]
        if k is None or self.item(k) is None:
            return None
        array = self.constant(k, name)
        if not np.issubdtype(array.dtype, np.integer):
            raise Refused(f"needs integer {name}")
        if array.size > _MOST_INTEGERS:
            raise Refused(f"has {array.size} {name}, more than {_MOST_INTEGERS}")
        return [int(n) for n in array.ravel()]


Converter: TypeAlias = Callable[[Call], Sequence[Item]]

CONVERTERS: dict[str, Converter] = {}


def converts(*operators: str) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Registers a function for some operators; it returns the output, or a list of several."""

    def register(function):
        def convert(call: Call) -> Sequence[Item]:
            made = function(call)
            return made if isinstance(made, list) else [made]

        for operator in operators:
            CONVERTERS[operator] = convert
        return function

    return register


def check_size(shape: Sequence[int], limit: int = LARGEST_COMPUTED) -> None:
    """Refuses tensors that are empty or too large."""
    size = math.prod(shape)
    if size == 0:
        raise Refused("makes an empty tensor")
    if size > limit:
        raise Refused(f"makes a tensor of {size} entries, more than {limit}")


def place(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    if not -rank <= axis < rank:
        raise Refused(f"names axis {axis} of a tensor with {rank} axes")
    return axis % rank


def places(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, sorted."""
    found = sorted(place(axis, rank) for axis in axes)
    if len(set(found)) != len(found):
        raise Refused(f"names an axis twice: {list(axes)}")
    return tuple(found)


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())
