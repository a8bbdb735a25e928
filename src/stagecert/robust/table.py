"""The files that a run leaves: the table of images, their times, counterexamples, a summary."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagecert.files import write_csv, write_whole, written_whole
from stagecert.sweeps import Store
from stagecert.sweeps.tables import write_table

COLUMNS = {
    "index": int, "label": int, "predicted": int, "status": str, "correct": bool, "attacked": bool,
    "certified": bool, "checked": bool, "becomes": int, "method": str, "bound": float,
    "attack": float, "gap": float, "note": str,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Report:
    """What a run found.

    Attributes:
        images: how many were asked for.
        done: how many are decided or given up; the accuracies below are shares of these.
        correct, attacked, certified, unknown, errors: how many are classified correctly; how many
            of those have a counterexample, are proven to have none, or neither; and how many could
            not be evaluated.
        methods: how many each method certified.
        seconds: the time that these took, in all runs together.
        configuration: everything that influenced the results.
        rows: the table, one dictionary for each image; see `COLUMNS`. Empty if it was not asked
            for.
    """

    images: int
    done: int
    correct: int
    attacked: int
    certified: int
    unknown: int
    errors: int
    methods: dict[str, int]
    seconds: float
    configuration: dict[str, Any]
    rows: tuple[dict[str, Any], ...] = ()

    @property
    def clean_accuracy(self) -> float:
        """The share of images that are classified correctly."""
        return self.correct / max(self.done, 1)

    @property
    def attacked_accuracy(self) -> float:
        """The share of images classified correctly that no attack broke: robust at most."""
        return (self.correct - self.attacked) / max(self.done, 1)

    @property
    def certified_accuracy(self) -> float:
        """The share of images proven to be classified correctly on their whole box."""
        return self.certified / max(self.done, 1)

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data, the same in every run: so without the seconds."""
        return {
            "images": self.images,
            "done": self.done,
            "complete": self.done == self.images,
            "clean_accuracy": self.clean_accuracy,
            "attacked_accuracy": self.attacked_accuracy,
            "certified_accuracy": self.certified_accuracy,
            "correct": self.correct,
            "attacked": self.attacked,
            "certified": self.certified,
            "unknown": self.unknown,
            "errors": self.errors,
            "certified_by": self.methods,
            "configuration": self.configuration,
        }


def report(store: Store, keys: set[str], *, rows: bool = False) -> Report:
    """What the store says of the items with these keys."""
    count = dict.fromkeys(("correct", "attacked", "certified", "unknown", "error"), 0)
    methods: dict[str, int] = {}
    seconds, done, kept = 0.0, 0, []
    for row in store.rows():
        if row.key not in keys:
            continue
        done += 1
        seconds += row.seconds
        count["correct"] += row.data["correct"]
        if row.data["status"] in count:
            count[row.data["status"]] += 1
        if row.data["method"] is not None:
            methods[row.data["method"]] = methods.get(row.data["method"], 0) + 1
        if rows:
            kept.append({"index": row.place, **row.data})
    return Report(
        images=len(keys),
        done=done,
        correct=count["correct"],
        attacked=count["attacked"],
        certified=count["certified"],
        unknown=count["unknown"],
        errors=count["error"],
        methods=dict(sorted(methods.items())),
        seconds=seconds,
        configuration=store.configuration,
        rows=tuple(kept),
    )


def export(
    store: Store, keys: set[str], folder: Path, shape: tuple[int, ...], format: str = "csv"
) -> Report:
    """Writes all files into the folder, each whole or not at all; returns the summary."""
    table = ({"index": row.place, **row.data} for row in store.rows() if row.key in keys)
    write_table(folder / "results", COLUMNS, table, format)
    times = (
        {"index": row.place, "seconds": round(row.seconds, 6)}
        for row in store.rows()
        if row.key in keys
    )
    write_csv(folder / "times.csv", ("index", "seconds"), times)
    _write_points(folder / "counterexamples.npz", store, keys, shape)
    found = report(store, keys)
    write_whole(folder / "summary.json", json.dumps(found.to_dict(), indent=2) + "\n")
    return found


def _write_points(path: Path, store: Store, keys: set[str], shape: tuple[int, ...]) -> None:
    """The counterexamples one by one: together they may not fit into memory."""
    places = [row.place for row in store.rows() if row.key in keys and row.data["attacked"]]
    with written_whole(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        # ZipInfo has a fixed date, so that the same points give the same file.
        with archive.open(zipfile.ZipInfo("index.npy"), "w") as part:
            np.lib.format.write_array(part, np.array(places, np.int64))
        with archive.open(zipfile.ZipInfo("inputs.npy"), "w", force_zip64=True) as part:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(places), *shape)}
            np.lib.format.write_array_header_2_0(part, header)  # type: ignore
            for row in store.rows(blobs=True):
                if row.key in keys and row.data["attacked"]:
                    part.write(row.blob)  # type: ignore
