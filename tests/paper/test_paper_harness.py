"""The paper's benchmark on two small networks: data, resuming, tables, checks, figures, report."""

import csv
import html.parser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import stagecert as sc
from benchmarks.data import images_file, network_file, read_images, require
from benchmarks.paper import command, figures, plan, published, records, report, sweep, tables
from benchmarks.paper.training import model
from benchmarks.paper.training.architectures import parse
from stagecert.errors import ProblemError
from stagecert.sweeps import Row, Store

NETWORKS = ("tiny_relu_adv", "tiny_softplus_ibp")
METHODS = ("ibp", "backward", "ours")
SHAPE = (1, 5, 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder like that of the benchmark's data, with small images and networks."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    (folder / "cifar10").mkdir()
    (folder / "networks" / "paper").mkdir(parents=True)
    images = random.integers(0, 256, (6, *SHAPE[1:], 1), np.uint8)
    np.savez(folder / "cifar10" / "test.npz", images=images, labels=random.integers(0, 10, 6))
    layers = parse("fc8", 10)
    for seed, name in enumerate(NETWORKS):
        parameters = model.initialise(layers, SHAPE, jax.random.key(seed))
        model.save_onnx(network_file(folder, name), layers, name.split("_")[1], parameters, SHAPE)
    return folder


def arguments(data, out, *more):
    return [
        *("--data", str(data), "--out", str(out), "--images", "3", "--workers", "1"),
        *("--networks", *NETWORKS, "--methods", *METHODS, *more),
    ]


@pytest.fixture(scope="module")
def out(data, tmp_path_factory):
    """The results of an undisturbed run."""
    folder = tmp_path_factory.mktemp("out") / "results"
    assert command.main(arguments(data, folder)) == 0
    return folder


def found(out):
    """All data of a run but the times."""
    files = {name: json.loads((out / "data" / f"{name}.json").read_text()) for name in NETWORKS}
    for runs in files.values():
        for entry in runs.values():
            del entry["seconds"], entry["preparing"], entry["compiling"]
    return files


def test_data_are_those_of_the_methods(data, out):
    """Bounds in the files are what the library says, and sound: below sampled margins."""
    problems = sweep.PaperProblems.load(
        network_file(data, NETWORKS[0]), images_file(data), 3, plan.EPS
    )
    direct = sc.networks.bound(
        problems.network, problems.lower, problems.upper, problems.rows,
        method="backward", intermediate="ibp",
    )  # fmt: skip
    held = records.read(out).of
    np.testing.assert_allclose(held[NETWORKS[0], "backward"].bound, direct.bound, rtol=1e-7)
    share = np.random.default_rng(1).random((50, *problems.lower.shape))
    for point in problems.lower + share * (problems.upper - problems.lower):
        outputs = jax.vmap(problems.network.flat_outputs)(point[:, None].astype(float))
        margins = np.einsum("bto,bo->bt", problems.rows, np.asarray(outputs))
        for run in METHODS:
            assert (held[NETWORKS[0], run].bound <= margins + 1e-6).all()
    ours = held[NETWORKS[0], "ours"]
    gap = ours.value - ours.bound
    assert (gap <= 1e-2 * np.abs(ours.bound) * (1 + 1e-6))[ours.early == 1].all()


def test_tables_are_means_of_the_data(out):
    """Every cell of Table 1 and of the summary, computed anew from the raw files."""
    text = (out / "tables.md").read_text()
    summary = list(csv.DictReader((out / "data" / "summary.csv").read_text().splitlines()))
    assert len(summary) == len(NETWORKS) * len(METHODS)
    for line in summary:
        path = out / "data" / f"{line['network']}.json"
        entry = json.loads(path.read_text())[line["run"]]
        bounds = np.array(entry["bound"])
        assert bounds.shape == (3, 9)
        milliseconds = 1000 * entry["seconds"] / 27
        assert float(line["mean_bound"]) == pytest.approx(bounds.mean(), rel=1e-6)
        assert float(line["ms_per_problem"]) == pytest.approx(milliseconds, rel=1e-6)
        label = plan.RUNS[line["run"]].title
        row = f"| {label} | {-bounds.mean():.4g} | – | – | {milliseconds:.4g} | – | – | 3/–/– |"
        assert row in text
        if line["run"] == "ours":
            iterations = np.mean(entry["iterations"])
            assert float(line["mean_iterations"]) == pytest.approx(iterations, rel=1e-6)
            assert float(line["early_share"]) == pytest.approx(np.mean(entry["early"]), rel=1e-6)


def test_goes_on_after_being_killed(data, out, tmp_path):
    """Killed in the middle of an item by SIGKILL, then run again: the same data."""
    script = (
        "import os, signal, sys\n"
        "from benchmarks.paper import command\n"
        "from benchmarks.paper.methods import METHODS\n"
        # Rows that came within half a second of the last ones may be lost; here none waits.
        "from stagecert.sweeps import sweep\n"
        "sweep.LONGEST = 0\n"
        "METHODS['backward'].run = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "command.main(sys.argv[1:])\n"
    )
    folder = tmp_path / "results"
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", script, *arguments(data, folder)], cwd=root, capture_output=True
    )
    assert killed.returncode == -9, killed.stderr.decode()
    with Store(folder / "store", sweep.configuration(data)) as store:
        assert [row.data["run"] for row in store.rows()] == ["ours", "ibp"]
    assert command.main(arguments(data, folder)) == 0
    assert found(folder) == found(out)


