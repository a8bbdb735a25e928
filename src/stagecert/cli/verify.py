"""`stagecert verify`: proves a property of a network, or finds a counterexample."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from stagecert.cli.ending import (
    ANSWERING,
    BAD_INPUT,
    FAILED,
    UNLIMITED,
    Ending,
    Watcher,
    end,
    guard,
    say,
)
from stagecert.errors import Disagreement, ProblemError
from stagecert.files import check_writable, write_whole

DECIDED, UNDECIDED, NO_CERTIFICATE, REJECTED = 0, 10, 4, 5
# Seconds for writing a search to a file before the process is ended.
SAVING = 1.5
# Lines of a counterexample that a terminal gets.
LONGEST = 24


def verify(
    model: Annotated[
        Path,
        typer.Argument(
            help="An ONNX file, .onnx or .onnx.gz, or \"[('f', 'f.onnx'), ('g', 'g.onnx')]\"; "
            "with --network, the property instead."
        ),
    ],
    property: Annotated[
        Path | None, typer.Argument(help="A VNN-LIB file, .vnnlib or .vnnlib.gz.")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE, the ONNX file of a network of the property; once for each."),
    ] = None,
    serialise_assignments: Annotated[
        Path | None,
        typer.Option(
            help="With --network: write a counterexample to this folder, as TensorProtos."
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds, the program's start included; none by default.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Write the proof of `unsat` to this file.")
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Say `unsat` without having the proof checked.")
    ] = False,
    result: Annotated[
        Path | None, typer.Option(help="Write the answer to this file, as VNN-COMP asks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answer only.")] = False,
    seed: Annotated[int, typer.Option(help="For the starting points of the attack.")] = 0,
    memory: Annotated[float, typer.Option(help="GiB that arrays may take.")] = 1.0,
    processes: Annotated[
        int | None,
        typer.Option(help="That share a long search; one for each core, up to 8, by default."),
    ] = None,
    relaxation: Annotated[
        str, typer.Option(help="What stands for a neuron on whole boxes: triangle or envelope.")
    ] = "triangle",
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the search in this file; interrupted, write it there."),
    ] = None,
) -> None:
    """Proves that no input violates a property, or finds one that does.

    The first word on standard output is the answer: unsat (there is no counterexample, and the
    independent checker has accepted the proof), sat (there is one, which ONNX Runtime confirmed; it
    follows), unknown or timeout.

    The exit status is 0 if the property was decided, 10 for unknown and timeout, 2 for bad input,
    3 for an error of the program, 4 if the answer is unsat but its certificate could not be
    written, and 5 if the answer is unknown because the checker rejects the proof. Ctrl-C and
    SIGTERM end the work with what is known by then; with --resume FILE the same command goes on
    from there, and the file is removed once there is an answer.

    `verify QUERY --network f=f.onnx` is the form of the VNN-LIB standard: a counterexample follows
    as it has it, and timeout is spelt timed-out.
    """
    begin = time.monotonic() - _age()
    outcome = _Outcome(result, certificate, as_json, quiet)
    outcome.resume = resume
    if timeout is not None and not timeout > 0:
        outcome.fail(f"--timeout must be positive, not {timeout:g}.", BAD_INPUT)
    if (property is None) != bool(network):
        outcome.fail(
            "Give a model and a property, or a property and --network NAME=FILE.", BAD_INPUT
        )
    if serialise_assignments is not None and not network:
        outcome.fail("--serialise-assignments needs --network NAME=FILE.", BAD_INPUT)
    outcome.standard, outcome.folder = bool(network), serialise_assignments
    if certificate is not None and unchecked:
        outcome.fail("A certificate is a checked proof: --unchecked makes none.", BAD_INPUT)
    for path in (result, certificate, resume):
        if path is not None:
            try:
                check_writable(path)
            except ProblemError as error:
                outcome.result = None if path == result else result
                outcome.fail(str(error), BAD_INPUT)
    deadline = None if timeout is None else begin + timeout
    guard(deadline, outcome)
    watcher = Watcher(deadline, outcome)
    watcher.start()
    try:
        from stagecert.cli import standard
        from stagecert.compiling import announce
        from stagecert.verify.verify import Verification
        from stagecert_check.properties import load

        set_up_jax()
        source: Any = model
        query: Any = property
        if network:
            outcome.query = query = load(model)
            source = standard.networks(network, query)
            if warning := standard.types_that_are_not_real(query):
                say(warning)
        announce(outcome.compiling)
        progress = None if quiet else outcome.progress()
        work = Verification(
            source,
            query,
            _left(timeout, begin, resume),
            check=not unchecked,
            seed=seed,
            memory=memory,
            relaxation=relaxation,  # type: ignore  (what is unknown is refused there)
            progress=progress,
            resume=resume,
            processes=processes,
        )
        outcome.work = work
        verdict = work.run()
        if certificate is not None and verdict.certificate is not None:
            # The property is decided: time no longer matters, but signals do.
            watcher.deadline = None
            outcome.tell(UNLIMITED)
            outcome.missing = _written(certificate, verdict.certificate)
    except Disagreement as error:
        outcome.fail(str(error), FAILED)
    except (ProblemError, OSError) as error:
        outcome.fail(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        outcome.interrupted()
    except Exception as error:  # whatever it is: an answer must be given, and it is "unknown"
        outcome.fail(f"{type(error).__name__}: {error}", FAILED)
    else:
        outcome.finish(verdict)


class _Outcome(Ending):
    """Prints and writes one answer, whoever has it first, and ends the process."""

    def __init__(self, result: Path | None, certificate: Path | None, as_json: bool, quiet: bool):
        super().__init__()
        self.result, self.as_json, self.quiet = result, as_json, quiet
        self.work: Any = None
        self.standard = False  # the form of the VNN-LIB standard
        self.folder: Path | None = None  # of assignments
        self.query: Any = None
        self.resume: Path | None = None  # the file of the search
        self.missing = certificate  # what an `unsat` still owes
        self._show: Callable[[str], None] | None = None
        self._drawn = self._told = False
        self._line = ""

    def progress(self):
        """A function that shows a line on a terminal, or None where there is none."""
        if sys.stderr is None or not sys.stderr.isatty():
            return None
        width = max(os.get_terminal_size(sys.stderr.fileno()).columns - 1, 20)

        def show(line: str) -> None:
            self._drawn, self._line = True, line
            sys.stderr.write("\r\x1b[K" + line[:width])
            sys.stderr.flush()

        self._show = show
        return show

    def compiling(self, text: str) -> None:
        """Says why nothing seems to happen: beside the line of progress, or in one of its own."""
        if self.quiet:
            return
        if self._show is not None:
            self._show(f"{self._line.partition('; ')[0]}; {text}" if self._line else text)
        elif not self._told:
            self._told = True
            say(text.capitalize())

    def finish(self, verdict) -> None:
        """Prints a verdict, writes it and ends the process."""
        self.claim()
        text = verdict.answer
        if verdict.counterexample is not None:
            text += "\n" + verdict.counterexample.text()
        if self.as_json:
            say(json.dumps(verdict.to_dict()), to_stdout=True)
        elif self.quiet:
            say(self._word(verdict.answer), to_stdout=True)
        else:
            # The summary follows the answer: a counterexample can fill many screens.
            say(self._word(verdict.answer), to_stdout=True)
            say(
                f"{verdict.reason} {sum(c.refuted for c in verdict.cases)} of "
                f"{len(verdict.cases)} cases refuted, {verdict.seconds:.1f} s"
            )
            if verdict.without is not None:
                say(
                    f"The model ends in {verdict.without}, and the property compares outputs: it "
                    "is decided, and bounded, without it."
                )
            if verdict.standing is not None:
                say(verdict.standing)
            if verdict.counterexample is not None and self.folder is None:
                say(self._shown(verdict.counterexample), to_stdout=True)
        if verdict.counterexample is not None and self.folder is not None:
            self._serialise(verdict.counterexample)
        if not verdict.decided:
            self._say_where_the_search_is()
        if verdict.answer == "unsat" and not verdict.checked:
            say("Warning: this answer rests on the search alone; its proof was not checked.")
        if verdict.rejected:
            say("Either the search or the checker is wrong. Please report this, with both files.")
            self._end(REJECTED, text)
        if self.work is not None and self.work.resume is not None:
            _forget_parts_of(self.work.resume)
        if verdict.answer == "unsat" and self.missing is not None:
            _forget_parts_of(self.missing)
            say(f"{self.missing} was not written.")
            self._end(NO_CERTIFICATE, text)
        if self.missing is not None and verdict.answer != "unsat" and not self.quiet:
            say(f"There is no certificate, and no file {self.missing}: only unsat has a proof.")
        self._end(DECIDED if verdict.decided else UNDECIDED, text)

    def timed_out(self) -> None:
        """The answer where time is up, from whichever thread."""
        self._partial("timeout", "Time is up.")

    def interrupted(self) -> None:
        """The answer where the user wants no more."""
        if self.work is not None and self.work.resume is not None:
            # The other thread writes the search down between two of its steps, and answers.
            self.work.interrupt()
            time.sleep(SAVING)
        self._partial("unknown", "Interrupted.")

    def fail(self, message: str, code: int) -> None:
        """Says what is wrong and ends the process; the answer is `unknown`."""
        self.claim()
        say(message)
        if code == FAILED:
            said = (
                json.dumps({"answer": "unknown", "reason": message}) if self.as_json else "unknown"
            )
            say(said, to_stdout=True)
        self._end(code, "error" if code == BAD_INPUT else "unknown")

    def _partial(self, answer: str, reason: str) -> None:
        if self.work is None:
            # Importing what a verdict is could wait for the other thread's imports.
            self.claim()
            self.lost(answer, reason)
        self.finish(self.work.so_far(answer, reason))

    def claim(self) -> None:
        """Also wipes the line of progress."""
        super().claim()
        self.tell(ANSWERING)
        if self._drawn:
            sys.stderr.write("\r\x1b[K")

    def lost(self, answer: str, reason: str, code: int | None = None) -> NoReturn:
        """The answer where the process that did the work has none; see `stagecert.cli.ending`."""
        say(reason)
        self._say_where_the_search_is()
        said = json.dumps({"answer": answer, "reason": reason}) if self.as_json else None
        say(said or self._word(answer), to_stdout=True)
        self._end(UNDECIDED if code is None else code, answer)

    def _word(self, answer: str) -> str:
        return "timed-out" if self.standard and answer == "timeout" else answer

    def _shown(self, counterexample) -> str:
        if not self.standard:
            return _shown(counterexample)
        from stagecert.cli import standard

        return standard.assignment(self.query, counterexample)

    def _serialise(self, counterexample) -> None:
        from stagecert.cli import standard

        try:
            assert self.folder is not None
            standard.serialise(self.query, counterexample, self.folder)
        except OSError as error:
            say(f"{self.folder} cannot be written: {error}")

    def _say_where_the_search_is(self) -> None:
        if self.resume is not None and not self.quiet:
            say(f"The search is in {self.resume}: the same command goes on with it."
                if self.resume.exists()
                else f"The search had not begun: there is no file {self.resume}.")  # fmt: skip

    def _end(self, code: int, text: str) -> NoReturn:
        if self.result is not None:
            try:
                write_whole(self.result, text + "\n")
            except OSError as error:
                say(f"{self.result} cannot be written: {error}")
                code = BAD_INPUT
        end(code)


def _shown(counterexample) -> str:
    """A counterexample: all of it, but to people on a terminal only as much as they would read."""
    lines = counterexample.text().splitlines()
    if len(lines) <= LONGEST or sys.stdout is None or not sys.stdout.isatty():
        return "\n".join(lines)
    outputs = len(counterexample.outputs)
    first = lines[: max(LONGEST - outputs, 4)]
    hidden = len(lines) - outputs - len(first)
    last = lines[-outputs:] if outputs <= LONGEST else lines[-4:]
    rest = f"... {hidden} inputs more: --result FILE, --json and pipes have all of it"
    return "\n".join([*first, rest, *last])


def set_up_jax() -> None:
    """Single precision by default, and compiled functions kept between runs."""
    import jax

    from stagecert.compiling import keep_programs

    jax.config.update("jax_enable_x64", False)
    keep_programs()


def _written(path: Path, certificate: bytes) -> Path | None:
    """None, or the path if the certificate could not be written there: the reason was said."""
    try:
        write_whole(path, certificate)
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror or error}.")
        return path
    return None


def _forget_parts_of(path: Path) -> None:
    """Interrupted writing leaves its temporary file behind."""
    for rest in path.parent.glob(f"{path.name}*.part"):
        rest.unlink(missing_ok=True)


def _left(timeout: float | None, begin: float, resume: Path | None) -> float | None:
    """Seconds for the work; some are kept back for the file of a search that is not finished."""
    if timeout is None:
        return None
    kept = 0.0 if resume is None else min(SAVING, 0.1 * timeout)
    return max(timeout - kept - (time.monotonic() - begin), 1e-3)


def _age() -> float:
    """For how many seconds the process has been running; zero where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return age if 0 <= age < 60 else 0.0
