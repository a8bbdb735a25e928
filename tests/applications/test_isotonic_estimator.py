"""The estimator is a good citizen of scikit-learn, and its predictions are monotone."""

import sys
import warnings
from typing import Any, cast

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import SkipTestWarning
from sklearn.isotonic import IsotonicRegression as SklearnIsotonic
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

from stagecert import ProblemError
from stagecert.applications import isotonic
from stagecert.applications.isotonic import IsotonicRegression


def data(count=300, features=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((count, features))
    return X, X.sum(1) + rng.normal(0, 0.3, count)


@pytest.mark.parametrize(
    "model",
    [
        IsotonicRegression(),
        IsotonicRegression(loss="absolute"),
        IsotonicRegression(loss="huber", increasing=False),
        IsotonicRegression(engine="dual", rtol=1e-12, extension="lower"),
    ],
    ids=["squared", "absolute", "huber", "dual"],
)
def test_check_estimator(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)  # checks that need pandas
        # One feature may be a plain list, as scikit-learn's own estimator takes it.
        check_estimator(model, expected_failed_checks={"check_fit1d": "1-d X is one feature"})


@pytest.mark.parametrize("extension", ["lower", "middle", "upper"])
@pytest.mark.parametrize("increasing", [True, False, [1, -1, 1]])
def test_predictions_are_monotone_and_agree_with_the_fit(extension, increasing):
    X, y = data(features=3)
    signs = np.where(increasing, 1, -1) if isinstance(increasing, bool) else np.array(increasing)
    X = X * signs
    model = IsotonicRegression(extension=extension, increasing=increasing).fit(X, y)
    assert np.array_equal(model.predict(X), model.fitted_)
    squares = float(np.sum((model.fitted_ - y) ** 2))
    assert model.objective_ == pytest.approx(squares, rel=1e-12)
    assert model.bound_ <= squares
    assert model.gap_ == model.objective_ - model.bound_
    new = np.random.default_rng(1).uniform(-0.2, 1.2, (300, 3)) * signs
    below = np.all((new * signs)[:, None] <= (new * signs)[None], axis=2)
    predicted = model.predict(new)
    assert below.sum() > len(new)
    assert np.all(predicted[:, None][below.any(1)] >= model.fitted_.min())
    i, j = np.nonzero(below)
    assert np.all(predicted[i] <= predicted[j])


def test_weights_count_as_copies_and_zeros_as_absent():
    X, y = data(120)
    weight = np.random.default_rng(2).integers(0, 4, 120)
    weighted = IsotonicRegression(loss="huber", delta=0.2).fit(X, y, sample_weight=weight)
    again: Any = clone(weighted)
    copies = again.fit(np.repeat(X, weight, axis=0), np.repeat(y, weight))
    assert weighted.objective_ == pytest.approx(copies.objective_, rel=1e-9)
    np.testing.assert_allclose(weighted.predict(X), copies.predict(X), atol=1e-7)


def test_comparisons_as_order():
    pairs = np.array([(0, 1), (1, 2), (0, 3), (3, 2)])
    X = np.array([[0], [2], [1], [2], [0]])
    model = IsotonicRegression(order=pairs).fit(X, [1.0, 2.0, 5.0, 4.0, 3.0])
    # Node 3 has no sample: halfway between the nodes below and above it.
    low, high = model.predict([[0]])[0], model.predict([[2]])[0]
    assert low == 2.0
    assert high == pytest.approx(11 / 3)
    assert model.predict([[3]])[0] == pytest.approx((low + high) / 2)
    with pytest.raises(ProblemError, match=r"X\[1, 0\] = 7.0"):
        model.predict([[0], [7]])
    with pytest.raises(ProblemError, match="cycle"):
        IsotonicRegression(order=[(0, 1), (1, 0)]).fit(X, np.zeros(5))


def test_losses_can_be_searched_over():
    X, y = data(150)
    search = GridSearchCV(IsotonicRegression(), {"loss": ["squared", "huber"]}, cv=3)
    search.fit(X, y)
    assert search.best_score_ > 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(order="sideways"), "order = 'sideways'"),
        (dict(increasing=[1, 1, 1]), "increasing"),
        (dict(increasing=[1, 0]), "increasing"),
        (dict(extension="spline"), "Unknown extension 'spline'"),
        (dict(extension="linear"), "for one feature"),
        (dict(order=[(0, 1)]), "X has 2 columns"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    X, y = data(20)
    with pytest.raises(ProblemError, match=message):
        IsotonicRegression(**arguments).fit(X, y)


def test_bad_entries_are_named():
    X, y = data(20)
    X[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"X\[3, 1\]"):
        IsotonicRegression().fit(X, y)
    X, y = data(20)
    y[4] = np.inf
    with pytest.raises(ValueError, match=r"y\[4\]"):
        IsotonicRegression().fit(X, y)
    X, y = data(20)
    with pytest.raises(ProblemError, match=r"sample_weight\[5\] = -1.0"):
        IsotonicRegression().fit(X, y, sample_weight=np.where(np.arange(20) == 5, -1.0, 1.0))
    with pytest.raises(ProblemError, match="sample_weight has shape"):
        IsotonicRegression().fit(X, y, sample_weight=np.ones(19))


def test_one_feature_may_be_a_plain_list():
    """As scikit-learn's own estimator takes it, and with its answers."""
    draw = np.random.default_rng(5)
    x, y = draw.random(30), draw.random(30)
    ours = IsotonicRegression().fit(x, y)
    theirs = SklearnIsotonic(out_of_bounds="clip").fit(x, y)
    new = np.linspace(-0.2, 1.2, 40)
    np.testing.assert_allclose(ours.predict(new), theirs.predict(new), atol=1e-9)
    np.testing.assert_allclose(ours.predict(new[:, None]), ours.predict(list(new)))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_direction_is_found_as_scikit_learn_finds_it(sign):
    draw = np.random.default_rng(6)
    x = draw.random(40)
    y = sign * x + 0.1 * draw.normal(size=40)
    ours = IsotonicRegression(increasing="auto").fit(x, y)
    theirs = SklearnIsotonic(increasing=cast(Any, "auto"), out_of_bounds="clip").fit(x, y)
    assert ours.increasing_ == theirs.increasing_ == (sign == 1)
    np.testing.assert_allclose(ours.predict(x), theirs.predict(x), atol=1e-9)
    both = IsotonicRegression(increasing=["auto", -1]).fit(np.c_[x, x], y)
    assert both.increasing_ == [sign == 1, False]


def test_a_feature_without_a_direction_compares_nothing_across():
    """The fit is that of each group by itself."""
    draw = np.random.default_rng(7)
    x, group = draw.random(30), draw.integers(0, 3, 30).astype(float)
    y = x * (group - 1) + 0.1 * draw.normal(size=30)
    model = IsotonicRegression(increasing=[True, None]).fit(np.c_[x, group], y)
    for one in range(3):
        mine = group == one
        alone = SklearnIsotonic().fit(x[mine], y[mine])
        np.testing.assert_allclose(model.fitted_[mine], alone.predict(x[mine]), atol=1e-7)
    assert model.increasing_ == [True, None]


@pytest.mark.parametrize("increasing", [[True], [True, True, True], [], ["up", True], "down"])
def test_directions_of_the_wrong_kind_or_number(increasing):
    with pytest.raises(ProblemError, match="increasing"):
        IsotonicRegression(increasing=increasing).fit(np.eye(2), [0.0, 1.0])


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "stagecert.applications.isotonic.estimator")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r"stagecert\[isotonic\]"):
        isotonic.IsotonicRegression  # noqa: B018


def test_what_coordinatewise_returns_is_no_order():
    with pytest.raises(ProblemError, match=r"not a tuple.*fit\(y, order, node=node\)"):
        isotonic.fit(np.zeros(2), cast(Any, isotonic.coordinatewise(np.eye(2))))
