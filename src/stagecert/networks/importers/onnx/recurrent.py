"""Einsum, and LSTM, GRU and RNN step by step: put together from what other operators do.

Einsum: matrix products of two operands at a time, whose axes are moved and joined. The others: a
copy of the cell for each place in the sequence.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx

from stagecert.networks.graph import Value
from stagecert.networks.importers import enclosures
from stagecert.networks.importers.enclosures import CONSTANT
from stagecert.networks.importers.onnx.constants import fold
from stagecert.networks.importers.onnx.nodes import (
    CONVERTERS,
    Call,
    Item,
    Refused,
    check_size,
    converts,
)

Term: TypeAlias = tuple[str, ...]  # the names of an operand's axes


def node(call: Call, operator: str, *items: Item, **attributes: Any) -> Any:
    """What another operator makes of variables and constants."""
    inner = Call(call.draft, operator, call.name, items, attributes, call.opset, ("y",))
    if all(isinstance(x, CONSTANT) for x in items):
        names = [f"x{k}" for k in range(len(items))]
        return fold(inner, onnx.helper.make_node(operator, names, ["y"], **attributes))[0]
    (made,) = CONVERTERS[operator](inner)
    call.added.extend(inner.added)
    return made


@converts("Einsum")
def _einsum(call: Call):
    items = [x for x in call.inputs if x is not None]
    terms, wanted = _equation(call.get("equation").decode(), [len(x.shape) for x in items])
    sizes: dict[str, int] = {}
    for x, term in zip(items, terms, strict=True):
        for name, size in zip(term, x.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise Refused(f"has an axis '{name}' of the lengths {sizes[name]} and {size}")
    if not set(wanted) <= set(sizes):
        raise Refused("names an axis of its output that no input has")
    x, term = items[0], terms[0]
    for k in range(1, len(items)):
        kept = {*wanted, *(name for later in terms[k + 1 :] for name in later)}
        x, term = _pair(call, (x, term), (items[k], terms[k]), kept, sizes)
    x, term = _summed(call, x, term, set(wanted))
    return _turned(call, x, term, wanted)


def _equation(text: str, ranks: list[int]) -> tuple[list[Term], Term]:
    """The names of the axes of all operands, and of the result."""
    left, arrow, right = text.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ranks):
        raise Refused(f"has the equation '{text}' for {len(ranks)} inputs")
    widths = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=True)]
    most = max((w for w, part in zip(widths, parts, strict=True) if "..." in part), default=0)

    def names(part: str, width: int) -> Term:
        before, dots, after = part.partition("...")
        if width < 0 or (width and not dots) or not (before + after + "a").isalpha():
            raise Refused(f"has the equation '{text}', which does not fit its inputs")
        # Axes that dots stand for are counted from the right.
        between = [f"...{k}" for k in range(most - width, most)] if dots else []
        found = (*before, *between, *after)
        if len(set(found)) != len(found):
            raise Refused("takes a diagonal, which is not supported")
        return found

    terms = [names(part, width) for part, width in zip(parts, widths, strict=True)]
    if arrow:
        return terms, names(right, most if "..." in right else 0)
    letters = [name for term in terms for name in term if not name.startswith("...")]
    once = sorted(name for name in set(letters) if letters.count(name) == 1)
    return terms, (*(f"...{k}" for k in range(most)), *once)


def _pair(call: Call, one, other, kept: set[str], sizes: dict[str, int]) -> tuple[Any, Term]:
    """The product of two operands, summed over what nothing else needs."""
    (x, a), (y, b) = one, other
    x, a = _summed(call, x, a, kept | set(b))
    y, b = _summed(call, y, b, kept | set(a))
    batch = tuple(name for name in a if name in b and name in kept)
    inner = tuple(name for name in a if name in b and name not in kept)
    left, right = (tuple(n for n in p if n not in q) for p, q in ((a, b), (b, a)))

    def length(names: Term) -> int:
        return math.prod(sizes[name] for name in names)

    front = [length(batch)] if batch else []
    check_size([*front, length(left), length(inner), length(right)])
    x = _turned(call, x, a, (*batch, *left, *inner))
    y = _turned(call, y, b, (*batch, *inner, *right))
    x = _shaped(call, x, [*front, length(left), length(inner)])
    y = _shaped(call, y, [*front, length(inner), length(right)])
    found = (*batch, *left, *right)
    made = node(call, "MatMul", x, y)
    return _shaped(call, made, [sizes[name] for name in found]), found


def _summed(call: Call, x: Any, term: Term, kept: set[str]) -> tuple[Any, Term]:
    axes = [k for k, name in enumerate(term) if name not in kept]
    if not axes:
        return x, term
    x = node(call, "ReduceSum", x, axes=axes, keepdims=0)
    return x, tuple(name for name in term if name in kept)


def _turned(call: Call, x: Any, term: Term, order: Term) -> Any:
    if term == order:
        return x
    return node(call, "Transpose", x, perm=[term.index(name) for name in order])


def _shaped(call: Call, x: Any, shape: list[int]) -> Any:
    if tuple(shape) == tuple(x.shape):
        return x
    if isinstance(x, Value):
        return node(call, "Reshape", x, shape=shape)
    return node(call, "Reshape", x, np.array(shape, np.int64))


_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_FUNCTIONS = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}
_KNOWN = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}


@dataclass(frozen=True)
class _Cell:
    """One direction: weights of the state (entries, gates), functions, bias where GRU has its own.

    States are variables, constants, or None for zeros.
    """

    call: Call
    size: int
    recurrent: np.ndarray
    functions: tuple[str, ...]
    own_bias: np.ndarray  # of the state, of the last gate of a GRU
    linear_first: bool

    def make(self, operator: str, *items: Any, **attributes: Any) -> Any:
        return node(self.call, operator, *items, **attributes)

    def plus(self, x: Any, y: Any) -> Any:
        return x if y is None else self.make("Add", x, y)

    def gate(self, x: Any, k: int) -> Any:
        begin = k * self.size
        return self.make("Slice", x, starts=[begin], ends=[begin + self.size], axes=[1])

    def matmul(self, h: Any, first: int, last: int) -> Any:
        weights = self.recurrent[:, first * self.size : last * self.size]
        return None if h is None else self.make("MatMul", h, weights)

    def lstm(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        """The next states (h, c) from the input's share of all gates: i, o, f, c."""
        sigma, inside, outside = self.functions
        x = self.plus(x, self.matmul(h, 0, 4))
        into, out = (self.make(sigma, self.gate(x, k)) for k in (0, 1))
        new = self.make("Mul", into, self.make(inside, self.gate(x, 3)))
        if c is not None:
            new = self.plus(new, self.make("Mul", self.make(sigma, self.gate(x, 2)), c))
        return self.make("Mul", out, self.make(outside, new)), new

    def gru(self, x: Any, h: Any, _: Any) -> tuple[Any, Any]:
        """The next state from the input's share of all gates: z, r, h."""
        sigma, inside = self.functions
        z, r = (self.gate(x, k) for k in (0, 1))
        share = self.matmul(h, 0, 2)
        if share is not None:
            z, r = (self.plus(y, self.gate(share, k)) for k, y in enumerate((z, r)))
        z = self.make(sigma, z)
        if self.linear_first:
            reset = self.matmul(h, 2, 3)
            if np.any(self.own_bias):
                reset = self.own_bias if reset is None else self.make("Add", reset, self.own_bias)
            if reset is not None:
                reset = self.make("Mul", self.make(sigma, r), reset)
        else:
            reset = None if h is None else self.make("Mul", self.make(sigma, r), h)
            reset = self.matmul(reset, 2, 3)
        new = self.make(inside, self.plus(self.gate(x, 2), reset))
        # (1 - z) * new + z * h, with one product.
        away = self.make("Neg", new) if h is None else self.make("Sub", h, new)
        return self.plus(new, self.make("Mul", z, away)), None

    def rnn(self, x: Any, h: Any, _: Any) -> tuple[Any, Any]:
        """The next state."""
        return self.make(self.functions[0], self.plus(x, self.matmul(h, 0, 1))), None


