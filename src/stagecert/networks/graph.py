"""A network as a small explicit graph: inputs, then nodes, each an operation on earlier values.

Values are numbered: first the inputs, then one for each node, in an order in which every node only
reads earlier values. Importers make such graphs (through `Builder`); nothing else knows where a
network came from.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.operations import Operation
from stagecert.problem import as_arrays


class Node(eqx.Module):
    """One operation on earlier values."""

    operation: Operation = eqx.field(static=True)
    arguments: tuple[int, ...] = eqx.field(static=True)
    weights: Any
    shape: tuple[int, ...] = eqx.field(static=True)


class Labels:
    """Names of inputs, nodes and outputs. All labels are equal: names never make JAX recompile."""

    def __init__(self, inputs=(), nodes=(), outputs=()):
        self.inputs, self.nodes, self.outputs = tuple(inputs), tuple(nodes), tuple(outputs)

    def __eq__(self, other):
        return isinstance(other, Labels)

    def __hash__(self):
        return 0


class Network(eqx.Module):
    """A feed-forward network.

    Attributes:
        input_shapes: shape of each input as the graph sees it; a hidden batch axis has length one.
        nodes: the operations, in order.
        outputs: which values are the outputs.
        hidden_axis: for each input, whether its first axis is a batch axis of length one, which
            users do not see: their arrays have the batch there.
    """

    input_shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...] = eqx.field(static=True)
    hidden_axis: tuple[bool, ...] = eqx.field(static=True)
    labels: Labels = eqx.field(static=True)

    def __repr__(self) -> str:
        # All nodes and weights would fill screens.
        return (
            f"Network(input {self.input_shape}, {self.output_size} outputs, "
            f"{len(self.nodes)} nodes, {self.number_of_parameters():,} parameters)"
        )

    @property
    def input_shape(self) -> Any:
        """Shape of one input point without the batch; a tuple of shapes if there are several."""
        shapes = tuple(
            shape[1:] if hidden else shape
            for shape, hidden in zip(self.input_shapes, self.hidden_axis, strict=True)
        )
        return shapes[0] if len(shapes) == 1 else shapes

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each output as the graph sees it."""
        shapes = [*self.input_shapes, *(node.shape for node in self.nodes)]
        return tuple(shapes[index] for index in self.outputs)

    @property
    def output_size(self) -> int:
        """How many numbers come out: the entries of all outputs together."""
        return sum(int(np.prod(shape)) for shape in self.output_shapes)

    def run(self, *inputs) -> tuple:
        """All outputs at one point, in the graph's own shapes."""
        values = list(inputs)
        for node in self.nodes:
            values.append(node.operation(node.weights, *(values[k] for k in node.arguments)))
        return tuple(values[index] for index in self.outputs)

    def __call__(self, inputs):
        """Outputs for a batch: (batch, *input_shape) -> (batch, outputs), flattened and joined.

        With several inputs, `inputs` is a tuple of such arrays.
        """
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        if len(inputs) != len(self.input_shapes):
            raise ProblemError(
                f"The network has {len(self.input_shapes)} inputs ({', '.join(self.labels.inputs)})"
                f", but {len(inputs)} arrays were given."
            )
        arrays = tuple(jnp.asarray(x) for x in inputs)
        for array, shape, hidden in zip(arrays, self.input_shapes, self.hidden_axis, strict=True):
            if array.ndim == 0 or math.prod(array.shape[1:]) != math.prod(shape):
                wanted = ", ".join(map(str, ("batch", *(shape[1:] if hidden else shape))))
                raise ProblemError(
                    f"An input must have shape ({wanted}), but has shape {array.shape}."
                )
        return _outputs(self, arrays)

    def flat_outputs(self, *inputs):
        """All outputs at one point as one vector."""
        return jnp.concatenate([jnp.ravel(x) for x in self.run(*inputs)])

    def number_of_parameters(self) -> int:
        """How many numbers the network stores."""
        leaves = [x for x in jax.tree.leaves(self) if eqx.is_inexact_array_like(x)]
        return sum(int(np.size(x)) for x in leaves)


