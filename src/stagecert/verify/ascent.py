"""Better bounds on nodes: a few steps on slopes, forces and weights, many nodes at a time."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.verify.choosing import scores_of, values_at
from stagecert.verify.curves import convex
from stagecert.verify.gpu import fetched, sent
from stagecert.verify.nodes import (
    Aim,
    Form,
    Lanes,
    Layer,
    Lines,
    Pass,
    back,
    forth,
    lines_of,
    offsets,
)
from stagecert_check.straight import hull_slope

# How far slopes of relu move at the first step, and how later steps shrink: from defaults, and
# from those of a parent.
FRESH_STEP, FRESH_DECAY = 0.3, 0.9
SLOPE_STEP, SLOPE_DECAY = 0.1, 0.97
GRID = 1024  # they are multiples of its inverse: half precision holds them
# How far lines of curves turn, step by step.
CURVE_STEPS = (0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.03125)
# The first step of a force, in units of its layer's mean cotangent or of a share of itself; later
# ones shrink by DECAY.
FORCE_STEP, SHARE, DECAY = 2.0, 0.25, 0.85
WEIGHT_STEP = 0.5
# How the steps of a node's parts differ from its own, if these improved its bound by that share.
LONGER, SHORTER, WORTH = np.float32(2.0), np.float32(0.5), 1e-3
LEAST_STEP, LEAST_SCALE, MOST_SCALE = 2.0**-10, np.float32(1 / 16), np.float32(8)
MEAN, SQUARE = 0.5, 0.8  # what is remembered of earlier gradients, and of their squares
SAMPLES = 8  # points of a curve that stand for it where a slope is chosen


@dataclass(eq=False)
class Found:
    """The best bounds, and what says where to split.

    Attributes:
        lanes: the lanes with the slopes, forces and weights of the best bounds.
        bound: (lanes,).
        points: (lanes, inputs), where the linear bound is smallest.
        scores: (lanes, neurons), what lines lose where a neuron would be split.
        units: (lanes, layers), mean absolute cotangents at the start.
    """

    lanes: Lanes
    bound: np.ndarray
    points: np.ndarray
    scores: np.ndarray
    units: np.ndarray


def ascend(
    form: Form, lanes: Lanes, steps: int, goal: np.ndarray, aim: Aim | None = None, fresh=True
) -> Found:
    """Improves the bounds of lanes for so many steps; lanes that exceed their goal stop.

    `fresh` says that slopes are defaults, which are far from the best ones.
    """
    if form.there is not None:
        lanes, goal, aim = sent((lanes, goal, aim))
        return fetched(_ascend(form.there, lanes, steps, goal, aim, fresh))
    return _ascend(form, lanes, steps, goal, aim, fresh)


def _ascend(
    form: Form, lanes: Lanes, steps: int, goal: np.ndarray, aim: Aim | None, fresh: bool
) -> Found:
    count = len(lanes)
    every = np.arange(count, like=form.like)
    best, going, work = lanes[every], every, lanes[every]
    bound = np.full_like(goal, -np.inf, np.float32)
    points = np.zeros(lanes.box[0].shape, np.float32, like=form.like)
    scores = np.zeros(lanes.low.shape, np.float32, like=form.like)
    lines = lines_of(form, work)
    if form.curved:
        work.below, work.above = lines.below.copy(), lines.above.copy()
    memory, units, first = None, None, None
    for k in range(steps):
        found = back(form, work, lines, aim)
        if first is None:
            units, first = found.units, found.bound
        better = found.bound > bound[going]
        some = going[better]
        bound[some] = found.bound[better]
        for name in ("below", "above", "force", "weights"):
            getattr(best, name)[some] = getattr(work, name)[better]
        points[some] = found.point[better]
        if aim is None:
            scores[some] = scores_of(form, work, lines, found)[better]
        left = ~(bound[going] > goal[going])
        if k + 1 == steps or not left.any():
            break
        values, ends = forth(form, work, lines, found, aim)
        if memory is None:
            memory = _Memory(work)
        if not left.all():
            going, work, lines, memory = going[left], work[left], lines[left], memory.kept(left)
            values, ends = values[left], ends[left]
            aim = aim if aim is None else aim[left]
            found = found[left]
        _move(form, work, lines, found, values, ends, (k, fresh), memory)
    assert units is not None
    assert first is not None
    # Steps that hardly helped were too long.
    helped = bound - first > WORTH * np.abs(first)
    best.scale = np.clip(np.where(helped, LONGER, SHORTER) * best.scale, LEAST_SCALE, MOST_SCALE)
    return Found(best, bound, points, scores, units)


class _Memory:
    """Running means of gradients and of their squares, of slopes of relu and of forces."""

    def __init__(self, lanes: Lanes):
        self.lane, self.neuron = np.nonzero(lanes.held)
        self.force = np.zeros((2, len(self.lane)), np.float32, like=lanes.below)
        self.slope = np.zeros((2, *lanes.below.shape), np.float32, like=lanes.below)

    def kept(self, some: np.ndarray) -> "_Memory":
        new = copy.copy(self)
        mine = some[self.lane]
        new.lane = (np.cumsum(some) - 1)[self.lane[mine]]
        new.neuron, new.force = self.neuron[mine], self.force[:, mine]
        new.slope = self.slope[:, some]
        return new


def _direction(kept: np.ndarray, gradient: np.ndarray, k: int) -> np.ndarray:
    """Where to go at step k: at most about one in every coordinate; what is kept changes."""
    mean, square = kept
    mean *= MEAN
    mean += (1 - MEAN) * gradient
    square *= SQUARE
    gradient *= gradient
    gradient *= 1 - SQUARE
    square += gradient
    size = np.sqrt(square)
    size += 1e-12
    np.divide(mean, size, out=size)
    size *= math.sqrt(1 - SQUARE ** (k + 1)) / (1 - MEAN ** (k + 1))
    return size


def _move(form: Form, lanes: Lanes, lines: Lines, found: Pass, values, ends, at, memory) -> None:
    """One step of slopes, forces and weights, in place."""
    k, fresh = at
    relu_step = FRESH_STEP * FRESH_DECAY**k if fresh else SLOPE_STEP * SLOPE_DECAY**k
    scale = np.exp2(np.minimum(np.floor(np.log2(lanes.scale)), 0))[:, None]
    size = np.maximum(CURVE_STEPS[min(k, len(CURVE_STEPS) - 1)] * scale, LEAST_STEP)
    size = size.astype(np.float32)
    for index, layer in form.layers.items():
        if layer.maximum or index not in found.blocks:
            continue
        some, g = layer.some, found.blocks[index].reshape(len(lanes), -1)
        x = values[:, some]
        if layer.relu:
            # Where a line below is used, its slope grows with x.
            step = np.maximum(g, 0)
            step *= x
            step = _direction(memory.slope[:, :, some], step, k)
            step *= relu_step * GRID
            np.rint(step, out=step)
            step *= 1 / GRID
            step += lanes.below[:, some]
            np.clip(step, 0, 1, out=step)
            lanes.below[:, some] = step
            bent = lines.over[:, some] > 0
            np.copyto(lines.below[:, some], step, where=bent)
        else:
            (_tilt if layer.joint else _turn)(layer, lanes, g, x, size)
            low, high = lanes.low[:, some], lanes.high[:, some]
            lines.below[:, some], lines.above[:, some] = lanes.below[:, some], lanes.above[:, some]
            offsets(layer, low, high, (lines.below, lines.under, lines.above, lines.over))
    if len(memory.lane):
        _push(form, lanes, found, values, k, memory)
    if lanes.weights.shape[1] > 1:
        excess = np.einsum("bro,bo->br", lanes.rows, ends[:, : lanes.rows.shape[2]])
        known = np.isfinite(lanes.limits)
        excess = np.where(known, excess - np.where(known, lanes.limits, 0), 0)
        unit = np.max(np.abs(excess), axis=1, keepdims=True) + 1e-12
        grown = lanes.weights * np.exp(WEIGHT_STEP * DECAY**k * excess / unit)
        lanes.weights[:] = grown / np.sum(grown, axis=1, keepdims=True)


def _push(form: Form, lanes: Lanes, found: Pass, values, k: int, memory: _Memory) -> None:
    """Forces grow where the end that they hold is not kept."""
    at = memory.lane, memory.neuron
    x, low, high, force, held = (
        values[at],
        lanes.low[at],
        lanes.high[at],
        lanes.force[at],
        lanes.held[at],
    )
    at_zero = np.maximum(x - high, 0) + np.minimum(x - low, 0)
    slope = np.where(force > 0, x - high, np.where(force < 0, x - low, at_zero))
    # Where cotangents have vanished, forces have to grow all the same.
    units = np.maximum(found.units, lanes.units)
    unit = units[memory.lane, form.of_neuron[memory.neuron]]
    unit = np.maximum(unit, SHARE * np.abs(force)) * lanes.scale[memory.lane]
    step = FORCE_STEP * DECAY**k * unit
    new = force + step * _direction(memory.force, slope, k)
    new = np.where(held & 1, new, np.maximum(new, 0))
    lanes.force[at] = np.where(held & 2, new, np.minimum(new, 0))


def _turn(layer: Layer, lanes: Lanes, g, x, size) -> None:
    """Turns the used lines of a curve towards those that touch its hull at x."""
    some = layer.some
    low, high = lanes.low[:, some].astype(float), lanes.high[:, some].astype(float)
    at = np.clip(x, low, high)
    bent: Any = True
    if hasattr(layer.function, "knots"):
        ends = (x.reshape(-1, *layer.shape) for x in (low, high))
        bent = layer.function.bent(*ends).reshape(low.shape)
    if curve := convex(layer.function, low):
        hulls = curve.slope(at), curve.chord(low, high)
    else:
        t = np.linspace(0, 1, SAMPLES)
        xs = np.stack([low + (high - low) * share for share in t])
        fs = values_at(layer, xs.reshape(-1, *low.shape[1:])).reshape(xs.shape)
        hulls = (hull_slope(xs, fs, side, at) for side in (1, -1))
    for slopes, side, wanted in zip((lanes.below, lanes.above), (1, -1), hulls, strict=True):
        used = bent & (g > 0 if side > 0 else g < 0)
        old = slopes[:, some]
        slopes[:, some] = np.where(used, old + np.minimum(2 * size, 1) * (wanted - old), old)


def _tilt(layer: Layer, lanes: Lanes, g, x, size) -> None:
    """Tilts the used planes of products towards those that are tight at x.

    The two planes of a side touch opposite corners (a, b) of the box and have the slopes (b, a).
    """
    some, shape = layer.some, (len(lanes), *layer.shape)
    low, high = lanes.low[:, some].reshape(shape), lanes.high[:, some].reshape(shape)
    g, x = g.reshape(shape[:-1])[..., None], x.reshape(shape)
    crossed = (
        np.stack([low[..., 0], high[..., 1]], axis=-1),
        np.stack([high[..., 0], low[..., 1]], axis=-1),
    )
    for slopes, side, corners in ((lanes.below, 1, (low, high)), (lanes.above, -1, crossed)):
        # At x the plane of a corner c is off by (x - c)_1 (x - c)_2.
        lost = [side * np.prod(x - corner, axis=-1, keepdims=True) for corner in corners]
        wanted = np.where(lost[0] <= lost[1], *(corner[..., ::-1] for corner in corners))
        old = slopes[:, some].reshape(shape)
        step = np.minimum(2 * size, 1)[(..., *(None,) * (len(shape) - 2))]
        new = np.where(side * g > 0, old + step * (wanted - old), old)
        slopes[:, some] = new.reshape(len(lanes), -1)
