"""The baselines of the paper's experiments against independent truth: no broken opponents."""

import functools
import json
import stat
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, cast

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagecert as sc
from benchmarks.paper.methods import METHODS, PaperProblems, Stop, base, driver, named, relaxed
from benchmarks.paper.methods.deepverify import Adam
from benchmarks.paper.methods.nonconvex import Fista
from benchmarks.paper.methods.pdhg import onto_hull
from benchmarks.paper.methods.relaxed import least_on_graph
from stagecert import networks
from stagecert.reformulation import Point
from stagecert.solvers import Backtracking

sys.path.insert(0, str(Path(__file__).parents[1] / "networks"))
import models


@functools.cache
def problems_of(kind) -> PaperProblems:
    """Two boxes, two targets each."""
    random = np.random.default_rng(0)
    if kind == "conv":
        network = models.conv_net(random, size=4, channels=(1, 2, 2))
    else:
        network = models.dense(models.random_layers(random, (4, 6, 5, 3)), activation=kind)
    centre = random.normal(size=(2, *network.input_shape))
    labels = random.integers(0, 3, 2)
    return PaperProblems(kind, network, centre - 0.4, centre + 0.4, networks.margins(labels, 3))


def _softplus_optimum(network, low, high, row, intervals):
    *forms, last = models.affine_forms(network)
    x = cp.Variable(last.matrix.shape[1])
    constraints = [x[: len(low)] >= low, x[: len(low)] <= high]
    for form, (l, u) in zip(forms, intervals, strict=True):
        a, z = form.matrix @ x + form.constant, x[form.variables]
        slope = (np.logaddexp(u, 0) - np.logaddexp(l, 0)) / (u - l)
        constraints += [z >= cp.logistic(a), z <= cp.multiply(slope, a - l) + np.logaddexp(l, 0)]
    cost = row @ (last.matrix @ x + last.constant)
    found = cp.Problem(cp.Minimize(cost), constraints).solve(solver="CLARABEL")
    return float(np.asarray(found))


@functools.cache
def optima_of(kind) -> np.ndarray:
    """The relaxation's optima, by programs that are stated here and in tests/networks/models.py."""
    given = problems_of(kind)
    found = networks.bound(
        given.network, given.lower, given.upper, method="ibp", intermediate="ibp"
    )
    optima = np.zeros(given.shape)
    for image, target in np.ndindex(*given.shape):
        intervals = [(l[image].ravel(), u[image].ravel()) for l, u in found.intermediate]
        program = _softplus_optimum if kind == "softplus" else models.triangle_program
        low, high = given.lower[image].ravel(), given.upper[image].ravel()
        optima[image, target] = program(
            given.network, low, high, given.rows[image, target], intervals
        )
    return optima


def _assert_encloses(outcome, optima, slack=1e-6):
    assert np.all(outcome.bound <= optima + slack)
    if outcome.value is not None:
        assert np.all(outcome.value >= optima - slack)


# -- converged values are the optimum -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("relu", "reduced"),
        ("softplus", "reduced"),
        pytest.param("conv", "reduced", marks=pytest.mark.slow),
        pytest.param("relu", "standard", marks=pytest.mark.slow),
        pytest.param("softplus", "standard", marks=pytest.mark.slow),
    ],
)
def test_deepverify_converges_to_the_optimum(kind, form):
    adam = Adam(first=2e-2, period=500)
    method = named("deepverify", form=form, precision="float64", adam=adam)
    outcome = method.run(problems_of(kind), Stop(iterations=2000))
    _assert_encloses(outcome, optima_of(kind))
    assert outcome.bound == pytest.approx(optima_of(kind), abs=2e-3)
    assert outcome.value is None


@pytest.mark.parametrize("kind", [pytest.param("relu", marks=pytest.mark.slow), "softplus", "conv"])
def test_pdhg_converges_to_the_optimum(kind):
    outcome = named("pdhg", precision="float64").run(
        problems_of(kind), Stop(rtol=1e-5, iterations=5000)
    )
    _assert_encloses(outcome, optima_of(kind))
    assert outcome.early.all()
    assert outcome.bound == pytest.approx(optima_of(kind), rel=2e-5, abs=1e-6)
    assert outcome.value == pytest.approx(optima_of(kind), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["paper", pytest.param("paper_fixed", marks=pytest.mark.slow)])
