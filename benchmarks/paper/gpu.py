"""All test images on one accelerator: `python -m benchmarks.paper.gpu --help`.

Certified bounds for every image and every other class, to a relative gap of 1 %, on the paper's
relaxation; with convolutions in float32, and in TF32. In each, the first run compiles; the runs
after it are timed, each as a whole: from boxes in the computer's memory to bounds, values and
statuses in the computer's memory. One more run is timed phase by phase, waiting for the device
after each, and one is profiled. Beside the time of the search stands its floor: what the device
would need for the multiplications alone, and for reading and writing every activation once a pass,
at the speeds that it shows in a matrix product and in a copy.
"""

import argparse
import collections
import contextlib
import functools
import json
import math
import re
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import DATA, ROOT, images_file, network_file, require
from benchmarks.networks.peers.common import load_problems
from stagecert import machine, networks
from stagecert.errors import ProblemError
from stagecert.files import write_whole
from stagecert.networks.bounding import accelerated, bounds, opening
from stagecert.networks.bounding.relaxation import split
from stagecert.networks.operations import Linear

EPS = 8 / 255
GAP = 1e-2
PRECISIONS = ("float32", "tf32")
# What kernels are called, and what they do; the first that fits counts.
KERNELS = (
    ("convolutions and matrix products",
     r"conv|cudnn|gemm|cutlass|xmma|cublas|dot|sm\d+_|nvjet|wgrad|dgrad|implicit"),
    ("copies to and from the host", r"memcpy(h2d|d2h)"),
    ("copies, transposes, gathers", r"memcpy|copy|transpose|gather|scatter|slice|concat|pad"),
    ("sums", r"reduce"),
    ("entrywise", r"fusion|add|multiply|select|maximum|broadcast|convert|loop"),
)  # fmt: skip
# (module, function) -> what it is called in the record.
SEARCH = ("search: first steps", "search: what is left, evaluated")
RIGOROUS = ("intervals", "wedges", "evaluation")
PHASES = (
    (accelerated, "enclose", "intervals"),
    (accelerated, "relax", "wedges"),
    (opening, "opened", SEARCH[0]),
    (accelerated, "checked_in_groups", "evaluation"),
    (accelerated, "_more_steps", SEARCH[1]),
    (accelerated, "_searched", SEARCH[1]),
)


def timed(function, *arguments):
    """(result, seconds), the device's work included."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - begin


@contextlib.contextmanager
def phases():
    """Seconds of each phase of `networks.bound`, with the device waited for after each."""
    seconds: dict[str, float] = collections.defaultdict(float)
    before = [getattr(module, name) for module, name, _ in PHASES]
    inside: list[str] = []

    def patched(function, label):
        def run(*arguments, **options):
            if inside:  # a phase within another belongs to that
                return function(*arguments, **options)
            inside.append(label)
            begin = time.perf_counter()
            try:
                result = function(*arguments, **options)
                leaves = jax.tree.leaves(result)
                jax.block_until_ready([x for x in leaves if isinstance(x, jax.Array)])
            finally:
                inside.pop()
            seconds[label] += time.perf_counter() - begin
            return result

        return run

    for (module, name, label), function in zip(PHASES, before, strict=True):
        setattr(module, name, patched(function, label))
    try:
        yield seconds
    finally:
        for (module, name, _), function in zip(PHASES, before, strict=True):
            setattr(module, name, function)


def profile(run, most: int = 20) -> dict:
    """Seconds of the device's kernels in one run: by program, by kind, and the largest."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    programs, kinds, kernels = (collections.Counter() for _ in range(3))
    for plane in data.planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name, seconds = event.name, event.duration_ns / 1e9
                kind = next((k for k, way in KERNELS if re.search(way, name.lower())), "other")
                program = str(dict(event.stats).get("hlo_module", "none"))
                program = re.sub(r"\(.*", "", program.removeprefix("jit_"))
                programs[program] += seconds
                kinds[kind] += seconds
                kernels[f"{program}: {name[:80]}"] += seconds
    return {
        "all": sum(kinds.values()),
        "by program": dict(programs.most_common(most)),
        "by kind": dict(kinds.most_common()),
        "largest": dict(kernels.most_common(most)),
    }


