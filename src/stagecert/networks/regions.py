"""Where the inputs may be: boxes, Euclidean balls, or both, one for each problem of a batch."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.graph import Network
from stagecert.sets import AbstractSet, Ball, Box, BoxBall, Product

# Arrays of so many numbers are worth threads.
LARGE = 2**24


@dataclass(frozen=True)
class Regions:
    """Sets with a leading axis, and boxes around them.

    Attributes:
        sets: a set whose arrays have a leading axis of problems, in the graph's shapes.
        boxes: ((low, high), ...), one pair for each input.
        shapes: the inputs' shapes in the graph.
        boxed: whether the sets are the boxes.
        singles: float32 arrays that some of these arrays were made of, by their ids: half as much
            to send to a device.
    """

    sets: AbstractSet
    boxes: tuple
    shapes: tuple
    boxed: bool
    singles: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many problems."""
        return int(self.boxes[0][0].shape[0])

    def __getitem__(self, rows: slice | np.ndarray) -> "Regions":
        """Some of the problems, on the device."""
        placed: dict[int, jax.Array] = {}  # sets and boxes share arrays

        def place(x):
            if id(x) not in placed:
                single = self.singles.get(id(x))
                if single is None:
                    placed[id(x)] = jnp.asarray(x[rows])
                else:
                    placed[id(x)] = jnp.asarray(single[rows]).astype(x.dtype)
            return placed[id(x)]

        sets, boxes = jax.tree.map(place, (self.sets, self.boxes))
        return Regions(sets, boxes, self.shapes, self.boxed)


def regions_of(network: Network, lower, upper, ball) -> Regions:
    """Reads what the user gave, or says what is wrong with it."""
    if ball is not None:
        return _balls(network, lower, upper, ball)
    if lower is None or upper is None:
        raise ProblemError("Give lower and upper, or a ball, or all of them.")
    lows, highs = _per_input(network, lower, "lower"), _per_input(network, upper, "upper")
    lows = tuple(away_from_zero(low, -1) for low in lows)
    highs = tuple(away_from_zero(high, 1) for high in highs)
    pairs = tuple(zip(lows, highs, strict=True))
    count = len(lows[0])
    for k, (low, high) in enumerate(pairs):
        name = _name(network, k)
        if len(low) != count or len(high) != count:
            raise ProblemError(
                f"Batches differ: lower has {len(low)} boxes{name}, upper has {len(high)}, the "
                f"first input has {count}."
            )
        if _anywhere(np.greater, low, high):
            at = tuple(np.argwhere(low > high)[0])
            raise ProblemError(
                f"A box is empty: lower {low[at]:g} > upper {high[at]:g} at "
                f"{[int(i) for i in at]}{name}."
            )
    if count == 0:
        raise ProblemError("There are no boxes: the batch is empty.")
    singles = {**_singles(lows, lower), **_singles(highs, upper)}
    return Regions(set_of_boxes(pairs), pairs, network.input_shapes, True, singles)


def _singles(doubles: tuple[np.ndarray, ...], given: Any) -> dict[int, np.ndarray]:
    """The arrays that were given in float32, by the ids of those that were made of them."""
    found = {}
    for double, array in zip(doubles, given if len(doubles) > 1 else (given,), strict=True):
        if isinstance(array, np.ndarray) and array.dtype == np.float32:
            # Devices may take numbers below the normal range for zero.
            tiny = np.finfo(np.float32).tiny
            if not _anywhere(lambda x, tiny=tiny: (x != 0) & (np.abs(x) < tiny), array):
                found[id(double)] = array.reshape(double.shape)
    return found


def set_of_boxes(pairs: tuple) -> AbstractSet:
    """The set of inputs with one (low, high) for each."""
    boxes = tuple(Box(low, high) for low, high in pairs)
    return boxes[0] if len(boxes) == 1 else Product(*boxes)


