"""The work of a sweep over images, which can be sent to other processes."""

import gzip
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx

from stagecert.robust.boxes import Preparation
from stagecert.robust.data import DataSet
from stagecert.robust.work import Classifier, Finding, Work
from stagecert.sweeps import Item, Row


class Images:
    """Decides images; see `sweeps.Work`. The place of an item is that of its image."""

    def __init__(
        self,
        classifier: Classifier,
        model: bytes | Path,
        data: DataSet,
        how: Preparation,
        options: dict[str, Any],
    ):
        self._classifier, self._model = classifier, model
        self._data, self._how, self._options = data, how, options

    def __getstate__(self) -> dict[str, Any]:
        # Another machine need not have the file, and sessions of ONNX Runtime cannot be sent.
        return {**self.__dict__, "_classifier": None, "_model": _content(self._model)}

    def prepare(self):
        """Loads the model, unless it is there."""
        work = Work(
            self._classifier or Classifier(self._model), self._data, self._how, **self._options
        )

        def rows(items: Sequence[Item]) -> list[Row]:
            found = work([item.place for item in items])
            return [
                Row(
                    item.key,
                    item.place,
                    asdict(finding),
                    seconds,
                    None if point is None else point.astype("<f4").tobytes(),
                )
                for item, (finding, seconds, point) in zip(items, found, strict=True)
            ]

        return rows

    def failed(self, item: Item, why: str) -> Row:
        """Nothing is known but the label."""
        label = int(self._data.labels[item.place])
        return Row(item.key, item.place, asdict(Finding(label, status="error", note=why)))


def _content(model: bytes | Path) -> bytes:
    """A model in one piece, with the weights that it keeps in other files."""
    if isinstance(model, bytes):
        return model
    if model.name.endswith(".gz"):
        return gzip.decompress(model.read_bytes())
    loaded = onnx.load(model, load_external_data=False)
    if any(weights.external_data for weights in loaded.graph.initializer):
        return onnx.load(model).SerializeToString()
    return model.read_bytes()