def operations(network) -> tuple[int, int]:
    """(floating-point operations of one pass, entries of all activations), for one input."""
    parts = split(network)
    count = 0
    for segment in (*(layer.segment for layer in parts.layers), parts.last):
        shapes = [x.shape for x in segment.pick(
            tuple(np.empty(s) for s in network.input_shapes),
            tuple(np.empty(layer.shape) for layer in parts.layers),
        )]  # fmt: skip
        for node in segment.nodes:
            read = [shapes[k] for k in node.arguments]
            shapes.append(node.shape)
            if isinstance(node.operation, Linear):
                count += 2 * node.operation.terms(node.weights, *read) * math.prod(node.shape)
    return count, sum(math.prod(layer.shape) for layer in parts.layers)


def speeds(size: int, copied: int) -> dict[str, float]:
    """Operations a second of a matrix product, and bytes a second of a copy."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
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


def measured(run, network, runs: int) -> tuple[networks.Bounds, dict]:
    """The bounds, and what is on record of one precision."""
    result, cold = timed(run)
    seconds = [timed(run)[1] for _ in range(runs)]
    with phases() as by_phase:
        run()
    size = 8192 if jax.default_backend() != "cpu" else 512
    speed = speeds(size, 128 * size**2)
    count, entries = operations(network)
    passes = int(result.passes.sum())
    search = sum(by_phase[name] for name in SEARCH)
    floor = {
        "operations": passes * count / speed["operations"],
        "activations": passes * entries * 8 / speed["bytes"],
    }
    record = {
        "within": float((result.gap <= GAP * np.abs(result.bound)).mean()),
        "mean bound": float(result.bound.mean()),
        "passes": {
            int(n): int(c) for n, c in zip(*np.unique(result.passes, return_counts=True),
                                           strict=True)
        },
        "seconds": seconds,
        "cold": cold,
        "phases": dict(by_phase),
        "search": search,
        "rigorous": sum(by_phase[name] for name in RIGOROUS),
        "speeds": speed,
        "floor": floor,
        "search over floor": search / sum(floor.values()),
        "kernels": profile(run),
    }  # fmt: skip
    return result, record


def main() -> None:
    """Writes one JSON file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.gpu", description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--network", default="medium_relu_adv")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--memory", type=float, default=40.0, help="GiB that arrays may take")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--precision", choices=(*PRECISIONS, "both"), default="both")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "paper" / "gpu.json")
    parser.add_argument("--bounds", type=Path, help="also write bounds, values, passes: .npz")
    options = parser.parse_args()
    if jax.default_backend() == "cpu":
        parser.error("JAX sees no accelerator here.")
    try:
        require(options.data, [options.network])
    except ProblemError as error:
        parser.error(str(error))

    problems = load_problems(images_file(options.data), options.images, EPS)
    network = networks.load(network_file(options.data, options.network))
    count, entries = operations(network)
    device = jax.devices()[0]
    record: dict = {
        "network": options.network,
        "problems": int(problems.rows.shape[0] * problems.rows.shape[1]),
        "device": device.device_kind,
        "memory": options.memory,
        "operations of a pass": count,
        "activations": entries,
    }

    def run(precision):
        return networks.bound(
            network, problems.lower, problems.upper, problems.rows, intermediate="ibp",
            rtol=GAP, atol=0.0, memory=options.memory, precision=precision,
        )  # fmt: skip

    chosen = list(PRECISIONS) if options.precision == "both" else [options.precision]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for precision in chosen:
        _, products = bounds.PRECISIONS[precision]
        with jax.default_matmul_precision(products):  # of the measured speeds
            again = functools.partial(run, precision)
            result, record[precision] = measured(again, network, options.runs)
        if "peak bytes" not in record:
            record["peak bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
            record["copying inputs"] = timed(lambda: result.inputs)[1]  # noqa: B023
            record["copying intervals"] = timed(lambda: result.intermediate)[1]  # noqa: B023
            if options.bounds is not None:
                found = dict(bound=result.bound, value=result.value, passes=result.passes)
                np.savez_compressed(options.bounds, **found)
        record["made"] = machine.made()
        write_whole(options.out, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
