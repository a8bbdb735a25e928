"""The work of a sweep over images, which can be sent to other processes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stagecert.robust.boxes import Preparation
from stagecert.robust.data import DataSet
from stagecert.robust.work import Finding, Options, Work, open_classifier
from stagecert.sweeps import Item, Row
from stagecert.verify.contents import bytes_of
from stagecert.verify.models import OpenModel


class Images:
    """Decides images; see `sweeps.Work`. The place of an item is that of its image."""

    def __init__(self, model: OpenModel, data: DataSet, how: Preparation, options: Options):
        self._model: OpenModel | bytes = model
        self._data, self._how, self._options = data, how, options

    def __getstate__(self) -> dict[str, Any]:
        # Another machine need not have the file, and sessions of ONNX Runtime cannot be sent.
        sent = self._model if isinstance(self._model, bytes) else bytes_of(self._model.contents)
        return {**self.__dict__, "_model": sent}

    def prepare(self):
        """Loads the model, unless it is there."""
        if isinstance(self._model, bytes):
            self._model = open_classifier(self._model)
        work = Work(self._model, self._data, self._how, self._options)

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
