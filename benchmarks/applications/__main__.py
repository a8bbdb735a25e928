"""Runs the benchmarks of the applications: `python -m benchmarks.applications --help`.

Each application is a module here with

- `PARTS`: names of its parts, each with a function that returns a list of records,
- `PACKAGES`: the packages whose versions are written down,
- `tables()`: the Markdown made from the result files.
"""

import argparse
import importlib
import importlib.util
import time

from benchmarks.applications import records

APPLICATIONS = tuple(
    name
    for name in ("control", "mdp", "isotonic")
    if importlib.util.find_spec(f"benchmarks.applications.{name}")
)


def main() -> None:
    """Runs what was asked for and renders the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.applications", description=__doc__)
    parser.add_argument("applications", nargs="*", help=f"of {', '.join(APPLICATIONS)}; else all")
    parser.add_argument("--only", nargs="+", help="parts to run")
    parser.add_argument("--tables", action="store_true", help="run nothing, render the tables")
    options = parser.parse_args()
    for name in options.applications:
        if name not in APPLICATIONS:
            parser.error(f"unknown application {name}; known are {', '.join(APPLICATIONS)}")
    for name in options.applications or APPLICATIONS:
        module = importlib.import_module(f"benchmarks.applications.{name}")
        for part, run in {} if options.tables else module.PARTS.items():
            if options.only and part not in options.only:
                continue
            begin = time.perf_counter()
            print(f"{name}, {part}:", flush=True)
            records.save(name, part, run(), module.PACKAGES)
            print(f"{name}, {part}: {time.perf_counter() - begin:.0f} s", flush=True)
        print(records.save_tables(name, module.tables()))


if __name__ == "__main__":
    main()
