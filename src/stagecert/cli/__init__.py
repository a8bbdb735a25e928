"""The command-line program.

The modules of the commands import little; what a command works with is imported when it runs. So
help and completion are there at once.
"""

import os
import sys
from typing import Annotated

import typer

import stagecert
from stagecert.cli.check import check
from stagecert.cli.demo import demo
from stagecert.cli.inspect import inspect
from stagecert.cli.robust import robust
from stagecert.cli.running import with_address
from stagecert.cli.supports import supports
from stagecert.cli.sweep import sweep
from stagecert.cli.verify import verify

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs of docstrings are wrapped anew, to the terminal
    # Commands inherit this from the program.
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(inspect)
app.command()(check)
app.command()(verify)
app.command()(robust)
app.command()(sweep)
app.command(context_settings={"ignore_unknown_options": True})(supports)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"stagecert {stagecert.__version__}")
        raise typer.Exit


def _name(wanted: bool) -> None:
    if wanted:
        print("stagecert")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    name: Annotated[
        bool, typer.Option("--name", callback=_name, is_eager=True, help="Print the name.")
    ] = False,
) -> None:
    """Proves properties of neural networks, and solves stagewise convex problems.

    Every answer comes with a certificate. `stagecert COMMAND -h` says what a command does, and what
    its exit status means.
    """


def main() -> None:
    """Entry point of the program `stagecert`."""
    # Before NumPy is loaded. The checker's products are many and small: where other programs keep
    # the cores busy, its threads wait for one another, and take up to sixty times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # By whatever way it was started: completion is set up for this name.
    app(with_address(sys.argv[1:]), prog_name="stagecert")
