"""The report of a sweep: one HTML file with counts, times, bounds and what went wrong.

It needs no more memory than a few numbers for each item, however long the sweep.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagecert.charts import Axis, Curve, chart
from stagecert.html import Page
from stagecert.machine import made

# Longer lists are cut; the tables beside the report have everything.
ERRORS, SLOWEST, TABLE = 100, 10, 500
# Groups with a curve of their own, and steps of a curve.
CURVES, STEPS = 8, 200
# With fewer items than this, histograms show all of them.
MANY = 100
# Seconds: the left end of the axis of times.
SHORTEST = 1e-3
QUANTILES = (0, 0.1, 0.5, 0.9, 1)


@dataclass(frozen=True)
class Entry:
    """One item, as the report shows it.

    Attributes:
        name: of the item.
        group: which set it belongs to.
        verdict: in a word.
        solved: whether that is an answer.
        seconds: how long it took.
        bound, gap: if known.
        note: what there is to say about an item without an answer.
        wrong: whether the answer contradicts one that is known.
        cells: what the columns of `About.columns` hold.
    """

    name: str
    group: str
    verdict: str
    solved: bool
    seconds: float
    bound: float | None = None
    gap: float | None = None
    note: str | None = None
    wrong: bool = False
    cells: tuple[Any, ...] = ()


@dataclass(frozen=True)
class About:
    """What the report says besides the entries.

    Attributes:
        title, lead: the heading, and the sentence below it.
        items: what an item is called, in the plural.
        groups: what a group is called.
        verdicts: all of them, in the order of the table; "error" is one of them.
        total: how many items there are, also those that are not done.
        bound, gap: what these numbers are, in a sentence each.
        facts: further tables: (heading, {name: value}).
        command: what started the sweep.
        configuration: everything that influences the results.
        solved: what items are whose verdict is an answer.
        opening: puts on the page what comes before the verdicts.
        columns: of the table of all items, beside those that every report has.
    """

    title: str
    lead: str
    items: str
    groups: str
    verdicts: Sequence[str]
    total: int
    bound: str
    gap: str
    facts: Sequence[tuple[str, Mapping[str, Any]]]
    command: str
    configuration: Mapping[str, Any]
    solved: str = "solved"
    opening: Callable[[Page], None] | None = None
    columns: Sequence[str] = ()


def write_report(path: Path, about: About, entries: Iterable[Entry]) -> None:
    """Writes the report of a sweep, in one piece."""
    page_of(about, entries).write(path)


def page_of(about: About, entries: Iterable[Entry]) -> Page:
    """The report of a sweep."""
    held = _Held(about, entries)
    page = Page(about.title, about.lead)
    if about.opening is not None:
        about.opening(page)
    _verdicts(page, about, held)
    _times(page, about, held)
    _numbers(page, about, held)
    for heading, facts in about.facts:
        page.heading(heading)
        page.facts(facts)
    _errors(page, held)
    if held.table is not None:
        page.heading(f"All {about.items}")
        page.table(
            ["", about.groups, "name", *about.columns, "verdict", "seconds", "bound", "gap",
             "note"],
            [
                (k, e.group, e.name, *e.cells, e.verdict, e.seconds, e.bound, e.gap, e.note)
                for k, e in enumerate(held.table)
            ],
            "A click on a heading sorts by its column.",
            sortable=True,
        )  # fmt: skip
    page.heading("What made it")
    page.code(about.command)
    page.facts(made(), "Machine and versions of the process that wrote this report")
    page.facts(about.configuration, "Configuration")
    return page


class _Held:
    """What the report needs of the entries, which are looked at once."""

    def __init__(self, about: About, entries: Iterable[Entry]):
        self.counts: dict[str, dict[str, int]] = {}
        self.solved: dict[str, array] = {}
        self.seconds: dict[str, array] = {}
        self.bounds, self.gaps = array("d"), array("d")
        self.errors: list[Entry] = []
        self.wrong: list[Entry] = []
        self.error_count = self.wrong_count = self.done = 0
        table: list[Entry] | None = []
        slowest: list[tuple[float, int, Entry]] = []
        for number, one in enumerate(entries):
            self.done += 1
            counts = self.counts.setdefault(one.group, dict.fromkeys(about.verdicts, 0))
            counts[one.verdict] += 1
            self.seconds.setdefault(one.group, array("d")).append(one.seconds)
            solved = self.solved.setdefault(one.group, array("d"))
            if one.solved:
                solved.append(one.seconds)
            if one.bound is not None:
                self.bounds.append(one.bound)
            if one.gap is not None:
                self.gaps.append(one.gap)
            if one.verdict == "error":
                self.error_count += 1
                if len(self.errors) < ERRORS:
                    self.errors.append(one)
            if one.wrong:
                self.wrong_count += 1
                if len(self.wrong) < ERRORS:
                    self.wrong.append(one)
            if table is not None:
                table.append(one)
                table = table if len(table) <= TABLE else None
            heapq.heappush(slowest, (one.seconds, -number, one))
            if len(slowest) > SLOWEST:
                heapq.heappop(slowest)
        self.table = table
        self.slowest = [one for _, _, one in sorted(slowest, reverse=True)]

    @property
    def groups(self) -> list[str]:
        return list(self.counts)

    def of_all(self, held: Mapping[str, array]) -> np.ndarray:
        return np.concatenate([np.array(one) for one in held.values()] or [np.zeros(0)])


def _verdicts(page: Page, about: About, held: _Held) -> None:
    page.heading("Verdicts")
    if held.done < about.total:
        page.paragraph(f"{held.done} of {about.total} {about.items} are done.")
    rows = [(name, counts, len(held.solved[name])) for name, counts in held.counts.items()]
    if len(rows) != 1:
        counts = {v: sum(row[1][v] for row in rows) for v in about.verdicts}
        rows.append(("all", counts, sum(row[2] for row in rows)))
    page.table(
        [about.groups, *about.verdicts, "done", about.solved, f"share {about.solved}"],
        [
            (name, *counts.values(), done := sum(counts.values()), solved,
             f"{solved / max(done, 1):.1%}")
            for name, counts, solved in rows
        ],
    )  # fmt: skip
    if held.wrong:
        page.heading("Wrong answers", 3)
        page.paragraph(
            f"The known answers contradict the verdicts of these {about.items}: "
            f"{held.wrong_count} in all."
        )
        page.table(
            [about.groups, "name", "verdict"], [(e.group, e.name, e.verdict) for e in held.wrong]
        )


def _times(page: Page, about: About, held: _Held) -> None:
    page.heading("Times")
    seconds = {name: np.array(held.seconds[name]) for name in held.groups}
    if len(seconds) != 1:
        seconds["all"] = held.of_all(held.seconds)
    page.table(
        [about.groups, about.items, "median", "90 %", "longest", "sum"],
        [
            (name, len(times), *np.quantile(times, (0.5, 0.9, 1)), times.sum())
            for name, times in seconds.items()
            if len(times)
        ],
        "Seconds to decide them; the sum is over all runs and workers.",
    )
    if any(held.solved.values()):
        caption = f"How many {about.items} were {about.solved} within how many seconds each."
        page.chart(_cactus(about, held), caption)
    page.table(
        [about.groups, "name", "verdict", "seconds"],
        [(e.group, e.name, e.verdict, e.seconds) for e in held.slowest],
        f"The {about.items} that took longest",
    )


def _numbers(page: Page, about: About, held: _Held) -> None:
    if not held.bounds and not held.gaps:
        return
    page.heading("Bounds and gaps")
    rows = [
        (name, len(values), *np.quantile(np.array(values), QUANTILES))
        for name, values in (("bound", held.bounds), ("gap", held.gaps))
        if values
    ]
    page.table(["", about.items, "least", "10 %", "median", "90 %", "largest"], rows)
    page.paragraph(f"{about.bound} {about.gap}")
    for name, values in (("bound", held.bounds), ("gap", held.gaps)):
        if values:
            picture, rest = _histogram(about, name, np.array(values))
            page.chart(picture, f"How many {about.items} have which {name}{rest}.")


def _errors(page: Page, held: _Held) -> None:
    page.heading("Errors")
    if not held.errors:
        page.paragraph("None.")
        return
    first = f" The first {ERRORS} are listed." if held.error_count > ERRORS else ""
    page.paragraph(f"{held.error_count} in all.{first}")
    page.table(["", "name", "what"], [(e.group, e.name, e.note) for e in held.errors])


# -- figures ---------------------------------------------------------------------------------------


def _cactus(about: About, held: _Held) -> str:
    """Curves: how many items of each group were solved within how many seconds."""
    largest = sorted(held.groups, key=lambda name: -len(held.solved[name]))[:CURVES]
    curves = {name: np.sort(np.array(held.solved[name])) for name in held.groups if name in largest}
    if len(held.groups) > 1:
        curves["all"] = np.sort(held.of_all(held.solved))
    drawn = []
    for name, times in curves.items():
        if not len(times):
            continue
        counts = np.arange(1, len(times) + 1)
        if len(times) > STEPS:
            pick = np.unique(np.linspace(0, len(times) - 1, STEPS).round().astype(int))
            times, counts = times[pick], counts[pick]
        # What took no time that the clock could see still has a place on the axis.
        drawn.append(Curve(name, np.maximum(times, SHORTEST), counts, "steps"))
    return chart(
        drawn,
        Axis("seconds for each", log=True),
        Axis(f"{about.items} {about.solved}", whole=True, ends=(0, None)),
    )


def _histogram(about: About, name: str, values: np.ndarray) -> tuple[str, str]:
    """How many items have which bound, or gap; and what is not in the picture."""
    # A few far away must not squeeze all others into one bar.
    low, high = np.quantile(values, (0.02, 0.98) if len(values) >= MANY else (0, 1))
    within = values[(values >= low) & (values <= high)]
    heights, edges = np.histogram(within, bins=min(40, max(len(within) // 3, 5)))
    picture = chart(
        [Curve(name, edges, heights, "bars")],
        Axis(name),
        Axis(about.items, whole=True, ends=(0, None)),
        mark=0.0 if name == "bound" else None,
    )
    hidden = len(values) - len(within)
    return picture, f", without {hidden} at the ends" if hidden else ""
