"""Tables, figures and one HTML page from the data files."""

from pathlib import Path

from benchmarks.paper import figures, plan, tables
from benchmarks.paper.methods import METHODS
from benchmarks.paper.records import Records, read
from stagecert.files import write_whole
from stagecert.html import Page

PARTS = (*tables.TABLES, *figures.FIGURES)
DOCS = Path(__file__).parents[2] / "docs"
LEAD = (
    "Lower bounds on margins of classifiers under perturbations of 8/255, on the convex relaxation "
    "of the paper (R. Bunel, O. Hinder, S. Bhojanapalli, K. Dvijotham: An efficient nonconvex "
    "reformulation of stagewise convex optimization problems, NeurIPS 2020): intervals of the "
    "arguments of activations by interval arithmetic, convex hulls of activations. Networks are of "
    "the paper's architectures with weights of our own, so bounds differ from the published ones."
)
TIMES = (
    "Times are wall times on warm code: tracing and compilation are excluded. With several workers "
    "(see the sessions below), items are computed at the same time by as many processes, each in "
    "one thread. All problems of up to 20 images are given to a method at once, and the time is "
    "divided by their number; CVXPY's solvers take one problem at a time. The published times are "
    "of other machines and other weights."
)


def render(out: Path) -> Path:
    """Writes Markdown tables, figures and the report; returns the report's path."""
    records = read(out)
    page = Page("The paper's experiments", LEAD)
    page.paragraph(TIMES)
    text = ["# The paper's experiments", "", LEAD, "", TIMES, ""]
    for part, made_of in tables.TABLES.items():
        made = [table for table in made_of(records) if table.rows]
        if not made:
            continue
        page.heading(tables.TITLES[part])
        text += [f"## {tables.TITLES[part]}", ""]
        for table in made:
            page.table(
                [_plain(name) for name in table.columns],
                [[_cell(cell) for cell in row] for row in table.rows],
                table.title,
            )
            for note in table.notes:
                page.paragraph(note)
            text += [f"### {table.title}", "", table.markdown(), ""]
    for part, drawn_of in figures.FIGURES.items():
        drawings = list(drawn_of(records))
        if drawings:
            page.heading(figures.TITLES[part])
        for drawn in drawings:
            figures.save(drawn, out / "figures")
            page.figure(drawn[1], drawn[2])
    _how(page, records)
    write_whole(out / "tables.md", "\n".join(text))
    page.write(out / "report.html")
    return out / "report.html"


def _plain(cell: str) -> str:
    """A cell without Markdown."""
    return cell.replace("*", "")


def _cell(cell: str) -> str | float:
    """A cell of the page: numbers stand on the right."""
    try:
        return float(cell)
    except ValueError:
        return _plain(cell)


def _how(page: Page, records: Records) -> None:
    page.heading("How this was made")
    if records.made:
        page.facts({k: v for k, v in records.made.items() if k not in ("sessions", "load")})
        names = ("date", "computed", "workers", "minutes", "processor_minutes", "load", "command")
        page.table(
            ["date", "items", "workers", "minutes", "processor minutes", "load at the end",
             "command"],
            [[session.get(name) for name in names] for session in records.made["sessions"]],
            "Sessions. Minutes include compilation.",
        )  # fmt: skip
    rows = []
    for run in plan.RUNS.values():
        images = {
            name: record.images
            for (name, other), record in records.of.items()
            if other == run.name and not record.refused
        }
        if images:
            counts = sorted(set(images.values()))
            stops = [_stop(run, name) for name in ("tiny_relu_adv", "tiny_relu_ibp")]
            rows.append([run.title, *stops, " or ".join(map(str, counts))])
    if rows:
        page.table(
            ["method", "stops, adversarial", "stops, interval-bound", "images"],
            rows,
            "When methods stop",
        )


def _stop(run: plan.Run, network: str) -> str:
    if run.method in ("ibp", "backward"):
        return "no search"
    if run.group == "solver":
        return "its own tolerances"
    if run.method in ("auto_lirpa", "jax_verify"):
        return "after its steps"
    stop = run.stop(network)
    words = []
    if run.target:
        words.append(f"bound of {plan.RUNS[run.target].title} passed")
    elif stop.rtol and stop.atol:
        words.append(f"gap ≤ {stop.atol:g} + {stop.rtol:g} |bound|")
    else:
        words.append(f"gap ≤ {stop.rtol:g} |bound|" if stop.rtol else f"gap ≤ {stop.atol:g}")
    own = getattr(METHODS[run.method], "limit", None)
    if run.limits:
        words.append(" or ".join(f"{k} iterations ({size})" for size, k in run.limits.items()))
    if own and set(run.limits) != set(plan.SIZES):
        words.append(f"{own} iterations" + (" (others)" if run.limits else ""))
    return " or ".join(words)


def update_page(out: Path, page: Path = DOCS / "paper.md") -> None:
    """Puts tables and figures where the page of the documentation has marks for them."""
    records, text = read(out), page.read_text()
    for make in tables.TABLES.values():
        for table in make(records):
            mark, end = f"<!-- paper {table.name} -->", "<!-- end -->"
            if mark in text:
                before, rest = text.split(mark, 1)
                after = rest.split(end, 1)[1]
                text = f"{before}{mark}\n\n{table.markdown()}\n\n{end}{after}"
    write_whole(page, text)
    for make in figures.FIGURES.values():
        for drawn in make(records):
            if f"images/paper_{drawn[0]}.png" in text:
                figures.save_png(drawn, page.parent / "images" / f"paper_{drawn[0]}.png")