def test_the_papers_method_converges_on_smooth_problems(name):
    method = named(name, precision="float64")
    stop = Stop(rtol=1e-6, iterations=200)
    outcome = method.run(problems_of("softplus"), stop, trace=True)
    _assert_encloses(outcome, optima_of("softplus"))
    assert outcome.early.all()
    assert outcome.bound == pytest.approx(optima_of("softplus"), rel=2e-6, abs=1e-7)
    trace = outcome.trace
    gap = trace.value[-1] - trace.bound[-1]
    assert np.all(gap <= 1e-6 * np.abs(trace.bound[-1]))
    # Distances to the ends of intervals: softplus bends everywhere, so all neurons are counted.
    running = [np.sum(outcome.iterations >= k) for k in trace.iteration]
    assert trace.distances.sum(axis=1).tolist() == [(6 + 5) * count for count in running]
    assert np.all((trace.least >= 0) & (trace.least <= 0.5))
    # At the start, inputs are at the centre of their box, and so is the first layer.
    assert trace.distances[0, -1] >= 6 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "paper_fixed", "ours_traced"])
@pytest.mark.parametrize("kind", ["relu", "conv"])
def test_nonconvex_methods_enclose_the_optimum(name, kind):
    outcome = named(name).run(problems_of(kind))
    _assert_encloses(outcome, optima_of(kind), 1e-5)
    assert outcome.value == pytest.approx(optima_of(kind), abs=2e-2)


@pytest.mark.parametrize(
    ("name", "kind", "accuracy"),
    [
        ("clarabel", "softplus", 1e-6),
        pytest.param("clarabel", "relu", 1e-6, marks=pytest.mark.slow),
        ("highs", "conv", 1e-7),
        ("scs", "relu", 1e-3),
    ],
)
def test_solvers_reach_the_optimum(name, kind, accuracy):
    method = named(name)
    assert method.refusal(problems_of(kind)) is None
    method.prepare(problems_of(kind))
    outcome = method.run(problems_of(kind), Stop(seconds=60.0))
    assert outcome.bound == pytest.approx(optima_of(kind), abs=accuracy)
    assert outcome.about["statuses"] == {"optimal": 4}


@pytest.mark.parametrize("name", ["ibp", "backward"])
def test_methods_without_search_are_below_the_optimum(name):
    outcome = named(name).run(problems_of("relu"))
    assert np.all(outcome.bound <= optima_of("relu"))
    assert not outcome.iterations.any()


@pytest.mark.slow
def test_ours_is_within_its_tolerance():
    outcome = named("ours").run(problems_of("relu"), Stop(rtol=1e-3))
    _assert_encloses(outcome, optima_of("relu"))
    assert outcome.early.all()
    assert outcome.bound == pytest.approx(optima_of("relu"), rel=1.1e-3)


# -- settings are the paper's ---------------------------------------------------------------------


def test_adam_is_the_papers():
    adam = Adam()
    sizes = [float(adam.size(k)) for k in (0, 99, 100, 199, 200, 300, 400, 499)]
    assert sizes == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-6], rel=1e-6)
    gradient = jnp.array([3.0, -1e-3, 0.0])
    zeros = jnp.zeros(3)
    move, mean, square = adam.update(0, gradient, zeros, zeros)
    # The first step of Adam is its size in the direction of the gradient's sign.
    assert move == pytest.approx([1e-2, -1e-2, 0], rel=1e-4)
    move, *_ = adam.update(100, gradient, mean, square)
    one, two = 0.9 * 0.1 + 0.1, 0.999 * 0.001 + 0.001
    expected = 1e-3 * one * 3 / (1 - 0.9**101) / (3 * np.sqrt(two / (1 - 0.999**101)))
    assert float(move[0]) == pytest.approx(expected, rel=1e-6)
    assert cast(Any, METHODS["deepverify"]).limit == 500


def test_the_line_search_is_the_papers():
    search = Backtracking()
    assert (search.first, search.shrink, search.grow, search.floor) == (100, 0.8, 1.5, 1e-5)
    assert cast(Any, METHODS["paper"]).limit == 50
    stop = Stop()
    assert (stop.rtol, stop.atol) == (1e-2, 0)


