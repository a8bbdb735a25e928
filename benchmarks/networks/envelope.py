"""Triangles and envelopes on VNN-COMP instances: `python -m benchmarks.networks.envelope --help`.

Both are searched for by the same steps in NumPy, on one CPU, with the same intervals (one pass back
for each unstable neuron), over whole boxes: nothing is split. Bounds are in the units of the
property's rows, minus their limits: a case is decided where one of its rows is above zero.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.data import DATA, ROOT
from stagecert import machine
from stagecert.networks.bounding.envelope import ROOM, Envelope
from stagecert.networks.bounding.envelope_search import search
from stagecert.verify.instances import spread
from stagecert.verify.models import OpenModel
from stagecert.verify.queries import Group, groups_of
from stagecert_check import properties
from stagecert_check.bounds import Facts
from stagecert_check.numbers import Arithmetic

RESULTS = ROOT / "benchmarks" / "results" / "envelope"
# Of each set, the networks by parts of their names.
NETWORKS = {
    "mnist_fc": ("mnist-net_256x2", "mnist-net_256x4"),
    "eran": ("mnist_relu_9_200",),
    "oval21": ("cifar_base_kw",),
}
STEPS = 40, 20


def _one(program, group: Group, room: int, facts: Facts) -> dict:
    """Certified bounds of all rows of a group, minus their limits, and what they took."""
    count = sum(int(np.prod(program.nodes[k].shape)) for k in program.outputs)
    matrix, limits = group.matrix[:, :count], group.limits
    begin = time.process_time()
    with np.errstate(all="ignore"):
        relaxation = Envelope(program, facts, room)
        start = relaxation.start(matrix, relaxation.default_slopes(len(matrix)))
        goal = np.full(len(matrix), np.inf)
        found = search(relaxation, matrix, start, STEPS, goal, (1e-6, 1e-2))
        bound = relaxation.certified(matrix, found.state)
    planes = {k: int(x.shape[1]) for (name, k), x in found.state.arrays.items() if name == "mix"}
    return {
        "bound": np.round(bound - limits, 7).tolist(),
        "value": np.round(found.value - limits, 7).tolist(),
        "passes": found.passes.tolist(),
        "cpu": time.process_time() - begin,
        "planes": list(planes.values()),
    }


def measured(folder: Path, model: str, text: str) -> dict | None:
    """Both relaxations on one instance; None where it has more boxes than one."""
    opened = OpenModel(folder / model)
    _, groups = groups_of(opened.network, properties.load(folder / text))
    if len(groups) != 1:
        return None
    (group,) = groups
    low, high = (np.array([x], float) for x in (group.inputs.lower64, group.inputs.upper64))
    begin = time.process_time()
    with np.errstate(all="ignore"):
        facts = Facts(Arithmetic(), opened.program, low, high).derive()
    intervals = time.process_time() - begin
    found = {
        name: _one(opened.program, group, room, facts)
        for name, room in (("triangle", 0), ("envelope", ROOM))
    }
    for one in found.values():
        bound = np.array(one["bound"])
        one["decided"] = bool(all(np.any(bound[places] > 0) for places in group.places))
    return {"model": model, "property": text, "intervals_cpu": intervals, **found}


def table(records: list[dict]) -> str:
    """Markdown: a row for each network."""
    lines = [
        "| network | instances | mean worst bound: triangle | envelope | decided: triangle | "
        "envelope | gap at most 1 %: triangle | envelope | CPU s: triangle | envelope | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(record["model"] for record in records):
        some = [record for record in records if record["model"] == model]
        cells = {}
        for kind in ("triangle", "envelope"):
            worst = [min(record[kind]["bound"]) for record in some]
            gaps = np.concatenate([_gaps(record[kind]) for record in some])
            cells[kind] = (
                f"{np.mean(worst):.4f}",
                sum(record[kind]["decided"] for record in some),
                f"{100 * np.mean(gaps <= 1e-2):.0f} %",
                np.mean([record[kind]["cpu"] for record in some]),
            )
        one, two = cells["triangle"], cells["envelope"]
        name = Path(model).name.removesuffix(".gz").removesuffix(".onnx")
        lines.append(
            f"| {name} | {len(some)} | {one[0]} | {two[0]} | {one[1]} | {two[1]} | {one[2]} | "
            f"{two[2]} | {one[3]:.2f} | {two[3]:.2f} | {two[3] / one[3]:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _gaps(one: dict) -> np.ndarray:
    bound, value = np.array(one["bound"]), np.array(one["value"])
    return (value - bound) / np.maximum(np.abs(bound), 1e-4)


def main() -> None:
    """Runs what was asked for, then writes records and table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.networks.envelope", description=__doc__
    )
    parser.add_argument("--sets", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--instances", type=int, default=6, help="of each network, evenly spread")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    records = []
    options.results.mkdir(parents=True, exist_ok=True)
    for name in options.sets:
        folder = DATA / "vnncomp" / name
        rows = [line.split(",") for line in (folder / "instances.csv").read_text().splitlines()]
        for part in NETWORKS[name]:
            mine = spread([row for row in rows if part in row[0]], options.instances)
            for model, text, *_ in mine:
                record = measured(folder, model.strip(), text.strip())
                if record is not None:
                    records.append(record)
                    _write(options.results, records)
                    print(table([record]).splitlines()[-1], flush=True)
    print(table(records))


def _write(folder: Path, records: list[dict]) -> None:
    data = {"made": machine.made(), "steps": STEPS, "records": records}
    text = json.dumps(data, default=float)
    (folder / "envelope.json").write_text(text + "\n")
    (folder / "envelope.md").write_text(table(records))


if __name__ == "__main__":
    main()
