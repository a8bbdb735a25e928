"""All activations by name."""

import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks.activations.broken import STEPS, BrokenLine, RevertingSoftplus
from stagecert.networks.activations.domains import DOMAINS
from stagecert.networks.activations.kinked import Abs, Clip, HardSigmoid, LeakyRelu, PRelu, Relu
from stagecert.networks.activations.smooth import (
    MINIMA,
    PROFILES,
    RANGES,
    ROOMS,
    Exponential,
    HardSwish,
    Power,
    Smooth,
    celu_numbers,
    elu_numbers,
    selu_numbers,
)
from stagecert.networks.activations.wedges import AbstractActivation

REGISTERED: dict[str, AbstractActivation] = {
    "relu": Relu(),
    "leaky_relu": LeakyRelu(),
    "prelu": PRelu(),
    "abs": Abs(),
    "clip": Clip(),
    "hard_sigmoid": HardSigmoid(),
    "hard_swish": HardSwish(),
    "broken_line": BrokenLine(),
    "reverting_softplus": RevertingSoftplus(),
    "elu": Exponential(elu_numbers),
    "selu": Exponential(selu_numbers),
    "celu": Exponential(celu_numbers),
    "power": Power(),
    **DOMAINS,
    **STEPS,
    **{
        kind: Smooth(
            profile, MINIMA.get(kind), RANGES.get(kind, (-np.inf, np.inf)), ROOMS.get(kind, 0)
        )
        for kind, profile in PROFILES.items()
    },
}


def find(kind: str) -> AbstractActivation:
    """The activation that is registered under a name."""
    if kind not in REGISTERED:
        raise ProblemError(f"Unknown activation '{kind}'; known are {', '.join(REGISTERED)}.")
    return REGISTERED[kind]
