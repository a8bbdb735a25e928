"""The HTML reports of robustness runs: on one radius, and what several of them say together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stagecert.charts import Axis, Curve, chart
from stagecert.html import Link, Page
from stagecert.robust import table
from stagecert.robust.boxes import written
from stagecert.robust.data import DataSet
from stagecert.sweeps import Store
from stagecert.sweeps.report import About, Entry, write_report

STATUSES = ("certified", "attacked", "misclassified", "unknown", "error")
# Counterexamples that are shown as pictures.
PICTURES = 12


def report_of_robust(
    store: Store,
    keys: set[str],
    path: Path,
    *,
    command: str = "",
    name: str = "",
    images: DataSet | None = None,
) -> None:
    """Writes the report of the images with these keys.

    Args:
        store: where their rows are.
        keys: of all images that were asked for.
        path: of the report.
        command: what started the run.
        name: of the model.
        images: for pictures of the counterexamples.
    """
    how = store.configuration
    eps = written(how["eps"])
    about = About(
        title=f"Robustness: {name}" if name else "Robustness",
        lead=(
            f"Whether pixels that move by up to {eps} change the class of an image: certified "
            "(proven that they do not), attacked (an input that does is known), "
            "misclassified without any change, or unknown."
        ),
        items="images",
        groups="model",
        verdicts=STATUSES,
        total=len(keys),
        bound=(
            "The bound is a proven lower bound on the margin between the label and every other "
            "class over all that the pixels may do: above zero, the image is certified."
        ),
        gap=(
            "The gap is the smallest margin that an attack found, minus the bound. The search ends "
            "once an image is decided, so it could often be smaller."
        ),
        facts=(),
        command=command,
        configuration=how,
        solved="decided",
        opening=partial(_opening, store=store, keys=keys, images=images),
        columns=("label", "predicted", "becomes", "method"),
    )
    write_report(path, about, _entries(store, keys, name or "all"))


def _entries(store: Store, keys: set[str], group: str):
    for row in store.rows():
        if row.key in keys:
            found = row.data
            yield Entry(
                name=f"image {row.place}",
                group=group,
                verdict=found["status"],
                solved=found["status"] in ("certified", "attacked", "misclassified"),
                seconds=row.seconds,
                bound=found["bound"],
                gap=found["gap"],
                note=found["note"],
                cells=tuple(found[name] for name in ("label", "predicted", "becomes", "method")),
            )


def _opening(page: Page, *, store: Store, keys: set[str], images: DataSet | None) -> None:
    """Accuracies of all and by class, and what counterexamples look like."""
    report = table.report(store, keys)
    page.heading("Accuracy")
    checked = "and the checker accepts the proof"
    proof = checked if report.configuration.get("checked", True) else "unchecked"
    page.headline(
        (f"{100 * share:.1f} %", f"{what} accuracy", f"{count} of {report.done} images: {note}")
        for share, what, count, note in (
            (report.clean_accuracy, "clean", report.correct, "classified correctly"),
            (report.attacked_accuracy, "attacked", report.correct - report.attacked,
             "correct, and no counterexample is known"),
            (report.certified_accuracy, "certified", report.certified,
             f"proven to have none, {proof}"),
        )
    )  # fmt: skip
    page.paragraph(
        f"The true accuracy against changes of up to {written(report.configuration['eps'])} "
        "lies between the certified and the attacked one."
    )
    _classes(page, store, keys)
    if images is not None:
        _counterexamples(page, store, keys, images)


def _classes(page: Page, store: Store, keys: set[str]) -> None:
    counts: dict[int, dict[str, int]] = {}
    for row in store.rows():
        if row.key in keys:
            one = counts.setdefault(
                row.data["label"], dict.fromkeys(("all", "clean", *STATUSES), 0)
            )
            one["all"] += 1
            one["clean"] += bool(row.data["correct"])
            one[row.data["status"]] += 1
    rows = []
    for label, one in sorted(counts.items()):
        shares = (one["clean"], one["clean"] - one["attacked"], one["certified"])
        rows.append(
            (label, one["all"], *(f"{100 * n / one['all']:.1f} %" for n in shares), one["unknown"])
        )
    page.heading("By class", 3)
    page.table(
        ["class", "images", "clean accuracy", "attacked accuracy", "certified accuracy",
         "undecided"],
        rows,
        sortable=True,
    )  # fmt: skip


def _counterexamples(page: Page, store: Store, keys: set[str], images: DataSet) -> None:
    shown = Shown.of(images, store.configuration)
    if shown is None:
        return
    every = [row.place for row in store.rows() if row.key in keys and row.data["attacked"]]
    if not every:
        return
    # Spread over the data set, whose beginning may be of one class.
    pick = np.unique(np.linspace(0, len(every) - 1, PICTURES).round().astype(int))
    wanted = {every[k] for k in pick}
    page.heading("Counterexamples")
    page.paragraph(
        f"{len(wanted)} of {len(every)}: the image, what was added to it (grey: nothing; white and "
        f"black: {written(store.configuration['eps'])} more and less), and the sum, which ONNX "
        "Runtime takes for another class."
    )
    for row in store.rows(blobs=True):
        if row.key in keys and row.place in wanted:
            assert row.blob is not None
            found = row.data
            page.pictures(
                zip(
                    shown.pictures(row.place, np.frombuffer(row.blob, "<f4")),
                    (f"image {row.place}: {found['predicted']}", "change",
                     f"now: {found['becomes']}"),
                    strict=True,
                )
            )  # fmt: skip


def report_of_radii(
    path: Path, runs: Sequence[table.Report], *, command: str = "", name: str = ""
) -> None:
    """Writes what runs with several radii say together: accuracies against the radius."""
    runs = sorted(runs, key=lambda one: Fraction(one.configuration["eps"]))
    radii = [float(Fraction(one.configuration["eps"])) for one in runs]
    folders = [folder_of(one.configuration["eps"]) for one in runs]
    page = Page(
        f"Robustness: {name}" if name else "Robustness",
        "Accuracies against how far every pixel may move. Each radius has a report of its own.",
    )
    page.heading("Accuracy by radius")
    curves = {
        "clean": [one.clean_accuracy for one in runs],
        "attacked": [one.attacked_accuracy for one in runs],
        "certified": [one.certified_accuracy for one in runs],
    }
    page.chart(
        chart(
            [Curve(f"{what} accuracy", radii, shares) for what, shares in curves.items()],
            Axis("how far pixels may move", ends=(0, None)),
            Axis("accuracy", ends=(0, 1), percent=True),
        ),
        "Clean, attacked and certified accuracy against the radius; the true one lies between the "
        "last two.",
    )
    page.table(
        ["radius", "images", *(f"{what} accuracy" for what in curves), "undecided", "report"],
        [
            (written(one.configuration["eps"]), one.done,
             *(f"{100 * shares[k]:.1f} %" for shares in curves.values()),
             one.unknown, Link(folders[k], f"{folders[k]}/report.html"))
            for k, one in enumerate(runs)
        ],
    )  # fmt: skip
    page.heading("What made it")
    page.code(command)
    page.facts(_common([one.configuration for one in runs]), "Configuration of all of them")
    page.write(path)


def folder_of(eps: Any) -> str:
    """The folder of one radius among several."""
    return "eps-" + written(eps).replace("/", "_")


def _common(configurations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = configurations
    return {k: v for k, v in first.items() if all(one.get(k) == v for one in others)}


# -- images as pictures ----------------------------------------------------------------------------


# Flat inputs of at least so many pixels, a square number, are shown as squares.
SQUARE = 64


@dataclass(frozen=True, eq=False)
class Shown:
    """How arrays of a data set become pictures.

    Attributes:
        data: the images.
        shape: (height, width), or (channels, height, width) with one channel or three.
        eps: how far pixels may move.
        clip: the range of pixels, or None.
        mean, std: what undoes the normalisation, for each channel.
    """

    data: DataSet
    shape: tuple[int, ...]
    eps: float
    clip: tuple[float, float] | None
    mean: np.ndarray
    std: np.ndarray

    @staticmethod
    def of(data: DataSet, configuration: Mapping[str, Any]) -> "Shown | None":
        """For a run with this configuration; None if its inputs are no pictures."""
        shape = _picture(data.images.shape[1:])
        if shape is None:
            return None
        clip = configuration["clip"]
        mean, std = (
            np.array([float(Fraction(v)) for v in configuration[name]]).reshape(-1, 1)
            for name in ("mean", "std")
        )
        return Shown(
            data,
            shape,
            float(Fraction(configuration["eps"])),
            None if clip is None else (float(Fraction(clip[0])), float(Fraction(clip[1]))),
            mean,
            std,
        )

    def pictures(self, place: int, point: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """An image, its change and the changed one.

        Args:
            place: of the image.
            point: what the model got instead, normalised.
        """
        image = self.data.images[place].astype(float)
        if self.data.images.dtype == np.uint8:
            image = image / 255
        channels = max(len(self.mean), len(self.std))
        changed = point.astype(float).reshape(channels, -1) * self.std + self.mean
        changed = changed.reshape(image.shape)
        low, high = self.clip or (image.min(), image.max())
        scale = high - low or 1.0
        change = 0.5 + 0.5 * (changed - image) / (self.eps or 1.0)
        one, other = (image - low) / scale, (changed - low) / scale
        return self._arranged(one), self._arranged(change), self._arranged(other)

    def _arranged(self, image: np.ndarray) -> np.ndarray:
        image = image.reshape(self.shape)
        if image.ndim == 2:
            return image
        return image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)


def _picture(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape as which inputs of this one are shown; None if they are no pictures."""
    if len(shape) == 3 and shape[0] in (1, 3):
        return shape
    if len(shape) == 2 and min(shape) > 1:
        return shape
    size = math.prod(shape)
    side = math.isqrt(size)
    return (side, side) if size >= SQUARE and side * side == size and max(shape) == size else None