def stepped(solver, problem, state):
    """A step after its line search."""
    trial = solver.first_trial(problem, state)
    while trial.open:
        trial = solver.next_trial(problem, trial)
    return solver.step(problem, state, trial)


def test_fista_steps():
    # psi is 1/2 |s|^2 here: a step of size h passes its test if h <= 1.
    problem = sc.Problem(sc.Box(-8 * np.ones(2), 8.0), (), lambda s, z: 0.5 * s @ s)
    solver, start = Fista(), jnp.array([4.0, -2.0])
    state, _ = solver.init(problem, Point(start, ()))
    assert float(state.size) == 100
    state, report = stepped(solver, problem, state)
    trials = int(np.ceil(np.log(100) / np.log(1 / 0.8)))
    size = 100 * 0.8**trials
    assert float(state.size) == pytest.approx(size)
    first = (1 - size) * np.asarray(start)
    assert report.point.inputs == pytest.approx(first)
    # y = x_1 + (t_1 - 1) / t_2 (x_1 - x_0) with t_1 = 1: no momentum yet; t_2 = (1 + 5^.5) / 2.
    assert state.ahead.inputs == pytest.approx(first)
    t_2 = (1 + np.sqrt(5)) / 2
    assert float(state.t) == pytest.approx(t_2)
    state, report = stepped(solver, problem, state)
    assert float(state.size) == pytest.approx(1.5 * size)
    second = (1 - size) * first
    assert report.point.inputs == pytest.approx(second)
    t_3 = (1 + np.sqrt(1 + 4 * t_2**2)) / 2
    assert state.ahead.inputs == pytest.approx(second + (t_2 - 1) / t_3 * (second - first))


def test_the_least_step_is_taken_all_the_same():
    # The steepest slope is 1e6: no step above 1e-6 passes, and none below 1e-5 is tried.
    problem = sc.Problem(sc.Box(-1.0, 1.0), (), lambda s, z: 0.5e6 * s**2)
    state, _ = Fista().init(problem, Point(jnp.array(1e-3), ()))
    state, report = stepped(Fista(), problem, state)
    assert float(state.size) == pytest.approx(1e-5)
    assert float(report.point.inputs) == pytest.approx(1e-3 - 1e-5 * 1e6 * 1e-3)


class Halving(driver.Search):
    """Tries whole numbers from the state on downwards, until one is at most the lane's row."""

    look_every: int = 0
    tries: ClassVar[bool] = True

    def start(self, shared, lane):
        raise NotImplementedError

    def step(self, shared, lane, state, trial):
        raise NotImplementedError

    def bound_of(self, shared, lane, proof):
        raise NotImplementedError

    def first_trial(self, shared, lane, state):
        return Halved(state > lane.row, state, jnp.ones((), int))

    def next_trial(self, shared, lane, trial):
        at = trial.at // 2
        return Halved(at > lane.row, at, trial.count + 1)


class Halved(driver.Trial):
    open: Any
    at: Any
    count: Any


@pytest.mark.parametrize("lanes", [1, 20, 200])
def test_line_searches_end_lane_by_lane(lanes):
    """Also if only some go on: each ends where it would by itself, after as many trials."""
    random = np.random.default_rng(lanes)
    goals = random.choice([1, 2, 4, 60, 900, 1000], lanes, p=[0.02, 0.03, 0.05, 0.1, 0.2, 0.6])
    rows = relaxed.Lane(None, (), (), (), jnp.asarray(goals))  # type: ignore
    state = jnp.full(lanes, 1000)
    trial = driver._searched(Halving(), None, rows, state)  # type: ignore
    expected = []
    for goal in goals:
        at, count = 1000, 1
        while at > goal:
            at, count = at // 2, count + 1
        expected.append((at, count))
    assert not np.asarray(trial.open).any()
    assert list(zip(trial.at.tolist(), trial.count.tolist(), strict=True)) == expected


def test_compilations_inside_of_others_count_once():
    told = base.Compilations()
    for begin, end in ((1, 2), (3, 4), (0, 5), (6, 7), (8, 9), (7.5, 10)):
        told.note(end, end - begin)
    assert told.seconds == pytest.approx(5 + 1 + 2.5)


