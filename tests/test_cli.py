"""The command-line program and the trace plot."""

import json

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
    constraints = [fit[1:] >= fit[:-1], fit[:, 1:] >= fit[:, :-1], fit <= 3, fit[0, 0] >= -3]
    truth = cp.Problem(cp.Minimize(cp.sum_squares(fit - target)), constraints)
    truth.solve(solver=cp.CLARABEL)
    row = rows["isotonic, 6 x 6 grid"]
    assert row["bound"] <= truth.value + 1e-7
    assert row["value"] >= truth.value - 1e-7


def test_table_and_help_are_readable():
    runner = CliRunner()
    assert "demo" in runner.invoke(app, ["--help"]).stdout
    assert runner.invoke(app, ["rubbish"]).exit_code == 2


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
