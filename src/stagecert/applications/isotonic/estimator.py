"""The scikit-learn estimator, and prediction between the points of a fit.

Every monotone function through the fitted points lies between two: the largest fitted value below
a point, and the smallest above it. "lower" and "upper" are these (cut off at the least and greatest
fitted value, where nothing is below or above), "middle" is halfway, which is monotone too.
"""

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.isotonic import check_increasing
from sklearn.utils.validation import check_is_fitted, validate_data

from stagecert.applications.isotonic.fitting import fit
from stagecert.applications.isotonic.orders import Order, coordinatewise, from_comparisons
from stagecert.applications.isotonic.sweeps import running_maximum, running_minimum
from stagecert.errors import ProblemError

EXTENSIONS = ("auto", "linear", "lower", "upper", "middle")


class IsotonicRegression(RegressorMixin, BaseEstimator):
    """Regression by a function that grows with every feature, with a certificate of its fit.

    Args:
        order: "coordinatewise": a sample is below another if it is in every feature. With one
            feature that is a total order. Or comparisons, an array of shape (m, 2) whose rows
            (i, j) say that the value at node i is at most that at node j; `X` then has one column,
            the node of each sample.
        increasing: True, False, or "auto", which is the sign of Spearman's correlation with y, as
            in scikit-learn; or one of these (or 1 and -1) for each feature. None is for a feature
            without a direction: samples that differ in it are not compared.
        loss: "squared", "absolute", "quantile", "huber", "logistic" (targets between 0 and 1, the
            prediction is a probability), "poisson" (the prediction is a rate), or a JAX function
            (prediction, target) -> loss, convex in the prediction.
        quantile: the level, for the loss "quantile".
        delta: where the loss "huber" turns linear.
        y_min, y_max: bounds on the predictions.
        extension: how to predict between samples: "linear" (one feature only) interpolates; "lower"
            and "upper" are the least and the greatest monotone function through the fit, "middle"
            is halfway. "auto" is "linear" for one feature and "middle" otherwise. All are monotone
            and agree with the fit at the samples.
        rtol, atol: the gap asked for, relative to the bound and absolute. By default atol is a
            thousandth of rtol times the loss of a constant, for fits that are (almost) perfect.
        engine: "auto", "pava", "dual", "cuts" (exact) or "stagewise"; see
            `stagecert.applications.isotonic.fit`.
        max_iter, time_limit: limits on the steps and the seconds of "dual" and "stagewise".

    Attributes:
        increasing_: the direction that was found or given; a list if there are several features.
        objective_: the weighted sum of the losses at the fit.
        bound_: a proven lower bound on the objective of every isotonic fit.
        gap_: objective_ - bound_.
        engine_: which engine found the fit.
        status_: why it stopped, a `stagecert.Status`.
        fitted_: the fit at the samples.
        n_iter_: steps of the engine.
        n_comparisons_: how many comparisons the reduced order has.

    >>> import numpy as np
    >>> from stagecert.applications.isotonic import IsotonicRegression
    >>> X = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> model = IsotonicRegression().fit(X, [0.0, 3.0, 1.0, 2.0])
    >>> model.predict(X).tolist()
    [0.0, 2.5, 1.0, 2.5]
    >>> model.gap_ < 1e-9
    True
    """

    def __init__(
        self,
        *,
        order: Any = "coordinatewise",
        increasing: Any = True,
        loss: Any = "squared",
        quantile: float = 0.5,
        delta: float = 1.0,
        y_min: float | None = None,
        y_max: float | None = None,
        extension: str = "auto",
        rtol: float = 1e-6,
        atol: float | None = None,
        engine: str = "auto",
        max_iter: int = 20_000,
        time_limit: float | None = None,
    ):
        self.order = order
        self.increasing = increasing
        self.loss = loss
        self.quantile = quantile
        self.delta = delta
        self.y_min = y_min
        self.y_max = y_max
        self.extension = extension
        self.rtol = rtol
        self.atol = atol
        self.engine = engine
        self.max_iter = max_iter
        self.time_limit = time_limit

    def fit(self, X, y, sample_weight=None):
        """Fits the model.

        Args:
            X: array of shape (samples, features), or (samples,) for one feature.
            y: targets.
            sample_weight: weights that are not negative; samples of weight zero count as absent.
        """
        with _NamedEntries(X=X, y=y):
            checked: Any = validate_data(self, _column(X), y, dtype=np.float64, y_numeric=True)
        X, y = checked
        weight = self._checked_weight(sample_weight, len(y))
        used = weight > 0
        if not used.any():
            raise ProblemError("sample_weight is zero everywhere: there is nothing to fit.")
        self._directions = self._checked_directions(X[used], y[used])
        self.increasing_ = self._directions if X.shape[1] > 1 else self._directions[0]
        points = self._oriented(X)
        self.extension_ = self._checked_extension(points.shape[1])
        if self._by_coordinates():
            order, node = coordinatewise(points[used])
        else:
            order, node = self._comparisons(points[:, 0])
            node = node[used]
        result = fit(
            y[used], order, node=node, weight=weight[used], loss=self.loss, quantile=self.quantile,
            delta=self.delta, y_min=self.y_min, y_max=self.y_max, atol=self.atol, rtol=self.rtol,
            engine=self.engine, max_iterations=self.max_iter, time_limit=self.time_limit,
        )  # fmt: skip
        self.objective_, self.bound_, self.gap_ = result.value, result.bound, result.gap
        self.engine_, self.status_, self.n_iter_ = result.engine, result.status, result.iterations
        self.n_comparisons_ = len(order.lower)
        if self._by_coordinates():
            self._points = np.empty((order.count, points.shape[1]))
            self._points[node] = points[used]
            self._values = result.fitted
            self._corners = corners(self._points, self._values, order)
        else:
            known = np.zeros(order.count, bool)
            known[node] = True
            values = extend_over_order(result.fitted, known, order, self.extension_)
            self._values = values[self._number]
        # Samples of weight zero took no part in the order.
        self.fitted_ = np.empty(len(y))
        self.fitted_[used] = result.fitted[node]
        if not used.all():
            self.fitted_[~used] = self.predict(X[~used])
        return self

    def predict(self, X):
        """Predicts by the monotone extension of the fit."""
        check_is_fitted(self)
        with _NamedEntries(X=X):
            X = _column(X) if getattr(self, "n_features_in_", None) == 1 else X
            checked: Any = validate_data(self, X, dtype=np.float64, reset=False)
        points = self._oriented(checked)
        if not self._by_coordinates():
            return self._values[_nodes(points[:, 0], len(self._values))]
        if self.extension_ == "linear":
            return np.interp(points[:, 0], self._points[:, 0], self._values)
        return extend(points, *self._corners, self.extension_)

    def _by_coordinates(self) -> bool:
        if isinstance(self.order, str):
            if self.order != "coordinatewise":
                raise ProblemError(
                    f"order = {self.order!r}: it must be 'coordinatewise' or comparisons."
                )
            return True
        return False

    def _comparisons(self, column: np.ndarray):
        """The order of the nodes, and the number in it of each sample's node."""
        pairs = np.asarray(self.order)
        largest = pairs.max(initial=-1) if np.issubdtype(pairs.dtype, np.number) else -1
        count = int(max(largest, column.max())) + 1
        chosen = _nodes(column, count)
        order, self._number = from_comparisons(self.order, count)
        return order, self._number[chosen]

    def _checked_directions(self, X: np.ndarray, y: np.ndarray) -> list[bool | None]:
        """For each feature, whether the fit grows with it; None if there is no saying."""
        features, given = X.shape[1], self.increasing
        if not self._by_coordinates():
            if features != 1:
                raise ProblemError(
                    f"X has {features} columns; with comparisons it has one, the sample's node."
                )
            if given is not True:
                raise ProblemError("With comparisons, increasing must be True; turn the pairs.")
            return [True]
        single = given is None or isinstance(given, str) or np.ndim(given) == 0
        each = [given] * features if single else list(given)  # type: ignore
        if len(each) != features:
            raise ProblemError(
                f"increasing has {len(each)} entries, but there are {features} features."
            )
        found: list[bool | None] = []
        for k, one in enumerate(each):
            if isinstance(one, str) and one == "auto":
                found.append(bool(check_increasing(X[:, k], y)))
            elif one is None:
                found.append(None)
            elif isinstance(one, (bool, np.bool_)) or (not isinstance(one, str) and one in (1, -1)):
                found.append(bool(one == 1))
            else:
                raise ProblemError(
                    f"increasing = {given!r}: it must be True, False or 'auto', or one of these, "
                    f"1, -1 or None for each of the {features} features."
                )
        return found

    def _oriented(self, X: np.ndarray) -> np.ndarray:
        """Features turned so that the fit grows with all of them."""
        columns = []
        for k, grows in enumerate(self._directions):
            # Below in x and in -x are those with the same x alone.
            signs = (1, -1) if grows is None else (1,) if grows else (-1,)
            columns += [sign * X[:, k] for sign in signs]
        return np.stack(columns, axis=1)

    def _checked_extension(self, features: int) -> str:
        if self.extension not in EXTENSIONS:
            raise ProblemError(
                f"Unknown extension {self.extension!r}; known are {', '.join(EXTENSIONS)}."
            )
        one = self._by_coordinates() and features == 1
        if self.extension == "linear" and not one:
            raise ProblemError("The extension 'linear' is for one feature.")
        if self.extension == "auto":
            return "linear" if one else "middle"
        return self.extension

    @staticmethod
    def _checked_weight(sample_weight, count: int) -> np.ndarray:
        if sample_weight is None:
            return np.ones(count)
        weight = np.asarray(sample_weight, float)
        if weight.shape != (count,):
            raise ProblemError(
                f"sample_weight has shape {weight.shape}, but there are {count} samples."
            )
        wrong = ~(np.isfinite(weight) & (weight >= 0))
        if wrong.any():
            entry = int(np.flatnonzero(wrong)[0])
            raise ProblemError(
                f"sample_weight[{entry}] = {weight[entry]}: it must be finite and not negative."
            )
        return weight


