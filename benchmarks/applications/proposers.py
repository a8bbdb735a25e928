"""Clarabel in the place of our own engines: it proposes inputs, which are then certified.

    python -m benchmarks.applications.proposers --out RESULT.json

Seconds of CPU from arrays to value and bound, least of several runs, on the double integrators of
`python -m benchmarks.applications control`.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.applications.control import clarabel_point, masses, sparse_problem
from stagecert import machine
from stagecert.applications import control
from stagecert.applications.control.certificate import Certifier
from stagecert.applications.control.result import evaluate

RUNS = 5


def problem_of(data: dict) -> control.LinearQuadratic:
    return control.LinearQuadratic(
        data["A"], data["B"], data["Q"], data["R"], data["initial"],
        reference=data["reference"], lower=-1.0, upper=1.0,
    )  # fmt: skip


def by_clarabel(data: dict):
    """(value, bound) of Clarabel's inputs."""
    n, m = data["B"].shape
    inputs = clarabel_point(sparse_problem(data)).reshape(-1, n + m)[:, :m]
    problem = problem_of(data)
    found = evaluate(problem, Certifier(problem), problem.project(inputs))
    return found.value, found.bound


def by_engine(data: dict, engine: str):
    """(value, bound) of one of ours."""
    found = control.solve(problem_of(data), atol=0.0, rtol=1e-4, engine=engine)
    return found.value, found.bound


def main(out: Path | None) -> None:
    """All rows, printed and written."""
    rows = []
    for seed in (0, 1):
        data = masses(seed=seed)
        ways = {name: lambda name=name, data=data: by_engine(data, name)
                for name in ("auto", "newton", "interior")}  # fmt: skip
        ways["clarabel"] = lambda data=data: by_clarabel(data)
        for name, run in ways.items():
            seconds, value, bound = np.inf, np.inf, -np.inf
            for _ in range(RUNS):
                begin = time.process_time()
                value, bound = run()
                seconds = min(seconds, time.process_time() - begin)
            gap = (value - bound) / abs(bound)
            rows.append(dict(seed=seed, proposer=name, seconds=round(seconds, 3), gap=float(gap)))
            print(rows[-1])
    if out is not None:
        made = machine.made(("numpy", "scipy", "clarabel"))
        out.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    main(parser.parse_args().out)
