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

GUESSES, FEW = (8, 20), 2**14  # of a threshold: among many numbers, and among few, which are cheap
ROUNDS = 5  # of looking for the shift of an allocation; the same holds
TINY = np.float32(1e-30)


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

    Arrays may have axes before those that are named: some neurons for each of several problems.

    Attributes:
        entries: (neurons,): which ones.
        columns: (neurons, reads): the entries of all sources, side by side, that each reads; where
            one reads fewer than others, `delta` is zero. None if all read all, in order.
        delta: (neurons, reads): how much each can move the argument.
        falls: (neurons, reads): 1 where the argument falls with it, 0 where it grows.
        most: (neurons,): the largest argument over the box; never negative.
        deficit: (neurons,): what the inputs have to pay for; with `most`, the sum of `delta`.
    """

    entries: np.ndarray
    columns: np.ndarray | None
    delta: np.ndarray
    falls: np.ndarray
    most: np.ndarray
    deficit: np.ndarray

    def __getitem__(self, some) -> "Neurons":
        columns = None if self.columns is None else self.columns[some]
        return Neurons(self.entries[some], columns, self.delta[some], self.falls[some],
                       self.most[some], self.deficit[some])  # fmt: skip

    def along(self, order: np.ndarray) -> "Neurons":
        """Of neurons for several problems those in an order: (problems, neurons)."""
        return self[np.arange(len(order))[:, None], order]

    def moved(self, share: np.ndarray) -> np.ndarray:
        """How far inputs have moved in the helpful direction, (problems, neurons, reads).

        `share` (problems, entries of all sources) is how far they have moved up.
        """
        if self.columns is None:
            read = share[:, None]
        else:
            read = share[np.arange(len(share)).reshape(-1, 1, 1), self.columns]
        moved = read - self.falls
        return np.abs(moved, out=moved)  # 1 less a share is what it lacks

    def sent(self, weights: np.ndarray, size: int) -> np.ndarray:
        """Sums over neurons of weights (problems, neurons, reads), for each of the entries read."""
        if self.columns is None:
            return weights.sum(axis=1)
        flat = np.arange(len(weights))[:, None, None] * size + self.columns
        found = np.bincount(flat.reshape(-1), weights.reshape(-1), len(weights) * size)
        return found.reshape(len(weights), size)


def read(program: Program, index: int, entries: np.ndarray, low, high) -> Neurons:
    """Neurons of an activation; `low` and `high` are those of its sources, side by side."""
    weights, bias = _affine(program, index, entries)
    reads = weights != 0
    most_reads = max(int(reads.sum(axis=1).max(initial=0)), 1)
    columns = None
    if most_reads <= 0.8 * weights.shape[1]:
        columns = np.argsort(~reads, axis=1, kind="stable")[:, :most_reads]
        weights = np.take_along_axis(weights, columns, axis=1)
        low, high = low[columns], high[columns]
    delta = np.abs(weights) * (high - low)
    most = bias + np.maximum(weights * low, weights * high).sum(axis=1)
    total = delta.sum(axis=1)
    most = np.clip(most, 0, total)
    return Neurons(entries, columns, *(x.astype(np.float32) for x in
                   (delta, weights < 0, most, total - most)))  # fmt: skip


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


def envelope(t: np.ndarray, neurons: Neurons) -> np.ndarray:
    """The envelope of relu over a box: at most that, and nearly as much; (problems, neurons).

    For any threshold, delta . min(t, threshold) - threshold * deficit is at most what the best
    allocation leaves; the largest of them is the envelope. `t` is what `neurons.moved` says.
    """
    low, high = t.min(axis=-1), t.max(axis=-1)
    # What inputs above a threshold pay, less the deficit: it falls. Thresholds are looked for by
    # turns where a line between both ends says, and halfway.
    under, over = neurons.most, -neurons.deficit
    at = low
    for k in range(GUESSES[t.size <= FEW]):
        share = 0.5 if k % 2 else under / np.maximum(under - over, TINY)
        at = low + (high - low) * share
        paid = np.einsum("...i,...i->...", neurons.delta, t > at[..., None], dtype=t.dtype)
        enough = paid >= neurons.deficit
        low, high = np.where(enough, at, low), np.where(enough, high, at)
        under = np.where(enough, paid - neurons.deficit, under)
        over = np.where(enough, over, paid - neurons.deficit)
    return np.maximum(_left(t, low, neurons), _left(t, high, neurons))


def _left(t: np.ndarray, at: np.ndarray, neurons: Neurons) -> np.ndarray:
    return np.einsum("...i,...i->...", neurons.delta, np.minimum(t, at[..., None])) - (
        at * neurons.deficit
    )


def allocated(kept: np.ndarray, push: np.ndarray, neurons: Neurons) -> np.ndarray:
    """What is kept after a push: clip(kept - push + shift, 0, 1), with kept . delta = most.

    The shift is between the smallest and the largest push. What is kept grows with it, and is
    piecewise linear: Newton's steps find it, halves where they leave what is known.
    """
    wanted = kept - push
    low, high = push.min(axis=-1), push.max(axis=-1)
    delta = neurons.delta
    total = np.maximum(neurons.most + neurons.deficit, TINY)
    shift = np.einsum("...i,...i->...", delta, push) / total
    new, off = np.empty_like(wanted), shift
    for _ in range(ROUNDS):
        np.add(wanted, shift[..., None], out=new)
        free = new > 0
        free &= new < 1
        np.clip(new, 0, 1, out=new)
        off = np.einsum("...i,...i->...", delta, new) - neurons.most
        slope = np.einsum("...i,...i->...", delta, free, dtype=delta.dtype)
        more = off > 0
        low, high = np.where(more, low, shift), np.where(more, shift, high)
        step = shift - off / np.maximum(slope, TINY)
        shift = np.where((step >= low) & (step <= high), step, 0.5 * (low + high))
    # The rest is taken from all that is kept, or from all that is not.
    paid = off + neurons.most
    less = np.where(off > 0, neurons.most / np.maximum(paid, TINY), 1)
    rest = np.maximum(neurons.most + neurons.deficit - paid, TINY)
    more = np.where(off < 0, np.clip(neurons.deficit / rest, 0, 1), 1)
    new *= (less * more)[..., None]
    new += (1 - more)[..., None]
    return new
