"""The HTML report of a sweep: well-formed, self-contained, and in agreement with the table."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from stagecert.robust.data import DataSet
from stagecert.robust.report import _picture, report_of_radii, report_of_robust
from stagecert.robust.table import Report
from stagecert.robust.work import Finding
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
        if "td" in self.open or "th" in self.open:
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
    (path,) = re.findall(r"<path d='([^']*)'", figure)
    # From the axis up, then across and up for each further item.
    start, *rest = re.findall(r"[MHV]([-\d. ]+)", path)
    left, bottom = map(float, start.split())
    across, up = [left, *map(float, rest[1::2])], [bottom, float(rest[0]), *map(float, rest[2::2])]
    points = np.array([across, up[1:]]).T
    # Times double at each step: equal distances on the axis, and equal rises.
    x, y = points[:, 0], np.array(up)
    assert len(x) == 8
    assert len(y) == 9
    assert np.ptp(np.diff(x)) < 0.25  # tenths of a pixel
    assert np.ptp(np.diff(y)) < 0.25


def test_it_needs_no_other_file_and_no_other_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = str(page_of(about(total=50), entries(50)))
    read = Reader(text)
    assert not re.search(r"(https?:)?//[\w.]", text)
    assert not {"link", "iframe", "img"} & read.tags
    for name, value in read.attributes:
        assert name not in ("src", "srcset", "action", "onload")
        if name == "href":
            assert value.startswith("#")
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    assert text.count("<svg") == 3
    assert "stagecert[plot]" not in text
    identifiers = [value for name, value in read.attributes if name == "id"]
    assert len(set(identifiers)) == len(identifiers)


def test_text_is_not_markup():
    bad = "<script>alert(1)</script> & \"'"
    one = Entry(bad, bad, "error", False, 1.0, note=bad)
    text = str(page_of(about(total=1, command=bad, lead=bad), iter([one])))
    assert text.count("<script") == 1  # the page's own
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


MEAN, STD = 0.25, 0.5


def robust_run() -> tuple[Store, set[str], DataSet]:
    """Eight images of 3 x 2 x 2 pixels; the model gets (pixel - MEAN) / STD."""
    images = np.random.default_rng(0).random((8, 3, 2, 2)).astype(np.float32)
    store = Store(
        None,
        {"task": "robust", "eps": "8/255", "model": "0123", "clip": ["0", "1"],
         "mean": [str(MEAN)], "std": [str(STD)] * 3, "checked": True},
    )  # fmt: skip
    statuses = ["certified"] * 4 + ["attacked", "misclassified", "unknown", "error"]
    for k, status in enumerate(statuses):
        found = Finding(
            label=k % 2,
            predicted=None if status == "error" else (k + (status == "misclassified")) % 2,
            status=status,
            correct=status in ("certified", "attacked", "unknown"),
            attacked=status == "attacked",
            certified=status == "certified",
            becomes=1 if status == "attacked" else None,
            bound=k - 3.5,
            gap=0.25 * k,
        )
        blob = ((images[k] + 8 / 255 - MEAN) / STD).astype("<f4").tobytes()
        row = Row(f"k{k}", k, asdict(found), 0.1 * k, blob if status == "attacked" else None)
        store.add([row])
    return store, {f"k{k}" for k in range(8)}, DataSet(images, np.arange(8) % 2)


def test_robustness_leads_with_accuracies(tmp_path):
    store, keys, _ = robust_run()
    with store:
        report_of_robust(store, keys, tmp_path / "r.html", command="stagecert robust", name="net")
    text = (tmp_path / "r.html").read_text()
    read = Reader(text)
    found = re.findall(r"<b>([^<]*)</b>([^<]*)<span>(\S+ of \S+)", text)
    assert found == [
        ("75.0 %", "clean accuracy", "6 of 8"),
        ("62.5 %", "attacked accuracy", "5 of 8"),
        ("50.0 %", "certified accuracy", "4 of 8"),
    ]
    assert text.index("certified accuracy") < text.index("Verdicts</h2>")
    assert read.table("class", "images") == [
        ["0", "4", "100.0 %", "75.0 %", "50.0 %", "1"],
        ["1", "4", "50.0 %", "50.0 %", "50.0 %", "0"],
    ]
    assert read.table("model", "certified") == [["net", "4", "1", "1", "1", "1", "8", "6", "75.0%"]]
    assert "8/255" in text
    assert read.table("", "images", "least")[0][:3] == ["bound", "8", "-3.5"]
    rows = read.table("", "model", "name", "label", "predicted", "becomes", "method", "verdict")
    assert rows[4][2:8] == ["image 4", "0", "0", "1", "", "attacked"]


def test_counterexamples_are_shown(tmp_path):
    """Image, change and counterexample, read back from the page by another decoder."""
    from matplotlib.image import imread

    store, keys, images = robust_run()
    with store:
        report_of_robust(store, keys, tmp_path / "r.html", images=images)
    read = Reader((tmp_path / "r.html").read_text())
    sources = [value for name, value in read.attributes if name == "src"]
    pictures = [imread(io.BytesIO(base64.b64decode(s.partition(",")[2]))) for s in sources]
    image = np.moveaxis(images.images[4], 0, -1)
    for picture, wanted in zip(
        pictures, (image, np.ones((2, 2, 3)), np.minimum(image + 8 / 255, 1)), strict=True
    ):
        np.testing.assert_allclose(picture, wanted, atol=0.51 / 255)
    captions = [value for name, value in read.attributes if name == "alt"]
    assert captions == ["image 4: 0", "change", "now: 1"]


@pytest.mark.parametrize(
    ("shape", "shown"),
    [((3, 4, 5), (3, 4, 5)), ((1, 4, 5), (1, 4, 5)), ((4, 5), (4, 5)), ((784,), (28, 28)),
     ((1, 784), (28, 28)), ((7,), None), ((65,), None), ((2, 4, 5), None), ((4,), None)],
)  # fmt: skip
def test_which_inputs_are_pictures(shape, shown):
    assert _picture(shape) == shown


def test_accuracy_against_the_radius(tmp_path):
    runs = [
        Report(20, 20, 16, attacked, certified, 0, 0, {}, 1.0, {"eps": eps, "seed": 0})
        for eps, attacked, certified in (("8/255", 4, 8), ("2/17", 8, 2), ("1/255", 0, 16))
    ]
    report_of_radii(tmp_path / "r.html", runs, name="net")
    text = (tmp_path / "r.html").read_text()
    assert Reader(text).table("radius", "images") == [
        ["1/255", "20", "80.0 %", "80.0 %", "80.0 %", "0", "eps-1_255"],
        ["8/255", "20", "80.0 %", "60.0 %", "40.0 %", "0", "eps-8_255"],
        ["30/255", "20", "80.0 %", "40.0 %", "10.0 %", "0", "eps-30_255"],
    ]
    paths = [np.array(re.findall(r"[ML]([\d.]+) ([\d.]+)", d), float)
             for d in re.findall(r"<path d='([^']*)'", text)]  # fmt: skip
    clean, attacked, certified = paths
    assert np.ptp(clean[:, 1]) == 0
    # Equal falls on the page for equal falls of accuracy: 20 % and 20 %, 40 % and 30 %.
    assert np.diff(attacked[:, 1]) == pytest.approx([46.0, 46.0], abs=0.2)
    assert np.diff(certified[:, 1]) == pytest.approx([92.0, 69.0], abs=0.2)


def sweep_page(path):
    page_of(about(total=60), entries(60)).write(path)


def robust_page(path):
    store, keys, images = robust_run()
    with store:
        report_of_robust(store, keys, path, command="stagecert robust", images=images)


def radii_page(path):
    runs = [
        Report(20, 20, 16, 4, 8, 0, 0, {}, 1.0, {"eps": eps, "model": "f28" * 20})
        for eps in ("1/255", "8/255")
    ]
    report_of_radii(path, runs, command="stagecert robust", name="net")


# The heading of the last column of numbers in the last table that sorts is clicked twice. What the
# browser made of the page is sent to the page around it, where the test can read it.
PROBE = """<script>addEventListener('load', () => {
  const all = names => [...document.querySelectorAll(names)];
  const figures = all('svg, img').map(f => f.getBoundingClientRect());
  const up = v => v.every((x, k) => !k || v[k - 1] <= x);
  const table = all('table.sortable').at(-1), sorted = [];
  if (table) {
    const at = [...table.rows[0].cells].findIndex(c => c.textContent === 'seconds');
    const column = () => [...table.tBodies[0].rows].map(r => +r.cells[at].textContent);
    table.rows[0].cells[at].click(); sorted.push(up(column()));
    table.rows[0].cells[at].click(); sorted.push(up(column().reverse()));
  }
  const inside = f => f.width > 50 && f.right <= innerWidth;
  const captions = all('caption span').map(f => f.getBoundingClientRect());
  parent.postMessage(JSON.stringify({
    width: innerWidth, sorted, rows: all('tbody tr').length, figures: figures.length,
    inside: [...figures, ...captions].every(inside),
    scrolls: document.documentElement.scrollWidth > innerWidth,
    loaded: performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length
  }), '*');
})</script></body>"""
# A window is 500 pixels wide or wider, a frame in it is not.
FRAME = """<body><script>addEventListener('message', event => document.body.dataset.found =
event.data)</script><iframe src='report.html' width={} height=900></iframe></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize(("write", "figures"), [(sweep_page, 3), (robust_page, 6), (radii_page, 1)])
def test_a_browser_shows_it(tmp_path, write, figures, width):
    path = tmp_path / "report.html"
    write(path)
    text = path.read_text()
    path.write_text(text.replace("</body>", PROBE))
    (tmp_path / "frame.html").write_text(FRAME.format(width))
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,1000",
         f"--user-data-dir={tmp_path / 'profile'}", "--disable-background-networking",
         "--no-first-run", "--virtual-time-budget=2000", "--enable-logging=stderr",
         "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    (found,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    assert json.loads(unescape(found)) == {
        "width": width,
        "sorted": [True, True] if "sortable" in text.partition("</style>")[2] else [],
        "rows": sum(len(table) - 1 for table in Reader(text).tables),
        "figures": figures,
        "inside": True,
        "scrolls": False,
        "loaded": 0,
    }
    assert "CONSOLE" not in done.stderr
