"""What a user waits for who calls `stagecert verify`: `python -m benchmarks.vnncomp.starting`.

For one network of each set: a property in a process with an empty cache of compiled programs, the
same one in a second process, another property of the same network in a third. Times are CPU time of
the process and its children, the start and the check of the proof included; seconds of the clock
stand beside them. The number of compiled programs is that of the cache's entries.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.data import ROOT
from benchmarks.vnncomp.__main__ import DATA, RESULTS

FILE = RESULTS / "starting.json"
# For each set a network and two of its properties. Where a set has one property for each network,
# the third process has another network of the same shape.
PROPERTIES = {
    "acasxu": [("onnx/ACASXU_run2a_1_1_batch_2000.onnx", "vnnlib/prop_4.vnnlib"),
               ("onnx/ACASXU_run2a_1_1_batch_2000.onnx", "vnnlib/prop_3.vnnlib")],
    "acasxu_v2": [("onnx/ACASXU_run2a_1_1_batch_2000.onnx", "vnnlib/prop_4.vnnlib"),
                  ("onnx/ACASXU_run2a_1_1_batch_2000.onnx", "vnnlib/prop_3.vnnlib")],
    "cersyve": [("onnx/lane_keep_finetune_con.onnx", "vnnlib/prop_lane_keep.vnnlib"),
                ("onnx/lane_keep_pretrain_con.onnx", "vnnlib/prop_lane_keep.vnnlib")],
    "collins_rul_cnn": [
        ("onnx/NN_rul_small_window_20.onnx",
         "vnnlib/robustness_2perturbations_delta5_epsilon10_w20.vnnlib"),
        ("onnx/NN_rul_small_window_20.onnx",
         "vnnlib/robustness_16perturbations_delta40_epsilon10_w20.vnnlib")],
    "dist_shift": [("onnx/mnist_concat.onnx", "vnnlib/index9021_delta0.13.vnnlib"),
                   ("onnx/mnist_concat.onnx", "vnnlib/index4312_delta0.13.vnnlib")],
    "eran": [
        ("nets/mnist_relu_9_200.onnx", "specs/mnist/mnist_spec_idx_8098_eps_0.01500.vnnlib"),
        ("nets/mnist_relu_9_200.onnx", "specs/mnist/mnist_spec_idx_8824_eps_0.01500.vnnlib")],
    "mnist_fc": [("onnx/mnist-net_256x2.onnx", "vnnlib/prop_0_0.03.vnnlib"),
                 ("onnx/mnist-net_256x2.onnx", "vnnlib/prop_1_0.05.vnnlib")],
    "oval21": [
        ("onnx/cifar_wide_kw.onnx", "vnnlib/cifar_wide_kw-img9062-eps0.0014379084967320263.vnnlib"),
        ("onnx/cifar_wide_kw.onnx", "vnnlib/cifar_wide_kw-img1909-eps0.0033986928104575162.vnnlib"),
    ],
    "reach_prob_density": [("onnx/vdp.onnx", "vnnlib/vdp_8.vnnlib"),
                           ("onnx/vdp.onnx", "vnnlib/vdp_6.vnnlib")],
    "rl_benchmarks": [("onnx/cartpole.onnx", "vnnlib/cartpole_case_safe_45.vnnlib"),
                      ("onnx/cartpole.onnx", "vnnlib/cartpole_case_unsafe_29.vnnlib")],
}  # fmt: skip
RUNS = ("first process", "second process", "another property")


def _found(path: Path) -> Path:
    return path if path.exists() else path.with_name(path.name + ".gz")


def decide(name: str, pair: tuple[str, str], cache: Path, timeout: float) -> dict:
    """One call of `stagecert verify`, with programs kept in a folder."""
    files = [str(_found(DATA / name / part)) for part in pair]
    command = [sys.executable, "-m", "stagecert", "verify", *files, "--timeout", str(timeout)]
    begin, environment = time.perf_counter(), {**os.environ, "XDG_CACHE_HOME": str(cache)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as child:  # type: ignore
        told = child.communicate()[0]
    return {
        "property": pair[1],
        "answer": told.split(maxsplit=1)[0] if told.strip() else "error",
        "seconds": round(time.perf_counter() - begin, 2),
        "programs": len(list(cache.rglob("*-cache"))),
    }


def measured(name: str, timeout: float) -> dict:
    """The three calls for a set."""
    first, other = PROPERTIES[name]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in (first, first, other):
            before = os.times()
            row = decide(name, pair, Path(folder), timeout)
            after = os.times()
            cpu = (after.children_user + after.children_system) - (
                before.children_user + before.children_system
            )
            rows.append({**row, "cpu": round(cpu, 2)})
            print(f"{name} {rows[-1]}", flush=True)
    return {"set": name, "network": first[0], "timeout": timeout, "runs": rows,
            "load": round(os.getloadavg()[0], 1)}  # fmt: skip


def table(records: list[dict]) -> str:
    """Markdown: CPU seconds, and the programs that were compiled by then."""
    lines = ["| set | network | answers | " + " | ".join(RUNS) + " | programs |", "|---" * 7 + "|"]
    for record in records:
        runs = record["runs"]
        times = " | ".join(f"{run['cpu']:.1f} s" for run in runs)
        answers = ", ".join(dict.fromkeys(run["answer"] for run in runs))
        compiled = " / ".join(str(run["programs"]) for run in runs)
        network = Path(record["network"]).stem
        lines.append(f"| {record['set']} | {network} | {answers} | {times} | {compiled} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs what was asked for, keeps what is known of the other sets, prints the table."""
    from stagecert.machine import made

    parser = argparse.ArgumentParser(prog="benchmarks.vnncomp.starting", description=__doc__)
    parser.add_argument("--sets", nargs="*", choices=PROPERTIES, default=list(PROPERTIES))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a property")
    options = parser.parse_args()
    kept = json.loads(FILE.read_text())["sets"] if FILE.exists() else []
    known = {record["set"]: record for record in kept}
    for name in options.sets:
        known[name] = measured(name, options.timeout)
        records = [known[k] for k in PROPERTIES if k in known]
        FILE.write_text(json.dumps({"made": made(), "sets": records}, indent=1) + "\n")
    print(table([known[k] for k in PROPERTIES if k in known]))


if __name__ == "__main__":
    main()
