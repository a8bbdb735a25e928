"""Reports as one HTML file each, which needs no network, no server and no other file.

Whatever is given as text is shown as that text: nothing in it is read as HTML. Charts are SVG,
pictures PNG, and both are part of the page.
"""

import base64
import io
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stagecert.files import write_whole

# Texts of up to so many characters are not broken into lines in a table: on a narrow screen a table
# scrolls sideways, and is easier to read than one whose every word is on a line of its own.
_SHORT = 32

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --quiet: #767676; --shade: #8881; }
@media (prefers-color-scheme: dark) { :root { --quiet: #a0a0a0; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .6rem; }
nav { border-left: 3px solid var(--line); padding-left: 1rem; }
nav a { display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
caption, figcaption { color: var(--quiet); text-align: left; padding: .2rem 0; }
caption span { display: block; width: max-content; max-width: min(60rem, calc(100vw - 2rem)); }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; white-space: nowrap; }
tbody tr { border-bottom: 1px solid var(--line); }
.number { text-align: right; }
.number, .short { white-space: nowrap; }
.plain td + td { overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  thead th, thead th.number { white-space: normal; }
  table { font-size: .85rem; }
  th, td { padding-right: .5rem; }
  svg.chart text { font-size: 15px; }
}
figure { margin: 1rem 0; }
figure svg { max-width: 100%; height: auto; background: white; }
figure svg.chart { background: none; }
.headline { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1.2rem 0; }
.headline div { min-width: 9rem; max-width: 16rem; }
.headline b { display: block; font-size: 2.2rem; line-height: 1.1; }
.headline span { display: block; color: var(--quiet); }
.pictures { display: inline-flex; gap: .6rem; margin: .8rem 2rem 1rem 0; }
.pictures figure { margin: 0; }
.pictures figcaption { font-size: .85rem; white-space: nowrap; }
.pictures img { width: 7rem; max-width: 100%; image-rendering: pixelated; display: block;
  border: 1px solid var(--line); }
.sortable th { cursor: pointer; }
.sortable th[aria-sort=ascending]::after { content: " \\2191"; }
.sortable th[aria-sort=descending]::after { content: " \\2193"; }
pre { background: var(--shade); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""

# Sorts a table by the column whose heading is clicked: numbers as numbers, empty cells last.
_SORT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    head.tabIndex = 0;
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map(row => [row.cells[at].textContent, row]);
      rows.sort(([a], [b]) => {
        if (a === "" || b === "") return (a === "") - (b === "");
        const order = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  });
}
"""


class Link(NamedTuple):
    """A cell of a table that leads to another file beside the page."""

    text: str
    address: str


class Page:
    """An HTML page that is put together from the top to the bottom.

    >>> page = Page("Sweep")
    >>> page.heading("Verdicts")
    >>> page.table(["verdict", "instances"], [["unsat", 12], ["sat", 3]])
    >>> "<td class='number'>12</td>" in str(page)
    True
    """

    def __init__(self, title: str, lead: str = ""):
        self.title = title
        self._lead = lead
        self._body: list[str] = []
        self._contents: list[tuple[str, str]] = []
        self._figures = 0
        self._sorts = False

    def heading(self, text: str, level: int = 2) -> None:
        """A heading; those of level 2 are listed at the top of the page."""
        name = f"{len(self._contents) + 1}-" + re.sub(r"\W+", "-", text.lower()).strip("-")
        if level == 2:
            self._contents.append((name, text))
        self._body.append(f"<h{level} id='{name}'>{escape(text)}</h{level}>")

    def paragraph(self, text: str) -> None:
        """Running text."""
        self._body.append(f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        """Text as it would be typed: a command."""
        self._body.append(f"<pre><code>{escape(text)}</code></pre>")

    def headline(self, numbers: Iterable[tuple[str, str, str]]) -> None:
        """The numbers that matter most, in large type: (number, what it is, a note)."""
        parts = "".join(
            f"<div><b>{escape(number)}</b>{escape(name)}<span>{escape(note)}</span></div>"
            for number, name, note in numbers
        )
        self._body.append(f"<div class='headline'>{parts}</div>")

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        caption: str = "",
        *,
        sortable: bool = False,
        plain: bool = False,
    ) -> None:
        """A table. Numbers stand on the right, unless it is plain; None is an empty cell.

        A sortable one is sorted by the column whose heading is clicked.
        """
        self._sorts |= sortable
        kind = " class='sortable'" if sortable else " class='plain'" if plain else ""
        made = table(columns, rows, caption, kind=kind, plain=plain)
        self._body.append(f"<div class='wide'>{made}</div>")

    def facts(self, facts: Mapping[str, Any], caption: str = "") -> None:
        """Names and values, one a line; entries of mappings within are listed one by one."""
        rows = []
        for name, value in facts.items():
            inner = value.items() if isinstance(value, Mapping) else [("", value)]
            rows.extend((f"{name} {key}".strip(), _fact(entry)) for key, entry in inner)
        self.table(["", ""], rows, caption, plain=True)

    def figure(self, figure: Any, caption: str) -> None:
        """A matplotlib figure; the caption also tells those who cannot see it what it shows."""
        self._figures += 1
        picture = _svg(figure, f"figure{self._figures}")
        picture = picture.replace("<svg", f"<svg role='img' aria-label='{escape(caption)}'", 1)
        self._body.append(f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>")

    def chart(self, svg: str, caption: str) -> None:
        """What `stagecert.charts.chart` drew."""
        svg = svg.replace("<svg", f"<svg role='img' aria-label='{escape(caption)}'", 1)
        self._body.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")

    def pictures(self, pictures: Iterable[tuple[np.ndarray, str]]) -> None:
        """Pictures beside each other, (pixels, caption); for the pixels see `pictures.png`."""
        parts = "".join(
            f"<figure><img alt='{escape(caption)}' "
            f"src='data:image/png;base64,{base64.b64encode(png(pixels)).decode()}'>"
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for pixels, caption in pictures
        )
        self._body.append(f"<div class='pictures'>{parts}</div>")

    def __str__(self) -> str:
        links = "".join(f"<a href='#{name}'>{escape(text)}</a>" for name, text in self._contents)
        return "\n".join(
            [
                "<!DOCTYPE html>",
                "<html lang='en'>",
                "<head>",
                "<meta charset='utf-8'>",
                "<meta name='viewport' content='width=device-width, initial-scale=1'>",
                f"<title>{escape(self.title)}</title>",
                f"<style>{_STYLE}</style>",
                "</head>",
                "<body>",
                f"<h1>{escape(self.title)}</h1>",
                f"<p>{escape(self._lead)}</p>" if self._lead else "",
                f"<nav>{links}</nav>" if len(self._contents) > 1 else "",
                *self._body,
                f"<script>{_SORT}</script>" if self._sorts else "",
                "</body>",
                "</html>",
                "",
            ]
        )

    def write(self, path: Path) -> None:
        """Writes the page, in one piece."""
        write_whole(path, str(self))


# Text that stands on the right, too: a percentage, a number with one in brackets, a dash.
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( %)?( \([^)]*\))?|–")


def _fact(value: Any) -> str:
    """A value as people write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    caption: str = "",
    *,
    kind: str = "",
    plain: bool = False,
) -> str:
    """A table by itself, as `Page.table` has it; notebooks show it too."""
    cell = _plain_cell if plain else _cell
    body = [[cell(value) for value in row] for row in rows]
    # A heading stands where most of its column does.
    right = [
        sum("number" in row[k] for row in body if k < len(row)) * 2 > len(body)
        for k in range(len(columns))
    ]
    head = "".join(
        f"<th class='number'>{escape(name)}</th>" if at_right else f"<th>{escape(name)}</th>"
        for name, at_right in zip(columns, right, strict=True)
    )
    lines = "\n".join(f"<tr>{''.join(row)}</tr>" for row in body)
    # A caption is as wide as the page, not as its table, which may be beyond the screen.
    title = f"<caption><span>{escape(caption)}</span></caption>" if caption else ""
    return f"<table{kind}>{title}<thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table>"


def facts_table(title: str, facts: Mapping[str, Any]) -> str:
    """Names and values, one a line, as a notebook shows a result; None is left out."""
    known = [(name, value) for name, value in facts.items() if value is not None]
    return table([title, ""], known)


def _plain_cell(value: Any) -> str:
    return f"<td>{escape(str(value))}</td>"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, Real):
        text = str(value) if isinstance(value, Integral) else f"{float(value):.4g}"
        return f"<td class='number'>{text}</td>"
    if isinstance(value, Link):
        return f"<td class='short'><a href='{escape(value.address)}'>{escape(value.text)}</a></td>"
    text = "" if value is None else str(value)
    if not text or len(text) > _SHORT:
        return f"<td>{escape(text)}</td>"
    kind = "number" if _NUMBER.fullmatch(text) else "short"
    return f"<td class='{kind}'>{escape(text)}</td>"


