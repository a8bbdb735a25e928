"""Searches that several processes share."""

import os
import signal
import time
from concurrent.futures import CancelledError
from dataclasses import replace

import numpy as np
import pytest
from exact import dense, random_layers, row_text, smallest_violation, vnnlib
from threadpoolctl import threadpool_info, threadpool_limits

from stagecert.errors import ProblemError
from stagecert.verify import complete, lending, splitting, team, verify
from stagecert.verify import tree as tree_
from stagecert.verify.models import OpenModel
from stagecert.verify.pruning import all_tried, tried
from stagecert.verify.queries import groups_of
from stagecert.verify.team import Lost, Member, Team
from stagecert_check import properties
from stagecert_check.checker import Checker

LOW, HIGH = [-1, -1], [1, 1]


@pytest.fixture(scope="module")
def pair():
    """A team of two, which tests share: processes take a second to start."""
    with Team(2) as found:
        found.members = [Member()]
        yield found


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """Everything is lent as early as possible, and comes back soon; inputs are not split."""
    monkeypatch.setattr(splitting, "LARGEST_DIMENSION", 0)
    monkeypatch.setattr(tree_, "HERE", replace(tree_.HERE, lanes=1))
    monkeypatch.setattr(lending, "FEWEST", 2)
    monkeypatch.setattr(lending, "SLICE", 0.02)


def case(seed: int, slack: float):
    """A network, and a property that holds by that much, or fails if it is negative."""
    layers = random_layers(seed, (2, 6, 4, 3))
    row = np.round(np.random.default_rng(seed).normal(size=3), 2), [0.0, 0.0], 0.0
    least = smallest_violation(layers, LOW, HIGH, [row])
    text = row_text(row[0], row[1], round(least - slack, 9))
    return dense(layers), vnnlib(LOW, HIGH, text, 3)


def shared(seed: int, slack: float, with_whom: Team) -> tuple[complete.Complete, str]:
    """A search of which a team has a part, finished."""
    given, text = case(seed, slack)
    model, wanted = OpenModel(given), properties.load(text)
    _, groups = groups_of(model.network, wanted)
    found = complete.Complete(Checker(model.program, wanted), groups, team=with_whom)
    open_ = [np.ones(len(group.numbers), bool) for group in groups]
    assert found.plant(open_, lambda: False)
    found.share()
    assert found.tree is not None
    for _ in range(20_000):
        found.tree.step()
        if found.tree.done or found.tree.stuck:
            break
    return found, text


@pytest.mark.parametrize("stations", [False, True])
def test_what_is_shared_is_refuted_as_the_checker_says(stations, pair, monkeypatch):
    budget = 1.0 if stations else np.inf
    monkeypatch.setattr(tree_.Tree, "_budget", lambda *_: budget)
    merged, used = [], 0
    real = lending.Lender._merge
    monkeypatch.setattr(
        lending.Lender, "_merge",
        lambda self, loan, grown: (merged.append(grown is not loan.piece), real(self, loan, grown)),
    )  # fmt: skip
    for seed in (4, 6):
        found, text = shared(seed, 1e-3, pair)
        tree = found.tree
        assert tree is not None
        assert tree.done
        assert tree.closed == pytest.approx(1)
        # Every node but the roots is a part of another, and all are of the same root as that.
        parent, child = tree.nodes["parent"], tree.nodes["child"]
        inner = np.flatnonzero(child >= 0)
        assert np.array_equal(parent[child[inner]], inner)
        assert np.array_equal(parent[child[inner] + 1], inner)
        for branches in found.branches():
            used += len(branches.stations)
            checker = Checker(found.program, properties.load(text))
            assert tried(checker, branches).refuted.all()
    assert any(merged)
    assert (used > 0) == stations


def test_a_counterexample_is_not_lost(pair):
    for seed in (4, 5):
        found, _ = shared(seed, -1e-2, pair)
        assert found.tree is not None
        assert not found.tree.done


def test_nodes_of_a_process_that_is_gone_are_still_refuted(monkeypatch):
    monkeypatch.setattr(tree_.Tree, "_budget", lambda *_: np.inf)
    with Team(2) as found:
        found.members = [Member()]
        killed = []
        real = lending.Lender._send

        def send(self, *arguments):
            real(self, *arguments)
            if not killed:
                killed.append(found.members[0]._process.pid)
                os.kill(killed[0], signal.SIGKILL)

        monkeypatch.setattr(lending.Lender, "_send", send)
        search, text = shared(4, 1e-3, found)
        assert killed
        assert found.members == []
    assert search.tree is not None
    assert search.tree.done
    for branches in search.branches():
        assert tried(Checker(search.program, properties.load(text)), branches).refuted.all()


def test_what_is_lent_can_be_had_back_at_once(pair, monkeypatch):
    monkeypatch.setattr(tree_.Tree, "_budget", lambda *_: np.inf)
    given, text = case(4, 1e-3)
    model, wanted = OpenModel(given), properties.load(text)
    _, groups = groups_of(model.network, wanted)
    found = complete.Complete(Checker(model.program, wanted), groups, team=pair)
    assert found.plant([np.ones(1, bool)], lambda: False)
    found.share()
    tree = found.tree
    assert tree is not None
    for _ in range(1000):
        tree.step()
        assert not tree.done
        assert tree.lender is not None
        if tree.lender.loans:
            break
    lent = tree.lender.loans[0].piece.rows["node"]
    found.gather(0.0)
    assert tree.lender.loans == []
    assert len(lent)
    while not tree.done:
        tree.step()
    for branches in found.branches():
        assert tried(Checker(found.program, wanted), branches).refuted.all()


