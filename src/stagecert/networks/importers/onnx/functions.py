"""Local functions of an ONNX model, put in the place of their calls.

Functions call functions, so that a few lines can stand for any number of nodes: these are counted
before anything is written out.
"""

from collections.abc import Iterator
from typing import TypeAlias

import onnx
import onnx.inliner

from stagecert.errors import ProblemError

# More nodes than this, or functions inside each other, are a mistake or an attack.
MOST_NODES = 100_000
MOST_BYTES = 2**31
DEEPEST = 100

_Key: TypeAlias = tuple[str, str, str]


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model without functions."""
    nodes, size = _Count(model).of(model.graph.node)
    if nodes > MOST_NODES:
        raise ProblemError(
            f"The functions of the ONNX model stand for {nodes} nodes, more than {MOST_NODES}."
        )
    if size > MOST_BYTES:
        raise ProblemError(
            f"The functions of the ONNX model stand for {size} bytes, more than {MOST_BYTES}."
        )
    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ProblemError(
            f"The functions of the ONNX model cannot be inlined: {reason}"
        ) from error


class _Count:
    """Nodes and bytes that calls stand for; every function is counted once."""

    def __init__(self, model: onnx.ModelProto):
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.known: dict[_Key, tuple[int, int]] = {}
        self.open: list[_Key] = []

    def of(self, nodes) -> tuple[int, int]:
        """How many nodes, and how many bytes they take."""
        count = size = 0
        for node in _with_bodies(nodes):
            key = (node.domain, node.op_type, node.overload)
            of_node = self._function(key) if key in self.functions else (1, node.ByteSize())
            count, size = count + of_node[0], size + of_node[1]
        return count, size

    def _function(self, key: _Key) -> tuple[int, int]:
        if key not in self.known:
            if key in self.open:
                raise ProblemError(f"The function '{key[1]}' of the ONNX model calls itself.")
            if len(self.open) >= DEEPEST:
                raise ProblemError(
                    f"The functions of the ONNX model call each other more than {DEEPEST} deep."
                )
            self.open.append(key)
            self.known[key] = self.of(self.functions[key].node)
            self.open.pop()
        return self.known[key]


def _with_bodies(nodes) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of graphs that are attributes of them."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        for item in node.attribute:
            for graph in (*([item.g] if item.HasField("g") else ()), *item.graphs):
                stack.extend(graph.node)
