"""Large results that stay on the device where they were computed until somebody asks for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Held:
    """Trees of arrays that come in parts along their first axis.

    Copying to the computer's own memory may take longer than computing, so parts stay on their
    device as long as there is room; what comes after that goes to the computer's memory.

    Args:
        room: how many bytes may stay on the device.
    """

    def __init__(self, room: float):
        self.room = room
        self._parts: list[Any] = []

    def add(self, part) -> None:
        """The next part."""
        self.room -= sum(leaf.nbytes for leaf in jax.tree.leaves(part))
        self._parts.append(part if self.room >= 0 else jax.tree.map(np.asarray, part))

    def take(self, rows: np.ndarray, pick: Callable[[Any], Any]) -> Any:
        """Some rows of what `pick` picks from each part, on the device."""
        picked = [pick(part) for part in self._parts]
        sizes = [jax.tree.leaves(part)[0].shape[0] for part in picked]
        taken = _picked(picked[0], np.minimum(rows, sizes[0] - 1))
        begin = sizes[0]
        for part, size in zip(picked[1:], sizes[1:], strict=True):
            inside = (rows >= begin) & (rows < begin + size)
            # All rows are read, and few of them used: arrays of one shape are compiled once.
            taken = _replaced(taken, part, np.where(inside, rows - begin, 0), inside)
            begin += size
        return taken

    def numpy(self, pick: Callable[[Any], Any]) -> Any:
        """All of what `pick` picks from each part, as NumPy arrays."""
        parts = [jax.tree.map(np.asarray, pick(part)) for part in self._parts]
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


@jax.jit
def _picked(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


@jax.jit
def _replaced(tree, part, rows, inside):
    def replaced(x, new):
        return jnp.where(inside.reshape(-1, *(1,) * (x.ndim - 1)), new[rows], x)

    return jax.tree.map(replaced, tree, part)