@converts("LSTM", "GRU", "RNN")
def _recurrent(call: Call):
    x, weights = call.variable(), call.constant(1, "weights")
    recurrent, kind = call.constant(2, "weights"), call.operator
    ways, size = _check(call, x.shape, weights, recurrent)
    bias = np.zeros((ways, 2 * weights.shape[1])) if call.item(3) is None else None
    bias = call.constant(3, "biases") if bias is None else bias
    length, batch, width = x.shape
    flat = node(call, "Reshape", x, shape=[length * batch, width])
    outputs, last = [], []
    for way in range(ways):
        backwards = call.get("direction") == b"reverse" or way == 1
        ahead, behind = np.split(bias[way].astype(np.float64), 2)
        linear_first = kind == "GRU" and bool(call.get("linear_before_reset", 0))
        own = behind[-size:].copy()
        if linear_first:  # this one is added before the gate
            behind = np.concatenate([behind[:-size], np.zeros(size)])
        cell = _Cell(call, size, recurrent[way].T, _functions(call, way), own, linear_first)
        step = {"LSTM": cell.lstm, "GRU": cell.gru, "RNN": cell.rnn}[kind]
        shares = node(call, "MatMul", flat, weights[way].T)
        shares = node(call, "Add", shares, enclosures.add(ahead, behind))
        h, c = _initial(call, 5, way), _initial(call, 6, way)
        states: list[Any] = [None] * length
        for k in reversed(range(length)) if backwards else range(length):
            part = node(call, "Slice", shares, starts=[k * batch], ends=[(k + 1) * batch], axes=[0])
            h, c = step(part, h, c)
            states[k] = node(call, "Reshape", h, shape=[1, 1, batch, size])
        outputs.append(_joined(call, states, 0))
        last.append([node(call, "Reshape", s, shape=[1, batch, size]) for s in (h, c) if s])
    ends = [_joined(call, list(states), 0) for states in zip(*last, strict=True)]
    return [_joined(call, outputs, 1), *ends]


