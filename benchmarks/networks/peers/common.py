"""What the peers' scripts share: networks, problems, reference interval bounds, timing, records."""

import argparse
import dataclasses
import json
import os
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

CLASSES = 10
AGREEMENT = 1e-4  # of a peer's interval bounds with those computed here, relative to 1 + |bound|


@dataclasses.dataclass(frozen=True)
class Layer:
    """An affine layer: a convolution without padding, or a matrix on the flattened input."""

    weight: np.ndarray  # out x in x height x width, or out x in
    bias: np.ndarray
    stride: int  # 0 for a matrix


@dataclasses.dataclass(frozen=True)
class Network:
    name: str
    layers: tuple[Layer, ...]
    activation: str  # "relu" or "softplus", after every layer but the last


@dataclasses.dataclass(frozen=True)
class Problems:
    """Boxes, and the rows `true logit - other logit` (images x 9 x 10) to be minimised."""

    nominal: np.ndarray  # images x 3 x 32 x 32
    lower: np.ndarray
    upper: np.ndarray
    rows: np.ndarray


def _attribute(node, name, default=None):
    found = [onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name]
    return found[0] if found else default


def _conv(node, arrays):
    strides = _attribute(node, "strides", [1, 1])
    padded = any(_attribute(node, "pads", [0])) or _attribute(node, "auto_pad", b"NOTSET") not in (
        b"NOTSET",
        b"VALID",
    )
    dilated = any(d != 1 for d in _attribute(node, "dilations", [1]))
    if padded or dilated or _attribute(node, "group", 1) != 1 or len(set(strides)) != 1:
        raise ValueError(f"convolution {node.name or node.output[0]} is of an unsupported kind")
    return Layer(arrays[node.input[1]], arrays[node.input[2]], strides[0])


def _gemm(node, arrays):
    plain = _attribute(node, "alpha", 1.0) == 1 and _attribute(node, "beta", 1.0) == 1
    if not plain or _attribute(node, "transA", 0):
        raise ValueError(f"matrix product {node.name or node.output[0]} is of an unsupported kind")
    weight = arrays[node.input[1]]
    weight = weight if _attribute(node, "transB", 0) else weight.T
    return Layer(np.ascontiguousarray(weight), arrays[node.input[2]], 0)


def load_network(path):
    """The chain of convolutions, matrices and one kind of activation in an ONNX file."""
    graph = onnx.load(path).graph
    arrays = {t.name: numpy_helper.to_array(t).astype(np.float32) for t in graph.initializer}
    layers, kinds, after = [], set(), graph.input[0].name
    for node in graph.node:
        if node.input[0] != after:
            raise ValueError(f"{path} is not a chain")
        after = node.output[0]
        if node.op_type == "Conv":
            layers.append(_conv(node, arrays))
        elif node.op_type == "Gemm":
            layers.append(_gemm(node, arrays))
        elif node.op_type in ("Relu", "Softplus"):
            kinds.add((node.op_type.lower(), len(layers)))
        elif node.op_type != "Flatten":
            raise ValueError(f"{path} has the unsupported operation {node.op_type}")
    names = {name for name, _ in kinds}
    if len(names) != 1 or {place for _, place in kinds} != set(range(1, len(layers))):
        raise ValueError(f"{path} does not have one kind of activation between any two layers")
    return Network(Path(path).stem, tuple(layers), names.pop())


def load_problems(images, count, eps):
    """The first `count` images, `eps` around each clipped to [0, 1], 9 rows an image."""
    with np.load(images) as data:
        pixels, labels = data["images"][:count], data["labels"][:count].astype(int)
    nominal = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).astype(np.float64) / 255
    rows = np.zeros((len(labels), CLASSES - 1, CLASSES), np.float32)
    for row, label in zip(rows, labels, strict=True):
        others = [k for k in range(CLASSES) if k != label]
        row[:, label] = 1
        row[np.arange(CLASSES - 1), others] = -1
    boxes = (nominal, np.clip(nominal - eps, 0, 1), np.clip(nominal + eps, 0, 1))
    return Problems(*(b.astype(np.float32) for b in boxes), rows)


