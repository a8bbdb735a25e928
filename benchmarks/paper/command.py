"""The paper's experiments beside baselines, from one command.

    python -m benchmarks.paper                        every table and figure, 20 images
    python -m benchmarks.paper --only table1 --networks tiny_relu_adv
    python -m benchmarks.paper --all                  all test images
    python -m benchmarks.paper --report-only          tables, figures, report from the data files

A run that was stopped goes on where it was. Needs the extra `paper`.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.data import DATA, ROOT, images_file, read_images, require
from benchmarks.paper import plan, records, report, sweep, tables
from stagecert.errors import ProblemError
from stagecert.machine import cores
from stagecert.sweeps import Store
from stagecert.sweeps.engines import check_workers

RESULTS = ROOT / "build" / "paper"  # not where committed results are: parts would replace them
IMAGES = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--images", type=int, default=IMAGES, help="test images; default %(default)s")
    many.add_argument("--all", action="store_true", help="all test images")
    parser.add_argument(
        "--unlimited",
        action="store_true",
        help="dear methods on all these images too; otherwise on a few, as the tables say",
    )
    parser.add_argument("--networks", nargs="+", choices=plan.NETWORKS, metavar="NAME",
                        help=f"of {', '.join(plan.NETWORKS)}; default: all")  # fmt: skip
    parser.add_argument("--methods", nargs="+", choices=_methods(), metavar="NAME",
                        help=f"of {', '.join(_methods())}; default: all")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=report.PARTS, default=list(report.PARTS),
                        metavar="PART", help=f"of {', '.join(report.PARTS)}")  # fmt: skip
    parser.add_argument(
        "--traces", nargs="+", choices=plan.NETWORKS, default=list(plan.TRACED), metavar="NAME",
        help="the networks whose searches are drawn; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, default=DATA,
        help="the folder with cifar10/test.npz and networks/paper; default: $STAGECERT_DATA",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for results")
    parser.add_argument(
        "--workers", type=int, default=min(2, cores()),
        help="processes that compute, each in one thread; 1: this process, with threads; "
        "default %(default)s",
    )  # fmt: skip
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--update-page", action="store_true",
                        help="put tables and figures into docs/paper.md, too")  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="say what would be run, run nothing")
    return parser


def _methods() -> list[str]:
    return [run.name for run in plan.RUNS.values() if run.kind == "method"]


# What each part needs: the training of its networks, and the kind of its runs.
_NEEDS = {
    "table1": ("adv", "method"),
    "table2": ("adv", "method"),
    "ibp-table1": ("ibp", "method"),
    "ibp-table2": ("ibp", "method"),
    "degeneracy": ("", "method"),
    "checks": ("", "method"),
    "traces": ("", "trace"),
    "distances": ("", "trace"),
}
_RUNS_OF = {
    "table2": ("deepverify", "paper", "ours"),
    "ibp-table2": ("deepverify", "paper", "paper-fixed", "ours"),
    "degeneracy": ("paper", "paper-fixed", "ours-tight"),
    "distances": ("trace-paper",),
}


def works(options: argparse.Namespace, images: int) -> list[plan.Work]:
    """What the chosen parts need on the chosen networks by the chosen methods."""
    wanted: dict[str, plan.Work] = {}
    networks = options.networks or plan.NETWORKS
    for part in options.only:
        if part not in _NEEDS:
            continue
        training, kind = _NEEDS[part]
        runs = [
            name
            for name, run in plan.RUNS.items()
            if run.kind == kind
            and name in _RUNS_OF.get(part, (name,))
            and (options.methods is None or name.removeprefix("trace-") in options.methods)
        ]
        names = [name for name in networks if name.endswith(training)]
        if kind == "trace":
            names = [name for name in options.traces if options.networks is None or name in names]
        for work in plan.planned(names, runs, options.traces, images, options.unlimited):
            wanted[work.key] = work
    order = {name: place for place, name in enumerate(plan.RUNS)}
    place = {name: k for k, name in enumerate(plan.NETWORKS)}
    return sorted(wanted.values(), key=lambda w: (place[w.network], order[w.run.name], w.first))


@contextmanager
def _progress(total: int) -> Iterator[tuple]:
    """(called during an item, called after it) to be given to `sweep.compute`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bars:
        every = bars.add_task("all", total=total)
        one = bars.add_task("", total=None)

        def during(work: plan.Work, done: int, size: int) -> None:
            bars.update(one, description=work.key, completed=done, total=size)

        def after(work: plan.Work, computed: bool) -> None:
            bars.advance(every)
            if computed and not console.is_terminal:
                console.print(f"{work.network}: {work.run.name} from image {work.first}")

        yield during, after


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    out: Path = options.out
    problems: list[str] = []
    needs_data = any(part in _NEEDS for part in options.only)
    if options.report_only and not (out / "data").is_dir():
        print(f"error: {out / 'data'} is not there; run the benchmark first.", file=sys.stderr)
        return 2
    if options.plan and not needs_data:
        print("nothing to run")
        return 0
    if needs_data and not options.report_only:
        try:
            require(options.data, options.networks or plan.NETWORKS)
            pixels, _ = read_images(images_file(options.data))
            if pixels.ndim != 4:
                raise ProblemError("The test images must have an axis of channels, the last one.")
            images = len(pixels)
            if not options.all:
                if not 0 < options.images <= images:
                    raise ProblemError(f"--images must lie in 1 .. {images}.")
                images = options.images
            check_workers(options.workers)
            planned = works(options, images)
            if options.plan or not planned:
                print("\n".join(work.key for work in planned) or "nothing to run")
                return 0
            begin, spent = time.perf_counter(), _processor_seconds()
            computed, stopped = [], False
            with Store(out / "store", sweep.configuration(options.data)) as store:
                try:
                    with _progress(len(planned)) as (during, after):
                        sweep.compute(
                            planned, store, options.data, during,
                            lambda work, new: (after(work, new), computed.append(new)),
                            options.workers,
                        )  # fmt: skip
                except sweep.Failed as failed:
                    problems.append(str(failed))
                except KeyboardInterrupt:
                    stopped = True
                session = {
                    "command": _command(arguments),
                    "workers": options.workers,
                    "computed": sum(computed),
                    "minutes": round((time.perf_counter() - begin) / 60, 1),
                    "processor_minutes": round((_processor_seconds() - spent) / 60, 1),
                }
                records.write(out, store, planned, session)
            if stopped:
                print("Stopped. The same command goes on from here.", file=sys.stderr)
                return 130
        except ProblemError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    out.mkdir(parents=True, exist_ok=True)
    path = report.render(out)
    if options.update_page:
        report.update_page(out)
    print((out / "tables.md").read_text())
    print(f"report: {path}")
    for problem in problems:
        print(f"error: not computed:\n{problem}", file=sys.stderr)
    found = records.read(out)
    judged = [*tables.checks(found), *tables.crossings(found)]
    failed = [check for check in judged if not check.passed]
    print(f"checks: {len(judged) - len(failed)} of {len(judged)} passed")
    return 1 if problems else 0


def _processor_seconds() -> float:
    """Of this process and those that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _command(arguments: Sequence[str]) -> str:
    """The command line, with folders by their last name: no machine's paths in results."""
    shown = [
        Path(word).name if os.sep in word and Path(word).exists() else word for word in arguments
    ]
    return shlex.join(["python", "-m", "benchmarks.paper", *shown])
