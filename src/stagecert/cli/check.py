"""`stagecert check`: whether a certificate proves that a property of a model holds."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stagecert.errors import ProblemError


def check(
    model: Annotated[Path, typer.Argument(help="An ONNX file, .onnx or .onnx.gz.")],
    property: Annotated[Path, typer.Argument(help="A VNN-LIB file, plain or gzipped.")],
    certificate: Annotated[Path, typer.Argument(help="The certificate.")],
    exact: Annotated[
        bool, typer.Option("--exact", help="Compute in rational numbers; for small networks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Checks a certificate, independently of what made it.

    The exit status is 0 if every step of it holds, 1 if it is rejected, and 2 if a file cannot be
    read.
    """
    try:
        from stagecert.rigor import check as run

        report = run(model, property, certificate, exact=exact, progress=_progress())
    except (ProblemError, ImportError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(asdict(report)))
    elif report.accepted:
        leaves = [bound for case in report.bounds for bound in case]
        least = f", the smallest bound is {min(leaves):.6g}" if leaves else ""
        cases = "1 case" if len(report.bounds) == 1 else f"{len(report.bounds)} cases"
        boxes = "1 box" if len(leaves) == 1 else f"{len(leaves)} boxes"
        print(f"accepted: {cases} refuted on {boxes}{least}")
    else:
        for reason in report.reasons:
            print("rejected: " + "".join(c if c.isprintable() else "?" for c in reason))
    raise typer.Exit(0 if report.accepted else 1)


def _progress():
    """A function that shows how far the check is on a terminal, or None where there is none."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None

    def show(finished: int, total: int) -> None:
        # The last line is wiped, so that the answer stands alone.
        line = f"{finished} of {total} boxes" if finished < total else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    return show
