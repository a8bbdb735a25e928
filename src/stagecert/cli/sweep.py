"""`stagecert sweep`: decides all instances of VNN-COMP's lists."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from stagecert.cli.ending import Watcher
from stagecert.cli.running import (
    RayAddress,
    Running,
    WorkerMemory,
    Workers,
    command,
    duration,
    engine_of,
)
from stagecert.cli.verify import set_up_jax

WRONG = 1
REPORT = "report.html"
# Seconds beyond the longest time limit before a worker is ended: for steps that cannot be
# interrupted, compilations above all.
LEEWAY = 60.0


def sweep(
    lists: Annotated[
        list[Path], typer.Argument(help="Instance lists: model,property,seconds on each line.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results; made, or gone on with.")],
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for each instance, instead of the lists'.")
    ] = None,
    certificates: Annotated[
        bool, typer.Option("--certificates", help="Write the proof of each unsat to a file.")
    ] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Say unsat without having proofs checked.")
    ] = False,
    answers: Annotated[
        list[Path] | None,
        typer.Option(help="A CSV file of known answers to compare with; can be given repeatedly."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most so many instances of each list, evenly spread.")
    ] = None,
    memory: Annotated[float, typer.Option(help="GiB that the arrays of a worker may take.")] = 1.0,
    worker_memory: WorkerMemory = None,
    workers: Workers = None,
    ray: RayAddress = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Compute instances again that had errors.")
    ] = False,
    seed: Annotated[int, typer.Option(help="For the starting points of attacks.")] = 0,
    format: Annotated[str, typer.Option(help="Of the table: csv or parquet.")] = "csv",
    report: Annotated[bool, typer.Option(help=f"Write {REPORT}.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Decides all instances of VNN-COMP's lists, with a table and a report.

    Files are looked for in the folder of the list that names them, packed (.gz) or not. The output
    folder gets results.csv (or .parquet), times.csv, summary.json, report.html, certificates and
    counterexamples.
    A sweep that was interrupted or killed goes on where it was if the same command is given again.
    An instance that cannot be read or fails is an error in the table, and the others go on.

    The exit status is 0 when all instances are done, 1 if in addition an answer contradicts a known
    one or the checker rejects a proof, 2 for bad input, 3 for an error of the program, and 130 if
    the sweep was interrupted.
    """
    running = Running("instances", "verdict", ("unsat", "sat"), quiet)
    Watcher(None, running).start()
    with running.failures("--memory"):
        from stagecert.compiling import announce
        from stagecert.sweeps import InProcess, Store
        from stagecert.sweeps.tables import check_format
        from stagecert.verify.instances import read_lists
        from stagecert.verify.sweep import Sweep, report_of_instances

        check_format(format)
        set_up_jax()
        announce(running.compiling)
        engine = engine_of(workers, ray)
        instances = read_lists(lists, timeout=timeout, answers=answers or (), limit=limit)
        work = Sweep(
            instances, check=not unchecked, certificates=certificates, seed=seed, memory=memory,
            # What computes one instance at a time has all cores for it.
            processes=None if isinstance(engine, InProcess) else 1,
        )  # fmt: skip

        def write(store: Store):
            found = work.export(store, format)
            if report:
                report_of_instances(work, store, found, out / REPORT, command=command())
            return found

        summary, known = running.carry_out(
            work, out, write, retry_errors=retry_errors, engine=engine, memory=worker_memory,
            timeout=None if isinstance(engine, InProcess) else work.longest + LEEWAY,
        )  # fmt: skip
        if as_json:
            print(json.dumps(summary.to_dict()))
        elif not quiet:
            _print(summary, out, known, f"results.{format}", report)
        raise typer.Exit(0 if summary.sound else WRONG)


def _print(summary, out: Path, known: int, written: str, report: bool) -> None:
    console = Console()
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("set")
    rows = dict(summary.sets)
    if len(rows) > 1:
        rows["all"] = summary.verdicts
    for name in (*summary.verdicts, "solved"):
        table.add_column(name, justify="right")
    for name, counts in rows.items():
        solved = (counts["sat"] + counts["unsat"]) / max(sum(counts.values()), 1)
        table.add_row(name, *map(str, counts.values()), f"{solved:.1%}")
    console.print(table)
    lines = []
    if summary.known:
        lines.append(f"{summary.known} answers are known; {summary.wrong} verdicts are wrong.")
    if summary.certificates:
        counts = ", ".join(f"{n} {name}" for name, n in summary.certificates.items())
        lines.append(f"Proofs of unsat, by the independent checker: {counts}.")
    if summary.verdicts["error"]:
        lines.append("For what went wrong see the column note.")
    lines.append(f"{known} instances were there before; {duration(summary.seconds)} of work.")
    lines.append(f"The table is {out / written}" + (f", the report {out / REPORT}." if report
                 else "."))  # fmt: skip
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
