"""The HTML report of a sweep: well-formed, self-contained, and in agreement with the table."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from stagecert.robust.report import report_of_robust
from stagecert.sweeps import Row, Store
from stagecert.sweeps.report import ERRORS, TABLE, About, Entry, page_of

VERDICTS = ("unsat", "sat", "unknown", "timeout", "error")
VOID = {"meta", "br", "hr", "img", "link", "input"}
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Reader(HTMLParser):
    """Checks that elements are nested properly; keeps tables, attributes and identifiers."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tables, self.attributes, self.tags = [], [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def table(self, *heading: str) -> list[list[str]]:
        """The rows of the table whose heading begins so."""
        (found,) = [t for t in self.tables if tuple(t[0][: len(heading)]) == heading]
        return found[1:]


def about(**changes) -> About:
    standard = {
        "title": "Sweep", "lead": "", "items": "instances", "groups": "set", "verdicts": VERDICTS,
        "total": 0, "bound": "The bound.", "gap": "The gap.", "facts": (), "command": "stagecert",
        "configuration": {"task": "sweep"},
    }  # fmt: skip
    return About(**(standard | changes))


def entries(count: int):
    draw = np.random.default_rng(0)
    for k in range(count):
        verdict = VERDICTS[int(draw.choice(5, p=[0.5, 0.3, 0.1, 0.07, 0.03]))]
        yield Entry(
            name=f"item {k}",
            group=("acasxu", "mnist")[k % 3 == 0],
            verdict=verdict,
            solved=verdict in ("unsat", "sat"),
            seconds=float(draw.lognormal()),
            bound=float(draw.normal()) if k % 2 else None,
            gap=float(draw.random()) if k % 4 == 1 else None,
            note="broken" if verdict == "error" else None,
            wrong=k == 17,
        )


def test_numbers_agree_with_the_entries():
    held = list(entries(300))
    read = Reader(str(page_of(about(total=301), iter(held))))
    for name, *cells in read.table("set", "unsat"):
        mine = [e for e in held if name in (e.group, "all")]
        counts = [sum(e.verdict == v for e in mine) for v in VERDICTS]
        solved = sum(e.solved for e in mine)
        assert cells == [
            *map(str, counts),
            str(len(mine)),
            str(solved),
            f"{solved / len(mine):.1%}",
        ]
    times = [e.seconds for e in held]
    expected = [np.median(times), np.quantile(times, 0.9), max(times), sum(times)]
    assert read.table("set", "instances")[-1] == ["all", "300", *(f"{x:.4g}" for x in expected)]
    bounds = np.array([e.bound for e in held if e.bound is not None])
    row = read.table("", "instances", "least")[0]
    assert row == ["bound", str(len(bounds)),
                   *(f"{x:.4g}" for x in np.quantile(bounds, (0, 0.1, 0.5, 0.9, 1)))]  # fmt: skip
    assert len(read.table("", "name", "what")) == sum(e.verdict == "error" for e in held)
    assert [row[1] for row in read.table("set", "name", "verdict", "seconds")] == [
        e.name for e in sorted(held, key=lambda e: -e.seconds)[:10]
    ]
    assert len(read.table("", "set", "name")) == 300
    text = str(page_of(about(total=301), iter(held)))
    assert "300 of 301 instances are done." in text
    assert "item 17" in text[text.index("Wrong answers") : text.index("Times</h2>")]


def test_the_curve_is_drawn_where_the_times_are():
    """The last point of the curve of all, read back from the SVG, is the number solved."""
    held = [Entry(f"e{k}", "one", "sat", True, 2.0**k) for k in range(8)]
    text = str(page_of(about(total=8), iter(held)))
    figure = text[text.index("<svg") : text.index("</svg>")]
    (path,) = re.findall(
        r'id="figure1-line2d_\d+">\s*<path d="([^"]*)"[^>]*clip[^>]*stroke: #1f77b4', figure
    )
    points = np.array(re.findall(r"[ML] (\S+) (\S+)", path), float)
    # Times double at each step: equal distances on the axis, and equal rises.
    x, y = np.unique(points[:, 0]), np.unique(points[:, 1])
    assert len(x) == 8
    assert len(y) == 9
    assert np.ptp(np.diff(x)) < 1e-3
    assert np.ptp(np.diff(y)) < 1e-3


