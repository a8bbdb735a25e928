"""The edge dual of least squares on a partial order, for all losses that fit means.

The dual has one multiplier for each comparison and separable terms; accelerated ascent with a step
for each comparison climbs it. Two things make it fast. Comparisons that hold by more than the fit
moved lately leave the iteration for a while, which also lengthens the steps of the others. And the
fit is read off the *blocks* that positive multipliers join, by averaging over each: its error is
then of second order in that of the multipliers, where repairing the dual's own fit costs first
order.
"""

import time
from dataclasses import dataclass

import numpy as np

from stagecert.applications.isotonic.certificate import Samples, lower_bound, net_outflow
from stagecert.applications.isotonic.loops import path_cover, pool_paths
from stagecert.applications.isotonic.orders import Order
from stagecert.applications.isotonic.result import Search, Tolerance
from stagecert.applications.isotonic.sweeps import (
    ascend,
    block_means,
    running_maximum,
    running_minimum,
)

# Iterations between two looks at the fit.
_CHUNK = 25
# How many times neighbouring blocks in the wrong order are merged before the rest is repaired.
_MERGES = 8
# An order is close to a chain if this many times as few paths as in a square grid cover it.
_NARROW = 10
# Accelerated gradient steps on a quadratic are stable up to 4/3 of the safe step; this is dropped
# as soon as the dual falls.
_STRETCH = 1.25
# Relative to the value, gaps below this are lost in rounding.
_FINEST = 1e-15


@dataclass
class _Working:
    """The comparisons that take part in the iteration."""

    index: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    step: np.ndarray
    multipliers: np.ndarray
    ahead: np.ndarray


def _working(order: Order, inverse, index, multipliers, ahead, stretch) -> _Working:
    lower, upper = order.lower[index], order.upper[index]
    degree = np.bincount(lower, minlength=order.count) + np.bincount(upper, minlength=order.count)
    # The Hessian's row sums: steps that are not stretched cannot overshoot.
    stiffness = degree * inverse
    step = stretch / (stiffness[lower] + stiffness[upper])
    return _Working(index, lower, upper, step, multipliers[index], ahead[index])


def solve_dual(
    samples: Samples, tolerance: Tolerance, max_iterations: int, deadline: float
) -> Search:
    """Fits means on an order all of whose nodes have weight, to a certified gap."""
    order, y, weight = samples.order, samples.node_mean, samples.node_weight
    inverse = 1.0 / weight
    edges = len(order.lower)
    begin = _start(order, y, weight)
    stretch = _STRETCH
    work = _working(order, inverse, np.arange(edges), begin, begin, stretch)
    best = Search.nothing("dual")
    momentum, iterations, moved_from = 1.0, 0, y
    middle = float(np.mean(y))
    # Multipliers this small join no blocks.
    speck = 1e-9 * float(np.max(weight * np.abs(y - middle), initial=0.0))
    # What no fit can avoid: the spread of targets that share a node.
    within = float(np.sum(samples.weight * (samples.y - y[samples.node]) ** 2))
    dual, threshold = 0.0, np.inf
    while True:
        if edges:
            momentum = ascend(
                y, inverse, (work.lower, work.upper), work.step, (work.multipliers, work.ahead),
                momentum, _CHUNK,
            )  # fmt: skip
        iterations += _CHUNK
        multipliers = np.zeros(edges)
        multipliers[work.index] = work.multipliers
        towards = y - inverse * net_outflow(order, multipliers)
        # The dual value of least squares; weight * (y - towards) adds up to zero but for rounding.
        before, dual = dual, _total(weight * (y - towards) * (y + towards - 2 * middle))
        if dual < before:
            stretch = 1.0
        last = not edges or iterations >= max_iterations or time.perf_counter() > deadline
        # While the dual still climbs by more than the gap asked for, no fit can close the gap.
        if last or dual - before <= max(tolerance.allowed(dual + within), _FINEST * dual):
            fit = _feasible(order, y, weight, multipliers, towards, speck)
            gap = _total(weight * (fit - y) ** 2) - dual
            last = last or gap <= _FINEST * dual
            if samples.loss.name == "squared":
                threshold = min(threshold, tolerance.allowed(dual + within))
            if gap <= threshold or last:
                best = best.better(_certified(samples, multipliers, fit), iterations)
                if tolerance.reached(best) or last:
                    return best.ended(tolerance, iterations, max_iterations, deadline)
                threshold = 0.5 * gap
        ahead = np.zeros(edges)
        ahead[work.index] = work.ahead
        room = np.sqrt(np.mean((towards - moved_from) ** 2))
        near = towards[order.upper] - towards[order.lower] < room
        index = np.flatnonzero(near | (multipliers > 0) | (ahead > 0))
        work = _working(order, inverse, index, multipliers, ahead, stretch)
        moved_from = towards


def _start(order: Order, y, weight) -> np.ndarray:
    """Multipliers to start from: zero, or on orders close to a chain the best ones along paths.

    Gradient steps carry multipliers along a path one comparison at a time, which takes long on a
    few long paths (less long from here, measured on narrow grids); on orders as wide as a square
    grid they are faster from zero.
    """
    multipliers = np.zeros(len(order.lower))
    for from_last in (True, False):
        following, starts = path_cover(order.count, order.lower, order.upper, from_last)
        if _NARROW * np.sum(starts) > np.sqrt(order.count):
            continue
        multipliers[following[following >= 0]] = 0.0
        left = y - net_outflow(order, multipliers) / weight
        pool_paths(left, weight, order.upper, following, starts, multipliers)
    return multipliers


def _total(terms: np.ndarray) -> float:
    """The sum; a dot product would wake the threads of the linear algebra library for nothing."""
    return float(np.sum(terms))


def _feasible(order: Order, y, weight, multipliers, towards, speck) -> np.ndarray:
    """An isotonic fit near the dual's: the better of averaging over blocks and of repairing."""
    repaired = 0.5 * (
        running_maximum(towards, order.lower, order.start)
        + running_minimum(towards, order.lower, order.start)
    )
    averaged, wrong = block_means(y, weight, multipliers, speck, order.lower, order.upper, _MERGES)
    if wrong:
        averaged = running_maximum(averaged, order.lower, order.start)
    fits = (averaged, repaired)
    return min(fits, key=lambda fit: _total(weight * (fit - y) ** 2))


def _certified(samples: Samples, multipliers, fit) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Fit, multipliers, value and bound for the loss itself."""
    # At the optimum w (z - y) + outflow = 0 for least squares with 1/2; the slope of another loss
    # is its curvature times z - y, and a comparison with a multiplier has equal ends.
    scaled = multipliers * samples.loss.curvature(fit)[samples.order.upper]
    clipped = samples.clipped(fit)
    return clipped, scaled, samples.value(clipped), lower_bound(samples, scaled, clipped)
