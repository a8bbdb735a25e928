"""How reductions, normalisations and rearranged entries get into a random graph."""

import math
from typing import Any

import numpy as np

from benchmarks.fuzz.graphs import Skip, Writer
from benchmarks.fuzz.recipes_composed import away


def _reduced(operator: str, positive: bool = False, most: int = 64):
    def recipe(w: Writer) -> None:
        x = w.pick(least=1)
        rank = len(w.shape(x))
        axes = w.draw.sample(range(rank), w.draw.randint(1, rank))
        if math.prod(w.shape(x)[k] for k in axes) > most:
            raise Skip("too many")
        x = away(w, x) if positive else x
        settings: dict[str, Any] = {"keepdims": w.draw.choice((None, 0, 1))}
        if w.version(operator) >= 18:
            w.emit(operator, [x, w.ints(axes)], **settings)
        else:
            w.emit(operator, [x], axes=axes, **settings)

    return recipe


def _running_sum(w: Writer) -> None:
    w.version("CumSum")
    x = w.pick(least=1)
    rank = len(w.shape(x))
    settings: dict[str, Any] = {
        name: w.draw.choice((None, 0, 1)) for name in ("exclusive", "reverse")
    }
    w.emit("CumSum", [x, w.ints(w.draw.randrange(-rank, rank))], **settings)


def _local_response(w: Writer) -> None:
    settings: dict[str, Any] = {
        "alpha": w.draw.choice((None, 0.0, 1.0)),
        "beta": w.draw.choice((None, 0.5, 1.0)),
        "bias": w.draw.choice((None, 2.0)),
    }
    w.emit("LRN", [w.pick(4)], size=w.draw.choice((1, 3, 5)), **settings)


def _unit_length(w: Writer) -> None:
    x = w.pick(least=1)
    axis = w.draw.choice((None, *range(-1, len(w.shape(x)))))
    w.emit("LpNormalization", [away(w, x)], axis=axis, p=w.draw.choice((None, 1, 2)))


def _root_mean_square(w: Writer) -> None:
    w.version("RMSNormalization")
    x = w.pick(least=1)
    shape = w.shape(x)
    axis = w.draw.choice((None, -1, 0))
    items = [x, w.floats(shape[-1 if axis is None else axis :])]
    w.emit("RMSNormalization", items, axis=axis, epsilon=w.draw.choice((None, 0.1, 1.0)))


def _groups(w: Writer) -> None:
    newer = w.version("GroupNormalization") >= 21
    x = w.pick(3, 4)
    channels = w.shape(x)[1]
    groups = w.draw.choice([n for n in range(1, channels + 1) if channels % n == 0])
    shape = (channels if newer else groups,)
    items = [x, w.floats(shape), w.floats(shape)]
    w.emit("GroupNormalization", items, num_groups=groups, epsilon=w.draw.choice((None, 1.0)))


def _global_lp_pool(w: Writer) -> None:
    w.emit("GlobalLpPool", [w.pick(3, 4)], p=w.draw.choice((None, 1, 2)))


def _depth_to_space(w: Writer) -> None:
    x = w.one("Concat", *[w.pick(4)] * 4, axis=1)
    mode = w.draw.choice((None, "DCR", "CRD")) if w.has("DepthToSpace", "mode") else None
    w.emit("DepthToSpace", [x], blocksize=2, mode=mode)


def _space_to_depth(w: Writer) -> None:
    x = w.pick(4)
    sizes = w.shape(x)[2:]
    w.emit("SpaceToDepth", [x], blocksize=2 if not any(n % 2 for n in sizes) else 1)


def _triangle(w: Writer) -> None:
    w.version("Trilu")
    items = [w.pick(least=2)]
    if w.draw.random() < 0.6:
        items.append(w.ints(w.draw.choice((-1, 0, 1, 2))))
    w.emit("Trilu", items, upper=w.draw.choice((None, 0, 1)))


def _gather_elements(w: Writer) -> None:
    w.version("GatherElements")
    x = w.pick(least=1)
    shape = list(w.shape(x))
    axis = w.draw.randrange(len(shape))
    lengths = [w.draw.randint(1, 3) if k == axis else n for k, n in enumerate(shape)]
    n = shape[axis]
    flat = [w.draw.randrange(-n, n) for _ in range(math.prod(lengths))]
    w.emit("GatherElements", [x, w.ints(np.reshape(flat, lengths))], axis=axis)


def _gather_nd(w: Writer) -> None:
    w.version("GatherND")
    x = w.pick(least=1)
    shape = w.shape(x)
    depth = w.draw.randint(1, len(shape))
    rows = [[w.draw.randrange(-n, n) for n in shape[:depth]] for _ in range(w.draw.randint(1, 3))]
    w.emit("GatherND", [x, w.ints(rows)])


def _exponential(w: Writer) -> None:
    w.emit("Pow", [w.scalar_of(w.draw.choice((0.5, 2.0, 1.0, 3.0))), w.pick()])


RECIPES = {
    "ReduceLogSumExp": _reduced("ReduceLogSumExp"),
    "ReduceLogSum": _reduced("ReduceLogSum", positive=True),
    "ReduceProd": _reduced("ReduceProd", most=6),
    "CumSum": _running_sum, "LRN": _local_response, "LpNormalization": _unit_length,
    "RMSNormalization": _root_mean_square, "GroupNormalization": _groups,
    "GlobalLpPool": _global_lp_pool, "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth, "Trilu": _triangle, "GatherElements": _gather_elements,
    "GatherND": _gather_nd, "exponential": _exponential,
}  # fmt: skip
