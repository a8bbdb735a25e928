"""Trees of splits of neurons on boxes that cuts of inputs have left open.

A small box has few neurons that bend. Where the linear bounds of these do not suffice, hundreds of
further cuts of inputs may be needed, and a few splits of the neurons do the same: each box has its
own intervals, and all boxes of a step grow their trees together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagecert.verify.checked import Known
from stagecert.verify.harvest import Leaves, walked
from stagecert.verify.nodes import Form, default_slopes
from stagecert.verify.tree import Root, Tree
from stagecert_check.graph import Program

# Boxes with more neurons that bend are cut first; nodes after which a tree is given up.
MOST_BENT, PATIENCE = 64, 16
# Single precision is off by less than this share of the size that the rows can have.
ROUNDING = 4e-6


@dataclass(frozen=True, eq=False)
class Graft:
    """The tree that refutes a case on a box: as in `harvest.Walk`, and what its leaves have.

    Attributes:
        neurons, cuts, forces: see there.
        weights: (leaves, rows of the case).
        below: (leaves, neurons), slopes.
    """

    neurons: np.ndarray
    cuts: np.ndarray
    forces: np.ndarray
    weights: np.ndarray
    below: np.ndarray


class Grafter:
    """Grows such trees for one network of relus."""

    def __init__(self, program: Program, form: Form):
        self.program, self.form = program, form
        self.rounding = ROUNDING  # grows where the checker does not follow

    @staticmethod
    def able(program: Program) -> bool:
        """Whether something bends, and all that does is a relu."""
        kinds = {getattr(program.nodes[k].operation, "kind", "") for k in program.activations}
        return kinds == {"relu"}

    def default(self, boxes: Known) -> np.ndarray:
        """The slopes below that the checker takes by itself, zeros and ones, as bits."""
        return np.packbits(default_slopes(self.form, boxes.low, boxes.high)[0] > 0.5, axis=1)

    def slopes(self, bits: np.ndarray) -> np.ndarray:
        """Such slopes as numbers."""
        return np.unpackbits(bits, count=self.form.neurons).astype(np.float16)

    def promising(self, boxes: Known) -> np.ndarray:
        """Which boxes have few neurons that bend."""
        return np.sum((boxes.low < 0) & (boxes.high > 0), axis=1) <= MOST_BENT

    def grown(
        self,
        boxes: Known,
        wanted: list[tuple[int, np.ndarray, np.ndarray]],
        stop: Callable[[], bool],
    ) -> dict[int, Graft]:
        """Trees for those of some (box, rows, limits) that they refute, by their places."""
        roots = []
        for k, (box, rows, limits) in enumerate(wanted):
            reach = np.abs(rows) @ boxes.sizes[box, : rows.shape[1]]
            reach = reach + np.where(np.isfinite(limits), np.abs(limits), 0)
            ends = boxes.ends[0][box], boxes.ends[1][box]
            margin = self.rounding * float(np.max(reach))
            roots.append(Root(0, k, ends, boxes.low[box], boxes.high[box], rows, limits, margin))
        tree = Tree(self.program, self.form, roots, patience=PATIENCE)
        while not tree.done:
            if stop() or tree.stuck:
                return {}
            tree.step()
        leaves, found = Leaves(tree), {}
        for k in np.flatnonzero(~tree.lost).tolist():
            walk = walked(tree, k, leaves)
            at = np.array([leaves.rows[node] for node in walk.order.tolist()])
            weights = leaves.joined("weights")[at][:, : len(wanted[k][2])]
            found[k] = Graft(
                walk.neurons, walk.cuts, np.array(walk.forces, float), weights,
                leaves.joined("below")[at],
            )  # fmt: skip
        return found
