"""One ONNX node on its way into a network: what it reads, and what it may add to the graph.

The modules `onnx_arithmetic`, `onnx_shapes` and `onnx_windows` register one function for each
operator here (`converts`); such a function gets a `Call` and returns the node's outputs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import jax.numpy as jnp
import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Builder, Value

# More entries than this are a mistake or an attack, not a network.
LARGEST = 2**31
# Constants that are computed, not stored, cost memory that the file does not account for.
LARGEST_COMPUTED = 2**27
# Axes, widths and lengths are few.
_MOST_INTEGERS = 2**16

Item: TypeAlias = Value | np.ndarray


class Refused(Exception):
    """Why a node cannot be converted; the text continues the operator's name."""


@dataclass(frozen=True)
class Placeholder(op.Operation):
    """Stands for something that has no place in a network, so that the rest can be checked.

    A network is only made when none is left: Erf disappears where a Gelu is recognised.
    """

    label: ClassVar[str] = "placeholder"
    kind: str
    shape: tuple[int, ...]

    def __call__(self, weights, *arguments):
        return jnp.zeros(self.shape)


@dataclass(frozen=True)
class Made:
    """How a value was made."""

    operation: op.Operation
    arguments: tuple[Value, ...]
    weights: Any


class Draft:
    """A network under construction that remembers how its values were made."""

    def __init__(self):
        self.builder = Builder()
        self._made: dict[tuple[bool, int], Made] = {}

    def add(self, operation: op.Operation, *arguments: Value, weights=None, name="") -> Value:
        """Adds a node, unless its weights or its size are out of bounds."""
        if weights is not None:
            weights = np.asarray(weights)
            if np.issubdtype(weights.dtype, np.floating) and not np.isfinite(weights).all():
                raise Refused("has weights that are NaN or infinite")
        value = self.builder.add(operation, *arguments, weights=weights, name=name)
        check_size(value.shape)
        self._made[value.is_input, value.index] = Made(operation, arguments, weights)
        return value

    def made(self, value: Value) -> Made | None:
        """How a value was made; None for inputs."""
        return self._made.get((value.is_input, value.index))

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
        pairs = tuple((name, float(number)) for name, number in settings.items())
        return self.add(op.Activation(kind, pairs), x, weights=weights)

    def scale(self, x: Value, factor) -> Value:
        """x times a constant; two that cancel leave nothing behind."""
        factor = np.asarray(factor)
        root, a, b = self.affine(x)
        if factor.size == 1 and b == 0 and a * float(factor.item()) == 1:
            shape = np.broadcast_shapes(x.shape, factor.shape)
            if shape == root.shape:
                return root
        return self.add(op.Scale(), x, weights=factor)

    def affine(self, x: Value) -> tuple[Value, float, float]:
        """(root, a, b) with x = a * root + b and the root as far back as single numbers reach."""
        a, b = 1.0, 0.0
        while made := self.draft.made(x):
            if not isinstance(made.operation, (op.Scale, op.Shift)):
                break
            number = float(made.weights.flat[0])
            if np.any(made.weights != number) or made.arguments[0].shape != x.shape:
                break
            if isinstance(made.operation, op.Scale):
                a *= number
            else:
                b += a * number
            (x,) = made.arguments
        return x, a, b

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
        if not isinstance(item, np.ndarray):
            raise Refused(f"needs constant {what}")
        return item

    def number(self, k: int, what: str, default: float) -> float:
        """An optional constant input with one entry."""
        if self.item(k) is None:
            return default
        array = self.constant(k, what)
        if array.size != 1:
            raise Refused(f"needs {what} to be one number")
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


def check_size(shape: Sequence[int], limit: int = LARGEST) -> None:
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


def precise(array: np.ndarray) -> np.ndarray:
    """In float64, for arithmetic on weights."""
    return np.asarray(array, np.float64)


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())
