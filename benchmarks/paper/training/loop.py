"""The training loop: batches, schedules, checkpoints.

Everything that is random follows from the seed and the number of the step, so a run that was
stopped and goes on from its checkpoint ends with the same weights as one that was not.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from benchmarks.data import read_images
from benchmarks.paper.training import losses, model
from benchmarks.paper.training.architectures import parse
from stagecert.files import written_whole


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a network is trained.

    Attributes:
        architecture: "tiny", "small", "medium", or layers as in `architectures`.
        activation: "relu" or "softplus".
        training: "adv" (attacked images), "ibp" (interval bounds) or "plain".
        eps: radius of the attack, for images in [0, 1].
        steps, batch: how many updates, and of how many images each.
        rate: Adam's step, divided by 10 after 70 % and again after 90 % of the steps.
        warm_up, ramp: for "ibp": shares of the steps with radius 0, and while the radius then grows
            to eps and kappa falls from 1 to its last value.
        kappa: for "ibp": the last weight of the loss on the images themselves.
        attack_steps: for "adv", and for measuring.
        augment: images are mirrored and moved by up to 1/8 of their side, at random.
        seed: of weights, order, attacks and augmentation.
    """

    architecture: str = "tiny"
    activation: str = "relu"
    training: str = "adv"
    eps: float = 8 / 255
    steps: int = 20_000
    batch: int = 128
    rate: float = 1e-3
    warm_up: float = 0.05
    ramp: float = 0.5
    kappa: float = 0.5
    attack_steps: int = 7
    augment: bool = False
    seed: int = 0

    def __post_init__(self):
        if self.activation not in model.ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(model.ACTIVATIONS)}")
        if self.training not in losses.TRAININGS:
            raise ValueError(f"training must be one of {', '.join(losses.TRAININGS)}")
        for name in ("steps", "batch", "attack_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("warm_up", "ramp", "kappa", "eps"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], not {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate must be positive, not {self.rate}")

    def schedule(self, step: int) -> tuple[float, float]:
        """(radius, kappa) at a step."""
        if self.training != "ibp":
            return self.eps, 1.0
        begin, length = self.warm_up * self.steps, max(self.ramp * self.steps, 1)
        share = min(max((step - begin) / length, 0.0), 1.0)
        return share * self.eps, 1 - share * (1 - self.kappa)


@dataclasses.dataclass(frozen=True)
class Images:
    """Images in [0, 1], batch x channels x height x width in float32, and their labels."""

    images: np.ndarray
    labels: np.ndarray

    @staticmethod
    def load(path: Path) -> "Images":
        """From an .npz with `images` (uint8, batch x height x width [x channels]) and `labels`."""
        images, labels = read_images(path)
        images = images if images.ndim == 4 else images[..., None]
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).astype(np.float32) / 255
        return Images(images, labels.astype(np.int32))


