"""What `bound` returns, and how its numbers are read."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.codes import contradicts
from stagecert.errors import ProblemError
from stagecert.html import table
from stagecert.networks.graph import Network
from stagecert.problem import as_arrays
from stagecert.solution import Status

_SHOWN = 10  # problems that a notebook shows


@dataclass(frozen=True)
class Bounds:
    """Bounds on the minimum of every objective over every box.

    Attributes:
        bound: certified lower bounds, (batch, targets); they hold in real arithmetic.
        value: upper bounds on what the relaxation can prove: the objective at a feasible point of
            it. No method on the same relaxation can prove more than `value`.
        gap: value - bound.
        status: why each search ended, an array of Status.
        inputs: the input that belongs to `value`, (batch, targets, *input_shape).
        passes: how many passes over the network, forwards or backwards, each problem took.
        intermediate: (low, high) of every activation's argument, each (batch, *shape).
        network, objectives: what was asked.

    On a GPU, `inputs` and `intermediate` may stay there until they are first read.
    """

    bound: np.ndarray
    value: np.ndarray
    status: np.ndarray
    passes: np.ndarray
    network: Network
    objectives: np.ndarray
    given_inputs: Any  # as below, or a function that fetches them
    given_intermediate: Any

    @property
    def inputs(self) -> Any:
        """The input that belongs to each value."""
        return self._fetched("given_inputs")

    @property
    def intermediate(self) -> Any:
        """The intervals of the activations' arguments: ((low, high), ...)."""
        return self._fetched("given_intermediate")

    def _fetched(self, name: str) -> Any:
        given = getattr(self, name)
        if callable(given):
            given = given()
            object.__setattr__(self, name, given)  # the device's memory is free again
        return given

    def __getstate__(self) -> dict:
        # Arrays of JAX may be read in single precision by whoever unpickles them.
        return {**self.__dict__, "given_inputs": self.inputs,
                "given_intermediate": self.intermediate}  # fmt: skip

    @property
    def attained(self) -> np.ndarray:
        """The objectives of the network itself at `inputs`: upper bounds on the true minima."""
        return attained(self.network, self.objectives, self.inputs)

    @property
    def gap(self) -> np.ndarray:
        """value - bound."""
        return self.value - self.bound

    def __repr__(self) -> str:
        batch, targets = self.bound.shape
        return f"Bounds({batch} boxes x {targets} objectives, largest gap {self.gap.max():.3g})"

    def _repr_html_(self) -> str:
        """What notebooks show: the first few problems."""
        shown = list(np.ndindex(self.bound.shape))[:_SHOWN]
        names = {at: status.name for at, status in np.ndenumerate(self.status)}
        rows = [(*at, self.bound[at], self.value[at], self.gap[at], names[at]) for at in shown]
        more = self.bound.size - len(shown)
        title = repr(self) + (f"; the first {len(shown)} of {self.bound.size}" if more else "")
        return table(["box", "objective", "bound", "value", "gap", "status"], rows, title)


def margins(labels, classes: int) -> np.ndarray:
    """Objectives "true class minus every other class": (batch, classes - 1, classes).

    The classifier is right on all of a box if all of these are positive there.

    >>> margins([1], 3).tolist()
    [[[-1.0, 1.0, 0.0], [0.0, 1.0, -1.0]]]
    """
    labels = np.atleast_1d(np.asarray(labels))
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ProblemError("margins: labels must be whole numbers, one for each box.")
    if classes < 2 or labels.min(initial=0) < 0 or labels.max(initial=0) >= classes:
        raise ProblemError(f"margins: labels must lie in 0 .. {classes - 1}.")
    others = np.array([[k for k in range(classes) if k != label] for label in labels])
    rows = np.zeros((len(labels), classes - 1, classes))
    rows[np.arange(len(labels))[:, None], np.arange(classes - 1)[None], others] = -1
    rows[np.arange(len(labels)), :, labels] = 1
    return rows


@eqx.filter_jit
def _outputs(network: Network, inputs: tuple):
    network = as_arrays(network, jnp.float64)

    def one(*point):
        shaped = (x.reshape(s) for x, s in zip(point, network.input_shapes, strict=True))
        return network.flat_outputs(*shaped)

    return jax.vmap(jax.vmap(one))(*inputs)


def attained(network: Network, objectives, inputs) -> np.ndarray:
    """Objectives (batch, targets, outputs) at inputs (batch, targets, *shape), in float64."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with jax.enable_x64(True):
        outputs = _outputs(network, tuple(jnp.asarray(x, jnp.float64) for x in inputs))
    with np.errstate(invalid="ignore"):  # where the network itself overflows
        return np.sum(objectives * np.asarray(outputs), axis=-1)


def unhidden(network: Network, inputs):
    """Arrays in the users' shapes: a hidden batch axis is taken out."""
    several = isinstance(inputs, tuple)
    arrays = inputs if several else (inputs,)
    shown = tuple(
        x[:, :, 0] if hidden else x for x, hidden in zip(arrays, network.hidden_axis, strict=True)
    )
    return shown if several else shown[0]


def joined(results: list[Bounds], count: int) -> Bounds:
    """The results of chunks as one; of the last one, only what was asked for."""
    if len(results) == 1 and len(results[0].bound) == count:
        return results[0]

    def join(*parts):
        return np.concatenate(parts)[:count]

    first = results[0]
    names = [name for name in first.__dataclass_fields__ if name != "network"]
    joined = {name: jax.tree.map(join, *(getattr(r, name) for r in results)) for name in names}
    return Bounds(**joined, network=first.network)


def closed(value, bound, limits: dict) -> np.ndarray:
    """Where the gap is as small as was asked for."""
    with np.errstate(invalid="ignore"):
        small = value - bound <= limits["atol"] + limits["rtol"] * np.abs(bound)
    return np.isfinite(value) & np.isfinite(bound) & small


def judged(value, bound, goal, limits: dict | None, otherwise, certain: bool = True) -> np.ndarray:
    """Statuses by these numbers; `otherwise` where they are not what was asked for.

    Args:
        value, bound: of every problem.
        goal: bounds above it, and values that are not, end a problem; None if there is none.
        limits: on the gap; None if none was asked for.
        otherwise: statuses.
        certain: values are as exact as bounds, so that a bound above one contradicts it. Those of a
            network are rounded by more, where it is deep.
    """
    status = otherwise.copy()
    if limits is not None:
        status[closed(value, bound, limits)] = Status.GAP_REACHED
    if goal is not None:
        status[value <= goal] = Status.TARGET_MET
        status[bound > goal] = Status.TARGET_PROVEN
    if certain:
        status[contradictory(value, bound)] = Status.CONTRADICTED
    return status


def contradictory(value, bound) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        wrong = contradicts(value, bound, np.finfo(float).eps)
    return np.isfinite(value) & np.isfinite(bound) & wrong
