"""What commands with long runs share: progress, interruptions, and one end of the process."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
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
from rich.text import Text

from stagecert.cli.ending import BAD_INPUT, FAILED, Ending, end, say
from stagecert.errors import Disagreement, ProblemError

if TYPE_CHECKING:
    from stagecert.sweeps import Store
    from stagecert.sweeps.sweep import Campaign

INTERRUPTED = 130
# Seconds between two lines of progress, where there is no terminal to draw a bar on.
LINE_EVERY = 30.0


class Running(Ending):
    """A run that shows its progress and ends the process once, whichever thread comes first.

    Args:
        items: what it works on, in the plural.
        verdict: the column of the rows that is counted.
        shown: the verdicts whose counts are shown from the start; others are once they occur.
        quiet: print errors only.
    """

    def __init__(self, items: str, verdict: str, shown: Sequence[str], quiet: bool):
        super().__init__()
        self.items, self.verdict, self.shown, self.quiet = items, verdict, shown, quiet
        # Writes the tables of what is known; returns how many are done, how many there are, where.
        self.export: Callable[[], tuple[int, int, Path]] | None = None
        self._bar: Progress | None = None
        self._told = False  # of a long compilation

    def progress(self, known: int, total: int) -> Callable[[list[Any]], None] | None:
        """Shows a bar; returns what is to be called with rows that were stored."""
        if self.quiet:
            return None
        console = Console(stderr=True)
        if known:
            console.print(f"{known} of {total} {self.items} are there already.", highlight=False)
        if self._bar is not None:
            self._bar.stop()
        self._bar = bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(self.items),
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
        count = dict.fromkeys(self.shown, 0)
        begin = last = time.monotonic()
        new = 0

        def show(rows) -> None:
            nonlocal last, new
            new += len(rows)
            for row in rows:
                verdict = row.data[self.verdict]
                count[verdict] = count.get(verdict, 0) + 1
            text = ", ".join(f"{n} {name}" for name, n in count.items())
            bar.update(task, advance=len(rows), description=text)
            now = time.monotonic()
            if not console.is_terminal and now - last > LINE_EVERY:
                last = now
                rate = new / (now - begin)
                say(
                    f"{known + new} of {total} {self.items}: {text} since the start, "
                    f"{rate:.3g}/s, {duration((total - known - new) / rate)} left"
                )

        return show

    def carry_out(
        self,
        work: "Campaign",
        folder: Path,
        write: "Callable[[Store], Any]",
        *,
        retry_errors: bool = False,
        last: bool = True,
        **options: Any,
    ) -> tuple[Any, int]:
        """Computes what is missing in a folder and writes the tables, even if it is interrupted.

        Args:
            work: what there is to do.
            folder: where.
            write: makes the files from a store, and returns a summary, which knows what is `done`.
            retry_errors: compute items again that had errors.
            last: whether nothing is computed afterwards.
            options: see `sweeps.run`.

        Returns:
            The summary, and how many items were there before.
        """
        from stagecert.sweeps import Store

        def write_beside() -> tuple[int, int, Path]:
            with Store.reader(folder) as store:
                return write(store).done, len(work.items), folder

        with work.store(folder) as store:
            if retry_errors:
                work.forget_errors(store)
            self.export = write_beside
            known = work.known(store)
            work.run(store, self.progress(known, len(work.items)), **options)
            if last:
                self.claim()
            return write(store), known

    def compiling(self, text: str) -> None:
        """Says once why nothing seems to happen, above the bar where there is one."""
        if self.quiet or self._told:
            return
        self._told = True
        if self._bar is not None and not self._bar.disable:
            self._bar.console.print(text.capitalize(), highlight=False)
        else:
            say(text.capitalize())

    def claim(self) -> None:
        """Also takes the bar away."""
        super().claim()
        if self._bar is not None:
            self._bar.stop()

    def interrupted(self) -> None:
        """Leaves a table of what is known, says how to go on, and ends the process."""
        self.claim()
        say("Interrupted.")
        if self.export is not None:
            try:
                done, total, out = self.export()
                say(
                    f"{done} of {total} {self.items} are done; {out} has their table. The same "
                    f"command goes on from there:\n  {command()}"
                )
            except (ProblemError, OSError) as error:
                say(error)
        end(INTERRUPTED)

    @contextmanager
    def failures(self, smaller: str) -> Iterator[None]:
        """Whatever goes wrong inside is said, and ends the process.

        `smaller` names the options that make a run take less memory.
        """
        try:
            yield
        except typer.Exit:
            raise
        except Disagreement as error:  # a fault of the program, not of the input
            self._fail(str(error), FAILED)
        except (ProblemError, OSError) as error:
            self._fail(str(error), BAD_INPUT)
        except MemoryError as error:
            self._fail(f"Out of memory ({error}); try a smaller {smaller}.", FAILED)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}", FAILED)

    def _fail(self, message: str, code: int) -> None:
        self.claim()
        say(message)
        end(code)


class _Speed(ProgressColumn):
    """Items a second."""

    def render(self, task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s")


def command() -> str:
    """What was typed to start this process."""
    # `python -m stagecert` is the same program.
    name = Path(sys.argv[0]).name
    return shlex.join(["stagecert" if name == "__main__.py" else name, *sys.argv[1:]])


def duration(seconds: float) -> str:
    """A time to be read by people: 42 s, 3 min, 5.1 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# -- the options --workers and --ray ---------------------------------------------------------------


# What a bare `--ray` stands for: any cluster, or one that is started.
ANY = "any"

Workers = Annotated[
    str | None,
    typer.Option(metavar="N|auto", help="Processes that compute; auto: one a GPU, or one a core."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Compute on the Ray cluster there, on this machine's, or on one that is started.",
    ),
]
WorkerMemory = Annotated[
    float | None, typer.Option(help="GiB of a worker process at which it is ended.")
]


def engine_of(workers: str | None, ray: str | None):
    """The engine that the options ask for; settles, too, that this process keeps off GPUs."""
    import jax

    from stagecert.sweeps import InProcess, Processes, Ray

    if workers is None and ray is None:
        return InProcess()
    count = None
    if workers not in (None, "auto"):
        if not workers.isdecimal() or int(workers) < 1:
            raise ProblemError(f"--workers must be auto or at least 1, not {workers}.")
        count = int(workers)
    # This process only hands out work; on a GPU it would take memory from its workers.
    jax.config.update("jax_platforms", "cpu")
    return Processes(count) if ray is None else Ray(None if ray == ANY else ray, count)


def with_address(arguments: list[str]) -> list[str]:
    """Gives a bare `--ray` its value: options have one in the parser that is used here.

    What follows is an address only if it looks like one, as paths do not: it has a colon, or is
    Ray's own `auto` or `local`.
    """
    result = list(arguments)
    for k, argument in enumerate(arguments):
        following = arguments[k + 1] if k + 1 < len(arguments) else ""
        if argument == "--ray" and ":" not in following and following not in ("auto", "local"):
            result[k] = f"--ray={ANY}"
    return result
