"""One equation on its way into a network: what it reads, and what it may add to the graph."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.graph import Value
from stagecert.networks.importers.enclosures import Constant, Enclosure
from stagecert.networks.importers.jax.constants import array_of
from stagecert.networks.importers.jax.walking import Traced
from stagecert.networks.importers.onnx.nodes import Draft, Refused, check_size


class Call:
    """One equation: its operands (constants are arrays), and the operations that it adds."""

    def __init__(self, draft: Draft, equation, operands: Sequence[Any]):
        self.draft, self.primitive, self.params = draft, equation.primitive, equation.params
        self.name = equation.primitive.name
        self.operands = tuple(operands)
        self.shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
        self.types = [variable.aval.dtype for variable in equation.outvars]

    @property
    def variables(self) -> list[Traced]:
        """The operands that depend on the inputs."""
        return [x for x in self.operands if isinstance(x, Traced)]

    def variable(self, k: int = 0) -> Value:
        """An operand that has to depend on the inputs."""
        item = self.operands[k]
        if not isinstance(item, Traced):
            raise Refused(f"needs its argument {k + 1} to depend on the input")
        return item.value

    def constant(self, k: int, what: str) -> np.ndarray:
        """An operand that must not depend on the inputs."""
        item = self.operands[k]
        if isinstance(item, Traced):
            raise Refused(f"needs {what} that do not depend on the input")
        if isinstance(item, Enclosure):
            raise Refused(f"needs {what} that are not the rounded result of a calculation")
        return array_of(item)

    def enclosed(self, k: int, what: str) -> Constant:
        """The same, where numbers need not be exact."""
        item = self.operands[k]
        return item if isinstance(item, Enclosure) else self.constant(k, what)

    def add(self, operation: op.Operation, *arguments: Value, weights=None) -> Value:
        """Adds an operation to the network."""
        return self.draft.add(operation, *arguments, weights=weights, name=self.name)

    def activation(self, kind: str, x: Value, weights=None, **settings: float) -> Value:
        """Adds an activation."""
        pairs = tuple(sorted((name, float(number)) for name, number in settings.items()))
        return self.add(op.Activation(kind, pairs), x, weights=weights)

    def negate(self, x: Value) -> Value:
        """Minus x."""
        return self.add(op.Scale(), x, weights=np.float32(-1))

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """The entries in another shape."""
        shape = tuple(int(n) for n in shape)
        return x if shape == x.shape else self.add(op.Reshape(shape), x)

    def transpose(self, x: Value, axes: Sequence[int]) -> Value:
        """The axes in another order."""
        axes = tuple(int(k) for k in axes)
        return x if axes == tuple(range(len(axes))) else self.add(op.Transpose(axes), x)

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """Repeated along axes of length one and new leading axes."""
        shape = tuple(int(n) for n in shape)
        return x if shape == x.shape else self.add(op.Broadcast(shape), x)

    def pad(self, x: Value, widths: Sequence[tuple[int, int]]) -> Value:
        """Zeros around x; negative widths cut."""
        widths = tuple((int(a), int(b)) for a, b in widths)
        return self.add(op.Pad(widths), x) if any(map(any, widths)) else x

    def spread(self, x: Value, steps: Sequence[int]) -> Value:
        """Zeros between the entries, so that they are `steps` apart along each axis."""
        for axis, step in enumerate(steps):
            n = x.shape[axis]
            if step > 1 and n > 1:
                before, after = x.shape[:axis], x.shape[axis + 1 :]
                none = ((0, 0),)
                x = self.reshape(x, (*before, n, 1, *after))
                x = self.pad(x, (*none * (axis + 1), (0, step - 1), *none * len(after)))
                x = self.reshape(x, (*before, n * step, *after))
                x = self.pad(x, (*none * axis, (0, 1 - step), *none * len(after)))
        return x

    def product(self, x: Value, y: Value, shape: Sequence[int]) -> Value:
        """x * y, repeated to a shape."""
        shape = tuple(int(n) for n in shape)
        check_size((*shape, 2))
        pair = [self.reshape(self.broadcast(v, shape), (*shape, 1)) for v in (x, y)]
        return self.add(op.Product(), self.add(op.Concat(len(shape)), *pair))

    def maximum(self, x: Value) -> Value:
        """Over the last axis."""
        return self.reshape(x, x.shape[:-1]) if x.shape[-1] == 1 else self.add(op.Max(), x)


Converted: TypeAlias = Value | Traced | np.ndarray | list
CONVERTERS: dict[str, Callable[[Call], Converted]] = {}


def converts(*primitives: str) -> Callable:
    """Registers a function for some primitives; it returns the output, or a list of several."""

    def register(function: Callable[[Call], Converted]):
        CONVERTERS.update(dict.fromkeys(primitives, function))
        return function

    return register
