"""Einsum, and LSTM, GRU and RNN step by step: put together from what other operators do."""

import math
from typing import Any

import numpy as np

from stagecert_check import patterns
from stagecert_check.constants import balls, settled
from stagecert_check.functions import Refused, Value, activation_of
from stagecert_check.graph import MOST_ENTRIES, Call, handles
from stagecert_check.operators import added, matrix_product

# -- sums of products ------------------------------------------------------------------------------


@handles("Einsum")
def _einsum(call: Call):
    if not any(isinstance(x, Value) for x in call.items):
        raise Refused("is only supported where an input varies")
    terms, result = _axes_of(call.get("equation").decode(), [len(x.shape) for x in call.items])
    lengths: dict[str, int] = {}
    for x, term in zip(call.items, terms, strict=True):
        if any(lengths.setdefault(a, n) != n for a, n in zip(term, x.shape, strict=True)):
            raise Refused("has axes of one name and several lengths")
    if not set(result) <= set(lengths):
        raise Refused("makes an axis out of nothing")
    total, names = call.items[0], terms[0]
    for k, (x, term) in enumerate(zip(call.items[1:], terms[1:], strict=True), 2):
        later = set(result).union(*terms[k:])
        total, names = _contracted(call, (total, names), (x, term), later)
    total, names = _summed(call, total, names, set(result))
    return call.move(lambda a: np.transpose(a, [names.index(n) for n in result]), total)


