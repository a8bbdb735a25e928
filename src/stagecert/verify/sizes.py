"""How much memory a verification needs, known before it starts."""

import math

import jax
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks import Network
from stagecert.networks.operations import Activation, Joint

# Bytes for each entry of an activation in one row of a pass back, with what the search holds; for
# each entry of any value, in double precision forwards and in single precision by the attack; and
# for each weight, in both.
OF_NEURON, OF_VALUE, OF_WEIGHT = 256, 24, 16


def values_of(network: Network) -> int:
    """Entries of all values on the way from the inputs to the outputs."""
    return sum(math.prod(node.shape) for node in network.nodes)


def needed(network: Network) -> float:
    """GiB that the arrays of one box and one row take, about."""
    neurons = sum(
        math.prod(node.shape)
        for node in network.nodes
        if isinstance(node.operation, (Activation, Joint))
    )
    weights = sum(np.size(x) for x in jax.tree.leaves(network))
    return (OF_NEURON * neurons + OF_VALUE * values_of(network) + OF_WEIGHT * weights) / 2**30


def check_memory(network: Network, memory: float) -> None:
    """Stops a verification that cannot fit into so many GiB, before it takes any of them."""
    if not 0 < memory < math.inf:
        raise ProblemError(f"memory must be a positive number of GiB, not {memory!r}.")
    wanted = needed(network)
    if wanted > memory:
        raise ProblemError(
            f"The network has {values_of(network):,} values on the way to its outputs: verifying "
            f"it takes about {wanted:.2g} GiB, but {memory:g} GiB are allowed. Allow more with "
            f"--memory {math.ceil(wanted)} (memory={math.ceil(wanted)} in Python)."
        )
