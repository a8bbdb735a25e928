"""Pages are well-formed, self-contained, and show what they were given."""

import base64
import html.parser
import io
import math
import re
from typing import Any

import numpy as np
import pytest

from stagecert import machine
from stagecert.charts import Axis, Curve, chart
from stagecert.html import Link, Page, png
from stagecert.networks.bounding.results import Bounds
from stagecert.solution import Solution, Stats, Status
from stagecert.verify.verdict import CaseBounds, Verdict

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(html.parser.HTMLParser):
    """Checks that tags nest; gathers cells, identifiers and references."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.cells, self.ids, self.references = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src"):
                self.references.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.cells[-1] += data


def two_figures(page: Page):
    from matplotlib.figure import Figure

    for height in (1, 2):
        figure = Figure()
        axes = figure.subplots()
        axes.plot([0, 1], [0, height], marker="o")
        axes.set_title("a < b & c")
        page.figure(figure, "a line 'through' the \"points\" <0> & <1>")


def test_nests_and_refers_to_nothing_outside():
    page = Page("A <title> & more", "lead <b>")
    page.heading("First <i>")
    page.paragraph("x < y & z")
    page.code("stagecert sweep 'a b.csv' > out")
    page.table(["<name>", "n"], [["<script>alert(1)</script>", 3], [None, 0.25]], "of <things>")
    page.heading("Second")
    page.facts(machine.made())
    two_figures(page)
    page.chart(chart([Curve("<a>", [1, 2], [3, 4])], Axis("<x>"), Axis("y & z")), "a 'chart' <1>")
    page.headline([("96 %", "<accuracy>", "a & b")])
    text = str(page)
    read = Reader(text)
    assert read.cells[:4] == ["<script>alert(1)</script>", "3", "", "0.25"]
    assert "<script" not in text
    assert "http" not in text
    assert len(set(read.ids)) == len(read.ids)
    assert all(r.startswith("#") and r[1:] in read.ids for r in read.references)
    assert "url(#figure1-" in text
    assert "url(#figure2-" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(3, "3"), (True, "yes"), (np.float32(0.5), "0.5"), (1234567.0, "1.235e+06"), (None, ""),
     (math.inf, "inf"), (math.nan, "nan"), (2.0, "2"), (123456789, "123456789"),
     (np.int64(7), "7")],
)  # fmt: skip
def test_cells(value, shown):
    page = Page("t")
    page.table(["a"], [[value]])
    assert Reader(str(page)).cells == [shown]


def test_the_same_page_gives_the_same_file(tmp_path):
    paths = [tmp_path / "a.html", tmp_path / "b.html"]
    for path in paths:
        page = Page("t")
        two_figures(page)
        page.write(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_machine():
    facts = machine.made(["numpy", "no-such-package"])
    assert facts["versions"] == {"numpy": np.__version__, "no-such-package": None}
    assert facts["cpu"]


def test_numbers_stand_on_the_right():
    page = Page("t")
    page.table(["a"], [["38 %"], ["7.97 (7.95)"], ["-1.2e-05"], ["–"], [3], ["20/10/4"], ["3 s"]])
    right = [line.count("class='number'>") for line in str(page).split("<tr>")[2:]]
    assert right == [1, 1, 1, 1, 1, 0, 0]


def test_facts_stand_on_the_left():
    page = Page("t")
    page.facts({"version": "0.1.0", "seed": 3, "model": {"name": "net"}})
    assert "number" not in str(page).partition("<body>")[2]
    assert Reader(str(page)).cells == ["version", "0.1.0", "seed", "3", "model name", "net"]


@pytest.mark.parametrize("shape", [(3, 5), (4, 2, 3)])
def test_pictures_hold_the_pixels(shape):
    """Matplotlib's own reader gets the levels back."""
    from matplotlib.image import imread

    pixels = np.random.default_rng(0).uniform(-0.2, 1.2, shape)
    wanted = np.round(np.clip(pixels, 0, 1) * 255) / 255
    np.testing.assert_allclose(imread(io.BytesIO(png(pixels))), wanted, atol=1e-6)
    page = Page("t")
    page.pictures([(pixels, "a 'picture' <b>")])
    (source,) = [r for r in Reader(str(page)).references if r.startswith("data:image/png;base64,")]
    assert base64.b64decode(source.partition(",")[2]) == png(pixels)


