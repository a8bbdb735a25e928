"""`stagecert check`: whether a certificate proves that a property of a model holds."""

from pathlib import Path
from typing import Annotated

import typer

from stagecert_check import command


def check(
    model: Annotated[
        Path, typer.Argument(help="An ONNX file, .onnx or .onnx.gz, or several, as for verify.")
    ],
    property: Annotated[Path, typer.Argument(help="A VNN-LIB file, plain or gzipped.")],
    certificate: Annotated[Path, typer.Argument(help="The certificate.")],
    exact: Annotated[
        bool, typer.Option("--exact", help="Compute in rational numbers; for small networks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Checks a certificate, independently of what made it.

    The exit status is 0 if every step of it holds, 1 if it is rejected, and 2 if a file cannot be
    read. `stagecert-check` is the same check as a command of its own.
    """
    raise typer.Exit(command.run(model, property, certificate, exact=exact, as_json=as_json))
