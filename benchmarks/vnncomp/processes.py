"""How much several processes see of a search: `python -m benchmarks.vnncomp.processes`.

Some properties that one process does not decide in time are searched by one and by several, one
after the other, for the same time on the wall. Leave the machine alone meanwhile.
"""

import argparse
import json
import os

from benchmarks import data

RESULTS = data.ROOT / "benchmarks" / "results" / "vnncomp" / "processes.json"
DATA = data.DATA / "vnncomp"
PROPERTIES = (
    ("mnist_fc", "mnist-net_256x4", "prop_6_0.03"),
    ("mnist_fc", "mnist-net_256x4", "prop_9_0.05"),
    ("oval21", "cifar_wide_kw", "cifar_wide_kw-img6432-eps0.034771241830065365"),
)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for each")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="how many")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from stagecert.compiling import use_compilation_cache
    from stagecert.machine import made
    from stagecert.verify import verify

    use_compilation_cache()
    rows = []
    for folder, model, wanted in PROPERTIES:
        for count in options.processes:
            found = verify(
                DATA / folder / "onnx" / f"{model}.onnx",
                DATA / folder / "vnnlib" / f"{wanted}.vnnlib",
                options.timeout, processes=count,
            )  # fmt: skip
            rows.append({
                "set": folder, "model": model, "property": wanted, "processes": count,
                "answer": found.answer, "nodes": found.boxes, "closed": found.closed,
                "seconds": round(found.seconds, 2),
            })  # fmt: skip
            print(rows[-1], flush=True)
    held = {"timeout": options.timeout, "made": made(), "searches": rows}
    RESULTS.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