def _column(X: Any) -> Any:
    """Samples of one feature may be a plain list, as scikit-learn's own estimator takes them."""
    dimensions = X.ndim if hasattr(X, "ndim") else np.ndim(X) if isinstance(X, list | tuple) else 2
    return np.asarray(X).reshape(-1, 1) if dimensions == 1 else X


def _nodes(column: np.ndarray, count: int) -> np.ndarray:
    wrong = (column != np.floor(column)) | (column < 0) | (column >= count)
    if wrong.any():
        entry = int(np.flatnonzero(wrong)[0])
        raise ProblemError(
            f"X[{entry}, 0] = {column[entry]}: it must be a node, one of 0, ..., {count - 1}."
        )
    return column.astype(np.int64)


class _NamedEntries:
    """Adds to scikit-learn's errors about NaN and infinity which entry it is."""

    def __init__(self, **arrays):
        self.arrays = arrays

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if not isinstance(error, ValueError) or not ("NaN" in str(error) or "inf" in str(error)):
            return
        for name, values in self.arrays.items():
            try:
                wrong = np.argwhere(~np.isfinite(np.asarray(values, float)))
            except (TypeError, ValueError):
                continue
            if len(wrong):
                place = ", ".join(map(str, wrong[0]))
                raise ValueError(f"{error}\nThe first such entry is {name}[{place}].") from error