def test_nothing_is_computed_twice(data, out, monkeypatch):
    before = found(out)

    def fail(*_, **__):
        raise AssertionError("computed again")

    for method in {plan.RUNS[name].method for name in METHODS}:
        monkeypatch.setattr(sweep.named(method).__class__, "run", fail)
    assert command.main(arguments(data, out)) == 0
    assert found(out) == before


def test_one_failure_leaves_the_rest(data, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(sweep.named("backward").__class__, "run", fail)
    few = ["--only", "table1", "--methods", "ibp", "backward"]
    assert command.main([*arguments(data, tmp_path)[:8], "--networks", NETWORKS[0], *few]) == 1
    assert "tiny_relu_adv/backward/0+3" in capsys.readouterr().err
    assert set(records.read(tmp_path).of) == {(NETWORKS[0], "ibp")}
    monkeypatch.undo()
    assert command.main([*arguments(data, tmp_path)[:8], "--networks", NETWORKS[0], *few]) == 0
    assert (NETWORKS[0], "backward") in records.read(tmp_path).of


def test_what_was_refused_is_tried_again(data, tmp_path, monkeypatch):
    """A solver may have been installed since."""
    run = [*arguments(data, tmp_path)[:8], "--networks", NETWORKS[0], "--only", "table1"]
    run += ["--methods", "ibp"]
    monkeypatch.setattr(sweep.named("ibp").__class__, "refusal", lambda *_: "not installed")
    assert command.main(run) == 0
    assert records.read(tmp_path).of[NETWORKS[0], "ibp"].refused == "not installed"
    monkeypatch.undo()
    assert command.main(run) == 0
    assert records.read(tmp_path).get(NETWORKS[0], "ibp") is not None


@pytest.mark.slow
def test_two_workers_find_the_same(data, out, tmp_path):
    """Also what stops at the bounds of another run, whose item fails if there are none."""
    options = [*arguments(data, tmp_path)[:6], "--workers", "2", "--networks", *NETWORKS]
    runs = [*METHODS, "paper", "deepverify"]
    assert command.main([*options, "--only", "table1", "ibp-table1", "--methods", *runs]) == 0
    theirs = found(tmp_path)
    for network, entries in found(out).items():
        for run, entry in entries.items():
            assert theirs[network][run] == entry
        bounds = {run: np.array(theirs[network][run]["bound"]) for run in ("paper", "deepverify")}
        early = np.array(theirs[network]["deepverify"]["early"]) == 1
        assert (bounds["deepverify"] >= bounds["paper"] - 1e-5)[early].all()
    (session,) = json.loads((tmp_path / "data" / "made.json").read_text())["sessions"]
    assert session["workers"] == 2


def test_what_stops_at_bounds_that_are_missing_fails(data, tmp_path):
    work = plan.Work(NETWORKS[0], plan.RUNS["deepverify"], 0, 1)
    finished = []
    with Store(None, {}) as store:
        with pytest.raises(sweep.Failed, match="no bounds of 'paper'"):
            sweep.compute([work], store, data, finished=lambda *said: finished.append(said))
        assert len(store) == 0
    assert finished == [(work, False)]


def test_other_data_are_refused(data, out, tmp_path, capsys):
    other = tmp_path / "data"
    shutil.copytree(data, other)
    with np.load(images_file(data)) as file:
        np.savez(images_file(other), images=255 - file["images"], labels=file["labels"])
    assert command.main(arguments(other, out)) == 2
    assert "another configuration" in capsys.readouterr().err


def test_absent_data_are_named(tmp_path, capsys):
    assert command.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "test.npz is not there (13 files are missing)" in said
    assert "--data" in said
    assert "STAGECERT_DATA" in said
    assert not (tmp_path / "out").exists()
    assert command.main(["--report-only", "--out", str(tmp_path / "out")]) == 2


def test_the_example_needs_no_data(tmp_path):
    out = tmp_path / "out"
    assert command.main(["--only", "example", "--data", "nowhere", "--out", str(out)]) == 0
    assert (out / "figures" / "escape.svg").exists()
    assert not (out / "store").exists()


def test_report_only_reads_the_data_files(out):
    before = {path.name: path.read_text() for path in (out / "data").iterdir()}
    report_before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert command.main(["--report-only", "--out", str(out)]) == 0
    assert {path.name: path.read_text() for path in (out / "data").iterdir()} == before
    assert (out / "report.html").read_text() == report_before


class Nesting(html.parser.HTMLParser):
    """Checks that tags nest; gathers text and references."""

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)
        self.references += [value for name, value in attrs if name in ("href", "src")]

    def handle_startendtag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_report_is_whole_and_needs_nothing_else(data, out):
    text = (out / "report.html").read_text()
    page = Nesting(text)
    assert all(reference.startswith("#") for reference in page.references)
    assert "http" not in text
    for title in ("Table 1", "Checks", "The example", "How this was made"):
        assert title in page.text
    assert jax.__version__ in page.text
    assert "python -m benchmarks.paper --data" in page.text
    assert str(data.parent) not in text
    assert text.count("<svg") == 3
    for name in ("example", "escape", "infeasible"):
        assert (out / "figures" / f"{name}.svg").exists()
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_a_browser_shows_the_report(out, tmp_path):
    shown = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions",
         f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--dump-dom",
         (out / "report.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr
    assert "How this was made" in shown.stdout
    assert len(re.findall("<svg", shown.stdout)) == 3


def test_plan():
    """Dear methods run on few images; what a run needs comes before it."""
    works = list(plan.planned(plan.NETWORKS, list(plan.RUNS), plan.TRACED, 45))
    assert len({work.key for work in works}) == len(works)
    covered = {}
    for work in works:
        covered.setdefault((work.network, work.run.name), []).extend(
            range(work.first, work.first + work.count)
        )
        if work.run.target:
            assert set(covered[work.network, work.run.name]) <= set(
                covered[work.network, work.run.target]
            )
    for (network, run), images in covered.items():
        most = plan.RUNS[run].most.get(network.split("_")[0], 45)
        assert images == list(range(min(45, most)))
        assert network.endswith(plan.RUNS[run].training)
    # Others run too if a chosen run needs their bounds.
    assert plan.ordered(["deepverify"]) == ["paper", "deepverify"]


def record(run, bound, value=None, seconds=1.0, network="tiny_relu_adv"):
    bound = np.asarray(bound, float)
    value = np.full(bound.shape, np.nan) if value is None else np.asarray(value, float)
    whole = np.ones(bound.shape)
    return {(network, run): records.Record(network, run, bound, value, whole, whole, seconds)}


def test_checks_judge():
    truth = np.array([[-2.0, -4.0], [-6.0, -8.0]])
    ours = record("ours-tight", truth - 1e-4, truth + 1e-4)
    looser, tighter = record("paper", truth - 1e-3), record("deepverify", truth[:1] - 1e-5)
    solver, far = record("highs", truth), record("scs", truth * 1.01)
    held = records.Records(ours | looser | tighter | solver | far, {}, {})
    passed = {check.run: check.passed for check in tables.checks(held)}
    assert passed["paper"]
    assert not passed["deepverify"]
    by_run = {check.run: check for check in tables.checks(held)}
    assert by_run["deepverify"].problems == 2
    assert by_run["deepverify"].relative == pytest.approx(-9e-5 / 3, rel=1e-3)
    assert passed["highs"]
    assert not passed["scs"]
    rows = tables.check_tables(held)[0].rows
    assert [row[-1] for row in rows].count("FAIL") == 2


def test_bounds_above_values_are_found():
    truth = np.array([[1.0, 2.0]])
    sound = record("ours-tight", truth - 1e-3, truth)
    held = records.Records(sound | record("paper", truth + 1e-3), {}, {})
    verdicts = {c.run: c.passed for c in tables.crossings(held)}
    assert verdicts == {"ours-tight": True, "paper": False}


def test_what_is_no_bound_is_left_out_and_reported():
    """A peer whose bounds are above feasible values, and whose values are too low."""
    truth = np.array([[1.0, 2.0]])
    ours = record("ours-tight", truth - 1e-6, truth)
    peer = record("jax_verify", truth + np.array([[1e-2, -1e-2]]), truth - 1)
    held = records.Records(ours | peer, {}, {})
    (check,) = tables.checks(held)
    assert (check.wrong, check.problems, check.passed) == (1, 1, True)
    verdicts = {c.run: c.passed for c in tables.crossings(held)}
    assert verdicts == {"ours-tight": True, "jax_verify": False}


def test_means_of_fewer_images_stand_beside_ours_on_the_same():
    ours = record("ours-tight", [[-1.0, -3.0], [-10.0, -30.0]])
    held = records.Records(ours | record("paper", [[-2.0, np.nan]]), {}, {})
    table = tables.bounds_and_times(held, "adv")[0]
    cells = {row[0]: row[1] for row in table.rows}
    assert cells[plan.RUNS["paper"].title] == "2 (1)"
    assert cells[plan.RUNS["ours-tight"].title] == "11"


def test_a_run_stops_at_the_stored_bounds_of_another():
    """Also if the other's items were cut elsewhere."""
    deep = plan.RUNS["deepverify"]
    bounds = np.arange(50.0).reshape(25, 2)
    with Store(None, {}) as store:
        for place, (first, count) in enumerate(((0, 20), (20, 5))):
            some = sweep.plain(bounds[first : first + count])
            head = {"network": "tiny_relu_adv", "first": first, "count": count, "bound": some}
            key = plan.Work("tiny_relu_adv", plan.RUNS["paper"], first, count).key
            store.add([Row(key, place, {**head, "run": "paper"})])
            other = sweep.plain(-bounds[first : first + count])
            stale = {**head, "bound": other, "run": "paper"}  # of other settings
            store.add(
                [Row(f"{key}x", place, stale), Row(f"i{first}", place, {**stale, "run": "ibp"})]
            )
        item = plan.Work("tiny_relu_adv", deep, 18, 4)
        np.testing.assert_array_equal(sweep._target(store, item), bounds[18:22])
        assert sweep._target(store, plan.Work("tiny_relu_adv", deep, 23, 4)) is None


def test_traces_are_distances_from_the_best_value():
    """Two problems with least values 2 and -4, bounds that close in on them."""
    best = np.array([[2.0, -4.0]])
    trace = {
        "iteration": [0, 1, 2],
        "seconds": [0.5, 1.0, 1.5],
        "bound": [[[0.0, -8.0]], [[1.0, -6.0]], [[2.0, -4.0]]],
        "value": [[[None, None]], [[3.0, -3.0]], [[2.0, -4.0]]],
        "distances": [[4, 0], [3, 1], [2, 2]],
        "least": [0.25, 0.125, None],
    }
    curve = records._curve(trace, best)
    assert curve["iteration"] == [0, 1, 2]
    assert curve["seconds"] == [0.5, 1.0, 1.5]
    assert curve["distance"][1] == [1.0, 0.5, 0.0]
    assert curve["gap"] == [None, (2 / 1 + 3 / 6) / 2, 0.0]
    assert curve["histogram"] == [9, 3]
    assert curve["least"] == 0.125
    drawn = records.Records({}, {"tiny_softplus_ibp": {"trace-paper": curve}}, {})
    assert [name for name, _, _ in figures.traces(drawn)] == ["traces_tiny_softplus_ibp"]
    (name, figure, _), *others = figures.distances(drawn)
    assert name == "distances"
    assert not others
    stairs: Any
    (stairs,) = figure.axes[0].patches
    np.testing.assert_allclose(stairs.get_data().values, [0.75, 0.25])


def test_published_numbers_have_networks_and_methods():
    for book in (published.BOUND, published.MILLISECONDS, published.STOPPING):
        assert {network for _, network in book} <= set(plan.NETWORKS)
        assert {method for method, _ in book} <= set(tables._PUBLISHED)


def test_drawings_of_the_example():
    """Descent from the spurious minimiser stays; after the escape it reaches the optimum."""
    stuck = figures.descent(figures.STUCK)
    assert np.ptp(stuck, axis=0).tolist() == [0, 0]
    with jax.enable_x64(True):
        freed = figures.escape_exact_local_min(figures.lens(), figures.STUCK)
    end = figures.descent(freed)[-1]
    np.testing.assert_allclose(end, [0, 0], atol=1e-3)
    assert (1 - 2 * end[1]) * (end[0] ** 2 - 1) == pytest.approx(-1, abs=1e-3)


def test_require_accepts_what_is_there(data):
    require(data, NETWORKS)
    with pytest.raises(ProblemError, match=r"small_relu_adv\.onnx is not there"):
        require(data, ["small_relu_adv"])


def test_damaged_images_are_named(data, tmp_path):
    path = images_file(tmp_path)
    path.parent.mkdir()
    assert len(read_images(images_file(data))[1]) == 6
    path.write_bytes(images_file(data).read_bytes()[:-100])
    with pytest.raises(ProblemError, match=r"test\.npz cannot be read"):
        read_images(path)
    np.savez(path, images=np.zeros((2, 3)))
    with pytest.raises(ProblemError, match="labels"):
        read_images(path)
    np.savez(path, images=np.zeros((2, 3, 5, 5), np.uint8), labels=np.zeros(3, int))
    with pytest.raises(ProblemError, match="one for each image"):
        read_images(path)
    np.savez(path, images=np.zeros((2, 3, 32, 32)), labels=np.zeros(2))
    with pytest.raises(ProblemError, match="uint8"):
        read_images(path)


def test_images_without_channels_are_refused(data, tmp_path, capsys):
    other = tmp_path / "data"
    shutil.copytree(data, other)
    with np.load(images_file(data)) as file:
        np.savez(images_file(other), images=file["images"][..., 0], labels=file["labels"])
    run = ["--data", str(other), "--out", str(tmp_path / "out"), "--networks", NETWORKS[0]]
    assert command.main(run) == 2
    assert "axis of channels" in capsys.readouterr().err


def test_page_of_the_documentation_is_filled_in(out, tmp_path):
    page = tmp_path / "paper.md"
    page.write_text(
        "before\n<!-- paper table1_relu_adv -->\nold\n<!-- end -->\n![](images/paper_example.png)\n"
    )
    report.update_page(out, page)
    text = page.read_text()
    assert text.startswith("before\n<!-- paper table1_relu_adv -->\n\n| method |")
    assert "old" not in text
    assert (tmp_path / "images" / "paper_example.png").exists()
