"""Models that are read once and asked about many properties."""

from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from stagecert import networks
from stagecert.verify.runtime import RUNTIME, Session
from stagecert_check import external, graph, joining
from stagecert_check.numbers import Arithmetic


class OpenModel:
    """A model twice: as the network that is bounded, and as the file that ONNX Runtime runs.

    `verify` takes it instead of the file.

    >>> from importlib.resources import files
    >>> model = OpenModel(files("stagecert") / "digits" / "digits.onnx")
    >>> model.network.output_size
    10
    """

    def __init__(self, source):
        """Reads a model: a path (.onnx or .onnx.gz), bytes, or an onnx.ModelProto.

        Several networks, [("f", path), ("g", path)], become one that has all inputs and outputs.
        """
        RUNTIME.start()  # it imports ONNX Runtime in the meantime
        self.source: Any = Path(source) if isinstance(source, str) else source
        self.several = joining.named(source)
        if self.several is not None:
            self.contents = joining.joint_contents(self.several)
            self.source = self.contents.data
        self.network = networks.load(self.source)

    @cached_property
    def session(self) -> Session:
        """The model in ONNX Runtime."""
        return Session(self.source)

    @cached_property
    def contents(self) -> external.Model:
        """What the files of the model hold, as the checker reads them."""
        return _contents(self.source)

    @cached_property
    def program(self) -> graph.Program:
        """The model as the checker reads it; it raises `stagecert_check.functions.Refused`."""
        return graph.read(self.contents.data, Arithmetic(), self.contents.files)


def opened(model) -> OpenModel:
    """The model, which is read unless it has been already."""
    return model if isinstance(model, OpenModel) else OpenModel(model)


def _contents(source) -> external.Model:
    if isinstance(source, onnx.ModelProto):
        return external.Model(source.SerializeToString())
    if isinstance(source, bytes):
        return external.Model(source)
    several = joining.named(source)
    if several is not None:
        return joining.joint_contents(several)
    return external.model_contents(source)


def digest_of(source) -> str:
    """Identifies a model by its content, with the weights that it keeps in other files."""
    return _contents(source).digest
