"""The HTML report of a sweep over instances."""

from pathlib import Path

import numpy as np

from stagecert.sweeps import Store
from stagecert.sweeps.report import About, Entry, write_report
from stagecert.verify.judging import VERDICTS
from stagecert.verify.sweep import Summary, Sweep


def report_of_instances(
    sweep: Sweep, store: Store, summary: Summary, path: Path, *, command: str = ""
) -> None:
    """Writes the report of a sweep.

    Args:
        sweep: the instances.
        store: where their rows are.
        summary: of these rows.
        path: of the report.
        command: what started the sweep.
    """
    answers = (
        f"{summary.known} have known answers; {summary.wrong} verdicts contradict them."
        if summary.known
        else "No answers to compare with were given."
    )
    about = About(
        title="Sweep over " + ", ".join(summary.sets),
        lead=(
            "unsat: proven that no input violates the property. sat: ONNX Runtime confirms an "
            f"input that does. {summary.instances} instances. {answers}"
        ),
        items="instances",
        groups="set",
        verdicts=VERDICTS,
        total=summary.instances,
        bound=(
            "The bound is a proven lower bound on the violation over all inputs: above zero, there "
            "is no counterexample. Of inputs that were split it is the least over the parts or, "
            "if not all of these are decided, what holds without splitting. A 0 of an unsat: "
            "proven to be above zero, by splits of neurons, which do not say how much."
        ),
        gap=(
            "The gap is the smallest violation met at an input, minus the bound. The former is "
            "computed in single precision, whose rounding can make it less than the latter. The "
            "search ends once an instance is decided, so the gap could often be smaller."
        ),
        facts=_certificates(sweep, store, summary),
        command=command,
        configuration=sweep.configuration,
    )
    write_report(path, about, _entries(sweep, store))


def _entries(sweep: Sweep, store: Store):
    for line in sweep.lines(store):
        found = line.data
        yield Entry(
            name=sweep.instances[found["index"]].name(),
            group=found["set"],
            verdict=found["verdict"],
            solved=found["verdict"] in ("sat", "unsat"),
            seconds=line.seconds,
            bound=found["bound"],
            gap=found["gap"],
            note=found["note"],
            wrong=found["wrong"],
        )


def _certificates(sweep: Sweep, store: Store, summary: Summary):
    if not summary.certificates:
        return ()
    facts: dict[str, str] = {name: str(count) for name, count in summary.certificates.items()}
    lines = [line for line in sweep.lines(store, attached=True) if line.times]
    for name, values, unit in (
        ("size", [line.size / 1000 for line in lines if line.size is not None], "kB"),
        ("seconds to prove", [line.times.get("proving", 0.0) for line in lines], "s"),
        ("seconds to check", [line.times.get("checking", 0.0) for line in lines], "s"),
    ):
        if values:
            facts[name] = f"median {np.median(values):.3g} {unit}, largest {max(values):.3g} {unit}"
    return (("Proofs of unsat, by the independent checker", facts),)
