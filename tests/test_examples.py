"""Examples, doctests and the code on the documentation's pages run, and their answers are true.

Code blocks of a page are run in order, in one namespace. Where a `text` block follows a `python`
block, it is what the code prints, to the letter.
"""

import contextlib
import dataclasses
import doctest
import importlib
import io
import pkgutil
import re
import runpy
from pathlib import Path
from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

import stagecert as sc

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODULES = ["stagecert", *(m.name for m in pkgutil.walk_packages(sc.__path__, "stagecert."))]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Pictures are drawn to files only, whatever display there is.
    monkeypatch.setenv("MPLBACKEND", "agg")


# -- examples -------------------------------------------------------------------------------------


def load(name):
    """The names that an example defines, without running it."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name)


def optimum(objective, constraints):
    """The value of a convex problem by Clarabel."""
    problem = cp.Problem(cp.Minimize(objective), constraints)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    assert problem.status == cp.OPTIMAL
    return float(np.asarray(problem.value))


def assert_solved(solution, truth, rtol=1e-6):
    assert solution.status is sc.Status.GAP_REACHED
    slack = 1e-8 * (1 + abs(truth))
    assert solution.bound - slack <= truth <= solution.value + slack
    assert solution.gap <= 1e-6 + rtol * abs(truth) + slack


def test_every_example_is_tested_and_short():
    tested = {name.removeprefix("test_example_") for name in globals()}
    assert {path.stem for path in EXAMPLES} <= tested
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 60


def test_example_spurious_minimum(capsys):
    solutions = load("spurious_minimum")["main"]()
    assert not solutions["simple"].status.solved
    assert solutions["simple"].value == 0  # still at the tip
    assert solutions["simple"].bound <= -1  # and yet the bound is a bound
    for name in ("safe", "greedy", "auto"):
        assert_solved(solutions[name], -1.0, rtol=1e-4)
    assert capsys.readouterr().out.count("GAP_REACHED") == 3


def test_example_wedge_control(capsys):
    example = load("wedge_control")
    steps, dt = example["STEPS"], example["DT"]
    force, state = cp.Variable(steps), cp.Variable((steps + 1, 2))
    x, v = state[:, 0], state[:, 1]
    smooth, drag = v[:-1] + dt * (force - 0.5 * v[:-1]), 0.1 * dt * (cp.square(v[:-1]) - 4)
    truth = optimum(
        0.05 * cp.sum_squares(force) + cp.sum_squares(state[1:]),
        [
            cp.abs(force) <= 1,
            state[0] == np.array([1.0, 0.0]),
            x[1:] == x[:-1] + dt * v[:-1],
            smooth + drag <= v[1:],
            v[1:] <= smooth - drag,
        ],
    )
    solution = example["main"]()
    assert_solved(solution, truth)
    assert np.abs(solution.blocks[0][:, 1]).max() <= 2
    assert "No violation" in capsys.readouterr().out


def test_example_transformer_digits(capsys):
    example = load("transformer_digits")
    _, images, labels, verdicts = example["main"]()
    text = capsys.readouterr().out
    assert text.count("unsat") == len(images)
    assert text in (ROOT / "docs" / "transformers.md").read_text()
    # Margins of random images and corners, by another program, are above what is proven.
    content = (ROOT / "src" / "stagecert" / "digits" / "transformer.onnx").read_bytes()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(0)
    for image, label, verdict in zip(images, labels, verdicts, strict=True):
        assert verdict.checked
        lead = min(case.proven for case in verdict.cases)
        assert lead > 0
        for move in (
            *draw.uniform(-1, 1, (20, *image.shape)),
            *draw.choice([-1, 1], (20, *image.shape)),
        ):
            moved = np.clip(image + example["RADIUS"] * move, 0, 1).astype(np.float32)
            (logits,) = map(np.asarray, session.run(None, {"image": moved[None]}))
            assert logits[0, label] - np.delete(logits[0], label).max() >= lead - 1e-4


def test_example_control_battery(capsys):
    battery, plan = load("control_battery")["main"]()
    price, end = (np.asarray(battery.params[name]) for name in ("price", "end"))
    energy, power = cp.Variable(97), cp.Variable(96)
    outside = cp.sum_squares(cp.pos(energy[1:] - 9)) + cp.sum_squares(cp.pos(1 - energy[1:]))
    stored = energy[1:] - energy[:-1] - 0.25 * power
    cost = 0.25 * price @ power + 0.005 * cp.sum_squares(power) + 50 * outside
    cost += end @ cp.square(energy[1:] - 5)
    rules = [stored <= -0.0075 * cp.square(power), stored >= -0.12]
    problem = cp.Problem(cp.Minimize(cost), [energy[0] == 5, cp.abs(power) <= 4, *rules])
    truth = problem.solve(solver=cp.CLARABEL)
    assert plan.status is sc.Status.GAP_REACHED
    assert plan.bound - 1e-7 <= truth <= plan.value + 1e-7
    assert "wastes 0.0000 kWh" in capsys.readouterr().out
    assert Path("control_battery.png").stat().st_size > 10_000


def test_example_control_receding(capsys):
    example = load("control_receding")
    runs = example["main"]()
    (states, plans), (again, _) = runs["warm"], runs["cold"]
    assert all(plan.status is sc.Status.GAP_REACHED for plan in plans)
    # The same plans, up to the gap, whatever they started from.
    np.testing.assert_allclose(states, again, atol=0.02)
    late = np.abs(states[80:] - example["target"](np.arange(80, 151)))[:, :2]
    assert late.mean() < 0.3
    assert capsys.readouterr().out.count("steps a plan") == 2
    assert Path("control_receding.png").stat().st_size > 10_000


def test_example_isotonic(capsys):
    example = load("isotonic")
    y = example["observations"]()
    fit = cp.Variable(y.shape)
    grows = [fit[1:] >= fit[:-1], fit[:, 1:] >= fit[:, :-1]]
    assert_solved(example["main"](), optimum(cp.sum_squares(fit - y), grows))
    assert "Solution" in capsys.readouterr().out


def test_example_isotonic_surface(capsys):
    example = load("isotonic_surface")
    *_, models = example["main"]()
    new = np.random.default_rng(1).random((200, 2))
    spread = models["90 % quantile"].predict(new) - models["10 % quantile"].predict(new)
    assert np.mean(np.abs(models["mean"].predict(new) - example["truth"](new))) < 0.1
    assert spread.mean() > 0.3
    assert all(m.status_ is sc.Status.GAP_REACHED for m in models.values())
    assert Path("isotonic_surface.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("at least") == 3


def test_example_isotonic_cars():
    if (answer := load("isotonic_cars")["main"]()) is None:
        pytest.skip("the data are not here; STAGECERT_DATA names their folder")
    X, y, models = answer
    fit = cp.Variable(len(y))
    i, j = np.nonzero(np.all(X[:, None] <= X[None], axis=2))
    for name, loss in (("squared", cp.sum_squares), ("absolute", cp.norm1)):
        truth = optimum(loss(fit - y), [fit[i] >= fit[j]])
        assert models[name].objective_ == pytest.approx(truth, rel=1e-6)
        assert models[name].bound_ <= truth * (1 + 1e-8)


def test_example_isotonic_houses():
    if (answer := load("isotonic_houses")["main"]()) is None:
        pytest.skip("the data are not here; STAGECERT_DATA names their folder")
    _, y, models = answer
    for level, model in models.items():
        assert model.status_ is sc.Status.GAP_REACHED
        # The share of targets below and at a quantile's fit surround its level.
        assert np.mean(y < model.fitted_) <= level <= np.mean(y <= model.fitted_)


def test_example_isotonic_diamonds():
    if (answer := load("isotonic_diamonds")["main"]()) is None:
        pytest.skip("the data are not here; STAGECERT_DATA names their folder")
    X, price, model = answer
    assert model.status_ is sc.Status.GAP_REACHED
    order = np.lexsort(X.T)
    i, j = order[:-1], order[1:]
    comparable = np.all(X[i] <= X[j], axis=1)
    assert np.all((model.fitted_[i] <= model.fitted_[j])[comparable])
    assert np.sum((model.fitted_ - np.log(price)) ** 2) == pytest.approx(model.objective_)
    assert model.objective_ < 0.01 * len(price) * np.var(np.log(price))


def test_example_robust_digits(capsys):
    classify, images, labels, results = load("robust_digits")["main"]()
    rows = sc.networks.margins(labels, 10)
    draw = np.random.default_rng(0)
    for radius, result in results.items():
        moved = images[:, None] + draw.uniform(-radius, radius, (20, 200, 64))
        outputs = np.asarray(classify(np.clip(moved, 0, 1)))
        seen = np.einsum("btk,bnk->btn", rows, outputs).min(axis=-1)
        assert np.all(result.bound <= seen + 1e-9)
        assert np.all(result.bound <= result.attained)
    proven = {r: int(np.all(x.bound > 0, axis=1).sum()) for r, x in results.items()}
    assert proven[0.01] > proven[0.1]
    assert capsys.readouterr().out.count("proven robust") == 3


def test_example_relu_boxes(capsys):
    problems, solutions = load("relu_boxes")["main"]()
    for problem, solution in zip(problems, solutions, strict=True):
        low, high = problem.inputs.lower, problem.inputs.upper
        before = cp.Variable(low.shape)
        constraints = [low <= before, before <= high]
        for stage in problem.stages:
            weights, bias, slope, height = stage.params
            x, after = weights @ before + bias, cp.Variable(bias.shape)
            constraints += [after >= 0, after >= x, after <= cp.multiply(slope, x) + height]
            before = after
        weights, bias = problem.objective.params
        assert_solved(solution, optimum((weights @ before + bias)[0], constraints))
        # The relaxation is one: the network itself is never below the bound.
        points = np.random.default_rng(0).uniform(low, high, (1000, len(low))).T
        for stage in problem.stages:
            points = np.maximum(stage.params[0] @ points + stage.params[1][:, None], 0)
        assert (weights @ points + bias).min() >= solution.bound
    assert "lower bounds" in capsys.readouterr().out


def test_example_adversarial_mdp(capsys):
    example = load("adversarial_mdp")
    moves, tables, _ = example["data"]()
    mixture = cp.Variable(example["TABLES"])
    later, constraints = np.zeros(example["STATES"]), [mixture >= 0, cp.sum(mixture) == 1]
    for table in tables:
        value = cp.Variable(example["STATES"])
        for a in range(example["ACTIONS"]):
            constraints.append(table[:, a].T @ mixture + moves[a] @ later <= value)
        later = value
    assert_solved(example["main"](), optimum(later[0], constraints))
    assert "Solution" in capsys.readouterr().out
    assert Path("adversarial_mdp.png").stat().st_size > 1000


def test_example_mdp_sensors(capsys):
    process, rewards, found = load("mdp_sensors")["main"]()
    states, actions = process.states, process.actions
    weights = cp.Variable(len(rewards.effects), nonneg=True)
    later, constraints = process.final, [weights <= 1, cp.sum(weights) <= rewards.budget]
    for _ in range(process.horizon):
        value = cp.Variable(states)
        for a in range(actions):
            moves = process.matrix(0)[a * states : (a + 1) * states]
            reward = rewards.nominal[:, a] + rewards.effects[:, :, a].T @ weights
            constraints.append(moves @ later + reward <= value)
        later = value
    problem = cp.Problem(cp.Minimize(later[0]), constraints)
    problem.solve(solver=cp.HIGHS)
    assert_solved(found["robust policy"], problem.value)
    assert found["shortest path"].engine == "backward induction"
    assert capsys.readouterr().out.count("at least") == 2
    assert Path("mdp_sensors.png").stat().st_size > 10_000


# -- doctests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


# -- pages -------------------------------------------------------------------------------------

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(text):
    """(line number, code, what it must print or None) for each python block."""
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != "python":
            continue
        expected = None
        if following is not None and following[1] == "text":
            between = text[fence.end() : following.start()]
            expected = following[2] if not between.strip() else None
        yield text.count("\n", 0, fence.start()) + 1, fence[2], expected


NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?")


def assert_same_output(printed: str, expected: str, where: str) -> None:
    """Equal text, and numbers equal up to two units of their last printed digit.

    Solutions are shown rounded, and a value on the edge of rounding may be shown either way.
    """
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (printed, expected)]
    assert words[0] == words[1], f"{where}: {printed!r} is not {expected!r}"
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True)
    for seen, wanted in pairs:
        digits = len(wanted.partition(".")[2]) if "e" not in wanted else 0
        unit = 10.0**-digits if "." in wanted else 0.0
        assert abs(float(seen) - float(wanted)) <= 2 * unit, f"{where}: {seen}, not {wanted}"


def run_page(page) -> dict[str, Any]:
    """Runs the blocks of a page, compares what they print, and returns the names they define."""
    namespace = {"__name__": "page"}
    for line, code, expected in blocks_of((ROOT / page).read_text(encoding="utf-8")):
        # Blank lines in front, so that a traceback names the line of the page.
        program = compile("\n" * line + code, page, "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)
        if expected is not None:
            assert_same_output(printed.getvalue(), expected, f"{page}, line {line}")
    return namespace


def assert_between(solution, truth):
    slack = 1e-8 * (1 + abs(truth))
    assert solution.status.solved
    assert solution.bound - slack <= truth <= solution.value + slack


def test_readme():
    # Equal parts from both machines: minimise 2 s - 2.5 * 3 log(1 + s), so 1 + s = 3.75.
    assert_between(run_page("README.md")["solution"], 2 * 2.75 - 7.5 * np.log(3.75))


def test_index():
    assert_between(run_page("docs/index.md")["solution"], -1.0625)


def test_tutorial():
    names = run_page("docs/tutorial.md")
    hours, parts, goods = cp.Variable(3), cp.Variable(3), cp.Variable()
    made = [parts <= cp.multiply(names["rates"], cp.log1p(hours)), goods <= parts]
    box = [hours >= 0, hours <= 8]
    for price, solution in zip(names["prices"], names["batch"], strict=True):
        assert_between(solution, optimum(cp.sum(hours) - price * goods, [*made, *box]))
    orders, stock = cp.Variable(6), cp.Variable(7)
    keeping = 0.4 * cp.pos(stock[1:]) + 3.0 * cp.neg(stock[1:])
    truth = optimum(
        cp.sum(orders) + 0.5 * cp.sum_squares(orders) + cp.sum(keeping),
        [
            orders >= 0,
            orders <= 4,
            stock[0] == 2,
            stock[1:] == stock[:-1] + orders - names["demand"],
        ],
    )
    assert_between(names["solution"], truth)
    bought, sold, energy = cp.Variable(24), cp.Variable(24), cp.Variable(25)
    limits = [bought >= 0, bought <= 2, sold >= 0, sold <= 2, energy[0] == 1]
    limits += [energy[1:] == energy[:-1] + 0.95 * bought - sold / 0.95]
    limits += [energy[1:] >= 0, energy[1:] <= 6]
    assert_between(names["plan"], optimum(names["price"] @ (bought - sold), limits))


@pytest.mark.parametrize("page", ["networks", "activations", "properties", "sweeps", "interop"])
def test_pages_of_networks(page):
    run_page(f"docs/{page}.md")


def test_page_for_users_of_other_tools():
    names = run_page("docs/coming-from.md")
    # For each machine, minimise s - 6 log(1 + s): s = 5.
    assert_between(names["solution"], 2 * (5 - 6 * np.log(6)))


def test_page_of_markov_decision_processes():
    names = run_page("docs/mdp.md")
    assert names["found"].gap <= 1e-6 * names["found"].bound


def test_page_of_optimal_control():
    names = run_page("docs/control.md")
    assert names["plan"].gap <= 1e-6 * names["plan"].bound + 1e-9


def test_page_of_isotonic_regression():
    names = run_page("docs/isotonic.md")
    assert names["model"].gap_ <= 1e-6 * names["model"].bound_


def test_extending():
    names = run_page("docs/extending.md")
    assert_between(names["solution"], 2.25)
    solutions = zip(names["limits"], names["batch"], names["rough"], strict=True)
    for limit, solution, rough in solutions:
        s = cp.Variable(3)
        loss = 0.5 * cp.sum_squares(names["features"] @ s - names["target"])
        truth = optimum(loss, [cp.norm1(s) <= limit])
        assert_between(solution, truth)
        assert_between(rough, truth)
    assert names["one"].stats.trace.solver[-1] == "frank_wolfe"
    assert sc.check(names["lasso"](0.3))
    check_l1_ball(names["L1Ball"])


def check_l1_ball(l1_ball):
    rng = np.random.default_rng(0)
    middle, radius = rng.normal(size=4), 1.5
    ball = l1_ball(middle, radius)

    def inside(point):
        return jnp.sum(jnp.abs(point - middle)) <= radius + 1e-12

    for key in jax.random.split(jax.random.key(0), 20):
        sample = ball.sample(key)
        point, gradient = rng.normal(0, 3, 4), rng.normal(size=4)
        nearest, lowest = ball.project(point), ball.minimise_linear(jnp.asarray(gradient))
        assert inside(sample)
        assert inside(nearest)
        assert inside(lowest)
        # What characterises a projection onto a convex set.
        assert (point - nearest) @ (sample - nearest) <= 1e-12
        assert gradient @ lowest <= gradient @ sample + 1e-12
    np.testing.assert_allclose(ball.project(middle), middle)
    with pytest.raises(sc.ProblemError, match="radius"):
        l1_ball(middle, -1.0).validate()


def test_options_on_the_page_of_solvers():
    """The defaults in the table of options are those of the class."""
    text = (ROOT / "docs/solvers.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE))
    fields: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(sc.solvers.Polish)
    }
    assert {name: float(value) for name, value in table.items()} == {
        name: float(value) for name, value in fields.items() if name not in ("patience", "progress")
    }