def _batches(count: int, batch: int, seed: int, step: int) -> np.ndarray:
    """The images of a step: every image once in an epoch, in an order of the epoch's own."""
    batch = min(batch, count)
    epoch, place = divmod(step, count // batch)
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return order[place * batch : (place + 1) * batch]


def _augmented(images: np.ndarray, seed: int, step: int) -> np.ndarray:
    random = np.random.default_rng([seed, step, 1])
    mirrored = random.random(len(images)) < 0.5
    images = np.where(mirrored[:, None, None, None], images[..., ::-1], images)
    far = images.shape[-1] // 8
    padded = np.pad(images, ((0, 0), (0, 0), (far, far), (far, far)))
    side = images.shape[2:]
    moves = random.integers(0, 2 * far + 1, (len(images), 2))
    return np.stack(
        [image[:, i : i + side[0], j : j + side[1]] for image, (i, j) in zip(padded, moves)]  # noqa: B905
    )


class Trainer:
    """A network in training."""

    def __init__(self, settings: Settings, data: Images):
        self.settings, self.data = settings, data
        self.classes = int(data.labels.max()) + 1
        self.layers = parse(settings.architecture, self.classes)
        self.input_shape = data.images.shape[1:]
        self.key = jax.random.key(settings.seed)
        self.parameters: Any = model.initialise(self.layers, self.input_shape, self.key)
        rates = optax.piecewise_constant_schedule(
            settings.rate, {int(0.7 * settings.steps): 0.1, int(0.9 * settings.steps): 0.1}
        )
        self.optimiser = optax.adam(rates)
        self.state: Any = self.optimiser.init(self.parameters)
        self.step = 0
        function = losses.loss(
            settings.training, self.layers, settings.activation, settings.attack_steps
        )

        @jax.jit
        def update(parameters, state, images, labels, eps, kappa, key):
            value, slopes = jax.value_and_grad(function)(
                parameters, images, labels, eps, kappa, key
            )
            changes, state = self.optimiser.update(slopes, state, parameters)
            return optax.apply_updates(parameters, changes), state, value

        self._update = update

    def begin(self, parameters) -> None:
        """Starts from given weights, [(weight, bias), ...], instead of random ones."""
        given = [tuple(np.asarray(x, np.float32) for x in pair) for pair in parameters]
        shapes = [[x.shape for x in pair] for pair in given]
        if shapes != [[x.shape for x in pair] for pair in self.parameters]:
            raise ValueError(f"the weights are not of these layers: they have shapes {shapes}")
        self.parameters = jax.tree.map(jax.numpy.asarray, given)
        self.state = self.optimiser.init(self.parameters)
        self.step = 0

    def run(
        self,
        checkpoint: Path | None = None,
        every: int = 500,
        until: int | None = None,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """Trains to the last step (or `until` a step), and writes checkpoints on the way."""
        settings = self.settings
        last = settings.steps if until is None else min(until, settings.steps)
        while self.step < last:
            some = _batches(len(self.data.labels), settings.batch, settings.seed, self.step)
            images = self.data.images[some]
            if settings.augment:
                images = _augmented(images, settings.seed, self.step)
            eps, kappa = (np.float32(x) for x in settings.schedule(self.step))
            self.parameters, self.state, value = self._update(
                self.parameters,
                self.state,
                images,
                self.data.labels[some],
                eps,
                kappa,
                jax.random.fold_in(self.key, self.step),
            )
            self.step += 1
            due = self.step % every == 0 or self.step == last
            if due and not np.isfinite(value):
                raise FloatingPointError(f"the loss is {value} at step {self.step}")
            if due and checkpoint is not None:
                self.save(checkpoint)
            if progress is not None:
                progress(self.step, value)

    def _about(self) -> dict:
        return dataclasses.asdict(self.settings) | {"images": len(self.data.labels)}

    def save(self, path: Path) -> None:
        """Writes a checkpoint, in one piece."""
        with written_whole(path) as file:
            about = json.dumps({"settings": self._about(), "step": self.step})
            file.write(about.encode() + b"\n")
            eqx.tree_serialise_leaves(file, (self.parameters, self.state))

    def restore(self, path: Path) -> None:
        """Goes on from a checkpoint of the same settings."""
        with path.open("rb") as file:
            about = json.loads(file.readline())
            for name, now in self._about().items():
                if about["settings"].get(name) != now:
                    raise ValueError(
                        f"{path} was trained with {name} = {about['settings'].get(name)!r}, not "
                        f"{now!r}: give the same settings, or another folder"
                    )
            self.parameters, self.state = eqx.tree_deserialise_leaves(
                file, (self.parameters, self.state)
            )
        self.step = about["step"]

    def measure(
        self, data: Images, batch: int = 500, attack_steps: int = 20, eps: float | None = None
    ) -> dict[str, float]:
        """Shares of images: right, right under attack, right by intervals; at `eps`, or its own."""
        settings = self.settings
        radius = np.float32(settings.eps if eps is None else eps)

        @jax.jit
        def count(parameters, images, labels, key):
            return losses.accuracies(
                self.layers, settings.activation, parameters, images, labels,
                radius, attack_steps, key,
            )  # fmt: skip

        totals: dict[str, int] = {}
        for begin in range(0, len(data.labels), batch):
            some = slice(begin, begin + batch)
            key = jax.random.fold_in(self.key, begin)
            found = count(self.parameters, data.images[some], data.labels[some], key)
            for name, value in found.items():
                totals[name] = totals.get(name, 0) + int(value)
        return {name: total / len(data.labels) for name, total in totals.items()}

    def save_onnx(self, path: Path) -> None:
        """Writes the network as it is now."""
        model.save_onnx(
            path, self.layers, self.settings.activation, self.parameters, self.input_shape
        )