# -- prediction between the points of a fit --------------------------------------------------------


# Fitted points looked at together, and comparisons held in memory at a time.
_BATCH = 256
_MEMORY = 2_000_000


def corners(points: np.ndarray, values: np.ndarray, order: Order):
    """The few points that decide the extensions: (points, values) for lower and for upper.

    A point whose value a point below it has already adds nothing to the lower extension.
    """
    tight = values[order.lower] == values[order.upper]
    first = np.ones(order.count, bool)
    first[order.upper[tight]] = False
    last = np.ones(order.count, bool)
    last[order.lower[tight]] = False
    return (points[first], values[first]), (points[last], values[last])


def extend(new: np.ndarray, lower_corners, upper_corners, which: str) -> np.ndarray:
    """Values at new points by the extension that `which` names."""
    parts = []
    if which in ("lower", "middle"):
        points, values = lower_corners
        parts.append(_largest_below(new, points, values))
    if which in ("upper", "middle"):
        points, values = upper_corners
        parts.append(-_largest_below(-new, -points, -values))
    return parts[0] if len(parts) == 1 else 0.5 * (parts[0] + parts[1])


def _largest_below(new, points, values) -> np.ndarray:
    """The largest value of the points below each new point; the least of all where none is."""
    by_value = np.argsort(-values, kind="stable")
    points, values = points[by_value], values[by_value]
    out = np.full(len(new), values[-1])
    waiting = np.arange(len(new))
    # By falling value: the first point found below is the best, and is looked no further from.
    for begin in range(0, len(points), _BATCH):
        batch = points[begin : begin + _BATCH]
        found = []
        for rows in np.array_split(waiting, -(-len(waiting) * len(batch) // _MEMORY) or 1):
            below = np.ones((len(rows), len(batch)), bool)
            for k in range(points.shape[1]):
                below &= batch[:, k] <= new[rows, k, None]
            some = below.any(axis=1)
            out[rows[some]] = values[begin + below[some].argmax(axis=1)]
            found.append(some)
        waiting = waiting[~np.concatenate(found)]
        if not len(waiting):
            break
    return out


def extend_over_order(values: np.ndarray, known: np.ndarray, order: Order, which: str):
    """Values at the nodes of an order of which some are known."""
    least, greatest = values[known].min(), values[known].max()
    lower = running_maximum(np.where(known, values, least), order.lower, order.start)
    upper = running_minimum(np.where(known, values, greatest), order.lower, order.start)
    return {"lower": lower, "upper": upper, "middle": 0.5 * (lower + upper)}[which]
