"""Nodes without anything left to split: the network is affine there, and a linear program decides.

Ascent comes near its optimum, and in single precision no nearer than rounding allows. So these
programs are solved in double precision: their multipliers are the weights of rows and the forces of
splits that refute the node, or their solution is where a counterexample should be.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.verify.nodes import Form, Lanes
from stagecert_check.functions import Activation
from stagecert_check.graph import Program, Shift


@dataclass(frozen=True, eq=False)
class Corner:
    """The answer: weights of rows and signed forces that refute the node, or a point."""

    weights: np.ndarray | None
    force: np.ndarray | None
    point: np.ndarray | None


def solve(program: Program, form: Form, lane: Lanes) -> Corner:
    """Decides the case of one lane, on which every activation is linear."""
    # Most searches never come here, and importing this is a tenth of a small property's time.
    from scipy.optimize import linprog

    size = lane.box[0].shape[1]
    box = [x[0].astype(float) for x in lane.box]
    # The network is affine: its values at zero and at the unit vectors say all.
    points = np.concatenate([np.zeros((1, size)), np.eye(size)])
    arguments, ends = _values(program, form, lane, points)
    rows = lane.rows[0].astype(float)
    there = np.isfinite(lane.limits[0])
    ends = ends[:, : rows.shape[1]]
    row_at, row_slopes = rows @ ends[0], (rows @ (ends[1:] - ends[0]).T)
    row_at = row_at - np.where(there, lane.limits[0], 0)
    held = np.flatnonzero(lane.held[0])
    sides, at, slopes = [], [], []
    for j in held:
        for bit, sign, end in ((2, 1, lane.high[0, j]), (1, -1, lane.low[0, j])):
            if lane.held[0, j] & bit:
                sides.append((j, sign))
                at.append(sign * (arguments[0, j] - float(end)))
                slopes.append(sign * (arguments[1:, j] - arguments[0, j]))
    split_at, split_slopes = np.array(at), np.array(slopes).reshape(len(at), size)

    def least(tops, at, slopes):
        """min t with slopes @ x + at <= t * tops over the box."""
        found = linprog(
            np.append(np.zeros(size), 1.0),
            A_ub=np.column_stack([slopes, -tops]), b_ub=-at,
            bounds=[*zip(*box, strict=True), (None, None)], method="highs",
        )  # fmt: skip
        return found if found.status == 0 else None

    some = np.flatnonzero(there)
    tops = np.concatenate([np.ones(len(some)), np.zeros(len(sides))])
    found = least(tops, np.concatenate([row_at[some], split_at]),
                  np.concatenate([row_slopes[some], split_slopes]))  # fmt: skip
    weights = np.zeros(len(rows))
    if found is not None:
        if found.fun <= 0:
            return Corner(None, None, found.x[:-1])
        prices = np.maximum(-found.ineqlin.marginals, 0)
        weights[some] = prices[: len(some)]
        return Corner(weights, _signed(form, sides, prices[len(some) :]), None)
    found = least(np.ones(len(sides)), split_at, split_slopes) if sides else None
    if found is None or found.fun <= 0:
        return Corner(None, None, None)
    # No point keeps all splits. Some row has to take part, but hardly.
    first = some[0]
    reach = np.abs(row_at[first]) + np.abs(row_slopes[first]) @ np.maximum(*map(np.abs, box))
    weights[first] = found.fun / (4 * reach + 1e-9)
    return Corner(weights, _signed(form, sides, np.maximum(-found.ineqlin.marginals, 0)), None)


def _signed(form: Form, sides, prices) -> np.ndarray:
    force = np.zeros(form.neurons)
    for (j, sign), price in zip(sides, prices, strict=True):
        force[j] += sign * price
    return force


def _values(program: Program, form: Form, lane: Lanes, points):
    """Arguments of all activations, and outputs with inputs, at points; in double precision."""
    values: list[Any] = []
    arguments: list[np.ndarray] = []
    count, begin = len(points), 0
    for index, node in enumerate(program.nodes):
        if node.operation is None:
            size = form.sizes[index]
            value = points[:, begin : begin + size].reshape(count, *node.shape)
            begin += size
        elif isinstance(node.operation, Activation):
            layer, x = form.layers[index], values[node.arguments[0]]
            arguments.append(x.reshape(count, -1))
            ends = [y[:, layer.some].astype(float).reshape(1, *layer.shape)
                    for y in (lane.low, lane.high)]  # fmt: skip
            slope, _ = layer.function.slopes(ends[0], ends[1])
            value = slope * x
            if layer.joint:
                value = value.sum(axis=-1)
            value = value + layer.function.offset(ends[0], ends[1], slope, 1)
        elif isinstance(node.operation, Shift):
            value = values[node.arguments[0]] + np.asarray(node.operation.constant, float)
        else:
            value = node.operation.forward([values[k] for k in node.arguments])
        values.append(value)
    ends = form.joined([values[k] for k in (*program.outputs, *program.inputs)])
    return np.concatenate([points[:, :0], *arguments], axis=1), ends
