"""Whether the importer's network computes what ONNX Runtime does, before anything is proven of it.

Both are run at a few points of the boxes, the network in float64. ONNX Runtime rounds in the
model's own precision, so the outputs differ a little. How much is too much is measured, not
guessed: the network is run again with all weights and all values on the way changed at random by
some units in the last place of that precision, which is what rounding does to it. A difference far
beyond the effect of that is a fault.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import TensorProto

from stagecert import networks
from stagecert.errors import Disagreement, ProblemError
from stagecert.networks import Network
from stagecert.problem import as_arrays
from stagecert.verify.contents import contents_of, in_one_piece
from stagecert.verify.models import OpenModel, values_of
from stagecert.verify.queries import Group, shaped
from stagecert.verify.runtime import Session
from stagecert_check.bounds import Facts
from stagecert_check.functions import Refused
from stagecert_check.numbers import Arithmetic

# Boxes that are looked at, and random points in each.
BOXES, RANDOM = 4, 3
# Values of the network, all points together, that are held at a time.
NUMBERS = 4_000_000
# Differences of so many units in the last place of the largest output are not looked into.
UNITS = 64
# Weights and values are changed by up to so many units, so often; and a difference is a fault if it
# is so many times the effect. (On the benchmark sets of docs/verify.md it is at most 0.04 times.)
CHANGE, DRAWS, BEYOND = 64, 4, 2

_UNITS = {np.float16: 2.0**-11, np.float32: 2.0**-24, np.float64: 2.0**-53}
_PRECISIONS = {
    TensorProto.BFLOAT16: 2.0**-8,
    TensorProto.FLOAT16: _UNITS[np.float16],
    TensorProto.FLOAT: _UNITS[np.float32],
    TensorProto.DOUBLE: _UNITS[np.float64],
}


def check(model: OpenModel, groups: Sequence[Group]) -> None:
    """Compares the network with the model at a few points of the groups' boxes; see `compare`."""
    some = [groups[k].inputs for k in chosen(len(groups))]
    compare(model, [(inputs.lower64, inputs.upper64) for inputs in some])


def chosen(count: int) -> list[int]:
    """The places of a few of so many boxes."""
    return [int(k) for k in np.unique(np.linspace(0, count - 1, BOXES).astype(int))]


