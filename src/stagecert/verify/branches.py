"""What a search through splits of inputs and neurons hands over: a tree, and a proof on each leaf.

A node of the tree is a box of inputs with splits of neurons. On a leaf, the case's rows combined
with `multipliers`, plus `force * (x - cut)` for every neuron split on the way to it (its part
below; above: `force * (cut - x)`), have a positive lower bound: all of these are at most zero for a
counterexample, so there is none. Zero is enough if a strict row takes part.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

LEAF = -1
_KINDS = tuple(map(np.dtype, ("<f2", "<f4", "<f8")))


@dataclass(frozen=True, eq=False)
class Branches:
    """The tree that refutes one case of a property.

    Neurons are the entries of the arguments of all activations, flattened, one activation after the
    other, in the order of the checker's program.

    Attributes:
        case: the number of the property's case.
        axes: int32, the tree in preorder: -1 is a leaf, k < inputs a cut of input entry k, and
            inputs + j a split of neuron j.
        cuts: float64, where. The part below (x <= cut) comes first, then the part above.
        multipliers: (leaves, rows), not negative: of the case's output rows, then its input rows.
        forces: float64, not negative: for every leaf in order, one number for each neuron split on
            its way from the root, the root's first.
        slopes: for every activation None (defaults) or a pair (below, above), each None or an array
            (leaves, *shape), or (1, *shape) for all leaves; float16, float32 or float64.
        whole: further passes back for the intervals of the case's box (`certificates.Rows` or None
            for every activation), or ().
        stations: by node, in preorder: such passes for the intervals below it, with forces of the
            splits on the way to the node.
    """

    case: int
    axes: np.ndarray
    cuts: np.ndarray
    multipliers: np.ndarray
    forces: np.ndarray
    slopes: tuple[Any, ...] = ()
    whole: tuple[Any, ...] = ()
    stations: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self):
        for name, kind in (("axes", "<i4"), ("cuts", "<f8"), ("forces", "<f8")):
            array = np.ascontiguousarray(getattr(self, name), kind)
            _need(array.ndim == 1, f"{name} must have one axis, not the shape {array.shape}")
            object.__setattr__(self, name, array)
        object.__setattr__(self, "multipliers", np.ascontiguousarray(self.multipliers, "<f8"))
        object.__setattr__(self, "slopes", tuple(self.slopes))
        object.__setattr__(self, "whole", tuple(self.whole))
        leaves = int(np.sum(self.axes == LEAF))
        _need(self.axes.shape == self.cuts.shape, "axes and cuts must be as many")
        _need(
            len(self.axes) == 2 * leaves - 1 and not np.any(self.axes < LEAF),
            "axes must be the preorder of a tree with two parts for each split, with -1 for leaves",
        )
        _need(
            self.multipliers.ndim == 2 and len(self.multipliers) == leaves,
            f"multipliers must be (leaves, rows) for {leaves} leaves, not {self.multipliers.shape}",
        )
        for name in ("cuts", "multipliers", "forces"):
            _need(np.all(np.isfinite(getattr(self, name))), f"{name} must be finite")
        for name in ("multipliers", "forces"):
            _need(np.all(getattr(self, name) >= 0), f"{name} must not be negative")
        for number, pair in enumerate(self.slopes):
            for array in pair or ():
                if array is not None:
                    where = f"slopes of activation {number}"
                    _need(array.dtype in _KINDS, f"{where} must be float16, float32 or float64")
                    _need(len(array) in (1, leaves), f"{where} must be for one or all leaves")
                    _need(np.all(np.isfinite(array)), f"{where} must be finite")

    @property
    def leaves(self) -> int:
        """How many leaves there are."""
        return len(self.multipliers)


def _need(holds: Any, why: str) -> None:
    if not holds:
        raise ValueError(f"Branches: {why}.")
