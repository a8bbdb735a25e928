"""Result files of the applications: what was measured, with what, when."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.data import ROOT
from stagecert import machine
from stagecert.files import write_whole

RESULTS = ROOT / "benchmarks" / "results" / "applications"

# For each part: the table's heading, and the function that makes it.
Tables = Mapping[str, tuple[str, Callable[[], str]]]


def load(application: str, part: str) -> dict | None:
    """What is held of a part: {"made": ..., "records": [...]}, or None."""
    path = RESULTS / f"{application}_{part}.json"
    return json.loads(path.read_text()) if path.exists() else None


def save(application: str, part: str, records: list[dict], packages: Sequence[str]) -> None:
    """Writes the records of a part, in one piece."""
    command = " ".join(["python -m benchmarks.applications", *sys.argv[1:]])
    made = {"command": command, **machine.made(packages)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_whole(
        RESULTS / f"{application}_{part}.json",
        json.dumps({"made": made, "records": records}, indent=1, allow_nan=False) + "\n",
    )


def save_tables(application: str, text: str) -> Path:
    """Writes the tables of an application."""
    path = RESULTS / f"{application}.md"
    write_whole(path, text)
    return path


def render(application: str, title: str, note: str, tables: Tables) -> str:
    """All tables of an application; those that its page of the documentation has, there too."""
    sections = [f"# {title}", "", note, ""]
    path = ROOT / "docs" / f"{application}.md"
    page = path.read_text()
    for part, (heading, make) in tables.items():
        text = f"{make()}\n\n{origin(application, part)}"
        sections += [f"## {heading}", "", text, ""]
        mark = f"<!-- {application} {part} -->"
        if mark in page:
            before, rest = page.split(mark, 1)
            after = rest.split("<!-- end -->", 1)[1]
            page = f"{before}{mark}\n\n{text}\n\n<!-- end -->{after}"
    path.write_text(page)
    return "\n".join(sections)


def table(header: Sequence, rows: Sequence[Sequence]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [header, rule, *rows])


def origin(application: str, part: str) -> str:
    """The line that says where a table comes from."""
    held = load(application, part)
    if held is None:
        return "*not measured*"
    made = held["made"]
    versions = ", ".join(f"{k} {v}" for k, v in made["versions"].items() if v)
    return (
        f"*`benchmarks/results/applications/{application}_{part}.json`, made by "
        f"`{made['command']}` on {made['date']}: {made['cpu']} (load {made['load']} at the end), "
        f"Python {made['python']}, {versions}.*"
    )
