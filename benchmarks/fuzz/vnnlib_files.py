"""Small VNN-LIB properties, and ways to damage them: tokens, lines and bytes."""

import gzip
import random
import re

_OLD = "".join(f"(declare-const {v}_{k} Real)\n" for v in "XY" for k in range(2))
_OLD_BOX = "".join(f"(assert (>= X_{k} -1))\n(assert (<= X_{k} 1))\n" for k in range(2))
_NEW = (
    "(vnnlib-version <2.0>)\n(declare-network f (declare-input X float32 [1,2])"
    " (declare-output Y float32 [2]))\n"
)
_NEW_BOX = "".join(f"(assert (>= X[0,{k}] -1))\n(assert (<= X[0,{k}] 1))\n" for k in range(2))
SEEDS = (
    _OLD + _OLD_BOX + "(assert (or (and (<= Y_0 (* 2.0 Y_1)) (not (= X_0 (/ 1 3)))) (> Y_1 1e-3)))",
    _OLD + _OLD_BOX + "(assert (>= (+ Y_0 (- X_1) (- 3)) 0)) ; end",
    _OLD + "(assert (or (and (>= X_0 0) (<= X_0 1) (<= X_1 1) (>= X_1 0) (>= Y_0 Y_1))"
    " (and (>= X_0 2) (<= X_0 3) (<= X_1 1) (>= X_1 0) (<= Y_0 Y_1))))",
    _NEW + _NEW_BOX + "(assert (or (!= Y[0] Y[1]) (and (== X[0,1] -0.25) (< Y[1] (- Y[0] 2)))))",
)
PIECES = [
    "(", ")", "[", "]", ",", ";", '"', "\\", "<2.0>", "1e400", "1e-99999", "X_0", "X_99999999999",
    "Y[9]", "not", "and", "or", "-", "*", "/", "0", "\0", "\u00e9", "\n", "(/ 1 0)", "()", "nan",
    "inf", "1e308", "0x10", "declare-const", "declare-network", "declare-input",
    "[1000000,1000000]",
]  # fmt: skip
_EXCHANGES = [
    ["<=", ">=", "<", ">", "=", "==", "!="], ["and", "or", "not"], ["+", "-", "*", "/"],
    ["0", "1", "-1", "-7", "1e-3", "(/ 2 7)", "3", "2.0"], ["X_0", "X_1", "Y_0", "Y_1"],
    ["X[0,0]", "X[0,1]", "Y[0]", "Y[1]"],
]  # fmt: skip


def damaged(rng: random.Random) -> bytes:
    """A property with a few faults; one in twenty is gzipped, and damaged after that."""
    text = rng.choice(SEEDS)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        text = _fault(rng, text)
    data = bytearray(text.encode())
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.05:
        data = bytearray(gzip.compress(bytes(data), mtime=0))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _fault(rng: random.Random, text: str) -> str:
    kind = rng.randrange(14)
    i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    tokens = re.findall(r"\s+|[()]|[^\s()]+", text) or [""]
    a, b = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    if kind == 0:
        return text[:i]
    if kind == 1:
        return text[:i] + text[min(j, i + 20) :]
    if kind == 2:
        return text[:i] + rng.choice(PIECES) + text[i:]
    if kind == 3:
        return text[:j] + text[i:j] * rng.choice((1, 1, 30)) + text[j:]
    if kind == 4:
        lines = text.split("\n")
        rng.shuffle(lines)
        return "\n".join(lines)
    if kind == 5:
        tokens[a], tokens[b] = tokens[b], tokens[a]
        return "".join(tokens)
    if kind == 6:
        deep = rng.choice((10, 1001, 20000))
        return text[:i] + "(" * deep + text[i:] + ")" * deep
    if kind == 7:
        tokens[a] = rng.choice(("9", "-", "e", "X_")) * rng.choice((5, 3000))
        return "".join(tokens)
    # Often the structure stays whole, so that faults deep inside are reached.
    start = tokens.index("assert") if "assert" in tokens else 0
    group = rng.choice(_EXCHANGES)
    for n in range(start, len(tokens)):
        if tokens[n] in group and rng.random() < 0.3:
            tokens[n] = rng.choice(group)
    return "".join(tokens)
