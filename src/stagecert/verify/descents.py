"""Looking for counterexamples around many images at once, on the device.

Every image is followed from one starting point towards each class that it is aimed at. Boxes are
sent to the device once; starting points are drawn there; what comes back are the points that came
closest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import Network
from stagecert.powers import power_above
from stagecert.problem import as_arrays
from stagecert.verify import attack

# Points of each image that may be run in ONNX Runtime after a descent, the most promising ones.
REPLAYED = 4


@dataclass(frozen=True)
class Found:
    """The best points of some images, (images, REPLAYED or fewer), the best of each first.

    Attributes:
        images: their places among the boxes.
        margins: as computed on the device: below zero where the other class wins.
        best: (images, entries), the first of each.
        others: (images, replayed - 1, entries). All three are still on the device, and longer than
            `images`.
    """

    images: np.ndarray
    margins: Any
    best: Any
    others: Any


class Descents:
    """Descents in the boxes of a batch of images.

    Args:
        network: the network.
        boxes: `centre`, `least` and `most` are the images and the ends of their boxes, in float32.
        labels: the right class of each image.
        aims: (images, aims), the other classes that each is pushed towards.
        places: of the images in the data set: random numbers depend on these.
        seed: and on this.
    """

    def __init__(
        self,
        network: Network,
        boxes: Any,
        labels: np.ndarray,
        aims: np.ndarray,
        places: np.ndarray,
        seed: int,
    ):
        self.aims = aims
        self.at_once = images_at_once(network, aims.shape[1])
        # Filled up, so that the last batch, which is shorter, needs few other programs.
        count = len(labels)
        fill = np.minimum(np.arange(power_above(count)), count - 1)
        with jax.enable_x64(False):
            self._network = as_arrays(network, jnp.float32)
            self._images = _Images(
                jnp.asarray(boxes.centre.reshape(count, -1)[fill]),
                jnp.asarray(boxes.least.reshape(count, -1)[fill]),
                jnp.asarray(boxes.most.reshape(count, -1)[fill]),
                jnp.asarray(labels[fill].astype(np.int32)),
                jnp.asarray(places[fill].astype(np.uint32)),
            )
            self._key = jax.random.key(seed)

    def from_scratch(self, images: np.ndarray, turn: int) -> Iterator[Found]:
        """From the images themselves (turn 0), corners (turn 1), random points (all others)."""
        for some, count in self._in_groups(images):
            with jax.enable_x64(False):
                starts = _starts(self._images, self._key, some, self.aims.shape[1], turn)
            yield self._followed(some, count, self.aims[some], starts, attack.SHORT[0])

    def from_points(self, images: np.ndarray, aims, points, plan: attack.Plan) -> Iterator[Found]:
        """From points (images, aims, entries), towards other classes (images, aims)."""
        place = np.zeros(len(self.aims), int)
        place[images] = np.arange(len(images))
        for some, count in self._in_groups(images):
            mine = place[some]
            starts = np.asarray(points[mine], np.float32).reshape(-1, points.shape[-1])
            yield self._followed(some, count, aims[mine], starts, plan)

    def _in_groups(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """As many images as are followed at once, filled up with the first; how many count."""
        for begin in range(0, len(images), self.at_once):
            some = images[begin : begin + self.at_once]
            yield np.append(some, np.repeat(some[:1], self.at_once - len(some))), len(some)

    def _followed(self, some, count: int, aims, starts, plan: attack.Plan) -> Found:
        with jax.enable_x64(False):
            classes = self._network.output_size
            goal = _goals(self._images, some, aims.astype(np.int32), classes)
            points, margins = attack.followed(self._network, starts, goal, plan)
            return Found(some[:count], *_best(points, margins, aims.shape[1]))


def ahead(every: Iterator[Found]) -> Iterator[Found]:
    """The same, one behind: while the device computes the next, this one is looked at."""
    before = None
    for found in every:
        if before is not None:
            yield before
        before = found
    if before is not None:
        yield before


def images_at_once(network: Network, aims: int) -> int:
    """How many images are followed at once, each towards so many classes."""
    return max(attack.lanes_at_once(network) // aims, 1)


class _Images(eqx.Module):
    """Images on the device; arrays with a leading axis."""

    centre: Any
    least: Any
    most: Any
    labels: Any
    places: Any


@eqx.filter_jit
def _starts(images: _Images, key, some, aims: int, turn):
    """Starting points (some * aims, entries)."""

    def one(image, aim):
        low, high = images.least[image], images.most[image]
        mine = key
        for number in (images.places[image], turn, aim):
            mine = jax.random.fold_in(mine, number)
        share = jax.random.uniform(mine, low.shape, low.dtype)
        corner = jnp.where(share < 0.5, low, high)
        inside = low + share * (high - low)
        other = jnp.where(turn == 1, corner, jnp.clip(inside, low, high))
        return jnp.where(turn == 0, images.centre[image], other)

    every = jnp.arange(aims)
    found = jax.vmap(lambda image: jax.vmap(lambda aim: one(image, aim))(every))(jnp.asarray(some))
    return found.reshape(-1, found.shape[-1])


@eqx.filter_jit
def _goals(images: _Images, some, aims, classes: int) -> attack.Targets:
    """What lanes aim at, image by image."""
    lanes = jnp.repeat(jnp.asarray(some), aims.shape[1])
    labels = jax.nn.one_hot(images.labels[lanes], classes)
    others = jax.nn.one_hot(aims.reshape(-1), classes)
    return attack.Targets(
        images.least[lanes],
        images.most[lanes],
        (labels - others)[:, None],
        jnp.zeros((len(lanes), 1)),
        jnp.ones((len(lanes), 1), bool),
    )


@eqx.filter_jit
def _best(points, margins, aims: int):
    """The best few of each image's lanes."""
    points = points.reshape(-1, aims, points.shape[-1])
    margins = margins.reshape(-1, aims)
    margins = jnp.where(jnp.isfinite(margins), margins, jnp.inf)
    order = jnp.argsort(margins, axis=1, stable=True)[:, :REPLAYED]
    chosen = jnp.take_along_axis(points, order[..., None], axis=1)
    return jnp.take_along_axis(margins, order, axis=1), chosen[:, 0], chosen[:, 1:]
