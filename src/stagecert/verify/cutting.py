"""Which input of a box to cut: that on which depends what the box's bounds lose.

A pass back loses something at each neuron whose line is not its activation, the more the wider the
interval of the neuron's argument is. That interval is made up of shares of the inputs: how far the
argument moves if one of them goes through its interval. So a cut of an input takes from what each
neuron loses in proportion to its share, and the sum over all neurons says what the cut is worth.
"""

from dataclasses import replace

import numpy as np

from stagecert.verify.checked import Known
from stagecert.verify.choosing import scores_of
from stagecert.verify.nodes import Form, Lanes, Lines, back, default_slopes, lines_of
from stagecert_check.functions import Activation
from stagecert_check.graph import Shift

NUMBERS = 400_000  # in an array, at a time


def telling(form: Form) -> bool:
    """Whether there are neurons, and it is known of all what their lines lose: not of maxima."""
    return form.neurons > 0 and not any(layer.maximum for layer in form.layers.values())


def gains(form: Form, known: Known, free: np.ndarray, of: np.ndarray, rows: np.ndarray):
    """(boxes, free entries): what cuts of these are worth for bounds of rows.

    Args:
        form: the network.
        known: intervals on the boxes.
        free: the entries of the inputs that may be cut.
        of: for each row the box that it is bounded on, in order.
        rows: (rows, outputs then inputs).
    """
    count = len(known.low)
    of_box = form.neurons * max(len(free), len(rows) // max(count, 1), 1)
    at_once = max(NUMBERS // of_box, 1)
    found = np.zeros((count, len(free)))
    with np.errstate(all="ignore"):
        for begin in range(0, count, at_once):
            some = slice(begin, begin + at_once)
            mine = slice(*np.searchsorted(of, (begin, begin + at_once)))
            if mine.start < mine.stop:
                found[some] = _gains(form, known[some], free, of[mine] - begin, rows[mine])
    return np.where(np.isfinite(found), found, 0)


def _gains(form: Form, known: Known, free, of, rows) -> np.ndarray:
    low, high = known.low.astype(np.float32), known.high.astype(np.float32)
    ends = [end.astype(np.float32) for end in known.ends]
    slopes = default_slopes(form, low, high)
    nothing = np.zeros(low.shape, np.float32)
    boxes = Lanes(
        (ends[0], ends[1]), low, high, nothing.astype(np.int8),
        np.zeros((len(low), 1, rows.shape[1]), np.float32), np.zeros((len(low), 1), np.float32),
        *slopes, nothing, np.ones((len(low), 1), np.float32),
        np.zeros((len(low), len(form.layers)), np.float32), np.ones(len(low), np.float32),
    )  # fmt: skip
    lines = lines_of(form, boxes)
    lanes, of_lanes = replace(boxes[of], rows=rows[:, None].astype(np.float32)), lines[of]
    lost = np.zeros(low.shape)
    np.add.at(lost, of, scores_of(form, lanes, of_lanes, back(form, lanes, of_lanes)))
    width = np.where(high > low, high - low, np.inf)
    shares = np.abs(_moved(form, lines, free, ends[1] - ends[0])) / width[:, None]
    return np.einsum("bn,bfn->bf", lost, shares)


def _moved(form: Form, lines: Lines, free: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """(boxes, free, neurons): how far arguments move if an entry goes through its interval.

    The way forwards has straight lines in the place of activations, in the middle of those around.
    """
    boxes, entries = widths.shape
    x = np.zeros((boxes, len(free), entries), np.float32)
    x[:, np.arange(len(free)), free] = widths[:, free]
    x = x.reshape(-1, entries)
    slopes = np.repeat(0.5 * (lines.below + lines.above), len(free), axis=0)
    values, arguments, begin = [], [x[:, :0]], 0
    for index, node in enumerate(form.nodes):
        if node.operation is None:
            size = form.sizes[index]
            value = x[:, begin : begin + size].reshape(-1, *node.shape)
            begin += size
        elif isinstance(node.operation, Activation):
            layer, at = form.layers[index], values[node.arguments[0]].reshape(len(x), -1)
            arguments.append(at)
            value = slopes[:, layer.some] * at
            if layer.joint:
                value = value.reshape(len(x), *layer.shape).sum(axis=-1)
            value = value.reshape(-1, *node.shape)
        elif isinstance(node.operation, Shift):
            value = values[node.arguments[0]]
        else:
            value = node.operation.forward([values[k] for k in node.arguments])
        values.append(value)
    return np.concatenate(arguments, axis=1).reshape(boxes, len(free), -1)
