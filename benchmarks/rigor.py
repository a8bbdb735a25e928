"""What rigour costs, `python -m benchmarks.rigor`: bounds with charges for rounding, and without.

Plain means: intervals by centre and radius, lines and the pass back in float64, nothing rounded
outward. Both are compiled as a whole and timed in turn; of the CPU times of many runs the least
counts, since the machine may be shared.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import networks, pieces
from stagecert.networks.bounding.backward import Lines, _lined, dual_bound, lines_at
from stagecert.networks.bounding.intervals import interval_bounds
from stagecert.networks.bounding.relaxation import Split, split
from stagecert.networks.bounding.search import relax
from stagecert.networks.operations import Linear
from stagecert.networks.regions import regions_of
from stagecert.problem import as_arrays

RESULTS = Path(__file__).parent / "results" / "rigor" / "cost.json"


def _dense(sizes, activation):
    random = np.random.default_rng(0)
    pairs = itertools.pairwise(sizes)
    weights = [random.normal(size=(m, n)) * np.sqrt(2 / n) for n, m in pairs]

    def function(x):
        for k, w in enumerate(weights):
            x = w @ x
            x = activation(x) if k < len(weights) - 1 else x
        return x

    return networks.from_jax(function, np.zeros(sizes[0]))


def _convolutional():
    random = np.random.default_rng(0)
    kernels = [
        random.normal(size=s) / np.sqrt(np.prod(s[1:])) for s in ((16, 3, 4, 4), (32, 16, 4, 4))
    ]
    last = random.normal(size=(10, 32 * 6 * 6)) / 30

    def function(x):
        x = x[None]
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID")
            x = jax.nn.relu(x)
        return last @ x.reshape(-1)

    return networks.from_jax(function, np.zeros((3, 32, 32)))


NETWORKS = {
    "dense 5-50x6-5 relu": (lambda: _dense((5, *[50] * 6, 5), jax.nn.relu), 64, 8),
    "dense 784-256x4-10 relu": (lambda: _dense((784, *[256] * 4, 10), jax.nn.relu), 4, 64),
    "dense 784-200x4-10 tanh": (lambda: _dense((784, *[200] * 4, 10), jnp.tanh), 4, 64),
    "convolutions 3x32x32 relu": (_convolutional, 2, 64),
}


# -- the plain versions ----------------------------------------------------------------------------


def _plain_intervals(parts: Split, inputs):
    def segment(one, blocks):
        values = [(0.5 * (a + b), 0.5 * (b - a)) for a, b in one.pick(inputs, blocks)]
        for node in one.nodes:
            read = [values[k] for k in node.arguments]
            if isinstance(node.operation, Linear):
                centres, radii = zip(*read, strict=True)
                made = (node.operation(node.weights, *centres),
                        node.operation.radius(node.weights, *radii))  # fmt: skip
            else:
                ((centre, radius),) = read
                centre = node.operation(node.weights, centre)
                made = centre, jnp.broadcast_to(radius, centre.shape)
            values.append(made)
        centre, radius = values[one.output]
        return centre - radius, centre + radius

    blocks, arguments = (), ()
    for layer in parts.layers:
        arguments = (*arguments, segment(layer.segment, blocks))
        blocks = (*blocks, layer.image(*arguments[-1]))
    return arguments, segment(parts.last, blocks)


def _plain_lines(wedge, x) -> Lines:
    def line(function, weights):
        value, pull = jax.vjp(lambda x: pieces.evaluate(function, (x,), _lined, weights)[0], x)
        (slope,) = pull(jnp.ones_like(value))
        return slope, value - slope * x

    below, above = wedge.slopes()
    return Lines(*line(wedge.lower, below), *line(wedge.upper, above))


def _plain_bound(parts: Split, lines, inputs, row):
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(inputs.centre))
    nothing = tuple(jnp.zeros(layer.shape) for layer in parts.layers)
    of_inputs, of_blocks, total = zeros, list(nothing), 0.0

    def pull(segment, cotangent):
        nonlocal of_inputs, total
        constant, back = jax.vjp(lambda i, b: segment(i, b), zeros, nothing)
        to_inputs, to_blocks = back(cotangent)
        of_inputs = jax.tree.map(jnp.add, of_inputs, to_inputs)
        for k in {k for is_input, k in segment.sources if not is_input}:
            of_blocks[k] = of_blocks[k] + to_blocks[k]
        total = total + jnp.sum(cotangent * constant)

    pull(parts.last, row)
    for index in reversed(range(len(parts.layers))):
        g, line = of_blocks[index], lines[index]
        up, down = jnp.maximum(g, 0), jnp.maximum(-g, 0)
        total = total + jnp.sum(up * line.low_offset - down * line.high_offset)
        pull(parts.layers[index].segment, up * line.low_slope - down * line.high_slope)
    return total + inputs.linear_minimum(of_inputs)


# -- timing ----------------------------------------------------------------------------------------


@eqx.filter_jit
def _intervals(parts, boxes, rigorous: bool):
    return jax.vmap(lambda b: (interval_bounds if rigorous else _plain_intervals)(parts, b))(boxes)


@eqx.filter_jit
def _backward(parts, boxes, sets, arguments, rows, rigorous: bool):
    """Lines and one pass back for every box and row."""
    relaxed = relax(parts.layers, parts.last, boxes, arguments)

    def of_box(relaxed, inputs, rows):
        middles = [0.5 * (low + high) for low, high in relaxed.arguments]
        if rigorous:
            lines = tuple(
                lines_at(wedge, x, wedge.slopes(), span)
                for wedge, x, span in zip(relaxed.wedges, middles, relaxed.spans, strict=True)
            )
            return jax.vmap(lambda row: dual_bound(
                parts.layers, parts.last, lines, relaxed.spans, relaxed.last_span, inputs, row
            ).bound)(rows)  # fmt: skip
        lines = tuple(_plain_lines(w, x) for w, x in zip(relaxed.wedges, middles, strict=True))
        return jax.vmap(lambda row: _plain_bound(parts, lines, inputs, row))(rows)

    return jax.vmap(of_box)(relaxed, sets, rows)


def _least(functions, repeats: int) -> list[float]:
    """The least CPU time of each function, which are run in turn."""
    for function in functions:
        jax.block_until_ready(function())
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, mine in zip(functions, times, strict=True):
            begin = time.process_time()
            jax.block_until_ready(function())
            mine.append(time.process_time() - begin)
    return [min(mine) for mine in times]


def measure(name: str, repeats: int) -> dict:
    """Times and results of one network, rigorous and plain."""
    make, boxes, count = NETWORKS[name]
    network = make()
    random = np.random.default_rng(1)
    with jax.enable_x64(True):
        centre = random.normal(size=(boxes, *network.input_shapes[0]))
        regions = regions_of(network, centre - 0.02, centre + 0.02, None)
        parts = as_arrays(split(network), jnp.float64)
        rows = jnp.asarray(random.normal(size=(boxes, count, network.output_size)))
        arguments, _ = _intervals(parts, regions.boxes, True)

        def back(rigorous):
            return _backward(parts, regions.boxes, regions.sets, arguments, rows, rigorous)

        exact, rough = np.asarray(back(True)), np.asarray(back(False))
        assert np.all(exact <= rough + 1e-9 * (1 + np.abs(rough)))
        forward = _least([lambda r=r: _intervals(parts, regions.boxes, r) for r in (True, False)],
                         repeats)  # fmt: skip
        passes = _least([lambda r=r: back(r) for r in (True, False)], repeats)
    return {
        "network": name,
        "boxes": boxes,
        "rows": count,
        "intervals, s": {"rigorous": forward[0], "plain": forward[1]},
        "intervals, ratio": round(forward[0] / forward[1], 2),
        "lines and pass back, s": {"rigorous": passes[0], "plain": passes[1]},
        "lines and pass back, ratio": round(passes[0] / passes[1], 2),
        "largest relative loss": float(np.max((rough - exact) / (1e-3 + np.abs(rough)))),
    }


def main() -> None:
    """Measures all networks and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rigor", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    rows = []
    for name in NETWORKS:
        rows.append(measure(name, options.repeats))
        print(json.dumps(rows[-1]), flush=True)
    held = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "repeats": options.repeats,
        "networks": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
