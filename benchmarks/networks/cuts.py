"""Envelopes against linear programmes with all cuts: `python -m benchmarks.networks.cuts --help`.

On small networks HiGHS finds the optimum of the relaxation, by separation of cuts until none is
violated. What the search proves is compared with that, on 20 dense networks and 20 with a
convolution, two rows each; errors are relative to 1 + |optimum|.
"""

import argparse
import importlib.util
import json
import time

import numpy as np

from benchmarks.data import ROOT
from stagecert import machine
from stagecert.networks.bounding.envelope_bounds import Limits, improve
from stagecert.networks.bounding.programs import program_of
from stagecert_check.bounds import Facts
from stagecert_check.numbers import Arithmetic

RESULTS = ROOT / "benchmarks" / "results" / "envelope" / "cuts.json"
ROWS = np.array([[1.0, -1.0], [-1.0, 1.0]])


def _truth():
    """The networks and programmes of the tests."""
    path = ROOT / "tests" / "networks" / "envelope_truth.py"
    spec = importlib.util.spec_from_file_location("envelope_truth", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(truth, kind: str, seed: int, steps: tuple[int, int]) -> dict:
    """What is proven for both rows of one network, values, optima and CPU seconds."""
    chain, network = getattr(truth, kind)(seed)
    shape, radius = ((4,), 0.5) if kind == "dense" else (truth.CONVOLVED, 0.3)
    x = np.random.default_rng(seed + 100).normal(size=shape)
    low, high = (x - radius).reshape(1, -1), (x + radius).reshape(1, -1)
    program = program_of(network)
    facts = Facts(Arithmetic(), program, low, high).derive()
    arguments = tuple(facts.boxes[k] for k in program.activations)
    begin = time.process_time()
    found = improve(
        network, ((low, high),), arguments, ROWS[None], np.ones((1, 2), bool),
        np.full((1, 2), np.inf), Limits(steps, (0, 1e-6), None, 1.0), lambda *_: None,
    )  # fmt: skip
    cpu = time.process_time() - begin
    ends = [tuple(y[0].reshape(-1) for y in pair) for pair in arguments]
    best = [truth.least(chain, low[0], high[0], ends, row, True) for row in ROWS]
    plain = [truth.least(chain, low[0], high[0], ends, row, False) for row in ROWS]
    return {"kind": kind, "seed": seed, "bound": found.bound[0].tolist(),
            "value": found.value[0].tolist(), "triangle": plain, "optimum": best,
            "passes": found.passes[0].tolist(), "cpu": cpu}  # fmt: skip


def summary(records: list[dict]) -> dict:
    """The largest errors of bounds, and how many are small."""
    bound, best = (np.array([record[name] for record in records]) for name in ("bound", "optimum"))
    off = (best - bound) / (1 + np.abs(best))
    return {"rows": int(off.size), "largest": float(off.max()), "above": float(max(-off.min(), 0)),
            "within 1e-4": int(np.sum(off <= 1e-4)), "within 1e-3": int(np.sum(off <= 1e-3)),
            "cpu": float(sum(record["cpu"] for record in records))}  # fmt: skip


def main() -> None:
    """Runs all networks and writes what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks.cuts", description=__doc__)
    parser.add_argument("--steps", type=int, nargs=2, default=(60, 4000), help="of both kinds")
    parser.add_argument("--networks", type=int, default=20, help="of each kind")
    options = parser.parse_args()
    truth, records = _truth(), []
    for kind in ("dense", "convolved"):
        for seed in range(options.networks):
            with np.errstate(all="ignore"):
                records.append(measured(truth, kind, seed, tuple(options.steps)))
            one = summary(records[-1:])
            print(kind, seed, f"{one['largest']:.1e}", f"{one['cpu']:.1f} s", flush=True)
    found = summary(records)
    print(found)
    data = {"made": machine.made(), "steps": options.steps, "summary": found, "records": records}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(data, default=float) + "\n")


if __name__ == "__main__":
    main()
