"""The command-line program."""

import sys

import typer

from stagecert.cli.check import check
from stagecert.cli.demo import demo
from stagecert.cli.engine import with_address
from stagecert.cli.inspect import inspect
from stagecert.cli.robust import robust
from stagecert.cli.sweep import sweep
from stagecert.cli.verify import verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Stagewise convex problems, solved with a certificate.",
)
app.command()(demo)
app.command()(inspect)
app.command()(check)
app.command()(verify)
app.command()(robust)
app.command()(sweep)


@app.callback()
def _root() -> None:
    """Stagewise convex problems, solved with a certificate."""


def main() -> None:
    """Entry point of the program `stagecert`."""
    app(with_address(sys.argv[1:]))
