"""The command-line program and the trace plot."""

import json
from dataclasses import replace
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
from typer.testing import CliRunner

import stagecert as sc
from stagecert.cli import app
from stagecert.cli.core_demo import DEMOS


@pytest.fixture(scope="module")
def rows():
    result = CliRunner().invoke(app, ["demo", "--core", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return {row["problem"]: row for row in json.loads(result.stdout)}


def test_demo_solves_everything(rows):
    assert len(rows) == len(DEMOS) >= 5
    for row in rows.values():
        assert row["status"] == "GAP_REACHED"
        assert row["bound"] <= row["value"]
    assert rows["lens, spurious start"]["value"] == pytest.approx(-1, abs=1e-6)
    assert rows["chain, 100,000 stages"]["value"] == pytest.approx(-1, abs=1e-9)


def test_demo_isotonic_agrees_with_clarabel(rows):
    draw = np.random.default_rng(3)
    target = np.add.outer(np.arange(6), np.arange(6)) / 6 + 0.5 * draw.normal(size=(6, 6))
    fit = cp.Variable((6, 6))
    constraints: Any = [fit[1:] >= fit[:-1], fit[:, 1:] >= fit[:, :-1], fit <= 3, fit[0, 0] >= -3]
    truth = cp.Problem(cp.Minimize(cp.sum_squares(fit - target)), constraints)
    truth.solve(solver=cp.CLARABEL)
    row = rows["isotonic, 6 x 6 grid"]
    assert row["bound"] <= float(np.asarray(truth.value)) + 1e-7
    assert row["value"] >= float(np.asarray(truth.value)) - 1e-7


def test_table_and_help_are_readable():
    runner = CliRunner()
    assert "demo" in runner.invoke(app, ["--help"]).stdout
    assert runner.invoke(app, ["rubbish"]).exit_code == 2


def test_plot_of_a_trace_that_begins_without_a_feasible_point(tmp_path):
    """With side constraints the value is infinite until a point satisfies them."""
    import matplotlib as mpl

    mpl.use("Agg")
    problem = sc.Problem(
        sc.Box(-np.ones(2), np.ones(2)),
        (),
        lambda s, z: s[0] + s[1],
        constraints=(sc.Constraint(lambda s, z: s @ s - 0.5, name="disc"),),
    )
    solution = sc.solve(problem, rtol=1e-6)
    assert solution.status is sc.Status.GAP_REACHED
    trace = solution.stats.trace
    late = replace(trace, value=np.where(np.arange(len(trace.value)) < 1, np.inf, trace.value))
    for shown in (solution, replace(solution, stats=replace(solution.stats, trace=late))):
        figure = sc.plot_trace(shown)
        figure.savefig(tmp_path / "trace.png")
        ends, gaps = figure.axes[:2]
        assert np.isfinite([*ends.get_ylim(), *gaps.get_ylim()]).all()
        assert np.array_equal(gaps.lines[0].get_xdata(), trace.passes)
        assert gaps.lines[0].get_ydata()[-1] <= 1e-5


def without_a_value(status, trace, bound) -> sc.Solution:
    certificate = sc.Certificate(np.zeros(2), (), (), ((), ()), bound)
    stats = sc.Stats(len(trace.passes), 6, 0.1, trace)
    return sc.Solution(np.inf, bound, status, np.zeros(2), (), certificate, stats)


def test_plot_of_a_trace_without_a_value(tmp_path):
    """Infeasible problems used to have no trace; without a feasible point, an empty panel."""
    import matplotlib as mpl

    mpl.use("Agg")
    passes, bound = np.array([3, 6]), np.array([-1.0, 0.25])
    some = sc.Trace(np.array([0.5, 0.4]), bound, passes, ("polish", "polish"))
    none = sc.Trace(np.zeros(0), np.zeros(0), np.zeros(0), ())
    for trace in (some, none):
        figure = sc.plot_trace(without_a_value(sc.Status.INFEASIBLE, trace, 0.25))
        figure.savefig(tmp_path / "trace.png")
        ends = figure.axes[0]
        assert "no point is feasible" in ends.get_title()
        drawn = {line.get_label(): line.get_ydata() for line in ends.lines}
        assert drawn["lower bound"][-1] == 0.25
        assert ("largest side constraint" in drawn) == (trace is some)
    early = sc.Trace(np.full(2, np.inf), bound, passes, ("polish", "polish"))
    figure = sc.plot_trace(without_a_value(sc.Status.ITERATION_LIMIT, early, 0.25))
    figure.savefig(tmp_path / "trace.png")
    ends, gaps = figure.axes[:2]
    assert np.array_equal(ends.lines[0].get_ydata(), bound)
    assert gaps.texts[0].get_text() == "no gap: no feasible point is known"


def test_plot_of_a_trace(tmp_path):
    import matplotlib as mpl

    mpl.use("Agg")
    problem = sc.Problem(sc.Ball(np.array([3.0, 4.0]), 1.0), (), lambda s, z: s @ s)
    solution = sc.solve(problem, rtol=1e-8)
    figure = sc.plot_trace(solution)
    figure.savefig(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 5000
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "value (feasible point)",
        "lower bound",
    ]
    nothing = sc.solve(problem, max_iterations=0)
    with pytest.raises(sc.ProblemError, match="nothing to plot"):
        sc.plot_trace(nothing)
