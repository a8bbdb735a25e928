"""All test images on one accelerator: `python -m benchmarks.paper.gpu --help`.

Certified bounds for every image and every other class, to a relative gap of 1 %, on the paper's
relaxation. The first run compiles; the runs after it are timed, each as a whole. One more run is
timed phase by phase, waiting for the device after each, and one is profiled. Beside the time stands
the floor: what the device would need for the multiplications alone, and for reading and writing
every activation once a pass, at the speeds that it shows in a matrix product and in a copy.
"""

import argparse
import collections
import contextlib
import json
import re
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import DATA
from benchmarks.networks.peers.common import load_problems
from benchmarks.paper.command import RESULTS
from stagecert import machine, networks
from stagecert.files import write_whole
from stagecert.networks import bounds
from stagecert.networks import search as searching
from stagecert.networks.relaxation import split
from stagecert.problem import as_arrays

EPS = 8 / 255
# What kernels are called, and what they do; the first that fits counts.
KERNELS = (
    ("convolutions and matrix products",
     r"conv|cudnn|gemm|cutlass|xmma|cublas|dot|sm\d+_|nvjet|wgrad|dgrad|implicit"),
    ("copies to and from the host", r"memcpy(h2d|d2h)"),
    ("copies, transposes, gathers", r"memcpy|copy|transpose|gather|scatter|slice|concat|pad"),
    ("sums", r"reduce"),
    ("entrywise", r"fusion|add|multiply|select|maximum|broadcast|convert|loop"),
)  # fmt: skip


def timed(function, *arguments):
    """(result, seconds), the device's work included."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - begin


@contextlib.contextmanager
def phases():
    """Seconds of each phase of `networks.bound`, with the device waited for after each."""
    seconds: dict[str, float] = collections.defaultdict(float)
    places = (
        (bounds, "enclose", "intervals"),
        (bounds, "relax", "wedges"),
        (bounds, "search", "search and rigorous evaluation"),
        (searching, "_checked_in_groups", "of that, rigorous evaluation in float64"),
    )
    before = [getattr(module, name) for module, name, _ in places]

    def patched(function, label):
        def run(*arguments, **options):
            begin = time.perf_counter()
            result = function(*arguments, **options)
            jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
            seconds[label] += time.perf_counter() - begin
            return result

        return run

    for (module, name, label), function in zip(places, before, strict=True):
        setattr(module, name, patched(function, label))
    try:
        yield seconds
    finally:
        for (module, name, _), function in zip(places, before, strict=True):
            setattr(module, name, function)


def profile(run) -> dict[str, float]:
    """Seconds of the device's kernels by kind, in one run."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    kinds: dict[str, float] = collections.defaultdict(float)
    for plane in data.planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = event.name.lower()
                kind = next((kind for kind, way in KERNELS if re.search(way, name)), "other")
                kinds[kind] += event.duration_ns / 1e9
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def operations(network) -> tuple[float, int]:
    """(floating-point operations of one pass, entries of all activations), for one input."""
    with jax.enable_x64(True):
        parts = as_arrays(split(network), jnp.float32)
    shape = network.input_shapes[0]

    def forward(x):
        blocks: tuple = ()
        for layer in parts.layers:
            blocks = (*blocks, layer.segment(x, blocks))
        return parts.last(x, blocks)

    compiled = jax.jit(forward).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()
    entries = sum(int(np.prod(layer.shape)) for layer in parts.layers)
    return float(compiled.cost_analysis()["flops"]), entries


def speeds(size: int, copied: int) -> dict[str, float]:
    """Operations a second of a matrix product, and bytes a second of a copy."""
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    line = jnp.ones(copied // 4, jnp.float32)
    double = jax.jit(lambda x: 2 * x)
    best = {}
    for name, function, argument, amount in (
        ("operations", product, x, 2 * size**3),
        ("bytes", double, line, 2 * copied),
    ):
        function(argument).block_until_ready()
        best[name] = amount / min(timed(function, argument)[1] for _ in range(5))
    return best


def main() -> None:
    """Writes one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper.gpu", description=__doc__)
    parser.add_argument("--network", default="medium_relu_adv")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--memory", type=float, default=50.0, help="GiB that arrays may take")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tf32", action="store_true", help="TF32 instead of float32 in the search")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    options = parser.parse_args()

    problems = load_problems(options.data / "cifar10" / "test.npz", options.images, EPS)
    network = networks.load(options.data / "networks" / "paper" / f"{options.network}.onnx")

    def run():
        return networks.bound(
            network, problems.lower, problems.upper, problems.rows, intermediate="ibp", rtol=1e-2,
            memory=options.memory,
        )  # fmt: skip

    precision = "tensorfloat32" if options.tf32 else "highest"
    with jax.default_matmul_precision(precision):
        result, cold = timed(run)
        seconds = [timed(run)[1] for _ in range(options.runs)]
        with phases() as by_phase:
            run()
        kinds = profile(run)
        size = 8192 if jax.default_backend() != "cpu" else 512
        speed = speeds(size, size**2 * 16)
    flops, entries = operations(network)
    passes = int(result.passes.sum())
    within = result.gap <= 1e-6 + 1e-2 * np.abs(result.bound)
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    floor = {
        "operations": passes * flops / speed["operations"],
        "activations": passes * entries * 8 / speed["bytes"],
    }
    record = {
        "network": options.network,
        "problems": int(within.size),
        "precision": precision,
        "device": device.device_kind,
        "within": float(within.mean()),
        "passes": {int(n): int(c) for n, c in zip(*np.unique(result.passes, return_counts=True),
                                                  strict=True)},
        "seconds": seconds,
        "cold": cold,
        "phases": dict(by_phase),
        "kernels": kinds,
        "peak bytes": memory,
        "operations of a pass": flops,
        "speeds": speed,
        "floor": floor,
        "over floor": min(seconds) / sum(floor.values()),
        "made": machine.made(),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
