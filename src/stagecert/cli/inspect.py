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
    console = Console()
    for what, values in (("input", found.inputs), ("output", found.outputs)):
        for name, shape in values:
            console.print(f"{what} {_plain(name)}: {_shape(shape)}", highlight=False)
    # Names are the first to go where the table does not fit: numbers and operators say as much.
    table = _table(title, found, names=any(row.name for row in found.rows))
    unlimited = console.options.update_width(10_000)
    if console.measure(table, options=unlimited).maximum > console.width:
        table = _table(title, found, names=False)
    console.print(table)
    for row in found.refused:
        name = f" '{_plain(row.name)}'" if row.name else ""
        console.print(
            f"Node {row.number}, {_plain(row.operator)}{name}: {_plain(row.reason)}.",
            highlight=False,
        )
    console.print(
        f"{found.parameters:,} parameters; {found.neurons:,} neurons, which are entries of "
        f"activations, maxima and products; {len(found.refused)} unsupported nodes",
        highlight=False,
    )


def _table(title: str, found, names: bool) -> Table:
    table = Table(title=_plain(title), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("node", justify="right", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    if names:
        table.add_column("name", no_wrap=True)
    # What does not fit goes on in the next line; nothing is cut.
    table.add_column("output", overflow="fold")
    table.add_column("weights", justify="right", no_wrap=True)
    table.add_column("role", overflow="fold")
    table.add_column("bounded by", overflow="fold")
    for row in found.rows:
        cells = [
            str(row.number),
            _plain(row.operator),
            _plain(row.name),
            ", ".join(_shape(shape, "x") for shape in row.shapes),
            f"{row.parameters:,}",
            row.role,
            _tightness(row),
        ]
        table.add_row(*(cells if names else cells[:2] + cells[3:]))
    return table


def _tightness(row) -> str:
    """What bounds know of a node, in a few words; docs/networks.md explains them."""
    if row.reason is not None:
        return "unsupported"
    if row.supported is None:
        return "not known"
    if row.relaxation == "hulls":
        if row.steps > 1:
            return f"{row.steps} hulls"
        return "sum of planes" if row.role == "product" else "sum of hulls"
    if row.relaxation == "hull" and row.role == "product":
        return "planes"
    return row.relaxation or ""


def _shape(shape, between: str = " x ") -> str:
    if shape is None:
        return "?"
    return between.join(map(str, shape)) or "number"


def _plain(text: str) -> str:
    """A text from the file, which must not format the table or control the terminal."""
    return escape("".join(c if c.isprintable() else "?" for c in text))