def test_the_only_station_that_waits_stays(pair, monkeypatch):
    monkeypatch.setattr(tree_.Tree, "_budget", lambda *_: 1.0)
    given, text = case(4, 1e-3)
    model, wanted = OpenModel(given), properties.load(text)
    _, groups = groups_of(model.network, wanted)
    found = complete.Complete(Checker(model.program, wanted), groups)
    assert found.plant([np.ones(1, bool)], lambda: False)
    tree = found.tree
    assert tree is not None
    while not tree.plots:
        tree.step()
    plot = tree.plots[0]
    plot.fields = {name: np.repeat(x, 4, axis=0) for name, x in plot.fields.items()}
    tree.plots = [plot]
    tree.stack.keep(np.zeros(len(tree.stack), bool))
    lender = lending.Lender(tree, pair)
    lender.tend()
    assert lender.loans == []
    assert tree.plots == [plot]


def test_several_trees_are_tried_as_each_alone(pair, monkeypatch):
    monkeypatch.setattr(tree_, "STEPS_A_NODE", 1e9)
    monkeypatch.setattr("stagecert.verify.pruning.SHARED", 1)
    layers = random_layers(7, (2, 6, 4, 3))
    rows = [([1.0, -0.5, 0.25], [0.0, 0.0], 0.0), ([-0.5, 1.0, 0.5], [0.0, 0.0], 0.0)]
    texts = []
    for row in rows:
        least = smallest_violation(layers, LOW, HIGH, [row])
        texts.append(f"(and {row_text(row[0], row[1], round(least - 0.01, 9))})")
    text = vnnlib(LOW, HIGH, f"(or {' '.join(texts)})", 3)
    model, wanted = OpenModel(dense(layers)), properties.load(text)
    _, groups = groups_of(model.network, wanted)
    found = complete.Complete(Checker(model.program, wanted), groups)
    assert found.plant([np.ones(len(group.numbers), bool) for group in groups], lambda: False)
    assert found.tree is not None
    while not found.tree.done:
        found.tree.step()
    trees = found.branches()
    assert len(trees) == 2
    assert all(tree.stations for tree in trees)
    alone = [tried(Checker(found.program, wanted), tree) for tree in trees]
    for with_whom in (None, pair):
        checker = Checker(found.program, wanted)
        together = all_tried(checker, trees, team=with_whom)
        for one, other in zip(alone, together, strict=True):
            assert np.array_equal(one.refuted, other.refuted)
            np.testing.assert_allclose(one.bounds, other.bounds, rtol=1e-9, atol=1e-12)
        assert len(checker.remembered()) == sum(tree.leaves for tree in trees)
    # What was accepted before is not asked again.
    checker = Checker(found.program, wanted)
    accepted = {tree.case: one.refuted & (one.bounds > one.bounds.min())
                for tree, one in zip(trees, alone, strict=True)}  # fmt: skip
    again = all_tried(checker, trees, accepted=accepted)
    for one, other in zip(alone, again, strict=True):
        assert np.array_equal(one.refuted, other.refuted)
    left = sum(int(np.sum(~some)) for some in accepted.values())
    assert len(checker.remembered()) == left < sum(tree.leaves for tree in trees)


def test_a_verification_in_two_processes(monkeypatch):
    monkeypatch.setattr(team, "ALONE", 0.0)
    model, text = case(4, 1e-3)
    found = verify(model, text, 120, processes=2)
    assert (found.answer, found.checked) == ("unsat", True), found.reason
    model, text = case(4, -1e-2)
    assert verify(model, text, 120, processes=2).answer == "sat"


def test_errors_come_back_and_processes_end():
    with Team(2) as found:
        found.members = [member] = [Member()]
        with pytest.raises(ZeroDivisionError):
            member.ask(divmod, 1, 0).result()
        assert member.ask(divmod, 7, 2).result() == (3, 1)
        # What is printed there does not end up among the answers.
        assert member.ask(print, "heard").result() is None
        assert found.deal(divmod, lambda k, n: (10 * n, 3 + k), lambda: False) == [(6, 2), (5, 0)]
        process = member._process
        sleeping, waiting = member.ask(time.sleep, 60), member.ask(time.sleep, 60)
        while not sleeping.running():
            time.sleep(0.01)
    assert process.poll() is not None
    with pytest.raises(Lost):
        sleeping.result()
    with pytest.raises(CancelledError):
        waiting.result()


@pytest.mark.parametrize("said", [None, "2"])
def test_small_products_use_one_thread_unless_somebody_says_otherwise(said, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if said:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", said)
    seen = []

    def threads() -> set[int]:
        return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

    model, text = case(4, -1e-2)
    with threadpool_limits(2, "blas"):
        before = threads()
        verify(model, text, progress=lambda _: seen.append(threads()))
        assert threads() == before
    assert seen
    assert all(found == (before if said else {1}) for found in seen)


def test_numbers_of_processes_are_looked_at():
    model, text = case(4, 1e-3)
    with pytest.raises(ProblemError, match="processes must be at least 1"):
        verify(model, text, processes=0)
