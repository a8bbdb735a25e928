"""Runs the benchmarks of the core and writes their tables: `python -m benchmarks.core --help`."""

import argparse
import time

import jax

from benchmarks.core import (
    chain,
    compiling,
    gradient,
    inventory,
    memory,
    overhead,
    passes,
    peers,
    records,
    render,
    rigor,
)
from benchmarks.core.instances import zoo

PARTS = {
    "chain": chain.run,
    "gradient": gradient.run_cost,
    "jacobian": lambda: gradient.run_jacobian(passes.SOLVERS[1:]),
    "overhead": overhead.run,
    "memory": memory.run,
    "compile": compiling.run,
    "peers": peers.run,
    "inventory": inventory.run,
    "horizon": inventory.run_long,
    "rigor": rigor.run,
}


def _current(part: str, options) -> bool:
    held = records.load(part)
    if held is None or options.fresh:
        return False
    return options.keep or held["made"]["code"] == records.part_version(part)


def main() -> None:
    """Runs what is missing or out of date, then renders the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=("passes", *PARTS), help="parts to run")
    parser.add_argument("--cases", nargs="+", choices=list(zoo()), help="for passes: these cases")
    parser.add_argument("--solvers", nargs="+", choices=passes.SOLVERS, help="for passes")
    parser.add_argument("--jobs", type=int, default=2, help="for passes: processes at a time")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fresh", action="store_true", help="run again what is up to date")
    which.add_argument("--keep", action="store_true", help="only what is missing; keep old results")
    parser.add_argument("--tables", action="store_true", help="run nothing, render the tables")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    chosen = () if options.tables else options.only or ("passes", *PARTS)
    for part in chosen:
        begin = time.perf_counter()
        if part == "passes":
            passes.run(options)
        elif _current(part, options):
            print(f"{part}: up to date")
            continue
        else:
            print(f"{part}:", flush=True)
            PARTS[part]()
        print(f"{part}: {time.perf_counter() - begin:.0f} s", flush=True)
        render.write()
    if options.tables:
        render.write()


if __name__ == "__main__":
    main()