def compare(model: OpenModel, boxes: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Compares the network with the model at a few points of boxes (lower, upper).

    Raises:
        Disagreement: they differ by more than rounding; the text names the first node where they
            do.
        ProblemError: ONNX Runtime cannot run the model.
    """
    points = points_of(boxes)
    unit = max(_UNITS[kind] for _, _, kind in model.session.inputs)
    if difference(model.network, model.session, points, unit) is None:
        return
    # A model may round more than its inputs tell.
    proto = in_one_piece(contents_of(model.source))
    unit = max([unit, *_precisions(proto.graph)])
    found = difference(model.network, model.session, points, unit)
    if found is not None and not _as_the_checker_reads(model, points):
        raise Disagreement(
            "stagecert and ONNX Runtime compute different outputs of this model at a point of the "
            f"box: {found}. {_first(proto, points, unit)} This is an error of stagecert: please "
            "report it. Nothing is said about the property."
        )


def _as_the_checker_reads(model: OpenModel, points: np.ndarray) -> bool:
    """Whether the network's outputs are those that the checker's own reading of the model encloses.

    Then ONNX Runtime has rounded where the measure of `difference` does not see it: in constants
    that the importer computes exactly.
    """
    at = points[np.all(np.isfinite(points), axis=1)].astype(np.float64)
    try:
        with np.errstate(all="ignore"):
            facts = Facts(Arithmetic(), model.program, at, at).derive()
    except Refused:
        return False
    low, high = (
        np.concatenate([ends[k].reshape(len(at), -1) for k in model.program.outputs], axis=1)
        for ends in (facts.low, facts.high)
    )
    with jax.enable_x64(True):
        double = as_arrays(model.network, jnp.float64)
        ours = np.asarray(_run(double, shaped(model.network, jnp.asarray(at))))
    # The network is run in plain float64, which rounds about as much as the checker allows for.
    slack = 4 * (high - low) + 1e-12 * np.abs(ours).max(axis=1, keepdims=True)
    return bool(np.all((ours >= low - slack) & (ours <= high + slack)))


def points_of(boxes) -> np.ndarray:
    """The centre, both ends, a corner and random points of boxes (lower, upper), in float32."""
    draw = np.random.default_rng(0)
    most = float(np.finfo(np.float32).max)
    found = []
    for lower, upper in boxes:
        lower, upper = np.clip(lower, -most, most), np.clip(upper, -most, most)
        found += [0.5 * lower + 0.5 * upper, lower, upper]
        found.append(np.where(draw.random(len(lower)) < 0.5, lower, upper))
        share = draw.random((RANDOM, len(lower)))
        found += list((1 - share) * lower + share * upper)
    return np.asarray(found, float).astype(np.float32)


def difference(network: Network, session: Session, points, unit: float) -> str | None:
    """What differs beyond rounding at points (points, numbers), if anything.

    `unit` is the relative error of one rounded number in the model's precision.
    """
    if any(kind == np.float16 for _, _, kind in session.inputs):
        with np.errstate(over="ignore"):
            points = points.astype(np.float16)
    points = points[np.all(np.isfinite(points), axis=1)]
    if not len(points):
        return None
    theirs = session.run(points).astype(float)
    with jax.enable_x64(True):
        double = as_arrays(network, jnp.float64)
        # Not all at once, if the network is large.
        at_once = min(max(NUMBERS // max(values_of(network), 1), 1), len(points))
        parts = [points[k : k + at_once] for k in range(0, len(points), at_once)]
        inputs = [shaped(network, jnp.asarray(part, jnp.float64)) for part in parts]
        ours = np.concatenate([np.asarray(_run(double, part)) for part in inputs])
        if ours.shape != theirs.shape:
            return f"{ours.shape[1]} numbers and {theirs.shape[1]}"
        # What overflows in one precision need not do so in the other.
        there = np.isfinite(ours) & np.isfinite(theirs)
        with np.errstate(invalid="ignore"):
            apart = np.where(there, np.abs(ours - theirs), 0.0)
        size = np.max(np.where(there, np.abs(ours), 0.0), axis=1, keepdims=True, initial=0.0)
        if np.all(apart <= UNITS * unit * size):
            return None
        draw = np.random.default_rng(0)
        changed = [
            np.concatenate([_run_changed(double, part, CHANGE * unit, draw) for part in inputs])
            for _ in range(DRAWS)
        ]
    with np.errstate(invalid="ignore"):
        effect = np.max([np.abs(one - ours) for one in changed], axis=0)
    # A change that overflows says that nothing can be said.
    effect = np.max(np.where(np.isfinite(effect), effect, np.inf), axis=1, keepdims=True)
    excess = np.where(apart > BEYOND * effect, apart, 0.0)
    if not excess.any():
        return None
    p, k = np.unravel_index(np.argmax(excess), excess.shape)
    return f"output {k} is {float(ours[p, k])!r} and {float(theirs[p, k])!r}"


@eqx.filter_jit
def _run(network: Network, inputs):
    return jax.vmap(network.flat_outputs)(*inputs)


def _run_changed(network: Network, inputs, size: float, draw: np.random.Generator) -> np.ndarray:
    """(points, outputs) with everything changed at random by up to `size`, relatively.

    Not compiled as a whole, which would take longer than it is ever run.
    """
    # Numbers that are too small for the model's precision become zero in it.
    least = float(np.finfo(np.float32).tiny)

    def changed(x):
        if not eqx.is_inexact_array(x):
            return x
        up, side = draw.uniform(-1, 1, (2, *x.shape))
        return jnp.asarray(np.asarray(x) * (1 + size * up) + least * side)

    values = [changed(x) for x in inputs]
    for node in network.nodes:
        weights = jax.tree.map(changed, node.weights)
        run = jax.vmap(lambda *x, node=node, weights=weights: node.operation(weights, *x))
        values.append(changed(run(*(values[k] for k in node.arguments))))
    return np.concatenate(
        [np.asarray(values[k]).reshape(len(inputs[0]), -1) for k in network.outputs], axis=1
    )


# -- where they part -------------------------------------------------------------------------------


def _first(proto: onnx.ModelProto, points: np.ndarray, unit: float) -> str:
    """A sentence about the first node whose values differ."""
    graph = proto.graph
    try:
        inferred = onnx.shape_inference.infer_shapes(proto).graph
    except Exception:  # a model that ONNX Runtime runs all the same
        inferred = graph
    values = (*graph.output, *inferred.output, *inferred.value_info)
    kinds = {info.name: info.type.tensor_type.elem_type for info in values}
    places = [
        k
        for k, node in enumerate(graph.node)
        if node.output and kinds.get(node.output[0], 0) in (0, *_PRECISIONS)
    ]
    agrees, differs = -1, len(places)  # places before and after the first that differs
    while agrees + 1 < differs:
        middle = (agrees + differs) // 2
        name = graph.node[places[middle]].output[0]
        part = _ending_at(proto, name, kinds.get(name) or TensorProto.FLOAT)
        try:
            found = difference(networks.load(part), Session(part), points, unit)
        except ProblemError:
            # A constant, or a part of what the importer reads in one piece.
            del places[middle]
            differs -= 1
            continue
        agrees, differs = (middle, differs) if found is None else (agrees, middle)
    if differs >= len(places):
        return "No single node shows the difference."
    node = graph.node[places[differs]]
    called = f" '{node.name}'" if node.name else ""
    return (
        f"They part at node {places[differs] + 1} of {len(graph.node)}, {node.op_type}{called}, "
        f"which computes '{node.output[0]}'."
    )


def _ending_at(proto: onnx.ModelProto, name: str, kind: int) -> onnx.ModelProto:
    """The model with a value inside of it as its only output."""
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    del part.graph.output[:]
    info = onnx.ValueInfoProto(name=name)
    info.type.tensor_type.elem_type = kind
    part.graph.output.append(info)
    return part


def _precisions(graph: onnx.GraphProto) -> list[float]:
    """Units in the last place of all types that weights have or values are turned into."""
    kinds = {tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        for item in node.attribute:
            kinds |= {item.i} if node.op_type == "Cast" and item.name == "to" else set()
            kinds |= {item.t.data_type} if item.HasField("t") else set()
    return [unit for kind, unit in _PRECISIONS.items() if kind in kinds]