@eqx.filter_jit
def _outputs(network: Network, inputs):
    # Weights are kept as they were stored; inputs may have more digits.
    floating = [x.dtype for x in jax.tree.leaves((network, inputs)) if eqx.is_inexact_array(x)]
    dtype = functools.reduce(np.promote_types, floating, np.dtype(np.float32))
    network, inputs = as_arrays((network, inputs), dtype)

    def one(*point):
        shaped = (x.reshape(s) for x, s in zip(point, network.input_shapes, strict=True))
        return network.flat_outputs(*shaped)

    return jax.vmap(one)(*inputs)


class Builder:
    """Puts a network together node by node; used by the importers.

    >>> from stagecert.networks import operations as op
    >>> build = Builder()
    >>> x = build.input("x", (1, 2), hidden_axis=True)
    >>> h = build.add(op.MatMul(), x, weights=np.array([[1.0], [-1.0]]), name="dense")
    >>> net = build.network([build.add(op.Activation("relu"), h)])
    >>> net(np.array([[3.0, 1.0], [1.0, 3.0]])).tolist()
    [[2.0], [0.0]]
    """

    def __init__(self):
        self._inputs: list[tuple[str, tuple[int, ...], bool]] = []
        self._nodes: list[tuple[Operation, tuple[Any, ...], Any, tuple[int, ...], str]] = []

    def input(self, name: str, shape: Sequence[int], hidden_axis: bool) -> "Value":
        """Declares an input; see Network.hidden_axis."""
        self._inputs.append((name, tuple(int(n) for n in shape), hidden_axis))
        return Value(True, len(self._inputs) - 1, self._inputs[-1][1])

    def add(self, operation: Operation, *arguments: "Value", weights=None, name="") -> "Value":
        """Adds a node; weights are NumPy arrays (or a tree of them)."""
        structs = [jax.ShapeDtypeStruct(v.shape, np.float32) for v in arguments]
        abstract = jax.tree.map(_abstract, weights)
        shape = jax.eval_shape(lambda w, *xs: operation(w, *xs), abstract, *structs).shape
        self._nodes.append((operation, arguments, weights, shape, name))
        return Value(False, len(self._nodes) - 1, shape)

    def network(self, outputs: "Sequence[Value]", output_names: Sequence[str] = ()) -> Network:
        """The finished network; nodes that no output needs are left out."""
        needed: set[int] = set()
        stack = [v.index for v in outputs if not v.is_input]
        while stack:
            index = stack.pop()
            if index not in needed:
                needed.add(index)
                stack.extend(v.index for v in self._nodes[index][1] if not v.is_input)
        order = sorted(needed)
        place = {index: len(self._inputs) + k for k, index in enumerate(order)}

        def number(value: Value) -> int:
            return value.index if value.is_input else place[value.index]

        nodes = tuple(
            Node(operation, tuple(map(number, arguments)), weights, shape)
            for operation, arguments, weights, shape, _ in (self._nodes[k] for k in order)
        )
        return Network(
            tuple(shape for _, shape, _ in self._inputs),
            nodes,
            tuple(map(number, outputs)),
            tuple(hidden for _, _, hidden in self._inputs),
            Labels(
                (name for name, _, _ in self._inputs),
                (self._nodes[k][4] for k in order),
                output_names or [f"output_{k}" for k in range(len(outputs))],
            ),
        )


class Value:
    """A value under construction: an input or the output of a node."""

    def __init__(self, is_input: bool, index: int, shape: tuple[int, ...]):
        self.is_input, self.index, self.shape = is_input, index, shape


def _abstract(x):
    x = np.asarray(x)
    floating = np.issubdtype(x.dtype, np.floating)
    return jax.ShapeDtypeStruct(x.shape, np.float32 if floating else x.dtype)