@pytest.mark.parametrize("figures", [True, False])
def test_it_needs_no_other_file(figures, monkeypatch):
    if not figures:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = str(page_of(about(total=50), entries(50)))
    read = Reader(text)
    assert not re.search(r"(https?:)?//[\w.]", text)
    assert not {"script", "link", "iframe", "img"} & read.tags
    for name, value in read.attributes:
        assert name not in ("src", "srcset", "action", "onload")
        if name == "href":
            assert value.startswith("#")
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    assert ("<svg" in text) == figures
    assert ("stagecert[plot]" in text) != figures
    identifiers = [value for name, value in read.attributes if name == "id"]
    assert len(set(identifiers)) == len(identifiers)


def test_text_is_not_markup():
    bad = "<script>alert(1)</script> & \"'"
    one = Entry(bad, bad, "error", False, 1.0, note=bad)
    text = str(page_of(about(total=1, command=bad, lead=bad), iter([one])))
    assert "<script" not in text
    assert Reader(text).table("", "name", "what") == [[bad, bad, bad]]


def test_long_sweeps_have_short_reports():
    text = str(page_of(about(total=20_000), entries(20_000)))
    read = Reader(text)
    assert len(text) < 400_000
    assert len(read.table("", "name", "what")) == ERRORS
    assert "All instances" not in text
    assert TABLE < 20_000


def test_nothing_is_done_yet():
    read = Reader(str(page_of(about(total=5), iter(()))))
    assert read.table("set", "unsat") == [["all", *"0000000", "0.0%"]]


def robust_store() -> tuple[Store, set[str]]:
    store = Store(None, {"task": "robust", "eps": "8/255", "model": "0123"})
    statuses = ["certified"] * 4 + ["attacked", "misclassified", "unknown", "error"]
    for k, status in enumerate(statuses):
        data = {"status": status, "bound": k - 3.5, "gap": 0.25 * k, "note": None}
        store.add([Row(f"k{k}", k, data, 0.1 * k)])
    return store, {f"k{k}" for k in range(8)}


def test_robustness_has_the_same_report(tmp_path):
    store, keys = robust_store()
    with store:
        report_of_robust(store, keys, tmp_path / "r.html", command="stagecert robust", name="net")
    text = (tmp_path / "r.html").read_text()
    read = Reader(text)
    assert read.table("model", "certified") == [["net", "4", "1", "1", "1", "1", "8", "6", "75.0%"]]
    assert "8/255" in text
    assert read.table("", "images", "least")[0][:3] == ["bound", "8", "-3.5"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_it(tmp_path, width):
    page = page_of(about(total=60), entries(60))
    # What the browser made of it is written into the page, where the test can read it.
    probe = (
        "<script>addEventListener('load', () => { const body = document.body;"
        "const figures = [...document.querySelectorAll('svg')].map(f => f.getBoundingClientRect());"
        "body.dataset.found = JSON.stringify([document.querySelectorAll('tbody tr').length,"
        "figures.length, figures.every(f => f.width > 200 && f.right <= innerWidth),"
        "document.documentElement.scrollWidth <= innerWidth,"
        "performance.getEntriesByType('resource').length]); })</script></body>"
    )
    path = tmp_path / "report.html"
    path.write_text(str(page).replace("</body>", probe))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
         "--enable-logging=stderr", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    rows = sum(len(table) - 1 for table in Reader(str(page)).tables)
    (found,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    # All rows, both figures inside the window, nothing to scroll sideways, nothing loaded.
    assert found == f"[{rows},2,true,true,0]"
    assert "CONSOLE" not in done.stderr
