"""One image, one pass back for every unstable neuron: beside auto_LiRPA's CROWN, in one process.

`python -m benchmarks.networks.peers.crown`, in an environment that has auto_LiRPA as well
(see README.md). Both tools bound the same images one by one, in turns, on one thread: their CPU
times see the same machine. Ours are in float64 and hold in real arithmetic; theirs are in float32.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.data import DATA, images_file, network_file
from benchmarks.networks.__main__ import NETWORKS, RESULTS
from benchmarks.networks.peers import auto_lirpa, common
from stagecert import machine, networks

EPS = 8 / 255


def timed(function, *arguments):
    """The result, and CPU seconds."""
    begin = time.process_time()
    result = function(*arguments)
    return result, time.process_time() - begin


def run(name: str, images: int) -> dict:
    """Both tools on one network: the first image twice, because the first time compiles."""
    path = network_file(DATA, name)
    problems = common.load_problems(images_file(DATA), images, EPS)
    network = networks.load(path)
    options = {"conv_mode": "patches"}
    read = common.load_network(path)
    model = auto_lirpa.BoundedModule(
        auto_lirpa.torch_network(read), torch.zeros(1, 3, 32, 32), bound_opts=options
    )

    def ours(k: int) -> np.ndarray:
        some = slice(k, k + 1)
        boxes = problems.lower[some], problems.upper[some], problems.rows[some]
        return networks.bound(network, *boxes, method="backward", intermediate="backward").bound

    def theirs(k: int) -> np.ndarray:
        some = slice(k, k + 1)
        with torch.no_grad():
            found, _ = model.compute_bounds(
                x=(auto_lirpa._box(problems, some),),
                C=torch.from_numpy(problems.rows[some]),
                method="CROWN",
                bound_upper=False,
            )
        return found.numpy()

    record = {"network": name, "images": images, "load": round(os.getloadavg()[0], 1)}
    for tool, function in (("stagecert", ours), ("auto_lirpa", theirs)):
        record[tool] = {"first": timed(function, 0)[1], "cpu": [], "mean_bound": []}
    for k in range(images):
        for tool, function in (("stagecert", ours), ("auto_lirpa", theirs)):
            found, seconds = timed(function, k)
            record[tool]["cpu"].append(seconds)
            record[tool]["mean_bound"].append(float(found.mean()))
    return record


def main() -> None:
    """Writes one file for all networks, and prints a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.networks.peers.crown", description=__doc__)
    relu = [name for name in NETWORKS if "relu" in name]
    parser.add_argument("--networks", nargs="+", choices=relu, default=relu)
    parser.add_argument("--images", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "crown.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    print("| network | here, s | auto_LiRPA, s | ratio | mean bounds |\n|---|---|---|---|---|")
    for name in options.networks:
        records.append(run(name, options.images))
        mine, other = (records[-1][tool] for tool in ("stagecert", "auto_lirpa"))
        cpu = [float(np.median(tool["cpu"])) for tool in (mine, other)]
        means = [np.mean(tool["mean_bound"]) for tool in (mine, other)]
        print(
            f"| {name} | {cpu[0]:.3f} | {cpu[1]:.3f} | {cpu[1] / cpu[0]:.1f} | "
            f"{means[0]:.6g} / {means[1]:.6g} |",
            flush=True,
        )
        told = {"made": machine.made(), "torch": torch.__version__, "records": records}
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
