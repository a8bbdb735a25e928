"""Changed certificates, models and properties are rejected, or the exact truth agrees."""

import collections

import pytest
import rigor_mutations


@pytest.mark.parametrize("count", [66, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutations_are_rejected_or_harmless(count, tmp_path):
    tally = rigor_mutations.run_mutations(count, count, tmp_path)
    answers = sum(tally.values(), collections.Counter())
    assert set(answers) <= {"rejected", "unreadable", "harmless"}, tally
    assert answers["rejected"] > count / 4


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutations_of_trees_are_rejected_or_harmless(count, tmp_path):
    tally = rigor_mutations.run_trees(count, count, tmp_path)
    answers = sum(tally.values(), collections.Counter())
    assert set(answers) <= {"rejected", "unreadable", "harmless"}, tally
    assert answers["rejected"] > count / 2
    assert answers["harmless"] > 0


def test_broken_files_get_an_answer(tmp_path):
    found = rigor_mutations.run_fuzz(300, 1, tmp_path)
    assert set(found["answers"]) <= {"rejected", "unreadable", "harmless"}
    assert found["answers"]["unreadable"] > 50
    assert found["answers"]["rejected"] > 50
    assert found["memory at most, MiB more than before"] < 1000