def _joined(call: Call, parts: list[Any], axis: int) -> Any:
    return parts[0] if len(parts) == 1 else node(call, "Concat", *parts, axis=axis)


def _initial(call: Call, k: int, way: int) -> Any:
    """The state at the start, (batch, size); None for zeros."""
    state = call.item(k) if call.operator == "LSTM" or k == 5 else None
    if state is None or (isinstance(state, np.ndarray) and not np.any(state)):
        return None
    shape = list(state.shape[1:])
    if isinstance(state, np.ndarray):
        return state[way]
    part = node(call, "Slice", state, starts=[way], ends=[way + 1], axes=[0])
    return node(call, "Reshape", part, shape=shape)


def _functions(call: Call, way: int) -> tuple[str, ...]:
    usual = _FUNCTIONS[call.operator]
    given = [name.decode().lower() for name in call.get("activations", [])]
    names = given[way * len(usual) : (way + 1) * len(usual)] if given else usual
    if len(names) != len(usual) or not set(names) <= set(_KNOWN):
        raise Refused(f"has the activations {given}; known are {', '.join(_KNOWN.values())}")
    return tuple(_KNOWN[name] for name in names)


def _check(call: Call, shape, weights: np.ndarray, recurrent: np.ndarray) -> tuple[int, int]:
    """How many directions there are, and how many entries a state has."""
    for name in ("clip", "input_forget", "layout", "activation_alpha", "activation_beta"):
        if call.get(name):
            raise Refused(f"is not supported with the attribute '{name}'")
    if (
        call.operator == "LSTM"
        and call.item(7) is not None
        and np.any(call.constant(7, "peepholes"))
    ):
        raise Refused("is not supported with peepholes")
    directions = {b"forward": 1, b"reverse": 1, b"bidirectional": 2}
    ways = directions.get(call.get("direction", b"forward"), 0)
    size, gates = recurrent.shape[-1], _GATES[call.operator]
    if call.get("hidden_size", size) != size or len(shape) != 3:
        raise Refused("has a hidden size, or a sequence, of another shape")
    if weights.shape != (ways, gates * size, shape[2]) or recurrent.shape != (
        ways,
        gates * size,
        size,
    ):
        raise Refused(f"has weights of the shapes {weights.shape} and {recurrent.shape}")
    lengths = call.integers("sequence_lens", 4)
    if lengths is not None and set(lengths) != {shape[0]}:
        raise Refused("has sequences that end early")
    check_size([shape[0], ways, shape[1], gates * size])
    return ways, size
