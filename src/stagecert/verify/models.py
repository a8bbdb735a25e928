"""Models that are read once and asked about many properties."""

import gzip
import hashlib
from functools import cached_property
from pathlib import Path

import onnx

from stagecert import networks
from stagecert.rigor import graph
from stagecert.rigor.numbers import Arithmetic
from stagecert.verify.runtime import RUNTIME, Session


class OpenModel:
    """A model twice: as the network that is bounded, and as the file that ONNX Runtime runs.

    `verify` takes it instead of the file.

    >>> from importlib.resources import files
    >>> model = OpenModel(files("stagecert") / "digits" / "digits.onnx")
    >>> model.network.output_size
    10
    """

    def __init__(self, source):
        """Reads a model: a path (.onnx or .onnx.gz), bytes, or an onnx.ModelProto."""
        RUNTIME.start()  # it imports ONNX Runtime in the meantime
        self.source = Path(source) if isinstance(source, str) else source
        self.network = networks.load(self.source)

    @cached_property
    def session(self) -> Session:
        """The model in ONNX Runtime."""
        return Session(self.source)

    @cached_property
    def _contents(self) -> bytes:
        if isinstance(self.source, onnx.ModelProto):
            return self.source.SerializeToString()
        data = self.source if isinstance(self.source, bytes) else self.source.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data

    @cached_property
    def program(self) -> graph.Program:
        """The model as the checker reads it; it raises `rigor.functions.Refused`."""
        return graph.read(self._contents, Arithmetic())

    @cached_property
    def digest(self) -> str:
        """What a certificate says of the model's file."""
        return hashlib.sha256(self._contents).hexdigest()


def opened(model) -> OpenModel:
    """The model, which is read unless it has been already."""
    return model if isinstance(model, OpenModel) else OpenModel(model)


def content_hash(path: Path) -> str:
    """Identifies a model's file by its content, with the weights that it keeps in other files."""
    content = hashlib.sha256(path.read_bytes())
    if not path.name.endswith(".gz"):
        try:
            weights = onnx.load(path, load_external_data=False).graph.initializer
        except Exception:  # no model: whoever opens it says what is wrong
            return content.hexdigest()
        places = {e.value for w in weights for e in w.external_data if e.key == "location"}
        for place in sorted(places):
            content.update((path.parent / place).read_bytes())
    return content.hexdigest()