def test_compilation_is_not_in_the_times():
    """A program is traced and compiled while the watch runs: all but running it is taken off."""
    before = time.perf_counter()
    watch = base.Stopwatch()
    begin = time.perf_counter()

    def slow(x):
        time.sleep(0.5)  # in tracing
        return jax.jit(lambda y: jnp.sin(y) + 1)(x)

    jax.jit(slow)(jnp.ones(3)).block_until_ready()
    end = time.perf_counter()
    seconds = watch.seconds
    after = time.perf_counter()
    assert watch.compiling >= 0.5
    assert end - begin <= seconds + watch.compiling <= after - before


@pytest.mark.parametrize("name", ["paper", "paper_fixed"])
def test_the_papers_variables_are_fractions(name):
    # So the unit in which inputs are measured changes nothing.
    random = np.random.default_rng(2)
    (first, offset), *others = models.random_layers(random, (4, 6, 5, 3))
    centre = random.normal(size=(2, 4))
    rows = networks.margins(random.integers(0, 3, 2), 3)
    outcomes = []
    for unit in (1.0, 1024.0):
        network = models.dense([(first / unit, offset), *others], activation="softplus")
        low, high = unit * (centre - 0.4), unit * (centre + 0.4)
        problems = PaperProblems("units", network, low, high, rows)
        outcomes.append(named(name, precision="float64").run(problems, Stop(rtol=1e-4)))
    one, other = outcomes
    assert one.early.all()
    assert one.iterations.tolist() == other.iterations.tolist()
    assert one.bound == pytest.approx(other.bound, rel=1e-9)
    assert one.value == pytest.approx(other.value, rel=1e-9)


# -- stopping, traces, batches --------------------------------------------------------------------


def test_early_stopping_counts():
    given, optima = problems_of("softplus"), optima_of("softplus")
    target = optima - np.array([[0.2, 0.02], [0.05, -1.0]])
    outcome = named("deepverify").run(given, Stop(target=target, iterations=120), trace=True)
    trace = outcome.trace
    assert trace.iteration.tolist() == list(range(121))
    for place in np.ndindex(*given.shape):
        reached = np.flatnonzero(trace.bound[:, *place] >= target[place])
        expected = reached[0] if len(reached) else 120
        assert outcome.iterations[place] == expected
        assert outcome.early[place] == bool(len(reached))
    assert not outcome.early[1, 1]
    assert np.all(np.diff(trace.bound, axis=0) >= 0)  # the best so far
    assert np.all(np.diff(trace.seconds) >= 0)
    assert trace.value is None


def test_finished_problems_leave_the_batch():
    random = np.random.default_rng(1)
    few = problems_of("relu")
    centre = random.normal(size=(18, 4))
    rows = networks.margins(random.integers(0, 3, 18), 3)
    many = PaperProblems("many", few.network, centre - 0.4, centre + 0.4, rows)
    method = named("deepverify")
    ibp = named("ibp").run(many).bound
    target = np.where(np.arange(36).reshape(18, 2) % 6 == 5, np.inf, ibp + 1e-3)
    together = method.run(many, Stop(target=target, iterations=60))
    assert together.early.sum() >= 27  # so that the batch has been packed
    for part in (slice(0, 2), slice(16, 18)):
        alone = method.run(many[part], Stop(target=target[part], iterations=60))
        assert together.iterations[part].tolist() == alone.iterations.tolist()
        assert together.bound[part] == pytest.approx(alone.bound, abs=1e-6)


def test_time_limit():
    outcome = named("deepverify").run(problems_of("relu"), Stop(seconds=0.0))
    assert not outcome.iterations.any()
    assert np.all(outcome.bound <= optima_of("relu") + 1e-6)


# -- closed forms of one neuron -------------------------------------------------------------------


def _neurons(count=400):
    random = np.random.default_rng(3)
    low = 4 * random.normal(size=count) - 2
    return random, low, low + 6 * np.abs(random.normal(size=count))


def _activation(kind, x):
    return np.maximum(x, 0) if kind == "relu" else np.logaddexp(x, 0)


