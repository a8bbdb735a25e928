"""Intervals for the arguments of all activations, layer by layer.

Every one is a stagewise problem over the earlier layers: minimise and maximise one entry of a
layer's argument. Intervals solve it crudely, zero steps of the search (one pass back) much better,
a few steps better still. Only entries whose activation is not already linear on the interval are
worth the effort.
"""

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.bounding.intervals import interval_bounds
from stagecert.networks.bounding.relaxation import Split
from stagecert.networks.bounding.stepwise import Passes, rows_at_once
from stagecert.networks.regions import Regions, away_from_zero

KINDS = ("ibp", "backward", "optimised", "envelope")


@dataclass(frozen=True)
class Intermediate:
    """How the arguments of activations are bounded.

    Attributes:
        kind: "ibp", "backward", "optimised" or "envelope" (see `envelope_bounds.tighten`).
        steps: search steps for each entry, for "optimised".
        given: ready intervals ((low, high), ...), one pair for each activation, which are used
            as they are; None if they are to be computed.
    """

    kind: str = "backward"
    steps: int = 3
    given: tuple | None = None

    @staticmethod
    def named(what: Any) -> "Intermediate":
        """From what users write."""
        if isinstance(what, Intermediate):
            how = what
        elif isinstance(what, str):
            how = Intermediate(what)
        elif isinstance(what, (tuple, list)):
            how = Intermediate("ibp", given=tuple(what))
        else:
            raise ProblemError(
                f"intermediate must be one of {', '.join(KINDS)}, an Intermediate or intervals, "
                f"not {what!r}."
            )
        if how.kind not in KINDS:
            raise ProblemError(
                f"Unknown intermediate bounds '{how.kind}'; known are {', '.join(KINDS)}."
            )
        if how.steps < 1:
            raise ProblemError(f"Intermediate: steps must be at least 1, not {how.steps}.")
        return how

    def require(self, boxes: int) -> None:
        """Refuses intervals of more boxes than there are; chunks would not notice."""
        for pair in self.given or ():
            for ends in pair:
                if np.ndim(ends) and len(ends) > boxes:
                    raise ProblemError(
                        f"intermediate: there are {boxes} boxes, but intervals of {len(ends)}."
                    )

    def chunk(self, rows: slice | np.ndarray) -> "Intermediate":
        """The same for some boxes."""
        if self.given is None:
            return self
        return replace(self, given=tuple((low[rows], high[rows]) for low, high in self.given))


@eqx.filter_jit
def _all_intervals(parts: Split, boxes):
    return jax.vmap(lambda boxes: interval_bounds(parts, boxes)[0])(boxes)


def enclose(parts: Split, regions: Regions, how: Intermediate, memory: float, show) -> tuple:
    """(low, high) of every layer's argument, each with a leading axis of boxes."""
    if how.given is not None:
        return _given(parts, regions, how.given)
    if how.kind == "ibp":
        return _all_intervals(parts, regions.boxes)
    if how.kind == "envelope":  # `bound` narrows what passes back give; nobody else does
        raise ProblemError("intermediate='envelope' is for networks.bound(relaxation='envelope').")
    refine = 1 + (how.steps if how.kind == "optimised" else 0)
    width = rows_at_once(parts, memory)
    return Passes(
        parts, regions, width, refine=refine,
        share=lambda layer, done, size: show(f"layer {layer}", done, size),
    ).arguments  # fmt: skip


def _given(parts: Split, regions: Regions, given: tuple) -> tuple:
    """Ready intervals, once their shapes and order are seen to be right."""
    if len(given) != len(parts.layers):
        raise ProblemError(
            f"intermediate: there are {len(parts.layers)} activations, but {len(given)} intervals."
        )
    likes = jax.eval_shape(lambda boxes: _shapes_of_arguments(parts, boxes), regions.boxes)
    checked = []
    for name, like, pair in zip(parts.names, likes, given, strict=True):
        low, high = (np.asarray(x, np.float64) for x in pair)
        if low.shape != like.shape or high.shape != like.shape:
            raise ProblemError(
                f"intermediate: intervals of '{name}' must have shape {like.shape}, but have "
                f"{low.shape} and {high.shape}."
            )
        if not np.all(low <= high):
            raise ProblemError(f"intermediate: an interval of '{name}' is empty or NaN.")
        low, high = away_from_zero(low, -1), away_from_zero(high, 1)
        checked.append((jnp.asarray(low), jnp.asarray(high)))
    return tuple(checked)


def _shapes_of_arguments(parts: Split, boxes):
    def one(boxes):
        inputs = tuple(low for low, _ in boxes)
        inputs = inputs[0] if len(inputs) == 1 else inputs
        blocks = tuple(jnp.zeros(layer.shape) for layer in parts.layers)
        return tuple(layer.segment(inputs, blocks) for layer in parts.layers)

    return jax.vmap(one)(boxes)
