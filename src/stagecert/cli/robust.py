"""`stagecert robust`: how robust a classifier is on a data set, image by image."""

import json
import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from stagecert.cli.verify import BAD_INPUT, FAILED, Watcher
from stagecert.errors import ProblemError

INTERRUPTED = 130
# Seconds between two lines of progress, where there is no terminal to draw a bar on.
LINE_EVERY = 30.0


def robust(
    model: Annotated[Path, typer.Argument(help="An ONNX classifier, .onnx or .onnx.gz.")],
    data: Annotated[Path, typer.Option(help="An .npz file with images and labels.")],
    eps: Annotated[str, typer.Option(help="How far each pixel may move: 8/255, or 0.03.")],
    out: Annotated[Path, typer.Option(help="Folder for the results; made, or gone on with.")],
    clip: Annotated[
        str, typer.Option(help="The range of pixels, which cuts the boxes: LOW,HIGH or none.")
    ] = "0,1",
    mean: Annotated[
        str, typer.Option(help="The model gets (pixel - mean) / std: a number or one a channel.")
    ] = "0",
    std: Annotated[str, typer.Option(help="See --mean.")] = "1",
    images: Annotated[str | None, typer.Option(help="The name of the images in the file.")] = None,
    labels: Annotated[str | None, typer.Option(help="The name of the labels in the file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take the first images only.")] = None,
    method: Annotated[
        str, typer.Option(help="The last method to try: ibp, backward, nonconvex or optimised.")
    ] = "nonconvex",
    restarts: Annotated[
        int, typer.Option(help="Starting points of the attack, for each other class.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="For the starting points of the attack.")] = 0,
    batch: Annotated[
        int | None, typer.Option(help="Images computed together; by default what fits.")
    ] = None,
    memory: Annotated[float, typer.Option(help="GiB that arrays may take.")] = 1.0,
    format: Annotated[str, typer.Option(help="Of the table: csv or parquet.")] = "csv",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Clean, attacked and certified accuracy on a data set, with a table of all images.

    The folder gets results.csv (or .parquet), summary.json, times.csv and counterexamples.npz. A
    run that was interrupted or killed goes on where it was if the same command is given again.

    The exit status is 0 when all images are done, 2 for bad input, 3 for an error of the program,
    and 130 if the run was interrupted.
    """
    outcome = _Outcome(out, format, quiet)
    Watcher(None, outcome).start()
    try:
        from stagecert.compiling import use_compilation_cache
        from stagecert.robust import Robustness
        from stagecert.robust.data import load
        from stagecert.robust.table import check_format

        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            use_compilation_cache()
        check_format(format)
        run = Robustness(
            model,
            *load(data, images, labels),
            eps,
            clip=None if clip == "none" else clip.split(","),
            mean=mean.split(","),
            std=std.split(","),
            method=method,
            restarts=restarts,
            seed=seed,
            limit=limit,
            batch=batch,
            memory=memory,
        )
        with run.store(out) as store:
            outcome.run = run
            known = len(store.known(run.keys))
            show = outcome.progress(known, len(run.items))
            run.run(store, show)
            outcome.claim()
            report = run.export(store, format)
    except (ProblemError, OSError) as error:
        outcome.fail(str(error), BAD_INPUT)
    except MemoryError as error:
        outcome.fail(f"Out of memory ({error}); try a smaller --batch or --memory.", FAILED)
    except Exception as error:
        outcome.fail(f"{type(error).__name__}: {error}", FAILED)
    else:
        if as_json:
            print(json.dumps(report.to_dict()))
        elif not quiet:
            _print(report, out, known)
        raise typer.Exit(0)


class _Outcome:
    """Ends the process once, by whichever thread comes first."""

    def __init__(self, out: Path, format: str, quiet: bool):
        self.out, self.format, self.quiet = out, format, quiet
        self.run: Any = None
        self._once = threading.Lock()
        self._bar: Progress | None = None

    def progress(self, known: int, total: int):
        """Shows a bar; returns what is to be called with the rows of each batch."""
        if self.quiet:
            return None
        console = Console(stderr=True)
        if known:
            console.print(f"{known} of {total} images are there already.", highlight=False)
        self._bar = bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("images"),
            _Speed(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        bar.start()
        task = bar.add_task("starting", total=total, completed=known)
        count = {"certified": 0, "attacked": 0}
        last = time.monotonic()

        def show(rows) -> None:
            nonlocal last
            for row in rows:
                if row.data["status"] in count:
                    count[row.data["status"]] += 1
            text = ", ".join(f"{n} {name}" for name, n in count.items())
            bar.update(task, advance=len(rows), description=text)
            if not console.is_terminal and time.monotonic() - last > LINE_EVERY:
                last = time.monotonic()
                done = int(bar.tasks[0].completed)
                print(f"{done} of {total} images: {text} since the start", file=sys.stderr)

        return show

    def claim(self) -> None:
        """Takes the right to end the process; a thread that comes later waits for that end."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()
        if self._bar is not None:
            self._bar.stop()

    def interrupted(self) -> None:
        """Leaves a table of what is known, says how to go on, and ends the process."""
        self.claim()
        print("Interrupted.", file=sys.stderr)
        if self.run is not None:
            from stagecert.sweeps import Store

            try:
                with Store.reader(self.out) as store:
                    report = self.run.export(store, self.format)
                print(
                    f"{report.done} of {report.images} images are done; {self.out} has their "
                    f"table. The same command goes on from there:\n  {_command()}",
                    file=sys.stderr,
                )
            except (ProblemError, OSError) as error:
                print(error, file=sys.stderr)
        self._end(INTERRUPTED)

    def timed_out(self) -> None:
        """There is no time limit."""

    def fail(self, message: str, code: int) -> None:
        """Says what is wrong and ends the process."""
        self.claim()
        print(message, file=sys.stderr)
        self._end(code)

    def _end(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Compilations run in threads that cannot be stopped in any other way.
        os._exit(code)


class _Speed(ProgressColumn):
    """Images a second."""

    def render(self, task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s")


def _command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _print(report, out: Path, known: int) -> None:
    console = Console()
    title = f"{report.done} images, eps {report.configuration['eps']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("accuracy")
    table.add_column("images", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    proven = ", ".join(f"{n} by {name}" for name, n in report.methods.items())
    for name, count, note in (
        ("clean", report.correct, "classified correctly"),
        ("attacked", report.correct - report.attacked,
         f"and no counterexample found ({report.attacked} have one)"),
        ("certified", report.certified, f"and proven: {proven}" if proven else "and proven"),
    ):  # fmt: skip
        table.add_row(name, str(count), f"{count / max(report.done, 1):.1%}", note)
    console.print(table)
    if report.unknown:
        console.print(
            f"{report.unknown} images are undecided: neither attacked nor certified.",
            highlight=False,
        )
    if report.errors:
        console.print(f"{report.errors} images have errors; see the column note.", highlight=False)
    new = report.done - known
    console.print(
        f"{new} images computed now, {known} before; {report.seconds:.1f} s in all. "
        f"The table is in {out}.",
        highlight=False,
        soft_wrap=True,
    )