@pytest.mark.parametrize("kind", ["relu", "softplus"])
def test_least_on_graph(kind):
    random, low, high = _neurons()
    slope, weight = random.normal(size=(2, len(low)))
    found = least_on_graph(kind, *map(jnp.asarray, (slope, weight, low, high)))
    least, best = (np.asarray(x) for x in found)
    x = np.clip(low + (high - low) * np.linspace(0, 1, 4001)[:, None], low, high)
    sampled = np.min(slope * x + weight * _activation(kind, x), axis=0)
    assert np.all(least <= sampled + 1e-12)
    # Between two samples the function falls by at most this much.
    spacing = (high - low) / 4000 * (np.abs(slope) + np.abs(weight))
    assert np.all(least >= sampled - spacing)
    assert least == pytest.approx(slope * best + weight * _activation(kind, best), abs=1e-12)


@pytest.mark.parametrize("kind", ["relu", "softplus"])
def test_nearest_points_of_hulls(kind):
    random, low, high = _neurons()
    n = len(low)
    point = (low + (high - low) * random.uniform(-0.7, 1.7, n), 5 * random.normal(size=n))
    units = tuple(np.exp(random.normal(size=(2, n))))
    a, z = (
        np.asarray(x) for x in onto_hull(kind, point, jnp.asarray(low), jnp.asarray(high), units)
    )
    t = np.linspace(0, 1, 4001)[:, None]
    x = low + (high - low) * t
    bottom = _activation(kind, x)
    top = _activation(kind, low) * (1 - t) + _activation(kind, high) * t
    y = np.clip(point[1], bottom, top)

    def distance(x, y):
        return np.hypot((x - point[0]) / units[0], (y - point[1]) / units[1])

    assert np.all(distance(a, z) <= distance(x, y).min(axis=0) + 1e-9)
    chord = _activation(kind, low) + (a - low) / (high - low) * (
        _activation(kind, high) - _activation(kind, low)
    )
    assert np.all((a >= low - 1e-9) & (a <= high + 1e-9))
    assert np.all((z >= _activation(kind, a) - 1e-9) & (z <= chord + 1e-9))


# -- what is not run, and peers -------------------------------------------------------------------


def test_refusals_say_why():
    tanh = problems_of("tanh")
    assert "tanh" in str(named("deepverify").refusal(tanh))
    assert "linear" in str(named("highs").refusal(problems_of("softplus")))
    assert "no Python" in str(named("jax_verify", python="").refusal(problems_of("relu")))
    assert "SoftPlus" in str(named("auto_lirpa").refusal(problems_of("softplus")))
    random = np.random.default_rng(0)
    wide = models.dense(models.random_layers(random, (2, 600, 3)))
    large = PaperProblems("wide", wide, np.zeros((1, 2)), np.ones((1, 2)), np.ones((1, 1, 3)))
    assert "600 neurons" in str(named("clarabel").refusal(large))
    assert named("clarabel", any_size=True).refusal(large) is None
    with pytest.raises(ValueError, match="Unknown method 'magic'"):
        named("magic")


def test_peers_are_asked_for_the_same_problems(tmp_path):
    """A stand-in for the peer's Python writes down what it was asked."""
    record = {"settings": [{"bounds": [[1.0, 2.0]], "values": [[3.0, 4.0]], "wall_seconds": 0.5}]}
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n'
        'while [ "$1" != --out ]; do shift; done\n'
        f"echo '{json.dumps(record)}' > \"$2\"\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    given = PaperProblems(
        "x", problems_of("relu").network, np.zeros((1, 4)), np.ones((1, 4)), np.ones((1, 2, 3)),
        Path("net.onnx"), Path("data.npz"),
    )  # fmt: skip
    outcome = named("jax_verify", python=str(python)).run(given, Stop(iterations=7))
    asked = (tmp_path / "asked").read_text()
    for words in (
        "peers.jax_verify",
        "--network net.onnx",
        "--images 1",
        "--eps 8/255",
        "--steps 7",
        "--precision float64",
    ):
        assert words in asked
    assert outcome.bound.tolist() == [[1.0, 2.0]]
    assert outcome.value.tolist() == [[3.0, 4.0]]
    assert outcome.seconds == 0.5
    assert outcome.iterations.tolist() == [[7, 7]]
