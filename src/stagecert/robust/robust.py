"""`robust`: for each image of a data set, whether small changes of its pixels change the class."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from stagecert import __version__, sweeps
from stagecert.errors import ProblemError
from stagecert.robust import table
from stagecert.robust.boxes import Preparation
from stagecert.robust.data import DataSet, data_set, number
from stagecert.robust.work import (
    METHODS,
    Finding,
    Options,
    Work,
    largest_batch,
    memory_or_default,
    must_be_covered,
    open_classifier,
)
from stagecert.sweeps import Item, Row, Store
from stagecert.sweeps.sweep import Campaign
from stagecert.sweeps.tables import Format, check_format
from stagecert.verify.contents import bytes_of
from stagecert.verify.models import OpenModel


def robust(
    model,
    images,
    labels,
    eps,
    *,
    out: str | Path | None = None,
    clip: Sequence | None = (0, 1),
    mean: Any = 0,
    std: Any = 1,
    method: str = "nonconvex",
    time_limit: float = 10.0,
    check: bool = True,
    restarts: int = 4,
    seed: int = 0,
    limit: int | None = None,
    batch: int | None = None,
    memory: float | None = None,
    format: Format = "csv",
    engine: sweeps.Engine | None = None,
    progress: Callable[[list[Row]], None] | None = None,
) -> table.Report:
    """Clean, attacked and certified accuracy of a classifier, with a row for each image.

    Args:
        model: an ONNX model: a path (.onnx or .onnx.gz) or bytes. One input, one output a class.
        images: (count, ...): floating-point numbers, or uint8, which is divided by 255. Channels
            may come last. Pictures without colours may have any shape.
        labels: (count,): the right classes.
        eps: how far every pixel may move, before normalisation. '8/255' and Fraction(8, 255) are
            that number exactly, a float is what it is.
        out: a folder for the results. Whatever it has already, from a run with the same arguments
            that was interrupted, is not computed again. None keeps nothing.
        clip: the range of pixels, which cuts the boxes; None if there is none.
        mean, std: the network gets (pixel - mean) / std: a number, or one for each channel.
        method: the last method to be tried: "ibp", "backward", "nonconvex" or "optimised"; or
            "complete", which after "backward" splits inputs or neurons, image by image, until
            there is an answer or time is up.
        time_limit: seconds an image for "complete", the check included; a pass that is under way
            is finished.
        check: certify an image only once the independent checker has accepted the proof. Without,
            "certified" rests on the bounds alone.
        restarts: how many points the attack starts from, for each of up to nine other classes.
        seed: for those points.
        limit: take the first images only.
        batch: how many images are computed together; by default as many as fit into the memory,
            and at most 128; 4096 on accelerators.
        memory: GiB that arrays may take. None is 1 GiB on CPUs, and half of what the device lends
            elsewhere.
        format: of the table in `out`: "csv", or "parquet" with the extra stagecert[parquet].
        engine: what computes: `sweeps.InProcess()` (the default), `sweeps.Processes(workers)` or
            `sweeps.Ray(address, workers)`. The rows are the same.
        progress: called with rows that were just stored.

    Raises:
        ProblemError: bad input, before any work; or `out` belongs to other arguments.
    """
    run = Robustness(
        model, images, labels, eps, clip=clip, mean=mean, std=std, method=method,
        time_limit=time_limit, check=check, restarts=restarts, seed=seed, limit=limit, batch=batch,
        memory=memory,
    )  # fmt: skip
    check_format(format)
    if run.warning:
        warnings.warn(run.warning, stacklevel=2)
    with run.store(out) as store:
        run.run(store, progress, engine=engine)
        if out is not None:
            run.export(store, format)
        return table.report(store, run.keys, rows=True)


class Robustness(Campaign):
    """A run of `robust` in parts: what there is to do, doing it, and writing it down."""

    verdict = "status"

    def __init__(
        self,
        model,
        images,
        labels,
        eps,
        *,
        clip: Sequence | None = (0, 1),
        mean: Any = 0,
        std: Any = 1,
        method: str = "nonconvex",
        time_limit: float = 10.0,
        check: bool = True,
        restarts: int = 4,
        seed: int = 0,
        limit: int | None = None,
        batch: int | None = None,
        memory: float | None = None,
    ):
        if method not in METHODS:
            raise ProblemError(f"method must be one of {', '.join(METHODS)}, not {method!r}.")
        for name, value, least in (
            ("restarts", restarts, 1), ("seed", seed, 0), ("limit", limit, 1), ("batch", batch, 1),
        ):  # fmt: skip
            if value is not None and (not isinstance(value, int) or value < least):
                raise ProblemError(f"{name} must be at least {least}, not {value!r}.")
        if memory is not None and not 0 < memory < float("inf"):
            raise ProblemError(f"memory must be a positive number of GiB, not {memory!r}.")
        if not 0 < time_limit < float("inf"):
            raise ProblemError(f"time_limit must be a positive number of s, not {time_limit!r}.")
        how = Preparation(
            number(eps, "eps"), _range(clip), _numbers(mean, "mean"), _numbers(std, "std")
        )
        if not isinstance(model, bytes):
            model = Path(model)
        try:
            self.model = opened = open_classifier(model)
        except ProblemError as error:
            if isinstance(model, bytes) or str(model) in str(error):
                raise
            raise ProblemError(f"{model}: {error}") from None
        if check:
            must_be_covered(opened)
        data = data_set(images, labels, opened.shape, opened.network.output_size)
        how.check(data.images)
        # What the caller is to be told, though the run goes on.
        self.warning = how.warning(data.images)
        self.notice = None
        if opened.dropped is not None:
            self.notice = (
                f"The model ends in {opened.dropped}, which keeps the order of classes: it is "
                "left out, and margins and bounds are about the logits."
            )
        self.batch = batch or largest_batch(opened.network, memory_or_default(memory))
        count = min(len(data), limit or len(data))
        self.items = [Item(place, _key(place, data)) for place in range(count)]
        self.keys = {item.key for item in self.items}
        self.configuration = {
            "task": "robust",
            "stagecert": __version__,
            "model": opened.digest,
            "without": opened.dropped,
            "eps": str(how.eps),
            "norm": "inf",
            "clip": None if how.clip is None else [str(v) for v in how.clip],
            "mean": [str(v) for v in how.mean],
            "std": [str(v) for v in how.std],
            "method": method,
            "time_limit": time_limit if method == "complete" else None,
            "checked": check,
            "restarts": restarts,
            "seed": seed,
            "batch": self.batch,
            "memory": memory,
        }
        self.data = DataSet(data.images[:count], data.labels[:count])
        options = Options(method, check, restarts, seed, memory, self.batch, time_limit)
        self.work = Images(opened, self.data, how, options)

    def export(self, store: Store, format: str = "csv") -> table.Report:
        """Writes the files into the store's folder."""
        assert store.folder is not None
        return table.export(store, self.keys, store.folder, self.model.shape, format)


def _key(place: int, data) -> str:
    """Identifies an image with its label; the place tells equal ones apart."""
    image = data.images[place]
    content = hashlib.sha256(f"{place} {data.labels[place]} {image.dtype} {image.shape} ".encode())
    content.update(image.tobytes())
    return content.hexdigest()[:32]


def _range(clip) -> tuple[Fraction, Fraction] | None:
    if clip is None:
        return None
    try:
        low, high = clip
    except (TypeError, ValueError):
        raise ProblemError(f"clip must be a range LOW,HIGH, not {clip!r}.") from None
    return number(low, "clip"), number(high, "clip")


def _numbers(values, name: str) -> tuple[Fraction, ...]:
    several = values if isinstance(values, (list, tuple)) else (values,)
    if not several:
        raise ProblemError(f"{name} is empty.")
    return tuple(number(value, name) for value in several)


# -- the work, as other processes get it -----------------------------------------------------------


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
