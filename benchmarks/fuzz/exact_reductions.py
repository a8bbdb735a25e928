"""What reductions, normalisations and rearranged entries compute in ONNX."""

import numpy as np
from flint import fmpq

from benchmarks.fuzz.exact import COMPUTES, CURVES, Call, Vague, ball, computes, each, number


def _as(call: Call, operator: str, items: list, **attributes):
    """What another operator makes of items, with the attributes of this node."""
    inner = Call.__new__(Call)
    inner.__dict__.update(call.__dict__)
    inner.operator, inner.items = operator, items
    inner.attributes = {**call.attributes, **attributes}
    return COMPUTES[operator](inner)


@computes("ReduceLogSumExp", "ReduceLogSum")
def _log_sum(call: Call):
    x, *rest = call.items
    x = each(CURVES["Exp"], x) if call.operator == "ReduceLogSumExp" else x
    return each(CURVES["Log"], _as(call, "ReduceSum", [x, *rest]))


@computes("CumSum")
def _running_sum(call: Call):
    x, axis = call.items[0], int(call.items[1].reshape(-1)[0])
    parts = np.moveaxis(x, axis, 0)
    parts = parts[::-1] if call.get("reverse") else parts
    out = np.empty(parts.shape, object)
    total = np.empty(parts.shape[1:], object)
    total[...] = fmpq(0)
    for k, part in enumerate(parts):
        before, total = total, total + part
        out[k, ...] = before if call.get("exclusive") else total
    out = out[::-1] if call.get("reverse") else out
    return np.moveaxis(out, 0, axis)


@computes("LRN")
def _local_response(call: Call):
    x, size = call.items[0], call.get("size")
    alpha, beta, bias = (number(call.get(name)) for name in ("alpha", "beta", "bias"))
    out = np.empty(x.shape, object)
    for place in np.ndindex(*x.shape):
        total = fmpq(0)
        for k in range(place[1] - (size - 1) // 2, place[1] + size // 2 + 1):
            if 0 <= k < x.shape[1]:
                entry = x[(place[0], k, *place[2:])]
                total = total + entry * entry
        power = ball(alpha / size * total + bias).log() * ball(beta)
        out[place] = ball(x[place]) / power.exp()
    return out


@computes("LpNormalization")
def _unit_length(call: Call):
    x, kind = call.items[0], f"ReduceL{call.get('p')}"
    axes = np.array([call.get("axis")], object)
    total = _as(call, kind, [x, axes], keepdims=1, axes=[call.get("axis")])
    return _over(x, total)


def _over(x, y):
    def quotient(a, b):
        if not ball(b) != 0:
            raise Vague("divides by what may be zero")
        return a / b

    return each(quotient, *np.broadcast_arrays(x, y))


@computes("RMSNormalization")
def _root_mean_square(call: Call):
    x, scale = call.items
    axes = list(range(call.get("axis") % x.ndim, x.ndim))
    count = int(np.prod([x.shape[k] for k in axes]))
    total = _as(call, "ReduceSumSquare", [x], keepdims=1, axes=axes)
    epsilon = number(call.get("epsilon"))
    return _over(x, each(lambda e: CURVES["Sqrt"](e / count + epsilon), total)) * scale


@computes("GroupNormalization")
def _groups(call: Call):
    x, scale, bias = call.items
    groups = call.get("num_groups")
    split = x.reshape(x.shape[0], groups, -1)
    ones, zeros = (_times(groups, v) for v in (1, 0))
    y = _as(call, "InstanceNormalization", [split, ones, zeros]).reshape(x.shape)
    shape = (-1, *(1 for _ in x.shape[2:]))
    scale, bias = (np.repeat(c, x.shape[1] // len(c)).reshape(shape) for c in (scale, bias))
    return y * scale + bias


def _times(count: int, value: int) -> np.ndarray:
    """A number as often as is wanted."""
    out = np.empty(count, object)
    out[:] = [fmpq(value)] * count
    return out


@computes("GlobalLpPool")
def _global_lp_pool(call: Call):
    axes = list(range(2, call.items[0].ndim))
    return _as(call, f"ReduceL{call.get('p')}", call.items[:1], keepdims=1, axes=axes)


@computes("DepthToSpace", "SpaceToDepth")
def _blocks(call: Call):
    x, b = call.items[0], call.get("blocksize")
    n, c, h, w = x.shape
    to_space = call.operator == "DepthToSpace"
    shape = (n, c // b**2, h * b, w * b) if to_space else (n, c * b**2, h // b, w // b)
    small = shape if to_space else x.shape
    out = np.empty(shape, x.dtype)
    for image, channel, row, column in np.ndindex(*small):
        i, j = row % b, column % b
        if to_space and call.get("mode") == b"CRD":
            depth = channel * b * b + i * b + j
        else:
            depth = (i * b + j) * small[1] + channel
        deep, wide = (image, depth, row // b, column // b), (image, channel, row, column)
        if to_space:
            out[wide] = x[deep]
        else:
            out[deep] = x[wide]
    return out


@computes("Trilu")
def _triangle(call: Call):
    x = call.items[0]
    k = 0 if call.item(1) is None else int(call.items[1].reshape(-1)[0])
    out = np.array(x)
    for place in np.ndindex(*x.shape):
        above = place[-1] - place[-2]
        if above < k if call.get("upper") else above > k:
            out[place] = fmpq(0)
    return out


@computes("GatherElements")
def _gather_elements(call: Call):
    x, indices = call.items
    axis = call.get("axis") % x.ndim
    out = np.empty(indices.shape, x.dtype)
    for place in np.ndindex(*indices.shape):
        source = list(place)
        source[axis] = int(indices[place])
        out[place] = x[tuple(source)]
    return out


@computes("GatherND")
def _gather_nd(call: Call):
    x, indices = call.items
    batch = call.get("batch_dims", 0)
    rows = [
        x[(*place[:batch], *(int(k) for k in indices[place]))]
        for place in np.ndindex(*indices.shape[:-1])
    ]
    rest = x.shape[batch + indices.shape[-1] :]
    out = np.empty((len(rows), *rest), x.dtype)
    for k, row in enumerate(rows):
        out[k, ...] = row
    return out.reshape(*indices.shape[:-1], *rest)
