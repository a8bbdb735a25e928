"""Attacks on instances that have a counterexample: `python -m benchmarks.vnncomp.attacks`.

For every instance of VNN-COMP's sets that expected.csv calls sat, two series of attacks run until
they have a counterexample that ONNX Runtime confirms, or are out of rounds or time: short descents
only, and those that `verify` makes. Nothing is bounded or split. Compilation is not counted. The
data is looked for where STAGECERT_DATA says.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from benchmarks.vnncomp.__main__ import DATA, RESULTS
from stagecert.errors import ProblemError
from stagecert.machine import made
from stagecert.verify import Verification, attack
from stagecert.verify.instances import read_lists
from stagecert.verify.models import OpenModel

# Thirty short descents, and as many with ten long ones among them, as `verify` makes them at last.
SERIES = {"short": attack.SHORT * 10, "all": attack.LAST}


class Attack(Verification):
    """A verification that does nothing but attack."""

    plans: tuple[attack.Plan, ...] = ()

    def _decide(self):
        self._attack(self.plans)
        return self.so_far("timeout" if self._late() else "unknown")


def attacked(model: OpenModel, property: Path, plans, timeout: float) -> dict:
    """Whether there is a counterexample, and after how many seconds."""
    work = Attack(model, property, timeout)
    work.plans = plans
    begin = time.monotonic()
    found = work.run().answer == "sat"
    return {"found": found, "seconds": round(time.monotonic() - begin, 3)}


def compiled(model: OpenModel, property: Path) -> None:
    """Runs every descent once, so that all programs are there."""
    for plan in (attack.SHORT[0], *attack.LONG):
        work = Attack(model, property, 600)
        work.plans = (plan,)
        work.run()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for each series")
    parser.add_argument("--sets", nargs="*", default=[], help="all by default")
    parser.add_argument("--out", type=Path, default=RESULTS / "attacks.json")
    options = parser.parse_args()
    sets = options.sets or sorted(path.parent.name for path in DATA.glob("*/expected.csv"))
    held = json.loads(options.out.read_text()) if options.out.exists() else {"sets": {}}
    for name in sets:
        held["sets"][name] = compared(name, options.timeout)
        options.out.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
    print(table(held))


def compared(name: str, timeout: float) -> dict:
    """The results of one set."""
    folder, rows, left_out = DATA / name, [], []
    instances = read_lists([folder / "instances.csv"], answers=[folder / "expected.csv"], timeout=1)
    models: dict[Path, OpenModel] = {}
    for one in (one for one in instances if one.expected == "sat"):
        try:
            if one.model_path not in models:
                models[one.model_path] = OpenModel(one.model_path)
                compiled(models[one.model_path], one.property_path)
            row: dict = {"model": one.model, "property": one.property}
            for series, plans in SERIES.items():
                model = models[one.model_path]
                row[series] = attacked(model, one.property_path, plans, timeout)
        except (ProblemError, OSError) as error:
            left_out.append({"model": one.model, "why": str(error).splitlines()[0]})
            continue
        rows.append(row)
        print(name, one.name(), *(row[series] for series in SERIES), flush=True)
    return {"timeout": timeout, "made": made(), "left_out": left_out, "instances": rows}


def table(held: dict) -> str:
    """Found and median seconds for each set, in Markdown."""
    lines = [
        "| set | instances | found, short | found, all | median s, short | median s, all |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_set in sorted(held["sets"].items()):
        mine = of_set["instances"]
        if not mine:
            continue
        found = [str(sum(row[series]["found"] for row in mine)) for series in SERIES]
        medians = [
            f"{statistics.median(row[series]['seconds'] for row in mine):.2f}" for series in SERIES
        ]
        cells = [*found, *medians]
        lines.append(f"| {name} | {len(mine)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
