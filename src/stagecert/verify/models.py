"""Models that are read once and asked about many properties."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnx.inliner

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.networks import Network
from stagecert.networks.operations import Activation, Joint
from stagecert.verify.contents import bytes_of, contents_of, in_one_piece
from stagecert.verify.runtime import RUNTIME, Session
from stagecert_check import external, graph, joining, stating
from stagecert_check.numbers import Arithmetic
from stagecert_check.properties import Property


class OpenModel:
    """A model twice: as the network that is bounded, and as the file that ONNX Runtime runs.

    `verify` takes it instead of the file.

    >>> from importlib.resources import files
    >>> model = OpenModel(files("stagecert") / "digits" / "digits.onnx")
    >>> model.network.output_size
    10
    """

    def __init__(self, source, *, logits: bool = False):
        """Reads a model: a path (.onnx or .onnx.gz), bytes, or an onnx.ModelProto.

        Several networks, [("f", path), ("g", path)], become one that has all inputs and outputs.
        With `logits`, a last Softmax or LogSoftmax is left out of `network`, `session` and
        `program`: `dropped` is its name. `contents` are the files as they are.
        """
        RUNTIME.start()  # it imports ONNX Runtime in the meantime
        self.source: Any = Path(source) if isinstance(source, str) else source
        self.given: Any = self.source
        self.several = joining.named(source)
        self.dropped: str | None = None
        self.untied: OpenModel | None = None
        self.places: np.ndarray | None = None
        if self.several is not None:
            self.source = self.contents.data
        # The order of the outputs of several networks is another matter.
        if logits and self.several is None and (shorter := without_softmax(self.contents)):
            self.program, self.source = shorter
            self.dropped = self.program.without
        self.network = networks.load(self.source)

    def stating(self, property: Property) -> tuple["OpenModel", Property]:
        """The model and the property in terms of inputs and outputs alone; see `stating`.

        Where inputs that are equal become one, the model as it was is `untied`, and `places` says
        which of the inputs that are left each of its own is.
        """
        contents, wanted = stating.stated(self.contents, property)
        larger = self if contents is self.contents else self._changed(contents)
        smaller, tied = stating.tied(contents, wanted)
        if smaller is contents:
            return larger, wanted
        found = self._changed(smaller)
        found.untied, found.places = larger, stating.places_of(wanted)
        return found, tied

    def _changed(self, contents: external.Model) -> "OpenModel":
        found = OpenModel(bytes_of(contents))
        found.several, found.contents = self.several, contents
        return found

    @cached_property
    def session(self) -> Session:
        """The model in ONNX Runtime."""
        return Session(self.source)

    @cached_property
    def replayed(self) -> Session:
        """The model as it was given, in ONNX Runtime."""
        if self.untied is not None:
            return self.untied.replayed
        return self.session if self.dropped is None else Session(self.given)

    @cached_property
    def for_comparing(self) -> "OpenModel":
        """The model without a last Softmax, for properties that compare outputs with each other."""
        if self.dropped is not None or self.several is not None:
            return self
        shorter = OpenModel(self.source, logits=True) if ends_in_softmax(self.contents) else self
        return self if shorter.dropped is None else shorter

    @cached_property
    def contents(self) -> external.Model:
        """What the files of the model hold, as the checker reads them."""
        return contents_of(self.given)

    @cached_property
    def digest(self) -> str:
        """Identifies the model by the content of its files."""
        return self.contents.digest

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input, as users give it, of a model that has one."""
        return tuple(self.network.input_shape)  # type: ignore

    def run(self, points: np.ndarray) -> np.ndarray:
        """What ONNX Runtime computes for inputs, one by one: (points, outputs)."""
        return self.session.run(points.reshape(len(points), -1))

    @cached_property
    def program(self) -> graph.Program:
        """The model as the checker reads it; it raises `stagecert_check.functions.Refused`."""
        return graph.read(self.contents.data, Arithmetic(), self.contents.files)


def opened(model, wanted: Property) -> OpenModel:
    """The model as a property is decided on it; it is read unless it has been already."""
    if not isinstance(model, OpenModel):
        return OpenModel(model, logits=wanted.compares)
    return model.for_comparing if wanted.compares else model


# -- without a last Softmax ------------------------------------------------------------------------


_LAST = ("Softmax", "LogSoftmax")


def without_softmax(contents: external.Model) -> tuple[graph.Program, bytes] | None:
    """A model without the Softmax or LogSoftmax of all of its outputs that it ends in.

    None if it does not end so. Both keep the order of the outputs, so that they have no influence
    on which class is the largest. Whether one may be left out is the checker's decision: it reads
    the same file, and would refuse certificates of a search that decides otherwise.

    Returns:
        The program that the checker reads, and the model that is left, with all of its weights.
    """
    if not ends_in_softmax(contents):
        return None
    try:
        program = graph.read(contents.data, Arithmetic(), contents.files, ordered=True)
    except Exception:
        return None  # whoever reads it next says what is wrong
    if program.without is None:
        return None
    model = in_one_piece(contents)
    # The checker has counted what functions stand for.
    model = onnx.inliner.inline_local_functions(model) if model.functions else model
    node = _last(model)
    model.graph.node.remove(node)
    model.graph.output[0].name = node.input[0]
    # Some file may declare that value as an inner one.
    for info in [v for v in model.graph.value_info if v.name == node.input[0]]:
        model.graph.value_info.remove(info)
    return program, model.SerializeToString()


def ends_in_softmax(contents: external.Model) -> bool:
    """Whether a model may be one that `without_softmax` makes shorter."""
    try:
        model = onnx.load_from_string(contents.data)
        # What the functions of a model make is only known once they are put in their places.
        last = model.functions or _last(model).op_type in _LAST
        return len(model.graph.output) == 1 and bool(last)
    except Exception:
        return False  # as above


def _last(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that makes the first output; StopIteration if there is none."""
    name = model.graph.output[0].name
    return next(node for node in model.graph.node if name in node.output)


# -- how much memory a verification needs ----------------------------------------------------------


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
