"""What Einsum, LSTM, GRU, RNN, linear interpolation and ScatterND compute in ONNX."""

import itertools

import numpy as np
from flint import fmpq

from benchmarks.fuzz.exact import CURVES, Call, Vague, computes, each


@computes("Einsum")
def _einsum(call: Call):
    left, _, right = call.get("equation").decode().replace(" ", "").partition("->")
    terms = left.split(",")
    for k, (term, x) in enumerate(zip(terms, call.items, strict=True)):
        if "..." in term:
            dots = "ABCDEFG"[: x.ndim - len(term) + 3]
            terms[k], right = term.replace("...", dots), right.replace("...", dots)
    sizes = {a: n for term, x in zip(terms, call.items, strict=True)
             for a, n in zip(term, x.shape, strict=True)}  # fmt: skip
    rest = sorted(set(sizes) - set(right))
    out = np.empty([sizes[a] for a in right], object)
    for place in np.ndindex(*out.shape):
        total = fmpq(0)
        for more in itertools.product(*(range(sizes[a]) for a in rest)):
            at = dict(zip((*right, *rest), (*place, *more), strict=True))
            part = fmpq(1)
            for term, x in zip(terms, call.items, strict=True):
                part = part * x[tuple(at[a] for a in term)]
            total = total + part
        out[place] = total
    return out


def _steps(call: Call, way: int, step):
    """The states of one direction, (length, batch, size)."""
    x, w, r = call.items[0], call.items[1][way], call.items[2][way]
    gates, size = len(w) // r.shape[1], r.shape[1]
    bias = call.item(3)
    bias = np.full(2 * len(w), fmpq(0), object) if bias is None else bias[way]
    state = call.item(5)
    h = np.full((x.shape[1], size), fmpq(0), object) if state is None else state[way]
    c = np.full((x.shape[1], size), fmpq(0), object)
    states = np.empty((x.shape[0], x.shape[1], size), object)
    order = range(len(x))
    if call.get("direction") == b"reverse" or way == 1:
        order = order[::-1]
    parts = [slice(k * size, (k + 1) * size) for k in range(gates)]
    for t in order:
        ahead = [x[t] @ w[p].T + bias[: len(w)][p] for p in parts]
        behind = [(r[p].T, bias[len(w) :][p]) for p in parts]
        h, c = step(call, ahead, behind, h, c)
        states[t] = h
    return states


def _sigmoid(x):
    return each(CURVES["Sigmoid"], x)


def _tanh(x):
    return each(CURVES["Tanh"], x)


def _lstm(call, ahead, behind, h, c):
    i, o, f, g = (a + h @ r + b for a, (r, b) in zip(ahead, behind, strict=True))
    c = _sigmoid(f) * c + _sigmoid(i) * _tanh(g)
    return _sigmoid(o) * _tanh(c), c


def _gru(call, ahead, behind, h, c):
    z, r = (_sigmoid(a + h @ m + b) for a, (m, b) in zip(ahead[:2], behind[:2], strict=True))
    m, b = behind[2]
    inner = r * (h @ m + b) if call.get("linear_before_reset") else (r * h) @ m + b
    new = _tanh(ahead[2] + inner)
    return (1 - z) * new + z * h, c


def _rnn(call, ahead, behind, h, c):
    (a,), ((m, b),) = ahead, behind
    return _tanh(a + h @ m + b), c


@computes("LSTM", "GRU", "RNN")
def _recurrent(call: Call):
    if call.item(4) is not None or call.item(6) is not None:
        raise Vague("lengths, or initial cells")
    step = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[call.operator]
    ways = len(call.items[1])
    return np.stack([_steps(call, way, step) for way in range(ways)], axis=1)


def interpolated(x: np.ndarray, sizes: list[int], way: str) -> np.ndarray:
    """Linear interpolation along every axis whose length changes."""
    for axis, new in enumerate(sizes):
        old = x.shape[axis]
        if new == old:
            continue
        rows = []
        for k in range(new):
            if way == "align_corners":
                at = fmpq(k * (old - 1), new - 1) if new > 1 else fmpq(0)
            elif way == "asymmetric":
                at = fmpq(k * old, new)
            elif way == "pytorch_half_pixel" and new == 1:
                at = fmpq(0)
            else:
                at = fmpq((2 * k + 1) * old, 2 * new) - fmpq(1, 2)
            at = min(max(at, fmpq(0)), fmpq(old - 1))
            first = int(at.floor())
            share = at - first
            low, high = (np.take(x, [min(n, old - 1)], axis) for n in (first, first + 1))
            rows.append(low * (1 - share) + high * share)
        x = np.concatenate(rows, axis)
    return x


@computes("ScatterND")
def _scattered(call: Call):
    data, indices, updates = call.items
    data = data.copy()
    for place in np.ndindex(*indices.shape[:-1]):
        data[tuple(int(n) for n in indices[place])] = updates[place]
    return data
