"""Runs the fuzzer against every planted fault: `python -m benchmarks.fuzz mutants`.

A mutant is killed by the first graph on which a check fails that does not fail without the fault.
For faults of the importer, the gate is tried as well: with the fault in place, `verify` and the
prover are asked about a property that has a counterexample and that the wrong bound excludes; the
checker must not let an "unsat" through.

Mutants that the record has are not hunted again, so that a run that was ended goes on where it was,
and new mutants cost no more than themselves. Remove the record to hunt all of them.
"""

import collections
import functools
import json
import multiprocessing
import os
import random
from pathlib import Path

from benchmarks.fuzz import graphs
from benchmarks.fuzz.checks import Checks, Findings, Shares
from benchmarks.fuzz.mutants import Mutant, all_mutants

_ONLY = {
    "importer": Shares(ibp=0, backward=0, compiled=0, forged=0, rational=0, proofs=0, verify=0),
    "checker": Shares(ibp=0, backward=0, compiled=0, forged=1, rational=0.2, proofs=0, verify=0),
}


def hunt(mutant: Mutant, count: int, seed: int, gate: bool = True) -> dict:
    """How a mutant is killed; "killed_by" is None if it survives."""
    checks = Checks(_ONLY[mutant.side])
    record = {"mutant": mutant.name, "side": mutant.side, "killed_by": None, "graphs": count}
    try:
        for number in range(count):
            graph = graphs.write(seed, number, mutant.focus)
            with mutant.plant():
                found = checks.run(graph, random.Random(number), mutant.side)
            if not found.violations:
                continue
            usual = checks.run(graph, random.Random(number), mutant.side)
            known = {one["check"] for one in usual.violations}
            new = [one for one in found.violations if one["check"] not in known]
            if new:
                record.update(killed_by=new[0]["check"], graphs=number + 1,
                              what=new[0]["what"][-300:])  # fmt: skip
                break
        if mutant.side == "importer" and gate and record["killed_by"]:
            record["gate"] = _gate(mutant, checks, graph, found)
    finally:
        checks.close()
    return record


def _gate(mutant: Mutant, checks: Checks, graph: graphs.Graph, found: Findings) -> dict[str, str]:
    """What prover and `verify` say of a property that a wrong bound would prove."""
    if found.example is None:
        return {"bound": f"none: {found.violations[0]['check']}"}
    model, wanted = checks.files(graph.model.SerializeToString(), graph, [found.example])
    tried = Findings(graph.seen)
    with mutant.plant():
        proof = checks.certification(model, wanted)
        checks.ask(model, wanted, tried, checked=True)
    answer = "disagreement with ONNX Runtime" if tried.violations else " ".join(tried.done)
    return {"proof": proof, "verify": "unsat" if tried.done["verify unsat"] else answer}


def _one(name: str, count: int, seed: int) -> dict:
    return hunt(all_mutants()[name], count, seed)


def main(count: int, seed: int, jobs: int, out: Path) -> dict:
    """All mutants; the record that is written down."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    path = out / "mutants.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {f"{row['side']}: {row['mutant']}": row for row in kept}
    # Of a fault of the importer that was only hunted, the gate is still to be tried.
    known = {
        name: row for name, row in known.items()
        if name in all_mutants() and (row["side"] == "checker" or "gate" in row)
    }  # fmt: skip
    names = [name for name in all_mutants() if name not in known]
    context = multiprocessing.get_context("spawn")
    record = _record(seed, known)
    # A few mutants for each process: JAX keeps what it compiled.
    with context.Pool(jobs, maxtasksperchild=6) as pool:
        for row in pool.imap(functools.partial(_one, count=count, seed=seed), names):
            known[f"{row['side']}: {row['mutant']}"] = row
            print(f"{row['side']}: {row['mutant']}: {row['killed_by']}", flush=True)
            record = _record(seed, known)
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n")
    return record


def _record(seed: int, known: dict[str, dict]) -> dict:
    """What is written down, in the order of the mutants."""
    rows = [known[name] for name in all_mutants() if name in known]
    gates = [row.get("gate", {}) for row in rows]
    passed = [gate.get("proof") == "accepted" or gate.get("verify") == "unsat" for gate in gates]
    bad = [row for row, past in zip(rows, passed, strict=True) if past or row["killed_by"] is None]
    return {
        "kind": "mutants",
        "seed": seed,
        "mutants": len(rows),
        "killed": sum(row["killed_by"] is not None for row in rows),
        "killed_by": dict(
            collections.Counter(row["killed_by"] for row in rows if row["killed_by"])
        ),
        "gate": dict(collections.Counter(f"{k}: {v}" for gate in gates for k, v in gate.items())),
        "failures": bad,
        "rows": rows,
    }
