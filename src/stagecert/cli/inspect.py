"""`stagecert inspect`: what an ONNX model consists of, and whether stagecert can handle it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stagecert.errors import ProblemError


def inspect(
    model: Annotated[Path, typer.Argument(help="An ONNX file, .onnx or .onnx.gz.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Lists the nodes of an ONNX model and says which of them stagecert can handle.

    The exit status is 0 if it can handle all of them, 1 if not, and 2 if the file cannot be read.
    """
    try:
        from stagecert.networks.importers.onnx.model import describe

        found = describe(model)
    except (ProblemError, ImportError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        rows = [{**asdict(row), "supported": row.supported} for row in found.rows]
        print(json.dumps({**asdict(found), "rows": rows, "unsupported": len(found.refused)}))
    else:
        _print(str(model), found)
    raise typer.Exit(1 if found.refused else 0)


def _print(title: str, found) -> None:
    # Nodes are listed whole: a name or a reason that does not fit goes on in the next line.
    console = Console()
    table = Table(title=_plain(title), box=box.SIMPLE_HEAD)
    table.add_column("node", justify="right", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    table.add_column("name", overflow="fold")
    table.add_column("output", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("role", overflow="fold")
    table.add_column("relaxed", no_wrap=True)
    table.add_column("supported", overflow="fold")
    for row in found.rows:
        table.add_row(
            str(row.number),
            _plain(row.operator),
            _plain(row.name),
            ", ".join(map(_shape, row.shapes)),
            f"{row.parameters:,}",
            row.role,
            row.relaxation or "",
            _supported(row),
        )
    for what, values in (("input", found.inputs), ("output", found.outputs)):
        for name, shape in values:
            console.print(f"{what} {_plain(name)}: {_shape(shape)}", highlight=False)
    console.print(table)
    console.print(
        f"{found.parameters:,} parameters, {found.neurons:,} neurons (entries of activations, "
        f"maxima and products), {len(found.refused)} unsupported nodes",
        highlight=False,
    )


def _supported(row) -> str:
    if row.supported is None:
        return "not known: reads what a refused node makes"
    return "yes" if row.supported else _plain(f"no: {row.reason}")


def _shape(shape) -> str:
    if shape is None:
        return "?"
    return " x ".join(map(str, shape)) or "number"


def _plain(text: str) -> str:
    """A text from the file, which must not format the table or control the terminal."""
    return escape("".join(c if c.isprintable() else "?" for c in text))