def _balls(network: Network, lower, upper, ball) -> Regions:
    if len(network.input_shapes) > 1:
        raise ProblemError("A ball needs a network with one input.")
    try:
        centre, radius = ball
    except (TypeError, ValueError):
        raise ProblemError("ball must be (centre, radius).") from None
    (middle,) = _per_input(network, centre, "ball's centre")
    radius = np.asarray(radius, np.float64)
    if radius.ndim > 1 or np.any(~np.isfinite(radius)) or np.any(radius <= 0):
        raise ProblemError("The ball's radius must be positive: one number, or one for each ball.")
    try:
        radius = np.broadcast_to(radius, (len(middle),))
    except ValueError:
        raise ProblemError(f"There are {len(middle)} centres but {len(radius)} radii.") from None
    tiny = np.finfo(np.float64).tiny
    if np.any(radius < tiny) or _anywhere(lambda x: (x != 0) & (np.abs(x) < tiny), middle):
        raise ProblemError(
            f"The ball has numbers below {tiny:.3g}, which processors take for zero."
        )
    wide = radius.reshape(-1, *(1,) * (middle.ndim - 1))
    # One unit in the last place further out, so that rounding leaves nothing outside.
    low, high = np.nextafter(middle - wide, -np.inf), np.nextafter(middle + wide, np.inf)
    low, high = away_from_zero(low, -1), away_from_zero(high, 1)
    if (lower is None) != (upper is None):
        raise ProblemError("Give both lower and upper with a ball, or neither.")
    if lower is None:
        return Regions(Ball(middle, radius), ((low, high),), network.input_shapes, False)
    box = regions_of(network, lower, upper, None)
    ((box_low, box_high),) = box.boxes
    if box.count != len(middle):
        raise ProblemError(f"There are {box.count} boxes but {len(middle)} balls.")
    if np.any((middle < box_low) | (middle > box_high)):
        raise ProblemError("A ball's centre must lie in its box.")
    sets = BoxBall(box_low, box_high, middle, radius)
    pairs = ((np.maximum(low, box_low), np.minimum(high, box_high)),)
    return Regions(sets, pairs, network.input_shapes, False)


def away_from_zero(ends: np.ndarray, side: int) -> np.ndarray:
    """Ends of boxes that are normal numbers or zero, upper ones (side 1) no lower than before.

    Processors take numbers below the normal range for zero, and a large weight may follow.
    """
    tiny = np.finfo(np.float64).tiny
    if not _anywhere(lambda x: (x != 0) & (np.abs(x) < tiny), ends):
        return ends
    return np.where(np.abs(ends) < tiny, np.where(side * ends > 0, side * tiny, 0.0), ends)


def _anywhere(test, *arrays: np.ndarray) -> bool:
    """Whether a test holds for any entry."""
    return any(_by_rows(lambda some: bool(np.any(test(*(x[some] for x in arrays)))), arrays[0]))


def _by_rows(function, array: np.ndarray) -> Iterator:
    """A function of slices of rows, a few rows at a time, so that results stay in caches.

    In threads where there is much to do: an accelerator waits for it.
    """
    large = array.size >= LARGE
    rows = max((1_000_000 if large else 100_000) // max(math.prod(array.shape[1:]), 1), 1)
    slices = [slice(begin, begin + rows) for begin in range(0, len(array), rows)]
    if not large:
        yield from map(function, slices)
        return
    with ThreadPoolExecutor() as threads:
        yield from threads.map(function, slices)


def _doubled(given: Any) -> np.ndarray:
    """An array in float64."""
    array = np.asarray(given)
    if array.dtype == np.float64 or array.size < LARGE:
        return np.asarray(array, np.float64)
    double = np.empty(array.shape, np.float64)
    for _ in _by_rows(lambda some: double.__setitem__(some, array[some]), array):
        pass
    return double


def _name(network: Network, index: int) -> str:
    if len(network.input_shapes) == 1:
        return ""
    return f" (input {index}, '{network.labels.inputs[index]}')"


def _per_input(network: Network, given: Any, what: str) -> tuple[np.ndarray, ...]:
    """One float64 array for each input, in the graph's shapes behind a batch axis."""
    count = len(network.input_shapes)
    arrays = given if count > 1 and isinstance(given, (tuple, list)) else (given,)
    if len(arrays) != count:
        raise ProblemError(f"{what}: the network has {count} inputs; give a tuple of arrays.")
    shown: Any = network.input_shape if count > 1 else (network.input_shape,)
    out = []
    for k, (array, graph, user) in enumerate(zip(arrays, network.input_shapes, shown, strict=True)):
        name = _name(network, k)
        try:
            array = _doubled(array)
        except (TypeError, ValueError) as error:
            raise ProblemError(f"{what}{name} is no array of numbers: {error}") from None
        if array.ndim == 0 or array.shape[1:] != tuple(user):
            one = " For one box give x[None]." if array.shape == tuple(user) else ""
            raise ProblemError(
                f"{what}{name} must have shape (batch, {', '.join(map(str, user))}), but has shape "
                f"{array.shape}.{one}"
            )
        if _anywhere(lambda x: ~np.isfinite(x), array):
            at = np.argwhere(~np.isfinite(array))[0].tolist()
            raise ProblemError(f"{what}{name} is not finite at {at}.")
        out.append(array.reshape(len(array), *graph))
    return tuple(out)