def test_only_sortable_tables_bring_a_script():
    page = Page("t")
    page.table(["a"], [[1]])
    assert "<script" not in str(page)
    page.table(["a"], [[1]], sortable=True)
    assert str(page).count("<script") == 1
    assert str(page).count("<table class='sortable'") == 1


def ticks(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_ticks_are_numbers_written_out():
    times = [0.0421, 0.4, 3.0, 17.0]
    across = Axis("seconds", log=True)
    found = ticks(chart([Curve("a", times, [1, 2, 3, 4], "steps")], across, Axis("n", whole=True)))
    assert found == ["1", "2", "3", "4", "0.05", "0.1", "0.2", "0.5", "1", "2", "5", "10",
                     "seconds", "n"]  # fmt: skip
    shares = chart(
        [Curve("a", [0, 0.1], [0.5, 1])], Axis("x"), Axis("y", ends=(0, 1), percent=True)
    )
    assert {"0 %", "20 %", "100 %", "0.02"} <= set(ticks(shares))
    # Decades alone, where there are many.
    far = ticks(chart([Curve("a", [1e-3, 1e3], [1, 2])], across, Axis("n")))
    assert {"0.001", "1", "1,000"} <= set(far)
    assert "0.002" not in far
    # One point, and none that can be drawn.
    assert "1" in ticks(chart([Curve("a", [1.0], [1])], across, Axis("n", whole=True)))
    assert ticks(chart([Curve("a", [], [])], Axis("x"), Axis("n")))


def test_short_texts_stay_on_one_line_and_long_ones_do_not():
    page = Page("t")
    page.table(["name", "note"], [["image 7", "a sentence about what went wrong here, and why"]])
    assert "<td class='short'>image 7</td><td>a sentence" in str(page)


def test_links():
    page = Page("t")
    page.table(["report"], [[Link("a<b", "it's/report.html")]])
    read = Reader(str(page))
    assert read.cells == ["a<b"]
    assert read.references == ["it's/report.html"]


# -- results in notebooks --------------------------------------------------------------------------


def test_a_solution_shows_itself_in_a_notebook():
    nothing: Any = None
    stats = Stats(3, 14, 0.25, nothing)
    message = "Stage <b>'x'</b>: bounds cross."
    made = Solution(1.5, 1.25, Status.STALLED, 0, (), nothing, stats, message)
    read = Reader(made._repr_html_())
    shown = dict(zip(read.cells[::2], read.cells[1::2], strict=True))
    assert (shown["value"], shown["bound"], shown["gap"]) == ("1.5", "1.25", "0.25")
    assert shown["status"] == f"STALLED: {message}"  # as text, and not as HTML
    assert "<b>" not in made._repr_html_()


def test_bounds_show_the_first_problems_in_a_notebook():
    nothing: Any = None
    status = np.full((4, 3), Status.GAP_REACHED, dtype=object)
    bound = np.arange(12.0).reshape(4, 3)
    ones = np.ones((4, 3), int)
    made = Bounds(bound, bound + 0.5, status, ones, nothing, nothing, nothing, nothing)
    text = made._repr_html_()
    rows = np.reshape(Reader(text).cells, (-1, 6)).tolist()
    assert len(rows) == 10
    assert rows[4] == ["1", "1", "4", "4.5", "0.5", "GAP_REACHED"]
    assert "the first 10 of 12" in text


def test_a_verdict_shows_itself_in_a_notebook():
    case = CaseBounds(0, False, None, None, np.array([-1.0]), -1.0, 1.0, 0.5)
    made = Verdict("unknown", None, (case,), 1.25, "Time <i>ran</i> out.")
    read = Reader(made._repr_html_())
    shown = dict(zip(read.cells[::2], read.cells[1::2], strict=True))
    assert shown["answer"] == "unknown"
    assert shown["cases refuted"] == "0 of 1"
    assert shown["reason"] == "Time <i>ran</i> out."
    assert "1 short of a proof" in shown["standing"]
    assert "objection" not in shown
