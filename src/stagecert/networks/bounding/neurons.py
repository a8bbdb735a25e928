"""What single neurons read: the allocations behind planes above them.

For f(y) = max(a y, b y) and y = w . x + bias with x in a box, let t_i be how far x_i has moved from
where it makes y smallest, as a share of the way, and delta_i = |w_i| times that way. Then

    f(y) <= a y + (b - a) * sum of kept_i delta_i t_i,    0 <= kept <= 1,    kept . delta = most,

for any such kept, where most is the largest y of the box. The smallest over all of them is the
envelope: a continuous knapsack (what is not kept pays for the deficit that y has at t = 0). Equal
shares are the triangle on the box's own interval.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert_check.graph import Program, Shift
from stagecert_check.planes import sources_of

HALVINGS = 12  # of an interval of thresholds; what is left of it hardly matters


def single(node: Any) -> Any:
    """A node of a program whose numbers are in single precision."""
    node = copy.copy(node)
    if isinstance(node.operation, Shift):
        node.operation = Shift(np.asarray(node.operation.constant, np.float32))
    elif hasattr(node.operation, "weights"):
        node.operation = copy.copy(node.operation)
        node.operation.weights = np.asarray(node.operation.weights, np.float32)
    elif hasattr(node.operation, "conv"):
        node.operation = copy.copy(node.operation)
        node.operation.conv = copy.copy(node.operation.conv)
        node.operation.conv.weights = np.asarray(node.operation.conv.weights, np.float32)
    return node


@dataclass(eq=False)
class Neurons:
    """Some neurons of an activation, over the box of what they read.

    Attributes:
        entries: which ones.
        columns: (neurons, reads): the entries of all sources, side by side, that each reads; where
            one reads fewer than others, weights are zero.
        delta: (neurons, reads): how much each can move the argument.
        up: (neurons, reads): whether the argument grows with it.
        most: (neurons,): the largest argument over the box; never negative.
    """

    entries: np.ndarray
    columns: np.ndarray
    delta: np.ndarray
    up: np.ndarray
    most: np.ndarray

    @property
    def dense(self) -> bool:
        """Whether all neurons read all there is, in order."""
        return self.columns.strides[0] == 0


def read(program: Program, index: int, entries: np.ndarray, low, high) -> Neurons:
    """Neurons of an activation; `low` and `high` are those of its sources, side by side."""
    weights, bias = _affine(program, index, entries)
    reads = weights != 0
    most_reads = max(int(reads.sum(axis=1).max(initial=0)), 1)
    if most_reads > 0.8 * weights.shape[1]:
        columns = np.broadcast_to(np.arange(weights.shape[1]), weights.shape)
    else:
        columns = np.argsort(~reads, axis=1, kind="stable")[:, :most_reads]
        weights = np.take_along_axis(weights, columns, axis=1)
    least, largest = low[columns], high[columns]
    delta = np.abs(weights) * (largest - least)
    most = bias + np.maximum(weights * least, weights * largest).sum(axis=1)
    return Neurons(
        entries, columns, delta.astype(np.float32), weights >= 0,
        np.clip(most, 0, delta.sum(axis=1)).astype(np.float32),
    )  # fmt: skip


def _affine(program: Program, index: int, entries: np.ndarray):
    """Weights (entries, all sources) and constants of entries of an activation's argument."""
    (argument,) = program.nodes[index].arguments
    sources = sources_of(program, index)
    sizes = {k: int(np.prod(program.nodes[k].shape)) for k in sources}
    weights = np.zeros((len(entries), sum(sizes.values())))
    bias = np.zeros(len(entries))
    at_once = max(2**22 // max(int(np.prod(n.shape)) for n in program.nodes), 1)
    for first in range(0, len(entries), at_once):
        some = slice(first, first + at_once)
        count = len(entries[some])
        start = np.zeros((count, int(np.prod(program.nodes[argument].shape))))
        start[np.arange(count), entries[some]] = 1
        reached = {argument: start.reshape(count, *program.nodes[argument].shape)}
        for k in range(argument, -1, -1):
            if k not in reached or k in sizes:
                continue
            g, node = reached.pop(k), program.nodes[k]
            if isinstance(node.operation, Shift):
                bias[some] += (g * node.operation.constant).reshape(count, -1).sum(axis=1)
                parts = [g]
            else:
                shapes = [program.nodes[j].shape for j in node.arguments]
                parts = node.operation.transposed(g, shapes)  # type: ignore
            for j, part in zip(node.arguments, parts, strict=True):
                reached[j] = reached[j] + part if j in reached else part
        begin = 0
        for k, size in sizes.items():
            if k in reached:
                weights[some, begin : begin + size] = reached[k].reshape(count, -1)
            begin += size
    return weights, bias


def moved(x, up):
    """How far inputs have moved in the helpful direction, from how far they have moved up."""
    return np.where(up, x, 1 - x)


def threshold(t, delta, deficit):
    """A number such that the inputs beyond it just pay for the deficit; along the last axis."""
    low, high = t.min(axis=-1), t.max(axis=-1)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        paid = np.einsum("...i,...i->...", delta, t > middle[..., None], dtype=delta.dtype)
        enough = paid >= deficit
        low, high = np.where(enough, middle, low), np.where(enough, high, middle)
    return 0.5 * (low + high)


def envelope(t, delta, deficit):
    """The envelope of relu over a box: at most that, and nearly as much.

    For any threshold, threshold * deficit + delta . max(t - threshold, 0) is at least what the best
    allocation of the deficit takes.
    """
    at = threshold(t, delta, deficit)
    over = np.maximum(t - at[..., None], 0)
    return np.einsum("...i,...i->...", delta, t - over) - at * deficit


def allocated(wanted, delta, most):
    """The nearest shares that may be kept: from 0 to 1, with kept . delta = most."""
    low, high = -wanted.max(axis=-1), 1 - wanted.min(axis=-1)

    def shifted(by):
        kept = np.clip(wanted + by[..., None], 0, 1)
        return kept, np.einsum("...i,...i->...", delta, kept)

    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        much = shifted(middle)[1] > most
        low, high = np.where(much, low, middle), np.where(much, middle, high)
    # One end is a little too much and the other too little: what is between them is right.
    (less, under), (more, over) = shifted(low), shifted(high)
    way = np.where(over > under, over - under, 1)
    share = np.clip((most - under) / way, 0, 1)
    return less + share[..., None].astype(less.dtype) * (more - less)
