"""Which neuron of a node to split, and where."""

import numpy as np

from stagecert.verify.curves import convex
from stagecert.verify.gpu import fetched, sent
from stagecert.verify.nodes import (
    Form,
    Lanes,
    Layer,
    Lines,
    Pass,
    back,
    lines_of,
    set_lines,
)
from stagecert_check.functions import Activation

LAST_RESORT = 1e-4  # the score of neurons whose relaxation loses nothing now, in proportion


def values_at(layer: Layer, x) -> np.ndarray:
    """The activation at points (many, entries), or nearly: the middle of what encloses it."""
    if curve := convex(layer.function, x):
        return curve.value(x)
    x = x.reshape(len(x), *layer.shape)
    low, high = layer.function.image(x, x)
    return (0.5 * low + 0.5 * high).reshape(len(x), -1)


def split_points(form: Form, low, high) -> np.ndarray:
    """(lanes, neurons): where each argument would be split: at a kink, or in the middle."""
    cuts = 0.5 * low + 0.5 * high
    for layer in form.layers.values():
        some = layer.some
        if layer.relu:
            cuts[:, some] = 0
        elif not layer.joint:
            kinks, sharp = kinks_of(layer.function)
            best = cuts[:, some].copy()
            off = np.full(best.shape, np.inf)
            for kink in kinks:
                away = np.abs(kink - cuts[:, some])
                # A bend that is no corner attracts the split where it leaves two fair parts.
                inside = (low[:, some] < kink) & (kink < high[:, some])
                inside &= sharp | (away <= 0.25 * (high - low)[:, some])
                nearer = inside & (away < off)
                best, off = np.where(nearer, kink, best), np.where(nearer, away, off)
            cuts[:, some] = best
    return cuts


def undecided_maxima(form: Form, lanes: Lanes) -> bool:
    """Whether a maximum of some lane may have more than one winner: no split settles that."""
    return any(
        np.any(layer.function.bent(*(
            x[:, layer.some].reshape(-1, *layer.shape) for x in (lanes.low, lanes.high)
        )))
        for layer in form.layers.values()
        if layer.maximum
    )  # fmt: skip


def kinks_of(function: Activation) -> tuple[tuple[float, ...], bool]:
    """Where an activation has its kinks or bends the other way; whether it is linear between."""
    knots = getattr(function, "knots", None)
    if knots is not None:
        return tuple(before for before, _ in knots), True
    return ((-3.0, 3.0) if function.kind == "hard_swish" else (0.0,)), False


def scores_of(form: Form, lanes: Lanes, lines: Lines, found: Pass) -> np.ndarray:
    """(lanes, neurons): how far the used lines are from the activation where it would be split."""
    scores = np.zeros(lanes.low.shape, np.float32, like=form.like)
    cuts = split_points(form, lanes.low, lanes.high) if form.curved else None
    for index, layer in form.layers.items():
        if index not in found.blocks or layer.maximum:
            continue
        some, g = layer.some, found.blocks[index].reshape(len(lanes), -1)
        part = lines[:, some]
        if layer.joint:
            scores[:, some] = _lost_by_planes(lanes, layer, g)
        elif layer.relu:
            # Where a line below is used nothing is lost, but in the end even that may be split.
            scores[:, some] = (np.maximum(-g, 0) + LAST_RESORT * (np.abs(g) + 1e-6)) * part.over
        else:
            assert cuts is not None
            at = cuts[:, some].astype(float)
            slope, offset = (
                np.where(g > 0, part.below, part.above),
                np.where(g > 0, part.under, part.over),
            )
            ends = lanes.low[:, some], lanes.high[:, some]
            shaped = (x.astype(float).reshape(-1, *layer.shape) for x in ends)
            bent = layer.function.bent(*shaped).reshape(g.shape)
            bent &= (ends[0] < cuts[:, some]) & (cuts[:, some] < ends[1])
            lost = np.abs(g * (values_at(layer, at) - slope * at - offset))
            scores[:, some] = (lost + LAST_RESORT * 1e-6) * bent
    return scores


def _lost_by_planes(lanes: Lanes, layer: Layer, g) -> np.ndarray:
    """What the planes of products lose in the middle of a box, which a split of either makes half.

    In the middle x y - a x - b y - offset is at most a quarter of the box.
    """
    width = (lanes.high - lanes.low)[:, layer.some]
    area = np.prod(width.reshape(len(g), *layer.shape), axis=-1, keepdims=True)
    lost = np.abs(g).reshape(area.shape) * area * 0.25 * (area > 0)
    return np.broadcast_to(lost, (*area.shape[:-1], 2)).reshape(len(g), -1)


def parts_bounds(form: Form, lanes: Lanes, picks: np.ndarray) -> np.ndarray:
    """(lanes, picks, 2): bounds of the parts below and above after a split of each neuron picked.

    By one pass back each, with the slopes and forces that there are.
    """
    if form.there is not None:
        return fetched(_parts_bounds(form.there, *sent((lanes, picks))))
    return _parts_bounds(form, lanes, picks)


def _parts_bounds(form: Form, lanes: Lanes, picks: np.ndarray) -> np.ndarray:
    found = np.empty((*picks.shape, 2), np.float32, like=form.like)
    cuts, lines = split_points(form, lanes.low, lanes.high), lines_of(form, lanes)
    at, layers = np.arange(len(lanes), like=form.like), list(form.layers.values())
    for k in range(picks.shape[1]):
        pick = picks[:, k]
        # Lines of other layers stay: what is split is an interval of these.
        split = [layers[j] for j in np.unique(form.of_neuron[pick]).tolist()]
        for side, ends in enumerate((lanes.high, lanes.low)):
            old = ends[at, pick]
            ends[at, pick] = cuts[at, pick]
            for layer in split:
                set_lines(layer, lanes, lines)
            found[:, k, side] = back(form, lanes, lines).bound
            ends[at, pick] = old
        for layer in split:
            set_lines(layer, lanes, lines)
    return found
