"""Where else envelopes could serve: `python -m benchmarks.networks.envelope_uses`.

On instances of mnist_fc: intervals of arguments by envelopes, not only by one pass back, with what
the rows' bounds gain from them; and `verify` with and without envelopes before its tree, in CPU
seconds.
"""

import json
import time

import numpy as np

from benchmarks.data import DATA, ROOT
from benchmarks.networks.envelope import NETWORKS, _one
from stagecert import machine
from stagecert.networks.bounding.envelope import ROOM
from stagecert.networks.bounding.envelope_bounds import Limits, facts_of, tighten
from stagecert.verify import verify
from stagecert.verify.instances import spread
from stagecert.verify.models import OpenModel
from stagecert.verify.queries import groups_of
from stagecert_check import properties
from stagecert_check.bounds import Facts
from stagecert_check.numbers import Arithmetic

RESULTS = ROOT / "benchmarks" / "results" / "envelope" / "uses.json"
TIMEOUT = 60


def intervals(opened: OpenModel, group) -> dict:
    """Intervals by envelopes, and what rows gain: triangles and envelopes, before and after."""
    program = opened.program
    low, high = (np.array(x, float) for x in (group.inputs.lower64, group.inputs.upper64))
    begin = time.process_time()
    facts = Facts(Arithmetic(), program, low[None], high[None]).derive()
    middle = time.process_time()
    before = tuple(facts.boxes[k] for k in program.activations)
    limits = Limits((0, 0), (0, 0), None, 1.0)
    after = tighten(opened.network, ((low[None], high[None]),), before, limits, lambda *_: None)
    end = time.process_time()
    narrow = facts_of(program, low, high, [tuple(x[0] for x in pair) for pair in after])
    bends = [int(sum(np.sum((x[0] < 0) & (x[1] > 0)) for x in pairs)) for pairs in (before, after)]
    count = sum(int(np.prod(program.nodes[k].shape)) for k in program.outputs)
    rows = group.matrix[:, :count], group.limits
    found = [_one(program, *rows, room, known) for known in (facts, narrow) for room in (0, ROOM)]
    return {
        "unstable": bends,
        "cpu_passes": middle - begin,
        "cpu_envelopes": end - middle,
        "worst": [min(x["bound"]) for x in found],
        "cpu": [x["cpu"] for x in found],
    }


def decided(folder, model: str, text: str) -> dict:
    """What `verify` answers with and without envelopes, and after how many CPU seconds."""
    found = {}
    for relaxation in ("triangle", "envelope"):
        for _ in range(2):  # the second time nothing is compiled
            begin = time.process_time()
            verdict = verify(folder / model, folder / text, TIMEOUT, relaxation=relaxation)
            cpu = time.process_time() - begin
        found[relaxation] = {"answer": verdict.answer, "cpu": cpu,
                             "how": [case.how for case in verdict.cases]}  # fmt: skip
    return found


def main() -> None:
    """Runs all and writes what was found."""
    folder, records = DATA / "vnncomp" / "mnist_fc", []
    rows = [line.split(",") for line in (folder / "instances.csv").read_text().splitlines()]
    for part in NETWORKS["mnist_fc"][:2]:
        for model, text, *_ in spread([row for row in rows if part in row[0]], 5):
            model, text = model.strip(), text.strip()
            opened = OpenModel(folder / model)
            _, (group,) = groups_of(opened.network, properties.load(folder / text))
            with np.errstate(all="ignore"):
                record = {"model": model, "property": text, "intervals": intervals(opened, group)}
            if part == NETWORKS["mnist_fc"][0]:
                record["verify"] = decided(folder, model, text)
            records.append(record)
            print(json.dumps(record, default=float), flush=True)
            data = {"made": machine.made(), "timeout": TIMEOUT, "records": records}
            RESULTS.write_text(json.dumps(data, default=float) + "\n")


if __name__ == "__main__":
    main()
