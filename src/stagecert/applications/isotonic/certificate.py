"""The proof of a fit: any multipliers of the comparisons give a lower bound on the optimum.

For multipliers m_e >= 0 of the comparisons, every isotonic fit z in [low, high] has

    sum_s w_s loss(y_s, z) >= sum_s w_s loss(y_s, z) + sum_e m_e (z_lower(e) - z_upper(e)),

and the right side falls apart into one problem for each node, whose samples share the node's net
outflow q = sum of m over comparisons above it - sum of m over those below it. Each sample's problem
is bounded below by a tangent, so that its minimiser need only be known roughly. All rounding is
charged, so that the bound holds in real arithmetic for the numbers as given.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagecert.applications.isotonic.losses import ROUNDING, Loss
from stagecert.applications.isotonic.orders import Order

_EPS = float(np.finfo(float).eps)
# More than a term loses where it underflows; other rounding is relative.
_TINY = 1e-300


@dataclass(frozen=True)
class Samples:
    """What is fitted: targets, positive weights and nodes of the samples; the order of the nodes.

    `low` and `high` enclose some optimal fit: no loss falls outside the range of the targets, and
    clipping an isotonic fit to the bounds asked for leaves it isotonic.
    """

    y: np.ndarray
    weight: np.ndarray
    node: np.ndarray
    order: Order
    loss: Loss
    low: float
    high: float

    @cached_property
    def one_each(self) -> bool:
        """Whether sample i is all there is at node i."""
        return len(self.y) == self.order.count and bool(
            np.array_equal(self.node, np.arange(self.order.count))
        )

    def by_node(self, amounts: np.ndarray) -> np.ndarray:
        """Amounts of the samples, added up by node."""
        if self.one_each:
            return amounts
        return np.bincount(self.node, weights=amounts, minlength=self.order.count)

    @cached_property
    def node_weight(self) -> np.ndarray:
        """The weight of all samples of each node."""
        return self.by_node(self.weight)

    @cached_property
    def node_mean(self) -> np.ndarray:
        """The weighted mean of each node's targets; the middle of the range where there is none."""
        weight = self.node_weight
        total = self.by_node(self.weight * self.y)
        middle = 0.5 * (self.low + self.high)
        return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), middle)

    def value(self, fit: np.ndarray) -> float:
        """The objective at a fit, rounded up."""
        z = fit[self.node]
        total = math.fsum((self.weight * self.loss.value(self.y, z)).tolist())
        slack = ROUNDING * float(np.sum(self.weight * self.loss.size(self.y, z)))
        return float(np.nextafter(total + 1.001 * slack + _TINY * len(z), np.inf))

    def clipped(self, fit: np.ndarray) -> np.ndarray:
        """The fit within the bounds."""
        return np.clip(fit, self.low, self.high)


def net_outflow(order: Order, multipliers: np.ndarray) -> np.ndarray:
    """Multipliers of the comparisons above each node minus those of the comparisons below it."""
    out = np.bincount(order.lower, weights=multipliers, minlength=order.count)
    return out - np.bincount(order.upper, weights=multipliers, minlength=order.count)


def lower_bound(samples: Samples, multipliers: np.ndarray, fit: np.ndarray) -> float:
    """A number that no isotonic fit's objective is below, whatever the multipliers and the fit.

    Args:
        multipliers: one for each comparison; negative ones count as zero.
        fit: the nodes' values, near which the bound is best.
    """
    order, loss, y, weight = samples.order, samples.loss, samples.y, samples.weight
    multipliers = np.maximum(multipliers, 0.0)
    outflow = net_outflow(order, multipliers)
    share = _shared(samples, outflow, fit)
    low, high = samples.low, samples.high
    # Net outflows add up to zero over the nodes, so any number may be taken off the fit.
    middle = 0.5 * (low + high)
    z = loss.tilted(y, share / weight, low, high)
    value, size = loss.value(y, z), loss.size(y, z)
    left, right = loss.slopes(y, z)
    steepness = weight * loss.slope_size(y, z) + np.abs(share)
    slope = np.clip(0.0, weight * left + share, weight * right + share)
    # What the tangent at z may fall by on the way to either end.
    fall = np.maximum(np.maximum(slope * (z - low), slope * (z - high)), 0.0)
    shift = z - middle
    terms = weight * value + share * shift - fall
    width = high - low
    charge = (
        ROUNDING * np.sum(weight * size + np.abs(share * shift) + fall + steepness * width)
        + _mismatch(samples, multipliers, outflow, share) * width
    )
    if not (np.all(np.isfinite(terms)) and np.isfinite(charge)):
        return -np.inf
    slack = 1.001 * float(charge) + _TINY * len(terms)
    return float(np.nextafter(math.fsum(terms.tolist()) - slack, -np.inf))


def _shared(samples: Samples, outflow: np.ndarray, fit: np.ndarray) -> np.ndarray:
    """A node's outflow divided among its samples, as their slopes at the fit suggest."""
    if samples.one_each:
        return outflow
    node, weight = samples.node, samples.weight
    left, right = samples.loss.slopes(samples.y, fit[node])
    left, right = (np.nan_to_num(weight * slope) for slope in (left, right))
    least, most = samples.by_node(left), samples.by_node(right)
    room = most - least
    part = np.where(room > 0, (-outflow - least) / np.where(room > 0, room, 1.0), 0.0)
    slope = left + np.clip(part, 0.0, 1.0)[node] * (right - left)
    rest = outflow + samples.by_node(slope)
    total = samples.node_weight
    return -slope + (rest / np.where(total > 0, total, 1.0))[node] * weight


def _mismatch(samples: Samples, multipliers, outflow, share) -> float:
    """At most how much the samples' shares differ from the exact outflows, over all nodes."""
    order = samples.order
    flow = np.bincount(order.lower, weights=multipliers, minlength=order.count)
    flow += np.bincount(order.upper, weights=multipliers, minlength=order.count)
    degree = np.bincount(order.lower, minlength=order.count) + np.diff(order.start)
    wrong = (degree + 2) * _EPS * flow
    if not samples.one_each:
        members = np.bincount(samples.node, minlength=order.count)
        given = samples.by_node(np.abs(share)) + np.abs(outflow)
        wrong += np.abs(outflow - samples.by_node(share)) + (members + 2) * _EPS * given
    return float(np.sum(wrong))
