"""The HTML report of a robustness run."""

from pathlib import Path

from stagecert.sweeps import Store
from stagecert.sweeps.report import About, Entry, write_report

STATUSES = ("certified", "attacked", "misclassified", "unknown", "error")


def report_of_robust(
    store: Store, keys: set[str], path: Path, *, command: str = "", name: str = ""
) -> None:
    """Writes the report of the images with these keys.

    Args:
        store: where their rows are.
        keys: of all images that were asked for.
        path: of the report.
        command: what started the run.
        name: of the model.
    """
    how = store.configuration
    eps = how["eps"]
    about = About(
        title=f"Robustness: {name}" if name else "Robustness",
        lead=(
            f"Whether pixels that move by up to {eps} change the class of an image: certified "
            "(proven that they do not), attacked (an input that does is known), misclassified "
            "without any change, or unknown."
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
            )
