"""Equations whose entries only move: reshaping, slicing, joining, gathering."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.importers.enclosures import Enclosure
from stagecert.networks.importers.jax.calls import Call, Converted, converts
from stagecert.networks.importers.jax.constants import array_of
from stagecert.networks.importers.jax.walking import Traced, is_constant
from stagecert.networks.importers.onnx.nodes import Refused


@converts("reshape", "squeeze", "expand_dims")
def _reshape(call: Call):
    if call.params.get("dimensions") is not None and call.name == "reshape":
        raise Refused("is not supported with dimensions")
    return call.reshape(call.variable(), call.shapes[0])


@converts("transpose")
def _transpose(call: Call):
    return call.transpose(call.variable(), call.params["permutation"])


@converts("broadcast_in_dim")
def _broadcast_in_dim(call: Call):
    x, shape = call.variable(), call.shapes[0]
    lengths = [1] * len(shape)
    for n, axis in zip(x.shape, call.params["broadcast_dimensions"], strict=True):
        lengths[axis] = n
    return call.broadcast(call.reshape(x, lengths), shape)


@converts("slice")
def _slice(call: Call):
    x, params = call.variable(), call.params
    steps = params["strides"] or (1,) * len(x.shape)
    numbers = (params["start_indices"], params["limit_indices"], steps)
    starts, stops, steps = (tuple(int(n) for n in each) for each in numbers)
    return call.add(op.Slice(starts, stops, steps), x)


@converts("split")
def _split(call: Call):
    x, axis = call.variable(), call.params["axis"]
    parts: list[Any] = []
    start = 0
    for shape in call.shapes:
        starts = tuple(start if k == axis else 0 for k in range(len(shape)))
        stops = tuple(a + n for a, n in zip(starts, shape, strict=True))
        if 0 in shape:
            parts.append(np.zeros(shape, np.float32))
        else:
            parts.append(call.add(op.Slice(starts, stops, (1,) * len(shape)), x))
        start += shape[axis]
    return parts


@converts("dynamic_slice")
def _dynamic_slice(call: Call):
    x, sizes = call.variable(), call.params["slice_sizes"]
    indices = [int(call.constant(k, "indices")) for k in range(1, len(call.operands))]
    # As in JAX, a slice is moved until it is inside.
    starts = tuple(min(max(i, 0), n - m) for i, n, m in zip(indices, x.shape, sizes, strict=True))
    stops = tuple(i + int(m) for i, m in zip(starts, sizes, strict=True))
    return call.add(op.Slice(starts, stops, (1,) * len(starts)), x)


@converts("rev")
def _rev(call: Call):
    x = call.variable()
    for axis in call.params["dimensions"]:
        order = np.arange(x.shape[axis] - 1, -1, -1, dtype=np.int32)
        x = call.add(op.Take(int(axis)), x, weights=order)
    return x


@converts("pad")
def _pad(call: Call):
    if not isinstance(call.operands[0], Traced) or isinstance(call.operands[1], Traced):
        return _moved(call, (0, 1))
    x, value = call.variable(), call.constant(1, "padding")
    config = call.params["padding_config"]
    if np.any(value != 0):
        return _moved(call, (0, 1))
    x = call.spread(x, [inside + 1 for _, _, inside in config])
    return call.pad(x, [(before, after) for before, after, _ in config])


@converts("concatenate", "stack")
def _concatenate(call: Call):
    if len(call.variables) < len(call.operands):
        return _moved(call, range(len(call.operands)))
    if call.name == "stack":
        axis, shape = call.params["axis"], call.shapes[0]
        wide = (*shape[:axis], 1, *shape[axis + 1 :])
        parts = [call.reshape(x.value, wide) for x in call.variables]
    else:
        axis, parts = call.params["dimension"], [x.value for x in call.variables]
    return parts[0] if len(parts) == 1 else call.add(op.Concat(int(axis)), *parts)


@converts("gather", "tile")
def _gather(call: Call):
    if isinstance(call.operands[-1], Traced) and call.name == "gather":
        raise Refused("needs indices that do not depend on the input")
    return _moved(call, (0,))


@converts("select_n")
def _select(call: Call):
    if isinstance(call.operands[0], Traced):
        raise Refused("chooses by a condition that depends on the input")
    return _moved(call, range(1, len(call.operands)))


@converts("scatter")
def _scatter(call: Call):
    call.constant(1, "indices")
    return _moved(call, (0, 2))


@converts("dynamic_update_slice")
def _dynamic_update_slice(call: Call):
    for k in range(2, len(call.operands)):
        call.constant(k, "indices")
    return _moved(call, (0, 1))


def _moved(call: Call, places: Sequence[int]) -> Converted:
    """Any primitive whose results are entries of some operands (`places`), unchanged.

    Which entry goes where is found by running it on numbers that tell the entries apart.
    """
    numbered = list(call.operands)
    # For every entry: its place among the variables' entries, or -1 and its constant.
    position, constants, variables = [], [], []
    length = offset = 0
    for k in places:
        item = call.operands[k]
        size = math.prod(np.shape(item) if is_constant(item) else item.shape)
        entries = np.arange(length, length + size, dtype=np.int32)
        length += size
        if isinstance(item, Enclosure):
            raise Refused("mixes in constants that are the rounded result of a calculation")
        if isinstance(item, Traced):
            numbered[k] = entries.reshape(item.shape)
            variables.append(call.reshape(item.value, (-1,)))
            position.append(np.arange(offset, offset + size, dtype=np.int32))
            constants.append(np.zeros(size, np.float32))
            offset += size
        else:
            numbered[k] = entries.reshape(np.shape(item))
            position.append(np.full(size, -1, np.int32))
            constants.append(array_of(item).ravel())
    params = dict(call.params)
    if call.name == "gather":
        params["fill_value"] = -1
    source = np.asarray(call.primitive.bind(*map(jnp.asarray, numbered), **params))
    if np.any(source < 0):
        raise Refused("has indices out of bounds")
    index = np.concatenate(position)[source]
    shift = np.concatenate(constants)[source]
    if np.all(index < 0):
        return shift
    x = variables[0] if len(variables) == 1 else call.add(op.Concat(0), *variables)
    if np.array_equal(index.ravel(), np.arange(offset)):
        return call.reshape(x, index.shape)
    x = call.add(op.Take(), x, weights=np.maximum(index, 0))
    if np.all(index >= 0):
        return x
    x = call.add(op.Scale(), x, weights=(index >= 0).astype(np.float32))
    return call.add(op.Shift(), x, weights=shift)