def _axes_of(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Names of the axes of every input and of the output; those behind dots are numbers."""
    inputs, arrow, output = "".join(equation.split()).partition("->")
    pieces = inputs.split(",")
    if len(pieces) != len(ranks):
        raise Refused("has an equation for another number of inputs")
    hidden = [rank - len(p.replace("...", "")) for p, rank in zip(pieces, ranks, strict=True)]
    deepest = max((n for n, p in zip(hidden, pieces, strict=True) if "..." in p), default=0)

    def named(piece: str, count: int) -> list[str]:
        parts = piece.split("...")
        if len(parts) > 2 or count < 0 or (count > 0 and len(parts) == 1):
            raise Refused("has an equation that does not fit its inputs")
        if any(not letter.isalpha() for part in parts for letter in part):
            raise Refused("has an equation of other things than letters")
        numbers = [str(k) for k in range(deepest - count, deepest)] if len(parts) == 2 else []
        found = [*parts[0], *numbers, *(parts[1] if len(parts) == 2 else "")]
        if len(found) != len(set(found)):
            raise Refused("takes a diagonal")
        return found

    terms = [named(piece, count) for piece, count in zip(pieces, hidden, strict=True)]
    if arrow:
        return terms, named(output, deepest if "..." in output else 0)
    letters = sorted(name for term in terms for name in term if name.isalpha())
    single = [name for name in letters if letters.count(name) == 1]
    return terms, [*map(str, range(deepest)), *single]


def _contracted(
    call: Call, one: tuple[Any, list[str]], other: tuple[Any, list[str]], later: set[str]
) -> tuple[Any, list[str]]:
    """The product of two tensors, as matrices, summed over axes that nothing needs later."""
    (x, a), (y, b) = one, other
    x, a = _summed(call, x, a, later.union(b))
    y, b = _summed(call, y, b, later.union(a))
    both = [n for n in a if n in b]
    batch, inner = [n for n in both if n in later], [n for n in both if n not in later]
    rows, columns = [n for n in a if n not in b], [n for n in b if n not in a]
    length = dict(zip(a, x.shape, strict=True)) | dict(zip(b, y.shape, strict=True))

    def size(names: list[str]) -> int:
        return math.prod(length[n] for n in names)

    if size([*batch, *rows, *inner, *columns]) > MOST_ENTRIES:
        raise Refused("makes a tensor that is too large")
    x, y = (
        call.move(
            lambda v, t=term, o=order, s=shape: np.transpose(v, [t.index(n) for n in o]).reshape(s),
            item,
        )
        for item, term, order, shape in (
            (x, a, [*batch, *rows, *inner], (size(batch), size(rows), size(inner))),
            (y, b, [*batch, *inner, *columns], (size(batch), size(inner), size(columns))),
        )
    )
    if isinstance(x, Value) or isinstance(y, Value):
        made = matrix_product(call, x, y)
    else:
        call.reader.compute(size([*batch, *rows, *inner, *columns]))
        made = settled(np.matmul(balls(x), balls(y)))
    names = [*batch, *rows, *columns]
    return call.move(lambda v: v.reshape([length[n] for n in names]), made), names


def _summed(call: Call, x: Any, names: list[str], kept: set[str]) -> tuple[Any, list[str]]:
    """The sum over axes that are not kept: a product with ones."""
    rest = [n for n in names if n in kept]
    gone = [n for n in names if n not in kept]
    if not gone:
        return x, names
    length = dict(zip(names, x.shape, strict=True))
    order = [names.index(n) for n in (*rest, *gone)]
    count, shape = math.prod(length[n] for n in gone), [length[n] for n in rest]
    flat = call.move(lambda v: np.transpose(v, order).reshape(-1, count), x)
    if isinstance(x, Value):
        made = matrix_product(call, flat, np.ones((count, 1)))
    else:
        made = settled(np.matmul(balls(flat), balls(np.ones((count, 1)))))
    return call.move(lambda v: v.reshape(shape), made), rest


# -- sequences -------------------------------------------------------------------------------------

_ACTIVATIONS = {"sigmoid", "tanh", "relu"}


class _Cell:
    """The weights of one direction, and arithmetic on states: values, constants, or None (zero)."""

    def __init__(self, call: Call, recurrent: np.ndarray, names: list[str]):
        self.call, self.recurrent, self.names = call, recurrent, names
        self.size = recurrent.shape[1]

    def gate(self, x: Any, k: int) -> Any:
        """The part of an array (batch, gates) that belongs to a gate."""
        return self.call.move(lambda v: v[:, k * self.size : (k + 1) * self.size], x)

    def function(self, k: int, x: Value) -> Value:
        """An activation."""
        return self.call.activate(activation_of(self.names[k]), x)

    def recurred(self, h: Any, first: int, last: int) -> Any:
        """h times the weights of some gates."""
        weights = self.recurrent[first * self.size : last * self.size].T
        if h is None or isinstance(h, Value):
            return None if h is None else matrix_product(self.call, h, weights)
        self.call.reader.compute(h.size * weights.shape[1])
        return settled(np.matmul(balls(h), balls(weights)))

    def plus(self, x: Value, y: Any, sign: int = 1) -> Value:
        """x + sign * y."""
        return x if y is None else added(self.call, [(x, 1), (y, sign)])

    def times(self, x: Value, y: Any) -> Any:
        """x * y."""
        if isinstance(y, Value):
            return patterns.product(self.call, x, y)
        return None if y is None else self.call.scale(x, y)


def _lstm(cell: _Cell, x: Value, states: list[Any], _: np.ndarray | None) -> list[Any]:
    """ONNX's order of the gates is i, o, f, c."""
    h, c = states
    x = cell.plus(x, cell.recurred(h, 0, 4))
    into, out = cell.function(0, cell.gate(x, 0)), cell.function(0, cell.gate(x, 1))
    new = cell.times(into, cell.function(1, cell.gate(x, 3)))
    if c is not None:
        new = cell.plus(new, cell.times(cell.function(0, cell.gate(x, 2)), c))
    return [cell.times(out, cell.function(2, new)), new]


def _gru(cell: _Cell, x: Value, states: list[Any], inner: np.ndarray | None) -> list[Any]:
    """The gates are z, r, h; `inner` is a bias that the gate r multiplies, in one of two forms."""
    (h,) = states
    share = cell.recurred(h, 0, 2)
    z, r = (
        cell.plus(cell.gate(x, k), None if share is None else cell.gate(share, k)) for k in (0, 1)
    )
    z = cell.function(0, z)
    if inner is None:
        reset = None if h is None else cell.times(cell.function(0, r), h)
        reset = cell.recurred(reset, 2, 3)
    else:
        reset = cell.recurred(h, 2, 3)
        if np.any(inner != 0):
            if isinstance(reset, Value):
                reset = cell.call.shift(reset, inner)
            else:
                reset = inner if reset is None else settled(balls(reset) + balls(inner))
        reset = None if reset is None else cell.times(cell.function(0, r), reset)
    new = cell.function(1, cell.plus(cell.gate(x, 2), reset))
    # (1 - z) new + z h = new + z (h - new)
    away = cell.plus(cell.call.negated(new), h)
    return [cell.plus(new, cell.times(z, away))]


def _rnn(cell: _Cell, x: Value, states: list[Any], _: np.ndarray | None) -> list[Any]:
    return [cell.function(0, cell.plus(x, cell.recurred(states[0], 0, 1)))]


# What makes the next states, the number of gates, and the usual activations.
_KINDS: dict[str, tuple[Any, int, list[str]]] = {
    "LSTM": (_lstm, 4, ["sigmoid", "tanh", "tanh"]),
    "GRU": (_gru, 3, ["sigmoid", "tanh"]),
    "RNN": (_rnn, 1, ["tanh"]),
}


@handles("LSTM", "GRU", "RNN")
def _recurrent(call: Call):
    step, gates, usual = _KINDS[call.operator]
    x, weights, recurrent = call.value(), call.floats(1), call.floats(2)
    direction = call.get("direction", b"forward")
    ways = {b"forward": 1, b"reverse": 1, b"bidirectional": 2}.get(direction, 0)
    length, batch, width = x.shape
    size = recurrent.shape[-1]
    if call.get("hidden_size", size) != size or call.get("input_forget", 0):
        raise Refused("has another hidden size, or gates that are coupled")
    if call.get("layout", 0) or (call.operator == "LSTM" and _present(call, 7)):
        raise Refused("has another layout, or peepholes")
    lengths = call.integers("sequence_lens", 4)
    if lengths is not None and set(lengths) != {length}:
        raise Refused("has sequences that end early")
    if weights.shape != (ways, gates * size, width) or recurrent.shape != (
        ways,
        gates * size,
        size,
    ):
        raise Refused("has weights of another shape")
    bias = np.zeros((ways, 2 * gates * size)) if call.item(3) is None else call.floats(3)
    if bias.shape != (ways, 2 * gates * size):
        raise Refused("has biases of another shape")
    inner_bias = call.operator == "GRU" and bool(call.get("linear_before_reset", 0))
    given = [name.decode().lower() for name in call.get("activations", [])] or usual * ways
    if len(given) != ways * len(usual) or not set(given) <= _ACTIVATIONS:
        raise Refused(f"has the activations {given}")
    flat = call.move(lambda v: v.reshape(length * batch, width), x)
    sequences, ends = [], []
    for way in range(ways):
        names = given[way * len(usual) : (way + 1) * len(usual)]
        cell = _Cell(call, recurrent[way], names)
        ahead, behind = np.split(balls(bias[way]), 2)
        inner = None
        if inner_bias:
            inner, behind = (
                settled(behind[-size:]),
                np.array([*behind[:-size], *[0 * b for b in behind[-size:]]], object),
            )
        shares = call.shift(matrix_product(call, flat, weights[way].T), settled(ahead + behind))
        states = [_start(call, 5 + k, way) for k in range(2 if call.operator == "LSTM" else 1)]
        found: dict[int, Value] = {}
        backwards = direction == b"reverse" or way == 1
        for t in range(length)[:: -1 if backwards else 1]:
            rows = slice(t * batch, (t + 1) * batch)
            part = call.move(lambda v, rows=rows: v[rows], shares)
            states = step(cell, part, states, inner)
            found[t] = states[0]
        sequences.append([found[t] for t in range(length)])
        ends.append(states)

    def stacked(*arrays: np.ndarray) -> np.ndarray:
        return np.stack(arrays).reshape(ways, length, batch, size).swapaxes(0, 1)

    whole = call.move(stacked, *(h for sequence in sequences for h in sequence))
    last = [call.move(lambda *arrays: np.stack(arrays), *(end[k] for end in ends))
            for k in range(len(ends[0]))]  # fmt: skip
    return [whole, *last]


def _present(call: Call, k: int) -> bool:
    return call.item(k) is not None and bool(np.any(call.floats(k) != 0))


def _start(call: Call, k: int, way: int) -> Any:
    """The state before the first step, (batch, size); None for zeros."""
    state = call.item(k)
    if isinstance(state, Value):
        return call.move(lambda v: v[way], state)
    return call.floats(k)[way] if _present(call, k) else None
