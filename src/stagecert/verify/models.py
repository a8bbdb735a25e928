"""Models that are read once and asked about many properties."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stagecert import networks
from stagecert.verify.contents import bytes_of, contents_of
from stagecert.verify.logits import without_softmax
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
        With `logits`, a last Softmax or LogSoftmax is left out: `dropped` is its name.
        """
        RUNTIME.start()  # it imports ONNX Runtime in the meantime
        self.source: Any = Path(source) if isinstance(source, str) else source
        self.several = joining.named(source)
        self.dropped: str | None = None
        if self.several is not None:
            self.source = self.contents.data
        if logits and (shorter := without_softmax(self.contents)) is not None:
            self.digest = self.contents.digest  # of the files as they are
            self.dropped, self.source = shorter
            self.contents = external.Model(self.source)
        self.network = networks.load(self.source)

    def stating(self, property: Property) -> tuple["OpenModel", Property]:
        """The model and the property in terms of inputs and outputs alone; see `stating`."""
        contents, wanted = stating.stated(self.contents, property)
        if contents is self.contents:
            return self, property
        larger = OpenModel(bytes_of(contents))
        larger.several, larger.contents = self.several, contents
        return larger, wanted

    @cached_property
    def session(self) -> Session:
        """The model in ONNX Runtime."""
        return Session(self.source)

    @cached_property
    def contents(self) -> external.Model:
        """What the files of the model hold, as the checker reads them."""
        return contents_of(self.source)

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


def opened(model) -> OpenModel:
    """The model, which is read unless it has been already."""
    return model if isinstance(model, OpenModel) else OpenModel(model)
