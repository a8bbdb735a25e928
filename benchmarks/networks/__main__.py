"""Bounds on the 12 networks of the paper, beside the peers: `python -m benchmarks.networks --help`.

Each network runs in a process of its own, on one CPU; the peers right after us, so that all see the
same machine. Results are one JSON file for each tool and network; the table is made from them.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.data import DATA, ROOT, images_file, network_file
from stagecert import machine

RESULTS = ROOT / "benchmarks" / "results" / "networks"
NETWORKS = [
    f"{size}_{activation}_{training}"
    for size in ("tiny", "small", "medium")
    for activation in ("relu", "softplus")
    for training in ("adv", "ibp")
]
OURS = "benchmarks.networks.ours"
PEERS = {
    "auto_lirpa": ["--steps", "2,5,20"],
    "jax_verify": ["--steps", "5,20,50"],
}


def _run(python, module: str, network: str, images: int, out: Path, more: list[str], cpu: int):
    command = [
        "taskset", "-c", str(cpu), python, "-m", module,
        "--network", str(network_file(DATA, network)),
        "--images", str(images), "--data", str(images_file(DATA)),
        "--out", str(out), *more,
    ]  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    record = json.loads(out.read_text())
    record["made"] = machine.made()
    out.write_text(json.dumps(_rounded(record)) + "\n")


def _rounded(value):
    """Numbers to nine digits: files are read by people and kept by git."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [_rounded(x) for x in value]
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    return value


def _load(results: Path, tool: str, network: str) -> dict | None:
    path = results / f"{tool}_{network}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _share(passes, limit) -> str:
    return f"{100 * np.mean(np.asarray(passes) <= limit):.1f}"


def tables(results: Path) -> str:
    """Markdown tables from the result files."""
    lines = [
        "Passes and CPU time to a certified gap (nonconvex; 9 objectives an image).",
        "",
        "| network | images | ibp, ms | backward, ms | 1 %: ms | in 8 passes, % | 0.1 %: ms | "
        "reached, % | passes 50/95 % | 0.01 %: ms | reached, % |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in NETWORKS:
        ours = _load(results, "stagecert", name)
        if ours is None:
            continue
        count = 9 * ours["images"]
        by = {(m["method"], m.get("rtol")): m for m in ours["methods"]}
        ms = {key: f"{1e3 * m['cpu'] / count:.2f}" for key, m in by.items()}
        one, tenth = (by["nonconvex", r] for r in (1e-2, 1e-3))
        hundredth = by.get(("nonconvex", 1e-4))
        last = "| not run |"
        if hundredth is not None:
            last = f"{ms['nonconvex', 1e-4]} | {100 * hundredth['within']:.1f} |"
        middle, most = np.percentile(tenth["passes"], [50, 95])
        lines.append(
            f"| {name} | {ours['images']} | {ms['ibp', None]} | {ms['backward', None]} | "
            f"{ms['nonconvex', 1e-2]} | {_share(one['passes'], 8)} | {ms['nonconvex', 1e-3]} | "
            f"{100 * tenth['within']:.1f} | {middle:.0f} / {most:.0f} | {last}"
        )
    lines += [
        "",
        "CPU time to an equal bound: the peer's time over ours, at the fewest steps of ours whose "
        "mean bound is at least the peer's (up to 1e-5, relative: the peers' rounding).",
        "",
        "| network | peer | images | steps | peer's ms | peer's mean bound | our steps | our ms | "
        "our mean bound | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in NETWORKS:
        ours = _load(results, "stagecert", name)
        for peer in PEERS:
            theirs = _load(results, peer, name)
            if theirs is None or (ours is None and theirs.get("settings")):
                continue
            if not theirs.get("settings"):
                lines.append(f"| {name} | {peer} | | | no relaxation of SoftPlus | | | | | |")
            for setting in theirs.get("settings", []):
                lines.append(_comparison(name, peer, ours, theirs, setting))
    return "\n".join(lines) + "\n"


def _comparison(name, peer, ours, theirs, setting) -> str:
    bounds = np.asarray(setting["bounds"])
    images = len(bounds)
    cost = 1e3 * setting["process_seconds"] / bounds.size
    start = (
        f"| {name} | {peer} | {images} | {setting['steps']} | {cost:.2f} | {bounds.mean():.4f} |"
    )
    for entry in ours["curve"]:
        mine = np.asarray(entry["bounds"])
        mean = mine[:images].mean()
        # The peers compute in single precision, and their bounds may be above the truth by that.
        if mean >= bounds.mean() - 1e-5 * np.abs(bounds).mean():
            own = 1e3 * entry["cpu"] / mine.size
            return f"{start} {entry['steps']} | {own:.2f} | {mean:.4f} | {cost / own:.1f} |"
    last = np.asarray(ours["curve"][-1]["bounds"])[:images].mean()
    return f"{start} not reached | | {last:.4f} | |"


def main() -> None:
    """Runs what was asked for, then writes the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--images", type=int, default=36)
    parser.add_argument("--tools", nargs="+", default=["stagecert", *PEERS])
    parser.add_argument("--peers-python", help="the Python that has the peers installed")
    parser.add_argument("--peer-images", type=int, help="fewer images for the peers")
    parser.add_argument("--tolerances", nargs="+", default=["1e-2", "1e-3", "1e-4"])
    parser.add_argument("--cpu", type=int, default=0, help="the CPU to run on")
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder to write to; one for each machine"
    )
    parser.add_argument("--tables", action="store_true", help="run nothing, write the tables")
    options = parser.parse_args()
    results = options.results
    results.mkdir(parents=True, exist_ok=True)
    for network in [] if options.tables else options.networks:
        for tool in options.tools:
            out = results / f"{tool}_{network}.json"
            if options.missing and out.exists():
                continue
            print(f"{tool} on {network}", flush=True)
            if tool == "stagecert":
                more = ["--tolerances", *options.tolerances]
                _run(sys.executable, OURS, network, options.images, out, more, options.cpu)
            elif options.peers_python:
                images = options.peer_images or options.images
                module = f"benchmarks.networks.peers.{tool}"
                _run(options.peers_python, module, network, images, out, PEERS[tool], options.cpu)
    text = tables(results)
    (results / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
