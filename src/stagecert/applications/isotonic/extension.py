"""Prediction between the points of a fit: monotone functions that agree with it where it is known.

Every monotone function through the fitted points lies between two: the largest fitted value below
a point, and the smallest above it. "lower" and "upper" are these (cut off at the least and greatest
fitted value, where nothing is below or above), "middle" is halfway, which is monotone too.
"""

import numpy as np

from stagecert.applications.isotonic.orders import Order
from stagecert.applications.isotonic.sweeps import running_maximum, running_minimum

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
