"""Prediction between the points of a fit: monotone functions that agree with it where it is known.

Every monotone function through the fitted points lies between two: the largest fitted value below
a point, and the smallest above it. "lower" and "upper" are these (cut off at the least and greatest
fitted value, where nothing is below or above), "middle" is halfway, which is monotone too.
"""

import numpy as np

from stagecert.applications.isotonic.orders import Order
from stagecert.applications.isotonic.sweeps import running_maximum, running_minimum

# Comparisons held in memory at a time.
_BLOCK = 4_000_000


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
    rows = max(1, _BLOCK // len(points))
    for begin in range(0, len(new), rows):
        part = new[begin : begin + rows]
        below = np.ones((len(part), len(points)), bool)
        for k in range(points.shape[1]):
            below &= points[None, :, k] <= part[:, None, k]
        # Sorted by falling value: the first point below is the best.
        found = below.any(axis=1)
        out[begin : begin + rows][found] = values[below.argmax(axis=1)[found]]
    return out


def extend_over_order(values: np.ndarray, known: np.ndarray, order: Order, which: str):
    """Values at the nodes of an order of which some are known."""
    least, greatest = values[known].min(), values[known].max()
    lower = running_maximum(np.where(known, values, least), order.lower, order.start)
    upper = running_minimum(np.where(known, values, greatest), order.lower, order.start)
    return {"lower": lower, "upper": upper, "middle": 0.5 * (lower + upper)}[which]