def _svg(figure: Any, name: str) -> str:
    """A figure as an SVG element whose identifiers differ from those of other figures."""
    import matplotlib as mpl

    file = io.StringIO()
    # Text stays text, so that it can be searched and read aloud; the same figure gives the same
    # file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # References to the SVG standard and to matplotlib are not needed inside HTML.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r" xmlns(:\w+)?=\"[^\"]*\"", "", text, count=2)
    text = re.sub(r"\bid=\"([^\"]+)\"", rf'id="{name}-\1"', text)
    text = re.sub(r"(url\(|href=\")#", rf"\1#{name}-", text)
    return text.replace("xlink:href", "href")


# -- arrays of pixels as PNG files -----------------------------------------------------------------


SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, COLOUR = 0, 2


def png(pixels: np.ndarray) -> bytes:
    """A PNG file.

    Args:
        pixels: (height, width) or (height, width, 3), from 0 (black) to 1; what is outside of that
            is cut.
    """
    levels = np.round(np.clip(np.asarray(pixels, float), 0, 1) * 255).astype(np.uint8)
    height, width = levels.shape[:2]
    kind = GREY if levels.ndim == 2 else COLOUR
    # Each line begins with a byte that says how it is predicted from its neighbours: not at all.
    lines = np.concatenate(
        [np.zeros((height, 1), np.uint8), levels.reshape(height, -1)], axis=1
    ).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return (
        SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines, 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )
