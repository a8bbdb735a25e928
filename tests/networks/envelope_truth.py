"""Small networks as matrices, and the linear programme with all cuts, by HiGHS.

A cut is an upper line of one neuron over the box of its inputs, with whole inputs kept or not (and
one in part): those that the solution violates are added until there is none.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog

from stagecert import networks

CONVOLVED = (2, 4, 4)


def dense(seed: int, sizes=(4, 8, 8, 2)):
    """(matrices and constants, network) of a random dense relu network."""
    draw = np.random.default_rng(seed)
    chain = [
        (1.5 * draw.normal(size=(m, n)) / np.sqrt(m), 0.3 * draw.normal(size=n))
        for m, n in itertools.pairwise(sizes)
    ]

    def function(x):
        for matrix, constant in chain[:-1]:
            x = jax.nn.relu(x @ matrix + constant)
        return x @ chain[-1][0] + chain[-1][1]

    return chain, networks.from_jax(function, np.zeros(sizes[0]))


def convolved(seed: int):
    """The same with a convolution in front."""
    draw = np.random.default_rng(seed)
    kernel, shift = 0.5 * draw.normal(size=(2, 2, 3, 3)), 0.3 * draw.normal(size=2)
    size = int(np.prod(CONVOLVED))
    rest = [(1.5 * draw.normal(size=(8, 6)) / np.sqrt(8), 0.3 * draw.normal(size=6)),
            (draw.normal(size=(6, 2)), np.zeros(2))]  # fmt: skip

    def conv(x):
        weights = jnp.asarray(kernel)
        return jax.lax.conv_general_dilated(x[None], weights, (2, 2), ((1, 0), (1, 0)))[0]

    def function(x):
        x = jax.nn.relu(conv(x) + shift[:, None, None]).reshape(-1)
        return jax.nn.relu(x @ rest[0][0] + rest[0][1]) @ rest[1][0] + rest[1][1]

    with jax.enable_x64(True):
        units = jnp.eye(size).reshape(size, *CONVOLVED)
        matrix = np.stack([np.asarray(conv(unit)).reshape(-1) for unit in units])
    return [(matrix, np.repeat(shift, 4)), *rest], networks.from_jax(function, np.zeros(CONVOLVED))


def exact(chain, x) -> np.ndarray:
    """Outputs at points."""
    for matrix, constant in chain[:-1]:
        x = np.maximum(x @ matrix + constant, 0)
    return x @ chain[-1][0] + chain[-1][1]


def _cut(w, b, low, high, x):
    """The best cut of a neuron at x: its slopes, its constant and its height there."""
    base = np.where(w >= 0, low, high)
    delta = np.abs(w) * (high - low)
    t = np.where(delta > 0, w * (x - base) / np.where(delta > 0, delta, 1), 0)
    deficit, kept = -(b + w @ base), np.ones(len(w))
    for i in np.argsort(-t):
        paid = min(delta[i], deficit)
        kept[i] = 1 - paid / delta[i] if delta[i] > 0 else 0
        deficit -= paid
    slopes = kept * w
    return slopes, -slopes @ base, slopes @ (x - base)


def least(chain, low, high, arguments, row, cuts: bool = True) -> float:
    """The optimum with triangles on given intervals, and with all cuts."""
    sizes = [len(low), *(matrix.shape[1] for matrix, _ in chain[:-1])]
    first = np.cumsum([0, *sizes])
    ends = [(low, high), *(tuple(np.maximum(x, 0) for x in pair) for pair in arguments)]
    rows, limits = [], []

    def add(k, j, slopes, top, sign):
        one = np.zeros(first[-1])
        one[first[k] : first[k + 1]], one[first[k + 1] + j] = -sign * slopes, sign
        rows.append(one)
        limits.append(sign * top)

    for k, (lows, highs) in enumerate(arguments):
        matrix, constant = chain[k]
        for j in range(matrix.shape[1]):
            w, b = matrix[:, j], constant[j]
            add(k, j, w, b, -1)
            if lows[j] >= 0:
                add(k, j, w, b, 1)
            elif highs[j] <= 0:
                add(k, j, 0 * w, 0, 1)
            else:
                chord = highs[j] / (highs[j] - lows[j])
                add(k, j, chord * w, chord * (b - lows[j]), 1)
    cost = np.zeros(first[-1])
    cost[first[-2] :] = chain[-1][0] @ row
    bounds = [*zip(low, high, strict=True), *[(0, None)] * (first[-1] - len(low))]
    for _ in range(300):
        found = linprog(cost, A_ub=np.array(rows), b_ub=np.array(limits), bounds=bounds)
        assert found.status == 0
        count = len(rows)
        for k, (lows, highs) in enumerate(arguments if cuts else []):
            matrix, constant = chain[k]
            x = found.x[first[k] : first[k + 1]]
            for j in np.flatnonzero((lows < 0) & (highs > 0)):
                slopes, top, height = _cut(matrix[:, j], constant[j], ends[k][0], ends[k][1], x)
                if found.x[first[k + 1] + j] > height + 3e-7:
                    add(k, j, slopes, top, 1)
        if len(rows) == count:
            return float(found.fun + chain[-1][1] @ row)
    raise AssertionError("cuts without an end")
