"""Triangles and envelopes on VNN-COMP instances: `python -m benchmarks.networks.envelope --help`.

Both are searched for by the same steps in NumPy, on one CPU, with the same intervals (one pass back
for each unstable neuron), over whole boxes: nothing is split. Bounds are in the units of the
property's rows, minus their limits: a case is decided where one of its rows is above zero. Of the
paper's networks, a row is the true logit minus another, an instance an image.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.data import DATA, ROOT, images_file, network_file
from benchmarks.networks.peers.common import load_problems
from stagecert import machine, networks
from stagecert.networks.bounding.envelope import ROOM, Envelope
from stagecert.networks.bounding.envelope_bounds import facts_of
from stagecert.networks.bounding.envelope_search import search
from stagecert.networks.bounding.programs import program_of
from stagecert.verify.instances import spread
from stagecert.verify.models import OpenModel
from stagecert.verify.queries import groups_of
from stagecert_check import properties
from stagecert_check.bounds import Facts
from stagecert_check.numbers import Arithmetic

RESULTS = ROOT / "benchmarks" / "results" / "envelope"
# Of each set, the networks by parts of their names.
NETWORKS = {
    "mnist_fc": ("mnist-net_256x2", "mnist-net_256x4", "mnist-net_256x6"),
    "eran": ("mnist_relu_9_200",),
    "oval21": ("cifar_base_kw", "cifar_deep_kw", "cifar_wide_kw"),
}
PAPER = ("medium_relu_adv", "medium_relu_ibp")  # with `--sets paper`
STEPS = 40, 100


def _one(program, matrix: np.ndarray, limits: np.ndarray, room: int, facts: Facts) -> dict:
    """Certified bounds of all rows, minus their limits, and what they took."""
    begin = time.process_time()
    with np.errstate(all="ignore"):
        relaxation = Envelope(program, facts, room)
        start = relaxation.start(matrix, relaxation.default_slopes(len(matrix)))
        goal = np.full(len(matrix), np.inf)
        found = search(relaxation, matrix, start, STEPS, goal, (1e-6, 1e-2))
        bound = relaxation.certified(matrix, found.state)
        value = relaxation.value(matrix, found.inputs, found.at, {})
    planes = {k: int(x.shape[1]) for (name, k), x in found.state.arrays.items() if name == "mix"}
    return {
        "bound": np.round(bound - limits, 7).tolist(),
        "value": np.round(value - limits, 7).tolist(),
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
    count = sum(int(np.prod(opened.program.nodes[k].shape)) for k in opened.program.outputs)
    found = _both(opened.program, group.matrix[:, :count], group.limits, facts, group.places)
    return {"model": model, "property": text, "intervals_cpu": intervals, **found}


def _both(program, matrix: np.ndarray, limits: np.ndarray, facts: Facts, places) -> dict:
    found = {
        name: _one(program, matrix, limits, room, facts)
        for name, room in (("triangle", 0), ("envelope", ROOM))
    }
    for one in found.values():
        bound = np.array(one["bound"])
        one["decided"] = bool(all(np.any(bound[some] > 0) for some in places))
    return found


def of_images(name: str, count: int) -> Iterator[dict]:
    """Both relaxations on one of the paper's networks, an image at a time, eps 8/255.

    The checker's own intervals take minutes there, so they are those of `networks.bound`, whose
    programs are compiled for a first image that is not timed.
    """
    network = networks.load(network_file(DATA, name))
    problems = load_problems(images_file(DATA), count, 8 / 255)
    program = program_of(network)
    for turn, k in enumerate((0, *range(count))):
        low, high, rows = (x[k : k + 1] for x in (problems.lower, problems.upper, problems.rows))
        begin = time.process_time()
        result = networks.bound(
            network, low, high, rows, method="backward", intermediate="backward"
        )
        given = [tuple(np.asarray(x[0], float) for x in pair) for pair in result.intermediate]
        box = (np.asarray(x[0], float).reshape(-1) for x in (low, high))
        with np.errstate(all="ignore"):
            facts = facts_of(program, *box, given)
        intervals = time.process_time() - begin
        if turn == 0:
            continue
        matrix = np.asarray(rows[0], float)
        every = np.arange(len(matrix))[:, None]
        found = _both(program, matrix, np.zeros(len(matrix)), facts, every)
        yield {"model": name, "property": f"image {k}", "intervals_cpu": intervals, **found}


def table(records: list[dict]) -> str:
    """Markdown: a row for each network."""
    heads = ["network", "instances"]
    for name in ("mean worst bound", "mean bound", "decided", "rows with a gap of 1 %",
                 "passes of a row", "CPU s", "CPU s where all gaps are 1 %"):  # fmt: skip
        heads += [f"{name}: triangle", "envelope"]
    heads += ["ratio of CPU s", "with intervals"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model in dict.fromkeys(record["model"] for record in records):
        some = [record for record in records if record["model"] == model]
        kinds = [[record[kind] for record in some] for kind in ("triangle", "envelope")]
        cells = [Path(model).name.removesuffix(".gz").removesuffix(".onnx"), str(len(some))]
        for show in (_worst, _mean, _decided, _closed, _passes, _cpu, _cpu_of_closed):
            cells += [show(ones) for ones in kinds]
        cpu = [np.mean([one["cpu"] for one in ones]) for ones in kinds]
        before = np.mean([record["intervals_cpu"] for record in some])
        cells += [f"{cpu[1] / cpu[0]:.1f}", f"{(before + cpu[1]) / (before + cpu[0]):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _worst(ones: list[dict]) -> str:
    return f"{np.mean([min(one['bound']) for one in ones]):.4f}"


def _mean(ones: list[dict]) -> str:
    return f"{np.mean(np.concatenate([one['bound'] for one in ones])):.4f}"


def _decided(ones: list[dict]) -> str:
    return str(sum(one["decided"] for one in ones))


def _closed(ones: list[dict]) -> str:
    return f"{100 * np.mean(np.concatenate([_gaps(one) for one in ones]) <= 1e-2):.0f} %"


def _passes(ones: list[dict]) -> str:
    return f"{np.mean(np.concatenate([one['passes'] for one in ones])):.0f}"


def _cpu(ones: list[dict]) -> str:
    return f"{np.mean([one['cpu'] for one in ones]):.2f}"


def _cpu_of_closed(ones: list[dict]) -> str:
    mine = [one["cpu"] for one in ones if np.all(_gaps(one) <= 1e-2)]
    return f"{np.mean(mine):.2f} ({len(mine)})" if mine else "(0)"


def _gaps(one: dict) -> np.ndarray:
    bound, value = np.array(one["bound"]), np.array(one["value"])
    return (value - bound) / np.maximum(np.abs(bound), 1e-4)


def main() -> None:
    """Runs what was asked for, then writes records and table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.networks.envelope", description=__doc__
    )
    kinds = [*NETWORKS, "paper"]
    parser.add_argument("--sets", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--instances", type=int, default=5, help="of each network, evenly spread")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    records = []
    options.results.mkdir(parents=True, exist_ok=True)
    for record in _records(options.sets, options.instances):
        records.append(record)
        _write(options.results, records)
        print(table([record]).splitlines()[-1], flush=True)
    print(table(records))


def _records(sets: list[str], instances: int) -> Iterator[dict]:
    for name in sets:
        if name == "paper":
            for network in PAPER:
                yield from of_images(network, instances)
            continue
        folder = DATA / "vnncomp" / name
        rows = [line.split(",") for line in (folder / "instances.csv").read_text().splitlines()]
        for part in NETWORKS[name]:
            for model, text, *_ in spread([row for row in rows if part in row[0]], instances):
                record = measured(folder, model.strip(), text.strip())
                if record is not None:
                    yield record


def _write(folder: Path, records: list[dict]) -> None:
    data = {"made": machine.made(), "steps": STEPS, "records": records}
    text = json.dumps(data, default=float)
    (folder / "envelope.json").write_text(text + "\n")
    (folder / "envelope.md").write_text(table(records))


if __name__ == "__main__":
    main()
