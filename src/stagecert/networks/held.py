"""Large results that stay on the device where they were computed until somebody asks for them."""

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

    def take(self, rows: np.ndarray) -> Any:
        """Some rows, in increasing order, on the device."""
        taken, begin = [], 0
        for part in self._parts:
            size = jax.tree.leaves(part)[0].shape[0]
            mine = rows[(rows >= begin) & (rows < begin + size)] - begin
            if len(mine):
                taken.append(jax.tree.map(lambda x, mine=mine: jnp.asarray(x[mine]), part))
            begin += size
        return jax.tree.map(lambda *xs: jnp.concatenate(xs), *taken)

    def numpy(self) -> Any:
        """Everything, as NumPy arrays."""
        parts = [jax.tree.map(np.asarray, part) for part in self._parts]
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