def _apply(layer, weight, x):
    if not layer.stride:
        return x.reshape(len(x), -1) @ weight.T
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))
    windows = windows[:, :, :: layer.stride, :: layer.stride]
    return np.einsum("bihwkl,oikl->bohw", windows, weight, optimize=True)


def interval_bounds(network, lower, upper):
    """Interval bounds in double precision: (lower, upper) of every layer's output."""
    grow = {"relu": lambda x: np.maximum(x, 0), "softplus": lambda x: np.logaddexp(x, 0)}
    lower, upper, bounds = lower.astype(np.float64), upper.astype(np.float64), []
    for layer in network.layers:
        weight = layer.weight.astype(np.float64)
        middle, radius = (lower + upper) / 2, (upper - lower) / 2
        middle, radius = _apply(layer, weight, middle), _apply(layer, np.abs(weight), radius)
        bias = layer.bias.astype(np.float64)
        middle = middle + (bias[:, None, None] if layer.stride else bias)
        bounds.append((middle - radius, middle + radius))
        lower, upper = (grow[network.activation](b) for b in bounds[-1])
    return bounds


def check_intervals(network, problems, theirs):
    """The largest relative difference of a peer's hidden interval bounds from those here."""
    ours = interval_bounds(network, problems.lower, problems.upper)[:-1]
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            a, b = a.reshape(-1), np.asarray(b, np.float64).reshape(-1)
            worst = max(worst, float(np.max(np.abs(a - b) / (1 + np.abs(a)))))
    if worst > AGREEMENT:
        raise ValueError(f"interval bounds differ by {worst:.3g}")
    return worst


def timed(call):
    """(CPU seconds summed over threads, wall seconds, what the call returned)."""
    cpu, wall = time.process_time(), time.perf_counter()
    out = call()
    return time.process_time() - cpu, time.perf_counter() - wall, out


def parser(description, steps):
    """The arguments every script takes."""
    out = argparse.ArgumentParser(description=description)
    data = os.environ.get("STAGECERT_DATA")
    out.add_argument("--network", type=Path, required=True, help="an ONNX file")
    out.add_argument("--images", type=int, default=36, help="how many of the first test images")
    out.add_argument("--eps", default="8/255", help="radius of the box, a number or a fraction")
    out.add_argument("--steps", default=steps, help="numbers of steps, separated by commas")
    out.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    out.add_argument(
        "--data",
        type=Path,
        default=Path(data) / "cifar10" / "test.npz" if data else None,
        help="an .npz with `images` (NHWC, uint8) and `labels`; default: in $STAGECERT_DATA",
    )
    return out


def read(arguments):
    """(network, problems, numbers of steps) of parsed arguments."""
    if arguments.data is None:
        raise SystemExit("give --data, or set STAGECERT_DATA")
    eps = float(Fraction(arguments.eps))
    steps = [int(k) for k in arguments.steps.split(",")]
    network = load_network(arguments.network)
    return network, load_problems(arguments.data, arguments.images, eps), steps


def setting(steps, cpu, wall, bounds, **more):
    """One entry of a record's `settings`."""
    bounds = np.asarray(bounds, np.float64)
    if not np.isfinite(bounds).all():
        raise ValueError("a bound is not finite")
    print(
        f"steps {steps}: {1e3 * cpu / bounds.size:.2f} ms of CPU and "
        f"{1e3 * wall / bounds.size:.2f} ms of wall time a bound, mean bound {bounds.mean():.5f}",
        flush=True,
    )
    return {
        "steps": steps,
        "process_seconds": cpu,
        "wall_seconds": wall,
        "bounds": bounds.tolist(),
        **more,
    }


def write(arguments, network, **more):
    """Write the record of a run."""
    record = {
        "network": network.name,
        "images": arguments.images,
        "eps": arguments.eps,
        "cpus": len(os.sched_getaffinity(0)),
        **more,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
